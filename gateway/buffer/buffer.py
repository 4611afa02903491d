"""The buffer: readings wait here, in one SQLite file, until Kafka's replicas have them.

One thread owns the one connection. What arrives while a commit is being synced goes into the next (group
commit); acknowledgements are released only after COMMIT has returned, which with `synchronous=FULL` means "on disk".
What cannot be stored at present, for want of room or because the disk fails, is held in order until it can.
"""

import asyncio
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, TypeVar

import structlog

from gateway.buffer import lock as buffer_lock
from gateway.buffer import schema as buffer_schema
from gateway.buffer.attachment import Attachment, SetAside
from gateway.buffer.boots import Correction
from gateway.buffer.file import ROW_BYTES, BufferFile
from gateway.buffer.lanes import LaneReport
from gateway.buffer.losses import LOSSES_MAX
from gateway.buffer.rows import (
    Entry,
    Lane,
    Loss,
    LossKey,
    Outstanding,
    Position,
    Quarantined,
    Row,
    Series,
    Span,
    joined,
    loss_key,
    spans_of,
    without,
)
from gateway.buffer.salvage.salvage import SalvagedBatch
from gateway.buffer.tail import Tail
from gateway.buffer.wear import Usage, WriteMeter
from gateway.clock.gateway_clock import BootClock
from gateway.reading import BufferFileError, Mark, Recalled
from gateway.settings import BufferSettings

DELETE_DELAY_S = 1.0
"""Rows that Kafka has, and loss counters, wait this long for company: each deletion is some pages for the card."""
RETRY_S = 1.0
"""What could not be stored is tried again after this, and as soon as Kafka has taken something."""
ENTRY_BYTES = 300
"""What an entry takes in memory beside its payload, for `buffer.queue_bytes_max`."""
OWN_BYTES_MAX = 1_000_000
"""The gateway's own events: so much of them waits in memory at most, and has room on disk beyond `bytes_max`."""
AGE_CHECK_S = 60.0
END_S = 2.0
"""How long the end waits for the event loop."""
LOSSES_REPORTED_MAX = 200
"""Loss records made in one commit."""

ROOM_SAID_AFTER_S = 10.0
"""A buffer at its bound is full and not full many times a second: it is said once."""
FULL_WORDS = {
    "refuse": "buffer full: sensors keep what they have until Kafka has taken some, or the disk has room",
    "drop-oldest": "buffer full: the oldest readings make room, and are counted as lost",
}

Done = Callable[[bool], None]
T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Append:
    entries: Sequence[Entry]
    marks: Sequence[Mark]
    done: Done | None
    bytes: int
    """What it takes in memory."""
    disk_bytes: int


@dataclass(slots=True)
class _Due:
    """What a commit does beside storing readings."""

    confirmed: list[Span] = field(default_factory=list)
    marks: dict[str, Mark] = field(default_factory=dict)
    """Kept with the deletion of what is confirmed."""
    losses: dict[LossKey, Loss] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.confirmed or self.marks or self.losses)


@dataclass(slots=True)
class BufferState:
    """What the buffer says of itself; written by its thread, read by anybody."""

    bytes_used: int = 0
    rows: int = 0
    lanes_behind: int = 0
    """Lanes that hold rows, before the one that rows go into."""
    full: bool = False
    failing: str | None = None
    """SQLite's words while commits fail; readings are held meanwhile, not lost."""


