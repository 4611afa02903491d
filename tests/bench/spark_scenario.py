"""Describes in a few numbers the records that gateways send in a bench of the tables, and when each reaches Kafka."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

DAY_S = 86_400.0
BEGIN_US = int(datetime(2026, 6, 1, 6, tzinfo=UTC).timestamp()) * 1_000_000
"""Beginning of scenarios that do not begin now: a morning, so that hours of event time lie in one date."""
CATCH_UP = 4
"""Speed at which a backlog of minutes comes in, as a multiple of the speed at which it was measured."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A run of one gateway's readings: measured in one span, it reaches Kafka in another, evenly."""

    from_s: float
    until_s: float
    arrives_s: float
    arrives_until_s: float

    @property
    def is_live(self) -> bool:
        return self.arrives_s == self.from_s

    def arrival_s(self, measured_s: float) -> float:
        share = (measured_s - self.from_s) / (self.until_s - self.from_s)
        return self.arrives_s + share * (self.arrives_until_s - self.arrives_s)

    def pending_from_s(self, at_s: float) -> float | None:
        """The earliest reading that Kafka does not have at a moment; None where there is none that was measured."""
        if self.is_live or not self.from_s < at_s < self.arrives_until_s:
            return None
        share = max(0.0, at_s - self.arrives_s) / (self.arrives_until_s - self.arrives_s)
        return self.from_s + share * (self.until_s - self.from_s)


@dataclass(frozen=True, slots=True)
class Outage:
    """The first `gateways` gateways have no uplink between two moments. Then their backlog comes in."""

    gateways: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """Some gateways with their devices, and their uplinks' outages. Times are seconds from the beginning."""

    topic: str
    devices: int
    seconds: float
    """Seconds of event time. Each device measures all the while."""
    interval_s: float = 10.0
    """Between two readings of a device."""
    gateways: int = 10
    metrics: tuple[str, ...] = ("temperature", "humidity")
    late_gateways: int = 0
    """Number of gateways, the last ones, that come back after days. They have as many readings for each device as the
    others."""
    late_s: float = 3 * DAY_S
    late_arrives_s: float = 0.0
    """When they come back. Their backlog arrives evenly from then to the end."""
    outage: Outage | None = None
    resent_share: float = 0.0
    """Records that come twice, with the same `ce_id`: the last ones before a gateway's restart."""
    disorder_s: float = 2.0
    """A reading may have been taken so long before its place in the lane."""
    counted_share: float = 0.5
    """Devices that send their own boot and sequence: two more headers."""
    heartbeat_s: float | None = 10.0
    partitions: int = 4
    begin_us: int = BEGIN_US
    seed: int = 1

    @property
    def events_topic(self) -> str:
        return self.topic.replace("device-", "gateway-events-", 1)

    @property
    def partitions_of(self) -> dict[str, int]:
        """The topics, and how many partitions each has."""
        events = {} if self.heartbeat_s is None else {self.events_topic: 1}
        return {self.topic: self.partitions} | events

    @property
    def ticks(self) -> int:
        """Readings of each device."""
        return math.floor(self.seconds / self.interval_s)

    @property
    def readings(self) -> int:
        return self.devices * self.ticks

    def devices_of(self, gateway: int) -> range:
        """Neighbours: a gateway serves a whole group of devices."""
        return range(gateway * self.devices // self.gateways, (gateway + 1) * self.devices // self.gateways)

    def begins_s(self, gateway: int) -> float:
        """When its devices begin to measure."""
        return -self.late_s if gateway >= self.gateways - self.late_gateways else 0.0

    def measured_s(self, gateway: int, tick: int) -> float:
        """When a gateway's devices take a reading; the gateways are not in step."""
        return self.begins_s(gateway) + (tick + gateway / self.gateways) * self.interval_s

    def lanes(self, gateway: int) -> tuple[Lane, ...]:
        begins_s, away = self.begins_s(gateway), self.outage
        if begins_s < 0:
            return (Lane(begins_s, begins_s + self.seconds, self.late_arrives_s, self.seconds),)
        if away is None or gateway >= away.gateways:
            return (Lane(0, self.seconds, 0, self.seconds),)
        all_in_s = min(self.seconds, away.until_s + (away.until_s - away.from_s) / CATCH_UP)
        return (
            Lane(0, away.from_s, 0, away.from_s),
            Lane(away.from_s, away.until_s, away.until_s, all_in_s),
            Lane(away.until_s, self.seconds, away.until_s, self.seconds),
        )


class Due(NamedTuple):
    """The records of one gateway at a moment: a reading of each of its devices, or a heartbeat."""

    at_s: float
    gateway: int
    lane: int | None
    """Place in `Scenario.lanes`; None: a heartbeat."""
    number: int
    """The tick, or the heartbeat's number."""


def schedule(scenario: Scenario) -> Iterator[Due]:
    """All that is sent, in the order in which it reaches Kafka."""
    sources = [
        _readings(scenario, gateway, lane)
        for gateway in range(scenario.gateways)
        for lane in range(len(scenario.lanes(gateway)))
    ]
    if scenario.heartbeat_s is not None:
        sources += [_heartbeats(scenario, gateway, scenario.heartbeat_s) for gateway in range(scenario.gateways)]
    return heapq.merge(*sources, key=lambda due: due[:2])


def _readings(scenario: Scenario, gateway: int, number: int) -> Iterator[Due]:
    lane = scenario.lanes(gateway)[number]
    for tick in range(scenario.ticks):
        measured_s = scenario.measured_s(gateway, tick)
        if lane.from_s <= measured_s < lane.until_s:
            yield Due(lane.arrival_s(measured_s), gateway, number, tick)


def _heartbeats(scenario: Scenario, gateway: int, every_s: float) -> Iterator[Due]:
    online_s = scenario.late_arrives_s if scenario.begins_s(gateway) < 0 else 0.0
    away = scenario.outage if scenario.outage and gateway < scenario.outage.gateways else None
    for number in range(math.floor((scenario.seconds - online_s) / every_s)):
        at_s = online_s + (number + gateway / scenario.gateways) * every_s
        if away is None or not away.from_s <= at_s < away.until_s:
            yield Due(at_s, gateway, None, number)
