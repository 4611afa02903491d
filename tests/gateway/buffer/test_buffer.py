"""The buffer: on disk before it is acknowledged, in order, once, and gone only when confirmed."""

import asyncio
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from msgspec.structs import replace

from gateway.buffer import schema, state
from gateway.buffer.buffer import Buffer
from gateway.buffer.commit_queue import DELETE_DELAY_S
from gateway.buffer.deletion import DELETED_SPANS_MAX, Deletion
from gateway.buffer.file import OFFSETS_BEHIND
from gateway.buffer.lanes import LANE_PREFIX
from gateway.buffer.losses import LOSS_TYPE, loss_body
from gateway.buffer.read_rows import READ_BYTES_MAX
from gateway.buffer.room import Room
from gateway.buffer.rows import START, Entry, Lane, Loss, Position, Series, Span, spans_of
from gateway.buffer.status import read_status
from gateway.clock.kernel_clock import boottime_us
from gateway.reading import BufferFileError, Doubt, Mark
from gateway.settings import BufferSettings
from tests.support.buffers import (
    BOOT,
    CLOCK,
    FORMER,
    append,
    changed,
    confirm,
    entry,
    entry_of,
    failure,
    fill,
    input_of,
    is_full,
    is_held,
    lane_of,
    marks_of,
    opened,
    rows,
    series_of,
    store,
    storing_in,
)
from tests.support.restarted_buffer import RestartedBuffer
from tests.support.waiting import patience, until


async def test_what_was_acknowledged_is_in_the_file(path: Path) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"1"), entry(b"2")])
        # Another connection sees only what is committed.
        with sqlite3.connect(path) as other:
            stored = other.execute("SELECT payload FROM reading ORDER BY sequence").fetchall()
        other.close()
    assert stored == [(b"1",), (b"2",)]


async def test_what_a_file_is_grown_by_at_its_beginning_is_not_taken_for_a_days_writing(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [entry(b"1")])
        wal = tmp_path / "buffer.db-wal"
        assert buffer.usage.disk_bytes < wal.stat().st_size // 2, "the WAL alone was grown by more"


async def test_rows_stay_until_confirmed_and_go_afterwards(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        await store(buffer, [entry(b"%d" % number) for number in range(5)])
        kept = await rows(buffer)
        await confirm(buffer, kept[:3])
        await store(buffer, [entry(b"5")])
        assert [row.datum.payload for row in await rows(buffer)] == [b"3", b"4", b"5"]
        assert buffer.state.rows == 3


async def test_confirmed_rows_go_without_a_later_insert_too(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        await store(buffer, [entry()])
        (row,) = await rows(buffer)
        buffer.confirm(buffer.id, spans_of([row]))
        async with asyncio.timeout(DELETE_DELAY_S + 5):
            while buffer.state.rows:
                await asyncio.sleep(0.05)


async def test_a_confirmation_of_another_file_deletes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        await store(buffer, [entry()])
        buffer.confirm("0000000000000000", [Span(9, 0, 9)])
        await store(buffer, [entry()])
        assert len(await rows(buffer)) == 2


async def test_sequences_are_dense_in_a_lane_and_each_start_has_a_lane_of_its_own(path: Path) -> None:
    lanes = []
    for _ in range(3):
        async with opened(path) as buffer:
            await store(buffer, [entry(), entry()])
            kept = await rows(buffer)
            lanes.append((await lane_of(buffer, kept[-1].lane)).name)
    assert len(set(lanes)) == 3
    assert [(row.lane, row.sequence) for row in kept] == [
        (lane, sequence) for lane in sorted({row.lane for row in kept}) for sequence in (0, 1)
    ]


async def test_a_drained_file_never_repeats_an_identity(path: Path) -> None:
    seen: set[tuple[str, int]] = set()
    for _ in range(3):
        async with opened(path) as buffer:
            await store(buffer, [entry()])
            (row,) = await rows(buffer)
            identity = ((await lane_of(buffer, row.lane)).name, row.sequence)
            assert identity not in seen
            seen.add(identity)
            buffer.confirm(buffer.id, spans_of([row]))


async def test_a_retransmission_is_acknowledged_again_and_stored_once_across_restarts(path: Path) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"a", sequence=0), entry(b"b", sequence=1)])
        assert await store(buffer, [entry(b"b", sequence=1)])
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"b", sequence=1), entry(b"c", sequence=2)])
        assert [row.datum.payload for row in await rows(buffer)] == [b"a", b"b", b"c"]
        assert buffer.counts["duplicate"] == 1


async def test_a_rebooted_sensor_starts_at_zero_again_and_loses_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        for boot in ("1-00000001", "2-00000001", "2-0000beef"):
            assert await store(buffer, [entry(b"same", sequence=0, boot=boot)])
        assert len(await rows(buffer)) == 3
        status = read_status(tmp_path / "buffer.db")
        assert [device.device for device in status.devices] == ["42"]


