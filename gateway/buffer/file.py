"""One open buffer file and this start's lane in it: what a transaction does, and undoes.

Nothing here knows of threads: `buffer` owns the one thread that calls it.
"""

import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import force_setattr
from msgspec.structs import replace as replace_fields

from gateway import reading
from gateway.buffer import losses as buffer_losses
from gateway.buffer import quarantine as buffer_quarantine
from gateway.buffer import schema as buffer_schema
from gateway.buffer.boots import BootTable, Correction
from gateway.buffer.duplicate_window import Verdict
from gateway.buffer.insert import ANY, TICKED, TIMED, UNTIMED, Form, insert_new, insert_rows
from gateway.buffer.lanes import NOTHING_US, EventFloor, LaneCount, LaneReport, forget_lanes, read_counts
from gateway.buffer.room import Room
from gateway.buffer.rows import (
    START,
    Doubt,
    Entry,
    Lane,
    Loss,
    PendingLane,
    Position,
    Quarantined,
    QuarantinedSpan,
    Row,
    Series,
    Span,
    joined,
    span_at,
)
from gateway.buffer.salvage import salvage as buffer_salvage
from gateway.buffer.sensor_runs import DeviceRuns
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.reading import BufferFileError, Mark, Recalled
from gateway.settings import BufferSettings

SERIES_MAX = 10_000
"""Series that are kept although no row needs them, so that devices need not be stored anew each time."""
SERIES_CACHED_MAX = 50_000
"""Series whose numbers are remembered in memory."""
PRUNED_ROWS_MAX = 100_000
"""Rows beyond which series are not looked through for those that nothing needs."""
FLOOR_SAVE_S = 10.0
"""A risen floor of pending event times is written down no more often than this: it is a page for the card."""
READ_BYTES_MAX = 4_000_000
"""Payload bytes that one read gives at the most, whatever the number of rows."""
READ_ROWS = 1_000
"""Rows taken from SQLite at a time."""
ROW_BYTES = 90
"""What a row takes on disk beside its payload, its share of the indexes included; rounded up."""
DELETED_ROWS_MAX = 20_000
"""Confirmed rows that one transaction deletes."""
EMPTY_LANES_MAX = 100
"""Lanes of this start that are kept although nothing is left of them."""
DELETED_SPANS_MAX = 5_000
"""The same for runs of rows between which others stay."""
PAGE_BYTES = 4_096
DROPPED_ROWS_MAX = 5_000
DROP_BYTES = 64_000
"""What `drop-oldest` drops at a time: counting it costs less than the commit that it makes room for."""
USAGE_HOURS = 48
TICK_AGE_US_MAX = 2**31 * 1_020
"""How old its tick may make a reading: half a wrap of 32 bits, of milliseconds of the slowest clock that a sensor may
have. That tick may be a small one: it was kept since its sensor started."""

NO_LANE = Lane(0, "", "", "")

# Many rows in one answer, their payloads one behind the other: SQLite gives Python's lock up at each row that it is
# asked for by itself, and gets it back only when the event loop has nothing to do.
_SELECT_MANY = """
    SELECT
        json_group_array(json_array(
            lane, sequence, series, received_us, event_us, event_error_us, tick_ms, device_boot, device_sequence, '',
            doubt, device_time_us
        )),
        json_group_array(CASE typeof(payload) WHEN 'blob' THEN length(payload) END),
        CAST(group_concat(payload, '') AS BLOB)
    FROM (SELECT * FROM reading WHERE (lane, sequence) > (?, ?) ORDER BY lane, sequence LIMIT ?)
"""
_PAYLOAD_BYTES = """
    SELECT total(bytes) FROM (
        SELECT length(payload) AS bytes FROM reading WHERE (lane, sequence) > (?, ?) ORDER BY lane, sequence LIMIT ?
    )
"""
_rows = msgspec.json.Decoder(list[Row])
_sizes = msgspec.json.Decoder(list[int])


@dataclass(slots=True)
class _State:
    """What changes with a transaction and must be as before when it is rolled back."""

    lane: Lane = NO_LANE
    lanes: dict[int, LaneCount] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    """Lanes whose marks have to be written."""
    rows: int = 0
    floor: EventFloor = field(default_factory=EventFloor)
    floor_saved_us: int = NOTHING_US
    floor_due_s: float = 0.0


