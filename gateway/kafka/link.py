"""Makes the connections of one session with Kafka, and keeps their faults and the bytes that they carried.

aiokafka 0.14 sets neither keep-alive nor TCP_USER_TIMEOUT. It waits for the whole request time-out to connect, and
tries again every 100 ms. It takes the addresses of `kafka.bootstrap` one after the other, and one lock holds up all
brokers meanwhile. So this module wraps aiokafka's function that makes connections. Within `KafkaLink.entered` the
connections are made as described here; elsewhere, aiokafka makes them. `_Connection` uses private parts of aiokafka. So
pyproject.toml pins its version, and a test fails if one of these parts changes.
"""

import asyncio
import random
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, get_args

import aiokafka.client
import structlog
from aiokafka.conn import (
    READER_LIMIT,
    AIOKafkaConnection,
    AIOKafkaProtocol,
    CloseReason,
    OAuthAuthenticator,
    ScramAuthenticator,
    collect_hosts,
)
from aiokafka.errors import KafkaConnectionError, SaslAuthenticationFailed
from aiokafka.protocol.admin import SaslHandShakeRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest

from gateway.host.latest import Latest
from gateway.host.name_lookup import Address, names
from gateway.kafka.answers import UnfitAnswerError, check_fields, check_records, check_size
from gateway.kafka.broker_socket import BrokerSocket
from gateway.kafka.reach import HOST_SHOWN_MAX, Fault, Stage, TokenError, host_and_port, plain_words, reach_words
from gateway.kafka.secret_files import (
    KafkaFileError,
    KafkaFiles,
    UnusableFiles,
    digests_of,
    mode_of,
    read_files,
    shown_certificates,
)
from gateway.settings import OAUTHBEARER, KafkaSettings
from gateway.tls.dates import Dates, by_system_clock

if TYPE_CHECKING:
    import ssl

    from gateway.kafka.tokens import Tokens

STAGGER_S: Final = 0.25
"""Seconds that an address is waited for before the next one of its name is tried beside it (RFC 8305, section 5)."""
BOOTSTRAP_STAGGER_S: Final = 0.5
"""Seconds before the next of `kafka.bootstrap` is tried. Each costs a slow link a handshake, perhaps for nothing."""
OPENING_S: Final = 2.0
"""Seconds before the next is tried if one took the connection, but has not finished TLS, versions, log-in and the first
answer."""
ADDRESSES_MAX: Final = 16
"""Addresses of one name that are tried at a time."""
PAUSE_S_MIN: Final = 0.1
"""Seconds that an address is left alone after its first failure. The pause doubles with each failure."""
PAUSE_S_MAX: Final = 2.0
"""Longest such pause in seconds. It is part of the 15 s that coming back may take."""
PAUSES_MAX: Final = 256
"""Addresses that are remembered. A cluster may give its brokers other names every day."""
TLS_CLOSE_S: Final = 1.0
"""Seconds that a broker gets to answer close_notify. asyncio's own 30 s would hold up the end of a session."""
CLOSING_TURNS: Final = 4
"""Turns of the event loop that a TLS transport, and the transport below it, take to end."""
CONNECTIONS_MAX: Final = 256
"""Connections of one session. A true cluster of 100 brokers takes 200; a false broker may name any number."""
SCRAM_ITERATIONS_MIN: Final = 4096
"""Fewest iterations that a broker may ask for (RFC 7677, section 4). A false broker that asks for few can guess the
password from the answer, at little cost for each guess. Kafka itself stores no password with fewer."""
SCRAM_ITERATIONS_MAX: Final = 1_000_000
"""Most iterations that a broker may ask for. More would hold this box's processor; 4096 are usual."""
_BOOTSTRAP: Final = ("bootstrap.invalid", 1)
"""The address that aiokafka begins with. It stands for all of `kafka.bootstrap`, and is no name of DNS (RFC 2606)."""

log = structlog.get_logger()

_current: ContextVar["KafkaLink | None"] = ContextVar("kafka_link", default=None)
_STAGES: Final = get_args(Stage)
_GIVEN_UP: Final = "given up, as the network is another one or the session ends"
_log_in: Final = ThreadPoolExecutor(1, thread_name_prefix="log-in")
"""Thread for SCRAM, which may take seconds on a small box. asyncio's own threads are for everybody."""


