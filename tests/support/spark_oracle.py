"""Contents that the tables must have, computed in plain Python from all records at once. No Spark in here.

Written from docs/kafka-records.md and docs/tables.md, not from the jobs. If the two disagree, one is wrong.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from spark.decode.codec_declarations import NO_STREAMS, Streams
from tests.support.oracle_payloads import (
    EXACT,
    SIX_PLACES,
    NumberText,
    UnreadableError,
    declaration,
    json_object,
    outcome,
    utf8,
)

TIME_ERROR_UNKNOWN_US = 2**63 - 1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
REQUIRED = [
    *("ce_specversion", "ce_id", "ce_source", "ce_type", "ce_subject", "ce_time", "ce_timeerror", "ce_timequality"),
    *("ce_receivedtime", "ce_gatewayboot", "ce_boottime", "ce_lane", "ce_lanesequence", "content-type"),
]
OPTIONAL = ["ce_deviceboot", "ce_devicesequence"]
COUNTER = ["ce_devicecounter"]
DOUBT = ["ce_doubt"]
BOOT_TIME_ERROR = ["ce_boottimeerror"]
SHAPES = [
    REQUIRED + optional + doubt + boot_time_error
    for optional in ([], OPTIONAL, OPTIONAL + COUNTER)
    for doubt in ([], DOUBT)
    for boot_time_error in ([], BOOT_TIME_ERROR)
]
CORRECTION = "sluice.gateway.time-correction"
HEARTBEAT = "sluice.gateway.heartbeat"
STATE = "sluice.gateway.state"
TOLD_SLACK = timedelta(seconds=60)
KAFKA_SLACK = timedelta(seconds=60)
INTEGER = re.compile(r"-?[0-9]{1,19}")
TIME = re.compile(r"(?!000[01])[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")

Headers = list[tuple[str, bytes | None]]
Reading = tuple[str, str, str, str, datetime, Decimal, str, int, str, int | None]
"""namespace, device, stream, metric, event time, value, ce_id; the time's bound, quality and correction"""
Order = tuple[datetime, str, int, int]
GatewayBoot = tuple[str, str, str]
"""namespace, gateway, boot"""


@dataclass(frozen=True, slots=True)
class KafkaRecord:
    """One record as Kafka holds it."""

    topic: str
    partition: int
    offset: int
    timestamp: datetime
    key: bytes | None
    value: bytes | None
    headers: Headers | None

    @property
    def place(self) -> tuple[str, int, int]:
        return (self.topic, self.partition, self.offset)


@dataclass(frozen=True, slots=True)
class Event:
    """A record whose headers could be read."""

    record: KafkaRecord
    namespace: str
    device: str
    identity: tuple[str, str, int]
    ce_id: str
    type: str
    content_type: str
    time: datetime
    time_error_us: int
    time_quality: str
    gateway: str
    gateway_boot: str
    boot_time_us: int
    boot_time_error_us: int | None
    run: tuple[str, str, str, str, str, int] | None = None
    """Name of a reading with a sequence of its sensor: namespace, device, stream, counter, boot, sequence."""
    correction_version: int | None = None

    @property
    def known(self) -> bool:
        return self.time_error_us != TIME_ERROR_UNKNOWN_US

    def possible(self, streams: Streams) -> bool:
        """Whether it can have been taken at such a time."""
        ahead = timedelta(seconds=streams.times.ahead_max_s)
        return streams.times.plausible_from_time <= self.time <= self.record.timestamp + ahead


@dataclass(frozen=True, slots=True)
class Correction:
    """A gateway's later knowledge of one of its boots' clocks."""

    boot: GatewayBoot
    version: int
    quality: str
    boottime_us: int
    offset_us: int
    rate_ppm: Decimal
    error_us: int
    error_growth_ppm: Decimal
    supersedes: bool
    told: datetime
    ce_id: str


@dataclass(frozen=True, slots=True)
class WindowRow:
    """One row of `windows` but for its history."""

    n: int
    min: Decimal
    max: Decimal
    sum: Decimal
    first: Decimal
    last: Decimal


