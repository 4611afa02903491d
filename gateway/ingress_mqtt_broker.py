"""The broker ingress: reads from an MQTT broker that the site has already; a PUBACK goes out after the commit.

The promise begins when that broker delivers to us. What is delivered again is told by `broker_deliveries`; the
connection is `broker_client`'s; here are what is taken, what is acknowledged when, and what a person is told.

While the buffer can store nothing, nothing is read from the socket, so that TCP slows the broker down. PINGREQs are
sent all the while, and a broker that is not read from is not held to be dead: the connection lasts as long as the
broker bears to write into a full socket, and a broken one is made anew when there is room again.

A message with RETAIN is what its topic said last, some time before it was subscribed to: no reading of now, and nobody
knows of when. It is acknowledged, counted and not stored. A live one comes without that flag (section 3.3.1.3).
"""

import asyncio
import contextlib
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import structlog
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.reasoncodes import ReasonCode

from gateway.broker_client import BrokerClient, connect
from gateway.broker_deliveries import Deliveries, Judgement, digest
from gateway.mqtt_packet_reader import PINGRESP, PUBLISH, PUBREL, Packet, message, packet_id
from gateway.reading import Intake, Mark, Reading
from gateway.settings import BrokerSettings, BrokerTlsSettings

READING_BYTES: Final = 200
"""What a reading weighs in memory beside the bytes that it came in."""
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

