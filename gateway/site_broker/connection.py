"""Runs one connection to a broker, from CONNECT to its end."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, NoReturn

from gateway.mqtt.packet_reader import (
    CONNACK,
    DISCONNECT,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
    Packet,
    packet_id,
)
from gateway.mqtt.packet_reader5 import disconnect5, keep_alive_of
from gateway.mqtt.protocol import MalformedPacketError
from gateway.site_broker.client import CLOSED, BrokerClient
from gateway.site_broker.commits import BrokerBatch, Commits
from gateway.site_broker.reach import ENDS, REFUSALS, BrokerError
from gateway.site_broker.session import VERSION_5, BrokerSession
from gateway.tls.dates import Dates

HOLD_POLL_S: Final = 0.1
"""Seconds between two checks whether a paused connection may be read from again."""
TICK_S: Final = 1.0
_STRAY: Final = (PUBACK, PUBREC, PUBCOMP)
"""Answers to messages that another client published in this session before it was this gateway's; they are ignored."""


class BrokerConnection:
    """One connection of a session, on a socket that is connected already."""

    def __init__(
        self,
        session: BrokerSession,
        link: socket.socket,
        password: str | None,
        dates: Dates | None,
        on_accepted: Callable[[bool], None],
    ) -> None:
        """The broker's certificate was judged by `dates`, or by OpenSSL if it is None.

        `on_accepted` is called when CONNACK has accepted the connection, and is told whether the session was there.
        """
        self._session = session
        self._settings = session.settings
        self._dates = dates
        self._on_accepted = on_accepted
        self._keep_alive_s = session.settings.keep_alive_s
        """Seconds after which one side must have sent something."""
        self._client = BrokerClient(
            link, session.client_id, self._settings.packet_bytes_max, self._packets_came, session.wire.protocol
        )
        if self._settings.user is not None:
            self._client.username_pw_set(self._settings.user, password)
        self._commits = Commits(session, self._client)

    async def run(self) -> NoReturn:
        """Send CONNECT, and run the connection until it ends. Raises BrokerError with the reason.

        When cancelled, acknowledge what is stored and send DISCONNECT; the broker keeps the session.
        """
        loop = asyncio.get_running_loop()
        client, settings = self._client, self._settings
        self._session.deliveries.connecting()
        try:
            client.open(settings.host, settings.port, settings.keep_alive_s)
            await self._wait_for_connack()
            while not client.ended.done():
                await asyncio.wait({client.ended}, timeout=TICK_S if client.is_read_from else HOLD_POLL_S)
                self._tick(loop.time())
            raise BrokerError(f"the connection ended: {client.ended.result()}")
        except asyncio.CancelledError:
            await self._commits.finish()
            client.disconnect()
            client.loop_write()
            raise
        finally:
            self._session.subscriptions.disconnected()
            client.end(CLOSED)

    async def _wait_for_connack(self) -> None:
        """Raise BrokerError if the broker refuses the connection, or sends no CONNACK."""
        client, timeout_s = self._client, self._settings.connect_timeout_s
        outcomes: set[asyncio.Future[Any]] = {client.connack, client.ended}
        await asyncio.wait(outcomes, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not client.connack.done():
            raise BrokerError(
                "did not accept the connection: it sent no CONNACK; check that port is the broker's port "
                "for MQTT, without TLS if there is no [mqtt_brokers.tls]"
            )
        code = client.connack.result()
        if code:
            words = REFUSALS.get(code, f"return code {code}")
            raise BrokerError(f"refuses the connection: {words}")

    def _tick(self, now_s: float) -> None:
        self._commits.resume_reading()
        client, keep_alive_s = self._client, self._keep_alive_s
        # At half the keep-alive, because the broker gives up when it has heard nothing for one and a half.
        if now_s - max(client.pinged_s, min(client.wrote_s, client.heard_s)) >= keep_alive_s / 2:
            self._session.deliveries.pinged()
            client.send(b"", ping=True)
        if client.is_read_from and now_s - client.heard_s >= keep_alive_s * 1.5:
            client.end(f"it sent nothing for {keep_alive_s * 1.5:g} s, and did not answer PINGREQ")
        if self._dates is not None and self._dates() is None:
            client.end("this box's clock is known now, so the dates of the broker's certificate are checked anew")
        self._session.subscriptions.ask_again(client, now_s)

    def _packets_came(self, packets: list[Packet]) -> None:
        """Act on the packets of one read: one `Intake.take`, and one answer after the commit."""
        client, commits = self._client, self._commits
        if packets and not client.connack.done():
            self._connack_came(packets.pop(0))
        if client.ended.done():
            return
        batch = BrokerBatch(sum([len(packet.body) for packet in packets]))
        received_us = self._session.now_us()
        try:
            for packet in packets:
                if packet.first & 0xF0 == PUBLISH:
                    commits.judge(packet, received_us, batch)
                else:
                    self._control(packet, batch)
        except MalformedPacketError:
            commits.store(batch)  # the packets before it are whole
            raise
        if batch.readings or batch.answers:
            commits.store(batch)

    def _connack_came(self, packet: Packet) -> None:
        """Act on CONNACK, the first packet [MQTT-3.2.0-1]. PUBLISHes may follow it in the same read."""
        if packet.first & 0xF0 != CONNACK:
            raise MalformedPacketError("it does not begin with CONNACK")
        code, session_present = self._session.wire.connack(packet)
        if not code and self._session.wire is VERSION_5:
            # 0 means that the broker wants none. Ours goes on, which no broker can take amiss.
            self._keep_alive_s = min(self._keep_alive_s, keep_alive_of(packet) or self._keep_alive_s)
        self._client.connack.set_result(code)
        if not code:
            self._accepted(session_present=session_present)
            return
        # Nothing was delivered on this connection, so the next one must know the same as this one.
        self._client.end(CLOSED)
        known = self._session.deliveries.connection_refused()
        if known:
            self._session.keep(known)

    def _accepted(self, *, session_present: bool) -> None:
        self._session.counts["connections"] += 1
        self._session.deliveries.connected(session_present=session_present)
        if not session_present:
            self._commits.store(BrokerBatch(0))
        self._on_accepted(session_present)
        self._session.subscriptions.connected(self._client)

    def _control(self, packet: Packet, batch: BrokerBatch) -> None:
        """Act on a packet that carries no reading. Raises MalformedPacketError."""
        kind = packet.first & 0xF0
        if kind == PUBREL:
            self._commits.release(packet, batch)
        elif kind == PINGRESP:
            self._session.deliveries.ponged()
        elif kind == SUBACK:
            self._session.subscriptions.granted(*self._session.wire.suback(packet))
        elif kind == UNSUBACK:
            self._session.subscriptions.ended(packet_id(packet))
            self._session.keep((self._session.subscriptions.mark(),))
        elif kind == DISCONNECT and self._session.wire is VERSION_5:
            code, words = disconnect5(packet)
            told = f" ({words})" if words else ""
            self._client.end(f"the broker ended it: {ENDS.get(code, f'reason code 0x{code:02x}')}{told}")
        elif kind not in _STRAY:
            raise MalformedPacketError(f"a packet of type {kind >> 4} where it may not stand")
