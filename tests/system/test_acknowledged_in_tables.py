"""The promise from end to end: what the front door acknowledged is in `readings`, or a copy or conflict of what is.

Routes, topics, devices and payloads are drawn. Readings go through the real front door and buffer, become Kafka records
by the real encoder, and are read as the cloud reads them. The model beside it is written from docs/payloads.md.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import cbor2
import msgspec
import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import Row
from gateway.clock.gateway_clock import BootTimes
from gateway.intake.front_door import FrontDoor
from gateway.intake.payload_identity import BINARY, BINARY_VERSION
from gateway.intake.routes import Destination, compile_routes
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.record import RecordEncoder
from gateway.reading import Datum, Reading, name_of_boot
from gateway.settings import GatewaySettings, KafkaSettings, PayloadIdentity, RouteSettings
from tests.support import spark_oracle
from tests.support.buffers import CLOCK, confirm, lane_of, opened, rows, series_of
from tests.support.sizes import size
from tests.support.spark_oracle import Event, KafkaRecord, told_apart
from tests.support.spark_records import NOON
from tests.support.spark_warehouse import Warehouse

KAFKA = KafkaSettings(bootstrap=("127.0.0.1:1",))
PORT = "/dev/ttyUSB"
TYPES: Mapping[PayloadIdentity, str] = {
    "none": "application/json",
    "json": "application/json",
    "cbor": "application/cbor",
    "binary": "application/octet-stream",
}
# Few of each, some with the hyphen that joins levels in Kafka topics: what differs must often look alike.
VALUES = {
    "{device}": ("7", "42", "a-7"),
    "{site}": ("paris", "rome", "a-paris", "device"),
    "{stream}": ("temp", "a-temp", "7"),
    "+": ("temp", "rome"),
    "#": ("temp", "rome/temp"),
}
NO_ROUTE = "a/{device}/nobody/routes/this"
LEVELS = ("{site}", "{stream}", "device", "a", "+")
KAFKA_TOPICS = ("device-{stream}", "{stream}", "{site}-{stream}", "device-{site}", "{device}-{stream}", "readings")


@dataclass(frozen=True, slots=True)
class Site:
    """A gateway's settings, and what its sensors send."""

    routes: list[RouteSettings]
    fallback: str | None
    namespace: str
    key: str
    messages: list["Message"]


class Message(NamedTuple):
    """One message of a sensor."""

    topic: str
    port: int | None
    """Port of a serial sensor, which may change."""
    has_frames: bool
    """The sensor speaks our frames: its number is not in the payload."""
    boot: int
    number: int
    value: int


class Name(NamedTuple):
    """Facts that two messages share if they are the same reading, without the payload."""

    device: str
    counter: str
    boot: str
    number: int


class Taken(NamedTuple):
    """A reading as an analyst knows it."""

    device: str
    stream: str
    name: Name | None
    """None where nothing tells who took it: each is a reading of its own."""
    payload: bytes


@st.composite
def templates(draw: st.DrawFn, identities: Sequence[PayloadIdentity]) -> RouteSettings:
    """Any route that can work, the default often."""
    if draw(st.booleans()):
        levels = ["device", "{device}", "{stream}"]
    else:
        levels = draw(st.lists(st.sampled_from(LEVELS), max_size=2, unique=True))
        levels.insert(draw(st.integers(0, len(levels))), "{device}")
        levels += draw(st.sampled_from([[], ["#"]]))
    topics = [each for each in KAFKA_TOPICS if set(re.findall("{[a-z]+}", each)) <= set(levels)]
    identity = draw(st.sampled_from(identities))
    return RouteSettings("/".join(levels), draw(st.sampled_from(topics)), TYPES[identity], identity)


