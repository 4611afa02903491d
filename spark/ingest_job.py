"""The ingest job: Kafka to `log` and `windows`, batch by batch, until it is told to stop."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.streaming.query import StreamingQuery

from spark.correction_records import CORRECTION_TYPE
from spark.kafka_records import typed_records
from spark.log_table import BatchId, append_batch, batch_rows, create_log, lane_spans, open_log
from spark.payload_decode import decoded
from spark.readings_view import is_reading
from spark.time_corrections import create_corrections, retimed, take_corrections
from spark.windows_table import WINDOW_S, Revisions, create_windows, merge_batch, unwindowed

TOPICS_DEFAULT = "device-.*|gateway-events"
INTERPRETED_ROWS_MAX = 10_000
"""Batches up to this size are not compiled to Java code."""
POLL_S = 0.2
PROGRESS_WAIT_S_MAX = 5.0
"""How long a finished query may take to report its last batch."""


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """What one run reads and writes."""

    bootstrap: str
    """Kafka's `host:port`, several with commas between."""
    warehouse: str
    checkpoint: str
    topics: str = TOPICS_DEFAULT
    """A regular expression of whole names; topics that are made later and match are taken up too."""
    interval_s: float = 5.0
    once: bool = False
    """Read what is there, and end."""
    batch_records_max: int = 200_000
    """Records in one batch: what bounds its memory after an outage."""
    window_s: int = WINDOW_S


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What one batch was made of."""

    rows: int
    duplicates: int
    rejected: int
    late: int
    """Kafka records that fell into a window which an earlier batch had written."""
    revised: int
    """Windows that they corrected."""
    unwindowed: int
    """Good readings that are in no window, because their time is implausible or unknown."""
    corrections: int
    """Time corrections, by which gateways put right what they told of their clocks."""
    seconds: float


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One finished batch, for people and for whoever waits for it."""

    batch: int
    counts: BatchCounts
    lag: int | None
    """Records that Kafka held beyond this batch when it began; None where that was not asked (a batch done again)."""
    end_offsets: dict[str, dict[str, int]]
    """The next offset to be read, by topic and partition."""


class QueryIdError(Exception):
    """Spark does not say which query a batch belongs to; the message says what to do."""


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """A batch that must not begin, because the job was asked to stop. It is read again by the next run."""


def process_batch(records: DataFrame, batch: BatchId, warehouse: str, window_s: int = WINDOW_S) -> BatchCounts:
    """Take one batch of Kafka records into the tables. Doing it again, whole or from the middle, changes nothing.

    `records` is what Spark's Kafka source yields with `includeHeaders`.
    """
    begun = time.monotonic()
    rows = decoded(typed_records(records)).persist()
    try:
        count, spans = lane_spans(rows)
        with _interpreted_if(records.sparkSession, small=count <= INTERPRETED_ROWS_MAX):
            append_batch(warehouse, rows, spans, batch)
            # Read back what was committed: a retry works on what the first attempt decided, not on what it would
            # decide itself.
            log = open_log(records.sparkSession, warehouse)
            counts, revisions = _merge_appended(log, batch, warehouse, window_s)
    finally:
        rows.unpersist()
    return BatchCounts(
        rows=counts.rows,
        duplicates=counts.duplicates,
        rejected=counts.rejected,
        late=revisions.late,
        revised=revisions.revised,
        unwindowed=counts.unwindowed,
        corrections=counts.corrections,
        seconds=time.monotonic() - begun,
    )


def _merge_appended(log: DataFrame, batch: BatchId, warehouse: str, window_s: int) -> tuple[Row, Revisions]:
    appended = batch_rows(log, batch).persist()
    try:
        corrections = take_corrections(warehouse, log, appended)
        is_correction = (F.col("ce_type") == CORRECTION_TYPE) & F.col("reject_reason").isNull() & ~F.col("duplicate")
        counts = (
            retimed(appended, corrections.known.current)
            .agg(
                F.count("*").alias("rows"),
                F.count_if("duplicate").alias("duplicates"),
                F.count_if(F.col("reject_reason").isNotNull()).alias("rejected"),
                F.count_if(is_reading() & unwindowed()).alias("unwindowed"),
                F.count_if(is_correction).alias("corrections"),
            )
            .collect()[0]
        )
        return counts, merge_batch(warehouse, log, appended, corrections, batch, window_s)
    finally:
        appended.unpersist()


@contextmanager
def _interpreted_if(spark: SparkSession, *, small: bool) -> Iterator[None]:
    """Compiling a query takes longer than interpreting it for a few thousand rows: half of a small batch's time."""
    if not small:
        yield
        return
    interpreted = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
    for name, value in interpreted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in interpreted:
            spark.conf.unset(name)


