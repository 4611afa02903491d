"""Aggregates readings by device, metric and window of event time: `windows` is a pure function of the readings.

It uses no Spark watermark: a reading that is days late corrects its window like any other. Each batch appends a *part*
to each of its windows without reading what stands there, so that its cost depends on the batch alone. Readers fold the
parts of a window together. When a date has many parts, `ingest` folds them for good. All figures are whole numbers,
decimals and sorted values, so that any order and any split give the same bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import reduce
from itertools import pairwise, zip_longest
from operator import or_
from typing import cast

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.decode.codec_declarations import Windows
from spark.decode.value_types import VALUE_TYPE
from spark.engine.delta_staging import CHECKPOINT_INTERVAL, AppendTable, make_table, snapshot, table_exists
from spark.engine.delta_upkeep import in_sorted_files
from spark.engine.literals import of_batch, sql_text
from spark.engine.told_error import ToldError
from spark.log.verdicts import IMPLAUSIBLE_DATE
from spark.windows.window_sizes import DAY_S, LATE_S, WINDOW_PROPERTY, WINDOW_S

DAY_US = DAY_S * 1_000_000
METRIC = ("namespace", "device", "stream", "metric")
KEY = (*METRIC, "window_start")
SUM_TYPE = "decimal(38,6)"
SQUARES_TYPE = "decimal(38,12)"
"""Type of a sum of squares. It is null above a hundred times the square of the largest value that a table can hold."""
ORDER_TYPE = "struct<time: timestamp, buffer: string, lane: string, lane_sequence: bigint>"
"""Order of readings for `first` and `last`: by event time, then by the reading's identity."""
SCHEMA = f"""
    namespace string, device string, stream string, metric string, window_start timestamp,
    n bigint, min {VALUE_TYPE}, max {VALUE_TYPE}, sum {SUM_TYPE}, sum_of_squares {SQUARES_TYPE},
    first {VALUE_TYPE}, first_at {ORDER_TYPE}, last {VALUE_TYPE}, last_at {ORDER_TYPE},
    values array<{VALUE_TYPE}>, late bigint, ordinal bigint, window_date date
"""
WINDOW_PARTITION = "window_date"
SKIPPING_COLUMNS = "window_start,device,metric,stream,ordinal"
FIGURES = ("n", "min", "max", "sum", "sum_of_squares", "first", "first_at", "last", "last_at", "values", "late")
PERCENTILES = Windows().percentiles

SPANS_MAX = 32
"""Spans of event time in a search for windows. Beyond it, neighbours are joined."""
DEVICES_MAX = 200
"""Devices that are named one by one when windows are computed anew. If there are more, all devices' windows are."""


class WindowLengthError(ToldError):
    """The table's windows have another length than those wanted. The message says what to do."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Event times from `start_us` to before `end_us`, in microseconds since 1970."""

    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class Area:
    """Windows of some devices in some spans of time, which are computed anew together."""

    spans: tuple[TimeSpan, ...]
    devices: tuple[str, ...] | None
    """None for all devices."""

    def holds_reading(self) -> str:
        """The condition of `holds` for readings, which have `window_start` but no `window_date`."""
        return self.holds().replace(f"{WINDOW_PARTITION} IN", "to_date(window_start) IN", 1)

    def holds(self) -> str:
        """A condition on rows of the table. It uses literals, so that Delta can skip other files."""
        spans = " OR ".join(
            f"(window_start >= {_literal(span.start_us)} AND window_start < {_literal(span.end_us)})"
            for span in self.spans
        )
        dates = ", ".join(f"DATE'{day.isoformat()}'" for day in dates_of(self.spans))
        condition = f"{WINDOW_PARTITION} IN ({dates}) AND ({spans})"
        if self.devices is not None:
            condition += f" AND device IN ({', '.join(sql_text(name) for name in self.devices)})"
        return condition


def windows_schema() -> StructType:
    """Return the columns of the parts. It needs a running session, whose parser reads them."""
    return cast("StructType", StructType.fromDDL(SCHEMA))


def windows_path(tables: str) -> str:
    """Return the path of the parts' table."""
    return f"{tables}/window_parts"


