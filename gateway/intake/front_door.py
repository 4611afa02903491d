"""The front door: routes a reading, takes the sensor's identity from it, and hands it to the buffer."""

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import msgspec
import structlog
from msgspec import UNSET

from gateway.buffer.boots import Correction, correction_body
from gateway.buffer.buffer import Buffer
from gateway.buffer.losses import EVENT_REFUSED, loss_body
from gateway.buffer.losses import OWN as OWN_LOSSES
from gateway.buffer.rows import TICK_VOID, Doubt, Entry, Lane, Loss, Quarantined, Series
from gateway.clock.sensor_clocks import MARKS, DeviceClocks
from gateway.clock.sensor_dates import TimeLimits
from gateway.intake import payload_identity, payload_time
from gateway.intake.check_readings import KIND as CHECK
from gateway.intake.check_readings import TOPIC_PREFIX as CHECK_TOPICS
from gateway.intake.check_readings import CheckReadings
from gateway.intake.devices_heard import DevicesHeard, ToldDate
from gateway.intake.new_clocks import NewClocks
from gateway.intake.payload_identity import TICK_UNREADABLE
from gateway.intake.reading_times import Arrivals, IntakeTimes, Ticking
from gateway.intake.routes import Destination, Refusal, RouteTable
from gateway.reading import BufferFileError, Mark, Reading, Recalled, source
from gateway.settings import GatewaySettings, KafkaSettings

TOPICS_CACHED_MAX = 20_000
"""Resolved topics that are remembered; a sender of ever new ones makes the cache begin again."""
TOPIC_CACHED_CHARACTERS_MAX = 256
"""Longer topics are resolved each time: a hostile one may have 65,535 characters."""
REPORT_BYTES_MAX = 65_536
"""Raw bytes that go to Kafka with a quarantine report; the whole input stays on this box."""
REPORT_SUBJECT_MAX = 256
"""Characters of the topic that a report repeats: a hostile one may have 65,535."""
REPORT_REST_BYTES = 3_000
"""What a report needs beside the raw bytes, headers included."""
LOST_TOLD_MAX = 20_000
"""Devices whose reported losses are added up in memory."""
READING_TYPE = "sluice.reading"
CLOCKS_AT_ONCE = 500
"""Sensors' clocks that are written in one commit at the end, half a kilobyte each."""

_sample = attrgetter("tick_ms", "device_sequence")

log = structlog.get_logger()


class _Way(NamedTuple):
    """What the readings of one topic have in common, by their route."""

    series: Series
    identify: payload_identity.Reader | None
    """None where the payload does not say who took it."""
    ticking: Ticking | None
    """Whose tick it is, where that gives a reading's time."""
    tell_time: payload_time.Reader | None
    """What finds the time of one that has no tick; None where there is nothing to be found."""
    time_error_us: int


class RetryOutcome(msgspec.Struct, frozen=True):
    """What became of quarantined input that was to be taken in again."""

    stored: int
    refused: dict[str, int]
    """Why some stays in the quarantine, and how much."""
    unknown: int
    """Numbers that are not there (any more)."""


