"""Consumers that know nothing of Sluice: Kafka Connect, CloudEvents' SDK, and the programs of docs/consumers.md."""

import asyncio
import json
import re
import shlex
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, ConsumerRecord
from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka
from cloudevents.core.formats.json import JSONFormat
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from demo import child_process, kafka_broker
from demo.kafka_broker import Broker
from gateway.record_contract import DEVICE_HEADERS, HEADERS, attribute_of
from tests.support import kafka_connect
from tests.support.gateways import consume, consume_until, daemon, free_port, header, write_config
from tests.support.kafka_admin import create_topic
from tests.support.kafka_connect import RUNNING, connect_standalone
from tests.support.sizes import size
from tests.support.waiting import patience, until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PAGE = (Path(__file__).parents[2] / "docs" / "consumers.md").read_text()
DEVICES = 20
ODD = (
    b"21.5",
    b' {"celsius": 21.50, "note": "\xc3\xa4 \\u0000 \\ud800"}\n',
    b'{"a": 1, "a": 2}',
    b"18446744073709551617",
    b"1e99999999999",
    b"9" * 1_500,
    b"[" * 900 + b"]" * 900,
    b'{"%b": 1}' % (b"x" * 60_000),
    b"null",
    b'"text"',
    # No JSON.
    b"",
    b"\x00\xff\xfe",
    b'{"celsius": nan}',
    b'{"celsius": 21.5',
    b"\xef\xbb\xbf21.5",
    b'"\xff"',
    b"on\n",
)


