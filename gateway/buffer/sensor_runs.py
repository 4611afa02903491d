"""The duplicate windows of the buffer file, and a cache of them: they tell retransmissions from new readings.

A window costs a page to write, and each commit touches the windows of all its sensors. So windows are written now and
then, with the place in the buffer up to which they are valid (`windows_saved`). Rows behind that place tell the rest,
and no row is deleted from the file before its window is written. Of rows that only Kafka has, nothing tells after a
crash: a resend of theirs is stored again, and the cloud recognises it.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, islice

import structlog
from msgspec.structs import replace

from gateway.buffer.duplicate_window import DuplicateWindow, Verdict
from gateway.buffer.front import Front
from gateway.buffer.rows import START, Entry, Position, Quarantined, Series, Span
from gateway.buffer.stored_rows import rows_after
from gateway.reading import Doubt
from gateway.record_contract import counter_of

RUNS_PER_COUNTER = 2
"""Runs of a counter whose duplicate window is kept: the present boot's, and the previous one's for stragglers."""
RUNS_MAX = 20_000
"""Duplicate windows kept in the file and in memory, a kilobyte each at most; the least recently used go first."""
SAVE_ROWS = 20_000
"""Rows after which windows are written; a start reads at most so many again."""
SAVE_S = 300.0
"""Seconds between two savings of the windows while no row is deleted. With Kafka away, they would be most of what a
reading writes beside its row."""
SAVED_AT_ONCE_MAX = 1_000
"""Windows written in one transaction; the next ones write the others."""
WINDOW_BYTES = 1_000
"""Bytes that a window takes on disk, rounded up."""
READ_ROWS = 500

# `seen_us` is wall time, by the clock of that boot as known now. Rows salvaged from a damaged file come later, but are
# older.
_SAVE = """
    INSERT INTO device_run VALUES (?1, ?2, ?3, ?4, ?5 + coalesce((
        SELECT offset_us FROM lane JOIN boot USING (boot_id) WHERE lane.number = ?4
    ), 0), ?6)
    ON CONFLICT (device, topic, boot) DO UPDATE SET
        lane = max(lane, excluded.lane), seen_us = iif(excluded.lane < lane, seen_us, excluded.seen_us),
        window = excluded.window
"""
_OF_RUN = rows_after(
    "lane, series, device_boot, device_sequence, payload, received_us",
    "device_boot IS NOT NULL AND device_sequence IS NOT NULL",
)
_UNSAVED = f"""
    SELECT place, coalesce(series.stream, ''), series.subject, series.device, series.topic, device_boot,
        device_sequence, payload, lane, received_us
    FROM {_OF_RUN} AS found LEFT JOIN series ON series.number = found.series ORDER BY place
"""
_SAVED_NAME = "windows_saved"

Run = tuple[str, str, str]
"""Device, counter (`record_contract.counter_of`), device boot."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Known:
    """A run in memory."""

    window: DuplicateWindow
    received: tuple[int, int] = (0, 0)
    """The lane and receipt of its newest reading: CLOCK_BOOTTIME of the lane's boot. (0, 0) if only the file knows."""
    before: "tuple[DuplicateWindow, tuple[int, int], bool] | None" = None
    """The window and receipt before the open transaction changed them, and whether the file had them."""


