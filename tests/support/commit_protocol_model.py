"""The commit protocol of `sluice-cloud ingest` in plain Python: what is on disk, what dies with the process.

Commit by commit what `spark/batch_job.py` and the tables beside it do, and what Spark's own checkpoint does around
them. A Delta table is a list of rows that changes in whole commits, each with the numbers of its applications; what
was written and not committed is an object that a crash forgets. The process may die, or fail, before any commit: of the
tables, of the state, of the checkpoint, also while a start finishes what the last one left.

Which of several copies counts, and where a time correction moves a reading, is `spark_oracle`'s word here as there:
this model is about what happens in which order. Which numbers came before is kept by the real code, which needs no
Spark.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import count
from typing import Generic, TypeVar

from spark.decode.codec_declarations import NO_STREAMS
from spark.log.copies import NO_SUSPECTS, Suspects
from spark.log.lane_sequences import Lane, SeenLane, joined, ranges, without
from spark.log.sequence_runs import RunNumbers
from spark.windows.windows_table import TimeSpan, time_spans
from tests.support.spark_oracle import (
    EPOCH,
    TOLD_SLACK,
    Copy,
    Correction,
    Event,
    GatewayBoot,
    WindowKey,
    WindowRow,
    fold,
    millionths,
    retimed,
    told_apart,
)

WINDOW_S = 60
LATE = timedelta(seconds=60)
CONFLICT = "conflict"
UNDECODABLE = "undecodable"
ORDINAL = "sluice-ordinal"
READINGS, COPY, CORRECTION = "readings", "copy", "correction"
STATES_MAX = 1
"""States in memory. Few, so that some are looked up."""

Row_ = TypeVar("Row_")
Key = TypeVar("Key")
State = TypeVar("State")
Offsets = tuple[int, ...]
"""The next offset of each partition."""
Told = Mapping[GatewayBoot, list[Correction]]


# -- the disk -----------------------------------------------------------------------------------------


class KilledError(Exception):
    """The process died here: its memory is gone."""


class FailedError(Exception):
    """Something failed here, a full disk say: the process ends in good order."""


@dataclass(slots=True)
class Power:
    """Counts commits, and ends the process before one of them."""

    left: int | None = None
    error: type[Exception] = KilledError
    journal: list[str] = field(default_factory=list)

    def before(self, what: str) -> None:
        if self.left == 0:
            self.left = None
            self.journal.append(f"{self.error.__name__} before {what}")
            raise self.error
        if self.left is not None:
            self.left -= 1
        self.journal.append(what)


class DeltaTable(Generic[Row_]):
    """Rows that change in whole commits, and the number of each application's last commit."""

    def __init__(self, name: str, power: Power) -> None:
        self.name = name
        self.rows: list[Row_] = []
        self.numbers: dict[str, int] = {}
        self._power = power

    def commit(self, rows: Iterable[Row_], numbers: Mapping[str, int], *, whole: bool = False) -> None:
        """Add rows, or, where they are the `whole` table, put them in the place of all that are there."""
        added = list(rows)
        self._power.before(f"{self.name} {dict(numbers)}")
        for application, number in numbers.items():
            before = self.numbers.get(application, -1)
            assert before < number, f"{self.name}: {application} commits {number} after {before}"
        self.rows = [*([] if whole else self.rows), *added]
        self.numbers |= numbers

    def overwrite(self, rows: Iterable[Row_], goes: Callable[[Row_], bool]) -> None:
        fresh = list(rows)
        self._power.before(f"{self.name} overwritten")
        self.rows = [row for row in self.rows if not goes(row)] + fresh


