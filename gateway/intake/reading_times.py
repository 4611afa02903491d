"""Finds when a reading that comes in was taken: by its sensor's tick, or from its payload."""

from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

import structlog

from gateway.buffer.rows import Entry, Series
from gateway.clock.gateway_clock import BootClock
from gateway.clock.rfc3339 import rfc3339
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.clock.sensor_dates import Implausible, TimeLimits, implausible
from gateway.intake.devices_heard import DevicesHeard, ToldDate
from gateway.intake.new_clocks import NewClocks
from gateway.intake.payload_time import NothingToldError, Reader, Told
from gateway.reading import Datum, Reading
from gateway.settings import Oscillator

LOG_INTERVAL_US = 60_000_000
EVENT_INTERVAL_US = 3_600_000_000
EVENT_DEVICES_MAX = 100
"""Devices that are reported in an hour. If anonymous clients are let in, anybody may make up names."""

_sample = attrgetter("tick_ms", "device_sequence")

log = structlog.get_logger()


class ImplausibleTimes:
    """Logs times that cannot be right once a minute at most for each reason, and reports each device once an hour."""

    def __init__(self, report: Callable[[str, dict[str, object]], None]) -> None:
        """`report` takes a device and the body of its event."""
        self._report = report
        self._log_due_us: dict[Implausible, int] = {}
        self._unlogged: Counter[Implausible] = Counter()
        self._reported: set[str] = set()
        self._reported_until_us = 0

    def met(self, reason: Implausible, device: str, told: str, received: str | None, now_us: int) -> None:
        """A reading's time is too far off; `told` and `received` are RFC 3339, `now_us` is CLOCK_BOOTTIME."""
        self._unlogged[reason] += 1
        if now_us >= self._log_due_us.get(reason, now_us):
            log.warning(
                "a sensor's time cannot be right: its reading has the time of its receipt",
                reason=reason,
                device=device,
                told=told,
                received=received,
                readings=self._unlogged.pop(reason),
            )
            self._log_due_us[reason] = now_us + LOG_INTERVAL_US
        if now_us >= self._reported_until_us:
            self._reported.clear()
            self._reported_until_us = now_us + EVENT_INTERVAL_US
        if device not in self._reported and len(self._reported) < EVENT_DEVICES_MAX:
            self._reported.add(device)
            self._report(device, {"reason": reason, "told": told, "received": received})


class Ticking(NamedTuple):
    """The owner of a tick."""

    device: str
    stream: str
    """The topic. A sensor may count its sequences for each topic."""
    oscillator: Oscillator
    least_delay_us: int


class Arrivals:
    """Readings of one boot of a sensor that came in at once, and so get their times at once."""

    __slots__ = ("boot", "data", "of", "received_us", "series")

    def __init__(self, of: Ticking, boot: str, received_us: int, series: Series) -> None:
        self.of = of
        self.boot = boot
        self.received_us = received_us
        self.series = series
        self.data: list[Datum] = []
        """Without a time."""


