"""The buffer's data: entries that go in, rows that come out for Kafka, and losses."""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from gateway.reading import Datum
from gateway.record_contract import counter_of

OWN_TYPES = "sluice.gateway."
"""Prefix of `ce_type` for the gateway's own events."""


class StructuredEvents(Struct, frozen=True, omit_defaults=True):
    """A route's wish for structured events: records whose value has all that a binary record has in its headers."""

    instead: bool = False
    """Whether the series' own topic gets them, instead of binary records."""
    beside: bool = False
    """Whether `kafka.structured_topic` gets them too."""
    variables: tuple[tuple[str, str], ...] = ()
    """Names and values of all variables of the route."""


class Series(Struct, frozen=True, cache_hash=True):
    """The fields that many readings have in common; stored once, referred to by number."""

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
    """Names and values of the route's variables, if they go into headers of their own."""
    structured: StructuredEvents | None = None

    @property
    def columns(self) -> tuple[str, str, str, str, str, str]:
        """The columns that tell series apart in the file: all but `stream`.

        The variables, and what the route wants beside, stand behind the content type. So they are in the index, which
        finds a series and is read to salvage a damaged file.
        """
        content_type = self.content_type
        if self.structured is not None:
            # A program that knows of no structured events does not read this, and sends binary records.
            beside = _Beside(self.variables, self.structured)
            content_type += f"{_MORE_FOLLOWS}{msgspec.json.encode(beside).decode()}"
        elif self.variables:
            # No content type has a line end, and JSON escapes it. A program that knows of no variables takes them for a
            # parameter of the content type.
            content_type += f"{_MORE_FOLLOWS}{msgspec.json.encode(self.variables).decode()}"
        return self.topic, self.key, self.device, self.subject, self.type, content_type

    @classmethod
    def of_columns(cls, columns: Sequence[str], stream: str | None = None) -> "Series":
        """The inverse of `columns`. What is damaged behind the content type is left out."""
        topic, key, device, subject, kind, told = columns
        content_type, _, more = told.partition(_MORE_FOLLOWS)
        of_route: _Beside | tuple[tuple[str, str], ...] = ()
        with suppress(msgspec.DecodeError):
            of_route = _more.decode(more or "[]")
        beside = of_route if isinstance(of_route, _Beside) else _Beside(of_route)
        return cls(topic, key, device, subject, kind, content_type, stream or "", beside.variables, beside.structured)

    @property
    def counter(self) -> str:
        """The counter that its readings' numbers belong to."""
        return counter_of(self.stream, self.subject, self.device, self.topic)

    @property
    def is_of_gateway(self) -> bool:
        """Whether it has the gateway's own events."""
        return self.type.startswith(OWN_TYPES)


class _Beside(Struct, frozen=True, omit_defaults=True):
    """The fields of a series that stand behind its content type in the file."""

    variables: tuple[tuple[str, str], ...] = ()
    structured: StructuredEvents | None = None


_MORE_FOLLOWS = ";\n"
_more = msgspec.json.Decoder(_Beside | tuple[tuple[str, str], ...])


@dataclass(frozen=True, slots=True)
class Origin:
    """The sender of readings, as far as it matters for fair shares (`buffer.shares`)."""

    has_secret: bool = False
    """Whether it is a device with a secret of its own. Others may write under made-up names."""
    leaves_room: bool = False
    """Whether it has no secret while other devices here do: the last room is theirs."""
    is_broker: bool = False
    """Whether it brings many devices' readings in one stream: refusing one means refusing all that follow."""


PLAIN = Origin()


class Quarantined(Struct, frozen=True, gc=False, kw_only=True):
    """Input that cannot be forwarded, with everything needed to take it in again.

    Kept whole on this box, bounded by `buffer.quarantine_rows_max`.
    """

    reason: str
    device: str
    subject: str
    topic: str | None = None
    """The topic that routes match, if none took it."""
    writer: str | None = None
    series: int | None = None
    """The number of its series in this file, if it had been routed."""
    boot_id: str | None = None
    """The gateway boot of its times; None for this boot."""
    datum: Datum

    @classmethod
    def of_columns(cls, values: Sequence[Any]) -> "Quarantined":
        """Make input of values in the order of QUARANTINE_COLUMNS. Their types are not checked."""
        *own, _ = cls.__struct_fields__
        return cls(**dict(zip(own, values, strict=False)), datum=Datum.of_columns(values[len(own) :]))

    @classmethod
    def checked(cls, columns: Mapping[str, object]) -> "Quarantined":
        """Make input of columns by name; an old file lacks some of them. Raises msgspec.ValidationError."""
        zeros = {"event_error_us": 0, "doubt": 0}
        of_datum = [columns.get(name, zeros.get(name)) for name in Datum.__struct_fields__]
        # Bytes are told to be known. Else a text, as a damaged type makes one, would be read as base64.
        return msgspec.convert({**columns, "datum": of_datum}, cls, builtin_types=(bytes,))


