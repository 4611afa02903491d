"""A box for the daemon to run in whose clock is wrong: another wall clock, another kernel's word on it, another boot.

`fake_clock.c`, preloaded into each process that is given `environment()`, has them see it; this process, Kafka and
whatever else the test starts keep the true time, by which the test judges.
"""

import ctypes
import mmap
import os
import subprocess
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tests.support.waiting import patience

SOURCE: Final = Path(__file__).with_name("fake_clock.c")
YEAR_2000: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""Time with which a board without a battery starts."""
_STA_UNSYNC: Final = 0x40
_TIME_OK, _TIME_ERROR = 0, 5
_UNSYNCED_US: Final = 16_000_000
"""The kernel's `maxerror` while nothing sets the clock."""


class Control(ctypes.Structure):
    """`struct control` of fake_clock.c."""

    wall_ns: int
    boot_ns: int
    maxerror_us: int
    state: int
    status: int
    steps: int
    _fields_ = (
        ("wall_ns", ctypes.c_int64),
        ("boot_ns", ctypes.c_int64),
        ("maxerror_us", ctypes.c_int64),
        ("state", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("steps", ctypes.c_uint32),
    )


class FakeClock:
    """A box that has just been started, unsynced. All of it may be changed while a process runs."""

    def __init__(self, folder: Path, wall: datetime = YEAR_2000) -> None:
        self._library = folder / "fake_clock.so"
        self._file = folder / "fake_clock"
        flags = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        subprocess.run(
            ["cc", *flags, "-o", self._library, SOURCE, "-ldl", "-lpthread"], check=True, timeout=patience(60)
        )
        self._file.write_bytes(bytes(ctypes.sizeof(Control)))
        with self._file.open("r+b") as file:
            self._control = Control.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Control)))
        self.reboot(wall)

    def environment(self) -> Mapping[str, str]:
        """Environment for a process of this box."""
        return {**os.environ, "LD_PRELOAD": str(self._library), "SLUICE_FAKE_CLOCK": str(self._file)}

    @property
    def boot_id(self) -> str:
        """The kernel's name of this boot."""
        return self._file.with_suffix(".boot_id").read_text().strip()

    def wall(self) -> float:
        """Time of the box's clock, in seconds since 1970."""
        return time.time() + self._control.wall_ns / 1e9

    def boottime_us(self) -> int:
        """The box's CLOCK_BOOTTIME now."""
        return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - self._control.boot_ns) // 1000

    def set(self, wall: datetime) -> None:
        """Set the wall clock, as `date -s` does: for the kernel it is not synced then (`ntp_clear` of Linux)."""
        self.unsync()
        self._set_ahead(round((wall.timestamp() - time.time()) * 1e9))

    def step(self, seconds: float) -> None:
        """Set the wall clock on, or back, by hand as well."""
        self.unsync()
        self._set_ahead(self._control.wall_ns + round(seconds * 1e9))

    def sync(self, error_ms: float = 5.0, ahead_ms: float = 0.0) -> None:
        """Set the wall clock to the true time, off by so much, and have the kernel vouch for it within a bound."""
        self._set_ahead(round(ahead_ms * 1e6))
        self._control.maxerror_us = round(error_ms * 1000)
        self._control.status = 0
        self._control.state = _TIME_OK

    def unsync(self) -> None:
        """Have the kernel vouch for it no more, as after hours without NTP. The clock runs on as it is."""
        self._control.state = _TIME_ERROR
        self._control.status = _STA_UNSYNC
        self._control.maxerror_us = _UNSYNCED_US

    def reboot(self, wall: datetime = YEAR_2000) -> None:
        """Begin another boot, unsynced; for when no process of the box runs."""
        self._file.with_suffix(".boot_id").write_text(f"{uuid.uuid4()}\n")
        # No earlier: the boot before has lasted until now.
        self._control.boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self.set(wall)

    def _set_ahead(self, ahead_ns: int) -> None:
        self._control.wall_ns = ahead_ns
        self._control.steps += 1
