"""`sluice buffer`: what waits in the buffer, what stands in the quarantine, whether the file is sound."""

import asyncio
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import UNSET, Struct
from sqlite_utils import Database

from gateway.buffer.lanes import read_counts
from gateway.buffer.quarantine import TOPIC_FORBIDDEN
from gateway.buffer.status import Moment, Now, is_running, require_file, this_moment, told
from gateway.buffer.wear import (
    CARD_ENDURANCE_TBW,
    SEEN_S_MIN,
    WRITE_AMPLIFICATION,
    UsageHour,
    WriteBudget,
    hours_until_full,
    last_day,
    room_bytes,
    write_budget,
)
from gateway.clock.sensor_dates import TimeLimits
from gateway.commands import buffer_reading
from gateway.commands.buffer_reading import Depths, QuarantinedInput, QuarantineReason, Reading, Space
from gateway.commands.buffer_verify import Verdict, verify
from gateway.commands.options import FINDING, as_typed, config_option, json_option, load_settings, named
from gateway.daemon import control
from gateway.host.terminal import confirm, say, say_json
from gateway.host.terminal_text import (
    aligned,
    counted,
    escaped,
    escaped_bytes,
    hanging,
    json_text,
    moment,
    shortened,
    size,
    span,
)
from gateway.intake.routes import BAD_NAME, LONG_NAME, NO_ROUTE, taken_words
from gateway.reading import BufferFileError, source
from gateway.record_contract import NAME_RULE
from gateway.settings import Settings