QUARANTINE_COLUMNS = (*Quarantined.__struct_fields__[:-1], *Datum.__struct_fields__)
"""Columns of the table `quarantine` but for its number, in the order of the fields."""


TICK_VOID = -1
"""The tick of a reading that was taken in again in another gateway boot, if nothing tells how far the boots are apart.
This boot's clocks tell nothing of such a tick, and no bound is claimed for the reading's time."""


class Entry(Struct, gc=False):
    """One row to be stored."""

    series: Series
    datum: Datum
    lost: tuple[int, int] | None = None
    """First and last sequence that the sensor says it dropped. If this entry is new, they make a loss record."""
    quarantined: Quarantined | None = None
    """The quarantined input that this row reports, if it does. The payload is then the report."""
    earliest_us: int | None = None
    """If the sensor sent a time: the lower bound of any event time derived from it later. Not stored."""


TICK_AGE_US_MAX = 2**31 * 1_020
"""Greatest age in microseconds that a tick can give a reading: half a wrap of 32 bits of milliseconds, by the slowest
clock of a sensor. Even a small tick may be so old, if the reading was kept since its sensor started."""


def earliest_event_us(entry: Entry) -> int:
    """The earliest time at which an entry may have been measured: CLOCK_BOOTTIME in microseconds."""
    datum = entry.datum
    if datum.event_us is not None:
        return datum.event_us
    # Its sensor's clock may still be learnt.
    earliest_us = datum.received_us - (0 if datum.tick_ms is None else TICK_AGE_US_MAX)
    return earliest_us if entry.earliest_us is None else min(entry.earliest_us, earliest_us)


SEQUENCE_BITS = 40
SEQUENCE_MAX = (1 << SEQUENCE_BITS) - 1
"""The last sequence of a lane: 10,000 readings a second take 3 years to reach it."""
LANE_MAX = (1 << 63 - SEQUENCE_BITS) - 1
"""The last lane number of a file: a lane each minute takes 15 years to reach it."""


class Position(NamedTuple):
    """A position in the buffer's order: lane number, then sequence in the lane."""

    lane: int
    sequence: int

    @property
    def place(self) -> int:
        """The position as one number, the key of the table `reading`: the sequence in the low bits."""
        return (self.lane << SEQUENCE_BITS) + self.sequence

    @classmethod
    def at(cls, place: int) -> "Position":
        """The position of a place."""
        return cls(place >> SEQUENCE_BITS, place & SEQUENCE_MAX)


START = Position(0, -1)


class Span(NamedTuple):
    """Rows of one lane, from `first` to `last`, both included."""

    lane: int
    first: int
    last: int

    @property
    def places(self) -> tuple[int, int]:
        """The places of the first and the last row."""
        return Position(self.lane, self.first).place, Position(self.lane, min(self.last, SEQUENCE_MAX)).place


class Row(Struct, frozen=True, gc=False, array_like=True):
    """One stored row as the forwarder reads it."""

    lane: int
    sequence: int
    series: int
    datum: Datum

    @classmethod
    def of_columns(cls, values: Sequence[Any]) -> "Row":
        """Make a row of values in the order of ROW_COLUMNS. Their types are not checked."""
        lane, sequence, series, *of_datum = values
        return cls(lane, sequence, series, Datum.of_columns(of_datum))


ROW_COLUMNS = (*Row.__struct_fields__[:-1], *Datum.__struct_fields__)
"""Columns of a row, as `stored_rows` gives them. In the table `reading`, the place stands for the first two."""


def sent_of(datum: Datum) -> int | str | None:
    """The column `sent` of a row: its `device_time_us`, and behind it its `properties`, as one text, if it has some."""
    time_us, properties = datum.device_time_us, datum.properties
    return time_us if properties is None else f"{'' if time_us is None else time_us}{properties}"


def of_sent(sent: str) -> tuple[int | None, str]:
    """The `device_time_us` and `properties` of a text that `sent_of` made. Raises msgspec.ValidationError."""
    time_us, bracket, properties = sent.partition("[")
    if not bracket:
        raise msgspec.ValidationError("there are no properties")
    return msgspec.convert(time_us, int, strict=False) if time_us else None, bracket + properties


