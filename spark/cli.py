"""`sluice-cloud`: the commands of the cloud side."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

import click

from gateway.terminal_text import GAP, aligned, escaped, hanging, terminal_width
from spark.kafka_reach import unreachable
from spark.session import JarsMissingError, open_session
from spark.warehouse_folder import WarehouseInUseError, absolute, only_writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark.ingest_job import BatchReport

# Spark is imported inside the commands: it takes a second, which `--help` need not cost.

FIGURES = frozenset({"n", "min", "max", "mean", "sum", "first", "last", "late", "ordinal", "value", "time_error_us"})
"""Columns that stand to the right in a table, and are never cut short."""

TIME_ERROR_UNBOUNDED_US = 2**63 - 1
"""As `spark.log_table.TIME_ERROR_UNKNOWN_US`, which cannot be had without Spark."""


def _absolute(_context: click.Context, _parameter: click.Parameter, warehouse: str) -> str:
    return absolute(warehouse)


_warehouse = click.option(
    "--warehouse", required=True, metavar="PATH", callback=_absolute, help="Folder of the tables."
)
_device = click.option("--device", help="Only this device's.")
_limit = click.option("--limit", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="Rows at most.")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The cloud side of Sluice: Kafka's records made into Delta tables that can be trusted."""


@main.command()
@click.option("--bootstrap", required=True, metavar="HOST:PORT", help="Kafka brokers, several with commas between.")
@click.option(
    "--warehouse",
    required=True,
    metavar="PATH",
    callback=_absolute,
    help="Folder of the tables; made where there is none.",
)
@click.option("--checkpoint", metavar="PATH", help="What was read so far.  [default: WAREHOUSE/_checkpoint]")
@click.option(
    "--topics",
    default="device-.*|gateway-events",
    show_default=True,
    metavar="PATTERN",
    help="Regular expression of whole topic names; topics that appear later are taken up too.",
)
@click.option("--once", is_flag=True, help="Read what is there, then end.")
@click.option(
    "--interval-s",
    type=click.FloatRange(0, 86_400),
    default=5.0,
    show_default=True,
    help="Seconds from the beginning of one batch to that of the next.",
)
@click.option(
    "--batch-records-max",
    type=click.IntRange(1),
    default=200_000,
    show_default=True,
    help="Records in one batch: bounds the memory that a backlog takes.",
)
@click.option(
    "--window-s",
    type=click.IntRange(1, 86_400),
    default=60,
    show_default=True,
    help="Length of a window in seconds; must divide a day, and stay the same for one warehouse.",
)
@_json
def ingest(  # noqa: PLR0913, PLR0917 - one argument for each option
    bootstrap: str,
    warehouse: str,
    checkpoint: str | None,
    topics: str,
    once: bool,  # noqa: FBT001 - a flag of the command line
    interval_s: float,
    batch_records_max: int,
    window_s: int,
    as_json: bool,  # noqa: FBT001
) -> None:
    """Read Kafka into `log` and `windows` until SIGTERM or Ctrl-C, which let the running batch finish.

    Started again, it goes on where it stopped. One `ingest` at a time may write a warehouse. A signal goes to this
    process, not to its group: Spark's JVM in it would die in the middle of a batch (systemd: KillMode=mixed).
    """
    if 86_400 % window_s:
        raise click.BadParameter(f"{window_s} s do not divide a day", param_hint="--window-s")
    reason = unreachable(bootstrap)
    if reason is not None:
        raise click.ClickException(f"Kafka cannot be reached ({reason}): is --bootstrap right, and is the broker up?")
    spark = _session("sluice-ingest")
    from pyspark.errors import StreamingQueryException  # noqa: PLC0415

    from spark.ingest_job import IngestSettings, run_ingest  # noqa: PLC0415
    from spark.windows_table import WindowLengthError  # noqa: PLC0415

    settings = IngestSettings(
        bootstrap=bootstrap,
        warehouse=warehouse,
        checkpoint=absolute(checkpoint) if checkpoint else f"{warehouse.rstrip('/')}/_checkpoint",
        topics=topics,
        interval_s=interval_s,
        once=once,
        batch_records_max=batch_records_max,
        window_s=window_s,
    )
    stop = threading.Event()
    # After the session is there: PySpark sets a handler of its own for Ctrl-C, which cancels the running batch.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def ready() -> None:
        click.echo(json.dumps({"state": "ready"}) if as_json else f"reading {topics} from {bootstrap} into {warehouse}")

    def report(batch: "BatchReport") -> None:
        click.echo(json.dumps(batch_members(batch)) if as_json else batch_line(batch))

    try:
        with only_writer(warehouse):
            run_ingest(spark, settings, stop, ready, report)
    except WarehouseInUseError as error:
        raise click.ClickException(str(error)) from error
    except WindowLengthError as error:
        raise click.BadParameter(str(error), param_hint="--window-s") from error
    except StreamingQueryException as error:
        raise click.ClickException(
            f"the query failed; what was committed stays, and the next run goes on from there.\n{error}"
        ) from error
    finally:
        spark.stop()


