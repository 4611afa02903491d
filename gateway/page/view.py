"""Gathers what the status page shows, from the running parts and from the buffer's file, while somebody looks."""

import asyncio
import os
import platform
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
from msgspec import Struct

from gateway.buffer.losses import OWN_LOSSES
from gateway.buffer.status import BufferStatus, open_to_read, read_status, this_moment
from gateway.buffer.wear import UsageHour, hours_until_full, last_day, room_bytes, write_budget
from gateway.clock.kernel_clock import boottime_us
from gateway.clock.report import known_words
from gateway.daemon.device_states import DevicesAsked, DeviceState, devices_page
from gateway.devices.listing import (
    Device,
    is_silent,
    log_ins,
    may_log_in,
    mean_interval_s,
    merged,
    not_heard_words,
    places_on_ports,
)
from gateway.devices.words import drift_words
from gateway.health.conditions import Condition, Headline, conditions, first_copy, headline, spared
from gateway.health.facts import Facts, Silent
from gateway.host import disk_health, last_update, terminal_text
from gateway.host.disk_health import Trouble
from gateway.host.last_update import LastUpdate
from gateway.host.terminal_text import size
from gateway.page.history import SAMPLE_US, UPLINK_STATES, LiveHistory, Sample, Trace, Value
from gateway.reading import BufferFileError

if TYPE_CHECKING:
    from gateway.buffer.buffer import Buffer
    from gateway.config.running_settings import SettingsFile
    from gateway.daemon.control import Parts
    from gateway.intake.devices_heard import Heard
    from gateway.intake.front_door import FrontDoor
    from gateway.settings import Settings
    from gateway.uplink.state import UplinkState

LOOK_S: Final = 2.0
WATCHED_S: Final = 20.0
"""Seconds after a request for which figures that take effort are kept up to date."""
FILE_S: Final = 10.0
DEVICES_S: Final = 4.0
"""Greatest age, in seconds, of what the file says and of the list of devices, while somebody looks."""
EFFORT_SHARE: Final = 20
"""Least rest after the list of devices is made, as a multiple of its effort: it takes 5 % of the event loop at most."""
FIRST_S: Final = 5.0
"""Most seconds that the first viewer waits for figures."""
HEALTH_S: Final = 1.0
ANSWER_S: Final = 5.0
"""Seconds within which the buffer's thread has to answer."""
AT_ONCE: Final = 50
"""Devices after which others on the event loop get their turn."""
SHOWN: Final = 50
SHOWN_MAX: Final = 200
QUERY_CHARACTERS_MAX: Final = 64
ALARMS_MAX: Final = 50
NO_KIND: Final = "a disk"
"""Words for a disk about which nothing more is known."""

_log = structlog.get_logger("sluice.status_page")


class OnDisk(Struct, frozen=True):
    """Contents of the buffer's file, and state of its disk."""

    buffer_status: BufferStatus | None
    lost: dict[str, int]
    """Readings by device that are gone for good, and were not reported yet."""
    hours: list[UsageHour]
    unused_bytes: int
    disk_free_bytes: int | None
    disk: str
    """The disk, and how much of its life is used, in words."""
    troubles: tuple[Trouble, ...]
    update: LastUpdate | None
    refused_update: LastUpdate | None


NOTHING_FOUND: Final = OnDisk(None, {}, [], 0, None, "", (), None, None)


class Row(Struct, frozen=True):
    """A device as the list has it."""

    device: Device
    silent: Silent | None

    @property
    def is_trouble(self) -> bool:
        """Whether it is listed first."""
        return self.silent is not None or self.device.finding


class ShownDevice(Struct, frozen=True):
    """A device as the page gets it."""

    device: str
    place: str | None
    serial: bool | None
    heard_s: float | None
    silent: bool
    per_s: float | None
    values: list[tuple[str, Value]]
    value_s: float | None
    """Seconds since the values came in."""
    missing: int
    """Least number of missing readings of its present boot."""
    lost: int
    """Readings lost since the start, and earlier ones that were not reported."""
    drift: str
    bound: str
    note: str | None
    finding: bool


