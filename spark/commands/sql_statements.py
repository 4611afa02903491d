"""What an analyst may say in SQL: whatever reads. Delta would carry out a DELETE as willingly as a SELECT.

This keeps mistakes from the tables. It is no lock: who may say this may start programs anyway (TRANSFORM does, too).
"""

import re
from collections.abc import Iterable
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

READING_COMMANDS = ("Show", "Describe", "Explain")
"""What the names of commands that read begin with, in Spark and in Delta: `ShowColumns`, `DescribeDeltaHistory`."""


class NotReadingError(Exception):
    """A statement that would change something; the message says so."""


def read_by(spark: SparkSession, statement: str) -> DataFrame:
    """What a statement yields, if all it does is read. Raises NotReadingError, and PySparkException for its mistakes.

    Spark carries out a command as soon as it is given it, so that it must be known for one before.
    """
    session: Any = spark._jsparkSession  # noqa: SLF001 - PySpark has no other way to its parser
    parser = session.sessionState().sqlParser()
    try:
        # What stands behind a WITH included, and nothing but queries.
        parser.parseQuery(statement)
    except PySparkException:
        command = str(parser.parsePlan(statement).getClass().getSimpleName())
        if not command.startswith(READING_COMMANDS):
            raise NotReadingError(
                "only statements that read are carried out here (SELECT, WITH ... SELECT, SHOW, DESCRIBE, EXPLAIN). "
                "This one would do something else: nothing was changed"
            ) from None
    return spark.sql(statement)


def tables_named(statement: str, tables: Iterable[str]) -> list[str]:
    """Those of some tables that a statement may read: to open one takes a second."""
    words = {word.lower() for word in re.findall(r"\w+", statement)}
    # It names none, and shows all.
    return [name for name in tables if name in words or "show" in words]


def mistake_words(error: PySparkException, tables: Iterable[str]) -> str:
    """What is wrong with a statement, without the plan that Spark tells behind it; `tables` are those there are."""
    words = re.sub(r" SQLSTATE: \w+", "", str(error).partition(";\n")[0]).strip()
    condition = error.getCondition() or ""
    if condition == "TABLE_OR_VIEW_NOT_FOUND":
        words = f"{words.splitlines()[0]}\nThere are: {', '.join(tables)}."
    elif condition.startswith("UNRESOLVED_COLUMN"):
        words += (
            "\nText stands in single quotes: WHERE device = 'board-1'. A metric is no column: its values are rows, "
            "WHERE metric = 'celsius'. DESCRIBE windows lists the columns of `windows`."
        )
    return words
