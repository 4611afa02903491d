"""What the running gateway knows of each device, by name, for the control socket: heard when and where, its clock."""

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
    """Empty where the device counts its samples through; else the topic whose samples have this clock."""
    boot: str
    """The sensor's."""
    kind: Kind
    """What is said to pace it."""
    paced_by: Kind
    """What its observations show."""
    drift_ppm: tuple[float, float] | None
    """How fast it runs, at least and at most."""
    error_us: int | None
    """The bound of a reading that is taken now."""
    observed_us: int | None
    """CLOCK_BOOTTIME of the last probe that was answered, or of the last arrival that told something."""
    has_jumped: bool
    """Its tick is not what it was to be, and nothing has confirmed that yet."""

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
    """A device's readings since the gateway was started; of its present boot. Times are CLOCK_BOOTTIME."""

    subject: str
    """The MQTT topic, or the serial port."""
    is_serial: bool
    boot: str | None
    tells: Tells
    """What the last one says of when it was taken."""
    readings: int
    since_us: int
    received_us: int
    # What follows a daemon of an earlier version does not say.
    paces: tuple[float, ...] = ()
    """Ticks per millisecond over the last two stretches of a minute and more; none where that is not known yet."""
    tick_restarts: int = 0
    """How often the tick began anew although the boot did not change."""
    short_boots: int = 0
    """Boots before the present one, in a row, that were over within a minute."""
    short_since_us: int = 0
    """When the first of them began."""
    unreadable_us: int | None = None
    """When the last reading came that had a tick which is none."""
    odd_date: ToldDate | None = None
    """The last time that it told and that could not be right."""
    faults: dict[FaultKind, PayloadFault] | None = None
    """The last payload of each kind that was not what its route declares."""
    missing: int | None = None
    """Readings that did not come, at the least, by their sequences; None where these do not tell."""
    longest_pause_us: int = 0
    """The longest pause between two readings, of this boot and of those before."""


class DeviceState(Struct, frozen=True):
    """A device as the running gateway has it in memory."""

    device: str
    heard: HeardState | None = None
    """None where no reading came since the start."""
    clocks: tuple[ClockState, ...] = ()
    """Of its newest boot; the one that was used last at the end."""
    lost: int = 0
    """Readings that are gone for good, as far as that was reported since the start."""


class DevicesPage(Struct, frozen=True):
    """Some of the devices, in the order of their names."""

    devices: list[DeviceState]
    is_last: bool


class DevicesAsked(Struct, frozen=True, forbid_unknown_fields=True):
    """What a request for a page says."""

    after: str = ""
    """Devices whose names follow this one."""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_MAX


async def devices_page(
    asked: DevicesAsked, heard: DevicesHeard, clocks: DeviceClocks, now_us: int, lost: Mapping[str, int] = _NOTHING
) -> DevicesPage:
    """The next devices, as they are at CLOCK_BOOTTIME `now_us`; `lost` by device."""
    runs: dict[str, list[Run]] = {}
    for run in clocks.newest_runs():
        if run.device > asked.after:
            runs.setdefault(run.device, []).append(run)
    names = heapq.nsmallest(asked.limit + 1, runs.keys() | {name for name in heard if name > asked.after})
    states = []
    work = LongWork()
    for name in names[: asked.limit]:
        # A clock that was restored is looked into here, half a millisecond each.
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
