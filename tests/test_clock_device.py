"""A sensor's clock: the true time lies within the bound, whatever the drift and the round trips."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway.clock_device import OBSERVATIONS_MAX, RATE_ERROR_PPM_MAX, RATE_SPREAD_PPM, DeviceClock

TICK_US_WRAP = 2**32 * 1000


@dataclass
class SimulatedClock:
    """A sensor's counter in true time: it runs by `ppm` and sways by up to `spread_ppm` in steps of a minute."""

    start_us: int
    ppm: float
    sways: tuple[float, ...]

    def tick_us(self, true_us: int) -> int:
        tick = float(self.start_us)
        whole, rest = divmod(true_us, 60_000_000)
        for minute in range(whole):
            tick += 60_000_000 * self._rate(minute)
        return int(tick + rest * self._rate(whole))

    def _rate(self, minute: int) -> float:
        return 1 + (self.ppm + self.sways[minute % len(self.sways)]) / 1e6

    def sample_ms(self, true_us: int) -> int:
        return self.tick_us(true_us) // 1000 % 2**32

    def observe(self, clock: DeviceClock, true_us: int, out_us: int, back_us: int) -> bool:
        tick = self.tick_us(true_us) % TICK_US_WRAP
        return clock.observe(true_us - out_us, true_us + back_us, tick // 1000, tick % 1000)


@st.composite
def clocks(draw: st.DrawFn) -> SimulatedClock:
    base = draw(st.floats(-RATE_ERROR_PPM_MAX, RATE_ERROR_PPM_MAX - RATE_SPREAD_PPM))
    sways = draw(st.lists(st.floats(0, RATE_SPREAD_PPM), min_size=1, max_size=12))
    return SimulatedClock(draw(st.integers(0, TICK_US_WRAP - 1)), base, tuple(sways))


DELAYS_US = st.integers(0, 2_000) | st.integers(0, 300_000)


@given(
    clocks(),
    st.lists(st.tuples(st.integers(1_000, 30_000_000), DELAYS_US, DELAYS_US), min_size=1, max_size=100),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
    st.integers(0, 60_000_000),
)
def test_the_true_time_lies_within_the_bound(
    simulated: SimulatedClock,
    probes: list[tuple[int, int, int]],
    samples: list[float],
    held_us: int,
) -> None:
    clock = DeviceClock()
    now_us = 1_000_000
    for step_us, out_us, back_us in probes:
        now_us += step_us + out_us + back_us
        assert simulated.observe(clock, now_us - back_us, out_us, back_us)
    for share in samples:
        # Samples from the sensor's ring, taken at any time since the start, and one that is taken later.
        true_us = int(share * (now_us + held_us))
        estimate = clock.estimate(simulated.sample_ms(true_us), now_us + held_us)
        assert estimate is not None
        event_us, error_us = estimate
        assert abs(event_us - true_us) <= error_us


def fitted(ppm: float, probes: int) -> tuple[DeviceClock, SimulatedClock, int]:
    clock = DeviceClock()
    simulated = SimulatedClock(5_000_000_000, ppm, (0.0,))
    for number in range(probes):
        simulated.observe(clock, 10_000_000 * (number + 1), 3_500, 3_500)
    return clock, simulated, 10_000_000 * probes


def test_without_an_observation_there_is_no_time() -> None:
    assert DeviceClock().estimate(1234, 1_000_000) is None


def test_one_observation_gives_a_time_whose_bound_grows_by_one_percent() -> None:
    clock, simulated, now_us = fitted(ppm=0, probes=1)
    estimate = clock.estimate(simulated.sample_ms(now_us - 5_000_000), now_us)
    assert estimate is not None
    # Half the round trip of 7 ms, half a tick, and 5 s at somewhat over 10,000 ppm.
    assert 3_500 + 500 + 50_000 <= estimate[1] <= 3_500 + 500 + 53_000


def test_a_fitted_line_is_near_the_truth_though_the_clock_runs_eight_thousand_ppm_fast() -> None:
    clock, simulated, now_us = fitted(ppm=8000, probes=30)
    for age_us in (0, 3_000_000, 60_000_000):
        estimate = clock.estimate(simulated.sample_ms(now_us - age_us), now_us)
        assert estimate is not None
        assert abs(estimate[0] - (now_us - age_us)) <= 1_000
        assert estimate[1] <= 3_500 + 500 + 3_000


def test_the_bound_covers_a_rate_that_changes_after_the_last_observation() -> None:
    clock = DeviceClock()
    simulated = SimulatedClock(0, 0, (0.0,) * 5 + (RATE_SPREAD_PPM,) * 5)
    for number in range(1, 31):
        simulated.observe(clock, 10_000_000 * number, 10, 10)
    estimate = clock.estimate(simulated.sample_ms(360_000_000), 360_000_000)
    assert estimate is not None
    # A minute at 200 ppm is 12 ms, which nothing observed so far could tell.
    assert 11_000 <= abs(estimate[0] - 360_000_000) <= estimate[1] <= 14_000


def test_the_bound_covers_a_line_that_was_bent_within_the_window() -> None:
    clock = DeviceClock()
    simulated = SimulatedClock(0, 0, (0.0,) * 5 + (RATE_SPREAD_PPM,) * 5)
    for number in range(1, 61):
        simulated.observe(clock, 10_000_000 * number, 10, 10)
    estimate = clock.estimate(simulated.sample_ms(300_000_000), 600_000_000)
    assert estimate is not None
    assert 5_000 <= abs(estimate[0] - 300_000_000) <= estimate[1]


def test_a_round_trip_that_waited_does_not_move_the_line() -> None:
    clock, simulated, now_us = fitted(ppm=50, probes=20)
    before = clock.estimate(simulated.sample_ms(now_us), now_us)
    simulated.observe(clock, now_us + 10_000_000, 3_500, 400_000)
    assert clock.estimate(simulated.sample_ms(now_us), now_us) == before


def test_one_lucky_round_trip_does_not_make_the_others_useless() -> None:
    clock = DeviceClock()
    simulated = SimulatedClock(0, 8000, (0.0,))
    for number in range(1, 31):
        simulated.observe(clock, 10_000_000 * number, *((500, 500) if number == 3 else (4_000, 4_000)))
    estimate = clock.estimate(simulated.sample_ms(310_000_000), 310_000_000)
    assert estimate is not None
    # At nominal rate, ten seconds alone would make the bound 100 ms.
    assert abs(estimate[0] - 310_000_000) <= estimate[1] <= 10_000


def test_a_tick_that_wraps_goes_on() -> None:
    clock = DeviceClock()
    simulated = SimulatedClock(TICK_US_WRAP - 15_000_000, 0, (0.0,))
    for second in (10, 20, 30):
        assert simulated.observe(clock, second * 1_000_000, 3_500, 3_500)
    for second in (14, 16):
        estimate = clock.estimate(simulated.sample_ms(second * 1_000_000), 30_000_000)
        assert estimate is not None
        assert abs(estimate[0] - second * 1_000_000) <= 1_000


def test_a_tick_that_began_anew_is_told_and_the_line_starts_again() -> None:
    clock, _, now_us = fitted(ppm=0, probes=10)
    restarted = SimulatedClock(-now_us - 5_000_000, 0, (0.0,))
    assert not restarted.observe(clock, now_us + 10_000_000, 3_500, 3_500)
    estimate = clock.estimate(restarted.sample_ms(now_us + 9_000_000), now_us + 10_000_000)
    assert estimate is not None
    assert abs(estimate[0] - (now_us + 9_000_000)) <= estimate[1] <= 15_000


def test_memory_is_bounded() -> None:
    clock, _, _ = fitted(ppm=0, probes=OBSERVATIONS_MAX * 2)
    assert len(clock._observations) == OBSERVATIONS_MAX
