"""Queries of few rows are interpreted: compiling one to Java code takes longer than interpreting it for thousands."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from spark.engine.delta_staging import table_bytes

SMALL_BYTES_MAX = 10_000_000
"""Of a table, for what is asked of it to be interpreted."""
INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}


def is_small(spark: SparkSession, path: str) -> bool:
    """Whether a table has so few bytes that no query of it need be compiled."""
    return table_bytes(spark, path) <= SMALL_BYTES_MAX


@contextmanager
def interpreted_if(*sessions: SparkSession, small: bool) -> Iterator[None]:
    """Have all queries of these sessions interpreted meanwhile, where they are of few rows."""
    if not small:
        yield
        return
    before = [(session, name, str(session.conf.get(name))) for session in sessions for name in INTERPRETED]
    for session in sessions:
        for name, value in INTERPRETED.items():
            session.conf.set(name, value)
    try:
        yield
    finally:
        for session, name, was in before:
            session.conf.set(name, was)
