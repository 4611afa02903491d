"""Keeps the table `amendments` of records of `log` whose verdict changed later.

`log` is append-only. If a later copy counts instead of a record, or if a rejected record can be read after all, the
record stands here again with its new verdict. Of several amendments of a record, the last one counts.
"""

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import LongType, StructField, StructType

from spark.decode.record_rules import SET_ASIDE
from spark.engine.delta_staging import AppendTable, is_empty, make_table, with_missing_columns
from spark.engine.literals import of_batch
from spark.log.log_table import ORDINAL, SKIPPING_COLUMNS, log_schema, read_log

ROW = ("topic_id", "topic", "partition", "offset", "ordinal")
"""Columns that name a row of `log`: Kafka's coordinates and the batch, because a record may be read more than once."""
AMENDED = "amended_ordinal"
"""Column with the ordinal of the batch that made the amendment."""


def amendments_path(tables: str) -> str:
    """Return the table's path."""
    return f"{tables}/amendments"


def create_amendments(spark: SparkSession, tables: str) -> None:
    """Create the table, or add columns that it lacks."""
    properties = {"delta.dataSkippingStatsColumns": f"{SKIPPING_COLUMNS},{AMENDED}"}
    make_table(spark, amendments_path(tables), amendments_schema(), partition="event_date", properties=properties)


def append_amendments(table: AppendTable, rows: DataFrame, ordinal: int) -> None:
    """Append a batch's amendments, or do nothing if they were appended before."""
    table.append(rows.withColumn(AMENDED, of_batch(ordinal, "topic")), {ORDINAL: ordinal})


def amend_set_aside(tables: str, rows: DataFrame) -> None:
    """Reject committed rows from which the tables cannot be derived. `rows` have the reasons."""
    amended = rows.withColumn(AMENDED, F.col("ordinal")).coalesce(1)
    amended.select(*amendments_schema().names).write.format("delta").mode("append").save(amendments_path(tables))


def committed_rows(spark: SparkSession, tables: str, ordinal: int) -> DataFrame:
    """The rows of a batch as committed, except that rows set aside afterwards are rejects."""
    rows = read_log(spark, tables).where(F.col("ordinal") == ordinal)
    if is_empty(spark, amendments_path(tables)):
        return rows
    aside = read_amendments(spark, tables).where(
        (F.col("ordinal") == ordinal) & F.col("reject_reason").startswith(SET_ASIDE)
    )
    there = [F.col(f"log.{name}").eqNullSafe(F.col(f"aside.{name}")) for name in ROW]
    kept = rows.alias("log").join(F.broadcast(aside).alias("aside"), there, "left_anti")
    return kept.unionByName(aside.drop(AMENDED).dropDuplicates([*ROW]))


def amendments_schema() -> StructType:
    """Return the table's columns. It needs a running session."""
    return StructType([*log_schema().fields, StructField(AMENDED, LongType())])


def read_amendments(spark: SparkSession, tables: str) -> DataFrame:
    """Return the table, with every amendment ever made."""
    return with_missing_columns(spark.read.format("delta").load(amendments_path(tables)), amendments_schema())


def effective_log(spark: SparkSession, tables: str, before: int | None = None) -> DataFrame:
    """Return `log` with the amendments applied: all, or with `before` those made before that batch."""
    log = read_log(spark, tables)
    if is_empty(spark, amendments_path(tables)):
        return log if before is None else log.where(F.col("ordinal") < before)
    amendments = read_amendments(spark, tables)
    if before is not None:
        log, amendments = log.where(F.col("ordinal") < before), amendments.where(F.col(AMENDED) < before)
    # Most warehouses have no amendments. They are spared the join.
    if not amendments.inputFiles():
        return log
    newest_first = Window.partitionBy(*ROW).orderBy(F.col(AMENDED).desc())
    latest = amendments.withColumn("age", F.row_number().over(newest_first)).where("age = 1").drop("age", AMENDED)
    there = [F.col(f"log.{name}").eqNullSafe(F.col(f"amended.{name}")) for name in (*ROW, "event_date")]
    rows = latest.select(*ROW, "event_date").alias("amended")
    return log.alias("log").join(F.broadcast(rows), there, "left_anti").unionByName(latest)
