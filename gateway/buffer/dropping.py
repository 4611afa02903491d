"""Drops rows that Kafka never had, each counted as lost: the oldest for want of room, and those that are too old."""

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.buffer.boots import BootTable
from gateway.buffer.deletion import Deletion
from gateway.buffer.lanes import Lanes
from gateway.buffer.losses import count_losses, losses_of_rows
from gateway.buffer.room import ROW_BYTES, Room
from gateway.buffer.rows import START, Position, Span, span_at
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us

DROPPED_ROWS_MAX = 5_000
DROP_BYTES = 64_000
"""What `drop-oldest` drops at a time: counting it costs less than the commit that it makes room for."""


@dataclass(frozen=True, slots=True)
class Dropping:
    """Every method belongs into a transaction of the file, whose parts these are.

    Rows that are `spared` stay: Kafka has them, or is about to. These spans are `joined`.
    """

    connection: sqlite3.Connection
    clock: Callable[[], BootClock]
    tally: Counter[str]
    """Counts what is dropped, and by its reason: `buffer-full`, `too-old`."""
    room: Room
    boots: BootTable
    lanes: Lanes
    deletion: Deletion

    def drop_oldest(self, coming_bytes: int, spared: Sequence[Span] = ()) -> None:
        """Drop the oldest rows until there is room for more, or as many as one commit may."""
        bytes_left, after = self.room.commit_bytes_max, START
        while bytes_left > 0 and self.room.is_full(coming_bytes):
            dropped, size = self._drop_front("buffer-full", min(bytes_left, DROP_BYTES), after, spared)
            if dropped is None:
                return
            bytes_left, after = bytes_left - size, Position(dropped.lane, dropped.last)

    def drop_aged(self, age_us: int, spared: Sequence[Span] = ()) -> bool:
        """Drop some rows that waited longer than this; tell whether there may be more.

        Rows of a boot whose wall clock was never known stay: how old they are is not known either.
        """
        lanes = self.connection.execute(
            """SELECT number, boot_id FROM lane
            WHERE EXISTS (SELECT 1 FROM reading WHERE lane = number) ORDER BY number"""
        ).fetchall()
        now = self.clock()
        for lane, boot_id in lanes:
            cutoff_us = boottime_us() - age_us
            if boot_id != self.lanes.current.boot_id:
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
            (*self._after_spared(after, spared), DROPPED_ROWS_MAX),
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
        losses = losses_of_rows(self.connection, span, reason)
        before = self.lanes.rows
        self.deletion.delete_whole(span)
        count_losses(self.connection, losses)
        for counted in ("dropped", reason):
            self.tally[counted] += before - self.lanes.rows
        return span, size

    def _after_spared(self, after: Position, spared: Sequence[Span]) -> Position:
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
