"""Makes the lines of `sluice status` from what was read of the file and from the daemon's answer. No I/O."""

import math
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from gateway.buffer.state import ABOVE_SHARE_MEANS, device_name
from gateway.buffer.status import told
from gateway.buffer.wear import SEEN_S_MIN
from gateway.clock.report import hold_words, known_words
from gateway.commands.status.device_table import heading, rate
from gateway.config.running_settings import changed_words, digest, running_settings
from gateway.devices.listing import not_heard_words
from gateway.host.disk_health import health_words, troubles
from gateway.host.terminal_text import YEARS_FROM_S, counted, escaped, harmless, size, span, utc
from gateway.serial_lines.kinds import NAMES
from gateway.settings import NO_SOURCE

if TYPE_CHECKING:
    from gateway.buffer.status import BufferStatus, DeviceStatus, Now
    from gateway.commands.buffer_commands import RoomLeft
    from gateway.commands.status.device_table import DeviceRow
    from gateway.host.disk_health import Disk
    from gateway.settings import Settings

INDENT = 12
"""Columns before the text of a line, and before a wrapped line."""
LIVE_AGE_SHOWN_S = 5.0
"""Seconds for which new readings may wait before a line says so. They always wait a little, to be sent together."""
DEVICES_MAX = 20
"""Most devices that are named one by one. If there are more, those silent for longest are named."""
NAMED_MAX = 5
"""Most topics, partitions or devices that are named one by one."""
_BEGUN_BEFORE_S = 60.0
"""Seconds within which two readings of a clock agree if nobody set it in between."""
_DAYS_FROM_S = 2 * 86_400.0
_BESIDE = " " * INDENT
_CANNOT_ACKNOWLEDGE = (
    f"{NAMES} cannot acknowledge: readings that come while nothing can be stored are lost, and counted"
)
_WHEN_FULL = {
    "refuse": "readings are held unacknowledged until Kafka has taken some (buffer.when_full)",
    "drop-oldest": "the oldest readings are dropped to make room, and counted as lost (buffer.when_full)",
}


@dataclass(frozen=True, slots=True)
class Glance:
    """Everything that `sluice status` shows, read at about one moment."""

    settings: "Settings"
    found: "BufferStatus"
    answer: dict[str, Any] | None
    """Daemon's answer to `state` (`gateway.daemon.control`); None if no daemon runs, or it did not answer."""
    unheard: str
    """Reason why a running daemon did not answer; empty if it did."""
    room: "RoomLeft"
    backlog_rows: int
    """Waiting rows of other lanes than the live one."""
    now: "Now"
    wall_s: float
    """Seconds since 1970 by this box's clock, be it right or not."""
    zone: tzinfo | None = None
    """Reader's time zone; None for this box's."""
    devices: "Sequence[DeviceRow] | None" = None
    """Devices in the daemon's memory; None if it was not asked, or did not answer."""
    not_heard: tuple[str, ...] = ()
    """Devices that may log in and were not heard yet, as far as the daemon tells."""
    to_start: str = ""
    """Command that starts the daemon, if no daemon runs."""
    disk: "Disk | None" = None
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


class _Uplink(Struct, frozen=True):
    """`gateway.uplink.memory.UplinkState` in the daemon's answer. A daemon of another version may say less."""

    up: bool = False
    error: str | None = None
    barred: bool = False
    since: float | None = None
    waits_for_clock: bool = False
    clock_until_us: int | None = None
    new_clocks: int = 0
    dates_passed: float | None = None
    quota_used_up: bool = False
    quota_until: float | None = None
    throttled_s: float = 0.0
    live_oldest_us: int | None = None
    parked: dict[str, str] = {}
    refused_topics: dict[str, str] = {}
    beyond_topics: dict[str, int] = {}
    bytes_per_s: int = 0


