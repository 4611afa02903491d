"""Keeps the last hour in memory: values of devices, depth of the buffer, state of the uplink. All of it is bounded.

`record` is called every few seconds. In between, a reading costs only the time that `DevicesHeard.record` takes to keep
the newest reading of each stream.
"""

import math
from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from gateway.buffer.rows import Entry
from gateway.host.terminal_text import counted, shortened
from gateway.intake import payload_cbor
from gateway.intake.devices_heard import DevicesHeard
from gateway.intake.payload_identity import BINARY, BINARY_VERSION
from gateway.intake.payload_json import UNREADABLE, read_mending

HOUR_US: Final = 3_600_000_000
POINT_US: Final = 30_000_000
POINTS: Final = HOUR_US // POINT_US
"""Points of a device's curve."""
SAMPLE_US: Final = 10_000_000
SAMPLES: Final = HOUR_US // SAMPLE_US
"""Points of the gateway's curves."""
DECODE_US: Final = 10_000_000
"""Least microseconds between two decoded payloads of a stream."""
STREAMS_MAX: Final = 4
"""Streams of a device whose values are kept. Beyond it, a stream that was silent for an hour gives way."""
VALUES_MAX: Final = 6
"""Values of one payload that are kept."""
NAME_CHARACTERS_MAX: Final = 32
TEXT_CHARACTERS_MAX: Final = 40
DEPTH_MAX: Final = 3
"""Levels of objects that are looked into."""
WANTED_US: Final = 60_000_000
"""Microseconds for which a device that somebody looked at keeps its place."""
BUSY_READINGS: Final = 1_000
REST_US: Final = 8_000_000
"""Microseconds in which no reading is kept, after a look that found more than `BUSY_READINGS`."""
MEET_US: Final = 10_000_000
"""Least microseconds between two searches for new streams while there is no place."""
SILENT_US: Final = HOUR_US
"""Microseconds of silence after which a device's place is free for another."""
RATE_POINTS: Final = 10
"""Points of a device that its rate is taken from: five minutes."""
_OF_IDENTITY: Final = frozenset({"boot", "seq", "sequence", "tick", "lost", "time", "timestamp", "ts", "device", "id"})
"""Members of a payload that say who took a reading and when."""
_SENML_LABELS: Final = {-2: "bn", 0: "n", 2: "v", 3: "vs", 4: "vb"}
"""Labels of SenML in CBOR (RFC 8428, section 6)."""

Value = float | str | None


class Sample(NamedTuple):
    """The gateway at one moment."""

    rows: int
    """Rows that wait."""
    bytes_used: int
    uplink: int
    """An index of `UPLINK_STATES`."""
    readings: int
    """Readings since the start."""


UPLINK_STATES: Final = ("unknown", "down", "up", "waits")


class Trace:
    """One device in the last hour. Times are CLOCK_BOOTTIME in microseconds."""

    __slots__ = (
        "counts",
        "decoded_us",
        "heard_us",
        "metric",
        "name",
        "pending",
        "point",
        "points",
        "streams",
        "values",
        "wanted_us",
    )

    def __init__(self, name: str, now_us: int) -> None:
        self.name = name
        self.heard_us = 0
        self.wanted_us = -WANTED_US
        self.streams: dict[str, int] = {}
        """Streams, with the time when each was decoded last."""
        self.pending: dict[str, Entry] = {}
        self.values: dict[str, tuple[tuple[str, Value], ...]] = {}
        """Values by stream."""
        self.decoded_us = 0
        self.metric: tuple[str, str] | None = None
        """Stream and member that the curve shows."""
        self.points = array("f", [math.nan]) * POINTS
        self.point = now_us // POINT_US
        """The number of the newest point, counted from the boot."""
        self.counts: deque[tuple[int, int]] = deque(maxlen=RATE_POINTS)
        """Times, and the number of readings that had come in by then."""

    def curve(self, now_us: int) -> list[float | None]:
        """Return the last hour, oldest first; None where nothing was measured."""
        self._advance(now_us)
        oldest = self.point + 1
        found = (self.points[(oldest + index) % POINTS] for index in range(POINTS))
        return [None if math.isnan(value) else float(f"{value:.6g}") for value in found]

    def per_s(self, readings: int, now_us: int) -> float | None:
        """Readings a second over the last minutes; None if too little was seen."""
        if not self.counts:
            return None
        since_us, before = self.counts[0]
        return None if now_us - since_us < POINT_US else max(0, readings - before) * 1e6 / (now_us - since_us)

    def decode(self, now_us: int) -> None:
        """Decode the payloads that are due."""
        for stream, entry in list(self.pending.items()):
            if now_us < self.streams.get(stream, -DECODE_US) + DECODE_US:
                continue
            del self.pending[stream]
            self.streams[stream], self.decoded_us = now_us, entry.datum.received_us
            self.values[stream] = values = values_of(entry.datum.payload, entry.series.content_type)
            self._plot(stream, dict(values), now_us)

    def _plot(self, stream: str, values: Mapping[str, Value], now_us: int) -> None:
        metric = self.metric
        if metric is None or metric[0] not in self.streams:
            name = next((name for name, value in values.items() if isinstance(value, float)), None)
            if name is None:
                return
            metric = self.metric = stream, name
        value = values.get(metric[1]) if metric[0] == stream else None
        if isinstance(value, float):
            self._advance(now_us)
            self.points[self.point % POINTS] = value

    def _advance(self, now_us: int) -> None:
        """Clear the points that have begun since."""
        newest = now_us // POINT_US
        for number in range(max(self.point + 1, newest - POINTS + 1), newest + 1):
            self.points[number % POINTS] = math.nan
        self.point = max(self.point, newest)


