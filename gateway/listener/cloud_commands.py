"""Passes the cloud's commands on to the devices that subscribed to them: the listener's `CommandWay`."""

import asyncio
from collections.abc import Callable
from typing import Final

from gateway.command import CommandReports, DeviceCommand
from gateway.listener.access import CommandTopics
from gateway.listener.device_commands import Commands, Receiver
from gateway.listener.logins import Logins
from gateway.listener.session import Session, TooManyCommandsError, check_room
from gateway.listener.sessions import Sessions
from gateway.settings import ListenerSettings

QOS_0: Final = "subscribed-with-qos-0"
"""Reason of a refusal: the device would never acknowledge a command."""
NO_COMMAND_TOPIC: Final = "no-command-topic"
"""Reason of a refusal: `command_topics` has no template for the topic."""


class CloudCommands:
    """Queues each command in the sessions of its device, as the operators' commands are queued.

    A session that is forgotten takes its copy with it. The next `offer` then finds another session.
    """

    def __init__(
        self,
        settings: ListenerSettings,
        kept: Sessions,
        logins: Logins,
        commands: Commands,
        connection_of: Callable[[Session], Receiver | None],
    ) -> None:
        self.reports: CommandReports | None = None
        self._commands_max = settings.commands_max
        self._topics = CommandTopics(settings.command_topics)
        self._kept = kept
        self._logins = logins
        self._commands = commands
        self._connection_of = connection_of
        self._given: dict[str, list[Session]] = {}
        """The sessions that were given a command, by its id. They may be over."""

    def knows(self, device: str) -> bool:
        """See `CommandWay.knows`."""
        return device in self._logins.devices or device in self._kept.subscribed

    def offer(self, command: DeviceCommand) -> None:
        """See `CommandWay.offer`."""
        given = self._given.get(command.id, ())
        if any(session.holds(command.id) for session in given):
            return
        topic = self._topics.topic_of(command.device, command.topic)
        if topic is None:
            self._refuse(command, NO_COMMAND_TOPIC)
            return
        recipients = self._commands.subscribed(command.device, topic, 1)
        if recipients.at_once and not recipients.queued:
            self._refuse(command, QOS_0)
            return
        self._given[command.id] = taking = []
        for session in recipients.queued:
            try:
                check_room((session,), len(topic) + len(command.payload), self._commands_max)
            except TooManyCommandsError:
                continue
            session.queue_of_cloud(topic, command.payload, command.id)
            taking.append(session)
            connection = self._connection_of(session)
            if connection is not None:
                connection.send_commands()

    def withdraw(self, command_id: str) -> bool:
        """See `CommandWay.withdraw`."""
        was_sent = False
        for session in self._given.pop(command_id, ()):
            was_sent |= session.withdraw(command_id)
        return was_sent

    def acknowledged(self, command_id: str) -> None:
        """Report that a device has acknowledged a command."""
        if self.reports is not None:
            self.reports.delivered(command_id, "mqtt")

    def subscribed(self, device: str) -> None:
        """Report that a device has subscribed, once its SUBACK is written."""
        if self.reports is not None:
            asyncio.get_running_loop().call_soon(self.reports.ready, device)

    def _refuse(self, command: DeviceCommand, reason: str) -> None:
        if self.reports is not None:
            self.reports.refused(command.id, reason)
