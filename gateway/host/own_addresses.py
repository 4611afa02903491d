"""This box's present addresses on its networks."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_SIOCGIFADDR: Final = 0x8915
"""Request of netdevice(7) for an interface's IPv4 address."""
_IPV6: Final = Path("/proc/net/if_inet6")
_GLOBAL: Final = 0x00
"""Scope of an address that leads across routers (include/net/ipv6.h, IPV6_ADDR_SCOPE_TYPE)."""
_TEMPORARY: Final = 0x01
"""Flag of an address that is for privacy, and gives way to another one before long (linux/if_addr.h)."""


def ipv4_addresses() -> Iterator[str]:
    """Yield the IPv4 address of each interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            # An interface may have no address or no cable.
            with suppress(OSError):
                address = ipaddress.ip_address(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24])
                if not address.is_loopback:
                    yield str(address)


def ipv6_addresses(table: Path = _IPV6) -> Iterator[str]:
    """Yield the IPv6 addresses that lead across routers and stay, as proc(5) has them."""
    try:
        lines = table.read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        digits, _, _, scope, flags, *_ = line.split()
        if int(scope, 16) == _GLOBAL and not int(flags, 16) & _TEMPORARY:
            yield str(ipaddress.IPv6Address(bytes.fromhex(digits)))
