"""The `sluice` command."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from gateway import config_file
from gateway.buffer_schema import BufferFileError
from gateway.config_file import ConfigError
from gateway.settings import Settings

DEFAULT_CONFIG = Path("/etc/sluice/gateway.toml")
FINDING = 1
"""Exit code where something is wrong with the gateway; 2 is wrong usage, the configuration included."""

_config = click.option(
    "--config",
    "config",
    type=click.Path(path_type=Path),
    default=DEFAULT_CONFIG,
    show_default=True,
    help="The gateway's settings.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice", message="sluice %(version)s")
def main() -> None:
    """Sluice, the edge gateway: takes readings from sensors, keeps them on disk, forwards them to Kafka.

    An acknowledgement that a sensor gets means "on disk", whether Kafka is up or not.
    """


@main.command(epilog="Example: sluice run --config gateway.toml")
@_config
def run(config: Path) -> None:
    """Run the gateway until it is stopped (SIGTERM or Ctrl-C)."""
    from gateway import logs, pipeline  # noqa: PLC0415 - the other commands need none of it

    settings = _load(config)
    logs.set_up(settings.log)
    try:
        asyncio.run(_until_stopped(pipeline.run(settings)))
    except* (BufferFileError, OSError) as errors:
        raise click.ClickException("; ".join(str(error) for error in _leaves(errors))) from None


@main.command(epilog="Example: sluice check --config gateway.toml --create-topics")
@_config
@click.option("--create-topics", is_flag=True, help="Create the topics that are missing, with LogAppendTime.")
@_json
def check(config: Path, create_topics: bool, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Check the configuration, the buffer's place and the topics in Kafka; say what is wrong and what to do.

    Topics that routes make from variables (device-{stream}) are judged once they exist.
    """
    from gateway import logs  # noqa: PLC0415
    from gateway.check import check_buffer, check_kafka  # noqa: PLC0415

    settings = _load(config)
    logs.quieten_libraries()
    findings = [check_buffer(settings), *asyncio.run(check_kafka(settings, create=create_topics))]
    if as_json:
        click.echo(msgspec.json.encode(findings))
    else:
        for finding in findings:
            click.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.subject}: {finding.words}")
    sys.exit(0 if all(finding.ok for finding in findings) else FINDING)


@main.command(epilog="Example: sluice status --config gateway.toml")
@_config
@_json
def status(config: Path, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Show what waits in the buffer; works on a running gateway and on a stopped one."""
    from gateway.buffer_status import read_status  # noqa: PLC0415

    settings = _load(config)
    try:
        found = read_status(settings.buffer.path)
    except BufferFileError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    click.echo(f"gateway     {settings.gateway.id}, {'running' if found.running else 'not running'}")
    if found.oldest_wall_us is None:
        click.echo("buffer      empty: nothing waits for Kafka")
    else:
        oldest = datetime.fromtimestamp(found.oldest_wall_us / 1e6, UTC)
        click.echo(f"buffer      {found.rows:,} rows safe on disk, the oldest of {oldest:%Y-%m-%d %H:%M:%S} UTC")
    used = found.bytes_used / settings.buffer.bytes_max
    click.echo(f"space       {found.bytes_used:,} bytes, {used:.1%} of buffer.bytes_max")
    click.echo(f"quarantine  {found.quarantined:,} kept on this box{_reasons(found.quarantine_reasons)}")
    click.echo(f"devices     {len(found.devices):,} that send a sequence")
    for device in found.devices:
        seen = datetime.fromtimestamp(device.seen_us / 1e6, UTC)
        click.echo(f"            {device.device}, last stored {seen:%Y-%m-%d %H:%M:%S} UTC")


def _reasons(counts: dict[str, int]) -> str:
    if not counts:
        return ""
    return ": " + ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))


def _load(path: Path) -> Settings:
    try:
        return config_file.load(path)
    except ConfigError as error:
        for mistake in error.mistakes:
            place = f"{path}:{mistake.line}" if mistake.line else str(path)
            click.echo(f"{place}: {mistake.message}", err=True)
        click.echo("nothing was done: correct this first", err=True)
        sys.exit(2)


async def _until_stopped(daemon: Coroutine[None, None, None]) -> None:
    task = asyncio.ensure_future(daemon)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


if __name__ == "__main__":
    main()
