"""Admits a client: judges its CONNECT and opens its session."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from gateway.listener.access import Identity
from gateway.listener.client import Admitted, Client
from gateway.listener.device_client import DeviceClient
from gateway.listener.opening import admit, make_room
from gateway.listener.operator_client import OperatorClient
from gateway.listener.refusals import INTAKE_REFUSED, TAKEN_OVER, LoginRefusedError
from gateway.listener.session import SessionKey
from gateway.listener.sessions import Opening
from gateway.listener.shared import Connected, Shared
from gateway.mqtt.protocol import Connect, Dialect


class Admitting(Connected, Protocol):
    """The part of a connection that admission acts on."""

    peer: str

    @property
    def dialect(self) -> Dialect: ...

    def suspend(self) -> None: ...

    def go_on(self, decide: Callable[[], None]) -> None: ...

    def identify(self, user: str | None, client_id: str) -> None: ...

    def begin(self, client: Client) -> None: ...

    def accept(self, client: Client, keep_alive_s: int) -> None: ...

    def refuse(self, reason: str, message: str) -> None: ...

    def end(self, cause: str) -> None: ...


def answer_connect(
    shared: Shared, connection: Admitting, connect: Connect, certificate_name: str | None, now_s: float
) -> None:
    """Open the session of a client, or refuse its log-in. Raises ClientRefusedError.

    `certificate_name` is the common name of a verified client certificate, `now_s` the event loop's time.
    """
    try:
        identity = admit(shared, connect, certificate_name, connection.peer, now_s)
    except LoginRefusedError as refused:
        shared.refusals.refused_login(refused.reason, refused.message, connect, connection.peer)
        connection.end(refused.reason)
        return
    # The credentials are right, so from here on the log may name the client.
    connection.identify(identity.user, connect.client_id)
    if not identity.is_check:
        shared.refusals.let_in(identity.user, connection.peer)
    _open(shared, connection, connect, identity, make_room(shared, connect, identity, now_s))


def _open(shared: Shared, connection: Admitting, connect: Connect, identity: Identity, key: SessionKey) -> None:
    """Open an admitted client's session."""
    older = shared.sessions.get(key)
    is_over = older is None and shared.kept.is_over(key, shared.now_us() / 1e6)
    opening = shared.kept.open(key, clean=connect.clean_session, expiry_s=connect.session_expiry_s, is_over=is_over)
    if connect.clean_session or is_over:
        shared.wills.session_ended(key)
    else:
        shared.wills.resumed(key)
    if older is not None:
        older.refuse(TAKEN_OVER, "the same client identifier connected again")  # [MQTT-3.1.4-2]
    shared.enter(key, connection)
    client_of = OperatorClient if identity.operator else DeviceClient
    client = client_of(shared, Admitted(connect, identity, opening, connection.peer, connection.dialect))
    connection.begin(client)
    if not opening.marks:
        connection.accept(client, connect.keep_alive_s)
        return
    connection.suspend()
    opened = partial(_opened, shared, connection, client, keep_alive_s=connect.keep_alive_s, opening=opening)
    shared.store([], opened, opening.marks)


def _opened(  # noqa: PLR0913 - a callback's state
    shared: Shared,
    connection: Admitting,
    client: Client,
    stored: bool,  # noqa: FBT001 - as Intake has it
    *,
    keep_alive_s: int,
    opening: Opening,
) -> None:
    """Accept or refuse a CONNECT once the commit of its session is decided."""
    if stored:
        shared.kept.opened(opening)
        connection.go_on(partial(connection.accept, client, keep_alive_s))
    else:
        shared.kept.not_opened(opening)
        connection.refuse(INTAKE_REFUSED, "the session could not be stored")
