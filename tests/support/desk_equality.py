"""Compares all that the desk answers with what Spark answers of the same tables: columns, types, and every row."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from deltalake import DeltaTable
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StructType, TimestampType

from spark.desk import tables
from spark.desk.asked import Asked, equal, where, within
from spark.desk.delta_source import type_of
from spark.desk.tables import VIEWS, Tables
from spark.views.views import open_all
from spark.views.windows_view import open_windows

TIMES = {"readings": "event_time", "windows": "window_start", "quarantine": "kafka_timestamp", "gaps": None}
"""Views, and the column that a span of time limits."""
SIZES_S = (60, 600, 86_400)
"""Lengths of windows that are compared."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One answer of both engines."""

    name: str
    rows: int
    """Rows of Spark's answer."""
    different: list[str]
    """Rows that only one of both has."""


def expect_same_answers(
    spark: SparkSession,
    warehouse: str,
    sizes_s: Iterable[int] = SIZES_S,
    views: Iterable[str] = VIEWS,
    moment: Path | None = None,
) -> int:
    """Fail, and show rows that differ, unless both engines answer the same. Returns how many rows were compared.

    `moment` is a folder to be made, for a warehouse that is written meanwhile: see `compare`.
    """
    rows = 0
    for compared in compare(spark, warehouse, sizes_s, views, moment):
        assert not compared.different, "\n".join(
            [f"{compared.name}: {len(compared.different)} rows differ, among {compared.rows}", *compared.different[:12]]
        )
        rows += compared.rows
    return rows


def compare(
    spark: SparkSession,
    warehouse: str,
    sizes_s: Iterable[int] = SIZES_S,
    views: Iterable[str] = VIEWS,
    moment: Path | None = None,
) -> Iterator[Compared]:
    """Compare both engines' answers, view by view. Fails if columns or their types differ.

    The desk sees each table as it was when it first named it, and Spark as it is when a query begins. If others write
    meanwhile, Spark therefore reads `moment`: a folder that gets the versions that the desk saw, and no later ones.
    """
    desk = tables.open(warehouse)
    queries = {name: desk.select(name) for name in views}
    of_sizes = {size_s: desk.windows_sql(size_s=size_s) for size_s in sizes_s}
    if moment is not None:
        _link_what_was_seen(desk, moment)
    of_spark = warehouse if moment is None else str(moment)
    for name, frame in open_all(spark, of_spark, [*queries]).items():
        yield _compared(name, frame, desk, queries[name])
    for size_s, query in of_sizes.items():
        yield _compared(f"windows of {size_s} s", open_windows(spark, of_spark, size_s), desk, query)


def _link_what_was_seen(desk: Tables, folder: Path) -> None:
    """Make tables of the files and of the commits that the desk's question saw."""
    for path, table in desk.source.seen.items():
        if table is None:
            continue
        place = folder / Path(path).relative_to(desk.warehouse)
        for uri in table.file_uris():
            file = Path(unquote(uri.removeprefix("file://")))
            linked = place / file.relative_to(path)
            linked.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, linked)
        (place / "_delta_log").mkdir(parents=True)
        for note in Path(path, "_delta_log").iterdir():
            number = re.match(r"(\d{20})\.", note.name)
            if number is not None and int(number[1]) <= table.version():
                shutil.copy2(note, place / "_delta_log")
        assert DeltaTable(str(place)).version() == table.version()


def expect_limits_to_choose(
    warehouse: str, devices: Sequence[str | None], spans_us: Sequence[tuple[int | None, int | None]]
) -> int:
    """Fail unless a question's limits leave out rows, and change nothing else. Returns how many rows were chosen."""
    desk = tables.open(warehouse)
    chosen = 0
    for name, time in TIMES.items():
        desk.source.db.execute(f"CREATE TEMP TABLE all_{name} AS {desk.select(name)}")
        for device in devices:
            for since_us, until_us in spans_us if time else [(None, None)]:
                asked = Asked(device, since_us=since_us, until_us=until_us)
                limits = equal(asked, "device") + (within(time, asked) if time else [])
                wanted = Counter(map(_exact, desk.source.rows(f"SELECT * FROM all_{name} {where(limits)}")))
                assert Counter(map(_exact, desk.source.rows(desk.select(name, asked)))) == wanted, f"{name}: {asked}"
                chosen += wanted.total()
    return chosen


def _compared(name: str, frame: DataFrame, desk: Tables, query: str) -> Compared:
    relation = desk.source.db.sql(query)
    by_desk = {
        column: str(kind).replace('"', "") for column, kind in zip(relation.columns, relation.types, strict=True)
    }
    by_spark = {field.name: _duckdb_type(field.dataType) for field in frame.schema.fields}
    assert [*by_desk.items()] == [*by_spark.items()], f"{name}: {by_desk.items() ^ by_spark.items()}"
    times = [field.name for field in frame.schema.fields if isinstance(field.dataType, TimestampType)]
    shown = frame.select(*(F.unix_micros(each).alias(each) if each in times else frame[each] for each in frame.columns))
    plain = relation.project(
        ", ".join(f'epoch_us("{each}")' if each in times else f'"{each}"' for each in frame.columns)
    )
    wanted = Counter(map(_exact, shown.collect()))
    found = Counter(map(_exact, plain.fetchall()))
    only = [f"{who}: {row}" for who, rows in (("spark", wanted - found), ("desk", found - wanted)) for row in rows]
    return Compared(name, wanted.total(), sorted(only))


def _exact(row: Iterable[Any]) -> str:
    """A row as text, in which equal values of both engines are spelt alike: floats to the last bit."""
    return repr(tuple(map(_plain, row)))


def _plain(value: Any) -> Any:
    match value:
        case Row():
            return _plain(value.asDict())
        case dict():
            return {name: _plain(member) for name, member in sorted(value.items())}
        case list():
            return [_plain(member) for member in value]
        case bytearray():
            return bytes(value)
        case float():
            return value.hex()
        case _:
            return value


def _duckdb_type(kind: DataType) -> str:
    """The name of a type as DuckDB prints it."""
    match kind:
        case ArrayType():
            return f"{_duckdb_type(kind.elementType)}[]"
        case MapType():
            return f"MAP({_duckdb_type(kind.keyType)}, {_duckdb_type(kind.valueType)})"
        case StructType():
            members = [f"{each.name} {_duckdb_type(each.dataType)}" for each in kind.fields]
            return f"STRUCT({', '.join(members)})"
        case DecimalType():
            return f"DECIMAL({kind.precision},{kind.scale})"
        case _:
            return type_of(kind.jsonValue()).replace('"', "")
