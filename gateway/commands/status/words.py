"""Makes the lines of `sluice status`: for each part how it is, then its conditions. No I/O."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from gateway.buffer.status import told
from gateway.buffer.wear import SEEN_S_MIN
from gateway.clock.report import known_words
from gateway.commands.status.device_table import heading, rate
from gateway.config.running_settings import running_settings
from gateway.devices.listing import not_heard_words
from gateway.health.conditions import WHEN_FULL, Condition, conditions, days, first_copy, spared
from gateway.health.facts import Facts, Silent, State, read_state, told_facts
from gateway.host.disk_health import health_words, troubles
from gateway.host.terminal_text import counted, escaped, harmless, readings_and_events, size, span, utc
from gateway.serial_lines.kinds import CANNOT_ACKNOWLEDGE, NAMES

if TYPE_CHECKING:
    from gateway.buffer.status import BufferStatus, DeviceStatus, Now
    from gateway.commands.buffer_commands import RoomLeft
    from gateway.commands.status.device_table import DeviceRow
    from gateway.host.disk_health import Disk
    from gateway.host.fleet_report import FleetReport
    from gateway.host.last_update import LastUpdate
    from gateway.host.our_image import OurImage
    from gateway.settings import Settings

INDENT = 12
"""Columns before the text of a line, and before a wrapped line."""
LIVE_AGE_SHOWN_S = 5.0
"""Seconds for which new readings may wait before a line says so. They always wait a little, to be sent together."""
DEVICES_MAX = 20
"""Most devices that are named one by one. If there are more, those silent for longest are named."""
NAMED_MAX = 5
"""Most registers that are named one by one."""
_BEGUN_BEFORE_S = 60.0
"""Seconds within which two readings of a clock agree if nobody set it in between."""
_LEVELS = {"bad": "FAIL", "warn": "warn", "note": "note"}
_IN_TABLE = {"device-silent", "device-finding", "readings-missing"}
"""Conditions that the table of devices shows."""


@dataclass(frozen=True, slots=True)
class Glance:
    """Everything that `sluice status` shows, read at about one moment."""

    settings: "Settings"
    buffer_status: "BufferStatus"
    answer: dict[str, Any] | None
    """Daemon's answer to `state` (`gateway.daemon.control`); None if no daemon runs, or it did not answer."""
    unheard: str
    """Reason why a running daemon did not answer; empty if it did."""
    room: "RoomLeft"
    backlog_rows: int
    """Waiting rows of other lanes than the live one."""
    now: "Now"
    wall_s: float
    """Seconds since 1970 by this box's clock, right or not."""
    zone: tzinfo | None = None
    """Reader's time zone; None for this box's."""
    devices: "Sequence[DeviceRow] | None" = None
    """Devices in the daemon's memory; None if it was not asked, or did not answer."""
    not_heard: tuple[str, ...] = ()
    """Devices that may log in and were not heard yet, as far as the daemon tells."""
    to_start: str = ""
    """Command that starts the daemon, if no daemon runs."""
    disk: "Disk | None" = None
    update: "LastUpdate | None" = None
    refused_update: "LastUpdate | None" = None
    fleet: "FleetReport | None" = None
    image: "OurImage | None" = None
    rates: "Rates | None" = None
    """Rates since an earlier glance, if there was one."""


class Rates(Struct, frozen=True):
    """Rates per second between two glances."""

    readings: float
    """Readings taken in."""
    sent: float
    """Readings and events that Kafka took."""
    wire_bytes: float
    """Bytes on the uplink, both ways."""


_NOT_OUR_MQTT = {
    "unsupported-protocol-level": "clients of another version of MQTT; set them to 3.1.1 or 5",
    "mosquitto-bridge-level": "a mosquitto bridge first asks for its own version, and then for that of MQTT; "
    "try_private false in its settings saves the first try",
    "http-on-mqtt-port": "a browser, or a client that is set to WebSocket (ws://); set it to mqtt://",
    "tls-on-plain-port": "clients that begin with TLS; have them connect to mqtt_listener.tls.port, or without TLS",
}
"""By reason: who speaks another protocol to the MQTT port, and what to do."""


_ENDS = {
    "delivered": "delivered",
    "expired": "expired",
    "refused": "refused",
    "unknown-device": "for unknown devices",
}


