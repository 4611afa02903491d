"""The fit of a sensor's clock: the lines that agree with all pairs of its ticks and the gateway's times.

Pure: observations come in, times and bounds come out, all in microseconds.
"""

from collections.abc import Sequence
from typing import Literal

from gateway.clock.oscillators import KINDS, Kind, rate_error, rate_limits
from gateway.clock.sensor_line import NO_LOWER_LIMIT, Lines, Observation, RateLimits, lines_at
from gateway.clock.straight_bounds import StraightBounds, bounds_from
from gateway.clock.tick_counter import SAMPLE_TICK_US

OBSERVATIONS_MAX = 32
"""The newest ones, and fewer the older they are: what an outage is bridged by."""
NEWEST_KEPT = 12
CONTRADICTIONS_MAX = 3
"""After so many, each weighed up by two agreements, a clock is taken for one of a worse oscillator than was said."""
STRAIN_MAX = 16
"""How many times as much change of rate than an oscillator should have is believed before an observation is not."""
_STEP_TOLERANCE_US = 5_000
_WIDE_US = 1e9
"""What tells no more than this of a time tells nothing."""

Learnt = Literal["agrees", "was-late", "others-were-late", "nothing-left"]
"""What came of an arrival: it agrees with the others; it was under way for longer than was thought; older ones were;
or no lower limit is left."""


class SensorFit:
    """All lines through what was observed of one sensor's clock; what they say of its rate and its bound."""

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
        """What its observations show: worse than was said, perhaps."""
        self.slewed_us = slewed_us
        """What the observations allow for."""
        self.strain = 1
        self._contradictions = 0
        self.observations: list[Observation] = []
        """By tick."""
        self.former: list[Observation] = []
        """What was known before a jump that nothing has confirmed yet."""
        self.lines: Lines | None = None
        """At the newest observation's tick."""
        self.bounds: StraightBounds | None = None
        self.bounds_earlier: StraightBounds | None = None
        """The same for samples of some time ago, which are asked for in turns with new ones."""
        self.version = 0
        """Another one whenever something was learnt."""

    @property
    def observed_us(self) -> int | None:
        """When the clock was observed last."""
        return round(self.observations[-1].latest_us) if self.observations else None

    @property
    def limits(self) -> RateLimits:
        """What its rate is believed to keep to."""
        return rate_limits(self.paced_by, self.strain)

    @property
    def drift_ppm(self) -> tuple[float, float] | None:
        """How fast it runs, at least and at most: parts per million above true. None where that is not known."""
        if self.lines is None:
            return None
        slow, fast = self.lines.rates()
        return -fast / (1 + fast) * 1e6, -slow / (1 + slow) * 1e6

    @property
    def error_us(self) -> int | None:
        """The bound of a sample that is taken when it was observed last; None where it is not known."""
        if self.lines is None:
            return None
        earliest_us, latest_us = self.lines.span_at(self.lines.tick_us)
        return round((latest_us - earliest_us + SAMPLE_TICK_US) / 2)

    @property
    def has_jumped(self) -> bool:
        """Whether the last observation contradicts those before, and nothing has said yet which is right."""
        return bool(self.former)

    def error_us_at(self, at_us: int) -> int | None:
        """The bound of a sample that is taken at this time, which is none before the last observation.

        None where it is not known.
        """
        lines = self.lines
        if lines is None or self.former:
            return None
        earliest_us, latest_us = lines.span_at(lines.tick_us)
        # A clock that is one per cent off moves the place by as much, and the bound there by less than a millisecond.
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
        """The earliest and the latest time of a tick; only while there are lines."""
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
        """Take in a round trip, whose limits are certain; whether one clock may come to it from the last observation.

        What was known before a jump is not used until another round trip says which is right.
        """
        if self.former and not self._follows(self.observations, seen) and self._follows(self.former, seen):
            # The one before was the odd one out.
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
                # Arrivals that are older by now had waited for longer than was thought.
                self.observations[place] = each._replace(earliest_us=NO_LOWER_LIMIT)
                if self._fit():
                    return "others-were-late"
        return "nothing-left"

    def weigh(self, *, is_contradiction: bool) -> None:
        """After some contradictions, take the oscillator for the next worse one."""
        self._contradictions = max(0, self._contradictions + (2 if is_contradiction else -1))
        if self._contradictions >= 2 * CONTRADICTIONS_MAX and self.paced_by != KINDS[-1]:
            self.paced_by, self.strain = KINDS[KINDS.index(self.paced_by) + 1], 1
            self._contradictions = 0

    def allow_for_slews(self, slewed_us: int) -> None:
        """What was observed before the gateway's clock was slewed is worth less by so much."""
        by_us = slewed_us - self.slewed_us
        if by_us == 0:
            return
        self.slewed_us = slewed_us
        self.observations = [seen.widened(by_us) for seen in self.observations]
        self.former = [seen.widened(by_us) for seen in self.former]
        if self.observations:
            self.refit()

    def refit(self) -> None:
        """Find lines that agree with all; where none does, believe more change of rate, then less of what is old."""
        while not self._fit() and self._has_lower():
            if self.strain < STRAIN_MAX:
                self.strain *= 2
            else:
                del self.observations[0]

    def _add(self, seen: Observation) -> None:
        self.observations = thinned(sorted([*self.observations, seen]), OBSERVATIONS_MAX)

    def _fit(self) -> bool:
        """Find the lines that agree with all observations; whether there are any."""
        self.version += 1
        self.bounds = self.bounds_earlier = self.lines = None
        if self._has_lower():
            self.lines = lines_at(self.observations[-1].tick_us, self.observations, self.limits)
        return self.lines is not None

    def _has_lower(self) -> bool:
        return any(seen.earliest_us > NO_LOWER_LIMIT for seen in self.observations)

    def _follows(self, observations: Sequence[Observation], seen: Observation) -> bool:
        """Whether this clock may come from the last of them to the one that was seen now."""
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
    """As many as that: the newest, and of the others those that tell most of their time."""
    kept = list(observations)
    while len(kept) > limit:
        widths_us = [min(seen.latest_us - seen.earliest_us, _WIDE_US) for seen in kept]
        least_us = min(widths_us) + 1_000
        newest_us = kept[-1].tick_us
        # Those between two neighbours that are near, for their age, are missed least; and wide ones sooner.
        worth = [
            (kept[place + 1].tick_us - kept[place - 1].tick_us)
            / (newest_us - kept[place].tick_us + 1)
            / (widths_us[place] + least_us)
            for place in range(1, max(2, len(kept) - min(NEWEST_KEPT, limit // 2)))
        ]
        del kept[1 + worth.index(min(worth))]
    return kept
