"""Writes the append-only table `log`: a row for each time that a Kafka record was read, in one commit for each batch.

All other tables derive from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.decode.codec_declarations import USUAL_TIMES, Times
from spark.decode.value_types import METRICS_TYPE
from spark.engine.delta_staging import CHECKPOINT_INTERVAL, AppendTable, make_table, with_missing_columns
from spark.engine.literals import constant
from spark.engine.made_file import MadeFile
from spark.engine.told_error import ToldError
from spark.log.verdicts import IMPLAUSIBLE_DATE, RETRY
from spark.log.warehouse_version import Version, seen_tables

SCHEMA = f"""
    topic_id string, topic string, partition int, offset bigint, kafka_timestamp timestamp,
    key string, value binary, headers array<struct<key: string, value: binary>>,
    namespace string, gateway string, device string, stream string,
    buffer string, lane string, lane_sequence bigint, ce_id string, ce_type string, subject string,
    event_time timestamp, time_error_us bigint, time_quality string, received_time timestamp,
    gateway_boot string, boot_time_us bigint, content_type string,
    device_boot string, device_sequence bigint, device_counter string, doubt string, boot_time_error_us bigint,
    metrics {METRICS_TYPE}, pack_span_us bigint, undeclared array<string>,
    duplicate boolean, reject_reason string,
    ingest string, batch bigint, ordinal bigint, code_version string, declarations string, event_date date
"""
"""Columns of `log`. `device_counter` is null if device and stream imply it (`record_contract.implied_counter`).
`headers` has all headers of a record with a fault in them, or else those that the contract does not know.
`pack_span_us` is the time from a pack's earliest value to the record's event time; null if all values have one time."""
LOG_PARTITION = "event_date"
SKIPPING_COLUMNS = (
    "event_time,ordinal,device,ce_type,topic,partition,offset,lane,lane_sequence,reject_reason,"
    "gateway_boot,boot_time_us,boot_time_error_us,pack_span_us,kafka_timestamp,ingest"
)
"""Columns with statistics (least, greatest, nulls) in each file. By them, Delta skips files in queries and in the
searches for copies and for readings that a time correction moves."""

ORDINAL = "sluice-ordinal"
"""Application whose commit number in a table is the last batch of `log` that the table has."""


@dataclass(frozen=True, slots=True)
class BatchId:
    """A batch of a streaming query. By it, a retried append is recognised, and counts once."""

    ingest: str
    """Id of the streaming query. A new checkpoint has a new id, because its batches count from 0 again."""
    number: int


class CheckpointError(ToldError):
    """Spark's checkpoint does not fit the tables. The message says how this shows."""


@dataclass(frozen=True, slots=True)
class BatchIds:
    """Batches of another version's `log` that become one batch. Their records have `ingest` and `batch` already."""

    numbers: Mapping[str, int]
    """Last commit number of each application. By it, this `log` knows too which batches it has."""


def log_schema() -> StructType:
    """Return the table's columns. It needs a running session, whose parser reads them."""
    return cast("StructType", StructType.fromDDL(SCHEMA))


def log_path(tables: str) -> str:
    """Return the table's path. `tables` is the folder of one version of the warehouse's tables."""
    return f"{tables}/log"


def create_log(spark: SparkSession, tables: str) -> None:
    """Create the table, or add columns that it lacks."""
    properties = {
        "delta.appendOnly": "true",
        "delta.dataSkippingStatsColumns": SKIPPING_COLUMNS,
        **CHECKPOINT_INTERVAL,
    }
    make_table(spark, log_path(tables), log_schema(), partition=LOG_PARTITION, properties=properties)


def read_log(spark: SparkSession, tables: str) -> DataFrame:
    """Return the table as it stands, with each record as it was read. Amendments are not applied."""
    return with_missing_columns(spark.read.format("delta").load(log_path(tables)), log_schema())


def open_log(spark: SparkSession, warehouse: str, version: Version | None = None) -> DataFrame:
    """Return the warehouse's `log`, and make it the temporary view `log`."""
    log = read_log(spark, seen_tables(spark, warehouse, version))
    log.createOrReplaceTempView("log")
    return log


