"""The MQTT listener: sensors connect here; an acknowledgement goes out after the commit that it stands for.

One connection is `listener.connection`'s, what its client asks for `listener.client`'s, what outlives it
`listener.sessions`'; here are the ports, and what all connections share.
"""

import asyncio
import errno
import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from gateway.intake.check_readings import CheckReadings
from gateway.listener.connection import CLOSING_COMMITS_S, OUR_DOING, SHUTDOWN, SPARE_CONNECTIONS, Connection
from gateway.listener.device_commands import Commands
from gateway.listener.device_events import DeviceEvents
from gateway.listener.inflight import InflightTotal
from gateway.listener.login_limit import LoginLimit
from gateway.listener.logins import NOBODY, Logins
from gateway.listener.redelivery import RecentlyUnanswered
from gateway.listener.refusals import REVOKED, Refusals
from gateway.listener.session import MARKS, Room, Session, SessionKey
from gateway.listener.sessions import Sessions
from gateway.listener.tls_connection import TlsConnection, TlsFiles, TlsFilesError, handshake_failure
from gateway.reading import Intake, Mark, Reading
from gateway.settings import ListenerSettings
from gateway.tls.dates import Dates, by_system_clock

HOUSEKEEPING_INTERVAL_S: Final = 1.0
CLOSING_TURNS: Final = 10
"""Turns of the event loop that connections get to end in: TLS takes more than one."""

_log = structlog.get_logger("sluice.mqtt_listener")


class ListenError(OSError):
    """The listener could not begin; the message names the setting to change."""


