"""The ingest job: Kafka to `log` and `windows`, batch by batch, until it is told to stop."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark.batch_job import BatchCounts, BatchJob
from spark.log_table import BatchId
from spark.windows_table import WINDOW_S

TOPICS_DEFAULT = "device-.*|gateway-events"
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
    job = BatchJob(spark, settings.warehouse, settings.window_s)
    finished: dict[int, BatchCounts] = {}

    def take(records: DataFrame, number: int) -> None:
        if stop.is_set():
            # Returning would commit the batch unread.
            raise Interrupted
        batch = BatchId(running_query_id(records.sparkSession), number)
        finished[number] = job.take(records, batch, {})

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
        job.save()
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
        source = progress.sources[0]
        # While nothing comes Spark reports the batch that is to be the next; and one that was done before is not read.
        counts = finished.pop(progress.batchId, None) if source.startOffset != source.endOffset else None
        if counts is not None:
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
