"""The gateway's clock in one of its boots: gives the wall time, with a bound, at any CLOCK_BOOTTIME.

Pure: looks at the clocks come in, offsets and bounds come out, all in microseconds. Everything is stored in
CLOCK_BOOTTIME, which never steps. Wall time is CLOCK_BOOTTIME plus an offset. Between two looks the box's crystal keeps
the time. So an offset known at one moment also holds at another, but its bound grows by `ppm` of the time between them.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

FOREVER_US = 2**62
PPM_MAX = 10_000
"""Highest value of `gateway.clock_error_ppm_max`."""
POINTS_MAX = 32
"""Points kept of one boot. More points would narrow the bounds of old rows only a little."""
WORTH = 0.7
"""Share to which a look must narrow the bound to become a point. Looks come each second."""
SLEW_LOOK_US = 900_000
"""Least time between two looks that are compared to measure slewing. Looks come each second."""
GUESS_CHANGE_US = 500
"""Change of the offset up to which it is jitter of reading two clocks, and not worth a write to the card."""
SPAN_SHARE = 8
"""A span ends where the exact bound may have shrunk by one part in this many."""
SPANS_MAX = 2_000
"""Spans of one boot that `BootTimes` remembers."""
ROUNDED_BY_US = 100
"""Least amount by which bounds are rounded up, so that no span is tiny."""
LEAP_US = 1_000_000
LEAP_JITTER_US = 100_000
"""Most by which the offset's change over a leap second may differ from a second, as the clock may be slewed too."""
LEAP_SLACK_US = 2_000_000
"""Most by which the midnight of a leap second may lie outside the two looks around it."""

Quality = Literal["synced", "bounded", "unknown"]
"""`synced`: learnt from a wall clock that is vouched for. `bounded`: only known to lie between two known times.
`unknown`: not known at all."""


Us = Annotated[int, Meta(ge=-(2**60), le=2**60)]
"""Microseconds. A value beyond 36,000 years is damaged."""


class Look(NamedTuple):
    """One reading of the clocks."""

    at_us: Us
    """CLOCK_BOOTTIME."""
    offset_us: Us
    """The wall clock less CLOCK_BOOTTIME."""
    error_us: Us | None
    """Bound of the wall clock's error; None if nothing vouches for the wall clock."""
    adjusted_us: Us | None = None
    """CLOCK_MONOTONIC less CLOCK_MONOTONIC_RAW: the time that the kernel added to the crystal's own. None if the two
    could not be read closely enough."""


class Point(NamedTuple):
    """Limits of the offset at one moment, without this boot's leap seconds."""

    at_us: Us
    low_us: Us
    high_us: Us
    slewed_us: Us = 0
    """Slewing by the kernel since the point before (or the first look), beyond what `ppm` covers."""
    between: tuple[Us, Us] | None = None
    """Limits of the offset at all times since the point before, as left by points that were given up."""


class WallClock(NamedTuple):
    """Wall time over a span of one boot: CLOCK_BOOTTIME + `offset_us` is microseconds since 1970, UTC."""

    offset_us: int
    error_us: int | None
    """Bound of the error; None if nothing vouches for the date (promise P5)."""
    is_bounded: bool = False
    """Whether the boot is only known to lie between two known times."""
    from_us: int = -FOREVER_US
    until_us: int = FOREVER_US
    """The span of CLOCK_BOOTTIME in which this holds: `from_us` is included, `until_us` is not."""

    @property
    def synced(self) -> bool:
        """Whether the clock was learnt in this boot."""
        return self.error_us is not None and not self.is_bounded

    def at(self, boottime: int) -> int:
        """Microseconds since 1970 at a CLOCK_BOOTTIME in microseconds."""
        return boottime + self.offset_us


class Line(NamedTuple):
    """A whole boot's wall time, as a correction gives it for records forwarded before it was known."""

    boottime_us: int
    offset_us: int
    rate_ppm: float
    error_us: int
    error_growth_ppm: float