_NOT_OUR_MQTT = {
    "unsupported-protocol-level": "clients of another version of MQTT; set them to 3.1.1",
    "mosquitto-bridge-level": "a mosquitto bridge first asks for its own version, and then for 3.1.1; "
    "try_private false in its settings saves the first try",
    "http-on-mqtt-port": "a browser, or a client that is set to WebSocket (ws://); set it to mqtt://",
    "tls-on-plain-port": "clients that begin with TLS; have them connect to mqtt_listener.tls.port, or without TLS",
}
"""By reason: who speaks another protocol to the MQTT port, and what to do."""
_TIMES = {
    "time-missing": "came without the time that their route must find (time); correct what these sensors send",
    "tick-unreadable": "came with a tick that cannot be read; correct what these sensors send: an integer from 0 to "
    "4294967295, without quotes",
    "device-time-ahead": "came with a time too far ahead of their receipt (gateway.time_ahead_s_max): set the "
    "clocks of these sensors",
    "device-time-behind": "came with a time too far behind their receipt (gateway.time_behind_s_max): set the "
    "clocks of these sensors, and see that they send milliseconds if the route says timestamp",
}
"""By count: what is wrong with readings' times, and what to do. Such readings get the time of their receipt."""


def status_lines(seen: Glance) -> Iterator[str]:
    """Lines of the status: one for each part that is well, more for others. Wrap them at `INDENT`; they are safe."""
    found, settings = seen.found, seen.settings
    answer = seen.answer or {}
    yield from _gateway_lines(seen, answer)
    if answer.get("uplink") is not None:
        yield from _uplink_lines(seen, msgspec.convert(answer["uplink"], _Uplink))
    yield from _traffic_lines(seen, answer)
    yield from _buffer_lines(seen)
    yield from _disk_lines(seen)
    if answer.get("clock"):
        yield _clock_line(seen, answer["clock"])
    if not settings.has_source:
        yield f"sources     {NO_SOURCE}"
    yield from _input_lines(answer, seen.now.boottime_us)
    if found.quarantined:
        yield f"quarantine  {found.quarantined:,} kept on this box{_by_reason(found.quarantine_reasons)}"
        yield f"{_BESIDE}sluice buffer quarantine ls says what to do"
    else:
        yield "quarantine  empty"
    if found.losses:
        yield f"lost        {sum(found.losses.values()):,} not reported to Kafka yet{_by_reason(found.losses)}"
    if answer.get("lost_told"):
        label = _BESIDE if found.losses else "lost        "
        lost = counted(answer["lost_told"], "reading")
        yield f"{label}{lost} since the start, reported on {settings.kafka.events_topic}"
    if seen.devices is not None:
        yield f"devices     {heading(seen.devices)}"
        if seen.not_heard:
            yield f"{_BESIDE}{escaped(not_heard_words(seen.not_heard))}"
        return
    devices = f"{len(found.devices):,}" if found.devices else "none yet"
    send = "sends a sequence of its own" if len(found.devices) == 1 else "send a sequence of their own"
    ports = (answer.get("serial") or {}).get("ports", {})
    beside = f" ({NAMES} are under serial)" if any(map(_is_mute, ports.values())) else ""
    yield f"devices     {devices} that {send}{beside}"
    yield from _device_lines(seen)


def _gateway_lines(seen: Glance, answer: dict[str, Any]) -> Iterator[str]:
    """Name of the gateway, whether it runs, and whether its settings have changed."""
    found, settings = seen.found, seen.settings
    running = running_settings(answer)
    name = settings.gateway.id if running is None else running.gateway
    yield f"gateway     {escaped(name)}, {'running' if found.running else 'not running'}"
    if running is not None and running.digest != digest(settings):
        yield f"{_BESIDE}SETTINGS {changed_words(running, settings)}"
    if not found.running and seen.to_start:
        yield f"{_BESIDE}{escaped(seen.to_start)}"
    if seen.unheard:
        yield f"{_BESIDE}its state is not known: {escaped(seen.unheard)}"


def _traffic_lines(seen: Glance, answer: dict[str, Any]) -> Iterator[str]:
    """Readings since the start, and the rates now."""
    counts, uplink = answer.get("counts", {}), answer.get("uplink") or {}
    if "readings" not in counts:
        return
    now = ""
    if seen.rates is not None:
        rates = seen.rates
        now = f"{rate(rates.readings)} in, {rate(rates.sent)} to Kafka, {size(rates.wire_bytes)}/s on the uplink; "
    sent = f", {uplink['sent']:,} readings and events to Kafka" if "sent" in uplink else ""
    # Sensors send a reading again if they did not see its acknowledgement.
    again = f" ({counts['duplicate']:,} of them sent again: stored once)" if counts.get("duplicate") else ""
    yield f"readings    {now}since the start {counts['readings']:,} came in{again}{sent}"