class StatusView:
    """Gathers the page's figures. Belongs to the event loop."""

    def __init__(
        self,
        settings: "Settings",
        front_door: "FrontDoor",
        buffer: "Buffer",
        parts: "Parts",
        file: "SettingsFile | None" = None,
    ) -> None:
        assert settings.status_page is not None  # noqa: S101 - without this section nobody makes a view
        self._settings = settings
        self._front_door = front_door
        self._buffer = buffer
        self._parts = parts
        self._file = file
        self._settings_change: str | None = None
        self._started_us = boottime_us()
        self.history = LiveHistory(settings.status_page.history_devices_max, self._started_us)
        front_door.heard.latest = {}
        self._on_disk = NOTHING_FOUND
        self._log_ins: frozenset[str] | None = None
        self._may_log_in = frozenset[str]()
        self._lost: dict[str, int] = {}
        """Readings lost by device: since the start, and earlier ones that were not reported yet."""
        self._lost_sum = 0
        self._rows: list[Row] = []
        self._judging = asyncio.Lock()
        self._judged: dict[str, object] = {}
        self._judge_due_s = 0.0
        self._asked_s = -WATCHED_S
        self._wanted = asyncio.Event()
        self._ready = asyncio.Event()

    # -- what goes on ---------------------------------------------------------------------------

    async def follow(self) -> None:
        """Record what came in, every other second, until cancelled."""
        try:
            while True:
                try:
                    self.history.record(self._front_door.heard, self._sample(), boottime_us())
                except Exception:  # noqa: BLE001 - whatever it is, readings must not suffer for a page
                    _log.exception("the status page could not record the newest readings")
                await asyncio.sleep(LOOK_S)
        finally:
            # Nobody shows the latest readings any more.
            self._front_door.heard.latest = None

    def _sample(self) -> Sample:
        state = self._buffer.state
        return Sample(
            state.rows,
            state.bytes_used,
            _uplink_state(self._parts.uplink()),
            self._front_door.counts.get("readings", 0),
        )

    async def refresh(self) -> None:
        """Keep figures that take effort up to date while somebody looks, until cancelled."""
        file_due_s = 0.0
        while True:
            if time.monotonic() - self._asked_s > WATCHED_S:
                # The next who looks must see nothing old.
                self._ready.clear()
                self._wanted.clear()
                await self._wanted.wait()
                file_due_s = 0.0
            began_s = time.monotonic()
            try:
                if began_s >= file_due_s:
                    await self._look_at_the_file()
                    file_due_s = time.monotonic() + FILE_S
                    began_s = time.monotonic()
                self._rows = await self._list_devices()
            except Exception:  # noqa: BLE001 - whatever it is, readings must not suffer for a page
                _log.exception("the status page could not be brought up to date")
            self._ready.set()
            effort_s = time.monotonic() - began_s
            await asyncio.sleep(max(DEVICES_S, EFFORT_SHARE * effort_s))

    async def _look_at_the_file(self) -> None:
        # A loss that is reported meanwhile is missed until the next look, and not counted twice.
        told = self._front_door.events.lost_told.copy()
        self._on_disk = await asyncio.to_thread(look_at_the_file, self._settings.buffer.path)
        self._log_ins = await asyncio.to_thread(log_ins, self._settings)
        self._may_log_in = await asyncio.to_thread(may_log_in, self._settings)
        if self._file is not None:
            self._settings_change = await asyncio.to_thread(self._file.change)
        told.update(self._on_disk.lost)
        self._lost = dict(told)
        self._lost_sum = max(self._lost_sum, told.total())

    async def _asked(self) -> None:
        """Record that somebody looks, and wait for the first figures."""
        self._asked_s = time.monotonic()
        self._wanted.set()
        if not self._ready.is_set():
            # A disk that hangs keeps nobody waiting: the page shows what is known without it.
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    await self._ready.wait()

    async def _list_devices(self) -> list[Row]:
        states: list[DeviceState] = []
        is_last, after = False, ""
        while not is_last:
            page = await devices_page(
                DevicesAsked(after), self._front_door.heard, self._front_door.clocks, boottime_us()
            )
            states += page.devices
            is_last = page.is_last or not page.devices
            after = page.devices[-1].device if page.devices else after
        found = self._on_disk.buffer_status
        places = places_on_ports(_told(self._parts.serial))
        listed = merged(
            () if found is None else found.devices,
            states,
            places,
            frozenset(),
            this_moment(self._settings.gateway),
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
        return [row for _, _, row in rows]

    def _silent(self, device: Device) -> Silent | None:
        of = self._front_door.heard.get(device.device)
        up_s = (boottime_us() - self._started_us) / 1e6
        if device.heard_s is None or device.no_log_in or not is_silent(device.heard_s, of, up_s):
            return None
        return Silent(device.device, device.heard_s, 0.0 if of is None else of.longest_pause_us / 1e6)

    # -- what is asked --------------------------------------------------------------------------

    @property
    def gateway(self) -> str:
        """Name of the gateway."""
        return self._settings.gateway.id

    def facts(self) -> Facts:
        """Return all that conditions are made of, as far as it is known now."""
        settings, parts = self._settings, self._parts
        on_disk, state = self._on_disk, self._buffer.state
        now_us = boottime_us()
        usage = self._buffer.usage
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
        lost_us = max(unreported_us, self._front_door.events.lost_told_us)
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
            lost=self._lost_sum,
            lost_s=max(0.0, (now_us - lost_us) / 1e6) if lost_us else None,
            logins=_told(parts.logins),
            settings_change=self._settings_change,
            refused=() if parts.log_ins_refused is None else tuple(parts.log_ins_refused()),
            counts={**self._buffer.counts, **self._front_door.counts},
            counted_last=self._front_door.counted_last,
            serial=_told(parts.serial),
            brokers=_told(parts.mqtt_brokers),
            devices=len(self._rows),
            heard=sum(
                row.silent is None and self._front_door.heard.get(row.device.device) is not None for row in self._rows
            ),
            silent=tuple(sorted((row.silent for row in self._rows if row.silent), key=lambda each: -each.silent_s)),
            missing=tuple(sorted(self._missing(), key=lambda each: -each[1])),
            findings=tuple(
                (row.device.device, row.device.note) for row in self._rows if row.device.finding and row.device.note
            ),
            above_share=state.above_share,
            above_share_devices=state.above_share_devices,
            update=on_disk.update,
            refused_update=on_disk.refused_update,
        )

    def _missing(self) -> Iterator[tuple[str, int]]:
        for row in self._rows:
            of = self._front_door.heard.get(row.device.device)
            if of is not None and of.missing and not row.device.no_log_in:
                yield row.device.device, of.missing

    async def state(self, query: str, limit: int) -> dict[str, object]:
        """Return what the page polls: all figures of this moment, and the devices that it shows."""
        await self._asked()
        facts = self.facts()
        found = conditions(facts)
        not_heard = sorted(self._may_log_in.difference(row.device.device for row in self._rows))
        now_us = facts.boottime_us
        matching = self._matching(query)
        shown = [self._shown(row, now_us) for row in matching[: min(limit, SHOWN_MAX)]]
        self.history.want([row.device for row in shown], now_us)
        top: Headline = headline(facts, found)
        listed: list[Condition] = found[:ALARMS_MAX]
        return {
            "gateway": self._settings.gateway.id,
            "namespace": self._settings.gateway.namespace,
            "headline": top,
            "alarms": listed,
            "alarms_more": max(0, len(found) - ALARMS_MAX),
            "uplink": _uplink_view(facts),
            "buffer": _buffer_view(facts),
            "intake": {
                "per_s": self.history.per_s or _mean_per_s(facts),
                "readings": facts.counts.get("readings", 0),
                "lost": facts.lost,
                "quarantined": facts.buffer_status.quarantined if facts.buffer_status is not None else None,
            },
            "clock": {"synced": facts.clock.synced, "words": known_words(self._settings.gateway, facts.clock.error_us)},
            "disk": _disk_view(facts, self._on_disk.disk),
            "devices": {
                "total": len(self._rows),
                "heard": facts.heard,
                "silent": len(facts.silent),
                "not_heard": not_heard_words(not_heard) if not_heard else "",
                "matching": len(matching),
                "shown": shown,
            },
            "update": facts.update.words if facts.update is not None and facts.update.result == "good" else "",
            "up_s": round(facts.up_s),
            "versions": versions(),
        }

    def curves(self, query: str, limit: int) -> dict[str, object]:
        """Return the last hour of the gateway, and of the devices that match."""
        now_us = boottime_us()
        traces = self.history.traces
        names = [row.device.device for row in self._matching(query)[: min(limit, SHOWN_MAX)]]
        return {
            "step_s": SAMPLE_US / 1e6,
            "uplink_states": UPLINK_STATES,
            **self.history.series(),
            "devices": {
                name: {"metric": traces[name].metric, "points": traces[name].curve(now_us)}
                for name in names
                if name in traces and traces[name].metric is not None
            },
        }

    def _matching(self, query: str) -> list[Row]:
        if not query:
            return self._rows
        wanted = query[:QUERY_CHARACTERS_MAX].casefold()
        return [
            row
            for row in self._rows
            if wanted in row.device.device.casefold() or wanted in (row.device.place or "").casefold()
        ]

    def _shown(self, row: Row, now_us: int) -> ShownDevice:
        device = row.device
        of = self._front_door.heard.get(device.device)
        trace = self.history.traces.get(device.device)
        # Of several clocks the one that is known worst, as `sluice status` has it.
        clock = max(device.clocks, key=lambda each: each.error_us or 0, default=None)
        return ShownDevice(
            device.device,
            device.place,
            device.is_serial,
            device.heard_s if of is None else max(0.0, round((now_us - of.received_us) / 1e6, 1)),
            row.silent is not None,
            _per_s(of, trace, now_us),
            [] if trace is None else list(_values(trace)),
            None if trace is None or not trace.decoded_us else max(0.0, round((now_us - trace.decoded_us) / 1e6, 1)),
            0 if of is None else of.missing or 0,
            self._lost.get(device.device, 0),
            "" if clock is None else drift_words(clock),
            "" if clock is None else terminal_text.bound(clock.error_us),
            device.note,
            device.finding,
        )

    async def health(self) -> dict[str, object]:
        """Return whether the gateway does its work, why not, and what else is not well. Tells nothing secret.

        Anybody may ask, however often: the answer is found once a second.
        """
        async with self._judging:
            if time.monotonic() >= self._judge_due_s:
                self._judged = await self._judge()
                self._judge_due_s = time.monotonic() + HEALTH_S
            return self._judged

    async def _judge(self) -> dict[str, object]:
        facts = self.facts()
        if facts.failing and not facts.uplink.direct_topics:
            reason = "the buffer cannot be written: no reading is acknowledged until its disk works again"
            return {"status": "failing", "reason": reason, "code": "disk-failing"}
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._buffer.answers()
        except TimeoutError:
            reason = f"the buffer's thread has not answered for {ANSWER_S:.0f} s: its disk may hang"
            return {"status": "failing", "reason": reason, "code": "disk-hangs"}
        away, words = _away(facts.uplink)
        warnings = {
            "disk-failing": "the buffer cannot be written, and only what Kafka takes first is acknowledged"
            if facts.failing
            else "",
            "buffer-full": "the buffer is full" if facts.full else "",
            "above-share": "devices hold more than their share of the buffer" if facts.above_share_devices else "",
            away: "" if facts.uplink.up else words,
            "clock-unsynced": "" if facts.clock.synced else "the clock is not synced",
        }
        warned = {code: words for code, words in warnings.items() if words}
        return {"status": "ok"} | ({"warnings": [*warned.values()], "codes": [*warned]} if warned else {})

    async def metrics(self) -> bytes:
        """Return the figures in Prometheus's text format."""
        from gateway.page import metrics  # noqa: PLC0415 - it imports Prometheus's client, which nobody else needs

        await self._asked()
        kept = self.history.traces
        return metrics.text(
            self.facts(),
            versions(),
            _told(self._parts.mqtt_listener),
            [
                metrics.DeviceFigures(row.device.device, of.readings, of.received_us, of.missing or 0)
                for row in self._rows
                if row.device.device in kept
                for of in [self._front_door.heard.get(row.device.device)]
                if of is not None
            ],
        )


