"""Takes readable rows out of a buffer file that SQLite found corrupt. Rows keep their identity.

A file of a newer version is left as it is. Once this box runs that version, its rows are taken over in the same way.

They come from the file's pages (`buffer.salvage.page_scan`). The file was set aside (`buffer.salvage.aside`), and is
never changed here.
"""

import secrets
import sqlite3
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar, cast

import structlog
from msgspec.structs import replace

from gateway.buffer import schema
from gateway.buffer.boots import adopt_boots, is_ordered, order_by_lanes
from gateway.buffer.lanes import LANE_PREFIX, numbers_without_rows
from gateway.buffer.rows import SEQUENCE_MAX, Lane, Position, Quarantined, Row, Series, Span, joined, span_at
from gateway.buffer.salvage.aside import final_name
from gateway.buffer.salvage.page_scan import (
    QUARANTINE,
    READING,
    SHAPES,
    SMALL_BYTES_MAX,
    DamagedPages,
    Overflow,
    Rest,
    Scan,
    Small,
    lane_of,
    lanes_of_rows,
    no_rest,
    read_small,
    scan_small,
)
from gateway.buffer.salvage.progress import SALVAGE_PREFIX, Progress, kept_marks
from gateway.reading import BufferFileError

CHUNK_ROWS = 1_000
UNKNOWN_BOOT = "unknown"
"""The gateway boot of rows whose lane could not be read. Its clock is unknown."""
WAIT_S = 5.0
"""Seconds until a salvage tries again, if there is no room or the disk refuses."""
CHUNK_BYTES = 1_000_000
"""Payload bytes above which a chunk ends."""
GAPS_MAX = 1_000
"""Gaps that are remembered in case that the disk gives their rows later. Beyond it, the first are given up."""
WORK_S = 0.01
"""Seconds that a scan works before it lets the daemon work for as long."""
_COPIED_TABLES = ("boot", "mark", "device_run", "loss")
"""Small tables that are taken over as they are."""
_SECOND_COPIES = {"lane": "lane_copy", "series": "sqlite_autoindex_series_1"}
_SERIES_COLUMNS = 6
"""Number of `Series.columns`; the stream may stand behind them."""
_LANE_NAMES = "sqlite_autoindex_lane_1"
"""A third copy of a lane's name."""
_DAEMON = "the daemon"
"""Source of the lane that readings went into, if the daemon has not ended since."""
_ONCE_ONLY = ("mark", "loss")
"""Tables whose deleted rows must not come back: a stale mark may hide a reading, a stale counter counts a loss
twice."""

_ROW_BYTES_MIN = 12
"""Least bytes that a row of `reading` takes in a page."""

T = TypeVar("T", Row, Quarantined)
Chunk = Sequence[tuple[int, T | None]]
"""Rows of one lane with their keys, in order. None is a row that cannot be read."""

log = structlog.get_logger()


