"""Rows stand in two tables, and are read in one order. A file of a former version goes on as it is."""

import asyncio
import random
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.buffer import schema
from gateway.buffer.insert import insert_rows
from gateway.buffer.read_rows import read_rows
from gateway.buffer.room import row_bytes
from gateway.buffer.rows import (
    LANE_MAX,
    SEQUENCE_BITS,
    SEQUENCE_MAX,
    START,
    Position,
    Row,
    Span,
    of_sent,
    sent_of,
)
from gateway.buffer.salvage.aside import is_unused
from gateway.buffer.status import read_status
from gateway.buffer.stored_rows import (
    delete_rows,
    first_after,
    first_of,
    last_before,
    last_of,
    newest_rows_after,
    rows_after,
    rows_within,
)
from gateway.commands.buffer_reading import depths, readings
from gateway.commands.buffer_reading import opened as opened_to_read
from gateway.commands.buffer_verify import verify
from gateway.reading import Datum
from gateway.settings import BufferSettings
from gateway.user_properties import text_of
from tests.support.buffers import confirm, entry, losses, opened, rows, store
from tests.support.waiting import until

VERSIONS = range(1, len(schema.MIGRATIONS))
"""Former schemas."""
FORMER_VERSIONS = range(1, 4)
"""Schemas that had readings in the table that is `former_reading` now."""
LANES, ROWS = 2, 300
"""Lanes of a former version's file, and rows of each."""
PAGE_BYTES = 4096


# -- places -----------------------------------------------------------------------------------------

lanes = st.one_of(st.integers(1, 3), st.integers(1, LANE_MAX))
sequences = st.one_of(st.integers(0, 6), st.integers(0, SEQUENCE_MAX))
positions = st.builds(Position, lanes, sequences)


@given(positions, positions)
def test_places_keep_the_order_of_lane_and_sequence(one: Position, other: Position) -> None:
    assert (one < other) == (one.place < other.place)
    assert Position.at(one.place) == one
    # SQLite's greatest key, and no place is negative.
    assert 0 < one.place < 2**63
    assert START.place < one.place


@given(lanes, sequences, sequences)
def test_the_places_of_a_span_are_those_of_its_lane_alone(lane: int, first: int, last: int) -> None:
    low, high = Span(lane, first, last).places
    assert (Position.at(low), Position.at(high)) == (Position(lane, first), Position(lane, last))
    assert Span(lane, first, last + SEQUENCE_MAX).places[1] == Position(lane, SEQUENCE_MAX).place


def new_file() -> sqlite3.Connection:
    file = sqlite3.connect(":memory:", isolation_level=None)
    for statement in (statement for migration in schema.MIGRATIONS for statement in migration):
        file.execute(statement)
    return file


def put(file: sqlite3.Connection, former: Iterable[Position], present: Iterable[Position]) -> None:
    rest = "1, 1, NULL, 0, NULL, NULL, NULL, x'31', 0, NULL"
    file.executemany(f"INSERT INTO former_reading VALUES (?, ?, {rest})", former)
    file.executemany(f"INSERT INTO reading VALUES (?, {rest})", [(position.place,) for position in present])