def _clock_line(seen: Glance, clock: dict[str, Any]) -> str:
    if not clock.get("synced"):
        return "clock       NOT SYNCED: this box's time may be wrong; sluice check says what to do"
    steps = clock.get("steps", 0)
    stepped = "" if not steps else f"; SET {'once' if steps == 1 else f'{steps:,} times'} since the start"
    since_us = clock.get("since_us")
    since = "" if since_us is None else f" for {span((seen.now.boottime_us - since_us) / 1e6)}"
    return f"clock       {known_words(seen.settings.gateway, clock.get('error_us'), since)}{stepped}"


def _disk_lines(seen: Glance) -> Iterator[str]:
    """Disk's health, as far as it is known, and how much is written to it."""
    room = seen.room
    parts = []
    if seen.disk is not None and seen.disk.says_something:
        parts.append(health_words(seen.disk))
    if room.disk_bytes_per_day is not None:
        lasts = "" if room.card_days is None else f", by which a cheap card lasts {span(room.card_days * 86_400)}"
        parts.append(f"{size(room.disk_bytes_per_day)} a day are written{lasts}")
    elif seen.found.running and room.seen_s < SEEN_S_MIN:
        parts.append("how much is written a day is not known yet")
    if parts:
        yield f"disk        {'; '.join(parts)}"
    if seen.disk is not None:
        for trouble in troubles(seen.disk, seen.settings.buffer.path.parent):
            yield f"{_BESIDE}{escaped(trouble.words)}"


def _device_lines(seen: Glance) -> Iterator[str]:
    devices = seen.found.devices
    rest: tuple[DeviceStatus, ...] = ()
    if len(devices) > DEVICES_MAX:
        by_silence = sorted(devices, key=lambda device: -_silent_s(seen, device))
        devices, rest = tuple(by_silence[:DEVICES_MAX]), tuple(by_silence[DEVICES_MAX:])
    for device in devices:
        doubtful = f"{utc(device.seen_us)} UTC, by a clock that may be wrong"
        last = doubtful if device.seen is None else told(device.seen, seen.now)
        yield f"{_BESIDE}{escaped(device.device)}, last stored {last}"
    if rest:
        oldest_s = _silent_s(seen, rest[0])
        age = f", none older than {span(math.ceil(oldest_s))}" if oldest_s < math.inf else ""
        yield f"{_BESIDE}and {len(rest):,} more{age} (sluice status --json has all)"


def _silent_s(seen: Glance, device: "DeviceStatus") -> float:
    """Seconds since its last reading was stored; infinite if that is not known."""
    age_s = None if device.seen is None else seen.now.age_s(device.seen)
    return math.inf if age_s is None else age_s


# -- the uplink -----------------------------------------------------------------------------------


