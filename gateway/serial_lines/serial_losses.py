"""What serial sensors' rings dropped, each span told once, whichever line finds it out.

A port that is opened anew, or a sensor that was moved to another one, begins from what the buffer holds of its run:
what an earlier line told of as lost is found once more then.
"""

from gateway.reading import SENSOR_DROPPED, Intake
from gateway.serial_lines.frame_link import Identified, Lost

RUNS_MAX = 1_000
"""Runs (boots of sensors) whose last told loss is remembered; the oldest is forgotten."""


class RingLosses:
    """Of all lines together."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._told_below: dict[tuple[str, str], int] = {}

    def begin(self, identified: Identified) -> None:
        """A run was met: where its sequence has gone back, what was told is of another life of it."""
        run = identified.device, identified.boot
        if self._told_below.get(run, 0) > identified.next:
            del self._told_below[run]

    def tell(self, lost: Lost) -> None:
        """Count a loss, as far as it was not told yet. Those of one run come in ascending order on each line."""
        run = lost.device, lost.boot
        first = max(lost.first, self._told_below.pop(run, 0))
        self._told_below[run] = max(first, lost.last + 1)
        if len(self._told_below) > RUNS_MAX:
            del self._told_below[next(iter(self._told_below))]
        if first <= lost.last:
            self._intake.lost(lost.device, SENSOR_DROPPED, lost.last - first + 1, (lost.boot, first, lost.last))
