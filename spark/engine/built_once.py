"""Builds expressions once and uses them for every batch.

Each part of an expression is a call into Spark's JVM. A batch made twelve thousand such calls, which took a third of a
small batch's time. No expression depends on a batch: Spark resolves it anew in each query.
"""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from pyspark import SparkContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

BUILT_MAX = 64
"""Results kept of each function. They differ by the declarations, and one file of declarations is in use at a time."""

Arguments = ParamSpec("Arguments")
Built = TypeVar("Built")
Call = tuple[str, tuple[Any, ...]]
"""Name and arguments of a DataFrame's method."""


class _Memory(Generic[Built]):
    """A function's results by its arguments, for as long as this Spark runs."""

    def __init__(self) -> None:
        self._built: dict[Hashable, Built] = {}
        self._spark: object = None

    def get(self, key: Hashable, build: Callable[[], Built]) -> Built:
        running = SparkContext._active_spark_context  # noqa: SLF001 - PySpark has no other word for it
        if self._spark is not running or len(self._built) >= BUILT_MAX:
            self._built.clear()
            self._spark = running
        built = self._built.get(key)
        if built is None:
            # Not read back from `_built`: another thread may clear it meanwhile.
            built = self._built[key] = build()
        return built


def built_once(build: Callable[Arguments, Built]) -> Callable[Arguments, Built]:
    """Keep a function's results by its arguments, which must be hashable, for as long as this Spark runs."""
    memory = _Memory[Built]()

    @wraps(build)
    def once(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Built:
        return memory.get((args, tuple(sorted(kwargs.items()))), lambda: build(*args, **kwargs))

    return once


def recorded(
    derive: Callable[Concatenate[DataFrame, Arguments], DataFrame],
) -> Callable[Concatenate[DataFrame, Arguments], DataFrame]:
    """Run a function of a DataFrame once for each list of columns, and repeat its calls of methods afterwards.

    The function may only add, choose, group and filter columns, and must not look at the data. Its further arguments
    must be hashable.
    """
    memory = _Memory[tuple[Call, ...]]()

    @wraps(derive)
    def repeated(frame: DataFrame, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> DataFrame:
        def record() -> tuple[Call, ...]:
            recording = derive(cast("DataFrame", _Recording(frame)), *args, **kwargs)
            return cast("_Recording", recording).calls

        for name, given in memory.get((tuple(frame.columns), args, tuple(sorted(kwargs.items()))), record):
            frame = getattr(frame, name)(*given)
        return frame

    return repeated


class _Recording:
    """Stands for a DataFrame, or for its groups. Records the methods that are called, and calls them."""

    def __init__(self, real: Any, calls: tuple[Call, ...] = ()) -> None:
        self._real = real
        self.calls = calls

    @property
    def columns(self) -> list[str]:
        return cast("list[str]", self._real.columns)

    def __getattr__(self, name: str) -> Callable[..., "_Recording"]:
        def call(*given: Any) -> _Recording:
            # PySpark would make columns of names at each repetition.
            made = {"select": F.col, "groupBy": F.col, "where": F.expr}.get(name)
            given = tuple(made(each) if made and isinstance(each, str) else each for each in given)
            return _Recording(getattr(self._real, name)(*given), (*self.calls, (name, given)))

        return call
