"""When a device counts as silent, in `sluice status` and on the page alike: by the pauses it made before. No I/O."""

from typing import Protocol

SILENT_S_MIN = 60.0
SILENT_PAUSES = 3
SILENT_INTERVALS = 5
UNHEARD_S = 600.0
"""So long after the start, a device that the buffer knows and that was not heard yet is silent."""
FORGOTTEN_S = 604_800.0
"""A device that was silent for a week is no news any more."""


class Habit(Protocol):
    """What is known of a device since the gateway was started. Times are CLOCK_BOOTTIME in microseconds."""

    @property
    def readings(self) -> int:
        """Of its present boot, as are the next two."""

    @property
    def since_us(self) -> int:
        """When the first came in."""

    @property
    def received_us(self) -> int:
        """When the last came in."""

    @property
    def longest_pause_us(self) -> int:
        """The longest pause between two of them, and of those of boots before."""


def is_silent(heard_s: float | None, of: Habit | None, up_s: float | None) -> bool:
    """Whether a device that was heard so long ago should have been heard since.

    It should once it pauses for longer than `SILENT_S_MIN`, `SILENT_PAUSES` times its longest pause, and
    `SILENT_INTERVALS` of its readings. `of` is None where it was not heard since the start, `up_s` ago (None where
    nothing tells that).
    """
    if heard_s is None or heard_s > FORGOTTEN_S:
        return False
    if of is None:
        return up_s is not None and up_s > UNHEARD_S < heard_s
    mean_s = mean_interval_s(of)
    if mean_s is None:
        return False
    return heard_s > max(SILENT_S_MIN, SILENT_PAUSES * of.longest_pause_us / 1e6, SILENT_INTERVALS * mean_s)


def mean_interval_s(of: Habit) -> float | None:
    """Between two readings of its boot; None before the second."""
    return (of.received_us - of.since_us) / 1e6 / (of.readings - 1) if of.readings > 1 else None
