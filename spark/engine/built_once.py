"""Builds expressions once and uses them for every batch.

Each part of an expression is a call into Spark's JVM. A batch made twelve thousand such calls, which took a third of a
small batch's time. No expression depends on a batch: Spark resolves it anew in each query.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from pyspark import SparkContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.classic.column import _to_java_column, _to_seq
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

BUILT_MAX = 64
"""Results kept of each function. They differ by the declarations, and one file of declarations is in use at a time."""

Arguments = ParamSpec("Arguments")
Built = TypeVar("Built")


def built_once(build: Callable[Arguments, Built]) -> Callable[Arguments, Built]:
    """Keep a function's results by its arguments, which must be hashable, for as long as this Spark runs."""
    remembered: dict[Hashable, Built] = {}
    spark: list[object] = [None]

    @wraps(build)
    def once(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Built:
        running = SparkContext._active_spark_context  # noqa: SLF001 - PySpark has no other word for it
        if spark[0] is not running or len(remembered) >= BUILT_MAX:
            remembered.clear()
            spark[0] = running
        key = (args, tuple(sorted(kwargs.items())))
        built = remembered.get(key)
        if built is None:
            # Not read back from `remembered`: another thread may clear it meanwhile.
            built = remembered[key] = build(*args, **kwargs)
        return built

    return once


class Step(Protocol):
    """One call that makes a DataFrame from another, with all its arguments in the JVM."""

    def of(self, frame: DataFrame) -> DataFrame: ...


def recorded(
    derive: Callable[Concatenate[DataFrame, Arguments], DataFrame],
) -> Callable[Concatenate[DataFrame, Arguments], DataFrame]:
    """Run a function of a DataFrame once for each schema, and repeat its recorded steps afterwards.

    The function may call only the methods of `_Recording`, and must not look at the data. Its further arguments must
    be hashable.
    """
    record: dict[Hashable, tuple[Step, ...]] = {}
    spark: list[object] = [None]

    @wraps(derive)
    def repeated(frame: DataFrame, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> DataFrame:
        running = SparkContext._active_spark_context  # noqa: SLF001
        if spark[0] is not running or len(record) >= BUILT_MAX:
            record.clear()
            spark[0] = running
        key = (_java(frame).schema().json(), args, tuple(sorted(kwargs.items())))
        steps = record.get(key)
        if steps is None:
            recording = derive(cast("DataFrame", _Recording(frame)), *args, **kwargs)
            steps = record[key] = cast("_Recording", recording).steps
        for step in steps:
            frame = step.of(frame)
        return frame

    return repeated


class _Recording:
    """Stands for a DataFrame, and records the calls made on it."""

    def __init__(self, frame: DataFrame, steps: tuple[Step, ...] = ()) -> None:
        self.steps = steps
        self._frame = frame

    @property
    def columns(self) -> list[str]:
        return self._frame.columns

    def select(self, *columns: Column | str) -> "_Recording":
        return self._then(Projection(*columns))

    def where(self, condition: Column | str) -> "_Recording":
        return self._then(_Condition(condition))

    def withColumn(self, name: str, column: Column) -> "_Recording":  # noqa: N802 - PySpark's names
        return self.withColumns({name: column})

    def withColumns(self, columns: dict[str, Column]) -> "_Recording":  # noqa: N802
        return self._then(_Additions(columns))

    def withColumnRenamed(self, existing: str, new: str) -> "_Recording":  # noqa: N802
        return self._then(_Renaming(existing, new))

    def groupBy(self, *keys: Column | str) -> "_Groups":  # noqa: N802
        return _Groups(self, keys)

    def _then(self, step: Step) -> "_Recording":
        return _Recording(step.of(self._frame), (*self.steps, step))


class _Groups:
    def __init__(self, rows: _Recording, keys: tuple[Column | str, ...]) -> None:
        self._rows = rows
        self._keys = keys

    def agg(self, *columns: Column) -> _Recording:
        return self._rows._then(_Aggregation(self._keys, *columns))  # noqa: SLF001 - two halves of one call


class Projection:
    """The columns of a `select`."""

    def __init__(self, *columns: Column | str) -> None:
        self._columns = _java_columns(columns)

    def of(self, frame: DataFrame) -> DataFrame:
        return _frame(_java(frame).select(self._columns), frame)


class _Aggregation:
    """The keys of a `groupBy`, and the aggregates of each group."""

    def __init__(self, keys: Iterable[Column | str], *columns: Column) -> None:
        self._keys = _java_columns(keys)
        self._first = _to_java_column(columns[0])
        self._others = _java_columns(columns[1:])

    def of(self, frame: DataFrame) -> DataFrame:
        return _frame(_java(frame).groupBy(self._keys).agg(self._first, self._others), frame)


class _Condition:
    def __init__(self, condition: Column | str) -> None:
        self._condition = _to_java_column(F.expr(condition) if isinstance(condition, str) else condition)

    def of(self, frame: DataFrame) -> DataFrame:
        return _frame(_java(frame).filter(self._condition), frame)


class _Additions:
    def __init__(self, columns: dict[str, Column]) -> None:
        self._names = _to_seq(_context(), list(columns))
        self._columns = _java_columns(columns.values())

    def of(self, frame: DataFrame) -> DataFrame:
        return _frame(_java(frame).withColumns(self._names, self._columns), frame)


class _Renaming:
    def __init__(self, existing: str, new: str) -> None:
        self._existing, self._new = existing, new

    def of(self, frame: DataFrame) -> DataFrame:
        return frame.withColumnRenamed(self._existing, self._new)


def _java_columns(columns: Iterable[Column | str]) -> Any:
    return _to_seq(_context(), list(columns), _to_java_column)


def _context() -> SparkContext:
    return cast("SparkContext", SparkContext._active_spark_context)  # noqa: SLF001


def _java(frame: DataFrame) -> Any:
    return cast("Any", frame)._jdf  # noqa: SLF001


def _frame(java: Any, like: DataFrame) -> DataFrame:
    return ClassicDataFrame(java, like.sparkSession)
