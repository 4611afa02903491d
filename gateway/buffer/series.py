"""The series of a buffer file: fields that many readings share are stored once, under a number.

A new series gets its number in memory, and is stored with the next commit. So Kafka may have its rows before the file
knows it.
"""

import sqlite3

import msgspec

from gateway.buffer.front import Front
from gateway.buffer.rows import Series
from gateway.buffer.schema import find_one
from gateway.buffer.shares import Shares
from gateway.buffer.stored_rows import ALL_SERIES

SERIES_MAX = 10_000
"""Unneeded series that are kept, so that devices need not be stored anew each time."""
SERIES_CACHED_MAX = 50_000
"""Series whose numbers are remembered in memory."""
PRUNED_ROWS_MAX = 100_000
"""Waiting rows above which unneeded series are not searched for."""


class SeriesTable:
    """The table `series`. `save` and `prune_if_due` need a transaction, framed by `begin`, and `saved` or `restore`."""

    def __init__(self, connection: sqlite3.Connection, shares: Shares, front: Front) -> None:
        self._connection = connection
        self._shares = shares
        self._front = front
        self.numbers: dict[Series, int] = {}
        """Numbers that are remembered; `number` finds or gives all others."""
        self._unsaved: dict[int, Series] = {}
        """Series that the file does not have yet."""
        self._unsaved_numbers: dict[tuple[str, ...], int] = {}
        """Their numbers, by their columns."""
        self._saving: dict[int, Series] = {}
        """Series that the open transaction stores."""
        self._first_new = 0
        """The first number that the open transaction may give."""
        self._pruned_at = SERIES_MAX
        (self._next,) = connection.execute(
            "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'series'), 0) + 1"
        ).fetchone()

    def number(self, series: Series) -> int:
        """The number of a series in this file, given now if it has none. Raises sqlite3.Error."""
        columns = series.columns
        number = self._unsaved_numbers.get(columns)
        if number is None:
            found = self._connection.execute(
                "SELECT number FROM series WHERE topic = ? AND key = ? AND device = ? AND subject = ?"
                " AND type = ? AND content_type = ?",
                columns,
            ).fetchone()
            number = None if found is None else int(found[0])
        if number is None:
            number, self._next = self._next, self._next + 1
            self._unsaved[number] = series
            self._unsaved_numbers[columns] = number
            self._shares.series_added(series)
        if len(self.numbers) >= SERIES_CACHED_MAX:
            self.numbers.clear()
        self.numbers[series] = number
        return number

    def find(self, number: int) -> Series:
        """The series of a number. Raises BufferFileError if this file does not know it."""
        unsaved = self._unsaved.get(number) or self._saving.get(number)
        if unsaved is not None:
            return unsaved
        statement = "SELECT stream, topic, key, device, subject, type, content_type FROM series WHERE number = ?"
        try:
            stream, *columns = find_one(self._connection, statement, number)
        except sqlite3.Error:
            # A disk that cannot be read must not keep from Kafka what is in memory.
            of_front = self._front.series(number)
            if of_front is None:
                raise
            return of_front
        return Series.of_columns(columns, stream)

    @property
    def unsaved(self) -> int:
        """Series that the file does not have yet."""
        return len(self._unsaved)

    def forget_settled(self) -> None:
        """Forget the new series of which the front has no rows: they get other numbers if they come again.

        Needs no transaction, and must not be called in one.
        """
        of_front = {row.series for row in self._front.rows()}
        gone = self._unsaved.keys() - of_front
        self.numbers = {series: number for series, number in self.numbers.items() if number not in gone}
        self._unsaved = {number: series for number, series in self._unsaved.items() if number in of_front}
        self._unsaved_numbers = {series.columns: number for number, series in self._unsaved.items()}

    def begin(self) -> None:
        """Begin a transaction."""
        self._first_new = self._next

    def save(self) -> None:
        """Store the new series."""
        if self._unsaved:
            self._connection.executemany(
                "INSERT INTO series (number, topic, key, device, subject, type, content_type, stream)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(number, *series.columns, series.stream or None) for number, series in self._unsaved.items()],
            )
            self._saving, self._unsaved = self._unsaved, {}

    def saved(self) -> None:
        """Note that the transaction was committed."""
        self._saving = {}
        self._unsaved_numbers = {}

    def restore(self) -> None:
        """Note that the transaction was rolled back. The numbers that it gave are void."""
        unsaved = {**self._saving, **self._unsaved}
        self._unsaved = {number: series for number, series in unsaved.items() if number < self._first_new}
        if len(unsaved) > len(self._unsaved):
            # The others stay: perhaps the disk cannot even be read.
            self.numbers = {series: number for series, number in self.numbers.items() if number < self._first_new}
        self._unsaved_numbers = {series.columns: number for number, series in self._unsaved.items()}
        self._saving = {}

    def prune_if_due(self, rows: int) -> None:
        """Delete series that no row refers to, once there are many. `rows` is the number of waiting rows."""
        # The search reads every row, so it is put off while many wait.
        if len(self.numbers) > self._pruned_at and rows <= PRUNED_ROWS_MAX:
            self._prune()

    def _prune(self) -> None:
        """Delete unneeded series. The number left sets when to search again, so that it is not at every commit."""
        in_front = {row.series for row in self._front.rows()}
        self._connection.execute(
            f"""DELETE FROM series WHERE number NOT IN (
                {ALL_SERIES} UNION SELECT series FROM quarantine WHERE series IS NOT NULL
                UNION SELECT value FROM json_each(?)
            )""",
            (msgspec.json.encode(sorted(in_front)).decode(),),
        )
        self.numbers.clear()
        self._shares.forget()
        (left,) = self._connection.execute("SELECT count(*) FROM series").fetchone()
        self._pruned_at = min(max(SERIES_MAX, 2 * left), SERIES_CACHED_MAX - 1)
