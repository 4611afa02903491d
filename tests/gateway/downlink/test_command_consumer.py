"""The consumer of commands ends with its session, whatever it is doing then."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from gateway.downlink import command_consumer
from gateway.downlink.command_consumer import CommandConsumer
from gateway.settings import KafkaSettings
from tests.support.waiting import patience


async def test_a_session_that_ends_while_the_consumer_is_closed_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closing = asyncio.Event()

    class GoneConsumer:
        """A consumer whose broker goes away: it neither starts nor stops."""

        def __init__(self, **_: Any) -> None:
            self._client = SimpleNamespace(close=self.close)

        async def start(self) -> None:
            raise KafkaConnectionError

        async def stop(self) -> None:
            closing.set()
            await asyncio.Event().wait()

        async def close(self) -> None:
            """Nothing is open."""

    async def partitions_of(*_: object, **__: object) -> list[int]:
        return [0]

    monkeypatch.setattr(command_consumer, "AIOKafkaConsumer", GoneConsumer)
    monkeypatch.setattr(command_consumer, "partitions_of", partitions_of)
    monkeypatch.setattr(command_consumer, "RETRY_S", 3_600.0)
    downlink: Any = SimpleNamespace(topic="gateway-commands.gw1")
    session: Any = SimpleNamespace(admin=None, link=SimpleNamespace(options=dict))
    reading = asyncio.create_task(CommandConsumer(downlink, "gw1", KafkaSettings(("127.0.0.1:1",))).run(session))
    await closing.wait()
    reading.cancel()
    await asyncio.wait({reading}, timeout=patience(10))
    assert reading.cancelled()
