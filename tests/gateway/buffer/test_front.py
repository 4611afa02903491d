"""Rows that Kafka may have before the disk: when they are written, acknowledged, and what a cut leaves of them."""

import asyncio
import errno
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import astuple
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gateway.buffer import commit_loop, tail
from gateway.buffer import file as file_module
from gateway.buffer.buffer import Buffer
from gateway.buffer.commit_queue import Append, CommitQueue
from gateway.buffer.file import AHEAD_MARK, OFFSETS_BEHIND, SIGN_OF_LIFE_S, BufferFile
from gateway.buffer.room import Room
from gateway.buffer.rows import PLAIN, Entry, Position, Row, spans_of
from gateway.buffer.schema import corruption
from gateway.clock.kernel_clock import boottime_us
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.intake.new_clocks import NewClocks
from gateway.reading import BufferFileError, Mark, Recalled
from gateway.settings import BufferSettings, KafkaSettings
from gateway.uplink.supply import Supply
from tests.support.buffers import (
    append,
    changed,
    entry,
    failure,
    input_of,
    is_held,
    losses,
    marks_of,
    opened,
    series_of,
    store,
)
from tests.support.dead_disk import dead_disk
from tests.support.waiting import patience, until

TOPIC = "device-thermo"
OTHER = "device-other"


@asynccontextmanager
async def direct(path: Path, **settings: object) -> AsyncIterator[Buffer]:
    """A buffer whose forwarder has reached its end, while Kafka takes the topic of `entry` at once."""
    async with opened(path, **{"disk_after_ms": 60_000, **settings}) as buffer:  # type: ignore[arg-type]
        await begin(buffer)
        yield buffer


async def begin(buffer: Buffer) -> None:
    await buffer.read(Position(buffer.lane.number, -1), 100)
    await buffer.go_direct(frozenset([TOPIC]), buffer.id)


async def live(buffer: Buffer, count: int, after: int = -1) -> list[Row]:
    """The rows behind a sequence of the current lane, once there are so many."""
    async with asyncio.timeout(patience(10)):
        while True:
            _, found = await buffer.read(Position(buffer.lane.number, after), 1_000)
            if len(found) >= count:
                return found
            await asyncio.sleep(0.001)


def cut(path: Path, folder: Path) -> Path:
    """The file that a power cut at this moment would leave."""
    after = folder / "after.db"
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{after}{suffix}")
    return after


def on_disk(path: Path, folder: Path) -> list[tuple[int, bytes]]:
    """What a power cut at this moment would leave: sequence and payload of each row."""

    copy = folder / "copy.db"
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    with closing(sqlite3.connect(copy)) as file:
        return file.execute("SELECT sequence, payload FROM reading ORDER BY lane, sequence").fetchall()


async def take(buffer: Buffer, rows: list[Row]) -> None:
    """Kafka acknowledges rows."""
    buffer.confirm(buffer.id, spans_of(rows))


