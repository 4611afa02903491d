"""The ingest job: reads Kafka into the tables, batch by batch, until it is told to stop."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from spark.batch_job import BatchCounts, BatchJob
from spark.decode.codec_declarations import Streams
from spark.engine.told_error import ToldError
from spark.engine.warehouse_folder import MomentsError, folders_in, only_replay
from spark.finality.gateway_troubles import GatewayNow
from spark.ingest.checkpoint_place import Place, batch_end, place_of
from spark.ingest.reading_starts import ReadingStart, append_start, first_start, start_after
from spark.log.log_table import BatchId, CheckpointError
from spark.source.kafka_failures import is_passing
from spark.source.kafka_source import KafkaSource, kafka_stream, lags, progress_offsets
from spark.source.open_transactions import TOLD_AFTER_S, OpenTransaction, OpenTransactions, expect_readable
from spark.source.topic_changes import Loss, TopicNow, TopicOffsets, Trouble, going_on, trouble_words, troubles
from spark.source.topic_choice import TopicChoice
from spark.source.topic_watch import TopicWatch, TopicWatchError
from spark.upkeep.replay_job import replay
from spark.upkeep.table_upkeep import Upkeep

POLL_S = 0.2
"""Seconds between two looks at the running query."""
PROGRESS_WAIT_S_MAX = 5.0
"""Seconds that a finished query may take to report its last batch."""
LOOK_S = 10.0
"""Seconds between two questions to Kafka about its topics, while no records come."""
GATEWAYS_SHARE = 0.04
"""Share of the time that it may take to see how gateways are: half a second for 10,000 of them."""
IN_VAIN_MAX = 3
"""Times in a row that reading may begin anew without two batches in between."""


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """The source, the tables and the limits of one run."""

    source: KafkaSource
    warehouse: str
    checkpoint: str
    """Folder of Spark's checkpoints: one for each start of reading."""
    streams: Streams | None = None
    """Declarations to decode by. None: those that the warehouse was last written by."""
    interval_s: float = 5.0
    once: bool = False
    """Read what Kafka has now, then end."""
    go_on: bool = False
    """If Kafka no longer has the next records, read on from what it has, and record the rest as lost."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A finished batch."""

    batch: int
    counts: BatchCounts
    lags: Mapping[str, int] | None
    """Records that Kafka held beyond this batch when it began, by topic. None if Kafka was not asked (a batch done
    again)."""
    behind_s: float | None
    """Seconds since Kafka took in the last record that was read. While there is a lag, of the topic furthest behind."""
    end_offsets: dict[str, dict[int, int]]
    """The next offset to be read, by topic and partition."""
    gateways: Sequence[GatewayNow] = ()
    """How each gateway is after the batch, those that need somebody first."""

    @property
    def lag(self) -> int | None:
        """Records that Kafka held beyond this batch, of all topics."""
        return None if self.lags is None else sum(self.lags.values())


@dataclass(frozen=True, slots=True)
class Begun:
    """A beginning of reading: at the start of a run, and whenever it begins to read other topics."""

    topics: Sequence[str]
    """All topics that are read now."""
    losses: Sequence[Loss] = ()
    """Records that Kafka lost before they were read."""
    shortened: Mapping[str, int] = field(default_factory=dict)
    """For topics that are new to the tables: how many of their first records Kafka has deleted."""
    anew: str = ""
    """Why a new checkpoint had to begin where the tables end. Empty if none had to."""
    gateways: Sequence[GatewayNow] = ()
    """How each gateway is by the tables, those that need somebody first."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks that report the progress of a run."""

    ready: Callable[[Begun], None] = lambda _: None
    """Called when the query runs."""
    report: Callable[[BatchReport], None] = lambda _: None
    """Called after every batch that had records."""
    idle: Callable[[], None] = lambda: None
    """Called every LOOK_S while no records come and Kafka answers."""
    leave_out: Callable[[Mapping[str, str]], None] = lambda _: None
    """Called with the topics that gateways write to and that are not read, and the reasons; again on a change."""
    hold_back: Callable[[Sequence[OpenTransaction]], None] = lambda _: None
    """Called with the long-open transactions that hold records back; again on a change."""
    warn: Callable[[str], None] = lambda _: None
    """Called about failed upkeep, which delays no reading, and about records that were set aside. This callback runs on
    any thread, the others on the caller's."""


class QueryIdError(ToldError):
    """Spark does not say to which query a batch belongs; the message says what to do."""


class TopicTroubleError(ToldError):
    """Kafka no longer has the next records; the message says what happened, and how to go on."""

    def __init__(self, found: list[Trouble]) -> None:
        super().__init__(trouble_words(found))


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """A batch must not begin: the job was asked to stop, or must read other topics too. It is read again later."""


