"""Answers rows of a view as CSV, JSON or Parquet, as the commands show them to programs."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import SpooledTemporaryFile, TemporaryDirectory
from typing import IO, TYPE_CHECKING, Final

from spark.desk.asked import Asked, microseconds, text
from spark.desk.kept_tables import KeptTables
from spark.desk.look_ups import GAPS, GATEWAYS, LOSSES, READINGS, WINDOWS, LookUp
from spark.desk.nothing import why_nothing
from spark.desk.row_text import Chosen, chosen, csv_lines, fetched, json_row, text_of
from spark.desk.tables import Tables
from spark.page.questions import Question, suiting_size

if TYPE_CHECKING:
    from duckdb import DuckDBPyRelation

SPOOLED_BYTES: Final = 4_000_000
"""Bytes of an answer that are in memory. A longer one waits in a file that nobody else sees."""
KINDS: Final = {
    "csv": "text/csv; charset=utf-8",
    "json": "application/json",
    "parquet": "application/vnd.apache.parquet",
}


@dataclass(frozen=True, slots=True)
class View:
    """A view that an address gives."""

    look_up: LookUp
    rows: Callable[[Tables, Asked, int | None], str]


VIEWS: Mapping[str, View] = {
    "readings": View(READINGS, lambda tables, asked, _: tables.readings_sql(asked)),
    "windows": View(WINDOWS, lambda tables, asked, size_s: tables.windows_sql(asked, size_s)),
    "gaps": View(GAPS, lambda tables, asked, _: tables.missing_sql(asked)),
    "losses": View(LOSSES, lambda tables, asked, _: tables.select("losses", asked)),
    "gateways": View(GATEWAYS, lambda tables, asked, _: tables.select("gateways", asked)),
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as one of KINDS."""

    body: IO[bytes]
    size: int
    note: str
    """Why there are none, in ASCII; empty if there are some."""


def rows_of(tables: KeptTables, view: View, asked: Question, kind: str) -> Rows:
    """Answer a question as a file. Raises ToldError."""
    tables.evidence(asked.asked.device)
    size_s = _open_size(tables, asked.asked) if asked.is_size_open else asked.size_s

    def rows(limits: Asked) -> str:
        found = view.rows(tables, limits, size_s)
        named = asked.namespace
        return found if named is None else f"SELECT * FROM ({found}) WHERE namespace = {text(named)}"

    ordered = tables.source.db.sql(view.look_up.ordered(rows(asked.asked), oldest_first=asked.oldest_first))
    columns = chosen(ordered, view.look_up.shown(ordered.columns, full=asked.full))
    kept = ordered if asked.limit is None else ordered.limit(asked.limit)
    # Whole before its first byte is sent: what goes wrong is said by the status, and no slow reader keeps a connection.
    body: IO[bytes] = SpooledTemporaryFile(SPOOLED_BYTES)  # noqa: SIM115 - it is sent later
    try:
        count = _WRITERS[kind](tables, columns, kept, asked, body)
        note = "" if count else why_nothing(tables, asked.asked, view.look_up.time, rows).words(asked.zone)
    except BaseException:
        body.close()
        raise
    size = body.tell()
    body.seek(0)
    return Rows(body, size, note.encode("ascii", "backslashreplace").decode())


def _write_csv(tables: KeptTables, columns: Chosen, rows: "DuckDBPyRelation", asked: Question, body: IO[bytes]) -> int:
    found = fetched(tables.source.db, columns.plain(rows))
    lines = csv_lines(columns.names, columns.times, found, asked.zone)
    return sum(1 for line in lines if body.write(line.encode())) - 1


def _write_json(tables: KeptTables, columns: Chosen, rows: "DuckDBPyRelation", asked: Question, body: IO[bytes]) -> int:
    count = 0
    for row in fetched(tables.source.db, columns.plain(rows)):
        body.write(b",\n" if count else b"[\n")
        told = json_row(dict(zip(columns.names, row, strict=True)), columns.times, asked.zone)
        body.write(json.dumps(told, default=text_of).encode())
        count += 1
    body.write(b"\n]\n" if count else b"[]\n")
    return count


def _write_parquet(
    tables: KeptTables, columns: Chosen, rows: "DuckDBPyRelation", _asked: Question, body: IO[bytes]
) -> int:
    with TemporaryDirectory(prefix="sluice-desk-") as folder:
        path = Path(folder) / "rows.parquet"
        copy = f"COPY ({columns.typed(rows).sql_query()}) TO {text(str(path))} (FORMAT parquet, COMPRESSION zstd)"
        ((count,),) = tables.source.rows(copy)
        with path.open("rb") as file:
            shutil.copyfileobj(file, body)
    return int(count)


_WRITERS: Mapping[str, Callable[[KeptTables, Chosen, "DuckDBPyRelation", Question, IO[bytes]], int]] = {
    "csv": _write_csv,
    "json": _write_json,
    "parquet": _write_parquet,
}


def _open_size(tables: KeptTables, asked: Asked) -> int:
    """A length of windows that suits the span; without a beginning, that of the table."""
    base_s = tables.window_seconds()
    if asked.since_us is None:
        return base_s
    until_us = microseconds(datetime.now(UTC)) if asked.until_us is None else asked.until_us
    return suiting_size(until_us - asked.since_us, base_s)
