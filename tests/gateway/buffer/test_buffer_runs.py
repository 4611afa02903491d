"""What the buffer keeps of each device: when its last reading was received, whatever became of that since."""

from pathlib import Path

from gateway.buffer.rows import spans_of
from gateway.buffer.status import read_status
from tests.support.buffers import BOOT, CLOCK, entry, opened, rows, store
from tests.support.waiting import until


def last_of(path: Path) -> dict[str, tuple[str, int] | None]:
    """By device: the boot that received its last reading, and when."""
    return {
        of.device: None if of.seen is None else (of.seen.boot, of.seen.boottime_us) for of in read_status(path).devices
    }


async def test_a_device_is_as_old_as_its_last_reading_when_that_goes_to_kafka(path: Path) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(sequence=0, received_us=5_000_000)])
        # The first commit writes windows at once, those after it do so ten seconds later, or before a deletion.
        assert await store(buffer, [entry(device="dead", sequence=0, received_us=7_000_000)])
        assert await store(buffer, [entry(sequence=1, received_us=9_000_000)])
        before = last_of(path)
        buffer.confirm(buffer.id, spans_of(await rows(buffer)))
        await until(lambda: buffer.state.rows == 0)
        assert last_of(path) == before == {"42": (BOOT, 9_000_000), "dead": (BOOT, 7_000_000)}
    assert read_status(path).devices[1].seen_us == CLOCK.at(7_000_000)


async def test_a_device_is_as_old_as_its_last_reading_when_the_next_start_sends_that(path: Path) -> None:
    async with opened(path, boot="boot-0") as buffer:
        assert await store(buffer, [entry(sequence=0, received_us=5_000_000)])
        assert await store(buffer, [entry(device="dead", sequence=0, received_us=7_000_000)])
    async with opened(path) as buffer:
        assert await store(buffer, [entry(sequence=1, received_us=1_000)])
        assert await store(buffer, [entry(sequence=0, received_us=2_000)]), "sent again, and stored once"
        buffer.confirm(buffer.id, spans_of(await rows(buffer)))
        await until(lambda: buffer.state.rows == 0)
        assert last_of(path) == {"42": (BOOT, 1_000), "dead": ("boot-0", 7_000_000)}


async def test_the_boot_of_a_device_that_is_forgotten_is_the_one_that_was_heard_first(path: Path) -> None:
    async with opened(path) as buffer:
        for number in range(3):
            assert await store(buffer, [entry(b"x", sequence=0, boot=f"boot {number}", received_us=1_000 + number)])
        buffer.confirm(buffer.id, spans_of(await rows(buffer)))
        await until(lambda: buffer.state.rows == 0)
        assert await store(buffer, [entry(b"x", sequence=0, boot="boot 1", received_us=2_000)])
        assert buffer.counts["duplicate"] == 1
