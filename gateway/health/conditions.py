"""Decides from facts what is not well: what happened, what it means and what to do. No I/O.

The status page, `sluice status` and `sluice check` show these conditions. The codes stand in `docs/conditions.md`.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, Literal

from msgspec import Struct

from gateway.buffer.losses import OWN_LOSSES
from gateway.buffer.state import ABOVE_SHARE_MEANS
from gateway.clock.report import ClockView, hold_words
from gateway.condition_codes import CODES, LEVELS, Level
from gateway.config.running_settings import RESTART
from gateway.health.facts import Facts
from gateway.host.terminal_text import YEAR_S, counted, readings_and_events, shortened, size, span
from gateway.intake.route_topics import is_echo_topic
from gateway.settings import NO_SOURCE, Settings
from gateway.uplink.state import ONE_REPLICA, SLOW

NAMED_MAX: Final = 3
"""Devices, topics and ports that a condition names one by one."""
NAME_CHARACTERS_MAX: Final = 64
"""Characters of a name that a condition repeats."""
WORDS_MAX: Final = 400
"""Characters of others' words that a condition repeats."""
FLAW_MAX: Final = 1_200
"""Characters of a topic's flaw. It may end in a command, with long names in it, and a cut one would do harm."""
NEARLY_FULL: Final = 0.8
"""Share of `buffer.bytes_max` from which a buffer is nearly full."""
SOON_FULL_S: Final = 86_400.0
"""Seconds until it is full, below which a buffer is nearly full."""
CARD_DAYS_MIN: Final = 365.0
"""Days that a memory card must last, or there is a warning."""
LOST_TOLD_S: Final = 3_600.0
"""Seconds for which losses, and steps of the clock, are told."""
UNHEARD_TOLD_S: Final = 60.0
"""Seconds after start before an unheard device is told."""
REFUSED_TOLD_S: Final = 600.0
"""Seconds for which a refused log-in is told."""
PILE_MIN: Final = 1_000
"""Waiting readings and events that are worth a word although all is well."""
START_S: Final = 20.0
"""Seconds after start before it is told that Kafka has not answered."""
WHEN_FULL: Final = {
    "refuse": "sensors are asked to keep their readings, and those that cannot keep them lose them (buffer.when_full)",
    "drop-oldest": "the oldest readings are dropped to make room, and counted as lost (buffer.when_full)",
}
_CORRECT: Final = "Correct what these sensors send."
_COUNTED: Final = {
    "identity-missing": (
        "came without the boot and seq that their route is to find (identity)",
        "They are stored, but twice if they are sent again.",
        _CORRECT,
    ),
    "payload-not-json": (
        "came without the JSON that their routes declare (content_type)",
        "They are sent on unchanged, as application/octet-stream.",
        "Correct what these sensors send, or content_type.",
    ),
    "time-missing": ("came without the time that their route is to find (time)", "", _CORRECT),
    "tick-unreadable": (
        "came with a tick that cannot be read",
        "",
        "Correct what these sensors send: an integer from 0 to 4294967295, without quotes.",
    ),
    "device-time-ahead": (
        "came with a time too far ahead of their receipt (gateway.time_ahead_s_max)",
        "",
        CODES["device-time-ahead"].todo,
    ),
    "device-time-behind": (
        "came with a time too far behind their receipt (gateway.time_behind_s_max)",
        "",
        "Set the clocks of these sensors, and see that they send milliseconds if the route says timestamp.",
    ),
}
"""By count of readings that are not as declared: what is wrong with them, what it means and what to do."""
_WITHOUT_DISK: Final = (
    "Kafka takes readings without it, and they are acknowledged. Those of QoS 2 and a site's broker are not. If Kafka "
    "goes away too, none is acknowledged, and sensors keep what they have."
)
"""What it means that nothing can be written, while Kafka has readings before the disk."""
_DISK_FIRST: Final = {
    ONE_REPLICA: "one broker alone would have them (min.insync.replicas of the topic, kafka.one_replica_is_enough)",
    SLOW: "Kafka did not answer within buffer.disk_after_ms",
}
"""By reason: why the disk has a topic's readings before Kafka."""
_GET_TIME: Final = "Readings get the time of their receipt."


