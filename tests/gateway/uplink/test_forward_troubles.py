"""Topics that are not there yet, or no longer, partitions that fail by the dozen, answers that are lost.

Against the broker made of lists of `test_forward_rounds`.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.kafka.topics import TopicVerdict
from gateway.reading import Doubt
from gateway.uplink import batches, delivery, leaders
from gateway.uplink.batches import Batcher
from gateway.uplink.memory import NO_PARTITION, TROUBLE_S_MIN, Memory
from gateway.uplink.redrive import Redrive
from tests.gateway.uplink.test_forward_rounds import (
    POISON,
    FakeVerdicts,
    drained,
    kafka_settings,
    lane_report,
    reading,
    uplink,
)
from tests.support.buffers import CLOCK, opened, quarantined_of, row_of, store
from tests.support.waiting import patience, until


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "LEADERS_S", 0.05)
    monkeypatch.setattr(leaders, "GONE_S", 0.1)
    monkeypatch.setattr("gateway.uplink.rounds.IDLE_S", 0.05)
    monkeypatch.setattr(delivery, "STRAGGLERS_S_MIN", 0.2)
    monkeypatch.setattr("gateway.uplink.memory.TROUBLE_S_MIN", 0.3)


async def test_readings_of_a_topic_that_cannot_be_made_just_now_wait_and_others_go_on(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.verdicts.condemned["device-late"] = TopicVerdict("device-late", "topic-not-created", "later", waits=True)
        assert await store(buffer, [reading("a", b"%d" % n, "device-late") for n in range(3)])
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(3)])
        await until(lambda: buffer.state.rows == 3)
        assert line.memory.state.parked == {"device-late": "later"}
        assert not line.ended
        del line.verdicts.condemned["device-late"]
        await drained(buffer)
        assert [record.value for record in line.broker.of("device-late")] == [b"0", b"1", b"2"]
        assert not line.memory.state.parked
        assert not await quarantined_of(buffer, range(1, 50))


async def test_a_partition_without_a_leader_is_no_reason_to_loop_once_its_topic_could_not_be_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0
    follow = Batcher.follow

    def counted(self: Batcher) -> None:
        nonlocal rounds
        rounds += 1
        follow(self)

    monkeypatch.setattr(Batcher, "follow", counted)
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.broker.leaderless.add(1)
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(600)])
        await until(lambda: bool(line.memory.state.parked))
        line.verdicts.condemned["device-thermo"] = TopicVerdict("device-thermo", "not-described", "", waits=True)
        await asyncio.sleep(0.5)
        line.verdicts.condemned.clear()
        await asyncio.sleep(1)
        rounds = 0
        await asyncio.sleep(1)
        assert rounds <= 40, "twenty looks a second are what IDLE_S asks for here"
        line.broker.leaderless.clear()
        await drained(buffer)
        assert not await quarantined_of(buffer, range(1, 700))


async def test_sessions_that_end_for_others_do_not_lengthen_a_topics_pause(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.verdicts.condemned["device-late"] = TopicVerdict("device-late", "topic-not-created", "later", waits=True)
        assert await store(buffer, [reading("a", b"late", "device-late")])
        assert await store(buffer, [reading("b", POISON if n == 7 else b"%d" % n) for n in range(200)])
        await until(lambda: buffer.state.rows == 1)
        assert len(line.ended) >= 5
        pause_s = line.memory.rests_until_s(("device-late", NO_PARTITION)) - time.monotonic()
        assert pause_s <= 4 * TROUBLE_S_MIN


async def test_a_large_reading_waits_for_its_topic_as_others_do(tmp_path: Path) -> None:
    async with (
        opened(tmp_path / "buffer.db", bytes_max=100_000_000) as buffer,
        uplink(buffer, record_bytes_max=3_000_000) as line,
    ):
        line.verdicts.condemned["device-late"] = TopicVerdict("device-late", "topic-not-created", "later", waits=True)
        assert await store(buffer, [reading("a", bytes(1_200_000), "device-late")])
        await until(lambda: bool(line.memory.state.parked))
        assert not await quarantined_of(buffer, range(1, 50))
        assert not line.memory.too_small


def test_an_answer_to_one_device_is_none_to_another() -> None:
    """A batch has a device's rows together: the highest sequence may be answered before lower ones of others."""
    memory = Memory(kafka_settings(), lambda: CLOCK)
    first, last, other = (
        row_of(sequence, series=series, received_us=0, payload=b"") for sequence, series in ((0, 1), (9, 1), (5, 2))
    )
    memory.sent_without_answer(("device-thermo", 0), [first, last, other])
    memory.answered(("device-thermo", 0), [first, last])
    assert memory.may_have(["device-thermo"], other)
    assert not memory.may_have(["device-thermo"], last)
    assert not memory.may_have(["device-hygro"], other)
    memory.answered(("device-thermo", 0), [other])
    assert not memory.may_have(["device-thermo"], other)


@pytest.mark.parametrize("under_way", [0, 1])
async def test_a_topic_that_was_deleted_is_found_out_beside_the_rounds(tmp_path: Path, under_way: int) -> None:
    """Its partition has no leader any more; a verdict that is good for an hour would have its readings wait so long."""
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer, request_timeout_s=60.0) as line:
        if under_way:
            line.broker.silent = {1}
            assert await store(buffer, [reading("a", b"first"), reading("c", b"of another partition")])
            await until(lambda: buffer.state.rows == 1)
        line.broker.gone.add(("device-thermo", 1))
        assert await store(buffer, [reading("a", b"second"), reading("c", b"and another")])
        await until(lambda: buffer.state.rows == 1 + under_way)
        line.verdicts.condemned["device-thermo"] = TopicVerdict("device-thermo", "topic-unknown", "create it")
        async with asyncio.timeout(patience(10)):
            while len(await quarantined_of(buffer, range(1, 50))) < 1 + under_way:
                await asyncio.sleep(0.05)


