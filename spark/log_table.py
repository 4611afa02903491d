"""`log`: every Kafka record once per time it was read, append-only, one commit per batch. All else derives from it."""

from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from operator import or_
from typing import cast

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructField, StructType

from spark.payload_decode import METRICS_TYPE

SCHEMA = f"""
    topic string, partition int, offset bigint, kafka_timestamp timestamp,
    key string, value binary,
    namespace string, gateway string, device string, stream string,
    buffer string, lane string, lane_sequence bigint, ce_id string, ce_type string, subject string,
    event_time timestamp, time_error_us bigint, time_quality string, received_time timestamp,
    gateway_boot string, boot_time_us bigint, content_type string,
    device_boot string, device_sequence bigint, doubt string, boot_time_error_us bigint,
    metrics {METRICS_TYPE}, duplicate boolean, reject_reason string,
    ingest string, batch bigint, code_version string, event_date date
"""
PARTITION = "event_date"
SKIPPING_COLUMNS = (
    "event_time,lane,lane_sequence,ingest,batch,device,ce_type,topic,partition,offset,"
    "gateway_boot,boot_time_us,boot_time_error_us"
)
"""Whose least and greatest value, and count of nulls, each file keeps: what queries, the duplicate check and the search
for what a time correction mends are pruned by."""

PLAUSIBLE_FROM = "2020-01-01"
AHEAD_MAX = "1 day"
"""An event may be this much later than Kafka's own timestamp of its record."""
TIME_ERROR_UNKNOWN_US = 2**63 - 1
"""`ce_timeerror` of a gateway whose clock was never synced: its event times look like any others, and say nothing."""
IMPLAUSIBLE_DATE = "1970-01-01"
"""The partition of all records without an event time, with one that cannot be, or with one whose error nothing
bounds: one broken clock would otherwise open a partition for every date it comes up with."""

LANES_MAX = 200
"""Lanes named one by one in the duplicate check; a batch of more is looked up by the span of their names."""


@dataclass(frozen=True, slots=True)
class BatchId:
    """Which batch of which streaming query: what makes a retried append one append."""

    ingest: str
    """The streaming query's id. A new checkpoint has a new one, for its batches count from 0 again."""
    number: int


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """What one batch holds of one lane."""

    lane: str
    first: int
    last: int


def log_schema() -> StructType:
    """Return the table's columns; needs a running session, whose parser reads them."""
    return cast("StructType", StructType.fromDDL(SCHEMA))


def log_path(warehouse: str) -> str:
    """Return where the table lies."""
    return f"{warehouse.rstrip('/')}/log"


def create_log(spark: SparkSession, warehouse: str) -> None:
    """Create the table where there is none; give one that an earlier version made the columns that it lacks."""
    if DeltaTable.isDeltaTable(spark, log_path(warehouse)):
        _add_columns(spark, warehouse)
        return
    (
        DeltaTable.createIfNotExists(spark)
        .location(log_path(warehouse))
        .addColumns(log_schema())
        .partitionedBy(PARTITION)
        .property("delta.appendOnly", "true")
        .property("delta.dataSkippingStatsColumns", SKIPPING_COLUMNS)
        .execute()
    )


def _add_columns(spark: SparkSession, warehouse: str) -> None:
    """Columns that are new come last, null in what stands there already: its files are not touched."""
    missing = _missing(spark.read.format("delta").load(log_path(warehouse)))
    if not missing:
        return
    table = f"delta.`{log_path(warehouse)}`"
    columns = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in missing)
    spark.sql(f"ALTER TABLE {table} ADD COLUMNS ({columns})")
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.dataSkippingStatsColumns' = '{SKIPPING_COLUMNS}')")


def _missing(log: DataFrame) -> list[StructField]:
    there = set(log.columns)
    return [field for field in log_schema() if field.name not in there]


def open_log(spark: SparkSession, warehouse: str) -> DataFrame:
    """Return the table, which SQL then finds as the temporary view `log`.

    Columns that it lacks, for an earlier version made it and no job of this one has written it yet, are null.
    """
    log = spark.read.format("delta").load(log_path(warehouse))
    log = log.withColumns({field.name: F.lit(None).cast(field.dataType) for field in _missing(log)})
    log.createOrReplaceTempView("log")
    return log


