"""Keeps the table `losses` of readings that are gone for good, so that nobody needs to search all of `log` for them.

It has the losses that gateways told of, and rejects that `log` no longer keeps.
"""

from collections.abc import Sequence

from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.engine.delta_staging import AppendTable, make_table, pinned
from spark.finality.loss_records import losses_in, losses_schema
from spark.log.log_table import ORDINAL


def losses_path(tables: str) -> str:
    """Return the table's path."""
    return f"{tables}/losses"


def create_losses(spark: SparkSession, tables: str) -> None:
    """Create the table if there is none."""
    make_table(spark, losses_path(tables), losses_schema())


def append_losses(table: AppendTable, rows: DataFrame, ordinal: int) -> None:
    """Append a batch's losses, or do nothing if they were appended before. `rows` are its rows of `log`."""
    table.append(losses_in(rows).coalesce(1), {ORDINAL: ordinal})


def append_expired(spark: SparkSession, tables: str, rejects: Sequence[Row]) -> None:
    """Append rejects from `rejects_as_losses` that `log` no longer has, so that their gaps stay explained."""
    if rejects:
        rows = spark.createDataFrame(rejects, losses_schema()).coalesce(1)
        rows.write.format("delta").mode("append").save(losses_path(tables))


def take_over_losses(spark: SparkSession, before: str, tables: str) -> None:
    """Append the losses that another version's table has and this table lacks."""
    theirs, mine = (spark.read.format("delta").load(losses_path(each)) for each in (before, tables))
    unknown = theirs.join(mine.select("ce_id").distinct(), "ce_id", "left_anti").select(*mine.columns)
    unknown.coalesce(1).write.format("delta").mode("append").save(losses_path(tables))


def read_losses(spark: SparkSession, tables: str) -> DataFrame:
    """Return each loss once. Of copies of a record, the copy with the smallest bound of its time counts."""
    table = pinned(spark, losses_path(tables))
    surest_first = Window.partitionBy("ce_id").orderBy("told_error_us", "told_us")
    return table.withColumn("place", F.row_number().over(surest_first)).where("place = 1").drop("place")
