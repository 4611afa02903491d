"""`readings`: what an analyst queries. One row per metric of one reading, without duplicates and rejects.

Times are as time corrections put them right; what was sent stands beside them.
"""

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.log_table import open_log
from spark.payload_decode import READING_TYPE
from spark.time_corrections import known_corrections, retimed


def is_reading() -> Column:
    """Tell which rows of `log` are readings: neither rejects nor duplicates, nor what a gateway says of itself."""
    return (F.col("ce_type") == READING_TYPE) & F.col("reject_reason").isNull() & ~F.col("duplicate")


def readings(log: DataFrame, corrections: DataFrame) -> DataFrame:
    """Derive `readings` from `log`, or from any part of it. `corrections` as `time_corrections.current` yields them."""
    return retimed(log.where(is_reading()), corrections).select(
        "namespace",
        "device",
        "stream",
        F.explode("metrics").alias("metric", "value"),
        "event_time",
        "time_error_us",
        "time_quality",
        "received_time",
        "device_boot",
        "device_sequence",
        "doubt",
        "gateway",
        "gateway_boot",
        "ce_id",
        "buffer",
        "lane",
        "lane_sequence",
        "topic",
        "partition",
        "offset",
        "kafka_timestamp",
        "event_date",
        "sent_event_time",
        "sent_time_error_us",
        "sent_time_quality",
        "correction_version",
    )


def open_readings(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the warehouse's `readings`, which SQL then finds as the temporary view `readings`.

    Times are put right by the corrections that there are now: opened anew, it has those that came since.
    """
    log = open_log(spark, warehouse)
    corrections = known_corrections(spark, warehouse, log)
    may_move = corrections.may_move() if corrections.told_us else F.lit(False)
    # Kept apart, what no correction moves is found by its event time as if there were none.
    settled = readings(log.where(~may_move), corrections.current.where(F.lit(False)))
    view = settled.unionByName(readings(log.where(may_move), corrections.current))
    view.createOrReplaceTempView("readings")
    return view
