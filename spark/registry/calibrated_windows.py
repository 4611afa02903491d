"""Windows of calibrated values, split where a calibration or a site begins or ends, computed on read.

A window within one span is calibrated from its figures. Calibrated values are not rounded, so n, min, max and sum come
out as if every reading had been calibrated; only the sum of squares is rounded, once. A negative scale swaps min and
max, and reverses the sorted values. The few windows that a border cuts are computed from their readings.
"""

import re
from decimal import Decimal
from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.value_types import VALUE_TYPE
from spark.registry.calibration import CALIBRATED_TYPE, by_span, site_columns, with_calibrations, with_sites
from spark.registry.registry_spans import borders, last_border, next_border, span_at
from spark.windows.window_sizes import DAY_S
from spark.windows.windows_table import (
    DAY_US,
    METRIC,
    SQUARES_TYPE,
    SUM_TYPE,
    deviation,
    nearest_rank,
    ranks_of_values,
    sums_of_values,
    time_spans,
    unwindowed,
)

KEY = (*METRIC, "window_start", "window_end")
FACTORED_SUM_TYPE = "decimal(25,6)"
"""Type of a sum that a scale can multiply exactly. Its 19 digits before the point hold ten million of the greatest
values."""
WIDE = "decimal(38,0)"
_PERCENTILE = re.compile(r"p(\d+)(?:_(\d+))?")


class WindowColumnsError(Exception):
    """The windows lack a column from which others are computed; the message says which."""


def calibrated_windows(
    windows: DataFrame, readings: DataFrame, calibrations: DataFrame, devices: DataFrame | None = None
) -> DataFrame:
    """Calibrate the figures of `windows`. Each part of a window within one span becomes a row.

    These columns are replaced, if `windows` has them: `n`, `min`, `max`, `sum`, `sum_of_squares`, `mean`, `deviation`,
    `first`, `last`, `values` and the percentiles. All other columns stay those of the whole window. Added are:
    - `span_from` and `span_to`: the part of the window that the row is about;
    - `scale` and `offset`: null without a calibration;
    - `calibration_overflow`: whether `sum` or `sum_of_squares` is null because it does not fit in 38 digits;
    - `site` and `labels`: only with `devices`.

    Each window must lie within one date. `readings` are read only for windows that a border cuts. The registry's
    borders are collected here: they say which dates of `readings` to read. Raises WindowColumnsError.
    """
    if _percentiles(windows) and "values" not in windows.columns:
        raise WindowColumnsError(
            f"the windows have {', '.join(_percentiles(windows))} and not values: with a negative scale, the "
            "percentiles cannot be computed without values. Leave these columns out, or keep values."
        )
    rows = with_calibrations(windows, calibrations, "_spans")
    limits, entries = borders(F.col("_spans")), calibrations.select("valid_from", "valid_to")
    if devices is not None:
        rows = with_sites(rows, devices, "_sites")
        limits, entries = F.concat(limits, borders(F.col("_sites"))), entries.union(devices.select(*entries.columns))
    start_us, end_us = F.unix_micros("window_start"), F.unix_micros("window_end")
    cut = F.exists(limits, lambda border: (start_us < border) & (border < end_us))
    limited = rows.withColumns({"_borders": limits, "_cut": cut})
    parts = limited.where(~F.col("_cut")).select(
        *limited.columns, F.col("window_start").alias("span_from"), F.col("window_end").alias("span_to")
    )
    if dates := _border_dates(entries):
        parts = parts.unionByName(_cut_parts(limited.where(F.col("_cut")), readings.where(_on(dates))))
    return _with_figures(parts, windows)


def _border_dates(entries: DataFrame) -> list[int]:
    """Beginnings of the dates within which a span begins or ends, in microseconds since 1970."""
    border_us = F.explode(F.array(F.unix_micros("valid_from"), F.unix_micros("valid_to"))).alias("border_us")
    within = entries.select(border_us).where(F.pmod("border_us", F.lit(DAY_US)) != 0)
    starts = within.select((F.col("border_us") - F.pmod("border_us", F.lit(DAY_US))).alias("start_us")).distinct()
    return sorted(row.start_us for row in starts.collect())