class BootClock(Struct, frozen=True):
    """Knowledge of wall time in one boot, as of the last look. `looked` returns the knowledge after another look.

    Points are sorted by time. All points narrow each other's limits, so two neighbours alone tell the offset between
    them. Looks must be honest: if the wall clock is further off than it says, this is wrong until a look contradicts.
    """

    quality: Quality
    ppm: float
    points: tuple[Point, ...] = ()
    guess_us: Us = 0
    """Offset of the wall clock as it stood, shown to people if nothing is known."""
    slewed_us: Us = 0
    """Slewing by the kernel since the last point, beyond what `ppm` covers."""
    leaps: tuple[tuple[Us, Us], ...] = ()
    """Leap seconds within this boot: the time of each, and the change of the offset."""
    revision: int = 0
    """How many times a look proved earlier knowledge wrong."""
    last: Look | None = None
    """The look with which the next one is compared, to measure slewing."""

    @classmethod
    def constant(cls, offset_us: int, error_us: int | None, quality: Quality = "synced") -> "BootClock":
        """A clock with one offset and bound for its whole boot; an unknown clock if the bound is None."""
        if error_us is None:
            return cls("unknown", 0.0, guess_us=offset_us)
        return cls(quality, 0.0, (Point(0, offset_us - error_us, offset_us + error_us),))

    @classmethod
    def from_bytes(cls, data: bytes) -> "BootClock":
        """The clock that `to_bytes` wrote. Raises ValueError if `data` is no clock."""
        clock = msgspec.json.decode(data, type=cls)
        order = [point.at_us for point in clock.points]
        if (clock.quality != "unknown") != bool(order) or order != sorted(order) or not 0 <= clock.ppm <= PPM_MAX:
            raise ValueError("no clock of a boot")
        return clock

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    def says_as(self, other: "BootClock") -> bool:
        """Whether both clocks give equal answers for all times."""
        return self is other or replace(self, last=None) == replace(other, last=None)

    @property
    def synced(self) -> bool:
        """Whether the clock was learnt in this boot."""
        return self.quality == "synced"

    @property
    def known(self) -> bool:
        """Whether there is a bound."""
        return self.quality != "unknown"

    def resumed(self, ppm: float) -> "BootClock":
        """This clock, which an earlier start of the daemon left, with the `ppm` of this start."""
        return replace(self, ppm=ppm)

    # -- answers --------------------------------------------------------------------------------

    def at(self, boottime: int) -> int:
        """Microseconds since 1970 at a CLOCK_BOOTTIME in microseconds."""
        return boottime + self.offset_us(boottime)

    def offset_us(self, boottime: int) -> int:
        """Wall time less CLOCK_BOOTTIME; only a guess if nothing is known."""
        if not self.points:
            return self.guess_us
        low, high = self._interval(boottime)
        return (low + high) // 2 + self._leapt_us(boottime)

    def error_us(self, boottime: int) -> int | None:
        """Bound of the error of `offset_us`; None if nothing is known."""
        if not self.points:
            return None
        low, high = self._interval(boottime)
        return (high - low + 1) // 2

    def around(self, boottime: int) -> WallClock:
        """One offset and one bound, rounded up, for a whole span around a moment.

        Bounds are rounded to few different values, so that callers can cache what they make of them.
        """
        if not self.points:
            return WallClock(self.guess_us, None)
        low, high = self._interval(boottime)
        offset_us, error_us = (low + high) // 2, (high - low + 1) // 2
        from_us, until_us = -FOREVER_US, FOREVER_US
        if self.ppm:
            error_us = rounded_up(error_us)
            from_us, until_us = self._span(boottime, offset_us - error_us, offset_us + error_us)
            # Further away, a much smaller bound may hold.
            within_us = int(error_us / SPAN_SHARE * 1e6 / self.ppm) + 1
            from_us, until_us = max(from_us, boottime - within_us), min(until_us, boottime + within_us)
        for leap_us, _ in self.leaps:
            if leap_us <= boottime:
                from_us = max(from_us, leap_us)
            else:
                until_us = min(until_us, leap_us)
        offset_us += self._leapt_us(boottime)
        return WallClock(offset_us, error_us, self.quality == "bounded", from_us, until_us)

    def line(self) -> Line | None:
        """One line for the whole boot; None if nothing is known. Before the first point it is as good as the points.

        After the first point, the bound that was sent with a record is usually better. But if a look proved earlier
        knowledge wrong (`revision`), the line replaces that bound, so it allows for all later slewing and leap seconds.
        """
        if not self.points:
            return None
        first = self.points[0]
        error_us = (first.high_us - first.low_us + 1) // 2 + first.slewed_us
        if self.revision:
            error_us += sum(point.slewed_us for point in self.points[1:]) + self.slewed_us
            error_us += sum(abs(by_us) for _, by_us in self.leaps)
        offset_us = (first.low_us + first.high_us) // 2 + self._leapt_us(first.at_us)
        return Line(first.at_us, offset_us, 0.0, error_us, self.ppm)

    def _interval(self, at_us: int) -> tuple[int, int]:
        """Limits of the offset, without leap seconds."""
        place = bisect_right(self.points, at_us, key=_at)
        after = self.points[place] if place < len(self.points) else None
        slewed_us = self.slewed_us if after is None else after.slewed_us
        found: list[tuple[int, int]] = []
        if place:
            before = self.points[place - 1]
            found.append(_widened(before, self._drift_us(at_us - before.at_us) + slewed_us))
        if after is not None:
            found.append(_widened(after, self._drift_us(after.at_us - at_us) + slewed_us))
            if place and after.between is not None:
                found.append(after.between)
        low, high = max(low for low, _ in found), min(high for _, high in found)
        # `between` may contradict points that were narrowed after it was made. Then the two points count.
        return (low, high) if low <= high else (max(low for low, _ in found[:2]), min(high for _, high in found[:2]))

    def _span(self, at_us: int, low_us: int, high_us: int) -> tuple[int, int]:
        """The span around a moment in which the offset's interval lies within two limits."""
        place = bisect_right(self.points, at_us, key=_at)
        before = self.points[place - 1] if place else None
        after = self.points[place] if place < len(self.points) else None
        slewed_us = self.slewed_us if after is None else after.slewed_us
        between = after.between if before is not None and after is not None else None
        from_us = -FOREVER_US if before is None else before.at_us
        until_us = FOREVER_US if after is None else after.at_us
        for side in (1, -1):
            # First the upper limit, then the lower one with its sign turned. The point before keeps the offset within
            # the limit up to `up_to`; the point after does so from `from_on` on.
            limit = high_us if side > 0 else -low_us
            if between is not None and (between[1] if side > 0 else -between[0]) <= limit:
                continue
            up_to, from_on = -math.inf, math.inf
            if before is not None:
                room_us = limit - (before.high_us if side > 0 else -before.low_us) - slewed_us
                up_to = before.at_us + room_us * 1e6 / self.ppm
            if after is not None:
                room_us = limit - (after.high_us if side > 0 else -after.low_us) - slewed_us
                from_on = after.at_us - room_us * 1e6 / self.ppm
            if up_to >= from_on:
                continue
            if at_us <= up_to:
                until_us = min(until_us, int(up_to))
            elif from_on < math.inf:
                from_us = max(from_us, int(from_on) + 1)
        return min(from_us, at_us), max(until_us, at_us + 1)

    def _leapt_us(self, at_us: int) -> int:
        return sum(by_us for leap_us, by_us in self.leaps if leap_us <= at_us)

    def _drift_us(self, elapsed_us: int) -> int:
        return math.ceil(elapsed_us * self.ppm / 1e6)

    # -- learning -------------------------------------------------------------------------------

    def looked(self, look: Look) -> "BootClock":
        """The knowledge after another look.

        If nothing vouches for the wall clock any more, the look teaches nothing, and earlier knowledge stays. A look
        that agrees becomes a point if it makes the bound markedly smaller. A leap second splits the boot. Any other
        contradiction by a clock that is vouched for proves earlier knowledge wrong: the new look then counts for the
        whole boot. This holds for `clock = "system"` too: a host that steps its clock corrects itself.
        """
        return self.slewed(look).taught(look, self.last)

    def slewed(self, look: Look) -> "BootClock":
        """Add up how much the kernel slewed the clock beyond what `ppm` allows for.

        Half of `ppm` is for the crystal, and the other half for slewing. The drift does not cover slewing beyond that.
        """
        last = self.last
        # A look that may become a point counts at once: slewing before it must not be added to the time after it.
        if last is not None and look.at_us - last.at_us < SLEW_LOOK_US and look.error_us is None:
            return self
        beyond_us = 0
        if last is not None and last.adjusted_us is not None:
            if look.adjusted_us is None:
                # The next look with an `adjusted_us` then covers the slewing up to here too.
                look = look._replace(adjusted_us=last.adjusted_us)
            else:
                allowed_us = math.floor((look.at_us - last.at_us) * self.ppm / 2e6)
                beyond_us = max(0, abs(look.adjusted_us - last.adjusted_us) - allowed_us)
        return replace(self, last=look, slewed_us=self.slewed_us + beyond_us)

    def taught(self, look: Look, before: Look | None) -> "BootClock":
        """The knowledge after learning the offset from a look; `before` is the look before it."""
        if look.error_us is None:
            is_news = not self.known and abs(look.offset_us - self.guess_us) > GUESS_CHANGE_US
            return replace(self, guess_us=look.offset_us) if is_news else self
        if not self.points:
            return self._begun_by(look, look.error_us)
        if look.at_us < self.points[-1].at_us:
            return self
        leapt_us = self._leapt_us(look.at_us)
        low, high = look.offset_us - look.error_us - leapt_us, look.offset_us + look.error_us - leapt_us
        known_low, known_high = self._interval(look.at_us)
        met = Point(look.at_us, max(low, known_low), min(high, known_high), self.slewed_us)
        leap = self._leap_seen(look, before)
        if leap is None and met.low_us > met.high_us:
            since_us = self.points[-1].at_us if before is None else before.at_us
            for by_us in (-LEAP_US, LEAP_US):
                leap_us = _leap(look, by_us, since_us)
                if leap_us is not None and max(low - by_us, known_low) <= min(high - by_us, known_high):
                    leap = leap_us, by_us
        if leap is not None:
            return replace(self, leaps=(*self.leaps, leap))
        if met.low_us <= met.high_us:
            is_worth = met.high_us - met.low_us <= WORTH * (known_high - known_low)
            return self._with_point(met) if is_worth else self
        return replace(self._begun_by(look, look.error_us), revision=self.revision + 1)

    def _leap_seen(self, look: Look, before: Look | None) -> tuple[int, int] | None:
        """A leap second that the kernel made between two looks, if it vouches for both, however wide its bound is."""
        if before is None or before.error_us is None:
            return None
        by_us = LEAP_US if look.offset_us > before.offset_us else -LEAP_US
        leap_us = _leap(look, by_us, before.at_us)
        if leap_us is None or abs(look.offset_us - before.offset_us - by_us) > LEAP_JITTER_US:
            return None
        is_known = any(abs(leap_us - at_us) <= LEAP_SLACK_US for at_us, _ in self.leaps)
        return None if is_known else (leap_us, by_us)

    def _begun_by(self, look: Look, error_us: int) -> "BootClock":
        """The knowledge from this look alone."""
        slewed_us = sum(point.slewed_us for point in self.points) + self.slewed_us
        first = Point(look.at_us, look.offset_us - error_us, look.offset_us + error_us, slewed_us)
        return replace(self, quality="synced", points=(first,), guess_us=look.offset_us, slewed_us=0, leaps=())

    def _with_point(self, point: Point) -> "BootClock":
        points = [*self.points, point]
        # The new point narrows those before it, one after the other, until one is narrow enough already.
        for place in range(len(points) - 2, -1, -1):
            before, after = points[place], points[place + 1]
            low, high = _widened(after, self._drift_us(after.at_us - before.at_us) + after.slewed_us)
            if low <= before.low_us and high >= before.high_us:
                break
            points[place] = before._replace(low_us=max(low, before.low_us), high_us=min(high, before.high_us))
        if len(points) > 2 and self._is_steady(*points[-3:]):
            points[-2:] = [self._joined(*points[-3:])]
        elif len(points) > POINTS_MAX:
            points = self._thinned(points)
        return replace(self, points=tuple(points), slewed_us=0)

    def _is_steady(self, first: Point, given_up: Point, last: Point) -> bool:
        """Whether the middle point can be given up at little cost, as with a clock that is synced all the time."""
        least_us = min(point.high_us - point.low_us for point in (first, given_up, last))
        return WORTH * _width(self._joined(first, given_up, last)) <= least_us

    def _thinned(self, points: Sequence[Point]) -> list[Point]:
        """Give up the point, between the first and the last, that costs least."""
        least, joined = 1, self._joined(*points[:3])
        for place in range(2, len(points) - 1):
            other = self._joined(*points[place - 1 : place + 2])
            if _width(other) < _width(joined):
                least, joined = place, other
        return [*points[:least], joined, *points[least + 2 :]]

    def _joined(self, first: Point, given_up: Point, last: Point) -> Point:
        """The last of three points, with the limits since the first point that the given-up one leaves."""
        sides = self._extent(first, given_up), self._extent(given_up, last)
        between = min(low for low, _ in sides), max(high for _, high in sides)
        return last._replace(slewed_us=given_up.slewed_us + last.slewed_us, between=between)

    def _extent(self, before: Point, after: Point) -> tuple[int, int]:
        """Limits of the offset at all times between two points."""
        peak_us = self._drift_us(after.at_us - before.at_us) // 2 + after.slewed_us + 1
        low = min((before.low_us + after.low_us) // 2 - peak_us, before.low_us, after.low_us)
        high = max((before.high_us + after.high_us + 1) // 2 + peak_us, before.high_us, after.high_us)
        if after.between is None:
            return low, high
        return max(low, after.between[0]), min(high, after.between[1])


class BootTimes:
    """Looks up one boot's clock for many times: each span is computed once."""

    __slots__ = ("_from_us", "_spans", "clock")

    def __init__(self, clock: BootClock) -> None:
        self.clock = clock
        self._from_us: list[int] = []
        self._spans: list[WallClock] = []
        """Sorted by time, without overlaps."""

    def around(self, boottime: int) -> WallClock:
        """See `BootClock.around`."""
        place = bisect_right(self._from_us, boottime)
        if place and boottime < self._spans[place - 1].until_us:
            return self._spans[place - 1]
        found = self.clock.around(boottime)
        if len(self._spans) >= SPANS_MAX:
            self._from_us, self._spans, place = [], [], 0
        if place:
            found = found._replace(from_us=max(found.from_us, self._spans[place - 1].until_us))
        if place < len(self._spans):
            found = found._replace(until_us=min(found.until_us, self._from_us[place]))
        self._from_us.insert(place, found.from_us)
        self._spans.insert(place, found)
        return found


def bounded_between(
    before: tuple[BootClock, int] | None, seen_us: Sequence[int], after: BootClock, released_us: int
) -> list[BootClock]:
    """The clocks of consecutive boots that were never synced, bounded by the known boots before and after them.

    `before` is the last known clock before them, with the latest CLOCK_BOOTTIME seen in its boot. If it is None, all
    boots came after `released_us` (wall time). `seen_us` has the latest CLOCK_BOOTTIME seen in each boot. `after` is
    the first known clock behind them. Each boot lasted at least as long as it was seen, and came before the next one,
    so readings keep their order from boot to boot.
    """
    lowest_us = released_us
    if before is not None:
        known, at_us = before
        lowest_us = known.at(at_us) - (known.error_us(at_us) or 0)
    highest_us = after.at(0) + (after.error_us(0) or 0)
    total_us = sum(seen_us)
    room_us = highest_us - total_us - lowest_us
    # If the room is negative, the boots' clocks ran too fast, or one of the two known clocks was wrong.
    error_us = (abs(room_us) + 1) // 2 + math.ceil(total_us * after.ppm / 1e6)
    clocks = []
    zero_us = lowest_us + room_us // 2
    for of_boot_us in seen_us:
        point = Point(0, zero_us - error_us, zero_us + error_us)
        clocks.append(BootClock("bounded", after.ppm, (point,)))
        zero_us += of_boot_us
    return clocks


def rounded_up(error_us: int) -> int:
    """A bound rounded up a little, to one of eight values in each octave."""
    error_us += max(error_us >> 4, ROUNDED_BY_US)
    shift = error_us.bit_length() - 4
    return ((error_us >> shift) + 1) << shift


def _at(point: Point) -> int:
    return point.at_us


def _widened(point: Point, by_us: int) -> tuple[int, int]:
    return point.low_us - by_us, point.high_us + by_us


def _width(point: Point) -> int:
    return FOREVER_US if point.between is None else point.between[1] - point.between[0]


def _leap(look: Look, by_us: int, known_us: int) -> int | None:
    """CLOCK_BOOTTIME of a leap second of `by_us`, if a month ended in UTC between `known_us` and the look."""
    wall_us = look.at_us + look.offset_us + LEAP_SLACK_US
    try:
        month = datetime.fromtimestamp(wall_us // 1_000_000, UTC).replace(day=1, hour=0, minute=0, second=0)
    except (ValueError, OverflowError):
        return None
    # By the old offset, an inserted second takes effect at midnight, and a left-out one a second before.
    at_us = int(month.timestamp()) * 1_000_000 - (look.offset_us - by_us) - max(by_us, 0)
    return at_us if known_us - LEAP_SLACK_US <= at_us <= look.at_us + LEAP_SLACK_US else None