async def test_the_same_identity_with_another_payload_is_stored_flagged_and_counted(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        await store(buffer, [entry(b"a", sequence=0), entry(b"b", sequence=0), entry(b"c", sequence=1)])
        assert [(row.datum.payload, row.datum.doubt) for row in await rows(buffer)] == [
            (b"a", 0),
            (b"b", Doubt.CONFLICT),
            (b"c", 0),
        ]
        assert buffer.counts["conflict"] == 1


async def test_a_full_buffer_holds_what_comes_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, fair_from=1.0) as buffer:
        stored, held = await fill(buffer)
        behind = append(buffer, [entry(b"behind")])
        assert is_full(buffer)
        assert buffer.cannot_store
        assert await is_held(held)
        assert buffer.state.bytes_used < 1_000_000
        kept = await rows(buffer)
        assert len(kept) == stored
        buffer.confirm(buffer.id, spans_of(kept))
        assert await asyncio.wait_for(held, patience(10))
        assert await asyncio.wait_for(behind, patience(10))
        assert [len(row.datum.payload) for row in await rows(buffer)] == [50_000, len(b"behind")]
        assert not buffer.cannot_store


async def test_what_is_held_when_the_buffer_closes_was_not_stored(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, fair_from=1.0) as buffer:
        stored, held = await fill(buffer)
    assert await held is False
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, fair_from=1.0) as buffer:
        assert len(await rows(buffer)) == stored


async def test_marks_alone_need_no_room(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, fair_from=1.0) as buffer:
        assert await append(buffer, [entry(b"qos 2")], [Mark("mqtt/qos2/a/1", b"")])
        _, held = await fill(buffer)
        kept = await rows(buffer)
        # Full by the bound, and nothing waits: the exchange can be ended.
        buffer.confirm(buffer.id, spans_of(kept[:2]))
        assert await asyncio.wait_for(held, patience(10))
        assert await asyncio.wait_for(append(buffer, [], [Mark("mqtt/qos2/a/1", None)]), patience(10))
        assert await marks_of(buffer, "mqtt/") == {}


async def test_marks_are_kept_exactly_with_their_readings(path: Path) -> None:
    async with opened(path) as buffer:
        assert await append(buffer, [entry(b"1")], [Mark("mqtt/qos2/a/1", b"x"), Mark("broker/b", b"y")])
        await fail_next_commit(buffer)
        second = append(buffer, [entry(b"2")], [Mark("mqtt/qos2/a/2", b"")])
        assert await is_held(second, 0.3)
        assert await marks_of(buffer, "mqtt/") == {"mqtt/qos2/a/1": b"x"}
        await mend(buffer)
        assert await asyncio.wait_for(second, patience(10))
    async with opened(path) as buffer:
        assert await marks_of(buffer, "mqtt/") == {"mqtt/qos2/a/1": b"x", "mqtt/qos2/a/2": b""}
        assert await marks_of(buffer, "") == {"mqtt/qos2/a/1": b"x", "mqtt/qos2/a/2": b"", "broker/b": b"y"}


async def test_the_gateways_own_words_have_room_in_a_full_buffer(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, fair_from=1.0) as buffer:
        _, held = await fill(buffer)
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        buffer.append_own(entry(b"event"), outcome.set_result)
        assert await asyncio.wait_for(outcome, patience(10))
        assert not held.done()
        held.cancel()


async def test_what_is_too_much_to_be_held_is_refused_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", queue_bytes_max=100_000, commit_delay_ms=300) as buffer:
        outcomes = [append(buffer, [entry(bytes(60_000))]) for _ in range(6)]
        assert [await outcome for outcome in outcomes[2:]] == [False] * 4
        assert not outcomes[0].done()
        assert [await outcome for outcome in outcomes[:2]] == [True, True]
        assert len(await rows(buffer)) == 2


async def test_drop_oldest_makes_room_and_accounts_for_what_went(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, when_full="drop-oldest", fair_from=1.0) as buffer:
        for sequence in range(3_000):
            number = entry(b"%0500d" % sequence, device=f"d{sequence % 3}", sequence=sequence, received_us=sequence)
            append(buffer, [number])
            if sequence % 100 == 99:
                assert await append(buffer, [])
        kept = await rows(buffer)
        assert not buffer.cannot_store
        assert buffer.state.bytes_used <= 1_000_000
        assert [int(row.datum.payload) for row in kept] == list(range(3_000 - len(kept), 3_000))
        losses: list[Loss] = []
        await buffer.report_losses(lambda loss: losses.append(loss) or entry(b"report"))  # type: ignore[func-returns-value]
    assert sum(loss.count for loss in losses) == 3_000 - len(kept) == buffer.counts["dropped"]
    assert {loss.device for loss in losses} == {"d0", "d1", "d2"}
    assert {loss.reason for loss in losses} == {"buffer-full"}
    first = min(losses, key=lambda loss: loss.device)
    assert (first.first_sequence, first.first_us) == (0, 0)
    assert first.last_sequence == first.last_us == 3 * (first.count - 1)


