"""`sluice-cloud desk`: a page on this machine, with curves and what is behind them."""

import webbrowser
from pathlib import Path
from threading import Thread

import click

from gateway.host.terminal import say
from spark.commands.cli_options import warehouse_option
from spark.commands.desk_session import asking, missing_package


@click.command(short_help="Open a page with curves, gaps and downloads.")
@warehouse_option
@click.option("--port", type=click.IntRange(0, 65_535), default=0, help="Port on 127.0.0.1. Default: a free one.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep the token in this file. Default: a new one at each start.",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
def desk(warehouse: str, port: int, token_file: Path | None, no_browser: bool) -> None:  # noqa: FBT001
    """Serve a page on this machine, and open it in a browser. Ctrl-C ends it.

    Choose a device, a metric and a span there. The same addresses give CSV, JSON and Parquet to Grafana, Excel and
    scripts. It answers 127.0.0.1 only, wants the token of the address that it prints, and changes nothing.
    """
    with asking(warehouse) as tables:
        try:
            from spark.desk.kept_tables import KeptWarehouse  # noqa: PLC0415 - as `asking` says
            from spark.page.serve import bound, kept_token, new_token, serve  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise missing_package(error) from error
        kept = KeptWarehouse(tables)
        try:
            token = new_token() if token_file is None else kept_token(token_file)
        except OSError as error:
            raise click.BadParameter(f"{token_file}: {error.strerror}", param_hint="--token-file") from error
        try:
            listening = bound(port)
        except OSError as error:
            raise click.BadParameter(
                f"port {port} of 127.0.0.1 cannot be had ({error.strerror}): leave --port out for a free one",
                param_hint="--port",
            ) from error
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}"
        say(f"The desk is open at {address}")
        say("Ctrl-C ends it.", err=True)
        if not no_browser:
            # A browser of the terminal's would wait for the page here.
            Thread(target=webbrowser.open, args=(address,), name="browser", daemon=True).start()
        serve(kept, listening, token)
