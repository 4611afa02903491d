"""Gathers the facts of a running gateway: from its parts, from the buffer's file, from the disk and of its devices.

The status page, its metrics and the event `state` tell of the facts that are gathered here.
"""

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from gateway.buffer.losses import OWN_LOSSES
from gateway.buffer.status import BufferStatus, open_to_read, read_status, this_moment
from gateway.buffer.wear import UsageHour, hours_until_full, last_day, room_bytes, write_budget
from gateway.clock.kernel_clock import boottime_us
from gateway.daemon.device_states import DevicesAsked, DeviceState, devices_page
from gateway.devices.listing import Device, is_silent, log_ins, may_log_in, merged, places_on_ports
from gateway.health.facts import Facts, Silent
from gateway.host import disk_health, fleet_report, last_update
from gateway.host.disk_health import Disk, Trouble
from gateway.host.fleet_report import FleetReport
from gateway.host.last_update import LastUpdate
from gateway.reading import BufferFileError

if TYPE_CHECKING:
    from gateway.buffer.buffer import Buffer
    from gateway.config.running_settings import SettingsFile
    from gateway.daemon.control import Parts
    from gateway.intake.front_door import FrontDoor
    from gateway.settings import Settings

AT_ONCE: Final = 50
"""Devices after which others on the event loop get their turn."""

_log = structlog.get_logger()


class OnDisk(Struct, frozen=True):
    """Contents of the buffer's file, and state of its disk."""

    buffer_status: BufferStatus | None = None
    lost: dict[str, int] = {}
    """Readings by device that are gone for good, and were not reported yet."""
    hours: list[UsageHour] = []
    unused_bytes: int = 0
    disk_free_bytes: int | None = None
    disk_bytes: int | None = None
    """Size of the file system."""
    disk: Disk | None = None
    troubles: tuple[Trouble, ...] = ()
    update: LastUpdate | None = None
    refused_update: LastUpdate | None = None
    fleet: FleetReport | None = None


class Row(Struct, frozen=True):
    """A device as the list has it."""

    device: Device
    silent: Silent | None

    @property
    def is_trouble(self) -> bool:
        """Whether it is listed first."""
        return self.silent is not None or self.device.finding