class Condition(Struct, frozen=True):
    """One thing that is not well."""

    code: str
    """Stable name, for programs."""
    level: Level
    subject: str
    words: str
    """What happened, in a sentence."""
    means: str = ""
    todo: str = ""

    @property
    def line(self) -> str:
        """All of it in a line."""
        return " ".join(filter(None, (self.words, self.means, self.todo)))


def _usual(code: str, level: Level, subject: str, words: str, means: str = "") -> Condition:
    """A condition with what is to be done about its code wherever it is read."""
    return Condition(code, level, subject, words, means, CODES[code].todo)


class Headline(Struct, frozen=True):
    """The sentence on top of the page."""

    level: Literal["well", "note", "warn", "bad"]
    words: str
    means: str = ""
    todo: str = ""
    code: str = ""
    """Code of the worst condition; empty if none is worse than a note."""


def headline(facts: Facts, found: Sequence[Condition]) -> Headline:
    """Return the worst condition, or that all is well: only if no condition asks for something to be done."""
    worst = found[0] if found else None
    if worst is not None and worst.level != "note":
        return Headline(worst.level, worst.words, worst.means, worst.todo, worst.code)
    notes = sum(bool(condition.todo) for condition in found)
    if not notes:
        return Headline("well", f"All is well: {_well_words(facts)}.")
    kafka = "Readings reach Kafka" if facts.uplink.up else "Kafka is being connected to"
    return Headline("note", f"{kafka}; {counted(notes, 'thing')} to look at.")


def _well_words(facts: Facts) -> str:
    heard = counted(facts.heard, "device") + (" is heard" if facts.heard == 1 else " are heard")
    if not facts.heard:
        heard = "no device has been heard yet"
    if not facts.uplink.up:
        wait = "waits" if facts.rows == 1 else "wait"
        waits = f"{readings_and_events(facts.rows)} {wait} for it" if facts.rows else "nothing waits"
        return f"{heard}, Kafka is being connected to, {waits}"
    # Some always wait for the next commit and for Kafka's answer: the card says how many.
    waits = f"{facts.rows:,} readings and events are on their way" if facts.rows >= PILE_MIN else "nothing piles up"
    return f"{heard}, Kafka takes the readings, {waits}"


def conditions(facts: Facts) -> list[Condition]:
    """Return all conditions, the worst first."""
    clock = list(_clock(facts))
    holds = facts.uplink.waits_for_clock
    # Within a level, a condition of all readings stands before one of some sensors, and that before the rest.
    found = [
        *_disk(facts),
        *_buffer(facts),
        *_uplink(facts),
        *(clock if holds else ()),
        *_losses(facts),
        *_devices_file(facts),
        *_serial(facts.serial),
        *_brokers(facts.brokers),
        *_commands(facts.commands),
        *_log_ins(facts),
        *_devices(facts),
        *(() if holds else clock),
        *_settings(facts),
        *_payloads(facts),
        *quarantined({} if facts.buffer_status is None else facts.buffer_status.quarantine_reasons),
        *_wear(facts),
        *_update(facts),
        *_fleet(facts),
    ]
    return sorted(found, key=lambda condition: LEVELS.index(condition.level))


# -- the box ----------------------------------------------------------------------------------------


def _disk(facts: Facts) -> Iterator[Condition]:
    if facts.failing:
        words = f"The disk fails: {_sentence(facts.failing)}"
        means = "No reading is acknowledged until it works again; sensors keep their readings."
        if facts.uplink.direct_topics:
            means = _WITHOUT_DISK
        todo = "See that the card or disk is there and has room; if it stays so, replace it. sluice check says more."
        yield Condition("disk-failing", "bad", "Disk", words, means, todo)
    set_aside, newer = ((), ()) if (found := facts.buffer_status) is None else (found.set_aside, found.newer)
    for name in set_aside:
        if name in newer:
            yield _of_newer_version(name)
            continue
        words = f"The buffer's file could not be used, and was set aside ({name})."
        means = "What could be read of it was saved."
        todo = (
            "If it was damaged, replace the memory card if this happens again. Remove that file once you need nothing "
            "more of it."
        )
        yield Condition("buffer-set-aside", "warn", "Disk", words, means, todo)


