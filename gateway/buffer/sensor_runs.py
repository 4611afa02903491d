"""Which retransmissions of which sensors are on disk: the duplicate windows of the buffer file, and a cache of them.

A window is a page to write, and every commit touches as many as it has sensors. So windows are written now and then,
with the place in the buffer that they speak for (`windows_saved`); rows behind that place tell the rest, and none of
them is deleted before its window is written.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import structlog
from msgspec.structs import replace

from gateway.buffer.duplicate_window import DuplicateWindow, Verdict
from gateway.buffer.rows import START, Doubt, Entry, Position, Quarantined, Series, Span
from gateway.record_contract import counter_of

RUNS_PER_COUNTER = 2
"""Runs of a counter whose duplicate window is kept: the present boot's, and the one before for stragglers."""
RUNS_MAX = 20_000
"""Duplicate windows kept, in the file and (a kilobyte each) in memory; least recently used go first."""
SAVE_ROWS = 20_000
"""Rows after which windows are written: so many are read again at a start, at the most."""
SAVE_S = 10.0
SAVED_AT_ONCE_MAX = 1_000
"""Windows written in one transaction; the others follow in the next."""
WINDOW_BYTES = 1_000
"""What a window takes on disk, rounded up."""
READ_ROWS = 500

# When it was received, by the wall clock of that boot as it is known now. What is salvaged from a damaged file comes
# later and is older.
_SAVE = """
    INSERT INTO device_run VALUES (?1, ?2, ?3, ?4, ?5 + coalesce((
        SELECT offset_us FROM lane JOIN boot USING (boot_id) WHERE lane.number = ?4
    ), 0), ?6)
    ON CONFLICT (device, topic, boot) DO UPDATE SET
        lane = max(lane, excluded.lane), seen_us = iif(excluded.lane < lane, seen_us, excluded.seen_us),
        window = excluded.window
"""
_UNSAVED = """
    SELECT coalesce(series.stream, ''), series.subject, series.device, series.topic, device_boot, device_sequence,
        payload, lane, received_us
    FROM reading JOIN series ON series.number = reading.series
    WHERE (lane, sequence) > (?, ?) AND device_boot IS NOT NULL AND device_sequence IS NOT NULL
    ORDER BY lane, sequence
"""
_SAVED_NAME = "windows_saved"