def run_ingest(
    spark: SparkSession,
    settings: IngestSettings,
    stop: threading.Event,
    ready: Callable[[], None],
    report: Callable[[BatchReport], None],
) -> None:
    """Run until everything is read (`once`), or until `stop` is set: the running batch is then finished first.

    `ready` is called when the query runs, `report` after every batch that had records; both on this thread.
    Raises StreamingQueryException when the query fails: what it had committed stays, the next run goes on there.
    Raises WindowLengthError, and changes nothing, when the warehouse holds windows of another length.
    """
    create_windows(spark, settings.warehouse, settings.window_s)
    create_log(spark, settings.warehouse)
    create_corrections(spark, settings.warehouse, open_log(spark, settings.warehouse))
    finished: dict[int, BatchCounts] = {}

    def take(records: DataFrame, number: int) -> None:
        if stop.is_set():
            # Returning would commit the batch unread.
            raise Interrupted
        batch = BatchId(running_query_id(records.sparkSession), number)
        finished[number] = process_batch(records, batch, settings.warehouse, settings.window_s)

    query = _start(kafka_records(spark, settings), settings, take)
    try:
        ready()
        while query.isActive:
            time.sleep(POLL_S)
            _report_finished(query, finished, report)
            if stop.is_set() and not query.status["isTriggerActive"]:
                break
        if not stop.is_set():
            _report_rest(query, finished, report)
            query.awaitTermination()  # raises what the query ended with
    except StreamingQueryException:
        if not stop.is_set():
            raise
    finally:
        query.stop()
    _report_rest(query, finished, report)


def running_query_id(spark: SparkSession) -> str:
    """Return the id of the query whose batch this thread processes. Raises QueryIdError where Spark does not say it.

    It is kept in the checkpoint: a new checkpoint has another, and counts batches from 0 again. Without it a new
    checkpoint's batches would be taken for those of the one before, and skipped.
    """
    query_id = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    if not query_id:
        raise QueryIdError(
            "Spark does not say which streaming query this batch belongs to, so that its records could be mistaken for "
            "ones already stored; none were taken. PYSPARK_PIN_THREAD=false does this: unset it, and start again."
        )
    return str(query_id)


def kafka_records(spark: SparkSession, settings: IngestSettings) -> DataFrame:
    """Return the stream of Kafka's records, from the beginning where the checkpoint says nothing else."""
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings.bootstrap)
        # Spark searches names for the pattern; unanchored, it would also read topics that merely contain a match.
        .option("subscribePattern", f"^(?:{settings.topics})$")
        .option("includeHeaders", "true")
        .option("startingOffsets", "earliest")
        # Records that retention took before they were read are a failure to be looked at, not to be passed over.
        .option("failOnDataLoss", "true")
        .option("maxOffsetsPerTrigger", settings.batch_records_max)
        # How old the list of topics may be: the default of five minutes would leave a new topic unread that long.
        .option("kafka.metadata.max.age.ms", 5_000)
        .load()
    )


def _start(records: DataFrame, settings: IngestSettings, take: Callable[[DataFrame, int], None]) -> StreamingQuery:
    writer = records.writeStream.foreachBatch(take).option("checkpointLocation", settings.checkpoint)
    if settings.once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{settings.interval_s} seconds").start()


def _report_finished(
    query: StreamingQuery, finished: dict[int, BatchCounts], report: Callable[[BatchReport], None]
) -> None:
    """Report batches that are both processed and committed by the query."""
    if not finished:
        return
    for progress in query.recentProgress:
        counts = finished.pop(progress.batchId, None) if progress.numInputRows else None
        if counts is not None:
            source = progress.sources[0]
            end_offsets = json.loads(source.endOffset)
            # A batch that an earlier run began and did not finish has "null" here.
            newest = json.loads(source.latestOffset or "null")
            lag = None if newest is None else _records(newest) - _records(end_offsets)
            report(BatchReport(progress.batchId, counts, lag, end_offsets))


def _report_rest(
    query: StreamingQuery, finished: dict[int, BatchCounts], report: Callable[[BatchReport], None]
) -> None:
    """Report what is left once the query has ended: its progress may come a moment after its end."""
    deadline = time.monotonic() + PROGRESS_WAIT_S_MAX
    while finished and time.monotonic() < deadline:
        _report_finished(query, finished, report)
        if finished:
            time.sleep(POLL_S)


def _records(offsets: dict[str, dict[str, int]]) -> int:
    return sum(offset for partitions in offsets.values() for offset in partitions.values())
