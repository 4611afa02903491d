"""Other producers' open transactions: what is behind one in its partition is not read until it ends."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from spark.source.topic_changes import TopicNow, TopicRead

TOLD_AFTER_S = 60.0
"""How long a transaction may be open before it is told: others last no longer."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """What holds a partition back."""

    topic: str
    partition: int
    offset: int
    """Where the transaction begins."""
    records: int
    """Offsets from there to the end: records, and marks of transactions that ended."""
    since: datetime
    """When it was first seen; it may have been open before."""


class OpenTransactionError(Exception):
    """More was read than can be read now; the message says why, and what to do."""


class OpenTransactions:
    """Which partitions are held back, and for how long."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], OpenTransaction] = {}
        self._told: set[tuple[str, int, int]] = set()

    def see(self, now: Mapping[str, TopicNow]) -> None:
        """Note what Kafka's topics are at the moment."""
        seen = datetime.fromtimestamp(time.time(), UTC)
        found = {}
        for topic, partition, offset, records in _open(now):
            known = self._found.get((topic, partition))
            since = known.since if known is not None and known.offset == offset else seen
            found[topic, partition] = OpenTransaction(topic, partition, offset, records, since)
        # In one step: another thread may be asking.
        self._found = found

    def untold(self, after_s: float) -> list[OpenTransaction] | None:
        """Return those that are told of, if they are others than the last time that this was asked.

        They have been open for `after_s`, or were told of when less was asked for.
        """
        now_s = time.time()
        told = {
            name: each
            for each in self._found.values()
            if (name := (each.topic, each.partition, each.offset)) in self._told
            or now_s - each.since.timestamp() >= after_s
        }
        before, self._told = self._told, set(told)
        return None if before == self._told else [*told.values()]


def expect_readable(read: Mapping[str, TopicRead], now: Mapping[str, TopicNow]) -> None:
    """Make sure that nothing was read beyond an open transaction. Raises OpenTransactionError.

    An earlier run did, if it read what was not committed. Spark would say that Kafka has lost records.
    """
    for topic, partition, offset, _ in _open(now):
        # Of a topic that was made anew nothing was read.
        is_same = topic in read and read[topic].topic_id == now[topic].topic_id
        read_to = read[topic].next_offsets.get(partition, 0) if is_same else 0
        if read_to > offset:
            raise OpenTransactionError(
                f"partition {partition} of topic {topic} was read up to offset {read_to}, also what was not committed. "
                f"A transaction of another producer from offset {offset} on is still open, and reading now stops "
                "there. Nothing was read or lost. Start again once it has ended "
                f"({abort_words(topic, partition, offset)}), or read on as before with --kafka-option "
                "isolation.level=read_uncommitted."
            )


def abort_words(topic: str, partition: int, offset: int) -> str:
    """The command of Kafka's that ends a transaction whose producer has gone."""
    return f"`kafka-transactions.sh abort --topic {topic} --partition {partition} --start-offset {offset}` aborts it"


def _open(now: Mapping[str, TopicNow]) -> Iterator[tuple[str, int, int, int]]:
    """Topic, partition, first offset and number of offsets of what is held back."""
    for topic, found in sorted(now.items()):
        for partition, stable in sorted(found.stable.items()):
            if found.latest[partition] > stable:
                yield topic, partition, stable, found.latest[partition] - stable