PEEK_BYTES_MAX = 4_000
"""Of a payload, what is shown at most, on one line."""
REQUEST_PAYLOAD_BYTES_MAX = 1_000_000
"""Quarantined bytes that one request takes in again, in one commit; a larger input goes alone."""
QUARANTINE_ROWS = 20
"""Of what is quarantined, so many are listed where nobody says how many: its reasons come first, and stay in sight."""
EXAMPLE_CHARACTERS_MAX = 60
TEXT_CHARACTERS_MAX = 200
"""As much of a name, topic or reason is listed of the quarantine, in a pipe too: a topic may have 65,535 bytes."""
TABLE_ROWS = 500
"""Rows whose widths are looked at together: longer tables are printed in parts, so that memory stays bounded."""
OWN_NAME = "(gateway)"
"""Stands for a device where the gateway's own events and reports wait."""
UNKNOWN_NAME = "(unknown)"
"""Stands for a device where readings were lost and nothing told whose they were."""
_SINCE_BOOT = "boot + "
"""So begins a time of a boot whose clock was never synced (`terminal_text.moment`): no UTC."""
_REFUSED_AGAIN = (
    "What stands here would be refused again: keep a copy (sluice buffer export --quarantine), then drop it"
)
_UNREADABLE_LINES = {
    "no-pairs": "no name with its separator; compare format in [[serial.text]] with what the sensor writes",
    "column-count": "more or fewer values than columns in [[serial.text]]; correct columns, or delimiter",
    "csv-quote": "a double quote that does not end; correct what the sensor writes",
    "not-json": "no JSON on the line; compare format in [[serial.text]] with what the sensor writes",
    "json-not-object": "JSON, but no object; compare format in [[serial.text]] with what the sensor writes",
    "nmea-start": "no sentence of NMEA 0183; compare format and baud in [[serial.text]] with the instrument's",
    "nmea-without-checksum": "a sentence that was cut off, or has no checksum; switch that on in the instrument",
    "nmea-checksum": "not the checksum of these bytes: some were lost or changed, or the instrument reckons otherwise; "
    "write the types that are wanted into sentences in [[serial.text]], where it is of another",
    "repeated-name": "one name twice, and nobody knows which counts; correct it in the sensor",
    "not-text": "control characters within the line; correct baud in [[serial.text]], or it is no text",
    "line-too-long": "longer than line_bytes_max in [[serial.text]]; raise it, or correct baud",
}
"""What `text_formats` and `text_link` cannot read, and what to do about the next one."""
_TO_MEND = {
    NO_ROUTE: "no route takes the topic; add one under [[routes]], or correct what the sensor publishes to (of a "
    "serial line: its stream)",
    "ambiguous-route": "several routes take the topic and differ; change [[routes]] so that one takes it",
    BAD_NAME: f"what stands for {{device}} (or for what else the route's key has) is no name: that is {NAME_RULE}; "
    'write names = "escape" in the route, or a route with this topic and device = "NAME", or correct it in the sensor',
    LONG_NAME: "what stands for {device} (or for what else the route's key has) is too long once it is escaped: a name "
    f'is {NAME_RULE}; write a route with this topic and device = "NAME"',
    "kafka-topic-name-invalid": "the route makes a name of it that Kafka takes for no topic: that is 1 to 249 letters, "
    """digits, '.', '_' or '-'; write names = "escape" in the route, or one with this topic and another kafka, or """
    "correct what the sensor publishes to",
    "kafka-topic-reserved": "the route makes the name of a topic of the gateway's or Kafka's own; change the route",
    "not-the-writers-device": "a sensor wrote in another's name; correct its topic, or the user it connects as, or "
    "take key out of the route, which makes names that no user has. " + _REFUSED_AGAIN,
    "record-too-large": "larger than kafka.record_bytes_max; raise it, and the topic's max.message.bytes",
    "topic-unknown": "Kafka has no such topic; create it with LogAppendTime, or set kafka.create_topics = true",
    "topic-limit-of-device": "this gateway made no more topics for the device on that day "
    "(kafka.topics_per_device_day_max); create the topic, or raise that",
    "topic-limit": "this gateway makes no more topics in all (kafka.topics_created_max); create the topic, delete "
    "others that nobody needs, or raise that",
    "topic-refuses-records": "the Kafka topic refused one record after the other; the reason of those tells why",
    "topic-max-message-bytes": "larger than the Kafka topic takes; raise its max.message.bytes",
    "topic-compacted": "compaction deletes readings; set cleanup.policy=delete on the Kafka topic",
    "topic-retention-too-short": "raise the Kafka topic's retention.ms (or retention.bytes), or lower "
    "kafka.retention_s_min",
    "topic-refuses-writes": "the Kafka topic's min.insync.replicas is above its replicas; lower it, or add replicas",
    "topic-config-hidden": "allow this gateway to see the topic's settings (ACL DescribeConfigs)",
    "topic-not-logappendtime": "set message.timestamp.type=LogAppendTime on the Kafka topic",
    "topic-not-created": "the broker refused to create the topic: sluice status has its reason; mend that, or create "
    "the topic there, with LogAppendTime",
    "topic-name-collides": "Kafka has a topic whose name differs in '.' and '_' only, and keeps no two such (sluice "
    "status names it); change the route and retry, or delete the other topic",
    "topic-refused": "the broker does not let this gateway see the topic; allow it in the broker's access list",
    TOPIC_FORBIDDEN: "the broker does not let this gateway write to the topic; allow it there (ACL Write): sluice "
    "status has the command",
    "broker-refused": "the broker does not take it; compare the topic's max.message.bytes, and see the broker's log",
    **{reason: f"{words}. {_REFUSED_AGAIN}" for reason, words in _UNREADABLE_LINES.items()},
    "salvaged-without-series": "a damaged file no longer says whose it is; export it, then drop it",
}
"""What a reason for the quarantine means, and what to do; a reason may go on behind a colon."""
_OF_ROUTES = frozenset(
    {NO_ROUTE, "ambiguous-route", "kafka-topic-reserved", BAD_NAME, LONG_NAME, "kafka-topic-name-invalid"}
)
"""Reasons that are mended by changing [[routes]], which a running gateway reads when it starts only."""
_OF_TOPICS = "topic-"
"""So begins what is wrong with a topic: what is kept for it is taken in again by the gateway itself."""

_NEVER_TAKEN = frozenset(
    {
        "not-the-writers-device",
        "salvaged-without-series",
        *_UNREADABLE_LINES,
    }
)
"""Reasons that nothing mends for what stands in the quarantine already."""

# Salvaged lanes are another file's, and numbered when they are taken over.
_LIVE_LANE = """
    SELECT max(number) FROM lane WHERE coalesce(buffer_id = (SELECT value FROM meta WHERE name = 'buffer_id'), TRUE)
"""

_device = click.option(
    "--device",
    metavar="NAME",
    callback=lambda _context, _option, name: "" if name == OWN_NAME else name,
    help=f"Of this device only; {OWN_NAME} is this gateway's own.",
)
_reason = click.option("--reason", metavar="REASON", help="What was set aside for this reason.")


@click.group(short_help="What waits, what could not be sent, is the file sound?")
def buffer() -> None:
    """Look into the buffer: what waits for Kafka, what could not be forwarded, whether the file is sound.

    Works on a running gateway and on a stopped one. Nothing is changed but by `quarantine retry` and `quarantine drop`.
    """