def _told(part: Callable[[], dict[str, Any]] | None) -> dict[str, Any]:
    return {} if part is None else part()


def versions() -> dict[str, str]:
    """Return the versions of the software here, and the names of the machine."""
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        system = platform.system()
    return {
        "sluice": version("sluice"),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": system,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "host": platform.node(),
    }


def look_at_the_file(path: Path) -> OnDisk:
    """Read the buffer's file and its disk; what cannot be read stays unknown. Runs on a thread of its own."""
    free: int | None = None
    disk, wrong = "", tuple[Trouble, ...]()
    updates = last_update.read(), last_update.read_refused()
    with suppress(OSError):
        space = os.statvfs(path)
        free = space.f_bavail * space.f_frsize
        seen = disk_health.read_disk(path.parent)
        disk = disk_health.health_words(seen) if seen.name and seen.what != NO_KIND else ""
        wrong = tuple(disk_health.troubles(seen, path.parent))
    own = tuple(OWN_LOSSES)
    of_sensors = f"reason NOT IN ({', '.join('?' * len(own))})"
    try:
        found = read_status(path)
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
        return OnDisk(None, {}, [], 0, free, disk, wrong, *updates)
    return OnDisk(found, lost, [UsageHour(*hour) for hour in hours], unused * page_bytes, free, disk, wrong, *updates)


