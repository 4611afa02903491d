"""Reads Delta tables with DuckDB: the files that a table has now, or those of them that may hold an answer."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from weakref import finalize

import duckdb
from deltalake import DeltaTable

from spark.desk.asked import quoted, text
from spark.engine.told_error import ToldError
from spark.engine.warehouse_folder import is_local

if TYPE_CHECKING:
    from spark.desk.remote_files import RemoteFiles

TYPES = {"string": "VARCHAR", "long": "BIGINT", "integer": "INTEGER", "binary": "BLOB", "float": "FLOAT"}
"""DuckDB's names of Delta's types, where they differ."""
VALUES_KEPT = 200_000
"""Rows that Python made and that former questions read: their answers may not be read yet."""
CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}
SPILLS: set[str] = set()
"""Folders of this process for what memory cannot hold. If a signal ends it, whoever gets the signal removes them."""
STATISTIC = re.compile(r'"((?:min|max|null_count|partition)\.\w+|num_records)"')


class NoTableError(ToldError):
    """A table is not there, which every warehouse has. The message says what makes it."""


class Source:
    """The tables of one warehouse as SQL. A question sees each table as it was when it first named it."""

    def __init__(self, beside: "Source | None" = None) -> None:
        """Open a database in memory. `beside` shares its own, for a connection that another thread uses."""
        self.db: duckdb.DuckDBPyConnection = duckdb.connect(config=CONFIG) if beside is None else beside.db.cursor()
        if beside is None:
            # By default DuckDB spills what memory cannot hold into the folder where a command was started.
            spill = mkdtemp(prefix="sluice-desk-")
            SPILLS.add(spill)
            finalize(self, _remove_spill, spill)
            self.db.execute(f"SET temp_directory = {text(spill)}")
        # Timestamps have no zone here. They are UTC.
        self.db.execute("SET TimeZone = 'UTC'")
        self._numbers = count()
        self.seen: dict[str, DeltaTable | None] = {}
        """Tables as this question sees them, by their paths, in the order in which it named them. None is not there."""
        self._files_elsewhere: RemoteFiles | None = None if beside is None else beside._files_elsewhere  # noqa: SLF001 - its own kind
        self._values: dict[str, int] = {}
        """Tables that Python made, with their numbers of rows."""

    def renew(self) -> None:
        """Begin another question, which sees what was committed by now.

        Answers to former ones can be read until `VALUES_KEPT` is passed.
        """
        self.seen.clear()
        kept = 0
        for name, rows in reversed([*self._values.items()]):
            kept += rows + 1
            if kept > VALUES_KEPT:
                self.db.execute(f"DROP TABLE {name}")
                del self._values[name]

    def opened(self, path: str) -> DeltaTable | None:
        """Open a table for this question; None if it is not there."""
        if path not in self.seen:
            self.seen[path] = table_now(path)
        return self.seen[path]

    def table(self, path: str, also: Mapping[str, str] | None = None, files: str | None = None) -> str:
        """Return a SELECT of a table's rows.

        `also` names columns with their types. Columns that the table lacks are null. `files` is a condition on Delta's
        statistics of a file, such as `"max.ordinal" > 7`: only files that meet it are read. Raises NoTableError.
        """
        (found,) = self.parts(path, also, files)
        return found

    def optional(self, path: str, columns: Mapping[str, str]) -> str:
        """Return a SELECT of the rows of a table that need not be there. Then it has these columns and no rows."""
        return self.table(path, columns) if self.opened(path) else f"SELECT {_nulls(columns)} WHERE FALSE"

    def parts(self, path: str, also: Mapping[str, str] | None, *files: str | None) -> list[str]:
        """Return a SELECT for each condition on files, as `table` does. All are of one version of the table."""
        wanted = also or {}
        table = self._expected(path)
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
            folder = path if is_local(path) else self._remote(path, table)
            places = [f"{folder}/{unquote(each)}" for each in paths]
            names = ", ".join(text(no_pattern(place) if folder == path else place) for place in places)
            read = f"read_parquet([{names}], union_by_name = true, hive_partitioning = false)"
            # A column that was added later is in none of the older files.
            rows = f"SELECT * FROM {read} UNION ALL BY NAME {declared}" if paths else declared
            found.append(f"SELECT {shown} FROM ({rows})")
        return found

    def columns(self, path: str) -> list[str]:
        """The names of a table's columns; none if there is no table."""
        table = self.opened(path)
        return [] if table is None else [each["name"] for each in json.loads(table.schema().to_json())["fields"]]

    def has_rows(self, path: str) -> bool:
        """True if a table has files."""
        table = self.opened(path)
        return table is not None and bool(table.file_uris())

    def property(self, path: str, name: str) -> str:
        """A property of a table. Raises KeyError if it has none of this name, and NoTableError."""
        return str(self._expected(path).metadata().configuration[name])

    def statistics(self, path: str, figure: str) -> Any:
        """Compute a figure from Delta's statistics of a table's files; None if there is no table or no statistic."""
        table = self.opened(path)
        found = None if table is None else self._of_files(table, figure)
        return None if found is None else found[0][0]

    def values(self, columns: Mapping[str, str], rows: Sequence[Sequence[object]]) -> str:
        """Return a SELECT of rows that Python made. `columns` are their names and types."""
        name = f"values_{next(self._numbers)}"
        declared = ", ".join(f"{quoted(each)} {kind}" for each, kind in columns.items())
        self.db.execute(f"CREATE TEMP TABLE {name} ({declared})")
        self._values[name] = len(rows)
        if rows:
            values = ", ".join(f"unnest(CAST(? AS {kind}[]))" for kind in columns.values())
            self.db.execute(f"INSERT INTO {name} SELECT {values}", [list(each) for each in zip(*rows, strict=True)])
        return f"SELECT * FROM {name}"

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Run a query and return its rows."""
        return self.db.execute(query).fetchall()

    def _remote(self, path: str, table: DeltaTable) -> str:
        """The folder of a table that is not on this machine, as DuckDB reads it."""
        if self._files_elsewhere is None:
            from spark.desk.remote_files import RemoteFiles  # noqa: PLC0415 - most warehouses are here

            self._files_elsewhere = RemoteFiles()
            self.db.register_filesystem(self._files_elsewhere)
        return self._files_elsewhere.folder_of(path, table)

    def _expected(self, path: str) -> DeltaTable:
        table = self.opened(path)
        if table is None:
            raise NoTableError(f"the table {path} is not there yet: `sluice-cloud ingest` makes it at its start")
        return table

    def version(self, path: str) -> int:
        """Return the number of a table's last commit; -1 if there is no table."""
        table = self.opened(path)
        return -1 if table is None else table.version()

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


def _remove_spill(folder: str) -> None:
    rmtree(folder, ignore_errors=True)
    SPILLS.discard(folder)


def table_now(path: str) -> DeltaTable | None:
    """Open a table as it is now; None if it is not there."""
    uri = Path(path).as_uri() if is_local(path) else path
    return DeltaTable(uri) if DeltaTable.is_deltatable(uri) else None


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
