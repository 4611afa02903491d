"""Bounds connections to this box by places, by a rate with a burst, and by host. Does no I/O.

Times are seconds of a monotonic clock.
"""

import socket
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

_IPV4_MAPPED: Final = bytes(10) + b"\xff\xff"
Holder = TypeVar("Holder")


def source_of(host: str) -> str:
    """Return the address that counts as one host: IPv4's as it is, and IPv6's /64, which one host may have whole."""
    if ":" not in host:
        return host
    try:
        address = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    except OSError:
        return host
    if address.startswith(_IPV4_MAPPED):
        return socket.inet_ntop(socket.AF_INET, address[len(_IPV4_MAPPED) :])
    # `ipaddress` takes ten times as long, and a flood needs this for each connection.
    return f"{socket.inet_ntop(socket.AF_INET6, address[:8] + bytes(8))}/64"


class Bucket:
    """A token bucket: `most` tokens at once, and `per_s` more each second."""

    __slots__ = ("_at_s", "_most", "_per_s", "_tokens")

    def __init__(self, most: float, per_s: float) -> None:
        self._most = most
        self._per_s = per_s
        self._tokens = most
        self._at_s = 0.0

    def take(self, now_s: float) -> bool:
        """Take a token, if there is one."""
        if self.wait_s(now_s) > 0:
            return False
        self._tokens -= 1
        return True

    def wait_s(self, now_s: float) -> float:
        """Seconds until there is a token; 0 if there is one."""
        self._tokens = min(self._most, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return max(0.0, (1 - self._tokens) / self._per_s)


class Places(Generic[Holder]):
    """A bounded number of places for connections.

    A connection waits (for its log-in, or for its next request) or is kept. If all places are taken, the connection
    that has waited longest may be closed for a newcomer. A kept one may not.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: OrderedDict[Holder, None] = OrderedDict()
        self._kept: set[Holder] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._kept)

    def __iter__(self) -> Iterator[Holder]:
        yield from self._waiting
        yield from self._kept

    @property
    def are_taken(self) -> bool:
        """Whether no place is left."""
        return len(self) >= self.most

    def longest_waiting(self) -> Holder | None:
        """The holder to close first; None if nobody waits."""
        return next(iter(self._waiting), None)

    def enter(self, newcomer: Holder) -> None:
        """Give a place to a newcomer, who waits."""
        self._waiting[newcomer] = None

    def keep(self, holder: Holder) -> None:
        """Keep the place of a holder that waits, if it still has it."""
        if holder in self._waiting:
            del self._waiting[holder]
            self._kept.add(holder)

    def wait(self, holder: Holder) -> None:
        """Make a kept holder wait again, behind all others."""
        if holder in self._kept:
            self._kept.remove(holder)
            self._waiting[holder] = None

    def leave(self, holder: Holder) -> None:
        """Take back a holder's place, if it still has one."""
        self._waiting.pop(holder, None)
        self._kept.discard(holder)