def _values(trace: Trace) -> Iterator[tuple[str, Value]]:
    for stream, values in trace.values.items():
        before = f"{stream.rpartition('/')[2]} " if len(trace.values) > 1 else ""
        for name, value in values:
            yield f"{before}{name}".strip(), value


def _per_s(of: "Heard | None", trace: Trace | None, now_us: int) -> float | None:
    """Readings a second over the last minutes; if unknown, the mean since the first one of this boot."""
    if of is None:
        return None
    recent = None if trace is None else trace.per_s(of.readings, now_us)
    if recent is not None:
        return float(f"{recent:.3g}")
    mean_s = mean_interval_s(of)
    return None if not mean_s else float(f"{1 / mean_s:.3g}")


def _mean_per_s(facts: Facts) -> float | None:
    """Mean since the start: for its first seconds, which nobody has sampled yet."""
    return facts.counts.get("readings", 0) / facts.up_s if 1 < facts.up_s < SAMPLE_US / 1e6 * 2 else None


def _uplink_state(uplink: "UplinkState") -> int:
    if uplink.up:
        return UPLINK_STATES.index("up")
    if uplink.quota_used_up:
        return UPLINK_STATES.index("waits")
    return UPLINK_STATES.index("unknown" if uplink.error is None else "down")


def _away(uplink: "UplinkState") -> tuple[str, str]:
    """Code and words for an uplink that is down."""
    if uplink.quota_used_up:
        return "quota-used-up", "the quota of the day is used up"
    if uplink.barred:
        return "kafka-unusable", "Kafka is reached, and cannot be used"
    return "kafka-unreached", "Kafka is not reached"