class IntakeTimes:
    """Puts times into rows."""

    def __init__(  # noqa: PLR0913, PLR0917 - the sources of times, and who is told of them
        self,
        clocks: DeviceClocks,
        new_clocks: NewClocks,
        heard: DevicesHeard,
        limits: TimeLimits,
        clock: Callable[[], BootClock],
        now_us: Callable[[], int],
        count: Callable[[str, str], None],
        report: Callable[[str, dict[str, object]], None],
    ) -> None:
        """`count` takes a count's name and a device. `report` takes a device and the body of its event."""
        self._clocks = clocks
        self._new_clocks = new_clocks
        self._heard = heard
        self._limits = limits
        self._clock = clock
        self._now_us = now_us
        self._count = count
        self._implausible = ImplausibleTimes(report)

    def stamp(self, arrivals: Arrivals) -> None:
        """Put times into the rows of readings that came in together, and learn their sensor's clock from them.

        A reading that a broker or its sensor had kept teaches nothing wrong: it was taken before it came.
        """
        of, data, received_us = arrivals.of, arrivals.data, arrivals.received_us
        clock = self._clocks.of(of.device, arrivals.boot, of.oscillator, of.stream)
        clock.least_delay_us = of.least_delay_us
        stamps = clock.stamps(received_us, map(_sample, data))
        without = 0
        for datum, stamp in zip(data, stamps, strict=True):
            if stamp is None:
                without += 1
            else:
                datum.event_us, datum.event_error_us = stamp
                # The tick has done its work, and is in the payload too: each byte costs the card.
                datum.tick_ms = None
        if without:
            self._new_clocks.met(arrivals.series, arrivals.boot, received_us, without)

    def estimate(self, of: Ticking, boot: str, tick_ms: int, received_us: int) -> tuple[int, int] | None:
        """Time, and its bound, of a reading that came in some time ago. Nothing is learnt from it."""
        clock = self._clocks.find(of.device, boot, of.stream)
        return None if clock is None else clock.estimate(tick_ms, received_us)

    def with_told_time(self, entry: Entry, reading: Reading, tell_time: Reader, error_us: int) -> Entry:
        """The row of a reading without a tick, with the time in its payload, to `error_us`."""
        try:
            told = tell_time(reading.datum.payload, reading.user)
        except NothingToldError:
            if not reading.is_serial:
                self._count("time-missing", entry.series.device)
            return entry
        return entry if told is None else self._with_time(entry, told, error_us)

    def _with_time(self, entry: Entry, told: Told, error_us: int) -> Entry:
        """Put a payload's time into a row.

        A relative time is relative to the receipt, and not believed if it is too far from it. An absolute time is kept,
        whatever it is. It is judged when the record is made, by what is then known of the gateway's clock.
        """
        datum = entry.datum
        if told.is_relative:
            if told.us > self._limits.ahead_us:
                wrong: Implausible | None = "ahead"
            else:
                wrong = "behind" if told.us < -self._limits.behind_us else None
            if wrong is not None:
                self._met(entry, ToldDate(wrong, f"{told.us / 1e6:+f} s", told.us, datum.received_us))
                return entry
            datum.event_us = datum.received_us + min(told.us, 0)
            datum.event_error_us += error_us
            return entry
        datum.device_time_us = told.us
        datum.event_error_us += error_us
        clock = self._clock().around(datum.received_us)
        wrong = implausible(told.us, datum.event_error_us, datum.received_us, clock, self._limits)
        if wrong is not None:
            off_us = None if clock.error_us is None else told.us - clock.at(datum.received_us)
            self._met(entry, ToldDate(wrong, rfc3339(told.us).decode(), off_us, datum.received_us))
        return self.with_earliest(entry)

    def with_earliest(self, entry: Entry) -> Entry:
        """The row with the earliest event time that its sensor's absolute time can give: see `Entry.earliest_us`."""
        datum = entry.datum
        if datum.device_time_us is None:
            return entry
        clock = self._clock().around(datum.received_us)
        # Whatever is learnt of the clock, no record has an earlier time.
        earliest_us = datum.received_us - self._limits.behind_us - datum.event_error_us
        if clock.error_us is not None:
            told_us = datum.device_time_us - clock.offset_us
            # A tick beside the time means that nothing is known of the receipt.
            earliest_us = (told_us if datum.tick_ms is not None else max(earliest_us, told_us)) - clock.error_us
        entry.earliest_us = min(earliest_us, datum.received_us)
        return entry

    def _met(self, entry: Entry, date: ToldDate) -> None:
        """Record that a sensor sent a time that cannot be right."""
        device = entry.series.device
        self._count(f"device-time-{date.reason}", device)
        self._heard.told_odd_date(device, entry.datum.device_boot, date)
        clock = self._clock()
        received = rfc3339(clock.at(entry.datum.received_us)).decode() if clock.synced else None
        self._implausible.met(date.reason, device, date.told, received, self._now_us())
