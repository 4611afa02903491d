"""Lists all devices that a gateway knows, from its buffer file and, if it runs, from its memory: `sluice devices`."""

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
from gateway.record_contract import READING_TYPE
from gateway.settings import Settings

NAMED_MAX = 5
"""Devices named of those that were not heard yet."""
SILENT_S_MIN = 60.0
SILENT_PAUSES = 3
SILENT_INTERVALS = 5
UNHEARD_S = 600.0
"""Seconds after start before a device that the buffer knows, and that was not heard yet, is silent."""
FORGOTTEN_S = 604_800.0
"""Seconds of silence after which a device is no news any more."""


class Clock(Struct, frozen=True):
    """A sensor's clock, as far as it is known."""

    stream: str
    """Topic whose samples have this clock; empty if the device numbers all its samples together."""
    boot: str
    """The sensor's boot."""
    oscillator: Kind
    """Oscillator that the settings declare."""
    paced_by: Kind
    """Oscillator that the observations show: perhaps a worse one."""
    drift_ppm: tuple[float, float] | None
    """Least and greatest drift: parts per million above true, to tenths."""
    error_us: int | None
    """Bound of a reading that is taken now, without what the gateway's own clock adds."""
    observed_s: float | None
    """Seconds since the last observation: an answer to a PROBE, or an arrival that told something."""


class Device(Struct, frozen=True):
    """One device that this gateway knows."""

    device: str
    place: str | None
    """MQTT topic or serial port where it was heard last; None if unknown."""
    is_serial: bool | None
    heard_s: float | None
    """Seconds since something of it was taken in; None if unknown."""
    boot: str | None
    """The sensor's boot, as it was heard last."""
    clocks: tuple[Clock, ...]
    note: str | None
    """Why there is no clock, or what is wrong with it."""
    finding: bool
    """Whether the note is something to mend."""
    no_log_in: bool = False
    """Whether it is a sensor over MQTT that could not log in now, mostly because it was revoked."""
    original: str | None = None
    """Its name for its sensor or the site's broker, if a route has escaped the name (`names = "escape"`)."""


class Listing(NamedTuple):
    """All devices, by name, and where they were found."""

    devices: list[Device]
    running: bool
    unheard: str
    """Why a running daemon did not answer; empty if it did."""
    states: tuple[DeviceState, ...] = ()
    """States that the daemon told; none if it did not answer."""
    not_heard: tuple[str, ...] = ()
    """Devices that may log in and were not heard yet; none if no daemon tells whom it heard."""


class Place(NamedTuple):
    """Place where a device is heard."""

    name: str | None
    """None if there were several places, and nothing tells which came last."""
    is_serial: bool | None
    heard_s: float | None = None
    """Seconds since something usable came; None if unknown."""
    has_probes: bool = False
    """Whether Sluice's own frames are spoken there."""


def read_devices(settings: Settings, timeout_s: float | None = None) -> Listing:
    """Ask the file and the daemon. Raises BufferFileError if the file cannot be read."""
    path = settings.buffer.path
    found = read_status(path).devices
    states: list[DeviceState] | None = None
    ports: dict[str, Place] = {}
    unheard = ""
    running = is_running(path)
    if running:
        socket = control.socket_path(path)
        try:
            states = list(_ask_daemon(socket, timeout_s))
            ports = places_on_ports(control.call(socket, "state", timeout_s).get("serial") or {})
        except control.ControlError as error:
            states, unheard = None, str(error)
        except msgspec.ValidationError:
            states, unheard = None, "the gateway that runs may be of another version than this command"
    now = this_moment(settings.gateway)
    with open_to_read(path) as connection:
        places = _places(connection) | ports
        if states is None:
            # A daemon's memory is newer than these marks of it.
            saved, restarted = states_from_marks(read_marks(connection, SENSOR_CLOCK_MARKS), now)
        else:
            saved, restarted = states, frozenset[str]()
    devices = list(
        merged(found, saved, places, restarted, now, in_memory=states is not None, log_ins=log_ins(settings))
    )
    known = {device.device for device in devices}
    not_heard = () if states is None else tuple(sorted(may_log_in(settings) - known))
    return Listing(devices, running, unheard, tuple(states or ()), not_heard)


