"""The stock recipe of Structured Streaming, beside which the job is measured: as Spark's guide has it.

`withWatermark`, `dropDuplicatesWithinWatermark` by `ce_id`, then windows of a minute in update mode, which
`foreachBatch` merges into a Delta table. It keeps no log, and its state is as old as its watermark lets it be: what
comes later is dropped. Everything else is as the job has it: session, topics, records in a batch.
"""

from pathlib import Path

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.streaming.readwriter import DataStreamWriter

WATERMARKS = ("10 minutes", "1 hour")
"""Most lateness of a reading. More lateness costs state: all windows and identities of that time are kept in memory."""
VALUE_TYPE = "decimal(18,6)"
KEY = ("device", "metric", "window_start")
SCHEMA = "device string, metric string, window_start timestamp, n bigint, sum decimal(38,6)"


def readings(records: DataFrame) -> DataFrame:
    """Kafka's records (`includeHeaders`) as readings. Gateways' own events are left out."""
    header = F.map_from_entries("headers")
    return (
        records.select(
            F.col("key").cast("string").alias("device"),
            F.from_json(F.col("value").cast("string"), f"map<string,{VALUE_TYPE}>").alias("metrics"),
            *(header[name].cast("string").alias(name) for name in ("ce_id", "ce_type", "ce_time")),
        )
        .where(F.col("ce_type") == "sluice.reading")
        .select("ce_id", "device", F.col("ce_time").cast("timestamp").alias("event_time"), "metrics")
    )


def windows(stream: DataFrame, watermark: str) -> DataFrame:
    """The recipe: rows as they are merged."""
    return (
        readings(stream)
        .withWatermark("event_time", watermark)
        .dropDuplicatesWithinWatermark(["ce_id"])
        .select("device", "event_time", F.explode("metrics").alias("metric", "value"))
        .groupBy("device", "metric", F.window("event_time", "1 minute"))
        .agg(F.count("value").alias("n"), F.sum("value").alias("sum"))
        .select("device", "metric", F.col("window.start").alias("window_start"), "n", "sum")
    )


class Stock:
    """The recipe on one table."""

    def __init__(self, spark: SparkSession, watermark: str, folder: Path) -> None:
        self._spark = spark
        self._table = str(folder / "windows")
        self._watermark = watermark
        DeltaTable.create(spark).location(self._table).addColumns(spark.createDataFrame([], SCHEMA).schema).execute()

    def writer(self, records: DataFrame) -> DataStreamWriter:
        return windows(records, self._watermark).writeStream.outputMode("update").foreachBatch(self._merge)

    def _merge(self, changed: DataFrame, _number: int) -> None:
        same = " AND ".join(f"old.{name} = new.{name}" for name in KEY)
        (
            DeltaTable.forPath(changed.sparkSession, self._table)
            .alias("old")
            .merge(changed.alias("new"), same)
            .whenMatchedUpdateAll()
            .whenNotMatchedInsertAll()
            .execute()
        )

    def windows(self) -> DataFrame:
        """The table that it has filled."""
        return self._spark.read.format("delta").load(self._table)
