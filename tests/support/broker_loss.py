"""Counts the readings that a site's own broker loses when it is killed, although it acknowledged them."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.reading import Mark, Reading
from gateway.settings import BrokerSettings
from gateway.site_broker.broker_ingress import BrokerIngress
from tests.support.mosquitto import Mosquitto, publish
from tests.support.waiting import patience

QUIET_S = 0.3
"""Seconds of silence after which all is taken to have come."""


class _Counting:
    cannot_store = False

    def __init__(self) -> None:
        self.readings: set[bytes] = set()

    def take(self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark] = ()) -> None:
        del marks
        self.readings.update(reading.datum.payload for reading in readings)
        asyncio.get_running_loop().call_soon(done, True)

    async def marks(self, prefix: str) -> dict[str, bytes]:
        del prefix
        return {}

    def lost(self, *_: object, **__: object) -> None: ...

    def event(self, *_: object, **__: object) -> None: ...


def readings_left_after_kill(directory: Path, acknowledged: int, *, save_on_every_change: bool = False) -> int:
    """Have mosquitto acknowledge readings while the gateway is away, kill it, and count what it still delivers.

    `save_on_every_change` is `autosave_on_changes true` with `autosave_interval 1`; without it mosquitto's default, a
    save every half hour.
    """
    settings = ["allow_anonymous true", "max_queued_messages 0"]
    if save_on_every_change:
        settings += ["autosave_on_changes true", "autosave_interval 1"]
    return asyncio.run(_measure(Mosquitto(directory, tuple(settings)), acknowledged))


async def _measure(broker: Mosquitto, acknowledged: int) -> int:
    intake = _Counting()
    broker.start()
    try:
        await _read(broker, intake)
        # The session and its subscription are on disk: only what is acknowledged from here on is at stake.
        broker.stop()
        broker.start()
        payloads = [f"reading {number}" for number in range(acknowledged)]
        await asyncio.to_thread(publish, broker.port, "device/42/thermo", payloads)
        broker.kill()
        broker.start()
        await _read(broker, intake)
    finally:
        broker.kill()
    return len(intake.readings)


async def _read(broker: Mosquitto, intake: _Counting) -> None:
    settings = BrokerSettings(host="127.0.0.1", port=broker.port, topics=("device/#",), backoff_s_min=0.1)
    ingress = BrokerIngress(settings, "gw1", intake, lambda: 1, random.random)
    running = asyncio.create_task(ingress.run())
    await asyncio.wait_for(ingress.session.subscriptions.answered.wait(), patience(10))
    count = -1
    while count < len(intake.readings):
        count = len(intake.readings)
        await asyncio.sleep(QUIET_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
