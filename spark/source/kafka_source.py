"""Reads Kafka's records with Spark: as a stream from given offsets on, or as a span of offsets or of time.

A stream may have two sources: the live topics, and the topics of the gateways' backlogs. A single source fills a batch
from its partitions in proportion to their unread records. A backlog of days would then take nearly all of a batch, and
live readings would come late. Two sources have a limit each: `batch_records_max` and `backlog_records_max`.

With two sources, a batch's progress has two entries in `sources`: first the live topics, then the backlog. Each has the
`startOffset`, `endOffset` and `latestOffset` of its own topics, and no topic is in both. `progress_offsets` merges
them. Spark's checkpoint has a line for each source in its `offsets/N`. So a checkpoint made with one source cannot be
continued with two, nor the other way round.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from spark.source.kafka_options import hide_secrets, source_options
from spark.source.topic_changes import TopicOffsets, offsets_of, starting_offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.readwriter import DataStreamReader

ISOLATION = "isolation.level"
READ_COMMITTED = "read_committed"
"""Isolation that skips records of aborted transactions. Kafka's own default reads them."""
TOPIC_LIST_AGE_MS = 5_000
"""Age of the list of topics at the most. With the default, a new topic could stay unread for five minutes."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """The topics to read, the offsets to begin at, and the size of a batch."""

    bootstrap: str
    """`host:port`, several with commas between."""
    topics: str
    """Java regular expression of whole topic names. Matching topics that are made later are read too."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings from `kafka_options`, which may hold passwords."""
    batch_records_max: int = 200_000
    """Records of live topics in one batch. It bounds the memory of a batch after an outage."""
    starting: Literal["earliest"] | TopicOffsets = "earliest"
    """Offsets at which a new checkpoint begins. They must name every partition, as `topic_changes.going_on` does."""
    backlog_topics: str | None = None
    """Java regular expression of topics that are read as backlog, even if `topics` matches them too."""
    backlog_records_max: int = 50_000
    """Records of backlog topics in one batch."""
    named: tuple[str, ...] | None = None
    """Topics that are read because gateways name them, beside `topics`. None: only `topics` counts."""

    @property
    def live_pattern(self) -> str:
        """Pattern of the topics that are not backlog. It works whether names are searched for it or matched."""
        # Spark searches names for the pattern. Without anchors, it would read topics that merely contain a match.
        other = "" if self.backlog_topics is None else f"(?!(?:{self.backlog_topics})$)"
        return f"^{other}(?:{self._all_topics})$"

    @property
    def backlog_pattern(self) -> str | None:
        return None if self.backlog_topics is None else f"^(?:{self.backlog_topics})$"

    @property
    def every_pattern(self) -> str:
        """Pattern of all topics that are read, live and backlog."""
        patterns = [self._all_topics, *([] if self.backlog_topics is None else [self.backlog_topics])]
        return f"^(?:{'|'.join(patterns)})$"

    @property
    def _all_topics(self) -> str:
        return "|".join([self.topics, *(f"\\Q{name}\\E" for name in self.named or ())])


def kafka_stream(spark: "SparkSession", source: KafkaSource) -> "DataFrame":
    """Return the stream of Kafka's records with their headers. With a new checkpoint it begins at `starting`.

    The query fails if retention deletes records before they are read: see `kafka_failures.explain_failure`.
    """
    hide_secrets(spark)
    live_starting, backlog_starting = source.starting, source.starting
    if source.backlog_topics is not None and not isinstance(source.starting, str):
        live_starting, backlog_starting = _divided(spark, source.starting, source.backlog_topics)
    live = _stream(spark, source, source.live_pattern, live_starting, source.batch_records_max)
    if source.backlog_pattern is None:
        return live
    return live.unionAll(_stream(spark, source, source.backlog_pattern, backlog_starting, source.backlog_records_max))


