"""The clock bench's foundations: right simple clocks, equal data for all clocks, and right figures."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.clock.sensor_clock import DeviceClock
from tests.bench.clock_scenarios import BEYOND, OURS, SIMPLE_WAYS, Seen, scenarios, simulate
from tests.bench.load import Done
from tests.bench.parts_clock_accuracy import FIGURES, WORLD, results, scenario_table
from tests.bench.parts_clock_cost import NO_TICKS, TICKS, Ingested, arrivals, compare, probed_us, stamp_us
from tests.bench.parts_rate import FlatOut
from tests.bench.report import Result
from tests.bench.simple_clocks import HALF_TICK_US, WINDOW_US, LastOffset, LeastSquares, Receipt
from tests.support.clock_world import SECOND_US, Judged, Oscillator, TickClock, oscillator

# -- the simple ways ----------------------------------------------------------------------------


def test_the_time_of_receipt_is_the_time_of_receipt() -> None:
    clock = Receipt()
    assert clock.probed(1_000_000, 1_010_000, 900, 0)
    assert clock.estimate(950, 2_000_000) == (2_000_000, 0)
    assert clock.stamp(3_000_000, 960, 0) == (3_000_000, 0)


def test_the_last_offset_is_of_the_newest_round_trip_s_middle() -> None:
    clock = LastOffset()
    assert clock.estimate(900, 1_000_000) is None
    clock.probed(1_000_000, 1_010_000, 900, 0)
    clock.probed(2_000_000, 2_020_000, 1_900, 500)
    assert clock.estimate(2_000, 9_000_000) == (2_010_000 - 1_900_500 + 2_000_000 + HALF_TICK_US, 0)


def test_the_last_offset_of_arrivals_is_of_the_one_before() -> None:
    clock = LastOffset()
    assert clock.stamp(1_250_000, 1_000, 0) is None
    assert clock.stamp(9_000_000, 2_000, 1) == (2_250_000, 0)
    assert clock.stamp(9_000_001, 3_000, 2) == (10_000_000, 0)


@given(
    st.integers(-10_000, 10_000),
    st.integers(0, 2**62),
    st.integers(0, 4_000_000),
    st.lists(st.integers(0, WINDOW_US // SECOND_US - 10), min_size=2, max_size=20, unique=True),
)
def test_least_squares_finds_the_line_that_is_there(ppm: int, offset_us: int, tick_s: int, seconds: list[int]) -> None:
    """This holds for large numbers too."""
    clock = LeastSquares()
    for second in sorted(seconds):
        at_us = offset_us + (tick_s + second) * (SECOND_US + ppm)
        clock.probed(at_us - 3_000, at_us + 3_000, (tick_s + second) * 1_000, 0)
    estimate = clock.estimate((tick_s + 600) * 1_000, 0)
    assert estimate is not None
    ends_us = offset_us + (tick_s + 600) * (SECOND_US + ppm) + HALF_TICK_US
    assert abs(estimate[0] - ends_us) <= 6 + offset_us / 2**51


def test_least_squares_takes_its_own_arrival_in_and_forgets_after_ten_minutes() -> None:
    clock = LeastSquares()
    assert clock.stamp(5_000_000, 1_000, 0) == (5_000_000, 0)
    assert clock.stamp(5_000_000 + WINDOW_US + 1, 2_000, 1) == (5_000_000 + WINDOW_US + 1, 0)
    # At its nominal rate: one tick alone says nothing of it.
    assert clock.estimate(3_000, 0) == (6_000_000 + WINDOW_US + 1, 0)
    later_us = 7_020_001 + WINDOW_US
    assert clock.stamp(later_us, 4_000, 2) == (later_us, 0)
    assert clock.estimate(3_000, 0) == ((5_000_001 + WINDOW_US + later_us) // 2, 0)


# -- accuracy -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    """A whole run, of one sensor for each scenario."""
    return [each for scenario in scenarios() for each in simulate(scenario, 1)]


@pytest.mark.slow
def test_all_ways_see_the_same_readings(seen: list[Seen]) -> None:
    for each in seen:
        by_place = list(zip(*(each.by_way[way] for way in (OURS, *SIMPLE_WAYS)), strict=True))
        assert all(len({judged.true_us for judged in place if judged is not None}) == 1 for place in by_place)


class Witness:
    """A clock that records its observations."""

    def __init__(self, clock: TickClock) -> None:
        self._clock = clock
        self.told: list[tuple[int, ...]] = []

    def probed(self, *told: int) -> bool:
        self.told.append(told)
        return self._clock.probed(*told)

    def estimate(self, *told: int) -> tuple[int, int] | None:
        self.told.append(told)
        return self._clock.estimate(*told)

    def stamp(self, *told: int) -> tuple[int, int] | None:
        self.told.append(told)
        return self._clock.stamp(*told)


@pytest.mark.parametrize("name", ["serial_5000ppm_probe_60s_adapter_16ms", "backlog_50ppm"])
def test_all_ways_are_told_the_same(name: str) -> None:
    scenario = next(each for each in scenarios() if each.name == name)
    witnesses = [Witness(clock) for clock in (DeviceClock(scenario.told), *(way() for way in SIMPLE_WAYS.values()))]
    for witness in witnesses:
        chance = random.Random(3)  # noqa: S311 - a simulation
        scenario.run(chance, oscillator(chance, scenario.ppm), witness)
    first, *others = witnesses
    assert len(first.told) > 1_000
    assert all(other.told == first.told for other in others)


def test_a_whole_run_has_every_figure_and_meets_its_targets(seen: list[Seen]) -> None:
    found = {each.name: each for each in results(seen, 1)}
    assert [each for each in found.values() if each.met is False] == []
    for name in (
        "within_bound_share",
        "bound_over_error_median",
        "error_ms_p99_serial_10000ppm",
        "error_ms_p99_wifi",
        "bound_ms_median_serial_10000ppm_probe_60s",
        *(f"{figure}_{scenario.name}" for scenario in scenarios() for figure in FIGURES),
    ):
        is_of_ours = name.startswith(("error_", "bound_", "within_"))
        assert (found[name].value is None) is (is_of_ours and "_unheard_" in name), name


def test_readings_from_before_a_sensors_first_connection_have_no_time_and_are_counted(seen: list[Seen]) -> None:
    found = {each.name: each.value for each in results(seen, 1)}
    unheard = [each for each in seen if each.name in {"unheard_50ppm", "unheard_5000ppm", "unheard_10000ppm"}]
    assert all(each.timed == [] for each in unheard)
    assert found["unheard_without_time"] == sum(each.without_time for each in unheard) > 3 * 2_000
    assert 0 < (found["first_without_time"] or 0) < 1_000


def test_what_is_beyond_the_assumptions_is_told_and_not_pooled(seen: list[Seen]) -> None:
    found, as_assumed = (
        {each.name: each.value for each in results(some, 1)}
        for some in (seen, [each for each in seen if not each.name.startswith(BEYOND)])
    )
    beyond = found["within_bound_share_beyond_slow_network_50ppm"]
    assert beyond is not None
    assert beyond < 0.5
    assert {name: value for name, value in found.items() if BEYOND not in name} == as_assumed


def test_simple_ways_are_judged_by_what_ours_judges() -> None:
    ours = [None, Judged(1, 2, 3), Judged(2, 2, 3)]
    theirs = [Judged(0, 9, 0), Judged(1, 8, 0), None]
    assert Seen("some", {OURS: ours, "receipt": theirs}).simply_timed("receipt") == [Judged(1, 8, 0)]
    none = Seen("none", {OURS: [None] * 3, "receipt": theirs})
    assert none.simply_timed("receipt") == theirs[:2]
    assert none.without_time == 3


def test_the_table_has_a_line_for_each_scenario_and_the_world_and_leaves_the_rest(seen: list[Seen]) -> None:
    other = Result("cost_us_per_reading", 1.0, "µs")
    measured = [*results(seen, 1), other]
    lines, rest = scenario_table(measured)
    assert [line.split()[0] for line in lines[2 : 2 + len(seen)]] == [each.name for each in seen]
    assert len({len(line) for line in lines[: 2 + len(seen)]}) == 1
    world = " ".join(lines[2 + len(seen) :])
    assert world == next(each.note for each in measured if each.name == WORLD)
    assert other in rest
    assert not {f"{figure}_{each.name}" for figure in FIGURES for each in seen} & {each.name for each in rest}
    assert scenario_table([other]) == ([], [other])


# -- cost ---------------------------------------------------------------------------------------


def ingested(name: str, readings_per_s: int, cpu_us: float, estimated_share: float) -> Ingested:
    done = Done(1_000, 0, 1_000, 0, 0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, [1_000])
    return Ingested(name, FlatOut(done, 1_000, 1_000 / readings_per_s, cpu_us, 0.0), estimated_share)


def test_what_ticks_cost_is_the_difference_of_the_means() -> None:
    runs = [
        ingested(NO_TICKS, 50_000, 12.0, 0.0),
        ingested(TICKS, 47_000, 13.5, 1.0),
        ingested(TICKS, 43_000, 14.5, 1.0),
        ingested(NO_TICKS, 50_000, 13.0, 0.0),
    ]
    found = {each.name: each for each in compare(runs)}
    assert found["cost_us_per_reading"].value == pytest.approx(1.5)
    assert found["ingest_rate_ratio_with_ticks"].value == pytest.approx(0.9)
    assert found["ingest_missing_in_kafka"].value == 0


def test_without_one_time_that_came_of_a_tick_nothing_was_measured() -> None:
    runs = [ingested(name, 50_000, 12.0, 0.0) for name in (NO_TICKS, TICKS)]
    found = {each.name: each for each in compare(runs)}
    assert (found["cost_us_per_reading"].value, found["ingest_rate_ratio_with_ticks"].value) == (None, None)
    assert found["ingest_estimated_share"].value == 0


def test_the_calls_that_are_timed_are_of_sensors_that_come_to_be_known() -> None:
    chance, quartz = random.Random(1), Oscillator(50)  # noqa: S311 - a simulation
    clocks = [DeviceClock() for _ in range(3)]
    times = []
    for sensor, received_us, tick_ms, sequence in arrivals(chance, quartz, 3, 1, 0, 60):
        times.append((sensor, received_us))
        clocks[sensor].stamp(received_us, tick_ms, sequence)
    assert len(times) == 3 * 60
    assert all(clock.fit.error_us is not None for clock in clocks)
    assert stamp_us(3, 10, 20, 10) > 0
    assert probed_us(50) > 0
