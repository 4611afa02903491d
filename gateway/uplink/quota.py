"""Bounds the uplink's use of a metered link, by `kafka.bytes_per_s_max` and `kafka.bytes_per_day_max`.

It does no I/O and reads no clock. Times are CLOCK_BOOTTIME and wall time in seconds. Wall time is None while unknown.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

DAY_S = 86_400.0
BURST_S = 2.0
"""Seconds' worth of bytes that an idle link may be used for at once."""
REQUEST_S = 0.5
"""Seconds' worth of bytes that a request waits for. Otherwise a request would carry the few bytes that the bucket has
just got, and be mostly headers."""
WAIT_S_MIN = 1e-6
"""Least wait in seconds. A shorter wait is rounding."""


class _Kept(Struct, frozen=True):
    """State that outlives a restart. Ages are of CLOCK_BOOTTIME, without the time between two runs."""

    used: Annotated[int, Meta(ge=0, le=2**62)]
    day: Annotated[int, Meta(ge=-(10**6), le=10**6)] | None
    age_s: Annotated[float, Meta(ge=0, le=2 * DAY_S)]
    idle_s: Annotated[float, Meta(ge=0, le=2 * DAY_S)]
    debt_s: Annotated[float, Meta(ge=0, le=DAY_S)] = 0.0


class UplinkBudget:
    """A bound for each second and a bound for each day (UTC). 0 is no bound.

    The bytes of a request on the wire are known only afterwards. So one request at most overdraws a bound, and the
    uplink waits that out. A count of bytes belongs to a day, or to none while the date is unknown. It ends when a later
    day comes, or after 24 h. A date that steps back begins no new count, as that day has had its quota. Once the date
    is learnt, a count whose latest bytes were spent today becomes today's. An earlier count is over.
    """

    def __init__(self, per_s_max: int, per_day_max: int, state: bytes | None) -> None:
        """Go on from a `state()` of before a restart. None or damaged bytes begin anew."""
        kept = _decoded(state)
        self._per_s_max = per_s_max
        self._per_day_max = per_day_max
        self._used = kept.used
        self._day = kept.day
        self._age_s = kept.age_s
        # Time since the count began, and since its latest bytes. The count cannot be younger than its bytes.
        self._idle_s = min(kept.idle_s, kept.age_s)
        self._now_s: float | None = None
        # A restart neither pays a debt nor fills the bucket.
        self._tokens = -kept.debt_s * per_s_max

    def spend(self, wire_bytes: int, now_s: float, wall_s: float | None) -> None:
        """Count bytes that went over the wire, sent or received, as of now."""
        self._advance(now_s, wall_s)
        if wire_bytes <= 0:
            return
        self._tokens -= wire_bytes
        self._used += wire_bytes
        self._idle_s = 0.0

    def wait_s(self, now_s: float, wall_s: float | None) -> float:
        """Seconds until the next request may go; 0.0 if it may go at once.

        Ask again afterwards, as bytes spent or a date learnt meanwhile change it.
        """
        self._advance(now_s, wall_s)
        wait_s = 0.0
        if self._per_s_max:
            wait_s = (self._per_s_max * REQUEST_S - self._tokens) / self._per_s_max
        if self._is_used_up():
            wait_s = max(wait_s, self._ends_in_s(wall_s), WAIT_S_MIN)
        return wait_s if wait_s >= WAIT_S_MIN else 0.0

    def allowance(self, now_s: float, wall_s: float | None) -> int | None:
        """Bytes on the wire that the next request may have; 0 if it must wait, None if there is no bound."""
        if self.wait_s(now_s, wall_s):
            return 0
        bounds = []
        if self._per_s_max:
            # At 1 byte/s, half a second's worth would be 0.
            bounds.append(max(1, int(self._tokens)))
        if self._per_day_max:
            bounds.append(self._per_day_max - self._used)
        return min(bounds, default=None)

    def is_used_up(self, now_s: float, wall_s: float | None) -> bool:
        """Whether the quota of the day is used up, with a known date or without one."""
        self._advance(now_s, wall_s)
        return self._is_used_up()

    def used_up_until(self, now_s: float, wall_s: float | None) -> float | None:
        """Wall time in seconds when the quota begins anew; None while some is left, or the date is unknown."""
        if not self.is_used_up(now_s, wall_s) or wall_s is None:
            return None
        return wall_s + self._ends_in_s(wall_s)

    def state(self) -> bytes:
        """The state to keep on disk across restarts, as of the latest call. Bytes spent later are not in it."""
        debt_s = max(0.0, -self._tokens / self._per_s_max) if self._per_s_max else 0.0
        kept = _Kept(self._used, self._day, min(self._age_s, DAY_S), min(self._idle_s, DAY_S), min(debt_s, DAY_S))
        return msgspec.json.encode(kept)

    def _is_used_up(self) -> bool:
        return 0 < self._per_day_max <= self._used

    def _ends_in_s(self, wall_s: float | None) -> float:
        """Seconds until the count ends, by midnight or by its age."""
        by_age_s = DAY_S - self._age_s
        if wall_s is None or self._day is None:
            return by_age_s
        return min(by_age_s, (self._day + 1) * DAY_S - wall_s)

    def _advance(self, now_s: float, wall_s: float | None) -> None:
        passed_s = max(0.0, now_s - self._now_s) if self._now_s is not None else 0.0
        self._now_s = now_s
        self._tokens = min(self._per_s_max * BURST_S, self._tokens + passed_s * self._per_s_max)
        self._age_s += passed_s
        self._idle_s += passed_s
        if wall_s is None:
            if self._age_s >= DAY_S:
                self._begin(None)
            return
        today, since_midnight_s = divmod(wall_s, DAY_S)
        day = int(today)
        if self._day is not None and day > self._day:
            self._begin(day)
        elif self._day is None or self._age_s >= DAY_S:
            if self._idle_s > since_midnight_s:
                self._begin(day)
            else:
                # Some of it was spent today, and nobody knows how much. So the count begins at midnight.
                self._day, self._age_s = day, since_midnight_s

    def _begin(self, day: int | None) -> None:
        self._used, self._day, self._age_s, self._idle_s = 0, day, 0.0, 0.0


def _decoded(state: bytes | None) -> _Kept:
    if state is not None:
        try:
            return msgspec.json.decode(state, type=_Kept)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
    return _Kept(used=0, day=None, age_s=0.0, idle_s=0.0)
