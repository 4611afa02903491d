"""Lays rows out for programs: as CSV, as JSON, and their columns as Parquet takes them."""

import csv
import io
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from spark.desk.asked import quoted

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

ROWS_AT_ONCE = 10_000
"""Rows that are in memory on their way to CSV."""
_TIME = re.compile(r"TIMESTAMP[^\[]*")
"""DuckDB's types of times. A list of times ends in brackets."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CYCLE_YEARS = 400
_CYCLE_US = 146_097 * 86_400_000_000
"""Microseconds of so many years."""
_OF_128_BITS = re.compile(r"\bU?HUGEINT\b")
"""DuckDB's types of whole numbers that Parquet lacks, such as those of sums. DuckDB would write them as doubles."""


class Chosen(NamedTuple):
    """Columns of a relation that are shown, each under a name of its own."""

    names: list[str]
    times: list[str]
    """Names of those that hold times."""
    places: list[int]

    def plain(self, rows: "DuckDBPyRelation") -> "DuckDBPyRelation":
        """Return these columns for Python, with times in microseconds since 1970."""
        # Python would need another package for times with a zone.
        return rows.project(
            ", ".join(
                f"epoch_us(#{place + 1})" if name in self.times else f"#{place + 1}"
                for name, place in zip(self.names, self.places, strict=True)
            )
        )

    def typed(self, rows: "DuckDBPyRelation") -> "DuckDBPyRelation":
        """Return these columns in types in which Parquet keeps every digit."""
        kinds = [_OF_128_BITS.sub("DECIMAL(38, 0)", str(kind)) for kind in rows.types]
        return rows.project(
            ", ".join(
                f"CAST(#{place + 1} AS {kinds[place]}) AS {quoted(name)}"
                for name, place in zip(self.names, self.places, strict=True)
            )
        )


def chosen(rows: "DuckDBPyRelation", columns: Sequence[str] | None = None) -> Chosen:
    """Choose columns of a relation, by default all."""
    # By their places: a query may give one name to several columns.
    names = rows.columns
    places = [*range(len(names))] if columns is None else [names.index(name) for name in columns]
    shown = _distinct([names[place] for place in places])
    times = [name for name, place in zip(shown, places, strict=True) if _TIME.fullmatch(str(rows.types[place]))]
    return Chosen(shown, times, places)


def fetched(db: "DuckDBPyConnection", rows: "DuckDBPyRelation") -> Iterator[tuple[Any, ...]]:
    """Run a relation's query, and yield its rows."""
    found = db.execute(rows.sql_query())
    while part := found.fetchmany(ROWS_AT_ONCE):
        yield from part


def csv_lines(
    columns: Sequence[str], times: Collection[str], rows: Iterable[Sequence[Any]], zone: tzinfo
) -> Iterator[str]:
    """Lay out rows as CSV (RFC 4180, with the line ends of Unix), under a line of the columns' names.

    Nulls are empty, lists are JSON.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    are_times = [name in times for name in columns]
    writer.writerow(columns)
    for row in rows:
        yield _line_of(buffer)
        writer.writerow([_csv_of(value, is_time, zone) for value, is_time in zip(row, are_times, strict=True)])
    yield _line_of(buffer)


def _line_of(buffer: io.StringIO) -> str:
    """Take the line that a CSV writer wrote. With another line end, some writers leave a bare CR without quotes."""
    line = buffer.getvalue().removesuffix("\r\n")
    buffer.seek(0)
    buffer.truncate()
    return f"{line}\n"


def json_row(row: Mapping[str, Any], times: Collection[str], zone: tzinfo) -> dict[str, object]:
    """A row as an object for JSON. `times` names the columns that hold microseconds since 1970."""
    # Decimals become text: a reader would take a JSON number for a binary fraction.
    return {name: json_value(value, name in times, zone) for name, value in row.items()}


def rfc3339(us: int, zone: tzinfo = UTC) -> str:
    """Microseconds since 1970 in RFC 3339, as a clock of the zone shows them.

    Years of other than four digits have a sign. No reading has one, but any program may write them into Kafka's times.
    """
    cycles = 0
    try:
        time = (_EPOCH + timedelta(microseconds=us)).astimezone(zone)
    except OverflowError:
        # Python knows the years 1 to 9999. The calendar repeats itself.
        cycles = us // _CYCLE_US
        time = (_EPOCH + timedelta(microseconds=us - cycles * _CYCLE_US)).astimezone(zone)
    year = time.year + cycles * _CYCLE_YEARS
    text = time.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return f"{year:04}{text[4:]}" if 0 <= year <= 9_999 else f"{year:+05}{text[4:]}"


def time_text(us: int | None, zone: tzinfo = UTC) -> str:
    """A time for a table, without a fraction of zeros."""
    return "-" if us is None else rfc3339(us, zone).replace(".000000", "")


def plain_text(value: Decimal) -> str:
    """A decimal without trailing zeros and without an exponent."""
    return f"{value.normalize():f}"


def _distinct(names: Sequence[str]) -> list[str]:
    """Names of columns, of which those that came before have a number behind them."""
    found: list[str] = []
    for name in names:
        number = found.count(name) + sum(each.startswith(f"{name}_") for each in found)
        found.append(f"{name}_{number + 1}" if name in found else name)
    return found


def json_value(value: object, is_time: bool, zone: tzinfo) -> object:  # noqa: FBT001 - a column's kind
    """A value of a row for JSON. Types that JSON lacks are left to `text_of`."""
    if is_time:
        return None if value is None else rfc3339(int(str(value)), zone)
    return _plain(value)


def _csv_of(value: object, is_time: bool, zone: tzinfo) -> str:  # noqa: FBT001 - a column's kind
    if value is None:
        return ""
    if is_time:
        return rfc3339(int(str(value)), zone)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return json.dumps(_plain(value), default=text_of, ensure_ascii=False)
    return plain_text(value) if isinstance(value, Decimal) else text_of(value)


def _plain(value: object) -> object:
    """A value whose structs are dictionaries: `json` would write a struct as a list."""
    if hasattr(value, "asDict"):
        return {name: _plain(member) for name, member in value.asDict().items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    # JSON has no NaN and no infinity.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def text_of(value: object) -> str:
    """A value as text, of a type that JSON and CSV lack."""
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    return str(value)
