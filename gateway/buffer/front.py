"""The rows that Kafka may have before the disk: numbered, in memory, in one lane with the newest rows of the file.

A reading is acknowledged at its first durable copy. If Kafka's replicas have its row first, the row never touches the
disk. If not, a commit writes it, together with every other row that is still here. Whatever number of the lane is not
in the file is here or in Kafka.
"""

import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from gateway.buffer.commit_queue import Append
from gateway.buffer.lanes import NOTHING_US
from gateway.buffer.rows import PendingRows, Position, Row, Series, Span


@dataclass(slots=True)
class Admitted:
    """An append whose entries have become rows."""

    append: Append
    since_s: float
    """When its entries got their numbers (monotonic)."""
    event_from_us: int
    """Earliest event time of its entries."""
    ordered_by: frozenset[Hashable]
    """Its devices, or its broker. Of the appends that share one, none is acknowledged before an earlier one."""
    left: int
    """Rows that neither Kafka nor the disk has yet."""
    refused_s: float | None = None
    """Since when Kafka refuses a row of it that the disk does not take (monotonic)."""


class Front:
    """The front of one file's current lane. May be used on any thread."""

    def __init__(self, counts: Counter[str]) -> None:
        """`counts` gets `spared`: rows that Kafka had before a commit began to write them."""
        self._counts = counts
        self._lock = threading.Lock()
        self._lane = 0
        self._rows: dict[int, tuple[Row, Series, Admitted]] = {}
        """By sequence, in order: rows that neither Kafka nor the disk has yet, and their series."""
        self._admitted: list[Admitted] = []
        """In order: appends that were not announced yet."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, append: Append, rows: Sequence[Row], series: Iterable[Series], event_from_us: int) -> None:
        """Add an append with its rows: consecutive ones of the current lane, behind all others. There may be none.

        `series` are those of each row.
        """
        # An append without rows may be a resend, which must not be answered before the first copy is durable.
        admitted = Admitted(append, time.monotonic(), event_from_us, append.ordered_by, len(rows))
        with self._lock:
            self._admitted.append(admitted)
            for row, of in zip(rows, series, strict=True):
                self._lane = row.lane
                self._rows[row.sequence] = row, of, admitted

    def hold(self, appends: Iterable[Append]) -> list[Append]:
        """Hold back stored appends if earlier ones of their devices are not durable: they may be resends of these.

        Returns those that are held back. Their bytes count no more, as they have left the queue.
        """
        held: list[Append] = []
        with self._lock:
            waiting = {each for admitted in self._settled_and_held()[1] for each in admitted.ordered_by}
            for append in appends if waiting else ():
                if not waiting.isdisjoint(append.ordered_by):
                    waiting |= append.ordered_by
                    append.bytes = 0
                    held.append(append)
                    self._admitted.append(Admitted(append, time.monotonic(), NOTHING_US, append.ordered_by, left=0))
        return held

    @property
    def since_s(self) -> float | None:
        """When the oldest row came (monotonic); None without rows."""
        with self._lock:
            for *_, admitted in self._rows.values():
                return admitted.since_s
        return None

    def rows(self, bytes_max: int | None = None) -> list[Row]:
        """The rows, in order. With `bytes_max`, only the first ones: payloads of so many bytes, but at least one."""
        with self._lock:
            found = [row for row, *_ in self._rows.values()]
        if bytes_max is None:
            return found
        size = 0
        for count, row in enumerate(found):
            size += row.datum.size
            if count and size > bytes_max:
                return found[:count]
        return found

    def behind(self, after: Position, limit: int | None = None) -> list[Row]:
        """Rows that follow a position, in order."""
        with self._lock:
            found = (row for sequence, (row, *_) in self._rows.items() if (self._lane, sequence) > after)
            return list(islice(found, limit))

    def pending(self) -> PendingRows | None:
        """The sum of the rows; None without rows."""
        with self._lock:
            if not self._rows:
                return None
            rows = [row for row, *_ in self._rows.values()]
            event_from_us = min(admitted.event_from_us for *_, admitted in self._rows.values())
        received_us = [row.datum.received_us for row in rows]
        return PendingRows(event_from_us, min(received_us), max(received_us), len(rows))

    def first_behind(self, rows: Sequence[Row]) -> int | None:
        """The first sequence behind some of the rows, which are the first ones; None if there is none."""
        last = rows[-1].sequence if rows else -1
        with self._lock:
            return next((sequence for sequence in self._rows if sequence > last), None)

    def first_and_sequences(self) -> tuple[int | None, dict[tuple[str, str, str], set[int]]]:
        """The first sequence, and the sensors' own sequences by device, counter and device boot."""
        by_run: dict[tuple[str, str, str], set[int]] = {}
        first = None
        with self._lock:
            for row, series, _ in self._rows.values():
                first = row.sequence if first is None else first
                boot, sequence = row.datum.device_boot, row.datum.device_sequence
                if boot is not None and sequence is not None:
                    by_run.setdefault((series.device, series.counter, boot), set()).add(sequence)
        return first, by_run

    def series(self, number: int) -> Series | None:
        """The series of a number, if a row has it."""
        with self._lock:
            return next((of for row, of, _ in self._rows.values() if row.series == number), None)

    def without(self, spans: Iterable[Span]) -> list[Span]:
        """The parts of spans whose rows are not here."""
        with self._lock:
            return self._without(spans)

    def _without(self, spans: Iterable[Span]) -> list[Span]:
        if not self._rows:
            return list(spans)
        parts: list[Span] = []
        for span in spans:
            if span.lane != self._lane:
                parts.append(span)
                continue
            first = span.first
            for sequence in range(span.first, span.last + 1):
                if sequence in self._rows:
                    if first < sequence:
                        parts.append(Span(span.lane, first, sequence - 1))
                    first = sequence + 1
            if first <= span.last:
                parts.append(Span(span.lane, first, span.last))
        return parts

    def confirm(self, spans: Sequence[Span]) -> list[Span]:
        """Take out rows that Kafka has. Return the parts of the spans that are not here: the disk has them."""
        with self._lock:
            parts = self._without(spans)
            before = len(self._rows)
            if before:
                for lane, first, last in spans:
                    if lane == self._lane:
                        self._take_out(range(first, last + 1))
            if before > len(self._rows):
                self._counts["spared"] += before - len(self._rows)
            return parts

    def written(self, rows: Sequence[Row]) -> list[Row]:
        """Take out rows that are on disk now. Return those that Kafka has got meanwhile."""
        with self._lock:
            confirmed = [row for row in rows if row.sequence not in self._rows]
            if confirmed:
                self._counts["spared"] -= len(confirmed)
            self._take_out([row.sequence for row in rows])
            return confirmed

    def _take_out(self, sequences: Iterable[int]) -> None:
        pop = self._rows.pop
        for sequence in sequences:
            found = pop(sequence, None)
            if found is not None:
                found[2].left -= 1

    def refused(self, rows: Iterable[Row], patience_s: float) -> list[Row]:
        """Note rows that Kafka refuses. Returns those of appends of which it has refused one for so long."""
        now_s = time.monotonic()
        over: list[Row] = []
        with self._lock:
            for row in rows:
                found = self._rows.get(row.sequence) if row.lane == self._lane else None
                if found is not None:
                    since_s = found[2].refused_s = found[2].refused_s or now_s
                    if now_s >= since_s + patience_s:
                        over.append(row)
        return over

    def older(self, patience_s: float) -> list[Row]:
        """The rows that have been here for so long, oldest first."""
        until_s = time.monotonic() - patience_s
        with self._lock:
            return [row for row, _, admitted in self._rows.values() if admitted.since_s <= until_s]

    def give_up(self, rows: Iterable[Row]) -> tuple[list[tuple[Row, Series]], list[Append]]:
        """Take out rows that nobody will have, with all others of their appends, which may not be acknowledged.

        Nor may appends that bring such a reading again: what they bring has no row of its own. They go the same way.
        Returns the rows that were still here, in order, and all these appends.
        """
        again: set[tuple[str, str, str, int]] = set()
        kept: list[Admitted] = []
        gone: list[Append] = []
        with self._lock:
            found = (self._rows.get(row.sequence) for row in rows)
            over = {id(each[2]) for each in found if each is not None}
            for admitted in self._admitted:
                numbers = {
                    (entry.series.device, entry.series.counter, entry.datum.device_boot, entry.datum.device_sequence)
                    for entry in admitted.append.entries
                    if entry.datum.device_boot is not None and entry.datum.device_sequence is not None
                }
                if id(admitted) in over or not again.isdisjoint(numbers):
                    over.add(id(admitted))
                    again |= numbers
                    gone.append(admitted.append)
                else:
                    kept.append(admitted)
            self._admitted = kept
            taken = [(row, series) for row, series, admitted in self._rows.values() if id(admitted) in over]
            self._take_out(row.sequence for row, _ in taken)
        return taken, gone

    def take_settled(self) -> list[Append]:
        """Take out the appends that may be acknowledged, in order: their rows are durable, and nothing holds them."""
        with self._lock:
            settled, self._admitted = self._settled_and_held()
        return [admitted.append for admitted in settled]

    def take_back(self) -> list[Append]:
        """Give up the appends that may not be acknowledged, and return them. Their rows stay if nobody has them yet."""
        with self._lock:
            self._admitted, held = self._settled_and_held()
        return [admitted.append for admitted in held]

    def _settled_and_held(self) -> tuple[list[Admitted], list[Admitted]]:
        settled: list[Admitted] = []
        held: list[Admitted] = []
        waiting: set[Hashable] = set()
        for admitted in self._admitted:
            if admitted.left or not waiting.isdisjoint(admitted.ordered_by):
                waiting |= admitted.ordered_by
                held.append(admitted)
            else:
                settled.append(admitted)
        return settled, held
