"""Opens the tables of a warehouse as SQL views."""

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
from spark.views.losses_view import open_losses
from spark.views.windows_view import open_windows
from spark.windows.window_changes import read_changes

VIEWS = (
    *("log", "readings", "windows", "window_changes", "gaps", "losses", "gateways", "quarantine"),
    *("devices", "calibrations", "gateway_registry", "versions", "deletions", "upkeep"),
)
"""Names of all views, in the order in which messages list them."""
OPENERS: dict[str, Callable[[SparkSession, str, Version], DataFrame]] = {
    # Windows before tables of single records, so that those tables hold every record that windows count.
    "windows": lambda spark, warehouse, version: open_windows(spark, warehouse, version=version),
    "gaps": open_gaps,
    "losses": open_losses,
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
"""Openers of the views, in the order in which they are called."""


def open_all(spark: SparkSession, warehouse: str, names: Collection[str] = VIEWS) -> dict[str, DataFrame]:
    """Return the tables of these names, and register them as views for `spark.sql("SELECT ...")`.

    They are as of now: open them again to see later records. Raises NoWarehouseError.
    """
    # One version for all: a replay may publish another meanwhile.
    version = open_version(spark, warehouse)
    found = {name: opener(spark, warehouse, version) for name, opener in OPENERS.items() if name in names}
    # The other openers register their views themselves.
    for name in found.keys() & {"window_changes", "versions"}:
        found[name].createOrReplaceTempView(name)
    return {name: found[name] for name in names}