class _IterationsError(Exception):
    """A broker asks for a number of SCRAM iterations that this gateway refuses."""

    def __init__(self, iterations: int) -> None:
        super().__init__(iterations)
        self._iterations = iterations

    def fault(self, host: str, port: int) -> Fault:
        """The fault in words for an installer."""
        at = host_and_port(host[:HOST_SHOWN_MAX], port)
        if self._iterations < SCRAM_ITERATIONS_MIN:
            words = (
                f"{at} asks for {max(self._iterations, 0)} iterations of SCRAM, and this gateway does not log in with "
                f"fewer than {SCRAM_ITERATIONS_MIN}: the password could be guessed from its answer"
            )
        else:
            words = (
                f"{at} asks for more than {SCRAM_ITERATIONS_MAX} iterations of SCRAM, and this gateway does not log in "
                "for that"
            )
        return Fault(
            words,
            f"have the user's password set anew at the brokers with iterations={SCRAM_ITERATIONS_MIN}, which is usual; "
            "if the brokers do not ask for this number, it is no broker of theirs that answers: set [kafka.tls]",
            is_reached=True,
        )


class _TooManyConnectionsError(Exception):
    """A session has all connections that it may have."""

    @staticmethod
    def fault(host: str, port: int) -> Fault:
        """The fault in words for an installer."""
        return Fault(
            f"{host_and_port(host[:HOST_SHOWN_MAX], port)} is not connected: this gateway has {CONNECTIONS_MAX} "
            "connections to brokers, and makes no more",
            "a cluster that names so many brokers is too large for this gateway, or no cluster at all: check "
            "kafka.bootstrap, and set [kafka.tls]",
            is_reached=True,
        )


class _Experience:
    """Gives the order in which addresses are tried, by when they answered and failed. It leaves out none.

    It belongs to the whole process, and outlives sessions.
    """

    def __init__(self) -> None:
        self._answered_s: dict[object, float] = {}
        self._failed_s: dict[object, float] = {}

    def answered(self, *addresses: object) -> None:
        _note(self._answered_s, addresses)

    def failed(self, *addresses: object) -> None:
        _note(self._failed_s, addresses)

    def order(self, address: object) -> tuple[bool, float, float]:
        """Sort key: first addresses without a failure since their answer, then latest answer, then oldest failure."""
        answered_s, failed_s = self._answered_s.get(address, 0.0), self._failed_s.get(address, 0.0)
        return failed_s > answered_s, -answered_s, failed_s


def _note(times_s: dict[object, float], addresses: Iterable[object]) -> None:
    for address in addresses:
        times_s.pop(address, None)
        times_s[address] = time.monotonic()
    while len(times_s) > PAUSES_MAX:
        del times_s[next(iter(times_s))]


_experience: Final = _Experience()


@dataclass(slots=True)
class _Pause:
    """An address that failed, and is left alone for a while."""

    fault: Fault
    until_s: float
    length_s: float


