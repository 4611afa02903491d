"""Versions of a warehouse's tables, and which one readers see.

All tables of a version lie in a folder of their own, `vN`. `versions` says what each was made by, and which one counts:
its last row, so that a version takes another's place in one commit. Where a version goes on with other declarations or
another registry, it stands there once more.
"""

from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from importlib.metadata import version as package_version
from typing import cast

from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.codec_declarations import NO_STREAMS, NO_VERSION, Streams

SCHEMA = """
    number int, at timestamp, code_version string, declarations string, streams string, registry string, source string
"""
FROM_KAFKA = "kafka"


class NoWarehouseError(Exception):
    """There are no tables of Sluice in the folder; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Version:
    """What a version's tables are made by."""

    number: int
    streams: Streams = NO_STREAMS
    registry: str = NO_VERSION
    """The version of the devices' registry."""
    source: str = FROM_KAFKA
    """Where its `log` comes from: Kafka, or the version that it was made from."""


def versions_path(warehouse: str) -> str:
    """Return where the table of versions lies."""
    return f"{warehouse.rstrip('/')}/versions"


def folder_of(warehouse: str, number: int) -> str:
    """Return the folder of one version's tables."""
    return f"{warehouse.rstrip('/')}/v{number}"


def tables_of(warehouse: str, version: Version) -> str:
    """Return the folder of a version's tables."""
    return folder_of(warehouse, version.number)


def current_version(spark: SparkSession, warehouse: str) -> Version | None:
    """The version that readers see; None where there is no warehouse yet."""
    path = versions_path(warehouse)
    if not DeltaTable.isDeltaTable(spark, path):
        return None
    row = spark.read.format("delta").load(path).agg(F.max_by(F.struct("*"), "at").alias("last")).first()
    if row is None or row["last"] is None:
        return None
    last = row["last"]
    streams = Streams.from_json(last.streams) if last.streams else NO_STREAMS
    return Version(last.number, streams, last.registry, last.source)


def versions_of(spark: SparkSession, warehouse: str) -> list[int]:
    """The numbers of all versions that there ever were; folders of old ones may be gone."""
    numbers = spark.read.format("delta").load(versions_path(warehouse)).select("number").distinct().collect()
    return sorted(row.number for row in numbers)


def first_made(spark: SparkSession, warehouse: str) -> date:
    """The day on which the warehouse was made."""
    at = spark.read.format("delta").load(versions_path(warehouse)).agg(F.to_date(F.min("at")).alias("day"))
    return cast("date", at.collect()[0].day)


def open_version(spark: SparkSession, warehouse: str) -> Version:
    """Return the version that readers see. Raises NoWarehouseError."""
    version = current_version(spark, warehouse)
    if version is None:
        raise NoWarehouseError(
            f"{warehouse} holds no tables of Sluice. `sluice-cloud ingest --warehouse {warehouse}` makes them."
        )
    return version


def current_tables(spark: SparkSession, warehouse: str) -> str:
    """Return the folder of the tables that readers see. Raises NoWarehouseError."""
    return folder_of(warehouse, open_version(spark, warehouse).number)


def make_current(spark: SparkSession, warehouse: str, version: Version) -> None:
    """Have readers see a version from now on."""
    declared = version.streams
    row = (
        *(version.number, datetime.now(UTC), package_version("sluice"), declared.version, declared.to_json()),
        *(version.registry, version.source),
    )
    frame = spark.createDataFrame([row], SCHEMA)
    frame.coalesce(1).write.format("delta").mode("append").save(versions_path(warehouse))


def note_registry(spark: SparkSession, warehouse: str, registry: str) -> None:
    """Record another registry for the version that readers see, where there is one."""
    version = current_version(spark, warehouse)
    if version is not None and version.registry != registry:
        make_current(spark, warehouse, replace(version, registry=registry))