class AppendTable(Generic[Row_]):
    """A table as its one writer has it, who remembers what was committed: `delta_staging.AppendTable`."""

    def __init__(self, table: DeltaTable[Row_]) -> None:
        self.table = table
        self._numbers = dict(table.numbers)

    def last(self, application: str) -> int:
        return self._numbers.get(application, -1)

    def commit(self, rows: Iterable[Row_], numbers: Mapping[str, int], *, whole: bool = False) -> None:
        self.table.commit(rows, numbers, whole=whole)
        self._numbers |= numbers

    def append(self, rows: Iterable[Row_], application: str, number: int, *, whole: bool = False) -> None:
        if self.last(application) < number:
            self.commit(rows, {application: number}, whole=whole)


@dataclass(frozen=True, slots=True)
class Sent:
    """One record as Kafka holds it."""

    event: Event
    metrics: Mapping[str, Decimal]
    correction: Correction | None = None
    damaged: bool = False
    """Its headers can be read, its payload cannot."""


@dataclass(frozen=True, slots=True, eq=False)
class LogRow:
    """A record as it was read once."""

    copy: Copy
    """An object of this row's own."""
    ordinal: int
    duplicate: bool
    reject: str | None

    @property
    def event(self) -> Event:
        return self.copy[0]

    @property
    def name(self) -> tuple[object, ...]:
        return (self.event.record.place, self.ordinal)

    @property
    def is_reading(self) -> bool:
        return self.event.type == "sluice.reading" and self.reject is None and not self.duplicate

    @property
    def may_be_copy(self) -> bool:
        return self.reject in {None, CONFLICT}


@dataclass(frozen=True, slots=True)
class Amendment:
    row: LogRow
    ordinal: int
    """The batch by which it became known."""


Member = tuple[datetime, tuple[str, str, int], Decimal, bool]
"""One value of a window: event time, identity, value, whether it came late."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part that a batch adds to a window."""

    key: WindowKey
    members: tuple[Member, ...]
    ordinal: int


Figures = tuple[int, Decimal | None, Decimal | None, Decimal | None, int]
"""Figures of a window in `window_changes`: n, min, max, sum, late."""
EMPTY: Figures = (0, None, None, None, 0)


@dataclass(frozen=True, slots=True)
class Change:
    key: WindowKey
    cause: str
    figures: Figures
    ordinal: int


RunKey = tuple[str, str, str, str, str]
"""Namespace, device, stream, counter and device boot."""


@dataclass(frozen=True, slots=True)
class DevicePart:
    """Contiguous numbers of a run in a batch."""

    key: RunKey
    first: int
    last: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class StateRow(Generic[Key, State]):
    key: Key
    state: State
    ordinal: int


@dataclass(slots=True)
class Checkpoint:
    """Spark's: a query's id, the end of each batch, written before it, and which batches are done."""

    query: int
    ends: list[Offsets] = field(default_factory=list)
    done: set[int] = field(default_factory=set)


class Disk:
    """All that outlives a process."""

    def __init__(self) -> None:
        self.power = Power()
        self.log: DeltaTable[LogRow] = DeltaTable("log", self.power)
        self.amendments: DeltaTable[Amendment] = DeltaTable("amendments", self.power)
        self.corrections: DeltaTable[Correction] = DeltaTable("time_corrections", self.power)
        self.parts: DeltaTable[Part] = DeltaTable("window_parts", self.power)
        self.changes: DeltaTable[Change] = DeltaTable("window_changes", self.power)
        self.lanes: DeltaTable[StateRow[Lane, SeenLane]] = DeltaTable("seen", self.power)
        self.devices: DeltaTable[DevicePart] = DeltaTable("device_parts", self.power)
        self._queries = count()
        self.checkpoint = Checkpoint(next(self._queries))

    def begin_checkpoint(self) -> None:
        """The old one is lost, or given up: all is read from the earliest offset again."""
        self.checkpoint = Checkpoint(next(self._queries))


# -- what the tables say ------------------------------------------------------------------------------


