"""Whatever is damaged: readings whose pages are whole come back, once, with their identity, and the rest is told."""

import asyncio
import os
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest import mock

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from gateway.buffer import schema, sqlite_pages
from gateway.buffer.rows import (
    QUARANTINE_COLUMNS,
    ROW_COLUMNS,
    SEQUENCE_BITS,
    SEQUENCE_MAX,
    Lane,
    Position,
    Quarantined,
    Row,
    sent_of,
)
from gateway.buffer.salvage import page_scan, salvage
from gateway.buffer.salvage.page_scan import DamagedPages
from gateway.buffer.salvage.progress import SALVAGE_PREFIX, Progress, kept_marks
from gateway.buffer.salvage.salvage import Salvage, SalvagedBatch
from gateway.buffer.sqlite_pages import Cell, PageError, payload, record
from tests.gateway.buffer.salvage.test_buffer_salvage import fold
from tests.support.buffers import (
    FORMER,
    TABLES,
    append,
    changed,
    confirm,
    entry,
    entry_of,
    input_of,
    opened,
    rows,
    store,
    storing_in,
)

PAGE_BYTES = 4096
ASIDE = "buffer.db.corrupt-20260101T000000.000000"
META, LANE, LANE_NAMES, LANE_COPY = 2, 4, 5, 12
"""Where these stand in each file of this schema; none has more than one page here."""
Identity = tuple[str, str, int]


class Made:
    """A file, its WAL, and what is known of it."""

    def __init__(
        self, table: str, content: bytes, log: bytes, rows: dict[Identity, bytes], deleted: dict[Identity, bytes]
    ) -> None:
        self.table = table
        """The table that has the rows."""
        self.content = content
        self.log = log
        self.rows = rows
        self.deleted = deleted
        self.older = b""
        """The file before its last lane was begun."""
        self.pages_of: dict[Identity, set[int]] = {}
        """The pages that a row stands on."""
        self.overflow: set[int] = set()
        """Pages of these that have nothing but a part of a long row's payload."""
        self.quarantined: dict[bytes, set[int]] = {}
        """Payloads, with their pages."""

        with written(content, log) as path, closing(DamagedPages(path)) as pages:
            roots = page_scan._roots(pages)
            self.root = roots[table]
            """The first page of that table."""
            self.roots = {roots.get(name, 0) for name in (*TABLES, "quarantine")} - {0}
            """The first pages of all tables with rows that are salvaged."""
        self.on_root = slice((self.root - 1) * PAGE_BYTES, self.root * PAGE_BYTES)

    def __repr__(self) -> str:
        return f"Made({self.table})"

    def folded(self) -> bytearray:
        """The file with the WAL folded in."""
        with written(self.content, self.log) as path, closing(DamagedPages(path)) as pages:
            return bytearray(b"".join(pages.page(number) for number in range(1, pages.count + 1)))


@contextmanager
def written(content: bytes, log: bytes) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / ASIDE
        path.write_bytes(content)
        if log:
            path.with_name(f"{ASIDE}-wal").write_bytes(log)
        yield path


def payload_of(lane: int, sequence: int) -> bytes:
    """Some are so long that they have overflow pages."""
    return b"%d/%d" % (lane, sequence) * (1_100 if sequence % 40 == 0 else 30)


async def make(path: Path, first: str, then: str) -> Made:
    """Three lanes: the first is drained, of the second some rows are confirmed; what was done last is in the WAL.

    The last lane's rows are in the table `then`, and the other rows in the table `first`.
    """
    everything: dict[Identity, bytes] = {}
    lanes: dict[int, Lane] = {}
    for number, rows_each in enumerate((150, 450, 150)):
        # Names that no one bit makes another's.
        with storing_in(first if number < 2 else then):
            async with opened(path, f"boot-{2 * number}", bytes_max=4_000_000) as buffer:
                lanes[buffer.lane.number] = buffer.lane
                for start in range(0, rows_each, 150):
                    batch = [entry(payload_of(number, n), str(n % 7), n) for n in range(start, start + 150)]
                    assert await store(buffer, batch)
                inputs = [
                    input_of("refused", b"%d%02d" % (number, n) * 300, "4", "s", 5, boot_id="b") for n in range(9)
                ]
                assert await append(
                    buffer, [entry_of(entry().series, b"report", quarantined=input_) for input_ in inputs]
                )
                everything |= {(buffer.id, buffer.lane.name, n): payload_of(number, n) for n in range(rows_each)}
                everything |= {(buffer.id, buffer.lane.name, rows_each + n): b"report" for n in range(9)}
                await confirm(buffer, (await rows(buffer))[: (200, 140, 70)[number]])
                if number < 2:
                    await fold(buffer)
                    older = path.read_bytes()
                waiting = {
                    (buffer.id, lanes[row.lane].name, row.sequence): row.datum.payload for row in await rows(buffer)
                }
                content, log = path.read_bytes(), path.with_name("buffer.db-wal").read_bytes()
    deleted = {identity: everything[identity] for identity in everything.keys() - waiting.keys()}
    made = Made(then, content, log, waiting, deleted)
    made.older = older
    find_pages(made, lanes)
    assert made.pages_of.keys() == waiting.keys()
    assert len(made.quarantined) == 27
    return made


def find_pages(made: Made, lanes: dict[int, Lane]) -> None:
    with written(made.content, made.log) as path, closing(DamagedPages(path)) as pages:
        free, is_all = pages.free()
        assert is_all
        for number in (number for number in range(2, pages.count + 1) if not free[number]):
            with suppress(PageError):
                content, page = pages.btree(number)
                for cell in page.cells:
                    needed = {number}

                    def fetch(other: int, needed: set[int] = needed) -> bytes:
                        needed.add(other)
                        return pages.page(other)

                    match cell.rowid, *record(payload(content, cell, PAGE_BYTES, fetch, 10**6)):
                        case (None, int(lane), int(sequence), _, _, _, _, _, _, _, _, _, _):
                            made.pages_of[lanes[lane].buffer_id, lanes[lane].name, sequence] = needed
                            made.overflow |= needed - {number}
                        case (int(place), None, int(), int(), *_):
                            lane, sequence = Position.at(place)
                            made.pages_of[lanes[lane].buffer_id, lanes[lane].name, sequence] = needed
                            made.overflow |= needed - {number}
                        case (_, None, str(), int(), str(), str(), str(), bytes(found), *_):
                            made.quarantined[found] = needed


UPGRADED = "upgraded"
"""A file whose first rows are in the former table."""
of_former_version = pytest.mark.parametrize("made", [FORMER], indirect=True)
of_any_version = pytest.mark.parametrize("made", [*TABLES, UPGRADED], indirect=True)


