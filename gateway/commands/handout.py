"""Collects what a person types into a sensor so that it can log in here: addresses, port, topics and a QR code."""

import io
import ipaddress
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.host.own_addresses import ipv4_addresses
from gateway.host.processes import running
from gateway.listener.credentials import Made
from gateway.settings import DEFAULT_ROUTE, ListenerSettings, Settings
from gateway.tls.certificates import CertificateFileError, read_certificates, read_names

HOSTS_MAX: Final = 4
_AVAHI: Final = Path("/run/avahi-daemon/socket")
_UDP: Final = Path("/proc/net")
_MDNS_PORT: Final = 5353
_VARIABLE = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


class Handout(Struct, frozen=True):
    """Log-in data of one device or operator."""

    user: str
    secret: str
    hosts: tuple[str, ...]
    """Names and addresses of this box. The first one is likely to lead here for the longest time."""
    port: int
    tls: bool
    plain_port: int | None
    """Port without TLS, if the listener has one beside the port with TLS."""
    topics: tuple[str, ...]
    uri: str
    """User, secret, first host and port in one text, for the QR code."""

    def __repr__(self) -> str:
        """Leave the secret out of tracebacks and logs."""
        return f"Handout({self.user!r})"


def handout(settings: Settings, listener: ListenerSettings, made: Made, *, operator: bool) -> Handout:
    """Collect what to type for a secret that was just made."""
    hosts = tuple(_hosts(listener))
    tls, port = listener.tls, listener.port
    scheme = "mqtt"
    if tls is not None:
        scheme, port = "mqtts", tls.port
    host = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
    # A device may write to a topic if the topic's route makes that device's name as the key.
    routes = [route for route in settings.routes if route.key == DEFAULT_ROUTE.key]
    its_own = [route.topic for route in routes if route.device in {None, made.name}]
    topics = listener.command_topics if operator else its_own
    return Handout(
        made.name,
        made.secret,
        hosts,
        port,
        tls is not None,
        (listener.port or None) if tls is not None else None,
        tuple(dict.fromkeys(_topic(topic, "DEVICE" if operator else made.name) for topic in topics)),
        f"{scheme}://{made.name}:{made.secret}@{host}:{port}",
    )


def is_only_for_this_box(host: str) -> bool:
    """Tell whether only programs on this box can reach a listener at `host`."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def qr_code(text: str) -> str:
    """QR code in half blocks, for a terminal with light text on a dark background."""
    import segno  # noqa: PLC0415 - only where one is shown

    out = io.StringIO()
    segno.make_qr(text, error="l").terminal(out, compact=True, border=2)
    return out.getvalue()


def _topic(template: str, device: str) -> str:
    """Fill the device's name into a topic, and put the variables that are left in capitals."""
    named = template.replace("{device}", device)
    return _VARIABLE.sub(lambda variable: variable[1].upper(), named)


def _hosts(listener: ListenerSettings) -> Iterator[str]:
    """Hosts by which clients reach the listener. With TLS they are the names in its certificate: others would fail."""
    names: list[str] = []
    if listener.tls is not None:
        with suppress(CertificateFileError):
            read_certificates(listener.tls.certificate)
            names = read_names(listener.tls.certificate)
    if not names:
        names = [*own_hosts(listener.host)]
    yield from dict.fromkeys(names[:HOSTS_MAX] or [socket.gethostname()])


def own_hosts(host: str) -> Iterator[str]:
    """Hosts by which others reach what listens at `host`: this box's announced name, then its addresses."""
    if host in _EVERYWHERE:
        yield from _own_name()
        yield from ipv4_addresses()
    else:
        yield host


def _own_name() -> Iterator[str]:
    """This box's mDNS name, if a program here announces it."""
    name = socket.gethostname().partition(".")[0]
    if name and name != "localhost" and _is_announced():
        yield f"{name}.local"


def _is_announced() -> bool:
    """Tell whether Avahi runs, or systemd-resolved with MulticastDNS, which then has the port of RFC 6762."""
    if _AVAHI.exists():
        return True
    tables = [_UDP / name for name in ("udp", "udp6")]
    with suppress(OSError):
        bound = "".join(table.read_text(encoding="ascii") for table in tables if table.exists())
        return f":{_MDNS_PORT:04X} " in bound and running("systemd-resolve") is not None
    return False