def effective_log(disk: Disk, before: int | None = None) -> list[LogRow]:
    """`log` with each record as it counts now; with `before`, as it counted when that batch began."""
    latest: dict[tuple[object, ...], Amendment] = {}
    for amendment in disk.amendments.rows:
        name = amendment.row.name
        if (before is None or amendment.ordinal < before) and (
            name not in latest or latest[name].ordinal < amendment.ordinal
        ):
            latest[name] = amendment
    rows = [row for row in disk.log.rows if before is None or row.ordinal < before]
    return [latest[row.name].row if row.name in latest else row for row in rows]


def by_boot(corrections: Iterable[Correction]) -> dict[GatewayBoot, list[Correction]]:
    told: dict[GatewayBoot, list[Correction]] = defaultdict(list)
    for correction in corrections:
        told[correction.boot].append(correction)
    return told


def readings(rows: Iterable[LogRow], told: Told) -> list[tuple[Event, Mapping[str, Decimal]]]:
    return [(retimed(row.event, told), row.copy[1]) for row in rows if row.is_reading]


def is_dated(event: Event) -> bool:
    """Whether its time is known, and can be: what has none is in no window."""
    return event.known and event.possible(NO_STREAMS)


def windowed(timed: Iterable[tuple[Event, Mapping[str, Decimal]]]) -> dict[WindowKey, tuple[Member, ...]]:
    """Readings by window; those whose time cannot be, or is unknown, are in none."""
    windows: dict[WindowKey, tuple[Member, ...]] = defaultdict(tuple)
    for event, metrics in timed:
        if is_dated(event):
            start = event.time - (event.time - EPOCH) % timedelta(seconds=WINDOW_S)
            late = event.record.timestamp > start + timedelta(seconds=WINDOW_S) + LATE
            for metric, value in metrics.items():
                key = (event.namespace, event.device, event.record.topic, metric, start)
                windows[key] = (*windows[key], (event.time, event.identity, value, late))
    return windows


def folded(parts: Iterable[Part]) -> dict[WindowKey, tuple[Member, ...]]:
    windows: dict[WindowKey, tuple[Member, ...]] = defaultdict(tuple)
    for part in parts:
        windows[part.key] = (*windows[part.key], *part.members)
    return windows


def window_row(members: Iterable[Member]) -> WindowRow:
    return fold(sorted(member[:3] for member in members))


def figures(members: Sequence[Member]) -> Figures:
    if not members:
        return EMPTY
    row = window_row(members)
    return row.n, row.min, row.max, row.sum, sum(late for *_, late in members)


def told_figures(changes: Iterable[Change]) -> dict[WindowKey, Figures]:
    """Windows as a reader of `window_changes` sees them. Rows of `readings` add to a window, others replace it."""
    windows: dict[WindowKey, Figures] = {}
    for change in changes:
        before = windows.get(change.key, EMPTY)
        if change.cause == READINGS and before[0]:
            windows[change.key] = _sum(before, change.figures)
        else:
            windows[change.key] = change.figures
    return windows


def _sum(one: Figures, other: Figures) -> Figures:
    mins = [least for least in (one[1], other[1]) if least is not None]
    maxs = [most for most in (one[2], other[2]) if most is not None]
    sums = [total for total in (one[3], other[3]) if total is not None]
    return one[0] + other[0], min(mins), max(maxs), sum(sums, Decimal(0)), one[4] + other[4]


# -- what is told apart -------------------------------------------------------------------------------


def judged(rows: Iterable[LogRow]) -> list[LogRow]:
    """Say anew of each row whether it is a duplicate or a conflict."""
    # Of a record that was read twice the first one counts.
    ordered = sorted(rows, key=lambda row: row.ordinal)
    kept, conflicts = told_apart([row.copy for row in ordered])
    counts, rejects = {id(copy) for copy in kept}, {id(copy) for copy in conflicts}
    return [
        replace(
            row,
            duplicate=id(row.copy) not in counts | rejects,
            reject=CONFLICT if id(row.copy) in rejects else None,
        )
        for row in ordered
    ]


