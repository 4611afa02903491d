"""States of gateways' boxes: versions, clocks, disks and conditions, as events `state` tell them. It needs no Spark.

docs/kafka-records.md describes the event. A state does not say how far a gateway has come: no window depends on it.
"""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.log.edges import Edge

NAMES_MAX = 100
Text = Annotated[str, Meta(max_length=1_000)]
Texts = Annotated[list[Text], Meta(max_length=NAMES_MAX)]
Number = Annotated[int, Meta(ge=0, le=2**53)]


class Update(Struct, frozen=True):
    """The last update of the box's image."""

    to: Text | None = None
    result: Text | None = None
    reason: Text | None = None


class FleetState(Struct, frozen=True):
    """How the box stands to the fleet's file."""

    serial: Number | None = None
    wish: Text | None = None
    result: Text | None = None
    reason: Text | None = None
    trouble: Text | None = None


class Clock(Struct, frozen=True):
    """The box's clock."""

    synced: bool | None = None
    source: Text | None = None
    error_us: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class Disk(Struct, frozen=True):
    """The disk under the buffer."""

    free_bytes: Number | None = None
    bytes: Number | None = None
    life_used_tenths: Annotated[int, Meta(ge=0, le=1_000)] | None = None
    written_bytes_per_day: Number | None = None
    spared: Number | None = None


class Memory(Struct, frozen=True):
    """The box's memory."""

    free_bytes: Number | None = None
    bytes: Number | None = None


class Devices(Struct, frozen=True):
    """Devices of the gateway."""

    known: Number | None = None
    heard: Number | None = None
    silent: Number | None = None
    silent_named: Texts = field(default_factory=list)


class Conditions(Struct, frozen=True):
    """Codes of what is not well, by level."""

    bad: Texts
    warn: Texts
    note: Texts


class BoxState(Struct, frozen=True):
    """The value of an event `state`. A member that a gateway of another release does not tell is not known."""

    version: Text
    lane_number: Number
    conditions: Conditions
    image: Text | None = None
    slot: Text | None = None
    update: Update | None = None
    fleet: FleetState | None = None
    heartbeat_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    settings: Text | None = None
    clock: Clock = Clock()
    disk: Disk = Disk()
    memory: Memory = Memory()
    addresses: Texts = field(default_factory=list)
    uplink_s: Number | None = None
    ports: dict[Text, Text] = field(default_factory=dict)
    devices: Devices = Devices()


class ToldState(NamedTuple):
    """A state, and when its gateway told it."""

    edge: Edge
    state: BoxState

    def is_later_than(self, other: "ToldState") -> bool:
        """Whether this state of a buffer was told after another one, whenever Kafka gets them.

        If the clock of one of two boots is not known, lanes decide. A buffer that was restored from an old copy begins
        again at a lower lane, so lanes decide nothing else.
        """
        ours, theirs = self.edge, other.edge
        if ours.gateway_boot == theirs.gateway_boot:
            return ours.boot_time_us > theirs.boot_time_us
        if max(ours.time_error_us, theirs.time_error_us) < TIME_ERROR_UNKNOWN_US:
            return ours.event_us > theirs.event_us
        return self.state.lane_number > other.state.lane_number


def read_state(edge: Edge, value: bytes) -> ToldState:
    """Read an event. Raises msgspec.DecodeError, UnicodeDecodeError."""
    return ToldState(edge, msgspec.json.decode(value, type=BoxState))
