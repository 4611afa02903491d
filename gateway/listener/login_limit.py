"""Limits how fast anybody may guess secrets that a person chose; no I/O.

A secret of `sluice devices add` has 130 random bits. Guessing it is hopeless at any speed, so its log-ins have no
limit. Names in `mqtt_listener.users` and `mqtt_listener.operators` may have weaker secrets. Each of these names may
fail `per_minute_max` times from the address where it logged in last, and as often from all others together. Beyond
that, even the right secret is refused at once, with the answer to a wrong one. So an answer tells nothing more about
the secret, nor whether the name exists. Made-up names are not remembered, as they have no secret to guess.
"""

from gateway.host.places import Bucket


class LoginLimit:
    """Failed log-ins by name. Only names in the settings are asked about, which bounds its memory."""

    def __init__(self, per_minute_max: float) -> None:
        self._per_minute_max = per_minute_max
        self._failures: dict[tuple[str, bool], Bucket] = {}
        """By name, and whether the log-in comes from the name's last address."""
        self._homes: dict[str, str] = {}
        """The address where each name logged in last."""

    def lets_in(self, name: str, source: str, now_s: float) -> bool:
        """Return whether a right log-in is accepted; if so, remember its address."""
        if self._bucket(name, source).wait_s(now_s) > 0:
            return False
        self._homes[name] = source
        return True

    def failed(self, name: str, source: str, now_s: float) -> None:
        """Record a wrong log-in."""
        self._bucket(name, source).take(now_s)

    def _bucket(self, name: str, source: str) -> Bucket:
        key = name, self._homes.get(name) == source
        if key not in self._failures:
            self._failures[key] = Bucket(self._per_minute_max, self._per_minute_max / 60)
        return self._failures[key]