def batch_members(batch: "BatchReport") -> dict[str, object]:
    """One batch as `--json` prints it."""
    counts = batch.counts
    return {
        "batch": batch.batch,
        "rows": counts.rows,
        "duplicates": counts.duplicates,
        "rejected": counts.rejected,
        "late": counts.late,
        "revised": counts.revised,
        "unwindowed": counts.unwindowed,
        "corrections": counts.corrections,
        "lag": batch.lag,
        "end_offsets": batch.end_offsets,
        "seconds": round(counts.seconds, 3),
    }


def batch_line(batch: "BatchReport") -> str:
    """One batch as a person reads it."""
    counts = batch.counts
    behind = "" if batch.lag is None else f", {batch.lag} behind"
    line = f"batch {batch.batch}: {counts.rows} records in {counts.seconds:.1f} s{behind}"
    asides = (
        (counts.duplicates, "seen before"),
        (counts.rejected, "rejected (`log` says why)"),
        (counts.late, f"came more than a minute after the end of their windows ({counts.revised} of them)"),
        (counts.unwindowed, "in no window (their time is unknown or cannot be)"),
        (counts.corrections, "put earlier times right"),
    )
    return "; ".join([line, *(f"{count} {meaning}" for count, meaning in asides if count)])


@main.command()
@_warehouse
@_device
@_limit
@_json
def readings(warehouse: str, device: str | None, limit: int, as_json: bool) -> None:  # noqa: FBT001
    """Show the latest readings by event time: one line for each metric."""
    spark = _session("sluice-readings")
    from spark.readings_view import open_readings  # noqa: PLC0415

    columns = (
        *("event_time", "namespace", "device", "stream", "metric", "value", "time_error_us", "time_quality"),
        *("device_boot", "device_sequence", "doubt", "ce_id"),
        *("sent_event_time", "sent_time_error_us", "sent_time_quality", "correction_version"),
    )
    latest = _latest(_opened(spark, warehouse, open_readings), device, "event_time", limit)
    if as_json:
        _print_json(latest, columns)
    else:
        _print_table(latest, columns[:8], spare=("namespace", "time_error_us", "time_quality"))


@main.command()
@_warehouse
@_device
@_limit
@_json
def windows(warehouse: str, device: str | None, limit: int, as_json: bool) -> None:  # noqa: FBT001
    """Show the latest windows. `revision` counts how often late readings corrected one.

    On a terminal the columns that it has room for; all of them in a pipe, and with --json.
    """
    spark = _session("sluice-windows")
    from spark.windows_view import open_windows  # noqa: PLC0415

    columns = (
        *("window_start", "window_end", "namespace", "device", "stream", "metric"),
        *("n", "min", "max", "mean", "sum", "first", "last", "late", "ordinal"),
    )
    latest = _latest(_opened(spark, warehouse, open_windows), device, "window_start", limit)
    if as_json:
        _print_json(latest, columns)
    else:
        _print_table(
            latest, columns, spare=("ordinal", "window_end", "sum", "namespace", "late", "first", "last", "stream")
        )