@st.composite
def sites(draw: st.DrawFn, identities: Sequence[PayloadIdentity], fallbacks: Sequence[str | None]) -> Site:
    routes = draw(st.lists(templates(identities), min_size=1, max_size=3))
    messages = []
    for _ in range(draw(st.integers(2, 12))):
        levels = draw(st.sampled_from([*(route.topic for route in routes), NO_ROUTE])).split("/")
        topic = "/".join(draw(st.sampled_from(VALUES[level])) if level in VALUES else level for level in levels)
        port = draw(st.sampled_from([None, None, None, 0, 1]))
        has_frames = port is not None and draw(st.booleans())
        messages.append(Message(topic, port, has_frames, *(draw(st.integers(0, 1)) for _ in range(3))))
    fallback, namespace = draw(st.sampled_from(fallbacks)), draw(st.sampled_from(["plant", "a"]))
    return Site(routes, fallback, namespace, draw(st.sampled_from(["name", "namespace/name"])), messages)


def payload_of(message: Message, boot: tuple[int, int], identity: PayloadIdentity) -> bytes:
    if message.has_frames:
        return json.dumps({"v": message.value}).encode()
    if identity == "binary":
        return BINARY.pack(BINARY_VERSION, *boot, message.number, 5) + b"%d" % message.value
    members = {"v": message.value, "boot": name_of_boot(*boot), "seq": message.number}
    return cbor2.dumps(members) if identity == "cbor" else json.dumps(members).encode()


def counter_name(topic: str | None, device: str, stream: str) -> str:
    """Counter of a sensor's numbers by docs/payloads.md: an MQTT topic, or for serial lines the Kafka topic."""
    if topic is not None:
        return topic
    return f"device/{device}/{stream.removeprefix('device-')}" if stream.startswith("device-") else f"in {stream}"


@dataclass(slots=True)
class World:
    """One buffer for all examples: opening one takes longer than most of them."""

    runner: asyncio.Runner
    buffer: Buffer
    boots: Iterator[int] = field(default_factory=lambda: count(step=2))
    offsets: Counter[str] = field(default_factory=Counter)


@asynccontextmanager
async def buffer_in_memory() -> AsyncIterator[Buffer]:
    memory = Path("/dev/shm")  # noqa: S108 - a folder of its own in it
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        async with opened(Path(folder) / "buffer.db") as buffer:
            yield buffer


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with asyncio.Runner() as runner:
        opening = buffer_in_memory()
        yield World(runner, runner.run(opening.__aenter__()))
        runner.run(opening.__aexit__(None, None, None))


def sent(world: World, site: Site) -> tuple[list[Taken], list[KafkaRecord]]:
    """Send all of a site's messages; return what was acknowledged, and the records that Kafka then holds."""
    return world.runner.run(_sent(world, site))


async def _sent(world: World, site: Site) -> tuple[list[Taken], list[KafkaRecord]]:
    gateway = msgspec.convert({"id": "gw-1", "namespace": site.namespace, "key": site.key}, GatewaySettings)
    reserved = frozenset((KAFKA.events_topic, KAFKA.quarantine_topic))
    routes = compile_routes(site.routes, site.fallback, reserved, "device/{device}/{stream}")
    door = FrontDoor(world.buffer, routes, gateway, KAFKA, lambda: 5)
    # Each example has boots of its own: nothing of the examples before is known of its sensors.
    first_boot = next(world.boots)
    acknowledged = []
    for message in site.messages:
        boot = first_boot + message.boot, 0x1A2B3C4D
        to = routes.resolve(message.topic, None, is_serial=message.port is not None)
        identity = to.identity if isinstance(to, Destination) else "none"
        datum = Datum(received_us=1, payload=payload_of(message, boot, identity))
        if message.has_frames:
            datum.device_boot, datum.device_sequence = name_of_boot(*boot), message.number
        subject = message.topic if message.port is None else f"{PORT}{message.port}"
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        door.take([Reading(message.topic, subject, datum)], outcome.set_result)
        assert await outcome
        if isinstance(to, Destination):
            is_named = message.has_frames or identity != "none"
            counter = counter_name(None if message.port is not None else message.topic, to.device, to.kafka_topic)
            name = Name(to.device, counter, name_of_boot(*boot), message.number) if is_named else None
            acknowledged.append(Taken(to.device, to.kafka_topic, name, datum.payload))
    stored = await rows(world.buffer)
    records = [await _record(world, gateway, row) for row in stored]
    await confirm(world.buffer, stored)
    return acknowledged, records


