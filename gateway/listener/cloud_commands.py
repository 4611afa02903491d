"""Passes the cloud's commands on to the devices that subscribed to them: the listener's `CommandWay`."""

import asyncio
from typing import Final

from gateway.command import CommandReports, DeviceCommand
from gateway.listener.access import CommandTopics
from gateway.listener.device_commands import Commands
from gateway.listener.logins import Logins
from gateway.listener.session import Command, Session, TooManyCommandsError, check_room
from gateway.listener.sessions import Sessions
from gateway.settings import ListenerSettings

QOS_0: Final = "subscribed-with-qos-0"
"""Reason of a refusal: the device would never acknowledge a command."""
NO_COMMAND_TOPIC: Final = "no-command-topic"
"""Reason of a refusal: `command_topics` has no template for the topic."""
LARGER_THAN_PACKET: Final = "larger-than-a-packet"
"""Reason of a refusal: the device told that it takes no packet of this size (MQTT 5)."""


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
    ) -> None:
        self.reports: CommandReports | None = None
        self._commands_max = settings.commands_max
        self._topics = CommandTopics(settings.command_topics)
        self._kept = kept
        self._logins = logins
        self._commands = commands
        self._given: dict[str, list[Session]] = {}
        """The sessions that were given a command, by its id. They may be over."""

    def knows(self, device: str) -> bool:
        """See `CommandWay.knows`."""
        return device in self._logins.devices or device in self._kept.subscribed

    def offer(self, command: DeviceCommand, until_us: int) -> None:
        """See `CommandWay.offer`."""
        given = self._given.get(command.id, ())
        if any(session.holds(command.id) for session in given):
            return
        topic = self._topics.topic_of(command.device, command.topic)
        if topic is None:
            self.refused(command.id, NO_COMMAND_TOPIC)
            return
        recipients = self._commands.subscribed(command.device, topic, 1)
        if recipients.at_once and not recipients.queued:
            self.refused(command.id, QOS_0)
            return
        message = Command(0, topic, command.payload, expires_us=until_us, id=command.id)
        self._given[command.id] = taking = []
        for session in recipients.queued:
            try:
                check_room((session,), message.size, self._commands_max)
            except TooManyCommandsError:
                continue
            session.queue_of_cloud(message)
            taking.append(session)
            self._commands.send_to(session)
            if command.id not in self._given:
                return  # it was too large for the device, and has ended

    def withdraw(self, command_id: str) -> bool:
        """See `CommandWay.withdraw`."""
        for session in self._given.pop(command_id, ()):
            session.withdraw(command_id)
        sent = self._kept.room.sent_of_cloud
        was_sent = command_id in sent
        sent.discard(command_id)
        return was_sent

    def acknowledged(self, command_id: str) -> None:
        """Report that a device has acknowledged a command."""
        if self.reports is not None:
            self.reports.delivered(command_id, "mqtt")

    def refused(self, command_id: str, reason: str) -> None:
        """Report that a device does not take a command, or that no way leads to it."""
        if self.reports is not None:
            self.reports.refused(command_id, reason)

    def subscribed(self, device: str) -> None:
        """Report that a device has subscribed, once its SUBACK is written."""
        if self.reports is not None:
            asyncio.get_running_loop().call_soon(self.reports.ready, device)
