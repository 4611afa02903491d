"""Straight bounds of the time of each tick in a stretch: cheaper than the exact bounds, which are curved.

They are never tighter than the exact bounds. All ticks and times are in microseconds.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from gateway.clock.sensor_line import NO_LOWER_LIMIT, ROUNDING_US, Lines, Observation, RateLimits, chord, lines_at

_STRETCH_US = 10_000_000
"""Length of a stretch. Straight bounds over it are ten microseconds wider than the exact ones."""
_AHEAD_US = 2_000_000
"""Ticks that are at most this much older than the newest observation are reckoned from that observation."""


class StraightBounds(NamedTuple):
    """The earliest and the latest time of each tick of a stretch."""

    from_us: float
    until_us: float
    earliest_us: float
    earliest_rate: float
    latest_us: float
    latest_rate: float


NOTHING_KNOWN = StraightBounds(0, math.inf, NO_LOWER_LIMIT, 0, 0, 1)
"""Stands in for bounds while there are no lines: arrivals are compared with their samples' bare ticks."""


def bounds_from(tick_us: float, lines: Lines, observations: Sequence[Observation]) -> StraightBounds:
    """The bounds of a stretch that begins at this tick; `lines` are those at the newest observation's tick."""
    if tick_us >= lines.tick_us - _AHEAD_US:
        return _straight(tick_us, tick_us + _STRETCH_US, lines.span_at)
    # Between observations, the bounds come from lines at this tick. Older bounds change slowly: the stretch is longer.
    until_us = tick_us + _STRETCH_US + (lines.tick_us - tick_us) / 100
    bounds = _straight(tick_us, until_us, (lines_at(tick_us, observations, lines.limits) or lines).span_at)
    place = bisect_right(observations, (tick_us,))
    before, after = observations[place - 1 : place + 1] if 0 < place < len(observations) else (None, None)
    if (
        before is None
        or after is None
        or until_us > after.tick_us
        or NO_LOWER_LIMIT in {before.earliest_us, after.earliest_us}
    ):
        return bounds
    return min(bounds, _between(before, after, tick_us, until_us, lines.limits), key=_width_us)


def _straight(from_us: float, until_us: float, span_at: Callable[[float], tuple[float, float]]) -> StraightBounds:
    """Chords of a span's two limits. The latest time is convex and the earliest concave, so the chords lie outside."""
    earliest_us, latest_us = span_at(from_us)
    earliest_end_us, latest_end_us = span_at(until_us)
    width_us = until_us - from_us
    return StraightBounds(
        from_us,
        until_us,
        earliest_us,
        (earliest_end_us - earliest_us) / width_us,
        latest_us,
        (latest_end_us - latest_us) / width_us,
    )


def _between(
    before: Observation, after: Observation, from_us: float, until_us: float, limits: RateLimits
) -> StraightBounds:
    """Bounds of a stretch between two observations, by these two alone."""
    middle_us = min(max((before.tick_us + after.tick_us) / 2, from_us), until_us)
    bulge_us = limits.bulge_us(middle_us - before.tick_us, after.tick_us - middle_us) + ROUNDING_US
    bounds = _straight(from_us, until_us, partial(chord, before, after))
    return bounds._replace(earliest_us=bounds.earliest_us - bulge_us, latest_us=bounds.latest_us + bulge_us)


def _width_us(bounds: StraightBounds) -> float:
    """Sum of the widths of the bounds at both ends of a stretch."""
    length_us = bounds.until_us - bounds.from_us
    return 2 * (bounds.latest_us - bounds.earliest_us) + length_us * (bounds.latest_rate - bounds.earliest_rate)