@given(st.sets(positions, max_size=12), st.randoms(use_true_random=False), positions, sequences, st.integers(0, 8))
def test_both_tables_are_read_as_one(
    there: set[Position], chance: random.Random, asked: Position, sequence: int, limit: int
) -> None:
    former = {position for position in there if chance.random() < 0.5}
    for after in (asked, START, *sorted(there)[:1]):
        with closing(new_file()) as file:
            put(file, former, there - former)

            def positions_of(table: str, *parameters: int, file: sqlite3.Connection = file) -> list[Position]:
                return [Position(*found) for found in file.execute(f"SELECT lane, sequence FROM {table}", parameters)]

            behind = sorted(position for position in there if position > after)
            assert positions_of(rows_after("lane, sequence"), after.place, limit) == behind[:limit]
            newest = behind[::-1][:limit]
            assert positions_of(newest_rows_after("lane, sequence"), after.place, limit) == newest
            assert first_after(file, after) == min(behind, default=None)
            assert last_before(file, after) == max((each for each in there if each < after), default=None)
            span = Span(asked.lane, min(asked.sequence, sequence), max(asked.sequence, sequence))
            of_lane = sorted(each for each in there if each.lane == span.lane)
            of_span = [each for each in of_lane if span.first <= each.sequence <= span.last]
            assert sorted(positions_of(rows_within("lane, sequence"), *span.places)) == of_span
            ends = file.execute(f"SELECT {first_of('?1', 'sequence')}, {last_of('?1', 'sequence')}", (asked.lane,))
            assert ends.fetchone() == ((of_lane[0][1], of_lane[-1][1]) if of_lane else (None, None))
            assert delete_rows(file, span) == len(of_span)
            left = positions_of(rows_after("lane, sequence"), START.place, 100)
            assert left == sorted(there - {*of_span})


@given(
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9))).map(text_of),
)
def test_a_row_gives_back_the_sensors_time_and_its_properties(time_us: int | None, properties: str | None) -> None:
    datum = Datum(received_us=1, payload=b"21.5", device_time_us=time_us, properties=properties)
    with closing(new_file()) as file:
        insert_rows(file, [Row(1, 0, 1, datum)])
        assert read_rows(file, START, 9, Position(1, 0)) == [Row(1, 0, 1, datum)]
    sent = sent_of(datum)
    assert of_sent(sent) == (time_us, properties) if isinstance(sent, str) else sent == time_us


# -- files of former versions -----------------------------------------------------------------------


def payload_of(lane: int, sequence: int) -> bytes:
    return b"%d/%d" % (lane, sequence)


def place_in(version: int) -> tuple[str, str]:
    """The columns of a row's place in a schema, and an INSERT's values for a lane and a sequence."""
    if version in FORMER_VERSIONS:
        return "lane, sequence", "?, ?"
    return "doubt, place", f"0, ? << {SEQUENCE_BITS} | ?"


def former_file(path: Path, version: int, rows_each: int = ROWS) -> list[bytes]:
    """A file of a former version, whose lanes end at a crash; return the payloads in order."""
    with (
        mock.patch.object(schema, "MIGRATIONS", schema.MIGRATIONS[:version]),
        closing(schema.connect(path)) as file,
    ):
        series = entry().series
        file.execute("BEGIN")
        file.execute("INSERT INTO boot (boot_id, offset_us, error_us) VALUES ('before', 1700000000000000, 1000)")
        file.execute(
            "INSERT INTO series (topic, key, device, subject, type, content_type) VALUES (?, ?, ?, ?, ?, ?)",
            series.columns,
        )
        payloads = []
        place, values = place_in(version)
        for lane in range(1, LANES + 1):
            file.execute("INSERT INTO lane (name, boot_id) VALUES (?, 'before')", (f"{lane:012x}",))
            for sequence in range(rows_each):
                payloads.append(payload_of(lane, sequence))
                file.execute(
                    f"INSERT INTO reading ({place}, series, received_us, event_error_us, device_boot,"
                    f" device_sequence, payload) VALUES ({values}, 1, ?, 0, '1-00000001', ?, ?)",
                    (lane, sequence, lane * 1_000 + sequence, (lane - 1) * rows_each + sequence, payloads[-1]),
                )
        file.execute("COMMIT")
    return payloads


@pytest.fixture(params=FORMER_VERSIONS)
def former(request: pytest.FixtureRequest, path: Path) -> list[bytes]:
    return former_file(path, request.param)


