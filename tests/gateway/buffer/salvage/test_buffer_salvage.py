"""A damaged buffer file: what can be read of it is taken over with its identity, and what cannot is counted."""

import asyncio
import random
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from gateway.buffer import read_rows
from gateway.buffer.attachment import Attachment
from gateway.buffer.buffer import Buffer
from gateway.buffer.file import BufferFile
from gateway.buffer.losses import has_losses
from gateway.buffer.rows import START, Loss, Position, Span, spans_of
from gateway.buffer.salvage import page_scan, salvage
from gateway.buffer.salvage.progress import SALVAGE_PREFIX, Progress, kept_marks
from gateway.buffer.schema import corruption
from gateway.buffer.sqlite_pages import INTERIOR_INDEX, INTERIOR_TABLE, LEAF_INDEX, LEAF_TABLE, PageError, btree_page
from gateway.reading import BufferFileError, Mark
from tests.support.buffers import (
    BOOT,
    FORMER,
    TABLES,
    append,
    confirm,
    entry,
    entry_of,
    failure,
    input_of,
    lane_of,
    losses,
    marks_of,
    opened,
    quarantined_of,
    rows,
    series_of,
    store,
    storing_in,
)
from tests.support.waiting import patience

pytestmark = pytest.mark.slow

ROWS = 3_000
PAGE_BYTES = 4096


@pytest.fixture(scope="module", params=TABLES)
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file whose rows say their sequence."""
    path = tmp_path_factory.mktemp("filled") / "buffer.db"

    async def fill() -> None:
        async with opened(path) as buffer:
            for start in range(0, ROWS, 500):
                batch = [entry(b"%0200d" % number, "42", number) for number in range(start, start + 500)]
                assert await store(buffer, batch)

    with storing_in(request.param):
        asyncio.run(fill())
    root_of(path, request.param)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path, filled: bytes) -> Path:
    path = tmp_path / "buffer.db"
    path.write_bytes(filled)
    return path


async def fold(buffer: Buffer) -> None:
    """Have everything in the file itself, so that its pages can be damaged."""
    await buffer.run(lambda file: file.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())


def overwrite(path: Path, *pages: int) -> None:
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * PAGE_BYTES)
            file.write(b"\xff" * PAGE_BYTES)


def root_of(path: Path, table: str) -> int:
    """A table's first page; the WAL is folded in."""
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = file.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    return int(page)


def damage(path: Path, share: float) -> int:
    """Overwrite that share of the pages that hold readings and nothing else; how many."""
    pages = path.read_bytes()
    leaves = leaves_of(pages)
    chosen = leaves[2 : 2 + max(1, int(len(leaves) * share))]
    overwrite(path, *chosen)
    return len(chosen)


def leaves_of(pages: bytes) -> list[int]:
    """The numbers of the pages that hold readings and nothing else, in the order of the readings."""
    first: dict[int, int] = {}
    for start in range(0, len(pages), PAGE_BYTES):
        page = pages[start : start + PAGE_BYTES]
        if page[0] in {LEAF_INDEX, LEAF_TABLE} and page.count(b"0000000000000000") > 10:
            number = start // PAGE_BYTES + 1
            # The quarantine may have such pages too.
            if rows := page_scan.READING.keyed(page, btree_page(page, number, PAGE_BYTES)):
                first[number], _ = rows[0]
    return sorted(first, key=lambda number: first[number])


async def salvaged(buffer: Buffer) -> salvage.SalvagedBatch:
    async with asyncio.timeout(patience(20)):
        while not buffer.attachment.salvaged:
            await asyncio.sleep(0.01)
    return buffer.attachment.salvaged.popleft()


async def identities(buffer: Buffer) -> dict[tuple[str, str, int], bytes]:
    """Every waiting reading by what its `ce_id` is made of."""
    found: dict[tuple[str, str, int], bytes] = {}
    after = START
    while rows := (await buffer.read(after, 1_000))[1]:
        for row in rows:
            lane = await lane_of(buffer, row.lane)
            identity = (lane.buffer_id, lane.name, row.sequence)
            assert identity not in found
            found[identity] = row.datum.payload
        after = after._replace(lane=rows[-1].lane, sequence=rows[-1].sequence)
    return found


