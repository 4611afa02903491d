"""Keeps a Delta table in order: deletes and changes rows, merges small files, and removes files that nothing needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.engine.delta_staging import snapshot

APPEND_ONLY = "delta.appendOnly"
FILE_BYTES = 128 * 2**20
"""Bytes of a merged file at the most. A file of half this size or more is left as it is."""
FILES_MIN = 32
"""Small files before they are merged. To write rows again costs about as much as to append them."""
GROWTH_MIN = 4
"""Least size of all small files together, as a multiple of the largest, which the last merge made."""
FILES_MAX = 256
"""Small files that are merged even if the largest outweighs the others."""


@dataclass(frozen=True, slots=True)
class Files:
    """The small files of one partition, which could be merged."""

    partition: str | None
    """The partition's value; None for a table without partitions."""
    count: int
    bytes: int
    bytes_of_greatest: int
    """Bytes of the largest small file."""
    bytes_of_great: int = 0
    """Bytes of all other files, which are left as they are."""

    @property
    def are_due(self) -> bool:
        """True if a merge is worth its cost. GROWTH_MIN limits how often each byte is written again."""
        has_grown = self.bytes >= GROWTH_MIN * self.bytes_of_greatest
        return self.count >= FILES_MIN and (has_grown or self.count >= FILES_MAX)


def file_count(spark: SparkSession, path: str) -> int:
    """The number of a table's files. No Spark job runs if Delta's checksum file has it."""
    now = snapshot(spark, path)
    checksum = now.checksumOpt()
    return int(checksum.get().numFiles() if checksum.isDefined() else now.numOfFiles())


def files_by_partition(spark: SparkSession, path: str, partition: str | None) -> list[Files]:
    """Count the small files of each partition; `partition` is the column that the table is partitioned by."""
    java: Any = snapshot(spark, path).allFiles().toDF()
    # If a merge writes several files, some are a little smaller than FILE_BYTES.
    small = F.col("size") < FILE_BYTES // 2
    value = F.lit(None).cast("string") if partition is None else F.col("partitionValues")[partition]
    of_small, of_great = F.when(small, F.col("size")).otherwise(0), F.when(~small, F.col("size")).otherwise(0)
    counted = (
        DataFrame(java, spark)
        .groupBy(value.alias("partition"))
        .agg(
            F.count_if(small).alias("files"),
            F.sum(of_small).alias("bytes"),
            F.max(of_small).alias("greatest"),
            F.sum(of_great).alias("great"),
        )
    )
    return [Files(row.partition, row.files, row.bytes, row.greatest, row.great) for row in counted.collect()]


def compact(spark: SparkSession, path: str, where: str | None = None) -> None:
    """Merge the small files of a table, or of the partitions that meet the condition `where`. No row changes."""
    # One thread: if several files were merged at once, a batch that runs meanwhile would get no core.
    values = {"minFileSize": FILE_BYTES // 2, "maxFileSize": FILE_BYTES, "maxThreads": 1}
    with _settings(spark, {f"spark.databricks.delta.optimize.{name}": str(value) for name, value in values.items()}):
        optimize = DeltaTable.forPath(spark, path).optimize()
        (optimize if where is None else optimize.where(where)).executeCompaction()


def delete_rows(spark: SparkSession, path: str, condition: Column) -> None:
    """Delete rows from a table, which may be append-only."""
    with _changeable(spark, path):
        DeltaTable.forPath(spark, path).delete(condition)


def update_rows(spark: SparkSession, path: str, condition: Column, values: dict[str, str | Column]) -> None:
    """Change rows of a table, which may be append-only."""
    with _changeable(spark, path):
        DeltaTable.forPath(spark, path).update(condition, values)


def vacuum(spark: SparkSession, path: str, keep_hours: float) -> None:
    """Remove files that no version of the last `keep_hours` needs. Readers of an older version then fail."""
    # Delta refuses less than a week, to spare files of a writer that has not committed yet. Nobody else writes here.
    with _settings(spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
        DeltaTable.forPath(spark, path).vacuum(keep_hours)


@contextmanager
def _changeable(spark: SparkSession, path: str) -> Iterator[None]:
    """Let an append-only table be changed meanwhile. It is closed afterwards, even if a killed run left it open."""
    properties = snapshot(spark, path).metadata().configuration()
    if not properties.contains(APPEND_ONLY):
        yield
        return
    _set_property(spark, path, APPEND_ONLY, "false")
    try:
        yield
    finally:
        _set_property(spark, path, APPEND_ONLY, "true")


def _set_property(spark: SparkSession, path: str, name: str, value: str) -> None:
    quoted = path.replace("`", "``")
    spark.sql(f"ALTER TABLE delta.`{quoted}` SET TBLPROPERTIES ('{name}' = '{value}')")


@contextmanager
def _settings(spark: SparkSession, values: dict[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in values}
    for name, value in values.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, was in before.items():
            if was is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, was)
