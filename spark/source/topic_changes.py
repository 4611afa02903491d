"""Compares Kafka's topics with what was read of them, and decides where to read on. It asks Kafka nothing."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.host.terminal_text import counted

Offsets = Mapping[int, int]
"""Offsets by partition."""
TopicOffsets = Mapping[str, Offsets]
"""Offsets by topic and partition."""
NOTHING_READ: Offsets = {}


@dataclass(frozen=True, slots=True)
class TopicNow:
    """The present state of a topic."""

    topic_id: str
    """Kafka's id, as its tools print it. If a topic of this name is made again, it gets another id."""
    earliest: Offsets
    """First offset that can be read. Records before it are deleted."""
    latest: Offsets
    """Offset that the next record will get."""
    stable: Offsets = field(default_factory=dict)
    """Offset up to which committed records can be read: the start of the oldest open transaction, or `latest`. Empty if
    uncommitted records are read too."""

    @property
    def partitions(self) -> int:
        return len(self.earliest)


@dataclass(frozen=True, slots=True)
class TopicRead:
    """The offsets up to which a topic was read, from the job's records."""

    topic_id: str
    next_offsets: Offsets
    """Offset to read next."""


# -- troubles -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicGone:
    """Kafka has no topic of this name any more."""

    topic: str

    def __str__(self) -> str:
        return f"topic {self.topic} has been deleted: what had not been read of it is lost"


@dataclass(frozen=True, slots=True)
class TopicMadeAnew:
    """Another topic has this name. Its offsets do not continue those that were read."""

    topic: str
    was: str
    """Topic id that was read."""
    now: str

    def __str__(self) -> str:
        return (
            f"topic {self.topic} has been deleted and made anew (its id was {self.was} and is {self.now}): what had "
            "not been read of the old one is lost, and the new one is to be read from its beginning"
        )


@dataclass(frozen=True, slots=True)
class PartitionsShrunk:
    """A topic has fewer partitions than were read. Kafka itself never takes partitions away."""

    topic: str
    was: int
    now: int

    def __str__(self) -> str:
        return (
            f"topic {self.topic} had {self.was} partitions and has {self.now}: what had not been read of the others "
            "is lost"
        )


@dataclass(frozen=True, slots=True)
class RetentionOvertook:
    """Kafka has deleted records before they were read."""

    topic: str
    partition: int
    next_offset: int
    """First missing offset."""
    earliest: int
    """First offset that is still there."""

    def __str__(self) -> str:
        deleted = counted(self.earliest - self.next_offset, "record")
        return (
            f"partition {self.partition} of topic {self.topic}: Kafka has deleted {deleted} from offset "
            f"{self.next_offset} to {self.earliest - 1} before they were read (retention.ms, retention.bytes, or by "
            "hand)"
        )


@dataclass(frozen=True, slots=True)
class TopicTruncated:
    """Kafka has lost records that were read. Other records will get their offsets, or have them already."""

    topic: str
    partition: int
    next_offset: int
    latest: int

    def __str__(self) -> str:
        return (
            f"partition {self.partition} of topic {self.topic} was read up to offset {self.next_offset} and now ends "
            f"at {self.latest}: Kafka's brokers have lost records that are in the tables already (an unclean leader "
            "election, or disks put back from an older copy)"
        )


Trouble = TopicGone | TopicMadeAnew | PartitionsShrunk | RetentionOvertook | TopicTruncated


def troubles(read: Mapping[str, TopicRead], now: Mapping[str, TopicNow]) -> list[Trouble]:
    """Return the reasons why reading cannot simply go on, in the order of topics and partitions.

    Topics and partitions that were never read are no trouble. They are read from their beginning.
    """
    return [trouble for topic in sorted(read) for trouble in _topic_troubles(topic, read[topic], now.get(topic))]


