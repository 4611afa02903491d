"""Which topics `sluice-cloud ingest` reads, and its words about those that it leaves out."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from demo.kafka_broker import Broker, kafka_broker
from spark.cli import main
from spark.engine.session import SHORT_LIVED
from spark.log.log_table import open_log
from spark.log.readings_view import open_readings
from spark.views.gateways_view import open_gateways
from spark.views.windows_view import open_windows
from tests.spark.test_spark_ingest import lines, read_until, send
from tests.support.kafka_records import delete_before
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import reading, reading_headers, rfc3339

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.usefixtures("interpreted")]

BEGUN = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)

ENDING_S_MAX = 120
"""A job that was told to end finishes its batch."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker of the test's own: without --topics the job looks at all that there is."""
    with kafka_broker(tmp_path / "kafka") as started:
        yield started


@pytest.fixture(autouse=True)
def _session_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command run in this process: the tests' session outlives it, and so do their signal handlers."""
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def once(broker: Broker, warehouse: Path, *options: str) -> str:
    """All output of `ingest` as it reads the present records."""
    command = ["ingest", "--once", "--bootstrap", broker.bootstrap, "--warehouse", str(warehouse), *options]
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.output
    return ran.output


@contextmanager
def ingesting(broker: Broker, warehouse: Path) -> Iterator[subprocess.Popen[str]]:
    """`sluice-cloud ingest --json` as a process for the length of a `with`."""
    command = [sys.executable, "-m", "spark.cli", "ingest", "--json", "--interval-s", "1"]
    command += ["--bootstrap", broker.bootstrap, "--warehouse", str(warehouse)]
    environment = os.environ | {"SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def sent(sequence: int, topic: str) -> KafkaRecord:
    headers = reading_headers(sequence, time=BEGUN + timedelta(seconds=sequence))
    return replace(reading(f'{{"t": {sequence}}}'.encode(), headers), topic=topic, partition=0)


def heartbeat(number: int, offsets: Mapping[str, int], **changes: object) -> KafkaRecord:
    """A heartbeat of a gateway with these acknowledged offsets, `number` minutes after its start."""
    at = BEGUN + timedelta(minutes=number)
    body: dict[str, Any] = {
        "offsets": {topic: {"0": offset} for topic, offset in offsets.items()},
        "pending": [],
        "quarantined": [],
        "low_watermark": rfc3339(at),
    }
    headers = reading_headers(
        number, time=at, quality="synced", event_type="sluice.gateway.heartbeat", lane="ba9876543210"
    )
    value = json.dumps(body | changes).encode()
    return replace(reading(value, headers, key=b"gw-1"), topic="gateway-events", partition=0)


def values(spark: SparkSession, warehouse: Path) -> list[int]:
    return sorted(int(row.value) for row in open_readings(spark, str(warehouse)).select("value").collect())


NAMED = {
    "ex-temp": 20,
    "gateway-events": 0,
    "site-quarantine": 1,
    "gateway-quarantine": 1,
    "__hidden": 1,
    # One that was deleted since, and one that cannot be.
    "deleted-since": 7,
    "a|.*": 1,
}
HIDDEN = ("site-quarantine", "gateway-quarantine", "__hidden")


def send_named(broker: Broker, named: Mapping[str, int]) -> None:
    """Readings in one topic, something in others that are not for reading, and a heartbeat that names topics."""
    records = [sent(90 + place, topic) for place, topic in enumerate(HIDDEN)]
    records += [sent(sequence, "ex-temp") for sequence in range(20)]
    beat = heartbeat(1, named, quarantine_topic="site-quarantine")
    asyncio.run(send(broker, {"ex-temp", "gateway-events", "nobodys", *HIDDEN}, [*records, beat]))


def topics_read(spark: SparkSession, warehouse: Path) -> set[str]:
    return {row.topic for row in open_log(spark, str(warehouse)).select("topic").distinct().collect()}


def test_what_heartbeats_name_is_read_wherever_routes_lead(broker: Broker, spark: SparkSession, tmp_path: Path) -> None:
    warehouse = tmp_path / "warehouse"
    send_named(broker, NAMED)
    # The beginning of a topic may be gone before anybody read it.
    asyncio.run(delete_before(broker.bootstrap, "ex-temp", {0: 3}))

    told = once(broker, warehouse)
    said = told.splitlines()
    assert said[0].startswith("reading gateway-events from ")
    assert any(line.startswith("reading ex-temp, gateway-events from ") for line in said)
    assert "topic ex-temp is new to the tables; Kafka has deleted its first 3 records" in said
    assert "__hidden (names that begin with __ are Kafka's own)" in told
    assert values(spark, warehouse) == list(range(3, 20))
    assert topics_read(spark, warehouse) == {"ex-temp", "gateway-events"}
    (gateway,) = open_gateways(spark, str(warehouse)).collect()
    assert gateway.unread_topics == ["__hidden"]


@pytest.mark.long(seconds=110)
def test_topics_that_heartbeats_name_while_it_runs_are_taken_up(
    broker: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    warehouse = tmp_path / "warehouse"
    named = {topic: end for topic, end in NAMED.items() if topic != "__hidden"}
    send_named(broker, named)
    once(broker, warehouse)
    (gateway,) = open_gateways(spark, str(warehouse)).collect()
    assert (gateway.waiting, gateway.unread_topics) == (0, [])
    assert gateway.complete_to_time is not None

    # They are taken up by and by, and by the next run alike.
    with ingesting(broker, warehouse) as process:
        told = lines(process)
        ready = next(told)
        assert (ready["state"], ready["topics"]) == ("ready", ["ex-temp", "gateway-events"])
        later = [sent(sequence, "ex-later") for sequence in range(20, 25)]
        more = heartbeat(2, named | {"ex-later": 5, "__hidden": 1}, quarantine_topic="site-quarantine")
        asyncio.run(send(broker, {"ex-later"}, [*later, more]))
        read_until((line for line in told if "end_offsets" in line), {"ex-later": {"0": 5, "1": 0}})
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDING_S_MAX) == 0
    asyncio.run(send(broker, set(), [sent(25, "ex-temp"), sent(26, "ex-later")]))
    assert "__hidden (names that begin with __ are Kafka's own)" in once(broker, warehouse)
    assert values(spark, warehouse) == list(range(27))
    places = open_log(spark, str(warehouse)).select("topic", "partition", "offset").collect()
    assert len(places) == len(set(places))
    assert {place.topic for place in places} == {"ex-temp", "ex-later", "gateway-events"}
    (gateway,) = open_gateways(spark, str(warehouse)).collect()
    assert gateway.unread_topics == ["__hidden"]


@pytest.mark.long(seconds=60)
def test_topics_that_a_pattern_leaves_out_are_reported_and_keep_windows_provisional(
    broker: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    warehouse = tmp_path / "warehouse"
    pattern = ("--topics", "device-.*|gateway-events")
    offsets = {"device-thermo": 20, "ex-temp": 5}
    readings = [sent(10 * sequence, "device-thermo") for sequence in range(20)]
    elsewhere = [sent(300 + sequence, "ex-temp") for sequence in range(5)]
    # The first heartbeat was sent before anything went to the other topic.
    beats = [heartbeat(1, {"device-thermo": 20}), heartbeat(9, offsets)]
    asyncio.run(send(broker, {"device-thermo", "ex-temp", "gateway-events"}, [*readings, *elsewhere, *beats]))

    for said in (once(broker, warehouse, *pattern), once(broker, warehouse, *pattern)):
        assert "ex-temp" in said
        assert "--topics" in said
    assert len(values(spark, warehouse)) == 20
    (gateway,) = open_gateways(spark, str(warehouse)).collect()
    assert (gateway.waiting, gateway.unread_topics) == (1, ["ex-temp"])
    assert gateway.complete_to_time < BEGUN.replace(tzinfo=None) + timedelta(minutes=2)
    windows = open_windows(spark, str(warehouse)).orderBy("window_start").collect()
    assert [(row.status, row.why) for row in windows][1:3] == [
        ("provisional", "gateway gw-1 sends readings to ex-temp, which `ingest` does not read")
    ] * 2
    shown = CliRunner().invoke(main, ["gateways", "--warehouse", str(warehouse)])
    assert "ex-temp" in shown.output

    # Read after all, it holds nothing up any more.
    said = once(broker, warehouse)
    assert "ex-temp" in said
    (gateway,) = open_gateways(spark, str(warehouse)).collect()
    assert (gateway.waiting, gateway.unread_topics) == (0, [])
    assert len(values(spark, warehouse)) == 25
    windows = open_windows(spark, str(warehouse)).where("stream = 'device-thermo'").orderBy("window_start").collect()
    assert [row.status for row in windows][:3] == ["complete"] * 3
