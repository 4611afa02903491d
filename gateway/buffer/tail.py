"""The newest committed rows, in memory: live readings are forwarded without being read back from the file."""

from collections.abc import Sequence

from gateway.buffer.rows import Position, Row, Span

TAIL_ROWS_MAX = 20_000
TAIL_BYTES_MAX = 4_000_000


class Tail:
    """Consecutive rows at the end of the current lane, as many as there is memory for.

    If the forwarder falls further behind, the tail takes no more rows. They are read from the file until the forwarder
    reaches its end.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._bytes = 0
        self._is_at_end = False

    def clear(self) -> None:
        """Drop all rows, as some are gone or have other numbers."""
        self._rows.clear()
        self._bytes = 0

    def follow(self) -> None:
        """Begin anew at the end of the file, where the forwarder is: it reads the next commit from here."""
        self.clear()
        self._is_at_end = True

    def extend(self, rows: Sequence[Row], payload_bytes: int) -> None:
        """Add rows that a commit inserted, and their payload bytes."""
        if not self._is_at_end:
            return
        self._rows += rows
        self._bytes += payload_bytes
        self._is_at_end = len(self._rows) <= TAIL_ROWS_MAX and self._bytes <= TAIL_BYTES_MAX

    def read(self, after: Position, limit: int) -> list[Row] | None:
        """Up to `limit` rows that follow a position; None if the file must be read."""
        if not self._rows or self._rows[0].lane != after.lane:
            return None
        skip = after.sequence + 1 - self._rows[0].sequence
        if skip < 0:
            return None
        found = self._rows[skip : skip + limit]
        return found if found or self._is_at_end else None

    def forget(self, span: Span) -> None:
        """Drop the rows up to the end of a confirmed span."""
        if self._rows and self._rows[0].lane == span.lane:
            gone = self._rows[: max(0, span.last + 1 - self._rows[0].sequence)]
            self._bytes -= sum([len(row.datum.payload) for row in gone])
            del self._rows[: len(gone)]
