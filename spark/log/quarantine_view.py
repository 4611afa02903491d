"""Derives the view `quarantine`: records that became no readings, with the reason and their place in Kafka.

The records stay in `log`.
"""

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.log.amendments import effective_log
from spark.log.deletions import was_deleted
from spark.log.log_table import from_kafka, is_implausible
from spark.log.readings_view import is_reading
from spark.log.time_corrections import known_corrections, retimed
from spark.log.verdicts import IMPLAUSIBLE, IMPLAUSIBLE_DATE
from spark.log.warehouse_version import Version, open_version, tables_of

PLACE = ("topic_id", "topic", "partition", "offset")
COLUMNS = (
    *("kafka_timestamp", "topic", "partition", "offset", "kind", "reason", "retried"),
    *("namespace", "gateway", "device", "ce_type", "ce_id", "event_time", "device_boot", "device_sequence"),
    *("device_counter", "content_type", "key", "value", "headers", "declarations", "code_version"),
    *("topic_id", "ordinal"),
)


def open_quarantine(spark: SparkSession, warehouse: str, version: Version | None = None) -> DataFrame:
    """Return the warehouse's `quarantine`, and make it the temporary view `quarantine`.

    It has a row for each record that is a reject, or was one before it was read again (`retried`).
    """
    version = version or open_version(spark, warehouse)
    tables = tables_of(warehouse, version)
    log = effective_log(spark, tables)
    corrections = known_corrections(spark, tables)
    no_date = F.col("event_date") == F.lit(IMPLAUSIBLE_DATE).cast("date")
    may_be_implausible = no_date | corrections.may_move() if corrections.told_us else no_date
    timed = retimed(log.where(is_reading() & may_be_implausible), corrections.current, version.streams.times)
    implausible = timed.where(is_implausible()).withColumn("reject_reason", F.lit(IMPLAUSIBLE))
    rejects = log.where(_is_reject()).unionByName(implausible.select(*log.columns))
    view = with_retried(rejects, log).withColumns({"kind": kind(), "reason": F.col("reject_reason")}).select(*COLUMNS)
    view.createOrReplaceTempView("quarantine")
    return view


def kind() -> Column:
    """The kind of a reject: the reason's text before the colon."""
    return F.substring_index("reject_reason", ":", 1)


def _is_reject() -> Column:
    return F.col("reject_reason").isNotNull() & ~was_deleted()


def still_rejected(log: DataFrame) -> DataFrame:
    """Rows of `log` that are still rejects."""
    return with_retried(log.where(_is_reject()), log).where(~F.col("retried")).drop("retried")


def rejects_by_kind(spark: SparkSession, tables: str) -> dict[str, int]:
    """Count a version's rejects by kind, the most frequent first. Implausible times are not counted."""
    of_kind = still_rejected(effective_log(spark, tables)).groupBy(kind().alias("kind")).count()
    return {row.kind: row["count"] for row in of_kind.orderBy(F.col("count").desc(), "kind").collect()}


def with_retried(rejects: DataFrame, log: DataFrame) -> DataFrame:
    """Return each rejected record's last row, with `retried`: true if it was read again since."""
    last = rejects.groupBy(*PLACE).agg(F.max_by(F.struct("*"), "ordinal").alias("row")).select("row.*")
    again = log.where(~from_kafka()).select(*PLACE).distinct().withColumn("retried", F.lit(True))
    same = [F.col(f"reject.{name}").eqNullSafe(F.col(f"again.{name}")) for name in PLACE]
    joined = last.alias("reject").join(F.broadcast(again).alias("again"), same, "left")
    return joined.select("reject.*", F.coalesce("again.retried", F.lit(False)).alias("retried"))
