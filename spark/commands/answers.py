"""Prints rows as a table, as JSON or as CSV, or writes them to a file."""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gateway.host.terminal import page, say
from gateway.host.terminal_text import counted, hanging, harmless_json, terminal_width
from spark.commands.table_text import (
    cell_text,
    columns_left_out,
    table_lines,
    table_width,
    to_the_second,
)
from spark.desk.asked import text
from spark.desk.row_text import chosen, csv_lines, fetched, json_row, text_of, time_text

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation
    from pyspark.sql import DataFrame

LIMIT = 20
"""Most rows that are printed, unless --limit says other."""
SUFFIXES = (".csv", ".parquet")
"""Endings of files that an answer can be written to."""
PAGE_SUFFIXES = (".html", ".htm")
"""Endings of pages."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an answer."""

    limit: int | None = LIMIT
    """Most rows; None for all."""
    as_json: bool = False
    as_csv: bool = False
    out: Path | None = None
    """File for the rows instead of standard output. Its suffix is one of SUFFIXES."""
    zone: tzinfo = UTC
    in_pages: bool = False
    """True if a table that is higher than the terminal goes to a pager."""

    @property
    def is_whole(self) -> bool:
        """True if rows go to a program, which gets more columns."""
        return self.as_json or self.as_csv or self.out is not None


def print_relation(
    db: "DuckDBPyConnection",
    rows: "DuckDBPyRelation",
    form: Form,
    columns: Sequence[str] | None = None,
    *,
    spare: Sequence[str] = (),
) -> int:
    """Print the first rows of a relation, or write them to a file. Returns how many these were.

    `columns` are shown, by default all. A terminal shows only those that fit. The first columns of `spare` are left out
    first.
    """
    if rows.columns == ["explain_key", "explain_value"]:
        for _, plan in rows.fetchall():
            say(plan)
        return 1
    shown, times, _ = found = chosen(rows, columns)
    kept = rows if form.limit is None else rows.limit(form.limit + (form.out is None))
    if form.out is not None and form.out.suffix == ".parquet":
        with replaced(form.out) as part:
            copy = f"COPY ({found.typed(kept).sql_query()}) TO {text(str(part))} (FORMAT parquet, COMPRESSION zstd)"
            ((count,),) = db.execute(copy).fetchall()
        beside(f"{counted(count, 'row')} written to {form.out}")
        return int(count)
    plain = found.plain(kept)
    if form.out is not None or (form.as_csv and form.limit is None):
        return _csv_out(csv_lines(shown, times, fetched(db, plain), form.zone), form.out)
    answer = plain.fetchall()
    print_found([dict(zip(shown, row, strict=True)) for row in answer], shown, times, form, spare=spare)
    return len(answer) if form.limit is None else min(len(answer), form.limit)


def print_frame(rows: "DataFrame", form: Form) -> None:
    """Print the first rows of a DataFrame of Spark's."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - only this engine needs it

    times = [name for name, kind in rows.dtypes if kind == "timestamp"]
    # As microseconds: Spark would give Python timestamps in the local time zone.
    shown = rows.select(*(F.unix_micros(name).alias(name) if name in times else rows[name] for name in rows.columns))
    # One row beyond the limit shows that there are more.
    found = shown.collect() if form.limit is None else shown.limit(form.limit + 1).collect()
    print_found([row.asDict() for row in found], rows.columns, times, form)


def print_found(
    found: list[dict[str, Any]],
    columns: Sequence[str],
    times: Collection[str],
    form: Form,
    *,
    spare: Sequence[str] = (),
) -> None:
    """Print at most `form.limit` rows. One row beyond the limit means that there are more.

    `times` names the columns that hold microseconds since 1970.
    """
    if form.limit is not None and len(found) > form.limit:
        found.pop()
        beside(f"there are more than these {form.limit} rows: --limit N shows N of them")
    if form.as_json:
        for row in found:
            say_json(json_row(row, times, form.zone))
        return
    if form.as_csv:
        _csv_out(csv_lines(columns, times, (tuple(row[name] for name in columns) for row in found), form.zone), None)
        return
    cells = [
        {name: time_text(value, form.zone) if name in times else cell_text(name, value) for name, value in row.items()}
        for row in found
    ]
    _print_table(cells, columns, times, spare, page if form.in_pages else say)


def say_json(value: object) -> None:
    """Print a value as one line of JSON. Types that JSON lacks become text."""
    say(harmless_json(json.dumps(value, default=text_of)))


def beside(words: str) -> None:
    """Print a note about the rows to stderr."""
    say(hanging(words, 0, sys.stderr), err=True)


def _csv_out(lines: Iterable[str], path: Path | None) -> int:
    """Print lines of CSV, or write them to a file and say so. Returns how many rows these are."""
    if path is None:
        count = sum(map(_put_line, lines)) - 1
        sys.stdout.flush()
        return count
    with replaced(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        count = sum(1 for line in lines if file.write(line)) - 1
    beside(f"{counted(count, 'row')} written to {path}")
    return count


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to write beside another, which it replaces once it is whole. Raises click.ClickException."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.touch()
        yield part
        part.replace(path)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def _put_line(line: str) -> int:
    if sys.stdout.isatty():
        say(line, nl=False)
    else:
        # A program gets what a file would hold, to the byte.
        sys.stdout.buffer.write(line.encode())
    return 1


def _print_table(
    cells: list[dict[str, str]],
    columns: Sequence[str],
    times: Collection[str],
    spare: Sequence[str],
    show: Callable[[str], None],
) -> None:
    """Print a table that fits the terminal. If it is too wide, cut times to the second, then leave columns out."""
    width = terminal_width()
    whole = cells
    if table_width(columns, cells) > width:
        cells = [row | {name: to_the_second(row[name]) for name in times} for row in cells]
    left_out = columns_left_out(columns, cells, spare, width)
    shown = [name for name in columns if name not in left_out]
    show("\n".join(table_lines(shown, cells, times, width)))
    if not cells:
        say("(none)", err=True)
    spared = [f"no room here for {', '.join(left_out)}"] if left_out else []
    if any(short[name] != full[name] for short, full in zip(cells, whole, strict=True) for name in shown):
        spared.append("times are cut to the second")
    if spared:
        beside(f"{', and '.join(spared)}: --json shows all, and so does a wider terminal")
