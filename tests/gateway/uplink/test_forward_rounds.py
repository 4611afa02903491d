"""Rounds against a broker made of lists, which refuses, falls silent and loses leaders as it is told.

What it is sent is decoded as Kafka does it: ids, keys and order are those of the records.
"""

import asyncio
import json
import math
import random
import sqlite3
import tempfile
import time
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    TopicAuthorizationFailedError,
    UnknownError,
    for_code,
)
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.buffer import commit_loop
from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import Entry, Row, Series, StructuredEvents
from gateway.clock.gateway_clock import BootClock, BootTimes, Look
from gateway.clock.kernel_clock import boottime_us
from gateway.config.config_file import route_table
from gateway.host import long_work
from gateway.intake.front_door import FrontDoor
from gateway.intake.quarantine_retry import retry_quarantined
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.record import RecordEncoder
from gateway.kafka.topics import TopicVerdict
from gateway.reading import BufferFileError
from gateway.record_contract import EVENT_CONTENT_TYPE, TIME_ERROR_UNKNOWN_US
from gateway.settings import GatewaySettings, KafkaSettings, Settings
from gateway.uplink import delivery, direct, leaders, refused
from gateway.uplink.batches import STEP_ROWS
from gateway.uplink.echoes import LEFT_OUT
from gateway.uplink.memory import UPLINK_MARKS, Memory
from gateway.uplink.redrive import Redrive
from gateway.uplink.refused import REFUSED_EVENTS, REFUSED_READINGS, REFUSED_REPORTS
from gateway.uplink.rounds import NewSession, Rounds
from gateway.uplink.spared import DAY_US
from gateway.uplink.state import ONE_REPLICA, SLOW
from tests.support.buffers import (
    BOOT,
    CLOCK,
    append,
    changed,
    confirm,
    entry_of,
    input_of,
    opened,
    quarantined_of,
    rows,
    store,
)
from tests.support.dead_disk import dead_disk
from tests.support.waiting import patience, until

if TYPE_CHECKING:
    from gateway.kafka.session import KafkaSession

GATEWAY = GatewaySettings("gw1")
PARTITIONS = 3
POISON = b"poison"


@pytest.fixture(autouse=True, scope="module")
def _quick_looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaders, "LEADERS_S", 0.05)
        patch.setattr(leaders, "GONE_S", 0.1)
        patch.setattr("gateway.uplink.rounds.IDLE_S", 0.05)
        patch.setattr(delivery, "STRAGGLERS_S_MIN", 0.2)
        yield


def kafka_settings(**changes: object) -> KafkaSettings:
    """Waits of a fraction of a second, for a broker that answers at once or never."""
    quick = KafkaSettings(("127.0.0.1:1",), request_timeout_s=0.6, linger_ms=0, compression="none")
    return msgspec.structs.replace(quick, **changes)


@dataclass(frozen=True)
class Record:
    topic: str
    key: str
    value: bytes
    id: str
    lane: str
    sequence: int
    headers: dict[str, str] = field(compare=False)


@dataclass
class FakeBroker:
    """Stands in for a session: what was acknowledged, by topic and partition."""

    records: dict[tuple[str, int], list[Record]] = field(default_factory=lambda: defaultdict(list))
    arrivals: list[list[Record]] = field(default_factory=list)
    """Batches in the order in which they came."""
    silent: set[int] = field(default_factory=set)
    """Partitions that take what they are sent and never answer, until they are taken out."""
    leaderless: set[int] = field(default_factory=set)
    gone: set[tuple[str, int]] = field(default_factory=set)
    """Partitions that their topics do not have any more."""
    mute: set[str] = field(default_factory=set)
    """Topics whose partitions never answer."""
    forbidden: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    """Topics whose partitions this session knows."""
    refused: set[tuple[str, bytes]] = field(default_factory=set)
    """Topics with values that they refuse."""
    refuses: bool = True
    """Whether poison is refused."""
    refusal: type[KafkaError] = MessageSizeTooLargeError
    is_down: bool = False
    loses_answers: bool = False
    """What is sent is stored, and its sender never told."""
    ill: set[int] = field(default_factory=set)
    """Partitions that answer with an error that is nobody's fault."""
    answer_s: float = 0.0
    slow: set[str] = field(default_factory=set)
    """Topics that `answer_s` is for; if empty, all."""
    bytes_per_s: float = math.inf
    admin: Any = None
    link: Any = field(
        default_factory=lambda: SimpleNamespace(
            wire_bytes=lambda: 0, carried_bytes=lambda: 0, throttled_s=0.0, throttled_at_s=float("-inf")
        )
    )

    async def write_to(self, topics: Iterable[str]) -> None:
        self.written |= set(topics)
        await asyncio.sleep(0)

    async def partition(self, _: str, key: bytes) -> int:
        return sum(key) % PARTITIONS

    def has_leader(self, topic: str, partition: int) -> bool:
        return partition not in self.leaderless and self.is_there(topic, partition)

    def is_there(self, topic: str, partition: int) -> bool:
        return (topic, partition) not in self.gone

    async def look_for_leaders(self) -> None:
        await asyncio.sleep(0)

    def partitions(self, topic: str) -> range:
        return range(PARTITIONS if topic in self.written else 0)

    async def send(self, topic: str, partition: int, batch: EncodedBatch) -> int:
        answer_s = self.answer_s if not self.slow or topic in self.slow else 0.0
        await asyncio.sleep(answer_s + len(batch._build()) / self.bytes_per_s)
        if self.is_down:
            raise KafkaError("down")
        if partition in self.ill:
            raise UnknownError("UNKNOWN_SERVER_ERROR")
        while partition in self.silent or topic in self.mute:
            await asyncio.sleep(0.01)
        found = list(decoded(topic, batch))
        if topic in self.forbidden:
            raise TopicAuthorizationFailedError(topic)
        if self.refuses and any(POISON in record.value or (topic, record.value) in self.refused for record in found):
            raise self.refusal("poison")
        offset = len(self.records[topic, partition])
        self.records[topic, partition] += found
        self.arrivals.append(found)
        if self.loses_answers:
            raise KafkaError("the answer was lost")
        return offset

    def of(self, topic: str) -> list[Record]:
        return [record for (of, _), records in self.records.items() if of == topic for record in records]


