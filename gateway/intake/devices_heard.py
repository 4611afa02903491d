"""Remembers when and where each device was last heard since the gateway's start, in memory, for `sluice devices`."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

from msgspec import Struct

from gateway.buffer.rows import Entry, Series
from gateway.clock.sensor_dates import Implausible
from gateway.intake.payload_identity import TICK_MODULUS

DEVICES_MAX = 20_000
"""Devices that are remembered; beyond it, those met first are forgotten until they are heard again."""
SUBJECT_MAX = 256
"""Characters of a topic that are remembered: a hostile one may have 65,535."""
STRETCH_US = 60_000_000
"""Microseconds over which the pace of a tick is taken, at least, so that the network adds little. A boot that ended
before had no time to have its clock learnt."""
FOLLOWED_US = 3_600_000_000
"""Microseconds without a new stretch after which the tick of another topic is followed."""
ORDER_SLACK_MS = 1_000
"""Milliseconds that a tick may be earlier than the one before: a sensor may have two tasks."""
BEGUN_ANEW_PACES = 0.5, 2.0
"""Bounds of the pace, in ticks per millisecond, of a tick that went back because it began anew. Readings that a sensor
had kept come faster."""
LATEST_MAX = 5_000
LATEST_BYTES_MAX = 2_048
"""Streams whose latest reading is kept until it is asked for, and the largest payload of one: 10 MB at most."""
NO_PACE = 0.05
"""Pace, in ticks per millisecond, up to which a tick that went back begins anew with each reading."""

FAULTY_MAX = 1_000
"""Devices that are named for each kind of fault: those with the latest faults."""

CAUSE_INTERVAL_US = 1_000_000
"""Microseconds until the cause of a device's next fault is looked for, as that takes longer than all else."""
FaultKind = Literal["identity-missing", "payload-not-json"]
"""Kind of fault, as it is counted: a payload has no identity, or is no JSON, although its route declares that."""
Tells = Literal["tick", "time", "nothing"]
"""A reading's own word on its time: the sensor's clock, a date or an age, or nothing."""


class ToldDate(Struct, frozen=True):
    """A time that a sensor sent, and that cannot be right."""

    reason: Implausible
    told: str
    """The date (RFC 3339), or the seconds from the receipt if it was sent so."""
    off_us: int | None
    """Microseconds from the receipt to that time, below 0 for before; None if the gateway's clock was not known."""
    received_us: int


class PayloadFault(Struct):
    """A device whose payloads are not what its route declares. Times are CLOCK_BOOTTIME in microseconds."""

    device: str
    cause: str
    told_us: int
    """Receipt of the payload that `cause` is of."""
    received_us: int = 0
    """Receipt of the last payload with this kind of fault."""
    readings: int = 0
    """Payloads with this fault since the start, whatever the cause."""


