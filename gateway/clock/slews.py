"""Measures how much the kernel slews CLOCK_BOOTTIME, which runs faster or slower while the wall clock is set right.

A sensor's clock is compared with CLOCK_BOOTTIME, so slewing looks like a change of the sensor's own pace. Pure: looks
come in, in microseconds.
"""

import math
from typing import NamedTuple

CRYSTAL_PPM = 100
"""Greatest steady correction by the kernel. It makes up for the crystal's error, and is no slewing."""
CHANGE_PPM = 20
"""Change of rate up to which NTP may still be learning the steady correction."""
CHANGED_US = 60_000_000
"""Time constant by which a change up to CHANGE_PPM becomes part of the steady correction."""
KEPT_US = 3_600_000_000
"""Time constant by which a greater change does."""
JITTER_US = 20
"""Most by which two looks may differ without slewing."""
APART_US_MIN = 500_000


class SlewsSeen(NamedTuple):
    """The last look and the steady correction, kept from one start of the daemon to the next."""

    at_us: int
    adjusted_us: int
    rate_ppb: int


class Slews:
    """Adds up slewing, for all sensors' clocks: observations before a slew are widened by its amount."""

    __slots__ = ("_adjusted_us", "_at_us", "_rate", "latest_us", "quiet_us", "total_us")

    def __init__(self) -> None:
        self.total_us = 0
        """Slewing since the start, in either direction."""
        self.latest_us = 0
        """Slewing between the last two looks. As much may be under way until the next look."""
        self.quiet_us: int | None = 0
        """`total_us`; None while slewing may be under way."""
        self._at_us: int | None = None
        self._adjusted_us = 0
        self._rate: float | None = None
        """The kernel's steady correction of the crystal."""

    def looked(self, at_us: int, adjusted_us: int) -> None:
        """Take in a look: CLOCK_BOOTTIME, and CLOCK_MONOTONIC less CLOCK_MONOTONIC_RAW at that time."""
        if self._at_us is not None:
            apart_us = at_us - self._at_us
            if apart_us < APART_US_MIN:
                return
            added_us = adjusted_us - self._adjusted_us
            rate = added_us / apart_us
            if self._rate is None:
                self._rate = rate if abs(rate) <= CRYSTAL_PPM / 1e6 else 0.0
            slewed_us = abs(added_us - self._rate * apart_us)
            self.latest_us = math.ceil(slewed_us) if slewed_us > JITTER_US else 0
            self.total_us += self.latest_us
            self.quiet_us = None if self.latest_us else self.total_us
            taken_us = CHANGED_US if abs(rate - self._rate) <= CHANGE_PPM / 1e6 else KEPT_US
            if abs(rate) <= CRYSTAL_PPM / 1e6:
                self._rate += (rate - self._rate) * min(1.0, apart_us / taken_us)
        self._at_us, self._adjusted_us = at_us, adjusted_us

    @property
    def seen(self) -> SlewsSeen | None:
        """The argument for a later `since`; None before the first look."""
        return (
            None if self._at_us is None else SlewsSeen(self._at_us, self._adjusted_us, round((self._rate or 0.0) * 1e9))
        )

    def since(self, seen: SlewsSeen) -> int:
        """Slewing from an earlier start's last look to the newest look.

        If there is no look yet, the next one is compared with the earlier start's, and adds to `total_us`.
        """
        if self._at_us is None:
            self._at_us, self._adjusted_us, self._rate = seen.at_us, seen.adjusted_us, seen.rate_ppb / 1e9
        kept_us = seen.rate_ppb * (self._at_us - seen.at_us) / 1e9
        return math.ceil(abs(self._adjusted_us - seen.adjusted_us - kept_us))
