"""Watches the end of a topic in Kafka from outside: how many records it has, and when the last one came."""

import asyncio
import time
from types import TracebackType
from typing import Self

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

PARTITIONS = 3
POLL_S = 0.05
"""Seconds of uncertainty in the last record's time."""
STALL_S = 30.0
"""Seconds without a further record after which no more are expected."""


class KafkaTopic:
    """A topic of its own for one measurement: LogAppendTime, three partitions. `async with` makes it."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.name = name
        self._bootstrap = bootstrap
        self._partitions = [TopicPartition(name, number) for number in range(PARTITIONS)]
        self._consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)

    async def __aenter__(self) -> Self:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        await admin.start()
        try:
            config = {"message.timestamp.type": "LogAppendTime"}
            await admin.create_topics([NewTopic(self.name, PARTITIONS, 1, topic_configs=config)])
        finally:
            await admin.close()
        await self._consumer.start()
        self._consumer.assign(self._partitions)
        # Only the ends are of interest: nothing shall be fetched.
        self._consumer.pause(*self._partitions)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._consumer.stop()
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        await admin.start()
        try:
            await admin.delete_topics([self.name])
        finally:
            await admin.close()

    async def count(self) -> int:
        """Records that Kafka has now."""
        ends: dict[TopicPartition, int] = await self._consumer.end_offsets(self._partitions)
        return sum(ends.values())

    async def newest(self, count: int) -> list[ConsumerRecord]:
        """The last records of each partition, at most `count` each."""
        ends: dict[TopicPartition, int] = await self._consumer.end_offsets(self._partitions)
        self._consumer.resume(*self._partitions)
        records: list[ConsumerRecord] = []
        for partition, end in ends.items():
            self._consumer.seek(partition, max(0, end - count))
            while await self._consumer.position(partition) < end:
                for found in (await self._consumer.getmany(partition, timeout_ms=1000)).values():
                    records += found
        self._consumer.pause(*self._partitions)
        return records

    async def wait_for(self, count: int, stall_s: float = STALL_S) -> tuple[int, float]:
        """Wait until there are `count` records, or no more come; give how many, and since when (UNIX time)."""
        seen, since = await self.count(), time.time()
        while seen < count and time.time() - since < stall_s:
            await asyncio.sleep(POLL_S)
            now = await self.count()
            if now > seen:
                seen, since = now, time.time()
        return seen, since
