"""The lanes of a buffer file: which one rows go into, how far each was numbered, how many of its rows wait.

What outlives a lane's rows is kept as a mark, written with each deletion: the rows that came in since tell the rest.
"""

import secrets
import sqlite3
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import Struct

from gateway.buffer.rows import Entry, Lane, PendingLane, Position, earliest_event_us
from gateway.buffer.schema import find_one, keep_marks, read_marks
from gateway.reading import Mark

LANE_PREFIX = "lane/"
"""Before a lane's name, in the key of its mark."""

LaneReport = Callable[[str, Lane, int, str], Entry]
"""Makes the row that reports a lane: `lane-opened` or `lane-closed`, the lane, how many rows it has had, and why."""
NOTHING_US = sys.maxsize
FLOOR_SAVE_S = 10.0
"""A risen floor of pending event times is written down no more often than this: it is a page for the card."""
EMPTY_LANES_MAX = 100
"""Lanes of this start that are kept although nothing is left of them."""
NO_LANE = Lane(0, "", "", "")


class LaneCount(Struct, frozen=True, omit_defaults=True):
    """How far a lane has come."""

    next: int = 0
    """The sequence that its next row gets: how many it has had."""
    rows: int = 0
    """Those that wait."""
    opened: bool = False
    """Whether its beginning was reported."""
    closed: bool = False
    """Whether its end was."""

    def plus(self, rows: int) -> "LaneCount":
        """With rows more at its end."""
        return msgspec.structs.replace(self, next=self.next + rows, rows=self.rows + rows)

    def minus(self, rows: int) -> "LaneCount":
        """With so many waiting rows fewer, wherever they stood."""
        return msgspec.structs.replace(self, rows=self.rows - rows)

    def mark(self, lane_name: str) -> Mark:
        return Mark(LANE_PREFIX + lane_name, msgspec.json.encode(self))


_counts = msgspec.json.Decoder(LaneCount)


def read_counts(connection: sqlite3.Connection, number: int | None = None) -> dict[int, LaneCount]:
    """What a file knows of its lanes, or of one, by their numbers; no row is looked at but the ends of each lane.

    Salvaged lanes were numbered elsewhere and have holes: their rows are counted.
    """
    marks = read_marks(connection, LANE_PREFIX)
    return {
        lane: _count(connection, lane, last, marks.get(LANE_PREFIX + name), is_own=bool(is_own))
        for lane, name, is_own, last in connection.execute(
            """SELECT number, name,
                coalesce(buffer_id = (SELECT value FROM meta WHERE name = 'buffer_id'), TRUE),
                coalesce((SELECT max(sequence) FROM reading WHERE lane = number), -1)
            FROM lane WHERE ?1 IS NULL OR number = ?1 ORDER BY number""",
            (number,),
        ).fetchall()
    }


def count_rows(connection: sqlite3.Connection) -> int:
    """How many rows wait in all lanes."""
    return sum(count.rows for count in read_counts(connection).values())


def _count(connection: sqlite3.Connection, number: int, last: int, mark: bytes | None, *, is_own: bool) -> LaneCount:
    if not is_own:
        (rows,) = connection.execute("SELECT count(*) FROM reading WHERE lane = ?", (number,)).fetchone()
        return LaneCount(last + 1, rows, opened=True, closed=True)
    known = None if mark is None else _decoded(mark)
    if known is None:
        # Nothing was deleted since it was opened; or its mark is damaged, and its ends tell what they can.
        (first,) = connection.execute("SELECT min(sequence) FROM reading WHERE lane = ?", (number,)).fetchone()
        return LaneCount(last + 1, 0 if first is None else last - first + 1)
    return known.plus(max(0, last + 1 - known.next))