def _uplink_lines(seen: Glance, uplink: _Uplink) -> Iterator[str]:
    if uplink.up:
        yield from _up_lines(seen, uplink)
    elif uplink.quota_used_up:
        until = "for a day at most: this box does not know the date"
        if uplink.quota_until is not None:
            # By some clocks the day ends a moment before midnight. Round to the nearest minute.
            until = f"until {_clock_time(seen, uplink.quota_until + 30)}"
        yield (
            "uplink      WAITS: the quota of the day is used up (kafka.bytes_per_day_max), "
            f"{until}; {_safe(seen)}{_room(seen)}"
        )
        yield from _what_then(seen)
    elif uplink.error is None:
        yield f"uplink      no answer from Kafka yet: the first attempt is under way{_since(seen, uplink)}"
    else:
        what = "CANNOT BE USED" if uplink.barred else "UNREACHABLE"
        why = escaped(uplink.error)
        end = "" if why.endswith(("?", ".")) else ";"
        yield f"uplink      Kafka {what}{_since(seen, uplink)}: {why}{end} {_safe(seen)}{_room(seen)}"
        yield from _what_then(seen)
        yield f"{_BESIDE}sluice check says what to do"
    if uplink.throttled_s:
        yield (
            f"{_BESIDE}HELD BACK by a quota of Kafka's, for {span(max(1.0, uplink.throttled_s))} at the last request: "
            "readings go more slowly, and nothing is lost; if that is too slow, have producer_byte_rate raised for the "
            f"client id {escaped(seen.settings.gateway.id)}, or for its user (kafka-configs.sh)"
        )
    if uplink.dates_passed is not None:
        passed = datetime.fromtimestamp(uplink.dates_passed, UTC)
        yield (
            f"{_BESIDE}this box's clock cannot be trusted: until it is synced, only brokers' certificates that ended "
            f"before {passed:%Y-%m-%d} are refused, and the dates of others are not checked"
        )
    for partition, why in islice(uplink.parked.items(), NAMED_MAX):
        yield f"{_BESIDE}partition {escaped(partition)} {escaped(why)}: its readings wait on disk, others go on"
    yield from _rest(uplink.parked, "partitions that take nothing now")
    yield from _topic_lines(uplink)


def _topic_lines(uplink: _Uplink) -> Iterator[str]:
    for topic, flaw in islice(uplink.refused_topics.items(), NAMED_MAX):
        yield f"topic       {escaped(topic)} is NOT WRITTEN TO: {escaped(flaw)}"
    yield from _rest(uplink.refused_topics, "topics that are not written to")
    if uplink.refused_topics:
        them = "it" if len(uplink.refused_topics) == 1 else "them"
        yield f"{_BESIDE}readings for {them} wait in the quarantine, and are sent by themselves once that is corrected"
    if any("--command-config" in flaw for flaw in uplink.refused_topics.values()):
        from gateway.kafka.topics import ADMIN_WORDS  # noqa: PLC0415 - it imports a Kafka client

        yield f"{_BESIDE}{ADMIN_WORDS}"
    for device, readings in islice(uplink.beyond_topics.items(), NAMED_MAX):
        yield (
            f"topics      {escaped(device)} needs MORE NEW TOPICS than this gateway makes: "
            f"{counted(readings, 'reading')} of today in the quarantine; create the topics, raise "
            "kafka.topics_per_device_day_max or kafka.topics_created_max, or revoke its secret (sluice devices revoke)"
        )
    yield from _rest(uplink.beyond_topics, "devices that need more new topics than are made")


def _up_lines(seen: Glance, uplink: _Uplink) -> Iterator[str]:
    kafka = seen.settings.kafka
    # Small requests take as long as their answers, so they show only a lower bound of the link's speed.
    pace = f"; the link was seen to carry at least {size(uplink.bytes_per_s)}/s" if uplink.bytes_per_s else ""
    bound = f"; no more than {size(kafka.bytes_per_s_max)}/s is used (kafka.bytes_per_s_max)"
    yield f"uplink      up{_since(seen, uplink)}{pace}{bound if kafka.bytes_per_s_max else ''}"
    if uplink.waits_for_clock:
        left = hold_words(seen.settings.gateway, uplink.clock_until_us, seen.now.boottime_us)
        yield (f"{_BESIDE}READINGS WAIT on this box until its clock is synced, {left}; sluice check says what to do")
    elif (seen.answer or {}).get("clock", {}).get("synced") is False:
        yield (
            f"{_BESIDE}READINGS GO with times that may be wrong: this box's clock is not synced, and readings wait for "
            f"it for at most gateway.hold_unsynced_s = {span(seen.settings.gateway.hold_unsynced_s)}; once it is, a "
            "correction puts the times right; sluice check says what to do"
        )
    if uplink.new_clocks:
        yield (
            f"{_BESIDE}readings of {counted(uplink.new_clocks, 'sensor')} that began a moment ago wait until the "
            "sensor's clock is known, at most for gateway.hold_new_clock_s = "
            f"{span(seen.settings.gateway.hold_new_clock_s)}"
        )
    # If readings wait for the clock, readings of this boot wait too.
    if seen.backlog_rows and not uplink.waits_for_clock:
        how = "sent first, in their order" if kafka.drain == "oldest-first" else "sent beside new ones"
        backlog = f"{_readings_and_events(seen.backlog_rows)} from earlier {'is' if seen.backlog_rows == 1 else 'are'}"
        yield f"{_BESIDE}{backlog} still to go, {how} (kafka.drain)"
    # Without a backlog, the line "buffer" has the age of the oldest reading.
    if seen.backlog_rows and uplink.live_oldest_us is not None:
        waited_s = (seen.now.boottime_us - uplink.live_oldest_us) / 1e6
        if waited_s > LIVE_AGE_SHOWN_S:
            yield f"{_BESIDE}of the new readings, the oldest has waited for {span(waited_s)}"


