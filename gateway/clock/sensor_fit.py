"""Fits a sensor's clock: finds the lines that agree with all observations of its ticks by the gateway.

Pure: observations come in, times and bounds come out, all in microseconds.
"""

from collections.abc import Sequence
from typing import Literal

from gateway.clock.oscillators import KINDS, Kind, rate_error, rate_limits
from gateway.clock.sensor_line import NO_LOWER_LIMIT, Lines, Observation, RateLimits, lines_at
from gateway.clock.straight_bounds import StraightBounds, bounds_from
from gateway.clock.tick_counter import SAMPLE_TICK_US

OBSERVATIONS_MAX = 32
"""Observations kept of one clock, the fewer the older they are. They bridge outages."""
NEWEST_KEPT = 12
CONTRADICTIONS_MAX = 3
"""Contradictions after which the oscillator is taken for the next worse kind. Two agreements make up for one."""
STRAIN_MAX = 16
"""Greatest factor on the change of rate that an oscillator should have. Beyond it, old observations are dropped."""
_STEP_TOLERANCE_US = 5_000
_WIDE_US = 1e9
"""Width from which on an interval tells nothing about a time."""

Learnt = Literal["agrees", "was-late", "others-were-late", "nothing-left"]
"""Result of an arrival: it agrees with the others; it was under way for longer than was thought; older ones were; or no
lower limit is left."""


