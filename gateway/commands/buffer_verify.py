"""`sluice buffer verify`: finds faults in a buffer file, and says what to do about them."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct
from sqlite_utils import Database

from gateway.buffer.lanes import read_counts
from gateway.buffer.quarantine import BYTES_SQL
from gateway.buffer.rows import SEQUENCE_MAX, START, Position, Span
from gateway.buffer.schema import MIGRATIONS, is_corruption
from gateway.buffer.stored_rows import first_after, rows_within
from gateway.commands.buffer_reading import SPAN_ROWS, LaneEnds, first_sequence, lanes, opened
from gateway.host.terminal_text import counted
from gateway.reading import BufferFileError
from gateway.settings import BufferSettings

HOLES_TOLD_MAX = 5
FAULTS_TOLD_MAX = 10

_COUNT_SPAN = f"""
    SELECT count(*), count(*) FILTER (WHERE series NOT IN (SELECT number FROM series)) FROM {rows_within("series")}
"""
# A row before the first and a row behind the last show holes at both ends too.
_HOLES = f"""
    SELECT before + 1, place - 1 FROM (
        SELECT place, lag(place, 1, ?1 - 1) OVER (ORDER BY place) AS before
        FROM (SELECT place FROM {rows_within("series")} UNION ALL SELECT ?2 + 1)
    ) WHERE place > before + 1 LIMIT ?3
"""


class Verdict(Struct, frozen=True):
    """Result of checking one subject."""

    subject: str
    ok: bool
    words: str


def verify(path: Path, settings: BufferSettings, *, full: bool = False) -> Iterator[Verdict]:
    """Check a buffer file, and give each verdict as soon as it is known.

    With `full`, SQLite also compares indexes with tables (`integrity_check` instead of `quick_check`).
    """
    try:
        with opened(path) as db:
            yield Verdict("schema", ok=True, words=f"version {len(MIGRATIONS)}, which this Sluice knows")
            sound = _pages(db, "integrity_check" if full else "quick_check")
            yield sound
            if not sound.ok:
                return
            yield _references(db)
            yield from _dense_lanes(db)
            yield _quarantine_bounds(db, settings)
    except BufferFileError as error:
        damaged = isinstance(error.__cause__, sqlite3.Error) and is_corruption(error.__cause__)
        yield Verdict("pages" if damaged else "file", ok=False, words=str(error))


def _pages(db: Database, check: str) -> Verdict:
    started_s = time.monotonic()
    try:
        # In FROM, SQLite 3.46 takes the number for a table's name.
        rows = db.execute(f"PRAGMA {check}({FAULTS_TOLD_MAX})").fetchall()
    except sqlite3.DatabaseError as error:
        if not is_corruption(error):
            raise
        # Behind the faults of pages, it reads rows, and fails where it cannot. Python then gives nothing of them.
        rows = db.execute(f"SELECT * FROM pragma_{check} LIMIT 1").fetchall()
    # A row of the answer may have several lines. The first line is then a heading.
    faults = [line for (row,) in rows for line in str(row).splitlines() if not line.startswith("***")]
    faults = faults[:FAULTS_TOLD_MAX]
    if faults == ["ok"]:
        return Verdict("pages", ok=True, words=f"SQLite's {check} finds nothing ({time.monotonic() - started_s:.1f} s)")
    return Verdict(
        "pages",
        ok=False,
        words=f"SQLite's {check} finds damage: {'; '.join(faults)}. Export what can be read (sluice buffer export). "
        "When sluice run meets the damage, it sets the file aside, salvages what it can, and goes on with a new file. "
        "Look at the disk or card too: it may be failing",
    )


def _references(db: Database) -> Verdict:
    """Check that each lane, boot and series that rows refer to is there. Without them, rows cannot be sent."""
    faults = [
        f"lane {row['name']} refers to a boot that is not there"
        for row in db["lane"].rows_where("boot_id NOT IN (SELECT boot_id FROM boot)", order_by="number", select="name")
    ]
    row = first_after(db.conn, START)
    while row is not None:
        if not db["lane"].count_where("number = ?", [row.lane]):
            faults.append(f"readings refer to lane number {row.lane}, which is not there")
        row = first_after(db.conn, Position(row.lane, SEQUENCE_MAX))
    for what, where in (
        ("boot", "boot_id NOT IN (SELECT boot_id FROM boot)"),
        ("series", "series IS NOT NULL AND series NOT IN (SELECT number FROM series)"),
    ):
        found = db["quarantine"].rows_where(where, select="number", order_by="number", limit=FAULTS_TOLD_MAX)
        faults += [f"quarantined input {row['number']} refers to a {what} that is not there" for row in found]
    if not faults:
        return Verdict("references", ok=True, words="each lane, boot and series that is referred to is there")
    return Verdict("references", ok=False, words=_advice(faults))


def _dense_lanes(db: Database) -> Iterator[Verdict]:
    """Check that no row is missing from a lane, and that the series of its rows are there.

    A lane may have holes: Kafka took rows of some partitions and not of others. A salvaged lane also has holes where
    the damaged file could not be read. Those rows are counted as lost.
    """
    for lane in lanes(db):
        # A salvaged lane may have any holes, so counting its rows would prove nothing.
        taken = 0 if lane.salvaged else _taken_between(db, lane)
        found = _lane_faults(db, lane)
        faults = []
        if not lane.salvaged and found.missing > max(taken, _taken_between(db, lane)):
            told = ", ".join(f"{first} to {last}" for first, last in found.holes)
            faults.append(f"missing between rows that are there: {counted(found.missing, 'sequence number')} ({told})")
        if found.foreign:
            faults.append(f"of {counted(found.foreign, 'row')} the series is not there, so the device is not known")
        subject = f"lane {lane.name}"
        if faults:
            yield Verdict(subject, ok=False, words=_advice(faults))
        elif lane.salvaged:
            yield Verdict(subject, ok=True, words=f"{counted(found.rows, 'row')}, salvaged from buffer {lane.buffer}")
        else:
            yield Verdict(subject, ok=True, words=f"{counted(found.rows, 'row')}, none is missing")


def _taken_between(db: Database, lane: LaneEnds) -> int:
    """Rows deleted from between others because Kafka has them, by the lane's own count."""
    db.execute("BEGIN")
    try:
        count = read_counts(db.conn, lane.number).get(lane.number)
        first = first_sequence(db, lane)
    finally:
        db.execute("ROLLBACK")
    return 0 if count is None or first is None else count.next - first - count.rows


