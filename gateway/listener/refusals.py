"""What the MQTT listener refuses or ends: why, how often, and what the log says of it, which nobody may flood."""

import asyncio
import time
from collections import Counter
from collections.abc import Container
from typing import Final, NamedTuple

import structlog

from gateway.host.terminal_text import counted
from gateway.mqtt.protocol import Connect

LOG_INTERVAL_S: Final = 60.0
"""One refusal is logged of each client and reason in that time, and at its end the sum of all others."""
LINES_MAX: Final = 20
"""Refusals that are logged in LOG_INTERVAL_S of user names that are in the configuration, and as many of all others.

Whoever makes names up so hides no mistake of a sensor whose user name is in the configuration. A sensor whose user name
is misspelt, or that gives none, is one of the others: among many made-up names it may be counted, and not named."""
TAKEN_OVER: Final = "taken-over"
"""Why a connection ends whose client has connected anew: nothing was refused."""
REVOKED: Final = "credentials-ended"
"""Why one ends whose secret was good when it began, and is no more."""
TOO_MANY_UNFINISHED: Final = "too-many-unfinished"
"""Why one ends whose client has more QoS 2 exchanges open than it may."""
SHUTDOWN: Final = "shutdown"
INTAKE_REFUSED: Final = "intake-refused"
HELD_TOO_MUCH: Final = "held-too-much"
OUR_DOING: Final = frozenset({SHUTDOWN, TAKEN_OVER, REVOKED, TOO_MANY_UNFINISHED, INTAKE_REFUSED, HELD_TOO_MUCH})
"""Ends that say nothing of the device, which is alive. Its will is published all the same [MQTT-3.1.2-8]."""
_ENDED: Final = "connection ended by the MQTT listener"
ENDS: Final = {
    "keep-alive-timeout": f"{_ENDED}: nothing more was heard; check its power and radio",
    "write-stall": _ENDED,
    REVOKED: _ENDED,
    "connect-timeout": _ENDED,
}
"""What the log says where a connection ends although the client asked for nothing to be refused."""
NAME_CHARACTERS_MAX: Final = 80
"""As much of a name as the log repeats."""

LOG_IN_REASONS: Final = frozenset(
    {
        "bad-credentials",
        "no-credentials",
        "certificate-of-no-user",
        "tls-handshake-failed",
        "too-many-failed-logins",
    }
)
"""Of a sensor that cannot log in: it is set up wrongly, or others fail under its name."""
LATELY_MAX: Final = 20
"""Sensors of which is remembered that their log-in was refused: of more, those of which it was so last."""
LOGIN: Final = "refused log-in"
"""What a line of the log begins with, for those who look for it."""
LOGINS_AGAIN: Final = "refused log-ins in the last minute, beside those that have a line"
ADDRESSES_MAX: Final = 4
"""Lines in LOG_INTERVAL_S of one name, from several addresses."""
SHOWN_CHARACTERS: Final = 2
STRETCH_CHARACTERS: Final = 8
"""A shorter piece of a secret gives it away to nobody."""
HIDDEN_CHARACTERS_MAX: Final = 256
"""As much of a user name or password as is looked for in other texts."""

_log = structlog.get_logger("sluice.mqtt_listener")


class _Login(NamedTuple):
    """Refused log-ins that are told as one."""

    is_known: bool
    user: str | None
    """As it is told."""
    address: str
    reason: str


class _Late(NamedTuple):
    """The last that was refused of one sensor."""

    user: str | None
    """As it is told."""
    address: str
    why: str
    at_s: float


