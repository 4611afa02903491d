"""The numbers seen of a lane, against a plain set of numbers."""

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from spark.log import lane_sequences
from spark.log.lane_sequences import SPANS_MAX, SeenLane, joined, ranges, set_bits, without

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
    assert len(lane.spans) <= 4 * SPANS_MAX
    assert lane.add(range(150, 170), 1_000) == [(150, 169)]
    assert any(first <= 1 <= last for first, last in lane.batches(150, 169))


@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=6), max_size=30), st.sampled_from([4, 8]))
def test_the_batches_of_each_number_are_known_however_spans_are_joined(batches: list[list[int]], most: int) -> None:
    lane = SeenLane()
    with patch.object(lane_sequences, "SPANS_MAX", most):
        for batch, numbers in enumerate(batches):
            lane.add(sorted(numbers), batch)
            assert len(lane.spans) <= 4 * most
    for batch, numbers in enumerate(batches):
        for number in numbers:
            assert any(first <= batch <= last for first, last in lane.batches(number, number))


@given(BATCHES, st.integers(1, 40))
def test_executors_are_told_of_numbers_that_came_alone(batches: list[list[int]], bits: int) -> None:
    lane = SeenLane()
    with patch.object(lane_sequences, "LOW_BITS_MAX", bits):
        for batch, numbers in enumerate(batches):
            lane.add(numbers, batch)
        below, above = lane.low()
    came = {number for numbers in batches for number in numbers}
    told = {*range(below), *(below + place for place in set_bits(above))}
    assert told == {number for number in came if number < below + bits}


def test_a_number_that_comes_twice_in_a_batch_is_told() -> None:
    assert SeenLane().add([1, 1, 3], 0) == [(1, 1)]


@given(BATCHES, st.sampled_from([16, 500, lane_sequences.AHEAD_MAX]))
def test_repeated_numbers_are_those_of_a_set(batches: list[list[int]], ahead_max: int) -> None:
    with patch.object(lane_sequences, "AHEAD_MAX", ahead_max):
        check(batches, is_exact=True)


@given(BATCHES, st.sampled_from([16, 500]), st.integers(1, 8))
def test_repeated_numbers_are_found_although_other_numbers_never_come(
    batches: list[list[int]], ahead_max: int, far_max: int
) -> None:
    with patch.multiple(lane_sequences, AHEAD_MAX=ahead_max, FAR_MAX=far_max):
        check(batches, is_exact=False)


def check(batches: list[list[int]], *, is_exact: bool) -> None:
    """Against a set. If the bits may have moved on, numbers below them may be reported although they never came."""
    lane = SeenLane()
    seen: set[int] = set()
    came_in: dict[int, int] = {}
    for batch, numbers in enumerate(batches):
        below = lane.below
        again = lane.add(numbers, batch)
        assert again == joined(again)
        came_again = {number for number in numbers if number in seen or numbers.count(number) > 1}
        told = numbers_in(again)
        assert came_again <= told
        assert all(number < below and not is_exact for number in told - came_again)
        for number in numbers:
            earlier = came_in.setdefault(number, batch)
            assert any(first <= earlier <= last for first, last in lane.batches(number, number))
        seen |= set(numbers)
        assert lane.above.bit_length() <= lane_sequences.AHEAD_MAX
        assert len(lane.far) <= lane_sequences.FAR_MAX
    held = {number for number in range(10_300) if number < lane.below or lane.above >> (number - lane.below) & 1}
    assert held | lane.far >= seen
    assert not is_exact or held | lane.far == seen


def test_a_lane_with_a_hole_costs_no_more_with_each_number_that_follows() -> None:
    lane = SeenLane()
    lane.add([0], 0)
    for batch in range(1, 200):
        lane.add(range(batch * 100_000, batch * 100_000 + 100_000), batch)
    assert len(lane.far) <= lane_sequences.FAR_MAX
    assert lane.above.bit_length() <= lane_sequences.AHEAD_MAX
    assert lane.add(range(5_000, 5_010), 200) == [(5_000, 5_009)]
    assert lane.add([19_999_999], 201) == [(19_999_999, 19_999_999)]


def test_a_number_that_cannot_be_costs_no_memory() -> None:
    lane = SeenLane()
    lane.add([0, 1, 2**63 - 1], 0)
    assert lane.add([2, 2**63 - 1], 1) == [(2**63 - 1, 2**63 - 1)]
    assert (lane.below, lane.above, lane.far) == (3, 0, {2**63 - 1})


@given(st.lists(st.integers(0, 50)))
def test_ranges_hold_the_numbers_that_made_them(numbers: list[int]) -> None:
    assert numbers_in(ranges(sorted(numbers))) == set(numbers)


@given(st.lists(st.integers(0, 50)), st.sets(st.integers(0, 50)))
def test_ranges_without_numbers_hold_all_others(numbers: list[int], holes: set[int]) -> None:
    assert numbers_in(without(ranges(sorted(numbers)), holes)) == set(numbers) - holes
