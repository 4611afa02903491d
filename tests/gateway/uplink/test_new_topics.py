"""Topics that are missing: how many are made and for whom, that nobody waits for them, what is said of the others."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.buffer.buffer import Buffer
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.kafka import session as kafka_session
from gateway.kafka.topics import BEYOND_ALL, BEYOND_DEVICE, UNKNOWN, Cluster, TopicVerdict
from gateway.reading import Mark
from gateway.settings import KafkaSettings
from gateway.uplink import new_topics
from gateway.uplink.memory import UPLINK_MARKS, Memory
from gateway.uplink.topic_allowance import TopicAllowance
from tests.gateway.uplink.test_forward_rounds import FakeBroker, Uplink, drained, kafka_settings, reading, uplink
from tests.support.buffers import CLOCK, opened, quarantined_of, store
from tests.support.waiting import patience, until

if TYPE_CHECKING:
    from gateway.kafka.session import KafkaSession

EXISTING = "device-thermo"


@pytest.fixture(autouse=True)
def _quick_looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.uplink.rounds.IDLE_S", 0.05)
        yield


# -- how many --------------------------------------------------------------------------------------


class Kept(dict[str, bytes]):
    """Marks on a disk."""

    def keep(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            if mark.value is None:
                self.pop(mark.key, None)
            else:
                self[mark.key] = mark.value


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 30), st.sampled_from("ab/")),
        st.tuples(st.just("day"), st.sampled_from([None, 5, 6, 7]), st.just("")),
        st.tuples(st.just("restart"), st.just(0), st.just("")),
        st.tuples(st.just("delete"), st.integers(0, 30), st.just("")),
    ),
    max_size=80,
)


@given(steps=STEPS)
def test_no_device_gets_more_in_a_day_nor_all_together_whatever_happens(steps: list[tuple[str, Any, str]]) -> None:
    per_day, in_all = 3, 7
    kept, allowance = Kept(), TopicAllowance(per_day, in_all)
    made: dict[str, tuple[int, str]] = {}
    day = 0
    for what, value, device in steps:
        if what == "day":
            allowance.look_at(value)
            day = day if value is None else value
        elif what == "restart":
            allowance = TopicAllowance(per_day, in_all)
            allowance.recall(kept)
            # Without a date the last day on which something was made goes on.
            day = max((on for on, _ in made.values()), default=0)
        elif what == "delete":
            allowance.forget([f"t{value}"])
            made.pop(f"t{value}", None)
        else:
            topic, before = f"t{value}", sum(1 for each in made.values() if each == (day, device))
            reason = allowance.charge(topic, device)
            if topic in made:
                assert not reason, "it was made before"
                continue
            if before >= per_day:
                assert reason == BEYOND_DEVICE
            if not reason:
                assert len(made) < in_all
                assert before < per_day
                made[topic] = day, device
        marks = allowance.marks()
        kept.keep(marks)
        allowance.kept(marks)
        assert not allowance.marks()
        assert set(allowance.topics) == set(made)


def test_all_together_have_a_bound_and_a_deleted_topic_makes_room() -> None:
    allowance = TopicAllowance(2, 3)
    assert [allowance.charge(f"t{number}", f"d{number}") for number in range(4)] == ["", "", "", BEYOND_ALL]
    allowance.forget(["t0", "unheard of"])
    assert not allowance.charge("t3", "d3")


# -- beside the rounds -----------------------------------------------------------------------------


@dataclass
class Cloud:
    """A cluster's topics; it makes one when it is let."""

    existing: set[str] = field(default_factory=lambda: {EXISTING, "gateway-events", "gateway-quarantine"})
    may_make: asyncio.Event = field(default_factory=asyncio.Event)
    asked_for: list[str] = field(default_factory=list)
    refusal: str = ""

    async def inspect(self, _: object, topics: Sequence[str], __: KafkaSettings) -> list[TopicVerdict]:
        return [TopicVerdict(topic, "" if topic in self.existing else UNKNOWN) for topic in topics]

    async def create(self, _: object, topics: Sequence[str], __: KafkaSettings) -> list[TopicVerdict]:
        self.asked_for += topics
        await self.may_make.wait()
        if self.refusal:
            return [TopicVerdict(topic, self.refusal) for topic in topics]
        self.existing |= set(topics)
        return [TopicVerdict(topic, made=True) for topic in topics]

    async def cluster(self, _: object, topics: Sequence[str]) -> Cluster:
        return Cluster("c", {}, {topic: (0 if topic in self.existing else 3, ()) for topic in topics})


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    made = Cloud()
    made.may_make.set()
    monkeypatch.setattr(kafka_session, "inspect_topics", made.inspect)
    monkeypatch.setattr(new_topics, "create_topics", made.create)
    monkeypatch.setattr(new_topics, "read_cluster", made.cluster)
    return made


