"""Says whether all is well, else what is wrong, what it means and what to do, for the status page. No I/O."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from operator import itemgetter
from typing import Any, Final, Literal

from msgspec import Struct

from gateway.buffer.losses import OWN_LOSSES
from gateway.buffer.shares import AboveShare
from gateway.buffer.state import ABOVE_SHARE_MEANS
from gateway.buffer.status import BufferStatus
from gateway.buffer.wear import WriteBudget
from gateway.clock.report import ClockView, hold_words
from gateway.config.running_settings import RESTART
from gateway.host.disk_health import Trouble
from gateway.host.terminal_text import YEAR_S, counted, shortened, size, span
from gateway.settings import NO_SOURCE, Settings
from gateway.uplink.memory import UplinkState

Level = Literal["bad", "warn", "note"]
NAMED_MAX: Final = 3
"""Devices, topics and ports that an alarm names one by one."""
NAME_CHARACTERS_MAX: Final = 64
"""Characters of a name that an alarm repeats."""
NEARLY_FULL: Final = 0.8
"""Share of `buffer.bytes_max` from which a buffer is nearly full."""
SOON_FULL_S: Final = 86_400.0
"""Seconds until it is full, below which a buffer is nearly full."""
CARD_DAYS_MIN: Final = 365.0
"""Days that a memory card must last, or it is an alarm."""
LOST_TOLD_S: Final = 3_600.0
"""Seconds for which losses, and steps of the clock, are an alarm."""
UNHEARD_TOLD_S: Final = 60.0
"""Seconds after start before it is an alarm that no device was heard."""
REFUSED_TOLD_S: Final = 600.0
"""Seconds for which a refused log-in is an alarm."""
PILE_MIN: Final = 1_000
"""Waiting readings and events that are worth a word although all is well."""
START_S: Final = 20.0
"""Seconds after start before it is an alarm that Kafka has not answered."""
_WHEN_FULL: Final = {
    "refuse": "sensors are asked to keep what they have; those that cannot lose it",
    "drop-oldest": "the oldest readings are dropped to make room, and counted as lost",
}
_ORDER: Final = {"bad": 0, "warn": 1, "note": 2}


class Alarm(Struct, frozen=True):
    """One thing that is not well."""

    level: Level
    subject: str
    words: str
    """The trouble in a sentence."""
    means: str = ""
    todo: str = ""


class Silent(Struct, frozen=True):
    """A device that was heard before, and is silent now."""

    device: str
    silent_s: float
    usually_s: float
    """Its longest pause before, in seconds."""


class Facts(Struct, frozen=True):
    """All that the headline and the alarms are made of, at about one moment."""

    settings: Settings
    up_s: float
    """Seconds since the gateway started."""
    boottime_us: int
    wall_s: float
    """This box's clock in seconds since 1970, right or not."""
    rows: int
    bytes_used: int
    full: bool
    failing: str | None
    """SQLite's words while commits fail."""
    uplink: UplinkState
    clock: ClockView
    found: BufferStatus | None
    """Contents of the file; None if it could not be read."""
    room_bytes: int | None
    hours_until_full: float | None
    budget: WriteBudget | None
    disk_troubles: tuple[Trouble, ...]
    """Troubles that the disk, or its file system, reports."""
    disk_free_bytes: int | None
    lost: int
    """Readings gone for good: since the start, and earlier ones that were not reported."""
    lost_s: float | None
    """Seconds since the last loss; None if there was none."""
    logins: dict[str, Any]
    """State of the devices' file, as the MQTT listener knows it."""
    settings_changed: bool
    """Whether the file's settings differ from those that the gateway was started with."""
    refused: tuple[dict[str, Any], ...]
    """Refused log-ins and the reasons (`Refusals.lately`), the newest first."""
    counts: dict[str, int]
    serial: dict[str, Any]
    brokers: dict[str, Any]
    devices: int
    heard: int
    """Devices heard since the start and not silent."""
    silent: tuple[Silent, ...]
    """Longest first."""
    missing: tuple[tuple[str, int], ...]
    """Devices with missing sequence numbers, and the least number of these: most first."""
    findings: tuple[tuple[str, str], ...]
    """Devices with something to mend, and the words on it."""
    above_share: Sequence[AboveShare] = ()
    """Some of the devices that were kept to their share of the buffer in the last minute, by what they hold."""
    above_share_devices: int = 0
    """Number of all such devices."""


