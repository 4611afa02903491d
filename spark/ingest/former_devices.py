"""Takes over what a program before `device_parts` knew of devices, at the first start after it.

That program kept the table `devices_heard`, and the islands of numbers in `device_runs` and `settled_islands`.
"""

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.engine.delta_staging import AppendTable, commit_numbers, with_missing_columns
from spark.engine.warehouse_folder import MomentsError, folders_in, remove_folder
from spark.log.device_parts import device_parts_path, device_parts_schema
from spark.log.log_table import ORDINAL
from spark.log.sequence_runs import RUN_COLUMNS, run_hash
from spark.log.state_table import read_states

FORMER = ("device_runs", "settled_islands", "devices_heard")
"""Names of the tables, in the order in which they are read: an island is in the second before it leaves the first."""
SETTLED = "sluice-settled"
"""Application whose commit number in both tables of islands is the batch at which islands last left the first."""


def take_over_devices(spark: SparkSession, tables: str) -> None:
    """Write the former tables' rows into `device_parts`, and remove them. Raises MomentsError for a copy of them."""
    paths = {name: path for path in folders_in(spark, tables) if (name := path.rpartition("/")[2]) in FORMER}
    if not paths:
        return
    parts = AppendTable(spark, device_parts_path(tables), device_parts_schema())
    # Once they were taken over, a start that died may have left only some of their files.
    if parts.last(ORDINAL) < 0 and (saved := _saved(spark, paths)) >= 0:
        parts.append(_former_parts(spark, paths), {ORDINAL: saved})
    for path in paths.values():
        remove_folder(spark, path)


def _saved(spark: SparkSession, paths: Mapping[str, str]) -> int:
    """The last batch that the tables have; -1 if there is none."""
    numbers = {name: commit_numbers(spark, path) for name, path in paths.items()}
    runs, settled, heard = (numbers.get(name, {}) for name in FORMER)
    if 0 <= settled.get(SETTLED, -1) < runs.get(SETTLED, -1):
        words = "is of another moment than `device_runs`. All tables have to be made anew from `log`"
        raise MomentsError(f"{paths[FORMER[1]]} {words}")
    return min(runs.get(ORDINAL, -1), heard.get(ORDINAL, -1))


def _former_parts(spark: SparkSession, paths: Mapping[str, str]) -> DataFrame:
    runs, settled, heard = FORMER
    of_runs = read_states(spark, paths[runs], RUN_COLUMNS).select(*RUN_COLUMNS, F.inline("islands"))
    if settled in paths:
        gone = with_missing_columns(spark.read.format("delta").load(paths[settled]), of_runs.schema)
        of_runs = of_runs.unionByName(gone.fillna("", [*RUN_COLUMNS]).select(*of_runs.columns))
    island = F.struct("first", "last", "first_edge", "last_edge")
    number = F.udf(lambda *key: run_hash(key), "bigint", useArrow=False)
    numbered = of_runs.select("*", number(*RUN_COLUMNS).alias("run"), F.array(island).alias("islands"))
    streams = read_states(spark, paths[heard], ("namespace", "device", "stream"))
    batches = [F.col("ordinal").alias(name) for name in ("batch_first", "batch_last")]
    names = ("namespace", "device", "stream", "gateways", "last_us")
    unnumbered = streams.select(*names, F.lit("").alias("device_counter"), *batches)
    both = numbered.unionByName(unnumbered, allowMissingColumns=True)
    return with_missing_columns(both, device_parts_schema()).select(*device_parts_schema().names)
