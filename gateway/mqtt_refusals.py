"""What the MQTT listener refuses or ends: why, how often, and what the log says of it, which nobody may flood."""

import asyncio
from collections import Counter
from collections.abc import Container
from typing import Final

import structlog

LOG_INTERVAL_S: Final = 60.0
"""One refusal is logged of each client and reason in that time, and at its end the sum of all others."""
LINES_MAX: Final = 20
"""Refusals that are logged in LOG_INTERVAL_S of user names that are in the configuration, and as many of all others.

Whoever makes names up so hides no mistake of a sensor whose user name is in the configuration. A sensor whose user name
is misspelt, or that gives none, is one of the others: among many made-up names it may be counted, and not named."""
TAKEN_OVER: Final = "taken-over"
"""Why a connection ends whose client has connected anew: nothing was refused."""
_ENDED: Final = "connection ended by the MQTT listener"
ENDS: Final = {
    "keep-alive-timeout": f"{_ENDED}: nothing more was heard; check its power and radio",
    "write-stall": _ENDED,
    "connect-timeout": _ENDED,
}
"""What the log says where a connection ends because the client does nothing: it asked for nothing to be refused."""
NAME_CHARACTERS_MAX: Final = 80
"""As much of a name as the log repeats."""

_log = structlog.get_logger("sluice.mqtt_listener")


class RefusedError(Exception):
    """What a client asks for will not do: its connection ends, after `answer`.

    `reason` is a short stable name to count by; the message says what happened, and the setting where there is one.
    """

    def __init__(self, reason: str, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.answer = answer


class Refusals:
    """Counts refusals and ends by reason, and logs refusals by client."""

    def __init__(self, configured: Container[str]) -> None:
        """`configured` are the user names that are in the configuration."""
        self.counts: Counter[str] = Counter()
        self._configured = configured
        self._logged: set[tuple[str, str]] = set()
        """Reasons and clients of this interval's lines, where the client has a name that is configured."""
        self._logged_others: set[tuple[str, str]] = set()
        self._logged_taken_over: set[tuple[str, str]] = set()
        self._unlogged: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def refused(
        self, reason: str, message: str, *, peer: str = "", user: str | None = None, client_id: str | None = None
    ) -> None:
        """Count a refusal; log it where it is the first of its client and reason, or sum it up.

        A client is known by its user name, its client identifier, or its address: by the first of them that there is.
        """
        self.counts[reason] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._end_interval)
        client = (reason, _cut(user or client_id or peer.rpartition(":")[0]))
        logged = self._logged if user in self._configured else self._logged_others
        if reason == TAKEN_OVER:
            # They take no refusal's place in the log.
            logged = self._logged_taken_over
        if client in logged or len(logged) >= LINES_MAX:
            self._unlogged[reason] += 1
            return
        logged.add(client)
        whose = {
            "peer": peer,
            "user": None if user is None else _cut(user),
            "client_id": None if client_id is None else _cut(client_id),
        }
        if reason == TAKEN_OVER:
            _log.info("an older connection was ended: the same client identifier connected again", **whose)
        else:
            heading = ENDS.get(reason, "refused by the MQTT listener")
            _log.warning(heading, reason=reason, why=message, **whose)

    def finish(self) -> None:
        """Log what is not logged yet: the listener ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._end_interval()

    def _end_interval(self) -> None:
        self._timer = None
        self._logged.clear()
        self._logged_others.clear()
        self._logged_taken_over.clear()
        again = self._unlogged.pop(TAKEN_OVER, 0)
        if again:
            _log.info("older connections were ended in the last minute, beside those that were logged", count=again)
        if self._unlogged:
            _log.warning(
                "refused or ended by the MQTT listener in the last minute, beside what was logged",
                reasons=dict(self._unlogged),
            )
            self._unlogged.clear()


def _cut(name: str) -> str:
    return name[:NAME_CHARACTERS_MAX]
