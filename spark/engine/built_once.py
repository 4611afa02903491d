"""Builds expressions once and uses them for every batch.

Each part of an expression is a call into Spark's JVM. No expression depends on a batch: Spark resolves it anew in each
query.
"""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec, TypeVar

from pyspark import SparkContext

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
