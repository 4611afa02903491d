"""Keeps the table `topics_read`: the offset up to which `log` has each partition, and the topic's id."""

from collections.abc import Mapping

from pyspark.sql import SparkSession

from spark.ingest.census import Census
from spark.log.state_table import StateTable
from spark.source.topic_changes import TopicOffsets, TopicRead

Partition = tuple[str, str]
"""Topic, and partition as text."""
ReadTo = tuple[str, int]
"""Topic id and next offset."""


def topics_path(tables: str) -> str:
    """Return the table's path."""
    return f"{tables}/topics_read"


class TopicsRead(StateTable[Partition, ReadTo]):
    """The offsets in the driver's memory, saved now and then to the table."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        super().__init__(
            spark,
            topics_path(tables),
            key=("topic", "partition"),
            columns="topic_id string, next_offset bigint",
            decode=lambda row: (row.topic_id, row.next_offset),
            encode=lambda read_to: read_to,
        )

    def add_batch(self, census: Census) -> None:
        """Take up a batch's offsets. To take them up again changes nothing."""
        self.read_to(census.next_offsets, census.topic_ids)

    def read_to(self, next_offsets: TopicOffsets, topic_ids: Mapping[str, str]) -> None:
        """Take up the next offsets of partitions that were read."""
        for topic, offsets in next_offsets.items():
            topic_id = topic_ids.get(topic, "")
            for partition, next_offset in offsets.items():
                key = (topic, str(partition))
                before_id, before = self.states.get(key, (topic_id, 0))
                # If the topic was deleted and made again, the old topic's offsets say nothing about it.
                self.put(key, (topic_id, max(before, next_offset) if before_id == topic_id else next_offset))

    def offsets(self) -> TopicOffsets:
        """The next offset by topic and partition."""
        found: dict[str, dict[int, int]] = {}
        for (topic, partition), (_, next_offset) in self.states.items():
            found.setdefault(topic, {})[int(partition)] = next_offset
        return found

    def topics(self) -> Mapping[str, TopicRead]:
        """The next offsets and the ids of topics whose ids are known."""
        ids = {topic: topic_id for (topic, _), (topic_id, _) in self.states.items()}
        return {topic: TopicRead(ids[topic], offsets) for topic, offsets in self.offsets().items() if ids[topic]}

    def begin(self, starting: TopicOffsets, topic_ids: Mapping[str, str]) -> None:
        """Replace all offsets by those of a new start."""
        for key in list(self.states):
            if int(key[1]) not in starting.get(key[0], {}):
                # A state's row cannot be removed. With an empty topic id, it says that nothing was read.
                self.put(key, ("", 0))
        for topic, offsets in starting.items():
            for partition, offset in offsets.items():
                self.put((topic, str(partition)), (topic_ids[topic], offset))