class Log:
    """The table `log`, for its one writer."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        self._spark = spark
        self._tables = tables
        self.table = AppendTable(spark, log_path(tables), log_schema())

    @property
    def last(self) -> int:
        """The ordinal of the last batch; -1 if there is none."""
        return self.table.last(ORDINAL)

    def ordinal_of(self, batch: BatchId) -> int | None:
        """The ordinal of a committed batch; None if the batch was not committed."""
        if self.table.last(query_of(batch)) < batch.number:
            return None
        of_batch = (F.col("ingest") == batch.ingest) & (F.col("batch") == batch.number)
        row = read_log(self._spark, self._tables).where(of_batch).agg(F.min("ordinal").alias("ordinal")).first()
        return self.last if row is None or row.ordinal is None else int(row.ordinal)

    def rows_of(self, ordinal: int) -> DataFrame:
        """The rows of a committed batch."""
        return read_log(self._spark, self._tables).where(F.col("ordinal") == ordinal)


def expect_same(log: "Log", batch: BatchId, ordinal: int, records: DataFrame) -> None:
    """Check that a batch that comes again has the records that were committed. Raises CheckpointError."""
    of_batch = (F.col("ordinal") == ordinal) & (F.col("ingest") == batch.ingest) & (F.col("batch") == batch.number)
    stands = _extent(log.rows_of(ordinal).where(of_batch))
    # If a replay read the records from Kafka, they stand there under another `ingest`.
    if stands and _extent(records) != stands:
        raise CheckpointError(f"batch {batch.number} comes again with other records than it was committed with")


def _extent(rows: DataFrame) -> set[tuple[str, int, int, int]]:
    """Topic, partition, number of records and last offset of each partition."""
    found = rows.groupBy("topic", "partition").agg(F.count("*").alias("rows"), F.max("offset").alias("last")).collect()
    return {(row.topic, row.partition, row.rows, row["last"]) for row in found}


class LogAppend:
    """One batch on its way into `log`. Its files are written, read, and then committed."""

    def __init__(self, log: Log, batch: "BatchId | BatchIds") -> None:
        self._staged = log.table.begin()
        self._batch = batch
        self._final: int | None = None
        """Files before those of rows that were set aside; None if there are none."""
        self.ordinal = log.last + 1

    def take(self, files: Sequence[MadeFile], aside: Sequence[MadeFile] = ()) -> DataFrame:
        """Take the files of the batch's rows, none marked as a duplicate yet, and return the rows.

        `aside` are files of rows that came before, and need a verdict.
        """
        self._staged.take([*files, *aside])
        self._final = len(files) if aside else None
        return self._staged.rows()

    def parted(self) -> tuple[DataFrame, DataFrame | None]:
        """The written rows that were not set aside, and those that were; None if none were."""
        if self._final is None:
            return self._staged.rows(), None
        return self._staged.rows(0, self._final), self._staged.rows(self._final)

    def rewrite(self, rows: DataFrame) -> DataFrame:
        """Write rows with the table's columns instead of all rows written before, and return the written rows."""
        self._staged.write(rows)
        self._final = None
        return self._staged.rows()

    def rewrite_aside(self, rows: DataFrame) -> DataFrame:
        """Write rows with the table's columns instead of those that were set aside, and return all rows."""
        self._staged.write(rows, beside=self._final or 0)
        return self._staged.rows()

    def commit(self, so_far: Mapping[str, int] | None = None) -> None:
        """Commit the rows written last. `so_far` has how far other tables are, as commit numbers by application."""
        batch = self._batch
        numbers = {query_of(batch): batch.number} if isinstance(batch, BatchId) else batch.numbers
        self._staged.commit({ORDINAL: self.ordinal, **numbers, **(so_far or {})})


def from_kafka() -> Column:
    """True for rows that were read from Kafka, not again from `log`."""
    return ~F.col("ingest").startswith(RETRY)


def query_of(batch: BatchId) -> str:
    """The application of the commits of a query's batches."""
    return f"sluice-ingest-{batch.ingest}"


def with_topic_ids(records: DataFrame, topic_ids: Mapping[str, str]) -> DataFrame:
    """Add Kafka's id of each record's topic."""
    return records.withColumn("topic_id", F.try_element_at(constant(topic_ids, "map<string,string>"), F.col("topic")))


def date_of(event_time: Column, time_error_us: Column, times: Times = USUAL_TIMES) -> Column:
    """The date of an event time, or IMPLAUSIBLE_DATE. It needs the record's `kafka_timestamp` beside it."""
    # The upper bound is by Kafka's clock, because a retry must get the same date. The time of this run would differ.
    plausible = (
        (event_time >= F.lit(times.plausible_from_time))
        & (event_time <= F.col("kafka_timestamp") + F.expr(f"interval {times.ahead_max_s} seconds"))
        & (time_error_us < TIME_ERROR_UNKNOWN_US)
    )
    return F.when(plausible, F.to_date(event_time)).otherwise(F.lit(IMPLAUSIBLE_DATE).cast("date"))


def is_implausible() -> Column:
    """True for rows with an implausible time although their gateway knew its clock. Meanwhile they are rejects."""
    return (F.col("event_date") == F.lit(IMPLAUSIBLE_DATE).cast("date")) & (
        F.col("time_error_us") < TIME_ERROR_UNKNOWN_US
    )
