"""Kafka's records as Spark reads them: a stream that begins where it is told to, or a span of offsets or of time.

A stream may have two sources: the live topics, and those of the gateways' backlogs. One source shares out what a batch
may hold by how much lies in each partition, so that a backlog of days would take nearly all of it and live readings
would come late; two sources have each their own number of records (`batch_records_max`, `backlog_records_max`).

A batch's progress then has two entries in `sources`, in this order: the live topics', the backlog's, each with the
`startOffset`, `endOffset` and `latestOffset` of its own topics, and no topic is in both. `progress_offsets` puts them
together. So does Spark's checkpoint: its `offsets/N` has a line for each, and a checkpoint that was made with one
source cannot be gone on with by two, nor the other way round.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from spark.source.kafka_options import hide_secrets, source_options
from spark.source.topic_changes import Offsets, starting_offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.readwriter import DataStreamReader

ISOLATION = "isolation.level"
READ_COMMITTED = "read_committed"
"""What another producer took back is no reading. Kafka's own default reads it."""
TOPIC_LIST_AGE_MS = 5_000
"""How old the list of topics may be: the default of five minutes would leave a new topic unread that long."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

TopicOffsets = Mapping[str, Offsets]
"""By topic and partition."""


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """What is read, from where, and how much of it at once."""

    bootstrap: str
    """`host:port`, several with commas between."""
    topics: str
    """A regular expression (Java's) of whole names; topics that are made later and match are taken up too."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """As `kafka_options` gives them: passwords may be among them."""
    batch_records_max: int = 200_000
    """Records in one batch: what bounds its memory after an outage."""
    starting: Literal["earliest"] | TopicOffsets = "earliest"
    """Where a new checkpoint begins; offsets must name every partition there is, as `topic_changes.going_on` does."""
    backlog_topics: str | None = None
    """A pattern of topics that are read beside the others, and not as some of them, even where both match."""
    backlog_records_max: int = 50_000
    """Records of those in one batch."""
    named: tuple[str, ...] | None = None
    """Topics that are read beside those of the pattern, because gateways name them; None: the pattern says it all."""

    @property
    def live_pattern(self) -> str:
        """The topics that are not read as backlog; for names searched, as Spark does, or matched."""
        # Spark searches names for the pattern; unanchored, it would also read topics that merely contain a match.
        other = "" if self.backlog_topics is None else f"(?!(?:{self.backlog_topics})$)"
        return f"^{other}(?:{self._all_topics})$"

    @property
    def backlog_pattern(self) -> str | None:
        return None if self.backlog_topics is None else f"^(?:{self.backlog_topics})$"

    @property
    def every_pattern(self) -> str:
        """All topics that are read, live or not."""
        patterns = [self._all_topics, *([] if self.backlog_topics is None else [self.backlog_topics])]
        return f"^(?:{'|'.join(patterns)})$"

    @property
    def _all_topics(self) -> str:
        return "|".join([self.topics, *(f"\\Q{name}\\E" for name in self.named or ())])


def kafka_stream(spark: "SparkSession", source: KafkaSource) -> "DataFrame":
    """Return the stream of Kafka's records with their headers, from `starting` where the checkpoint is new.

    Records that retention took before they were read end the query: see `kafka_failures.explain_failure`.
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
    """Return what Kafka holds of the topics, live and backlog, from `starting` to before `ending`; read once.

    Times are Kafka's own: when the broker took a record in. Where offsets are given, only their partitions are read,
    and both ends have to name the same ones. Raises ValueError where they do not.
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
    # A partition whose records are all older than the beginning has none to give, which is no error.
    return reader.option("startingOffsetsByTimestampStrategy", "latest").load()


def progress_offsets(progress: "StreamingQueryProgress") -> tuple[dict[str, dict[int, int]], dict[str, dict[int, int]]]:
    """Return a batch's end offsets and the latest there were, of all sources together.

    The latest are empty of a source that does not say them, as it does not for a batch that an earlier run began.
    """
    end: dict[str, dict[int, int]] = {}
    latest: dict[str, dict[int, int]] = {}
    for source in progress.sources:
        end |= _told(source.endOffset)
        latest |= _told(source.latestOffset)
    return end, latest


def lag(progress: "StreamingQueryProgress") -> int | None:
    """Records that a batch left unread of those there were; None where Spark does not know."""
    end, latest = progress_offsets(progress)
    if end.keys() - latest.keys():
        return None
    return sum(
        max(0, newest - end.get(topic, {}).get(partition, 0))
        for topic, offsets in latest.items()
        for partition, newest in offsets.items()
    )


def _stream(
    spark: "SparkSession",
    source: KafkaSource,
    pattern: str,
    starting: Literal["earliest"] | TopicOffsets,
    records_max: int,
) -> "DataFrame":
    reader: DataStreamReader = spark.readStream.format("kafka").options(**_common(source))
    # Without a topic of this kind there is nothing to name, and what appears is read from its beginning.
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
        # Records that retention took before they were read are a failure to be looked at, not to be passed over.
        "failOnDataLoss": "true",
    }


def _divided(spark: "SparkSession", starting: TopicOffsets, backlog_topics: str) -> tuple[TopicOffsets, TopicOffsets]:
    """The live topics' offsets, and the backlog's."""
    pattern = spark._jvm.java.util.regex.Pattern  # type: ignore[union-attr]  # noqa: SLF001
    backlog = {topic for topic in starting if pattern.matches(backlog_topics, topic)}
    live = {topic: offsets for topic, offsets in starting.items() if topic not in backlog}
    return live, {topic: starting[topic] for topic in backlog}


def _told(offsets: str | None) -> dict[str, dict[int, int]]:
    """Offsets as a progress has them: JSON, or "null"."""
    told: dict[str, dict[str, int]] = json.loads(offsets or "null") or {}
    return {topic: {int(partition): offset for partition, offset in each.items()} for topic, each in told.items()}
