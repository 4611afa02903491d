"""The series of a buffer file: what many readings have in common is stored once, and its number is remembered."""

import sqlite3

from gateway.buffer.rows import Series
from gateway.buffer.schema import find_one
from gateway.buffer.shares import Shares

SERIES_MAX = 10_000
"""Series that are kept although no row needs them, so that devices need not be stored anew each time."""
SERIES_CACHED_MAX = 50_000
"""Series whose numbers are remembered in memory."""
PRUNED_ROWS_MAX = 100_000
"""Rows beyond which series are not looked through for those that nothing needs."""


class SeriesTable:
    """The table `series`. It follows the file: `forget` after a roll-back. What writes belongs into a transaction."""

    def __init__(self, connection: sqlite3.Connection, shares: Shares) -> None:
        self._connection = connection
        self._shares = shares
        self.numbers: dict[Series, int] = {}
        """The numbers that are remembered; `number` finds, or gives, those that are not."""
        self._pruned_at = SERIES_MAX

    def number(self, series: Series) -> int:
        """The number of a series in this file, which has it from now on."""
        fields = series.columns
        is_new = self._connection.execute(
            "INSERT OR IGNORE INTO series (topic, key, device, subject, type, content_type, stream)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*fields, series.stream or None),
        ).rowcount
        if is_new:
            self._shares.series_added(series)
        (number,) = self._connection.execute(
            "SELECT number FROM series WHERE topic = ? AND key = ? AND device = ? AND subject = ?"
            " AND type = ? AND content_type = ?",
            fields,
        ).fetchone()
        if len(self.numbers) >= SERIES_CACHED_MAX:
            self.numbers.clear()
        self.numbers[series] = number
        return int(number)

    def find(self, number: int) -> Series:
        """What a row's series number stands for. Raises BufferFileError where this file does not know it."""
        statement = "SELECT stream, topic, key, device, subject, type, content_type FROM series WHERE number = ?"
        stream, *columns = find_one(self._connection, statement, number)
        return Series.of_columns(columns, stream)

    def forget(self) -> None:
        """A transaction was rolled back: numbers that it gave are void, and are read again when needed."""
        self.numbers.clear()

    def prune_if_due(self, rows: int) -> None:
        """Delete series that no row refers to, once there are many. `rows` is how many rows wait."""
        # It looks at every row: where many wait, it waits too.
        if len(self.numbers) > self._pruned_at and rows <= PRUNED_ROWS_MAX:
            self._prune()

    def _prune(self) -> None:
        """What is left sets when to look again: never at every commit."""
        self._connection.execute(
            """DELETE FROM series WHERE number NOT IN
            (SELECT series FROM reading UNION SELECT series FROM quarantine WHERE series IS NOT NULL)"""
        )
        self.numbers.clear()
        self._shares.forget()
        (left,) = self._connection.execute("SELECT count(*) FROM series").fetchone()
        self._pruned_at = min(max(SERIES_MAX, 2 * left), SERIES_CACHED_MAX - 1)
