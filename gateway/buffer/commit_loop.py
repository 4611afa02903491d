"""The thread that owns the one SQLite connection, and commits what waits.

What arrives while a commit is being synced goes into the next one (group commit). Acknowledgements are released only
after COMMIT has returned. With `synchronous=FULL`, that means "on disk". If there is no room, or the disk fails,
readings are held in order until they can be stored.
"""

import asyncio
import math
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

from gateway.buffer import schema
from gateway.buffer.attachment import Attachment
from gateway.buffer.commit_queue import OWN_BYTES_MAX, RETRY_S, Append, CommitQueue, Done, Due, merge_losses
from gateway.buffer.file import BufferFile
from gateway.buffer.losses import has_losses
from gateway.buffer.outgoing import OutgoingRows
from gateway.buffer.rows import Entry, Loss, LossKey
from gateway.buffer.shares import ABOVE_SHARE, Judged
from gateway.buffer.state import StateWatch
from gateway.buffer.wear import WriteMeter, add_usage
from gateway.clock.gateway_clock import BootClock
from gateway.reading import BufferFileError
from gateway.settings import BufferSettings

AGE_CHECK_S = 60.0
END_S = 2.0
"""Seconds that the thread's end waits for the event loop."""
LOSSES_REPORTED_MAX = 200
"""Loss records made in one commit, at most."""

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The fate of the readings in one commit."""

    settled: Sequence[Append]
    """Appends that wait no more: stored or refused."""
    stored: Sequence[Append]
    refused: Sequence[Append] = ()
    """Appends whose devices hold more than their share."""
    lost: Sequence[Entry] = ()
    """Entries of devices above their share that cannot be refused, as they come with others' entries."""


