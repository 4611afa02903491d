"""How far each gateway says it has come: of its heartbeats the newest whose offsets are all in `log`. Without Spark.

A heartbeat tells of a moment: up to where Kafka had acknowledged, and what still waited. It counts once all that it
calls acknowledged has been read; until then it waits here. Two kinds of topics are not waited for: the gateway's
quarantine, whose records are no readings, and topics that Kafka has no longer.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.decode.codec_numbers import DEPTH_MAX, is_deep
from spark.decode.kafka_records import KAFKA_SLACK_US, SET_ASIDE_TYPE
from spark.finality.gateway_rows import GatewayRow, Span
from spark.log.edge_times import EARLIEST_US, FOREVER_US, LATEST_US
from spark.log.sequence_runs import Edge

WAITING_MAX = 100
"""Heartbeats of one buffer that wait for their offsets; of more, those are kept that lie far apart. What is dropped
may have something count a little later, never wrongly."""
BOOTS_MAX = 20
"""Boots of a gateway of which it is remembered how their clock and the true time go together."""
QUARANTINE_TOPIC = "gateway-quarantine"
"""A gateway's topic for what it could not take, where its heartbeats do not name another. Nothing in it is a reading,
whoever names it."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Offsets = Mapping[str, Mapping[int, int]]
"""By topic and partition, the next offset."""


class GatewayEvent(NamedTuple):
    """A record of `gateway-events`: columns of `log`."""

    type: str
    namespace: str
    gateway: str
    buffer: str
    order: tuple[int, str, int, int]
    """Kafka's: its timestamp in microseconds, topic, partition, offset."""
    edge: Edge
    value: bytes | None


ROWS_MAX = 2**53
"""More rows, inputs or seconds are a mistake. Sums of what a gateway tells then fit into the columns of tables."""
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
    """The damaged file's."""


class EventError(ValueError):
    """What a gateway says of itself cannot be read, or cannot be true. The message is the reject's reason."""


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
        """The topics that it has sent readings and events to."""
        return self.offsets.keys() - {QUARANTINE_TOPIC, self.quarantine_topic}


@dataclass(slots=True)
class BufferState:
    """What one buffer file of a gateway last said. A card that was swapped may still hold what was not sent."""

    counted: Told | None = None
    """The newest that counts."""
    waiting: list[Told] = field(default_factory=list)
    """Those after it, in Kafka's order."""
    until_us: int | None = None
    """Another buffer has taken readings since this, the latest that it may be."""
    is_former: bool = False
    is_over: bool = False
    """The gateway set it aside: what could be read of it is in its successor, whose heartbeats tell of it."""
    unread: tuple[str, ...] = ()
    """Topics that its newest heartbeat names, and that the job leaves out."""

    @property
    def newest(self) -> Told | None:
        """Its last heartbeat, whether it counts or not."""
        return self.waiting[-1] if self.waiting else self.counted


@dataclass(slots=True)
class GatewayState:
    """One gateway."""

    buffers: dict[str, BufferState] = field(default_factory=dict)
    present: str | None = None
    newest: tuple[int, str, int, int] | None = None
    boots: dict[str, Edge] = field(default_factory=dict)
    """Of each boot the heartbeat with the surest time."""