class BufferFile:
    """An open file. Methods that write belong into `with transaction()`; all raise sqlite3.Error where SQLite fails."""

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

        `resume` is told what the file keeps of this boot's clock, before `clock` is asked for it.

        `counts` is added to by each committed transaction: `duplicate`, `conflict`, `below-window`,
        `quarantine-overflow`, `dropped`, and the reasons of that: `buffer-full`, `too-old`. Raises sqlite3.Error,
        OSError, and BufferFileError where the file is of a newer version.
        """
        self._boot_id = boot_id
        self._clock = clock
        self._counts = counts
        self._tally: Counter[str] = Counter()
        self._state = _State()
        self._series_numbers: dict[Series, int] = {}
        self._series_pruned_at = SERIES_MAX
        self.connection = buffer_schema.connect(settings.path)
        try:
            self.room = Room(settings, self.connection)
        except BaseException:
            self.connection.close()
            raise
        try:
            _check_sqlite(self.connection)
            self.room.prepare()
            self.id = buffer_schema.buffer_id(self.connection)
            self._state.lanes = read_counts(self.connection)
            self._state.rows = sum(count.rows for count in self._state.lanes.values())
            self._runs = DeviceRuns(self.connection)
            self.boots = BootTable(self.connection, boot_id)
            kept = self.boots.kept()
            if resume is not None and kept is not None:
                resume(kept)
            self._quarantine = buffer_quarantine.Quarantine(settings, self.connection, boot_id, self._remember_lost)
            with self.transaction():
                self.salvaged = {lane.name: self._adopt_lane(lane) for lane in salvaged}
                """Those lanes' names, to their numbers here."""
                self._open_lane()
                if self.room.lacks_commits:
                    now_us = boottime_us()
                    self.count_losses([Loss("", "buffer-unreadable", boot_id, 0, now_us, now_us)])
            self.inserted: list[Row] = []
            """Rows that the last transaction added to `lane`."""
            self.inserted_bytes = 0
            """What their payloads have."""
        except BaseException:
            self.abandon()
            raise

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return self._state.rows

    @property
    def lane(self) -> Lane:
        """The lane that rows go into now."""
        return self._state.lane

    @property
    def lanes_behind(self) -> int:
        """Lanes before this one that hold rows."""
        return sum(1 for number, count in self._state.lanes.items() if count.rows and number != self.lane.number)

    @property
    def next_sequence(self) -> int:
        """The sequence that the next row of this lane gets."""
        return self._state.lanes[self.lane.number].next

    def close(self) -> None:
        """Close the file; the next start finds its WAL as it is."""
        self.room.close()

    def abandon(self) -> None:
        """Let go of a file that was renamed and is damaged."""
        self.room.abandon()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, on disk when it ends; memory follows the file, whichever it is."""
        before = replace(self._state, floor=replace(self._state.floor), lanes=dict(self._state.lanes))
        self._tally.clear()
        self.inserted, self.inserted_bytes = [], 0
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            self.boots.save(self._clock(), boottime_us(), time.monotonic())
            yield
            self._save_counts()
            self.room.extend()
            self.connection.execute("COMMIT")
        except BaseException:
            self._state = before
            before.touched.clear()
            self.inserted, self.inserted_bytes = [], 0
            # Numbers and windows that this transaction gave are void: they are read again when needed.
            self._series_numbers.clear()
            self._runs.forget()
            self.boots.forget()
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            self._quarantine.measure()
            raise
        self.boots.settle()
        self._counts.update(self._tally)

    # -- writing --------------------------------------------------------------------------------

    def insert(self, entries: Iterable[Entry]) -> None:
        """Append entries in order, each retransmission left out."""
        admit, lane = self._runs.admit, self.lane.number
        tally = self._tally
        new: list[Entry] = []
        losses: list[Loss] = []
        for entry in entries:
            boot, number = entry.device_boot, entry.device_sequence
            if boot is not None and number is not None:
                verdict = admit(entry.series, boot, number, entry.payload, lane, entry.received_us)
                if verdict is not Verdict.NEW:
                    tally[verdict.value] += 1
                    if verdict is Verdict.DUPLICATE:
                        continue
                    if verdict is Verdict.CONFLICT:
                        new.append(replace_fields(entry, doubt=Doubt.CONFLICT))
                        continue
                elif entry.lost is not None:
                    losses.append(self._loss_of_sensor(entry, boot, entry.lost))
            new.append(entry)
        self.insert_judged(new)
        if losses:
            self.count_losses(losses)
        if self.inserted:
            self._runs.save_if_due(self.last, time.monotonic())

    def _loss_of_sensor(self, entry: Entry, boot: str, lost: tuple[int, int]) -> Loss:
        first, last = lost
        received_us = entry.received_us
        count = last - first + 1
        return Loss(
            entry.series.device,
            reading.SENSOR_DROPPED,
            self._boot_id,
            count,
            received_us,
            received_us,
            boot,
            first,
            last,
        )

    def recall(self, device: str, boot: str) -> Recalled:
        """See `SerialIntake.recall`."""
        stored = self._runs.recent_sequences(device, boot) | self._quarantine.sequences(boot)
        return Recalled(stored, buffer_losses.told_below(self.connection, device, boot))

    def insert_judged(self, entries: Iterable[Entry]) -> None:
        """Append entries that are no retransmissions: the gateway's own, and what was judged when it first came in."""
        state = self._state
        lane = self.lane.number
        numbers = self._series_numbers
        sequence = self.next_sequence
        event_from_us = NOTHING_US
        rows: list[Row] = []
        values: list[object] = []
        forms: set[Form | None] = set()
        for entry in entries:
            if entry.quarantined is not None:
                self._quarantine.keep(entry.quarantined, self._tally)
            series = numbers.get(entry.series)
            if series is None:
                series = self._series_number(entry.series)
            event_us, received_us, tick_ms = entry.event_us, entry.received_us, entry.tick_ms
            error_us, doubt, device_time_us = entry.event_error_us, entry.doubt, entry.device_time_us
            boot, number, payload = entry.device_boot, entry.device_sequence, entry.payload
            rows.append(
                Row(
                    lane,
                    sequence,
                    series,
                    received_us,
                    event_us,
                    error_us,
                    tick_ms,
                    boot,
                    number,
                    payload,
                    doubt,
                    device_time_us,
                )
            )
            sequence += 1
            if doubt or device_time_us is not None or (error_us and event_us is None):
                forms.add(None)
                event_us = _earliest_us(entry)
            elif event_us is not None:
                if tick_ms is None:
                    forms.add(TIMED)
                    values += (series, received_us, event_us, error_us, boot, number, payload)
                else:
                    forms.add(ANY)
                    values += (series, received_us, event_us, error_us, tick_ms, boot, number, payload)
            elif tick_ms is not None:
                forms.add(TICKED)
                event_us = _earliest_us(entry)
                values += (series, received_us, tick_ms, boot, number, payload)
            else:
                forms.add(UNTIMED)
                event_us = received_us
                values += (series, received_us, boot, number, payload)
            if event_us < event_from_us:  # noqa: PLR1730 - a call of min() takes three times as long
                event_from_us = event_us
        if not rows:
            return
        insert_new(self.connection, rows, values, forms)
        state.lanes[lane] = state.lanes[lane].plus(len(rows))
        state.rows += len(rows)
        state.floor.add(event_from_us)
        self.inserted += rows
        self.inserted_bytes += sum([len(row.payload) for row in rows])
        self._save_floor()

    def keep_marks(self, marks: Iterable[Mark]) -> None:
        """Keep or forget what ingresses want remembered."""
        for key, value in marks:
            if value is None:
                self.connection.execute("DELETE FROM mark WHERE key = ?", (key,))
            else:
                self.connection.execute("INSERT OR REPLACE INTO mark VALUES (?, ?)", (key, value))

    def delete_some(self, confirmed: Sequence[Span]) -> list[Span]:
        """Delete rows that Kafka or the quarantine has, as many as one transaction may; give those that are left.

        Where others stay between them, each span is a page to write, however few rows it has.
        """
        rows_left, bytes_left = DELETED_ROWS_MAX, self.room.commit_bytes_max
        for index, span in enumerate(confirmed):
            if index == DELETED_SPANS_MAX or rows_left <= 0 or bytes_left <= 0:
                return list(confirmed[index:])
            part = Span(span.lane, span.first, min(span.last, span.first + rows_left - 1))
            before = self._state.rows
            rest = self.delete(part, bytes_left)
            gone = before - self._state.rows
            rows_left -= gone
            if self.room.is_tight():
                bytes_left -= PAGE_BYTES + gone * ROW_BYTES
            first = part.last + 1 if rest is None else rest.first
            if first <= span.last:
                return [Span(span.lane, first, span.last), *confirmed[index + 1 :]]
        return []

    def delete(self, confirmed: Span, bytes_max: int | None = None) -> Span | None:
        """Delete rows that Kafka or the quarantine has; give those that are left for the next transaction.

        `bytes_max` is what may be written for it where the disk has no room; a whole commit's, if it is not given.
        """
        state = self._state
        last = min(confirmed.last, confirmed.first + DELETED_ROWS_MAX - 1)
        tight = self.room.is_tight()
        if tight:
            bytes_max = self.room.commit_bytes_max if bytes_max is None else bytes_max
            last = self._last_within(Span(confirmed.lane, confirmed.first, last), bytes_max)
        span, tight_bytes = Span(confirmed.lane, confirmed.first, last), None
        if tight:
            tight_bytes = min(self.room.commit_bytes_max, self.room.free_page_bytes()) // 4
        if not self._runs.save_before_deletion(span, self.last, tight_bytes):
            return confirmed
        gone = self.connection.execute(
            "DELETE FROM reading WHERE lane = ? AND sequence BETWEEN ? AND ?", (confirmed.lane, confirmed.first, last)
        ).rowcount
        state.rows -= gone
        if confirmed.lane in state.lanes:
            state.lanes[confirmed.lane] = state.lanes[confirmed.lane].minus(gone)
            state.touched.add(confirmed.lane)
        if confirmed.lane == self.lane.number:
            # Rows before these may wait still: for a partition that takes none at present.
            (front,) = self.connection.execute(
                "SELECT min(sequence) FROM reading WHERE lane = ?", (confirmed.lane,)
            ).fetchone()
            state.floor.settle((self.next_sequence if front is None else front) - 1, self.next_sequence)
        # It looks at every row: where many wait, it waits too.
        if len(self._series_numbers) > self._series_pruned_at and state.rows <= PRUNED_ROWS_MAX:
            self._prune_series()
        return None if last == confirmed.last else Span(confirmed.lane, last + 1, confirmed.last)

    def delete_whole(self, span: Span) -> None:
        """Delete rows, however many these are, in the open transaction."""
        rest: Span | None = span
        while rest is not None:
            rest = self.delete(rest)

    def _last_within(self, span: Span, bytes_max: int) -> int:
        """The last sequence of a span up to which its rows take no more than this; its first at least."""
        (last,) = self.connection.execute(
            """SELECT max(sequence) FROM (
                SELECT sequence, sum(length(payload) + ?) OVER (ORDER BY sequence) AS bytes
                FROM reading WHERE lane = ? AND sequence BETWEEN ? AND ?
            ) WHERE bytes <= ?""",
            (ROW_BYTES, *span, bytes_max),
        ).fetchone()
        return span.first if last is None else int(last)

    def drop_oldest(self, coming_bytes: int, spared: Sequence[Span] = ()) -> None:
        """Drop the oldest rows, each counted as lost, until there is room for more, or as many as one commit may.

        Those of `spared`, which are `joined`, stay: Kafka has them, or is about to.
        """
        bytes_left, after = self.room.commit_bytes_max, START
        while bytes_left > 0 and self.room.is_full(coming_bytes):
            dropped, size = self._drop_front("buffer-full", min(bytes_left, DROP_BYTES), after, spared)
            if dropped is None:
                return
            bytes_left, after = bytes_left - size, Position(dropped.lane, dropped.last)

    def drop_aged(self, age_us: int, spared: Sequence[Span] = ()) -> bool:
        """Drop some rows that waited longer than this, each counted as lost; tell whether there may be more.

        Rows of a boot whose wall clock was never known stay: how old they are is not known either. So do those of
        `spared`, as above.
        """
        lanes = self.connection.execute(
            """SELECT number, boot_id FROM lane
            WHERE EXISTS (SELECT 1 FROM reading WHERE lane = number) ORDER BY number"""
        ).fetchall()
        now = self._clock()
        for lane, boot_id in lanes:
            cutoff_us = boottime_us() - age_us
            if boot_id != self._boot_id:
                then = self.boots.find(boot_id)
                if then is None or not (then.known and now.synced):
                    continue
                wall_us = now.at(boottime_us()) - age_us
                cutoff_us = wall_us - then.offset_us(wall_us - then.offset_us(0))
                if not then.synced:
                    # Surely as old as that, wherever in its bound it lies.
                    cutoff_us -= then.error_us(cutoff_us) or 0
            start = Position(lane, -1)
            dropped, _ = self._drop_front("too-old", self.room.commit_bytes_max, start, spared, cutoff_us)
            if dropped is not None:
                return True
        return False

    def _drop_front(
        self, reason: str, bytes_max: int, after: Position, spared: Sequence[Span], before_us: int | None = None
    ) -> tuple[Span | None, int]:
        """Drop the first rows behind a position that are not spared; which, and what they took in bytes.

        With `before_us` those of its lane that were received before only. One at least, if any, and no more than
        `bytes_max` otherwise.
        """
        found = self.connection.execute(
            "SELECT lane, sequence, length(payload), received_us FROM reading WHERE (lane, sequence) > (?, ?)"
            " ORDER BY lane, sequence LIMIT ?",
            (*self._behind_spared(after, spared), DROPPED_ROWS_MAX),
        )
        span: Span | None = None
        size = 0
        for of, sequence, payload_bytes, received_us in found:
            # Up to the first that stays, whatever comes behind it.
            if before_us is not None and (of != after.lane or received_us >= before_us):
                break
            if span is not None and (span.lane != of or size + payload_bytes + ROW_BYTES > bytes_max):
                break
            if span_at(spared, of, sequence) is not None:
                break
            size += payload_bytes + ROW_BYTES
            span = Span(of, sequence if span is None else span.first, sequence)
        found.close()
        if span is None:
            return None, 0
        losses = buffer_losses.losses_of_rows(self.connection, span, reason)
        before = self._state.rows
        self.delete_whole(span)
        buffer_losses.count_losses(self.connection, losses)
        for counted in ("dropped", reason):
            self._tally[counted] += before - self._state.rows
        return span, size

    def _behind_spared(self, after: Position, spared: Sequence[Span]) -> Position:
        """The position before the first row that is not spared."""
        while True:
            first = self.connection.execute(
                "SELECT lane, sequence FROM reading WHERE (lane, sequence) > (?, ?) ORDER BY lane, sequence LIMIT 1",
                after,
            ).fetchone()
            span = None if first is None else span_at(spared, *first)
            if span is None:
                return after
            after = Position(span.lane, span.last)

    def count_losses(self, losses: Sequence[Loss]) -> None:
        """Count readings that never came to be rows."""
        buffer_losses.count_losses(self.connection, losses)
        buffer_losses.note_told(self.connection, losses)

    def report_corrections(self, report: Callable[[Correction], Entry]) -> list[Correction]:
        """Add rows that correct what was forwarded before its boot's clock was known; which."""
        corrections = self.boots.take_corrections()
        self.insert_judged([report(correction) for correction in corrections])
        return corrections

    def report_losses(self, report: Callable[[Loss], Entry], limit: int) -> int:
        """Turn loss counters into rows that report them; how many."""
        losses = buffer_losses.counted_losses(self.connection, limit)
        self.insert([report(loss) for loss in losses])
        buffer_losses.forget_losses(self.connection, losses)
        return len(losses)

    def drop_quarantined(self, numbers: Sequence[int]) -> int:
        """Take quarantined input out, which goes elsewhere; how much of it there was."""
        return self._quarantine.drop(numbers)

    def lose_quarantined(self, numbers: Sequence[int]) -> int:
        """Drop quarantined input for good, counted as lost; how much of it there was."""
        lost = self._quarantine.lose(numbers, buffer_quarantine.DROPPED)
        self._runs.save_now(self.last)
        return lost

    def _remember_lost(self, input_: Quarantined) -> None:
        """What was never judged is in no window: a later recall would tell of it as lost once more."""
        boot, sequence = input_.device_boot, input_.device_sequence
        if input_.series is None and boot is not None and sequence is not None:
            self._runs.remember((input_.device, input_.topic or "", boot), sequence, input_.payload)

    def adopt(self, rows: Sequence[Row], quarantined: Sequence[Quarantined], series: Mapping[int, Series]) -> None:
        """Take over rows of one lane of a damaged file, into the lane that `salvaged` gave it, and quarantined input.

        Their series are `series`. A row whose series could not be read has nobody to go to: it is kept in the
        quarantine. What is here already stays.
        """
        needed = {row.series for row in rows} | {input_.series for input_ in quarantined}
        numbers = {number: self._series_number(found) for number, found in series.items() if number in needed}
        for input_ in quarantined:
            # Its clock may be lost; that there was such a boot must be known.
            self.boots.add_unknown(input_.boot_id or self._boot_id)
            number = None if input_.series is None else numbers.get(input_.series)
            self._quarantine.keep(msgspec.structs.replace(input_, series=number), self._tally)
        if not rows:
            return
        boot_id = self.lane_of(rows[0].lane).boot_id
        there = self._sequences(Span(rows[0].lane, rows[0].sequence, rows[-1].sequence))
        new = [row for row in rows if row.sequence not in there]
        routed = [row for row in new if row.series in numbers]
        insert_rows(self.connection, [replace_fields(row, series=numbers[row.series]) for row in routed])
        self._state.rows += len(routed)
        number = rows[0].lane
        count = self._state.lanes.get(number, LaneCount(opened=True, closed=True))
        self._state.lanes[number] = msgspec.structs.replace(count, rows=count.rows + len(routed))
        judged = [row for row in routed if row.device_boot is not None and row.device_sequence is not None]
        for row in judged:
            # Its sensor may send it again.
            boot, sequence = str(row.device_boot), int(row.device_sequence or 0)
            self._runs.admit(series[row.series], boot, sequence, row.payload, row.lane, row.received_us)
        if judged:
            # They stand before the place that the windows are caught up from.
            self._runs.save_now(self.last)
        for row in new:
            if row.series not in numbers:
                self._quarantine.keep(_without_series(row, boot_id), self._tally)

    def _sequences(self, span: Span) -> set[int]:
        found = self.connection.execute(
            "SELECT sequence FROM reading WHERE lane = ? AND sequence BETWEEN ? AND ?", span
        )
        return {sequence for (sequence,) in found}

    def add_usage(self, seconds: float, readings: int, stored_bytes: int, disk_bytes: int) -> None:
        """Add to what this hour of this boot brought."""
        hour = boottime_us() // 3_600_000_000
        self.connection.execute(
            """INSERT INTO usage (boot_id, hour, seconds, readings, stored_bytes, disk_bytes)
            VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (boot_id, hour) DO UPDATE SET
                seconds = seconds + excluded.seconds, readings = readings + excluded.readings,
                stored_bytes = stored_bytes + excluded.stored_bytes, disk_bytes = disk_bytes + excluded.disk_bytes""",
            (self._boot_id, hour, seconds, readings, stored_bytes, disk_bytes),
        )
        self.connection.execute("DELETE FROM usage WHERE number <= (SELECT max(number) FROM usage) - ?", (USAGE_HOURS,))

    # -- reading --------------------------------------------------------------------------------

    def read(self, after: Position, limit: int) -> list[Row]:
        """Rows that follow a position, in order: all lanes, oldest first.

        `READ_BYTES_MAX` may cut the list short, but for its first row.
        """
        rows: list[Row] = []
        left_bytes = READ_BYTES_MAX
        while len(rows) < limit:
            wanted = min(limit - len(rows), READ_ROWS)
            while (size := self._payload_bytes(after, wanted)) > left_bytes and wanted > 1:
                wanted //= 2
            if rows and size > left_bytes:
                break
            found = self._read_some(after, wanted)
            rows += found
            if len(found) < wanted:
                break
            left_bytes -= size
            after = Position(found[-1].lane, found[-1].sequence)
        return rows

    def _payload_bytes(self, after: Position, limit: int) -> int:
        (size,) = self.connection.execute(_PAYLOAD_BYTES, (*after, limit)).fetchone()
        return int(size)

    def _read_some(self, after: Position, limit: int) -> list[Row]:
        try:
            fields, lengths, payloads = self.connection.execute(_SELECT_MANY, (*after, limit)).fetchone()
            rows, sizes = _rows.decode(fields), _sizes.decode(lengths)
        except (sqlite3.OperationalError, msgspec.DecodeError) as error:
            # JSON has no blobs, and each field has its type: what a damaged file gives may be anything.
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) != sqlite3.SQLITE_ERROR:
                raise
            raise buffer_schema.corruption(f"a row is none ({error})") from error
        end = 0
        before: tuple[int, int] = after
        for row, size in zip(rows, sizes, strict=True):
            start, end = end, end + size
            # Nobody has seen the row without it.
            force_setattr(row, "payload", payloads[start:end])
            place = (row.lane, row.sequence)
            if place <= before:
                raise buffer_schema.corruption("rows stand out of their order")
            before = place
        if rows and (before > self.last or end != len(payloads)):
            raise buffer_schema.corruption("a row stands beyond the last one, or is shorter than it says")
        return rows

    def gone(self, spans: Iterable[Span]) -> list[Span]:
        """Those of the rows that are not there any more. The file is looked through from the first to the last."""
        gone = []
        for lane, group in groupby(joined(spans), attrgetter("lane")):
            of_lane = list(group)
            there = self._sequences(Span(lane, of_lane[0].first, of_lane[-1].last))
            wanted = chain.from_iterable(range(span.first, span.last + 1) for span in of_lane)
            gone += [Span(lane, sequence, sequence) for sequence in wanted if sequence not in there]
        return joined(gone)

    def series(self, number: int) -> Series:
        """What a row's series number stands for. Raises BufferFileError where this file does not know it."""
        fields = "topic, key, device, subject, type, content_type, coalesce(stream, '')"
        return Series(*self._one(f"SELECT {fields} FROM series WHERE number = ?", number))

    def lane_of(self, number: int) -> Lane:
        """The lane of a row. Raises BufferFileError where this file does not know it."""
        return Lane(
            *self._one(
                "SELECT number, name, boot_id, coalesce(buffer_id, (SELECT value FROM meta WHERE name = 'buffer_id'))"
                " FROM lane WHERE number = ?",
                number,
            )
        )

    def marks(self, prefix: str) -> dict[str, bytes]:
        """The marks whose keys begin with `prefix`."""
        return buffer_schema.read_marks(self.connection, prefix)

    def quarantined(self, numbers: Sequence[int]) -> dict[int, Quarantined]:
        """Quarantined input by its numbers; what is not there is left out."""
        return self._quarantine.find(numbers)

    def has_losses(self) -> bool:
        """Whether losses wait to be reported."""
        return self.connection.execute("SELECT 1 FROM loss LIMIT 1").fetchone() is not None

    def pending(self, queued: Sequence[Entry]) -> list[PendingLane]:
        """The lanes that hold rows, `queued` (what waits for its commit) counted with this one's."""
        lanes = {
            name: PendingLane(
                name,
                self._state.floor.value_us if number == self.lane.number else event_from_us or 0,
                last_us,
                boot_id,
                first_us,
                self._state.lanes[number].rows,
            )
            for number, name, boot_id, event_from_us, first_us, last_us in self.connection.execute(
                """SELECT number, name, boot_id, event_from_us,
                    (SELECT received_us FROM reading WHERE lane = number ORDER BY sequence LIMIT 1) AS first,
                    (SELECT received_us FROM reading WHERE lane = number ORDER BY sequence DESC LIMIT 1)
                FROM lane WHERE first IS NOT NULL ORDER BY number"""
            )
        }
        if queued:
            event_from_us = min(self._state.floor.value_us, *(_earliest_us(entry) for entry in queued))
            stored = lanes.get(self.lane.name)
            lanes[self.lane.name] = PendingLane(
                self.lane.name,
                event_from_us,
                queued[-1].received_us,
                self._boot_id,
                queued[0].received_us if stored is None else stored.received_us,
                len(queued) + (0 if stored is None else stored.rows),
            )
        return list(lanes.values())

    def quarantined_spans(self) -> list[QuarantinedSpan]:
        """What the quarantine holds, by boot."""
        return self._quarantine.spans()

    def is_salvaging(self) -> bool:
        """Whether rows of a damaged file may still come."""
        return not all(progress.ended for progress in self._salvages())

    def quarantined_of_topics(self, number: int, limit: int) -> list[tuple[int, str | None, str]]:
        """See `Quarantine.of_topics`."""
        return self._quarantine.of_topics(number, limit)

    # -- the parts ------------------------------------------------------------------------------

    @property
    def last(self) -> Position:
        """The row that was added last to this start's lane."""
        return Position(self.lane.number, self.next_sequence - 1)

    def _open_lane(self) -> None:
        # Lanes and boots of which nothing is left are history; this one's begin here. What is salvaged has yet to come,
        # and of a lane that was not reported the number of its rows has yet to be told.
        lanes = (lane for progress in self._salvages() for lane in progress.lanes.values())
        kept = {*self.salvaged.values(), *lanes}
        state = self._state
        over = [number for number, count in state.lanes.items() if not count.rows and count.closed]
        # Devices that were silent since are known by their lanes: the last of these stay until the next start.
        over = [number for number in over if number not in kept]
        over = over if state.lane is NO_LANE else over[:-EMPTY_LANES_MAX]
        forget_lanes(self.connection, over)
        for number in over:
            del state.lanes[number]
        name = secrets.token_hex(6)
        (number,) = self.connection.execute(
            "INSERT INTO lane (name, boot_id, buffer_id) VALUES (?, ?, ?) RETURNING number",
            (name, self._boot_id, self.id),
        ).fetchone()
        self.boots.forget_unneeded()
        state.lane = Lane(number, name, self._boot_id, self.id)
        state.lanes[number] = LaneCount()
        state.floor, state.floor_saved_us, state.floor_due_s = EventFloor(), NOTHING_US, 0.0

    def _salvages(self) -> Iterable[buffer_salvage.Progress]:
        return buffer_salvage.kept_marks(self.marks(buffer_salvage.SALVAGE_PREFIX)).values()

    def begin_lane(self, reason: str, report: LaneReport) -> None:
        """Close the lane that rows go into, and open another; both are reported in the new one."""
        floor_us = self._state.floor.value_us
        self.connection.execute("UPDATE lane SET event_from_us = ? WHERE number = ?", (floor_us, self.lane.number))
        self._open_lane()
        self.report_lanes(reason, report)

    def report_lanes(self, reason: str, report: LaneReport) -> None:
        """Add rows that report the lane that was opened last, and those that are closed, as far as none did so."""
        state = self._state
        reports = []
        for number, count in state.lanes.items():
            if number == state.lane.number and not count.opened:
                reports.append(report("lane-opened", state.lane, 0, reason))
                state.lanes[number] = msgspec.structs.replace(count, opened=True)
            elif number != state.lane.number and not count.closed:
                reports.append(report("lane-closed", self.lane_of(number), count.next, reason))
                state.lanes[number] = msgspec.structs.replace(count, closed=True)
            else:
                continue
            state.touched.add(number)
        self.insert_judged(reports)

    def _save_counts(self) -> None:
        """Keep what the rows that are left do not tell of their lanes."""
        for number in self._state.touched:
            lane = self._state.lane if number == self._state.lane.number else self.lane_of(number)
            if lane.buffer_id == self.id:
                self.keep_marks([self._state.lanes[number].mark(lane.name)])
        self._state.touched.clear()

    def _adopt_lane(self, lane: Lane) -> int:
        """The number of a lane of another file here: names are unique for ever, and two files may hold parts of it."""
        known = self.connection.execute("SELECT number FROM lane WHERE name = ?", (lane.name,)).fetchone()
        if known is not None:
            return int(known[0])
        (number,) = self.connection.execute(
            "INSERT INTO lane (name, boot_id, buffer_id) VALUES (?, ?, ?) RETURNING number",
            (lane.name, lane.boot_id, lane.buffer_id),
        ).fetchone()
        return int(number)

    def _series_number(self, series: Series) -> int:
        fields = (series.topic, series.key, series.device, series.subject, series.type, series.content_type)
        self.connection.execute(
            "INSERT OR IGNORE INTO series (topic, key, device, subject, type, content_type, stream)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*fields, series.stream or None),
        )
        (number,) = self.connection.execute(
            "SELECT number FROM series WHERE topic = ? AND key = ? AND device = ? AND subject = ?"
            " AND type = ? AND content_type = ?",
            fields,
        ).fetchone()
        if len(self._series_numbers) >= SERIES_CACHED_MAX:
            self._series_numbers.clear()
        self._series_numbers[series] = number
        return int(number)

    def _prune_series(self) -> None:
        """Forget series that no row refers to. What is left sets when to look again: never at every commit."""
        self.connection.execute(
            """DELETE FROM series WHERE number NOT IN
            (SELECT series FROM reading UNION SELECT series FROM quarantine WHERE series IS NOT NULL)"""
        )
        self._series_numbers.clear()
        (left,) = self.connection.execute("SELECT count(*) FROM series").fetchone()
        self._series_pruned_at = min(max(SERIES_MAX, 2 * left), SERIES_CACHED_MAX - 1)

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

    def _one(self, statement: str, parameter: object) -> tuple[Any, ...]:
        found: tuple[Any, ...] | None = self.connection.execute(statement, (parameter,)).fetchone()
        if found is None:
            raise BufferFileError(f"the buffer {self.id} does not hold this: it was begun anew in between")
        return found


