"""Finds other producers' open transactions. Records behind one in its partition are not read until it ends."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from spark.engine.told_error import ToldError
from spark.source.topic_changes import TopicNow, TopicRead

TOLD_AFTER_S = 60.0
"""Seconds that a transaction may be open before it is reported. Usual ones end sooner."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that holds a partition back."""

    topic: str
    partition: int
    offset: int
    """First offset of the transaction."""
    records: int
    """Offsets from there to the partition's end: records, and markers of transactions that ended."""
    since: datetime
    """Time when we first saw it. It may have been open before."""


class OpenTransactionError(ToldError):
    """An earlier run read further than is possible now. The message says why, and what to do."""


class OpenTransactions:
    """The partitions that are held back, and since when."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], OpenTransaction] = {}
        self._told: set[tuple[str, int, int]] = set()

    def see(self, now: Mapping[str, TopicNow]) -> None:
        """Take up the present state of Kafka's topics."""
        seen = datetime.fromtimestamp(time.time(), UTC)
        found = {}
        for topic, partition, offset, records in _open(now):
            known = self._found.get((topic, partition))
            since = known.since if known is not None and known.offset == offset else seen
            found[topic, partition] = OpenTransaction(topic, partition, offset, records, since)
        # In one step: another thread may be reading it.
        self._found = found

    def untold(self, after_s: float) -> list[OpenTransaction] | None:
        """Return the transactions to report; None if they are those of the last call.

        A transaction is reported once it has been open for `after_s`. Later calls go on reporting it, even with a
        longer `after_s`, until it ends.
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
    """Raise OpenTransactionError if an earlier run read beyond the start of an open transaction.

    It did so if it read uncommitted records. Spark would then say that Kafka has lost records.
    """
    for topic, partition, offset, _ in _open(now):
        # Of a topic that was deleted and made again, nothing was read.
        is_same = topic in read and read[topic].topic_id == now[topic].topic_id
        read_to = read[topic].next_offsets.get(partition, 0) if is_same else 0
        if read_to > offset:
            raise OpenTransactionError(
                f"partition {partition} of topic {topic} was read up to offset {read_to}, uncommitted records too. "
                f"A transaction of another producer from offset {offset} on is still open, and reading now stops "
                "there. Nothing was read or lost. Start again once it has ended "
                f"({abort_words(topic, partition, offset)}), or read on as before with --kafka-option "
                "isolation.level=read_uncommitted."
            )


def abort_words(topic: str, partition: int, offset: int) -> str:
    """Kafka's command that ends a transaction whose producer has gone."""
    return f"`kafka-transactions.sh abort --topic {topic} --partition {partition} --start-offset {offset}` aborts it"


def _open(now: Mapping[str, TopicNow]) -> Iterator[tuple[str, int, int, int]]:
    """Yield topic, partition, first offset and number of offsets of each open transaction."""
    for topic, found in sorted(now.items()):
        for partition, stable in sorted(found.stable.items()):
            if found.latest[partition] > stable:
                yield topic, partition, stable, found.latest[partition] - stable
