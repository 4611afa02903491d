"""`sluice buffer`: shows what waits, handles the quarantine, and checks that the buffer file is sound."""

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
from gateway.commands.options import FINDING, as_typed, config_option, json_option, load_as_service, named
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
"""Most bytes of one payload that `peek` shows."""
REQUEST_PAYLOAD_BYTES_MAX = 1_000_000
"""Payload bytes that one request takes in again, in one commit. A larger input gets a request of its own."""
QUARANTINE_ROWS = 20
"""Quarantined inputs listed by default. The reasons are printed first, and so stay in sight."""
EXAMPLE_CHARACTERS_MAX = 60
TEXT_CHARACTERS_MAX = 200
"""Most characters listed of a name, topic or reason, in a pipe too: an MQTT topic may have 65,535 bytes."""
TABLE_ROWS = 500
"""Rows printed as one table. Longer tables are printed in parts, so that memory stays bounded."""
OWN_NAME = "(gateway)"
"""Name shown instead of a device for the gateway's own events and reports."""
UNKNOWN_NAME = "(unknown)"
"""Name shown instead of a device for lost readings of an unknown device."""
_SINCE_BOOT = "boot + "
"""Beginning of a time that is not UTC: one of a boot whose clock was never synced (`terminal_text.moment`)."""
_REFUSED_AGAIN = (
    "What is here already would be refused again: keep a copy (sluice buffer export --quarantine), then drop it"
)
_UNREADABLE_LINES = {
    "no-pairs": "no name with its separator; compare format in [[serial.text]] with what the sensor writes",
    "column-count": "more or fewer values than columns in [[serial.text]]; correct columns, or delimiter",
    "csv-quote": "a double quote that does not end; correct what the sensor writes",
    "not-json": "no JSON on the line; compare format in [[serial.text]] with what the sensor writes",
    "json-not-object": "JSON, but no object; compare format in [[serial.text]] with what the sensor writes",
    "nmea-start": "no sentence of NMEA 0183; compare format and baud in [[serial.text]] with the instrument's",
    "nmea-without-checksum": "a sentence that was cut off, or has no checksum; switch checksums on in the instrument",
    "nmea-checksum": "the checksum does not fit: bytes were lost or changed, or the instrument computes it otherwise; "
    "if you do not need this type of sentence, write the types you need into sentences in [[serial.text]]",
    "repeated-name": "the line has one name twice, so neither value can be trusted; correct it in the sensor",
    "not-text": "control characters within the line; correct baud in [[serial.text]], or the sensor sends no text",
    "line-too-long": "longer than line_bytes_max in [[serial.text]]; raise it, or correct baud",
    "frame-checksum": "a dust sensor's frame was damaged; shorten the cable, or join the grounds",
    "telegram-checksum": "the meter's telegram was damaged; shorten the cable, or correct baud in [[serial.format]]",
    "telegram-without-checksum": "this meter is older than DSMR 4, and nothing proves its telegrams; write a format of "
    "your own (docs/formats.md) if they are good enough for you",
    "telegram-cut-off": "the next telegram began before this one ended; look at cable and baud",
    "telegram-without-values": "the telegram is whole, and no value in it can be told from the others; write a format "
    "of your own (docs/formats.md)",
    "format-failed": "the format of your own failed at these bytes; sluice status or the log says how",
    "piece-too-long": "so many bytes came without an end; correct format or baud in [[serial.format]]",
}
"""By reason: why a piece of what a serial sensor sent is no reading, and what to do so that the next one is."""
_TO_MEND = {
    NO_ROUTE: "no route takes the topic; add one under [[routes]], or correct the sensor's topic (on a serial line: "
    "its stream)",
    "ambiguous-route": "several routes take the topic and differ; change [[routes]] so that one takes it",
    BAD_NAME: f"the topic's part for {{device}} (or another variable of the route's key) is no name: a name is "
    f'{NAME_RULE}; write names = "escape" in the route, or a route with this topic and device = "NAME", or correct it '
    "in the sensor",
    LONG_NAME: "the topic's part for {device} (or another variable of the route's key) is too long once it is escaped: "
    f'a name is {NAME_RULE}; write a route with this topic and device = "NAME"',
    "kafka-topic-name-invalid": "the route makes a Kafka topic's name that Kafka refuses: a name has 1 to 249 letters, "
    """digits, '.', '_' or '-'; write names = "escape" in the route, or a route with this topic and another kafka, """
    "or correct the sensor's topic",
    "kafka-topic-reserved": "the route makes the name of one of the gateway's or Kafka's own topics; change the route",
    "not-the-writers-device": "a sensor wrote in another's name; correct its topic, or the user it connects as, or "
    "take key out of the route if it makes names that no user has. " + _REFUSED_AGAIN,
    "record-too-large": "larger than kafka.record_bytes_max; raise it, and the topic's max.message.bytes",
    "topic-unknown": "Kafka has no such topic; create it with LogAppendTime, or set kafka.create_topics = true",
    "topic-limit-of-device": "the device had used up its new topics of that day "
    "(kafka.topics_per_device_day_max); create the topic, or raise that setting",
    "topic-limit": "this gateway has made as many topics as it may (kafka.topics_created_max); create the topic, "
    "delete others that nobody needs, or raise that setting",
    "topic-refuses-records": "the Kafka topic refused one record after another; the reason of those records says why",
    "topic-max-message-bytes": "larger than the Kafka topic takes; raise its max.message.bytes",
    "topic-compacted": "compaction deletes readings; set cleanup.policy=delete on the Kafka topic",
    "topic-retention-too-short": "raise the Kafka topic's retention.ms (or retention.bytes), or lower "
    "kafka.retention_s_min",
    "topic-refuses-writes": "the Kafka topic's min.insync.replicas is above its replicas; lower it, or add replicas",
    "topic-config-hidden": "allow this gateway to see the topic's settings (ACL DescribeConfigs)",
    "topic-not-logappendtime": "set message.timestamp.type=LogAppendTime on the Kafka topic",
    "topic-not-created": "the broker refused to create the topic: sluice status has its reason; correct that, or "
    "create the topic there, with LogAppendTime",
    "topic-name-collides": "Kafka has a topic whose name differs only in '.' and '_', and does not allow both (sluice "
    "status names it); change the route and retry, or delete the other topic",
    "topic-refused": "the broker does not let this gateway see the topic; allow it in the broker's access list",
    TOPIC_FORBIDDEN: "the broker does not let this gateway write to the topic; allow it there (ACL Write): sluice "
    "status has the command",
    "broker-refused": "the broker refuses it; compare the topic's max.message.bytes, and see the broker's log",
    **{reason: f"{words}. {_REFUSED_AGAIN}" for reason, words in _UNREADABLE_LINES.items()},
    "salvaged-without-series": "it was salvaged from a damaged file, and its device is not known any more; export it, "
    "then drop it",
}
"""By reason of the quarantine: what it means, and what to do. A stored reason may go on behind a colon."""
_OF_ROUTES = frozenset(
    {NO_ROUTE, "ambiguous-route", "kafka-topic-reserved", BAD_NAME, LONG_NAME, "kafka-topic-name-invalid"}
)
"""Reasons that a change of [[routes]] corrects. A running gateway has read [[routes]] when it started."""
_OF_TOPICS = "topic-"
"""Prefix of reasons that concern a Kafka topic. The gateway itself takes such input in again."""

