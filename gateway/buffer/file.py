"""One open buffer file and its transactions. Each part of the file has its own module.

Nothing here knows of threads: `commit_loop` owns the one thread that calls it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from gateway.buffer import schema
from gateway.buffer.boots import BootTable, Correction
from gateway.buffer.deletion import Deletion
from gateway.buffer.dropping import Dropping
from gateway.buffer.insert import insert_entries, insert_rows
from gateway.buffer.lanes import LaneReport, Lanes
from gateway.buffer.losses import count_losses, counted_losses, dropped_by_sensor, forget_losses, note_told, told_below
from gateway.buffer.quarantine import DROPPED, Quarantine
from gateway.buffer.read_rows import check_sqlite, gone_rows, read_rows, sequences_of
from gateway.buffer.room import Room
from gateway.buffer.rows import Entry, Lane, Loss, Outstanding, Position, Quarantined, Row, Series, Span, spans_of
from gateway.buffer.salvage.salvage import SALVAGE_PREFIX, Progress, kept_marks
from gateway.buffer.sensor_runs import DeviceRuns
from gateway.buffer.series import SeriesTable
from gateway.buffer.shares import Shares
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.reading import Mark, Recalled
from gateway.settings import BufferSettings


class BufferFile:
    """An open file. Methods that write need `with transaction()`. All raise sqlite3.Error if SQLite fails."""

    def __init__(  # noqa: PLR0913 - what a file needs
        self,
        settings: BufferSettings,
        boot_id: str,
        clock: Callable[[], BootClock],
        counts: Counter[str],
        salvaged: Sequence[Lane] = (),
        *,
        resume: Callable[[BootClock], None] | None = None,
    ) -> None:
        """Open or make the file, and open a lane in it, behind lanes whose rows are salvaged from other files.

        If the file keeps this boot's clock, `resume` gets it before `clock` is called.

        Each committed transaction adds to `counts`: `duplicate`, `conflict`, `below-window`, `quarantine-overflow`,
        `share-refused`, `dropped`, and the reasons for dropping: `buffer-full`, `above-share`, `too-old`. Raises
        sqlite3.Error, OSError, and BufferFileError if the file is of a newer version.
        """
        self._boot_id = boot_id
        self._clock = clock
        self._counts = counts
        self._tally: Counter[str] = Counter()
        self.inserted: list[Row] = []
        """Rows that the last transaction added to the current lane."""
        self.inserted_bytes = 0
        """Payload bytes of these rows."""
        self.connection = schema.connect(settings.path)
        try:
            self.room = Room(settings, self.connection)
        except BaseException:
            self.connection.close()
            raise
        try:
            check_sqlite(self.connection)
            self.room.prepare()
            self.id = schema.buffer_id(self.connection)
            self.lanes = Lanes(self.connection, boot_id, self.id)
            self.shares = Shares(settings, self.connection, self.room, self.lanes, self._tally)
            self.series = SeriesTable(self.connection, self.shares)
            self._runs = DeviceRuns(self.connection)
            self.boots = BootTable(self.connection, boot_id)
            kept = self.boots.kept()
            if resume is not None and kept is not None:
                resume(kept)
            self.quarantine = Quarantine(settings, self.connection, boot_id, self._tally, self._runs.remember_lost)
            self.deletion = Deletion(self.connection, self.room, self.lanes, self._runs, self.series, self.shares)
            self.dropping = Dropping(
                self.connection, clock, self._tally, self.room, self.boots, self.lanes, self.deletion, self.shares
            )
            with self.transaction():
                self.salvaged = {lane.name: self.lanes.adopt(lane) for lane in salvaged}
                """Numbers of these lanes in this file, by name."""
                self._open_lane()
                if self.room.lacks_commits:
                    now_us = boottime_us()
                    self.count_losses([Loss("", "buffer-unreadable", boot_id, 0, now_us, now_us)])
        except BaseException:
            self.abandon()
            raise

    def close(self) -> None:
        """Close the file, and keep its grown WAL for the next start."""
        self.room.close()

    def abandon(self) -> None:
        """Close the file without touching its content."""
        self.room.abandon()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction that is on disk when it ends. If it fails, the file and the memory are as before."""
        before = self.lanes.saved()
        self._tally.clear()
        self.inserted, self.inserted_bytes = [], 0
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            self.boots.save(self._clock(), boottime_us(), time.monotonic())
            yield
            self.lanes.save_counts()
            self.room.extend()
            self.connection.execute("COMMIT")
        except BaseException:
            self.lanes.restore(before)
            self.inserted, self.inserted_bytes = [], 0
            self.series.forget()
            self._runs.forget()
            self.boots.forget()
            self.shares.forget()
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            self.quarantine.measure()
            raise
        self.boots.settle()
        self._counts.update(self._tally)

    # -- rows -----------------------------------------------------------------------------------

    def insert(self, entries: Iterable[Entry]) -> None:
        """Append entries in order, without retransmissions."""
        new, with_lost = self._runs.judge(entries, self.lanes.current.number, self._tally)
        self.insert_judged(new)
        if with_lost:
            self.count_losses([dropped_by_sensor(entry, self._boot_id) for entry in with_lost])
        if self.inserted:
            self._runs.save_if_due(self.lanes.last, time.monotonic())

    def insert_judged(self, entries: Sequence[Entry]) -> None:
        """Append entries that are no retransmissions: the gateway's own, and input that was judged before."""
        first = Position(self.lanes.current.number, self.lanes.next_sequence)
        rows, event_from_us = insert_entries(self.connection, entries, first, self.series, self.quarantine.keep)
        if rows:
            self.shares.come(entries, first)
            self.lanes.added(len(rows), event_from_us)
            self.inserted += rows
            self.inserted_bytes += sum([len(row.datum.payload) for row in rows])

    def read(self, after: Position, limit: int) -> list[Row]:
        """Rows that follow a position; see `read_rows`."""
        return read_rows(self.connection, after, limit, self.lanes.last)

    def gone(self, spans: Iterable[Span]) -> list[Span]:
        """Rows of these spans that are gone."""
        return gone_rows(self.connection, spans)

    def outstanding(self, queued: Sequence[Entry]) -> Outstanding:
        """Everything that Kafka does not have yet. Entries in `queued` wait for their commit."""
        is_salvaging = not all(progress.ended for progress in self._salvages())
        return Outstanding(self.lanes.pending(queued), list(self.quarantine.spans()), is_salvaging)

    def recall(self, device: str, boot: str) -> Recalled:
        """See `SerialIntake.recall`."""
        stored = self._runs.recent_sequences(device, boot) | self.quarantine.sequences(boot)
        return Recalled(stored, told_below(self.connection, device, boot))

    # -- lanes ----------------------------------------------------------------------------------

    def begin_lane(self, reason: str, report: LaneReport) -> None:
        """Close the current lane, and open another; both are reported in the new lane."""
        self.lanes.save_floor()
        self._open_lane()
        self.report_lanes(reason, report)

    def report_lanes(self, reason: str, report: LaneReport) -> None:
        """Add rows that report the newest lane and the closed ones, unless they were reported before."""
        self.insert_judged(self.lanes.unreported(reason, report))

    def _open_lane(self) -> None:
        salvaging = (lane for progress in self._salvages() for lane in progress.lanes.values())
        self.lanes.open({*self.salvaged.values(), *salvaging})
        self.boots.forget_unneeded()

    # -- beside the rows ------------------------------------------------------------------------

    def marks(self, prefix: str) -> dict[str, bytes]:
        """The marks whose keys begin with `prefix`."""
        return schema.read_marks(self.connection, prefix)

    def keep_marks(self, marks: Iterable[Mark]) -> None:
        """Store or delete marks."""
        schema.keep_marks(self.connection, marks)

    def count_losses(self, losses: Sequence[Loss]) -> None:
        """Count readings that never became rows."""
        count_losses(self.connection, losses)
        note_told(self.connection, losses)

    def report_losses(self, report: Callable[[Loss], Entry], limit: int) -> int:
        """Turn loss counters into rows that report them; return how many."""
        losses = counted_losses(self.connection, limit)
        self.insert([report(loss) for loss in losses])
        forget_losses(self.connection, losses)
        return len(losses)

    def report_corrections(self, report: Callable[[Correction], Entry]) -> list[Correction]:
        """Add rows that correct times sent before their boot's clock was known; return the corrections."""
        corrections = self.boots.take_corrections()
        self.insert_judged([report(correction) for correction in corrections])
        return corrections

    def requeue(self, entries: Mapping[int, Entry], judged: Mapping[int, Entry]) -> None:
        """Take quarantined input out by its numbers, and append the entries made of it.

        Entries in `judged` were taken in once before: they are not compared with what their sensors sent.
        """
        # Another caller may have taken some of them.
        there = self.quarantine.find([*entries, *judged]).keys()
        self.insert([entry for number, entry in entries.items() if number in there])
        self.insert_judged([entry for number, entry in judged.items() if number in there])
        self.quarantine.drop(list(there))

    def lose_quarantined(self, numbers: Sequence[int]) -> int:
        """Drop quarantined input for good, counted as lost; return how many inputs there were."""
        lost = self.quarantine.lose(numbers, DROPPED)
        self._runs.save_now(self.lanes.last)
        return lost

    # -- damaged files --------------------------------------------------------------------------

    def adopt(self, rows: Sequence[Row], quarantined: Sequence[Quarantined], series: Mapping[int, Series]) -> None:
        """Take over quarantined input and rows of one lane of a damaged file, with their `series`.

        The rows go into the lane that `salvaged` gave them. A row whose series could not be read has no destination, so
        it goes to the quarantine. Rows that are here already stay.
        """
        needed = {row.series for row in rows} | {input_.series for input_ in quarantined}
        numbers = {number: self.series.number(found) for number, found in series.items() if number in needed}
        for input_ in quarantined:
            # The boot's clock may be lost, but the boot must be known.
            self.boots.add_unknown(input_.boot_id or self._boot_id)
            number = None if input_.series is None else numbers.get(input_.series)
            self.quarantine.keep(replace(input_, series=number))
        if not rows:
            return
        lane = self.lanes.find(rows[0].lane)
        there = {sequence for span in spans_of(rows) for sequence in sequences_of(self.connection, span)}
        new = [row for row in rows if row.sequence not in there]
        routed = [row for row in new if row.series in numbers]
        insert_rows(self.connection, [replace(row, series=numbers[row.series]) for row in routed])
        self.lanes.adopted(lane.number, len(routed))
        for row in routed:
            self.shares.adopted(series[row.series].device, Position(row.lane, row.sequence), len(row.datum.payload))
        judged = False
        for row in routed:
            datum = row.datum
            if datum.device_boot is not None and datum.device_sequence is not None:
                # Its sensor may send it again.
                boot, sequence, judged = datum.device_boot, datum.device_sequence, True
                self._runs.admit(series[row.series], boot, sequence, datum.payload, row.lane, datum.received_us)
        if judged:
            # These rows stand before the place from which windows catch up.
            self._runs.save_now(self.lanes.last)
        for row in new:
            if row.series not in numbers:
                # Nobody knows whose it is.
                unknown = Quarantined(
                    reason="salvaged-without-series", device="", subject="", boot_id=lane.boot_id, datum=row.datum
                )
                self.quarantine.keep(unknown)

    def _salvages(self) -> Iterable[Progress]:
        return kept_marks(self.marks(SALVAGE_PREFIX)).values()
