"""Reads Delta tables with DuckDB: the files that a table has now, or those of them that may hold an answer."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from urllib.parse import unquote

import duckdb
from deltalake import DeltaTable

from spark.desk.asked import quoted, text
from spark.engine.told_error import ToldError

TYPES = {"string": "VARCHAR", "long": "BIGINT", "integer": "INTEGER", "binary": "BLOB", "float": "FLOAT"}
"""DuckDB's names of Delta's types, where they differ."""
STATISTIC = re.compile(r'"((?:min|max|null_count|partition)\.\w+|num_records)"')


class NoTableError(ToldError):
    """A table is not there, which every warehouse has. The message says what makes it."""


class Source:
    """The tables of one warehouse as SQL. Each text is of a table's version at the time of the call.

    With `opened`, a table stays at the version of its first use. It keeps the tables by path.
    """

    def __init__(self, opened: dict[str, DeltaTable] | None = None) -> None:
        self._kept = opened
        self.db = duckdb.connect(
            config={
                "python_enable_replacements": False,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            }
        )
        # By default DuckDB spills what memory cannot hold into the folder where a command was started.
        spill = Path(gettempdir()) / f"sluice-desk-{os.getpid()}"
        self.db.execute(f"SET temp_directory = {text(str(spill))}")
        # Timestamps have no zone here. They are UTC.
        self.db.execute("SET TimeZone = 'UTC'")
        self._numbers = count()

    def table(self, path: str, also: Mapping[str, str] | None = None, files: str | None = None) -> str:
        """Return a SELECT of a table's rows.

        `also` names columns with their types. Columns that the table lacks are null. `files` is a condition on Delta's
        statistics of a file, such as `"max.ordinal" > 7`: only files that meet it are read. Raises NoTableError.
        """
        (found,) = self.parts(path, also, files)
        return found

    def optional(self, path: str, columns: Mapping[str, str]) -> str:
        """Return a SELECT of the rows of a table that need not be there. Then it has these columns and no rows."""
        return self.table(path, columns) if self._is_table(path) else f"SELECT {_nulls(columns)} WHERE FALSE"

    def parts(self, path: str, also: Mapping[str, str] | None, *files: str | None) -> list[str]:
        """Return a SELECT for each condition on files, as `table` does. All are of one version of the table."""
        wanted = also or {}
        if not self._is_table(path):
            raise NoTableError(f"the table {path} is not there yet: `sluice-cloud ingest` makes it at its start")
        table = self._opened(path)
        fields = {each["name"]: each["type"] for each in json.loads(table.schema().to_json())["fields"]}
        missing = {name: kind for name, kind in wanted.items() if name not in fields}
        columns = [
            # Of times in UTC, as newer files have them. A cast would take six times as long.
            f"make_timestamp(epoch_us({quoted(name)})) AS {quoted(name)}" if kind == "timestamp" else quoted(name)
            for name, kind in fields.items()
        ]
        shown = ", ".join([*columns, _nulls(missing)] if missing else columns)
        declared = f"SELECT {_nulls({name: type_of(kind) for name, kind in fields.items()})} WHERE FALSE"
        found = []
        for condition in files:
            paths = self._files(table, condition)
            names = ", ".join(text(no_pattern(f"{path}/{unquote(each)}")) for each in paths)
            read = f"read_parquet([{names}], union_by_name = true, hive_partitioning = false)"
            # A column that was added later is in none of the older files.
            rows = f"SELECT * FROM {read} UNION ALL BY NAME {declared}" if paths else declared
            found.append(f"SELECT {shown} FROM ({rows})")
        return found

    def columns(self, path: str) -> list[str]:
        """The names of a table's columns; none if there is no table."""
        if not self._is_table(path):
            return []
        return [each["name"] for each in json.loads(self._opened(path).schema().to_json())["fields"]]

    def has_rows(self, path: str) -> bool:
        """True if a table has files."""
        return self._is_table(path) and bool(self._opened(path).file_uris())

    def property(self, path: str, name: str) -> str:
        """A property of a table. Raises KeyError if it has none of this name."""
        return str(self._opened(path).metadata().configuration[name])

    def statistics(self, path: str, figure: str) -> Any:
        """Compute a figure from Delta's statistics of a table's files; None if there is no table or no statistic."""
        if not self._is_table(path):
            return None
        found = self._of_files(self._opened(path), figure)
        return None if found is None else found[0][0]

    def values(self, columns: Mapping[str, str], rows: Sequence[Sequence[object]]) -> str:
        """Return a SELECT of rows that Python made. `columns` are their names and types."""
        name = f"values_{next(self._numbers)}"
        declared = ", ".join(f"{quoted(each)} {kind}" for each, kind in columns.items())
        self.db.execute(f"CREATE TEMP TABLE {name} ({declared})")
        if rows:
            values = ", ".join(f"unnest(CAST(? AS {kind}[]))" for kind in columns.values())
            self.db.execute(f"INSERT INTO {name} SELECT {values}", [list(each) for each in zip(*rows, strict=True)])
        return f"SELECT * FROM {name}"

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Run a query and return its rows."""
        return self.db.execute(query).fetchall()

    def version(self, path: str) -> int:
        """Return the number of a table's last commit; -1 if there is no table."""
        return self._opened(path).version() if self._is_table(path) else -1

    def _opened(self, path: str) -> DeltaTable:
        if self._kept is None:
            return DeltaTable(Path(path).as_uri())
        if path not in self._kept:
            self._kept[path] = DeltaTable(Path(path).as_uri())
        return self._kept[path]

    def _is_table(self, path: str) -> bool:
        return (self._kept is not None and path in self._kept) or DeltaTable.is_deltatable(Path(path).as_uri())

    def _files(self, table: DeltaTable, condition: str | None) -> list[str]:
        """The files that a table has, or those that meet a condition on Delta's statistics, as Delta's log has them."""
        wanted = "TRUE" if condition is None else f"num_records IS NULL OR coalesce({condition}, TRUE)"
        found = self._of_files(table, f"path FROM files WHERE {wanted}")
        return self._files(table, None) if found is None else [name for (name,) in found]

    def _of_files(self, table: DeltaTable, figure: str) -> list[tuple[Any, ...]] | None:
        """Rows from Delta's list of a table's files; None if Delta lacks one of the statistics."""
        files: Any = table.get_add_actions(flatten=True)
        if not set(STATISTIC.findall(figure)) <= set(files.schema.names):
            return None
        self.db.register("files", files)
        try:
            return self.rows(f"SELECT {figure}" if " FROM files" in figure else f"SELECT {figure} FROM files")
        finally:
            self.db.unregister("files")


def type_of(delta: Any) -> str:
    """Return the name of a type of Delta's in DuckDB."""
    if isinstance(delta, str):
        return TYPES.get(delta, delta.upper())
    if delta["type"] == "array":
        return f"{type_of(delta['elementType'])}[]"
    if delta["type"] == "map":
        return f"MAP({type_of(delta['keyType'])}, {type_of(delta['valueType'])})"
    members = ", ".join(f"{quoted(each['name'])} {type_of(each['type'])}" for each in delta["fields"])
    return f"STRUCT({members})"


def _nulls(columns: Mapping[str, str]) -> str:
    return ", ".join(f"CAST(NULL AS {kind}) AS {quoted(name)}" for name, kind in columns.items())


def no_pattern(path: str) -> str:
    """A path of which no character means others."""
    return re.sub(r"[*?\[]", lambda found: f"[{found[0]}]", path)
