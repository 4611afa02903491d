"""What goes into the buffer and what comes out of it for Kafka."""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import msgspec
from msgspec import Struct

from gateway.record_contract import counter_of

OWN_TYPES = "sluice.gateway."
"""So begins `ce_type` of the gateway's own words."""


class Series(Struct, frozen=True, cache_hash=True):
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
    stream: str = ""
    """The topic that was routed."""
    variables: tuple[tuple[str, str], ...] = ()
    """Its variables by their names in the route's template, where they go into headers of their own."""

    @property
    def columns(self) -> tuple[str, str, str, str, str, str]:
        """What tells it from other series, as the file has it: all but `stream`.

        The variables stand behind the content type. So they are in the index, which finds a series by them, and which
        the salvage of a damaged file reads.
        """
        content_type = self.content_type
        if self.variables:
            # No content type has a line end, and JSON has it escaped. To a program that knows of no variables they are
            # a parameter of the content type.
            content_type += f"{_VARIABLES_FOLLOW}{msgspec.json.encode(self.variables).decode()}"
        return self.topic, self.key, self.device, self.subject, self.type, content_type

    @classmethod
    def of_columns(cls, columns: Sequence[str], stream: str | None = None) -> "Series":
        """The inverse of `columns`. Damaged variables are none."""
        topic, key, device, subject, kind, told = columns
        content_type, _, variables = told.partition(_VARIABLES_FOLLOW)
        of_route: tuple[tuple[str, str], ...] = ()
        with suppress(msgspec.DecodeError):
            of_route = _variables.decode(variables or "[]")
        return cls(topic, key, device, subject, kind, content_type, stream or "", of_route)

    @property
    def counter(self) -> str:
        """The counter that its readings' numbers belong to."""
        return counter_of(self.stream, self.subject, self.device, self.topic)

    @property
    def is_of_gateway(self) -> bool:
        """Whether these are the gateway's own words."""
        return self.type.startswith(OWN_TYPES)


_VARIABLES_FOLLOW = ";\n"
_variables = msgspec.json.Decoder(tuple[tuple[str, str], ...])


@dataclass(frozen=True, slots=True)
class Origin:
    """Who hands readings over, as far as fair shares are concerned (`buffer.shares`)."""

    has_secret: bool = False
    """A device with a secret of its own. Others may write under made-up names."""
    leaves_room: bool = False
    """It has none, and other devices here do: the last room is theirs."""
    is_broker: bool = False
    """It brings many devices' readings in one stream: none can be refused without all that follow."""


PLAIN = Origin()


class Quarantined(Struct, frozen=True, gc=False):
    """Input that cannot be forwarded, with all that taking it in again needs.

    Kept whole on this box, bounded by `buffer.quarantine_rows_max`. Times are of the gateway boot `boot_id`, or of this
    one where that is None.
    """

    reason: str
    payload: bytes
    device: str
    subject: str
    received_us: int
    topic: str | None = None
    """What the routes match, where none took it."""
    writer: str | None = None
    series: int | None = None
    """The series of this file that it belongs to, where it had been routed."""
    event_us: int | None = None
    event_error_us: int = 0
    tick_ms: int | None = None
    device_boot: str | None = None
    device_sequence: int | None = None
    boot_id: str | None = None
    doubt: int = 0
    """A `Doubt`, or 0."""
    device_time_us: int | None = None


TICK_VOID = -1
"""The tick of a reading that was taken in again in another boot than that of its receipt, where nothing is known of how
far apart these are: a clock of this boot tells nothing of it, and no bound is claimed for its time."""


class Doubt(IntEnum):
    """Why a reading, or its identity, may be stored already. It is stored again: a false match would lose data."""

    REDELIVERED = 1
    """Its sender sent it before, and nothing tells whether it is stored."""
    CONFLICT = 2
    """The sensor's boot and sequence are those of a stored reading with another payload."""


class Entry(Struct, gc=False):
    """One row to be stored. Times are microseconds of this gateway boot's CLOCK_BOOTTIME.

    Not frozen: readings that came in together are given their times when all of them are known.
    """

    series: Series
    payload: bytes
    received_us: int
    event_us: int | None = None
    event_error_us: int = 0
    device_boot: str | None = None
    device_sequence: int | None = None
    tick_ms: int | None = None
    doubt: int = 0
    """A `Doubt`, or 0."""
    lost: tuple[int, int] | None = None
    """The first and last of the sequences that the sensor says it dropped: a loss record, where this entry is new."""
    quarantined: Quarantined | None = None
    """Set where the row reports quarantined input: `payload` is then the report, and this the input itself."""
    device_time_us: int | None = None
    """The absolute time that the sensor sent, believed or not: wall time, microseconds since 1970, UTC. Its bound is
    `event_error_us`."""
    earliest_us: int | None = None
    """Where it sent one: no event time that is derived from it later is below this. Not stored."""


TICK_AGE_US_MAX = 2**31 * 1_020
"""How old its tick may make a reading: half a wrap of 32 bits, of milliseconds of the slowest clock that a sensor may
have. That tick may be a small one: it was kept since its sensor started."""


def earliest_event_us(entry: Entry) -> int:
    """When an entry was measured at the earliest: CLOCK_BOOTTIME in microseconds."""
    if entry.event_us is not None:
        return entry.event_us
    # Its sensor's clock may still be learnt.
    earliest_us = entry.received_us - (0 if entry.tick_ms is None else TICK_AGE_US_MAX)
    return earliest_us if entry.earliest_us is None else min(entry.earliest_us, earliest_us)


