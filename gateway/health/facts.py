"""Facts that conditions are made of: from the parts of the daemon, or from its answer to `state`. No I/O."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct, field

from gateway.buffer.shares import AboveShare
from gateway.buffer.state import BufferState
from gateway.buffer.status import BufferStatus
from gateway.clock.report import ClockView
from gateway.config.running_settings import RunningSettings, digest
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
    clock: ClockView = ClockView(synced=True, error_us=None, since_us=0)
    found: BufferStatus | None = None
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

    @property
    def since_s(self) -> float | None:
        """Seconds for which the uplink is as it is; None if this box's clock was set in between."""
        if not self.uplink.since:
            return None
        ago_s = self.wall_s - self.uplink.since
        return ago_s if -60 <= ago_s <= self.up_s + 60 else None


class _State(Struct, frozen=True):
    """The daemon's answer to `state` (`gateway.daemon.control`). A daemon of another version may say less."""

    buffer: BufferState = field(default_factory=BufferState)
    uplink: UplinkState = field(default_factory=lambda: UplinkState(up=True))
    clock: ClockView = ClockView(synced=True, error_us=None, since_us=0)
    settings: RunningSettings | None = None
    up_s: float = 0.0
    counts: dict[str, int] = {}
    counted_last: dict[str, str] = {}
    lost_told: int = 0
    lost_told_us: int = 0
    logins: dict[str, Any] = {}
    log_ins_refused: list[dict[str, Any]] = []
    mqtt_brokers: dict[str, Any] = {}
    serial: dict[str, Any] = {}


def told_facts(settings: Settings, answer: Mapping[str, Any], boottime_us: int, wall_s: float, **more: Any) -> Facts:
    """Facts of the daemon's answer to `state`, and `more` that the caller knows."""
    state = _State()
    with suppress(msgspec.ValidationError):
        state = msgspec.convert({name: part for name, part in answer.items() if part is not None}, _State)
    told: dict[str, Any] = {
        "up_s": state.up_s,
        "rows": state.buffer.rows,
        "bytes_used": state.buffer.bytes_used,
        "full": state.buffer.full,
        "failing": state.buffer.failing,
        "above_share": state.buffer.above_share,
        "above_share_devices": state.buffer.above_share_devices,
        "uplink": state.uplink,
        "clock": state.clock,
        "lost": state.lost_told,
        "lost_s": (boottime_us - state.lost_told_us) / 1e6 if state.lost_told_us else None,
        "logins": state.logins,
        "refused": state.log_ins_refused,
        "counts": state.counts,
        "counted_last": state.counted_last,
        "serial": state.serial,
        "brokers": state.mqtt_brokers,
        "settings_changed": state.settings is not None and state.settings.digest != digest(settings),
    }
    return Facts(settings, boottime_us, wall_s, **told | more)
