"""The gateway's clock in one of its boots: what wall time was at any CLOCK_BOOTTIME, and how far that can be trusted.

Pure: looks at the clocks come in, offsets and bounds come out, all in microseconds. Everything is stored in
CLOCK_BOOTTIME, which never steps; wall time is that and an offset. What runs between two looks is the crystal of this
box: the offset known at one moment holds at another with a bound that grows by `ppm` of the time between them.
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
"""What `gateway.clock_error_ppm_max` may be."""
POINTS_MAX = 32
"""Points that are kept of one boot: some more would tell rows of long ago a little better."""
WORTH = 0.7
"""A look becomes a point where it makes the bound this much smaller: looks come each second."""
SLEW_LOOK_US = 900_000
"""How far apart two looks are that show how the kernel changes the clock's rate: those of each second."""
GUESS_CHANGE_US = 500
"""A change of the offset below this is jitter of reading two clocks, and not worth a write to the card."""
SPAN_SHARE = 8
"""A span is left where the bound may have become smaller by one part in so many."""
SPANS_MAX = 2_000
"""Spans of one boot that are remembered."""
ROUNDED_BY_US = 100
"""Bounds are rounded up by this at the least, so that the span that one holds for is never tiny."""
LEAP_US = 1_000_000
LEAP_JITTER_US = 100_000
"""How far from a second two looks may be apart that are before and after one: what is slewed meanwhile."""
LEAP_SLACK_US = 2_000_000
"""How far from midnight by the old clock or the new a leap second is looked for."""

Quality = Literal["synced", "bounded", "unknown"]
"""Learnt from what keeps the wall clock; known only to lie between two known times; not known at all."""


Us = Annotated[int, Meta(ge=-(2**60), le=2**60)]
"""Microseconds: more than 36,000 years are damage."""


class Look(NamedTuple):
    """The clocks as they were found at one moment."""

    at_us: Us
    """CLOCK_BOOTTIME."""
    offset_us: Us
    """The wall clock less that."""
    error_us: Us | None
    """The bound of the wall clock's error; None where nothing vouches for it."""
    adjusted_us: Us | None = None
    """CLOCK_MONOTONIC less CLOCK_MONOTONIC_RAW: what the kernel has added to the crystal's own time. None where it was
    not read well."""


class Point(NamedTuple):
    """Between which two the offset lay at one moment, leap seconds of this boot left out."""

    at_us: Us
    low_us: Us
    high_us: Us
    slewed_us: Us = 0
    """By how much the kernel slewed the clock since the point before (or the first look), beyond what `ppm` covers."""
    between: tuple[Us, Us] | None = None
    """Between which two it lay all the time since the point before: what is left of points that were given up."""


class WallClock(NamedTuple):
    """Wall time over a span of one boot: CLOCK_BOOTTIME + `offset_us` is microseconds since 1970, UTC."""

    offset_us: int
    error_us: int | None
    """Bound of the error; None where nothing vouches for the date (promise P5)."""
    is_bounded: bool = False
    """Whether the boot is only known to lie between two known times."""
    from_us: int = -FOREVER_US
    until_us: int = FOREVER_US
    """The span in which this holds, the first included, the last not."""

    @property
    def synced(self) -> bool:
        """Whether the clock was learnt."""
        return self.error_us is not None and not self.is_bounded

    def at(self, boottime: int) -> int:
        """Microseconds since 1970 at a CLOCK_BOOTTIME in microseconds."""
        return boottime + self.offset_us


class Line(NamedTuple):
    """A whole boot's wall time, for what was forwarded before it was known: as a correction says it."""

    boottime_us: int
    offset_us: int
    rate_ppm: float
    error_us: int
    error_growth_ppm: float


