"""Reads one Kafka record as it is, without Spark: its time, device and values, or why it would become no reading.

Times are as they were sent: corrections and copies are known to the tables alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gateway.record_contract import GATEWAY_TYPES, HEADERS, READING_TYPE
from spark.decode.codec_avro import RegistryError
from spark.decode.codec_declarations import Streams
from spark.decode.codec_numbers import Value
from spark.decode.codec_plain import declaration, read_value

Headers = Sequence[tuple[str, bytes | None]]
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
    missing = next((header for header in HEADERS if header not in texts), None)
    if missing is not None:
        has_none = texts.keys().isdisjoint(HEADERS)
        told = "there is none of the gateway's headers" if has_none else f"{missing} is missing"
        return ReadRecord(*about, reject_reason=f"header: {told}")
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


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and len(text) < 20 and text.isascii() and text.isdecimal() else None
