"""Holds wills of MQTT 5 clients until their delay has passed, the session ends, or the client is back; no I/O."""

from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.listener.session import SessionKey

DELAYED_BYTES_MAX: Final = 4_000_000
"""Bytes of wills that may wait. A will beyond it is published at once."""
WILL_BYTES: Final = 500
"""Bytes that a will takes in memory beside its topic and payload."""


class _Delayed(NamedTuple):
    due_s: float
    bytes: int
    publish: Callable[[], None]


class DelayedWills:
    """Wills whose client ended without saying so (section 3.1.3.2.2). Times are seconds of any steady clock."""

    def __init__(self) -> None:
        self._waiting: dict[SessionKey, _Delayed] = {}
        self._bytes = 0

    def put_off(self, key: SessionKey, due_s: float, will_bytes: int, publish: Callable[[], None]) -> None:
        """Call `publish` at `due_s`, unless the session is resumed before."""
        self.session_ended(key)
        if self._bytes + will_bytes + WILL_BYTES > DELAYED_BYTES_MAX:
            publish()
            return
        self._waiting[key] = _Delayed(due_s, will_bytes + WILL_BYTES, publish)
        self._bytes += will_bytes + WILL_BYTES

    def resumed(self, key: SessionKey) -> None:
        """Drop a session's will: its client is back [MQTT-3.1.3-9]."""
        self._take(key)

    def session_ended(self, key: SessionKey) -> None:
        """Publish a session's will, as the session is over (section 3.1.2.5)."""
        will = self._take(key)
        if will is not None:
            will.publish()

    def publish_due(self, now_s: float) -> None:
        """Publish the wills that are due."""
        for key in [key for key, will in self._waiting.items() if will.due_s <= now_s]:
            self.session_ended(key)

    def finish(self) -> None:
        """Publish all wills, as the listener ends."""
        for key in tuple(self._waiting):
            self.session_ended(key)

    def _take(self, key: SessionKey) -> _Delayed | None:
        will = self._waiting.pop(key, None)
        if will is not None:
            self._bytes -= will.bytes
        return will