async def test_what_kafka_has_first_is_acknowledged_and_never_written(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        before = path.with_name("buffer.db-wal").read_bytes()
        outcomes = [append(buffer, [entry(b"%d" % number, sequence=number)]) for number in range(50)]
        rows = await live(buffer, 50)
        assert [row.datum.payload for row in rows] == [b"%d" % number for number in range(50)]
        assert not any(outcome.done() for outcome in outcomes)
        assert buffer.state.rows == 50
        await take(buffer, rows)
        assert [await outcome for outcome in outcomes] == [True] * 50
        assert buffer.state.rows == 0
        assert buffer.counts["spared"] == 50
        await asyncio.sleep(1.2)  # longer than deletions wait
        assert path.with_name("buffer.db-wal").read_bytes() == before


async def test_acknowledgements_come_in_the_order_of_the_readings(tmp_path: Path) -> None:
    async with direct(tmp_path / "buffer.db") as buffer:
        first, second = append(buffer, [entry(b"1"), entry(b"2")]), append(buffer, [entry(b"3")])
        rows = await live(buffer, 3)
        await take(buffer, rows[2:])
        await take(buffer, rows[:1])
        assert await is_held(first, 0.2)
        assert not second.done()
        await take(buffer, rows[1:2])
        assert await first
        assert await second


async def test_what_kafka_has_not_in_time_is_committed_and_acknowledged_by_that(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path, disk_after_ms=300) as buffer:
        outcomes = [append(buffer, [entry(b"%d" % number)]) for number in range(4)]
        rows = await live(buffer, 4)
        await take(buffer, rows[1:2])
        assert await asyncio.wait_for(outcomes[3], patience(5))
        assert all(outcome.result() for outcome in outcomes)
        assert on_disk(path, tmp_path) == [(0, b"0"), (2, b"2"), (3, b"3")]
        await take(buffer, [rows[0], *rows[2:]])
        await until(lambda: buffer.state.rows == 0)
    async with opened(path) as buffer:
        assert buffer.state.rows == 0


async def test_rows_that_kafka_gets_while_they_are_written_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        assert await live_then_cut_short(buffer)
        await until(lambda: buffer.state.rows == 0)
        assert on_disk(path, tmp_path) == []
        assert buffer.counts["spared"] == 0


async def live_then_cut_short(buffer: Buffer) -> bool:
    """Confirm a row between its INSERT and its COMMIT."""
    outcome = append(buffer, [entry(b"1")])
    (row,) = await live(buffer, 1)

    def write(_: object) -> None:
        buffer.attachment.file.write_front()
        buffer.confirm(buffer.id, spans_of([row]))

    await buffer.transact(write)
    return await outcome


async def test_the_end_of_a_session_sends_the_front_to_the_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        outcome = append(buffer, [entry(b"1")])
        await live(buffer, 1)
        buffer.end_direct()
        assert await asyncio.wait_for(outcome, patience(5))
        assert on_disk(path, tmp_path) == [(0, b"1")]
        assert await store(buffer, [entry(b"2")])
        assert on_disk(path, tmp_path) == [(0, b"1"), (1, b"2")]


async def test_what_needs_the_disk_goes_there_and_leaves_the_front_to_kafka(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        before = append(buffer, [entry(b"1")])
        await live(buffer, 1)
        with_mark = append(buffer, [entry(b"2", "43")], [Mark("mqtt/1", b"x")])
        assert await asyncio.wait_for(with_mark, patience(5))
        behind = append(buffer, [entry(b"3")])
        rows = await live(buffer, 3)
        assert [row.datum.payload for row in rows] == [b"1", b"2", b"3"]
        assert on_disk(path, tmp_path) == [(1, b"2")]
        assert not before.done()
        await take(buffer, rows)
        assert await before
        assert await behind
        assert buffer.counts["spared"] == 2


async def test_what_needs_the_disk_holds_up_its_own_device_alone(tmp_path: Path) -> None:
    async with direct(tmp_path / "buffer.db", commit_delay_ms=60_000) as buffer:
        with_mark = append(buffer, [entry(b"1")], [Mark("mqtt/1", b"x")])
        behind = append(buffer, [entry(b"2")])
        end = append(buffer, [])
        others = [append(buffer, [entry(b"%d" % number, "43")]) for number in range(3)]
        rows = await live(buffer, 3)
        assert [row.datum.payload for row in rows] == [b"0", b"1", b"2"]
        await take(buffer, rows)
        assert [await other for other in others] == [True] * 3
        assert not with_mark.done()
        assert not behind.done()
        assert not end.done(), "whoever waits for all that came before waits for them"
        await buffer.close()
        assert await with_mark
        assert await behind
        assert await end
    async with opened(tmp_path / "buffer.db") as buffer:
        _, found = await buffer.read(Position(0, 0), 10)
        assert [row.datum.payload for row in found] == [b"1", b"2"], "in the order of their device"


def test_who_needed_the_disk_once_is_free_again_while_others_need_it(tmp_path: Path) -> None:
    """A site with a busy sensor that always needs it would send all others to the card, one after the other."""
    queue, topics = CommitQueue(BufferSettings(path=tmp_path / "buffer.db", commit_delay_ms=0)), frozenset([TOPIC])
    for device in ("once", "busy", "busy"):
        queue.append([entry(b"1", device)], [Mark("mqtt/1", b"x")], None, PLAIN)
    assert list(queue.admissible(topics)) == []
    due = queue.due(time.monotonic(), 1_000_000, closing=False, full=False, topics=topics)
    queue.settled(due.readings[:2])
    for device in ("once", "busy"):
        queue.append([entry(b"2", device)], (), None, PLAIN)
    free = []
    for each in queue.admissible(topics):
        queue.admitted(each)
        free += [one.series.device for one in each.entries]
    assert free == ["once"]


async def test_what_went_to_the_disk_is_acknowledged_behind_earlier_readings_of_its_device(tmp_path: Path) -> None:
    """It may hold a resend of them, and nobody has them yet."""
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        first = append(buffer, [entry(b"1", sequence=1)])
        await live(buffer, 1)
        again = append(buffer, [changed(entry(b"1", sequence=1)), entry(b"2", sequence=2)], [Mark("mqtt/1", b"x")])
        rows = await live(buffer, 2)
        assert on_disk(path, tmp_path) == [(1, b"2")]
        assert await is_held(again, 0.1)
        await take(buffer, rows[:1])
        assert await first
        assert await again
        assert buffer._queue._queued_bytes == 0


async def test_a_sensor_that_nothing_is_known_of_disturbs_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one sensor's window cannot be read, readings of another one stay in order, whether they need the disk."""
    admit, asked = BufferFile.admit, list[Append]()

    def admit_known(file: BufferFile, appended: Append) -> list[Row]:
        if appended.entries[0].series.device == "unknown":
            asked.append(appended)
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return admit(file, appended)

    async with direct(tmp_path / "buffer.db") as buffer:
        both_wait = threading.Event()
        busy = asyncio.create_task(buffer.run(lambda _: both_wait.wait(5)))
        await asyncio.sleep(0.01)
        monkeypatch.setattr(BufferFile, "admit", admit_known)
        append(buffer, [entry(b"0", "unknown")])
        append(buffer, [entry(b"1")])
        append(buffer, [entry(b"2")], [Mark("mqtt/1", b"x")])
        both_wait.set()
        assert await busy
        await asyncio.sleep(0.3)
        assert len(asked) < 5, "it is asked each second, not as fast as it answers"
        monkeypatch.undo()
        buffer._queue.look_again()
        rows = await live(buffer, 3)
        assert [row.datum.payload for row in rows] == [b"0", b"1", b"2"]


async def test_what_kafka_refuses_of_the_front_is_in_the_quarantine_alone(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        outcome, other = append(buffer, [entry(b"1")]), append(buffer, [entry(b"2", "43")])
        rows = await live(buffer, 2)
        report = changed(entry(b"report", "gateway"), quarantined=input_of("broker-refused", b"1", "42", "42"))
        await buffer.quarantine(buffer.id, [report], rows[:1])
        assert await asyncio.wait_for(outcome, patience(5))
        assert [row.datum.payload for row in await live(buffer, 2)] == [b"2", b"report"]
        assert on_disk(path, tmp_path) == [(2, b"report")]
        assert not other.done()


async def test_rows_of_both_places_are_read_in_order_and_their_times_told(tmp_path: Path) -> None:
    async with direct(tmp_path / "buffer.db") as buffer:
        for number in range(4):
            append(buffer, [entry(b"%d" % number, f"{number}", received_us=number)])
        await live(buffer, 4)
        assert await asyncio.wait_for(append(buffer, [entry(b"4", received_us=9)], [Mark("mqtt/1", b"x")]), patience(5))
        buffer._outgoing.forget_newest()
        _, found = await buffer.read(Position(buffer.lane.number, -1), 3)
        assert [row.datum.payload for row in found] == [b"0", b"1", b"2"]
        ((*_, event_to_us, _, received_us, rows),) = map(astuple, (await buffer.outstanding()).lanes)
        assert (received_us, event_to_us, rows) == (0, 9, 5)


async def test_a_window_is_written_again_before_a_row_that_it_lacked_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        outcome = append(buffer, [entry(b"1", sequence=1)])
        rows = await live(buffer, 1)

        def write(file: BufferFile) -> None:
            file.write_front()
            file.save_windows()

        await buffer.transact(write)
        assert await outcome
        await take(buffer, rows)
        buffer._queue.delete_now()
        await buffer.answers()
        await buffer.answers()
        assert on_disk(path, tmp_path) == []
        after = cut(path, tmp_path)
    async with opened(after) as buffer:
        assert await store(buffer, [entry(b"1", sequence=1)])
        assert buffer.counts["duplicate"] == 1


async def test_what_is_deleted_takes_no_windows_of_the_front_to_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        for number in range(20):
            append(buffer, [entry(b"1", f"d{number}", sequence=1)])
        await take(buffer, await live(buffer, 20))
        assert await append(buffer, [entry(b"2", sequence=1)], [Mark("mqtt/1", b"x")])
        await take(buffer, await live(buffer, 1, after=19))
        await until(lambda: not on_disk(path, tmp_path))
        with closing(sqlite3.connect(path)) as file:
            assert file.execute("SELECT device FROM device_run").fetchall() == [("42",)]
    async with direct(path) as buffer:
        assert await append(buffer, [entry(b"1", f"d{number}", sequence=1) for number in range(20)])
        assert buffer.counts["duplicate"] == 20, "a clean end has written them"


async def test_a_resend_is_acknowledged_with_its_first_copy(tmp_path: Path) -> None:
    async with direct(tmp_path / "buffer.db") as buffer:
        first, again = (append(buffer, [entry(b"1", sequence=7)]) for _ in range(2))
        rows = await live(buffer, 1)
        assert await is_held(again, 0.2)
        await take(buffer, rows)
        assert await first
        assert await again
        assert buffer.counts["duplicate"] == 1
        later = append(buffer, [entry(b"1", sequence=7)])
        assert await asyncio.wait_for(later, patience(5)), "of this copy nothing has to go to Kafka"


async def test_a_cut_forgets_no_resend_of_what_nobody_acknowledged(tmp_path: Path) -> None:
    """The windows on disk must not know a row that only the front has: its resend would be taken for stored."""
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        done = append(buffer, [entry(b"1", sequence=1)])
        await take(buffer, await live(buffer, 1))
        assert await done
        held = append(buffer, [entry(b"2", sequence=2)])
        await live(buffer, 1, after=0)
        await buffer.transact(lambda file: file.save_windows())
        assert not held.done()
        after = cut(path, tmp_path)
    async with opened(after) as buffer:
        assert await store(buffer, [entry(b"1", sequence=1), entry(b"2", sequence=2)])
        assert buffer.counts["duplicate"] == 1
        assert buffer.state.rows == 1


async def test_a_lane_that_was_cut_off_ends_behind_what_is_durable(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    told: list[int] = []

    def report(kind: str, _lane: object, rows: int, _reason: str) -> Entry:
        if kind == "lane-closed":
            told.append(rows)
        return entry(b"report")

    async with direct(path) as buffer:
        for number in range(10):
            append(buffer, [entry(b"%d" % number)])
        rows = await live(buffer, 10)
        await take(buffer, [*rows[:5], *rows[6:8]])
        await buffer.transact(lambda file: file.keep_marks([Mark("a", b"b")]))
        after = cut(path, tmp_path)
    async with opened(path) as buffer:
        await buffer.transact(lambda file: file.report_lanes("start", report))
    async with opened(after) as buffer:
        assert buffer.state.rows == 0
        await buffer.transact(lambda file: file.report_lanes("start", report))
    assert told == [10, 5]


async def test_a_start_after_a_cut_tells_what_may_be_lost_and_asks_for_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        after = cut(path, tmp_path)
    async with opened(path) as buffer:
        assert await losses(buffer) == []
        assert await marks_of(buffer, AHEAD_MARK) == {}
    # The disk may have failed for hours by then.
    began_us = boottime_us() + 7_200_000_000
    monkeypatch.setattr(file_module, "boottime_us", lambda: began_us)
    async with opened(after) as buffer:
        (loss,) = await losses(buffer)
        assert (loss.reason, loss.count, loss.device) == ("unclean-end", 0, "")
        assert loss.first_us <= began_us <= loss.last_us, "its end may have been at any time before this start"
        assert await marks_of(buffer, OFFSETS_BEHIND.key) == {OFFSETS_BEHIND.key: b"1"}
        assert await marks_of(buffer, AHEAD_MARK) == {}


SENSOR = "42", "1-00000001"


def numbered(*sequences: int) -> list[Entry]:
    return [entry(b"%d" % sequence, sequence=sequence) for sequence in sequences]


async def test_after_a_cut_the_numbers_that_kafka_alone_has_are_not_known(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        assert await buffer.recall(*SENSOR, range(5, 9)) == Recalled(frozenset(), 5, 0)
        done = append(buffer, numbered(*range(5, 12)))
        await take(buffer, await live(buffer, 7))
        assert await done
        known = Recalled(frozenset(range(5, 12)), 5, 0)
        assert await buffer.recall(*SENSOR, range(12, 12)) == known
        after = cut(path, tmp_path)
    async with opened(path) as buffer:
        assert await buffer.recall(*SENSOR, range(20, 30)) == known, "a clean end stores them"
    async with opened(after) as buffer:
        # Not from 30 on, as the sensor has given its numbers up to 29 to somebody before.
        assert await buffer.recall(*SENSOR, range(20, 30)) == Recalled(frozenset(), 5, 30)
        assert await store(buffer, numbered(20, 21))
    async with opened(after) as buffer:
        assert await buffer.recall(*SENSOR, range(30, 40)) == Recalled(frozenset({20, 21}), 5, 30)
        # Of another run, any may have been in Kafka too.
        assert await buffer.recall("42", "2-00000001", range(3, 7)) == Recalled(frozenset(), 3, 7)


async def test_a_run_that_a_cut_made_unknown_is_so_at_every_start_until_it_is_heard(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        await buffer.recall(*SENSOR, range(1))
        after = cut(path, tmp_path)
    # Its first number was 0: none is another gateway's.
    for _ in range(2):
        async with opened(after):
            pass
    async with opened(after) as buffer:
        assert await buffer.recall(*SENSOR, range(8, 9)) == Recalled(frozenset(), 0, 9)


async def test_of_a_sensor_from_before_runs_were_noted_the_file_knows_all_until_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with opened(path) as buffer:
        assert await store(buffer, numbered(3, 4))
    async with direct(path) as buffer:
        after = cut(path, tmp_path)
    async with opened(path) as buffer:
        assert await buffer.recall(*SENSOR, range(9, 12)) == Recalled(frozenset({3, 4}), 3, 0)
    async with opened(after) as buffer:
        assert await buffer.recall(*SENSOR, range(9, 12)) == Recalled(frozenset({3, 4}), 3, 12)


async def test_a_run_is_noted_by_one_commit(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        await buffer.recall(*SENSOR, range(1))
        before = path.with_name("buffer.db-wal").read_bytes()
        for _ in range(3):
            await buffer.recall(*SENSOR, range(1))
        assert path.with_name("buffer.db-wal").read_bytes() == before


async def test_the_first_row_after_a_long_rest_is_a_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        # The last commit was long ago.
        buffer._commits._committed_s -= SIGN_OF_LIFE_S
        before = path.with_name("buffer.db-wal").read_bytes()
        outcome = append(buffer, [entry(b"1")])
        await live(buffer, 1)
        await until(lambda: path.with_name("buffer.db-wal").read_bytes() != before)
        assert on_disk(path, tmp_path) == []
        assert not outcome.done()


async def test_a_dead_disk_stops_nothing_that_kafka_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_loop, "REFUSED_AFTER_S", 0.5)
    path = tmp_path / "buffer.db"
    async with direct(path, disk_after_ms=100) as buffer:
        done = append(buffer, [entry(b"0", sequence=0)])
        await take(buffer, await live(buffer, 1))
        assert await done
        file = buffer.attachment.file
        await buffer.run(lambda _: file.connection.execute("PRAGMA query_only = ON").fetchone())
        outcome = append(buffer, [entry(b"1", sequence=1), entry(b"new", "another")])
        rows = await live(buffer, 2, after=0)
        await until(lambda: failure(buffer) is not None)
        assert not buffer.cannot_store
        assert not outcome.done()
        await take(buffer, rows)
        assert await outcome
        refused = append(buffer, [entry(b"2")], [Mark("mqtt/1", b"x")])
        assert not await asyncio.wait_for(refused, patience(5)), "a mark has to be on the disk"
        late = append(buffer, [entry(b"3")])
        await take(buffer, await live(buffer, 1, after=rows[-1].sequence))
        assert await late
        await buffer.run(lambda _: file.connection.execute("PRAGMA query_only = OFF").fetchone())
        await until(lambda: failure(buffer) is None)


async def test_on_a_dead_disk_known_sensors_and_new_ones_are_taken_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sensors that sleep deeply have a new boot each time that they wake."""
    monkeypatch.setattr(file_module, "UNSAVED_RUNS_MAX", 40)
    monkeypatch.setattr(file_module, "UNSAVED_SERIES_MAX", 20)
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        await buffer.recall(*SENSOR, range(1))
        file = buffer.attachment.file
        await buffer.run(lambda _: file.connection.execute("PRAGMA query_only = ON").fetchone())
        with pytest.raises(BufferFileError):
            await buffer.recall("sleeper", "none", range(1))
        waiting = append(buffer, [entry(b"held", "slow", sequence=0, received_us=0)])
        (held,) = await live(buffer, 1)
        for number in range(1, 101):
            sleeper = entry(b"x", f"sleeper-{number}", sequence=0, boot=f"1-{number:08}", received_us=number)
            known = entry(b"%d" % number, sequence=number, received_us=number)
            outcomes = [append(buffer, [sleeper]), append(buffer, [known])]
            rows = [row for row in await live(buffer, 3) if row.datum.payload != b"held"]
            await take(buffer, rows)
            assert await asyncio.wait_for(asyncio.gather(*outcomes), patience(5)) == [True, True]
            if number % 25 == 0:
                with pytest.raises(BufferFileError):
                    await buffer.transact(lambda same: same.save_windows())
        assert failure(buffer) is not None
        assert file._runs.unsaved <= 41
        assert file.series.unsaved <= 21
        for again in (known, entry(b"held", "slow", sequence=0)):
            append(buffer, [again])
            await until(lambda: len(buffer._queue.waiting()) == 0)
        assert buffer.counts["duplicate"] == 2, "these it must know"
        with pytest.raises(BufferFileError):
            await buffer.recall(*SENSOR, range(1))
        await buffer.run(lambda _: file.connection.execute("PRAGMA query_only = OFF").fetchone())
        await until(lambda: failure(buffer) is None)
        recalled = await buffer.recall(*SENSOR, range(101, 103))
        assert recalled.known_from == 103, "nobody may say what Kafka alone has of a run that was forgotten"
        await take(buffer, [held])
        assert await waiting


async def test_a_topic_that_takes_nothing_holds_up_no_other_while_the_disk_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path, disk_after_ms=100) as buffer:
        await buffer.go_direct(frozenset([TOPIC, OTHER]), buffer.id)
        known = [append(buffer, [to_other(b"known", 9)]), append(buffer, [entry(b"known", sequence=9)])]
        await take(buffer, await live(buffer, 2))
        assert await asyncio.gather(*known) == [True, True]
        with dead_disk(path):
            stuck = append(buffer, [to_other(b"0", sequence=0)])
            await live(buffer, 1, after=1)
            again = append(buffer, [to_other(b"0", sequence=0)])
            of_both = append(buffer, [to_other(b"1", sequence=1), entry(b"2", "both")])
            rows = await live(buffer, 2, after=2)
            await buffer.go_direct(frozenset([TOPIC]), buffer.id)
            await until(lambda: failure(buffer) is not None)
            served = append(buffer, [entry(b"3")])
            await take(buffer, rows[1:])
            await take(buffer, await live(buffer, 1, after=4))
            assert await asyncio.wait_for(served, patience(5))
            for held in (stuck, again, of_both):
                assert not held.done(), "of it or of its first copy, nobody has a row"
        assert all(await asyncio.wait_for(asyncio.gather(stuck, again, of_both), patience(10)))


def to_other(payload: bytes, sequence: int) -> Entry:
    made = entry(payload, "other", sequence)
    return changed(made, series=replace(made.series, topic=OTHER))


async def test_a_disk_that_cannot_be_read_keeps_nothing_in_memory_from_kafka(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "TAIL_ROWS_MAX", 5)
    path = tmp_path / "buffer.db"
    async with direct(path, disk_after_ms=100) as buffer:
        known = append(buffer, [entry(b"0", sequence=0)])
        await take(buffer, await live(buffer, 1))
        assert await known
        await buffer.transact(lambda _: None)
        with dead_disk(path):
            outcomes = []
            for number in range(1, 11):
                outcomes.append(append(buffer, [entry(b"%d" % number, sequence=number)]))
                await buffer.answers()
            await until(lambda: failure(buffer) is not None)
            assert not buffer._outgoing.admits, "the forwarder has fallen too far behind"
            rows = await live(buffer, 6)
            assert (await series_of(buffer, rows[0].series)).topic == TOPIC
            await take(buffer, rows)
            await take(buffer, await live(buffer, 10 - len(rows), after=rows[-1].sequence))
            assert await asyncio.wait_for(asyncio.gather(*outcomes), patience(10)) == [True] * 10
            # A new session begins from the beginning.
            assert (await buffer.read(Position(buffer.lane.number, -1), 10))[1] == []
            assert (await buffer.read_backlog(Position(0, -1), 10, buffer.lane.number))[1] == []
            later = append(buffer, [entry(b"11", sequence=11)])
            await take(buffer, await live(buffer, 1))
            assert await asyncio.wait_for(later, patience(10))


async def test_what_a_disk_that_could_not_be_read_holds_goes_out_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "buffer.db"
    async with opened(path, disk_after_ms=100) as buffer:
        assert await store(buffer, [entry(b"on disk")])
        kafka = KafkaSettings(bootstrap=("kafka:9092",))
        clocks = NewClocks(0.0, DeviceClocks(), boottime_us)
        for_reading = Supply(buffer, kafka, lambda: (), clocks)

        async def given(supply: Supply) -> list[bytes]:
            supply.follow()
            live_rows, backlog = await supply.next(lambda _: 1e9, None, False)
            return [row.datum.payload for row in (*live_rows, *backlog)]

        assert await given(for_reading) == [b"on disk"]
        assert await given(for_reading) == []
        await buffer.go_direct(frozenset([TOPIC]), buffer.id)
        with dead_disk(path):
            monkeypatch.setattr(commit_loop, "READ_AGAIN_S", 0.5)
            append(buffer, [entry(b"in memory")])
            await until(lambda: failure(buffer) is not None)
            supply = Supply(buffer, kafka, lambda: (), clocks)
            assert await given(supply) == [b"in memory"]
        rewinds = buffer.attachment.rewinds
        await until(lambda: buffer.attachment.rewinds > rewinds)
        assert await given(supply) == [b"on disk", b"in memory"], "nobody has acknowledged any"


async def test_a_file_that_looks_damaged_stays_where_the_disk_takes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite calls it corrupt if a disk answers EIO."""
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        outcome, former = append(buffer, [entry(b"1")]), buffer.id
        with monkeypatch.context() as dead:

            def fail(_: int) -> None:
                raise OSError(errno.EIO, "the disk is dead")

            dead.setattr(os, "fsync", fail)
            await buffer.run(lambda _: buffer._commits._fail(corruption("a page cannot be read")))
            await take(buffer, await live(buffer, 1))
            assert await outcome
        assert buffer.id == former
        assert not list(tmp_path.glob("*.corrupt-*"))


async def test_a_commit_that_fails_forgets_no_series_that_were_known(tmp_path: Path) -> None:
    """A disk that cannot be read would not tell their numbers again."""
    path = tmp_path / "buffer.db"
    async with direct(path, disk_after_ms=100) as buffer:
        append(buffer, [entry(b"0")])
        await take(buffer, await live(buffer, 1))
        with dead_disk(path):
            # Another sensor's readings need the disk, which has not seen it yet.
            append(buffer, [entry(b"1", "new")], [Mark("mqtt/1", b"x")])
            await until(lambda: failure(buffer) is not None)
            known = await buffer.run(lambda file: dict(file.series.numbers))
            assert [series.device for series in known] == ["42"]


async def test_input_that_is_taken_in_again_is_gone_only_once_a_copy_is_durable(tmp_path: Path) -> None:
    """It may be a copy of a row that only the front has."""
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        reading = entry(b"1", sequence=1)
        input_ = input_of("no-route", b"1", "42", "device/42/thermo", device_boot="1-00000001", device_sequence=1)
        assert await store(buffer, [changed(entry(b"report", "gateway"), quarantined=input_)])
        await take(buffer, await live(buffer, 1))
        append(buffer, [reading])
        await live(buffer, 1, after=0)
        (number,) = [number for number, *_ in await buffer.run(lambda file: file.quarantine.of_topics(0, 10))]
        await buffer.transact(lambda file: file.requeue({number: reading}, {}))
        assert await buffer.run(lambda file: file.quarantine.rows) == 0
        assert buffer.counts["duplicate"] == 1
        assert b"1" in [payload for _, payload in on_disk(path, tmp_path)]


async def test_what_is_quarantined_from_the_front_is_on_the_card_and_not_spared(tmp_path: Path) -> None:
    async with direct(tmp_path / "buffer.db") as buffer:
        outcome, spared = append(buffer, [entry(b"refused")]), append(buffer, [entry(b"taken", "43")])
        rows = await live(buffer, 2)
        await take(buffer, rows[1:])
        assert await spared
        input_ = input_of("topic-forbidden", b"refused", "42", "device/42/thermo")
        report = changed(entry(b"report", "gateway"), quarantined=input_)
        await buffer.quarantine(buffer.id, [report], rows[:1])
        assert await outcome
        assert buffer.counts["spared"] == 1
        assert len(buffer.attachment.file.front) == 0


async def test_a_replaced_file_takes_the_front_again_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        assert (await buffer.recall(*SENSOR, range(1))).known_from == 0
        outcome = append(buffer, [entry(b"1"), entry(b"2")])
        rows = await live(buffer, 2)
        former = buffer.id
        await buffer.run(lambda _: buffer._commits._fail(corruption("found just now")))
        assert await asyncio.wait_for(outcome, patience(10))
        buffer.confirm(former, spans_of(rows))
        _, found = await buffer.read(Position(0, -1), 10)
        assert [(row.datum.payload, row.datum.doubt) for row in found] == [(b"1", 1), (b"2", 1)]
        assert (await buffer.recall(*SENSOR, range(8, 9))).known_from == 9, "what Kafka alone had went with the file"


async def test_a_salvage_misses_no_rows_that_only_kafka_has(tmp_path: Path) -> None:
    async with direct(tmp_path / "buffer.db") as buffer:
        assert await asyncio.wait_for(append(buffer, [entry(b"1", "43")], [Mark("mqtt/1", b"x")]), patience(5))
        outcomes = [append(buffer, [entry(b"%d" % number)]) for number in range(10)]
        rows = await live(buffer, 11)
        await take(buffer, rows[1:])
        assert await asyncio.gather(*outcomes) == [True] * 10
        assert await asyncio.wait_for(append(buffer, [entry(b"2", "43")], [Mark("mqtt/2", b"x")]), patience(5))
        await buffer.run(lambda _: buffer._commits._fail(corruption("found just now")))
        await until(lambda: len(buffer.attachment.salvaged) > 0)
        assert buffer.attachment.salvaged[0].progress.taken == 2
        await until(lambda: not any(salvage.is_alive() for salvage in buffer.attachment._salvages))
        assert await losses(buffer) == []


async def test_at_a_clean_end_the_front_is_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        outcome = append(buffer, [entry(b"1", sequence=1)])
        await live(buffer, 1)
    assert outcome.result()
    async with opened(path) as buffer:
        assert buffer.state.rows == 1
        assert await store(buffer, [entry(b"1", sequence=1)])
        assert buffer.counts["duplicate"] == 1


async def test_what_fills_half_of_the_memory_is_committed_at_once(tmp_path: Path) -> None:
    async with direct(tmp_path / "buffer.db", queue_bytes_max=100_000) as buffer:
        outcomes = []
        for _ in range(100):
            outcomes.append(append(buffer, [entry(bytes(10_000))]))
            await buffer.answers()
        assert await asyncio.wait_for(outcomes[80], patience(5)), "Kafka has taken nothing, and the disk all of it"
        assert all(outcome.result() for outcome in outcomes[:80])


async def test_what_a_clean_end_refuses_is_no_duplicate_when_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes the windows yet, and must not be told of rows that it does not take."""
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        outcome = append(buffer, [entry(b"1", sequence=1)])
        await live(buffer, 1)
        monkeypatch.setattr(Room, "is_full", lambda *_: True)
    assert not outcome.result()
    monkeypatch.undo()
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"1", sequence=1)])
        assert buffer.counts["duplicate"] == 0
        assert buffer.state.rows == 1


async def test_a_full_disk_refuses_what_needs_it_and_lets_others_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_loop, "REFUSED_AFTER_S", 1.0)
    async with direct(tmp_path / "buffer.db") as buffer:
        monkeypatch.setattr(Room, "is_full", lambda *_: True)
        with_mark, behind = append(buffer, [entry(b"1")], [Mark("mqtt/1", b"x")]), append(buffer, [entry(b"2")])
        await take(buffer, await live(buffer, 1))
        assert await behind
        assert not with_mark.result()
        monkeypatch.undo()


async def test_once_there_is_room_again_nothing_that_needs_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_loop, "REFUSED_AFTER_S", 0.5)
    async with direct(tmp_path / "buffer.db") as buffer:
        with monkeypatch.context() as full:
            full.setattr(Room, "used_and_left", lambda *_: (0, 0))
            assert not await asyncio.wait_for(append(buffer, [entry(b"1")], [Mark("mqtt/1", b"x")]), patience(5))
        await until(lambda: not buffer.state.full)
        assert await asyncio.wait_for(append(buffer, [entry(b"2")], [Mark("mqtt/2", b"x")]), patience(5))


async def test_a_sensor_that_nothing_is_known_of_holds_up_nobody_on_a_disk_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_loop, "REFUSED_AFTER_S", 0.5)
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        done = append(buffer, [entry(b"0", sequence=0)])
        await take(buffer, await live(buffer, 1))
        assert await done
        await buffer.run(lambda file: file.connection.execute("PRAGMA shrink_memory").fetchone())
        with dead_disk(path):
            rebooted = append(buffer, [entry(b"1", boot="2-00000002", sequence=0)])
            known = append(buffer, [entry(b"2")])
            await take(buffer, await live(buffer, 1, after=0))
            assert await known
            assert not rebooted.result()
            assert failure(buffer) is not None, "a commit of nothing tells nothing of the disk"


async def test_what_no_broker_answers_for_does_not_fill_the_memory_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sensor that waits for no acknowledgement sends on, and neither Kafka nor the disk takes it."""
    monkeypatch.setattr(commit_loop, "REFUSED_AFTER_S", 1.0)
    path = tmp_path / "buffer.db"
    async with opened(path, queue_bytes_max=100_000, disk_after_ms=100) as buffer:
        await buffer.read(Position(buffer.lane.number, -1), 100)
        await buffer.go_direct(frozenset([TOPIC, OTHER]), buffer.id)
        known = [append(buffer, [to_other(b"known", 0)]), append(buffer, [entry(b"known")])]
        await take(buffer, await live(buffer, 2))
        assert await asyncio.gather(*known) == [True, True]
        with dead_disk(path):
            stuck = [append(buffer, [to_other(bytes(1_000), 1)])]
            await until(lambda: failure(buffer) is not None)
            async with asyncio.timeout(patience(30)):
                while not stuck[0].done():
                    stuck.append(append(buffer, [to_other(bytes(1_000), 1 + len(stuck))]))
                    taken = append(buffer, [entry(b"taken")])
                    while not taken.done():
                        await asyncio.sleep(0.05)
                        _, found = await buffer.read(Position(buffer.lane.number, -1), 1_000)
                        await take(buffer, [row for row in found if row.datum.payload == b"taken"])
                    assert taken.result()
            assert not stuck[0].result()
        await until(lambda: failure(buffer) is None)


async def test_an_event_that_no_disk_knows_is_tried_each_second(tmp_path: Path) -> None:
    """The disk gives no page, but takes commits: one of another event must not follow upon the other."""
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        await buffer.run(lambda file: file.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
        await buffer.run(lambda file: file.connection.execute("PRAGMA shrink_memory").fetchone())
        # The pages of a commit are in memory. Those of the series are not.
        await buffer.transact(lambda file: file.probe())
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        with dead_disk(path, ""), capture_logs() as logs:
            before, begun_s, changes = await buffer.run(lambda file: file.connection.total_changes), time.monotonic(), 0
            buffer.append_own(entry(b"event", "gateway"), told.set_result)
            async with asyncio.timeout(patience(30)):
                while not changes:
                    await asyncio.sleep(1.5)
                    changes = await buffer.run(lambda file: file.connection.total_changes) - before
        assert changes <= 6 * (time.monotonic() - begun_s)
        # After each try the buffer is failing for a few milliseconds only: too short to be waited for.
        assert any(each["event"].startswith("buffer cannot be read or written") for each in logs)
        await take(buffer, await live(buffer, 1))
        assert await told


async def test_many_rows_of_the_front_make_no_buffer_full(tmp_path: Path) -> None:
    async with direct(tmp_path / "buffer.db", bytes_max=4_000_000) as buffer:
        outcomes = [append(buffer, [entry(bytes(800))]) for _ in range(500)]
        await live(buffer, 500)
        buffer.end_direct()
        later = append(buffer, [entry(b"later")])
        assert await asyncio.wait_for(later, patience(10))
        assert all(outcome.result() for outcome in outcomes)
        assert not buffer._state_watch.has_said_full


async def test_at_its_end_the_forwarder_does_not_ask_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with direct(tmp_path / "buffer.db") as buffer:
        done = append(buffer, [entry(b"0")])
        rows = await live(buffer, 1)
        await take(buffer, rows)
        assert await done
        monkeypatch.setattr(BufferFile, "read", None)
        assert await buffer.read(Position(buffer.lane.number, 0), 10) == (buffer.id, [])


async def test_commits_take_their_time_while_the_forwarder_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else sensors that send whatever is taken would keep it behind, and every row on the disk."""
    monkeypatch.setattr(tail, "TAIL_ROWS_MAX", 0)
    # A commit of this file holds two of these rows.
    async with direct(tmp_path / "buffer.db", commit_delay_ms=600, bytes_max=1_000_000) as buffer:
        append(buffer, [entry(b"behind which nothing is kept in memory")])
        await live(buffer, 1)
        first, *_, last = [append(buffer, [entry(bytes(40_000))]) for _ in range(4)]
        assert await first
        assert await is_held(last, 0.4)
        assert await last


async def test_a_damaged_file_of_a_start_that_was_cut_off_tells_of_it_too(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with direct(path) as buffer:
        after = cut(path, tmp_path)
    with closing(sqlite3.connect(after)) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = file.execute("SELECT rootpage FROM sqlite_master WHERE name = 'meta'").fetchone()
    with after.open("r+b") as damaged:
        damaged.seek((page - 1) * 4096)
        damaged.write(b"\xff" * 4096)
    async with opened(after) as buffer:
        await until(lambda: bool(buffer.attachment.salvaged) or bool(buffer.attachment.set_aside))
        assert OFFSETS_BEHIND.key in await marks_of(buffer, OFFSETS_BEHIND.key)
        assert await marks_of(buffer, AHEAD_MARK) == {}
        assert "unclean-end" in {loss.reason for loss in await losses(buffer)}