def sizes_of(items: Iterable[Entry | Row]) -> list[int]:
    """The sizes of entries or rows, as `Datum.size` has them. To call that for each takes three times as long."""
    return [len(datum.payload) if (datum := item.datum).properties is None else datum.size for item in items]


def spans_of(rows: Sequence[Row]) -> list[Span]:
    """Ordered rows as spans without holes."""
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
    """The spans' rows as ordered spans that neither overlap nor continue each other."""
    found: list[Span] = []
    for span in sorted(spans):
        before = found[-1] if found else None
        if before is not None and span.lane == before.lane and span.first <= before.last + 1:
            found[-1] = Span(span.lane, before.first, max(before.last, span.last))
        else:
            found.append(span)
    return found


def span_at(spans: Sequence[Span], lane: int, sequence: int) -> Span | None:
    """The span, of spans that are `joined`, that holds a row."""
    place = bisect_right(spans, (lane, sequence, sys.maxsize))
    before = spans[place - 1] if place else None
    return before if before is not None and before.lane == lane and sequence <= before.last else None


def without(rows: Sequence[Row], spans: Iterable[Span]) -> list[Row]:
    """The rows that are in none of the spans. If a row was sent twice, two spans hold it."""
    distinct = joined(spans)
    return [row for row in rows if span_at(distinct, row.lane, row.sequence) is None]


@dataclass(frozen=True, slots=True)
class Lane:
    """A run of densely numbered rows; its random name makes `ce_id` unique for ever."""

    number: int
    name: str
    boot_id: str
    buffer_id: str
    """The file that it was opened in; another file than this one if its rows were salvaged."""


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows in memory that neither the file nor Kafka has. Times are CLOCK_BOOTTIME in microseconds."""

    event_from_us: int
    """Earliest event time."""
    first_us: int
    """When the oldest was received."""
    last_us: int
    """When the newest was received."""
    rows: int

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> "PendingRows | None":
        """Sum up entries; None without entries."""
        if not entries:
            return None
        event_from_us = min(earliest_event_us(entry) for entry in entries)
        received_us = [entry.datum.received_us for entry in entries]
        return cls(event_from_us, min(received_us), max(received_us), len(entries))

    @classmethod
    def joined(cls, one: "PendingRows | None", other: "PendingRows | None") -> "PendingRows | None":
        """The sum of both."""
        if one is None or other is None:
            return one or other
        return cls(
            min(one.event_from_us, other.event_from_us),
            min(one.first_us, other.first_us),
            max(one.last_us, other.last_us),
            one.rows + other.rows,
        )


@dataclass(frozen=True, slots=True)
class PendingLane:
    """The part of a lane that Kafka does not have yet."""

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
    """Quarantined input of one gateway boot: its count, and its earliest and latest time, as far as known."""

    boot_id: str
    count: int
    event_from_us: int
    event_to_us: int


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Everything that Kafka does not have yet, as of one moment."""

    lanes: list[PendingLane]
    quarantined: list[QuarantinedSpan]
    is_salvaging: bool
    """Whether a damaged file may still give rows, whose times nobody knows."""


class Loss(Struct):
    """Readings that are gone for good, counted by device and reason (promise P4).

    Times are CLOCK_BOOTTIME of the gateway boot `boot_id`. If the sensor's lost sequences are known, the loss is
    `count` of those from `first_sequence` to `last_sequence`.
    """

    device: str
    """Empty if the device is unknown."""
    reason: str
    boot_id: str
    count: int
    first_us: int
    last_us: int
    device_boot: str = ""
    first_sequence: int | None = None
    last_sequence: int | None = None

    def add(self, other: "Loss") -> None:
        """Add another loss of the same device, boots and reason."""
        self.count += other.count
        self.first_us = min(self.first_us, other.first_us)
        self.last_us = max(self.last_us, other.last_us)
        if other.first_sequence is not None and other.last_sequence is not None:
            first, last = self.first_sequence, self.last_sequence
            self.first_sequence = other.first_sequence if first is None else min(first, other.first_sequence)
            self.last_sequence = other.last_sequence if last is None else max(last, other.last_sequence)


LossKey = tuple[str, str, str, str]
"""Key of a loss counter: device, reason, gateway boot, device boot."""


def loss_key(loss: Loss) -> LossKey:
    return loss.device, loss.reason, loss.boot_id, loss.device_boot
