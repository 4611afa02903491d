"""Checks at the start that the Python of executors has the packages that they need."""

import os
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec

from pyspark.sql import SparkSession

from spark.engine.built_once import built_once
from spark.engine.session import is_on_this_machine
from spark.engine.told_error import ToldError

NEEDED = ("pyarrow", "numpy")


class PackagesMissingError(ToldError):
    """The Python of an executor lacks packages. The message says which, and what to do."""


def expect_packages(spark: SparkSession) -> None:
    """Raise PackagesMissingError if an executor's Python lacks packages. Each Spark is asked once."""
    missing = _missing(spark.sparkContext.master or "")
    if missing:
        raise PackagesMissingError(
            f"The Python of Spark's executors lacks {' and '.join(missing)}. Records are read with these, and files "
            "written. No batch was taken. Install them where the executors run, or send them along with --archives "
            "(docs/cluster.md says how)."
        )


@built_once
def _missing(master: str) -> tuple[str, ...]:
    workers = os.environ.get("PYSPARK_PYTHON", sys.executable)
    if is_on_this_machine(master) and workers == sys.executable:
        return tuple(_not_here())
    context = SparkSession.active().sparkContext
    # A task for each core, so that most executors get one.
    tasks = context.parallelize(range(context.defaultParallelism), context.defaultParallelism)
    return tuple(sorted(set(tasks.mapPartitions(_asked).collect())))


def _asked(_: Iterable[int]) -> Iterator[str]:
    return _not_here()


def _not_here() -> Iterator[str]:
    return (name for name in NEEDED if find_spec(name) is None)
