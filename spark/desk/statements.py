"""Judges and explains statements of SQL: only those that read are run, and mistakes are told in a line."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import duckdb

from spark.engine.told_error import ToldError

_EXPLAIN = re.compile(r"\A\s*EXPLAIN\s+(?:ANALYZE\s+)?", re.IGNORECASE)
"""Words before the statement that is explained. Options in brackets are refused: their end is hard to find."""
_END = re.compile(r";\s*(?:--[^\n]*(?:\n\s*|\Z))*\Z")
"""The end of a statement, with comments behind it."""
_NOT_THERE = re.compile(r"(?:Table|View) with name (\S+) does not exist")
_NO_COLUMN = re.compile(r'Referenced column "(.*?)" not found')
_OTHER_WORDS = re.compile(r"(?<!\.)\b(?:at|offset)\b", re.IGNORECASE)
"""Columns whose names are words of DuckDB's SQL."""


SPARKS_WORDS = (
    "to_date(time) AS CAST(time AS DATE)",
    "from_utc_timestamp(time, zone) AS timezone(zone, timezone('UTC', CAST(time AS TIMESTAMP)))",
    "explode(list) AS unnest(list)",
)
"""Functions of Spark's that DuckDB lacks, as macros: the examples of docs/tables.md run in both."""


class NotReadingError(ToldError):
    """The statement would change something, or is not one statement; the message says so."""

    is_usage = True


class QueryError(ToldError):
    """The query cannot be answered; the message says why and what to write."""

    is_usage = True


def expect_reading(query: str) -> None:
    """Refuse all but one statement that reads. Raises NotReadingError and QueryError."""
    try:
        found = duckdb.extract_statements(query)
        if len(found) == 1 and found[0].type is duckdb.StatementType.EXPLAIN:
            # EXPLAIN ANALYZE runs what it explains.
            found = duckdb.extract_statements(_EXPLAIN.sub("", found[0].query, count=1))
    except duckdb.Error as error:
        raise QueryError(words_of(error, ())) from error
    if len(found) != 1 or found[0].type is not duckdb.StatementType.SELECT:
        raise NotReadingError(
            "only one statement that reads is carried out here: SELECT, WITH ... SELECT, SHOW, DESCRIBE, EXPLAIN. "
            "This would do something else. It was not run, and nothing was changed"
        )


def bare(query: str) -> str:
    """A statement without its semicolon and what is behind it, so that it may stand in brackets."""
    cut = _END.sub("", query)
    try:
        duckdb.extract_statements(cut)
    except duckdb.Error:
        # The semicolon stands in a text.
        return query
    return cut


def named_in(query: str, tables: Sequence[str]) -> list[str]:
    """The tables that a statement may read. The others are not opened."""
    words = {word.lower() for word in re.findall(r"\w+", query)}
    # SHOW names no table, and shows all of them.
    return [name for name in tables if name in words or "show" in words]


def words_of(error: duckdb.Error, tables: Iterable[str]) -> str:
    """DuckDB's message about a query, with what to write instead. `tables` are the names that exist."""
    first, _, rest = str(error).partition("\n")
    words = re.sub(r"^(?:Catalog|Binder|Parser) Error: ", "", first).strip()
    if missing := _NOT_THERE.search(first):
        near = get_close_matches(missing[1].rstrip("!"), [*tables], 1)
        told = f" Did you mean {near[0]}?" if near else ""
        return f"there is no table {missing[1].rstrip('!')}.{told}\nThere are: {', '.join(tables)}."
    if column := _NO_COLUMN.search(first):
        candidates = re.search(r"Candidate bindings: (.*)", rest)
        nearest = f" The nearest are {candidates[1]}." if candidates else ""
        return (
            f"there is no column {column[1]}.{nearest}\nText stands in single quotes: WHERE device = 'board-1'. "
            "A metric is no column: its values are rows, WHERE metric = 'celsius'. DESCRIBE windows lists the columns "
            "of `windows`."
        )
    line = re.search(r"^LINE \d+: (.*)\n( *\^)", rest, re.MULTILINE)
    if line and (reserved := _OTHER_WORDS.search(line[1])) and "syntax error" in words:
        words += f". If {reserved[0]} is a column, write the table's name before it: log.{reserved[0]}"
    return "\n".join([words, *(line[0].splitlines() if line else ())])
