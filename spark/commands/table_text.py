"""Formats rows of tables for a terminal."""

import re
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal

from gateway.host.terminal_text import GAP, aligned, escaped
from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.desk.row_text import plain_text

FIGURES = frozenset(
    {
        *("n", "min", "max", "mean", "sum", "first", "last", "late", "ordinal", "value", "time_error_us", "count"),
        *("offset", "partition", "revision", "depth_rows", "waiting", "readings", "first_offset", "last_offset"),
        *("n_then", "sum_then"),
    }
)
"""Columns that are aligned to the right and never cut short."""


def to_the_second(time: str) -> str:
    """A time of a table without its fraction of a second."""
    return re.sub(r"\.[0-9]+", "", time)


def cell_text(column: str, value: object) -> str:
    """A value other than a time for a table, without trailing zeros or anything that a terminal would obey."""
    if column == "time_error_us" and value == TIME_ERROR_UNKNOWN_US:
        return "unbounded"
    match value:
        case bool():
            text = "true" if value else "false"
        case Decimal():
            text = plain_text(value)
        case dict():
            text = "; ".join(f"{name}={member}" for name, member in sorted(value.items()))
        case list():
            text = "; ".join(map(str, value))
        case _:
            text = "" if value is None else str(value)
    return escaped(text) or "-"


def columns_left_out(
    columns: Sequence[str], rows: Sequence[dict[str, str]], spare: Sequence[str], width: int
) -> list[str]:
    """The columns of `spare`, in their order, that must be left out to fit a table into `width` characters."""
    left_out: list[str] = []
    for name in spare:
        left = [column for column in columns if column not in left_out]
        if table_width(left, rows) <= width:
            break
        left_out.append(name)
    return left_out


def table_width(columns: Sequence[str], rows: Sequence[dict[str, str]]) -> int:
    """Characters that a line of the table needs if nothing is cut short."""
    widths = [max([len(name), *(len(row[name]) for row in rows)]) for name in columns]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def table_lines(
    columns: Sequence[str], rows: Sequence[dict[str, str]], times: Collection[str], width: int
) -> Iterator[str]:
    """Lay out rows under their column names, figures to the right. If a line does not fit, names are cut short.

    Figures and the columns of `times` are never cut short.
    """
    cells = [[row[name] for name in columns] for row in rows]
    return aligned(
        [escaped(name) for name in columns], cells, _places(columns, FIGURES), _places(columns, times), width
    )


def _places(columns: Sequence[str], chosen: Collection[str]) -> frozenset[int]:
    return frozenset(place for place, name in enumerate(columns) if name in chosen)
