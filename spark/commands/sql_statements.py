"""Runs SQL statements that read, and refuses all others: Delta would run a DELETE as readily as a SELECT.

This protects the tables from mistakes. It is no lock: whoever runs this command can start any program (TRANSFORM can,
too).
"""

import re
from collections.abc import Iterable
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from spark.engine.told_error import ToldError

READING_COMMANDS = ("Show", "Describe", "Explain")
"""Beginnings of the names of Spark's and Delta's commands that read, such as `DescribeDeltaHistory`."""


class NotReadingError(ToldError):
    """The statement would change something; the message says so."""

    is_usage = True


def read_by(spark: SparkSession, statement: str) -> DataFrame:
    """Run a statement that only reads. Raises NotReadingError, and PySparkException for a wrong statement.

    Spark runs a command as soon as it gets it. So the statement is judged before Spark gets it.
    """
    session: Any = spark._jsparkSession  # noqa: SLF001 - PySpark has no other way to its parser
    parser = session.sessionState().sqlParser()
    try:
        # The parser takes queries only. It sees a DELETE behind a WITH.
        parser.parseQuery(statement)
    except PySparkException:
        command = str(parser.parsePlan(statement).getClass().getSimpleName())
        if not command.startswith(READING_COMMANDS):
            raise NotReadingError(
                "only statements that read are carried out here: SELECT, WITH ... SELECT, SHOW, DESCRIBE, EXPLAIN. "
                "This statement would do something else. It was not run, and nothing was changed"
            ) from None
    return spark.sql(statement)


def mistake_words(error: PySparkException, tables: Iterable[str]) -> str:
    """Spark's message about a wrong statement, without the plan. `tables` are the names that exist."""
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
