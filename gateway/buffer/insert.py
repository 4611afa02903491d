"""Inserts rows into the table of readings: many in one statement, with no more bound values than they have."""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from msgspec.structs import astuple

from gateway.buffer.lanes import NOTHING_US
from gateway.buffer.rows import (
    ROW_COLUMNS,
    SEQUENCE_BITS,
    Entry,
    Position,
    Quarantined,
    Row,
    earliest_event_us,
    sent_of,
)
from gateway.buffer.series import SeriesTable

ROWS_AT_ONCE = 64
"""Rows in one statement. Each statement makes Python's lock change hands, which is slow while the event loop is
busy."""

_COMPUTED = {"lane", "sequence", "device_time_us", "properties"}
"""Columns that follow from the key, and those that `sent` stands for."""
_COLUMNS = (*(column for column in ROW_COLUMNS if column not in _COMPUTED), "sent")
_ROW = f"(?, {', '.join('?' * len(_COLUMNS))})"
_INSERT = f"INSERT INTO reading VALUES {_ROW}"
_INSERT_MANY = f"INSERT INTO reading VALUES {', '.join([_ROW] * ROWS_AT_ONCE)}"
_ELSE = {"event_error_us": "0", "doubt": "0"}
"""Values of unbound columns, if not NULL."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Rows with values in these columns only, beside their place. Python is slow to bind values, even None."""

    columns: tuple[str, ...]
    insert_many: str

    @classmethod
    def of(cls, *columns: str) -> "Form":
        """Make a form. `columns` are in the table's order."""
        values = ["?" if column in columns else _ELSE.get(column, "NULL") for column in _COLUMNS]
        rows = (f"(?1 + {number}, {', '.join(values)})" for number in range(ROWS_AT_ONCE))
        return cls(columns, f"INSERT INTO reading VALUES {', '.join(rows)}")


UNTIMED = Form.of("series", "received_us", "device_boot", "device_sequence", "payload")
"""Rows without a time of their own."""
TIMED = Form.of("series", "received_us", "event_us", "event_error_us", "device_boot", "device_sequence", "payload")
TICKED = Form.of("series", "received_us", "tick_ms", "device_boot", "device_sequence", "payload")
"""Rows with a tick that does not tell their time yet."""
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
"""Rows with any of these, such as a time and a tick from serial lines."""
_datum_of_any = attrgetter(*ANY.columns[1:])


def insert_entries(
    connection: sqlite3.Connection,
    entries: Iterable[Entry],
    first: Position,
    series_table: SeriesTable,
    set_aside: Callable[[Quarantined], None],
) -> tuple[list[Row], int]:
    """Insert entries as consecutive rows from a place on. Raises sqlite3.Error.

    Returns the rows and their earliest event time, which is `NOTHING_US` without rows. `set_aside` gets the input that
    an entry reports as quarantined.
    """
    lane, sequence = first
    event_from_us = NOTHING_US
    numbers = series_table.numbers
    rows: list[Row] = []
    values: list[object] = []
    forms: set[Form | None] = set()
    for entry in entries:
        if entry.quarantined is not None:
            set_aside(entry.quarantined)
        series = numbers.get(entry.series)
        if series is None:
            series = series_table.number(entry.series)
        datum = entry.datum
        event_us, error_us, tick_ms = datum.event_us, datum.event_error_us, datum.tick_ms
        received_us, boot, number, payload = datum.received_us, datum.device_boot, datum.device_sequence, datum.payload
        rows.append(Row(lane, sequence, series, datum))
        sequence += 1
        if (
            datum.doubt
            or datum.device_time_us is not None
            or datum.properties is not None
            or (error_us and event_us is None)
        ):
            forms.add(None)
            event_us = earliest_event_us(entry)
        elif event_us is not None:
            if tick_ms is None:
                forms.add(TIMED)
                values += (series, received_us, event_us, error_us, boot, number, payload)
            else:
                forms.add(ANY)
                values += (series, received_us, event_us, error_us, tick_ms, boot, number, payload)
        elif tick_ms is not None:
            forms.add(TICKED)
            event_us = earliest_event_us(entry)
            values += (series, received_us, tick_ms, boot, number, payload)
        else:
            forms.add(UNTIMED)
            event_us = received_us
            values += (series, received_us, boot, number, payload)
        if event_us < event_from_us:  # noqa: PLR1730 - a call of min() takes three times as long
            event_from_us = event_us
    if rows:
        _insert_new(connection, rows, values, forms)
    return rows, event_from_us


def _insert_new(
    connection: sqlite3.Connection, rows: Sequence[Row], values: Sequence[object], forms: set[Form | None]
) -> None:
    """Insert consecutive rows of one lane, in the quickest way that their forms allow. Raises sqlite3.Error.

    `forms` are the rows' forms, None for rows of no form. `values` are the rows' values in the columns of their forms.
    """
    whole = 0 if None in forms else len(rows) - len(rows) % ROWS_AT_ONCE
    known = [form for form in forms if form is not None]
    if len(known) == 1:
        _insert_by(connection, known[0], rows[:whole], values)
    else:
        values = [value for row in rows[:whole] for value in (row.series, *_datum_of_any(row.datum))]
        _insert_by(connection, ANY, rows[:whole], values)
    insert_rows(connection, rows[whole:])


def insert_rows(connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """Insert rows of any form. Raises sqlite3.Error."""
    whole = len(rows) - len(rows) % ROWS_AT_ONCE
    for start in range(0, whole, ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        connection.execute(_INSERT_MANY, tuple(chain.from_iterable(map(_values, some))))
    connection.executemany(_INSERT, map(_values, rows[whole:]))


def _values(row: Row) -> tuple[object, ...]:
    # As `Position.place` has it, without making one for each row.
    return (row.lane << SEQUENCE_BITS) + row.sequence, row.series, *astuple(row.datum)[:-2], sent_of(row.datum)


def _insert_by(connection: sqlite3.Connection, form: Form, rows: Sequence[Row], values: Sequence[object]) -> None:
    step = ROWS_AT_ONCE * len(form.columns)
    for number, first in enumerate(rows[::ROWS_AT_ONCE]):
        of_rows = values[number * step : (number + 1) * step]
        connection.execute(form.insert_many, (Position(first.lane, first.sequence).place, *of_rows))