def run_ingest(spark: SparkSession, settings: IngestSettings, stop: threading.Event, listener: Listener) -> None:
    """Run until everything is read (`once`) or `stop` is set. The running batch is finished first.

    Raises StreamingQueryException if the query fails. Its commits stay, and the next run goes on from there.
    Raises TopicTroubleError if Kafka no longer has the next records, and TopicWatchError if Kafka does not answer.
    Raises OpenTransactionError if more was read than can be read now.
    Raises CheckpointError if even with a new checkpoint Spark does not read on where the tables end.
    Raises WindowLengthError, and changes nothing, if the warehouse holds windows of another length.
    """
    source = settings.source
    # First: a fault of the warehouse is reported without Kafka.
    job = open_job(spark, settings.warehouse, settings.streams, listener.warn)
    with TopicWatch(spark, source.bootstrap, source.options, source.every_pattern) as watch:
        choice = TopicChoice(spark, watch, source)
        transactions = OpenTransactions()
        anew, in_vain = "", 0
        while True:
            query = _Query(job, choice, transactions, stop, listener.warn)
            try:
                _read(query, settings, listener, anew)
                anew = ""
                if stop.is_set() or not choice.fresh:
                    return
            except CheckpointError as error:
                anew, in_vain = str(error), 0 if query.goes_on else in_vain + 1
                if in_vain > IN_VAIN_MAX:
                    raise
            except StreamingQueryException as error:
                anew, in_vain = "", 0 if query.goes_on else in_vain + 1
                if in_vain > IN_VAIN_MAX or not is_passing(error):
                    raise


def open_job(spark: SparkSession, warehouse: str, streams: Streams | None, warn: Callable[[str], None]) -> BatchJob:
    """Open the tables, which nobody else may write. If a copy's tables are of several moments, rebuild them first."""
    # Twice: `window_changes` of a copy may name a version that is later than any in the copy.
    for _ in range(2):
        try:
            return BatchJob(spark, warehouse, streams, warn=warn)
        except MomentsError as error:
            warn(f"{error}, which may take a while")
        with only_replay(warehouse):
            replay(spark, warehouse, streams, None, lambda _: nullcontext(), lambda _: None)
    return BatchJob(spark, warehouse, streams, warn=warn)


def _read(query: "_Query", settings: IngestSettings, listener: Listener, anew: str) -> None:
    """Read until the query ends or must begin anew. `anew` says why the last checkpoint cannot be used."""
    job = query.job
    start, begun = _begun(query, settings, anew)
    records = kafka_stream(job.spark, replace(query.choice.source, starting=start.starting or "earliest"))
    running = _start(records, settings, query.checkpoint, query.take)
    try:
        listener.ready(begun)
        _wait(running, query, listener)
        query.tidy()
    except StreamingQueryException:
        if query.trouble is not None:
            raise query.trouble from None
        if not query.is_ending:
            raise
    finally:
        running.stop()
        try:
            job.save()
        finally:
            query.finish()
    _report_rest(running, query, listener)
    if not query.stop.is_set():
        # Heartbeats in the last batches may name other topics.
        query.check_topics()
        _report_finished(running, query, listener)
        # With `once`, nobody looks again later: all open transactions are reported now.
        _report_held_back(query, listener, 0 if settings.once else TOLD_AFTER_S)