@dataclass(slots=True)
class RowContext:
    """The content of a file beside its rows, as far as it could be read."""

    copies: dict[int, dict[str, tuple[str | None, ...]]] = field(default_factory=dict)
    """By lane number, and by table or index: the lane's name, boot and file, each None if it is not said there."""
    lanes: list[Lane] = field(default_factory=list)
    """Lanes that follow from the copies."""
    dense: list[int] = field(default_factory=list)
    """Numbers of lanes that were numbered in it."""
    gone: dict[int, int] = field(default_factory=dict)
    """By lane number, how many numbers of it had no row in the file, or no more."""
    floors: dict[int, int | None] = field(default_factory=dict)
    """By lane number, the earliest event time that may wait in the lane."""
    series: dict[int, Series] = field(default_factory=dict)
    tables: dict[str, list[tuple[object, ...]]] = field(default_factory=dict)
    own: str | None = None
    """The file's id."""
    whole: set[str] = field(default_factory=set)
    """Tables and indexes that were read to their ends."""
    row_lanes: set[int] = field(default_factory=set)
    """Lane numbers of rows."""

    def lacks(self, tables: Iterable[str]) -> bool:
        """Whether one of these tables is whole neither in itself nor in the index that holds the same."""
        return any(table not in self.whole and _SECOND_COPIES.get(table) not in self.whole for table in tables)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file that is to be salvaged."""

    aside: Path
    """Its path, by its final name."""
    lanes: dict[int, Lane]
    """Its lanes, by their numbers in it."""
    progress: Progress
    """`progress.lanes` is still empty, or that of an earlier new file."""
    found: RowContext | None
    """The content beside its rows; None if it was taken over before."""
    bytes: int


@dataclass(frozen=True, slots=True)
class SalvagedBatch:
    """Rows of one lane, with the new file's lane number and the damaged file's series numbers."""

    aside: Path
    into: str
    """Id of the file that the lane numbers belong to."""
    rows: Sequence[Row]
    quarantined: Sequence[Quarantined]
    series: dict[int, Series]
    progress: Progress
    finished: bool

    @property
    def missing(self) -> int | None:
        """Rows missing from the whole file, at its end: see `Progress.missing`."""
        return self.progress.missing()


class Salvage(threading.Thread):
    """Reads damaged files to their ends, one after another, beside the daemon's work.

    `adopt` takes a batch, or returns False if there is no room. `ended` is called with each file whose salvage has
    ended. If the disk refuses, the salvage waits and goes on.
    """

    def __init__(
        self,
        work: Sequence[tuple[Path, Progress]],
        into: str,
        adopt: Callable[[SalvagedBatch], bool],
        ended: Callable[[Path], None],
    ) -> None:
        """`into` is the id of the file that takes the rows: the batches are for no other file."""
        super().__init__(name="salvage", daemon=True)
        self._work = work
        self._into = into
        self._adopt = adopt
        self._ended = ended
        self._stopping = threading.Event()
        self._work_until_s = 0.0

    def stop(self) -> None:
        """Let it end soon. The file's next salvage goes on from here."""
        self._stopping.set()

    def run(self) -> None:
        for aside, progress in self._work:
            self._aside, self._progress = aside, progress
            steps = [self._give_up, self._read_file]
            said = False
            while steps and not self._stopping.is_set():
                try:
                    if not progress.ended:
                        steps[-1]()
                    self._ended(self._aside)
                    break
                except _StoppedError:
                    return
                except (sqlite3.Error, OSError) as error:
                    if not said:
                        log.warning("a salvage has to wait", aside=self._aside.name, error=str(error))
                        said = True
                    self._stopping.wait(WAIT_S)
                except Exception:
                    log.exception("a damaged buffer cannot be salvaged any further: the rest of it counts as lost")
                    steps.pop()

    def _give_up(self) -> None:
        """Count the rest of a file as lost if this program fails on it: the next file must not wait."""
        self._hand_over(finished=True, torn=True, quarantine_torn=True)

    def _read_file(self) -> None:
        beside = RowContext()
        # Until it was read to its end.
        self._progress = replace(self._progress, torn=True, quarantine_torn=True)
        _read_pages(self._aside, beside, ("series", _SECOND_COPIES["series"]), ("series",), self._rest)
        with suppress(FileNotFoundError), closing(DamagedPages(self._aside, rest=self._rest)) as pages:
            overflow = Overflow(pages, {lane: lane in self._progress.dense for lane in self._progress.lanes})
            last_numbers = read_small(pages, SHAPES, overflow.claim).rows["sqlite_sequence"]
            given = [number for _, (name, number) in last_numbers if name == "quarantine"]
            quarantine, reading = Scan(pages, QUARANTINE, overflow), Scan(pages, READING, overflow)
            self._take_quarantine(quarantine, beside.series, given)
            self._take_rows(reading, beside.series)
        self._hand_over(finished=True)

    def _rest(self) -> None:
        """Let the daemon work. Raises _StoppedError if the salvage is to end."""
        if time.monotonic() >= self._work_until_s:
            if self._stopping.wait(WORK_S):
                raise _StoppedError
            self._work_until_s = time.monotonic() + WORK_S

    def _take_quarantine(self, scan: Scan[Quarantined], series: dict[int, Series], given: Sequence[object]) -> None:
        """Take the quarantine over before the rows, as it is small; then note what is missing.

        `given` holds the last number that the quarantine gave, if it is known.
        """
        start = self._progress.quarantined
        for chunk in self._chunks(scan, {0}, start, self._progress.quarantine_gaps):
            inputs = [input_ for _, input_ in chunk if input_ is not None]
            self._hand_over(inputs=inputs, series=series, **self._after_inputs(scan, chunk[-1][0], chunk))
        _, last = scan.ends.get(0, (0, 0))
        last = max(last, *(min(number, SEQUENCE_MAX) for number in given if isinstance(number, int)), 0)
        self._progress = replace(self._progress, **self._after_inputs(scan, last, []))
        torn = _is_torn(scan, start, self._progress.quarantine_gaps)
        self._progress = replace(self._progress, quarantine_torn=torn)

    def _after_inputs(self, scan: Scan[Quarantined], number: int, chunk: Chunk[Quarantined]) -> dict[str, Any]:
        """The progress once a chunk is taken over that ends at a number."""
        known = self._progress.quarantine_gaps
        gaps = _without([*known, *_hidden(scan, [0], self._progress.quarantined, chunk, number)], chunk)
        missing = self._progress.quarantine_missing + _size(gaps) - _size(known)
        return {
            "quarantined": max(self._progress.quarantined, number),
            # All of them count as missing, also those that are forgotten.
            "quarantine_gaps": gaps[-GAPS_MAX:],
            # Numbers that a former version did not know to be missing may be found.
            "quarantine_missing": max(0, missing),
        }

    def _take_rows(self, scan: Scan[Row], series: dict[int, Series]) -> None:
        """Take the rows over; then note what is missing."""
        lanes = sorted(self._progress.lanes)
        place = start = -1 if self._progress.lane < 0 else Position(self._progress.lane, self._progress.sequence).place
        for chunk in self._chunks(scan, {*lanes}, start, self._progress.gaps):
            gaps = _without([*self._progress.gaps, *_hidden(scan, lanes, place, chunk, chunk[-1][0])], chunk)
            place = max(place, chunk[-1][0])
            lane = lane_of(chunk[0][0])
            rows = [replace(row, lane=self._progress.lanes[lane]) for _, row in chunk if row is not None]
            ends = {lane: (chunk[0][0] & SEQUENCE_MAX, chunk[-1][0] & SEQUENCE_MAX)} if scan.certain else {}
            self._hand_over(
                rows,
                series=series,
                taken=self._progress.taken + len(rows),
                lane=lane_of(place),
                sequence=place & SEQUENCE_MAX,
                gaps=gaps[-GAPS_MAX:],
                forgotten=self._progress.forgotten or len(gaps) > GAPS_MAX,
                **self._after_rows(ends, len(rows)),
            )
        torn = _is_torn(scan, start, self._progress.gaps)
        self._progress = replace(self._progress, torn=torn, **self._after_rows(scan.ends, 0))

    def _after_rows(self, ends: Mapping[int, tuple[int, int]], taken: int) -> dict[str, Any]:
        """The progress once lanes are known to reach so far, and so many rows of them are taken over.

        Rows before a lane's first row may be in Kafka, so they are not missing.
        """
        holes, known = self._progress.holes, {**self._progress.ends}
        for lane, (first, last) in ends.items():
            first_before, last_before = known.get(lane, (first, first - 1))
            known[lane] = min(first, first_before), max(last, last_before)
            if lane in self._progress.dense:
                holes += known[lane][1] - known[lane][0] - (last_before - first_before) - taken
        return {"holes": holes, "ends": known}

    def _chunks(self, scan: Scan[T], lanes: Container[int], place: int, gaps: Sequence[Span]) -> Iterator[Chunk[T]]:
        """Rows of one lane each, with their keys: those behind a place, and those of gaps before it."""

        def is_wanted(key: int) -> bool:
            lane = lane_of(key)
            # All rows of other lanes had been deleted.
            return lane in lanes and (key > place or span_at(gaps, lane, key & SEQUENCE_MAX) is not None)

        chunk: list[tuple[int, T | None]] = []
        size = 0
        for key, row in scan.rows(is_wanted):
            if chunk and (lane_of(key) != lane_of(chunk[0][0]) or len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES):
                yield chunk
                chunk, size = [], 0
            chunk.append((key, row))
            size += 0 if row is None else row.datum.size
        if chunk:
            yield chunk

    def _hand_over(
        self,
        rows: Sequence[Row] = (),
        inputs: Sequence[Quarantined] = (),
        *,
        series: dict[int, Series] | None = None,
        finished: bool = False,
        **changes: object,
    ) -> None:
        """Have a batch adopted with these changes of the progress, however long that takes."""
        progress = replace(self._progress, **changes)
        if not (rows or inputs or finished):
            self._progress = progress
            return
        batch = SalvagedBatch(self._aside, self._into, rows, inputs, series or {}, progress, finished)
        while True:
            if self._stopping.is_set():
                raise _StoppedError
            try:
                if self._adopt(batch):
                    self._progress = progress
                    return
            except BufferFileError as error:
                log.debug("salvaged rows have to wait", error=str(error))
            self._stopping.wait(WAIT_S)