class Headline(Struct, frozen=True):
    """The sentence on top of the page."""

    level: Literal["well", "note", "warn", "bad"]
    words: str
    means: str
    todo: str


def headline(facts: Facts, alarms: Sequence[Alarm]) -> Headline:
    """Return the worst alarm, or that all is well: only if no alarm asks for something to be done."""
    worst = alarms[0] if alarms else None
    if worst is not None and worst.level != "note":
        return Headline(worst.level, worst.words, worst.means, worst.todo)
    notes = sum(bool(alarm.todo) for alarm in alarms)
    if not notes:
        return Headline("well", f"All is well: {_well_words(facts)}.", "", "")
    kafka = "Readings reach Kafka" if facts.uplink.up else "Kafka is being connected to"
    return Headline("note", f"{kafka}; {counted(notes, 'thing')} to look at.", "", "")


def _well_words(facts: Facts) -> str:
    heard = counted(facts.heard, "device") + (" is heard" if facts.heard == 1 else " are heard")
    if not facts.heard:
        heard = "no device has been heard yet"
    if not facts.uplink.up:
        waits = f"{facts.rows:,} readings and events wait for it" if facts.rows else "nothing waits"
        return f"{heard}, Kafka is being connected to, {waits}"
    # Some always wait for the next commit and for Kafka's answer: the card says how many.
    waits = f"{facts.rows:,} readings and events are on their way" if facts.rows >= PILE_MIN else "nothing piles up"
    return f"{heard}, Kafka takes the readings, {waits}"


def alarms(facts: Facts) -> list[Alarm]:
    """Return all alarms, the worst first."""
    clock = list(_clock(facts))
    holds = facts.uplink.waits_for_clock
    # Within a level, an alarm about all readings stands before one about some sensors, and that before the rest.
    found = [
        *_disk(facts),
        *_buffer(facts),
        *_uplink(facts),
        *(clock if holds else ()),
        *_losses(facts),
        *_devices_file(facts),
        *_serial(facts.serial),
        *_brokers(facts.brokers),
        *_log_ins(facts),
        *_devices(facts),
        *(() if holds else clock),
        *_settings(facts),
        *_quarantine(facts),
        *_wear(facts),
    ]
    if not facts.settings.has_source:
        found.append(Alarm("bad", "Sensors", NO_SOURCE[0].upper() + NO_SOURCE[1:]))
    return sorted(found, key=lambda alarm: _ORDER[alarm.level])


# -- the box ----------------------------------------------------------------------------------------


def _disk(facts: Facts) -> Iterator[Alarm]:
    if facts.failing:
        yield Alarm(
            "bad",
            "Disk",
            f"The disk fails: {_sentence(facts.failing)}",
            "No reading is acknowledged until it works again; sensors keep what they have.",
            "See that the card or disk is there and has room; if it stays so, replace it. sluice check says more.",
        )
    for name in facts.found.set_aside if facts.found is not None else ():
        yield Alarm(
            "warn",
            "Disk",
            f"The buffer's file was found corrupt and set aside ({name}).",
            "What could be read of it was saved.",
            "Replace the memory card if this happens again. Remove that file once you need nothing more of it.",
        )


def _buffer(facts: Facts) -> Iterator[Alarm]:
    share = facts.bytes_used / facts.settings.buffer.bytes_max
    then = _WHEN_FULL[facts.settings.buffer.when_full]
    if facts.full:
        yield Alarm(
            "bad",
            "Buffer",
            f"The buffer is full ({size(facts.bytes_used)}).",
            f"{then[0].upper()}{then[1:]} (buffer.when_full).",
            "Get Kafka reached again, or give the buffer more room (buffer.bytes_max, free space on the disk).",
        )
        return
    yield from _above_share(facts)
    soon_s = None if facts.hours_until_full is None else facts.hours_until_full * 3_600
    is_soon = soon_s is not None and soon_s < SOON_FULL_S and not facts.uplink.up
    if share >= NEARLY_FULL or is_soon:
        lasts = "" if soon_s is None else f"At the present rate the room lasts for {span(soon_s)}. "
        yield Alarm(
            "warn",
            "Buffer",
            f"The buffer fills: {share:.0%} of its room is used.",
            f"{lasts}When it is full, {then}.",
            "Get Kafka reached again, or raise buffer.bytes_max.",
        )