@dataclass(slots=True)
class _LaneFaults:
    rows: int = 0
    missing: int = 0
    foreign: int = 0
    """Rows whose series is not there."""
    holes: list[tuple[int, int]] = field(default_factory=list)
    """First and last missing sequence of the first holes."""


def _lane_faults(db: Database, lane: LaneEnds) -> _LaneFaults:
    found = _LaneFaults()
    expected: int | None = lane.first
    while expected is not None and expected <= lane.last:
        # The daemon deletes from the front meanwhile. A span read in one transaction shows no false hole.
        db.execute("BEGIN")
        try:
            expected = _count_span(db, lane, expected, found)
        finally:
            db.execute("ROLLBACK")
    return found


def _count_span(db: Database, lane: LaneEnds, expected: int, found: _LaneFaults) -> int | None:
    """Check the span that begins at `expected`, or where the lane now begins. Return where the next span begins."""
    front = first_sequence(db, lane)
    if front is None:
        return None
    first = max(front, expected)
    last = min(first + SPAN_ROWS - 1, lane.last)
    if lane.salvaged:
        # Its holes may be wide: begin at the next row.
        following = first_sequence(db, lane, first)
        first = lane.last + 1 if following is None else following
        last = min(first + SPAN_ROWS - 1, lane.last)
    places = Span(lane.number, first, last).places
    rows, foreign = db.execute(_COUNT_SPAN, places).fetchone()
    missing = max(last - first + 1, 0) - rows
    if missing and len(found.holes) < HOLES_TOLD_MAX:
        holes = db.execute(_HOLES, (*places, HOLES_TOLD_MAX - len(found.holes))).fetchall()
        found.holes += [(Position.at(low).sequence, Position.at(high).sequence) for low, high in holes]
    found.rows += rows
    found.missing += missing
    found.foreign += foreign
    return last + 1


def _quarantine_bounds(db: Database, settings: BufferSettings) -> Verdict:
    (rows, size) = db.execute(f"SELECT count(*), coalesce(sum({BYTES_SQL}), 0) FROM quarantine").fetchone()
    bytes_max = min(settings.quarantine_bytes_max, settings.bytes_max // 10)
    words = f"{counted(rows, 'input')}, {counted(size, 'byte')}"
    if rows > settings.quarantine_rows_max:
        words += f": more than buffer.quarantine_rows_max = {settings.quarantine_rows_max:,}"
    elif size > bytes_max and rows > 1:
        words += f": more than {bytes_max:,} bytes (buffer.quarantine_bytes_max, or a tenth of buffer.bytes_max)"
    else:
        return Verdict("quarantine", ok=True, words=words)
    words += ". The next input deletes the oldest of whoever has most; sluice buffer export --quarantine keeps a copy"
    return Verdict("quarantine", ok=False, words=words)


def _advice(faults: Sequence[str]) -> str:
    told = "; ".join(faults[:FAULTS_TOLD_MAX])
    more = f"; and {len(faults) - FAULTS_TOLD_MAX} more" if len(faults) > FAULTS_TOLD_MAX else ""
    return (
        f"{told}{more}. Sluice never leaves a file in this state: keep a copy of it, and save its readings with sluice "
        "buffer export"
    )
