"""Keeps the table `deletions` of devices whose data was deleted.

If their old records come again, `record_verdicts` empties them. Kafka may still hold such records, a gateway may bring
them after an outage, and a replay reads them again. In `log` they then have only their place in Kafka and their lane's
number. So no number is missing, and nothing of the device stays.
"""

from datetime import datetime

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import GATEWAY_TYPES
from spark.engine.delta_staging import open_or_empty
from spark.log.record_verdicts import Deletions
from spark.log.verdicts import DELETED

SCHEMA = "namespace string, device string, deleted_at timestamp"
"""A record is deleted if Kafka took it in before `deleted_at`, or if it may have been taken before then."""


def deletions_path(warehouse: str) -> str:
    """Return the table's path, beside the versions, because it applies to all of them."""
    return f"{warehouse.rstrip('/')}/deletions"


def open_deletions(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the table, and make it the temporary view `deletions`. If there is no table, the view has no rows."""
    return open_or_empty(spark, deletions_path(warehouse), "deletions", SCHEMA)


def read_deletions(spark: SparkSession, warehouse: str) -> Deletions:
    """Return the last deletion of each device."""
    if not DeltaTable.isDeltaTable(spark, deletions_path(warehouse)):
        return {}
    at_us = F.unix_micros(F.max("deleted_at")).alias("at_us")
    last = open_deletions(spark, warehouse).groupBy("namespace", "device").agg(at_us)
    return {(row.namespace, row.device): row.at_us for row in last.collect()}


def append_deletion(spark: SparkSession, warehouse: str, namespace: str, device: str, at: datetime) -> None:
    """Record that a device's data is deleted. It takes effect in the job that opens the warehouse next."""
    rows = spark.createDataFrame([(namespace, device, at)], SCHEMA).coalesce(1)
    rows.write.format("delta").mode("append").save(deletions_path(warehouse))


def is_of_device() -> Column:
    """True for rows of `log` that a device may have sent: all but gateways' events."""
    return ~F.coalesce(F.col("ce_type").startswith(GATEWAY_TYPES), F.lit(False))


def was_deleted() -> Column:
    """True for rows of `log` that are only the place of a deleted record."""
    return F.coalesce(F.col("reject_reason") == DELETED, F.lit(False))
