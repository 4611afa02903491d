"""What is counted as lost is lost, although rows are dropped while others are on their way to Kafka."""

import asyncio
from pathlib import Path

import pytest

from gateway.buffer.buffer import Buffer
from tests.gateway.uplink.test_forward_rounds import drained, lane_report, reading, uplink
from tests.support.buffers import losses, opened, store
from tests.support.waiting import until

BYTES = bytes(500)


async def lost(buffer: Buffer) -> int:
    """Readings that are counted as lost."""
    return sum(loss.count for loss in await losses(buffer) if loss.reason == "buffer-full")


@pytest.mark.parametrize("drain", ["live-first", "oldest-first"])
async def test_a_full_buffer_and_a_slow_link(tmp_path: Path, drain: str) -> None:
    """What is read ahead of a round may be dropped, and then does not go; what is in one goes, and is not dropped."""
    async with opened(tmp_path / "buffer.db", bytes_max=3_000_000, when_full="drop-oldest", fair_from=1.0) as buffer:
        accepted = 0

        async def take_in(count: int) -> None:
            nonlocal accepted
            assert await store(
                buffer, [reading("abc"[n % 3], b"%d " % n + BYTES) for n in range(accepted, accepted + count)]
            )
            accepted += count

        while not buffer.state.full:
            await take_in(200)
        await buffer.begin_lane("uplink-up", lane_report)
        async with uplink(buffer, drain=drain, request_timeout_s=30.0) as line:
            line.broker.bytes_per_s = 300_000
            for _ in range(40):
                await take_in(60)
                await asyncio.sleep(0.05)
            line.broker.bytes_per_s = float("inf")
            await drained(buffer)
        sent = [int(record.value.split()[0]) for record in line.broker.of("device-thermo")]
        assert len(sent) == len(set(sent))
        assert 0 < await lost(buffer) == accepted - len(sent)


async def test_what_was_sent_to_a_silent_partition_is_not_dropped(tmp_path: Path) -> None:
    """Round after round goes to the others: what is under way there stays until that is over."""
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, when_full="drop-oldest", fair_from=1.0) as buffer:
        async with uplink(buffer, request_timeout_s=10.0) as line:
            line.broker.silent.add(1)
            # "a" goes to that partition, "b" to another.
            assert await store(buffer, [reading("ab"[n % 2], b"first %d" % n) for n in range(40)])
            await until(lambda: bool(line.memory.state.parked))
            for _ in range(60):
                assert await store(buffer, [reading("ab"[n % 2], b"later" + BYTES) for n in range(60)])
            await until(lambda: buffer.counts["dropped"] > 0)
            line.broker.silent.clear()
            await drained(buffer)
        sent = [record.value for record in line.broker.records["device-thermo", 1]]
        assert sent[:20] == [b"first %d" % n for n in range(0, 40, 2)]
        assert await lost(buffer) == 40 + 60 * 60 - len(line.broker.of("device-thermo"))
