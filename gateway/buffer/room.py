"""Room for the buffer file: its bounds, and what is kept ready for a disk that has no room at all.

With 0 bytes free SQLite cannot even DELETE, unless its WAL was grown beforehand and is never truncated, and a commit
may succeed whose pages a later checkpoint has no room for. So the WAL is pre-grown, some free pages stay in the file,
and the file itself is extended before the commit that needs it.
"""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from gateway.buffer.wal import lacks_commits
from gateway.settings import BufferSettings

PAGE_BYTES = 4096
ROW_BYTES = 90
"""What a row takes on disk beside its payload, its share of the indexes included; rounded up."""
INLINE_BYTES_MAX = 900
"""A longer payload stands in pages of its own, of which the last is filled in part."""
ROW_BYTES_SQL = f"length(payload) + {ROW_BYTES} + {PAGE_BYTES} * (length(payload) > {INLINE_BYTES_MAX})"
"""`row_bytes` of a row, for SQLite."""
SPARE_BYTES_MIN = 256 * 1024
SPARE_BYTES_MAX = 8_000_000
GROWTH_BYTES = 1_000_000
"""What the file grows by at once, where the disk has it."""

_PAGES: Final = "SELECT page_count, freelist_count FROM pragma_page_count, pragma_freelist_count"


def row_bytes(payload_bytes: int) -> int:
    """What a row takes on disk at the most."""
    return payload_bytes + ROW_BYTES + (PAGE_BYTES if payload_bytes > INLINE_BYTES_MAX else 0)


class Room:
    """What one open buffer file may use of its disk. Methods raise OSError where the file system refuses."""

    def __init__(self, settings: BufferSettings, connection: sqlite3.Connection) -> None:
        self._settings = settings
        self._connection = connection
        self.spare_bytes = min(max(settings.bytes_max // 16, SPARE_BYTES_MIN), SPARE_BYTES_MAX)
        """What the WAL is grown to, and what the file has in free pages at its beginning."""
        self.lacks_commits = False
        """Whether commits that had been acknowledged were lost with a damaged WAL."""
        # One more descriptor on the file: closing it would drop SQLite's locks, so it is closed after the connection.
        self._fd = os.open(settings.path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def commit_bytes_max(self) -> int:
        """What one commit may store, and what it may delete: together they must fit into what is left of the WAL."""
        return self.spare_bytes // 5

    def prepare(self) -> None:
        """Grow the WAL and leave free pages, where this was not done before; as far as the disk has room for it."""
        # A checkpoint at half of it, and the largest commit, stay within what was grown.
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {self.spare_bytes // 2 // PAGE_BYTES:d}").fetchone()
        # What a former process left in the WAL goes into the file: the next commit then begins the WAL anew.
        _, recovered, _ = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self.lacks_commits = lacks_commits(self._settings.path, self._fd, recovered)
        wal = self._settings.path.with_name(self._settings.path.name + "-wal")
        if wal.stat().st_size >= self.spare_bytes or self.disk_free_bytes() < 3 * self.spare_bytes:
            return
        with suppress(sqlite3.OperationalError):  # no room for it after all: it is tried again at the next start
            self._connection.execute("BEGIN IMMEDIATE")
            # There is one where a former start was cut off just here.
            self._connection.execute("DROP TABLE IF EXISTS spare")
            self._connection.execute("CREATE TABLE spare (bytes BLOB)")
            self._connection.execute("INSERT INTO spare VALUES (zeroblob(?))", (self.spare_bytes,))
            self._connection.execute("COMMIT")
            self._connection.execute("DROP TABLE spare")
            self.checkpoint()
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def checkpoint(self) -> None:
        """Move into the file what the WAL holds, but for commits after those that somebody reads at this moment."""
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def extend(self) -> None:
        """Give the file its blocks on disk as far as the open transaction has grown it: call before COMMIT."""
        needed = sum(self._page_bytes())
        # A complete checkpoint cuts the file to its pages: what it has now is asked anew.
        has = os.fstat(self._fd).st_size
        if needed > has:
            # Some more at once, for a file that grows does so again; exactly, where there is no more.
            try:
                os.posix_fallocate(self._fd, has, needed + GROWTH_BYTES - has)
            except OSError:
                os.posix_fallocate(self._fd, has, needed - has)
            # SQLite takes a file's length for its pages: one that a power cut shortened again is corrupt to it.
            os.fsync(self._fd)

    def used_and_left(self) -> tuple[int, int]:
        """Bytes of pages in use, and of what may still come in: up to `bytes_max`, and as the disk lets the file grow.

        Deleted rows leave free pages, not a smaller file. These are used first, but for some that deletions, loss
        counters and the gateway's own events need.
        """
        used, free = self._page_bytes()
        growth = self.disk_free_bytes() - max(self._settings.free_bytes_min, self.spare_bytes)
        within = max(0, free - self.spare_bytes // 4) + max(0, growth)
        return used, max(0, min(self._settings.bytes_max - used, within))

    def is_full(self, coming_bytes: int = 0) -> bool:
        """Whether `coming_bytes` more of readings would pass a bound: `bytes_max`, or what the disk has left."""
        _, left = self.used_and_left()
        return left <= coming_bytes

    def free_page_bytes(self) -> int:
        """What the file has left within itself."""
        _, free = self._page_bytes()
        return free

    def is_tight(self) -> bool:
        """Whether the file system has too little left for anything to grow: a transaction must fit into the WAL."""
        return self.disk_free_bytes() < max(self._settings.free_bytes_min, self.spare_bytes)

    def disk_free_bytes(self) -> int:
        """What the file system has left for us."""
        found = os.fstatvfs(self._fd)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Close the connection, and leave the WAL as it is: grown, for a next start on a full disk."""
        with suppress(sqlite3.Error):
            self.checkpoint()
        # SQLite deletes the WAL when the last connection closes, unless that one may not write.
        with suppress(sqlite3.Error), closing(_open_read_only(self._settings.path)) as last:
            last.execute("SELECT count(*) FROM meta").fetchone()
            self._connection.close()
        self.abandon()

    def abandon(self) -> None:
        """Close without a look at what stands in the file."""
        with suppress(sqlite3.Error):
            self._connection.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _page_bytes(self) -> tuple[int, int]:
        """Of pages in use, and of free ones."""
        pages, free = self._connection.execute(_PAGES).fetchone()
        return (pages - free) * PAGE_BYTES, free * PAGE_BYTES


def _open_read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