@pytest.fixture(scope="module", params=TABLES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    first, then = (FORMER, "reading") if request.param == UPGRADED else (request.param, request.param)
    return asyncio.run(make(tmp_path_factory.mktemp("made") / "buffer.db", first, then))


@pytest.fixture(autouse=True, scope="module")
def no_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(salvage, "WORK_S", 0.0)
        patch.setattr(salvage, "CHUNK_ROWS", 50)
        yield


class Taken(NamedTuple):
    rows: dict[Identity, bytes]
    quarantined: list[bytes]
    progress: Progress


class CutOffError(BaseException):
    """The daemon ends here."""


def salvage_all(path: Path, batches_max: int, expected: int | None, dense: list[int] | None = None) -> Taken:
    """All that comes of a file; each start goes on where the last one was, after so many batches.

    `dense` are the lanes without holes, where these are not all that the file has opened.
    """
    damaged = salvage.damaged_files([(path, None, expected)], [])[path.name]
    progress = msgspec.structs.replace(damaged.progress, lanes={number: number for number in damaged.lanes})
    if dense is not None:
        progress = msgspec.structs.replace(progress, dense=dense)
    taken = Taken({}, [], progress)
    kept = msgspec.json.encode(progress)
    left = batches_max
    unordered: list[SalvagedBatch] = []
    twice: list[Identity] = []

    def adopt(batch: SalvagedBatch) -> bool:
        nonlocal left, kept
        left -= 1
        if left < 0:
            raise CutOffError
        if [row.sequence for row in batch.rows] != sorted({row.sequence for row in batch.rows}):
            unordered.append(batch)
        for row in batch.rows:
            lane = damaged.lanes[row.lane]
            identity = lane.buffer_id, lane.name, row.sequence
            if identity in taken.rows:
                twice.append(identity)
            taken.rows[identity] = row.datum.payload
        taken.quarantined.extend(input_.datum.payload for input_ in batch.quarantined)
        kept = msgspec.json.encode(batch.progress)
        return True

    while True:
        with suppress(CutOffError):
            Salvage([(path, msgspec.json.decode(kept, type=Progress))], "x", adopt, lambda _: None).run()
            assert not unordered
            progress = msgspec.json.decode(kept, type=Progress)
            assert not twice
            return taken._replace(progress=progress)
        left = batches_max


def batches_of(content: bytes, log: bytes = b"") -> list[SalvagedBatch]:
    """The batches of a salvage that nothing interrupts."""
    batches: list[SalvagedBatch] = []
    with written(content, log) as path:
        damaged = salvage.damaged_files([(path, None, None)], [])[path.name]
        progress = replace(damaged.progress, lanes={number: number for number in damaged.lanes})
        Salvage([(path, progress)], "x", lambda batch: not batches.append(batch), lambda _: None).run()  # type: ignore[func-returns-value]
    return batches


def salvaged_from(content: bytes, log: bytes = b"", batches_max: int = 10**9, expected: int | None = None) -> Taken:
    with written(content, log) as path:
        return salvage_all(path, batches_max, expected)


def judge(made: Made, taken: Taken, touched: set[int]) -> None:
    """The law: `touched` are the damaged pages, whose rows are gone, or as they were."""
    intact = {identity: made.rows[identity] for identity, pages in made.pages_of.items() if not pages & touched}
    if {LANE, LANE_COPY} <= touched and touched & {LANE_NAMES, META}:
        # Under whose name rows stand is gone in all copies: they come under new ones.
        assert Counter(intact.values()) <= Counter(taken.rows.values())
        assert {*taken.rows.values()} <= {*made.rows.values(), *made.deleted.values()}
        return
    assert intact.items() <= taken.rows.items()
    # What Kafka has may come again where nobody knows what is free; as it was, so that it is recognised.
    assert taken.rows.items() <= (made.rows | made.deleted).items()
    lost = len(made.rows.keys() - taken.rows.keys())
    missing = taken.progress.missing()
    if missing is not None:
        assert missing > 0 or not lost
        # Between rows that should not be there some may seem to be missing.
        assert missing <= lost or taken.rows.keys() & made.deleted.keys()
    quarantined = {of for of, pages in made.quarantined.items() if not pages & touched}
    assert quarantined <= {*taken.quarantined} <= made.quarantined.keys()
    if {*taken.quarantined} < made.quarantined.keys():
        assert taken.progress.quarantine_missing or taken.progress.quarantine_torn


@of_any_version
def test_a_sound_file_gives_everything_once(made: Made) -> None:
    for content, log in ((made.content, made.log), (bytes(made.folded()), b"")):
        taken = salvaged_from(content, log)
        assert taken.rows == made.rows
        assert taken.progress.missing() == 0
        assert Counter(taken.quarantined) == Counter(made.quarantined.keys())


pages_damaged = st.one_of(
    st.sets(st.integers(1, 60), min_size=1, max_size=12),
    st.tuples(st.integers(1, 200), st.integers(1, 30)).map(lambda run: {*range(run[0], run[0] + run[1])}),
    st.sets(st.integers(1, 20), min_size=1, max_size=3),
)


@of_any_version
@pytest.mark.slow
@given(pages_damaged, st.sampled_from([b"\0", b"\xff"]), st.sampled_from([3, 10**9]))
@settings(max_examples=50)
@example({1}, b"\xff", 10**9)
@example({9, 17}, b"\0", 10**9)
@example({1, 9, 17}, b"\xff", 10**9)
@example({1, 4, 5, 7, 8, 9, 12, 17}, b"\xff", 10**9)
def test_pages_that_are_overwritten_cost_only_what_stood_on_them(
    made: Made, damaged: set[int], by: bytes, batches_max: int
) -> None:
    content = made.folded()
    touched = {page for page in damaged if page * PAGE_BYTES <= len(content)}
    for page in touched:
        content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = by * PAGE_BYTES
    taken = salvaged_from(bytes(content), batches_max=batches_max)
    judge(made, taken, touched)


@of_any_version
@given(st.integers(0, 2**20), st.sampled_from([3, 10**9]))
@example(0, 10**9)
@example(PAGE_BYTES, 10**9)
@example(20 * PAGE_BYTES + 100, 10**9)
@settings(max_examples=30)
def test_a_file_that_is_cut_off_gives_what_stands_in_front_of_the_cut(made: Made, place: int, batches_max: int) -> None:
    content = made.folded()
    cut = place % len(content)
    touched = {*range(cut // PAGE_BYTES + 1, len(content) // PAGE_BYTES + 1)}
    judge(made, salvaged_from(bytes(content[:cut]), batches_max=batches_max), touched)


@of_any_version
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(10, 60)), min_size=1, max_size=4))
@example([(2, 9)])
@example([(13, 9)])
@example([(2, 1)])
@example([(17, 30)])
@example([(28, 11)])  # the quarantine by one of its own leaves
@settings(max_examples=50)
def test_a_page_that_stands_in_the_place_of_another_costs_only_that_one(
    made: Made, moves: list[tuple[int, int]]
) -> None:
    """Each is sound for itself. That rows are missing at a lane's end is known from their number alone.

    Nothing tells whose overflow page it is, so a long payload may come with another one's bytes. Without a freelist, a
    leaf in the place of its table's root passes for the whole table: it stands there too if few rows of many are left.
    """
    content = made.folded()
    moves = [(of, to) for of, to in moves if to not in made.overflow]
    for of, to in moves:
        content[(to - 1) * PAGE_BYTES : to * PAGE_BYTES] = content[(of - 1) * PAGE_BYTES : of * PAGE_BYTES]
    with written(bytes(content), b"") as path, closing(DamagedPages(path)) as pages:
        _, has_freelist = pages.free()
    assume(has_freelist or not made.roots & {to for _, to in moves})
    judge(made, salvaged_from(bytes(content), expected=len(made.rows)), {to for _, to in moves})


