"""Counts and logs what the MQTT listener refuses or ends, so that nobody can flood the log."""

import asyncio
import time
from collections import Counter
from collections.abc import Container
from typing import Final, NamedTuple

import structlog

from gateway.host.latest import Latest
from gateway.host.terminal_text import counted
from gateway.mqtt.protocol import Connect
from gateway.mqtt.reason_codes import ReasonCode

LOG_INTERVAL_S: Final = 60.0
"""Seconds in which one refusal of each client and reason is logged. Then the sum of all others is logged."""
LINES_MAX: Final = 20
"""Refusals that are logged in LOG_INTERVAL_S for configured user names, and as many for all others.

So made-up names cannot hide the mistake of a sensor whose user name is configured. A sensor with a misspelt user name,
or with none, is one of the others: among many made-up names it may be counted but not named."""
TAKEN_OVER: Final = "taken-over"
"""Reason for ending a connection whose client has connected anew: nothing was refused."""
REVOKED: Final = "credentials-ended"
"""Reason for ending a connection whose secret was valid when it began, but is no longer."""
TOO_MANY_UNFINISHED: Final = "too-many-unfinished"
"""Reason for ending a connection whose client has too many QoS 2 exchanges open."""
SHUTDOWN: Final = "shutdown"
INTAKE_REFUSED: Final = "intake-refused"
HELD_TOO_MUCH: Final = "held-too-much"
OUR_DOING: Final = frozenset({SHUTDOWN, TAKEN_OVER, REVOKED, TOO_MANY_UNFINISHED, INTAKE_REFUSED, HELD_TOO_MUCH})
"""Ends that say nothing about the device, which is alive. Its will is published nevertheless [MQTT-3.1.2-8]."""
WITH_WILL: Final = "disconnected-with-will"
"""Reason for an end by a DISCONNECT of MQTT 5 that asks for the will."""
WILL_DELAYED: Final = "will-delay"
"""Cause of a will that is published when its delay has passed."""
NOT_A_COMMAND_TOPIC: Final = "not-a-command-topic"
TOO_MANY_COMMANDS: Final = "too-many-commands"
KEEP_ALIVE_TIMEOUT: Final = "keep-alive-timeout"
REASON_CODES: Final = {
    "connect-while-refusing": ReasonCode.SERVER_BUSY,
    "too-many-connections": ReasonCode.SERVER_BUSY,
    "too-many-user-connections": ReasonCode.QUOTA_EXCEEDED,
    "too-many-sessions": ReasonCode.QUOTA_EXCEEDED,
    "bad-credentials": ReasonCode.BAD_USER_NAME_OR_PASSWORD,
    "too-many-failed-logins": ReasonCode.BAD_USER_NAME_OR_PASSWORD,
    "no-credentials": ReasonCode.NOT_AUTHORIZED,
    "certificate-of-no-user": ReasonCode.NOT_AUTHORIZED,
    NOT_A_COMMAND_TOPIC: ReasonCode.NOT_AUTHORIZED,
    TOO_MANY_COMMANDS: ReasonCode.QUOTA_EXCEEDED,
    TOO_MANY_UNFINISHED: ReasonCode.QUOTA_EXCEEDED,
    INTAKE_REFUSED: ReasonCode.SERVER_BUSY,
    HELD_TOO_MUCH: ReasonCode.SERVER_BUSY,
    REVOKED: ReasonCode.NOT_AUTHORIZED,
    TAKEN_OVER: ReasonCode.SESSION_TAKEN_OVER,
    SHUTDOWN: ReasonCode.SERVER_SHUTTING_DOWN,
    KEEP_ALIVE_TIMEOUT: ReasonCode.KEEP_ALIVE_TIMEOUT,
}
"""What the client is told about a refusal or an end, by reason. Before CONNACK it stands there, and afterwards MQTT 5
has a DISCONNECT for it. A client is told nothing about any other reason."""
_ENDED: Final = "connection ended by the MQTT listener"
ENDS: Final = {
    KEEP_ALIVE_TIMEOUT: f"{_ENDED}: nothing more was heard; check its power and radio",
    "write-stall": _ENDED,
    REVOKED: _ENDED,
    "connect-timeout": _ENDED,
}
"""Log events of connections that end although nothing was refused, by reason."""
NAME_CHARACTERS_MAX: Final = 80
"""Characters of a name that the log repeats."""

LOG_IN_REASONS: Final = frozenset(
    {
        "bad-credentials",
        "no-credentials",
        "certificate-of-no-user",
        "tls-handshake-failed",
        "too-many-failed-logins",
    }
)
"""Reasons why a sensor cannot log in: it is set up wrongly, or others fail under its name."""
LATELY_MAX: Final = 20
"""Sensors whose refused log-in is remembered; beyond that, the latest ones."""
LOGIN: Final = "refused log-in"
"""Log event of a refused log-in, by which people search the log."""
LOGINS_AGAIN: Final = "refused log-ins in the last minute, beside those that have a line"
ADDRESSES_MAX: Final = 4
"""Log lines in LOG_INTERVAL_S for one name that fails from several addresses."""
SHOWN_CHARACTERS: Final = 2
STRETCH_CHARACTERS: Final = 8
"""Characters of a secret that the log may not repeat in a row. A shorter piece does not give the secret away."""
HIDDEN_CHARACTERS_MAX: Final = 256
"""Characters of a user name or password that are searched for in other texts."""

