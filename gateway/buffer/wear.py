"""Counts what comes in and what goes to the disk for it: the figures of the write budget."""

from pathlib import Path
from typing import NamedTuple

INTERVAL_S = 60.0
"""How often the figures are written down, and only together with something else: an idle box writes nothing."""
_PROCESS_IO = Path("/proc/self/io")


class Usage(NamedTuple):
    """What a stretch of time brought."""

    seconds: float
    readings: int
    stored_bytes: int
    """Payload bytes."""
    disk_bytes: int
    """What this process had written to disk, in whole pages (proc(5), write_bytes)."""


class WriteMeter:
    """Adds up commits until their sum is written down. `now_s` is a monotonic clock's, in seconds."""

    def __init__(self, now_s: float) -> None:
        self.reset(now_s)

    def reset(self, now_s: float) -> None:
        """Begin to count anew."""
        self._since_s = now_s
        self._readings = 0
        self._stored_bytes = 0
        self._disk_bytes = _written_bytes()

    def add(self, readings: int, payload_bytes: int) -> None:
        """Count what a commit stored."""
        self._readings += readings
        self._stored_bytes += payload_bytes

    def so_far(self, now_s: float) -> Usage:
        """What was counted since it was last written down."""
        written = max(0, _written_bytes() - self._disk_bytes)
        return Usage(now_s - self._since_s, self._readings, self._stored_bytes, written)

    def due(self, now_s: float) -> Usage | None:
        """What is to be written down now, if anything; `reset` once it is on disk."""
        return None if now_s < self._since_s + INTERVAL_S else self.so_far(now_s)


def _written_bytes() -> int:
    """Bytes that this process caused to be written to storage; 0 where the kernel does not count them."""
    try:
        lines = _PROCESS_IO.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes:")), 0)
