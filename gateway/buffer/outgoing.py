"""The rows between the buffer and the forwarder: the newest in memory, those being sent, those that Kafka has."""

import threading
from collections.abc import Iterable

from gateway.buffer.file import BufferFile
from gateway.buffer.rows import Position, Row, Span, joined, without
from gateway.buffer.tail import Tail
from gateway.reading import BufferFileError, Mark


class OutgoingRows:
    """Rows of the open file, never of a former one. May be used on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.buffer_id = ""
        """Id of the open file."""
        self._tail = Tail()
        self._kept_from_drop: list[Span] = []
        """Rows that are being sent, and not dropped."""
        self.drops = 0
        """See `Buffer.drops`."""
        self._confirmed: list[Span] = []
        self._confirmed_marks: dict[str, Mark] = {}
        """Stored with the deletion of the confirmed rows."""

    def begin(self, buffer_id: str) -> None:
        """Begin with a newly opened file."""
        with self._lock:
            self.buffer_id = buffer_id
            self._confirmed, self._kept_from_drop = [], []
            self._tail.clear()

    # -- reading --------------------------------------------------------------------------------

    def extend(self, rows: list[Row], payload_bytes: int) -> None:
        """Add rows that a commit inserted, and their payload bytes."""
        with self._lock:
            self._tail.extend(rows, payload_bytes)

    def follow(self) -> None:
        """Keep the next committed rows in memory, as a new lane begins."""
        with self._lock:
            self._tail.follow()

    def forget_newest(self) -> None:
        """Drop the rows in memory, as some are gone: they are read from the file."""
        with self._lock:
            self._tail.clear()

    def newest(self, after: Position, limit: int) -> tuple[str, list[Row] | None]:
        """Rows that follow a position, and their file's id; None if the file must be read."""
        with self._lock:
            return self.buffer_id, self._tail.read(after, limit)

    def read_newest(self, file: BufferFile, after: Position, limit: int) -> list[Row]:
        """Rows that follow a position, from the file. At its end, new rows are kept in memory again."""
        rows = self.read(file, after, limit)
        with self._lock:
            if not rows or (rows[-1].lane, rows[-1].sequence) == file.lanes.last:
                self._tail.follow()
        return rows

    def read(self, file: BufferFile, after: Position, limit: int) -> list[Row]:
        """Rows of the file, except confirmed ones that wait for their deletion."""
        while True:
            rows = file.read(after, limit)
            with self._lock:
                confirmed = list(self._confirmed)
            # A reader that goes on meets no confirmed rows. After a rewind it may.
            if not rows or not any((rows[0].lane, rows[0].sequence) <= (span.lane, span.last) for span in confirmed):
                return rows
            after = Position(rows[-1].lane, rows[-1].sequence)
            rows = without(rows, confirmed)
            if rows:
                return rows

    # -- sending --------------------------------------------------------------------------------

    def keep_from_drop(self, buffer_id: str, spans: list[Span], since: int) -> bool:
        """Protect rows from being dropped; return False if `drops` has grown beyond `since`. Raises BufferFileError."""
        with self._lock:
            if buffer_id != self.buffer_id:
                raise replaced()
            if self.drops == since:
                self._kept_from_drop = spans
            return self.drops == since

    def keep_from_drop_now(self, spans: list[Span]) -> None:
        """Protect rows from being dropped, whatever `drops` is."""
        with self._lock:
            self._kept_from_drop = spans

    def spared(self) -> list[Span]:
        """Rows that must not be dropped. `drops` grows: rows read or protected later are looked up after the drop."""
        with self._lock:
            self.drops += 1
            self._tail.clear()
            # Kafka has the rows confirmed since this commit began.
            return joined([*self._kept_from_drop, *self._confirmed])

    # -- confirmed ------------------------------------------------------------------------------

    @property
    def has_confirmed(self) -> bool:
        """Whether rows wait for their deletion."""
        return bool(self._confirmed)

    def confirm(self, buffer_id: str, spans: Iterable[Span], marks: Iterable[Mark]) -> bool:
        """Note rows that Kafka has; return whether they are the first since `take_confirmed`."""
        with self._lock:
            is_first = not (self._confirmed or self._confirmed_marks)
            for span in spans if buffer_id == self.buffer_id else ():
                self._tail.forget(span)
                _append_span(self._confirmed, span)
            for mark in marks:
                self._confirmed_marks[mark.key] = mark
            return is_first

    def take_confirmed(self) -> tuple[list[Span], dict[str, Mark]]:
        """Take the rows to be deleted, and the marks to be stored with the deletion."""
        with self._lock:
            taken = self._confirmed, self._confirmed_marks
            self._confirmed, self._confirmed_marks = [], {}
            return taken

    def put_back(self, confirmed: list[Span], marks: dict[str, Mark]) -> None:
        """Take back rows that were not deleted, and marks that were not stored."""
        with self._lock:
            self._confirmed[:0] = confirmed
            self._confirmed_marks = {**marks, **self._confirmed_marks}


def replaced() -> BufferFileError:
    """The error for numbers of a replaced file, which mean other rows in this one."""
    return BufferFileError("the buffer file was replaced in between: what was read from it is void")


def _append_span(spans: list[Span], span: Span) -> None:
    """Add a span. If it continues one of the last two, join them, as two lanes are sent side by side."""
    for index in range(len(spans) - 1, max(len(spans) - 3, -1), -1):
        last = spans[index]
        if last.lane == span.lane and last.last + 1 == span.first:
            spans[index] = Span(span.lane, last.first, span.last)
            return
    spans.append(span)
