"""Files that upkeep writes are sorted by device and time: a look-up reads little of them, and no answer changes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import duckdb
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from spark.batch_job import BatchJob
from spark.engine.delta_staging import AppendTable, StagedAppend
from spark.engine.delta_upkeep import SETTINGS_SORTED, Files, Order, merge_sorted
from spark.log.log_table import BatchId, log_path, log_schema
from spark.log.readings_view import open_readings
from spark.upkeep import table_upkeep
from spark.upkeep.table_upkeep import Upkeep
from spark.views.windows_view import open_windows
from spark.windows.windows_table import fold_date, windows_path
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, kafka_frame, reading, reading_headers
from tests.support.spark_warehouse import expect_rows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

DEVICES = 12
OF_DEVICE = 5
"""Readings of a device in a batch."""
OF_BATCH = DEVICES * OF_DEVICE
ROWS_OF_GROUP = 20
WHERE = f"partitionValues['event_date'] = '{NOON.date()}'"


class File(NamedTuple):
    """A file of `log`."""

    path: str
    first_batch: int
    last_batch: int


def order(batches: int) -> Order:
    """So many batches fit a sorted file."""
    return Order(("device", "event_time"), "ordinal", batches * OF_BATCH)


def sent(number: int) -> list[KafkaRecord]:
    """A batch: each device in turn, again and again."""
    records = []
    for place in range(OF_BATCH):
        sequence = number * OF_BATCH + place
        device = place % DEVICES
        headers = reading_headers(sequence, time=NOON + timedelta(seconds=sequence), lane=f"{device:012x}")
        record = reading(b'{"t": %d}' % sequence, headers, offset=sequence, key=b"d%03d" % device)
        records.append(replace(record, timestamp=NOON + timedelta(seconds=sequence + 1)))
    return records


def take(job: BatchJob, numbers: Sequence[int]) -> None:
    for number in numbers:
        job.take(kafka_frame(job.spark, sent(number)), BatchId("query", number), {"device-thermo": "id-1"})


def log_of(job: BatchJob) -> AppendTable:
    return AppendTable(job.spark, log_path(job.tables), log_schema())


def files(job: BatchJob) -> list[File]:
    """The files of `log`, in the order of their batches."""
    table = DeltaTable(log_path(job.tables))
    added: Any = table.get_add_actions(flatten=True)
    columns = [added.column(name).to_pylist() for name in ("path", "min.ordinal", "max.ordinal")]
    found = [File(f"{log_path(job.tables)}/{path}", *batches) for path, *batches in zip(*columns, strict=True)]
    return sorted(found, key=lambda file: file[1:])


def devices_and_times(path: str) -> list[tuple[str, int]]:
    """In the order of the file's rows."""
    query = f"SELECT device, epoch_us(event_time) FROM read_parquet('{path}', hive_partitioning = false)"
    return duckdb.execute(query).fetchall()


def groups(path: str) -> list[tuple[str, str, int]]:
    """The least and the greatest device, and the bytes, of each part of a file that readers can skip."""
    query = f"""SELECT any_value(stats_min_value) FILTER (path_in_schema = 'device'),
            any_value(stats_max_value) FILTER (path_in_schema = 'device'), sum(total_compressed_size)
        FROM parquet_metadata('{path}') GROUP BY row_group_id ORDER BY row_group_id"""
    return duckdb.execute(query).fetchall()


def views(job: BatchJob) -> Iterator[DataFrame]:
    yield open_readings(job.spark, job.warehouse)
    yield open_windows(job.spark, job.warehouse)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS_SORTED, "parquet.block.row.count.limit", str(ROWS_OF_GROUP))


