"""Counts what the windows of a feed must hold while the feed is made, and compares a table of windows with it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WINDOW_US = 60_000_000

Counted = tuple[str, str, int, int, int]
"""A row of a table of windows: device, metric, start (microseconds since 1970), values, their sum in hundredths."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison of a table with a feed's readings."""

    expected: int
    """Readings, each counted once, however often it was sent."""
    lost: int
    doubled: int
    """Counted more often than they were taken, or where none was."""
    wrong: int
    """Windows of a metric whose count or sum is another one."""


@dataclass(slots=True)
class Ledger:
    """Readings by device and window: how many, and the sum of each metric in hundredths."""

    metrics: tuple[str, ...]
    windows: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def add(self, device: str, event_us: int, values: Sequence[int]) -> None:
        key = (device, event_us - event_us % WINDOW_US)
        window = self.windows.get(key)
        if window is None:
            self.windows[key] = [1, *values]
            return
        window[0] += 1
        for place, value in enumerate(values, start=1):
            window[place] += value

    def rows(self) -> Iterable[Counted]:
        """Rows of a right table of windows."""
        for (device, start_us), (n, *sums) in self.windows.items():
            for metric, total in zip(self.metrics, sums, strict=True):
                yield device, metric, start_us, n, total

    def judge(self, counted: Iterable[Counted]) -> Verdict:
        """Compare with a table. Readings are counted by the first metric: each has all of them."""
        found = {row[:3]: row[3:] for row in counted}
        expected = lost = doubled = wrong = 0
        for device, metric, start_us, n, total in self.rows():
            there = found.pop((device, metric, start_us), (0, 0))
            wrong += there != (n, total)
            if metric == self.metrics[0]:
                expected += n
                lost += max(0, n - there[0])
                doubled += max(0, there[0] - n)
        doubled += sum(n for (_, metric, _), (n, _) in found.items() if metric == self.metrics[0])
        return Verdict(expected, lost, doubled, wrong + len(found))
