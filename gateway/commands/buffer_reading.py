"""Reads a buffer file for `sluice buffer`, beside the daemon that writes it.

A long read would make the WAL grow, on a disk that may be full. So each transaction here reads a few thousand rows at
most, and the next one goes on behind the last (lane, sequence).
"""

import base64
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from msgspec import UNSET, Struct, UnsetType
from sqlite_utils import Database

from gateway.buffer.boots import clock_of
from gateway.buffer.losses import OWN_LOSSES
from gateway.buffer.room import SIZE_SQL
from gateway.buffer.rows import OWN_TYPES, ROW_COLUMNS, Position, Row, Series, Span
from gateway.buffer.status import Moment, moment, open_to_read
from gateway.buffer.stored_rows import first_after, first_of, last_before, last_of, rows_within
from gateway.buffer.wear import UsageHour
from gateway.clock.gateway_clock import BootClock, BootTimes
from gateway.clock.rfc3339 import rfc3339
from gateway.clock.sensor_dates import DEFAULT_LIMITS, TimeLimits, told_us
from gateway.kafka.record import DOUBTS, time_quality
from gateway.record_contract import DEVICE, TIME_ERROR_UNKNOWN_US
from gateway.user_properties import of_text

SPAN_ROWS = 20_000
"""Sequence numbers that one transaction searches."""
PAGE_ROWS = 1_000
EXAMPLE_BYTES_MAX = 300
"""Bytes of one quarantined input that are shown as the example of its reason."""
PAGE_BYTES = 4_000_000
"""Payload bytes beyond which a page of rows ends early."""

# The gateway's own events and reports count as the gateway's, even if they name a device.
_DEVICE = f"iif(series.type LIKE '{OWN_TYPES}%', '', series.device)"
_DEPTHS = f"""
    SELECT coalesce({_DEVICE}, ''), count(*), sum(size), min(received_us), max(received_us)
    FROM {rows_within(f"series, {SIZE_SQL} AS size, received_us")} AS found
    LEFT JOIN series ON series.number = found.series GROUP BY 1
"""
_LANES = f"""
    SELECT lane.number, lane.name, lane.boot_id AS boot,
        lane.buffer_id <> (SELECT value FROM meta WHERE name = 'buffer_id') IS TRUE AS salvaged,
        coalesce(lane.buffer_id, (SELECT value FROM meta WHERE name = 'buffer_id')) AS buffer,
        coalesce(boot.offset_us, 0) AS offset_us, boot.error_us, boot.clock,
        {first_of("lane.number", "sequence")} AS first, {last_of("lane.number", "sequence")} AS last
    FROM lane LEFT JOIN boot ON boot.boot_id = lane.boot_id
    WHERE first IS NOT NULL ORDER BY lane.number
"""
_LOST = """
    SELECT CASE WHEN reason IN (?, ?) THEN '' ELSE nullif(device, '') END, sum(count) AS lost
    FROM loss GROUP BY 1 HAVING lost > 0
"""
_NO_SERIES = Series("", "", "", "", "", "")


class DeviceDepth(Struct):
    """Waiting rows and lost readings of one device."""

    device: str | None
    """Empty for this gateway's own events and reports; None for lost readings of an unknown device."""
    rows: int = 0
    payload_bytes: int = 0
    oldest: Moment | None = None
    newest: Moment | None = None
    lost: int = 0
    """Readings that are gone for good, if that was not reported to Kafka yet."""


class Depths(Struct, frozen=True):
    """Waiting rows by device."""

    devices: list[DeviceDepth]
    """The fullest first."""
    oldest: Moment | None
    """Receipt of the oldest row of all devices; None if nothing waits."""


class Reading(Struct, frozen=True):
    """A waiting row with its series and lane, as `sluice buffer export` writes it: one JSON object a line.

    Exactly one of `payload` (bytes that are UTF-8) and `payload_base64` is there. Tick, boot and times are as in
    Kafka's headers (docs/kafka-records.md).
    """

    id: str
    """`ce_id`: buffer, lane name and sequence."""
    buffer: str
    lane: str
    sequence: int
    device: str
    topic: str
    """The Kafka topic."""
    key: str
    subject: str
    type: str
    content_type: str
    time: str | None
    """Event time, RFC 3339 in UTC; null if the sensor sent none and the gateway's clock was never known."""
    time_error_us: int | None
    """Bound of the event time's error; null if nothing bounds it."""
    time_quality: str
    received_time: str | None
    gateway_boot: str
    boottime_us: int
    """Event time in CLOCK_BOOTTIME of `gateway_boot`. If the sensor sent an absolute time, this is the receipt."""
    received_boottime_us: int
    tick_ms: int | None
    """Sensor's tick; null also if it is in the payload and has given the event time."""
    device_boot: str | None
    device_sequence: int | None
    doubt: str | None
    properties: tuple[tuple[str, str], ...] | UnsetType = UNSET
    """User properties of MQTT 5 that become headers, if there are any."""
    payload: str | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET


