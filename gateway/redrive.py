"""Takes readings in again that were quarantined because of their topic, once it can be written to."""

from collections import defaultdict

import structlog
from aiokafka.admin import AIOKafkaAdminClient

from gateway.buffer import Buffer
from gateway.buffer_quarantine import TOPIC_FORBIDDEN
from gateway.forward_memory import Memory
from gateway.intake import FrontDoor

AT_ONCE_MAX = 500
"""Readings taken in again in one commit."""
LOOKED_AT_MAX = 10_000

log = structlog.get_logger()


class Redrive:
    """Looks now and then at what the quarantine holds, and at the topics that it is for."""

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
            if not (await self._memory.verdicts.of(admin, topic)).usable:
                continue
            numbers = [number for number, _ in found]
            is_forbidden = any(reason == TOPIC_FORBIDDEN for _, reason in found)
            if is_forbidden and topic not in self._memory.proven:
                # Only writing tells whether it may be written: one reading, and not all of them each time.
                numbers = numbers[:1]
            for start in range(0, len(numbers), AT_ONCE_MAX):
                await self._front_door.retry_quarantined(numbers[start : start + AT_ONCE_MAX])
            log.info("readings of a topic are taken in again", topic=topic, count=len(numbers))
