"""The newest rows, in memory: live readings are forwarded without being read back from the file."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from gateway.buffer.rows import Position, Row, Span, sizes_of

TAIL_ROWS_MAX = 20_000
TAIL_BYTES_MAX = 4_000_000

_sequence = attrgetter("sequence")


class Tail:
    """Rows at the end of the current lane, as many as there is memory for: all that wait behind some position.

    If the forwarder falls further behind, the tail takes no more rows. They are read from the file until the forwarder
    reaches its end.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._bytes = 0
        self._after: Position | None = None
        """Every waiting row behind this position is here, or was until the tail took no more; None if nobody knows."""
        self.is_at_end = False
        """Whether the newest rows are here."""

    def clear(self) -> None:
        """Drop all rows, as some are gone or have other numbers."""
        self._rows.clear()
        self._bytes = 0
        self._after = None

    def follow(self, after: Position, rows: Sequence[Row]) -> None:
        """Begin anew: `rows` are all that wait behind a position, which the forwarder has reached."""
        self._rows = list(rows)
        self._bytes = sum(sizes_of(rows))
        self._after = after
        self.is_at_end = True

    def extend(self, rows: Sequence[Row], payload_bytes: int) -> None:
        """Add new rows, and their payload bytes."""
        if not self.is_at_end or not rows:
            return
        if self._after is None:
            self._after = Position(rows[0].lane, rows[0].sequence - 1)
        self._rows += rows
        self._bytes += payload_bytes
        self.is_at_end = len(self._rows) <= TAIL_ROWS_MAX and self._bytes <= TAIL_BYTES_MAX

    def read(self, after: Position, limit: int) -> list[Row] | None:
        """Up to `limit` rows that follow a position; None if the file must be read."""
        rows = self._rows
        if self._after is None or after < self._after or (rows and after.lane > rows[0].lane):
            return None
        skip = bisect_right(rows, after.sequence, key=_sequence) if rows and after.lane == rows[0].lane else 0
        found = rows[skip : skip + limit]
        return found if found or self.is_at_end else None

    def read_behind(self, after: Position, limit: int) -> list[Row] | None:
        """Rows as `read` gives them, though others may stand between the position and them; None if the end is gone."""
        if self._after is None or not self.is_at_end:
            return None
        return self.read(max(after, self._after), limit)

    def forget(self, span: Span) -> None:
        """Drop the rows up to the end of a confirmed span."""
        rows = self._rows
        if rows and rows[0].lane == span.lane:
            gone = rows[: bisect_right(rows, span.last, key=_sequence)]
            self._bytes -= sum(sizes_of(gone))
            del rows[: len(gone)]
            self._after = max(self._after or Position(0, 0), Position(span.lane, span.last))