class _StoppedError(Exception):
    """The salvage is to end here."""


def _is_torn(scan: Scan[T], start: int, gaps: Sequence[Span]) -> bool:
    """Whether uncounted rows may be missing. Those up to a start, outside of gaps, were taken over before."""
    return not scan.is_whole or any(high > start or gaps for _, high in scan.gaps)


def _hidden(scan: Scan[T], lanes: Iterable[int], place: int, chunk: Chunk[T], end: int) -> Iterator[Span]:
    """Spans behind a place, up to an end, that are not found, or that a chunk lacks."""
    gaps = scan.gaps[bisect_left(scan.gaps, place, key=itemgetter(1)) : bisect_left(scan.gaps, end, key=itemgetter(0))]
    gaps += [(key - 1, key) for key, row in chunk if row is None]
    for low, high in gaps:
        for lane in lanes:
            first = max(low + 1, place + 1, Position(lane, 0).place)
            last = min(high, end, Position(lane, SEQUENCE_MAX).place)
            if first <= last:
                yield Span(lane, first & SEQUENCE_MAX, last & SEQUENCE_MAX)


def _without(spans: Iterable[Span], chunk: Chunk[T]) -> list[Span]:
    """Joined spans without the rows of a chunk."""
    keys = [key for key, row in chunk if row is not None]
    left: list[Span] = []
    for span in joined(spans):
        lane, start, last = span
        for key in keys[bisect_left(keys, span.places[0]) : bisect_right(keys, span.places[1])]:
            left.append(Span(lane, start, (key & SEQUENCE_MAX) - 1))
            start = (key & SEQUENCE_MAX) + 1
        left.append(Span(lane, start, last))
    return [span for span in left if span.first <= span.last]


