"""Checks MQTT: connects to the running gateway as a sensor, and to the site's brokers as a client."""

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

import msgspec

from gateway.buffer.status import is_running
from gateway.commands.certificate_dates import certificate_dates
from gateway.commands.check.finding import Finding, remark, skipped, well, wrong
from gateway.commands.check.mqtt_probe import Conversation, NoAnswerError, conversing
from gateway.daemon import control
from gateway.host.terminal_text import milliseconds
from gateway.intake.check_readings import CheckOpened
from gateway.kafka.reach import host_and_port
from gateway.settings import BrokerSettings, ListenerSettings, Settings
from gateway.tls.client import tls_reason

ANSWER_S: Final = 15.0
"""Seconds that this box's own listener may take to answer: it may wait for a slow card."""
START: Final = "start the gateway (sudo systemctl start sluice) and check again"
_CLIENT_ID: Final = "sluice-check"
_UNSPECIFIED: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where a listener for all is met
_REFUSED: Final = {
    3: "it lets nobody in just now, because readings cannot be stored, or there are too many connections; sluice "
    "status says which",
    4: "it does not know the credential that it gave for this: is it of another version? Restart it",
    5: "it does not know the credential that it gave for this: is it of another version? Restart it",
}
"""Meaning of CONNACK's return codes (section 3.2.2.3) from the gateway's own listener."""


class Door(NamedTuple):
    """A port of the listener."""

    setting: str
    host: str
    port: int
    is_tls: bool

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)


class DoorError(Exception):
    """Nobody gets in at a port. The message says why and what to do."""


def doors(listener: ListenerSettings) -> list[Door]:
    """Ports of the listener, with the address by which this box reaches them."""
    host = _UNSPECIFIED.get(listener.host, listener.host)
    found = [Door("mqtt_listener.port", host, listener.port, is_tls=False)] if listener.port else []
    if listener.tls is not None:
        found.append(Door("mqtt_listener.tls.port", host, listener.tls.port, is_tls=True))
    return found


def wants_certificate(listener: ListenerSettings, door: Door) -> bool:
    """Tell whether a port lets in only clients with a certificate, which this box does not have."""
    return door.is_tls and listener.tls is not None and listener.tls.client_ca is not None


def ask(settings: Settings, command: str, **arguments: object) -> object:
    """Ask the running gateway. Raises ControlError."""
    return control.call(control.socket_path(settings.buffer.path), command, **arguments)


def opened(settings: Settings) -> CheckOpened:
    """Get a credential for one connection from the running gateway. Raises ControlError."""
    return msgspec.convert(ask(settings, "check-open"), CheckOpened)


def check_listener(settings: Settings) -> Iterator[Finding]:
    """Connect to each port as a sensor does, with a credential from the running gateway."""
    listener = settings.mqtt_listener
    if listener is None:
        return
    if not is_running(settings.buffer.path):
        yield skipped("connecting as a sensor", f"the gateway does not run; {START}")
        return
    for door in doors(listener):
        subject = f"connecting to {door}"
        try:
            credential = opened(settings)
        except control.ControlError as error:
            yield remark("gateway-unasked", subject, not_asked(error))
            return
        begun_s = time.monotonic()
        try:
            with entered(door, listener, credential):
                took_ms = (time.monotonic() - begun_s) * 1000
        except DoorError as error:
            yield wrong("listener-closed", subject, str(error))
        except CertificateWantedError:
            yield well(
                subject,
                "TLS answers, and asks the client for a certificate (mqtt_listener.tls.client_ca), which this check "
                "does not have",
            )
        else:
            yield well(
                subject,
                f"a sensor is let in: CONNACK after {milliseconds(took_ms)}{' over TLS' if door.is_tls else ''}",
            )


def not_asked(error: control.ControlError) -> str:
    if isinstance(error, control.RequestRefusedError):
        return f"the running gateway takes no test reading ({error}); restart it after an upgrade"
    return str(error)


