"""Results that the joins must have, in plain Python from all readings at once. No Spark in here.

Written from what the joins promise, not from how they are made: where the two disagree, one of them is wrong.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Literal

from spark.registry.registry import Calibration, Device, Registry

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_US = 86_400 * 1_000_000
EXACT = Context(prec=2_000, rounding=ROUND_HALF_UP)
SUM_LIMIT = Decimal(10) ** 26
"""Sums and sums of squares have 26 digits before the point."""
FACTORED_SUM_LIMIT = Decimal(10) ** 19
IMPLAUSIBLE = date(1970, 1, 1)
UNKNOWN_ERROR_US = 2**63 - 1

Metric = tuple[str, str, str, str]
"""namespace, device, stream, metric"""


@dataclass(frozen=True, slots=True, order=True)
class Reading:
    """One metric of one reading, as `readings` has it."""

    metric: Metric
    time_us: int
    sequence: int
    """Number in its lane. Its `ce_id` follows from it."""
    value: Decimal
    error_us: int = 1_000
    plausible: bool = True

    @property
    def ce_id(self) -> str:
        return f"buffer-lane-{self.sequence:06}"

    @property
    def event_date(self) -> date:
        return (EPOCH + timedelta(microseconds=self.time_us)).date() if self.plausible else IMPLAUSIBLE


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a window's values. None means that a figure does not fit in the table's decimals."""

    n: int
    min: Decimal
    max: Decimal
    sum: Decimal | None
    sum_of_squares: Decimal | None
    mean: Decimal | None
    first: Decimal
    last: Decimal
    values: tuple[Decimal, ...]
    p50: Decimal
    p99_9: Decimal