@of_any_version
@given(st.lists(st.tuples(st.integers(0, 2**20), st.binary(min_size=1, max_size=40)), min_size=1, max_size=10))
@example([(60, b"\1")])  # the number of the schema, which is not of a newer version then
@example([(505, b"0\x80")])  # into a name, which SQLite then gives in an error's words
@example([(33816, b"\0\0\0\0\0")])  # a row between pages, which SQLite finds its way by
@settings(max_examples=50)
def test_damage_of_a_few_bytes_ends_no_salvage(made: Made, places: list[tuple[int, bytes]]) -> None:
    content = made.folded()
    touched = set()
    for place, found in places:
        start = place % (len(content) - len(found))
        content[start : start + len(found)] = found
        touched |= {start // PAGE_BYTES + 1, (start + len(found) - 1) // PAGE_BYTES + 1}
    taken = salvaged_from(bytes(content))
    if not {META, LANE, LANE_NAMES, LANE_COPY} & touched:
        assert {of for of, pages in made.pages_of.items() if not pages & touched} <= taken.rows.keys()


@of_former_version
@pytest.mark.parametrize("dense", [None, []])
@pytest.mark.parametrize("batches_max", [3, 10**9])
def test_a_row_between_pages_that_leads_the_search_astray_costs_itself_alone(
    made: Made, batches_max: int, dense: list[int] | None
) -> None:
    """SQLite passes over the pages in front of a row of a lower lane, and no error tells."""
    content = made.folded()
    with written(bytes(content), b"") as path, closing(DamagedPages(path)) as pages:
        root = made.root
        part, page = pages.btree(root)
    assert page.kind == sqlite_pages.INTERIOR_INDEX
    for cell in page.cells:
        broken = bytearray(content)
        # The lane is the first value behind the record's header.
        broken[(root - 1) * PAGE_BYTES + cell.start + part[cell.start]] = 0
        with written(bytes(broken), b"") as path:
            taken = salvage_all(path, batches_max, None, dense)
        assert {of for of, pages in made.pages_of.items() if root not in pages} <= taken.rows.keys()
        assert len(taken.rows) == len(made.rows) - 1
        assert taken.progress.missing() == (1 if dense is None else None)


@pytest.mark.parametrize("made", ["reading"], indirect=True)
def test_a_number_between_pages_that_is_wrong_hides_no_row(made: Made) -> None:
    content = made.folded()
    with written(bytes(content), b"") as path, closing(DamagedPages(path)) as pages:
        _, page = pages.btree(made.root)
    assert page.kind == sqlite_pages.INTERIOR_TABLE
    for cell in page.cells:
        # The last byte of the number, and its first: the lane is 0 then.
        for place, byte in ((cell.start - 1, 0), (cell.start - 7, 0x80)):
            broken = bytearray(content)
            start = (made.root - 1) * PAGE_BYTES + place
            assert broken[start] != byte
            broken[start] = byte
            assert salvaged_from(bytes(broken)).rows == made.rows


def test_a_number_between_pages_of_the_quarantine_that_is_wrong_hides_no_input(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(salvage, "CHUNK_ROWS", 4)
    content = made.folded()
    with written(bytes(content), b"") as path, closing(DamagedPages(path)) as pages:
        root = page_scan._roots(pages)["quarantine"]
        _, page = pages.btree(root)
    assert page.kind == sqlite_pages.INTERIOR_TABLE
    for cell in page.cells:
        broken = bytearray(content)
        broken[(root - 1) * PAGE_BYTES + cell.start - 1] = 0
        taken = salvaged_from(bytes(broken))
        assert Counter(taken.quarantined) == Counter(made.quarantined.keys())


@of_any_version
@given(pages_damaged)
@example({1})
@example({1, 9, 17})
@settings(max_examples=30)
def test_what_was_committed_into_the_wal_counts(made: Made, damaged: set[int]) -> None:
    """Pages of the file are damaged; those that the WAL has too are not lost."""
    content = bytearray(made.content)
    with written(made.content, made.log) as path, closing(DamagedPages(path)) as pages:
        in_wal = set(pages._wal)
    assert len(in_wal) > 5
    for page in damaged:
        if page * PAGE_BYTES <= len(content):
            content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    judge(made, salvaged_from(bytes(content), made.log), damaged - in_wal)


def test_a_page_that_the_disk_does_not_give_is_damage_like_any_other(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = next(iter(made.pages_of[next(iter(made.rows))]))
    pread = os.pread

    def failing(fd: int, size: int, start: int) -> bytes:
        if start == (bad - 1) * PAGE_BYTES:
            raise OSError(5, "Input/output error")
        return pread(fd, size, start)

    content = b"\xff" * PAGE_BYTES + bytes(made.folded())[PAGE_BYTES:]
    monkeypatch.setattr(os, "pread", failing)
    judge(made, salvaged_from(content), {1, bad})


def test_rows_that_kafka_has_are_told_from_others_by_the_freelist_or_by_the_tree(made: Made) -> None:
    content = made.folded()
    with_stale = 0
    for damaged, certain in (({1}, True), ({made.root}, True), ({1, made.root}, False)):
        broken = bytearray(content)
        for page in damaged:
            broken[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = b"\xff" * PAGE_BYTES
        taken = salvaged_from(bytes(broken))
        again = taken.rows.keys() & made.deleted.keys()
        assert not (certain and again)
        with_stale += len(again)
        # Nobody knows then how many are missing.
        assert certain or taken.progress.missing() is None
    assert with_stale > 0


def test_a_freelist_that_does_not_add_up_hides_no_page(made: Made) -> None:
    """One of its pages is older than the other, so it names a page that has rows now."""
    content = made.folded()
    first, count = struct.unpack(">2I", content[32:40])
    leaf = next(min(pages) for pages in made.pages_of.values() if len(pages) == 1 and made.root not in pages)
    content[36:40] = struct.pack(">I", count + 1)
    content[(first - 1) * PAGE_BYTES + 8 : (first - 1) * PAGE_BYTES + 12] = struct.pack(">I", leaf)
    content[made.on_root] = b"\xff" * PAGE_BYTES
    judge(made, salvaged_from(bytes(content)), {1, made.root, first})


def test_what_the_daemon_knew_of_the_number_of_rows_tells_how_many_are_missing(made: Made) -> None:
    content = b"\xff" * 20 * PAGE_BYTES + bytes(made.folded())[20 * PAGE_BYTES :]
    taken = salvaged_from(content, expected=10_000)
    assert taken.progress.missing() == 10_000 - taken.progress.taken
    lost = {loss.reason: loss.count for loss in taken.progress.losses("b")}
    assert lost["buffer-damaged"] == 10_000 - taken.progress.taken


def test_a_scan_that_is_to_stop_ends_in_the_middle_of_the_file(made: Made) -> None:
    content = b"\xff" * PAGE_BYTES + bytes(made.folded())[PAGE_BYTES:]
    ended: list[Path] = []
    with written(content, b"") as path:
        damaged = salvage.damaged_files([(path, None, None)], [])[path.name]
        progress = msgspec.structs.replace(damaged.progress, lanes={number: number for number in damaged.lanes})
        batches: list[SalvagedBatch] = []

        def adopt(batch: SalvagedBatch) -> bool:
            batches.append(batch)
            thread.stop()
            return True

        thread = Salvage([(path, progress)], "x", adopt, ended.append)
        thread.run()
    assert len(batches) == 1
    assert not ended


@given(st.lists(st.integers(0, 30), max_size=30))
def test_of_keys_out_of_order_the_most_that_are_in_order_stay(numbers: list[int]) -> None:
    cell = Cell(0, 0, 0, 0, None)
    kept = [key for key, _ in page_scan._ascending([(number, cell) for number in numbers])]
    assert kept == sorted(set(kept))
    longest = [0] * (len(numbers) + 1)
    for place, number in enumerate(numbers):
        longest[place] = 1 + max([longest[before] for before in range(place) if numbers[before] < number], default=0)
    assert len(kept) == max(longest)


def test_a_page_that_is_out_of_date_costs_only_its_own_rows(made: Made) -> None:
    """The card never wrote it: the tree then leads to what was deleted, and away from what was added."""
    content = made.folded()
    places = [slice((page - 1) * PAGE_BYTES, page * PAGE_BYTES) for page in range(1, len(made.older) // PAGE_BYTES + 1)]
    changed = {page for page, place in enumerate(places, 1) if made.older[place] != content[place]}
    assert made.root in changed
    for page in changed - {LANE, LANE_NAMES, LANE_COPY}:
        broken = bytearray(content)
        broken[places[page - 1]] = made.older[places[page - 1]]
        taken = salvaged_from(bytes(broken))
        intact = {identity: made.rows[identity] for identity, pages in made.pages_of.items() if page not in pages}
        assert intact.items() <= taken.rows.items()
        assert taken.rows.keys() <= (made.rows | made.deleted).keys()


@pytest.mark.parametrize(("place", "found"), [(16, b"\x20\0"), (20, b"\x20")])
def test_a_header_that_is_not_of_such_a_file_is_damage(made: Made, place: int, found: bytes) -> None:
    """Pages of another size, or with bytes kept free: possible, and never what was written."""
    content = made.folded()
    content[place : place + len(found)] = found
    taken = salvaged_from(bytes(content))
    assert taken.rows == made.rows


def lanes_of(content: bytes) -> list[Lane]:
    with written(content, b"") as path:
        return salvage.read_beside(path, None).lanes


@pytest.mark.parametrize("page", [LANE, LANE_NAMES, LANE_COPY, META])
def test_one_of_three_copies_of_a_lanes_identity_may_be_wrong(made: Made, page: int) -> None:
    content = made.folded()
    lanes = lanes_of(bytes(content))
    start, end = (page - 1) * PAGE_BYTES, page * PAGE_BYTES
    for word in {lanes[0].name, lanes[0].boot_id, lanes[0].buffer_id}:
        broken = bytearray(content)
        place = broken.find(word.encode(), start, end)
        if place >= 0:
            broken[place + len(word) - 1] ^= 1
            assert lanes_of(bytes(broken)) == lanes
            assert salvaged_from(bytes(broken)).progress.missing() == 0


def test_two_lanes_never_have_one_name() -> None:
    found = salvage.RowContext()
    for source, number in (("lane", 1), ("lane_copy", 3), ("sqlite_autoindex_lane_1", 3)):
        salvage._add_lane(found, source, number, "a", "boot", "file")
    assert salvage._settled(found) == {3: Lane(3, "a", "boot", "file")}


def test_rows_of_a_lane_that_is_gone_were_deleted(made: Made) -> None:
    lanes = lanes_of(bytes(made.folded()))
    with written(bytes(made.folded()), b"") as path:
        with closing(sqlite3.connect(path)) as file:
            for lane in (1, 50):
                file.execute(INSERTS[made.table], (lane, 7, b"\0"))
            file.commit()
        found = salvage.read_beside(path, None).lanes
    # The later one may have been opened after the two copies were written last.
    assert found[:-1] == lanes
    assert (found[-1].number, found[-1].boot_id) == (50, salvage.UNKNOWN_BOOT)


def cell_of(made: Made, identity: Identity, content: bytes) -> tuple[int, int]:
    """A row's page, and where its record begins on it."""
    page = next(iter(made.pages_of[identity]))
    part = bytes(content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES])
    keyed = page_scan.READING.keyed(part, sqlite_pages.btree_page(part, page, PAGE_BYTES))
    return page, next(cell.start for key, cell in keyed if Position.at(key).sequence == identity[2])


def test_a_key_that_is_too_high_does_not_shut_out_the_row_that_it_belongs_to(made: Made) -> None:
    content = made.folded()
    long = [of for of, found in made.rows.items() if len(found) < 300 and made.rows.get((*of[:2], of[2] + 64))]
    identity = next(of for of in long if 256 < of[2] < 256 + 64 and len(made.pages_of[of]) == 1)
    page, start = cell_of(made, identity, bytes(content))
    place = (page - 1) * PAGE_BYTES + start - 1
    if made.table == FORMER:
        place = content.index(struct.pack(">H", identity[2]), place) + 1
    content[place] ^= 64
    assert (*identity[:2], identity[2] + 64) in made.rows
    taken = salvaged_from(bytes(content))
    judge(made, taken, {page})
    assert taken.rows == {of: made.rows[of] for of in made.rows if of != identity}
    assert taken.progress.missing() == 1


def test_a_row_that_is_none_makes_a_scan_one_that_is_not_whole(made: Made) -> None:
    content = made.folded()
    cells = [cell_of(made, of, bytes(content)) for of, pages in made.pages_of.items() if len(pages) == 1]
    # The type of its series, of the one whose number is 1: that takes no bytes, nor does NULL.
    types = [(page - 1) * PAGE_BYTES + start + (3 if made.table == FORMER else 2) for page, start in cells]
    content[next(place for place in types if content[place] == 9)] = 0
    with written(bytes(content), b"") as path, closing(DamagedPages(path)) as pages:
        scan = page_scan.Scan(pages, page_scan.READING, page_scan.Overflow(pages, {1: True, 2: True, 3: True}))
        found = [row for _, row in scan.rows()]
        assert (len(found), found.count(None)) == (len(made.rows), 1)
        assert not scan.is_whole


@of_any_version
def test_chunks_are_bounded_in_bytes(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salvage, "CHUNK_BYTES", 5_000)
    monkeypatch.setattr(salvage, "CHUNK_ROWS", 10**9)
    batches = batches_of(bytes(made.folded()))
    sizes = [sum(len(row.datum.payload) for row in batch.rows) for batch in batches]
    assert sum(len(batch.rows) for batch in batches) == len(made.rows)
    assert 5_000 <= max(sizes) <= 5_000 + max(map(len, made.rows.values()))
    assert 5_000 <= max(sum(len(input_.datum.payload) for input_ in batch.quarantined) for batch in batches) < 6_000


@pytest.mark.parametrize("payload", [b"1234", "1234"])
def test_a_text_where_bytes_belong_is_no_payload(payload: bytes | str) -> None:
    """A bit of damage makes a text of the digits that a sensor sent, and digits are base64 too."""
    values = (1, 5, None, 0, None, None, None, payload, 0, None)
    rows = [(None, *values), (1, 0, *values)]
    columns = {"reason": "r", "device": "42", "subject": "s", "received_us": 5, "payload": payload}
    if isinstance(payload, bytes):
        first, second = (page_scan._as_row(Position(1, 0).place, row) for row in rows)
        assert first == second
        assert first.datum.payload == payload
        assert Quarantined.checked(columns).datum.payload == payload
    else:
        for row in rows:
            with pytest.raises(msgspec.ValidationError):
                page_scan._as_row(Position(1, 0).place, row)
        with pytest.raises(msgspec.ValidationError):
            Quarantined.checked(columns)


def test_a_page_number_that_no_file_has_costs_no_memory(made: Made) -> None:
    """A WAL whose checksums are right, and which says that it holds page 4,294,967,280."""
    header = struct.pack(">6I", 0x377F0683, 3007000, PAGE_BYTES, 0, 1, 2)
    sums = sqlite_pages._checksum(header, (0, 0), ">")
    frame = struct.pack(">2I", 0xFFFFFFF0, 0xFFFFFFF0)
    body = bytes(PAGE_BYTES)
    body_sums = sqlite_pages._checksum(body, sqlite_pages._checksum(frame, sums, ">"), ">")
    log = header + struct.pack(">2I", *sums) + frame + struct.pack(">4I", 1, 2, *body_sums) + body
    content = bytes(made.folded())
    with written(content, log) as path, closing(DamagedPages(path)) as pages:
        assert pages.count == len(content) // PAGE_BYTES


def test_a_small_table_costs_little_whatever_it_says() -> None:
    """Somebody waits for it: a record of many megabytes is none of its own, and each page is looked at once."""
    with written(b"", b"") as path:
        with closing(sqlite3.connect(path)) as file:
            file.execute("CREATE TABLE mark (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
            file.execute("INSERT INTO mark VALUES ('a', x'00'), ('b', zeroblob(2000000) || x'01')")
            file.commit()
        with closing(DamagedPages(path, page_scan.SMALL_BYTES_MAX)) as pages:
            small = page_scan.read_small(pages, ["mark"])
    assert [values[0] for _, values in small.rows["mark"]] == ["a"]
    assert "mark" not in small.whole


def test_a_file_that_the_program_fails_on_is_told_as_lost_and_keeps_no_other_waiting(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_pages = salvage._read_pages
    failures = [MemoryError]

    def failing(*arguments: object) -> None:
        if failures:
            raise failures.pop()
        read_pages(*arguments)  # type: ignore[arg-type]

    batches: list[SalvagedBatch] = []
    ended: list[Path] = []
    with written(bytes(made.folded()), b"") as path:
        damaged = salvage.damaged_files([(path, None, None)], [])[path.name]
        progress = msgspec.structs.replace(damaged.progress, lanes={number: number for number in damaged.lanes})
        monkeypatch.setattr(salvage, "_read_pages", failing)
        Salvage([(path, progress), (path, progress)], "x", lambda b: not batches.append(b), ended.append).run()  # type: ignore[func-returns-value]
    assert len(ended) == 2
    assert [batch.missing for batch in batches if batch.finished] == [None, 0]
    assert [loss.reason for loss in batches[0].progress.losses("b")] == ["buffer-unreadable", "quarantine-unreadable"]


@of_any_version
def test_however_many_gaps_there_are_what_is_missing_is_counted(made: Made) -> None:
    content = made.folded()
    leaves = sorted({next(iter(pages)) for pages in made.pages_of.values() if len(pages) == 1})[1::2]
    for page in leaves:
        content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    taken = salvaged_from(bytes(content))
    judge(made, taken, {*leaves})
    assert len(taken.rows) < len(made.rows)
    assert taken.progress.missing()


@pytest.mark.parametrize("is_root_damaged", [False, True])
@pytest.mark.parametrize("bad_first", [True, False])
def test_each_row_is_taken_over_once_although_the_disk_gives_other_rows_at_the_next_start(
    made: Made, monkeypatch: pytest.MonkeyPatch, *, bad_first: bool, is_root_damaged: bool
) -> None:
    """A page can be read at one start, and not at the other. The quarantine has no identity to know it by."""
    content = made.folded()
    numbers = {lane.name: lane.number for lane in lanes_of(bytes(content))}
    elsewhere = [of for of in made.rows if made.root not in made.pages_of[of]]
    first_row = min(elsewhere, key=lambda of: (numbers[of[1]], of[2]))
    bad, pread, given = min(made.pages_of[first_row]), os.pread, list[Identity]()
    on_root = {of for of, pages in made.pages_of.items() if made.root in pages and is_root_damaged}
    if is_root_damaged:
        content[made.on_root] = b"\xff" * PAGE_BYTES

    def failing(fd: int, size: int, start: int) -> bytes:
        if start == (bad - 1) * PAGE_BYTES:
            raise OSError(5, "Input/output error")
        return pread(fd, size, start)

    with written(bytes(content), b"") as path:
        damaged = salvage.damaged_files([(path, None, None)], [])[path.name]
        progress = replace(damaged.progress, lanes={number: number for number in damaged.lanes})
        batches: list[SalvagedBatch] = []

        def adopt(batch: SalvagedBatch) -> bool:
            batches.append(batch)
            thread.stop() if len(batches) == 8 and first else None
            return True

        for first in (True, False):
            with monkeypatch.context() as patch:
                if first == bad_first:
                    patch.setattr(os, "pread", failing)
                thread = Salvage([(path, progress)], "x", adopt, lambda _: None)
                thread.run()
                progress = batches[-1].progress
        for batch in batches:
            for row in batch.rows:
                lane = damaged.lanes[row.lane]
                given.append((lane.buffer_id, lane.name, row.sequence))
    assert len(batches) > 8
    assert Counter(given) == Counter(made.rows.keys() - on_root)
    assert Counter(input_.datum.payload for batch in batches for input_ in batch.quarantined) == Counter(
        made.quarantined.keys()
    )
    # Without the root, nobody knows what else there was.
    assert batches[-1].missing == ((len(on_root) or None) if is_root_damaged else 0)


def test_rows_come_in_order_whatever_the_order_of_their_pages(made: Made) -> None:
    """The tree is gone. A device's later readings must not go to Kafka before its earlier ones."""
    content = made.folded()
    content[made.on_root] = b"\xff" * PAGE_BYTES
    leaves = [page for page in {min(pages) for pages in made.pages_of.values() if len(pages) == 1} if page != made.root]
    places = [slice((page - 1) * PAGE_BYTES, page * PAGE_BYTES) for page in sorted(leaves)]
    parts = [content[place] for place in places]
    for place, part in zip(places, reversed(parts), strict=True):
        content[place] = part
    for lane in {row.lane for batch in batches_of(bytes(content)) for row in batch.rows}:
        found = [row.sequence for batch in batches_of(bytes(content)) for row in batch.rows if row.lane == lane]
        assert found == sorted(found)


async def test_a_payload_that_ends_in_zeros_is_believed_in_the_wal_alone(tmp_path: Path) -> None:
    """Its last page holds zeros only, as does a block that a card has lost. The WAL has checksums."""
    path, zeros = tmp_path / "buffer.db", b"1" + bytes(20_000)
    async with opened(path) as buffer:
        input_ = input_of("refused", zeros, "4", "s", 5, boot_id="b")
        assert await append(buffer, [entry(zeros), entry_of(entry().series, b"report", quarantined=input_)])
        content, log = path.read_bytes(), path.with_name("buffer.db-wal").read_bytes()
        await fold(buffer)
        folded = path.read_bytes()
    taken = salvaged_from(content, log)
    assert [*taken.rows.values()] == [zeros, b"report"]
    assert taken.quarantined == [zeros]
    taken = salvaged_from(folded)
    assert [*taken.rows.values()] == [b"report"]
    assert not taken.quarantined
    assert (taken.progress.missing(), taken.progress.quarantine_missing) == (1, 1)


@pytest.mark.parametrize(
    "absurd",
    [
        {"gaps": [(3, 80, 2**62)]},
        {"gaps": [(3, -9, 90), (3, 2**62, 2**62 + 9)]},
        {"quarantine_gaps": [(0, 1, 2**62)]},
        {"sequence": 2**62},
    ],
)
@pytest.mark.parametrize("version", [0, 1])
def test_a_mark_with_an_absurd_number_gives_no_row_twice(made: Made, version: int, absurd: dict[str, object]) -> None:
    """A former version ended its last gaps with such a number. A mark may be damaged too."""
    given: list[tuple[int, int]] = []
    inputs: list[bytes] = []
    with written(bytes(made.folded()), b"") as path:
        damaged = salvage.damaged_files([(path, None, None)], [])[path.name]
        began = replace(damaged.progress, lanes={number: number for number in damaged.lanes})
        place = {"lane": 3, "sequence": 100, "quarantined": 3, "version": version, "scanned": (0, 0)}
        mark = msgspec.json.encode(asdict(began) | place | absurd)

        def adopt(batch: SalvagedBatch) -> bool:
            nonlocal mark
            given.extend((row.lane, row.sequence) for row in batch.rows)
            inputs.extend(input_.datum.payload for input_ in batch.quarantined)
            mark = msgspec.json.encode(batch.progress)
            thread.stop()
            return True

        for _ in range(8):
            (progress,) = kept_marks({SALVAGE_PREFIX + ASIDE: mark}).values()
            assert progress.sequence <= SEQUENCE_MAX
            for gap in (*progress.gaps, *progress.quarantine_gaps):
                assert 0 <= gap.first <= gap.last <= SEQUENCE_MAX
            thread = Salvage([(path, progress)], "x", adopt, lambda _: None)
            thread.run()
    assert len({*inputs}) == len(inputs) > 0
    assert len({*given}) == len(given)
    if "sequence" not in absurd:
        assert (3, 101) in given
    if "gaps" in absurd:
        assert (3, 85) in given


@of_former_version
@pytest.mark.parametrize("is_known_again", [True, False])
def test_a_page_that_can_no_longer_be_read_in_the_middle_costs_its_rows_and_tells_it(
    made: Made, monkeypatch: pytest.MonkeyPatch, *, is_known_again: bool
) -> None:
    """It stands above others, so its rows lie far apart."""
    content = made.folded()
    monkeypatch.setattr(page_scan, "_PAGES_CACHED", 1)
    on_root = {of for of, pages in made.pages_of.items() if made.root in pages}
    pread, batches, given = os.pread, list[SalvagedBatch](), list[Identity]()
    is_failing = False

    def failing(fd: int, size: int, start: int) -> bytes:
        if is_failing and start == made.on_root.start:
            raise OSError(5, "Input/output error")
        return pread(fd, size, start)

    monkeypatch.setattr(os, "pread", failing)
    with written(bytes(content), b"") as path:
        damaged = salvage.damaged_files([(path, None, None)], [])[path.name]
        # Nothing tells a hole of other lanes.
        progress = replace(damaged.progress, lanes={number: number for number in damaged.lanes}, dense=[])

        def adopt(batch: SalvagedBatch) -> bool:
            nonlocal is_failing
            batches.append(batch)
            for row in batch.rows:
                given.append((damaged.lanes[row.lane].buffer_id, damaged.lanes[row.lane].name, row.sequence))
            is_failing = bool(batch.rows)
            if is_known_again and len(given) > 300:
                thread.stop()
            return True

        thread = Salvage([(path, progress)], "x", adopt, lambda _: None)
        thread.run()
        lost = on_root - {*given}
        assert len(lost) > 1
        if is_known_again:
            assert len(given) < len(made.rows) - len(lost)
            monkeypatch.setattr(os, "pread", pread)
            is_known_again = False
            thread = Salvage([(path, batches[-1].progress)], "x", adopt, lambda _: None)
            thread.run()
            lost = set()
    assert Counter(given) == Counter(made.rows.keys() - lost)
    assert batches[-1].finished
    assert batches[-1].missing == (None if lost else 0)


@of_any_version
def test_gaps_that_are_forgotten_are_told(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk gives their pages at the next start, when it is too late, and the lanes have holes."""
    monkeypatch.setattr(salvage, "GAPS_MAX", 2)
    content, damaged_content = made.folded(), made.folded()
    leaves = sorted({next(iter(pages)) for pages in made.pages_of.values() if len(pages) == 1})[1::2]
    for page in leaves:
        damaged_content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    batches: list[SalvagedBatch] = []
    with written(bytes(damaged_content), b"") as path:
        damaged = salvage.damaged_files([(path, None, None)], [])[path.name]
        progress = replace(damaged.progress, lanes={number: number for number in damaged.lanes}, dense=[])

        def adopt(batch: SalvagedBatch) -> bool:
            if batch.finished and not batches[-1].finished:
                thread.stop()
            if not batch.finished:
                batches.append(batch)
            return not batch.finished

        thread = Salvage([(path, progress)], "x", adopt, lambda _: None)
        thread.run()
        assert len(batches[-1].progress.gaps) == 2
        path.write_bytes(content)
        thread = Salvage([(path, batches[-1].progress)], "x", lambda batch: not batches.append(batch), lambda _: None)  # type: ignore[func-returns-value]
        thread.run()
    assert 0 < sum(len(batch.rows) for batch in batches) < len(made.rows)
    assert batches[-1].finished
    assert batches[-1].missing is None


def test_the_pages_of_one_long_row_leave_others_their_time(tmp_path: Path) -> None:
    path = tmp_path / ASIDE
    with closing(schema.connect(path)) as file:
        file.execute(INSERTS["reading"], (1, 1, bytes(2_000_000) + b"1"))
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    rests: list[None] = []
    with closing(DamagedPages(path, rest=lambda: rests.append(None))) as pages:
        scan = page_scan.Scan(pages, page_scan.READING, page_scan.Overflow(pages, {1: True, 2: True, 3: True}))
        claimed = len(rests)
        assert len([*scan.rows()]) == 1
        assert min(claimed, len(rests) - claimed) > 2_000_000 / PAGE_BYTES


_REST = "1, 1, NULL, 0, NULL, NULL, NULL, ?3, 0, NULL"
INSERTS = {
    "reading": f"INSERT INTO reading VALUES (?1 << {SEQUENCE_BITS} | ?2, {_REST})",
    FORMER: f"INSERT INTO former_reading VALUES (?1, ?2, {_REST})",
}
"""A row's lane, sequence and payload."""
_KEEP = "INSERT INTO quarantine (boot_id, received_us, device, subject, reason, payload) VALUES ('b', 1, '', '', '', ?)"


def places_of(path: Path) -> dict[tuple[int, int], int]:
    """The page of each row, by lane and sequence."""
    with closing(DamagedPages(path)) as pages:
        trees = page_scan._trees(pages, page_scan.READING)
        return {Position.at(entry.key): entry.number for tree in trees for entry in tree.entries()}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("is_freelist_gone", [False, True])
@pytest.mark.parametrize("is_root_gone", [False, True])
@pytest.mark.parametrize("taker", ["", "newer", "other lane", "adopted", "quarantine", "mark"])
def test_a_row_of_a_stale_page_never_has_the_payload_of_another(
    tmp_path: Path, taker: str, table: str, *, is_root_gone: bool, is_freelist_gone: bool
) -> None:
    """Two rows were deleted. Their overflow pages are free, or something else has them now."""
    path = tmp_path / ASIDE
    with closing(schema.connect(path)) as file:
        file.execute("INSERT OR REPLACE INTO meta VALUES ('buffer_id', 'own')")
        for lane, buffer_id in ((1, "another"), (2, None), (3, None)):
            file.execute("INSERT INTO lane VALUES (?, ?, 'b', 1, ?)", (lane, f"lane {lane}", buffer_id))
        rows = {(2, number): b"%04d" % number * 1_100 for number in range(60)}
        file.executemany(INSERTS[table], [(*key, of) for key, of in rows.items()])
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        older, places = path.read_bytes(), places_of(path)
        # Enough rows stay on the page that SQLite leaves it where it is.
        leaf = places[2, 30] if places[2, 30] == places[2, 31] else places[2, 32]
        gone = {key: rows.pop(key) for key in [key for key in places if places[key] == leaf][1:4:2]}
        file.executemany(f"DELETE FROM {table} WHERE lane = ? AND sequence = ?", gone)
        long = [b"taken %d " % number * 550 for number in range(2)]
        if taker in {"newer", "other lane", "adopted"}:
            lane, first = {"newer": (2, 60), "other lane": (3, 0), "adopted": (1, 0)}[taker]
            taken = {(lane, first + number): of for number, of in enumerate(long)}
            file.executemany(INSERTS[table], [(*key, of) for key, of in taken.items()])
            rows |= taken
        elif taker == "quarantine":
            file.executemany(_KEEP, [(of,) for of in long])
        elif taker == "mark":
            file.executemany("INSERT INTO mark VALUES (?, ?)", [(str(number), of) for number, of in enumerate(long)])
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert file.execute("PRAGMA freelist_count").fetchone() == (0 if taker else 2,)
        (root,) = file.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    places, content = places_of(path), bytearray(path.read_bytes())
    assert places.keys() == rows.keys()
    content[(leaf - 1) * PAGE_BYTES : leaf * PAGE_BYTES] = older[(leaf - 1) * PAGE_BYTES : leaf * PAGE_BYTES]
    if is_root_gone:
        content[(root - 1) * PAGE_BYTES : root * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    if is_freelist_gone:
        content[32:40] = b"\xff" * 8
    batches = batches_of(bytes(content))
    found = {(row.lane, row.sequence): row.datum.payload for batch in batches for row in batch.rows}
    assert found.items() <= (rows | gone).items()
    assert not (taker and found.keys() & gone.keys())
    # Adopted rows came beside others: nothing tells which of two rows was deleted.
    whole = {
        key for key in rows if not (is_root_gone and places[key] == root) and not (taker == "adopted" and key[0] == 1)
    }
    assert whole <= found.keys()
    assert not [input_ for batch in batches for input_ in batch.quarantined]
    if taker == "quarantine":
        assert batches[-1].progress.quarantine_missing == 2


@pytest.mark.parametrize("table", TABLES)
def test_rows_of_a_lane_that_is_gone_claim_no_pages(tmp_path: Path, table: str) -> None:
    """All of them were deleted. They still stand on free pages, and nothing tells which pages are free."""
    path = tmp_path / ASIDE
    with closing(schema.connect(path)) as file:
        file.execute("INSERT OR REPLACE INTO meta VALUES ('buffer_id', 'own')")
        for lane in (1, 2):
            file.execute("INSERT INTO lane VALUES (?, ?, 'b', 1, NULL)", (lane, f"lane {lane}"))
        file.executemany(INSERTS[table], [(1, number, b"%04d" % number * 1_100) for number in range(60)])
        file.execute("UPDATE lane SET buffer_id = 'another' WHERE number = 2")
        file.execute(f"DELETE FROM {table}")
        file.execute("DELETE FROM lane WHERE number = 1")
        rows = {(2, number): b"%04d" % (9_000 + number) * 1_100 for number in range(30)}
        file.executemany(INSERTS[table], [(*key, of) for key, of in rows.items()])
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        (root,) = file.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    places, content = places_of(path), bytearray(path.read_bytes())
    content[(root - 1) * PAGE_BYTES : root * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    content[32:40] = b"\xff" * 8
    found = {(row.lane, row.sequence): row.datum.payload for batch in batches_of(bytes(content)) for row in batch.rows}
    assert found == {key: of for key, of in rows.items() if places[key] != root}


@pytest.mark.parametrize(
    ("table", "change"),
    [("reading", f"place = 1 + sequence / 4 << {SEQUENCE_BITS} | sequence"), (FORMER, "lane = 1 + sequence / 4")],
)
async def test_a_new_file_waits_neither_for_series_nor_for_each_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, change: str
) -> None:
    path = tmp_path / ASIDE
    with storing_in(table):
        async with opened(path) as buffer:
            assert await store(buffer, [entry(b"%0100d" % number, str(number), 1) for number in range(200)])
            await fold(buffer)
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"UPDATE {table} SET {change}")
        file.commit()
    read: list[int] = []
    btree = DamagedPages.btree
    monkeypatch.setattr(DamagedPages, "btree", lambda self, number: read.append(number) or btree(self, number))  # type: ignore[func-returns-value]
    with closing(DamagedPages(path)) as pages:
        assert [*page_scan.lanes_of_rows(pages)] == [*range(1, 51)]
        assert max(Counter(read).values()) == 1
        roots = page_scan._roots(pages)
    read.clear()
    found = salvage.read_beside(path, None)
    assert not found.series
    assert not {roots["series"], roots["sqlite_autoindex_series_1"]} & {*read}
    # The salvage itself lets others work meanwhile.
    rests: list[None] = []
    with closing(DamagedPages(path, rest=lambda: rests.append(None))) as pages:
        page_scan.read_small(pages, ["series"])
        assert len(rests) > 1


def test_a_row_without_overflow_pages_is_not_read_for_them(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    content = made.folded()
    content[:PAGE_BYTES] = content[made.on_root] = b"\xff" * PAGE_BYTES
    with written(bytes(content), b"") as path, closing(DamagedPages(path)) as pages:
        payload_of = sqlite_pages.payload
        read: list[Cell] = []

        def reading(part: bytes, cell: Cell, *rest: object) -> bytes:
            read.append(cell)
            return payload_of(part, cell, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(sqlite_pages, "payload", reading)
        scan = page_scan.Scan(pages, page_scan.READING, page_scan.Overflow(pages, {1: True, 2: True, 3: True}))
        read.clear()
        found = [row for _, row in scan.rows() if row is not None]
        assert not scan.certain
        assert sum(not cell.overflow for cell in read) <= len(found)


PROPERTIES = '[["unit","C"]]'
ROWS_OF_SCHEMAS = [
    Row.of_columns(
        (1, n, 1, 1_000, 900, 50, 4_711, "7-1a2b3c4d", n, b"%d" % n * 100, 1, 1_700_000_000_000_000, PROPERTIES)
    )
    for n in range(200)
]
OF_INPUT = 5, 4, 3, 2, "7-1a2b3c4d", 1, b"raw", 1, 1_700_000_000_000_000, PROPERTIES
INPUT = Quarantined.of_columns(("refused", "42", "s", "t", "42", 1, "boot", *OF_INPUT))
OF_SCHEMAS: dict[int, tuple[list[Row], Quarantined]] = {
    1: (
        [changed(row, doubt=0, device_time_us=None, properties=None) for row in ROWS_OF_SCHEMAS],
        input_of("refused", b"raw", "42", "s", 5, boot_id="boot"),
    ),
    2: (
        [changed(row, device_time_us=None, properties=None) for row in ROWS_OF_SCHEMAS],
        changed(INPUT, device_time_us=None, properties=None),
    ),
    3: ([changed(row, properties=None) for row in ROWS_OF_SCHEMAS], changed(INPUT, properties=None)),
    4: ([changed(row, properties=None) for row in ROWS_OF_SCHEMAS], changed(INPUT, properties=None)),
    5: (ROWS_OF_SCHEMAS, INPUT),
}
"""What each keeps of them."""


def values_of(item: Row | Quarantined) -> dict[str, object]:
    """The values of a row or an input by column."""
    place = {"place": Position(item.lane, item.sequence).place} if isinstance(item, Row) else {}
    return {**asdict(item), **asdict(item.datum), **place, "sent": sent_of(item.datum)}


@pytest.mark.parametrize("is_headless", [False, True])
@pytest.mark.parametrize("is_upgraded", [False, True])
@pytest.mark.parametrize("version", OF_SCHEMAS)
def test_a_file_of_each_schema_gives_all_that_it_has(
    tmp_path: Path, version: int, *, is_upgraded: bool, is_headless: bool
) -> None:
    """With its header and without. An upgraded file has further rows of this version, in another table."""
    path = tmp_path / ASIDE
    with (
        mock.patch.object(schema, "MIGRATIONS", schema.MIGRATIONS[:version]),
        closing(schema.connect(path)) as file,
    ):
        file.execute("INSERT INTO lane (number, name, boot_id) VALUES (1, '0123456789ab', 'boot')")
        fields = "topic, key, device, subject, type, content_type"
        file.execute(f"INSERT INTO series ({fields}) VALUES ('t', 'k', 'd', 's', 'y', 'c')")
        items: tuple[tuple[str, tuple[str, ...], Sequence[Row | Quarantined]], ...] = (
            ("reading", ("place", *ROW_COLUMNS, "sent"), ROWS_OF_SCHEMAS),
            ("quarantine", QUARANTINE_COLUMNS, [INPUT]),
        )
        for table, known, of_table in items:
            columns = {name for _, name, *_ in file.execute(f"PRAGMA table_info({table})")}
            names = [name for name in known if name in columns]
            file.executemany(
                f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
                [[values_of(item)[name] for name in names] for item in of_table],
            )
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    further = [(2, number, b"new %d" % number * 50) for number in range(100)] if is_upgraded else []
    if is_upgraded:
        with closing(schema.connect(path)) as file:
            file.execute("INSERT INTO lane (number, name, boot_id) VALUES (2, 'ba9876543210', 'boot')")
            file.executemany(INSERTS["reading"], further)
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if is_headless:
        path.write_bytes(b"\xff" * 100 + path.read_bytes()[100:])
    damaged = salvage.damaged_files([(path, None, None)], [])[path.name]
    progress = msgspec.structs.replace(damaged.progress, lanes={number: number for number in damaged.lanes})
    taken: list[SalvagedBatch] = []

    def adopt(batch: SalvagedBatch) -> bool:
        taken.append(batch)
        return True

    Salvage([(path, progress)], "x", adopt, lambda _: None).run()
    rows_kept, input_kept = OF_SCHEMAS[version]
    found = [row for batch in taken for row in batch.rows]
    assert found[: len(rows_kept)] == rows_kept
    assert [(row.lane, row.sequence, row.datum.payload) for row in found[len(rows_kept) :]] == further
    assert taken[-1].missing == 0
    assert [input_ for batch in taken for input_ in batch.quarantined] == [input_kept]


@pytest.mark.parametrize("damaged", [{1}, {1, META}], ids=["schema", "schema and meta"])
@pytest.mark.parametrize("left", [2_000, 10])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_upgraded_file_whose_first_page_is_lost_gives_all_rows(
    tmp_path: Path, version: int, left: int, damaged: set[int]
) -> None:
    """Nothing of the schema tells where the table of new rows begins. In a new file it begins elsewhere."""
    path = tmp_path / ASIDE
    with (
        mock.patch.object(schema, "MIGRATIONS", schema.MIGRATIONS[:version]),
        closing(schema.connect(path)) as file,
    ):
        file.execute("BEGIN")
        file.execute("INSERT INTO lane (name, boot_id) VALUES ('0123456789ab', 'boot')")
        file.executemany(
            "INSERT INTO reading (lane, sequence, series, received_us, event_error_us, payload)"
            " VALUES (1, ?, 1, 1, 0, ?)",
            [(number, b"%060d" % number) for number in range(2_000)],
        )
        file.execute("COMMIT")
    with closing(schema.connect(path)) as file:
        file.execute("BEGIN")
        file.execute("INSERT INTO lane (name, boot_id) VALUES ('ba9876543210', 'boot')")
        file.execute("UPDATE lane SET buffer_id = 'own'")
        # New rows take the pages of those that are gone.
        file.execute("DELETE FROM former_reading WHERE sequence < ?", (2_000 - left,))
        file.executemany(INSERTS["reading"], [(2, number, b"%060d" % number) for number in range(2_000)])
        file.execute("COMMIT")
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        waiting = set(file.execute("SELECT lane, sequence FROM former_reading")) | {(2, n) for n in range(2_000)}
    content = bytearray(path.read_bytes())
    for page in damaged:
        content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = bytes(PAGE_BYTES)
    batches = batches_of(bytes(content))
    found = {(row.lane, row.sequence) for batch in batches for row in batch.rows}
    if META in damaged:
        assert waiting <= found
        assert batches[-1].missing is None
    else:
        assert waiting == found
        assert batches[-1].missing == 0
