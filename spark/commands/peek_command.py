"""`sluice-cloud peek`: the records of one Kafka topic, decoded."""

import asyncio
import base64
import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gateway.host.terminal import say
from gateway.host.terminal_text import counted, escaped
from spark.commands.answers import LIMIT, beside, say_json
from spark.commands.asked_options import TIME, LastType, zone_option
from spark.commands.cli_options import (
    existing,
    expect_kafka,
    json_option,
    kafka_config_option,
    kafka_option,
    kafka_settings,
    streams_option,
)
from spark.commands.desk_session import asking
from spark.commands.table_text import cell_text
from spark.decode.codec_declarations import NO_STREAMS, Streams
from spark.desk.asked import microseconds, text
from spark.desk.row_text import plain_text, rfc3339, time_text
from spark.log.edge_times import LATEST_US

if TYPE_CHECKING:
    from aiokafka import ConsumerRecord

    from spark.source.topic_reader import Extent, Reader

SEARCHED = 10_000
"""Records at the end of each partition that are searched for the last ones of a device."""
RAW_BYTES = 200
"""Bytes of a value that a terminal shows."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Which records are wanted, and in which form."""

    topic: str
    partition: int | None
    device: str | None
    since_us: int | None
    offset: int | None
    limit: int
    follows: bool
    is_raw: bool
    as_json: bool
    zone: tzinfo


@click.command(short_help="Show the records of a Kafka topic, decoded.")
@click.argument("topic")
@click.option(
    "--bootstrap", required=True, metavar="HOST:PORT", help="Addresses of Kafka brokers, separated by commas."
)
@click.option("--device", help="Show this device only.")
@click.option("--partition", type=click.IntRange(0), help="Read this partition only.")
@click.option("--since", type=TIME, metavar="TIME", help="Begin with records that Kafka took in then.")
@click.option("--last", type=LastType(), metavar="SPAN", help="Begin so long ago: 30min, 2h, 7d.")
@click.option("--offset", type=click.IntRange(0), help="Begin at this offset of each partition.")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=LIMIT, show_default=True, help="Most records.")
@click.option("--follow", is_flag=True, help="Go on with records as they come, until Ctrl-C.")
@click.option("--raw", is_flag=True, help="Show the values' bytes, too.")
@click.option(
    "--warehouse",
    metavar="PATH",
    callback=lambda context, option, path: path and existing(context, option, path),
    help="Folder of the tables: says how far `ingest` has read, and has the declarations.",
)
@streams_option
@zone_option("--since is")
@kafka_config_option
@kafka_option
@json_option
def peek(  # noqa: PLR0913, PLR0917 - one argument for each option
    topic: str,
    bootstrap: str,
    device: str | None,
    partition: int | None,
    since: datetime | None,
    last: timedelta | None,
    offset: int | None,
    limit: int,
    follow: bool,  # noqa: FBT001 - a flag of the command line
    raw: bool,  # noqa: FBT001
    warehouse: str | None,
    streams: Streams | None,
    zone: tzinfo,
    kafka_config: Path | None,
    kafka_options: tuple[str, ...],
    as_json: bool,  # noqa: FBT001
) -> None:
    """Show the latest records of a Kafka topic, decoded, or those from a time or an offset on.

    Each line has the time, the device, its values with their units, the time's quality and bound, how much later Kafka
    took the record in, and its partition and offset. Times are as they were sent: corrections are known to the tables
    alone. Values are read by --streams, or as the warehouse was last written. It leaves no trace in Kafka.
    """
    if sum(each is not None for each in (since, last, offset)) > 1:
        raise click.UsageError("--since, --last and --offset say where to begin; give one of them")
    if last is not None:
        since = datetime.now(UTC) - last
    asked = _Asked(
        topic=topic,
        partition=partition,
        device=device,
        since_us=None if since is None else microseconds(since, zone),
        offset=offset,
        limit=limit,
        follows=follow,
        is_raw=raw,
        as_json=as_json,
        zone=zone,
    )
    settings = kafka_settings(kafka_options, kafka_config)
    from spark.source.kafka_python import client_options  # noqa: PLC0415 - aiokafka takes a while to import

    options, unused = client_options(settings)
    if unused:
        beside(f"of no use here, and passed over: {', '.join(unused)}")
    declared, read_to = (NO_STREAMS, None) if warehouse is None else _of_warehouse(warehouse, topic)
    expect_kafka(bootstrap)
    try:
        asyncio.run(_peek(asked, bootstrap, options, streams or declared, read_to))
    except KeyboardInterrupt:
        # The usual end of --follow.
        if not follow:
            raise


