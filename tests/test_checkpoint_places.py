"""A checkpoint and tables that are not of one moment: whatever is put back beside what, all of Kafka gets read."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from shutil import copytree, rmtree

import pytest
from pyspark.sql import SparkSession

from demo.kafka_broker import Broker
from spark.ingest_job import Begun, IngestSettings, Listener, run_ingest
from spark.kafka_source import KafkaSource
from spark.log_table import open_log
from spark.readings_view import open_readings
from spark.session import SHORT_LIVED
from tests.spark_oracle import KafkaRecord
from tests.spark_records import reading, reading_headers
from tests.test_spark_ingest import send

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.usefixtures("interpreted")]


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
        """Ten more readings, and a run; what it says at its start."""
        more = [sent(sequence, self.topic) for sequence in range(self.count, self.count + 10)]
        self.count += 10
        asyncio.run(send(self.kafka, set(), more))
        source = KafkaSource(self.kafka.bootstrap, self.topic)
        settings = IngestSettings(source, str(self.warehouse), str(self.checkpoint), once=True)
        begun: list[Begun] = []
        run_ingest(self.spark, settings, threading.Event(), Listener(ready=begun.append, warn=pytest.fail))
        return " ".join(each.anew for each in begun)

    def expect_all(self, read_twice: int = 0) -> None:
        """Make sure that each reading is there once, and that no more of Kafka was read than had to be."""
        readings = open_readings(self.spark, str(self.warehouse)).select("value").collect()
        assert sorted(int(row.value) for row in readings) == list(range(self.count))
        assert open_log(self.spark, str(self.warehouse)).count() == self.count + read_twice


def put_back(saved: Path, place: Path) -> None:
    rmtree(place)
    copytree(saved, place)


def test_a_checkpoint_newer_than_the_warehouse_reads_on_where_the_warehouse_ends(
    kafka: Broker, spark: SparkSession, new_warehouse: str, tmp_path: Path
) -> None:
    site = Site(kafka, spark, new_warehouse, "device-place-newer")
    assert site.run() == ""
    copytree(site.warehouse, tmp_path / "backup")
    assert site.run() == ""
    put_back(tmp_path / "backup", site.warehouse)
    assert "checkpoint" in site.run()
    site.expect_all()
    # It is said once.
    assert site.run() == ""
    site.expect_all()


def test_a_new_warehouse_beside_a_used_checkpoint_reads_everything(
    kafka: Broker, spark: SparkSession, new_warehouse: str, empty_warehouse: Path
) -> None:
    site = Site(kafka, spark, new_warehouse, "device-place-used")
    site.run()
    site.run()
    put_back(empty_warehouse, site.warehouse)
    assert "checkpoint" in site.run()
    site.expect_all()


def test_a_checkpoint_older_than_the_warehouse_or_none_reads_nothing_twice(
    kafka: Broker, spark: SparkSession, new_warehouse: str, tmp_path: Path
) -> None:
    site = Site(kafka, spark, new_warehouse, "device-place-older")
    site.run()
    copytree(site.checkpoint, tmp_path / "backup")
    site.run()
    put_back(tmp_path / "backup", site.checkpoint)
    assert "checkpoint" in site.run()
    site.expect_all()
    rmtree(site.checkpoint)
    site.run()
    site.expect_all()


def forget_offsets(folder: Path) -> None:
    rmtree(folder / "offsets")


def cut_offsets(folder: Path) -> None:
    newest = max((folder / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    newest.write_text(newest.read_text()[:-7])
    newest.with_name(f".{newest.name}.crc").unlink()


def forget_all_but_the_first(folder: Path) -> None:
    """The last batches come again with other records than they were committed with."""
    for part in ("offsets", "commits"):
        for file in (folder / part).glob("*"):
            if file.name.removeprefix(".").removesuffix(".crc") != "0":
                file.unlink()


@pytest.mark.parametrize("damage", [forget_offsets, cut_offsets, forget_all_but_the_first])
def test_a_checkpoint_that_is_not_whole_is_begun_anew(
    kafka: Broker, spark: SparkSession, new_warehouse: str, damage: Callable[[Path], None]
) -> None:
    site = Site(kafka, spark, new_warehouse, f"device-place-{damage.__name__}")
    site.run()
    site.run()
    damage(site.checkpoint / "0")
    assert "checkpoint" in site.run()
    site.expect_all()


def test_the_command_says_it(kafka: Broker, spark: SparkSession, new_warehouse: str, tmp_path: Path) -> None:
    site = Site(kafka, spark, new_warehouse, "device-place-said")
    copytree(site.warehouse, tmp_path / "backup")
    site.run()
    put_back(tmp_path / "backup", site.warehouse)
    command = [sys.executable, "-m", "spark.cli", "ingest", "--bootstrap", kafka.bootstrap, "--once"]
    command += ["--warehouse", str(site.warehouse), "--checkpoint", str(site.checkpoint), "--topics", site.topic]
    environment = os.environ | {"SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=True)
    assert "a new checkpoint begins where the tables end" in ran.stdout
    site.expect_all()