async def find_damage(buffer: Buffer) -> None:
    with pytest.raises(BufferFileError):
        await identities(buffer)


async def test_what_a_start_finds_damaged_is_salvaged_with_its_identity(path: Path) -> None:
    async with opened(path) as buffer:
        before = await identities(buffer)
    pages = damage(path, 0.2)
    async with opened(path) as buffer:
        # A read finds it: the file is set aside, and readings are taken in all the while.
        await find_damage(buffer)
        assert await store(buffer, [entry(b"after", "43", 0)])
        done = await salvaged(buffer)
        after = await identities(buffer)
        assert done.missing is not None
        assert 0 < done.missing <= pages * 20
        assert after.pop((buffer.id, buffer.lane.name, 0)) == b"after"
        assert after.items() <= before.items()
        assert len(after) == len(before) - done.missing == done.progress.taken
        (lost,) = await losses(buffer)
        assert (lost.reason, lost.count) == ("buffer-damaged", done.missing)
        # The sensor sends again what it was told is safe: its window was taken over too.
        assert await store(buffer, [entry(b"%0200d" % (ROWS - 1), "42", ROWS - 1)])
        assert buffer.counts["duplicate"] == 1


@pytest.mark.parametrize("table", ["meta", "lane", "series", "mark", "device_run", "boot", "quarantine"])
async def test_one_damaged_small_page_costs_no_reading(path: Path, table: str) -> None:
    async with opened(path) as buffer:
        before = await identities(buffer)
        assert await append(buffer, [], [Mark("mqtt/x", b"1")])
    overwrite(path, root_of(path, table))
    async with opened(path, "boot-2") as buffer:
        assert await store(buffer, [entry(b"after", "43", 0)])
        done = await salvaged(buffer)
        assert (done.progress.taken, done.missing) == (ROWS, 0)
        after = await identities(buffer)
        assert before.items() <= after.items()
        # Nothing may be known of its clock; the forwarder needs to be told so.
        clock = await buffer.boot_clock(BOOT)
        assert clock.synced == (table != "boot")


@pytest.mark.parametrize("table", ["series", "sqlite_autoindex_series_1"])
async def test_the_variables_of_a_route_come_through_where_one_copy_is_damaged(path: Path, table: str) -> None:
    of_route = entry(b"of a route", "44", 0)
    series = msgspec.structs.replace(of_route.series, variables=(("site", "Büro 1\n"), ("device", "aa:bb")))
    async with opened(path) as buffer:
        assert await store(buffer, [msgspec.structs.replace(of_route, series=series)])
    overwrite(path, root_of(path, table))
    async with opened(path) as buffer:
        with suppress(BufferFileError):
            await identities(buffer)
        assert await store(buffer, [entry(b"after", "43", 0)])
        await salvaged(buffer)
        (row,) = [row for row in await rows(buffer) if row.datum.payload == b"of a route"]
        found = await series_of(buffer, row.series)
        assert (found.content_type, found.variables) == (series.content_type, series.variables)


async def test_a_page_of_another_table_is_damage_too(path: Path) -> None:
    """A misdirected write: the page is sound, and its rows are none."""
    other = root_of(path, "boot")
    pages = path.read_bytes()
    leaf = next(page for page in leaves_of(pages) if page > 40)
    with path.open("r+b") as damaged:
        damaged.seek((leaf - 1) * PAGE_BYTES)
        damaged.write(pages[(other - 1) * PAGE_BYTES : other * PAGE_BYTES])
    async with opened(path) as buffer:
        await find_damage(buffer)
        done = await salvaged(buffer)
        assert done.missing is not None
        assert 0 < done.missing < 30
        assert len(await identities(buffer)) == ROWS - done.missing


async def test_a_schema_whose_names_are_no_text_is_a_damaged_file_too(path: Path) -> None:
    async with opened(path) as buffer:
        before = await identities(buffer)
        await fold(buffer)
    pages = path.read_bytes()
    # A copy from before the schema's last change may stand beside it.
    schema = pages[:PAGE_BYTES].replace(b"tablereadingreading", b"table" + b"\xff" * len(b"reading") + b"reading")
    path.write_bytes(schema + pages[PAGE_BYTES:])
    async with opened(path, "boot-2") as buffer:
        done = await salvaged(buffer)
        assert (await identities(buffer), done.missing) == (before, 0)


