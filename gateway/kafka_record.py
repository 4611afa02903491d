"""A buffered row as a Kafka record: a CloudEvents 1.0 event in Kafka's binary content mode.

The value is the sensor's payload, byte for byte; what the gateway knows is in the headers, in a fixed order. Records
are encoded here, in message format 2 (Kafka's documentation, "Record"): what all records of a series share, which is
most of each, is encoded once; a client library that is given headers cannot know that.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from gateway.buffer_rows import Lane, Row, Series
from gateway.clock_gateway import WallClock
from gateway.settings import GatewaySettings

TIME_ERROR_UNKNOWN_US = 2**63 - 1
"""`ce_timeerror` where nothing bounds the error: the clock was never synced in that boot."""
HEADER_NAMES = (
    "ce_specversion",
    "ce_id",
    "ce_source",
    "ce_type",
    "ce_subject",
    "ce_time",
    "ce_timeerror",
    "ce_timequality",
    "ce_receivedtime",
    "ce_gatewayboot",
    "ce_boottime",
    "ce_lane",
    "ce_lanesequence",
    "content-type",
    "ce_deviceboot",
    "ce_devicesequence",
    "ce_redelivered",
)
"""The order on the wire. Readers may take them by position; of the last three, the device's are there where the sensor
sends them, and `ce_redelivered` where a reading may be stored already under another `ce_id`."""
HEADERS_MIN = 14

_RFC3339_BYTES = 27


def _zigzag_varint(number: int) -> bytes:
    """A non-negative number as Kafka's records have it: zigzag, then seven bits a byte, least significant first."""
    number <<= 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_VARINTS = tuple(_zigzag_varint(number) for number in range(8192))


def _varint(number: int) -> bytes:
    return _VARINTS[number] if number < len(_VARINTS) else _zigzag_varint(number)


def _string(value: bytes) -> bytes:
    """A string with its length before it, as keys, values, and headers' names and values stand in a record."""
    return _varint(len(value)) + value


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """What all records of one series in one lane have in common, encoded once: the stretches between what differs."""

    topic: str
    key: bytes
    boot_id: str
    of_gateway: bool
    id_prefix: bytes
    encoded_key: bytes
    from_specversion_to_id: bytes
    from_source_to_time: bytes
    from_gatewayboot_to_boottime: bytes
    from_lane_to_lanesequence: bytes
    content_type: bytes


def record_frame(gateway: GatewaySettings, lane: Lane, series: Series) -> RecordFrame:
    """Encode the constant parts."""

    def name(text: str) -> bytes:
        return _string(text.encode())

    def header(text: str, value: str) -> bytes:
        return name(text) + _string(value.encode())

    return RecordFrame(
        topic=series.topic,
        key=series.key.encode(),
        boot_id=lane.boot_id,
        of_gateway=series.type.startswith("sluice.gateway."),
        id_prefix=f"{lane.buffer_id}-{lane.name}-".encode(),
        encoded_key=_string(series.key.encode()),
        from_specversion_to_id=header("ce_specversion", "1.0") + name("ce_id"),
        from_source_to_time=header("ce_source", f"/{gateway.namespace}/{gateway.id}")
        + header("ce_type", series.type)
        + header("ce_subject", series.subject)
        + name("ce_time")
        + _varint(_RFC3339_BYTES),
        from_gatewayboot_to_boottime=header("ce_gatewayboot", lane.boot_id) + name("ce_boottime"),
        from_lane_to_lanesequence=header("ce_lane", lane.name) + name("ce_lanesequence"),
        content_type=header("content-type", series.content_type),
    )


def encode_record(frame: RecordFrame, row: Row, clock: WallClock, offset: int) -> bytes:
    """The record of one row, its times derived from what is known of the clock now.

    `offset` is its place in its batch. Kafka's own timestamp is that of the batch: the broker's (LogAppendTime).
    """
    (_, row_sequence, _, received_us, event_us, _, _, device_boot, device_sequence, payload, redelivered) = row
    offset_us = clock.offset_us
    received = rfc3339(received_us + offset_us)
    if event_us is None:
        event_us, time = received_us, received
    else:
        time = rfc3339(event_us + offset_us)
    sequence = b"%d" % row_sequence
    boottime = b"%d" % event_us
    headers = HEADERS_MIN
    device = b""
    if device_boot is not None and device_sequence is not None:
        number = b"%d" % device_sequence
        device = _device_boot(device_boot) + _VARINTS[len(number)] + number
        headers += 2
    if redelivered:
        device += _REDELIVERED
        headers += 1
    record = b"".join(
        (
            # Attributes, and the distance from the batch's timestamp: both 0.
            b"\0\0",
            _varint(offset),
            frame.encoded_key,
            _varint(len(payload)),
            payload,
            _VARINTS[headers],
            frame.from_specversion_to_id,
            _VARINTS[len(frame.id_prefix) + len(sequence)],
            frame.id_prefix,
            sequence,
            frame.from_source_to_time,
            time,
            _time_quality(*time_quality(frame, row, clock)),
            received,
            frame.from_gatewayboot_to_boottime,
            _VARINTS[len(boottime)],
            boottime,
            frame.from_lane_to_lanesequence,
            _VARINTS[len(sequence)],
            sequence,
            frame.content_type,
            device,
        )
    )
    return _varint(len(record)) + record


def time_quality(frame: RecordFrame, row: Row, clock: WallClock) -> tuple[int, bytes]:
    """The bound of the event time's error in microseconds, and how the time was obtained."""
    if clock.error_us is None:
        return TIME_ERROR_UNKNOWN_US, b"bounded"
    if row.event_us is not None:
        return clock.error_us + row.event_error_us, b"synced" if frame.of_gateway else b"estimated"
    if frame.of_gateway:
        return clock.error_us, b"synced"
    if row.tick_ms is not None:
        # A sensor with a ring and a clock that was not learnt: the reading may be older than its receipt by any time.
        return TIME_ERROR_UNKNOWN_US, b"bounded"
    # With a bound of its own where it was taken in again in another boot than that of its receipt.
    return clock.error_us + row.event_error_us, b"received"


@lru_cache(maxsize=1024)
def _time_quality(error_us: int, quality: bytes) -> bytes:
    """The two headers, and the name of `ce_receivedtime`, which follows them."""
    return (
        _string(b"ce_timeerror")
        + _string(b"%d" % error_us)
        + _string(b"ce_timequality")
        + _string(quality)
        + _string(b"ce_receivedtime")
        + _varint(_RFC3339_BYTES)
    )


@lru_cache(maxsize=8192)
def _device_boot(boot: str) -> bytes:
    """The header, and the name of the one that follows it."""
    return _string(b"ce_deviceboot") + _string(boot.encode()) + _string(b"ce_devicesequence")


_REDELIVERED = _string(b"ce_redelivered") + _string(b"true")


def rfc3339(wall_us: int) -> bytes:
    """UTC in RFC 3339 with microseconds, from microseconds since 1970; clamped to the years 1 to 9999."""
    if not _EARLIEST_US <= wall_us <= _LATEST_US:
        wall_us = min(max(wall_us, _EARLIEST_US), _LATEST_US)
    return b"%b.%06dZ" % (_whole_seconds(wall_us // 1_000_000), wall_us % 1_000_000)


_EARLIEST_US = int(datetime(1, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
_LATEST_US = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()) * 1_000_000


# Readings come in seconds, one after the other: the date is formatted once for each.
@lru_cache(maxsize=1024)
def _whole_seconds(wall_s: int) -> bytes:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S").rjust(19, "0").encode()
