"""The echoes of a reading: further records of it, in the topics of structured events and of last readings.

A row leaves the buffer once all its topics have it. If one of them is in trouble, the others are not sent the row
again. Spark needs no echo, so heartbeats do not name their topics. If a topic of echoes is refused, its echoes are left
out, and readings go on.
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
"""Count of heartbeats: readings with an event that its further topic did not take."""
LATEST_MAX: Final = 50_000
"""Keys whose last reading is remembered across sessions. With more, they are forgotten."""
HAVE_MAX: Final = 50_000
"""Rows that some of their topics have, and others lack. With more, they are forgotten, and their topics get copies."""
_Key = tuple[str, bytes]
_NONE: Final = frozenset[str]()
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


class EchoedRows:
    """Rows that several topics must have: which topics have them, and which were sent them.

    It outlives sessions. So a topic is not sent a row again because another topic is in trouble.
    """

    def __init__(self) -> None:
        self._buffer_id = ""
        self._lack: dict[Place, set[str]] = {}
        """Topics that were sent a row in this session, and have not acknowledged it."""
        self._have: dict[Place, frozenset[str]] = {}
        """Topics that need a row no more, of rows that are not settled."""
        self._left_out: set[Place] = set()
        """Rows with an event that is left out."""
        self._complete: list[Row] = []
        """Rows that came again although no topic lacks them."""

    def begin_session(self, buffer_id: str) -> None:
        """Forget what was sent without an answer, and everything if another buffer file counts its rows anew."""
        self._lack.clear()
        self._complete.clear()
        if buffer_id != self._buffer_id:
            self._buffer_id = buffer_id
            self.nothing_waits()

    def begin(self, rows: Iterable[Row], topics: Sequence[str]) -> dict[str, list[Row]]:
        """By topic: the rows that it lacks, and is to be sent now."""
        lacking: dict[str, list[Row]] = {topic: [] for topic in topics}
        for row in rows:
            place = row.lane, row.sequence
            self._lack.pop(place, None)
            lacks = [topic for topic in topics if self.lacks(row, topic)]
            if not lacks:
                self._complete.append(row)
            for topic in lacks:
                lacking[topic].append(row)
        return lacking

    def lacks(self, row: Row, topic: str) -> bool:
        """Whether a topic needs a row."""
        return topic not in self._have.get((row.lane, row.sequence), _NONE)

    def complete(self) -> list[Row]:
        """Rows of this round that no topic lacks, so that no answer will settle them."""
        rows, self._complete = self._complete, []
        return [row for row in rows if (row.lane, row.sequence) not in self._lack]

    def sent(self, rows: Iterable[Row], topic: str) -> None:
        """Note that a topic must acknowledge rows before they are settled."""
        for row in rows:
            self._lack.setdefault((row.lane, row.sequence), set()).add(topic)

    def leave_out(self, rows: Iterable[Row], topic: str) -> None:
        """Note that a topic of echoes does not get rows."""
        for row in rows:
            self._left_out.add((row.lane, row.sequence))
            self._note((row.lane, row.sequence), topic)

    def acknowledged(self, rows: Sequence[Row], topic: str) -> Sequence[Row]:
        """Note that a topic has rows. Returns those that can be settled, as no other topic lacks them."""
        if not self._lack:
            return rows
        done = []
        for row in rows:
            lack = self._lack.get((row.lane, row.sequence), set())
            lack.discard(topic)
            if lack:
                self._note((row.lane, row.sequence), topic)
            else:
                done.append(row)
        return done

    def settled(self, rows: Iterable[Row]) -> int:
        """Forget rows. Returns how many of them had an event left out."""
        if not (self._lack or self._have or self._left_out):
            return 0
        places = {(row.lane, row.sequence) for row in rows}
        for place in places:
            self._lack.pop(place, None)
            self._have.pop(place, None)
        left_out = places & self._left_out
        self._left_out -= left_out
        return len(left_out)

    def nothing_waits(self) -> None:
        """Forget rows that were dropped, or moved into the quarantine."""
        self._lack.clear()
        self._have.clear()
        self._left_out.clear()

    def _note(self, place: Place, topic: str) -> None:
        if len(self._have) >= HAVE_MAX:
            self._have.clear()
        self._have[place] = self._have.get(place, _NONE) | {topic}


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

    def is_last(self, topic: str, key: bytes, row: Row) -> bool:
        """Whether no later reading of a key went out."""
        place, of = (row.lane, row.sequence), (topic, key)
        return place >= max(self._taken.get(of, place), self._sent.get(of, place))

    def sent(self, topic: str, key: bytes, row: Row) -> None:
        """Note that a reading is sent."""
        self._sent[topic, key] = row.lane, row.sequence
        self._keys[topic, (row.lane, row.sequence)] = key

    def taken(self, topic: str, rows: Iterable[Row]) -> None:
        """Note that Kafka has readings."""
        if len(self._taken) >= LATEST_MAX:
            self._taken.clear()
        for row in rows:
            place = row.lane, row.sequence
            key = self._keys.pop((topic, place), None)
            if key is not None:
                self._taken[topic, key] = place