def _session(application: str) -> "SparkSession":
    try:
        return open_session(application)
    except JarsMissingError as error:
        raise click.ClickException(str(error)) from error


def _opened(spark: "SparkSession", warehouse: str, opener: "Callable[[SparkSession, str], DataFrame]") -> "DataFrame":
    from spark.warehouse_version import NoWarehouseError  # noqa: PLC0415

    try:
        return opener(spark, warehouse)
    except NoWarehouseError as error:
        raise click.ClickException(str(error)) from error


def _latest(table: "DataFrame", device: str | None, time: str, limit: int) -> "DataFrame":
    chosen = table if device is None else table.where(table["device"] == device)
    return chosen.orderBy(table[time].desc(), "namespace", "device", "stream", "metric").limit(limit)


def _print_json(rows: "DataFrame", columns: Sequence[str]) -> None:
    for row in _collected(rows, columns):
        # Decimals as text: a JSON number would be read as a binary fraction.
        click.echo(json.dumps(row, default=str))


def _print_table(rows: "DataFrame", columns: Sequence[str], spare: Sequence[str]) -> None:
    cells = [{name: cell_text(name, value) for name, value in row.items()} for row in _collected(rows, columns)]
    left_out = columns_left_out(columns, cells, spare, terminal_width())
    for line in table_lines([name for name in columns if name not in left_out], cells, terminal_width()):
        click.echo(line)
    if left_out:
        words = f"no room here for {', '.join(left_out)}: --json shows all, and so does a wider terminal"
        click.echo(hanging(words, 0, sys.stderr), err=True)


def _collected(rows: "DataFrame", columns: Sequence[str]) -> list[dict[str, object]]:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    # As microseconds: Spark hands timestamps to Python in this machine's time zone.
    times = [column for column in columns if _is_time(column)]
    found = rows.select(
        *(F.unix_micros(column).alias(column) if column in times else F.col(column) for column in columns)
    ).collect()
    return [{name: rfc3339(row[name]) if name in times else row[name] for name in columns} for row in found]


def _is_time(column: str) -> bool:
    return column.endswith(("_time", "_start", "_end"))


def rfc3339(us: int) -> str:
    """Microseconds since 1970 as UTC in RFC 3339."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def cell_text(column: str, value: object) -> str:
    """A value as it stands in a table: no zeros that say nothing, nothing that a terminal would obey."""
    if value is None:
        return "-"
    if column == "time_error_us" and value == TIME_ERROR_UNBOUNDED_US:
        return "unbounded"
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    if _is_time(column):
        return str(value).replace(".000000Z", "Z")
    return escaped(str(value))


def columns_left_out(
    columns: Sequence[str], rows: Sequence[dict[str, str]], spare: Sequence[str], width: int
) -> list[str]:
    """Those of `spare` that must go, its first ones first, for a table to fit into `width` characters."""
    widths = {name: max([len(name), *(len(row[name]) for row in rows)]) for name in columns}
    left_out: list[str] = []
    for name in spare:
        if sum(widths.values()) + len(GAP) * (len(widths) - 1) <= width:
            break
        left_out.append(name)
        del widths[name]
    return left_out


def table_lines(columns: Sequence[str], rows: Sequence[dict[str, str]], width: int) -> Iterator[str]:
    """Lay out rows under their names, figures to the right; where they still do not fit, names are cut short."""
    cells = [[row[name] for name in columns] for row in rows]
    return aligned(columns, cells, _places(columns, FIGURES.__contains__), _places(columns, _is_time), width)


def _places(columns: Sequence[str], chosen: Callable[[str], bool]) -> frozenset[int]:
    return frozenset(place for place, name in enumerate(columns) if chosen(name))


if __name__ == "__main__":
    main()
