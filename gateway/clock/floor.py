"""The latest time that is known to have passed: a lower bound of the true time, in a box that does not know it.

It serves TLS alone (`tls.dates`): what ended before it has ended. It is never taken for the time (promise P5), however
plausible it looks: a box that was off for a year has the floor of a year ago.
"""

from collections.abc import Mapping
from typing import Final

from gateway.reading import Mark

FIRST_RELEASED_US: Final = 1_795_305_600_000_000
"""2026-11-22T00:00Z, in microseconds since 1970: no version of this code was there before. Never to be changed: a boot
of this box may have been of the first one."""
RELEASED_US: Final = 1_795_305_600_000_000
"""The same of this version: to be set anew with each release."""
SAVE_US: Final = 3_600_000_000
"""It is written down no more often than this, for the card's sake."""
CLOCK_MARKS: Final = "clock/"
FLOOR_MARK: Final = CLOCK_MARKS + "floor"
"""What the buffer keeps it by: microseconds since 1970, in decimal."""
_DIGITS_MAX: Final = 16
"""Up to the year 2286: what is longer is damaged. int() refuses thousands of digits, and no date goes that far."""


class ClockFloor:
    """The floor of one gateway, which outlives a restart by a mark in the buffer. It reads no clock."""

    def __init__(self) -> None:
        self._us = RELEASED_US
        self._kept_us = 0
        """What the buffer has."""

    @property
    def us(self) -> int:
        """Microseconds since 1970, UTC: the true time is later."""
        return self._us

    def recall(self, marks: Mapping[str, bytes]) -> None:
        """Go on from what the buffer has kept under `CLOCK_MARKS`; without it where that is damaged. Raises nothing."""
        kept = marks.get(FLOOR_MARK, b"")
        if kept.isdigit() and len(kept) <= _DIGITS_MAX:
            self._kept_us = int(kept)
            self._us = max(self._us, self._kept_us)

    def learn(self, wall_us: int, error_us: int) -> Mark | None:
        """A synced clock says that it is `wall_us`, within a bound; the mark to keep, where that is due.

        A floor that lies beyond what a synced clock takes for possible was of a clock that was synced to a wrong time:
        were it kept, it would refuse certificates for as long as the error was large.
        """
        passed_us = wall_us - error_us
        if passed_us > self._us or wall_us + error_us < self._us:
            self._us = max(RELEASED_US, passed_us)
        if self._kept_us <= self._us < self._kept_us + SAVE_US:
            return None
        self._kept_us = self._us
        return Mark(FLOOR_MARK, b"%d" % self._us)
