"""Takes readings in again that were quarantined because of their topic, once it can be written to."""

from collections import defaultdict

import structlog
from aiokafka.admin import AIOKafkaAdminClient

from gateway.buffer import Buffer
from gateway.buffer_quarantine import TOPIC_FORBIDDEN
from gateway.forward_memory import Memory
from gateway.intake import FrontDoor
from gateway.kafka_topics import TopicVerdict

TOPIC_REFUSING = "topic-refuses-records"
"""The quarantine's reason for readings of a topic that refused one record after the other."""
TOO_LARGE_FOR_TOPIC = "topic-max-message-bytes"
"""The quarantine's reason for a record that is larger than its topic takes."""
AT_ONCE_MAX = 500
"""Readings taken in again in one commit."""
LOOKED_AT_MAX = 10_000
LOOK_S = 15.0
"""How often topics are looked at that something waits for in the quarantine."""

log = structlog.get_logger()


class Redrive:
    """Looks now and then at what the quarantine holds, and at the topics that it is for; one for each daemon."""

    def __init__(self, buffer: Buffer, front_door: FrontDoor, memory: Memory) -> None:
        self._buffer = buffer
        self._front_door = front_door
        self._memory = memory

    async def look(self, admin: AIOKafkaAdminClient) -> None:
        """Take in again what can go now. Raises KafkaError, BufferFileError."""
        waiting: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for number, topic, reason in await self._buffer.quarantined_of_topics(LOOKED_AT_MAX):
            waiting[topic].append((number, reason))
        for topic, found in waiting.items():
            verdict = await self._memory.verdicts.of(admin, topic, LOOK_S)
            numbers = self._ready(verdict, found) if verdict.usable else []
            for start in range(0, len(numbers), AT_ONCE_MAX):
                await self._front_door.retry_quarantined(numbers[start : start + AT_ONCE_MAX])
            if numbers:
                log.info("readings of a topic are taken in again", topic=topic, count=len(numbers))

    def _ready(self, verdict: TopicVerdict, found: list[tuple[int, str]]) -> list[int]:
        """Those that may be taken now. What would be refused again stays: each time costs the card some pages."""
        topic = verdict.topic
        doubtful = {TOPIC_FORBIDDEN, TOPIC_REFUSING}
        ready = [number for number, reason in found if reason not in {*doubtful, TOO_LARGE_FOR_TOPIC}]
        tried = [number for number, reason in found if reason in doubtful]
        # Only writing tells whether it may be written: one reading, and the others when that was taken.
        ready += tried if topic in self._memory.proven else tried[:1]
        if verdict.batch_bytes_max > self._memory.too_small.get(topic, 0):
            ready += [number for number, reason in found if reason == TOO_LARGE_FOR_TOPIC]
        return sorted(ready)
