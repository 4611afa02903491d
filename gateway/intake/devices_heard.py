"""When each device was heard last, and where, since the gateway was started: in memory, for `sluice devices`."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

from msgspec import Struct

from gateway.buffer.rows import Entry, Series
from gateway.clock.sensor_dates import Implausible
from gateway.intake.payload_identity import TICK_MODULUS

DEVICES_MAX = 20_000
"""Of more, those that were met first are forgotten until they are heard again."""
SUBJECT_MAX = 256
"""Characters of a topic that are remembered: a hostile one may have 65,535."""
STRETCH_US = 60_000_000
"""Over so long at the least the pace of a tick is taken: what the network adds is then little of it. A boot that was
over before had no time to have its clock learnt."""
FOLLOWED_US = 3_600_000_000
"""After so long without a stretch, the tick of another topic is followed."""
ORDER_SLACK_MS = 1_000
"""A tick may be that much earlier than the one before: two tasks of one sensor."""
BEGUN_ANEW_PACES = 0.5, 2.0
"""A tick that went back and goes on at about its pace has begun anew. What a sensor had kept comes faster."""
LATEST_MAX = 5_000
LATEST_BYTES_MAX = 2_048
"""Streams whose latest reading is kept until it is asked for, and how large its payload may be: 10 MB at the most."""
NO_PACE = 0.05
"""What went back, and goes on no faster than this, begins anew with each reading."""

FAULTY_MAX = 1_000
"""Devices whose payloads are not what their routes declare, of each kind of fault: of more, the last ones are named."""

CAUSE_INTERVAL_US = 1_000_000
"""So long after the last one the cause of a device's next fault is looked for: that takes longer than all else."""
FaultKind = Literal["identity-missing", "payload-not-json"]
"""As it is counted: the payload has no identity, or is no JSON, although its route declares that."""
Tells = Literal["tick", "time", "nothing"]
"""What a reading says of when it was taken: by the sensor's own clock, by a date or an age, or nothing."""


class ToldDate(Struct, frozen=True):
    """A time that a sensor sent, and that cannot be right."""

    reason: Implausible
    told: str
    """The date (RFC 3339), or the seconds from the receipt where it was told so."""
    off_us: int | None
    """How far after the receipt that is, below 0 for before; None where the gateway's clock was not known."""
    received_us: int