class Heard:
    """One device as its last reading showed it. Times are CLOCK_BOOTTIME in microseconds."""

    __slots__ = (
        "back_from",
        "boot",
        "boot_before",
        "due_us",
        "faults",
        "first_sequence",
        "followed",
        "from_tick_ms",
        "from_us",
        "is_mixed",
        "is_serial",
        "longest_pause_us",
        "odd_date",
        "paces",
        "readings",
        "received_us",
        "short_boots",
        "short_since_us",
        "since_us",
        "subject",
        "tells",
        "tick_ms",
        "tick_restarts",
        "top_sequence",
        "unreadable_us",
    )

    def __init__(self, boot: str | None, since_us: int) -> None:
        self.boot = boot
        """The sensor's boot; None if it sends none."""
        self.since_us = self.received_us = since_us
        """Receipt of the first and of the last reading of this boot."""
        self.longest_pause_us = 0
        """The longest pause between two readings, in this boot or those before."""
        self.readings = 0
        """Readings of this boot."""
        self.first_sequence: int | None = None
        self.top_sequence = -1
        """The sensor's sequence in the first reading of this boot, and the highest one."""
        self.is_mixed = False
        """Whether readings of this boot came on several MQTT topics, which may have a sequence each."""
        self.subject = ""
        """The MQTT topic, or the serial port."""
        self.is_serial = False
        self.tells: Tells = "nothing"
        self.unreadable_us: int | None = None
        """Receipt of the last reading with an unreadable tick."""
        self.odd_date: ToldDate | None = None
        """The last time that could not be right."""
        self.faults: dict[FaultKind, PayloadFault] | None = None
        """The last fault of each kind; None if there is none, as for nearly all devices."""
        self.boot_before: str | None = None
        self.short_boots = 0
        """Boots in a row, before the present one, that ended before their clock could be learnt."""
        self.short_since_us = since_us
        """Start of the first of these boots."""
        self.followed: str | None = None
        """The stream of the topic whose tick is followed, as other topics may have other counters."""
        self.from_us = since_us - FOLLOWED_US
        self.from_tick_ms = 0
        """Start of the present stretch of this tick."""
        self.due_us = 0
        """End of the stretch: from then on it is long enough."""
        self.tick_ms = 0
        """The furthest tick of this topic."""
        self.back_from: tuple[int, int] | None = None
        """Time and tick of the first reading that went back: the tick began anew, or readings were kept."""
        self.paces: tuple[float, ...] = ()
        """Ticks per millisecond over the last two stretches."""
        self.tick_restarts = 0
        """Times that the tick began anew in this boot."""

    @property
    def missing(self) -> int | None:
        """Readings of this boot that did not come, at least, by their sequences; None if these do not tell.

        Readings that come again, or late from before the first, make it fewer. It is never too many.
        """
        if self.first_sequence is None or self.is_mixed:
            return None
        return max(0, self.top_sequence - self.first_sequence + 1 - self.readings)

    def follow(self, stream: str, tick_ms: int, received_us: int) -> None:
        """Follow the pace of this topic's tick from here on."""
        self.followed, self.paces = stream, ()
        self._begin_stretch(tick_ms, received_us)

    def step(self, tick_ms: int, received_us: int) -> None:
        """Record a tick that is behind the one before, or that ends a stretch."""
        ahead_ms = (tick_ms - self.tick_ms) % TICK_MODULUS
        # A counter that has wrapped is ahead.
        if ahead_ms >= TICK_MODULUS // 2 and ahead_ms < TICK_MODULUS - ORDER_SLACK_MS:
            self._step_back(tick_ms, received_us)
            return
        if self.back_from is not None:
            # The readings that went back had been kept.
            self.back_from, self.due_us = None, self.from_us + STRETCH_US
        if ahead_ms < TICK_MODULUS // 2:
            self.tick_ms = tick_ms
        if received_us >= self.due_us:
            ticks_ms = (self.tick_ms - self.from_tick_ms) % TICK_MODULUS
            self.paces = *self.paces[-1:], ticks_ms * 1_000 / (received_us - self.from_us)
            self._begin_stretch(self.tick_ms, received_us)

    def _step_back(self, tick_ms: int, received_us: int) -> None:
        if self.back_from is None:
            # Look at each reading until the reason is known.
            self.back_from, self.due_us = (received_us, tick_ms), 0
            return
        from_us, from_tick_ms = self.back_from
        if received_us < from_us + STRETCH_US:
            return
        pace = (tick_ms - from_tick_ms) * 1_000 / (received_us - from_us)
        least, most = BEGUN_ANEW_PACES
        if least <= pace <= most:
            self.tick_restarts += 1
        elif abs(pace) <= NO_PACE:
            self.paces = *self.paces[-1:], 0.0
        else:
            return
        self._begin_stretch(tick_ms, received_us)

    def _begin_stretch(self, tick_ms: int, received_us: int) -> None:
        self.from_us, self.from_tick_ms, self.tick_ms = received_us, tick_ms, tick_ms
        self.due_us, self.back_from = received_us + STRETCH_US, None


