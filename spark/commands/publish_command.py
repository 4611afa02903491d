"""`sluice-cloud publish`: plain Delta tables for programs that cannot run the views."""

import sys
from datetime import date

import click

from gateway.host.terminal import say
from gateway.host.terminal_text import counted
from spark.commands.cli_options import warehouse_option
from spark.commands.desk_session import asking


@click.command(short_help="Write readings and windows as plain Delta tables.")
@click.argument("folder", metavar="DIR")
@warehouse_option
def publish(folder: str, warehouse: str) -> None:
    """Write readings and windows as plain Delta tables DIR/readings and DIR/windows.

    They are for programs that cannot run the views: polars, Power BI, Databricks, Delta Sharing. Both are partitioned
    by day (UTC) and sorted by device and time. Only days that have changed since the last run are written, each in one
    commit. Run it again to bring them up to date; `ingest` may go on meanwhile.
    """
    with asking(warehouse):
        from spark.desk import publishing  # noqa: PLC0415 - as `asking` says

        done = publishing.publish(warehouse, folder, _progress if sys.stderr.isatty() else lambda *_: None)
    of = f"as of batch {done.batch} of {done.version}"
    if not done.days:
        say(f"nothing has changed: {folder} is {of}")
    for name, days in done.days.items():
        say(f"{name}: {counted(days, 'day')} written, {done.rows[name]:,} rows, {of}")


def _progress(name: str, day: date, rows: int) -> None:
    say(f"{name} of {day}: {rows:,} rows", err=True)
