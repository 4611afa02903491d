"""The lanes of a buffer file: how far each was numbered, how many of its rows wait, what was reported of it.

What outlives a lane's rows is kept as a mark, written with each deletion: the rows that came in since tell the rest.
"""

import sqlite3
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from gateway.buffer.rows import Entry, Lane
from gateway.buffer.schema import read_marks
from gateway.reading import Mark

LANE_PREFIX = "lane/"
"""Before a lane's name, in the key of its mark."""

LaneReport = Callable[[str, Lane, int, str], Entry]
"""Makes the row that reports a lane: `lane-opened` or `lane-closed`, the lane, how many rows it has had, and why."""
NOTHING_US = sys.maxsize


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
