"""Measures the errors and the bounds of readings' times, by drift and by delay, in a simulated world."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from tests.bench.clock_scenarios import BEYOND, OURS, SIMPLE_WAYS, Seen, scenarios, simulate, world_in_words
from tests.bench.context import Bench
from tests.bench.report import Result
from tests.support.clock_world import Judged, share

SENSORS = 20
"""Sensors of each scenario. Each has its own oscillator, temperature and delays."""
UNHEARD = "unheard_"
AT_ONCE = "_sent_at_once"
WORLD = "accuracy_sensors"
"""The result whose note has the world's parameters."""
FIGURES: dict[str, tuple[str, str, str]] = {
    "readings": ("readings", "", "readings"),
    "without_time": ("readings", "without", "a time"),
    "error_ms_p50": ("ms", "error", "p50"),
    "error_ms_p99": ("ms", "", "p99"),
    "error_ms_max": ("ms", "", "max"),
    "bound_ms_p50": ("ms", "bound", "p50"),
    "bound_ms_p99": ("ms", "", "p99"),
    "within_bound_share": ("of readings", "within", "bound"),
    "bound_over_error_median": ("times", "bound/", "error"),
    "receipt_error_ms_p50": ("ms", "receipt", "p50"),
    "receipt_error_ms_p99": ("ms", "", "p99"),
    "last_offset_error_ms_p50": ("ms", "last", "p50"),
    "last_offset_error_ms_p99": ("ms", "offset", "p99"),
    "least_squares_error_ms_p50": ("ms", "least", "p50"),
    "least_squares_error_ms_p99": ("ms", "squares", "p99"),
}
"""Words for each scenario, by the prefix of its results: its unit, and the head of its column in two lines."""


async def accuracy(bench: Bench) -> list[Result]:
    """Errors and bounds of readings' times by drift and by delay, beside three simple ways on the same data."""
    sensors = bench.pick(SENSORS, 1)
    return results([seen for scenario in scenarios() for seen in simulate(scenario, sensors)], sensors)


def results(seen: Sequence[Seen], sensors: int) -> list[Result]:
    """The figures of all readings together, of groups of scenarios, and of each scenario."""
    as_assumed = [each for each in seen if not each.name.startswith(BEYOND)]
    timed = [judged for each in as_assumed for judged in each.timed]
    idlest = max(as_assumed, key=lambda each: _bound_by_error(each.timed) or 0.0)
    waited_unheard = [each for each in seen if each.name.startswith(UNHEARD) and not each.name.endswith(AT_ONCE)]
    unheard = sum(len(each.by_way[OURS]) for each in waited_unheard)
    unheard_without_time = sum(each.without_time for each in waited_unheard)
    first_without_time = sum(each.without_time for each in as_assumed) - unheard_without_time
    return [
        Result("within_bound_share", _within(timed), "of readings", ">= 0.999", f"{len(timed):,} with a time"),
        Result("bound_over_error_median", _bound_by_error(timed), "times", "<= 3", "median by median, all scenarios"),
        Result("bound_over_error_median_worst", _bound_by_error(idlest.timed), "times", None, idlest.name),
        Result(
            "error_ms_p99_serial_10000ppm",
            _percentile(_off_ms(_group(seen, "serial_10000ppm_")), 0.99),
            "ms",
            None,
            "both probe intervals, both adapters",
        ),
        Result("error_ms_p99_wifi", _percentile(_off_ms(_group(seen, "wifi_")), 0.99), "ms", None, "all drifts"),
        Result(
            "bound_ms_median_serial_10000ppm_probe_60s",
            _percentile(_bound_ms(_group(seen, "serial_10000ppm_probe_60s_")), 0.5),
            "ms",
            "<= 50",
            "both adapters",
        ),
        Result("first_without_time", first_without_time, "readings", None, "all others: before a clock is known"),
        Result(
            "unheard_without_time", unheard_without_time, "readings", None, f"of {unheard:,} that had waited unheard"
        ),
        Result(WORLD, sensors, "sensors", None, world_in_words(sensors)),
        *(
            Result(f"{figure}_{each.name}", value, FIGURES[figure][0])
            for each in seen
            for figure, value in _figures(each).items()
        ),
    ]


def scenario_table(measured: Sequence[Result]) -> tuple[list[str], list[Result]]:
    """One line for each scenario, and below them the world; beside that, those of the results that are not in it."""
    values = {each.name: each.value for each in measured}
    names = [name.removeprefix("readings_") for name in values if name.startswith("readings_")]
    in_table = {f"{figure}_{name}" for name in names for figure in FIGURES} | {WORLD}
    rest = [each for each in measured if each.name not in in_table]
    rows = [
        ("ms, where nothing else is said", *(first for _, first, _ in FIGURES.values())),
        ("", *(second for _, _, second in FIGURES.values())),
        *((name, *(_cell(values[f"{figure}_{name}"], FIGURES[figure][0]) for figure in FIGURES)) for name in names),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(FIGURES) + 1)]
    lines = [
        "  ".join(
            (row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
        )
        for row in rows
    ]
    world = [line for each in measured if each.name == WORLD for line in textwrap.wrap(each.note, 120)]
    return [*lines, *world] if names else [], rest


def _figures(seen: Seen) -> Mapping[str, float | None]:
    off_ms, bound_ms = _off_ms(seen.timed), _bound_ms(seen.timed)
    figures: dict[str, float | None] = {
        "readings": len(seen.by_way[OURS]),
        "without_time": seen.without_time,
        "error_ms_p50": _percentile(off_ms, 0.5),
        "error_ms_p99": _percentile(off_ms, 0.99),
        "error_ms_max": _percentile(off_ms, 1.0),
        "bound_ms_p50": _percentile(bound_ms, 0.5),
        "bound_ms_p99": _percentile(bound_ms, 0.99),
        "within_bound_share": _within(seen.timed),
        "bound_over_error_median": _bound_by_error(seen.timed),
    }
    for way in SIMPLE_WAYS:
        simple_off_ms = _off_ms(seen.simply_timed(way))
        figures[f"{way}_error_ms_p50"] = _percentile(simple_off_ms, 0.5)
        figures[f"{way}_error_ms_p99"] = _percentile(simple_off_ms, 0.99)
    return figures


def _group(seen: Iterable[Seen], prefix: str) -> list[Judged]:
    return [judged for each in seen if each.name.startswith(prefix) for judged in each.timed]


def _off_ms(judged: Iterable[Judged]) -> list[float]:
    return sorted(each.off_us / 1000 for each in judged)


def _bound_ms(judged: Iterable[Judged]) -> list[float]:
    return sorted(each.error_us / 1000 for each in judged)


def _percentile(ordered: Sequence[float], part: float) -> float | None:
    return round(share(ordered, part), 3) if ordered else None


def _within(judged: Sequence[Judged]) -> float | None:
    return sum(each.is_within for each in judged) / len(judged) if judged else None


def _bound_by_error(judged: Sequence[Judged]) -> float | None:
    return share(_bound_ms(judged), 0.5) / share(_off_ms(judged), 0.5) if judged else None


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "—"
    if unit == "readings":
        return f"{value:,.0f}"
    if unit == "of readings":
        return f"{value:.5f}"
    if value >= 1e4:
        return f"{value / 1000:,.0f} s"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