def decoded(topic: str, batch: EncodedBatch) -> Sequence[Record]:
    found = []
    for record in DefaultRecordBatch(batch._build()):
        headers = {name: value.decode() for name, value in record.headers}
        key, value = record.key.decode(), record.value
        if headers["content-type"] == EVENT_CONTENT_TYPE:
            event = json.loads(value)
            value = b64decode(event.pop("data_base64"))
            headers = {f"ce_{name}": text for name, text in event.items()}
        sequence = int(headers["ce_lanesequence"])
        found.append(Record(topic, key, value, headers["ce_id"], headers["ce_lane"], sequence, headers))
    return found


class FakeVerdicts:
    """Every topic may be written to, until it is condemned."""

    def __init__(self) -> None:
        self.condemned: dict[str, TopicVerdict] = {}
        self.copies = 0

    async def of(self, _: object, topic: str, __: float = 0.0) -> TopicVerdict:
        return self.condemned.get(topic) or TopicVerdict(topic, copies=self.copies)

    @property
    def refused(self) -> dict[str, TopicVerdict]:
        return self.condemned

    def refusal_of(self, topic: str) -> TopicVerdict | None:
        return self.condemned.get(topic)

    def is_made_when_wanted(self, _: TopicVerdict) -> bool:
        return False

    async def of_all(self, _: object, topics: Sequence[str], __: float = 0.0) -> dict[str, TopicVerdict]:
        return {topic: await self.of(None, topic) for topic in topics}

    def acquit(self, topic: str) -> None:
        assert topic not in self.condemned

    def condemn(self, verdict: TopicVerdict) -> None:
        self.condemned[verdict.topic] = verdict


class Uplink:
    """The forwarder's loop without its waits: rounds, and new ones when they end."""

    def __init__(self, buffer: Buffer, kafka: KafkaSettings) -> None:
        self.buffer = buffer
        self.kafka = kafka
        self.broker = FakeBroker()
        settings = Settings(GATEWAY, kafka)
        self.now_us = 1
        self.front_door = FrontDoor(buffer, route_table(settings), GATEWAY, kafka, lambda: self.now_us)
        self.clock = CLOCK
        self.memory = Memory(kafka, lambda: self.clock)
        self.verdicts = FakeVerdicts()
        self.memory.verdicts = self.verdicts  # type: ignore[assignment]
        self.ended: list[NewSession | KafkaError | TimeoutError] = []
        self.holds = False

    async def run(self) -> None:
        while True:
            self.broker.written.clear()
            rounds = Rounds(
                cast("KafkaSession", self.broker),
                self.buffer,
                self.front_door,
                GATEWAY,
                self.kafka,
                self.memory,
                lambda: self.holds,
                lambda: None,
            )
            try:
                self.ended.append(await rounds.run())
            except (KafkaError, TimeoutError) as error:
                self.ended.append(error)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def uplink(buffer: Buffer, **changes: object) -> AsyncIterator[Uplink]:
    made = Uplink(buffer, kafka_settings(**changes))
    task = asyncio.create_task(made.run())
    try:
        yield made
        if task.done():
            task.result()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


BESIDE = StructuredEvents(beside=True)


def reading(
    device: str, payload: bytes, topic: str = "device-thermo", structured: StructuredEvents | None = None
) -> Entry:
    of = f"device/{device}"
    series = Series(topic, device, device, of, "sluice.reading", "text/plain", structured=structured)
    return entry_of(series, payload)


async def drained(buffer: Buffer) -> None:
    async with asyncio.timeout(patience(20)):
        while buffer.state.rows:
            await asyncio.sleep(0.01)


def lane_report(kind: str, *_: object) -> Entry:
    return entry_of(Series("events", "gw1", "", kind, f"sluice.gateway.{kind}", "text/plain"), kind.encode())


async def test_a_backlog_and_live_readings_share_each_round(tmp_path: Path) -> None:
    """Neither starves: what the link takes at a time is halved between them as long as both have enough."""
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [reading("a", b"old %d" % n) for n in range(3000)])
        await buffer.begin_lane("uplink-up", lane_report)
        assert await store(buffer, [reading("b", b"new %d" % n) for n in range(1000)])
        async with uplink(buffer) as line:
            await drained(buffer)
    # Rounds of the first link rate: both are in each until the live ones are through.
    batches = [[record.value for record in batch] for batch in line.broker.arrivals if batch[0].topic != "events"]
    kinds = [batch[0].split()[0] for batch in batches]
    last_new = max(place for place, kind in enumerate(kinds) if kind == b"new")
    assert set(kinds[:2]) == {b"old", b"new"}
    sent = {
        kind: sum(len(batch) for batch in batches[: last_new + 1] if batch[0].startswith(kind))
        for kind in (b"old", b"new")
    }
    assert sent[b"new"] == 1000
    assert 500 <= sent[b"old"] <= 1500
    for device, count, word in (("a", 3000, b"old"), ("b", 1000, b"new")):
        values = [record.value for record in line.broker.of("device-thermo") if record.key == device]
        assert values == [b"%s %d" % (word, n) for n in range(count)]


async def test_it_is_told_why_the_disk_has_a_topics_readings_first(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        state = line.memory.state
        assert await store(buffer, [reading("a", b"1")])
        await until(lambda: state.disk_first == {"device-thermo": ONE_REPLICA})
        line.broker.answer_s = buffer.kafka_first_s + 0.1
        assert await store(buffer, [reading("a", b"2")])
        await until(lambda: state.disk_first == {"device-thermo": SLOW})
    assert state.direct_topics == 0


@pytest.mark.parametrize(
    ("shares", "is_quick"),
    [
        ([0.4], True),
        ([0.6], False),
        ([0.4, 0.9], True),
        ([0.4, 1.1], False),
        ([1.1, 0.9], False),
        ([1.1, 0.9, 0.4], True),
    ],
)
async def test_a_topic_is_trusted_again_only_when_it_is_twice_as_quick(
    tmp_path: Path, shares: list[float], *, is_quick: bool
) -> None:
    """By shares of the time that Kafka has."""
    kafka = kafka_settings()
    async with opened(tmp_path / "buffer.db") as buffer:
        memory = Memory(kafka, lambda: CLOCK)
        memory.verdicts = FakeVerdicts()  # type: ignore[assignment]
        topics = direct.DirectTopics(cast("KafkaSession", FakeBroker()), buffer, buffer.id, kafka, memory)
        for share in shares:
            topics.answered("meters", "meters", share * (buffer.kafka_first_s - kafka.linger_s))
        await topics.settle(())
    assert memory.quick == ({"meters"} if is_quick else set())
    assert memory.state.disk_first == {"meters": ONE_REPLICA if is_quick else SLOW}


async def test_the_disk_has_readings_first_if_the_topic_of_their_events_is_slow(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.verdicts.copies, line.broker.slow = 3, {"structured-device-thermo"}
        assert await store(buffer, [reading("a", b"1", structured=BESIDE)])
        await until(lambda: line.memory.state.direct_topics == 1)
        line.broker.answer_s = buffer.kafka_first_s + 0.1
        assert await store(buffer, [reading("a", b"2", structured=BESIDE)])
        await until(lambda: line.memory.state.disk_first == {"device-thermo": SLOW})
        assert not buffer.direct_topics
        line.broker.answer_s = 0.0
        assert await store(buffer, [reading("a", b"3", structured=BESIDE)])
        await until(lambda: line.memory.state.direct_topics == 1)
        line.broker.mute = {"structured-device-thermo"}
        assert await store(buffer, [reading("a", b"4", structured=BESIDE)])
        await until(lambda: not buffer.direct_topics)
        line.broker.mute.clear()
        await drained(buffer)


async def test_oldest_first_sends_strictly_in_order(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(500)])
        await buffer.begin_lane("uplink-up", lane_report)
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(500, 700)])
        async with uplink(buffer, drain="oldest-first") as line:
            await drained(buffer)
    assert [record.value for record in line.broker.of("device-thermo")] == [b"%d" % n for n in range(700)]


