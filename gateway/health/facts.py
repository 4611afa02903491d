"""Facts that conditions are made of: from the parts of the daemon, or from its answer to `state`. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Required, TypedDict, get_type_hints

import msgspec
from msgspec import Struct, field

from gateway.buffer.losses import OWN_LOSSES
from gateway.buffer.shares import AboveShare
from gateway.buffer.state import BufferState
from gateway.buffer.status import BufferStatus
from gateway.clock.report import ClockView
from gateway.config.running_settings import as_whom, digest, running_settings
from gateway.host.disk_health import Trouble
from gateway.host.fleet_report import FleetReport
from gateway.host.last_update import LastUpdate
from gateway.settings import Settings
from gateway.uplink.state import UplinkState


class Silent(Struct, frozen=True):
    """A device that was heard before, and is silent now."""

    device: str
    silent_s: float
    usually_s: float = 0.0
    """Its longest pause before, in seconds; 0 if unknown."""


class Facts(Struct, frozen=True):
    """All that the headline and the conditions are made of, at about one moment.

    The default of a fact means that it is not known, and that nothing is wrong with it.
    """

    settings: Settings
    boottime_us: int
    wall_s: float
    """This box's clock in seconds since 1970, right or not."""
    up_s: float = 0.0
    """Seconds since the gateway started."""
    rows: int = 0
    bytes_used: int = 0
    full: bool = False
    failing: str | None = None
    """SQLite's words while commits fail."""
    uplink: UplinkState = field(default_factory=lambda: UplinkState(up=True))
    clock: ClockView = ClockView(synced=True)
    buffer_status: BufferStatus | None = None
    """Contents of the file; None if it could not be read."""
    room_bytes: int | None = None
    hours_until_full: float | None = None
    disk_bytes_per_day: float | None = None
    card_days: float | None = None
    """Days that a plain memory card lasts at that rate."""
    disk_troubles: tuple[Trouble, ...] = ()
    """Troubles that the disk, or its file system, reports."""
    disk_free_bytes: int | None = None
    disk_bytes: int | None = None
    """Size of the file system."""
    life_used_tenths: int | None = None
    """Tenths of the disk's life that are used, if it tells them."""
    lost: int = 0
    """Readings gone for good: since the start, and earlier ones that were not reported."""
    lost_s: float | None = None
    """Seconds since the last loss; None if there was none."""
    logins: dict[str, Any] = {}
    """State of the devices' file, as the MQTT listener knows it."""
    settings_change: str | None = None
    """None if the file has the settings that the gateway was started with. Else words for the name by which it goes on
    (`as_whom`); empty if the name is not another one, or is not known."""
    refused: Sequence[dict[str, Any]] = ()
    """Refused log-ins and the reasons (`Refusals.lately`), the newest first."""
    counts: dict[str, int] = {}
    counted_last: dict[str, str] = {}
    """By count: the device that it counted last."""
    serial: dict[str, Any] = {}
    commands: dict[str, Any] = {}
    """Commands from the cloud; empty if none are read."""
    brokers: dict[str, Any] = {}
    devices: int = 0
    heard: int = 0
    """Devices heard since the start and not silent."""
    silent: tuple[Silent, ...] = ()
    """Longest first."""
    missing: tuple[tuple[str, int], ...] = ()
    """Devices with missing sequence numbers, and the least number of these: most first."""
    findings: tuple[tuple[str, str], ...] = ()
    """Devices with something to mend, and the words on it."""
    above_share: Sequence[AboveShare] = ()
    """Some of the devices that were kept to their share of the buffer in the last minute, by what they hold."""
    above_share_devices: int = 0
    """Number of all such devices."""
    update: LastUpdate | None = None
    """Last update of the box's image; None if there was none."""
    refused_update: LastUpdate | None = None
    """Update on the stick that is plugged in, if it was refused."""
    fleet: FleetReport | None = None
    """How this box stands to the fleet's file; None if it looks at none."""
    unknown: frozenset[str] = frozenset()
    """Members of the daemon's answer that cannot be read, such as `serial` and `uplink.sent`. Also `uplink`, `clock`
    and `devices` if it has nothing of them."""

    @property
    def since_s(self) -> float | None:
        """Seconds for which the uplink is as it is; None if this box's clock was set in between."""
        if not self.uplink.since:
            return None
        ago_s = self.wall_s - self.uplink.since
        return ago_s if -60 <= ago_s <= self.up_s + 60 else None


class _Unit(TypedDict, total=False):
    """A unit on a line of Modbus."""

    answers: Required[bool]
    fault: Required[str | None]
    since_us: int | None
    asked: int
    refused: dict[str, str]


class _RefusedLine(TypedDict):
    reason: str
    line: str


class _Port(TypedDict, total=False):
    """An open serial port."""

    kind: str | None
    device: str | None
    acknowledges: bool
    used_s: float | None
    trouble: str | None
    rivals: str | None
    shared: str | None
    refused: int
    refused_last: _RefusedLine | None
    noisy: int
    units: dict[str, _Unit]


