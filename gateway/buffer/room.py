"""Room for the buffer file: its bounds, and reserves for a disk that has no room at all.

With 0 bytes free SQLite cannot even DELETE, unless its WAL was grown beforehand and is never truncated. And a commit
may succeed although a later checkpoint has no room for its pages. So the WAL is grown early, some free pages stay in
the file, and the file is extended before a commit that needs it.
"""

import os
import sqlite3
from contextlib import closing, suppress
from typing import Final

from gateway.buffer import schema
from gateway.buffer.wal import lacks_commits
from gateway.settings import BufferSettings

PAGE_BYTES = 4096
ROW_BYTES = 90
"""Bytes that a row takes on disk beside its payload, with its part of the indexes; rounded up."""
INLINE_BYTES_MAX = 900
"""Payload bytes above which so few rows share a page that they fill it in part, or a payload has pages of its own."""
SIZE_SQL = "(length(payload) + coalesce(length(properties), 0))"
"""`Datum.size` of a row, in SQL."""
_SIZE = f"({SIZE_SQL} + {ROW_BYTES})"
ROW_BYTES_SQL = f"""(CASE
    WHEN {SIZE_SQL} <= {INLINE_BYTES_MAX} THEN {_SIZE}
    WHEN {_SIZE} <= {PAGE_BYTES} THEN {PAGE_BYTES} / ({PAGE_BYTES} / {_SIZE})
    ELSE {_SIZE} + {PAGE_BYTES} END)"""
"""`row_bytes` of a row, in SQL."""
SPARE_BYTES_MIN = 256 * 1024
SPARE_BYTES_MAX = 8_000_000
GROWTH_BYTES = 1_000_000
"""Bytes that the file grows by at once, if the disk has them."""

_PAGES: Final = "SELECT page_count, freelist_count FROM pragma_page_count, pragma_freelist_count"


def row_bytes(payload_bytes: int) -> int:
    """Bytes that a row takes on disk, at most."""
    size = payload_bytes + ROW_BYTES
    if payload_bytes <= INLINE_BYTES_MAX:
        return size
    return PAGE_BYTES // (PAGE_BYTES // size) if size <= PAGE_BYTES else size + PAGE_BYTES


class Room:
    """The part of the disk that one open buffer file may use. Methods raise OSError if the file system refuses."""

    def __init__(self, settings: BufferSettings, connection: sqlite3.Connection) -> None:
        self._settings = settings
        self._connection = connection
        self.spare_bytes = min(max(settings.bytes_max // 16, SPARE_BYTES_MIN), SPARE_BYTES_MAX)
        """Bytes that the WAL is grown to, and that a new file has in free pages."""
        self.lacks_commits = False
        """Whether acknowledged commits were lost with a damaged WAL."""
        # One more descriptor of the file. Closing it drops SQLite's locks, so it is closed after the connection.
        self._fd = os.open(settings.path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def commit_bytes_max(self) -> int:
        """Bytes that one commit may store, and that it may delete. Both together must fit into the rest of the WAL."""
        return self.spare_bytes // 5

    def prepare(self) -> None:
        """Grow the WAL and leave free pages, if not done before, as far as the disk has room."""
        # With a checkpoint at half of it, even the largest commit stays within the grown WAL.
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {self.spare_bytes // 2 // PAGE_BYTES:d}").fetchone()
        # Commits of a former process go into the file, so that the next commit begins the WAL anew.
        _, recovered, _ = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self.lacks_commits = lacks_commits(self._settings.path, self._fd, recovered)
        wal = self._settings.path.with_name(self._settings.path.name + "-wal")
        if wal.stat().st_size >= self.spare_bytes or self.disk_free_bytes() < 3 * self.spare_bytes:
            return
        with suppress(sqlite3.OperationalError):  # no room after all: the next start tries again
            self._connection.execute("BEGIN IMMEDIATE")
            # There is one if a former start was cut off just here.
            self._connection.execute("DROP TABLE IF EXISTS spare")
            self._connection.execute("CREATE TABLE spare (bytes BLOB)")
            self._connection.execute("INSERT INTO spare VALUES (zeroblob(?))", (self.spare_bytes,))
            self._connection.execute("COMMIT")
            self._connection.execute("DROP TABLE spare")
            self.checkpoint()
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def checkpoint(self) -> None:
        """Move the WAL's commits into the file, except those after the commit that somebody reads at this moment."""
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def extend(self) -> None:
        """Allocate disk blocks for the file's growth in the open transaction; call before COMMIT."""
        needed = sum(self._page_bytes())
        # A complete checkpoint cuts the file to its pages, so its size is asked anew.
        has = os.fstat(self._fd).st_size
        if needed > has:
            # Allocate some more, as a growing file grows again. If the disk has no more, allocate exactly.
            try:
                os.posix_fallocate(self._fd, has, needed + GROWTH_BYTES - has)
            except OSError:
                os.posix_fallocate(self._fd, has, needed - has)
            # SQLite trusts a file's length. If a power cut shortened the file again, SQLite would call it corrupt.
            os.fsync(self._fd)

    def used_and_left(self) -> tuple[int, int]:
        """Bytes of used pages, and bytes that may still come in, within `bytes_max` and the disk's room.

        Deleted rows leave free pages, not a smaller file. Free pages are used first, except some that deletions, loss
        counters and the gateway's own events need.
        """
        used, free = self._page_bytes()
        growth = self.disk_free_bytes() - max(self._settings.free_bytes_min, self.spare_bytes)
        within = max(0, free - self.spare_bytes // 4) + max(0, growth)
        return used, max(0, min(self._settings.bytes_max - used, within))

    def is_full(self, coming_bytes: int = 0) -> bool:
        """Whether `coming_bytes` more of readings would exceed `bytes_max` or the disk's room."""
        _, left = self.used_and_left()
        return left <= coming_bytes

    def free_page_bytes(self) -> int:
        """Bytes of free pages in the file."""
        _, free = self._page_bytes()
        return free

    def is_tight(self) -> bool:
        """Whether the disk has too little room for any growth, so that a transaction must fit into the WAL."""
        return self.disk_free_bytes() < max(self._settings.free_bytes_min, self.spare_bytes)

    def disk_free_bytes(self) -> int:
        """Bytes that the file system has left for ordinary users."""
        found = os.fstatvfs(self._fd)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Close the connection, and leave the WAL grown, for a next start on a full disk."""
        with suppress(sqlite3.Error):
            self.checkpoint()
        # SQLite deletes the WAL when the last connection closes, unless this connection may not write.
        with suppress(sqlite3.Error), closing(schema.connect_read_only(self._settings.path)) as last:
            last.execute("SELECT count(*) FROM meta").fetchone()
            self._connection.close()
        self.abandon()

    def abandon(self) -> None:
        """Close without touching the content of the file."""
        with suppress(sqlite3.Error):
            self._connection.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _page_bytes(self) -> tuple[int, int]:
        """Bytes of used pages, and of free ones."""
        pages, free = self._connection.execute(_PAGES).fetchone()
        return (pages - free) * PAGE_BYTES, free * PAGE_BYTES