def suspected(rows: Iterable[LogRow], suspects: Suspects) -> list[LogRow]:
    def is_suspect(event: Event) -> bool:
        *lane, number = event.identity
        by_lane = any(lane == [*name] and first <= number <= last for *name, first, last in suspects.lanes)
        if by_lane or event.run is None:
            return by_lane
        *run, number = event.run
        return any(run == [*name] and first <= number <= last for *name, first, last in suspects.runs)

    return [row for row in rows if row.may_be_copy and is_suspect(row.event)]


def came_before(added: Iterable[DevicePart], earlier: Iterable[DevicePart]) -> Suspects:
    """Find numbers that earlier parts have: `device_parts.came_again`."""
    there = list(earlier)
    pairs = [
        ((*part.key, max(part.first, other.first), min(part.last, other.last)), (other.ordinal, other.ordinal))
        for part in added
        for other in there
        if part.key == other.key and part.first <= other.last and other.first <= part.last
    ]
    return Suspects([], [numbers for numbers, _ in pairs], joined({batch for _, batch in pairs}))


@dataclass(frozen=True, slots=True)
class Census:
    corrections: int
    lanes: Mapping[Lane, list[int]]
    nobodys_copies: Mapping[Lane, set[int]]
    devices: list[DevicePart]
    repeated: list[RunNumbers]


def take_census(rows: Iterable[LogRow], ordinal: int) -> Census:
    lanes: dict[Lane, list[int]] = defaultdict(list)
    good: dict[Lane, set[int]] = defaultdict(set)
    numbers: dict[RunKey, list[int]] = defaultdict(list)
    corrections = 0
    for row in rows:
        buffer, lane, number = row.event.identity
        # Rejects too: they would leave holes.
        lanes[buffer, lane].append(number)
        if row.may_be_copy:
            good[buffer, lane].add(number)
        # Conflicts too: a start that finishes a batch knows them, the batch itself did not when it was counted.
        if row.may_be_copy and row.event.run is not None:
            *run, number = row.event.run
            numbers[run[0], run[1], run[2], run[3], run[4]].append(number)
        corrections += row.reject is None and row.copy[2] is not None
    devices = [
        DevicePart(key, first, last, ordinal)
        for key, of_run in numbers.items()
        for first, last in ranges(sorted(set(of_run)))
    ]
    repeated = [
        (*key, first, last)
        for key, of_run in numbers.items()
        for first, last in ranges(sorted(number for number in set(of_run) if of_run.count(number) > 1))
    ]
    return Census(
        corrections,
        {lane: sorted(of_lane) for lane, of_lane in lanes.items()},
        {lane: set(of_lane) - good[lane] for lane, of_lane in lanes.items()},
        devices,
        repeated,
    )


# -- what is in memory, and saved now and then --------------------------------------------------------


class StateTable(Generic[Key, State]):
    """`state_table.StateTable`, with few states in memory."""

    def __init__(self, table: DeltaTable[StateRow[Key, State]]) -> None:
        self.table = AppendTable(table)
        self.changed: set[Key] = set()
        self.states: dict[Key, State] = {}
        if self.saved >= 0:
            self.states = self.newest()
            self.forget()

    @property
    def saved(self) -> int:
        return self.table.last(ORDINAL)

    def newest(self) -> dict[Key, State]:
        """All states in the table."""
        rows = sorted(self.table.table.rows, key=lambda row: row.ordinal)
        return {row.key: deepcopy(row.state) for row in rows}

    def put_last(self, key: Key, state: State) -> None:
        self.states.pop(key, None)
        self.states[key] = state
        self.changed.add(key)

    def recall(self, keys: Iterable[Key]) -> None:
        there = self.newest()
        self.states.update({key: there[key] for key in keys if key in there and key not in self.states})

    def forget(self) -> None:
        for key in [*self.states][:-STATES_MAX]:
            del self.states[key]

    def save(self, ordinal: int) -> None:
        rows = [StateRow(key, deepcopy(self.states[key]), ordinal) for key in self.changed]
        self.table.append(rows, ORDINAL, ordinal)
        self.changed.clear()
        self.forget()
        newest = self.newest()
        if len(self.table.table.rows) > len(newest):
            # A commit of its own.
            last = {row.key: row for row in sorted(self.table.table.rows, key=lambda row: row.ordinal)}
            self.table.table.overwrite(last.values(), lambda _: True)


