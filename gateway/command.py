"""A command from the cloud for a device, and the `CommandWay` of an ingress that passes it on."""

from typing import Final, Literal, Protocol

from msgspec import Struct


class DeviceCommand(Struct, frozen=True, gc=False, array_like=True):
    """A command until it ends. It is stored in this form: new fields go last, with a default."""

    id: str
    """The sender's name for it."""
    device: str
    topic: str
    """Levels of the MQTT topic below the device's; empty if there are none."""
    payload: bytes
    expires_us: int
    """Microseconds since 1970, UTC. From then on it must not be passed on."""


REFUSED_BY_DEVICE: Final = "refused-by-device"
"""Reason of a refusal: the device answered that it does not take the command."""
By = Literal["mqtt", "serial"]
"""How a device was reached."""
Outcome = Literal["delivered", "expired", "refused", "unknown-device"]
"""How a command ended."""


class CommandReports(Protocol):
    """Hears from an ingress what became of commands."""

    def delivered(self, command_id: str, by: By) -> None:
        """The device has acknowledged a command. It may say so twice, or after the command's end."""

    def refused(self, command_id: str, reason: str) -> None:
        """The device, or the way to it, does not take a command and never will."""

    def ready(self, device: str) -> None:
        """A device that could not be reached may be reached now."""


class CommandWay(Protocol):
    """An ingress that passes commands on to its devices. It stores none of them."""

    reports: CommandReports | None
    """Set before any other call."""

    def knows(self, device: str) -> bool:
        """Whether the device is one of this ingress, although it may be away just now."""

    def offer(self, command: DeviceCommand, until_us: int) -> None:
        """Pass a command on, if the device can be reached and the command is not on its way already.

        This is called again and again until the command ends. `until_us` is the CLOCK_BOOTTIME from which on it may
        have expired, by what is known of the time now.
        """

    def withdraw(self, command_id: str) -> bool:
        """Stop passing a command on, as it has ended. Returns whether the device may have got it."""
