"""Connects to a broker by name, TCP, TLS and password, and says in an installer's words why it cannot."""

import asyncio
import errno
import socket
import ssl
from concurrent.futures import Executor
from typing import Final

from gateway.host.safe_files import PasswordFileError, read_password
from gateway.settings import BrokerSettings, BrokerTlsSettings
from gateway.tls.client import ClientTlsError, client_context, tls_reason
from gateway.tls.dates import CertificateDateError, Dates, judge_dates

LINK_TIMEOUT_S: Final = 10
"""Seconds for which a broker may leave sent bytes unconfirmed, or TCP's probes unanswered."""
PROBE_AFTER_S: Final = 5
"""Seconds of silence before TCP's first probe, and between probes."""
_CREDENTIALS: Final = (
    "user or password is wrong or missing, or the broker does not let this gateway in; mend user and password_file, or "
    "the broker's access list"
)
_CLIENT_ID: Final = "it does not take this client identifier; set client_id to one that it takes"
REFUSALS: Final = {
    1: "it does not speak this version of MQTT; set mqtt_brokers.version to another one",
    2: _CLIENT_ID,
    3: "it says that it is not available",
    4: _CREDENTIALS,
    5: _CREDENTIALS,
    0x84: "it does not speak MQTT 5; leave mqtt_brokers.version out",
    0x85: _CLIENT_ID,
    0x86: _CREDENTIALS,
    0x87: _CREDENTIALS,
    0x88: "it says that it is not available",
    0x89: "it says that it is busy",
    0x97: "it says that a quota is used up",
    0x9F: "it says that this gateway connects too often",
}
"""CONNACK's return codes (section 3.2.2.3), and its reason codes in MQTT 5, in words."""
ENDS: Final = {
    0x00: "it says that all is well",
    0x87: _CREDENTIALS,
    0x89: "it says that it is busy",
    0x8B: "it shuts down",
    0x8D: "it heard nothing of this gateway for too long",
    0x8E: "another client uses the same client_id; give this gateway its own",
    0x97: "it says that a quota is used up",
    0x98: "somebody ended it at the broker",
}
"""DISCONNECT's reason codes (MQTT 5, section 3.14.2.1), in words."""


class BrokerError(Exception):
    """There is no connection to the broker; the message says why and what to do."""


async def open_link(settings: BrokerSettings, dates: Dates | None, resolver: Executor) -> socket.socket:
    """Connect to a broker, with TLS if that is set. Raises BrokerError.

    Its certificate is judged by `dates`, or by the system's clock if it is None.
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
            f"its certificate is not accepted: {error.verify_message}; set tls.ca to the certificate of the CA that "
            "signed it, and check that host is the name in it and that this box's clock is right"
        ) from error
    except ssl.SSLError as error:
        raise BrokerError(
            f"TLS fails ({tls_reason(error)}); check that port is the broker's port for TLS, and tls.certificate"
        ) from error
    except OSError as error:
        raise BrokerError(f"cannot be reached: {_why_unreachable(error)}") from error


def password_of(settings: BrokerSettings) -> str | None:
    """Read the password, anew for each connection, as it may change while the gateway runs. Raises BrokerError."""
    path = settings.password_file
    if path is None:
        return settings.password
    try:
        return read_password(path)
    except PasswordFileError as error:
        raise BrokerError(str(error)) from error


def tls_context(tls: BrokerTlsSettings) -> ssl.SSLContext:
    """Make the TLS context of `[mqtt_brokers.tls]`. Raises BrokerError if a file cannot be used."""
    try:
        return client_context(tls.ca, tls.certificate, tls.key)
    except ClientTlsError as error:
        raise BrokerError(f"the files of TLS cannot be read: {error}") from error


async def connect(host: str, port: int, context: ssl.SSLContext | None, resolver: Executor) -> socket.socket:
    """Connect, with TLS if there is a context. Raises OSError, also for errors of TLS.

    `resolver` looks up the name. A look-up goes on after its caller has stopped waiting, and in the loop's own executor
    it would block other look-ups.
    """
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    found = await loop.run_in_executor(resolver, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    for family, kind, protocol, _, address in found:
        link = socket.socket(family, kind, protocol)
        try:
            link.setblocking(False)
            _notice_a_dead_link(link)
            await loop.sock_connect(link, address)
        except OSError as error:
            link.close()
            failure = error
        except BaseException:
            link.close()
            raise
        else:
            return link if context is None else await _encrypted(link, context, host)
    raise failure


def _notice_a_dead_link(link: socket.socket) -> None:
    """Let TCP end the connection within seconds if packets vanish or this box's address changes."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_TIMEOUT_S * 1000)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_AFTER_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LINK_TIMEOUT_S // PROBE_AFTER_S)


async def _encrypted(link: socket.socket, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    loop = asyncio.get_running_loop()
    try:
        encrypted = context.wrap_socket(link, server_hostname=host, do_handshake_on_connect=False)
    except BaseException:
        link.close()
        raise
    try:
        while True:
            ready: asyncio.Future[None] = loop.create_future()
            try:
                encrypted.do_handshake()
            except ssl.SSLWantReadError:
                loop.add_reader(encrypted, _resolve, ready)
            except ssl.SSLWantWriteError:
                loop.add_writer(encrypted, _resolve, ready)
            except ConnectionError as error:
                raise ssl.SSLError(f"the other side ended the handshake ({error.strerror})") from error
            else:
                return encrypted
            try:
                await ready
            finally:
                loop.remove_reader(encrypted)
                loop.remove_writer(encrypted)
    except BaseException:
        encrypted.close()
        raise


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _why_unreachable(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its name is not known here; check the spelling of host, and this box's DNS"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there; check that the broker is up, and host and port"
    if error.errno in {errno.ENETUNREACH, errno.EHOSTUNREACH}:
        return "there is no route to it from here; check this box's network, and host"
    return f"{error.strerror or error}; check host and port, and the network between"
