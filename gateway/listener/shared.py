"""The parts and the state that all connections of one MQTT listener share."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Protocol

import structlog

from gateway.clock.kernel_clock import boot_id
from gateway.intake.check_readings import CheckReadings
from gateway.listener.cloud_commands import LARGER_THAN_PACKET, CloudCommands
from gateway.listener.delayed_wills import DelayedWills
from gateway.listener.device_commands import Commands, Receiver
from gateway.listener.device_events import DeviceEvents
from gateway.listener.inflight import BESIDE_OTHERS, InflightTotal
from gateway.listener.login_limit import LoginLimit
from gateway.listener.logins import Logins
from gateway.listener.redelivery import RecentlyUnanswered
from gateway.listener.refusals import OUR_DOING, WILL_DELAYED, WITH_WILL, Refusals
from gateway.listener.session import Room, Session, SessionKey
from gateway.listener.sessions import Sessions
from gateway.listener.turns import Turns
from gateway.mqtt.protocol5 import Version5
from gateway.reading import ListenerIntake, Mark, Reading
from gateway.settings import ListenerSettings

_log = structlog.get_logger("sluice.mqtt_listener")


class Connected(Receiver, Protocol):
    """The part of a connection that others act on."""

    @property
    def session(self) -> Session | None: ...

    def pause_or_resume(self) -> None: ...

    def refuse(self, reason: str, message: str) -> None: ...

    def end(self, cause: str) -> None: ...

    def end_where_revoked(self) -> None: ...

    def cut(self) -> None: ...


class Shared:
    """The listener's parts for connections and clients. `now_us` is CLOCK_BOOTTIME in microseconds."""

    def __init__(
        self,
        settings: ListenerSettings,
        intake: ListenerIntake,
        now_us: Callable[[], int],
        checks: CheckReadings,
        logins: Logins,
    ) -> None:
        self.settings = settings
        self.intake = intake
        self.now_us = now_us
        self.checks = checks
        """Log-ins of `sluice check`, which are let in for one test reading."""
        self.logins = logins
        self.login_limit = LoginLimit(settings.failed_logins_per_minute_max)
        self.refusals = Refusals(logins.met)
        self.counts = self.refusals.counts
        self.connections: set[Connected] = set()
        self.sessions: dict[SessionKey, Connected] = {}
        """The connection of each connected session."""
        self.users_connected: Counter[str] = Counter()
        """Number of these connections by user."""
        self.paused: set[Connected] = set()
        """Connections that are not read from, because too many of their bytes wait for a commit."""
        self.kept = Sessions(
            settings.sessions_max,
            settings.sessions_per_user_max,
            settings.session_expiry_s,
            Room(settings.commands_bytes_max, settings.qos2_unfinished_total_max, boot_id()),
            lambda: token_hex(8),
        )
        self.wills = DelayedWills()
        # As many as one connection may have waiting while others send: so it need not be paused for their number.
        receive_max = min(max(1, settings.inflight_messages_max // BESIDE_OTHERS), settings.qos2_unfinished_max)
        self.newer_dialect = partial(Version5, receive_max, settings.packet_bytes_max)
        """Makes the dialect of a connection with MQTT 5."""
        self.unanswered = RecentlyUnanswered()
        alive = OUR_DOING | {WITH_WILL, WILL_DELAYED}
        self.devices = DeviceEvents(intake, 2 * settings.connections_max, self.counts, alive)
        self.commands = Commands(settings, self.kept, self.refusals, self._connection_of)
        self.cloud = CloudCommands(settings, self.kept, logins, self.commands)
        self.inflight = InflightTotal(settings.inflight_bytes_total_max, self.pause_or_resume)
        self.turns = Turns()
        self.stopping = False
        """Whether nothing more is taken. Batches that wait for a commit are still answered."""
        self.refusing_until = 0.0
        """The event loop's time until which CONNECT is refused, because the intake refused readings."""
        self._generated_ids = 0

    def store(
        self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Mapping[str, bytes | None]
    ) -> None:
        """Call `Intake.take`. If it raises, call `done(False)`, as nothing may wait for ever for a commit."""
        try:
            self.intake.take(readings, done, [Mark(key, value) for key, value in marks.items()] if marks else ())
        except Exception:  # noqa: BLE001 - whatever it is, it is not the client's fault
            _log.exception("readings could not be taken in")
            done(False)

    def forget(self, sessions: Sequence[Session]) -> None:
        """Forget the marks of sessions that were taken out."""
        for session in sessions:
            self.wills.session_ended(session.key)
        self.store([], partial(self.kept.forgotten, sessions), self.kept.forget(sessions))

    def give_up_commands(self, session: Session) -> None:
        """Drop the commands that a session gave up, and their marks."""
        if session.given_up:
            self.counts["command-not-delivered"] += len(session.given_up)
            marks, of_cloud = session.drop_given_up()
            if marks:
                self.store([], lambda _: None, marks)
            for command_id in of_cloud:
                self.cloud.refused(command_id, LARGER_THAN_PACKET)

    def expire_commands(self) -> None:
        """Give up commands whose time has passed while their device is away."""
        now_us = self.now_us()
        for sessions in tuple(self.kept.subscribed.values()):
            for session in sessions:
                if session.commands and session.key not in self.sessions:
                    session.expire_commands(now_us)
                    self.give_up_commands(session)

    def enter(self, key: SessionKey, connection: Connected) -> None:
        """Record the connection that a session has now."""
        self.sessions[key] = connection
        if key[0] is not None:
            self.users_connected[key[0]] += 1

    def leave(self, key: SessionKey) -> None:
        """Record that a session has no connection any more."""
        del self.sessions[key]
        user = key[0]
        if user is not None:
            self.users_connected[user] -= 1
            if not self.users_connected[user]:
                del self.users_connected[user]

    def _connection_of(self, session: Session) -> Connected | None:
        connection = self.sessions.get(session.key)
        return connection if connection is not None and connection.session is session else None

    def pause_or_resume(self) -> None:
        """Pause or resume reading: beyond the total any connection may pause, below it paused ones may resume."""
        for connection in tuple(self.connections if self.inflight.beyond else self.paused):
            connection.pause_or_resume()

    def generated_client_id(self, *, is_told: bool) -> str:
        """Make an identifier for a client that sent none [MQTT-3.1.3-6].

        MQTT 5 tells it to the client, which comes back with it. Otherwise U+0000 keeps it apart from every identifier
        that a client may choose.
        """
        if is_told:
            return f"made-{token_hex(8)}"
        self._generated_ids += 1
        return f"\0{self._generated_ids}"
