"""Counts readings that come in and bytes that go to the disk for them: the figures of the write budget."""

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from gateway.clock.kernel_clock import boottime_us

INTERVAL_S = 60.0
"""Seconds between two saves of the figures, which only go with other writes: an idle box writes nothing."""
USAGE_HOURS = 48
"""Hours whose figures the buffer file keeps."""
DAY_S = 86_400.0
SEEN_S_MIN = 600.0
"""Seconds of uptime below which no rate is told."""
ROW_OVERHEAD_BYTES = 65
"""Bytes that a stored reading takes on disk beside its payload, with the sensor's boot, sequence and times
(measured)."""
CARD_ENDURANCE_TBW = 16.0
"""TB (10^12 bytes) that the flash of a cheap 16 GB TLC card takes: 16 GB x 1,000 program/erase cycles.

Makers of plain cards promise nothing. A 128 GB card that is sold as "high endurance" is good for 10,000 hours of video
at 26 Mbit/s: 117 TB, or 900 times its size. Plain cards may fail after 300 times.
"""
WRITE_AMPLIFICATION = 4.0
"""Bytes that the card's flash writes for each byte given to it: a synced write of 4 KiB takes a flash page of 16
KiB."""


class Usage(NamedTuple):
    """Readings and bytes of a stretch of time."""

    seconds: float
    readings: int
    stored_bytes: int
    """Payload bytes."""
    disk_bytes: int
    """Bytes that this process had written to disk, in whole pages (proc(5), write_bytes)."""


class WriteMeter:
    """Adds up commits until their sum is saved. `now_s` is a monotonic clock's, in seconds."""

    def __init__(self, now_s: float) -> None:
        self.reset(now_s)

    def reset(self, now_s: float) -> None:
        """Begin to count anew."""
        self._since_s = now_s
        self._readings = 0
        self._stored_bytes = 0
        self._disk_bytes = written_bytes()

    def add(self, readings: int, payload_bytes: int) -> None:
        """Count readings that a commit stored."""
        self._readings += readings
        self._stored_bytes += payload_bytes

    def so_far(self, now_s: float) -> Usage:
        """The sum since the last `reset`."""
        written = max(0, written_bytes() - self._disk_bytes)
        return Usage(now_s - self._since_s, self._readings, self._stored_bytes, written)

    def due(self, now_s: float) -> Usage | None:
        """The sum, if it is time to save it; call `reset` once it is on disk."""
        return None if now_s < self._since_s + INTERVAL_S else self.so_far(now_s)


def written_bytes(process: int | str = "self") -> int:
    """Bytes that a process caused to be written to storage; 0 if it is gone, or the kernel does not count them."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes:")), 0)


def add_usage(connection: sqlite3.Connection, boot_id: str, usage: Usage) -> None:
    """Add usage to the present hour of a boot, inside the caller's transaction."""
    hour = boottime_us() // 3_600_000_000
    # No upsert: it would write the page of SQLite's own counters each time.
    known = connection.execute(
        """UPDATE usage SET seconds = seconds + ?3, readings = readings + ?4, stored_bytes = stored_bytes + ?5,
            disk_bytes = disk_bytes + ?6 WHERE boot_id = ?1 AND hour = ?2""",
        (boot_id, hour, *usage),
    ).rowcount
    if known:
        return
    connection.execute(
        "INSERT INTO usage (boot_id, hour, seconds, readings, stored_bytes, disk_bytes) VALUES (?, ?, ?, ?, ?, ?)",
        (boot_id, hour, *usage),
    )
    connection.execute("DELETE FROM usage WHERE number <= (SELECT max(number) FROM usage) - ?", (USAGE_HOURS,))


class UsageHour(NamedTuple):
    """Usage in an hour of a boot, or the sum of several."""

    seconds: float
    """Seconds of it that were seen."""
    readings: int
    stored_bytes: int
    """Payload bytes of the readings."""
    disk_bytes: int
    """Bytes that the gateway wrote to disk, as the kernel counts them."""


class WriteBudget(Struct, frozen=True):
    """Writes in the last 24 hours of uptime, and a card's life at this rate; None if too little was seen."""

    seen_s: float
    readings_per_day: float | None
    disk_bytes_per_day: float | None
    disk_bytes_per_reading: float | None
    card_endurance_tbw: float
    write_amplification: float
    card_days: float | None
    """None also if nothing is written."""


def last_day(hours: Iterable[UsageHour]) -> UsageHour:
    """Sum up the last 24 hours of uptime, given the hours newest first; the oldest counts in part."""
    seconds = readings = stored_bytes = disk_bytes = 0.0
    for hour in hours:
        if hour.seconds <= 0:
            continue
        share = min(1.0, (DAY_S - seconds) / hour.seconds)
        seconds += hour.seconds * share
        readings += hour.readings * share
        stored_bytes += hour.stored_bytes * share
        disk_bytes += hour.disk_bytes * share
        if share < 1:
            break
    return UsageHour(seconds, round(readings), round(stored_bytes), round(disk_bytes))


def write_budget(
    day: UsageHour, card_endurance_tbw: float = CARD_ENDURANCE_TBW, write_amplification: float = WRITE_AMPLIFICATION
) -> WriteBudget:
    """Writes in a day at `day`'s rate, and the days that a card lasts.

    `card_endurance_tbw` is what the card's flash takes over its life, in 10^12 bytes. `write_amplification` is how many
    bytes the flash writes for each byte of the gateway. With a maker's TBW of host writes, it is 1.
    """
    known = day.seconds >= SEEN_S_MIN
    per_day = DAY_S / day.seconds if known else 0.0
    disk_bytes = day.disk_bytes * per_day
    return WriteBudget(
        seen_s=day.seconds,
        readings_per_day=day.readings * per_day if known else None,
        disk_bytes_per_day=disk_bytes if known else None,
        disk_bytes_per_reading=day.disk_bytes / day.readings if known and day.readings else None,
        card_endurance_tbw=card_endurance_tbw,
        write_amplification=write_amplification,
        card_days=card_endurance_tbw * 1e12 / (disk_bytes * write_amplification) if disk_bytes else None,
    )


def hours_until_full(room_bytes: float, day: UsageHour) -> float | None:
    """Hours for which `room_bytes` take `day`'s intake while nothing leaves; None if too little was seen or came in."""
    intake_bytes = day.stored_bytes + day.readings * ROW_OVERHEAD_BYTES
    if day.seconds < SEEN_S_MIN or intake_bytes == 0:
        return None
    return max(room_bytes, 0.0) / intake_bytes * day.seconds / 3600


def room_bytes(*, bytes_used: int, bytes_max: int, unused_bytes: int, disk_free: int, disk_free_min: int) -> int:
    """Bytes that the buffer may still take, up to its own bound and as far as its file system lets the file grow.

    `unused_bytes` are free pages inside the file, `disk_free_min` is `buffer.free_bytes_min`.
    """
    return max(0, min(bytes_max - bytes_used, unused_bytes + max(0, disk_free - disk_free_min)))