async def test_rows_of_a_former_version_come_first_and_with_their_identity(path: Path, former: list[bytes]) -> None:
    new = [b"new %d" % number for number in range(5)]
    async with opened(path) as buffer:
        assert buffer.state.rows == len(former)
        assert await store(buffer, [entry(payload) for payload in new])
        found = await rows(buffer)
        assert [row.datum.payload for row in found] == former + new
        assert [payload_of(row.lane, row.sequence) for row in found[: len(former)]] == former
        pending = (await buffer.outstanding()).lanes
        assert [(lane.lane, lane.rows) for lane in pending[:LANES]] == [("000000000001", ROWS), ("000000000002", ROWS)]
        assert [lane.event_to_us for lane in pending[:LANES]] == [1_000 + ROWS - 1, 2_000 + ROWS - 1]
        status = read_status(path)
        assert (status.rows, status.lanes) == (len(former) + len(new), LANES + 1)
        assert status.oldest is not None
        assert status.oldest.boottime_us == 1_000


async def test_rows_of_a_former_version_drain(path: Path, former: list[bytes]) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"new")])
        found = await rows(buffer)
        await confirm(buffer, [row for row in found if row.sequence % 3])
        stay = [row.datum.payload for row in found if not row.sequence % 3]
        assert [row.datum.payload for row in await rows(buffer)] == stay
        await until(lambda: buffer.state.rows == len(stay))
    async with opened(path) as buffer:
        assert [row.datum.payload for row in await rows(buffer)] == stay
        assert buffer.state.rows == len(stay)
        await confirm(buffer, [row for row in await rows(buffer) if row.datum.payload in former])
        await until(lambda: buffer.state.rows == 1)
        left = "SELECT (SELECT count(*) FROM former_reading), (SELECT count(*) FROM reading)"
        assert await buffer.run(lambda file: file.connection.execute(left).fetchone()) == (0, 1)


async def test_a_resend_of_a_row_of_a_former_version_is_recognised(path: Path, former: list[bytes]) -> None:
    async with opened(path) as buffer:
        for number in (0, 2 * ROWS - 1):
            assert await store(buffer, [entry(former[number], sequence=number)])
        # A window reaches so far only.
        assert buffer.counts["duplicate"] + buffer.counts["below-window"] == 2
        assert buffer.counts["duplicate"] > 0


async def test_rows_of_a_former_version_are_dropped_first(path: Path, former: list[bytes]) -> None:
    async with opened(path, when_full="drop-oldest", bytes_max=1_000_000, fair_from=1.0) as buffer:
        new = [b"%050000d" % number for number in range(24)]
        for payload in new:
            assert await store(buffer, [entry(payload)])
        left = [row.datum.payload for row in await rows(buffer)]
        assert left == (former + new)[-len(left) :]
        assert len(left) < len(former) + len(new)
        lost = [loss for loss in await losses(buffer) if loss.device == "42"]
        assert sum(loss.count for loss in lost) == len(former) + len(new) - len(left)


async def test_rows_of_a_former_version_count_for_their_devices_share(path: Path, former: list[bytes]) -> None:
    async with opened(path, bytes_max=1_000_000, fair_from=0.05) as buffer:

        def held() -> int:
            return buffer.attachment.file.shares.held["42"].bytes

        assert await store(buffer, [entry()])
        await until(lambda: not buffer.attachment.file.shares.is_counting)
        beside = held() - sum(row_bytes(len(payload)) for payload in [*former, b"21.5"])
        await confirm(buffer, (await rows(buffer))[: len(former)])
        await until(lambda: buffer.state.rows == 1)
        assert held() == beside + row_bytes(4)
        # What a series takes.
        assert 0 < beside < 10_000