def facts_of(seen: Glance) -> Facts:
    """Facts from which the conditions follow."""
    found, room, rows = seen.buffer_status, seen.room, seen.devices or ()
    silent = (Silent(row.device, row.heard_s or 0.0) for row in rows if row.is_silent)
    missing = ((row.device, row.missing) for row in rows if row.missing and not row.no_log_in)
    facts = told_facts(
        seen.settings,
        seen.answer or {},
        seen.now.boottime_us,
        seen.wall_s,
        found,
        room_bytes=room.bytes,
        hours_until_full=room.hours_until_full,
        disk_bytes_per_day=room.disk_bytes_per_day,
        card_days=room.card_days,
        disk_troubles=() if seen.disk is None else tuple(troubles(seen.disk, seen.settings.buffer.path.parent)),
        devices=len(rows),
        heard=sum(row.readings > 0 and not row.is_silent for row in rows),
        silent=tuple(sorted(silent, key=lambda each: -each.silent_s)),
        missing=tuple(sorted(missing, key=lambda each: -each[1])),
        findings=tuple((row.device, row.note) for row in rows if row.finding and row.note),
        update=seen.update,
        refused_update=seen.refused_update,
        fleet=seen.fleet,
    )
    return facts if seen.devices is not None else replace(facts, unknown=facts.unknown | {"devices"})


def status_lines(seen: Glance) -> Iterator[str]:
    """Lines of the status: for each part how it is, then its conditions. Wrap them at `INDENT`; they are safe."""
    facts = facts_of(seen)
    answer = seen.answer or {}
    state = read_state(answer)
    by_subject: dict[str, list[Condition]] = {}
    for condition in conditions(facts):
        if condition.code not in _IN_TABLE:
            by_subject.setdefault(condition.subject, []).append(condition)
    parts = (
        ("gateway", "Settings", _gateway(seen, answer, facts)),
        ("image", "", () if seen.image is None else (escaped(seen.image.words),)),
        ("update", "Update", _update(seen)),
        ("sources", "Sensors", ()),
        ("uplink", "Uplink", () if "uplink" in facts.unknown else _uplink(seen, facts)),
        ("readings", "", _traffic(seen, facts)),
        ("buffer", "", _buffer(seen)),
        ("space", "Buffer", _space(seen, facts)),
        ("disk", "Disk", _disk(seen, facts)),
        ("clock", "Clock", () if "clock" in facts.unknown else _clock(seen, facts)),
        ("broker", "Broker", _brokers(state)),
        ("payloads", "Payloads", ()),
        ("listener", "Log-ins", _listener(state.mqtt_listener)),
        ("serial", "Serial", _serial(facts.serial, seen.now.boottime_us)),
        ("commands", "Commands", _commands(facts.commands)),
        ("quarantine", "Quarantine", () if seen.buffer_status.quarantined else ("empty",)),
        ("lost", "Losses", _losses(seen, state)),
        ("devices", "Devices", _devices(seen, facts)),
    )
    for label, subject, how in parts:
        found = [
            line
            for each in by_subject.get(subject, ())
            for line in (f"{_LEVELS[each.level]}: {escaped(each.line)}", *_faults(state, each.code))
        ]
        # The table of devices follows the last line.
        lines = [*found, *how] if label == "devices" else [*how, *found]
        for number, line in enumerate(lines):
            yield f"{'' if number else label:{INDENT}}{line}"


def _gateway(seen: Glance, answer: dict[str, Any], facts: Facts) -> Iterator[str]:
    """Name of the gateway, and whether it runs."""
    running = running_settings(answer)
    name = (running and running.gateway) or seen.settings.gateway.id
    yield f"{escaped(name)}, {'running' if seen.buffer_status.running else 'not running'}"
    if not seen.buffer_status.running and seen.to_start:
        yield escaped(seen.to_start)
    if seen.unheard:
        yield f"its {'state is' if seen.answer is None else 'devices are'} not known: {escaped(seen.unheard)}"
    unknown = sorted(part for part in facts.unknown if part.partition(".")[0] in answer)
    if unknown:
        yield f"not known: {', '.join(unknown)}; the gateway that runs may be of another version than this command"


def _update(seen: Glance) -> Iterator[str]:
    """The last update of the box's image, and how it stands to the fleet's file. Conditions tell what is not well."""
    if seen.update is not None and seen.update.result == "good":
        yield escaped(seen.update.words)
    if seen.fleet is not None and seen.fleet.result in {"none", "waits", "good"} and seen.fleet.serial:
        yield escaped(seen.fleet.words)


