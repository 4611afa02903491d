"""Opens sessions with Kafka (a producer, an admin client and their connections), and keeps verdicts on topics."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress

import structlog
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    LeaderNotAvailableError,
    NodeNotReadyError,
    RequestTimedOutError,
    for_code,
)
from aiokafka.partitioner import murmur2
from aiokafka.protocol.offset import OffsetRequest, OffsetResetStrategy

from gateway.host.logs import FewLines
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.link import KafkaLink
from gateway.kafka.topics import UNKNOWN, Cluster, TopicVerdict, inspect_topics, read_cluster
from gateway.settings import KafkaSettings

BATCH_BYTES_MAX = 1_000_000
"""Bytes of a batch: just below what a broker takes by default (`message.max.bytes`)."""
VERDICT_S = 60.0
"""Seconds after which a refused topic is looked at again, as somebody may have mended it."""
WAITS_S = 5.0
"""Seconds after which a topic that cannot be judged or created just now is looked at again, as its readings wait."""
CONDEMNED_S_MIN = 15.0
"""Seconds after which a topic is looked at again if a broker refused it although its settings are good. They double
each time, up to `USABLE_S`."""
USABLE_S = 3_600.0
"""Seconds after which a topic that is written to is looked at again. Somebody may have changed it, and a session may
last for weeks."""
TOPICS_MAX = 20_000
"""Topics whose verdict is remembered, a kilobyte each. Whoever sends makes up their names."""
CLOSE_TIMEOUT_S = 5.0
METADATA_S_MIN = 0.25
READ_UNCOMMITTED = 0
"""Isolation level of a question for offsets."""

log = structlog.get_logger()


class NetworkChangedError(ConnectionError):
    """The network changed while a session was opened. That is no fault, and the next session may begin at once."""


class TopicVerdicts:
    """Verdicts on topics. Refused topics stay refused across sessions; good topics are looked at again in each."""

    def __init__(self, kafka: KafkaSettings, lines: FewLines | None = None) -> None:
        """`lines` bounds the log lines about topics."""
        self._kafka = kafka
        self._lines = FewLines() if lines is None else lines
        self._known: dict[str, TopicVerdict] = {}
        self._told: dict[str, TopicVerdict] = {}
        """By topic: the last verdict, to tell what is news. Topics that are made when wanted are left out."""
        self._until_s: dict[str, float] = {}
        """By topic: when it is looked at again (monotonic)."""
        self._since_s: dict[str, float] = {}
        """By topic: when it was judged (monotonic)."""
        self._condemned: Counter[str] = Counter()
        """By topic: how often brokers refused it since it last took something."""
        self._judging = asyncio.Lock()

    def begin_session(self) -> None:
        """Have usable topics looked at again, as they may have changed meanwhile."""
        for topic, verdict in self._known.items():
            if verdict.usable:
                self._until_s[topic] = 0.0

    @property
    def refused(self) -> dict[str, TopicVerdict]:
        """Topics that are not written to, except topics that are made as soon as they are wanted."""
        return {topic: verdict for topic in self._known if (verdict := self.refusal_of(topic)) is not None}

    def refusal_of(self, topic: str) -> TopicVerdict | None:
        """The verdict on a topic that is not written to; None if it is, or is made as soon as it is wanted."""
        verdict = self._known.get(topic)
        return None if verdict is None or verdict.usable or self.is_made_when_wanted(verdict) else verdict

    def is_made_when_wanted(self, verdict: TopicVerdict) -> bool:
        """Whether a topic does not exist, and this gateway makes it once a reading is for it."""
        return verdict.reason == UNKNOWN and self._kafka.create_topics

    def condemn(self, verdict: TopicVerdict) -> None:
        """Believe a broker that refuses a topic, whatever the topic's settings say. The pause doubles each time."""
        topic = verdict.topic
        self._remember(verdict)
        pause_s = min(CONDEMNED_S_MIN * 2 ** min(self._condemned[topic], 20), USABLE_S)
        self._condemned[topic] += 1
        self._until_s[topic] = time.monotonic() + pause_s
        self._lines.tell(
            log.error,
            "topic is not written to for a while",
            topic=topic,
            reason=verdict.reason,
            seconds=round(pause_s),
        )

    def acquit(self, topic: str) -> None:
        """Forget that brokers refused a topic, as it was written to."""
        self._condemned.pop(topic, None)

    async def of(self, admin: AIOKafkaAdminClient, topic: str, age_s_max: float = USABLE_S) -> TopicVerdict:
        """The verdict on whether a topic may be written to. Raises KafkaError.

        A verdict older than `age_s_max` is not believed, unless a broker refuses the topic.
        """
        return (await self.of_all(admin, (topic,), age_s_max))[topic]

    async def of_all(
        self, admin: AIOKafkaAdminClient, topics: Collection[str], age_s_max: float = USABLE_S
    ) -> dict[str, TopicVerdict]:
        """The verdicts on several topics, which are asked for at once. Raises KafkaError."""
        found = self._found(topics, age_s_max)
        if len(found) < len(set(topics)):
            # If two tasks ask about a topic, the cluster is asked once.
            async with self._judging:
                found = self._found(topics, age_s_max)
                for verdict in await inspect_topics(
                    admin, [topic for topic in topics if topic not in found], self._kafka
                ):
                    self.learn(verdict)
                    found[verdict.topic] = verdict
        return found

    def learn(self, verdict: TopicVerdict) -> None:
        """Go by a verdict from now on, and log it if it is news."""
        self._tell(verdict)
        self._remember(verdict)

    def _found(self, topics: Collection[str], age_s_max: float) -> dict[str, TopicVerdict]:
        found = {topic: self._known_within(topic, age_s_max) for topic in topics}
        return {topic: verdict for topic, verdict in found.items() if verdict is not None}

    def _known_within(self, topic: str, age_s_max: float) -> TopicVerdict | None:
        """The latest verdict on a topic, while it holds."""
        now_s = time.monotonic()
        holds = now_s < self._until_s.get(topic, 0.0)
        is_recent = now_s - self._since_s.get(topic, float("-inf")) <= age_s_max
        return self._known.get(topic) if holds and (is_recent or self._condemned[topic]) else None

    def _tell(self, verdict: TopicVerdict) -> None:
        topic, tell = verdict.topic, self._lines.tell
        if self.is_made_when_wanted(verdict):
            return
        before = self._told.get(topic)
        self._told[topic] = verdict
        if before is None or before.flaws != verdict.flaws:
            for flaw in verdict.flaws:
                if flaw.fails:
                    tell(log.warning, "topic is written to, and should be mended", topic=topic, flaw=flaw.words)
        if verdict.waits and (before is None or before.reason != verdict.reason):
            tell(log.warning, "topic is not written to just now", topic=topic, reason=verdict.reason, hint=verdict.hint)
        elif not verdict.usable and (before is None or before.reason != verdict.reason):
            tell(log.error, "topic is not written to", topic=topic, reason=verdict.reason, hint=verdict.hint)
        elif verdict.usable and before is not None and not before.usable and not self._condemned[topic]:
            tell(log.info, "topic can be written to again", topic=topic)

    def _remember(self, verdict: TopicVerdict) -> None:
        if len(self._known) >= TOPICS_MAX:
            self._known.clear()
            self._told.clear()
            self._until_s.clear()
            self._since_s.clear()
        self._known[verdict.topic] = verdict
        self._since_s[verdict.topic] = time.monotonic()
        holds_s = USABLE_S if verdict.usable else WAITS_S if verdict.waits else VERDICT_S
        self._until_s[verdict.topic] = time.monotonic() + holds_s