def _on(dates: list[int]) -> Column:
    """Condition for readings of these dates, in literals, so that Delta skips all other files."""
    spans = [
        (F.col("event_time") >= _literal(span.start_us)) & (F.col("event_time") < _literal(span.end_us))
        for span in time_spans(dates, DAY_S)
    ]
    return reduce(or_, spans) & ~unwindowed()


def _literal(us: int) -> Column:
    # Python's datetime has no day after 9999-12-31, which stands for "without an end".
    return F.timestamp_micros(F.lit(us))


# -- parts of windows that a border cuts ------------------------------------------------------------------------------


def _cut_parts(cut: DataFrame, readings: DataFrame) -> DataFrame:
    """A row, not calibrated yet, for each part of a window that holds readings."""
    order = F.struct("event_time", "buffer", "lane", "lane_sequence")
    measured = readings.select(
        *METRIC, F.unix_micros("event_time").alias("_us"), F.col("value").cast(VALUE_TYPE), order.alias("_order")
    )
    spans = F.broadcast(cut.select(*KEY, "_borders"))
    in_window = (F.col("_us") >= F.unix_micros("window_start")) & (F.col("_us") < F.unix_micros("window_end"))
    placed = measured.join(spans, list(METRIC)).where(in_window)
    begins = F.greatest(F.unix_micros("window_start"), last_border(F.col("_borders"), F.col("_us")))
    ends = F.least(F.unix_micros("window_end"), next_border(F.col("_borders"), F.col("_us")))
    own = (
        placed.groupBy(*KEY, F.timestamp_micros(begins).alias("span_from"), F.timestamp_micros(ends).alias("span_to"))
        .agg(*sums_of_values(), *ranks_of_values(F.col("_order")))
        .withColumns(
            {
                "sum": F.col("sum").cast(SUM_TYPE),
                "first": F.col("earliest.first"),
                "last": F.col("latest.last"),
                "deviation": deviation(),
            }
        )
        .drop("earliest", "latest")
    )
    figures = [name for name in own.columns if name not in KEY]
    joined = cut.join(own.withColumnsRenamed({name: f"_own_{name}" for name in figures}), list(KEY))
    return joined.select(
        *(F.col(f"_own_{name}" if name in figures else name).alias(name) for name in cut.columns),
        *(F.col(f"_own_{name}").alias(name) for name in ("span_from", "span_to")),
    )


# -- figures of calibrated values -------------------------------------------------------------------------------------


def _with_figures(parts: DataFrame, windows: DataFrame) -> DataFrame:
    at_us = F.unix_micros("span_from")
    sites = {"_site": span_at(F.col("_sites"), at_us)} if "_sites" in parts.columns else {}
    chosen = parts.withColumns({"_span": span_at(F.col("_spans"), at_us), **sites})
    figures = _figures(windows)
    replaced = chosen.select(
        *(figures.get(name, F.col(name)).alias(name) for name in windows.columns),
        *("span_from", "span_to", "_span", *sites),
        _overflow(figures).alias("calibration_overflow"),
    )
    derived = _derived_figures(windows)
    return replaced.select(
        *(derived.get(name, F.col(name)).alias(name) for name in windows.columns),
        *("span_from", "span_to"),
        F.col("_span.scale").alias("scale"),
        F.col("_span.offset").alias("offset"),
        "calibration_overflow",
        *(site_columns(F.col("_site")) if sites else ()),
    )


def _overflow(figures: dict[str, Column]) -> Column:
    """Whether a figure is null only because of the calibration."""
    lost = [F.col(name).isNotNull() & figures[name].isNull() for name in ("sum", "sum_of_squares") if name in figures]
    return reduce(or_, lost, F.lit(False))


