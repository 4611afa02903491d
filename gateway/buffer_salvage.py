"""Takes what can still be read out of a buffer file that SQLite found corrupt. Rows keep their identity.

The file was set aside (`buffer_aside`) and is never changed here.
"""

import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from gateway.buffer_rows import Lane, Row, Series, is_sound
from gateway.buffer_schema import BufferFileError

SALVAGE_PREFIX = "salvage/"
"""Marks by this and the damaged file's name: `Progress`."""
CHUNK_ROWS = 1_000
UNKNOWN_BOOT = "unknown"
"""The gateway boot of rows whose lane could not be read: nothing is known of its clock."""
WAIT_S = 5.0
"""How long a salvage waits for room before it asks again."""
_SEQUENCE_MAX = 2**62
_ROWS = f"SELECT {', '.join(Row._fields)} FROM reading WHERE lane = ? AND sequence >= ? ORDER BY sequence LIMIT ?"
_COPIED_TABLES = {
    "boot": 3,
    "mark": 2,
    "device_run": 6,
    "loss": 9,
}
"""Small tables that are taken over as they are, and how many columns they have."""


log = structlog.get_logger()


class Progress(msgspec.Struct, frozen=True):
    """How far the salvage of one file has come: kept as a mark, so that the next start goes on with it."""

    lanes: dict[int, int]
    """Lane numbers of the damaged file, to those of this one."""
    lane: int
    sequence: int
    """The last row that was taken over."""
    dense: list[int]
    """Those of the damaged file's lanes that had no holes."""
    expected: int | None
    """Rows that the file held, where the daemon knew it."""
    taken: int = 0
    holes: int = 0
    """Rows that are known to be missing between those that were taken over."""
    torn: bool = False
    """Whether an end of a lane is damaged: more is missing, and nobody knows how much."""