Run = tuple[str, str, str]
"""Device, counter (`record_contract.counter_of`), device boot."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Known:
    """A run that this process has looked at."""

    window: DuplicateWindow
    received: tuple[int, int] = (0, 0)
    """The lane of its newest reading, and when that was received: CLOCK_BOOTTIME of the lane's boot. (0, 0) where only
    the file knows."""


class DeviceRuns:
    """The windows that this process has looked at. They follow the file: `forget` after a roll-back."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._windows: dict[Run, _Known] = {}
        # Found by what an entry carries: two series of one counter (a sensor at another port) share a window.
        self._by_series: dict[tuple[Series, str], tuple[Run, _Known]] = {}
        self._unsaved: dict[Run, _Known] = {}
        self._used_last: _Known | None = None
        """The one at the end of `_unsaved`, if any."""
        self._saved = START
        self._is_current = False
        self._save_due_s = 0.0
        self._known_runs: int | None = None

    def judge(self, entries: Iterable[Entry], lane: int, tally: Counter[str]) -> tuple[list[Entry], list[Entry]]:
        """The entries that are to be stored in a lane, and those of them that say what their sensor dropped.

        Retransmissions are left out. `tally` counts by verdict those that are not new.
        """
        admit = self.admit
        kept: list[Entry] = []
        with_lost: list[Entry] = []
        for entry in entries:
            boot, number = entry.device_boot, entry.device_sequence
            if boot is not None and number is not None:
                verdict = admit(entry.series, boot, number, entry.payload, lane, entry.received_us)
                if verdict is not Verdict.NEW:
                    tally[verdict.value] += 1
                    if verdict is Verdict.DUPLICATE:
                        continue
                    if verdict is Verdict.CONFLICT:
                        kept.append(replace(entry, doubt=Doubt.CONFLICT))
                        continue
                elif entry.lost is not None:
                    with_lost.append(entry)
            kept.append(entry)
        return kept, with_lost

    def admit(  # noqa: PLR0913, PLR0917 - once for each reading
        self, series: Series, boot: str, sequence: int, payload: bytes, lane: int, received_us: int
    ) -> Verdict:
        """Judge a reading that is to be stored in a lane, which it is unless the verdict is DUPLICATE."""
        found = self._by_series.get((series, boot))
        if found is None:
            run = (series.device, series.counter, boot)
            found = self._by_series[series, boot] = run, self._known(run)
        run, known = found
        verdict = known.window.admit(sequence, payload)
        if verdict is not Verdict.DUPLICATE:
            received = lane, received_us
            if received > known.received:  # noqa: PLR1730 - a call of max() takes three times as long
                known.received = received
            if known is not self._used_last:
                # To the end: they are written in the order in which they were last used.
                self._unsaved.pop(run, None)
                self._unsaved[run] = self._used_last = known
        return verdict

    def remember_lost(self, input_: Quarantined) -> None:
        """What was never judged is in no window: a later recall would tell of it as lost once more."""
        boot, sequence = input_.device_boot, input_.device_sequence
        if input_.series is not None or boot is None or sequence is None:
            return
        run = (input_.device, input_.topic or "", boot)
        known = self._known(run)
        known.window.admit(sequence, input_.payload)
        self._unsaved.pop(run, None)
        self._unsaved[run] = self._used_last = known

    def recent_sequences(self, device: str, boot: str) -> frozenset[int]:
        """What the windows of a device's run hold, of all its counters."""
        try:
            self._catch_up()
            counters = self._connection.execute(
                "SELECT topic FROM device_run WHERE device = ? AND boot = ?", (device, boot)
            )
            runs = {(device, counter, boot) for (counter,) in counters}
            runs |= {run for run in self._unsaved if run[0] == device and run[2] == boot}
            return frozenset().union(*(self._known(run).window.sequences() for run in runs))
        except BaseException:
            # No transaction is rolled back here, which would do it: windows that know half must not judge.
            self.forget()
            raise

    def save_if_due(self, last: Position, now_s: float) -> None:
        """Write the windows now and then; `last` is the row that was added last, `now_s` a monotonic clock's."""
        rows = last.sequence - self._saved.sequence if last.lane == self._saved.lane else SAVE_ROWS
        if rows >= SAVE_ROWS or (self._unsaved and now_s >= self._save_due_s):
            self._catch_up()
            self._save(last, SAVED_AT_ONCE_MAX)
            if not self._unsaved:
                self._save_due_s = now_s + SAVE_S

    def save_before_deletion(self, span: Span, last: Position, bytes_max: int | None) -> bool:
        """Write the windows if rows of this span are all that speaks for them; whether the rows may be deleted then.

        `bytes_max` is set where the disk has no room: so much may be written, and the deletion, which makes some, does
        not wait for the rest. A resend may be taken for new if the power fails just then: no reading is lost.
        """
        self._catch_up()
        if not self._unsaved or Position(span.lane, span.last) <= self._saved:
            return True
        self._save(last, SAVED_AT_ONCE_MAX if bytes_max is None else bytes_max // WINDOW_BYTES)
        return not self._unsaved or bytes_max is not None

    def save_now(self, last: Position) -> None:
        """Write all windows: nothing else would tell of what `admit` was told."""
        self._save(last, len(self._unsaved))

    def forget(self) -> None:
        """What was looked at and changed since is void: it is read again when needed."""
        self._windows.clear()
        self._by_series.clear()
        self._unsaved.clear()
        self._used_last = None
        self._is_current = False
        self._known_runs = None

    def _save(self, last: Position, limit: int) -> None:
        """Write the windows that were used first, and once none is left, the place that they speak for."""
        saved = list(islice(self._unsaved.items(), limit))
        self._connection.executemany(
            _SAVE,
            [(*run, *known.received, known.window.to_bytes()) for run, known in saved],
        )
        self._used_last = None
        # A dict keeps insertion order: what was just used moves to its end, what is at its front is oldest.
        for run, known in saved:
            del self._unsaved[run]
            self._windows.pop(run, None)
            self._windows[run] = known
        if not self._unsaved:
            self._connection.execute(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", (_SAVED_NAME, f"{last.lane} {last.sequence}")
            )
            self._saved = last
        if len(self._windows) > RUNS_MAX:
            for run in list(self._windows)[: len(self._windows) - RUNS_MAX]:
                del self._windows[run]
            self._by_series.clear()

    def _catch_up(self) -> None:
        """Let the windows know of the rows that were added since they were written."""
        if self._is_current:
            return
        self._is_current = True
        saved = self._connection.execute("SELECT value FROM meta WHERE name = ?", (_SAVED_NAME,)).fetchone()
        self._saved = START if saved is None else Position(*map(int, saved[0].split()))
        self._used_last = None
        cursor = self._connection.execute(_UNSAVED, self._saved)
        while rows := cursor.fetchmany(READ_ROWS):
            for stream, subject, device, topic, boot, sequence, payload, *received in rows:
                run = (device, counter_of(stream, subject, device, topic), boot)
                known = self._known(run)
                known.window.admit(sequence, payload)
                known.received = max(known.received, tuple(received))
                self._unsaved.pop(run, None)
                self._unsaved[run] = known

    def _known(self, run: Run) -> _Known:
        self._catch_up()
        known = self._unsaved.get(run) or self._windows.get(run)
        if known is None:
            known = self._windows[run] = _Known(self._stored_window(run))
        return known

    def _stored_window(self, run: Run) -> DuplicateWindow:
        stored = self._connection.execute(
            "SELECT window FROM device_run WHERE device = ? AND topic = ? AND boot = ?", run
        ).fetchone()
        if stored is None:
            self._forget_older(run)
            return DuplicateWindow()
        try:
            return DuplicateWindow.from_bytes(stored[0])
        except ValueError as error:
            # Without it resends may be stored again: the cloud tells them, nothing is lost.
            log.warning("a duplicate window is begun anew", device=run[0], error=str(error))
            return DuplicateWindow()

    def _forget_older(self, run: Run) -> None:
        """Make room for a new run: of the same counter's older ones, then of the least recently used of all.

        The order is by lane, then by time: the wall clock may stand in another year after each start.
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