class ClientRefusedError(Exception):
    """What a client asks for will not do: its connection ends, after `answer`.

    `reason` is a short stable name to count by; the message says what happened, and the setting where there is one.
    """

    def __init__(self, reason: str, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.answer = answer


class LoginRefusedError(ClientRefusedError):
    """A client's credentials will not do."""


class Refusals:
    """Counts refusals and ends by reason, and logs refusals by client."""

    def __init__(self, configured: Container[str]) -> None:
        """`configured` are the user names of those who may log in."""
        self.counts: Counter[str] = Counter()
        self._configured = configured
        self._logged: set[tuple[str, str]] = set()
        """Reasons and clients of this interval's lines, where the client has a name that is configured."""
        self._logged_others: set[tuple[str, str]] = set()
        self._logged_taken_over: set[tuple[str, str]] = set()
        self._unlogged: Counter[str] = Counter()
        self._logins: Counter[_Login] = Counter()
        """Refused log-ins of this interval that have a line, and how many more there were of each."""
        self._unlogged_logins: Counter[str] = Counter()
        self._late: dict[str, _Late] = {}
        """By user name that is configured, or by address: those that did not log in since, the last at the end."""
        self._timer: asyncio.TimerHandle | None = None

    def refused(
        self, reason: str, message: str, *, peer: str = "", user: str | None = None, client_id: str | None = None
    ) -> None:
        """Count a refusal; log it where it is the first of its client and reason, or sum it up.

        A client is known by its user name, its client identifier, or its address: by the first of them that there is.
        """
        self._count(reason)
        self._remember(reason, message, None, peer, is_known=False)
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

    def refused_login(self, reason: str, message: str, connect: Connect, peer: str) -> None:
        """Count a refused log-in, and log it: the first of each name, address and reason, or in the sum of them.

        A name that nobody has here is not shown: it is the secret, where a person put the two into each other's place,
        and no rule tells a secret from a name. Its beginning and its length are enough to find out whose it is.
        """
        self._count(reason)
        user = connect.user_name
        is_known = user in self._configured
        self._remember(reason, message, user, peer, is_known=is_known)
        login = _Login(is_known, _name_told(user, is_known=is_known), peer.rpartition(":")[0], reason)
        if login in self._logins:
            self._logins[login] += 1
            return
        # Whoever makes names up takes no line from those that are known, nor one name all of them.
        alike = [each for each in self._logins if each.is_known == is_known]
        of_name = sum(each.user == login.user for each in alike)
        if len(alike) >= LINES_MAX or (is_known and of_name >= ADDRESSES_MAX):
            self._unlogged_logins[reason] += 1
            return
        self._logins[login] = 0
        _log.warning(
            LOGIN,
            reason=reason,
            why=message,
            user=login.user,
            peer=peer,
            client_id=_client_id_told(connect, is_known=is_known),
        )

    def let_in(self, user: str | None, peer: str) -> None:
        """Take note of who logged in: what was refused of it before is mended."""
        self._late.pop(peer.rpartition(":")[0], None)
        if user is not None:
            self._late.pop(user, None)

    def lately(self) -> list[dict[str, object]]:
        """For the status page: whose log-in was refused, and why, of those that did not log in since; newest first."""
        now_s = time.monotonic()
        return [
            {"user": each.user, "address": each.address, "why": each.why, "ago_s": round(now_s - each.at_s, 1)}
            for each in reversed(self._late.values())
        ]

    def _remember(self, reason: str, why: str, user: str | None, peer: str, *, is_known: bool) -> None:
        if reason not in LOG_IN_REASONS:
            return
        address = peer.rpartition(":")[0]
        sensor = user if is_known and user is not None else address
        self._late.pop(sensor, None)
        if len(self._late) >= LATELY_MAX:
            del self._late[next(iter(self._late))]
        self._late[sensor] = _Late(_name_told(user, is_known=is_known), address, why, time.monotonic())

    def _count(self, reason: str) -> None:
        self.counts[reason] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._end_interval)

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
        self._tell_logins()

    def _tell_logins(self) -> None:
        """Log how many log-ins were refused beside those that have a line of this interval."""
        again = {
            f"{login.user or '-'} from {login.address}: {login.reason}": more
            for login, more in self._logins.items()
            if more
        }
        others = dict(self._unlogged_logins)
        self._logins.clear()
        self._unlogged_logins.clear()
        if again or others:
            count = sum(again.values()) + sum(others.values())
            _log.warning(LOGINS_AGAIN, count=count, again=again, others=others)


def _name_told(name: str | None, *, is_known: bool) -> str | None:
    if name is None or is_known:
        return name
    return f"{name[:SHOWN_CHARACTERS]}… ({counted(len(name), 'character')}, no device's name)"


def _client_id_told(connect: Connect, *, is_known: bool) -> str:
    """The client identifier; masked where it repeats what is not to be shown."""
    client_id, user = connect.client_id, "" if is_known else connect.user_name or ""
    password = (connect.password or b"").decode(errors="replace")
    if _shares_much(client_id, user) or _shares_much(client_id, password):
        return f"{client_id[:SHOWN_CHARACTERS]}… ({counted(len(client_id), 'character')})"
    return _cut(client_id)


def _shares_much(told: str, hidden: str) -> bool:
    """Whether a text holds a stretch of what is to be hidden, or all of it where that is short."""
    length = min(len(hidden), STRETCH_CHARACTERS)
    ends = min(len(hidden), HIDDEN_CHARACTERS_MAX) - length + 1
    return length > 0 and any(hidden[at : at + length] in told for at in range(ends))


def _cut(name: str) -> str:
    return name[:NAME_CHARACTERS_MAX]
