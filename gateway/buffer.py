"""The buffer: readings wait here, in one SQLite file, until Kafka's replicas have them.

One thread owns the one connection. What arrives while a commit is being synced goes into the next (group commit);
acknowledgements are released only after COMMIT has returned, which with `synchronous=FULL` means "on disk".
"""

import asyncio
import fcntl
import secrets
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from typing import IO, TypeVar

import structlog
from msgspec.structs import replace

from gateway import buffer_schema
from gateway.buffer_rows import Entry, Lane, PendingLane, Position, Row, Series
from gateway.buffer_schema import BufferFileError
from gateway.clock_gateway import WallClock, boottime_us
from gateway.duplicate_window import DuplicateWindow, Verdict
from gateway.event_floor import NOTHING_US, EventFloor
from gateway.settings import BufferSettings

DELETE_DELAY_S = 1.0
"""Rows that Kafka has are deleted inside a later insert's transaction, or in one of their own after this."""
ENTRY_BYTES = 300
"""What an entry takes in memory beside its payload, for `buffer.queue_bytes_max`."""
RUNS_PER_DEVICE = 2
"""Runs whose duplicate window is kept: the present boot's, and the one before for stragglers."""
FLOOR_SAVE_S = 10.0
"""A risen floor of pending event times is written down no more often than this: it is a page for the card."""
SERIES_MAX = 10_000
"""Series that are kept although no row needs them, so that devices need not be stored anew each time."""
RUNS_MAX = 20_000
"""Duplicate windows kept, in the file and (768 bytes each) in memory; least recently used go first."""
EVENT_RESERVE_BYTES = 1_000_000
"""Room beyond `buffer.bytes_max` for the gateway's own events, so that a full buffer can say that it is full."""

_INSERT = "INSERT INTO reading VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT = """
    SELECT lane, sequence, series, received_us, event_us, event_error_us, tick_ms, device_boot, device_sequence,
           payload
    FROM reading WHERE (lane, sequence) > (?, ?) ORDER BY lane, sequence LIMIT ?
"""
_SAVE_RUN = """
    INSERT INTO device_run VALUES (?, ?, ?, ?)
    ON CONFLICT (device, boot) DO UPDATE SET seen_us = excluded.seen_us, window = excluded.window
"""

Done = Callable[[bool], None]
T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Append:
    entries: Sequence[Entry]
    done: Done | None
    bytes: int
    accepted: bool = True


@dataclass(slots=True)
class BufferState:
    """What the buffer says of itself; written by its thread, read by anybody."""

    bytes_used: int = 0
    rows: int = 0
    full: bool = False
    failing: str | None = None
    """SQLite's words while commits fail; readings are refused meanwhile, not lost."""