class _Query:
    """The function that Spark calls for each batch, and the state of the query."""

    def __init__(
        self,
        job: BatchJob,
        choice: TopicChoice,
        transactions: OpenTransactions,
        stop: threading.Event,
        warn: Callable[[str], None],
    ) -> None:
        self.job = job
        self.choice = choice
        self.transactions = transactions
        self.stop = stop
        self.finished: dict[int, tuple[BatchCounts, Sequence[GatewayNow]]] = {}
        """What each batch that was taken has to report."""
        self.goes_on = False
        """Whether at least two batches were taken."""
        self._gateways: Sequence[GatewayNow] = ()
        self._see_gateways_s = 0.0
        self.trouble: Exception | None = None
        self.checkpoint = ""
        self._place = Place({})
        self._has_begun = False
        self._upkeep = Upkeep(job, warn)
        self._newest_us: int | None = None
        # Two threads ask Kafka: Spark's and the one that waits.
        self._asking = threading.Lock()
        self._looked_s = time.monotonic()

    @property
    def is_ending(self) -> bool:
        """Whether no further batch may begin."""
        return self.stop.is_set() or bool(self.choice.fresh)

    def begin(self, checkpoint: str, place: Place) -> None:
        """Record where reading begins."""
        # Once the query runs, Spark reads new partitions by itself.
        self.checkpoint, self._place = checkpoint, Place(place.begin, place.end)

    def take(self, records: DataFrame, number: int) -> None:
        if self.stop.is_set():
            # Returning would commit the batch unread.
            raise Interrupted
        try:
            now = self._ask_kafka()
            if self.is_ending:
                raise Interrupted
            batch = BatchId(running_query_id(records.sparkSession), number)
            topic_ids = {topic: found.topic_id for topic, found in now.items()}
            # Only now does Spark's checkpoint have the batch before, so that batch does not come again.
            self.tidy()
            end = self._end_of(number, now)
            counts = self.job.take(records, batch, topic_ids, lambda: self._expect(topic_ids, end))
            self.goes_on, self._has_begun, self._place = self._has_begun, True, Place(end)
            self._newest_us = max(counts.newest_us.values(), default=None)
            self.finished[number] = counts, self._see_gateways()
        except (TopicTroubleError, TopicWatchError, QueryIdError, CheckpointError) as error:
            # Spark passes an error on as text only.
            self.trouble = error
            raise

    def _see_gateways(self) -> Sequence[GatewayNow]:
        """How gateways are now. If there are very many, how they were a moment ago."""
        begun_s = time.monotonic()
        if begun_s >= self._see_gateways_s:
            self._gateways = self.job.gateways()
            ended_s = time.monotonic()
            self._see_gateways_s = ended_s + (ended_s - begun_s) / GATEWAYS_SHARE
        return self._gateways

    def tidy(self) -> None:
        """Do the upkeep that is due after the last batch."""
        self._upkeep.after_batch(self._newest_us)
        self._newest_us = None

    def finish(self) -> None:
        """Wait for the upkeep beside the batches. If the job was asked to stop, cut the upkeep short."""
        if self.stop.is_set():
            self._upkeep.end()
        else:
            self._upkeep.wait()

    def look_if_due(self) -> bool:
        """Look for deleted topics while no records come: Spark would not notice. Raises TopicTroubleError.

        Returns whether a look was due and Kafka answered.
        """
        return time.monotonic() - self._looked_s > LOOK_S and self.check_topics()

    def check_topics(self) -> bool:
        """Look for changes of the topics. Returns whether Kafka answered. Raises TopicTroubleError."""
        # If Kafka does not answer, the query reports it: it waits longer for Kafka.
        with suppress(TopicWatchError):
            self._ask_kafka()
            return True
        return False

    def _end_of(self, number: int, now: Mapping[str, TopicNow]) -> TopicOffsets:
        """Check that a batch begins where the tables end. Returns the batch's end. Raises CheckpointError."""
        end = batch_end(self.job.spark, self.checkpoint, number)
        if not Place(self._place.begin, end).is_where_tables_end(self.job.state.topics(), now):
            raise CheckpointError(f"batch {number} in {self.checkpoint} does not begin where the tables end")
        return end

    def _ask_kafka(self) -> dict[str, TopicNow]:
        """Ask Kafka about its topics. Raises TopicTroubleError if reading cannot simply go on."""
        with self._asking:
            now = self.choice.compare(self.job.state.named)
        self.job.kafka.gone = self.choice.gone
        self.transactions.see(now)
        self._looked_s = time.monotonic()
        found = troubles(self.job.state.topics(), now)
        if found:
            raise TopicTroubleError(found)
        return now

    def _expect(self, topic_ids: Mapping[str, str], end: TopicOffsets) -> None:
        """Check that no topic was made anew while the batch was read: its offsets would look the same."""
        with self._asking:
            ids = self.choice.topic_ids()
        if any(ids.get(topic) != topic_id for topic, topic_id in topic_ids.items()):
            self._ask_kafka()
        # Partitions without new records too: a heartbeat may wait for records that Kafka has deleted from one.
        self.job.state.read_to(end, topic_ids)