def _topic_troubles(topic: str, read: TopicRead, now: TopicNow | None) -> Iterator[Trouble]:
    if now is None:
        yield TopicGone(topic)
        return
    if now.topic_id != read.topic_id:
        yield TopicMadeAnew(topic, read.topic_id, now.topic_id)
        return
    if not read.next_offsets.keys() <= now.earliest.keys():
        yield PartitionsShrunk(topic, 1 + max(read.next_offsets), now.partitions)
    for partition, next_offset in sorted(read.next_offsets.items()):
        if partition not in now.earliest:
            continue
        if now.earliest[partition] > next_offset:
            yield RetentionOvertook(topic, partition, next_offset, now.earliest[partition])
        elif now.latest[partition] < next_offset:
            yield TopicTruncated(topic, partition, next_offset, now.latest[partition])


def trouble_words(found: Sequence[Trouble], shown_max: int = 10) -> str:
    """Tell a person what is wrong and what to do."""
    lines = [f"- {trouble}" for trouble in found[:shown_max]]
    if len(found) > shown_max:
        lines.append(f"- and {len(found) - shown_max} more of these")
    begin = "Kafka no longer has the next records, so nothing more was read; all that was read is kept:"
    todo = (
        "See first that nobody else makes topics of these names, and that retention is longer than this job may stand "
        "still. Then run `sluice-cloud ingest` with the same options and --go-on: it reads on from what there is, and "
        "records as lost what there is not."
    )
    return "\n".join([begin, *lines, todo])


# -- reading on ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    """Records that were in Kafka, or may have been, and that can no longer be read."""

    topic: str
    topic_id: str
    partition: int
    first: int
    """Offset of the first record."""
    end: int | None
    """Offset after the last record; None if nobody knows how many there were, or if there were any."""


@dataclass(frozen=True, slots=True)
class GoingOn:
    """The offsets to read on from, and the records that are lost."""

    starting: TopicOffsets
    """Offsets of every partition of every topic. Spark takes no fewer, and no others."""
    losses: tuple[Loss, ...]


def going_on(read: Mapping[str, TopicRead], now: Mapping[str, TopicNow]) -> GoingOn:
    """Find where to read on, so that each record that is still in Kafka and was not read is read.

    A truncated partition is read again from its beginning. Records that were read before are known by their `ce_id`.
    """
    starting = {topic: _starting(read.get(topic), found) for topic, found in sorted(now.items())}
    losses = [loss for topic in sorted(read) for loss in _losses(topic, read[topic], now.get(topic))]
    return GoingOn(starting, tuple(losses))


def offsets_of(told: Mapping[str, Mapping[str, int]]) -> dict[str, dict[int, int]]:
    """Return offsets from JSON, which has partitions as text."""
    return {topic: {int(partition): int(offset) for partition, offset in each.items()} for topic, each in told.items()}


def starting_offsets(starting: TopicOffsets) -> str:
    """Return offsets as the JSON that Spark's options `startingOffsets` and `endingOffsets` take."""
    return json.dumps(
        {
            topic: {str(partition): offset for partition, offset in sorted(offsets.items())}
            for topic, offsets in sorted(starting.items())
        }
    )


def _starting(read: TopicRead | None, now: TopicNow) -> Offsets:
    if read is None or read.topic_id != now.topic_id:
        return dict(now.earliest)

    def start(partition: int, earliest: int) -> int:
        next_offset = read.next_offsets.get(partition, earliest)
        return next_offset if earliest <= next_offset <= now.latest[partition] else earliest

    return {partition: start(partition, earliest) for partition, earliest in now.earliest.items()}


def _losses(topic: str, read: TopicRead, now: TopicNow | None) -> Iterator[Loss]:
    if now is None or now.topic_id != read.topic_id:
        for partition, next_offset in sorted(read.next_offsets.items()):
            yield Loss(topic, read.topic_id, partition, next_offset, None)
        # Nothing of the new topic was read. Retention may have deleted some of it already.
        next_offsets, topic_id = NOTHING_READ, now.topic_id if now else ""
    else:
        next_offsets, topic_id = read.next_offsets, read.topic_id
        for partition in sorted(next_offsets.keys() - now.earliest.keys()):
            yield Loss(topic, topic_id, partition, next_offsets[partition], None)
    for partition, earliest in sorted(now.earliest.items() if now else ()):
        next_offset = next_offsets.get(partition, 0)
        if earliest > next_offset:
            yield Loss(topic, topic_id, partition, next_offset, earliest)