def _uplink_view(facts: Facts) -> dict[str, object]:
    uplink = facts.uplink
    ago_s = facts.since_s
    return {
        "state": UPLINK_STATES[_uplink_state(uplink)],
        "since_s": None if ago_s is None else max(0, round(ago_s)),
        "link": f"{size(uplink.bytes_per_s)}/s" if uplink.bytes_per_s else None,
        "sent": uplink.sent,
        "wire": size(uplink.wire_bytes),
    }


def _buffer_view(facts: Facts) -> dict[str, object]:
    return {
        "rows": facts.rows,
        "used": size(facts.bytes_used),
        "most": size(facts.settings.buffer.bytes_max),
        "share": round(facts.bytes_used / facts.settings.buffer.bytes_max, 4),
        "full": facts.full,
        "lasts_s": None if facts.hours_until_full is None else round(facts.hours_until_full * 3_600),
    }


def _disk_view(facts: Facts, disk: str) -> dict[str, object]:
    per_day, card_days = facts.disk_bytes_per_day, facts.card_days
    return {
        "free": None if facts.disk_free_bytes is None else size(facts.disk_free_bytes),
        "per_day": None if per_day is None else size(per_day),
        "card_s": None if card_days is None else round(card_days * 86_400),
        "what": disk,
        "spared": spared(facts),
        "first": first_copy(facts),
        "failing": facts.failing is not None or any(each.fails for each in facts.disk_troubles),
        "worn": bool(facts.disk_troubles),
    }


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts `2` before `10`."""
    parts = filter(None, re.split(r"([0-9]{1,18})", name))
    return [(False, int(part), "") if part.isascii() and part.isdigit() else (True, 0, part) for part in parts]
