"""Passes the cloud's commands on to sensors with our frames: the serial lines' `CommandWay`."""

from collections.abc import Callable, Iterable
from typing import Final

from gateway.command import REFUSED_BY_DEVICE, CommandReports, DeviceCommand
from gateway.serial_lines.frame_link import CommandAnswered
from gateway.serial_lines.frames import COMMAND_PAYLOAD_BYTES_MAX
from gateway.serial_lines.kinds import Line
from gateway.serial_lines.port_line import FrameLine

NO_FRAMES: Final = "takes-no-commands"
"""Reason of a refusal: the device is on a line of text or Modbus."""
LARGER_THAN_FRAME: Final = "larger-than-a-frame"


class SerialCommands:
    """Gives each line one command at a time. The others of its sensor wait in the gateway's ledger."""

    def __init__(self, lines: Callable[[], Iterable[Line]]) -> None:
        """`lines` gives the open lines."""
        self.reports: CommandReports | None = None
        self._lines = lines
        self._sent: set[str] = set()
        """Commands that were given to a line and have not ended."""

    def knows(self, device: str) -> bool:
        """See `CommandWay.knows`."""
        return any(device in line.devices for line in self._lines())

    def offer(self, command: DeviceCommand, until_us: int) -> None:  # noqa: ARG002 - for MQTT
        """See `CommandWay.offer`."""
        if len(command.payload) > COMMAND_PAYLOAD_BYTES_MAX:
            self._refuse(command.id, LARGER_THAN_FRAME)
            return
        line = next(line for line in self._lines() if command.device in line.devices)
        if not isinstance(line, FrameLine):
            self._refuse(command.id, NO_FRAMES)
        elif line.command_id is None:
            self._sent.add(command.id)
            line.command(command)

    def withdraw(self, command_id: str) -> bool:
        """See `CommandWay.withdraw`."""
        for line in self._lines():
            if isinstance(line, FrameLine) and line.command_id == command_id:
                line.withdraw_command()
        was_sent = command_id in self._sent
        self._sent.discard(command_id)
        return was_sent

    def answered(self, answer: CommandAnswered) -> None:
        """Report a sensor's answer."""
        if not answer.is_done:
            self._refuse(answer.id, REFUSED_BY_DEVICE)
        elif self.reports is not None:
            self.reports.delivered(answer.id, "serial")

    def _refuse(self, command_id: str, reason: str) -> None:
        if self.reports is not None:
            self.reports.refused(command_id, reason)
