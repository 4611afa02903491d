"""Rows are kept for their time and no longer. Some windows can still change then, and others stay as they are."""

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.batch_job import BatchJob
from spark.cli import main
from spark.decode.codec_declarations import Streams
from spark.decode.streams_file import parse_streams
from spark.engine.delta_upkeep import Removed
from spark.engine.warehouse_folder import only_writer
from spark.ingest.retention import open_upkeep
from spark.log.log_table import BatchId, open_log
from spark.log.quarantine_view import open_quarantine
from spark.log.readings_view import open_readings
from spark.log.warehouse_version import seen_tables
from spark.upkeep import table_upkeep
from spark.upkeep.replay_job import replay
from spark.windows.window_changes import read_changes
from spark.windows.windows_table import WindowLengthError, read_parts
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, correction, kafka_frame, reading, reading_headers

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

DECLARED = """
unknown = "accept"
[retention]
log_days = 30
windows_days = 80
window_changes_days = 7
"""
TODAY = NOON + timedelta(days=100)


def declared(text: str = DECLARED) -> Streams:
    return parse_streams(text, Path("streams.toml"))


def sent(sequence: int, *, days: float = 0, late_days: float = 0) -> KafkaRecord:
    """A reading of some days after the first, which Kafka took in some time later."""
    time = NOON + timedelta(days=days)
    headers = reading_headers(sequence, time=time, boot_error_us=5)
    record = reading(b'{"t": %d}' % sequence, headers, offset=sequence)
    return replace(record, timestamp=time + timedelta(days=late_days))


def take(job: BatchJob, number: int, records: list[KafkaRecord]) -> None:
    job.take(kafka_frame(job.spark, records), BatchId("query", number), {"device-thermo": "id-1"})


def windows(spark: SparkSession, warehouse: str) -> dict[date, int]:
    """Number of values in windows, by date."""
    rows = read_parts(spark, seen_tables(spark, warehouse)).groupBy("window_date").agg(F.sum("n").alias("n"))
    return {row.window_date: row.n for row in rows.collect()}


def sequences(spark: SparkSession, warehouse: str) -> list[int]:
    return sorted(row.lane_sequence for row in open_readings(spark, warehouse).select("lane_sequence").collect())


def filled(spark: SparkSession, warehouse: str) -> dict[date, int]:
    """Make tables whose `log` lacks the readings of a window. Returns the number of values in windows by date."""
    days = {1: 10, 2: 60, 3: 100, 4: 71}
    records = [sent(sequence, days=day, late_days=28 if sequence == 4 else 0) for sequence, day in days.items()]
    take(BatchJob(spark, warehouse, declared()), 0, records)
    assert windows(spark, warehouse) == {(NOON + timedelta(days=day)).date(): 1 for day in days.values()}

    # Which files go does not matter here.
    with patch.object(table_upkeep, "vacuum", return_value=Removed(0, 0)):
        shown = CliRunner().invoke(main, ["maintain", "--warehouse", warehouse])

    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines() == [
        f"log: nothing from before {(TODAY - timedelta(days=30)).date()} is left",
        f"windows: nothing from before {(TODAY - timedelta(days=80)).date()} is left",
        f"window_changes: nothing from before {(TODAY - timedelta(days=7)).date()} is left",
        "files that nothing has needed for 7 days are removed",
    ]
    return {(NOON + timedelta(days=day)).date(): 1 for day in (60, 71, 100)}


@pytest.mark.long(seconds=60)
def test_windows_outlive_log_and_count_nothing_twice(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    before = filled(spark, warehouse)
    assert {row.lane_sequence for row in open_log(spark, warehouse).collect()} == {3, 4}
    assert sequences(spark, warehouse) == [3, 4]
    assert windows(spark, warehouse) == before
    assert {row.what: row.before for row in open_upkeep(spark, warehouse).collect()} == {
        "log": (TODAY - timedelta(days=30)).date(),
        "windows": (TODAY - timedelta(days=80)).date(),
        "window_changes": (TODAY - timedelta(days=7)).date(),
        "files": (TODAY - timedelta(days=7)).date(),
    }

    # A copy of a removed reading; a reading that waited for longer than log keeps any; one that came in time.
    take(
        BatchJob(spark, warehouse),
        1,
        [
            replace(sent(2, days=60, late_days=40.1), offset=12),
            sent(5, days=60, late_days=40.2),
            sent(6, days=75, late_days=25),
        ],
    )
    after = before | {(NOON + timedelta(days=75)).date(): 1}
    assert windows(spark, warehouse) == after
    assert sequences(spark, warehouse) == [3, 4, 6]
    expired = open_quarantine(spark, warehouse).where("kind = 'expired'").collect()
    assert sorted(row.offset for row in expired) == [5, 12]


@pytest.mark.long(seconds=60)
def test_corrections_and_replays_do_not_change_closed_windows(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    filled(spark, warehouse)
    job = BatchJob(spark, warehouse)
    take(job, 1, [replace(sent(2, days=60, late_days=40.1), offset=12), sent(5, days=60, late_days=40.2)])
    # The gateway knows better when this boot was: all readings of it are of the first day. That day's windows are gone.
    told = correction(7, {"boottime_us": 123_456_789, "error_us": 1, "supersedes": True}, told=TODAY, offset=7)
    take(job, 2, [replace(told, timestamp=TODAY)])
    job.save()
    assert windows(spark, warehouse) == {(NOON + timedelta(days=60)).date(): 1}

    # Of closed windows, a replay knows only their figures.
    shown = windows(spark, warehouse)
    changes = read_changes(spark, warehouse).count()
    replay(spark, warehouse, None, None, only_writer, lambda _: None)
    assert (windows(spark, warehouse), read_changes(spark, warehouse).count()) == (shown, changes)
    assert sequences(spark, warehouse) == [3, 4]
    assert open_quarantine(spark, warehouse).where("kind = 'expired'").count() == 2

    with pytest.raises(WindowLengthError, match="of 60 s none of 30 s can be made"):
        replay(spark, warehouse, declared(DECLARED + "[windows]\nsizes = [30]"), None, only_writer, lambda _: None)


@pytest.mark.long(seconds=35)
def test_windows_and_their_history_go_when_they_are_old(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    streams = declared('unknown = "accept"\n[retention]\nwindows_days = 20\nwindow_changes_days = 7')
    job = BatchJob(spark, warehouse, streams)
    take(job, 0, [sent(1, days=79), sent(2, days=80), sent(3, days=100)])

    shown = CliRunner().invoke(main, ["maintain", "--warehouse", warehouse])

    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines() == [
        f"windows: nothing from before {(TODAY - timedelta(days=20)).date()} is left",
        f"window_changes: nothing from before {(TODAY - timedelta(days=7)).date()} is left",
        "files that nothing has needed for 7 days are removed",
    ]
    kept = {(NOON + timedelta(days=days)).date(): 1 for days in (80, 100)}
    assert windows(spark, warehouse) == kept
    # The changes were made today, whatever they are of.
    assert read_changes(spark, warehouse).count() == 3
    # One that comes after its window is gone is a reading, and its window stays gone.
    take(BatchJob(spark, warehouse), 1, [sent(4, days=79, late_days=21)])
    assert windows(spark, warehouse) == kept
    assert sequences(spark, warehouse) == [1, 2, 3, 4]


def test_a_clock_that_is_ahead_has_nothing_removed() -> None:
    noon_us = round(NOON.timestamp() * 1e6)
    assert table_upkeep._today(noon_us) == NOON.date()
    assert table_upkeep._today(noon_us + 10**15) < date(2050, 1, 1)
