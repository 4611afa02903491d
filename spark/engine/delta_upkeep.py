"""Keeps a Delta table in order: deletes and changes rows, merges small files, and removes files that nothing needs."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.engine.delta_staging import AppendTable, snapshot
from spark.engine.warehouse_folder import is_local

APPEND_ONLY = "delta.appendOnly"
FILE_BYTES = 128 * 2**20
"""Bytes of a merged file at the most. A file of half this size or more is left as it is."""
FILES_MIN = 32
"""Small files before they are merged. To write rows again costs about as much as to append them."""
GROWTH_MIN = 4
"""Least size of all small files together, as a multiple of the largest, which the last merge made."""
FILES_MAX = 256
"""Small files that are merged even if the largest outweighs the others."""
UNSORTED_SHARE = 0.25
"""Share of a partition's small files, by bytes, that nobody sorted, from which on all of them are sorted."""
ROWS_OF_GROUP = 65_536
"""Rows of a sorted file that have statistics of their own. Readers skip those that cannot hold what they look for."""
EMPTY_S_MIN = 3_600.0
"""Seconds that an empty folder is left alone: a replay may have made it just now, for a file that comes next."""
SORTED = "sluice.sortedBy"
"""Tag, in Delta's log, of a file whose rows are sorted."""
SETTINGS_SORTED = {
    # Values of one device are alike: sorted, they need less than half the bytes.
    "spark.sql.parquet.compression.codec": "zstd",
    "parquet.block.row.count.limit": str(ROWS_OF_GROUP),
    # Otherwise Spark sorts the rows by their partition once more, although they have only one.
    "spark.sql.maxConcurrentOutputFileWriters": "2",
}
"""Spark's settings while a sorted file is written."""


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a table's rows in merged files."""

    columns: tuple[str, ...]
    neighbours: str
    """Column that rises from file to file. Only neighbours by it are merged, so a search by it reads few files."""
    rows_max: int
    """Rows of a merged file at the most: as many as are sorted in memory. A file with half of them is left as it is."""

    @property
    def tag(self) -> str:
        """The value of the tag `SORTED`."""
        return ",".join(self.columns)

    @property
    def is_sorted(self) -> str:
        """A condition on Delta's list of files: the file is sorted."""
        return f"coalesce(tags['{SORTED}'] = '{self.tag}', FALSE)"

    @property
    def is_small(self) -> str:
        """A condition on Delta's list of files: the file can be merged.

        An unsorted file with too many rows is of an earlier release.
        """
        rows = "CAST(get_json_object(stats, '$.numRecords') AS BIGINT)"
        return f"{rows} <= IF({self.is_sorted}, {self.rows_max // 2}, {self.rows_max})"


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
    bytes_unsorted: int = 0
    """Bytes of the small files that are not sorted, if the table has an order."""

    @property
    def are_worth_sorting(self) -> bool:
        """True if the files of a day that is over are worth the cost of sorting, although no merge is due."""
        is_much = self.bytes_unsorted > UNSORTED_SHARE * self.bytes
        return self.bytes_unsorted > 0 and (self.count >= FILES_MIN or is_much)

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


def files_by_partition(
    spark: SparkSession, path: str, partition: str | None, order: Order | None = None
) -> list[Files]:
    """Count the small files of each partition; `partition` is the column that the table is partitioned by."""
    java: Any = snapshot(spark, path).allFiles().toDF()
    # If a merge writes several files, some are a little smaller than FILE_BYTES.
    small = F.expr(order.is_small) if order else F.col("size") < FILE_BYTES // 2
    unsorted = small & ~F.expr(order.is_sorted) if order else F.lit(False)
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
            F.sum(F.when(unsorted, F.col("size")).otherwise(0)).alias("unsorted"),
        )
    )
    return [
        Files(row.partition, row.files, row.bytes, row.greatest, row.great, row.unsorted) for row in counted.collect()
    ]


