"""Judges whether an absolute time that a sensor sent is plausible, by the time of the reading's receipt.

Pure: wall times in microseconds since 1970, UTC.
"""

from typing import Literal, NamedTuple

from gateway.clock.floor import RELEASED_US
from gateway.clock.gateway_clock import WallClock
from gateway.reading import Datum
from gateway.settings import GatewaySettings

LATEST_US = 2**32 * 1_000_000
"""The year 2106, when the 32 bits of many sensors' clocks end."""

Implausible = Literal["ahead", "behind"]


class TimeLimits(NamedTuple):
    """Most that a sensor's time may be ahead of or behind the receipt, beside the bounds of both times."""

    ahead_us: int
    behind_us: int

    @classmethod
    def of(cls, gateway: GatewaySettings) -> "TimeLimits":
        return cls(int(gateway.time_ahead_s_max * 1e6), int(gateway.time_behind_s_max * 1e6))


DEFAULT_LIMITS = TimeLimits.of(GatewaySettings("default"))


def implausible(
    device_time_us: int, error_us: int, received_us: int, clock: WallClock, limits: TimeLimits
) -> Implausible | None:
    """Direction in which a sensor's time is too far off; None if the time is plausible.

    `error_us` is the bound that the installer vouches for, and `received_us` the CLOCK_BOOTTIME of the receipt. If the
    gateway's clock is unknown, any time from this release to the year 2106 is plausible.
    """
    earliest_us, latest_us = RELEASED_US, LATEST_US
    if clock.error_us is not None:
        at_us, room_us = clock.at(received_us), clock.error_us + error_us
        earliest_us, latest_us = at_us - limits.behind_us - room_us, at_us + limits.ahead_us + room_us
    if device_time_us > latest_us:
        return "ahead"
    return "behind" if device_time_us < earliest_us else None


def told_us(datum: Datum, clock: WallClock, limits: TimeLimits) -> int | None:
    """The time that a datum's sensor sent; None if it sent none, or an implausible one."""
    if datum.device_time_us is None:
        return None
    # A tick beside the time says that the receipt is unknown: the reading was taken in again in a later boot.
    clock = clock if datum.tick_ms is None else WallClock(0, None)
    wrong = implausible(datum.device_time_us, datum.event_error_us, datum.received_us, clock, limits)
    return datum.device_time_us if wrong is None else None