def _of_warehouse(warehouse: str, topic: str) -> tuple[Streams, dict[int, int]]:
    """The declarations by which a warehouse was written, and the next offset of each partition that it lacks."""
    with asking(warehouse) as tables:
        folder, streams = tables.version()
        limits = f'"min.topic" <= {text(topic)} AND "max.topic" >= {text(topic)}'
        log = tables.source.table(f"{folder}/log", files=limits)
        query = f'SELECT partition, max("offset") + 1 FROM ({log}) WHERE topic = {text(topic)} GROUP BY ALL'
        return streams, dict(tables.source.rows(query))


async def _peek(
    asked: _Asked, bootstrap: str, options: Mapping[str, Any], streams: Streams, read_to: Mapping[int, int] | None
) -> None:
    from spark.source.topic_reader import opened  # noqa: PLC0415 - as above

    async with opened(bootstrap, options, asked.topic, asked.partition) as reader:
        extents = await reader.extents()
        for number, extent in extents.items():
            beside(_extent_words(number, extent, read_to))
        begin = await _begin(asked, reader, extents)
        ends = {number: extent.end for number, extent in extents.items()}
        show = partial(_show, asked, streams)
        if not await _past(asked, reader, begin, ends, show) and not asked.follows:
            beside(_nothing_words(asked, begin, ends))
        if asked.follows:
            async for record in reader.records(ends, None):
                if _is_wanted(asked, record):
                    show(record)


async def _past(
    asked: _Asked,
    reader: "Reader",
    begin: Mapping[int, int],
    ends: Mapping[int, int],
    show: Callable[["ConsumerRecord"], None],
) -> bool:
    """Show the records that are there already. Returns False if none is wanted."""
    is_tail = asked.since_us is None and asked.offset is None
    # Partitions come one after the other: the last to come need not be the latest.
    tail: list[tuple[int, int, int, ConsumerRecord]] = []
    count = 0
    async for record in reader.records(begin, ends):
        if not _is_wanted(asked, record):
            continue
        count += 1
        if is_tail:
            heapq.heappush(tail, (record.timestamp, record.partition, record.offset, record))
            if len(tail) > asked.limit:
                heapq.heappop(tail)
        elif count > asked.limit and not asked.follows:
            beside(f"there are more than these {counted(asked.limit, 'record')}: --limit {asked.limit * 10}")
            break
        else:
            show(record)
    for *_, record in sorted(tail):
        show(record)
    return count > 0