_log = structlog.get_logger("sluice.mqtt_listener")


class _Login(NamedTuple):
    """Refused log-ins that share one log line."""

    is_known: bool
    user: str | None
    """As the log shows it."""
    address: str
    reason: str


class _Late(NamedTuple):
    """The last refused log-in of one sensor."""

    user: str | None
    """As the status page shows it."""
    address: str
    why: str
    at_s: float


class ClientRefusedError(Exception):
    """A client's request is refused.

    `reason` is a short stable name to count by; `REASON_CODES` has what the client is told. The message says what
    happened, and names the setting if there is one.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class LoginRefusedError(ClientRefusedError):
    """A client's credentials are refused."""


class Refusals:
    """Counts refusals and ends by reason, and logs refusals by client."""

    def __init__(self, configured: Container[str]) -> None:
        """`configured` are the user names that may log in."""
        self.counts: Counter[str] = Counter()
        self._configured = configured
        self._logged: set[tuple[str, str]] = set()
        """Reasons and clients of this interval's lines, for clients whose user name is configured."""
        self._logged_others: set[tuple[str, str]] = set()
        self._logged_taken_over: set[tuple[str, str]] = set()
        self._unlogged: Counter[str] = Counter()
        self._logins: Counter[_Login] = Counter()
        """Refused log-ins that have a line in this interval, and how many more of each followed."""
        self._unlogged_logins: Counter[str] = Counter()
        self._late = Latest[str, _Late](LATELY_MAX)
        """Sensors that have not logged in since, by configured user name or else by address."""
        self._timer: asyncio.TimerHandle | None = None

    def refused(
        self, reason: str, message: str, *, peer: str = "", user: str | None = None, client_id: str | None = None
    ) -> None:
        """Count a refusal. Log it if it is the first of its client and reason, or else add it to the sum.

        A client is known by its user name, else by its client identifier, else by its address.
        """
        self._count(reason)
        self._remember(reason, message, None, peer, is_known=False)
        client = (reason, _cut(user or client_id or peer.rpartition(":")[0]))
        logged = self._logged if user in self._configured else self._logged_others
        if reason == TAKEN_OVER:
            # Take-overs must not use up the log lines of refusals.
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
        """Count a refused log-in. Log it if it is the first of its name, address and reason, or else in the sum.

        An unknown name is not shown: if a person swapped name and secret, it is the secret, and no rule tells the two
        apart. Its beginning and its length are enough to find out whose it is.
        """
        self._count(reason)
        user = connect.user_name
        is_known = user in self._configured
        self._remember(reason, message, user, peer, is_known=is_known)
        login = _Login(is_known, _name_told(user, is_known=is_known), peer.rpartition(":")[0], reason)
        if login in self._logins:
            self._logins[login] += 1
            return
        # Made-up names take no line from known names, and one known name does not take all lines.
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
        """Record a log-in, which ends the sensor's earlier trouble."""
        self._late.pop(peer.rpartition(":")[0], None)
        if user is not None:
            self._late.pop(user, None)

    def lately(self) -> list[dict[str, object]]:
        """Refused log-ins of sensors that have not logged in since, for the status page; newest first."""
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
        self._late[sensor] = _Late(_name_told(user, is_known=is_known), address, why, time.monotonic())

    def _count(self, reason: str) -> None:
        self.counts[reason] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._end_interval)

    def finish(self) -> None:
        """Log what is not logged yet, as the listener ends."""
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
                "refused or ended by the MQTT listener in the last minute, beside those that were logged",
                reasons=dict(self._unlogged),
            )
            self._unlogged.clear()
        self._tell_logins()

    def _tell_logins(self) -> None:
        """Log the number of log-ins refused in this interval without a line of their own."""
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
    """The client identifier; masked if it repeats an unknown user name or the password."""
    client_id, user = connect.client_id, "" if is_known else connect.user_name or ""
    password = (connect.password or b"").decode(errors="replace")
    if _shares_much(client_id, user) or _shares_much(client_id, password):
        return f"{client_id[:SHOWN_CHARACTERS]}… ({counted(len(client_id), 'character')})"
    return _cut(client_id)


def _shares_much(told: str, hidden: str) -> bool:
    """Whether `told` repeats STRETCH_CHARACTERS of `hidden` in a row, or all of `hidden` if it is shorter."""
    length = min(len(hidden), STRETCH_CHARACTERS)
    ends = min(len(hidden), HIDDEN_CHARACTERS_MAX) - length + 1
    return length > 0 and any(hidden[at : at + length] in told for at in range(ends))


def _cut(name: str) -> str:
    return name[:NAME_CHARACTERS_MAX]
