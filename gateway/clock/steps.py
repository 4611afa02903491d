"""Tells of a wall clock that is set, in the moment in which it is: steps, and nothing of slewing."""

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
"""When the timer that tells of steps goes off by itself: in 2255, later than the kernel lets anybody set its clock; in
2038 where seconds have 32 bits."""

log = structlog.get_logger()

_libc = ctypes.CDLL(None, use_errno=True)


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`: interval, then first time, each in seconds and nanoseconds."""

    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


class StepWatch:
    """Calls back in the moment in which somebody sets the wall clock, as the kernel tells it (timerfd_create(2))."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self._fd = -1

    def start(self) -> bool:
        """Begin to watch, in the running event loop; False where the kernel refuses: the look of each second stays."""
        # Without TFD_NONBLOCK the event loop could wait for ever in a read that nothing is there for.
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
            # It went off by itself, and would do so again at once, for ever: the clock is set beyond it.
            self.stop()
            return
        # Armed first: a step that comes while the clock is looked at is told again.
        self._arm()
        self._on_step()
