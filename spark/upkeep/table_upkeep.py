"""Upkeep of the tables while `ingest` runs: merges small files, and removes old rows and files once a day.

The large tables are merged beside the next batches, which only append to these tables. While a backlog is taken in,
merging may last half a minute. Between batches it would delay live readings for so long.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.host.terminal_text import counted
from spark.batch_job import BatchJob
from spark.engine.delta_staging import AppendTable
from spark.engine.delta_upkeep import (
    FILE_BYTES,
    Files,
    Order,
    Removed,
    compact,
    file_count,
    files_by_partition,
    merge_sorted,
    vacuum,
)
from spark.engine.warehouse_folder import folder_exists, folders_in, remove_folder
from spark.ingest.retention import FILES, expire, last_day, note_upkeep, read_horizons
from spark.log.amendments import amendments_path
from spark.log.device_parts import device_parts_path
from spark.log.log_table import LOG_PARTITION, log_path, log_schema, read_log
from spark.log.warehouse_version import first_made, folder_of, open_version, versions_of
from spark.source.kafka_failures import innermost
from spark.upkeep.device_folds import fold_devices
from spark.windows.window_changes import changes_path
from spark.windows.windows_table import WINDOW_PARTITION, fold_date, windows_path

LOOK_BATCHES = 8
"""Batches between two looks at the tables."""
FILES_NEW_MIN = 16
"""New files of a table before its partitions are looked at."""
LOG_ORDER = Order(("device", "event_time"), "ordinal", rows_max=500_000)
"""Order of rows in merged files of `log`: look-ups ask for a device. So many rows take some 500 MB while sorted."""
FAILURES = (PySparkException, Py4JError, OSError)
"""Failures of work that the tables can do without."""
KEEP_DAYS = 7
"""Days to keep files that no table needs any more, for queries that began before."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A table whose small files are merged."""

    path: str
    partition: str | None = None
    is_folded: bool = False
    """Whether its rows are folded, too."""
    fold_all: Callable[[SparkSession, str], None] | None = None
    """Folds the table of a version. Then its files are not merged otherwise."""
    order: Order | None = None
    """The order of its rows in merged files."""


class Upkeep:
    """Upkeep of one job's tables."""

    def __init__(self, job: BatchJob, warn: Callable[[str], None]) -> None:
        """`warn` gets a message about upkeep that failed. Readings are taken all the same."""
        self._job = job
        self._warn = warn
        # A session of its own, so that its settings do not affect the batches.
        self._spark = job.spark.newSession()
        tables = job.tables
        self._beside = (
            _Kept(log_path(tables), LOG_PARTITION, order=LOG_ORDER),
            _Kept(windows_path(tables), WINDOW_PARTITION, is_folded=True),
            _Kept(changes_path(job.warehouse), "at_date"),
            _Kept(amendments_path(tables), LOG_PARTITION),
            _Kept(device_parts_path(tables), fold_all=fold_devices),
        )
        """Tables that are merged beside the batches. Batches only append to them, except to recompute windows."""
        others = set(_tables_in(job.spark, tables)) - {kept.path for kept in self._beside}
        self._others = tuple(_Kept(path) for path in sorted(others))
        self._files_seen = dict.fromkeys((kept.path for kept in (*self._beside, *self._others)), 0)
        self._executor = ThreadPoolExecutor(1, "upkeep")
        self._running: Future[None] | None = None
        self._day: date | None = None
        self._today = date.min
        self._sorted_on = date.min
        """The day on which the days before it were sorted."""
        self._batches = 0
        self._is_ending = False

    def after_batch(self, newest_us: int | None) -> None:
        """Do the upkeep that is due. `newest_us`: when Kafka took in the batch's newest record; None if none came."""
        if newest_us is None:
            return
        self._batches += 1
        if self._batches % LOOK_BATCHES == 0:
            # Between batches: the job itself rewrites these tables now and then.
            self._merge_all(self._job.spark, self._others)
            if self._running is None or self._running.done():
                self.wait()
                self._running = self._executor.submit(self._merge_all, self._spark, self._beside)
        today = _today(newest_us)
        self._daily(today)
        # Last: the daily work waits for all merges, and must not wait until a day that has just ended is sorted.
        self._today = today

    def wait(self) -> None:
        """Wait until the work beside the batches is done."""
        if self._running is not None:
            self._running.result()

    def end(self) -> None:
        """Wait only for the partition that is being merged. The next run does the rest."""
        self._is_ending = True
        self.wait()

    def _merge_all(self, spark: SparkSession, tables: Iterable[_Kept]) -> None:
        for kept in tables:
            failure = _failure(partial(self._merge, spark, kept))
            if failure is not None:
                self._warn(f"{kept.path}: its small files could not be merged, which is tried again later: {failure}")

    def _merge(self, spark: SparkSession, kept: _Kept) -> None:
        files = file_count(spark, kept.path)
        if files >= self._files_seen[kept.path] + FILES_NEW_MIN:
            # First: if the merge fails, it is not tried again at once.
            self._files_seen[kept.path] = files
        elif kept.order is None or self._sorted_on >= self._today:
            return
        self._tidy(spark, kept)
        self._files_seen[kept.path] = min(self._files_seen[kept.path], file_count(spark, kept.path))

    def _tidy(self, spark: SparkSession, kept: _Kept) -> None:
        if kept.fold_all is not None:
            kept.fold_all(spark, self._job.tables)
            return
        today = self._today
        days_ended = kept.order is not None and self._sorted_on < today
        if days_ended:
            # First, as above.
            self._sorted_on = today
        for files in files_by_partition(spark, kept.path, kept.partition, kept.order):
            if self._is_ending:
                return
            # Folding rewrites all files of a date, the large ones too.
            if kept.is_folded and files.bytes < files.bytes_of_great:
                continue
            is_over = days_ended and files.partition is not None and date.fromisoformat(files.partition) < today
            if files.are_due or (is_over and files.are_worth_sorting):
                self._put_in_order(spark, kept, files)

    def _put_in_order(self, spark: SparkSession, kept: _Kept, files: Files) -> None:
        if files.partition is None:
            compact(spark, kept.path)
        elif kept.is_folded:
            pieces = 1 + (files.bytes + files.bytes_of_great) // FILE_BYTES
            with self._job.rewriting_windows:
                fold_date(spark, self._job.tables, date.fromisoformat(files.partition), pieces)
        elif kept.order is not None:
            where = f"partitionValues['{kept.partition}'] = '{files.partition}'"
            table = AppendTable(spark, kept.path, log_schema())
            merge_sorted(table, where, kept.order, lambda: self._is_ending)
        else:
            compact(spark, kept.path, f"{kept.partition} = DATE'{files.partition}'")

    def _daily(self, today: date) -> None:
        spark = self._job.spark
        if self._day is None:
            # A new warehouse has nothing old to remove.
            self._day = last_day(spark, self._job.warehouse) or first_made(spark, self._job.warehouse)
        if today > self._day:
            # `maintain` deletes from the same tables.
            self.wait()
            for words in maintain(self._job, today):
                self._warn(words)
            self._day = today


