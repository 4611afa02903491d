"""Finds rows in a damaged buffer file page by page, without SQLite.

A table's tree leads to its rows in their order. Rows that it does not lead to are found on the other pages that the
file still uses, as far as the freelist or the tree tells. Nothing is ever changed.
Memory: two bytes for each page, and 16 bytes for each run of consecutive rows.
"""

import os
import sqlite3
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from gateway.buffer import sqlite_pages
from gateway.buffer.rows import Quarantined, Row
from gateway.buffer.schema import MIGRATIONS
from gateway.buffer.sqlite_pages import (
    INTERIOR_INDEX,
    INTERIOR_TABLE,
    LEAF_INDEX,
    BtreePage,
    Cell,
    FileHeader,
    PageError,
    Value,
)

PAYLOAD_BYTES_MAX = 300_000_000
"""Bytes of one row, at most: more than any ingress lets in. A damaged length must not use up the memory."""
SMALL_BYTES_MAX = 1_000_000
"""Bytes of one row of a small table, at most: sensors wait for these tables."""
KEY_MAX = 2**62
"""Above every key."""
_SEQUENCE_BITS = 40
_LANE_BITS = 22
_LEVELS_MAX = 20
"""Levels of a tree, at most. Those of SQLite's largest file are fewer."""
_OFFSET_MIN_US = 10**15
"""Least offset of a synced wall clock. Without it, rows of the index of `usage` look like those of `boot`."""

Rest = Callable[[], None]
"""Called after each page: lets others work, and raises if the scan is to end."""
Keyed = Callable[[bytes, BtreePage], list[tuple[int, Cell]]]
"""Returns the entries of a page that belong to one table, with their keys: see `key_of`, or a rowid."""


def key_of(lane: int, sequence: int) -> int:
    """A row's key: later rows, of higher lanes or sequences, have higher keys."""
    return lane << _SEQUENCE_BITS | sequence


def lane_of(key: int) -> int:
    """The lane of a row's key."""
    return key >> _SEQUENCE_BITS


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
    "sqlite_sequence": Shape("si", 2, has_rowid=True),
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


class Entry(NamedTuple):
    """An entry of a tree, and where it stands."""

    key: int
    number: int
    """Number of its page."""
    content: bytes
    cell: Cell


class Tree:
    """Follows a table's tree from its root.

    All leaves of a tree are on one level. An unreadable page on it is a leaf, and costs only its own rows. On any other
    level it hides further pages.
    """

    def __init__(self, pages: DamagedPages, root: int, keyed: Keyed, rest: Rest = no_rest) -> None:
        self._pages = pages
        self._root = root
        self._keyed = keyed
        self._rest = rest
        self.reached = bytearray(pages.count + 1)
        """By page number: 1 if the tree leads to the page, 2 if some of its keys do not belong there."""
        self.gaps: list[tuple[int, int]] = []
        """Keys between which entries are missing: behind the first, and up to the second."""
        self._is_whole = True
        self._levels: set[int] = set()
        """The levels of leaves."""
        self._lost: set[int] = set()
        """The levels of unreadable pages."""

    @property
    def is_known(self) -> bool:
        """Whether no page is hidden, as no interior page is damaged. Leaves may be."""
        return self._is_whole and len(self._levels) == 1 and self._lost <= self._levels

    @property
    def is_sound(self) -> bool:
        """Whether the tree leads to all of its entries."""
        return self.is_known and not self.gaps

    def entries(self, above: int = -1) -> Iterator[Entry]:
        """The entries with keys above one, in order. Entries out of order are left out."""
        last = -1
        for entry in self._below(self._root, 0, 0, KEY_MAX, above):
            if last < entry.key or not last:
                last = entry.key
                yield entry
            else:
                # A sound page in the wrong place is out of order.
                self._note_gap(last, last)
                self.reached[entry.number] = 2

    def follow(self) -> None:
        """Follow it to its end, for what it says about itself."""
        for _ in self.entries():
            pass

    def _below(self, number: int, level: int, low: int, high: int, above: int) -> Iterator[Entry]:
        """The entries of a page and of those below it. Their keys lie between two of entries further up."""
        self._rest()
        if high <= above:
            return
        try:
            content, page, keyed = self._opened(number, level)
        except PageError:
            self._note_gap(low, high)
            return
        keys = {cell: key for key, cell in keyed if low <= key <= high}
        self.reached[number] = 1 if len(keys) == len(keyed) else 2
        if len(keys) < len(page.cells) or not page.whole:
            self._note_gap(low, high)
        # If an entry's key is damaged, the next one is the bound of the pages before both.
        bounds = [high]
        for cell in reversed(page.cells):
            bounds.append(keys.get(cell, bounds[-1]))
        for place, cell in enumerate(page.cells):
            if page.children:
                yield from self._below(page.children[place], level + 1, low, bounds[-1 - place], above)
            low = keys.get(cell, low)
            if cell in keys and low > above and page.kind != INTERIOR_TABLE:
                yield Entry(low, number, content, cell)
        if page.children:
            yield from self._below(page.children[-1], level + 1, low, high, above)

    def _opened(self, number: int, level: int) -> tuple[bytes, BtreePage, list[tuple[int, Cell]]]:
        """A page of this tree with its entries. Raises PageError if it is none."""
        if not 0 < number < len(self.reached) or self.reached[number] or level > _LEVELS_MAX:
            self._is_whole = False
            raise PageError(f"page {number} cannot be there")
        try:
            content, page = self._pages.btree(number)
            keyed = self._keyed(content, page)
            if not keyed and (number != self._root or page.cells):
                raise PageError(f"page {number} is of another table")  # noqa: TRY301
        except PageError:
            self._lost.add(level)
            raise
        if page.children:
            self._is_whole = self._is_whole and page.whole
        else:
            self._levels.add(level)
        return content, page, keyed

    def _note_gap(self, low: int, high: int) -> None:
        if self.gaps and self.gaps[-1][0] <= low <= self.gaps[-1][1]:
            self.gaps[-1] = self.gaps[-1][0], max(high, self.gaps[-1][1])
        else:
            self.gaps.append((low, high))


