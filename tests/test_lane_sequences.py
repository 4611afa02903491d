"""What was seen of a lane, against a plain set of numbers."""

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from spark import lane_sequences
from spark.lane_sequences import SPANS_MAX, SeenLane, joined, ranges

BATCHES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 60), st.integers(1, 40)).map(lambda run: list(range(run[0], run[0] + run[1]))),
        st.lists(st.integers(0, 100), min_size=1, max_size=40).map(sorted),
        st.lists(st.integers(10_000, 10_200), min_size=1, max_size=5).map(sorted),
    ),
    max_size=20,
)


def numbers_in(spans: list[tuple[int, int]]) -> set[int]:
    return {number for first, last in spans for number in range(first, last + 1)}


def test_a_lane_that_comes_in_order_is_one_number() -> None:
    lane = SeenLane()
    for batch in range(1_000):
        assert lane.add(range(batch * 100, batch * 100 + 100), batch) == []
    assert (lane.below, lane.above) == (100_000, 0)
    assert len(lane.spans) <= SPANS_MAX
    assert lane.add(range(150, 170), 1_000) == [(150, 169)]
    assert any(first <= 1 <= last for first, last in lane.batches(150, 169))


def test_a_number_that_comes_twice_in_a_batch_is_told() -> None:
    assert SeenLane().add([1, 1, 3], 0) == [(1, 1)]


@given(BATCHES, st.sampled_from([16, 500, lane_sequences.AHEAD_MAX]))
def test_what_comes_again_is_what_a_set_says(batches: list[list[int]], ahead_max: int) -> None:
    with patch.object(lane_sequences, "AHEAD_MAX", ahead_max):
        check(batches)


def check(batches: list[list[int]]) -> None:
    lane = SeenLane()
    seen: set[int] = set()
    came_in: dict[int, int] = {}
    for batch, numbers in enumerate(batches):
        again = lane.add(numbers, batch)
        assert again == joined(again)
        assert numbers_in(again) == {number for number in numbers if number in seen or numbers.count(number) > 1}
        for number in numbers:
            earlier = came_in.setdefault(number, batch)
            assert any(first <= earlier <= last for first, last in lane.batches(number, number))
        seen |= set(numbers)
    held = {number for number in range(10_300) if number < lane.below or lane.above >> (number - lane.below) & 1}
    assert held | lane.far == seen


def test_a_number_that_cannot_be_costs_no_memory() -> None:
    lane = SeenLane()
    lane.add([0, 1, 2**63 - 1], 0)
    assert lane.add([2, 2**63 - 1], 1) == [(2**63 - 1, 2**63 - 1)]
    assert (lane.below, lane.above, lane.far) == (3, 0, {2**63 - 1})


@given(st.lists(st.integers(0, 50)))
def test_ranges_hold_the_numbers_that_made_them(numbers: list[int]) -> None:
    assert numbers_in(ranges(sorted(numbers))) == set(numbers)