class _Overview(Struct, frozen=True):
    """What `ls --json` prints. Sizes in bytes."""

    gateway: str
    running: bool
    rows: int
    bytes_used: int
    bytes_max: int
    room_bytes: int
    """What may still come in: up to buffer.bytes_max, and as far as the disk has more than buffer.free_bytes_min."""
    oldest: Moment | None
    oldest_age_s: float | None
    hours_until_full: float | None
    """With the last day's intake, and nothing leaving; null where too little was seen, or nothing came in."""
    write_budget: WriteBudget
    lost: int
    devices: list[buffer_reading.DeviceDepth]


@buffer.command(
    name="ls",
    short_help="What waits of each device, how soon it is full, card wear.",
    epilog="Example: sluice buffer ls --card-endurance-tbw 117",
)
@config_option
@click.option(
    "--card-endurance-tbw",
    type=named(click.FloatRange(min=0, min_open=True), "number of terabytes"),
    metavar="TB",
    default=CARD_ENDURANCE_TBW,
    show_default=True,
    help="What the memory card's flash takes over its life. The default is a cheap card: 16 GB of TLC flash, each cell "
    "written 1,000 times. Where the maker promises a TBW, give that, and 1 for the write amplification.",
)
@click.option(
    "--write-amplification",
    type=named(click.FloatRange(min=1), "number"),
    metavar="FACTOR",
    default=WRITE_AMPLIFICATION,
    show_default=True,
    help="What the card's flash writes for each byte that it is given: 4 KiB, synced, take a page of 16 KiB.",
)
@json_option
def ls(config: Path, card_endurance_tbw: float, write_amplification: float, as_json: bool) -> None:  # noqa: FBT001
    """Show what waits by device, how soon the buffer is full, and what is written to the card.

    The time until it is full goes by what came in during the last 24 hours that sluice ran, as if nothing went to
    Kafka. LOST counts what is gone for good, as far as that was not reported to Kafka yet: readings, and under
    (gateway) its own events. What waits there are its events, and reports on what stands in the quarantine.
    """
    settings = load_settings(config)
    with _opened(settings) as db:
        depths = buffer_reading.depths(db)
        space = buffer_reading.space(db)
        hours = buffer_reading.usage(db)
    path = settings.buffer.path
    day = last_day([*_not_written_yet(path), *hours])
    room = _room_bytes(settings, space)
    now = this_moment(settings.gateway)
    found = _Overview(
        gateway=settings.gateway.id,
        running=is_running(path),
        rows=sum(depth.rows for depth in depths.devices),
        bytes_used=space.used,
        bytes_max=settings.buffer.bytes_max,
        room_bytes=room,
        oldest=depths.oldest,
        oldest_age_s=None if depths.oldest is None else now.age_s(depths.oldest),
        hours_until_full=hours_until_full(room, day),
        write_budget=write_budget(day, card_endurance_tbw, write_amplification),
        lost=sum(depth.lost for depth in depths.devices),
        devices=depths.devices,
    )
    if as_json:
        say_json(found)
    else:
        for line in _overview_lines(found, settings, now):
            say(hanging(line, 9))
        for line in _device_lines(depths, now):
            say(line)


class RoomLeft(Struct, frozen=True):
    """What may still come in, and how long it lasts at the rate of the last day, if nothing goes to Kafka."""

    bytes: int
    hours_until_full: float | None
    """None where too little was seen to tell, or nothing came in."""
    seen_s: float
    """How much of the last 24 hours of running that rate is of."""
    disk_bytes_per_day: float | None = None
    """What is written to the disk at the rate of these; None where too little was seen."""
    card_days: float | None = None
    """How long a cheap memory card lasts at that rate (`sluice buffer ls` says by what)."""


def read_room_left(settings: Settings, daemon: dict[str, Any] | None) -> RoomLeft:
    """The room of a buffer file, with what its daemon answers to `state`, None where none does.

    Raises click.ClickException where the file cannot be read.
    """
    with _opened(settings) as db:
        space = buffer_reading.space(db)
        hours = buffer_reading.usage(db)
    day = last_day([*_unwritten(daemon or {}), *hours])
    room = _room_bytes(settings, space)
    writes = write_budget(day)
    return RoomLeft(room, hours_until_full(room, day), day.seconds, writes.disk_bytes_per_day, writes.card_days)


def read_backlog_rows(settings: Settings) -> int:
    """How many rows wait in other lanes than the newest of this file's own, which readings go into.

    Raises click.ClickException where the file cannot be read.
    """
    with _opened(settings) as db:
        counts = read_counts(db.conn)
        (live,) = db.execute(_LIVE_LANE).fetchone()
    return sum(count.rows for number, count in counts.items() if number != live)