def _since(seen: Glance, uplink: _Uplink) -> str:
    """Time of the uplink's last change by this box's clock, which may have been set since."""
    if uplink.since is None:
        return ""
    booted_s = seen.wall_s - seen.now.boottime_us / 1e6
    if not booted_s - _BEGUN_BEFORE_S <= uplink.since <= seen.wall_s + _BEGUN_BEFORE_S:
        # The daemon runs in this boot, so that time was noted before the clock was set.
        return " since before this box's clock was set"
    doubt = "" if seen.now.wall_us is not None else " (by this box's clock, which is not synced)"
    return f" since {_clock_time(seen, uplink.since)}{doubt}"


def _clock_time(seen: Glance, wall_s: float) -> str:
    """Format a time in the reader's zone: `10:02 CET` today, `2026-03-14 10:02 CET` otherwise."""
    try:
        then, now = (datetime.fromtimestamp(each, UTC).astimezone(seen.zone) for each in (wall_s, seen.wall_s))
    except (OverflowError, ValueError, OSError):
        return "no such date"
    return f"{then:%H:%M %Z}" if then.date() == now.date() else f"{then:%Y-%m-%d %H:%M %Z}"


def _safe(seen: Glance) -> str:
    if not seen.found.rows:
        return "nothing waits on disk"
    return f"{_readings_and_events(seen.found.rows)} safe on disk"


def _readings_and_events(count: int) -> str:
    return "1 reading or event" if count == 1 else f"{count:,} readings and events"


def _room(seen: Glance) -> str:
    """Room left: as a time if the intake is known, else in bytes."""
    room = seen.room
    if _is_full(seen) or not room.bytes:
        return ", no room for more"
    if room.hours_until_full is None:
        return f", room for {size(room.bytes)} more"
    return f", room for {_days(room.hours_until_full * 3_600)}"


def _what_then(seen: Glance) -> Iterator[str]:
    """Say what the time until it is full is based on, and what happens then."""
    room = seen.room
    if _is_full(seen):
        return  # the line "space" says it
    then = f"when full, {_WHEN_FULL[seen.settings.buffer.when_full]}"
    if not room.bytes:
        yield f"{_BESIDE}{then}"
    elif room.hours_until_full is not None:
        yield f"{_BESIDE}at the rate of the last {span(room.seen_s)} that sluice ran; {then}"
    elif room.seen_s < SEEN_S_MIN:
        yield f"{_BESIDE}how long that lasts is shown after {span(SEEN_S_MIN)} of running; {then}"
    else:
        yield f"{_BESIDE}nothing came in during the last {span(room.seen_s)} that sluice ran; {then}"


def _days(seconds: float) -> str:
    """Format an estimated span: days without hours."""
    return f"{seconds // 86_400:,.0f} days" if _DAYS_FROM_S <= seconds < YEARS_FROM_S else span(seconds)


def _rest(named: Sized, what: str) -> Iterator[str]:
    if len(named) > NAMED_MAX:
        yield f"{_BESIDE}and {len(named) - NAMED_MAX:,} more {what}"


# -- the buffer -----------------------------------------------------------------------------------


