"""The MQTT listener: sensors connect here; a PUBACK goes out after the commit that holds its reading.

What the packets mean is `mqtt_protocol`'s; here are the connections, their time-outs and their bounds.
"""

import asyncio
import contextlib
import errno
import hashlib
import hmac
import resource
import socket
from collections import Counter
from collections.abc import Callable
from typing import Final

import structlog

from gateway.mqtt_protocol import (
    PINGRESP,
    Connect,
    ConnectReturnCode,
    Disconnect,
    Event,
    PingRequest,
    Publish,
    ServerProtocol,
    Subscribe,
    Unsubscribe,
    Violation,
    Will,
    connack,
    pubacks,
    suback_refused,
    unsuback,
)
from gateway.reading import Intake, Reading
from gateway.settings import ListenerSettings

READING_BYTES: Final = 200
"""What a reading weighs in memory beside the bytes that it came in."""
REFUSAL_HOLD_S: Final = 1.0
"""How long CONNACK 3 answers after the intake refused; then a client is let in, and shows if it still does."""
SPARE_CONNECTIONS: Final = 64
"""Beyond `connections_max`: so many more are let in far enough to be told CONNACK 3."""
LINGER_S: Final = 1.0
"""How long a refused client gets to read the answer and close its side."""
WRITE_STALL_S: Final = 60.0
"""How long a peer may leave what is written to it unread, whatever its keep-alive."""
PROBE_AFTER_S: Final = 120
"""Silence after which TCP asks whether the peer is still there."""
DIED_INTERVAL_S: Final = 60.0
"""A device whose connection flaps is reported as died no oftener."""
REFUSALS_LOG_INTERVAL_S: Final = 60.0

_SHUTDOWN = "shutdown"
_TAKEN_OVER = "taken-over"
_INTAKE_REFUSED = "intake-refused"
_OUR_DOING: Final = frozenset({_SHUTDOWN, _TAKEN_OVER, _INTAKE_REFUSED})
"""Ends that say nothing of the device, which is alive."""

_log = structlog.get_logger("sluice.mqtt_listener")


class ListenError(OSError):
    """The listener could not bind; the message names the setting to change."""


