"""How fast somebody may guess at secrets that a person thought up, without I/O.

A secret of `sluice devices add` has 130 random bits. Guessing it is hopeless at any speed, so its log-ins are judged at
once and counted nowhere. The names in `mqtt_listener.users` and `mqtt_listener.operators` may have weaker ones. Each of
these names may fail so often a minute where it logged in last, and as often from everywhere else. Beyond that a right
secret is answered as a wrong one is, at once. So an answer tells nothing more about the secret, nor whether the name
exists. Made-up names are not remembered: there is nothing to be guessed.
"""

from gateway.host.places import Bucket


class LoginLimit:
    """Failed log-ins by name. Its memory is bounded by the names in the settings, the only ones it is asked about."""

    def __init__(self, per_minute_max: float) -> None:
        self._per_minute_max = per_minute_max
        self._failures: dict[tuple[str, bool], Bucket] = {}
        """By name, and whether it is tried where it logged in last."""
        self._homes: dict[str, str] = {}
        """The address where each name logged in last."""

    def lets_in(self, name: str, source: str, now_s: float) -> bool:
        """Tell whether a right log-in counts as one."""
        if self._bucket(name, source).wait_s(now_s) > 0:
            return False
        self._homes[name] = source
        return True

    def failed(self, name: str, source: str, now_s: float) -> None:
        """Take note of a wrong log-in."""
        self._bucket(name, source).take(now_s)

    def _bucket(self, name: str, source: str) -> Bucket:
        key = name, self._homes.get(name) == source
        if key not in self._failures:
            self._failures[key] = Bucket(self._per_minute_max, self._per_minute_max / 60)
        return self._failures[key]