def _traffic(seen: Glance, facts: Facts) -> Iterator[str]:
    """Readings since the start, and the rates now."""
    counts = facts.counts
    if "readings" not in counts:
        return
    now = ""
    if seen.rates is not None:
        rates = seen.rates
        now = f"{rate(rates.readings)} in, {rate(rates.sent)} to Kafka, {size(rates.wire_bytes)}/s on the uplink; "
    sent = "" if facts.unknown & {"uplink", "uplink.sent"} else f", {readings_and_events(facts.uplink.sent)} to Kafka"
    # Sensors send a reading again if they did not see its acknowledgement.
    again = f" ({counts['duplicate']:,} of them sent again: stored once)" if counts.get("duplicate") else ""
    yield f"{now}since the start {counts['readings']:,} came in{again}{sent}"


def _buffer(seen: Glance) -> Iterator[str]:
    oldest = seen.buffer_status.oldest
    if oldest is None:
        yield "empty: nothing waits for Kafka"
    else:
        yield f"{counted(seen.buffer_status.rows, 'row')} safe on disk, the oldest of {told(oldest, seen.now)}"


def _space(seen: Glance, facts: Facts) -> Iterator[str]:
    """Room used; while the uplink is down also how long the rest lasts, and what happens then."""
    yield f"{size(seen.buffer_status.bytes_used)}, {_used(seen):.1%} of buffer.bytes_max"
    room = seen.room
    if facts.uplink.up or facts.full:
        return
    then = f"when it is full, {WHEN_FULL[seen.settings.buffer.when_full]}"
    if not room.bytes:
        yield f"no room for more; {then}"
    elif room.hours_until_full is not None:
        lasts = days(room.hours_until_full * 3_600)
        yield f"room for {lasts} at the rate of the last {span(room.seen_s)} that sluice ran; {then}"
    elif room.seen_s < SEEN_S_MIN:
        yield f"room for {size(room.bytes)} more; how long that lasts is shown after {span(SEEN_S_MIN)} of running"
    else:
        yield f"room for {size(room.bytes)} more; nothing came in during the last {span(room.seen_s)} that sluice ran"


def _used(seen: Glance) -> float:
    return seen.buffer_status.bytes_used / seen.settings.buffer.bytes_max


def _disk(seen: Glance, facts: Facts) -> Iterator[str]:
    """Disk's health, as far as it is known, how much is written to it, and what it was spared."""
    room = seen.room
    if seen.disk is not None and seen.disk.says_something:
        yield health_words(seen.disk)
    if room.disk_bytes_per_day is not None:
        lasts = "" if room.card_days is None else f", by which a cheap card lasts {span(room.card_days * 86_400)}"
        yield f"{size(room.disk_bytes_per_day)} a day are written{lasts}"
    elif seen.buffer_status.running and room.seen_s < SEEN_S_MIN:
        yield "how much is written a day is not known yet"
    for clause in (spared(facts), first_copy(facts)) if seen.answer is not None else ():
        if clause:
            yield escaped(clause)


def _clock(seen: Glance, facts: Facts) -> Iterator[str]:
    clock = facts.clock
    if not clock.synced:
        return
    stepped = "" if not clock.steps else f"; set {counted(clock.steps, 'time')} since the start"
    since = f" for {span((seen.now.boottime_us - clock.since_us) / 1e6)}" if clock.since_us else ""
    yield f"{known_words(seen.settings.gateway, clock.error_us, since)}{stepped}"


def _losses(seen: Glance, state: State) -> Iterator[str]:
    losses = seen.buffer_status.losses
    if losses:
        yield f"{sum(losses.values()):,} not reported to Kafka yet{_by_reason(losses)}"
    if state.lost_told:
        lost = counted(state.lost_told, "reading")
        yield f"{lost} since the start, reported on {seen.settings.kafka.events_topic}"


def _devices(seen: Glance, facts: Facts) -> Iterator[str]:
    if seen.devices is not None:
        if seen.not_heard:
            yield escaped(not_heard_words(seen.not_heard))
        yield heading(seen.devices)
        return
    number = len(seen.buffer_status.devices)
    send = "sends a sequence of its own" if number == 1 else "send a sequence of their own"
    ports = facts.serial.get("ports", {})
    beside = f" ({NAMES} are under serial)" if any(map(_is_mute, ports.values())) else ""
    yield f"{f'{number:,}' if number else 'none yet'} that {send}{beside}"
    yield from _device_lines(seen)


