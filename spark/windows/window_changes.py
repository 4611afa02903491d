"""Keeps the append-only table `window_changes`, the history of each window, which stays when tables are made anew.

If a row's `cause` is `readings`, it says what a batch added to a window. If the cause is another, the window was
computed anew, and the row has all of its figures; `n` 0 means that it is empty. Ordered by `at`, a window's rows are
its history: the first row is its first appearance, and each later row is a revision. To learn of changes, a job reads
the table as a stream.
"""

import time
from collections.abc import Sequence
from typing import cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.decode.value_types import VALUE_TYPE
from spark.engine.delta_staging import CHECKPOINT_INTERVAL, AppendTable, make_table
from spark.engine.literals import of_batch
from spark.engine.made_file import MadeFile
from spark.log.log_table import ORDINAL
from spark.windows.windows_table import KEY, SUM_TYPE, folded, read_parts

SCHEMA = f"""
    namespace string, device string, stream string, metric string, window_start timestamp, cause string,
    n bigint, min {VALUE_TYPE}, max {VALUE_TYPE}, sum {SUM_TYPE}, first {VALUE_TYPE}, last {VALUE_TYPE}, late bigint,
    ordinal bigint, version int, at timestamp, at_date date
"""
CHANGES_PARTITION = "at_date"
SKIPPING_COLUMNS = "window_start,device,metric,stream,ordinal,at"
READINGS = "readings"
CORRECTION = "correction"
COPY = "copy"
REPLAY = "replay"
FIGURES = ("n", "min", "max", "sum", "first", "last", "late")


def changes_path(warehouse: str) -> str:
    """Return the table's path, beside the versions, because it outlives them."""
    return f"{warehouse.rstrip('/')}/window_changes"


def create_changes(spark: SparkSession, warehouse: str) -> None:
    """Create the table if there is none."""
    properties = {
        "delta.appendOnly": "true",
        "delta.dataSkippingStatsColumns": SKIPPING_COLUMNS,
        **CHECKPOINT_INTERVAL,
    }
    make_table(spark, changes_path(warehouse), changes_schema(), partition=CHANGES_PARTITION, properties=properties)


def changes_schema() -> StructType:
    """Return the table's columns. It needs a running session, whose parser reads them."""
    return cast("StructType", StructType.fromDDL(SCHEMA))


def append_changes(table: AppendTable, changes: DataFrame, version: int, ordinal: int, cause: str) -> None:
    """Append one batch's changes for one cause, or do nothing if they were appended before.

    `changes` has the windows' keys and FIGURES.
    """
    at = F.timestamp_micros(of_batch(time.time_ns() // 1_000, "metric"))
    said = {
        "cause": F.lit(cause),
        "ordinal": of_batch(ordinal, "metric"),
        "version": F.lit(version),
        "at": at,
        CHANGES_PARTITION: F.to_date(at),
    }
    table.append(changes.withColumns(said), {f"{of_version(version)}{cause}": ordinal})


def append_made(table: AppendTable, files: Sequence[MadeFile], version: int, ordinal: int) -> None:
    """Append files with the changes of one batch's readings, or do nothing if these were appended before."""
    application = f"{of_version(version)}{READINGS}"
    if table.last(application) < ordinal:
        staged = table.begin()
        staged.take(files)
        staged.commit({application: ordinal})


def of_version(version: int) -> str:
    """Prefix of the applications whose commit number is the last batch of a version in the table."""
    return f"{ORDINAL}-v{version}-"


def is_replay_told(table: AppendTable, version: int) -> bool:
    """Tell whether the table has the changes of a version's replay."""
    return table.last(f"{of_version(version)}{REPLAY}") >= 0


def append_replayed(table: AppendTable, old_tables: str | None, new_tables: str, version: int, ordinal: int) -> None:
    """Append the windows that differ in a version that replaced another, or do nothing if they were appended before.

    `ordinal` is the version's last batch. Without `old_tables` nothing is known of the old figures, and every window is
    appended.
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
    """The windows that differ, with their present figures. `n` is 0 if a window is gone."""
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
