"""The buffer file's schema: opens and migrates the file, and tells what SQLite's errors mean for it."""

import secrets
import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from gateway.buffer.wal import write_again
from gateway.host.safe_files import make_private
from gateway.reading import BufferFileError, Mark

READING_ROOT = "reading_root"
"""Name in the table `meta` of the first page of the table `reading`."""
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        # Wall time of a boot is offset_us + CLOCK_BOOTTIME; error_us is NULL while no bound is known.
        """CREATE TABLE boot (
            boot_id TEXT PRIMARY KEY, offset_us INTEGER NOT NULL, error_us INTEGER
        ) WITHOUT ROWID""",
        # AUTOINCREMENT, here and below: a number never comes back once its row is gone.
        """CREATE TABLE lane (
            number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, boot_id TEXT NOT NULL,
            event_from_us INTEGER
        )""",
        # Behind the content type, on a line of their own, stand the variables: see `Series.columns`.
        """CREATE TABLE series (
            number INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, key TEXT NOT NULL, device TEXT NOT NULL,
            subject TEXT NOT NULL, type TEXT NOT NULL, content_type TEXT NOT NULL,
            UNIQUE (topic, key, device, subject, type, content_type)
        )""",
        """CREATE TABLE reading (
            lane INTEGER NOT NULL, sequence INTEGER NOT NULL, series INTEGER NOT NULL,
            received_us INTEGER NOT NULL, event_us INTEGER, event_error_us INTEGER NOT NULL, tick_ms INTEGER,
            device_boot TEXT, device_sequence INTEGER, payload BLOB NOT NULL,
            PRIMARY KEY (lane, sequence)
        ) WITHOUT ROWID""",
        # A run is one boot of a device's stream, last heard in that lane; its window tells retransmissions.
        """CREATE TABLE device_run (
            device TEXT NOT NULL, topic TEXT NOT NULL, boot TEXT NOT NULL, lane INTEGER NOT NULL,
            seen_us INTEGER NOT NULL, window BLOB NOT NULL,
            PRIMARY KEY (device, topic, boot)
        ) WITHOUT ROWID""",
        """CREATE TABLE quarantine (
            number INTEGER PRIMARY KEY AUTOINCREMENT, boot_id TEXT NOT NULL, received_us INTEGER NOT NULL,
            device TEXT NOT NULL, subject TEXT NOT NULL, reason TEXT NOT NULL, payload BLOB NOT NULL
        )""",
    ),
    (
        # Whether it may be stored already: see `gateway.reading.Doubt`.
        "ALTER TABLE reading ADD COLUMN doubt INTEGER NOT NULL DEFAULT 0",
        # The file that a lane was opened in, if rows were salvaged from another file. NULL is this file.
        "ALTER TABLE lane ADD COLUMN buffer_id TEXT",
        # A small second copy of the fields that give rows their identity, for the salvage of a damaged file.
        "CREATE INDEX lane_copy ON lane (name, boot_id, buffer_id)",
        # The topic that was routed. Two topics of a device may go to one Kafka topic, each with its own sequences.
        "ALTER TABLE series ADD COLUMN stream TEXT",
        # Facts that an ingress stores in one commit with its readings; see `gateway.reading.Mark`.
        "CREATE TABLE mark (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
        # Readings that are gone for good, until they are reported. Times are CLOCK_BOOTTIME of `boot_id`. If the sensor
        # sends no sequences, its boot is '' and its sequences are NULL.
        """CREATE TABLE loss (
            device TEXT NOT NULL, reason TEXT NOT NULL, boot_id TEXT NOT NULL, device_boot TEXT NOT NULL,
            count INTEGER NOT NULL, first_us INTEGER NOT NULL, last_us INTEGER NOT NULL,
            first_sequence INTEGER, last_sequence INTEGER,
            PRIMARY KEY (device, reason, boot_id, device_boot)
        ) WITHOUT ROWID""",
        # Usage in one hour of a boot: hour is CLOCK_BOOTTIME / 3600 s, seconds is the part of it that was seen.
        """CREATE TABLE usage (
            number INTEGER PRIMARY KEY AUTOINCREMENT, boot_id TEXT NOT NULL, hour INTEGER NOT NULL,
            seconds REAL NOT NULL, readings INTEGER NOT NULL, stored_bytes INTEGER NOT NULL,
            disk_bytes INTEGER NOT NULL, UNIQUE (boot_id, hour)
        )""",
        # The fields to take a reading in again: its series if it had been routed, else its topic and sender.
        "ALTER TABLE quarantine ADD COLUMN series INTEGER",
        "ALTER TABLE quarantine ADD COLUMN topic TEXT",
        "ALTER TABLE quarantine ADD COLUMN writer TEXT",
        "ALTER TABLE quarantine ADD COLUMN event_us INTEGER",
        "ALTER TABLE quarantine ADD COLUMN event_error_us INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE quarantine ADD COLUMN tick_ms INTEGER",
        "ALTER TABLE quarantine ADD COLUMN device_boot TEXT",
        "ALTER TABLE quarantine ADD COLUMN device_sequence INTEGER",
        "ALTER TABLE quarantine ADD COLUMN doubt INTEGER NOT NULL DEFAULT 0",
    ),
    (
        # See `buffer.boots`: the order of boots (NULL: unknown), the latest CLOCK_BOOTTIME known of each, its clock as
        # `BootClock.to_bytes` writes it (NULL: one offset and bound), and its corrections, made and owed. `offset_us`
        # and `error_us` are those at `seen_us`.
        "ALTER TABLE boot ADD COLUMN ordinal INTEGER",
        "ALTER TABLE boot ADD COLUMN seen_us INTEGER",
        "ALTER TABLE boot ADD COLUMN clock BLOB",
        "ALTER TABLE boot ADD COLUMN version INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE boot ADD COLUMN owed INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE boot ADD COLUMN told_error_us INTEGER",
        "UPDATE boot SET ordinal = (SELECT min(number) FROM lane WHERE lane.boot_id = boot.boot_id)",
        # The absolute time that a sensor sent, believed or not: wall time since 1970. NULL in most rows.
        "ALTER TABLE reading ADD COLUMN device_time_us INTEGER",
        "ALTER TABLE quarantine ADD COLUMN device_time_us INTEGER",
    ),
    (
        # Its rows stay there until they are deleted: see `buffer.stored_rows`.
        "ALTER TABLE reading RENAME TO former_reading",
        # The key is one number that rises, so a commit adds rows at one end of the tree: see `Position.place`.
        """CREATE TABLE reading (
            place INTEGER PRIMARY KEY,
            lane INTEGER AS (place >> 40), sequence INTEGER AS (place & 1099511627775),
            series INTEGER NOT NULL, received_us INTEGER NOT NULL, event_us INTEGER, event_error_us INTEGER NOT NULL,
            tick_ms INTEGER, device_boot TEXT, device_sequence INTEGER, payload BLOB NOT NULL,
            doubt INTEGER NOT NULL, device_time_us INTEGER
        )""",
        # In an upgraded file it is on another page than in a new one. If the first page is lost, salvage asks here.
        f"INSERT INTO meta SELECT '{READING_ROOT}', rootpage FROM sqlite_master WHERE name = 'reading'",
    ),
    (
        # The time, or a text: the time or nothing, and behind it the user properties of an MQTT 5 message. A column for
        # these would cost a byte in each row, and most have none. See `rows.sent_of` and `buffer.stored_rows`.
        "ALTER TABLE reading RENAME COLUMN device_time_us TO sent",
        "ALTER TABLE quarantine ADD COLUMN properties TEXT",
    ),
)
"""Statements by version. `PRAGMA user_version` is how many of these versions a file has."""