class QuarantinedInput(Struct, frozen=True):
    """Input that could not be forwarded, as `sluice buffer export --quarantine` writes it.

    Its payload is written as in `Reading`.
    """

    number: int
    reason: str
    device: str
    subject: str
    topic: str | None
    writer: str | None
    tick_ms: int | None
    device_boot: str | None
    device_sequence: int | None
    received_time: str | None
    received_error_us: int | None
    gateway_boot: str
    received_boottime_us: int
    bytes: int
    properties: tuple[tuple[str, str], ...] | UnsetType = UNSET
    """User properties of its MQTT 5 message, if there are any."""
    payload: str | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET


class QuarantineReason(Struct, frozen=True):
    """Quarantined input of one reason: its count, and the newest input as an example."""

    reason: str
    count: int
    example: bytes
    """Beginning of the example's payload."""
    bytes: int
    """Bytes of the example's whole payload."""
    device: str
    """Device of the example; empty if it is not known."""


class Space(Struct, frozen=True):
    """Bytes that the buffer file takes."""

    used: int
    unused: int
    """Free pages inside the file."""


class LaneEnds(Struct, frozen=True):
    """A lane that holds rows, with its first and last sequence when it was read."""

    number: int
    name: str
    boot: str
    buffer: str
    salvaged: bool
    """True if the lane was taken over from a damaged file. It then has holes where that file could not be read."""
    clock: BootClock
    first: int
    last: int


@contextmanager
def opened(path: Path) -> Iterator[Database]:
    """Open a buffer file for reading. Raises BufferFileError, also for SQLite's errors within the block."""
    with open_to_read(path) as connection:
        # The user may have installed plugins for sqlite-utils. They are not needed here.
        yield Database(connection, execute_plugins=False)


def space(db: Database) -> Space:
    """Read how much space the file takes."""
    pages, free, page_bytes = (
        next(iter(db.query(f"PRAGMA {name}")))[name] for name in ("page_count", "freelist_count", "page_size")
    )
    return Space((pages - free) * page_bytes, free * page_bytes)


def usage(db: Database) -> list[UsageHour]:
    """Hours of running that the daemon has counted in the file, newest first."""
    rows = db["usage"].rows_where(order_by="number desc", select="seconds, readings, stored_bytes, disk_bytes")
    return [UsageHour(**row) for row in rows]


# -- what waits -----------------------------------------------------------------------------------


def lanes(db: Database) -> list[LaneEnds]:
    """Lanes that hold rows, in the order in which they were opened."""
    return [
        LaneEnds(
            clock=clock_of(row.pop("offset_us"), row.pop("error_us"), row.pop("clock")),
            salvaged=bool(row.pop("salvaged")),
            **row,
        )
        for row in db.query(_LANES)
    ]


def depths(db: Database) -> Depths:
    """Count waiting and lost readings by device. Reads every row, which takes some seconds for millions."""
    found: dict[str | None, DeviceDepth] = {}
    oldest: Moment | None = None
    for lane in lanes(db):
        for span in _spans(db, lane):
            for device, rows, size, oldest_us, newest_us in db.execute(_DEPTHS, span.places).fetchall():
                depth = found.setdefault(device, DeviceDepth(device))
                depth.rows += rows
                depth.payload_bytes += size
                depth.oldest = _earlier(depth.oldest, _moment(lane, oldest_us))
                depth.newest = _later(depth.newest, _moment(lane, newest_us))
                oldest = _earlier(oldest, depth.oldest)
    for device, lost in db.execute(_LOST, sorted(OWN_LOSSES)).fetchall():
        found.setdefault(device, DeviceDepth(device)).lost = lost
    return Depths(sorted(found.values(), key=lambda depth: (-depth.rows, depth.device or "")), oldest)