@dataclass(slots=True)
class Found:
    """What stands beside the rows, as far as it could be read."""

    lanes: list[Lane] = field(default_factory=list)
    dense: list[int] = field(default_factory=list)
    """Numbers of lanes that had no holes."""
    floors: dict[int, int | None] = field(default_factory=dict)
    """By lane number: the earliest event time that may wait in it."""
    series: dict[int, Series] = field(default_factory=dict)
    tables: dict[str, list[tuple[object, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SalvagedBatch:
    """Rows of one lane, under the new file's lane number and the damaged file's series numbers."""

    aside: Path
    rows: Sequence[Row]
    series: dict[int, Series]
    progress: Progress
    finished: bool
    missing: int | None
    """Of the whole file, at its end: rows that are known to be lost, at least; None where nothing could be read."""


class Salvage(threading.Thread):
    """Reads a damaged file to its end, beside the daemon's work; `adopt` takes a batch, or says that it has no room."""

    def __init__(self, aside: Path, progress: Progress, adopt: Callable[[SalvagedBatch], bool]) -> None:
        super().__init__(name="salvage", daemon=True)
        self._aside = aside
        self._progress = progress
        self._adopt = adopt
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Let it end soon; the next start goes on where it was."""
        self._stopping.set()

    def run(self) -> None:
        connection = open_damaged(self._aside)
        try:
            if connection is not None:
                found = Found()
                _read_beside(connection, found)
                self._read_lanes(connection, found.series)
            if not self._stopping.is_set():
                progress = self._progress
                missing: int | None = max(progress.holes, (progress.expected or 0) - progress.taken)
                if missing == 0 and (progress.torn or not progress.lanes):
                    missing = None
                self._hand_over(SalvagedBatch(self._aside, (), {}, self._progress, True, missing))
        except (sqlite3.Error, OSError, BufferFileError) as error:
            log.warning("salvage has to wait for the next start", aside=self._aside.name, error=str(error))
        finally:
            if connection is not None:
                connection.close()

    def _read_lanes(self, connection: sqlite3.Connection, series: dict[int, Series]) -> None:
        for lane in sorted(self._progress.lanes):
            if lane < self._progress.lane:
                continue
            after = self._progress.sequence if lane == self._progress.lane else -1
            for rows in salvaged_rows(connection, lane, after):
                # Before a lane's first row there may have been others, which Kafka has.
                first = rows[0].sequence if self._progress.lane != lane else self._progress.sequence + 1
                holes = rows[-1].sequence + 1 - first - len(rows) if lane in self._progress.dense else 0
                self._progress = msgspec.structs.replace(
                    self._progress,
                    lane=lane,
                    sequence=rows[-1].sequence,
                    taken=self._progress.taken + len(rows),
                    holes=self._progress.holes + holes,
                )
                renumbered = [row._replace(lane=self._progress.lanes[lane]) for row in rows]
                self._hand_over(SalvagedBatch(self._aside, renumbered, series, self._progress, False, None))
                if self._stopping.is_set():
                    return
            self._look_at_the_ends(connection, lane)

    def _look_at_the_ends(self, connection: sqlite3.Connection, lane: int) -> None:
        """Count what is known to follow the last row that could be read of a lane; see whether more is missing."""
        first, last = (_end_sequence(connection, lane, end) for end in ("min", "max"))
        taken = self._progress.sequence if self._progress.lane == lane else -1
        if first is None or last is None:
            self._progress = msgspec.structs.replace(self._progress, torn=True)
        elif last > taken:
            self._progress = msgspec.structs.replace(self._progress, holes=self._progress.holes + last - taken)

    def _hand_over(self, batch: SalvagedBatch) -> None:
        while not self._stopping.is_set() and not self._adopt(batch):
            self._stopping.wait(WAIT_S)


def open_damaged(path: Path) -> sqlite3.Connection | None:
    """A connection that reads the file, with its WAL where that can be used; None where nothing can be read."""
    uri = path.resolve().as_uri()
    # Without `immutable` the WAL counts, which holds what was acknowledged last; with it, a bad WAL is passed over.
    for query in ("mode=rw", "mode=ro&immutable=1"):
        connection = sqlite3.connect(f"{uri}?{query}", uri=True, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA query_only = 1")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error:
            connection.close()
        else:
            return connection
    return None


def read_beside(path: Path, known: Lane | None) -> Found:
    """Read everything but the rows. `known` is the lane that the daemon knows of by itself."""
    found = Found(lanes=[] if known is None else [known])
    connection = open_damaged(path)
    if connection is None:
        return found
    with closing(connection):
        _read_beside(connection, found)
    return found


def _read_beside(connection: sqlite3.Connection, found: Found) -> None:
    own = None
    with suppress(sqlite3.Error, TypeError):
        (own,) = connection.execute("SELECT value FROM meta WHERE name = 'buffer_id'").fetchone()
    lanes = {lane.number: lane for lane in found.lanes}
    # The tables first, then the indexes that hold the same: what is damaged in the one may be whole in the other.
    for source in ("lane", "lane INDEXED BY lane_copy WHERE name > ''"):
        for number, name, boot_id, origin in _readable(
            connection.execute, f"SELECT number, name, boot_id, coalesce(buffer_id, ?) FROM {source}", (own,)
        ):
            if all(isinstance(text, str) for text in (name, boot_id, origin)):
                lanes.setdefault(number, Lane(number, name, boot_id, origin))
    for number, floor in _readable(connection.execute, "SELECT number, event_from_us FROM lane"):
        found.floors[number] = floor
    fields = "topic, key, device, subject, type, content_type"
    for source in ("series", "series INDEXED BY sqlite_autoindex_series_1 WHERE topic > ''"):
        for number, *texts in _readable(connection.execute, f"SELECT number, {fields} FROM {source}"):
            if all(isinstance(text, str) for text in texts):
                found.series.setdefault(number, Series(*texts))
    for number in _lanes_of_rows(connection):
        # Its name is gone, and with it the identity of its rows; under a new one they are better off than lost.
        lanes.setdefault(number, Lane(number, secrets.token_hex(6), UNKNOWN_BOOT, own or secrets.token_hex(8)))
    found.lanes = [lanes[number] for number in sorted(lanes)]
    found.dense = [lane.number for lane in found.lanes if own is None or lane.buffer_id == own]
    for table in _COPIED_TABLES:
        found.tables[table] = list(_readable(connection.execute, f"SELECT * FROM {table}"))


def _lanes_of_rows(connection: sqlite3.Connection) -> Iterator[int]:
    """The lane numbers that rows stand under, as far as they can be found."""
    lane = 0
    with suppress(sqlite3.Error, OverflowError, TypeError):
        while True:
            (lane,) = connection.execute("SELECT min(lane) FROM reading WHERE lane > ?", (lane,)).fetchone()
            if not isinstance(lane, int):
                return
            yield lane


def adopt_beside(connection: sqlite3.Connection, found: Found, lanes: Mapping[int, int]) -> None:
    """Write the small tables into the file that takes its place; what that one has already stays.

    `lanes` are the lane numbers of the damaged file to those of this one.
    """
    # Where a lane's floor is lost, it may reach back to the boot's beginning.
    connection.executemany(
        "UPDATE lane SET event_from_us = ? WHERE number = ?",
        [(found.floors.get(number) or 0, adopted) for number, adopted in lanes.items()],
    )
    connection.execute("INSERT OR IGNORE INTO boot VALUES (?, 0, NULL)", (UNKNOWN_BOOT,))
    for table, columns in _COPIED_TABLES.items():
        connection.executemany(
            f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * columns)})",
            [values for values in found.tables.get(table, ()) if not str(values[0]).startswith(SALVAGE_PREFIX)],
        )


def salvaged_rows(connection: sqlite3.Connection, lane: int, after: int) -> Iterator[list[Row]]:
    """The readable rows of a lane behind a sequence, in order, in chunks; damaged stretches are jumped over."""
    start = after + 1
    last = _end_sequence(connection, lane, "max")
    while True:
        chunk, failed = _read_chunk(connection, lane, start)
        if chunk:
            yield chunk
            start = chunk[-1].sequence + 1
        elif not failed and (last is None or start > last):
            return
        if failed or not chunk:
            # A page that holds something else may also end the rows before their time.
            jumped = _behind_damage(connection, lane, start, last)
            if jumped is None:
                return
            start = jumped


def _end_sequence(connection: sqlite3.Connection, lane: int, end: Literal["min", "max"]) -> int | None:
    """The first or the last row of a lane, -1 where it has none; None where that end is damaged."""
    try:
        (found,) = connection.execute(f"SELECT {end}(sequence) FROM reading WHERE lane = ?", (lane,)).fetchone()
    except (sqlite3.Error, OverflowError):
        return None
    if found is None:
        return -1
    return found if isinstance(found, int) else None


def _read_chunk(connection: sqlite3.Connection, lane: int, start: int) -> tuple[list[Row], bool]:
    """Rows from a sequence on, and whether damage ended them."""
    rows: list[Row] = []
    try:
        for values in connection.execute(_ROWS, (lane, start, CHUNK_ROWS)):
            row = Row(*values)
            # A damaged page may also read as nonsense: what goes backwards is not what was written.
            if not is_sound(row) or row.lane != lane or row.sequence < (rows[-1].sequence + 1 if rows else start):
                return rows, True
            rows.append(row)
    except (sqlite3.Error, OverflowError):
        return rows, True
    return rows, False


def _behind_damage(connection: sqlite3.Connection, lane: int, start: int, last: int | None) -> int | None:
    """The first sequence behind `start` from which rows can be read again; None where there is none.

    Doubles its step until something is readable, then halves it back to the edge of the damage.
    """

    def is_readable(sequence: int) -> bool:
        rows, failed = _read_chunk(connection, lane, sequence)
        return bool(rows) or (not failed and (last is None or sequence > last))

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
    execute: Callable[..., sqlite3.Cursor], statement: str, parameters: Sequence[object] = ()
) -> Iterator[tuple[Any, ...]]:
    """The rows of a statement up to the first that cannot be read."""
    with suppress(sqlite3.Error, OverflowError):
        yield from execute(statement, parameters)