class BootClock(Struct, frozen=True):
    """What is known of wall time in one boot, as of the last look. `looked` gives what is known after another.

    Points stand in the order of time, and what each says is as narrow as all the others make it; so what lies between
    two of them is told by these two. Looks must be honest: a wall clock that is further off than it says makes this
    wrong, until a look contradicts it.
    """

    quality: Quality
    ppm: float
    points: tuple[Point, ...] = ()
    guess_us: Us = 0
    """The offset of the wall clock as it stood, for people, where nothing is known."""
    slewed_us: Us = 0
    """By how much the kernel slewed the clock since the last point."""
    leaps: tuple[tuple[Us, Us], ...] = ()
    """Leap seconds within this boot: when, and by how much the offset changed then."""
    revision: int = 0
    """How often it turned out that what was known before was wrong."""
    last: Look | None = None
    """The look that the next one is compared with, to see how the clock is slewed."""

    @classmethod
    def constant(cls, offset_us: int, error_us: int | None, quality: Quality = "synced") -> "BootClock":
        """A clock with one offset and bound for its whole boot, or, where the bound is None, none."""
        if error_us is None:
            return cls("unknown", 0.0, guess_us=offset_us)
        return cls(quality, 0.0, (Point(0, offset_us - error_us, offset_us + error_us),))

    @classmethod
    def from_bytes(cls, data: bytes) -> "BootClock":
        """The clock that `to_bytes` wrote. Raises ValueError where it is none."""
        clock = msgspec.json.decode(data, type=cls)
        order = [point.at_us for point in clock.points]
        if (clock.quality != "unknown") != bool(order) or order != sorted(order) or not 0 <= clock.ppm <= PPM_MAX:
            raise ValueError("no clock of a boot")
        return clock

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    def says_as(self, other: "BootClock") -> bool:
        """Whether both say the same of all times."""
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
        """The same as an earlier start left it, to go on from."""
        return replace(self, ppm=ppm)

    # -- what it says ---------------------------------------------------------------------------

    def at(self, boottime: int) -> int:
        """Microseconds since 1970 at a CLOCK_BOOTTIME in microseconds."""
        return boottime + self.offset_us(boottime)

    def offset_us(self, boottime: int) -> int:
        """Wall time less CLOCK_BOOTTIME; only a guess where nothing is known."""
        if not self.points:
            return self.guess_us
        low, high = self._interval(boottime)
        return (low + high) // 2 + self._leapt_us(boottime)

    def error_us(self, boottime: int) -> int | None:
        """The bound of that offset's error; None where nothing is known."""
        if not self.points:
            return None
        low, high = self._interval(boottime)
        return (high - low + 1) // 2

    def around(self, boottime: int) -> WallClock:
        """One offset for as long a span around a moment as a slightly larger bound holds for.

        Bounds have few different values, so that what is made of them can be kept.
        """
        if not self.points:
            return WallClock(self.guess_us, None)
        low, high = self._interval(boottime)
        offset_us, error_us = (low + high) // 2, (high - low + 1) // 2
        from_us, until_us = -FOREVER_US, FOREVER_US
        if self.ppm:
            error_us = rounded_up(error_us)
            from_us, until_us = self._span(boottime, offset_us - error_us, offset_us + error_us)
            # Where much smaller a bound would do, this one is none to be told.
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
        """One line for the whole boot; None where nothing is known. Before the first point it is as good as the points.

        After it the bound that was told with a record is the better one, but where what was told was wrong: then the
        line takes the place of that too, and holds it.
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
        """Between which two the offset lay, leap seconds left out."""
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
        # Points are narrowed after some between them were given up: then these two are what counts.
        return (low, high) if low <= high else (max(low for low, _ in found[:2]), min(high for _, high in found[:2]))

    def _span(self, at_us: int, low_us: int, high_us: int) -> tuple[int, int]:
        """From when until when, around a moment, the interval lies within these two."""
        place = bisect_right(self.points, at_us, key=_at)
        before = self.points[place - 1] if place else None
        after = self.points[place] if place < len(self.points) else None
        slewed_us = self.slewed_us if after is None else after.slewed_us
        between = after.between if before is not None and after is not None else None
        from_us = -FOREVER_US if before is None else before.at_us
        until_us = FOREVER_US if after is None else after.at_us
        for side in (1, -1):
            # The upper limit, and, turned over, the lower one: up to a time the point before says that the offset is
            # within it, and from a time on the point after does.
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

    # -- what it learns -------------------------------------------------------------------------

    def looked(self, look: Look) -> "BootClock":
        """What is known after another look.

        A clock that is not vouched for any more teaches nothing: what was known before is held on to. One that agrees
        goes on with it, and becomes a point where it makes the bound markedly smaller. A leap second splits the boot.
        Any other contradiction, on a clock that is vouched for, says that what was told before was wrong: the newest
        counts for the whole boot. So it is with `clock = "system"` too: a host that steps its clock corrects itself.
        """
        return self.slewed(look).taught(look, self.last)

    def slewed(self, look: Look) -> "BootClock":
        """See whether the kernel made the clock run faster or slower than `ppm` allows for, as it does to set it right.

        Half of `ppm` is the crystal's; what the kernel adds to that beyond the other half is not in the drift.
        """
        last = self.last
        # One that teaches something counts at once: what was slewed before it is not of the time behind it.
        if last is not None and look.at_us - last.at_us < SLEW_LOOK_US and look.error_us is None:
            return self
        beyond_us = 0
        if last is not None and last.adjusted_us is not None:
            if look.adjusted_us is None:
                # The next one that tells it tells what was slewed up to here too.
                look = look._replace(adjusted_us=last.adjusted_us)
            else:
                allowed_us = math.floor((look.at_us - last.at_us) * self.ppm / 2e6)
                beyond_us = max(0, abs(look.adjusted_us - last.adjusted_us) - allowed_us)
        return replace(self, last=look, slewed_us=self.slewed_us + beyond_us)

    def taught(self, look: Look, before: Look | None) -> "BootClock":
        """What a look says of the offset, taken in; `before` is the look before it."""
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
        """A leap second that the kernel itself made between two looks, vouching for both: however little it knows."""
        if before is None or before.error_us is None:
            return None
        by_us = LEAP_US if look.offset_us > before.offset_us else -LEAP_US
        leap_us = _leap(look, by_us, before.at_us)
        if leap_us is None or abs(look.offset_us - before.offset_us - by_us) > LEAP_JITTER_US:
            return None
        is_known = any(abs(leap_us - at_us) <= LEAP_SLACK_US for at_us, _ in self.leaps)
        return None if is_known else (leap_us, by_us)

    def _begun_by(self, look: Look, error_us: int) -> "BootClock":
        """What is known where nothing but this look tells anything."""
        slewed_us = sum(point.slewed_us for point in self.points) + self.slewed_us
        first = Point(look.at_us, look.offset_us - error_us, look.offset_us + error_us, slewed_us)
        return replace(self, quality="synced", points=(first,), guess_us=look.offset_us, slewed_us=0, leaps=())

    def _with_point(self, point: Point) -> "BootClock":
        points = [*self.points, point]
        # What is known now narrows what was known before, one after the other as far as it does.
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
        """Whether a point between two others is hardly missed: a clock that is kept all the time needs no more."""
        least_us = min(point.high_us - point.low_us for point in (first, given_up, last))
        return WORTH * _width(self._joined(first, given_up, last)) <= least_us

    def _thinned(self, points: Sequence[Point]) -> list[Point]:
        """One fewer: that one between the first and the last which is missed least."""
        least, joined = 1, self._joined(*points[:3])
        for place in range(2, len(points) - 1):
            other = self._joined(*points[place - 1 : place + 2])
            if _width(other) < _width(joined):
                least, joined = place, other
        return [*points[:least], joined, *points[least + 2 :]]

    def _joined(self, first: Point, given_up: Point, last: Point) -> Point:
        """The last of three points, with what the one that is given up says of the time since the first."""
        sides = self._extent(first, given_up), self._extent(given_up, last)
        between = min(low for low, _ in sides), max(high for _, high in sides)
        return last._replace(slewed_us=given_up.slewed_us + last.slewed_us, between=between)

    def _extent(self, before: Point, after: Point) -> tuple[int, int]:
        """Between which two the offset lay all the time between two points."""
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
        """In the order of time; none overlaps another."""

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
    """The clocks of boots that were never synced, in their order, by what came before and after them.

    `before` is the last boot with a known clock, with the latest CLOCK_BOOTTIME that is known of it; where there was
    none, all were after `released_us` (wall time). `seen_us` is that of each boot, `after` the clock of the first boot
    behind them that is known. Each boot lasted at least as long as was seen of it, and came before the next: so the
    order of what was received is kept from boot to boot.
    """
    lowest_us = released_us
    if before is not None:
        known, at_us = before
        lowest_us = known.at(at_us) - (known.error_us(at_us) or 0)
    highest_us = after.at(0) + (after.error_us(0) or 0)
    total_us = sum(seen_us)
    room_us = highest_us - total_us - lowest_us
    # Less than no room: the boots have counted longer than they lasted, or one of both clocks was wrong.
    error_us = (abs(room_us) + 1) // 2 + math.ceil(total_us * after.ppm / 1e6)
    clocks = []
    zero_us = lowest_us + room_us // 2
    for of_boot_us in seen_us:
        point = Point(0, zero_us - error_us, zero_us + error_us)
        clocks.append(BootClock("bounded", after.ppm, (point,)))
        zero_us += of_boot_us
    return clocks


def rounded_up(error_us: int) -> int:
    """A little larger, and one of eight values in each octave."""
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
    """When the offset changed by a leap second, if it was one: as a month ended in UTC, after `known_us`."""
    wall_us = look.at_us + look.offset_us + LEAP_SLACK_US
    try:
        month = datetime.fromtimestamp(wall_us // 1_000_000, UTC).replace(day=1, hour=0, minute=0, second=0)
    except (ValueError, OverflowError):
        return None
    # At midnight by the clock as it was a second is put in before it; one is left out a second earlier.
    at_us = int(month.timestamp()) * 1_000_000 - (look.offset_us - by_us) - max(by_us, 0)
    return at_us if known_us - LEAP_SLACK_US <= at_us <= look.at_us + LEAP_SLACK_US else None