def _of_newer_version(name: str) -> Condition:
    words = f"A newer version wrote the buffer's file, so this one has set it aside ({name})."
    means = "Readings that wait in it go to Kafka once this box runs that version or a later one."
    return _usual("buffer-newer", "warn", "Disk", words, means)


def _buffer(facts: Facts) -> Iterator[Condition]:
    share = facts.bytes_used / facts.settings.buffer.bytes_max
    then = WHEN_FULL[facts.settings.buffer.when_full]
    if facts.full:
        words = f"The buffer is full ({size(facts.bytes_used)})."
        means = f"{_capital(then)}."
        if facts.uplink.direct_topics and facts.settings.buffer.when_full == "refuse":
            means = _WITHOUT_DISK
        yield _usual("buffer-full", "bad", "Buffer", words, means)
        return
    if facts.above_share:
        named = [f"{_name(each.device) or 'no known device'} ({size(each.bytes)})" for each in facts.above_share]
        words = f"More than their share of the buffer is held by {_listed(named, facts.above_share_devices)}."
        means = f"{_capital(ABOVE_SHARE_MEANS[facts.settings.buffer.when_full])}."
        yield _usual("above-share", "bad", "Buffer", words, means)
    soon_s = None if facts.hours_until_full is None else facts.hours_until_full * 3_600
    is_soon = soon_s is not None and soon_s < SOON_FULL_S and not facts.uplink.up
    if share >= NEARLY_FULL or is_soon:
        lasts = "" if soon_s is None else f"At the present rate the room lasts for {span(soon_s)}. "
        words = f"The buffer fills: {share:.0%} of its room is used."
        means = f"{lasts}When it is full, {then}."
        yield _usual("buffer-fills", "warn", "Buffer", words, means)


def _wear(facts: Facts) -> Iterator[Condition]:
    for fails, words in facts.disk_troubles:
        level: Level = "bad" if fails else "warn"
        yield Condition("disk-trouble", level, "Disk", f"The disk needs a look: {_sentence(words)}")
    if facts.card_days is not None and facts.card_days < CARD_DAYS_MIN:
        words = f"A plain memory card lasts {span(facts.card_days * 86_400)} at the rate of the last day."
        means = "Then it fails, mostly without a word before."
        todo = "Use a card sold for endurance, or an SSD; or raise buffer.commit_delay_ms, which spares it."
        if facts.uplink.up and not facts.uplink.direct_topics:
            todo = "Let Kafka have readings first: sluice check says how. Or use a card sold for endurance, or an SSD."
        yield Condition("card-wears-out", "warn", "Disk", words, means, todo)


def _update(facts: Facts) -> Iterator[Condition]:
    refused, update = facts.refused_update, facts.update
    if refused is not None:
        yield _usual("update-refused", "warn", "Update", _sentence(_capital(refused.words)))
    if update is None or update.result == "good":
        return
    words = _sentence(_capital(update.words))
    if update.result == "on-trial":
        yield Condition("update-on-trial", "note", "Update", words)
    else:
        todo = "Mend the cause, or install another version: sluice update FILE.raucb."
        yield Condition("update-went-back", "warn", "Update", words, "", todo)


def _fleet(facts: Facts) -> Iterator[Condition]:
    report = facts.fleet
    if report is None:
        return
    words = _sentence(_capital(shortened(report.words, WORDS_MAX)))
    if report.result == "on-trial":
        yield Condition("fleet-on-trial", "note", "Update", words)
    elif report.result in {"going-back", "went-back"}:
        yield _usual("fleet-went-back", "warn", "Update", words)
    elif report.result == "refused":
        yield _usual("fleet-refused", "warn", "Update", words)
    if report.unread:
        told = f"Nothing was taken in from the fleet's folder: {shortened(report.unread, WORDS_MAX)}"
        yield _usual("fleet-unread", "warn", "Update", _sentence(told), "This box stays as it is.")