def _room_bytes(settings: Settings, space: Space) -> int:
    disk = os.statvfs(settings.buffer.path)
    return room_bytes(
        bytes_used=space.used,
        bytes_max=settings.buffer.bytes_max,
        unused_bytes=space.unused,
        disk_free=disk.f_bavail * disk.f_frsize,
        disk_free_min=settings.buffer.free_bytes_min,
    )


def _not_written_yet(path: Path) -> list[UsageHour]:
    """What a running gateway has counted since it wrote its figures down: it does so with a commit, and may be idle."""
    return _unwritten(control.state_of(path))


def _unwritten(daemon: dict[str, Any]) -> list[UsageHour]:
    try:
        return [msgspec.convert(daemon["usage"], UsageHour)]
    except (msgspec.ValidationError, KeyError):
        return []


def _overview_lines(found: _Overview, settings: Settings, now: Now) -> Iterator[str]:
    yield f"gateway  {escaped(found.gateway)}, {'running' if found.running else 'not running'}"
    if found.oldest is None:
        yield "waiting  nothing"
    else:
        yield f"waiting  {counted(found.rows, 'row')}, the oldest of {told(found.oldest, now)}"
    yield f"space    {size(found.bytes_used)} used of {size(found.bytes_max)} (buffer.bytes_max)"
    if found.room_bytes < found.bytes_max - found.bytes_used:
        floor = size(settings.buffer.free_bytes_min)
        yield f"         the disk has room for {size(found.room_bytes)} more (buffer.free_bytes_min = {floor})"
    budget = found.write_budget
    yield f"full     {_until_full(found)}"
    if budget.disk_bytes_per_day is None:
        yield f"writes   not known yet: {_seen_too_little(budget)}"
    else:
        each = "" if budget.disk_bytes_per_reading is None else f", {size(budget.disk_bytes_per_reading)} a reading"
        yield f"writes   {size(budget.disk_bytes_per_day)} a day{each}, {_seen(budget)}"
    if budget.card_days is not None:
        endurance, amplification = budget.card_endurance_tbw, budget.write_amplification
        yield f"card     lasts {span(budget.card_days * 86_400)} at that rate, if its flash takes"
        yield f"         {endurance:g} TB and writes {amplification:g} bytes for each that it is given"
        yield "         (--card-endurance-tbw, --write-amplification)"
    if found.lost:
        yield f"lost     {found.lost:,}, not reported to Kafka yet"


def _until_full(found: _Overview) -> str:
    budget = found.write_budget
    if found.room_bytes == 0:
        return "now"
    if found.hours_until_full is not None:
        return f"in {span(found.hours_until_full * 3600)} if nothing goes to Kafka, {_seen(budget)}"
    if budget.readings_per_day is None:
        return f"not known yet: {_seen_too_little(budget)}"
    return f"never at this rate: nothing came in, {_seen(budget)}"


def _seen(budget: WriteBudget) -> str:
    return f"by the last {span(budget.seen_s)} that sluice ran"


def _seen_too_little(budget: WriteBudget) -> str:
    return f"told after {span(SEEN_S_MIN)} of running ({span(budget.seen_s)} so far)"


def _device_lines(depths: Depths, now: Now) -> Iterator[str]:
    rows = [
        (
            UNKNOWN_NAME if depth.device is None else escaped(depth.device) or OWN_NAME,
            f"{depth.rows:,}",
            size(depth.payload_bytes),
            _age(now, depth.oldest),
            "-" if depth.newest is None else moment(depth.newest.boottime_us, depth.newest.wall_us),
            f"{depth.lost:,}",
        )
        for depth in depths.devices
    ]
    if rows:
        yield ""
        newest = [row[4] for row in rows]
        headers = ("DEVICE", "WAITING", "PAYLOAD", "OLDEST", _headed("NEWEST", newest), "LOST")
        yield from aligned(headers, rows, right=frozenset({1, 2, 3, 5}), whole=frozenset({4}))
        yield from _since_boot_lines(newest)


