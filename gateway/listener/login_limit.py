"""How fast somebody may guess at the MQTT listener's secrets, without I/O and without locking out a neighbour.

Where secrets are the 130 random bits that `sluice devices add` makes, guessing is hopeless at any speed; but
`mqtt_listener.users` may hold what a person thought up. And a sensor whose secret is wrong tries for ever, often from
behind one address with others that are right. So nobody is ever locked out by what another one does:

- **A name from an address** (IPv6: its /64, all of which one host may have) that has failed too often is judged only
  after a pause, whether it is right or wrong this time. To delay failures alone would slow down nobody who guesses:
  success comes at once, so that whoever has no answer at once knows, and tries the next. Others behind the same address
  have other names, and do not notice.
- **A name from anywhere** is judged after that pause once it has failed ten times as often, but not where it logged in
  last: the true sensor does not pay for those who guess at it from elsewhere.
- **An address**, whatever the names, has its failures answered after that pause once they are ten times as many: this
  slows down sensors that try in a loop. Whoever is right is let in at once all the same.

Those that wait are few: beyond `held_max`, and small shares of it, the connection ends without an answer, and with the
first two of these unjudged. What is remembered is bounded, and who failed longest ago is forgotten first: that lets a
guesser with thousands of made-up names make room for a few more guesses, and never turns a sensor away.
"""

import ipaddress
from collections import Counter
from typing import Final, NamedTuple

MANY: Final = 10
"""So many times more failures of one address, or of one name, are answered at once than of one name at one address."""
ENTRIES_MAX: Final = 4_096
"""Names at addresses, addresses, and names whose failures are remembered, and names whose last address is."""
IPV6_PREFIX: Final = 64
_PAIR_SHARE: Final = 64
_SHARE: Final = 16
"""Of those that wait: one in 64 of one name at one address, one in 16 of one address or of one name."""


NAME_CHARACTERS_MAX: Final = 64
"""As much of a name as is remembered: no device's is longer."""


class Attempt(NamedTuple):
    """Who tries to log in."""

    source: str
    user: str

    def __repr__(self) -> str:
        """Without the name, which may be a secret in the wrong place: asyncio logs callbacks that fail."""
        return f"Attempt({self.source!r}, ...)"

    @classmethod
    def of(cls, peer: str, user: str | None) -> "Attempt":
        """As `address:port` and the user name of a CONNECT have it."""
        return cls(source_of(peer), (user or "")[:NAME_CHARACTERS_MAX])


class Waiting(NamedTuple):
    """A log-in that waits; to be given back by `LoginLimit.release`."""

    attempt: Attempt
    seconds: float


class TooManyError(Exception):
    """So many wait already that this one ends without an answer."""


def source_of(peer: str) -> str:
    """What counts as one address of `address:port`: IPv6's /64."""
    host = peer.rpartition(":")[0].partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


class LoginLimit:
    """Failed log-ins, and those that wait. Times are seconds of a monotonic clock."""

    def __init__(self, per_minute_max: float, delay_s: float, held_max: int) -> None:
        self._delay_s = delay_s
        self._held_max = held_max
        self._pairs = _Failures(per_minute_max)
        self._names = _Failures(MANY * per_minute_max)
        self._sources = _Failures(MANY * per_minute_max)
        self._held: Counter[object] = Counter()
        self._homes: dict[str, int] = {}
        """By name, the hash of the address where it logged in last."""

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return self._held[None]

    def before(self, attempt: Attempt, now_s: float) -> Waiting | None:
        """Tell whether a log-in has to wait before it is judged. Raises TooManyError where it is not to be judged."""
        if self._pairs.too_many(attempt, now_s):
            return self._hold(attempt)
        if self._names.too_many(attempt.user, now_s) and self._homes.get(attempt.user) != hash(attempt.source):
            return self._hold(attempt)
        return None

    def failed(self, attempt: Attempt, now_s: float, *, has_waited: bool) -> Waiting | None:
        """Take note that a log-in was wrong; tell whether its answer has to wait. Raises TooManyError for no answer."""
        too_many = self._sources.too_many(attempt.source, now_s)
        self._pairs.add(attempt, now_s)
        self._names.add(attempt.user, now_s)
        self._sources.add(attempt.source, now_s)
        return self._hold(attempt) if too_many and not has_waited else None

    def succeeded(self, attempt: Attempt) -> None:
        """Take note that a log-in was right."""
        self._pairs.forget(attempt)
        self._homes.pop(attempt.user, None)
        self._homes[attempt.user] = hash(attempt.source)
        if len(self._homes) > ENTRIES_MAX:
            del self._homes[next(iter(self._homes))]

    def release(self, waiting: Waiting) -> None:
        """Take note that a log-in waits no more."""
        for key in _shares(waiting.attempt):
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    def _hold(self, attempt: Attempt) -> Waiting:
        for key, share in _shares(attempt).items():
            if self._held[key] >= max(1, self._held_max // share):
                raise TooManyError
        self._held.update(_shares(attempt).keys())
        return Waiting(attempt, self._delay_s)


def _shares(attempt: Attempt) -> dict[object, int]:
    """What a log-in that waits counts against, and the share that each may have."""
    return {
        None: 1,
        attempt: _PAIR_SHARE,
        ("source", attempt.source): _SHARE,
        ("user", attempt.user): _SHARE,
    }


class _Failures:
    """Failures by key, which leak away at the rate at which they are allowed."""

    def __init__(self, per_minute_max: float) -> None:
        self._per_minute_max = per_minute_max
        self._levels: dict[object, tuple[float, float]] = {}
        """How many, and as of when; who failed longest ago comes first."""

    def too_many(self, key: object, now_s: float) -> bool:
        return self._level(key, now_s) > self._per_minute_max - 1

    def add(self, key: object, now_s: float) -> None:
        # Twice as many at most: a minute after the last one nothing of it is felt.
        level = min(self._level(key, now_s) + 1, 2 * self._per_minute_max)
        self._levels.pop(key, None)
        self._levels[key] = level, now_s
        if len(self._levels) > ENTRIES_MAX:
            del self._levels[next(iter(self._levels))]

    def forget(self, key: object) -> None:
        self._levels.pop(key, None)

    def _level(self, key: object, now_s: float) -> float:
        level, at_s = self._levels.get(key, (0.0, now_s))
        return max(0.0, level - (now_s - at_s) * self._per_minute_max / 60)
