"""Takes readable rows out of a buffer file that SQLite found corrupt. Rows keep their identity.

It first follows SQLite's b-trees, in order. Then it takes rows that these do not lead to from the pages themselves
(`buffer.salvage.page_scan`). The file was set aside (`buffer.salvage.aside`), and is never changed here.
"""

import re
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import structlog

from gateway.buffer.boots import adopt_boots, is_ordered, order_by_lanes
from gateway.buffer.rows import (
    QUARANTINE_COLUMNS,
    ROW_COLUMNS,
    Lane,
    Loss,
    Quarantined,
    Row,
    Series,
    Span,
    is_sound,
    spans_of,
)
from gateway.buffer.salvage.aside import final_name
from gateway.buffer.salvage.page_scan import (
    SHAPES,
    SMALL_BYTES_MAX,
    DamagedPages,
    OverflowCheck,
    Rest,
    Scan,
    Small,
    Wanted,
    found_quarantined,
    found_rows,
    is_shaped,
    no_rest,
    quarantine_keys,
    read_small,
    reading_keys,
    scan_small,
)
from gateway.clock.kernel_clock import boottime_us
from gateway.reading import BufferFileError

SALVAGE_PREFIX = "salvage/"
"""Prefix of marks that hold a file's `Progress`; the damaged file's name follows."""
CHUNK_ROWS = 1_000
UNKNOWN_BOOT = "unknown"
"""The gateway boot of rows whose lane could not be read. Its clock is unknown."""
WAIT_S = 5.0
"""Seconds until a salvage tries again, if there is no room or the disk refuses."""
_SEQUENCE_MAX = 2**62
_UNREADABLE = (sqlite3.Error, OverflowError, UnicodeDecodeError)
"""Errors from reading a damaged file. SQLite's messages may themselves hold damaged text."""
QUARANTINE_CHUNK_ROWS = 100
CHUNK_BYTES = 1_000_000
"""Payload bytes above which a chunk ends."""
GAPS_MAX = 1_000
"""Gaps that are remembered, to which the b-trees do not lead. Beyond it, the nearest gaps are joined."""
WORK_S = 0.01
"""Seconds that a scan works before it lets the daemon work for as long."""
_QUARANTINE = "SELECT number, {} FROM quarantine WHERE number >= ? ORDER BY number LIMIT ?"
_ROWS = "SELECT {} FROM reading WHERE lane = ? AND sequence >= ? ORDER BY sequence LIMIT ?"
_OF_OLDER_FILES = {"doubt": "0", "event_error_us": "0"}
"""Values, if not NULL, of columns that a file is too old to have."""
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

_ASIDE = re.compile(r"[^/\0]+\.corrupt-\d{8}T\d{6}\.\d{6}")
"""Names of files that are salvaged."""
_ROW_BYTES_MIN = 12
"""Least bytes that a row of `reading` takes in a page."""

log = structlog.get_logger()


