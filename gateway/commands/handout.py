"""What a person types into a sensor so that it finds this gateway and is let in: addresses, port, topics, a QR code."""

import fcntl
import io
import ipaddress
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.host.processes import running
from gateway.listener.credentials import Made
from gateway.settings import DEFAULT_ROUTE, ListenerSettings, Settings
from gateway.tls.certificates import CertificateFileError, read_certificates, read_names

HOSTS_MAX: Final = 4
_SIOCGIFADDR: Final = 0x8915
"""netdevice(7): an interface's IPv4 address."""
_AVAHI: Final = Path("/run/avahi-daemon/socket")
_UDP: Final = Path("/proc/net")
_MDNS_PORT: Final = 5353
_VARIABLE = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


class Handout(Struct, frozen=True):
    """One device's, or operator's."""

    user: str
    secret: str
    hosts: tuple[str, ...]
    """Any of them leads here, the first one the longest."""
    port: int
    tls: bool
    plain_port: int | None
    """Beside the one with TLS, where there is one."""
    topics: tuple[str, ...]
    uri: str
    """The same in one, as the QR code has it."""

    def __repr__(self) -> str:
        """Without the secret, for tracebacks and logs."""
        return f"Handout({self.user!r})"


def handout(settings: Settings, listener: ListenerSettings, made: Made, *, operator: bool) -> Handout:
    """What to type for a secret that was made just now."""
    hosts = tuple(_hosts(listener))
    tls, port = listener.tls, listener.port
    scheme = "mqtt"
    if tls is not None:
        scheme, port = "mqtts", tls.port
    host = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
    # Who logs in as one device writes where a route makes that device of its topics.
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
    """Whether a listener there is reached by nobody else."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def qr_code(text: str) -> str:
    """A QR code in half blocks, for a terminal that is light on dark."""
    import segno  # noqa: PLC0415 - only where one is shown

    out = io.StringIO()
    segno.make_qr(text, error="l").terminal(out, compact=True, border=2)
    return out.getvalue()


def _topic(template: str, device: str) -> str:
    """A topic as a person reads it: the device's name, and what is left to choose in capitals."""
    named = template.replace("{device}", device)
    return _VARIABLE.sub(lambda variable: variable[1].upper(), named)


def _hosts(listener: ListenerSettings) -> Iterator[str]:
    """By what clients reach the listener; with TLS, what its certificate is for: no other name will do then."""
    names: list[str] = []
    if listener.tls is not None:
        with suppress(CertificateFileError):
            read_certificates(listener.tls.certificate)
            names = read_names(listener.tls.certificate)
    if not names:
        names = [*own_hosts(listener.host)]
    yield from dict.fromkeys(names[:HOSTS_MAX] or [socket.gethostname()])


def own_hosts(host: str) -> Iterator[str]:
    """By what others reach this box where something listens at `host`: a name that is announced, then addresses."""
    if host in _EVERYWHERE:
        yield from _own_name()
        yield from _own_addresses()
    else:
        yield host


def _own_name() -> Iterator[str]:
    """This box's name by mDNS, where something here announces it: elsewhere it would lead nobody here."""
    name = socket.gethostname().partition(".")[0]
    if name and name != "localhost" and _is_announced():
        yield f"{name}.local"


def _is_announced() -> bool:
    """Whether Avahi runs, or systemd-resolved with MulticastDNS: then it has the port of RFC 6762."""
    if _AVAHI.exists():
        return True
    tables = [_UDP / name for name in ("udp", "udp6")]
    with suppress(OSError):
        bound = "".join(table.read_text(encoding="ascii") for table in tables if table.exists())
        return f":{_MDNS_PORT:04X} " in bound and running("systemd-resolve") is not None
    return False


def _own_addresses() -> Iterator[str]:
    """The IPv4 addresses that this box has on its networks now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            # One without an address, or without a cable.
            with suppress(OSError):
                address = ipaddress.ip_address(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24])
                if not address.is_loopback:
                    yield str(address)
