"""Takes what can still be read out of a buffer file that SQLite found corrupt. Rows keep their identity.

The file was set aside (`buffer_aside`) and is never changed here.
"""

import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from gateway.buffer_aside import final_name
from gateway.buffer_rows import Lane, Loss, Quarantined, Row, Series, is_sound
from gateway.buffer_schema import BufferFileError
from gateway.clock_gateway import boottime_us

SALVAGE_PREFIX = "salvage/"
"""Marks by this and the damaged file's name: `Progress`."""
CHUNK_ROWS = 1_000
UNKNOWN_BOOT = "unknown"
"""The gateway boot of rows whose lane could not be read: nothing is known of its clock."""
WAIT_S = 5.0
"""How long a salvage waits before it tries again: for room, or for a disk that refuses."""
_SEQUENCE_MAX = 2**62
QUARANTINE_CHUNK_ROWS = 100
_QUARANTINE_FIELDS = Quarantined.__struct_fields__
_QUARANTINE = (
    f"SELECT number, {', '.join(_QUARANTINE_FIELDS)} FROM quarantine WHERE number >= ? ORDER BY number LIMIT ?"
)
_ROWS = f"SELECT {', '.join(Row._fields)} FROM reading WHERE lane = ? AND sequence >= ? ORDER BY sequence LIMIT ?"
_COPIED_TABLES = {
    "boot": 3,
    "mark": 2,
    "device_run": 6,
    "loss": 9,
}
"""Small tables that are taken over as they are, and how many columns they have."""


log = structlog.get_logger()


class Progress(msgspec.Struct, frozen=True):
    """How far the salvage of one file has come: kept as a mark, so that the next start goes on with it."""

    lanes: dict[int, int]
    """Lane numbers of the damaged file, to those of this one."""
    lane: int
    sequence: int
    """The last row that was taken over."""
    dense: list[int]
    """Those of the damaged file's lanes that had no holes."""
    expected: int | None
    """Rows that the file held, where the daemon knew it."""
    taken: int = 0
    holes: int = 0
    """Rows that are known to be missing between those that were taken over."""
    torn: bool = False
    """Whether an end of a lane is damaged: more is missing, and nobody knows how much."""
    quarantined: int = 0
    """The last number of the quarantine that was taken over: that goes before the rows."""
    quarantine_missing: int = 0
    """Numbers of the quarantine that could not be read: one for each input, unless it had been taken out before."""
    quarantine_torn: bool = False
    """Whether nobody knows how much of the quarantine is missing."""
    quarantine_ended: bool = False

    def missing(self) -> int | None:
        """Rows that are lost, at least, once it has ended; None where nobody knows how many."""
        known = max(self.holes, (self.expected or 0) - self.taken)
        return None if known == 0 and (self.torn or not self.lanes) else known

    def losses(self, boot_id: str) -> list[Loss]:
        """What to count as lost once it has ended. Where nobody knows how much, the record says so with a 0."""
        quarantine = None if self.quarantine_torn and self.quarantine_missing == 0 else self.quarantine_missing
        now_us = boottime_us()
        return [
            Loss("", f"{what}-damaged" if count else f"{what}-unreadable", boot_id, count or 0, now_us, now_us)
            for what, count in (("buffer", self.missing()), ("quarantine", quarantine))
            if count != 0
        ]


@dataclass(slots=True)
class Found:
    """What stands beside the rows, as far as it could be read."""

    lanes: list[Lane] = field(default_factory=list)
    dense: list[int] = field(default_factory=list)
    """Numbers of lanes that had no holes."""
    floors: dict[int, int | None] = field(default_factory=dict)
    """By lane number: the earliest event time that may wait in it."""
    series: dict[int, Series] = field(default_factory=dict)
    tables: dict[str, list[tuple[object, ...]]] = field(default_factory=dict)
    marks_whole: bool = False
    """Whether all marks could be read."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file that is to be salvaged, and into which lanes."""

    aside: Path
    """By its final name."""
    lanes: dict[int, Lane]
    """By the numbers that they have in that file."""
    progress: Progress
    """Its `lanes` are not settled yet."""
    found: Found | None
    """What stands beside its rows; None where that was taken over before."""
    bytes: int


