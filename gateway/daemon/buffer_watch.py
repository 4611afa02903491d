"""Reports that the buffer takes nothing, and that it takes readings again, as events."""

from collections.abc import Callable

from gateway.buffer.buffer import Buffer

INTERVAL_S = 300.0
"""Least seconds between two reports of trouble: it may come and go."""


class BufferWatch:
    """Looks whether the disk fails or the buffer is full, and reports each change once."""

    def __init__(self, buffer: Buffer, event: Callable[..., None], events_topic: str) -> None:
        self._buffer = buffer
        self._event = event
        self._events_topic = events_topic
        self._trouble = ""
        self._error: str | None = None
        self._since_s = 0.0
        self._is_told = False
        self._due_s = 0.0

    def look(self, now_s: float) -> None:
        """Report a change."""
        error = self._buffer.state.failing
        trouble = "failing" if error is not None else "full" if self._buffer.is_full else ""
        if trouble and not self._trouble:
            self._since_s, self._is_told, self._error = now_s, False, None
        self._error = error or self._error
        # A disk that fails cannot take the report: Kafka has to have it first. A full buffer has room for events.
        may_tell = error is None or self._events_topic in self._buffer.direct_topics
        if not self._is_told and now_s >= self._due_s and may_tell and (trouble or self._trouble):
            self._event("buffer-trouble", None, trouble=trouble or self._trouble, error=self._error)
            self._is_told, self._due_s = True, now_s + INTERVAL_S
        if self._trouble and not trouble and self._is_told:
            self._event("buffer-well", None, trouble=self._trouble, seconds=round(now_s - self._since_s))
        self._trouble = trouble