def disk_always_first(settings: Settings) -> str:
    """Say why the disk has readings before Kafka, however quick Kafka is; empty if it has not."""
    buffer, kafka = settings.buffer, settings.kafka
    if buffer.disk_first:
        return "buffer.disk_first is set"
    if buffer.kafka_first_s > kafka.linger_s:
        return ""
    if not buffer.disk_after_ms:
        return "buffer.disk_after_ms is 0"
    link = "on a metered link " if kafka.is_metered else ""
    waits = f"{link}they wait {kafka.linger_s * 1000:g} ms for each other before they are sent"
    return f"{waits}, and buffer.disk_after_ms is only {buffer.disk_after_ms:g} ms"


def first_copy(facts: Facts) -> str:
    """Say where readings have their first durable copy, and why; empty if it is not known."""
    uplink = facts.uplink
    if why := disk_always_first(facts.settings):
        return f"the disk has readings first, because {why}"
    if not uplink.up:
        return "the disk has readings first, because Kafka is not reached"
    told = []
    if uplink.direct_topics:
        told.append(f"Kafka has the readings of {counted(uplink.direct_topics, 'topic')} first, and the disk is spared")
    for reason, why in _DISK_FIRST.items():
        named = [_name(topic) for topic, known in uplink.disk_first.items() if known == reason]
        if named:
            told.append(f"the disk has those of {_listed(named)} first, because {why}")
    return "; ".join(told)


def spared(facts: Facts) -> str:
    """Say how many rows the disk was spared, as a clause; empty if there were none."""
    today = facts.uplink.spared_today
    if today is None:
        # The date is unknown, or the gateway's version tells none.
        since_start = facts.counts.get("spared", 0)
        return f"the card was spared {readings_and_events(since_start)} since the start" if since_start else ""
    about = "about " if facts.uplink.spared_about else ""
    return f"the card was spared {about}{readings_and_events(today)} today (UTC)" if today else ""


def _settings(facts: Facts) -> Iterator[Condition]:
    if facts.settings_change is not None:
        yield settings_changed(facts.settings_change)
    if not facts.settings.has_source:
        yield Condition("no-source", "bad", "Sensors", f"{_capital(NO_SOURCE)}.")


def settings_changed(as_whom: str = "") -> Condition:
    """The gateway runs with other settings than its file has. `as_whom` names it if its name has changed."""
    means = f"It goes on with those of before{as_whom}."
    words = "The settings were changed since the gateway was started."
    return Condition("settings-changed", "warn", "Settings", words, means, f"Run {RESTART}.")


def _clock(facts: Facts) -> Iterator[Condition]:
    clock = facts.clock
    if not clock.synced:
        how_long = f" for {span((facts.boottime_us - clock.since_us) / 1e6)}" if clock.since_us else ""
        words = f"This box's clock has not been synced{how_long}."
        means = clock_means(facts)
        todo = "See that time sync by NTP reaches its server (timedatectl). sluice check says more."
        yield Condition("clock-unsynced", "warn", "Clock", words, means, todo)
    elif clock.steps and clock.stepped_us is not None and facts.boottime_us - clock.stepped_us < LOST_TOLD_S * 1e6:
        yield clock_set(clock, facts.boottime_us)
    if facts.uplink.dates_passed is not None:
        yield dates_unknown(facts.uplink.dates_passed)


def clock_means(facts: Facts) -> str:
    """Say what becomes of readings while this box's clock is not synced."""
    gateway, uplink = facts.settings.gateway, facts.uplink
    go = "go with times that may be wrong, and are corrected once it is"
    if uplink.waits_for_clock:
        left = hold_words(gateway, uplink.clock_until_us, facts.boottime_us)
        return f"Readings wait on this box for it, {left}."
    if not uplink.was_reached and not uplink.up and gateway.hold_unsynced_s:
        return f"Once Kafka is reached, readings wait for it, {hold_words(gateway, None, facts.boottime_us)}."
    return f"Readings {go}." if uplink.up else f"Once Kafka is reached, readings {go}."


