"""Keeps the table `device_parts`: which of each device's own numbers stand in `log`, who brought it, and until when.

Each batch appends a row for each run of numbers that it touched, and one for each stream that does not count. A run's
numbers are islands of contiguous numbers with the times of both ends: between two islands, readings are missing. A row
has a few islands, and the first and the last number of all of them. Readers take all rows of a run together. Islands of
two rows may overlap.
"""

from typing import cast

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.engine.delta_staging import CHECKPOINT_INTERVAL, make_table, pinned, table_exists
from spark.log.copies import NO_SUSPECTS, Suspects
from spark.log.edges import EDGE_TYPE
from spark.log.lane_sequences import joined
from spark.log.sequence_runs import RUN_COLUMNS

SCHEMA = f"""
    namespace string, device string, stream string, device_counter string, device_boot string,
    run bigint, first bigint, last bigint,
    islands array<struct<first: bigint, last: bigint, first_edge: {EDGE_TYPE}, last_edge: {EDGE_TYPE}>>,
    gateways array<string>, last_us bigint, batch_first bigint, batch_last bigint
"""
"""Columns of the table. `run` is a number that stands for the first five columns. Of readings that do not count, it and
`device_boot` are null. `last_us` is the event time as sent of the last reading in a window, in microseconds since 1970.
`batch_first` and `batch_last` are ordinals."""
SKIPPING_COLUMNS = "device,run,first,last,batch_first,batch_last"


def device_parts_path(tables: str) -> str:
    """Return the table's path."""
    return f"{tables}/device_parts"


def device_parts_schema() -> StructType:
    """Return the table's columns. It needs a running session."""
    return cast("StructType", StructType.fromDDL(SCHEMA))


def create_device_parts(spark: SparkSession, tables: str) -> None:
    """Create the table if there is none."""
    properties = {"delta.dataSkippingStatsColumns": SKIPPING_COLUMNS, **CHECKPOINT_INTERVAL}
    make_table(spark, device_parts_path(tables), device_parts_schema(), properties=properties)


def read_device_parts(spark: SparkSession, tables: str) -> DataFrame:
    """Return the table at its present version. Before the first start after an earlier release, it has no rows."""
    path = device_parts_path(tables)
    return pinned(spark, path) if table_exists(spark, path) else spark.createDataFrame([], device_parts_schema())


def islands_in(parts: DataFrame) -> DataFrame:
    """Return the islands of rows of the table, one in a row."""
    return parts.select(*RUN_COLUMNS, F.inline("islands"))


def came_again(came: DataFrame, earlier: DataFrame) -> Suspects:
    """Find a batch's numbers that came before, or in two of its rows.

    `came` has the batch's rows, as Spark reads them from files. `earlier` has rows of batches before it.
    """
    numbered = came.where(F.col("run").isNotNull())
    place = F.struct("_metadata.file_name", "_metadata.row_index").alias("place")
    own = numbered.select(*came.columns, place)
    nowhere = F.lit(None).cast(own.schema["place"].dataType).alias("place")
    there = earlier.select(*came.columns, nowhere).unionByName(own).alias("there")
    is_other = ~F.col("came.place").eqNullSafe(F.col("there.place"))
    same_run = F.col("came.run") == F.col("there.run")
    pairs = there.join(F.broadcast(own.alias("came")), same_run & _overlap("came", "there") & is_other)
    # First by a few small columns. Most batches have no such pair, and then no island is read.
    if not pairs.select("there.batch_first").collect():
        return NO_SUSPECTS
    names = [F.col(f"came.{name}") for name in RUN_COLUMNS]
    batches = [F.col(f"there.{name}") for name in ("batch_first", "batch_last")]
    each = pairs.select(*names, *batches, "there.islands", F.explode("came.islands").alias("one"))
    both = each.select("*", F.explode("islands").alias("other")).where(_overlap("one", "other"))
    first, last = F.greatest("one.first", "other.first"), F.least("one.last", "other.last")
    found = both.select(*RUN_COLUMNS, first.alias("first"), last.alias("last"), "batch_first", "batch_last").collect()
    runs = {(*row[: len(RUN_COLUMNS)], row["first"], row["last"]) for row in found}
    return Suspects([], sorted(runs), joined({(row.batch_first, row.batch_last) for row in found}))


def _overlap(one: str, other: str) -> Column:
    return (F.col(f"{one}.first") <= F.col(f"{other}.last")) & (F.col(f"{other}.first") <= F.col(f"{one}.last"))
