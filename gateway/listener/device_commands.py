"""Passes operators' commands on to the devices that subscribed to them."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from gateway.listener.access import CommandTopics, matches
from gateway.listener.refusals import NOT_A_COMMAND_TOPIC, TOO_MANY_COMMANDS, ClientRefusedError, Refusals
from gateway.listener.session import ClientBatch, Command, Session, TooManyCommandsError, check_room
from gateway.listener.sessions import Sessions
from gateway.mqtt.reason_codes import ReasonCode
from gateway.settings import ListenerSettings

SUBSCRIPTIONS_MAX: Final = 32
"""Topic filters that one session may have."""
FILTER_BYTES_MAX: Final = 256
"""Bytes of one filter. All filters of a session are one mark, which each change writes anew."""
REFUSED_FILTER: Final = 0x80
"""Least of SUBACK's codes that refuse a filter (section 3.9.3)."""


class Recipients(NamedTuple):
    """The sessions that a command goes to."""

    queued: list[Session]
    """Sessions that get it with QoS 1."""
    at_once: list[Session]
    """Sessions that get it with QoS 0."""


class Receiver(Protocol):
    """The part of a connection that sends commands."""

    def send_commands(self) -> None: ...

    def send_command_at_most_once(self, command: Command) -> bool: ...


class Commands:
    """Passes each command on to all sessions that have subscribed to its topic."""

    def __init__(
        self,
        settings: ListenerSettings,
        kept: Sessions,
        refusals: Refusals,
        connection_of: Callable[[Session], Receiver | None],
    ) -> None:
        """`connection_of` returns the connection that a session has now, if any."""
        self._commands_max = settings.commands_max
        self._topics = CommandTopics(settings.command_topics)
        self._kept = kept
        self._refusals = refusals
        self._connection_of = connection_of

    def grant(
        self, session: Session, device: str | None, filters: Sequence[tuple[str, int]], batch: ClientBatch
    ) -> list[int]:
        """Subscribe a device to its own command topics, with QoS 1 at most; return the codes for SUBACK.

        `device` is None for an operator, which may not subscribe.
        """
        granted: list[int] = []
        for topic_filter, asked in filters:
            qos = min(asked, 1)
            if (refused := self._refusal(session, device, topic_filter)) is not None:
                granted.append(refused)
                continue
            granted.append(qos)
            if session.subscriptions.get(topic_filter) != qos:
                self._kept.subscribe(session, topic_filter, qos)
                batch.subscribed = True
        return granted

    def _refusal(self, session: Session, device: str | None, topic_filter: str) -> ReasonCode | None:
        """Why a device may not have a subscription; None if it may."""
        subscriptions = session.subscriptions
        if not self._topics.may_subscribe(topic_filter, device):
            return ReasonCode.NOT_AUTHORIZED
        is_new = topic_filter not in subscriptions
        if len(topic_filter.encode()) > FILTER_BYTES_MAX or (is_new and len(subscriptions) >= SUBSCRIPTIONS_MAX):
            return ReasonCode.QUOTA_EXCEEDED
        return None

    def speaks_to_a_device(self, topic: str) -> bool:
        """Whether a topic is a command topic, to which an operator may publish."""
        return self._topics.device_of(topic) is not None

    def recipients(self, command: Command, qos: int) -> Recipients:
        """Find the sessions that get a command.

        Raises ClientRefusedError if the topic is no command topic, or if a session has no room for the command.
        """
        topic = command.topic
        device = self._topics.device_of(topic)
        if device is None:
            raise ClientRefusedError(
                NOT_A_COMMAND_TOPIC,
                f"an operator published to {topic[:80]!r}, which is no command topic; see mqtt_listener.command_topics",
            )
        recipients = self.subscribed(device, topic, qos)
        try:
            check_room(recipients.queued, command.size, self._commands_max)
        except TooManyCommandsError as error:
            raise ClientRefusedError(
                TOO_MANY_COMMANDS,
                f"too many commands wait for {topic[:80]!r}; "
                "see mqtt_listener.commands_max and mqtt_listener.commands_bytes_max",
            ) from error
        return recipients

    def subscribed(self, device: str, topic: str, qos: int) -> Recipients:
        """Find the sessions of a device that subscribed to one of its command topics."""
        queued: list[Session] = []
        at_once: list[Session] = []
        for session in self._kept.subscribed.get(device, ()):
            granted = session.granted(lambda topic_filter: matches(topic_filter, topic))
            # A session about to be forgotten would take the command with it.
            if granted is not None and not session.leaving:
                (queued if min(granted, qos) else at_once).append(session)
        return Recipients(queued, at_once)

    def pass_on(self, recipients: Recipients, command: Command, batch: ClientBatch) -> None:
        """Queue a command, to be sent when `batch` is committed; with QoS 0, send it at once."""
        for session in recipients.queued:
            session.queue(batch, command)
        for session in recipients.at_once:
            connection = self._connection_of(session)
            if connection is None or not connection.send_command_at_most_once(command):
                self._refusals.counts["command-not-delivered"] += 1
        if not (recipients.queued or recipients.at_once):
            self._refusals.refused(
                "command-without-subscriber",
                f"an operator's message for {command.topic[:80]!r} was acknowledged, but no device has subscribed "
                "to it",
            )

    def send(self, batch: ClientBatch) -> None:
        """Send the commands of a committed batch to the devices that are connected."""
        for session, _ in batch.commands:
            self.send_to(session)

    def send_to(self, session: Session) -> None:
        """Send the commands that wait for a session, if its device is connected."""
        connection = self._connection_of(session)
        if connection is not None:
            connection.send_commands()