def _device_lines(seen: Glance) -> Iterator[str]:
    devices = seen.buffer_status.devices
    rest: tuple[DeviceStatus, ...] = ()
    if len(devices) > DEVICES_MAX:
        by_silence = sorted(devices, key=lambda device: -_silent_s(seen, device))
        devices, rest = tuple(by_silence[:DEVICES_MAX]), tuple(by_silence[DEVICES_MAX:])
    for device in devices:
        doubtful = f"{utc(device.seen_us)} UTC, by a clock that may be wrong"
        last = doubtful if device.seen is None else told(device.seen, seen.now)
        yield f"{escaped(device.device)}, last stored {last}"
    if rest:
        oldest_s = _silent_s(seen, rest[0])
        age = f", none older than {span(math.ceil(oldest_s))}" if oldest_s < math.inf else ""
        yield f"and {len(rest):,} more{age} (sluice status --json has all)"


def _silent_s(seen: Glance, device: "DeviceStatus") -> float:
    """Seconds since its last reading was stored; infinite if that is not known."""
    age_s = None if device.seen is None else seen.now.age_s(device.seen)
    return math.inf if age_s is None else age_s


# -- the uplink -----------------------------------------------------------------------------------


def _uplink(seen: Glance, facts: Facts) -> Iterator[str]:
    uplink, kafka = facts.uplink, seen.settings.kafka
    since = _since(seen, uplink.since)
    if not uplink.up:
        tries = "no answer from Kafka yet: the first attempt is under way"
        yield f"{'waits' if uplink.quota_used_up else 'down' if uplink.error else tries}{since}"
        return
    # Small requests take as long as their answers, so they show only a lower bound of the link's speed.
    pace = f"; the link was seen to carry at least {size(uplink.bytes_per_s)}/s" if uplink.bytes_per_s else ""
    bound = f"; no more than {size(kafka.bytes_per_s_max)}/s is used (kafka.bytes_per_s_max)"
    yield f"up{since}{pace}{bound if kafka.bytes_per_s_max else ''}"
    if uplink.new_clocks:
        yield (
            f"readings of {counted(uplink.new_clocks, 'sensor')} that began a moment ago wait until the "
            "sensor's clock is known, at most for gateway.hold_new_clock_s = "
            f"{span(seen.settings.gateway.hold_new_clock_s)}"
        )
    # If readings wait for the clock, readings of this boot wait too.
    if seen.backlog_rows and not uplink.waits_for_clock:
        how = "sent first, in their order" if kafka.drain == "oldest-first" else "sent beside new ones"
        backlog = f"{readings_and_events(seen.backlog_rows)} from earlier {'is' if seen.backlog_rows == 1 else 'are'}"
        yield f"{backlog} still to go, {how} (kafka.drain)"
    # Without a backlog, the line "buffer" has the age of the oldest reading.
    if seen.backlog_rows and uplink.live_oldest_us is not None:
        waited_s = (seen.now.boottime_us - uplink.live_oldest_us) / 1e6
        if waited_s > LIVE_AGE_SHOWN_S:
            yield f"of the new readings, the oldest has waited for {span(waited_s)}"


def _since(seen: Glance, since_s: float) -> str:
    """Time of the uplink's last change by this box's clock, which may have been set since."""
    if not since_s:
        return ""
    booted_s = seen.wall_s - seen.now.boottime_us / 1e6
    if not booted_s - _BEGUN_BEFORE_S <= since_s <= seen.wall_s + _BEGUN_BEFORE_S:
        # The daemon runs in this boot, so that time was noted before the clock was set.
        return " since before this box's clock was set"
    doubt = "" if seen.now.wall_us is not None else " (by this box's clock, which is not synced)"
    return f" since {_clock_time(seen, since_s)}{doubt}"


def _clock_time(seen: Glance, wall_s: float) -> str:
    """Format a time in the reader's zone: `10:02 CET` today, `2026-03-14 10:02 CET` otherwise."""
    try:
        then, now = (datetime.fromtimestamp(each, UTC).astimezone(seen.zone) for each in (wall_s, seen.wall_s))
    except (OverflowError, ValueError, OSError):
        return "no such date"
    return f"{then:%H:%M %Z}" if then.date() == now.date() else f"{then:%Y-%m-%d %H:%M %Z}"


# -- the sources ----------------------------------------------------------------------------------


def _brokers(state: State) -> Iterator[str]:
    for name, broker in state.mqtt_brokers.items():
        yield f"{escaped(name)}: {'read from' if broker['connected'] else 'not connected'}"


def _faults(state: State, kind: str) -> Iterator[str]:
    """Name each device whose payload is not as declared in this way, with the cause of its last fault."""
    faults = state.payload_faults.get(kind, [])
    for fault in faults[:DEVICES_MAX]:
        yield f"{escaped(fault['device'])}: {escaped(fault['cause'])} ({counted(fault['readings'], 'reading')})"
    if len(faults) > DEVICES_MAX:
        yield "and others; sluice devices names them all"


