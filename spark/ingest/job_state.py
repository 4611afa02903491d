"""Keeps the job's state of all batches so far in the driver's memory, and saves it now and then beside `log`."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from spark.finality.gateway_states import GatewayEvent, GatewayStates
from spark.finality.gateway_table import GatewayTable, events_in
from spark.ingest.census import Census, take_census
from spark.ingest.reading_starts import ReadingStart, read_starts
from spark.ingest.seen_table import Seen
from spark.ingest.topics_read import TopicsRead
from spark.log.amendments import committed_rows
from spark.log.copies import Suspects
from spark.log.lane_sequences import Lane, LowNumbers
from spark.log.log_table import Log
from spark.source.topic_changes import TopicOffsets, TopicRead

EVENTS_BYTES_MAX = 256 * 1_048_576
"""Bytes of one batch's events in the driver's memory. If there are more, events above a fair share are rejects."""
FAIR_BYTES_MIN = 4_096
"""Least bytes of a fair share, so that heartbeats of the usual size are never rejects."""


def events_of(rows: DataFrame, census: Census) -> list[GatewayEvent]:
    """Return gateways' events of a batch. Copies are among them, and do no harm. `rows` are of `log`."""
    if not census.events:
        return []
    fair = max(EVENTS_BYTES_MAX // census.events, FAIR_BYTES_MIN)
    return events_in(rows, None if census.event_bytes <= EVENTS_BYTES_MAX else fair)


@dataclass(slots=True)
class KafkaTopics:
    """The topics that a run of `ingest` does not read, or that are gone."""

    reads: Callable[[str], bool] | None = None
    """Tells whether a topic goes into `log`; None if this run does not read Kafka."""
    gone: frozenset[str] = frozenset()
    """Topics that gateways have written to and Kafka no longer has."""


class JobState:
    """The numbers of lanes that came, the offsets of topics, and the gateways' states."""

    def __init__(self, spark: SparkSession, log: Log, tables: str, kafka: KafkaTopics) -> None:
        """Read the saved state, and count later batches of `log` again, except the last one."""
        self._kafka = kafka
        self._seen = Seen(spark, tables)
        self._topics = TopicsRead(spark, tables)
        self._gateways = GatewayTable(spark, tables)
        self.starts = read_starts(spark, tables)
        self.named = self._gateways.gateways.topics()
        """Topics that gateways' heartbeats name."""
        # One by one, because the state depends on the order of batches.
        for ordinal in range(self.saved + 1, log.last):
            rows = committed_rows(spark, tables, ordinal)
            census = take_census(rows)
            self.add_batch(census, events_of(rows, census), ordinal)

    @property
    def saved(self) -> int:
        """The ordinal of the last batch that all tables have."""
        return min(self._seen.saved, self._topics.saved, self._gateways.saved)

    @property
    def gateways(self) -> GatewayStates:
        """The states of all gateways."""
        return self._gateways.gateways

    @property
    def start(self) -> ReadingStart | None:
        """The start of the present checkpoint."""
        return self.starts[-1] if self.starts else None

    def add_batch(self, census: Census, events: Iterable[GatewayEvent], ordinal: int) -> Suspects:
        """Take up a batch, with `events` from `events_of`. Return what of its lanes came before, or twice in it."""
        self.begin_at(ordinal)
        self._topics.add_batch(census)
        self._gateways.add_batch(events, self._topics.offsets(), self._kafka.reads, self._kafka.gone)
        if census.events:
            self.named = self._gateways.gateways.topics()
        return self._seen.add_batch(census, ordinal)

    def seen(self) -> Mapping[Lane, LowNumbers]:
        """Numbers that came before, of the lanes that grew last."""
        return self._seen.low()

    def topics(self) -> Mapping[str, TopicRead]:
        """The id and the next offsets of each topic."""
        return self._topics.topics()

    def read_to(self, offsets: TopicOffsets, topic_ids: Mapping[str, str]) -> None:
        """Record a batch's end offsets from Spark, also of partitions without a record in it."""
        self._topics.read_to(offsets, topic_ids)

    def begin(self, start: ReadingStart) -> None:
        """Record that a new checkpoint begins."""
        self.starts.append(start)
        self._begin(start)

    def begin_at(self, ordinal: int) -> None:
        """Begin the start that an earlier run noted for this batch, if that run came no further."""
        for start in self.starts:
            if start.ordinal == ordinal:
                self._begin(start)

    def save(self, ordinal: int, so_far: Mapping[str, int]) -> None:
        """Write the changes up to the batch `ordinal`. `so_far` has how far other tables are, by application."""
        # Side by side: the tables are small, and each waits for its commit longer than it computes.
        with ThreadPoolExecutor(3) as beside:
            savings = [beside.submit(table.save, ordinal) for table in (self._topics, self._gateways)]
            savings.append(beside.submit(self._seen.save, ordinal, so_far))
            for saving in savings:
                saving.result()

    def _begin(self, start: ReadingStart) -> None:
        if start.starting is not None:
            self._topics.begin(start.starting, start.topic_ids)