@buffer.command(
    short_help="The oldest or the newest waiting readings.", epilog="Example: sluice buffer peek --device 42 --newest"
)
@config_option
@_device
@click.option(
    "--limit",
    type=named(click.IntRange(1, 10_000), "whole number"),
    metavar="N",
    default=10,
    show_default=True,
    help="How many readings.",
)
@click.option("--newest", is_flag=True, help="The newest first, instead of the oldest.")
@json_option
def peek(config: Path, device: str | None, limit: int, newest: bool, as_json: bool) -> None:  # noqa: FBT001
    r"""Show the oldest waiting readings, one a line, cut to the terminal's width; whole in a pipe.

    What a terminal would obey, and each byte that is no text, is shown as \x1b.
    """
    settings = load_settings(config)
    with _opened(settings) as db:
        limits = TimeLimits.of(settings.gateway)
        found = list(islice(buffer_reading.readings(db, device, newest_first=newest, limits=limits), limit))
    if as_json:
        say_json(found)
        return
    if not found:
        say(_nothing_waits(device))
        return
    rows = [
        (_received(reading), escaped(reading.device) or OWN_NAME, escaped(reading.topic), _payload_shown(reading))
        for reading in found
    ]
    received = [row[0] for row in rows]
    headers = (_headed("RECEIVED", received), "DEVICE", "TOPIC", "PAYLOAD")
    for line in chain(aligned(headers, rows, whole=frozenset({0})), _since_boot_lines(received)):
        say(line)


def _nothing_waits(device: str | None) -> str:
    return f"nothing waits{_whose(device)}"


@buffer.command(
    short_help="Everything that waits, as JSON lines.", epilog="Example: sluice buffer export > waiting.jsonl"
)
@config_option
@_device
@click.option("--quarantine", is_flag=True, help="What stands in the quarantine, instead of what waits.")
@click.option("--json", is_flag=True, expose_value=False, help="As elsewhere; here it is JSON without it too.")
def export(config: Path, device: str | None, quarantine: bool) -> None:  # noqa: FBT001
    """Write everything that waits to standard output as JSON lines, oldest first. Nothing is removed.

    Each line has the record's identity, device, Kafka topic, times and `payload`: the bytes as text where they are
    UTF-8; where they are not, `payload_base64` stands in its place.
    """
    settings = load_settings(config)
    with _opened(settings) as db:
        found: Iterable[Struct]
        if quarantine:
            found = buffer_reading.quarantined(db, device=device)
        else:
            found = buffer_reading.readings(db, device, limits=TimeLimits.of(settings.gateway))
        is_empty = True
        with _to_stdout() as write:
            for item in found:
                is_empty = False
                write(f"{json_text(item)}\n".encode())
        if is_empty:
            # Not among the JSON lines: the file stays empty.
            words = _nothing_set_aside(db, None, device) if quarantine else _nothing_waits(device)
            say(hanging(words, 4, sys.stderr), err=True)


@contextmanager
def _to_stdout() -> Iterator[Callable[[bytes], object]]:
    """Write to standard output; whoever reads it may have had enough."""
    try:
        yield sys.stdout.buffer.write
        sys.stdout.buffer.flush()
    except OSError as error:
        # Python would flush what is left at its end, fail again, and end with a code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return
        raise click.ClickException(f"the export ends early: {os.strerror(error.errno or errno.EIO)}") from error


@buffer.command(name="verify", short_help="Is the file sound?", epilog="Example: sluice buffer verify --full")
@config_option
@click.option("--full", is_flag=True, help="Let SQLite compare indexes with tables too (integrity_check): slower.")
@json_option
def verify_command(config: Path, full: bool, as_json: bool) -> None:  # noqa: FBT001
    """Check the buffer file: SQLite's own check, lanes without holes, references, bounds. Changes nothing.

    SQLite's check reads all of the file in one go; a busy gateway's WAL grows meanwhile.
    """
    settings = load_settings(config)
    try:
        require_file(settings.buffer.path)
    except BufferFileError as error:
        raise click.ClickException(str(error)) from error
    verdicts: list[Verdict] = []
    for verdict in verify(settings.buffer.path, settings.buffer, full=full):
        verdicts.append(verdict)
        if not as_json:
            words = f"{escaped(verdict.subject)}: {as_typed(escaped(verdict.words))}"
            say(hanging(f"{'ok  ' if verdict.ok else 'FAIL'}  {words}", 6))
    if as_json:
        say_json(verdicts)
    sys.exit(0 if all(verdict.ok for verdict in verdicts) else FINDING)


# -- the quarantine -------------------------------------------------------------------------------


@buffer.group(short_help="Input that could not be forwarded.")
def quarantine() -> None:
    """Input that could not be forwarded: list it, take it in again, drop it."""


