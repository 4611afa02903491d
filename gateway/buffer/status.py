"""Reads what a buffer file holds, without disturbing the daemon that writes it; no daemon need run."""

import fcntl
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from msgspec import Struct

from gateway.buffer.boots import clock_of
from gateway.buffer.lanes import count_rows
from gateway.buffer.losses import OWN_LOSSES
from gateway.buffer.rows import START, Position
from gateway.buffer.salvage.progress import SALVAGE_PREFIX, kept_marks
from gateway.buffer.schema import MIGRATIONS, buffer_id, is_corruption, read_marks
from gateway.buffer.stored_rows import first_of, newest_rows_after
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boot_id, boottime_us, read_wall_clock
from gateway.host import terminal_text
from gateway.host.terminal_text import span
from gateway.reading import BufferFileError
from gateway.settings import GatewaySettings

ASIDE_MARK = ".corrupt-"
"""Text between the buffer's name and the date, in the name of a file that was set aside."""
UNSAVED_ROWS_MAX = 40_000
"""Newest rows behind the last saved duplicate windows that are read: twice what a daemon leaves there."""
_NOT_TO_BE_OPENED = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}


# Duplicate windows are written now and then, with the place up to which they are valid (`gateway.buffer.sensor_runs`).
# Rows behind it tell the rest. Both are read in the order in which they were stored. If `max` picks a row, SQLite gives
# the other columns of this row.
_DEVICES_SAVED = """
    SELECT device, boot, device_run.seen_us, lane.boot_id, offset_us, error_us, clock
    FROM device_run LEFT JOIN lane ON lane.number = device_run.lane LEFT JOIN boot ON boot.boot_id = lane.boot_id
    ORDER BY device_run.lane, device_run.seen_us
"""
_DEVICES_UNSAVED = f"""
    SELECT device, device_boot, received_us, lane.boot_id, offset_us, error_us, clock, max(place)
    FROM {newest_rows_after("lane, series, device_boot, device_sequence, received_us")} AS newest
    JOIN series ON series.number = newest.series JOIN lane ON lane.number = newest.lane
    JOIN boot ON boot.boot_id = lane.boot_id
    WHERE device_boot IS NOT NULL AND device_sequence IS NOT NULL
    GROUP BY newest.lane, device ORDER BY newest.lane
"""


class Moment(Struct, frozen=True):
    """A time of receipt, as far as it is known (promise P5)."""

    boot: str
    """The gateway's boot; `boottime_us` is CLOCK_BOOTTIME in it."""
    boottime_us: int
    wall_us: int | None
    """Microseconds since 1970, UTC; None if that boot's clock was never synced."""
    error_us: int | None
    """The bound of the wall time's error."""


class Now(Struct, frozen=True):
    """The present moment, for telling ages."""

    boot: str
    boottime_us: int
    wall_us: int | None
    """None if this machine's clock is not to be trusted."""

    def age_s(self, moment: Moment) -> float | None:
        """Seconds since a moment; None if unknown. Within one boot the wall clock does not matter."""
        if moment.boot == self.boot:
            return (self.boottime_us - moment.boottime_us) / 1e6
        if moment.wall_us is None or self.wall_us is None:
            return None
        return (self.wall_us - moment.wall_us) / 1e6


class DeviceStatus(Struct, frozen=True):
    """One device as the buffer last saw it; devices that send no sequence are not remembered."""

    device: str
    boot: str
    seen_us: int
    """Wall time of its latest stored reading, microseconds since 1970, by the clock at that time."""
    seen: Moment | None
    """Receipt of this reading; None if nothing tells any more whether that clock was right."""


class BufferStatus(Struct, frozen=True):
    """A buffer file at one moment."""

    buffer_id: str
    running: bool
    """Whether a daemon has the file open for writing."""
    rows: int
    bytes_used: int
    oldest: Moment | None
    """Receipt of the oldest waiting row; None if nothing waits."""
    oldest_wall_us: int | None
    """Receipt of the oldest waiting row in microseconds since 1970; None if nothing waits."""
    oldest_synced: bool
    """Whether `oldest_wall_us` is to be trusted: the clock of that boot was synced at some time."""
    lanes: int
    quarantined: int
    quarantine_reasons: dict[str, int]
    """Number of quarantined messages by reason."""
    losses: dict[str, int]
    """Readings that are gone for good, by reason, as far as not yet reported to Kafka."""
    set_aside: tuple[str, ...]
    """Names of files beside it, which it replaced: corrupt ones, and those of newer versions."""
    devices: tuple[DeviceStatus, ...]
    losses_by_device: dict[str, int] = {}
    """Such readings by device; under an empty name if the device is unknown."""
    lost_us: int = 0
    """Newest such loss of a sensor's reading in this boot, CLOCK_BOOTTIME in microseconds; 0 if there is none."""
    newer: tuple[str, ...] = ()
    """Those of `set_aside` whose readings wait until this box runs a newer version."""