class Buffer:
    """Readings on disk, in order, until they are confirmed.

    `append`, `read`, `confirm` and the rest may be called from the event loop; none of them blocks it.
    """

    def __init__(self, settings: BufferSettings, boot_id: str, clock: Callable[[], WallClock]) -> None:
        """`clock` gives the gateway's wall clock as it is known now; called on the buffer's thread."""
        self._settings = settings
        self.boot_id = boot_id
        self._clock = clock
        self._saved_clock: WallClock | None = None
        self.state = BufferState()
        self.counts: Counter[str] = Counter()
        """`duplicate`, `conflict`, `below-window`, `quarantine-overflow`: what was recognised, since the start."""
        self.committed = asyncio.Event()
        """Set after each commit that added rows; the forwarder clears it."""
        self.id = ""
        self._lock_file: IO[bytes] | None = None
        self._connection: sqlite3.Connection
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._appends: deque[_Append] = deque()
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._confirmed: tuple[str, Position] | None = None
        self._append_due_s = 0.0
        self._delete_due_s = 0.0
        self._attached = False
        self._series_numbers: dict[Series, int] = {}
        self._runs: dict[tuple[str, str], DuplicateWindow] = {}
        self._lane = Lane(0, "", boot_id)
        self._next_sequence = 0
        self._floor = EventFloor()
        self._floor_saved_us = NOTHING_US
        self._floor_due_s = 0.0

    # -- the event loop's side ------------------------------------------------------------------

    def open(self) -> Lane:
        """Open the file, begin this start's lane, and start the thread. Raises BufferFileError."""
        self._loop = asyncio.get_running_loop()
        self._lock()
        try:
            self._attach()
        except BaseException:
            self._unlock()
            raise
        self._thread = threading.Thread(target=self._work, name="buffer", daemon=True)
        self._thread.start()
        return self._lane

    async def close(self) -> None:
        """Commit what has been appended, and close the file."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._unlock()

    @property
    def accepting(self) -> bool:
        """Whether an append would be tried now, rather than refused at once."""
        return not (self._closing or self.state.full or self._queued_bytes > self._settings.queue_bytes_max)

    def append(self, entries: Sequence[Entry], done: Done | None = None, *, reserve: bool = False) -> None:
        """Store entries in one commit; `done` as `Intake.take` has it.

        `reserve` lets the gateway's own events into the room beyond `bytes_max`.
        """
        bytes_max = self._settings.bytes_max + (EVENT_RESERVE_BYTES if reserve else 0)
        full = self.state.bytes_used >= bytes_max
        if self._closing or full or self._queued_bytes > self._settings.queue_bytes_max:
            # Queued all the same: `done` is called in the order of the appends.
            append = _Append((), done, 0, accepted=False)
        else:
            append = _Append(entries, done, sum(len(entry.payload) + ENTRY_BYTES for entry in entries))
        with self._wake:
            self._appends.append(append)
            self._queued_bytes += append.bytes
            if len(self._appends) == 1:
                self._append_due_s = time.monotonic() + self._settings.commit_delay_ms / 1000
            self._wake.notify()

    async def read(self, after: Position, limit: int) -> list[Row]:
        """Rows that follow a position, in order: all lanes, oldest first."""
        return await self._call(lambda: [Row(*row) for row in self._connection.execute(_SELECT, (*after, limit))])

    async def series(self, number: int) -> Series:
        """What a row's series number stands for."""
        return await self._call(
            lambda: Series(
                *self._connection.execute(
                    "SELECT topic, key, device, subject, type, content_type FROM series WHERE number = ?",
                    (number,),
                ).fetchone()
            )
        )

    async def lane(self, number: int) -> Lane:
        """The lane of a row."""
        return await self._call(
            lambda: Lane(
                *self._connection.execute(
                    "SELECT number, name, boot_id FROM lane WHERE number = ?", (number,)
                ).fetchone()
            )
        )

    async def boot_clock(self, boot_id: str) -> WallClock:
        """What was last known of the wall clock in a boot of this gateway."""
        if boot_id == self.boot_id:
            return self._clock()
        return await self._call(
            lambda: WallClock(
                *self._connection.execute(
                    "SELECT offset_us, error_us FROM boot WHERE boot_id = ?", (boot_id,)
                ).fetchone()
            )
        )

    async def pending(self) -> list[PendingLane]:
        """The lanes that still hold rows, with the event times these may have."""
        return await self._call(self._pending)

    def confirm(self, buffer_id: str, position: Position) -> None:
        """Every row up to and including `position` is in Kafka (or set aside) and may be deleted.

        `buffer_id` is the file that the rows were read from: another one may have taken its place since.
        """
        with self._wake:
            if self._confirmed is None:
                self._delete_due_s = time.monotonic() + DELETE_DELAY_S
            self._confirmed = (buffer_id, position)

    async def quarantine(self, row: Row, reason: str, report: Entry, *, announce: bool) -> None:
        """Keep a row that Kafka refused and, to announce it, append the report on it, in one commit.

        The caller confirms the row's position afterwards, as if it had been sent. Raises BufferFileError where
        the disk refuses: the row then stays where it is.
        """
        await self._call(lambda: self._quarantine_row(row, reason, report, announce=announce))

    # -- the buffer's thread --------------------------------------------------------------------

    def _attach(self) -> None:
        """Open or begin the file and open a new lane in it."""
        path = self._settings.path
        self._connection = buffer_schema.connect(path)
        self.id = buffer_schema.buffer_id(self._connection)
        self._series_numbers.clear()
        self._runs.clear()
        self._saved_clock = None
        self._confirmed = None
        name = secrets.token_hex(6)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._save_clock()
            # Lanes and boots of which no row is left are history; the present ones begin here.
            self._connection.execute("DELETE FROM lane WHERE NOT EXISTS (SELECT 1 FROM reading WHERE lane = number)")
            number = self._connection.execute(
                "INSERT INTO lane (name, boot_id) VALUES (?, ?)", (name, self.boot_id)
            ).lastrowid
            self._connection.execute(
                "DELETE FROM boot WHERE boot_id != ? AND boot_id NOT IN (SELECT boot_id FROM lane)",
                (self.boot_id,),
            )
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._connection.close()
            raise BufferFileError(
                f"buffer.path: {path} cannot be written ({error}): free space on that disk, or check its health"
            ) from error
        assert number is not None  # noqa: S101 - an INSERT always has one
        self._lane = Lane(number, name, self.boot_id)
        self._next_sequence = 0
        self._floor = EventFloor()
        self._floor_saved_us = NOTHING_US
        self._attached = True
        self.state.rows = buffer_schema.count_rows(self._connection)
        self._measure()

    def _work(self) -> None:
        closing = False
        while not closing:
            appends, calls, closing = self._wait()
            for function, future in calls:
                _settle(future, function)
            delete_due = self._confirmed is not None and (closing or time.monotonic() >= self._delete_due_s)
            if appends or delete_due:
                self._commit(appends)
        self._connection.close()

    def _wait(
        self,
    ) -> tuple[Sequence[_Append], Sequence[tuple[Callable[[], object], Future[object]]], bool]:
        """Sleep until there is something to do; take what is due. Reads do not wait for a delayed commit."""
        with self._wake:
            while True:
                now_s = time.monotonic()
                append_due = bool(self._appends) and (self._closing or now_s >= self._append_due_s)
                delete_due = self._confirmed is not None and now_s >= self._delete_due_s
                if append_due or delete_due or self._calls or self._closing:
                    break
                self._wake.wait(self._append_due_s - now_s if self._appends else DELETE_DELAY_S)
            appends: deque[_Append] = deque()
            if append_due:
                appends, self._appends = self._appends, appends
            calls, self._calls = self._calls, deque()
            return appends, calls, self._closing

    def _commit(self, appends: Sequence[_Append]) -> None:
        """One transaction: all that waits, and the deletion of what Kafka has."""
        if not self._attached:
            self._begin_anew()
        first_sequence = self._next_sequence
        floor = dataclass_replace(self._floor)
        known_series = len(self._series_numbers)
        confirmed = self._confirmed
        counts = self.counts.copy()
        deleted = 0
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            if confirmed is not None and confirmed[0] == self.id:
                deleted = self._delete(confirmed[1])
            self._insert(appends)
            self._save_clock()
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            self._next_sequence = first_sequence
            self._floor = floor
            self.counts.clear()
            self.counts.update(counts)
            while len(self._series_numbers) > known_series:
                self._series_numbers.popitem()
            # What the windows learnt from this transaction did not happen: they are loaded again when needed.
            self._runs.clear()
            self._saved_clock = None
            self._fail(error)
            committed = False
        else:
            self._recover()
            committed = True
            self.state.rows += self._next_sequence - first_sequence - deleted
            with self._wake:
                if self._confirmed == confirmed:
                    self._confirmed = None
        self._measure()
        with self._wake:
            self._queued_bytes -= sum(append.bytes for append in appends)
        outcomes = [(append.done, committed and append.accepted) for append in appends if append.done is not None]
        if outcomes:
            self._loop.call_soon_threadsafe(_announce, outcomes)
        if committed and self._next_sequence > first_sequence:
            self._loop.call_soon_threadsafe(self.committed.set)

    def _insert(self, appends: Sequence[_Append]) -> None:
        rows: list[tuple[object, ...]] = []
        touched: dict[tuple[str, str], DuplicateWindow] = {}
        for append in appends:
            for entry in append.entries:
                if self._is_duplicate(entry, touched):
                    continue
                if entry.quarantined is not None:
                    self._keep_quarantined(entry, self.boot_id, entry.quarantined.reason, entry.quarantined.payload)
                rows.append(
                    (
                        self._lane.number,
                        self._next_sequence,
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
                self._next_sequence += 1
                self._floor.add(_event_us(entry))
        if not rows:
            return
        self._connection.executemany(_INSERT, rows)
        self._save_floor()
        seen_us = self._clock().at(boottime_us())
        self._connection.executemany(_SAVE_RUN, [(*run, seen_us, window.to_bytes()) for run, window in touched.items()])

    def _is_duplicate(self, entry: Entry, touched: dict[tuple[str, str], DuplicateWindow]) -> bool:
        if entry.device_sequence is None or entry.device_boot is None:
            return False
        run = (entry.series.device, entry.device_boot)
        window = self._window(run)
        verdict = window.admit(entry.device_sequence, entry.payload)
        if verdict is Verdict.DUPLICATE:
            self.counts["duplicate"] += 1
            return True
        if verdict is Verdict.CONFLICT:
            self.counts["conflict"] += 1
        elif verdict is Verdict.BELOW:
            self.counts["below-window"] += 1
        touched[run] = window
        return False

    def _window(self, run: tuple[str, str]) -> DuplicateWindow:
        window = self._runs.pop(run, None)
        if window is None:
            stored = self._connection.execute(
                "SELECT window FROM device_run WHERE device = ? AND boot = ?", run
            ).fetchone()
            if stored is not None:
                window = DuplicateWindow.from_bytes(stored[0])
            else:
                window = DuplicateWindow()
                self._forget_older_runs(run[0])
        # A dict keeps insertion order: what was just used moves to its end, what is at its front is oldest.
        self._runs[run] = window
        if len(self._runs) > RUNS_MAX:
            del self._runs[next(iter(self._runs))]
        return window

    def _forget_older_runs(self, device: str) -> None:
        """Make room for a device's new run: of its own older ones, then of the least recently seen of all."""
        self._connection.execute(
            """DELETE FROM device_run WHERE device = ?1 AND boot NOT IN (
                SELECT boot FROM device_run WHERE device = ?1 ORDER BY seen_us DESC LIMIT ?2)""",
            (device, RUNS_PER_DEVICE - 1),
        )
        (runs,) = self._connection.execute("SELECT count(*) FROM device_run").fetchone()
        if runs >= RUNS_MAX:
            self._connection.execute(
                """DELETE FROM device_run WHERE (device, boot) IN (
                    SELECT device, boot FROM device_run ORDER BY seen_us LIMIT ?)""",
                (RUNS_MAX // 10,),
            )

    def _series_number(self, series: Series) -> int:
        number = self._series_numbers.get(series)
        if number is None:
            fields = (
                series.topic,
                series.key,
                series.device,
                series.subject,
                series.type,
                series.content_type,
            )
            self._connection.execute(
                "INSERT OR IGNORE INTO series (topic, key, device, subject, type, content_type)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                fields,
            )
            (number,) = self._connection.execute(
                "SELECT number FROM series WHERE topic = ? AND key = ? AND device = ? AND subject = ?"
                " AND type = ? AND content_type = ?",
                fields,
            ).fetchone()
            self._series_numbers[series] = number
        return number

    def _save_floor(self) -> None:
        """Keep the lane's floor for the next start: at once where it fell, now and then where it rose."""
        floor_us = self._floor.value_us
        now_s = time.monotonic()
        risen = floor_us > self._floor_saved_us and now_s >= self._floor_due_s
        if floor_us < self._floor_saved_us or risen:
            self._connection.execute(
                "UPDATE lane SET event_from_us = ? WHERE number = ?", (floor_us, self._lane.number)
            )
            self._floor_saved_us = floor_us
            self._floor_due_s = now_s + FLOOR_SAVE_S

    def _delete(self, confirmed: Position) -> int:
        deleted = self._connection.execute("DELETE FROM reading WHERE (lane, sequence) <= (?, ?)", confirmed).rowcount
        if confirmed.lane == self._lane.number:
            self._floor.settle(confirmed.sequence, self._next_sequence)
        if len(self._series_numbers) > SERIES_MAX and deleted == self.state.rows:
            self._connection.execute("DELETE FROM series")
            self._series_numbers.clear()
        return deleted

    def _keep_quarantined(self, entry: Entry, boot_id: str, reason: str, payload: bytes) -> None:
        self._connection.execute(
            "INSERT INTO quarantine (boot_id, received_us, device, subject, reason, payload) VALUES (?, ?, ?, ?, ?, ?)",
            (boot_id, entry.received_us, entry.series.device, entry.series.subject, reason, payload),
        )
        overflow = self._connection.execute(
            "DELETE FROM quarantine WHERE number <= (SELECT max(number) FROM quarantine) - ?",
            (self._settings.quarantine_rows_max,),
        ).rowcount
        self.counts["quarantine-overflow"] += overflow

    def _quarantine_row(self, row: Row, reason: str, report: Entry, *, announce: bool) -> None:
        first_sequence = self._next_sequence
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            (boot_id,) = self._connection.execute("SELECT boot_id FROM lane WHERE number = ?", (row.lane,)).fetchone()
            self._keep_quarantined(report, boot_id, reason, row.payload)
            if announce:
                self._insert([_Append([replace(report, quarantined=None)], None, 0)])
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            self._next_sequence = first_sequence
            raise BufferFileError(f"the quarantine cannot be written: {error}") from error
        if announce:
            self.state.rows += 1
            self._loop.call_soon_threadsafe(self.committed.set)

    def _pending(self) -> list[PendingLane]:
        lanes = {
            name: PendingLane(
                name, self._floor.value_us if name == self._lane.name else event_from_us, received_us, boot_id
            )
            for name, boot_id, event_from_us, received_us in self._connection.execute(
                """SELECT lane.name, lane.boot_id, lane.event_from_us,
                    (SELECT received_us FROM reading WHERE lane = lane.number ORDER BY sequence DESC LIMIT 1) AS last
                FROM lane WHERE last IS NOT NULL ORDER BY lane.number"""
            )
        }
        # What waits for its commit is pending too: no watermark may pass it.
        with self._wake:
            queued = [entry for append in self._appends for entry in append.entries]
        if queued:
            event_from_us = min(self._floor.value_us, *(_event_us(entry) for entry in queued))
            lanes[self._lane.name] = PendingLane(self._lane.name, event_from_us, queued[-1].received_us, self.boot_id)
        return list(lanes.values())

    def _save_clock(self) -> None:
        """Keep what is known of this boot's wall clock, where it changed by more than it is worth writing."""
        clock = self._clock()
        saved = self._saved_clock
        if saved is not None and not clock.differs(saved):
            return
        self._connection.execute(
            """INSERT INTO boot VALUES (?, ?, ?) ON CONFLICT (boot_id)
            DO UPDATE SET offset_us = excluded.offset_us, error_us = excluded.error_us""",
            (self.boot_id, clock.offset_us, clock.error_us),
        )
        self._saved_clock = clock

    def _measure(self) -> None:
        """Pages in use decide whether the buffer is full: deleted rows leave free pages, not a smaller file."""
        try:
            (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
            (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
            (page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        except sqlite3.Error as error:
            self._fail(error)
            return
        self.state.bytes_used = (pages - free) * page_bytes
        full = self.state.bytes_used >= self._settings.bytes_max
        if full != self.state.full:
            self.state.full = full
            if full:
                log.warning(
                    "buffer full: readings are refused until Kafka has taken some",
                    bytes_used=self.state.bytes_used,
                    setting="buffer.bytes_max",
                )
            else:
                log.info("buffer has room again", bytes_used=self.state.bytes_used)

    def _fail(self, error: sqlite3.Error) -> None:
        if self.state.failing is None:
            log.error(
                "buffer cannot be written: acknowledgements are withheld, sensors will send again",
                error=str(error),
                path=str(self._settings.path),
            )
        self.state.failing = str(error)
        if buffer_schema.is_corruption(error):
            self._begin_anew()

    def _recover(self) -> None:
        if self.state.failing is not None:
            log.info("buffer can be written again", path=str(self._settings.path))
            self.state.failing = None

    def _begin_anew(self) -> None:
        """Set a file that turned out corrupt aside and go on with a new one; retried at the next commit."""
        self._connection.close()
        try:
            if self._attached:
                self._attached = False
                aside = buffer_schema.set_aside(self._settings.path)
                log.error("buffer is corrupt: set aside", aside=str(aside))
            self._attach()
        except (OSError, sqlite3.Error, BufferFileError) as error:
            log.error("no new buffer could be begun", error=str(error))  # noqa: TRY400 - the text says it all
            return
        log.warning("a new buffer is begun", path=str(self._settings.path))

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            log.warning("rollback failed", error=str(error))

    # -- plumbing -------------------------------------------------------------------------------

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function on the buffer's thread."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                raise BufferFileError("the buffer is closed")
            self._calls.append((function, future))  # type: ignore[arg-type]
            self._wake.notify()
        return await asyncio.wrap_future(future)

    def _lock(self) -> None:
        """Keep a second daemon off the same file. Raises BufferFileError."""
        path = self._settings.path.with_name(self._settings.path.name + ".lock")
        try:
            self._lock_file = path.open("ab")
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise BufferFileError(
                f"buffer.path: {self._settings.path} is in use by another sluice: stop that one, "
                "or give this one a buffer of its own"
            ) from error
        except OSError as error:
            raise BufferFileError(
                f"buffer.path: {path} cannot be written ({error.strerror}): make the directory, "
                "and let the user that sluice runs as write to it"
            ) from error

    def _unlock(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None


def _event_us(entry: Entry) -> int:
    return entry.received_us if entry.event_us is None else entry.event_us


def _settle(future: Future[object], function: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
        future.set_exception(error)
    else:
        future.set_result(result)


def _announce(outcomes: Sequence[tuple[Done, bool]]) -> None:
    for done, committed in outcomes:
        try:
            done(committed)
        except Exception:
            # One sensor's connection must not cost the others their acknowledgements.
            log.exception("an acknowledgement failed")