async def test_a_backlog_may_have_a_topic_of_its_own(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [reading("a", b"old")])
        await buffer.begin_lane("uplink-up", lane_report)
        assert await store(buffer, [reading("a", b"new")])
        async with uplink(buffer, backlog_topic="{topic}.backlog") as line:
            await drained(buffer)
            assert [record.value for record in line.broker.of("device-thermo.backlog")] == [b"old"]
            # The lane that was live becomes backlog when another begins; the gateway's own words stay where they are.
            line.broker.is_down = True
            assert await store(buffer, [reading("a", b"caught")])
            await buffer.begin_lane("uplink-down", lane_report)
            line.broker.is_down = False
            await drained(buffer)
    assert [record.value for record in line.broker.of("device-thermo.backlog")] == [b"old", b"caught"]
    assert [record.value for record in line.broker.of("device-thermo")] == [b"new"]
    assert len(line.broker.of("events")) == 4


@pytest.mark.parametrize("trouble", ["silent", "leaderless"])
async def test_a_partition_that_takes_nothing_holds_up_nobody_else(tmp_path: Path, trouble: str) -> None:
    """P6, and P8: what waited comes in its order, ahead of what came in behind it."""
    devices = ["a", "b", "c"]  # of partitions 1, 2 and 0
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        getattr(line.broker, trouble).add(1)
        for n in range(20):
            assert await store(buffer, [reading(device, b"%s %d" % (device.encode(), n)) for device in devices])
            await asyncio.sleep(0.02)
        await until(lambda: len(line.broker.records["device-thermo", 0]) == 20)
        await until(lambda: len(line.broker.records["device-thermo", 2]) == 20)
        assert not line.broker.records["device-thermo", 1]
        await until(lambda: buffer.state.rows == 20)
        assert list(line.memory.state.parked) == ["device-thermo/1"]
        getattr(line.broker, trouble).clear()
        await drained(buffer)
        assert not line.memory.state.parked
    assert [record.value for record in line.broker.records["device-thermo", 1]] == [b"a %d" % n for n in range(20)]
    assert len(line.broker.of("device-thermo")) == 60, "none twice: what was under way was waited for"


async def test_nothing_answers_and_the_session_is_given_up(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.broker.silent |= {0, 1, 2}
        assert await store(buffer, [reading("a", b"1")])
        await until(lambda: bool(line.ended))
        assert isinstance(line.ended[0], TimeoutError)
        assert line.memory.rate.request_bytes_max < 64_000
        line.broker.silent.clear()
        await drained(buffer)


async def test_a_silent_partition_whose_rows_stand_first_starves_nobody(tmp_path: Path) -> None:
    """Its rows fill round after round, and session after session begins with them."""
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(2000)])
        assert await store(buffer, [reading("b", b"%d" % n) for n in range(20)])
        async with uplink(buffer) as line:
            line.broker.silent.add(1)
            await until(lambda: len(line.broker.records["device-thermo", 2]) == 20)
            line.broker.silent.clear()
            await drained(buffer)
    assert [int(record.value) for record in line.broker.records["device-thermo", 1]] == list(range(2000))


async def test_what_was_acknowledged_is_settled_however_a_session_ends(tmp_path: Path) -> None:
    """Batches of one partition go one after the other: of a round that is given up, the first may be in Kafka."""
    async with opened(tmp_path / "buffer.db", bytes_max=100_000_000) as buffer:
        assert await store(buffer, [reading("a", b"%d " % n + bytes(300_000)) for n in range(12)])
        async with uplink(buffer) as line:
            line.broker.answer_s = 0.15
            line.memory.rate._bytes = 4e6
            await drained(buffer)
    assert len(line.broker.of("device-thermo")) <= 18, "not all of it again and again"


async def test_a_round_shrinks_until_the_link_takes_it(tmp_path: Path) -> None:
    """Data that compress worse than thought, on a link that takes 60 kB within a time-out."""
    async with opened(tmp_path / "buffer.db", bytes_max=100_000_000) as buffer:
        assert await store(buffer, [reading("a", b"%d " % n + bytes(1_000)) for n in range(400)])
        async with uplink(buffer) as line:
            line.broker.bytes_per_s = 100_000
            line.memory.rate._bytes, line.memory._ratio = 4e6, 10.0
            await drained(buffer)
    assert len(line.broker.of("device-thermo")) == 400


async def test_trouble_of_a_broker_sends_nothing_to_the_quarantine(tmp_path: Path) -> None:
    """UNKNOWN_SERVER_ERROR says nothing of a record."""
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.broker.ill.add(1)
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(100)])
        assert await store(buffer, [reading("b", b"%d" % n) for n in range(100)])
        await until(lambda: len(line.broker.records["device-thermo", 2]) == 100)
        assert "UNKNOWN" in line.memory.state.parked["device-thermo/1"]
        line.broker.ill.clear()
        line.memory._troubles.clear()
        await drained(buffer)
        assert not await quarantined_of(buffer, range(1, 300))
    assert [int(record.value) for record in line.broker.records["device-thermo", 1]] == list(range(100))