WindowKey = tuple[str, str, str, str, datetime]


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables that an analyst must find, whatever the batches were."""

    readings: list[Reading]
    windows: dict[WindowKey, WindowRow]
    rejected: set[tuple[str, int, int]]
    duplicates: int


def tables(records: Iterable[KafkaRecord], streams: Streams = NO_STREAMS) -> Tables:
    """Compute everything from all records at once, each given once."""
    rejected: set[tuple[str, int, int]] = set()
    copies: dict[str, list[tuple[Event, Mapping[str, Decimal], Correction | None]]] = defaultdict(list)
    for record in records:
        try:
            event = read_headers(record)
        except UnreadableError:
            rejected.add(record.place)
            continue
        try:
            metrics = {} if event.type.startswith("sluice.gateway.") else read_payload(event, streams)
            correction = read_correction(event, streams) if event.type == CORRECTION else None
            if event.type == HEARTBEAT:
                expect_heartbeat(event)
            if event.type == STATE:
                expect_state(event)
        except UnreadableError:
            # No copy of anything: a good one may come yet.
            rejected.add(record.place)
            continue
        copies[event.ce_id].append((event, metrics, correction))
    kept, conflicts = told_apart([copy for same in copies.values() for copy in same], streams)
    rejected |= {event.record.place for event, _, _ in conflicts}
    duplicates = sum(len(same) for same in copies.values()) - len(kept) - len(conflicts)
    first_copies = kept
    told: dict[GatewayBoot, list[Correction]] = defaultdict(list)
    for _, _, correction in first_copies:
        if correction is not None:
            told[correction.boot].append(correction)
    mended = [(retimed(event, told), metrics) for event, metrics, _ in first_copies]
    # Where the gateway knew its clock, what cannot be is wrong; where it did not, nothing is known.
    timed = [(event, metrics) for event, metrics in mended if event.possible(streams) or not event.known]
    readings = [
        (
            *(e.namespace, e.device, e.record.topic, metric, e.time, value, e.ce_id),
            *(e.time_error_us, e.time_quality, e.correction_version),
        )
        for e, metrics in timed
        for metric, value in metrics.items()
    ]
    dated = [(event, metrics) for event, metrics in timed if event.possible(streams) and event.known]
    return Tables(sorted(readings), windows(dated, streams.windows.sizes[0]), rejected, duplicates)


Copy = tuple[Event, Mapping[str, Decimal], Correction | None]


def told_apart(copies: list[Copy], streams: Streams = NO_STREAMS) -> tuple[list[Copy], list[Copy]]:
    """Return the copies that count, and copies with another payload than the first one. Others are duplicates.

    A reading is named by its `ce_id`, and also by its sensor's sequence if the sensor sends one.
    """
    first_of_id: dict[str, Order] = {}
    for event, _, _ in copies:
        first_of_id[event.ce_id] = min(order(event), first_of_id.get(event.ce_id, order(event)))
    kept, conflicts = chosen(copies, lambda event: event.ce_id, first_of_id, streams)
    numbered = [copy for copy in kept if copy[0].run is not None]
    by_run, conflicting = chosen(numbered, lambda event: event.run, first_of_id, streams)
    return [copy for copy in kept if copy[0].run is None] + by_run, conflicts + conflicting


def chosen(
    copies: list[Copy], name: Callable[[Event], object], first_of_id: Mapping[str, Order], streams: Streams
) -> tuple[list[Copy], list[Copy]]:
    named: dict[object, list[Copy]] = defaultdict(list)
    for copy in copies:
        named[name(copy[0])].append(copy)
    kept, conflicts = [], []
    for same in named.values():
        right = min(same, key=lambda copy: (first_of_id[copy[0].ce_id], order(copy[0])))[0].record.value
        by_payload: dict[bytes | None, list[Copy]] = defaultdict(list)
        for copy in same:
            stream = declaration(copy[0].record.topic, streams)
            if copy[0].record.value == right or (stream is not None and stream.conflicts == "keep"):
                by_payload[copy[0].record.value].append(copy)
            else:
                conflicts.append(copy)
        kept += [min(alike, key=lambda copy: (copy[0].time_error_us, order(copy[0]))) for alike in by_payload.values()]
    return kept, conflicts


def order(event: Event) -> Order:
    """Kafka's."""
    return (event.record.timestamp, *event.record.place)