def kafka_range(
    spark: "SparkSession",
    source: KafkaSource,
    starting: Literal["earliest"] | datetime | TopicOffsets,
    ending: Literal["latest"] | datetime | TopicOffsets,
) -> "DataFrame":
    """Return the records of all topics, live and backlog, from `starting` to before `ending`.

    Times are the brokers': when a broker took a record in. With offsets, only their partitions are read. Raises
    ValueError if both ends have offsets of different partitions.
    """
    hide_secrets(spark)
    reader: DataFrameReader = spark.read.format("kafka").options(**_common(source))
    named = [end for end in (starting, ending) if isinstance(end, Mapping)]
    if named:
        first, last = ({topic: set(offsets) for topic, offsets in end.items()} for end in (named[0], named[-1]))
        if first != last:
            raise ValueError("starting and ending offsets name different partitions")
        partitions = {topic: sorted(numbers) for topic, numbers in first.items()}
        reader = reader.option("assign", json.dumps(partitions))
    else:
        reader = reader.option("subscribePattern", source.every_pattern)
    for name, end in (("starting", starting), ("ending", ending)):
        if isinstance(end, datetime):
            milliseconds = -(-(end - EPOCH) // timedelta(milliseconds=1))
            reader = reader.option(f"{name}Timestamp", max(milliseconds, 0))
        else:
            reader = reader.option(f"{name}Offsets", end if isinstance(end, str) else starting_offsets(end))
    # It is no error if all records of a partition are older than the beginning.
    return reader.option("startingOffsetsByTimestampStrategy", "latest").load()


def progress_offsets(progress: "StreamingQueryProgress") -> tuple[dict[str, dict[int, int]], dict[str, dict[int, int]]]:
    """Return a batch's end offsets and Kafka's latest offsets, of all sources together.

    A source has no latest offsets for a batch that an earlier run began.
    """
    end: dict[str, dict[int, int]] = {}
    latest: dict[str, dict[int, int]] = {}
    for source in progress.sources:
        end |= _told(source.endOffset)
        latest |= _told(source.latestOffset)
    return end, latest


def lags(progress: "StreamingQueryProgress") -> dict[str, int] | None:
    """Records that Kafka had and a batch left unread, by topic; None if Spark does not know."""
    end, latest = progress_offsets(progress)
    if end.keys() - latest.keys():
        return None
    return {
        topic: sum(max(0, newest - end.get(topic, {}).get(partition, 0)) for partition, newest in offsets.items())
        for topic, offsets in latest.items()
    }


def _stream(
    spark: "SparkSession",
    source: KafkaSource,
    pattern: str,
    starting: Literal["earliest"] | TopicOffsets,
    records_max: int,
) -> "DataFrame":
    reader: DataStreamReader = spark.readStream.format("kafka").options(**_common(source))
    # If there is no topic of this kind yet, topics that appear later are read from their beginning.
    begin = starting if isinstance(starting, str) else starting_offsets(starting) if starting else "earliest"
    return (
        reader.option("subscribePattern", pattern)
        .option("startingOffsets", begin)
        .option("maxOffsetsPerTrigger", records_max)
        .load()
    )


def _common(source: KafkaSource) -> dict[str, str]:
    return {
        "kafka.metadata.max.age.ms": str(TOPIC_LIST_AGE_MS),
        f"kafka.{ISOLATION}": READ_COMMITTED,
        **source_options(source.options),
        "kafka.bootstrap.servers": source.bootstrap,
        "includeHeaders": "true",
        # If retention deletes records before they are read, somebody must know.
        "failOnDataLoss": "true",
    }


def _divided(spark: "SparkSession", starting: TopicOffsets, backlog_topics: str) -> tuple[TopicOffsets, TopicOffsets]:
    """The offsets of the live topics, and of the backlog topics."""
    pattern = spark._jvm.java.util.regex.Pattern  # type: ignore[union-attr]  # noqa: SLF001
    backlog = {topic for topic in starting if pattern.matches(backlog_topics, topic)}
    live = {topic: offsets for topic, offsets in starting.items() if topic not in backlog}
    return live, {topic: starting[topic] for topic in backlog}


def _told(offsets: str | None) -> dict[str, dict[int, int]]:
    """Offsets from a progress, which has them as JSON or as "null"."""
    return offsets_of(json.loads(offsets or "null") or {})
