"""`log`: every Kafka record once per time it was read, append-only, one commit per batch. All else derives from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import cast

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.decode.codec_decimals import METRICS_TYPE, constant, of_batch
from spark.decode.codec_declarations import USUAL_TIMES, Streams, Times
from spark.engine.built_once import recorded
from spark.engine.delta_staging import CHECKPOINT_INTERVAL, AppendTable, add_missing_columns, with_missing_columns
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
"""`device_counter` is null where device and stream imply it (`record_contract.implied_counter`); `headers`: of a
record whose headers cannot be read all that came, else those that the contract does not know; `pack_span_us`: how long
before the record's event time the earliest value of a pack was taken, null where there is one time alone."""
LOG_PARTITION = "event_date"
SKIPPING_COLUMNS = (
    "event_time,ordinal,device,ce_type,topic,partition,offset,lane,lane_sequence,reject_reason,"
    "gateway_boot,boot_time_us,boot_time_error_us,pack_span_us,kafka_timestamp,ingest"
)
"""Whose least and greatest value, and count of nulls, each file keeps: what queries, the search for copies and for what
a time correction mends are pruned by."""

IMPLAUSIBLE_DATE = "1970-01-01"
"""The partition of all records without an event time, with one that cannot be, or with one whose error nothing
bounds: one broken clock would otherwise open a partition for every date it comes up with."""

ORDINAL = "sluice-ordinal"
"""The application under which a table says up to which batch it has taken the log."""


@dataclass(frozen=True, slots=True)
class BatchId:
    """Which batch of which streaming query: what makes a retried append one append."""

    ingest: str
    """The streaming query's id. A new checkpoint has a new one, for its batches count from 0 again."""
    number: int


class CheckpointError(Exception):
    """Spark's checkpoint does not stand where the tables end; the message says which, and how that shows."""


RETRY = "retry-"
"""How the id begins of what reads records again from `log` itself."""


@dataclass(frozen=True, slots=True)
class BatchIds:
    """Batches of another version's `log` that become one: their records have `ingest` and `batch` already."""

    numbers: Mapping[str, int]
    """By application, the number of the last of its commits: what was taken is known here as well."""


def log_schema() -> StructType:
    """Return the table's columns; needs a running session, whose parser reads them."""
    return cast("StructType", StructType.fromDDL(SCHEMA))


def log_path(tables: str) -> str:
    """Return where the table lies; `tables` is the folder of one version of the warehouse's tables."""
    return f"{tables}/log"


def create_log(spark: SparkSession, tables: str) -> None:
    """Create the table where there is none."""
    (
        DeltaTable.createIfNotExists(spark)
        .location(log_path(tables))
        .addColumns(log_schema())
        .partitionedBy(LOG_PARTITION)
        .property("delta.appendOnly", "true")
        .property("delta.dataSkippingStatsColumns", SKIPPING_COLUMNS)
        .property(*CHECKPOINT_INTERVAL)
        .execute()
    )
    add_missing_columns(spark, log_path(tables), log_schema())


def read_log(spark: SparkSession, tables: str) -> DataFrame:
    """Return the table as it stands: each record as it was read, whatever was found out about it later."""
    return with_missing_columns(spark.read.format("delta").load(log_path(tables)), log_schema())


def open_log(spark: SparkSession, warehouse: str, version: Version | None = None) -> DataFrame:
    """Return the warehouse's `log`, which SQL then finds as the temporary view `log`."""
    log = read_log(spark, seen_tables(spark, warehouse, version))
    log.createOrReplaceTempView("log")
    return log


