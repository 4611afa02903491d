"""The thread that owns the one SQLite connection: it numbers what waits, and commits what Kafka does not have in time.

Rows of topics that Kafka takes at once join the front, where the forwarder finds them. If Kafka has a row within
`buffer.disk_after_ms`, the row is acknowledged by that and never written. Everything else is committed. What arrives
while a commit is being synced goes into the next one (group commit). What is committed is acknowledged only after
COMMIT has returned. With `synchronous=FULL`, that means "on disk". If there is no room, or the disk fails, readings are
held in order until they can be stored, or until Kafka has them.
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
from gateway.buffer.file import AHEAD_MARK, SIGN_OF_LIFE_S, BufferFile
from gateway.buffer.losses import has_losses
from gateway.buffer.outgoing import OutgoingRows, replaced
from gateway.buffer.room import row_bytes
from gateway.buffer.rows import Entry, Loss, LossKey, Position, Row, sizes_of
from gateway.buffer.shares import ABOVE_SHARE, Judged
from gateway.buffer.state import StateWatch
from gateway.buffer.wear import WriteMeter, add_usage
from gateway.clock.gateway_clock import BootClock
from gateway.reading import BufferFileError, Doubt, Mark
from gateway.settings import BufferSettings

AGE_CHECK_S = 60.0
READ_AGAIN_S = 30.0
"""Seconds until readers look again for rows that they have passed over, as the disk could not be read."""
REFUSED_AFTER_S = 10.0
"""Seconds for which nothing may be written until what needs the disk is refused, if Kafka takes what others bring."""
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
            on_attach=self._begin_file,
            on_rows=self._note_salvaged_rows,
        )
        self.state_watch = StateWatch(settings)
        self.meter = WriteMeter(time.monotonic())
        self.died: asyncio.Future[None]
        """Gets the error that ended the thread, if one does."""
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._age_due_s = 0.0
        self._says_ahead = False
        """Whether the file says that rows may go to Kafka without the disk."""
        self._quiet_due_s = math.inf
        """When what waits for a commit of something else gets one of its own."""
        self._committed_s = time.monotonic()
        """When the last commit was made."""
        self._made_room = False
        """Whether the last commit dropped rows to make room."""
        self._read_again_s = math.inf
        """When readers should look again for rows that they were not given, as the file could not be read."""
        self.refuses_by_share = False
        """Whether the event loop announces appends now that were refused for their device's share."""

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
                calls, closing = self._queue.wait(
                    self._due_s, cannot_store=self.state_watch.cannot_store, admits=lambda: self._outgoing.admits
                )
                for function, future in calls:
                    self._settle(future, function)
                if not closing:
                    self._admit()
                    self._send_back()
                self._commit(time.monotonic(), closing=closing)
            self._end()
        except BaseException as error:  # noqa: BLE001 - a bug: acknowledgements would wait for ever
            self._loop.call_soon_threadsafe(self.died.set_exception, error)

    def _end(self) -> None:
        """Store what can be stored, refuse the rest, and close the file."""
        while (self._queue.has_readings or self._outgoing.front) and not self.state_watch.cannot_store:
            self._commit(time.monotonic(), closing=True)
        self._queue.readmit(self._outgoing.front.take_back())
        self._loop.call_soon_threadsafe(self.release)
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
        count_due_s = self.file.shares.count_due_s if self.attachment.is_attached else math.inf
        due_s = min(self.state_watch.due_s, count_due_s, self._read_again_s)
        if self.state_watch.cannot_store:
            # The queue's retries wake the thread, as somebody may free or mend the disk.
            return due_s
        age_due_s = self._age_due_s if self._settings.age_max_s else math.inf
        return min(due_s, age_due_s, self._front_due_s(), self._quiet_due())

    def _front_due_s(self) -> float:
        """When the front has to be written, as Kafka has not got its oldest row."""
        since_s = self._outgoing.front.since_s
        if since_s is None:
            return math.inf
        if self._queue.is_crowded:
            return since_s
        delay_ms = self._settings.disk_after_ms if self._outgoing.admits else self._settings.commit_delay_ms
        return since_s + delay_ms / 1000

    def _quiet_due(self) -> float:
        """When what waits for another commit gets one of its own."""
        if not self._outgoing.has_marks and not (self.attachment.is_attached and self.file.is_ahead):
            self._quiet_due_s = math.inf
        elif self.attachment.is_attached and self.file.is_crowded:
            self._quiet_due_s = 0.0
        elif self._quiet_due_s == math.inf:
            # After a long rest it is due at once: a start after a crash reckons from the last commit.
            self._quiet_due_s = max(time.monotonic(), self._committed_s + SIGN_OF_LIFE_S)
        return self._quiet_due_s

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

    def _announce_stored(self, appends: Iterable[Append]) -> None:
        self._announce([(append.done, True) for append in appends if append.done is not None])

    def _announce(self, outcomes: Sequence[tuple[Done, bool]]) -> None:
        if outcomes:
            self._loop.call_soon_threadsafe(_announce, outcomes)

    def _refuse_by_share(self, appends: Iterable[Append]) -> None:
        """Announce appends that were refused for their device's share. On the event loop."""
        self.refuses_by_share = True
        _announce([(append.done, False) for append in appends if append.done is not None])
        self.refuses_by_share = False

    # -- rows that Kafka may have first ---------------------------------------------------------

    def _begin_file(self) -> None:
        """Take up a newly opened file. Its numbers are others, so what was in the front is numbered again."""
        self._says_ahead = False
        former = self._outgoing.begin(self.file)
        again = former.take_back()
        settled = former.take_settled()
        self._queue.released(settled)
        self._announce_stored(settled)
        for append in again:
            for entry in append.entries:
                # Kafka may have it under its former number.
                entry.datum.doubt = entry.datum.doubt or Doubt.REDELIVERED
        self._queue.readmit(again)

    def _admit(self) -> None:
        """Number the oldest appends that need no disk, and show their rows to the forwarder."""
        topics = self._outgoing.direct_topics
        if not topics or not self.attachment.is_attached:
            return
        admitted: list[Row] = []
        failure: Exception | None = None
        has_empty = False
        if self._outgoing.admits:
            self._bound_memory()
            append = None
            try:
                for append in self._queue.admissible(topics):
                    rows = self.file.admit(append)
                    self._queue.admitted(append)
                    admitted += rows
                    has_empty |= not rows
            except Exception as error:  # noqa: BLE001 - what cannot be admitted is committed, or refused by that
                failure = error if schema.is_of_disk(error) else None
                if append is not None:
                    self._judge_unknown(append, is_of_disk=failure is not None)
        if admitted:
            size = sum(sizes_of(admitted))
            self._outgoing.extend(admitted, size)
            self.meter.add(len(admitted), size)
            self._note_rows()
            self._loop.call_soon_threadsafe(self.committed.set)
        if has_empty:
            self._loop.call_soon_threadsafe(self.release)
        if failure is not None:
            # Behind the rows that were admitted: it may put another file in place of theirs.
            self._fail(failure)
        if self.state_watch.has_stopped_for(REFUSED_AFTER_S):
            self._refuse_first(topics)

    def _bound_memory(self) -> None:
        """Forget some of what waits to be stored quietly, if the disk fails: what Kafka takes must not wait for it."""
        if self.state_watch.state.failing is not None and self.file.is_crowded:
            self.file.forget_settled()

    def _refuse_first(self, topics: frozenset[str]) -> None:
        """Refuse what needs the disk, as nothing was stored for long. Others must not wait, as Kafka takes theirs."""
        refused = self._queue.refuse_first(topics, failing=self.state_watch.state.failing is not None)
        self._announce([(append.done, False) for append in refused if append.done is not None])
        if self._queue.is_crowded:
            # Nor must others lack the memory that is taken by what no broker answers for.
            self._give_up(self.file.front.older(REFUSED_AFTER_S))

    def _judge_unknown(self, append: Append, *, is_of_disk: bool) -> None:
        """Decide what becomes of an append whose sender is not known, as the file could not be asked."""
        if not is_of_disk:
            append.is_unfit = True
            return
        now_s = time.monotonic()
        append.unknown_since_s = append.unknown_since_s or now_s
        if self.state_watch.has_stopped_for(REFUSED_AFTER_S) or now_s >= append.unknown_since_s + REFUSED_AFTER_S:
            # Nobody can have it, and others must not wait behind it.
            self._queue.admitted(append)
            self._queue.released((append,))
            self._announce([(append.done, False)] if append.done is not None else [])
            self._queue.look_again()

    def release(self) -> None:
        """Acknowledge the appends of the front that may be acknowledged now. On the event loop."""
        settled = self._outgoing.front.take_settled()
        if settled:
            self._queue.released(settled)
            self._note_rows()
            _announce([(append.done, True) for append in settled if append.done is not None])

    def give_up(self, rows: Iterable[Row]) -> Sequence[Row]:
        """Refuse the appends of rows that Kafka refuses and the disk has not taken for long: nobody can have them.

        Returns these rows.
        """
        over = self.file.front.refused(rows, REFUSED_AFTER_S)
        self._give_up(over)
        return over

    def _give_up(self, rows: Sequence[Row]) -> None:
        """Refuse the appends of rows of the front."""
        if not rows:
            return
        appends = self.file.give_up(rows)
        self._outgoing.forget_newest()
        self._queue.released(appends)
        self._note_rows()
        self._announce([(append.done, False) for append in appends if append.done is not None])
        # Those behind them need not wait any longer.
        self._loop.call_soon_threadsafe(self.release)

    # -- group commits --------------------------------------------------------------------------

    def _commit(self, now_s: float, *, closing: bool) -> None:
        """Commit what waits, in one transaction. Deletions come first, as they make room for new rows."""
        if not closing and self._queue.must_wait(now_s):
            return
        if not self._is_attached():
            return
        topics = self._outgoing.direct_topics if self._outgoing.admits and not closing else frozenset()
        bytes_max, full = self.file.room.commit_bytes_max, self.state_watch.state.full
        due = self._queue.due(now_s, bytes_max, closing=closing, full=full, topics=topics)
        if due.is_time_to_delete:
            # Taken after `due` is made: rows that are confirmed from here on set a new time to delete.
            due.confirmed = self._outgoing.take_confirmed()
        age_due = bool(self._settings.age_max_s) and now_s >= self._age_due_s
        if age_due and not self.file.lanes.rows:
            age_due, self._age_due_s = False, now_s + AGE_CHECK_S
        due.is_quiet_due = closing or now_s >= self._quiet_due()
        due.is_front_due = closing or now_s >= self._front_due_s()
        dropped = self.counts["dropped"]
        if not (due or age_due or self.state_watch.state.failing is not None):
            self._look_again(now_s)
            return
        due.marks = self._outgoing.take_marks()
        try:
            if self.state_watch.state.failing is not None:
                # A program that read the file may have kept SQLite from beginning the WAL again. On a full disk, no
                # commit then finds room behind the WAL's end, and only a successful commit makes a checkpoint.
                with suppress(sqlite3.Error):
                    self.file.room.checkpoint()
            self.file.shares.follow(now_s)
            outcome = self._store(due, age_due=age_due, closing=closing)
        except Exception as error:  # noqa: BLE001 - nothing is acknowledged, and the thread goes on
            self._outgoing.put_back(due.confirmed)
            self._outgoing.put_marks_back(due.marks)
            self._queue.put_back(due.losses)
            self._fail(error)
            appends = [*due.own, *due.readings]
            if appends and not schema.is_of_disk(error) and self.attachment.is_attached:
                self._commit_one_by_one(appends)
            return
        self.state_watch.recover()
        self._finish(due, outcome, dropped=dropped)
        is_all = due.has_all and len(outcome.settled) == len(due.readings)
        if is_all or (self._outgoing.is_behind and not self._queue.is_crowded):
            self._queue.delay_appends(now_s)

    def _store(self, due: Due, *, age_due: bool, closing: bool) -> "_Outcome":
        """Commit what is due; return what became of its readings.

        If rows are dropped, rows confirmed since are added to `due` first: those that Kafka has are not lost.
        """
        file = self.file
        now_s = time.monotonic()
        usage = self.meter.due(now_s)
        self._made_room = False
        with self._transaction():
            if self.state_watch.state.failing is not None:
                file.probe()
            coming = sum(append.disk_bytes for append in due.readings)
            drops = self._settings.when_full == "drop-oldest"
            if age_due or (drops and (file.room.is_full(coming) or file.shares.limits(coming, now_s))):
                due.confirmed += self._outgoing.take_confirmed()
                due.marks |= self._outgoing.take_marks()
            rest = file.deletion.delete_some(due.confirmed)
            file.keep_marks(due.marks.values())
            if due.losses:
                file.count_losses(list(due.losses.values()))
            if age_due and not rest:
                more = file.dropping.drop_aged(int(self._settings.age_max_s * 1e6), self._outgoing.spared())
                self._age_due_s = now_s + (0 if more else AGE_CHECK_S)
            is_front_stored = self._write_front(due, may_drop=drops and not rest)
            if is_front_stored:
                outcome = self._fitting(due.readings, may_drop=drops and not rest, now_s=now_s)
            else:
                # What came later has to wait for it.
                outcome, due.own = _Outcome((), ()), []
            # Inserted after the dropping: otherwise an event could be dropped at once, and still be announced as
            # stored.
            file.insert_judged([entry for append in due.own for entry in append.entries])
            if outcome.lost:
                file.count_losses(_lost_above_share(outcome.lost, self._boot_id))
            file.keep_marks([mark for append in outcome.stored for mark in append.marks])
            file.insert([entry for append in outcome.stored for entry in append.entries])
            if usage is not None:
                add_usage(file.connection, self._boot_id, usage)
            is_all_stored = is_front_stored and len(outcome.settled) == len(due.readings)
            self._store_quietly(due, is_end=closing and is_all_stored)
        self._quiet_due_s = math.inf
        if rest:
            self._outgoing.put_back(rest)
            self._queue.delete_now()
        if usage is not None:
            self.meter.reset(now_s)
        return outcome

    def _store_quietly(self, due: Due, *, is_end: bool) -> None:
        """Store what nobody waits for, in the open transaction."""
        if due.is_quiet_due:
            self.file.save_windows()
        if is_end:
            self.file.keep_marks([Mark(AHEAD_MARK, None)])

    def _write_front(self, due: Due, *, may_drop: bool) -> bool:
        """Write the front if it is due. Returns whether nothing of it is due any more."""
        file = self.file
        if not due.is_front_due or not file.front:
            return True
        bytes_max = file.room.commit_bytes_max
        coming = sum([row_bytes(row.datum.size) for row in file.front.rows(bytes_max)])
        if file.room.is_full(coming):
            if may_drop:
                self._made_room = True
                file.dropping.drop_oldest(coming, self._outgoing.spared())
            if file.room.is_full(coming):
                return False
        return file.write_front(bytes_max)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """The file's transaction. After it, the rows that it added are counted and kept in memory."""
        with self.file.transaction():
            yield
        self._committed_s = time.monotonic()
        if self.file.written:
            if self._outgoing.written(self.file.written):
                self._queue.delete_soon()
            self._loop.call_soon_threadsafe(self.release)
        self._outgoing.extend(self.file.inserted, self.file.inserted_bytes)
        self.meter.add(len(self.file.inserted), self.file.inserted_bytes)

    def _fitting(self, readings: Sequence[Append], *, may_drop: bool, now_s: float) -> "_Outcome":
        """Choose the readings to store, in order. A device above its share is refused, or drops its own oldest rows."""
        file = self.file
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
        # Before anything may put another file in place of this one.
        stored = [*due.own, *self._without_held(outcome.stored)]
        if due.is_front_due and self._outgoing.front:
            # A large front takes several commits.
            without_room = not self.file.written
        else:
            without_room = len(outcome.settled) < len(due.readings)
        # If deletions or droppings made room, the next commit follows at once.
        is_stuck = (
            without_room
            and not outcome.settled
            and not self.file.written
            and not self._outgoing.has_confirmed
            and self.counts["dropped"] == dropped
        )
        self.state_watch.is_stuck = is_stuck
        self.state_watch.note_progress(made=bool(due.confirmed or outcome.settled or self.file.written))
        self._measure(without_room=without_room or self._made_room)
        self._queue.retry_after(RETRY_S if is_stuck else 0.0)
        self._announce_stored(stored)
        if outcome.refused:
            self._loop.call_soon_threadsafe(self._refuse_by_share, outcome.refused)
        if self.file.inserted:
            self._loop.call_soon_threadsafe(self.committed.set)

    def _without_held(self, stored: Sequence[Append]) -> Sequence[Append]:
        """Have stored appends wait for earlier ones of their devices, which are not durable. Returns the others."""
        held = {id(append) for append in self._outgoing.front.hold(stored)}
        if not held:
            return stored
        self._loop.call_soon_threadsafe(self.release)
        return [append for append in stored if id(append) not in held]

    def _commit_one_by_one(self, appends: Sequence[Append]) -> None:
        """Commit each append by itself: one that no disk can store must not keep out the others for ever."""
        is_any_stored = False
        for append in appends:
            stored = False
            try:
                with self._transaction():
                    self.file.keep_marks(append.marks)
                    self.file.insert(append.entries)
                stored = is_any_stored = True
            except Exception as error:
                if schema.is_of_disk(error):
                    break
                log.exception("something could not be stored, and is refused")
            self._queue.settled((append,))
            if stored:
                self._announce_stored([append] if append.is_own else self._without_held([append]))
            elif append.done is not None:
                self._announce([(append.done, False)])
        if is_any_stored:
            self.state_watch.recover()
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

    def go_ahead(self) -> None:
        """Store that rows may go to Kafka without the disk, unless the file says so already."""
        if not self._says_ahead:
            self.transact(lambda file: file.keep_marks([Mark(AHEAD_MARK, self._boot_id.encode())]))
            self._says_ahead = True

    def owe_correction(self, boot_id: str) -> None:
        """See `Buffer.owe_correction`. A start after a crash owes what was only in memory: see `BufferFile`."""
        file = self.file
        try:
            if not file.boots.owes(boot_id):
                self.transact(lambda same: same.boots.owe(boot_id))
        except (sqlite3.Error, OSError) as error:
            self._fail_in(file, error)
            file.boots.owe_later(boot_id)

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

    # -- reading for the forwarder --------------------------------------------------------------

    def read_newest(self, after: Position, limit: int) -> list[Row]:
        """Rows that follow a position. If the file cannot be read, those in memory: Kafka needs no disk for them."""
        file = self.file
        try:
            return self._outgoing.read_newest(file, after, limit)
        except (sqlite3.Error, OSError) as error:
            self._pass_over(file, error)
            return self._outgoing.read_memory(file, after, limit)

    def read_file(self, after: Position, limit: int) -> list[Row]:
        """Rows of the file that follow a position; none if it cannot be read."""
        file = self.file
        try:
            return self._outgoing.read(file, after, limit)
        except (sqlite3.Error, OSError) as error:
            self._pass_over(file, error)
            return []

    def _pass_over(self, file: BufferFile, error: sqlite3.Error | OSError) -> None:
        """Have readers pass over what the disk does not give. Raises the error if it is another one.

        Raises BufferFileError if another file has taken this one's place.
        """
        if not schema.is_unreadable(error):
            raise error
        self._fail_in(file, error)
        self._read_again_s = min(self._read_again_s, time.monotonic() + READ_AGAIN_S)

    def _send_back(self) -> None:
        """Send readers back to rows that they have passed over, if it is time."""
        if time.monotonic() >= self._read_again_s:
            self._read_again_s = math.inf
            self.attachment.rewinds += 1
            self._loop.call_soon_threadsafe(self.committed.set)

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
        self.file.shares.follow(time.monotonic())

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
        # They stand before the newest rows, where nobody looks any more.
        self._outgoing.forget_newest()
        self._note_rows()
        self._loop.call_soon_threadsafe(self.committed.set)

    def _note_rows(self) -> None:
        self.state_watch.state.rows = self.file.lanes.rows + len(self.file.front)

    def _look_again(self, now_s: float) -> None:
        """Go on counting shares, and look for room while nothing waits, so that sensors are let in again."""
        watch = self.state_watch
        if now_s >= self.file.shares.count_due_s:
            try:
                self.file.shares.follow(now_s)
            except (sqlite3.Error, OSError) as error:
                self._fail(error)
                self._queue.retry_after(RETRY_S)
                return
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

    def _fail_in(self, file: BufferFile, error: Exception) -> None:
        """Report that a file fails. Raises BufferFileError if another one has taken its place."""
        self._fail(error)
        if self.file is not file or not self.attachment.is_attached:
            raise replaced() from error

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