def clock_set(clock: ClockView, boottime_us: int) -> Condition:
    """This box's clock was set although it was synced. `clock` has a step."""
    ago = span((boottime_us - (clock.stepped_us or 0)) / 1e6)
    words = f"Somebody set this box's clock {ago} ago, by {clock.stepped_by_us / 1e6:+,.1f} s, although it was synced."
    means = "One of the two times was wrong."
    return _usual("clock-set", "warn", "Clock", words, means)


def dates_unknown(passed_s: float) -> Condition:
    """Certificates cannot be judged by this box's clock. `passed_s`: seconds since 1970 that have surely passed."""
    words = "This box's clock cannot be trusted with the dates of certificates until it is synced."
    means = (
        f"Only certificates that ended before {_date(passed_s, '%Y-%m-%d')} are refused, and the dates of others are "
        "not checked."
    )
    return Condition("certificate-dates-unknown", "note", "Clock", words, means)


# -- the uplink -------------------------------------------------------------------------------------


def _uplink(facts: Facts) -> Iterator[Condition]:
    uplink = facts.uplink
    if uplink.quota_used_up:
        yield quota_used_up(uplink.quota_until, _safe(facts))
    elif not uplink.up and (uplink.error is not None or facts.up_s > START_S):
        how_long = "" if facts.since_s is None else f" for {span(facts.since_s)}"
        what = "cannot be used" if uplink.barred else "has not been reached"
        words = f"Kafka {what}{how_long}: {_sentence(uplink.error or 'no answer yet')}"
        level: Level = "warn" if not facts.full else "bad"
        if uplink.barred:
            yield _usual("kafka-unusable", level, "Uplink", words, _safe(facts))
        else:
            yield _usual("kafka-unreached", level, "Uplink", words, _safe(facts))
    if uplink.throttled_s:
        words = "A quota of Kafka's holds this gateway back."
        means = f"The last request waited for {span(max(1.0, uplink.throttled_s))}; nothing is lost."
        todo = (
            f"Have producer_byte_rate raised for the client id {facts.settings.gateway.id}, or for its user "
            "(kafka-configs.sh)."
        )
        yield Condition("kafka-throttles", "warn", "Uplink", words, means, todo)
    for topic, flaw in islice(uplink.refused_topics.items(), NAMED_MAX):
        words = f"Kafka's topic {_name(topic)} is not written to: {_sentence(flaw, FLAW_MAX)}"
        if is_echo_topic(facts.settings, topic):
            means = "Its events are left out. The readings go to their own topic."
            todo = "Have the topic mended; later events then go there. sluice check has the command."
        else:
            means = "Its readings wait in the quarantine."
            todo = "Have the topic mended; they then go by themselves. sluice check has the command."
        yield Condition("topic-unwritten", "warn", "Uplink", words, means, todo)
    if len(uplink.refused_topics) > NAMED_MAX:
        more = counted(len(uplink.refused_topics) - NAMED_MAX, "more topic")
        yield Condition("topic-unwritten", "warn", "Uplink", f"And {more} of Kafka's cannot be written to.")
    if uplink.beyond_topics:
        most = sorted(uplink.beyond_topics, key=lambda device: -uplink.beyond_topics[device])
        send, of = ("sends", "of it") if len(most) == 1 else ("send", "of theirs")
        words = f"{_listed(map(_name, most))} {send} for more new topics than this gateway makes."
        means = f"They go to the quarantine: {counted(sum(uplink.beyond_topics.values()), 'reading')} {of} today."
        todo = (
            "Look at the device's readings. If they are right, create the topics, or raise "
            "kafka.topics_per_device_day_max or kafka.topics_created_max; if it is not, revoke its secret (sluice "
            "devices revoke)."
        )
        yield Condition("topics-beyond-limit", "warn", "Uplink", words, means, todo)
    if uplink.parked:
        take = "takes" if len(uplink.parked) == 1 else "take"
        named = _listed(f"{_name(partition)} ({shortened(why, 200)})" for partition, why in uplink.parked.items())
        words = f"{counted(len(uplink.parked), 'partition')} of Kafka's {take} nothing: {named}."
        means = "Their readings wait on disk, others go on."
        yield _usual("partition-parked", "warn", "Uplink", words, means)