class Progress(msgspec.Struct, frozen=True):
    """Progress of one file's salvage, kept as a mark so that the next start goes on with it."""

    lanes: dict[int, int]
    """Lane numbers of the damaged file, with their numbers in the new file."""
    lane: int
    sequence: int
    """The last row that was taken over, with `lane`."""
    dense: list[int]
    """Lanes of the damaged file that had no holes."""
    expected: int | None
    """Rows that the file held, if the daemon knew."""
    taken: int = 0
    holes: int = 0
    """Rows known to be missing between those that were taken over."""
    torn: bool = False
    """Whether an end of a lane is damaged: an unknown number of further rows is missing."""
    quarantined: int = 0
    """The last number of the quarantine that was taken over. The quarantine goes before the rows."""
    quarantine_missing: int = 0
    """Numbers of the quarantine that could not be read: one for each input, unless it had been taken out before."""
    quarantine_torn: bool = False
    """Whether an unknown part of the quarantine is missing."""
    quarantine_ended: bool = False
    walked: bool = False
    """Whether the b-trees were followed to their ends. The pages are then searched for the rest."""
    gaps: list[Span] = []
    """Spans, in the damaged file's lanes, that the b-trees did not lead to. Rows may be there, or never have been."""
    unseen: list[Span] = []
    """Spans between rows that the b-trees led to, in lanes with holes. If the trees are sound, no rows were there."""
    crowded: bool = False
    """Whether there were so many gaps that some were joined: rows between them come again, and it is unknown how many
    are missing."""
    scanned: tuple[int, int] = (-1, -1)
    """Lane and sequence of the last row that was taken over from the pages."""
    ends: dict[int, tuple[int, int]] = {}
    """By lane, the first and the last row known to have been there."""
    quarantine_gaps: list[Span] = []
    """Gaps in the quarantine's numbers, under the lane 0."""
    quarantine_unseen: list[Span] = []
    """Numbers between those that its b-tree led to, without an error. If the tree is sound, they were deleted."""
    quarantine_scanned: int = 0
    rows_max: int | None = None
    """Most rows that a file of its size can hold."""
    ended: bool = False
    """Whether the salvage has ended, and only the file's name does not say so yet."""

    def missing(self) -> int | None:
        """Rows that are lost, at least, once it has ended; None if the number is unknown."""
        if self.crowded:
            return None
        # A damaged number far from its place makes a hole that never was.
        believable = self.rows_max is None or self.holes + self.taken <= self.rows_max
        known = max(self.holes if believable else 0, (self.expected or 0) - self.taken)
        unknown = self.torn or not self.lanes or not (believable or self.expected)
        return None if known == 0 and unknown else known

    def losses(self, boot_id: str) -> list[Loss]:
        """Losses to be counted once it has ended. An unknown number is counted as 0."""
        quarantine = None if self.quarantine_torn and self.quarantine_missing == 0 else self.quarantine_missing
        now_us = boottime_us()
        return [
            Loss("", f"{what}-damaged" if count else f"{what}-unreadable", boot_id, count or 0, now_us, now_us)
            for what, count in (("buffer", self.missing()), ("quarantine", quarantine))
            if count != 0
        ]


