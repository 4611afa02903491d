"""The rule book of Kafka records: what a record's key, headers and value mean, one record at a time, in plain Python.

`typed` reads the key and the headers (`docs/kafka-records.md`). `Reader.read` reads the value, or says why the record
is a reject. Whatever reads records faster must give the same rows. Executors import this module, and `peek` does.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from spark.decode import correction_records, loss_bodies
from spark.decode.codec_declarations import Streams
from spark.decode.codec_numbers import Value
from spark.decode.codec_plain import PayloadReader
from spark.decode.event_bodies import TEXT_BYTES_MAX, body_of
from spark.decode.record_times import rfc3339_us
from spark.decode.structured_events import event_of

# The text before the colon is the kind of a reject. Rejects are grouped by it.
HEADER = "header: "
CORRECTION = "correction: "
LOSS = "loss: "
EVENT = "event: "
SET_ASIDE = "set-aside: "
"""Kind of records that made their batch fail: see `record_faults`."""
NOT_THEIRS = "not-this-gateways-topic: "
"""Kind of records whose gateway may not speak in their topic: see `topic_speakers`."""
UNKNOWN_TYPE = f"unknown-type: ce_type is neither {READING_TYPE} nor {GATEWAY_TYPES}*"

_SHAPES = frozenset(
    HEADERS + device + doubt + boot_time_error
    for device in ((), DEVICE_HEADERS, (*DEVICE_HEADERS, COUNTER_HEADER))
    for doubt in ((), (DOUBT_HEADER,))
    for boot_time_error in ((), (BOOT_TIME_ERROR_HEADER,))
)
"""Shapes of a record: all lists of headers that it may have."""
BUFFER_CHARS = 16
LANE_SEQUENCE_MAX = 2**53
"""Largest number in a lane. A lane counts from 0, and reaches it after 285 years at a million rows a second. Sums and
products of such numbers fit into the tables' columns."""
VALUE_BYTES_MAX = 1_048_576
"""Bytes of a value that is decoded, which takes several times its size in memory. Longer values are rejected."""
KEPT_BYTES = 65_536
"""Bytes kept of a longer value. Compressed, such values are small in Kafka, but to write sixty of 8 MB in one batch
filled the memory."""
TOO_LARGE = f"the value is longer than {VALUE_BYTES_MAX} bytes, of which the first {KEPT_BYTES} are kept"
OTHER_HEADERS_MAX = 32
OTHER_HEADER_BYTES_MAX = 8_192
"""Bytes of a name, and of a value, of another sender's header. W3C's longest header, `baggage`, has so many. Of one
record, OTHER_HEADERS_MAX such headers are kept."""

NO_TIME = "is not RFC 3339 in UTC with microseconds"
NO_COUNT = "is not a count of microseconds"

FIELDS = {"kafka_timestamp": "kafka_us", "event_time": "event_us", "received_time": "received_us"}
"""Fields of a `Record` whose columns have other names."""
Headers = Sequence[tuple[str, bytes | None]]

_IDENTITY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{12}-[0-9]{1,19}")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_OURS = frozenset(HEADER_NAMES)


@dataclass(slots=True)
class Record:
    """One record as a row of `log`: its columns, with times in microseconds since 1970. None stands for null."""

    topic: str
    partition: int
    offset: int
    kafka_us: int
    """Kafka's timestamp."""
    key: str | None
    value: bytes | None
    headers: Headers | None
    namespace: str | None = None
    gateway: str | None = None
    device: str | None = None
    stream: str | None = None
    buffer: str | None = None
    lane: str | None = None
    lane_sequence: int | None = None
    ce_id: str | None = None
    ce_type: str | None = None
    subject: str | None = None
    event_us: int | None = None
    time_error_us: int | None = None
    time_quality: str | None = None
    received_us: int | None = None
    gateway_boot: str | None = None
    boot_time_us: int | None = None
    content_type: str | None = None
    device_boot: str | None = None
    device_sequence: int | None = None
    device_counter: str | None = None
    doubt: str | None = None
    boot_time_error_us: int | None = None
    header_fault: str | None = None
    """The first fault of the key and the headers."""
    metrics: list[Value] | None = None
    undeclared: list[str] | None = None
    """At most 16 numbers at the payload's top that the stream's declaration does not know. If the stream declares no
    metrics, numbers that no table holds. None if there are none."""
    reject_reason: str | None = None


