"""The MQTT listener: sensors connect here, and get acknowledgements after the commits of their readings.

`listener.door` accepts connections, and `listener.connection` runs one. `listener.client` acts on its packets.
`listener.sessions` keeps sessions, and `listener.shared` has what all connections share.
"""

import asyncio
import errno
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from gateway.intake.check_readings import CheckReadings
from gateway.listener.connection import CLOSING_COMMITS_S, Connection
from gateway.listener.door import SPARE_CONNECTIONS, Caller, Door, Port
from gateway.listener.logins import NOBODY, Logins
from gateway.listener.refusals import REVOKED, SHUTDOWN
from gateway.listener.session import SESSION_MARKS
from gateway.listener.shared import Shared
from gateway.listener.tls_connection import TlsConnection, TlsFiles, TlsFilesError, handshake_failure
from gateway.reading import ListenerIntake
from gateway.settings import ListenerSettings
from gateway.tls.dates import Dates, by_system_clock

HOUSEKEEPING_INTERVAL_S: Final = 1.0
OTHER_FILES: Final = 128
"""Open files that the gateway needs beside the listener's connections."""
CLOSING_TURNS: Final = 10
"""Turns of the event loop in which connections may end; TLS needs more than one."""

_log = structlog.get_logger("sluice.mqtt_listener")


class ListenError(OSError):
    """The listener could not start; the message names the setting to change."""


