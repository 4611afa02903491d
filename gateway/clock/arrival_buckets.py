"""Arrivals of a sensor's samples, in buckets: one of each bucket was quick, whichever it was.

Pure: arrivals come in, observations come out, all in microseconds.
"""

import math
import sys

from gateway.clock.oscillators import RATE_ERROR_MAX
from gateway.clock.sensor_line import Observation, RateLimits
from gateway.clock.tick_counter import ORDER_SLACK_US, SAMPLE_TICK_US

LEAST_DELAY_US = 50_000
"""Of BUCKET_ARRIVALS readings one at least was under way for less than this (`least_delay_ms` of a route says more); of
half as many, for less than twice this. Nothing proves it: it is what a network does that is not always congested. Which
one that was is not assumed. All else about arrivals is certain (docs/decisions/001-quick-arrivals.md)."""
BUCKET_US = 10_000_000
"""Arrivals of this time at least, and at first, give one observation."""
BUCKET_US_LONG = 120_000_000
"""Of a sensor whose rate is known well: a bucket lasts no longer than the rate may hide half of the least delay."""
BUCKET_ARRIVALS_FIRST = 4
"""Fewer may be what had waited, sent with pauses that happen to be as long as those between the samples."""
BUCKET_ARRIVALS = 16
"""Each bucket is twice as large as the one before, up to these: the more arrivals, the surer one of them was quick."""
STRAYS_MAX = 3
"""So many buckets in a row none of whose arrivals came as soon as they should have, and nothing is known any more."""
BUCKET_US_MAX = 600_000_000
"""Of a sensor that seldom sends, two arrivals within this are enough."""
WAITED_US = 60_000_000
"""An arrival that is later than the quickest of its bucket by more than this comes after an outage: those before were
too few to tell, and it had waited."""
QUICKER_US = 1_000
"""An arrival that is quicker than the quickest of its bucket by no more than this is passed over, which bounds hold."""
TIGHTENED_US = 5_000
"""An arrival that is this much earlier than was thought possible is taken in before its bucket ends."""
TIGHTEN_INTERVAL_US = 5_000_000
_NEVER_DUE = sys.maxsize
_RATES_APART_MIN = 1e-9
"""A rate that is known better than this is not known any better for what is reckoned with it."""


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
        """Whether an arrival so early, for the bounds of its sample, is taken in at once."""
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
        """Put an arrival into its bucket; what all of the bucket tell together, once it is full.

        `rates` are the least and the greatest rate (time per tick, less 1) that its clock may have at this tick.
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
        # What came to be since.
        slewed_us -= bucket.slewed_us
        changed_us = limits.slack_us(tick_us - bucket.first_tick_us + ORDER_SLACK_US)
        return bucket.observation(delay_us + SAMPLE_TICK_US + QUICKER_US, changed_us).widened(slewed_us)


class Bucket:
    """Arrivals that follow each other, of which one was quick.

    Which of them was the quickest depends on the clock's rate, which is not known well. `quick_if_slow` is the quickest
    if the rate (time per tick) is the least that it may be, `quick_if_fast` if it is the greatest.
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
        """`before` is how many there were before this one."""
        self._rates = rates
        self._least_delay_us = least_delay_us
        slow, fast = rates
        hides_us = least_delay_us / 2 / max(fast - slow, _RATES_APART_MIN)
        self._lasts_us = max(BUCKET_US, min(BUCKET_US << min(before, 8), BUCKET_US_LONG, int(hides_us)))
        self._arrivals_wanted = min(BUCKET_ARRIVALS_FIRST << min(before, 8), BUCKET_ARRIVALS)
        self.first_us, self.first_tick_us = received_us, tick_us
        self.slewed_us = slewed_us
        """What the gateway's clock had been slewed by when it began."""
        self.late_if_slow_us = received_us - (1 + slow) * tick_us
        self.late_if_fast_us = received_us - (1 + fast) * tick_us
        """The least of how much later arrivals were than a clock of that rate, which began at 0, shows."""
        self.quick_if_slow = self.quick_if_fast = tick_us, received_us
        """The arrivals that these are of."""
        self._is_second_half = False
        self.later_us = math.inf
        """`late_if_fast_us` of its second half: where the tick keeps pace, not much more than that of the first."""
        self.arrivals = 1
        self.arrivals_due = _NEVER_DUE
        """The arrival after so many may be the one that fills it, however soon it comes."""
        self.due_us = received_us + self._lasts_us // 2
        """Until then it is neither half full nor full."""

    def is_after_outage(self, received_us: int, tick_us: int) -> bool:
        """Whether an arrival is of another bucket: it came after an outage, or its tick does not keep pace."""
        return received_us - (1 + self._rates[1]) * tick_us > self.late_if_fast_us + WAITED_US

    def is_catching_up(self, received_us: int, tick_us: int) -> bool:
        """Whether an arrival was under way for much less than those before, for certain.

        A sensor that sends what had waited has arrivals each of which was under way for less than the one before, if
        only by a little: until that is over, the quickest tells nothing of how quick it was.
        """
        least_delay_us = self._least_delay_us
        if received_us - (1 + self._rates[0]) * tick_us < self.late_if_slow_us - least_delay_us:
            return True
        return received_us - self.first_us < (1 - RATE_ERROR_MAX) * (tick_us - self.first_tick_us) - least_delay_us

    def add(self, received_us: int, tick_us: int) -> bool:
        """Take in one more; whether the bucket is full."""
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
            # More are surer to have a quick one among them, but take longer, and the rate hides more of them.
            hides_us = max(fast - slow, _RATES_APART_MIN) * so_far_us / (self.arrivals - 1)
            wanted = int(math.sqrt(BUCKET_ARRIVALS * self._least_delay_us / hides_us))
            self._arrivals_wanted = min(max(wanted, BUCKET_ARRIVALS_FIRST), self._arrivals_wanted)
        self.later_us = min(self.later_us, late_if_fast_us)
        self.due_us = self.first_us + self._lasts_us
        if received_us < self.due_us:
            return False
        missing = self._arrivals_wanted - self.arrivals
        # At the pace so far. It may come to be quicker.
        self.due_us = min(received_us + so_far_us * missing // self.arrivals, self.first_us + BUCKET_US_MAX)
        self.arrivals_due = self._arrivals_wanted - 1
        return missing <= 0 or so_far_us >= BUCKET_US_MAX

    def ticks_passed_over(self, received_us: int) -> tuple[float, float]:
        """From which tick to which an arrival at this time is of no bucket to come, and not the quickest of this."""
        slow, fast = self._rates
        return (
            (received_us - self.late_if_fast_us - WAITED_US) / (1 + fast),
            min(
                (received_us - self.late_if_slow_us + QUICKER_US) / (1 + slow),
                (received_us - self.late_if_fast_us + QUICKER_US) / (1 + fast),
            ),
        )

    def pass_over(self, arrivals: int, received_us: int, tick_us: int) -> None:
        """Count arrivals that tell nothing new; `tick_us` is the last of theirs."""
        self.arrivals += arrivals
        # The newest of them was under way for the shortest.
        self.later_us = min(self.later_us, received_us - (1 + self._rates[1]) * tick_us)

    def observation(self, delay_us: float, changed_us: float) -> Observation:
        """What follows if one of these arrivals was under way for less than `delay_us`, whichever it was.

        `changed_us` is what the rate may have changed by since the first, as time. The proof stands in
        docs/decisions/001-quick-arrivals.md.
        """
        slow, fast = self._rates
        (first_tick_us, first_us), (last_tick_us, last_us) = self.quick_if_slow, self.quick_if_fast
        if first_tick_us == last_tick_us:
            return Observation(first_tick_us, first_us - delay_us - changed_us, first_us)
        tick_us = round((self.late_if_slow_us - self.late_if_fast_us) / (fast - slow))
        quick_us = min(self.late_if_slow_us + (1 + slow) * tick_us, self.late_if_fast_us + (1 + fast) * tick_us)
        latest_us = min(
            first_us + (1 + fast) * (tick_us - first_tick_us), last_us - (1 + slow) * (last_tick_us - tick_us)
        )
        return Observation(tick_us, quick_us - delay_us - changed_us, latest_us + changed_us)