def read_status(path: Path) -> BufferStatus:
    """Read the status of a buffer file. Raises BufferFileError if there is none, or it cannot be read."""
    with open_to_read(path) as connection:
        # One transaction: all figures are of the same moment.
        connection.execute("BEGIN")
        return _read(connection, path)


def read_quarantine(path: Path) -> dict[str, int]:
    """Number of quarantined messages by reason. Raises BufferFileError.

    If the gateway is stopped and there is no WAL, no file is made beside the buffer.
    """
    is_alone = not is_running(path) and not path.with_name(path.name + "-wal").exists()
    with open_to_read(path, _connect_alone if is_alone else _connect) as connection:
        return _quarantine_reasons(connection)


@contextmanager
def open_to_read(
    path: Path, connect: "Callable[[Path], sqlite3.Connection] | None" = None
) -> Iterator[sqlite3.Connection]:
    """Open a buffer file for reading. A wrong schema, or sqlite3.Error in the block, becomes BufferFileError."""
    require_file(path)
    try:
        with closing((connect or _connect)(path)) as connection:
            _check_version(path, connection)
            yield connection
    except sqlite3.Error as error:
        raise BufferFileError(f"the buffer at {path} cannot be read: {error}{_hint(path, error)}") from error


def require_file(path: Path) -> None:
    """Raise BufferFileError, which says what to do, if no file can be seen at a buffer's path."""
    try:
        found = path.stat()
    except PermissionError as error:
        raise BufferFileError(
            f"this user may not look at the buffer at {path}: run this with sudo, or as the user that sluice runs as"
        ) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.parent.is_dir():
            raise BufferFileError(
                f"there is no buffer at {path}, nor a directory {path.parent}: mend buffer.path, or make the "
                "directory, for the user that sluice runs as; sluice run makes the file when it first starts"
            ) from error
        raise BufferFileError(f"there is no buffer at {path} yet: sluice run makes it when it first starts") from error
    except OSError as error:
        raise BufferFileError(f"the buffer at {path} cannot be looked at: {error.strerror}") from error
    if stat.S_ISDIR(found.st_mode):
        raise BufferFileError(f"buffer.path: {path} is a directory; name a file in it, such as {path / 'buffer.db'}")
    if not stat.S_ISREG(found.st_mode):
        # Opening a named pipe would wait for its other end, for ever.
        raise BufferFileError(f"buffer.path: {path} is no file; remove it, or write another path")


