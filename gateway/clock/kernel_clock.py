"""Reads the box's clocks from the kernel: CLOCK_BOOTTIME, the wall clock, and the bound of its error."""

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Literal

from gateway.clock.gateway_clock import BootClock, Look, WallClock
from gateway.settings import GatewaySettings

STA_UNSYNC = 0x0040
STA_NANO = 0x2000
TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""
KERNEL_ERROR_US_MIN = 10_000
"""Least bound that is believed of a clock kept by NTP. systemd-timesyncd sets `maxerror` to 0 at each update, however
slow the way to its server was (`manager_adjust_clock` in timesyncd-manager.c). The kernel then lets it grow by 500 us a
second. chrony sets root dispersion, half the root delay and the slew that is left (`set_sync_status` in sys_generic.c
and sys_timex.c). ntpd sets its root distance."""
TRIES = 5
"""Tries to read two clocks without another program running in between; the closest pair counts."""
CLOSE_NS = 20_000
"""Nanoseconds between two readings beyond which they tell nothing about slewing."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

ClockMode = Literal["kernel", "system"]


class Timex(ctypes.Structure):
    """`struct timex` of Linux (adjtimex(2)); only the fields up to `status` are read."""

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


def read_clocks(mode: ClockMode, system_error_us: int) -> Look:
    """Read the clocks. Raises OSError if the kernel does not say whether its clock is synced.

    `kernel`: adjtimex(2) says whether the wall clock is synced, and within which bound. `system`: the wall clock is
    trusted as it is, with the bound that the installer vouches for (`gateway.system_clock_error_ms`).
    """
    apart_ns, at_ns, offset_ns = _difference_ns(time.CLOCK_REALTIME, time.CLOCK_BOOTTIME)
    close_ns, _, adjusted_ns = _difference_ns(time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW)
    error_us = system_error_us if mode == "system" else _kernel_error_us()
    return Look(
        at_ns // 1000,
        offset_ns // 1000,
        None if error_us is None else error_us + apart_ns // 1000 + 1,
        adjusted_ns // 1000 if close_ns <= CLOSE_NS else None,
    )


def read_wall_clock(gateway: GatewaySettings) -> WallClock:
    """Wall time by the kernel alone, without earlier knowledge. Raises OSError as `read_clocks` does."""
    found = read_clocks(gateway.clock, int(gateway.system_clock_error_ms * 1000))
    return WallClock(found.offset_us, found.error_us)


def _difference_ns(clock: int, reference: int) -> tuple[int, int, int]:
    """Nanoseconds between two readings of the reference, their middle, and the clock less that middle."""
    closest: tuple[int, int, int] | None = None
    for _ in range(TRIES):
        before_ns = time.clock_gettime_ns(reference)
        at_ns = time.clock_gettime_ns(clock)
        apart_ns = time.clock_gettime_ns(reference) - before_ns
        middle_ns = before_ns + apart_ns // 2
        if closest is None or apart_ns < closest[0]:
            closest = apart_ns, middle_ns, at_ns - middle_ns
        if apart_ns <= CLOSE_NS:
            break
    return closest or (0, 0, 0)


def _kernel_error_us() -> int | None:
    timex = Timex()
    state = _libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"adjtimex: {os.strerror(error)}")
    return kernel_error_us(state, timex.status, timex.maxerror, timex.offset)


def kernel_error_us(state: int, status: int, maxerror_us: int, offset: int) -> int | None:
    """Bound of the wall clock's error according to adjtimex(2); None if the clock is not synced.

    `offset` is the slew that is left, in nanoseconds with STA_NANO, else in microseconds. The clock has this error,
    and `maxerror` need not include it.
    """
    if state == TIME_ERROR or status & STA_UNSYNC:
        return None
    to_slew_us = -(-abs(offset) // 1000) if status & STA_NANO else abs(offset)
    return max(maxerror_us + to_slew_us, KERNEL_ERROR_US_MIN)


class ClockWatch:
    """This boot's clock as of the last look. Reading the clocks for every record would cost more than it tells."""

    def __init__(self, gateway: GatewaySettings) -> None:
        """Raises OSError if the kernel does not say whether its clock is synced."""
        self._mode: ClockMode = gateway.clock
        self._system_error_us = int(gateway.system_clock_error_ms * 1000)
        self._lock = threading.Lock()
        self._is_resumed = False
        self._looked = read_clocks(self._mode, self._system_error_us)
        self._now = BootClock("unknown", gateway.clock_error_ppm_max).looked(self._looked)

    def now(self) -> BootClock:
        """The clock as known now. May be called on any thread."""
        return self._now

    def read_again(self) -> tuple[BootClock, BootClock]:
        """Read the clocks again. Returns the clock as known before and as known now. Raises OSError."""
        found = read_clocks(self._mode, self._system_error_us)
        with self._lock:
            before = self._now
            self._looked = found
            self._now = before.looked(found)
            return before, self._now

    def resume(self, kept: BootClock) -> None:
        """Go on from the clock that an earlier start in this boot left, once. May be called on any thread."""
        with self._lock:
            if self._is_resumed or not kept.known:
                return
            self._is_resumed = True
            self._now = kept.resumed(self._now.ppm).looked(self._looked)
