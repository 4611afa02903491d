"""What a buffer file holds, read without disturbing the daemon that writes it (or with none running)."""

import fcntl
import sqlite3
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from gateway.buffer_schema import BufferFileError, buffer_id, count_rows


class DeviceStatus(Struct, frozen=True):
    """One device as the buffer last saw it; devices that send no sequence are not remembered."""

    device: str
    boot: str
    seen_us: int
    """Wall time of its latest stored reading, microseconds since 1970."""


class BufferStatus(Struct, frozen=True):
    """A buffer file at one moment."""

    buffer_id: str
    running: bool
    """Whether a daemon has the file open for writing."""
    rows: int
    bytes_used: int
    oldest_wall_us: int | None
    """When the oldest waiting row was received, microseconds since 1970; None where nothing waits."""
    lanes: int
    quarantined: int
    quarantine_reasons: dict[str, int]
    """How many of them for which reason."""
    devices: tuple[DeviceStatus, ...]


def read_status(path: Path) -> BufferStatus:
    """Look at a buffer file. Raises BufferFileError where there is none, or it cannot be read."""
    if not path.exists():
        raise BufferFileError(f"there is no buffer at {path}: sluice run makes it when it first starts")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)) as connection:
            # One transaction: all figures are of the same moment.
            connection.execute("BEGIN")
            return _read(connection, running=_is_locked(path))
    except sqlite3.Error as error:
        raise BufferFileError(f"the buffer at {path} cannot be read: {error}") from error


def _read(connection: sqlite3.Connection, *, running: bool) -> BufferStatus:
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    oldest = connection.execute(
        """SELECT reading.received_us + boot.offset_us
        FROM reading JOIN lane ON lane.number = reading.lane JOIN boot ON boot.boot_id = lane.boot_id
        ORDER BY reading.lane, reading.sequence LIMIT 1"""
    ).fetchone()
    (lanes,) = connection.execute(
        "SELECT count(*) FROM lane WHERE EXISTS (SELECT 1 FROM reading WHERE lane = number)"
    ).fetchone()
    reasons = dict(connection.execute("SELECT reason, count(*) FROM quarantine GROUP BY reason").fetchall())
    devices = connection.execute(
        "SELECT device, boot, max(seen_us) FROM device_run GROUP BY device ORDER BY device"
    ).fetchall()
    return BufferStatus(
        buffer_id=buffer_id(connection),
        running=running,
        rows=count_rows(connection),
        bytes_used=(pages - free) * page_bytes,
        oldest_wall_us=None if oldest is None else oldest[0],
        lanes=lanes,
        quarantined=sum(reasons.values()),
        quarantine_reasons=reasons,
        devices=tuple(DeviceStatus(*device) for device in devices),
    )


def _is_locked(path: Path) -> bool:
    try:
        with path.with_name(path.name + ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