def _buffer_lines(seen: Glance) -> Iterator[str]:
    found, settings = seen.found, seen.settings
    if found.oldest is None:
        yield "buffer      empty: nothing waits for Kafka"
    else:
        waits = "the oldest" if _tells_what_waits(seen) else f"{counted(found.rows, 'row')} safe on disk, the oldest"
        yield f"buffer      {waits} of {told(found.oldest, seen.now)}"
    yield f"space       {size(found.bytes_used)}, {_used(seen):.1%} of buffer.bytes_max"
    failing = (seen.answer or {}).get("buffer", {}).get("failing")
    if failing:
        yield f"{_BESIDE}FAILING: {escaped(failing)}; nothing is acknowledged until it works again"
    elif _is_full(seen):
        yield f"{_BESIDE}FULL: {_WHEN_FULL[settings.buffer.when_full]}"
    yield from _above_share(seen)
    for name in found.set_aside:
        yield f"{_BESIDE}set aside as corrupt: {escaped(name)}; keep it until you need nothing more of it"


def _above_share(seen: Glance) -> Iterator[str]:
    """Name the devices that were kept to their share of the buffer in the last minute."""
    buffer = (seen.answer or {}).get("buffer", {})
    above = buffer.get("above_share") or ()
    if above:
        named = [f"{device_name(each['device'])} ({size(each['bytes'])})" for each in above[:NAMED_MAX]]
        more = buffer["above_share_devices"] - len(named)
        others = f" and {more:,} more" if more else ""
        means = ABOVE_SHARE_MEANS[seen.settings.buffer.when_full]
        yield f"{_BESIDE}ABOVE THEIR SHARE: {', '.join(named)}{others}: {means}"


def _tells_what_waits(seen: Glance) -> bool:
    """Tell whether the line "uplink" says how much waits, which it does while the uplink is down."""
    uplink = (seen.answer or {}).get("uplink") or {}
    return not uplink.get("up") and bool(uplink.get("error") or uplink.get("quota_used_up"))


def _used(seen: Glance) -> float:
    return seen.found.bytes_used / seen.settings.buffer.bytes_max


def _is_full(seen: Glance) -> bool:
    if seen.answer is None:
        return _used(seen) >= 1
    return bool(seen.answer.get("buffer", {}).get("full"))


# -- the sources ----------------------------------------------------------------------------------


def _input_lines(daemon: dict[str, Any], now_us: int) -> Iterator[str]:
    """State of the sources, as far as a running gateway tells. `now_us` is CLOCK_BOOTTIME."""
    for name, broker in daemon.get("mqtt_brokers", {}).items():
        state = "read from" if broker["connected"] else "NOT CONNECTED: the log says why"
        refused = f"; it refuses {', '.join(map(escaped, broker['refused']))}" if broker["refused"] else ""
        yield f"broker      {escaped(name)}: {state}{refused}"
    yield from _payload_lines(daemon)
    yield from _time_lines(daemon.get("counts", {}), daemon.get("counted_last", {}))
    counts = daemon.get("mqtt_listener", {})
    refusals = {reason: count for reason, count in counts.items() if reason not in {"connected", "disconnected"}}
    if refusals:
        yield f"listener    refused or ended since the start{_by_reason(refusals)}"
        for reason, words in _NOT_OUR_MQTT.items():
            if reason in refusals:
                yield f"{_BESIDE}{reason}: {words}"
    yield from _serial_lines(daemon.get("serial") or {}, now_us)


def _payload_lines(daemon: dict[str, Any]) -> Iterator[str]:
    """Count readings whose payloads are not what their routes declare, with devices and causes."""
    faults = daemon.get("payload_faults", {})
    unnamed, not_json = faults.get("identity-missing", ()), faults.get("payload-not-json", ())
    missing = daemon.get("counts", {}).get("identity-missing", 0)
    last = daemon.get("counted_last", {}).get("identity-missing")
    whose = "" if last is None or len(unnamed) > 1 else f" (the last: {escaped(last)})"
    if missing == 1:
        yield (
            f"identity    1 since the start{whose} came without the boot and seq that its route must find "
            "(identity): it is stored, but stored twice if it is sent again; correct what its sensor sends"
        )
    elif missing:
        yield (
            f"identity    {missing:,} since the start{whose} came without the boot and seq that their route must find "
            "(identity): they are stored, but a reading that is sent again is stored twice; correct what these sensors "
            "send"
        )
    yield from _fault_lines(unnamed)
    count = daemon.get("counts", {}).get("payload-not-json", 0)
    if count:
        yield (
            f"payloads    {counted(count, 'reading')} since the start came without the JSON that their routes declare "
            "(content_type): they are sent on unchanged, as application/octet-stream; correct what these sensors send, "
            "or content_type"
        )
    yield from _fault_lines(not_json)