def create_windows(spark: SparkSession, tables: str, window_s: int = WINDOW_S) -> None:
    """Create the table if there is none. Raises WindowLengthError if there is one with windows of another length."""
    if table_exists(spark, windows_path(tables)):
        stored = window_seconds(spark, tables)
        if stored != window_s:
            raise WindowLengthError(
                f"{windows_path(tables)} holds windows of {stored} s, not of {window_s} s, and both in one table would "
                f"count readings twice. Go on with windows of {stored} s, or have all tables made anew by a replay."
            )
        return
    properties = {
        "delta.dataSkippingStatsColumns": SKIPPING_COLUMNS,
        **CHECKPOINT_INTERVAL,
        WINDOW_PROPERTY: str(window_s),
    }
    make_table(spark, windows_path(tables), windows_schema(), partition=WINDOW_PARTITION, properties=properties)


def window_seconds(spark: SparkSession, tables: str) -> int:
    """Seconds of the table's windows."""
    return int(snapshot(spark, windows_path(tables)).metadata().configuration().apply(WINDOW_PROPERTY))


def read_parts(spark: SparkSession, tables: str) -> DataFrame:
    """Return the table, with one or more parts of each window."""
    return spark.read.format("delta").load(windows_path(tables))


def windowed(readings: DataFrame, window_s: int = WINDOW_S) -> DataFrame:
    """Add `window_start` to readings. Readings with an implausible or unknown time are left out.

    `window_s` must divide a day, so that a window lies within one date.
    """
    return readings.where(~unwindowed()).withColumn("window_start", start_of(F.col("event_time"), window_s))


def still_open(windows: DataFrame, closed_before: datetime | None) -> DataFrame:
    """Leave out windows so old that not all of their readings are still in `log`. They no longer change."""
    return windows if closed_before is None else windows.where(F.col("window_start") >= F.lit(closed_before))


def start_of(event_time: Column, window_s: int) -> Column:
    """The start of an event time's window."""
    event_us = F.unix_micros(event_time)
    return F.timestamp_micros(event_us - F.pmod(event_us, F.lit(window_s * 1_000_000)))


def unwindowed() -> Column:
    """True for rows of `readings` or `retimed` in no window, because their time is implausible or unknown."""
    return F.col("event_date") == F.lit(IMPLAUSIBLE_DATE).cast("date")


def parts(windowed_readings: DataFrame, ordinal: int, window_s: int = WINDOW_S) -> DataFrame:
    """Compute the parts that some readings add to their windows, as rows of the table.

    `first` and `last` go by event time, and if times are equal by buffer, lane and lane sequence.
    """
    window_end = F.col("window_start") + F.expr(f"interval {window_s + LATE_S} seconds")
    late = F.count_if(F.col("kafka_timestamp") > window_end).alias("late")
    order = F.struct(F.col("event_time").alias("time"), "buffer", "lane", "lane_sequence")
    figures = windowed_readings.groupBy(*KEY).agg(*sums_of_values(), *ranks_of_values(order), late)
    names = [field for field in windows_schema() if field.name != "ordinal"]
    found = _with_ends(figures).select(*(F.col(field.name).cast(field.dataType).alias(field.name) for field in names))
    return found.withColumn("ordinal", of_batch(ordinal, "metric"))


def sums_of_values() -> tuple[Column, ...]:
    """`n`, `min`, `max` and `sum` of the values of readings."""
    return (
        F.count("value").alias("n"),
        F.min("value").alias("min"),
        F.max("value").alias("max"),
        F.sum("value").alias("sum"),
    )


def ranks_of_values(order: Column) -> tuple[Column, ...]:
    """The other figures of the values of readings, which `order` puts in order.

    `earliest` and `latest` are structs: the order, and the first or the last value.
    """
    value = F.col("value").cast(VALUE_TYPE)
    return (
        F.try_sum((value * value).cast("decimal(36,12)")).cast(SQUARES_TYPE).alias("sum_of_squares"),
        F.min(F.struct(order.alias("first_at"), F.col("value").alias("first"))).alias("earliest"),
        F.max(F.struct(order.alias("last_at"), F.col("value").alias("last"))).alias("latest"),
        F.sort_array(F.collect_list("value")).alias("values"),
    )


def folded(parts: DataFrame, size_s: int | None = None) -> DataFrame:
    """Fold all parts of each window into one row with the table's columns.

    With `size_s`, a multiple of the parts' length, the windows have this length.
    """
    start = F.col("window_start") if size_s is None else start_of(F.col("window_start"), size_s)
    keys = [name for name in KEY if name != "window_start"]
    figures = parts.groupBy(*keys, start.alias("window_start")).agg(
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
    return _with_ends(figures).select(*windows_schema().names)


def _with_ends(figures: DataFrame) -> DataFrame:
    return figures.select("*", "earliest.*", "latest.*", F.to_date("window_start").alias(WINDOW_PARTITION))


def shown(windows: DataFrame, size_s: int, percentiles: Sequence[Decimal] = PERCENTILES) -> DataFrame:
    """Give folded windows the columns that analysts read, with mean, deviation and percentiles."""
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
        *(
            F.element_at("values", nearest_rank(percentile)).alias(percentile_name(percentile))
            for percentile in percentiles
        ),
        *("values", "late", "ordinal", "window_date"),
    )


