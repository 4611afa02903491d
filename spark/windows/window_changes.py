"""`window_changes`: what became of each window and when. Append-only, and kept when tables are made anew.

A row says what a batch added to a window (`cause` is `readings`), or what the window holds since it was computed anew
(another cause): then the figures are all of it, and `n` 0 says that it is empty. A window's rows in the order of `at`
are its history, the first one when it was first shown, each other one a revision. A job that wants to know of changes
reads the table as a stream.
"""

import time
from typing import cast

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.decode.codec_decimals import VALUE_TYPE, of_batch
from spark.engine.delta_staging import CHECKPOINT_INTERVAL, AppendTable
from spark.log.log_table import ORDINAL
from spark.windows.windows_table import KEY, SUM_TYPE, folded, read_parts

SCHEMA = f"""
    namespace string, device string, stream string, metric string, window_start timestamp, cause string,
    n bigint, min {VALUE_TYPE}, max {VALUE_TYPE}, sum {SUM_TYPE}, first {VALUE_TYPE}, last {VALUE_TYPE}, late bigint,
    ordinal bigint, version int, at timestamp, at_date date
"""
READINGS = "readings"
CORRECTION = "correction"
COPY = "copy"
REPLAY = "replay"
FIGURES = ("n", "min", "max", "sum", "first", "last", "late")


def changes_path(warehouse: str) -> str:
    """Return where the table lies: beside the versions, for it outlives them."""
    return f"{warehouse.rstrip('/')}/window_changes"


def create_changes(spark: SparkSession, warehouse: str) -> None:
    """Create the table where there is none."""
    (
        DeltaTable.createIfNotExists(spark)
        .location(changes_path(warehouse))
        .addColumns(changes_schema())
        .partitionedBy("at_date")
        .property("delta.appendOnly", "true")
        .property("delta.dataSkippingStatsColumns", "window_start,device,metric,stream,ordinal,at")
        .property(*CHECKPOINT_INTERVAL)
        .execute()
    )


def changes_schema() -> StructType:
    """Return the table's columns; needs a running session, whose parser reads them."""
    return cast("StructType", StructType.fromDDL(SCHEMA))


def append_changes(table: AppendTable, changes: DataFrame, version: int, ordinal: int, cause: str) -> None:
    """Append what one batch did for one cause; nothing happens if that was appended before.

    `changes` has the windows' keys and FIGURES.
    """
    at = F.timestamp_micros(of_batch(time.time_ns() // 1_000, "metric"))
    said = {
        "cause": F.lit(cause),
        "ordinal": of_batch(ordinal, "metric"),
        "version": F.lit(version),
        "at": at,
        "at_date": F.to_date(at),
    }
    table.append(changes.withColumns(said), {f"{of_version(version)}{cause}": ordinal})


def of_version(version: int) -> str:
    """How the applications begin under which the table says up to which batch of a version it goes."""
    return f"{ORDINAL}-v{version}-"


def is_replay_told(table: AppendTable, version: int) -> bool:
    """Tell whether it stands in the table what a version's replay changed."""
    return table.last(f"{of_version(version)}{REPLAY}") >= 0


def append_replayed(table: AppendTable, old_tables: str | None, new_tables: str, version: int, ordinal: int) -> None:
    """Tell what is different in the tables of a version that took another's place; nothing happens if that was told.

    `ordinal` is of its last batch. Without `old_tables` nothing is known of what was told before: each window is told.
    """
    if is_replay_told(table, version):
        return
    spark = table.spark
    new = folded(read_parts(spark, new_tables)).select(*KEY, *FIGURES)
    if old_tables is not None:
        old = folded(read_parts(spark, old_tables)).select(*KEY, *FIGURES)
    else:
        unknown = {name: F.lit(None).cast(kind) for name, kind in new.dtypes if name in FIGURES}
        old = spark.read.format("delta").load(table.path).select(*KEY).distinct().withColumns(unknown)
    append_changes(table, differences(old, new), version, ordinal, REPLAY)


def differences(before: DataFrame, after: DataFrame) -> DataFrame:
    """The windows that differ, with what they hold now: `n` 0 where they are gone."""
    old = before.select(*KEY, F.struct(*FIGURES).alias("old"))
    new = after.select(*KEY, F.struct(*FIGURES).alias("new"))
    joined = old.join(new, list(KEY), "full").where(~F.col("old").eqNullSafe(F.col("new")))
    gone = {"n", "late"}
    return joined.select(
        *KEY,
        *(
            (F.coalesce(f"new.{name}", F.lit(0)) if name in gone else F.col(f"new.{name}")).alias(name)
            for name in FIGURES
        ),
    )


def read_changes(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the table."""
    return spark.read.format("delta").load(changes_path(warehouse))
