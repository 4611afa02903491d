"""Admission of a client: its CONNECT waits where log-ins failed, is judged, and gets a session."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from gateway.listener.access import Identity
from gateway.listener.client import Client
from gateway.listener.device_client import DeviceClient
from gateway.listener.login_limit import Attempt, TooManyError, Waiting
from gateway.listener.opening import UNAVAILABLE, admit, make_room
from gateway.listener.operator_client import OperatorClient
from gateway.listener.refusals import INTAKE_REFUSED, TAKEN_OVER, LoginRefusedError
from gateway.listener.session import SessionKey
from gateway.listener.sessions import Opening
from gateway.listener.shared import Connected, Shared
from gateway.mqtt.protocol import Connect

_TOO_MANY: Final = "too-many-failed-logins"
_NOT_JUDGED: Final = (
    "this name failed too often, and more log-ins of it wait already than may (mqtt_listener.failed_logins_held_max): "
    "its password was not looked at"
)


class Admitting(Connected, Protocol):
    """A connection, as far as its CONNECT acts on it."""

    peer: str

    def suspend(self) -> None: ...

    def go_on(self, decide: Callable[[], None]) -> None: ...

    def identify(self, user: str | None, client_id: str) -> None: ...

    def begin(self, client: Client) -> None: ...

    def accept(self, client: Client, keep_alive_s: int) -> None: ...

    def refuse(self, reason: str, message: str, answer: bytes = b"") -> None: ...

    def end(self, cause: str, answer: bytes = b"") -> None: ...


class Admission:
    """The CONNECT of one connection, until its client is accepted or refused."""

    __slots__ = ("_certificate_name", "_connection", "_loop", "_shared", "_timer", "_waiting")

    def __init__(
        self, shared: Shared, loop: asyncio.AbstractEventLoop, connection: Admitting, certificate_name: str | None
    ) -> None:
        """`certificate_name` is the common name of a verified client certificate."""
        self._shared = shared
        self._loop = loop
        self._connection = connection
        self._certificate_name = certificate_name
        self._waiting: Waiting | None = None
        """Why it waits to be judged, or to be told that it is refused."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the client may do nothing but wait."""
        return self._waiting is not None

    def begin(self, connect: Connect) -> None:
        """Open the session of a CONNECT, now or once it may be judged. Raises RefusedError."""
        attempt, waiting = Attempt.of(self._connection.peer, connect.user_name), None
        try:
            # Who gives no name guesses at no secret: it shows a certificate, or nothing.
            if connect.user_name is not None:
                waiting = self._shared.login_limit.before(attempt, self._loop.time())
        except TooManyError:
            self._refuse(connect, _TOO_MANY, _NOT_JUDGED)
            return
        if waiting is None:
            self._judge(connect, attempt, is_late=False)
        else:
            self._wait(waiting, partial(self._judge_late, connect, attempt))

    def _judge_late(self, connect: Connect, attempt: Attempt) -> None:
        """Go on with a CONNECT that had to wait."""
        self.end_wait()
        self._connection.go_on(partial(self._judge, connect, attempt, is_late=True))

    def _judge(self, connect: Connect, attempt: Attempt, *, is_late: bool) -> None:
        """Let a client in, or refuse its log-in, in a while where too many of them failed. Raises RefusedError."""
        now_s = self._loop.time()
        try:
            identity = admit(self._shared, connect, self._certificate_name, attempt)
        except LoginRefusedError as refused:
            waiting, answer = None, refused.answer
            try:
                waiting = self._shared.login_limit.failed(attempt, now_s, has_waited=is_late)
            except TooManyError:
                answer = b""
            self._refuse(connect, refused.reason, refused.message, answer, waiting)
            return
        # From here on it is known who this is, and the log may say so.
        self._connection.identify(identity.user, connect.client_id)
        if not identity.is_check:
            self._shared.refusals.let_in(identity.user, self._connection.peer)
        self._open(connect, identity, make_room(self._shared, connect, identity, now_s))

    def _refuse(
        self, connect: Connect, reason: str, message: str, answer: bytes = b"", waiting: Waiting | None = None
    ) -> None:
        """Log a refused log-in, and end the connection, now or in a while."""
        self._shared.refusals.refused_login(reason, message, connect, self._connection.peer)
        if waiting is None:
            self._connection.end(reason, answer)
        else:
            self._wait(waiting, partial(self._connection.end, reason, answer))

    def _wait(self, waiting: Waiting, then: Callable[[], None]) -> None:
        """Have nothing read until `then`."""
        self._waiting = waiting
        self._timer = self._loop.call_later(waiting.seconds, then)
        self._connection.suspend()

    def end_wait(self) -> None:
        """Wait no more, if it does: its time has come, or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting is not None:
            self._shared.login_limit.release(self._waiting)
            self._waiting = None

    def _open(self, connect: Connect, identity: Identity, key: SessionKey) -> None:
        """Open the session of a client that was admitted."""
        shared, connection = self._shared, self._connection
        older = shared.sessions.get(key)
        opening = shared.kept.open(key, clean=connect.clean_session)
        if older is not None:
            older.refuse(TAKEN_OVER, "the same client identifier connected again")  # [MQTT-3.1.4-2]
        shared.enter(key, connection)
        client_of = OperatorClient if identity.operator else DeviceClient
        client = client_of(shared, connect, identity, opening, connection.peer)
        connection.begin(client)
        if not opening.marks:
            connection.accept(client, connect.keep_alive_s)
            return
        connection.suspend()
        shared.store([], partial(self._opened, client, connect.keep_alive_s, opening), opening.marks)

    def _opened(
        self,
        client: Client,
        keep_alive_s: int,
        opening: Opening,
        stored: bool,  # noqa: FBT001 - as Intake has it
    ) -> None:
        """Go on with a CONNECT whose session's commit is done."""
        if stored:
            self._shared.kept.opened(opening)
            self._connection.go_on(partial(self._connection.accept, client, keep_alive_s))
        else:
            self._shared.kept.not_opened(opening)
            self._connection.refuse(INTAKE_REFUSED, "the session could not be stored", UNAVAILABLE)
