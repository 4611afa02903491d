"""`ingest` keeps its tables in order: few files however many batches, and the same rows as without."""

import os
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from spark import batch_job
from spark.batch_job import BatchJob
from spark.engine import delta_folds, delta_upkeep
from spark.engine.delta_staging import AppendTable
from spark.engine.delta_upkeep import Files, compact, file_count, merge_sorted, vacuum
from spark.engine.warehouse_folder import only_writer
from spark.ingest.retention import last_day
from spark.ingest.seen_table import seen_path
from spark.log.device_parts import device_parts_path
from spark.log.log_table import LOG_PARTITION, BatchId, log_path, log_schema
from spark.log.readings_view import open_readings
from spark.upkeep import table_upkeep
from spark.upkeep.replay_job import replay
from spark.upkeep.table_upkeep import LOG_ORDER, Upkeep, delta_tables, maintain, remove_old_versions
from spark.views.windows_view import open_windows
from spark.windows import windows_table
from spark.windows.window_changes import changes_path, read_changes
from spark.windows.windows_table import fold_date, folded, read_parts, replace_area, windows_path
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, kafka_frame, reading, reading_headers
from tests.support.spark_warehouse import expect_rows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

BATCHES = 4


def sent(sequence: int) -> KafkaRecord:
    time = NOON + timedelta(seconds=sequence)
    record = reading(b'{"t": %d}' % sequence, reading_headers(sequence, time=time), offset=sequence)
    return replace(record, timestamp=time)