class MqttListener:
    """Takes MQTT 3.1.1 connections and hands what they publish to the intake.

    `now_us` is CLOCK_BOOTTIME in microseconds. `counts` counts by reason whatever was refused or ended.
    """

    def __init__(self, settings: ListenerSettings, intake: Intake, now_us: Callable[[], int]) -> None:
        self.settings = settings
        self.intake = intake
        self.now_us = now_us
        self.counts: Counter[str] = Counter()
        self.listening = asyncio.Event()
        self.port: int = settings.port
        self.connections: set[_Connection] = set()
        self.sessions: dict[tuple[str | None, str], _Connection] = {}
        """Accepted connections by writer and client identifier: nobody takes over another user's session."""
        self.inflight_bytes = 0
        self.refusing_until = 0.0
        """Time of the event loop's clock until which the intake is held to refuse."""
        self._generated_ids = 0
        self._reported: dict[str, float] = {}
        """Devices that were reported as appeared, and when as died last; bounded."""
        self._unlogged: Counter[str] = Counter()
        self._log_timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Serve until cancelled, then close all connections. Raises `ListenError` if it cannot bind."""
        loop = asyncio.get_running_loop()
        host, port = self.settings.host, self.settings.port
        self._allow_open_files()
        try:
            server = await loop.create_server(lambda: _Connection(self, loop), host, port, backlog=1024)
        except OSError as error:
            raise ListenError(_bind_message(host, port, error)) from error
        try:
            _log.info("listening for MQTT", host=host, port=self.port)
            self.listening.set()
            await loop.create_future()
        finally:
            self.listening.clear()
            server.close()
            if self._log_timer is not None:
                self._log_timer.cancel()
            for connection in tuple(self.connections):
                connection.end(_SHUTDOWN)
            # One turn for the transports to flush and close; whoever does not read is cut off.
            await asyncio.sleep(0)
            for connection in tuple(self.connections):
                connection.cut()
            await asyncio.sleep(0)

    def authorize(self, connect: Connect) -> tuple[ConnectReturnCode, str | None]:
        """Judge a CONNECT's credentials; give the return code and the one device that it may write as."""
        if self.settings.anonymous:
            return ConnectReturnCode.ACCEPTED, None
        if connect.user_name is None or connect.password is None:
            return ConnectReturnCode.NOT_AUTHORIZED, None
        digest = hashlib.sha256(connect.password).hexdigest()
        # An unknown user costs the same comparison as a known one, so that time tells nobody who exists.
        expected = self.settings.users.get(connect.user_name, "-" * len(digest))
        if hmac.compare_digest(digest.encode(), expected.lower().encode()):
            return ConnectReturnCode.ACCEPTED, connect.user_name
        return ConnectReturnCode.BAD_USER_NAME_OR_PASSWORD, None

    def generated_client_id(self) -> str:
        """Make an identifier for a client that sent none [MQTT-3.1.3-6].

        U+0000 keeps it apart from all that clients may call themselves.
        """
        self._generated_ids += 1
        return f"\0{self._generated_ids}"

    def appeared(self, device: str, peer: str) -> None:
        """Report a device's first connection since the start; a reconnect storm says nothing new."""
        if device in self._reported:
            return
        if len(self._reported) >= 2 * self.settings.connections_max:
            self.counts["device-not-reported"] += 1
            return
        self._reported[device] = float("-inf")
        self.intake.event("device-appeared", device, source="mqtt", peer=peer)

    def died(self, device: str, cause: str, will: Will | None, now: float) -> None:
        """Report a device that ended without DISCONNECT, with its will [MQTT-3.1.2-8]."""
        last = self._reported.get(device)
        if last is None or now - last < DIED_INTERVAL_S:
            self.counts["death-not-reported"] += 1
            return
        self._reported[device] = now
        details: dict[str, object] = {"source": "mqtt", "cause": cause}
        if will is not None:
            details["will_topic"] = will.topic
            details["will_payload"] = will.payload[:1024].decode("utf-8", "replace")
        self.intake.event("device-died", device, **details)

    def refused(self, reason: str, message: str, peer: str, client_id: str | None) -> None:
        """Count a refusal; log it, or sum it up where the last line is less than a minute old."""
        self.counts[reason] += 1
        if self._log_timer is not None:
            self._unlogged[reason] += 1
            return
        _log.warning("MQTT connection refused", reason=reason, why=message, peer=peer, client_id=client_id)
        self._rearm_log()

    def _rearm_log(self) -> None:
        loop = asyncio.get_running_loop()
        self._log_timer = loop.call_later(REFUSALS_LOG_INTERVAL_S, self._log_unlogged)

    def _log_unlogged(self) -> None:
        self._log_timer = None
        if self._unlogged:
            _log.warning("MQTT connections refused in the last minute", reasons=dict(self._unlogged))
            self._unlogged.clear()
            self._rearm_log()

    def _allow_open_files(self) -> None:
        """Raise the soft limit of open files, mostly 1024, to what `connections_max` needs."""
        needed = self.settings.connections_max + SPARE_CONNECTIONS + 128
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= needed:
            return
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            _log.warning(
                "fewer open files are allowed than mqtt_listener.connections_max needs: connections beyond "
                "that wait; raise the limit (LimitNOFILE= in the unit) or lower the setting",
                allowed=allowed,
                needed=needed,
            )