async def test_a_topic_made_anew_with_fewer_partitions_gets_what_the_old_one_did_not(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.broker.leaderless.add(1)
        assert await store(buffer, [reading("a", b"1")])
        await until(lambda: bool(line.memory.state.parked))

        async def partition(_topic: str, _key: bytes) -> int:
            return 0

        line.broker.partition = partition  # type: ignore[assignment, method-assign]
        line.broker.gone.add(("device-thermo", 1))
        await drained(buffer)
        assert [record.value for record in line.broker.records["device-thermo", 0]] == [b"1"]


async def test_what_was_said_of_a_partition_ends_with_its_readings(tmp_path: Path) -> None:
    """They went to the quarantine: nothing will ever be acknowledged there."""
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.broker.gone.add(("device-thermo", 1))
        assert await store(buffer, [reading("a", b"1")])
        await until(lambda: bool(line.memory.state.parked))
        line.verdicts.condemned["device-thermo"] = TopicVerdict("device-thermo", "topic-unknown")
        await until(lambda: not line.memory.state.parked)
        assert len(await quarantined_of(buffer, range(1, 50))) == 1


async def test_forty_partitions_that_fail_end_few_sessions(tmp_path: Path) -> None:
    """One broker's disk: a session for each of them would cancel the requests of all others as often."""
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:

        async def partition(_topic: str, key: bytes) -> int:
            return int(key)

        line.broker.partition = partition  # type: ignore[assignment, method-assign]
        line.broker.ill = set(range(1, 41))
        assert await store(buffer, [reading(f"{n}", b"x") for n in range(41)])
        await asyncio.sleep(1.5)  # a first try, and those after 0.3 and 0.6 s more
        assert line.broker.of("device-thermo")
        assert 2 <= len(line.ended) <= 8
        line.broker.ill.clear()
        await drained(buffer)


async def test_a_record_that_fits_after_all_keeps_its_place(tmp_path: Path) -> None:
    """It was too large by what was known of its topic; an administrator has raised that since."""

    class Mended(FakeVerdicts):
        bytes_max = 10_000

        async def of_all(self, _: object, topics: Sequence[str], __: float = 0.0) -> dict[str, TopicVerdict]:
            return {topic: TopicVerdict(topic, batch_bytes_max=self.bytes_max) for topic in topics}

        async def of(self, _: object, topic: str, __: float = 0.0) -> TopicVerdict:
            self.bytes_max = 100_000
            return TopicVerdict(topic, batch_bytes_max=self.bytes_max)

    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [reading("a", payload) for payload in (b"0", b"1" + bytes(20_000), b"2", b"3")])
        async with uplink(buffer) as line:
            line.memory.verdicts = Mended()  # type: ignore[assignment]
            await drained(buffer)
        assert [record.value[:1] for record in line.broker.of("device-thermo")] == [b"0", b"1", b"2", b"3"]


async def test_more_series_than_are_remembered_cost_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "ROUTES_MAX", 50)
    async with opened(tmp_path / "buffer.db") as buffer:
        for lane in range(4):
            for start in range(0, 80, 20):
                # Of each lot some were seen before.
                assert await store(
                    buffer, [reading(f"d{n if n % 3 else n % 20}", b"x") for n in range(start, start + 20)]
                )
            await buffer.begin_lane(f"lane-{lane}", lane_report)
        async with uplink(buffer, batch_rows_max=30) as line:
            await drained(buffer)
        assert not line.ended
        assert len(line.broker.of("device-thermo")) == 320


async def test_while_readings_wait_for_the_clock_commits_wake_nobody(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.holds = True
        assert await store(buffer, [reading("a", b"0")])
        await asyncio.sleep(0.1)
        looks = 0
        read = buffer.read

        async def counted(*arguments: object) -> object:
            nonlocal looks
            looks += 1
            return await read(*arguments)  # type: ignore[arg-type]

        buffer.read = counted  # type: ignore[assignment, method-assign]
        for number in range(20):
            assert await store(buffer, [reading("a", b"%d" % number)])
        assert looks <= 2
        line.holds = False
        await drained(buffer)


async def test_a_reading_whose_answer_was_lost_is_doubtful_when_it_comes_again_by_the_quarantine(
    tmp_path: Path,
) -> None:
    """Kafka has it, under an id that it will not have again."""
    async with opened(tmp_path / "buffer.db") as buffer, uplink(buffer) as line:
        line.broker.loses_answers = True
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(2)])
        await until(lambda: bool(line.broker.of("device-thermo")))
        line.broker.forbidden.add("device-thermo")
        line.broker.loses_answers = False
        assert await store(buffer, [reading("a", b"never sent")])
        await drained(buffer)
        kept = await quarantined_of(buffer, range(1, 50))
        doubts = {each.datum.payload: each.datum.doubt for each in kept.values()}
        assert doubts == {b"0": Doubt.REDELIVERED, b"1": Doubt.REDELIVERED, b"never sent": 0}
        line.broker.forbidden.clear()
        redrive = Redrive(buffer, line.front_door, line.memory)
        for _ in range(2):
            line.verdicts.condemned.clear()
            await redrive.take_in_again(None)
            await drained(buffer)
    ids = defaultdict(set)
    for record in line.broker.of("device-thermo"):
        ids[record.value].add(record.id)
    assert {value: len(each) for value, each in ids.items()} == {b"0": 2, b"1": 2, b"never sent": 1}
