"""TLS for the MQTT listener: reads changed certificates again, and keeps a connection's memory small."""

import asyncio
import ssl
import stat
from asyncio import sslproto
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from gateway.listener.door import Caller
from gateway.listener.turns import TURN_BYTES, Turns
from gateway.settings import TlsSettings
from gateway.tls.client import tls_reason
from gateway.tls.dates import CertificateDateError, Dates, check_dates, judge_dates

TLS_BUFFER_BYTES: Final = 8_192
"""Bytes of one connection's read buffer. asyncio's own has 256 KiB, which is 1.4 GB for 5,000 sensors."""
TLS_WAITING_BYTES_MAX: Final = 16_384
"""Encrypted bytes that may wait while a connection is not read from. asyncio's own bound is 256 KiB here too."""
CLOSE_TIMEOUT_S: Final = 1
"""Seconds that the peer gets to answer close_notify."""


_NO_TLS: Final = "no TLS came: a client that speaks none belongs to mqtt_listener.port, or must be told to use TLS"
_HTTP: Final = (
    "somebody speaks HTTP to the port of MQTT over TLS: a browser, or a client that is set to WebSocket (ws://). This "
    "port takes only MQTT over TLS: set the client to mqtts://"
)
_NO_COMMON: Final = (
    "the client and this gateway have no version of TLS, or no cipher, in common: it takes TLS 1.2 and 1.3"
)
_NO_CERTIFICATE: Final = "the client showed no certificate, which mqtt_listener.tls.client_ca demands"
_NOT_ACCEPTED: Final = (
    "the client's certificate is not accepted: the CA in mqtt_listener.tls.client_ca must have signed it, and it must "
    "be in date"
)
_NOT_TRUSTED: Final = (
    "the client does not trust this gateway's certificate, or does not accept it: mqtt_listener.tls.certificate must "
    "be signed by a CA that the client knows, be in date by the client's clock, and name the host that the client "
    "connects to in subjectAltName (sluice check lists these names)"
)
_WENT_AWAY: Final = (
    "the client closed the connection without saying why. Some clients do so if they do not accept this gateway's "
    "certificate; sluice check lists the names that it is for"
)
_FAILURES: Final = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "HTTP_REQUEST": _HTTP,
    "HTTPS_PROXY_REQUEST": _HTTP,
    "UNSUPPORTED_PROTOCOL": _NO_COMMON,
    "ALERT_PROTOCOL_VERSION": _NO_COMMON,
    "NO_SHARED_CIPHER": _NO_COMMON,
    "ALERT_HANDSHAKE_FAILURE": _NO_COMMON,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": _NO_CERTIFICATE,
    "CERTIFICATE_VERIFY_FAILED": _NOT_ACCEPTED,
    "ALERT_UNKNOWN_CA": _NOT_TRUSTED,
    "ALERT_BAD_CERTIFICATE": _NOT_TRUSTED,
    "ALERT_UNSUPPORTED_CERTIFICATE": _NOT_TRUSTED,
    "ALERT_CERTIFICATE_EXPIRED": _NOT_TRUSTED,
    "ALERT_CERTIFICATE_UNKNOWN": _NOT_TRUSTED,
    "ALERT_INTERNAL_ERROR": _NOT_TRUSTED,
}
"""Messages by the end of OpenSSL's reason, as the names of alerts begin in several ways."""

_log = structlog.get_logger("sluice.mqtt_listener")


class TlsFilesError(OSError):
    """A certificate or key cannot be used; the message names the setting."""


