"""Gathers what the status page shows, from the running parts and from the buffer's file, while somebody looks."""

import asyncio
import platform
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import Struct

from gateway.clock.kernel_clock import boottime_us
from gateway.clock.report import known_words
from gateway.devices.listing import mean_interval_s, not_heard_words
from gateway.devices.words import drift_words
from gateway.health.conditions import Condition, Headline, conditions, first_copy, headline, spared
from gateway.health.facts import Facts
from gateway.health.survey import Row, Survey, told
from gateway.host import terminal_text
from gateway.host.disk_health import Disk, health_words
from gateway.host.terminal_text import size
from gateway.page.history import SAMPLE_US, UPLINK_STATES, LiveHistory, Sample, Trace, Value

if TYPE_CHECKING:
    from gateway.intake.devices_heard import Heard
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
SHOWN: Final = 50
SHOWN_MAX: Final = 200
QUERY_CHARACTERS_MAX: Final = 64
ALARMS_MAX: Final = 50

_log = structlog.get_logger("sluice.status_page")


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

    def __init__(self, survey: Survey) -> None:
        section = survey.settings.status_page
        assert section is not None  # noqa: S101 - without this section nobody makes a view
        self.survey = survey
        self._parts = survey.parts
        self._buffer = survey.buffer
        self._front_door = survey.front_door
        self.history = LiveHistory(section.history_devices_max, boottime_us())
        survey.front_door.heard.latest = {}
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
                    await self.survey.look_at_the_file()
                    file_due_s = time.monotonic() + FILE_S
                    began_s = time.monotonic()
                await self.survey.look_at_devices()
            except Exception:  # noqa: BLE001 - whatever it is, readings must not suffer for a page
                _log.exception("the status page could not be brought up to date")
            self._ready.set()
            effort_s = time.monotonic() - began_s
            await asyncio.sleep(max(DEVICES_S, EFFORT_SHARE * effort_s))

    async def _asked(self) -> None:
        """Record that somebody looks, and wait for the first figures."""
        self._asked_s = time.monotonic()
        self._wanted.set()
        if not self._ready.is_set():
            # A disk that hangs keeps nobody waiting: the page shows what is known without it.
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    await self._ready.wait()

    # -- what is asked --------------------------------------------------------------------------

    @property
    def gateway(self) -> str:
        """Name of the gateway."""
        return self.survey.settings.gateway.id

    async def state(self, query: str, limit: int) -> dict[str, object]:
        """Return what the page polls: all figures of this moment, and the devices that it shows."""
        await self._asked()
        facts = self.survey.facts()
        found = conditions(facts)
        not_heard = sorted(self.survey.may_log_in.difference(row.device.device for row in self.survey.rows))
        now_us = facts.boottime_us
        matching = self._matching(query)
        shown = [self._shown(row, now_us) for row in matching[: min(limit, SHOWN_MAX)]]
        self.history.want([row.device for row in shown], now_us)
        top: Headline = headline(facts, found)
        listed: list[Condition] = found[:ALARMS_MAX]
        return {
            "gateway": self.survey.settings.gateway.id,
            "namespace": self.survey.settings.gateway.namespace,
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
            "clock": {"synced": facts.clock.synced, "words": known_words(facts.settings.gateway, facts.clock.error_us)},
            "disk": _disk_view(facts, self.survey.on_disk.disk),
            "devices": {
                "total": len(self.survey.rows),
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
            return self.survey.rows
        wanted = query[:QUERY_CHARACTERS_MAX].casefold()
        return [
            row
            for row in self.survey.rows
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
            self.survey.lost.get(device.device, 0),
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
        facts = self.survey.facts()
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
            self.survey.facts(),
            versions(),
            told(self._parts.mqtt_listener),
            [
                metrics.DeviceFigures(row.device.device, of.readings, of.received_us, of.missing or 0)
                for row in self.survey.rows
                if row.device.device in kept
                for of in [self._front_door.heard.get(row.device.device)]
                if of is not None
            ],
        )


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


def _disk_view(facts: Facts, disk: Disk | None) -> dict[str, object]:
    per_day, card_days = facts.disk_bytes_per_day, facts.card_days
    return {
        "free": None if facts.disk_free_bytes is None else size(facts.disk_free_bytes),
        "per_day": None if per_day is None else size(per_day),
        "card_s": None if card_days is None else round(card_days * 86_400),
        "what": health_words(disk) if disk is not None and disk.says_something else "",
        "spared": spared(facts),
        "first": first_copy(facts),
        "failing": facts.failing is not None or any(each.fails for each in facts.disk_troubles),
        "worn": bool(facts.disk_troubles),
    }
