"""Whose readings wait for their sensor's clock: it was heard first a moment ago, and will be known soon.

Where only arrivals tell of a clock (MQTT), the first bound comes ten seconds and some readings after a sensor's start.
What it sent until then is told with that bound too, if it is forwarded then, and not at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gateway.buffer.rows import Series
from gateway.clock.sensor_clocks import DeviceClocks

READINGS_MAX = 20_000
"""Of more readings than this nobody waits for a clock: the forwarder would look through them again and again."""
IN_VAIN_MAX = 3
"""After so many boots in a row whose clock never came to be known, a sensor's readings wait no more: as of one that is
off between its readings."""
STREAM_CHARACTERS_MAX = 256
"""Of a longer topic, which costs too much to be remembered, nothing waits."""
LOOK_US = 500_000
"""How often is looked whose clock is known by now: the forwarder looks through what waits each time one is."""
SENSORS_MAX = 20_000
"""Of more, those that were met first are forgotten."""


class Source(NamedTuple):
    """Whose clock it is, and where its readings go."""

    topic: str
    """Kafka's."""
    device: str
    stream: str


@dataclass(slots=True)
class _Start:
    """One boot of one sensor, from its first reading without a time."""

    boot: str
    until_us: int
    in_vain: int
    """Boots before this one, in a row, that were over before anything was known."""


class NewClocks:
    """Shared by the front door, which meets readings without a time, and the forwarder, which leaves them behind."""

    def __init__(self, hold_s: float, clocks: DeviceClocks, now_us: Callable[[], int]) -> None:
        """`now_us` gives CLOCK_BOOTTIME in microseconds."""
        self._now_us = now_us
        self.hold_us = int(hold_s * 1e6)
        """How long a reading waits at the most."""
        self._clocks = clocks
        self._starts: dict[Source, _Start] = {}
        self._look_due_us = 0
        self._readings = 0
        """Met since nobody waited last."""
        self.waiting: dict[Source, _Start] = {}
        """Sources whose clocks are waited for."""
        self.waiting_devices: set[tuple[str, str]] = set()
        """Kafka's topic and the device of those: whose readings have to wait, for they keep their order there. It
        becomes smaller by `settle` alone: so none overtakes another."""

    def met(self, series: Series, boot: str, received_us: int, count: int = 1) -> None:
        """See readings come in at once whose ticks do not tell their times yet."""
        if len(series.stream) > STREAM_CHARACTERS_MAX:
            return
        source = Source(series.topic, series.device, series.stream)
        start = self._starts.get(source)
        if start is None or start.boot != boot:
            in_vain = 0 if start is None or self._is_known(source, start) else start.in_vain + 1
            if start is None and len(self._starts) >= SENSORS_MAX:
                del self._starts[next(iter(self._starts))]
            hold_us = self.hold_us if in_vain < IN_VAIN_MAX else 0
            until_us = received_us + hold_us
            if source in self.waiting:
                # What it sent before that boot waits, too.
                until_us = min(until_us, self.waiting[source].until_us)
            start = self._starts[source] = _Start(boot, until_us, in_vain)
            if hold_us and self._readings < READINGS_MAX:
                self.waiting[source] = start
                self.waiting_devices.add((source.topic, source.device))
        self._readings += count if self.waiting else 0

    def settle(self) -> bool:
        """See whose clock is known by now, or was waited for in vain; whether that sets anybody's readings free."""
        now_us = self._now_us()
        if now_us < self._look_due_us:
            return False
        self._look_due_us = now_us + LOOK_US
        before = len(self.waiting_devices)
        for source, start in list(self.waiting.items()):
            clock = self._clocks.find_of(source.device, start.boot, source.stream)
            due_us = None if clock is None else clock.known_from_us
            is_in_vain = now_us >= start.until_us or (due_us is not None and due_us > start.until_us)
            if is_in_vain or self._is_known(source, start) or self._readings >= READINGS_MAX:
                del self.waiting[source]
        self.waiting_devices = {(source.topic, source.device) for source in self.waiting}
        if not self.waiting:
            self._readings = 0
        return len(self.waiting_devices) < before

    def _is_known(self, source: Source, start: _Start) -> bool:
        clock = self._clocks.find_of(source.device, start.boot, source.stream)
        return clock is not None and clock.fit.error_us is not None
