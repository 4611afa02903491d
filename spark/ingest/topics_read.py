"""Keeps the table `topics_read`: the offset up to which `log` has each partition, and the topic's id."""

from collections.abc import Mapping

from pyspark.sql import Row, SparkSession

from spark.ingest.census import Census
from spark.log.state_table import StateTable
from spark.source.topic_changes import TopicRead

Partition = tuple[str, str]
"""Topic, and partition as text."""
ReadTo = tuple[str, int]
"""Topic id and next offset."""


def topics_path(tables: str) -> str:
    """Return the table's path."""
    return f"{tables}/topics_read"


class TopicsRead:
    """The offsets in the driver's memory, saved now and then to the table."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        self._table: StateTable[Partition, ReadTo] = StateTable(
            spark,
            topics_path(tables),
            key=("topic", "partition"),
            columns="topic_id string, next_offset bigint",
            decode=_read_to,
            encode=lambda read_to: read_to,
        )

    @property
    def saved(self) -> int:
        return self._table.saved

    def note(self, census: Census) -> None:
        """Take up a batch's offsets. To take them up again changes nothing."""
        self.read_to(census.next_offsets, census.topic_ids)

    def read_to(self, next_offsets: Mapping[str, Mapping[int, int]], topic_ids: Mapping[str, str]) -> None:
        """Take up the next offsets of partitions that were read."""
        for topic, offsets in next_offsets.items():
            topic_id = topic_ids.get(topic, "")
            for partition, next_offset in offsets.items():
                key = (topic, str(partition))
                before_id, before = self._table.states.get(key, (topic_id, 0))
                # If the topic was deleted and made again, the old topic's offsets say nothing about it.
                read_to = (topic_id, max(before, next_offset) if before_id == topic_id else next_offset)
                if self._table.states.get(key) != read_to:
                    self._table.states[key] = read_to
                    self._table.changed(key)

    def offsets(self) -> Mapping[str, Mapping[int, int]]:
        """The next offset by topic and partition."""
        found: dict[str, dict[int, int]] = {}
        for (topic, partition), (_, next_offset) in self._table.states.items():
            found.setdefault(topic, {})[int(partition)] = next_offset
        return found

    def topics(self) -> Mapping[str, TopicRead]:
        """The next offsets and the ids of topics whose ids are known."""
        ids = {topic: topic_id for (topic, _), (topic_id, _) in self._table.states.items()}
        return {topic: TopicRead(ids[topic], offsets) for topic, offsets in self.offsets().items() if ids[topic]}

    def begin(self, starting: Mapping[str, Mapping[int, int]], topic_ids: Mapping[str, str]) -> None:
        """Replace all offsets by those of a new start."""
        for key in list(self._table.states):
            if key[0] not in starting or int(key[1]) not in starting[key[0]]:
                # A state's row cannot be removed. With an empty topic id, it says that nothing was read.
                self._table.states[key] = ("", 0)
                self._table.changed(key)
        for topic, offsets in starting.items():
            for partition, offset in offsets.items():
                self._table.states[topic, str(partition)] = (topic_ids[topic], offset)
                self._table.changed((topic, str(partition)))

    def save(self, ordinal: int) -> None:
        self._table.save(ordinal)


def _read_to(row: Row) -> ReadTo:
    return row.topic_id, row.next_offset
