"""Keeps each gateway's newest heartbeat that counts, and later ones that wait. It needs no Spark.

A heartbeat says what Kafka had acknowledged at its moment, and what still waited. It counts once `log` has all records
that it calls acknowledged. Until then it waits here. It does not wait for two kinds of topics: the gateway's
quarantine, whose records are no readings, and topics that Kafka no longer has.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.decode.codec_numbers import DEPTH_MAX, is_deep
from spark.decode.record_types import KAFKA_SLACK_US, SET_ASIDE_TYPE, STATE_TYPE
from spark.finality.box_states import ToldState, read_state
from spark.finality.gateway_rows import GatewayRow, Span
from spark.log.edge_times import EARLIEST_US, FOREVER_US, LATEST_US
from spark.log.edges import Edge
from spark.source.topic_changes import TopicOffsets

WAITING_MAX = 100
"""Heartbeats of one buffer that wait for their offsets. Beyond it, those that lie far apart are kept. If one is
dropped, a window may become final a little later, but never wrongly."""
BOOTS_MAX = 20
"""Boots of a gateway whose clocks are remembered."""
BOXES_MAX = 20
"""Buffers of a gateway whose states are remembered."""
QUARANTINE_TOPIC = "gateway-quarantine"
"""Default topic of a gateway's quarantine. A heartbeat may name another, but no record in this topic is a reading."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AHEAD = f"more than {KAFKA_SLACK_US // 1_000_000} s after Kafka took it in"


class GatewayEvent(NamedTuple):
    """A record of `gateway-events`, from columns of `log`."""

    type: str
    namespace: str
    gateway: str
    buffer: str
    order: tuple[int, str, int, int]
    """Kafka's timestamp in microseconds, topic, partition and offset."""
    edge: Edge
    value: bytes | None


ROWS_MAX = 2**53
"""Rows, inputs or seconds in an event. More is a mistake, and sums of more might not fit into the tables' columns."""
Count = Annotated[int, Meta(ge=0, le=ROWS_MAX)]
Time = Annotated[datetime, Meta(tz=True)]
Lane = Annotated[str, Meta(max_length=64)]


class _Pending(msgspec.Struct):
    lane: Lane
    rows: Count
    from_: Time | None = msgspec.field(name="from")
    to: Time | None


class _Quarantined(msgspec.Struct):
    count: Count
    from_: Time | None = msgspec.field(name="from")
    to: Time | None


class _Body(msgspec.Struct):
    offsets: dict[
        Annotated[str, Meta(max_length=249)],
        dict[Annotated[int, Meta(ge=0, le=2**31 - 1)], Annotated[int, Meta(ge=0, le=2**63 - 1)]],
    ]
    pending: list[_Pending]
    quarantined: list[_Quarantined]
    low_watermark: Time | None
    depth_rows: Count = 0
    oldest_age_s: Annotated[float, Meta(ge=0, le=ROWS_MAX / 1_000)] | None = None
    quarantine_topic: Annotated[str, Meta(max_length=249)] = QUARANTINE_TOPIC


class _SetAside(msgspec.Struct):
    buffer: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    """Id of the damaged buffer."""


class EventError(ValueError):
    """A gateway's event cannot be read, or cannot be true. The message is the reject's reason."""


@dataclass(frozen=True, slots=True)
class Told:
    """One heartbeat."""

    order: tuple[int, str, int, int]
    edge: Edge
    offsets: dict[str, dict[int, int]]
    low_watermark_us: int | None
    pending: tuple[Span, ...]
    quarantined: tuple[Span, ...]
    depth_rows: int
    oldest_age_ms: int | None
    quarantine_topic: str = QUARANTINE_TOPIC

    def topics(self) -> set[str]:
        """The topics to which the gateway has sent readings and events."""
        return self.offsets.keys() - {QUARANTINE_TOPIC, self.quarantine_topic}


