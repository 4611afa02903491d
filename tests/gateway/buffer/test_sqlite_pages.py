"""Pages read without SQLite give what SQLite wrote; damaged ones give PageError, or what is left of them."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.buffer.sqlite_pages import (
    FILE_HEADER_BYTES,
    INTERIOR_INDEX,
    INTERIOR_TABLE,
    LEAF_INDEX,
    LEAF_TABLE,
    Cell,
    FileHeader,
    PageError,
    Value,
    btree_page,
    file_header,
    free_pages,
    payload,
    record,
    varint,
    wal,
)

WITHOUT_ROWID = "CREATE TABLE t (a INTEGER, b INTEGER, c, d, PRIMARY KEY (a, b)) WITHOUT ROWID"
WITH_ROWID = "CREATE TABLE t (a INTEGER PRIMARY KEY, c, d)"
PAYLOAD_BYTES_MAX = 100_000

values = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 1, -1, 127, 128, 2**15, 2**23, 2**31, 2**47]),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=50),
    st.binary(max_size=50),
    st.integers(0, 12_000).map(lambda size: b"%d" % size * (size // 4 + 1)),
)
rows_of_both = st.lists(
    st.tuples(st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1), values, values),
    max_size=120,
    unique_by=lambda row: row[1],
)


class File:
    """A database file in memory."""

    def __init__(self, content: bytes, header: FileHeader) -> None:
        self.content = content
        self.header = header
        self.page_count = len(content) // header.page_bytes

    def page(self, number: int) -> bytes:
        if not 1 <= number <= self.page_count:
            raise PageError("there is no such page")
        return self.content[(number - 1) * self.header.page_bytes : number * self.header.page_bytes]

    def value(self, page: bytes, cell: Cell) -> tuple[Value, ...]:
        return record(payload(page, cell, self.header.usable_bytes, self.page, PAYLOAD_BYTES_MAX))

    def rows(self) -> Iterator[tuple[int, int | None, tuple[Value, ...]]]:
        """Page, rowid and values of everything outside page 1 that reads as a row."""
        for number in range(2, self.page_count + 1):
            page = self.page(number)
            try:
                found = btree_page(page, number, self.header.usable_bytes)
            except PageError:
                continue
            for cell in found.cells if found.kind != INTERIOR_TABLE else ():
                try:
                    yield number, cell.rowid, self.value(page, cell)
                except PageError:
                    continue


def written(rows: list[tuple[int, int, object, object]], page_bytes: int, schema: str = WITHOUT_ROWID) -> bytes:
    with closing(sqlite3.connect(":memory:")) as file:
        file.execute(f"PRAGMA page_size = {page_bytes}")
        file.execute(schema)
        columns = 4 if schema == WITHOUT_ROWID else 3
        marks = ", ".join("?" * columns)
        file.executemany(f"INSERT OR REPLACE INTO t VALUES ({marks})", [row[4 - columns :] for row in rows])
        file.commit()
        return file.serialize()


@given(rows_of_both, st.sampled_from([512, 1024, 4096, 65536]))
def test_what_sqlite_writes_without_rowids_is_read_back(
    rows: list[tuple[int, int, object, object]], page_bytes: int
) -> None:
    content = written(rows, page_bytes)
    file = File(content, file_header(content[:FILE_HEADER_BYTES]))
    assert sorted(values for *_, values in file.rows()) == sorted(rows)


@given(rows_of_both, st.sampled_from([512, 4096]))
def test_what_sqlite_writes_with_rowids_is_read_back(
    rows: list[tuple[int, int, object, object]], page_bytes: int
) -> None:
    content = written(rows, page_bytes, WITH_ROWID)
    file = File(content, file_header(content[:FILE_HEADER_BYTES]))
    found = {rowid: values for _, rowid, values in file.rows()}
    # The primary key is the rowid, and stands as NULL in the record.
    assert found == {key: (None, *values) for _, key, *values in rows}


@given(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=3))
def test_a_number_is_read_back_with_the_place_behind_it(number: int, behind: bytes) -> None:
    unsigned = number % 2**64
    if unsigned >= 1 << 56:
        groups = [*(unsigned >> shift & 0x7F | 0x80 for shift in range(57, 7, -7)), unsigned & 0xFF]
    else:
        count = max(1, -(-unsigned.bit_length() // 7))
        groups = [unsigned >> 7 * place & 0x7F | (0x80 if place else 0) for place in reversed(range(count))]
    assert varint(bytes(groups) + behind, 0) == (number, len(groups))
    with pytest.raises(PageError):
        varint(bytes(groups[:-1]), 0)


damages = st.lists(st.tuples(st.integers(0, 2**20), st.binary(min_size=1, max_size=600)), min_size=1, max_size=6)


def damaged(content: bytes, places: list[tuple[int, bytes]]) -> bytes:
    changed = bytearray(content)
    for place, found in places:
        start = place % len(content)
        changed[start : start + len(found)] = found[: len(content) - start]
    return bytes(changed)


def intact(before: File, after: File) -> set[int]:
    """Pages behind the first whose rows cannot have changed: neither they nor the overflow pages of their rows."""
    same = {number for number in range(1, before.page_count + 1) if before.page(number) == after.page(number)}
    sound = set()
    for number in same - {1}:
        page = before.page(number)
        needed: set[int] = set()

        def fetch(other: int, needed: set[int] = needed) -> bytes:
            needed.add(other)
            return before.page(other)

        try:
            cells = btree_page(page, number, before.header.usable_bytes).cells
        except PageError:
            continue
        for cell in cells:
            payload(page, cell, before.header.usable_bytes, fetch, PAYLOAD_BYTES_MAX)
        if needed <= same:
            sound.add(number)
    return sound


@given(rows_of_both, st.sampled_from([512, 1024, 4096]), damages)
@settings(max_examples=200)
def test_damage_raises_nothing_else_and_costs_nothing_of_pages_that_it_did_not_touch(
    rows: list[tuple[int, int, object, object]], page_bytes: int, places: list[tuple[int, bytes]]
) -> None:
    content = written(rows, page_bytes)
    header = file_header(content[:FILE_HEADER_BYTES])
    before, after = File(content, header), File(damaged(content, places), header)
    sound = intact(before, after)
    assert [row for row in after.rows() if row[0] in sound] == [row for row in before.rows() if row[0] in sound]


@given(st.binary(max_size=2_000), st.integers(1, 3), st.integers(0, 2_000))
@settings(max_examples=200)
def test_no_bytes_do_more_than_raise_an_error_of_its_own(content: bytes, number: int, place: int) -> None:
    page = content.ljust(1024, b"\x0d")[:1024]
    file = File(page * 3, FileHeader(1024, 1024, number, place))
    list(file.rows())
    for read in (
        lambda: file_header(content),
        lambda: varint(content, place),
        lambda: record(content),
        lambda: record(content, 2),
        lambda: list(free_pages(file.header, file.page, 3)),
        lambda: wal(lambda start, size: content[start : start + size]),
    ):
        with suppress(PageError):
            read()


def test_an_overflow_chain_may_not_end_early_go_in_a_circle_or_go_on() -> None:
    content = written([(1, 1, b"x" * 3_000, None)], 1024)
    file = File(content, file_header(content[:FILE_HEADER_BYTES]))
    page = file.page(2)
    (cell,) = btree_page(page, 2, 1024).cells
    assert file.value(page, cell) == (1, 1, b"x" * 3_000, None)
    chain = [cell.overflow]
    while following := int.from_bytes(file.page(chain[-1])[:4], "big"):
        chain.append(following)
    assert len(chain) == 3
    for of, to in ((chain[0], 0), (chain[1], chain[0]), (chain[2], chain[0]), (chain[0], 99)):
        changed = bytearray(content)
        changed[(of - 1) * 1024 : (of - 1) * 1024 + 4] = to.to_bytes(4, "big")
        broken = File(bytes(changed), file.header)
        with pytest.raises(PageError):
            broken.value(page, cell)
    with pytest.raises(PageError, match=f"{cell.payload_bytes} bytes"):
        payload(page, cell, 1024, file.page, cell.payload_bytes - 1)


def freed() -> File:
    """A file most of whose pages are free, on several trunks."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("PRAGMA page_size = 512")
        # As the buffer has it: what is deleted is not overwritten.
        database.execute("PRAGMA secure_delete = OFF").fetchone()
        database.execute(WITHOUT_ROWID)
        database.executemany("INSERT INTO t VALUES (1, ?, ?, NULL)", [(n, b"x" * 60) for n in range(2_000)])
        database.execute("DELETE FROM t WHERE b BETWEEN 10 AND 1980")
        database.commit()
        content = database.serialize()
    return File(content, file_header(content[:FILE_HEADER_BYTES]))