def quota_used_up(until_s: float | None, means: str = "Readings wait on this box.") -> Condition:
    """The quota of the day is used up. `until_s`: seconds since 1970; None if the date is unknown."""
    # By some clocks the day ends a moment before midnight. Round to the nearest minute.
    until = "until this day of the network's ends" if until_s is None else f"until {_date(until_s + 30, '%H:%M')} UTC"
    words = f"Nothing is sent {until}: the quota of the day is used up (kafka.bytes_per_day_max)."
    return _usual("quota-used-up", "warn", "Uplink", words, means)


def _safe(facts: Facts) -> str:
    """Say what becomes of readings meanwhile, and for how long."""
    are = "is" if facts.rows == 1 else "are"
    kept = f"{readings_and_events(facts.rows)} {are} safe on this box" if facts.rows else "Nothing waits yet"
    if facts.full or facts.room_bytes == 0:
        return f"{kept}; there is no room for more."
    if facts.hours_until_full is not None:
        return f"{kept}; its room lasts {days(facts.hours_until_full * 3_600)} more."
    if facts.room_bytes is not None:
        return f"{kept}; there is room for {size(facts.room_bytes)} more."
    return f"{kept}."


def days(seconds: float) -> str:
    """Write a span that is an estimate: no hours beside days."""
    return f"{seconds // 86_400:,.0f} days" if 2 * 86_400 <= seconds < 2 * YEAR_S else span(seconds)


# -- sensors ----------------------------------------------------------------------------------------


def _losses(facts: Facts) -> Iterator[Condition]:
    if facts.lost and facts.lost_s is not None and facts.lost_s < LOST_TOLD_S:
        losses = {} if facts.buffer_status is None else facts.buffer_status.losses
        reasons = {reason: count for reason, count in losses.items() if reason not in OWN_LOSSES}
        # Reasons are known of those that are not reported yet.
        some = "" if sum(reasons.values()) == facts.lost else "some: "
        why = f" ({some}{', '.join(sorted(reasons))})" if reasons else ""
        words = (
            f"{counted(facts.lost, 'reading')} {'is' if facts.lost == 1 else 'are'} lost for good{why}, the last "
            f"{span(facts.lost_s)} ago."
        )
        means = "Each is counted, and reported to Kafka."
        todo = "sluice buffer ls tells whose, and how many of each."
        yield Condition("readings-lost", "bad", "Losses", words, means, todo)


def _devices_file(facts: Facts) -> Iterator[Condition]:
    if facts.logins.get("trouble"):
        words = f"The file of devices' secrets cannot be used as it is: {_sentence(facts.logins['trouble'])}"
        means = (
            "Devices log in as before; what changed in it does not count."
            if facts.logins.get("kept")
            else "None of those that it names can log in until it can."
        )
        yield Condition("devices-file-unusable", "warn", "Log-ins", words, means)


def _log_ins(facts: Facts) -> Iterator[Condition]:
    refused = [each for each in facts.refused if each["ago_s"] < REFUSED_TOLD_S]
    yield from map(log_in_refused, refused[:NAMED_MAX])
    if len(refused) > NAMED_MAX:
        more = counted(len(refused) - NAMED_MAX, "more sensor")
        words = f"And of {more} the log-in was refused: journalctl -u sluice names them."
        yield Condition("log-in-refused", "warn", "Log-ins", words)