class KafkaLink:
    """The connections of one session with Kafka: makes them, and keeps their faults and the bytes that they carried.

    Raises KafkaFileError if a certificate, key or password cannot be used. It belongs to one event loop.
    """

    def __init__(self, kafka: KafkaSettings, dates: Dates = by_system_clock) -> None:
        self._kafka = kafka
        self._dates = dates
        self._judge = None if kafka.tls is None or dates() is None else dates
        """Judges the dates of brokers' certificates if the system's clock cannot; None if it can."""
        self._files = read_files(kafka, self._judge)
        self._tokens = _tokens(kafka, self._files)
        self._pauses = Latest[tuple[str, int], _Pause](PAUSES_MAX)
        self._fault: Fault | None = None
        self._token_fault: Fault | None = None
        self._unusable: UnusableFiles | None = None
        self._sockets: dict[BrokerSocket, _Connection] = {}
        """Sockets that are not closed, and the connection of each."""
        self._attempts: dict[_Connection, asyncio.Timeout] = {}
        """The time-out of each connection that is being made."""
        self._asked: set[asyncio.Timeout] = set()
        """The time-out of each connection that the client waits for. Several may be tried to make it."""
        self.tls: ssl.SSLObject | None = None
        """TLS of the connection whose handshake was done last; None if none was, and without TLS."""
        self._was_cut = False
        """Whether connections were ended because the network changed."""
        self.throttled_s = 0.0
        """Seconds for which a broker last said that it reads nothing, because of its own quota (`throttle_time_ms`)."""
        self.throttled_at_s = float("-inf")
        """When it said so (monotonic)."""
        self._closed_bytes = 0
        self._closed_carried_bytes = 0

    def __repr__(self) -> str:
        return f"<KafkaLink {', '.join(self._kafka.bootstrap)}>"

    def options(self) -> dict[str, Any]:
        """Options for AIOKafkaProducer and AIOKafkaAdminClient. They hold the password, and must never be logged."""
        tls, sasl = self._kafka.tls, self._kafka.sasl
        protocol = "SSL" if tls is not None else "PLAINTEXT"
        options: dict[str, Any] = {
            "bootstrap_servers": [host_and_port(*_BOOTSTRAP)],
            "security_protocol": protocol if sasl is None else f"SASL_{protocol}",
            "ssl_context": self._files.context,
        }
        if self._tokens is not None:
            options |= {"sasl_mechanism": OAUTHBEARER, "sasl_oauth_token_provider": self._tokens}
        elif sasl is not None:
            options |= {
                "sasl_mechanism": sasl.mechanism,
                "sasl_plain_username": sasl.user,
                "sasl_plain_password": self._files.password,
            }
        return options

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the `with`, and in tasks begun there, aiokafka's connections are made by this link."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def files_changed(self) -> bool:
        """Whether the files have another certificate, key or password than was read, and it can be used.

        A session that works goes on while the new files cannot be used, as a file may be half written. Files that
        cannot be used are read once, and logged. The authorities that this box trusts by itself are read with each
        link, and not watched.
        """
        digests = digests_of(self._kafka)
        if digests == self._files.digests:
            return False
        found = UnusableFiles(digests, {path: mode_of(path) for path in digests})
        if found == self._unusable:
            return False
        try:
            read_files(self._kafka, self._judge)
        except KafkaFileError as error:
            self._unusable = found
            log.warning(
                "the new certificate, key or password for Kafka cannot be used, and the former stays in use until then",
                reason=str(error),
            )
            return False
        return True

    def clock_changed(self) -> bool:
        """Whether another clock must judge the dates of brokers' certificates now than before."""
        return self._kafka.tls is not None and (self._judge is None) != (self._dates() is None)

    @property
    def has_token(self) -> bool:
        """Whether the log-in takes an access token, which must be replaced before it ends."""
        return self._tokens is not None

    async def renew_token(self) -> None:
        """Return once there is an access token for the session that follows. Raises TokenError."""
        if self._tokens is not None:
            await self._tokens.renew()

    @property
    def fault(self) -> str | None:
        """Why the latest attempt to connect failed, in words for an installer; None once any broker has answered.

        Only an answer to a request of the session's own counts. If an answer was too large to be read, that stays the
        reason, as its broker may give good answers too. `faults` has what is wrong with one broker of several.
        """
        return None if self._fault is None else self._fault.words

    @property
    def is_barred(self) -> bool:
        """Whether the network is not to blame for `fault`: a broker was reached, and one side refuses the other."""
        return self._fault is not None and self._fault.is_reached

    @property
    def faults(self) -> dict[str, Fault]:
        """By `host:port`: the fault of each broker's address that failed and has not succeeded since."""
        return {host_and_port(*address): pause.fault for address, pause in self._pauses.items()}

    @property
    def token_fault(self) -> Fault | None:
        """Why no access token could be had; None if one was had each time. Without one, no address is tried."""
        return self._token_fault

    @property
    def was_cut(self) -> bool:
        """Whether the network changed, and nothing has failed since."""
        return self._was_cut and self._fault is None

    def wire_bytes(self) -> int:
        """Bytes on the wire since the beginning, both ways, with headers, retransmissions and closed connections."""
        return self._closed_bytes + sum(link.wire_bytes() for link in self._sockets)

    def carried_bytes(self) -> int:
        """Bytes that came through, both ways, on all connections that were opened, closed ones too.

        They never fall, and grow only while there is a path to a broker. A broker that hangs in TLS, versions or log-in
        adds nothing, however often it is tried.
        """
        carried = (link.carried_bytes() for link, connection in self._sockets.items() if connection.is_open)
        return self._closed_carried_bytes + sum(carried)

    def peers(self) -> frozenset[tuple[str, int]]:
        """(IP address, port) of each broker that has answered on a connection that lives."""
        return frozenset(peer for _, peer in self._ends())

    def abort_stale(self, is_own: Callable[[str], bool]) -> bool:
        """Abort the connections from addresses that this box no longer has. Returns whether there were any.

        `is_own` says whether an IP address is this box's. Connections that are still being made count, as no RST comes
        for them either. The other connections go on. If any was stale, earlier failures are forgotten and not reported.
        """
        owns = {link: own for link in self._sockets if (own := link.own_address()) is not None}
        gone = {own for own in owns.values() if not is_own(own)}
        if not gone:
            return False
        self._pauses.clear()
        self._fault = None
        self._was_cut = True
        for link, own in owns.items():
            if own in gone:
                self._end(self._sockets[link])
        return True

    def abort(self) -> None:
        """Close every connection at once, and wait for nothing. Attempts are given up, and pauses end."""
        self._pauses.clear()
        for asked in self._asked:
            _expire(asked)
        for connection in dict.fromkeys((*self._attempts, *self._sockets.values())):
            self._end(connection)

    async def let_go(self) -> None:
        """End closed connections before the event loop ends, as TLS would wait for the broker's close_notify.

        Faults stay known.
        """
        for connection in dict.fromkeys(self._sockets.values()):
            connection.abort()
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)

    def _end(self, connection: "_Connection") -> None:
        attempt = self._attempts.get(connection)
        if attempt is not None:
            _expire(attempt)
        connection.abort()

    def _ends(self) -> list[tuple[str, tuple[str, int]]]:
        links = (link for link, connection in self._sockets.items() if connection.is_answered)
        return [ends for link in links if (ends := link.ends()) is not None]

    # -- making a connection ----------------------------------------------------------------------

    async def _connection(self, host: str, port: int, options: Mapping[str, Any]) -> "_Connection":
        """Make a connection that is ready for requests. Raises KafkaConnectionError, in words for an installer."""
        try:
            async with asyncio.timeout(None) as asked:
                self._asked.add(asked)
                await self._have_token()
                if (host, port) == _BOOTSTRAP:
                    return await self._of_bootstrap(options)
                return await self._of_host(host, port, options)
        except TimeoutError as error:
            raise KafkaConnectionError(_GIVEN_UP) from error
        finally:
            self._asked.discard(asked)

    async def _have_token(self) -> None:
        """Have an access token at hand, if the log-in takes one. Raises KafkaConnectionError."""
        if self._tokens is not None:
            try:
                await self._tokens.get()
            except TokenError as error:
                self._fault = self._token_fault = Fault(error.words, error.hint, stage="token")
                raise KafkaConnectionError(error.words) from error

    async def _of_bootstrap(self, options: Mapping[str, Any]) -> "_Connection":
        """Connect to the broker of `kafka.bootstrap` that answers first. If one is slow, another is tried too."""
        # aiokafka's function shuffles them, so that not all gateways ask the same broker.
        hosts = [(host, port) for host, port, _ in collect_hosts(list(self._kafka.bootstrap))]
        hosts.sort(key=_experience.order)
        failures: list[KafkaConnectionError] = []

        async def answering(host: str, port: int) -> _Connection | None:
            try:
                connection = await self._of_host(host, port, options)
                await connection.answer_at_all()
            except KafkaConnectionError as error:
                failures.append(error)
                return None
            return connection

        found = await self._first_of([answering(*host) for host in hosts], BOOTSTRAP_STAGGER_S)
        if found is None:
            raise failures[-1]
        return found

    async def _of_host(self, host: str, port: int, options: Mapping[str, Any]) -> "_Connection":
        """Connect to the address of a name that can be opened first. If one is slow, another is tried too."""
        pause = self._pauses.get((host, port))
        if pause is not None and asyncio.get_running_loop().time() < pause.until_s:
            # aiokafka asks every 100 ms. During the pause, it gets the last attempt's words at once.
            raise KafkaConnectionError(pause.fault.words)
        try:
            async with asyncio.timeout(self._kafka.connect_timeout_s):
                addresses = await names.addresses(host, port)
        except Exception as error:
            raise KafkaConnectionError(self._failed(_Connection(self, host, port, options), error).words) from error
        failures: list[tuple[_Connection, Exception]] = []

        async def opened(connection: _Connection) -> _Connection | None:
            try:
                await connection.connect()
            except Exception as error:  # noqa: BLE001 - a peer's nonsense; aiokafka's own tasks bear only its own errors
                failures.append((connection, error))
                _experience.failed(connection.at)
                return None
            return connection

        tried = sorted(_interleaved(addresses), key=_experience.order)[:ADDRESSES_MAX]
        ways = [opened(_Connection(self, host, port, options, at)) for at in tried or (None,)]
        found = await self._first_of(ways, STAGGER_S)
        if found is not None:
            return found
        if any(connection.is_aborted for connection, _ in failures):
            raise KafkaConnectionError(_GIVEN_UP)
        connection, failure = _most_telling(failures)
        raise KafkaConnectionError(self._failed(connection, failure).words) from failure

    async def _first_of(
        self, ways: "Iterable[Coroutine[Any, Any, _Connection | None]]", stagger_s: float
    ) -> "_Connection | None":
        """The connection of the first attempt that succeeds; None if none does. The others are given up.

        If an attempt fails, the next begins at once. Otherwise the next begins after a while, beside those under way.
        """
        waiting = deque(ways)
        under_way: set[asyncio.Task[_Connection | None]] = set()
        found: list[_Connection] = []
        try:
            await self._try_in_turn(waiting, under_way, found, stagger_s)
            return found[0] if found else None
        finally:
            for way in waiting:
                way.close()
            for task in under_way:
                task.cancel()
            others = await asyncio.gather(*under_way, return_exceptions=True)
            for other in (*found[1:], *others):
                if isinstance(other, _Connection):
                    other.close()

    async def _try_in_turn(
        self,
        waiting: "deque[Coroutine[Any, Any, _Connection | None]]",
        under_way: "set[asyncio.Task[_Connection | None]]",
        found: "list[_Connection]",
        stagger_s: float,
    ) -> None:
        """Begin waiting attempts, until one has succeeded or none is left."""
        loop = asyncio.get_running_loop()
        begun_s = float("-inf")
        while not found and (waiting or under_way):
            is_opening = any(connection.is_opening for connection in self._sockets.values())
            left_s = begun_s + (OPENING_S if is_opening else stagger_s) - loop.time()
            if waiting and left_s <= 0:
                under_way.add(asyncio.create_task(waiting.popleft(), name="connect"))
                begun_s = loop.time()
                continue
            done, _ = await asyncio.wait(
                under_way, timeout=left_s if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            under_way -= done
            found += [connection for task in done if (connection := task.result()) is not None]
            if done:
                begun_s = float("-inf")

    def _failed(self, connection: "_Connection", error: BaseException) -> Fault:
        """Remember why a connection failed, and leave its address alone for a while."""
        address = connection.address
        if self._tokens is not None and isinstance(error, SaslAuthenticationFailed):
            self._tokens.forget()
        try:
            fault = (
                error.fault(*address)
                if isinstance(error, _IterationsError | _TooManyConnectionsError)
                else reach_words(
                    error,
                    *address,
                    self._kafka,
                    stage=connection.stage,
                    shown=connection.shown[0] if connection.shown else None,
                    mechanisms=connection.mechanisms,
                )
            )
        except Exception as found:  # noqa: BLE001 - a peer's nonsense must not end aiokafka's own tasks
            log.debug("no words were found for a connection that failed", error=type(error), then=type(found))
            fault = plain_words(error, *address)
        _experience.failed(address, connection.at)
        former = self._pauses.get(address)
        length_s = PAUSE_S_MIN if former is None else min(former.length_s * 2, PAUSE_S_MAX)
        # Half of the pause is random, so that gateways do not connect all at once when their broker comes back.
        until_s = asyncio.get_running_loop().time() + length_s * random.uniform(0.5, 1.0)  # noqa: S311
        self._pauses[address] = _Pause(fault, until_s, length_s)
        self._fault = fault
        return fault

    def _answered(self, connection: "_Connection", *, is_first: bool) -> None:
        """Record that the broker has answered a request of the session's own."""
        if self._fault is not None and not self._fault.lasts:
            self._fault = None
        if is_first:
            # A later answer does not say that the address still takes connections.
            self._pauses.pop(connection.address, None)
            _experience.answered(connection.address, connection.at)

    @asynccontextmanager
    async def _bounded(self, connection: "_Connection") -> AsyncIterator[None]:
        """Allow `kafka.connect_timeout_s` at most, or until the connection is aborted. Raises TimeoutError for both."""
        try:
            async with asyncio.timeout(self._kafka.connect_timeout_s) as attempt:
                self._attempts[connection] = attempt
                yield
        finally:
            self._attempts.pop(connection, None)

    async def _dial(self, address: Address, connection: "_Connection") -> BrokerSocket:
        """Make a TCP connection to an address."""
        if len(self._sockets) >= CONNECTIONS_MAX:
            raise _TooManyConnectionsError
        link = BrokerSocket(address, self._closing)
        self._sockets[link] = connection
        try:
            await asyncio.get_running_loop().sock_connect(link, address[3])
        except BaseException:
            link.close()
            raise
        return link

    def _closing(self, link: BrokerSocket) -> None:
        connection = self._sockets.pop(link)
        if link.fileno() < 0:
            # The event loop has ended, and garbage collection closed the socket. Its counters are gone.
            return
        self._closed_bytes += link.wire_bytes()
        if connection.is_open:
            self._closed_carried_bytes += link.carried_bytes()


class _Connection(AIOKafkaConnection):  # type: ignore[misc] # aiokafka has no types
    """aiokafka's connection with another `connect`: the same steps, with the link's sockets and bounds."""

    def __init__(
        self, link: KafkaLink, host: str, port: int, options: Mapping[str, Any], at: Address | None = None
    ) -> None:
        super().__init__(host, port, **options)
        self._link = link
        self.address = host, port
        self.at = at
        """One of the addresses that the name leads to; None if it leads to none."""
        self.tls_name = host.removesuffix(".")
        """Name that the certificate must have: without the dot that keeps a resolver from its search list."""
        self.stage: Stage = "name"
        """Step that the connection has reached."""
        self.shown: list[bytes] = []
        """The certificate that the broker showed, in DER, until the connection is open."""
        self.mechanisms: tuple[str | None, ...] = ()
        """Mechanisms for SASL that the broker offers, once it said so."""
        self.is_aborted = False
        self._was_answered = False
        """Whether a request of the session's own was answered."""
        self._is_settled = False
        """Whether it is known if the first request succeeded."""
        self._transport: asyncio.WriteTransport | None = None

    @property
    def is_open(self) -> bool:
        """Whether TLS, versions and log-in are done."""
        return self.stage == "request"

    @property
    def is_opening(self) -> bool:
        """Whether somebody took the connection, but has answered no request of the session's own yet."""
        return self.stage not in {"name", "connect"} and not self._was_answered

    @property
    def is_answered(self) -> bool:
        """Whether the connection lives, and the broker has answered a request of the session's own."""
        return self._was_answered and bool(self.connected())

    async def connect(self) -> None:
        """Connect, agree on versions, log in. Raises any error that comes of it, also by a peer's nonsense."""
        try:
            async with self._link._bounded(self):  # noqa: SLF001 - one thing in two classes
                await self._open()
            # Bounded apart, as these steps take as many round trips again over TLS to a far broker.
            async with self._link._bounded(self):  # noqa: SLF001
                self.stage = "versions"
                await self._do_version_lookup()
                if self._sasl_mechanism is not None and self._security_protocol.startswith("SASL_"):
                    self.stage = "login"
                    await self._do_sasl_handshake()
            self.stage = "request"
            self.shown.clear()
        except BaseException:
            self.close()
            raise

    async def _open(self) -> None:
        """Connect, with TLS if it is set, as AIOKafkaConnection.connect does."""
        if self.at is None:
            raise socket.gaierror(socket.EAI_NODATA, "the name has no address")
        loop = asyncio.get_running_loop()
        self._closed_fut = loop.create_future()
        self.stage = "connect"
        link = await self._link._dial(self.at, self)  # noqa: SLF001
        reader = asyncio.StreamReader(limit=READER_LIMIT, loop=loop)
        protocol = AIOKafkaProtocol(self._closed_fut, reader, loop=loop)
        tls: dict[str, Any] = {}
        if self._security_protocol.endswith("SSL"):
            self.stage = "tls"
            shown_certificates.set(self.shown)
            tls = {"ssl": self._ssl_context, "server_hostname": self.tls_name, "ssl_shutdown_timeout": TLS_CLOSE_S}
        # If this fails, the transport that it made closes the socket.
        transport, _ = await loop.create_connection(lambda: protocol, sock=link, **tls)
        self._transport = transport
        self._link.tls = transport.get_extra_info("ssl_object")
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self._reader, self._protocol = reader, protocol
        self._read_task = self._create_reader_task()
        if self._max_idle_ms is not None:
            self._idle_handle = loop.call_soon(self._idle_check, weakref.ref(self))

    def authenticator_scram(self) -> ScramAuthenticator:
        """The authenticator of aiokafka, bounded."""
        return _Scram(
            loop=self._loop,
            sasl_plain_password=self._sasl_plain_password,
            sasl_plain_username=self._sasl_plain_username,
            sasl_mechanism=self._sasl_mechanism,
        )

    def authenticator_oauth(self) -> OAuthAuthenticator:
        """The authenticator of aiokafka, which takes a refusal for success."""
        return _Bearer(sasl_oauth_token_provider=self._sasl_oauth_token_provider)

    async def answer_at_all(self) -> None:
        """Have the broker answer a first request. Otherwise, closes the connection and raises KafkaConnectionError."""
        try:
            await self.send(MetadataRequest([]))
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):
                raise
            self._turned_away(error)
            raise KafkaConnectionError(str(error) or type(error).__name__) from error

    def send(self, request: Any, expect_response: bool = True) -> Coroutine[Any, Any, Any]:  # noqa: FBT001, FBT002 - as aiokafka has it
        """Send as aiokafka does, but at once, and keep what must be known of the answer."""
        if isinstance(request, MetadataRequest) and request._allow_auto_topic_creation is None:  # noqa: SLF001
            # This is aiokafka's own request, as the gateway's requests set the parameter. It would have the broker
            # create a topic that was deleted, and ask for all topics of the cluster if it names none.
            request = MetadataRequest(request._topics or [], allow_auto_topic_creation=False)  # noqa: SLF001
        sent: Coroutine[Any, Any, Any] = super().send(request, expect_response)
        if isinstance(request, SaslHandShakeRequest):
            return self._keep_mechanisms(sent)
        if isinstance(request, ProduceRequest):
            sent = self._note_throttle(sent)
        return sent if self._is_settled or not self.is_open else self._first_of_all(sent)

    async def _first_of_all(self, sent: Coroutine[Any, Any, Any]) -> Any:
        """Record if the first request gets no answer: a broker that takes connections and never answers is not well."""
        try:
            return await sent
        except TimeoutError as error:
            self._turned_away(error)
            raise

    def _turned_away(self, error: BaseException) -> None:
        if self.is_open and not self._is_settled:
            self._is_settled = True
            self._link._failed(self, error)  # noqa: SLF001

    async def _keep_mechanisms(self, sent: Coroutine[Any, Any, Any]) -> Any:
        """Keep the mechanisms for SASL that the broker offers, as its refusal does not name them."""
        response = await sent
        self.mechanisms = tuple(response.enabled_mechanisms or ())
        return response

    async def _note_throttle(self, sent: Coroutine[Any, Any, Any]) -> Any:
        """Record a broker's quota, which aiokafka ignores: the broker answers, and then reads nothing for a while."""
        response = await sent
        # Version 0 does not have the field.
        throttle_ms = getattr(response, "throttle_time_ms", 0)
        if throttle_ms > 0:
            self._link.throttled_s, self._link.throttled_at_s = throttle_ms / 1000, time.monotonic()
        return response

    @staticmethod
    async def _read(self_ref: "weakref.ref[_Connection]") -> None:
        """Read answers as aiokafka does, but none that is too large to be a broker's."""
        connection = self_ref()
        if connection is None or connection._reader is None:  # noqa: SLF001 - its own class
            return
        reader = connection._reader  # noqa: SLF001
        while True:
            # As in aiokafka, the reader does not hold a connection that nobody else holds any more.
            del connection
            (announced,) = struct.unpack(">I", await reader.readexactly(4))
            connection = self_ref()
            if connection is None:
                return
            check_size(announced, connection._asked())  # noqa: SLF001
            del connection
            answer = await reader.readexactly(announced)
            connection = self_ref()
            if connection is None:
                return
            check_fields(answer, connection._asked())  # noqa: SLF001
            check_records(answer, connection._asked())  # noqa: SLF001
            connection._handle_frame(answer)  # noqa: SLF001

    def _asked(self) -> Any:
        """The request that the next answer is for; None if there is none, or if SASL reads bytes of its own."""
        return self._requests[0][1] if self._requests else None

    def _handle_frame(self, resp: bytes) -> None:
        super()._handle_frame(resp)
        if self.is_open and self._reader is not None:
            # If the connection was closed meanwhile, the answer does not count.
            self._link._answered(self, is_first=not self._was_answered)  # noqa: SLF001
            self._was_answered = self._is_settled = True

    def abort(self) -> None:
        """End the connection at once, at any step. If an answer is missing then, nobody is to blame."""
        self.is_aborted = self._is_settled = True
        if self._transport is not None:
            self._transport.abort()
            # Python before 3.11.4 raises if TLS is aborted twice.
            self._transport = None
            # A loop that ends does not wait until the reader finds out. So the connection is closed here as well.
            self.close(CloseReason.CONNECTION_BROKEN)

    def close(self, reason: CloseReason | None = None, exc: BaseException | None = None) -> "asyncio.Future[None]":
        """Close as aiokafka does. A broker that closes before it answers the first request has refused this gateway."""
        if reason == CloseReason.CONNECTION_BROKEN and exc is not None:
            if isinstance(exc, UnfitAnswerError):
                # Such an answer is reported at any time, not only as the first.
                self._is_settled = self.is_aborted
            self._turned_away(exc)
        closed: asyncio.Future[None] = super().close(reason, exc)
        return closed