@cache
def _of_schema(statement: str) -> tuple[tuple[Any, ...], ...]:
    """The rows of a query of a new file of this schema."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as file:
        for migration in chain.from_iterable(MIGRATIONS):
            file.execute(migration)
        return tuple(file.execute(statement))


def _roots(pages: DamagedPages) -> dict[str, int]:
    """Root pages by the names of tables and indexes: from the file, else from this schema."""
    found: dict[str, int] = {}
    for _, values in _records(pages, 1, lambda _, values: len(values) == 5)[0]:
        match values:
            case (str(), str(name), str(), int(root), _) if 1 < root <= pages.count:
                found[name] = root
    # In a new file they are the same, and they never move.
    return dict(_of_schema("SELECT name, rootpage FROM sqlite_master")) | found


def _records(
    pages: DamagedPages, root: int, is_of: Callable[[int | None, tuple[Value, ...]], bool]
) -> tuple[list[Record], bool]:
    """The readable records of a small table, and whether these are all. `is_of` says which belong to it."""
    found: list[Record] = []

    def keyed(content: bytes, page: BtreePage) -> list[tuple[int, Cell]]:
        # They all have one key, as their order is that of texts.
        if page.kind == INTERIOR_TABLE:
            return [(0, cell) for cell in page.cells]
        of_page: list[tuple[int, Cell]] = []
        for cell in page.cells:
            with suppress(PageError):
                record = cell.rowid, pages.values(content, cell)
                if is_of(*record):
                    found.append(record)
                    of_page.append((0, cell))
        return of_page

    tree = Tree(pages, root, keyed)
    tree.follow()
    return found, tree.is_sound


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
        small.rows[name], is_whole = _records(pages, roots.get(name, 0), partial(is_shaped, name))
        if is_whole:
            small.whole.add(name)
    return small


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
            small.row_lanes |= {lane_of(key) for key, _ in keys}
            for cell in () if keys or page.kind == INTERIOR_TABLE else page.cells:
                with suppress(PageError):
                    record = cell.rowid, pages.values(content, cell)
                    for name in SHAPES:
                        if is_shaped(name, *record):
                            small.rows[name].append(record)
    return small


def lanes_of_rows(pages: DamagedPages) -> Iterator[int]:
    """Lane numbers of the rows that the tree leads to, by a few pages each."""
    root = _roots(pages).get("reading", 0)
    lane = 0
    while entry := next(Tree(pages, root, reading_keys).entries(key_of(lane + 1, 0) - 1), None):
        lane = lane_of(entry.key)
        yield lane


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


# -- rows -------------------------------------------------------------------------------------------


def reading_keys(content: bytes, page: BtreePage) -> list[tuple[int, Cell]]:
    """The entries of a page that begin like rows of `reading`, in order."""
    if page.kind not in {LEAF_INDEX, INTERIOR_INDEX}:
        return []
    keyed: list[tuple[int, Cell]] = []
    for cell in page.cells:
        with suppress(PageError):
            lane, sequence = _beginning(content, cell, 2)
            if (
                type(lane) is type(sequence) is int
                and 0 < lane < 1 << _LANE_BITS
                and 0 <= sequence < 1 << _SEQUENCE_BITS
            ):
                keyed.append((key_of(lane, sequence), cell))
    return _ascending(keyed)


def quarantine_keys(content: bytes, page: BtreePage) -> list[tuple[int, Cell]]:
    """The entries of a page that begin like rows of `quarantine`, by number."""
    keyed: list[tuple[int, Cell]] = []
    for cell in page.cells:
        if cell.rowid is None or not 0 < cell.rowid < KEY_MAX:
            continue
        with suppress(PageError):
            if page.kind == INTERIOR_TABLE:
                keyed.append((cell.rowid, cell))
                continue
            match _beginning(content, cell, 4):
                case (None, str(), int(), str()):
                    keyed.append((cell.rowid, cell))
    return _ascending(keyed)


def _beginning(content: bytes, cell: Cell, columns: int) -> tuple[Value, ...]:
    values = sqlite_pages.record(content[cell.start : cell.start + cell.local_bytes], columns)
    if len(values) < columns:
        raise PageError("a record with too few columns")
    return values


def _ascending(keyed: list[tuple[int, Cell]]) -> list[tuple[int, Cell]]:
    """The longest ascending run of keys. SQLite keeps keys in order, so the others are damaged."""
    if all(before[0] < after[0] for before, after in pairwise(keyed)):
        return keyed
    # For each length of a run: the least key that it can end with. For each key: the one before it in its run.
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for place, (key, _) in enumerate(keyed):
        length = bisect_left(ends, key)
        ends[length : length + 1] = [key]
        last[length : length + 1] = [place]
        before.append(last[length - 1] if length else -1)
    run: list[tuple[int, Cell]] = []
    place = last[-1]
    while place >= 0:
        run.append(keyed[place])
        place = before[place]
    return run[::-1]


def _as_row(values: tuple[Value, ...]) -> Row:
    # Rows stored before the last columns were added lack `doubt` and `device_time_us`.
    later = (0, None)[len(values) - len(Row.__struct_fields__) + 2 :]
    return msgspec.convert((*values, *later), Row)


def _as_input(values: tuple[Value, ...]) -> Quarantined:
    columns = (name for (name,) in _of_schema("SELECT name FROM pragma_table_info('quarantine')"))
    return msgspec.convert(dict(zip(columns, values, strict=False)), Quarantined)


T = TypeVar("T")


class Table(NamedTuple, Generic[T]):
    """A table whose rows are searched for."""

    name: str
    keyed: Keyed
    of_values: Callable[[tuple[Value, ...]], T]


READING = Table("reading", reading_keys, _as_row)
QUARANTINE = Table("quarantine", quarantine_keys, _as_input)


class Keys:
    """Keys as spans without holes."""

    def __init__(self) -> None:
        self._firsts, self._lasts = array("q"), array("q")

    def __contains__(self, key: int) -> bool:
        place = bisect_right(self._firsts, key) - 1
        return place >= 0 and key <= self._lasts[place]

    def add(self, key: int) -> None:
        """Add a key that is not there."""
        firsts, lasts = self._firsts, self._lasts
        place = bisect_right(firsts, key)
        is_next = place > 0 and lasts[place - 1] == key - 1
        is_before = place < len(firsts) and firsts[place] == key + 1
        if is_next and is_before:
            del lasts[place - 1], firsts[place]
        elif is_next:
            lasts[place - 1] = key
        elif is_before:
            firsts[place] = key
        else:
            firsts.insert(place, key)
            lasts.insert(place, key)

    def missing(self, first: int, last: int) -> int:
        """How many keys from one to another are not there."""
        places = range(bisect_left(self._lasts, first), bisect_right(self._firsts, last))
        there = sum(min(last, self._lasts[place]) - max(first, self._firsts[place]) + 1 for place in places)
        return max(0, last - first + 1) - there


class Scan(Generic[T]):
    """Rows of one table in a damaged file, whether or not its tree leads to them; each once.

    The file never changes, so every scan of it gives the same rows in the same order.
    """

    def __init__(self, pages: DamagedPages, table: Table[T], rest: Rest) -> None:
        self._pages = pages
        self._table = table
        self._rest = rest
        self._root = _roots(pages).get(table.name, 0)
        self._tree = Tree(pages, self._root, table.keyed, rest)
        self._tree.follow()
        self._free, freelist_whole = pages.free()
        # A page that the tree uses is not free, even if the freelist, which may be older, says so. The tree, too, may
        # be the older of the two.
        agree = not any(free and reached for free, reached in zip(self._free, self._tree.reached, strict=True))
        self._by_freelist = freelist_whole and agree
        self._by_tree = self._tree.is_known and agree
        self.certain = self._by_freelist or self._by_tree
        """Whether no row is found that had been deleted from the file."""
        self.is_whole = agree and self._tree.is_sound
        """Whether every row that the file had was found; known once `rows` has ended."""
        self.gaps: list[tuple[int, int]] = []
        """Keys to which the tree does not lead: behind the first of each pair, and up to the second."""
        self.found = Keys()
        """Keys of the rows that were found."""
        self.unreadable = array("q")
        """Keys of other rows."""
        self.ends: dict[int, tuple[int, int]] = {}
        """By lane: the first and the last key known to have been there, even if the rows are unreadable."""
        self._owners = None if self.certain else self._owned()

    def rows(self) -> Iterator[tuple[int, T]]:
        """Rows with their keys: first those that the tree leads to, in order, then those on other pages."""
        # This time the disk may give other pages.
        tree = Tree(self._pages, self._root, self._table.keyed, self._rest)
        for key, _, content, cell in tree.entries():
            self._note_end(key)
            yield from self._found(key, content, cell)
        self.gaps = tree.gaps
        self.is_whole = self.is_whole and tree.is_sound
        for number in range(2, self._pages.count + 1):
            if tree.reached[number] == 1:
                continue
            content, keyed = self._read(number)
            if keyed and self._by_freelist:
                self.is_whole = False
            for key, cell in keyed:
                if key not in self.found:
                    yield from self._found(key, content, cell)

    def _found(self, key: int, content: bytes, cell: Cell) -> Iterator[tuple[int, T]]:
        try:
            row = self._table.of_values(self._values(key, content, cell))
        except (PageError, msgspec.ValidationError):
            self.is_whole = False
            self.unreadable.append(key)
        else:
            self.found.add(key)
            self._note_end(key)
            yield key, row

    def _note_end(self, key: int) -> None:
        # Rows that had perhaps been deleted prove nothing.
        if self.certain:
            first, last = self.ends.get(lane_of(key), (key, key))
            self.ends[lane_of(key)] = min(first, key), max(last, key)

    def _read(self, number: int) -> tuple[bytes, list[tuple[int, Cell]]]:
        """A page's content and rows, none if the file does not use it."""
        self._rest()
        is_live = self._tree.reached[number] or (not self._free[number] and (self._by_freelist or not self._by_tree))
        with suppress(PageError):
            content, page = self._pages.btree(number) if is_live else (b"", None)
            if page is not None and page.kind != INTERIOR_TABLE:
                return content, self._table.keyed(content, page)
        return b"", []

    def _owned(self) -> "array[int]":
        """By overflow page, the newest row that claims it. An older row that claims it too had been deleted.

        Without a freelist and a tree, nothing else tells which rows are gone.
        """
        owners = array("q", bytes(8 * (self._pages.count + 1)))
        for number in range(2, self._pages.count + 1):
            content, keyed = self._read(number)
            for key, cell in keyed:
                for page in self._chain(content, cell):
                    owners[page] = max(owners[page], key)
        return owners

    def _chain(self, content: bytes, cell: Cell) -> list[int]:
        numbers: list[int] = []

        def fetch(number: int) -> bytes:
            numbers.append(number)
            return self._pages.page(number)

        with suppress(PageError):
            sqlite_pages.payload(content, cell, self._pages.usable_bytes, fetch, PAYLOAD_BYTES_MAX)
        return [number for number in numbers if number <= self._pages.count]

    def _values(self, key: int, content: bytes, cell: Cell) -> tuple[Value, ...]:
        if self._owners is not None and any(self._owners[page] != key for page in self._chain(content, cell)):
            raise PageError("an overflow page that a newer row has")
        return self._pages.values(content, cell)