class CertificateWantedError(Exception):
    """The listener wants a certificate from the client."""


@contextmanager
def entered(door: Door, listener: ListenerSettings, credential: CheckOpened) -> Iterator[Conversation]:
    """Log in, and give the connection to publish on. Raises DoorError, CertificateWantedError."""
    with ExitStack() as until_end:
        link = until_end.enter_context(_connected(door, listener))
        try:
            conversation = until_end.enter_context(conversing(link, ANSWER_S))
            name = f"{_CLIENT_ID}-{secrets.token_hex(4)}"
            code = conversation.connect(name, credential.user, credential.secret.encode())
        except NoAnswerError as error:
            if wants_certificate(listener, door):
                # TLS 1.3 refuses a missing certificate only after the handshake.
                raise CertificateWantedError from error
            raise DoorError(f"{error}; is it this gateway's port? Its log says why it turns a client away") from error
        if code:
            raise DoorError(f"refused (CONNACK {code}): {_REFUSED.get(code, 'its log says why')}")
        yield conversation


def _connected(door: Door, listener: ListenerSettings) -> socket.socket:
    try:
        link = socket.create_connection((door.host, door.port), ANSWER_S)
    except OSError as error:
        raise DoorError(
            f"it cannot be reached ({error.strerror or error}), although the gateway runs: if {door.setting} was "
            "changed since, restart the gateway; its log says where it listens"
        ) from error
    if not door.is_tls:
        return link
    # The file of the certificate is checked elsewhere. This box itself need not trust it.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        return context.wrap_socket(link)
    except (OSError, ValueError) as error:
        link.close()
        if wants_certificate(listener, door):
            raise CertificateWantedError from error
        raise DoorError(f"TLS fails ({tls_reason(error)}): see the findings about the certificate") from error


# -- the site's broker ----------------------------------------------------------------------------


def check_brokers(settings: Settings) -> Iterator[Finding]:
    """Connect to each broker of the site. The client has a name of its own, so the gateway's session stays."""
    for broker in settings.mqtt_brokers:
        yield asyncio.run(_broker(settings, broker))


async def _broker(settings: Settings, broker: BrokerSettings) -> Finding:
    from gateway.site_broker.reach import REFUSALS, BrokerError, open_link, password_of  # noqa: PLC0415 - heavy

    subject = f"broker {host_and_port(broker.host, broker.port)}"
    resolver = ThreadPoolExecutor(1, thread_name_prefix="broker-name")
    begun_s = time.monotonic()
    dates = certificate_dates(settings)
    try:
        password = password_of(broker)
        link = await open_link(broker, dates if broker.tls is not None and dates() is not None else None, resolver)
        with conversing(link, broker.connect_timeout_s) as conversation:
            # With the gateway's own client identifier, the broker would end the gateway's connection.
            code = conversation.connect(
                f"{_CLIENT_ID}-{secrets.token_hex(4)}", broker.user, None if password is None else password.encode()
            )
    except BrokerError as error:
        return wrong("broker-unconnected", subject, str(error))
    except NoAnswerError as error:
        return wrong(
            "broker-unconnected",
            subject,
            f"is reached, but {error}; check that port is the broker's port for MQTT, and that [mqtt_brokers.tls] is "
            "there only if that port has TLS",
        )
    finally:
        resolver.shutdown(wait=False, cancel_futures=True)
    if code == 2:
        return remark(
            "broker-refuses",
            subject,
            "answers, but refuses this check's client identifier; sluice status says whether it takes the gateway's "
            "own",
        )
    if code:
        return wrong("broker-refuses", subject, f"refuses the connection: {REFUSALS.get(code, f'return code {code}')}")
    told = "" if broker.tls is None else " over TLS"
    return well(
        subject, f"lets this gateway in: CONNACK after {milliseconds((time.monotonic() - begun_s) * 1000)}{told}"
    )
