"""An ingress from a broker in front of an intake in memory, and what is published for it."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from gateway.reading import Mark, Reading
from gateway.settings import BrokerSettings
from gateway.site_broker.broker_ingress import BrokerIngress
from gateway.tls.dates import Dates, by_system_clock
from tests.support.mosquitto import publish
from tests.support.stream_server import Script, speaking

Done = Callable[[bool], None]


class MemoryIntake:
    """An intake that stores in memory: at once, or when the test says so."""

    def __init__(self) -> None:
        self.stored: list[Reading] = []
        self.kept: dict[str, bytes] = {}
        self.waiting: list[tuple[Sequence[Reading], Done, Sequence[Mark]]] = []
        self.outcome: bool | None = True
        """None: what is taken waits for `decide`."""
        self.cannot_store = False
        self.losses: Counter[str] = Counter()
        self.events: list[str] = []

    def take(self, readings: Sequence[Reading], done: Done, marks: Sequence[Mark] = ()) -> None:
        self.waiting.append((readings, done, marks))
        if self.outcome is not None:
            asyncio.get_running_loop().call_soon(self.decide, self.outcome)

    def decide(self, stored: bool) -> None:  # noqa: FBT001 - as `done` has it
        readings, done, marks = self.waiting.pop(0)
        if stored:
            self.stored += readings
            for mark in marks:
                if mark.value is None:
                    self.kept.pop(mark.key, None)
                else:
                    self.kept[mark.key] = mark.value
        done(stored)

    async def marks(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.kept.items() if key.startswith(prefix)}

    def lost(
        self, device: str | None, reason: str, count: int = 1, sequences: tuple[str, int, int] | None = None
    ) -> None:
        del device, sequences
        self.losses[reason] += count

    def event(self, kind: str, device: str | None, **details: object) -> None:
        del device, details
        self.events.append(kind)

    def payloads(self) -> list[str]:
        return [reading.datum.payload.decode() for reading in self.stored]


@contextlib.asynccontextmanager
async def reading_from(
    intake: MemoryIntake, port: int, dates: Dates = by_system_clock, **settings: Any
) -> AsyncIterator[BrokerIngress]:
    """An ingress that runs; it is not waited for, because it may not get a connection."""
    given: dict[str, Any] = {"host": "127.0.0.1", "port": port, "topics": ("device/#",)}
    given |= {"backoff_s_min": 0.1, "backoff_s_max": 0.2}
    ingress = BrokerIngress(BrokerSettings(**given | settings), "gw1", intake, lambda: 123_456, random.random, dates)
    running = asyncio.create_task(ingress.run())
    try:
        yield ingress
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def broker_telling(*scripts: Script) -> contextlib.AbstractAsyncContextManager[int]:
    """A broker that does as told, and its port: what one connection after the other gets, and then the last for good.

    A script begins when CONNECT came; when it ends, the connection is cut.
    """
    left = iter(scripts)
    script = scripts[0]

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal script
        script = next(left, script)
        try:
            await reader.read(1_000)
            await script(reader, writer)
        finally:
            writer.transport.abort()

    return speaking(speak)


def delivery(packet_id: int, payload: bytes, *, duplicate: bool = False) -> bytes:
    """A PUBLISH of QoS 1, of less than 128 bytes."""
    body = b"\x00\x0cdevice/1/tmp" + packet_id.to_bytes(2, "big") + payload
    return bytes((0x3A if duplicate else 0x32, len(body))) + body


async def published(
    port: int, payloads: list[str], *options: str, qos: int = 1, topic: str = "device/42/thermo"
) -> None:
    await asyncio.to_thread(publish, port, topic, payloads, *options, qos=qos)


def numbered(first: int, last: int) -> list[str]:
    return [f"reading {number}" for number in range(first, last)]
