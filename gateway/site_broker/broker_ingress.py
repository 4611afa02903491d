"""The broker ingress: reads from an MQTT broker that the site has already; a PUBACK goes out after the commit.

The promise begins when that broker delivers to us. What is delivered again is told by `site_broker.deliveries`; the
connection is `site_broker.client`'s; here are what is taken, what is acknowledged when, and what a person is told.

While the buffer can store nothing, nothing is read from the socket, so that TCP slows the broker down. PINGREQs are
sent all the while, and a broker that is not read from is not held to be dead: the connection lasts as long as the
broker bears to write into a full socket, and a broken one is made anew when there is room again.

A message with RETAIN is what its topic said last, some time before it was subscribed to: no reading of now, and nobody
knows of when. It is acknowledged, counted and not stored; each connection subscribes anew and so brings it again. A
live one comes without that flag (section 3.3.1.3).
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import structlog

from gateway.host.safe_files import PasswordFileError, read_password
from gateway.mqtt.packet_reader import (
    CONNACK,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
    MalformedPacketError,
    Packet,
    connack,
    message,
    packet_id,
    suback,
)
from gateway.reading import READING_BYTES, Intake, Mark, Reading
from gateway.settings import BrokerSettings, BrokerTlsSettings
from gateway.site_broker.client import CLOSED, BrokerClient, connect
from gateway.site_broker.deliveries import Deliveries, Judgement, digest, session_prefix
from gateway.tls.client import ClientTlsError, client_context, tls_reason
from gateway.tls.dates import CertificateDateError, Dates, by_system_clock, judge_dates

HOLD_POLL_S: Final = 0.1
"""How often a connection that is not read from looks whether it may be."""
TICK_S: Final = 1.0
STEADY_S: Final = 30.0
"""A connection that lasted so long was no failure: the next attempt comes soon."""
SUBSCRIBE_AGAIN_S: Final = 600.0
"""How long a refused subscription is left alone."""
SAY_AGAIN_S: Final = 300.0
"""How long the same trouble is not logged again, nor a lost connection reported."""
STOP_S: Final = 2.0
"""How long the end waits for the commits of what was taken, to acknowledge it."""

_ANSWER_QOS_1: Final = bytes((PUBACK, 2))
_ANSWER_QOS_2: Final = bytes((PUBREC, 2))
_ANSWER_PUBREL: Final = bytes((PUBCOMP, 2))
_STRAY: Final = (PUBACK, PUBREC, PUBCOMP)
"""They answer what another client published in this session, before it was this gateway's: of no concern here."""
_REFUSED: Final = 0x80
_CREDENTIALS: Final = (
    "user or password is wrong or missing, or this gateway may not connect; mend user and password_file, "
    "or the broker's list"
)
REFUSALS: Final = {
    1: "it does not speak MQTT 3.1.1",
    2: "it does not take this client identifier; set client_id to one that it takes",
    3: "it says that it is not available",
    4: _CREDENTIALS,
    5: _CREDENTIALS,
}
"""CONNACK's return codes (section 3.2.2.3), in words."""

_log = structlog.get_logger("sluice.mqtt_broker")


class BrokerError(Exception):
    """There is no connection to the broker; the message says why and what to do."""


@dataclass(slots=True)
class _Taken:
    """What one read brought, to be stored together."""

    received_bytes: int
    readings: list[Reading] = field(default_factory=list)
    answers: bytearray = field(default_factory=bytearray)
    unanswered: int = 0
    """Readings of QoS 0: nobody sends them again."""


