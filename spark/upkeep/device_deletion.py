"""Deletes all that one device ever sent, from every table and every version of them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from delta.tables import DeltaTable
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.batch_job import BatchJob
from spark.engine.delta_staging import add_missing_columns
from spark.engine.delta_upkeep import delete_rows, update_rows
from spark.engine.warehouse_folder import folder_exists
from spark.finality.loss_table import losses_path
from spark.finality.stream_proofs import REJECTED
from spark.ingest.former_devices import FORMER
from spark.log.amendments import amendments_path
from spark.log.deletions import append_deletion, is_of_device, read_deletions, was_deleted
from spark.log.device_parts import device_parts_path, read_device_parts
from spark.log.edge_times import LATEST_US
from spark.log.log_table import LOG_PARTITION, log_path, log_schema, read_log
from spark.log.verdicts import DELETED, EMPTIED, IMPLAUSIBLE_DATE
from spark.log.warehouse_version import folder_of, seen_tables, versions_of
from spark.windows.window_changes import changes_path
from spark.windows.windows_table import windows_path


@dataclass(frozen=True, slots=True)
class DeletionCounts:
    """The result of a deletion."""

    records: int
    """Deleted rows of `log`, in the version that readers see."""
    at: datetime
    """Data from before this time is refused from now on."""


def rows_of_device(spark: SparkSession, warehouse: str, namespace: str, device: str) -> int:
    """Count the rows of `log` that hold data of a device. Raises NoWarehouseError."""
    log = read_log(spark, seen_tables(spark, warehouse))
    return log.where(_is_of(namespace, device) & _is_told()).count()


def is_known(spark: SparkSession, warehouse: str, namespace: str, device: str) -> bool:
    """Whether the device was deleted before, or a table that outlives its records still names it."""
    tables = seen_tables(spark, warehouse)
    by_path = (spark.read.format("delta").load(path) for path in (windows_path(tables), changes_path(warehouse)))
    return (namespace, device) in read_deletions(spark, warehouse) or any(
        not table.where(_is_of(namespace, device)).isEmpty() for table in (*by_path, read_device_parts(spark, tables))
    )


def delete_device(
    spark: SparkSession, warehouse: str, namespace: str, device: str, report: Callable[[str], None] = lambda _: None
) -> DeletionCounts:
    """Delete a device's data. Nobody else may write the warehouse meanwhile. A second call finishes a broken-off one.

    `report` gets the name of each table or version before its data is deleted. The files stay on disk until a vacuum.
    """
    # First finish what an earlier run left undone, and write the state to the tables.
    job = BatchJob(spark, warehouse)
    job.save()
    counted = read_log(spark, job.tables).where(_is_of(namespace, device) & _is_told())
    found = counted.agg(F.count("*").alias("rows"), F.unix_micros(F.max("kafka_timestamp")).alias("newest_us")).first()
    at, records = datetime.now(UTC), 0
    if found is not None and found.rows:
        # Kafka's clock may be ahead of this one. Python knows no year after 9999.
        newest_us = min(found.newest_us + 1, LATEST_US)
        at = max(at, datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=newest_us))
        records = found.rows
    # First: if a step below fails, no data of the device can come back.
    append_deletion(spark, warehouse, namespace, device, at)
    report("window_changes")
    delete_rows(spark, changes_path(warehouse), _is_of(namespace, device))
    for number in versions_of(spark, warehouse):
        if not folder_exists(spark, folder_of(warehouse, number)):
            continue
        report(f"v{number}")
        delete_from_version(spark, folder_of(warehouse, number), namespace, device)
    return DeletionCounts(records, at)


def delete_from_version(spark: SparkSession, tables: str, namespace: str, device: str) -> None:
    """Delete a device's data from the tables of one version."""
    is_device = _is_of(namespace, device)
    former = (f"{tables}/{name}" for name in FORMER)
    for path in (amendments_path(tables), windows_path(tables), device_parts_path(tables), *former):
        # A version of an earlier program lacks one table, and has others instead.
        if DeltaTable.isDeltaTable(spark, path):
            delete_rows(spark, path, is_device)
    delete_rows(spark, losses_path(tables), is_device & (F.col("reason") == REJECTED))
    # A version of an earlier program may lack one of the emptied columns.
    add_missing_columns(spark, log_path(tables), log_schema())
    # Last: as long as `log` holds data of the device, the other tables may be unfinished.
    update_rows(spark, log_path(tables), is_device & _is_told(), _nothing())


def _is_of(namespace: str, device: str) -> Column:
    is_named = (F.col("namespace") == namespace) & (F.col("device") == device)
    # If a record's headers could not be read, only its key is known.
    return F.coalesce(
        is_named | (F.col("namespace").isNull() & (F.col("device") == f"{namespace}/{device}")), F.lit(False)
    )


def _is_told() -> Column:
    """Rows of `log` that a device sent. A gateway's loss records about the device hold only counts, and stay."""
    return is_of_device() & ~was_deleted()


def _nothing() -> dict[str, str | Column]:
    """Values of a deleted record in `log`, as a deleted device's later records have them."""
    values: dict[str, str | Column] = {name: F.lit(None) for name in EMPTIED}
    return values | {
        "reject_reason": F.lit(DELETED),
        "duplicate": F.lit(False),
        LOG_PARTITION: F.lit(IMPLAUSIBLE_DATE).cast("date"),
    }
