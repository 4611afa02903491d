"""`readings`: what an analyst queries. One row per metric of one reading, without duplicates and rejects.

Times are as time corrections put them right; what was sent stands beside them.
"""

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.log_table import open_log
from spark.payload_decode import READING_TYPE
from spark.time_corrections import BOOT, current, open_corrections, retimed


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
    """Return the warehouse's `readings`, which SQL then finds as the temporary view `readings`."""
    log = open_log(spark, warehouse)
    corrections = current(open_corrections(spark, warehouse, log))
    wrong = F.broadcast(corrections.where("correction.wrong_until_us is not null").select(*BOOT))
    # Most readings were sent by a synced clock that nobody took back: no correction moves them. Kept apart, a query's
    # event times find their files as if there were no corrections.
    may_move = F.col("boot_time_error_us").isNotNull()
    parts = (
        readings(log.where(~may_move).join(wrong, list(BOOT), "left_anti"), corrections.where(F.lit(False))),
        readings(log.where(~may_move).join(wrong, list(BOOT), "left_semi"), corrections),
        readings(log.where(may_move), corrections),
    )
    settled, wrongly_told, unsettled = parts
    view = settled.unionByName(wrongly_told).unionByName(unsettled)
    view.createOrReplaceTempView("readings")
    return view