def maintain(
    job: BatchJob,
    today: date,
    *,
    keep_days: float = KEEP_DAYS,
    report: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Remove rows that are older than `streams.toml` keeps them, and files that nothing has needed for `keep_days`.

    Nobody else may write the warehouse meanwhile. Returns a message for each table whose files could not be removed.
    """
    spark, warehouse = job.spark, job.warehouse
    # First write the state: so no later start needs the expired rows to derive from.
    job.save()
    for what, before in expire(spark, warehouse, job.tables, job.streams, today).items():
        report(f"{what}: nothing from before {before} is left")
    job.horizons = read_horizons(spark, warehouse)
    removed: list[Removed] = []
    failed: list[str] = []
    for path in delta_tables(spark, warehouse):
        try:
            removed.append(vacuum(spark, path, keep_days * 24))
        except FAILURES as error:
            failed.append(f"{path}: its old files could not be removed: {innermost(error)}")
    if not failed:
        files, size = sum(each.files for each in removed), sum(each.bytes for each in removed)
        told = f": {counted(files, 'file')}, {size / 1e6:.1f} MB" if files else ""
        report(f"files that nothing has needed for {keep_days:g} days are removed{told}")
        note_upkeep(spark, warehouse, {FILES: today - timedelta(days=keep_days)})
    return failed


def newest_day(job: BatchJob) -> date:
    """The day from which ages are counted: that of the newest record, or today."""
    newest = read_log(job.spark, job.tables).agg(F.unix_micros(F.max("kafka_timestamp")).alias("us")).collect()[0].us
    return datetime.now(UTC).date() if newest is None else _today(newest)


def remove_old_versions(spark: SparkSession, warehouse: str) -> list[int]:
    """Remove the tables of all versions but the one that readers see. Returns the removed numbers.

    This also removes what a replay that died has left. A replay that runs meanwhile fails, and must be started again.
    """
    current = open_version(spark, warehouse).number
    old = [number for number in {*versions_of(spark, warehouse), current + 1} if number != current]
    there = [number for number in sorted(old) if folder_exists(spark, folder_of(warehouse, number))]
    for number in there:
        remove_folder(spark, folder_of(warehouse, number))
    return there


def delta_tables(spark: SparkSession, warehouse: str) -> list[str]:
    """Paths of all tables in a warehouse, of every version."""
    warehouse = warehouse.rstrip("/")
    folders = [warehouse, *(folder_of(warehouse, number) for number in versions_of(spark, warehouse))]
    return [path for folder in folders for path in _tables_in(spark, folder)]


def _tables_in(spark: SparkSession, folder: str) -> list[str]:
    return [path for path in folders_in(spark, folder) if f"{path}/_delta_log" in folders_in(spark, path)]


def _failure(do: Callable[[], None]) -> str | None:
    """Do work that the tables can do without. Returns why it failed, or None: readings must not wait for it."""
    try:
        do()
    except FAILURES as error:
        return innermost(error)
    return None


def _today(newest_us: int) -> date:
    """The earlier of Kafka's day and this clock's day: by a clock that is ahead, too much would count as old."""
    # Whatever writes to Kafka may choose Kafka's times, and Python knows no year after 9999.
    now_s = datetime.now(UTC).timestamp()
    return datetime.fromtimestamp(max(0, min(now_s, newest_us / 1e6)), UTC).date()