class LiveHistory:
    """Keeps the last hour of `devices_max` devices, and of the gateway as a whole. Belongs to the event loop."""

    def __init__(self, devices_max: int, now_us: int) -> None:
        self._devices_max = devices_max
        self.traces: dict[str, Trace] = {}
        """Traces by device."""
        self._streams: dict[str, Trace] = {}
        self._wanted: set[str] = set()
        self._meet_due_us = 0
        self._rest_until_us = 0
        self._seen = 0
        """Readings since the start, as of the last look."""
        self.since_us = now_us
        self._rows = array("q", [-1]) * SAMPLES
        self._bytes = array("q", [-1]) * SAMPLES
        self._uplink = array("b", [0]) * SAMPLES
        self._per_s = array("f", [math.nan]) * SAMPLES
        self._sample = now_us // SAMPLE_US
        self._readings: tuple[int, int] | None = None
        """Readings at the last sample, and its time."""

    def want(self, devices: Collection[str], now_us: int) -> None:
        """Ask for a place for these devices, because somebody looks at them."""
        for device in devices:
            trace = self.traces.get(device)
            if trace is not None:
                trace.wanted_us = now_us
        missing = {device for device in devices if device not in self.traces}
        self._wanted = set(list(missing)[: self._devices_max])

    def record(self, heard: DevicesHeard, sample: Sample, now_us: int) -> None:
        """Take in what came since the last look."""
        latest = heard.latest or {}
        # Of a flood, some readings are enough: most of the time this saves the effort of keeping the newest.
        came, self._seen = sample.readings - self._seen, sample.readings
        if came > BUSY_READINGS and heard.latest is not None:
            self._rest_until_us = now_us + REST_US
        heard.latest = {} if now_us >= self._rest_until_us else None
        for stream in self._streams.keys() & latest.keys():
            self._streams[stream].pending[stream] = latest[stream]
        # Of thousands of devices most have no place: all are looked through only now and then.
        if len(self.traces) < self._devices_max or self._wanted or now_us >= self._meet_due_us:
            self._meet(latest, now_us)
            self._meet_due_us = now_us + MEET_US
        for trace in self.traces.values():
            self._follow(trace, heard, now_us)
        self._note(sample, now_us)

    def _meet(self, latest: Mapping[str, Entry], now_us: int) -> None:
        """Give a place to streams that have none."""
        free = self._devices_max - len(self.traces)
        giving_way = sorted(
            (trace for trace in self.traces.values() if now_us - trace.wanted_us > WANTED_US),
            key=lambda trace: trace.heard_us,
            reverse=True,
        )
        for stream, entry in latest.items():
            if stream in self._streams:
                continue
            name = entry.series.device
            trace = self.traces.get(name)
            if trace is None:
                is_wanted = name in self._wanted
                if not free and not (giving_way and (is_wanted or now_us - giving_way[-1].heard_us > SILENT_US)):
                    continue
                if not name or entry.quarantined is not None:
                    continue
                if free:
                    free -= 1
                else:
                    self._forget(giving_way.pop())
                trace = self.traces[name] = Trace(name, now_us)
                if is_wanted:
                    trace.wanted_us = now_us
            if len(trace.streams.keys() | trace.pending.keys()) >= STREAMS_MAX and not self._forget_stream(
                trace, now_us
            ):
                continue
            self._streams[stream] = trace
            trace.pending[stream] = entry
        self._wanted.clear()

    def _forget(self, trace: Trace) -> None:
        del self.traces[trace.name]
        for stream in [stream for stream, of in self._streams.items() if of is trace]:
            del self._streams[stream]

    def _forget_stream(self, trace: Trace, now_us: int) -> bool:
        """Forget one of a device's streams, if it has been silent for so long that another may take its place."""
        for stream, decoded_us in trace.streams.items():
            if decoded_us < now_us - SILENT_US and stream not in trace.pending:
                del trace.streams[stream]
                trace.values.pop(stream, None)
                self._streams.pop(stream, None)
                return True
        return False

    def _follow(self, trace: Trace, heard: DevicesHeard, now_us: int) -> None:
        if trace.pending:
            trace.decode(now_us)
        of = heard.get(trace.name)
        if of is None:
            return
        trace.heard_us = of.received_us
        if trace.counts and of.readings < trace.counts[-1][1]:
            # Another boot.
            trace.counts.clear()
        if not trace.counts or now_us - trace.counts[-1][0] >= POINT_US:
            trace.counts.append((now_us, of.readings))

    # -- the gateway ----------------------------------------------------------------------------

    def _note(self, sample: Sample, now_us: int) -> None:
        newest = now_us // SAMPLE_US
        if newest == self._sample and self._readings is not None:
            return
        for number in range(max(self._sample + 1, newest - SAMPLES + 1), newest + 1):
            place = number % SAMPLES
            self._rows[place] = self._bytes[place] = -1
            self._uplink[place], self._per_s[place] = 0, math.nan
        self._sample = newest
        place = newest % SAMPLES
        self._rows[place], self._bytes[place], self._uplink[place] = sample.rows, sample.bytes_used, sample.uplink
        if self._readings is not None:
            before, at_us = self._readings
            self._per_s[place] = max(0, sample.readings - before) * 1e6 / max(1, now_us - at_us)
        self._readings = sample.readings, now_us

    def series(self) -> dict[str, Sequence[float | None]]:
        """Return the gateway's last hour, oldest first, `SAMPLE_US` apart. A gap is None, for the uplink 0."""
        places = [(self._sample + 1 + index) % SAMPLES for index in range(SAMPLES)]
        return {
            "rows": [None if self._rows[place] < 0 else self._rows[place] for place in places],
            "bytes": [None if self._bytes[place] < 0 else self._bytes[place] for place in places],
            "uplink": [self._uplink[place] for place in places],
            "per_s": [
                None if math.isnan(self._per_s[place]) else float(f"{self._per_s[place]:.3g}") for place in places
            ],
        }

    @property
    def per_s(self) -> float | None:
        """Readings a second between the last two samples."""
        value = self._per_s[self._sample % SAMPLES]
        return None if math.isnan(value) else value


