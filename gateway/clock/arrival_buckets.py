"""Groups arrivals of a sensor's samples into buckets. One arrival of each bucket is taken to have been quick.

Pure: arrivals come in, observations come out, all in microseconds.
"""

import math
import sys

from gateway.clock.oscillators import RATE_ERROR_MAX
from gateway.clock.sensor_line import Observation, RateLimits
from gateway.clock.tick_counter import ORDER_SLACK_US, SAMPLE_TICK_US

LEAST_DELAY_US = 50_000
"""Of BUCKET_ARRIVALS readings, at least one was under way for less than this; of half as many, for less than twice as
long. A route's `least_delay_ms` sets another value. This assumes that no network is always congested. Which reading was
quick is not assumed. All else about arrivals is certain (docs/decisions/001-quick-arrivals.md)."""
BUCKET_US = 10_000_000
"""Least length of a bucket, and the length of the first one."""
BUCKET_US_LONG = 120_000_000
"""Greatest length, if arrivals are frequent. A bucket ends earlier if the rate may hide half of the least delay."""
BUCKET_ARRIVALS_FIRST = 4
"""Arrivals of the first bucket. Fewer could all have waited, and come with the same pauses as between their samples."""
BUCKET_ARRIVALS = 16
"""Arrivals of a later bucket. Each bucket takes twice as many as the one before, up to this number. With more arrivals
it is surer that one was quick."""
STRAYS_MAX = 3
"""Buckets in a row without an arrival as early as expected, after which the clock is forgotten."""
BUCKET_US_MAX = 600_000_000
"""Time within which two arrivals are enough, for a sensor that seldom sends."""
WAITED_US = 60_000_000
"""Time by which an arrival is later than the quickest of its bucket if it waited in an outage. The arrivals before it
are dropped, as they are too few to tell anything."""
QUICKER_US = 1_000
"""Time by which an arrival may be quicker than the quickest of its bucket and still be passed over. Bounds allow for
it."""
TIGHTENED_US = 5_000
"""Time by which an arrival must lower the upper limit of its sample's time to count before its bucket ends."""
TIGHTEN_INTERVAL_US = 5_000_000
_NEVER_DUE = sys.maxsize
_RATES_APART_MIN = 1e-9
"""Least difference between the greatest and the least rate in calculations."""


class ArrivalBuckets:
    """The buckets of one sensor, one after the other."""

    __slots__ = ("_filled", "_tightened_us", "current", "strays")

    def __init__(self) -> None:
        self.current: Bucket | None = None
        self._filled = 0
        self._tightened_us = 0
        self.strays = 0
        """Buckets in a row that nothing could be learnt from."""

    def restart(self) -> None:
        """Begin with short buckets again."""
        self.current, self._filled = None, 0

    def tightens(self, received_us: int, earliest_us: float, latest_us: float) -> bool:
        """Whether an arrival is so early, by the bounds of its sample's time, that it is taken in at once."""
        if received_us >= earliest_us and (
            received_us >= latest_us - TIGHTENED_US or received_us < self._tightened_us + TIGHTEN_INTERVAL_US
        ):
            return False
        self._tightened_us = received_us
        return True

    def gather(  # noqa: PLR0913, PLR0917 - an arrival, and what its clock and its network may do
        self,
        received_us: int,
        tick_us: int,
        rates: tuple[float, float],
        limits: RateLimits,
        slewed_us: int,
        least_delay_us: int,
    ) -> Observation | None:
        """Put an arrival into its bucket. Returns the bucket's observation once the bucket is full.

        `rates` are the least and the greatest rate (time per tick, less 1) that the clock may have at this tick.
        """
        bucket = self.current
        is_after_outage = bucket is not None and bucket.is_after_outage(received_us, tick_us)
        if bucket is None or is_after_outage or bucket.is_catching_up(received_us, tick_us):
            self.strays += is_after_outage
            self.current = Bucket(self._filled, received_us, tick_us, rates, slewed_us, least_delay_us)
            return None
        if not bucket.add(received_us, tick_us):
            return None
        self.current = None
        delay_us = least_delay_us * max(1.0, BUCKET_ARRIVALS / bucket.arrivals)
        if bucket.later_us > bucket.late_if_fast_us + delay_us + (received_us - bucket.quick_if_fast[1]) * limits.error:
            # The tick stands still, or counts something else; or the network has become slow.
            self.strays += 1
            return None
        self._filled += 1
        # Slewing since the bucket began.
        slewed_us -= bucket.slewed_us
        changed_us = limits.slack_us(tick_us - bucket.first_tick_us + ORDER_SLACK_US)
        return bucket.observation(delay_us + SAMPLE_TICK_US + QUICKER_US, changed_us).widened(slewed_us)