class TlsFiles:
    """The certificate, its key and the CA of clients, as they are on disk."""

    def __init__(self, settings: TlsSettings, dates: Dates) -> None:
        """Clients' certificates are judged by `dates`. Raises TlsFilesError."""
        self._settings = settings
        self._dates = dates
        self._stamp = self._stamp_now()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The context for a new connection. Changed files are read again; if they cannot be used, the old ones stay."""
        try:
            stamp, failure = self._stamp_now(), None
        except TlsFilesError as error:
            stamp, failure = (), error
        if stamp != self._stamp:
            # Remembered even if the files cannot be used: each change is parsed, and reported, once.
            self._stamp = stamp
            try:
                if failure is not None:
                    raise failure
                self._context = self._load()
                _log.info("TLS certificate read again", file=str(self._settings.certificate))
            except TlsFilesError as error:
                _log.error("the changed TLS files cannot be used; the old ones stay in use", why=str(error))
        return self._context

    def _files(self) -> dict[str, Path]:
        settings = self._settings
        files = {"certificate": settings.certificate, "key": settings.key}
        if settings.client_ca is not None:
            files["client_ca"] = settings.client_ca
        return files

    @property
    def judges(self) -> bool:
        """Whether clients show certificates whose dates are judged by another clock than the system's."""
        return self._settings.client_ca is not None and self._dates() is not None

    def _stamp_now(self) -> tuple[object, ...]:
        """A value that changes with the clock for dates, and with each file's time, length and inode."""
        stamps: list[object] = [self.judges]
        for name, path in self._files().items():
            try:
                status = path.stat()
            except OSError as error:
                raise TlsFilesError(f"mqtt_listener.tls.{name}: {path} cannot be read: {error.strerror}") from error
            if not stat.S_ISREG(status.st_mode):
                # Reading a pipe would wait for its writer.
                raise TlsFilesError(f"mqtt_listener.tls.{name}: {path} is no file")
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(stamps)

    def _load(self) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for name, path in self._files().items():
            try:
                path.read_bytes()
            except OSError as error:
                raise TlsFilesError(f"mqtt_listener.tls.{name}: {path} cannot be read: {error.strerror}") from error
        try:
            # The empty password keeps an encrypted key from asking for one on the daemon's terminal.
            context.load_cert_chain(settings.certificate, settings.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise TlsFilesError(
                f"mqtt_listener.tls.certificate and mqtt_listener.tls.key ({settings.certificate}, {settings.key}) are "
                f"no PEM certificate with its unencrypted private key: {tls_reason(error)}"
            ) from error
        if settings.client_ca is not None:
            try:
                context.load_verify_locations(settings.client_ca)
            except ssl.SSLError as error:
                raise TlsFilesError(
                    f"mqtt_listener.tls.client_ca: {settings.client_ca} holds no PEM certificate: {tls_reason(error)}"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        if self.judges:
            judge_dates(context, self._dates)
            # A resumed TLS session shows no chain of certificates, so the server offers no resumption.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context


class TlsConnection(sslproto.SSLProtocol):
    """asyncio's TLS around one connection's protocol, with a small buffer.

    `create_server(ssl=...)` would use the same class, but fixes the context and the buffer's size for good. Here the
    handshake, and all other work of TLS, is charged to the connection's share of the time.
    """

    max_size = TLS_BUFFER_BYTES

    def __init__(  # noqa: PLR0913 - each is another part
        self,
        loop: asyncio.AbstractEventLoop,
        inner: asyncio.Protocol,
        context: ssl.SSLContext,
        handshake_timeout_s: float,
        *,
        caller: Caller,
        turns: Turns,
        ended: Callable[["TlsConnection", BaseException | None], None],
    ) -> None:
        """`ended` is called at the end with the handshake's error; None if it succeeded, or had to make room."""
        self._handshake: asyncio.Future[None] = loop.create_future()
        self._caller = caller
        self._turns = turns
        self._unread = b""
        """Bytes that came, but that TLS has not seen yet."""
        self._is_in_line = False
        self._ended = ended
        self._underlying: asyncio.Transport | None = None
        self.peer = ""
        super().__init__(
            loop,
            inner,
            context,
            self._handshake,
            server_side=True,
            ssl_handshake_timeout=handshake_timeout_s,  # type: ignore[arg-type]  # floats will do
            ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
        )
        # The public name belongs to the transport for `inner`, which is not there yet.
        self._set_read_buffer_limits(high=TLS_WAITING_BYTES_MAX)  # type: ignore[attr-defined]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_server makes
        self._underlying = transport
        self.peer = peer_name(transport)
        super().connection_made(transport)
        self._caller.connected(self.cut)

    def buffer_updated(self, nbytes: int) -> None:
        """Act on one read while this connection's share of the time lasts; leave the rest to its turns."""
        self._unread += self._ssl_buffer_view[:nbytes]  # type: ignore[attr-defined]  # what was read stands there
        while self._unread and not self._is_in_line and not self._caller.time_share.is_used(self._loop.time()):
            self._act_on_piece()
        if self._unread:
            self._stand_in_line()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # typeshed leaves out what it returns
        """Act on all bytes before the peer's end, as TLS closes at once and would skip them."""
        while self._unread:
            self._act_on_piece()
        return super().eof_received()

    def _stand_in_line(self) -> None:
        assert self._underlying is not None  # noqa: S101 - it has read
        self._underlying.pause_reading()
        if not self._is_in_line:
            self._is_in_line = True
            self._turns.stand_in_line(self._loop, self._caller.time_share, self._take_turn)

    def _take_turn(self) -> None:
        self._is_in_line = False
        underlying = self._underlying
        assert underlying is not None  # noqa: S101 - it has read
        if underlying.is_closing():
            return
        try:
            self._act_on_piece()
        except BaseException:
            # asyncio does this if `buffer_updated` fails.
            self.cut()
            raise
        if self._unread:
            self._stand_in_line()
        elif not self._ssl_reading_paused:  # type: ignore[attr-defined]  # unless the connection inside reads nothing
            underlying.resume_reading()

    def _act_on_piece(self) -> None:
        """Give one piece to TLS; charge the work, except the part that was charged to the connection inside."""
        share = self._caller.time_share
        began, before_s = self._loop.time(), share.work_s
        piece, self._unread = self._unread[:TURN_BYTES], self._unread[TURN_BYTES:]
        self._ssl_buffer_view[: len(piece)] = piece  # type: ignore[attr-defined]
        super().buffer_updated(len(piece))
        share.use(began + share.work_s - before_s, self._loop.time())

    def date_trouble(self) -> str | None:
        """Say why the client's certificate is not in date by the system's clock; None if it is in date."""
        tls: ssl.SSLObject | None = self._sslobj  # type: ignore[attr-defined]  # typeshed leaves it out
        if tls is None or not self._handshake.done() or self._handshake.exception() is not None:
            # A handshake under way checks the dates itself.
            return None
        try:
            check_dates(tls, None)
        except CertificateDateError as error:
            return f"the client's certificate {error.verify_message}"
        return None

    def cut(self) -> None:
        """Close at once, even in the middle of the handshake."""
        if self._underlying is not None:
            self._underlying.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._caller.left()
        error = self._handshake.exception() if self._handshake.done() else exc
        self._ended(self, None if self._caller.is_closed else error)


def peer_name(transport: asyncio.BaseTransport) -> str:
    """Address and port of the peer, for messages."""
    peer = transport.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if peer else ""


def common_name(transport: asyncio.BaseTransport) -> str | None:
    """The common name of a verified client certificate; None if there is none."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return None
    names = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    # With several names, nobody could tell which of them counts.
    return names[0] if len(names) == 1 else None


def handshake_failure(error: BaseException) -> str:
    """Say why a client's TLS handshake failed, and what to do."""
    if isinstance(error, ConnectionResetError):
        return _WENT_AWAY
    reason = str(getattr(error, "reason", None) or "")
    told = tls_reason(error)
    words = next((words for end, words in _FAILURES.items() if reason.endswith(end)), None)
    if words is None:
        return told
    return f"{words} ({getattr(error, 'verify_message', None) or told})"
