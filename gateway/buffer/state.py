"""What the buffer says of itself: how much it holds, whether it is full, whether it fails."""

import time
from dataclasses import dataclass

import structlog

from gateway.buffer.file import BufferFile
from gateway.settings import BufferSettings

ROOM_SAID_AFTER_S = 10.0
"""A buffer at its bound is full and not full many times a second: it is said once."""
FULL_WORDS = {
    "refuse": "buffer full: sensors keep what they have until Kafka has taken some, or the disk has room",
    "drop-oldest": "buffer full: the oldest readings make room, and are counted as lost",
}

log = structlog.get_logger()


@dataclass(slots=True)
class BufferState:
    """What the buffer says of itself; written by its thread, read by anybody."""

    bytes_used: int = 0
    rows: int = 0
    backlog_lanes: int = 0
    """Lanes that hold rows, before the one that rows go into."""
    full: bool = False
    failing: str | None = None
    """SQLite's words while commits fail; readings are held meanwhile, not lost."""


class StateWatch:
    """Keeps the state true, and logs each change once. The buffer's thread changes it; any may read it."""

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self.state = BufferState()
        self.is_stuck = False
        """Whether there is nothing left that could be dropped, and still no room."""
        self.has_said_full = False
        self._full_seen_s = 0.0

    @property
    def cannot_store(self) -> bool:
        """See `Intake.cannot_store`."""
        is_without_room = self.state.full and (self._settings.when_full == "refuse" or self.is_stuck)
        return is_without_room or self.state.failing is not None

    @property
    def room_said_s(self) -> float:
        """When it may be said that there is room again; infinite where it was not said that there is none."""
        return self._full_seen_s + ROOM_SAID_AFTER_S if self.has_said_full else float("inf")

    def measure(self, file: BufferFile, *, without_room: bool) -> None:
        """See how much room is left; say so when that changes. Raises sqlite3.Error, OSError."""
        state = self.state
        state.bytes_used = file.room.used_bytes()
        full = without_room or file.room.is_full()
        state.rows = file.lanes.rows
        state.backlog_lanes = file.lanes.backlog_lanes
        state.full = full
        now_s = time.monotonic()
        if full:
            self._full_seen_s = now_s
            if not self.has_said_full:
                log.warning(
                    FULL_WORDS[self._settings.when_full],
                    bytes_used=state.bytes_used,
                    disk_free=file.room.disk_free_bytes(),
                    settings="buffer.bytes_max, buffer.free_bytes_min, buffer.when_full",
                )
                self.has_said_full = True
        elif self.has_said_full and now_s >= self._full_seen_s + ROOM_SAID_AFTER_S:
            self.has_said_full = False
            log.info("buffer has room again", bytes_used=state.bytes_used)

    def fail(self, words: str) -> None:
        """Nothing can be read or written, for this reason."""
        if self.state.failing is None:
            log.error(
                "buffer cannot be read or written: nothing is acknowledged until it can; it is tried each second",
                error=words,
                path=str(self._settings.path),
            )
        self.state.failing = words

    def recover(self) -> None:
        """A commit was written."""
        if self.state.failing is not None:
            log.info("buffer can be written again", path=str(self._settings.path))
            self.state.failing = None
