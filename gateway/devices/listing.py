"""`sluice devices`: all devices that a gateway knows, from its buffer file and, where it runs, from its memory."""

import math
import sqlite3
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from gateway.buffer.schema import read_marks
from gateway.buffer.status import DeviceStatus, Now, is_running, open_to_read, read_status, this_moment
from gateway.clock.oscillators import Kind
from gateway.clock.sensor_clocks import SENSOR_CLOCK_MARKS, saved_run
from gateway.daemon import control
from gateway.daemon.device_states import ClockState, DevicesPage, DeviceState, HeardState
from gateway.devices.notes import NO_LOG_IN, RESTARTED, Note, note_on, note_on_clocks
from gateway.intake.escaped_names import original_device
from gateway.listener.credentials import CredentialsError, file_of, load
from gateway.settings import Settings

NAMED_MAX = 5
"""Devices that are named of those that were not heard yet."""
SILENT_S_MIN = 60.0
SILENT_PAUSES = 3
SILENT_INTERVALS = 5
UNHEARD_S = 600.0
"""So long after the start, a device that the buffer knows and that was not heard yet is silent."""
FORGOTTEN_S = 604_800.0
"""A device that was silent for a week is no news any more."""


class Clock(Struct, frozen=True):
    """What is known of a sensor's clock."""

    stream: str
    """Empty where the device counts its samples through; else the topic whose samples have this clock."""
    boot: str
    """The sensor's."""
    oscillator: Kind
    """What the settings say that paces it."""
    paced_by: Kind
    """What its observations show: worse than that, perhaps."""
    drift_ppm: tuple[float, float] | None
    """How fast it runs, at least and at most: parts per million above true, to tenths."""
    error_us: int | None
    """The bound of a reading that is taken now, without what the gateway's own clock adds."""
    observed_s: float | None
    """How long ago it was observed last: an answer to a PROBE, or an arrival that told something."""


class Device(Struct, frozen=True):
    """One device that this gateway knows."""

    device: str
    place: str | None
    """The MQTT topic or the serial port that it was heard on last; None where that is not known."""
    is_serial: bool | None
    heard_s: float | None
    """How long ago something of it was taken in; None where nothing tells."""
    boot: str | None
    """The sensor's, as it was heard last."""
    clocks: tuple[Clock, ...]
    note: str | None
    """Why there is no clock, or what is wrong with it."""
    finding: bool
    """Whether that is something to be mended."""
    no_log_in: bool = False
    """Whether it is a sensor over MQTT that could not log in now: revoked, mostly."""
    original: str | None = None
    """What its sensor or the site's broker calls it, where a route has escaped that (`names = "escape"`)."""


class Listing(NamedTuple):
    """All devices, by name, and how they were found."""

    devices: list[Device]
    running: bool
    unheard: str
    """Why a daemon that runs did not answer; empty where it did."""
    states: tuple[DeviceState, ...] = ()
    """As the daemon told them; none where it did not."""
    not_heard: tuple[str, ...] = ()
    """Who may log in, and was not heard yet; none where no daemon tells whom it heard."""


class Place(NamedTuple):
    """Where a device is heard."""

    name: str | None
    """None where it was one of several, and nothing tells which came last."""
    is_serial: bool | None
    heard_s: float | None = None
    """How long ago something usable came; None where nothing tells."""
    has_probes: bool = False
    """Whether our frames are spoken there."""


def read_devices(settings: Settings) -> Listing:
    """Ask the file and the daemon. Raises BufferFileError where the file cannot be read."""
    path = settings.buffer.path
    found = read_status(path).devices
    states: list[DeviceState] | None = None
    ports: dict[str, Place] = {}
    unheard = ""
    running = is_running(path)
    if running:
        try:
            states = list(_ask_daemon(path))
            ports = places_on_ports(control.call(control.socket_path(path), "state").get("serial") or {})
        except control.ControlError as error:
            states, unheard = None, str(error)
    now = this_moment(settings.gateway)
    with open_to_read(path) as connection:
        places = _places(connection) | ports
        if states is None:
            # What it has in memory is newer than what is kept of it.
            saved, restarted = states_from_marks(read_marks(connection, SENSOR_CLOCK_MARKS), now)
        else:
            saved, restarted = states, frozenset[str]()
    devices = list(
        merged(found, saved, places, restarted, now, in_memory=states is not None, log_ins=log_ins(settings))
    )
    known = {device.device for device in devices}
    not_heard = () if states is None else tuple(sorted(may_log_in(settings) - known))
    return Listing(devices, running, unheard, tuple(states or ()), not_heard)