class BrokerIngress:
    """Reads from one broker, for as long as it runs. One broker's troubles cost nobody else anything.

    `now_us` is CLOCK_BOOTTIME in microseconds, `random` gives numbers from 0 to 1, `dates` is what the broker's
    certificate is judged by. `counts` counts since the start:
    `readings`, `recognised` (delivered again and not stored again), `doubtful` (stored with `redelivered`), `retained`,
    `too-large`, `connections`. `subscribed` and `refused` say how it stands now.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a broker's connection goes by
        self,
        settings: BrokerSettings,
        gateway_id: str,
        intake: Intake,
        now_us: Callable[[], int],
        random: Callable[[], float],
        dates: Dates = by_system_clock,
    ) -> None:
        self.settings = settings
        self.client_id = settings.client_id or f"sluice-{gateway_id}"
        self.name = f"{settings.host}:{settings.port}"
        self.counts: Counter[str] = Counter()
        self.subscribed = asyncio.Event()
        """Set while there is a connection, and the broker has answered all that was asked of it."""
        self.refused: set[str] = set()
        """Topic filters that the broker does not let this gateway read."""
        self._intake = intake
        self._now_us = now_us
        self._random = random
        self._dates = dates
        self._by_system_clock = True
        """Whether OpenSSL has judged the dates of the certificate that this connection's broker showed."""
        self._prefix = session_prefix(settings, gateway_id)
        self._deliveries = Deliveries(self._prefix, {})
        self._topics: set[str] = set()
        """What the session at the broker may be subscribed to; kept, to know what to unsubscribe from."""
        self._loaded = False
        self._asked: dict[int, tuple[str, ...]] = {}
        """Filters by the packet identifier of their SUBSCRIBE or UNSUBSCRIBE, until they are answered."""
        self._codes: dict[str, int] = {}
        """SUBACK's return code for each filter, as it was last said."""
        self._ask_again_s = 0.0
        self._client: BrokerClient | None = None
        self._stopping = False
        self._inflight_bytes = 0
        self._undecided = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._answers = bytearray()
        """Acknowledgements of what is stored, until the end of this turn of the loop."""
        self._answered: list[int] = []
        self._pinged_s = 0.0
        self._said: tuple[str, float] = ("", float("-inf"))
        self._lost_reported_s = float("-inf")
        self._report_connection = True
        """Whether nobody was told of a connection since the last one that was reported as lost."""
        self._resolver = ThreadPoolExecutor(1, "mqtt-broker-name")
        """Looks the broker's name up: one thread, however long the network lets it wait."""

    def state(self) -> dict[str, object]:
        """What `sluice status` tells of it."""
        return {"connected": self.subscribed.is_set(), "refused": sorted(self.refused), **self.counts}

    async def run(self) -> None:
        """Connect, and connect again, until cancelled; then acknowledge what is stored, and DISCONNECT."""
        loop = asyncio.get_running_loop()
        failures = 0
        try:
            while True:
                begun_s = loop.time()
                try:
                    await self._serve()
                except BrokerError as error:
                    self._say(str(error), loop.time())
                except Exception:  # noqa: BLE001 - whatever it is, the rest of the gateway goes on
                    _log.exception("reading from the broker failed; it is tried again", broker=self.name)
                failures = 0 if loop.time() - begun_s >= STEADY_S else failures + 1
                await asyncio.sleep(self._random() * self._pause_s_max(failures))
        finally:
            self._resolver.shutdown(wait=False, cancel_futures=True)

    def _pause_s_max(self, failures: int) -> float:
        return min(self.settings.backoff_s_max, self.settings.backoff_s_min * 2.0 ** min(max(failures - 1, 0), 32))

    # --- one connection -----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Connect once, and take what comes until the connection ends. Raises BrokerError, which says why it did."""
        if not self._loaded:
            await self._load()
        # What the last connection brought must be decided before CONNECT, for then it is known what is stored.
        await self._settled.wait()
        while self._intake.holding:  # noqa: ASYNC110 - the intake tells nobody when it ends
            await asyncio.sleep(HOLD_POLL_S)
        password = password_of(self.settings)
        link = await self._connect()
        try:
            self._topics.update(self.settings.topics)
            await self._commit([*self._deliveries.forget_marks(), self._topics_mark()])
            client = BrokerClient(link, self.client_id, self.settings.packet_bytes_max, self._packets_came)
        except BaseException:
            link.close()
            raise
        if self.settings.user is not None:
            client.username_pw_set(self.settings.user, password)
        await self._converse(client)

    async def _load(self) -> None:
        """Read what a process before this one kept."""
        kept = await self._intake.marks(self._prefix)
        self._deliveries = Deliveries(self._prefix, kept)
        with contextlib.suppress(msgspec.DecodeError):
            self._topics = set(msgspec.json.decode(kept.get(f"{self._prefix}topics", b"[]"), type=list[str]))
        self._loaded = True

    async def _connect(self) -> socket.socket:
        dates = self._dates if self.settings.tls is not None and self._dates() is not None else None
        self._by_system_clock = dates is None
        return await open_link(self.settings, dates, self._resolver)

    async def _converse(self, client: BrokerClient) -> None:
        """Send CONNECT, and see to the connection until it ends."""
        loop = asyncio.get_running_loop()
        self._client = client
        self._asked.clear()
        self._answers.clear()
        self._answered.clear()
        self._pinged_s = loop.time()
        self._deliveries.connecting()
        try:
            client.open(self.settings.host, self.settings.port, self.settings.keep_alive_s)
            await self._wait_for_connack(client)
            while not client.ended.done():
                await asyncio.wait({client.ended}, timeout=TICK_S if client.is_reading else HOLD_POLL_S)
                self._tick(client, loop.time())
            raise BrokerError(f"the connection ended: {client.ended.result()}")
        except asyncio.CancelledError:
            await self._part(client)
            raise
        finally:
            self.subscribed.clear()
            client.end(CLOSED)
            self._client = None

    async def _wait_for_connack(self, client: BrokerClient) -> None:
        """Raises BrokerError where the broker refuses the connection, or says nothing."""
        outcomes: set[asyncio.Future[Any]] = {client.connack, client.ended}
        await asyncio.wait(outcomes, timeout=self.settings.connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not client.connack.done():
            raise BrokerError(
                "did not accept the connection: it sent no CONNACK; check that port is the broker's port "
                "for MQTT, without TLS where there is no [mqtt_brokers.tls]"
            )
        code = client.connack.result()
        if code:
            raise BrokerError(f"refuses the connection: {REFUSALS.get(code, f'return code {code}')}")

    def _connack_came(self, client: BrokerClient, packet: Packet) -> None:
        """The first packet [MQTT-3.2.0-1]; what is delivered again may stand behind it in the same read."""
        if packet.first & 0xF0 != CONNACK:
            raise MalformedPacketError("it does not begin with CONNACK")
        code, session_present = connack(packet)
        client.connack.set_result(code)
        if not code:
            self._accepted(client, session_present=session_present)
            return
        # It sent nothing, and nothing was given to it: the next connection must know what this one would have.
        client.end(CLOSED)
        known = self._deliveries.connection_refused()
        if known:
            self._intake.take((), lambda _stored: None, known)

    def _accepted(self, client: BrokerClient, *, session_present: bool) -> None:
        self.counts["connections"] += 1
        self._deliveries.connected(session_present=session_present)
        if not session_present:
            self._take(client, _Taken(0))
        _log.info("connected to the broker", broker=self.name, client_id=self.client_id, session=session_present)
        if self._report_connection:
            self._report_connection = False
            self._intake.event("broker-connected", None, broker=self.name, session_present=session_present)
        self._subscribe(client, self.settings.topics)
        self._unsubscribe(client)

    async def _part(self, client: BrokerClient) -> None:
        """Acknowledge what gets stored in the next moments, and say goodbye; the broker keeps the session."""
        self._stopping = True
        client.pause_reading()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._settled.wait()
        self._acknowledge()
        client.disconnect()
        client.loop_write()

    def _tick(self, client: BrokerClient, now_s: float) -> None:
        self._resume()
        keep_alive_s = self.settings.keep_alive_s
        # Half of it, for a PINGREQ must be there before the broker has heard nothing for one and a half.
        if now_s - max(self._pinged_s, min(client.wrote_s, client.heard_s)) >= keep_alive_s / 2:
            self._pinged_s = now_s
            self._deliveries.pinged()
            client.send(b"", ping=True)
        if client.is_reading and now_s - client.heard_s >= keep_alive_s * 1.5:
            client.end(f"it said nothing for {keep_alive_s * 1.5:g} s, not even to PINGREQ")
        if not self._by_system_clock and self._dates() is None:
            client.end("this box's clock is known now, and the date of the broker's certificate is looked at by it")
        if self.refused and now_s >= self._ask_again_s:
            self._subscribe(client, sorted(self.refused))

    # --- what the broker delivers -------------------------------------------------------------------------

    def _packets_came(self, packets: list[Packet]) -> None:
        """Take all that one read brought: one `Intake.take`, and one answer once it is stored."""
        client = self._client
        if client is None:
            return
        if packets and not client.connack.done():
            self._connack_came(client, packets.pop(0))
        if client.ended.done():
            return
        taken = _Taken(sum([len(packet.body) for packet in packets]))
        received_us = self._now_us()
        try:
            for packet in packets:
                if packet.first & 0xF0 == PUBLISH:
                    self._publish(packet, received_us, taken)
                else:
                    self._control(packet, taken)
        except MalformedPacketError:
            self._take(client, taken)  # what came before it is whole
            raise
        if taken.readings or taken.answers:
            self._take(client, taken)

    def _control(self, packet: Packet, taken: _Taken) -> None:
        """Heed a packet that carries no reading. Raises MalformedPacketError."""
        kind = packet.first & 0xF0
        if kind == PUBREL:
            self._deliveries.release(packet_id(packet))
            taken.answers += _ANSWER_PUBREL + packet.body[:2]
        elif kind == PINGRESP:
            self._deliveries.ponged()
        elif kind == SUBACK:
            self._granted(*suback(packet))
        elif kind == UNSUBACK:
            self._ungranted(packet_id(packet))
        elif kind not in _STRAY:
            raise MalformedPacketError(f"a packet of type {kind >> 4} where it may not stand")

    def _publish(self, packet: Packet, received_us: int, taken: _Taken) -> None:
        """Judge a PUBLISH; note its answer, and its reading where there is one to store."""
        first = packet.first
        qos = first >> 1 & 0b11
        topic_bytes, identifier, payload = message(packet)
        redelivered = False
        if qos:
            judge = self._deliveries.receive if qos == 1 else self._deliveries.receive_exactly_once
            judgement = judge(identifier, digest(packet.body), duplicate=bool(first & 8))
            taken.answers += (_ANSWER_QOS_1 if qos == 1 else _ANSWER_QOS_2) + identifier.to_bytes(2, "big")
            if judgement is Judgement.STORED:
                self.counts["recognised"] += 1
                return
            redelivered = judgement is Judgement.DOUBTFUL
        if first & 1:
            self.counts["retained"] += 1
            return
        if packet.missing:
            self.counts["too-large"] += 1
            self._intake.lost(None, "packet-too-large")
            return
        if not qos:
            if self._intake.holding:
                self._intake.lost(None, "refused-qos0")
                return
            taken.unanswered += 1
        self.counts["doubtful"] += redelivered
        # A topic that is no UTF-8 matches no route, and so goes to the quarantine.
        topic = topic_bytes.decode(errors="replace")
        taken.readings.append(Reading(topic, topic, payload, received_us, redelivered=redelivered))

    def _take(self, client: BrokerClient, taken: _Taken) -> None:
        """Have readings stored, and answer the broker when they are."""
        deliveries = self._deliveries
        number, marks = deliveries.batch()
        size = taken.received_bytes + READING_BYTES * len(taken.readings)
        answers, unanswered = taken.answers, taken.unanswered
        self.counts["readings"] += len(taken.readings)
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
                self._answer(client, number, answers)
                return
            deliveries.refused(number)
            if unanswered:
                self._intake.lost(None, "refused-qos0", unanswered)
            # A connected broker sends nothing again: only a new connection brings it back.
            client.end("the buffer refused readings, which the broker will send again")

        try:
            self._intake.take(taken.readings, done, marks)
        except Exception:  # noqa: BLE001 - what waits for a commit must not wait for ever
            _log.exception("readings could not be taken in, which is a fault of this gateway: report it")
            done(False)
        if self._inflight_bytes > self.settings.inflight_bytes_max or self._intake.holding:
            client.pause_reading()

    def _answer(self, client: BrokerClient, number: int, answers: bytearray) -> None:
        """Acknowledge a batch at the end of this turn, together with all others of the same commit."""
        if client is not self._client or client.ended.done():
            return
        if not self._answered:
            asyncio.get_running_loop().call_soon(self._acknowledge)
        self._answers += answers
        self._answered.append(number)

    def _acknowledge(self) -> None:
        client = self._client
        if client is None or not self._answered:
            return
        for number in self._answered:
            self._deliveries.acknowledged(number)
        ping = self._deliveries.wants_ping
        if ping:
            self._deliveries.pinged()
            self._pinged_s = asyncio.get_running_loop().time()
        answers = bytes(self._answers)
        self._answered.clear()
        self._answers.clear()
        if answers:
            client.send(answers, ping=ping)
        self._resume()

    def _resume(self) -> None:
        client = self._client
        if client is None or client.is_reading or self._stopping:
            return
        if self._inflight_bytes <= self.settings.inflight_bytes_max // 2 and not self._intake.holding:
            client.resume_reading()

    async def _commit(self, marks: Sequence[Mark]) -> None:
        """Have marks on disk. Raises BrokerError where they cannot be."""
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._intake.take((), lambda outcome: None if stored.done() else stored.set_result(outcome), marks)
        if not await stored:
            raise BrokerError("nothing can be stored at present, so that nothing is asked for; see the buffer")

    # --- what the broker is asked for ---------------------------------------------------------------------

    def _subscribe(self, client: BrokerClient, names: Sequence[str]) -> None:
        """Subscribe; at each connection to all that the settings name, for a session that is there proves nothing.

        A process that was killed between CONNECT and SUBSCRIBE leaves a session without subscriptions, and a broker may
        come back with an old one. It costs the retained messages, which come again with each SUBSCRIBE.
        """
        wanted: list[tuple[str, int]] = [(name, self.settings.qos) for name in names]
        _, identifier = client.subscribe(wanted)
        self._asked[identifier or 0] = tuple(names)
        self._ask_again_s = asyncio.get_running_loop().time() + SUBSCRIBE_AGAIN_S

    def _unsubscribe(self, client: BrokerClient) -> None:
        """Unsubscribe from what the settings no longer name."""
        surplus = sorted(self._topics.difference(self.settings.topics))
        if surplus:
            _, identifier = client.unsubscribe(surplus)
            self._asked[identifier or 0] = tuple(surplus)

    def _granted(self, identifier: int, codes: bytes) -> None:
        """SUBACK came (section 3.9). Raises MalformedPacketError."""
        names = self._asked.get(identifier, ())
        if len(names) != len(codes):
            raise MalformedPacketError("a SUBACK that answers another number of filters than were asked for")
        for name, code in zip(names, codes, strict=True):
            if code >= _REFUSED:
                self.refused.add(name)
            else:
                self.refused.discard(name)
            if self._codes.get(name) != code:
                self._codes[name] = code
                self._say_granted(name, code)
        self._was_answered(identifier)

    def _ungranted(self, identifier: int) -> None:
        """UNSUBACK came (section 3.11)."""
        self._topics.difference_update(self._asked.get(identifier, ()))
        self._intake.take((), lambda _stored: None, (self._topics_mark(),))
        self._was_answered(identifier)

    def _was_answered(self, identifier: int) -> None:
        self._asked.pop(identifier, None)
        if not self._asked:
            self.subscribed.set()

    def _topics_mark(self) -> Mark:
        return Mark(f"{self._prefix}topics", msgspec.json.encode(sorted(self._topics)))

    # --- what a person is told ----------------------------------------------------------------------------

    def _say_granted(self, name: str, code: int) -> None:
        """Log that a subscription is less than was asked for; said once, until it changes."""
        if code >= _REFUSED:
            _log.error(
                "the broker refuses a subscription, so that nothing of it is read: allow this user to read it in "
                "the broker's access list, or change mqtt_brokers.topics",
                broker=self.name,
                topic=name,
                asked_again_in_s=SUBSCRIBE_AGAIN_S,
            )
        elif not code:
            _log.warning(
                "the broker grants QoS 0 only: what it sends while this gateway is away, or is killed, is lost; "
                "allow QoS 1 in the broker's settings",
                broker=self.name,
                topic=name,
            )
        elif code < self.settings.qos:
            _log.warning("the broker grants QoS 1 where QoS 2 was asked for", broker=self.name, topic=name)

    def _say(self, words: str, now_s: float) -> None:
        """Log why there is no connection; the same words again only after a while."""
        said, at_s = self._said
        if words != said or now_s - at_s >= SAY_AGAIN_S:
            self._said = words, now_s
            _log.warning(f"no connection to the broker: {words}", broker=self.name, client_id=self.client_id)
        if now_s - self._lost_reported_s >= SAY_AGAIN_S:
            self._lost_reported_s = now_s
            self._report_connection = True
            self._intake.event("broker-lost", None, broker=self.name, cause=words)


async def open_link(settings: BrokerSettings, dates: Dates | None, resolver: Executor) -> socket.socket:
    """Connect to a broker, with TLS where that is set. Raises BrokerError.

    `dates` is what its certificate is judged by; None is the system's clock.
    """
    try:
        context = None if settings.tls is None else tls_context(settings.tls)
        if context is not None and dates is not None:
            judge_dates(context, dates)
        async with asyncio.timeout(settings.connect_timeout_s):
            return await connect(settings.host, settings.port, context, resolver)
    except TimeoutError as error:
        raise BrokerError(
            f"does not answer within connect_timeout_s ({settings.connect_timeout_s:g} s); "
            "check host and port, and the network between"
        ) from error
    except CertificateDateError as error:
        raise BrokerError(f"its certificate {error.verify_message}; have it renewed at the broker") from error
    except ssl.SSLCertVerificationError as error:
        raise BrokerError(
            f"its certificate is not accepted: {error.verify_message}; set tls.ca to the certificate of who "
            "signed it, and check that host is the name in it and that this box's clock is right"
        ) from error
    except ssl.SSLError as error:
        raise BrokerError(
            f"TLS fails ({tls_reason(error)}); check that port is the broker's port for TLS, and tls.certificate"
        ) from error
    except OSError as error:
        raise BrokerError(f"cannot be reached: {_why_unreachable(error)}") from error


def tls_context(tls: BrokerTlsSettings) -> ssl.SSLContext:
    """What `[mqtt_brokers.tls]` asks for. Raises BrokerError where a file cannot be used."""
    try:
        return client_context(tls.ca, tls.certificate, tls.key)
    except ClientTlsError as error:
        raise BrokerError(f"the files of TLS cannot be read: {error}") from error


def _why_unreachable(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its name is not known here; check the spelling of host, and this box's DNS"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there; check that the broker is up, and host and port"
    if error.errno in {errno.ENETUNREACH, errno.EHOSTUNREACH}:
        return "there is no way to it from here; check this box's network, and host"
    return f"{error.strerror or error}; check host and port, and the network between"


def password_of(settings: BrokerSettings) -> str | None:
    """Read anew for each connection, so that it may change while the gateway runs. Raises BrokerError."""
    path = settings.password_file
    if path is None:
        return settings.password
    try:
        return read_password(path)
    except PasswordFileError as error:
        raise BrokerError(str(error)) from error
