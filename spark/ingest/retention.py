"""Removes rows that are older than `streams.toml` keeps them, and notes it in the table `upkeep`.

`log` goes by the time when Kafka took a record in. A record taken in more than `ahead_max_s` before a date was measured
before that date. So windows that begin on that date or later can still be computed anew from all of their readings.
Earlier windows are closed: they stay unchanged as long as their table keeps them. A reading from then that comes only
now is a reject, because a copy of it may have been in `log`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import cast

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.codec_declarations import Streams
from spark.engine.delta_staging import open_or_empty
from spark.engine.delta_upkeep import delete_rows
from spark.finality.loss_records import rejects_as_losses
from spark.finality.loss_table import append_expired
from spark.log.amendments import amendments_path, effective_log
from spark.log.log_table import log_path
from spark.log.quarantine_view import still_rejected
from spark.windows.window_changes import changes_path
from spark.windows.windows_table import WINDOW_PARTITION, windows_path

SCHEMA = "what string, before date, at timestamp"
LOG, WINDOWS, CHANGES, FILES = "log", "windows", "window_changes", "files"


@dataclass(frozen=True, slots=True)
class Horizons:
    """Dates before which the tables have no rows, or none that change; None if they have all rows."""

    log: date | None = None
    windows: date | None = None

    @property
    def closed_before(self) -> datetime | None:
        """Time before which a window must begin to be closed; None if no window is."""
        dates = [day for day in (self.log, self.windows) if day is not None]
        return datetime.combine(max(dates), datetime.min.time(), UTC) if dates else None


def upkeep_path(warehouse: str) -> str:
    """Return the table's path, beside the versions, because it applies to all of them."""
    return f"{warehouse.rstrip('/')}/upkeep"


def open_upkeep(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the table, and make it the temporary view `upkeep`. If there is no table, the view has no rows."""
    return open_or_empty(spark, upkeep_path(warehouse), "upkeep", SCHEMA)


def last_upkeep(spark: SparkSession, warehouse: str) -> Mapping[str, date]:
    """Return the dates before which rows were removed, by the name of the table."""
    if not DeltaTable.isDeltaTable(spark, upkeep_path(warehouse)):
        return {}
    found = open_upkeep(spark, warehouse).groupBy("what").agg(F.max("before").alias("before")).collect()
    return {row.what: row.before for row in found}


def last_day(spark: SparkSession, warehouse: str) -> date | None:
    """The day on which the last upkeep ended; None if there was none."""
    # Upkeep notes FILES last.
    (row,) = (
        open_upkeep(spark, warehouse).where(F.col("what") == FILES).agg(F.to_date(F.max("at")).alias("day")).collect()
    )
    return cast("date | None", row.day)


def note_upkeep(spark: SparkSession, warehouse: str, befores: Mapping[str, date]) -> None:
    """Record the dates before which rows are removed, in one commit."""
    now = datetime.now(UTC)
    rows = spark.createDataFrame([(what, before, now) for what, before in befores.items()], SCHEMA).coalesce(1)
    rows.write.format("delta").mode("append").save(upkeep_path(warehouse))


def read_horizons(spark: SparkSession, warehouse: str) -> Horizons:
    """Return the dates before which rows were removed so far."""
    last = last_upkeep(spark, warehouse)
    return Horizons(last.get(LOG), last.get(WINDOWS))


def expire(spark: SparkSession, warehouse: str, tables: str, streams: Streams, today: date) -> Mapping[str, date]:
    """Remove rows that are too old, and return the dates before which. A second call finishes one that broke off.

    `tables` is the folder of the version that is written. Its job must be opened anew afterwards, or told.
    """
    kept = streams.retention
    days = {LOG: kept.log_days, WINDOWS: kept.windows_days, CHANGES: kept.window_changes_days}
    earlier = last_upkeep(spark, warehouse)
    befores = {
        what: max(today - timedelta(days=number), earlier.get(what, date.min))
        for what, number in days.items()
        if number is not None
    }
    if not befores:
        return {}
    # Noted first, so that whoever opens the tables now computes no window anew from rows that are being removed.
    note_upkeep(spark, warehouse, befores)
    if LOG in befores:
        is_expired = _is_expired(befores[LOG], streams)
        rejects = rejects_as_losses(still_rejected(effective_log(spark, tables)).where(is_expired)).collect()
        expire_log(spark, tables, befores[LOG], streams)
        # Appended afterwards: if the job dies in between, gaps are unexplained, but no reject explains a gap twice.
        append_expired(spark, tables, rejects)
    if WINDOWS in befores:
        delete_rows(spark, windows_path(tables), F.col(WINDOW_PARTITION) < F.lit(befores[WINDOWS]))
    if CHANGES in befores:
        delete_rows(spark, changes_path(warehouse), F.col("at_date") < F.lit(befores[CHANGES]))
    return befores


def expire_log(spark: SparkSession, tables: str, before: date, streams: Streams) -> None:
    """Remove records from `log` that Kafka took in so long before a date that their readings must be from before it."""
    for path in (log_path(tables), amendments_path(tables)):
        delete_rows(spark, path, _is_expired(before, streams))


def _is_expired(before: date, streams: Streams) -> Column:
    taken_in_before = datetime.combine(before, datetime.min.time(), UTC) - timedelta(seconds=streams.times.ahead_max_s)
    return F.col("kafka_timestamp") < F.lit(taken_in_before)
