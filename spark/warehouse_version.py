"""Versions of a warehouse's tables, and which one readers see.

All tables of a version lie in a folder of their own, `vN`. `versions` says what each was made by, and which one counts:
its last row, so that a version takes another's place in one commit.
"""

from datetime import UTC, datetime
from importlib.metadata import version as package_version

from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

SCHEMA = """
    number int, at timestamp, code_version string, declarations string, streams string, registry string, source string
"""


class NoWarehouseError(Exception):
    """There are no tables of Sluice in the folder; the message says what to do."""


def versions_path(warehouse: str) -> str:
    """Return where the table of versions lies."""
    return f"{warehouse.rstrip('/')}/versions"


def folder_of(warehouse: str, number: int) -> str:
    """Return the folder of one version's tables."""
    return f"{warehouse.rstrip('/')}/v{number}"


def current_number(spark: SparkSession, warehouse: str) -> int | None:
    """The version that readers see; None where there is no warehouse yet."""
    path = versions_path(warehouse)
    if not DeltaTable.isDeltaTable(spark, path):
        return None
    row = spark.read.format("delta").load(path).agg(F.max_by("number", "at").alias("number")).first()
    return None if row is None else row.number


def current_tables(spark: SparkSession, warehouse: str) -> str:
    """Return the folder of the tables that readers see. Raises NoWarehouseError."""
    number = current_number(spark, warehouse)
    if number is None:
        raise NoWarehouseError(
            f"{warehouse} holds no tables of Sluice. `sluice-cloud ingest --warehouse {warehouse}` makes them."
        )
    return folder_of(warehouse, number)


def make_current(  # noqa: PLR0913 - what a version was made by
    spark: SparkSession, warehouse: str, number: int, *, declarations: str, streams: str, registry: str, source: str
) -> None:
    """Have readers see a version from now on."""
    row = (number, datetime.now(UTC), package_version("sluice"), declarations, streams, registry, source)
    frame = spark.createDataFrame([row], SCHEMA)
    frame.coalesce(1).write.format("delta").mode("append").save(versions_path(warehouse))
