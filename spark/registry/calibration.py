"""Applies calibration and site to readings on read, by their event time and the present registry.

A calibrated value is value * scale + offset, not rounded. Each of the three has at most six decimals, so the
result has at most twelve, and always fits in `CALIBRATED_TYPE`. So windows can be calibrated as exactly as readings.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.value_types import VALUE_TYPE
from spark.registry.registry_spans import borders, last_border, next_border, span_at, with_spans
from spark.registry.registry_table import FACTOR_TYPE
from spark.windows.windows_table import unwindowed

CALIBRATED_TYPE = "decimal(38,12)"
"""Type of calibrated values. A value uses 20 digits before the point; the rest is room for sums."""
MEASURED = ("namespace", "device", "metric")
DEVICE = ("namespace", "device")


def calibrated(readings: DataFrame, calibrations: DataFrame) -> DataFrame:
    """Add `calibrated_value`, `calibration` and `calibration_certain` to `readings`.

    A reading without a calibration keeps its value, and `calibration` is null. `calibration_certain` is true if the
    whole of event time ± `time_error_us` lies between two borders of the metric's spans. Else another calibration may
    be the right one.
    """
    at_us = F.unix_micros("event_time")
    rows = with_calibrations(readings, calibrations, "_spans")
    chosen = rows.select(
        "*", span_at(F.col("_spans"), at_us).alias("_span"), borders(F.col("_spans")).alias("_borders")
    )
    return chosen.select(
        *(F.col(name) for name in readings.columns),
        by_span(F.col("value"), F.col("_span")).alias("calibrated_value"),
        _shown(F.col("_span")).alias("calibration"),
        _certain(F.col("_borders"), at_us, F.col("time_error_us")).alias("calibration_certain"),
    )


def with_site(readings: DataFrame, devices: DataFrame) -> DataFrame:
    """Add `site` and `labels` of the event time to `readings`. Null if the device was not registered then."""
    rows = with_sites(readings, devices, "_sites")
    span = span_at(F.col("_sites"), F.unix_micros("event_time"))
    return rows.select(*(F.col(name) for name in readings.columns), span.alias("_site")).select(
        *(F.col(name) for name in readings.columns), *site_columns(F.col("_site"))
    )


def with_calibrations(rows: DataFrame, calibrations: DataFrame, name: str) -> DataFrame:
    """Add the array of calibration spans for a row's stream and metric. Null if there are none."""
    factors = [F.col(factor).cast(FACTOR_TYPE).alias(factor) for factor in ("scale", "offset")]
    joined = with_spans(rows, calibrations, MEASURED, [*factors, F.col("stream")], name)
    stream = F.col("stream")
    own = F.filter(name, lambda span: span["stream"].isNull() | (span["stream"] == stream))
    return joined.withColumn(name, own)


def with_sites(rows: DataFrame, devices: DataFrame, name: str) -> DataFrame:
    """Add the array of a device's spans with `site` and `labels`. Null if there are none."""
    # As an array, because spans are sorted and Spark cannot sort maps.
    labels = F.array_sort(F.map_entries("labels")).alias("labels")
    return with_spans(rows, devices, DEVICE, [F.col("site"), labels], name)


def site_columns(span: Column) -> tuple[Column, Column]:
    """The columns `site` and `labels` of a span."""
    return span["site"].alias("site"), F.map_from_entries(span["labels"]).alias("labels")


def by_span(value: Column, span: Column) -> Column:
    """A value of `VALUE_TYPE`, calibrated by a span. Unchanged if the span is null."""
    value = value.cast(VALUE_TYPE)
    exact = value * span["scale"] + span["offset"]
    return F.when(span.isNull(), value.cast(CALIBRATED_TYPE)).otherwise(exact.cast(CALIBRATED_TYPE))


def _shown(span: Column) -> Column:
    begins, ends = F.timestamp_micros(span["from_us"]), F.timestamp_micros(span["to_us"])
    shown = F.struct(span["scale"].alias("scale"), span["offset"].alias("offset"), begins.alias("valid_from"))
    return F.when(span.isNotNull(), shown.withField("valid_to", ends))


def _certain(borders: Column, at_us: Column, error_us: Column) -> Column:
    # Subtract, do not add: a bound may be any bigint, and its sum with a time would overflow.
    before = F.coalesce(at_us - last_border(borders, at_us) >= error_us, F.lit(True))
    after = F.coalesce(next_border(borders, at_us) - at_us > error_us, F.lit(True))
    return (F.size(borders) == 0) | (~unwindowed() & before & after)
