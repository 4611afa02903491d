"""The front door: routes a reading, takes the sensor's identity from it, and hands it to the buffer."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import UNSET

from gateway.buffer.buffer import Buffer
from gateway.buffer.losses import EVENT_REFUSED, loss_body
from gateway.buffer.rows import Entry, Loss, Origin, Quarantined
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.clock.sensor_dates import TimeLimits
from gateway.intake.check_readings import CHECK_KIND, CHECK_TOPIC_PREFIX, CheckReadings
from gateway.intake.devices_heard import DevicesHeard, FaultKind
from gateway.intake.new_clocks import NewClocks
from gateway.intake.own_events import OwnEvents
from gateway.intake.payload_identity import TICK_UNREADABLE, of_properties, why_no_properties, why_none
from gateway.intake.payload_json import fault, is_json
from gateway.intake.quarantine_reports import QuarantineReports
from gateway.intake.reading_times import Arrivals, IntakeTimes
from gateway.intake.resolved_topics import ResolvedTopic, ResolvedTopics
from gateway.intake.routes import Refusal, RouteTable
from gateway.reading import Datum, Mark, Reading, Recalled
from gateway.settings import GatewaySettings, KafkaSettings
from gateway.user_properties import text_of

_WITH_SECRET = Origin(has_secret=True)


class FrontDoor:
    """The front door of the pipeline, for each kind of ingress: all that comes in passes here."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it joins
        self,
        buffer: Buffer,
        routes: RouteTable,
        gateway: GatewaySettings,
        kafka: KafkaSettings,
        now_us: Callable[[], int],
        clocks: DeviceClocks | None = None,
        *,
        has_secrets: bool = False,
    ) -> None:
        """`has_secrets` says that devices of this site have secrets of their own."""
        self._buffer = buffer
        self._guest = Origin(leaves_room=has_secrets)
        self._broker = Origin(leaves_room=has_secrets, is_broker=True)
        self._routes = routes
        self._topics = ResolvedTopics(routes, gateway, kafka)
        self.now_us = now_us
        self.clocks = DeviceClocks() if clocks is None else clocks
        self.heard = DevicesHeard()
        self.checks = CheckReadings(now_us)
        """Test readings of `sluice check`. They come in as readings do, and go out as the gateway's own events."""
        self.new_clocks = NewClocks(gateway.hold_new_clock_s, self.clocks, now_us)
        """Sensors whose readings the forwarder leaves behind for a while."""
        self.counts: Counter[str] = Counter()
        """Counts since the start: `readings`, `identity-missing` and `time-missing` (except on serial lines),
        `payload-not-json`, `tick-unreadable`, `lost-unreadable`, the counts of `IntakeTimes`, and reasons of the
        quarantine."""
        self.counted_last: dict[str, str] = {}
        """By name of a count: the device of the last reading without an identity or a time, with an unreadable tick, or
        with a time that cannot be right."""
        self.events = OwnEvents(buffer, gateway, kafka, now_us)
        self.quarantine = QuarantineReports(gateway, kafka, now_us, self.counts)
        self.times = IntakeTimes(
            self.clocks,
            self.new_clocks,
            self.heard,
            TimeLimits.of(gateway),
            buffer.clock,
            now_us,
            self._count,
            lambda device, told: self.event("device-time-implausible", device, **told),
        )

    @property
    def cannot_store(self) -> bool:
        """See `Intake.cannot_store`."""
        return self._buffer.cannot_store

    def take(self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark] = ()) -> None:
        """See `Intake.take`. A device that holds more than its share of the buffer is refused."""
        has_secret = bool(readings) and readings[0].writer is not None
        self._take(readings, done, marks, _WITH_SECRET if has_secret else self._guest)

    def take_of_broker(
        self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark] = ()
    ) -> None:
        """See `Intake.take`. If a device holds more than its share of the buffer, its readings are lost, and counted.

        A broker sends the next readings only once it has its acknowledgements. Refusing one device would stop all
        others.
        """
        self._take(readings, done, marks, self._broker)

    def _take(
        self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark], origin: Origin
    ) -> None:
        self.counts["readings"] += len(readings)
        arrivals: list[Arrivals] = []
        entries = [self._entry(reading, arrivals) for reading in readings]
        self.heard.record(entries)
        for together in arrivals:
            self.times.stamp(together)
        if readings and readings[-1].datum.received_us >= self.clocks.save_due_us:
            # The clocks go with a commit that is made anyway, so that no card is worn for them.
            self._buffer.keep(self.clocks.marks(readings[-1].datum.received_us))
        self._buffer.append(entries, done, marks, origin)

    @property
    def refuses_by_share(self) -> bool:
        """See `ListenerIntake.refuses_by_share`."""
        return self._buffer.refuses_by_share

    async def recall(self, device: str, boot: str, held: range) -> Recalled:
        """See `SerialIntake.recall`."""
        return await self._buffer.recall(device, boot, held)

    async def marks(self, prefix: str) -> dict[str, bytes]:
        """See `Intake.marks`."""
        return await self._buffer.run(lambda file: file.marks(prefix))

    def lost(
        self, device: str | None, reason: str, count: int = 1, sequences: tuple[str, int, int] | None = None
    ) -> None:
        """See `Intake.lost`."""
        now_us = self.now_us()
        loss = Loss(device or "", reason, self._buffer.boot_id, count, now_us, now_us, *(sequences or ("", None, None)))
        if count or sequences is None:
            self._buffer.count_loss(loss)
        else:
            # A counter would add it up with others, and would then cover the numbers between them.
            self._append_own("loss", device, loss_body(loss))

    def unreadable(self, device: str, subject: str, payload: bytes, received_us: int, reason: str) -> None:
        """See `SerialIntake.unreadable`."""
        if self.cannot_store:
            self.lost(device, reason)
            return
        datum = Datum(received_us=received_us, payload=payload)
        entry = self.quarantine.set_aside(Quarantined(reason=reason, device=device, subject=subject, datum=datum))
        self._buffer.append([entry], lambda stored: None if stored else self.lost(device, reason), (), self._guest)

    def event(self, kind: str, device: str | None, **details: object) -> None:
        """See `Intake.event`."""
        self._append_own(kind, device, {"device": device, **details})

    def _append_own(self, kind: str, device: str | None, body: dict[str, object]) -> None:
        event = self.events.event_entry(kind, body)
        self._buffer.append_own(event, lambda stored: None if stored else self.lost(device, EVENT_REFUSED))

    def routed(  # noqa: C901, PLR0912, PLR0915 - for every reading: each call costs
        self, reading: Reading, arrivals: list[Arrivals] | None
    ) -> Entry | Refusal:
        """The row of a reading. If its tick gives its time, a row that came in just now waits for it in `arrivals`."""
        topic = self._topics.known.get((reading.topic, reading.subject, reading.writer))
        if topic is None:
            topic = self._resolved(reading)
        if isinstance(topic, Refusal):
            return topic
        # Each access to a field costs, and this is done for every reading.
        series, series_of_bytes, layout, identify, ticking, tell_time, time_error_us, told = topic
        datum = reading.datum
        if reading.user:
            datum.properties = text_of(reading.user, told)
        payload, received_us, boot, line_tick_ms = datum.payload, datum.received_us, datum.device_boot, datum.tick_ms
        lost = None
        if datum.device_sequence is None and (identify is not None or layout == "properties"):
            identity = of_properties(reading.user) if identify is None else identify(payload)
            if identity is None:
                # Serial lines without our frames are not expected to have one.
                if not reading.is_serial:
                    why = partial(why_none, layout, payload)
                    if identify is None:
                        why = partial(why_no_properties, reading.user)
                    self._met_fault("identity-missing", series.device, why, received_us)
            else:
                boot = datum.device_boot = identity.boot
                datum.device_sequence = identity.seq
                if identity.lost is not UNSET:
                    lost = identity.dropped()
                    self.counts["lost-unreadable"] += lost is None
                tick = identity.tick
                if tick is None or ticking is None or line_tick_ms is not None:
                    pass
                elif tick == TICK_UNREADABLE:
                    self._count("tick-unreadable", series.device)
                    self.heard.told_no_tick(series.device, boot, received_us)
                    # An unreadable tick is not a missing time.
                    tell_time = None
                else:
                    datum.tick_ms = tick
        if series_of_bytes is not None and not is_json(payload):
            series = series_of_bytes
            self._met_fault("payload-not-json", series.device, partial(fault, payload), received_us)
        entry, tick_ms = Entry(series, datum, lost), datum.tick_ms
        if tick_ms is None:
            return entry if tell_time is None else self.times.with_told_time(entry, reading, tell_time, time_error_us)
        if ticking is not None and boot is not None and line_tick_ms is None:
            # The tick is from the payload.
            if arrivals is None:
                found = self.times.estimate(ticking, boot, tick_ms, received_us)
                if found is not None:
                    datum.event_us, datum.event_error_us = found
            else:
                last = arrivals[-1] if arrivals else None
                if last is None or last.of is not ticking or last.received_us != received_us or last.boot != boot:
                    last = Arrivals(ticking, boot, received_us, series)
                    arrivals.append(last)
                last.data.append(datum)
        elif arrivals is not None and datum.event_us is None and boot is not None:
            self.new_clocks.met(series, boot, received_us)
        return entry

    def _entry(self, reading: Reading, arrivals: list[Arrivals]) -> Entry:
        entry = self.routed(reading, arrivals)
        if isinstance(entry, Refusal):
            reading.datum.properties = text_of(reading.user)
            device = reading.writer or (self._routes.serial_device(reading.topic) if reading.is_serial else "")
            return self.quarantine.set_aside(
                Quarantined(
                    reason=entry.reason,
                    device=device,
                    subject=reading.subject,
                    topic=reading.topic,
                    writer=reading.writer,
                    datum=reading.datum,
                )
            )
        return entry

    def _count(self, name: str, device: str) -> None:
        self.counts[name] += 1
        self.counted_last[name] = device

    def _met_fault(self, kind: FaultKind, device: str, cause: Callable[[], str], received_us: int) -> None:
        """Record that a payload is not what its route declares."""
        self._count(kind, device)
        self.heard.told_fault(kind, device, cause, received_us)

    def _resolved(self, reading: Reading) -> ResolvedTopic | Refusal:
        """Resolve the topic of a reading, if it is not among the known ones."""
        if reading.topic.startswith(CHECK_TOPIC_PREFIX) and self.checks.takes(reading):
            # It is no sensor's reading.
            self.counts["readings"] -= 1
            return ResolvedTopic(self.events.series(CHECK_KIND), None, "none", None, None, None, 0, frozenset())
        return self._topics.resolve(reading)


class BrokerDoor:
    """The front door as an `Intake` for a broker of the site."""

    def __init__(self, door: FrontDoor) -> None:
        self.take = door.take_of_broker
        self.marks = door.marks
        self.lost = door.lost
        self.event = door.event
        self._door = door

    @property
    def cannot_store(self) -> bool:
        """See `Intake.cannot_store`."""
        return self._door.cannot_store
