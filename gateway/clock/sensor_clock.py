"""A sensor's clock seen from the gateway: gives the CLOCK_BOOTTIME of each tick, with a bound.

It is learnt from round trips (PROBE and REPLY on a serial line), or from arrivals of readings with a tick (MQTT).
Pure: observations come in, times and bounds come out, all in microseconds.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from gateway.clock.arrival_buckets import LEAST_DELAY_US, STRAYS_MAX, ArrivalBuckets
from gateway.clock.oscillators import Kind
from gateway.clock.sensor_fit import OBSERVATIONS_MAX, STRAIN_MAX, SensorFit, thinned
from gateway.clock.sensor_line import NO_LOWER_LIMIT, Observation
from gateway.clock.slews import Slews, SlewsSeen
from gateway.clock.straight_bounds import NOTHING_KNOWN
from gateway.clock.tick_counter import NO_SEQUENCE, ORDER_SLACK_US, SAMPLE_TICK_US, TICK_US_MODULUS, TickCounter

Sample = tuple[int, int]
"""A reading's tick, in milliseconds, and its sequence."""
SAVED_MAX = 24
"""Observations kept on disk: half a kilobyte for each sensor."""
_REPLY_TICK_US = 5
"""Resolution of the tick in a REPLY: the timer of our firmware steps by four microseconds. Rounded up."""
_SAME_WRAP_US = TICK_US_MODULUS // 4


class _Saved(msgspec.Struct, array_like=True, frozen=True):
    """A clock as kept on disk."""

    version: int
    strain: int
    observations: list[tuple[int, int | None, int]]
    last: tuple[int, int] | None
    paced_by: Kind | None = None
    slews: SlewsSeen | None = None