def retimed(event: Event, told: Mapping[GatewayBoot, list[Correction]]) -> Event:
    """Give a reading the time that the last correction of its gateway's boot says, where that applies."""
    versions = sorted(
        told.get((event.namespace, event.gateway, event.gateway_boot), []),
        key=lambda correction: (correction.version, correction.ce_id),
    )
    if not versions or event.time_quality == "device":
        return event
    last = versions[-1]
    away = event.boot_time_us - last.boottime_us
    time_us = event.boot_time_us + last.offset_us + millionths(away, last.rate_ppm)
    own_error_us = event.time_error_us if event.boot_time_error_us is None else event.boot_time_error_us
    growth_us = -millionths(-abs(away), last.error_growth_ppm, down=True)
    error_us = min(last.error_us + growth_us + own_error_us, TIME_ERROR_UNKNOWN_US)
    try:
        time = EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return event
    if time.year < 2:
        return event
    wrong = [correction.told for correction in versions if correction.supersedes]
    better = error_us < event.time_error_us and time <= last.told + TOLD_SLACK
    if not better and not (wrong and time <= wrong[-1] + TOLD_SLACK):
        return event
    quality = event.time_quality
    if last.quality == "bounded":
        quality = "bounded"
    elif quality == "bounded" and event.boot_time_error_us != TIME_ERROR_UNKNOWN_US:
        quality = "estimated"
    return replace(event, time=time, time_error_us=error_us, time_quality=quality, correction_version=last.version)


def millionths(number: int, ppm: Decimal, *, down: bool = False) -> int:
    """`ppm` millionths of a number, cut towards zero, or with `down` to the next lower whole number."""
    product = number * int(ppm.scaleb(6))
    return product // 10**12 if down or product >= 0 else -(-product // 10**12)


def windows(events: Iterable[tuple[Event, Mapping[str, Decimal]]], window_s: int) -> dict[WindowKey, WindowRow]:
    """Fold readings."""
    grouped: dict[WindowKey, list[tuple[datetime, tuple[str, str, int], Decimal]]] = defaultdict(list)
    for event, metrics in events:
        start = event.time - (event.time - EPOCH) % timedelta(seconds=window_s)
        for metric, value in metrics.items():
            key = (event.namespace, event.device, event.record.topic, metric, start)
            grouped[key].append((event.time, event.identity, value))
    return {key: fold(sorted(members)) for key, members in grouped.items()}


def fold(members: list[tuple[datetime, tuple[str, str, int], Decimal]]) -> WindowRow:
    values = [value for _, _, value in members]
    return WindowRow(len(values), min(values), max(values), sum(values, Decimal(0)), values[0], values[-1])


def read_headers(record: KafkaRecord) -> Event:
    """Read a record's headers by the contract, or raise UnreadableError."""
    known = {*REQUIRED, *OPTIONAL, *COUNTER, *DOUBT, *BOOT_TIME_ERROR}
    headers = [(name, value) for name, value in record.headers or [] if name in known]
    if [name for name, _ in headers] not in SHAPES:
        raise UnreadableError
    given = {name: utf8(value) for name, value in headers}
    source = re.fullmatch("/([^/]+)/([^/]+)", given["ce_source"])
    identity = re.fullmatch("([0-9a-f]{16})-([0-9a-f]{12})-([0-9]+)", given["ce_id"])
    if given["ce_specversion"] != "1.0" or source is None or identity is None:
        raise UnreadableError
    if identity[2] != given["ce_lane"] or identity[3] != given["ce_lanesequence"]:
        raise UnreadableError
    sequence = integer(given["ce_lanesequence"])
    time(given["ce_receivedtime"])
    time_error_us = integer(given["ce_timeerror"])
    if time_error_us < 0:
        raise UnreadableError
    if "ce_devicesequence" in given:
        integer(given["ce_devicesequence"])
    if given.get("ce_devicecounter", "its topic") == "":
        raise UnreadableError
    if given.get("ce_doubt", "conflict") not in {"redelivered", "conflict"}:
        raise UnreadableError
    boot_time_error_us = integer(given["ce_boottimeerror"]) if "ce_boottimeerror" in given else None
    if boot_time_error_us is not None and boot_time_error_us < 0:
        raise UnreadableError
    device = utf8(record.key).removeprefix(f"{source[1]}/")
    run = None
    if "ce_devicesequence" in given and given["ce_type"] == "sluice.reading":
        numbers = given.get("ce_devicecounter", ""), given["ce_deviceboot"], integer(given["ce_devicesequence"])
        run = (source[1], device, record.topic, *numbers)
    return Event(
        record=record,
        namespace=source[1],
        device=device,
        identity=(identity[1], identity[2], sequence),
        ce_id=given["ce_id"],
        type=given["ce_type"],
        content_type=given["content-type"],
        time=time(given["ce_time"]),
        time_error_us=time_error_us,
        time_quality=given["ce_timequality"],
        gateway=source[2],
        gateway_boot=given["ce_gatewayboot"],
        boot_time_us=integer(given["ce_boottime"]),
        boot_time_error_us=boot_time_error_us,
        run=run,
    )


