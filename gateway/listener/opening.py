"""Decides on a CONNECT: judges its credentials, and makes room for its connection and session."""

from typing import Final

from gateway.host.places import source_of
from gateway.listener.access import Identity, Refusal, identify
from gateway.listener.refusals import NOT_A_COMMAND_TOPIC, ClientRefusedError, LoginRefusedError
from gateway.listener.session import SessionKey
from gateway.listener.sessions import SessionsFullError
from gateway.listener.shared import Shared
from gateway.mqtt.protocol import Connect

_LIMITED: Final = (
    "too many log-ins of this name failed (mqtt_listener.failed_logins_per_minute_max), so its right password was "
    "refused too; a secret of sluice devices add has no such bound"
)


def admit(shared: Shared, connect: Connect, certificate_name: str | None, peer: str, now_s: float) -> Identity:
    """Judge a CONNECT's credentials; return the client that they name.

    `certificate_name` is the common name of a verified client certificate, `peer` is `address:port`, and `now_s` is the
    event loop's time. Raises LoginRefusedError.
    """
    settings, logins = shared.settings, shared.logins
    if shared.checks.lets_in(connect.user_name, connect.password):
        return Identity(connect.user_name, is_check=True)
    identity = identify(
        connect,
        certificate_name,
        logins.devices,
        logins.operators,
        anonymous=settings.anonymous,
        listed=logins.listed,
    )
    name = connect.user_name
    if name is not None and logins.may_be_guessed(name, identity):
        source = source_of(peer.rpartition(":")[0])
        if isinstance(identity, Refusal):
            shared.login_limit.failed(name, source, now_s)
        elif not shared.login_limit.lets_in(name, source, now_s):
            identity = Refusal("too-many-failed-logins", _LIMITED)
    if isinstance(identity, Refusal):
        raise LoginRefusedError(identity.reason, identity.message)
    return identity


def make_room(shared: Shared, connect: Connect, identity: Identity, now_s: float) -> SessionKey:
    """Make room for an admitted client's connection and session; return the session's key.

    `now_s` is the event loop's time. Raises ClientRefusedError.
    """
    key = (identity.user, connect.client_id or shared.generated_client_id(is_told=connect.is_of_5))
    if shared.intake.cannot_store or now_s < shared.refusing_until:
        raise ClientRefusedError(
            "connect-while-refusing",
            "the buffer takes no readings at present: it is full, or its disk fails",
        )
    if key not in shared.sessions:
        _check_connections(shared, identity.user)
    will = connect.will
    if identity.operator and will is not None and not shared.commands.speaks_to_a_device(will.topic):
        raise ClientRefusedError(
            NOT_A_COMMAND_TOPIC,
            f"an operator's will is for {will.topic[:80]!r}, which is no command topic; "
            "see mqtt_listener.command_topics",
        )
    if connect.is_kept and key not in shared.kept.kept:
        _make_session_room(shared, identity.user)
    return key


def _check_connections(shared: Shared, user: str | None) -> None:
    settings = shared.settings
    if len(shared.sessions) >= settings.connections_max:
        raise ClientRefusedError(
            "too-many-connections",
            f"mqtt_listener.connections_max = {settings.connections_max} clients are connected already",
        )
    if user is not None and shared.users_connected[user] >= settings.connections_per_user_max:
        raise ClientRefusedError(
            "too-many-user-connections",
            f"user {user!r} has {settings.connections_per_user_max} connections already; "
            "see mqtt_listener.connections_per_user_max",
        )


def _make_session_room(shared: Shared, user: str | None) -> None:
    """Give up idle sessions so that one more of this user can be kept."""
    settings = shared.settings
    try:
        displaced = shared.kept.make_room(user, shared.sessions.__contains__)
    except SessionsFullError as error:
        raise ClientRefusedError(
            "too-many-sessions",
            f"mqtt_listener.sessions_max = {settings.sessions_max} sessions, or sessions_per_user_max = "
            f"{settings.sessions_per_user_max} of its user, are kept and connected; "
            "a client that connects with clean session needs no room",
        ) from error
    for session in displaced:
        shared.forget([session])
        shared.refusals.refused(
            "session-displaced",
            "an idle session was given up for a new one, and its client must subscribe again; see "
            "mqtt_listener.sessions_max and mqtt_listener.sessions_per_user_max",
            user=session.key[0],
            client_id=session.key[1],
        )