def typed(  # noqa: PLR0913, PLR0917 - the fields of a Kafka record
    topic: str,
    partition: int,
    offset: int,
    kafka_us: int,
    key: bytes | None,
    value: bytes | None,
    headers: Headers | None,
) -> Record:
    """Return a record with its typed header columns, or with a `header_fault` if its key or headers do not fit.

    A record with a fault keeps all its headers; columns that could not be read are None. A record without a fault keeps
    only headers that the contract does not know (a tracer's, a mirror's), or None if there are none.

    A structured event becomes what its binary record would be. If it has a fault, it stays as it came.
    """
    text = _text(key)
    is_too_large = value is not None and len(value) > VALUE_BYTES_MAX
    kept = value[:KEPT_BYTES] if is_too_large and value is not None else value
    record = Record(topic, partition, offset, kafka_us, text, kept, headers, device=text, stream=topic)
    given, ours = headers or (), headers or ()
    shape = tuple([name for name, _ in ours])
    event = None
    if shape not in _SHAPES:
        event = None if is_too_large else event_of(given, value)
        if event is not None:
            given = event.headers
        ours = [header for header in given if header[0] in _OURS]
        shape = tuple([name for name, _ in ours])
    texts = {name: text for name, content in ours if (text := _text(content)) is not None}
    if shape not in _SHAPES or len(texts) < len(shape):
        record.header_fault = TOO_LARGE if is_too_large else next(_misfits(ours))
        return record
    fault = _take(record, texts)
    record.header_fault = TOO_LARGE if is_too_large else fault
    if record.header_fault is not None:
        # A record with a fault has no identity, so it is never a duplicate, and has none.
        record.ce_id = None
    else:
        record.headers = None if len(ours) == len(given) else _others(given)
        if event is not None:
            record.value, record.stream = event.value, event.stream or topic
    return record


class Reader:
    """Reads the values of typed records by the declarations of their streams."""

    def __init__(self, streams: Streams) -> None:
        self._payloads = PayloadReader(streams)
        self._times = streams.times

    def read(self, record: Record) -> None:
        """Set `metrics`, `undeclared` and `reject_reason` of a typed record. Raises `codec_avro.RegistryError` alone.

        Either `metrics` or `reject_reason` is None, and for gateway events both are. Of events, time corrections and
        losses are checked here, because tables derive from them. The driver reads the others itself: `BatchJob` checks
        them, and here they are good.
        """
        fault, kind = record.header_fault, record.ce_type
        if fault is not None:
            record.reject_reason = fault if fault.startswith((SET_ASIDE, NOT_THEIRS)) else HEADER + fault
        elif kind == READING_TYPE:
            found = self._payloads.read(record.stream or "", record.content_type or "", record.value)
            record.metrics, record.undeclared, record.reject_reason = (
                found.metrics,
                found.undeclared,
                found.reject_reason,
            )
        elif kind == correction_records.CORRECTION_TYPE:
            record.reject_reason = self._fault_of_correction(record)
        elif kind == loss_bodies.LOSS_TYPE:
            of_loss = loss_bodies.fault(body_of(record.value))
            record.reject_reason = of_loss and LOSS + of_loss
        elif kind is not None and not kind.startswith(GATEWAY_TYPES):
            record.reject_reason = UNKNOWN_TYPE

    def _fault_of_correction(self, record: Record) -> str | None:
        body = body_of(record.value)
        fault = correction_records.fault(body)
        if fault is None and body is not None:
            event_us, error_us = record.event_us or 0, record.time_error_us or 0
            fault = correction_records.untrue(body, event_us, error_us, record.kafka_us, self._times)
        return fault and CORRECTION + fault