def _ask_daemon(path: Path) -> Iterator[DeviceState]:
    after = ""
    while True:
        page = msgspec.convert(control.call(control.socket_path(path), "devices", after=after), DevicesPage)
        yield from page.devices
        if page.is_last or not page.devices:
            return
        after = page.devices[-1].device


def _places(connection: sqlite3.Connection) -> dict[str, Place]:
    """Where devices were heard whose readings wait, or waited not long ago."""
    places: dict[str, Place] = {}
    for device, subject, stream in connection.execute(
        "SELECT device, subject, stream FROM series WHERE type = 'sluice.reading' AND device <> ''"
    ):
        place = Place(subject, stream is not None and stream != subject)
        before = places.setdefault(device, place)
        if before.name != subject:
            places[device] = Place(None, place.is_serial if place.is_serial == before.is_serial else None)
    return places


def log_ins(settings: Settings) -> frozenset[str] | None:
    """Devices that could log in at the MQTT listener; None where sensors come in otherwise too, or nothing tells."""
    listener = settings.mqtt_listener
    if listener is None or listener.anonymous or settings.mqtt_brokers:
        return None
    path = file_of(settings)
    certified = listener.tls is not None and listener.tls.client_ca is not None
    if certified and not listener.users and not path.exists():
        return None
    try:
        return frozenset(listener.users) | frozenset(load(path).devices)
    except CredentialsError:
        return None


def may_log_in(settings: Settings) -> frozenset[str]:
    """Devices that have a secret for the MQTT listener, as far as that can be read."""
    if settings.mqtt_listener is None:
        return frozenset()
    try:
        return frozenset(settings.mqtt_listener.users) | frozenset(load(file_of(settings)).devices)
    except CredentialsError:
        return frozenset(settings.mqtt_listener.users)


def not_heard_words(names: Sequence[str]) -> str:
    """Who was not heard yet, for a person; not escaped."""
    more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
    return f"not heard yet: {', '.join(names[:NAMED_MAX])}{more}"


def places_on_ports(serial: Mapping[str, Any]) -> dict[str, Place]:
    """Who is on the serial ports, by device: from what `SerialIngress.state` tells."""
    places = {}
    for name, port in serial.get("ports", {}).items():
        for unit in port.get("units", {}):
            places[unit] = Place(name, is_serial=True)
        device = port.get("device")
        if device is not None:
            places[device] = Place(
                name, is_serial=True, heard_s=port.get("used_s"), has_probes=port.get("acknowledges", True)
            )
    return places


def states_from_marks(marks: Mapping[str, bytes], now: Now) -> tuple[list[DeviceState], frozenset[str]]:
    """What a gateway that is stopped had learnt; and the devices of which that is void, for the box was restarted."""
    clocks: dict[str, list[ClockState]] = {}
    restarted = set()
    for value in marks.values():
        saved = saved_run(value)
        if saved is None:
            continue
        gateway_boot, run = saved
        if gateway_boot == now.boot:
            clocks.setdefault(run.device, []).append(ClockState.of(run, now.boottime_us))
        else:
            restarted.add(run.device)
    return [DeviceState(name, clocks=tuple(of)) for name, of in clocks.items()], frozenset(restarted)


