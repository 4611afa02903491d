"""Asks how far Kafka's topics of readings reach, again and again over the same connections."""

from types import TracebackType
from typing import Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient


class KafkaEnds:
    """End offsets of the topics whose names begin with `topic_prefix`; `async with` closes the connections."""

    def __init__(self, bootstrap: str, topic_prefix: str = "device-") -> None:
        self._prefix = topic_prefix
        self._admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        self._consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)

    async def __aenter__(self) -> Self:
        try:
            await self._admin.start()
            await self._consumer.start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def read(self) -> dict[TopicPartition, int]:
        """Return the offset after the last record of each partition, also of topics made since the last call."""
        topics = [topic for topic in await self._admin.list_topics() if topic.startswith(self._prefix)]
        described = await self._admin.describe_topics(topics) if topics else []
        partitions = {
            TopicPartition(topic["topic"], partition["partition"])
            for topic in described
            for partition in topic["partitions"]
        }
        if not partitions:
            return {}
        if partitions != self._consumer.assignment():
            self._consumer.assign(partitions)
            # Only the ends are of interest: nothing should be fetched ahead.
            self._consumer.pause(*partitions)
        ends: dict[TopicPartition, int] = await self._consumer.end_offsets(partitions)
        return ends

    async def _close(self) -> None:
        await self._consumer.stop()
        await self._admin.close()
