"""`windows`: readings by device, metric and window of event time, a pure function of the readings.

No Spark watermark: a reading that is days late corrects its window like any other. Each batch appends what it adds to
its windows (a *part*), whatever stood there before, so that it costs what it brings and not what it meets; who reads
folds the parts of a window together, and `ingest` folds those of a date for good when they have become many. All of
it is whole numbers, decimals and sorted values: any order and any split gives the same bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import reduce
from itertools import pairwise, zip_longest
from operator import or_
from typing import cast

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.decode.codec_decimals import VALUE_TYPE, of_batch
from spark.decode.codec_declarations import Windows
from spark.engine.built_once import recorded
from spark.engine.delta_staging import CHECKPOINT_INTERVAL, AppendTable, snapshot
from spark.log.log_table import IMPLAUSIBLE_DATE

WINDOW_S = 60
DAY_S = 86_400
DAY_US = DAY_S * 1_000_000
KEY = ("namespace", "device", "stream", "metric", "window_start")
SUM_TYPE = "decimal(38,6)"
SQUARES_TYPE = "decimal(38,12)"
"""Null where the sum of the squares does not fit: above a hundred times the greatest value's square."""
ORDER_TYPE = "struct<time: timestamp, buffer: string, lane: string, lane_sequence: bigint>"
"""By which `first` and `last` are told: event time, then what names the reading."""
SCHEMA = f"""
    namespace string, device string, stream string, metric string, window_start timestamp,
    n bigint, min {VALUE_TYPE}, max {VALUE_TYPE}, sum {SUM_TYPE}, sum_of_squares {SQUARES_TYPE},
    first {VALUE_TYPE}, first_at {ORDER_TYPE}, last {VALUE_TYPE}, last_at {ORDER_TYPE},
    values array<{VALUE_TYPE}>, late bigint, ordinal bigint, window_date date
"""
WINDOW_PARTITION = "window_date"
SKIPPING_COLUMNS = "window_start,device,metric,stream,ordinal"
WINDOW_PROPERTY = "sluice.windowSeconds"
"""Property of the table: how long its windows are."""
FIGURES = ("n", "min", "max", "sum", "sum_of_squares", "first", "first_at", "last", "last_at", "values", "late")
LATE_S = 60
"""A reading is late where it reached Kafka so much after the end of its window."""
PERCENTILES = Windows().percentiles

SPANS_MAX = 32
"""Spans of event time that windows are looked up by; of more, neighbours are joined."""
DEVICES_MAX = 200
"""Devices that are named one by one where windows are computed anew; of more, all devices' are."""


class WindowLengthError(Exception):
    """The table's windows are of another length than those asked for; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Event times from `start_us` up to, not including, `end_us`; microseconds since 1970."""

    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class Area:
    """Windows that are computed anew together: those of some devices in some spans of time."""

    spans: tuple[TimeSpan, ...]
    devices: tuple[str, ...] | None
    """None: all of them."""

    def holds_reading(self) -> str:
        """The same for readings with `window_start`, which have no date of their window."""
        return self.holds().replace(f"{WINDOW_PARTITION} IN", "to_date(window_start) IN", 1)

    def holds(self) -> str:
        """A condition on rows of the table, in literals: Delta passes over all other files."""
        spans = " OR ".join(
            f"(window_start >= {_literal(span.start_us)} AND window_start < {_literal(span.end_us)})"
            for span in self.spans
        )
        dates = ", ".join(f"DATE'{day.isoformat()}'" for day in dates_of(self.spans))
        condition = f"{WINDOW_PARTITION} IN ({dates}) AND ({spans})"
        if self.devices is not None:
            condition += f" AND device IN ({', '.join(_quoted(name) for name in self.devices)})"
        return condition


def windows_schema() -> StructType:
    """Return the columns of the parts; needs a running session, whose parser reads them."""
    return cast("StructType", StructType.fromDDL(SCHEMA))


def windows_path(tables: str) -> str:
    """Return where the parts lie."""
    return f"{tables}/window_parts"


def create_windows(spark: SparkSession, tables: str, window_s: int = WINDOW_S) -> None:
    """Create the table where there is none. Raises WindowLengthError where there is one with other windows."""
    if DeltaTable.isDeltaTable(spark, windows_path(tables)):
        stored = window_seconds(spark, tables)
        if stored != window_s:
            raise WindowLengthError(
                f"{windows_path(tables)} holds windows of {stored} s, not of {window_s} s, and both in one table would "
                f"count readings twice. Go on with windows of {stored} s, or have all tables made anew by a replay."
            )
        return
    (
        DeltaTable.createIfNotExists(spark)
        .location(windows_path(tables))
        .addColumns(windows_schema())
        .partitionedBy(WINDOW_PARTITION)
        .property("delta.dataSkippingStatsColumns", SKIPPING_COLUMNS)
        .property(*CHECKPOINT_INTERVAL)
        .property(WINDOW_PROPERTY, str(window_s))
        .execute()
    )