@dataclass(frozen=True, slots=True)
class SalvagedBatch:
    """Rows of one lane, under the new file's lane number and the damaged file's series numbers."""

    aside: Path
    into: str
    """The id of the file whose lane numbers these are."""
    rows: Sequence[Row]
    quarantined: Sequence[Quarantined]
    series: dict[int, Series]
    progress: Progress
    finished: bool

    @property
    def missing(self) -> int | None:
        """Of the whole file, at its end: see `Progress.missing`."""
        return self.progress.missing()


class Salvage(threading.Thread):
    """Reads damaged files to their ends, one after another, beside the daemon's work.

    `adopt` takes a batch, or says that it has no room; `ended` is called with each file that nothing more is to be had
    of. Where the disk refuses, it waits and goes on.
    """

    def __init__(
        self,
        work: Sequence[tuple[Path, Progress]],
        into: str,
        adopt: Callable[[SalvagedBatch], bool],
        ended: Callable[[Path], None],
    ) -> None:
        """`into` is the id of the file that takes the rows: what it adopts is for no other."""
        super().__init__(name="salvage", daemon=True)
        self._work = work
        self._into = into
        self._adopt = adopt
        self._ended = ended
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Let it end soon; whoever has the file next goes on where it was."""
        self._stopping.set()

    def run(self) -> None:
        for aside, progress in self._work:
            self._aside, self._progress = aside, progress
            said = False
            while not self._stopping.is_set():
                try:
                    self._read_file()
                    if not self._stopping.is_set():
                        self._ended(self._aside)
                    break
                except (sqlite3.Error, OSError) as error:
                    if not said:
                        log.warning("a salvage has to wait", aside=self._aside.name, error=str(error))
                        said = True
                    self._stopping.wait(WAIT_S)

    def _read_file(self) -> None:
        connection = open_damaged(self._aside)
        try:
            if connection is not None:
                found = Found()
                _read_beside(connection, found)
                self._read_quarantine(connection, found.series)
                self._read_lanes(connection, found.series)
        finally:
            if connection is not None:
                connection.close()
        self._hand_over(finished=True)

    def _read_quarantine(self, connection: sqlite3.Connection, series: dict[int, Series]) -> None:
        """Before the rows: it is little, and its place in the file is known."""
        if self._progress.quarantine_ended or self._stopping.is_set():
            return
        last = _last_quarantined(connection)
        while not self._stopping.is_set():
            start = self._progress.quarantined + 1
            chunk, failed = _read_quarantine_chunk(connection, start)
            if chunk:
                start = chunk[-1][0] + 1
                self._progress = msgspec.structs.replace(self._progress, quarantined=start - 1)
                self._hand_over(quarantined=[input_ for _, input_ in chunk], series=series)
            elif not failed:
                break
            if failed:
                jumped = _behind_damage(lambda number: _is_quarantine_readable(connection, number), start)
                behind = max(start, (last or 0) + 1) if jumped is None else jumped
                self._progress = msgspec.structs.replace(
                    self._progress,
                    quarantined=behind - 1,
                    quarantine_missing=self._progress.quarantine_missing + behind - start,
                    quarantine_torn=self._progress.quarantine_torn or (jumped is None and last is None),
                )
                if jumped is None:
                    break
        self._progress = msgspec.structs.replace(self._progress, quarantine_ended=True)

    def _read_lanes(self, connection: sqlite3.Connection, series: dict[int, Series]) -> None:
        for lane in sorted(self._progress.lanes):
            if lane < self._progress.lane or self._stopping.is_set():
                continue
            after = self._progress.sequence if lane == self._progress.lane else -1
            for rows in salvaged_rows(connection, lane, after):
                # Before a lane's first row there may have been others, which Kafka has.
                first = rows[0].sequence if self._progress.lane != lane else self._progress.sequence + 1
                holes = rows[-1].sequence + 1 - first - len(rows) if lane in self._progress.dense else 0
                self._progress = msgspec.structs.replace(
                    self._progress,
                    lane=lane,
                    sequence=rows[-1].sequence,
                    taken=self._progress.taken + len(rows),
                    holes=self._progress.holes + holes,
                )
                self._hand_over([row._replace(lane=self._progress.lanes[lane]) for row in rows], series=series)
                if self._stopping.is_set():
                    return
            self._look_at_the_ends(connection, lane)

    def _look_at_the_ends(self, connection: sqlite3.Connection, lane: int) -> None:
        """Count what is known to follow the last row that could be read of a lane; see whether more is missing."""
        first, last = (_end_sequence(connection, lane, end) for end in ("min", "max"))
        taken = self._progress.sequence if self._progress.lane == lane else -1
        if first is None or last is None:
            self._progress = msgspec.structs.replace(self._progress, torn=True)
        elif last > taken:
            self._progress = msgspec.structs.replace(self._progress, holes=self._progress.holes + last - taken)

    def _hand_over(
        self,
        rows: Sequence[Row] = (),
        *,
        quarantined: Sequence[Quarantined] = (),
        series: dict[int, Series] | None = None,
        finished: bool = False,
    ) -> None:
        """Have it adopted, however long that takes: the progress that goes with it is never ahead of the file."""
        batch = SalvagedBatch(self._aside, self._into, rows, quarantined, series or {}, self._progress, finished)
        while not self._stopping.is_set():
            try:
                if self._adopt(batch):
                    return
            except BufferFileError as error:
                log.debug("salvaged rows have to wait", error=str(error))
            self._stopping.wait(WAIT_S)


def open_damaged(path: Path) -> sqlite3.Connection | None:
    """A connection that reads the file, with its WAL where that can be used; None where nothing can be read."""
    uri = path.resolve().as_uri()
    # Without `immutable` the WAL counts, which holds what was acknowledged last; with it, a bad WAL is passed over.
    for query in ("mode=rw", "mode=ro&immutable=1"):
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(f"{uri}?{query}", uri=True, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA query_only = 1")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error:
            if connection is not None:
                connection.close()
        else:
            return connection
    return None


def read_beside(path: Path, known: Lane | None) -> Found:
    """Read everything but the rows. `known` is the lane that the daemon knows of by itself."""
    found = Found(lanes=[] if known is None else [known])
    connection = open_damaged(path)
    if connection is None:
        return found
    with closing(connection):
        _read_beside(connection, found)
    return found


def _read_beside(connection: sqlite3.Connection, found: Found) -> None:
    own = None
    with suppress(sqlite3.Error, TypeError):
        (own,) = connection.execute("SELECT value FROM meta WHERE name = 'buffer_id'").fetchone()
    lanes = {lane.number: lane for lane in found.lanes}
    # The tables first, then the indexes that hold the same: what is damaged in the one may be whole in the other.
    for source in ("lane", "lane INDEXED BY lane_copy WHERE name > ''"):
        for number, name, boot_id, origin in _readable(
            connection.execute, f"SELECT number, name, boot_id, coalesce(buffer_id, ?) FROM {source}", (own,)
        ):
            if all(isinstance(text, str) for text in (name, boot_id, origin)):
                lanes.setdefault(number, Lane(number, name, boot_id, origin))
    for number, floor in _readable(connection.execute, "SELECT number, event_from_us FROM lane"):
        found.floors[number] = floor
    fields = "topic, key, device, subject, type, content_type"
    # The index has no stream: without it the Kafka topic stands for it.
    for columns, source in (
        (f"{fields}, coalesce(stream, '')", "series"),
        (fields, "series INDEXED BY sqlite_autoindex_series_1 WHERE topic > ''"),
    ):
        for number, *texts in _readable(connection.execute, f"SELECT number, {columns} FROM {source}"):
            if all(isinstance(text, str) for text in texts):
                found.series.setdefault(number, Series(*texts))
    for number in _lanes_of_rows(connection):
        # Its name is gone, and with it the identity of its rows; under a new one they are better off than lost.
        lanes.setdefault(number, Lane(number, secrets.token_hex(6), UNKNOWN_BOOT, own or secrets.token_hex(8)))
    found.lanes = [lanes[number] for number in sorted(lanes)]
    found.dense = [lane.number for lane in found.lanes if own is None or lane.buffer_id == own]
    for table in _COPIED_TABLES:
        found.tables[table] = list(_readable(connection.execute, f"SELECT * FROM {table}"))
    with suppress(sqlite3.Error):
        (marks,) = connection.execute("SELECT count(*) FROM mark").fetchone()
        found.marks_whole = marks == len(found.tables["mark"])


def _lanes_of_rows(connection: sqlite3.Connection) -> Iterator[int]:
    """The lane numbers that rows stand under, as far as they can be found."""
    lane = 0
    with suppress(sqlite3.Error, OverflowError, TypeError):
        while True:
            (lane,) = connection.execute("SELECT min(lane) FROM reading WHERE lane > ?", (lane,)).fetchone()
            if not isinstance(lane, int):
                return
            yield lane


def kept_marks(marks: Mapping[str, bytes]) -> dict[str, Progress]:
    """By the damaged file's name, how far its salvage has come; what cannot be understood is left out."""
    kept = {}
    for key, value in marks.items():
        with suppress(msgspec.DecodeError):
            kept[key.removeprefix(SALVAGE_PREFIX)] = msgspec.json.decode(value, type=Progress)
    return kept


