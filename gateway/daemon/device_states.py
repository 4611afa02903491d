"""Tells the control socket what the running gateway knows of each device: when and where heard, and its clock."""

import heapq
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gateway.clock.oscillators import Kind
from gateway.clock.sensor_clocks import DeviceClocks, Run
from gateway.host.long_work import LongWork
from gateway.intake.devices_heard import DevicesHeard, FaultKind, PayloadFault, Tells, ToldDate

PAGE_MAX = 500
"""Devices in one answer."""
_NOTHING: Mapping[str, int] = MappingProxyType({})


class ClockState(Struct, frozen=True):
    """A sensor's clock at one moment."""

    stream: str
    """Topic whose samples have this clock; empty if the device numbers all its samples together."""
    boot: str
    """The sensor's boot."""
    kind: Kind
    """Oscillator that the settings declare."""
    paced_by: Kind
    """Oscillator that the observations show."""
    drift_ppm: tuple[float, float] | None
    """Least and greatest drift, in parts per million."""
    error_us: int | None
    """Bound of a reading that is taken now."""
    observed_us: int | None
    """CLOCK_BOOTTIME of the last answered probe, or of the last arrival that told something."""
    has_jumped: bool
    """Whether its tick contradicts the earlier observations, and nothing has confirmed that yet."""

    @classmethod
    def of(cls, run: Run, now_us: int) -> "ClockState":
        clock = run.clock
        return cls(
            run.stream,
            run.boot,
            clock.kind,
            clock.fit.paced_by,
            clock.fit.drift_ppm,
            clock.fit.error_us_at(now_us),
            clock.fit.observed_us,
            clock.fit.has_jumped,
        )


class HeardState(Struct, frozen=True):
    """A device's readings of its present boot, since the gateway started. Times are CLOCK_BOOTTIME."""

    subject: str
    """The MQTT topic, or the serial port."""
    is_serial: bool
    boot: str | None
    tells: Tells
    """Way in which the last reading tells when it was taken."""
    readings: int
    since_us: int
    received_us: int
    # A daemon of an earlier version does not send the following fields.
    paces: tuple[float, ...] = ()
    """Ticks per millisecond over the last two stretches of a minute or more; none if not known yet."""
    tick_restarts: int = 0
    """Times that the tick began anew although the boot did not change."""
    short_boots: int = 0
    """Boots in a row before the present one that ended within a minute."""
    short_since_us: int = 0
    """Start of the first of these boots."""
    unreadable_us: int | None = None
    """Arrival of the last reading whose tick could not be read."""
    odd_date: ToldDate | None = None
    """The last time that the device told and that could not be right."""
    faults: dict[FaultKind, PayloadFault] | None = None
    """The last payload of each kind that was not what its route declares."""
    missing: int | None = None
    """Least number of readings that did not come, by their sequences; None if these do not tell."""
    longest_pause_us: int = 0
    """Longest pause between two readings, of this boot and of those before."""


class DeviceState(Struct, frozen=True):
    """A device as the running gateway has it in memory."""

    device: str
    heard: HeardState | None = None
    """None if no reading came since the start."""
    clocks: tuple[ClockState, ...] = ()
    """Clocks of its newest boot; the last one was used last."""
    lost: int = 0
    """Readings that were reported as lost for good since the start."""


class DevicesPage(Struct, frozen=True):
    """Some of the devices, in the order of their names."""

    devices: list[DeviceState]
    is_last: bool


class DevicesAsked(Struct, frozen=True, forbid_unknown_fields=True):
    """A request for a page."""

    after: str = ""
    """Name that the page's devices follow."""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_MAX


async def devices_page(
    asked: DevicesAsked, heard: DevicesHeard, clocks: DeviceClocks, now_us: int, lost: Mapping[str, int] = _NOTHING
) -> DevicesPage:
    """Return the next devices, as they are at CLOCK_BOOTTIME `now_us`. `lost` counts readings by device."""
    runs: dict[str, list[Run]] = {}
    for run in clocks.newest_runs():
        if run.device > asked.after:
            runs.setdefault(run.device, []).append(run)
    names = heapq.nsmallest(asked.limit + 1, runs.keys() | {name for name in heard if name > asked.after})
    states = []
    work = LongWork()
    for name in names[: asked.limit]:
        # To decode a restored clock takes half a millisecond.
        await work.step()
        of = heard.get(name)
        states.append(
            DeviceState(
                name,
                None if of is None else msgspec.convert(of, HeardState, from_attributes=True),
                tuple(ClockState.of(run, now_us) for run in runs.get(name, ())),
                lost.get(name, 0),
            )
        )
    return DevicesPage(states, len(names) <= asked.limit)
