"""Rounds against a broker that answers late, over a link that carries its bytes at once, slowly or not at all.

Lateness is not narrowness: what was carried is waited for, and the next request is no smaller for it.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.buffer.buffer import Buffer
from gateway.kafka.batch import EncodedBatch
from gateway.uplink import delivery
from gateway.uplink.link_rate import FIRST_BYTES, SHARE, Passage
from gateway.uplink.memory import Memory
from tests.gateway.uplink.test_forward_rounds import FakeBroker, Uplink, drained, kafka_settings, reading, uplink
from tests.support.buffers import CLOCK, opened, store
from tests.support.waiting import until

TIMEOUT_S = 0.6
"""Of a request in these tests, as in those of rounds."""
DEVICES = ("a", "b", "c")
"""Of partitions 1, 2 and 0."""


@pytest.fixture(autouse=True, scope="module")
def _quick_looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.uplink.rounds.IDLE_S", 0.05)
        patch.setattr(delivery, "STRAGGLERS_S_MIN", 0.2)
        yield


@dataclass
class Line:
    """A link that carries one request after the other, and whose connections stand until they are cut."""

    bytes_per_s: float = math.inf
    stands: bool = True
    sent: int = 0
    throttled_s: float = 0.0
    throttled_at_s: float = -math.inf
    _through_s: float = 0.0
    """When all that was sent is carried."""

    def take(self, size: int) -> float:
        """Begin to carry so many bytes; in how many seconds all is carried."""
        now_s = time.monotonic()
        self.sent += size
        self._through_s = max(self._through_s, now_s) + size / self.bytes_per_s if self.bytes_per_s else math.inf
        return self._through_s - now_s

    def carried_bytes(self) -> int:
        left_s = max(0.0, self._through_s - time.monotonic())
        return self.sent - (math.ceil(min(self.sent, left_s * self.bytes_per_s)) if left_s else 0)

    wire_bytes = carried_bytes

    def peers(self) -> frozenset[tuple[str, int]]:
        return frozenset({("192.0.2.1", 9092)}) if self.stands else frozenset()


@dataclass
class LateBroker(FakeBroker):
    """Answers `answer_s` after it has everything, a partition's batches one after the other."""

    link: Line = field(default_factory=Line)
    busy: asyncio.Event | None = None
    """While it is not set, a request to the broker is under way already and the client keeps back the next."""

    async def send(self, topic: str, partition: int, batch: EncodedBatch) -> int:
        if self.busy is not None:
            await self.busy.wait()
        size = len(batch._build())
        carried_s = self.link.take(size)
        if carried_s == math.inf:
            await asyncio.Event().wait()
        await asyncio.sleep(carried_s)
        return await super().send(topic, partition, batch)


@asynccontextmanager
async def late(buffer: Buffer, timeout_s: float = TIMEOUT_S) -> AsyncIterator[tuple[Uplink, LateBroker]]:
    """An uplink to a broker that answers at once until it is told otherwise."""
    async with uplink(buffer, request_timeout_s=timeout_s) as line:
        line.broker = broker = LateBroker()
        yield line, broker


async def fill(buffer: Buffer, rows: int, size: int = 1) -> None:
    assert await store(buffer, [reading(DEVICES[n % 3], b"%d " % n + bytes(size)) for n in range(rows)])


@pytest.mark.usefixtures("steady_time")
@pytest.mark.parametrize("share", [0.45, 0.6, 0.8])
async def test_a_broker_that_answers_late_is_served_with_requests_that_grow(tmp_path: Path, share: float) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        await fill(buffer, 1_000)
        async with late(buffer) as (line, broker):
            broker.answer_s = share * TIMEOUT_S
            await drained(buffer)
        assert not line.ended
        assert len(broker.of("device-thermo")) == 1_000, "none twice"
        assert line.memory.rate.request_bytes_max > FIRST_BYTES


@pytest.mark.usefixtures("steady_time")
async def test_a_round_of_many_late_answers_goes_on_as_long_as_they_come(tmp_path: Path) -> None:
    """Batches of one partition go one after the other, and each has its own time-out."""
    async with opened(tmp_path / "buffer.db", bytes_max=100_000_000) as buffer:
        assert await store(buffer, [reading("a", b"%d " % n + bytes(300_000)) for n in range(6)])
        async with late(buffer) as (line, broker):
            broker.answer_s = TIMEOUT_S / 2
            line.memory.rate._bytes = 4e6
            await drained(buffer)
        assert not line.ended
        assert len(broker.of("device-thermo")) == 6


