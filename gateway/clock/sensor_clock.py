"""A sensor's clock seen from the gateway: when each of its ticks was, in CLOCK_BOOTTIME, and within which bound.

Learnt from round trips (PROBE and REPLY on a serial line), or from arrivals of readings that carry a tick (MQTT).
Pure: observations come in, times and bounds come out, all in microseconds.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import msgspec

from gateway.clock.sensor_line import ROUNDING_US, Lines, Observation, RateLimits, chord, lines_at
from gateway.clock.slews import Slews

Kind = Literal["rc", "ceramic", "crystal"]
Sample = tuple[int, int]
"""A reading's tick, in milliseconds, and its sequence."""


class Oscillator(NamedTuple):
    """What sets the pace of a sensor's clock, and how badly it may do it."""

    error_ppm: float
    """How far from true it may run."""
    wander_ppm_per_s: float
    """How fast its rate may change."""
    spread_ppm: float
    """How far apart its rates at any two times may lie."""


OSCILLATORS: dict[Kind, Oscillator] = {
    # 100 ppm a degree: a box that warms by six degrees in ten minutes, and by thirty in a day.
    "rc": Oscillator(10_000, 1.0, 3_000),
    "ceramic": Oscillator(5_000, 0.3, 800),
    "crystal": Oscillator(100, 0.02, 30),
}

_KINDS: tuple[Kind, ...] = ("crystal", "ceramic", "rc")
CONTRADICTIONS_MAX = 3
"""After so many, each weighed up by two agreements, a clock is taken for one of a worse oscillator than was said."""

OBSERVATIONS_MAX = 32
"""The newest ones, and fewer the older they are: what an outage is bridged by."""
NEWEST_KEPT = 12
SAVED_MAX = 24
"""Observations that are kept on disk: half a kilobyte for each sensor."""

STRAIN_MAX = 16
"""How many times as much change of rate than an oscillator should have is believed before an observation is not."""

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
SENT_AGAIN_MAX = 32
"""Samples that a sensor, or a broker, has under way at once: these come again after a connection has broken."""
ORDER_SLACK_US = 1_000_000
"""Of two samples the later one (by its sequence) may bear an earlier tick by this: two tasks of one sensor."""

TICK_US_MODULUS = 2**32 * 1000
_SAME_WRAP_US = TICK_US_MODULUS // 4
_REPLY_TICK_US = 5
"""The same of a REPLY, whose timer steps by four microseconds in our firmware; rounded up."""
_STEP_TOLERANCE_US = 5_000
_PIECE_US = 10_000_000
"""Bounds are made straight for so many ticks: that costs ten microseconds of them, and saves most of the reckoning."""
_AHEAD_US = 2_000_000
"""Ticks from this long before the newest observation on are reckoned from there."""

# Gateway time per tick strays a little further from 1 than ticks per gateway time do: 1 / 0.99 is 1.0101.
_BEYOND = 1.0102
_GATEWAY_PPM = 110
"""The gateway's own clock is not true either: a crystal."""
_RATE_ERROR_MAX = (OSCILLATORS["rc"].error_ppm * _BEYOND + _GATEWAY_PPM) * 1e-6
"""Of a clock that is worse than was said, too."""
_TICK_US_MAX = 1_020
"""What a sample's tick leaves open: it was taken at some point of its millisecond, which is one of a slow clock."""
_NEVER = float("-inf")
_NEVER_DUE = sys.maxsize
_NONE = -1
_WIDE_US = 1e9
"""What tells no more than this of a time tells nothing."""


class _Piece(NamedTuple):
    """Bounds of a stretch of ticks, made straight: they never cut into the exact ones."""

    from_us: float
    until_us: float
    earliest_us: float
    earliest_rate: float
    latest_us: float
    latest_rate: float


_NOTHING_KNOWN = _Piece(0, math.inf, _NEVER, 0, 0, 1)
"""What takes the place of a stretch while there are no lines: arrivals are compared to their samples' bare ticks."""


