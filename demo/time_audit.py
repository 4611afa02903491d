"""Compares the times in the table with those at which the sensors truly measured: do the bounds keep their promise?

Everything here but `read_taken` is pure. The simulated sensors share this machine's wall clock with the gateway.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from demo.audit import Identity, TableReading

UNBOUNDED_US = 2**63 - 1
"""`time_error_us` if nothing bounds the error."""
RECEIVED = "received"
"""Quality of a time that does not tell when a reading was measured, but when the gateway had it."""
WITHIN_SHARE_MIN = 0.999
"""Share of the readings with a bound that must lie within it."""


@dataclass(frozen=True, slots=True)
class QualityAudit:
    """Readings whose times were obtained in one way. A figure is None if there are no readings for it."""

    quality: str
    readings: int
    unbounded: int
    """Readings whose time has an error that nothing bounds."""
    bound_median_us: float | None
    bound_max_us: int | None
    off_median_us: float | None
    """Distance of the times from the true ones, as far as these are known."""
    off_max_us: int | None
    judged: int
    """Readings with a bound whose true time is known. None of those that were `received`."""
    within: int
    """Judged readings that were measured within the bound of their time."""


@dataclass(frozen=True, slots=True)
class TimeAudit:
    """Outcome of the comparison, by quality."""

    qualities: tuple[QualityAudit, ...]
    off_us: Mapping[Identity, int]
    """Microseconds by which a reading's time is after the true one, if that is known: negative if it is too early."""

    @property
    def judged(self) -> int:
        return sum(each.judged for each in self.qualities)

    @property
    def within(self) -> int:
        return sum(each.within for each in self.qualities)

    @property
    def findings(self) -> tuple[str, ...]:
        """Faults in words; empty if all is well."""
        if self.within >= self.judged * WITHIN_SHARE_MIN:
            return ()
        outside = self.judged - self.within
        return (f"{outside:,} of {self.judged:,} readings were not measured within the bound of their time",)


def one_each(readings: Iterable[TableReading]) -> list[TableReading]:
    """Return one row of each reading, whatever it measured and however often it stands there."""
    return list({reading.identity: reading for reading in readings}.values())


def audit_times(readings: Iterable[TableReading], taken: Mapping[Identity, int]) -> TimeAudit:
    """Compare times. `taken` has the true ones, in microseconds since 1970, as far as they are known."""
    rows = one_each(readings)
    off_us = {row.identity: row.event_us - taken[row.identity] for row in rows if row.identity in taken}
    by_quality: defaultdict[str, list[TableReading]] = defaultdict(list)
    for row in rows:
        by_quality[row.quality].append(row)
    return TimeAudit(tuple(_of_quality(name, by_quality[name], off_us) for name in sorted(by_quality)), off_us)


def _of_quality(quality: str, rows: Sequence[TableReading], off_us: Mapping[Identity, int]) -> QualityAudit:
    bounds_us = [row.error_us for row in rows if row.error_us != UNBOUNDED_US]
    off = [abs(off_us[row.identity]) for row in rows if row.identity in off_us]
    judged = [row for row in rows if quality != RECEIVED and row.error_us != UNBOUNDED_US and row.identity in off_us]
    return QualityAudit(
        quality,
        len(rows),
        len(rows) - len(bounds_us),
        median(bounds_us) if bounds_us else None,
        max(bounds_us, default=None),
        median(off) if off else None,
        max(off, default=None),
        len(judged),
        sum(abs(off_us[row.identity]) <= row.error_us for row in judged),
    )


def read_taken(fleet: Path, boards: Iterable[Path]) -> dict[Identity, int]:
    """Read when each sample was taken, as the simulators noted it: one file of the fleet, and one of each board."""
    taken: dict[Identity, int] = {}
    for path in (fleet, *boards):
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    device = row.get("device", path.stem)
                    taken[device, row["boot"], int(row["sequence"])] = int(row["time_us"])
    return taken
