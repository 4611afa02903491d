"""A sensor's clock seen from the gateway: a line from its tick to gateway time, fitted to probe round trips.

Pure: observations come in, times and bounds come out, all in microseconds.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

OBSERVATIONS_MAX = 64
"""The sliding window: eleven minutes at one probe in ten seconds."""
ROUND_TRIP_SLACK_US = 1_500
"""A round trip longer than the shortest by more than this waited somewhere and tells little (FACTS, clocks)."""
RATE_ERROR_PPM_MAX = 10_000
"""How far a sensor's clock may run from true: an RC oscillator. A ceramic or crystal is better."""
RATE_SPREAD_PPM = 200
"""How far apart the rates of one clock may lie within the window and up to the tick that is asked for."""

# Gateway time per tick strays a little further from 1 than ticks per gateway time do: 1 / 0.99 is 1.0101.
_RATE_ERROR_MAX = RATE_ERROR_PPM_MAX / 1e6 * 1.03
_RATE_SPREAD = RATE_SPREAD_PPM / 1e6 * 1.03
_TICK_US_MODULUS = 2**32 * 1000
_HALF_TICK_US = 500
_STEP_TOLERANCE_US = 5_000


@dataclass(frozen=True, slots=True)
class _Observation:
    tick_us: int
    """The sensor's tick, unwrapped."""
    middle_us: float
    """Gateway time halfway between PROBE and REPLY."""
    half_us: float
    """The sensor read its tick at `middle_us` give or take this."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Gateway time = `origin_us` + `rate` * (tick - `origin_tick_us`)."""

    origin_tick_us: float
    origin_us: float
    rate: float
    rate_error: float

    def at(self, tick_us: int) -> float:
        return self.origin_us + self.rate * (tick_us - self.origin_tick_us)


class DeviceClock:
    """The clock of one boot of one sensor.

    The bound that `estimate` gives holds as long as the clock keeps within RATE_ERROR_PPM_MAX of true, and its
    rates over the window within RATE_SPREAD_PPM of one another. It is made of: the tick's own resolution, half
    the round trip of an observation, that observation's distance from the line, and the distance in time to it
    multiplied by what is not known of the rate.
    """

    __slots__ = ("_line", "_observations")

    def __init__(self) -> None:
        self._observations: deque[_Observation] = deque(maxlen=OBSERVATIONS_MAX)
        self._line: _Line | None = None

    def observe(self, sent_us: int, received_us: int, tick_ms: int, tick_us: int) -> bool:
        """Take in one round trip: the sensor's clock said `tick_ms` and `tick_us` between the two times.

        False says that no clock within RATE_ERROR_PPM_MAX came from the last observation to this one: the tick
        stood still or began anew. The line then starts again from here.
        """
        half_us = (received_us - sent_us) / 2
        middle_us = sent_us + half_us
        sent_tick_us = tick_ms * 1000 + tick_us
        continuous = True
        if self._observations:
            last = self._observations[-1]
            sent_tick_us = self._unwrap(sent_tick_us, middle_us)
            elapsed_us = middle_us - last.middle_us
            tolerance_us = abs(elapsed_us) * _RATE_ERROR_MAX + half_us + last.half_us + _STEP_TOLERANCE_US
            continuous = abs(sent_tick_us - last.tick_us - elapsed_us) <= tolerance_us
            if not continuous:
                self._observations.clear()
        self._observations.append(_Observation(sent_tick_us, middle_us, half_us))
        self._fit()
        return continuous

    def estimate(self, tick_ms: int, now_us: int) -> tuple[int, int] | None:
        """When a sample with this tick was taken, and the bound of that time's error; None before a REPLY.

        `now_us` is the time of its receipt: it says which of the tick's wraps is meant.
        """
        line = self._line
        if line is None:
            return None
        # The sample was taken at some point of its millisecond.
        tick_us = self._unwrap(tick_ms * 1000, now_us) + _HALF_TICK_US
        # From each observation follows a bound; the tightest of them holds too.
        line_error_us = min(
            seen.half_us + abs(line.at(seen.tick_us) - seen.middle_us) + abs(tick_us - seen.tick_us) * line.rate_error
            for seen in self._observations
        )
        error_us = line_error_us + _HALF_TICK_US * (1 + _RATE_ERROR_MAX)
        return round(line.at(tick_us)), int(error_us) + 2

    def _unwrap(self, wrapped_us: int, now_us: float) -> int:
        """The tick of this value, modulo its wrap, that is nearest to what the clock says at `now_us`."""
        last = self._observations[-1]
        expected_us = last.tick_us + round(now_us - last.middle_us)
        behind_us = (expected_us - wrapped_us + _TICK_US_MODULUS // 2) % _TICK_US_MODULUS
        return expected_us - (behind_us - _TICK_US_MODULUS // 2)

    def _fit(self) -> None:
        """Choose the line whose rate is known best: fitted to the short round trips, to all, or at nominal rate."""
        half_us_max = min(seen.half_us for seen in self._observations) + ROUND_TRIP_SLACK_US / 2
        short = [seen for seen in self._observations if seen.half_us <= half_us_max]
        last = short[-1]
        nominal = _Line(last.tick_us, last.middle_us, 1.0, _RATE_ERROR_MAX)
        fitted = [line for line in (_least_squares(short), _least_squares(self._observations)) if line]
        self._line = min((*fitted, nominal), key=lambda line: line.rate_error)


def _least_squares(observations: Collection[_Observation]) -> _Line | None:
    """The line through observations, and the bound of its rate's error; None where they are all at one tick."""
    # Relative to the first, for the squares of absolute microseconds exceed a float's precision.
    first = next(iter(observations))
    ticks = [seen.tick_us - first.tick_us for seen in observations]
    times = [seen.middle_us - first.middle_us for seen in observations]
    tick_mean = sum(ticks) / len(ticks)
    time_mean = sum(times) / len(times)
    squares = sum((tick - tick_mean) ** 2 for tick in ticks)
    if squares == 0:
        return None
    products = sum((tick - tick_mean) * (time - time_mean) for tick, time in zip(ticks, times, strict=True))
    # The slope errs most where every observation errs by its whole half, each to the slope's worst. And a slope
    # fitted to rates that vary is a weighted mean of them, so that it is off by their spread at most.
    moments = sum(abs(tick - tick_mean) * seen.half_us for tick, seen in zip(ticks, observations, strict=True))
    return _Line(
        first.tick_us + tick_mean, first.middle_us + time_mean, products / squares, moments / squares + _RATE_SPREAD
    )
