"""The buffer's state: how much it holds, whether it is full, whether it fails."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from gateway.buffer.file import BufferFile
from gateway.buffer.shares import TOLD_MAX, TOLD_S, AboveShare
from gateway.host.terminal_text import escaped, shortened, size
from gateway.settings import BufferSettings

ROOM_SAID_AFTER_S = 10.0
"""Seconds of room before it is reported: a buffer at its bound is full and not full many times a second."""
FULL_WORDS = {
    "refuse": "buffer full: sensors keep what Kafka does not take first, until there is room",
    "drop-oldest": "buffer full: the oldest readings make room, and are counted as lost",
}
LOOKED_AFTER_S = 1.0
"""Seconds between two looks for devices above their share, also while nothing comes in."""
NAMED_MAX = 5
NAME_CHARACTERS_MAX = 80
ABOVE_SHARE_MEANS = {
    "refuse": "their readings are refused until Kafka has taken some, and those that a site's broker brings are lost; "
    "all other devices' are taken (buffer.fair_from)",
    "drop-oldest": "their own oldest readings make room, and are counted as lost; all other devices' are kept "
    "(buffer.fair_from)",
}

log = structlog.get_logger()


@dataclass(slots=True)
class BufferState:
    """The buffer's state; written by its thread, read by any."""

    bytes_used: int = 0
    rows: int = 0
    backlog_lanes: int = 0
    """Lanes before the current one that hold rows."""
    full: bool = False
    failing: str | None = None
    """SQLite's error while commits fail; readings are held meanwhile, not lost."""
    above_share: Sequence[AboveShare] = ()
    """Devices that were kept to their share in the last minute: the first `TOLD_MAX`, largest first."""
    above_share_devices: int = 0
    """Number of all such devices."""


def device_name(device: str) -> str:
    """A device's name for people, on a line of its own or within one."""
    return escaped(shortened(device, NAME_CHARACTERS_MAX)) if device else "no known device"


class StateWatch:
    """Updates the state, and logs each change once. The buffer's thread changes it; any may read it."""

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self.state = BufferState()
        self.is_stuck = False
        """Whether there is no room, and nothing left to drop."""
        self.has_said_full = False
        self._full_seen_s = 0.0
        self._stopped_since_s: float | None = None
        """Since when nothing is stored or deleted (monotonic); None if something is."""
        self._look_s = 0.0
        """When to look again for devices above their share."""
        self._limits_some = False
        self._said_above_s = float("-inf")

    @property
    def cannot_store(self) -> bool:
        """See `Intake.cannot_store`."""
        is_without_room = self.state.full and (self._settings.when_full == "refuse" or self.is_stuck)
        return is_without_room or self.state.failing is not None

    @property
    def due_s(self) -> float:
        """When the state may change without input: there is room again, or no device is above its share."""
        room_said_s = self._full_seen_s + ROOM_SAID_AFTER_S if self.has_said_full else float("inf")
        return min(room_said_s, self._look_s) if self._limits_some else room_said_s

    def measure(self, file: BufferFile, *, without_room: bool) -> None:
        """Measure the room that is left, and log a change. Raises sqlite3.Error, OSError."""
        state = self.state
        state.bytes_used, left = file.room.used_and_left()
        full = without_room or not left
        state.rows = file.lanes.rows + len(file.front)
        state.backlog_lanes = file.lanes.backlog_lanes
        state.full = full
        if not self.cannot_store:
            # Somebody made room: what needs the disk is tried again before any of it is refused.
            self._stopped_since_s = None
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOKED_AFTER_S
            self._tell_above_share(file.shares.above_share(now_s), now_s)
        self._limits_some = file.shares.limits_some
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

    def _tell_above_share(self, above: Sequence[AboveShare], now_s: float) -> None:
        """Keep the list for readers, and log it once a minute at most."""
        self.state.above_share, self.state.above_share_devices = above[:TOLD_MAX], len(above)
        if above and now_s >= self._said_above_s + TOLD_S:
            self._said_above_s = now_s
            log.warning(
                "devices hold more than their share of the buffer",
                means=ABOVE_SHARE_MEANS[self._settings.when_full],
                devices={device_name(each.device): size(each.bytes) for each in above[:NAMED_MAX]},
                others=len(above[NAMED_MAX:]),
                readings=sum(each.readings for each in above),
                settings="buffer.fair_from, buffer.bytes_max, buffer.when_full",
            )

    def fail(self, words: str) -> None:
        """Note that nothing can be read or written, for this reason."""
        if self.state.failing is None:
            log.error(
                "buffer cannot be read or written: until it can, only what Kafka takes first is acknowledged; it is "
                "tried each second",
                error=words,
                path=str(self._settings.path),
            )
        self.state.failing = words
        self.note_progress(made=False)

    def note_progress(self, *, made: bool) -> None:
        """Note that something was stored or deleted, or that it was tried in vain."""
        if made or not self.cannot_store:
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = time.monotonic()

    def has_stopped_for(self, seconds: float) -> bool:
        """Whether nothing was stored or deleted for so long, as the disk fails or has no room."""
        return self._stopped_since_s is not None and time.monotonic() >= self._stopped_since_s + seconds

    def recover(self) -> None:
        """Note that a commit was written."""
        if self.state.failing is not None:
            log.info("buffer can be written again", path=str(self._settings.path))
            self.state.failing = None