def test_the_free_pages_are_those_that_hold_no_rows_any_more() -> None:
    file = freed()
    free = list(free_pages(file.header, file.page, file.page_count))
    assert len(set(free)) == len(free) == file.header.free_pages > 200
    used = {number: values for number, _, values in file.rows() if number not in free}
    assert {key for _, key, *_ in used.values()} <= {*range(10), *range(1981, 2000)}
    assert len([1 for number, *_ in file.rows() if number in free]) > 1_000


@given(damages)
def test_a_damaged_freelist_ends_in_an_error_or_gives_pages_that_there_are(places: list[tuple[int, bytes]]) -> None:
    file = freed()
    broken = File(damaged(file.content, places), file.header)
    found = []
    with suppress(PageError):
        for number in free_pages(broken.header, broken.page, broken.page_count):
            found.append(number)  # noqa: PERF402 - what came before the error counts
    assert all(2 <= number <= file.page_count for number in found)
    assert len(found) <= file.header.free_pages


def with_wal(folder: Path) -> tuple[Path, Path]:
    """A copy of a file in use, whose WAL holds several commits, some of them of the same pages; and the WAL."""
    path, copy = folder / "used.db", folder / "copy.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA wal_autocheckpoint = 0")
        database.execute(WITHOUT_ROWID)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        for commit in range(8):
            database.execute("BEGIN")
            rows = [(commit, number, b"%d" % number * 200, None) for number in range(6)]
            database.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)
            database.execute("COMMIT")
        shutil.copy(path, copy)
        shutil.copy(f"{path}-wal", f"{copy}-wal")
    return copy, copy.with_name("copy.db-wal")


