"""Deletes rows that Kafka or the quarantine has, as many as one transaction may, also on a disk without room."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.buffer.lanes import Lanes
from gateway.buffer.room import PAGE_BYTES, ROW_BYTES, SIZE_SQL, Room
from gateway.buffer.rows import Span
from gateway.buffer.sensor_runs import DeviceRuns
from gateway.buffer.series import SeriesTable
from gateway.buffer.shares import Shares
from gateway.buffer.stored_rows import delete_rows, rows_within

DELETED_ROWS_MAX = 20_000
"""Confirmed rows that one transaction deletes, at most."""
DELETED_SPANS_MAX = 5_000
"""Spans that one transaction deletes, at most, if other rows stay between them."""
_LAST_WITHIN = f"""
    SELECT max(sequence) FROM (
        SELECT sequence, sum(size + {ROW_BYTES}) OVER (ORDER BY sequence) AS bytes
        FROM {rows_within(f"sequence, {SIZE_SQL} AS size")}
    ) WHERE bytes <= ?3
"""


@dataclass(frozen=True, slots=True)
class Deletion:
    """Deletes rows of an open file. Every method needs a transaction of the file."""

    connection: sqlite3.Connection
    room: Room
    lanes: Lanes
    runs: DeviceRuns
    series: SeriesTable
    shares: Shares

    def delete_some(self, confirmed: Sequence[Span]) -> list[Span]:
        """Delete as many rows as one transaction may; return those that are left.

        If other rows stay between the spans, each span is a page to write, however few rows it has.
        """
        rows_left, bytes_left = DELETED_ROWS_MAX, self.room.commit_bytes_max
        for index, span in enumerate(confirmed):
            if index == DELETED_SPANS_MAX or rows_left <= 0 or bytes_left <= 0:
                return list(confirmed[index:])
            part = Span(span.lane, span.first, min(span.last, span.first + rows_left - 1))
            before = self.lanes.rows
            rest = self.delete(part, bytes_left)
            gone = before - self.lanes.rows
            rows_left -= gone
            if self.room.is_tight():
                bytes_left -= PAGE_BYTES + gone * ROW_BYTES
            first = part.last + 1 if rest is None else rest.first
            if first <= span.last:
                return [Span(span.lane, first, span.last), *confirmed[index + 1 :]]
        return []

    def delete(self, confirmed: Span, bytes_max: int | None = None) -> Span | None:
        """Delete rows of one span; return those that are left for the next transaction.

        `bytes_max` bounds the bytes to be written if the disk has no room. By default it is the bound of a whole
        commit.
        """
        last = min(confirmed.last, confirmed.first + DELETED_ROWS_MAX - 1)
        tight = self.room.is_tight()
        if tight:
            bytes_max = self.room.commit_bytes_max if bytes_max is None else bytes_max
            last = self._last_within(Span(confirmed.lane, confirmed.first, last), bytes_max)
        span, tight_bytes = Span(confirmed.lane, confirmed.first, last), None
        if tight:
            tight_bytes = min(self.room.commit_bytes_max, self.room.free_page_bytes()) // 4
        if not self.runs.save_before_deletion(span, self.lanes.last, tight_bytes):
            return confirmed
        self.shares.leave(span)
        gone = delete_rows(self.connection, span)
        self.lanes.deleted(confirmed.lane, gone)
        self.series.prune_if_due(self.lanes.rows)
        return None if last == confirmed.last else Span(confirmed.lane, last + 1, confirmed.last)

    def delete_whole(self, span: Span) -> None:
        """Delete all rows of a span, however many, in the open transaction."""
        rest: Span | None = span
        while rest is not None:
            rest = self.delete(rest)

    def _last_within(self, span: Span, bytes_max: int) -> int:
        """The last sequence of a span up to which its rows take at most `bytes_max`; at least its first sequence."""
        (last,) = self.connection.execute(_LAST_WITHIN, (*span.places, bytes_max)).fetchone()
        return span.first if last is None else int(last)
