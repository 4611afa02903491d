"""Reads the pages of an SQLite file without SQLite: b-tree cells, records, overflow chains, the freelist, the WAL.

For a file whose b-trees cannot be followed any more. Bytes come in, values go out, no I/O. Whatever the bytes are, only
PageError is raised, and nothing loops. Sections are those of https://www.sqlite.org/fileformat2.html.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

PAGE_BYTES_DEFAULT = 4096
FILE_HEADER_BYTES = 100
"""Bytes in front of the b-tree on page 1."""
INTERIOR_INDEX, INTERIOR_TABLE, LEAF_INDEX, LEAF_TABLE = 2, 5, 10, 13
"""Kinds of b-tree pages (section 1.6). Tables WITHOUT ROWID are index b-trees, whose interior cells hold rows too."""
WAL_HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24

Value = int | float | str | bytes | None
Fetch = Callable[[int], bytes]
"""Returns a page by its number; raises PageError if there is none."""

_MAGIC = b"SQLite format 3\0"
_WAL_MAGIC = 0x377F0682
_WAL_VERSION = 3007000
_INTEGER_BYTES = (0, 1, 2, 3, 4, 6, 8)
"""Bytes of an integer, by serial type (section 2.1)."""
_FRAME = struct.Struct(">6I")


class PageError(ValueError):
    """These bytes are not what SQLite writes there."""


class FileHeader(NamedTuple):
    """The first 100 bytes of a file (section 1.3)."""

    page_bytes: int
    usable_bytes: int
    first_trunk: int
    """First trunk page of the freelist; 0 if no page is free."""
    free_pages: int


class Cell(NamedTuple):
    """The place of an entry's payload on a b-tree page (section 1.6)."""

    start: int
    local_bytes: int
    """Bytes of the payload on this page."""
    payload_bytes: int
    overflow: int
    """The page that the rest begins on; 0 if there is none."""
    rowid: int | None
    """Set for tables with rowids."""


@dataclass(frozen=True, slots=True)
class BtreePage:
    """The entries of a b-tree page, except those that do not lie within it."""

    kind: int
    cells: tuple[Cell, ...]
    children: tuple[int, ...]
    """Children of an interior page, in order; one more than cells if the page is sound."""
    whole: bool
    """Whether nothing was left out."""


class Wal(NamedTuple):
    """Pages that a WAL's commits have changed."""

    page_bytes: int
    pages: dict[int, int]
    """By page number: the place in the WAL of its last committed image."""


def file_header(first: bytes) -> FileHeader:
    """The header of a database file, from its first 100 bytes."""
    if len(first) < FILE_HEADER_BYTES or first[:16] != _MAGIC:
        raise PageError("no SQLite header")
    page_bytes = _page_size(int.from_bytes(first[16:18], "big"))
    # The format fixes these values, so others are damage. Text is UTF-8.
    if first[21:24] != b"\x40\x20\x20" or first[56:60] != b"\0\0\0\1" or page_bytes - first[20] < 480:
        raise PageError("an SQLite header with impossible values")
    trunk, free = struct.unpack(">2I", first[32:40])
    return FileHeader(page_bytes, page_bytes - first[20], trunk, free)


def _page_size(stored: int) -> int:
    size = 65536 if stored == 1 else stored
    if not 512 <= size <= 65536 or size & (size - 1):
        raise PageError(f"no page size: {stored}")
    return size


def varint(data: bytes, start: int) -> tuple[int, int]:
    """A signed 64-bit number and the place behind it (section 1.6)."""
    value = 0
    try:
        for place in range(start, start + 8):
            byte = data[place]
            value = value << 7 | byte & 0x7F
            if byte < 0x80:
                return value, place + 1
        value = value << 8 | data[start + 8]
    except IndexError:
        raise PageError("a number that goes on behind the end") from None
    return value - (1 << 64) if value >> 63 else value, start + 9


def btree_page(page: bytes, number: int, usable_bytes: int) -> BtreePage:
    """The b-tree page of this number (section 1.6). Raises PageError if it is none."""
    kind, cells_from, places = _entries(page, number, usable_bytes)
    interior = kind in {INTERIOR_INDEX, INTERIOR_TABLE}
    cells: list[Cell] = []
    children: list[int] = []
    whole = True
    for place in places:
        try:
            cells.append(_cell(page, place, cells_from, kind, usable_bytes))
        except PageError:
            whole = False
        else:
            if interior:
                children.append(int.from_bytes(page[place : place + 4], "big"))
    if interior:
        start = FILE_HEADER_BYTES if number == 1 else 0
        children.append(int.from_bytes(page[start + 8 : start + 12], "big"))
    return BtreePage(kind, tuple(cells), tuple(children), whole)