class _GonePort(TypedDict):
    gone_s: float
    devices: list[str]


class _Serial(TypedDict, total=False):
    """The serial ports."""

    ports: dict[str, _Port]
    unopened: dict[str, str]
    missing: list[str]
    awaited: dict[str, str]
    gone: dict[str, _GonePort]


class _Commands(TypedDict):
    """Commands from the cloud."""

    topic: str
    waiting: int
    counts: dict[str, int]
    error: str | None


class _Broker(TypedDict):
    """A broker of the site."""

    connected: bool
    refused: list[str]


class _LogIns(TypedDict, total=False):
    """The devices' file."""

    trouble: str | None
    kept: bool


class _RefusedLogIn(TypedDict):
    user: str | None
    address: str
    why: str
    ago_s: float


class _Fault(TypedDict):
    """The last payload of a device that was not as declared."""

    device: str
    cause: str
    readings: int


class State(Struct, frozen=True):
    """Members of the daemon's answer to `state` (`gateway.daemon.control`), but for those with a type of their own.

    A member that is wrong anywhere is wrong as a whole: a part of it could be taken for all.
    """

    up_s: float = 0.0
    counts: dict[str, int] = {}
    counted_last: dict[str, str] = {}
    payload_faults: dict[str, list[_Fault]] = {}
    lost_told: int = 0
    lost_told_us: int = 0
    logins: _LogIns = {}
    log_ins_refused: list[_RefusedLogIn] = []
    mqtt_listener: dict[str, int] = {}
    mqtt_brokers: dict[str, _Broker] = {}
    serial: _Serial = {}
    commands: _Commands | None = None


_PARTS: Mapping[str, tuple[type, str]] = {
    "buffer": (BufferState, ""),
    "uplink": (UplinkState, "up"),
    "clock": (ClockView, "synced"),
}
"""Members of the answer that have a type of their own, and the member of each without which nothing is known of it."""


def read_state(answer: Mapping[str, Any]) -> State:
    """Read the members of an answer that can be read; the others have their defaults."""
    return State(**_readable(answer, State))


def told_facts(
    settings: Settings,
    answer: Mapping[str, Any],
    boottime_us: int,
    wall_s: float,
    found: BufferStatus | None = None,
    **more: Any,
) -> Facts:
    """Facts of the daemon's answer to `state`, of the buffer's file, and `more` that the caller knows."""
    state = read_state(answer)
    buffer, uplink, clock = (_readable(answer.get(part), kind) for part, (kind, _) in _PARTS.items())
    lost, lost_us = state.lost_told, state.lost_told_us
    if found is not None:
        buffer |= {"rows": found.rows, "bytes_used": found.bytes_used}
        lost += sum(count for reason, count in found.losses.items() if reason not in OWN_LOSSES)
        lost_us = max(lost_us, found.lost_us)
    told: dict[str, Any] = {
        "up_s": state.up_s,
        "full": buffer.get("bytes_used", 0) >= settings.buffer.bytes_max,
        **{name: value for name, value in buffer.items() if name in Facts.__struct_fields__},
        "buffer_status": found,
        "lost": lost,
        "lost_s": max(0.0, (boottime_us - lost_us) / 1e6) if lost_us else None,
        "logins": state.logins,
        "refused": state.log_ins_refused,
        "counts": state.counts,
        "counted_last": state.counted_last,
        "serial": state.serial,
        "commands": state.commands or {},
        "brokers": state.mqtt_brokers,
    }
    unknown = frozenset(_unknown(answer))
    if "uplink" not in unknown:
        told["uplink"] = UplinkState(**uplink)
    if "clock" not in unknown:
        told["clock"] = ClockView(**clock)
    running = running_settings(answer)
    if running is not None and running.digest != digest(settings):
        told["settings_change"] = as_whom(running, settings)
    return Facts(settings, boottime_us, wall_s, unknown=unknown, **told | more)


def _unknown(answer: Mapping[str, Any]) -> Iterator[str]:
    """Members of an answer that cannot be read, and those of its parts; also a part without which it makes no sense."""
    yield from _unread(answer, State)
    if "settings" in answer and running_settings(answer) is None:
        yield "settings"
    for part, (kind, needed) in _PARTS.items():
        told = answer.get(part)
        is_known = needed in _readable(told, kind) if needed else part not in answer or isinstance(told, Mapping)
        yield from (f"{part}.{name}" for name in _unread(told, kind)) if is_known else (part,)


def _unread(part: object, kind: type) -> set[str]:
    told = part.keys() if isinstance(part, Mapping) else set[str]()
    return (get_type_hints(kind).keys() & told) - _readable(part, kind).keys()


def _readable(part: object, kind: type) -> dict[str, Any]:
    """Members of a part of the answer that can be read, each by itself: a daemon of another version says other ones."""
    if not isinstance(part, Mapping):
        return {}
    members = {}
    for name, hint in get_type_hints(kind).items():
        with suppress(msgspec.ValidationError, KeyError):
            members[name] = msgspec.convert(part[name], hint)
    return members
