"""The series of a buffer file: fields that many readings share are stored once, under a number."""

import sqlite3

from gateway.buffer.rows import Series
from gateway.buffer.schema import find_one
from gateway.buffer.shares import Shares

SERIES_MAX = 10_000
"""Unneeded series that are kept, so that devices need not be stored anew each time."""
SERIES_CACHED_MAX = 50_000
"""Series whose numbers are remembered in memory."""
PRUNED_ROWS_MAX = 100_000
"""Waiting rows above which unneeded series are not searched for."""


class SeriesTable:
    """The table `series`. Call `forget` after a roll-back. Methods that write need a transaction."""

    def __init__(self, connection: sqlite3.Connection, shares: Shares) -> None:
        self._connection = connection
        self._shares = shares
        self.numbers: dict[Series, int] = {}
        """Numbers that are remembered; `number` finds or gives all others."""
        self._pruned_at = SERIES_MAX

    def number(self, series: Series) -> int:
        """The number of a series in this file, given now if it has none."""
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
        """The series of a number. Raises BufferFileError if this file does not know it."""
        statement = "SELECT stream, topic, key, device, subject, type, content_type FROM series WHERE number = ?"
        stream, *columns = find_one(self._connection, statement, number)
        return Series.of_columns(columns, stream)

    def forget(self) -> None:
        """Forget all numbers, as those that a rolled-back transaction gave are void."""
        self.numbers.clear()

    def prune_if_due(self, rows: int) -> None:
        """Delete series that no row refers to, once there are many. `rows` is the number of waiting rows."""
        # The search reads every row, so it is put off while many wait.
        if len(self.numbers) > self._pruned_at and rows <= PRUNED_ROWS_MAX:
            self._prune()

    def _prune(self) -> None:
        """Delete unneeded series. The number left sets when to search again, so that it is not at every commit."""
        self._connection.execute(
            """DELETE FROM series WHERE number NOT IN
            (SELECT series FROM reading UNION SELECT series FROM quarantine WHERE series IS NOT NULL)"""
        )
        self.numbers.clear()
        self._shares.forget()
        (left,) = self._connection.execute("SELECT count(*) FROM series").fetchone()
        self._pruned_at = min(max(SERIES_MAX, 2 * left), SERIES_CACHED_MAX - 1)