def _listener(counts: dict[str, int]) -> Iterator[str]:
    refusals = {reason: count for reason, count in counts.items() if reason not in {"connected", "disconnected"}}
    if refusals:
        yield f"refused or ended since the start{_by_reason(refusals)}"
    yield from (f"{reason}: {words}" for reason, words in _NOT_OUR_MQTT.items() if reason in refusals)


def _serial(serial: dict[str, Any], now_us: int) -> Iterator[str]:
    ports = serial.get("ports", {})
    for name, port in ports.items():
        yield f"{escaped(name)}: {_port_words(port)}"
        for device, unit in port.get("units", {}).items():
            yield f"{escaped(device)} {_unit_words(unit, now_us)}"
    if any(map(_is_mute, ports.values())):
        # One line for all ports that cannot acknowledge.
        yield CANNOT_ACKNOWLEDGE


def _commands(commands: dict[str, Any]) -> Iterator[str]:
    """Commands from the cloud that wait, and the ends of others."""
    if not commands:
        return
    ends = ", ".join(
        f"{commands['counts'][outcome]:,} {words}"
        for outcome, words in _ENDS.items()
        if commands["counts"].get(outcome)
    )
    waiting = counted(commands["waiting"], "command") + (" waits" if commands["waiting"] == 1 else " wait")
    yield f"{waiting if commands['waiting'] else 'none waits'}; since the start {ends or 'none has ended'}"


def _is_mute(port: dict[str, Any]) -> bool:
    """Tell whether its sensors cannot get acknowledgements."""
    return not port.get("acknowledges", True)


def _port_words(port: dict[str, Any]) -> str:
    """Name the sensor on a port, and say how long ago it was heard."""
    if "units" in port:
        return f"{port.get('kind') or 'Modbus'}, {counted(len(port['units']), 'unit')}"
    if port.get("device") is None:
        return "no sensor has said its name yet"
    sensor = f"sensor {escaped(port['device'])}"
    if _is_mute(port):
        return f"{sensor}, {_text_words(port)}"
    used_s = port.get("used_s")
    return sensor if used_s is None else f"{sensor}, last heard {span(used_s)} ago"


def _text_words(port: dict[str, Any]) -> str:
    """Say when a line of text was last read, and how many could not be read."""
    used_s = port.get("used_s")
    refused, last = port.get("refused", 0), port.get("refused_last")
    told = ""
    if refused and last:
        # The daemon has escaped the bytes of the line.
        told = f', the last for {escaped(last["reason"])}: "{harmless(last["line"])}"'
    if used_s is not None:
        lines = f"; {counted(refused, 'line')} refused{told}" if refused else ""
        noisy = port.get("noisy", 0)
        lines += f"; {counted(noisy, 'line')} with noise" if noisy else ""
        return f"last read {span(used_s)} ago{lines}"
    if refused:
        return f"{refused:,} {'LINE' if refused == 1 else 'LINES'} REFUSED{told}"
    return "no reading has come yet"


def _unit_words(unit: dict[str, Any], now_us: int) -> str:
    """Say whether a unit answers, and which registers it refuses."""
    fault = f": {escaped(unit['fault'])}" if unit["fault"] else ""
    if not unit["answers"]:
        if not fault:
            return "has not answered yet"
        since_us = unit.get("since_us")
        how_long = "" if since_us is None else f" for {span((now_us - since_us) / 1e6)}"
        how = "DOES NOT ANSWER" if "no answer" in fault else "CANNOT BE READ"
        return f"{how}{how_long}{fault}"
    refused = unit.get("refused", {})
    if not refused:
        return f"answers{fault}"
    asked = unit.get("asked", len(refused))
    gives = "answers, but gives NOTHING: " if len(refused) == asked else "answers, "
    why = "; ".join(f"{escaped(name)}: {escaped(words)}" for name, words in islice(refused.items(), NAMED_MAX))
    more = f"; and {len(refused) - NAMED_MAX} more" if len(refused) > NAMED_MAX else ""
    # A register may get no answer at all, while others are refused.
    last = f"; last{fault}" if unit["fault"] not in {None, *refused.values()} else ""
    return f"{gives}{len(refused)} of {counted(asked, 'register')} refused: {why}{more}{last}"


def _by_reason(counts: dict[str, int]) -> str:
    if not counts:
        return ""
    return ": " + ", ".join(
        f"{f'{count:,}' if count else 'unknown'} {escaped(reason)}" for reason, count in sorted(counts.items())
    )