class CommitLoop:
    """Owns the buffer's thread. Only `open` and `join` run on others; its attributes may be read on any."""

    def __init__(  # noqa: PLR0913 - the thread's parts, and the file's needs
        self,
        settings: BufferSettings,
        boot_id: str,
        clock: Callable[[], BootClock],
        *,
        resume: Callable[[BootClock], None] | None,
        queue: CommitQueue,
        outgoing: OutgoingRows,
    ) -> None:
        """`clock` and `resume` are those of `Buffer`."""
        self._settings = settings
        self._boot_id = boot_id
        self._queue = queue
        self._outgoing = outgoing
        self.counts: Counter[str] = Counter()
        """Readings counted since the start, by what became of them; see `BufferFile`."""
        self.committed = asyncio.Event()
        """Set after each commit that added rows; the forwarder clears it."""
        self.attachment = Attachment(
            settings,
            boot_id,
            clock,
            self.counts,
            resume=resume,
            call=queue.call,
            on_attach=lambda: outgoing.begin(self.file.id),
            on_rows=self._note_salvaged_rows,
        )
        self.state_watch = StateWatch(settings)
        self.meter = WriteMeter(time.monotonic())
        self.died: asyncio.Future[None]
        """Gets the error that ended the thread, if one does."""
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._age_due_s = 0.0
        self._made_room = False
        """Whether the last commit dropped rows to make room."""

    def open(self) -> None:
        """Open the file, begin this start's lane, and start the thread. Raises BufferFileError."""
        self._loop = asyncio.get_running_loop()
        self.died = self._loop.create_future()
        self._attach()
        # Writes that make a new file say nothing about the days to come.
        self.meter.reset(time.monotonic())
        self._thread = threading.Thread(target=self._work, name="buffer", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended, after the queue was closed."""
        if self._thread is not None:
            self._thread.join()

    @property
    def file(self) -> BufferFile:
        """The open file."""
        return self.attachment.file

    @property
    def is_crowded(self) -> bool:
        """Whether there is no room even for the gateway's own events. May be read on any thread."""
        return self.state_watch.state.bytes_used >= self._settings.bytes_max + OWN_BYTES_MAX // 2

    # -- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            closing = False
            while not closing:
                calls, closing = self._queue.wait(self._due_s(), cannot_store=self.state_watch.cannot_store)
                for function, future in calls:
                    self._settle(future, function)
                self._commit(time.monotonic(), closing=closing)
            self._end()
        except BaseException as error:  # noqa: BLE001 - a bug: acknowledgements would wait for ever
            self._loop.call_soon_threadsafe(self.died.set_exception, error)

    def _end(self) -> None:
        """Store what can be stored, refuse the rest, and close the file."""
        while self._queue.has_readings and not self.state_watch.cannot_store:
            self._commit(time.monotonic(), closing=True)
        self._announce([(done, False) for done in self._queue.refuse_appends()])
        # Refused readings may be lost. The event loop counts them, and the counts must still reach the disk.
        told = threading.Event()
        self._loop.call_soon_threadsafe(told.set)
        told.wait(END_S)
        self._commit(time.monotonic(), closing=True)
        self._queue.refuse_calls()
        if self.attachment.is_attached:
            self.file.close()

    def _due_s(self) -> float:
        """When the next commit is due, whatever the queue holds."""
        due_s = min(self.state_watch.due_s, self.file.shares.count_due_s if self.attachment.is_attached else math.inf)
        # While nothing can be stored, the queue's retries wake the thread, as somebody may free or mend the disk.
        return min(due_s, self._age_due_s) if self._settings.age_max_s and not self.state_watch.cannot_store else due_s

    def _settle(self, future: Future[object], function: Callable[[], object]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if not self.attachment.is_attached:
                self._attach()
            result = function()
        except (sqlite3.Error, OSError) as error:
            self._fail(error)
            future.set_exception(BufferFileError(f"the buffer cannot be read or written: {error}"))
        except BaseException as error:  # noqa: BLE001 - every error belongs to the caller
            future.set_exception(error)
        else:
            future.set_result(result)

    def _announce(self, outcomes: Sequence[tuple[Done, bool]]) -> None:
        if outcomes:
            self._loop.call_soon_threadsafe(_announce, outcomes)

    # -- group commits --------------------------------------------------------------------------

    def _commit(self, now_s: float, *, closing: bool) -> None:
        """Commit what waits, in one transaction. Deletions come first, as they make room for new rows."""
        if not closing and self._queue.must_wait(now_s):
            return
        if not self._is_attached():
            return
        try:
            self.file.shares.follow(now_s)
        except (sqlite3.Error, OSError) as error:
            self._fail(error)
            self._queue.retry_after(RETRY_S)
            return
        due = self._queue.due(now_s, self.file.room.commit_bytes_max, closing=closing, full=self.state_watch.state.full)
        if due.is_time_to_delete:
            # Taken after `due` is made: rows that are confirmed from here on set a new time to delete.
            due.confirmed, due.marks = self._outgoing.take_confirmed()
        age_due = bool(self._settings.age_max_s) and now_s >= self._age_due_s
        dropped = self.counts["dropped"]
        if not (due or age_due or self.state_watch.state.failing is not None):
            self._measure_again(now_s)
            return
        try:
            if self.state_watch.state.failing is not None:
                # A program that read the file may have kept SQLite from beginning the WAL again. On a full disk, no
                # commit then finds room behind the WAL's end, and only a successful commit makes a checkpoint.
                with suppress(sqlite3.Error):
                    self.file.room.checkpoint()
            outcome = self._store(due, age_due=age_due)
        except Exception as error:  # noqa: BLE001 - nothing is acknowledged, and the thread goes on
            self._outgoing.put_back(due.confirmed, due.marks)
            self._queue.put_back(due.losses)
            self._fail(error)
            if not schema.is_of_disk(error) and self.attachment.is_attached:
                self._commit_one_by_one([*due.own, *due.readings])
            return
        self.state_watch.recover()
        self._finish(due, outcome, dropped=dropped)
        if due.has_all and len(outcome.settled) == len(due.readings):
            self._queue.delay_appends(now_s)

    def _store(self, due: Due, *, age_due: bool) -> "_Outcome":
        """Commit what is due; return what became of its readings.

        If rows are dropped, rows confirmed since are added to `due` first: those that Kafka has are not lost.
        """
        file = self.file
        now_s = time.monotonic()
        usage = self.meter.due(now_s)
        with self._transaction():
            coming = sum(append.disk_bytes for append in due.readings)
            drops = self._settings.when_full == "drop-oldest"
            if age_due or (drops and (file.room.is_full(coming) or file.shares.limits(coming, now_s))):
                confirmed, marks = self._outgoing.take_confirmed()
                due.confirmed += confirmed
                due.marks |= marks
            rest = file.deletion.delete_some(due.confirmed)
            file.keep_marks(due.marks.values())
            if due.losses:
                file.count_losses(list(due.losses.values()))
            if age_due and not rest:
                more = file.dropping.drop_aged(int(self._settings.age_max_s * 1e6), self._outgoing.spared())
                self._age_due_s = now_s + (0 if more else AGE_CHECK_S)
            outcome = self._fitting(due.readings, may_drop=drops and not rest, now_s=now_s)
            # Inserted after the dropping: otherwise an event could be dropped at once, and still be announced as
            # stored.
            file.insert_judged([entry for append in due.own for entry in append.entries])
            if outcome.lost:
                file.count_losses(_lost_above_share(outcome.lost, self._boot_id))
            file.keep_marks([mark for append in outcome.stored for mark in append.marks])
            file.insert([entry for append in outcome.stored for entry in append.entries])
            if usage is not None:
                add_usage(file.connection, self._boot_id, usage)
        if rest:
            self._outgoing.put_back(rest, {})
            self._queue.delete_now()
        if usage is not None:
            self.meter.reset(now_s)
        return outcome

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """The file's transaction. After it, the rows that it added are counted and kept in memory."""
        with self.file.transaction():
            yield
        self._outgoing.extend(self.file.inserted, self.file.inserted_bytes)
        self.meter.add(len(self.file.inserted), self.file.inserted_bytes)

    def _fitting(self, readings: Sequence[Append], *, may_drop: bool, now_s: float) -> "_Outcome":
        """Choose the readings to store, in order. A device above its share is refused, or drops its own oldest rows."""
        file = self.file
        self._made_room = False
        if not file.shares.limits(sum(append.disk_bytes for append in readings), now_s):
            stored = self._with_room(readings, may_drop=may_drop)
            return _Outcome(readings[: len(stored)], stored)
        judged, wanted = file.shares.judge(readings, file.series.numbers, {}, now_s)
        if wanted and may_drop:
            freed = file.dropping.drop_own(wanted, self._outgoing.spared())
            judged, wanted = file.shares.judge(readings, file.series.numbers, freed, now_s)
        room_for = len(self._with_room([each.fair for each in judged if each.fair is not None], may_drop=may_drop))
        settled: list[Judged] = []
        for each in judged:
            if each.fair is not None and room_for == 0:
                break
            room_for -= each.fair is not None
            settled.append(each)
        file.shares.note(settled, wanted, now_s)
        return _Outcome(
            [each.append for each in settled],
            [each.fair for each in settled if each.fair is not None],
            [each.append for each in settled if each.fair is None],
            [entry for each in settled for entry in each.lost],
        )

    def _with_room(self, readings: Sequence[Append], *, may_drop: bool) -> Sequence[Append]:
        """The first readings, as many as there is room for. If `may_drop`, the oldest rows are dropped to make room."""
        coming = sum(append.disk_bytes for append in readings)
        if not coming or not self.file.room.is_full(coming):
            return readings
        if may_drop:
            self._made_room = True
            self.file.dropping.drop_oldest(coming, self._outgoing.spared())
            if not self.file.room.is_full(coming):
                return readings
        size = 0
        for count, append in enumerate(readings):
            size += append.disk_bytes
            if append.entries and self.file.room.is_full(size):
                return readings[:count]
        return readings

    def _finish(self, due: Due, outcome: "_Outcome", *, dropped: int) -> None:
        """Take decided appends off the queue, and announce them. `dropped` is the count of dropped rows before."""
        self._queue.settled((*due.own, *outcome.settled))
        without_room = len(outcome.settled) < len(due.readings)
        # If deletions or droppings made room, the next commit follows at once.
        is_stuck = (
            without_room
            and not outcome.settled
            and not self._outgoing.has_confirmed
            and self.counts["dropped"] == dropped
        )
        self.state_watch.is_stuck = is_stuck
        self._measure(without_room=without_room or self._made_room)
        self._queue.retry_after(RETRY_S if is_stuck else 0.0)
        outcomes = [(append.done, True) for append in (*due.own, *outcome.stored) if append.done is not None]
        self._announce(outcomes + [(append.done, False) for append in outcome.refused if append.done is not None])
        if self.file.inserted:
            self._loop.call_soon_threadsafe(self.committed.set)

    def _commit_one_by_one(self, appends: Sequence[Append]) -> None:
        """Commit each append by itself: one that no disk can store must not keep out the others for ever."""
        outcomes: list[tuple[Done, bool]] = []
        for append in appends:
            stored = False
            try:
                with self._transaction():
                    self.file.keep_marks(append.marks)
                    self.file.insert(append.entries)
                stored = True
            except Exception as error:
                if schema.is_of_disk(error):
                    break
                log.exception("something could not be stored, and is refused")
            self._queue.settled((append,))
            if append.done is not None:
                outcomes.append((append.done, stored))
        else:
            self.state_watch.recover()
        self._announce(outcomes)
        self._loop.call_soon_threadsafe(self.committed.set)
        self._measure(without_room=False)

    # -- transactions that others ask for -------------------------------------------------------

    def transact(self, function: Callable[[BufferFile], T]) -> T:
        """Run a function in its own transaction."""
        with self._transaction():
            result = function(self.file)
        self._measure(without_room=self.state_watch.state.full and self._queue.has_readings)
        self._loop.call_soon_threadsafe(self.committed.set)
        return result

    def report_losses(self, report: Callable[[Loss], Entry]) -> int:
        """Turn counted losses into rows that report them; return how many."""
        if self.is_crowded:
            return 0
        losses = self._queue.take_losses()
        if not losses and not has_losses(self.file.connection):
            return 0

        def move(file: BufferFile) -> int:
            file.count_losses(list(losses.values()))
            return file.report_losses(report, LOSSES_REPORTED_MAX)

        try:
            return self.transact(move)
        except BaseException:
            self._queue.put_back(losses)
            raise

    # -- the file, and how it fares -------------------------------------------------------------

    def _attach(self) -> None:
        """Open or begin the file. Raises BufferFileError."""
        self.attachment.attach()
        if self.file.room.lacks_commits:
            log.error(
                "the buffer's WAL is damaged: readings that were acknowledged last are lost, nobody knows how many; "
                "the disk or card that buffer.path is on is probably failing and should be replaced",
                path=str(self._settings.path),
            )
        self._measure(without_room=False)

    def _is_attached(self) -> bool:
        """Whether a file is open. If not, try to open or begin one."""
        if not self.attachment.is_attached:
            try:
                self._attach()
            except Exception as error:  # noqa: BLE001 - the thread goes on
                self._fail(error)
                self._queue.retry_after(RETRY_S)
                return False
        return True

    def _note_salvaged_rows(self) -> None:
        self.state_watch.state.rows = self.file.lanes.rows
        self._loop.call_soon_threadsafe(self.committed.set)

    def _measure_again(self, now_s: float) -> None:
        """Look for room while nothing waits, so that sensors are let in again."""
        watch = self.state_watch
        if watch.state.full or now_s >= watch.due_s:
            self._measure(without_room=False)
            self._queue.retry_after(RETRY_S if watch.cannot_store else 0.0)

    def _measure(self, *, without_room: bool) -> None:
        if not self.attachment.is_attached:
            return
        try:
            self.state_watch.measure(self.file, without_room=without_room)
        except (sqlite3.Error, OSError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Report once that the buffer fails; replace a corrupt file at once."""
        words = str(error) or type(error).__name__
        if isinstance(error, sqlite3.Error) and schema.is_corruption(error) and self.attachment.is_attached:
            try:
                self.attachment.replace(error)
            except (sqlite3.Error, OSError, BufferFileError) as problem:
                words = f"no new buffer could be begun: {problem}"
            else:
                self._queue.retry_after(0.0)
                return
        self.state_watch.fail(words)


def _lost_above_share(entries: Iterable[Entry], boot_id: str) -> list[Loss]:
    losses: dict[LossKey, Loss] = {}
    for entry in entries:
        datum = entry.datum
        at_us, sequence, boot = datum.received_us, datum.device_sequence, datum.device_boot or ""
        loss = Loss(entry.series.device, ABOVE_SHARE, boot_id, 1, at_us, at_us, boot, sequence, sequence)
        merge_losses(losses, (loss,))
    return list(losses.values())


def _announce(outcomes: Sequence[tuple[Done, bool]]) -> None:
    for done, committed in outcomes:
        try:
            done(committed)
        except Exception:
            # One sensor's connection must not cost the others their acknowledgements.
            log.exception("an acknowledgement failed")
