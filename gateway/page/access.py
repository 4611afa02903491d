"""Decides who may see the status page, by address, Host and session, and counts failed log-ins. No I/O.

Times are a monotonic clock's, in seconds.
"""

import hashlib
import hmac
import ipaddress
import secrets
from collections import Counter
from typing import Final

import structlog

from gateway.host.latest import Latest

SESSION_BYTES: Final = 16
SESSIONS_MAX: Final = 64
"""Open sessions. Beyond it, the session that was used longest ago ends."""
SESSION_IDLE_S: Final = 43_200.0
"""Seconds without use after which a session ends: half a day."""
SESSION_S: Final = 604_800.0
"""Seconds after which a session ends in any case: a week."""
FAILURES_MAX: Final = 5
FAILURES_TOTAL_MAX: Final = 20
FAILURES_S: Final = 60.0
"""Failed log-ins of one address, and of all, within a minute. Further ones are refused unread."""
ADDRESSES_MAX: Final = 1_000
"""Addresses whose failures are remembered. Beyond it, the address that tried longest ago is forgotten."""
KNOWN_MAX: Final = 64
"""Addresses that were let in. Failures and silent connections of others do not keep them out."""
LINES_MAX: Final = 20
LOG_INTERVAL_S: Final = 60.0
"""Refused log-ins that are logged one by one within a minute. Further ones are summed up."""
HOST_CHARACTERS_MAX: Final = 255
_OF_A_LAN: Final = ("", ".local", ".lan", ".home.arpa", ".internal")
"""Suffixes of this box's own name. The internet has no names with them, so nobody can make one lead here."""

_log = structlog.get_logger("sluice.status_page")


# -- addresses and names ----------------------------------------------------------------------------


def is_of_a_private_network(address: str) -> bool:
    """Whether a peer's address belongs to this box, its link, or a private network."""
    found = _address(address)
    return found is not None and found.is_private and not found.is_unspecified


def is_loopback(address: str) -> bool:
    """Whether a peer's address belongs to this box alone."""
    found = _address(address)
    return found is not None and found.is_loopback


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found if mapped is None else mapped


def is_our_name(host: str, host_name: str) -> bool:
    """Whether a request's Host may be this gateway: against DNS rebinding.

    A page of another site may lead a name of its own to this box's address, and then read what this page shows. It
    cannot do so with an address, with a name of mDNS, or with a name that the internet does not have.
    """
    host = host.strip().lower()
    if not host or len(host) > HOST_CHARACTERS_MAX:
        return False
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        return bool(bracket) and _is_port(port) and is_of_a_private_network(name)
    name, colon, port = host.partition(":")
    if not _is_port(colon + port):
        return False
    name = name.removesuffix(".")
    if name == "localhost" or (name.endswith(".local") and name != ".local"):
        return True
    own = host_name.lower().partition(".")[0]
    if own and any(name == own + suffix for suffix in _OF_A_LAN):
        return True
    return is_of_a_private_network(name)


def _is_port(text: str) -> bool:
    return not text or (text.startswith(":") and text[1:].isascii() and text[1:].isdigit() and len(text) <= 6)


# -- sessions ---------------------------------------------------------------------------------------


class Sessions:
    """Open sessions, by the digest of the browser's cookie."""

    def __init__(self) -> None:
        self._by_digest = Latest[bytes, tuple[float, float]](SESSIONS_MAX)
        """Start and last use of each session."""

    def begin(self, now_s: float) -> str:
        """Begin a session, and return the value of its cookie."""
        token = secrets.token_urlsafe(SESSION_BYTES)
        self._by_digest[_digest(token)] = now_s, now_s
        return token

    def is_open(self, token: str, now_s: float) -> bool:
        """Whether a cookie belongs to an open session."""
        digest = _digest(token)
        found = self._by_digest.get(digest)
        if found is None:
            return False
        began_s, used_s = found
        if now_s - used_s > SESSION_IDLE_S or now_s - began_s > SESSION_S:
            del self._by_digest[digest]
            return False
        self._by_digest[digest] = began_s, now_s
        return True

    def end(self, token: str) -> None:
        """End a session as somebody logs out."""
        self._by_digest.pop(_digest(token), None)

    def end_all(self) -> None:
        """End all sessions as the password changes."""
        self._by_digest.clear()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


class Remembered:
    """Knows a password that was right a moment ago, for programs that send it each time: scrypt would take a core.

    It keeps neither the password nor a hash that could be tried elsewhere: the key is of this process.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._mac = b""

    def remember(self, line: str, password: str) -> None:
        """Remember that the file's line stands for this password."""
        self._mac = self._of(line, password)

    def is_right(self, line: str, password: str) -> bool:
        """Whether this password was right, and the file still has the line."""
        return bool(self._mac) and hmac.compare_digest(self._of(line, password), self._mac)

    def _of(self, line: str, password: str) -> bytes:
        return hmac.digest(self._key, f"{line}\0{password}".encode("utf-8", "replace"), "sha256")


# -- failed log-ins ---------------------------------------------------------------------------------


class LogIns:
    """Counts recent failed log-ins by address, and bounds what the log says of refused ones."""

    def __init__(self) -> None:
        self._failed = Latest[str, list[float]](ADDRESSES_MAX)
        self._failed_all: list[float] = []
        self._known = Latest[str, None](KNOWN_MAX)
        self._lines: list[float] = []
        self._unlogged: Counter[str] = Counter()
        self.refused = 0
        """Log-ins refused since the start."""

    def wait_s(self, peer: str, now_s: float) -> float:
        """Seconds that an address has to wait before it may try again; 0 if it need not."""
        waits = [_wait_s(self._failed.get(peer, []), FAILURES_MAX, now_s)]
        if peer not in self._known:
            waits.append(_wait_s(self._failed_all, FAILURES_TOTAL_MAX, now_s))
        return max(waits)

    def has_let_in(self, peer: str) -> bool:
        """Whether somebody has logged in from an address."""
        return peer in self._known

    def begin(self, peer: str, now_s: float) -> None:
        """Count a try as failed until it has succeeded, however many try at a time."""
        self._failed[peer] = [*self._failed.get(peer, []), now_s][-FAILURES_MAX:]
        self._failed_all.append(now_s)
        del self._failed_all[:-FAILURES_TOTAL_MAX]

    def succeeded(self, peer: str, began_s: float) -> None:
        """Forget an address's failures, as its password was right."""
        self._failed.pop(peer, None)
        if began_s in self._failed_all:
            self._failed_all.remove(began_s)
        self._known[peer] = None

    def note_refused(self, peer: str, why: str, now_s: float) -> None:
        """Log a refused log-in, or count it for the sum."""
        self.refused += 1
        self.sum_up(now_s)
        if len(self._lines) >= LINES_MAX:
            self._unlogged[why] += 1
            return
        self._lines.append(now_s)
        _log.warning("a log-in to the status page was refused", peer=peer, why=why)

    def sum_up(self, now_s: float, *, is_end: bool = False) -> None:
        """Log the sum of unlogged refusals once their minute is over. Call it now and then, and at the end."""
        if self._lines and (is_end or now_s - self._lines[0] > LOG_INTERVAL_S):
            self._lines.clear()
            if self._unlogged:
                _log.warning(
                    "log-ins to the status page were refused in the last minute, beside those that were logged",
                    reasons=dict(self._unlogged),
                )
                self._unlogged.clear()


def _wait_s(failures: list[float], most: int, now_s: float) -> float:
    if len(failures) < most:
        return 0.0
    return max(0.0, failures[-most] + FAILURES_S - now_s)
