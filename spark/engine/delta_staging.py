"""Writes rows to a Delta table's folder, where they can be read before they are committed, or never committed.

It uses Delta's own transaction, because PySpark's writers always write and commit in one step.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.engine.built_once import built_once
from spark.engine.made_file import MadeFile

CHECKPOINT_INTERVAL: Final = {"delta.checkpointInterval": "50"}
"""Commits between two checkpoints, as a property of tables that each batch appends to. A checkpoint lists all files of
the table. With Delta's default, 10, every tenth batch takes a second or more longer, and the more files, the longer."""


class AppendTable:
    """A Delta table that this process alone appends to. The commit numbers are read once and then kept in memory."""

    def __init__(self, spark: SparkSession, path: str, schema: StructType) -> None:
        """Read the commit numbers of the Delta table at `path`, which must exist. `schema` has its columns."""
        self.spark = spark
        self.path = path
        self.schema = schema
        self._numbers = commit_numbers(spark, path)

    def last(self, application: str) -> int:
        """The number of an application's last commit; -1 if it made none."""
        return self._numbers.get(application, -1)

    def begin(self) -> "StagedAppend":
        return StagedAppend(self)

    def append(self, rows: DataFrame, numbers: dict[str, int]) -> None:
        """Write and commit in one step, or do nothing if the first of the numbers was committed before."""
        application, number = next(iter(numbers.items()))
        if self.last(application) < number:
            staged = self.begin()
            staged.write(rows)
            staged.commit(numbers)

    def rows(self, files: Sequence[Any]) -> DataFrame:
        """Read files of the table, committed or not."""
        if not files:
            return self.spark.createDataFrame([], self.schema)
        paths = [f"{self.path}/{file.path()}" for file in files]
        return self.spark.read.schema(self.schema).option("basePath", self.path).parquet(*paths)

    def committed(self, numbers: dict[str, int]) -> None:
        self._numbers |= numbers