def _figures(windows: DataFrame) -> dict[str, Column]:
    """Calibrated expressions for the columns of `windows` that a calibration changes."""
    span = F.col("_span")
    falls = F.coalesce(span["scale"] < 0, F.lit(False))
    lower, upper = by_span(F.col("min"), span), by_span(F.col("max"), span)
    ascending = F.when(falls, F.reverse("values")).otherwise(F.col("values"))
    every = {
        "min": F.when(falls, upper).otherwise(lower),
        "max": F.when(falls, lower).otherwise(upper),
        "sum": F.when(span.isNull(), F.col("sum").try_cast(CALIBRATED_TYPE)).otherwise(_sum(span)),
        "sum_of_squares": F.when(span.isNull(), F.col("sum_of_squares").cast(SQUARES_TYPE)).otherwise(_squares(span)),
        "deviation": F.col("deviation") * F.coalesce(F.abs(span["scale"]), F.lit(1)).cast("double"),
        "first": by_span(F.col("first"), span),
        "last": by_span(F.col("last"), span),
        "values": F.transform(ascending, lambda value: by_span(value, span)),
    }
    return {name: column for name, column in every.items() if name in windows.columns}


def _derived_figures(windows: DataFrame) -> dict[str, Column]:
    """Expressions for the columns that follow from calibrated columns."""
    ranked = {
        name: F.try_element_at("values", nearest_rank(percentile)) for name, percentile in _percentiles(windows).items()
    }
    mean = (F.col("sum") / F.col("n")).cast(CALIBRATED_TYPE)
    return {**ranked, "mean": mean} if "mean" in windows.columns else ranked


def _sum(span: Column) -> Column:
    """The calibrated sum. Null if it does not fit."""
    scaled = F.col("sum").try_cast(FACTORED_SUM_TYPE) * span["scale"]
    moved = span["offset"] * F.col("n").cast("decimal(18,0)")
    return (scaled.cast("decimal(37,12)") + moved).try_cast(CALIBRATED_TYPE)


def _squares(span: Column) -> Column:
    """The sum of (value * scale + offset)², rounded once, half up, from 24 decimals to twelve.

    Null if it does not fit. It is computed in whole units of 10^-12 and 10^-24, because Spark cuts the decimals of a
    product that may have more than 38 digits.
    """
    million, billions = F.lit(Decimal(10**6)), F.lit(Decimal(10**12))
    total, squares = F.col("sum").try_cast(FACTORED_SUM_TYPE), F.col("sum_of_squares").cast(SQUARES_TYPE)
    scale = (span["scale"] * million).cast("decimal(12,0)")
    offset = (span["offset"] * million).cast("decimal(12,0)")
    both = (scale * offset * F.lit(2)).cast(WIDE)
    one = F.lit(Decimal(1))
    # The fractions, in the smallest units: less than a million, and less than 10^12.
    sum_rest = (F.pmod(total, one) * million).cast(WIDE)
    squares_rest = (F.pmod(squares, one) * billions).cast(WIDE)
    whole = _added(
        _times(F.floor(squares), scale * scale),
        _times(F.floor(total), both),
        _times(F.col("n"), offset * offset),
        # Taken off here, because `rest` adds it.
        F.lit(Decimal(-(10**25))),
    )
    # Made positive, so that rounding away from zero is rounding half up.
    rest = _added(_times(squares_rest, scale * scale), _times(sum_rest, both * million), F.lit(Decimal(10**37)))
    carried = F.concat(rest.cast("string"), F.lit("E-12")).try_cast(WIDE)
    units = _added(whole, carried)
    return F.concat(units.cast("string"), F.lit("E-12")).try_cast(SQUARES_TYPE)


def _times(one: Column, other: Column) -> Column:
    return F.try_multiply(one.cast(WIDE), other.cast(WIDE))


def _added(*columns: Column) -> Column:
    return reduce(F.try_add, (column.cast(WIDE) for column in columns))


def _percentiles(windows: DataFrame) -> dict[str, Decimal]:
    """Columns such as `p50` and `p99_9`, with their percentiles."""
    found = {name: _PERCENTILE.fullmatch(name) for name in windows.columns}
    return {name: Decimal(f"{each[1]}.{each[2] or 0}") for name, each in found.items() if each}
