"""Calibration and site of readings, applied on read: those of the reading's event time, as the registry stands now.

A calibrated value is value * scale + offset, not rounded: with six decimals each it has at most twelve, and fits in
`CALIBRATED_TYPE` whatever the value, so that figures of windows can be calibrated as exactly as readings.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.codec_decimals import VALUE_TYPE
from spark.registry.registry_spans import borders, last_border, next_border, span_at, with_spans
from spark.registry.registry_table import FACTOR_TYPE
from spark.windows.windows_table import unwindowed

CALIBRATED_TYPE = "decimal(38,12)"
"""Of a calibrated value 20 digits before the point are used; the rest is room for sums."""
MEASURED = ("namespace", "device", "metric")
DEVICE = ("namespace", "device")


def calibrated(readings: DataFrame, calibrations: DataFrame) -> DataFrame:
    """Add `calibrated_value`, `calibration` and `calibration_certain` to `readings`.

    A reading without a calibration keeps its value, and `calibration` is null. `calibration_certain` says whether the
    whole of event time ± `time_error_us` lies between two borders of the metric's spans: else another may be the right
    one.
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
    """Add `site` and `labels` to `readings`: of their event time; null where the device is registered nowhere then."""
    rows = with_sites(readings, devices, "_sites")
    span = span_at(F.col("_sites"), F.unix_micros("event_time"))
    return rows.select(*(F.col(name) for name in readings.columns), span.alias("_site")).select(
        *(F.col(name) for name in readings.columns), *site_columns(F.col("_site"))
    )


def with_calibrations(rows: DataFrame, calibrations: DataFrame, name: str) -> DataFrame:
    """Add the array of the spans of a row's stream and metric; null where there are none."""
    factors = [F.col(factor).cast(FACTOR_TYPE).alias(factor) for factor in ("scale", "offset")]
    joined = with_spans(rows, calibrations, MEASURED, [*factors, F.col("stream")], name)
    stream = F.col("stream")
    own = F.filter(name, lambda span: span["stream"].isNull() | (span["stream"] == stream))
    return joined.withColumn(name, own)


def with_sites(rows: DataFrame, devices: DataFrame, name: str) -> DataFrame:
    """Add the array of a device's spans with `site` and `labels`; null where there are none."""
    # Spans are sorted, and maps cannot be.
    labels = F.array_sort(F.map_entries("labels")).alias("labels")
    return with_spans(rows, devices, DEVICE, [F.col("site"), labels], name)


def site_columns(span: Column) -> tuple[Column, Column]:
    """`site` and `labels` of one of these spans."""
    return span["site"].alias("site"), F.map_from_entries(span["labels"]).alias("labels")


def by_span(value: Column, span: Column) -> Column:
    """A value of `VALUE_TYPE` by the calibration of a span; as it is where that is null."""
    value = value.cast(VALUE_TYPE)
    exact = value * span["scale"] + span["offset"]
    return F.when(span.isNull(), value.cast(CALIBRATED_TYPE)).otherwise(exact.cast(CALIBRATED_TYPE))


def _shown(span: Column) -> Column:
    begins, ends = F.timestamp_micros(span["from_us"]), F.timestamp_micros(span["to_us"])
    shown = F.struct(span["scale"].alias("scale"), span["offset"].alias("offset"), begins.alias("valid_from"))
    return F.when(span.isNotNull(), shown.withField("valid_to", ends))


def _certain(borders: Column, at_us: Column, error_us: Column) -> Column:
    # Differences: a bound may be as large as a bigint, and would overflow if it were added.
    before = F.coalesce(at_us - last_border(borders, at_us) >= error_us, F.lit(True))
    after = F.coalesce(next_border(borders, at_us) - at_us > error_us, F.lit(True))
    return (F.size(borders) == 0) | (~unwindowed() & before & after)