def _ask_daemon(socket: Path, timeout_s: float | None) -> Iterator[DeviceState]:
    after = ""
    while True:
        page = msgspec.convert(control.call(socket, "devices", timeout_s, after=after), DevicesPage)
        yield from page.devices
        if page.is_last or not page.devices:
            return
        after = page.devices[-1].device


def _places(connection: sqlite3.Connection) -> dict[str, Place]:
    """Return the places of devices whose readings wait, or waited not long ago."""
    places: dict[str, Place] = {}
    for device, subject, stream in connection.execute(
        "SELECT device, subject, stream FROM series WHERE type = ? AND device <> ''", (READING_TYPE,)
    ):
        place = Place(subject, stream is not None and stream != subject)
        before = places.setdefault(device, place)
        if before.name != subject:
            places[device] = Place(None, place.is_serial if place.is_serial == before.is_serial else None)
    return places


def log_ins(settings: Settings) -> frozenset[str] | None:
    """Devices that could log in at the MQTT listener; None if sensors also come in otherwise, or if nothing tells."""
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
    """Devices that have a secret for the MQTT listener, as far as the secrets can be read."""
    if settings.mqtt_listener is None:
        return frozenset()
    try:
        return frozenset(settings.mqtt_listener.users) | frozenset(load(file_of(settings)).devices)
    except CredentialsError:
        return frozenset(settings.mqtt_listener.users)


def not_heard_words(names: Sequence[str]) -> str:
    """Name the devices that were not heard yet, for a person; not escaped."""
    more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
    return f"not heard yet: {', '.join(names[:NAMED_MAX])}{more}"


def places_on_ports(serial: Mapping[str, Any]) -> dict[str, Place]:
    """Return who is on the serial ports, by device, from what `SerialIngress.state` tells."""
    places = {}
    for name, port in (serial.get("ports") or {}).items():
        # A daemon of another version may say less of a port.
        told = port or {}
        for unit in told.get("units") or ():
            places[unit] = Place(name, is_serial=True)
        device = told.get("device")
        if device is not None:
            probes = told.get("acknowledges") is not False
            places[device] = Place(name, is_serial=True, heard_s=told.get("used_s"), has_probes=probes)
    return places


def states_from_marks(marks: Mapping[str, bytes], now: Now) -> tuple[list[DeviceState], frozenset[str]]:
    """Return what a stopped gateway had learnt, and the devices for which a restart of the box has voided this."""
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

    `in_memory`: the states are of a running gateway. `log_ins`: who could log in, or None if that is not judged.
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
        # If a device may be gone for good, nothing else of it needs mending.
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
    """Round to tenths, outwards: what is possible stays within."""
    if drift_ppm is None:
        return None
    least, most = drift_ppm
    return math.floor(least * 10) / 10, math.ceil(most * 10) / 10


class Habit(Protocol):
    """A device's readings since the gateway started. Times are CLOCK_BOOTTIME in microseconds."""

    @property
    def readings(self) -> int:
        """Readings of its present boot."""

    @property
    def since_us(self) -> int:
        """Arrival of the first of these readings."""

    @property
    def received_us(self) -> int:
        """Arrival of the last of these readings."""

    @property
    def longest_pause_us(self) -> int:
        """Longest pause between two readings, of this boot and of those before."""


def is_silent(heard_s: float | None, of: Habit | None, up_s: float | None) -> bool:
    """Whether a device, heard `heard_s` ago, should have been heard since.

    It should once its pause is longer than `SILENT_S_MIN`, than `SILENT_PAUSES` times its longest pause, and than
    `SILENT_INTERVALS` times its mean interval. `of` is None if it was not heard since the start, `up_s` ago (None if
    unknown).
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
    """Mean seconds between two readings of its boot; None before the second."""
    return (of.received_us - of.since_us) / 1e6 / (of.readings - 1) if of.readings > 1 else None