@quarantine.command(
    name="ls", short_help="Why it is there; newest first.", epilog="Example: sluice buffer quarantine ls --limit 100"
)
@config_option
@_reason
@_device
@click.option(
    "--limit",
    type=named(click.IntRange(1), "whole number"),
    metavar="N",
    help=f"How many are listed; {QUARANTINE_ROWS} by default, with --json all.",
)
@json_option
def quarantine_ls(
    config: Path,
    reason: str | None,
    device: str | None,
    limit: int | None,
    as_json: bool,  # noqa: FBT001
) -> None:
    """Say why input is quarantined, with an example of each reason, and list it, newest first.

    `sluice buffer export --quarantine` has it whole, --json all but the payloads.
    """
    settings = load_settings(config)
    with _opened(settings) as db:
        found: Iterator[QuarantinedInput]
        found = islice(
            buffer_reading.quarantined(db, reason, device, newest_first=True),
            limit if as_json else limit or QUARANTINE_ROWS,
        )
        if as_json:
            told = [msgspec.structs.replace(item, payload=UNSET, payload_base64=UNSET) for item in found]
            say_json(told)
            return
        reasons = buffer_reading.quarantine_reasons(db, reason, device)
        if not reasons:
            say(hanging(_nothing_set_aside(db, reason, device), 4))
            return
        for each in reasons:
            say(
                hanging(
                    as_typed(f"{each.count:,} {_cut(each.reason)}, {_example(each)}{_to_mend(each.reason, settings)}"),
                    4,
                )
            )
        for line in _then_lines([_cut(each.reason) for each in reasons]):
            say(hanging(as_typed(line), 4))
        shown = 0
        while page := list(islice(found, TABLE_ROWS)):
            shown += len(page)
            say()
            for line in _quarantine_lines(page):
                say(line)
        older = buffer_reading.quarantine_count(db, reason, device) - shown
        if older > 0:
            say(hanging(as_typed(f"and {older:,} older (--limit N; all: sluice buffer export --quarantine)"), 4))


def _nothing_set_aside(db: Database, reason: str | None, device: str | None) -> str:
    """What is said where nothing stands in the quarantine, or nothing of the reason or device that is asked for."""
    whose = _whose(device)
    if reason is None:
        return f"nothing{whose} stands in the quarantine" if whose else "the quarantine is empty"
    # Of the same device: what others have there is no answer.
    there = [_cut(each.reason) for each in buffer_reading.quarantine_reasons(db, device=device)]
    where = "of it there is" if whose else "in the quarantine is"
    return f"nothing{whose} was set aside for '{escaped(reason)}'; {where}: {', '.join(there) or 'nothing'}"


def _example(reason: QuarantineReason) -> str:
    """One of them, so that nobody need look further to see what it is about."""
    whose = f" from {_cut(reason.device)}" if reason.device else ""
    example = escaped_bytes(reason.example)
    is_whole = reason.bytes == len(reason.example) and len(example) <= EXAMPLE_CHARACTERS_MAX
    rest = "" if is_whole else f" ({counted(reason.bytes, 'byte')}; {_WHOLE})"
    return f'e.g. "{shortened(example, EXAMPLE_CHARACTERS_MAX)}"{rest}{whose}'


_WHOLE = "whole: sluice buffer export --quarantine"


def _cut(text: str) -> str:
    """A name, topic or reason as one line; of a long one its beginning, and how long it is."""
    shown = escaped(text)
    if len(shown) <= TEXT_CHARACTERS_MAX:
        return shown
    return f"{shown[:TEXT_CHARACTERS_MAX]}… ({counted(len(text), 'character')}; {_WHOLE})"


def _then_lines(reasons: Iterable[str]) -> Iterator[str]:
    """What takes them in again once their cause is mended."""
    by_themselves = [name for name in reasons if name.startswith(_OF_TOPICS) or name == TOPIC_FORBIDDEN]
    if any(name not in _NEVER_TAKEN and name not in by_themselves for name in reasons):
        others = ", for what is not a topic's" if by_themselves else ""
        yield f"Once it is mended: sluice buffer quarantine retry --reason REASON{others}"
    if by_themselves:
        yield (
            f"What stands here for {', '.join(by_themselves)} is sent by itself once that is mended, while sluice runs"
        )


def _quarantine_lines(page: list[QuarantinedInput]) -> Iterator[str]:
    rows = [
        (
            str(item.number),
            _received(item),
            _cut(item.device) or "-",
            _cut(item.reason),
            size(item.bytes),
            _cut(source(item.topic, item.subject)),
        )
        for item in page
    ]
    received = [row[1] for row in rows]
    headers = ("NUMBER", _headed("RECEIVED", received), "DEVICE", "REASON", "SIZE", "SUBJECT")
    yield from aligned(headers, rows, right=frozenset({0, 4}), whole=frozenset({1, 3}))
    yield from _since_boot_lines(received)


