"""All tables of a warehouse as SQL finds them."""

from collections.abc import Callable, Collection

from pyspark.sql import DataFrame, SparkSession

from spark.ingest.retention import open_upkeep
from spark.log.deletions import open_deletions
from spark.log.log_table import open_log
from spark.log.quarantine_view import open_quarantine
from spark.log.readings_view import open_readings
from spark.log.warehouse_version import Version, open_version, versions_path
from spark.registry.registry_table import open_calibrations, open_devices, open_gateway_registry
from spark.views.evidence import open_gaps
from spark.views.gateways_view import open_gateways
from spark.views.windows_view import open_windows
from spark.windows.window_changes import read_changes

VIEWS = (
    *("log", "readings", "windows", "window_changes", "gaps", "gateways", "quarantine"),
    *("devices", "calibrations", "gateway_registry", "versions", "deletions", "upkeep"),
)
"""In the order in which people are told of them."""
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
"""In the order in which they are opened."""


def open_all(spark: SparkSession, warehouse: str, names: Collection[str] = VIEWS) -> dict[str, DataFrame]:
    """Return tables by their names, every one or some, which SQL then finds as views: `spark.sql("SELECT ...")`.

    As of now: opened anew, they have what came since. Raises NoWarehouseError.
    """
    # One for all: a replay may have another take its place meanwhile.
    version = open_version(spark, warehouse)
    found = {name: opener(spark, warehouse, version) for name, opener in OPENERS.items() if name in names}
    # The others are views already.
    for name in found.keys() & {"window_changes", "versions"}:
        found[name].createOrReplaceTempView(name)
    return {name: found[name] for name in names}
