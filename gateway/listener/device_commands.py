"""Commands: what operators say to devices by the MQTT listener, and which sessions are to hear it."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from gateway.listener.access import CommandTopics, matches
from gateway.listener.refusals import ClientRefusedError, Refusals
from gateway.listener.session import Batch, Session, TooManyCommandsError, check_room
from gateway.listener.sessions import Sessions
from gateway.settings import ListenerSettings

SUBSCRIPTIONS_MAX: Final = 32
"""Topic filters of one session."""
FILTER_BYTES_MAX: Final = 256
"""Bytes of each: all subscriptions of a session are one mark, written anew at each change."""
REFUSED_FILTER: Final = 0x80
"""In a SUBACK (section 3.9.3)."""


class Recipients(NamedTuple):
    """The sessions that an operator's message goes to."""

    queued: list[Session]
    """With QoS 1."""
    at_once: list[Session]
    """With QoS 0."""


class Receiver(Protocol):
    """A connection, as far as commands are sent on it."""

    def send_commands(self) -> None: ...

    def send_command_at_most_once(self, topic: str, payload: bytes) -> bool: ...


class Commands:
    """Passes on what operators say, to all sessions that have subscribed to it."""

    def __init__(
        self,
        settings: ListenerSettings,
        kept: Sessions,
        refusals: Refusals,
        connection_of: Callable[[Session], Receiver | None],
    ) -> None:
        """`connection_of` gives the connection that a session has now."""
        self._commands_max = settings.commands_max
        self._topics = CommandTopics(settings.command_topics)
        self._kept = kept
        self._refusals = refusals
        self._connection_of = connection_of

    def grant(
        self, session: Session, device: str | None, filters: Sequence[tuple[str, int]], batch: Batch
    ) -> list[int]:
        """Subscribe to what lies within the device's own command topics, at most with QoS 1; give the SUBACK's codes.

        `device` is None for an operator, which subscribes to nothing.
        """
        granted = []
        for topic_filter, asked in filters:
            qos = min(asked, 1)
            if not self._may_subscribe(session, device, topic_filter):
                granted.append(REFUSED_FILTER)
                continue
            granted.append(qos)
            if session.subscriptions.get(topic_filter) != qos:
                self._kept.subscribe(session, topic_filter, qos)
                batch.subscribed = True
        return granted

    def _may_subscribe(self, session: Session, device: str | None, topic_filter: str) -> bool:
        subscriptions = session.subscriptions
        return (
            (topic_filter in subscriptions or len(subscriptions) < SUBSCRIPTIONS_MAX)
            and len(topic_filter.encode()) <= FILTER_BYTES_MAX
            and self._topics.may_subscribe(topic_filter, device)
        )

    def speaks_to_a_device(self, topic: str) -> bool:
        """Whether an operator may publish there."""
        return self._topics.device_of(topic) is not None

    def recipients(self, topic: str, payload: bytes, qos: int) -> Recipients:
        """Who is to get an operator's message. Raises RefusedError where it is no command, or not all have room."""
        device = self._topics.device_of(topic)
        if device is None:
            # A positive acknowledgement or the end: nothing else tells the client [MQTT-3.3.5-2].
            raise ClientRefusedError(
                "not-a-command-topic",
                f"an operator published to {topic[:80]!r}; see mqtt_listener.command_topics",
            )
        queued: list[Session] = []
        at_once: list[Session] = []
        for session in self._kept.subscribed.get(device, ()):
            granted = session.granted(lambda topic_filter: matches(topic_filter, topic))
            # What leaves would take the command with it.
            if granted is not None and not session.leaving:
                (queued if min(granted, qos) else at_once).append(session)
        try:
            check_room(queued, len(topic) + len(payload), self._commands_max)
        except TooManyCommandsError as error:
            raise ClientRefusedError(
                "too-many-commands",
                f"too many commands wait for {topic[:80]!r}; "
                "see mqtt_listener.commands_max and mqtt_listener.commands_bytes_max",
            ) from error
        return Recipients(queued, at_once)

    def pass_on(self, recipients: Recipients, topic: str, payload: bytes, batch: Batch) -> None:
        """Pass a message on: queued, to be sent when `batch` is committed; with QoS 0 sent at once."""
        for session in recipients.queued:
            session.queue(batch, topic, payload)
        for session in recipients.at_once:
            connection = self._connection_of(session)
            if connection is None or not connection.send_command_at_most_once(topic, payload):
                self._refusals.counts["command-not-delivered"] += 1
        if not (recipients.queued or recipients.at_once):
            self._refusals.refused(
                "command-without-subscriber",
                f"an operator's message for {topic[:80]!r} was acknowledged, but no device has subscribed to it",
            )

    def send(self, batch: Batch) -> None:
        """Send what a committed batch has queued to those of its devices that are connected."""
        for session, _ in batch.commands:
            connection = self._connection_of(session)
            if connection is not None:
                connection.send_commands()
