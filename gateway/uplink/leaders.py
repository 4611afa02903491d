"""Asks the cluster who leads partitions without a leader, and whether their topics still exist."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from aiokafka.errors import KafkaError

from gateway.kafka.session import KafkaSession
from gateway.uplink.memory import Memory, Partition

LEADERS_S = 1.0
"""Seconds between two questions for the leaders of partitions that have none."""
GONE_S = 10.0
"""Seconds between two looks at a topic with such a partition. Somebody may have deleted it, or made it anew."""


class LeaderSearch:
    """Asks for leaders beside the rounds of one session."""

    def __init__(self, session: KafkaSession, memory: Memory) -> None:
        self._session = session
        self._memory = memory
        self.task: asyncio.Task[None] | None = None
        """The question under way, or the last one."""
        self._due_s = 0.0
        self._looked_at_s: dict[str, float] = {}
        """By topic with a partition without a leader: when it was last looked at (monotonic)."""
        self.gone: set[Partition] = set()
        """Parked partitions that no longer exist: their topic was deleted, or made anew."""

    def ask(self, leaderless: Sequence[Partition], now_s: float) -> None:
        """Ask the cluster for the leaders of these partitions, if it is time."""
        if leaderless and now_s >= self._due_s and (self.task is None or self.task.done()):
            self._due_s = now_s + LEADERS_S
            self.task = asyncio.create_task(self._find(leaderless), name="leaders")

    async def _find(self, leaderless: Sequence[Partition]) -> None:
        await self._session.look_for_leaders()
        now_s = time.monotonic()
        due = {topic for topic, _ in leaderless if now_s - self._looked_at_s.get(topic, float("-inf")) >= GONE_S}
        if not due:
            return
        # Topics whose partitions have leaders again are forgotten, and looked at at once next time.
        topics = {topic for topic, _ in leaderless}
        self._looked_at_s = {topic: at_s for topic, at_s in self._looked_at_s.items() if topic in topics}
        self._looked_at_s |= dict.fromkeys(due, now_s)
        with suppress(KafkaError, TimeoutError):
            verdicts = await self._memory.verdicts.of_all(self._session.admin, sorted(due), GONE_S)
            self.gone |= {
                (topic, number)
                for topic, number in leaderless
                if topic in due and not verdicts[topic].waits
                if not (verdicts[topic].usable and self._session.is_there(topic, number))
            }
