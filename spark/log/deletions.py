"""Keeps the table `deletions` of devices whose data was deleted, and empties their old records that come again.

Kafka may still hold such records, a gateway may bring them after an outage, and a replay reads them again. In `log`
they then have only their place in Kafka and their lane's number. So no number is missing, and nothing of the device
stays.
"""

from collections.abc import Mapping
from datetime import datetime

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import GATEWAY_TYPES
from spark.decode.codec_decimals import constant
from spark.engine.delta_staging import open_or_empty
from spark.log.verdicts import DELETED

SCHEMA = "namespace string, device string, deleted_at timestamp"
"""A record is deleted if Kafka took it in before `deleted_at`, or if it may have been taken before then."""
EMPTIED = (
    *("key", "value", "headers", "subject", "event_time", "time_error_us", "time_quality", "received_time"),
    *("gateway_boot", "boot_time_us", "boot_time_error_us", "content_type", "device_boot", "device_sequence"),
    *("device_counter", "doubt"),
    *("metrics", "undeclared", "pack_span_us"),
)
"""Columns of `log` that say something about what the device measured, and when."""

Deletions = Mapping[tuple[str, str], int]
"""Time of the last deletion, in microseconds since 1970, by namespace and device."""


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


def without_deleted(decoded: DataFrame, deletions: Deletions) -> DataFrame:
    """Empty decoded records of deleted data.

    A record stays if it was certainly taken after the deletion: the device may go on, or another may get its name.
    """
    if not deletions:
        return decoded
    by_namespace: dict[str, dict[str, int]] = {}
    for (namespace, device), deleted_us in deletions.items():
        by_namespace.setdefault(namespace, {})[device] = deleted_us
    known = constant(by_namespace, "map<string,map<string,bigint>>")
    by_key = constant({"/".join(name): deleted_us for name, deleted_us in deletions.items()}, "map<string,bigint>")
    # If the headers cannot be read, only the record's key is known.
    at_us = F.when(F.col("namespace").isNull(), F.try_element_at(by_key, F.col("device"))).otherwise(
        F.try_element_at(F.try_element_at(known, F.col("namespace")), F.col("device"))
    )
    earliest_us = F.try_subtract(F.unix_micros("event_time"), F.col("time_error_us"))
    is_later = (F.unix_micros("kafka_timestamp") >= at_us) & (earliest_us >= at_us)
    is_deleted = is_of_device() & at_us.isNotNull() & ~F.coalesce(is_later, F.lit(False))
    return emptied(decoded, F.coalesce(is_deleted, F.lit(False)))


def emptied(records: DataFrame, which: Column) -> DataFrame:
    """Remove the device's data from some rows of `log` or decoded records, and reject them as deleted."""
    types = dict(records.dtypes)
    values = {name: F.lit(None).cast(types[name]) for name in EMPTIED if name in types} | {
        "reject_reason": F.lit(DELETED)
    }
    chosen = {name: F.when(which, value).otherwise(F.col(name)) for name, value in values.items()}
    return records.withColumns(chosen)


def is_of_device() -> Column:
    """True for rows of `log` that a device may have sent: all but gateways' events."""
    return ~F.coalesce(F.col("ce_type").startswith(GATEWAY_TYPES), F.lit(False))


def was_deleted() -> Column:
    """True for rows of `log` that are only the place of a deleted record."""
    return F.coalesce(F.col("reject_reason") == DELETED, F.lit(False))