class Bucket:
    """Consecutive arrivals. At least one of them was quick.

    Which arrival was the quickest depends on the clock's rate, which is not known well. `quick_if_slow` is the quickest
    if the rate (time per tick) is the least possible one, `quick_if_fast` if it is the greatest.
    """

    __slots__ = (
        "_arrivals_wanted",
        "_is_second_half",
        "_lasts_us",
        "_least_delay_us",
        "_rates",
        "arrivals",
        "arrivals_due",
        "due_us",
        "first_tick_us",
        "first_us",
        "late_if_fast_us",
        "late_if_slow_us",
        "later_us",
        "quick_if_fast",
        "quick_if_slow",
        "slewed_us",
    )

    def __init__(  # noqa: PLR0913, PLR0917 - its first arrival, and what was before
        self,
        before: int,
        received_us: int,
        tick_us: int,
        rates: tuple[float, float],
        slewed_us: int,
        least_delay_us: int,
    ) -> None:
        """`before` is the number of buckets that were filled before this one."""
        self._rates = rates
        self._least_delay_us = least_delay_us
        slow, fast = rates
        hides_us = least_delay_us / 2 / max(fast - slow, _RATES_APART_MIN)
        self._lasts_us = max(BUCKET_US, min(BUCKET_US << min(before, 8), BUCKET_US_LONG, int(hides_us)))
        self._arrivals_wanted = min(BUCKET_ARRIVALS_FIRST << min(before, 8), BUCKET_ARRIVALS)
        self.first_us, self.first_tick_us = received_us, tick_us
        self.slewed_us = slewed_us
        """Slewing of the gateway's clock until the bucket began."""
        self.late_if_slow_us = received_us - (1 + slow) * tick_us
        self.late_if_fast_us = received_us - (1 + fast) * tick_us
        """Least lateness of an arrival, compared with a clock of that rate that began at 0."""
        self.quick_if_slow = self.quick_if_fast = tick_us, received_us
        """The arrivals with that least lateness: tick and time of receipt."""
        self._is_second_half = False
        self.later_us = math.inf
        """`late_if_fast_us` of the second half. If the tick keeps pace, it is not much more than that of the first."""
        self.arrivals = 1
        self.arrivals_due = _NEVER_DUE
        """After this many arrivals the next one may fill the bucket, however soon it comes."""
        self.due_us = received_us + self._lasts_us // 2
        """Before this time the bucket becomes neither half full nor full."""

    def is_after_outage(self, received_us: int, tick_us: int) -> bool:
        """Whether an arrival begins another bucket: it came after an outage, or its tick does not keep pace."""
        return received_us - (1 + self._rates[1]) * tick_us > self.late_if_fast_us + WAITED_US

    def is_catching_up(self, received_us: int, tick_us: int) -> bool:
        """Whether an arrival was certainly under way for much less time than those before.

        While a sensor sends samples that had waited, each arrival was under way for a little less time than the one
        before. Until the sensor has caught up, even the quickest arrival may have been slow.
        """
        least_delay_us = self._least_delay_us
        if received_us - (1 + self._rates[0]) * tick_us < self.late_if_slow_us - least_delay_us:
            return True
        return received_us - self.first_us < (1 - RATE_ERROR_MAX) * (tick_us - self.first_tick_us) - least_delay_us

    def add(self, received_us: int, tick_us: int) -> bool:
        """Take in one more arrival; return whether the bucket is full."""
        slow, fast = self._rates
        late_if_slow_us = received_us - (1 + slow) * tick_us
        late_if_fast_us = received_us - (1 + fast) * tick_us
        self.arrivals += 1
        if late_if_slow_us < self.late_if_slow_us:
            self.late_if_slow_us, self.quick_if_slow = late_if_slow_us, (tick_us, received_us)
        if late_if_fast_us < self.late_if_fast_us:
            self.late_if_fast_us, self.quick_if_fast = late_if_fast_us, (tick_us, received_us)
        self.due_us, self.arrivals_due = self.first_us + self._lasts_us // 2, _NEVER_DUE
        if received_us < self.due_us:
            return False
        so_far_us = received_us - self.first_us
        if not self._is_second_half:
            self._is_second_half, self.later_us = True, math.inf
            # With more arrivals it is surer that one was quick, but the bucket lasts longer, and the rate hides more.
            hides_us = max(fast - slow, _RATES_APART_MIN) * so_far_us / (self.arrivals - 1)
            wanted = int(math.sqrt(BUCKET_ARRIVALS * self._least_delay_us / hides_us))
            self._arrivals_wanted = min(max(wanted, BUCKET_ARRIVALS_FIRST), self._arrivals_wanted)
        self.later_us = min(self.later_us, late_if_fast_us)
        self.due_us = self.first_us + self._lasts_us
        if received_us < self.due_us:
            return False
        missing = self._arrivals_wanted - self.arrivals
        # At the pace so far. If arrivals become quicker, `arrivals_due` counts.
        self.due_us = min(received_us + so_far_us * missing // self.arrivals, self.first_us + BUCKET_US_MAX)
        self.arrivals_due = self._arrivals_wanted - 1
        return missing <= 0 or so_far_us >= BUCKET_US_MAX

    def ticks_passed_over(self, received_us: int) -> tuple[float, float]:
        """Range of ticks with which an arrival now begins no other bucket, and is not the quickest of this one."""
        slow, fast = self._rates
        return (
            (received_us - self.late_if_fast_us - WAITED_US) / (1 + fast),
            min(
                (received_us - self.late_if_slow_us + QUICKER_US) / (1 + slow),
                (received_us - self.late_if_fast_us + QUICKER_US) / (1 + fast),
            ),
        )

    def pass_over(self, arrivals: int, received_us: int, tick_us: int) -> None:
        """Count arrivals that tell nothing new; `tick_us` is the last one's tick."""
        self.arrivals += arrivals
        # The newest of them was under way for the shortest time.
        self.later_us = min(self.later_us, received_us - (1 + self._rates[1]) * tick_us)

    def observation(self, delay_us: float, changed_us: float) -> Observation:
        """The observation that follows if any one of these arrivals was under way for less than `delay_us`.

        `changed_us` is the time that the change of rate since the first arrival may add up to. The proof is in
        docs/decisions/001-quick-arrivals.md.
        """
        slow, fast = self._rates
        (first_tick_us, first_us), (last_tick_us, last_us) = self.quick_if_slow, self.quick_if_fast
        if first_tick_us == last_tick_us:
            return Observation(first_tick_us, first_us - delay_us - changed_us, first_us)
        # The proof holds between the two ticks. If the rates are nearly equal, rounding can put the quotient outside.
        between_us = round((self.late_if_slow_us - self.late_if_fast_us) / (fast - slow))
        tick_us = min(max(between_us, first_tick_us), last_tick_us)
        quick_us = min(self.late_if_slow_us + (1 + slow) * tick_us, self.late_if_fast_us + (1 + fast) * tick_us)
        latest_us = min(
            first_us + (1 + fast) * (tick_us - first_tick_us), last_us - (1 + slow) * (last_tick_us - tick_us)
        )
        return Observation(tick_us, quick_us - delay_us - changed_us, latest_us + changed_us)
