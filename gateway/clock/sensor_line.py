"""Computes the earliest and the latest time of a clock's ticks from observations of this clock by another.

An observation is a certain interval: at this tick, the other clock stood between two times. A clock's rate is near 1
and changes slowly. All lines (offset and rate) at one tick that agree with every observation form a polygon. Only its
corners are needed. No probability is involved: while the limits of the rate hold, the bounds hold
(set-membership estimation; see Marzullo and Owicki, 1983, for intervals, and Milanese and Vicino, 1991).

All ticks and times are in microseconds. Without I/O, without a clock.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ROUNDING_US = 0.01
"""Slack for floating point, so that observations that touch in one point still agree."""
NO_LOWER_LIMIT = -math.inf
"""`earliest_us` of an observation that has only an upper limit."""


class Observation(NamedTuple):
    """The clock showed `tick_us` at some time from `earliest_us` to `latest_us` of the observing clock."""

    tick_us: float
    earliest_us: float
    """`NO_LOWER_LIMIT` if only an upper limit is known."""
    latest_us: float

    def widened(self, by_us: float) -> "Observation":
        return Observation(self.tick_us, self.earliest_us - by_us, self.latest_us + by_us)


@dataclass(frozen=True, slots=True)
class RateLimits:
    """How far from 1 a clock's rate (time per tick) may be, and how it may change."""

    error: float
    """Greatest |rate - 1|."""
    wander_per_us: float
    """Greatest change of the rate in a microsecond."""
    spread: float
    """Greatest change of the rate between any two times while the clock runs."""

    def change(self, distance_us: float) -> float:
        """Greatest change of the rate over `distance_us`."""
        return min(self.wander_per_us * abs(distance_us), self.spread)

    def slack_us(self, distance_us: float) -> float:
        """Greatest distance of a clock, `distance_us` away, from the line that touches it here.

        It is the integral of the change of rate: quadratic until the spread is used up, then linear.
        """
        distance_us = abs(distance_us)
        reach_us = self.spread / self.wander_per_us
        if distance_us <= reach_us:
            return self.wander_per_us * distance_us * distance_us / 2
        return self.spread * (distance_us - reach_us / 2)

    def bulge_us(self, before_us: float, after_us: float) -> float:
        """Greatest distance of a clock from the chord of two observations, at a time after one and before the other."""
        return before_us * after_us * min(self.wander_per_us / 2, self.spread / (before_us + after_us))


Corner = tuple[float, float]
"""Offset (time less tick, microseconds) and rate less 1, both at the tick of a `Lines`."""


@dataclass(frozen=True, slots=True)
class Lines:
    """All lines through one tick that agree with the observations."""

    tick_us: float
    corners: tuple[Corner, ...]
    limits: RateLimits

    def span_at(self, tick_us: float) -> tuple[float, float]:
        """The earliest and the latest time at which the clock may have shown `tick_us`."""
        distance_us = tick_us - self.tick_us
        ends = [offset + rate * distance_us for offset, rate in self.corners]
        slack_us = self.limits.slack_us(distance_us)
        return tick_us + min(ends) - slack_us, tick_us + max(ends) + slack_us

    def rates(self) -> tuple[float, float]:
        """The least and the greatest rate (time per tick, less 1) at this tick."""
        rates = [rate for _, rate in self.corners]
        return min(rates), max(rates)


def chord(before: Observation, after: Observation, tick_us: float) -> tuple[float, float]:
    """The earliest and the latest time of a tick between two observations, if the rate did not change."""
    share = (tick_us - before.tick_us) / (after.tick_us - before.tick_us)
    return (
        before.earliest_us + share * (after.earliest_us - before.earliest_us),
        before.latest_us + share * (after.latest_us - before.latest_us),
    )


def lines_at(tick_us: float, observations: Iterable[Observation], limits: RateLimits) -> Lines | None:
    """All lines through a tick that agree with the observations; None if none does.

    At least one observation must have a lower limit.
    """
    # The nearest first: it leaves a small polygon, and most of the others then cut nothing off.
    by_distance = sorted(observations, key=lambda seen: abs(seen.tick_us - tick_us))
    first = next(seen for seen in by_distance if seen.earliest_us > NO_LOWER_LIMIT)
    distance_us = first.tick_us - tick_us
    slack_us = limits.slack_us(distance_us)
    low = first.earliest_us - first.tick_us - slack_us
    high = first.latest_us - first.tick_us + slack_us
    if low > high:
        return None
    corners: Sequence[Corner] = [
        (low + limits.error * distance_us, -limits.error),
        (high + limits.error * distance_us, -limits.error),
        (high - limits.error * distance_us, limits.error),
        (low - limits.error * distance_us, limits.error),
    ]
    for tick, earliest_us, latest_us in by_distance:
        distance_us = tick - tick_us
        slack_us = limits.slack_us(distance_us) + ROUNDING_US
        low, high = earliest_us - tick - slack_us, latest_us - tick + slack_us
        offsets = [offset + rate * distance_us for offset, rate in corners]
        if max(offsets) > high:
            corners = _cut(corners, [each - high for each in offsets])
            if not corners:
                return None
            offsets = [offset + rate * distance_us for offset, rate in corners]
        if min(offsets) < low:
            corners = _cut(corners, [low - each for each in offsets])
            if not corners:
                return None
    return Lines(tick_us, tuple(corners), limits)


def _cut(corners: Sequence[Corner], over: Sequence[float]) -> Sequence[Corner]:
    """The rest of a polygon after a cut. A corner is cut off if its `over`, the distance beyond the cut, is above 0."""
    left: list[Corner] = []
    before, over_before = corners[-1], over[-1]
    for corner, by in zip(corners, over, strict=True):
        if (by <= 0) != (over_before <= 0):
            share = over_before / (over_before - by)
            left.append((before[0] + share * (corner[0] - before[0]), before[1] + share * (corner[1] - before[1])))
        if by <= 0:
            left.append(corner)
        before, over_before = corner, by
    return left