class Survey:
    """Gathers facts. Belongs to the event loop. `look` takes effort, and `facts` takes none."""

    def __init__(
        self,
        settings: "Settings",
        front_door: "FrontDoor",
        buffer: "Buffer",
        parts: "Parts",
        file: "SettingsFile | None" = None,
    ) -> None:
        self.settings = settings
        self.front_door = front_door
        self.buffer = buffer
        self.parts = parts
        self._file = file
        self._settings_change: str | None = None
        self._started_us = boottime_us()
        self.on_disk = OnDisk()
        self._log_ins: frozenset[str] | None = None
        self.may_log_in = frozenset[str]()
        self.lost: dict[str, int] = {}
        """Readings lost by device: since the start, and earlier ones that were not reported yet."""
        self._lost_sum = 0
        self.rows: list[Row] = []
        """Devices, those in trouble first."""

    async def look(self) -> None:
        """Bring up to date what `facts` cannot ask the running parts."""
        await self.look_at_the_file()
        await self.look_at_devices()

    async def look_at_the_file(self) -> None:
        """Read the buffer's file, the disk and the settings' file, on a thread."""
        # A loss that is reported meanwhile is missed until the next look, and not counted twice.
        lost = self.front_door.events.lost_told.copy()
        self.on_disk = await asyncio.to_thread(look_at_the_file, self.settings.buffer.path)
        self._log_ins = await asyncio.to_thread(log_ins, self.settings)
        self.may_log_in = await asyncio.to_thread(may_log_in, self.settings)
        if self._file is not None:
            self._settings_change = await asyncio.to_thread(self._file.change)
        lost.update(self.on_disk.lost)
        self.lost = dict(lost)
        self._lost_sum = max(self._lost_sum, lost.total())

    async def look_at_devices(self) -> None:
        """List the devices. It belongs to the event loop, and lets others have their turns."""
        states: list[DeviceState] = []
        is_last, after = False, ""
        while not is_last:
            page = await devices_page(DevicesAsked(after), self.front_door.heard, self.front_door.clocks, boottime_us())
            states += page.devices
            is_last = page.is_last or not page.devices
            after = page.devices[-1].device if page.devices else after
        found = self.on_disk.buffer_status
        places = places_on_ports(told(self.parts.serial))
        listed = merged(
            () if found is None else found.devices,
            states,
            places,
            frozenset(),
            this_moment(self.settings.gateway),
            in_memory=True,
            log_ins=self._log_ins,
        )
        rows: list[tuple[bool, list[tuple[bool, int, str]], Row]] = []
        for number, device in enumerate(listed):
            if device.device:
                row = Row(device, self._silent(device))
                rows.append((not row.is_trouble, natural_order(device.device), row))
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        rows.sort(key=itemgetter(0, 1))
        self.rows = [row for _, _, row in rows]

    def _silent(self, device: Device) -> Silent | None:
        of = self.front_door.heard.get(device.device)
        up_s = (boottime_us() - self._started_us) / 1e6
        if device.heard_s is None or device.no_log_in or not is_silent(device.heard_s, of, up_s):
            return None
        return Silent(device.device, device.heard_s, 0.0 if of is None else of.longest_pause_us / 1e6)

    def facts(self) -> Facts:
        """Return all that conditions are made of, as far as it is known now."""
        settings, parts = self.settings, self.parts
        on_disk, state = self.on_disk, self.buffer.state
        now_us = boottime_us()
        usage = self.buffer.usage
        day = last_day([UsageHour(usage.seconds, usage.readings, usage.stored_bytes, usage.disk_bytes), *on_disk.hours])
        room = None
        if on_disk.disk_free_bytes is not None:
            room = room_bytes(
                bytes_used=state.bytes_used,
                bytes_max=settings.buffer.bytes_max,
                unused_bytes=on_disk.unused_bytes,
                disk_free=on_disk.disk_free_bytes,
                disk_free_min=settings.buffer.free_bytes_min,
            )
        budget = write_budget(day)
        unreported_us = 0 if on_disk.buffer_status is None else on_disk.buffer_status.lost_us
        lost_us = max(unreported_us, self.front_door.events.lost_told_us)
        return Facts(
            settings=settings,
            up_s=(now_us - self._started_us) / 1e6,
            boottime_us=now_us,
            wall_s=time.time(),
            rows=state.rows,
            bytes_used=state.bytes_used,
            full=state.full,
            failing=state.failing,
            uplink=parts.uplink(),
            clock=parts.clock(),
            buffer_status=on_disk.buffer_status,
            room_bytes=room,
            hours_until_full=None if room is None else hours_until_full(room, day),
            disk_bytes_per_day=budget.disk_bytes_per_day,
            card_days=budget.card_days,
            disk_troubles=on_disk.troubles,
            disk_free_bytes=on_disk.disk_free_bytes,
            disk_bytes=on_disk.disk_bytes,
            life_used_tenths=None if on_disk.disk is None else on_disk.disk.life_used_tenths,
            lost=self._lost_sum,
            lost_s=max(0.0, (now_us - lost_us) / 1e6) if lost_us else None,
            logins=told(parts.logins),
            settings_change=self._settings_change,
            refused=() if parts.log_ins_refused is None else tuple(parts.log_ins_refused()),
            counts={**self.buffer.counts, **self.front_door.counts},
            counted_last=self.front_door.counted_last,
            serial=told(parts.serial),
            commands=told(parts.commands),
            brokers=told(parts.mqtt_brokers),
            devices=len(self.rows),
            heard=sum(
                row.silent is None and self.front_door.heard.get(row.device.device) is not None for row in self.rows
            ),
            silent=tuple(sorted((row.silent for row in self.rows if row.silent), key=lambda each: -each.silent_s)),
            missing=tuple(sorted(self._missing(), key=lambda each: -each[1])),
            findings=tuple(
                (row.device.device, row.device.note) for row in self.rows if row.device.finding and row.device.note
            ),
            above_share=state.above_share,
            above_share_devices=state.above_share_devices,
            update=on_disk.update,
            refused_update=on_disk.refused_update,
            fleet=None if settings.fleet is None else on_disk.fleet,
        )

    def _missing(self) -> Iterator[tuple[str, int]]:
        for row in self.rows:
            of = self.front_door.heard.get(row.device.device)
            if of is not None and of.missing and not row.device.no_log_in:
                yield row.device.device, of.missing


def told(part: Callable[[], dict[str, Any]] | None) -> dict[str, Any]:
    """State of a part of the daemon; empty if it is not configured."""
    return {} if part is None else part()


def look_at_the_file(path: Path) -> OnDisk:
    """Read the buffer's file and its disk; what cannot be read stays unknown. Runs on a thread of its own."""
    found = OnDisk(update=last_update.read(), refused_update=last_update.read_refused(), fleet=fleet_report.read())
    with suppress(OSError):
        space = os.statvfs(path)
        room = {"disk_free_bytes": space.f_bavail * space.f_frsize, "disk_bytes": space.f_blocks * space.f_frsize}
        found = replace(found, **room)
        disk = disk_health.read_disk(path.parent)
        found = replace(found, disk=disk, troubles=tuple(disk_health.troubles(disk, path.parent)))
    own = tuple(OWN_LOSSES)
    of_sensors = f"reason NOT IN ({', '.join('?' * len(own))})"
    try:
        status = read_status(path)
        with open_to_read(path) as connection:
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
            (unused,) = connection.execute("PRAGMA freelist_count").fetchone()
            hours = connection.execute(
                "SELECT seconds, readings, stored_bytes, disk_bytes FROM usage ORDER BY number DESC"
            ).fetchall()
            lost = dict(
                connection.execute(f"SELECT device, sum(count) FROM loss WHERE {of_sensors} GROUP BY device", own)
            )
    except BufferFileError as error:
        _log.debug("the buffer's file could not be looked at", error=str(error))
        return found
    usage = [UsageHour(*hour) for hour in hours]
    return replace(found, buffer_status=status, lost=lost, hours=usage, unused_bytes=unused * page_bytes)


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts `2` before `10`."""
    parts = filter(None, re.split(r"([0-9]{1,18})", name))
    return [(False, int(part), "") if part.isascii() and part.isdigit() else (True, 0, part) for part in parts]