def edge_cells(page: bytes, number: int, usable_bytes: int) -> tuple[Cell, ...]:
    """The first and the last entry of a b-tree page. Raises PageError if it is none, or they are damaged."""
    kind, cells_from, places = _entries(page, number, usable_bytes)
    return tuple(_cell(page, place, cells_from, kind, usable_bytes) for place in places[:1] + places[-1:])


def _entries(page: bytes, number: int, usable_bytes: int) -> tuple[int, int, tuple[int, ...]]:
    """A b-tree page's kind, the first place for entries, and the places of its entries."""
    start = FILE_HEADER_BYTES if number == 1 else 0
    kind = page[start] if start < len(page) else 0
    if len(page) < usable_bytes or kind not in {INTERIOR_INDEX, INTERIOR_TABLE, LEAF_INDEX, LEAF_TABLE}:
        raise PageError(f"page {number} is no b-tree page")
    count = int.from_bytes(page[start + 3 : start + 5], "big")
    pointers = start + (12 if kind in {INTERIOR_INDEX, INTERIOR_TABLE} else 8)
    cells_from = pointers + 2 * count
    if cells_from > usable_bytes:
        raise PageError(f"page {number} says that it has {count} entries")
    return kind, cells_from, struct.unpack(f">{count}H", page[pointers:cells_from])


def _cell(page: bytes, place: int, cells_from: int, kind: int, usable_bytes: int) -> Cell:
    if not cells_from <= place <= usable_bytes - 4:
        raise PageError("an entry outside its page")
    if kind in {INTERIOR_INDEX, INTERIOR_TABLE}:
        place += 4
    if kind == INTERIOR_TABLE:
        separator, place = varint(page, place)
        return Cell(place, 0, 0, 0, separator)
    payload_bytes, place = varint(page, place)
    rowid: int | None = None
    if kind == LEAF_TABLE:
        rowid, place = varint(page, place)
        local_max = usable_bytes - 35
    else:
        local_max = (usable_bytes - 12) * 64 // 255 - 23
    if payload_bytes < 0:
        raise PageError("a payload of negative length")
    local_bytes, overflow, end = payload_bytes, 0, place + payload_bytes
    if payload_bytes > local_max:
        local_min = (usable_bytes - 12) * 32 // 255 - 23
        local_bytes = local_min + (payload_bytes - local_min) % (usable_bytes - 4)
        if local_bytes > local_max:
            local_bytes = local_min
        end = place + local_bytes + 4
        overflow = int.from_bytes(page[end - 4 : end], "big")
    if end > usable_bytes or (overflow == 0) != (local_bytes == payload_bytes):
        raise PageError("an entry that goes on behind the end of its page")
    return Cell(place, local_bytes, payload_bytes, overflow, rowid)


def payload(page: bytes, cell: Cell, usable_bytes: int, fetch: Fetch, bytes_max: int) -> bytes:
    """An entry's whole payload, with its overflow chain (section 1.6).

    Raises PageError if the chain is not as long as the payload, or the payload is longer than `bytes_max`.
    """
    local = page[cell.start : cell.start + cell.local_bytes]
    if not cell.overflow:
        return local
    if cell.payload_bytes > bytes_max:
        raise PageError(f"a payload of {cell.payload_bytes} bytes")
    parts = [local]
    left = cell.payload_bytes - cell.local_bytes
    number, seen = cell.overflow, set[int]()
    while left > 0:
        if number == 0 or number in seen:
            raise PageError("an overflow chain that ends too early, or in a circle")
        seen.add(number)
        body = fetch(number)
        parts.append(body[4 : 4 + min(left, usable_bytes - 4)])
        left -= usable_bytes - 4
        number = int.from_bytes(body[:4], "big")
    if number != 0:
        raise PageError("an overflow chain that goes on behind its payload")
    return b"".join(parts)


def record(data: bytes, columns_max: int | None = None) -> tuple[Value, ...]:
    """The values of a record (section 2.1). With `columns_max`, only the first, from the record's beginning."""
    header_bytes, place = varint(data, 0)
    if not place <= header_bytes <= len(data):
        raise PageError("a record whose header is longer than it")
    values: list[Value] = []
    body = header_bytes
    while place < header_bytes:
        if len(values) == columns_max:
            return tuple(values)
        serial, place = varint(data, place)
        value, body = _value(data, serial, body)
        values.append(value)
    if place != header_bytes or (columns_max is None and body != len(data)):
        raise PageError("a record of another length than its header says")
    return tuple(values)