_NEVER_TAKEN = frozenset(
    {
        "not-the-writers-device",
        "salvaged-without-series",
        *_UNREADABLE_LINES,
    }
)
"""Reasons that stay for input already in the quarantine, whatever is corrected."""

# Lanes salvaged from another file have another buffer_id, and numbers that tell nothing of their age.
_LIVE_LANE = """
    SELECT max(number) FROM lane WHERE coalesce(buffer_id = (SELECT value FROM meta WHERE name = 'buffer_id'), TRUE)
"""

_device = click.option(
    "--device",
    metavar="NAME",
    callback=lambda _context, _option, name: "" if name == OWN_NAME else name,
    help=f"Only of this device; {OWN_NAME} stands for the gateway itself.",
)
_reason = click.option("--reason", metavar="REASON", help="Only input quarantined for this reason.")


@click.group(short_help="What waits? What could not be sent? Is the file sound?")
def buffer() -> None:
    """Show what waits for Kafka and what could not be forwarded, and check that the file is sound.

    Works whether the gateway runs or not. Only `quarantine retry` and `quarantine drop` change anything.
    """


class _Overview(Struct, frozen=True):
    """Output of `ls --json`. Sizes are in bytes."""

    gateway: str
    running: bool
    rows: int
    bytes_used: int
    bytes_max: int
    room_bytes: int
    """Room for more: up to buffer.bytes_max, and as long as the disk keeps buffer.free_bytes_min free."""
    oldest: Moment | None
    oldest_age_s: float | None
    hours_until_full: float | None
    """At the last day's intake, if nothing leaves; null if too little was seen, or nothing came in."""
    write_budget: WriteBudget
    lost: int
    devices: list[buffer_reading.DeviceDepth]