_PUBACK: Final = b"\x40\x02"
_PUBREC: Final = b"\x50\x02"
_PUBCOMP: Final = b"\x70\x02"
_REFUSED: Final = 0x80
_CREDENTIALS: Final = (
    "user or password is wrong or missing, or this gateway may not connect; mend user and password_file, "
    "or the broker's list"
)
_CONNACK: Final = {
    "Unsupported protocol version": "it does not speak MQTT 3.1.1",
    "Client identifier not valid": "it does not take this client identifier; set client_id to one that it takes",
    "Server unavailable": "it says that it is not available",
    "Bad user name or password": _CREDENTIALS,
    "Not authorized": _CREDENTIALS,
}
"""CONNACK's return codes (section 3.2.2.3) by paho's names, in words."""

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

    `now_us` is CLOCK_BOOTTIME in microseconds, `random` gives numbers from 0 to 1. `counts` counts since the start:
    `readings`, `recognised` (delivered again and not stored again), `doubtful` (stored with `redelivered`), `retained`,
    `too-large`, `connections`.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        gateway_id: str,
        intake: Intake,
        now_us: Callable[[], int],
        random: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.client_id = settings.client_id or f"sluice-{gateway_id}"
        self.name = f"{settings.host}:{settings.port}"
        self.counts: Counter[str] = Counter()
        self.subscribed = asyncio.Event()
        """Set while there is a connection, and the broker has answered all that was asked of it."""
        self._intake = intake
        self._now_us = now_us
        self._random = random
        self._prefix = f"broker/{quote(settings.host, safe='')}:{settings.port}/{quote(self.client_id, safe='')}/"
        self._deliveries = Deliveries(self._prefix, {})
        self._filters: dict[str, int] = {}
        """What the session at the broker is subscribed to, with the QoS that was asked for."""
        self._asked: dict[int, tuple[str, ...]] = {}
        """Filters by the packet identifier of their SUBSCRIBE or UNSUBSCRIBE, until they are answered."""
        self._refused: set[str] = set()
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
        self._cause: str | None = None
        """Why this side ended the connection."""
        self._said: tuple[str, float] = ("", float("-inf"))
        self._lost_reported_s = float("-inf")
        self._report_connection = True
        """Whether nobody was told of a connection since the last one that was reported as lost."""

    async def run(self) -> None:
        """Connect, and connect again, until cancelled; then acknowledge what is stored, and DISCONNECT."""
        loop = asyncio.get_running_loop()
        kept = await self._intake.marks(self._prefix)
        self._deliveries = Deliveries(self._prefix, kept)
        with contextlib.suppress(msgspec.DecodeError):
            self._filters = msgspec.json.decode(kept.get(f"{self._prefix}topics", b"{}"), type=dict[str, int])
        failures = 0
        while True:
            begun_s = loop.time()
            try:
                await self._serve()
            except BrokerError as error:
                self._say(str(error), loop.time())
            failures = 0 if loop.time() - begun_s >= STEADY_S else failures + 1
            longest = self.settings.backoff_s_min * 2.0 ** min(failures - 1, 32) if failures else 0.0
            longest = max(longest, self.settings.backoff_s_min)
            await asyncio.sleep(self._random() * min(self.settings.backoff_s_max, longest))

    # --- one connection -----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Connect once, and take what comes until the connection ends. Raises BrokerError, which says why it did."""
        # What the last connection brought must be decided before CONNECT, for then it is known what is stored.
        await self._settled.wait()
        while self._intake.holding:  # noqa: ASYNC110 - the intake tells nobody when it ends
            await asyncio.sleep(HOLD_POLL_S)
        password = _password(self.settings)
        link = await self._connect()
        try:
            await self._commit(self._deliveries.forget_marks())
            client = BrokerClient(link, self.client_id, self.settings.packet_bytes_max, self._packets_came)
        except BaseException:
            link.close()
            raise
        if self.settings.user is not None:
            client.username_pw_set(self.settings.user, password)
        await self._converse(client)

    async def _connect(self) -> socket.socket:
        settings = self.settings
        try:
            context = None if settings.tls is None else tls_context(settings.tls)
            async with asyncio.timeout(settings.connect_timeout_s):
                return await connect(settings.host, settings.port, context)
        except TimeoutError as error:
            raise BrokerError(
                f"does not answer within connect_timeout_s ({settings.connect_timeout_s:g} s); "
                "check host and port, and the network between"
            ) from error
        except ssl.SSLCertVerificationError as error:
            raise BrokerError(
                f"its certificate is not accepted: {error.verify_message}; set tls.ca to the certificate of who "
                "signed it, and check that host is the name in it and that this box's clock is right"
            ) from error
        except ssl.SSLError as error:
            raise BrokerError(
                f"TLS fails: {error}; check that port is the broker's port for TLS, and tls.certificate"
            ) from error
        except OSError as error:
            raise BrokerError(
                f"cannot be reached: {error.strerror or error}; check host and port, and the network between"
            ) from error

    async def _converse(self, client: BrokerClient) -> None:
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[ReasonCode] = loop.create_future()

        def connack(code: ReasonCode, session_present: bool) -> None:  # noqa: FBT001 - as `accepted` has it
            # At once: what the broker delivers again may stand behind the CONNACK in the same read.
            if not code.is_failure:
                self._accepted(client, session_present=session_present)
            if not accepted.done():
                accepted.set_result(code)

        client.accepted, client.granted, client.ungranted = connack, self._granted, self._ungranted
        self._client, self._cause = client, None
        self._asked.clear()
        self._answers.clear()
        self._answered.clear()
        self._pinged_s = loop.time()
        self._deliveries.connecting()
        try:
            client.open(self.settings.host, self.settings.port, self.settings.keep_alive_s)
            outcomes: set[asyncio.Future[Any]] = {accepted, client.ended}
            await asyncio.wait(outcomes, timeout=self.settings.connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not accepted.done():
                raise BrokerError(
                    "did not accept the connection: it sent no CONNACK; check that port is the broker's port "
                    "for MQTT, without TLS where there is no [mqtt_brokers.tls]"
                )
            if accepted.result().is_failure:
                words = _CONNACK.get(accepted.result().getName(), accepted.result().getName())
                raise BrokerError(f"refuses the connection: {words}")
            while not client.ended.done():
                await asyncio.wait({client.ended}, timeout=TICK_S if client.is_reading else HOLD_POLL_S)
                self._tick(client, loop.time())
            raise BrokerError(f"the connection ended: {self._cause or _ended(client.ended.result())}")
        except asyncio.CancelledError:
            await self._part(client)
            raise
        finally:
            self.subscribed.clear()
            client.cut()
            self._client = None

    def _accepted(self, client: BrokerClient, *, session_present: bool) -> None:
        self.counts["connections"] += 1
        self._deliveries.connected(session_present=session_present)
        if not session_present:
            self._filters.clear()
            self._take(client, _Taken(0))
        _log.info("connected to the broker", broker=self.name, client_id=self.client_id, session=session_present)
        if self._report_connection:
            self._report_connection = False
            self._intake.event("broker-connected", None, broker=self.name, session_present=session_present)
        self._ask(client)

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
            self._end(client, f"it said nothing for {keep_alive_s * 1.5:g} s, not even to PINGREQ")
        if self._refused and now_s >= self._ask_again_s:
            self._ask(client)

    def _end(self, client: BrokerClient, cause: str) -> None:
        if client is self._client and not client.ended.done():
            self._cause = cause
            client.cut()

    # --- what the broker delivers -------------------------------------------------------------------------

    def _packets_came(self, packets: list[Packet]) -> None:
        """Take all that one read brought: one `Intake.take`, and one answer once it is stored."""
        client = self._client
        if client is None:
            return
        taken = _Taken(sum([len(packet.body) for packet in packets]))
        received_us = self._now_us()
        for packet in packets:
            kind = packet.first & 0xF0
            if kind == PUBLISH:
                self._publish(packet, received_us, taken)
            elif kind == PUBREL:
                self._deliveries.release(packet_id(packet))
                taken.answers += _PUBCOMP + packet.body[:2]
            elif kind == PINGRESP:
                self._deliveries.ponged()
            else:
                client.answer(packet)
        if taken.readings or taken.answers:
            self._take(client, taken)

    def _publish(self, packet: Packet, received_us: int, taken: _Taken) -> None:
        """Judge a PUBLISH; note its answer, and its reading where there is one to store."""
        first = packet.first
        qos = first >> 1 & 0b11
        topic_bytes, identifier, payload = message(packet)
        if qos:
            taken.answers += (_PUBACK if qos == 1 else _PUBREC) + identifier.to_bytes(2, "big")
        if first & 1:
            self.counts["retained"] += 1
            return
        if packet.missing:
            self.counts["too-large"] += 1
            self._intake.lost(None, "packet-too-large")
            return
        redelivered = False
        if qos:
            judge = self._deliveries.receive if qos == 1 else self._deliveries.receive_exactly_once
            judgement = judge(identifier, digest(packet.body), duplicate=bool(first & 8))
            if judgement is Judgement.STORED:
                self.counts["recognised"] += 1
                return
            redelivered = judgement is Judgement.DOUBTFUL
            self.counts["doubtful"] += redelivered
        elif self._intake.holding:
            self._intake.lost(None, "refused-qos0")
            return
        else:
            taken.unanswered += 1
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
            self._end(client, "the buffer refused readings, which the broker will send again")

        self._intake.take(taken.readings, done, marks)
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

    def _ask(self, client: BrokerClient) -> None:
        """Subscribe to what the session lacks, and unsubscribe from what the settings no longer name.

        A session that has it all is left alone: every SUBSCRIBE brings the retained messages again.
        """
        wanted = dict.fromkeys(self.settings.topics, self.settings.qos)
        missing: list[tuple[str, int]] = [(name, qos) for name, qos in wanted.items() if self._filters.get(name) != qos]
        surplus = [name for name in self._filters if name not in wanted]
        self._refused.clear()
        if missing:
            _, identifier = client.subscribe(missing)
            self._asked[identifier or 0] = tuple(name for name, _ in missing)
        if surplus:
            _, identifier = client.unsubscribe(surplus)
            self._asked[identifier or 0] = tuple(surplus)
        if not self._asked:
            self.subscribed.set()

    def _granted(self, identifier: int, codes: Sequence[ReasonCode]) -> None:
        names = self._asked.pop(identifier, ())
        for name, code in zip(names, codes, strict=False):
            if code.value >= _REFUSED:
                self._refused.add(name)
                self._ask_again_s = asyncio.get_running_loop().time() + SUBSCRIBE_AGAIN_S
                _log.error(
                    "the broker refuses a subscription, so that nothing of it is read: allow this user to read it in "
                    "the broker's access list, or change mqtt_brokers.topics",
                    broker=self.name,
                    topic=name,
                    asked_again_in_s=SUBSCRIBE_AGAIN_S,
                )
                continue
            self._filters[name] = self.settings.qos
            if not code.value:
                _log.warning(
                    "the broker grants QoS 0 only: what it sends while this gateway is away, or is killed, is lost; "
                    "allow QoS 1 in the broker's settings",
                    broker=self.name,
                    topic=name,
                )
            elif code.value < self.settings.qos:
                _log.warning("the broker grants QoS 1 where QoS 2 was asked for", broker=self.name, topic=name)
        self._keep_filters()

    def _ungranted(self, identifier: int) -> None:
        for name in self._asked.pop(identifier, ()):
            self._filters.pop(name, None)
        self._keep_filters()

    def _keep_filters(self) -> None:
        kept = Mark(f"{self._prefix}topics", msgspec.json.encode(self._filters))
        self._intake.take((), lambda _stored: None, (kept,))
        if not self._asked:
            self.subscribed.set()

    # --- what a person is told ----------------------------------------------------------------------------

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


def tls_context(tls: BrokerTlsSettings) -> ssl.SSLContext:
    """What `[mqtt_brokers.tls]` asks for. Raises BrokerError where a file cannot be used."""
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ValueError) as error:
        raise BrokerError(
            f"the files of TLS cannot be read: {error}; check tls.ca, tls.certificate and tls.key, which must be "
            "PEM files, the key without a passphrase"
        ) from error
    return context


def _password(settings: BrokerSettings) -> str | None:
    """Read anew for each connection, so that it may change while the gateway runs. Raises BrokerError."""
    path = settings.password_file
    return settings.password if path is None else read_password(path)


def read_password(path: Path) -> str:
    """The first line of a file that its owner alone can read. Raises BrokerError."""
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BrokerError(f"password_file can be read by others; run: chmod 0400 {path}")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerError(f"password_file cannot be read: {error}; write the password there, chmod 0400") from error
    if not lines or not lines[0]:
        raise BrokerError(f"password_file is empty; write the password into {path}")
    return lines[0]


def _ended(code: MQTTErrorCode | ReasonCode) -> str:
    """Why, in words, where the broker or the network ended it."""
    if str(code) == "Protocol error":
        return "it sent what is not MQTT 3.1.1; check that port is the broker's port for MQTT"
    return (
        "the broker or the network closed it; where this comes again and again, another client may be using the same "
        "client_id: give this gateway one of its own"
    )