class NewerFileError(BufferFileError):
    """A newer version wrote the file, in a form that this one does not know."""


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a file that is not to be changed, at whatever schema it is. Raises sqlite3.Error."""
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)


def is_newer(path: Path) -> bool:
    """Whether only a newer version can read the file. False if the file cannot be asked."""
    with suppress(sqlite3.Error, UnicodeDecodeError), closing(connect_read_only(path)) as connection:
        return _stored_version(connection) > len(MIGRATIONS) and not _has_this_schema(connection)
    return False


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for its one writer, durable at every COMMIT, at the current schema.

    Raises sqlite3.Error if SQLite cannot open it, and OSError if the disk refuses. Raises NewerFileError if a newer
    version wrote it, and BufferFileError if another program did.
    """
    # SQLite gives the -wal and -shm files the rights of their file. A file that is set aside keeps its rights.
    make_private(path)
    # Transactions are begun and ended by hand, as it matters which changes share a commit.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    connection.text_factory = _text
    try:
        # The version is checked before anything is written, even into the file's header.
        version = _version(connection)
        write_again(path)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        # Debian's SQLite overwrites deleted rows unless told not to, which is twice the wear for every reading.
        connection.execute("PRAGMA secure_delete=OFF").fetchone()
        # The journal of a long statement would go to /var/tmp, on the same full card.
        connection.execute("PRAGMA temp_store=MEMORY")
        _migrate(connection, version)
        _check_places(connection)
    except UnicodeDecodeError as error:
        # Python decodes SQLite's messages, which repeat names from the file.
        connection.close()
        raise corruption("a name in its schema is no text") from error
    except BaseException:
        connection.close()
        raise
    return connection