@dataclass(slots=True)
class RowContext:
    """The content of a file beside its rows, as far as it could be read."""

    copies: dict[int, dict[str, tuple[str | None, ...]]] = field(default_factory=dict)
    """By lane number, and by table or index: the lane's name, boot and file, each None if it is not said there."""
    lanes: list[Lane] = field(default_factory=list)
    """Lanes that follow from the copies."""
    dense: list[int] = field(default_factory=list)
    """Numbers of lanes that had no holes."""
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
        self._replace(torn=True, quarantine_torn=True)
        self._hand_over(finished=True)

    def _read_file(self) -> None:
        found = RowContext()
        connection = open_damaged(self._aside)
        try:
            if connection is not None:
                _read_tables(connection, found)
            _read_pages(self._aside, found, ("series",), self._rest)
            if not self._progress.walked:
                self._walk(connection, found.series)
        finally:
            if connection is not None:
                connection.close()
        with suppress(FileNotFoundError), closing(DamagedPages(self._aside)) as pages:
            self._scan_quarantine(pages, found.series)
            self._scan_rows(pages, found.series)
        self._hand_over(finished=True)

    def _rest(self) -> None:
        """Let the daemon work. Raises _StoppedError if the salvage is to end."""
        if time.monotonic() >= self._work_until_s:
            if self._stopping.wait(WORK_S):
                raise _StoppedError
            self._work_until_s = time.monotonic() + WORK_S

    def _walk(self, connection: sqlite3.Connection | None, series: dict[int, Series]) -> None:
        """Follow the b-trees, and note the gaps to which they do not lead."""
        progress = self._progress
        if connection is not None:
            self._read_quarantine(connection, series)
            with closing(DamagedPages(self._aside)) as pages:
                self._read_lanes(connection, OverflowCheck(pages), series)
        else:
            for lane in progress.lanes:
                if lane >= progress.lane:
                    first = progress.sequence + 1 if lane == progress.lane else 0
                    self._note_gaps([Span(lane, first, _SEQUENCE_MAX)], torn=True)
            if not progress.quarantine_ended:
                self._note_quarantine_gap(Span(0, progress.quarantined + 1, _SEQUENCE_MAX))
        self._replace(walked=True)

    def _replace(self, **changes: object) -> None:
        self._progress = msgspec.structs.replace(self._progress, **changes)

    def _read_quarantine(self, connection: sqlite3.Connection, series: dict[int, Series]) -> None:
        """Read the quarantine before the rows: it is small, and its place in the file is known."""
        if self._progress.quarantine_ended:
            return
        last = _last_quarantined(connection)
        while True:
            start = self._progress.quarantined + 1
            chunk, failed = _read_quarantine_chunk(connection, start)
            if chunk:
                numbers = [start - 1, *(number for number, _ in chunk)]
                start = numbers[-1] + 1
                self._note_unseen([Span(0, before + 1, after - 1) for before, after in pairwise(numbers)])
                self._replace(quarantined=start - 1)
                self._hand_over(quarantined=[input_ for _, input_ in chunk], series=series)
            elif not failed:
                break
            if failed:
                jumped = _after_damage(lambda number: _is_quarantine_readable(connection, number), start)
                after = max(start, (last or 0) + 1) if jumped is None else jumped
                known = jumped is not None or last is not None
                self._note_quarantine_gap(Span(0, start, after - 1 if known else _SEQUENCE_MAX))
                self._replace(
                    quarantined=after - 1, quarantine_missing=self._progress.quarantine_missing + after - start
                )
                if jumped is None:
                    break
        self._note_unseen([Span(0, self._progress.quarantined + 1, _SEQUENCE_MAX)])
        self._replace(quarantine_ended=True)

    def _note_unseen(self, spans: Sequence[Span]) -> None:
        self._replace(quarantine_unseen=_joined([*self._progress.quarantine_unseen, *spans]))

    def _note_quarantine_gap(self, gap: Span) -> None:
        """Remember numbers to which the b-tree does not lead. The last one may be beyond all existing numbers."""
        self._replace(
            quarantine_torn=self._progress.quarantine_torn or gap.last == _SEQUENCE_MAX,
            quarantine_gaps=_joined([*self._progress.quarantine_gaps, gap]),
        )

    def _read_lanes(self, connection: sqlite3.Connection, check: OverflowCheck, series: dict[int, Series]) -> None:
        for lane in sorted(self._progress.lanes):
            if lane < self._progress.lane:
                continue
            after = self._progress.sequence if lane == self._progress.lane else -1
            for found in salvaged_rows(connection, lane, after):
                if isinstance(found, Span):
                    # In a lane with holes, the number of rows in a gap is unknown.
                    self._note_gaps([found], torn=lane not in self._progress.dense)
                    continue
                whole = [row for row in found if not check.is_damaged(row)]
                self._note_gaps((), torn=len(whole) < len(found) and lane not in self._progress.dense)
                self._count_rows(lane, whole)
                self._replace(lane=lane, sequence=found[-1].sequence)
                self._hand_over(
                    [msgspec.structs.replace(row, lane=self._progress.lanes[lane]) for row in whole], series=series
                )
            self._look_at_the_ends(connection, lane)

    def _count_rows(self, lane: int, rows: Sequence[Row], *, certain: bool = True) -> None:
        """Count rows that are taken over, in order, and rows missing between those known to have been in their lane.

        Rows before a lane's first row may be in Kafka, so they are not missing. Rows that had perhaps been deleted
        prove nothing.
        """
        holes, gaps = self._progress.holes, []
        ends = self._progress.ends.get(lane)
        for _, first, last in spans_of(rows):
            if ends is None:
                ends = (first, last)
            elif first > ends[1]:
                holes += first - ends[1] - 1
                if first > ends[1] + 1:
                    gaps.append(Span(lane, ends[1] + 1, first - 1))
                ends = (ends[0], last)
            elif last < ends[0]:
                holes += ends[0] - last - 1
                ends = (first, ends[1])
            else:
                holes -= last - first + 1
        self._replace(taken=self._progress.taken + len(rows))
        if certain and ends is not None:
            self._replace(ends=self._progress.ends | {lane: ends})
            if lane in self._progress.dense:
                self._replace(holes=holes)
                if not self._progress.walked:
                    self._note_gaps(gaps)
            elif gaps and not self._progress.walked:
                self._replace(unseen=_joined([*self._progress.unseen, *gaps]))

    def _note_gaps(self, gaps: Sequence[Span], *, torn: bool = False) -> None:
        """Remember gaps to which the b-trees do not lead."""
        if gaps or torn:
            joined = _joined([*self._progress.gaps, *gaps])
            crowded = self._progress.crowded or len(joined) >= GAPS_MAX
            self._replace(gaps=joined, torn=self._progress.torn or torn, crowded=crowded)

    def _look_at_the_ends(self, connection: sqlite3.Connection, lane: int) -> None:
        """Count rows known to be before or after the readable rows of a lane, and note whether more are missing."""
        first, last = (_end_sequence(connection, lane, end) for end in ("ASC", "DESC"))
        from_, to = self._progress.ends.get(lane, (None, -1))
        if from_ is not None:
            # There are rows, so an end that says "no rows" is nonsense.
            first, last = (None if end == -1 else end for end in (first, last))
        if first is None:
            self._note_gaps([Span(lane, 0, _SEQUENCE_MAX if from_ is None else from_ - 1)], torn=True)
        if last is None:
            self._note_gaps([Span(lane, to + 1, _SEQUENCE_MAX)], torn=True)
        if first is None or last is None or last < 0:
            return
        # The rows at the ends were there, even if their payloads cannot be read.
        hidden = [Span(lane, to + 1 if from_ is not None else first, last)]
        if from_ is not None:
            hidden.append(Span(lane, first, from_ - 1))
        hidden = [span for span in hidden if span.first <= span.last]
        self._note_gaps(hidden)
        if lane in self._progress.dense:
            ends = (first if from_ is None else min(first, from_), max(to, last))
            holes = sum(span.last - span.first + 1 for span in hidden)
            self._replace(holes=self._progress.holes + holes, ends=self._progress.ends | {lane: ends})

    def _scan_rows(self, pages: DamagedPages, series: dict[int, Series]) -> None:
        """Take over rows in pages that the b-trees do not lead to."""
        scan = Scan(pages, "reading", reading_keys, self._rest)
        if not self._progress.gaps and scan.is_tree_sound and not scan.has_strays():
            return  # rows that are missing all the same are nowhere
        if self._progress.scanned < (0, 0):
            # A sound page may be in the wrong place. SQLite then misreads it without an error.
            beyond: list[Span] = []
            for lane in self._progress.lanes:
                first, last = self._progress.ends.get(lane, (_SEQUENCE_MAX, -1))
                beyond += [Span(lane, 0, first - 1), Span(lane, last + 1, _SEQUENCE_MAX)]
            self._note_gaps([*beyond, *self._progress.unseen], torn=not self._progress.gaps)
        rows: list[Row] = []
        size = 0
        for row in found_rows(scan, self._progress.scanned, Wanted(self._progress.gaps)):
            if rows and (row.lane != rows[0].lane or len(rows) >= CHUNK_ROWS or size >= CHUNK_BYTES):
                self._hand_over_scanned(rows, series, certain=scan.certain)
                rows, size = [], 0
            rows.append(row)
            size += len(row.datum.payload)
        if rows:
            self._hand_over_scanned(rows, series, certain=scan.certain)
        # If every row that the file had was found, nothing is missing, whatever the b-trees hid.
        self._replace(torn=not scan.is_whole() and (self._progress.torn or not scan.certain))

    def _hand_over_scanned(self, rows: Sequence[Row], series: dict[int, Series], *, certain: bool) -> None:
        lane = rows[0].lane
        self._count_rows(lane, rows, certain=certain)
        self._replace(scanned=(lane, rows[-1].sequence))
        self._hand_over([msgspec.structs.replace(row, lane=self._progress.lanes[lane]) for row in rows], series=series)

    def _scan_quarantine(self, pages: DamagedPages, series: dict[int, Series]) -> None:
        scan = Scan(pages, "quarantine", quarantine_keys, self._rest)
        gaps = self._progress.quarantine_gaps
        if not scan.is_tree_sound or scan.has_strays():
            # A sound page may be in the wrong place, so input may be missing without an error.
            gaps = _joined([*gaps, *self._progress.quarantine_unseen])
            self._replace(quarantine_torn=True)
        if not gaps:
            return
        chunk: list[tuple[int, Quarantined]] = []
        size = 0
        for number, input_ in found_quarantined(scan, self._progress.quarantine_scanned, Wanted(gaps)):
            chunk.append((number, input_))
            size += len(input_.datum.payload)
            if len(chunk) >= QUARANTINE_CHUNK_ROWS or size >= CHUNK_BYTES:
                self._hand_over_quarantined(chunk, series)
                chunk, size = [], 0
        if chunk:
            self._hand_over_quarantined(chunk, series)
        self._replace(quarantine_torn=self._progress.quarantine_torn and not scan.is_whole())

    def _hand_over_quarantined(self, chunk: Sequence[tuple[int, Quarantined]], series: dict[int, Series]) -> None:
        counted = [gap for gap in self._progress.quarantine_gaps if gap.last < _SEQUENCE_MAX]
        was_counted = Wanted(counted)
        self._replace(
            quarantine_scanned=chunk[-1][0],
            quarantine_missing=self._progress.quarantine_missing - sum(was_counted((0, number)) for number, _ in chunk),
        )
        self._hand_over(quarantined=[input_ for _, input_ in chunk], series=series)

    def _hand_over(
        self,
        rows: Sequence[Row] = (),
        *,
        quarantined: Sequence[Quarantined] = (),
        series: dict[int, Series] | None = None,
        finished: bool = False,
    ) -> None:
        """Have a batch adopted, however long that takes. Its progress is never ahead of the file."""
        batch = SalvagedBatch(self._aside, self._into, rows, quarantined, series or {}, self._progress, finished)
        while True:
            if self._stopping.is_set():
                raise _StoppedError
            try:
                if self._adopt(batch):
                    return
            except BufferFileError as error:
                log.debug("salvaged rows have to wait", error=str(error))
            self._stopping.wait(WAIT_S)