class Log:
    """The table as its one writer has it."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        self._spark = spark
        self._tables = tables
        self.table = AppendTable(spark, log_path(tables), log_schema())

    @property
    def last(self) -> int:
        """The ordinal of the last batch; -1 where there is none."""
        return self.table.last(ORDINAL)

    def ordinal_of(self, batch: BatchId) -> int | None:
        """The ordinal of a batch that was committed; None where it was not."""
        if self.table.last(query_of(batch)) < batch.number:
            return None
        of_batch = (F.col("ingest") == batch.ingest) & (F.col("batch") == batch.number)
        row = read_log(self._spark, self._tables).where(of_batch).agg(F.min("ordinal").alias("ordinal")).first()
        return self.last if row is None or row.ordinal is None else int(row.ordinal)

    def rows_of(self, ordinal: int) -> DataFrame:
        """The rows of a batch that was committed."""
        return read_log(self._spark, self._tables).where(F.col("ordinal") == ordinal)


def expect_same(log: "Log", batch: BatchId, ordinal: int, records: DataFrame) -> None:
    """Make sure that a batch which comes again is the one that was committed. Raises CheckpointError."""
    of_batch = (F.col("ordinal") == ordinal) & (F.col("ingest") == batch.ingest) & (F.col("batch") == batch.number)
    stands = _extent(log.rows_of(ordinal).where(of_batch))
    # Where a replay read it from Kafka, it stands there under another name.
    if stands and _extent(records) != stands:
        raise CheckpointError(f"batch {batch.number} comes again with other records than it was committed with")


def _extent(rows: DataFrame) -> set[tuple[str, int, int, int]]:
    """Of each partition, how many records there are, and the last."""
    found = rows.groupBy("topic", "partition").agg(F.count("*").alias("rows"), F.max("offset").alias("last")).collect()
    return {(row.topic, row.partition, row.rows, row["last"]) for row in found}


class LogAppend:
    """One batch on its way into `log`: its files are written, looked at, and committed."""

    def __init__(self, log: Log, batch: "BatchId | BatchIds") -> None:
        self._staged = log.table.begin()
        self._batch = batch
        self.ordinal = log.last + 1

    def write(self, decoded: DataFrame, streams: Streams) -> DataFrame:
        """Write decoded records, none of them as a duplicate yet, and return them as they were written."""
        if isinstance(self._batch, BatchId):
            numbers = {"ingest": F.lit(self._batch.ingest), "batch": of_batch(self._batch.number, "topic")}
            decoded = decoded.withColumns(numbers)
        rows = log_rows(decoded.withColumn("duplicate", F.lit(False)), streams)
        return self.rewrite(rows.withColumn("ordinal", of_batch(self.ordinal, "topic")))

    def rewrite(self, rows: DataFrame) -> DataFrame:
        """Write rows of the table's columns in the place of those that were written before."""
        self._staged.write(rows)
        return self._staged.rows()

    def commit(self, so_far: Mapping[str, int] | None = None) -> None:
        """Commit what was written last. `so_far`: how far other tables have come, by application."""
        batch = self._batch
        numbers = {query_of(batch): batch.number} if isinstance(batch, BatchId) else batch.numbers
        self._staged.commit({ORDINAL: self.ordinal, **numbers, **(so_far or {})})


def from_kafka() -> Column:
    """Tell which rows were read from Kafka, and not again from `log`."""
    return ~F.col("ingest").startswith(RETRY)


def query_of(batch: BatchId) -> str:
    """The application under which a query's batches are committed."""
    return f"sluice-ingest-{batch.ingest}"


def with_topic_ids(records: DataFrame, topic_ids: Mapping[str, str]) -> DataFrame:
    """Add each topic's id, as Kafka told it."""
    return records.withColumn("topic_id", F.try_element_at(constant(topic_ids, "map<string,string>"), F.col("topic")))


@recorded
def log_rows(judged: DataFrame, streams: Streams) -> DataFrame:
    """Bring decoded records, with topic ids and batch, into the table's columns, but for `ordinal`."""
    numbering = {"ordinal"}
    ago_us = F.array_max("metrics.ago_us")
    complete = judged.withColumns(
        {
            "pack_span_us": ago_us,
            "code_version": F.lit(version("sluice")),
            "declarations": F.lit(streams.version),
            "event_date": date_of(F.col("event_time"), F.col("time_error_us"), streams.times),
        }
    )
    return complete.select(
        *(
            F.col(field.name).cast(field.dataType).alias(field.name)
            for field in log_schema()
            if field.name not in numbering
        )
    )


def date_of(event_time: Column, time_error_us: Column, times: Times = USUAL_TIMES) -> Column:
    """The date of an event time, `IMPLAUSIBLE_DATE` for one that cannot be; beside the record's `kafka_timestamp`."""
    # The upper bound is the record's own: Kafka's clock, unlike the time of this run, is the same in a retry.
    plausible = (
        (event_time >= F.lit(times.plausible_from_time))
        & (event_time <= F.col("kafka_timestamp") + F.expr(f"interval {times.ahead_max_s} seconds"))
        & (time_error_us < TIME_ERROR_UNKNOWN_US)
    )
    return F.when(plausible, F.to_date(event_time)).otherwise(F.lit(IMPLAUSIBLE_DATE).cast("date"))


def is_implausible() -> Column:
    """Tell which rows have a time that cannot be, though their gateway knew its clock: rejects while it is so."""
    return (F.col("event_date") == F.lit(IMPLAUSIBLE_DATE).cast("date")) & (
        F.col("time_error_us") < TIME_ERROR_UNKNOWN_US
    )