async def _begin(asked: _Asked, reader: "Reader", extents: "Mapping[int, Extent]") -> dict[int, int]:
    """The offset of each partition to begin at."""
    if asked.since_us is not None:
        # Kafka takes numbers below 0 for other questions.
        found = await reader.offsets_at(max(0, asked.since_us // 1_000))
        return {
            number: extent.end if (offset := found[number]) is None else offset for number, extent in extents.items()
        }
    if asked.offset is not None:
        return {number: max(extent.first, min(asked.offset, extent.end)) for number, extent in extents.items()}
    tail = asked.limit if asked.device is None else max(SEARCHED, asked.limit)
    return {number: max(extent.first, extent.end - tail) for number, extent in extents.items()}


def _is_wanted(asked: _Asked, record: "ConsumerRecord") -> bool:
    if asked.device is None:
        return True
    # A key may have the namespace in front.
    key = (record.key or b"").decode(errors="replace")
    return key == asked.device or key.endswith(f"/{asked.device}")


def _extent_words(number: int, extent: "Extent", read_to: Mapping[int, int] | None) -> str:
    count = extent.end - extent.first
    held = f"offsets {extent.first:,} to {extent.end - 1:,}" if count else f"empty, next offset {extent.end:,}"
    if read_to is None:
        return f"partition {number}: {held}"
    if number not in read_to:
        return f"partition {number}: {held}; the tables have none of it"
    if read_to[number] > extent.end:
        return f"partition {number}: {held}; the tables have all to {read_to[number] - 1:,}: was the topic made anew?"
    behind = extent.end - read_to[number]
    return f"partition {number}: {held}; the tables have all before {read_to[number]:,}, {behind:,} behind"


def _nothing_words(asked: _Asked, begin: Mapping[int, int], ends: Mapping[int, int]) -> str:
    searched = sum(ends[number] - begin[number] for number in begin)
    of = "" if asked.device is None else f" of {asked.device}"
    return f"no record{of} among the {searched:,} offsets that were searched"


def _show(asked: _Asked, streams: Streams, record: "ConsumerRecord") -> None:
    from spark.decode.record_plain import read_record  # noqa: PLC0415 - only here

    # A sender may give any time.
    taken_us = record.timestamp * 1_000 if 0 <= record.timestamp <= LATEST_US // 1_000 else None
    read = read_record(record.topic, taken_us or 0, record.key, record.value, record.headers, streams)
    late_us = None if read.event_us is None or taken_us is None else taken_us - read.event_us
    if asked.as_json:
        told: dict[str, object] = {
            "event_time": None if read.event_us is None else rfc3339(read.event_us, asked.zone),
            "time_error_us": read.time_error_us,
            "time_quality": read.time_quality,
            "kafka_time": None if taken_us is None else rfc3339(taken_us, asked.zone),
            "late_s": None if late_us is None else late_us / 1e6,
            "gateway": read.gateway,
            "device": read.device,
            "type": read.type,
            "metrics": [
                {"name": name, "value": str(value), "unit": read.units.get(name), "ago_us": ago_us}
                for name, value, ago_us in read.metrics
            ],
            "undeclared": read.undeclared,
            "reject_reason": read.reject_reason,
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
        }
        if asked.is_raw:
            told["value"] = None if record.value is None else base64.b64encode(record.value).decode()
        say_json(told)
        return
    values = ", ".join(
        f"{name} {plain_text(value)}{' ' + read.units[name] if name in read.units else ''}"
        f"{f' ({ago_us / 1e6:g} s before)' if ago_us else ''}"
        for name, value, ago_us in read.metrics
    )
    bound = "" if read.time_error_us is None else f" ±{_bound(read.time_error_us)}"
    parts = (
        time_text(read.event_us, asked.zone),
        read.device or "-",
        read.reject_reason or values or (read.type or "-").removeprefix("sluice."),
        f"{read.time_quality or '-'}{bound}",
        "-" if late_us is None else f"late {late_us / 1e6:.1f} s",
        f"{record.partition}:{record.offset}",
    )
    say("  ".join(map(escaped, parts)))
    if asked.is_raw or (not read.is_reading and read.reject_reason is None):
        say(f"    {_raw_text(record.value)}")


def _bound(us: int) -> str:
    told = cell_text("time_error_us", us)
    return told if told == "unbounded" else f"{us / 1e3:g} ms"


def _raw_text(value: bytes | None) -> str:
    if value is None:
        return "(no value)"
    cut = value[:RAW_BYTES]
    try:
        shown = escaped(cut.decode())
    except UnicodeDecodeError:
        shown = cut.hex(" ")
    return shown if len(cut) == len(value) else f"{shown} ... ({len(value):,} bytes)"