class DeviceRuns:
    """The windows in memory. A transaction is framed by `begin`, and `committed` or `restore`.

    A reading may also be judged between transactions. A roll-back leaves what was judged there.
    """

    def __init__(self, connection: sqlite3.Connection, front: Front) -> None:
        self._connection = connection
        self._front = front
        self._windows: dict[Run, _Known] = {}
        # By the fields of an entry. Two series of one counter (a sensor at another port) share a window.
        self._by_series: dict[tuple[Series, str], tuple[Run, _Known]] = {}
        self._unsaved: dict[Run, _Known] = {}
        """Runs that rows of the file have changed. A row is not deleted before its run's window is written."""
        self._quiet: dict[Run, _Known] = {}
        """Runs that rows of the front have changed. Their windows wait for `save_now`."""
        self._short: dict[Run, _Known] = {}
        """Runs whose windows were written without rows of the front. They are written again by `save_now`."""
        self._used_last: _Known | None = None
        """The run at the end of `_unsaved`, if any."""
        self._saved = START
        self._is_current = False
        self._save_due_s = 0.0
        self._known_runs: int | None = None
        self._unpruned: list[Run] = []
        """New runs: each makes older runs of its counter unneeded."""
        self._pruning: list[Run] = []
        """Those of them that the open transaction has seen to."""
        self._changed: dict[Run, _Known] | None = None
        """Runs that the open transaction has changed; None without a transaction."""
        self._written: dict[Run, _Known] = {}
        """Runs that the open transaction has written."""
        self._of_front: dict[Run, _Known] = {}
        """Runs of which the open transaction writes rows of the front."""
        self._before = START, 0.0
        self._gathered: tuple[dict[Run, _Known], dict[Run, _Known], frozenset[Run]] | None = None
        """What `save_now` has gathered in the open transaction: `_quiet` and `_short`, and the runs of `_unsaved`."""
        self.has_forgotten = False
        """Whether runs were forgotten since the last commit; see `forget_oldest`."""

    @property
    def unsaved(self) -> int:
        """Windows that the file does not have, but for those that lack rows of the front alone."""
        return len(self._unsaved) + len(self._quiet)

    def begin(self) -> None:
        """Begin a transaction."""
        self._changed, self._written, self._of_front, self._pruning = {}, {}, {}, []
        self._before, self._gathered = (self._saved, self._save_due_s), None

    def committed(self) -> None:
        """End a transaction that is on disk."""
        for known in (self._changed or {}).values():
            known.before = None
        # If these windows were written as well, then without the rows, which were in the front until now.
        self._unsaved |= {run: known for run, known in self._of_front.items() if run in self._short}
        self._changed, self._written = None, {}
        self.has_forgotten = False

    def restore(self) -> None:
        """End a transaction that was rolled back: the windows are as they were before it."""
        self._unsaved = {**self._written, **self._unsaved}
        if self._gathered is not None:
            self._quiet, self._short, unsaved = self._gathered
            apart = (self._quiet.keys() | self._short.keys()) - unsaved
            self._unsaved = {run: known for run, known in self._unsaved.items() if run not in apart}
        for run, known in (self._changed or {}).items():
            if known.before is not None:
                known.window, known.received, was_unsaved = known.before
                known.before = None
                if not was_unsaved:
                    self._unsaved.pop(run, None)
                    self._windows[run] = known
        self._changed, self._written, self._used_last = None, {}, None
        self._saved, self._save_due_s = self._before
        self._unpruned[:0] = self._pruning
        self._known_runs = None

    def _change(self, run: Run, known: _Known) -> None:
        """Remember how a run was, as a transaction is about to change it."""
        if self._changed is not None and known.before is None:
            # Also if this transaction has written it: that may be rolled back.
            is_unsaved = any(run in runs for runs in (self._unsaved, self._quiet, self._short, self._written))
            known.before = known.window.copy(), known.received, is_unsaved
            self._changed[run] = known

    def load(self, entries: Iterable[Entry]) -> None:
        """Read the windows that entries need, so that judging them cannot fail. Raises sqlite3.Error."""
        for entry in entries:
            boot = entry.datum.device_boot
            if boot is not None and entry.datum.device_sequence is not None:
                self._run_of(entry.series, boot)

    def _run_of(self, series: Series, boot: str) -> tuple[Run, _Known]:
        found = self._by_series.get((series, boot))
        if found is None:
            run = (series.device, series.counter, boot)
            found = self._by_series[series, boot] = run, self._known(run)
        return found

    def judge(self, entries: Iterable[Entry], lane: int, tally: Counter[str]) -> tuple[list[Entry], list[Entry]]:
        """Return the entries to store in a lane, and those among them that report what their sensor dropped.

        Retransmissions are left out. `tally` counts entries that are not new, by verdict.
        """
        admit = self.admit
        kept: list[Entry] = []
        with_lost: list[Entry] = []
        for entry in entries:
            datum = entry.datum
            boot, number = datum.device_boot, datum.device_sequence
            if boot is not None and number is not None:
                verdict = admit(entry.series, boot, number, datum.payload, lane, datum.received_us)
                if verdict is not Verdict.NEW:
                    tally[verdict.value] += 1
                    if verdict is Verdict.DUPLICATE:
                        continue
                    if verdict is Verdict.CONFLICT:
                        kept.append(replace(entry, datum=replace(datum, doubt=Doubt.CONFLICT)))
                        continue
                elif entry.lost is not None:
                    with_lost.append(entry)
            kept.append(entry)
        return kept, with_lost

    def admit(  # noqa: PLR0913, PLR0917 - once for each reading
        self, series: Series, boot: str, sequence: int, payload: bytes, lane: int, received_us: int
    ) -> Verdict:
        """Judge a reading that comes into a lane. It is stored unless the verdict is DUPLICATE."""
        found = self._by_series.get((series, boot))
        run, known = self._run_of(series, boot) if found is None else found
        if known.before is None and self._changed is not None:
            self._change(run, known)
        verdict = known.window.admit(sequence, payload)
        if verdict is not Verdict.DUPLICATE:
            received = lane, received_us
            if received > known.received:  # noqa: PLR1730 - a call of max() takes three times as long
                known.received = received
            if self._changed is None:
                self._quiet[run] = known
            elif known is not self._used_last:
                # Move it to the end, as windows are written in the order of their last use.
                self._unsaved.pop(run, None)
                self._unsaved[run] = self._used_last = known
        return verdict

    def forget(self, series: Series, boot: str, sequence: int) -> None:
        """Forget a reading of the front that nobody will have: if it comes again, it is new. Needs no transaction."""
        run, known = self._run_of(series, boot)
        known.window = DuplicateWindow.from_bytes(known.window.to_bytes({sequence}))
        self._quiet[run] = known

    def forget_oldest(self, limit: int) -> None:
        """Forget the runs that were silent longest, down to `limit` of those that only the front has changed.

        Runs of rows that are in the front stay. Needs no transaction, and must not be called in one.
        """
        over = len(self._quiet) - limit
        if over <= 0:
            return
        _, of_front = self._front.first_and_sequences()
        settled = (run for run in self._quiet if run not in of_front)
        gone = nsmallest(over, settled, key=lambda run: self._quiet[run].received)
        for run in gone:
            del self._quiet[run]
        forgotten = {run for run in gone if run not in self._unsaved and run not in self._short}
        for run in forgotten:
            self._windows.pop(run, None)
        self._by_series = {of: found for of, found in self._by_series.items() if found[0] not in forgotten}
        self._unpruned = [run for run in self._unpruned if run not in forgotten]
        self.has_forgotten = self.has_forgotten or bool(forgotten)

    def written(self, rows: Iterable[tuple[Series, str]]) -> None:
        """Note rows of the front that the file has now: the series and device boot of each."""
        for series, boot in rows:
            run, known = self._run_of(series, boot)
            self._unsaved.setdefault(run, known)
            self._of_front[run] = known

    def remember_lost(self, input_: Quarantined) -> None:
        """Enter lost input into its window, unless it was judged: a later recall would report it as lost again."""
        datum = input_.datum
        boot, sequence = datum.device_boot, datum.device_sequence
        if input_.series is not None or boot is None or sequence is None:
            return
        run = (input_.device, input_.topic or "", boot)
        known = self._known(run)
        self._change(run, known)
        known.window.admit(sequence, datum.payload)
        self._unsaved.pop(run, None)
        self._unsaved[run] = self._used_last = known

    def recent_sequences(self, device: str, boot: str) -> frozenset[int]:
        """Sequences in the windows of a device's run, over all its counters."""
        self._catch_up()
        counters = self._connection.execute(
            "SELECT topic FROM device_run WHERE device = ? AND boot = ?", (device, boot)
        )
        runs = {(device, counter, boot) for (counter,) in counters}
        runs |= {run for run in chain(self._unsaved, self._quiet) if run[0] == device and run[2] == boot}
        return frozenset().union(*(self._known(run).window.sequences() for run in runs))

    def save_if_due(self, last: Position, now_s: float) -> None:
        """Write the windows if they are due. `last` is the newest row, `now_s` a monotonic clock's time."""
        rows = last.sequence - self._saved.sequence if last.lane == self._saved.lane else SAVE_ROWS
        if rows >= SAVE_ROWS or (self._unsaved and now_s >= self._save_due_s):
            self._catch_up()
            self._save(last, SAVED_AT_ONCE_MAX)
            if not self._unsaved:
                self._save_due_s = now_s + SAVE_S

    def save_before_deletion(self, span: Span, last: Position, bytes_max: int | None) -> bool:
        """Write the windows that only rows of this span tell; return whether the rows may be deleted.

        `bytes_max` is set if the disk has no room. Then only so many bytes of windows are written, and the deletion,
        which makes room, does not wait for the rest. If the power fails just then, a resend may be taken for new, but
        no reading is lost.
        """
        self._catch_up()
        if not self._unsaved or Position(span.lane, span.last) <= self._saved:
            return True
        is_saved = self._save(last, SAVED_AT_ONCE_MAX if bytes_max is None else bytes_max // WINDOW_BYTES)
        return is_saved or bytes_max is not None

    def save_now(self, last: Position) -> None:
        """Write all windows, as no row of the file tells what `admit` was told."""
        if self._gathered is None:
            self._gathered = self._quiet, self._short, frozenset(self._unsaved)
        self._unsaved = {**self._quiet, **self._short, **self._unsaved}
        self._quiet, self._short = {}, {}
        if self._unsaved:
            self._save(last, len(self._unsaved))

    def _save(self, last: Position, limit: int) -> bool:
        """Write the least recently used windows and, once all are written, the place up to which they are valid.

        Returns whether all are written.
        """
        for run in self._unpruned:
            self._forget_older(run)
        self._pruning, self._unpruned = self._unpruned, []
        saved = list(islice(self._unsaved.items(), limit))
        self._written |= saved
        # A row that only the front has may be gone after a crash. Its resend must then be stored.
        first, ahead = self._front.first_and_sequences()
        if first is not None:
            last = Position(last.lane, first - 1)
        self._connection.executemany(
            _SAVE,
            [(*run, *known.received, known.window.to_bytes(ahead.get(run, frozenset()))) for run, known in saved],
        )
        self._used_last = None
        # A dict keeps insertion order: windows just used move to the end, and the oldest are in front.
        for run, known in saved:
            del self._unsaved[run]
            self._quiet.pop(run, None)
            self._short.pop(run, None)
            self._windows.pop(run, None)
            self._windows[run] = known
        is_saved = not self._unsaved
        if is_saved:
            self._connection.execute(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", (_SAVED_NAME, f"{last.lane} {last.sequence}")
            )
            self._saved = last
        if len(self._windows) > RUNS_MAX:
            for run in list(self._windows)[: len(self._windows) - RUNS_MAX]:
                del self._windows[run]
            self._by_series.clear()
        self._short |= {run: known for run, known in saved if run in ahead}
        return is_saved

    def _catch_up(self) -> None:
        """Enter rows into the windows that were added since the windows were written."""
        if self._is_current:
            return
        saved = self._connection.execute("SELECT value FROM meta WHERE name = ?", (_SAVED_NAME,)).fetchone()
        self._saved = START if saved is None else Position(*map(int, saved[0].split()))
        found: dict[Run, _Known] = {}
        place = self._saved.place
        while rows := self._connection.execute(_UNSAVED, (place, READ_ROWS)).fetchall():
            place = rows[-1][0]
            for _, stream, subject, device, topic, boot, sequence, payload, *received in rows:
                if device is None:
                    # Its series is gone: the file is damaged.
                    continue
                run = (device, counter_of(stream, subject, device, topic), boot)
                known = found.pop(run, None) or _Known(self._stored_window(run))
                known.window.admit(sequence, payload)
                known.received = max(known.received, tuple(received))
                found[run] = known
        self._unsaved, self._is_current = found, True

    def _known(self, run: Run) -> _Known:
        self._catch_up()
        known = self._unsaved.get(run) or self._quiet.get(run) or self._short.get(run) or self._windows.get(run)
        if known is None:
            known = self._windows[run] = _Known(self._stored_window(run))
        return known

    def _stored_window(self, run: Run) -> DuplicateWindow:
        stored = self._connection.execute(
            "SELECT window FROM device_run WHERE device = ? AND topic = ? AND boot = ?", run
        ).fetchone()
        if stored is None:
            self._unpruned.append(run)
            return DuplicateWindow()
        try:
            return DuplicateWindow.from_bytes(stored[0])
        except ValueError as error:
            # Without the window, resends may be stored again. The cloud recognises them, and nothing is lost.
            log.warning("a duplicate window is begun anew", device=run[0], error=str(error))
            return DuplicateWindow()

    def _forget_older(self, run: Run) -> None:
        """Make room for a new run: delete its counter's older runs, then the least recently used of all.

        The order is by lane, then by time, as the wall clock may show another year after each start.
        """
        device, counter, _ = run
        forgotten = self._connection.execute(
            """DELETE FROM device_run WHERE device = ?1 AND topic = ?2 AND boot NOT IN (
                SELECT boot FROM device_run WHERE device = ?1 AND topic = ?2
                ORDER BY lane DESC, seen_us DESC LIMIT ?3)""",
            (device, counter, RUNS_PER_COUNTER - 1),
        ).rowcount
        if self._known_runs is None:
            (self._known_runs,) = self._connection.execute("SELECT count(*) FROM device_run").fetchone()
        self._known_runs += 1 - forgotten
        if self._known_runs > RUNS_MAX:
            self._known_runs -= self._connection.execute(
                """DELETE FROM device_run WHERE (device, topic, boot) IN (
                    SELECT device, topic, boot FROM device_run ORDER BY lane, seen_us LIMIT ?)""",
                (RUNS_MAX // 10,),
            ).rowcount
