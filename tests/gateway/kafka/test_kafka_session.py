"""A session with Kafka: words if it cannot be opened, traces that it leaves, and its memory of topics."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiokafka.client import AIOKafkaClient

from gateway.kafka.link import KafkaLink
from gateway.kafka.session import NetworkChangedError, TopicVerdicts, _pace, open_session
from gateway.kafka.topics import TopicVerdict
from gateway.settings import KafkaSettings
from tests.support.kafka_peers import API_VERSIONS, INIT_PRODUCER_ID, METADATA, FakeBroker
from tests.support.stream_server import speaking
from tests.support.waiting import patience


async def begun(kafka: KafkaSettings, link: KafkaLink | None = None) -> None:
    """Begin a session, in vain."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(open_session("gw1", kafka, link or KafkaLink(kafka)))


# -- opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (frozenset({API_VERSIONS}), "no broker of kafka.bootstrap answers within"),
        (
            frozenset({API_VERSIONS, METADATA}),
            r"no broker answers a request for a producer id \(InitProducerId\) within",
        ),
    ],
)
async def test_what_was_not_answered_is_told(answers: frozenset[int], words: str) -> None:
    async with speaking(broker := FakeBroker(answers=answers)) as port:
        broker.advertised = ("127.0.0.1", port)
        kafka = KafkaSettings((f"127.0.0.1:{port}",), request_timeout_s=0.5)
        with pytest.raises(TimeoutError, match=words + r" kafka\.request_timeout_s \(0\.5 s\)"):
            await begun(kafka)
        assert (INIT_PRODUCER_ID in broker.asked) == (METADATA in answers)


async def test_connections_that_end_because_the_network_is_another_one_are_no_fault() -> None:
    async with speaking(broker := FakeBroker(answers=frozenset())) as port:
        kafka = KafkaSettings((f"127.0.0.1:{port}",), connect_timeout_s=60.0, request_timeout_s=60.0)
        link = KafkaLink(kafka)
        session = asyncio.create_task(begun(kafka, link))
        async with asyncio.timeout(patience(30)):
            while not broker.asked:
                await asyncio.sleep(0.01)
            assert link.abort_stale(lambda _: False)
            with pytest.raises(NetworkChangedError):
                await session
        assert link.fault is None


# -- ending ---------------------------------------------------------------------------------------


async def test_a_client_that_is_closed_leaves_no_request_for_metadata_behind() -> None:
    """Its connections tell it that they broke, and it asks who leads now."""
    async with speaking(broker := FakeBroker()) as port:
        broker.advertised = ("127.0.0.1", port)
        link = KafkaLink(KafkaSettings((f"127.0.0.1:{port}",)))
        with link.entered():
            client = AIOKafkaClient(**link.options(), request_timeout_ms=5_000)
            end_pace = _pace(client)
            await client.bootstrap()
            assert await client.ready(1)
        end_pace()
        link.abort()
        await client.close()
        async with asyncio.timeout(patience(10)):
            assert await client.force_metadata_update() is False
    assert "metadata" not in {task.get_name() for task in asyncio.all_tasks()}


# -- topics ---------------------------------------------------------------------------------------


async def test_more_topics_at_once_than_are_remembered_are_judged_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.kafka.session.TOPICS_MAX", 2)
    asked: list[str] = []

    async def well(_: Any, topics: Sequence[str], __: KafkaSettings) -> list[TopicVerdict]:
        asked.extend(topics)
        return [TopicVerdict(topic) for topic in topics]

    monkeypatch.setattr("gateway.kafka.session.inspect_topics", well)
    verdicts = TopicVerdicts(KafkaSettings(("kafka.example:9092",)))
    topics = ["a", "b", "c", "d", "e"]
    admin: Any = None
    for _ in range(2):
        assert sorted(await verdicts.of_all(admin, topics)) == topics
    assert asked[:5] == topics
    assert len(asked) > 5, "those that were forgotten are asked for again"
    assert (await verdicts.of(admin, "e")).usable
