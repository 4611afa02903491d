"""What goes into the buffer and what comes out of it for Kafka."""

from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class Series:
    """What many readings have in common; stored once, referred to by number."""

    topic: str
    """The Kafka topic."""
    key: str
    """The Kafka key: device identity, or the gateway's for its own events."""
    device: str
    subject: str
    type: str
    """`ce_type`: `sluice.reading`, `sluice.gateway.boot`, ..."""
    content_type: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Input that no route could take; kept whole on this box, bounded by `buffer.quarantine_rows_max`."""

    reason: str
    payload: bytes


class Entry(Struct, frozen=True, gc=False):
    """One row to be stored. Times are microseconds of this gateway boot's CLOCK_BOOTTIME."""

    series: Series
    payload: bytes
    received_us: int
    event_us: int | None = None
    event_error_us: int = 0
    device_boot: str | None = None
    device_sequence: int | None = None
    tick_ms: int | None = None
    quarantined: Quarantined | None = None
    """Set where the row reports quarantined input: `payload` is then the report, and this the input itself."""


class Position(NamedTuple):
    """A place in the buffer's order: lane number, then sequence in the lane."""

    lane: int
    sequence: int


START = Position(0, -1)


class Row(NamedTuple):
    """One stored row as the forwarder reads it; times as in `Entry`, of the lane's gateway boot."""

    lane: int
    sequence: int
    series: int
    received_us: int
    event_us: int | None
    event_error_us: int
    tick_ms: int | None
    device_boot: str | None
    device_sequence: int | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class Lane:
    """A run of densely numbered rows; its random name makes `ce_id` unique for ever."""

    number: int
    name: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class PendingLane:
    """How much of a lane Kafka does not have yet."""

    lane: str
    event_from_us: int
    """Earliest event time that may still be pending, in `boot_id`'s CLOCK_BOOTTIME."""
    event_to_us: int
    boot_id: str
