"""Tells when the kernel changes a link, an address or a route, and which own address leads to a peer."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import NamedTuple

import structlog

# linux/rtnetlink.h
RTMGRP_LINK = 0x1
RTMGRP_IPV4_IFADDR = 0x10
RTMGRP_IPV4_ROUTE = 0x40
RTMGRP_IPV6_IFADDR = 0x100
RTMGRP_IPV6_ROUTE = 0x400
GROUPS = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_IFADDR | RTMGRP_IPV6_ROUTE

COALESCE_S = 0.2
"""Seconds in which changes count as one: a DHCP client takes an address away, sets another, then sets the routes."""
MESSAGE_BYTES_MAX = 65_536
MESSAGES_MAX = 10_000
"""Messages discarded at once. One that is left counts as another change."""
HOSTS_MAX = 64
"""Peers whose address is remembered."""

log = structlog.get_logger()


async def watch(on_change: Callable[[], None]) -> None:
    """Call `on_change` on the event loop at each change, at most once in `COALESCE_S`, until cancelled.

    Some changes concern no connection (a Wi-Fi scan, a router's advertisement): ask `source_address` for the effect.
    If the kernel refuses such a socket, this logs it once and returns.
    """
    with ExitStack() as stack:
        try:
            kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK
            route_socket = stack.enter_context(socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE))
            route_socket.bind((0, GROUPS))
        except OSError as error:
            _note_refused(error)
            return
        while True:
            try:
                await _burst(route_socket)
            except OSError as error:
                _note_refused(error)
                return
            on_change()


def source_address(peer: tuple[str, int]) -> str | None:
    """Return the own address from which this box would now reach `peer`, an IP address and port.

    Returns None if there is no route. Sends nothing. Raises ValueError if the peer's host is no IP address.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(peer[0]).version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_own_address(address: str) -> bool:
    """Whether an IP address is one of this box's now, so that a socket can be bound to it.

    True if that cannot be told (no more descriptors), and if the kernel binds to any address
    (net.ipv4.ip_nonlocal_bind): a dead connection from it is then found by its time-out. Raises ValueError if
    `address` is no IP address.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except socket.gaierror:
        # An address such as fe80::1%wlan0, when wlan0 is gone.
        return False
    except OSError as error:
        return error.errno not in {errno.EADDRNOTAVAIL, errno.ENODEV}
    return True


class AddressChange(NamedTuple):
    """This box now reaches `host` from its own address `new`, before from `old`."""

    host: str
    old: str
    new: str


class AddressWatch:
    """Tells when this box's address towards a peer has changed.

    A peer is remembered while nobody asks about it, and while it cannot be reached. If a link comes back with another
    address, then that is a change.
    """

    def __init__(self, address: Callable[[tuple[str, int]], str | None] = source_address) -> None:
        """`address` returns the own address towards a peer, or None if there is no route."""
        self._address = address
        self._known: dict[str, str] = {}

    def changes(self, peers: Iterable[tuple[str, int]]) -> list[AddressChange]:
        """Return how the address towards each peer's host has changed; its first address is no change."""
        found = []
        for host, port in dict(peers).items():
            new = self._address((host, port))
            old = self._known.pop(host, None)
            if new is not None and old is not None and new != old:
                found.append(AddressChange(host, old, new))
            latest = new or old
            if latest is not None:
                self._known[host] = latest
        while len(self._known) > HOSTS_MAX:
            del self._known[next(iter(self._known))]
        return found


async def _burst(route_socket: socket.socket) -> None:
    """Wait for a message, and for those that come soon after it. Lost messages (ENOBUFS) are a change too."""
    try:
        await asyncio.get_running_loop().sock_recv(route_socket, MESSAGE_BYTES_MAX)
    except OSError as error:
        if error.errno != errno.ENOBUFS:
            raise
    await asyncio.sleep(COALESCE_S)
    _discard_waiting(route_socket)


def _discard_waiting(route_socket: socket.socket) -> None:
    with suppress(BlockingIOError):
        for _ in range(MESSAGES_MAX):
            try:
                route_socket.recv(MESSAGE_BYTES_MAX)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise


def _note_refused(error: OSError) -> None:
    log.info(
        "the kernel does not tell when this box's address changes: connections that died of it are found by their "
        "time-out, a little later. To mend it, allow AF_NETLINK (RestrictAddressFamilies= in the service's unit)",
        error=str(error),
    )