class StagedAppend:
    """One append that is not committed yet. If it never is, a vacuum removes its files."""

    def __init__(self, table: AppendTable) -> None:
        self._table = table
        # Delta has no Python interface for this. Its Scala classes may change, so the versions of its jars are pinned.
        none = _no_option()
        self._transaction = delta_log(table.spark, table.path).startTransaction(none, none)
        self._files: list[Any] = []

    def write(self, rows: DataFrame, *, beside: int = 0) -> None:
        """Write the rows, which have the table's columns.

        They replace rows that were written before, except those of the first `beside` files.
        """
        iterator = self._transaction.writeFiles(java_frame(rows.select(*_in_order(self._table.schema)))).iterator()
        del self._files[beside:]
        while iterator.hasNext():
            self._files.append(iterator.next())

    def take(self, files: Sequence[MadeFile]) -> None:
        """Take files that executors made. They replace rows that were written before."""
        from_json = jvm_of(self._table.spark).org.apache.spark.sql.delta.actions.Action.fromJson
        self._files = [from_json(file.action) for file in files]
        for file in files:
            if file.content is not None:
                write_file(self._table.spark, f"{self._table.path}/{file.name}", file.content)

    @property
    def version(self) -> int:
        """The table's version when this append began."""
        return int(self._transaction.snapshot().version())

    def rows(self, first: int = 0, end: int | None = None) -> DataFrame:
        """Read the written rows, or those of some of their files."""
        return self._table.rows(self._files[first:end])

    def files(self, condition: str) -> list[Any]:
        """Files of the table when this append began that meet a condition on Delta's list of files."""
        return list(self._transaction.snapshot().allFiles().filter(condition).collectAsList())

    def commit(
        self, numbers: dict[str, int], *, instead_of: str | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        """Commit the rows written last, with `tags` in Delta's log, and a commit number for each application.

        `instead_of` is a condition on Delta's list of files. The same commit removes the files that meet it, of those
        in the table when this append began. Files that others append meanwhile stay. If others remove one of the files
        meanwhile, the commit fails.
        """
        jvm = jvm_of(self._table.spark)
        actions = jvm.java.util.ArrayList()
        for file in self._files:
            actions.add(self._with(file, {"tags": dict(tags)}) if tags else file)
        if instead_of is not None:
            for file in self.files(instead_of):
                actions.add(file.remove())
        now = jvm.scala.Some(round(time.time() * 1000))
        set_transaction = jvm.org.apache.spark.sql.delta.actions.SetTransaction
        for application, number in numbers.items():
            actions.add(set_transaction(application, number, now))
        self._commit(actions)
        self._table.committed(numbers)

    def commit_same_rows(self, instead_of: Sequence[Any], tags: Mapping[str, str]) -> None:
        """Commit the rows written last in place of the files that hold just these rows, with `tags` in Delta's log.

        Delta counts this as no change, so an append-only table takes it. Files that others append meanwhile stay. If
        others remove one of the files meanwhile, the commit fails.
        """
        jvm = jvm_of(self._table.spark)
        actions = jvm.java.util.ArrayList()
        for file in self._files:
            actions.add(self._with(file, {"dataChange": False, "tags": dict(tags)}))
        now = round(time.time() * 1000)
        for file in instead_of:
            actions.add(file.removeWithTimestamp(now, False))
        self._commit(actions)

    def _with(self, file: Any, changes: Mapping[str, object]) -> Any:
        action = json.loads(file.json())
        action["add"] |= changes
        return jvm_of(self._table.spark).org.apache.spark.sql.delta.actions.Action.fromJson(json.dumps(action))

    def _commit(self, actions: Any) -> None:
        sequence = jvm_of(self._table.spark).org.apache.spark.api.python.PythonUtils.toSeq(actions)
        self._transaction.commit(sequence, _append_operation())


def commit_numbers(spark: SparkSession, path: str) -> dict[str, int]:
    """The number of each application's last commit to a table."""
    now = snapshot(spark, path)
    # The checksum file of a commit has them. If it is missing, a Spark job reads the log: a second for each table.
    checksum = now.checksumOpt()
    known = checksum.get().setTransactions() if checksum.isDefined() else _no_option()
    iterator = (known.get() if known.isDefined() else now.setTransactions()).iterator()
    numbers: dict[str, int] = {}
    while iterator.hasNext():
        transaction = iterator.next()
        numbers[str(transaction.appId())] = int(transaction.version())
    return numbers


def make_table(
    spark: SparkSession,
    path: str,
    schema: StructType,
    *,
    partition: str | None = None,
    properties: Mapping[str, str] | None = None,
) -> None:
    """Make a Delta table if there is none, or add the columns that a table of an earlier release lacks."""
    # No command runs for a table that is whole: to plan one takes five times as long as to look.
    now = snapshot(spark, path)
    if _is_made(now):
        _add_columns(spark, path, schema, now)
        return
    table = DeltaTable.createIfNotExists(spark).location(path).addColumns(schema)
    if partition is not None:
        table = table.partitionedBy(partition)
    for name, value in (properties or {}).items():
        table = table.property(name, value)
    table.execute()


def table_exists(spark: SparkSession, path: str) -> bool:
    """Tell whether there is a Delta table."""
    return _is_made(snapshot(spark, path))


def add_missing_columns(spark: SparkSession, path: str, schema: StructType) -> None:
    """Add the columns that a table of an earlier release lacks. Rows that it holds are null in them."""
    _add_columns(spark, path, schema, snapshot(spark, path))


def _is_made(now: Any) -> bool:
    return int(now.version()) >= 0


def _add_columns(spark: SparkSession, path: str, schema: StructType, now: Any) -> None:
    there = {field["name"] for field in json.loads(now.schema().json())["fields"]}
    for column in schema:
        if column.name not in there:
            spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMNS ({column.name} {column.dataType.simpleString()})")


def with_missing_columns(table: DataFrame, schema: StructType) -> DataFrame:
    """Add the columns that a table of an earlier release lacks to the DataFrame alone, as nulls."""
    missing = {column.name: F.lit(None).cast(column.dataType) for column in schema if column.name not in table.columns}
    return table.withColumns(missing) if missing else table


def is_empty(spark: SparkSession, path: str) -> bool:
    """Tell whether a table has no rows. No Spark job runs if Delta's checksum file has the size."""
    return table_bytes(spark, path) == 0


def table_bytes(spark: SparkSession, path: str) -> int:
    """Bytes of a table's files. No Spark job runs if Delta's checksum file has them."""
    now = snapshot(spark, path)
    checksum = now.checksumOpt()
    return int(checksum.get().tableSizeBytes() if checksum.isDefined() else now.sizeInBytes())


def open_or_empty(spark: SparkSession, path: str, name: str, schema: str) -> DataFrame:
    """Return a table, and make it the temporary view `name`. If there is no table yet, the view has no rows.

    Columns that a table of an earlier release lacks are null.
    """
    columns = cast("StructType", StructType.fromDDL(schema))
    if DeltaTable.isDeltaTable(spark, path):
        view = spark.read.format("delta").load(path)
        missing = [field for field in columns if field.name not in view.columns]
        view = view.select("*", *(F.lit(None).cast(field.dataType).alias(field.name) for field in missing))
    else:
        view = spark.createDataFrame([], columns)
    view.createOrReplaceTempView(name)
    return view


def pinned(spark: SparkSession, path: str) -> DataFrame:
    """Return a table at its present version. Without this, each query would read the version of its own start."""
    return spark.read.format("delta").option("versionAsOf", int(snapshot(spark, path).version())).load(path)


def delta_log(spark: SparkSession, path: str) -> Any:
    """Delta's `DeltaLog` object of a table."""
    session = cast("Any", spark)._jsparkSession  # noqa: SLF001 - PySpark has no other way to its JVM
    return jvm_of(spark).org.apache.spark.sql.delta.DeltaLog.forTable(session, path)


def snapshot(spark: SparkSession, path: str) -> Any:
    """Delta's `Snapshot` object of a table's newest version."""
    return delta_log(spark, path).update(False, _no_option(), _no_option())


def write_file(spark: SparkSession, path: str, content: bytes) -> None:
    """Write a file on any file system that Spark knows."""
    session, place = cast("Any", spark)._jsparkSession, jvm_of(spark).org.apache.hadoop.fs.Path(path)  # noqa: SLF001
    stream = place.getFileSystem(session.sessionState().newHadoopConf()).create(place)
    try:
        stream.write(content)
    finally:
        stream.close()


def jvm_of(spark: SparkSession) -> Any:
    return cast("Any", spark)._jvm  # noqa: SLF001


def java_frame(frame: DataFrame) -> Any:
    return cast("Any", frame)._jdf  # noqa: SLF001


@built_once
def _in_order(schema: StructType) -> list[Column]:
    return [F.col(field.name).cast(field.dataType) for field in schema]


@built_once
def _append_operation() -> Any:
    jvm = jvm_of(SparkSession.active())
    write = getattr(jvm.org.apache.spark.sql.delta, "DeltaOperations$Write")
    return write(jvm.org.apache.spark.sql.SaveMode.Append, *[_no_option()] * 8)


@built_once
def _no_option() -> Any:
    return jvm_of(SparkSession.active()).scala.Option.empty()