@pytest.mark.usefixtures("steady_time")
async def test_a_round_whose_answers_cease_is_settled_as_far_as_they_came(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=100_000_000) as buffer:
        assert await store(buffer, [reading("a", b"%d " % n + bytes(300_000)) for n in range(6)])
        async with late(buffer) as (line, broker):
            broker.answer_s = TIMEOUT_S / 4
            line.memory.rate._bytes = 4e6
            # The first row goes alone, the others in one round of two batches.
            await until(lambda: len(broker.arrivals) == 2)
            broker.silent.add(1)
            await until(lambda: bool(line.ended))
            broker.silent.clear()
            await drained(buffer)
        assert len(broker.of("device-thermo")) == 6, "none twice"


def test_a_request_that_was_answered_late_is_not_followed_by_one_of_twice_its_size() -> None:
    """It may have been late because of its size: a broker is slow, or a proxy hides a narrow link."""
    memory = Memory(kafka_settings(), lambda: CLOCK)
    batch = EncodedBatch("none")
    batch.add(bytes(FIRST_BYTES))
    passage = Passage(0.0, 0)
    passage.measure(0.01, len(batch._build()), 2 * FIRST_BYTES)
    passage.measure(0.8 * TIMEOUT_S, len(batch._build()), 2 * FIRST_BYTES)
    memory.learn([batch], passage)
    assert FIRST_BYTES < memory.rate.request_bytes_max < 1.2 * FIRST_BYTES


@pytest.mark.usefixtures("steady_time")
async def test_what_waits_for_the_answer_to_another_request_is_not_given_up(tmp_path: Path) -> None:
    """The client sends a broker one request at a time: a heartbeat that is answered late comes first."""
    async with opened(tmp_path / "buffer.db") as buffer, late(buffer) as (line, broker):
        broker.busy = asyncio.Event()
        await fill(buffer, 3)
        await asyncio.sleep(TIMEOUT_S * 0.6)
        broker.answer_s = TIMEOUT_S * 0.6
        broker.busy.set()
        await drained(buffer)
        assert not line.ended


@pytest.mark.usefixtures("steady_time")
async def test_a_broker_that_has_everything_has_the_whole_time_out(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer, late(buffer) as (line, broker):
        broker.silent |= {0, 1, 2}
        begun_s = time.monotonic()
        await fill(buffer, 3)
        await until(lambda: bool(line.ended))
        assert time.monotonic() - begun_s >= TIMEOUT_S
        assert isinstance(line.ended[0], TimeoutError)


@pytest.mark.usefixtures("steady_time")
@pytest.mark.parametrize("end", ["nothing is carried", "it was carried and its connection is gone"])
async def test_where_nothing_comes_through_the_time_out_is_not_waited_for(tmp_path: Path, end: str) -> None:
    """With a time-out that this test does not live to see."""
    async with opened(tmp_path / "buffer.db") as buffer, late(buffer, timeout_s=6.0) as (line, broker):
        broker.silent |= {0, 1, 2}
        if end == "nothing is carried":
            broker.link.bytes_per_s = 0.0
        else:
            broker.link.stands = False
        begun_s = time.monotonic()
        await fill(buffer, 3)
        await until(lambda: bool(line.ended))
        assert time.monotonic() - begun_s < 6.0
        assert isinstance(line.ended[0], TimeoutError)


@pytest.mark.usefixtures("steady_time")
async def test_a_slow_link_is_given_small_requests_whether_answers_are_late_or_not(tmp_path: Path) -> None:
    """A narrow link and a late broker at once: the size follows the link alone."""
    async with opened(tmp_path / "buffer.db", bytes_max=100_000_000) as buffer:
        await fill(buffer, 150, 1_000)
        async with late(buffer) as (line, broker):
            broker.link.bytes_per_s = 100_000.0
            broker.answer_s = TIMEOUT_S * 0.3
            await drained(buffer)
        assert not line.ended
        fits = broker.link.bytes_per_s * TIMEOUT_S * SHARE
        # Looks are coarse.
        assert fits / 2 <= line.memory.rate.request_bytes_max <= fits * 1.2