def _size(gaps: Iterable[Span]) -> int:
    return sum(gap.last - gap.first + 1 for gap in gaps)


def read_beside(path: Path, known: Lane | None) -> RowContext:
    """Read everything but the rows. `known` is the lane that the daemon knows by itself."""
    found = RowContext()
    if known is not None:
        _add_lane(found, _DAEMON, known.number, known.name, known.boot_id, known.buffer_id)
        found.own = known.buffer_id
    # Sensors wait for a new file, so all pages are read only if rows would otherwise have no lane. The salvage itself
    # reads the series.
    tables = [table for table in SHAPES if table not in {"series", _SECOND_COPIES["series"], "sqlite_sequence"}]
    _read_pages(path, found, tables, ("lane",), no_rest)
    with suppress(FileNotFoundError), closing(DamagedPages(path)) as pages:
        found.row_lanes |= {*lanes_of_rows(pages)}
    lanes = _settled(found)
    # Numbers never come back. If both copies have forgotten a lane, it was empty: its rows had been deleted.
    gone_below = max(lanes, default=0) if _agree(found) else 0
    for number in found.row_lanes:
        if number >= gone_below:
            # The lane's name is gone, and with it the identity of its rows. Under a new name they are at least not
            # lost.
            name = secrets.token_hex(6)
            lanes.setdefault(number, Lane(number, name, UNKNOWN_BOOT, found.own or secrets.token_hex(8)))
    found.lanes = [lanes[number] for number in sorted(lanes)]
    found.dense = [lane.number for lane in found.lanes if found.own is None or lane.buffer_id == found.own]
    marks = _marks(found)
    named = {lane.number: marks.get(LANE_PREFIX + lane.name) for lane in found.lanes if lane.number in found.dense}
    found.gone = {number: numbers_without_rows(mark) for number, mark in named.items() if mark is not None}
    return found