def damaged_files(
    asides: Sequence[tuple[Path, Lane | None, int | None]], waiting: Sequence[Path]
) -> dict[str, Damaged]:
    """What a new file has to salvage, by the files' names, oldest first.

    `asides` are the files that it takes the place of, by their final names, with the lane and the number of rows that
    the daemon knows of by itself; `waiting` are those whose salvage these had not ended.
    """
    files: dict[str, Damaged] = {}
    marks_whole = True
    carried: dict[str, tuple[Progress, Found]] = {}
    for aside, lane, rows in asides:
        found = read_beside(aside, lane)
        marks_whole = marks_whole and found.marks_whole
        progress = Progress({}, -1, -1, found.dense, rows)
        files[final_name(aside)] = Damaged(
            aside.with_name(final_name(aside)),
            {lane.number: lane for lane in found.lanes},
            progress,
            found,
            _bytes_of(aside),
        )
        marks = {
            str(key): value
            for key, value in found.tables.get("mark", ())
            if str(key).startswith(SALVAGE_PREFIX) and isinstance(value, bytes)
        }
        carried.update({name: (progress, found) for name, progress in kept_marks(marks).items()})
    folder = asides[0][0].parent
    for name, (progress, through) in carried.items():
        if name not in files:
            files[name] = _carried_over(folder / name, progress, through)
    for aside in waiting:
        if not marks_whole and aside.name not in files:
            # How far it had come is lost with the marks: what has been taken over already comes again.
            found = read_beside(aside, None)
            lanes = {lane.number: lane for lane in found.lanes}
            files[aside.name] = Damaged(aside, lanes, Progress({}, -1, -1, found.dense, None), None, _bytes_of(aside))
    return dict(sorted(files.items()))


