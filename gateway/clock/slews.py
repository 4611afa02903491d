"""How much the kernel has slewed CLOCK_BOOTTIME: it runs faster or slower for a while to set the wall clock right.

A sensor's clock is held against CLOCK_BOOTTIME, and only its own oscillator is expected to change its pace. Pure: looks
come in, in microseconds.
"""

import math
from typing import NamedTuple

CRYSTAL_PPM = 100
"""What the kernel adds all the while sets the crystal right for good, and is no slewing: so much at the most."""
CHANGE_PPM = 20
"""NTP goes on to find that out: changes below this are part of it,"""
CHANGED_US = 60_000_000
"""after this time;"""
KEPT_US = 3_600_000_000
"""greater ones after this."""
JITTER_US = 20
"""Two looks may differ by this without any."""
APART_US_MIN = 500_000


class SlewsSeen(NamedTuple):
    """The last look, and what the kernel added all the while: kept from one start of the daemon to the next."""

    at_us: int
    adjusted_us: int
    rate_ppb: int


class Slews:
    """Adds it up. It is shared by all sensors' clocks: what was observed before a slew is worth less by its amount."""

    __slots__ = ("_adjusted_us", "_at_us", "_rate", "latest_us", "quiet_us", "total_us")

    def __init__(self) -> None:
        self.total_us = 0
        """Since the start, whichever way."""
        self.latest_us = 0
        """Between the last two looks: as much may be under way, until the next."""
        self.quiet_us: int | None = 0
        """`total_us`; None while more may be under way."""
        self._at_us: int | None = None
        self._adjusted_us = 0
        self._rate: float | None = None
        """What the kernel adds to the crystal's time all the while."""

    def looked(self, at_us: int, adjusted_us: int) -> None:
        """Take in a look: at this CLOCK_BOOTTIME, CLOCK_MONOTONIC less CLOCK_MONOTONIC_RAW was this."""
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
        """What `since` asks for later on; None before the first look."""
        return (
            None if self._at_us is None else SlewsSeen(self._at_us, self._adjusted_us, round((self._rate or 0.0) * 1e9))
        )

    def since(self, seen: SlewsSeen) -> int:
        """By how much it was slewed from a look that an earlier start took to the newest one.

        Where there is none yet, the next one is compared with that, and adds to `total_us`.
        """
        if self._at_us is None:
            self._at_us, self._adjusted_us, self._rate = seen.at_us, seen.adjusted_us, seen.rate_ppb / 1e9
        kept_us = seen.rate_ppb * (self._at_us - seen.at_us) / 1e9
        return math.ceil(abs(self._adjusted_us - seen.adjusted_us - kept_us))
