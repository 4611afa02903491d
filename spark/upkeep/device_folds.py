"""Folds rows of `device_parts`."""

from pyspark.sql import DataFrame, SparkSession

from spark.engine.arrow_map import map_in_arrow
from spark.engine.delta_folds import fold_due
from spark.engine.delta_staging import AppendTable
from spark.engine.delta_upkeep import in_sorted_files
from spark.log.device_parts import SCHEMA, device_parts_path, device_parts_schema
from spark.log.sequence_runs import RUN_COLUMNS

ROWS_MAX = 250_000
"""Rows that a task folds, as far as one device has no more. So many take some 250 MB."""


def fold_devices(spark: SparkSession, tables: str) -> None:
    """Fold the files that are due. Rows that are appended meanwhile stay."""
    with in_sorted_files(spark):
        fold_due(AppendTable(spark, device_parts_path(tables), device_parts_schema()), _folded)


def _folded(parts: DataFrame, rows: int) -> DataFrame:
    # Executors may lack Delta: the function must come from a module that does without.
    from spark.arrow_pass.device_rows import folding  # noqa: PLC0415 - it needs Arrow

    return map_in_arrow(parts.repartitionByRange(1 + rows // ROWS_MAX, *RUN_COLUMNS), folding, SCHEMA)