def _carried_over(aside: Path, progress: Progress, through: Found) -> Damaged:
    """A file whose salvage another one had begun: its lanes by what that one says of them, or it says itself."""
    known = {lane.number: lane for lane in through.lanes}
    lanes = {number: known[taken_as] for number, taken_as in progress.lanes.items() if taken_as in known}
    if len(lanes) < len(progress.lanes):
        for lane in read_beside(aside, None).lanes:
            if lane.number in progress.lanes:
                lanes.setdefault(lane.number, lane)
    return Damaged(aside, lanes, progress, None, _bytes_of(aside))


def within(files: Iterable[Damaged], files_max: int) -> tuple[list[Damaged], list[Damaged]]:
    """Those to be salvaged, and those that are too many: the smallest, for a card that damages each new file."""
    by_size = sorted(files, key=lambda damaged: damaged.bytes)
    too_many = by_size[: max(0, len(by_size) - files_max)]
    return sorted(by_size[len(too_many) :], key=lambda damaged: damaged.aside), too_many


def _bytes_of(aside: Path) -> int:
    return aside.stat().st_size if aside.exists() else 0


def adopt_beside(connection: sqlite3.Connection, files: Iterable[Damaged], lanes: Mapping[str, int]) -> None:
    """Write the small tables into the file that takes their place; what that one has already stays.

    `lanes` are the lanes' names to their numbers in this file.
    """
    boots = {UNKNOWN_BOOT}
    for damaged in files:
        found = damaged.found or Found()
        boots |= {lane.boot_id for lane in damaged.lanes.values()}
        boots |= {values[2] for values in found.tables.get("loss", ()) if isinstance(values[2], str)}
        for table, columns in _COPIED_TABLES.items():
            connection.executemany(
                f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * columns)})",
                [values for values in found.tables.get(table, ()) if not str(values[0]).startswith(SALVAGE_PREFIX)],
            )
        if damaged.found is not None:
            # Where a lane's floor is lost, it may reach back to the boot's beginning.
            for number, lane in damaged.lanes.items():
                connection.execute(
                    "UPDATE lane SET event_from_us = min(coalesce(event_from_us, ?1), ?1) WHERE name = ?2",
                    (found.floors.get(number) or 0, lane.name),
                )
    connection.executemany(
        "UPDATE lane SET event_from_us = 0 WHERE number = ? AND event_from_us IS NULL",
        [(number,) for number in lanes.values()],
    )
    # Of a boot whose clock is lost nothing is known; that there was one must be.
    connection.executemany("INSERT OR IGNORE INTO boot VALUES (?, 0, NULL)", [(boot,) for boot in sorted(boots)])


