"""The ledger of commands from their commit to their end, and of how far each partition was read; no I/O."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from gateway.command import DeviceCommand
from gateway.reading import Mark
from gateway.settings import CommandSettings

LEDGER_MARKS: Final = "commands/"
"""Prefix of the keys of all marks of the ledger."""
COMMAND_WEIGHT: Final = 500
"""Bytes that a command takes beside its payload, for `commands.bytes_max`."""
_OPEN: Final = f"{LEDGER_MARKS}open/"
_READ: Final = f"{LEDGER_MARKS}read/"


class Read(Struct, frozen=True, array_like=True):
    """How far a partition was read."""

    cluster: str
    offset: int
    """The next record to read."""


class Coming:
    """Commands that the next commit stores."""

    def __init__(self) -> None:
        self.commands: dict[str, DeviceCommand] = {}
        """By id, in the order in which they came."""
        self.of_device: Counter[str] = Counter()
        self.weight_bytes = 0

    def add(self, command: DeviceCommand) -> None:
        """Add a command, for which the ledger has room."""
        self.commands[command.id] = command
        self.of_device[command.device] += 1
        self.weight_bytes += _weight(command)


class Ledger:
    """Open commands in the order in which they came. Its marks must be stored before it is told of a change."""

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings
        self._open: dict[str, DeviceCommand] = {}
        self._of_device: dict[str, dict[str, DeviceCommand]] = {}
        """By device and id."""
        self._bytes = 0
        self._read: dict[str, Read] = {}
        """By topic and partition, as `topic/partition`."""

    def load(self, marks: Mapping[str, bytes]) -> None:
        """Load the marks of an earlier start. Marks that cannot be read are left out."""
        # Marks are in no order. That of expiry is close to that in which they came.
        commands = [each for key, value in marks.items() if (each := _command(key, value)) is not None]
        for command in sorted(commands, key=lambda command: command.expires_us):
            self.add(command)
        for key, value in marks.items():
            if key.startswith(_READ):
                try:
                    self._read[key.removeprefix(_READ)] = msgspec.msgpack.decode(value, type=Read)
                except msgspec.DecodeError:
                    continue

    def __contains__(self, command_id: str) -> bool:
        return command_id in self._open

    def __iter__(self) -> Iterator[DeviceCommand]:
        """The open commands. The ledger may change meanwhile."""
        return iter(tuple(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def get(self, command_id: str) -> DeviceCommand | None:
        """An open command; None if it has ended, or never was."""
        return self._open.get(command_id)

    def of_device(self, device: str) -> tuple[DeviceCommand, ...]:
        """The open commands of a device."""
        return tuple(self._of_device.get(device, {}).values())

    def has_room(self, command: DeviceCommand, coming: Coming) -> bool:
        """Whether one more command may wait, beside those that are `coming`."""
        of_device = len(self._of_device.get(command.device, ())) + coming.of_device[command.device]
        size = self._bytes + coming.weight_bytes + _weight(command)
        return of_device < self._settings.per_device_max and size <= self._settings.bytes_max

    def add(self, command: DeviceCommand) -> None:
        """Record that a command is stored."""
        self._open[command.id] = command
        self._of_device.setdefault(command.device, {})[command.id] = command
        self._bytes += _weight(command)

    def forget(self, command_id: str) -> None:
        """Record that a command's end is stored."""
        command = self._open.pop(command_id)
        of_device = self._of_device[command.device]
        del of_device[command_id]
        if not of_device:
            del self._of_device[command.device]
        self._bytes -= _weight(command)

    def offset(self, topic: str, partition: int, cluster: str) -> int | None:
        """The next record to read of a partition; None if it was never read in this cluster."""
        read = self._read.get(f"{topic}/{partition}")
        return None if read is None or read.cluster != cluster else read.offset

    def has_read(self, topic: str, partition: int, read: Read) -> None:
        """Record that a mark of `reading` is stored."""
        self._read[f"{topic}/{partition}"] = read

    def marks(self) -> list[Mark]:
        """All marks, for another file."""
        read = [Mark(f"{_READ}{key}", msgspec.msgpack.encode(value)) for key, value in self._read.items()]
        return [*map(opening, self), *read]


def opening(command: DeviceCommand) -> Mark:
    """The mark that keeps a command."""
    return Mark(f"{_OPEN}{command.id}", msgspec.msgpack.encode(command))


def ending(command_id: str) -> Mark:
    """The mark that forgets a command."""
    return Mark(f"{_OPEN}{command_id}", None)


def reading(topic: str, partition: int, read: Read) -> Mark:
    """The mark that keeps how far a partition was read."""
    return Mark(f"{_READ}{topic}/{partition}", msgspec.msgpack.encode(read))


def _command(key: str, value: bytes) -> DeviceCommand | None:
    if not key.startswith(_OPEN):
        return None
    try:
        return msgspec.msgpack.decode(value, type=DeviceCommand)
    except msgspec.DecodeError:
        return None


def _weight(command: DeviceCommand) -> int:
    return COMMAND_WEIGHT + len(command.payload)
