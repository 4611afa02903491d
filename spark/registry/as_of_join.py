"""Joins each reading of a device with another device's reading that is nearest in time, within a tolerance.

Each reading of the right side is copied to the spans of time that its tolerance reaches into, nearly always one. Within
a span, one sorted pass finds the neighbours. So the work grows with the number of readings, not with the number that
lie within a tolerance of one another.
"""

from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.windows.windows_table import METRIC, unwindowed

OTHER = tuple(f"other_{name}" for name in METRIC)
"""Columns of `pairs` that name the other reading. The columns in `METRIC` name the reading itself."""
Direction = Literal["nearest", "backward", "forward"]
SPAN_US_MIN = 3_600 * 1_000_000
TOLERANCE_S_MAX = 366 * 86_400
_EXACT = "decimal(21,0)"
"""Type that holds the sum of two bounds. Each bound may be any bigint."""


def as_of(  # noqa: PLR0913, PLR0917 - two sides and the options of a join
    left: DataFrame,
    right: DataFrame,
    pairs: DataFrame,
    tolerance_s: Decimal | float,
    direction: Direction = "nearest",
    bring: Sequence[str] = ("value",),
) -> DataFrame:
    """Join each reading of `left` that `pairs` names with the nearest reading of `right` within `tolerance_s` seconds.

    `pairs` has the columns `METRIC` and `OTHER`. The result has one row for each reading and each of its others: the
    columns of `left` and `OTHER`, then `other_event_time`, `other_time_error_us`, `other_ce_id`, the columns in `bring`
    with `other_` before them, `distance_us` (positive if the other is later) and `certain`. If no other is near enough,
    the columns after `OTHER` are null.

    `backward` takes the other's last reading up to and including that time, `forward` its first from then on. Of two
    equally near readings the earlier counts; of two at the same time, the one with the lesser `ce_id`. `certain` is
    true if, whatever the true times within both bounds, the distance lies within the tolerance and on the side that
    `direction` names. Readings whose time is unknown or implausible are nobody's neighbours. Raises ValueError for a
    tolerance out of range.
    """
    tolerance_us = _microseconds(tolerance_s)
    known = F.broadcast(pairs.select(*METRIC, *OTHER).distinct())
    span_us = max(SPAN_US_MIN, 2 * tolerance_us)
    timed_us = F.when(~unwindowed(), F.unix_micros("event_time"))
    asking = left.select(F.struct(*left.columns).alias("_left"), *METRIC, timed_us.alias("_us")).join(
        known, list(METRIC)
    )
    asking = asking.select(*OTHER, "_us", "_left", _span(F.col("_us"), span_us).alias("_span"))
    answering = _answering(right, known, bring, _reach_us(direction, tolerance_us), span_us)
    rows = asking.unionByName(answering, allowMissingColumns=True)
    within = Window.partitionBy(*OTHER, "_span").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    # At the same time, readings of `right` come first, and the last of these is the one that counts.
    chosen_last = [F.col("_right").isNull(), F.desc("_rank")]
    nearest = F.last("_right", ignorenulls=True)
    found = rows.select(
        *OTHER,
        *("_us", "_left"),
        nearest.over(within.orderBy("_us", *chosen_last)).alias("_before"),
        nearest.over(within.orderBy(F.desc("_us"), *chosen_last)).alias("_after"),
    ).where(F.col("_left").isNotNull())
    chosen = found.select(*OTHER, "_us", "_left", _chosen(direction, tolerance_us).alias("_other"))
    distance_us = F.col("_other.us") - F.col("_us")
    return chosen.select(
        "_left.*",
        *OTHER,
        *(F.col(f"_other.{name}").alias(f"other_{name}") for name in ("event_time", "time_error_us", "ce_id", *bring)),
        distance_us.alias("distance_us"),
        _certain(distance_us, direction, tolerance_us).alias("certain"),
    )


def _microseconds(tolerance_s: Decimal | float) -> int:
    exact = Decimal(str(tolerance_s))
    if not 0 <= exact <= TOLERANCE_S_MAX:
        raise ValueError(f"a tolerance of {tolerance_s} s cannot be used: from 0 to {TOLERANCE_S_MAX} s are possible")
    return int(exact * 1_000_000)


def _reach_us(direction: Direction, tolerance_us: int) -> tuple[int, int]:
    """Microseconds before and after a reading of `right` within which a reading of `left` may take it."""
    return (0 if direction == "backward" else tolerance_us, 0 if direction == "forward" else tolerance_us)


def _span(time_us: Column, span_us: int) -> Column:
    """The beginning of the span that a time lies in."""
    return time_us - F.pmod(time_us, F.lit(span_us))


def _answering(
    right: DataFrame, known: DataFrame, bring: Sequence[str], reach_us: tuple[int, int], span_us: int
) -> DataFrame:
    others = known.select(*(F.col(f"other_{name}").alias(name) for name in METRIC)).distinct()
    concerned = right.where(~unwindowed()).join(F.broadcast(others), list(METRIC), "left_semi")
    us = F.unix_micros("event_time")
    before_us, after_us = reach_us
    spans = F.array_distinct(F.array(*(_span(us + moved, span_us) for moved in (-before_us, 0, after_us))))
    return concerned.select(
        *(F.col(name).alias(f"other_{name}") for name in METRIC),
        us.alias("_us"),
        F.struct(us.alias("us"), "event_time", "time_error_us", "ce_id", *bring).alias("_right"),
        F.struct("ce_id", *bring).alias("_rank"),
        F.explode(spans).alias("_span"),
    )


def _chosen(direction: Direction, tolerance_us: int) -> Column:
    """The one of `_before` and `_after` that counts. Null if none is within the tolerance."""
    before_us, after_us = F.col("_us") - F.col("_before.us"), F.col("_after.us") - F.col("_us")
    before = F.when(before_us <= tolerance_us, F.col("_before"))
    after = F.when(after_us <= tolerance_us, F.col("_after"))
    match direction:
        case "backward":
            return before
        case "forward":
            return after
        case "nearest":
            return F.when(after.isNull() | (before_us <= after_us), before).otherwise(after)


def _certain(distance_us: Column, direction: Direction, tolerance_us: int) -> Column:
    distance = distance_us.cast(_EXACT)
    open_us = F.col("_left.time_error_us").cast(_EXACT) + F.col("_other.time_error_us").cast(_EXACT)
    within = F.abs(distance) + open_us <= tolerance_us
    match direction:
        case "backward":
            return within & (-distance >= open_us)
        case "forward":
            return within & (distance >= open_us)
        case "nearest":
            return within
