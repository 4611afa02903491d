"""Reads this gateway's topic of commands, beside the rounds of the uplink. Its troubles never end a session."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Never

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from gateway.downlink.command_topic import CommandTopicError, partitions_of
from gateway.downlink.downlink import Downlink
from gateway.kafka.session import KafkaSession, close_each
from gateway.reading import BufferFileError
from gateway.settings import KafkaSettings

FETCH_WAIT_S: Final = 25.0
"""Seconds for which a broker holds a request back until there is a command. Each takes 650 bytes of the link."""
FETCH_WAIT_SHARE: Final = 0.8
"""Greatest share of `kafka.request_timeout_s` for that wait."""
FETCH_BYTES: Final = 262_144
"""Bytes that one answer has of a partition. A single larger record still comes."""
LOOK_S: Final = 10.0
"""Seconds between two looks whether the topic has other partitions now."""
RETRY_S: Final = 15.0
"""Seconds until a topic that could not be read is tried again."""
STORE_RETRY_S: Final = 1.0

log = structlog.get_logger()


class CommandConsumer:
    """Hands the records of one topic to the downlink, each partition in order."""

    def __init__(self, downlink: Downlink, client_id: str, kafka: KafkaSettings) -> None:
        self.downlink = downlink
        self._topic = downlink.topic
        self._client_id = client_id
        self._kafka = kafka
        self.error: str | None = None
        """Why no commands are read; None if nothing but the uplink can keep them away."""

    def state(self) -> dict[str, Any]:
        """The state of the way down, for `sluice status`."""
        return {**self.downlink.state(), "error": self.error}

    async def run(self, session: KafkaSession) -> Never:
        """Read as long as a session lasts, until cancelled."""
        while True:
            try:
                await self._read(session)
                continue
            except (CommandTopicError, KafkaError, OSError) as error:
                self._fail(str(error) or type(error).__name__)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self._fail("the Kafka client gave up a request")
            except Exception as error:
                # A defect here must not end the uplink's session.
                if self.error != repr(error):
                    log.exception("commands cannot be read")
                self.error = repr(error)
            await asyncio.sleep(RETRY_S)

    async def _read(self, session: KafkaSession) -> None:
        """Read until the topic has other partitions. Raises CommandTopicError, KafkaError, OSError."""
        kafka = self._kafka
        numbers = await partitions_of(session.admin, self._topic, kafka, create=kafka.create_topics)
        partitions = [TopicPartition(self._topic, number) for number in numbers]
        async with self._consumer(session) as consumer:
            consumer.assign(partitions)
            for partition in partitions:
                offset = await self.downlink.offset(partition.partition, session.cluster_id)
                if offset is not None:
                    consumer.seek(partition, offset)
            self._recover()
            while consumer.partitions_for_topic(self._topic) in (None, set(numbers)):
                found = await consumer.getmany(timeout_ms=int(LOOK_S * 1000))
                for partition, records in found.items():
                    await self._store(partition.partition, session.cluster_id, records)

    async def _store(self, partition: int, cluster: str, records: Sequence[object]) -> None:
        """Store records, as soon as the disk takes them. Later ones wait in Kafka meanwhile."""
        while True:
            try:
                await self.downlink.take(partition, cluster, records)  # type: ignore[arg-type] # aiokafka has no types
            except BufferFileError as error:
                self._fail(f"commands wait in Kafka: {error}")
                await asyncio.sleep(STORE_RETRY_S)
            else:
                self._recover()
                return

    @asynccontextmanager
    async def _consumer(self, session: KafkaSession) -> AsyncIterator[AIOKafkaConsumer]:
        timeout_s = self._kafka.request_timeout_s
        consumer = AIOKafkaConsumer(
            client_id=self._client_id,
            enable_auto_commit=False,
            # A command that waited before the gateway first read must not be passed over.
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            fetch_max_wait_ms=int(min(FETCH_WAIT_S, timeout_s * FETCH_WAIT_SHARE) * 1000),
            max_partition_fetch_bytes=FETCH_BYTES,
            request_timeout_ms=int(timeout_s * 1000),
            **session.link.options(),
        )
        try:
            async with asyncio.timeout(timeout_s):
                await consumer.start()
            yield consumer
        finally:
            # If a fetch has failed, aiokafka's stop ends with that fetch's cancellation, before it has closed anything.
            # The session may end meanwhile. It cancels only once, and waits for the end of this.
            await close_each(consumer.stop, consumer._client.close)  # noqa: SLF001 - aiokafka is pinned

    def _fail(self, words: str) -> None:
        if words != self.error:
            log.warning("commands are not read", topic=self._topic, reason=words)
        self.error = words

    def _recover(self) -> None:
        if self.error is not None:
            log.info("commands are read again", topic=self._topic)
        self.error = None
