"""How new rows get into the table of readings: many in one statement, and no more bound than they have."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from msgspec.structs import astuple

from gateway.buffer.rows import Row

ROWS_AT_ONCE = 64
"""Rows in one statement. SQLite is called once for each statement, and Python's lock changes hands each time: that is
what inserting one by one costs while the event loop is busy."""

_ROW = f"({', '.join('?' * len(Row.__struct_fields__))})"
_INSERT = f"INSERT INTO reading VALUES {_ROW}"
_INSERT_MANY = f"INSERT INTO reading VALUES {', '.join([_ROW] * ROWS_AT_ONCE)}"
_PLACE = {"lane", "sequence"}
_ELSE = {"event_error_us": "0", "doubt": "0"}
"""What a column has that is not bound, where that is not NULL."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Rows that have nothing but these columns, beside their place: Python is slow to bind values, None too."""

    columns: tuple[str, ...]
    insert_many: str

    @classmethod
    def of(cls, *columns: str) -> "Form":
        """`columns` in their order in the table."""
        values = [
            "?" if column in columns else _ELSE.get(column, "NULL")
            for column in Row.__struct_fields__
            if column not in _PLACE
        ]
        rows = (f"(?1, ?2 + {number}, {', '.join(values)})" for number in range(ROWS_AT_ONCE))
        return cls(columns, f"INSERT INTO reading VALUES {', '.join(rows)}")


UNTIMED = Form.of("series", "received_us", "device_boot", "device_sequence", "payload")
"""Without a time of their own."""
TIMED = Form.of("series", "received_us", "event_us", "event_error_us", "device_boot", "device_sequence", "payload")
TICKED = Form.of("series", "received_us", "tick_ms", "device_boot", "device_sequence", "payload")
"""With a tick that does not tell their time yet."""
ANY = Form.of(
    "series",
    "received_us",
    "event_us",
    "event_error_us",
    "tick_ms",
    "device_boot",
    "device_sequence",
    "payload",
)
"""All of these: such as those that come with a time and a tick, from serial lines."""
_values_of_any = attrgetter(*ANY.columns)


def insert_new(
    connection: sqlite3.Connection, rows: Sequence[Row], values: Sequence[object], forms: set[Form | None]
) -> None:
    """Insert rows of one lane that follow each other, in the quickest way that they allow.

    `forms` are those that they have, None for rows of no form, and `values` what all of them have in the columns of
    theirs. Raises sqlite3.Error.
    """
    whole = 0 if None in forms else len(rows) - len(rows) % ROWS_AT_ONCE
    known = [form for form in forms if form is not None]
    if len(known) == 1:
        _insert_by(connection, known[0], rows[:whole], values)
    else:
        _insert_by(connection, ANY, rows[:whole], [value for row in rows[:whole] for value in _values_of_any(row)])
    insert_rows(connection, rows[whole:])


def insert_rows(connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """Insert rows, whatever they are. Raises sqlite3.Error."""
    whole = len(rows) - len(rows) % ROWS_AT_ONCE
    for start in range(0, whole, ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        connection.execute(_INSERT_MANY, tuple(chain.from_iterable(map(astuple, some))))
    connection.executemany(_INSERT, map(astuple, rows[whole:]))


def _insert_by(connection: sqlite3.Connection, form: Form, rows: Sequence[Row], values: Sequence[object]) -> None:
    step = ROWS_AT_ONCE * len(form.columns)
    for number, first in enumerate(rows[::ROWS_AT_ONCE]):
        of_rows = values[number * step : (number + 1) * step]
        connection.execute(form.insert_many, (first.lane, first.sequence, *of_rows))
