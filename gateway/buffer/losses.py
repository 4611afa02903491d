"""The loss counters in the buffer file: written in the transaction that loses a reading, kept until reported."""

import sqlite3
from collections.abc import Iterable

import msgspec

from gateway.buffer.rows import Entry, Loss, Span
from gateway.buffer.stored_rows import rows_within
from gateway.reading import SENSOR_DROPPED

LOSSES_MAX = 20_000
"""Counters that are kept; beyond it, losses are counted without their device."""
EVENTS_DROPPED = "gateway-events-dropped"
EVENT_REFUSED = "event-refused"
OWN_LOSSES = frozenset({EVENTS_DROPPED, EVENT_REFUSED})
"""Reasons for losses of the gateway's own events, which are no readings."""
UNCLEAN_END = "unclean-end"
"""Reason for what a crash may have taken of readings that nobody sends again. Its count is 0: nobody knows it."""
LOSS_TYPE = "sluice.gateway.loss"
"""`ce_type` of a loss record."""

_COUNT = """
    INSERT INTO loss (
        device, reason, boot_id, device_boot, count, first_us, last_us, first_sequence, last_sequence
    ) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (device, reason, boot_id, device_boot) DO UPDATE SET
        count = count + excluded.count,
        first_us = min(first_us, excluded.first_us), last_us = max(last_us, excluded.last_us),
        first_sequence = min(
            coalesce(first_sequence, excluded.first_sequence), coalesce(excluded.first_sequence, first_sequence)),
        last_sequence = max(
            coalesce(last_sequence, excluded.last_sequence), coalesce(excluded.last_sequence, last_sequence))
"""
_SELECT = """
    SELECT device, reason, boot_id, count, first_us, last_us, device_boot, first_sequence, last_sequence
    FROM loss ORDER BY first_us LIMIT ?
"""
# Rows of one span may be of many sensors, so they are grouped by the keys of a loss.
_OF_ROWS = f"""
    SELECT series.type, series.device, lane.boot_id, count(*),
        min(coalesce(event_us, received_us)), max(coalesce(event_us, received_us)),
        coalesce(device_boot, ''), min(device_sequence), max(device_sequence)
    FROM {rows_within("lane, series, event_us, received_us, device_boot, device_sequence")} AS found
    JOIN series ON series.number = found.series JOIN lane ON lane.number = found.lane
    GROUP BY series.type, series.device, device_boot
"""
_REPORTS = f"""
    SELECT payload FROM {rows_within("series, payload")} AS found JOIN series ON series.number = found.series
    WHERE series.type = ?3
"""


class _Reported(msgspec.Struct):
    """A loss record's body, as `intake.own_events` writes it."""

    device: str | None
    reason: str
    count: int
    boot: str
    first_boottime_us: int
    last_boottime_us: int
    device_boot: str | None = None
    first_sequence: int | None = None
    last_sequence: int | None = None


def loss_body(loss: Loss) -> dict[str, object]:
    """The body of a loss record on `gateway-events`."""
    return {
        "device": loss.device or None,
        "reason": loss.reason,
        "count": loss.count,
        "boot": loss.boot_id,
        "first_boottime_us": loss.first_us,
        "last_boottime_us": loss.last_us,
        "device_boot": loss.device_boot or None,
        "first_sequence": loss.first_sequence,
        "last_sequence": loss.last_sequence,
    }


def count_losses(connection: sqlite3.Connection, losses: Iterable[Loss]) -> None:
    """Add losses to the counters, inside the caller's transaction."""
    (kept,) = connection.execute("SELECT count(*) FROM loss").fetchone()
    connection.executemany(
        _COUNT,
        [
            (
                loss.device if kept < LOSSES_MAX else "",
                loss.reason,
                loss.boot_id,
                loss.device_boot if kept < LOSSES_MAX else "",
                loss.count,
                loss.first_us,
                loss.last_us,
                loss.first_sequence if kept < LOSSES_MAX else None,
                loss.last_sequence if kept < LOSSES_MAX else None,
            )
            for loss in losses
        ],
    )


def dropped_by_sensor(entry: Entry, boot_id: str) -> Loss:
    """The ring loss that an entry reports."""
    first, last = entry.lost or (0, -1)
    at_us = entry.datum.received_us
    device, boot = entry.series.device, entry.datum.device_boot or ""
    return Loss(device, SENSOR_DROPPED, boot_id, last - first + 1, at_us, at_us, boot, first, last)


def has_losses(connection: sqlite3.Connection) -> bool:
    """Whether losses wait to be reported."""
    return connection.execute("SELECT 1 FROM loss LIMIT 1").fetchone() is not None


def counted_losses(connection: sqlite3.Connection, limit: int) -> list[Loss]:
    """Counters that were not reported yet."""
    return [Loss(*values) for values in connection.execute(_SELECT, (limit,))]


def forget_losses(connection: sqlite3.Connection, losses: Iterable[Loss]) -> None:
    """Delete reported counters, inside the transaction that holds the reports."""
    connection.executemany(
        "DELETE FROM loss WHERE device = ? AND reason = ? AND boot_id = ? AND device_boot = ?",
        [(loss.device, loss.reason, loss.boot_id, loss.device_boot) for loss in losses],
    )


def losses_of_rows(connection: sqlite3.Connection, span: Span, reason: str) -> list[Loss]:
    """The losses if these rows are dropped. A loss record among them was not sent, so its losses are counted again."""
    losses = []
    for type_, device, lane_boot, *counted in connection.execute(_OF_ROWS, span.places):
        if type_ != LOSS_TYPE:
            # The gateway's own events are no readings.
            losses.append(Loss(device, reason if device else EVENTS_DROPPED, lane_boot, *counted))
    reports = connection.execute(_REPORTS, (*span.places, LOSS_TYPE))
    return losses + [told_loss(payload) for (payload,) in reports]


def told_loss(record: bytes) -> Loss:
    """The loss in a loss record's body.

    If nobody can count it, its numbers are left out: a counter adds losses up, and would cover the numbers between.
    """
    said = msgspec.json.decode(record, type=_Reported)
    return Loss(
        said.device or "",
        said.reason,
        said.boot,
        said.count,
        said.first_boottime_us,
        said.last_boottime_us,
        said.device_boot or "",
        said.first_sequence if said.count else None,
        said.last_sequence if said.count else None,
    )