def _last_quarantined(connection: sqlite3.Connection) -> int | None:
    """The last number that the quarantine has given; None where that cannot be read."""
    with suppress(sqlite3.Error, OverflowError):
        found = connection.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'quarantine'").fetchone()[0]
        return 0 if found is None else found if isinstance(found, int) else None
    return None


def _read_quarantine_chunk(connection: sqlite3.Connection, start: int) -> tuple[list[tuple[int, Quarantined]], bool]:
    """Inputs from a number on, with their numbers, and whether damage ended them."""
    chunk: list[tuple[int, Quarantined]] = []
    try:
        for number, *values in connection.execute(_QUARANTINE, (start, QUARANTINE_CHUNK_ROWS)):
            # The number is of the right kind and grows, and every field is of its type: else it is another page.
            if type(number) is not int or number < (chunk[-1][0] + 1 if chunk else start):
                return chunk, True
            chunk.append((number, msgspec.convert(dict(zip(_QUARANTINE_FIELDS, values, strict=True)), Quarantined)))
    except (sqlite3.Error, OverflowError, msgspec.ValidationError):
        return chunk, True
    return chunk, False


def _is_quarantine_readable(connection: sqlite3.Connection, number: int) -> bool:
    chunk, failed = _read_quarantine_chunk(connection, number)
    return bool(chunk) or not failed


def salvaged_rows(connection: sqlite3.Connection, lane: int, after: int) -> Iterator[list[Row]]:
    """The readable rows of a lane behind a sequence, in order, in chunks; damaged stretches are jumped over."""
    start = after + 1
    last = _end_sequence(connection, lane, "max")
    while True:
        chunk, failed = _read_chunk(connection, lane, start)
        if chunk:
            yield chunk
            start = chunk[-1].sequence + 1
        elif not failed and (last is None or start > last):
            return
        if failed or not chunk:
            # A page that holds something else may also end the rows before their time.
            jumped = _behind_damage(lambda sequence: _is_readable(connection, lane, sequence, last), start)
            if jumped is None:
                return
            start = jumped


def _end_sequence(connection: sqlite3.Connection, lane: int, end: Literal["min", "max"]) -> int | None:
    """The first or the last row of a lane, -1 where it has none; None where that end is damaged."""
    try:
        (found,) = connection.execute(f"SELECT {end}(sequence) FROM reading WHERE lane = ?", (lane,)).fetchone()
    except (sqlite3.Error, OverflowError):
        return None
    if found is None:
        return -1
    return found if isinstance(found, int) else None


def _read_chunk(connection: sqlite3.Connection, lane: int, start: int) -> tuple[list[Row], bool]:
    """Rows from a sequence on, and whether damage ended them."""
    rows: list[Row] = []
    try:
        for values in connection.execute(_ROWS, (lane, start, CHUNK_ROWS)):
            row = Row(*values)
            # A damaged page may also read as nonsense: what goes backwards is not what was written.
            if not is_sound(row) or row.lane != lane or row.sequence < (rows[-1].sequence + 1 if rows else start):
                return rows, True
            rows.append(row)
    except (sqlite3.Error, OverflowError):
        return rows, True
    return rows, False


def _is_readable(connection: sqlite3.Connection, lane: int, sequence: int, last: int | None) -> bool:
    rows, failed = _read_chunk(connection, lane, sequence)
    return bool(rows) or (not failed and (last is None or sequence > last))


def _behind_damage(is_readable: Callable[[int], bool], start: int) -> int | None:
    """The first sequence behind `start` from which rows can be read again; None where there is none.

    Doubles its step until something is readable, then halves it back to the edge of the damage.
    """
    bad, step = start, 1
    while not is_readable(bad + step):
        bad += step
        step *= 2
        if bad > _SEQUENCE_MAX:
            return None
    good = bad + step
    while good - bad > 1:
        middle = (good + bad) // 2
        if is_readable(middle):
            good = middle
        else:
            bad = middle
    return good


def _readable(
    execute: Callable[..., sqlite3.Cursor], statement: str, parameters: Sequence[object] = ()
) -> Iterator[tuple[Any, ...]]:
    """The rows of a statement up to the first that cannot be read."""
    with suppress(sqlite3.Error, OverflowError):
        yield from execute(statement, parameters)