class _StoppedError(Exception):
    """The salvage is to end here."""


def _joined(gaps: Sequence[Span]) -> list[Span]:
    """Gaps in order, without overlaps. At most `GAPS_MAX`: the nearest are joined, so that none gets lost."""
    joined: list[Span] = []
    for gap in sorted(gaps):
        if joined and joined[-1].lane == gap.lane and gap.first <= joined[-1].last + 1:
            joined[-1] = joined[-1]._replace(last=max(joined[-1].last, gap.last))
        elif gap.first <= gap.last:
            joined.append(gap)
    while len(joined) > GAPS_MAX:
        between = [
            (after.first - before.last, place)
            for place, (before, after) in enumerate(pairwise(joined))
            if before.lane == after.lane
        ]
        if not between:
            break  # so many lanes have one gap each
        _, place = min(between)
        joined[place : place + 2] = [joined[place]._replace(last=joined[place + 1].last)]
    return joined


def open_damaged(path: Path) -> sqlite3.Connection | None:
    """A connection that reads the file with its WAL; None if SQLite cannot, so that only the pages are left."""
    uri = path.resolve().as_uri()
    # A read-only connection leaves the WAL as it is. `immutable` skips the WAL, so it is only tried if that has no
    # commits.
    for query in ("mode=ro", "mode=ro&immutable=1"):
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(f"{uri}?{query}", uri=True, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA query_only = 1")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except _UNREADABLE:
            if connection is not None:
                connection.close()
        else:
            return connection
        with suppress(FileNotFoundError), closing(DamagedPages(path)) as pages:
            if pages.has_commits_in_wal:
                return None
    return None


def read_beside(path: Path, known: Lane | None) -> RowContext:
    """Read everything but the rows. `known` is the lane that the daemon knows by itself."""
    found = RowContext()
    if known is not None:
        _add_lane(found, _DAEMON, known.number, known.name, known.boot_id, known.buffer_id)
        found.own = known.buffer_id
    connection = open_damaged(path)
    if connection is not None:
        with closing(connection):
            _read_tables(connection, found)
    # Sensors wait for a new file, so all pages are read only if rows would otherwise have no lane.
    _read_pages(path, found, ("lane",), no_rest)
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
    return found


def _read_tables(connection: sqlite3.Connection, found: RowContext) -> None:
    """Add everything that SQLite can read."""
    with suppress(*_UNREADABLE, TypeError):
        (own,) = connection.execute("SELECT value FROM meta WHERE name = 'buffer_id'").fetchone()
        found.own = found.own or own
        found.whole.add("meta")
    # The tables first, then the indexes that hold the same: data damaged in one may be whole in the other.
    for table, columns, source in (
        ("lane", "name, boot_id, buffer_id", "lane"),
        ("lane_copy", "name, boot_id, buffer_id", "lane INDEXED BY lane_copy WHERE name > ''"),
        (_LANE_NAMES, "name, NULL, NULL", f"lane INDEXED BY {_LANE_NAMES} WHERE name > ''"),
    ):
        found_all, rows = _readable(connection, f"SELECT number, {columns} FROM {source}")
        added = [_add_lane(found, table, *row) for row in rows]
        if found_all and all(added):
            found.whole.add(table)
    for number, floor in _readable(connection, "SELECT number, event_from_us FROM lane")[1]:
        if type(number) is int and (floor is None or type(floor) is int):
            found.floors[number] = floor
    fields = "topic, key, device, subject, type, content_type"
    # The index has no stream; the Kafka topic then stands for it.
    for table, columns, source in (
        ("series", f"{fields}, coalesce(stream, '')", "series"),
        (_SECOND_COPIES["series"], fields, "series INDEXED BY sqlite_autoindex_series_1 WHERE topic > ''"),
    ):
        found_all, rows = _readable(connection, f"SELECT number, {columns} FROM {source}")
        added = [_add_series(found, *row) for row in rows]
        if found_all and all(added):
            found.whole.add(table)
    found.row_lanes |= set(_lanes_of_rows(connection))
    for table in _COPIED_TABLES:
        found_all, rows = _readable(connection, f"SELECT * FROM {table}")
        # A damaged schema gives other columns.
        found.tables[table] = [values for values in rows if is_shaped(table, None, values)]
        if found_all and len(found.tables[table]) == len(rows):
            found.whole.add(table)


def _read_pages(path: Path, found: RowContext, needed: Sequence[str], rest: Rest) -> None:
    """Add tables that SQLite could not read, by their trees; search all pages if a needed table is not known whole."""
    lacking = [table for table in SHAPES if table not in found.whole]
    if not lacking:
        return
    with suppress(FileNotFoundError), closing(DamagedPages(path, SMALL_BYTES_MAX)) as pages:
        small = read_small(pages, lacking)
        found.whole |= small.whole
        _add_small(found, small)
        if found.lacks(needed):
            small = scan_small(pages, rest)
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


def _add_lane(found: RowContext, source: str, number: object, *copy: Any) -> bool:
    """Add a copy of a lane's name, boot and file; return whether it says all that its source can."""
    if type(number) is not int or type(copy[0]) is not str:
        return False
    if any(value is not None and type(value) is not str for value in copy):
        return False
    found.copies.setdefault(number, {}).setdefault(source, copy)
    # Older lanes belong to the file itself, but do not say so.
    return source == _LANE_NAMES or (copy[1] is not None and (copy[2] or found.own) is not None)


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


def _add_series(found: RowContext, number: object, *texts: object) -> bool:
    """Add a series, and return whether this is one."""
    if not isinstance(number, int) or not all(isinstance(text, str) for text in texts):
        return False
    known = found.series.get(number)
    if known is None or not known.stream:
        *columns, stream = cast("list[str]", texts if len(texts) > _SERIES_COLUMNS else [*texts, ""])
        found.series[number] = Series.of_columns(columns, stream)
    return True


def _lanes_of_rows(connection: sqlite3.Connection) -> Iterator[int]:
    """Lane numbers of rows, as far as they can be found."""
    lane = 0
    with suppress(*_UNREADABLE, TypeError):
        while True:
            (lane,) = connection.execute("SELECT min(lane) FROM reading WHERE lane > ?", (lane,)).fetchone()
            if not isinstance(lane, int):
                return
            yield lane


def kept_marks(marks: Mapping[str, bytes]) -> dict[str, Progress]:
    """Progress by the damaged file's name, without marks that cannot be decoded."""
    kept = {}
    for key, value in marks.items():
        name = key.removeprefix(SALVAGE_PREFIX)
        if name != key and _ASIDE.fullmatch(name):
            with suppress(msgspec.DecodeError):
                progress = msgspec.json.decode(value, type=Progress)
                if not progress.ends and progress.sequence >= 0:
                    # Former versions did not store the ends.
                    progress = msgspec.structs.replace(progress, ends={progress.lane: (0, progress.sequence)})
                kept[name] = progress
    return kept


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
        found = read_beside(aside, lane)
        progress = Progress({}, -1, -1, found.dense, rows, rows_max=_rows_max(aside))
        files[final_name(aside)] = Damaged(
            aside.with_name(final_name(aside)),
            {lane.number: lane for lane in found.lanes},
            progress,
            found,
            _bytes_of(aside),
        )
        marks = {str(key): value for key, value in found.tables.get("mark", ()) if isinstance(value, bytes)}
        carried.update({name: (progress, found) for name, progress in kept_marks(marks).items()})
    for name, (progress, through) in carried.items():
        if name not in files:
            files[name] = _carried_over(asides[0][0].with_name(name), progress, through)
    files |= {aside.name: begun_again(aside) for aside in waiting if aside.name not in files}
    return dict(sorted(files.items()))


def begun_again(aside: Path) -> Damaged:
    """A file whose progress is lost. Rows that were taken over come again."""
    found = read_beside(aside, None)
    lanes = {lane.number: lane for lane in found.lanes}
    progress = Progress({}, -1, -1, found.dense, None, rows_max=_rows_max(aside))
    # Its marks and losses were taken over, and may have been deleted since.
    clocks = RowContext(floors=found.floors, tables={"boot": found.tables.get("boot", [])})
    return Damaged(aside, lanes, progress, clocks, _bytes_of(aside))


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


def _last_quarantined(connection: sqlite3.Connection) -> int | None:
    """The last number that the quarantine has given; None if it cannot be read."""
    with suppress(*_UNREADABLE):
        found = connection.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'quarantine'").fetchone()[0]
        return 0 if found is None else found if isinstance(found, int) else None
    return None


def _read_quarantine_chunk(connection: sqlite3.Connection, start: int) -> tuple[list[tuple[int, Quarantined]], bool]:
    """Inputs from a number on, with their numbers, and whether damage ended them."""
    chunk: list[tuple[int, Quarantined]] = []
    size = 0
    try:
        statement = _QUARANTINE.format(_columns(connection, "quarantine", QUARANTINE_COLUMNS))
        for number, *values in connection.execute(statement, (start, QUARANTINE_CHUNK_ROWS)):
            # A number of another type or out of order, or a field of another type, means that this is another page.
            if type(number) is not int or number < (chunk[-1][0] + 1 if chunk else start):
                return chunk, True
            input_ = Quarantined.checked(dict(zip(QUARANTINE_COLUMNS, values, strict=True)))
            chunk.append((number, input_))
            size += len(input_.datum.payload)
            if size >= CHUNK_BYTES:
                break
    except (*_UNREADABLE, msgspec.ValidationError):
        return chunk, True
    return chunk, False


def _columns(connection: sqlite3.Connection, table: str, fields: Sequence[str]) -> str:
    """Columns of a table for a SELECT, with defaults for those that its file is too old to have."""
    there = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}
    return ", ".join(name if name in there else _OF_OLDER_FILES.get(name, "NULL") for name in fields)