class _Connection(asyncio.Protocol):
    """One sensor's connection."""

    __slots__ = (
        "_cause",
        "_clean",
        "_client_id",
        "_device",
        "_heard",
        "_inflight_bytes",
        "_key",
        "_listener",
        "_loop",
        "_patience_s",
        "_protocol",
        "_timer",
        "_transport",
        "_waits_for_commit",
        "_waits_for_peer",
        "_will",
        "_write_timer",
        "_writer",
        "peer",
    )

    def __init__(self, listener: MqttListener, loop: asyncio.AbstractEventLoop) -> None:
        self._listener = listener
        self._loop = loop
        self._protocol = ServerProtocol(listener.settings.packet_bytes_max)
        self._transport: asyncio.Transport
        self.peer = ""
        self._key: tuple[str | None, str] | None = None
        """The session's key once CONNECT was accepted."""
        self._client_id: str | None = None
        self._device: str | None = None
        self._writer: str | None = None
        self._will: Will | None = None
        self._clean = False
        self._cause: str | None = None
        """Why this side ends it; set once, and then nothing is taken or written any more."""
        self._patience_s = listener.settings.connect_timeout_s
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._inflight_bytes = 0
        self._waits_for_commit = False
        self._waits_for_peer = False

    # --- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_server makes
        self._transport = transport
        listener = self._listener
        if len(listener.connections) >= listener.settings.connections_max + SPARE_CONNECTIONS:
            self._cause = "too-many-connections"
            listener.refused(self._cause, "no room even to answer; see connections_max", "", None)
            transport.abort()
            return
        listener.connections.add(self)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if peer else ""
        # Finds out about peers that vanished and asked for no keep-alive.
        with contextlib.suppress(OSError):
            peer_socket = transport.get_extra_info("socket")
            peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(self._patience_s, self._check_silence)

    def data_received(self, data: bytes) -> None:
        """Take all that one read brought: one `Intake.take`, one write of all the answers that need no disk."""
        if self._cause is not None:
            return
        received_us = self._listener.now_us()
        self._heard = self._loop.time()
        readings: list[Reading] = []
        packet_ids: list[int] = []
        answers: list[bytes] = []
        writer = self._writer
        for event in self._protocol.receive(data):
            if type(event) is Publish:
                topic = event.topic
                readings.append(Reading(topic, topic, event.payload, received_us, writer=writer))
                if event.qos:
                    packet_ids.append(event.packet_id)
            else:
                if not self._control(event, answers):
                    break
                writer = self._writer
        if readings:
            self._take(readings, packet_ids, len(data))
        if answers and self._cause is None:
            self._transport.write(b"".join(answers))

    def pause_writing(self) -> None:
        self._waits_for_peer = True
        self._write_timer = self._loop.call_later(WRITE_STALL_S, self._write_stalled)
        self._pause_or_resume()

    def resume_writing(self) -> None:
        self._waits_for_peer = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._pause_or_resume()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # a reset and an end without DISCONNECT mean the same
        listener = self._listener
        listener.connections.discard(self)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        if self._key is None:
            return
        if listener.sessions.get(self._key) is self:
            del listener.sessions[self._key]
        if self._clean:
            listener.counts["disconnected"] += 1
            return
        if self._cause is None:
            self._cause = "connection-lost"
            listener.counts[self._cause] += 1
        if self._device is not None and self._cause not in _OUR_DOING:
            listener.died(self._device, self._cause, self._will, self._loop.time())

    # --- packets ------------------------------------------------------------------------------------------

    def _control(self, event: Event, answers: list[bytes]) -> bool:
        """Handle a packet that is not a PUBLISH; tell whether the connection goes on."""
        match event:
            case PingRequest():
                answers.append(PINGRESP)
            case Connect():
                self._connect(event)
            case Subscribe():
                answers.append(suback_refused(event))
                self._listener.refused(
                    "subscribe-refused",
                    "this is a gateway's front door, not a broker: nothing can be subscribed to",
                    self.peer,
                    self._client_id,
                )
            case Unsubscribe():
                answers.append(unsuback(event.packet_id))
            case Disconnect():
                self._clean = True  # and so the will is discarded [MQTT-3.14.4-3]
                self.end("disconnected")
            case Violation():
                self._listener.refused(event.reason, event.message, self.peer, self._client_id)
                self.end(event.reason, event.answer)
        return self._cause is None

    def _connect(self, connect: Connect) -> None:
        listener = self._listener
        self._client_id = connect.client_id
        code, writer = listener.authorize(connect)
        if code is not ConnectReturnCode.ACCEPTED:
            reason, why = {
                ConnectReturnCode.NOT_AUTHORIZED: ("no-credentials", "CONNECT without user name and password"),
                ConnectReturnCode.BAD_USER_NAME_OR_PASSWORD: (
                    "bad-credentials",
                    f"wrong password or unknown user {connect.user_name!r}; see mqtt_listener.users",
                ),
            }[code]
            self._refuse_connect(reason, why, code)
            return
        key = (writer, connect.client_id or listener.generated_client_id())
        if self._heard < listener.refusing_until:
            self._refuse_connect(
                "connect-while-refusing",
                "the buffer takes no readings at present",
                ConnectReturnCode.SERVER_UNAVAILABLE,
            )
            return
        older = listener.sessions.get(key)
        if older is None and len(listener.sessions) >= listener.settings.connections_max:
            self._refuse_connect(
                "too-many-connections",
                f"mqtt_listener.connections_max = {listener.settings.connections_max} are connected",
                ConnectReturnCode.SERVER_UNAVAILABLE,
            )
            return
        if older is not None:
            listener.refused(
                _TAKEN_OVER,
                "the same client identifier connected again",
                older.peer,
                key[1],
            )
            older.end(_TAKEN_OVER)  # [MQTT-3.1.4-2]
        listener.sessions[key] = self
        listener.counts["connected"] += 1
        self._key = key
        self._writer = writer
        self._device = writer or connect.client_id or None
        self._will = connect.will
        self._patience_s = 1.5 * connect.keep_alive_s  # [MQTT-3.1.2-24]; 0 means no keep-alive
        self._arm_timer()
        # Written before anything else can be: the first packet from a server is CONNACK [MQTT-3.2.0-1].
        self._transport.write(connack(ConnectReturnCode.ACCEPTED))
        if self._device is not None:
            listener.appeared(self._device, self.peer)

    def _refuse_connect(self, reason: str, message: str, code: ConnectReturnCode) -> None:
        self._listener.refused(reason, message, self.peer, self._client_id)
        self.end(reason, connack(code))

    # --- readings and their acknowledgement ---------------------------------------------------------------

    def _take(self, readings: list[Reading], packet_ids: list[int], wire_bytes: int) -> None:
        weight = wire_bytes + READING_BYTES * len(readings)
        qos0 = len(readings) - len(packet_ids)
        self._inflight_bytes += weight
        self._listener.inflight_bytes += weight
        self._pause_or_resume()

        def done(stored: bool) -> None:  # noqa: FBT001 - the contract of Intake
            self._inflight_bytes -= weight
            self._listener.inflight_bytes -= weight
            if stored:
                if packet_ids and self._cause is None:
                    self._transport.write(pubacks(packet_ids))
            else:
                self._not_stored(len(packet_ids), qos0)
            self._pause_or_resume()

        try:
            self._listener.intake.take(readings, done)
        except Exception:  # noqa: BLE001 - whatever it is, it is not the sensor's fault
            # What waits for a commit must not be counted for ever.
            _log.exception("readings could not be taken in", peer=self.peer)
            done(False)

    def _not_stored(self, qos1: int, qos0: int) -> None:
        """Nothing of a batch is stored: a client resends QoS 1 on its next connection; QoS 0 is gone."""
        listener = self._listener
        listener.refusing_until = self._loop.time() + REFUSAL_HOLD_S
        if qos0:
            listener.intake.lost(self._device, "refused-qos0", qos0)
            listener.counts["refused-qos0"] += qos0
        if qos1 and self._cause is None:
            listener.refused(
                _INTAKE_REFUSED,
                "the buffer did not take the readings: they stay with the sensor, which sends them again",
                self.peer,
                self._client_id,
            )
            self.end(_INTAKE_REFUSED)

    def _pause_or_resume(self) -> None:
        """Read from the peer, or not: bounds what it has waiting for its commit and what waits for it."""
        if self._cause is not None:
            return
        waited_for_commit = self._waits_for_commit
        settings = self._listener.settings
        # Beyond the total, each connection is read from again when nothing of its own waits.
        self._waits_for_commit = self._inflight_bytes > settings.inflight_bytes_max or (
            self._inflight_bytes > 0 and self._listener.inflight_bytes > settings.inflight_bytes_total_max
        )
        if waited_for_commit and not self._waits_for_commit:
            self._heard = self._loop.time()  # its silence was our doing and does not count
        if self._waits_for_commit or self._waits_for_peer:
            if self._transport.is_reading():
                self._transport.pause_reading()
        elif not self._transport.is_reading():
            self._transport.resume_reading()

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
        if self._waits_for_commit:
            self._heard = now
        if self._key is not None and now < self._heard + self._patience_s:
            self._arm_timer()
            return
        if self._key is None:
            reason, message = "connect-timeout", "no CONNECT within mqtt_listener.connect_timeout_s"
        else:
            reason, message = "keep-alive-timeout", "nothing received in 1.5 times the keep-alive"
        self._listener.refused(reason, message, self.peer, self._client_id)
        self._cause = reason
        self.cut()

    def _write_stalled(self) -> None:
        self._listener.refused(
            "write-stall", f"the peer has read nothing for {WRITE_STALL_S:.0f} s", self.peer, self._client_id
        )
        self._cause = "write-stall"
        self.cut()

    def end(self, cause: str, answer: bytes = b"") -> None:
        """Close, after `answer` where there is one; nothing more is taken from the peer."""
        if self._cause is not None:
            return
        self._cause = cause
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self.cut)
        if answer and self._transport.can_write_eof():
            # Closing while the peer's bytes are unread resets the connection, which may destroy the answer
            # on its way: so our side ends first, and the peer closes, or is cut off.
            self._transport.write(answer)
            self._transport.write_eof()
        else:
            self._transport.close()

    def cut(self) -> None:
        """Close at once, whatever was not sent."""
        self._transport.abort()


def _bind_message(host: str, port: int, error: OSError) -> str:
    where = f"cannot listen for MQTT on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: the port is taken; stop what has it, or set another mqtt_listener.port"
    if error.errno == errno.EACCES:
        return f"{where}: ports below 1024 need a privilege; set mqtt_listener.port to 1024 or above"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{where}: this machine has no such address; set mqtt_listener.host (0.0.0.0 means all)"
    return f"{where}: {error.strerror or error}; see mqtt_listener.host and mqtt_listener.port"
