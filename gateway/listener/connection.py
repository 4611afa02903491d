"""One MQTT client's connection: reads packets, has readings stored, and writes their acknowledgements.

`listener.admission` decides on CONNECT, and `listener.client` acts on the other packets. A PUBLISH with QoS 1, as
nearly all packets are, becomes a reading here.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from gateway.listener.admission import answer_connect
from gateway.listener.client import Client
from gateway.listener.device_client import DeviceClient
from gateway.listener.door import Caller
from gateway.listener.inflight import Inflight
from gateway.listener.link import READ_BYTES_MAX, Link
from gateway.listener.refusals import (
    HELD_TOO_MUCH,
    INTAKE_REFUSED,
    REASON_CODES,
    REVOKED,
    WITH_WILL,
    ClientRefusedError,
)
from gateway.listener.session import ClientBatch, Command, Session
from gateway.listener.shared import Shared
from gateway.listener.tls_connection import common_name
from gateway.listener.turns import TURN_BYTES
from gateway.mqtt.protocol import Connect, Dialect, Disconnect, Event, Publish, ServerProtocol, Violation
from gateway.mqtt.protocol5 import REASON_SHIFT
from gateway.mqtt.reason_codes import ReasonCode
from gateway.reading import Datum, Reading

REFUSAL_HOLD_S: Final = 1.0
"""Seconds for which CONNECT gets CONNACK 3 after the intake has refused readings."""

CLOSING_COMMITS_S: Final = 2.0
"""Seconds that an ending connection waits for durable copies, so that it can still acknowledge the readings."""


class Connection(Link):
    """One client's connection, plain or inside TLS."""

    __slots__ = (
        "_caller",
        "_clean",
        "_client",
        "_client_id",
        "_inflight",
        "_is_in_line",
        "_is_let_in",
        "_kept_events",
        "_last_words",
        "_owes",
        "_plain",
        "_protocol",
        "_shared",
        "_under_way",
        "_unread",
        "_user",
        "_waits_for_commit",
        "_writer",
    )

    def __init__(self, shared: Shared, loop: asyncio.AbstractEventLoop, caller: Caller) -> None:
        super().__init__(loop, shared.settings.connect_timeout_s)
        self._shared = shared
        self._caller = caller
        self._protocol = ServerProtocol(shared.settings.packet_bytes_max, shared.newer_dialect)
        self._client: Client | None = None
        """Set once CONNECT was accepted, or waits for the commit of its session."""
        self._user: str | None = None
        self._client_id: str | None = None
        self._writer: str | None = None
        """The client's `writer`, kept here for the hot path."""
        self._is_let_in = False
        """Whether CONNACK has accepted the client."""
        self._plain = False
        """Whether a PUBLISH is a reading: CONNECT was accepted, and the client is no operator."""
        self._kept_events: list[Event] | None = None
        """Packets after a CONNECT that waits for the commit of its session; None while no CONNECT waits."""
        self._clean = False
        self._inflight = Inflight(shared.settings, shared.inflight)
        self._under_way: deque[ClientBatch] = deque()
        """Batches that wait for a commit, or for an earlier one of them, in order."""
        self._waits_for_commit = False
        self._unread = b""
        """Bytes received but not acted on yet: at most READ_BYTES_MAX and one read."""
        self._is_in_line = False
        self._owes = False
        """Whether the connection ends as soon as its batches under way are answered (`dismiss`)."""
        self._last_words = b""
        """Bytes to send then, behind the answers."""

    @property
    def dialect(self) -> Dialect:
        """The version of MQTT that the client speaks."""
        return self._protocol.dialect

    @property
    def session(self) -> Session | None:
        """The client's session, once CONNECT was accepted or waits for the commit of the session."""
        return None if self._client is None else self._client.session

    # --- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._shared.connections.add(self)
        self.pause_or_resume()
        self._caller.connected(self.cut)

    def data_received(self, data: bytes) -> None:
        """Act on one read while this connection's share of the time lasts; leave the rest to its turns."""
        if self._cause is not None or self._shared.stopping:
            # Dropped, but it had to be read: closing with unread bytes would destroy answers on their way.
            return
        now = self._heard = self._loop.time()
        self._unread += data
        while self._unread and not self._is_in_line and self._may_act and not self._caller.time_share.is_used(now):
            now = self._act_on_piece()
        if self._unread:
            self.pause_or_resume()

    def eof_received(self) -> None:
        """Act on all bytes that are left; no more will come."""
        while self._unread and not self._shared.stopping and self._cause is None and not self._connect_waits:
            self._act_on_piece()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.send_commands()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._caller.left()
        self._owes = False
        self._unread = b""
        shared, client = self._shared, self._client
        shared.connections.discard(self)
        shared.paused.discard(self)
        if client is None:
            return
        if self._cause is None:
            self._cause = "connection-lost"  # without DISCONNECT
            shared.counts[self._cause] += 1
        self._retire()
        if self._clean:
            shared.counts["disconnected"] += 1
        elif not self._connect_waits:
            client.ended(self._cause, self._loop.time())
        if not self._connect_waits and client.device is not None:
            shared.devices.left(client.device)

    # --- acting on bytes ----------------------------------------------------------------------------------

    @property
    def _may_act(self) -> bool:
        """Whether received bytes may be acted on, at once or in a turn."""
        waits = self._waits_for_commit or self._waits_for_peer or self._connect_waits
        return not waits and self._cause is None

    def take_turn(self) -> None:
        """Act on one piece of the bytes; this connection has left the line."""
        self._is_in_line = False
        if self._transport.is_closing():
            return
        if self._cause is not None or self._shared.stopping:
            self._unread = b""
        elif self._unread and self._may_act:
            try:
                self._act_on_piece(TURN_BYTES)
            except BaseException:
                # asyncio does this if `data_received` fails.
                self.cut()
                raise
        self.pause_or_resume()

    def _act_on_piece(self, bytes_max: int = READ_BYTES_MAX) -> float:
        """Act on up to `bytes_max` received bytes by one `Intake.take`; return the event loop's time afterwards."""
        began, share = self._loop.time(), self._caller.time_share
        piece, self._unread = self._unread[:bytes_max], self._unread[bytes_max:]
        protocol = self._protocol
        wire_bytes = protocol.pending_bytes + len(piece)
        events = protocol.receive(piece)
        self._act(events, wire_bytes - protocol.pending_bytes)
        ended = self._loop.time()
        share.use(began, ended)
        return ended

    def _act(self, events: list[Event], wire_bytes: int) -> None:
        batch = ClientBatch()
        readings, answers = batch.readings, batch.answers
        received_us = self._shared.now_us()
        writer, plain = self._writer, self._plain
        ending: Disconnect | Violation | ClientRefusedError | None = None
        remaining = iter(events)
        for event in remaining:
            # The hot path: nearly all packets are a first try with QoS 1. `Client.handle` takes the others.
            if type(event) is Publish and plain and event.qos == 1 and not event.dup:
                topic = event.topic
                readings.append(Reading(topic, topic, Datum(received_us=received_us, payload=event.payload), writer))
                answers.append(event.packet_id)
                continue
            if type(event) is Disconnect or type(event) is Violation:
                ending = event
                break
            try:
                self._packet(event, batch, received_us)
            except ClientRefusedError as refused:
                ending = refused
            if ending is not None or self._cause is not None:
                break
            if self._kept_events is not None:
                self._kept_events += remaining
            writer, plain = self._writer, self._plain
        if batch.at_once and self._cause is None:
            self._transport.write(b"".join(batch.at_once))
        if (readings or answers or batch.marks or batch.replies) and self._client is not None:
            self._store(self._client, batch, wire_bytes)
        if ending is not None:
            self._finish(ending)

    def _packet(self, event: Event, batch: ClientBatch, received_us: int) -> None:
        """Act on a packet. Raises ClientRefusedError."""
        if type(event) is Connect:
            answer_connect(self._shared, self, event, common_name(self._transport), self._loop.time())
        elif self._client is not None:  # else CONNECT was refused: the first event is CONNECT or a Violation
            self._client.handle(event, batch, received_us)

    def _finish(self, ending: Disconnect | Violation | ClientRefusedError) -> None:
        """End the connection after its last packet: DISCONNECT, or a packet that is refused."""
        if isinstance(ending, Violation):
            self.dismiss(ending.reason, ending.message, ending.answer)
        elif isinstance(ending, ClientRefusedError):
            self.dismiss(ending.reason, ending.message)
        elif self._cause is None:
            if self._client is not None and ending.session_expiry_s is not None:
                self._client.expire_after(ending.session_expiry_s)
            self._clean = not ending.is_with_will  # then the will is discarded [MQTT-3.14.4-3]
            self.end(WITH_WILL if ending.is_with_will else "disconnected")

    # --- CONNECT ------------------------------------------------------------------------------------------

    @property
    def _connect_waits(self) -> bool:
        return self._kept_events is not None

    def suspend(self) -> None:
        """Let CONNECT wait: stop reading, and keep the packets that came after it."""
        self._kept_events = []
        self.pause_or_resume()

    def go_on(self, decide: Callable[[], None]) -> None:
        """Decide on a CONNECT that waited, and act on the packets after it."""
        if self._cause is not None:
            return
        events, self._kept_events = self._kept_events or [], None
        try:
            decide()
        except ClientRefusedError as refused:
            self.refuse(refused.reason, refused.message)
        self._catch_up(events)

    def _catch_up(self, events: list[Event]) -> None:
        """Act on the packets after a CONNECT, unless it still waits."""
        if self._kept_events is not None:
            self._kept_events += events
        elif self._cause is None:
            self.pause_or_resume()
            self._act(events, 0)

    def identify(self, user: str | None, client_id: str) -> None:
        """Remember for the log who the client is."""
        self._user, self._client_id = user, client_id

    def begin(self, client: Client) -> None:
        """Take the client, which has its session from now on."""
        self._client = client
        self._caller.logged_in()

    def accept(self, client: Client, keep_alive_s: int) -> None:
        """Send CONNACK, and let the client in."""
        shared = self._shared
        shared.counts["connected"] += 1
        if isinstance(client, DeviceClient):
            self._plain, self._writer = True, client.writer
        self._be_patient(1.5 * keep_alive_s)  # [MQTT-3.1.2-24]; 0 means no keep-alive
        # CONNACK must be the server's first packet [MQTT-3.2.0-1].
        self._is_let_in = True
        self._transport.write(
            self._protocol.dialect.accepted(
                session_present=client.present,
                client_id=client.assigned_id,
                session_expiry_s=client.told_expiry_s,
            )
        )
        if client.device is not None:
            shared.devices.appeared(client.device, self.peer)
        client.session.resume()
        self.send_commands()

    def end_where_revoked(self) -> None:
        """End the connection if its client's secret is no longer valid."""
        if self._client is not None and not self._shared.logins.is_valid(self._client.identity):
            self.dismiss(REVOKED, "its secret was revoked or replaced, or has expired; see sluice devices list")

    # --- commands -----------------------------------------------------------------------------------------

    def send_commands(self) -> None:
        """Send the commands that wait for this session, if the peer can take them now."""
        session = self.session
        if session is not None and session.waiting and self._can_be_sent_commands():
            self._transport.write(session.send_waiting(self._protocol.dialect, self._shared.now_us()))
            self._shared.give_up_commands(session)

    def send_command_at_most_once(self, command: Command) -> bool:
        """Send a command with QoS 0, if the peer can take it now; return whether it was sent."""
        if not self._can_be_sent_commands():
            return False
        packet = command.packet(self._protocol.dialect, 0, 0, dup=False, now_us=self._shared.now_us())
        self._transport.write(packet)
        return bool(packet)

    def _can_be_sent_commands(self) -> bool:
        return not (self._connect_waits or self._waits_for_peer) and self._cause is None

    # --- readings and their acknowledgement ---------------------------------------------------------------

    def _store(self, client: Client, batch: ClientBatch, wire_bytes: int) -> None:
        """Give a batch to the intake; `_decided` writes its answers."""
        shared, inflight = self._shared, self._inflight
        if not batch.waits and not self._under_way:
            # There is nothing to store, and no earlier batch to wait for.
            client.stored(batch)
            if self._cause is None:
                self._write_answers(batch)
            return
        if batch.readings and shared.inflight.bytes > shared.inflight.bytes_max and shared.intake.cannot_store:
            client.not_stored(batch)
            self._end_for_too_much_waiting()
            return
        client.complete(batch)
        inflight.add(batch, wire_bytes, self._loop.time())
        self._under_way.append(batch)
        self.pause_or_resume()
        shared.store(batch.readings, partial(self._decided, client, batch), batch.marks)

    def _decided(self, client: Client, batch: ClientBatch, stored: bool) -> None:  # noqa: FBT001 - as Intake has it
        """Acknowledge stored batches, in the order of their messages [MQTT-4.6.0-2], and undo a refused one at once."""
        under_way = self._under_way
        batch.is_stored = stored
        if not stored and client.may_refuse(batch):
            batch.code = ReasonCode.QUOTA_EXCEEDED
        elif not stored:
            under_way.remove(batch)
            self._inflight.remove(batch)
            self._not_stored(client, batch)
        while under_way and (under_way[0].is_stored or under_way[0].code):
            first = under_way.popleft()
            if first.is_stored:
                self._stored(client, first)
            else:
                self._refused(client, first)
        if self._owes and not under_way:
            self._owe_nothing()
        self.pause_or_resume()

    def _stored(self, client: Client, batch: ClientBatch) -> None:
        """Acknowledge a stored batch; if the client is gone, remember the batch for its next connection."""
        self._inflight.remove(batch)
        client.stored(batch)
        if (self._cause is None or self._owes) and not self._transport.is_closing():
            self._write_answers(batch)
        else:
            client.leave_unanswered(batch)
        if batch.untrue:
            self.dismiss(INTAKE_REFUSED, "the first copy of a message that came again could not be stored")

    def _refused(self, client: Client, batch: ClientBatch) -> None:
        """Answer a batch that was not stored by its reason code: the client must not send it again (MQTT 5, 4.4)."""
        self._inflight.remove(batch)
        client.not_stored(batch)
        if (self._cause is None or self._owes) and not self._transport.is_closing():
            batch.answers = [answer and answer | batch.code << REASON_SHIFT for answer in batch.answers]
            client.remember_refused(batch.answers)
            client.lose_refused(batch)
            self._write_answers(batch)

    def _write_answers(self, batch: ClientBatch) -> None:
        """Write PUBACK, PUBREC and PUBCOMP of a batch, and what else it asked for."""
        answers = batch.answers
        if batch.untrue:
            answers = [answer for position, answer in enumerate(answers) if position not in batch.untrue]
        if batch.qos0:
            answers = [answer for answer in answers if answer]
        packets = self._protocol.dialect.acknowledgements(answers)
        if batch.replies:
            packets += b"".join(batch.replies)
        if packets:
            self._transport.write(packets)

    def _not_stored(self, client: Client, batch: ClientBatch) -> None:
        shared = self._shared
        if shared.intake.cannot_store:
            shared.refusing_until = self._loop.time() + REFUSAL_HOLD_S
        if client.not_stored(batch):
            self.dismiss(
                INTAKE_REFUSED,
                "the buffer did not store the readings: the client keeps them, and sends them again",
            )

    def _end_for_too_much_waiting(self) -> None:
        self.dismiss(
            HELD_TOO_MUCH,
            "the buffer takes no readings at present, and more wait in memory than mqtt_listener.inflight_bytes_max, "
            "inflight_messages_max or inflight_bytes_total_max allow: the client keeps the rest, and sends it again",
        )

    def pause_or_resume(self) -> None:
        """Pause or resume reading, which bounds the bytes that wait for a commit or for the peer."""
        if self._cause is not None:
            return
        shared = self._shared
        waits = self._inflight.too_much(shared.intake, self._loop.time())
        if waits != self._waits_for_commit:
            self._waits_for_commit = waits
            if waits:
                shared.paused.add(self)
            else:
                shared.paused.discard(self)
        if waits and shared.intake.cannot_store:
            # The client would believe that it is heard: it sends nothing again while it is connected.
            self._end_for_too_much_waiting()
            return
        if self._unread and self._may_act and not self._is_in_line:
            self._is_in_line = True
            shared.turns.stand_in_line(self._loop, self._caller.time_share, self.take_turn)
        is_read_from = self._may_act and len(self._unread) <= READ_BYTES_MAX
        if is_read_from != self._is_read_from:
            self._read(is_read_from)

    # --- the end ------------------------------------------------------------------------------------------

    def dismiss(self, reason: str, message: str, answer: bytes = b"") -> None:
        """Count and log the reason, and close the connection once its batches under way are answered.

        Nothing more is taken from the client. Because it gets these answers, it makes progress with each connection.
        The wait ends after CLOSING_COMMITS_S. While the buffer can store nothing, there is no wait. If no client was
        let in, this is `refuse`.
        """
        if self._client is None:
            self.refuse(reason, message, answer)
        elif self._cause is None:
            self._log_refusal(reason, message)
            self._last_words = answer or self._farewell(reason)
            self._cause = reason
            self._retire()
            self._owes = True
            if self._under_way and not self._shared.intake.cannot_store:
                self._end_within(CLOSING_COMMITS_S, self._owe_nothing)
            else:
                self._owe_nothing()

    def _owe_nothing(self) -> None:
        """Close, as every batch is answered or no longer waited for."""
        self._owes = False
        if self._last_words:
            self._transport.write(self._last_words)
        self._close_after_reading()

    def end(self, cause: str, answer: bytes = b"") -> None:
        super().end(cause, answer or self._farewell(cause))

    def _farewell(self, reason: str) -> bytes:
        """The packet that tells the client why its connection ends: CONNACK before it was let in, else DISCONNECT."""
        code = REASON_CODES.get(reason)
        if code is None:
            return b""
        dialect = self._protocol.dialect
        return dialect.ended(code) if self._is_let_in else dialect.refused(code)

    def _abort(self, reason: str, message: str) -> None:
        farewell = self._farewell(reason)
        if self._cause is None and farewell:
            self._transport.write(farewell)
        super()._abort(reason, message)

    def _check_silence(self) -> None:
        if self._client is None:  # even if it has sent a part of CONNECT
            self._abort("connect-timeout", "no CONNECT within mqtt_listener.connect_timeout_s")
        else:
            super()._check_silence()

    def _log_refusal(self, reason: str, message: str) -> None:
        self._shared.refusals.refused(reason, message, peer=self.peer, user=self._user, client_id=self._client_id)

    def _retire(self) -> None:
        """Give up the session, and leave its state to its next connection."""
        self._caller.ends()
        client = self._client
        if client is not None and self._shared.sessions.get(client.key) is self:
            client.retire(under_way=bool(self._under_way))
