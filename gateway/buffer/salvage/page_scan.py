"""Finds rows in a damaged buffer file page by page, where SQLite's b-trees do not lead to them any more.

Only pages count that the file still uses, as far as the freelist or the table's tree tells. Nothing is ever changed.
Memory: a byte for each page, and an index of a bounded number of pages.
"""

import heapq
import os
import sqlite3
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from gateway.buffer import sqlite_pages
from gateway.buffer.rows import ROW_COLUMNS, Quarantined, Row, Span
from gateway.buffer.schema import MIGRATIONS
from gateway.buffer.sqlite_pages import (
    FILE_HEADER_BYTES,
    INTERIOR_INDEX,
    INTERIOR_TABLE,
    LEAF_INDEX,
    LEAF_TABLE,
    BtreePage,
    Cell,
    FileHeader,
    PageError,
    Value,
)

INDEX_PAGES_MAX = 100_000
"""Pages whose order is kept in memory. If there are more, the file is read several times."""
PAYLOAD_BYTES_MAX = 300_000_000
"""Bytes of one row, at most: more than any ingress lets in. A damaged length must not use up the memory."""
SMALL_BYTES_MAX = 1_000_000
"""Bytes of one row of a small table, at most: sensors wait for these tables."""
PAGES_CACHED_MAX = 64
LOCAL_BYTES_MIN = 300
"""Bytes of payload and boot below which a row never has overflow pages of 4096 bytes."""
_OFFSET_MIN_US = 10**15
"""Least offset of a synced wall clock. Without it, rows of the index of `usage` look like those of `boot`."""

Key = tuple[int, int]
"""The order of rows: (lane, sequence), or (0, number)."""
Rest = Callable[[], None]
"""Called after each page: lets others work, and raises if the scan is to end."""
Keyed = Callable[[bytes, BtreePage], list[tuple[Key, Cell]]]
"""Returns the entries of a page that belong to one table, with their keys."""


def no_rest() -> None:
    """Do not rest, for a scan that somebody waits for."""


Record = tuple[int | None, tuple[Value, ...]]
"""A rowid, if there is one, and the values."""


class Shape(NamedTuple):
    """The columns of a table or an index: a letter for each, a capital if it may be NULL."""

    columns: str
    columns_min: int
    has_rowid: bool


_OF_LETTER: dict[str, type] = {"s": str, "i": int, "b": bytes}
SHAPES = {
    "meta": Shape("ss", 2, has_rowid=False),
    "boot": Shape("siIIIBiiI", 3, has_rowid=False),
    "lane": Shape("NssIS", 4, has_rowid=True),
    "lane_copy": Shape("ssSi", 4, has_rowid=False),
    "sqlite_autoindex_lane_1": Shape("si", 2, has_rowid=False),
    "series": Shape("NssssssS", 7, has_rowid=True),
    "sqlite_autoindex_series_1": Shape("ssssssi", 7, has_rowid=False),
    "device_run": Shape("sssiib", 6, has_rowid=False),
    "mark": Shape("sb", 2, has_rowid=False),
    "loss": Shape("ssssiiiII", 9, has_rowid=False),
}


def is_shaped(name: str, rowid: int | None, values: Sequence[Value]) -> bool:
    """Whether a record looks like one of this table or index."""
    shape = SHAPES[name]
    if (rowid is not None) != shape.has_rowid or not shape.columns_min <= len(values) <= len(shape.columns):
        return False
    for letter, value in zip(shape.columns, values, strict=False):
        if type(value) is not _OF_LETTER.get(letter.lower()) and (value is not None or letter.islower()):
            return False
    return name != "boot" or values[2] is None or (isinstance(values[1], int) and values[1] > _OFFSET_MIN_US)