class GatewayStates:
    """All gateways."""

    def __init__(self, gateways: dict[tuple[str, str], GatewayState] | None = None) -> None:
        """`gateways` by namespace and name: they are changed in place."""
        self.gateways = {} if gateways is None else gateways
        """By namespace and name."""

    def take(
        self,
        events: Iterable[GatewayEvent],
        held: Offsets,
        reads: Callable[[str], bool] | None = None,
        gone: Collection[str] = (),
    ) -> set[tuple[str, str]]:
        """Take up what a batch brings, and look which heartbeats count by now.

        `held` is what `log` holds, this batch included. Of a topic of which nothing has come, everything is missing.
        `reads` says of a topic whether the job reads it; without it, what is known of that stays. `gone` are topics
        that Kafka has no longer. Events that came before change nothing. So do those with a fault, which are rejects:
        `log` may hold some from before they were. Returns which gateways' states are others now.
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
        """Return the topics that heartbeats name, without quarantines."""
        buffers = [buffer for gateway in self.gateways.values() for buffer in gateway.buffers.values()]
        return frozenset().union(*(buffer.newest.topics() for buffer in buffers if buffer.newest is not None))

    def _take(self, event: GatewayEvent, said: "Told | _SetAside") -> None:
        gateway = self.gateways.setdefault((event.namespace, event.gateway), GatewayState())
        if isinstance(said, _SetAside):
            gateway.buffers.setdefault(said.buffer, BufferState()).is_over = True
        else:
            _note_boot(gateway.boots, event.edge)
            _note_buffer(gateway, event)
            _wait(gateway.buffers[event.buffer], said)

    def rows(self) -> list[GatewayRow]:
        """Return what is known of all gateways: a row for each buffer file."""
        return [
            _row(*key, name, buffer)
            for key, gateway in sorted(self.gateways.items())
            for name, buffer in sorted(gateway.buffers.items())
            if not buffer.is_over
        ]

    def boots(self) -> dict[tuple[str, str, str], Edge]:
        """Return a heartbeat whose time was known of each boot: by namespace, gateway and boot."""
        return {(*key, boot): edge for key, gateway in self.gateways.items() for boot, edge in gateway.boots.items()}


def fault_of(event: GatewayEvent) -> str | None:
    """Say what is wrong with an event; None where nothing is."""
    try:
        _read(event)
    except EventError as error:
        return str(error)
    return None


def _read(event: GatewayEvent) -> "Told | _SetAside":
    """What an event says. Raises EventError."""
    value = event.value
    if value is None:
        raise EventError("it has no value, or it is far longer than what else gateways tell in its batch")
    # The decoder's own bound is what is left of Python's stack, which is not the same each time.
    if is_deep(value):
        raise EventError(f"more than {DEPTH_MAX} levels of JSON")
    try:
        if event.type == SET_ASIDE_TYPE:
            return msgspec.json.decode(value, type=_SetAside)
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
    """Make sure that a heartbeat promises nothing that lies ahead of it. Raises EventError.

    One whose clock is not known, or stands in a year long past, promises nothing wrong.
    """
    until_us = event.order[0] + KAFKA_SLACK_US
    ahead = f"more than {KAFKA_SLACK_US // 1_000_000} s after Kafka took it in"
    if told.low_watermark_us is not None and told.low_watermark_us > until_us:
        raise EventError(f"its low_watermark lies {ahead}")
    if event.edge.time_error_us < TIME_ERROR_UNKNOWN_US and event.edge.event_us - event.edge.time_error_us > until_us:
        raise EventError(f"its ce_time, less its ce_timeerror, lies {ahead}")


def _us(time: datetime | None) -> int | None:
    """Raises EventError for a time that no table can show."""
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


def _sureness(edge: Edge) -> tuple[int, int]:
    return edge.time_error_us, edge.boot_time_us


def _note_buffer(gateway: GatewayState, event: GatewayEvent) -> None:
    """Note which buffer takes readings now. One gateway's events are in one partition, so in order."""
    gateway.buffers.setdefault(event.buffer, BufferState(is_former=gateway.newest is not None))
    if gateway.newest is not None and event.order <= gateway.newest:
        return
    gateway.newest, gateway.present = event.order, event.buffer
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
        # The one goes whose neighbours are nearest: the first to count are the old ones, the newest says most.
        between = range(1, len(buffer.waiting) - 1)
        del buffer.waiting[min(between, key=lambda place: _distance(buffer.waiting, place))]


def _distance(waiting: list[Told], place: int) -> int:
    return waiting[place + 1].order[0] - waiting[place - 1].order[0]


def _count(buffer: BufferState, held: Offsets, gone: Collection[str]) -> bool:
    for place in reversed(range(len(buffer.waiting))):
        if _is_read(buffer.waiting[place], held, gone):
            buffer.counted = buffer.waiting[place]
            del buffer.waiting[: place + 1]
            return True
    return False


def _is_read(told: Told, held: Offsets, gone: Collection[str]) -> bool:
    return all(
        offset <= held.get(topic, {}).get(partition, 0)
        for topic in told.topics()
        if topic not in gone
        for partition, offset in told.offsets[topic].items()
    )


def _leave_out(buffer: BufferState, reads: Callable[[str], bool] | None, gone: Collection[str]) -> bool:
    """Note which topics are left out that a gateway writes to; return whether they are others than before."""
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
        return GatewayRow(namespace, gateway, name, waiting=waiting, until_us=until_us, unread=buffer.unread)
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
    )
