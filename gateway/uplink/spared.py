"""Counts the rows that Kafka had before the disk today, across restarts.

It does no I/O and reads no clock. A day is one of UTC, as for `kafka.bytes_per_day_max`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

DAY_US = 86_400_000_000


class _Kept(Struct, frozen=True):
    """Count that outlives a restart."""

    day: Annotated[int, Meta(ge=-(10**6), le=10**6)] | None = None
    rows: Annotated[int, Meta(ge=0, le=2**62)] = 0
    about: bool = False


class SparedToday:
    """The count of one day. Rows that come before the date is known count for the day that is learnt first."""

    def __init__(self, state: bytes, *, was_cut_off: bool) -> None:
        """Go on from a `state()` of before a restart. Empty or damaged bytes begin anew.

        If `was_cut_off`, the state may lack the last rows.
        """
        kept = _decoded(state)
        self._day, self._rows = kept.day, kept.rows
        self._about = kept.about or was_cut_off
        self._is_dated = False
        """Whether the date is known. Until then, the count is one of the day that was kept."""
        self._total = 0
        self._undated = 0
        self._undated_since_us = 0

    def count(self, total: int, now_us: int, wall_us: int | None) -> None:
        """Take in the rows since the start, as of now (CLOCK_BOOTTIME). `wall_us` is None while it is unknown."""
        added, self._total = total - self._total, total
        if wall_us is None:
            if not self._undated:
                self._undated_since_us = now_us
            self._undated += added
            return
        day, since_midnight_us = divmod(wall_us, DAY_US)
        if day != self._day:
            if self._is_dated and self._day is not None:
                # If the date has stepped back, earlier rows of this day are forgotten.
                self._about = day < self._day
            self._day, self._rows = day, 0
        self._is_dated = True
        if self._undated:
            self._about |= now_us - self._undated_since_us > since_midnight_us
            added, self._undated = added + self._undated, 0
        # A commit may take rows back that it has written too, even some of yesterday's.
        self._rows = max(0, self._rows + added)

    @property
    def rows(self) -> int | None:
        """Rows of today; None while the date is unknown."""
        return self._rows if self._is_dated else None

    @property
    def is_about(self) -> bool:
        """Whether the count may be wrong: an end without a close came before, or a change of the date."""
        return self._about

    def state(self) -> bytes:
        """The state to keep on disk across restarts, as of the latest call of `count`."""
        return msgspec.json.encode(_Kept(self._day, self._rows, self._about or self._undated > 0))


def _decoded(state: bytes) -> _Kept:
    try:
        return msgspec.json.decode(state, type=_Kept)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Kept()