def _above_share(facts: Facts) -> Iterator[Alarm]:
    if not facts.above_share:
        return
    named = [
        f"{shortened(each.device, NAME_CHARACTERS_MAX) or 'no known device'} ({size(each.bytes)})"
        for each in facts.above_share[:NAMED_MAX]
    ]
    more = facts.above_share_devices - len(named)
    means = ABOVE_SHARE_MEANS[facts.settings.buffer.when_full]
    yield Alarm(
        "bad",
        "Buffer",
        f"More than their share of the buffer is held by {', '.join(named)}{f' and {more:,} more' if more else ''}.",
        f"{means[0].upper()}{means[1:]}.",
        "See what they send: sluice devices revoke keeps out one that was stolen. Else get Kafka reached again, or "
        "raise buffer.bytes_max.",
    )


def _wear(facts: Facts) -> Iterator[Alarm]:
    for fails, words in facts.disk_troubles:
        yield Alarm("bad" if fails else "warn", "Disk", f"The disk needs a look: {_sentence(words)}")
    days = facts.budget.card_days if facts.budget is not None else None
    if days is not None and days < CARD_DAYS_MIN:
        yield Alarm(
            "warn",
            "Disk",
            f"A plain memory card lasts {span(days * 86_400)} at the rate of the last day.",
            "Then it fails, mostly without a word before.",
            "Use a card sold for endurance, or an SSD; or raise buffer.commit_delay_ms, which spares it.",
        )


def _settings(facts: Facts) -> Iterator[Alarm]:
    if facts.settings_changed:
        yield Alarm(
            "warn",
            "Settings",
            "The settings were changed since the gateway was started.",
            "It goes on with those of before.",
            RESTART,
        )


def _clock(facts: Facts) -> Iterator[Alarm]:
    clock = facts.clock
    if not clock.synced:
        since = span((facts.boottime_us - clock.since_us) / 1e6)
        gateway, uplink = facts.settings.gateway, facts.uplink
        go = "go with times that may be wrong, and are corrected once it is"
        if uplink.waits_for_clock:
            left = hold_words(gateway, uplink.clock_until_us, facts.boottime_us)
            then = f"Readings wait on this box for it, {left}."
        elif not uplink.was_reached and gateway.hold_unsynced_s:
            then = f"Once Kafka is reached, readings wait for it, {hold_words(gateway, None, facts.boottime_us)}."
        else:
            then = f"Readings {go}." if uplink.up else f"Once Kafka is reached, readings {go}."
        yield Alarm(
            "warn",
            "Clock",
            f"This box's clock has not been synced for {since}.",
            then,
            "See that time sync by NTP reaches its server (timedatectl). sluice check says more.",
        )
    elif clock.steps and clock.stepped_us is not None and facts.boottime_us - clock.stepped_us < LOST_TOLD_S * 1e6:
        ago = span((facts.boottime_us - clock.stepped_us) / 1e6)
        yield Alarm(
            "warn",
            "Clock",
            f"Somebody set this box's clock {ago} ago, by {clock.stepped_by_us / 1e6:+,.1f} s, although it was synced.",
            "One of the two times was wrong.",
            "See who does it: two time services, a person, a host.",
        )


# -- the uplink -------------------------------------------------------------------------------------


def since_s(facts: Facts) -> float | None:
    """Seconds for which the uplink is as it is; None if this box's clock was set in between."""
    if not facts.uplink.since:
        return None
    ago_s = facts.wall_s - facts.uplink.since
    return ago_s if -60 <= ago_s <= facts.up_s + 60 else None


