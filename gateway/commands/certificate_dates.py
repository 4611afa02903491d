"""Judges dates of certificates in a command, by what the running gateway has stored of its clock."""

import time
from contextlib import suppress
from pathlib import Path

from gateway.buffer.schema import read_marks
from gateway.buffer.status import is_running, open_to_read
from gateway.clock.floor import CLOCK_MARKS, ClockFloor
from gateway.clock.kernel_clock import boottime_us, read_wall_clock
from gateway.reading import BufferFileError
from gateway.settings import Settings
from gateway.tls.dates import Dates, true_time


def certificate_dates(settings: Settings, floor_us: int | None = None) -> Dates:
    """Date by which the gateway would now judge certificates. If no floor is given, it is read from the buffer."""
    clock = read_wall_clock(settings.gateway)
    if floor_us is None:
        floor_us = known_floor(settings.buffer.path).us
    return lambda: true_time((clock.at(boottime_us()), clock.error_us), floor_us, time.time_ns() // 1000)


def known_floor(buffer: Path) -> ClockFloor:
    """Read the clock floor that a running gateway has stored in its buffer.

    If no gateway runs, the buffer is not opened: that would leave SQLite's files beside it.
    """
    floor = ClockFloor()
    if is_running(buffer):
        with suppress(BufferFileError), open_to_read(buffer) as connection:
            floor.recall(read_marks(connection, CLOCK_MARKS))
    return floor
