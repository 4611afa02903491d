"""Values as literals in Spark's queries."""

import json

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its customary name


def constant(value: object, of_type: str) -> Column:
    """A value of any size as one literal, which Spark computes once, in the plan."""
    return F.from_json(F.lit(json.dumps(value)), of_type)


def sql_text(text: str) -> str:
    """A text as a literal of SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def of_batch(number: int, column: str) -> Column:
    """A number that differs in each batch. `column` is any column of the rows.

    A plain literal would be part of the code that Spark generates. Each batch would then have code of its own, compiled
    twice and never warm.
    """
    return F.get(constant([number], "array<bigint>"), F.octet_length(column) * 0)