def readings(
    db: Database, device: str | None = None, *, newest_first: bool = False, limits: TimeLimits = DEFAULT_LIMITS
) -> Iterator[Reading]:
    """Waiting rows in order, of all devices or of one. Rows that come or go meanwhile may be missing.

    `limits` decide which times of sensors are believed.
    """
    ends = lanes(db)
    # Read after the ends of lanes: a series is never deleted before a row that refers to it.
    of_series = db.execute("SELECT number, stream, topic, key, device, subject, type, content_type FROM series")
    series = {number: Series.of_columns(columns, stream) for number, stream, *columns in of_series}
    for lane in reversed(ends) if newest_first else ends:
        times = BootTimes(lane.clock)
        for row in _rows(db, lane, device, newest_first=newest_first):
            # `verify` reports a series that is missing. Here only the payload counts.
            of_row = series.get(row.series, _NO_SERIES)
            datum = row.datum
            event_us = datum.received_us if datum.event_us is None else datum.event_us
            error_us, quality = time_quality(datum, times.around(event_us), of_gateway=of_row.is_of_gateway)
            time, device_time_us = _wall(lane.clock, event_us), told_us(datum, times.around(datum.received_us), limits)
            if device_time_us is not None:
                time, error_us, quality = rfc3339(device_time_us).decode(), datum.event_error_us, DEVICE
            yield Reading(
                id=f"{lane.buffer}-{lane.name}-{row.sequence}",
                buffer=lane.buffer,
                lane=lane.name,
                sequence=row.sequence,
                device=of_row.device,
                topic=of_row.topic,
                key=of_row.key,
                subject=of_row.subject,
                type=of_row.type,
                content_type=of_row.content_type,
                time=time,
                time_error_us=None if error_us == TIME_ERROR_UNKNOWN_US else error_us,
                time_quality=quality,
                received_time=_wall(lane.clock, datum.received_us),
                gateway_boot=lane.boot,
                boottime_us=event_us,
                received_boottime_us=datum.received_us,
                tick_ms=datum.tick_ms,
                device_boot=datum.device_boot,
                device_sequence=datum.device_sequence,
                doubt=DOUBTS.get(datum.doubt),
                properties=of_text(datum.properties) or UNSET,
                **_payload(datum.payload),
            )


def _rows(db: Database, lane: LaneEnds, device: str | None, *, newest_first: bool) -> Iterator[Row]:
    only = "" if device is None else f"WHERE series IN (SELECT number FROM series WHERE {_DEVICE} = ?3)"
    order = "DESC" if newest_first else "ASC"
    columns = ", ".join(ROW_COLUMNS)
    statement = f"SELECT {columns} FROM {rows_within(columns)} {only} ORDER BY place {order} LIMIT {PAGE_ROWS}"
    for span in _spans(db, lane, newest_first=newest_first):
        _, low, high = span
        while low <= high:
            of_device = () if device is None else (device,)
            page, ended = _page(db, statement, (*Span(lane.number, low, high).places, *of_device))
            yield from page
            if ended:
                break
            if newest_first:
                high = page[-1].sequence - 1
            else:
                low = page[-1].sequence + 1


def _page(db: Database, statement: str, parameters: tuple[object, ...]) -> tuple[list[Row], bool]:
    """Read some rows in one transaction, which ends with this call. Also return whether there are no more rows."""
    rows: list[Row] = []
    size = 0
    with closing(db.execute(statement, parameters)) as cursor:
        for values in cursor:
            rows.append(Row.of_columns(values))
            size += rows[-1].datum.size
            if size > PAGE_BYTES:
                return rows, False
    return rows, len(rows) < PAGE_ROWS


def _spans(db: Database, lane: LaneEnds, *, newest_first: bool = False) -> Iterator[Span]:
    """Cut a lane into spans that one transaction can search. Holes are skipped."""
    if newest_first:
        high: int | None = lane.last
        while high is not None:
            yield Span(lane.number, max(high - SPAN_ROWS + 1, lane.first), high)
            high = _sequence(lane, last_before(db.conn, Position(lane.number, high - SPAN_ROWS + 1)))
        return
    low: int | None = lane.first
    while low is not None and low <= lane.last:
        yield Span(lane.number, low, min(low + SPAN_ROWS - 1, lane.last))
        low = first_sequence(db, lane, low + SPAN_ROWS)


def first_sequence(db: Database, lane: LaneEnds, sequence: int = 0) -> int | None:
    """The first sequence of a lane, from another sequence on, that has its row; None if there is none."""
    return _sequence(lane, first_after(db.conn, Position(lane.number, sequence - 1)))


def _sequence(lane: LaneEnds, position: Position | None) -> int | None:
    return None if position is None or position.lane != lane.number else position.sequence


def _payload(payload: bytes) -> dict[str, str]:
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def _wall(clock: BootClock, at_us: int) -> str | None:
    return rfc3339(clock.at(at_us)).decode() if clock.known else None


def _moment(lane: LaneEnds, received_us: int) -> Moment:
    return moment(received_us, lane.boot, lane.clock)


