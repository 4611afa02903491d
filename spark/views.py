"""All tables of a warehouse as SQL finds them."""

from collections.abc import Callable, Collection

from pyspark.sql import DataFrame, SparkSession

from spark.deletions import open_deletions
from spark.evidence import open_gaps
from spark.gateways_view import open_gateways
from spark.log_table import open_log
from spark.quarantine_view import open_quarantine
from spark.readings_view import open_readings
from spark.registry_table import open_calibrations, open_devices, open_gateway_registry
from spark.retention import open_upkeep
from spark.warehouse_version import Version, open_version, versions_path
from spark.window_changes import read_changes
from spark.windows_view import open_windows

OPENERS: dict[str, Callable[[SparkSession, str, Version], DataFrame]] = {
    # Windows before what tells of single records, so that these hold all that windows speak of.
    "windows": lambda spark, warehouse, version: open_windows(spark, warehouse, version=version),
    "gaps": open_gaps,
    "gateways": open_gateways,
    "readings": open_readings,
    "quarantine": open_quarantine,
    "log": open_log,
    "window_changes": lambda spark, warehouse, _: read_changes(spark, warehouse),
    "versions": lambda spark, warehouse, _: spark.read.format("delta").load(versions_path(warehouse)),
    "devices": lambda spark, warehouse, _: open_devices(spark, warehouse),
    "calibrations": lambda spark, warehouse, _: open_calibrations(spark, warehouse),
    "gateway_registry": lambda spark, warehouse, _: open_gateway_registry(spark, warehouse),
    "deletions": lambda spark, warehouse, _: open_deletions(spark, warehouse),
    "upkeep": lambda spark, warehouse, _: open_upkeep(spark, warehouse),
}
"""By the names of all views; opened in this order."""


def open_all(spark: SparkSession, warehouse: str, names: Collection[str] = OPENERS.keys()) -> dict[str, DataFrame]:
    """Return tables by their names, every one or some, which SQL then finds as views: `spark.sql("SELECT ...")`.

    As of now: opened anew, they have what came since. Raises NoWarehouseError.
    """
    # One for all: a replay may have another take its place meanwhile.
    version = open_version(spark, warehouse)
    found = {name: opened(spark, warehouse, version) for name, opened in OPENERS.items() if name in names}
    for name, table in found.items():
        table.createOrReplaceTempView(name)
    return found
