"""The lanes of a buffer file: the current one, how far each was numbered, how many of its rows wait.

A lane's counts are stored as a mark at each deletion. Rows that came in later are counted from the table.
"""

import secrets
import sqlite3
import sys
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import Struct

from gateway.buffer.rows import LANE_MAX, SEQUENCE_MAX, Entry, Lane, PendingLane, PendingRows, Position, Span
from gateway.buffer.schema import corruption, find_one, keep_marks, read_marks
from gateway.buffer.stored_rows import first_of, last_of, rows_within
from gateway.reading import Mark

LANE_PREFIX = "lane/"
"""Prefix of a lane's name in the key of its mark."""

LaneReport = Callable[[str, Lane, int, str], Entry]
"""Makes the row that reports a lane, from `lane-opened` or `lane-closed`, the lane, its number of rows, and the
reason."""
NOTHING_US = sys.maxsize
FLOOR_SAVE_S = 10.0
"""Seconds between two saves of a risen floor of pending event times: each is a page for the card."""
EMPTY_LANES_MAX = 100
"""Empty lanes of this start that are kept."""
NO_LANE = Lane(0, "", "", "")


class LaneCount(Struct, frozen=True, omit_defaults=True):
    """The counts of one lane."""

    next: int = 0
    """The sequence of its next row, so the number of rows it has had."""
    rows: int = 0
    """Rows that wait in the file."""
    opened: bool = False
    """Whether its beginning was reported."""
    closed: bool = False
    """Whether its end was reported."""
    hole: int | None = None
    """Its first number that no row has, if there is one. Its end is reported there."""

    def plus(self, numbers: int, rows: int) -> "LaneCount":
        """The counts with more numbers given, and more rows that wait."""
        return msgspec.structs.replace(self, next=self.next + numbers, rows=self.rows + rows)

    @property
    def end(self) -> int:
        """The number below which each number has, or had, its row."""
        return self.next if self.hole is None else min(self.next, self.hole)

    def minus(self, rows: int) -> "LaneCount":
        """The counts with fewer waiting rows, wherever they stood."""
        return msgspec.structs.replace(self, rows=self.rows - rows)

    def without(self, number: int) -> "LaneCount":
        """The counts if no row has a number, or none may have it."""
        return msgspec.structs.replace(self, hole=number if self.hole is None else min(self.hole, number))

    def mark(self, lane_name: str) -> Mark:
        return Mark(LANE_PREFIX + lane_name, msgspec.json.encode(self))


_counts = msgspec.json.Decoder(LaneCount)
_COUNT = f"SELECT count(*) FROM {rows_within('series')}"
_FIRST = f"SELECT {first_of('?1', 'sequence')}"
_PENDING = f"""
    SELECT number, name, boot_id, event_from_us, {first_of("number", "received_us")} AS first,
        {last_of("number", "received_us")}
    FROM lane WHERE first IS NOT NULL ORDER BY number
"""


def read_counts(connection: sqlite3.Connection, number: int | None = None) -> dict[int, LaneCount]:
    """Counts of a file's lanes, or of one, by number; only the ends of each lane are read.

    Salvaged lanes were numbered elsewhere and have holes, so their rows are counted.
    """
    marks = read_marks(connection, LANE_PREFIX)
    return {
        lane: _count(connection, lane, last, marks.get(key), is_own=bool(is_own))
        for lane, key, is_own, last in connection.execute(
            f"""SELECT number, '{LANE_PREFIX}' || name,
                coalesce(buffer_id = (SELECT value FROM meta WHERE name = 'buffer_id'), TRUE),
                coalesce({last_of("number", "sequence")}, -1)
            FROM lane WHERE ?1 IS NULL OR number = ?1 ORDER BY number""",
            (number,),
        ).fetchall()
    }


def count_rows(connection: sqlite3.Connection) -> int:
    """Rows that wait in all lanes."""
    return sum(count.rows for count in read_counts(connection).values())