class _Bearer(OAuthAuthenticator):  # type: ignore[misc] # aiokafka has no types
    """aiokafka's OAUTHBEARER. A broker that answers the token with anything refuses it (RFC 7628, section 3.2.2)."""

    async def step(self, payload: bytes | None) -> Any:
        """The token at first, and nothing after it. Raises SaslAuthenticationFailed."""
        if payload:
            raise SaslAuthenticationFailed
        return await super().step(payload)


def _tokens(kafka: KafkaSettings, files: KafkaFiles) -> "Tokens | None":
    """The source of access tokens; None if the log-in takes none."""
    if kafka.sasl is None or files.token_context is None:
        return None
    from gateway.kafka.tokens import Tokens  # noqa: PLC0415 - only for OAUTHBEARER, as h11 takes memory

    return Tokens(kafka.sasl, files.password or "", files.token_context, kafka.connect_timeout_s)


class _Scram(ScramAuthenticator):  # type: ignore[misc] # aiokafka has no types
    """aiokafka's SCRAM in a thread of its own, with a bound on iterations."""

    def step(self, payload: bytes | None) -> "asyncio.Future[Any]":
        """Compute the next message."""
        stepped: asyncio.Future[Any] = self._loop.run_in_executor(_log_in, self._step, payload)
        return stepped

    def create_salted_password(self, salt: bytes, iterations: int) -> None:
        """Raises _IterationsError if the number of iterations is refused."""
        if not SCRAM_ITERATIONS_MIN <= iterations <= SCRAM_ITERATIONS_MAX:
            raise _IterationsError(iterations)
        super().create_salted_password(salt, iterations)