async def test_the_commands_show_the_rows_of_both_tables(path: Path, former: list[bytes]) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"new", sequence=10_000)])
    with opened_to_read(path) as db:
        assert [reading.payload for reading in readings(db)] == [payload.decode() for payload in [*former, b"new"]]
        newest = [reading.payload for reading in readings(db, newest_first=True)]
        assert newest == [payload.decode() for payload in [*former, b"new"]][::-1]
        assert sum(depth.rows for depth in depths(db).devices) == len(former) + 1
    assert all(verdict.ok for verdict in verify(path, BufferSettings(path=path)))
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("DELETE FROM former_reading WHERE lane = 2 AND sequence IN (7, 8)")
        file.execute("UPDATE former_reading SET lane = 77 WHERE lane = 2 AND sequence = 9")
    told = {verdict.subject: verdict.words for verdict in verify(path, BufferSettings(path=path)) if not verdict.ok}
    assert "3 sequence numbers (7 to 9)" in told["lane 000000000002"]
    assert "readings refer to lane number 77, which is not there" in told["references"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_first_start_writes_a_few_pages_however_many_rows_there_are(path: Path, version: int) -> None:
    former_file(path, version, rows_each=20_000)
    size = path.stat().st_size
    with closing(schema.connect(path)):
        assert size > 200 * PAGE_BYTES
        assert path.stat().st_size == size
        assert path.with_name(f"{path.name}-wal").stat().st_size < 40 * PAGE_BYTES


def test_a_file_whose_rows_are_all_of_a_former_version_is_not_unused(path: Path, former: list[bytes]) -> None:
    """A start that goes on with a replacement deletes unused files."""
    with closing(schema.connect(path)):
        assert former
    assert not is_unused(path)


# -- numbers that are used up ------------------------------------------------------------------------


async def test_a_file_without_lane_numbers_is_replaced(path: Path) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"before")])
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'lane'", (LANE_MAX,))
    async with opened(path) as buffer:
        await until(lambda: bool(buffer.attachment.salvaged))
        assert await store(buffer, [entry(b"after")])
        assert {row.datum.payload for row in await rows(buffer)} == {b"before", b"after"}


async def test_a_lane_without_numbers_ends_with_its_file(path: Path) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"before")])
        former, lanes = buffer.id, buffer.attachment.file.lanes

        def use_up() -> None:
            count = lanes._state.counts[lanes.current.number]
            lanes._state.counts[lanes.current.number] = count.plus(SEQUENCE_MAX - count.next, 0)

        await buffer.run(lambda _: use_up())
        assert await store(buffer, [entry(b"after")])
        await until(lambda: bool(buffer.attachment.salvaged))
        assert buffer.id != former
        assert {row.datum.payload for row in await rows(buffer)} == {b"before", b"after"}


# -- the end of the process at any moment -----------------------------------------------------------

WORK = f"""
import sys, time
from collections import Counter
from pathlib import Path
from gateway.buffer.file import BufferFile
from gateway.buffer.rows import Span
from gateway.clock.gateway_clock import BootClock
from gateway.settings import BufferSettings
from tests.support.buffers import entry

path, deleted = Path(sys.argv[1]), int(sys.argv[2])
print("starting", flush=True)
file = BufferFile(BufferSettings(path=path), "boot", lambda: BootClock.constant(0, 1), Counter())
for step in range(60):
    with file.transaction():
        file.insert([entry(b"new %d" % (deleted + step))])
        file.deletion.delete_whole(Span(1 + (deleted + step) // {ROWS}, 0, (deleted + step) % {ROWS}))
    print(deleted + step + 1, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
async def test_a_kill_while_a_former_file_drains_costs_nothing(path: Path, version: int) -> None:
    former, chance, done = former_file(path, version), random.Random(version), 0  # noqa: S311 - repeatable
    for _ in range(8):
        command = [sys.executable, "-c", WORK, str(path), str(done)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"starting\n"
        await asyncio.sleep(chance.random() * 0.2)
        process.kill()
        told = await process.stdout.read()
        await process.wait()
        done = max(done, *map(int, told.split()), 0)
        async with opened(path) as buffer:
            left = [row.datum.payload for row in await rows(buffer)]
        # The last commit may have been made, and not told.
        done = max(done, *(int(payload.split()[1]) + 1 for payload in left if payload.startswith(b"new")), 0)
        assert left == [*former[done:], *(b"new %d" % number for number in range(done))]
    assert done > 0