@buffer.command(
    name="ls",
    short_help="What waits, when the buffer will be full, card wear.",
    epilog="Example: sluice buffer ls --card-endurance-tbw 117",
)
@config_option
@click.option(
    "--card-endurance-tbw",
    type=named(click.FloatRange(min=0, min_open=True), "number of terabytes"),
    metavar="TB",
    default=CARD_ENDURANCE_TBW,
    show_default=True,
    help="Terabytes that the memory card's flash can take over its life. The default is that of a cheap card: 16 GB of "
    "TLC flash, each cell written 1,000 times. If the maker promises a TBW, give that, and --write-amplification 1.",
)
@click.option(
    "--write-amplification",
    type=named(click.FloatRange(min=1), "number"),
    metavar="FACTOR",
    default=WRITE_AMPLIFICATION,
    show_default=True,
    help="Bytes that the flash writes for each byte that the card gets. A synced write of 4 KiB takes a page of "
    "16 KiB, which is a factor of 4.",
)
@json_option
def ls(config: Path, card_endurance_tbw: float, write_amplification: float, as_json: bool) -> None:  # noqa: FBT001
    """Show what waits by device, how soon the buffer is full, and how much is written to the card.

    The time until it is full assumes the intake of the last 24 hours that sluice ran, and that nothing goes to Kafka.
    LOST counts readings that are gone for good, if that was not reported to Kafka yet. The row (gateway) has the
    gateway's own events, waiting or lost, and its waiting reports on quarantined input.
    """
    settings = load_as_service(config)
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
    """Room in the buffer, and how long it lasts at the last day's intake if nothing goes to Kafka."""

    bytes: int
    hours_until_full: float | None
    """None if too little was seen, or nothing came in."""
    seen_s: float
    """Seconds of running that the rates are from, at most the last 24 hours of running."""
    disk_bytes_per_day: float | None = None
    """Bytes written to the disk each day; None if too little was seen."""
    card_days: float | None = None
    """Days that a cheap memory card lasts at that rate (`sluice buffer ls` states its endurance)."""


def read_room_left(settings: Settings, daemon: dict[str, Any] | None) -> RoomLeft:
    """Read the room left in a buffer file; `daemon` is the daemon's answer to `state`, None without an answer.

    Raises click.ClickException if the file cannot be read.
    """
    with _opened(settings) as db:
        space = buffer_reading.space(db)
        hours = buffer_reading.usage(db)
    day = last_day([*_unwritten(daemon or {}), *hours])
    room = _room_bytes(settings, space)
    writes = write_budget(day)
    return RoomLeft(room, hours_until_full(room, day), day.seconds, writes.disk_bytes_per_day, writes.card_days)