async def test_a_topic_that_is_forbidden_again_costs_one_reading_each_time(tmp_path: Path) -> None:
    """What waits for a topic in the quarantine is not written to the card anew whenever it is looked at."""
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        redrive = Redrive(buffer, line.front_door, line.memory)
        assert await store(buffer, [reading("a", b"ok", "device-secret")])
        await drained(buffer)
        line.broker.forbidden.add("device-secret")
        assert await store(buffer, [reading("a", b"%d" % n, "device-secret") for n in range(40)])
        await drained(buffer)
        for _ in range(3):
            line.verdicts.condemned.clear()
            reports = len(line.broker.of("gateway-quarantine"))
            await redrive.take_in_again(line.broker.admin)
            await drained(buffer)
            assert len(line.broker.of("gateway-quarantine")) == reports + 1
        line.broker.forbidden.clear()
        for _ in range(2):  # one to see that it may, and the others
            line.verdicts.condemned.clear()
            await redrive.take_in_again(line.broker.admin)
            await drained(buffer)
        assert not await quarantined_of(buffer, range(1, 300))
    values = [record.value for record in line.broker.of("device-secret")]
    assert sorted(values) == sorted([b"ok", *(b"%d" % n for n in range(40))])


async def test_user_properties_go_into_the_quarantine_and_out_again(tmp_path: Path) -> None:
    def with_unit(payload: bytes) -> Entry:
        return changed(reading("a", payload, "device-secret", structured=BESIDE), properties='[["unit","C"]]')

    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        redrive = Redrive(buffer, line.front_door, line.memory)
        assert await store(buffer, [with_unit(b"before")])
        await drained(buffer)
        line.broker.forbidden.add("device-secret")
        assert await store(buffer, [with_unit(b"refused")])
        await drained(buffer)
        assert [input_.datum.properties for input_ in (await quarantined_of(buffer, range(9))).values()]
        line.broker.forbidden.clear()
        line.verdicts.condemned.clear()
        await redrive.take_in_again(line.broker.admin)
        await drained(buffer)
    records = line.broker.of("device-secret")
    assert [(record.value, record.headers["mqtt_unit"]) for record in records] == [(b"before", "C"), (b"refused", "C")]
    events = line.broker.of("structured-device-secret")
    assert {record.value for record in events} == {b"before", b"refused"}
    assert {record.headers["ce_mqttproperties"] for record in events} == {'[["unit","C"]]'}


@pytest.mark.parametrize("refusal", [MessageSizeTooLargeError, for_code(87)])
async def test_refused_records_are_found_by_halving_and_nobody_else_waits(
    tmp_path: Path, refusal: type[KafkaError]
) -> None:
    """Error 87, INVALID_RECORD, is one that aiokafka does not know by itself."""
    async with opened(tmp_path / "buffer.db") as buffer:
        for n in range(0, 200, 20):
            poisoned = [reading("a", b"%d %s" % (m, POISON if m in {77, 78} else b"")) for m in range(n, n + 20)]
            assert await store(buffer, poisoned + [reading("b", b"%d" % m) for m in range(n, n + 20)])
        async with uplink(buffer) as line:
            line.broker.refusal = refusal
            await until(lambda: len(line.broker.records["device-thermo", 2]) == 200)
            await drained(buffer)
        refused = await quarantined_of(buffer, range(10))
    values = [int(record.value.split()[0]) for record in line.broker.records["device-thermo", 1]]
    assert values == [n for n in range(200) if n not in {77, 78}]
    assert {input_.reason for input_ in refused.values()} == {f"broker-refused: {refusal.__name__}"}
    assert len(refused) == 2
    assert all(isinstance(end, NewSession) and end.is_refusal for end in line.ended)


async def test_a_topic_that_is_forbidden_goes_aside_whole(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.broker.forbidden.add("device-secret")
        assert await store(buffer, [reading("a", b"%d" % n, "device-secret") for n in range(50)])
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(50)])
        await drained(buffer)
        assert len(line.ended) == 1, "one refusal is enough"
        refused = await quarantined_of(buffer, range(1, 60))
    assert len(line.broker.of("device-thermo")) == 50
    assert len(refused) == 50


async def test_a_topic_of_events_that_is_forbidden_costs_no_reading(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer, latest_topic="latest-{topic}") as line:
        line.broker.forbidden = {"structured-device-thermo"}
        for number in range(3):
            payload = b"%d" % number
            assert await store(buffer, [reading(device, payload, structured=BESIDE) for device in "abc"])
            await drained(buffer)
        assert {(record.key, record.value) for record in line.broker.of("device-thermo")} == {
            (device, b"%d" % number) for device in "abc" for number in range(3)
        }
        assert {record.key: record.value for record in line.broker.of("latest-device-thermo")} == dict.fromkeys(
            "abc", b"2"
        )
        assert line.front_door.counts[LEFT_OUT] == 9
        assert {topic for topic, _ in line.memory.offsets} == {"device-thermo"}
        assert not await quarantined_of(buffer, range(1, 500))
    assert not line.broker.of("structured-device-thermo")


async def test_no_topic_gets_a_reading_again_because_another_one_is_in_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.uplink.memory.TROUBLE_S_MIN", 0.05)
    monkeypatch.setattr("gateway.uplink.memory.TROUBLE_S_MAX", 0.05)
    own, beside, latest = "device-thermo", "structured-device-thermo", "latest-device-thermo"
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer, latest_topic="latest-{topic}") as line:
        for mute, other in ((beside, own), (own, beside)):
            line.broker.mute = {mute}
            before, sessions = len(line.broker.of(other)), len(line.ended)
            assert await store(
                buffer, [reading(device, b"%d" % n, structured=BESIDE) for n in range(20) for device in "abc"]
            )
            await until(lambda before=sessions: len(line.ended) >= before + 3)  # type: ignore[misc]
            assert len(line.broker.of(other)) == before + 60
            assert buffer.state.rows == 60
            line.broker.mute.clear()
            await drained(buffer)
            assert len(line.broker.of(other)) == before + 60
    for topic in (own, beside):
        assert len({record.id for record in line.broker.of(topic)}) == 120
    assert {record.key: record.value for record in line.broker.of(latest)} == dict.fromkeys("abc", b"19")
    assert LEFT_OUT not in line.front_door.counts


async def test_an_event_that_is_refused_alone_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.broker.refused = {("structured-device-thermo", b"7")}
        assert await store(buffer, [reading("a", b"%d" % n, structured=BESIDE) for n in range(20)])
        await drained(buffer)
    values = [b"%d" % n for n in range(20)]
    assert [record.value for record in line.broker.of("device-thermo")] == values
    assert [record.value for record in line.broker.of("structured-device-thermo")] == [
        value for value in values if value != b"7"
    ]
    assert line.front_door.counts[LEFT_OUT] == 1
    assert not line.verdicts.condemned


