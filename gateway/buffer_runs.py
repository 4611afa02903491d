"""Which retransmissions of which sensors are on disk: the duplicate windows of the buffer file, and a cache of them."""

import sqlite3
from collections import Counter

import structlog

from gateway.buffer_rows import Series
from gateway.duplicate_window import DuplicateWindow, Verdict

RUNS_PER_STREAM = 2
"""Runs of a device's stream whose duplicate window is kept: the present boot's, and the one before for stragglers."""
RUNS_MAX = 20_000
"""Duplicate windows kept, in the file and (a kilobyte each) in memory; least recently used go first."""

_SAVE = """
    INSERT INTO device_run VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (device, topic, boot)
    DO UPDATE SET lane = excluded.lane, seen_us = excluded.seen_us, window = excluded.window
"""

Run = tuple[str, str, str]
"""Device, Kafka topic, device boot: sequences may be counted for a device or for each of its streams."""

log = structlog.get_logger()


class DeviceRuns:
    """The windows that this process has looked at. They follow the file: `forget` after a roll-back."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._windows: dict[Run, DuplicateWindow] = {}
        # Found by what an entry carries: two series of one topic (routes that differ) share a window.
        self._by_series: dict[tuple[Series, str], tuple[Run, DuplicateWindow]] = {}
        self._touched: dict[Run, DuplicateWindow] = {}

    def admit(self, series: Series, boot: str, sequence: int, payload: bytes, tally: Counter[str]) -> bool:
        """Whether a reading is to be stored: not where it is on disk already. `tally` counts the verdicts but NEW."""
        known = self._by_series.get((series, boot))
        if known is None:
            run = (series.device, series.topic, boot)
            known = self._by_series[series, boot] = run, self._window(run)
        run, window = known
        verdict = window.admit(sequence, payload)
        if verdict is not Verdict.NEW:
            tally[verdict.value] += 1
            if verdict is Verdict.DUPLICATE:
                return False
        self._touched[run] = window
        return True

    def save(self, lane: int, seen_us: int) -> None:
        """Write the windows that `admit` changed, into the open transaction."""
        if not self._touched:
            return
        self._connection.executemany(
            _SAVE, [(*run, lane, seen_us, window.to_bytes()) for run, window in self._touched.items()]
        )
        # A dict keeps insertion order: what was just used moves to its end, what is at its front is oldest.
        for run, window in self._touched.items():
            self._windows.pop(run, None)
            self._windows[run] = window
        self._touched.clear()
        if len(self._windows) > RUNS_MAX:
            for run in list(self._windows)[: len(self._windows) - RUNS_MAX]:
                del self._windows[run]
            self._by_series.clear()

    def forget(self) -> None:
        """What was looked at and changed since is void: it is read again when needed."""
        self._windows.clear()
        self._by_series.clear()
        self._touched.clear()

    def _window(self, run: Run) -> DuplicateWindow:
        window = self._windows.get(run)
        if window is None:
            window = self._windows[run] = self._stored_window(run)
        return window

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
        """Make room for a new run: of the same stream's older ones, then of the least recently used of all.

        The order is by lane, then by time: the wall clock may stand in another year after each start.
        """
        device, topic, _ = run
        self._connection.execute(
            """DELETE FROM device_run WHERE device = ?1 AND topic = ?2 AND boot NOT IN (
                SELECT boot FROM device_run WHERE device = ?1 AND topic = ?2
                ORDER BY lane DESC, seen_us DESC LIMIT ?3)""",
            (device, topic, RUNS_PER_STREAM - 1),
        )
        (runs,) = self._connection.execute("SELECT count(*) FROM device_run").fetchone()
        if runs >= RUNS_MAX:
            self._connection.execute(
                """DELETE FROM device_run WHERE (device, topic, boot) IN (
                    SELECT device, topic, boot FROM device_run ORDER BY lane, seen_us LIMIT ?)""",
                (RUNS_MAX // 10,),
            )