def window_seconds(spark: SparkSession, tables: str) -> int:
    """How long the table's windows are."""
    return int(snapshot(spark, windows_path(tables)).metadata().configuration().apply(WINDOW_PROPERTY))


def read_parts(spark: SparkSession, tables: str) -> DataFrame:
    """Return the table: of each window one or more parts."""
    return spark.read.format("delta").load(windows_path(tables))


@recorded
def windowed(readings: DataFrame, window_s: int = WINDOW_S) -> DataFrame:
    """Add `window_start` to readings. Those whose time is implausible or unknown belong to no window and are left out.

    `window_s` must divide a day: a window lies within one date.
    """
    return readings.where(~unwindowed()).withColumn("window_start", start_of(F.col("event_time"), window_s))


def still_open(windows: DataFrame, closed_before: datetime | None) -> DataFrame:
    """Leave out windows of so long ago that they no longer change, for not all of their readings are in `log`."""
    return windows if closed_before is None else windows.where(F.col("window_start") >= F.lit(closed_before))


def start_of(event_time: Column, window_s: int) -> Column:
    """When the window of an event time begins."""
    event_us = F.unix_micros(event_time)
    return F.timestamp_micros(event_us - F.pmod(event_us, F.lit(window_s * 1_000_000)))


def unwindowed() -> Column:
    """Tell which rows of `readings`, or of `retimed`, belong to no window: their time cannot be, or is unknown."""
    return F.col("event_date") == F.lit(IMPLAUSIBLE_DATE).cast("date")


def parts(windowed_readings: DataFrame, ordinal: int, window_s: int = WINDOW_S) -> DataFrame:
    """What some readings add to their windows: rows of the table.

    `first` and `last` go by event time; at the same time by buffer, lane and lane sequence.
    """
    return _parts(windowed_readings, window_s).withColumn("ordinal", of_batch(ordinal, "metric"))


@recorded
def _parts(windowed_readings: DataFrame, window_s: int) -> DataFrame:
    order = F.struct(F.col("event_time").alias("time"), "buffer", "lane", "lane_sequence")
    window_end = F.col("window_start") + F.expr(f"interval {window_s + LATE_S} seconds")
    square = F.col("value").cast("decimal(18,6)") * F.col("value").cast("decimal(18,6)")
    return (
        windowed_readings.groupBy(*KEY)
        .agg(
            F.count("value").alias("n"),
            F.min("value").alias("min"),
            F.max("value").alias("max"),
            F.sum("value").cast(SUM_TYPE).alias("sum"),
            F.try_sum(square.cast("decimal(36,12)")).cast(SQUARES_TYPE).alias("sum_of_squares"),
            F.min(F.struct(order.alias("at"), "value")).alias("earliest"),
            F.max(F.struct(order.alias("at"), "value")).alias("latest"),
            F.sort_array(F.collect_list("value")).alias("values"),
            F.count_if(F.col("kafka_timestamp") > window_end).alias("late"),
        )
        .select(
            *KEY,
            *("n", "min", "max", "sum", "sum_of_squares"),
            F.col("earliest.value").alias("first"),
            F.col("earliest.at").alias("first_at"),
            F.col("latest.value").alias("last"),
            F.col("latest.at").alias("last_at"),
            *("values", "late"),
            F.to_date("window_start").alias("window_date"),
        )
        .select(
            *(
                F.col(field.name).cast(field.dataType).alias(field.name)
                for field in windows_schema()
                if field.name != "ordinal"
            )
        )
    )


@recorded
def folded(parts: DataFrame, size_s: int | None = None) -> DataFrame:
    """One row for each window, of all its parts; of windows of `size_s` where that is given, a multiple of the parts'.

    The columns are the table's.
    """
    start = F.col("window_start") if size_s is None else start_of(F.col("window_start"), size_s)
    keys = [name for name in KEY if name != "window_start"]
    return (
        parts.groupBy(*keys, start.alias("window_start"))
        .agg(
            F.sum("n").alias("n"),
            F.min("min").alias("min"),
            F.max("max").alias("max"),
            F.sum("sum").cast(SUM_TYPE).alias("sum"),
            F.when(F.count_if(F.col("sum_of_squares").isNull()) == 0, F.try_sum("sum_of_squares"))
            .cast(SQUARES_TYPE)
            .alias("sum_of_squares"),
            F.min(F.struct("first_at", "first")).alias("earliest"),
            F.max(F.struct("last_at", "last")).alias("latest"),
            F.sort_array(F.flatten(F.collect_list("values"))).alias("values"),
            F.sum("late").alias("late"),
            F.max("ordinal").alias("ordinal"),
        )
        .select(
            *KEY,
            *("n", "min", "max", "sum", "sum_of_squares"),
            F.col("earliest.first").alias("first"),
            F.col("earliest.first_at").alias("first_at"),
            F.col("latest.last").alias("last"),
            F.col("latest.last_at").alias("last_at"),
            *("values", "late", "ordinal"),
            F.to_date("window_start").alias("window_date"),
        )
    )