class SensorFit:
    """All lines that agree with the observations of one sensor's clock, and the rates and bounds that they allow."""

    __slots__ = (
        "_contradictions",
        "bounds",
        "bounds_earlier",
        "former",
        "lines",
        "observations",
        "paced_by",
        "slewed_us",
        "strain",
        "version",
    )

    def __init__(self, kind: Kind, slewed_us: int) -> None:
        self.paced_by: Kind = kind
        """Kind of oscillator that the observations show. It may be worse than the setting says."""
        self.slewed_us = slewed_us
        """Slewing of the gateway's clock that the observations allow for."""
        self.strain = 1
        self._contradictions = 0
        self.observations: list[Observation] = []
        """Sorted by tick."""
        self.former: list[Observation] = []
        """Observations before a jump that is not confirmed yet."""
        self.lines: Lines | None = None
        """At the newest observation's tick."""
        self.bounds: StraightBounds | None = None
        self.bounds_earlier: StraightBounds | None = None
        """`bounds` for older samples, which are asked for in turns with new ones."""
        self.version = 0
        """Changes whenever something was learnt."""

    @property
    def observed_us(self) -> int | None:
        """Time of the last observation."""
        return round(self.observations[-1].latest_us) if self.observations else None

    @property
    def limits(self) -> RateLimits:
        """Limits that the clock's rate is believed to keep."""
        return rate_limits(self.paced_by, self.strain)

    @property
    def drift_ppm(self) -> tuple[float, float] | None:
        """Least and greatest drift, in parts per million above true; None if it is unknown."""
        if self.lines is None:
            return None
        slow, fast = self.lines.rates()
        return -fast / (1 + fast) * 1e6, -slow / (1 + slow) * 1e6

    @property
    def error_us(self) -> int | None:
        """Bound of a sample taken at the last observation; None if it is unknown."""
        if self.lines is None:
            return None
        earliest_us, latest_us = self.lines.span_at(self.lines.tick_us)
        return round((latest_us - earliest_us + SAMPLE_TICK_US) / 2)

    @property
    def has_jumped(self) -> bool:
        """Whether the last observation contradicts those before, and it is still open which are right."""
        return bool(self.former)

    def error_us_at(self, at_us: int) -> int | None:
        """Bound of a sample taken at this time, not before the last observation; None if it is unknown."""
        lines = self.lines
        if lines is None or self.former:
            return None
        earliest_us, latest_us = lines.span_at(lines.tick_us)
        # Gateway time stands in for ticks. If the clock is one per cent off, the bound is off by less than 1 ms.
        earliest_us, latest_us = lines.span_at(lines.tick_us + max(0.0, at_us - (earliest_us + latest_us) / 2))
        return round((latest_us - earliest_us + SAMPLE_TICK_US) / 2)

    def rates_at(self, tick_us: float) -> tuple[float, float]:
        """The least and the greatest rate (time per tick, less 1) that the clock may have at a tick."""
        limits = self.limits
        if self.lines is None:
            return -limits.error, limits.error
        slow, fast = self.lines.rates()
        change = limits.change(tick_us - self.lines.tick_us)
        return max(slow - change, -limits.error), min(fast + change, limits.error)

    def span(self, tick_us: float) -> tuple[float, float]:
        """The earliest and the latest time of a tick. Call it only while there are `lines`."""
        bounds = self.bounds
        if bounds is None or not bounds.from_us <= tick_us < bounds.until_us:
            assert self.lines is not None  # noqa: S101 - whoever asks has looked
            bounds = self.bounds = bounds_from(tick_us, self.lines, self.observations)
        distance_us = tick_us - bounds.from_us
        return (
            bounds.earliest_us + bounds.earliest_rate * distance_us,
            bounds.latest_us + bounds.latest_rate * distance_us,
        )

    def restart(self) -> None:
        """Forget all observations: the counter is another one."""
        self.observations, self.former = [], []
        self.lines = self.bounds = self.bounds_earlier = None
        self.version += 1

    def observe(self, seen: Observation) -> bool:
        """Take in a round trip, whose limits are certain. Returns False if one clock cannot come to it from the last.

        Observations before a jump are not used until another round trip says which are right.
        """
        if self.former and not self._follows(self.observations, seen) and self._follows(self.former, seen):
            # The round trip before this one was the odd one out.
            self.observations = self.former
        is_continuous = self._follows(self.observations, seen)
        self.former = []
        self.weigh(is_contradiction=not is_continuous)
        if not is_continuous:
            self.former, self.observations = self.observations, []
        self._add(seen)
        self.refit()
        return is_continuous

    def learn(self, seen: Observation) -> Learnt:
        """Take in an arrival: an upper limit, which is certain, and perhaps a lower one, which is not."""
        before = self.observations
        self._add(seen)
        is_fitting = self._fit()
        if not is_fitting or seen.earliest_us > NO_LOWER_LIMIT:
            self.weigh(is_contradiction=not is_fitting)
        if is_fitting:
            return "agrees"
        if seen.earliest_us > NO_LOWER_LIMIT:
            certain = [each._replace(earliest_us=NO_LOWER_LIMIT) for each in before]
            if lines_at(seen.tick_us, [seen, *certain], self.limits) is None:
                self.observations = before
                self._fit()
                return "was-late"
        for place, each in enumerate(self.observations):
            if each is not seen:
                # Older arrivals may have been under way for longer than was thought.
                self.observations[place] = each._replace(earliest_us=NO_LOWER_LIMIT)
                if self._fit():
                    return "others-were-late"
        return "nothing-left"

    def weigh(self, *, is_contradiction: bool) -> None:
        """Count a contradiction or an agreement. After too many contradictions, assume the next worse oscillator."""
        self._contradictions = max(0, self._contradictions + (2 if is_contradiction else -1))
        if self._contradictions >= 2 * CONTRADICTIONS_MAX and self.paced_by != KINDS[-1]:
            self.paced_by, self.strain = KINDS[KINDS.index(self.paced_by) + 1], 1
            self._contradictions = 0

    def allow_for_slews(self, slewed_us: int) -> None:
        """Widen the observations by what the gateway's clock was slewed after them."""
        by_us = slewed_us - self.slewed_us
        if by_us == 0:
            return
        self.slewed_us = slewed_us
        self.observations = [seen.widened(by_us) for seen in self.observations]
        self.former = [seen.widened(by_us) for seen in self.former]
        if self.observations:
            self.refit()

    def refit(self) -> None:
        """Find lines that agree with all observations. If none does, allow more change of rate, then drop old ones."""
        while not self._fit() and self._has_lower():
            if self.strain < STRAIN_MAX:
                self.strain *= 2
            else:
                del self.observations[0]

    def _add(self, seen: Observation) -> None:
        self.observations = thinned(sorted([*self.observations, seen]), OBSERVATIONS_MAX)

    def _fit(self) -> bool:
        """Find the lines that agree with all observations; return whether there are any."""
        self.version += 1
        self.bounds = self.bounds_earlier = self.lines = None
        if self._has_lower():
            self.lines = lines_at(self.observations[-1].tick_us, self.observations, self.limits)
        return self.lines is not None

    def _has_lower(self) -> bool:
        return any(seen.earliest_us > NO_LOWER_LIMIT for seen in self.observations)

    def _follows(self, observations: Sequence[Observation], seen: Observation) -> bool:
        """Whether this clock may come from the last of these observations to the one seen now."""
        if not observations:
            return True
        last = observations[-1]
        ticks_us, error = seen.tick_us - last.tick_us, rate_error(self.paced_by)
        ends = ticks_us * (1 - error), ticks_us * (1 + error)
        return (
            min(ends) <= seen.latest_us - last.earliest_us + _STEP_TOLERANCE_US
            and max(ends) >= seen.earliest_us - last.latest_us - _STEP_TOLERANCE_US
        )


def thinned(observations: Sequence[Observation], limit: int) -> list[Observation]:
    """At most `limit` of the observations: the newest, and of the others those that tell most."""
    kept = list(observations)
    while len(kept) > limit:
        widths_us = [min(seen.latest_us - seen.earliest_us, _WIDE_US) for seen in kept]
        least_us = min(widths_us) + 1_000
        newest_us = kept[-1].tick_us
        # An observation is worth less if its neighbours are near, for its age, and if it is wide.
        worth = [
            (kept[place + 1].tick_us - kept[place - 1].tick_us)
            / (newest_us - kept[place].tick_us + 1)
            / (widths_us[place] + least_us)
            for place in range(1, max(2, len(kept) - min(NEWEST_KEPT, limit // 2)))
        ]
        del kept[1 + worth.index(min(worth))]
    return kept
