"""What `ingest` does for its tables as it goes: small files made one, old rows and files removed once a day.

Those of the tables that grow with the readings are made one beside the next batches, which only append to them: half a
minute of it, while a backlog is worked off, would hold up live readings.
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

from spark.batch_job import BatchJob
from spark.engine.delta_upkeep import FILE_BYTES, compact, file_count, files_by_partition, vacuum
from spark.engine.warehouse_folder import folder_exists, folders_in, remove_folder
from spark.ingest.retention import FILES, expire, last_day, note_upkeep, read_horizons
from spark.log.amendments import amendments_path
from spark.log.log_table import LOG_PARTITION, log_path, read_log
from spark.log.warehouse_version import first_made, folder_of, open_version, versions_of
from spark.source.kafka_failures import innermost
from spark.windows.window_changes import changes_path
from spark.windows.windows_table import WINDOW_PARTITION, fold_date, windows_path

LOOK_BATCHES = 8
"""After so many batches tables are looked at."""
FILES_NEW_MIN = 16
"""So many files must have come to a table before its partitions are looked at."""
KEEP_DAYS = 7
"""How long files stay that no table needs any more: a reader that began before is not disturbed."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A table whose small files become one."""

    path: str
    partition: str | None = None
    is_folded: bool = False
    """Whether its rows are folded with it."""


class Upkeep:
    """The tables of a job, and what was done for them so far."""

    def __init__(self, job: BatchJob, warn: Callable[[str], None]) -> None:
        """`warn` is told of what could not be done; readings are taken all the same."""
        self._job = job
        self._warn = warn
        # What is set in it for a while is not set for the batches.
        self._spark = job.spark.newSession()
        tables = job.tables
        self._beside = (
            _Kept(log_path(tables), LOG_PARTITION),
            _Kept(windows_path(tables), WINDOW_PARTITION, is_folded=True),
            _Kept(changes_path(job.warehouse), "at_date"),
            _Kept(amendments_path(tables), LOG_PARTITION),
        )
        """What batches only append to, but for windows that are computed anew: put in order beside them."""
        others = set(_tables_in(job.spark, tables)) - {kept.path for kept in self._beside}
        self._others = tuple(_Kept(path) for path in sorted(others))
        self._looked_at = dict.fromkeys((kept.path for kept in (*self._beside, *self._others)), 0)
        self._executor = ThreadPoolExecutor(1, "upkeep")
        self._running: Future[None] | None = None
        self._day: date | None = None
        self._batches = 0
        self._is_ending = False

    def after_batch(self, newest_us: int | None) -> None:
        """Do what is due; `newest_us` is when Kafka took in the newest record of the batch, None where none came."""
        if newest_us is None:
            return
        self._batches += 1
        if self._batches % LOOK_BATCHES == 0:
            # These the job itself writes whole, now and then.
            self._look(self._job.spark, self._others)
            if self._running is None or self._running.done():
                self.wait()
                self._running = self._executor.submit(self._look, self._spark, self._beside)
        self._daily(_today(newest_us))

    def wait(self) -> None:
        """Wait until nothing is done beside the batches any more."""
        if self._running is not None:
            self._running.result()

    def end(self) -> None:
        """Wait no longer than for what is being written just now: the rest is done by the next run."""
        self._is_ending = True
        self.wait()

    def _look(self, spark: SparkSession, tables: Iterable[_Kept]) -> None:
        for kept in tables:
            failure = _failure(partial(self._look_at, spark, kept))
            if failure is not None:
                self._warn(f"{kept.path}: its small files could not be made one, this is tried again: {failure}")

    def _look_at(self, spark: SparkSession, kept: _Kept) -> None:
        files = file_count(spark, kept.path)
        if files < self._looked_at[kept.path] + FILES_NEW_MIN:
            return
        # First: what fails is not tried again at once.
        self._looked_at[kept.path] = files
        self._tidy(spark, kept)
        self._looked_at[kept.path] = file_count(spark, kept.path)

    def _tidy(self, spark: SparkSession, kept: _Kept) -> None:
        for files in files_by_partition(spark, kept.path, kept.partition):
            if self._is_ending:
                return
            # Folding writes all of a date anew, its great files too.
            if not files.are_due or (kept.is_folded and files.bytes < files.bytes_of_great):
                continue
            if kept.is_folded and files.partition is not None:
                day = date.fromisoformat(files.partition)
                pieces = 1 + (files.bytes + files.bytes_of_great) // FILE_BYTES
                with self._job.rewriting_windows:
                    fold_date(spark, self._job.tables, day, pieces)
            else:
                where = None if files.partition is None else f"{kept.partition} = DATE'{files.partition}'"
                compact(spark, kept.path, where)

    def _daily(self, today: date) -> None:
        spark = self._job.spark
        if self._day is None:
            # A new warehouse has nothing that is old.
            self._day = last_day(spark, self._job.warehouse) or first_made(spark, self._job.warehouse)
        if today > self._day:
            # It deletes from the same tables.
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
    """Remove what is older than `streams.toml` says it is kept, and files that nothing has needed for `keep_days`.

    Nobody else may write the warehouse meanwhile. Returns of which tables files could not be removed, and why.
    """
    spark, warehouse = job.spark, job.warehouse
    # What was expired is never derived from again.
    job.save()
    for what, before in expire(spark, warehouse, job.tables, job.streams, today).items():
        report(f"{what}: nothing from before {before} is left")
    job.horizons = read_horizons(spark, warehouse)
    tried = {path: _failure(partial(vacuum, spark, path, keep_days * 24)) for path in delta_tables(spark, warehouse)}
    failed = [f"{path}: its old files could not be removed: {words}" for path, words in tried.items() if words]
    if not failed:
        report(f"files that nothing has needed for {keep_days:g} days are removed")
        note_upkeep(spark, warehouse, {FILES: today - timedelta(days=keep_days)})
    return failed


