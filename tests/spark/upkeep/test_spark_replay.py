"""A replay makes equal tables from equal records, or the tables of corrected declarations."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

from spark.batch_job import BatchJob
from spark.cli import main
from spark.decode.codec_declarations import Streams
from spark.decode.streams_file import parse_streams
from spark.engine.warehouse_folder import WarehouseInUseError, only_writer
from spark.ingest.reading_starts import append_start, first_start, read_starts, start_after
from spark.log import warehouse_version
from spark.log.log_table import BatchId
from spark.log.readings_view import open_readings
from spark.log.warehouse_version import (
    Version,
    change_version,
    current_version,
    folder_of,
    note_registry,
    open_version,
)
from spark.source.topic_changes import GoingOn, TopicNow
from spark.upkeep import replay_job
from spark.upkeep.replay_job import ReplayProgress, replay
from spark.views.evidence import open_gaps
from spark.views.views import OPENERS, open_all
from spark.views.windows_view import open_windows
from spark.windows.window_changes import read_changes
from tests.support import spark_oracle
from tests.support.spark_records import drawn_batches, drawn_records, kafka_frame, reading, reading_headers
from tests.support.spark_warehouse import expect_rows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]


DECLARED = """
unknown = "accept"
[streams.device-thermo]
codec = "json"
[streams.device-thermo.metrics.celsius]
from = "t"
decimals = 1
[windows]
sizes = [120]
"""


def views(spark: SparkSession, warehouse: str) -> tuple[DataFrame, DataFrame]:
    """Content of the views, without the numbers of batches."""
    return open_readings(spark, warehouse).drop("ordinal"), open_windows(spark, warehouse).drop("ordinal")


def no_report(_: ReplayProgress) -> None:
    return None


@pytest.mark.long(seconds=50)
def test_a_replay_makes_the_same_tables_and_the_job_goes_on_with_them(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    rng = random.Random(5)  # noqa: S311 - the same draw every time
    records = drawn_records(rng, 200)
    *batches, last = drawn_batches(rng, records)
    job = BatchJob(spark, warehouse)
    start = first_start(1)
    append_start(spark, job.tables, start)
    job.state.begin(start)
    for number, batch in enumerate(batches):
        job.take(kafka_frame(spark, batch), BatchId("query", number), {})
    # Read on from elsewhere, as after a loss in Kafka.
    now = {"device-thermo": TopicNow("id-2", {0: 0}, {0: 7})}
    anew = start_after(start, job.next_ordinal, 1, GoingOn({"device-thermo": {0: 7}}, ()), now)
    append_start(spark, job.tables, anew)
    job.save()
    before = [view.collect() for view in views(spark, warehouse)]
    told = read_changes(spark, warehouse).count()

    version = replay(spark, warehouse, None, None, only_writer, no_report)

    assert current_version(spark, warehouse) == version
    assert (version.number, version.source) == (2, "v1")
    for view, rows in zip(views(spark, warehouse), before, strict=True):
        expect_rows(view, rows)
    # Nothing is different, so nothing is told.
    assert read_changes(spark, warehouse).count() == told
    assert [start.starting for start in read_starts(spark, folder_of(warehouse, 2))] == [
        None,
        {"device-thermo": {0: 7}},
    ]
    # A batch that was done is known to the new tables, and the next is taken as ever.
    job = BatchJob(spark, warehouse)
    assert job.take(kafka_frame(spark, batches[-1]), BatchId("query", len(batches) - 1), {}).rows > 0
    job.take(kafka_frame(spark, last), BatchId("query", len(batches)), {})
    expected = spark_oracle.tables(records)
    found = open_readings(spark, warehouse).select("device", "stream", "metric", "value", "ce_id").collect()
    assert sorted(tuple(row) for row in found) == sorted(
        (device, stream, metric, value, ce_id) for _, device, stream, metric, _, value, ce_id, *_ in expected.readings
    )
    assert open_windows(spark, warehouse).count() == len(expected.windows)


@pytest.mark.long(seconds=40)
def test_a_replay_by_other_declarations_waits_for_ingest_and_tells_what_changed(
    spark: SparkSession, new_warehouse: str
) -> None:
    warehouse = new_warehouse
    declared = parse_streams(DECLARED, Path("streams.toml"))
    records = drawn_records(random.Random(6), 120)  # noqa: S311
    job = BatchJob(spark, warehouse)
    job.take(kafka_frame(spark, records[:60]), BatchId("query", 0), {})
    busy = threading.Event()

    @contextmanager
    def writer(_: str) -> Iterator[None]:
        # `ingest` holds the warehouse, takes a batch more, and is stopped then.
        if not busy.is_set():
            busy.set()
            job.take(kafka_frame(spark, records[60:]), BatchId("query", 1), {})
            raise WarehouseInUseError
        yield

    said: list[ReplayProgress] = []
    version = replay(spark, warehouse, declared, None, writer, said.append)

    assert any(progress.is_waiting for progress in said)
    assert said[-1].rows == len(records)
    expected = spark_oracle.tables(records, declared)
    found = open_readings(spark, warehouse).select("device", "stream", "metric", "value", "ce_id").collect()
    assert sorted(tuple(row) for row in found) == sorted(
        (device, stream, metric, value, ce_id) for _, device, stream, metric, _, value, ce_id, *_ in expected.readings
    )
    assert open_windows(spark, warehouse).count() == len(expected.windows)
    assert version.streams == declared
    changes = read_changes(spark, warehouse).where("cause = 'replay'")
    assert {row.version for row in changes.select("version").distinct().collect()} == {2}
    gone = changes.where("n = 0 AND metric = 't' AND stream = 'device-thermo'").count()
    came = changes.where("n > 0 AND metric = 'celsius'").count()
    assert gone > 0
    assert came == sum(key[3] == "celsius" for key in expected.windows)


@pytest.mark.long(seconds=40)
def test_a_replay_says_what_its_declarations_reject(spark: SparkSession, new_warehouse: str, tmp_path: Path) -> None:
    values = (b'{"t": 21.5}', b'{"t": 90}', b'{"t": 91}', b"{")
    records = [reading(value, reading_headers(number), offset=number) for number, value in enumerate(values)]
    BatchJob(spark, new_warehouse).take(kafka_frame(spark, records), BatchId("query", 0), {})

    def told(maximum: int) -> list[str]:
        declared = tmp_path / "streams.toml"
        declared.write_text(
            f'[streams.device-thermo]\ncodec = "json"\n[streams.device-thermo.metrics.t]\nmax = {maximum}\n'
        )
        shown = CliRunner().invoke(main, ["replay", "--warehouse", new_warehouse, "--streams", str(declared)])
        assert shown.exit_code == 0, shown.output
        return shown.output.splitlines()

    *_, seen, rejects, hint = told(85)
    assert seen.startswith("readers see v2 now")
    assert rejects == "rejects in v2: 3 (2 out-of-range, 1 undecodable); in v1: 1"
    assert "replay again" in hint
    # Nothing is lost by it.
    *_, rejects = told(100)
    assert rejects == "rejects in v3: 1 (1 undecodable); in v2: 3"
    assert open_readings(spark, new_warehouse).count() == len(values) - 1


@pytest.mark.long(seconds=30)
def test_what_another_replay_left_unfinished_is_begun_anew(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    records = drawn_records(random.Random(7), 30)  # noqa: S311
    BatchJob(spark, warehouse).take(kafka_frame(spark, records), BatchId("query", 0), {})

    class KilledError(Exception):
        """The process ended here."""

    def killed(_: ReplayProgress) -> None:
        raise KilledError

    with pytest.raises(KilledError):
        replay(spark, warehouse, Streams(unknown="quarantine").with_version(), None, only_writer, killed)
    assert folder_exists_on_disk(warehouse)
    version = current_version(spark, warehouse)
    assert version is not None
    assert version.number == 1

    version = replay(spark, warehouse, None, None, only_writer, no_report)

    assert version.number == 2
    expected = spark_oracle.tables(records)
    assert open_readings(spark, warehouse).count() == len(expected.readings)
    assert replace(version, number=1, source="kafka").streams.unknown == "accept"


@pytest.mark.long(seconds=30)
def test_changes_of_a_replay_that_died_are_reported_by_the_next_job(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    records = drawn_records(random.Random(8), 40)  # noqa: S311
    BatchJob(spark, warehouse).take(kafka_frame(spark, records), BatchId("query", 0), {})
    declared = parse_streams(DECLARED, Path("streams.toml"))

    with patch.object(replay_job, "append_replayed", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        replay(spark, warehouse, declared, None, only_writer, no_report)

    told = read_changes(spark, warehouse).where("cause = 'replay'")
    assert (open_version(spark, warehouse).number, told.count()) == (2, 0)
    for _ in range(2):
        BatchJob(spark, warehouse)
        told = read_changes(spark, warehouse).where("cause = 'replay'")
        assert told.where("n > 0 AND metric = 'celsius'").count() == len(
            [key for key in spark_oracle.tables(records, declared).windows if key[3] == "celsius"]
        )


@pytest.mark.long(seconds=35)
def test_declarations_and_a_registry_that_change_meanwhile_count(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    records = drawn_records(random.Random(9), 40)  # noqa: S311
    BatchJob(spark, warehouse).take(kafka_frame(spark, records), BatchId("query", 0), {})
    declared = replace(
        parse_streams(DECLARED, Path("streams.toml")), windows=open_version(spark, warehouse).streams.windows
    )

    @contextmanager
    def writer(_: str) -> Iterator[None]:
        # All is made anew; now `ingest` is started by other declarations, and a registry is loaded.
        if open_version(spark, warehouse).streams != declared:
            BatchJob(spark, warehouse, declared)
            note_registry(spark, warehouse, "registry-2")
        yield

    version = replay(spark, warehouse, None, None, writer, no_report)

    assert (version.number, version.streams, version.registry) == (2, declared, "registry-2")
    found = open_readings(spark, warehouse).select("metric").distinct().collect()
    assert "celsius" in {row.metric for row in found}


def test_the_version_that_readers_see_does_not_depend_on_clocks(spark: SparkSession, new_warehouse: str) -> None:
    def at(moment: datetime, change: Callable[[Version], Version]) -> None:
        with patch.object(warehouse_version, "datetime", Mock(now=lambda _: moment)):
            change_version(spark, new_warehouse, lambda now: change(now or Version(1)))

    ahead = datetime.now(UTC) + timedelta(days=1)
    at(ahead, lambda now: replace(now, number=2))
    at(ahead - timedelta(days=2), lambda now: replace(now, registry="registry-3"))
    at(ahead - timedelta(days=3), lambda now: replace(now, number=3))

    now = open_version(spark, new_warehouse)
    assert (now.number, now.registry) == (3, "registry-3")
    # A program that read v1 before, and writes to it now, takes nobody back.
    change_version(spark, new_warehouse, lambda _: Version(1, registry="registry-4"))
    assert open_version(spark, new_warehouse).number == 3


@pytest.mark.long(seconds=30)
def test_a_reader_sees_all_tables_of_one_version(spark: SparkSession, new_warehouse: str) -> None:
    records = drawn_records(random.Random(10), 40)  # noqa: S311
    BatchJob(spark, new_warehouse).take(kafka_frame(spark, records), BatchId("query", 0), {})
    declared = parse_streams(DECLARED, Path("streams.toml"))

    def in_between(*opening: Any) -> DataFrame:
        # Windows are opened; all else is not yet.
        replay(spark, new_warehouse, declared, None, only_writer, no_report)
        return open_gaps(*opening)

    with patch.dict(OPENERS, gaps=in_between):
        tables = open_all(spark, new_warehouse)

    assert open_version(spark, new_warehouse).number == 2
    assert {row.metric for row in tables["readings"].select("metric").distinct().collect()} == {
        row.metric for row in tables["windows"].select("metric").distinct().collect()
    }


def folder_exists_on_disk(warehouse: str) -> bool:
    return (Path(warehouse) / "v2" / "log").is_dir()