@pytest.mark.long(seconds=40)
@pytest.mark.usefixtures("small_groups")
def test_a_day_that_is_over_is_sorted_once_and_a_device_is_a_small_part_of_it(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_upkeep, "LOOK_BATCHES", 1)
    monkeypatch.setattr(table_upkeep, "LOG_ORDER", order(batches=2))
    monkeypatch.setattr(table_upkeep, "first_made", lambda *_: NOON.date())
    job = BatchJob(spark, new_warehouse)
    take(job, range(3))
    # Upkeep would do it, and until then windows are judged without the last batches.
    job.save()
    before = [view.collect() for view in views(job)]
    upkeep = Upkeep(job, pytest.fail)

    def look(days: int) -> list[File]:
        # The first batch of a day says that it has begun. The next look sorts.
        for _ in range(2):
            upkeep.after_batch(round((NOON + timedelta(days=days)).timestamp() * 1e6))
            upkeep.wait()
        return files(job)

    taken = files(job)
    # The few files of this day are not worth it yet.
    assert look(0) == taken
    merged = look(1)

    # Neighbours only: a search for copies by batch reads the files of these batches.
    assert [file[1:] for file in merged] == [(0, 1), (2, 2)]
    for file in merged:
        found = devices_and_times(file.path)
        assert found == sorted(found)
    (first, *_) = merged
    assert len(groups(first.path)) == 2 * OF_BATCH // ROWS_OF_GROUP
    device = "d007"
    of_device = [size for least, greatest, size in groups(first.path) if least <= device <= greatest]
    assert 0 < sum(of_device) < sum(size for _, _, size in groups(first.path)) / 2
    for view, rows in zip(views(job), before, strict=True):
        expect_rows(view, rows)

    # Nothing is sorted twice. Numbers that come again are still found.
    assert look(2) == merged
    again = sent(0)[:7] + sent(3)[:40]
    counts = job.take(kafka_frame(spark, again), BatchId("query", 3), {"device-thermo": "id-1"})
    assert (counts.rows, counts.duplicates) == (47, 7)
    # What came is much beside the file that is not full.
    assert [file[1:] for file in look(3)] == [(0, 1), (2, 3)]


@pytest.mark.long(seconds=25)
def test_a_merge_keeps_rows_that_are_appended_meanwhile(spark: SparkSession, new_warehouse: str) -> None:
    job = BatchJob(spark, new_warehouse)
    take(job, range(2))
    write = StagedAppend.write

    def and_meanwhile(staged: StagedAppend, rows: DataFrame) -> None:
        with patch.object(StagedAppend, "write", write):
            take(job, [2])
        write(staged, rows)

    with patch.object(StagedAppend, "write", and_meanwhile):
        merge_sorted(log_of(job), WHERE, order(batches=9), lambda: False)
    assert {file[1:] for file in files(job)} == {(0, 1), (2, 2)}
    assert open_readings(spark, new_warehouse).count() == 3 * OF_BATCH


@pytest.mark.long(seconds=20)
def test_a_merge_stops_between_files_when_asked(spark: SparkSession, new_warehouse: str) -> None:
    job = BatchJob(spark, new_warehouse)
    take(job, range(2))
    asked = iter((False, True))
    merge_sorted(log_of(job), WHERE, order(batches=1), lambda: next(asked))
    first, *others = files(job)
    assert devices_and_times(first.path) == sorted(devices_and_times(first.path))
    assert any(devices_and_times(file.path) != sorted(devices_and_times(file.path)) for file in others)


@pytest.mark.long(seconds=20)
@pytest.mark.usefixtures("small_groups")
def test_a_device_is_a_small_part_of_a_days_folded_windows(spark: SparkSession, new_warehouse: str) -> None:
    job = BatchJob(spark, new_warehouse)
    take(job, range(3))
    fold_date(spark, job.tables, NOON.date())
    (path,) = DeltaTable(windows_path(job.tables)).file_uris()
    # Each device has three windows.
    assert [devices for *devices, _ in groups(path)] == [["d000", "d006"], ["d006", "d011"]]


@pytest.mark.parametrize(
    ("count", "size", "unsorted", "due"),
    [(1, 100, 100, True), (2, 100, 25, False), (2, 100, 26, True), (1, 100, 0, False), (32, 100, 1, True)],
)
def test_few_late_readings_do_not_sort_a_day_again(count: int, size: int, unsorted: int, due: bool) -> None:  # noqa: FBT001
    of_day = Files("2026-03-14", count, size, size, bytes_unsorted=unsorted)
    assert of_day.are_worth_sorting is due
