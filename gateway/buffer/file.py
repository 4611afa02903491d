"""One open buffer file and its transactions. Each part of the file has its own module.

Nothing here knows of threads: `commit_loop` owns the one thread that calls it. Only `front` may be used by others.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from gateway.buffer import rings, schema
from gateway.buffer.boots import SEEN_SAVE_S, BootTable, Correction
from gateway.buffer.commit_queue import Append
from gateway.buffer.deletion import Deletion
from gateway.buffer.dropping import Dropping
from gateway.buffer.front import Front
from gateway.buffer.insert import insert_entries, insert_rows
from gateway.buffer.lanes import NOTHING_US, LaneReport, Lanes
from gateway.buffer.losses import (
    UNCLEAN_END,
    count_losses,
    counted_losses,
    dropped_by_sensor,
    forget_losses,
)
from gateway.buffer.quarantine import DROPPED, Quarantine
from gateway.buffer.read_rows import check_sqlite, gone_rows, read_rows, sequences_of
from gateway.buffer.room import Room
from gateway.buffer.rows import (
    Entry,
    Lane,
    Loss,
    Outstanding,
    PendingRows,
    Position,
    Quarantined,
    Row,
    Series,
    Span,
    earliest_event_us,
    sizes_of,
    spans_of,
)
from gateway.buffer.salvage.progress import SALVAGE_PREFIX, Progress, kept_marks
from gateway.buffer.sensor_runs import RUNS_MAX, DeviceRuns
from gateway.buffer.series import SeriesTable
from gateway.buffer.shares import Shares
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.reading import Mark, Recalled
from gateway.settings import BufferSettings

AHEAD_MARK = "ahead/boot"
"""Mark that is kept while rows may go to Kafka without the disk, with the boot's id. A clean end forgets it."""
OFFSETS_BEHIND = Mark("uplink/offsets-behind", b"1")
"""Mark that is kept while Kafka may have more of this gateway's records than the kept offsets say."""
PROBE = Mark("probe", b"")
"""Mark that is written and deleted in one commit."""
SIGN_OF_LIFE_S = 900.0
"""Seconds between two commits, at most, while rows go to Kafka without the disk. So long, marks and duplicate windows
wait for a commit that is made for something else."""
SIGN_OF_LIFE_US = int((SIGN_OF_LIFE_S + SEEN_SAVE_S) * 1e6)
"""Microseconds after a boot's latest known time within which its next commit came, if there was anything to lose, and
if the disk took it."""
UNSAVED_RUNS_MAX = RUNS_MAX // 2
UNSAVED_SERIES_MAX = 1_000
"""Duplicate windows and series that wait in memory for a commit of something else. While the disk fails, some are
forgotten beyond that."""


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
        `share-refused`, `dropped`, and the reasons for dropping: `buffer-full`, `above-share`, `too-old`. The front
        adds `spared`. Raises sqlite3.Error, OSError, and BufferFileError if the file is of a newer version.
        """
        self._boot_id = boot_id
        self._clock = clock
        self._counts = counts
        self._tally: Counter[str] = Counter()
        self.front = Front(counts)
        """Rows of the current lane that are not in the file yet."""
        self.written: list[Row] = []
        """Rows of the front that the last transaction wrote."""
        self.inserted: list[Row] = []
        """Further rows that the last transaction added to the current lane."""
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
            self.series = SeriesTable(self.connection, self.shares, self.front)
            self._runs = DeviceRuns(self.connection, self.front)
            self.boots = BootTable(self.connection, boot_id)
            kept = self.boots.kept()
            if resume is not None and kept is not None:
                resume(kept)
            self.quarantine = Quarantine(settings, self.connection, boot_id, self._tally, self._runs.remember_lost)
            self.deletion = Deletion(self.connection, self.room, self.lanes, self._runs, self.series, self.shares)
            self.dropping = Dropping(
                self.connection, clock, self._tally, self.room, self.boots, self.lanes, self.deletion, self.shares
            )
            cut_off = self._cut_off()
            former = None if cut_off is None else self.boots.find(cut_off.boot_id)
            with self.transaction():
                self.salvaged = {lane.name: self.lanes.adopt(lane) for lane in salvaged}
                """Numbers of these lanes in this file, by name."""
                self._open_lane()
                if self.room.lacks_commits:
                    now_us = boottime_us()
                    self.count_losses([Loss("", "buffer-unreadable", boot_id, 0, now_us, now_us)])
                if cut_off is not None:
                    self._take_up(cut_off, former)
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
        self._forget_last()
        self.series.begin()
        self._runs.begin()
        is_at_commit = False
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            self.boots.save(self._clock(), boottime_us(), time.monotonic())
            self.boots.save_owed()
            if self._runs.has_forgotten:
                # What the windows lack may be in Kafka, so nobody may call it lost.
                self.keep_marks([rings.begin_again()])
            yield
            self.series.save()
            self.lanes.save_counts(self.front.first_behind(self.written))
            self.room.extend()
            is_at_commit = True
            self.connection.execute("COMMIT")
        except BaseException:
            self.lanes.restore(before, may_be_stored=is_at_commit)
            self._forget_last()
            self.series.restore()
            self._runs.restore()
            self.boots.forget()
            self.shares.forget()
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            self.quarantine.measure()
            raise
        if self.inserted or self.written:
            # A commit that changes nothing writes nothing.
            self.lanes.forget_spent()
        self.series.saved()
        self._runs.committed()
        self.boots.settle()
        self._counts.update(self._tally)

    def _forget_last(self) -> None:
        self.written, self.inserted, self.inserted_bytes = [], [], 0

    # -- rows -----------------------------------------------------------------------------------

    def admit(self, append: Append) -> list[Row]:
        """Make rows of an append, without retransmissions. They join the front. Needs no transaction.

        Raises sqlite3.Error if the file cannot be asked what it knows of the senders; nothing is changed then.
        """
        self._runs.load(append.entries)
        known = self.series.numbers
        numbers = {
            entry.series: known.get(entry.series) or self.series.number(entry.series) for entry in append.entries
        }
        new, _ = self._runs.judge(append.entries, self.lanes.current.number, self._counts)
        if new:
            self.lanes.skip_spent()
        lane, sequence = self.lanes.current.number, self.lanes.next_sequence
        rows = [
            Row(lane, number, numbers[entry.series], entry.datum) for number, entry in enumerate(new, start=sequence)
        ]
        if rows:
            self.lanes.number(len(rows))
            self.lanes.go_ahead()
        series = [entry.series for entry in new]
        self.front.add(append, rows, series, min(map(earliest_event_us, new), default=NOTHING_US))
        return rows

    def write_front(self, bytes_max: int | None = None) -> bool:
        """Write the front, as Kafka does not have it in time. Returns whether all of it is written.

        `bytes_max` bounds the payloads.
        """
        if not self.written:
            pending = self.front.pending()
            rows = self.written = self.front.rows(bytes_max)
            if rows:
                insert_rows(self.connection, rows)
                self.lanes.added(len(rows), rows[-1].sequence, NOTHING_US if pending is None else pending.event_from_us)
                series = {number: self.series.find(number) for number in {row.series for row in rows}}
                self.shares.come(
                    (series[row.series].device, Position(row.lane, row.sequence), row.datum.size) for row in rows
                )
                self._runs.written(
                    (series[row.series], row.datum.device_boot)
                    for row in rows
                    if row.datum.device_boot is not None and row.datum.device_sequence is not None
                )
        return self.front.first_behind(self.written) is None

    def give_up(self, rows: Iterable[Row]) -> list[Append]:
        """Give up rows of the front that nobody will have; see `Front.give_up`. Returns their appends.

        Needs no transaction, and asks the disk nothing: the windows of the front's rows are in memory.
        """
        given_up, appends = self.front.give_up(rows)
        for row, series in given_up:
            if row.datum.device_boot is not None and row.datum.device_sequence is not None:
                self._runs.forget(series, row.datum.device_boot, row.datum.device_sequence)
        if given_up:
            # The lane ends there, and another one begins as soon as the disk allows it.
            self.lanes.give_up(given_up[0][0].sequence)
        return appends

    def save_windows(self) -> None:
        """Store what tells retransmissions of rows that only Kafka has."""
        self._runs.save_now(self.lanes.last)

    @property
    def is_ahead(self) -> bool:
        """Whether rows got numbers since the last commit."""
        return self.lanes.is_ahead

    @property
    def is_crowded(self) -> bool:
        """Whether so much waits in memory to be stored quietly that it should not wait any longer."""
        return self._runs.unsaved >= UNSAVED_RUNS_MAX or self.series.unsaved >= UNSAVED_SERIES_MAX

    def forget_settled(self) -> None:
        """Forget much of what waits so, as the disk fails, but nothing that rows of the front need.

        A sensor whose window is forgotten may send a reading again that Kafka has: it then stands there twice.
        """
        self._runs.forget_oldest(UNSAVED_RUNS_MAX // 2)
        if self.series.unsaved >= UNSAVED_SERIES_MAX:
            self.series.forget_settled()

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
        if not entries:
            return
        first = Position(self.lanes.current.number, self.lanes.next_sequence)
        rows, event_from_us = insert_entries(self.connection, entries, first, self.series, self.quarantine.keep)
        if rows:
            self.shares.come(
                (entry.series.device, Position(row.lane, row.sequence), row.datum.size)
                for entry, row in zip(entries, rows, strict=True)
            )
            self.lanes.number(len(rows))
            self.lanes.added(len(rows), rows[-1].sequence, event_from_us)
            self.inserted += rows
            self.inserted_bytes += sum(sizes_of(rows))

    def read(self, after: Position, limit: int) -> list[Row]:
        """Rows that follow a position; see `read_rows`."""
        return read_rows(self.connection, after, limit, self.lanes.last)

    def gone(self, spans: Iterable[Span]) -> list[Span]:
        """Rows of these spans that are neither in the file nor in the front."""
        return gone_rows(self.connection, self.front.without(spans))

    def outstanding(self, queued: Sequence[Entry]) -> Outstanding:
        """Everything that Kafka does not have yet. Entries in `queued` wait for their commit."""
        is_salvaging = not all(progress.ended for progress in self._salvages())
        newest = PendingRows.joined(self.front.pending(), PendingRows.of(queued))
        return Outstanding(self.lanes.pending(newest), list(self.quarantine.spans()), is_salvaging)

    def recall(self, device: str, boot: str, held: range) -> Recalled:
        """See `SerialIntake.recall`."""
        stored = self._runs.recent_sequences(device, boot) | self.quarantine.sequences(boot)
        told_below = rings.told_below(self.connection, device, boot)
        known_from = rings.known_from(self.connection, device, boot)
        return Recalled(
            stored,
            # What came before the first known number may have gone to another gateway.
            min(stored, default=held.start) if told_below is None else told_below,
            held.stop if known_from is None else known_from,
        )

    def knows_ring(self, device: str, boot: str) -> bool:
        """Whether the file says from which number on it knows all of a sensor's run."""
        return not self._runs.has_forgotten and rings.known_from(self.connection, device, boot) is not None

    def note_ring(self, device: str, boot: str, held: range) -> None:
        """Have the file say it, of a sensor that holds these numbers."""
        _, told_below, _ = self.recall(device, boot, held)
        rings.note_known(self.connection, device, boot, told_below, held.stop)

    # -- lanes ----------------------------------------------------------------------------------

    def begin_lane(self, reason: str, report: LaneReport) -> None:
        """Close the current lane, and open another; both are reported in the new lane."""
        self.write_front()
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

    def probe(self) -> None:
        """Have the open transaction write to the disk. A commit that changes nothing succeeds on a dead one."""
        self.keep_marks([PROBE, Mark(PROBE.key, None)])

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
        rings.note_told(self.connection, losses)

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
        # Input may be a copy of a row that only the front has. Before the input goes, the disk must have one of them.
        self.write_front()
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

    def _cut_off(self) -> Loss | None:
        """What an end without a close may have lost: readings that nobody could send again, in the front."""
        found = self.marks(AHEAD_MARK).get(AHEAD_MARK)
        if found is None:
            return None
        boot_id = found.decode(errors="replace")
        seen_us = self.boots.seen_us(boot_id)
        # The disk may have failed long before the end. Of another boot, nobody knows how long that was.
        last_us = boottime_us() if boot_id == self._boot_id else seen_us + SIGN_OF_LIFE_US
        return Loss("", UNCLEAN_END, boot_id, 0, seen_us, last_us)

    def _take_up(self, cut_off: Loss, former: BootClock | None) -> None:
        """Take up an end without a close. `former` is the clock of its boot as it was on disk."""
        self.count_losses([cut_off])
        self.keep_marks([Mark(AHEAD_MARK, None), OFFSETS_BEHIND, rings.begin_again()])
        if former is not None and not former.known and not self.boots.owes(cut_off.boot_id):
            # The disk may have failed before it took that a correction is owed.
            self.boots.owe(cut_off.boot_id)

    def take_up_cut_off(self, *, is_end: bool) -> None:
        """Take up what a damaged file's marks say of its last commits, and whether its program ended with it."""
        cut_off = self._cut_off()
        if cut_off is not None and is_end:
            self.count_losses([cut_off])
        # The marks that were read may be old, or too few.
        self.keep_marks([Mark(AHEAD_MARK, None), OFFSETS_BEHIND, rings.begin_again()])

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
            self.shares.adopted(series[row.series].device, Position(row.lane, row.sequence), row.datum.size)
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