def _is_quarantine_readable(connection: sqlite3.Connection, number: int) -> bool:
    chunk, failed = _read_quarantine_chunk(connection, number)
    return bool(chunk) or not failed


def salvaged_rows(connection: sqlite3.Connection, lane: int, after: int) -> Iterator[list[Row] | Span]:
    """The readable rows of a lane behind a sequence, in order and in chunks, and the damaged spans between."""
    start = after + 1
    last = _end_sequence(connection, lane, "DESC")
    while True:
        chunk, failed = _read_chunk(connection, lane, start)
        if chunk:
            yield chunk
            start = chunk[-1].sequence + 1
        elif not failed and (last is None or start > last):
            return
        if failed or not chunk:
            # A page with other content may also end the rows too early.
            jumped = _after_damage(lambda sequence: _is_readable(connection, lane, sequence, last), start)
            yield Span(lane, start, _SEQUENCE_MAX if jumped is None else jumped - 1)
            if jumped is None:
                return
            start = jumped


def _end_sequence(connection: sqlite3.Connection, lane: int, order: Literal["ASC", "DESC"]) -> int | None:
    """The first or the last sequence of a lane, -1 if it has no rows; None if that end is damaged."""
    try:
        found = connection.execute(
            f"SELECT lane, sequence FROM reading WHERE lane = ? ORDER BY sequence {order} LIMIT 1", (lane,)
        ).fetchone()
    except _UNREADABLE:
        return None
    if found is None:
        return -1
    # A page in the wrong place gives rows of another lane.
    return found[1] if found[0] == lane and isinstance(found[1], int) else None


