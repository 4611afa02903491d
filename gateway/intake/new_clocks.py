"""Lets a sensor's first readings wait until its clock is known.

If only arrivals tell of a clock (MQTT), its first bound comes ten seconds and some readings after the sensor's start.
Earlier readings get this bound too, if they are forwarded only then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gateway.buffer.rows import Series
from gateway.clock.sensor_clocks import DeviceClocks

READINGS_MAX = 20_000
"""Readings above which nobody waits for a clock, as the forwarder would look through them again and again."""
IN_VAIN_MAX = 3
"""Boots in a row without a known clock, after which a sensor's readings wait no more. It may be off between them."""
STREAM_CHARACTERS_MAX = 256
"""Characters of a topic. Readings of a longer one do not wait, as it costs too much to be remembered."""
LOOK_US = 500_000
"""Microseconds between two looks for known clocks. The forwarder looks through the waiting readings each time one
is."""
SENSORS_MAX = 20_000
"""Sensors that are remembered; beyond it, those met first are forgotten."""


class Source(NamedTuple):
    """The owner of a clock, and the destination of its readings."""

    topic: str
    """The Kafka topic."""
    device: str
    stream: str


@dataclass(slots=True)
class _Start:
    """One boot of one sensor, from its first reading without a time."""

    boot: str
    until_us: int
    in_vain: int
    """Boots in a row, before this one, that ended before anything was known."""


class NewClocks:
    """New sensors whose clocks are not known yet.

    The front door reports readings without a time, and the forwarder leaves waiting readings behind.
    """

    def __init__(self, hold_s: float, clocks: DeviceClocks, now_us: Callable[[], int]) -> None:
        """`now_us` returns CLOCK_BOOTTIME in microseconds."""
        self._now_us = now_us
        self.hold_us = int(hold_s * 1e6)
        """Microseconds that a reading waits at most."""
        self._clocks = clocks
        self._starts: dict[Source, _Start] = {}
        self._look_due_us = 0
        self._readings = 0
        """Readings met while clocks are waited for."""
        self.waiting: dict[Source, _Start] = {}
        """Sources whose clocks are waited for."""
        self.waiting_devices: set[tuple[str, str]] = set()
        """Kafka topic and device of these sources. All readings of such a device wait, so that they keep their order
        there. Only `settle` makes it smaller, so that none overtakes another."""

    def met(self, series: Series, boot: str, received_us: int, count: int = 1) -> None:
        """Note `count` readings that came in together, and whose ticks do not tell their times yet."""
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
                # Readings from before that boot wait too.
                until_us = min(until_us, self.waiting[source].until_us)
            start = self._starts[source] = _Start(boot, until_us, in_vain)
            if hold_us and self._readings < READINGS_MAX:
                self.waiting[source] = start
                self.waiting_devices.add((source.topic, source.device))
        self._readings += count if self.waiting else 0

    def settle(self) -> bool:
        """Stop waiting for clocks that are known by now, or waited for in vain; return whether this frees readings."""
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