class MqttListener:
    """Takes MQTT 3.1.1 and MQTT 5 connections, and gives the messages that they publish to the intake.

    `now_us` is CLOCK_BOOTTIME in microseconds. Clients' certificates are judged by `dates`. `devices_file` has the
    secrets that are not in the settings. `counts` counts refusals and ends by reason.
    """

    def __init__(  # noqa: PLR0913 - each is another part of the gateway
        self,
        settings: ListenerSettings,
        intake: ListenerIntake,
        now_us: Callable[[], int],
        dates: Dates = by_system_clock,
        checks: CheckReadings | None = None,
        *,
        devices_file: Path | None = None,
    ) -> None:
        self.settings = settings
        self._dates = dates
        self.logins = Logins(settings, devices_file, partial(_passed_s, dates))
        checks = CheckReadings(now_us) if checks is None else checks
        self.shared = Shared(settings, intake, now_us, checks, self.logins)
        self.refusals = self.shared.refusals
        self.counts = self.refusals.counts
        self.listening = asyncio.Event()
        self.port: int = settings.port
        self._tls_files: TlsFiles | None = None
        self._tls_connections: set[TlsConnection] = set()
        self._judged = False
        """Whether TLS clients came while this box's clock could not judge the dates of their certificates."""

    async def run(self) -> None:
        """Serve until cancelled, then close all connections. Raises `ListenError` if it cannot start."""
        loop = asyncio.get_running_loop()
        files_max = self._allow_open_files()
        if self.settings.tls is not None:
            try:
                self._tls_files = TlsFiles(self.settings.tls, self._dates)
            except TlsFilesError as error:
                raise ListenError(str(error)) from error
        if self.logins.let_nobody_in:
            _log.warning(NOBODY)
        await self._load_sessions()
        door = Door(self.settings, self.refusals, files_max, self.shared.turns)
        try:
            await self._listen(loop, door)
            self.listening.set()
            while True:
                await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
                self._keep_house(loop.time())
        finally:
            self.listening.clear()
            await door.close()
            await self._close_connections()
            self.refusals.finish()

    # --- start, housekeeping, end -------------------------------------------------------------------------

    async def _load_sessions(self) -> None:
        shared = self.shared
        strays = shared.kept.load(await shared.intake.marks(SESSION_MARKS), shared.now_us() / 1e6)
        if strays:
            shared.store([], lambda _: None, dict(strays))

    async def _listen(self, loop: asyncio.AbstractEventLoop, door: Door) -> None:
        settings, tls = self.settings, self.settings.tls
        if settings.port:
            protocol = partial(Connection, self.shared, loop)
            await self._open(door, Port(settings.port, "mqtt_listener.port", protocol, is_tls=False))
            _log.info("listening for MQTT", host=settings.host, port=settings.port)
        if tls is not None:
            protocol_of = partial(self._tls_connection, loop)
            await self._open(door, Port(tls.port, "mqtt_listener.tls.port", protocol_of, is_tls=True))
            _log.info("listening for MQTT over TLS", host=settings.host, port=tls.port)

    async def _open(self, door: Door, port: Port) -> None:
        try:
            await door.open(port)
        except OSError as error:
            raise ListenError(_bind_message(self.settings.host, port.number, port.setting, error)) from error

    def _tls_connection(self, loop: asyncio.AbstractEventLoop, caller: Caller) -> TlsConnection:
        files = self._tls_files
        assert files is not None  # noqa: S101 - `run` has read them
        connection = TlsConnection(
            loop,
            Connection(self.shared, loop, caller),
            files.context(),
            self.settings.connect_timeout_s,
            caller=caller,
            turns=self.shared.turns,
            ended=self._tls_ended,
        )
        self._tls_connections.add(connection)
        self._judged = self._judged or files.judges
        return connection

    def _tls_ended(self, connection: TlsConnection, error: BaseException | None) -> None:
        self._tls_connections.discard(connection)
        if error is not None:
            why = f"the TLS handshake failed: {handshake_failure(error)}"
            self.refusals.refused("tls-handshake-failed", why, peer=connection.peer)

    def _keep_house(self, now_s: float) -> None:
        """Do once a second what no packet triggers."""
        shared = self.shared
        if shared.intake.cannot_store or shared.inflight.beyond:
            shared.pause_or_resume()
        shared.wills.publish_due(now_s)
        if shared.kept.room.expiring:
            shared.expire_commands()
        shared.devices.flush(now_s)
        self.look_at_logins()
        if self._judged and self._tls_files is not None and not self._tls_files.judges:
            self._judged = False
            self._judge_again()
        if not shared.intake.cannot_store:
            self._expire_sessions()

    def look_at_logins(self) -> int:
        """Read a changed devices' file; end connections whose secret is no longer valid, and return their number."""
        if not self.logins.reread():
            return 0
        before = self.counts[REVOKED]
        for connection in tuple(self.shared.sessions.values()):
            connection.end_where_revoked()
        return self.counts[REVOKED] - before

    async def devices_changed(self, _arguments: dict[str, Any]) -> object:
        """Answer a command that has changed the devices' file, after the change has taken effect."""
        ended = self.look_at_logins()
        return {**self.logins.state(), "ended": ended}

    def _judge_again(self) -> None:
        """End connections whose certificates are not in date, now that this box's clock is known."""
        for connection in tuple(self._tls_connections):
            trouble = connection.date_trouble()
            if trouble is not None:
                why = f"{trouble}: when the client connected, this box's clock was not synced and could not tell"
                self.refusals.refused("tls-certificate-date", why, peer=connection.peer)
                connection.cut()

    def _expire_sessions(self) -> None:
        shared = self.shared
        expired = shared.kept.expired(shared.now_us() / 1e6, shared.sessions.__contains__)
        if expired:
            self.counts["session-expired"] += len(expired)
            shared.forget(expired)

    async def _close_connections(self) -> None:
        """End all connections, which publishes their wills, and send the devices' reports that were put off."""
        await self._wait_for_commits()
        for connection in tuple(self.shared.connections):
            connection.end(SHUTDOWN)
        # Transports get one turn to flush and close. A peer that does not read is cut off.
        await asyncio.sleep(0)
        for connection in tuple(self.shared.connections):
            connection.cut()
        for tls_connection in tuple(self._tls_connections):
            tls_connection.cut()
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)
        self.shared.wills.finish()
        self.shared.devices.finish(asyncio.get_running_loop().time())

    async def _wait_for_commits(self) -> None:
        """Take nothing more, and wait until batches under way are stored and acknowledged."""
        self.shared.stopping = True
        if not self.shared.intake.cannot_store:
            await self.shared.inflight.wait_until_empty(CLOSING_COMMITS_S)

    def _allow_open_files(self) -> int:
        """Raise the soft limit of open files, often 1024, for `connections_max`; return the files for connections."""
        needed = self.settings.connections_max + SPARE_CONNECTIONS + OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= needed:
            return needed - OTHER_FILES
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            _log.warning(
                "fewer open files are allowed than mqtt_listener.connections_max needs: connections beyond "
                "that are closed; raise the limit (LimitNOFILE= in the unit) or lower the setting",
                allowed=allowed,
                needed=needed,
            )
        return max(1, allowed - OTHER_FILES)


def _passed_s(dates: Dates) -> float:
    """Seconds since 1970, as well as this box knows. A clock that was set back makes no expired secret valid again."""
    known = dates()
    return time.time() if known is None else max(time.time(), known.earliest_us / 1e6)


def _bind_message(host: str, port: int, setting: str, error: OSError) -> str:
    where = f"cannot listen for MQTT on {f'[{host}]' if ':' in host else host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: the port is taken; stop what has it, or set another {setting}"
    if error.errno == errno.EACCES:
        return f"{where}: ports below 1024 need a privilege; set {setting} to 1024 or above"
    # From Python 3.12 on, asyncio skips an address that does not exist. If none is left, its error has no number.
    if error.errno in {errno.EADDRNOTAVAIL, None} or isinstance(error, socket.gaierror):
        return f"{where}: this machine has no such address; set mqtt_listener.host (0.0.0.0 means all)"
    return f"{where}: {error.strerror or error}; see mqtt_listener.host and {setting}"