def _uplink(facts: Facts) -> Iterator[Alarm]:
    uplink = facts.uplink
    if uplink.quota_used_up:
        until = "until this day of the network's ends"
        if uplink.quota_until is not None:
            until = f"until {datetime.fromtimestamp(uplink.quota_until + 30, UTC):%H:%M} UTC"
        yield Alarm(
            "warn",
            "Uplink",
            f"Nothing is sent {until}: the quota of the day is used up (kafka.bytes_per_day_max).",
            _safe(facts),
            "Raise it if the contract with the network allows.",
        )
    elif not uplink.up and (uplink.error is not None or facts.up_s > START_S):
        ago_s = since_s(facts)
        how_long = "" if ago_s is None else f" for {span(ago_s)}"
        what = "cannot be used" if uplink.barred else "has not been reached"
        why = _sentence(shortened(uplink.error or "no answer yet", 400))
        yield Alarm(
            "warn" if not facts.full else "bad",
            "Uplink",
            f"Kafka {what}{how_long}: {why}",
            _safe(facts),
            "Check the network and the settings under [kafka]: sluice check goes through the way step by step."
            if not uplink.barred
            else "Check the log-in, the certificates and their files: sluice check says which.",
        )
    if uplink.throttled_s:
        yield Alarm(
            "warn",
            "Uplink",
            "A quota of Kafka's holds this gateway back.",
            "What waits goes more slowly, and nothing is lost.",
            "Have producer_byte_rate raised for this gateway: sluice status says for whom.",
        )
    for topic, flaw in islice(uplink.refused_topics.items(), NAMED_MAX):
        yield Alarm(
            "warn",
            "Uplink",
            f"Kafka's topic {_name(topic)} is not written to: {_sentence(shortened(flaw, 400))}",
            "Its readings wait in the quarantine.",
            "Have the topic mended; they then go by themselves. sluice check has the command.",
        )
    if len(uplink.refused_topics) > NAMED_MAX:
        more = len(uplink.refused_topics) - NAMED_MAX
        yield Alarm("warn", "Uplink", f"And {counted(more, 'more topic')} of Kafka's cannot be written to.")
    if uplink.beyond_topics:
        device, readings = max(uplink.beyond_topics.items(), key=itemgetter(1))
        others = len(uplink.beyond_topics) - 1
        beside = f" (and {counted(others, 'other device')} too)" if others else ""
        yield Alarm(
            "warn",
            "Uplink",
            f"{_name(device)} sends for more new topics than this gateway makes{beside}.",
            f"They go to the quarantine: {counted(readings, 'reading')} of it today.",
            "Look at what the device sends. If that is right, create the topics, or raise "
            "kafka.topics_per_device_day_max or kafka.topics_created_max; if it is not, revoke its secret.",
        )
    if uplink.parked:
        first, why = next(iter(uplink.parked.items()))
        take = "takes" if len(uplink.parked) == 1 else "take"
        yield Alarm(
            "warn",
            "Uplink",
            f"{counted(len(uplink.parked), 'partition')} of Kafka's {take} nothing, such as {_name(first)}: "
            f"{_sentence(shortened(why, 200))}",
            "Their readings wait on disk, others go on.",
            "See to the cluster's brokers.",
        )


def _safe(facts: Facts) -> str:
    """Say what becomes of readings meanwhile, and for how long."""
    kept = f"{facts.rows:,} readings and events are safe on this box" if facts.rows else "Nothing waits yet"
    if facts.full or facts.room_bytes == 0:
        return f"{kept}; there is no room for more."
    if facts.hours_until_full is not None:
        return f"{kept}; its room lasts {_days(facts.hours_until_full * 3_600)} more."
    if facts.room_bytes is not None:
        return f"{kept}; there is room for {size(facts.room_bytes)} more."
    return f"{kept}."


def _days(seconds: float) -> str:
    """Write a span that is an estimate: no hours beside days."""
    return f"{seconds // 86_400:,.0f} days" if 2 * 86_400 <= seconds < 2 * YEAR_S else span(seconds)


# -- sensors ----------------------------------------------------------------------------------------


