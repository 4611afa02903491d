"""`windows`: readings by device, metric and window of event time, computed anew wherever a batch touched them.

No Spark watermark: a reading that is days late corrects its window like any other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from functools import reduce
from itertools import pairwise, zip_longest
from operator import and_, or_
from typing import cast

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.log_table import IMPLAUSIBLE_DATE, BatchId
from spark.payload_decode import VALUE_TYPE
from spark.readings_view import is_reading, readings
from spark.time_corrections import BatchCorrections, readings_moved

WINDOW_S = 60
DAY_US = 86_400 * 1_000_000
KEY = ("namespace", "device", "stream", "metric", "window_start")
SUM_TYPE = "decimal(38,6)"
SCHEMA = f"""
    namespace string, device string, stream string, metric string,
    window_start timestamp, window_end timestamp,
    n bigint, min {VALUE_TYPE}, max {VALUE_TYPE}, sum {SUM_TYPE}, first {VALUE_TYPE}, last {VALUE_TYPE},
    revision int, ingest string, batch bigint, window_date date
"""
PARTITION = "window_date"
SKIPPING_COLUMNS = "window_start,device,metric,ingest,batch"
WINDOW_PROPERTY = "sluice.windowSeconds"
"""Property of the table: how long its windows are."""
VALUES = ("n", "min", "max", "sum", "first", "last")

SPANS_MAX = 32
"""Spans of event time that a batch's windows are looked up by; of more, neighbours are joined."""


class WindowLengthError(Exception):
    """The table's windows are of another length than those asked for; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Event times from `start_us` up to, not including, `end_us`; microseconds since 1970."""

    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class Revisions:
    """What a batch did to windows that an earlier batch had written."""

    late: int
    """Kafka records of the batch that fell into such a window."""
    revised: int
    """Windows that were corrected."""


def windows_schema() -> StructType:
    """Return the table's columns; needs a running session, whose parser reads them."""
    return cast("StructType", StructType.fromDDL(SCHEMA))


def windows_path(warehouse: str) -> str:
    """Return where the table lies."""
    return f"{warehouse.rstrip('/')}/windows"


def create_windows(spark: SparkSession, warehouse: str, window_s: int = WINDOW_S) -> None:
    """Create the table where there is none. Raises WindowLengthError where there is one with other windows."""
    if DeltaTable.isDeltaTable(spark, windows_path(warehouse)):
        _check_window_length(spark, warehouse, window_s)
        return
    (
        DeltaTable.createIfNotExists(spark)
        .location(windows_path(warehouse))
        .addColumns(windows_schema())
        .partitionedBy(PARTITION)
        .property("delta.dataSkippingStatsColumns", SKIPPING_COLUMNS)
        .property(WINDOW_PROPERTY, str(window_s))
        .execute()
    )


def _check_window_length(spark: SparkSession, warehouse: str, window_s: int) -> None:
    """Windows of two lengths in one table would overlap, and count readings twice."""
    (row,) = DeltaTable.forPath(spark, windows_path(warehouse)).detail().select("properties").collect()
    stored = row.properties.get(WINDOW_PROPERTY)
    if stored is None:
        raise WindowLengthError(
            f"{windows_path(warehouse)} does not say how long its windows are: a version of Sluice before 0.1 made it. "
            "Name a new folder as the warehouse: it is filled anew from Kafka."
        )
    if stored != str(window_s):
        raise WindowLengthError(
            f"{windows_path(warehouse)} holds windows of {stored} s, not of {window_s} s, and both in one table would "
            f"count readings twice. Go on with --window-s {stored}, or name a new folder as the warehouse."
        )