def _begun(query: _Query, settings: IngestSettings, anew: str) -> tuple[ReadingStart, Begun]:
    """Find where to read on: at Spark's checkpoint, or from a new start. Raises TopicTroubleError."""
    job, state, source = query.job, query.job.state, settings.source
    now = query.choice.begin(state.named)
    job.kafka.reads, job.kafka.gone = query.choice.reads, query.choice.gone
    sources = 1 if source.backlog_topics is None else 2
    topics = state.topics()
    shortened = {topic: sum(found.earliest.values()) for topic, found in now.items() if topic not in topics}
    first_gone = {topic: count for topic, count in sorted(shortened.items()) if count}
    begun = Begun(sorted(now), shortened=first_gone, gateways=job.gateways())
    start = state.start
    if start is None:
        start = first_start(sources)
        append_start(job.spark, job.tables, start)
        state.begin(start)
    read = {topic: read_to for topic, read_to in topics.items() if query.choice.reads(topic)}
    found = troubles(read, now)
    if found and not settings.go_on:
        raise TopicTroubleError(found)
    expect_readable(read, now)
    folder = settings.checkpoint.rstrip("/")
    place = None
    if not anew:
        try:
            place = place_of(job.spark, f"{folder}/{start.number}", start, now)
        except CheckpointError as error:
            anew = str(error)
    # Spark goes on with a checkpoint only if the number of sources is the same and all of its topics are still read.
    is_other = bool(found) or start.sources != sources or read.keys() != topics.keys()
    if place is not None and not is_other:
        if place.is_where_tables_end(read, now):
            query.begin(f"{folder}/{start.number}", place)
            return start, begun
        if not place.is_where_tables_end(read, {topic: now[topic] for topic in now.keys() - begun.shortened.keys()}):
            anew = f"{folder}/{start.number} does not stand where the tables end"
    taken = [int(name) for path in folders_in(job.spark, folder) if (name := path.rpartition("/")[2]).isdigit()]
    start = start_after(start, job.next_ordinal, sources, going_on(read, now), now, taken)
    append_start(job.spark, job.tables, start)
    state.begin(start)
    checkpoint = f"{folder}/{start.number}"
    query.begin(checkpoint, place_of(job.spark, checkpoint, start, now))
    return start, replace(begun, losses=start.losses, anew="" if is_other else anew)


def _wait(running: StreamingQuery, query: _Query, listener: Listener) -> None:
    while running.isActive:
        time.sleep(POLL_S)
        _report_finished(running, query, listener)
        _report_held_back(query, listener, TOLD_AFTER_S)
        is_idle = not running.status["isTriggerActive"]
        if query.is_ending and is_idle:
            return
        if is_idle and query.look_if_due():
            listener.idle()
    if not query.stop.is_set():
        _report_rest(running, query, listener)
        running.awaitTermination()  # raises the error that ended the query


def running_query_id(spark: SparkSession) -> str:
    """Return the id of the query whose batch this thread processes. Raises QueryIdError if Spark does not say it.

    Each checkpoint has its own query id, and counts batches from 0. Without the id, the batches of a new checkpoint
    would be taken for those of the old one, and skipped.
    """
    query_id = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    if not query_id:
        raise QueryIdError(
            "Spark does not say to which streaming query this batch belongs. Its records could be mistaken for stored "
            "ones, so none was taken. The cause is PYSPARK_PIN_THREAD=false: unset it, and start again."
        )
    return str(query_id)


def _start(
    records: DataFrame, settings: IngestSettings, checkpoint: str, take: Callable[[DataFrame, int], None]
) -> StreamingQuery:
    writer = records.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
    if settings.once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{settings.interval_s} seconds").start()


def _report_finished(running: StreamingQuery, query: _Query, listener: Listener) -> None:
    """Report batches that the query has both processed and committed, and topics that are left out."""
    left_out = query.choice.untold()
    if left_out is not None:
        listener.leave_out(left_out)
    if not query.finished:
        return
    for progress in running.recentProgress:
        # While no records come, Spark reports the next batch; and a batch that was done before reads nothing.
        is_read = any(source.startOffset != source.endOffset for source in progress.sources)
        finished = query.finished.pop(progress.batchId, None) if is_read else None
        if finished is not None:
            listener.report(_report_of(progress, *finished))


def _report_held_back(query: _Query, listener: Listener, after_s: float) -> None:
    """Report the open transactions that hold records back."""
    held_back = query.transactions.untold(after_s)
    if held_back is not None:
        listener.hold_back(held_back)


def _report_of(progress: StreamingQueryProgress, counts: BatchCounts, gateways: Sequence[GatewayNow]) -> BatchReport:
    end_offsets, _ = progress_offsets(progress)
    left = lags(progress)
    is_behind = left is not None and any(left.values())
    ended = (min if is_behind else max)(counts.newest_us.values(), default=None)
    behind_s = None if ended is None else max(0.0, time.time() - ended / 1_000_000)
    return BatchReport(progress.batchId, counts, left, behind_s, end_offsets, gateways)


def _report_rest(running: StreamingQuery, query: _Query, listener: Listener) -> None:
    """Report the last batches of a query that has ended: their progress may come a moment later."""
    deadline = time.monotonic() + PROGRESS_WAIT_S_MAX
    _report_finished(running, query, listener)
    while query.finished and time.monotonic() < deadline:
        time.sleep(POLL_S)
        _report_finished(running, query, listener)