def _fault_lines(faults: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Name each device with the cause of its last fault, and count its readings with a fault."""
    for fault in faults[:DEVICES_MAX]:
        times = counted(fault["readings"], "reading")
        yield f"{_BESIDE}{escaped(fault['device'])}: {escaped(fault['cause'])} ({times})"
    if len(faults) > DEVICES_MAX:
        yield f"{_BESIDE}and others; sluice devices names them all"


def _time_lines(counts: dict[str, int], last: dict[str, str]) -> Iterator[str]:
    """Count readings whose sensors sent no time, or a time that cannot be right."""
    for name, words in _TIMES.items():
        if counts.get(name):
            whose = f" (the last: {escaped(last[name])}; sluice devices says more)" if name in last else ""
            yield f"time        {counts[name]:,} since the start{whose} {words}"


def _serial_lines(serial: dict[str, Any], now_us: int) -> Iterator[str]:
    ports = serial.get("ports", {})
    for name, port in ports.items():
        yield f"serial      {escaped(name)}: {_port_words(port)}"
        if port.get("rivals"):
            yield f"{_BESIDE}READ BY OTHERS TOO, so each gets only a part of the input: {escaped(port['rivals'])}"
        if port.get("shared"):
            yield f"{_BESIDE}ONE NAME ON SEVERAL PORTS: {escaped(port['shared'])}"
        for device, unit in port.get("units", {}).items():
            yield f"{_BESIDE}{escaped(device)} {_unit_words(unit, now_us)}"
    for name, reason in serial.get("unopened", {}).items():
        yield f"serial      {escaped(name)}: CANNOT BE OPENED: {escaped(reason)}"
    for name, port in serial.get("gone", {}).items():
        yield f"serial      {escaped(name)}: {_gone_words(port)}"
    yield from _absent_lines(serial)
    if any(map(_is_mute, ports.values())):
        # One line for all ports that cannot acknowledge.
        yield f"serial      {_CANNOT_ACKNOWLEDGE}"


def _absent_lines(serial: dict[str, Any]) -> Iterator[str]:
    """Name ports that are missing, and patterns that find no port yet, which is no trouble."""
    for name in serial.get("missing", []):
        if name in serial.get("gone", {}):
            continue
        settings = "serial.ports (or the section that names it; sluice check lists the ports here)"
        yield f"serial      {escaped(name)}: NOT THERE: plug it in, or correct {settings}"
    for name, words in serial.get("awaited", {}).items():
        yield f"serial      {escaped(name)}: {escaped(words)}"


def _gone_words(port: dict[str, Any]) -> str:
    """Say for how long a port has been missing, and which sensors were heard on it."""
    devices = port["devices"]
    more = f" and {len(devices) - NAMED_MAX} more" if len(devices) > NAMED_MAX else ""
    named = f"{', '.join(map(escaped, devices[:NAMED_MAX]))}{more}"
    sensors = "sensor" if len(devices) == 1 else "sensors"
    return f"GONE for {span(port['gone_s'])} (unplugged, or no power); last heard there: {sensors} {named}"


def _is_mute(port: dict[str, Any]) -> bool:
    """Tell whether its sensors cannot get acknowledgements."""
    return not port.get("acknowledges", True)


def _port_words(port: dict[str, Any]) -> str:
    """Name the sensor on a port, and say how long ago it was heard."""
    if "units" in port:
        return f"{port.get('kind') or 'Modbus'}, {counted(len(port['units']), 'unit')}"
    trouble = escaped(port.get("trouble") or "")
    if port["device"] is None:
        return trouble or "no sensor has said its name yet"
    sensor = f"sensor {escaped(port['device'])}"
    if trouble:
        return f"{sensor}, {trouble}"
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
    asked = unit["asked"]
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