def buffer_id(connection: sqlite3.Connection) -> str:
    """The file's random name: 16 hex digits, made with the file."""
    found = connection.execute("SELECT value FROM meta WHERE name = 'buffer_id'").fetchone()
    if found is None:
        raise corruption("the buffer's own name is gone from it")
    return str(found[0])


def read_marks(connection: sqlite3.Connection, prefix: str) -> dict[str, bytes]:
    """The marks whose keys begin with `prefix`."""
    return dict(
        connection.execute("SELECT key, value FROM mark WHERE key >= ?1 AND key < ?1 || char(1114111)", (prefix,))
    )


def keep_marks(connection: sqlite3.Connection, marks: Iterable[Mark]) -> None:
    """Store or delete marks, inside the caller's transaction."""
    for key, value in marks:
        if value is None:
            connection.execute("DELETE FROM mark WHERE key = ?", (key,))
        else:
            connection.execute("INSERT OR REPLACE INTO mark VALUES (?, ?)", (key, value))


def find_one(connection: sqlite3.Connection, statement: str, parameter: object) -> tuple[Any, ...]:
    """The one row of a statement's answer. Raises BufferFileError if there is none."""
    found: tuple[Any, ...] | None = connection.execute(statement, (parameter,)).fetchone()
    if found is None:
        raise BufferFileError(f"the buffer {buffer_id(connection)} does not hold this: it was begun anew in between")
    return found


def corruption(message: str) -> sqlite3.DatabaseError:
    """An error for damage that SQLite cannot see: sound pages with the wrong content."""
    error = sqlite3.DatabaseError(message)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _text(stored: bytes) -> str:
    try:
        return stored.decode()
    except UnicodeDecodeError as error:
        raise corruption("a text is none: the file is damaged") from error


def is_corruption(error: sqlite3.Error) -> bool:
    """Whether SQLite says that the file itself is damaged, rather than that the disk is full or failing."""
    code = getattr(error, "sqlite_errorcode", None)
    # The low byte is the primary result code; the rest adds details.
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


_OF_DISK = frozenset(
    (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )
)


def is_unreadable(error: Exception) -> bool:
    """Whether the disk does not give what stands on it. If it says EIO, SQLite calls the file corrupt."""
    code = getattr(error, "sqlite_errorcode", None)
    is_failure = code is not None and code & 0xFF == sqlite3.SQLITE_IOERR
    return is_failure or isinstance(error, OSError) or (isinstance(error, sqlite3.Error) and is_corruption(error))


def is_of_disk(error: Exception) -> bool:
    """Whether the disk or the file is at fault, so that a retry may succeed, rather than the data to be stored."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, OSError | BufferFileError) or (code is not None and code & 0xFF in _OF_DISK)


def _stored_version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _has_this_schema(connection: sqlite3.Connection) -> bool:
    """Whether a file has the tables of this version. A newer version has others, as each migration changes some."""
    tables = "SELECT name, sql FROM sqlite_master WHERE name != 'spare' ORDER BY name"
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as new:
        for statement in chain.from_iterable(MIGRATIONS):
            new.execute(statement)
        return new.execute(tables).fetchall() == connection.execute(tables).fetchall()


def _version(connection: sqlite3.Connection) -> int:
    version = _stored_version(connection)
    if version == 0 and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise BufferFileError("the file is another program's database: set buffer.path to a file of its own")
    if version > len(MIGRATIONS):
        if _has_this_schema(connection):
            raise corruption("the number of its schema is damaged")
        raise NewerFileError(
            f"the buffer was written by a newer Sluice (schema {version}, this one knows {len(MIGRATIONS)})"
        )
    return version


_REFERRED = ("lane", "series")
"""Tables that rows refer to by number. Their indexes repeat all of their fields that matter."""
_GIVEN_AGAIN = """
    SELECT max(number) > coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'lane'), 0) FROM lane
"""


def _check_places(connection: sqlite3.Connection) -> None:
    """Raise an error for damage if a sound page of another table stands in the place of one that rows refer to.

    All tables with numbers have pages of one form, so SQLite would take the others' rows for these.
    """
    for table in _REFERRED:
        (found,) = connection.execute(f"PRAGMA integrity_check({table})").fetchone()
        if found != "ok":
            raise corruption(f"the table {table} is damaged: {found}")
    if connection.execute(_GIVEN_AGAIN).fetchone()[0]:
        raise corruption("the last number of a lane is gone")


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    for number in range(version, len(MIGRATIONS)):
        connection.execute("BEGIN IMMEDIATE")
        for statement in MIGRATIONS[number]:
            connection.execute(statement)
        if number == 0:
            connection.execute("INSERT INTO meta VALUES ('buffer_id', ?)", (secrets.token_hex(8),))
        # A migration and its record share one transaction; the pragma takes no parameters.
        connection.execute(f"PRAGMA user_version = {number + 1:d}")
        connection.execute("COMMIT")
