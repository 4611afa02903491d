"""The buffer where it ends: full, tight, dropping, held up, closing, broken."""

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.buffer.buffer import Buffer
from gateway.buffer.deletion import Deletion
from gateway.buffer.dropping import Dropping
from gateway.buffer.room import Room
from gateway.buffer.rows import Loss, Position, Row, Span, joined, spans_of, without
from gateway.clock.kernel_clock import boottime_us
from gateway.reading import BufferFileError
from tests.support.buffers import (
    append,
    confirm,
    entry,
    input_of,
    is_held,
    losses,
    marks_of,
    opened,
    row_of,
    rows,
    store,
)
from tests.support.waiting import patience, until

if TYPE_CHECKING:
    from concurrent.futures import Future


async def statements(buffer: Buffer) -> list[str]:
    """What SQLite is told to do from now on."""
    told: list[str] = []
    await buffer.run(lambda file: file.connection.set_trace_callback(told.append))
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


async def test_windows_of_many_sensors_are_written_in_slices_and_none_is_forgotten(path: Path) -> None:
    sent = [entry(b"x", device=f"d{number}", sequence=1) for number in range(3_500)]
    async with opened(path) as buffer:
        await store(buffer, sent)
        await confirm(buffer, await rows(buffer))
        await until(lambda: not buffer.state.rows)
    async with opened(path) as buffer:
        assert await store(buffer, sent)
        assert buffer.counts["duplicate"] == 3_500
        assert not await rows(buffer)


async def test_streams_that_share_a_kafka_topic_count_for_themselves(path: Path) -> None:
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
            buffer.run(lambda file: file.series.find(row.series), "another"),
            buffer.run(lambda file: file.lanes.find(row.lane), "another"),
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
        await until(lambda: buffer.cannot_store)
        assert await is_held(held)
        assert sum("BEGIN" in statement for statement in told) <= 4
        monkeypatch.undo()
        assert await asyncio.wait_for(held, patience(10))


async def test_what_kafka_has_is_not_lost_when_the_oldest_are_dropped(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, when_full="drop-oldest") as buffer:
        for _ in range(100):
            # All that waits is in Kafka, and its deletion is not due yet.
            buffer.confirm(buffer.id, spans_of(await rows(buffer)))
            buffer._queue._delete_due_s = float("inf")
            assert await store(buffer, [entry(bytes(30_000))])
        assert buffer.counts["dropped"] == 0
        assert await losses(buffer) == []


async def drop_some(buffer: Buffer) -> None:
    """Have more stored than there is room for."""
    before = buffer.counts["dropped"]
    while buffer.counts["dropped"] < before + 10:
        assert await store(buffer, [entry(bytes(30_000))])


async def test_what_is_being_sent_is_not_dropped_but_what_stands_behind_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, when_full="drop-oldest") as buffer:
        assert await store(buffer, [entry(b"%d" % n) for n in range(20)])
        first = await rows(buffer)
        sent, under_way = [*first[2:7], *first[9:12]], first[15:16]
        assert not await buffer.keep_from_drop(buffer.id, spans_of(sent), buffer.drops, spans_of(under_way))
        await drop_some(buffer)
        assert (await rows(buffer))[: len(sent) + 1] == [*sent, *under_way]
        buffer.release()
        await drop_some(buffer)
        assert not {row.sequence for row in await rows(buffer)} & {row.sequence for row in first}
        assert sum(loss.count for loss in await losses(buffer)) == buffer.counts["dropped"]


async def test_who_sends_is_told_what_was_dropped_since_it_was_read(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, fair_from=1.0, when_full="drop-oldest") as buffer:
        while not buffer.state.full:
            assert await store(buffer, [entry(bytes(30_000))])
        since = buffer.drops
        read = spans_of(await rows(buffer))
        await drop_some(buffer)
        left = spans_of(await rows(buffer))
        gone = await buffer.keep_from_drop(buffer.id, read, since)
        assert joined([*gone, *left])[0].first == read[0].first
        assert gone[-1].last + 1 == left[0].first
        assert await buffer.run(lambda file: file.gone(read), buffer.id) == gone
        with pytest.raises(BufferFileError, match="replaced"):
            await buffer.keep_from_drop("another", left, buffer.drops)