def _check_sqlite(connection: sqlite3.Connection) -> None:
    """See that this SQLite reads rows back as they were written, before any is taken. Raises BufferFileError."""
    fields, _, payloads = connection.execute(_SELECT_MANY, (0, -1, 0)).fetchone()
    (joined,) = connection.execute(
        "SELECT CAST(group_concat(column1, '') AS BLOB) FROM (VALUES (x'0061'), (x''), (x'ff00'))"
    ).fetchone()
    if (fields, payloads, joined) != ("[]", None, b"\0a\xff\0"):
        raise BufferFileError(f"SQLite {sqlite3.sqlite_version} is too old for the buffer: 3.38 or later is needed")


def _without_series(row: Row, boot_id: str) -> Quarantined:
    """What is left of a reading of another boot when nobody knows whose it is."""
    return Quarantined(
        "salvaged-without-series",
        row.payload,
        "",
        "",
        row.received_us,
        event_us=row.event_us,
        event_error_us=row.event_error_us,
        tick_ms=row.tick_ms,
        device_boot=row.device_boot,
        device_sequence=row.device_sequence,
        boot_id=boot_id,
        doubt=row.doubt,
        device_time_us=row.device_time_us,
    )


def _earliest_us(entry: Entry) -> int:
    """When an entry was measured at the earliest: CLOCK_BOOTTIME in microseconds."""
    if entry.event_us is not None:
        return entry.event_us
    # Its sensor's clock may still be learnt.
    earliest_us = entry.received_us - (0 if entry.tick_ms is None else TICK_AGE_US_MAX)
    return earliest_us if entry.earliest_us is None else min(entry.earliest_us, earliest_us)
