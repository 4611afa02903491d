"""Draws charts as HTML and SVG that fit any width: labels are text, and only the marks are stretched."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

SPAN = 1000
"""Units of the drawing's width and height, whatever its size on the screen."""

NARROW_PX = 300
"""Width of the plot on a phone. Labels that keep clear of one another there do so on anything wider."""
CHARACTER_PX = 8
"""Greatest average width of a label's character, which is set in 12.5 px."""
LABEL_PADDING_PX = 12

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its ends, the places of its labels, and the quantity along it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    decimals: int
    """Decimals of the labels."""
    value_decimals: int
    """Decimals of a value that is pointed at."""
    title: str
    unit: str

    def share(self, value: float) -> float:
        """Place of a value, 0 at the low end and 1 at the high end. A value beyond them is kept at the edge."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def label(self, value: float) -> str:
        """Text of a value at the axis."""
        return f"{value:,.{self.decimals}f}"

    @property
    def data(self) -> str:
        """Text by which the page's script reads values back."""
        return f"{self.low} {self.high} {self.value_decimals} {self.unit}"


@dataclass(frozen=True, slots=True)
class LogAxis(Axis):
    """An axis on which each step is ten times the one before. `low` and `high` are values, not their logarithms."""

    def share(self, value: float) -> float:
        """Place of a value. A value below `low` is kept at the low end."""
        if value <= self.low:
            return 0.0
        return min(1.0, math.log10(value / self.low) / math.log10(self.high / self.low))

    def label(self, value: float) -> str:
        """Text of a value at the axis: 0.01, 0.1, 1, 10, ..."""
        return f"{value:,.12g}"

    @property
    def data(self) -> str:
        return f"{self.low} {self.high} {self.value_decimals} {self.unit} log"


def log_axis(values: Iterable[float], title: str, unit: str) -> LogAxis:
    """Make an axis over all values above 0, from one power of ten to another."""
    above = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
    # The logarithm of a value just below a power of ten is rounded to that power.
    first -= 10.0**first > min(above)
    last = max(last, first + 1)
    ticks = tuple(10.0**power for power in range(first, last + 1))
    return LogAxis(ticks[0], ticks[-1], ticks, 0, max(0, 1 - first), title, unit)


def axis(values: Iterable[float], title: str, unit: str, *, count: int = 5, whole_from_zero: bool = False) -> Axis:
    """Make an axis over all values that ends at round numbers, with about `count` labels.

    `whole_from_zero` is for counts: the axis begins at 0 and labels no fractions.
    """
    known = [*values, 0.0] if whole_from_zero else list(values)
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    step = _round_step((high - low) / count or 1.0)
    if whole_from_zero:
        step = max(1.0, step)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)
    decimals = max(0, -math.floor(math.log10(step)))
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, decimals, 0 if whole_from_zero else decimals + 1, title, unit)


def span_axis(low: float, high: float, title: str, unit: str, *, count: int = 8) -> Axis:
    """Make an axis that ends exactly at `low` and `high`, with labels at round numbers between."""
    step = _round_step((high - low) / count)
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    # The product may be rounded to a hair beyond the end.
    ticks = tuple(min(high, max(low, number * step)) for number in numbers)
    decimals = max(0, -math.floor(math.log10(step)))
    return Axis(low, high, ticks, decimals, decimals + 1, title, unit)