def newest_day(job: BatchJob) -> date:
    """The day that everything goes by which is removed for its age: that of the newest record, or today's."""
    newest = read_log(job.spark, job.tables).agg(F.unix_micros(F.max("kafka_timestamp")).alias("us")).collect()[0].us
    return datetime.now(UTC).date() if newest is None else _today(newest)


def remove_old_versions(spark: SparkSession, warehouse: str) -> list[int]:
    """Remove the tables of all versions but the one that readers see, and return their numbers.

    Those of a replay that died among them; one that runs fails, and is begun again.
    """
    current = open_version(spark, warehouse).number
    old = [number for number in {*versions_of(spark, warehouse), current + 1} if number != current]
    there = [number for number in sorted(old) if folder_exists(spark, folder_of(warehouse, number))]
    for number in there:
        remove_folder(spark, folder_of(warehouse, number))
    return there


def delta_tables(spark: SparkSession, warehouse: str) -> list[str]:
    """The paths of all tables in a warehouse, of every version."""
    warehouse = warehouse.rstrip("/")
    folders = [warehouse, *(folder_of(warehouse, number) for number in versions_of(spark, warehouse))]
    return [path for folder in folders for path in _tables_in(spark, folder)]


def _tables_in(spark: SparkSession, folder: str) -> list[str]:
    return [path for path in folders_in(spark, folder) if f"{path}/_delta_log" in folders_in(spark, path)]


def _failure(do: Callable[[], None]) -> str | None:
    """Do what the tables are right without, and say why it failed if it did: no reading waits for it."""
    try:
        do()
    except (PySparkException, Py4JError) as error:
        return innermost(error)
    return None


def _today(newest_us: int) -> date:
    """The day as Kafka's clock and this one agree on: a clock that is ahead would have everything removed as old."""
    now = datetime.now(UTC)
    return min(now, datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=newest_us)).date()