class PayloadFault(Struct):
    """A device whose payloads are not what its route declares. Times are CLOCK_BOOTTIME in microseconds."""

    device: str
    cause: str
    told_us: int
    """Of the payload that `cause` is of."""
    received_us: int = 0
    """Of the last payload that had this kind of fault."""
    readings: int = 0
    """So many had it since the start, whatever its cause."""


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
        """The sensor's; None where it sends none."""
        self.since_us = self.received_us = since_us
        """When the first and the last reading of this boot came in."""
        self.longest_pause_us = 0
        """The longest pause between two readings, of this boot and of those before."""
        self.readings = 0
        """Of this boot."""
        self.first_sequence: int | None = None
        self.top_sequence = -1
        """The sensor's, of this boot: of the reading that came first, and the highest."""
        self.is_mixed = False
        """Whether readings of this boot came on several MQTT topics, which may have a sequence each."""
        self.subject = ""
        """The MQTT topic, or the serial port."""
        self.is_serial = False
        self.tells: Tells = "nothing"
        self.unreadable_us: int | None = None
        """When the last reading came that had a tick which is none."""
        self.odd_date: ToldDate | None = None
        """The last that could not be right."""
        self.faults: dict[FaultKind, PayloadFault] | None = None
        """The last of each kind; None where there is none, as of nearly all devices."""
        self.boot_before: str | None = None
        self.short_boots = 0
        """Boots before the present one, in a row, that were over before their clock could be learnt."""
        self.short_since_us = since_us
        """When the first of them began."""
        self.followed: str | None = None
        """The stream of one topic of those that have a tick: the other topics' may be of other counters."""
        self.from_us = since_us - FOLLOWED_US
        self.from_tick_ms = 0
        """Where the present stretch of it began."""
        self.due_us = 0
        """When that is long enough."""
        self.tick_ms = 0
        """The furthest of it."""
        self.back_from: tuple[int, int] | None = None
        """Since when, and from which tick on, it is behind that: begun anew, or readings that were kept."""
        self.paces: tuple[float, ...] = ()
        """Ticks per millisecond over the last two stretches."""
        self.tick_restarts = 0
        """How often it began anew in this boot."""

    @property
    def missing(self) -> int | None:
        """Readings of this boot that did not come, at the least, by their sequences; None where these do not tell.

        What comes again, or late from before the first, makes it fewer: it is never too many.
        """
        if self.first_sequence is None or self.is_mixed:
            return None
        return max(0, self.top_sequence - self.first_sequence + 1 - self.readings)

    def follow(self, stream: str, tick_ms: int, received_us: int) -> None:
        """Take the pace of this topic's tick from here on."""
        self.followed, self.paces = stream, ()
        self._begin_stretch(tick_ms, received_us)

    def step(self, tick_ms: int, received_us: int) -> None:
        """See a tick that is behind the one before, or that ends a stretch."""
        ahead_ms = (tick_ms - self.tick_ms) % TICK_MODULUS
        # A counter that has wrapped is ahead.
        if ahead_ms >= TICK_MODULUS // 2 and ahead_ms < TICK_MODULUS - ORDER_SLACK_MS:
            self._step_back(tick_ms, received_us)
            return
        if self.back_from is not None:
            # Those were readings of before.
            self.back_from, self.due_us = None, self.from_us + STRETCH_US
        if ahead_ms < TICK_MODULUS // 2:
            self.tick_ms = tick_ms
        if received_us >= self.due_us:
            ticks_ms = (self.tick_ms - self.from_tick_ms) % TICK_MODULUS
            self.paces = *self.paces[-1:], ticks_ms * 1_000 / (received_us - self.from_us)
            self._begin_stretch(self.tick_ms, received_us)

    def _step_back(self, tick_ms: int, received_us: int) -> None:
        if self.back_from is None:
            # Until it is known what this is, each reading is looked at.
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
        """Names of devices by the kind of their fault, the last one last."""
        self.latest: dict[str, Entry] | None = None
        """By stream, one of the readings that came together last. Whoever shows them makes the dictionary, and puts
        an empty one in its place each time; None where nobody does."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_device)

    def get(self, device: str) -> Heard | None:
        """None where it was not heard since the start, or is forgotten."""
        return self._by_device.get(device)

    def note(self, entries: Iterable[Entry]) -> None:  # noqa: C901, PLR0912 - for every reading: each call costs
        """See what came in. For every reading there is: it takes a fraction of a microsecond."""
        by_device, latest = self._by_device, self.latest
        heard: Heard | None = None
        before: Series | None = None
        for entry in entries:
            series, boot = entry.series, entry.device_boot
            if heard is None or series is not before or (heard.boot != boot and boot is not None):
                if entry.quarantined is not None or series.is_of_gateway:
                    continue
                heard, before = by_device.get(series.device), series
                # A topic without an identity, beside others that have one, is of no other boot.
                if heard is None or (heard.boot != boot and boot is not None):
                    heard = self._begin(series.device, boot, entry.received_us, series)
                if heard.first_sequence is None:
                    heard.first_sequence = entry.device_sequence
                if heard.subject != series.subject:
                    # A serial line counts all of its streams through.
                    heard.is_mixed = bool(heard.subject) and series.stream == series.subject
                    heard.subject = series.subject[:SUBJECT_MAX]
                    heard.is_serial = series.stream != series.subject
                if latest is not None and len(entry.payload) <= LATEST_BYTES_MAX and len(latest) < LATEST_MAX:
                    latest[series.stream] = entry
            received_us = entry.received_us
            pause_us = received_us - heard.received_us
            if pause_us > heard.longest_pause_us:  # noqa: PLR1730 - `max` would be a call
                heard.longest_pause_us = pause_us
            heard.received_us = received_us
            heard.readings += 1
            sequence = entry.device_sequence
            if sequence is not None and sequence > heard.top_sequence:
                heard.top_sequence = sequence
            tick_ms = entry.tick_ms
            if tick_ms is not None:
                heard.tells = "tick"
                # Not its series: a payload that is no JSON has another one.
                if series.stream == heard.followed:
                    if tick_ms >= heard.tick_ms and received_us < heard.due_us:
                        heard.tick_ms = tick_ms
                    else:
                        heard.step(tick_ms, received_us)
                elif received_us >= heard.from_us + FOLLOWED_US:
                    heard.follow(series.stream, tick_ms, received_us)
            else:
                is_told = entry.event_us is not None or entry.device_time_us is not None
                heard.tells = "time" if is_told else "nothing"

    def told_no_tick(self, device: str, boot: str | None, received_us: int) -> None:
        """A reading that is noted next has a tick which is none."""
        self._met(device, boot, received_us).unreadable_us = received_us

    def told_odd_date(self, device: str, boot: str | None, date: ToldDate) -> None:
        """A reading that is noted next has a time which cannot be right."""
        self._met(device, boot, date.received_us).odd_date = date

    def told_fault(self, kind: FaultKind, device: str, cause: Callable[[], str], received_us: int) -> None:
        """A reading that is noted next is not what its route declares; `cause` says why."""
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
        """Of each kind of fault the devices that had it last, the newest first."""
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
                # Two programs under one name, each with a boot of its own, are no sensor that restarts.
                ticks = series is not None and series.stream == before.followed
                heard.short_boots += ticks and boot != before.boot_before
        return heard