# -- payloads -------------------------------------------------------------------------------------


def values_of(payload: bytes, content_type: str = "application/json") -> tuple[tuple[str, Value], ...]:
    """Return a payload's numbers and short texts with their names, for people; else its size.

    A payload that is a number alone has the name "". SenML's records go by their own names.
    """
    try:
        found = _decoded(payload, content_type)
    except (ValueError, RecursionError):
        return (("", counted(len(payload), "byte")),) if payload else ()
    values: list[tuple[str, Value]] = []
    if isinstance(found, list):
        _gather_senml(found, values)
    else:
        _gather("", found, values, DEPTH_MAX)
    return tuple(values)


_decode_json = msgspec.json.Decoder(float_hook=float).decode
"""Makes numbers beyond all floats infinite; these are not shown."""


def _decoded(payload: bytes, content_type: str) -> object:
    """Decode a payload. Raises ValueError if its form cannot be told."""
    if "cbor" in content_type:
        return payload_cbor.decode(payload)
    try:
        return _decode_json(payload)
    except UNREADABLE:
        # The layout `binary` has a header, and behind it a value in any form.
        if len(payload) > BINARY.size and payload[0] == BINARY_VERSION:
            return _decode_json(payload[BINARY.size :])
        mended = read_mending(_decode_json, payload)
        if not isinstance(mended, dict | list):
            raise
        return mended


def _gather(name: str, value: object, values: list[tuple[str, Value]], depth: int) -> None:
    if len(values) >= VALUES_MAX:
        return
    if isinstance(value, dict):
        for member, inner in value.items() if depth else ():
            if isinstance(member, str) and not (depth == DEPTH_MAX and member in _OF_IDENTITY):
                _gather(f"{name}.{member}".removeprefix("."), inner, values, depth - 1)
        return
    shown = _shown(value)
    if shown is not None:
        values.append((shortened(name, NAME_CHARACTERS_MAX), shown))


def _gather_senml(records: list[object], values: list[tuple[str, Value]]) -> None:
    """Gather SenML's records (RFC 8428, section 5): their names go on from a base name."""
    base = ""
    for record in records[: 4 * VALUES_MAX]:
        if not isinstance(record, dict):
            continue
        named = {_SENML_LABELS.get(label, label): value for label, value in record.items()}
        base = str(named.get("bn", base))
        shown = next((_shown(named[member]) for member in ("v", "vs", "vb") if member in named), None)
        if shown is not None and len(values) < VALUES_MAX:
            values.append((shortened(f"{base}{named.get('n', '')}", NAME_CHARACTERS_MAX), shown))


def _shown(value: object) -> Value:
    """Return a number, or a text for any other value; None if neither can be shown."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None
    if isinstance(value, str) and value:
        return shortened(value, TEXT_CHARACTERS_MAX)
    return None
