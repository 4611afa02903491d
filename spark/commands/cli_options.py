"""Options and printing of rows that the commands of `sluice-cloud` share."""

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gateway.host.terminal import say
from gateway.host.terminal_text import hanging, harmless_json, terminal_width
from gateway.toml_files.mistakes import ConfigError
from spark.commands.failure_words import known
from spark.commands.table_text import (
    cell_text,
    columns_left_out,
    rfc3339,
    table_lines,
    table_width,
    time_text,
    to_the_second,
)
from spark.decode.streams_file import load_streams
from spark.engine.warehouse_folder import absolute, may_be_warehouse, no_tables
from spark.source.kafka_reach import unreachable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark.decode.codec_declarations import Streams

# Commands import Spark inside their functions: the import takes a second, and `--help` does not need it.


def absolute_path(_context: click.Context, _parameter: click.Parameter, warehouse: str) -> str:
    path = known().warehouse = absolute(warehouse)
    return path


def existing(context: click.Context, parameter: click.Parameter, warehouse: str) -> str:
    """Return the absolute path of a warehouse, or fail before Spark starts, which takes seconds."""
    path = absolute_path(context, parameter, warehouse)
    if not may_be_warehouse(path):
        raise click.ClickException(no_tables(path))
    return path


def declared_streams(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> "Streams | None":
    """Read the file of `--streams`. The message about a wrong file has all its mistakes."""
    if path is None:
        return None
    try:
        return load_streams(path)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


warehouse_option = click.option(
    "--warehouse", required=True, metavar="PATH", callback=existing, help="Folder of the tables."
)
device_option = click.option("--device", help="Show this device only.")
limit_option = click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=20,
    show_default=True,
    help="Most rows to print. A note says if there are more.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
streams_option = click.option(
    "--streams",
    type=click.Path(path_type=Path),
    metavar="FILE",
    callback=declared_streams,
    help="streams.toml, which says how payloads are read. Default: as the warehouse was last written.",
)
kafka_config_option = click.option(
    "--kafka-config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Java properties for Kafka's client (TLS, SASL). If the file holds secrets, run chmod 0400 on it.",
)
kafka_option = click.option(
    "--kafka-option",
    "kafka_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="One setting of Kafka's client that is no secret. Repeat it for more settings.",
)


def expect_kafka(bootstrap: str) -> None:
    """Fail at once if no broker answers. Spark would take minutes to say so."""
    known().reads_kafka = True
    reason = unreachable(bootstrap)
    if reason is not None:
        raise click.ClickException(f"Kafka cannot be reached ({reason}): check --bootstrap, and that the broker runs")


def kafka_settings(given: tuple[str, ...], config: Path | None) -> dict[str, str]:
    """Return the settings of --kafka-option and --kafka-config by their Kafka names."""
    from spark.source.kafka_options import kafka_options  # noqa: PLC0415

    options = kafka_options(given, config)
    known().kafka_options = options
    return options


def print_rows(
    rows: "DataFrame", columns: Sequence[str], *, limit: int, as_json: bool, spare: Sequence[str] = ()
) -> None:
    """Print the first rows, and say whether there are more.

    A terminal shows only the columns that fit. The first columns of `spare` are left out first.
    """
    times = [name for name, kind in rows.dtypes if kind == "timestamp" and name in columns]
    # One row beyond the limit shows that there are more.
    print_found(_collected(rows.limit(limit + 1), columns, times), columns, times, limit, as_json=as_json, spare=spare)


def print_found(  # noqa: PLR0913 - the parts of a table
    found: list[dict[str, Any]],
    columns: Sequence[str],
    times: Collection[str],
    limit: int,
    *,
    as_json: bool,
    spare: Sequence[str] = (),
) -> None:
    """Print at most `limit` rows. One row beyond the limit means that there are more.

    `times` names the columns that hold microseconds since 1970.
    """
    if len(found) > limit:
        found.pop()
        _beside(f"there are more than these {limit} rows: --limit N shows N of them")
    if as_json:
        for row in found:
            plain = {name: _time_of(value) if name in times else _plain(value) for name, value in row.items()}
            # Decimals become text: a reader would take a JSON number for a binary fraction.
            say_json(plain)
        return
    cells = [
        {name: time_text(value) if name in times else cell_text(name, value) for name, value in row.items()}
        for row in found
    ]
    _print_table(cells, columns, times, spare)


def _print_table(
    cells: list[dict[str, str]], columns: Sequence[str], times: Collection[str], spare: Sequence[str]
) -> None:
    """Print a table that fits the terminal. If it is too wide, cut times to the second, then leave columns out."""
    width = terminal_width()
    whole = cells
    if table_width(columns, cells) > width:
        cells = [row | {name: to_the_second(row[name]) for name in times} for row in cells]
    left_out = columns_left_out(columns, cells, spare, width)
    shown = [name for name in columns if name not in left_out]
    for line in table_lines(shown, cells, times, width):
        say(line)
    if not cells:
        say("(none)", err=True)
    spared = [f"no room here for {', '.join(left_out)}"] if left_out else []
    if any(short[name] != full[name] for short, full in zip(cells, whole, strict=True) for name in shown):
        spared.append("times are cut to the second")
    if spared:
        _beside(f"{', and '.join(spared)}: --json shows all, and so does a wider terminal")


def say_json(value: object) -> None:
    """Print a value as one line of JSON. Types that JSON lacks become text."""
    say(harmless_json(json.dumps(value, default=_text_of)))


def _beside(words: str) -> None:
    """Print a note about the rows to stderr."""
    say(hanging(words, 0, sys.stderr), err=True)


def _collected(rows: "DataFrame", columns: Sequence[str], times: Collection[str]) -> list[dict[str, Any]]:
    """Rows, with times as microseconds: Spark would give Python timestamps in the local time zone."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    found = rows.select(
        *(F.unix_micros(rows[column]).alias(column) if column in times else rows[column] for column in columns)
    )
    return [row.asDict() for row in found.collect()]


def _time_of(us: int | None) -> str | None:
    return None if us is None else rfc3339(us)


def _plain(value: object) -> object:
    """A value whose structs are dictionaries: `json` would write a struct as a list."""
    if hasattr(value, "asDict"):
        return {name: _plain(member) for name, member in value.asDict().items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return value


def _text_of(value: object) -> str:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    return str(value)
