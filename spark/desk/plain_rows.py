"""Rows of a query as Python has them, with times in microseconds since 1970."""

from dataclasses import dataclass
from typing import Any

from spark.desk.asked import quoted
from spark.desk.delta_source import Source


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows and the names of their columns."""

    columns: tuple[str, ...]
    times: frozenset[str]
    """Columns that hold microseconds since 1970."""
    rows: list[tuple[Any, ...]]

    def dicts(self) -> list[dict[str, Any]]:
        """Each row by its columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def plain_rows(source: Source, query: str) -> PlainRows:
    """Run a query."""
    relation = source.db.sql(query)
    times = frozenset(
        name for name, kind in zip(relation.columns, relation.types, strict=True) if str(kind).startswith("TIMESTAMP")
    )
    shown = relation.project(
        ", ".join(f"epoch_us({quoted(name)})" if name in times else quoted(name) for name in relation.columns)
    )
    return PlainRows(tuple(relation.columns), times, shown.fetchall())