def compact(spark: SparkSession, path: str, where: str | None = None) -> None:
    """Merge the small files of a table, or of the partitions that meet the condition `where`. No row changes."""
    # One thread: if several files were merged at once, a batch that runs meanwhile would get no core.
    values = {"minFileSize": FILE_BYTES // 2, "maxFileSize": FILE_BYTES, "maxThreads": 1}
    with _settings(spark, {f"spark.databricks.delta.optimize.{name}": str(value) for name, value in values.items()}):
        optimize = DeltaTable.forPath(spark, path).optimize()
        (optimize if where is None else optimize.where(where)).executeCompaction()


def merge_sorted(table: AppendTable, where: str, order: Order, must_stop: Callable[[], bool]) -> None:
    """Merge the small files that meet `where`, a condition on Delta's list of files, and sort their rows.

    `must_stop` is asked before each file that is written. No row changes. The table may be append-only, and rows that
    are appended meanwhile stay.
    """
    small = table.begin().files(f"({where}) AND {order.is_small}")
    for files in _neighbours(small, order):
        if must_stop():
            return
        if len(files) == 1 and _sorted_by(files[0]) == order.tag:
            continue
        staged = table.begin()
        with in_sorted_files(table.spark):
            # One task: if several sorted at once, a batch that runs meanwhile would get no core and no memory.
            staged.write(table.rows(files).coalesce(1).sortWithinPartitions(*order.columns))
        staged.commit_same_rows(files, {SORTED: order.tag})


def _neighbours(files: Iterable[Any], order: Order) -> list[list[Any]]:
    """Cut files, in the order of their neighbours, into pieces of at most `rows_max` rows."""
    found = []
    for number, file in enumerate(files):
        stats = json.loads(file.stats())
        found.append((stats["minValues"].get(order.neighbours, 0), number, stats["numRecords"], file))
    pieces: list[list[Any]] = []
    room = 0
    for _, _, rows, file in sorted(found):
        if rows > room:
            pieces.append([])
            room = order.rows_max
        pieces[-1].append(file)
        room -= rows
    return pieces


def _sorted_by(file: Any) -> str | None:
    """The columns that the rows of a file in Delta's log are sorted by; None if they are not sorted."""
    tags: dict[str, str] = json.loads(file.json())["add"].get("tags") or {}
    return tags.get(SORTED)


def delete_rows(spark: SparkSession, path: str, condition: Column) -> None:
    """Delete rows from a table, which may be append-only."""
    with _changeable(spark, path):
        DeltaTable.forPath(spark, path).delete(condition)


def update_rows(spark: SparkSession, path: str, condition: Column, values: dict[str, str | Column]) -> None:
    """Change rows of a table, which may be append-only."""
    with _changeable(spark, path):
        DeltaTable.forPath(spark, path).update(condition, values)


class Removed(NamedTuple):
    """Files that are gone from the disk."""

    files: int
    bytes: int


def vacuum(spark: SparkSession, path: str, keep_hours: float) -> Removed:
    """Remove files that no version of the last `keep_hours` needs. Readers of an older version then fail.

    Of a local table, folders that have been empty for a while are removed too, and only of it is known what was
    removed. Nobody else may commit to the table.
    """
    table = DeltaTable.forPath(spark, path)
    if not is_local(path):
        # Delta refuses less than a week, to spare files of a writer that has not committed yet. There is none here.
        with _settings(spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
            table.vacuum(keep_hours)
        return Removed(0, 0)
    # Delta's own vacuum takes some ten seconds for each table, and makes two commits.
    before_s = time.time() - keep_hours * 3_600
    needed = _needed(spark, path, round(before_s * 1_000))
    removed = Removed(0, 0)
    walked: list[str] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(("_", "."))]
        walked += (os.path.join(folder, name) for name in folders)  # noqa: PTH118 - as os.walk has them
        for name in names:
            file = Path(folder, name)
            # Whatever else lies there is not known to Delta's list of files, and may be needed.
            if name.startswith(("_", ".")) or file.suffix != ".parquet" or file.relative_to(path).as_posix() in needed:
                continue
            about = file.stat()
            if about.st_mtime <= before_s:
                file.unlink()
                # Hadoop's checksums of the file.
                file.with_name(f".{name}.crc").unlink(missing_ok=True)
                removed = Removed(removed.files + 1, removed.bytes + about.st_size)
    # The folders of a folder come after it.
    for folder in reversed(walked):
        with suppress(OSError):
            if Path(folder).stat().st_mtime <= time.time() - EMPTY_S_MIN:
                Path(folder).rmdir()
    return removed


def _needed(spark: SparkSession, path: str, since_ms: int) -> set[str]:
    """Paths of the files that the table has, and of those that it had since a time."""
    now = snapshot(spark, path)
    had = DataFrame(now.tombstones().toDF(), spark).where(F.col("deletionTimestamp") >= since_ms)
    every = DataFrame(now.allFiles().toDF(), spark).select("path").union(had.select("path"))
    return {unquote(row.path) for row in every.collect()}


def in_sorted_files(spark: SparkSession) -> AbstractContextManager[None]:
    """Have sorted rows written so that readers can skip parts of a file."""
    return _settings(spark, SETTINGS_SORTED)


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