def figures(readings: Iterable[tuple[Reading, Decimal]], decimals: int) -> Figures:
    """The figures of readings with the values that count."""
    given = sorted(readings, key=lambda each: (each[0].time_us, each[0].sequence, each[0].value))
    values = sorted(value for _, value in given)
    total = exact_sum(values)
    squares = exact_sum(EXACT.multiply(value, value) for value in values)
    return Figures(
        len(values),
        values[0],
        values[-1],
        fitting(total),
        fitting(rounded(squares, 12)),
        fitting(rounded(EXACT.divide(total, Decimal(len(values))), decimals)),
        given[0][1],
        given[-1][1],
        tuple(values),
        values[max(0, math.ceil(len(values) * 50 / 100) - 1)],
        values[max(0, -(-len(values) * 999 // 1000) - 1)],
    )


def exact_sum(values: Iterable[Decimal]) -> Decimal:
    total = Decimal(0)
    for value in values:
        total = EXACT.add(total, value)
    return total


def rounded(value: Decimal, decimals: int) -> Decimal:
    """Half up: away from zero."""
    # Decimals know a negative zero; a table's do not.
    return EXACT.add(value.quantize(Decimal(1).scaleb(-decimals), context=EXACT), Decimal(0))


def fitting(value: Decimal) -> Decimal | None:
    return value if abs(value) < SUM_LIMIT else None


# -- registry ---------------------------------------------------------------------------------------------------------


def us(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


def holds(entry: Calibration | Device, time_us: int) -> bool:
    after = entry.valid_from is None or us(entry.valid_from) <= time_us
    return after and (entry.valid_to is None or time_us < us(entry.valid_to))


def calibrations_of(registry: Registry, metric: Metric) -> list[Calibration]:
    namespace, device, stream, name = metric
    return [
        each
        for each in registry.calibrations
        if (each.namespace, each.device, each.metric) == (namespace, device, name) and each.stream in {None, stream}
    ]


def devices_of(registry: Registry, metric: Metric) -> list[Device]:
    return [each for each in registry.devices if (each.namespace, each.device) == metric[:2]]


def calibration_at(registry: Registry, reading: Reading) -> Calibration | None:
    return next((each for each in calibrations_of(registry, reading.metric) if holds(each, reading.time_us)), None)


def site_at(registry: Registry, metric: Metric, time_us: int) -> str | None:
    return next((each.site for each in devices_of(registry, metric) if holds(each, time_us)), None)


def calibrated(reading: Reading, registry: Registry) -> Decimal:
    found = calibration_at(registry, reading)
    if found is None:
        return reading.value
    return EXACT.add(EXACT.multiply(reading.value, found.scale), found.offset)


def borders(entries: Iterable[Calibration | Device]) -> list[int]:
    return sorted({us(end) for each in entries for end in (each.valid_from, each.valid_to) if end is not None})


def certain(reading: Reading, registry: Registry) -> bool:
    """Whether no border lies within what the reading's time may be."""
    limits = borders(calibrations_of(registry, reading.metric))
    if not limits:
        return True
    earliest, latest = reading.time_us - reading.error_us, reading.time_us + reading.error_us
    return reading.plausible and not any(earliest < limit <= latest for limit in limits)


# -- windows ----------------------------------------------------------------------------------------------------------

WindowKey = tuple[Metric, int]
"""metric, start in microseconds"""
PartKey = tuple[Metric, int, int, int]
"""metric, start, and the part's beginning and end"""


def windows(readings: Iterable[Reading], window_us: int) -> dict[WindowKey, Figures]:
    members: dict[WindowKey, list[tuple[Reading, Decimal]]] = defaultdict(list)
    for reading in readings:
        if reading.plausible:
            members[reading.metric, reading.time_us // window_us * window_us].append((reading, reading.value))
    return {key: figures(each, 6) for key, each in members.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a window, with what applies to it."""

    figures: Figures
    calibration: Calibration | None
    site: str | None
    may_overflow: bool
    """True if numbers are so large that some results on the way do not fit."""


def calibrated_windows(readings: Iterable[Reading], registry: Registry, window_us: int) -> dict[PartKey, Part]:
    """Every reading calibrated by itself, then counted in the part of its window that it lies in."""
    members: dict[PartKey, list[Reading]] = defaultdict(list)
    for reading in readings:
        if not reading.plausible:
            continue
        start = reading.time_us // window_us * window_us
        entries: list[Calibration | Device] = [
            *calibrations_of(registry, reading.metric),
            *devices_of(registry, reading.metric),
        ]
        inner = [start, *(each for each in borders(entries) if start < each < start + window_us), start + window_us]
        begins = max(each for each in inner if each <= reading.time_us)
        ends = min(each for each in inner if each > reading.time_us)
        members[reading.metric, start, begins, ends].append(reading)
    parts: dict[PartKey, Part] = {}
    for key, each in members.items():
        calibration = calibration_at(registry, each[0])
        raw = figures(((reading, reading.value) for reading in each), 6)
        large = raw.sum_of_squares is None or raw.sum is None or abs(raw.sum) >= FACTORED_SUM_LIMIT
        if calibration is not None and raw.sum_of_squares is not None:
            scaled = EXACT.multiply(EXACT.multiply(calibration.scale, calibration.scale), raw.sum_of_squares)
            large |= scaled >= SUM_LIMIT / 100
        parts[key] = Part(
            figures(((reading, calibrated(reading, registry)) for reading in each), 12),
            calibration,
            site_at(registry, key[0], key[2]),
            large,
        )
    return parts


# -- history ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Past:
    """Figures of the same windows on the days before."""

    days: int
    n: int
    min: Decimal | None
    max: Decimal | None
    sum: Decimal | None
    mean: Decimal | None


def past_of(each: dict[WindowKey, Figures], key: WindowKey, days: int) -> Past:
    metric, start = key
    found = [each[metric, at] for at in (start - back * DAY_US for back in range(1, days + 1)) if (metric, at) in each]
    n = sum(window.n for window in found)
    if not found:
        return Past(0, 0, None, None, None, None)
    total = exact_sum(window.sum for window in found if window.sum is not None)
    return Past(
        len(found),
        n,
        min(window.min for window in found),
        max(window.max for window in found),
        total,
        rounded(EXACT.divide(total, Decimal(n)), 6),
    )


def history(readings: Iterable[Reading], window_us: int, days: int) -> dict[WindowKey, Past]:
    each = windows(readings, window_us)
    return {key: past_of(each, key, days) for key in each}


# -- as-of ------------------------------------------------------------------------------------------------------------

Direction = Literal["nearest", "backward", "forward"]
Match = tuple[Reading | None, bool | None]
"""The other reading, and whether it certainly lies within the tolerance."""


def as_of(
    readings: Sequence[Reading], pairs: Iterable[tuple[Metric, Metric]], tolerance_us: int, direction: Direction
) -> dict[tuple[Reading, Metric], Match]:
    matches: dict[tuple[Reading, Metric], Match] = {}
    for one, other in set(pairs):
        answers = [each for each in readings if each.metric == other and each.plausible]
        for reading in readings:
            if reading.metric == one:
                matches[reading, other] = nearest(reading, answers, tolerance_us, direction)
    return matches


def nearest(reading: Reading, answers: Iterable[Reading], tolerance_us: int, direction: Direction) -> Match:
    def near(each: Reading) -> bool:
        distance = each.time_us - reading.time_us
        if (direction == "backward" and distance > 0) or (direction == "forward" and distance < 0):
            return False
        return reading.plausible and abs(distance) <= tolerance_us

    near_ones = [each for each in answers if near(each)]
    if not near_ones:
        return None, None
    found = min(near_ones, key=lambda each: (abs(each.time_us - reading.time_us), each.time_us, each.ce_id, each.value))
    # All that both times may be.
    distance, open_us = found.time_us - reading.time_us, found.error_us + reading.error_us
    least, greatest = distance - open_us, distance + open_us
    match direction:
        case "backward":
            return found, -tolerance_us <= least and greatest <= 0
        case "forward":
            return found, least >= 0 and greatest <= tolerance_us
        case "nearest":
            return found, -tolerance_us <= least and greatest <= tolerance_us
