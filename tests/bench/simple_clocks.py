"""The simple ways to give a reading its time, which a `DeviceClock` is compared with. None of them knows a bound.

Their ticks must not wrap: a run in the bench is shorter than 49 days.
"""

from collections import deque

from tests.support.clock_world import SECOND_US

WINDOW_US = 600 * SECOND_US
"""Window of least squares. Long windows suffer from the temperature, short ones from the jitter. At 10,000 ppm and a
probe a minute, 48 minutes gave a median error of 25 ms. At a probe each ten seconds, two minutes gave twice the p99 of
eight."""
HALF_TICK_US = 500
"""A sample's tick is the begin of its millisecond."""

NO_BOUND_US = 0

Estimate = tuple[int, int] | None


class Receipt:
    """The time of receipt, as a gateway has it that knows nothing of ticks."""

    def probed(self, _sent_us: int, _received_us: int, _tick_ms: int, _tick_us: int) -> bool:
        return True

    def estimate(self, _tick_ms: int, now_us: int) -> Estimate:
        return now_us, NO_BOUND_US

    def stamp(self, received_us: int, _tick_ms: int, _sequence: int) -> Estimate:
        return received_us, NO_BOUND_US


class LastOffset:
    """The tick at its nominal rate, from the middle of the newest round trip on, or from the arrival before."""

    def __init__(self) -> None:
        self._offset_us: int | None = None

    def probed(self, sent_us: int, received_us: int, tick_ms: int, tick_us: int) -> bool:
        self._offset_us = (sent_us + received_us) // 2 - tick_ms * 1000 - tick_us
        return True

    def estimate(self, tick_ms: int, _now_us: int) -> Estimate:
        return None if self._offset_us is None else (tick_ms * 1000 + HALF_TICK_US + self._offset_us, NO_BOUND_US)

    def stamp(self, received_us: int, tick_ms: int, _sequence: int) -> Estimate:
        estimate = self.estimate(tick_ms, received_us)
        self._offset_us = received_us - tick_ms * 1000 - HALF_TICK_US
        return estimate


class LeastSquares:
    """A line through the middles of all round trips, or through all arrivals, of the last ten minutes."""

    def __init__(self, window_us: int = WINDOW_US) -> None:
        self._window_us = window_us
        self._seen: deque[tuple[int, int]] = deque()
        # Sums of whole numbers are exact: nothing cancels out, however far from zero the ticks are.
        self._ticks = self._times = self._squares = self._products = 0

    def probed(self, sent_us: int, received_us: int, tick_ms: int, tick_us: int) -> bool:
        self._learn(tick_ms * 1000 + tick_us, (sent_us + received_us) // 2)
        return True

    def estimate(self, tick_ms: int, _now_us: int) -> Estimate:
        count = len(self._seen)
        if not count:
            return None
        variance = count * self._squares - self._ticks**2
        covariance = count * self._products - self._ticks * self._times
        # One tick alone says nothing of the rate: the nominal one.
        rate = covariance / variance if variance else 1.0
        from_mean_us = tick_ms * 1000 + HALF_TICK_US - self._ticks / count
        return round(self._times / count + rate * from_mean_us), NO_BOUND_US

    def stamp(self, received_us: int, tick_ms: int, _sequence: int) -> Estimate:
        self._learn(tick_ms * 1000 + HALF_TICK_US, received_us)
        return self.estimate(tick_ms, received_us)

    def _learn(self, tick_us: int, at_us: int) -> None:
        self._seen.append((tick_us, at_us))
        self._sum(tick_us, at_us, 1)
        while self._seen[0][1] < at_us - self._window_us:
            self._sum(*self._seen.popleft(), -1)

    def _sum(self, tick_us: int, at_us: int, sign: int) -> None:
        self._ticks += sign * tick_us
        self._times += sign * at_us
        self._squares += sign * tick_us * tick_us
        self._products += sign * tick_us * at_us