def read_backlog_rows(settings: Settings) -> int:
    """Count the rows that wait in other lanes than the live one, which is this file's newest lane of its own.

    Raises click.ClickException if the file cannot be read.
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
    """Usage that a running gateway has counted and not written yet: it writes usage with a commit, and may be idle."""
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
    help="Number of readings.",
)
@click.option("--newest", is_flag=True, help="Show the newest instead, newest first.")
@json_option
def peek(config: Path, device: str | None, limit: int, newest: bool, as_json: bool) -> None:  # noqa: FBT001
    r"""Show the oldest waiting readings, one a line.

    On a terminal, lines are cut to its width. In a pipe they are whole. Control characters, and bytes that are not
    text, are shown as \x1b.
    """
    settings = load_as_service(config)
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
@click.option("--quarantine", is_flag=True, help="Export the quarantine instead of waiting rows.")
@click.option("--json", is_flag=True, expose_value=False, help="Changes nothing: the output is JSON anyway.")
def export(config: Path, device: str | None, quarantine: bool) -> None:  # noqa: FBT001
    """Write everything that waits to standard output as JSON lines, oldest first. Nothing is removed.

    Each line has the record's identity, device, Kafka topic, times and `payload`. If the payload is not UTF-8, the
    line has `payload_base64` instead of `payload`.
    """
    settings = load_as_service(config)
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
            # On standard error, so that a file of JSON lines stays empty.
            words = _nothing_set_aside(db, None, device) if quarantine else _nothing_waits(device)
            say(hanging(words, 4, sys.stderr), err=True)


@contextmanager
def _to_stdout() -> Iterator[Callable[[bytes], object]]:
    """Give a function that writes to standard output. End quietly if the reader closes the pipe."""
    try:
        yield sys.stdout.buffer.write
        sys.stdout.buffer.flush()
    except OSError as error:
        # At exit Python would flush the rest, fail again, and end with another exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return
        raise click.ClickException(f"the export ends early: {os.strerror(error.errno or errno.EIO)}") from error


@buffer.command(name="verify", short_help="Is the file sound?", epilog="Example: sluice buffer verify --full")
@config_option
@click.option("--full", is_flag=True, help="Let SQLite also compare indexes with tables (integrity_check); slower.")
@json_option
def verify_command(config: Path, full: bool, as_json: bool) -> None:  # noqa: FBT001
    """Check the buffer file: SQLite's own check, lanes without holes, references, bounds. Changes nothing.

    SQLite's check reads the whole file in one transaction. Meanwhile the WAL of a busy gateway grows.
    """
    settings = load_as_service(config)
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
    """List input that could not be forwarded, take it in again, or throw it away."""


@quarantine.command(
    name="ls", short_help="What is there, and why.", epilog="Example: sluice buffer quarantine ls --limit 100"
)
@config_option
@_reason
@_device
@click.option(
    "--limit",
    type=named(click.IntRange(1), "whole number"),
    metavar="N",
    help=f"How many to list. The default is {QUARANTINE_ROWS}, and with --json all.",
)
@json_option
def quarantine_ls(
    config: Path,
    reason: str | None,
    device: str | None,
    limit: int | None,
    as_json: bool,  # noqa: FBT001
) -> None:
    """Show why input is quarantined, with an example of each reason, and list it, newest first.

    --json prints everything except payloads. `sluice buffer export --quarantine` prints payloads too.
    """
    settings = load_as_service(config)
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
    """Say that the quarantine has nothing, or nothing of this reason or device."""
    whose = _whose(device)
    if reason is None:
        return f"the quarantine has nothing{whose}" if whose else "the quarantine is empty"
    # Only reasons of the device that was asked for are an answer.
    there = [_cut(each.reason) for each in buffer_reading.quarantine_reasons(db, device=device)]
    where = "reasons of this device" if whose else "reasons there"
    return f"the quarantine has nothing{whose} for '{escaped(reason)}'; {where}: {', '.join(there) or 'none'}"


def _example(reason: QuarantineReason) -> str:
    """Show one input of this reason, so that nobody need look further to see what it is."""
    whose = f" from {_cut(reason.device)}" if reason.device else ""
    example = escaped_bytes(reason.example)
    is_whole = reason.bytes == len(reason.example) and len(example) <= EXAMPLE_CHARACTERS_MAX
    rest = "" if is_whole else f" ({counted(reason.bytes, 'byte')}; {_WHOLE})"
    return f'e.g. "{shortened(example, EXAMPLE_CHARACTERS_MAX)}"{rest}{whose}'


_WHOLE = "whole: sluice buffer export --quarantine"


def _cut(text: str) -> str:
    """Escape a name, topic or reason. Of a long one, show the beginning and the length."""
    shown = escaped(text)
    if len(shown) <= TEXT_CHARACTERS_MAX:
        return shown
    return f"{shown[:TEXT_CHARACTERS_MAX]}… ({counted(len(text), 'character')}; {_WHOLE})"


def _then_lines(reasons: Iterable[str]) -> Iterator[str]:
    """Say what takes the input in again once its cause is corrected."""
    by_themselves = [name for name in reasons if name.startswith(_OF_TOPICS) or name == TOPIC_FORBIDDEN]
    if any(name not in _NEVER_TAKEN and name not in by_themselves for name in reasons):
        others = " (for other reasons than those below)" if by_themselves else ""
        yield f"Once the cause is corrected: sluice buffer quarantine retry --reason REASON{others}"
    if by_themselves:
        yield (
            f"Input quarantined for {', '.join(by_themselves)} is sent by itself once that is corrected, while sluice "
            "runs"
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
        """Convert as click does, with a message that says where to find the numbers."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            words = f"'{escaped(str(value))}' is no NUMBER: sluice buffer quarantine ls has them"
            self.fail(f"{words}; for all of one reason: --reason REASON", param, ctx)


