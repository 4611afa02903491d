"""One open buffer file and this start's lane in it: what a transaction does, and undoes.

Nothing here knows of threads: `buffer` owns the one thread that calls it.
"""

import copy
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from gateway import buffer_schema
from gateway.buffer_rows import Entry, Lane, PendingLane, Position, Quarantined, Row, Series
from gateway.buffer_schema import BufferFileError
from gateway.clock_gateway import WallClock, boottime_us
from gateway.duplicate_window import DuplicateWindow, Verdict
from gateway.event_floor import NOTHING_US, EventFloor
from gateway.settings import BufferSettings

RUNS_PER_STREAM = 2
"""Runs of a device's stream whose duplicate window is kept: the present boot's, and the one before for stragglers."""
RUNS_MAX = 20_000
"""Duplicate windows kept, in the file and (768 bytes each) in memory; least recently used go first."""
SERIES_MAX = 10_000
"""Series that are kept although no row needs them, so that devices need not be stored anew each time."""
FLOOR_SAVE_S = 10.0
"""A risen floor of pending event times is written down no more often than this: it is a page for the card."""
READ_BYTES_MAX = 4_000_000
"""Payload bytes that one read gives at the most, whatever the number of rows."""

_INSERT = "INSERT INTO reading VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT = """
    SELECT lane, sequence, series, received_us, event_us, event_error_us, tick_ms, device_boot, device_sequence, payload
    FROM reading WHERE (lane, sequence) > (?, ?) ORDER BY lane, sequence LIMIT ?
"""
_SAVE_RUN = """
    INSERT INTO device_run VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (device, topic, boot)
    DO UPDATE SET lane = excluded.lane, seen_us = excluded.seen_us, window = excluded.window
