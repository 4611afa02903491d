"""Arrivals of a sensor's samples, in buckets: the quickest of each bucket tells when its sample was taken.

Pure: arrivals come in, observations come out, all in microseconds.
"""

import math
import sys

from gateway.clock.oscillators import RATE_ERROR_MAX
from gateway.clock.sensor_line import Observation
from gateway.clock.tick_counter import SAMPLE_TICK_US

LEAST_DELAY_US = 50_000
"""Of BUCKET_ARRIVALS readings one at least was under way for less than this (`least_delay_ms` of a route says more); of
half as many, for less than twice this. Nothing proves it: it is what a network does that is not always congested. Nor
is it proven which one that was: while the rate is known so badly that it hides more than this within a bucket, one that
was under way for longer may be taken for it. All else about arrivals is certain."""
BUCKET_US = 10_000_000
"""Arrivals of this time at least, and at first, give one observation: the one that was under way for the shortest."""
BUCKET_US_LONG = 120_000_000
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
"""An arrival that is quicker than the quickest of its bucket by no more than this is none the more worth."""
TIGHTENED_US = 5_000
"""An arrival that is this much earlier than was thought possible is taken in before its bucket ends."""
TIGHTEN_INTERVAL_US = 5_000_000
_NEVER_DUE = sys.maxsize


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
        latest_us: float | None,
        slewed_us: int,
        rate_error: float,
        least_delay_us: int,
    ) -> Observation | None:
        """Put an arrival into its bucket; the quickest of that, and how early it was, once it is full.

        `latest_us` is the latest time that the lines allow for its sample; None while there are none.
        """
        excess_us = received_us - (tick_us if latest_us is None else latest_us)
        bucket = self.current
        if bucket is None or bucket.is_of_lines is (latest_us is None):
            self.current = Bucket(
                self._filled, received_us, tick_us, excess_us, slewed_us, is_of_lines=latest_us is not None
            )
            return None
        if not bucket.add(received_us, tick_us, excess_us, rate_error, least_delay_us):
            self.strays += bucket.begins_anew
            return None
        self.current = None
        delay_us = least_delay_us * max(1.0, BUCKET_ARRIVALS / bucket.arrivals)
        if bucket.later_us > bucket.excess_us + delay_us + (received_us - bucket.best_received_us) * rate_error:
            # The tick stands still, or counts something else; or the network has become slow.
            self.strays += 1
            return None
        self._filled += 1
        # What came to be since.
        slewed_us -= bucket.slewed_us
        earliest_us = bucket.best_received_us - delay_us - SAMPLE_TICK_US - slewed_us
        return Observation(bucket.best_tick_us, earliest_us, bucket.best_received_us + slewed_us)


class Bucket:
    """Arrivals that follow each other, of which the quickest is looked for."""

    __slots__ = (
        "_arrivals_wanted",
        "_is_second_half",
        "_settled_excess_us",
        "_settled_for_us",
        "arrivals",
        "arrivals_due",
        "begins_anew",
        "best_received_us",
        "best_tick_us",
        "due_us",
        "excess_us",
        "is_of_lines",
        "later_us",
        "settled_us",
        "slewed_us",
    )

    def __init__(  # noqa: PLR0913 - its first arrival, and what was before
        self, before: int, received_us: int, tick_us: int, excess_us: float, slewed_us: int, *, is_of_lines: bool
    ) -> None:
        """`excess_us` is by how much an arrival is later than the lines allow, or than its tick says without lines."""
        self.is_of_lines = is_of_lines
        # `before` is how many there were before this one.
        self._settled_for_us = min(BUCKET_US << min(before, 8), BUCKET_US_LONG)
        self._arrivals_wanted = min(BUCKET_ARRIVALS_FIRST << min(before, 8), BUCKET_ARRIVALS)
        self.settled_us, self._settled_excess_us = received_us, excess_us
        """The first arrival that none since was much quicker than."""
        self.due_us = received_us + self._settled_for_us // 2
        """Until then it is neither half full nor full, unless a quicker one comes."""
        self._is_second_half = False
        self.later_us = math.inf
        """The least excess of its second half: where the tick keeps pace it is not much more than that of the first."""
        self.slewed_us = slewed_us
        """What the gateway's clock had been slewed by when it began."""
        self.begins_anew = False
        """Whether the last arrival came after an outage, or its tick does not keep pace."""
        self.arrivals = 1
        self.arrivals_due = _NEVER_DUE
        """The arrival after so many may be the one that fills it, however soon it comes."""
        self.best_received_us, self.best_tick_us = received_us, tick_us
        self.excess_us = excess_us

    def add(self, received_us: int, tick_us: int, excess_us: float, rate_error: float, least_delay_us: int) -> bool:
        """Take in one more; whether the bucket is full.

        A sensor that sends what had waited has arrivals each of which was under way for less than the one before, if
        only by a little: until that is over, the quickest tells nothing of how quick it was.
        """
        self.arrivals += 1
        apart_us = received_us - self.best_received_us
        self.begins_anew = excess_us > self.excess_us + WAITED_US + apart_us * RATE_ERROR_MAX
        if self.begins_anew:
            self.settled_us, self._settled_excess_us, self.arrivals = received_us, excess_us, 1
            self._is_second_half = False
            self.excess_us, self.best_received_us, self.best_tick_us = excess_us, received_us, tick_us
        elif (
            excess_us < self.excess_us - least_delay_us - apart_us * rate_error
            or excess_us < self._settled_excess_us - least_delay_us - (received_us - self.settled_us) * RATE_ERROR_MAX
        ):
            self.settled_us, self._settled_excess_us, self.arrivals = received_us, excess_us, 1
            self._is_second_half = False
        if excess_us < self.excess_us:
            self.excess_us, self.best_received_us, self.best_tick_us = excess_us, received_us, tick_us
        self.due_us, self.arrivals_due = self.settled_us + self._settled_for_us // 2, _NEVER_DUE
        if received_us < self.due_us:
            return False
        self.later_us = min(self.later_us, excess_us) if self._is_second_half else excess_us
        self._is_second_half = True
        self.due_us = self.settled_us + self._settled_for_us
        if received_us < self.due_us:
            return False
        so_far_us = received_us - self.settled_us
        missing = self._arrivals_wanted - self.arrivals
        # At the pace so far. It may come to be quicker.
        self.due_us = min(received_us + so_far_us * missing // self.arrivals, self.settled_us + BUCKET_US_MAX)
        self.arrivals_due = self._arrivals_wanted - 1
        return missing <= 0 or so_far_us >= BUCKET_US_MAX