@pytest.mark.parametrize("damaged_bytes", [100, PAGE_BYTES])
async def test_a_file_whose_beginning_is_gone_is_read_by_its_pages(path: Path, damaged_bytes: int) -> None:
    """SQLite cannot open it. Lanes, series, clocks and windows are found by trees whose roots are known."""
    async with opened(path) as buffer:
        before = await identities(buffer)
        assert await append(buffer, [], [Mark("mqtt/x", b"1")])
        await confirm(buffer, (await rows(buffer))[:500])
        confirmed = dict(list(before.items())[:500])
        await fold(buffer)
    with path.open("r+b") as file:
        file.write(b"\xff" * damaged_bytes)
    async with opened(path, "boot-2") as buffer:
        assert await store(buffer, [entry(b"after")])
        done = await salvaged(buffer)
        after = await identities(buffer)
        assert after.pop((buffer.id, buffer.lane.name, 0)) == b"after"
        # What Kafka has stays away, although it stands in free pages, and nobody knows which these are.
        assert after == {identity: before[identity] for identity in before.keys() - confirmed.keys()}
        assert (done.progress.taken, done.missing) == (ROWS - 500, 0)
        assert not await losses(buffer)
        assert await marks_of(buffer, "mqtt/") == {"mqtt/x": b"1"}
        assert (await buffer.boot_clock(BOOT)).synced
        assert await store(buffer, [entry(b"%0200d" % (ROWS - 1), "42", ROWS - 1)])
        assert buffer.counts["duplicate"] == 1


async def test_a_file_that_holds_nothing_readable_costs_the_file_and_not_the_daemon(tmp_path: Path, path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(b"\xff" * size)
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"after")])
        done = await salvaged(buffer)
        assert (done.progress.taken, done.missing) == (0, None)
        assert list((await identities(buffer)).values()) == [b"after"]
        # How much is not known; that something is, is told.
        assert {(loss.reason, loss.count) for loss in await losses(buffer)} == {
            ("buffer-unreadable", 0),
            ("quarantine-unreadable", 0),
        }
    (aside,) = tmp_path.glob("buffer.db.corrupt-*.salvaged")
    assert aside.stat().st_size == size


@pytest.mark.parametrize("filled", [FORMER], indirect=True)
async def test_rows_behind_a_damaged_interior_page_come_back(tmp_path: Path, path: Path) -> None:
    async with opened(path) as buffer:
        before = await identities(buffer)
    content = path.read_bytes()
    root = root_of(path, FORMER)
    interior = [
        page
        for page in range(1, len(content) // PAGE_BYTES + 1)
        if content[(page - 1) * PAGE_BYTES] == INTERIOR_INDEX and page != root
    ]
    assert len(interior) > 1
    for pages in ([root], interior[:1], [root, *interior]):
        path.write_bytes(content)
        # All the leaves are whole: what is missing are the rows that stood between them.
        lost = sum(
            len(btree_page(content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES], page, PAGE_BYTES).cells)
            for page in pages
        )
        overwrite(path, *pages)
        async with opened(path) as buffer:
            with suppress(BufferFileError):  # the start may have found it
                await identities(buffer)
            done = await salvaged(buffer)
            after = await identities(buffer)
            assert after.items() <= before.items()
            assert done.missing == len(before) - len(after) == lost > 0
            assert [(loss.reason, loss.count) for loss in await losses(buffer)] == [("buffer-damaged", done.missing)]
        for file in tmp_path.glob("buffer.db*"):
            file.unlink()


