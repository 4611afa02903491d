"""One session with Kafka: a producer, an admin client and their connections, with what was looked up through them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.partitioner import murmur2

from gateway.kafka_batch import EncodedBatch
from gateway.kafka_link import KafkaLink
from gateway.kafka_topics import UNKNOWN, TopicVerdict, create_topics, inspect_topics, read_cluster
from gateway.settings import KafkaSettings

BATCH_BYTES_MAX = 1_000_000
"""Just below what a broker takes by default (`message.max.bytes`)."""
VERDICT_S = 60.0
"""A topic that was refused is looked at again after this: somebody may have mended it."""
USABLE_S = 3_600.0
"""One that is written to, after this: somebody may have changed it, and a session may last for weeks."""
TOPICS_MAX = 50_000
"""Topics whose verdict is remembered."""
CLOSE_TIMEOUT_S = 5.0

log = structlog.get_logger()


class TopicVerdicts:
    """What is known of topics. Refused ones stay so from session to session, good ones are looked at again in each."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._known: dict[str, TopicVerdict] = {}
        self._until_s: dict[str, float] = {}
        """When each is looked at again."""
        self._since_s: dict[str, float] = {}
        """When each was judged."""
        self._judging = asyncio.Lock()

    def begin_session(self) -> None:
        """What may have changed meanwhile is looked at again."""
        for topic, verdict in self._known.items():
            if verdict.usable:
                self._until_s[topic] = 0.0

    @property
    def refused(self) -> dict[str, TopicVerdict]:
        """The topics that are not written to."""
        return {topic: verdict for topic, verdict in self._known.items() if not verdict.usable}

    def known(self, topic: str) -> TopicVerdict | None:
        """What was judged, as long as it holds."""
        verdict = self._known.get(topic)
        return verdict if time.monotonic() < self._until_s.get(topic, 0.0) else None

    def condemn(self, verdict: TopicVerdict) -> None:
        """Remember a topic that a broker refuses."""
        self._remember(verdict)
        log.error("topic is not written to for a while", topic=verdict.topic, reason=verdict.reason)

    async def of(self, admin: AIOKafkaAdminClient, topic: str, age_s_max: float = USABLE_S) -> TopicVerdict:
        """Whether a topic may be written to; it is created where settings say so. Raises KafkaError.

        A verdict that is older than `age_s_max` is not believed.
        """
        verdict = self._known_within(topic, age_s_max)
        if verdict is not None:
            return verdict
        # Two who ask must not both create it.
        async with self._judging:
            verdict = self._known_within(topic, age_s_max)
            if verdict is None:
                verdict = await self._judge(admin, topic)
                self._remember(verdict)
            return verdict

    def _known_within(self, topic: str, age_s_max: float) -> TopicVerdict | None:
        is_recent = time.monotonic() - self._since_s.get(topic, float("-inf")) <= age_s_max
        return self.known(topic) if is_recent else None

    async def _judge(self, admin: AIOKafkaAdminClient, topic: str) -> TopicVerdict:
        (verdict,) = await inspect_topics(admin, [topic], self._kafka)
        if verdict.reason == UNKNOWN and self._kafka.create_topics:
            (verdict,) = await create_topics(admin, [topic], self._kafka)
            if verdict.usable:
                log.info("topic created", topic=topic)
        before = self._known.get(topic)
        if before is None or before.flaws != verdict.flaws:
            for flaw in verdict.flaws:
                if flaw.fails:
                    log.warning("topic is written to, and should be mended", topic=topic, flaw=flaw.words)
        if not verdict.usable and (before is None or before.reason != verdict.reason):
            log.error("topic is not written to", topic=topic, reason=verdict.reason, hint=verdict.hint)
        elif verdict.usable and before is not None and not before.usable:
            log.info("topic can be written to again", topic=topic)
        return verdict

    def _remember(self, verdict: TopicVerdict) -> None:
        if len(self._known) >= TOPICS_MAX:
            self._known.clear()
            self._until_s.clear()
            self._since_s.clear()
        self._known[verdict.topic] = verdict
        self._since_s[verdict.topic] = time.monotonic()
        self._until_s[verdict.topic] = time.monotonic() + (USABLE_S if verdict.usable else VERDICT_S)


