"""Keeps the versions of a warehouse's tables, and the one that readers see.

All tables of a version lie in a folder of their own, `vN`. The table `versions` says what each version was made by. The
last row of the highest number counts, so that a version replaces another in one commit. If a version goes on with other
declarations or another registry, it gets another row.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from importlib.metadata import version as package_version
from typing import TypeVar, cast

from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.codec_declarations import NO_STREAMS, NO_VERSION, Streams
from spark.engine.delta_staging import snapshot
from spark.engine.told_error import ToldError
from spark.engine.warehouse_folder import VERSIONS, folders_in, locked, no_tables

SCHEMA = """
    number int, at timestamp, code_version string, declarations string, streams string, registry string, source string
"""
FROM_KAFKA = "kafka"
LOCK = "_versions.lock"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Changed = TypeVar("Changed", bound="Version | None")


class NoWarehouseError(ToldError):
    """There are no tables of Sluice in the folder. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the tables, with the declarations and the registry that made it."""

    number: int
    streams: Streams = NO_STREAMS
    registry: str = NO_VERSION
    """Version of the devices' registry."""
    source: str = FROM_KAFKA
    """Source of its `log`: Kafka, or the version that it was made from."""


@dataclass(frozen=True, slots=True)
class Published:
    """The user metadata in a commit of `versions`. It shows if a copy of the warehouse lacks a part of the tables."""

    number: int
    tables: Mapping[str, int]
    """Number of each table's last commit when the version was published; empty if the version only goes on."""

    def to_json(self) -> str:
        return json.dumps({"number": self.number, "tables": self.tables})

    @classmethod
    def from_json(cls, text: str) -> "Published":
        return cls(**json.loads(text))


def versions_path(warehouse: str) -> str:
    """Return the path of the table of versions."""
    return f"{warehouse.rstrip('/')}/{VERSIONS}"


def folder_of(warehouse: str, number: int) -> str:
    """Return the folder of one version's tables."""
    return f"{warehouse.rstrip('/')}/v{number}"


def tables_of(warehouse: str, version: Version) -> str:
    """Return the folder of a version's tables."""
    return folder_of(warehouse, version.number)


def current_version(spark: SparkSession, warehouse: str) -> Version | None:
    """The version that readers see; None if there is no warehouse yet."""
    return _last(spark, warehouse)[0]


def _last(spark: SparkSession, warehouse: str) -> tuple[Version | None, datetime | None]:
    """The version that readers see, and since when."""
    path = versions_path(warehouse)
    if not DeltaTable.isDeltaTable(spark, path):
        return None, None
    rows = spark.read.format("delta").load(path).withColumn("at_us", F.unix_micros("at"))
    # Sorted, not aggregated, which would need a shuffle.
    row = rows.orderBy(F.desc("number"), F.desc("at")).first()
    if row is None:
        return None, None
    streams = Streams.from_json(row.streams) if row.streams else NO_STREAMS
    return Version(row.number, streams, row.registry, row.source), EPOCH + timedelta(microseconds=row.at_us)


def versions_of(spark: SparkSession, warehouse: str) -> list[int]:
    """The numbers of all versions ever made. Folders of old ones may be gone."""
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
        raise NoWarehouseError(no_tables(warehouse))
    return version


def seen_tables(spark: SparkSession, warehouse: str, version: Version | None = None) -> str:
    """Return the folder of a version's tables, by default of the version that readers see. Raises NoWarehouseError."""
    return tables_of(warehouse, version or open_version(spark, warehouse))


def change_version(spark: SparkSession, warehouse: str, change: Callable[[Version | None], Changed]) -> Changed:
    """Replace the version that readers see by `change` of it. Return the new version.

    On a local file system a lock keeps others from changing it meanwhile.
    """
    with locked(warehouse, LOCK):
        before, since = _last(spark, warehouse)
        after = change(before)
        if after is not None and after != before:
            # Always later than the last one, even if the host's clock was set back.
            now = datetime.now(UTC)
            at = now if since is None else max(now, since + timedelta(microseconds=1))
            is_another = before is None or after.number != before.number
            tables = _commits_in(spark, tables_of(warehouse, after)) if is_another else {}
            _append(spark, warehouse, after, at, Published(after.number, tables))
        return after


def note_registry(spark: SparkSession, warehouse: str, registry: str) -> None:
    """Record another registry for the version that readers see, if there is one."""
    change_version(spark, warehouse, lambda now: None if now is None else replace(now, registry=registry))


def _commits_in(spark: SparkSession, folder: str) -> dict[str, int]:
    """The number of the last commit of each table in a folder."""
    tables = [path for path in folders_in(spark, folder) if DeltaTable.isDeltaTable(spark, path)]
    return {path.rpartition("/")[2]: int(snapshot(spark, path).version()) for path in tables}


def _append(spark: SparkSession, warehouse: str, version: Version, at: datetime, published: Published) -> None:
    declared = version.streams
    row = (
        *(version.number, at, package_version("sluice"), declared.version, declared.to_json()),
        *(version.registry, version.source),
    )
    frame = spark.createDataFrame([row], SCHEMA)
    writer = frame.coalesce(1).write.format("delta").mode("append").option("userMetadata", published.to_json())
    writer.save(versions_path(warehouse))