class Buffer:
    """Readings on disk, in order, until they are confirmed.

    `append`, `read`, `confirm` and the rest may be called from the event loop; none of them blocks it.
    """

    def __init__(
        self,
        settings: BufferSettings,
        boot_id: str,
        clock: Callable[[], BootClock],
        resume: Callable[[BootClock], None] | None = None,
    ) -> None:
        """`clock` gives what is known of the gateway's clock; called on any thread.

        `resume` is told, before that is asked, what the file keeps of it from an earlier start in this boot.
        """
        self._settings = settings
        self._clock = clock
        self.boot_id = boot_id
        self.state = BufferState()
        self.counts: Counter[str] = Counter()
        """What was recognised since the start; see `BufferFile`."""
        self.committed = asyncio.Event()
        """Set after each commit that added rows; the forwarder clears it."""
        self._lock_file: IO[bytes] | None = None
        self._attachment = Attachment(
            settings,
            boot_id,
            clock,
            self.counts,
            resume=resume,
            call=self._enqueue,
            on_attach=self._forget_former_file,
            on_rows=self._note_salvaged_rows,
        )
        self._loop: asyncio.AbstractEventLoop
        self._died: asyncio.Future[None]
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._readings: deque[_Append] = deque()
        self._own: deque[_Append] = deque()
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._queued_bytes = 0
        self._own_bytes = 0
        self._losses: dict[LossKey, Loss] = {}
        self._closing = False
        self._confirmed: list[Span] = []
        """Rows of the file that is open, never of a former one."""
        self._confirmed_marks: dict[str, Mark] = {}
        self._held: list[Span] = []
        """What is being sent: it is not dropped."""
        self._drops = 0
        self._append_due_s = 0.0
        self._delete_due_s = float("inf")
        self._retry_s = 0.0
        self._age_due_s = 0.0
        self._stuck = False
        """Whether there is nothing left that could be dropped, and still no room."""
        self._made_room = False
        """Whether the last commit dropped rows for want of room."""
        self._full_said = False
        self._full_seen_s = 0.0
        self._tail = Tail()
        self._meter = WriteMeter(time.monotonic())

    # -- the event loop's side ------------------------------------------------------------------

    def open(self) -> None:
        """Open the file, begin this start's lane, and start the thread. Raises BufferFileError."""
        self._loop = asyncio.get_running_loop()
        self._died = self._loop.create_future()
        self._lock_file = buffer_lock.acquire(self._settings.path)
        try:
            self._attach()
        except BaseException:
            self._lock_file.close()
            raise
        # What a file is grown by at its beginning tells of no day to come.
        self._meter.reset(time.monotonic())
        self._thread = threading.Thread(target=self._work, name="buffer", daemon=True)
        self._thread.start()

    async def watch(self) -> None:
        """Wait until cancelled; raises what the buffer's thread died of, should it ever: the daemon must not go on."""
        await asyncio.shield(self._died)

    async def answers(self) -> None:
        """Come back when the buffer's thread has had its turn, be it that it has no file at present."""
        with suppress(BufferFileError):
            await self._call(lambda: None)

    async def close(self) -> None:
        """Commit what has been appended, as far as that is possible, and close the file."""
        self._attachment.stop_salvages()
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._attachment.join_salvages)
        if self._lock_file is not None:
            self._lock_file.close()

    @property
    def rewinds(self) -> int:
        """See `Attachment`, as for `set_aside` and `salvaged`."""
        return self._attachment.rewinds

    @property
    def set_aside(self) -> deque[SetAside]:
        return self._attachment.set_aside

    @property
    def salvaged(self) -> deque[SalvagedBatch]:
        return self._attachment.salvaged

    @property
    def _file(self) -> BufferFile:
        return self._attachment.file

    @property
    def id(self) -> str:
        """The file's random name: another one after it had to be begun anew."""
        return self._file.id

    @property
    def lane(self) -> Lane:
        """The lane that readings go into now."""
        return self._file.lane

    @property
    def usage(self) -> Usage:
        """What came in since that was last written to the file."""
        return self._meter.so_far(time.monotonic())

    @property
    def may_drop(self) -> bool:
        """Whether rows may go that Kafka never had."""
        return self._settings.when_full == "drop-oldest" or bool(self._settings.age_max_s)

    @property
    def drops(self) -> int:
        """Grows before rows are dropped: what was read until then may be gone."""
        return self._drops

    @property
    def holding(self) -> bool:
        """See `Intake.holding`."""
        full = self.state.full and (self._settings.when_full == "refuse" or self._stuck)
        return full or self.state.failing is not None

    def append(self, entries: Sequence[Entry], done: Done | None = None, marks: Sequence[Mark] = ()) -> None:
        """Store entries, and keep or forget marks, in one commit; `done` as `Intake.take` has it."""
        payload_bytes = sum([len(entry.payload) for entry in entries])
        size = payload_bytes + ENTRY_BYTES * (len(entries) + len(marks))
        size += sum([len(mark.value) for mark in marks if mark.value is not None])
        disk_bytes = payload_bytes + ROW_BYTES * len(entries)
        with self._wake:
            accepted = not self._closing and self._queued_bytes <= self._settings.queue_bytes_max
            if accepted:
                self._readings.append(_Append(entries, marks, done, size, disk_bytes))
                self._queued_bytes += size
                self._wake_for_append()
        if not accepted and done is not None:
            self._loop.call_soon(done, False)

    def append_own(self, entry: Entry, done: Done) -> None:
        """Store one of the gateway's own events: they have some room beyond `bytes_max`, so that full can be said."""
        size = len(entry.payload) + ENTRY_BYTES
        full = self.state.bytes_used >= self._settings.bytes_max + OWN_BYTES_MAX
        with self._wake:
            accepted = not self._closing and not full and self._own_bytes + size <= OWN_BYTES_MAX
            if accepted:
                self._own.append(_Append((entry,), (), done, size, len(entry.payload) + ROW_BYTES))
                self._own_bytes += size
                self._wake_for_append()
        if not accepted:
            self._loop.call_soon(done, False)

    def count_loss(self, loss: Loss) -> None:
        """Count readings that are gone; on disk with the next commit, within `DELETE_DELAY_S`."""
        with self._wake:
            if not self._losses:
                self._delete_due_s = min(self._delete_due_s, time.monotonic() + DELETE_DELAY_S)
                self._wake.notify()
            if len(self._losses) >= LOSSES_MAX and loss_key(loss) not in self._losses:
                loss.device = loss.device_boot = ""
            _merge(self._losses, (loss,))

    async def read(self, after: Position, limit: int) -> tuple[str, list[Row]]:
        """Rows that follow a position, oldest first, and the id of the file that they stand in."""
        with self._wake:
            found = self._tail.read(after, limit)
            buffer_id = self._file.id
        if found is not None:
            return buffer_id, found
        return await self._call(lambda: (self._file.id, self._read_newest(after, limit)))

    async def read_behind(self, after: Position, limit: int, before_lane: int) -> tuple[str, list[Row]]:
        """The same of the lanes before one."""

        def read() -> tuple[str, list[Row]]:
            # Cut here, not in SQL: what a damaged page gives for a lane would be left out there without a word.
            return self._file.id, [row for row in self._read(after, limit) if row.lane < before_lane]

        return await self._call(read)

    async def begin_lane(self, reason: str, report: LaneReport) -> None:
        """Have rows go into a new lane from now on; `report` makes the rows that say so. Raises BufferFileError."""

        def begin() -> None:
            self._file.begin_lane(reason, report)
            with self._wake:
                self._tail.follow()

        await self._in_transaction(begin)

    async def report_lanes(self, reason: str, report: LaneReport) -> None:
        """Have lanes reported of which that was not done yet. Raises BufferFileError."""
        await self._in_transaction(lambda: self._file.report_lanes(reason, report))

    async def series(self, buffer_id: str, number: int) -> Series:
        """What a row's series number stands for, in the file that it was read from. Raises BufferFileError."""
        return await self._call(lambda: self._file_of(buffer_id).series(number))

    async def lane_of(self, buffer_id: str, number: int) -> Lane:
        """The lane of a row, in the file that it was read from. Raises BufferFileError."""
        return await self._call(lambda: self._file_of(buffer_id).lane_of(number))

    def clock(self) -> BootClock:
        """What is known now of this boot's wall clock."""
        return self._clock()

    async def boot_clock(self, boot_id: str) -> BootClock:
        """What is known of the clock in a boot of this gateway. Raises BufferFileError where there was none."""
        if boot_id == self.boot_id:
            return self._clock()
        return await self._call(lambda: self._former_clock(boot_id))

    def _former_clock(self, boot_id: str) -> BootClock:
        boots = self._file.boots
        if boots.may_be_learnt(boot_id) and self._clock().known:
            # What this boot's clock tells of it comes to the disk with the next commit: that is now.
            self._transact(lambda: None)
        return boots.clock(boot_id)

    async def may_be_learnt(self, boot_id: str) -> bool:
        """Whether a boot's clock will be known as soon as this boot's is, which it is not. Raises BufferFileError."""
        if boot_id == self.boot_id:
            return True
        return await self._call(lambda: self._file.boots.may_be_learnt(boot_id))

    async def owe_correction(self, boot_id: str) -> None:
        """Have it on disk that records of a boot go out although its clock is not known. Raises BufferFileError."""

        def owe() -> None:
            if not self._file.boots.owes(boot_id):
                self._transact(lambda: self._file.boots.owe(boot_id))

        await self._call(owe)

    @property
    def owes_correction(self) -> bool:
        """Whether records went out with times that are known better by now."""
        return self._file.boots.owes_correction

    async def report_corrections(self, report: Callable[[Correction], Entry]) -> list[Correction]:
        """Add rows that correct such records; which. None while the buffer has no room even for these.

        Raises BufferFileError.
        """
        if self._is_crowded():
            return []
        return await self._in_transaction(lambda: self._file.report_corrections(report))

    async def outstanding(self) -> Outstanding:
        """The lanes that still hold rows, with the event times these may have, and what else may still be sent.

        All at once: what moves from one place to another meanwhile is in one of them.
        """
        return await self._call(self._outstanding)

    async def quarantined_of_topics(self, number: int, limit: int) -> list[tuple[int, str | None, str]]:
        """See `Quarantine.of_topics`."""
        return await self._call(lambda: self._file.quarantined_of_topics(number, limit))

    async def marks(self, prefix: str) -> dict[str, bytes]:
        """See `Intake.marks`."""
        return await self._call(lambda: self._file.marks(prefix))

    async def recall(self, device: str, boot: str) -> Recalled:
        """See `SerialIntake.recall`. Raises BufferFileError."""
        with self._wake:
            entries = [entry.quarantined or entry for append in self._readings for entry in append.entries]
        # Serial sensors' boots have a random part: no two have the same.
        of_run = [entry.device_sequence for entry in entries if entry.device_boot == boot]
        waiting = frozenset(sequence for sequence in of_run if sequence is not None)
        found = await self._call(lambda: self._file.recall(device, boot))
        if waiting <= found.stored:
            return found
        # An earlier line's, perhaps, which wait for room: neither stored nor lost, until it is known which. Windows
        # are looked at before that, for what this line stores meanwhile takes the places of what was known.
        await self._until_settled()
        return found._replace(stored=found.stored | waiting)

    async def _until_settled(self) -> None:
        """Wait until what was appended before is stored or refused. Raises BufferFileError where too much waits."""
        settled: asyncio.Future[bool] = self._loop.create_future()

        def done(stored: bool) -> None:  # noqa: FBT001 - the form of Intake's `done`
            # Whoever waited may have gone: its port was closed.
            if not settled.done():
                settled.set_result(stored)

        self.append((), done)
        if not await settled:
            raise BufferFileError("too much waits to be stored")

    def confirm(self, buffer_id: str, spans: Iterable[Span], marks: Iterable[Mark] = ()) -> None:
        """These rows are in Kafka, or set aside, and may be deleted; `marks` say what goes with that.

        `buffer_id` is the file that the rows were read from. Where another one has taken its place, it has none of
        them, or under other numbers; the marks are as true as before.
        """
        with self._wake:
            if not (self._confirmed or self._confirmed_marks):
                self._delete_due_s = min(self._delete_due_s, time.monotonic() + DELETE_DELAY_S)
                self._wake.notify()
            for span in spans if buffer_id == self._file.id else ():
                self._tail.forget(span)
                _append_span(self._confirmed, span)
            for mark in marks:
                self._confirmed_marks[mark.key] = mark
            if self.state.full:
                # Sensors wait for the room that this makes.
                self._delete_due_s = self._retry_s = 0.0
                self._wake.notify()

    async def gone(self, buffer_id: str, spans: Sequence[Span]) -> list[Span]:
        """Those of these rows that are not there any more. Raises BufferFileError."""
        return await self._call(lambda: self._file_of(buffer_id).gone(spans))

    async def hold(
        self, buffer_id: str, spans: Sequence[Span], since: int, under_way: Sequence[Span] = ()
    ) -> list[Span]:
        """Have rows that are sent now not dropped, until others are held instead; give those that are gone already.

        `since` is what `drops` was before they were read, `under_way` are others that are being sent still. Raises
        BufferFileError.
        """
        held = [*spans, *under_way]
        with self._wake:
            self._file_of(buffer_id)
            if self._drops == since:
                self._held = held
                return []

        def hold() -> list[Span]:
            # Between two commits: nothing is being dropped.
            gone = self._file_of(buffer_id).gone(spans)
            with self._wake:
                self._held = held
            return gone

        return await self._call(hold)

    def release(self) -> None:
        """Nothing is being sent any more: all of it may be dropped."""
        with self._wake:
            self._held = []
            if self.state.full:
                self._retry_s = 0.0
                self._wake.notify()

    async def quarantine(self, buffer_id: str, reports: Sequence[Entry], refused: Sequence[Row]) -> None:
        """Keep what Kafka refused, append the reports that carry it, and delete the rows, in one commit.

        Raises BufferFileError where the disk refuses: the rows then stay where they are.
        """

        def move() -> None:
            file = self._file_of(buffer_id)
            file.insert_judged(reports)
            for span in spans_of(refused):
                file.delete_whole(span)
            with self._wake:
                self._tail.clear()

        await self._in_transaction(move)

    async def quarantined(self, numbers: Sequence[int]) -> dict[int, Quarantined]:
        """Quarantined input by its numbers; what is not there is left out."""
        return await self._call(lambda: self._file.quarantined(numbers))

    async def requeue(self, buffer_id: str, entries: Mapping[int, Entry], judged: Mapping[int, Entry]) -> None:
        """Take quarantined input out by its numbers, and append what became of it, in one commit.

        `judged` was taken in once already: it is not compared with what its sensor sent. Raises BufferFileError.
        """

        def move() -> None:
            file = self._file_of(buffer_id)
            # Somebody else may have been faster.
            there = file.quarantined([*entries, *judged]).keys()
            file.insert([entry for number, entry in entries.items() if number in there])
            file.insert_judged([entry for number, entry in judged.items() if number in there])
            file.drop_quarantined(list(there))

        await self._in_transaction(move)

    async def drop_quarantined(self, numbers: Sequence[int]) -> int:
        """Drop quarantined input for good, counted as lost; how much of it there was. Raises BufferFileError."""
        return await self._in_transaction(lambda: self._file.lose_quarantined(numbers))

    async def report_losses(self, report: Callable[[Loss], Entry]) -> int:
        """Turn what is counted as lost into rows that report it; how many. Raises BufferFileError."""
        return await self._call(lambda: self._report_losses(report))

    # -- the buffer's thread: what to do --------------------------------------------------------

    def _work(self) -> None:
        try:
            closing = False
            while not closing:
                calls, closing = self._wait()
                for function, future in calls:
                    self._settle(future, function)
                self._commit(time.monotonic(), closing=closing)
            self._end()
        except BaseException as error:  # noqa: BLE001 - a fault of ours: acknowledgements would wait for ever
            self._loop.call_soon_threadsafe(self._died.set_exception, error)

    def _end(self) -> None:
        """Store what can be stored, refuse the rest, and close the file."""
        while self._readings and not self.holding:
            self._commit(time.monotonic(), closing=True)
        refused = [append.done for append in (*self._own, *self._readings) if append.done is not None]
        self._own.clear()
        self._readings.clear()
        self._announce([(done, False) for done in refused])
        # What was refused may be lost: that is counted on the event loop, and still comes to the disk.
        told = threading.Event()
        self._loop.call_soon_threadsafe(told.set)
        told.wait(END_S)
        self._commit(time.monotonic(), closing=True)
        for _, future in self._calls:
            future.set_exception(BufferFileError("the buffer is closed"))
        if self._attachment.is_attached:
            self._file.close()

    def _wait(self) -> tuple[Sequence[tuple[Callable[[], object], Future[object]]], bool]:
        """Sleep until there is something to do. Reads do not wait for a delayed commit."""
        with self._wake:
            while True:
                due_s = self._due_s()
                now_s = time.monotonic()
                if self._calls or self._closing or due_s <= now_s:
                    break
                self._wake.wait(due_s - now_s)
            calls, self._calls = self._calls, deque()
            return calls, self._closing

    def _due_s(self) -> float:
        """When the next commit is due; an hour from now where nothing waits."""
        due_s = time.monotonic() + 3600
        if self._readings or self._own:
            due_s = min(due_s, self._append_due_s)
        if self._confirmed or self._confirmed_marks or self._losses:
            due_s = min(due_s, self._delete_due_s)
        if self._settings.age_max_s:
            due_s = min(due_s, self._age_due_s)
        if self.holding:
            # Others may have made room on the disk, or mended it: nothing that comes in would tell.
            due_s = self._retry_s
        if self._full_said:
            due_s = min(due_s, self._full_seen_s + ROOM_SAID_AFTER_S)
        return max(due_s, self._retry_s)

    def _commit(self, now_s: float, *, closing: bool) -> None:
        """One transaction of what waits: deletions first, for the rows that go make room for those that come."""
        with self._wake:
            if now_s < self._retry_s and not closing:
                return
        if not self._is_attached():
            return
        with self._wake:
            appends_due = closing or now_s >= self._append_due_s
            own = list(self._own) if appends_due else []
            readings = list(self._due_readings()) if appends_due else []
            cut = len(readings) < len(self._readings)
            due = _Due()
            if closing or now_s >= self._delete_due_s or self.state.full:
                due.confirmed, self._confirmed = self._confirmed, due.confirmed
                due.marks, self._confirmed_marks = self._confirmed_marks, due.marks
                self._delete_due_s = float("inf")
            if readings or self._delete_due_s == float("inf"):
                # With readings, as those that a sensor still had after a loss hide that from a later recall.
                due.losses, self._losses = self._losses, due.losses
        age_due = bool(self._settings.age_max_s) and now_s >= self._age_due_s
        dropped = self.counts["dropped"]
        if not (own or readings or due or age_due or self.state.failing is not None):
            self._look_again()
            return
        try:
            stored = self._store(own, readings, due, age_due=age_due)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing of it is acknowledged, and the thread goes on
            self._put_back(due)
            self._fail(error)
            if not buffer_schema.is_of_disk(error) and self._attachment.is_attached:
                self._commit_one_by_one([*own, *readings])
            return
        self._recover()
        held = len(stored) < len(readings)
        self._finish(own, stored, held=held, dropped=dropped)
        if appends_due and not held and not cut:
            # What came in meanwhile waits for company as long as what came before it.
            self._append_due_s = now_s + self._settings.commit_delay_ms / 1000

    def _is_attached(self) -> bool:
        """Whether a file is open; one is begun where a damaged one has no successor yet."""
        if not self._attachment.is_attached:
            try:
                self._attach()
            except Exception as error:  # noqa: BLE001 - whatever it is, the thread goes on
                self._fail(error)
                with self._wake:
                    self._retry_s = time.monotonic() + RETRY_S
                return False
        return True

    def _look_again(self) -> None:
        """Nothing waits: see whether there is room by now, so that sensors are let in again."""
        if self.state.full or self._full_said:
            self._measure(held=False)
            self._retry_s = time.monotonic() + RETRY_S if self.holding else 0.0

    def _due_readings(self) -> Iterable[_Append]:
        """The oldest appends, as many as one commit may hold."""
        size, count = 0, 0
        bytes_max = self._file.room.commit_bytes_max
        for append in self._readings:
            size += append.bytes
            count += 1
            if size > bytes_max:
                break
        return islice(self._readings, count)

    def _store(
        self,
        own: Sequence[_Append],
        readings: Sequence[_Append],
        due: _Due,
        *,
        age_due: bool,
    ) -> Sequence[_Append]:
        """Have it on disk; give those of `readings` that there was room for.

        What else is confirmed is added to `due` where rows are dropped: those that Kafka has are not lost.
        """
        file = self._file
        now_s = time.monotonic()
        usage = self._meter.due(now_s)
        with self._transaction():
            if age_due or (
                self._settings.when_full == "drop-oldest"
                and file.room.is_full(sum(append.disk_bytes for append in readings))
            ):
                self._take_confirmed(due)
            rest = file.delete_some(due.confirmed)
            file.keep_marks(due.marks.values())
            if due.losses:
                file.count_losses(list(due.losses.values()))
            if age_due and not rest:
                more = file.drop_aged(int(self._settings.age_max_s * 1e6), self._spared())
                self._age_due_s = now_s + (0 if more else AGE_CHECK_S)
            stored = self._fitting(readings, may_drop=not rest)
            # Behind what is dropped: it would be told of as stored.
            file.insert_judged([entry for append in own for entry in append.entries])
            file.keep_marks([mark for append in stored for mark in append.marks])
            file.insert([entry for append in stored for entry in append.entries])
            if usage is not None:
                file.add_usage(*usage)
        if rest:
            with self._wake:
                self._confirmed[:0] = rest
                self._delete_due_s = 0.0
        if usage is not None:
            self._meter.reset(now_s)
        return stored

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """The file's transaction, and what is kept in memory of the rows that it added."""
        with self._file.transaction():
            yield
        with self._wake:
            self._tail.extend(self._file.inserted, self._file.inserted_bytes)
        self._meter.add(len(self._file.inserted), self._file.inserted_bytes)

    def _take_confirmed(self, due: _Due) -> None:
        with self._wake:
            due.confirmed += self._confirmed
            due.marks |= self._confirmed_marks
            self._confirmed, self._confirmed_marks = [], {}

    def _spared(self) -> list[Span]:
        """Rows that may not be dropped; what is read, or to be held, from here on is looked up behind this commit."""
        with self._wake:
            self._drops += 1
            self._tail.clear()
            # Kafka has what was confirmed since this commit began.
            return joined([*self._held, *self._confirmed])

    def _fitting(self, readings: Sequence[_Append], *, may_drop: bool) -> Sequence[_Append]:
        """Those that there is room for, in order; what they are made room by is dropped, where that is wanted."""
        self._made_room = False
        coming = sum(append.disk_bytes for append in readings)
        if not coming or not self._file.room.is_full(coming):
            return readings
        if self._settings.when_full == "drop-oldest" and may_drop:
            self._made_room = True
            self._file.drop_oldest(coming, self._spared())
            if not self._file.room.is_full(coming):
                return readings
        size = 0
        for count, append in enumerate(readings):
            size += append.disk_bytes
            if append.entries and self._file.room.is_full(size):
                return readings[:count]
        return readings

    def _finish(self, own: Sequence[_Append], stored: Sequence[_Append], *, held: bool, dropped: int) -> None:
        """Take what is on disk off the queues, and say so.

        `held` says that some found no room, `dropped` how many rows had been dropped before.
        """
        with self._wake:
            for _ in own:
                self._own_bytes -= self._own.popleft().bytes
            for _ in stored:
                self._queued_bytes -= self._readings.popleft().bytes
        # While deletions or droppings make room, the next commit is not waited for.
        self._stuck = held and not stored and not self._confirmed and self.counts["dropped"] == dropped
        self._measure(held=held or self._made_room)
        with self._wake:
            self._retry_s = time.monotonic() + RETRY_S if self._stuck else 0.0
        self._announce([(append.done, True) for append in (*own, *stored) if append.done is not None])
        if self._file.inserted:
            self._loop.call_soon_threadsafe(self.committed.set)

    def _commit_one_by_one(self, appends: Sequence[_Append]) -> None:
        """Something in there cannot be stored by any disk: it must not keep the others out for ever."""
        outcomes: list[tuple[Done, bool]] = []
        for append in appends:
            stored = False
            try:
                with self._transaction():
                    self._file.keep_marks(append.marks)
                    self._file.insert(append.entries)
                stored = True
            except Exception as error:
                if buffer_schema.is_of_disk(error):
                    break
                log.exception("something could not be stored, and is refused")
            with self._wake:
                queue = self._own if self._own and self._own[0] is append else self._readings
                queue.popleft()
                if queue is self._own:
                    self._own_bytes -= append.bytes
                else:
                    self._queued_bytes -= append.bytes
            if append.done is not None:
                outcomes.append((append.done, stored))
        else:
            self._recover()
        self._announce(outcomes)
        self._loop.call_soon_threadsafe(self.committed.set)
        self._measure(held=False)

    def _put_back(self, due: _Due) -> None:
        """The transaction was rolled back: all that it was to do is still to be done."""
        with self._wake:
            self._confirmed[:0] = due.confirmed
            self._confirmed_marks = {**due.marks, **self._confirmed_marks}
            _merge(self._losses, due.losses.values())
            self._delete_due_s = 0.0
            self._retry_s = time.monotonic() + RETRY_S

    def _read_newest(self, after: Position, limit: int) -> list[Row]:
        rows = self._read(after, limit)
        with self._wake:
            if not rows or (rows[-1].lane, rows[-1].sequence) == self._file.last:
                self._tail.follow()
        return rows

    def _read(self, after: Position, limit: int) -> list[Row]:
        """Rows of the file, but for those that are confirmed and wait for their deletion."""
        while True:
            rows = self._file.read(after, limit)
            with self._wake:
                confirmed = list(self._confirmed)
            # Whoever reads on where he was has nothing behind him; after a rewind he may.
            if not rows or not any((rows[0].lane, rows[0].sequence) <= (span.lane, span.last) for span in confirmed):
                return rows
            after = Position(rows[-1].lane, rows[-1].sequence)
            rows = without(rows, confirmed)
            if rows:
                return rows

    def _outstanding(self) -> Outstanding:
        # What waits for its commit is pending too: no watermark may pass it.
        with self._wake:
            queued = [entry for append in (*self._own, *self._readings) for entry in append.entries]
        file = self._file
        return Outstanding(file.pending(queued), list(file.quarantined_spans()), file.is_salvaging())

    def _measure(self, *, held: bool) -> None:
        """See how much room is left; say so when that changes."""
        if not self._attachment.is_attached:
            return
        try:
            self.state.bytes_used = self._file.room.used_bytes()
            full = held or self._file.room.is_full()
        except (sqlite3.Error, OSError) as error:
            self._fail(error)
            return
        self.state.rows = self._file.rows
        self.state.lanes_behind = self._file.lanes_behind
        self.state.full = full
        now_s = time.monotonic()
        if full:
            self._full_seen_s = now_s
            if not self._full_said:
                self._full_said = True
                log.warning(
                    FULL_WORDS[self._settings.when_full],
                    bytes_used=self.state.bytes_used,
                    disk_free=self._file.room.disk_free_bytes(),
                    settings="buffer.bytes_max, buffer.free_bytes_min, buffer.when_full",
                )
        elif self._full_said and now_s >= self._full_seen_s + ROOM_SAID_AFTER_S:
            self._full_said = False
            log.info("buffer has room again", bytes_used=self.state.bytes_used)

    # -- the buffer's thread: the file ----------------------------------------------------------

    def _attach(self) -> None:
        """Open or begin the file. Raises BufferFileError."""
        self._attachment.attach()
        if self._file.room.lacks_commits:
            log.error(
                "the buffer's WAL is damaged: readings that were acknowledged last are lost, nobody knows how many; "
                "the disk or card that buffer.path is on is probably failing and should be replaced",
                path=str(self._settings.path),
            )
        self._measure(held=False)

    def _forget_former_file(self) -> None:
        with self._wake:
            self._confirmed, self._held = [], []
            self._tail.clear()

    def _note_salvaged_rows(self) -> None:
        self.state.rows = self._file.rows
        self._loop.call_soon_threadsafe(self.committed.set)

    def _settle(self, future: Future[object], function: Callable[[], object]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if not self._attachment.is_attached:
                self._attach()
            result = function()
        except (sqlite3.Error, OSError) as error:
            self._fail(error)
            future.set_exception(BufferFileError(f"the buffer cannot be read or written: {error}"))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
            future.set_exception(error)
        else:
            future.set_result(result)

    def _fail(self, error: Exception) -> None:
        """Say once that the buffer fails; a corrupt file is replaced at once."""
        words = str(error) or type(error).__name__
        if isinstance(error, sqlite3.Error) and buffer_schema.is_corruption(error) and self._attachment.is_attached:
            try:
                self._attachment.replace(error)
            except (sqlite3.Error, OSError, BufferFileError) as problem:
                words = f"no new buffer could be begun: {problem}"
            else:
                self._retry_s = 0.0
                return
        if self.state.failing is None:
            log.error(
                "buffer cannot be read or written: nothing is acknowledged until it can; it is tried each second",
                error=words,
                path=str(self._settings.path),
            )
        self.state.failing = words

    def _recover(self) -> None:
        if self.state.failing is not None:
            log.info("buffer can be written again", path=str(self._settings.path))
            self.state.failing = None

    # -- plumbing -------------------------------------------------------------------------------

    def _wake_for_append(self) -> None:
        if len(self._readings) + len(self._own) == 1:
            self._append_due_s = time.monotonic() + self._settings.commit_delay_ms / 1000
        self._wake.notify()

    def _announce(self, outcomes: Sequence[tuple[Done, bool]]) -> None:
        if outcomes:
            self._loop.call_soon_threadsafe(_announce, outcomes)

    def _is_crowded(self) -> bool:
        """Whether there is no room even for what the gateway has to say of itself."""
        return self.state.bytes_used >= self._settings.bytes_max + OWN_BYTES_MAX // 2

    def _report_losses(self, report: Callable[[Loss], Entry]) -> int:
        if self._is_crowded():
            return 0
        with self._wake:
            losses, self._losses = self._losses, {}
        if not losses and not self._file.has_losses():
            return 0

        def move() -> int:
            self._file.count_losses(list(losses.values()))
            return self._file.report_losses(report, LOSSES_REPORTED_MAX)

        try:
            return self._transact(move)
        except BaseException:
            self._put_back(_Due(losses=losses))
            raise

    def _file_of(self, buffer_id: str) -> BufferFile:
        """The open file, if it is still that one: numbers of another one would mean something else here."""
        if self._file.id != buffer_id:
            raise BufferFileError("the buffer file was replaced in between: what was read from it is void")
        return self._file

    async def _in_transaction(self, function: Callable[[], T]) -> T:
        """Run a function in a transaction of its own, on the buffer's thread."""
        return await self._call(lambda: self._transact(function))

    def _transact(self, function: Callable[[], T]) -> T:
        """The same, for who is on that thread already."""
        with self._transaction():
            result = function()
        self._measure(held=self.state.full and bool(self._readings))
        self._loop.call_soon_threadsafe(self.committed.set)
        return result

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function on the buffer's thread."""
        return await asyncio.wrap_future(self._enqueue(function))

    def _enqueue(self, function: Callable[[], T]) -> Future[T]:
        """Have a function run on the buffer's thread. Raises BufferFileError where the buffer is closed."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                raise BufferFileError("the buffer is closed")
            self._calls.append((function, future))  # type: ignore[arg-type]
            self._wake.notify()
        return future


def _append_span(spans: list[Span], span: Span) -> None:
    """Add a span, joined to the one that it follows, if that is one of the last: two lanes are sent side by side."""
    for index in range(len(spans) - 1, max(len(spans) - 3, -1), -1):
        last = spans[index]
        if last.lane == span.lane and last.last + 1 == span.first:
            spans[index] = Span(span.lane, last.first, span.last)
            return
    spans.append(span)


def _merge(losses: dict[LossKey, Loss], more: Iterable[Loss]) -> None:
    for loss in more:
        known = losses.setdefault(loss_key(loss), loss)
        if known is not loss:
            known.add(loss)


def _announce(outcomes: Sequence[tuple[Done, bool]]) -> None:
    for done, committed in outcomes:
        try:
            done(committed)
        except Exception:
            # One sensor's connection must not cost the others their acknowledgements.
            log.exception("an acknowledgement failed")
