"""One MQTT client's connection: what its packets ask for, what waits for the commit, and how the connection ends."""

import asyncio
import contextlib
import socket
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from gateway.mqtt_access import Identity, Refusal, identify
from gateway.mqtt_device_events import ReportedWill, reported
from gateway.mqtt_protocol import (
    PINGRESP,
    Connect,
    ConnectReturnCode,
    Disconnect,
    Event,
    PingRequest,
    PubAck,
    Publish,
    PubRel,
    ServerProtocol,
    Subscribe,
    Unsubscribe,
    Violation,
    Will,
    acknowledgements,
    connack,
    publish,
    suback,
    unsuback,
)
from gateway.mqtt_sessions import (
    Batch,
    Opening,
    PacketIdInUseError,
    PacketIdRun,
    Session,
    SessionKey,
    SessionsFullError,
    TooManyCommandsError,
    TooManyUnfinishedError,
    Unanswered,
    digest,
)
from gateway.mqtt_tls import common_name, peer_name
from gateway.reading import READING_BYTES, Reading

if TYPE_CHECKING:
    from gateway.ingress_mqtt_listener import MqttListener

READ_BYTES_MAX: Final = 65_536
"""What one read may bring: all of it is parsed, stored and answered together."""
REFUSAL_HOLD_S: Final = 1.0
"""How long CONNACK 3 answers after the intake refused; then a client is let in, and shows if it still does."""
SPARE_CONNECTIONS: Final = 64
"""Beyond `connections_max`: so many more are let in far enough to be told CONNACK 3."""
SUBSCRIPTIONS_MAX: Final = 32
"""Topic filters of one session."""
FILTER_BYTES_MAX: Final = 256
"""Bytes of each: all subscriptions of a session are one mark, written anew at each change."""
MARK_BYTES: Final = 100
"""What a mark weighs in memory beside its value."""
LINGER_S: Final = 1.0
"""How long a refused client gets to read the answer and close its side."""
WRITE_STALL_S: Final = 60.0
"""How long a peer may leave what is written to it unread, whatever its keep-alive."""
PROBE_AFTER_S: Final = 120
"""Silence after which TCP asks whether the peer is still there."""

SHUTDOWN: Final = "shutdown"
_TAKEN_OVER: Final = "taken-over"
_INTAKE_REFUSED: Final = "intake-refused"
_HELD_TOO_MUCH: Final = "held-too-much"
OUR_DOING: Final = frozenset({SHUTDOWN, _TAKEN_OVER, _INTAKE_REFUSED, _HELD_TOO_MUCH})
"""Ends that say nothing of the device, which is alive. Its will is published all the same [MQTT-3.1.2-8]."""

_log = structlog.get_logger("sluice.mqtt_listener")