class DevicesHeard:
    """All devices that readings came from, by name."""

    def __init__(self, devices_max: int = DEVICES_MAX) -> None:
        self._devices_max = devices_max
        self._by_device: dict[str, Heard] = {}
        self._faulty: dict[FaultKind, dict[str, None]] = {}
        """Names of devices by the kind of their fault; the latest comes last."""
        self.latest: dict[str, Entry] | None = None
        """By stream, one of the latest readings that came in together. A reader that shows them sets an empty
        dictionary each time; None if there is no such reader."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_device)

    def get(self, device: str) -> Heard | None:
        """A device; None if it was not heard since the start, or is forgotten."""
        return self._by_device.get(device)

    def record(self, entries: Iterable[Entry]) -> None:  # noqa: C901, PLR0912 - for every reading: each call costs
        """Record entries that came in. Called for every reading, so it takes only a fraction of a microsecond."""
        by_device, latest = self._by_device, self.latest
        heard: Heard | None = None
        before: Series | None = None
        for entry in entries:
            series, datum = entry.series, entry.datum
            boot, received_us = datum.device_boot, datum.received_us
            if heard is None or series is not before or (heard.boot != boot and boot is not None):
                if entry.quarantined is not None or series.is_of_gateway:
                    continue
                heard, before = by_device.get(series.device), series
                # A topic without an identity, beside others that have one, starts no new boot.
                if heard is None or (heard.boot != boot and boot is not None):
                    heard = self._begin(series.device, boot, received_us, series)
                if heard.first_sequence is None:
                    heard.first_sequence = datum.device_sequence
                if heard.subject != series.subject:
                    # A serial line has one sequence for all of its streams.
                    heard.is_mixed = bool(heard.subject) and series.stream == series.subject
                    heard.subject = series.subject[:SUBJECT_MAX]
                    heard.is_serial = series.stream != series.subject
                if latest is not None and len(datum.payload) <= LATEST_BYTES_MAX and len(latest) < LATEST_MAX:
                    latest[series.stream] = entry
            pause_us = received_us - heard.received_us
            if pause_us > heard.longest_pause_us:  # noqa: PLR1730 - `max` would be a call
                heard.longest_pause_us = pause_us
            heard.received_us = received_us
            heard.readings += 1
            sequence = datum.device_sequence
            if sequence is not None and sequence > heard.top_sequence:
                heard.top_sequence = sequence
            tick_ms = datum.tick_ms
            if tick_ms is not None:
                heard.tells = "tick"
                # Compare streams, not series, as a payload that is no JSON has another series.
                if series.stream == heard.followed:
                    if tick_ms >= heard.tick_ms and received_us < heard.due_us:
                        heard.tick_ms = tick_ms
                    else:
                        heard.step(tick_ms, received_us)
                elif received_us >= heard.from_us + FOLLOWED_US:
                    heard.follow(series.stream, tick_ms, received_us)
            else:
                is_told = datum.event_us is not None or datum.device_time_us is not None
                heard.tells = "time" if is_told else "nothing"

    def told_no_tick(self, device: str, boot: str | None, received_us: int) -> None:
        """Record that the next reading has an unreadable tick."""
        self._met(device, boot, received_us).unreadable_us = received_us

    def told_odd_date(self, device: str, boot: str | None, date: ToldDate) -> None:
        """Record that the next reading has a time that cannot be right."""
        self._met(device, boot, date.received_us).odd_date = date

    def told_fault(self, kind: FaultKind, device: str, cause: Callable[[], str], received_us: int) -> None:
        """Record that the next reading is not what its route declares; `cause` says why."""
        heard = self._met(device, None, received_us)
        faults = heard.faults = heard.faults or {}
        fault = faults.get(kind)
        if fault is None:
            fault = faults[kind] = PayloadFault(device, cause(), received_us)
        elif received_us >= fault.told_us + CAUSE_INTERVAL_US:
            fault.cause, fault.told_us = cause(), received_us
        fault.readings += 1
        fault.received_us = received_us
        names = self._faulty.setdefault(kind, {})
        names.pop(device, None)
        names[device] = None
        if len(names) > FAULTY_MAX:
            del names[next(iter(names))]

    def last_faults(self, devices_max: int) -> dict[FaultKind, list[PayloadFault]]:
        """Devices that had a fault last, by kind of fault, newest first."""
        return {kind: list(islice(self._faults(kind), devices_max)) for kind in self._faulty}

    def _faults(self, kind: FaultKind) -> Iterator[PayloadFault]:
        for name in reversed(self._faulty[kind]):
            heard = self._by_device.get(name)
            if heard is not None and heard.faults and kind in heard.faults:
                yield heard.faults[kind]

    def _met(self, device: str, boot: str | None, received_us: int) -> Heard:
        heard = self._by_device.get(device)
        return self._begin(device, boot, received_us) if heard is None else heard

    def _begin(self, device: str, boot: str | None, received_us: int, series: Series | None = None) -> Heard:
        before = self._by_device.get(device)
        if before is None and len(self._by_device) >= self._devices_max:
            del self._by_device[next(iter(self._by_device))]
        heard = self._by_device[device] = Heard(boot, received_us)
        if before is not None:
            heard.longest_pause_us = max(before.longest_pause_us, received_us - before.received_us)
            heard.unreadable_us, heard.odd_date = before.unreadable_us, before.odd_date
            heard.faults = before.faults
            heard.boot_before = before.boot
            if before.received_us - before.since_us < STRETCH_US:
                heard.short_boots, heard.short_since_us = before.short_boots, before.short_since_us
                # Two programs under one name, each with its own boot, are no sensor that restarts.
                ticks = series is not None and series.stream == before.followed
                heard.short_boots += ticks and boot != before.boot_before
        return heard
