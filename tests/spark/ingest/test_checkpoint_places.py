"""A checkpoint and tables of different moments: all of Kafka gets read, whichever of the two was put back."""

import asyncio
import signal
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from shutil import copytree, rmtree

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from demo.kafka_broker import Broker
from spark.cli import main
from spark.ingest.checkpoint_place import Place
from spark.ingest_job import Begun, IngestSettings, Listener, run_ingest
from spark.log.log_table import open_log
from spark.log.readings_view import open_readings
from spark.source.kafka_source import KafkaSource
from spark.source.topic_changes import TopicNow, TopicRead
from tests.spark.test_spark_ingest import send
from tests.support.spark_kafka_feed import expect_no_warning
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import reading, reading_headers

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(600), pytest.mark.usefixtures("interpreted")]


def sent(sequence: int, topic: str) -> KafkaRecord:
    headers = reading_headers(sequence, time=datetime.now(UTC))
    return replace(reading(f'{{"t": {sequence}}}'.encode(), headers), topic=topic, partition=sequence % 2)


class Site:
    """A topic, a warehouse and its checkpoint; each run reads all that there is."""

    def __init__(self, kafka: Broker, spark: SparkSession, warehouse: str, topic: str) -> None:
        self.kafka, self.spark, self.topic = kafka, spark, topic
        self.warehouse = Path(warehouse)
        self.checkpoint = self.warehouse.parent / "checkpoint"
        self.count = 0
        self.begun: list[Begun] = []
        asyncio.run(send(kafka, {topic}, []))

    def run(self) -> str:
        """Ten more readings, and a run. Returns its output at the start."""
        more = [sent(sequence, self.topic) for sequence in range(self.count, self.count + 10)]
        self.count += 10
        asyncio.run(send(self.kafka, set(), more))
        source = KafkaSource(self.kafka.bootstrap, self.topic)
        settings = IngestSettings(source, str(self.warehouse), str(self.checkpoint), once=True)
        begun: list[Begun] = []
        run_ingest(self.spark, settings, threading.Event(), Listener(ready=begun.append, warn=expect_no_warning))
        return " ".join(each.anew for each in begun)

    def expect_all(self) -> None:
        """Make sure that each reading is there once, and that nothing of Kafka was read twice."""
        readings = open_readings(self.spark, str(self.warehouse)).select("value").collect()
        assert sorted(int(row.value) for row in readings) == list(range(self.count))
        assert open_log(self.spark, str(self.warehouse)).count() == self.count


def put_back(saved: Path, place: Path) -> None:
    rmtree(place)
    copytree(saved, place)


def forget_offsets(folder: Path) -> None:
    rmtree(folder / "offsets")


def cut_offsets(folder: Path) -> None:
    newest = max((folder / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    newest.write_text(newest.read_text()[:-7])
    newest.with_name(f".{newest.name}.crc").unlink()


@pytest.mark.long(seconds=60)
def test_reading_goes_on_where_the_tables_end_whatever_the_checkpoint_says(
    kafka: Broker, spark: SparkSession, new_warehouse: str, empty_warehouse: Path, tmp_path: Path
) -> None:
    site = Site(kafka, spark, new_warehouse, "device-places")
    assert site.run() == ""
    copytree(site.warehouse, tmp_path / "warehouse-then")
    copytree(site.checkpoint, tmp_path / "checkpoint-then")
    assert site.run() == ""

    # The checkpoint is newer than the warehouse. It is said once.
    put_back(tmp_path / "warehouse-then", site.warehouse)
    assert "does not stand where the tables end" in site.run()
    site.expect_all()
    assert site.run() == ""
    # It is older, it is none, it is damaged.
    put_back(tmp_path / "checkpoint-then", site.checkpoint)
    site.run()
    site.expect_all()
    for damage in (rmtree, forget_offsets, cut_offsets):
        newest = max(site.checkpoint.iterdir(), key=lambda folder: int(folder.name))
        damage(newest)
        assert str(newest) in site.run()
        site.expect_all()
    # It is another warehouse's.
    put_back(empty_warehouse, site.warehouse)
    assert "does not stand where the tables end" in site.run()
    site.expect_all()
    assert site.run() == ""


@pytest.mark.long(seconds=25)
def test_the_command_says_that_a_new_checkpoint_begins(
    kafka: Broker, spark: SparkSession, new_warehouse: str, empty_warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(kafka, spark, new_warehouse, "device-places-said")
    site.run()
    put_back(empty_warehouse, site.warehouse)
    # The command runs in this process: the tests' session outlives it, and so do their signal handlers.
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    command = ["ingest", "--once", "--bootstrap", kafka.bootstrap, "--topics", site.topic]
    ran = CliRunner().invoke(main, [*command, "--warehouse", new_warehouse, "--checkpoint", str(site.checkpoint)])
    assert ran.exit_code == 0, ran.output
    assert "So a new one begins where the tables end, and nothing is passed over" in ran.output
    site.expect_all()


NOW = {"t": TopicNow("id", {0: 3, 1: 0}, {0: 20, 1: 9})}


def read(*offsets: int) -> dict[str, TopicRead]:
    return {"t": TopicRead("id", dict(enumerate(offsets)))}


def at(*offsets: int) -> dict[str, dict[int, int]]:
    return {"t": dict(enumerate(offsets))}


@pytest.mark.parametrize(
    ("place", "known", "fits"),
    [
        (Place(at(10, 5)), read(10, 5), True),
        (Place(at(11, 5)), read(10, 5), False),
        (Place(at(10, 4)), read(10, 5), False),
        # A batch that was begun: it was not committed, or it was, or another one was.
        (Place(at(5, 5), at(10, 5)), read(5, 5), True),
        (Place(at(5, 5), at(10, 5)), read(10, 5), True),
        (Place(at(5, 5), at(10, 5)), read(7, 5), False),
        # Nothing was read of a partition: only at its beginning nothing is passed over.
        (Place(at(10, 0)), read(10), True),
        (Place(at(10, 5)), read(10), False),
        # One that the checkpoint does not know is read from 0, where Kafka still has that.
        (Place(at(10)), read(10), True),
        (Place(at(10)), read(10, 5), False),
        (Place({}), {}, False),
        (Place(at(10), takes_new=False), read(10), False),
        (Place(at(10, 5) | {"other": {0: 0}}), read(10, 5), False),
    ],
)
def test_a_place_is_where_the_tables_end(place: Place, known: dict[str, TopicRead], fits: bool) -> None:  # noqa: FBT001
    assert place.is_where_tables_end(known, NOW) is fits
