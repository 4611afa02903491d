"""`readings`: what an analyst queries. One row per metric of one reading, without duplicates and rejects."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.log_table import open_log
from spark.payload_decode import READING_TYPE


def readings(log: DataFrame) -> DataFrame:
    """Derive `readings` from `log`, or from any part of it."""
    return log.where((F.col("ce_type") == READING_TYPE) & F.col("reject_reason").isNull() & ~F.col("duplicate")).select(
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
    )


def open_readings(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the warehouse's `readings`, which SQL then finds as the temporary view `readings`."""
    view = readings(open_log(spark, warehouse))
    view.createOrReplaceTempView("readings")
    return view
