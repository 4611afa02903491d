"""Draws the report's curves and bars as SVG: no script, and each state has a shape as well as a colour."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from html import escape
from itertools import groupby, pairwise
from typing import Any

from gateway.host.terminal_text import escaped

WIDTH, LEFT, RIGHT, TOP = 760, 62, 28, 8
"""Units of a drawing: its width, and what is kept free beside and above a plot."""
STEPS_S = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400),
    *(2 * 86_400, 7 * 86_400, 14 * 86_400, 28 * 86_400, 91 * 86_400, 365 * 86_400),
)
"""Distances of labels on the axis of time."""
TICKS_MAX = 8
SPANS_US = (
    *(10.0**power for power in range(8)),
    *(60e6, 600e6, 3_600e6, 36_000e6, 86_400e6, 864_000e6, 8_640_000e6, 86_400_000e6, 864_000_000e6),
)
"""Spans of time that a logarithmic axis has labels for: 1 µs to 10,000 days."""
PATTERNS = """<svg width="0" height="0" class="patterns" aria-hidden="true"><defs>
<pattern id="p-complete_with_loss" width="8" height="10" patternUnits="userSpaceOnUse">
<rect width="8" height="10" class="f-loss"/><circle cx="4" cy="5" r="1.8" class="f-card"/></pattern>
<pattern id="p-provisional" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" class="f-card"/><rect width="2.6" height="6" class="f-wait"/></pattern>
<pattern id="p-waited" width="5" height="14" patternUnits="userSpaceOnUse">
<rect width="5" height="14" class="f-card"/><rect width="3" height="14" class="f-bad"/></pattern>
</defs></svg>"""
"""Fillings that the drawings of a page share."""


def words(text: object) -> str:
    """A text for a page. Characters that hide or turn others are spelt out, as in a terminal."""
    return escape(escaped(str(text)))


@dataclass(frozen=True, slots=True)
class Times:
    """The axis of time of all drawings of a report."""

    from_us: int
    until_us: int
    zone: tzinfo

    def x(self, us: int) -> float:
        """Place of a time. A time beyond the ends is kept at the edge."""
        share = (us - self.from_us) / max(1, self.until_us - self.from_us)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[tuple[int, str, bool]]:
        """Times of labels, their texts, and whether a new day begins there."""
        span_s = (self.until_us - self.from_us) / 1e6
        step_s = next((step for step in STEPS_S if span_s / step <= TICKS_MAX), STEPS_S[-1])
        offset = self._local(self.from_us).utcoffset() or timedelta()
        shift_us = round(offset.total_seconds()) * 1_000_000
        step_us = step_s * 1_000_000
        first_us = -(-(self.from_us + shift_us) // step_us) * step_us - shift_us
        found, before = [], None
        for us in range(first_us, self.until_us + 1, step_us):
            local = self._local(us)
            is_new = local.date() != before
            before = local.date()
            text = f"{local:%d %b}" if step_s >= 86_400 else f"{local:%H:%M:%S}" if step_s < 60 else f"{local:%H:%M}"
            found.append((us, text, is_new and step_s < 86_400))
        return found

    def _local(self, us: int) -> datetime:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).astimezone(self.zone)

    def axis(self, top: float) -> str:
        """Labels below a plot, and their lines within it."""
        marks = []
        for us, text, is_new in self.ticks():
            x = self.x(us)
            marks.append(f'<path class="grid" d="M{x:.1f} {TOP}V{top:.1f}"/>')
            marks.append(f'<text x="{x:.1f}" y="{top + 17:.1f}" text-anchor="middle">{text}</text>')
            if is_new:
                day = f"{self._local(us):%d %b %Y}"
                marks.append(f'<text x="{x:.1f}" y="{top + 29:.1f}" text-anchor="middle">{day}</text>')
        return "".join(marks)


@dataclass(frozen=True, slots=True)
class Values:
    """An axis of values, from `low` at the foot of a plot to `high` at its top."""

    low: float
    high: float
    height: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def y(self, value: float) -> float:
        if self.is_log:
            value = math.log10(max(value, self.low))
            low, high = math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        return TOP + (1 - (min(max(value, low), high) - low) / (high - low)) * self.height

    def axis(self) -> str:
        return "".join(
            f'<path class="grid" d="M{LEFT} {self.y(value):.1f}H{WIDTH - RIGHT}"/>'
            f'<text x="{LEFT - 6}" y="{self.y(value) + 4:.1f}" text-anchor="end">{text}</text>'
            for value, text in self.ticks
        )


def even(values: Iterable[float], height: float) -> Values:
    """An axis over all values, with three to six round labels."""
    known = [value for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if high - low < 1e-9 * max(1.0, abs(high)):
        margin = abs(high) * 0.05 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    decimals = max(0, -math.floor(math.log10(step)))
    ticks = [(number * step, f"{number * step:,.{decimals}f}") for number in range(first, last + 1)]
    return Values(first * step, last * step, height, ticks)


def durations(values_us: Iterable[float], height: float) -> Values:
    """A logarithmic axis over spans of time in microseconds."""
    known = [value for value in values_us if value > 0] or [1.0]
    # Never the last one: the axis would have no height.
    low = max((step for step in SPANS_US[:-1] if step <= min(known)), default=SPANS_US[0])
    high = min((step for step in SPANS_US if step >= max(known) and step > low), default=SPANS_US[-1])
    between = [step for step in SPANS_US if low <= step <= high]
    shown = between[:: 1 + len(between) // 6]
    return Values(low, high, height, [(step, duration(step)) for step in shown], is_log=True)


def duration(us: float) -> str:
    """A span of time in its largest fitting unit."""
    units = ((86_400e6, "d"), (3_600e6, "h"), (60e6, "min"), (1e6, "s"), (1e3, "ms"))
    size, unit = next(((size, unit) for size, unit in units if us >= size), (1.0, "µs"))
    number = us / size
    return f"{number:.0f} {unit}" if number >= 100 or number == round(number) else f"{number:.3g} {unit}"


def drawing(height: float, title: str, *marks: str) -> str:
    """A drawing with a text for whoever cannot see it."""
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img"><title>{words(title)}</title>{"".join(marks)}</svg>'


def curve(rows: Sequence[Mapping[str, Any]], size_us: int, times: Times, title: str, height: float = 120) -> str:
    """The windows of one metric: mean, deviation, range, how final each is, and whether it was revised."""
    numbers = [_Window(row, size_us) for row in rows]
    values = even((each for window in numbers for each in (window.least, window.most)), height)
    foot = TOP + height
    marks = [times.axis(foot + 14), values.axis()]
    runs = list(_runs(numbers))
    for run in runs:
        marks.append(_band("range", [(times.x(w.middle_us), values.y(w.most), values.y(w.least)) for w in run]))
        marks.append(
            _band(
                "deviation", [(times.x(w.middle_us), values.y(w.mean + w.away), values.y(w.mean - w.away)) for w in run]
            )
        )
        for is_final, pairs in groupby(pairwise(run), key=lambda pair: pair[0].is_final and pair[1].is_final):
            places = list(pairs)
            line = [places[0][0], *(after for _, after in places)]
            path = "L".join(f"{times.x(w.middle_us):.1f} {values.y(w.mean):.1f}" for w in line)
            marks.append(f'<path class="mean{"" if is_final else " open"}" d="M{path}"/>')
        if len(run) == 1:
            (alone,) = run
            x, y = times.x(alone.middle_us), values.y(alone.mean)
            marks.append(f'<path class="range" d="M{x:.1f} {values.y(alone.most):.1f}V{values.y(alone.least):.1f}"/>')
            marks.append(
                f'<circle class="{"dot" if alone.is_final else "dot open"}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
            )
    marks += [_diamond(times.x(window.middle_us), values.y(window.mean)) for window in numbers if window.revised]
    marks.append(_states(numbers, times, foot + 4))
    return drawing(foot + 46, title, *marks)


class _Window:
    """Places of a window in numbers."""

    __slots__ = ("away", "from_us", "is_final", "least", "mean", "middle_us", "most", "revised", "size_us", "status")

    def __init__(self, row: Mapping[str, Any], size_us: int) -> None:
        self.from_us: int = row["window_start"]
        self.size_us = size_us
        self.middle_us = self.from_us + size_us // 2
        self.least, self.most = float(row["min"]), float(row["max"])
        self.mean = (self.least + self.most) / 2 if row["mean"] is None else float(row["mean"])
        self.away = row["deviation"] or 0.0
        self.status: str = row["status"]
        self.is_final = self.status != "provisional"
        self.revised: bool = row["revised"]


def _runs(windows: Sequence[_Window]) -> Iterator[list[_Window]]:
    """Windows that follow each other without a hole."""
    run: list[_Window] = []
    for window in windows:
        if run and window.from_us != run[-1].from_us + run[-1].size_us:
            yield run
            run = []
        run.append(window)
    if run:
        yield run


def _band(name: str, places: Sequence[tuple[float, float, float]]) -> str:
    if len(places) < 2:
        return ""
    above = "L".join(f"{x:.1f} {top:.1f}" for x, top, _ in places)
    below = "L".join(f"{x:.1f} {foot:.1f}" for x, _, foot in reversed(places))
    return f'<path class="{name}" d="M{above}L{below}Z"/>'


def _diamond(x: float, y: float) -> str:
    return f'<path class="revised" d="M{x:.1f} {y - 6:.1f}l4.5 6l-4.5 6l-4.5 -6Z"/>'


def _states(windows: Sequence[_Window], times: Times, y: float) -> str:
    """A strip with the status of each window. Where there is no window, it is empty."""
    found = [f'<path class="grid" d="M{LEFT} {y + 5:.1f}H{WIDTH - RIGHT}"/>']
    for run in _runs(windows):
        for status, same in groupby(run, key=lambda window: window.status):
            part = list(same)
            left, right = times.x(part[0].from_us), times.x(part[-1].from_us + part[-1].size_us)
            place = f'x="{left:.1f}" y="{y:.1f}" width="{max(1.0, right - left):.1f}" height="10"'
            found.append(f'<rect class="s-{words(status)}" {place}/>')
    return "".join(found)


def lines(
    series: Sequence[tuple[str, Sequence[tuple[int, float]]]], size_us: int, times: Times, values: Values, title: str
) -> str:
    """Curves over time. `series` are names of classes, and places in time with their values."""
    foot = TOP + values.height
    marks = [times.axis(foot), values.axis()]
    for name, places in series:
        run: list[str] = []
        before_us = None
        for us, value in places:
            if before_us is not None and us != before_us + size_us:
                marks.append(_line(name, run))
                run = []
            before_us = us
            run.append(f"{times.x(us + size_us // 2):.1f} {values.y(value):.1f}")
        marks.append(_line(name, run))
    return drawing(foot + 32, title, *marks)


def _line(name: str, places: Sequence[str]) -> str:
    if not places:
        return ""
    # A line of no length is drawn as a dot, for its ends are round.
    return f'<path class="{name}" d="M{"L".join([*places, places[-1]])}"/>'


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, int, int]]]], times: Times, title: str) -> str:
    """A bar for each row: its parts are names of classes with their times from and to."""
    step = 36
    foot = TOP + step * len(rows)
    marks = [times.axis(foot)]
    for place, (name, parts) in enumerate(rows):
        y = TOP + place * step
        marks.append(f'<text x="{LEFT}" y="{y + 11}" class="name">{words(name)}</text>')
        for kind, from_us, to_us in parts:
            left, right = times.x(from_us), times.x(to_us)
            size = f'width="{max(1.5, right - left):.1f}" height="14"'
            marks.append(f'<rect class="{kind}" x="{left:.1f}" y="{y + 16}" {size}/>')
    return drawing(foot + 32, title, *marks)