@dataclass(slots=True)
class BufferState:
    """The heartbeats of one buffer file of a gateway. A swapped card may still hold readings that were not sent."""

    counted: Told | None = None
    """Newest heartbeat that counts."""
    waiting: list[Told] = field(default_factory=list)
    """Later heartbeats in Kafka's order."""
    until_us: int | None = None
    """Latest time at which another buffer may have begun to take readings; None for the present buffer."""
    is_former: bool = False
    is_over: bool = False
    """True if the gateway set the buffer aside. Its successor has all readable rows, and tells of them."""
    unread: tuple[str, ...] = ()
    """Topics that the newest heartbeat names and the job does not read."""

    @property
    def newest(self) -> Told | None:
        """The last heartbeat, whether it counts or not."""
        return self.waiting[-1] if self.waiting else self.counted


@dataclass(slots=True)
class GatewayState:
    """The buffers and the boots of one gateway."""

    buffers: dict[str, BufferState] = field(default_factory=dict)
    newest: tuple[int, str, int, int] | None = None
    boots: dict[str, Edge] = field(default_factory=dict)
    """Time of each boot's heartbeat with the smallest bound."""
    boxes: dict[str, ToldState] = field(default_factory=dict)
    """By buffer: the newest state that was told. One that waited in a backlog comes after newer ones."""


class GatewayStates:
    """The states of all gateways."""

    def __init__(self, gateways: dict[tuple[str, str], GatewayState] | None = None) -> None:
        """Take states by namespace and name. They are changed in place."""
        self.gateways = {} if gateways is None else gateways
        """States by namespace and name."""

    def take(
        self,
        events: Iterable[GatewayEvent],
        held: TopicOffsets,
        reads: Callable[[str], bool] | None = None,
        gone: Collection[str] = (),
    ) -> set[tuple[str, str]]:
        """Take up a batch's events, and find the heartbeats that count now. Return the gateways whose states changed.

        `held` has the next offsets of `log`, with this batch; a topic that is not in it has no records there. `reads`
        tells whether the job reads a topic; without it, `unread` stays as it was. `gone` are topics that Kafka no
        longer has. Events that came before change nothing, and neither do events with a fault. The latter are rejects,
        but an older `log` may hold some as good.
        """
        changed: set[tuple[str, str]] = set()
        for event in sorted(events, key=lambda event: event.order):
            try:
                said = _read(event)
            except EventError:
                continue
            self._take(event, said)
            changed.add((event.namespace, event.gateway))
        for key, gateway in self.gateways.items():
            for buffer in gateway.buffers.values():
                counts = _count(buffer, held, gone)
                if _leave_out(buffer, reads, gone) or counts:
                    changed.add(key)
        return changed

    def topics(self) -> frozenset[str]:
        """Return the topics that heartbeats name, except quarantines."""
        buffers = [buffer for gateway in self.gateways.values() for buffer in gateway.buffers.values()]
        return frozenset().union(*(buffer.newest.topics() for buffer in buffers if buffer.newest is not None))

    def _take(self, event: GatewayEvent, said: "Told | ToldState | _SetAside") -> None:
        gateway = self.gateways.setdefault((event.namespace, event.gateway), GatewayState())
        if isinstance(said, ToldState):
            _note_box(gateway.boxes, event.buffer, said)
        elif isinstance(said, _SetAside):
            gateway.buffers.setdefault(said.buffer, BufferState()).is_over = True
        else:
            _note_boot(gateway.boots, event.edge)
            _note_buffer(gateway, event)
            _wait(gateway.buffers[event.buffer], said)

    def rows(self) -> list[GatewayRow]:
        """Return a row for each buffer file of all gateways."""
        return [
            _row(*key, name, buffer)
            for key, gateway in sorted(self.gateways.items())
            for name, buffer in sorted(gateway.buffers.items())
            if not buffer.is_over
        ]

    def present_rows(self) -> list[GatewayRow]:
        """Return a row for the present buffer file of each gateway."""
        return [row for row in self.rows() if row.is_present]

    def box(self, namespace: str, gateway: str, buffer: str) -> ToldState | None:
        """Return what a gateway with this buffer last told of its box; None if nothing."""
        return self.gateways[namespace, gateway].boxes.get(buffer)

    def heard_us(self, gateway: tuple[str, str]) -> int | None:
        """When Kafka took in the newest heartbeat of a gateway, by namespace and name; None if there was none."""
        newest = self.gateways[gateway].newest
        return None if newest is None else newest[0]

    def boots(self) -> dict[tuple[str, str, str], Edge]:
        """Return the time of a heartbeat of each boot with a known time, by namespace, gateway and boot."""
        return {(*key, boot): edge for key, gateway in self.gateways.items() for boot, edge in gateway.boots.items()}