@asynccontextmanager
async def making(buffer: Buffer, **changes: object) -> AsyncIterator[Uplink]:
    """An uplink that makes topics, from what the buffer has kept of former ones."""
    async with uplink(buffer, create_topics=True, **changes) as line:
        topics = line.memory.new_topics
        line.memory.verdicts = topics._verdicts
        line.memory.recall(await buffer.run(lambda file: file.marks(UPLINK_MARKS)))
        task = asyncio.create_task(topics.run(cast("KafkaSession", line.broker), buffer))
        try:
            yield line
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_readings_of_topics_that_exist_do_not_wait_for_one_that_is_made(tmp_path: Path, cloud: Cloud) -> None:
    cloud.may_make.clear()
    async with opened(tmp_path / "buffer.db") as buffer, making(buffer) as line:
        assert await store(buffer, [reading("new", b"first", "device-new")])
        await until(lambda: bool(cloud.asked_for))
        for number in range(20):
            assert await store(buffer, [reading("old", b"%d" % number), reading("new", b"%d" % number, "device-new")])
        await until(lambda: len(line.broker.of(EXISTING)) == 20)
        assert not line.broker.of("device-new")
        assert not line.memory.state.parked, "nothing is wrong with it"
        cloud.may_make.set()
        await drained(buffer)
        assert [record.value for record in line.broker.of("device-new")] == [
            b"first",
            *(b"%d" % number for number in range(20)),
        ]
        assert cloud.asked_for == ["device-new"]
        assert not await quarantined_of(buffer, range(1, 100))


async def test_a_device_beyond_its_bound_has_its_readings_set_aside_and_is_told_of_once(
    tmp_path: Path, cloud: Cloud
) -> None:
    bound = 5
    async with opened(tmp_path / "buffer.db") as buffer:
        with capture_logs() as logs:
            async with making(buffer, topics_per_device_day_max=bound) as line:
                for round_ in range(3):
                    readings = [reading("bad", b"%d" % round_, f"device-junk{number}") for number in range(60)]
                    assert await store(buffer, [*readings, reading("good", b"%d" % round_)])
                    await drained(buffer)
                assert await store(buffer, [reading("good", b"new", "device-junk59")])
                await drained(buffer)
                assert line.memory.new_topics.beyond == {"bad": 3 * (60 - bound)}
            line.memory.lines.finish()
        assert len(cloud.asked_for) == bound + 1, "another device's allowance is its own"
        assert len(line.broker.of(EXISTING)) == 3
        aside = (await quarantined_of(buffer, range(1, 1_000))).values()
        assert {each.reason for each in aside} == {"topic-limit-of-device: kafka.topics_per_device_day_max"}
        assert len(aside) == 3 * (60 - bound)
        told = [each for each in logs if each["log_level"] != "debug"]
        (of_device,) = [each for each in told if each.get("device") == "bad"]
        assert "kafka.topics_per_device_day_max" in of_device["hint"]
        (summed,) = [each for each in told if "counts" in each]
        assert summed["counts"] == {"readings quarantined for topics beyond a bound": 3 * (60 - bound)}
        assert len(told) <= bound + 3