class MqttListener:
    """Takes MQTT 3.1.1 connections and hands what they publish to the intake.

    `now_us` is CLOCK_BOOTTIME in microseconds, `dates` is what clients' certificates are judged by, `devices_file` has
    the secrets that are not in the settings. `counts` counts by reason whatever was refused or ended.
    """

    def __init__(  # noqa: PLR0913 - each is another part of the gateway
        self,
        settings: ListenerSettings,
        intake: Intake,
        now_us: Callable[[], int],
        dates: Dates = by_system_clock,
        checks: CheckReadings | None = None,
        *,
        devices_file: Path | None = None,
    ) -> None:
        self.checks = CheckReadings(now_us) if checks is None else checks
        """Who else is let in, for one test reading."""
        self.settings = settings
        self.intake = intake
        self.now_us = now_us
        self._dates = dates
        self.logins = Logins(settings, devices_file, partial(_passed_s, dates))
        self.login_limit = LoginLimit(
            settings.failed_logins_per_minute_max, settings.failed_login_delay_s, settings.failed_logins_held_max
        )
        self.refusals = Refusals(self.logins.met)
        self.counts = self.refusals.counts
        self.listening = asyncio.Event()
        self.port: int = settings.port
        self.connections: set[Connection] = set()
        self.sessions: dict[SessionKey, Connection] = {}
        """Connections by session: nobody takes over another user's."""
        self.users_connected: Counter[str] = Counter()
        """How many of them each user has."""
        self.paused: set[Connection] = set()
        """Connections that are not read from, because too much of them waits for its commit."""
        self.kept = Sessions(
            settings.sessions_max,
            settings.sessions_per_user_max,
            settings.session_expiry_s,
            Room(settings.commands_bytes_max, settings.qos2_unfinished_total_max),
            lambda: secrets.token_hex(8),
        )
        self.unanswered = RecentlyUnanswered()
        self.devices = DeviceEvents(intake, 2 * settings.connections_max, self.counts, OUR_DOING)
        self.commands = Commands(settings, self.kept, self.refusals, self._connection_of)
        self.inflight = InflightTotal(settings.inflight_bytes_total_max, self._pause_or_resume)
        self.stopping = False
        """Nothing more is taken; what waits for its commit is still answered."""
        self.refusing_until = 0.0
        """Time of the event loop's clock until which the intake is held to refuse."""
        self._tls_files: TlsFiles | None = None
        self._tls_connections: set[TlsConnection] = set()
        self._judged = False
        """Whether some of them were let in although this box's clock could not say whether their certificates hold."""
        self._generated_ids = 0

    async def run(self) -> None:
        """Serve until cancelled, then close all connections. Raises `ListenError` if it cannot begin."""
        loop = asyncio.get_running_loop()
        self._allow_open_files()
        if self.settings.tls is not None:
            try:
                self._tls_files = TlsFiles(self.settings.tls, self._dates)
            except TlsFilesError as error:
                raise ListenError(str(error)) from error
        if self.logins.let_nobody_in:
            _log.warning(NOBODY)
        await self._load_sessions()
        servers: list[asyncio.Server] = []
        try:
            await self._listen(loop, servers)
            self.listening.set()
            while True:
                await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
                self._keep_house(loop.time())
        finally:
            self.listening.clear()
            for server in servers:
                server.close()
            await self._close_connections()
            self.refusals.finish()

    def take(
        self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Mapping[str, bytes | None]
    ) -> None:
        """`Intake.take`, whatever happens: what waits for a commit must not wait for ever."""
        try:
            self.intake.take(readings, done, [Mark(key, value) for key, value in marks.items()] if marks else ())
        except Exception:  # noqa: BLE001 - whatever it is, it is not the client's fault
            _log.exception("readings could not be taken in")
            done(False)

    def forget(self, sessions: Sequence[Session]) -> None:
        """Have the marks of sessions that were taken out forgotten."""
        self.take([], partial(self.kept.forgotten, sessions), self.kept.forget(sessions))

    def enter(self, key: SessionKey, connection: Connection) -> None:
        """Take note of the connection that a session has now."""
        self.sessions[key] = connection
        if key[0] is not None:
            self.users_connected[key[0]] += 1

    def leave(self, key: SessionKey) -> None:
        """Take note that a session has no connection any more."""
        del self.sessions[key]
        user = key[0]
        if user is not None:
            self.users_connected[user] -= 1
            if not self.users_connected[user]:
                del self.users_connected[user]

    def _connection_of(self, session: Session) -> Connection | None:
        connection = self.sessions.get(session.key)
        return connection if connection is not None and connection.session is session else None

    def generated_client_id(self) -> str:
        """Make an identifier for a client that sent none [MQTT-3.1.3-6].

        U+0000 keeps it apart from all that clients may call themselves.
        """
        self._generated_ids += 1
        return f"\0{self._generated_ids}"

    # --- beginning, housekeeping, end ---------------------------------------------------------------------

    async def _load_sessions(self) -> None:
        strays = self.kept.load(await self.intake.marks(MARKS), self.now_us() / 1e6)
        if strays:
            self.take([], lambda _: None, dict(strays))

    async def _listen(self, loop: asyncio.AbstractEventLoop, servers: list[asyncio.Server]) -> None:
        settings, tls = self.settings, self.settings.tls
        if settings.port:
            servers.append(await self._bind(lambda: Connection(self, loop), settings.port, "mqtt_listener.port"))
            _log.info("listening for MQTT", host=settings.host, port=settings.port)
        if tls is not None:
            factory = self._tls_factory(loop, tls.connections_max)
            servers.append(await self._bind(factory, tls.port, "mqtt_listener.tls.port"))
            _log.info("listening for MQTT over TLS", host=settings.host, port=tls.port)

    async def _bind(self, factory: Callable[[], asyncio.BaseProtocol], port: int, setting: str) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_server(factory, self.settings.host, port, backlog=1024)
        except OSError as error:
            raise ListenError(_bind_message(self.settings.host, port, setting, error)) from error

    def _tls_factory(self, loop: asyncio.AbstractEventLoop, connections_max: int) -> Callable[[], asyncio.BaseProtocol]:
        def new() -> asyncio.BaseProtocol:
            # Before the handshake, which is what costs memory and time.
            if self._tls_files is None or len(self._tls_connections) >= connections_max:
                self.refusals.refused("too-many-tls-connections", "see mqtt_listener.tls.connections_max")
                return _Refused()
            connection = TlsConnection(
                loop,
                Connection(self, loop),
                self._tls_files.context(),
                self.settings.connect_timeout_s,
                self._tls_ended,
            )
            self._tls_connections.add(connection)
            self._judged = self._judged or self._tls_files.judges
            return connection

        return new

    def _tls_ended(self, connection: TlsConnection, error: BaseException | None) -> None:
        self._tls_connections.discard(connection)
        if error is not None:
            why = f"the TLS handshake failed: {handshake_failure(error)}"
            self.refusals.refused("tls-handshake-failed", why, peer=connection.peer)

    def _keep_house(self, now_s: float) -> None:
        """Once a second: what no packet brings about."""
        if self.intake.holding or self.inflight.beyond:
            self._pause_or_resume()
        self.devices.flush(now_s)
        self.look_at_logins()
        if self._judged and self._tls_files is not None and not self._tls_files.judges:
            self._judged = False
            self._judge_again()
        if not self.intake.holding:
            self._expire_sessions()

    def look_at_logins(self) -> int:
        """Take the devices' file as it is now, and end whose secret is good no more; give how many those were."""
        if not self.logins.look():
            return 0
        before = self.counts[REVOKED]
        for connection in tuple(self.sessions.values()):
            connection.end_where_revoked(self.logins)
        return self.counts[REVOKED] - before

    async def devices_changed(self, _arguments: dict[str, Any]) -> object:
        """Answer a command that has changed the devices' file: it is so when this returns."""
        ended = self.look_at_logins()
        return {**self.logins.state(), "ended": ended}

    def _judge_again(self) -> None:
        """This box's clock is known now: end the connections of clients whose certificates do not hold by it."""
        for connection in tuple(self._tls_connections):
            trouble = connection.date_trouble()
            if trouble is not None:
                why = f"{trouble}: this was not known while this box's clock was not, when it connected"
                self.refusals.refused("tls-certificate-date", why, peer=connection.peer)
                connection.cut()

    def _pause_or_resume(self) -> None:
        """Judge anew who is read from: any connection may be beyond the total, and below it those that are paused."""
        for connection in tuple(self.connections if self.inflight.beyond else self.paused):
            connection.pause_or_resume()

    def _expire_sessions(self) -> None:
        expired = self.kept.expired(self.now_us() / 1e6, self.sessions.__contains__)
        if expired:
            self.counts["session-expired"] += len(expired)
            self.forget(expired)

    async def _close_connections(self) -> None:
        """End all connections, which publishes their wills, and say what of devices was put off."""
        await self._wait_for_commits()
        for connection in tuple(self.connections):
            connection.end(SHUTDOWN)
        # One turn for the transports to flush and close; whoever does not read is cut off.
        await asyncio.sleep(0)
        for connection in tuple(self.connections):
            connection.cut()
        for tls_connection in tuple(self._tls_connections):
            tls_connection.cut()
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)
        self.devices.finish(asyncio.get_running_loop().time())

    async def _wait_for_commits(self) -> None:
        """Take nothing more, and let what is under way be stored and acknowledged."""
        self.stopping = True
        if not self.intake.holding:
            await self.inflight.wait_until_empty(CLOSING_COMMITS_S)

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


def _passed_s(dates: Dates) -> float:
    """Seconds since 1970, as well as this box knows: a clock that fell back makes no old secret good again."""
    known = dates()
    return time.time() if known is None else max(time.time(), known.earliest_us / 1e6)


class _Refused(asyncio.Protocol):
    """A connection that there is no room for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_server makes
        transport.abort()


def _bind_message(host: str, port: int, setting: str, error: OSError) -> str:
    where = f"cannot listen for MQTT on {f'[{host}]' if ':' in host else host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: the port is taken; stop what has it, or set another {setting}"
    if error.errno == errno.EACCES:
        return f"{where}: ports below 1024 need a privilege; set {setting} to 1024 or above"
    # From Python 3.12 on, asyncio passes over an address that is not there. If none is left, its error has no number.
    if error.errno in {errno.EADDRNOTAVAIL, None} or isinstance(error, socket.gaierror):
        return f"{where}: this machine has no such address; set mqtt_listener.host (0.0.0.0 means all)"
    return f"{where}: {error.strerror or error}; see mqtt_listener.host and {setting}"
