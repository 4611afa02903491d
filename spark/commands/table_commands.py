"""`sluice-cloud readings`, `windows`, `gaps`, `gateways`, `quarantine` and `sql`: show what the tables hold."""

from typing import TYPE_CHECKING

import click

from gateway.host.terminal import say
from gateway.host.terminal_text import counted
from spark.commands.cli_options import (
    device_option,
    json_option,
    limit_option,
    print_rows,
    streams_option,
    warehouse_option,
)
from spark.commands.command_session import session
from spark.engine.warehouse_folder import only_writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark.decode.codec_declarations import Streams


@click.command(short_help="The latest readings by event time.")
@warehouse_option
@device_option
@limit_option
@json_option
def readings(warehouse: str, device: str | None, limit: int, as_json: bool) -> None:  # noqa: FBT001
    """Show the latest readings by event time, one line for each metric."""
    spark = session("sluice-readings", warehouse)
    from spark.log.readings_view import open_readings  # noqa: PLC0415

    columns = ("event_time", "namespace", "device", "stream", "metric", "value", "time_error_us", "time_quality")
    more = (
        *("device_boot", "device_sequence", "device_counter", "doubt", "ce_id"),
        *("sent_event_time", "sent_time_error_us", "sent_time_quality", "correction_version"),
    )
    latest = _latest(open_readings(spark, warehouse), device, "event_time")
    spare = ("namespace", "time_quality", "time_error_us")
    print_rows(latest, columns + more if as_json else columns, limit=limit, as_json=as_json, spare=spare)


@click.command(short_help="The latest windows, and how final each is.")
@warehouse_option
@device_option
@click.option(
    "--size",
    "size_s",
    type=click.IntRange(1, 86_400),
    metavar="SECONDS",
    help="Length of the windows. Default: as the table holds them.",
)
@limit_option
@json_option
def windows(warehouse: str, device: str | None, size_s: int | None, limit: int, as_json: bool) -> None:  # noqa: FBT001
    """Show the latest windows, and how final each is.

    `status` says whether a window is final, `basis` why that is known, and `why` what the window waits for. A terminal
    shows only the columns that fit. A pipe and --json get all columns.
    """
    spark = session("sluice-windows", warehouse)
    from spark.views.windows_view import WindowSizeError, open_windows  # noqa: PLC0415

    try:
        found = open_windows(spark, warehouse, size_s)
    except WindowSizeError as error:
        raise click.BadParameter(str(error), param_hint="--size") from error
    columns = (
        *("window_start", "window_end", "namespace", "device", "stream", "metric", "n", "min", "max", "mean"),
        *("sum", "first", "last", "status", "basis", "late", "why"),
    )
    # Among them are the percentiles that are declared.
    others = tuple(name for name in found.columns if name not in columns)
    spare = ("window_end", "sum", "first", "last", "namespace", "late", "stream", "min", "max", "basis")
    latest = _latest(found, device, "window_start")
    print_rows(latest, columns + others, limit=limit, as_json=as_json, spare=others + spare)


@click.command(short_help="The missing sequence numbers of devices.")
@warehouse_option
@device_option
@limit_option
@json_option
def gaps(warehouse: str, device: str | None, limit: int, as_json: bool) -> None:  # noqa: FBT001
    """Show missing sequence numbers of devices, the latest first, and whether a gateway has told why."""
    spark = session("sluice-gaps", warehouse)
    from spark.views.evidence import open_gaps  # noqa: PLC0415

    columns = (
        *("after_time", "before_time", "namespace", "device", "stream", "device_boot", "first", "last", "count"),
        *("explained", "reasons", "device_counter"),
    )
    found = open_gaps(spark, warehouse)
    latest = _latest(found, device, "before_time", ("namespace", "device", "device_boot", "first"))
    spare = ("device_counter", "namespace", "after_time", "stream", "device_boot")
    print_rows(latest, columns, limit=limit, as_json=as_json, spare=spare)