_aiokafkas_own = aiokafka.client.create_conn


async def _create_conn(host: str, port: int, **options: Any) -> AIOKafkaConnection:
    link = _current.get()
    if link is None:
        return await _aiokafkas_own(host, port, **options)
    return await link._connection(host, port, options)  # noqa: SLF001


aiokafka.client.create_conn = _create_conn


# -- addresses ------------------------------------------------------------------------------------


def _interleaved(addresses: Sequence[Address]) -> list[Address]:
    """Order addresses so that their families take turns, beginning with the first one's (RFC 8305, section 4)."""
    families: dict[int, deque[Address]] = {}
    for address in addresses:
        families.setdefault(address[0], deque()).append(address)
    ordered = []
    while families:
        for family in list(families):
            ordered.append(families[family].popleft())
            if not families[family]:
                del families[family]
    return ordered


def _most_telling(failures: "Sequence[tuple[_Connection, Exception]]") -> "tuple[_Connection, Exception]":
    """The failure that tells a person most: of the addresses of a name, the one that came farthest, or said no."""
    farthest = max(_STAGES.index(connection.stage) for connection, _ in failures)
    told = [failure for failure in failures if _STAGES.index(failure[0].stage) == farthest]
    for kind in (ConnectionRefusedError, PermissionError, TimeoutError):
        for failure in told:
            if isinstance(failure[1], kind):
                return failure
    return told[0]


def _expire(bound: asyncio.Timeout) -> None:
    """Let a time-out end at once."""
    if not bound.expired():
        bound.reschedule(0)