async def _record(world: World, gateway: GatewaySettings, row: Row) -> KafkaRecord:
    series = await series_of(world.buffer, row.series)
    lane = await lane_of(world.buffer, row.lane)
    batch = EncodedBatch("none")
    batch.add(RecordEncoder(gateway, lane, series).encode(row, BootTimes(CLOCK), 0))
    (record,) = DefaultRecordBatch(bytes(batch._build()))
    offset = world.offsets[series.topic]
    world.offsets[series.topic] += 1
    taken_in = NOON + timedelta(hours=1, microseconds=row.sequence)
    headers = [(name, None if value is None else bytes(value)) for name, value in record.headers]
    return KafkaRecord(series.topic, 0, offset, taken_in, record.key, record.value, headers)


def expected(acknowledged: Sequence[Taken]) -> tuple[Counter[Taken], set[Taken]]:
    """Messages that must count, and messages with another payload under a name that an earlier message had."""
    right: dict[Name, Taken] = {}
    counting: Counter[Taken] = Counter()
    conflicts: set[Taken] = set()
    for taken in acknowledged:
        if taken.name is None or right.setdefault(taken.name, taken) is taken:
            counting[taken] += 1
        elif taken != right[taken.name]:
            conflicts.add(taken)
    return counting, conflicts


def taken_of(event: Event) -> Taken:
    """The message of a record, by its headers."""
    record = event.record
    headers = {name: (value or b"").decode() for name, value in record.headers or ()}
    topic = None if headers["ce_subject"].startswith(PORT) else headers["ce_subject"]
    name = None
    if "ce_deviceboot" in headers:
        counter = counter_name(topic, event.device, record.topic)
        name = Name(event.device, counter, headers["ce_deviceboot"], int(headers["ce_devicesequence"]))
    return Taken(event.device, record.topic, name, record.value or b"")


def readings_among(records: Sequence[KafkaRecord]) -> list[Event]:
    events = [spark_oracle.read_headers(record) for record in records]
    return [event for event in events if event.type == "sluice.reading"]


@pytest.mark.campaign(seconds=20)
@settings(max_examples=size(60, 2_000))
@given(site=sites(list(TYPES), [None, "others"]))
def test_acknowledged_readings_count_once_by_the_rules_of_the_tables(world: World, site: Site) -> None:
    acknowledged, records = sent(world, site)
    kept, conflicts = told_apart([(event, {}, None) for event in readings_among(records)])
    assert (Counter(taken_of(event) for event, *_ in kept), {taken_of(event) for event, *_ in conflicts}) == expected(
        acknowledged
    )


@pytest.mark.spark
@pytest.mark.campaign(seconds=40)
@pytest.mark.usefixtures("interpreted")
def test_what_is_acknowledged_is_in_the_tables(spark: SparkSession, new_warehouse: str, world: World) -> None:
    examples: list[tuple[Site, list[Taken], list[KafkaRecord]]] = []

    @settings(max_examples=size(40, 300), phases=[Phase.generate])
    # What else there is has to be declared: it would be in the quarantine.
    @given(site=sites(["json", "json", "none"], [None]))
    def draw(site: Site) -> None:
        examples.append((site, *sent(world, site)))

    draw()
    warehouse = Warehouse(spark, Path(new_warehouse))
    # In some batches, none of which ends with an example.
    records = [record for _, _, of_site in examples for record in of_site]
    ends = [*size([len(records) // 2 + 1], [len(records) // 3 + 1, 2 * len(records) // 3]), len(records)]
    for number, (begin, end) in enumerate(pairwise([0, *ends])):
        warehouse.take(number, records[begin:end])
    tables = warehouse.tables()
    in_readings = {reading[6] for reading in tables.readings}
    rejected = tables.rejected
    for site, acknowledged, of_site in examples:
        readings = readings_among(of_site)
        counting = Counter(taken_of(event) for event in readings if event.ce_id in in_readings)
        conflicts = {taken_of(event) for event in readings if event.record.place in rejected}
        assert (counting, conflicts) == expected(acknowledged), site