def _earlier(found: Moment | None, other: Moment) -> Moment:
    """Earlier of two moments. `found` is from a lane opened earlier, which decides if no clock does."""
    return found if found is not None and _goes_before(found, other) else other


def _later(found: Moment | None, other: Moment) -> Moment:
    return other if found is None or _goes_before(found, other) else found


def _goes_before(found: Moment, other: Moment) -> bool:
    if found.boot == other.boot:
        return found.boottime_us <= other.boottime_us
    if found.wall_us is None or other.wall_us is None:
        return True
    return found.wall_us <= other.wall_us


# -- the quarantine -------------------------------------------------------------------------------


def quarantined(
    db: Database, reason: str | None = None, device: str | None = None, *, newest_first: bool = False
) -> Iterator[QuarantinedInput]:
    """Quarantined input with its payload, oldest first, of all or of one reason, and of all or of one device."""
    where, given = _quarantine_filter(reason, device)
    beyond, order = ("<", "DESC") if newest_first else (">", "ASC")
    statement = f"""SELECT number, reason, device, subject, topic, writer, tick_ms, device_boot, device_sequence,
            boot_id, received_us, payload, properties, coalesce(boot.offset_us, 0), boot.error_us, boot.clock
        FROM quarantine LEFT JOIN boot USING (boot_id)
        WHERE number {beyond} :number AND {where} ORDER BY number {order} LIMIT {PAGE_ROWS}"""
    number = 2**63 - 1 if newest_first else 0
    while page := _quarantine_page(db, statement, {"number": number, **given}):
        yield from page
        number = page[-1].number


def _quarantine_page(db: Database, statement: str, parameters: dict[str, object]) -> list[QuarantinedInput]:
    page: list[QuarantinedInput] = []
    size = 0
    with closing(db.execute(statement, parameters)) as cursor:
        for number, reason, device, subject, topic, writer, tick_ms, device_boot, device_sequence, *rest in cursor:
            boot, received_us, payload, properties, *clock_columns = rest
            # A boot that is no longer known has no wall clock.
            clock = clock_of(*clock_columns)
            page.append(
                QuarantinedInput(
                    number=number,
                    reason=reason,
                    device=device,
                    subject=subject,
                    topic=topic,
                    writer=writer,
                    tick_ms=tick_ms,
                    device_boot=device_boot,
                    device_sequence=device_sequence,
                    received_time=_wall(clock, received_us),
                    received_error_us=clock.error_us(received_us),
                    gateway_boot=boot,
                    received_boottime_us=received_us,
                    bytes=len(payload),
                    properties=of_text(properties) or UNSET,
                    **_payload(payload),
                )
            )
            size += len(payload)
            if size > PAGE_BYTES:
                break
    return page


def quarantine_sizes(db: Database, reason: str | None = None) -> dict[int, int]:
    """Numbers of quarantined input with the payload's bytes, oldest first, of all or of one reason."""
    where, parameters = _quarantine_filter(reason, None)
    columns = "number, length(payload) AS bytes"
    found = db["quarantine"].rows_where(where, parameters, order_by="number", select=columns)
    return {row["number"]: row["bytes"] for row in found}


def quarantine_count(db: Database, reason: str | None = None, device: str | None = None) -> int:
    """Count quarantined input, of all or of one reason, and of all or of one device."""
    where, given = _quarantine_filter(reason, device)
    count: int = db["quarantine"].count_where(where, given)
    return count


def quarantine_reasons(db: Database, reason: str | None = None, device: str | None = None) -> list[QuarantineReason]:
    """Quarantined input by reason, of all or of one reason, and of all or of one device."""
    where, given = _quarantine_filter(reason, device)
    # Payloads are joined last. Within the grouped query, SQLite would sort them all, through a file on the card.
    found = db.query(
        f"""SELECT reason, of_reason.count, device, CAST(substr(payload, 1, {EXAMPLE_BYTES_MAX}) AS BLOB) AS example,
            length(payload) AS bytes
        FROM (
            SELECT count(*) AS count, max(number) AS number FROM quarantine WHERE {where} GROUP BY reason
        ) AS of_reason JOIN quarantine USING (number) ORDER BY reason""",
        given,
    )
    columns = ("reason", "count", "example", "bytes", "device")
    return [QuarantineReason(*(row[column] for column in columns)) for row in found]


def _quarantine_filter(reason: str | None, device: str | None) -> tuple[str, dict[str, object]]:
    wanted = {"reason": reason, "device": device}
    given: dict[str, object] = {name: value for name, value in wanted.items() if value is not None}
    return " AND ".join([f"{name} = :{name}" for name in given] or ["1"]), given