def _decoded(mark: bytes) -> LaneCount | None:
    try:
        return _counts.decode(mark)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def forget_lanes(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Delete lanes of which nothing is left, and their marks."""
    for number in numbers:
        connection.execute(
            "DELETE FROM mark WHERE key = (SELECT ? || name FROM lane WHERE number = ?)", (LANE_PREFIX, number)
        )
        connection.execute("DELETE FROM lane WHERE number = ?", (number,))


@dataclass(slots=True)
class EventFloor:
    """A lower bound of the event times of a lane's waiting rows, in two generations.

    Rows below `marker` are the older generation. Once all of these are gone, the newer one takes their place: under
    a steady flow, where something always waits, the floor rises all the same, at most one generation late.
    """

    older_us: int = NOTHING_US
    newer_us: int = NOTHING_US
    marker: int = 0

    @property
    def value_us(self) -> int:
        return min(self.older_us, self.newer_us)

    def add(self, event_us: int) -> None:
        """A row with this event time waits now."""
        self.newer_us = min(self.newer_us, event_us)

    def settle(self, sequence: int, next_sequence: int) -> None:
        """Every row up to and including `sequence` is gone; the next one to come gets `next_sequence`."""
        if sequence >= self.marker - 1:
            self.older_us, self.newer_us = self.newer_us, NOTHING_US
            self.marker = next_sequence
        if sequence >= next_sequence - 1:
            self.older_us = NOTHING_US


@dataclass(slots=True)
class LanesState:
    """What changes with a transaction and must be as before when it is rolled back."""

    current: Lane
    counts: dict[int, LaneCount]
    rows: int
    floor: EventFloor
    touched: set[int] = field(default_factory=set)
    """Lanes whose marks have to be written."""
    floor_saved_us: int = NOTHING_US
    floor_due_s: float = 0.0


class Lanes:
    """The lanes of an open file. What writes belongs into a transaction, which keeps `saved` to `restore` it."""

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
        """The sequence that the next row of this lane gets."""
        return self._state.counts[self._state.current.number].next

    @property
    def last(self) -> Position:
        """The row that was added last to this start's lane."""
        return Position(self.current.number, self.next_sequence - 1)

    @property
    def rows(self) -> int:
        """Rows that wait, in all lanes."""
        return self._state.rows

    @property
    def backlog_lanes(self) -> int:
        """Lanes before this one that hold rows."""
        return sum(1 for number, count in self._state.counts.items() if count.rows and number != self.current.number)

    def saved(self) -> LanesState:
        """How things stand before a transaction."""
        return replace(self._state, floor=replace(self._state.floor), counts=dict(self._state.counts))

    def restore(self, before: LanesState) -> None:
        """A transaction was rolled back."""
        self._state = before
        before.touched.clear()

    # -- the lanes themselves -------------------------------------------------------------------

    def open(self, kept: Container[int]) -> None:
        """Have rows go into a new lane, and forget those of which nothing is left, but for `kept`."""
        # Lanes of which nothing is left are history. What is salvaged has yet to come, and of a lane that was not
        # reported the number of its rows has yet to be told.
        state = self._state
        over = [number for number, count in state.counts.items() if not count.rows and count.closed]
        # Devices that were silent since are known by their lanes: the last of these stay until the next start.
        over = [number for number in over if number not in kept]
        over = over if state.current is NO_LANE else over[:-EMPTY_LANES_MAX]
        forget_lanes(self._connection, over)
        for number in over:
            del state.counts[number]
        lane = Lane(0, secrets.token_hex(6), self._boot_id, self._buffer_id)
        state.current = replace(lane, number=self._insert(lane))
        state.counts[state.current.number] = LaneCount()
        state.floor, state.floor_saved_us, state.floor_due_s = EventFloor(), NOTHING_US, 0.0

    def adopt(self, lane: Lane) -> int:
        """The number of a lane of another file here: names are unique for ever, and two files may hold parts of it."""
        known = self._connection.execute("SELECT number FROM lane WHERE name = ?", (lane.name,)).fetchone()
        return self._insert(lane) if known is None else int(known[0])

    def find(self, number: int) -> Lane:
        """The lane of a row. Raises BufferFileError where this file does not know it."""
        return Lane(
            *find_one(
                self._connection,
                "SELECT number, name, boot_id, coalesce(buffer_id, (SELECT value FROM meta WHERE name = 'buffer_id'))"
                " FROM lane WHERE number = ?",
                number,
            )
        )

    def unreported(self, reason: str, report: LaneReport) -> list[Entry]:
        """Rows that report the lane that was opened last, and those that are closed, as far as none did so."""
        state = self._state
        reports = []
        for number, count in state.counts.items():
            if number == state.current.number and not count.opened:
                reports.append(report("lane-opened", state.current, 0, reason))
                state.counts[number] = msgspec.structs.replace(count, opened=True)
            elif number != state.current.number and not count.closed:
                reports.append(report("lane-closed", self.find(number), count.next, reason))
                state.counts[number] = msgspec.structs.replace(count, closed=True)
            else:
                continue
            state.touched.add(number)
        return reports

    def pending(self, queued: Sequence[Entry]) -> list[PendingLane]:
        """The lanes that hold rows, `queued` (what waits for its commit) counted with this one's."""
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
            for number, name, boot_id, event_from_us, first_us, last_us in self._connection.execute(
                """SELECT number, name, boot_id, event_from_us,
                    (SELECT received_us FROM reading WHERE lane = number ORDER BY sequence LIMIT 1) AS first,
                    (SELECT received_us FROM reading WHERE lane = number ORDER BY sequence DESC LIMIT 1)
                FROM lane WHERE first IS NOT NULL ORDER BY number"""
            )
        }
        if queued:
            event_from_us = min(state.floor.value_us, *(earliest_event_us(entry) for entry in queued))
            stored = lanes.get(state.current.name)
            lanes[state.current.name] = PendingLane(
                state.current.name,
                event_from_us,
                queued[-1].received_us,
                self._boot_id,
                queued[0].received_us if stored is None else stored.received_us,
                len(queued) + (0 if stored is None else stored.rows),
            )
        return list(lanes.values())

    # -- their rows -----------------------------------------------------------------------------

    def added(self, rows: int, event_from_us: int) -> None:
        """Rows were added to this lane, whose earliest event time is this."""
        state = self._state
        number = state.current.number
        state.counts[number] = state.counts[number].plus(rows)
        state.rows += rows
        state.floor.add(event_from_us)
        # At once where it fell, now and then where it rose.
        now_s = time.monotonic()
        risen = state.floor.value_us > state.floor_saved_us and now_s >= state.floor_due_s
        if state.floor.value_us < state.floor_saved_us or risen:
            self.save_floor()
            state.floor_saved_us = state.floor.value_us
            state.floor_due_s = now_s + FLOOR_SAVE_S

    def adopted(self, number: int, rows: int) -> None:
        """Rows of a damaged file were added to a lane."""
        state = self._state
        state.rows += rows
        count = state.counts.get(number, LaneCount(opened=True, closed=True))
        state.counts[number] = msgspec.structs.replace(count, rows=count.rows + rows)

    def deleted(self, number: int, rows: int) -> None:
        """Rows of a lane were deleted."""
        state = self._state
        state.rows -= rows
        if number in state.counts:
            state.counts[number] = state.counts[number].minus(rows)
            state.touched.add(number)
        if number == state.current.number:
            # Rows before these may wait still: for a partition that takes none at present.
            (front,) = self._connection.execute(
                "SELECT min(sequence) FROM reading WHERE lane = ?", (number,)
            ).fetchone()
            state.floor.settle((self.next_sequence if front is None else front) - 1, self.next_sequence)

    def save_floor(self) -> None:
        """Keep this lane's floor for the next start."""
        self._connection.execute(
            "UPDATE lane SET event_from_us = ? WHERE number = ?", (self._state.floor.value_us, self.current.number)
        )

    def save_counts(self) -> None:
        """Keep what the rows that are left do not tell of their lanes."""
        state = self._state
        for number in state.touched:
            lane = state.current if number == state.current.number else self.find(number)
            if lane.buffer_id == self._buffer_id:
                keep_marks(self._connection, [state.counts[number].mark(lane.name)])
        state.touched.clear()

    def _insert(self, lane: Lane) -> int:
        (number,) = self._connection.execute(
            "INSERT INTO lane (name, boot_id, buffer_id) VALUES (?, ?, ?) RETURNING number",
            (lane.name, lane.boot_id, lane.buffer_id),
        ).fetchone()
        return int(number)
