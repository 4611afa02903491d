"""The rows between the buffer and the forwarder: the newest in memory, those being sent, those that Kafka has."""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from gateway.buffer.file import BufferFile
from gateway.buffer.front import Front
from gateway.buffer.rows import Position, Row, Span, joined, spans_of, without
from gateway.buffer.tail import Tail
from gateway.reading import BufferFileError, Mark


class OutgoingRows:
    """Rows of the open file, never of a former one. May be used on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.buffer_id = ""
        """Id of the open file."""
        self.front = Front(Counter())
        """Rows that the file does not have yet."""
        self._tail = Tail()
        self._kept_from_drop: list[Span] = []
        """Rows that are being sent, and not dropped."""
        self.drops = 0
        """See `Buffer.drops`."""
        self._confirmed: list[Span] = []
        self._marks: dict[str, Mark] = {}
        """Marks that are stored with the next commit."""
        self.direct_topics: frozenset[str] = frozenset()
        """Kafka topics whose rows need no disk, as Kafka has them at once and for good."""

    def begin(self, file: BufferFile) -> Front:
        """Begin with a newly opened file. Returns the front of the former one, to which Kafka adds nothing more."""
        with self._lock:
            former, self.front = self.front, file.front
            self.buffer_id = file.id
            self._confirmed, self._kept_from_drop = [], []
            self.direct_topics = frozenset()
            self._tail.clear()
            return former

    # -- reading --------------------------------------------------------------------------------

    def extend(self, rows: Sequence[Row], payload_bytes: int) -> None:
        """Add new rows, and their payload bytes."""
        with self._lock:
            self._tail.extend(rows, payload_bytes)

    def follow(self, lane: int) -> None:
        """Keep the next rows in memory, as a new lane begins."""
        with self._lock:
            self._tail.follow(Position(lane, -1), ())

    def go_direct(self, topics: frozenset[str]) -> None:
        """Set the topics whose rows may go to Kafka before the disk."""
        with self._lock:
            self.direct_topics = topics

    @property
    def admits(self) -> bool:
        """Whether rows may join the front: Kafka takes some at once, and the forwarder finds them there."""
        return bool(self.direct_topics) and self._tail.is_at_end

    @property
    def is_behind(self) -> bool:
        """Whether rows could join the front, if the forwarder had read those before them.

        Then commits take their time. Without the disk, rows go faster, as soon as the forwarder has caught up.
        """
        return bool(self.direct_topics) and not self._tail.is_at_end

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
        reached = _place(rows[-1]) if rows else after
        if not rows or reached == file.lanes.last_stored:
            newest = self._follow(reached)
            if not rows:
                return newest[:limit]
        return self._with_front(rows, after, limit)

    def read_memory(self, file: BufferFile, after: Position, limit: int) -> list[Row]:
        """Rows that follow a position, as far as they are in memory. From here on, all new ones are kept there."""
        with self._lock:
            found = self._tail.read_behind(after, limit)
        if found is None:
            found = self._follow(max(after, file.lanes.last_stored))[:limit]
        return self._with_front(found, after, limit)

    def _with_front(self, rows: list[Row], after: Position, limit: int) -> list[Row]:
        """Rows in order, with those of the front between a position and the last of them: the first ones of all."""
        of_front = self.front.behind(after, limit)
        if not of_front:
            return rows
        last, known = _place(rows[-1]) if rows else None, {_place(row) for row in rows}
        between = [row for row in of_front if (last is None or _place(row) < last) and _place(row) not in known]
        return sorted([*rows, *between], key=_place)[:limit]

    def _follow(self, reached: Position) -> list[Row]:
        """Keep in memory the rows behind a position, which is not before the file's end. Returns these rows."""
        newest = self.front.behind(reached)
        with self._lock:
            self._tail.follow(reached, newest)
        return newest

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

    def confirm(self, buffer_id: str, spans: Sequence[Span]) -> bool:
        """Note rows that Kafka has; return whether they are the first to delete since `take_confirmed`."""
        with self._lock:
            if buffer_id != self.buffer_id:
                return False
            is_first = not self._confirmed
            for span in spans:
                self._tail.forget(span)
            for span in self.front.confirm(spans):
                _append_span(self._confirmed, span)
            return is_first and bool(self._confirmed)

    def written(self, rows: Sequence[Row]) -> bool:
        """Note rows of the front that a commit has written. Returns whether Kafka has got some of them meanwhile.

        These are to be deleted.
        """
        with self._lock:
            confirmed = spans_of(self.front.written(rows))
            for span in confirmed:
                _append_span(self._confirmed, span)
            return bool(confirmed)

    def take_confirmed(self) -> list[Span]:
        """Take the rows to be deleted."""
        with self._lock:
            taken, self._confirmed = self._confirmed, []
            return taken

    def put_back(self, confirmed: list[Span]) -> None:
        """Take back rows that were not deleted."""
        with self._lock:
            self._confirmed[:0] = confirmed

    # -- marks that wait for a commit -----------------------------------------------------------

    @property
    def has_marks(self) -> bool:
        """Whether marks wait for a commit."""
        return bool(self._marks)

    def keep(self, marks: Iterable[Mark]) -> None:
        """Have marks stored with the next commit."""
        with self._lock:
            for mark in marks:
                self._marks[mark.key] = mark

    def take_marks(self) -> dict[str, Mark]:
        """Take the marks to be stored."""
        with self._lock:
            taken, self._marks = self._marks, {}
            return taken

    def put_marks_back(self, marks: dict[str, Mark]) -> None:
        """Take back marks that were not stored."""
        with self._lock:
            self._marks = {**marks, **self._marks}


def replaced() -> BufferFileError:
    """The error for numbers of a replaced file, which mean other rows in this one."""
    return BufferFileError("the buffer file was replaced in between: what was read from it is void")


def _place(row: Row) -> Position:
    return Position(row.lane, row.sequence)


def _append_span(spans: list[Span], span: Span) -> None:
    """Add a span. If it continues one of the last two, join them, as two lanes are sent side by side."""
    for index in range(len(spans) - 1, max(len(spans) - 3, -1), -1):
        last = spans[index]
        if last.lane == span.lane and last.last + 1 == span.first:
            spans[index] = Span(span.lane, last.first, span.last)
            return
    spans.append(span)
