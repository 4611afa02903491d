"""Compares the desk's answers with Spark's, row by row: of tables in which everything goes wrong, and of the demo's."""

import random
from pathlib import Path

from pyspark.sql import SparkSession

from tests.bench.context import Bench, say
from tests.bench.parts_analyst import DEMO
from tests.bench.report import Result
from tests.bench.spark_job import session
from tests.support.desk_equality import compare
from tests.support.ugly_tables import change, register_and_lose, taken

DRAWN, DRAWN_QUICK = 12_000, 200
COUNTED, COUNTED_QUICK = 8_000, 100
SEEDS = (1, 2)
ROWS_MIN = 100_000


async def answers(bench: Bench) -> list[Result]:
    """All rows and columns of every view, from the desk and from Spark."""
    rows, different = 0, 0
    about = []
    with session() as spark:
        for name, warehouse in _warehouses(bench, spark):
            of_this = 0
            for compared in compare(spark, str(warehouse)):
                of_this += compared.rows
                different += len(compared.different)
                for row in compared.different[:3]:
                    say(f"{name}: {compared.name}: {row}")
            rows += of_this
            about.append(f"{name} {of_this:,}")
    note = "; ".join(about) + ("" if DEMO.is_dir() else "; there are no tables of `make demo`")
    return [
        Result("equal_rows_compared", rows, "rows", None if bench.quick else f">= {ROWS_MIN}", note),
        Result("equal_rows_different", different, "rows", "= 0"),
    ]


def _warehouses(bench: Bench, spark: SparkSession) -> list[tuple[str, Path]]:
    found = [("demo", DEMO)] if DEMO.is_dir() else []
    for seed in SEEDS[: bench.pick(len(SEEDS), 1)]:
        warehouse = bench.directory / "answers" / str(seed)
        rng = random.Random(seed)  # noqa: S311 - what sensors measure, no secret
        drawn, counted = bench.pick(DRAWN, DRAWN_QUICK), bench.pick(COUNTED, COUNTED_QUICK)
        job = taken(spark, str(warehouse), rng, drawn, counted)
        register_and_lose(job)
        if seed != SEEDS[0]:
            change(job)
        found.append((f"seed {seed}", warehouse))
    return found