def _read_pages(path: Path, found: RowContext, tables: Sequence[str], needed: Sequence[str], rest: Rest) -> None:
    """Add small tables and indexes; search all pages if a needed table is not whole."""
    with suppress(FileNotFoundError), closing(DamagedPages(path, SMALL_BYTES_MAX, rest)) as pages:
        small = read_small(pages, tables)
        found.whole |= small.whole
        _add_small(found, small)
        if found.lacks(needed):
            small = scan_small(pages)
            for table in _ONCE_ONLY:
                small.rows.pop(table)
            _add_small(found, small)
            # If free pages may have been read, rows of deleted lanes are no surprise.
            if small.certain or not found.copies:
                found.row_lanes |= small.row_lanes


def _add_small(found: RowContext, small: Small) -> None:
    rows: dict[str, list[Any]] = {table: [] for table in SHAPES} | small.rows
    for _, (name, value) in rows["meta"]:
        if name == "buffer_id":
            found.own = found.own or value
    for number, (_, name, boot_id, floor, *buffer_id) in rows["lane"]:
        _add_lane(found, "lane", number, name, boot_id, (buffer_id or [None])[0])
        found.floors.setdefault(number, floor)
    for _, (*copy, number) in rows["lane_copy"]:
        _add_lane(found, "lane_copy", number, *copy)
    for _, (name, number) in rows[_LANE_NAMES]:
        _add_lane(found, _LANE_NAMES, number, name, None, None)
    for number, (_, *texts) in rows["series"]:
        _add_series(found, number, *texts[:_SERIES_COLUMNS], texts[-1] or "" if len(texts) > _SERIES_COLUMNS else "")
    for _, (*texts, number) in rows[_SECOND_COPIES["series"]]:
        _add_series(found, number, *texts)
    for table in _COPIED_TABLES:
        found.tables.setdefault(table, []).extend(values for _, values in rows[table])


def _add_lane(found: RowContext, source: str, number: object, *copy: Any) -> None:
    """Add a copy of a lane's name, boot and file."""
    if type(number) is int:
        found.copies.setdefault(number, {}).setdefault(source, copy)


def _settled(found: RowContext) -> dict[int, Lane]:
    """Lanes by number, as most copies say; no two have the same name."""
    boots = {str(values[0]) for values in found.tables.get("boot", ())}
    origins = {number: _most([copy[2] for copy in _copies_of(found, number)], {found.own}) for number in found.copies}
    if found.own not in origins.values() and {"lane", "lane_copy"} & found.whole:
        # A file has opened its last lane itself, so its own id is damaged.
        found.own = origins[max(origins)] if origins and origins[max(origins)] else found.own
    lanes: dict[int, Lane] = {}
    names: set[str | None] = set()
    votes = {number: Counter(copy[0] for copy in _copies_of(found, number)) for number in sorted(found.copies)}
    for number in sorted(votes, key=lambda number: (_DAEMON not in found.copies[number], -max(votes[number].values()))):
        copies = _copies_of(found, number)
        name = _most([copy[0] for copy in copies if copy[0] not in names], ())
        origin = origins[number] or found.own
        if name is not None and origin is not None:
            names.add(name)
            boot_id = _most([copy[1] for copy in copies], boots) or UNKNOWN_BOOT
            lanes[number] = Lane(number, name, boot_id, origin)
    return lanes