class KafkaSession:
    """A producer's life: it ends with the first trouble that the producer cannot get over by itself."""

    def __init__(
        self,
        producer: AIOKafkaProducer,
        admin: AIOKafkaAdminClient,
        link: KafkaLink,
        cluster_id: str,
        kafka: KafkaSettings,
    ) -> None:
        self.admin = admin
        self.link = link
        self.cluster_id = cluster_id
        self._producer = producer
        self._kafka = kafka

    async def partition(self, topic: str, key: bytes) -> int:
        """The partition of a key as every Kafka client computes it. Raises KafkaError, TimeoutError."""
        async with asyncio.timeout(self._kafka.request_timeout_s):
            # aiokafka begins with all topics there are, and from the first that is new asks for those alone that were
            # added: the others would lose their leaders.
            await self._producer.client.add_topic(topic)
            partitions = await self._producer.partitions_for(topic)
        return int((murmur2(key) & 0x7FFFFFFF) % len(partitions))

    async def send(self, topic: str, partition: int, batch: EncodedBatch) -> int:
        """Send a batch, and give the offset that it got once all replicas have it. Raises KafkaError."""
        metadata = await (await self._producer.send_batch(batch, topic, partition=partition))
        return int(metadata.offset)

    def has_leader(self, topic: str, partition: int) -> bool:
        """Whether some broker is known to take records for a partition."""
        leader = self._producer.client.cluster.leader_for_partition(TopicPartition(topic, partition))
        return leader is not None and leader != -1

    async def look_for_leaders(self) -> None:
        """Ask the cluster again who leads which partition."""
        with suppress(KafkaError, TimeoutError):
            async with asyncio.timeout(self._kafka.request_timeout_s):
                await self._producer.client.force_metadata_update()


@asynccontextmanager
async def open_session(client_id: str, kafka: KafkaSettings, link: KafkaLink) -> AsyncIterator[KafkaSession]:
    """A session for the length of a `with`, over connections of `link`. Raises KafkaError, OSError, TimeoutError."""
    timeout_ms = int(kafka.request_timeout_s * 1000)
    with link.entered():
        producer = AIOKafkaProducer(
            **link.options(),
            client_id=client_id,
            acks="all",
            enable_idempotence=True,
            max_batch_size=BATCH_BYTES_MAX,
            request_timeout_ms=timeout_ms,
        )
        admin = AIOKafkaAdminClient(**link.options(), client_id=client_id, request_timeout_ms=timeout_ms)
        try:
            async with asyncio.timeout(kafka.request_timeout_s):
                await producer.start()
                await admin.start()
                cluster = await read_cluster(admin, ())
            yield KafkaSession(producer, admin, link, cluster.id, kafka)
        finally:
            await _close(producer, admin, link)


async def _close(producer: AIOKafkaProducer, admin: AIOKafkaAdminClient, link: KafkaLink) -> None:
    """Let go of both without waiting for what cannot be delivered.

    A bare `producer.stop()` flushes first, and an undeliverable batch of an idempotent producer is retried for ever.
    The sender and the client are closed by themselves instead; both are private or half-public in aiokafka 0.14,
    which is why that version is pinned and a test covers this.
    """
    producer._closed = True  # noqa: SLF001
    # What is under way ends at once, rather than with its time-out.
    link.abort()
    for close in (producer._sender.close, producer.client.close, admin.close):  # noqa: SLF001
        with suppress(KafkaError, OSError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await close()
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        # aiokafka and the lines above swallow it: without this the daemon would not stop.
        raise asyncio.CancelledError