def open_windows(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the table, which SQL then finds as the temporary view `windows`."""
    windows = spark.read.format("delta").load(windows_path(warehouse))
    windows.createOrReplaceTempView("windows")
    return windows


def windowed(view: DataFrame, window_s: int = WINDOW_S) -> DataFrame:
    """Add `window_start` to readings. Those whose time is implausible or unknown belong to no window and are left out.

    `window_s` must divide a day: a window lies within one date.
    """
    event_us = F.unix_micros("event_time")
    start = F.timestamp_micros(event_us - F.pmod(event_us, F.lit(window_s * 1_000_000)))
    return view.where(~unwindowed()).withColumn("window_start", start)


def unwindowed() -> Column:
    """Tell which rows of `readings`, or of `retimed`, belong to no window: their time cannot be, or is unknown."""
    return F.col("event_date") == F.lit(IMPLAUSIBLE_DATE).cast("date")


def aggregated(windowed_readings: DataFrame, window_s: int = WINDOW_S) -> DataFrame:
    """Compute windows from all of their readings: the same for any order and any split into batches.

    `first` and `last` go by event time; at the same time by buffer, lane and lane sequence.
    """
    order = F.struct("event_time", "buffer", "lane", "lane_sequence")
    return (
        windowed_readings.groupBy(*KEY)
        .agg(
            F.count("value").alias("n"),
            F.min("value").alias("min"),
            F.max("value").alias("max"),
            F.sum("value").cast(SUM_TYPE).alias("sum"),
            F.min_by("value", order).alias("first"),
            F.max_by("value", order).alias("last"),
        )
        .select(
            *KEY,
            (F.col("window_start") + F.expr(f"interval {window_s} seconds")).alias("window_end"),
            *VALUES,
            F.to_date("window_start").alias("window_date"),
        )
    )


def merge_batch(  # noqa: PLR0913, PLR0917 - what the job knows of one batch
    warehouse: str,
    log: DataFrame,
    appended: DataFrame,
    corrections: BatchCorrections,
    batch: BatchId,
    window_s: int = WINDOW_S,
) -> Revisions:
    """Compute the windows that a batch touched anew from `log`, and merge them into the table.

    `appended` is the batch's part of `log`. Touched are the windows of its readings, and those out of which and into
    which its time corrections move readings; one that is left empty goes. Nothing changes if this batch was merged
    before.
    """
    # Windows of duplicates too: they come out as they are, unless a run with another checkpoint, which read these
    # records first, died between its append and its merge.
    copies = appended.withColumn("duplicate", F.lit(False))
    touched = windowed(readings(copies, corrections.known.current), window_s).select(*KEY)
    if corrections.brought_boots:
        moved = readings_moved(log.where(is_reading()), corrections).withColumns(
            {"metric": F.explode(F.map_keys("metrics"))}
        )
        touched = touched.union(windowed(moved, window_s).select(*KEY))
    keys = touched.distinct().persist()
    try:
        starts = keys.select(F.unix_micros("window_start").alias("start_us")).distinct().collect()
        spans = time_spans((row.start_us for row in starts), window_s)
        if not spans:
            return Revisions(late=0, revised=0)
        near = log.where(_within(spans) | corrections.known.may_move_to(spans[0].start_us))
        candidates = windowed(readings(near, corrections.known.current), window_s)
        # A window that has no readings any more comes out with `n` 0.
        fresh = aggregated(candidates.join(keys, list(KEY), "right"), window_s)
        _merge(log.sparkSession, warehouse, fresh, spans, batch)
    finally:
        keys.unpersist()
    own = windowed(readings(appended, corrections.known.current), window_s)
    return _revisions(open_windows(log.sparkSession, warehouse), own, spans, batch)


def time_spans(starts_us: Iterable[int], window_s: int = WINDOW_S, spans_max: int = SPANS_MAX) -> list[TimeSpan]:
    """Cover windows by at most `spans_max` spans, in order, leaving out the widest gaps between them."""
    window_us = window_s * 1_000_000
    ordered = sorted(set(starts_us))
    if not ordered:
        return []
    gaps = [(after - before - window_us, before) for before, after in pairwise(ordered) if after - before > window_us]
    cuts = {before for _, before in sorted(gaps, reverse=True)[: spans_max - 1]}
    spans: list[TimeSpan] = []
    first = ordered[0]
    for start, following in zip_longest(ordered, ordered[1:]):
        if following is None or start in cuts:
            spans.append(TimeSpan(first, start + window_us))
            first = following
    return spans


def _merge(spark: SparkSession, warehouse: str, fresh: DataFrame, spans: list[TimeSpan], batch: BatchId) -> None:
    source = fresh.withColumns(
        {"revision": F.lit(0), "ingest": F.lit(batch.ingest), "batch": F.lit(batch.number)}
    ).alias("fresh")
    columns = [field.name for field in windows_schema()]
    same = reduce(and_, (F.col(f"old.{name}") == F.col(f"fresh.{name}") for name in (*KEY, PARTITION)))
    changed = reduce(or_, (F.col(f"old.{name}") != F.col(f"fresh.{name}") for name in VALUES))
    update = {name: F.col(f"fresh.{name}") for name in (*VALUES, "ingest", "batch")}
    # A MERGE takes its transaction from the session, and a setting left standing would silently skip the next one.
    transaction = {
        "spark.databricks.delta.write.txnAppId": f"windows-{batch.ingest}",
        "spark.databricks.delta.write.txnVersion": str(batch.number),
    }
    for name, value in transaction.items():
        spark.conf.set(name, value)
    try:
        (
            DeltaTable.forPath(spark, windows_path(warehouse))
            .alias("old")
            # Literal dates: without them MERGE reads every partition of the target.
            .merge(source, same & F.col(f"old.{PARTITION}").isin(*_dates(spans)))
            .whenMatchedDelete(F.col("fresh.n") == 0)
            .whenMatchedUpdate(changed, {**update, "revision": F.col("old.revision") + 1})
            .whenNotMatchedInsert(F.col("fresh.n") > 0, {name: F.col(f"fresh.{name}") for name in columns})
            .execute()
        )
    finally:
        for name in transaction:
            spark.conf.unset(name)


def _revisions(windows: DataFrame, appended: DataFrame, spans: list[TimeSpan], batch: BatchId) -> Revisions:
    corrected = windows.where(
        F.col(PARTITION).isin(*_dates(spans))
        & (F.col("ingest") == batch.ingest)
        & (F.col("batch") == batch.number)
        & (F.col("revision") > 0)
    ).select(*KEY)
    row = (
        corrected.join(appended, list(KEY))
        .agg(
            F.count_distinct("topic", "partition", "offset").alias("late"),
            F.count_distinct(*KEY).alias("revised"),
        )
        .first()
    )
    return Revisions(late=row.late, revised=row.revised) if row else Revisions(late=0, revised=0)


def _dates(spans: list[TimeSpan]) -> list[date]:
    """All dates that the spans touch, in order."""
    days = {day for span in spans for day in range(span.start_us // DAY_US, (span.end_us - 1) // DAY_US + 1)}
    return [date(1970, 1, 1) + timedelta(days=day) for day in sorted(days)]


def _within(spans: list[TimeSpan]) -> Column:
    """Where in `log` readings of these spans stand, in literals, so that Delta passes over all other files."""
    event_us = [
        (F.col("event_time") >= F.timestamp_micros(F.lit(span.start_us)))
        & (F.col("event_time") < F.timestamp_micros(F.lit(span.end_us)))
        for span in spans
    ]
    return F.col("event_date").isin(*_dates(spans)) & reduce(or_, event_us)
