"""Deletes rows that Kafka or the quarantine has, within what a disk without room lets one transaction write."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.buffer.lanes import Lanes
from gateway.buffer.room import PAGE_BYTES, ROW_BYTES, Room
from gateway.buffer.rows import Span
from gateway.buffer.sensor_runs import DeviceRuns
from gateway.buffer.series import SeriesTable
from gateway.buffer.shares import Shares

DELETED_ROWS_MAX = 20_000
"""Confirmed rows that one transaction deletes."""
DELETED_SPANS_MAX = 5_000
"""The same for runs of rows between which others stay."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """Every method belongs into a transaction of the file, whose parts these are."""

    connection: sqlite3.Connection
    room: Room
    lanes: Lanes
    runs: DeviceRuns
    series: SeriesTable
    shares: Shares

    def delete_some(self, confirmed: Sequence[Span]) -> list[Span]:
        """Delete as many rows as one transaction may; give those that are left.

        Where others stay between them, each span is a page to write, however few rows it has.
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
        """Delete rows of one span; give those that are left for the next transaction.

        `bytes_max` is what may be written for it where the disk has no room; a whole commit's, if it is not given.
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
        gone = self.connection.execute(
            "DELETE FROM reading WHERE lane = ? AND sequence BETWEEN ? AND ?", (confirmed.lane, confirmed.first, last)
        ).rowcount
        self.lanes.deleted(confirmed.lane, gone)
        self.series.prune_if_due(self.lanes.rows)
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