def _value(data: bytes, serial: int, start: int) -> tuple[Value, int]:
    """A value and the place behind it, by its serial type."""
    if serial in {0, 8, 9}:
        return (None if serial == 0 else serial - 8), start
    if 0 < serial <= 6:
        end = start + _INTEGER_BYTES[serial]
    elif serial == 7:
        end = start + 8
    elif serial >= 12:
        end = start + (serial - 12) // 2
    else:
        raise PageError(f"a value of the unknown type {serial}")
    if end > len(data):
        raise PageError("a value that goes on behind its record")
    stored = data[start:end]
    if serial <= 6:
        return int.from_bytes(stored, "big", signed=True), end
    if serial == 7:
        (real,) = struct.unpack(">d", stored)
        return float(real), end
    if serial % 2 == 0:
        return stored, end
    try:
        return stored.decode(), end
    except UnicodeDecodeError:
        raise PageError("a text that is not UTF-8") from None


def free_pages(header: FileHeader, fetch: Fetch, page_count: int) -> Iterator[int]:
    """The numbers of the free pages (section 1.5). Raises PageError where the list is damaged."""
    number, left, seen = header.first_trunk, header.free_pages, set[int]()
    while number:
        next_trunk, leaves = trunk(fetch(number), header.usable_bytes, page_count)
        if number in seen or len(leaves) + 1 > left:
            raise PageError("the freelist is longer than it may be")
        seen.add(number)
        left -= len(leaves) + 1
        yield number
        yield from leaves
        number = next_trunk
    if left:
        raise PageError(f"the freelist ends {left} pages too early")


def trunk(page: bytes, usable_bytes: int, page_count: int) -> tuple[int, tuple[int, ...]]:
    """The next trunk page of the freelist, and the leaf pages of this one (section 1.5). Raises PageError."""
    next_trunk, count = struct.unpack(">2I", page[:8])
    if 8 + 4 * count > usable_bytes:
        raise PageError("a trunk page of the freelist with too many pages")
    leaves = struct.unpack(f">{count}I", page[8 : 8 + 4 * count])
    # Refuse the whole trunk page, as one wrong number would hide a page that is in use.
    if any(not 2 <= number <= page_count for number in (*leaves, next_trunk or 2)) or len(set(leaves)) < count:
        raise PageError("the freelist has pages that there are not")
    return next_trunk, leaves


def wal(read: Callable[[int, int], bytes]) -> Wal:
    """The pages committed into a WAL (section 4), up to the first frame that does not follow from those before it.

    `read` gives bytes from a place on, and fewer than asked for at the end. Frames behind that one do not count for
    SQLite either: a rolled-back or an older transaction may have left them.
    """
    header = read(0, WAL_HEADER_BYTES)
    if len(header) < WAL_HEADER_BYTES:
        raise PageError("no WAL")
    magic, version, stored_size, _, *salts, first, second = struct.unpack(">8I", header)
    page_bytes = _page_size(stored_size)
    if magic & ~1 != _WAL_MAGIC or version != _WAL_VERSION:
        raise PageError("no WAL header")
    order: Literal["<", ">"] = ">" if magic & 1 else "<"
    checksum = _checksum(header[:24], (0, 0), order)
    if checksum != (first, second):
        raise PageError("a damaged WAL header")
    committed: dict[int, int] = {}
    open_: dict[int, int] = {}
    place = WAL_HEADER_BYTES
    while len(frame := read(place, FRAME_HEADER_BYTES + page_bytes)) == FRAME_HEADER_BYTES + page_bytes:
        number, commit_pages, *frame_salts, first, second = _FRAME.unpack(frame[:FRAME_HEADER_BYTES])
        if frame_salts != salts or number == 0:
            break
        checksum = _checksum(frame[FRAME_HEADER_BYTES:], _checksum(frame[:8], checksum, order), order)
        if checksum != (first, second):
            break
        open_[number] = place + FRAME_HEADER_BYTES
        if commit_pages:
            committed |= open_
            open_.clear()
        place += len(frame)
    return Wal(page_bytes, committed)


def _checksum(data: bytes, seed: tuple[int, int], order: Literal["<", ">"]) -> tuple[int, int]:
    """The checksum of section 4.2."""
    first, second = seed
    for even, odd in struct.iter_unpack(f"{order}2I", data):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second