@pytest.mark.parametrize(
    ("refusal", "dead"),
    [(MessageSizeTooLargeError, ("", "-wal")), (TopicAuthorizationFailedError, ("", "-wal")), (for_code(87), ("",))],
)
async def test_what_kafka_refuses_costs_nobody_else_while_the_disk_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: type[KafkaError], dead: tuple[str, ...]
) -> None:
    """Without its WAL among the dead, the disk takes commits, but no pages that it has to read before."""
    monkeypatch.setattr(commit_loop, "REFUSED_AFTER_S", 2.0)
    path = tmp_path / "buffer.db"

    def of_a(n: int, payload: bytes) -> Entry:
        return changed(reading("a", payload, "device-bad"), device_boot="1", device_sequence=n)

    async with opened(path, disk_after_ms=2_000) as buffer, uplink(buffer) as line:
        line.verdicts.copies = 2
        assert await store(buffer, [of_a(0, b"0"), reading("a", b"known"), reading("b", b"known")])
        await until(lambda: len(buffer.direct_topics) == 2)
        await buffer.run(lambda file: file.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
        await buffer.run(lambda file: file.connection.execute("PRAGMA shrink_memory").fetchone())
        await buffer.transact(lambda file: file.probe())
        with dead_disk(path, *dead):
            refused, since_s = append(buffer, [of_a(1, POISON)]), time.monotonic()
            line.broker.refusal = refusal
            others: list[asyncio.Future[bool]] = []
            while not refused.done():
                others.append(append(buffer, [reading("b", b"%d" % len(others))]))
                assert await asyncio.wait_for(others[-1], 3.0)
            assert not refused.result(), "neither Kafka nor the disk has it"
            assert time.monotonic() - since_s > 2.0
            assert len(line.ended) <= 3, "each session that ends holds up the others"
            # Its sender goes on with others.
            behind = append(buffer, [reading("a", b"behind")])
            assert await asyncio.wait_for(behind, 3.0)
        await until(lambda: buffer.state.failing is None)
        assert buffer.lane_has_hole
        assert await store(buffer, [of_a(1, POISON)]), "it came again, and is no duplicate"
        await until(lambda: not buffer.state.rows)
        kept = (await quarantined_of(buffer, range(1, 50))).values()
    assert [input_.datum.payload for input_ in kept] == [POISON]
    arrived = Counter(record.value for record in line.broker.of("device-thermo"))
    assert arrived == Counter([b"known", b"known", b"behind", *(b"%d" % n for n in range(len(others)))])


@asynccontextmanager
async def read_only(buffer: Buffer) -> AsyncIterator[None]:
    """Let the disk of a buffer give what it has, and take nothing, as a card does at its end."""
    await buffer.run(lambda file: file.connection.execute("PRAGMA query_only = ON"))
    with suppress(BufferFileError):
        await buffer.transact(lambda file: file.probe())
    assert buffer.state.failing is not None
    try:
        yield
    finally:
        await buffer.run(lambda file: file.connection.execute("PRAGMA query_only = OFF"))


async def test_what_the_disk_was_spared_today_outlives_a_restart(tmp_path: Path) -> None:
    noon = BootClock.constant(20_000 * DAY_US + DAY_US // 2 - boottime_us(), 1_000)
    for before in (0, 20):
        async with opened(tmp_path / "buffer.db", disk_after_ms=10_000) as buffer, uplink(buffer) as line:
            line.clock = noon
            line.memory.recall(await buffer.run(lambda file: file.marks(UPLINK_MARKS)))
            line.verdicts.copies = 2
            line.memory.count_spared(0)
            assert line.memory.state.spared_today == before
            assert await store(buffer, [reading("a", b"known")])
            await until(lambda: bool(buffer.direct_topics))
            for number in range(20):
                assert await store(buffer, [reading("a", b"%d" % number)])
            assert line.memory.state.spared_today == before + buffer.counts["spared"] == before + 20
            assert not line.memory.state.spared_about


async def test_with_the_disk_first_a_failing_disk_gives_nothing_to_kafka_alone(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", disk_first=True) as buffer, uplink(buffer) as line:
        line.verdicts.copies = 2
        assert await store(buffer, [reading("a", b"1")])
        await drained(buffer)
        # Only this commit fails: the next one tells the disk that Kafka may be ahead, if it is asked to.
        buffer.state.failing = "disk I/O error"
        await asyncio.sleep(direct.LOOK_S + 0.5)
        assert not buffer.direct_topics


async def test_a_read_only_disk_is_not_read_again_and_again_for_what_kafka_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused, "AGAIN_S", 0.05)
    path = tmp_path / "buffer.db"
    async with opened(path) as buffer:
        assert await store(buffer, [reading("a", POISON if n == 3 else b"%d" % n) for n in range(200)])
    looks: list[str] = []

    def note(statement: str) -> None:
        if "json_group_array" in statement and "> (0, -1)" in statement:
            looks.append(statement)

    async with opened(path) as buffer, read_only(buffer), uplink(buffer) as line:
        await until(lambda: len(line.broker.of("device-thermo")) == 199)
        await buffer.run(lambda file: file.connection.set_trace_callback(note))
        await asyncio.sleep(2)
        assert buffer.state.failing is not None
        # Each look reads all that Kafka has, and that this disk does not let go.
        assert len(looks) <= 2 * 6, "two kinds of rows, at 0.05 s and each time after twice as long"
    async with opened(path) as buffer, uplink(buffer) as line:
        await drained(buffer)
        assert [each.datum.payload for each in (await quarantined_of(buffer, range(9))).values()] == [POISON]


async def test_however_many_records_kafka_refuses_on_a_read_only_disk_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused, "AGAIN_S", 0.05)
    monkeypatch.setattr(refused, "KNOWN_MAX", 3)
    path = tmp_path / "buffer.db"
    async with opened(path) as buffer:
        payloads = [POISON if n % 20 == 10 else b"%d" % n for n in range(100)]
        assert await store(buffer, [reading("a", payload, "device-bad") for payload in payloads])
        assert await store(buffer, [reading("a", b"good")])
    async with opened(path) as buffer, read_only(buffer), uplink(buffer) as line:
        await until(lambda: "device-bad" in line.verdicts.condemned)
        ended = len(line.ended)
        await asyncio.sleep(1)
        assert len(line.ended) == ended, "each session that ends holds up the others"
        assert [record.value for record in line.broker.of("device-thermo")] == [b"good"]
        assert len(line.memory.refused) == 3


async def test_what_is_given_up_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_loop, "REFUSED_AFTER_S", 0.5)
    monkeypatch.setattr(refused, "AGAIN_S", 0.05)
    async with opened(tmp_path / "buffer.db", disk_after_ms=2_000) as buffer, uplink(buffer) as line:
        line.verdicts.copies = 2
        assert await store(buffer, [reading("a", b"0")])
        await until(lambda: bool(buffer.direct_topics))
        async with read_only(buffer):
            assert not await asyncio.wait_for(append(buffer, [reading("a", POISON)]), patience(10))
            await until(lambda: not line.memory.refused)