def read_correction(event: Event, streams: Streams) -> Correction:
    """Return what a time correction says, or raise UnreadableError."""
    found = correction_in(event)
    if not can_be_true(found, event, streams):
        raise UnreadableError
    return found


def expect_heartbeat(event: Event) -> None:
    """Raise UnreadableError where a heartbeat lacks what it has to tell."""
    if not {"offsets", "pending", "quarantined", "low_watermark"} <= json_object(utf8(event.record.value)).keys():
        raise UnreadableError


def expect_state(event: Event) -> None:
    """Raise UnreadableError where a state lacks what it has to tell."""
    if not {"version", "lane_number", "conditions"} <= json_object(utf8(event.record.value)).keys():
        raise UnreadableError


def correction_in(event: Event) -> Correction:
    """Return what a time correction says, be it true or not, or raise UnreadableError."""
    body = json_object(utf8(event.record.value))

    def number(name: str, least: int | None = None) -> int:
        given = body.get(name)
        if not isinstance(given, NumberText) or not re.fullmatch("-?[0-9]+", given):
            raise UnreadableError
        value = integer(given)
        if least is not None and value < least:
            raise UnreadableError
        return value

    def rate(name: str, least: int) -> Decimal:
        given = body.get(name)
        if not isinstance(given, NumberText):
            raise UnreadableError
        # As most readers of JSON do: with an exponent it is a binary fraction.
        value = Decimal(repr(float(given))) if "e" in given.lower() else Decimal(given)
        if not value.is_finite() or abs(value) > 10**9:
            raise UnreadableError
        value = value.quantize(SIX_PLACES, context=EXACT)
        if not least <= value <= 100_000:
            raise UnreadableError
        return value

    boot, supersedes = body.get("boot"), body.get("supersedes")
    if not isinstance(boot, str) or isinstance(boot, NumberText) or not isinstance(supersedes, bool):
        raise UnreadableError
    quality = body.get("quality")
    if not isinstance(quality, str) or quality not in {"synced", "bounded"}:
        raise UnreadableError
    return Correction(
        boot=(event.namespace, event.gateway, boot),
        version=number("version", 1),
        quality=quality,
        boottime_us=number("boottime_us"),
        offset_us=number("offset_us"),
        rate_ppm=rate("rate_ppm", -100_000),
        error_us=number("error_us", 0),
        error_growth_ppm=rate("error_growth_ppm", 0),
        supersedes=supersedes,
        told=event.time,
        ce_id=event.ce_id,
    )


def can_be_true(found: Correction, event: Event, streams: Streams) -> bool:
    """Nobody knows a moment before it was; and nobody had a gateway before the first."""
    until_us = microseconds(event.record.timestamp + KAFKA_SLACK)
    looked_us = found.boottime_us + found.offset_us
    told_us = microseconds(event.time) - (event.time_error_us if event.known else 0)
    earliest_us = microseconds(streams.times.plausible_from_time)
    ahead = told_us > until_us or looked_us - found.error_us > until_us
    return not ahead and looked_us + found.error_us >= earliest_us


def microseconds(time: datetime) -> int:
    """Since 1970."""
    return (time - EPOCH) // timedelta(microseconds=1)


def read_payload(event: Event, streams: Streams) -> Mapping[str, Decimal]:
    """Return the metrics of a reading, or raise UnreadableError."""
    if event.type != "sluice.reading":
        raise UnreadableError
    found = outcome(event, streams)
    if found.metrics is None:
        raise UnreadableError
    return found.metrics


def integer(text: str) -> int:
    if not INTEGER.fullmatch(text) or not -(2**63) <= int(text) < 2**63:
        raise UnreadableError
    return int(text)


def time(text: str) -> datetime:
    if not TIME.fullmatch(text):
        raise UnreadableError
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise UnreadableError from error