def _losses(facts: Facts) -> Iterator[Alarm]:
    if facts.lost and facts.lost_s is not None and facts.lost_s < LOST_TOLD_S:
        reasons = facts.found.losses.keys() - OWN_LOSSES if facts.found is not None else set[str]()
        why = f" ({', '.join(sorted(reasons))})" if reasons else ""
        yield Alarm(
            "bad",
            "Losses",
            f"{counted(facts.lost, 'reading')} {'is' if facts.lost == 1 else 'are'} lost for good{why}, the last "
            f"{span(facts.lost_s)} ago.",
            "Each is counted, and reported to Kafka.",
            "sluice buffer ls tells whose, and how many of each.",
        )


def _devices_file(facts: Facts) -> Iterator[Alarm]:
    if facts.logins.get("trouble"):
        yield Alarm(
            "warn",
            "Log-ins",
            f"The file of devices' secrets cannot be used as it is: {_sentence(facts.logins['trouble'])}",
            "Devices log in as before; what changed in it does not count."
            if facts.logins.get("kept")
            else "None of those that it names can log in until it can.",
        )


def _log_ins(facts: Facts) -> Iterator[Alarm]:
    refused = [each for each in facts.refused if each["ago_s"] < REFUSED_TOLD_S]
    for each in refused[:NAMED_MAX]:
        # The log's words: what is wrong, then what to do.
        why, _, todo = shortened(each["why"], 400).partition("; ")
        who = "A sensor's log-in" if each["user"] is None else f"The log-in of {_name(each['user'])}"
        yield Alarm(
            "warn",
            "Log-ins",
            f"{who} from {each['address']} was refused {span(each['ago_s'])} ago: {_sentence(why)}",
            "What that sensor measures does not come in.",
            _sentence(todo) if todo else "Correct that in the sensor. journalctl -u sluice says more.",
        )
    if len(refused) > NAMED_MAX:
        more = counted(len(refused) - NAMED_MAX, "more sensor")
        yield Alarm("warn", "Log-ins", f"And of {more} the log-in was refused: journalctl -u sluice names them.")


def _devices(facts: Facts) -> Iterator[Alarm]:
    silent = facts.silent
    if not facts.heard and not silent and facts.up_s > UNHEARD_TOLD_S and facts.settings.has_source:
        which = f"None of the {facts.devices:,} known devices" if facts.devices else "No device"
        yield Alarm(
            "warn",
            "Devices",
            f"{which} has been heard since the start, {span(facts.up_s)} ago.",
            "",
            "See that sensors have this box's address and port, and a secret of theirs (sluice devices add); of serial "
            "lines, that they are plugged in. sluice check looks at each entrance.",
        )
    if len(silent) == 1:
        one = silent[0]
        yield Alarm(
            "warn",
            "Devices",
            f"{_name(one.device)} has been silent for {span(one.silent_s)}.",
            f"Before, it never paused for more than {span(max(1.0, one.usually_s))}." if one.usually_s else "",
            "Check its power, and its line or radio.",
        )
    elif silent:
        named = ", ".join(f"{_name(each.device)} for {span(each.silent_s)}" for each in silent[:NAMED_MAX])
        more = f", and {len(silent) - NAMED_MAX:,} more" if len(silent) > NAMED_MAX else ""
        yield Alarm(
            "warn",
            "Devices",
            f"{len(silent):,} devices are silent: {named}{more}.",
            "",
            "Check their power, and their line or radio.",
        )
    by_words: dict[str, list[str]] = {}
    for device, words in facts.findings:
        by_words.setdefault(words, []).append(device)
    for words, names in islice(by_words.items(), NAMED_MAX):
        more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
        yield Alarm("warn", "Devices", f"{', '.join(map(_name, names[:NAMED_MAX]))}{more}: {_sentence(words)}")
    if len(by_words) > NAMED_MAX:
        yield Alarm("warn", "Devices", f"Of {counted(len(facts.findings), 'device')} something is to be mended.")
    if facts.missing:
        named = ", ".join(f"{_name(device)} (≥ {count:,})" for device, count in facts.missing[:NAMED_MAX])
        more = f" and {len(facts.missing) - NAMED_MAX:,} more" if len(facts.missing) > NAMED_MAX else ""
        yield Alarm(
            "note",
            "Devices",
            f"Readings are missing of {named}{more}.",
            "By the sensors' own numbers; they may come yet, if the sensors kept them.",
            "If they do not, look at power, and at the line or radio.",
        )
    unnamed = facts.counts.get("identity-missing", 0)
    if unnamed:
        yield Alarm(
            "note",
            "Devices",
            f"{counted(unnamed, 'reading')} came without the boot and seq that their route is to find (identity).",
            "They are stored, but twice if they are sent again.",
            "Correct what these sensors send.",
        )


