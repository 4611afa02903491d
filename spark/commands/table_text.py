"""Rows of tables as a person reads them on a terminal."""

from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from gateway.host.terminal_text import GAP, aligned, escaped
from gateway.record_contract import TIME_ERROR_UNKNOWN_US

FIGURES = frozenset(
    {
        "n",
        "min",
        "max",
        "mean",
        "sum",
        "first",
        "last",
        "late",
        "ordinal",
        "value",
        "time_error_us",
        "count",
        "offset",
        "partition",
        "revision",
        "depth_rows",
        "waiting",
    }
)
"""Columns that stand to the right in a table, and are never cut short."""


def rfc3339(us: int) -> str:
    """Microseconds since 1970 as UTC in RFC 3339."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def time_text(us: int | None) -> str:
    """A time as it stands in a table: no zeros that say nothing."""
    return "-" if us is None else rfc3339(us).replace(".000000Z", "Z")


def to_the_second(time: str) -> str:
    """A time of a table without what comes behind its seconds."""
    return time[: len("2026-03-14T12:00:00")] + "Z" if "." in time else time


def cell_text(column: str, value: object) -> str:
    """Another value as it stands in a table: no zeros that say nothing, nothing that a terminal would obey."""
    if column == "time_error_us" and value == TIME_ERROR_UNKNOWN_US:
        return "unbounded"
    match value:
        case bool():
            text = "true" if value else "false"
        case Decimal():
            text = f"{value.normalize():f}"
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
    """Those of `spare` that must go, its first ones first, for a table to fit into `width` characters."""
    left_out: list[str] = []
    for name in spare:
        left = [column for column in columns if column not in left_out]
        if table_width(left, rows) <= width:
            break
        left_out.append(name)
    return left_out


def table_width(columns: Sequence[str], rows: Sequence[dict[str, str]]) -> int:
    """How many characters the lines of a table need, with nothing cut short."""
    widths = [max([len(name), *(len(row[name]) for row in rows)]) for name in columns]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def table_lines(
    columns: Sequence[str], rows: Sequence[dict[str, str]], times: Collection[str], width: int
) -> Iterator[str]:
    """Lay out rows under their names, figures to the right; where they still do not fit, names are cut short.

    `times` are those of the columns that are never cut short, as figures are not.
    """
    cells = [[row[name] for name in columns] for row in rows]
    return aligned(
        [escaped(name) for name in columns], cells, _places(columns, FIGURES), _places(columns, times), width
    )


def _places(columns: Sequence[str], chosen: Collection[str]) -> frozenset[int]:
    return frozenset(place for place, name in enumerate(columns) if name in chosen)