class Connection(asyncio.Protocol):
    """One client's connection, plain or inside TLS."""

    __slots__ = (
        "_cause",
        "_clean",
        "_client_id",
        "_device",
        "_heard",
        "_ids",
        "_inflight_batches",
        "_inflight_bytes",
        "_inflight_messages",
        "_key",
        "_listener",
        "_loop",
        "_opening",
        "_operator",
        "_patience_s",
        "_plain",
        "_preceding",
        "_present",
        "_protocol",
        "_reading",
        "_timer",
        "_transport",
        "_unanswered",
        "_waits_for_commit",
        "_waits_for_peer",
        "_will",
        "_will_reported",
        "_write_timer",
        "_writer",
        "peer",
        "session",
    )

    def __init__(self, listener: "MqttListener", loop: asyncio.AbstractEventLoop) -> None:
        self._listener = listener
        self._loop = loop
        self._protocol = ServerProtocol(listener.settings.packet_bytes_max)
        self._transport: asyncio.Transport
        self.peer = ""
        self.session: Session
        """Set once CONNECT was accepted, or waits for its commit; then `_key` is too."""
        self._key: SessionKey | None = None
        self._client_id: str | None = None
        self._device: str | None = None
        self._writer: str | None = None
        self._operator = False
        self._plain = False
        """Whether a PUBLISH is a reading: CONNECT was accepted, and not an operator's."""
        self._present = False
        self._will: Will | None = None
        """An operator's, which is a command."""
        self._will_reported: ReportedWill | None = None
        """A device's."""
        self._opening: list[Event] | None = None
        """What came behind a CONNECT whose session waits for its commit."""
        self._clean = False
        self._cause: str | None = None
        """Why this side ends it; set once, and then nothing is taken or written any more."""
        self._patience_s = listener.settings.connect_timeout_s
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._inflight_bytes = 0
        self._inflight_messages = 0
        self._inflight_batches = 0
        self._ids = PacketIdRun()
        self._preceding: Unanswered | None = None
        """What the session's preceding connection left stored and unanswered."""
        self._unanswered: Unanswered | None = None
        """What this one leaves."""
        self._reading = True
        self._waits_for_commit = False
        self._waits_for_peer = False

    # --- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_server makes
        self._transport = transport
        listener = self._listener
        self.peer = peer_name(transport)
        if len(listener.connections) >= listener.settings.connections_max + SPARE_CONNECTIONS:
            self._abort("too-many-connections", "no room even to answer; see mqtt_listener.connections_max")
            return
        listener.connections.add(self)
        # asyncio's transports read so much at once; its default is four times as much, for each of them.
        transport.max_size = READ_BYTES_MAX  # type: ignore[attr-defined]
        # Finds out about peers that vanished and asked for no keep-alive.
        with contextlib.suppress(OSError):
            peer_socket = transport.get_extra_info("socket")
            peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(self._patience_s, self._check_silence)
        self.pause_or_resume()

    def data_received(self, data: bytes) -> None:
        """Take all that one read brought: one `Intake.take`, one write of all the answers."""
        if self._cause is not None or self._listener.stopping:
            # Read all the same: closing while something is unread would destroy answers on their way.
            return
        self._heard = self._loop.time()
        events = self._protocol.receive(data)
        if self._opening is not None:
            self._opening += events
        else:
            self._act(events, len(data))

    def pause_writing(self) -> None:
        self._waits_for_peer = True
        self._write_timer = self._loop.call_later(WRITE_STALL_S, self._write_stalled)
        self.pause_or_resume()

    def resume_writing(self) -> None:
        self._waits_for_peer = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._cause is None and self._opening is None and self._key is not None:
            self.send_commands()
        self.pause_or_resume()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # a reset and an end without DISCONNECT mean the same
        listener = self._listener
        listener.connections.discard(self)
        listener.paused.discard(self)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        if self._key is None:
            return
        if self._cause is None:
            self._cause = "connection-lost"
            listener.counts[self._cause] += 1
        self._retire()
        if self._clean:
            listener.counts["disconnected"] += 1
        elif self._opening is None:
            self._ended_without_disconnect(self._cause)
        if self._opening is None and self._device is not None:
            listener.devices.left(self._device)

    # --- packets ------------------------------------------------------------------------------------------

    def _act(self, events: list[Event], wire_bytes: int) -> None:
        batch = Batch()
        readings, answers = batch.readings, batch.answers
        received_us = self._listener.now_us()
        writer, plain = self._writer, self._plain
        ending: Disconnect | Violation | None = None
        remaining = iter(events)
        for event in remaining:
            # The way of nearly all readings; the rest, and QoS 0 and 2, go by `_packet`.
            if type(event) is Publish and plain and event.qos == 1 and not event.dup:
                topic = event.topic
                readings.append(
                    Reading(topic, topic, event.payload, received_us, None, None, None, None, 0, writer, False)
                )
                answers.append(event.packet_id)
                continue
            if type(event) is Disconnect or type(event) is Violation:
                ending = event
                break
            self._packet(event, batch, received_us)
            if self._cause is not None:
                break
            if self._opening is not None:
                self._opening += remaining
            writer, plain = self._writer, self._plain
        if batch.at_once and self._cause is None:
            self._transport.write(b"".join(batch.at_once))
        if readings or answers or batch.marks or batch.replies:
            self._take(batch, wire_bytes)
        if ending is not None:
            self._finish(ending)

    def _finish(self, ending: Disconnect | Violation) -> None:
        """Act on the last that a client has to say."""
        if isinstance(ending, Violation):
            self._refuse(ending.reason, ending.message, ending.answer)
        elif self._cause is None:
            self._clean = True  # and so the will is discarded [MQTT-3.14.4-3]
            self.end("disconnected")

    def _packet(self, event: Event, batch: Batch, received_us: int) -> None:
        """Act on a packet, or end the connection."""
        match event:
            case Publish():
                self._publish(event, batch, received_us)
            case PubRel():
                self.session.release(batch, event.packet_id)
            case PingRequest():
                batch.at_once.append(PINGRESP)
            case PubAck():
                if not self.session.acknowledged(batch, event.packet_id):
                    self._listener.counts["puback-of-nothing"] += 1
            case Connect():
                self._connect(event)
            case Subscribe():
                self._subscribe(event, batch)
            case Unsubscribe():
                self._unsubscribe(event, batch)

    def _publish(self, event: Publish, batch: Batch, received_us: int) -> None:
        """Take a PUBLISH that is not a device's first try with QoS 1."""
        if self._operator:
            self._command(event, batch)
            return
        redelivered = False
        if event.qos == 0:
            if self._listener.intake.holding:
                self._lose_qos0(1)
                return
            batch.answers.append(0)
            batch.qos0 += 1
        elif event.qos == 1:
            if event.dup:
                if self._is_stored(event):
                    batch.answer_bare(event.packet_id)
                    return
                redelivered = True
            batch.answers.append(event.packet_id)
        else:
            message = digest(event.topic, event.payload)
            looks_known = self.session.received.get(event.packet_id) == message
            if not self._begin(event, message, batch):
                return
            # In a session that this gateway did not lose, an unknown identifier means that the first try was lost.
            redelivered = looks_known or (event.dup and not self._present)
        topic = event.topic
        batch.readings.append(
            Reading(topic, topic, event.payload, received_us, writer=self._writer, redelivered=redelivered)
        )

    def _is_stored(self, event: Publish) -> bool:
        """Whether a PUBLISH with QoS 1 and DUP is known to be stored already (`Unanswered`)."""
        preceding = self._preceding
        if not preceding or preceding.get(event.packet_id) != digest(event.topic, event.payload):
            return False
        del preceding[event.packet_id]
        self._listener.counts["redelivery-recognised"] += 1
        return True

    def _begin(self, event: Publish, message: bytes, batch: Batch) -> bool:
        """Take a PUBLISH with QoS 2 and the digest `message`; tell whether it is one that is not stored yet."""
        settings = self._listener.settings
        try:
            new = self.session.begin(batch, event.packet_id, message, settings.qos2_unfinished_max, dup=event.dup)
        except PacketIdInUseError:
            self._refuse("packet-id-in-use", f"packet identifier {event.packet_id} waits for its PUBCOMP")
            return False
        except TooManyUnfinishedError:
            self._refuse(
                "too-many-unfinished",
                f"{len(self.session.received)} QoS 2 messages of this session wait for their PUBREL, and "
                f"{self.session.room.unfinished} in all; see mqtt_listener.qos2_unfinished_max and "
                "mqtt_listener.qos2_unfinished_total_max",
            )
            return False
        if not new:
            self._listener.counts["redelivery-recognised"] += 1
        return new

    def _command(self, event: Publish, batch: Batch) -> None:
        """Pass on what an operator says to a device.

        The command is decided before anything of its exchange is recorded: what is refused must not look known when
        it comes again.
        """
        listener, topic = self._listener, event.topic
        device = listener.command_topics.device_of(topic)
        if device is None:
            # A positive acknowledgement or the end: nothing else tells the client [MQTT-3.3.5-2].
            self._refuse(
                "not-a-command-topic",
                f"an operator published to {topic[:80]!r}; see mqtt_listener.command_topics",
            )
            return
        message = digest(topic, event.payload) if event.qos == 2 else b""
        recipients = None
        if event.qos < 2 or not self.session.is_known(event.packet_id, message, dup=event.dup):
            try:
                recipients = listener.recipients(device, topic, event.payload, event.qos)
            except TooManyCommandsError:
                self._refuse(
                    "too-many-commands",
                    f"too many commands wait for {topic[:80]!r}; "
                    "see mqtt_listener.commands_max and mqtt_listener.commands_bytes_max",
                )
                return
        if event.qos == 2:
            if not self._begin(event, message, batch):
                return
            # Its answer is bare: no reading of the batch belongs to it.
            batch.bare.add(len(batch.answers) - 1)
        elif event.qos == 1:
            batch.answer_bare(event.packet_id)
        if recipients is not None:
            listener.command(recipients, topic, event.payload, batch)

    def _subscribe(self, subscribe: Subscribe, batch: Batch) -> None:
        """Grant what lies within the device's own command topics, at most QoS 1."""
        listener, session = self._listener, self.session
        granted = []
        for topic_filter, asked in subscribe.filters:
            qos = min(asked, 1)
            if not self._may_subscribe(topic_filter):
                granted.append(0x80)
                continue
            granted.append(qos)
            if session.subscriptions.get(topic_filter) != qos:
                listener.kept.subscribe(session, topic_filter, qos)
                batch.subscribed = True
        if 0x80 in granted:
            listener.refused(
                "subscribe-refused",
                "this is a gateway's front door, not a broker: a device may subscribe to its own command topics only "
                f"(see mqtt_listener.command_topics), to {SUBSCRIPTIONS_MAX} filters of {FILTER_BYTES_MAX} bytes",
                self.peer,
                self._client_id,
            )
        self._reply(suback(subscribe.packet_id, granted), batch)

    def _may_subscribe(self, topic_filter: str) -> bool:
        subscriptions = self.session.subscriptions
        return (
            not self._operator
            and (topic_filter in subscriptions or len(subscriptions) < SUBSCRIPTIONS_MAX)
            and len(topic_filter.encode()) <= FILTER_BYTES_MAX
            and self._listener.command_topics.may_subscribe(topic_filter, self._device)
        )

    def _unsubscribe(self, unsubscribe: Unsubscribe, batch: Batch) -> None:
        for topic_filter in unsubscribe.filters:
            batch.subscribed |= self._listener.kept.unsubscribe(self.session, topic_filter)
        # Even where nothing was subscribed to [MQTT-3.10.4-5].
        self._reply(unsuback(unsubscribe.packet_id), batch)

    def _reply(self, packet: bytes, batch: Batch) -> None:
        """Answer after the commit that keeps a changed session: this batch's, or one that is under way."""
        (batch.replies if self.session.kept else batch.at_once).append(packet)

    # --- CONNECT ------------------------------------------------------------------------------------------

    def _connect(self, connect: Connect) -> None:
        listener, settings = self._listener, self._listener.settings
        self._client_id = connect.client_id
        identity = identify(
            connect,
            common_name(self._transport),
            settings.users,
            settings.operators,
            anonymous=settings.anonymous,
        )
        if isinstance(identity, Refusal):
            self._refuse(identity.reason, identity.message, connack(identity.code))
            return
        key = (identity.user, connect.client_id or listener.generated_client_id())
        older = listener.sessions.get(key)
        if not (self._may_connect(connect, identity, older) and self._has_session_room(key, connect)):
            return
        if older is not None:
            listener.refused(_TAKEN_OVER, "the same client identifier connected again", older.peer, key[1])
        opening = listener.kept.open(key, clean=connect.clean_session)
        if older is not None:
            older.end(_TAKEN_OVER)  # [MQTT-3.1.4-2]
        listener.enter(key, self)
        self._key, self.session = key, opening.session
        self._operator = identity.operator
        self._writer = None if identity.operator else identity.user
        self._device = None if identity.operator else identity.user or connect.client_id or None
        self._present = opening.session.on_disk and not connect.clean_session
        self._preceding = listener.unanswered.take(key)
        if not opening.marks:
            self._accept(connect)
            return
        self._opening = []
        self.pause_or_resume()
        listener.take([], partial(self._opened, connect, opening), opening.marks)

    def _may_connect(self, connect: Connect, identity: Identity, older: "Connection | None") -> bool:
        listener, settings = self._listener, self._listener.settings
        if listener.intake.holding or self._heard < listener.refusing_until:
            self._refuse(
                "connect-while-refusing",
                "the buffer takes no readings at present: it is full, or its disk fails",
                connack(ConnectReturnCode.SERVER_UNAVAILABLE),
            )
        elif older is None and len(listener.sessions) >= settings.connections_max:
            self._refuse(
                "too-many-connections",
                f"mqtt_listener.connections_max = {settings.connections_max} are connected",
                connack(ConnectReturnCode.SERVER_UNAVAILABLE),
            )
        elif (
            older is None
            and identity.user is not None
            and listener.users_connected[identity.user] >= settings.connections_per_user_max
        ):
            self._refuse(
                "too-many-user-connections",
                f"{settings.connections_per_user_max} connections of user {identity.user!r} are there; "
                "see mqtt_listener.connections_per_user_max",
                connack(ConnectReturnCode.SERVER_UNAVAILABLE),
            )
        elif (
            identity.operator
            and connect.will is not None
            and listener.command_topics.device_of(connect.will.topic) is None
        ):
            self._refuse(
                "not-a-command-topic",
                f"an operator's will for {connect.will.topic[:80]!r}; see mqtt_listener.command_topics",
                connack(ConnectReturnCode.NOT_AUTHORIZED),
            )
        return self._cause is None

    def _has_session_room(self, key: SessionKey, connect: Connect) -> bool:
        """Make room for the session that a CONNECT begins, where it begins one; or refuse it."""
        listener, settings = self._listener, self._listener.settings
        if connect.clean_session or key in listener.kept.kept:
            return True
        try:
            listener.make_session_room(key[0])
        except SessionsFullError:
            self._refuse(
                "too-many-sessions",
                f"mqtt_listener.sessions_max = {settings.sessions_max} sessions, or sessions_per_user_max = "
                f"{settings.sessions_per_user_max} of its user, are kept and connected; "
                "a client that connects with clean session needs none",
                connack(ConnectReturnCode.SERVER_UNAVAILABLE),
            )
        return self._cause is None

    def _opened(self, connect: Connect, opening: Opening, stored: bool) -> None:  # noqa: FBT001 - as Intake has it
        """Go on with a CONNECT whose session's commit is done."""
        kept = self._listener.kept
        if stored:
            kept.opened(opening)
        else:
            kept.not_opened(opening)
        if self._cause is not None:
            return
        if not stored:
            self._refuse(
                _INTAKE_REFUSED, "the session could not be stored", connack(ConnectReturnCode.SERVER_UNAVAILABLE)
            )
            return
        events = self._opening or []
        self._opening = None
        self._accept(connect)
        self.pause_or_resume()
        self._act(events, 0)

    def _accept(self, connect: Connect) -> None:
        listener = self._listener
        listener.counts["connected"] += 1
        self._plain = not self._operator
        if connect.will is not None:
            if self._operator:
                self._will = connect.will
            else:
                self._will_reported = reported(connect.will)
        self._heard = self._loop.time()
        self._patience_s = 1.5 * connect.keep_alive_s  # [MQTT-3.1.2-24]; 0 means no keep-alive
        self._arm_timer()
        # Written before anything else can be: the first packet from a server is CONNACK [MQTT-3.2.0-1].
        self._transport.write(connack(ConnectReturnCode.ACCEPTED, session_present=self._present))
        if self._device is not None:
            listener.devices.appeared(self._device, self.peer)
        self.session.resume()
        self.send_commands()

    def send_commands(self) -> None:
        """Send the commands that wait for this session, unless the peer reads nothing."""
        if self._opening is None and self.session.waiting and not self._waits_for_peer and self._cause is None:
            self._transport.write(self.session.send_waiting())

    def send_command_at_most_once(self, topic: str, payload: bytes) -> None:
        """Send a command with QoS 0, if the peer can take it now."""
        if self._opening is not None or self._waits_for_peer or self._cause is not None:
            self._listener.counts["command-not-delivered"] += 1
        else:
            self._transport.write(publish(topic, payload, 0, 0, dup=False))

    # --- readings and their acknowledgement ---------------------------------------------------------------

    def _take(self, batch: Batch, wire_bytes: int) -> None:
        """Hand over what one read brought; its answers come with `_decided`."""
        listener = self._listener
        readings, answers = batch.readings, batch.answers
        if not batch.waits and not self._inflight_batches:
            # Nothing to store, and nothing before it to wait for.
            self._stored(batch)
            self._write_answers(batch)
            return
        if readings:
            if listener.inflight_bytes > listener.settings.inflight_bytes_total_max and listener.intake.holding:
                self.session.undo(batch)
                self._lose_qos0(batch.qos0)
                self._hold_no_more()
                return
            # QoS 0 has no identifiers to count.
            ids = [answer for answer in answers if answer] if batch.qos0 else answers
            if ids:
                batch.counting_from = self._ids.advance(ids[0] & 0xFFFF, ids[-1] & 0xFFFF, len(ids))
        if batch.subscribed and self.session.kept:
            mark = self.session.mark()
            batch.marks[mark.key] = mark.value
        weight = wire_bytes + READING_BYTES * len(readings)
        if batch.marks:
            weight += sum(MARK_BYTES + len(value or b"") for value in batch.marks.values())
        self._inflight_batches += 1
        self._inflight_messages += len(readings)
        self._inflight_bytes += weight
        listener.inflight_bytes += weight
        if listener.inflight_bytes > listener.settings.inflight_bytes_total_max and not listener.beyond_total:
            listener.judge_total()
        self.pause_or_resume()
        listener.take(readings, partial(self._decided, batch, weight), batch.marks)

    def _decided(self, batch: Batch, weight: int, stored: bool) -> None:  # noqa: FBT001 - the contract of Intake
        """Acknowledge what is stored; or remember that it is, for a client that is gone."""
        self._inflight_batches -= 1
        self._inflight_messages -= len(batch.readings)
        self._inflight_bytes -= weight
        listener = self._listener
        listener.inflight_bytes -= weight
        if listener.beyond_total or listener.stopping:
            listener.judge_total()
        if stored:
            true = self._stored(batch)
            if self._cause is not None or self._transport.is_closing():
                self._leave(batch)
            elif true:
                self._write_answers(batch)
            else:
                self._refuse(_INTAKE_REFUSED, "the first copy of a message that came again could not be stored")
        else:
            self.session.undo(batch)
            self._not_stored(batch)
        self.pause_or_resume()

    def _stored(self, batch: Batch) -> bool:
        """Take note that a batch is stored; tell whether all its answers are true."""
        true = self.session.committed(batch)
        if batch.commands:
            self._listener.send_commands(batch)
        return true

    def _write_answers(self, batch: Batch) -> None:
        if self._cause is not None:
            return
        answers = batch.answers
        if batch.qos0:
            answers = [answer for answer in answers if answer]
        packets = acknowledgements(answers)
        if batch.replies:
            packets += b"".join(batch.replies)
        if packets:
            self._transport.write(packets)

    def _leave(self, batch: Batch) -> None:
        """Leave for the session's next connection what could not be answered on this one."""
        if self._unanswered is None:
            self._unanswered = Unanswered()
        self._unanswered.remember(batch)

    def _not_stored(self, batch: Batch) -> None:
        """Nothing of a batch is stored: a client resends QoS 1 and 2 on its next connection; QoS 0 is gone."""
        listener = self._listener
        if listener.intake.holding:
            listener.refusing_until = self._loop.time() + REFUSAL_HOLD_S
        self._lose_qos0(batch.qos0)
        if len(batch.answers) > batch.qos0 or batch.replies:
            self._refuse(
                _INTAKE_REFUSED,
                "the buffer did not take the readings: they stay with the client, which sends them again",
            )

    def _lose_qos0(self, count: int) -> None:
        if count:
            self._listener.intake.lost(self._device, "refused-qos0", count)
            self._listener.counts["refused-qos0"] += count

    def _hold_no_more(self) -> None:
        self._refuse(
            _HELD_TOO_MUCH,
            "the buffer takes no readings at present, and more wait in memory than mqtt_listener.inflight_bytes_max, "
            "inflight_messages_max or inflight_bytes_total_max: the client keeps the rest, and sends it again",
        )

    def pause_or_resume(self) -> None:
        """Read from the peer, or not: bounds what it has waiting for its commit and what waits for it."""
        if self._cause is not None:
            return
        listener, waited = self._listener, self._waits_for_commit
        settings = listener.settings
        # Beyond the total nobody is read from: each read may bring much. While the buffer holds that would last, so
        # that whoever has nothing waiting is heard, and told when it sends a reading.
        waits = (
            self._inflight_bytes > settings.inflight_bytes_max
            or self._inflight_messages > settings.inflight_messages_max
            or (listener.beyond_total and (self._inflight_bytes > 0 or not listener.intake.holding))
        )
        if waits != waited:
            self._waits_for_commit = waits
            if waits:
                listener.paused.add(self)
            else:
                listener.paused.discard(self)
        if waits and listener.intake.holding:
            # Waiting on would only let it believe that it is heard: connected, it never sends again by itself.
            self._hold_no_more()
            return
        reading = not (waits or self._waits_for_peer or self._opening is not None)
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._heard = self._loop.time()
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # --- time-outs and the end ----------------------------------------------------------------------------

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._patience_s:
            self._timer = self._loop.call_at(self._heard + self._patience_s, self._check_silence)

    def _check_silence(self) -> None:
        """Close a peer silent for too long. One timer a connection, set anew when it fires, not per packet."""
        now = self._loop.time()
        if not self._reading:
            self._heard = now  # its silence is our doing and does not count
        if self._key is not None and now < self._heard + self._patience_s:
            self._arm_timer()
        elif self._key is None:
            self._abort("connect-timeout", "no CONNECT within mqtt_listener.connect_timeout_s")
        else:
            self._abort("keep-alive-timeout", "nothing received in 1.5 times the keep-alive")

    def _write_stalled(self) -> None:
        self._abort("write-stall", f"the peer has read nothing for {WRITE_STALL_S:.0f} s")

    def _refuse(self, reason: str, message: str, answer: bytes = b"") -> None:
        """Count and log why, and close after `answer`."""
        if self._cause is None:
            self._listener.refused(reason, message, self.peer, self._client_id)
            self.end(reason, answer)

    def _abort(self, reason: str, message: str) -> None:
        """Count and log why, and close at once."""
        if self._cause is None:
            self._listener.refused(reason, message, self.peer, self._client_id)
            self._cause = reason
            self._retire()
        self.cut()

    def end(self, cause: str, answer: bytes = b"") -> None:
        """Close, after `answer` where there is one; nothing more is taken from the peer."""
        if self._cause is not None:
            return
        self._cause = cause
        self._retire()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self.cut)
        if answer:
            self._transport.write(answer)
        if answer and self._transport.can_write_eof():
            # Closing while the peer's bytes are unread resets the connection, which may destroy the answer
            # on its way: so our side ends first, and the peer closes, or is cut off.
            self._transport.write_eof()
        else:
            self._transport.close()

    def cut(self) -> None:
        """Close at once, whatever was not sent."""
        self._transport.abort()

    def _retire(self) -> None:
        """Stop being the session's connection, and leave to the next one what it is to know."""
        listener, key = self._listener, self._key
        if key is None or listener.sessions.get(key) is not self:
            return
        listener.leave(key)
        self.session.idle_since_s = listener.now_us() / 1e6
        if not self.session.kept:
            listener.kept.close(self.session)
        if (self._inflight_batches or self._unanswered) and not self._operator and self._client_id:
            if self._unanswered is None:
                self._unanswered = Unanswered()
            listener.unanswered.leave(key, self._unanswered)

    def _ended_without_disconnect(self, cause: str) -> None:
        """Publish the will [MQTT-3.1.2-8]: a device's as an event, an operator's as the command that it is."""
        listener, will = self._listener, self._will
        if not self._operator:
            listener.devices.ended(self._device, cause, self.peer, self._will_reported, self._loop.time())
        elif will is not None:
            device = listener.command_topics.device_of(will.topic)
            assert device is not None  # noqa: S101 - or its CONNECT was refused
            batch = Batch()
            try:
                recipients = listener.recipients(device, will.topic, will.payload, will.qos)
            except TooManyCommandsError:
                listener.counts["command-not-delivered"] += 1
                return
            listener.command(recipients, will.topic, will.payload, batch)
            self._take(batch, 0)