async def test_it_is_told_that_what_kafka_refuses_cannot_be_moved(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [reading("a", b"0")])
        former = buffer.lane.number
    async with opened(tmp_path / "buffer.db") as buffer:
        # As if a damaged page had made up the row's lane.
        await buffer.transact(lambda file: file.connection.execute("DELETE FROM lane WHERE number = ?", (former,)))
        with capture_logs() as lines:
            async with uplink(buffer) as line:
                line.verdicts.condemned["device-thermo"] = TopicVerdict("device-thermo", "topic-compacted")
                await until(lambda: any("does not hold this" in str(each.get("error")) for each in lines))
            assert buffer.state.failing is None, "nothing else tells it"


@pytest.mark.parametrize("when_full", ["refuse", "drop-oldest"])
async def test_what_goes_aside_is_there_once_and_in_order_however_often_sessions_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_full: str
) -> None:
    monkeypatch.setattr(refused, "MOVED_AT_ONCE", 7)
    monkeypatch.setattr(long_work, "STEP_S", 0.0)
    ends = random.Random(1)  # noqa: S311 - when sessions end
    async with opened(tmp_path / "buffer.db", when_full=when_full) as buffer:
        assert await store(buffer, [reading("ab"[number % 2], b"%d" % number, "secret") for number in range(300)])
        while buffer.state.rows:
            async with uplink(buffer) as line:
                line.verdicts.condemned["secret"] = TopicVerdict("secret", "topic-compacted")
                for _ in range(ends.randrange(1, 400)):
                    await asyncio.sleep(0)
                await asyncio.sleep(ends.random() * 0.03)
        kept = (await quarantined_of(buffer, range(1, 1_000))).values()
        aside = [(each.device, int(each.datum.payload)) for each in kept if each.reason == "topic-compacted"]
        assert sorted(number for _, number in aside) == list(range(300))
        for device in "ab":
            order = [number for whose, number in aside if whose == device]
            assert order == sorted(order)


async def test_others_run_while_a_round_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest that they wait is counted in rows, not in seconds."""
    monkeypatch.setattr(long_work, "STEP_S", 0.0)
    encoded, most = 0, 0
    encode = RecordEncoder.encode

    def encoding(encoder: RecordEncoder, row: Row, times: BootTimes, offset: int) -> bytes:
        nonlocal encoded
        encoded += 1
        return encode(encoder, row, times, offset)

    async def look() -> None:
        nonlocal encoded, most
        while True:
            most, encoded = max(most, encoded), 0
            await asyncio.sleep(0)

    monkeypatch.setattr(RecordEncoder, "encode", encoding)
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [reading("a", b"%d" % number) for number in range(300)])
        looking = asyncio.create_task(look())
        async with uplink(buffer):
            await drained(buffer)
        looking.cancel()
    assert 0 < most <= STEP_ROWS + 1


def refused_by_lines(lines: list[MutableMapping[str, Any]]) -> Counter[str]:
    said: Counter[str] = Counter()
    for told in lines:
        said[told["event"]] += told.get("count", 0)
    return said


async def test_the_log_tells_readings_that_are_quarantined_from_the_gateways_own_words(tmp_path: Path) -> None:
    topics = ("device-secret", "gateway-events", "gateway-quarantine")
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.verdicts.condemned |= {topic: TopicVerdict(topic, "topic-compacted") for topic in topics}
        with capture_logs() as lines:
            line.front_door.event("boot", None)
            assert await store(buffer, [reading("a", b"%d" % n, "device-secret") for n in range(3)])
            await drained(buffer)
            # The last line is written after the buffer is empty.
            await until(lambda: refused_by_lines(lines)[REFUSED_REPORTS] == 4)
        assert len(await quarantined_of(buffer, range(10))) == 4
    said = refused_by_lines(lines)
    assert (said[REFUSED_READINGS], said[REFUSED_EVENTS]) == (3, 1)


async def test_readings_of_this_boot_wait_for_its_clock_and_former_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with opened(path, "boot-0") as buffer:
        assert await store(buffer, [reading("a", b"former")])
    async with opened(path, BOOT) as buffer:
        assert await store(buffer, [reading("a", b"present")])
        async with uplink(buffer) as line:
            line.holds = True
            await until(lambda: buffer.state.rows == 1)
            await asyncio.sleep(0.1)
            assert [record.value for record in line.broker.of("device-thermo")] == [b"former"]
            line.holds = False
            await drained(buffer)


async def test_a_reading_that_came_before_its_sensors_clock_was_known_goes_by_what_is_known_when_it_is_sent(
    tmp_path: Path,
) -> None:
    series = Series("device-thermo", "a", "a", "/dev/ttyUSB0", "sluice.reading", "text/plain", "device/a/thermo")
    ticked = entry_of(series, b"1", 9_000_000, tick_ms=5_000, device_boot="7-1a2b3c4d", device_sequence=0)
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [ticked, changed(ticked, payload=b"2", device_boot="8-1a2b3c4d")])
        async with uplink(buffer) as line:
            line.front_door.clocks.of("a", "7-1a2b3c4d").probed(9_999_000, 10_001_000, 8_000, 0)
            await drained(buffer)
    times = [record.headers for record in line.broker.of("device-thermo")]
    assert [each["ce_timequality"] for each in times] == ["estimated", "bounded"]
    # Three seconds before the probe, in the middle of its millisecond.
    assert abs(int(times[0]["ce_boottime"]) - 7_000_500) <= int(times[0]["ce_timeerror"])
    assert int(times[0]["ce_timeerror"]) < 100_000


async def test_who_waits_for_its_sensors_clock_holds_up_nobody_else_and_keeps_its_order(tmp_path: Path) -> None:
    stream = "device/new/thermo"
    series = Series("device-thermo", "new", "new", stream, "sluice.reading", "application/json", stream)
    first_us, step_us = 100_000_000, 1_000_000

    def arrives(line: Uplink, number: int) -> Entry:
        """A reading as it is stored: with a time once its clock is known."""
        line.now_us = received_us = first_us + number * step_us
        tick_ms = (received_us - 20_000) // 1000
        found = line.front_door.clocks.of("new", "7", "rc", stream).stamp(received_us, tick_ms, number)
        if found is None:
            line.front_door.new_clocks.met(series, "7", received_us)
        event_us, error_us = found or (None, 0)
        return entry_of(
            series,
            b"%d" % number,
            received_us,
            event_us=event_us,
            event_error_us=error_us,
            tick_ms=tick_ms,
            device_boot="7",
            device_sequence=number,
        )

    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer, batch_rows_max=2) as line:
        entries = [arrives(line, number) for number in range(5)]
        assert await store(buffer, [*entries[:3], reading("other", b"other"), *entries[3:]])
        await until(lambda: buffer.state.rows == 5)
        await asyncio.sleep(1.5)
        assert [record.value for record in line.broker.of("device-thermo")] == [b"other"]
        assert line.memory.state.new_clocks == 1
        entries = [arrives(line, number) for number in range(5, 15)]
        assert entries[-1].datum.event_us is not None
        assert await store(buffer, entries)
        await drained(buffer)
        await until(lambda: not line.memory.state.new_clocks)
    found = [record for record in line.broker.of("device-thermo") if record.key == "new"]
    assert [record.value for record in found] == [b"%d" % number for number in range(15)]
    for number, record in enumerate(found):
        assert record.headers["ce_timequality"] == "estimated"
        told_us, error_us = int(record.headers["ce_boottime"]), int(record.headers["ce_timeerror"])
        taken_us = first_us + number * step_us - 20_000
        assert abs(told_us - taken_us) <= error_us < 300_000


async def test_what_a_sensor_sends_without_a_tick_does_not_overtake_what_waits_for_its_clock(tmp_path: Path) -> None:
    """Two of its topics may lead to one of Kafka's: there its readings keep their order."""
    thermo, door = "device/new/thermo", "device/new/door"
    made = Series("device-thermo", "new", "new", thermo, "sluice.reading", "application/json", thermo)
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.front_door.new_clocks.met(made, "7", line.now_us)
        elsewhere = msgspec.structs.replace(made, topic="device-door", subject=door, stream=door)
        beside = msgspec.structs.replace(made, subject=door, stream=door)
        ticked = entry_of(made, b"first", tick_ms=5_000, device_boot="7", device_sequence=0)
        assert await store(buffer, [ticked, entry_of(beside, b"second"), entry_of(elsewhere, b"free")])
        await until(lambda: buffer.state.rows == 2)
        await asyncio.sleep(0.2)
        assert [record.value for record in line.broker.of("device-door")] == [b"free"]
        line.now_us = 3_600_000_000
        await drained(buffer)
    assert [record.value for record in line.broker.of("device-thermo")] == [b"first", b"second"]


