"""When each device was heard last, and where, since the gateway was started: in memory, for `sluice devices`."""

from collections.abc import Iterable, Iterator
from typing import Literal

from gateway.buffer_rows import Entry

DEVICES_MAX = 20_000
"""Of more, those that were met first are forgotten until they are heard again."""
SUBJECT_MAX = 256
"""Characters of a topic that are remembered: a hostile one may have 65,535."""

Tells = Literal["tick", "time", "nothing"]
"""What a reading says of when it was taken: by the sensor's own clock, by a date or an age, or nothing."""


class Heard:
    """One device as its last reading showed it. Times are CLOCK_BOOTTIME in microseconds."""

    __slots__ = ("boot", "is_serial", "readings", "received_us", "since_us", "subject", "tells")

    def __init__(self, boot: str | None, since_us: int) -> None:
        self.boot = boot
        """The sensor's; None where it sends none."""
        self.since_us = self.received_us = since_us
        """When the first and the last reading of this boot came in."""
        self.readings = 0
        """Of this boot."""
        self.subject = ""
        """The MQTT topic, or the serial port."""
        self.is_serial = False
        self.tells: Tells = "nothing"


class DevicesHeard:
    """All devices that readings came from, by name."""

    def __init__(self, devices_max: int = DEVICES_MAX) -> None:
        self._devices_max = devices_max
        self._by_device: dict[str, Heard] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_device)

    def get(self, device: str) -> Heard | None:
        """None where it was not heard since the start, or is forgotten."""
        return self._by_device.get(device)

    def note(self, entries: Iterable[Entry]) -> None:
        """See what came in. For every reading there is: it takes a fraction of a microsecond."""
        by_device = self._by_device
        for entry in entries:
            if entry.quarantined is not None:
                continue
            series = entry.series
            heard = by_device.get(series.device)
            if heard is None or heard.boot != entry.device_boot:
                heard = self._begin(series.device, entry)
            heard.received_us = entry.received_us
            heard.readings += 1
            if entry.tick_ms is not None:
                heard.tells = "tick"
            else:
                is_told = entry.event_us is not None or entry.device_time_us is not None
                heard.tells = "time" if is_told else "nothing"
            if heard.subject != series.subject:
                heard.subject = series.subject[:SUBJECT_MAX]
                heard.is_serial = series.stream != series.subject

    def _begin(self, device: str, entry: Entry) -> Heard:
        if device not in self._by_device and len(self._by_device) >= self._devices_max:
            del self._by_device[next(iter(self._by_device))]
        heard = self._by_device[device] = Heard(entry.device_boot, entry.received_us)
        return heard