def _copies_of(found: RowContext, number: int) -> list[tuple[str | None, ...]]:
    """The daemon's own copy, else the file's copies, its table first."""
    copies = found.copies[number]
    return [copies[_DAEMON]] if _DAEMON in copies else [copies[source] for source in sorted(copies)]


def _most(values: Iterable[str | None], known: Container[object]) -> str | None:
    """The most frequent value; among equals one that is known from elsewhere, else the first."""
    votes = Counter(value for value in values if value is not None)
    return max(votes, key=lambda value: (votes[value], value in known), default=None)


def _agree(found: RowContext) -> bool:
    """Whether both copies of the lanes are whole, and the same."""
    return {"lane", "lane_copy"} <= found.whole and all(
        of.get("lane") == of.get("lane_copy") for of in found.copies.values() if _DAEMON not in of
    )


def _add_series(found: RowContext, number: object, *texts: object) -> None:
    """Add a series, unless this is none."""
    if not isinstance(number, int) or not all(isinstance(text, str) for text in texts):
        return
    known = found.series.get(number)
    if known is None or not known.stream:
        *columns, stream = cast("list[str]", texts if len(texts) > _SERIES_COLUMNS else [*texts, ""])
        found.series[number] = Series.of_columns(columns, stream)


def _marks(found: RowContext) -> dict[str, bytes]:
    """The marks of a damaged file, as far as they could be read."""
    return {str(key): value for key, value in found.tables.get("mark", ()) if isinstance(value, bytes)}


def damaged_files(
    asides: Sequence[tuple[Path, Lane | None, int | None]], waiting: Sequence[Path]
) -> dict[str, Damaged]:
    """Files that a new file has to salvage, by their names, oldest first.

    `asides` are the files that it replaces, each with the lane and the number of rows that the daemon knows by itself.
    `waiting` are older files whose salvage has not ended.
    """
    files: dict[str, Damaged] = {}
    carried: dict[str, tuple[Progress, RowContext]] = {}
    for aside, lane, rows in asides:
        if schema.is_newer(aside):
            files[final_name(aside)] = _left_alone(aside)
            continue
        found = read_beside(aside, lane)
        progress = Progress({}, -1, -1, found.dense, rows, gone=found.gone, rows_max=_rows_max(aside))
        files[final_name(aside)] = Damaged(
            aside.with_name(final_name(aside)),
            {lane.number: lane for lane in found.lanes},
            progress,
            found,
            _bytes_of(aside),
        )
        carried.update({name: (progress, found) for name, progress in kept_marks(_marks(found)).items()})
    for name, (progress, through) in carried.items():
        if name not in files:
            files[name] = _carried_over(asides[0][0].with_name(name), progress, through)
    files |= {aside.name: begun_again(aside) for aside in waiting if aside.name not in files}
    return dict(sorted(files.items()))


def begun_again(aside: Path) -> Damaged:
    """A file whose progress is lost. Rows that were taken over come again."""
    # Its marks and losses were taken over, and may have been deleted since.
    return _left_alone(aside) if schema.is_newer(aside) else _begun(aside, ("boot",), ())


def begun_late(aside: Path, marks: Container[str]) -> Damaged:
    """A file of a newer version, which this version can read.

    Nothing of it was taken over. Of its marks only `marks` are: others may hide readings that came in since.
    """
    return _begun(aside, _COPIED_TABLES, marks)