def _to_mend(reason: str, settings: Settings) -> str:
    words = _TO_MEND.get(reason) or _TO_MEND.get(reason.partition(":")[0])
    told = f"; {escaped(taken_words(settings.routes))}" if reason == NO_ROUTE else ""
    return "" if words is None else f": {words}{told}"


class _Number(click.IntRange):
    """The number of a quarantined input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click does, with words that say where the numbers stand."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            words = f"'{escaped(str(value))}' is no NUMBER: sluice buffer quarantine ls has them"
            self.fail(f"{words}; all of one reason: --reason REASON", param, ctx)


def _selection(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--reason", metavar="REASON", help="All that was set aside for this reason.")(command)
    command = click.option("--all", "everything", is_flag=True, help="All that stands in the quarantine.")(command)
    return click.argument("numbers", metavar="[NUMBER]...", nargs=-1, type=_Number(1, 2**63 - 1))(command)


@quarantine.command(short_help="Take it in again.", epilog="Example: sluice buffer quarantine retry --reason no-route")
@config_option
@_selection
@json_option
def retry(
    config: Path,
    numbers: tuple[int, ...],
    everything: bool,  # noqa: FBT001
    reason: str | None,
    as_json: bool,  # noqa: FBT001
) -> None:
    """Take quarantined input in again, once its cause is mended: a route, a topic, a limit of Kafka's.

    What is taken in gets a place behind what waits; what no route takes stays where it is (exit code 1), and what
    Kafka still refuses comes back.
    """
    settings = load_settings(config)
    chosen = _chosen(settings, numbers, reason, everything=everything)
    if not chosen and not as_json:
        say("the quarantine is empty")
        return
    stored, unknown = 0, 0
    refused: dict[str, int] = {}
    for outcome in _ask(settings, "quarantine-retry", chosen):
        stored += outcome["stored"]
        unknown += outcome["unknown"]
        for why, count in outcome["refused"].items():
            refused[why] = refused.get(why, 0) + count
    if as_json:
        say_json({"stored": stored, "refused": refused, "unknown": unknown})
    else:
        back = ": to Kafka with what waits; what Kafka still refuses comes back into the quarantine" if stored else ""
        say(hanging(f"{counted(stored, 'message')} taken in again{back}", 4))
        for why, count in sorted(refused.items()):
            stay = "stays" if count == 1 else "stay"
            say(
                hanging(
                    as_typed(
                        f"{counted(count, 'message')} {stay} in the quarantine: {escaped(why)}{_to_mend(why, settings)}"
                    ),
                    4,
                )
            )
        if not _OF_ROUTES.isdisjoint(refused) and is_running(settings.buffer.path):
            words = "a running gateway knows the routes that it was started with: restart it after changing them"
            say(hanging(words, 4))
        _tell_unknown(unknown)
    sys.exit(FINDING if refused or unknown else 0)


@quarantine.command(epilog="Example: sluice buffer quarantine drop 17 18")
@config_option
@_selection
@click.option("--yes", is_flag=True, help="Do not ask first.")
@json_option
def drop(  # noqa: PLR0913, PLR0917 - click passes each option
    config: Path,
    numbers: tuple[int, ...],
    everything: bool,  # noqa: FBT001
    reason: str | None,
    yes: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    """Throw quarantined input away, for good. Asks first. It is counted as lost, and gateway-events tells of it."""
    settings = load_settings(config)
    chosen = _chosen(settings, numbers, reason, everything=everything)
    if not chosen and not as_json:
        say("the quarantine is empty")
        return
    if chosen and not yes:
        confirm(f"Throw {counted(len(chosen), 'quarantined input')} away, for good?", abort=True, err=True)
    dropped = sum(outcome["dropped"] for outcome in _ask(settings, "quarantine-drop", chosen))
    unknown = len(chosen) - dropped
    if as_json:
        say_json({"dropped": dropped, "unknown": unknown})
    else:
        say(f"{dropped:,} thrown away" + (", and counted as lost" if dropped else ""))
        _tell_unknown(unknown)
    sys.exit(FINDING if unknown else 0)


def _tell_unknown(count: int) -> None:
    if count:
        say(as_typed(f"{count:,} not found: sluice buffer quarantine ls has the numbers"))


def _chosen(settings: Settings, numbers: tuple[int, ...], reason: str | None, *, everything: bool) -> dict[int, int]:
    """The numbers that are meant, with their bytes. Raises UsageError unless exactly one way of choosing is used."""
    if sum((bool(numbers), reason is not None, everything)) != 1:
        raise click.UsageError("say which: NUMBER..., --reason REASON or --all, and only one of these")
    with _opened(settings) as db:
        found = buffer_reading.quarantine_sizes(db, reason)
        if reason is not None and not found:
            raise click.ClickException(_nothing_set_aside(db, reason, None))
        return {number: found.get(number, 0) for number in numbers} if numbers else found


def request_parts(chosen: dict[int, int]) -> list[list[int]]:
    """The numbers cut into what one request, and one commit on a full disk, can take."""
    parts: list[list[int]] = []
    room = 0
    for number, payload_bytes in chosen.items():
        if not parts or len(parts[-1]) >= control.NUMBERS_MAX or payload_bytes > room:
            parts.append([])
            room = REQUEST_PAYLOAD_BYTES_MAX
        parts[-1].append(number)
        room -= payload_bytes
    return parts


def _ask(settings: Settings, command: str, chosen: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Have a command done in parts: by the daemon, or here where none runs."""
    parts = request_parts(chosen)
    for number, part in enumerate(parts):
        try:
            try:
                yield control.call(control.socket_path(settings.buffer.path), command, numbers=part)
            except control.NotRunningError:
                if is_running(settings.buffer.path):
                    raise
                yield from asyncio.run(_done_here(settings, command, parts[number:]))
                return
        except control.NotRunningError as error:
            raise click.ClickException(
                f"{error}, although one has the buffer open: its log says why; or stop it, and ask again"
            ) from error
        except (control.ControlError, BufferFileError) as error:
            before = sum(map(len, parts[:number]))
            done = f" ({before:,} of {len(chosen):,} were done before)" if before else ""
            raise click.ClickException(f"{error}{done}") from error


