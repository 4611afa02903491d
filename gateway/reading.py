"""Readings and marks that an ingress hands over, and the `Intake` that stores them."""

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

WINDOW_SEQUENCES = 64
"""Recent sequence numbers that are remembered per run of a device; a sensor with 2 KB of RAM holds fewer."""
SENSOR_DROPPED = "sensor-ring-overflow"
"""Loss reason: the sensor said that its memory was full before it could send the readings."""


class BufferFileError(Exception):
    """The buffer file cannot be used; the message says whose fault it is and what to do."""


READING_BYTES = 200
"""Bytes that a reading takes in memory beside the bytes that it came in."""


class Doubt(IntEnum):
    """Why a reading, or its identity, may be stored already. It is stored again, as a false match would lose data."""

    REDELIVERED = 1
    """Its sender sent it before, and nothing tells whether it is stored."""
    CONFLICT = 2
    """A stored reading has the same boot and sequence of the sensor, but another payload."""


class Datum(Struct, gc=False, array_like=True, kw_only=True):
    """One payload with its number and times. It stays one object from the ingress to Kafka.

    The fields are the last columns of a row, as `buffer.stored_rows` gives them. Times are microseconds of
    CLOCK_BOOTTIME, of the gateway boot that received it: wall time is derived when forwarding. Not frozen: the front
    door completes it by what is in the payload, and readings that came in together get their times once all are known.
    """

    received_us: int
    event_us: int | None = None
    """The measurement's time; None if nothing tells it, or nothing yet."""
    event_error_us: int = 0
    """Bound of the error of `event_us` against CLOCK_BOOTTIME, or of `device_time_us`."""
    tick_ms: int | None = None
    """The sensor's own clock at the measurement, as sent (32 bits, wraps). None also if the tick is in the payload and
    `event_us` follows from it."""
    device_boot: str | None = None
    """The sensor's boot identity (`7-1a2b3c4d`: boot counter, incarnation); None if it sends none."""
    device_sequence: int | None = None
    payload: bytes
    doubt: int = 0
    """A `Doubt`, or 0."""
    device_time_us: int | None = None
    """The absolute time that the sensor sent, believed or not: microseconds since 1970, UTC."""
    properties: str | None = None
    """User properties of its MQTT 5 message that go into headers, as `gateway.user_properties` writes them."""

    @property
    def size(self) -> int:
        """Bytes of the payload and of the properties, as they are stored."""
        return len(self.payload) if self.properties is None else len(self.payload) + len(self.properties)

    @classmethod
    def of_columns(cls, values: Iterable[Any]) -> "Datum":
        """Make a datum of values in the order of the fields. Their types are not checked."""
        return cls(**dict(zip(cls.__struct_fields__, values, strict=True)))


class Reading(Struct, frozen=True, gc=False):
    """One reading as it came in, before it is routed."""

    topic: str
    """The topic that routes match: the MQTT topic, or one made from a serial sensor's device and stream."""
    subject: str
    """The origin for `ce_subject`: the MQTT topic (`topic` itself) or the serial port."""
    datum: Datum
    writer: str | None = None
    """The one device that this reading's sender may write as; None if anybody may write as any device."""
    user: tuple[tuple[str, str], ...] = ()
    """User properties of its MQTT 5 message: names and values, in their order."""

    @property
    def is_serial(self) -> bool:
        """Whether it came in on a serial line."""
        return self.subject != self.topic


def name_of_boot(boot: int, incarnation: int) -> str:
    """Name the boot of a sensor that sends two numbers. If its EEPROM is erased, the counter alone begins again."""
    return f"{boot}-{incarnation:08x}"


def source(topic: str | None, subject: str) -> str:
    """Name the origin of input for people: the MQTT topic, or a serial reading's topic and port."""
    return subject if topic is None or topic == subject else f"{topic} ({subject})"


class Mark(NamedTuple):
    """A small fact that an ingress keeps in the buffer, in one commit with the readings that it concerns.

    An example is an unfinished QoS 2 exchange: its packet identifier is on disk exactly if its reading is.
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

        Readings taken meanwhile wait in memory, unacknowledged and in order, until they can be stored. Beyond
        `buffer.queue_bytes_max`, `take` calls `done(False)`. While this holds, readings whose source cannot wait
        (QoS 0) are not taken, but counted by `lost`.
        """

    def take(self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark] = ()) -> None:
        """Store readings, in order, and keep or forget marks, all in one commit. Kafka may have the readings first.

        `done(True)` is called on the event loop once each reading has a durable copy: on disk, or with Kafka's
        replicas. Marks are on disk then. Only now may the readings be acknowledged. `done(False)` means that none was
        stored: too much waits already, a device holds more than its share, or the gateway stops. It also comes if some
        have no copy, as neither Kafka nor the disk takes them. After it withhold the acknowledgement, and count
        readings that cannot be sent again by `lost`. For one device, or for a site's broker, calls of `done(True)` come
        in the order of `take`. Those for others may overtake them, as their Kafka topics answer sooner, or need no
        disk. Marks are kept in the order of `take`, and need no room in a full buffer.
        """

    async def marks(self, prefix: str) -> dict[str, bytes]:
        """Return the kept marks whose keys begin with `prefix`, for an ingress that starts."""

    def lost(
        self, device: str | None, reason: str, count: int = 1, sequences: tuple[str, int, int] | None = None
    ) -> None:
        """Count readings that are gone for good, to be forwarded as a loss record (promise P4).

        `sequences` are the sensor's boot, and the first and last sequence number that are lost, if they are known. With
        `count` 0, some of these numbers may be lost. The record then says so of these numbers alone.
        """

    def event(self, kind: str, device: str | None, **details: object) -> None:
        """Report something about a device on `gateway-events`: `device-appeared`, `device-died`, ..."""


class ListenerIntake(Intake, Protocol):
    """The front door of the buffer, as the MQTT listener sees it."""

    @property
    def refuses_by_share(self) -> bool:
        """Asked inside `done(False)`: whether the only reason is that a device holds more than its share."""


class Recalled(NamedTuple):
    """The buffer's knowledge of one run (one boot) of a device."""

    stored: frozenset[int]
    """Sequence numbers stored or in the quarantine; complete for the last `WINDOW_SEQUENCES` up to the highest."""
    told_below: int
    """Losses below this sequence number have been reported, or are none of this gateway's."""
    known_from: int = 0
    """Below this sequence number, Kafka may have some that `stored` lacks: a crash took the knowledge of them."""


class SerialIntake(Intake, Protocol):
    """The front door of the buffer, as serial lines see it."""

    async def recall(self, device: str, boot: str, held: range) -> Recalled:
        """Return the buffer's knowledge of one run (one boot) of a device, which holds these sequence numbers.

        An ingress calls this for a run that an earlier connection or start may have known. It waits until the run's
        earlier readings are stored or refused. Raises BufferFileError.
        """

    def unreadable(self, device: str, subject: str, payload: bytes, received_us: int, reason: str) -> None:
        """Put input that is no reading into the quarantine, as it came; if it cannot be stored, count it as lost.

        This is for sources that cannot send the input again.
        """
