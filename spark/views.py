"""All tables of a warehouse as SQL finds them."""

from pyspark.sql import DataFrame, SparkSession

from spark.deletions import open_deletions
from spark.evidence import open_gaps
from spark.gateways_view import open_gateways
from spark.log_table import open_log
from spark.quarantine_view import open_quarantine
from spark.readings_view import open_readings
from spark.registry_table import open_calibrations, open_devices, open_gateway_registry
from spark.retention import open_upkeep
from spark.warehouse_version import open_version, versions_path
from spark.window_changes import read_changes
from spark.windows_view import open_windows

VIEWS = (
    *("log", "readings", "windows", "window_changes", "gaps", "gateways", "quarantine"),
    *("devices", "calibrations", "gateway_registry", "versions", "deletions", "upkeep"),
)


def open_all(spark: SparkSession, warehouse: str) -> dict[str, DataFrame]:
    """Return every table by its name, which SQL then finds as a temporary view: `spark.sql("SELECT ...")`.

    As of now: opened anew, they have what came since. Raises NoWarehouseError.
    """
    # One for all: a replay may have another take its place meanwhile.
    version = open_version(spark, warehouse)
    # Windows before what tells of single records, so that these hold all that windows speak of.
    found = {
        "windows": open_windows(spark, warehouse, version=version),
        "gaps": open_gaps(spark, warehouse, version),
        "gateways": open_gateways(spark, warehouse, version),
        "readings": open_readings(spark, warehouse, version),
        "quarantine": open_quarantine(spark, warehouse, version),
        "log": open_log(spark, warehouse, version),
        "window_changes": read_changes(spark, warehouse),
        "versions": spark.read.format("delta").load(versions_path(warehouse)),
        "devices": open_devices(spark, warehouse),
        "calibrations": open_calibrations(spark, warehouse),
        "gateway_registry": open_gateway_registry(spark, warehouse),
        "deletions": open_deletions(spark, warehouse),
        "upkeep": open_upkeep(spark, warehouse),
    }
    for name in ("window_changes", "versions"):
        found[name].createOrReplaceTempView(name)
    return {name: found[name] for name in VIEWS}