class Seen:
    """`seen_table.Seen`."""

    def __init__(self, disk: Disk) -> None:
        self.lanes = StateTable(disk.lanes)

    @property
    def saved(self) -> int:
        return self.lanes.saved

    def add_batch(self, census: Census, ordinal: int) -> Suspects:
        lanes: list[tuple[str, str, int, int]] = []
        batches: set[tuple[int, int]] = set()
        self.lanes.recall(census.lanes)
        for lane, numbers in census.lanes.items():
            state = self.lanes.states.get(lane, SeenLane())
            for first, last in without(state.add(numbers, ordinal), census.nobodys_copies.get(lane, ())):
                lanes.append((*lane, first, last))
                batches.update(state.batches(first, last))
            self.lanes.put_last(lane, state)
        return Suspects(lanes, census.repeated, joined(batches))

    def save(self, ordinal: int) -> None:
        self.lanes.save(ordinal)


# -- corrections --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """`time_corrections.Corrections`."""

    told: Told

    def may_move(self, event: Event) -> bool:
        wrong = {boot[2] for boot, versions in self.told.items() if any(each.supersedes for each in versions)}
        return event.boot_time_error_us is not None or event.gateway_boot in wrong

    def may_move_to(self, event: Event, start: datetime) -> bool:
        last = {boot[2]: max(each.told for each in versions) for boot, versions in self.told.items()}
        if event.gateway_boot not in last or start > last[event.gateway_boot] + TOLD_SLACK:
            return False
        return self.may_move(event)


def times_had(event: Event, told: Told) -> list[Event]:
    """A reading as it was sent, and by each version of its boot's correction."""
    versions = told.get((event.namespace, event.gateway, event.gateway_boot), [])
    mended = [
        event.boot_time_us + each.offset_us + millionths(event.boot_time_us - each.boottime_us, each.rate_ppm)
        for each in versions
    ]
    return [event, *(replace(event, time=EPOCH + timedelta(microseconds=us), time_error_us=0) for us in mended)]


def moved_keys(rows: Iterable[LogRow], known: Known, boots: set[GatewayBoot]) -> set[WindowKey]:
    """The windows that readings of these boots may ever have been in: `time_corrections.readings_moved`."""
    names = {boot[2] for boot in boots}
    had = [
        (event, row.copy[1])
        for row in rows
        if row.event.gateway_boot in names and known.may_move(row.event)
        for event in times_had(row.event, {boot: known.told[boot] for boot in boots})
    ]
    return set(windowed(had))


# -- the job ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Area:
    """Windows that are computed anew together."""

    spans: tuple[TimeSpan, ...]
    devices: frozenset[str]

    def holds(self, key: WindowKey) -> bool:
        return key[1] in self.devices and self.spans_hold(key[4])

    def spans_hold(self, time: datetime) -> bool:
        us = (time - EPOCH) // timedelta(microseconds=1)
        return any(span.start_us <= us < span.end_us for span in self.spans)