def log_in_refused(refused: dict[str, Any]) -> Condition:
    """A log-in was refused (`Refusals.lately`)."""
    # The log's words: what is wrong, then what to do.
    why, _, todo = shortened(refused["why"], WORDS_MAX).partition("; ")
    who = "A sensor's log-in" if refused["user"] is None else f"The log-in of {_name(refused['user'])}"
    words = f"{who} from {refused['address']} was refused {span(refused['ago_s'])} ago: {_sentence(why)}"
    means = "What that sensor measures does not come in."
    todo = _capital(_sentence(todo)) if todo else "Correct that in the sensor. journalctl -u sluice says more."
    return Condition("log-in-refused", "warn", "Log-ins", words, means, todo)


def _devices(facts: Facts) -> Iterator[Condition]:
    silent = facts.silent
    are_known = "devices" not in facts.unknown
    if are_known and not facts.heard and not silent and facts.up_s > UNHEARD_TOLD_S and facts.settings.has_source:
        which = f"None of the {facts.devices:,} known devices" if facts.devices else "No device"
        words = f"{which} has been heard since the start, {span(facts.up_s)} ago."
        todo = (
            "See that sensors have this box's address and port, and a secret of theirs (sluice devices add); of serial "
            "lines, that they are plugged in. sluice check looks at each entrance."
        )
        yield Condition("devices-unheard", "warn", "Devices", words, "", todo)
    if len(silent) == 1:
        one = silent[0]
        words = f"{_name(one.device)} has been silent for {span(one.silent_s)}."
        means = f"Before, it never paused for more than {span(max(1.0, one.usually_s))}." if one.usually_s else ""
        yield _usual("device-silent", "warn", "Devices", words, means)
    elif silent:
        named = _listed([f"{_name(each.device)} for {span(each.silent_s)}" for each in silent], comma=",")
        words = f"{len(silent):,} devices are silent: {named}."
        yield Condition("device-silent", "warn", "Devices", words, "", "Check their power, and their line or radio.")
    by_words: dict[str, list[str]] = {}
    for device, words in facts.findings:
        by_words.setdefault(words, []).append(device)
    for words, names in islice(by_words.items(), NAMED_MAX):
        yield Condition("device-finding", "warn", "Devices", f"{_listed(map(_name, names))}: {_sentence(words)}")
    if len(by_words) > NAMED_MAX:
        words = f"Of {counted(len(facts.findings), 'device')} something is to be mended."
        yield Condition("device-finding", "warn", "Devices", words)
    if facts.missing:
        words = f"Readings are missing of {_listed(f'{_name(each)} (≥ {count:,})' for each, count in facts.missing)}."
        means = "By the sensors' own numbers; they may come yet, if the sensors kept them."
        todo = "If they do not, look at power, and at the line or radio."
        yield Condition("readings-missing", "note", "Devices", words, means, todo)


def _payloads(facts: Facts) -> Iterator[Condition]:
    for code, (words, means, todo) in _COUNTED.items():
        count = facts.counts.get(code)
        if count:
            last = facts.counted_last.get(code)
            whose = "" if last is None else f" (the last: {_name(last)}; sluice devices says more)"
            told = f"{counted(count, 'reading')} since the start{whose} {words}."
            yield Condition(code, "note", "Payloads", told, means or _GET_TIME, todo)


def _serial(serial: dict[str, Any]) -> Iterator[Condition]:
    for name, port in serial.get("ports", {}).items():
        if port.get("rivals"):
            words = f"{_name(name)} is read by other programs too."
            means = f"Each gets a part of the bytes: {_sentence(port['rivals'])}"
            yield Condition("serial-rivals", "bad", "Serial", words, means)
        if port.get("shared"):
            words = f"One name stands on several ports: {_sentence(port['shared'])}"
            yield Condition("serial-name-twice", "warn", "Serial", words)
        if port.get("trouble"):
            yield Condition("serial-trouble", "warn", "Serial", f"{_name(name)}: {_sentence(port['trouble'])}")
        units = port.get("units", {})
        unread = [device for device, unit in units.items() if not unit["answers"] and unit["fault"]]
        if unread:
            kind = port.get("kind") or "Modbus"
            words = (
                f"{counted(len(unread), f'{kind} unit')} on {_name(name)} cannot be read: "
                f"{', '.join(map(_name, unread[:NAMED_MAX]))}."
            )
            means = _sentence(f"{_name(unread[0])} at the last: {units[unread[0]]['fault']}")
            todo = "Where there is no answer, check their power, wires, address and baud."
            yield Condition("serial-unit-unread", "warn", "Serial", words, means, todo)
    yield from _absent_ports(serial)


