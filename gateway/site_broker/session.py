"""A session at a broker, which outlives its connections; its marks outlive the process."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from paho.mqtt.enums import MQTTProtocolVersion

from gateway.mqtt.packet_reader import Message, Packet, connack, message, suback
from gateway.mqtt.packet_reader5 import connack5, message5, suback5
from gateway.reading import Intake, Mark
from gateway.settings import BrokerSettings
from gateway.site_broker.deliveries import Deliveries, session_prefix
from gateway.site_broker.reach import BrokerError
from gateway.site_broker.subscriptions import Subscriptions


class Wire(NamedTuple):
    """A version of MQTT: the parsers of what it writes in a form of its own."""

    protocol: MQTTProtocolVersion
    message: Callable[[Packet], Message]
    connack: Callable[[Packet], tuple[int, bool]]
    suback: Callable[[Packet], tuple[int, bytes]]


VERSION_4: Final = Wire(MQTTProtocolVersion.MQTTv311, message, connack, suback)
VERSION_5: Final = Wire(MQTTProtocolVersion.MQTTv5, message5, connack5, suback5)


class BrokerSession:
    """One broker's session, which its connections share.

    `now_us` is CLOCK_BOOTTIME in microseconds. `counts` counts since the start: `readings`, `recognised` (delivered
    again and not stored again), `doubtful` (stored with `Doubt.REDELIVERED`), `retained`, `too-large`, `connections`.
    """

    def __init__(self, settings: BrokerSettings, gateway_id: str, intake: Intake, now_us: Callable[[], int]) -> None:
        self.settings = settings
        self.intake = intake
        self.now_us = now_us
        self.wire = VERSION_5 if settings.version == "5" else VERSION_4
        self.client_id = settings.client_id or f"sluice-{gateway_id}"
        self.broker = f"{settings.host}:{settings.port}"
        """The broker's name in the log and in `sluice status`."""
        self.counts: Counter[str] = Counter()
        self._prefix = session_prefix(settings, gateway_id)
        self.deliveries = Deliveries(self._prefix, {})
        self.subscriptions = Subscriptions(settings, self._prefix, self.broker)
        self.settled = asyncio.Event()
        """Set while no batch waits for its commit."""
        self.settled.set()
        self._loaded = False

    async def load(self) -> None:
        """Load the marks that an earlier process kept, if that was not done yet."""
        if not self._loaded:
            kept = await self.intake.marks(self._prefix)
            self.deliveries = Deliveries(self._prefix, kept)
            self.subscriptions.load(kept)
            self._loaded = True

    async def connecting(self) -> None:
        """Store the marks that must be on disk before CONNECT. Raises BrokerError if they cannot be stored."""
        subscribed = self.subscriptions.connecting()
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.intake.take(
            (),
            lambda outcome: None if stored.done() else stored.set_result(outcome),
            [*self.deliveries.forget_marks(), subscribed],
        )
        if not await stored:
            raise BrokerError("the buffer can store nothing at present, so nothing is asked for; see sluice status")

    def keep(self, marks: Sequence[Mark]) -> None:
        """Store marks; nothing waits for the commit."""
        self.intake.take((), lambda _stored: None, marks)
