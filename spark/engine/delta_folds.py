"""Folds the rows of a table that is only appended to, so that few files have few rows of each key.

Files of one fold stand together. They are folded again once all newer and smaller files outweigh them. So each row is
written again a few times only, however many there are.
"""

import uuid
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.engine.delta_staging import AppendTable, snapshot
from spark.engine.delta_upkeep import FILES_MIN, file_count
from spark.engine.literals import sql_text

FOLD = "sluice.fold"
"""Tag, in Delta's log, with the name of the fold that made a file."""
_NAME = f"coalesce(tags['{FOLD}'], path)"


def fold_due(table: AppendTable, fold: Callable[[DataFrame, int], DataFrame]) -> None:
    """Fold the files that are due, in one commit. Rows that are appended meanwhile stay.

    `fold` gets rows of some files, and how many they are. Its rows must say the same, beside those of all other files.
    """
    if file_count(table.spark, table.path) < FILES_MIN:
        return
    names, rows = _due(table)
    if not names:
        return
    which = f"{_NAME} IN ({', '.join(map(sql_text, names))})"
    staged = table.begin()
    staged.write(fold(table.rows(staged.files(which)), rows))
    staged.commit({}, instead_of=which, tags={FOLD: str(uuid.uuid4())})


def _due(table: AppendTable) -> tuple[list[str], int]:
    java: Any = snapshot(table.spark, table.path).allFiles().toDF()
    rows = F.get_json_object("stats", "$.numRecords").cast("bigint")
    folds = DataFrame(java, table.spark).groupBy(F.expr(_NAME).alias("name"))
    found = folds.agg(F.sum("size").alias("bytes"), F.count("*").alias("files"), F.sum(rows).alias("rows")).collect()
    return due_of([(row.bytes, row.files, row.rows, row.name) for row in found])


def due_of(folds: list[tuple[int, int, int, str]]) -> tuple[list[str], int]:
    """Choose of folds, given as bytes, files, rows and name, those that are outweighed by all smaller ones together.

    Returns their names, and how many rows they have. A file that no fold made is a fold of its own.
    """
    by_size = sorted(folds)
    smaller = [0, *accumulate(size for size, *_ in by_size)]
    due = max((place + 1 for place, (size, *_) in enumerate(by_size) if size <= smaller[place]), default=0)
    chosen = by_size[:due]
    if sum(files for _, files, _, _ in chosen) < FILES_MIN:
        return [], 0
    return [name for *_, name in chosen], sum(rows for _, _, rows, _ in chosen)