def append_batch(warehouse: str, rows: DataFrame, spans: list[LaneSpan], batch: BatchId) -> None:
    """Append one batch of decoded records in one commit; nothing happens if this batch was appended before.

    `rows` as `payload_decode.decoded` yields them; `spans` are their lanes.
    """
    spark = rows.sparkSession
    judged = with_duplicates(rows, spark.read.format("delta").load(log_path(warehouse)), spans)
    (
        log_rows(judged, batch)
        .write.format("delta")
        .mode("append")
        .option("txnAppId", f"log-{batch.ingest}")
        .option("txnVersion", batch.number)
        .save(log_path(warehouse))
    )


def batch_rows(log: DataFrame, batch: BatchId) -> DataFrame:
    """Return what one batch appended."""
    return log.where((F.col("ingest") == batch.ingest) & (F.col("batch") == batch.number))


def lane_spans(rows: DataFrame) -> tuple[int, list[LaneSpan]]:
    """Count a batch's rows, and say which lanes it holds, from which to which sequence number."""
    found = rows.groupBy("lane").agg(F.count("*"), F.min("lane_sequence"), F.max("lane_sequence")).collect()
    spans = [LaneSpan(lane, first, last) for lane, _, first, last in found if lane is not None and first is not None]
    return sum(count for _, count, _, _ in found), sorted(spans, key=lambda span: span.lane)


def with_duplicates(rows: DataFrame, log: DataFrame, spans: list[LaneSpan]) -> DataFrame:
    """Add `duplicate`: whether a good copy of the same `ce_id` stands in `log`, or earlier in this batch.

    Earlier means in Kafka's order. Rejected records are nobody's duplicates and nobody is theirs: a copy that was
    damaged on its way must not hide a later one that was not.
    """
    good = F.col("reject_reason").isNull()
    # The others are told apart by place, so that they do not all meet in one partition.
    identity = F.coalesce(F.when(good, F.col("ce_id")), F.concat_ws("/", "topic", "partition", "offset"))
    in_order = Window.partitionBy("identity").orderBy("topic", "partition", "offset")
    earlier = log.where(_within(spans) & ~F.col("duplicate") & good)
    seen = earlier.select(F.col("ce_id").alias("identity"), F.lit(True).alias("seen")).dropDuplicates()
    return (
        rows.withColumn("identity", identity)
        .withColumn("repeated", F.row_number().over(in_order) > 1)
        .join(seen, "identity", "left")
        .select(*rows.columns, (F.col("repeated") | F.coalesce("seen", F.lit(False))).alias("duplicate"))
    )


def log_rows(judged: DataFrame, batch: BatchId) -> DataFrame:
    """Bring a batch into the table's schema."""
    complete = judged.withColumns(
        {
            "ingest": F.lit(batch.ingest),
            "batch": F.lit(batch.number),
            "code_version": F.lit(version("sluice")),
            "event_date": date_of(F.col("event_time"), F.col("time_error_us")),
        }
    )
    return complete.select(*(F.col(field.name).cast(field.dataType).alias(field.name) for field in log_schema()))


def date_of(event_time: Column, time_error_us: Column) -> Column:
    """The date of an event time, `IMPLAUSIBLE_DATE` for one that cannot be; beside the record's `kafka_timestamp`."""
    # The upper bound is the record's own: Kafka's clock, unlike the time of this run, is the same in a retry.
    plausible = (
        (event_time >= F.lit(PLAUSIBLE_FROM).cast("timestamp"))
        & (event_time <= F.col("kafka_timestamp") + F.expr(f"interval {AHEAD_MAX}"))
        & (time_error_us < TIME_ERROR_UNKNOWN_US)
    )
    return F.when(plausible, F.to_date(event_time)).otherwise(F.lit(IMPLAUSIBLE_DATE).cast("date"))


def _within(spans: list[LaneSpan]) -> Column:
    """Where in `log` an earlier copy could stand, in literals, so that Delta passes over all other files."""
    if not spans:
        return F.lit(False)
    if len(spans) > LANES_MAX:
        return F.col("lane").between(spans[0].lane, spans[-1].lane)
    return reduce(
        or_,
        ((F.col("lane") == span.lane) & F.col("lane_sequence").between(span.first, span.last) for span in spans),
    )
