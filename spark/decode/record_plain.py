"""Reads one Kafka record as it is, without Spark: its time, device and values, or why it would become no reading.

Times are as they were sent: corrections and copies are known to the tables alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gateway.record_contract import (
    BOOT_TIME_ERROR_HEADER,
    COUNTER_HEADER,
    DEVICE_HEADERS,
    DOUBT_HEADER,
    DOUBTS,
    GATEWAY_TYPES,
    HEADER_NAMES,
    HEADERS,
    READING_TYPE,
)
from spark.decode.codec_avro import RegistryError
from spark.decode.codec_declarations import Streams
from spark.decode.codec_numbers import Value
from spark.decode.codec_plain import declaration, read_value

Headers = Sequence[tuple[str, bytes | None]]
_IDENTITY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{12}-[0-9]{1,19}")
_TIME = re.compile(r"(?!000[01])[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_LANE_SEQUENCE_MAX = 2**53
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """One record. None stands for a header that is missing or no such value."""

    device: str | None
    """The record's key, without the namespace."""
    gateway: str | None
    type: str | None
    """`ce_type`."""
    event_us: int | None
    """Time of the reading, in microseconds since 1970."""
    time_error_us: int | None
    time_quality: str | None
    metrics: list[Value] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)
    """Units of the metrics that are declared with one."""
    undeclared: list[str] = field(default_factory=list)
    reject_reason: str | None = None
    """The reason why the record would be no reading, as far as a record alone shows it."""

    @property
    def is_reading(self) -> bool:
        return self.type == READING_TYPE


def read_record(topic: str, key: bytes | None, value: bytes | None, headers: Headers, streams: Streams) -> ReadRecord:
    """Read a record by the declarations of its topic."""
    texts = {name: text for name, content in headers if (text := _text(content)) is not None}
    kind = texts.get("ce_type")
    namespace, _, gateway = texts.get("ce_source", "").removeprefix("/").partition("/")
    name = _text(key)
    about = (
        name.removeprefix(f"{namespace}/") if name is not None and namespace else name,
        gateway or None,
        kind,
        _time_us(texts.get("ce_time")),
        _count(texts.get("ce_timeerror")),
        texts.get("ce_timequality"),
    )
    fault = next(_misfits(headers), None) or next(_faults(name, texts), None)
    if fault is not None:
        return ReadRecord(*about, reject_reason=f"header: {fault}")
    if kind != READING_TYPE:
        is_gateways = kind is not None and kind.startswith(GATEWAY_TYPES)
        return ReadRecord(*about, reject_reason=None if is_gateways else "unknown-type: it is no reading and no event")
    try:
        found = read_value(topic, texts["content-type"], value, streams)
    except RegistryError as error:
        return ReadRecord(*about, reject_reason=f"the schema registry gives no schema: {error}")
    stream = declaration(topic, streams)
    units = {metric.name: metric.unit for metric in stream.metrics if metric.unit} if stream else {}
    return ReadRecord(*about, found.metrics or [], units, found.undeclared or [], found.reject_reason)


def _misfits(headers: Headers) -> Iterator[str]:
    """Say which of the contract's headers is missing, comes twice, is out of place or is no text."""
    ours = [(name, content) for name, content in headers if name in HEADER_NAMES]
    names = [name for name, _ in ours]
    if not names:
        yield "there is none of the gateway's headers"
    is_numbered = not {*DEVICE_HEADERS, COUNTER_HEADER}.isdisjoint(names)
    in_order = [name for name in HEADER_NAMES if name in names]
    needed = (*HEADERS, *DEVICE_HEADERS) if is_numbered else HEADERS
    yield from (f"{name} is missing" for name in needed if name not in names)
    yield from (f"{name} is there more than once" for name in in_order if names.count(name) > 1)
    pairs = zip(names, in_order, strict=False)
    yield from (f"{there} stands where {right} belongs" for there, right in pairs if there != right)
    yield from (f"{name} has no value in UTF-8" for name, content in ours if _text(content) is None)


def _faults(key: str | None, texts: Mapping[str, str]) -> Iterator[str]:
    """Say which texts of a key and headers are none that the contract allows, as `kafka_records` does in batches."""
    lane, number = texts["ce_lane"], texts["ce_lanesequence"]
    counts = {name: _integer(text) for name, text in texts.items() if name in HEADER_NAMES}
    before, *source = texts["ce_source"].split("/")
    is_identity = _IDENTITY.fullmatch(texts["ce_id"]) and texts["ce_id"][16:] == f"-{lane}-{number}"
    sequence = counts["ce_lanesequence"]
    no_count, no_time = "is not a count of microseconds", "is not RFC 3339 in UTC with microseconds"
    for is_right, words in (
        (texts["ce_specversion"] == "1.0", "ce_specversion is not 1.0"),
        (key is not None, "the key is missing or not UTF-8"),
        (not before and len(source) == 2 and all(source), "ce_source is not /namespace/gateway"),
        (is_identity, "ce_id is not buffer, lane and lane sequence"),
        (sequence is not None, "ce_lanesequence is not a 64-bit integer"),
        ((sequence or 0) <= _LANE_SEQUENCE_MAX, f"ce_lanesequence is above {_LANE_SEQUENCE_MAX}"),
        *(
            (_TIME.fullmatch(texts[name]) and _time_us(texts[name]) is not None, f"{name} {no_time}")
            for name in ("ce_time", "ce_receivedtime")
        ),
        (_count(texts["ce_timeerror"]) is not None, f"ce_timeerror {no_count}"),
        (counts["ce_boottime"] is not None, f"ce_boottime {no_count}"),
        (counts.get("ce_devicesequence", 0) is not None, "ce_devicesequence is not a 64-bit integer"),
        (texts.get(COUNTER_HEADER) != "", "ce_devicecounter is empty"),
        (texts.get(DOUBT_HEADER, DOUBTS[0]) in DOUBTS, "ce_doubt is no doubt that the contract knows"),
        (_count(texts.get(BOOT_TIME_ERROR_HEADER, "0")) is not None, f"{BOOT_TIME_ERROR_HEADER} {no_count}"),
    ):
        if not is_right:
            yield words


def _text(content: bytes | None) -> str | None:
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError:
        return None


def _time_us(text: str | None) -> int | None:
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    if time.tzinfo is None:
        return None
    passed = time - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def _integer(text: str) -> int | None:
    number = int(text) if _INTEGER.fullmatch(text) else None
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _count(text: str | None) -> int | None:
    number = _integer(text or "")
    return number if number is not None and number >= 0 else None