@click.command(short_help="How far each gateway has delivered.")
@warehouse_option
@limit_option
@json_option
def gateways(warehouse: str, limit: int, as_json: bool) -> None:  # noqa: FBT001
    """Show up to when each gateway has delivered and what it still holds, by its last heartbeat that counts."""
    spark = session("sluice-gateways", warehouse)
    from spark.views.gateways_view import open_gateways  # noqa: PLC0415

    found = open_gateways(spark, warehouse)
    # There is hardly ever an unread topic. If there is one, it must be seen.
    unread = () if not as_json and found.where("size(unread_topics) > 0").isEmpty() else ("unread_topics",)
    columns = (
        *("namespace", "gateway", "site", "heartbeat_time", "complete_to_time", "depth_rows", "oldest_age_s"),
        *("pending", "waiting", *unread, "retired_from_time", "buffer"),
    )
    rows = found.orderBy("namespace", "gateway", "buffer")
    spare = ("buffer", "namespace", "site", "waiting", "retired_from_time", "oldest_age_s")
    print_rows(rows, columns, limit=limit, as_json=as_json, spare=spare)


@click.command(short_help="Query the tables in Spark SQL.")
@warehouse_option
@click.argument("query")
@limit_option
@json_option
def sql(warehouse: str, query: str, limit: int, as_json: bool) -> None:  # noqa: FBT001
    """Query the tables in Spark SQL: log, readings, windows, gaps and all others in docs/tables.md.

    Only statements that read are run.
    """
    spark = session("sluice-sql", warehouse)
    from pyspark.errors import PySparkException  # noqa: PLC0415

    from spark.commands.sql_statements import mistake_words, read_by, tables_named  # noqa: PLC0415
    from spark.views.views import VIEWS, open_all  # noqa: PLC0415

    open_all(spark, warehouse, tables_named(query, VIEWS))
    try:
        found = read_by(spark, query)
        print_rows(found, found.columns, limit=limit, as_json=as_json)
    except PySparkException as error:
        raise click.ClickException(mistake_words(error, VIEWS)) from error


@click.group()
def quarantine() -> None:
    """List records that became no readings, or read them again. They stay in `log` in any case."""


@quarantine.command("list", short_help="The latest rejects, with their reasons.")
@warehouse_option
@device_option
@limit_option
@json_option
def list_quarantine(warehouse: str, device: str | None, limit: int, as_json: bool) -> None:  # noqa: FBT001
    """Show the latest rejects with their reasons and their places in Kafka."""
    spark = session("sluice-quarantine", warehouse)
    from spark.log.quarantine_view import COLUMNS, open_quarantine  # noqa: PLC0415

    found = open_quarantine(spark, warehouse)
    latest = _latest(found, device, "kafka_timestamp", ("topic", "partition", "offset"))
    columns = ("kafka_timestamp", "topic", "partition", "offset", "device", "retried", "reason")
    in_full = tuple(name for name in COLUMNS if name != "headers")
    chosen_columns = in_full if as_json else columns
    print_rows(latest, chosen_columns, limit=limit, as_json=as_json, spare=("retried", "device"))


@quarantine.command("retry", short_help="Read rejects again, after you correct streams.toml.")
@warehouse_option
@streams_option
def retry_command(warehouse: str, streams: "Streams | None") -> None:
    """Read rejects again, after you correct streams.toml or the registry. Those that can be read become readings.

    Stop `ingest` first. The declarations of --streams hold from then on.
    """
    spark = session("sluice-quarantine")
    from spark.batch_job import BatchJob  # noqa: PLC0415
    from spark.log.warehouse_version import open_version  # noqa: PLC0415
    from spark.upkeep.quarantine_retry import retry  # noqa: PLC0415
    from spark.windows.windows_table import WindowLengthError  # noqa: PLC0415

    open_version(spark, warehouse)
    try:
        with only_writer(warehouse):
            job = BatchJob(spark, warehouse, streams)
            counts = retry(job)
    except WindowLengthError as error:
        raise click.BadParameter(str(error), param_hint="--streams") from error
    declared = job.streams.version
    say(f"{counted(counts.rejects, 'reject')} read again by declarations {declared}: {counts.read} can be read now")


def _latest(
    table: "DataFrame",
    device: str | None,
    time: str,
    order: tuple[str, ...] = ("namespace", "device", "stream", "metric"),
) -> "DataFrame":
    chosen = table if device is None else table.where(table["device"] == device)
    return chosen.orderBy(table[time].desc(), *order)