class DamagedPages:
    """The pages of a damaged file, or their later images in its WAL's commits. Nothing is changed."""

    page_bytes = usable_bytes = sqlite_pages.PAGE_BYTES_DEFAULT
    """The page size of Sluice's files. Any other size in a header is damage."""

    def __init__(self, path: Path, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        """Raises OSError if the file is missing or cannot be opened."""
        self._payload_bytes_max = payload_bytes_max
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._wal_fd = -1
        self._wal: dict[int, int] = {}
        self.header: FileHeader | None = None
        try:
            pages_max = self.count = os.fstat(self._fd).st_size // self.page_bytes
            with suppress(FileNotFoundError):
                self._wal_fd = os.open(path.with_name(path.name + "-wal"), os.O_RDONLY | os.O_CLOEXEC)
                pages_max += os.fstat(self._wal_fd).st_size // self.page_bytes
                with suppress(PageError):
                    wal = sqlite_pages.wal(lambda start, size: _read(self._wal_fd, start, size))
                    if wal.page_bytes == self.page_bytes:
                        # A page number beyond both files must not use up the memory.
                        self._wal = {number: place for number, place in wal.pages.items() if number <= pages_max}
            self.count = max(self.count, *self._wal, 0)
            with suppress(PageError):
                header = sqlite_pages.file_header(self.page(1))
                if header.page_bytes == header.usable_bytes == self.page_bytes:
                    self.header = header
        except BaseException:
            self.close()
            raise

    @property
    def has_commits_in_wal(self) -> bool:
        """Whether the WAL holds commits."""
        return bool(self._wal)

    def close(self) -> None:
        os.close(self._fd)
        if self._wal_fd >= 0:
            os.close(self._wal_fd)

    def page(self, number: int) -> bytes:
        """A page as it was committed last. Raises PageError if there is none, or the disk does not give it."""
        if not 1 <= number <= self.count:
            raise PageError(f"there is no page {number}")
        place = self._wal.get(number)
        if place is None:
            content = _read(self._fd, (number - 1) * self.page_bytes, self.page_bytes)
        else:
            content = _read(self._wal_fd, place, self.page_bytes)
        if len(content) < self.page_bytes:
            raise PageError(f"page {number} is cut off, or cannot be read")
        return content

    def _overflow(self, number: int) -> bytes:
        content = self.page(number)
        if not any(content):
            # An empty page would end a chain like any other page. A card gives one for a block that it has lost.
            raise PageError(f"page {number} is empty")
        return content

    def btree(self, number: int) -> tuple[bytes, BtreePage]:
        """A b-tree page. Raises PageError if it is none."""
        content = self.page(number)
        return content, sqlite_pages.btree_page(content, number, self.usable_bytes)

    def values(self, content: bytes, cell: Cell) -> tuple[Value, ...]:
        """The record of an entry. Raises PageError if it, or one of its overflow pages, is damaged."""
        fetched = sqlite_pages.payload(content, cell, self.usable_bytes, self._overflow, self._payload_bytes_max)
        return sqlite_pages.record(fetched)

    def free(self) -> tuple[bytearray, bool]:
        """By page number: 1 if it is free, as far as the freelist can be read; and whether all of it could be read."""
        free = bytearray(self.count + 1)
        if self.header is None:
            return free, False
        try:
            for number in sqlite_pages.free_pages(self.header, self.page, self.count):
                free[number] = 1
        except PageError:
            return free, False
        return free, True


def _read(fd: int, start: int, size: int) -> bytes:
    """Read bytes; none if the disk refuses, as a block that a card cannot read is damage like any other."""
    try:
        return os.pread(fd, size, start)
    except OSError:
        return b""


# -- trees ------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """The pages that can be reached from a table's root."""

    reached: bytearray
    """By page number: 1 if it was reached."""
    known: bool
    """Whether no page is hidden, as no interior page is damaged. Leaves may be."""
    unreadable: int
    """Pages that the tree leads to, but that do not belong to it."""

    def numbers(self) -> Iterator[int]:
        number = -1
        while (number := self.reached.find(1, number + 1)) >= 0:
            yield number


@cache
def _roots_of_schema() -> dict[str, int]:
    """The root pages of a new file of this schema, which never move."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as file:
        for statement in chain.from_iterable(MIGRATIONS):
            file.execute(statement)
        return dict(file.execute("SELECT name, rootpage FROM sqlite_master").fetchall())


def _roots(pages: DamagedPages) -> dict[str, int]:
    """Root pages by the names of tables and indexes: from the file, else from this schema."""
    found: dict[str, int] = {}
    for number in _tree(pages, 1, lambda values: len(values) == 5, no_rest).numbers():
        with suppress(PageError):
            content, page = pages.btree(number)
            for cell in page.cells if page.kind == LEAF_TABLE else ():
                with suppress(PageError):
                    match pages.values(content, cell):
                        case (str(), str(name), str(), int(root), _) if 1 < root <= pages.count:
                            found[name] = root
    return _roots_of_schema() | found


def _tree(
    pages: DamagedPages,
    root: int,
    is_of: Callable[[tuple[Value, ...]], bool],
    rest: Rest,
    ranks_of: Callable[[DamagedPages, int, bytes], list[int] | None] | None = None,
) -> Tree:
    """Follow a tree down from its root, level by level.

    All leaves of a tree are on one level. An unreadable page on it is a leaf, and costs only its own rows. On any other
    level it hides further pages. `is_of` says whether a record belongs to this table. `ranks_of` gives the ranks of a
    page's entries, or of a leaf's first and last entry, if their order is to be checked.
    """
    reached, queued = bytearray(pages.count + 1), bytearray(pages.count + 1)
    level = _queue([root], queued)
    known, unreadable = bool(level), 0
    # Between two pages of a level there is an entry further up, by which SQLite finds its way.
    between, last = array("q"), -1
    while level:
        below: list[int] = []
        between_below = array("q")
        kinds: set[int] = set()
        for place, number in enumerate(level):
            rest()
            try:
                content = pages.page(number)
                start = FILE_HEADER_BYTES if number == 1 else 0
                kind = content[start]
                page = None
                if number != root and not any(content[start + 3 : start + 5]):
                    raise PageError("a page without entries, which only a root may be")  # noqa: TRY301
                # One leaf shows which table all leaves belong to. Each interior page is checked.
                if kind in {INTERIOR_INDEX, INTERIOR_TABLE} or kind not in kinds:
                    page = sqlite_pages.btree_page(content, number, pages.usable_bytes)
                    _expect(pages, content, page, is_of)
            except PageError:
                kinds.add(0)
                unreadable += 1
                continue
            kinds.add(kind)
            reached[number] = 1
            is_leaf = kind in {LEAF_INDEX, LEAF_TABLE}
            if ranks_of is not None and not (is_leaf and number == root):
                # A sound page in the wrong place is out of order, and so is a damaged entry between two pages.
                ranks = ranks_of(pages, number, content)
                following = between[place : place + 1]
                if ranks is None:
                    unreadable += 1
                elif not is_leaf:
                    between_below.extend(ranks)
                    between_below.extend(following)
                else:
                    unreadable += ranks[0] <= last or any(rank <= ranks[-1] for rank in following)
                    last = following[0] if following else ranks[-1]
            if page is not None and page.children:
                new = _queue(page.children, queued)
                known = known and page.whole and len(new) == len(page.children)
                below += new
        kinds_known = kinds - {0}
        known = known and bool(kinds_known) and (len(kinds) == 1 or (len(kinds_known) == 1 and not below))
        level, between = below, between_below
    return Tree(reached, known, unreadable)


def _queue(numbers: Sequence[int], queued: bytearray) -> list[int]:
    """The existing page numbers, each once for the whole tree."""
    new = []
    for number in numbers:
        if 0 < number < len(queued) and not queued[number]:
            queued[number] = 1
            new.append(number)
    return new


def _reading_ranks(pages: DamagedPages, number: int, content: bytes) -> list[int] | None:
    """The ranks of `reading` rows on a page, or of a leaf's first and last row; None if an entry is no row."""
    with suppress(PageError):
        if content[0] == INTERIOR_INDEX:
            page = sqlite_pages.btree_page(content, number, pages.usable_bytes)
            keyed = reading_keys(content, page)
            return [_rank(key) for key, _ in keyed] if len(keyed) == len(page.cells) else None
        edges = sqlite_pages.edge_cells(content, number, pages.usable_bytes)
        match [_beginning(content, cell, 2) for cell in edges]:
            case [(int(lane), int(sequence)), (int(last_lane), int(last_sequence))]:
                return [_rank((lane, sequence)), _rank((last_lane, last_sequence))]
    return None


def _quarantine_ranks(pages: DamagedPages, number: int, content: bytes) -> list[int] | None:
    """Such ranks of `quarantine`. A number above the leaves is the last one that may come before it (section 1.6)."""
    with suppress(PageError):
        if content[0] == INTERIOR_TABLE:
            page = sqlite_pages.btree_page(content, number, pages.usable_bytes)
            return [2 * _rank((0, max(cell.rowid or 0, 0))) + 1 for cell in page.cells] if page.whole else None
        edges = sqlite_pages.edge_cells(content, number, pages.usable_bytes)
        return [2 * _rank((0, max(cell.rowid or 0, 0))) for cell in edges] or None
    return None


def _expect(pages: DamagedPages, content: bytes, page: BtreePage, is_of: Callable[[tuple[Value, ...]], bool]) -> None:
    """Raise PageError if a page has records, but none of this table."""
    if page.kind == INTERIOR_TABLE or not page.cells:
        return
    for cell in page.cells:
        with suppress(PageError):
            if is_of(pages.values(content, cell)):
                return
    raise PageError("a page of another table")


# -- the small tables -------------------------------------------------------------------------------


@dataclass(slots=True)
class Small:
    """The records beside the rows, by table or index."""

    rows: dict[str, list[Record]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    """Tables and indexes of which nothing is missing, and without deleted records."""
    row_lanes: set[int] = field(default_factory=set)
    """Lane numbers of rows that were found, if all pages were read."""
    certain: bool = True
    """Whether no deleted row is in it."""


def read_small(pages: DamagedPages, names: Sequence[str]) -> Small:
    """Read small tables and indexes by their own trees: quick, whatever the size of the file."""
    small = Small()
    roots = _roots(pages)
    for name in names:
        root = roots.get(name, 0)
        tree = _tree(pages, root, lambda values, name=name: _fits(name, values), no_rest)  # type: ignore[misc]
        found, whole = [], tree.known
        for number in tree.numbers():
            try:
                content, page = pages.btree(number)
            except PageError:
                whole = False
                continue
            entries = [entry for entry in _records(pages, content, page) if is_shaped(name, *entry)]
            found += entries
            whole = whole and page.whole and (page.kind == INTERIOR_TABLE or len(entries) == len(page.cells))
        small.rows[name] = found
        if whole and not tree.unreadable:
            small.whole.add(name)
    return small


def _fits(name: str, values: tuple[Value, ...]) -> bool:
    return is_shaped(name, 0 if SHAPES[name].has_rowid else None, values)


def _records(pages: DamagedPages, content: bytes, page: BtreePage) -> list[Record]:
    """The readable records of a page."""
    found: list[Record] = []
    for cell in page.cells if page.kind != INTERIOR_TABLE else ():
        with suppress(PageError):
            found.append((cell.rowid, pages.values(content, cell)))
    return found


def scan_small(pages: DamagedPages, rest: Rest) -> Small:
    """Look for the small tables, and for the lanes of rows, on every page that is not known to be free."""
    free, is_certain = pages.free()
    small = Small(rows={name: [] for name in SHAPES}, certain=is_certain)
    for number in range(2, pages.count + 1):
        rest()
        if free[number]:
            continue
        with suppress(PageError):
            content = pages.page(number)
            lane = _only_lane(pages, number, content)
            if lane is not None:
                small.row_lanes.add(lane)
                continue
            page = sqlite_pages.btree_page(content, number, pages.usable_bytes)
            keys = reading_keys(content, page)
            if keys:
                small.row_lanes |= {lane for (lane, _), _ in keys}
            else:
                for record in _records(pages, content, page):
                    for name in SHAPES:
                        if is_shaped(name, *record):
                            small.rows[name].append(record)
    return small


def _only_lane(pages: DamagedPages, number: int, content: bytes) -> int | None:
    """The lane of a page that holds rows of one lane; None if the page needs a closer look."""
    if content[0] not in {LEAF_INDEX, INTERIOR_INDEX}:
        return None
    with suppress(PageError):
        edges = sqlite_pages.edge_cells(content, number, pages.usable_bytes)
        lanes = {_beginning(content, cell, 2)[0] for cell in edges}
        lane = lanes.pop() if len(lanes) == 1 else None
        return lane if type(lane) is int and lane > 0 else None
    return None


# -- rows, in their order ---------------------------------------------------------------------------


def reading_keys(content: bytes, page: BtreePage) -> list[tuple[Key, Cell]]:
    """The entries of a page that begin like rows of `reading`, by lane and sequence."""
    if page.kind not in {LEAF_INDEX, INTERIOR_INDEX}:
        return []
    keyed: list[tuple[Key, Cell]] = []
    for cell in page.cells:
        with suppress(PageError):
            lane, sequence = _beginning(content, cell, 2)
            if type(lane) is int and type(sequence) is int and lane > 0 and sequence >= 0:
                keyed.append(((lane, sequence), cell))
    return _ascending(keyed)


def quarantine_keys(content: bytes, page: BtreePage) -> list[tuple[Key, Cell]]:
    """The entries of a page that begin like rows of `quarantine`, by number."""
    if page.kind != LEAF_TABLE:
        return []
    keyed: list[tuple[Key, Cell]] = []
    for cell in page.cells:
        with suppress(PageError):
            match _beginning(content, cell, 4):
                case (None, str(), int(), str()) if cell.rowid is not None and cell.rowid > 0:
                    keyed.append(((0, cell.rowid), cell))
    return _ascending(keyed)


def _beginning(content: bytes, cell: Cell, columns: int) -> tuple[Value, ...]:
    values = sqlite_pages.record(content[cell.start : cell.start + cell.local_bytes], columns)
    if len(values) < columns:
        raise PageError("a record with too few columns")
    return values


def _ascending(keyed: list[tuple[Key, Cell]]) -> list[tuple[Key, Cell]]:
    """The longest ascending run of keys. SQLite keeps keys in order, so the others are damaged."""
    if all(before[0] < after[0] for before, after in pairwise(keyed)):
        return keyed
    # For each length of a run: the least key that it can end with. For each key: the one before it in its run.
    ends: list[Key] = []
    last: list[int] = []
    before: list[int] = []
    for place, (key, _) in enumerate(keyed):
        length = bisect_left(ends, key)
        ends[length : length + 1] = [key]
        last[length : length + 1] = [place]
        before.append(last[length - 1] if length else -1)
    run: list[tuple[Key, Cell]] = []
    place = last[-1]
    while place >= 0:
        run.append(keyed[place])
        place = before[place]
    return run[::-1]


class Wanted:
    """The rows that a scan is to find: those of spans that do not overlap."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = sorted(spans)
        self._starts = [(span.lane, span.first) for span in self._spans]

    def __call__(self, key: Key) -> bool:
        place = bisect_right(self._starts, key) - 1
        return place >= 0 and self._spans[place].lane == key[0] and key[1] <= self._spans[place].last


class Scan:
    """Rows of one table in a damaged file's pages, whether or not its tree leads there; each once, in order."""

    def __init__(self, pages: DamagedPages, table: str, keyed: Keyed, rest: Rest) -> None:
        self._pages = pages
        self._keyed = keyed
        self._rest = rest
        self._cached: dict[int, tuple[bytes, list[tuple[Key, Cell]]]] = {}
        root = _roots(pages).get(table, 0)
        self._kinds = {LEAF_INDEX, INTERIOR_INDEX} if table == "reading" else {LEAF_TABLE}
        if table == "reading":
            self._tree = _tree(pages, root, _is_reading, rest, _reading_ranks)
        else:
            self._tree = _tree(pages, root, _is_quarantined, rest, _quarantine_ranks)
        self._free, freelist_whole = pages.free()
        # A page that the tree uses is not free, even if the freelist, which may be older, says so.
        contradicted = any(self._free[number] for number in self._tree.numbers())
        self._by_freelist = freelist_whole and not contradicted
        if contradicted:
            # The tree, too, may be the older of the two.
            self._tree = self._tree._replace(known=False)
        self.certain = self._by_freelist or self._tree.known
        """Whether no row is found that had been deleted from the file."""
        self.is_faulty = False
        """Whether unreadable entries were met. Readers of `entries` set it too."""
        self._owners: array[int] | None = None

    @property
    def is_tree_sound(self) -> bool:
        """Whether the tree leads to all of its pages, as far as the beginnings of the pages tell."""
        return self._tree.known and not self._tree.unreadable

    def is_whole(self) -> bool:
        """Whether every row that the file had was found; known once `entries` has ended."""
        return self.is_tree_sound and not self.is_faulty and not self.has_strays()

    def has_strays(self) -> bool:
        """Whether used pages hold rows of this table although its tree does not lead there."""
        for number in range(2, self._pages.count + 1):
            self._rest()
            if self._by_freelist and not self._free[number] and not self._tree.reached[number]:
                with suppress(PageError):
                    content = self._pages.page(number)
                    if content[0] in self._kinds and self._read(number)[1]:
                        return True
        return False

    def _is_live(self, number: int) -> bool:
        if self._by_freelist:
            return not self._free[number]
        if self._tree.known:
            return bool(self._tree.reached[number])
        return bool(self._tree.reached[number]) or not self._free[number]

    def entries(self, after: Key, wanted: Callable[[Key], bool]) -> Iterator[tuple[Key, tuple[Value, ...]]]:
        """Keys and records behind a key, in order."""
        if not self.certain and self._owners is None:
            self._owners = self._owned()
        horizon: Key | None = after
        while horizon is not None:
            index, horizon = self._index(after, wanted)
            for key, number, place in self._merged(index, after, horizon, wanted):
                if key <= after:
                    continue  # another page had it
                try:
                    content, keyed = self._page(number)
                    values = self._values(key, content, keyed[place][1])
                except PageError:
                    self.is_faulty = True
                    continue
                after = key
                yield key, values
            if horizon is not None:
                # All keys before the horizon are done.
                after = max(after, (horizon[0], horizon[1] - 1))

    def _index(self, after: Key, wanted: Callable[[Key], bool]) -> tuple[list[tuple[Key, int]], Key | None]:
        """Pages by their first key, and the key from which on the index had no room, or None."""
        index: list[tuple[Key, int]] = []
        horizon: Key | None = None
        for number in range(2, self._pages.count + 1):
            self._rest()
            if not self._is_live(number):
                continue
            try:
                content, page = self._pages.btree(number)
            except PageError:
                continue
            keyed = self._keyed(content, page)
            if self._tree.reached[number] and page.kind != INTERIOR_TABLE:
                self.is_faulty |= not page.whole or len(keyed) < len(page.cells)
            first = next((key for key, _ in keyed if key > after and wanted(key)), None)
            if first is None or (horizon is not None and first >= horizon):
                continue
            index.append((first, number))
            if len(index) > 2 * INDEX_PAGES_MAX:
                index.sort()
                del index[INDEX_PAGES_MAX + 1 :]
                last, _ = index.pop()
                # All keys before the horizon are in the index. At least one key is, however many pages begin with it.
                horizon = max(last, (index[0][0][0], index[0][0][1] + 1))
        index.sort()
        return index, horizon

    def _merged(
        self, index: Sequence[tuple[Key, int]], after: Key, horizon: Key | None, wanted: Callable[[Key], bool]
    ) -> Iterator[tuple[Key, int, int]]:
        """Keys in order, with page and place on it. For equal keys, pages that the tree leads to come first."""
        heap: list[tuple[Key, bool, int, int]] = []
        opened = 0
        while heap or opened < len(index):
            while opened < len(index) and (not heap or index[opened][0] <= heap[0][0]):
                self._push(heap, index[opened][1], -1, after, wanted)
                opened += 1
            if not heap:
                continue
            key, _, number, place = heapq.heappop(heap)
            if horizon is not None and key >= horizon:
                return
            yield key, number, place
            self._rest()
            self._push(heap, number, place, after, wanted)

    def _push(
        self,
        heap: list[tuple[Key, bool, int, int]],
        number: int,
        place: int,
        after: Key,
        wanted: Callable[[Key], bool],
    ) -> None:
        """Push the next key of a page behind a place on the heap."""
        with suppress(PageError):
            _, keyed = self._page(number)
            for following in range(place + 1, len(keyed)):
                key = keyed[following][0]
                if key > after and wanted(key):
                    heapq.heappush(heap, (key, not self._tree.reached[number], number, following))
                    return

    def _page(self, number: int) -> tuple[bytes, list[tuple[Key, Cell]]]:
        found = self._cached.pop(number, None) or self._read(number)
        self._cached[number] = found
        if len(self._cached) > PAGES_CACHED_MAX:
            del self._cached[next(iter(self._cached))]
        return found

    def _read(self, number: int) -> tuple[bytes, list[tuple[Key, Cell]]]:
        content, page = self._pages.btree(number)
        return content, self._keyed(content, page)

    def _owned(self) -> "array[int]":
        """By overflow page, the newest row that claims it. An older row that claims it too had been deleted.

        Without a freelist and a tree, nothing else tells which rows are gone.
        """
        owners = array("q", bytes(8 * (self._pages.count + 1)))
        for number in range(2, self._pages.count + 1):
            self._rest()
            with suppress(PageError):
                if not self._is_live(number):
                    continue
                content, keyed = self._read(number)
                for key, cell in keyed:
                    if cell.overflow:
                        rank = _rank(key)
                        for page in self._chain(content, cell):
                            owners[page] = max(owners[page], rank)
        return owners

    def _chain(self, content: bytes, cell: Cell) -> list[int]:
        numbers: list[int] = []

        def fetch(number: int) -> bytes:
            numbers.append(number)
            return self._pages.page(number)

        with suppress(PageError):
            sqlite_pages.payload(content, cell, self._pages.usable_bytes, fetch, PAYLOAD_BYTES_MAX)
        return [number for number in numbers if number <= self._pages.count]

    def _values(self, key: Key, content: bytes, cell: Cell) -> tuple[Value, ...]:
        if cell.overflow and self._owners is not None:
            rank = _rank(key)
            if any(self._owners[page] != rank for page in self._chain(content, cell)):
                raise PageError("an overflow page that a newer row has")
        return self._pages.values(content, cell)


class OverflowCheck:
    """Checks overflow pages of rows that SQLite gives, as SQLite takes any page for the last of a chain.

    Keys in order cost little.
    """

    def __init__(self, pages: DamagedPages) -> None:
        self._pages = pages
        self._root = _roots(pages).get("reading", 0)
        self._path: dict[int, tuple[bytes, BtreePage, list[Key]]] = {}
        """The pages from the root down to the last key."""

    def is_damaged(self, row: Row) -> bool:
        """Whether a row is known to be damaged. If the row cannot be found here, SQLite is believed."""
        if len(row.datum.payload) + len(row.datum.device_boot or "") < LOCAL_BYTES_MIN:
            return False
        key, number, path = (row.lane, row.sequence), self._root, self._path
        self._path = {}
        while number not in self._path:
            try:
                content, page, keys = self._path[number] = path.get(number) or self._read(number)
            except PageError:
                return False
            place = bisect_left(keys, key)
            if place < len(keys) and keys[place] == key:
                try:
                    self._pages.values(content, page.cells[place])
                except PageError:
                    return True
                return False
            if not page.children:
                return False
            number = page.children[place]
        return False

    def _read(self, number: int) -> tuple[bytes, BtreePage, list[Key]]:
        content, page = self._pages.btree(number)
        keys = [key for key, _ in reading_keys(content, page)]
        if len(keys) < len(page.cells) or not page.whole:
            raise PageError("a page that cannot be followed")
        return content, page, keys


def _rank(key: Key) -> int:
    """A key in 8 bytes. Later rows, of higher lanes or sequences, have higher ranks."""
    return min(key[0], 2**22 - 1) << 40 | min(key[1], 2**40 - 1)


def found_rows(scan: Scan, after: Key, wanted: Callable[[Key], bool]) -> Iterator[Row]:
    """Rows of `reading`, in order."""
    for _, values in scan.entries(after, wanted):
        try:
            # Bytes are told to be known. Else a text, as a damaged type makes one, would be read as base64.
            row = msgspec.convert((*values[:3], values[3:]), Row, builtin_types=(bytes,))
        except msgspec.ValidationError:
            scan.is_faulty = True
        else:
            yield row


def found_quarantined(scan: Scan, after: int, wanted: Callable[[Key], bool]) -> Iterator[tuple[int, Quarantined]]:
    """Quarantined input with its numbers, in order."""
    for (_, number), values in scan.entries((0, after), wanted):
        columns = dict(zip(_QUARANTINE_COLUMNS, values[1:], strict=False))
        try:
            input_ = Quarantined.checked(columns)
        except msgspec.ValidationError:
            scan.is_faulty = True
        else:
            yield number, input_


_READING_COLUMNS = range(len(ROW_COLUMNS) - 2, len(ROW_COLUMNS) + 1)
"""Rows stored before the last two columns were added lack these."""
_QUARANTINE_COLUMNS = (
    "boot_id",
    "received_us",
    "device",
    "subject",
    "reason",
    "payload",
    "series",
    "topic",
    "writer",
    "event_us",
    "event_error_us",
    "tick_ms",
    "device_boot",
    "device_sequence",
    "doubt",
    "device_time_us",
)


def _is_reading(values: tuple[Value, ...]) -> bool:
    return len(values) in _READING_COLUMNS and type(values[0]) is int and type(values[1]) is int


def _is_quarantined(values: tuple[Value, ...]) -> bool:
    match values:
        case (None, str(), int(), str(), *_):
            return True
    return False