def fault_of(event: GatewayEvent) -> str | None:
    """The fault of an event; None if there is none."""
    try:
        _read(event)
    except EventError as error:
        return str(error)
    return None


def _read(event: GatewayEvent) -> "Told | ToldState | _SetAside":
    """Read an event. Raises EventError."""
    value = event.value
    if value is None:
        raise EventError("it has no value, or it is far longer than what else gateways tell in its batch")
    # The decoder's own bound is the rest of Python's stack, which differs from call to call.
    if is_deep(value):
        raise EventError(f"more than {DEPTH_MAX} levels of JSON")
    try:
        if event.type == SET_ASIDE_TYPE:
            return msgspec.json.decode(value, type=_SetAside)
        if event.type == STATE_TYPE:
            _expect_past(event)
            return read_state(event.edge, value)
        told = _told(event, msgspec.json.decode(value, type=_Body))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EventError(f"it is not what a gateway tells: {error}") from error
    _expect_possible(event, told)
    return told


def _told(event: GatewayEvent, body: _Body) -> Told:
    age_s = body.oldest_age_s
    return Told(
        event.order,
        event.edge,
        body.offsets,
        _us(body.low_watermark),
        tuple(Span(lane.lane, lane.rows, _us(lane.from_), _us(lane.to)) for lane in body.pending),
        tuple(Span(None, span.count, _us(span.from_), _us(span.to)) for span in body.quarantined),
        body.depth_rows,
        None if age_s is None else round(age_s * 1_000),
        body.quarantine_topic,
    )


def _expect_possible(event: GatewayEvent, told: Told) -> None:
    """Check that a heartbeat promises nothing about times after it. Raises EventError.

    A clock that is unknown, or shows a year long past, makes no false promise.
    """
    if told.low_watermark_us is not None and told.low_watermark_us > event.order[0] + KAFKA_SLACK_US:
        raise EventError(f"its low_watermark lies {_AHEAD}")
    _expect_past(event)


def _expect_past(event: GatewayEvent) -> None:
    """Check that an event does not come from after Kafka took it in. Raises EventError."""
    edge = event.edge
    until_us = event.order[0] + KAFKA_SLACK_US
    if edge.time_error_us < TIME_ERROR_UNKNOWN_US and edge.event_us - edge.time_error_us > until_us:
        raise EventError(f"its ce_time, less its ce_timeerror, lies {_AHEAD}")


def _us(time: datetime | None) -> int | None:
    """A time in microseconds since 1970. Raises EventError if it is outside the years 2 to 9999."""
    if time is None:
        return None
    since = time - EPOCH
    us = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    if not EARLIEST_US <= us <= LATEST_US:
        raise EventError("a time in it lies outside the years 2 to 9999")
    return us


def _note_boot(boots: dict[str, Edge], edge: Edge) -> None:
    known = boots.get(edge.gateway_boot)
    if edge.time_error_us < TIME_ERROR_UNKNOWN_US and (known is None or _sureness(edge) < _sureness(known)):
        boots.pop(edge.gateway_boot, None)
        boots[edge.gateway_boot] = edge
        if len(boots) > BOOTS_MAX:
            del boots[min(boots, key=lambda boot: boots[boot].event_us)]


