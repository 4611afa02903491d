"""Rows that are written to a Delta table's folder first, looked at, and committed afterwards, or never.

Delta's own transaction does it: PySpark's writers can only do both at once.
"""

import time
from typing import Any, cast

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.engine.built_once import Projection, built_once

CHECKPOINT_INTERVAL = ("delta.checkpointInterval", "50")
"""Property of tables that each batch appends to: after so many commits Delta writes down which files the table has, all
of them. With its default, 10, that is a second and more of every tenth batch, and ever more with the history."""


class AppendTable:
    """A Delta table that this process alone appends to: who committed what is asked of it once, and then remembered."""

    def __init__(self, spark: SparkSession, path: str, schema: StructType) -> None:
        """`path` is of a Delta table that exists, `schema` its columns."""
        self.spark = spark
        self.path = path
        self.schema = schema
        self._numbers = commit_numbers(spark, path)

    def last(self, application: str) -> int:
        """The number of the last commit that an application made; -1 where it made none."""
        return self._numbers.get(application, -1)

    def begin(self) -> "StagedAppend":
        return StagedAppend(self)

    def append(self, rows: DataFrame, numbers: dict[str, int], *, instead_of: str | None = None) -> None:
        """Write and commit at once; nothing happens if the first of the numbers was committed before.

        `instead_of` is as `StagedAppend.commit` has it.
        """
        application, number = next(iter(numbers.items()))
        if self.last(application) < number:
            staged = self.begin()
            staged.write(rows)
            staged.commit(numbers, instead_of=instead_of)

    def committed(self, numbers: dict[str, int]) -> None:
        self._numbers |= numbers


class StagedAppend:
    """One append in the making. What is never committed is rubbish that a vacuum clears away."""

    def __init__(self, table: AppendTable) -> None:
        self._table = table
        # Delta's classes have no Python side; the versions of its jars are pinned.
        none = _no_option()
        self._transaction = delta_log(table.spark, table.path).startTransaction(none, none)
        self._files: list[Any] = []

    def write(self, rows: DataFrame) -> None:
        """Write the rows, which have the table's columns. What was written before is given up."""
        iterator = self._transaction.writeFiles(java_frame(_in_order(self._table.schema).of(rows))).iterator()
        self._files = []
        while iterator.hasNext():
            self._files.append(iterator.next())

    @property
    def version(self) -> int:
        """The version of the table that this append began at."""
        return int(self._transaction.snapshot().version())

    def rows(self) -> DataFrame:
        """Read what was written."""
        spark, path, schema = self._table.spark, self._table.path, self._table.schema
        paths = [f"{path}/{file.path()}" for file in self._files]
        if not paths:
            return spark.createDataFrame([], schema)
        return spark.read.schema(schema).option("basePath", path).parquet(*paths)

    def commit(self, numbers: dict[str, int], *, instead_of: str | None = None) -> None:
        """Commit what was written last, and the number of this commit for each of its applications.

        `instead_of` names files of the version that it began at, by a condition on Delta's list of them: they are
        removed by the same commit. What others append meanwhile stays; that they remove one of these raises.
        """
        jvm = jvm_of(self._table.spark)
        actions = jvm.java.util.ArrayList()
        for file in self._files:
            actions.add(file)
        if instead_of is not None:
            for file in self._transaction.snapshot().allFiles().filter(instead_of).collectAsList():
                actions.add(file.remove())
        now = jvm.scala.Some(round(time.time() * 1000))
        set_transaction = jvm.org.apache.spark.sql.delta.actions.SetTransaction
        for application, number in numbers.items():
            actions.add(set_transaction(application, number, now))
        sequence = jvm.org.apache.spark.api.python.PythonUtils.toSeq(actions)
        self._transaction.commit(sequence, _append_operation())
        self._table.committed(numbers)


def commit_numbers(spark: SparkSession, path: str) -> dict[str, int]:
    """The number of the last commit of each application that ever committed to a table."""
    now = snapshot(spark, path)
    # They stand in the checksum file of each commit. Where they do not, a job reads the log: a second for each table.
    checksum = now.checksumOpt()
    known = checksum.get().setTransactions() if checksum.isDefined() else _no_option()
    iterator = (known.get() if known.isDefined() else now.setTransactions()).iterator()
    numbers: dict[str, int] = {}
    while iterator.hasNext():
        transaction = iterator.next()
        numbers[str(transaction.appId())] = int(transaction.version())
    return numbers


def add_missing_columns(spark: SparkSession, path: str, schema: StructType) -> None:
    """Add the columns that a table lacks because an earlier program made it; what it holds is null there."""
    there = set(spark.read.format("delta").load(path).columns)
    for column in schema:
        if column.name not in there:
            spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMNS ({column.name} {column.dataType.simpleString()})")


def with_missing_columns(table: DataFrame, schema: StructType) -> DataFrame:
    """Read a table that an earlier program made as if it had these columns: null where it lacks one."""
    missing = {column.name: F.lit(None).cast(column.dataType) for column in schema if column.name not in table.columns}
    return table.withColumns(missing) if missing else table


def is_empty(spark: SparkSession, path: str) -> bool:
    """Tell whether a table has no rows, without a job where Delta has noted it."""
    return table_bytes(spark, path) == 0


def table_bytes(spark: SparkSession, path: str) -> int:
    """The size of a table's files, without a job where Delta has noted it."""
    now = snapshot(spark, path)
    checksum = now.checksumOpt()
    return int(checksum.get().tableSizeBytes() if checksum.isDefined() else now.sizeInBytes())


def open_or_empty(spark: SparkSession, path: str, name: str, schema: str) -> DataFrame:
    """Return a table, which SQL then finds as the temporary view `name`; without rows where there is none yet.

    Columns that it lacks because an earlier program made it are null.
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
    """Return a table as it stands now, whenever it is read: Delta would look for what came since as a query begins."""
    return spark.read.format("delta").option("versionAsOf", int(snapshot(spark, path).version())).load(path)


def delta_log(spark: SparkSession, path: str) -> Any:
    """Delta's own view of a table."""
    session = cast("Any", spark)._jsparkSession  # noqa: SLF001 - PySpark has no other way to its JVM
    return jvm_of(spark).org.apache.spark.sql.delta.DeltaLog.forTable(session, path)


def snapshot(spark: SparkSession, path: str) -> Any:
    """A table as it stands, as Delta itself has it."""
    return delta_log(spark, path).update(False, _no_option(), _no_option())


def jvm_of(spark: SparkSession) -> Any:
    return cast("Any", spark)._jvm  # noqa: SLF001


def java_frame(frame: DataFrame) -> Any:
    return cast("Any", frame)._jdf  # noqa: SLF001


@built_once
def _in_order(schema: StructType) -> Projection:
    return Projection(*(F.col(field.name).cast(field.dataType) for field in schema))


@built_once
def _append_operation() -> Any:
    jvm = jvm_of(SparkSession.active())
    write = getattr(jvm.org.apache.spark.sql.delta, "DeltaOperations$Write")
    return write(jvm.org.apache.spark.sql.SaveMode.Append, *[_no_option()] * 8)


@built_once
def _no_option() -> Any:
    return jvm_of(SparkSession.active()).scala.Option.empty()
