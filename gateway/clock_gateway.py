"""The gateway's own clock: what it reads, and how far its wall time can be trusted.

Everything is stored in CLOCK_BOOTTIME, which never steps; wall time is an offset to it with a bound, or with none.
"""

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

STA_UNSYNC = 0x0040
TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""
HOLDOVER_PPM = 500
"""How fast an unwatched clock may run away: what the kernel itself assumes for `maxerror`."""
OFFSET_CHANGE_US = 500
"""A change of the offset below this is jitter of reading two clocks, and not worth a write to the card."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class WallClock:
    """Wall time of one gateway boot: CLOCK_BOOTTIME + `offset_us`, in microseconds since 1970, UTC."""

    offset_us: int
    error_us: int | None
    """Bound of the error; None where nothing vouches for the date (promise P5)."""

    @property
    def synced(self) -> bool:
        return self.error_us is not None

    def at(self, boottime: int) -> int:
        """Microseconds since 1970 at a CLOCK_BOOTTIME in microseconds."""
        return boottime + self.offset_us

    def with_room(self) -> "WallClock":
        """The same with twice the bound and a millisecond: holds while the bound grows."""
        return WallClock(self.offset_us, None if self.error_us is None else 2 * self.error_us + 1_000)

    def covers(self, later: "WallClock") -> bool:
        """Whether what this says still holds, as far as `later` can tell."""
        if self.error_us is None or later.error_us is None:
            return self.error_us is later.error_us and abs(self.offset_us - later.offset_us) <= OFFSET_CHANGE_US
        return abs(self.offset_us - later.offset_us) <= OFFSET_CHANGE_US and later.error_us <= self.error_us


class Timex(ctypes.Structure):
    """`struct timex` of Linux (adjtimex(2)); only the fields up to `maxerror` and `status` are read."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def boottime_us() -> int:
    """CLOCK_BOOTTIME in microseconds: counts on while suspended, never steps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def boot_id() -> str:
    """The kernel's random name of this boot."""
    return _BOOT_ID.read_text().strip()


def read_wall_clock(mode: Literal["kernel", "system"], system_error_us: int) -> WallClock:
    """What is known of wall time now.

    `kernel`: synced is what adjtimex says, with its `maxerror` as the bound. `system`: the wall clock is trusted
    as it is, with the bound that the installer vouches for (`gateway.system_clock_error_ms`).
    """
    before_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    wall_ns = time.time_ns()
    after_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    offset_us = (wall_ns - (before_ns + after_ns) // 2) // 1000
    if mode == "system":
        return WallClock(offset_us, system_error_us)
    return WallClock(offset_us, _kernel_error_us())


def _kernel_error_us() -> int | None:
    timex = Timex()
    state = _libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"adjtimex: {os.strerror(error)}")
    if state == TIME_ERROR or timex.status & STA_UNSYNC:
        return None
    return int(timex.maxerror)


class ClockWatch:
    """The wall clock as it was last looked at: reading it for every record would cost more than it tells.

    Once synced in a boot it stays known, with a bound that grows: the kernel takes a clock that it has not heard
    of for hours for unsynced, and an outage of the network is just then.
    """

    def __init__(self, mode: Literal["kernel", "system"], system_error_us: int) -> None:
        self._mode = mode
        self._system_error_us = system_error_us
        self._now = read_wall_clock(mode, system_error_us)
        self._synced_us = boottime_us()

    def now(self) -> WallClock:
        return self._now

    def look(self) -> tuple[WallClock, WallClock]:
        """Read the clock again; what was known before, and what is known now."""
        before = self._now
        found = read_wall_clock(self._mode, self._system_error_us)
        self._now, self._synced_us = hold_over(before, found, self._synced_us, boottime_us())
        return before, self._now


def hold_over(before: WallClock, found: WallClock, synced_us: int, now_us: int) -> tuple[WallClock, int]:
    """What is known after a look: what was found, or what was known before with a larger bound.

    `synced_us` is the CLOCK_BOOTTIME that `before` is good for; the one that the result is good for comes with it.
    """
    if found.synced or before.error_us is None:
        return found, now_us
    grown_us = (now_us - synced_us) * HOLDOVER_PPM // 1_000_000
    if grown_us < 1:
        return before, synced_us
    return WallClock(before.offset_us, before.error_us + grown_us), now_us