"""

Run = tuple[str, str, str]
"""Device, Kafka topic, device boot: sequences may be counted for a device or for each of its streams."""

log = structlog.get_logger()


@dataclass(slots=True)
class _State:
    """What changes with a transaction and must be as before when it is rolled back."""

    next_sequence: int = 0
    rows: int = 0
    quarantined_rows: int = 0
    quarantined_bytes: int = 0
    floor: EventFloor = field(default_factory=EventFloor)
    floor_saved_us: int = NOTHING_US
    floor_due_s: float = 0.0
    saved_clock: WallClock | None = None


class BufferFile:
    """An open file. Methods that write belong into `with transaction()`; all raise sqlite3.Error where SQLite fails."""

    def __init__(
        self, settings: BufferSettings, boot_id: str, clock: Callable[[], WallClock], counts: Counter[str]
    ) -> None:
        """Open or make the file, and open a lane in it.

        `counts` is added to by each committed transaction: `duplicate`, `conflict`, `below-window`,
        `quarantine-overflow`. Raises sqlite3.Error, and BufferFileError where the file is of a newer version.
        """
        self._settings = settings
        self._boot_id = boot_id
        self._clock = clock
        self._counts = counts
        self._tally: Counter[str] = Counter()
        self._state = _State()
        self._series_numbers: dict[Series, int] = {}
        self._series_pruned_at = SERIES_MAX
        self._runs: dict[Run, DuplicateWindow] = {}
        self.connection = buffer_schema.connect(settings.path)
        try:
            self.id = buffer_schema.buffer_id(self.connection)
            self._state.rows = buffer_schema.count_rows(self.connection)
            self._state.quarantined_rows, self._state.quarantined_bytes = self.connection.execute(
                "SELECT count(*), coalesce(sum(length(payload)), 0) FROM quarantine"
            ).fetchone()
            with self.transaction():
                self.lane = self._open_lane()
        except BaseException:
            self.connection.close()
            raise

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return self._state.rows

    @property
    def next_sequence(self) -> int:
        """The sequence that the next row of this lane gets."""
        return self._state.next_sequence

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, on disk when it ends; memory follows the file, whichever it is."""
        before = copy.deepcopy(self._state)
        self._tally.clear()
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            self._save_clock()
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            self._state = before
            # Numbers and windows that this transaction gave are void: they are read again when needed.
            self._series_numbers.clear()
            self._runs.clear()
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        self._counts.update(self._tally)

    # -- writing --------------------------------------------------------------------------------

    def insert(self, entries: Iterable[Entry]) -> None:
        """Append entries in order, each retransmission left out."""
        rows: list[tuple[object, ...]] = []
        touched: dict[Run, DuplicateWindow] = {}
        state = self._state
        for entry in entries:
            if self._is_duplicate(entry, touched):
                continue
            if entry.quarantined is not None:
                self._keep(entry, entry.quarantined)
            rows.append(
                (
                    self.lane.number,
                    state.next_sequence,
                    self._series_number(entry.series),
                    entry.received_us,
                    entry.event_us,
                    entry.event_error_us,
                    entry.tick_ms,
                    entry.device_boot,
                    entry.device_sequence,
                    entry.payload,
                )
            )
            state.next_sequence += 1
            state.floor.add(event_us(entry))
        if not rows:
            return
        self.connection.executemany(_INSERT, rows)
        state.rows += len(rows)
        self._save_floor()
        seen_us = self._clock().at(boottime_us())
        self.connection.executemany(
            _SAVE_RUN, [(*run, self.lane.number, seen_us, window.to_bytes()) for run, window in touched.items()]
        )

    def delete(self, confirmed: Position) -> None:
        """Delete every row up to and including a position."""
        state = self._state
        state.rows -= self.connection.execute(
            "DELETE FROM reading WHERE (lane, sequence) <= (?, ?)", confirmed
        ).rowcount
        if confirmed.lane == self.lane.number:
            state.floor.settle(confirmed.sequence, state.next_sequence)
        if len(self._series_numbers) > self._series_pruned_at:
            self._prune_series()

    # -- reading --------------------------------------------------------------------------------

    def read(self, after: Position, limit: int) -> list[Row]:
        """Rows that follow a position, in order: all lanes, oldest first; `READ_BYTES_MAX` may cut the list short."""
        rows = []
        size = 0
        for values in self.connection.execute(_SELECT, (*after, limit)):
            row = Row(*values)
            rows.append(row)
            size += len(row.payload)
            if size > READ_BYTES_MAX:
                break
        return rows

    def series(self, number: int) -> Series:
        """What a row's series number stands for. Raises BufferFileError where this file does not know it."""
        return Series(
            *self._one("SELECT topic, key, device, subject, type, content_type FROM series WHERE number = ?", number)
        )

    def lane_of(self, number: int) -> Lane:
        """The lane of a row. Raises BufferFileError where this file does not know it."""
        return Lane(*self._one("SELECT number, name, boot_id FROM lane WHERE number = ?", number))

    def boot_clock(self, boot_id: str) -> WallClock:
        """What was last known of a boot's wall clock. Raises BufferFileError where this file does not know it."""
        return WallClock(*self._one("SELECT offset_us, error_us FROM boot WHERE boot_id = ?", boot_id))

    def pending(self, queued: Sequence[Entry]) -> list[PendingLane]:
        """The lanes that hold rows, `queued` (what waits for its commit) counted with this one's."""
        lanes = {
            name: PendingLane(
                name, self._state.floor.value_us if name == self.lane.name else event_from_us, received_us, boot_id
            )
            for name, boot_id, event_from_us, received_us in self.connection.execute(
                """SELECT lane.name, lane.boot_id, lane.event_from_us,
                    (SELECT received_us FROM reading WHERE lane = lane.number ORDER BY sequence DESC LIMIT 1) AS last
                FROM lane WHERE last IS NOT NULL ORDER BY lane.number"""
            )
        }
        if queued:
            event_from_us = min(self._state.floor.value_us, *(event_us(entry) for entry in queued))
            lanes[self.lane.name] = PendingLane(self.lane.name, event_from_us, queued[-1].received_us, self._boot_id)
        return list(lanes.values())

    def used_bytes(self) -> int:
        """Pages in use: deleted rows leave free pages, not a smaller file."""
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        (free,) = self.connection.execute("PRAGMA freelist_count").fetchone()
        (page_bytes,) = self.connection.execute("PRAGMA page_size").fetchone()
        return int((pages - free) * page_bytes)

    # -- the parts ------------------------------------------------------------------------------

    def _open_lane(self) -> Lane:
        # Lanes and boots of which no row is left are history; this one's begin here.
        self.connection.execute("DELETE FROM lane WHERE NOT EXISTS (SELECT 1 FROM reading WHERE lane = number)")
        name = secrets.token_hex(6)
        (number,) = self.connection.execute(
            "INSERT INTO lane (name, boot_id) VALUES (?, ?) RETURNING number", (name, self._boot_id)
        ).fetchone()
        self.connection.execute("DELETE FROM boot WHERE boot_id NOT IN (SELECT boot_id FROM lane)")
        return Lane(number, name, self._boot_id)

    def _keep(self, report: Entry, input_: Quarantined) -> None:
        """Put input into the local quarantine, whole; the oldest makes room where it is over its bounds."""
        self.connection.execute(
            "INSERT INTO quarantine (boot_id, received_us, device, subject, reason, payload) VALUES (?, ?, ?, ?, ?, ?)",
            (
                self._boot_id,
                report.received_us,
                report.series.device,
                report.series.subject,
                input_.reason,
                input_.payload,
            ),
        )
        state = self._state
        state.quarantined_rows += 1
        state.quarantined_bytes += len(input_.payload)
        # At most a tenth of the buffer: what is set aside must not keep readings out.
        bytes_max = min(self._settings.quarantine_bytes_max, self._settings.bytes_max // 10)
        while state.quarantined_rows > self._settings.quarantine_rows_max or (
            state.quarantined_bytes > bytes_max and state.quarantined_rows > 1
        ):
            number, size = self.connection.execute(
                "SELECT number, length(payload) FROM quarantine ORDER BY number LIMIT 1"
            ).fetchone()
            self.connection.execute("DELETE FROM quarantine WHERE number = ?", (number,))
            state.quarantined_rows -= 1
            state.quarantined_bytes -= size
            self._tally["quarantine-overflow"] += 1

    def _is_duplicate(self, entry: Entry, touched: dict[Run, DuplicateWindow]) -> bool:
        if entry.device_sequence is None or entry.device_boot is None:
            return False
        run = (entry.series.device, entry.series.topic, entry.device_boot)
        window = self._window(run)
        verdict = window.admit(entry.device_sequence, entry.payload)
        if verdict is not Verdict.NEW:
            self._tally[verdict.value] += 1
        if verdict is Verdict.DUPLICATE:
            return True
        touched[run] = window
        return False

    def _window(self, run: Run) -> DuplicateWindow:
        window = self._runs.pop(run, None)
        if window is None:
            window = self._stored_window(run)
        # A dict keeps insertion order: what was just used moves to its end, what is at its front is oldest.
        self._runs[run] = window
        if len(self._runs) > RUNS_MAX:
            del self._runs[next(iter(self._runs))]
        return window

    def _stored_window(self, run: Run) -> DuplicateWindow:
        stored = self.connection.execute(
            "SELECT window FROM device_run WHERE device = ? AND topic = ? AND boot = ?", run
        ).fetchone()
        if stored is None:
            self._forget_older_runs(run)
            return DuplicateWindow()
        try:
            return DuplicateWindow.from_bytes(stored[0])
        except ValueError as error:
            # Without it resends may be stored again: the cloud tells them, nothing is lost.
            log.warning("a duplicate window is begun anew", device=run[0], error=str(error))
            return DuplicateWindow()

    def _forget_older_runs(self, run: Run) -> None:
        """Make room for a new run: of the same stream's older ones, then of the least recently used of all.

        The order is by lane, then by time: the wall clock may stand in another year after each start.
        """
        device, topic, _ = run
        self.connection.execute(
            """DELETE FROM device_run WHERE device = ?1 AND topic = ?2 AND boot NOT IN (
                SELECT boot FROM device_run WHERE device = ?1 AND topic = ?2
                ORDER BY lane DESC, seen_us DESC LIMIT ?3)""",
            (device, topic, RUNS_PER_STREAM - 1),
        )
        (runs,) = self.connection.execute("SELECT count(*) FROM device_run").fetchone()
        if runs >= RUNS_MAX:
            self.connection.execute(
                """DELETE FROM device_run WHERE (device, topic, boot) IN (
                    SELECT device, topic, boot FROM device_run ORDER BY lane, seen_us LIMIT ?)""",
                (RUNS_MAX // 10,),
            )

    def _series_number(self, series: Series) -> int:
        number = self._series_numbers.get(series)
        if number is None:
            fields = (series.topic, series.key, series.device, series.subject, series.type, series.content_type)
            self.connection.execute(
                "INSERT OR IGNORE INTO series (topic, key, device, subject, type, content_type)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                fields,
            )
            (number,) = self.connection.execute(
                "SELECT number FROM series WHERE topic = ? AND key = ? AND device = ? AND subject = ?"
                " AND type = ? AND content_type = ?",
                fields,
            ).fetchone()
            self._series_numbers[series] = number
        return number

    def _prune_series(self) -> None:
        """Forget series that no row refers to. What is left sets when to look again: never at every commit."""
        self.connection.execute("DELETE FROM series WHERE number NOT IN (SELECT series FROM reading)")
        self._series_numbers.clear()
        (left,) = self.connection.execute("SELECT count(*) FROM series").fetchone()
        self._series_pruned_at = max(SERIES_MAX, 2 * left)

    def _save_floor(self) -> None:
        """Keep the lane's floor for the next start: at once where it fell, now and then where it rose."""
        state = self._state
        floor_us = state.floor.value_us
        now_s = time.monotonic()
        risen = floor_us > state.floor_saved_us and now_s >= state.floor_due_s
        if floor_us < state.floor_saved_us or risen:
            self.connection.execute("UPDATE lane SET event_from_us = ? WHERE number = ?", (floor_us, self.lane.number))
            state.floor_saved_us = floor_us
            state.floor_due_s = now_s + FLOOR_SAVE_S

    def _save_clock(self) -> None:
        """Keep what is known of this boot's wall clock for rows that a later boot sends.

        The bound is kept with room to grow, so that it holds for rows that came in after it was written, and need
        not be written each second.
        """
        clock = self._clock()
        saved = self._state.saved_clock
        if saved is not None and saved.covers(clock):
            return
        kept = clock.with_room()
        self.connection.execute(
            """INSERT INTO boot VALUES (?, ?, ?) ON CONFLICT (boot_id)
            DO UPDATE SET offset_us = excluded.offset_us, error_us = excluded.error_us""",
            (self._boot_id, kept.offset_us, kept.error_us),
        )
        self._state.saved_clock = kept

    def _one(self, statement: str, parameter: object) -> tuple[Any, ...]:
        found: tuple[Any, ...] | None = self.connection.execute(statement, (parameter,)).fetchone()
        if found is None:
            raise BufferFileError(f"the buffer {self.id} does not hold this: it was begun anew in between")
        return found


def event_us(entry: Entry) -> int:
    """When an entry was measured, as far as it is known: CLOCK_BOOTTIME in microseconds."""
    return entry.received_us if entry.event_us is None else entry.event_us