async def test_a_dropped_loss_record_is_counted_again(tmp_path: Path) -> None:
    gateway = Series("gateway-events", "gw1", "", "loss", LOSS_TYPE, "application/json")

    def report(loss: Loss) -> Entry:
        return entry_of(gateway, json.dumps(loss_body(loss)).encode(), 5)

    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, when_full="drop-oldest", fair_from=1.0) as buffer:
        buffer.count_loss(Loss("42", "refused-qos0", BOOT, 7, 100, 200))
        assert await buffer.report_losses(report) == 1
        for _ in range(60):
            await append(buffer, [entry(bytes(50_000))])
        losses: list[Loss] = []
        await buffer.report_losses(lambda loss: losses.append(loss) or entry(b"report"))  # type: ignore[func-returns-value]
        (again,) = (loss for loss in losses if loss.reason == "refused-qos0")
        assert (again.device, again.count, again.first_us, again.last_us) == ("42", 7, 100, 200)


async def test_readings_that_waited_too_long_are_dropped_and_counted(tmp_path: Path) -> None:
    now_us = boottime_us()
    async with opened(tmp_path / "buffer.db", age_max_s=3600) as buffer:
        old = [entry(b"old", sequence=number, received_us=now_us - 7_200_000_000) for number in range(3)]
        await store(buffer, [*old, entry(b"young", received_us=now_us)])
        async with asyncio.timeout(patience(10)):
            while buffer.counts["dropped"] < 3:
                buffer._commits._age_due_s = 0.0
                await store(buffer, [entry(b"ride", received_us=now_us)])
        assert {row.datum.payload for row in await rows(buffer)} == {b"young", b"ride"}


async def test_the_disk_of_others_counts(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", free_bytes_min=2**40, fair_from=1.0) as buffer:
        # The free pages that the file has are used up first.
        stored, held = await fill(buffer, 1_000_000)
        assert stored > 0
        assert buffer.cannot_store
        held.cancel()


async def test_a_disk_that_others_have_emptied_is_noticed_although_nothing_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        monkeypatch.setattr(Room, "used_and_left", lambda *_: (0, 0))
        buffer.append_own(entry(b"event"), lambda _: None)
        await until(lambda: buffer.cannot_store)
        monkeypatch.undo()
        await until(lambda: not buffer.cannot_store)
        await fail_next_commit(buffer)
        buffer.append_own(entry(b"event"), lambda _: None)
        await until(lambda: buffer.cannot_store)
        await mend(buffer)
        await until(lambda: not buffer.cannot_store)


async def test_room_is_told_of_although_nothing_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(state, "ROOM_SAID_AFTER_S", 0.2)
    async with opened(tmp_path / "buffer.db", bytes_max=1_000_000, fair_from=1.0) as buffer:
        stored, held = await fill(buffer)
        buffer.confirm(buffer.id, spans_of(await rows(buffer)))
        assert await asyncio.wait_for(held, patience(10))
        await until(lambda: "buffer has room again" in capsys.readouterr().out)
        assert stored


async def test_a_reading_that_no_disk_can_store_costs_nobody_else_anything(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", commit_delay_ms=50) as buffer:
        good = append(buffer, [entry(b"before")])
        bad = append(buffer, [entry(b"", received_us=2**70)])
        after = append(buffer, [entry(b"after")])
        assert (await good, await bad, await after) == (True, False, True)
        assert [row.datum.payload for row in await rows(buffer)] == [b"before", b"after"]
        assert failure(buffer) is None


async def test_quarantined_input_is_kept_whole_and_bounded(path: Path) -> None:
    async with opened(path, quarantine_rows_max=3) as buffer:
        for number in range(5):
            await store(
                buffer,
                [replace(entry(b"report"), quarantined=input_of("no-route", b"raw %d" % number, "", "kitchen"))],
            )
        assert buffer.counts["quarantine-overflow"] == 2
        assert len(await rows(buffer)) == 5
    with sqlite3.connect(path) as file:
        kept = [payload for (payload,) in file.execute("SELECT payload FROM quarantine ORDER BY number")]
    file.close()
    assert kept == [b"raw 2", b"raw 3", b"raw 4"]


async def test_a_commit_that_fails_is_not_acknowledged_and_leaves_no_trace(tmp_path: Path) -> None:
    """A real failure: SQLite may not let the file grow beyond the pages it has (as on a full disk)."""
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [entry(b"before", sequence=0)])
        await buffer.run(lambda file: file.connection.execute("PRAGMA max_page_count = 1").fetchone())
        held = append(buffer, [entry(bytes(20_000_000), sequence=1)])
        await until(lambda: failure(buffer))
        assert await is_held(held)
        assert len(await rows(buffer)) == 1
        await buffer.run(lambda file: file.connection.execute("PRAGMA max_page_count = 1000000").fetchone())
        # The window must not believe that sequence 1 was on disk.
        assert await asyncio.wait_for(held, patience(10))
        assert failure(buffer) is None
        (first,) = await rows(buffer)  # the other is more than one read gives
        (second,) = await rows(buffer, Position(first.lane, first.sequence))
        assert (first.sequence, second.sequence, len(second.datum.payload)) == (0, 1, 20_000_000)


async def test_a_file_that_is_no_database_is_set_aside_and_never_deleted(tmp_path: Path, path: Path) -> None:
    path.write_bytes(b"this is not a database" * 100)
    async with opened(path) as buffer:
        assert await store(buffer, [entry()])
    (aside,) = tmp_path.glob("buffer.db.corrupt-*")
    assert aside.read_bytes().startswith(b"this is not a database")


async def test_a_file_that_turns_out_corrupt_is_replaced_while_running(tmp_path: Path, path: Path) -> None:
    async with opened(path) as buffer:
        await store(buffer, [entry(bytes(2_000)) for _ in range(100)])
        first_id = buffer.id
        await buffer.run(lambda file: file.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
        await buffer.run(lambda file: file.connection.execute("PRAGMA cache_size = 0"))
        with path.open("r+b") as file:
            for page in range(3, 40):
                file.seek(page * 4096)
                file.write(b"\xff" * 4096)
        stored = False
        for _ in range(3):
            stored = stored or await store(buffer, [entry(b"after", sequence=0)])
        assert stored
        assert buffer.id != first_id
        assert [row.datum.payload for row in await rows(buffer)] == [b"after"]
    assert list(tmp_path.glob("buffer.db.corrupt-*"))


def damage(path: Path) -> None:
    """Overwrite every page of the main file but the first with 0xFF, as a dying card might."""
    pages = path.stat().st_size // 4096
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096 * (pages - 1))


async def test_damage_that_a_read_finds_is_answered_and_the_buffer_goes_on(tmp_path: Path, path: Path) -> None:
    async with opened(path) as buffer:
        await store(buffer, [entry(bytes(2_000)) for _ in range(100)])
        await buffer.run(lambda file: file.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
        await buffer.run(lambda file: file.connection.execute("PRAGMA shrink_memory").fetchone())
        damage(path)
        with pytest.raises(BufferFileError):
            await rows(buffer)
        assert await store(buffer, [entry(b"after")])
        (aside,) = buffer.attachment.set_aside
        assert aside.rows == 100
        assert list(tmp_path.glob(f"{aside.name}*"))


async def test_damage_that_the_start_finds_is_set_aside_too(tmp_path: Path, path: Path) -> None:
    async with opened(path) as buffer:
        await store(buffer, [entry(bytes(2_000)) for _ in range(100)])
    damage(path)
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"after")])
        assert b"after" in {row.datum.payload for row in await rows(buffer)}
    assert list(tmp_path.glob("buffer.db.corrupt-*"))