def eager(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """Have tables put in order once they have so few files: as many batches as it takes otherwise take minutes."""
    monkeypatch.setattr(table_upkeep, "LOOK_BATCHES", 1)
    monkeypatch.setattr(table_upkeep, "FILES_NEW_MIN", files)
    monkeypatch.setattr(delta_upkeep, "FILES_MIN", files)
    monkeypatch.setattr(delta_folds, "FILES_MIN", files)
    monkeypatch.setattr(delta_upkeep, "GROWTH_MIN", 2)


def views(spark: SparkSession, warehouse: str) -> list[DataFrame]:
    return [view(spark, warehouse) for view in (open_readings, open_windows, read_changes)]


def contents(spark: SparkSession, warehouse: str) -> list[list[Row]]:
    return [view.collect() for view in views(spark, warehouse)]


def expect_contents(spark: SparkSession, warehouse: str, before: list[list[Row]]) -> None:
    for view, rows in zip(views(spark, warehouse), before, strict=True):
        expect_rows(view, rows)


@pytest.mark.long(seconds=35)
def test_files_become_few_and_rows_stay(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager(monkeypatch, files=BATCHES)
    warehouse = new_warehouse
    job = BatchJob(spark, warehouse)
    upkeep = Upkeep(job, pytest.fail)
    paths = [log_path(job.tables), windows_path(job.tables), changes_path(warehouse)]
    paths += [seen_path(job.tables), device_parts_path(job.tables)]
    for number in range(BATCHES + 1):
        job.take(kafka_frame(spark, [sent(number)]), BatchId("query", number), {"device-thermo": "id-1"})
        job.save()
        before = contents(spark, warehouse) if number == BATCHES - 1 else []
        upkeep.after_batch(round(sent(number).timestamp.timestamp() * 1e6))
        upkeep.wait()
        if before:
            assert [file_count(spark, path) for path in paths] == [1] * len(paths)
            expect_contents(spark, warehouse, before)
            # A folded window is one row: all of them are of one minute.
            assert read_parts(spark, job.tables).count() == 1

    assert [file_count(spark, path) for path in paths] == [2] * len(paths)
    # A job that goes on knows the numbers that came.
    counts = BatchJob(spark, warehouse).take(
        kafka_frame(spark, [sent(BATCHES - 1), sent(99)]), BatchId("query", 99), {}
    )
    assert (counts.rows, counts.duplicates) == (2, 1)


@pytest.mark.long(seconds=40)
def test_tables_are_put_in_order_while_a_batch_is_on_its_way_into_them(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = BatchJob(spark, new_warehouse)
    better = reading(b'{"t": 1}', reading_headers(1, time=NOON + timedelta(minutes=3), error_us=10), offset=9)
    batches = [
        [sent(0), sent(1)],
        [sent(2)],
        # Nothing but new; then a copy that counts instead of an earlier one, in a window of its own.
        [sent(3)],
        [replace(better, timestamp=NOON + timedelta(minutes=3))],
    ]
    beside: list[str] = []

    def put_in_order() -> None:
        log = AppendTable(spark, log_path(job.tables), log_schema())
        merge_sorted(log, f"partitionValues['{LOG_PARTITION}'] = '{NOON.date()}'", LOG_ORDER, lambda: False)
        compact(spark, changes_path(new_warehouse))
        with job.rewriting_windows:
            fold_date(spark, job.tables, NOON.date())
        beside.append("done")

    replacing: list[bool] = []

    def replace_alone(*args: Any) -> None:
        replacing.append(job.rewriting_windows.locked())
        replace_area(*args)

    monkeypatch.setattr(batch_job, "replace_area", replace_alone)
    for number, records in enumerate(batches):
        ids = {"device-thermo": "id-1"}
        before_commit = put_in_order if number >= 2 else (lambda: None)
        counts = job.take(kafka_frame(spark, records), BatchId("query", number), ids, before_commit)
        assert counts.rows == len(records)

    assert len(beside) == 2
    assert replacing == [True]
    rows = open_windows(spark, new_warehouse).orderBy("window_start").select("window_start", "n", "sum").collect()
    assert [(row.n, row["sum"]) for row in rows] == [(3, 5), (1, 1)]
    assert open_readings(spark, new_warehouse).count() == 4
    # Windows of the last batch that were computed anew replaced folded ones.
    assert read_parts(spark, job.tables).count() == 2


@pytest.mark.long(seconds=30)
def test_upkeep_beside_the_batches_is_alone_where_it_must_be_and_ends_when_asked(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager(monkeypatch, files=2)
    job = BatchJob(spark, new_warehouse)
    for number in range(3):
        job.take(kafka_frame(spark, [sent(number)]), BatchId("query", number), {"device-thermo": "id-1"})
    newest_us = round(sent(2).timestamp.timestamp() * 1e6)
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def fold(*_: Any) -> None:
        done.append("fold, alone" if job.rewriting_windows.locked() else "fold")

    def compact_slowly(_: SparkSession, path: str, *__: Any) -> None:
        if threading.current_thread().name.startswith("upkeep"):
            begun.set()
            assert go_on.wait(300)
            done.append(Path(path).name)

    def maintained(*_: Any, **__: Any) -> list[str]:
        done.append("maintain")
        return []

    monkeypatch.setattr(table_upkeep, "fold_date", fold)
    monkeypatch.setattr(table_upkeep, "compact", compact_slowly)
    monkeypatch.setattr(table_upkeep, "merge_sorted", lambda table, *_: compact_slowly(table.spark, table.path))
    monkeypatch.setattr(table_upkeep, "maintain", maintained)
    monkeypatch.setattr(table_upkeep, "first_made", lambda *_: NOON.date() - timedelta(days=1))
    # Work that removes rows waits until nothing else writes the same tables.
    threading.Timer(1.0, go_on.set).start()
    Upkeep(job, pytest.fail).after_batch(newest_us)
    assert done == ["log", "fold, alone", "window_changes", "maintain"]

    done.clear()
    begun.clear()
    go_on.clear()
    ending = Upkeep(job, pytest.fail)
    monkeypatch.setattr(table_upkeep, "first_made", lambda *_: datetime.now(UTC).date())
    ending.after_batch(newest_us)
    assert begun.wait(300)

    def wait() -> None:
        # The end was asked for.
        go_on.set()
        Upkeep.wait(ending)

    monkeypatch.setattr(ending, "wait", wait)
    ending.end()
    # The merge under way is finished; the others are left for the next run.
    assert done == ["log"]


@pytest.mark.long(seconds=25)
def test_a_fold_keeps_what_is_appended_meanwhile(spark: SparkSession, new_warehouse: str) -> None:
    job = BatchJob(spark, new_warehouse)
    for number in range(2):
        job.take(kafka_frame(spark, [sent(number)]), BatchId("query", number), {"device-thermo": "id-1"})

    def and_meanwhile(parts: DataFrame) -> DataFrame:
        job.take(kafka_frame(spark, [sent(2)]), BatchId("query", 2), {"device-thermo": "id-1"})
        return folded(parts)

    with patch.object(windows_table, "folded", and_meanwhile):
        fold_date(spark, job.tables, NOON.date())

    assert sorted(row.n for row in read_parts(spark, job.tables).collect()) == [1, 2]
    (window,) = open_windows(spark, new_warehouse).collect()
    assert (window.n, window["sum"]) == (3, 3)


@pytest.mark.long(seconds=20)
def test_a_day_later_what_is_old_is_removed_once(spark: SparkSession, new_warehouse: str) -> None:
    job = BatchJob(spark, new_warehouse)
    upkeep = Upkeep(job, pytest.fail)
    today = datetime.now(UTC)
    with patch.object(table_upkeep, "maintain", wraps=table_upkeep.maintain) as maintaining:
        # The warehouse is of today; a record of tomorrow is one of a clock that is ahead.
        for time in (today, today + timedelta(days=1), today + timedelta(days=400)):
            upkeep.after_batch(round(time.timestamp() * 1e6))
        assert maintaining.call_count == 0
        with patch.object(table_upkeep, "first_made", return_value=today.date() - timedelta(days=1)):
            for _ in range(2):
                later = Upkeep(job, pytest.fail)
                later.after_batch(round(today.timestamp() * 1e6))
                later.after_batch(round(today.timestamp() * 1e6))
    assert maintaining.call_count == 1


@pytest.mark.long(seconds=35)
def test_a_table_that_cannot_be_kept_in_order_holds_up_no_reading(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager(monkeypatch, files=2)
    job = BatchJob(spark, new_warehouse)
    warnings: list[str] = []
    upkeep = Upkeep(job, warnings.append)
    changes = Path(changes_path(new_warehouse))
    # Of three files of about one size, the greatest never outweighs the others; of two, it does by a byte.
    for number in range(3):
        job.take(kafka_frame(spark, [sent(number)]), BatchId("query", number), {"device-thermo": "id-1"})
    # As a disk loses it, or somebody who makes room by hand.
    next(changes.glob("*/*.parquet")).unlink()
    upkeep.after_batch(round(sent(2).timestamp.timestamp() * 1e6))
    upkeep.wait()
    (warning,) = warnings
    assert warning.startswith(f"{changes}: its small files could not be merged")
    assert warning.endswith(".parquet does not exist")
    assert file_count(spark, log_path(job.tables)) == 1
    assert job.take(kafka_frame(spark, [sent(3)]), BatchId("query", 3), {}).rows == 1

    # As a removal that broke off leaves a table.
    broken = Path(new_warehouse) / "broken"
    (broken / "_delta_log").mkdir(parents=True)
    (failed,) = maintain(job, NOON.date())
    assert failed.startswith(f"{broken}: its old files could not be removed")
    assert "DELTA" in failed
    assert last_day(spark, new_warehouse) is None
    broken.joinpath("_delta_log").rmdir()
    assert maintain(job, NOON.date()) == []
    assert last_day(spark, new_warehouse) is not None


@pytest.mark.long(seconds=30)
def test_tables_of_old_versions_are_removed_when_asked(spark: SparkSession, new_warehouse: str) -> None:
    job = BatchJob(spark, new_warehouse)
    job.take(kafka_frame(spark, [sent(1)]), BatchId("query", 0), {"device-thermo": "id-1"})
    replay(spark, new_warehouse, None, None, only_writer, lambda _: None)
    before = contents(spark, new_warehouse)
    assert remove_old_versions(spark, new_warehouse) == [1]
    assert remove_old_versions(spark, new_warehouse) == []
    expect_contents(spark, new_warehouse, before)
    assert not any("/v1/" in path for path in delta_tables(spark, new_warehouse))


@pytest.mark.parametrize(
    ("sizes", "due"),
    [([1] * 31, False), ([1] * 32, True), ([*[1] * 32, 11], False), ([*[1] * 33, 11], True), ([*[1] * 255, 999], True)],
)
def test_a_byte_is_written_again_only_when_as_many_came(sizes: list[int], due: bool) -> None:  # noqa: FBT001
    assert Files("2026-03-14", len(sizes), sum(sizes), max(sizes)).are_due is due


def make_old(path: Path, hours: float) -> None:
    os.utime(path, (time.time() - hours * 3_600,) * 2)


def test_files_that_no_version_of_the_last_hours_needs_are_removed(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "table of days"
    rows = spark.range(4).selectExpr("id", "DATE'2026-03-14' AS day").coalesce(1)
    for _ in range(2):
        rows.write.format("delta").mode("overwrite").partitionBy("day").save(str(path))
    (live,) = spark.read.format("delta").load(str(path)).inputFiles()
    stray, young = path / "day=2026-03-15" / "part-0.parquet", path / "part-1.parquet"
    # A file of another kind may be needed, although Delta's list of files lacks it.
    other = path / "deletion_vector_1.bin"
    stray.parent.mkdir()
    for file, hours in ((stray, 2), (young, 0), (other, 2)):
        file.write_bytes(b"1234")
        make_old(file, hours)

    assert vacuum(spark, str(path), 1) == (1, 4)
    assert young.exists()
    assert len([*path.rglob("*.parquet")]) == 3

    # An empty folder is removed later: a writer that has just made it puts a file there next.
    (path / "day=2026-03-16").mkdir()
    make_old(stray.parent, 2)
    removed = vacuum(spark, str(path), 0)
    folders = sorted(each.name for each in path.iterdir() if each.is_dir())
    assert folders == ["_delta_log", "day=2026-03-14", "day=2026-03-16"]
    assert removed.files == 2
    assert removed.bytes > 4
    assert [file.name for file in path.rglob("*.parquet")] == [Path(live).name]
    assert len([*path.rglob(".*.parquet.crc")]) <= 1
    assert spark.read.format("delta").load(str(path)).count() == 4
    assert vacuum(spark, str(path), 0) == (0, 0)
    assert other.exists()