def merged(  # noqa: PLR0913 - each is another source
    stored: Iterable[DeviceStatus],
    states: Iterable[DeviceState],
    places: Mapping[str, Place],
    restarted: frozenset[str],
    now: Now,
    *,
    in_memory: bool,
    log_ins: Container[str] | None = None,
) -> Iterator[Device]:
    """Put together what the sources know, by name.

    `in_memory`: the states are of a gateway that runs; `log_ins`: who could log in, where that is to be judged.
    """
    by_name = {each.device: each for each in stored}
    states_by_name = {each.device: each for each in states}
    for name in sorted(by_name.keys() | states_by_name.keys() | places.keys() | restarted):
        before, state = by_name.get(name), states_by_name.get(name, DeviceState(name))
        heard, place = state.heard, places.get(name)
        if heard is not None and (place is None or not place.has_probes):
            place = Place(heard.subject, heard.is_serial)
        if in_memory:
            was_heard = before is not None and before.seen is not None
            has_probes = place is not None and place.has_probes
            note = note_on(heard, state.clocks, has_probes=has_probes, was_heard=was_heard)
        else:
            note = note_on_clocks(state.clocks) or (Note(RESTARTED) if name in restarted else None)
        # Of one that may be gone for good nothing else is to be mended.
        no_log_in = log_ins is not None and place is not None and place.is_serial is False and name not in log_ins
        if no_log_in:
            note = Note(NO_LOG_IN)
        boots = [heard.boot if heard is not None else None, *(clock.boot for clock in reversed(state.clocks))]
        yield Device(
            name,
            None if place is None else place.name,
            None if place is None else place.is_serial,
            _heard_s(heard, before, place, now),
            next(filter(None, boots), None if before is None else before.boot),
            tuple(_clock(clock, now) for clock in state.clocks),
            None if note is None else note.words,
            note is not None and note.is_finding,
            no_log_in,
            original_device(name),
        )


def _heard_s(heard: HeardState | None, before: DeviceStatus | None, place: Place | None, now: Now) -> float | None:
    ages = [
        None if heard is None else (now.boottime_us - heard.received_us) / 1e6,
        None if place is None else place.heard_s,
        None if before is None or before.seen is None else now.age_s(before.seen),
    ]
    known = [max(0.0, age) for age in ages if age is not None]
    return round(min(known), 1) if known else None


def _clock(state: ClockState, now: Now) -> Clock:
    observed_s = None if state.observed_us is None else round(max(0, now.boottime_us - state.observed_us) / 1e6, 1)
    return Clock(
        state.stream, state.boot, state.kind, state.paced_by, _rounded(state.drift_ppm), state.error_us, observed_s
    )


def _rounded(drift_ppm: tuple[float, float] | None) -> tuple[float, float] | None:
    """To tenths, outwards: what is possible stays within."""
    if drift_ppm is None:
        return None
    least, most = drift_ppm
    return math.floor(least * 10) / 10, math.ceil(most * 10) / 10


class Habit(Protocol):
    """What is known of a device since the gateway was started. Times are CLOCK_BOOTTIME in microseconds."""

    @property
    def readings(self) -> int:
        """Of its present boot, as are the next two."""

    @property
    def since_us(self) -> int:
        """When the first came in."""

    @property
    def received_us(self) -> int:
        """When the last came in."""

    @property
    def longest_pause_us(self) -> int:
        """The longest pause between two of them, and of those of boots before."""


def is_silent(heard_s: float | None, of: Habit | None, up_s: float | None) -> bool:
    """Whether a device that was heard so long ago should have been heard since.

    It should once it pauses for longer than `SILENT_S_MIN`, `SILENT_PAUSES` times its longest pause, and
    `SILENT_INTERVALS` of its readings. `of` is None where it was not heard since the start, `up_s` ago (None where
    nothing tells that).
    """
    if heard_s is None or heard_s > FORGOTTEN_S:
        return False
    if of is None:
        return up_s is not None and up_s > UNHEARD_S < heard_s
    mean_s = mean_interval_s(of)
    if mean_s is None:
        return False
    return heard_s > max(SILENT_S_MIN, SILENT_PAUSES * of.longest_pause_us / 1e6, SILENT_INTERVALS * mean_s)


def mean_interval_s(of: Habit) -> float | None:
    """Between two readings of its boot; None before the second."""
    return (of.received_us - of.since_us) / 1e6 / (of.readings - 1) if of.readings > 1 else None