class Position(NamedTuple):
    """A place in the buffer's order: lane number, then sequence in the lane."""

    lane: int
    sequence: int


START = Position(0, -1)


class Span(NamedTuple):
    """Rows of one lane, from `first` to `last`, both included."""

    lane: int
    first: int
    last: int


class Row(Struct, frozen=True, gc=False, array_like=True):
    """One stored row as the forwarder reads it; times as in `Entry`, of the lane's gateway boot.

    The fields are the columns of `reading`, in their order.
    """

    lane: int
    sequence: int
    series: int
    received_us: int
    event_us: int | None
    event_error_us: int
    tick_ms: int | None
    """None also where it stands in the payload and `event_us` follows from it."""
    device_boot: str | None
    device_sequence: int | None
    payload: bytes
    doubt: int
    """A `Doubt`, or 0."""
    device_time_us: int | None = None
    """See `Entry`."""


def is_sound(row: Row) -> bool:
    """Whether every field is of its type: what a damaged file gives may be anything."""
    return (
        type(row.lane) is int
        and type(row.sequence) is int
        and type(row.series) is int
        and type(row.received_us) is int
        and (row.event_us is None or type(row.event_us) is int)
        and type(row.event_error_us) is int
        and (row.tick_ms is None or type(row.tick_ms) is int)
        and (row.device_boot is None or type(row.device_boot) is str)
        and (row.device_sequence is None or type(row.device_sequence) is int)
        and type(row.payload) is bytes
        and type(row.doubt) is int
        and (row.device_time_us is None or type(row.device_time_us) is int)
    )


def spans_of(rows: Sequence[Row]) -> list[Span]:
    """The rows, which are in order, as spans without holes."""
    if rows and rows[-1].lane == rows[0].lane and rows[-1].sequence - rows[0].sequence == len(rows) - 1:
        return [Span(rows[0].lane, rows[0].sequence, rows[-1].sequence)]
    spans: list[Span] = []
    for row in rows:
        last = spans[-1] if spans else None
        if last is not None and row.lane == last.lane and row.sequence == last.last + 1:
            spans[-1] = Span(last.lane, last.first, row.sequence)
        else:
            spans.append(Span(row.lane, row.sequence, row.sequence))
    return spans


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same rows as spans in their order, none of which overlaps another, or goes on where another ends."""
    found: list[Span] = []
    for span in sorted(spans):
        before = found[-1] if found else None
        if before is not None and span.lane == before.lane and span.first <= before.last + 1:
            found[-1] = Span(span.lane, before.first, max(before.last, span.last))
        else:
            found.append(span)
    return found


def span_at(spans: Sequence[Span], lane: int, sequence: int) -> Span | None:
    """Which of these spans, which are `joined`, holds a row."""
    place = bisect_right(spans, (lane, sequence, sys.maxsize))
    before = spans[place - 1] if place else None
    return before if before is not None and before.lane == lane and sequence <= before.last else None


def without(rows: Sequence[Row], spans: Iterable[Span]) -> list[Row]:
    """The rows that are in none of the spans. A row that was sent twice is in two of them."""
    distinct = joined(spans)
    return [row for row in rows if span_at(distinct, row.lane, row.sequence) is None]


@dataclass(frozen=True, slots=True)
class Lane:
    """A run of densely numbered rows; its random name makes `ce_id` unique for ever."""

    number: int
    name: str
    boot_id: str
    buffer_id: str
    """The file that it was opened in: another than this one where its rows were salvaged."""


@dataclass(frozen=True, slots=True)
class PendingLane:
    """How much of a lane Kafka does not have yet."""

    lane: str
    event_from_us: int
    """Earliest event time that may still be pending, in `boot_id`'s CLOCK_BOOTTIME."""
    event_to_us: int
    boot_id: str
    received_us: int
    """When its oldest row was received."""
    rows: int


@dataclass(frozen=True, slots=True)
class QuarantinedSpan:
    """Quarantined input of one gateway boot: how much, and its earliest and latest time, as far as it is known."""

    boot_id: str
    count: int
    event_from_us: int
    event_to_us: int


@dataclass(frozen=True, slots=True)
class Outstanding:
    """What Kafka does not have yet, all of it as of one moment."""

    lanes: list[PendingLane]
    quarantined: list[QuarantinedSpan]
    is_salvaging: bool
    """Whether a damaged file may still give rows: of what time, nobody knows."""


class Loss(Struct):
    """Readings that are gone for good, counted by device and reason (promise P4).

    Times are CLOCK_BOOTTIME of the gateway boot `boot_id`. The sensor's sequences are given where it sends some and
    lost ones are known: `count` of those from `first_sequence` to `last_sequence`.
    """

    device: str
    """Empty where the device is not known."""
    reason: str
    boot_id: str
    count: int
    first_us: int
    last_us: int
    device_boot: str = ""
    first_sequence: int | None = None
    last_sequence: int | None = None

    def add(self, other: "Loss") -> None:
        """Count another loss of the same device, boot and reason with this one."""
        self.count += other.count
        self.first_us = min(self.first_us, other.first_us)
        self.last_us = max(self.last_us, other.last_us)
        if other.first_sequence is not None and other.last_sequence is not None:
            first, last = self.first_sequence, self.last_sequence
            self.first_sequence = other.first_sequence if first is None else min(first, other.first_sequence)
            self.last_sequence = other.last_sequence if last is None else max(last, other.last_sequence)


LossKey = tuple[str, str, str, str]
"""Device, reason, gateway boot, device boot: what a loss is counted by."""


def loss_key(loss: Loss) -> LossKey:
    return loss.device, loss.reason, loss.boot_id, loss.device_boot
