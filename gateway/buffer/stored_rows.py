"""SQL for the rows of a buffer file, which stand in two tables.

Rows of this version are in `reading`, by place (`Position.place`). Rows of former versions are in `former_reading`, by
lane and sequence. They stay there until they are deleted, and none is added. Both tables are read in one order, so
nothing else needs to know which table has a row.
"""

import sqlite3
from typing import Final

from gateway.buffer.rows import SEQUENCE_BITS, SEQUENCE_MAX, Position, Span

_READING: Final = """(
    SELECT *,
        CASE WHEN sent NOT NULL THEN
            iif(instr(sent, '['), CAST(nullif(substr(sent, 1, instr(sent, '[') - 1), '') AS INTEGER), sent)
        END AS device_time_us,
        CASE WHEN sent NOT NULL THEN substr(sent, nullif(instr(sent, '['), 0)) END AS properties
    FROM reading
)"""
"""The table `reading` with the columns that `sent` stands for: see `rows.sent_of`. Most rows have NULL there."""
_FORMER: Final = "(SELECT *, NULL AS properties FROM former_reading)"
_FORMER_PLACE: Final = f"(lane << {SEQUENCE_BITS} | sequence)"
_FORMER_AFTER: Final = f"(lane, sequence) > (?1 >> {SEQUENCE_BITS}, ?1 & {SEQUENCE_MAX})"
_FORMER_BEFORE: Final = f"(lane, sequence) < (?1 >> {SEQUENCE_BITS}, ?1 & {SEQUENCE_MAX})"
_FORMER_WITHIN: Final = f"lane = ?1 >> {SEQUENCE_BITS} AND sequence BETWEEN ?1 & {SEQUENCE_MAX} AND ?2 & {SEQUENCE_MAX}"


def rows_after(columns: str, condition: str = "TRUE") -> str:
    """A table: `columns` and the place of the first ?2 rows behind the place ?1, in order.

    Only rows count for which the condition holds.
    """
    return _rows_after(columns, condition, "ASC")


def newest_rows_after(columns: str) -> str:
    """A table: `columns` and the place of the last ?2 rows behind the place ?1, the newest first."""
    return _rows_after(columns, "TRUE", "DESC")


def _rows_after(columns: str, condition: str, order: str) -> str:
    return f"""(
        SELECT place, {columns} FROM {_READING} WHERE place > ?1 AND {condition} UNION ALL SELECT * FROM (
            SELECT {_FORMER_PLACE} AS place, {columns} FROM {_FORMER} WHERE {_FORMER_AFTER} AND {condition}
            ORDER BY lane {order}, sequence {order} LIMIT ?2
        ) ORDER BY place {order} LIMIT ?2
    )"""


def rows_within(columns: str) -> str:
    """A table: `columns` and the place of one lane's rows from the place ?1 to the place ?2 (`Span.places`)."""
    return f"""(
        SELECT place, {columns} FROM {_READING} WHERE place BETWEEN ?1 AND ?2
        UNION ALL SELECT {_FORMER_PLACE}, {columns} FROM {_FORMER} WHERE {_FORMER_WITHIN}
    )"""


def first_of(lane: str, column: str) -> str:
    """An expression: a column of a lane's first row, or NULL without rows. `lane` is an expression for its number."""
    return _end_of(lane, column, "ASC")


def last_of(lane: str, column: str) -> str:
    """An expression: a column of a lane's last row, or NULL without rows. `lane` is an expression for its number."""
    return _end_of(lane, column, "DESC")


def _end_of(lane: str, column: str, order: str) -> str:
    return f"""(SELECT {column} FROM (
        SELECT place, {column} FROM reading WHERE {_of_lane(lane)} UNION ALL SELECT * FROM (
            SELECT {_FORMER_PLACE}, {column} FROM former_reading WHERE lane = {lane} ORDER BY sequence {order} LIMIT 1
        ) ORDER BY place {order} LIMIT 1
    ))"""


def _of_lane(lane: str) -> str:
    return f"place BETWEEN {lane} << {SEQUENCE_BITS} AND {lane} << {SEQUENCE_BITS} | {SEQUENCE_MAX}"


ALL_SERIES: Final = "SELECT series FROM reading UNION ALL SELECT series FROM former_reading"
"""A query: the series of each row."""
_DELETE: Final = "DELETE FROM reading WHERE place BETWEEN ?1 AND ?2"
_DELETE_FORMER: Final = f"DELETE FROM former_reading WHERE {_FORMER_WITHIN}"


def delete_rows(connection: sqlite3.Connection, span: Span) -> int:
    """Delete the rows of a span; return how many there were. Raises sqlite3.Error."""
    return sum(connection.execute(statement, span.places).rowcount for statement in (_DELETE, _DELETE_FORMER))


_FIRST_AFTER: Final = f"""
    SELECT min(place) FROM (
        SELECT min(place) AS place FROM reading WHERE place > ?1 UNION ALL SELECT * FROM (
            SELECT {_FORMER_PLACE} FROM former_reading WHERE {_FORMER_AFTER} ORDER BY lane, sequence LIMIT 1
        )
    )
"""
_LAST_BEFORE: Final = f"""
    SELECT max(place) FROM (
        SELECT max(place) AS place FROM reading WHERE place < ?1 UNION ALL SELECT * FROM (
            SELECT {_FORMER_PLACE} FROM former_reading WHERE {_FORMER_BEFORE}
            ORDER BY lane DESC, sequence DESC LIMIT 1
        )
    )
"""


def first_after(connection: sqlite3.Connection, position: Position) -> Position | None:
    """The first row behind a position. Raises sqlite3.Error."""
    return _found(connection, _FIRST_AFTER, position)


def last_before(connection: sqlite3.Connection, position: Position) -> Position | None:
    """The last row before a position. Raises sqlite3.Error."""
    return _found(connection, _LAST_BEFORE, position)


def _found(connection: sqlite3.Connection, statement: str, position: Position) -> Position | None:
    (place,) = connection.execute(statement, (position.place,)).fetchone()
    return None if place is None else Position.at(place)
