"""Makes a warehouse as a program before `device_parts` left it."""

from shutil import rmtree

from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.engine.delta_staging import AppendTable, make_table
from spark.ingest.former_devices import SETTLED
from spark.log.device_parts import device_parts_path, read_device_parts
from spark.log.log_table import ORDINAL
from spark.log.sequence_runs import RUN_COLUMNS


def of_an_earlier_program(spark: SparkSession, tables: str, saved: int) -> None:
    """Put the former tables, up to the batch `saved`, in the place of `device_parts`.

    Of each run, the newest island is in `device_runs`, and the others are settled.
    """
    parts = read_device_parts(spark, tables).where(F.col("batch_first") <= saved)
    islands = parts.select(*RUN_COLUMNS, F.inline("islands"), "batch_first", "batch_last")
    newest = F.max("first").over(Window.partitionBy(*RUN_COLUMNS))
    each = islands.withColumn("newest", newest)
    settled = each.where("first < newest").drop("newest")
    island = F.struct(*(name for name in islands.columns if name not in RUN_COLUMNS))
    runs = each.where("first = newest").groupBy(*RUN_COLUMNS).agg(F.collect_list(island).alias("islands"))
    runs = runs.withColumn("ordinal", F.lit(saved).cast("bigint"))
    heard = parts.groupBy("namespace", "device", "stream").agg(
        F.array_distinct(F.flatten(F.collect_list("gateways"))).alias("gateways"), F.max("last_us").alias("last_us")
    )
    former = {
        "settled_islands": (settled, {SETTLED: saved}),
        "device_runs": (runs, {ORDINAL: saved, SETTLED: saved}),
        "devices_heard": (heard.withColumn("ordinal", F.lit(saved).cast("bigint")), {ORDINAL: saved}),
    }
    for name, (rows, numbers) in former.items():
        path = f"{tables}/{name}"
        make_table(spark, path, rows.schema)
        AppendTable(spark, path, rows.schema).append(rows, numbers)
    rmtree(device_parts_path(tables))