def _round_step(step: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, ... that is not smaller than a step."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


@dataclass(frozen=True, slots=True)
class Marks:
    """Points of one kind, drawn as `line`, `area` or `dots` in the colour of `style`."""

    shape: str
    name: str
    style: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Band:
    """A span of the x axis that is shaded and named."""

    first: float
    last: float
    name: str


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment on the x axis, drawn as a line and named."""

    at: float
    name: str


def chart(x: Axis, y: Axis, marks: Sequence[Marks], bands: Sequence[Band] = (), moments: Sequence[Moment] = ()) -> str:
    """Draw one chart as HTML."""
    drawn = [_grid(y)]
    drawn += [_rectangle(x.share(band.first), x.share(band.last)) for band in bands]
    drawn += [_vertical(x.share(moment.at)) for moment in moments]
    drawn += [_path(x, y, each) for each in marks if each.points]
    # Of moments side by side, the first has its label to its left, the next one to its right.
    labels = [Label(x.share(moment.at), moment.name, "moment", number > 0) for number, moment in enumerate(moments)]
    labels += [Label(x.share(band.first), band.name, "band", rightwards=True) for band in bands]
    notes, rows = _notes(labels)
    y_labels = "".join(f'<span style="bottom:{100 * y.share(tick):.2f}%">{y.label(tick)}</span>' for tick in y.ticks)
    x_labels = "".join(f'<span style="left:{100 * x.share(tick):.2f}%">{x.label(tick)}</span>' for tick in x.ticks)
    return (
        f'<div class="chart" data-x="{escape(x.data)}" data-y="{escape(y.data)}">'
        f'<div class="y-title">{escape(y.title)}</div>'
        f'<div class="notes" style="height:{1.5 * rows:.1f}em">{notes}</div>'
        f'<div class="y-labels">{y_labels}</div>'
        f'<div class="plot"><svg viewBox="0 0 {SPAN} {SPAN}" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(drawn)}</svg></div>"
        f'<div class="x-labels">{x_labels}</div>'
        f'<div class="x-title">{escape(x.title)}</div></div>'
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Draw styles and their meanings as HTML."""
    items = "".join(f'<li><i class="{style}"></i>{escape(words)}</li>' for style, words in entries)
    return f'<ul class="legend">{items}</ul>'


def _grid(y: Axis) -> str:
    return "".join(f'<path class="grid" d="M0 {_down(y.share(tick))}H{SPAN}"/>' for tick in y.ticks)


def _rectangle(first: float, last: float) -> str:
    return f'<rect class="band" x="{SPAN * first:.1f}" y="0" width="{SPAN * (last - first):.1f}" height="{SPAN}"/>'


def _vertical(share: float) -> str:
    return f'<path class="moment" d="M{SPAN * share:.1f} 0V{SPAN}"/>'


@dataclass(frozen=True, slots=True)
class Label:
    """Words for a place on the x axis, which is given as its share."""

    at: float
    words: str
    style: str
    rightwards: bool
    """Whether it stands to the right of the place if both sides have room."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a label above the plot. It takes the share from `first` to `last` at most."""

    row: int
    """Row of the label. Row 0 is next to the plot."""
    first: float
    last: float
    rightwards: bool
    """Whether it begins at `first` and has room to its right; else it ends at `last`."""

    def meets(self, other: "Place") -> bool:
        """Whether two labels may overlap."""
        return self.row == other.row and self.first < other.last and other.first < self.last


def label_places(labels: Sequence[Label]) -> list[Place]:
    """Find places above the plot, in enough rows to keep labels apart on a phone too.

    Neither lines nor curves run there. A label ends or begins where it belongs. It moves along only if it would stick
    out on both sides.
    """
    places: list[Place] = []
    for label in labels:
        width = min(1.0, (CHARACTER_PX * len(label.words) + LABEL_PADDING_PX) / NARROW_PX)
        ends, begins = (label.at - width, label.at, False), (label.at, label.at + width, True)
        at_edge = (0.0, width, True) if label.at < 0.5 else (1 - width, 1.0, False)
        preferred = (begins, ends) if label.rightwards else (ends, begins)
        sides = [side for side in preferred if side[0] >= 0 and side[1] <= 1] or [at_edge]
        rows = range(len(places) + 1)  # one for each label, so that one is always free
        candidates = (Place(row, *side) for row in rows for side in sides)
        places.append(next(place for place in candidates if not any(map(place.meets, places))))
    return places


def _notes(labels: Sequence[Label]) -> tuple[str, int]:
    """Draw the labels as HTML, and count their rows; the first labels are next to the plot."""
    places = label_places(labels)
    notes = ""
    for place, label in zip(places, labels, strict=True):
        side = f"left:{100 * place.first:.2f}%" if place.rightwards else f"right:{100 * (1 - place.last):.2f}%"
        style = f"{side};bottom:{1.5 * place.row:.1f}em"
        notes += f'<span class="note {label.style}" style="{style}">{escape(label.words)}</span>'
    return notes, max((place.row + 1 for place in places), default=0)


def _path(x: Axis, y: Axis, marks: Marks) -> str:
    places = [f"{SPAN * x.share(at):.1f} {_down(y.share(value))}" for at, value in marks.points]
    name = f'data-name="{escape(marks.name)}"'
    if marks.shape == "dots":
        # A line of no length with round ends is a dot that stays round when the drawing is stretched.
        return f'<path class="dots {marks.style}" {name} d="{"".join(f"M{place}h0" for place in places)}"/>'
    line = "M" + "L".join(places)
    drawn = f'<path class="line {marks.style}" {name} d="{line}"/>'
    if marks.shape == "area":
        first, last = SPAN * x.share(marks.points[0][0]), SPAN * x.share(marks.points[-1][0])
        drawn = f'<path class="area {marks.style}" d="{line}L{last:.1f} {SPAN}L{first:.1f} {SPAN}Z"/>' + drawn
    return drawn


def _down(share: float) -> str:
    """Convert a share for SVG, which counts from the top."""
    return f"{SPAN * (1 - share):.1f}"
