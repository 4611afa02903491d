"""Has Spark interpret queries of few rows: to compile one takes longer than to interpret it for thousands of rows."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from spark.engine.delta_staging import table_bytes

SMALL_BYTES_MAX = 10_000_000
"""Bytes of a table up to which queries of it are interpreted."""
INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}


def is_small(spark: SparkSession, path: str) -> bool:
    """True if a table has so few bytes that its queries are better interpreted."""
    return table_bytes(spark, path) <= SMALL_BYTES_MAX


@contextmanager
def interpreted_if(*sessions: SparkSession, small: bool) -> Iterator[None]:
    """Have Spark interpret all queries of these sessions meanwhile, if they are `small`."""
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
