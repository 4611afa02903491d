"""Observations allow the truth, whatever was observed, and as little else as possible."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.clock.sensor_line import Observation, RateLimits, lines_at

LIMITS = RateLimits(error=0.0103, wander_per_us=1e-12, spread=0.003)
DISTANCES_US = st.floats(-1e10, 1e10)


def offset_us(tick_us: float, rate: float, bends: list[float]) -> float:
    """A clock at `rate` about tick 0 whose rate then changes: by the whole spread in the end, as fast as it may."""
    sign = bends[0] if tick_us >= 0 else bends[1]
    return rate * tick_us + sign * LIMITS.slack_us(tick_us)


@given(
    st.floats(-0.007, 0.007),
    st.lists(st.sampled_from([-1.0, 0.0, 1.0]) | st.floats(-1, 1), min_size=2, max_size=2),
    st.lists(st.tuples(DISTANCES_US, st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=40),
)
def test_the_true_line_is_among_those_that_agree(
    rate: float, bends: list[float], observed: list[tuple[float, float, float]]
) -> None:
    seen = [
        Observation(tick, tick + offset_us(tick, rate, bends) - before, tick + offset_us(tick, rate, bends) + after)
        for tick, before, after in observed
    ]
    lines = lines_at(0.0, seen, LIMITS)
    assert lines is not None
    earliest_us, latest_us = lines.span_at(0.0)
    assert earliest_us <= 1e-3
    assert latest_us >= -1e-3
    slowest, fastest = lines.rates()
    assert slowest - 1e-9 <= rate <= fastest + 1e-9
    for tick, _, _ in observed:
        earliest_us, latest_us = lines.span_at(tick)
        assert earliest_us - 1e-3 <= tick + offset_us(tick, rate, bends) <= latest_us + 1e-3


def test_two_exact_observations_leave_one_line_but_for_what_the_rate_may_change() -> None:
    seen = [Observation(-1e6, -1e6 * 1.008, -1e6 * 1.008), Observation(1e6, 1e6 * 1.008, 1e6 * 1.008)]
    lines = lines_at(0.0, seen, LIMITS)
    assert lines is not None
    earliest_us, latest_us = lines.span_at(0.0)
    assert -0.6 < earliest_us < 0 < latest_us < 0.6
    slowest, fastest = lines.rates()
    assert 0.008 - 1e-6 < slowest < 0.008 < fastest < 0.008 + 1e-6


def test_an_upper_limit_alone_cuts_what_lies_above_it() -> None:
    wide = Observation(0.0, -1_000.0, 1_000.0)
    lines = lines_at(0.0, [wide, Observation(1_000.0, float("-inf"), 1_000.0)], LIMITS)
    assert lines is not None
    earliest_us, latest_us = lines.span_at(0.0)
    assert earliest_us == -1_000.0
    assert 0 <= latest_us <= 10.4


def test_what_contradicts_itself_has_no_line() -> None:
    seen = [Observation(0.0, 0.0, 1_000.0), Observation(1e6, 1.02e6, 1.03e6)]
    assert lines_at(0.0, seen, LIMITS) is None


@given(st.floats(0, 1e11), st.floats(0, 1e11))
def test_slack_grows_and_never_faster_than_the_spread(one_us: float, other_us: float) -> None:
    near_us, far_us = sorted((one_us, other_us))
    grown_us = LIMITS.slack_us(far_us) - LIMITS.slack_us(near_us)
    assert 0 <= grown_us <= (far_us - near_us) * LIMITS.spread + 1e-3
    assert LIMITS.slack_us(-far_us) == LIMITS.slack_us(far_us)


@given(st.lists(st.floats(-1e9, 1e9), min_size=3, max_size=3, unique=True))
def test_bounds_are_convex_so_that_their_chords_lie_outside(ticks_us: list[float]) -> None:
    lines = lines_at(0.0, [Observation(0.0, -900.0, 400.0), Observation(6e7, 6e7 - 700.0, 6e7 + 700.0)], LIMITS)
    assert lines is not None
    first, middle, last = sorted(ticks_us)
    share = (middle - first) / (last - first)
    (low_from, high_from), (low, high), (low_to, high_to) = (lines.span_at(tick) for tick in (first, middle, last))
    assert high <= high_from + share * (high_to - high_from) + 1e-3
    assert low >= low_from + share * (low_to - low_from) - 1e-3


def test_more_observations_never_allow_more() -> None:
    seen = [Observation(place * 1e7, place * 1e7 * 1.005 - 500, place * 1e7 * 1.005 + 900) for place in range(20)]
    widths = []
    for count in range(1, 21):
        lines = lines_at(1.9e8, seen[:count], LIMITS)
        assert lines is not None
        earliest_us, latest_us = lines.span_at(1.9e8)
        widths.append(latest_us - earliest_us)
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(widths))
