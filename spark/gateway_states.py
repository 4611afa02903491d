"""How far each gateway says it has come: of its heartbeats the newest whose offsets are all in `log`. Without Spark.

A heartbeat tells of a moment: up to where Kafka had acknowledged, and what still waited. It counts once all that it
calls acknowledged has been read; until then it waits here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.gateway_rows import GatewayRow, Span
from spark.sequence_runs import Edge

HEARTBEAT_TYPE = "sluice.gateway.heartbeat"
SET_ASIDE_TYPE = "sluice.gateway.buffer-set-aside"
EVENT_TYPES = (HEARTBEAT_TYPE, SET_ASIDE_TYPE)
"""What is read here of `gateway-events`."""
WAITING_MAX = 100
"""Heartbeats of one buffer that wait for their offsets; of more, those are kept that lie far apart. What is dropped
may have something count a little later, never wrongly."""
BOOTS_MAX = 20
"""Boots of a gateway of which it is remembered how their clock and the true time go together."""
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


class _Pending(msgspec.Struct):
    lane: str
    rows: int
    from_: datetime | None = msgspec.field(name="from")
    to: datetime | None


class _Quarantined(msgspec.Struct):
    count: int
    from_: datetime | None = msgspec.field(name="from")
    to: datetime | None


class _Body(msgspec.Struct):
    offsets: dict[str, dict[int, int]]
    pending: list[_Pending]
    quarantined: list[_Quarantined]
    low_watermark: datetime | None
    depth_rows: int = 0
    oldest_age_s: float | None = None


class _SetAside(msgspec.Struct):
    buffer: str
    """The damaged file's."""


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
        self.malformed = 0
        """Events that could not be read."""
        self.gateways = {} if gateways is None else gateways
        """By namespace and name."""

    def take(self, events: Iterable[GatewayEvent], held: Offsets, reads: Callable[[str], bool]) -> set[tuple[str, str]]:
        """Take up what a batch brings, and look which heartbeats count by now.

        `held` is what `log` holds, this batch included; `reads` says of a topic whether it goes into `log` at all. Of
        one that does and of which nothing has come, everything is missing. Events that came before change nothing.
        Returns which gateways' states are others now.
        """
        changed: set[tuple[str, str]] = set()
        for event in sorted(events, key=lambda event: event.order):
            try:
                self._take(event)
                changed.add((event.namespace, event.gateway))
            except (msgspec.DecodeError, OverflowError, TypeError):
                self.malformed += 1
        for key, gateway in self.gateways.items():
            for buffer in gateway.buffers.values():
                if _count(buffer, held, reads):
                    changed.add(key)
        return changed

    def _take(self, event: GatewayEvent) -> None:
        if event.type == SET_ASIDE_TYPE:
            buffer = msgspec.json.decode(event.value or b"", type=_SetAside).buffer
            gateway = self.gateways.setdefault((event.namespace, event.gateway), GatewayState())
            gateway.buffers.setdefault(buffer, BufferState()).is_over = True
        elif event.type == HEARTBEAT_TYPE:
            told = _told(event)
            gateway = self.gateways.setdefault((event.namespace, event.gateway), GatewayState())
            _note_boot(gateway.boots, event.edge)
            _note_buffer(gateway, event)
            _wait(gateway.buffers[event.buffer], told)

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


def _told(event: GatewayEvent) -> Told:
    body = msgspec.json.decode(event.value or b"", type=_Body)
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
    )


def _us(time: datetime | None) -> int | None:
    """Raises TypeError for a time that says no zone."""
    if time is None:
        return None
    since = time - EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


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
                buffer.until_us = event.edge.event_us + event.edge.time_error_us


def _wait(buffer: BufferState, told: Told) -> None:
    newest = buffer.waiting[-1] if buffer.waiting else buffer.counted
    if newest is not None and told.order <= newest.order:
        return
    buffer.waiting.append(told)
    if len(buffer.waiting) > WAITING_MAX:
        # The one goes whose neighbours are nearest: the first to count are the old ones, the newest says most.
        between = range(1, len(buffer.waiting) - 1)
        del buffer.waiting[min(between, key=lambda place: _distance(buffer.waiting, place))]


def _distance(waiting: list[Told], place: int) -> int:
    return waiting[place + 1].order[0] - waiting[place - 1].order[0]


def _count(buffer: BufferState, held: Offsets, reads: Callable[[str], bool]) -> bool:
    for place in reversed(range(len(buffer.waiting))):
        if _is_read(buffer.waiting[place], held, reads):
            buffer.counted = buffer.waiting[place]
            del buffer.waiting[: place + 1]
            return True
    return False


def _is_read(told: Told, held: Offsets, reads: Callable[[str], bool]) -> bool:
    return all(
        offset <= held.get(topic, {}).get(partition, 0)
        for topic, partitions in told.offsets.items()
        if reads(topic)
        for partition, offset in partitions.items()
    )


def _row(namespace: str, gateway: str, name: str, buffer: BufferState) -> GatewayRow:
    told = buffer.counted
    waiting, until_us = len(buffer.waiting), buffer.until_us
    if told is None:
        return GatewayRow(namespace, gateway, name, waiting=waiting, until_us=until_us)
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
    )