def area_of(keys: Iterable[WindowKey]) -> Area | None:
    touched = list(keys)
    starts_us = ((start - EPOCH) // timedelta(microseconds=1) for *_, start in touched)
    # Few spans, so that windows between are covered too.
    spans = time_spans(starts_us, WINDOW_S, 2)
    return Area(tuple(spans), frozenset(device for _, device, *_ in touched)) if touched else None


@dataclass(frozen=True, slots=True)
class Copies:
    """`batch_copies.Copies`: what is said of records that came again, and of what they are copies of."""

    of_batch: list[LogRow]
    of_earlier_batches: list[LogRow]


class Job:
    """`batch_job.BatchJob`."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.log = AppendTable(disk.log)
        self.amendments = AppendTable(disk.amendments)
        self.told = AppendTable(disk.corrections)
        self.parts = AppendTable(disk.parts)
        self.changes = AppendTable(disk.changes)
        self.devices = AppendTable(disk.devices)
        self.seen = Seen(disk)
        self.known = Known(by_boot(disk.corrections.rows))
        self.in_batch = False
        self.recover()

    @property
    def last(self) -> int:
        return self.log.last(ORDINAL)

    def recover(self) -> None:
        """Count again what was committed since the state was saved, and finish the last batch."""
        last = self.last
        for ordinal in range(self.seen.saved + 1, last):
            self.seen.add_batch(self.census_of(self.rows_of(ordinal), ordinal), ordinal)
        if last > self.seen.saved:
            self.finish(last)

    def take(self, sent: Sequence[Sent], query: int, number: int) -> None:
        self.in_batch = True
        if not self.is_done(query, number):
            self.take_new(sent, query, number)
        self.in_batch = False

    def is_done(self, query: int, number: int) -> bool:
        return self.log.last(query_of(query)) >= number

    def take_new(self, sent: Sequence[Sent], query: int, number: int) -> None:
        ordinal = self.last + 1
        rows = [row_of(each, ordinal) for each in sent]
        census = self.census_of(rows, ordinal)
        copies = self.copies(rows, self.suspects(census, ordinal), ordinal)
        rows = with_verdicts(rows, copies)
        self.commit_log_and_derive(rows, census, copies, query, number)

    def commit_log_and_derive(
        self, rows: list[LogRow], census: Census, copies: Copies | None, query: int, number: int
    ) -> None:
        ordinal = rows[0].ordinal
        added = self.parts_of(rows, ordinal)
        self.log.commit(rows, {ORDINAL: ordinal, query_of(query): number})
        self.derive(rows, census, copies, added, ordinal)
        self.commit_devices(census, ordinal)

    def save(self) -> None:
        if self.in_batch or self.last == self.seen.saved:
            return
        self.seen.save(self.last)

    def finish(self, last: int) -> None:
        """Derive from the last batch what a run that died may have left out."""
        rows = self.rows_of(last)
        census = self.census_of(rows, last)
        added = self.parts_of(rows, last)
        self.derive(rows, census, self.copies(rows, self.suspects(census, last), last), added, last)
        self.commit_devices(census, last)

    def suspects(self, census: Census, ordinal: int) -> Suspects:
        """Record a batch's numbers of lanes. Return those that came before, or twice in it."""
        return self.seen.add_batch(census, ordinal).and_also(self.numbers_again(census, ordinal))

    def numbers_again(self, census: Census, ordinal: int) -> Suspects:
        """Return a batch's numbers of devices that came before."""
        if not census.devices:
            return NO_SUSPECTS
        return came_before(census.devices, (part for part in self.disk.devices.rows if part.ordinal < ordinal))

    def commit_devices(self, census: Census, ordinal: int) -> None:
        """Commit a batch's numbers of devices, last of all."""
        self.devices.append(census.devices, ORDINAL, ordinal)

    def census_of(self, rows: list[LogRow], ordinal: int) -> Census:
        """Census of a new batch, or of one in `log` with the verdicts of then on its rows."""
        return take_census(rows, ordinal)

    def derive(
        self, rows: list[LogRow], census: Census, copies: Copies | None, added: list[Part], ordinal: int
    ) -> None:
        """Bring all other tables to where `log` is."""
        amended = copies.of_earlier_batches if copies else []
        if amended:
            self.amendments.append([Amendment(row, ordinal) for row in amended], ORDINAL, ordinal)
        # By the corrections that were known before this batch: a start that finishes it knows no others until these
        # two are committed, so that what they tell is the same.
        self.commit_windows(added, ordinal)
        self.tell(((part.key, figures(part.members)) for part in added), ordinal, READINGS)
        boots = self.take_corrections(rows, ordinal) if census.corrections else set()
        as_readings = [replace(row, duplicate=False, reject=None) for row in amended]
        if amended:
            self.compute_anew(windowed(readings(as_readings, self.known.told)), ordinal, COPY)
        if boots:
            self.compute_anew(self.moved_by(boots, as_readings), ordinal, CORRECTION)

    def moved_by(self, boots: set[GatewayBoot], amended: list[LogRow]) -> Iterable[WindowKey]:
        """Windows of readings that corrections move; what counted until this batch stands where it was sent, too."""
        counting = [row for row in effective_log(self.disk) if row.is_reading]
        return moved_keys(counting + [row for row in amended if row.is_reading], self.known, boots)

    def commit_windows(self, added: list[Part], ordinal: int) -> None:
        self.parts.append(added, ORDINAL, ordinal)

    def tell(self, windows: Iterable[tuple[WindowKey, Figures]], ordinal: int, cause: str) -> None:
        changes = [Change(key, cause, told, ordinal) for key, told in windows]
        self.changes.append(changes, f"{ORDINAL}-{cause}", ordinal)

    def take_corrections(self, rows: list[LogRow], ordinal: int) -> set[GatewayBoot]:
        """Store what a batch tells of clocks; return of which boots. Doing it again changes nothing."""
        brought = [row.copy[2] for row in rows if row.reject is None and not row.duplicate]
        told = [correction for correction in brought if correction is not None]
        stored = {correction.ce_id for correction in self.disk.corrections.rows}
        new = [correction for correction in told if correction.ce_id not in stored]
        if new:
            self.told.append(new, ORDINAL, ordinal)
        self.known = Known(by_boot(self.disk.corrections.rows))
        return {correction.boot for correction in told}

    def compute_anew(self, touched: Iterable[WindowKey], ordinal: int, cause: str) -> None:
        area = area_of(touched)
        if area is None:
            return
        fresh = windowed(readings(self.readings_near(area), self.known.told))
        parts = [Part(key, members, ordinal) for key, members in fresh.items() if area.holds(key)]
        self.tell(self.differences(area, parts), ordinal, cause)
        self.replace_area(area, parts)

    def readings_near(self, area: Area) -> list[LogRow]:
        start = EPOCH + timedelta(microseconds=area.spans[0].start_us)
        return [
            row
            for row in effective_log(self.disk)
            if (is_dated(row.event) and area.spans_hold(row.event.time)) or self.known.may_move_to(row.event, start)
        ]

    def differences(self, area: Area, fresh: list[Part]) -> list[tuple[WindowKey, Figures]]:
        before = folded(part for part in self.disk.parts.rows if area.holds(part.key))
        after = folded(fresh)
        both = {key: (figures(before.get(key, ())), figures(after.get(key, ()))) for key in before.keys() | after}
        return [(key, new) for key, (old, new) in both.items() if old != new]

    def replace_area(self, area: Area, fresh: list[Part]) -> None:
        self.disk.parts.overwrite(fresh, lambda part: area.holds(part.key))

    def parts_of(self, rows: list[LogRow], ordinal: int) -> list[Part]:
        windows = windowed(readings(rows, self.known.told))
        return [Part(key, members, ordinal) for key, members in windows.items()]

    def copies(self, rows: list[LogRow], suspects: Suspects, ordinal: int) -> Copies | None:
        if not suspects:
            return None
        earlier = [row for row in self.before(ordinal) if any(a <= row.ordinal <= b for a, b in suspects.batches)]
        found = {row.name: row for row in suspected(earlier, suspects) + suspected(rows, suspects)}
        said = judged(found.values())
        changed = [
            row
            for row in said
            if row.ordinal < ordinal
            and (row.duplicate, row.reject) != (found[row.name].duplicate, found[row.name].reject)
        ]
        return Copies([row for row in said if row.ordinal == ordinal], changed)

    def before(self, ordinal: int) -> list[LogRow]:
        """Rows that counted when a batch began, without the batch's own findings."""
        return effective_log(self.disk, before=ordinal)

    def rows_of(self, ordinal: int) -> list[LogRow]:
        return [row for row in self.disk.log.rows if row.ordinal == ordinal]


def query_of(query: int) -> str:
    return f"sluice-ingest-{query}"


def row_of(sent: Sent, ordinal: int) -> LogRow:
    metrics = {} if sent.damaged else sent.metrics
    return LogRow(
        (sent.event, metrics, None if sent.damaged else sent.correction),
        ordinal,
        duplicate=False,
        reject=UNDECODABLE if sent.damaged else None,
    )


def with_verdicts(rows: list[LogRow], copies: Copies | None) -> list[LogRow]:
    said = {row.name: row for row in copies.of_batch} if copies else {}
    return [said.get(row.name, row) for row in rows]


# -- Spark's streaming query --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Life:
    """Length of a process's life, and its end."""

    commits: int
    error: type[Exception]
    new_checkpoint: bool


@dataclass(slots=True)
class Pace:
    """Records of each partition that each planned batch reads, and the batches after which the state is saved."""

    parts: list[Offsets]
    saves: list[bool]

    def end(self, start: Offsets, kafka: Sequence[Sequence[Sent]]) -> Offsets:
        """The end of the next batch; everything once nothing else is said."""
        latest = tuple(len(partition) for partition in kafka)
        while self.parts:
            ends = (begin + more for begin, more in zip(start, self.parts.pop(0), strict=True))
            end = tuple(min(most, there) for most, there in zip(ends, latest, strict=True))
            if end != start:
                return end
        return latest

    @property
    def is_save_due(self) -> bool:
        return bool(self.saves) and self.saves.pop(0)


def ingest(disk: Disk, kafka: Sequence[Sequence[Sent]], pace: Pace, job_type: type[Job] = Job) -> None:
    """One run of `sluice-cloud ingest --once`: until all is read, or until the power says otherwise."""
    job = job_type(disk)
    try:
        _stream(disk, kafka, pace, job)
    except FailedError:
        job.save()
        raise
    job.save()


def _stream(disk: Disk, kafka: Sequence[Sequence[Sent]], pace: Pace, job: Job) -> None:
    checkpoint = disk.checkpoint
    nothing = (0,) * len(kafka)
    while True:
        number = len(checkpoint.ends) - 1
        if number < 0 or number in checkpoint.done:
            # The next batch: its end is written before it is begun.
            start = checkpoint.ends[-1] if checkpoint.ends else nothing
            end = pace.end(start, kafka)
            if end == start:
                return
            disk.power.before("offset log")
            checkpoint.ends.append(end)
            number += 1
        start = checkpoint.ends[number - 1] if number else nothing
        batch = [
            sent
            for partition, first, end in zip(kafka, start, checkpoint.ends[number], strict=True)
            for sent in partition[first:end]
        ]
        job.take(batch, checkpoint.query, number)
        if pace.is_save_due:
            job.save()
        disk.power.before("commit log")
        checkpoint.done.add(number)


def ingest_through(
    disk: Disk, kafka: Sequence[Sequence[Sent]], pace: Pace, lives: Iterable[Life], job_type: type[Job] = Job
) -> None:
    """Run again and again, each time as long as it lives; at last until everything is taken."""
    for life in lives:
        if life.new_checkpoint:
            disk.begin_checkpoint()
        disk.power.left, disk.power.error = life.commits, life.error
        try:
            ingest(disk, kafka, pace, job_type)
        except (KilledError, FailedError):
            continue
    disk.power.left = None
    ingest(disk, kafka, pace, job_type)
