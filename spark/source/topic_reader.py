"""Reads one topic from Kafka without Spark, and leaves no trace there: no group, no commits, no new topic."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, UnsupportedSaslMechanismError

from gateway.record_contract import INTERNAL_PREFIX
from spark.engine.told_error import ToldError

START_S_MAX = 15.0
WAIT_MS = 500
"""Longest wait for records before the caller is asked again."""
SILENT_MAX = 20
"""Empty answers after which a partition's end counts as reached: a transaction may be open there."""
TOPICS_TOLD_MAX = 10


class TopicError(ToldError):
    """The topic cannot be read. The message says why and what to write."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Offsets of a partition: of its first record, and the next that Kafka will give."""

    first: int
    end: int


class Reader:
    """One topic, while it is open."""

    def __init__(self, consumer: AIOKafkaConsumer, topic: str, partitions: Sequence[int]) -> None:
        self._consumer = consumer
        self._places = {number: TopicPartition(topic, number) for number in partitions}
        consumer.assign([*self._places.values()])

    async def extents(self) -> dict[int, Extent]:
        """Return the offsets of each partition now."""
        places = [*self._places.values()]
        first = await self._consumer.beginning_offsets(places)
        end = await self._consumer.end_offsets(places)
        return {number: Extent(first[place], end[place]) for number, place in self._places.items()}

    async def offsets_at(self, time_ms: int) -> dict[int, int | None]:
        """Return each partition's first offset from a time on, by which Kafka took records in; None if it has none."""
        found = await self._consumer.offsets_for_times(dict.fromkeys(self._places.values(), time_ms))
        return {number: found[place].offset if found.get(place) else None for number, place in self._places.items()}

    async def records(self, begin: Mapping[int, int], end: Mapping[int, int] | None) -> AsyncIterator[ConsumerRecord]:
        """Yield the records from `begin` to before `end`, or for ever without it. Both are offsets of partitions."""
        for number, offset in begin.items():
            self._consumer.seek(self._places[number], offset)
        left = {self._places[number] for number in begin if end is None or begin[number] < end[number]}
        if not left:
            return
        silent = 0
        while left and silent < SILENT_MAX:
            batches = await self._consumer.getmany(*left, timeout_ms=WAIT_MS)
            silent = silent + 1 if end is not None and not batches else 0
            # Of what came together, the records are in the order in which Kafka took them in.
            together = [record for batch in batches.values() for record in batch]
            for record in sorted(together, key=lambda each: (each.timestamp, each.partition, each.offset)):
                if end is None or record.offset < end[record.partition]:
                    yield record
            if end is not None:
                left = {place for place in left if await self._consumer.position(place) < end[place.partition]}


@asynccontextmanager
async def opened(
    bootstrap: str, options: Mapping[str, Any], topic: str, partition: int | None
) -> AsyncIterator[Reader]:
    """Open a topic, or one partition of it. Raises TopicError."""
    told = _Told()
    logger = logging.getLogger("aiokafka")
    logger.addHandler(told)
    passes, logger.propagate = logger.propagate, False
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="none", **options
    )
    try:
        try:
            async with asyncio.timeout(START_S_MAX):
                await consumer.start()
                # All topics: to ask for one by its name might make it.
                topics = await consumer.topics()
        except (KafkaError, TimeoutError, OSError) as error:
            why = told.last or str(error) or "it took too long"
            raise TopicError(f"no broker takes this client: {why}. Do TLS and SASL (--kafka-config) fit?") from error
        if topic not in topics:
            raise TopicError(_unknown(topic, topics))
        await consumer._client.add_topic(topic)  # noqa: SLF001 - `assign` learns partitions only of known topics
        numbers = sorted(consumer.partitions_for_topic(topic) or ())
        if partition is not None and partition not in numbers:
            raise TopicError(f"{topic} has no partition {partition}: it has {len(numbers)}, from 0 on")
        try:
            yield Reader(consumer, topic, numbers if partition is None else [partition])
        except KafkaError as error:
            raise TopicError(f"{topic} cannot be read: {told.last or error or type(error).__name__}") from error
    finally:
        # If a fetch has failed, aiokafka's stop ends with that fetch's cancellation.
        with suppress(asyncio.CancelledError):
            await consumer.stop()
        logger.removeHandler(told)
        logger.propagate = passes


def _unknown(topic: str, topics: set[str]) -> str:
    shown = sorted(name for name in topics if not name.startswith(INTERNAL_PREFIX))
    near = get_close_matches(topic, shown, 1, 0.5)
    few = f" There are {', '.join(shown[:TOPICS_TOLD_MAX])}{' and others' if len(shown) > TOPICS_TOLD_MAX else ''}."
    told = f" Did you mean {near[0]}?" if near else few if shown else " It has no topics that this user may see."
    return f"Kafka has no topic {topic}.{told}"


class _Told(logging.Handler):
    """Keeps the client's last words: it says in its log alone why no broker would have it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage().splitlines()[0]
        # The client's own words for it name an object in memory.
        if any(isinstance(each, UnsupportedSaslMechanismError) for each in record.args or ()):
            self.last = "the broker does not offer this sasl.mechanism"