def _absent_ports(serial: dict[str, Any]) -> Iterator[Condition]:
    for name, reason in serial.get("unopened", {}).items():
        yield Condition("serial-unopened", "bad", "Serial", f"{_name(name)} cannot be opened: {_sentence(reason)}")
    gone = serial.get("gone", {})
    for name, port in gone.items():
        last = f"; last heard there: {_listed(map(_name, port['devices']))}" if port["devices"] else ""
        words = f"{_name(name)} has been gone for {span(port['gone_s'])}."
        means = f"It was unplugged, or has no power{last}."
        yield _usual("serial-gone", "bad", "Serial", words, means)
    for name in serial.get("missing", []):
        if name not in gone:
            todo = "Plug it in, or mend the settings under [serial]: sluice check lists the ports here."
            yield Condition("serial-missing", "warn", "Serial", f"{_name(name)} is not there.", "", todo)
    for name, words in serial.get("awaited", {}).items():
        yield Condition("serial-awaited", "note", "Serial", f"{_name(name)}: {_sentence(words)}")


def _brokers(brokers: dict[str, Any]) -> Iterator[Condition]:
    for name, broker in brokers.items():
        if not broker["connected"]:
            words = f"The site's MQTT broker {_name(name)} is not connected."
            means = "Nothing comes from its sensors."
            todo = "Check that it runs; the gateway's log says why it is not reached (journalctl -u sluice)."
            yield Condition("broker-unconnected", "bad", "Broker", words, means, todo)
        if broker["refused"]:
            words = f"The site's MQTT broker {_name(name)} refuses {_listed(map(_name, broker['refused']))}."
            yield Condition("broker-refuses", "bad", "Broker", words)


def _commands(commands: dict[str, Any]) -> Iterator[Condition]:
    if commands.get("error") is not None:
        words = f"No commands are read from {_name(commands['topic'])}: {_sentence(commands['error'], FLAW_MAX)}"
        means = "They wait in Kafka, and expire there."
        yield Condition("commands-unread", "warn", "Commands", words, means)


def quarantined(reasons: dict[str, int]) -> Iterator[Condition]:
    """Say how much is in the quarantine. Nothing if it is empty."""
    if reasons:
        most = sorted(reasons.items(), key=lambda each: (-each[1], each[0]))
        count = counted(sum(reasons.values()), "message")
        words = f"{count} could not be forwarded: {_listed(f'{count:,} {_name(reason)}' for reason, count in most)}."
        means = "All of it is kept on this box."
        todo = "sluice buffer quarantine ls says what to do about each reason."
        yield Condition("quarantine", "note", "Quarantine", words, means, todo)


# -- words ------------------------------------------------------------------------------------------


def _listed(names: Iterable[str], count: int | None = None, comma: str = "") -> str:
    """Name the first few. `count` is the number of all, if there are more than `names`."""
    told = list(names)
    more = (len(told) if count is None else count) - len(told[:NAMED_MAX])
    return ", ".join(told[:NAMED_MAX]) + (f"{comma} and {more:,} more" if more else "")


def _sentence(words: str, most: int = WORDS_MAX) -> str:
    words = shortened(words, most)
    return words if words.endswith((".", "?", "!")) else f"{words}."


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _name(name: str) -> str:
    return shortened(name, NAME_CHARACTERS_MAX)


def _date(wall_s: float, form: str) -> str:
    try:
        return f"{datetime.fromtimestamp(wall_s, UTC):{form}}"
    except (OverflowError, ValueError, OSError):
        return "no such date"
