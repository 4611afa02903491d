"""When a reading that comes in was taken: by its sensor's tick, or as its payload says."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from gateway.buffer.rows import Entry
from gateway.clock.gateway_clock import BootClock
from gateway.clock.rfc3339 import rfc3339
from gateway.clock.sensor_clock import Sample
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.clock.sensor_dates import Implausible, TimeLimits, implausible
from gateway.intake.devices_heard import ToldDate
from gateway.intake.payload_time import Told
from gateway.settings import Oscillator

LOG_INTERVAL_US = 60_000_000


EVENT_INTERVAL_US = 3_600_000_000


EVENT_DEVICES_MAX = 100
"""Devices that are told of in an hour; anybody may make up names where anonymous clients are let in."""


log = structlog.get_logger()


class ImplausibleTimes:
    """Logs once a minute at the most for each reason, and reports each device once an hour at the most."""

    def __init__(self, report: Callable[[str, dict[str, object]], None]) -> None:
        """`report` takes a device and what its event says."""
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
    """Whose tick it is."""

    device: str
    stream: str
    """The topic: a sensor may count its sequences for each."""
    oscillator: Oscillator
    least_delay_us: int


class Arrivals:
    """Readings of one boot of a sensor that came in at once: their times are made at once."""

    __slots__ = ("boot", "entries", "of", "received_us")

    def __init__(self, of: Ticking, boot: str, received_us: int) -> None:
        self.of = of
        self.boot = boot
        self.received_us = received_us
        self.entries: list[Entry] = []
        """Their rows, without a time."""


class IntakeTimes:
    """Puts times into rows."""

    def __init__(
        self,
        clocks: DeviceClocks,
        limits: TimeLimits,
        clock: Callable[[], BootClock],
        report: Callable[[str, dict[str, object]], None],
        note: Callable[[Entry, ToldDate], None],
    ) -> None:
        """`report` takes a device and what the event about its implausible times says; `note` takes each of these."""
        self._clocks = clocks
        self._limits = limits
        self._clock = clock
        self._note = note
        self._implausible = ImplausibleTimes(report)

    def stamps(
        self, of: Ticking, boot: str, received_us: int, samples: Iterable[Sample]
    ) -> list[tuple[int, int] | None]:
        """When readings were taken that came in just now, and the bounds of that; their sensor's clock is learnt.

        One that was kept somewhere (by a broker, or its sensor) teaches nothing wrong: it was taken before it came.
        """
        clock = self._clocks.of(of.device, boot, of.oscillator, of.stream)
        clock.least_delay_us = of.least_delay_us
        return clock.stamps(received_us, samples)

    def estimate(self, of: Ticking, boot: str, tick_ms: int, received_us: int) -> tuple[int, int] | None:
        """When a reading was taken that came in some time ago, and the bound of that: nothing is learnt from it."""
        clock = self._clocks.find(of.device, boot, of.stream)
        return None if clock is None else clock.estimate(tick_ms, received_us)

    def told(self, entry: Entry, told: Told, error_us: int, now_us: int) -> Entry:
        """The row of a reading whose payload says when it was taken, to `error_us`; `now_us` is CLOCK_BOOTTIME.

        What is relative is relative to the receipt, and not believed where it is too far from that. What is absolute is
        kept whatever it is: it is judged when the record is made, by what is known of the gateway's clock then.
        """
        if told.is_relative:
            if told.us > self._limits.ahead_us:
                wrong: Implausible | None = "ahead"
            else:
                wrong = "behind" if told.us < -self._limits.behind_us else None
            if wrong is not None:
                self._met(entry, ToldDate(wrong, f"{told.us / 1e6:+f} s", told.us, entry.received_us), now_us)
                return entry
            event_us = entry.received_us + min(told.us, 0)
            return replace(entry, event_us=event_us, event_error_us=entry.event_error_us + error_us)
        timed = self.with_earliest(
            replace(entry, device_time_us=told.us, event_error_us=entry.event_error_us + error_us)
        )
        clock = self._clock().around(entry.received_us)
        wrong = implausible(told.us, timed.event_error_us, entry.received_us, clock, self._limits)
        if wrong is not None:
            off_us = None if clock.error_us is None else told.us - clock.at(entry.received_us)
            self._met(entry, ToldDate(wrong, rfc3339(told.us).decode(), off_us, entry.received_us), now_us)
        return timed

    def with_earliest(self, entry: Entry) -> Entry:
        """The row with the earliest time that its sensor's absolute one may come to be: see `Entry.earliest_us`."""
        if entry.device_time_us is None:
            return entry
        clock = self._clock().around(entry.received_us)
        # Whatever is learnt of the clock, no record has an earlier time than this.
        earliest_us = entry.received_us - self._limits.behind_us - entry.event_error_us
        if clock.error_us is not None:
            told_us = entry.device_time_us - clock.offset_us
            # A tick beside it says that nothing is known of the receipt.
            earliest_us = (told_us if entry.tick_ms is not None else max(earliest_us, told_us)) - clock.error_us
        return replace(entry, earliest_us=min(earliest_us, entry.received_us))

    def _met(self, entry: Entry, date: ToldDate, now_us: int) -> None:
        self._note(entry, date)
        clock = self._clock()
        received = rfc3339(clock.at(entry.received_us)).decode() if clock.synced else None
        self._implausible.met(date.reason, entry.series.device, date.told, received, now_us)
