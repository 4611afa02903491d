"""The buffer where it ends: full, tight, dropping, held up, closing, broken."""

import asyncio
import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.buffer import Buffer
from gateway.buffer_room import Room
from gateway.buffer_rows import Loss, Quarantined, spans_of
from gateway.buffer_schema import BufferFileError
from gateway.clock_gateway import boottime_us
from tests.buffers import append, confirm, entry, is_held, losses, opened, rows, store, until


async def statements(buffer: Buffer) -> list[str]:
    """What SQLite is told to do from now on."""
    told: list[str] = []
    await buffer._call(lambda: buffer._file.connection.set_trace_callback(told.append))
    return told


async def test_a_tight_disk_is_drained_although_many_sensors_were_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing down what each of them sent last may take more than there is: the deletion, which makes room, goes on."""
    async with opened(tmp_path / "buffer.db") as buffer:
        await store(buffer, [entry(b"x", device=f"d{number}", sequence=1) for number in range(3_000)])
        kept = await rows(buffer)
        monkeypatch.setattr(Room, "is_tight", lambda _: True)
        monkeypatch.setattr(Room, "free_page_bytes", lambda _: 0)
        await confirm(buffer, kept)
        await until(lambda: not buffer.state.rows)
        # And as long as the power does not fail, nothing that comes again is taken for new.
        assert await store(buffer, [entry(b"x", device="d0", sequence=1)])
        assert buffer.counts["duplicate"] == 1


async def test_windows_of_many_sensors_are_written_in_slices_and_none_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    sent = [entry(b"x", device=f"d{number}", sequence=1) for number in range(3_500)]
    async with opened(path) as buffer:
        await store(buffer, sent)
        await confirm(buffer, await rows(buffer))
        await until(lambda: not buffer.state.rows)
    async with opened(path) as buffer:
        assert await store(buffer, sent)
        assert buffer.counts["duplicate"] == 3_500
        assert not await rows(buffer)


async def test_streams_that_share_a_kafka_topic_count_for_themselves(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    plain = entry(b"1", sequence=7)
    thermo, light = (replace(plain, series=replace(plain.series, stream=f"device/42/{name}")) for name in ("t", "l"))
    thermo, light = (replace(each, series=replace(each.series, subject=each.series.stream)) for each in (thermo, light))
    async with opened(path) as buffer:
        await store(buffer, [thermo, light, thermo, light])
        assert len(await rows(buffer)) == 2
    async with opened(path) as buffer:
        await store(buffer, [light, thermo])
        assert len(await rows(buffer)) == 2


async def test_numbers_of_a_replaced_file_mean_nothing_in_the_new_one(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        await store(buffer, [entry()])
        (row,) = await rows(buffer)
        for look_up in (
            buffer.series("another", row.series),
            buffer.lane_of("another", row.lane),
            buffer.quarantine("another", [], [row]),
        ):
            with pytest.raises(BufferFileError, match="replaced"):
                await look_up
        assert await rows(buffer) == [row]


async def test_with_nothing_left_to_drop_the_buffer_holds_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "buffer.db", when_full="drop-oldest") as buffer:
        told = await statements(buffer)
        monkeypatch.setattr(Room, "is_full", lambda *_: True)
        held = append(buffer, [entry()])
        assert await is_held(held)
        assert buffer.holding
        assert sum("BEGIN" in statement for statement in told) <= 4
        monkeypatch.undo()
        assert await asyncio.wait_for(held, 10)


async def test_what_kafka_has_is_not_lost_when_the_oldest_are_dropped(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, when_full="drop-oldest") as buffer:
        for _ in range(100):
            # All that waits is in Kafka, and its deletion is not due yet.
            buffer.confirm(buffer.id, spans_of(await rows(buffer)))
            buffer._delete_due_s = float("inf")
            assert await store(buffer, [entry(bytes(30_000))])
        assert buffer.counts["dropped"] == 0
        assert await losses(buffer) == []


async def test_a_delayed_commit_is_delayed_although_readings_never_stop_coming(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", commit_delay_ms=200) as buffer:
        told = await statements(buffer)
        outcomes = []
        for number in range(100):
            outcomes.append(append(buffer, [entry(b"%d" % number)]))
            await asyncio.sleep(0.01)
        assert all(await asyncio.gather(*outcomes))
        assert sum("COMMIT" in statement for statement in told) <= 8


async def test_what_is_refused_at_the_end_is_counted_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with opened(path, bytes_max=1_000_000) as buffer:

        def done(stored: bool) -> None:  # noqa: FBT001 - the contract of Intake
            if not stored:
                buffer.count_loss(Loss("42", "line", buffer.boot_id, 1, 5, 5))

        for _ in range(12):
            buffer.append([entry(bytes(100_000))], done)
        await until(lambda: buffer.holding)
    with sqlite3.connect(path) as file:
        ((count,),) = file.execute("SELECT sum(count) FROM loss").fetchall()
        (stored,) = file.execute("SELECT count(*) FROM reading").fetchone()
    file.close()
    assert count == 12 - stored > 0


async def test_a_dead_thread_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fall(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    async with opened(tmp_path / "buffer.db") as buffer:
        monkeypatch.setattr(buffer, "_measure", fall)
        append(buffer, [entry()])
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await asyncio.wait_for(buffer.watch(), 10)
        buffer._file.close()


async def test_quarantined_input_is_taken_in_again_once_whoever_asks(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        input_ = Quarantined("no-route", b"raw", "", "kitchen", 1)
        await buffer.quarantine(buffer.id, [replace(entry(b"report"), quarantined=input_)], [])
        again = {1: entry(b"raw")}
        await asyncio.gather(*(buffer.requeue(buffer.id, again, {}) for _ in range(2)))
        assert [row.payload for row in await rows(buffer)] == [b"report", b"raw"]


async def test_quarantine_overflow_is_counted_by_device_in_its_transaction(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", quarantine_rows_max=1) as buffer:
        for device in ("a", "b"):
            input_ = Quarantined("no-route", b"raw", device, "kitchen", 7)
            await buffer.quarantine(buffer.id, [replace(entry(b"report"), quarantined=input_)], [])
        (loss,) = await losses(buffer)
        assert (loss.device, loss.reason, loss.count, loss.first_us) == ("a", "quarantine-overflow", 1, 7)


async def test_a_lane_whose_age_nobody_knows_does_not_keep_the_others(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    old_us = boottime_us() - 7_200_000_000
    for boot in ("boot-0", "boot-1"):
        async with opened(path, boot=boot) as buffer:
            await store(buffer, [entry(boot.encode(), received_us=old_us)])
    with sqlite3.connect(path) as file:
        file.execute("UPDATE boot SET error_us = NULL WHERE boot_id = 'boot-0'")
    file.close()
    async with opened(path, age_max_s=3600) as buffer:
        await until(lambda: buffer.counts["dropped"] == 1)
        assert [row.payload for row in await rows(buffer)] == [b"boot-0"]


async def test_loss_records_do_not_fill_a_full_buffer(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000) as buffer:
        for number in range(20_000):
            buffer.count_loss(Loss(f"d{number}", "refused-qos0", buffer.boot_id, 1, 5, 5))
        big = entry(bytes(2_000))
        for _ in range(400):
            await buffer.report_losses(lambda _: big)
        assert buffer.state.bytes_used < 1_000_000 + 3_500_000


async def test_asking_for_losses_where_there_are_none_delays_nobody(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        for number in range(20):
            assert await losses(buffer) == []
            async with asyncio.timeout(0.5):
                assert await append(buffer, [entry(b"%d" % number)])
