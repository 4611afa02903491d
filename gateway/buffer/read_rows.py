"""Reads rows of the buffer file: many in one answer, and none that a damaged file made up."""

import sqlite3
from collections.abc import Iterable
from itertools import chain, groupby
from operator import attrgetter

import msgspec

from gateway.buffer.room import SIZE_SQL
from gateway.buffer.rows import ROW_COLUMNS, Position, Row, Span, joined
from gateway.buffer.schema import corruption
from gateway.buffer.stored_rows import rows_after, rows_within
from gateway.reading import BufferFileError

READ_BYTES_MAX = 1_000_000
"""Payload bytes of one read, at most, unless its first row has more."""
READ_ROWS = 1_000
"""Rows taken from SQLite at a time."""

# Many rows in one answer, with their payloads joined. If rows are fetched one by one, SQLite gives up Python's lock at
# each. It gets the lock back only when the event loop has nothing to do.
_SELECT_MANY = f"""
    SELECT
        json_group_array(json_array(
            lane, sequence, series, json_array(
                received_us, event_us, event_error_us, tick_ms, device_boot, device_sequence, '', doubt, device_time_us,
                properties
            )
        )),
        json_group_array(CASE typeof(payload) WHEN 'blob' THEN length(payload) END),
        CAST(group_concat(payload, '') AS BLOB)
    FROM {rows_after(", ".join(ROW_COLUMNS))}
"""
_PAYLOAD_BYTES = f"SELECT total(bytes) FROM {rows_after(f'{SIZE_SQL} AS bytes')}"
_SEQUENCES = f"SELECT sequence FROM {rows_within('sequence')}"
_rows = msgspec.json.Decoder(list[Row])
_sizes = msgspec.json.Decoder(list[int])


def check_sqlite(connection: sqlite3.Connection) -> None:
    """Check that this SQLite reads rows back as they were written, before any is taken. Raises BufferFileError."""
    fields, _, payloads = connection.execute(_SELECT_MANY, (-1, 0)).fetchone()
    (joined_bytes,) = connection.execute(
        "SELECT CAST(group_concat(column1, '') AS BLOB) FROM (VALUES (x'0061'), (x''), (x'ff00'))"
    ).fetchone()
    if (fields, payloads, joined_bytes) != ("[]", None, b"\0a\xff\0"):
        raise BufferFileError(f"SQLite {sqlite3.sqlite_version} is too old for the buffer: 3.38 or later is needed")


def read_rows(connection: sqlite3.Connection, after: Position, limit: int, last: Position) -> list[Row]:
    """Rows that follow a position, in order: all lanes, oldest first.

    `READ_BYTES_MAX` may cut the list short, but not before its second row. `last` is the last row of the file.
    """
    rows: list[Row] = []
    left_bytes = READ_BYTES_MAX
    while len(rows) < limit:
        wanted = min(limit - len(rows), READ_ROWS)
        while (size := _payload_bytes(connection, after, wanted)) > left_bytes and wanted > 1:
            wanted //= 2
        if rows and size > left_bytes:
            break
        found = _read_some(connection, after, wanted, last)
        rows += found
        if len(found) < wanted:
            break
        left_bytes -= size
        after = Position(found[-1].lane, found[-1].sequence)
    return rows


def _payload_bytes(connection: sqlite3.Connection, after: Position, limit: int) -> int:
    (size,) = connection.execute(_PAYLOAD_BYTES, (after.place, limit)).fetchone()
    return int(size)


def _read_some(connection: sqlite3.Connection, after: Position, limit: int, last: Position) -> list[Row]:
    try:
        fields, lengths, payloads = connection.execute(_SELECT_MANY, (after.place, limit)).fetchone()
        rows, sizes = _rows.decode(fields), _sizes.decode(lengths)
    except (sqlite3.OperationalError, msgspec.DecodeError) as error:
        # A damaged file may hold anything: blobs, which JSON does not have, or fields of a wrong type.
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) != sqlite3.SQLITE_ERROR:
            raise
        raise corruption(f"a row is none ({error})") from error
    end = 0
    before: tuple[int, int] = after
    for row, size in zip(rows, sizes, strict=True):
        start, end = end, end + size
        row.datum.payload = payloads[start:end]
        place = (row.lane, row.sequence)
        if place <= before:
            raise corruption("rows stand out of their order")
        before = place
    if rows and (before > last or end != len(payloads)):
        raise corruption("a row stands beyond the last one, or is shorter than it says")
    return rows


def gone_rows(connection: sqlite3.Connection, spans: Iterable[Span]) -> list[Span]:
    """Rows of these spans that are gone. In each lane, all rows from the first to the last span are read."""
    gone = []
    for lane, group in groupby(joined(spans), attrgetter("lane")):
        of_lane = list(group)
        there = sequences_of(connection, Span(lane, of_lane[0].first, of_lane[-1].last))
        wanted = chain.from_iterable(range(span.first, span.last + 1) for span in of_lane)
        gone += [Span(lane, sequence, sequence) for sequence in wanted if sequence not in there]
    return joined(gone)


def sequences_of(connection: sqlite3.Connection, span: Span) -> set[int]:
    """The sequences of a span that are there."""
    return {sequence for (sequence,) in connection.execute(_SEQUENCES, span.places)}