def _begun(aside: Path, tables: Iterable[str], marks: Container[str]) -> Damaged:
    found = read_beside(aside, None)
    lanes = {lane.number: lane for lane in found.lanes}
    progress = Progress({}, -1, -1, found.dense, None, gone=found.gone, rows_max=_rows_max(aside))
    copied = {table: found.tables.get(table, []) for table in tables}
    copied["mark"] = [values for values in copied.get("mark", ()) if values[0] in marks]
    return Damaged(aside, lanes, progress, RowContext(floors=found.floors, tables=copied), _bytes_of(aside))


def _left_alone(aside: Path) -> Damaged:
    """A file that has to wait for a newer version."""
    progress = Progress({}, -1, -1, [], None, newer=True)
    return Damaged(aside.with_name(final_name(aside)), {}, progress, None, _bytes_of(aside))


def _carried_over(aside: Path, progress: Progress, through: RowContext) -> Damaged:
    """A file that was being salvaged into a file now damaged too. Its lanes come from that file, or from itself."""
    known = {lane.number: lane for lane in through.lanes}
    lanes = {number: known[taken_as] for number, taken_as in progress.lanes.items() if taken_as in known}
    if len(lanes) < len(progress.lanes):
        for lane in read_beside(aside, None).lanes:
            if lane.number in progress.lanes:
                lanes.setdefault(lane.number, lane)
    return Damaged(aside, lanes, progress, None, _bytes_of(aside))


def keep_largest(files: Iterable[Damaged], files_max: int) -> tuple[list[Damaged], list[Damaged]]:
    """Files to be salvaged, and files beyond `files_max`: the smallest, as a card may damage each new file."""
    by_size = sorted(files, key=lambda damaged: damaged.bytes)
    too_many = by_size[: max(0, len(by_size) - files_max)]
    return sorted(by_size[len(too_many) :], key=lambda damaged: damaged.aside), too_many


def _rows_max(aside: Path) -> int:
    return (_bytes_of(aside) + _bytes_of(aside.with_name(aside.name + "-wal"))) // _ROW_BYTES_MIN


def _bytes_of(aside: Path) -> int:
    return aside.stat().st_size if aside.exists() else 0


def adopt_beside(connection: sqlite3.Connection, files: Iterable[Damaged], lanes: Mapping[str, int]) -> None:
    """Write the small tables into the new file; rows that it has already stay.

    `lanes` are the lanes' numbers in this file, by name.
    """
    boots = {UNKNOWN_BOOT}
    for damaged in files:
        found = damaged.found or RowContext()
        boots |= {lane.boot_id for lane in damaged.lanes.values()}
        boots |= {str(values[2]) for values in found.tables.get("loss", ())}
        of_file = found.tables.get("boot", ())
        adopt_boots(connection, of_file)
        if not any(is_ordered(values) for values in of_file):
            order_by_lanes(connection, _first_lanes(damaged.lanes))
        for table in _COPIED_TABLES:
            if table == "boot":
                continue
            connection.executemany(
                f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(SHAPES[table].columns))})",
                [values for values in found.tables.get(table, ()) if not str(values[0]).startswith(SALVAGE_PREFIX)],
            )
        if damaged.found is not None:
            # If a lane's floor is lost, it may reach back to the boot's beginning.
            for number, lane in damaged.lanes.items():
                connection.execute(
                    "UPDATE lane SET event_from_us = min(coalesce(event_from_us, ?1), ?1) WHERE name = ?2",
                    (found.floors.get(number) or 0, lane.name),
                )
    connection.executemany(
        "UPDATE lane SET event_from_us = 0 WHERE number = ? AND event_from_us IS NULL",
        [(number,) for number in lanes.values()],
    )
    # A boot must be known even if its clock is lost.
    adopt_boots(connection, [(boot, 0) for boot in sorted(boots)])


def _first_lanes(lanes: Mapping[int, Lane]) -> list[tuple[str, int]]:
    """Boots, each with the first of its lanes."""
    first: dict[str, int] = {}
    for number in sorted(lanes):
        first.setdefault(lanes[number].boot_id, number)
    return list(first.items())