def _serial(serial: dict[str, Any]) -> Iterator[Alarm]:
    for name, port in serial.get("ports", {}).items():
        if port.get("rivals"):
            yield Alarm(
                "bad",
                "Serial",
                f"{_name(name)} is read by other programs too.",
                f"Each gets a part of what comes: {_sentence(port['rivals'])}",
            )
        if port.get("shared"):
            yield Alarm("warn", "Serial", f"One name stands on several ports: {_sentence(port['shared'])}")
        if port.get("trouble"):
            yield Alarm("warn", "Serial", f"{_name(name)}: {_sentence(port['trouble'])}")
        units = port.get("units", {})
        unread = [device for device, unit in units.items() if not unit["answers"] and unit["fault"]]
        if unread:
            named = ", ".join(map(_name, unread[:NAMED_MAX]))
            yield Alarm(
                "warn",
                "Serial",
                f"{counted(len(unread), port['kind'] + ' unit')} on {_name(name)} cannot be read: {named}.",
                _sentence(f"{_name(unread[0])} at the last: {units[unread[0]]['fault']}"),
                "Where there is no answer, check their power, wires, address and baud.",
            )
    yield from _absent_ports(serial)


def _absent_ports(serial: dict[str, Any]) -> Iterator[Alarm]:
    for name, reason in serial.get("unopened", {}).items():
        yield Alarm("bad", "Serial", f"{_name(name)} cannot be opened: {_sentence(reason)}")
    gone = serial.get("gone", {})
    for name, port in gone.items():
        last = ", ".join(map(_name, port["devices"][:NAMED_MAX]))
        yield Alarm(
            "bad",
            "Serial",
            f"{_name(name)} has been gone for {span(port['gone_s'])}.",
            "It was unplugged, or has no power" + (f"; last heard there: {last}." if last else "."),
            "Plug it in again.",
        )
    for name in serial.get("missing", []):
        if name not in gone:
            yield Alarm(
                "warn", "Serial", f"{_name(name)} is not there.", "", "Plug it in, or mend the settings under [serial]."
            )
    for name, words in serial.get("awaited", {}).items():
        yield Alarm("note", "Serial", f"{_name(name)}: {_sentence(words)}")


def _brokers(brokers: dict[str, Any]) -> Iterator[Alarm]:
    for name, broker in brokers.items():
        if not broker["connected"]:
            yield Alarm(
                "bad",
                "Broker",
                f"The site's MQTT broker {_name(name)} is not connected.",
                "Nothing comes from its sensors.",
                "Check that it runs; the gateway's log says why it is not reached (journalctl -u sluice).",
            )
        for refused in broker["refused"][:NAMED_MAX]:
            yield Alarm("bad", "Broker", f"The site's MQTT broker {_name(name)} refuses {_name(refused)}.")


def _quarantine(facts: Facts) -> Iterator[Alarm]:
    if facts.found is None or not facts.found.quarantined:
        return
    reasons = ", ".join(
        f"{count:,} {_name(reason)}"
        for reason, count in sorted(facts.found.quarantine_reasons.items(), key=lambda each: -each[1])[:NAMED_MAX]
    )
    yield Alarm(
        "note",
        "Quarantine",
        f"{counted(facts.found.quarantined, 'message')} could not be forwarded: {reasons}.",
        "They are kept on this box.",
        "sluice buffer quarantine ls says what to do about each reason.",
    )


def _sentence(words: str) -> str:
    return words if words.endswith((".", "?", "!")) else f"{words}."


def _name(name: str) -> str:
    return shortened(name, NAME_CHARACTERS_MAX)
