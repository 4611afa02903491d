"""The buffer: readings wait here, in one SQLite file, until Kafka's replicas have them.

One thread owns the one connection. What arrives while a commit is being synced goes into the next (group
commit); acknowledgements are released only after COMMIT has returned, which with `synchronous=FULL` means "on disk".
"""

import asyncio
import fcntl
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, TypeVar

import structlog

from gateway import buffer_schema
from gateway.buffer_file import BufferFile
from gateway.buffer_rows import Entry, Lane, PendingLane, Position, Row, Series
from gateway.buffer_schema import BufferFileError
from gateway.clock_gateway import WallClock
from gateway.settings import BufferSettings

DELETE_DELAY_S = 1.0
"""Rows that Kafka has are deleted inside a later insert's transaction, or in one of their own after this."""
ENTRY_BYTES = 300
"""What an entry takes in memory beside its payload, for `buffer.queue_bytes_max`."""
EVENT_RESERVE_BYTES = 1_000_000
"""Room beyond `buffer.bytes_max` for the gateway's own events: a full buffer can say that it is full."""
LOCK_TRIES = 5
LOCK_RETRY_S = 0.1
"""`sluice status` holds the lock for an instant; another daemon holds it for good."""

Done = Callable[[bool], None]
T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Append:
    entries: Sequence[Entry]
    done: Done | None
    bytes: int
    accepted: bool = True


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file that SQLite found corrupt: renamed, kept, and no longer forwarded."""

    name: str
    buffer_id: str
    rows: int


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
        self._clock = clock
        self.boot_id = boot_id
        self.state = BufferState()
        self.counts: Counter[str] = Counter()
        """What was recognised since the start; see `BufferFile`."""
        self.committed = asyncio.Event()
        """Set after each commit that added rows; the forwarder clears it."""
        self.set_aside: deque[SetAside] = deque(maxlen=100)
        """Files that were replaced since the start; whoever reports them takes them out."""
        self._lock_file: IO[bytes] | None = None
        self._file: BufferFile
        self._attached = False
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

    # -- the event loop's side ------------------------------------------------------------------

    def open(self) -> None:
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

    async def close(self) -> None:
        """Commit what has been appended, and close the file."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._unlock()

    @property
    def id(self) -> str:
        """The file's random name: another one after it had to be begun anew."""
        return self._file.id

    @property
    def lane(self) -> Lane:
        """The lane that readings go into now."""
        return self._file.lane

    def append(self, entries: Sequence[Entry], done: Done | None = None, *, reserve: bool = False) -> None:
        """Store entries in one commit; `done` as `Intake.take` has it.

        `reserve` lets the gateway's own events into the room beyond `bytes_max`.
        """
        full = self.state.full
        if reserve:
            full = self.state.bytes_used >= self._settings.bytes_max + EVENT_RESERVE_BYTES
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

    async def read(self, after: Position, limit: int) -> tuple[str, list[Row]]:
        """Rows that follow a position, oldest first, and the id of the file that they stand in."""
        return await self._call(lambda: (self._file.id, self._file.read(after, limit)))

    async def series(self, number: int) -> Series:
        """What a row's series number stands for."""
        return await self._call(lambda: self._file.series(number))

    async def lane_of(self, number: int) -> Lane:
        """The lane of a row."""
        return await self._call(lambda: self._file.lane_of(number))

    async def boot_clock(self, boot_id: str) -> WallClock:
        """What was last known of the wall clock in a boot of this gateway."""
        if boot_id == self.boot_id:
            return self._clock()
        return await self._call(lambda: self._file.boot_clock(boot_id))

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

    async def quarantine(self, reports: Sequence[Entry]) -> None:
        """Keep what Kafka refused, and append the reports that carry it, in one commit.

        The caller confirms the rows' positions afterwards, as if they had been sent. Raises BufferFileError where
        the disk refuses: the rows then stay where they are.
        """
        await self._call(lambda: self._quarantine(reports))

    # -- the buffer's thread --------------------------------------------------------------------

    def _attach(self) -> None:
        """Open or begin the file. One that SQLite finds corrupt is set aside. Raises BufferFileError."""
        path = self._settings.path
        try:
            try:
                self._file = self._open_file()
            except sqlite3.Error as error:
                if not buffer_schema.is_corruption(error):
                    raise
                self._set_aside(error, "unknown", 0)
                self._file = self._open_file()
        except (sqlite3.Error, OSError) as error:
            raise BufferFileError(
                f"buffer.path: {path} cannot be opened for writing ({error}): the directory must exist and be writable "
                "by the user that sluice runs as, with space left"
            ) from error
        self._attached = True
        self._confirmed = None
        self._measure()

    def _open_file(self) -> BufferFile:
        return BufferFile(self._settings, self.boot_id, self._clock, self.counts)

    def _work(self) -> None:
        closing = False
        while not closing:
            appends, calls, closing = self._wait()
            for function, future in calls:
                self._settle(future, function)
            delete_due = self._confirmed is not None and (closing or time.monotonic() >= self._delete_due_s)
            if appends or delete_due:
                self._commit(appends)
        self._file.connection.close()

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
        added = False
        try:
            if not self._attached:
                self._attach()
            confirmed = self._confirmed
            first = self._file.next_sequence
            with self._file.transaction():
                # Deletion first: the rows that go make room for those that come.
                if confirmed is not None and confirmed[0] == self._file.id:
                    self._file.delete(confirmed[1])
                self._file.insert(entry for append in appends for entry in append.entries)
            added = self._file.next_sequence > first
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing of it is acknowledged, and the thread goes on
            committed = False
            self._fail(error)
            self._delete_due_s = time.monotonic() + DELETE_DELAY_S
        else:
            committed = True
            self._recover()
            with self._wake:
                if self._confirmed == confirmed:
                    self._confirmed = None
        self._measure()
        with self._wake:
            self._queued_bytes -= sum(append.bytes for append in appends)
        outcomes = [(append.done, committed and append.accepted) for append in appends if append.done is not None]
        if outcomes:
            self._loop.call_soon_threadsafe(_announce, outcomes)
        if added:
            self._loop.call_soon_threadsafe(self.committed.set)

    def _quarantine(self, reports: Sequence[Entry]) -> None:
        with self._file.transaction():
            self._file.insert(reports)
        self.state.rows = self._file.rows
        self._loop.call_soon_threadsafe(self.committed.set)

    def _pending(self) -> list[PendingLane]:
        # What waits for its commit is pending too: no watermark may pass it.
        with self._wake:
            queued = [entry for append in self._appends for entry in append.entries]
        return self._file.pending(queued)

    def _settle(self, future: Future[object], function: Callable[[], object]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except sqlite3.Error as error:
            self._fail(error)
            future.set_exception(BufferFileError(f"the buffer cannot be read or written: {error}"))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
            future.set_exception(error)
        else:
            future.set_result(result)

    def _measure(self) -> None:
        """See how much room is left; say so when that changes."""
        if not self._attached:
            return
        try:
            self.state.bytes_used = self._file.used_bytes()
        except sqlite3.Error as error:
            self._fail(error)
            return
        self.state.rows = self._file.rows
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

    def _fail(self, error: Exception) -> None:
        """Say once that the buffer fails; a corrupt file is set aside, and a new one begun at the next commit."""
        if self.state.failing is None:
            log.error(
                "buffer cannot be read or written: acknowledgements are withheld, sensors will send again",
                error=str(error) or type(error).__name__,
                path=str(self._settings.path),
            )
        self.state.failing = str(error) or type(error).__name__
        if self._attached and isinstance(error, sqlite3.Error) and buffer_schema.is_corruption(error):
            self._file.connection.close()
            self._attached = False
            try:
                self._set_aside(error, self._file.id, self._file.rows)
                self._attach()
            except (OSError, BufferFileError) as problem:
                log.error("no new buffer could be begun", error=str(problem))  # noqa: TRY400 - it says it all
            else:
                self._recover()

    def _set_aside(self, error: Exception, buffer_id: str, rows: int) -> None:
        aside = buffer_schema.set_aside(self._settings.path)
        self.set_aside.append(SetAside(aside.name, buffer_id, rows))
        log.error("buffer is corrupt: set aside, a new one is begun", error=str(error), aside=str(aside), rows=rows)

    def _recover(self) -> None:
        if self.state.failing is not None:
            log.info("buffer can be written again", path=str(self._settings.path))
            self.state.failing = None

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
            for attempt in range(LOCK_TRIES):
                try:
                    fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if attempt == LOCK_TRIES - 1:
                        raise
                    time.sleep(LOCK_RETRY_S)
                else:
                    return
        except BlockingIOError as error:
            self._unlock()
            raise BufferFileError(
                f"buffer.path: {self._settings.path} is in use by another sluice: stop that one, "
                "or give this one a buffer of its own"
            ) from error
        except OSError as error:
            raise BufferFileError(
                f"buffer.path: nothing can be written in {path.parent} ({error.strerror}): make the directory, "
                "and let the user that sluice runs as write to it"
            ) from error

    def _unlock(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None


def _announce(outcomes: Sequence[tuple[Done, bool]]) -> None:
    for done, committed in outcomes:
        try:
            done(committed)
        except Exception:
            # One sensor's connection must not cost the others their acknowledgements.
            log.exception("an acknowledgement failed")
