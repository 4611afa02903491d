"""The buffer: readings wait here, in one SQLite file, until Kafka's replicas have them.

The event loop calls this module. `commit_loop` has the one thread that uses the file.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import IO, TypeVar

from gateway.buffer import lock
from gateway.buffer.boots import Correction
from gateway.buffer.commit_loop import CommitLoop
from gateway.buffer.commit_queue import OWN_BYTES_MAX, CommitQueue, Done
from gateway.buffer.file import BufferFile
from gateway.buffer.lanes import LaneReport
from gateway.buffer.outgoing import OutgoingRows, replaced
from gateway.buffer.rows import PLAIN, Entry, Lane, Loss, Origin, Outstanding, Position, Row, Span, spans_of, without
from gateway.buffer.wear import Usage
from gateway.clock.gateway_clock import BootClock
from gateway.reading import BufferFileError, Mark, Recalled
from gateway.settings import BufferSettings

T = TypeVar("T")


class Buffer:
    """Readings on disk, in order, until they are confirmed.

    Its methods are called from the event loop, and none blocks it. Other work on the file is done by `run` and
    `transact`, on the buffer's thread.
    """

    def __init__(
        self,
        settings: BufferSettings,
        boot_id: str,
        clock: Callable[[], BootClock],
        resume: Callable[[BootClock], None] | None = None,
    ) -> None:
        """`clock` returns the gateway's clock as known now. It is called on any thread.

        If the file keeps a clock from an earlier start in this boot, `resume` gets it before `clock` is called.
        """
        self._settings = settings
        self.clock = clock
        """Returns the clock of this boot, as known now."""
        self.boot_id = boot_id
        self._queue = CommitQueue(settings)
        self._outgoing = OutgoingRows()
        self._commits = CommitLoop(settings, boot_id, clock, resume=resume, queue=self._queue, outgoing=self._outgoing)
        self._state_watch = self._commits.state_watch
        self.attachment = self._commits.attachment
        """The open file, and the damaged files that it replaced."""
        self.state = self._state_watch.state
        self.counts = self._commits.counts
        self.committed = self._commits.committed
        self._lock_file: IO[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop

    def open(self) -> None:
        """Open the file, begin this start's lane, and start the thread. Raises BufferFileError."""
        self._loop = asyncio.get_running_loop()
        self._lock_file = lock.acquire(self._settings.path)
        try:
            self._commits.open()
        except BaseException:
            self._lock_file.close()
            raise

    async def watch(self) -> None:
        """Wait until cancelled. Raises the error that ended the buffer's thread, as the daemon must not go on."""
        await asyncio.shield(self._commits.died)

    async def answers(self) -> None:
        """Wait until the buffer's thread has had a turn, even if it has no file now."""
        with suppress(BufferFileError):
            await self.run(lambda _: None)

    async def close(self) -> None:
        """Commit what was appended, as far as possible, and close the file."""
        self.attachment.stop_salvages()
        self._queue.close()
        await asyncio.to_thread(self._commits.join)
        await asyncio.to_thread(self.attachment.join_salvages)
        if self._lock_file is not None:
            self._lock_file.close()

    # -- asking the file ------------------------------------------------------------------------

    async def run(self, function: Callable[[BufferFile], T], buffer_id: str | None = None) -> T:
        """Run a function with the open file on the buffer's thread, between two commits. Raises BufferFileError.

        `buffer_id` names the file that the function's numbers belong to. In another file they would mean other rows.
        """

        def on_thread() -> T:
            file = self.attachment.file
            if buffer_id is not None and file.id != buffer_id:
                raise replaced()
            return function(file)

        return await asyncio.wrap_future(self._queue.call(on_thread))

    async def transact(self, function: Callable[[BufferFile], T], buffer_id: str | None = None) -> T:
        """Run a function as `run` does, in its own transaction. Raises BufferFileError."""
        return await self.run(lambda _: self._commits.transact(function), buffer_id)

    # -- what is known on the event loop --------------------------------------------------------

    @property
    def id(self) -> str:
        """The file's random name. It changes when a new file is begun."""
        return self.attachment.file.id

    @property
    def lane(self) -> Lane:
        """The lane that readings go into now."""
        return self.attachment.file.lanes.current

    @property
    def lane_has_hole(self) -> bool:
        """Whether numbers of that lane were skipped, so that it is not complete beyond them."""
        return self.attachment.file.lanes.has_hole

    @property
    def direct_topics(self) -> frozenset[str]:
        """Kafka topics whose rows may go to Kafka before the disk."""
        return self._outgoing.direct_topics

    @property
    def kafka_first_s(self) -> float:
        """Seconds that Kafka has for a row before it is written to the disk; 0 if the disk always comes first."""
        return self._settings.kafka_first_s

    @property
    def usage(self) -> Usage:
        """Readings and bytes that came in since usage was last written to the file."""
        return self._commits.meter.so_far(time.monotonic())

    @property
    def may_drop(self) -> bool:
        """Whether rows may be dropped that Kafka never had."""
        return self._settings.when_full == "drop-oldest" or bool(self._settings.age_max_s)

    @property
    def drops(self) -> int:
        """Grows before rows are dropped. Rows that were read before it grew may be gone."""
        return self._outgoing.drops

    @property
    def is_full(self) -> bool:
        """Whether there is no room, or was none some seconds ago."""
        return self._state_watch.has_said_full

    @property
    def cannot_store(self) -> bool:
        """See `Intake.cannot_store`."""
        return self._state_watch.cannot_store and not self._outgoing.admits

    @property
    def refuses_by_share(self) -> bool:
        """See `ListenerIntake.refuses_by_share`."""
        return self._commits.refuses_by_share

    @property
    def owes_correction(self) -> bool:
        """Whether records were sent with times that are better known by now."""
        return self.attachment.file.boots.owes_correction

    # -- what comes in --------------------------------------------------------------------------

    def append(
        self,
        entries: Sequence[Entry],
        done: Done | None = None,
        marks: Sequence[Mark] = (),
        origin: Origin = PLAIN,
    ) -> None:
        """Store entries, and keep or forget marks, in one commit; `done` is as in `Intake.take`."""
        if not self._queue.append(entries, marks, done, origin) and done is not None:
            self._loop.call_soon(done, False)

    def append_own(self, entry: Entry, done: Done) -> None:
        """Store one of the gateway's own events. They have some room beyond `bytes_max`, so they can say "full"."""
        full = self.state.bytes_used >= self._settings.bytes_max + OWN_BYTES_MAX
        if full or not self._queue.append_own(entry, done):
            self._loop.call_soon(done, False)

    async def store_own(self, entries: Sequence[Entry], marks: Sequence[Mark]) -> None:
        """Store events of the gateway and marks, all in one commit of their own.

        Raises BufferFileError if the disk fails, or if not even the gateway's events have room.
        """
        if entries and self._commits.is_crowded:
            raise BufferFileError("the buffer is full")

        def store(file: BufferFile) -> None:
            file.keep_marks(marks)
            file.insert_judged(entries)

        await self.transact(store)

    def count_loss(self, loss: Loss) -> None:
        """Count readings that are gone. The count is on disk with the next commit, within `DELETE_DELAY_S`."""
        self._queue.count_loss(loss)

    async def begin_lane(self, reason: str, report: LaneReport) -> None:
        """Store rows in a new lane from now on. `report` makes the rows that report it. Raises BufferFileError."""

        def begin(file: BufferFile) -> None:
            file.begin_lane(reason, report)
            self._outgoing.follow(file.lanes.current.number)

        await self.transact(begin)

    async def report_corrections(self, report: Callable[[Correction], Entry]) -> list[Correction]:
        """Add rows that correct times known better by now. Return the corrections; none if even they have no room.

        Raises BufferFileError.
        """
        if self._commits.is_crowded:
            return []
        return await self.transact(lambda file: file.report_corrections(report))

    async def report_losses(self, report: Callable[[Loss], Entry]) -> int:
        """Turn counted losses into rows that report them; return how many. Raises BufferFileError."""
        return await self.run(lambda _: self._commits.report_losses(report))

    async def recall(self, device: str, boot: str, held: range) -> Recalled:
        """See `SerialIntake.recall`. Raises BufferFileError."""

        def recall(file: BufferFile) -> Recalled:
            if not file.knows_ring(device, boot):
                # Before any loss of the run: later starts reckon from here, whatever Kafka alone has by then.
                self._commits.transact(lambda same: same.note_ring(device, boot, held))
            return file.recall(device, boot, held)

        entries = [entry.quarantined or entry for entry in self._queue.waiting()]
        # The boot of a serial sensor has a random part, so no two sensors share one.
        of_run = [entry.datum.device_sequence for entry in entries if entry.datum.device_boot == boot]
        waiting = frozenset(sequence for sequence in of_run if sequence is not None)
        found = await self.run(recall)
        if waiting <= found.stored:
            return found
        # Readings, perhaps of an earlier line, wait for room: they may yet be stored or refused. The windows were read
        # first, because readings that are stored during the wait push older sequences out of them.
        await self._until_settled()
        return found._replace(stored=found.stored | waiting)

    async def _until_settled(self) -> None:
        """Wait until everything appended before is stored or refused, or has its numbers.

        Raises BufferFileError if too much waits.
        """
        settled: asyncio.Future[bool] = self._loop.create_future()

        def done(stored: bool) -> None:  # noqa: FBT001 - the form of Intake's `done`
            # The caller may be gone, as its port was closed.
            if not settled.done():
                settled.set_result(stored)

        self.append((), done)
        if not await settled:
            raise BufferFileError("too much waits to be stored")

    # -- what goes out --------------------------------------------------------------------------

    async def read(self, after: Position, limit: int) -> tuple[str, list[Row]]:
        """Rows that follow a position, oldest first, and the id of their file.

        Rows that the disk does not give are passed over. `Attachment.rewinds` grows when they should be tried again.
        """
        buffer_id, rows = self._outgoing.newest(after, limit)
        if rows is not None:
            return buffer_id, rows
        return await self.run(lambda file: (file.id, self._commits.read_newest(after, limit)))

    async def read_backlog(self, after: Position, limit: int, before_lane: int) -> tuple[str, list[Row]]:
        """Rows as `read` gives them, of lanes before `before_lane` only."""

        def read(file: BufferFile) -> tuple[str, list[Row]]:
            # Cut here, not in SQL. SQL would silently leave out rows whose lane a damaged page made up.
            return file.id, [row for row in self._commits.read_file(after, limit) if row.lane < before_lane]

        return await self.run(read)

    async def keep_from_drop(
        self, buffer_id: str, spans: Sequence[Span], since: int, under_way: Sequence[Span] = ()
    ) -> list[Span]:
        """Protect rows that are being sent from being dropped, until the next call. Return those that are gone already.

        `since` is the value of `drops` before they were read. `under_way` are other rows that are still being sent.
        Raises BufferFileError.
        """
        kept = [*spans, *under_way]
        if self._outgoing.keep_from_drop(buffer_id, kept, since):
            return []

        def keep(file: BufferFile) -> list[Span]:
            # This runs between two commits, so nothing is being dropped.
            gone = file.gone(spans)
            self._outgoing.keep_from_drop_now(kept)
            return gone

        return await self.run(keep, buffer_id)

    def release(self) -> None:
        """End the protection of `keep_from_drop`, as nothing is being sent any more."""
        self._outgoing.keep_from_drop_now([])
        if self.state.full:
            self._queue.retry_after(0.0)

    def confirm(self, buffer_id: str, spans: Sequence[Span]) -> None:
        """Take in that Kafka or the quarantine has rows: they are acknowledged, and deleted from the file.

        `buffer_id` is the file that the rows were read from. If another file has taken its place, it has none of these
        rows, or has them under other numbers.
        """
        if self._outgoing.confirm(buffer_id, spans):
            self._queue.delete_soon()
        self._commits.release()
        if self.state.full:
            # Sensors wait for the room that the deletion makes.
            self._queue.delete_now()
            self._queue.retry_after(0.0)

    def keep(self, marks: Iterable[Mark], *, soon: bool = False) -> None:
        """Store marks with the next commit, or `soon` in one of their own. A crash takes what was not stored."""
        self._outgoing.keep(marks)
        if soon:
            self.commit_soon()

    def commit_soon(self) -> None:
        """Commit within a second, for the sake of what every commit stores, such as the clock of this boot."""
        self._queue.commit_soon()

    async def go_direct(self, topics: frozenset[str], buffer_id: str) -> None:
        """Let rows of these Kafka topics go to Kafka before the disk: it takes them at once, and keeps them for good.

        Raises BufferFileError.
        """
        if not topics:
            self.end_direct()
            return

        def go(_: BufferFile) -> None:
            # The next start has to know that Kafka may have rows of which this file knows nothing. Both on the thread:
            # another file may take this one's place between them.
            self._commits.go_ahead()
            self._outgoing.go_direct(topics)

        await self.run(go, buffer_id)
        self._queue.look_again()

    def end_direct(self) -> None:
        """Have every row written to the disk again."""
        self._outgoing.go_direct(frozenset())
        self._queue.look_again()

    async def quarantine(self, buffer_id: str, reports: Sequence[Entry], refused: Sequence[Row]) -> None:
        """Quarantine rows that Kafka refused, append the reports that carry them, and delete the rows, in one commit.

        Raises BufferFileError if the disk refuses. The rows then stay where they are.
        """

        def move(file: BufferFile) -> list[Span]:
            stored = file.front.without(spans_of(refused))
            file.insert_judged(reports)
            for span in stored:
                file.deletion.delete_whole(span)
            self._outgoing.forget_newest()
            return stored

        def move_and_confirm(file: BufferFile) -> None:
            stored = self._commits.transact(move)
            # Rows of the front are on the disk now, in the quarantine. A session that ends meanwhile must not leave
            # them here.
            file.front.written(without(refused, stored))

        await self.run(move_and_confirm, buffer_id)
        self._commits.release()

    async def give_up(self, buffer_id: str, refused: Sequence[Row]) -> Sequence[Row]:
        """Note rows that Kafka refuses and the disk does not take. Call it again while that lasts.

        If it lasts, the rows that only memory has are given up: their senders are told that they are not stored.
        Returns these rows. Raises BufferFileError.
        """
        return await self.run(lambda _: self._commits.give_up(refused), buffer_id)

    async def outstanding(self) -> Outstanding:
        """The lanes that still hold rows, with their range of event times, and everything else that may still be sent.

        All of it is read at one moment: whatever moves from one place to another is in one of them.
        """
        # Entries that wait for their commit are pending too: no watermark may pass them.
        return await self.run(lambda file: file.outstanding(self._queue.waiting()))

    async def boot_clock(self, boot_id: str) -> BootClock:
        """The clock of one boot of this gateway, as far as known. Raises BufferFileError if there is no such boot."""
        if boot_id == self.boot_id:
            return self.clock()

        def former(file: BufferFile) -> BootClock:
            if file.boots.may_be_learnt(boot_id) and self.clock().known:
                # This boot's clock gives the former boot its bound at the next commit, so make one now.
                self._commits.transact(lambda _: None)
            return file.boots.clock(boot_id)

        return await self.run(former)

    async def owe_correction(self, boot_id: str) -> None:
        """Note that records of a boot go out while its clock is unknown: on disk, or in memory while the disk fails.

        Raises BufferFileError if another file takes this one's place.
        """
        await self.run(lambda _: self._commits.owe_correction(boot_id))
