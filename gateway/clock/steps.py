"""Notices at once when somebody steps the wall clock. It does not notice slewing."""

import asyncio
import ctypes
import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

TFD_TIMER_ABSTIME = 1
TFD_TIMER_CANCEL_ON_SET = 2
FAR_S = min(9_000_000_000, 2 ** (8 * ctypes.sizeof(ctypes.c_long) - 1) - 1)
"""Time, in seconds since 1970, at which the timer that notices steps expires by itself: in 2255, later than the kernel
lets anybody set its clock. If seconds have 32 bits, it is in 2038."""

log = structlog.get_logger()

_libc = ctypes.CDLL(None, use_errno=True)


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`: interval, then first time, each in seconds and nanoseconds."""

    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


class StepWatch:
    """Calls back as soon as somebody sets the wall clock, which the kernel reports by timerfd_create(2)."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self._fd = -1

    def start(self) -> bool:
        """Begin to watch, in the running event loop; False if the kernel refuses. The look of each second remains."""
        # Without TFD_NONBLOCK, a read without data would block the event loop for ever.
        self._fd = _libc.timerfd_create(time.CLOCK_REALTIME, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0 or not self._arm():
            log.info("steps of the clock are noticed a second late", error=os.strerror(ctypes.get_errno()))
            self.stop()
            return False
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return True

    def stop(self) -> None:
        if self._fd >= 0:
            with suppress(RuntimeError):  # no event loop any more
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self) -> bool:
        timer = _TimerSpec((0, 0), (FAR_S, 0))
        flags = TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET
        return bool(_libc.timerfd_settime(self._fd, flags, ctypes.byref(timer), None) == 0)

    def _read(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ECANCELED:
                raise
        else:
            # The clock was set beyond the timer, which would expire at once, again and again.
            self.stop()
            return
        # Armed first, so that a step during the callback is noticed too.
        self._arm()
        self._on_step()