def mixed(count: int) -> list[tuple[str, bytes]]:
    """Readings of several devices: most are good, each tenth is odd or broken."""
    good = b'{"celsius": %d.5, "boot": "1-0000beef", "seq": %d}'
    return [
        (
            f"device/m{number % DEVICES:03}/thermo",
            ODD[number // 10 % len(ODD)] if number % 10 == 0 else good % (number % 40, number),
        )
        for number in range(count)
    ]


def publish_all(port: int, messages: list[tuple[str, bytes]]) -> None:
    """Publish with QoS 1, and return once all are acknowledged."""
    client = Client(CallbackAPIVersion.VERSION2)
    client.max_inflight_messages_set(200)
    client.connect("127.0.0.1", port)
    client.loop_start()
    for told in [client.publish(topic, payload, qos=1) for topic, payload in messages]:
        told.wait_for_publish(patience(60))
    client.disconnect()
    client.loop_stop()


@dataclass(frozen=True, slots=True)
class Topics:
    """The records of one gateway, in the topics of one stream."""

    bootstrap: str
    own: list[ConsumerRecord]
    """Binary records."""
    beside: list[ConsumerRecord]
    """Structured events."""
    latest: list[ConsumerRecord]
    told: dict[str, Any]
    """Offsets that the last heartbeat tells."""


@pytest.fixture(scope="module")
def topics(kafka: Broker, tmp_path_factory: pytest.TempPathFactory) -> Topics:
    """A gateway's topics of binary records, structured events and last readings, once it has ended."""
    return asyncio.run(_filled(kafka.bootstrap, tmp_path_factory.mktemp("both")))


async def _filled(bootstrap: str, folder: Path) -> Topics:
    sent, port = mixed(400), free_port()
    config = write_config(folder, bootstrap, port, "both", 'envelope = "both"')
    config.write_text(config.read_text().replace("[kafka]", '[kafka]\nlatest_topic = "latest-{topic}"'))
    with daemon(config, port):
        await asyncio.to_thread(publish_all, port, sent)
        own = await consume_until(bootstrap, len(sent), "both-thermo")
        beside = await consume_until(bootstrap, len(sent), "structured-both-thermo")
        async with asyncio.timeout(patience(60)):
            while "both-thermo" not in (told := await _told_offsets(bootstrap)):
                await asyncio.sleep(0.2)
    latest = await consume(bootstrap, "latest-both-thermo")
    return Topics(bootstrap, own, beside, latest, told)


async def _told_offsets(bootstrap: str) -> dict[str, Any]:
    """The offsets that the last heartbeat tells; none if there is no heartbeat yet."""
    told: dict[str, Any] = {}
    for event in await consume(bootstrap, "both-events"):
        if header(event, "ce_subject") == "heartbeat":
            told = json.loads(event.value or b"")["offsets"]
    return told


def ids_in(written: Path) -> set[str]:
    """The ids of records in a file. An id at its end may not be whole yet."""
    text = written.read_text(errors="replace") if written.exists() else ""
    return set(re.findall(r"\b[0-9a-f]{16}-[0-9a-f]{12}-[0-9]+(?=[^0-9])", text))


def event_of(record: ConsumerRecord) -> BaseCloudEvent:
    return from_kafka(KafkaMessage(dict(record.headers), record.key, record.value), JSONFormat())


@pytest.mark.campaign(seconds=60)
async def test_kafka_connect_writes_each_reading_with_whose_and_when(kafka: Broker, tmp_path: Path, port: int) -> None:
    sent = mixed(size(1_000, 10_000))
    config = write_config(tmp_path, kafka.bootstrap, port, "connect", 'envelope = "structured"')
    with daemon(config, port):
        await asyncio.to_thread(publish_all, port, sent)
        await consume_until(kafka.bootstrap, len(sent), "connect-thermo")
    sunk = tmp_path / "sunk.txt"
    worker, sink, _ = (dict(told) for told in documented_properties())
    name = sink.pop("name")
    sink |= {"topics": "connect-thermo", "file": str(sunk)}
    worker["consumer.auto.offset.reset"] = "earliest"

    with connect_standalone(tmp_path, kafka.bootstrap, {name: sink}, worker) as connect:
        await until(lambda: len(ids_in(sunk)) == len(sent), patience(60), lambda: str(connect.states(name)))
        assert connect.states(name) == [RUNNING]
    lines = [line for line in sunk.read_text().splitlines() if "specversion=1.0" in line]
    for told in (r"device=m[0-9]{3}\b", r"time=20[0-9T:.-]+Z\b", r"timeerror=[0-9]+", r"data(_base64)?="):
        assert all(re.search(told, line) for line in lines)


@pytest.mark.long(seconds=60)
async def test_a_sink_for_databases_writes_each_reading_once(topics: Topics, tmp_path: Path) -> None:
    events = {event_of(record).get_id(): record.value.decode() for record in topics.beside}
    await create_topic(topics.bootstrap, "database")
    async with AIOKafkaProducer(bootstrap_servers=topics.bootstrap) as producer:
        for value in (*events.values(), *events.values(), '{"id": "last"}'):
            await producer.send("database", value.encode())
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "jdbc").symlink_to(kafka_connect.JARS.parent / "jdbc")
    database = tmp_path / "readings.db"
    worker, _, sink = (dict(told) for told in documented_properties())
    name = sink.pop("name")
    sink |= {"topics": "database", "camel.beans.tables.url": f"jdbc:sqlite:{database}"}
    worker |= {"consumer.auto.offset.reset": "earliest", "plugin.path": str(tmp_path / "plugins")}

    with sqlite3.connect(database, isolation_level=None) as tables:
        (create,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
        tables.execute(create)
        with connect_standalone(tmp_path, topics.bootstrap, {name: sink}, worker) as connect:
            ended = "SELECT * FROM reading WHERE id = 'last'"
            await until(lambda: tables.execute(ended).fetchone(), patience(60), lambda: str(connect.states(name)))
            assert connect.states(name) == [RUNNING]
        tables.execute("DELETE FROM reading WHERE id = 'last'")
        assert dict(tables.execute("SELECT id, event FROM reading")) == events
        for device, time, data, text in tables.execute("SELECT device, time, data, event FROM reading"):
            event = json.loads(text)
            assert (device, time) == (event["device"], event["time"])
            if isinstance(event.get("data"), dict | list):
                assert json.loads(data) == event["data"]


def documented_properties() -> Iterator[Mapping[str, str]]:
    for block in re.findall(r"```properties\n(.*?)```", PAGE, re.DOTALL):
        yield dict(line.split("=", 1) for line in block.splitlines())


def test_cloudevents_sdk_reads_every_record_in_both_modes(topics: Topics) -> None:
    beside = {event.get_id(): (event, record) for record in topics.beside for event in [event_of(record)]}
    assert len(topics.own) == 400
    for record in topics.own:
        event = event_of(record)
        other, structured = beside.pop(event.get_id())
        assert structured.key == record.key
        for each in (*HEADERS, *DEVICE_HEADERS):
            name = attribute_of(each)
            assert other.get_attributes().get(name) == event.get_attributes().get(name)
        assert other.get_extension("device") == record.key.decode()
        data = other.get_data()
        if isinstance(data, bytes):
            assert data == record.value
        else:
            assert data == json.loads(record.value)
    assert not beside


def test_the_last_reading_of_each_device_is_the_last_one_of_its_key(topics: Topics) -> None:
    last = {record.key: event_of(record).get_id() for record in topics.latest}
    order: dict[bytes, tuple[int, str]] = {}
    for record in topics.own:
        headers = {name: value.decode() for name, value in record.headers}
        place = int(headers["ce_lanesequence"]), headers["ce_id"]
        order[record.key] = max(order.get(record.key, place), place)
    assert last == {key: id_ for key, (_, id_) in order.items()}
    assert len(last) == DEVICES


def test_heartbeats_name_the_topics_that_the_tables_need_alone(topics: Topics) -> None:
    assert set(topics.told) == {"both-thermo", "both-events"}


def documented(language: str, topics: Topics, topic: str) -> str:
    """A program of the page, for our broker and topic."""
    section = PAGE.partition("## A consumer in ten lines")[2].partition("\n## ")[0]
    programs: dict[str, str] = dict(re.findall(r"```([a-z]*)\n(.*?)```", section, re.DOTALL))
    return programs[language].replace("kafka.example:9092", topics.bootstrap).replace("device-thermo", topic)


async def lines_of(command: list[str | Path], folder: Path, topics: Topics) -> list[str]:
    """The lines that a program writes, once it has written the id of each record. A payload may be several lines."""
    log, output = folder / "errors.log", folder / "written.txt"
    process = child_process.spawn(command, log, output=output)
    try:
        await until(lambda: len(ids_in(output)) >= len(topics.own), patience(60), log.read_text)
    finally:
        child_process.stop(process)
    return output.read_text(errors="replace").splitlines()


@pytest.mark.parametrize("topic", ["both-thermo", "structured-both-thermo"])
async def test_the_consumer_in_python_does_as_the_page_says(topics: Topics, tmp_path: Path, topic: str) -> None:
    program = tmp_path / "readings.py"
    program.write_text(documented("python", topics, topic))
    lines = await lines_of([sys.executable, "-u", program], tmp_path, topics)
    ids = {event_of(record).get_id() for record in topics.own}
    assert ids <= {line.split()[0] for line in lines if line}


async def test_the_consumer_in_java_does_as_the_page_says(topics: Topics, tmp_path: Path) -> None:
    program = tmp_path / "Readings.java"
    program.write_text(documented("java", topics, "structured-both-thermo"))
    lines = await lines_of([*kafka_broker.java_command(), program], tmp_path, topics)
    assert sum('"specversion":"1.0"' in line for line in lines) == len(topics.own)


async def test_the_consumer_on_a_console_does_as_the_page_says(topics: Topics, tmp_path: Path) -> None:
    _, *options = shlex.split(documented("", topics, "structured-both-thermo").replace("\\\n", " "))
    classes = f"{kafka_broker.JARS}/*:{kafka_connect.JARS}/*"
    command = [kafka_broker.java_program(), "-cp", classes, "org.apache.kafka.tools.consumer.ConsoleConsumer", *options]
    lines = await lines_of([*command], tmp_path, topics)
    assert sum(line.startswith("content-type:application/cloudevents+json\tm") for line in lines) == len(topics.own)


def test_the_event_on_the_page_is_what_the_page_of_records_has_in_headers() -> None:
    (told,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    event = json.loads(told)
    example = (Path(__file__).parents[2] / "docs" / "kafka-records.md").read_text()
    for each, text in re.findall(r"(?m)^(ce_[a-z]+|content-type) +(.+)$", example.partition("value  ")[0]):
        assert event[attribute_of(each)] == text