@pytest.mark.parametrize("seed", range(3))
async def test_what_stands_on_whole_pages_comes_back_from_a_file_with_a_hole_or_without_an_end(
    path: Path, seed: int
) -> None:
    """Zeros over a run of pages, or nothing more behind it: wherever it is, each reading on another page is there."""
    async with opened(path) as buffer:
        before = await identities(buffer)
        number = buffer.attachment.file.connection.execute("SELECT min(number) FROM lane").fetchone()[0]
    root_of(path, "meta")
    content = bytearray(path.read_bytes())
    pages = len(content) // PAGE_BYTES
    chosen = random.Random(seed)  # noqa: S311 - which pages, no secret
    first = chosen.choice(leaves_of(bytes(content))) - 1
    run = range(first, pages if seed == 0 else min(pages, first + chosen.randrange(1, 100)))
    content[run.start * PAGE_BYTES : run.stop * PAGE_BYTES] = bytes(0 if seed == 0 else len(run) * PAGE_BYTES)
    intact: set[int] = set()
    for page in range(1, len(content) // PAGE_BYTES):
        with suppress(PageError):
            part = bytes(content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
            found = btree_page(part, page + 1, PAGE_BYTES)
            keys = [] if found.kind == INTERIOR_TABLE else page_scan.READING.keyed(part, found)
            intact |= {Position.at(key).sequence for key, _ in keys if page_scan.lane_of(key) == number}
    path.write_bytes(content)
    async with opened(path, "boot-2") as buffer:
        with suppress(BufferFileError):
            await identities(buffer)
        done = await salvaged(buffer)
        after = await identities(buffer)
        assert after.items() <= before.items()
        assert {sequence for _, _, sequence in after} == intact
        assert len(intact) < ROWS
        assert done.missing is None or done.missing == ROWS - len(intact)
        assert "buffer-damaged" in (reasons := {loss.reason for loss in await losses(buffer)}) or done.missing is None
        assert reasons


async def test_a_salvage_that_was_interrupted_goes_on_at_the_next_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(path, 0.1)
    monkeypatch.setattr(salvage, "CHUNK_ROWS", 100)
    adopt_now = Attachment._adopt_now
    taken: list[salvage.SalvagedBatch] = []

    def only_five(self: Attachment, batch: salvage.SalvagedBatch) -> bool:
        if len(taken) == 5:
            return False
        taken.append(batch)
        return adopt_now(self, batch)

    monkeypatch.setattr(Attachment, "_adopt_now", only_five)
    async with opened(path) as buffer:
        await find_damage(buffer)
        async with asyncio.timeout(patience(20)):
            while len(taken) < 5:
                await asyncio.sleep(0.01)
    monkeypatch.setattr(Attachment, "_adopt_now", adopt_now)
    async with opened(path) as buffer:
        done = await salvaged(buffer)
        assert done.progress.taken == len(await identities(buffer)) > 2_000
    async with opened(path) as buffer:
        assert not buffer.attachment.salvaged
        assert len(await identities(buffer)) == done.progress.taken


async def test_a_restored_copy_never_gives_an_identity_again(tmp_path: Path) -> None:
    path, copy = tmp_path / "buffer.db", tmp_path / "copy.db"
    async with opened(path) as buffer:
        await store(buffer, [entry(b"old")])
    shutil.copy(path, copy)
    shutil.copy(f"{path}-wal", f"{copy}-wal")
    found: list[dict[tuple[str, str, int], bytes]] = []
    for number, file in enumerate((path, copy)):
        async with opened(file) as buffer:
            await store(buffer, [entry(b"new %d" % number)])
            found.append(await identities(buffer))
    shared = found[0].keys() & found[1].keys()
    assert [found[0][identity] for identity in shared] == [b"old"]
    assert len(found[0] | found[1]) == 3


def test_rows_on_both_sides_of_a_damaged_stretch_are_read_in_order(path: Path) -> None:
    damage(path, 0.5)
    with closing(page_scan.DamagedPages(path)) as pages:
        scan = page_scan.Scan(pages, page_scan.READING, page_scan.Overflow(pages, {1: True, 2: True, 3: True}))
        sequences = [row.sequence for _, row in scan.rows() if row is not None]
    assert sequences == sorted(set(sequences))
    assert sequences[0] == 0
    assert sequences[-1] == ROWS - 1
    assert ROWS * 0.3 < len(sequences) < ROWS * 0.7


async def fail(buffer: Buffer) -> None:
    """Let the buffer find its file corrupt just now."""
    await buffer.run(lambda _: buffer._commits._fail(corruption("found just now")))


def refuse(_attachment: Attachment, _batch: salvage.SalvagedBatch) -> bool:
    """No room for anything that is salvaged."""
    return False


async def fill_lanes(path: Path) -> dict[tuple[str, str, int], bytes]:
    """A file with two lanes, of which a damaged page is in one; what could be read of it before."""
    for lane in range(2):
        async with opened(path, f"boot-{lane}") as buffer:
            numbers = range(lane * 400, lane * 400 + 400)
            assert await store(buffer, [entry(b"%0200d" % number, "42", number) for number in numbers])
            await fold(buffer)
            before = await identities(buffer)
    damage(path, 0.01)
    return before


async def cut_off_salvage(path: Path) -> dict[tuple[str, str, int], bytes]:
    """The same, closed when the damage was found and nothing had been taken over yet."""
    before = await fill_lanes(path)
    with mock.patch.object(Attachment, "_adopt_now", refuse):
        async with opened(path) as buffer:
            await find_damage(buffer)
            await fold(buffer)
    return before


async def test_a_restart_during_a_salvage_keeps_lanes_that_have_no_rows_yet(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    before = await cut_off_salvage(path)
    async with opened(path) as buffer:
        await salvaged(buffer)
        after = await identities(buffer)
        assert after.items() <= before.items()
        assert len(after) > 750
    async with opened(path) as buffer:
        assert await identities(buffer) == after


async def test_a_second_damaged_file_costs_nothing_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "buffer.db"
    before = await fill_lanes(path)
    monkeypatch.setattr(salvage, "CHUNK_ROWS", 100)
    monkeypatch.setattr(salvage, "WAIT_S", 0.05)
    adopt_now = Attachment._adopt_now
    taken: list[salvage.SalvagedBatch] = []

    def only_two(self: Attachment, batch: salvage.SalvagedBatch) -> bool:
        if batch.rows:
            taken.append(batch)
        return len(taken) <= 2 and adopt_now(self, batch)

    async with opened(path) as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(Attachment, "_adopt_now", only_two)
            await find_damage(buffer)
            async with asyncio.timeout(patience(20)):
                while len(taken) < 3:
                    await asyncio.sleep(0.01)
            assert await store(buffer, [entry(b"between", "43")])
            buffer.attachment._anew_due_s = float("-inf")
            late = taken[-1]
            await fail(buffer)
            assert late.into != buffer.id
            # A batch that was read for the replaced file is for no other.
            with pytest.raises(BufferFileError, match="salvaged for has been replaced"):
                await buffer.run(lambda _: adopt_now(buffer.attachment, late))
        done = [await salvaged(buffer), await salvaged(buffer)]
        after = await identities(buffer)
        assert b"between" in after.values()
        missing = sum(batch.missing or 0 for batch in done)
        assert 0 < missing < 50
        found = {identity: payload for identity, payload in after.items() if payload != b"between"}
        assert found.items() <= before.items()
        assert len(found) == len(before) - missing


async def test_a_file_whose_marks_are_lost_has_its_salvage_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    before = await cut_off_salvage(path)
    overwrite(path, root_of(path, "mark"))
    async with opened(path) as buffer:
        await salvaged(buffer)
        await salvaged(buffer)
        after = await identities(buffer)
        assert after.items() <= before.items()
        assert len(after) > 750


async def test_a_new_file_that_is_damaged_itself_is_never_deleted_with_what_it_holds(path: Path) -> None:
    """A power cut undid the last renaming: the new file holds readings, and cannot be asked what it knows."""
    damage(path, 0.01)
    path.with_name("buffer.db.corrupt-20260101T000000.000000.unfinished").write_bytes(b"\xff" * 8192)
    overwrite(path, root_of(path, "mark"))
    async with opened(path) as buffer:
        await salvaged(buffer)
        await salvaged(buffer)
        assert ROWS - 50 < len(await identities(buffer)) < ROWS


async def test_the_quarantine_of_a_damaged_file_is_taken_over(path: Path) -> None:
    inputs = [
        input_of("refused", b"%03000d" % number, "42", "s", 5, series=1, boot_id="boot-0") for number in range(20)
    ]
    async with opened(path) as buffer:
        reports = [entry_of(entry().series, b"report", quarantined=input_) for input_ in inputs]
        assert await append(buffer, reports)
        await fold(buffer)
    damage(path, 0.01)
    overwrite(path, path.read_bytes().index(b"%02900d" % 7) // PAGE_BYTES + 1)
    async with opened(path, "boot-2") as buffer:
        await salvaged(buffer)
        found = list((await quarantined_of(buffer, range(100))).values())
        assert {input_.datum.payload for input_ in found} < {input_.datum.payload for input_ in inputs}
        assert {input_.boot_id for input_ in found} == {"boot-0"}
        assert not (await buffer.boot_clock("boot-0")).synced
        series = found[0].series
        assert series is not None
        assert await series_of(buffer, series) == entry().series
        lost = {loss.reason: loss.count for loss in await losses(buffer)}
        assert lost["quarantine-damaged"] == len(inputs) - len(found) > 0


async def test_a_card_that_damages_every_file_gets_a_new_one_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "buffer.db"
    monkeypatch.setattr(salvage, "WAIT_S", 0.05)

    def damaged(*_: object) -> None:
        raise corruption("a page is damaged")

    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"first")])
        with monkeypatch.context() as patch:
            patch.setattr(BufferFile, "insert", damaged)
            held = append(buffer, [entry(b"held")])
            async with asyncio.timeout(patience(20)):
                while failure(buffer) is None:
                    await asyncio.sleep(0.01)
            assert "damaged again" in str(failure(buffer))
            # The first is replaced at once; the one that took its place has to wait.
            assert len(list(tmp_path.glob("buffer.db.corrupt-*[0-9d]"))) == 2
        assert await asyncio.wait_for(held, patience(20))
        async with asyncio.timeout(patience(20)):
            while {row.datum.payload for row in await rows(buffer)} != {b"first", b"held"}:
                await asyncio.sleep(0.05)
        waits = []
        for _ in range(7):
            await fail(buffer)
            waits.append(round(buffer.attachment._anew_due_s - time.monotonic()))
            buffer.attachment._anew_due_s = time.monotonic()
            await marks_of(buffer, "")
        assert waits == [2, 4, 8, 16, 32, 60, 60]


async def test_salvaged_files_are_deleted_when_there_are_too_many_and_others_only_with_a_loss_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "buffer.db"
    monkeypatch.setattr(salvage, "WAIT_S", 0.05)
    async with opened(path, damaged_files_max=2) as buffer:
        assert await store(buffer, [entry(b"%0200d" % number) for number in range(100)])
        for _ in range(4):
            buffer.attachment._anew_due_s = float("-inf")
            await fail(buffer)
            await salvaged(buffer)
        await asyncio.to_thread(buffer.attachment._salvages[-1].join)
        assert len(list(tmp_path.glob("buffer.db.corrupt-*.salvaged"))) == 2
        assert len(await rows(buffer)) == 100
        assert not await losses(buffer)
        monkeypatch.setattr(Attachment, "_adopt_now", refuse)
        for _ in range(3):
            buffer.attachment._anew_due_s = float("-inf")
            await fail(buffer)
        assert len(await marks_of(buffer, SALVAGE_PREFIX)) == 2
        assert {loss.reason for loss in await losses(buffer)} <= {"buffer-damaged", "buffer-unreadable"}


async def test_a_salvage_calls_the_forwarder_back_now_and_then_and_not_for_each_batch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(path, 0.01)
    monkeypatch.setattr(salvage, "CHUNK_ROWS", 100)
    async with opened(path) as buffer:
        await find_damage(buffer)
        position, rewinds, sent = START, buffer.attachment.rewinds, 0
        async with asyncio.timeout(patience(20)):
            while True:
                if rewinds != buffer.attachment.rewinds:
                    position, rewinds = START, buffer.attachment.rewinds
                buffer_id, found = await buffer.read(position, 500)
                if found:
                    position = Position(found[-1].lane, found[-1].sequence)
                    buffer.confirm(buffer_id, spans_of(found))
                    sent += len(found)
                elif buffer.attachment.salvaged and rewinds == buffer.attachment.rewinds:
                    break
                await asyncio.sleep(0.005)
        assert 1 <= buffer.attachment.rewinds <= 2 + 20 / 5
        assert sent >= buffer.attachment.salvaged[0].progress.taken


async def test_a_salvage_outlasts_a_disk_that_refuses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(path, 0.01)
    monkeypatch.setattr(salvage, "WAIT_S", 0.05)
    monkeypatch.setattr(salvage, "CHUNK_ROWS", 500)
    adopt, failures = BufferFile.adopt, 3

    def failing(self: BufferFile, *arguments: object) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(5, "Input/output error")
        adopt(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(BufferFile, "adopt", failing)
    async with opened(path) as buffer:
        await find_damage(buffer)
        done = await salvaged(buffer)
        assert done.missing is not None
        assert done.progress.taken == ROWS - done.missing == len(await identities(buffer)) > ROWS - 50


async def test_a_sensor_that_resends_what_was_salvaged_is_recognised_after_a_rollback(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.execute("DELETE FROM device_run")
        file.commit()
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damage(path, 0.01)
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"new", "99", 1)])
        await find_damage(buffer)
        assert await store(buffer, [entry(b"new", "98", 1)])
        await salvaged(buffer)
        with pytest.raises(ZeroDivisionError):
            await buffer.transact(lambda _: 1 / 0)
        assert await store(buffer, [entry(b"%0200d" % (ROWS - 1), "42", ROWS - 1)])
        assert buffer.counts["duplicate"] == 1