class KafkaSession:
    """A session of one producer. It ends with the first trouble that the producer cannot get over by itself."""

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
        self._topics: set[str] = set()
        self._kafka = kafka

    async def write_to(self, topics: Collection[str]) -> None:
        """Have the client learn of these topics, which must exist. Raises KafkaError, TimeoutError."""
        new = set(topics) - self._topics
        if new:
            self._topics |= new
            async with asyncio.timeout(self._kafka.request_timeout_s):
                # All topics are named: aiokafka asks only for those named last, and the others would lose their
                # leaders.
                await self._producer.client.set_topics(tuple(self._topics))

    async def partition(self, topic: str, key: bytes) -> int:
        """The partition of a key as every Kafka client computes it. Raises KafkaError, TimeoutError."""
        await self.write_to((topic,))
        async with asyncio.timeout(self._kafka.request_timeout_s):
            partitions = await self._producer.partitions_for(topic)
        return int((murmur2(key) & 0x7FFFFFFF) % len(partitions))

    async def send(self, topic: str, partition: int, batch: EncodedBatch) -> int:
        """Send a batch, and return its offset once all in-sync replicas have it. Raises KafkaError."""
        metadata = await (await self._producer.send_batch(batch, topic, partition=partition))
        return int(metadata.offset)

    def has_leader(self, topic: str, partition: int) -> bool:
        """Whether a broker is known to lead a partition."""
        leader = self._producer.client.cluster.leader_for_partition(TopicPartition(topic, partition))
        return leader is not None and leader != -1

    def is_there(self, topic: str, partition: int) -> bool:
        """Whether a topic has such a partition, as far as is known."""
        partitions = self._producer.client.cluster.partitions_for_topic(topic)
        return partitions is None or partition in partitions

    def partitions(self, topic: str) -> frozenset[int]:
        """The partitions of a topic that is written to, as far as is known."""
        return frozenset(self._producer.client.cluster.partitions_for_topic(topic) or ())

    async def ends(self, partitions: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """The offsets behind the last records of partitions; those that no topic has any more are left out.

        Raises KafkaError if a partition's leader does not tell.
        """
        await self.write_to({topic for topic, _ in partitions})
        client = self._producer.client
        by_leader: dict[int, dict[str, list[tuple[int, int]]]] = {}
        for topic, number in partitions:
            if not self.is_there(topic, number):
                continue
            leader = client.cluster.leader_for_partition(TopicPartition(topic, number))
            if leader is None or leader < 0:
                raise LeaderNotAvailableError(f"{topic}/{number}")
            by_leader.setdefault(leader, {}).setdefault(topic, []).append((number, OffsetResetStrategy.LATEST))
        found = {}
        for leader, topics in by_leader.items():
            if not await client.ready(leader):
                raise NodeNotReadyError(f"broker {leader}")
            answer = await client.send(leader, OffsetRequest(-1, READ_UNCOMMITTED, list(topics.items())))
            for topic, answers in answer.topics:
                for number, code, _, offset in answers:
                    if code:
                        raise for_code(code)(f"{topic}/{number}")
                    found[topic, number] = offset
        return found

    async def look_for_leaders(self) -> None:
        """Ask the cluster again who leads which partition."""
        with suppress(KafkaError, TimeoutError):
            async with asyncio.timeout(self._kafka.request_timeout_s):
                await self._producer.client.force_metadata_update()


@asynccontextmanager
async def open_session(client_id: str, kafka: KafkaSettings, link: KafkaLink) -> AsyncIterator[KafkaSession]:
    """Open a session over connections of `link`, and close it at the end of the `with`.

    Raises KafkaError, OSError, or TimeoutError with the request that was not answered. Raises NetworkChangedError if
    connections were ended because the network changed, and nothing else is wrong.
    """
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
        end_pace = _pace(producer.client)
        try:
            cluster = await _opened(producer, admin, link, kafka)
            yield KafkaSession(producer, admin, link, cluster.id, kafka)
        finally:
            end_pace()
            await _close(producer, admin, link)


async def _opened(
    producer: AIOKafkaProducer, admin: AIOKafkaAdminClient, link: KafkaLink, kafka: KafkaSettings
) -> Cluster:
    """Connect producer and admin client, and return their cluster."""
    waited_for = "no broker answers a request for a producer id (InitProducerId)"
    try:
        async with asyncio.timeout(kafka.request_timeout_s):
            await producer.start()
            waited_for = "no broker of kafka.bootstrap answers on a second connection"
            await admin.start()
            waited_for = "no broker says which cluster it is of (Metadata)"
            return await read_cluster(admin, ())
    except KafkaConnectionError as error:
        if link.was_cut:
            raise NetworkChangedError("the network became another one while Kafka was being connected") from error
        raise
    except (TimeoutError, RequestTimedOutError) as error:
        if not producer.client.cluster.brokers():
            waited_for = "no broker of kafka.bootstrap answers"
        raise TimeoutError(f"{waited_for} within kafka.request_timeout_s ({kafka.request_timeout_s:g} s)") from error


def _pace(client: AIOKafkaClient) -> Callable[[], None]:
    """Let a client ask for metadata every `METADATA_S_MIN` seconds at most. Returns a function that ends this.

    aiokafka asks in a loop while a partition that it has a batch for is without a leader.
    """
    ask = client.force_metadata_update
    asking: asyncio.Task[bool] | None = None
    asked_s = float("-inf")
    is_over = False

    async def later() -> bool:
        nonlocal asked_s
        await asyncio.sleep(asked_s + METADATA_S_MIN - time.monotonic())
        asked_s = time.monotonic()
        return bool(await ask())

    def paced() -> "asyncio.Future[bool]":
        nonlocal asking
        if is_over:
            # If its connections are closed, the client asks once more. Nobody would end the task of that question.
            none: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            none.set_result(False)
            return none
        if asking is None or asking.done():
            asking = asyncio.create_task(later(), name="metadata")
        return asyncio.shield(asking)

    def end() -> None:
        nonlocal is_over
        is_over = True
        if asking is not None:
            asking.cancel()

    client.force_metadata_update = paced
    return end


async def _close(producer: AIOKafkaProducer, admin: AIOKafkaAdminClient, link: KafkaLink) -> None:
    """Close producer and admin client without waiting for batches that cannot be delivered.

    A bare `producer.stop()` flushes first, and an idempotent producer retries an undeliverable batch for ever. So the
    sender and the client are closed one by one. Both are private or half-public in aiokafka 0.14. So that version is
    pinned, and a test covers this.
    """
    producer._closed = True  # noqa: SLF001
    # Requests under way end at once, and not with their time-out.
    link.abort()
    await close_each(producer._sender.close, producer.client.close, admin.close)  # noqa: SLF001


async def close_each(*parts: Callable[[], Awaitable[object]]) -> None:
    """Close parts of aiokafka's clients, each within CLOSE_TIMEOUT_S. A cancellation meanwhile is raised at the end."""
    for close in parts:
        # Whatever fails, go on: a client that is not closed would go on connecting by itself.
        with suppress(Exception, asyncio.CancelledError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await close()
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        # aiokafka and the lines above swallow the cancellation. Without this line, the daemon would not stop.
        raise asyncio.CancelledError
