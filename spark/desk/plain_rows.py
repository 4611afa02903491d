"""Rows of a query as Python has them, with times in microseconds since 1970."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from spark.desk.delta_source import Source
from spark.desk.row_text import chosen


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows and the names of their columns."""

    columns: Sequence[str]
    times: Collection[str]
    """Columns that hold microseconds since 1970."""
    rows: list[tuple[Any, ...]]

    def dicts(self) -> list[dict[str, Any]]:
        """Each row by its columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def plain_rows(source: Source, query: str) -> PlainRows:
    """Run a query."""
    relation = source.db.sql(query)
    columns = chosen(relation)
    return PlainRows(columns.names, columns.times, columns.plain(relation).fetchall())
