"""A warehouse as tests fill it, and its tables as the oracle writes them."""

from datetime import datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.testing import assertDataFrameEqual

from spark.batch_job import BatchCounts, BatchJob
from spark.engine.interpreted_queries import interpreted_if
from spark.log.amendments import effective_log
from spark.log.log_table import BatchId
from spark.log.readings_view import open_readings
from spark.log.warehouse_version import open_version, tables_of
from spark.views.windows_view import open_windows
from spark.windows.windows_table import folded, read_parts, shown, window_seconds
from tests.support import spark_oracle
from tests.support.sizes import WHOLE
from tests.support.spark_oracle import KafkaRecord, Reading, WindowKey, WindowRow
from tests.support.spark_records import EPOCH, kafka_frame


def expect_rows(frame: DataFrame, rows: DataFrame | list[Row]) -> None:
    """Fail, and show which rows differ, unless a frame has just these rows, in any order."""
    # Sums are exact here: nothing is nearly the same.
    assertDataFrameEqual(frame, rows, rtol=0, atol=0, showOnlyDiff=True)


class Warehouse:
    """A warehouse in the making: batches go in, tables come out as the oracle writes them."""

    def __init__(self, spark: SparkSession, path: Path, ingest: str = "first-query") -> None:
        self.spark = spark
        self.path = str(path)
        self.ingest = ingest
        self.job = BatchJob(spark, self.path)

    def take(self, number: int, records: list[KafkaRecord]) -> BatchCounts:
        return self.job.take(kafka_frame(self.spark, records), BatchId(self.ingest, number), {})

    def tables(self) -> spark_oracle.Tables:
        # A few hundred rows are sooner read than a query is compiled; other tests read compiled views.
        with interpreted_if(self.spark, small=True):
            return self._tables()

    def _tables(self) -> spark_oracle.Tables:
        log = effective_log(self.spark, self.job.tables)
        rejected = log.where(F.col("reject_reason").isNotNull()).select("topic", "partition", "offset").collect()
        return spark_oracle.Tables(
            self.readings(),
            {key: row for key, (row, _) in self.windows().items()},
            {(row.topic, row.partition, row.offset) for row in rejected},
            log.where("duplicate").count(),
        )

    def readings(self) -> list[Reading]:
        view = open_readings(self.spark, self.path)
        columns = ["namespace", "device", "stream", "metric", "event_us", "value", "ce_id"]
        columns += ["time_error_us", "time_quality", "correction_version"]
        rows = view.withColumn("event_us", F.unix_micros("event_time")).select(*columns).collect()
        return sorted(
            (
                *(r.namespace, r.device, r.stream, r.metric, at(r.event_us), r.value, r.ce_id),
                *(r.time_error_us, r.time_quality, r.correction_version),
            )
            for r in rows
        )

    def windows(self) -> dict[WindowKey, tuple[WindowRow, int]]:
        """Each window, and how many late values are in it."""
        table = window_figures(self.spark, self.path)
        rows = (
            table.withColumn("start_us", F.unix_micros("window_start"))
            .withColumn("end_us", F.unix_micros("window_end"))
            .drop("window_start", "window_end")
            .collect()
        )
        assert all(row.end_us - row.start_us == 60_000_000 for row in rows)
        found = {
            (row.namespace, row.device, row.stream, row.metric, at(row.start_us)): (
                WindowRow(row.n, row["min"], row["max"], row["sum"], row["first"], row["last"]),
                row.late,
            )
            for row in rows
        }
        assert len(found) == len(rows), "a window stands twice"
        return found


def window_figures(spark: SparkSession, warehouse: str) -> DataFrame:
    """The view of windows. In `make test` it lacks their status, which takes longer than a batch to find."""
    if WHOLE:
        return open_windows(spark, warehouse)
    tables = tables_of(warehouse, open_version(spark, warehouse))
    size_s = window_seconds(spark, tables)
    return shown(folded(read_parts(spark, tables), size_s), size_s)


def at(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)