class _Saved(msgspec.Struct, array_like=True, frozen=True):
    """A clock as it is kept on disk."""

    version: int
    strain: int
    observations: list[tuple[int, int | None, int]]
    last: tuple[int, int] | None
    paced_by: Kind | None = None


class DeviceClock:
    """The clock of one boot of one sensor.

    The bound that `estimate` gives is proven, as long as the oscillator is of its kind: it is what all observations
    together leave open. Where they contradict each other, more change of rate is believed of this clock from then on.
    Where a sensor's arrivals are all that is known, `least_delay_us` is assumed as well.
    """

    __slots__ = (
        "_bucket",
        "_buckets",
        "_contradictions",
        "_former",
        "_is_doubted",
        "_is_odd",
        "_last_sequence",
        "_last_tick_us",
        "_lines",
        "_observations",
        "_piece",
        "_piece_behind",
        "_reference",
        "_slewed_us",
        "_slews",
        "_strain",
        "_strays",
        "_tightened_us",
        "_wrapped_us",
        "kind",
        "least_delay_us",
        "paced_by",
        "version",
    )

    def __init__(self, kind: Kind = "rc", slews: Slews | None = None) -> None:
        """`slews` is what the gateway's own clock is known to have been slewed by."""
        self._slews = Slews() if slews is None else slews
        self._slewed_us = self._slews.total_us
        """What the observations allow for."""
        self.kind: Kind = kind
        self.paced_by: Kind = kind
        """What its observations show: worse than `kind`, perhaps."""
        self.least_delay_us = LEAST_DELAY_US
        self._contradictions = 0
        self._observations: list[Observation] = []
        """By tick."""
        self._former: list[Observation] = []
        """What was known before a jump that nothing has confirmed yet."""
        self._strain = 1
        self._lines: Lines | None = None
        """At the newest observation's tick."""
        self._piece: _Piece | None = None
        self._piece_behind: _Piece | None = None
        """The same for samples of some time ago, which are asked for in turns with new ones."""
        self._last_sequence = _NONE
        """Of the samples that came, the highest, and its tick."""
        self._last_tick_us = 0
        self._wrapped_us = 0
        """How far its counter had wrapped then."""
        self._reference: tuple[int, int] | None = None
        """A tick, and when it was about: what wrapped ticks are told by."""
        self._bucket: _Bucket | None = None
        self._buckets = 0
        self._tightened_us = 0
        self._strays = 0
        """Buckets in a row that nothing could be learnt from."""
        self._is_odd = False
        """Whether the last arrival was of no sample of this counter."""
        self._is_doubted = False
        """Whether its sequence began anew, and no arrival since says that its tick did not."""
        self.version = 0
        """Another one whenever something was learnt."""

    @property
    def observed_us(self) -> int | None:
        """When it was observed last."""
        return round(self._observations[-1].latest_us) if self._observations else None

    @property
    def drift_ppm(self) -> tuple[float, float] | None:
        """How fast it runs, at least and at most: parts per million above true. None where that is not known."""
        if self._lines is None:
            return None
        slow, fast = self._lines.rates()
        return -fast / (1 + fast) * 1e6, -slow / (1 + slow) * 1e6

    @property
    def error_us(self) -> int | None:
        """The bound of a sample that is taken when it was observed last; None where it is not known."""
        if self._lines is None:
            return None
        earliest_us, latest_us = self._lines.span_at(self._lines.tick_us)
        return round((latest_us - earliest_us + _TICK_US_MAX) / 2)

    @property
    def known_from_us(self) -> int | None:
        """When arrivals will have told enough for a first bound at the earliest; None where that is not known."""
        return None if self._bucket is None else self._bucket.due_us

    @property
    def has_jumped(self) -> bool:
        """Whether the last observation contradicts those before, and nothing has said yet which is right."""
        return bool(self._former)

    def error_us_at(self, at_us: int) -> int | None:
        """The bound of a sample that is taken at this time, which is none before the last observation.

        None where it is not known.
        """
        if self._lines is None or self._former:
            return None
        lines = self._lines
        earliest_us, latest_us = lines.span_at(lines.tick_us)
        # A clock that is one per cent off moves the place by as much, and the bound there by less than a millisecond.
        earliest_us, latest_us = lines.span_at(lines.tick_us + max(0.0, at_us - (earliest_us + latest_us) / 2))
        return round((latest_us - earliest_us + _TICK_US_MAX) / 2)

    @property
    def last_sequence(self) -> int:
        """The highest sequence of the samples that came; -1 where none did, or the tick began anew since."""
        return self._last_sequence

    def restart(self) -> None:
        """Forget everything: the counter is another one."""
        self._forget()

    # -- what is observed -------------------------------------------------------------------------

    def probed(self, sent_us: int, received_us: int, tick_ms: int, tick_us: int) -> bool:
        """Take in one round trip: the sensor's clock said `tick_ms` and `tick_us` between the two times.

        False says that no clock of this kind came from the last observation to this one: the tick began anew, or was
        read wrongly. What was known is not used until another round trip says which.
        """
        self._allow_for_slews()
        tick = tick_ms * 1000 + tick_us
        if self._reference is not None:
            tick = self._unwrap(tick, (sent_us + received_us) // 2)
        seen = Observation(tick, sent_us - _REPLY_TICK_US, received_us)
        if self._former and not self._follows(self._observations, seen) and self._follows(self._former, seen):
            # The one before was the odd one out.
            self._observations = self._former
        is_continuous = self._follows(self._observations, seen)
        self._former = []
        self._count(is_contradiction=not is_continuous)
        if not is_continuous:
            self._former, self._observations = self._observations, []
            self._last_sequence = _NONE
        self._reference = tick, (sent_us + received_us) // 2
        self._add(seen)
        return is_continuous

    def arrived(self, received_us: int, tick_ms: int, sequence: int) -> bool:
        """Take in that a sample with this tick arrived: it was taken before that.

        False says that it was not taken by this counter: the tick began anew although the sensor's boot did not, or
        was misread. Two such in a row, and the clock is learnt anew.
        """
        self._allow_for_slews()
        if self._reference is None:
            self._reference = tick_ms * 1000, received_us
        tick_us = self._unwrap(tick_ms * 1000, received_us)
        if sequence < self._last_sequence:
            # Sent again, or of before: how long it was under way tells nothing of the clock.
            self._see_behind(sequence)
            return True
        span = self._span(tick_us) if self._lines is not None else None
        # Taken before the one before it, or after it arrived: the tick began anew, or jumped ahead; or all arrivals so
        # far had waited.
        if not self._in_order(sequence, tick_us) or (span is not None and received_us < span[0] - ORDER_SLACK_US):
            if self._is_odd:
                # Two in a row: it was not misread.
                self._count(is_contradiction=True)
                self._forget()
            self._is_odd = True
            return False
        self._is_odd = False
        self._note(sequence, tick_us)
        if span is not None and not self._is_believed(received_us, span[1]):
            # What arrives is all that is known of this counter, if it is another one.
            span = None
        if span is not None:
            earliest_us, latest_us = span
            if received_us < earliest_us or (
                received_us < latest_us - TIGHTENED_US and received_us >= self._tightened_us + TIGHTEN_INTERVAL_US
            ):
                self._tightened_us = received_us
                self._learn_arrival(Observation(tick_us, _NEVER, received_us))
                span = self._span(tick_us) if self._lines is not None else None
                if self._bucket is not None and span is not None:
                    # What its best was compared with is another line now.
                    self._bucket.excess_us = self._bucket.best_received_us - self._span(self._bucket.best_tick_us)[1]
        self._reference = tick_us, received_us
        self._gather(received_us, tick_us, span)
        return True

    def note(self, sequence: int, tick_ms: int, now_us: int) -> bool:
        """See that samples' ticks are in order, without learning from their arrival; False: the tick began anew.

        Nothing is known of the clock then.
        """
        if self._reference is None:
            return True
        tick_us = self._unwrap(tick_ms * 1000, now_us)
        if not self._in_order(sequence, tick_us):
            self._forget()
            return False
        if sequence > self._last_sequence:
            self._note(sequence, tick_us)
        return True

    # -- what follows from it ---------------------------------------------------------------------

    def estimate(self, tick_ms: int, now_us: int) -> tuple[int, int] | None:
        """When a sample with this tick was taken, and the bound of that time's error; None where that is not known.

        `now_us` is the time of its receipt: it says which of the tick's wraps is meant, and no sample is of after it.
        """
        self._allow_for_slews()
        if self._lines is None or self._former:
            return None
        earliest_us, latest_us = self._span(self._unwrap(tick_ms * 1000, now_us))
        earliest_us -= self._slews.latest_us
        latest_us = min(latest_us + _TICK_US_MAX + self._slews.latest_us, now_us)
        if self._is_doubted:
            # Where the counter may have begun anew, so may the sample be younger.
            latest_us = now_us
        if earliest_us > latest_us:
            # Of a time to come: the tick is of another counter than the one that was observed.
            return None
        return round((earliest_us + latest_us) / 2), int((latest_us - earliest_us) / 2) + 2

    def estimate_behind(self, tick_ms: int, now_us: int) -> tuple[int, int] | None:
        """`estimate` for samples of some time ago, in their order, while others arrive."""
        if self._lines is None or self._former:
            return None
        piece = self._piece_behind
        if piece is not None and not self._is_doubted and self._slewed_us == self._slews.quiet_us:
            from_us, until_us, earliest_us, earliest_rate, latest_us, latest_rate = piece
            tick_us = self._wrapped_us + tick_ms * 1000
            if from_us <= tick_us < until_us:
                distance_us = tick_us - from_us
                earliest_us += earliest_rate * distance_us
                latest_us += latest_rate * distance_us + _TICK_US_MAX
                if now_us - _SAME_WRAP_US < earliest_us <= now_us:
                    if latest_us > now_us:  # noqa: PLR1730 - a call of min() takes three times as long
                        latest_us = now_us
                    half_us = (latest_us - earliest_us) / 2
                    return int(earliest_us + half_us), int(half_us) + 2
        self._piece, self._piece_behind = self._piece_behind, self._piece
        found = self.estimate(tick_ms, now_us)
        self._piece, self._piece_behind = self._piece_behind, self._piece
        return found

    def stamp(self, received_us: int, tick_ms: int, sequence: int) -> tuple[int, int] | None:
        """Take in an arrival, and give its sample's time, as `arrived` and `estimate` do."""
        return self.stamps(received_us, [(tick_ms, sequence)])[0]

    def stamps(self, received_us: int, samples: Iterable[Sample]) -> list[tuple[int, int] | None]:
        """`stamp` for all that arrived at once."""
        found: list[tuple[int, int] | None] = []
        left = iter(samples)
        while (telling := self._stamp_usual(received_us, left, found)) is not None:
            found.append(self._stamp_telling(received_us, *telling))
        return found

    def _stamp_telling(self, received_us: int, tick_ms: int, sequence: int) -> tuple[int, int] | None:
        """`stamp` for an arrival that may tell something new."""
        is_behind = sequence < self._last_sequence
        estimate = self.estimate(tick_ms, received_us) if self.arrived(received_us, tick_ms, sequence) else None
        if estimate is None or not is_behind:
            return estimate
        # Of before; or the sensor has restarted, and its boot counter failed. Both are within this.
        earliest = estimate[0] - estimate[1]
        return (earliest + received_us) // 2, (received_us - earliest) // 2 + 2

    def _stamp_usual(
        self, received_us: int, samples: Iterator[Sample], found: list[tuple[int, int] | None]
    ) -> Sample | None:
        """Stamp arrivals as long as they tell nothing new; the first that may, which is left to do; None at the end.

        Most are such, and for each there is: what they have in common is looked at once.
        """
        bucket, piece = self._bucket, _NOTHING_KNOWN if self._lines is None else self._piece
        if (
            bucket is None
            or piece is None
            or bucket.is_of_lines is (self._lines is None)
            or received_us >= bucket.due_us
            or bucket.arrivals >= bucket.arrivals_due
            or self._slewed_us != self._slews.quiet_us
        ):
            return next(samples, None)
        from_us, until_us, earliest_from_us, earliest_rate, latest_from_us, latest_rate = piece
        wrapped_us, last_sequence, last_tick_us = self._wrapped_us, self._last_sequence, self._last_tick_us
        # What an arrival within its bucket's bounds allows for the latest time of its sample.
        quick_us = received_us - bucket.excess_us
        least_us, most_us = quick_us - WAITED_US, quick_us + QUICKER_US
        before, stamped_ms, stamp, newest_us = len(found), _NONE, None, _NEVER
        for tick_ms, sequence in islice(samples, bucket.arrivals_due - bucket.arrivals):
            if sequence <= last_sequence:
                telling: Sample | None = (tick_ms, sequence)
                break
            if tick_ms != stamped_ms:
                tick_us = wrapped_us + tick_ms * 1000
                distance_us = tick_us - from_us
                earliest_us = earliest_from_us + earliest_rate * distance_us
                latest_us = latest_from_us + latest_rate * distance_us
                if not (
                    from_us <= tick_us < until_us
                    and tick_us >= last_tick_us
                    and least_us <= latest_us <= most_us
                    and earliest_us <= received_us
                ):
                    telling = tick_ms, sequence
                    break
                newest_us, stamped_ms, last_tick_us = latest_us, tick_ms, tick_us
                if piece is not _NOTHING_KNOWN:
                    latest_us += _TICK_US_MAX
                    # Not after it came.
                    if latest_us > received_us:  # noqa: PLR1730 - a call of min() takes three times as long
                        latest_us = received_us
                    half_us = (latest_us - earliest_us) / 2
                    stamp = int(earliest_us + half_us), int(half_us) + 2
            last_sequence = sequence
            found.append(stamp)
        else:
            telling = next(samples, None)
        if len(found) > before:
            bucket.arrivals += len(found) - before
            # The newest of them was under way for the shortest.
            bucket.later_us = min(bucket.later_us, received_us - newest_us)
            self._last_sequence, self._last_tick_us, self._is_odd = last_sequence, last_tick_us, False
        return telling

    # -- on disk ----------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """What is worth keeping: the observations, of which the newest and the tightest."""
        kept = _thinned(self._observations, SAVED_MAX)
        saved = [
            (round(tick), None if earliest == _NEVER else int(earliest) - 1, int(latest) + 1)
            for tick, earliest, latest in kept
        ]
        last = None if self._last_sequence == _NONE else (self._last_sequence, self._last_tick_us)
        observations = [] if self._former or self._is_doubted else saved
        return msgspec.msgpack.encode(_Saved(1, self._strain, observations, last, self.paced_by))

    @classmethod
    def from_bytes(cls, data: bytes, kind: Kind = "rc", slews: Slews | None = None) -> "DeviceClock":
        """The clock as it was kept, in the same boot of the gateway. Raises ValueError where that is none."""
        clock = cls(kind, slews)
        try:
            saved = msgspec.msgpack.decode(data, type=_Saved)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"no device clock: {error}") from error
        if saved.version != 1 or not 1 <= saved.strain <= STRAIN_MAX or len(saved.observations) > OBSERVATIONS_MAX:
            raise ValueError("no device clock of this version")
        clock._strain = saved.strain
        clock.paced_by = saved.paced_by or kind
        if saved.last is not None:
            clock._note(*saved.last)
        for tick, earliest, latest in saved.observations:
            clock._observations.append(Observation(tick, _NEVER if earliest is None else earliest, latest))
        if clock._observations:
            newest = clock._observations[-1]
            clock._reference = round(newest.tick_us), round(newest.latest_us)
            clock._refit()
        return clock

    # -- inside -----------------------------------------------------------------------------------

    def _allow_for_slews(self) -> None:
        """What was observed before the gateway's clock was slewed is worth less by so much."""
        by_us = self._slews.total_us - self._slewed_us
        if by_us == 0:
            return
        self._slewed_us += by_us
        self._observations = [_widened(seen, by_us) for seen in self._observations]
        self._former = [_widened(seen, by_us) for seen in self._former]
        if self._observations:
            self._refit()

    def _limits(self) -> RateLimits:
        paced_by, error = OSCILLATORS[self.paced_by], self._error
        return RateLimits(
            error,
            paced_by.wander_ppm_per_s * self._strain * 1e-12,
            min(paced_by.spread_ppm * self._strain * 1e-6, 2 * error),
        )

    @property
    def _error(self) -> float:
        """|rate - 1| at most."""
        return (OSCILLATORS[self.paced_by].error_ppm * _BEYOND + _GATEWAY_PPM) * 1e-6

    def _follows(self, observations: Sequence[Observation], seen: Observation) -> bool:
        """Whether this clock may come from the last of them to the one that was seen now."""
        if not observations:
            return True
        last = observations[-1]
        ticks_us = seen.tick_us - last.tick_us
        ends = ticks_us * (1 - self._error), ticks_us * (1 + self._error)
        return (
            min(ends) <= seen.latest_us - last.earliest_us + _STEP_TOLERANCE_US
            and max(ends) >= seen.earliest_us - last.latest_us - _STEP_TOLERANCE_US
        )

    def _forget(self) -> None:
        self._observations, self._former = [], []
        self._lines, self._bucket, self._reference = None, None, None
        self._piece = self._piece_behind = None
        self._last_sequence, self._is_odd, self._is_doubted, self._strays = _NONE, False, False, 0
        self._buckets = 0
        self.version += 1

    def _is_believed(self, received_us: int, latest_us: float) -> bool:
        """Whether this counter is the one that was observed: an arrival in time for that one says so."""
        if self._is_doubted and received_us <= latest_us + ORDER_SLACK_US:
            self._is_doubted, self._bucket = False, None
        return not self._is_doubted

    def _see_behind(self, sequence: int) -> None:
        """The sensor sends what it had kept; or it has restarted, and neither its boot nor a lower tick says so."""
        if sequence > 1 and sequence >= self._last_sequence - SENT_AGAIN_MAX:
            return
        if not self._is_doubted:
            self._bucket = None
            self._is_doubted = self._lines is not None
            self.version += 1
        if self._lines is None:
            self._observations, self._bucket = [], None

    def _in_order(self, sequence: int, tick_us: int) -> bool:
        """Whether this tick may be of the same counter as those that came: a later sample has a later one."""
        return (
            sequence <= self._last_sequence or tick_us >= self._last_tick_us - ORDER_SLACK_US or self._last_sequence < 0
        )

    def _note(self, sequence: int, tick_us: int) -> None:
        self._last_sequence, self._last_tick_us = sequence, tick_us
        self._wrapped_us = tick_us - tick_us % TICK_US_MODULUS

    def _add(self, seen: Observation) -> None:
        self._observations = _thinned(sorted([*self._observations, seen]), OBSERVATIONS_MAX)
        self._refit()

    def _gather(self, received_us: int, tick_us: int, span: tuple[float, float] | None) -> None:
        """Put an arrival into its bucket, and learn from the quickest once that is full."""
        excess_us = received_us - (tick_us if span is None else span[1])
        bucket = self._bucket
        if bucket is None or bucket.is_of_lines is (span is None):
            self._bucket = _Bucket(
                self._buckets, received_us, tick_us, excess_us, self._slews.total_us, is_of_lines=span is not None
            )
            return
        if not bucket.add(received_us, tick_us, excess_us, self._error, self.least_delay_us):
            if bucket.begins_anew:
                self._note_stray()
            return
        self._bucket = None
        delay_us = self.least_delay_us * max(1.0, BUCKET_ARRIVALS / bucket.arrivals)
        if bucket.later_us > bucket.excess_us + delay_us + (received_us - bucket.best_received_us) * self._error:
            # The tick stands still, or counts something else; or the network has become slow.
            self._note_stray()
            return
        self._buckets += 1
        if self._is_doubted:
            # Among so many one was quick, and none was in time for the former counter.
            self._observations, self._is_doubted = [], False
        # What came to be since.
        slewed_us = self._slews.total_us - bucket.slewed_us
        earliest_us = bucket.best_received_us - delay_us - _TICK_US_MAX - slewed_us
        self._learn_arrival(Observation(bucket.best_tick_us, earliest_us, bucket.best_received_us + slewed_us))

    def _learn_arrival(self, seen: Observation) -> None:
        """Take in an upper limit, which is certain, and perhaps a lower one, which is not."""
        before = self._observations
        self._observations = _thinned(sorted([*before, seen]), OBSERVATIONS_MAX)
        is_fitting = self._fit()
        if not is_fitting or seen.earliest_us > _NEVER:
            self._count(is_contradiction=not is_fitting)
            self._strays = 0 if is_fitting else self._strays
        if not is_fitting and seen.earliest_us > _NEVER:
            certain = [each._replace(earliest_us=_NEVER) for each in before]
            if lines_at(seen.tick_us, [seen, *certain], self._limits()) is None:
                # It was under way for longer than that.
                self._observations = before
                self._fit()
                self._note_stray()
                return
        place = 0
        while not is_fitting and place < len(self._observations):
            if self._observations[place] is not seen:
                # Arrivals that are older by now had waited for longer than was thought.
                self._observations[place] = self._observations[place]._replace(earliest_us=_NEVER)
                is_fitting = self._fit()
            place += 1
        if not is_fitting:
            # Nothing is left that says how early: begin with short buckets again.
            self._bucket, self._buckets = None, 0

    def _note_stray(self) -> None:
        """Arrivals do not bear the line out: after some buckets of these it is no longer believed."""
        self._strays += 1
        if self._strays >= STRAYS_MAX:
            self._forget()

    def _count(self, *, is_contradiction: bool) -> None:
        """After some contradictions, take the oscillator for the next worse one."""
        self._contradictions = max(0, self._contradictions + (2 if is_contradiction else -1))
        if self._contradictions >= 2 * CONTRADICTIONS_MAX and self.paced_by != _KINDS[-1]:
            self.paced_by, self._strain = _KINDS[_KINDS.index(self.paced_by) + 1], 1
            self._contradictions = 0

    def _has_lower(self) -> bool:
        return any(seen.earliest_us > _NEVER for seen in self._observations)

    def _refit(self) -> None:
        """Find lines that agree with all; where none does, believe more change of rate, then less of what is old."""
        while not self._fit() and self._has_lower():
            if self._strain < STRAIN_MAX:
                self._strain *= 2
            else:
                del self._observations[0]

    def _fit(self) -> bool:
        """Find the lines that agree with all observations; whether there are any."""
        self.version += 1
        self._piece = self._piece_behind = self._lines = None
        if self._has_lower():
            self._lines = lines_at(self._observations[-1].tick_us, self._observations, self._limits())
        return self._lines is not None

    def _span(self, tick_us: float) -> tuple[float, float]:
        piece = self._piece
        if piece is None or not piece.from_us <= tick_us < piece.until_us:
            piece = self._piece = self._piece_at(tick_us)
        distance_us = tick_us - piece.from_us
        return (
            piece.earliest_us + piece.earliest_rate * distance_us,
            piece.latest_us + piece.latest_rate * distance_us,
        )

    def _piece_at(self, tick_us: float) -> _Piece:
        lines = self._lines
        assert lines is not None  # noqa: S101 - whoever asks has looked
        if tick_us >= lines.tick_us - _AHEAD_US:
            return _piece(lines, tick_us, tick_us + _PIECE_US)
        # Between observations the bounds are those of the place itself. Further off, they change slowly.
        until_us = tick_us + _PIECE_US + (lines.tick_us - tick_us) / 100
        piece = _piece(lines_at(tick_us, self._observations, self._limits()) or lines, tick_us, until_us)
        place = bisect_right(self._observations, (tick_us,))
        before, after = (
            self._observations[place - 1 : place + 1] if 0 < place < len(self._observations) else (None, None)
        )
        if (
            before is None
            or after is None
            or until_us > after.tick_us
            or _NEVER in {before.earliest_us, after.earliest_us}
        ):
            return piece
        return min(piece, self._piece_between(before, after, tick_us, until_us), key=_width_us)

    def _piece_between(self, before: Observation, after: Observation, from_us: float, until_us: float) -> _Piece:
        """What two observations say of a stretch of ticks between them."""
        middle_us = min(max((before.tick_us + after.tick_us) / 2, from_us), until_us)
        bulge_us = self._limits().bulge_us(middle_us - before.tick_us, after.tick_us - middle_us) + ROUNDING_US
        width_us = until_us - from_us
        earliest_us, latest_us = chord(before, after, from_us)
        earliest_end_us, latest_end_us = chord(before, after, until_us)
        return _Piece(
            from_us,
            until_us,
            earliest_us - bulge_us,
            (earliest_end_us - earliest_us) / width_us,
            latest_us + bulge_us,
            (latest_end_us - latest_us) / width_us,
        )

    def _unwrap(self, wrapped_us: int, now_us: int) -> int:
        """The tick of this value, modulo its wrap, that is nearest to what the clock says at `now_us`."""
        assert self._reference is not None  # noqa: S101 - whoever asks has looked
        tick_us, at_us = self._reference
        expected_us = tick_us + (now_us - at_us)
        behind_us = (expected_us - wrapped_us + TICK_US_MODULUS // 2) % TICK_US_MODULUS
        return expected_us - (behind_us - TICK_US_MODULUS // 2)


class _Bucket:
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
        self.begins_anew = excess_us > self.excess_us + WAITED_US + apart_us * _RATE_ERROR_MAX
        if self.begins_anew:
            self.settled_us, self._settled_excess_us, self.arrivals = received_us, excess_us, 1
            self._is_second_half = False
            self.excess_us, self.best_received_us, self.best_tick_us = excess_us, received_us, tick_us
        elif (
            excess_us < self.excess_us - least_delay_us - apart_us * rate_error
            or excess_us < self._settled_excess_us - least_delay_us - (received_us - self.settled_us) * _RATE_ERROR_MAX
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


def _widened(seen: Observation, by_us: int) -> Observation:
    return Observation(seen.tick_us, seen.earliest_us - by_us, seen.latest_us + by_us)


def _piece(lines: Lines, from_us: float, until_us: float) -> _Piece:
    """A stretch of what lines allow. The latest time is convex, and the earliest concave: chords lie outside."""
    earliest_us, latest_us = lines.span_at(from_us)
    earliest_end_us, latest_end_us = lines.span_at(until_us)
    width_us = until_us - from_us
    return _Piece(
        from_us,
        until_us,
        earliest_us,
        (earliest_end_us - earliest_us) / width_us,
        latest_us,
        (latest_end_us - latest_us) / width_us,
    )


def _width_us(piece: _Piece) -> float:
    """How much a stretch leaves open, at both its ends."""
    length_us = piece.until_us - piece.from_us
    return 2 * (piece.latest_us - piece.earliest_us) + length_us * (piece.latest_rate - piece.earliest_rate)


def _thinned(observations: Sequence[Observation], limit: int) -> list[Observation]:
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