def _count(connection: sqlite3.Connection, number: int, last: int, mark: bytes | None, *, is_own: bool) -> LaneCount:
    if not is_own:
        (rows,) = connection.execute(_COUNT, Span(number, 0, SEQUENCE_MAX).places).fetchone()
        return LaneCount(last + 1, rows, opened=True, closed=True)
    known = None if mark is None else _decoded(mark)
    if known is None:
        # Nothing was deleted since the lane was opened, or its mark is damaged and only its ends are known.
        first = _first(connection, number)
        return LaneCount(last + 1, 0 if first is None else last - first + 1)
    new = max(0, last + 1 - known.next)
    return known.plus(new, new)


def _first(connection: sqlite3.Connection, number: int) -> int | None:
    """The first sequence of a lane that has its row."""
    first: int | None
    (first,) = connection.execute(_FIRST, (number,)).fetchone()
    return first


def _decoded(mark: bytes) -> LaneCount | None:
    try:
        return _counts.decode(mark)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def numbers_without_rows(mark: bytes) -> int:
    """Numbers of a lane that never had a row in the file, or have none any more, by the lane's mark."""
    count = _decoded(mark)
    return 0 if count is None else max(0, count.next - count.rows)


def forget_lanes(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Delete empty lanes and their marks."""
    for number in numbers:
        connection.execute(
            "DELETE FROM mark WHERE key = (SELECT ? || name FROM lane WHERE number = ?)", (LANE_PREFIX, number)
        )
        connection.execute("DELETE FROM lane WHERE number = ?", (number,))


@dataclass(slots=True)
class EventFloor:
    """A lower bound of the event times of a lane's waiting rows, in two generations.

    Rows below `marker` are the older generation. Once they are gone, the newer generation takes their place. So the
    floor rises even under a steady flow, where something always waits, at most one generation late.
    """

    older_us: int = NOTHING_US
    newer_us: int = NOTHING_US
    marker: int = 0

    @property
    def value_us(self) -> int:
        return min(self.older_us, self.newer_us)

    def add(self, event_us: int) -> None:
        """Include a row with this event time."""
        self.newer_us = min(self.newer_us, event_us)

    def settle(self, sequence: int, next_sequence: int) -> None:
        """Note that all rows up to `sequence` are gone; the next new row gets `next_sequence`."""
        if sequence >= self.marker - 1:
            self.older_us, self.newer_us = self.newer_us, NOTHING_US
            self.marker = next_sequence
        if sequence >= next_sequence - 1:
            self.older_us = NOTHING_US


@dataclass(slots=True)
class LanesState:
    """The state that a transaction changes, and that a roll-back restores."""

    current: Lane
    counts: dict[int, LaneCount]
    rows: int
    floor: EventFloor
    touched: set[int] = field(default_factory=set)
    """Lanes whose marks must be written."""
    floor_saved_us: int = NOTHING_US
    floor_due_s: float = 0.0
    stored: int = -1
    """The last sequence of the current lane that the file has had."""
    is_ahead: bool = False
    """Whether numbers of the current lane were given that no row of the file may tell."""
    spent: int = 0
    """Numbers of the current lane below this one may be on disk, with rows of a commit that failed."""


class Lanes:
    """The lanes of an open file. Methods that write need a transaction, which uses `saved` and `restore`."""

    def __init__(self, connection: sqlite3.Connection, boot_id: str, buffer_id: str) -> None:
        self._connection = connection
        self._boot_id = boot_id
        self._buffer_id = buffer_id
        counts = read_counts(connection)
        self._state = LanesState(NO_LANE, counts, sum(count.rows for count in counts.values()), EventFloor())

    @property
    def current(self) -> Lane:
        """The lane that rows go into now."""
        return self._state.current

    @property
    def next_sequence(self) -> int:
        """The sequence of the next row in the current lane."""
        return self._state.counts[self._state.current.number].next

    @property
    def has_hole(self) -> bool:
        """Whether numbers of the current lane were skipped. May be read on any thread."""
        return self._state.counts[self.current.number].hole is not None

    @property
    def last(self) -> Position:
        """The last row of the current lane."""
        return Position(self.current.number, self.next_sequence - 1)

    @property
    def last_stored(self) -> Position:
        """The last row of the current lane that the file has had."""
        return Position(self.current.number, self._state.stored)

    @property
    def rows(self) -> int:
        """Rows that wait in the file, in all lanes."""
        return self._state.rows

    @property
    def backlog_lanes(self) -> int:
        """Lanes before the current one that hold rows."""
        return sum(1 for number, count in self._state.counts.items() if count.rows and number != self.current.number)

    def saved(self) -> LanesState:
        """A copy of the state before a transaction."""
        return replace(self._state, floor=replace(self._state.floor), counts=dict(self._state.counts))

    def restore(self, before: LanesState, *, may_be_stored: bool) -> None:
        """Restore the state, after a transaction was rolled back.

        After a COMMIT that failed, its rows `may_be_stored`: if the program ends before another commit has taken their
        place in the WAL, the next start may find them.
        """
        failed, self._state = self._state, before
        before.touched.clear()
        if may_be_stored and failed.current == before.current:
            before.spent = max(before.spent, failed.counts[failed.current.number].next)

    def skip_spent(self) -> None:
        """Skip the numbers that a row of a failed commit may have, as Kafka gets the next one. Needs no transaction."""
        number, spent = self.current.number, self._state.spent
        count = self._state.counts[number]
        if count.next < spent:
            self._state.counts[number] = msgspec.structs.replace(count.without(count.next), next=spent)

    def give_up(self, number: int) -> None:
        """Note that no row will have a number of the current lane. Needs no transaction."""
        of = self.current.number
        self._state.counts[of] = self._state.counts[of].without(number)
        self._state.is_ahead = True

    def forget_spent(self) -> None:
        """Note that a commit has taken the place of those that failed."""
        self._state.spent = 0

    # -- the lanes themselves -------------------------------------------------------------------

    def open(self, kept: Container[int]) -> None:
        """Store rows in a new lane from now on, and forget empty lanes, except `kept`."""
        # Rows of lanes that are being salvaged are still to come. The row count of an unreported lane is still to be
        # told.
        state = self._state
        over = [number for number, count in state.counts.items() if not count.rows and count.closed]
        # A device that fell silent is known by its lane, so the last of these stay until the next start.
        over = [number for number in over if number not in kept]
        over = over if state.current is NO_LANE else over[:-EMPTY_LANES_MAX]
        forget_lanes(self._connection, over)
        for number in over:
            del state.counts[number]
        if state.is_ahead:
            state.touched.add(state.current.number)
        lane = Lane(0, secrets.token_hex(6), self._boot_id, self._buffer_id)
        state.current = replace(lane, number=self._insert(lane))
        state.counts[state.current.number] = LaneCount()
        state.floor, state.floor_saved_us, state.floor_due_s = EventFloor(), NOTHING_US, 0.0
        state.stored, state.is_ahead, state.spent = -1, False, 0

    def adopt(self, lane: Lane) -> int:
        """The number here of another file's lane. Names are unique for ever; two files may hold parts of one lane."""
        known = self._connection.execute("SELECT number FROM lane WHERE name = ?", (lane.name,)).fetchone()
        return self._insert(lane) if known is None else int(known[0])

    def find(self, number: int) -> Lane:
        """The lane of a number. Raises BufferFileError if this file does not know it."""
        if number == self.current.number:
            return self.current
        return Lane(
            *find_one(
                self._connection,
                "SELECT number, name, boot_id, coalesce(buffer_id, (SELECT value FROM meta WHERE name = 'buffer_id'))"
                " FROM lane WHERE number = ?",
                number,
            )
        )

    def unreported(self, reason: str, report: LaneReport) -> list[Entry]:
        """Rows that report the newest lane and the closed ones, unless they were reported before."""
        state = self._state
        reports = []
        for number, count in state.counts.items():
            if number == state.current.number and not count.opened:
                reports.append(report("lane-opened", state.current, 0, reason))
                state.counts[number] = msgspec.structs.replace(count, opened=True)
            elif number != state.current.number and not count.closed:
                reports.append(report("lane-closed", self.find(number), count.end, reason))
                state.counts[number] = msgspec.structs.replace(count, closed=True)
            else:
                continue
            state.touched.add(number)
        return reports

    def pending(self, newest: PendingRows | None) -> list[PendingLane]:
        """The lanes that hold rows. The `newest` rows, which the file does not have, count with the current lane."""
        state = self._state
        lanes = {
            name: PendingLane(
                name,
                state.floor.value_us if number == state.current.number else event_from_us or 0,
                last_us,
                boot_id,
                first_us,
                state.counts[number].rows,
            )
            for number, name, boot_id, event_from_us, first_us, last_us in self._connection.execute(_PENDING)
        }
        if newest is not None:
            stored = lanes.get(state.current.name)
            lanes[state.current.name] = PendingLane(
                state.current.name,
                min(state.floor.value_us, newest.event_from_us),
                newest.last_us if stored is None else max(stored.event_to_us, newest.last_us),
                self._boot_id,
                newest.first_us if stored is None else min(stored.received_us, newest.first_us),
                newest.rows + (0 if stored is None else stored.rows),
            )
        return list(lanes.values())

    # -- their rows -----------------------------------------------------------------------------

    def number(self, rows: int) -> None:
        """Give the next numbers of the current lane to rows. Needs no transaction.

        Raises sqlite3.DatabaseError if the lane has none left. Another file then takes this one's place.
        """
        number = self.current.number
        if self._state.counts[number].next + rows > SEQUENCE_MAX:
            raise corruption("a lane has no numbers left")
        self._state.counts[number] = self._state.counts[number].plus(rows, 0)

    @property
    def is_ahead(self) -> bool:
        """Whether numbers of the current lane were given that no row of the file may tell."""
        return self._state.is_ahead

    def go_ahead(self) -> None:
        """Note that rows got numbers which the file may never have. Needs no transaction."""
        self._state.is_ahead = True

    def added(self, rows: int, last: int, event_from_us: int) -> None:
        """Note numbered rows that the file has now, the last sequence, and the earliest event time."""
        state = self._state
        number = state.current.number
        state.counts[number] = state.counts[number].plus(0, rows)
        state.rows += rows
        state.stored = max(state.stored, last)
        state.floor.add(event_from_us)
        # Save the floor at once if it fell, but only now and then if it rose.
        now_s = time.monotonic()
        risen = state.floor.value_us > state.floor_saved_us and now_s >= state.floor_due_s
        if state.floor.value_us < state.floor_saved_us or risen:
            self.save_floor()
            state.floor_saved_us = state.floor.value_us
            state.floor_due_s = now_s + FLOOR_SAVE_S

    def adopted(self, number: int, rows: int) -> None:
        """Note rows of a damaged file that were added to a lane."""
        state = self._state
        state.rows += rows
        count = state.counts.get(number, LaneCount(opened=True, closed=True))
        state.counts[number] = msgspec.structs.replace(count, rows=count.rows + rows)

    def deleted(self, number: int, rows: int) -> None:
        """Note deleted rows of a lane."""
        state = self._state
        state.rows -= rows
        if number in state.counts:
            state.counts[number] = state.counts[number].minus(rows)
            state.touched.add(number)
        if number == state.current.number:
            # Earlier rows may still wait for a partition that takes none now.
            front = _first(self._connection, number)
            state.floor.settle((self.next_sequence if front is None else front) - 1, self.next_sequence)

    def save_floor(self) -> None:
        """Save the current lane's floor for the next start."""
        self._connection.execute(
            "UPDATE lane SET event_from_us = ? WHERE number = ?", (self._state.floor.value_us, self.current.number)
        )

    def save_counts(self, first_ahead: int | None) -> None:
        """Save the counts that the remaining rows cannot tell.

        `first_ahead` is the first number whose row neither the file nor Kafka has. After a crash the lane ends there,
        even if the file has rows behind it.
        """
        state = self._state
        if state.is_ahead:
            state.touched.add(state.current.number)
        for number in state.touched:
            is_current = number == state.current.number
            lane, count = state.current if is_current else self.find(number), state.counts[number]
            if is_current and first_ahead is not None:
                count = count.without(first_ahead)
            if lane.buffer_id == self._buffer_id:
                keep_marks(self._connection, [count.mark(lane.name)])
        state.touched.clear()
        state.is_ahead = first_ahead is not None

    def _insert(self, lane: Lane) -> int:
        (number,) = self._connection.execute(
            "INSERT INTO lane (name, boot_id, buffer_id) VALUES (?, ?, ?) RETURNING number",
            (lane.name, lane.boot_id, lane.buffer_id),
        ).fetchone()
        if number > LANE_MAX:
            # More starts than there can be: its counter is damaged.
            raise corruption("there are no lane numbers left")
        return int(number)