@given(damages | st.just([]))
@settings(max_examples=100)
def test_a_wal_counts_as_far_as_it_does_for_sqlite(places: list[tuple[int, bytes]]) -> None:
    with TemporaryDirectory() as folder:
        path, log = with_wal(Path(folder))
        log.write_bytes(damaged(log.read_bytes(), places))
        content, frames = path.read_bytes(), log.read_bytes()
        try:
            committed = wal(lambda start, size: frames[start : start + size]).pages
        except PageError:
            committed = {}
        with closing(sqlite3.connect(path)) as database:
            there = database.execute("SELECT * FROM t").fetchall()
    pages = max(len(content) // 4096, *committed, 1)
    image = bytearray(content.ljust(pages * 4096, b"\0"))
    for number, start in committed.items():
        image[(number - 1) * 4096 : number * 4096] = frames[start : start + 4096]
    file = File(bytes(image), file_header(bytes(image[:FILE_HEADER_BYTES])))
    # What a split has moved from a page is not in its cell pointers any more: every row is found once.
    assert sorted(values for *_, values in file.rows()) == there
    assert len(there) == 48 if not places else len(there) <= 48


def test_kinds_of_pages_are_told_apart() -> None:
    for schema, kinds in ((WITHOUT_ROWID, {INTERIOR_INDEX, LEAF_INDEX}), (WITH_ROWID, {INTERIOR_TABLE, LEAF_TABLE})):
        content = written([(1, number, b"x" * 60, None) for number in range(200)], 512, schema)
        file = File(content, file_header(content[:FILE_HEADER_BYTES]))
        pages = [btree_page(file.page(number), number, 512) for number in range(2, file.page_count + 1)]
        assert {page.kind for page in pages} == kinds
        assert all(page.whole for page in pages)
        (root,) = {*range(2, file.page_count + 1)} - {child for page in pages for child in page.children}
        assert root == 2
    with pytest.raises(PageError):
        btree_page(bytes(512), 2, 512)