async def test_what_waited_for_its_sensors_clock_does_not_make_the_uplink_slow(tmp_path: Path) -> None:
    """A link that is too slow begins a lane; how long a reading waited for it counts from when it could go."""
    second_us = 1_000_000
    stream = "device/new/thermo"
    series = Series("device-thermo", "new", "new", stream, "sluice.reading", "application/json", stream)
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.broker.answer_s = 0.3
        line.now_us = received_us = 100 * second_us
        line.front_door.new_clocks.met(series, "7", received_us)
        assert await store(
            buffer, [entry_of(series, b"first", received_us, tick_ms=5_000, device_boot="7", device_sequence=0)]
        )
        await asyncio.sleep(0.1)
        line.now_us += 61 * second_us
        await until(lambda: line.memory.state.live_oldest_us is not None)
        assert line.memory.state.live_oldest_us == received_us + 60 * second_us
        await drained(buffer)
        fresh_us = line.now_us - second_us
        timed = entry_of(
            series, b"timed", fresh_us, event_us=fresh_us, tick_ms=66_000, device_boot="7", device_sequence=2
        )
        assert await store(
            buffer, [entry_of(series, b"not yet", fresh_us, tick_ms=66_000, device_boot="7", device_sequence=1), timed]
        )
        await until(lambda: line.memory.state.live_oldest_us is not None)
        assert line.memory.state.live_oldest_us == fresh_us


async def test_a_tick_of_a_boot_that_nothing_is_known_of_is_not_judged_by_this_ones_clocks(tmp_path: Path) -> None:
    """The wall clock said 2026 then and says 2000 now: what is between both boots is anybody's guess."""
    path = tmp_path / "buffer.db"
    series = Series("device-thermo", "a", "a", "/dev/ttyUSB0", "sluice.reading", "text/plain", "device/a/thermo")
    report = entry_of(series, b"report", 3_000_000_000)
    async with opened(path, "boot-0", lambda: BootClock.constant(1_790_000_000_000_000, None)) as buffer:
        assert await store(buffer, [report])
        (row,) = await rows(buffer)
        for number, tick_ms in enumerate((1_000_000, None)):
            input_ = input_of(
                "record-too-large",
                b"%d" % number,
                "a",
                "/dev/ttyUSB0",
                3_000_000_000,
                event_us=2_999_000_000,
                tick_ms=tick_ms,
                device_boot="7-1a2b3c4d",
                device_sequence=number,
                series=row.series,
            )
            assert await store(buffer, [msgspec.structs.replace(report, quarantined=input_)])
        await confirm(buffer, await rows(buffer))
    async with (
        opened(path, BOOT, lambda: BootClock.constant(946_684_800_000_000, None)) as buffer,
        uplink(buffer) as line,
    ):
        # The sensor was not off in between.
        for at_s in (100, 110, 120):
            clock = line.front_door.clocks.of("a", "7-1a2b3c4d")
            clock.probed(at_s * 1_000_000, at_s * 1_000_000 + 3_000, 1_600_000 + at_s * 1_000, 0)
        assert (await retry_quarantined(line.front_door, buffer, [1, 2])).stored == 2
        await drained(buffer)
    times = [record.headers for record in line.broker.of("device-thermo") if len(record.value) == 1]
    assert [each["ce_timequality"] for each in times] == ["bounded", "bounded"]
    assert {each["ce_boottimeerror"] for each in times} == {str(TIME_ERROR_UNKNOWN_US)}


