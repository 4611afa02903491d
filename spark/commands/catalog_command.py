"""`sluice-cloud catalog`: all streams and metrics, declared and seen."""

import click

from spark.commands.answers import Form, beside, print_relation
from spark.commands.asked_options import asks
from spark.commands.cli_options import streams_option, warehouse_option
from spark.commands.desk_session import asking
from spark.decode.codec_declarations import Streams
from spark.desk.asked import Asked, equal, where


@click.command(short_help="All streams and metrics, as declared and as they came.")
@warehouse_option
@streams_option
@asks("stream", "metric")
def catalog(warehouse: str, streams: Streams | None, asked: Asked, form: Form) -> None:
    """Show all streams and metrics: units and ranges as declared, and how many values came, of how many devices.

    `says` tells where declarations and data disagree: metrics that never came or are not declared, and rejects. Figures
    are of the values in windows.
    """
    columns = (
        *("stream", "metric", "unit", "range", "count", "devices", "min", "max", "first_time", "last_time", "says"),
        *(("codec", "declared_as", "doc") if form.is_whole else ()),
    )
    with asking(warehouse) as tables:
        from spark.desk.catalog import catalog_sql  # noqa: PLC0415 - as `asking` says

        limits = where(equal(asked, "stream", "metric"))
        found = tables.source.db.sql(f"SELECT * FROM ({catalog_sql(tables, streams)}) {limits}")
        spare = ("first_time", "min", "max", "range", "devices")
        if not print_relation(tables.source.db, found, form, columns, spare=spare):
            beside("nothing is declared, and nothing came")
