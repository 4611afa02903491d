"""The rows that were committed last, in memory: live readings are forwarded without being read back from the file."""

from collections.abc import Sequence

from gateway.buffer_rows import Position, Row, Span

TAIL_ROWS_MAX = 20_000
TAIL_BYTES_MAX = 4_000_000


class Tail:
    """A dense run of rows at the end of the current lane; empty once the forwarder is further behind than that."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._bytes = 0

    def clear(self) -> None:
        self._rows.clear()
        self._bytes = 0

    def extend(self, rows: Sequence[Row]) -> None:
        """Add what a commit inserted; where that is too much, a backlog builds up, which is read from the file."""
        self._rows += rows
        self._bytes += sum([len(row.payload) for row in rows])
        if len(self._rows) > TAIL_ROWS_MAX or self._bytes > TAIL_BYTES_MAX:
            self.clear()

    def read(self, after: Position, limit: int) -> list[Row] | None:
        """Up to `limit` rows that follow a position; None where the file has to be asked."""
        if not self._rows or self._rows[0].lane != after.lane:
            return None
        skip = after.sequence + 1 - self._rows[0].sequence
        if skip < 0:
            return None
        return self._rows[skip : skip + limit]

    def forget(self, span: Span) -> None:
        """Drop the rows up to the end of a span that is confirmed."""
        if self._rows and self._rows[0].lane == span.lane:
            gone = self._rows[: max(0, span.last + 1 - self._rows[0].sequence)]
            self._bytes -= sum([len(row.payload) for row in gone])
            del self._rows[: len(gone)]