async def test_readings_of_a_boot_that_was_never_synced_wait_too_and_are_bounded_then(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    unknown = BootClock("unknown", 100.0)
    now = unknown
    async with opened(path, "boot-0") as buffer:
        assert await store(buffer, [reading("a", b"former")])
    async with opened(path, "boot-00", lambda: unknown) as buffer:
        assert await store(buffer, [reading("a", b"never synced")])
    async with opened(path, BOOT, lambda: now) as buffer:
        assert await store(buffer, [reading("a", b"present")])
        async with uplink(buffer) as line:
            line.holds = True
            await until(lambda: buffer.state.rows == 2)
            await asyncio.sleep(0.1)
            assert [record.value for record in line.broker.of("device-thermo")] == [b"former"]
            now = unknown.looked(Look(2, 1_700_000_900_000_000, 1_000))
            line.holds = False
            await drained(buffer)
        records = {record.value: record.headers for record in line.broker.of("device-thermo")}
        assert {payload: headers["ce_timequality"] for payload, headers in records.items()} == {
            b"former": "received",
            b"never synced": "bounded",
            b"present": "received",
        }
        assert int(records[b"never synced"]["ce_timeerror"]) < TIME_ERROR_UNKNOWN_US
        assert not buffer.owes_correction


@pytest.mark.parametrize("boot", ["boot-0", BOOT])
async def test_what_goes_without_a_clock_is_known_to_be_corrected_before_it_goes(tmp_path: Path, boot: str) -> None:
    """The mark is on disk when the broker gets the first byte, whatever becomes of the gateway then."""
    path = tmp_path / "buffer.db"
    unknown = BootClock("unknown", 100.0)
    async with opened(path, boot, lambda: unknown) as buffer:
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(10)])
    async with opened(path, BOOT, lambda: unknown) as buffer:
        owed_at_arrival: list[int] = []
        async with uplink(buffer) as line:
            send = line.broker.send

            async def look_and_send(*args: Any) -> int:
                with closing(sqlite3.connect(path)) as other:
                    owed_at_arrival.extend(
                        owed for (owed,) in other.execute("SELECT owed FROM boot WHERE boot_id = ?", (boot,))
                    )
                return await send(*args)

            line.broker.send = look_and_send  # type: ignore[assignment, method-assign]
            await drained(buffer)
        assert owed_at_arrival
        assert set(owed_at_arrival) == {1}
        assert {record.headers["ce_timeerror"] for record in line.broker.of("device-thermo")} == {
            str(TIME_ERROR_UNKNOWN_US)
        }


class Story:
    """Random events, and what must be true at their end."""

    def __init__(self, line: Uplink, buffer: Buffer) -> None:
        self.line = line
        self.structured = None if line.kafka.latest_topic is None else BESIDE
        self.buffer = buffer
        self.count = 0
        self.boots = 0
        """Of sensors whose clock is never known."""
        self.accepted: list[tuple[str, bytes]] = []

    async def step(self, event: str, which: int) -> None:
        broker = self.line.broker
        match event:
            case "append":
                entries = []
                for _ in range(1 + which * 7):
                    device = "abcdef"[self.count % 6]
                    payload = b"%d%s" % (self.count, b" poison" if which == 2 and self.count % 11 == 0 else b"")
                    entries.append(reading(device, payload, structured=self.structured))
                    self.accepted.append((device, payload))
                    self.count += 1
                assert await store(self.buffer, entries)
            case "lane":
                await self.buffer.begin_lane("story", lane_report)
            case "silence":
                broker.silent ^= {which}
            case "election":
                broker.leaderless ^= {which}
            case "down":
                broker.is_down = not broker.is_down
            case "lost":
                broker.loses_answers = not broker.loses_answers
            case "clock":
                self.boots += 1
                self.line.front_door.new_clocks.met(
                    reading("abcdef"[which], b"").series, str(self.boots), self.line.now_us
                )
            case "time":
                self.line.now_us += which * 40_000_000
                await asyncio.sleep(0.1 * which)

    async def end(self) -> None:
        broker = self.line.broker
        broker.silent.clear()
        broker.leaderless.clear()
        broker.is_down = broker.loses_answers = False
        self.line.now_us += 3_600_000_000
        await drained(self.buffer)
        first: dict[str, Record] = {}
        for record in broker.of("device-thermo"):
            known = first.setdefault(record.id, record)
            assert (known.key, known.value) == (record.key, record.value), "an id is one reading's for ever"
        poison = {(device, payload) for device, payload in self.accepted if POISON in payload}
        found = [(record.key, record.value) for record in first.values()]
        assert sorted(found) == sorted(set(self.accepted) - poison), "each once, by its id; none missing"
        quarantined = await quarantined_of(self.buffer, range(1, 500))
        assert {(input_.device, input_.datum.payload) for input_ in quarantined.values()} == poison
        order: dict[tuple[str, str], list[int]] = defaultdict(list)
        for record in first.values():
            order[record.key, record.lane].append(record.sequence)
        assert all(sequences == sorted(sequences) for sequences in order.values()), "in order within a lane"
        if self.structured is not None:
            self.check_echoes(first)

    def check_echoes(self, own: dict[str, Record]) -> None:
        broker = self.line.broker
        first: dict[str, Record] = {}
        for record in broker.of("structured-device-thermo"):
            first.setdefault(record.id, record)
        assert own.keys() <= first.keys(), "each reading has its event"
        assert all(first[id_].value == record.value for id_, record in own.items())
        order: dict[tuple[str, str], list[int]] = defaultdict(list)
        for record in first.values():
            order[record.key, record.lane].append(record.sequence)
        assert all(sequences == sorted(sequences) for sequences in order.values()), "in order within a lane"
        last = {record.key: int(record.value) for record in broker.of("latest-device-thermo")}
        poisoned = {device for device, payload in self.accepted if POISON in payload}
        for device, payload in self.accepted:
            if device not in poisoned:
                assert last[device] >= int(payload), "the last reading is the last"


@pytest.mark.slow
@hypothesis_settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["append", "append", "lane", "silence", "election", "down", "lost", "clock", "time"]),
            st.integers(0, 2),
        ),
        max_size=14,
    ),
    drain=st.sampled_from(["live-first", "oldest-first"]),
    latest_topic=st.sampled_from([None, "latest-{topic}"]),
)
def test_whatever_happens_each_reading_arrives_once_and_in_order(
    events: list[tuple[str, int]], drain: str, latest_topic: str | None
) -> None:
    async def tell(folder: Path) -> None:
        settings = {"drain": drain, "latest_topic": latest_topic}
        async with opened(folder / "buffer.db") as buffer, uplink(buffer, **settings) as line:
            story = Story(line, buffer)
            for event, which in events:
                await story.step(event, which)
            await story.end()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(tell(Path(folder)))
