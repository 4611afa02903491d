"""How long tables keep what is in them, if `streams.toml` says so, and `upkeep`: what was removed for it, and when.

`log` goes by when Kafka took a record in. What was taken in before a date was measured before it, at least but for
`ahead_max_s`; so windows that begin on that date or later can still be computed anew from all of their readings.
Earlier ones are closed: they stay as they are, as long as the table of windows keeps them. A reading of so long ago
that comes only now is a reject, for a copy of it may have been in `log`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import cast

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.decode.codec_declarations import Streams
from spark.decode.kafka_records import READING_TYPE
from spark.engine.delta_staging import open_or_empty
from spark.engine.delta_upkeep import delete_rows
from spark.finality.loss_records import rejects_as_losses
from spark.finality.loss_table import append_expired
from spark.log.amendments import amendments_path, effective_log
from spark.log.log_table import IMPLAUSIBLE_DATE, date_of, log_path
from spark.log.quarantine_view import still_rejected
from spark.windows.window_changes import changes_path
from spark.windows.windows_table import WINDOW_PARTITION, windows_path

SCHEMA = "what string, before date, at timestamp"
LOG, WINDOWS, CHANGES, FILES = "log", "windows", "window_changes", "files"
EXPIRED = "expired: measured longer before Kafka took it in than log keeps records"


@dataclass(frozen=True, slots=True)
class Horizons:
    """Before which date the tables hold nothing, or nothing that changes; None: they hold everything."""

    log: date | None = None
    windows: date | None = None

    @property
    def closed_before(self) -> datetime | None:
        """Windows that begin before it no longer change."""
        dates = [day for day in (self.log, self.windows) if day is not None]
        return datetime.combine(max(dates), datetime.min.time(), UTC) if dates else None


def upkeep_path(warehouse: str) -> str:
    """Return where the table lies: beside the versions, for it holds for all of them."""
    return f"{warehouse.rstrip('/')}/upkeep"


def open_upkeep(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the table, which SQL then finds as the temporary view `upkeep`; without rows where there is none."""
    return open_or_empty(spark, upkeep_path(warehouse), "upkeep", SCHEMA)


def last_upkeep(spark: SparkSession, warehouse: str) -> Mapping[str, date]:
    """Return up to which date everything was removed, by what it was removed from."""
    if not DeltaTable.isDeltaTable(spark, upkeep_path(warehouse)):
        return {}
    found = open_upkeep(spark, warehouse).groupBy("what").agg(F.max("before").alias("before")).collect()
    return {row.what: row.before for row in found}


def last_day(spark: SparkSession, warehouse: str) -> date | None:
    """The day on which all was last removed that was old; None where nothing ever was."""
    # It is noted last.
    (row,) = (
        open_upkeep(spark, warehouse).where(F.col("what") == FILES).agg(F.to_date(F.max("at")).alias("day")).collect()
    )
    return cast("date | None", row.day)


def note_upkeep(spark: SparkSession, warehouse: str, befores: Mapping[str, date]) -> None:
    """Record what is removed, in one commit."""
    now = datetime.now(UTC)
    rows = spark.createDataFrame([(what, before, now) for what, before in befores.items()], _schema()).coalesce(1)
    rows.write.format("delta").mode("append").save(upkeep_path(warehouse))


def read_horizons(spark: SparkSession, warehouse: str) -> Horizons:
    """Return what was removed so far."""
    last = last_upkeep(spark, warehouse)
    return Horizons(last.get(LOG), last.get(WINDOWS))


def expire(spark: SparkSession, warehouse: str, tables: str, streams: Streams, today: date) -> Mapping[str, date]:
    """Remove what is older than it is kept, and return before which dates. Doing it again finishes what broke off.

    `tables` is the folder of the version that is written; its job must be opened anew afterwards, or told.
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
    # First: who opens the tables from now on computes nothing anew from what is being removed.
    note_upkeep(spark, warehouse, befores)
    if LOG in befores:
        is_expired = _is_expired(befores[LOG], streams)
        rejects = rejects_as_losses(still_rejected(effective_log(spark, tables)).where(is_expired)).collect()
        expire_log(spark, tables, befores[LOG], streams)
        # Afterwards: what dies in between leaves holes unexplained, and none explained by one reject twice.
        append_expired(spark, tables, rejects)
    if WINDOWS in befores:
        delete_rows(spark, windows_path(tables), F.col(WINDOW_PARTITION) < F.lit(befores[WINDOWS]))
    if CHANGES in befores:
        delete_rows(spark, changes_path(warehouse), F.col("at_date") < F.lit(befores[CHANGES]))
    return befores


def expire_log(spark: SparkSession, tables: str, before: date, streams: Streams) -> None:
    """Remove from `log` what Kafka took in so long before a date that no reading of it may be of the date or later."""
    for path in (log_path(tables), amendments_path(tables)):
        delete_rows(spark, path, _is_expired(before, streams))


def _is_expired(before: date, streams: Streams) -> Column:
    taken_in_before = datetime.combine(before, datetime.min.time(), UTC) - timedelta(seconds=streams.times.ahead_max_s)
    return F.col("kafka_timestamp") < F.lit(taken_in_before)


def without_expired(decoded: DataFrame, streams: Streams) -> DataFrame:
    """Reject those of decoded records that were measured before what `log` held when Kafka took them in.

    It goes by the record alone, so that a replay decides the same.
    """
    if streams.retention.log_days is None:
        return decoded
    kept_from = F.date_sub(F.to_date("kafka_timestamp"), streams.retention.log_days)
    measured = date_of(F.col("event_time"), F.col("time_error_us"), streams.times)
    # What has no date it can be of is kept, and in no window.
    is_old = (measured < kept_from) & (measured > F.lit(IMPLAUSIBLE_DATE).cast("date"))
    is_expired = F.coalesce((F.col("ce_type") == READING_TYPE) & F.col("reject_reason").isNull() & is_old, F.lit(False))
    metrics = F.when(~is_expired, F.col("metrics"))
    reason = F.when(is_expired, F.lit(EXPIRED)).otherwise(F.col("reject_reason"))
    return decoded.withColumns({"metrics": metrics, "reject_reason": reason})


def _schema() -> StructType:
    return cast("StructType", StructType.fromDDL(SCHEMA))
