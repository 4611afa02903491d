"""Facts that conditions are made of: from the parts of the daemon, or from its answer to `state`. No I/O."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct, field

from gateway.buffer.losses import OWN_LOSSES
from gateway.buffer.shares import AboveShare
from gateway.buffer.state import BufferState
from gateway.buffer.status import BufferStatus
from gateway.clock.report import ClockView
from gateway.config.running_settings import as_whom, digest, running_settings
from gateway.host.disk_health import Trouble
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
    lost: int = 0
    """Readings gone for good: since the start, and earlier ones that were not reported."""
    lost_s: float | None = None
    """Seconds since the last loss; None if there was none."""
    logins: dict[str, Any] = {}
    """State of the devices' file, as the MQTT listener knows it."""
    settings_changed: bool = False
    """Whether the file's settings differ from those that the gateway was started with."""
    goes_on_as: str = ""
    """Words for the name by which it goes on then (`as_whom`); empty if that did not change, or is not known."""
    refused: Sequence[dict[str, Any]] = ()
    """Refused log-ins and the reasons (`Refusals.lately`), the newest first."""
    counts: dict[str, int] = {}
    counted_last: dict[str, str] = {}
    """By count: the device that it counted last."""
    serial: dict[str, Any] = {}
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
    unknown: frozenset[str] = frozenset()
    """Those of `uplink`, `clock` and `devices` that the daemon's answer lacks, or has in a form that cannot be read."""

    @property
    def since_s(self) -> float | None:
        """Seconds for which the uplink is as it is; None if this box's clock was set in between."""
        if not self.uplink.since:
            return None
        ago_s = self.wall_s - self.uplink.since
        return ago_s if -60 <= ago_s <= self.up_s + 60 else None


class _State(Struct, frozen=True):
    """Members of the daemon's answer to `state` (`gateway.daemon.control`) that have no members of their own."""

    up_s: float = 0.0
    counts: dict[str, int] = {}
    counted_last: dict[str, str] = {}
    lost_told: int = 0
    lost_told_us: int = 0
    logins: dict[str, Any] = {}
    log_ins_refused: list[dict[str, Any]] = []
    mqtt_brokers: dict[str, Any] = {}
    serial: dict[str, Any] = {}


def told_facts(
    settings: Settings,
    answer: Mapping[str, Any],
    boottime_us: int,
    wall_s: float,
    found: BufferStatus | None = None,
    **more: Any,
) -> Facts:
    """Facts of the daemon's answer to `state`, of the buffer's file, and `more` that the caller knows."""
    state = _State(**_readable(answer, _State))
    buffer, uplink, clock = (
        _readable(answer.get(part), kind)
        for part, kind in (("buffer", BufferState), ("uplink", UplinkState), ("clock", ClockView))
    )
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
        "brokers": state.mqtt_brokers,
    }
    unknown = set()
    if "up" in uplink:
        told["uplink"] = UplinkState(**uplink)
    else:
        unknown.add("uplink")
    if "synced" in clock:
        told["clock"] = ClockView(**clock)
    else:
        unknown.add("clock")
    running = running_settings(answer)
    if running is not None and running.digest != digest(settings):
        told |= {"settings_changed": True, "goes_on_as": as_whom(running, settings)}
    return Facts(settings, boottime_us, wall_s, unknown=frozenset(unknown), **told | more)


def _readable(part: object, kind: type) -> dict[str, Any]:
    """Members of a part of the answer that can be read, each by itself: a daemon of another version says other ones."""
    if not isinstance(part, Mapping):
        return {}
    members = {}
    for name, hint in get_type_hints(kind).items():
        with suppress(msgspec.ValidationError, KeyError):
            members[name] = msgspec.convert(part[name], hint)
    return members
