"""Reports that the buffer takes nothing, and that it takes readings again, as events."""

from collections.abc import Callable

from gateway.buffer.buffer import Buffer
from gateway.intake.own_events import OwnEvents

INTERVAL_S = 300.0
"""Least seconds between two reports of trouble: it may come and go."""


class BufferWatch:
    """Looks whether the disk fails or the buffer is full, and reports the begin and the end of it, once each."""

    def __init__(self, buffer: Buffer, events: OwnEvents) -> None:
        self._buffer = buffer
        self._events = events
        self._trouble = ""
        """`failing` or `full`, until the end is reported too; empty if there is nothing to report."""
        self._error: str | None = None
        self._since_s = 0.0
        self._until_s: float | None = None
        """When it was over; None while it lasts."""
        self._is_told = False
        self._is_on_its_way = False
        self._due_s = 0.0

    def look(self, now_s: float) -> None:
        """Report what changed. What is not stored is reported again."""
        error = self._buffer.state.failing
        trouble = "failing" if error is not None else "full" if self._buffer.is_full else ""
        if trouble and not self._trouble:
            self._trouble, self._error, self._since_s, self._is_told = trouble, None, now_s, False
        if not self._trouble:
            return
        self._error = error or self._error
        self._until_s = None if trouble else self._until_s or now_s
        # A disk that fails cannot take the report: Kafka has to have it first.
        may_report = error is None or self._events.topic in self._buffer.direct_topics
        if self._is_on_its_way or not may_report:
            return
        if self._is_told and self._until_s is not None:
            seconds = round(self._until_s - self._since_s)
            self._report("buffer-well", self._forget, trouble=self._trouble, seconds=seconds)
        elif not self._is_told and now_s >= self._due_s:
            self._report("buffer-trouble", lambda: self._told(now_s), trouble=self._trouble, error=self._error)
        elif not trouble:
            # It was short, and came soon after another.
            self._forget()

    def _told(self, now_s: float) -> None:
        self._is_told, self._due_s = True, now_s + INTERVAL_S

    def _forget(self) -> None:
        self._trouble = ""

    def _report(self, kind: str, then: Callable[[], None], **details: object) -> None:
        def done(stored: bool) -> None:  # noqa: FBT001 - see `Buffer.append_own`
            self._is_on_its_way = False
            if stored:
                then()

        entry = self._events.event_entry(kind, {"device": None, **details})
        self._is_on_its_way = True
        self._buffer.append_own(entry, done)
