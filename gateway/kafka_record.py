"""A buffered row as a Kafka record: a CloudEvents 1.0 event in Kafka's binary content mode.

The value is the sensor's payload, byte for byte; what the gateway knows is in the headers, in a fixed order.
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
)
"""The order on the wire; the last two only where the sensor sends them. Readers may take them by position."""
_RECORD_OVERHEAD_BYTES = 64
"""Lengths, offsets and timestamps of a record beside key, value and headers, rounded up."""

Headers = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """What all records of one series in one lane have in common, encoded once."""

    key: bytes
    topic: str
    id_prefix: str
    boot_id: str
    source: tuple[str, bytes]
    type: tuple[str, bytes]
    subject: tuple[str, bytes]
    gateway_boot: tuple[str, bytes]
    lane: tuple[str, bytes]
    content_type: tuple[str, bytes]
    of_gateway: bool


SPECVERSION = ("ce_specversion", b"1.0")


def record_frame(gateway: GatewaySettings, buffer_id: str, lane: Lane, series: Series) -> RecordFrame:
    """Encode the constant parts."""
    return RecordFrame(
        key=series.key.encode(),
        topic=series.topic,
        id_prefix=f"{buffer_id}-{lane.name}-",
        boot_id=lane.boot_id,
        source=("ce_source", f"/{gateway.namespace}/{gateway.id}".encode()),
        type=("ce_type", series.type.encode()),
        subject=("ce_subject", series.subject.encode()),
        gateway_boot=("ce_gatewayboot", lane.boot_id.encode()),
        lane=("ce_lane", lane.name.encode()),
        content_type=("content-type", series.content_type.encode()),
        of_gateway=series.type.startswith("sluice.gateway."),
    )


def record_headers(frame: RecordFrame, row: Row, clock: WallClock) -> Headers:
    """The headers of one row, its times derived from what is known of the clock now."""
    event_us = row.received_us if row.event_us is None else row.event_us
    error_us, quality = time_quality(frame, row, clock)
    headers = [
        SPECVERSION,
        ("ce_id", f"{frame.id_prefix}{row.sequence}".encode()),
        frame.source,
        frame.type,
        frame.subject,
        ("ce_time", rfc3339(clock.at(event_us))),
        ("ce_timeerror", b"%d" % error_us),
        ("ce_timequality", quality),
        ("ce_receivedtime", rfc3339(clock.at(row.received_us))),
        frame.gateway_boot,
        ("ce_boottime", b"%d" % event_us),
        frame.lane,
        ("ce_lanesequence", b"%d" % row.sequence),
        frame.content_type,
    ]
    if row.device_boot is not None:
        headers.append(("ce_deviceboot", row.device_boot.encode()))
        headers.append(("ce_devicesequence", b"%d" % (row.device_sequence or 0)))
    return headers


def time_quality(frame: RecordFrame, row: Row, clock: WallClock) -> tuple[int, bytes]:
    """The bound of the event time's error in microseconds, and how the time was obtained."""
    if clock.error_us is None:
        return TIME_ERROR_UNKNOWN_US, b"bounded"
    if frame.of_gateway:
        return clock.error_us, b"synced"
    if row.event_us is None and row.tick_ms is not None:
        # A sensor with a ring and a clock that was not learnt: the reading may be older than its receipt by any time.
        return TIME_ERROR_UNKNOWN_US, b"bounded"
    if row.event_us is None:
        return clock.error_us, b"received"
    return clock.error_us + row.event_error_us, b"estimated"


def record_bytes(frame: RecordFrame, row: Row, headers: Headers) -> int:
    """An upper bound of what the record takes in a request, uncompressed."""
    return (
        _RECORD_OVERHEAD_BYTES
        + len(frame.key)
        + len(row.payload)
        + sum(len(name) + len(value) + 4 for name, value in headers)
    )


def rfc3339(wall_us: int) -> bytes:
    """UTC in RFC 3339 with microseconds, from microseconds since 1970; clamped to the years 1 to 9999."""
    wall_us = min(max(wall_us, _EARLIEST_US), _LATEST_US)
    return b"%s.%06dZ" % (_whole_seconds(wall_us // 1_000_000), wall_us % 1_000_000)


_EARLIEST_US = int(datetime(1, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
_LATEST_US = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()) * 1_000_000


# Readings come in seconds, one after the other: the date is formatted once for each.
@lru_cache(maxsize=1024)
def _whole_seconds(wall_s: int) -> bytes:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S").rjust(19, "0").encode()
