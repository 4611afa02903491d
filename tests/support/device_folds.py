"""Folds rows of `device_parts` before that is due."""

from unittest.mock import patch

from pyspark.sql import SparkSession

from spark.engine import delta_folds
from spark.upkeep.device_folds import fold_devices


def fold_all_devices(spark: SparkSession, tables: str) -> None:
    """Fold whatever the smaller files outweigh, however few files there are."""
    with patch.object(delta_folds, "FILES_MIN", 1):
        fold_devices(spark, tables)