class DeviceClock:
    """The clock of one boot of one sensor.

    The bound of `estimate` is what all observations together leave open. It is proven while the oscillator keeps the
    limits of its kind. If observations contradict each other, the clock is allowed more change of rate from then on.
    If only arrivals are known, the bound assumes `least_delay_us` as well.
    """

    __slots__ = ("_buckets", "_counter", "_slews", "fit", "kind", "least_delay_us")

    def __init__(self, kind: Kind = "rc", slews: Slews | None = None) -> None:
        """`slews` measures how the gateway's own clock is slewed."""
        self._slews = Slews() if slews is None else slews
        self.kind: Kind = kind
        self.least_delay_us = LEAST_DELAY_US
        self.fit = SensorFit(kind, self._slews.total_us)
        """The times of ticks, and the clock's drift."""
        self._counter = TickCounter()
        self._buckets = ArrivalBuckets()

    @property
    def known_from_us(self) -> int | None:
        """Earliest time at which arrivals may give a first bound; None if it is unknown."""
        bucket = self._buckets.current
        return None if bucket is None else bucket.due_us

    @property
    def last_sequence(self) -> int:
        """Highest sequence that arrived; -1 if none did since the tick began anew."""
        return self._counter.last_sequence

    def restart(self) -> None:
        """Forget everything: the counter is another one."""
        self.fit.restart()
        self._counter.restart()
        self._buckets.restart()
        self._buckets.strays = 0

    # -- observations -----------------------------------------------------------------------------

    def probed(self, sent_us: int, received_us: int, tick_ms: int, tick_us: int) -> bool:
        """Take in one round trip: between the two times, the sensor's clock showed `tick_ms` and `tick_us`.

        Returns False if no clock of this kind comes from the last observation to this one: the tick began anew, or was
        misread. The observations before are not used until another round trip says which.
        """
        self.fit.allow_for_slews(self._slews.total_us)
        middle_us = (sent_us + received_us) // 2
        tick = self._counter.unwrapped(tick_ms * 1000 + tick_us, middle_us)
        is_continuous = self.fit.observe(Observation(tick, sent_us - _REPLY_TICK_US, received_us))
        if not is_continuous:
            self._counter.last_sequence = NO_SEQUENCE
        self._counter.reference = tick, middle_us
        return is_continuous

    def arrived(self, received_us: int, tick_ms: int, sequence: int) -> bool:
        """Take in the arrival of a sample with this tick. The sample was taken before it arrived.

        Returns False if the tick is not of this counter: it began anew although the sensor's boot did not, or was
        misread. After two such arrivals in a row, the clock is learnt anew.
        """
        fit, counter, buckets = self.fit, self._counter, self._buckets
        fit.allow_for_slews(self._slews.total_us)
        tick_us = counter.unwrapped(tick_ms * 1000, received_us)
        if sequence < counter.last_sequence:
            # The sample was sent again or late: its time under way tells nothing about the clock.
            self._see_earlier(sequence)
            return True
        span = fit.span(tick_us) if fit.lines is not None else None
        # By its tick, the sample was taken before the one before it, or after it arrived. So the tick began anew or
        # jumped ahead, or all arrivals so far had waited.
        if not counter.is_in_order(sequence, tick_us) or (span is not None and received_us < span[0] - ORDER_SLACK_US):
            if counter.is_odd:
                # Two in a row were not misread.
                fit.weigh(is_contradiction=True)
                self.restart()
            counter.is_odd = True
            return False
        counter.is_odd = False
        counter.advance(sequence, tick_us)
        if span is not None and counter.is_doubted:
            if received_us <= span[1] + ORDER_SLACK_US:
                # In time for the counter observed so far, so it is still that counter.
                counter.is_doubted, buckets.current = False, None
            else:
                # If this is another counter, nothing is known of it but its arrivals.
                span = None
        if span is not None and buckets.tightens(received_us, *span):
            self._learn(Observation(tick_us, NO_LOWER_LIMIT, received_us))
            span = fit.span(tick_us) if fit.lines is not None else None
        counter.reference = tick_us, received_us
        self._gather(received_us, tick_us, is_known=span is not None)
        return True

    def check_order(self, sequence: int, tick_ms: int, now_us: int) -> bool:
        """Check that a sample's tick is in order, without learning from its arrival.

        Returns False if the tick began anew. The clock is then forgotten.
        """
        counter = self._counter
        if counter.reference is None:
            return True
        tick_us = counter.unwrapped(tick_ms * 1000, now_us)
        if not counter.is_in_order(sequence, tick_us):
            self.restart()
            return False
        if sequence > counter.last_sequence:
            counter.advance(sequence, tick_us)
        return True

    # -- estimates --------------------------------------------------------------------------------

    def estimate(self, tick_ms: int, now_us: int) -> tuple[int, int] | None:
        """When a sample with this tick was taken, and the bound of that time's error; None if that is unknown.

        `now_us` is the time of its receipt. It tells which wrap of the tick is meant. The sample was taken before it.
        """
        fit, slews = self.fit, self._slews
        fit.allow_for_slews(slews.total_us)
        if fit.lines is None or fit.former:
            return None
        earliest_us, latest_us = fit.span(self._counter.unwrapped(tick_ms * 1000, now_us))
        earliest_us -= slews.latest_us
        latest_us = min(latest_us + SAMPLE_TICK_US + slews.latest_us, now_us)
        if self._counter.is_doubted:
            # If the counter began anew, the sample may be younger.
            latest_us = now_us
        if earliest_us > latest_us:
            # The sample would lie in the future, so its tick is not of the observed counter.
            return None
        return round((earliest_us + latest_us) / 2), int((latest_us - earliest_us) / 2) + 2

    def estimate_earlier(self, tick_ms: int, now_us: int) -> tuple[int, int] | None:
        """`estimate` for older samples, asked for in their order while new ones arrive."""
        fit, counter = self.fit, self._counter
        if fit.lines is None or fit.former:
            return None
        bounds = fit.bounds_earlier
        if bounds is not None and not counter.is_doubted and fit.slewed_us == self._slews.quiet_us:
            from_us, until_us, earliest_us, earliest_rate, latest_us, latest_rate = bounds
            tick_us = counter.wrapped_us + tick_ms * 1000
            if from_us <= tick_us < until_us:
                distance_us = tick_us - from_us
                earliest_us += earliest_rate * distance_us
                latest_us += latest_rate * distance_us + SAMPLE_TICK_US
                if now_us - _SAME_WRAP_US < earliest_us <= now_us:
                    if latest_us > now_us:  # noqa: PLR1730 - a call of min() takes three times as long
                        latest_us = now_us
                    half_us = (latest_us - earliest_us) / 2
                    return int(earliest_us + half_us), int(half_us) + 2
        fit.bounds, fit.bounds_earlier = fit.bounds_earlier, fit.bounds
        found = self.estimate(tick_ms, now_us)
        fit.bounds, fit.bounds_earlier = fit.bounds_earlier, fit.bounds
        return found

    def stamp(self, received_us: int, tick_ms: int, sequence: int) -> tuple[int, int] | None:
        """Take in an arrival by `arrived`, and return its sample's time as `estimate` does."""
        return self.stamps(received_us, [(tick_ms, sequence)])[0]

    def stamps(self, received_us: int, samples: Iterable[Sample]) -> list[tuple[int, int] | None]:
        """`stamp` for all samples that arrived at once."""
        found: list[tuple[int, int] | None] = []
        left = iter(samples)
        while (telling := self._stamp_usual(received_us, left, found)) is not None:
            found.append(self._stamp_telling(received_us, *telling))
        return found

    def _stamp_telling(self, received_us: int, tick_ms: int, sequence: int) -> tuple[int, int] | None:
        """`stamp` for an arrival that may tell something new."""
        is_earlier = sequence < self._counter.last_sequence
        estimate = self.estimate(tick_ms, received_us) if self.arrived(received_us, tick_ms, sequence) else None
        if estimate is None or not is_earlier:
            return estimate
        # The sample is late, or the sensor restarted and its boot counter failed. This bound covers both cases.
        earliest = estimate[0] - estimate[1]
        return (earliest + received_us) // 2, (received_us - earliest) // 2 + 2

    def _stamp_usual(
        self, received_us: int, samples: Iterator[Sample], found: list[tuple[int, int] | None]
    ) -> Sample | None:
        """Stamp arrivals while they tell nothing new. Return the first that may, not stamped yet; None at the end.

        Most arrivals tell nothing new. Checks that they share are made once for all of them.
        """
        fit, counter, bucket = self.fit, self._counter, self._buckets.current
        bounds = NOTHING_KNOWN if fit.lines is None else fit.bounds
        if (
            bucket is None
            or bounds is None
            or counter.is_doubted
            or received_us >= bucket.due_us
            or bucket.arrivals >= bucket.arrivals_due
            or fit.slewed_us != self._slews.quiet_us
        ):
            return next(samples, None)
        from_us, until_us, earliest_from_us, earliest_rate, latest_from_us, latest_rate = bounds
        wrapped_us, last_sequence, last_tick_us = counter.wrapped_us, counter.last_sequence, counter.last_tick_us
        least_us, most_us = bucket.ticks_passed_over(received_us)
        least_us, most_us = max(least_us, from_us), min(most_us, until_us)
        before, stamped_ms, stamp = len(found), -1, None
        for tick_ms, sequence in islice(samples, bucket.arrivals_due - bucket.arrivals):
            if sequence <= last_sequence:
                telling: Sample | None = (tick_ms, sequence)
                break
            if tick_ms != stamped_ms:
                tick_us = wrapped_us + tick_ms * 1000
                distance_us = tick_us - from_us
                earliest_us = earliest_from_us + earliest_rate * distance_us
                latest_us = latest_from_us + latest_rate * distance_us
                if not (least_us <= tick_us < most_us and tick_us >= last_tick_us and earliest_us <= received_us):
                    telling = tick_ms, sequence
                    break
                stamped_ms, last_tick_us = tick_ms, tick_us
                if bounds is not NOTHING_KNOWN:
                    latest_us += SAMPLE_TICK_US
                    # No sample was taken after it arrived.
                    if latest_us > received_us:  # noqa: PLR1730 - a call of min() takes three times as long
                        latest_us = received_us
                    half_us = (latest_us - earliest_us) / 2
                    stamp = int(earliest_us + half_us), int(half_us) + 2
            last_sequence = sequence
            found.append(stamp)
        else:
            telling = next(samples, None)
        if len(found) > before:
            bucket.pass_over(len(found) - before, received_us, last_tick_us)
            counter.last_sequence, counter.last_tick_us, counter.is_odd = last_sequence, last_tick_us, False
        return telling

    # -- on disk ----------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The clock to keep on disk, with its newest and tightest observations."""
        fit, counter = self.fit, self._counter
        saved = [
            (round(tick), None if earliest == NO_LOWER_LIMIT else int(earliest) - 1, int(latest) + 1)
            for tick, earliest, latest in thinned(fit.observations, SAVED_MAX)
        ]
        last = None if counter.last_sequence == NO_SEQUENCE else (counter.last_sequence, counter.last_tick_us)
        observations = [] if fit.former or counter.is_doubted else saved
        return msgspec.msgpack.encode(_Saved(1, fit.strain, observations, last, fit.paced_by, self._slews.seen))

    @classmethod
    def from_bytes(cls, data: bytes, kind: Kind = "rc", slews: Slews | None = None) -> "DeviceClock":
        """The clock that `to_bytes` wrote in this boot of the gateway. Raises ValueError if `data` is no clock."""
        try:
            saved = msgspec.msgpack.decode(data, type=_Saved)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"no device clock: {error}") from error
        if saved.version != 1 or not 1 <= saved.strain <= STRAIN_MAX or len(saved.observations) > OBSERVATIONS_MAX:
            raise ValueError("no device clock of this version")
        clock = cls(kind, slews)
        fit, counter = clock.fit, clock._counter
        fit.strain, fit.paced_by = saved.strain, saved.paced_by or kind
        if saved.last is not None:
            counter.advance(*saved.last)
        # Slewing while the daemon was down counts as well.
        slewed_us = 0 if saved.slews is None else clock._slews.since(saved.slews)
        for tick, earliest, latest in saved.observations:
            seen = Observation(tick, NO_LOWER_LIMIT if earliest is None else earliest, latest)
            fit.observations.append(seen.widened(slewed_us))
        if fit.observations:
            newest = fit.observations[-1]
            counter.reference = round(newest.tick_us), round(newest.latest_us)
            fit.refit()
        return clock

    # -- inside -----------------------------------------------------------------------------------

    def _see_earlier(self, sequence: int) -> None:
        """Handle a lower sequence: the sensor sends kept samples, or restarted without a new boot or a lower tick."""
        fit, counter, buckets = self.fit, self._counter, self._buckets
        if counter.is_sent_again(sequence):
            return
        if not counter.is_doubted:
            buckets.current = None
            counter.is_doubted = fit.lines is not None
            fit.version += 1
        if fit.lines is None:
            fit.observations, buckets.current = [], None

    def _gather(self, received_us: int, tick_us: int, *, is_known: bool) -> None:
        """Put an arrival into its bucket, and learn from the bucket once it is full."""
        fit, counter, buckets = self.fit, self._counter, self._buckets
        limits = fit.limits
        rates = fit.rates_at(tick_us) if is_known else (-limits.error, limits.error)
        seen = buckets.gather(received_us, tick_us, rates, limits, self._slews.total_us, self.least_delay_us)
        if seen is not None:
            if counter.is_doubted:
                # One arrival of the bucket was quick, and none was in time for the former counter.
                fit.observations, counter.is_doubted = [], False
            self._learn(seen)
        if buckets.strays >= STRAYS_MAX:
            # Arrivals contradict the fitted lines, which are no longer believed.
            self.restart()

    def _learn(self, seen: Observation) -> None:
        """Fit an arrival, and judge by the result whether to believe the buckets."""
        learnt = self.fit.learn(seen)
        if learnt != "agrees":
            # The bucket's arrivals were compared with a wrong fit.
            self._buckets.current = None
        if learnt == "was-late":
            self._buckets.strays += 1
        elif learnt == "nothing-left":
            # No lower limit is left: nothing says how early any sample was taken.
            self._buckets.restart()
        elif learnt == "agrees" and seen.earliest_us > NO_LOWER_LIMIT:
            self._buckets.strays = 0