def _read_chunk(connection: sqlite3.Connection, lane: int, start: int) -> tuple[list[Row], bool]:
    """Rows from a sequence on, and whether damage ended them."""
    rows: list[Row] = []
    size = 0
    try:
        # One row more than is returned. The next row shows that the last one is in its place.
        statement = _ROWS.format(_columns(connection, "reading", ROW_COLUMNS))
        for values in connection.execute(statement, (lane, start, CHUNK_ROWS + 1)):
            row = Row.of_columns(values)
            # A damaged page may also read as nonsense.
            if not is_sound(row) or row.lane != lane:
                return rows, True
            if row.sequence < (rows[-1].sequence + 1 if rows else start):
                # One of the two is damaged. It may be the earlier one, so rows with too high numbers are left out.
                return [before for before in rows if before.sequence < row.sequence], True
            if len(rows) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                return rows, False
            rows.append(row)
            size += len(row.datum.payload)
    except _UNREADABLE:
        return rows, True
    return rows, False


def _is_readable(connection: sqlite3.Connection, lane: int, sequence: int, last: int | None) -> bool:
    rows, failed = _read_chunk(connection, lane, sequence)
    return bool(rows) or (not failed and (last is None or sequence > last))


def _after_damage(is_readable: Callable[[int], bool], start: int) -> int | None:
    """The first sequence behind `start` from which rows can be read again; None if there is none.

    Doubles its step until something is readable, then halves it back to the edge of the damage.
    """
    bad, step = start, 1
    while not is_readable(bad + step):
        bad += step
        step *= 2
        if bad > _SEQUENCE_MAX:
            return None
    good = bad + step
    while good - bad > 1:
        middle = (good + bad) // 2
        if is_readable(middle):
            good = middle
        else:
            bad = middle
    return good


def _readable(
    connection: sqlite3.Connection, statement: str, parameters: Sequence[object] = ()
) -> tuple[bool, list[tuple[Any, ...]]]:
    """The rows of a statement up to the first unreadable one, and whether these are all."""
    rows: list[tuple[Any, ...]] = []
    try:
        rows.extend(connection.execute(statement, parameters))
    except _UNREADABLE:
        return False, rows
    return True, rows