class FrontDoor:
    """`Intake`, and `SerialIntake`, as the pipeline wires it: everything that any ingress takes in passes here."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it joins
        self,
        buffer: Buffer,
        routes: RouteTable,
        gateway: GatewaySettings,
        kafka: KafkaSettings,
        now_us: Callable[[], int],
        clocks: DeviceClocks | None = None,
    ) -> None:
        self._buffer = buffer
        self._routes = routes
        self._gateway = gateway
        self._kafka = kafka
        self._now_us = now_us
        self.clocks = DeviceClocks() if clocks is None else clocks
        self.heard = DevicesHeard()
        self.checks = CheckReadings(now_us)
        """Of `sluice check`: they come in as readings do, and go out as the gateway's own."""
        self.new_clocks = NewClocks(gateway.hold_new_clock_s, self.clocks, now_us)
        """Whose readings the forwarder leaves behind for a while."""
        self._resolved: dict[tuple[str, str, str | None], _Way | Refusal] = {}
        # Base64 takes four bytes for three.
        self._report_bytes = min(REPORT_BYTES_MAX, (kafka.record_bytes_max - REPORT_REST_BYTES) * 3 // 4)
        self.counts: Counter[str] = Counter()
        """Since the start: `readings`, `identity-missing` and `time-missing` (but for serial lines), `tick-unreadable`,
        `lost-unreadable`, what `IntakeTimes` counts, and reasons of the quarantine."""
        self.counted_last: dict[str, str] = {}
        """The device of the last reading without an identity or a time, with a tick that is none, or with a time that
        cannot be right, by the name it is counted under."""
        self._times = IntakeTimes(
            self.clocks,
            TimeLimits.of(gateway),
            buffer.clock,
            lambda device, told: self.event("device-time-implausible", device, **told),
            self._told_odd_date,
        )
        self.lost_told: Counter[str] = Counter()
        """Readings that are gone for good, by device, as far as they were reported since the start."""
        self.lost_told_us = 0
        """When the last of them was lost (CLOCK_BOOTTIME)."""
        self.quarantined: Counter[str] = Counter()
        """Readings that no route could take, and what is none, by reason, since the start."""
        self.quarantined_last: dict[str, tuple[str, str]] = {}
        """The device of the last of them, empty where it is not known, and its source, by reason."""

    @property
    def holding(self) -> bool:
        """See `Intake.holding`."""
        return self._buffer.holding

    def take(self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark] = ()) -> None:
        """See `Intake.take`."""
        self.counts["readings"] += len(readings)
        arrivals: list[Arrivals] = []
        entries = [self._entry(reading, arrivals) for reading in readings]
        self.heard.note(entries)
        for together in arrivals:
            self._stamp(together)
        if readings and readings[-1].received_us >= self.clocks.save_due_us:
            # In a commit that is made anyway: no card is worn for it.
            of_clocks = self.clocks.marks(readings[-1].received_us)
            marks, done = [*marks, *of_clocks], partial(self._taken_with_clocks, of_clocks, done)
        self._buffer.append(entries, done, marks)

    def _taken_with_clocks(self, marks: Sequence[Mark], done: Callable[[bool], None], stored: bool) -> None:  # noqa: FBT001 - the form of `done`
        if not stored:
            self.clocks.not_kept(marks)
        done(stored)

    async def recall_clocks(self) -> None:
        """Go on with what an earlier start in this boot of the box had learnt of sensors' clocks."""
        try:
            kept = await self.marks(MARKS)
        except BufferFileError as error:
            log.warning("sensors' clocks are learnt anew: what was kept of them cannot be read", error=str(error))
            return
        if forgotten := self.clocks.restore(kept):
            self._buffer.append((), None, forgotten)

    def keep_clocks(self) -> None:
        """Have all that was learnt of sensors' clocks written, as far as the disk has room: for the end."""
        marks = self.clocks.marks(self._now_us(), all_of_them=True)
        for start in range(0, len(marks), CLOCKS_AT_ONCE):
            self._buffer.append((), None, marks[start : start + CLOCKS_AT_ONCE])

    async def recall(self, device: str, boot: str) -> Recalled:
        """See `SerialIntake.recall`."""
        return await self._buffer.recall(device, boot)

    async def marks(self, prefix: str) -> dict[str, bytes]:
        """See `Intake.marks`."""
        return await self._buffer.marks(prefix)

    def lost(
        self, device: str | None, reason: str, count: int = 1, sequences: tuple[str, int, int] | None = None
    ) -> None:
        """See `Intake.lost`."""
        now_us = self._now_us()
        self._buffer.count_loss(
            Loss(device or "", reason, self._buffer.boot_id, count, now_us, now_us, *(sequences or ("", None, None)))
        )

    def unreadable(self, device: str, subject: str, payload: bytes, received_us: int, reason: str) -> None:
        """See `SerialIntake.unreadable`."""
        if self.holding:
            self.lost(device, reason)
            return
        entry = self._set_aside(Quarantined(reason, payload, device, subject, received_us))
        self._buffer.append([entry], lambda stored: None if stored else self.lost(device, reason))

    def event(self, kind: str, device: str | None, **details: object) -> None:
        """See `Intake.event`."""
        event = self.event_entry(kind, {"device": device, **details})
        self._buffer.append_own(event, lambda stored: None if stored else self.lost(device, EVENT_REFUSED))

    def lane_entry(self, kind: str, lane: Lane, rows: int, reason: str) -> Entry:
        """A `buffer.lanes.LaneReport`."""
        body: dict[str, object] = {"lane": lane.name, "buffer": lane.buffer_id, "reason": reason}
        if kind == "lane-closed":
            # Numbered densely from 0: who has them all has the lane.
            body["rows"] = rows
        return self.event_entry(kind, body)

    async def report_corrections(self) -> list[Correction]:
        """Have times corrected that were told before they were known; which. Raises BufferFileError."""
        return await self._buffer.report_corrections(
            lambda correction: self.event_entry("time-correction", correction_body(correction))
        )

    async def report_losses(self) -> int:
        """Have what is counted as lost reported on `gateway-events`; how many records. Raises BufferFileError."""
        told: list[Loss] = []

        def entry(loss: Loss) -> Entry:
            told.append(loss)
            return self.event_entry("loss", loss_body(loss))

        count = await self._buffer.report_losses(entry)
        # The file has forgotten them. Had it failed, they would all come again.
        for loss in told:
            if loss.reason in OWN_LOSSES:
                continue
            if loss.device in self.lost_told or len(self.lost_told) < LOST_TOLD_MAX:
                self.lost_told[loss.device] += loss.count
            if loss.boot_id == self._buffer.boot_id:
                self.lost_told_us = max(self.lost_told_us, loss.last_us)
        return count

    async def retry_quarantined(self, numbers: Sequence[int]) -> RetryOutcome:
        """Take quarantined input in again, in the current lane; what is refused again stays. Raises BufferFileError."""
        buffer_id = self._buffer.id
        entries: dict[int, Entry] = {}
        judged: dict[int, Entry] = {}
        refused: Counter[str] = Counter()
        found = await self._buffer.quarantined(numbers)
        for number, input_ in found.items():
            reading = await self._in_this_boot(input_)
            if input_.series is not None:
                series = await self._buffer.series(buffer_id, input_.series)
                judged[number] = self._times.with_earliest(_entry_of(reading, series, input_.doubt))
            elif input_.topic is None:
                refused[input_.reason] += 1
            else:
                entry = self._routed(reading, None)
                if isinstance(entry, Refusal):
                    refused[entry.reason] += 1
                else:
                    entries[number] = entry
        await self._buffer.requeue(buffer_id, entries, judged)
        return RetryOutcome(len(entries) + len(judged), dict(refused), len(set(numbers)) - len(found))

    def event_entry(self, kind: str, body: dict[str, object]) -> Entry:
        """An event of this gateway, as a row for `gateway-events`."""
        return Entry(self._own_series(self._kafka.events_topic, kind), msgspec.json.encode(body), self._now_us())

    def quarantine_entry(self, input_: Quarantined) -> Entry:
        """The report on input that cannot be forwarded, for `gateway-quarantine`; it carries the input itself."""
        self.counts[input_.reason] += 1
        subject = input_.subject[:REPORT_SUBJECT_MAX]
        payload = input_.payload
        report = {
            "reason": input_.reason,
            "device": input_.device,
            "subject": subject,
            "sha256": hashlib.sha256(payload).hexdigest(),
            "bytes": len(payload),
            "payload_base64": base64.b64encode(payload[: self._report_bytes]).decode(),
        }
        return Entry(
            self._own_series(self._kafka.quarantine_topic, "quarantined", input_.device, subject),
            msgspec.json.encode(report),
            self._now_us(),
            quarantined=input_,
        )

    def key(self, name: str) -> str:
        """The Kafka key of a device, or of this gateway (`gateway.key`)."""
        prefix = f"{self._gateway.namespace}/"
        # A name that begins so (by the fallback topic, an MQTT topic) would be read as another one without it.
        return name if self._gateway.key == "name" and not name.startswith(prefix) else prefix + name

    def _entry(self, reading: Reading, arrivals: list[Arrivals]) -> Entry:
        entry = self._routed(reading, arrivals)
        if isinstance(entry, Refusal):
            device = reading.writer or (self._routes.serial_device(reading.topic) if reading.is_serial else "")
            return self._set_aside(_quarantined(reading, device, entry.reason))
        return entry

    def _stamp(self, arrivals: Arrivals) -> None:
        """Put times into the rows of readings that came in together, and learn their sensor's clock from them."""
        samples = map(_sample, arrivals.entries)
        stamps = self._times.stamps(arrivals.of, arrivals.boot, arrivals.received_us, samples)
        without = 0
        for entry, stamp in zip(arrivals.entries, stamps, strict=True):
            if stamp is None:
                without += 1
            else:
                entry.event_us, entry.event_error_us = stamp
                # It has told what it could, and stands in the payload: each byte is one for the card.
                entry.tick_ms = None
        if without:
            self.new_clocks.met(arrivals.entries[0].series, arrivals.boot, arrivals.received_us, without)

    def _set_aside(self, input_: Quarantined) -> Entry:
        self.quarantined[input_.reason] += 1
        come_from = source(input_.topic, input_.subject)[:REPORT_SUBJECT_MAX]
        self.quarantined_last[input_.reason] = input_.device, come_from
        return self.quarantine_entry(input_)

    def _routed(  # noqa: C901, PLR0912 - for every reading: each call costs
        self, reading: Reading, arrivals: list[Arrivals] | None
    ) -> Entry | Refusal:
        """The row of a reading. One that came in just now waits in `arrivals` for its time, where its tick gives it."""
        way = self._resolve(reading)
        if isinstance(way, Refusal):
            return way
        # Each look at a field costs: this is done for every reading.
        series, identify, ticking, tell_time, time_error_us = way
        payload, received_us = reading.payload, reading.received_us
        boot, sequence, tick_ms = reading.device_boot, reading.device_sequence, reading.tick_ms
        event_us, error_us, lost = reading.event_us, reading.event_error_us, None
        if identify is not None and sequence is None:
            identity = identify(payload)
            if identity is None:
                # Of serial lines without our frames nobody expects one.
                if not reading.is_serial:
                    self._count("identity-missing", series.device)
            else:
                boot, sequence = identity.boot, identity.seq
                if identity.lost is not UNSET:
                    lost = identity.dropped()
                    self.counts["lost-unreadable"] += lost is None
                tick = identity.tick
                if tick is None or ticking is None or tick_ms is not None:
                    pass
                elif tick == TICK_UNREADABLE:
                    self._count("tick-unreadable", series.device)
                    self.heard.told_no_tick(series.device, boot, received_us)
                    # It is not missing.
                    tell_time = None
                else:
                    tick_ms = tick
        entry = Entry(
            series,
            payload,
            received_us,
            event_us,
            error_us,
            boot,
            sequence,
            tick_ms,
            Doubt.REDELIVERED if reading.redelivered else 0,
            lost,
        )
        if tick_ms is None:
            return entry if tell_time is None else self._with_told_time(entry, reading, tell_time, time_error_us)
        if ticking is not None and boot is not None and reading.tick_ms is None:
            # It is of the payload.
            if arrivals is None:
                found = self._times.estimate(ticking, boot, tick_ms, received_us)
                if found is not None:
                    entry.event_us, entry.event_error_us = found
            else:
                last = arrivals[-1] if arrivals else None
                if last is None or last.of is not ticking or last.received_us != received_us or last.boot != boot:
                    last = Arrivals(ticking, boot, received_us)
                    arrivals.append(last)
                last.entries.append(entry)
        elif arrivals is not None and event_us is None and boot is not None:
            self.new_clocks.met(series, boot, received_us)
        return entry

    def _with_told_time(self, entry: Entry, reading: Reading, tell_time: payload_time.Reader, error_us: int) -> Entry:
        """The row of a reading that has no tick, with the time that its payload tells."""
        try:
            told = tell_time(reading.payload)
        except payload_time.NothingToldError:
            if not reading.is_serial:
                self._count("time-missing", entry.series.device)
            return entry
        return entry if told is None else self._times.told(entry, told, error_us, self._now_us())

    def _told_odd_date(self, entry: Entry, date: ToldDate) -> None:
        self._count(f"device-time-{date.reason}", entry.series.device)
        self.heard.told_odd_date(entry.series.device, entry.device_boot, date)

    def _count(self, name: str, device: str) -> None:
        self.counts[name] += 1
        self.counted_last[name] = device

    async def _in_this_boot(self, input_: Quarantined) -> Reading:
        """Quarantined input as a reading, its times in this boot's CLOCK_BOOTTIME."""
        shift_us, error_us, tick_ms, event_us = 0, input_.event_error_us, input_.tick_ms, input_.event_us
        if input_.boot_id is not None and input_.boot_id != self._buffer.boot_id:
            then = await self._buffer.boot_clock(input_.boot_id)
            now = await self._buffer.boot_clock(self._buffer.boot_id)
            at_us = input_.received_us if event_us is None else event_us
            shift_us = then.offset_us(at_us) - now.offset_us(self._now_us())
            then_error_us = then.error_us(at_us)
            if then_error_us is None or not now.known:
                # As a sensor's clock that was not learnt: no bound is claimed for its time.
                event_us, tick_ms = None, TICK_VOID
            else:
                error_us += then_error_us
        return Reading(
            input_.topic or "",
            input_.subject,
            input_.payload,
            input_.received_us + shift_us,
            input_.device_boot,
            input_.device_sequence,
            tick_ms,
            None if event_us is None else event_us + shift_us,
            error_us,
            input_.writer,
            redelivered=input_.doubt == Doubt.REDELIVERED,
            device_time_us=input_.device_time_us,
        )

    def _resolve(self, reading: Reading) -> _Way | Refusal:
        key = (reading.topic, reading.subject, reading.writer)
        resolved = self._resolved.get(key)
        if resolved is None:
            if reading.topic.startswith(CHECK_TOPICS) and self.checks.takes(reading):
                # No sensor's.
                self.counts["readings"] -= 1
                return _Way(self._own_series(self._kafka.events_topic, CHECK), None, None, None, 0)
            found = self._routes.resolve(reading.topic, reading.writer, is_serial=reading.is_serial)
            if isinstance(found, Destination):
                # One that is too long to be remembered with each clock shares that of others of its device.
                stream = reading.topic if len(reading.topic) <= TOPIC_CACHED_CHARACTERS_MAX else ""
                series = Series(
                    found.kafka_topic,
                    self.key(found.device),
                    found.device,
                    reading.subject,
                    READING_TYPE,
                    found.content_type,
                    reading.topic,
                )
                resolved = _Way(
                    series,
                    payload_identity.reader(found.identity),
                    Ticking(found.device, stream, found.oscillator, found.least_delay_us)
                    if found.time in {"auto", "tick"}
                    else None,
                    payload_time.reader(found.time, found.identity, found.content_type),
                    found.time_error_us,
                )
            else:
                resolved = found
            if len(self._resolved) >= TOPICS_CACHED_MAX:
                self._resolved.clear()
            if len(reading.topic) <= TOPIC_CACHED_CHARACTERS_MAX:
                self._resolved[key] = resolved
        return resolved

    def _own_series(self, topic: str, kind: str, device: str = "", subject: str | None = None) -> Series:
        return Series(
            topic,
            self.key(self._gateway.id),
            device,
            kind if subject is None else subject,
            f"sluice.gateway.{kind}",
            "application/json",
        )


def _entry_of(reading: Reading, series: Series, doubt: int) -> Entry:
    """The row of a reading that was routed and judged before."""
    return Entry(
        series,
        reading.payload,
        reading.received_us,
        reading.event_us,
        reading.event_error_us,
        reading.device_boot,
        reading.device_sequence,
        reading.tick_ms,
        doubt,
        device_time_us=reading.device_time_us,
    )


def _quarantined(reading: Reading, device: str, reason: str) -> Quarantined:
    return Quarantined(
        reason,
        reading.payload,
        device,
        reading.subject,
        reading.received_us,
        reading.topic,
        reading.writer,
        None,
        reading.event_us,
        reading.event_error_us,
        reading.tick_ms,
        reading.device_boot,
        reading.device_sequence,
        doubt=_doubt(reading),
        device_time_us=reading.device_time_us,
    )


def _doubt(reading: Reading) -> int:
    return Doubt.REDELIVERED if reading.redelivered else 0
