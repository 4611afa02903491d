"""Derives the view `readings` for analysts: a row for each metric of a reading, without duplicates and rejects.

Time corrections are applied. The times as sent stand beside the corrected ones.
"""

from collections.abc import Callable

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import READING_TYPE
from spark.decode.codec_declarations import USUAL_TIMES, Times
from spark.engine.built_once import built_once
from spark.log.amendments import effective_log
from spark.log.edge_times import EARLIEST_US
from spark.log.log_table import is_implausible
from spark.log.time_corrections import known_corrections, retimed
from spark.log.warehouse_version import Version, open_version, tables_of


@built_once
def is_reading() -> Column:
    """True for rows of `log` that are readings, not rejects, duplicates or gateways' events."""
    return (F.col("ce_type") == READING_TYPE) & F.col("reject_reason").isNull() & ~F.col("duplicate")


def readings(log: DataFrame, corrections: DataFrame, times: Times = USUAL_TIMES) -> DataFrame:
    """Derive `readings` from `log`, or from any part of it. `corrections` are from `time_corrections.current`."""
    return _each_metric(retimed(log.where(is_reading()), corrections, times))


def _each_metric(retimed: DataFrame) -> DataFrame:
    return _shown(_metrics(retimed), taken_at)


def _each_metric_as_sent(records: DataFrame) -> DataFrame:
    sent = {f"sent_{name}": F.col(name) for name in ("event_time", "time_error_us", "time_quality")}
    unmoved = records.withColumns(sent | {"correction_version": F.lit(None).cast("bigint")})
    return _shown(_metrics(unmoved), F.col)


def _metrics(timed: DataFrame) -> DataFrame:
    plausible = timed.where(~is_implausible())
    others = [name for name in plausible.columns if name not in {"metrics", "value"}]
    return plausible.select(*others, F.inline("metrics")).withColumnRenamed("name", "metric")


def _shown(each: DataFrame, time: Callable[[str], Column]) -> DataFrame:
    """Choose the columns that analysts read. `time` makes the time of a value from the record's."""
    return each.select(
        *("namespace", "device", "stream", "metric", "value"),
        time("event_time").alias("event_time"),
        *("time_error_us", "time_quality", "received_time"),
        *("device_boot", "device_sequence", "device_counter", "doubt"),
        *("gateway", "gateway_boot", "ce_id", "buffer", "lane", "lane_sequence"),
        *("topic", "partition", "offset", "kafka_timestamp", "event_date"),
        time("sent_event_time").alias("sent_event_time"),
        *("sent_time_error_us", "sent_time_quality", "correction_version"),
    )


def taken_at(record_time: str) -> Column:
    """The time when a value was taken: the record's time less the value's `ago_us`, and at least the year 2.

    Python, which collects the rows, cannot hold all earlier times. Only times without a bound can be so early.
    """
    us = F.unix_micros(record_time) - F.coalesce("ago_us", F.lit(0))
    return F.timestamp_micros(F.greatest(us, F.lit(EARLIEST_US)))


def open_readings(spark: SparkSession, warehouse: str, version: Version | None = None) -> DataFrame:
    """Return the warehouse's `readings`, and make it the temporary view `readings`.

    It applies the corrections that there are now. Open it again to apply later ones.
    """
    version = version or open_version(spark, warehouse)
    view = readings_of(spark, tables_of(warehouse, version), version.streams.times)
    view.createOrReplaceTempView("readings")
    return view


def readings_of(spark: SparkSession, tables: str, times: Times) -> DataFrame:
    """Return the readings of one version of the warehouse's tables."""
    log = effective_log(spark, tables)
    corrections = known_corrections(spark, tables)
    may_move = corrections.may_move() if corrections.told_us else F.lit(False)
    # Of most readings no correction moves the time, and all values were taken at the record's time. Their times are the
    # columns of `log`, so that a condition on them skips files.
    as_sent = ~may_move & F.col("pack_span_us").isNull()
    settled = _each_metric_as_sent(log.where(is_reading() & as_sent))
    return settled.unionByName(readings(log.where(~as_sent), corrections.current, times))
