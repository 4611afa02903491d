"""The rows that were committed last, in memory: live readings are forwarded without being read back from the file."""

from collections.abc import Sequence

from gateway.buffer.rows import Position, Row, Span

TAIL_ROWS_MAX = 20_000
TAIL_BYTES_MAX = 4_000_000


class Tail:
    """A dense run of rows: the end of the current lane, until the forwarder is further behind than it has room for.

    Then it takes no more, and what follows is read from the file, until the forwarder comes to the end of that.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._bytes = 0
        self._is_at_end = False

    def clear(self) -> None:
        """Hold nothing: what it had is not there any more, or means something else."""
        self._rows.clear()
        self._bytes = 0

    def follow(self) -> None:
        """The forwarder has come to the end of the file: what is committed next, it reads next."""
        self.clear()
        self._is_at_end = True

    def extend(self, rows: Sequence[Row], payload_bytes: int) -> None:
        """Add what a commit inserted, with its payloads' bytes."""
        if not self._is_at_end:
            return
        self._rows += rows
        self._bytes += payload_bytes
        self._is_at_end = len(self._rows) <= TAIL_ROWS_MAX and self._bytes <= TAIL_BYTES_MAX

    def read(self, after: Position, limit: int) -> list[Row] | None:
        """Up to `limit` rows that follow a position; None where the file has to be asked."""
        if not self._rows or self._rows[0].lane != after.lane:
            return None
        skip = after.sequence + 1 - self._rows[0].sequence
        if skip < 0:
            return None
        found = self._rows[skip : skip + limit]
        return found if found or self._is_at_end else None

    def forget(self, span: Span) -> None:
        """Drop the rows up to the end of a span that is confirmed."""
        if self._rows and self._rows[0].lane == span.lane:
            gone = self._rows[: max(0, span.last + 1 - self._rows[0].sequence)]
            self._bytes -= sum([len(row.payload) for row in gone])
            del self._rows[: len(gone)]