async def test_a_look_up_in_a_replaced_file_is_an_error_and_not_a_guess(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        for look_up in (series_of(buffer, 99), lane_of(buffer, 99), buffer.boot_clock("another")):
            with pytest.raises(BufferFileError, match="begun anew"):
                await look_up


async def fail_next_commit(buffer: Buffer) -> None:
    """Let SQLite refuse to write, as on a file system that has gone read-only."""
    await buffer.run(lambda file: file.connection.execute("PRAGMA query_only = 1").fetchone())


async def mend(buffer: Buffer) -> None:
    await buffer.run(lambda file: file.connection.execute("PRAGMA query_only = 0").fetchone())


async def test_a_rolled_back_quarantine_leaves_nothing_behind(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        await store(buffer, [entry(b"poison", "42")])
        report = replace(entry(b"report", "gw1"), quarantined=input_of("record-too-large", b"poison", "", "kitchen"))
        # Fails at its very end: a trigger refuses what the transaction writes last.
        connection = buffer.attachment.file.connection
        await buffer.run(
            lambda _: connection.execute(
                "CREATE TEMP TRIGGER refuse BEFORE INSERT ON main.reading BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        )
        with pytest.raises(BufferFileError):
            await buffer.quarantine(buffer.id, [report], [])
        await buffer.run(lambda _: connection.execute("DROP TRIGGER refuse"))
        await store(buffer, [entry(b"other", "43")])
        await buffer.quarantine(buffer.id, [report], [])
        kept = await rows(buffer)
        devices = [(await series_of(buffer, row.series)).device for row in kept]
        assert list(zip([row.datum.payload for row in kept], devices, strict=True)) == [
            (b"poison", "42"),
            (b"other", "43"),
            (b"report", "gw1"),
        ]
        assert [row.sequence for row in kept] == [0, 1, 2]
        assert buffer.state.rows == 3


async def test_a_failed_first_commit_does_not_lose_the_floor_of_pending_times(path: Path) -> None:
    async with opened(path) as buffer:
        await fail_next_commit(buffer)
        held = append(buffer, [entry(received_us=7)])
        assert await is_held(held)
        await mend(buffer)
        assert await asyncio.wait_for(held, patience(10))
    async with opened(path) as buffer:
        (lane,) = (await buffer.outstanding()).lanes
        assert lane.event_from_us == 7


async def test_a_deletion_that_cannot_be_committed_is_not_tried_in_a_hot_loop(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        await store(buffer, [entry()])
        (row,) = await rows(buffer)
        await fail_next_commit(buffer)
        tried: list[str] = []
        await buffer.run(lambda file: file.connection.set_trace_callback(tried.append))
        buffer.confirm(buffer.id, spans_of([row]))
        await asyncio.sleep(DELETE_DELAY_S + 1.5)
        assert 1 <= sum("BEGIN" in statement for statement in tried) <= 3
        await mend(buffer)
        async with asyncio.timeout(patience(10)):
            while buffer.state.rows:
                await asyncio.sleep(0.05)


async def test_two_streams_of_a_device_may_each_count_their_own_sequences(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        thermo = entry(b"1", sequence=0)
        light = replace(thermo, series=replace(thermo.series, topic="device-light"))
        await store(buffer, [thermo, light, thermo, light])
        assert len(await rows(buffer)) == 2


async def test_a_window_of_another_version_is_begun_anew_and_stops_nobody(path: Path) -> None:
    async with opened(path) as buffer:
        await store(buffer, [entry(b"a", sequence=0)])
    with sqlite3.connect(path) as file:
        file.execute("UPDATE device_run SET window = x'00'")
    file.close()
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"b", sequence=1)])


async def test_quarantined_bytes_never_keep_readings_out(path: Path) -> None:
    async with opened(path, bytes_max=2_000_000) as buffer:
        for number in range(40):
            unroutable = replace(entry(b"report"), quarantined=input_of("no-route", bytes(60_000), "", "kitchen"))
            assert await store(buffer, [unroutable]), number
        kept = await rows(buffer)
        buffer.confirm(buffer.id, spans_of(kept))
        assert await store(buffer, [entry()])
        assert not is_full(buffer)
        assert buffer.counts["quarantine-overflow"] == 37
    assert read_status(path).quarantined == 3


async def test_one_read_is_bounded_by_bytes_too(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        await store(buffer, [entry(bytes(60_000)) for _ in range(100)])
        first = await rows(buffer)
        assert len(first) == READ_BYTES_MAX // 60_000
        more = await rows(buffer, Position(first[-1].lane, first[-1].sequence))
        assert more[0].sequence == first[-1].sequence + 1


async def test_series_that_nothing_refers_to_are_forgotten_under_a_steady_flow(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.buffer.series.SERIES_MAX", 50)
    async with opened(path) as buffer:
        for number in range(300):
            await store(buffer, [entry(device=f"d{number}")])
            kept = await rows(buffer)
            if len(kept) > 5:  # something always waits
                await confirm(buffer, kept[:-5])
    with sqlite3.connect(path) as file:
        (series,) = file.execute("SELECT count(*) FROM series").fetchone()
    file.close()
    assert series < 120


async def test_a_second_daemon_is_kept_off(path: Path) -> None:
    async with opened(path):
        with pytest.raises(BufferFileError, match="in use by another sluice"):
            Buffer(BufferSettings(path=path), BOOT, lambda: CLOCK).open()
        assert read_status(path).running
    assert not read_status(path).running


async def test_a_directory_that_is_not_there_is_explained(tmp_path: Path) -> None:
    with pytest.raises(BufferFileError, match="make the directory"):
        Buffer(BufferSettings(path=tmp_path / "none" / "buffer.db"), BOOT, lambda: CLOCK).open()


async def test_a_row_whose_key_is_damaged_does_not_end_forwarding(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [entry(b"%d" % number) for number in range(5)])
        former = buffer.id
        damaging = "UPDATE reading SET place = place | (1 << 39) WHERE sequence = 4"
        await buffer.run(lambda file: file.connection.execute(damaging).fetchone())
        with pytest.raises(BufferFileError):
            await rows(buffer)
        await until(lambda: buffer.id != former and bool(buffer.attachment.salvaged))
        assert [row.datum.payload for row in await rows(buffer)][:4] == [b"0", b"1", b"2", b"3"]
        # Nobody is told of the million million readings that would have stood between.
        assert (buffer.attachment.salvaged[0].progress.taken, buffer.attachment.salvaged[0].missing) == (5, 0)


async def test_large_payloads_are_read_some_at_a_time(tmp_path: Path) -> None:
    payloads = [bytes([number]) * 700_000 for number in range(8)] + [bytes(5_000_000)]
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [entry(payload) for payload in payloads])
        found, position = [], START
        while some := await rows(buffer, position):
            assert len(some) == 1 or sum(len(row.datum.payload) for row in some) <= READ_BYTES_MAX
            found += [row.datum.payload for row in some]
            position = Position(some[-1].lane, some[-1].sequence)
        assert found == payloads


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
async def test_whatever_the_umask_is_its_files_are_for_its_owner_alone(tmp_path: Path, umask: int, path: Path) -> None:
    before = os.umask(umask)
    try:
        async with opened(path) as buffer:
            await store(buffer, [entry()])
            await buffer.run(lambda _: buffer._commits._fail(schema.corruption("found just now")))
            await until(lambda: list(tmp_path.glob("buffer.db.corrupt-*.salvaged")))
            await store(buffer, [entry()])
            modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes.keys() >= {"buffer.db", "buffer.db-wal", "buffer.db-shm", "buffer.db.lock"}
    assert any(name.endswith(".salvaged") for name in modes)
    assert set(modes.values()) == {0o600}, modes


async def test_another_programs_database_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    before = path.read_bytes()
    with pytest.raises(BufferFileError, match="another program's database"):
        async with opened(path):
            pass
    assert path.read_bytes() == before


async def test_a_file_of_a_newer_version_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 99")
    file.close()
    with pytest.raises(BufferFileError, match="newer Sluice"):
        schema.connect(path)


async def test_pending_lanes_tell_the_earliest_event_time_until_drained(path: Path) -> None:
    async with opened(path) as buffer:
        late = changed(entry(received_us=900), event_us=100)
        await store(buffer, [entry(received_us=500), late])
    async with opened(path) as buffer:
        await store(buffer, [entry(received_us=1_000)])
        first, second = (await buffer.outstanding()).lanes
        assert (first.event_from_us, first.event_to_us) == (100, 900)
        assert (second.event_from_us, second.event_to_us) == (1_000, 1_000)
        kept = await rows(buffer)
        await confirm(buffer, kept)
        await store(buffer, [entry(received_us=2_000)])
        (only,) = (await buffer.outstanding()).lanes
        assert only.event_from_us == 2_000


def _lane_report(kind: str, lane: Lane, count: int, reason: str) -> Entry:
    return entry(f"{kind} {lane.name} {count} {reason}".encode(), "gateway")


async def test_a_lane_begins_and_the_one_before_it_is_closed_with_its_count(path: Path) -> None:
    """Lanes are read side by side: the live one from where it begins, those behind it up to there."""
    async with opened(path) as buffer:
        await buffer.transact(lambda file: file.report_lanes("start", _lane_report))
        first = buffer.lane
        await store(buffer, [entry(b"a"), entry(b"b")])
        await buffer.begin_lane("uplink-down", _lane_report)
        second = buffer.lane
        await store(buffer, [entry(b"c")])
        live = await rows(buffer, Position(second.number, -1))
        assert [row.datum.payload for row in live] == [
            b"lane-closed %s 3 uplink-down" % first.name.encode(),
            b"lane-opened %s 0 uplink-down" % second.name.encode(),
            b"c",
        ]
        assert [row.sequence for row in live] == [0, 1, 2]
        _, behind = await buffer.read_backlog(START, 100, second.number)
        assert [row.datum.payload for row in behind] == [b"lane-opened %s 0 start" % first.name.encode(), b"a", b"b"]
        assert buffer.state.backlog_lanes == 1
        await confirm(buffer, behind)
        await until(lambda: buffer.state.backlog_lanes == 0)
        assert buffer.state.rows == 3


async def test_a_killed_gateways_lane_is_closed_by_the_next_start_with_its_count(path: Path) -> None:
    """All of its rows may be gone by then: the count outlives them."""
    async with opened(path) as buffer:
        await buffer.transact(lambda file: file.report_lanes("start", _lane_report))
        first = buffer.lane
        await store(buffer, [entry(b"a"), entry(b"b")])
        await confirm(buffer, await rows(buffer))
        await until(lambda: buffer.state.rows == 0)
    for _ in range(2):
        # The second start finds that it was told.
        async with opened(path) as buffer:
            await buffer.transact(lambda file: file.report_lanes("start", _lane_report))
            told = [row.datum.payload for row in await rows(buffer)]
    assert told.count(b"lane-closed %s 3 start" % first.name.encode()) == 1


async def test_what_goes_with_a_confirmation_is_kept_with_its_deletion(path: Path) -> None:
    """Whatever makes the rows go, be it the check of their age, or the end: never the one without the other."""
    async with opened(path, age_max_s=3600.0) as buffer:
        assert await store(buffer, [entry(received_us=boottime_us()) for _ in range(10)])
        first, *_, last = await rows(buffer)
        buffer.keep([Mark("uplink/offset", b"10")])
        buffer.confirm(buffer.id, [Span(first.lane, first.sequence, last.sequence)])
        buffer._commits._age_due_s = 0.0
        await marks_of(buffer, "")  # wakes it
        await until(lambda: buffer.state.rows == 0)
        assert await marks_of(buffer, "uplink/") == {"uplink/offset": b"10"}
        buffer.keep([Mark("uplink/cluster", b"A")])
    async with opened(path) as buffer:
        assert await marks_of(buffer, "uplink/") == {"uplink/cluster": b"A", "uplink/offset": b"10"}


async def test_a_late_confirmation_of_a_replaced_file_takes_nothing_from_the_new_one(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        former = buffer.id
        buffer.keep([Mark("uplink/budget", b"1")])
        await buffer.run(lambda _: buffer._commits._fail(schema.corruption("found just now")))
        assert await store(buffer, [entry(b"new")])
        (row,) = await rows(buffer)
        buffer.keep([Mark("uplink/cluster", b"A"), Mark("uplink/offset", b"10")])
        buffer.confirm(former, [Span(row.lane, 0, 9)])
        buffer._queue._delete_due_s = 0.0
        assert await store(buffer, [entry(b"newer")])
        assert len(await rows(buffer)) == 2
        # All of it is true of Kafka, and of this box.
        assert await marks_of(buffer, "uplink/") == {
            "uplink/budget": b"1",
            "uplink/cluster": b"A",
            "uplink/offset": b"10",
            OFFSETS_BEHIND.key: OFFSETS_BEHIND.value,
        }


async def test_a_transaction_deletes_so_many_rows_at_the_most_however_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[int] = []
    delete_some = Deletion.delete_some

    def counted(deletion: Deletion, confirmed: Sequence[Span]) -> list[Span]:
        before = deletion.lanes.rows
        rest = delete_some(deletion, confirmed)
        deleted.append(before - deletion.lanes.rows)
        return rest

    monkeypatch.setattr(Deletion, "delete_some", counted)
    async with opened(tmp_path / "buffer.db") as buffer:
        for _ in range(3):
            assert await store(buffer, [entry() for _ in range(10_000)])
        lane = buffer.lane.number
        buffer.confirm(buffer.id, [Span(lane, sequence, sequence) for sequence in range(0, 30_000, 2)])
        buffer._queue._delete_due_s = 0.0
        assert await store(buffer, [entry()])
        await until(lambda: buffer.state.rows == 15_001)
        assert max(deleted) <= DELETED_SPANS_MAX
        assert [row.sequence % 2 for row in (await rows(buffer))[:1_000]] == [1] * 1_000


async def test_rows_between_those_that_wait_may_be_confirmed(path: Path) -> None:
    """A partition that takes none must not keep the others' rows: counts and times stay right, restarts too."""
    async with opened(path) as buffer:
        await store(buffer, [entry(b"%d" % number, received_us=100 + number) for number in range(6)])
        kept = await rows(buffer)
        await confirm(buffer, [kept[1], kept[2], kept[5]])
        assert [row.datum.payload for row in await rows(buffer)] == [b"0", b"3", b"4"]
        await until(lambda: buffer.state.rows == 3)
        (lane,) = (await buffer.outstanding()).lanes
        assert lane.event_from_us == 100
    async with opened(path) as buffer:
        assert buffer.state.rows == 3
        assert [row.datum.payload for row in await rows(buffer)] == [b"0", b"3", b"4"]


async def test_what_waits_for_its_commit_is_pending_too(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", commit_delay_ms=200) as buffer:
        buffer.append([entry(received_us=7)])
        (lane,) = (await buffer.outstanding()).lanes
        assert lane.event_from_us == 7


class BufferMachine(RestartedBuffer):
    """The buffer against a list: append, resend, mark, forward, confirm, fill, fail, restart, power cut."""

    def __init__(self) -> None:
        super().__init__()
        self.model: list[bytes] = []
        self.sent: dict[str, int] = {}
        self.identities: set[tuple[str, int]] = set()
        self.last: tuple[str, int] | None = None
        self.marks: dict[str, bytes] = {}
        self.reported: set[bytes] = set()
        self.start(bytes_max=1_000_000, fair_from=1.0)

    @rule(device=st.sampled_from(["a", "b"]), count=st.integers(1, 5))
    def append(self, device: str, count: int) -> None:
        first = self.sent.get(device, 0)
        payloads = [b"%s %d" % (device.encode(), first + offset) for offset in range(count)]
        entries = [entry(payload, device, first + offset) for offset, payload in enumerate(payloads)]
        assert self.loop.run_until_complete(store(self.buffer, entries))
        self.model += payloads
        self.sent[device] = first + count
        self.last = (device, first)

    @precondition(lambda self: self.last is not None)
    @rule()
    def resend(self) -> None:
        assert self.last is not None
        device, first = self.last
        entries = [
            entry(b"%s %d" % (device.encode(), sequence), device, sequence)
            for sequence in range(first, self.sent[device])
        ]
        assert self.loop.run_until_complete(store(self.buffer, entries))

    @rule(share=st.floats(0, 1))
    def forward_and_confirm(self, share: float) -> None:
        kept = self.loop.run_until_complete(rows(self.buffer))
        taken = kept[: int(len(kept) * share)]
        if taken:
            self.loop.run_until_complete(confirm(self.buffer, taken))
            del self.model[: len(taken)]
            self.loop.run_until_complete(store(self.buffer, [entry(b"rides", "c", self.sent.get("c", 0))]))
            self.sent["c"] = self.sent.get("c", 0) + 1
            self.model.append(b"rides")

    @rule(chosen=st.sets(st.integers(0, 30)))
    def confirm_some(self, chosen: set[int]) -> None:
        """Kafka has taken rows of some partitions, and none of others."""
        kept = self.loop.run_until_complete(rows(self.buffer))
        taken = [row for place, row in enumerate(kept) if place in chosen]
        if taken:
            self.loop.run_until_complete(confirm(self.buffer, taken))
            self.model = [payload for place, payload in enumerate(self.model) if place not in chosen]

    @rule()
    def begin_a_lane(self) -> None:
        """Its beginning and the end of all before it are reported in it, each once."""
        said: list[bytes] = []

        def report(kind: str, lane: Lane, count: int, reason: str) -> Entry:
            said.append(f"{kind} {lane.name} {count} {reason}".encode())
            return entry(said[-1], "gateway")

        former = self.buffer.lane
        self.loop.run_until_complete(self.buffer.begin_lane("why", report))
        self.model += said
        assert self.buffer.lane.number > former.number
        assert said[-1] == b"lane-opened %s 0 why" % self.buffer.lane.name.encode()
        assert not self.reported & {report.split(b" ")[1] for report in said[:-1]}, "each is closed once"
        self.reported |= {report.split(b" ")[1] for report in said[:-1]}
        assert former.name.encode() in self.reported

    @rule(key=st.sampled_from(["a", "b", "c"]), value=st.none() | st.binary(max_size=3))
    def mark(self, key: str, value: bytes | None) -> None:
        async def keep() -> bool:
            return await append(self.buffer, [], [Mark(key, value)])

        assert self.loop.run_until_complete(keep())
        if value is None:
            self.marks.pop(key, None)
        else:
            self.marks[key] = value

    @rule(count=st.integers(1, 3))
    def fail_and_mend(self, count: int) -> None:
        """The disk refuses for a while: what came in meanwhile is held, and stored in its order."""

        async def hold() -> None:
            await fail_next_commit(self.buffer)
            outcomes = [append(self.buffer, [entry(b"held %d" % number, "h")]) for number in range(count)]
            assert await is_held(outcomes[0], 0.02)
            await mend(self.buffer)
            self.buffer._queue._retry_s = 0.0
            await marks_of(self.buffer, "")  # wakes it
            assert await asyncio.wait_for(asyncio.gather(*outcomes), patience(10)) == [True] * count

        self.loop.run_until_complete(hold())
        self.model += [b"held %d" % number for number in range(count)]

    @rule(share=st.floats(0, 1))
    def fill_and_drain(self, share: float) -> None:
        """Full to the brim, then Kafka takes some: what was held follows behind what was there."""

        async def overflow() -> None:
            outcomes = [append(self.buffer, [entry(b"%0100000d" % number, "f")]) for number in range(12)]
            async with asyncio.timeout(patience(10)):
                while not self.buffer.cannot_store:
                    await asyncio.sleep(0.01)
            assert not outcomes[-1].done()
            self.model += [b"%0100000d" % number for number in range(12)]
            read = START
            while not outcomes[-1].done() or is_full(self.buffer) or self.buffer.state.rows > 5:
                kept = await rows(self.buffer, read)
                if not kept:
                    await asyncio.sleep(0.01)
                    continue
                assert [row.datum.payload for row in kept] == self.model[: len(kept)]
                taken = kept[: max(1, int(len(kept) * share))]
                self.buffer.confirm(self.buffer.id, spans_of(taken))
                del self.model[: len(taken)]
                read = Position(taken[-1].lane, taken[-1].sequence)
                await append(self.buffer, [], []) if outcomes[-1].done() else await asyncio.sleep(0.01)
            assert all(outcome.result() for outcome in outcomes)
            await until(lambda: self.buffer.state.rows == len(self.model))

        self.loop.run_until_complete(overflow())

    @rule(count=st.integers(1, 5))
    def power_cut_before_the_acknowledgement(self, count: int) -> None:
        """What was not acknowledged may be on disk or not, but all of one append or nothing."""
        payloads = [b"unacknowledged %d" % number for number in range(count)]

        async def send() -> None:
            append(self.buffer, [entry(payload, "u") for payload in payloads])
            await asyncio.sleep(0.001)

        self.loop.run_until_complete(send())
        self.power_cut()
        kept = [row.datum.payload for row in self.loop.run_until_complete(rows(self.buffer))]
        if kept != self.model:
            self.model += payloads

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        kept = self.loop.run_until_complete(rows(self.buffer))
        assert [row.datum.payload for row in kept] == self.model
        assert self.buffer.state.rows == len(self.model)
        kept_marks = self.loop.run_until_complete(marks_of(self.buffer, ""))
        assert {key: value for key, value in kept_marks.items() if not key.startswith(LANE_PREFIX)} == self.marks


class UpgradedMachine(BufferMachine):
    """The same of a buffer that was begun by a former version. What it stored there goes on."""

    def __init__(self) -> None:
        self.former = ExitStack()
        self.former.enter_context(storing_in(FORMER))
        self.is_upgraded = False
        super().__init__()

    @precondition(lambda self: not self.is_upgraded)
    @rule()
    def upgrade(self) -> None:
        self.restart()
        self.former.close()
        self.is_upgraded = True

    def teardown(self) -> None:
        self.former.close()
        super().teardown()


for machine in (BufferMachine, UpgradedMachine):
    machine.TestCase.settings = hypothesis_settings(max_examples=25, stateful_step_count=15)
TestBufferAgainstAList = pytest.mark.slow(BufferMachine.TestCase)
TestUpgradedBufferAgainstAList = pytest.mark.slow(UpgradedMachine.TestCase)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    import threading

    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "buffer"]