async def _done_here(settings: Settings, command: str, parts: list[list[int]]) -> list[dict[str, Any]]:
    """Do it as the daemon would, which does not run: with the buffer's lock, and a lane of its own."""
    from gateway.buffer.buffer import Buffer  # noqa: PLC0415
    from gateway.clock.kernel_clock import ClockWatch, boot_id, boottime_us  # noqa: PLC0415
    from gateway.config.config_file import route_table  # noqa: PLC0415
    from gateway.host import logs  # noqa: PLC0415 - a running daemon does all this itself
    from gateway.intake.front_door import FrontDoor  # noqa: PLC0415

    logs.set_up(settings.log)
    clock = ClockWatch(settings.gateway)
    opened = Buffer(settings.buffer, boot_id(), clock.now, clock.resume)
    front_door = FrontDoor(opened, route_table(settings), settings.gateway, settings.kafka, boottime_us)
    opened.open()
    try:
        if command == "quarantine-retry":
            await opened.transact(lambda file: file.report_lanes("retry", front_door.events.lane_entry))
        do = control.handlers(front_door, opened)[command]
        return [msgspec.to_builtins(await do({"numbers": part})) for part in parts]
    finally:
        await opened.close()


# -- what the commands share ----------------------------------------------------------------------


@contextmanager
def _opened(settings: Settings) -> Iterator[Database]:
    try:
        with buffer_reading.opened(settings.buffer.path) as db:
            yield db
    except BufferFileError as error:
        raise click.ClickException(str(error)) from error


def _whose(device: str | None) -> str:
    return "" if device is None else f" of device {escaped(device) or OWN_NAME}"


def _headed(name: str, times: Iterable[str]) -> str:
    """The header of a column of times, which says UTC where one of them is."""
    return f"{name} (UTC)" if any(not time.startswith((_SINCE_BOOT, "-")) for time in times) else name


def _since_boot_lines(times: Iterable[str]) -> Iterator[str]:
    """What stands below a table for those of its times that are no UTC."""
    if any(time.startswith(_SINCE_BOOT) for time in times):
        words = "counted from a start of this box (not of the sensor) after which its clock was never synced"
        yield hanging(f"{_SINCE_BOOT}…: {words}", 4)


def _age(now: Now, moment: Moment | None) -> str:
    age_s = None if moment is None else now.age_s(moment)
    return "-" if age_s is None else span(age_s)


def _received(item: Reading | QuarantinedInput) -> str:
    if item.received_time is None:
        return moment(item.received_boottime_us, None)
    return item.received_time[:19].replace("T", " ")


def _payload_shown(reading: Reading) -> str:
    if isinstance(reading.payload, str):
        return escaped(reading.payload[:PEEK_BYTES_MAX])
    return escaped_bytes(msgspec.convert(reading.payload_base64, bytes)[:PEEK_BYTES_MAX])
