"""The echoes of a reading: further records of it, in the topics of structured events and of last readings.

A row leaves the buffer once every topic has it that it is sent to. Spark needs no echo, so heartbeats do not name their
topics. If a topic of echoes is refused, its echoes are left out, and readings go on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.buffer.rows import Row, Series, StructuredEvents
from gateway.kafka.structured_record import StructuredEncoder
from gateway.settings import KafkaSettings

Partition = tuple[str, int]
Place = tuple[int, int]
"""Lane and sequence of a row."""

LEFT_OUT: Final = "events-left-out"
"""Count of heartbeats: readings that `kafka.structured_topic` did not take."""
LATEST_MAX: Final = 50_000
"""Keys whose last reading is remembered across sessions. With more, they are forgotten."""
_Key = tuple[str, bytes]
_NO_VARIABLES = StructuredEvents()


@dataclass(frozen=True, slots=True)
class Echo:
    """A further topic of one series in one lane, and the encoder of its events."""

    encoder: StructuredEncoder
    partition: Partition
    topic_bytes_max: int
    """Bytes of the largest batch that the topic takes."""
    is_latest: bool
    """Whether it gets the last reading of each device alone."""


def echo_topics(series: Series, kafka: KafkaSettings) -> dict[str, bool]:
    """The further topics of a series, and whether each gets last readings alone."""
    if series.is_of_gateway:
        return {}
    topics = {}
    if series.structured is not None and series.structured.beside:
        topics[kafka.structured_topic.replace("{topic}", series.topic)] = False
    if kafka.latest_topic is not None:
        topics[kafka.latest_topic.replace("{topic}", series.topic)] = True
    return topics


def structured_of(series: Series) -> StructuredEvents:
    """A series' wish for events. A series from before the wish has none."""
    return series.structured or _NO_VARIABLES


class OwedRows:
    """Rows of a session that several topics must have, and the partitions that have not acknowledged them yet."""

    def __init__(self) -> None:
        self._owed: dict[Place, set[Partition]] = {}

    def owe(self, rows: Iterable[Row], partition: Partition, own: Partition) -> None:
        """Note that rows go to `partition`, beside their `own`."""
        for row in rows:
            self._owed.setdefault((row.lane, row.sequence), {own}).add(partition)

    def begin(self, rows: Iterable[Row]) -> None:
        """Note that rows are sent, perhaps again: nothing acknowledges them yet."""
        if self._owed:
            for row in rows:
                self._owed.pop((row.lane, row.sequence), None)

    def acknowledged(self, partition: Partition, rows: Sequence[Row]) -> Sequence[Row]:
        """Note that a partition has rows. Returns those that no other partition must have."""
        if not self._owed:
            return rows
        settled = []
        for row in rows:
            left = self._owed.get((row.lane, row.sequence))
            if left is None:
                settled.append(row)
                continue
            left.discard(partition)
            if not left:
                del self._owed[row.lane, row.sequence]
                settled.append(row)
        return settled

    def clear(self) -> None:
        """Note that everything that was sent is acknowledged."""
        self._owed.clear()


class LastReadings:
    """The places of the last readings that went out, so that a backlog overwrites none. A start forgets them."""

    def __init__(self) -> None:
        self._buffer_id = ""
        self._taken: dict[_Key, Place] = {}
        """By topic and key: the last reading that Kafka has."""
        self._sent: dict[_Key, Place] = {}
        """By topic and key: the last reading that was sent in this session."""
        self._keys: dict[tuple[str, Place], bytes] = {}
        """By topic and place: the key of a reading that was sent in this session, and has no answer."""

    def begin_session(self, buffer_id: str) -> None:
        """Forget readings that were sent without an answer, and all if another buffer file counts its lanes anew."""
        self._sent.clear()
        self._keys.clear()
        if buffer_id != self._buffer_id:
            self._buffer_id = buffer_id
            self._taken.clear()

    def is_news(self, topic: str, key: bytes, row: Row) -> bool:
        """Whether no later reading of a key went out. The row then counts as sent."""
        place, of = (row.lane, row.sequence), (topic, key)
        if place < max(self._taken.get(of, place), self._sent.get(of, place)):
            return False
        self._sent[of] = place
        self._keys[topic, place] = key
        return True

    def taken(self, topic: str, rows: Iterable[Row]) -> None:
        """Note that Kafka has readings."""
        if len(self._taken) >= LATEST_MAX:
            self._taken.clear()
        for row in rows:
            place = row.lane, row.sequence
            key = self._keys.pop((topic, place), None)
            if key is not None:
                self._taken[topic, key] = place