def _selection(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--reason", metavar="REASON", help="All input quarantined for this reason.")(command)
    command = click.option("--all", "everything", is_flag=True, help="All quarantined input.")(command)
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
    """Take quarantined input in again, once its cause is corrected: a route, a topic, a limit of Kafka's.

    Input that is taken in goes to Kafka as new readings do. Input that the gateway still refuses stays in the
    quarantine (exit code 1). Input that Kafka still refuses comes back.
    """
    settings = load_as_service(config)
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
            words = "the running gateway has the routes that it was started with: restart it after changing [[routes]]"
            say(hanging(words, 4))
        _tell_unknown(unknown)
    sys.exit(FINDING if refused or unknown else 0)


@quarantine.command(short_help="Throw it away for good.", epilog="Example: sluice buffer quarantine drop 17 18")
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
    """Throw quarantined input away for good. Asks first.

    The input is counted as lost, and that is reported to kafka.events_topic.
    """
    settings = load_as_service(config)
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
    """Numbers of the chosen input, with their bytes. Raises UsageError unless exactly one way of choosing is used."""
    if sum((bool(numbers), reason is not None, everything)) != 1:
        raise click.UsageError("say which input: NUMBER..., --reason REASON or --all, and only one of these")
    with _opened(settings) as db:
        found = buffer_reading.quarantine_sizes(db, reason)
        if reason is not None and not found:
            raise click.ClickException(_nothing_set_aside(db, reason, None))
        return {number: found.get(number, 0) for number in numbers} if numbers else found


def request_parts(chosen: dict[int, int]) -> list[list[int]]:
    """Cut numbers into parts that one request, and one commit on a full disk, can take."""
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
    """Have a command done in parts: by the daemon, or in this process if no daemon runs."""
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
                f"{error}, although a gateway has the buffer open: its log says why; or stop it, and try again"
            ) from error
        except (control.ControlError, BufferFileError) as error:
            before = sum(map(len, parts[:number]))
            done = f" ({before:,} of {len(chosen):,} were done before)" if before else ""
            raise click.ClickException(f"{error}{done}") from error


async def _done_here(settings: Settings, command: str, parts: list[list[int]]) -> list[dict[str, Any]]:
    """Do a command as the daemon would: with the buffer's lock, and in a new lane."""
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
    """Header of a column of times. It says UTC if one of the times is UTC."""
    return f"{name} (UTC)" if any(not time.startswith((_SINCE_BOOT, "-")) for time in times) else name


def _since_boot_lines(times: Iterable[str]) -> Iterator[str]:
    """Explain below a table those of its times that are not UTC."""
    if any(time.startswith(_SINCE_BOOT) for time in times):
        words = "counted from a start of this box (not of the sensor) after which the box's clock was never synced"
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