def deviation() -> Column:
    """The standard deviation of a sample, from each value's distance to the mean, in the order of `values`.

    The sums would do too, but a double has too few digits if values lie close together and far from zero.
    """
    # Cast to twelve decimals: the mean of a sum with six would have six.
    mean = F.col("sum").try_cast("decimal(38,12)") / F.col("n")
    squares = F.transform("values", lambda value: F.pow((value - mean).cast("double"), F.lit(2.0)))
    spread = F.aggregate(squares, F.lit(0.0), lambda total, square: total + square)
    return F.when(F.col("n") > 1, F.sqrt(spread / (F.col("n") - 1)))


def nearest_rank(percentile: Decimal) -> Column:
    """The place in `values`, from 1 on, of a percentile by nearest rank.

    It is the least value that is not below `percentile` per cent of the window's values.
    """
    thousandths = round(percentile * 1_000)
    return F.expr(f"greatest(1, (n * {thousandths} + 99999) div 100000)").cast("int")


def percentile_name(percentile: Decimal) -> str:
    """The column's name of a percentile, such as `p50` or `p99_9`."""
    return f"p{percentile.normalize():f}".replace(".", "_")


def time_spans(starts_us: Iterable[int], window_s: int = WINDOW_S, spans_max: int = SPANS_MAX) -> list[TimeSpan]:
    """Cover windows by at most `spans_max` spans, in order. The widest gaps are left out."""
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
    """Cover touched windows (rows with `device` and `window_start`); None if there are none."""
    row = touched.agg(
        F.collect_set(F.unix_micros("window_start")).alias("starts"), F.collect_set("device").alias("devices")
    ).first()
    if row is None or not row.starts:
        return None
    few = len(row.devices) <= DEVICES_MAX
    return Area(tuple(time_spans(row.starts, window_s)), tuple(sorted(row.devices)) if few else None)


def replace_area(tables: str, area: Area, fresh: DataFrame) -> None:
    """Replace all parts of an area by freshly computed ones, in one commit."""
    (
        fresh.where(area.holds())
        .write.format("delta")
        .mode("overwrite")
        .option("replaceWhere", area.holds())
        .save(windows_path(tables))
    )


def fold_date(spark: SparkSession, tables: str, day: date, files: int = 1) -> None:
    """Replace the parts of each window of a date by one folded row, in one commit of `files` files.

    Parts that are appended meanwhile stay. No part may be replaced meanwhile.
    """
    path = windows_path(tables)
    staged = AppendTable(spark, path, windows_schema()).begin()
    parts_then = spark.read.format("delta").option("versionAsOf", staged.version).load(path)
    whole = folded(parts_then.where(f"{WINDOW_PARTITION} = DATE'{day.isoformat()}'"))
    with in_sorted_files(spark):
        staged.write(whole.repartitionByRange(files, *KEY).sortWithinPartitions(*KEY))
    staged.commit({}, instead_of=f"partitionValues['{WINDOW_PARTITION}'] = '{day.isoformat()}'")


def near(spans: Sequence[TimeSpan]) -> Column:
    """True for readings in `log` whose times as sent lie in these spans. Literals let Delta skip other files."""
    record, pack = [], []
    for span in spans:
        start, end = F.timestamp_micros(F.lit(span.start_us)), F.timestamp_micros(F.lit(span.end_us))
        record.append((F.col("event_time") >= start) & (F.col("event_time") < end))
        pack_us = F.unix_micros("event_time") - F.col("pack_span_us")
        pack.append((F.col("event_time") >= start) & (pack_us < span.end_us))
    of_date = F.col("event_date").isin(*dates_of(spans)) & reduce(or_, record)
    return of_date | (F.col("pack_span_us").isNotNull() & reduce(or_, pack))


def dates_of(spans: Iterable[TimeSpan]) -> list[date]:
    """All dates in the spans, in order."""
    days = {day for span in spans for day in range(span.start_us // DAY_US, (span.end_us - 1) // DAY_US + 1)}
    return [date(1970, 1, 1) + timedelta(days=day) for day in sorted(days)]


def _literal(us: int) -> str:
    return f"timestamp_micros({us})"