def _connect(path: Path) -> sqlite3.Connection:
    """A connection that cannot write. Its reads block nobody, but keep the WAL from being begun anew."""
    connection = sqlite3.connect(_uri(path), uri=True, timeout=5.0)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if _code(error) not in _NOT_TO_BE_OPENED or is_running(path) or _wal_bytes(path):
            raise
        # A reader of a WAL file needs its index, which cannot be made here. Nobody writes and there is no WAL, so the
        # file is complete.
        return _connect_alone(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_alone(path: Path) -> sqlite3.Connection:
    """A connection to a file that nobody writes. It makes no file beside it."""
    return sqlite3.connect(f"{_uri(path)}&immutable=1", uri=True)


def _uri(path: Path) -> str:
    return f"{path.resolve().as_uri()}?mode=ro"


def _check_version(path: Path, connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise BufferFileError(
                f"the file at {path} is another program's database: set buffer.path to a file of its own"
            )
        raise BufferFileError(f"the buffer at {path} is not made yet: sluice run makes it when it first starts")
    if version > len(MIGRATIONS):
        raise BufferFileError(
            f"the buffer was written by a newer Sluice (schema {version}, this one knows {len(MIGRATIONS)}): "
            "use that version's commands"
        )
    if version < len(MIGRATIONS):
        raise BufferFileError(
            f"the buffer was written by an older Sluice (schema {version}, this one has {len(MIGRATIONS)}): "
            "sluice run brings it up to date when it starts, and keeps what is in it"
        )


def _hint(path: Path, error: sqlite3.Error) -> str:
    if _code(error) in _NOT_TO_BE_OPENED:
        return (
            f". Reading takes a file {path.name}-shm beside it: run this with sudo, or as the user that sluice runs "
            f"as. Where the disk is read-only, copy {path.name} and {path.name}-wal elsewhere, and set buffer.path to "
            "them"
        )
    if is_corruption(error):
        return (
            ". The file is damaged: sluice run sets it aside when it meets the damage, salvages what can be read, and "
            "goes on with a new one"
        )
    return ""


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _wal_bytes(path: Path) -> int:
    wal = path.with_name(path.name + "-wal")
    return wal.stat().st_size if wal.exists() else 0


def set_aside_files(path: Path) -> tuple[str, ...]:
    """Names of the files that a buffer file replaced, oldest first."""
    names = (found.name for found in path.parent.glob(f"{path.name}{ASIDE_MARK}*"))
    return tuple(sorted(name for name in names if not name.endswith(("-wal", "-shm"))))


def _read(connection: sqlite3.Connection, path: Path) -> BufferStatus:
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    oldest = connection.execute(
        f"""SELECT {first_of("lane.number", "received_us")} AS oldest_us, lane.boot_id, offset_us, error_us, clock
        FROM lane JOIN boot ON boot.boot_id = lane.boot_id
        WHERE oldest_us IS NOT NULL ORDER BY lane.number LIMIT 1"""
    ).fetchone()
    (lanes,) = connection.execute(
        f"SELECT count(*) FROM lane WHERE {first_of('number', 'sequence')} IS NOT NULL"
    ).fetchone()
    reasons = _quarantine_reasons(connection)
    # A count of 0 says that an unknown number was lost.
    losses = dict(connection.execute("SELECT reason, sum(count) FROM loss GROUP BY reason").fetchall())
    by_device = dict(connection.execute("SELECT device, sum(count) FROM loss GROUP BY device").fetchall())
    own = ", ".join("?" * len(OWN_LOSSES))
    (lost_us,) = connection.execute(
        f"SELECT coalesce(max(last_us), 0) FROM loss WHERE boot_id = ? AND reason NOT IN ({own})",
        (boot_id(), *OWN_LOSSES),
    ).fetchone()
    oldest_us, oldest_boot, *clock_columns = oldest or (0, "", 0, None, None)
    clock = clock_of(*clock_columns)
    salvages = kept_marks(read_marks(connection, SALVAGE_PREFIX))
    return BufferStatus(
        buffer_id=buffer_id(connection),
        running=is_running(path),
        rows=count_rows(connection),
        bytes_used=(pages - free) * page_bytes,
        oldest=None if oldest is None else moment(oldest_us, oldest_boot, clock),
        oldest_wall_us=None if oldest is None else clock.at(oldest_us),
        oldest_synced=oldest is not None and clock.synced,
        lanes=lanes,
        quarantined=sum(reasons.values()),
        quarantine_reasons=reasons,
        losses=losses,
        set_aside=set_aside_files(path),
        devices=_devices(connection),
        losses_by_device=by_device,
        lost_us=lost_us,
        newer=tuple(name for name, progress in salvages.items() if progress.newer),
    )


def _quarantine_reasons(connection: sqlite3.Connection) -> dict[str, int]:
    return dict(connection.execute("SELECT reason, count(*) FROM quarantine GROUP BY reason").fetchall())


def this_moment(settings: GatewaySettings) -> Now:
    """The present moment, by this machine's wall clock as far as it is known."""
    clock = read_wall_clock(settings)
    at_us = boottime_us()
    return Now(boot_id(), at_us, clock.at(at_us) if clock.synced else None)


def told(when: Moment, now: Now) -> str:
    """A moment for a person, with its age: `2026-03-14 12:00:00 UTC, 5 min old`; see `terminal_text.moment`."""
    zone = " (this box's clock was not synced)" if when.wall_us is None else " UTC"
    age_s = now.age_s(when)
    age = "" if age_s is None else f", {span(age_s)} old"
    return f"{terminal_text.moment(when.boottime_us, when.wall_us)}{zone}{age}"


def moment(received_us: int, boot: str, clock: BootClock) -> Moment:
    """A time of receipt: CLOCK_BOOTTIME of a boot with that clock."""
    if not clock.synced:
        return Moment(boot, received_us, None, None)
    return Moment(boot, received_us, clock.at(received_us), clock.error_us(received_us))


def _devices(connection: sqlite3.Connection) -> tuple[DeviceStatus, ...]:
    found = {}
    for device, boot, seen_us, gateway_boot, offset_us, error_us, clock in connection.execute(_DEVICES_SAVED):
        # Empty lanes go at the next start, so a run may have no lane. A time before the boot's start was saved before
        # the clock was learnt, by another clock.
        known = offset_us is not None and seen_us >= offset_us
        seen = None
        if known:
            seen = moment(seen_us - offset_us, gateway_boot, clock_of(offset_us, error_us, clock))
        found[device] = DeviceStatus(device, boot, seen_us, seen)
    saved = connection.execute("SELECT value FROM meta WHERE name = 'windows_saved'").fetchone()
    place = START if saved is None else Position(*map(int, saved[0].split()))
    for row in connection.execute(_DEVICES_UNSAVED, (place.place, UNSAVED_ROWS_MAX)):
        device, boot, received_us, gateway_boot, offset_us, error_us, clock, _ = row
        of_boot = clock_of(offset_us, error_us, clock)
        seen = moment(received_us, gateway_boot, of_boot)
        found[device] = DeviceStatus(device, boot, of_boot.at(received_us), seen)
    return tuple(found[device] for device in sorted(found))


def is_running(path: Path) -> bool:
    """Whether a daemon holds the buffer's lock."""
    try:
        # If a named pipe stands in the lock's place, opening it must not wait for its other end.
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False
