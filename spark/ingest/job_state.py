"""What the job knows of all batches so far: in the driver's memory, and now and then in tables beside `log`."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from spark.finality.gateway_states import GatewayEvent
from spark.finality.gateway_table import GatewayTable, events_in
from spark.ingest.census import Census, take_census
from spark.ingest.devices_heard import DevicesHeard
from spark.ingest.reading_starts import ReadingStart, read_starts
from spark.ingest.seen_table import Seen
from spark.ingest.topics_read import TopicsRead
from spark.log.amendments import committed_rows
from spark.log.copies import Suspects
from spark.log.log_table import Log
from spark.source.topic_changes import TopicRead

EVENTS_BYTES_MAX = 256 * 1_048_576
"""All that gateways say of themselves in one batch comes into the driver's memory. Where it is more than this, events
that are longer than a fair share of it are rejects."""
FAIR_BYTES_MIN = 4_096
"""However many there are, heartbeats of the usual size are no rejects."""


def events_of(rows: DataFrame, census: Census) -> list[GatewayEvent]:
    """What gateways say of themselves in a batch, copies too: what came before changes nothing. `rows` are of `log`."""
    if not census.events:
        return []
    fair = max(EVENTS_BYTES_MAX // census.events, FAIR_BYTES_MIN)
    return events_in(rows, None if census.event_bytes <= EVENTS_BYTES_MAX else fair)


@dataclass(slots=True)
class KafkaTopics:
    """What a run of `ingest` knows of Kafka's topics beside those that it reads."""

    reads: Callable[[str], bool] | None = None
    """Says of a topic whether it goes into `log` at all; None where this run does not read Kafka."""
    gone: frozenset[str] = frozenset()
    """Topics that gateways have written to, and that Kafka has no longer."""


class JobState:
    """Which numbers came, up to where topics were read, what gateways said, and who was heard of."""

    def __init__(self, spark: SparkSession, log: Log, tables: str, kafka: KafkaTopics) -> None:
        """Read what was saved, and count again what was committed to `log` since, but for the last batch."""
        self._kafka = kafka
        self._seen = Seen(spark, tables)
        self._topics = TopicsRead(spark, tables)
        self._heard = DevicesHeard(spark, tables)
        self._gateways = GatewayTable(spark, tables)
        self.starts = read_starts(spark, tables)
        self.named = self._gateways.states.topics()
        """Topics that gateways' heartbeats name."""
        self.recovered = self.saved
        # One by one, in their order: what is kept of batches goes by it.
        for ordinal in range(self.saved + 1, log.last):
            rows = committed_rows(spark, tables, ordinal)
            census = take_census(rows, ordinal)
            self.note(census, events_of(rows, census), ordinal)

    @property
    def saved(self) -> int:
        """The ordinal of the last batch that all tables hold."""
        return min(self._seen.saved, self._topics.saved, self._heard.saved, self._gateways.saved)

    @property
    def start(self) -> ReadingStart | None:
        """From where the present checkpoint reads."""
        return self.starts[-1] if self.starts else None

    def note(self, census: Census, events: Iterable[GatewayEvent], ordinal: int) -> Suspects:
        """Take up what a batch holds; return what of it came before, or twice in it. `events` as `events_of` yields."""
        self.begin_at(ordinal)
        self._topics.note(census)
        self._heard.note(census)
        self._gateways.note(events, self._topics.offsets(), self._kafka.reads, self._kafka.gone)
        if census.events:
            self.named = self._gateways.states.topics()
        return self._seen.note(census, ordinal)

    def topics(self) -> Mapping[str, TopicRead]:
        """What was read of each topic."""
        return self._topics.topics()

    def read_to(self, offsets: Mapping[str, Mapping[int, int]], topic_ids: Mapping[str, str]) -> None:
        """Note up to where a batch goes by Spark's word: also in partitions that had no record for it."""
        self._topics.read_to(offsets, topic_ids)

    def begin(self, start: ReadingStart) -> None:
        """Note that a new checkpoint begins."""
        self.starts.append(start)
        self._begin(start)

    def begin_at(self, ordinal: int) -> None:
        """Note that reading begins anew before a batch, where an earlier run said so and came no further."""
        for start in self.starts:
            if start.ordinal == ordinal:
                self._begin(start)

    def save(self, ordinal: int, so_far: Mapping[str, int]) -> None:
        """Write what has changed; `ordinal` is of the last batch that was noted, `so_far` how far tables had come."""
        # Side by side: they are small, and each waits for its commit more than it computes.
        with ThreadPoolExecutor(3) as beside:
            savings = [beside.submit(table.save, ordinal) for table in (self._topics, self._heard)]
            savings.append(beside.submit(self._seen.save, ordinal, so_far))
            for saving in savings:
                saving.result()
        # Last, as they are read first: who knows how far gateways have come must know all whom they serve.
        self._gateways.save(ordinal)

    def _begin(self, start: ReadingStart) -> None:
        if start.starting is not None:
            self._topics.begin(start.starting, start.topic_ids)
