"""What an ingress hands over: one reading with what was seen of its time and identity."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

WINDOW_SEQUENCES = 64
"""How many recent sequences are remembered per run of a device; a sensor with 2 KB of RAM holds fewer."""
SENSOR_DROPPED = "sensor-ring-overflow"
"""The sensor's memory was full before it could send them, and it said so."""


class BufferFileError(Exception):
    """The buffer file cannot be used; the message says whose fault it is and what to do."""


READING_BYTES = 200
"""What a reading weighs in memory beside the bytes that it came in."""


class Reading(Struct, frozen=True, gc=False):
    """One reading as it came in, before it is routed.

    Times are microseconds of this gateway boot's CLOCK_BOOTTIME: wall time is derived when forwarding.
    """

    topic: str
    """What the routes match: the MQTT topic, or the one made from a serial sensor's device and stream."""
    subject: str
    """Where it came from, for `ce_subject`: the MQTT topic (`topic` itself) or the serial port."""
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
    """Bound of the error of `event_us` against CLOCK_BOOTTIME, or of `device_time_us`."""
    writer: str | None = None
    """The one device that this reading's sender may write as; None where anybody may write."""
    redelivered: bool = False
    """The sender says that it sent this before, and nothing tells whether it is stored: kept, and marked."""
    device_time_us: int | None = None
    """The absolute time that the sensor sent, believed or not: microseconds since 1970, UTC."""

    @property
    def is_serial(self) -> bool:
        """Whether it came in on a serial line."""
        return self.subject != self.topic


def name_of_boot(boot: int, incarnation: int) -> str:
    """How a sensor's boot is written that sends two numbers: its counter alone begins again in an erased EEPROM."""
    return f"{boot}-{incarnation:08x}"


def source(topic: str | None, subject: str) -> str:
    """Where input came from, for people: the MQTT topic, or the one that a serial line's got, with the port."""
    return subject if topic is None or topic == subject else f"{topic} ({subject})"


class Mark(NamedTuple):
    """A small fact that an ingress keeps in the buffer, in one commit with the readings that it goes with.

    Such as an unfinished QoS 2 exchange: the packet id is known to be stored exactly when its reading is.
    """

    key: str
    """`ingress/kind/...`: each ingress owns the keys that begin with its name."""
    value: bytes | None
    """None forgets the key."""


class Intake(Protocol):
    """The front door of the buffer, as an ingress sees it."""

    @property
    def cannot_store(self) -> bool:
        """Whether nothing can be stored at present: the buffer is full, or the disk fails.

        What is taken meanwhile waits in memory, unacknowledged and in order, and `done` is called when it could be
        stored; beyond `buffer.queue_bytes_max` it is `done(False)`. A source that cannot wait (QoS 0) is not taken
        while this holds, but counted by `lost`.
        """

    def take(self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark] = ()) -> None:
        """Store readings, in order, and keep or forget marks, all in one commit.

        `done(True)` is called on the event loop after the commit that holds all of them is synced: only then
        may they be acknowledged. `done(False)` says that none was stored (too much waits already, a device holds more
        than its share, or the gateway stops): withhold the acknowledgement, or report what cannot be sent again by
        `lost`. Calls of `done(True)` come in the order of `take`. Marks alone, without readings, need no room in a full
        buffer; they wait for what was taken before them.
        """

    async def marks(self, prefix: str) -> dict[str, bytes]:
        """The marks that are kept, whose keys begin with `prefix`; for an ingress that starts."""

    def lost(
        self, device: str | None, reason: str, count: int = 1, sequences: tuple[str, int, int] | None = None
    ) -> None:
        """Count readings that are gone for good, to be forwarded as a loss record (promise P4).

        `sequences` are the sensor's boot, and the first and last of its sequences that are lost, where they are known.
        """

    def event(self, kind: str, device: str | None, **details: object) -> None:
        """Report something about a device on `gateway-events`: `device-appeared`, `device-died`, ..."""


class Recalled(NamedTuple):
    """What the buffer knows of one run (one boot) of a device."""

    stored: frozenset[int]
    """Sequences that are stored or in the quarantine; of the last `WINDOW_SEQUENCES` up to the highest, all of them."""
    told_below: int
    """What was lost below this has been told."""


class SerialIntake(Intake, Protocol):
    """What serial lines ask of the front door beyond that."""

    async def recall(self, device: str, boot: str) -> Recalled:
        """What is known of one run (one boot) of a device.

        For an ingress that meets a run that an earlier connection, or an earlier start, may have known. Waits until
        what was taken of it before is stored or refused. Raises BufferFileError.
        """

    def unreadable(self, device: str, subject: str, payload: bytes, received_us: int, reason: str) -> None:
        """Put input that is no reading into the quarantine, as it came; where that takes none, count it as lost.

        For sources that cannot send it again.
        """
