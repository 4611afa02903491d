"""A replay that reads Kafka once more, instead of `log`: by offsets and by time, and `ingest` after it."""

import asyncio
import json
import random
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from demo.kafka_broker import Broker
from spark.cli import main
from spark.ingest_job import IngestSettings, Listener, run_ingest
from spark.log.log_table import open_log
from spark.log.warehouse_version import current_version
from spark.source.kafka_source import KafkaSource
from tests.support import spark_oracle
from tests.support.spark_kafka_feed import expect_senders_times, send
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import drawn_records
from tests.support.spark_warehouse import Warehouse

pytestmark = [
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("interpreted"),
]


class Site:
    """Equal records every time, in topics of their own. Kafka took them in one second after the other."""

    def __init__(self, kafka: Broker, spark: SparkSession, warehouse: str, topics: str) -> None:
        self.kafka, self.spark, self.warehouse = kafka, spark, warehouse
        self.source = KafkaSource(kafka.bootstrap, f"(device|gateway)-.*-{topics}")
        self.records = [
            replace(record, topic=f"{record.topic}-{topics}", timestamp=record.timestamp + timedelta(seconds=place))
            for place, record in enumerate(drawn_records(random.Random(11), 200))  # noqa: S311 - it is no secret
        ]

    def ingest(self, records: list[KafkaRecord]) -> None:
        asyncio.run(send(self.kafka, records))
        settings = IngestSettings(self.source, self.warehouse, f"{self.warehouse}/_checkpoint", once=True)
        run_ingest(self.spark, settings, threading.Event(), Listener(warn=expect_senders_times))

    def replay(self, since: str) -> Result:
        command = ["replay", "--warehouse", self.warehouse, "--bootstrap", self.kafka.bootstrap, "--since", since]
        return CliRunner().invoke(main, command)

    def read_again(self) -> list[tuple[str, int, int]]:
        """Places of the records that the last replay read from Kafka. Each stands there once, however it was read."""
        log = open_log(self.spark, self.warehouse).select("topic", "partition", "offset", "ingest", "ordinal").collect()
        places = [(row.topic, row.partition, row.offset) for row in log]
        assert len(places) == len(set(places))
        last = max(log, key=lambda row: row.ordinal).ingest
        assert last.startswith("replay-")
        return sorted((row.topic, row.partition, row.offset) for row in log if row.ingest == last)

    def tables(self) -> spark_oracle.Tables:
        return Warehouse(self.spark, Path(self.warehouse)).tables()


@pytest.mark.long(seconds=60)
def test_kafka_is_read_once_more_from_offsets_on(kafka: Broker, spark: SparkSession, new_warehouse: str) -> None:
    site = Site(kafka, spark, new_warehouse, "again")
    first = site.records[:150]
    site.ingest(first)

    # Of one topic, from the middle of each partition on; all else comes from `log`.
    ends = {record.partition: record.offset + 1 for record in first if record.topic == "device-thermo-again"}
    middles = {"device-thermo-again": {partition: end // 2 for partition, end in ends.items()}}
    assert any(offset > 0 for offset in middles["device-thermo-again"].values())
    shown = site.replay(json.dumps(middles))
    assert shown.exit_code == 0, shown.output
    assert "readers see v2 now" in shown.output
    again = [
        record
        for record in first
        if record.topic in middles and record.offset >= middles[record.topic][record.partition]
    ]
    assert site.read_again() == sorted((r.topic, r.partition, r.offset) for r in again)
    assert site.tables() == spark_oracle.tables(first)
    version = current_version(spark, new_warehouse)
    assert version is not None

    # Unreadable records are reported, and leave the tables as they are.
    for wrong, words in (
        ('{"device-none": {"0": 0}}', "Kafka's topic device-none is not the one that `log` was last read from"),
        ('{"device-thermo-again": {"7": 0}}', "partition 7 of device-thermo-again"),
        ("2026-03-14T12:00:00", "says no time zone"),
        ("yesterday", "is neither a time"),
        ("{}", "names no topic"),
    ):
        shown = site.replay(wrong)
        assert shown.exit_code != 0
        assert words in " ".join(shown.output.split()), shown.output
    assert current_version(spark, new_warehouse) == version


@pytest.mark.long(seconds=60)
def test_kafka_is_read_once_more_from_a_time_on_and_the_job_goes_on(
    kafka: Broker, spark: SparkSession, new_warehouse: str
) -> None:
    site = Site(kafka, spark, new_warehouse, "since")
    first = site.records[:150]
    site.ingest(first)
    before = spark_oracle.tables(first)
    assert site.tables() == before
    # `log` has the records that a replay read from Kafka before.
    assert site.replay('{"device-thermo-since": {"0": 0, "1": 0}}').exit_code == 0

    # Of all topics, by Kafka's clock.
    since = sorted(record.timestamp for record in first)[len(first) // 3]
    shown = site.replay(since.isoformat())
    assert shown.exit_code == 0, shown.output
    later = {(r.topic, r.partition, r.offset) for r in first if r.timestamp >= since}
    assert 0 < len(later) < len(first)
    assert set(site.read_again()) == later
    assert site.tables() == before
    version = current_version(spark, new_warehouse)
    assert version is not None
    assert (version.number, version.source) == (3, "v2 and kafka")

    site.ingest(site.records[150:])
    assert site.tables() == spark_oracle.tables(site.records)