async def test_a_restart_gives_no_new_allowance_and_what_was_made_is_made_again(tmp_path: Path, cloud: Cloud) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        async with making(buffer, topics_per_device_day_max=2) as line:
            assert await store(buffer, [reading("bad", b"x", f"device-junk{number}") for number in range(3)])
            await drained(buffer)
        assert cloud.asked_for == ["device-junk0", "device-junk1"]
    cloud.existing -= {"device-junk0"}
    async with opened(tmp_path / "buffer.db") as buffer, making(buffer, topics_per_device_day_max=2) as line:
        assert await store(buffer, [reading("bad", b"x", f"device-junk{number}") for number in (0, 1, 2, 3)])
        await drained(buffer)
        assert cloud.asked_for == ["device-junk0", "device-junk1", "device-junk0"]
        assert len(line.broker.of("device-junk0")) == len(line.broker.of("device-junk1")) == 1
        assert len(await quarantined_of(buffer, range(1, 100))) == 3


async def test_what_was_deleted_makes_room_for_others(
    tmp_path: Path, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_topics, "RECOUNT_S", 0.0)
    async with opened(tmp_path / "buffer.db") as buffer, making(buffer, topics_created_max=2) as line:
        for number in range(3):
            assert await store(buffer, [reading(f"d{number}", b"x", f"device-{number}")])
            await drained(buffer)
        (aside,) = (await quarantined_of(buffer, range(1, 100))).values()
        assert aside.reason == "topic-limit: kafka.topics_created_max"
        cloud.existing -= {"device-0"}
        # The first finds the bound reached, and has the topics counted.
        await until(lambda: len(line.memory.new_topics.allowance.topics) == 2)
        assert await store(buffer, [reading("d3", b"x", "device-3")])
        await until(lambda: len(line.memory.new_topics.allowance.topics) == 1)
        assert await store(buffer, [reading("d4", b"x", "device-4")])
        await drained(buffer)
        assert len(line.broker.of("device-4")) == 1


async def test_a_backlog_waits_for_its_own_topic_while_that_is_made(tmp_path: Path, cloud: Cloud) -> None:
    cloud.may_make.clear()
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [reading("a", b"%d" % number) for number in range(3)])
        await buffer.begin_lane("uplink-up", lambda *_: reading("a", b"lane"))
        async with making(buffer, backlog_topic="{topic}.backlog") as line:
            await until(lambda: cloud.asked_for == [f"{EXISTING}.backlog"])
            cloud.may_make.set()
            await drained(buffer)
    assert [record.value for record in line.broker.of(f"{EXISTING}.backlog")][:3] == [b"0", b"1", b"2"]


async def test_a_topic_that_may_not_be_made_has_its_readings_set_aside(tmp_path: Path, cloud: Cloud) -> None:
    cloud.refusal = "topic-not-created"
    async with opened(tmp_path / "buffer.db") as buffer, making(buffer) as line:
        assert await store(buffer, [reading("a", b"x", "device-new"), reading("a", b"y")])
        await drained(buffer)
        (aside,) = (await quarantined_of(buffer, range(1, 100))).values()
        assert aside.reason == "topic-not-created"
        assert list(line.memory.verdicts.refused) == ["device-new"]


async def test_a_disk_that_fails_keeps_no_topic_from_being_made(tmp_path: Path, cloud: Cloud) -> None:
    """It is counted all the same, and kept with the next one."""
    async with opened(tmp_path / "buffer.db") as failing:
        pass
    topics = Memory(kafka_settings(create_topics=True), lambda: CLOCK).new_topics
    topics.asked(TopicVerdict("device-new", UNKNOWN), "a")
    task = asyncio.create_task(topics.run(cast("KafkaSession", FakeBroker()), failing))
    await asyncio.wait_for(topics.settled("device-new"), patience(5))
    task.cancel()
    assert cloud.asked_for == ["device-new"]
    assert [mark.key for mark in topics.allowance.marks()] == ["uplink/topic/device-new"]


def test_a_day_is_utcs() -> None:
    today = Memory(KafkaSettings(("127.0.0.1:1",)), lambda: CLOCK)._today()
    assert today == CLOCK.at(boottime_us()) // (86_400 * 10**6)
    unsynced = BootClock.constant(0, None)
    assert Memory(KafkaSettings(("127.0.0.1:1",)), lambda: unsynced)._today() is None