def shown(windows: DataFrame, size_s: int, percentiles: Sequence[Decimal] = PERCENTILES) -> DataFrame:
    """Give folded windows the columns that analysts read: mean, deviation and percentiles beside the figures."""
    n = F.col("n")
    mean = (F.col("sum") / n).cast("decimal(38,12)")
    end = F.col("window_start") + F.expr(f"interval {size_s} seconds")
    return windows.select(
        *KEY,
        end.alias("window_end"),
        *("n", "min", "max", "sum", "sum_of_squares"),
        mean.alias("mean"),
        deviation().alias("deviation"),
        *("first", "last"),
        *(nearest_rank(percentile).alias(percentile_name(percentile)) for percentile in percentiles),
        *("values", "late", "ordinal", "window_date"),
    )


def deviation() -> Column:
    """The deviation of a sample: from each value's distance to the mean, in the order of `values`.

    Of the sums, which hold it too, a double has too few digits where values lie close together and far from zero.
    """
    # With twelve decimals: of a sum with six, Spark makes a mean with six.
    mean = F.col("sum").try_cast("decimal(38,12)") / F.col("n")
    squares = F.transform("values", lambda value: F.pow((value - mean).cast("double"), F.lit(2.0)))
    spread = F.aggregate(squares, F.lit(0.0), lambda total, square: total + square)
    return F.when(F.col("n") > 1, F.sqrt(spread / (F.col("n") - 1)))


def nearest_rank(percentile: Decimal) -> Column:
    """The least value that is not below so many per cent of a window's values, which are sorted."""
    thousandths = round(percentile * 1_000)
    rank = F.expr(f"greatest(1, (n * {thousandths} + 99999) div 100000)").cast("int")
    return F.element_at("values", rank)


def percentile_name(percentile: Decimal) -> str:
    """`p50`, `p99_9`."""
    return f"p{percentile.normalize():f}".replace(".", "_")


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


def area_of(touched: DataFrame, window_s: int) -> Area | None:
    """Cover touched windows (rows with `device` and `window_start`); None where there are none."""
    row = touched.agg(
        F.collect_set(F.unix_micros("window_start")).alias("starts"), F.collect_set("device").alias("devices")
    ).first()
    if row is None or not row.starts:
        return None
    few = len(row.devices) <= DEVICES_MAX
    return Area(tuple(time_spans(row.starts, window_s)), tuple(sorted(row.devices)) if few else None)


def replace_area(tables: str, area: Area, fresh: DataFrame) -> None:
    """Put what was computed anew of an area in the place of all its parts, in one commit."""
    (
        fresh.where(area.holds())
        .write.format("delta")
        .mode("overwrite")
        .option("replaceWhere", area.holds())
        .save(windows_path(tables))
    )


def fold_date(spark: SparkSession, tables: str, day: date, files: int = 1) -> None:
    """Put one row for each window of a date in the place of its parts, in one commit of so many files.

    Parts that are appended meanwhile stay beside it, as they are. None may be replaced meanwhile.
    """
    path = windows_path(tables)
    staged = AppendTable(spark, path, windows_schema()).begin()
    parts_then = spark.read.format("delta").option("versionAsOf", staged.version).load(path)
    whole = folded(parts_then.where(f"{WINDOW_PARTITION} = DATE'{day.isoformat()}'"))
    staged.write(whole.repartitionByRange(files, *KEY).sortWithinPartitions(*KEY))
    staged.commit({}, instead_of=f"partitionValues['{WINDOW_PARTITION}'] = '{day.isoformat()}'")


def near(spans: Sequence[TimeSpan]) -> Column:
    """Where in `log` readings of these spans stand by what was sent, in literals: Delta passes over all other files."""
    record, pack = [], []
    for span in spans:
        start, end = F.timestamp_micros(F.lit(span.start_us)), F.timestamp_micros(F.lit(span.end_us))
        record.append((F.col("event_time") >= start) & (F.col("event_time") < end))
        pack_us = F.unix_micros("event_time") - F.col("pack_span_us")
        pack.append((F.col("event_time") >= start) & (pack_us < span.end_us))
    of_date = F.col("event_date").isin(*dates_of(spans)) & reduce(or_, record)
    return of_date | (F.col("pack_span_us").isNotNull() & reduce(or_, pack))


def dates_of(spans: Iterable[TimeSpan]) -> list[date]:
    """All dates that the spans touch, in order."""
    days = {day for span in spans for day in range(span.start_us // DAY_US, (span.end_us - 1) // DAY_US + 1)}
    return [date(1970, 1, 1) + timedelta(days=day) for day in sorted(days)]


def _literal(us: int) -> str:
    return f"timestamp_micros({us})"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
