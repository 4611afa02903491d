"""Keeps partitions that take nothing at present. Their rows are passed over until the partitions may be tried again."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.buffer.rows import Row
from gateway.kafka.session import KafkaSession
from gateway.uplink.batches import Outgoing
from gateway.uplink.leaders import LeaderSearch
from gateway.uplink.memory import NO_PARTITION, Memory, Partition

STUCK_FACTOR = 2
"""Time-outs after which the producer counts as stuck. An idempotent producer retries for ever."""
TOPIC_S_MAX = 30.0
"""Longest time in seconds for which a topic that cannot be created or judged just now is left alone."""


@dataclass(slots=True)
class Parked:
    """A partition that takes nothing at present, with its task and batches under way; None if nothing was sent."""

    since_s: float
    task: asyncio.Task[None] | None = None
    out: Outgoing | None = None


class ParkedPartitions(dict[Partition, Parked]):
    """The parked partitions of one session."""

    def __init__(self, session: KafkaSession, memory: Memory, request_timeout_s: float, patience_s: float) -> None:
        """`patience_s` is how long a partition may be silent before that is reported."""
        super().__init__()
        self._session = session
        self._memory = memory
        self._stuck_s = STUCK_FACTOR * request_timeout_s
        self._patience_s = patience_s
        self.leaders = LeaderSearch(session, memory)

    def park(self, partition: Partition, parked: Parked, why: str | None) -> None:
        """Add a partition. `why` is None if its trouble may pass soon, and is not reported then."""
        self[partition] = parked
        if why is not None:
            self._memory.tell_parked(partition, why)

    def under_way(self) -> Iterable[Row]:
        """Rows that were sent to partitions that do not answer."""
        for parked in self.values():
            for _, rows in () if parked.out is None else parked.out.batches[parked.out.settled :]:
                yield from rows

    def ready(self, now_s: float) -> list[Partition]:
        """The partitions that can be unparked. The cluster is asked for the leaders of partitions without one."""
        leaderless = [each for each in self if each[1] != NO_PARTITION and not self._session.has_leader(*each)]
        self.leaders.ask(leaderless, now_s)
        return [partition for partition, parked in self.items() if self._is_ready(partition, parked, now_s)]

    def _is_ready(self, partition: Partition, parked: Parked, now_s: float) -> bool:
        """Whether a partition can be unparked: it may be tried again, or its batches under way have ended."""
        if partition in self.leaders.gone:
            return True
        if partition[1] == NO_PARTITION:
            return self._may_ask_again(partition, parked, now_s)
        if parked.task is None:
            return now_s >= self._memory.rests_until_s(partition) and self._session.has_leader(*partition)
        if parked.task.done() or now_s - parked.since_s > self._stuck_s:
            return True
        if now_s - parked.since_s > self._patience_s:
            self._memory.tell_parked(partition, self._memory.why_parked(partition))
        return False

    def _may_ask_again(self, partition: Partition, parked: Parked, now_s: float) -> bool:
        """Whether a topic that did not exist is made by now, or may be asked for again."""
        if partition[0] in self._memory.new_topics.under_way:
            return False
        verdict = self._memory.verdicts.refusal_of(partition[0])
        waits = verdict is not None and verdict.waits
        return not waits or now_s >= min(self._memory.rests_until_s(partition), parked.since_s + TOPIC_S_MAX)

    async def end(self) -> None:
        """Cancel the tasks under way."""
        tasks = (self.leaders.task, *(parked.task for parked in self.values()))
        await end_tasks([task for task in tasks if task is not None])


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they are done, however they end."""
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