async def test_a_reading_whose_series_is_lost_keeps_its_boot_and_its_sequence(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with opened(path, "boot-1") as buffer:
        assert await store(buffer, [entry(b"orphan", "42", 7, received_us=123)])
        await fold(buffer)
    with closing(sqlite3.connect(path)) as file:
        file.execute("DELETE FROM series")
        file.commit()
    async with opened(path, "boot-2") as buffer:
        await fail(buffer)
        await salvaged(buffer)
        (kept,) = (await quarantined_of(buffer, range(10))).values()
        assert (kept.boot_id, kept.datum.received_us, kept.datum.device_sequence) == ("boot-1", 123, 7)
        assert (kept.reason, kept.datum.payload) == ("salvaged-without-series", b"orphan")


async def test_a_mark_whose_name_is_damaged_keeps_no_start_from_the_file(path: Path) -> None:
    """A bit makes a `.` to a `/`."""
    progress = msgspec.json.encode(Progress({1: 1}, -1, -1, [1], 5))
    names = ["buffer/db.corrupt-20260101T000000.000000", "/", ".", "..", "", "x\0.corrupt-20260101T000000.000000"]
    async with opened(path) as buffer:
        await append(buffer, [], [Mark(SALVAGE_PREFIX + name, progress) for name in names])
    async with opened(path) as buffer:
        assert len(await identities(buffer)) == ROWS
        assert not buffer.attachment.salvaged


async def test_a_damaged_schema_does_not_keep_a_new_buffer_from_being_begun(path: Path) -> None:
    """A bit joins two columns of `loss`: what SQLite gives of it are no records of that table."""
    async with opened(path) as buffer:
        before = await identities(buffer)
        buffer.count_loss(Loss("x", "buffer-full", BOOT, 3, 1, 1))
        while not await buffer.run(lambda file: has_losses(file.connection)):
            await asyncio.sleep(0.05)
        await fold(buffer)
    content = bytearray(path.read_bytes())
    content[content.index(b"first_sequence INTEGER, last") + len(b"first_sequence INTEGER")] ^= 0x20
    path.write_bytes(content)
    pages = damage(path, 0.01)
    async with opened(path) as buffer:
        await find_damage(buffer)
        assert await store(buffer, [entry(b"after", "43", 0)])
        await salvaged(buffer)
        assert len(before.items() & (await identities(buffer)).items()) > ROWS - 30 * pages


async def test_small_tables_that_cannot_be_taken_over_are_done_without(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path) as buffer:
        before = await identities(buffer)
        await fold(buffer)
    failures = [sqlite3.ProgrammingError("Incorrect number of bindings supplied")]

    def failing(*arguments: object) -> None:
        salvage.adopt_beside(*arguments)  # type: ignore[arg-type]
        if failures:
            raise failures.pop()

    monkeypatch.setattr("gateway.buffer.attachment.adopt_beside", failing)
    overwrite(path, root_of(path, "meta"))
    async with opened(path, "boot-2") as buffer:
        assert (await salvaged(buffer)).missing == 0
        assert before.keys() == (await identities(buffer)).keys()
        assert not (await buffer.boot_clock(BOOT)).synced


async def test_a_salvage_whose_mark_is_damaged_is_begun_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit in how far it had come: not a reading, and not a word of it, may be lost with it."""
    async with opened(path) as buffer:
        before = await identities(buffer)
        await fold(buffer)
    overwrite(path, root_of(path, "meta"))
    with monkeypatch.context() as patch:
        patch.setattr(Attachment, "_adopt_now", refuse)
        async with opened(path, "boot-2") as buffer:
            (mark,) = await marks_of(buffer, SALVAGE_PREFIX)
            await append(buffer, [], [Mark(mark, b'{"lanes":{"1":1},"lane":-1,"tequence":-1')])
    async with opened(path, "boot-3") as buffer:
        assert await store(buffer, [entry(b"after", "43", 0)])
        assert (await salvaged(buffer)).missing == 0
        after = await identities(buffer)
        assert list(after.values())[-1] == b"after"
        assert before.items() <= after.items()
        assert (await buffer.boot_clock(BOOT)).synced


async def test_a_salvage_that_is_cut_off_before_the_file_is_renamed_is_not_begun_again(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(path, 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(Attachment, "_end_salvage", lambda *_: None)
        async with opened(path) as buffer:
            await find_damage(buffer)
            await salvaged(buffer)
            assert await losses(buffer)
            await confirm(buffer, await rows(buffer))
    assert not list(tmp_path.glob("*.salvaged"))
    async with opened(path) as buffer:
        async with asyncio.timeout(patience(20)):
            while await marks_of(buffer, SALVAGE_PREFIX):
                await asyncio.sleep(0.01)
        assert list(tmp_path.glob("*.salvaged"))
        assert not await rows(buffer)
        assert not buffer.attachment.salvaged
        assert not await losses(buffer)


@pytest.mark.parametrize(
    ("older", "left"),
    [
        ({"sequence": 1499, "taken": 1_500}, range(1_500, ROWS)),
        (
            {"walked": True, "sequence": ROWS - 1, "taken": ROWS - 100, "holes": 100, "gaps": [(1, 200, 299)]},
            range(200, 300),
        ),
        (
            {"walked": True, "sequence": ROWS - 1, "taken": ROWS - 50, "holes": 50, "gaps": [(1, 200, 299)]}
            | {"scanned": (1, 249), "ends": {1: (0, ROWS - 1)}},
            range(250, 300),
        ),
    ],
)
async def test_a_salvage_that_an_older_version_began_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, older: dict[str, object], left: range
) -> None:
    """It followed the trees, remembered the gaps, and then searched the pages for their rows."""
    damage(path, 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(Attachment, "_adopt_now", refuse)
        async with opened(path) as buffer:
            await find_damage(buffer)
            (mark,) = await marks_of(buffer, SALVAGE_PREFIX)
            found = kept_marks(await marks_of(buffer, mark))[mark.removeprefix(SALVAGE_PREFIX)]
            same = {"lanes": found.lanes, "lane": 1, "dense": [1], "expected": ROWS}
            await append(buffer, [], [Mark(mark, msgspec.json.encode(same | older))])
    async with opened(path) as buffer:
        done = await salvaged(buffer)
        assert sorted(sequence for _, _, sequence in await identities(buffer)) == [*left]
        assert (done.progress.taken, done.progress.holes) == (ROWS, 0)


async def test_rows_that_are_taken_over_are_compared_with_those_of_their_sequences_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with all between them: a lane may have a million rows."""
    asked: list[Span] = []
    sequences_of = read_rows.sequences_of
    monkeypatch.setattr(
        "gateway.buffer.file.sequences_of",
        lambda file, span: asked.append(span) or sequences_of(file, span),  # type: ignore[func-returns-value]
    )
    async with opened(path) as buffer:
        found = [row for row in await rows(buffer) if row.sequence in {0, 1, ROWS - 1}]

        def adopt(file: BufferFile) -> None:
            with file.transaction():
                file.adopt(found, [], {1: entry().series})

        await buffer.run(adopt)
        assert asked == spans_of(found)
        assert len(asked) == 2
        assert len(await identities(buffer)) == ROWS


async def test_reading_a_damaged_file_changes_neither_it_nor_its_wal(path: Path) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"in the WAL")])
    log = path.with_name("buffer.db-wal")
    before = path.read_bytes(), log.read_bytes()
    assert len(before[1]) > 0
    assert salvage.read_beside(path, None).lanes
    assert (path.read_bytes(), log.read_bytes()) == before
