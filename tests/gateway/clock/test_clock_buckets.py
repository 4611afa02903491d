"""A bucket of arrivals gives bounds that hold, whichever arrival was quick, and that are as tight as possible."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.clock.arrival_buckets import LEAST_DELAY_US, Bucket
from tests.support.clock_world import SECOND_US

FIRST_TICK_US = 4_000_000_000_000


def bucket(rates: tuple[float, float], arrivals: list[tuple[int, int]]) -> Bucket:
    """Make a bucket of arrivals, which have a tick and a time of receipt."""
    (tick_us, received_us), *others = arrivals
    made = Bucket(9, received_us, tick_us, rates, 0, LEAST_DELAY_US)
    for tick_us, received_us in others:
        made.add(received_us, tick_us)
    return made


@given(
    st.tuples(st.floats(-0.01, 0.01), st.floats(-0.01, 0.01)),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(0, 60 * SECOND_US), st.integers(0, 3 * SECOND_US)), min_size=1, max_size=20),
    st.integers(0, 19),
)
@example((0.0, 1e-9), 0.0, [(0, 0), (401_461, 0)], 0)
def test_the_true_time_is_within_what_a_bucket_tells_whichever_of_its_arrivals_was_quick(
    ends: tuple[float, float], share: float, sent: list[tuple[int, int]], quick: int
) -> None:
    slow, fast = min(ends), max(ends)
    rate = slow + share * (fast - slow)
    arrivals, tick_us = [], FIRST_TICK_US
    for place, (apart_us, delay_us) in enumerate(sent):
        tick_us += apart_us
        under_way_us = min(delay_us, LEAST_DELAY_US) if place == quick % len(sent) else delay_us
        arrivals.append((tick_us, math.ceil((1 + rate) * tick_us) + under_way_us))
    told = bucket((slow, fast), arrivals).observation(LEAST_DELAY_US, 0)
    assert arrivals[0][0] <= told.tick_us <= arrivals[-1][0]
    assert told.earliest_us - 2 <= (1 + rate) * told.tick_us <= told.latest_us + 2


@pytest.mark.parametrize("rate", [-0.003, 0.003])
def test_a_clock_at_either_end_of_what_its_rate_may_be_is_as_early_as_a_bucket_tells(rate: float) -> None:
    """So no tighter bound would hold."""
    ticks_us = [FIRST_TICK_US + place * 10 * SECOND_US for place in range(16)]
    made = bucket((-0.003, 0.003), [(tick_us, tick_us + 30_000) for tick_us in ticks_us])
    told = made.observation(LEAST_DELAY_US, 0)
    assert told.tick_us == pytest.approx((ticks_us[0] + ticks_us[-1]) / 2, abs=2)
    # The first arrival was the quick one if the rate is the least, the last one if it is the greatest.
    quick_us = ticks_us[0] if rate < 0 else ticks_us[-1]
    assert told.earliest_us == pytest.approx(
        quick_us + 30_000 - LEAST_DELAY_US + (1 + rate) * (told.tick_us - quick_us), abs=2
    )


def test_with_a_well_known_rate_the_quickest_arrival_decides_alone() -> None:
    arrivals = [
        (FIRST_TICK_US + place * SECOND_US, place * SECOND_US + 9_000 - (place == 7) * 3_000) for place in range(16)
    ]
    told = bucket((-1e-6, 1e-6), arrivals).observation(LEAST_DELAY_US, 0)
    assert told == (arrivals[7][0], arrivals[7][1] - LEAST_DELAY_US, arrivals[7][1])
