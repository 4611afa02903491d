"""`devices`, `calibrations` and `gateway_registry`: the registry as tables, which each load replaces whole.

Sites and calibrations are applied on read, so a loaded registry counts at once, for old readings too. No other job
writes these tables: a registry may be loaded while `ingest` runs.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.engine.delta_staging import open_or_empty, table_exists
from spark.engine.warehouse_folder import absolute, locked
from spark.registry.registry import Registry

FACTOR_TYPE = "decimal(12,6)"
"""Type of `scale` and `offset`: six digits before the point and six behind it."""
DEVICES_SCHEMA = """
    namespace string, device string, site string, labels map<string,string>,
    valid_from timestamp, valid_to timestamp, registry_version string
"""
CALIBRATIONS_SCHEMA = f"""
    namespace string, device string, stream string, metric string, scale {FACTOR_TYPE}, offset {FACTOR_TYPE},
    valid_from timestamp, valid_to timestamp, registry_version string
"""
GATEWAYS_SCHEMA = """
    namespace string, gateway string, site string, retired_from timestamp, registry_version string,
    topics array<string>
"""
DEVICES, CALIBRATIONS, GATEWAYS = "devices", "calibrations", "gateway_registry"
SCHEMAS = {DEVICES: DEVICES_SCHEMA, CALIBRATIONS: CALIBRATIONS_SCHEMA, GATEWAYS: GATEWAYS_SCHEMA}
LOCK = "_registry.lock"


def table_path(warehouse: str, table: str) -> str:
    """Return the path of one of these tables. They lie beside the versions, because they belong to none."""
    return f"{warehouse.rstrip('/')}/{table}"


def load_registry(spark: SparkSession, warehouse: str, registry: Registry) -> str:
    """Replace the registry, with a commit for each table. Returns the new registry's version.

    Each commit's `userMetadata` and each row name the version. On a local file system, two loads wait for one another.
    On an object store, the caller must run only one load at a time.
    """
    frames = {
        DEVICES: devices_frame(spark, registry),
        CALIBRATIONS: calibrations_frame(spark, registry),
        GATEWAYS: gateways_frame(spark, registry),
    }
    with locked(absolute(warehouse), LOCK):
        for table, frame in frames.items():
            (
                frame.coalesce(1)
                .write.format("delta")
                .mode("overwrite")
                .option("overwriteSchema", "true")
                .option("userMetadata", f"registry {registry.version}")
                .save(table_path(absolute(warehouse), table))
            )
    return registry.version


def devices_frame(spark: SparkSession, registry: Registry) -> DataFrame:
    """The registry's devices as rows of `devices`."""
    rows = ({**asdict(each), "labels": dict(each.labels)} for each in registry.devices)
    return _frame(spark, registry, rows, DEVICES_SCHEMA)


def calibrations_frame(spark: SparkSession, registry: Registry) -> DataFrame:
    """The registry's calibrations as rows of `calibrations`."""
    return _frame(spark, registry, map(asdict, registry.calibrations), CALIBRATIONS_SCHEMA)


def gateways_frame(spark: SparkSession, registry: Registry) -> DataFrame:
    """The registry's gateways as rows of `gateway_registry`."""
    return _frame(spark, registry, map(asdict, registry.gateways), GATEWAYS_SCHEMA)


def _frame(spark: SparkSession, registry: Registry, rows: Iterable[dict[str, Any]], schema: str) -> DataFrame:
    version = {"registry_version": registry.version}
    return spark.createDataFrame([row | version for row in rows], schema)


def has_registry(spark: SparkSession, warehouse: str) -> bool:
    """Tell whether a registry was ever loaded."""
    return table_exists(spark, table_path(absolute(warehouse), GATEWAYS))


def open_devices(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the devices with their sites, and register them as the temporary view `devices`.

    The table is as of now: open it again after a load. It has no rows if no registry was loaded yet.
    """
    return _opened(spark, warehouse, DEVICES)


def open_calibrations(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the calibrations, as `open_devices` returns the devices."""
    return _opened(spark, warehouse, CALIBRATIONS)


def open_gateway_registry(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the registered gateways, as `open_devices` returns the devices."""
    return _opened(spark, warehouse, GATEWAYS)


class RegisteredGateway(NamedTuple):
    """A gateway in the registry."""

    namespace: str
    gateway: str
    site: str | None
    retired_us: int | None
    """When it was retired, in microseconds since 1970."""
    topics: tuple[str, ...]
    """Topics that are its own."""


def registered_gateways(spark: SparkSession, warehouse: str) -> list[RegisteredGateway]:
    """Return the gateways of the warehouse's present registry."""
    if not has_registry(spark, warehouse):
        return []
    retired_us = F.unix_micros("retired_from").alias("retired_us")
    rows = (
        open_gateway_registry(spark, warehouse).select("namespace", "gateway", "site", retired_us, "topics").collect()
    )
    return [
        RegisteredGateway(row.namespace, row.gateway, row.site, row.retired_us, tuple(row.topics or ())) for row in rows
    ]


def retired_gateways(gateway_registry: DataFrame) -> DataFrame:
    """Retired gateways, from which nothing more is expected: `namespace`, `gateway`, `retired_from_us`."""
    retired = gateway_registry.where(F.col("retired_from").isNotNull())
    return retired.select("namespace", "gateway", F.unix_micros("retired_from").alias("retired_from_us"))


def _opened(spark: SparkSession, warehouse: str, table: str) -> DataFrame:
    return open_or_empty(spark, table_path(absolute(warehouse), table), table, SCHEMAS[table])