def _take(record: Record, texts: dict[str, str]) -> str | None:
    """Take a record's columns from the texts of its headers. Return the first fault; None if there is none."""
    _, *source = texts["ce_source"].split("/")
    if len(source) == 2 and all(source) and texts["ce_source"].startswith("/"):
        record.namespace, record.gateway = source
        if record.key is not None:
            record.device = record.key.removeprefix(f"{record.namespace}/")
    ce_id, lane, number = texts["ce_id"], texts["ce_lane"], texts["ce_lanesequence"]
    if _IDENTITY.fullmatch(ce_id):
        record.buffer = ce_id[:BUFFER_CHARS]
    record.ce_id, record.lane, record.lane_sequence = ce_id, lane, _integer(number)
    record.ce_type, record.subject, record.content_type = texts["ce_type"], texts["ce_subject"], texts["content-type"]
    record.event_us, record.received_us = rfc3339_us(texts["ce_time"]), rfc3339_us(texts["ce_receivedtime"])
    record.time_error_us, record.time_quality = _integer(texts["ce_timeerror"]), texts["ce_timequality"]
    record.gateway_boot, record.boot_time_us = texts["ce_gatewayboot"], _integer(texts["ce_boottime"])
    record.device_boot, record.device_counter = texts.get("ce_deviceboot"), texts.get(COUNTER_HEADER)
    record.device_sequence = _integer(texts.get("ce_devicesequence"))
    record.doubt, record.boot_time_error_us = texts.get(DOUBT_HEADER), _integer(texts.get(BOOT_TIME_ERROR_HEADER))
    return _fault(record, texts)


def _fault(record: Record, texts: dict[str, str]) -> str | None:
    """The first text of a key and headers that is none that the contract allows; None if there is none."""
    number, boot_error_us = record.lane_sequence, record.boot_time_error_us
    is_identity = record.buffer and record.ce_id == f"{record.buffer}-{record.lane}-{texts['ce_lanesequence']}"
    for is_right, words in (
        (texts["ce_specversion"] == "1.0", "ce_specversion is not 1.0"),
        (record.key is not None, "the key is missing or not UTF-8"),
        (_are_short(record), f"the key or a header is longer than {TEXT_BYTES_MAX} bytes"),
        (record.namespace is not None, "ce_source is not /namespace/gateway"),
        (is_identity, "ce_id is not buffer, lane and lane sequence"),
        (number is not None, "ce_lanesequence is not a 64-bit integer"),
        (number is None or number <= LANE_SEQUENCE_MAX, f"ce_lanesequence is above {LANE_SEQUENCE_MAX}"),
        (record.event_us is not None, f"ce_time {NO_TIME}"),
        (record.received_us is not None, f"ce_receivedtime {NO_TIME}"),
        (record.time_error_us is not None and record.time_error_us >= 0, f"ce_timeerror {NO_COUNT}"),
        (record.boot_time_us is not None, f"ce_boottime {NO_COUNT}"),
        (
            record.device_sequence is not None or "ce_devicesequence" not in texts,
            "ce_devicesequence is not a 64-bit integer",
        ),
        (record.device_counter != "", "ce_devicecounter is empty"),
        (record.doubt is None or record.doubt in DOUBTS, "ce_doubt is no doubt that the contract knows"),
        (
            BOOT_TIME_ERROR_HEADER not in texts or (boot_error_us is not None and boot_error_us >= 0),
            f"{BOOT_TIME_ERROR_HEADER} {NO_COUNT}",
        ),
    ):
        if not is_right:
            return words
    return None


def _are_short(record: Record) -> bool:
    """True if the texts without another bound are short enough."""
    texts = (
        *(record.key, record.namespace, record.gateway, record.ce_type, record.subject, record.time_quality),
        *(record.gateway_boot, record.content_type, record.device_boot, record.device_counter),
    )
    # A character has at most four bytes.
    return all(
        text is None or len(text) * 4 <= TEXT_BYTES_MAX or len(text.encode()) <= TEXT_BYTES_MAX for text in texts
    )


def _misfits(ours: Headers) -> Iterator[str]:
    """Say which of the contract's headers is missing, comes twice, is out of place or is no text."""
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


def _others(headers: Headers) -> Headers:
    """The first OTHER_HEADERS_MAX headers that the contract does not know, cut to OTHER_HEADER_BYTES_MAX."""
    others = [header for header in headers if header[0] not in _OURS][:OTHER_HEADERS_MAX]
    return [
        (name[:OTHER_HEADER_BYTES_MAX], None if content is None else content[:OTHER_HEADER_BYTES_MAX])
        for name, content in others
    ]


def _text(content: bytes | None) -> str | None:
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError:
        return None


def _integer(text: str | None) -> int | None:
    """A whole number of 64 bits. The contract allows no spaces and no `+`."""
    if text is None or _INTEGER.fullmatch(text) is None:
        return None
    number = int(text)
    return number if -(2**63) <= number < 2**63 else None
