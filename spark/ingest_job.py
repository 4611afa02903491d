"""The ingest job: Kafka to the tables, batch by batch, until it is told to stop."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from spark.batch_job import BatchCounts, BatchJob
from spark.codec_declarations import Streams
from spark.kafka_source import KafkaSource, kafka_stream, lag, progress_offsets
from spark.log_table import BatchId, CheckpointError
from spark.reading_starts import ReadingStart, append_start, first_start, start_after
from spark.table_upkeep import Upkeep
from spark.topic_changes import Loss, TopicNow, Trouble, going_on, trouble_words, troubles
from spark.topic_watch import TopicWatch, TopicWatchError
from spark.warehouse_folder import files_in

POLL_S = 0.2
PROGRESS_WAIT_S_MAX = 5.0
"""How long a finished query may take to report its last batch."""
LOOK_S = 10.0
"""How often Kafka is asked what its topics are while nothing comes."""


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """What one run reads and writes."""

    source: KafkaSource
    warehouse: str
    checkpoint: str
    """A folder for Spark's checkpoints: of each start of reading one."""
    streams: Streams | None = None
    """What is declared of the streams; None: what the warehouse was last written by."""
    interval_s: float = 5.0
    once: bool = False
    """Read what is there, and end."""
    go_on: bool = False
    """Where Kafka no longer has what is next, read on from what there is, and record the rest as lost."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One finished batch, for people and for whoever waits for it."""

    batch: int
    counts: BatchCounts
    lag: int | None
    """Records that Kafka held beyond this batch when it began; None where that was not asked (a batch done again)."""
    behind_s: float | None
    """How long ago Kafka took in the last record that was read, of the topic that is furthest behind."""
    end_offsets: dict[str, dict[int, int]]
    """The next offset to be read, by topic and partition."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told how a run goes on."""

    ready: Callable[[Sequence[Loss]], None] = lambda _: None
    """When the query runs, with what was found to be lost in Kafka."""
    report: Callable[[BatchReport], None] = lambda _: None
    """After every batch that had records."""
    warn: Callable[[str], None] = lambda _: None
    """Of upkeep that failed, which holds up no reading. On any thread; the others on the caller's."""


class QueryIdError(Exception):
    """Spark does not say which query a batch belongs to; the message says what to do."""


class TopicTroubleError(Exception):
    """Kafka no longer has what is to be read next; the message says what happened, and how to go on."""

    def __init__(self, found: list[Trouble]) -> None:
        super().__init__(trouble_words(found))


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """A batch that must not begin, because the job was asked to stop. It is read again by the next run."""


def run_ingest(spark: SparkSession, settings: IngestSettings, stop: threading.Event, listener: Listener) -> None:
    """Run until everything is read (`once`), or until `stop` is set: the running batch is then finished first.

    Raises StreamingQueryException when the query fails: what it had committed stays, the next run goes on there.
    Raises TopicTroubleError where Kafka no longer has what is next, and TopicWatchError where it does not answer.
    Raises CheckpointError where Spark's checkpoint is older than the tables, or a part of it is gone.
    Raises WindowLengthError, and changes nothing, when the warehouse holds windows of another length.
    """
    source = settings.source
    # First: what is wrong with the warehouse is told without Kafka.
    job = BatchJob(spark, settings.warehouse, settings.streams, _reads(spark, source.every_pattern))
    with TopicWatch(spark, source.bootstrap, source.options, source.every_pattern) as watch:
        before = job.state.start
        start = _begun(job, settings, watch.look())
        query = _Query(job, watch, stop, listener.warn)
        records = kafka_stream(spark, replace(source, starting=start.starting or "earliest"))
        checkpoint = f"{settings.checkpoint.rstrip('/')}/{start.number}"
        _expect_whole(spark, checkpoint)
        running = _start(records, settings, checkpoint, query.take)
        try:
            listener.ready(() if start is before else start.losses)
            _wait(running, query, listener.report)
            query.tidy()
        except StreamingQueryException:
            if query.trouble is not None:
                raise query.trouble from None
            if not stop.is_set():
                raise
        finally:
            running.stop()
            try:
                job.save()
            finally:
                query.finish()
        _report_rest(running, query.finished, listener.report)


