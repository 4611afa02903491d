"""Whether an absolute time that a sensor sent can be right: it is judged by when the reading came in.

Pure: wall times in microseconds since 1970, UTC.
"""

from typing import Literal, NamedTuple, Protocol

from gateway.clock.floor import RELEASED_US
from gateway.clock.gateway_clock import WallClock
from gateway.settings import GatewaySettings

LATEST_US = 2**32 * 1_000_000
"""The year 2106, where the 32 bits of many a sensor's clock end."""

Implausible = Literal["ahead", "behind"]


class Dated(Protocol):
    """A reading that its sensor may have dated. Times are microseconds; the receipt is CLOCK_BOOTTIME."""

    @property
    def device_time_us(self) -> int | None:
        """The absolute time that the sensor sent."""

    @property
    def tick_ms(self) -> int | None:
        """The sensor's own clock."""

    @property
    def event_error_us(self) -> int:
        """The bound of the error of `device_time_us`."""

    @property
    def received_us(self) -> int:
        """When the reading came in."""


class TimeLimits(NamedTuple):
    """How far a sensor's time may be from that of its reading's receipt, beside what both may be off."""

    ahead_us: int
    behind_us: int

    @classmethod
    def of(cls, gateway: GatewaySettings) -> "TimeLimits":
        return cls(int(gateway.time_ahead_s_max * 1e6), int(gateway.time_behind_s_max * 1e6))


DEFAULT_LIMITS = TimeLimits.of(GatewaySettings("default"))


def implausible(
    device_time_us: int, error_us: int, received_us: int, clock: WallClock, limits: TimeLimits
) -> Implausible | None:
    """In which direction a sensor's time lies too far off; None where it is plausible.

    `error_us` is what its sender's installer vouches for, `received_us` the CLOCK_BOOTTIME of its receipt. Where the
    gateway's clock is not known, all that can be said is that it is of these years.
    """
    earliest_us, latest_us = RELEASED_US, LATEST_US
    if clock.error_us is not None:
        at_us, room_us = clock.at(received_us), clock.error_us + error_us
        earliest_us, latest_us = at_us - limits.behind_us - room_us, at_us + limits.ahead_us + room_us
    if device_time_us > latest_us:
        return "ahead"
    return "behind" if device_time_us < earliest_us else None


def told_us(row: Dated, clock: WallClock, limits: TimeLimits) -> int | None:
    """The time that a row's sensor sent, where it did and that can be right."""
    if row.device_time_us is None:
        return None
    # A tick beside it says that nothing is known of the receipt: taken in again in another boot than that.
    clock = clock if row.tick_ms is None else WallClock(0, None)
    wrong = implausible(row.device_time_us, row.event_error_us, row.received_us, clock, limits)
    return row.device_time_us if wrong is None else None
