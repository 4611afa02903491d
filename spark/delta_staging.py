"""Rows that are written to a Delta table's folder first, looked at, and committed afterwards, or never.

Delta's own transaction does it: PySpark's writers can only do both at once.
"""

import time
from typing import Any, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType


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

    def append(self, rows: DataFrame, numbers: dict[str, int]) -> None:
        """Write and commit at once; nothing happens if the first of the numbers was committed before."""
        application, number = next(iter(numbers.items()))
        if self.last(application) < number:
            staged = self.begin()
            staged.write(rows)
            staged.commit(numbers)

    def committed(self, numbers: dict[str, int]) -> None:
        self._numbers |= numbers


class StagedAppend:
    """One append in the making. What is never committed is rubbish that a vacuum clears away."""

    def __init__(self, table: AppendTable) -> None:
        self._table = table
        # Delta's classes have no Python side; the versions of its jars are pinned.
        self._jvm = jvm_of(table.spark)
        none = self._jvm.scala.Option.empty()
        self._transaction = delta_log(table.spark, table.path).startTransaction(none, none)
        self._files: list[Any] = []

    def write(self, rows: DataFrame) -> None:
        """Write the rows, which have the table's columns. What was written before is given up."""
        in_order = rows.select(*(F.col(field.name).cast(field.dataType) for field in self._table.schema))
        iterator = self._transaction.writeFiles(java_frame(in_order)).iterator()
        self._files = []
        while iterator.hasNext():
            self._files.append(iterator.next())

    def rows(self) -> DataFrame:
        """Read what was written."""
        spark, path, schema = self._table.spark, self._table.path, self._table.schema
        paths = [f"{path}/{file.path()}" for file in self._files]
        if not paths:
            return spark.createDataFrame([], schema)
        return spark.read.schema(schema).option("basePath", path).parquet(*paths)

    def commit(self, numbers: dict[str, int]) -> None:
        """Commit what was written last, and the number of this commit for each of its applications."""
        actions = self._jvm.java.util.ArrayList()
        for file in self._files:
            actions.add(file)
        delta = self._jvm.org.apache.spark.sql.delta
        now = self._jvm.scala.Some(round(time.time() * 1000))
        for application, number in numbers.items():
            actions.add(delta.actions.SetTransaction(application, number, now))
        sequence = self._jvm.org.apache.spark.api.python.PythonUtils.toSeq(actions)
        none = self._jvm.scala.Option.empty()
        append = self._jvm.org.apache.spark.sql.SaveMode.Append
        operation = getattr(delta, "DeltaOperations$Write")
        self._transaction.commit(sequence, operation(append, *[none] * 8))
        self._table.committed(numbers)


def commit_numbers(spark: SparkSession, path: str) -> dict[str, int]:
    """The number of the last commit of each application that ever committed to a table."""
    none = jvm_of(spark).scala.Option.empty()
    iterator = delta_log(spark, path).update(False, none, none).setTransactions().iterator()
    numbers: dict[str, int] = {}
    while iterator.hasNext():
        transaction = iterator.next()
        numbers[str(transaction.appId())] = int(transaction.version())
    return numbers


def delta_log(spark: SparkSession, path: str) -> Any:
    """Delta's own view of a table."""
    session = cast("Any", spark)._jsparkSession  # noqa: SLF001 - PySpark has no other way to its JVM
    return jvm_of(spark).org.apache.spark.sql.delta.DeltaLog.forTable(session, path)


def jvm_of(spark: SparkSession) -> Any:
    return cast("Any", spark)._jvm  # noqa: SLF001


def java_frame(frame: DataFrame) -> Any:
    return cast("Any", frame)._jdf  # noqa: SLF001