class _Query:
    """What Spark calls for each batch, and what is known of them."""

    def __init__(self, job: BatchJob, watch: TopicWatch, stop: threading.Event, warn: Callable[[str], None]) -> None:
        self.job = job
        self.stop = stop
        self.finished: dict[int, BatchCounts] = {}
        self.trouble: Exception | None = None
        self._watch = watch
        self._upkeep = Upkeep(job, warn)
        self._newest_us: int | None = None
        # Kafka is asked from Spark's thread, and from the waiting one.
        self._asking = threading.Lock()
        self._looked_s = time.monotonic()

    def take(self, records: DataFrame, number: int) -> None:
        if self.stop.is_set():
            # Returning would commit the batch unread.
            raise Interrupted
        try:
            batch = BatchId(running_query_id(records.sparkSession), number)
            topic_ids = {topic: found.topic_id for topic, found in self._look().items()}
            # Only now does Spark's checkpoint hold the batch before, so that it does not come again.
            self.tidy()
            counts = self.job.take(records, batch, topic_ids, lambda: self._expect(topic_ids))
            self._newest_us = max(counts.newest_us.values(), default=None)
            self.finished[number] = counts
        except (TopicTroubleError, TopicWatchError, QueryIdError, CheckpointError) as error:
            # Spark tells of it as text alone.
            self.trouble = error
            raise

    def tidy(self) -> None:
        """Keep the tables in order after the last batch."""
        self._upkeep.after_batch(self._newest_us)
        self._newest_us = None

    def finish(self) -> None:
        """Wait for what is done beside the batches; where the job was asked to stop, no longer than it must."""
        if self.stop.is_set():
            self._upkeep.end()
        else:
            self._upkeep.wait()

    def look_if_due(self) -> None:
        """See whether topics were deleted while nothing comes: Spark would never miss one. Raises TopicTroubleError."""
        if time.monotonic() - self._looked_s > LOOK_S:
            # That Kafka does not answer is for the query to say, which waits longer for it.
            with suppress(TopicWatchError):
                self._look()

    def _look(self) -> dict[str, TopicNow]:
        """Ask Kafka what its topics are. Raises TopicTroubleError where one cannot simply read on."""
        with self._asking:
            now = self._watch.look()
        self._looked_s = time.monotonic()
        found = troubles(self.job.state.topics(), now)
        if found:
            raise TopicTroubleError(found)
        return now

    def _expect(self, topic_ids: Mapping[str, str]) -> None:
        """Make sure that a batch's topics are the same as before it was read: one made anew has the same offsets."""
        with self._asking:
            ids = self._watch.topic_ids()
        if any(ids.get(topic) != topic_id for topic, topic_id in topic_ids.items()):
            self._look()


def _begun(job: BatchJob, settings: IngestSettings, now: Mapping[str, TopicNow]) -> ReadingStart:
    """Find where to read on: where Spark's checkpoint stands, or from a new start. Raises TopicTroubleError."""
    spark, state, source = job.spark, job.state, settings.source
    sources = 1 if source.backlog_topics is None else 2
    start = state.start
    if start is None:
        start = first_start(sources)
        append_start(spark, job.tables, start)
        state.begin(start)
        return start
    topics = state.topics()
    reads = _reads(spark, source.every_pattern)
    read = {topic: read_to for topic, read_to in topics.items() if reads(topic)}
    found = troubles(read, now)
    if found and not settings.go_on:
        raise TopicTroubleError(found)
    # Spark's checkpoint goes on only with as many sources, and with all topics that are in it.
    if found or start.sources != sources or read.keys() != topics.keys():
        start = start_after(start, job.next_ordinal, sources, going_on(read, now), now)
        append_start(spark, job.tables, start)
        state.begin(start)
    return start


def _expect_whole(spark: SparkSession, checkpoint: str) -> None:
    """Make sure that a checkpoint which knows of batches still knows what they read. Raises CheckpointError."""
    offsets, commits = (
        [name for name in files_in(spark, f"{checkpoint}/{part}") if name.isdigit()] for part in ("offsets", "commits")
    )
    if commits and not offsets:
        raise CheckpointError(
            f"{checkpoint} has `commits` but no `offsets`: it is not as it was left, and batches would be counted from "
            "0 again. Remove this folder: all is then read again, which changes nothing in the tables."
        )


def _reads(spark: SparkSession, pattern: str) -> Callable[[str], bool]:
    """Tell which topics a pattern (Java's) fits."""
    java = spark._jvm.java.util.regex.Pattern  # type: ignore[union-attr]  # noqa: SLF001

    @lru_cache(maxsize=100_000)
    def reads(topic: str) -> bool:
        return bool(java.matches(pattern, topic))

    return reads


def _wait(running: StreamingQuery, query: _Query, report: Callable[[BatchReport], None]) -> None:
    while running.isActive:
        time.sleep(POLL_S)
        _report_finished(running, query.finished, report)
        is_idle = not running.status["isTriggerActive"]
        if query.stop.is_set() and is_idle:
            return
        if is_idle:
            query.look_if_due()
    if not query.stop.is_set():
        _report_rest(running, query.finished, report)
        running.awaitTermination()  # raises what the query ended with


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


def _start(
    records: DataFrame, settings: IngestSettings, checkpoint: str, take: Callable[[DataFrame, int], None]
) -> StreamingQuery:
    writer = records.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
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
        # While nothing comes Spark reports the batch that is to be the next; and one that was done before is not read.
        is_read = any(source.startOffset != source.endOffset for source in progress.sources)
        counts = finished.pop(progress.batchId, None) if is_read else None
        if counts is not None:
            report(_report_of(progress, counts))


def _report_of(progress: StreamingQueryProgress, counts: BatchCounts) -> BatchReport:
    end_offsets, _ = progress_offsets(progress)
    behind = lag(progress)
    ended = min(counts.newest_us.values(), default=None) if behind else max(counts.newest_us.values(), default=None)
    behind_s = None if ended is None else max(0.0, time.time() - ended / 1_000_000)
    return BatchReport(progress.batchId, counts, behind, behind_s, end_offsets)


def _report_rest(
    query: StreamingQuery, finished: dict[int, BatchCounts], report: Callable[[BatchReport], None]
) -> None:
    """Report what is left once the query has ended: its progress may come a moment after its end."""
    deadline = time.monotonic() + PROGRESS_WAIT_S_MAX
    while finished and time.monotonic() < deadline:
        _report_finished(query, finished, report)
        if finished:
            time.sleep(POLL_S)