async def test_what_is_confirmed_while_a_commit_makes_room_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, when_full="drop-oldest") as buffer:
        delete_some = Deletion.delete_some

        def confirmed_meanwhile(deletion: Deletion, confirmed: Sequence[Span]) -> list[Span]:
            rest = delete_some(deletion, confirmed)
            buffer.confirm(buffer.id, spans_of(sent))
            return rest

        taken = 0
        while not buffer.counts["dropped"]:
            assert await store(buffer, [entry(bytes(30_000))])
            taken += 1
        sent = (await rows(buffer))[:5]
        monkeypatch.setattr(Deletion, "delete_some", confirmed_meanwhile)
        assert await store(buffer, [entry(bytes(30_000))])
        monkeypatch.undo()
        left = await rows(buffer)
        assert not {row.sequence for row in sent} & {row.sequence for row in left}
        assert len(left) + len(sent) + sum(loss.count for loss in await losses(buffer)) == taken + 1


async def test_what_is_read_while_it_is_dropped_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where it was in memory still."""
    loop = asyncio.get_running_loop()
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, fair_from=1.0, when_full="drop-oldest") as buffer:
        drop_oldest = Dropping.drop_oldest
        read: list[Future[list[Row]]] = []

        async def read_and_hold() -> list[Row]:
            since = buffer.drops
            _, found = await buffer.read(Position(buffer.lane.number, -1), 100)
            return without(found, await buffer.keep_from_drop(buffer.id, spans_of(found), since))

        def read_meanwhile(dropping: Dropping, coming_bytes: int, spared: Sequence[Span]) -> None:
            read.append(asyncio.run_coroutine_threadsafe(read_and_hold(), loop))
            time.sleep(0.1)
            drop_oldest(dropping, coming_bytes, spared)

        assert not await rows(buffer), "what comes next is kept in memory too"
        monkeypatch.setattr(Dropping, "drop_oldest", read_meanwhile)
        while not read:
            assert await store(buffer, [entry(bytes(30_000))])
        kept = await asyncio.wrap_future(read[0])
        assert kept == (await rows(buffer))[: len(kept)]
        assert kept
        assert buffer.counts["dropped"]


async def test_what_is_being_sent_does_not_become_too_old(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", age_max_s=3600) as buffer:
        assert await store(buffer, [entry(b"%d" % n, received_us=boottime_us() - 7_200_000_000) for n in range(5)])
        found = await rows(buffer)
        assert not await buffer.keep_from_drop(buffer.id, spans_of(found[1:3]), buffer.drops)
        buffer._commits._age_due_s = 0.0
        await marks_of(buffer, "")  # wakes it
        await until(lambda: buffer.counts["dropped"] == 3)
        assert await rows(buffer) == found[1:3]


_spans = st.lists(st.builds(lambda lane, first, more: Span(lane, first, first + more), *[st.integers(0, 12)] * 3))


@given(_spans)
def test_a_row_that_is_in_any_of_the_spans_is_left_out(spans: list[Span]) -> None:
    """Spans may overlap: what was sent twice is confirmed twice."""
    all_rows = [row_of(sequence, lane) for lane in range(13) for sequence in range(25)]
    left = [
        row
        for row in all_rows
        if not any(row.lane == span.lane and span.first <= row.sequence <= span.last for span in spans)
    ]
    assert without(all_rows, spans) == left
    assert spans_of([row for row in all_rows if row not in left]) == joined(spans)


async def test_what_was_sent_twice_is_not_read_again_before_it_is_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [entry(b"%d" % n) for n in range(10)])
        found = await rows(buffer)
        lane = found[0].lane
        buffer.confirm(buffer.id, [Span(lane, 0, 8), Span(lane, 2, 3)])
        assert await rows(buffer) == found[9:]
        buffer._queue._delete_due_s = 0.0
        await marks_of(buffer, "")  # wakes it
        await until(lambda: buffer.state.rows == 1)


async def test_a_delayed_commit_is_delayed_although_readings_never_stop_coming(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", commit_delay_ms=200) as buffer:
        told = await statements(buffer)
        outcomes = []
        begun_s = time.monotonic()
        for number in range(100):
            outcomes.append(append(buffer, [entry(b"%d" % number)]))
            await asyncio.sleep(0.01)
        assert all(await asyncio.gather(*outcomes))
        # A slow machine takes longer for it, and so may commit more often.
        delays = (time.monotonic() - begun_s) / 0.2
        assert sum("COMMIT" in statement for statement in told) <= delays + 2


async def test_what_is_refused_at_the_end_is_counted_on_disk(path: Path) -> None:
    async with opened(path, bytes_max=1_000_000, fair_from=1.0) as buffer:

        def done(stored: bool) -> None:  # noqa: FBT001 - the contract of Intake
            if not stored:
                buffer.count_loss(Loss("42", "line", buffer.boot_id, 1, 5, 5))

        for _ in range(12):
            buffer.append([entry(bytes(100_000))], done)
        await until(lambda: buffer.cannot_store)
    with sqlite3.connect(path) as file:
        ((count,),) = file.execute("SELECT sum(count) FROM loss").fetchall()
        (stored,) = file.execute("SELECT count(*) FROM reading").fetchone()
    file.close()
    assert count == 12 - stored > 0


async def test_a_dead_thread_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fall(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    async with opened(tmp_path / "buffer.db") as buffer:
        monkeypatch.setattr(buffer._commits, "_measure", fall)
        append(buffer, [entry()])
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await asyncio.wait_for(buffer.watch(), patience(10))
        buffer.attachment.file.close()


async def test_quarantined_input_is_taken_in_again_once_whoever_asks(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        input_ = input_of("no-route", b"raw", "", "kitchen")
        await buffer.quarantine(buffer.id, [replace(entry(b"report"), quarantined=input_)], [])
        again = {1: entry(b"raw")}
        await asyncio.gather(*(buffer.transact(lambda file: file.requeue(again, {})) for _ in range(2)))
        assert [row.datum.payload for row in await rows(buffer)] == [b"report", b"raw"]


async def test_quarantine_overflow_is_counted_by_device_in_its_transaction(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", quarantine_rows_max=1) as buffer:
        for device in ("a", "b"):
            input_ = input_of("no-route", b"raw", device, "kitchen", 7)
            await buffer.quarantine(buffer.id, [replace(entry(b"report"), quarantined=input_)], [])
        (loss,) = await losses(buffer)
        assert (loss.device, loss.reason, loss.count, loss.first_us) == ("a", "quarantine-overflow", 1, 7)


async def test_a_lane_whose_age_nobody_knows_does_not_keep_the_others(path: Path) -> None:
    old_us = boottime_us() - 7_200_000_000
    for boot in ("boot-0", "boot-1"):
        async with opened(path, boot=boot) as buffer:
            await store(buffer, [entry(boot.encode(), received_us=old_us)])
    with sqlite3.connect(path) as file:
        file.execute("UPDATE boot SET error_us = NULL, clock = NULL WHERE boot_id = 'boot-0'")
    file.close()
    async with opened(path, age_max_s=3600) as buffer:
        await until(lambda: buffer.counts["dropped"] == 1)
        assert [row.datum.payload for row in await rows(buffer)] == [b"boot-0"]


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
            async with asyncio.timeout(patience(0.5)):
                assert await append(buffer, [entry(b"%d" % number)])