def _note_box(boxes: dict[str, ToldState], buffer: str, told: ToldState) -> None:
    known = boxes.pop(buffer, None)
    # The last one is the buffer that was spoken of last.
    boxes[buffer] = told if known is None or told.is_later_than(known) else known
    if len(boxes) > BOXES_MAX:
        del boxes[next(iter(boxes))]


def _sureness(edge: Edge) -> tuple[int, int]:
    return edge.time_error_us, edge.boot_time_us


def _note_buffer(gateway: GatewayState, event: GatewayEvent) -> None:
    """Record the buffer that takes readings now. A gateway's events are in order, because they are in one partition."""
    gateway.buffers.setdefault(event.buffer, BufferState(is_former=gateway.newest is not None))
    if gateway.newest is not None and event.order <= gateway.newest:
        return
    gateway.newest = event.order
    known = event.edge.time_error_us < TIME_ERROR_UNKNOWN_US
    for name, buffer in gateway.buffers.items():
        if name == event.buffer:
            # A card that was put back is in use again.
            buffer.is_former, buffer.until_us = False, None
        else:
            buffer.is_former = True
            if buffer.until_us is None and known:
                buffer.until_us = min(event.edge.event_us + event.edge.time_error_us, FOREVER_US)


def _wait(buffer: BufferState, told: Told) -> None:
    if buffer.newest is not None and told.order <= buffer.newest.order:
        return
    buffer.waiting.append(told)
    if len(buffer.waiting) > WAITING_MAX:
        # Drop the one whose neighbours are nearest, but neither the oldest, which counts first, nor the newest.
        between = range(1, len(buffer.waiting) - 1)
        del buffer.waiting[min(between, key=lambda place: _distance(buffer.waiting, place))]


def _distance(waiting: list[Told], place: int) -> int:
    return waiting[place + 1].order[0] - waiting[place - 1].order[0]


def _count(buffer: BufferState, held: TopicOffsets, gone: Collection[str]) -> bool:
    for place in reversed(range(len(buffer.waiting))):
        if _is_read(buffer.waiting[place], held, gone):
            buffer.counted = buffer.waiting[place]
            del buffer.waiting[: place + 1]
            return True
    return False


def _is_read(told: Told, held: TopicOffsets, gone: Collection[str]) -> bool:
    return all(
        offset <= held.get(topic, {}).get(partition, 0)
        for topic in told.topics()
        if topic not in gone
        for partition, offset in told.offsets[topic].items()
    )


def _leave_out(buffer: BufferState, reads: Callable[[str], bool] | None, gone: Collection[str]) -> bool:
    """Record the topics that a buffer writes to and the job does not read. Return True if they have changed."""
    if reads is None or buffer.newest is None:
        return False
    before = buffer.unread
    topics = buffer.newest.topics()
    buffer.unread = tuple(sorted(topic for topic in topics if topic not in gone and not reads(topic)))
    return buffer.unread != before


def _row(namespace: str, gateway: str, name: str, buffer: BufferState) -> GatewayRow:
    told = buffer.counted
    waiting, until_us = len(buffer.waiting), buffer.until_us
    if told is None:
        return GatewayRow(
            *(namespace, gateway, name),
            waiting=waiting,
            until_us=until_us,
            unread=buffer.unread,
            is_present=not buffer.is_former,
        )
    return GatewayRow(
        namespace=namespace,
        gateway=gateway,
        buffer=name,
        heartbeat=told.edge,
        promises=told.low_watermark_us is not None,
        low_watermark_us=told.low_watermark_us,
        pending=told.pending,
        quarantined=told.quarantined,
        depth_rows=told.depth_rows,
        oldest_age_ms=told.oldest_age_ms,
        waiting=waiting,
        until_us=until_us,
        unread=buffer.unread,
        is_present=not buffer.is_former,
    )
