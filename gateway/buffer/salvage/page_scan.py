"""Finds rows in a damaged buffer file page by page, without SQLite.

A table's tree leads to its pages. Rows to which it does not lead are found on the other pages that the file still uses,
as far as the freelist or the tree tells. Nothing is ever changed.
Memory: some 80 bytes for each page with rows, and 200 bytes for each run of pages that a tree has lost.
"""

import heapq
import os
import sqlite3
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from gateway.buffer import sqlite_pages
from gateway.buffer.rows import LANE_MAX, SEQUENCE_BITS, SEQUENCE_MAX, Position, Quarantined, Row, of_sent
from gateway.buffer.schema import MIGRATIONS, READING_ROOT
from gateway.buffer.sqlite_pages import (
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
from gateway.reading import Datum

PAYLOAD_BYTES_MAX = 300_000_000
"""Bytes of one row, at most: more than any ingress lets in. A damaged length must not use up the memory."""
SMALL_BYTES_MAX = 1_000_000
"""Bytes of one row of a small table, at most: sensors wait for these tables."""
_KEY_BITS = 63
KEY_MAX = 1 << _KEY_BITS
"""Above every key."""
_NUMBER_BITS = 32
"""Bits of a page number."""
_PAGES_CACHED = 64
_LEVELS_MAX = 20
"""Levels of a tree, at most. Those of SQLite's largest file are fewer."""
_OFFSET_MIN_US = 10**15
"""Least offset of a synced wall clock. Without it, rows of the index of `usage` look like those of `boot`."""

Rest = Callable[[], None]
"""Called before each page is read: lets others work, and raises if the scan is to end."""
Keyed = Callable[[bytes, BtreePage], list[tuple[int, Cell]]]
"""Returns the entries of a page that belong to one table, with their keys: a row's place, or a number of the
quarantine, which is like a place in the lane 0."""


def lane_of(key: int) -> int:
    """The lane of a row's key."""
    return key >> SEQUENCE_BITS


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

    def __init__(self, path: Path, payload_bytes_max: int = PAYLOAD_BYTES_MAX, rest: Rest = no_rest) -> None:
        """Raises OSError if the file is missing or cannot be opened."""
        self._payload_bytes_max = payload_bytes_max
        self._rest = rest
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
                    wal = sqlite_pages.wal(lambda start, size: self._read(self._wal_fd, start, size))
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
            content = self._read(self._fd, (number - 1) * self.page_bytes, self.page_bytes)
        else:
            content = self._read(self._wal_fd, place, self.page_bytes)
        if len(content) < self.page_bytes:
            raise PageError(f"page {number} is cut off, or cannot be read")
        return content

    def _read(self, fd: int, start: int, size: int) -> bytes:
        """Read bytes; none if the disk refuses, as a block that a card cannot read is damage like any other."""
        self._rest()
        try:
            return os.pread(fd, size, start)
        except OSError:
            return b""

    def btree(self, number: int) -> tuple[bytes, BtreePage]:
        """A b-tree page. Raises PageError if it is none."""
        content = self.page(number)
        return content, sqlite_pages.btree_page(content, number, self.usable_bytes)

    def values(self, content: bytes, cell: Cell, visit: Callable[[int], None] = lambda _: None) -> tuple[Value, ...]:
        """The record of an entry. Raises PageError if it, or one of its overflow pages, is damaged.

        `visit` is called with the number of each overflow page, and may raise PageError too.
        """

        def fetch(number: int) -> bytes:
            page = self.page(number)
            visit(number)
            if not any(page) and number not in self._wal:
                # It would end a chain like any other page. A card gives zeros for a block that it has lost. The WAL has
                # checksums, so its zeros are believed.
                raise PageError(f"page {number} is empty")
            return page

        return sqlite_pages.record(
            sqlite_pages.payload(content, cell, self.usable_bytes, fetch, self._payload_bytes_max)
        )

    def free(self) -> tuple[bytearray, bool]:
        """By page number: 1 if it is free; and whether the freelist is whole. A damaged one tells of no page."""
        free = bytearray(self.count + 1)
        if self.header is not None:
            with suppress(PageError):
                for number in sqlite_pages.free_pages(self.header, self.page, self.count):
                    free[number] = 1
                return free, True
        return bytearray(self.count + 1), False


# -- trees ------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """An entry of a tree, and where it stands."""

    key: int
    number: int
    """Number of its page."""
    content: bytes
    cell: Cell
    last: int
    """The last key of its page."""


class Tree:
    """Follows a table's tree from its root.

    All leaves of a tree are on one level. An unreadable page on it is a leaf, and costs only its own rows. On any other
    level it hides further pages.
    """

    def __init__(self, pages: DamagedPages, root: int, keyed: Keyed) -> None:
        """`root` is the number of its first page, or that of a guess, negative."""
        self._pages = pages
        self._root = abs(root)
        self._keyed = keyed
        self.reached = bytearray(pages.count + 1)
        """By page number: 1 if the tree leads to the page, 2 if some of its keys do not belong there."""
        self.above = -1
        """Entries up to this key are passed over, with their pages. May grow between two entries."""
        self.gaps: list[tuple[int, int]] = []
        """Keys between which entries are missing: behind the first, and up to the second."""
        self._is_whole = root > 0
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

    def entries(self) -> Iterator[Entry]:
        """The entries in order. Entries out of order are left out."""
        last = -1
        for entry in self._below(self._root, 0, 0, KEY_MAX):
            if last < entry.key or not last:
                last = entry.key
                yield entry
            else:
                # A sound page in the wrong place is out of order.
                _add_gap(self.gaps, last, last)
                self.reached[entry.number] = 2

    def _below(self, number: int, level: int, low: int, high: int) -> Iterator[Entry]:
        """The entries of a page and of those below it. Their keys lie between two of entries further up."""
        if high <= self.above:
            return
        try:
            content, page, keyed = self._opened(number, level)
        except PageError:
            _add_gap(self.gaps, low, high)
            return
        keys = {cell: key for key, cell in keyed if low <= key <= high}
        self.reached[number] = 1 if len(keys) == len(keyed) else 2
        if len(keys) < len(page.cells) or not page.whole:
            _add_gap(self.gaps, low, high)
        # If an entry's key is damaged, the next one is the bound of the pages before both.
        bounds = [high]
        for cell in reversed(page.cells):
            bounds.append(keys.get(cell, bounds[-1]))
        last = keyed[-1][0] if keyed else low
        for place, cell in enumerate(page.cells):
            if page.children:
                yield from self._below(page.children[place], level + 1, low, bounds[-1 - place])
            low = keys.get(cell, low)
            if cell in keys and low > self.above and page.kind != INTERIOR_TABLE:
                yield Entry(low, number, content, cell, last)
        if page.children:
            yield from self._below(page.children[-1], level + 1, low, high)

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


def _add_gap(gaps: list[tuple[int, int]], low: int, high: int) -> None:
    """Add the keys behind `low`, up to `high`, to gaps that stay in order and do not touch each other."""
    start, end = bisect_left(gaps, low, key=itemgetter(1)), bisect_right(gaps, high, key=itemgetter(0))
    touching = [*gaps[start:end], (low, high)]
    gaps[start:end] = [(min(low for low, _ in touching), max(high for _, high in touching))]


@cache
def _of_schema(statement: str) -> tuple[tuple[Any, ...], ...]:
    """The rows of a query of a new file of this schema."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as file:
        for migration in chain.from_iterable(MIGRATIONS):
            file.execute(migration)
        return tuple(file.execute(statement))


def _roots(pages: DamagedPages) -> dict[str, int]:
    """Root pages by the names of tables and indexes: from the file, else from this schema.

    A table that the file does not have has the root 0. A guess is negative.
    """
    # In a new file they are the same, and they never move.
    roots = dict(_of_schema("SELECT name, rootpage FROM sqlite_master"))
    # In an upgraded file `reading` begins elsewhere. A file of a former version has no such table.
    records, is_whole = _records(pages, roots["meta"], partial(is_shaped, "meta"))
    roots["reading"] = 0 if is_whole else -roots["reading"]
    for _, (name, value) in records:
        if name == READING_ROOT:
            with suppress(ValueError):
                roots["reading"] = int(str(value))
    for _, values in _records(pages, 1, lambda _, values: len(values) == 5)[0]:
        match values:
            case (str(), "reading", str(), int(root), str(sql)) if 1 < root <= pages.count and "WITHOUT ROWID" in sql:
                roots["former_reading"], roots["reading"] = root, 0
            case (str(), str(name), str(), int(root), _) if 1 < root <= pages.count:
                roots[name] = root
    return roots


def _records(
    pages: DamagedPages,
    root: int,
    is_of: Callable[[int | None, tuple[Value, ...]], bool],
    claim: Callable[[bytes, Cell], None] = lambda *_: None,
) -> tuple[list[Record], bool]:
    """The readable records of a small table, and whether these are all. `is_of` says which belong to it.

    `claim` is called with each of its entries.
    """
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
    for entry in tree.entries():
        claim(entry.content, entry.cell)
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


def read_small(
    pages: DamagedPages, names: Iterable[str], claim: Callable[[bytes, Cell], None] = lambda *_: None
) -> Small:
    """Read small tables and indexes by their own trees: quick, whatever the size of the file.

    `claim` is called with each of their entries.
    """
    small = Small()
    roots = _roots(pages)
    for name in names:
        small.rows[name], is_whole = _records(pages, roots.get(name, 0), partial(is_shaped, name), claim)
        if is_whole:
            small.whole.add(name)
    return small


def scan_small(pages: DamagedPages) -> Small:
    """Look for the small tables, and for the lanes of rows, on every page that is not known to be free."""
    free, is_certain = pages.free()
    small = Small(rows={name: [] for name in SHAPES}, certain=is_certain)
    for number in range(2, pages.count + 1):
        if free[number]:
            continue
        with suppress(PageError):
            content = pages.page(number)
            lane = _only_lane(pages, number, content)
            if lane is not None:
                small.row_lanes.add(lane)
                continue
            page = sqlite_pages.btree_page(content, number, pages.usable_bytes)
            keys = reading_keys(content, page) or former_keys(content, page)
            if page.kind == INTERIOR_TABLE:
                # Its keys may be those of deleted rows.
                continue
            small.row_lanes |= {lane_of(key) for key, _ in keys}
            for cell in () if keys else page.cells:
                with suppress(PageError):
                    record = cell.rowid, pages.values(content, cell)
                    for name in SHAPES:
                        if is_shaped(name, *record):
                            small.rows[name].append(record)
    return small


def lanes_of_rows(pages: DamagedPages) -> Iterator[int]:
    """Lane numbers of the rows that trees lead to, by a few pages each."""
    for tree in _trees(pages, READING):
        for entry in tree.entries():
            lane = lane_of(entry.key)
            tree.above = Position(lane, SEQUENCE_MAX).place
            yield lane


def _only_lane(pages: DamagedPages, number: int, content: bytes) -> int | None:
    """The lane of a page that holds rows of one lane; None if the page needs a closer look."""
    if content[0] not in {LEAF_INDEX, INTERIOR_INDEX, LEAF_TABLE}:
        return None
    with suppress(PageError):
        edges = sqlite_pages.edge_cells(content, number, pages.usable_bytes)
        key = _reading_key if content[0] == LEAF_TABLE else _former_key
        keys = [key(content, cell) for cell in edges]
        lanes = {0 if key is None else lane_of(key) for key in keys}
        return lanes.pop() or None if len(lanes) == 1 else None
    return None


# -- rows -------------------------------------------------------------------------------------------


def reading_keys(content: bytes, page: BtreePage) -> list[tuple[int, Cell]]:
    """The entries of a page that begin like rows of `reading`, in order."""
    if page.kind == INTERIOR_TABLE:
        cells = ((cell.rowid, cell) for cell in page.cells)
        return _ascending([(key, cell) for key, cell in cells if key is not None and key > SEQUENCE_MAX])
    return _keyed(content, page, _reading_key) if page.kind == LEAF_TABLE else []


def _reading_key(content: bytes, cell: Cell) -> int | None:
    """The key of an entry that begins like a row of `reading`. Raises PageError."""
    # In the lane 0 there are none.
    if cell.rowid is None or cell.rowid <= SEQUENCE_MAX:
        return None
    nothing, series = _beginning(content, cell, 2)
    # In other tables of such numbers, if they were damaged, a text comes next.
    return cell.rowid if nothing is None and type(series) is not str else None


def former_keys(content: bytes, page: BtreePage) -> list[tuple[int, Cell]]:
    """The entries of a page that begin like rows of `former_reading`, in order."""
    return _keyed(content, page, _former_key) if page.kind in {LEAF_INDEX, INTERIOR_INDEX} else []


def _former_key(content: bytes, cell: Cell) -> int | None:
    """The key of an entry that begins like a row of `former_reading`. Raises PageError."""
    lane, sequence = _beginning(content, cell, 2)
    if type(lane) is int and type(sequence) is int and 0 < lane <= LANE_MAX and 0 <= sequence <= SEQUENCE_MAX:
        return Position(lane, sequence).place
    return None


def _keyed(content: bytes, page: BtreePage, key_of: Callable[[bytes, Cell], int | None]) -> list[tuple[int, Cell]]:
    """The entries of a page that have keys, in order."""
    keyed: list[tuple[int, Cell]] = []
    for cell in page.cells:
        with suppress(PageError):
            key = key_of(content, cell)
            if key is not None:
                keyed.append((key, cell))
    return _ascending(keyed)


def quarantine_keys(content: bytes, page: BtreePage) -> list[tuple[int, Cell]]:
    """The entries of a page that begin like rows of `quarantine`, by number."""
    keyed: list[tuple[int, Cell]] = []
    for cell in page.cells:
        if cell.rowid is None or not 0 < cell.rowid <= SEQUENCE_MAX:
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


_SENT = Datum.__struct_fields__.index("device_time_us")
"""The place of the column `sent` among a row's columns for its datum, of which it is the last."""


def _as_row(key: int, values: tuple[Value, ...]) -> Row:
    # Where SQLite keeps the key beside the record, NULL stands for it. Former rows begin with lane and sequence.
    series, *datum = values[1:] if values[0] is None else values[2:]
    if values[0] is None and len(datum) == _SENT + 1 and isinstance(sent := datum[_SENT], str):
        datum[_SENT:] = of_sent(sent)
    # Bytes are told to be known. Else a text, as a damaged type makes one, would be read as base64.
    return msgspec.convert((*Position.at(key), series, datum), Row, builtin_types=(bytes,))


def _as_input(_: int, values: tuple[Value, ...]) -> Quarantined:
    columns = (name for (name,) in _of_schema("SELECT name FROM pragma_table_info('quarantine')"))
    return Quarantined.checked(dict(zip(columns, values, strict=False)))


T = TypeVar("T")


class Kind(NamedTuple, Generic[T]):
    """Rows that are searched for, in one table or two."""

    tables: tuple[tuple[str, Keyed], ...]
    of_values: Callable[[int, tuple[Value, ...]], T]
    """Makes a row of its key and its values."""

    def keyed(self, content: bytes, page: BtreePage) -> list[tuple[int, Cell]]:
        """The entries of a page that belong to one of the tables."""
        return next((found for _, keyed in self.tables if (found := keyed(content, page))), [])


READING = Kind((("reading", reading_keys), ("former_reading", former_keys)), _as_row)
QUARANTINE = Kind((("quarantine", quarantine_keys),), _as_input)


def _trees(pages: DamagedPages, kind: Kind[T]) -> list[Tree]:
    """The trees of the tables that the file has."""
    roots = _roots(pages)
    return [Tree(pages, roots[name], keyed) for name, keyed in kind.tables if roots[name]]


class Overflow:
    """Which row each overflow page belongs to. A deleted row may still lead to pages that another row has now."""

    def __init__(self, pages: DamagedPages, is_ordered: Mapping[int, bool]) -> None:
        """`is_ordered` has all lanes that may have rows, and whether these came in the order of their keys.

        Adopted rows came beside others.
        """
        self._pages = pages
        # The quarantine has the lane 0.
        self._is_ordered = {**is_ordered, 0: True}
        # 0 is a page that no row has claimed.
        self._owners: array[int] = array("q", bytes(8 * (pages.count + 1)))

    def claim(self, content: bytes, cell: Cell, key: int | None = None) -> None:
        """Note the pages of a row, by its key; or of an entry of another table, which is no row's then.

        A row whose pages are not as many as they should be claims none: it cannot be read anyway.
        """
        if not cell.overflow or (key is not None and lane_of(key) not in self._is_ordered):
            return
        numbers: list[int] = []
        with suppress(PageError):
            self._pages.values(content, cell, numbers.append)
            owner = _NO_ROW if key is None else key
            for number in numbers:
                self._owners[number] = self._newer(self._owners[number], owner)

    def is_of(self, number: int, key: int) -> bool:
        """Whether an overflow page belongs to a row that has claimed it."""
        return self._owners[number] == key

    def _newer(self, owner: int, other: int) -> int:
        """Which of two has a page; neither, if nothing tells which came later."""
        if owner in {0, other}:
            return other
        lanes = {lane_of(owner), lane_of(other)}
        is_told = (lanes == {0} or 0 not in lanes) and all(self._is_ordered.get(lane, False) for lane in lanes)
        return max(owner, other) if is_told else _NO_ROW


_NO_ROW = -1


class Scan(Generic[T]):
    """Rows of one kind in a damaged file, whether or not a tree leads to them; each once, in order."""

    def __init__(self, pages: DamagedPages, kind: Kind[T], overflow: Overflow) -> None:
        """Before `rows`, all kinds must have claimed their pages of `overflow`."""
        self._pages = pages
        self._kind = kind
        self._overflow = overflow
        self._page = lru_cache(_PAGES_CACHED)(self._read)
        trees = _trees(pages, kind)
        led = [page for tree in trees for page in self._led_pages(tree)]
        self._reached = bytearray(map(max, *(tree.reached for tree in trees), bytes(pages.count + 1)))
        """By page number: 1 if a tree leads to the page, 2 if some of its keys do not belong there."""
        self._free, freelist_whole = pages.free()
        # A page that a tree uses is not free, even if the freelist, which may be older, says so. The tree, too, may
        # be the older of the two.
        agree = not any(free and reached for free, reached in zip(self._free, self._reached, strict=True))
        self._by_freelist = freelist_whole and agree
        is_known = all(tree.is_known for tree in trees)
        self._by_trees = is_known and agree
        self.certain = self._by_freelist or self._by_trees
        """Whether no row is found that had been deleted from the file."""
        strays = self._stray_pages()
        self.is_whole = agree and is_known and not (strays and self._by_freelist)
        """Whether every row outside of `gaps` was found; known once `rows` has ended."""
        self.gaps: list[tuple[int, int]] = []
        """Keys that are not found: behind the first of each pair, and up to the second. In order."""
        self.ends: dict[int, tuple[int, int]] = {}
        """By lane: the first and the last sequence known to have been there, even if the rows are unreadable."""
        for gap in chain.from_iterable(tree.gaps for tree in trees):
            _add_gap(self.gaps, *gap)
        self._spans = sorted(led + strays)
        """Pages with rows: see `_packed`."""

    def _led_pages(self, tree: Tree) -> list[int]:
        """Follow the tree to its end."""
        led: list[int] = []
        seen = bytearray(len(tree.reached))
        for entry in tree.entries():
            self._overflow.claim(entry.content, entry.cell, entry.key)
            if not seen[entry.number]:
                seen[entry.number] = 1
                led.append(_packed(entry.key, entry.last, entry.number))
        return [page for page in led if tree.reached[_unpacked(page)[2]] == 1]

    def _stray_pages(self) -> list[int]:
        strays: list[int] = []
        for number in range(2, self._pages.count + 1):
            if not self._is_led(number):
                content, keyed = self._read(number)
                for key, cell in keyed:
                    self._overflow.claim(content, cell, key)
                if keyed:
                    strays.append(_packed(keyed[0][0], keyed[-1][0], number))
        return strays

    def _is_led(self, number: int) -> bool:
        """Whether a tree leads to a page, and all of its keys belong there."""
        return self._reached[number] == 1

    def rows(self, is_wanted: Callable[[int], bool] = lambda _: True) -> Iterator[tuple[int, T | None]]:
        """The wanted rows with their keys, in order. None is a row that was there, and that this page does not give."""
        done = -1
        for key, number, content, cell in self._merged():
            if key <= done:
                continue  # another page had it
            row: T | None = None
            wanted = is_wanted(key)
            if wanted:
                with suppress(PageError, msgspec.ValidationError):
                    row = self._kind.of_values(key, self._values(key, number, content, cell))
                self.is_whole = self.is_whole and row is not None
            if row is not None or self._is_led(number):
                self._note_end(key)
                if wanted:
                    yield key, row
            if row is not None or not wanted:
                done = key

    def _note_end(self, key: int) -> None:
        # Rows that had perhaps been deleted prove nothing.
        if self.certain:
            lane, sequence = lane_of(key), key & SEQUENCE_MAX
            self.ends[lane] = self.ends.get(lane, (sequence, 0))[0], sequence

    def _merged(self) -> Iterator[tuple[int, int, bytes, Cell]]:
        """Keys in order, each with its page. For equal keys, pages that the tree leads to come first."""
        heap: list[tuple[int, bool, int, int, int]] = []
        for page in chain(self._spans, [_packed(KEY_MAX, 0, 0)]):
            following, last_of_following, number_of_following = _unpacked(page)
            while heap and heap[0][0] < following:
                key, is_stray, number, place, last = heap[0]
                content, keyed = self._page(number)
                if place < len(keyed) and keyed[place][0] == key:
                    yield key, number, content, keyed[place][1]
                else:
                    # The disk does not give the page any more.
                    self.is_whole = False
                    _add_gap(self.gaps, key - 1, max(key, last))
                    keyed = []
                if place + 1 < len(keyed):
                    heapq.heapreplace(heap, (keyed[place + 1][0], is_stray, number, place + 1, last))
                else:
                    heapq.heappop(heap)
            is_stray = not self._is_led(number_of_following)
            heapq.heappush(heap, (following, is_stray, number_of_following, 0, last_of_following))

    def _read(self, number: int) -> tuple[bytes, list[tuple[int, Cell]]]:
        """A page's content and rows, none if the file does not use it."""
        is_live = self._reached[number] or (not self._free[number] and (self._by_freelist or not self._by_trees))
        with suppress(PageError):
            content, page = self._pages.btree(number) if is_live else (b"", None)
            if page is not None and page.kind != INTERIOR_TABLE:
                return content, self._kind.keyed(content, page)
        return b"", []

    def _values(self, key: int, number: int, content: bytes, cell: Cell) -> tuple[Value, ...]:
        return self._pages.values(content, cell, partial(self._check_overflow, key, is_led=self._is_led(number)))

    def _check_overflow(self, key: int, page: int, *, is_led: bool) -> None:
        """Raise PageError if an overflow page is free, or belongs to another row, as far as that can be known."""
        # A freelist that cannot be trusted tells nothing of a row that the tree leads to.
        is_free = self._free[page] and (self._by_freelist or not is_led)
        if not self._by_freelist:
            with suppress(PageError):
                _, leaves = sqlite_pages.trunk(self._pages.page(page), self._pages.usable_bytes, self._pages.count)
                is_free = is_free or bool(leaves) or not is_led
        if is_free or not self._overflow.is_of(page, key):
            raise PageError(f"page {page} is free, or belongs to another row")


def _packed(first: int, last: int, number: int) -> int:
    """A page as one number, for little memory: its first and last key, and its number."""
    return (first << _KEY_BITS | last) << _NUMBER_BITS | number


def _unpacked(page: int) -> tuple[int, int, int]:
    keys = page >> _NUMBER_BITS
    return keys >> _KEY_BITS, keys & (KEY_MAX - 1), page & ((1 << _NUMBER_BITS) - 1)
