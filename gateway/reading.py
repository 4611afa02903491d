"""What an ingress hands over: one reading with what was seen of its time and identity."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct


class Reading(Struct, frozen=True, gc=False):
    """One reading as it came in, before it is routed.

    Times are microseconds of this gateway boot's CLOCK_BOOTTIME: wall time is derived when forwarding.
    """

    topic: str
    """What the routes match: the MQTT topic, or the one made from a serial sensor's device and stream."""
    subject: str
    """Where it came from, for `ce_subject`: the MQTT topic or the serial port."""
    payload: bytes
    received_us: int
    device_boot: str | None = None
    """The sensor's boot identity (`7-1a2b3c4d`: boot counter, incarnation), where it sends one."""
    device_sequence: int | None = None
    tick_ms: int | None = None
    """The sensor's own clock at the measurement, as sent (32 bits, wraps)."""
    event_us: int | None = None
    """The measurement's time as fitted from the tick; None where there is no fit."""
    event_error_us: int = 0
    """Bound of the error of `event_us` against CLOCK_BOOTTIME."""
    writer: str | None = None
    """The one device that this reading's sender may write as; None where anybody may write."""


class Intake(Protocol):
    """The front door of the buffer, as an ingress sees it."""

    def take(self, readings: Sequence[Reading], done: Callable[[bool], None]) -> None:
        """Store readings, in order, in one commit.

        `done(True)` is called on the event loop after the commit that holds all of them is synced: only then
        may they be acknowledged. `done(False)` says that none was stored (buffer full, disk failing): withhold
        the acknowledgement, or report what cannot be sent again by `lost`. Calls of `done` come in the order
        of `take`.
        """

    def lost(self, device: str | None, reason: str, count: int = 1) -> None:
        """Count readings that are gone for good, to be forwarded as a loss record (promise P4)."""

    def event(self, kind: str, device: str | None, **details: object) -> None:
        """Report something about a device on `gateway-events`: `device-appeared`, `device-disconnected`, ..."""
