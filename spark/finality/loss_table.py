"""`losses`: what gateways told of readings that are gone for good, so that nobody searches all of `log` for it.

And rejects that `log` no longer keeps.
"""

from collections.abc import Sequence
from typing import cast

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.engine.delta_staging import AppendTable, pinned
from spark.finality.loss_records import LOSSES_SCHEMA, losses_in
from spark.log.log_table import ORDINAL


def losses_path(tables: str) -> str:
    """Return where the table lies."""
    return f"{tables}/losses"


def losses_schema() -> StructType:
    """Return the table's columns; needs a running session."""
    return cast("StructType", StructType.fromDDL(LOSSES_SCHEMA))


def create_losses(spark: SparkSession, tables: str) -> None:
    """Create the table where there is none."""
    DeltaTable.createIfNotExists(spark).location(losses_path(tables)).addColumns(losses_schema()).execute()


def append_losses(table: AppendTable, rows: DataFrame, ordinal: int) -> None:
    """Append what a batch tells of; nothing happens if it was appended before. `rows` are its rows of `log`."""
    table.append(losses_in(rows).coalesce(1), {ORDINAL: ordinal})


def append_expired(spark: SparkSession, tables: str, rejects: Sequence[Row]) -> None:
    """Append rejects that `log` has lost, as `rejects_as_losses` gave them: the holes that they left stay explained."""
    if rejects:
        rows = spark.createDataFrame(rejects, losses_schema()).coalesce(1)
        rows.write.format("delta").mode("append").save(losses_path(tables))


def take_over_losses(spark: SparkSession, before: str, tables: str) -> None:
    """Append what another version's table has and this one's has not."""
    theirs, mine = (spark.read.format("delta").load(losses_path(each)) for each in (before, tables))
    unknown = theirs.join(mine.select("ce_id").distinct(), "ce_id", "left_anti").select(*mine.columns)
    unknown.coalesce(1).write.format("delta").mode("append").save(losses_path(tables))


def read_losses(spark: SparkSession, tables: str) -> DataFrame:
    """Return each loss that was told of once. Of copies of a record the one with the surest time counts."""
    table = pinned(spark, losses_path(tables))
    surest_first = Window.partitionBy("ce_id").orderBy("told_error_us", "told_us")
    return table.withColumn("place", F.row_number().over(surest_first)).where("place = 1").drop("place")
