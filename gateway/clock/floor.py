"""The floor: the latest time that has surely passed, in a box that does not know the time.

The floor serves TLS alone (`tls.dates`): a certificate that ended before it has expired. It is never taken for the time
(promise P5), however plausible it looks: if a box was off for a year, its floor is a year old.
"""

from collections.abc import Mapping
from typing import Final

from gateway.reading import Mark

FIRST_RELEASED_US: Final = 1_795_305_600_000_000
"""Date of the first release, 2026-11-22T00:00Z, in microseconds since 1970. Never change it: a boot of this box may
have run the first release."""
RELEASED_US: Final = 1_795_305_600_000_000
"""Date of this release, in microseconds since 1970. Set it anew for each release."""
SAVE_US: Final = 3_600_000_000
"""Microseconds that the floor must grow by before it is written again, to spare the card."""
CLOCK_MARKS: Final = "clock/"
FLOOR_MARK: Final = CLOCK_MARKS + "floor"
"""Key of the floor in the buffer. Its value is microseconds since 1970, in decimal."""
_DIGITS_MAX: Final = 16
"""Digits of a floor up to the year 2286. A longer value is damaged, and int() refuses thousands of digits."""


class ClockFloor:
    """The floor of one gateway, which survives a restart as a mark in the buffer. It reads no clock."""

    def __init__(self) -> None:
        self._us = RELEASED_US
        self._kept_us = 0
        """The floor in the buffer."""

    @property
    def us(self) -> int:
        """Microseconds since 1970, UTC: the true time is later."""
        return self._us

    def recall(self, marks: Mapping[str, bytes]) -> None:
        """Go on from the floor among the buffer's marks (`CLOCK_MARKS`). A damaged mark is ignored."""
        kept = marks.get(FLOOR_MARK, b"")
        if kept.isdigit() and len(kept) <= _DIGITS_MAX:
            self._kept_us = int(kept)
            self._us = max(self._us, self._kept_us)

    def learn(self, wall_us: int, error_us: int) -> Mark | None:
        """Learn from a synced clock that it is `wall_us`, within a bound. Returns the mark to keep, if one is due.

        If the floor is later than the synced clock allows, it came from a clock that was synced to a wrong time. The
        floor is then lowered: otherwise it would refuse certificates until time had caught up with it.
        """
        passed_us = wall_us - error_us
        if passed_us > self._us or wall_us + error_us < self._us:
            self._us = max(RELEASED_US, passed_us)
        if self._kept_us <= self._us < self._kept_us + SAVE_US:
            return None
        self._kept_us = self._us
        return Mark(FLOOR_MARK, b"%d" % self._us)
