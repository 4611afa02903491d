"""Stores what a broker delivers on one connection, and acknowledges it after the commit."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Final

import structlog

from gateway.mqtt.packet_reader import PUBACK, PUBCOMP, PUBREC, Packet, packet_id
from gateway.reading import READING_BYTES, Datum, Doubt, Reading
from gateway.site_broker.client import BrokerClient
from gateway.site_broker.deliveries import Judgement, digest
from gateway.site_broker.session import BrokerSession

STOP_S: Final = 2.0
"""Seconds that an ending connection waits for its commits, to acknowledge their readings."""
_ANSWER_QOS_1: Final = bytes((PUBACK, 2))
_ANSWER_QOS_2: Final = bytes((PUBREC, 2))
_ANSWER_PUBREL: Final = bytes((PUBCOMP, 2))

_log = structlog.get_logger("sluice.mqtt_broker")


@dataclass(slots=True)
class BrokerBatch:
    """Everything that one read brought, stored in one commit."""

    received_bytes: int
    readings: list[Reading] = field(default_factory=list)
    answers: bytearray = field(default_factory=bytearray)
    unanswered: int = 0
    """Number of readings with QoS 0, which nobody sends again."""


class Commits:
    """The commits of one connection. If too many bytes wait for them, the broker is not read from."""

    def __init__(self, session: BrokerSession, client: BrokerClient) -> None:
        self._message = session.wire.message
        self._intake = session.intake
        self._deliveries = session.deliveries
        self._counts = session.counts
        self._settled = session.settled
        self._inflight_bytes_max = session.settings.inflight_bytes_max
        self._client = client
        self._inflight_bytes = 0
        self._undecided = 0
        self._answers = bytearray()
        """Acknowledgements of stored batches, until the end of this turn of the loop."""
        self._answered: list[int] = []
        self._stopping = False

    def judge(self, packet: Packet, received_us: int, batch: BrokerBatch) -> None:
        """Judge a PUBLISH; add its answer to `batch`, and its reading if it must be stored."""
        first = packet.first
        qos = first >> 1 & 0b11
        topic_bytes, identifier, payload, user, same = self._message(packet)
        redelivered = False
        if qos:
            receive = self._deliveries.receive if qos == 1 else self._deliveries.receive_exactly_once
            judgement = receive(identifier, digest(same or packet.body), duplicate=bool(first & 8))
            batch.answers += (_ANSWER_QOS_1 if qos == 1 else _ANSWER_QOS_2) + identifier.to_bytes(2, "big")
            if judgement is Judgement.STORED:
                self._counts["recognised"] += 1
                return
            redelivered = judgement is Judgement.DOUBTFUL
        if first & 1:
            self._counts["retained"] += 1
            return
        if packet.missing:
            self._counts["too-large"] += 1
            self._intake.lost(None, "packet-too-large")
            return
        if not qos:
            if self._intake.cannot_store:
                self._intake.lost(None, "refused-qos0")
                return
            batch.unanswered += 1
        self._counts["doubtful"] += redelivered
        # A topic that is no UTF-8 matches no route, and so goes to the quarantine.
        topic = topic_bytes.decode(errors="replace")
        datum = Datum(received_us=received_us, payload=payload, doubt=Doubt.REDELIVERED if redelivered else 0)
        batch.readings.append(Reading(topic, topic, datum, None, user))

    def release(self, packet: Packet, batch: BrokerBatch) -> None:
        """Take a PUBREL. Raises MalformedPacketError."""
        self._deliveries.release(packet_id(packet))
        batch.answers += _ANSWER_PUBREL + packet.body[:2]

    def store(self, batch: BrokerBatch) -> None:
        """Store a batch, and answer the broker after the commit."""
        deliveries, client = self._deliveries, self._client
        number, marks = deliveries.batch()
        size = batch.received_bytes + READING_BYTES * len(batch.readings)
        answers, unanswered = batch.answers, batch.unanswered
        self._counts["readings"] += len(batch.readings)
        self._inflight_bytes += size
        self._undecided += 1
        self._settled.clear()

        def done(stored: bool) -> None:  # noqa: FBT001 - as `Intake.take` has it
            self._inflight_bytes -= size
            self._undecided -= 1
            if not self._undecided:
                self._settled.set()
            if stored:
                deliveries.stored(number)
                self._answer(number, answers)
                return
            deliveries.not_stored(number)
            if unanswered:
                self._intake.lost(None, "refused-qos0", unanswered)
            # A broker sends nothing again on the same connection, so there must be a new one.
            client.end("the buffer refused readings, which the broker will send again")

        try:
            self._intake.take(batch.readings, done, marks)
        except Exception:  # noqa: BLE001 - what waits for a commit must not wait for ever
            _log.exception("readings could not be taken in, which is a fault of this gateway: report it")
            done(False)
        if self._inflight_bytes > self._inflight_bytes_max or self._intake.cannot_store:
            client.pause_reading()

    def _answer(self, number: int, answers: bytearray) -> None:
        """Acknowledge a batch at the end of this turn, together with all others of the same commit."""
        if self._client.ended.done():
            return
        if not self._answered:
            asyncio.get_running_loop().call_soon(self._acknowledge)
        self._answers += answers
        self._answered.append(number)

    def _acknowledge(self) -> None:
        # If the connection ended in this turn, these answers were not written, and nothing is acknowledged.
        if not self._answered or self._client.ended.done():
            return
        for number in self._answered:
            self._deliveries.acknowledged(number)
        ping = self._deliveries.wants_ping
        if ping:
            self._deliveries.pinged()
        answers = bytes(self._answers)
        self._answered.clear()
        self._answers.clear()
        # A batch with QoS 0 alone has no answers, but a PINGREQ may be due.
        if answers or ping:
            self._client.send(answers, ping=ping)
        self.resume_reading()

    def resume_reading(self) -> None:
        """Read from the broker again, if few bytes wait for commits and the buffer can store readings."""
        if self._client.is_read_from or self._stopping:
            return
        if self._inflight_bytes <= self._inflight_bytes_max // 2 and not self._intake.cannot_store:
            self._client.resume_reading()

    async def finish(self) -> None:
        """Read nothing more, and acknowledge what is stored within STOP_S."""
        self._stopping = True
        self._client.pause_reading()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._settled.wait()
        self._acknowledge()
