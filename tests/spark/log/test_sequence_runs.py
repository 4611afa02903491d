"""A device's own numbers in `log`, against a plain set of numbers."""

import statistics
import time
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from spark.log.edges import Edge
from spark.log.sequence_runs import (
    ISLANDS_MAX,
    ISLANDS_SCHEMA,
    Island,
    SeenRun,
    add,
    edge_of,
    islands_as_rows,
    merge,
    run_key,
    settle,
)

KEY = ("plant", "42", "device-thermo", "", "7-1a2b3c4d")


def edge(number: int, error_us: int = 5) -> Edge:
    return Edge(number * 1_000_000, error_us, "estimated", "gw-1", "boot", number, None)


def island(first: int, last: int, batch: int = 0, error_us: int = 5) -> Island:
    return Island(first, last, edge(first, error_us), edge(last, error_us), batch, batch)


def ranges(numbers: set[int]) -> list[tuple[int, int]]:
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    return list(zip(firsts, lasts, strict=True))


def islands_in(numbers: set[int], batch: int = 0, error_us: int = 5) -> list[Island]:
    return [island(first, last, batch, error_us) for first, last in ranges(numbers)]


def missing_between(islands: Iterable[Island]) -> list[tuple[int, int]]:
    return [(before.last + 1, after.first - 1) for before, after in pairwise(islands)]


def test_a_run_that_comes_in_order_is_one_island() -> None:
    islands = merge((), [island(1, 10, 0)]).islands
    islands = merge(islands, [island(11, 20, 1)]).islands
    assert islands == (Island(1, 20, edge(1), edge(20), 0, 1),)
    assert missing_between(islands) == []


def test_a_backlog_closes_the_hole_that_an_outage_left() -> None:
    islands = merge((island(1, 10, 0),), [island(21, 30, 1)]).islands
    assert missing_between(islands) == [(11, 20)]
    assert merge(islands, [island(11, 20, 2)]) == ((Island(1, 30, edge(1), edge(30), 0, 2),), [])


def test_repeats_are_overlaps_and_change_nothing_but_a_surer_time() -> None:
    islands = (island(1, 10), island(20, 30))
    assert merge(islands, [island(5, 25, 1)]).overlaps == [(5, 10), (20, 25)]
    assert merge(islands, [island(20, 30)]).islands == islands
    surer = merge(islands, [island(20, 22, 1, error_us=1)]).islands[1]
    assert surer == Island(20, 30, edge(20, 1), edge(30), 0, 1)


@given(st.lists(st.tuples(st.sets(st.integers(0, 60), min_size=1), st.integers(0, 3)), max_size=8), st.randoms())
def test_islands_are_what_a_set_says_in_any_order_of_batches(batches: list[tuple[set[int], int]], rng: object) -> None:
    shuffled = list(enumerate(batches))
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    islands: tuple[Island, ...] = ()
    seen: set[int] = set()
    for batch, (numbers, error_us) in shuffled:
        islands, overlaps = merge(islands, islands_in(numbers, batch, error_us))
        assert {number for first, last in overlaps for number in range(first, last + 1)} == numbers & seen
        seen |= numbers
    assert [(one.first, one.last) for one in islands] == ranges(seen)
    assert {n for first, last in missing_between(islands) for n in range(first, last + 1)} == (
        set(range(min(seen), max(seen))) - seen if seen else set()
    )
    for one in islands:
        came = [batch for batch, (numbers, _) in enumerate(batches) if numbers & set(range(one.first, one.last + 1))]
        assert (one.batch_first, one.batch_last) == (came[0], came[-1])
        # Of an end that came several times the surest counts, of those batches whose island ended there.
        ending = [error for numbers, error in batches if one.last in numbers and one.last + 1 not in numbers]
        assert one.last_edge == edge(one.last, min(ending))


@given(st.lists(st.sets(st.integers(0, 40), min_size=1), min_size=2, max_size=5))
def test_the_order_of_batches_changes_nothing(batches: list[set[int]]) -> None:
    def merged(order: list[int]) -> tuple[Island, ...]:
        islands: tuple[Island, ...] = ()
        for batch in order:
            islands = merge(islands, islands_in(batches[batch], batch, error_us=9 - batch)).islands
        return islands

    order = list(range(len(batches)))
    assert merged(order) == merged(order[::-1])


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 200), min_size=1, max_size=40), st.booleans()), max_size=12),
    st.integers(0, 4),
)
def test_what_is_settled_is_still_known_to_have_come(batches: list[tuple[set[int], bool]], islands_max: int) -> None:
    run, gone = SeenRun(), list[Island]()
    came_in: dict[int, list[int]] = {}
    for batch, (numbers, save) in enumerate(batches):
        run, again, earlier = add(run, islands_in(numbers, batch))
        told = {number for first, last in again for number in range(first, last + 1)}
        # More may be told, but nothing that did not come now: of that not all copies would be looked for.
        assert numbers & came_in.keys() <= told <= numbers
        for number in told & came_in.keys():
            assert all(any(low <= each <= high for low, high in earlier) for each in came_in[number])
        for number in numbers:
            came_in.setdefault(number, []).append(batch)
        if save:
            run, settled = settle(run, islands_max, 3)
            gone += settled
            assert len(run.islands) <= islands_max
            assert len(run.settled) <= 3
    known = {n for one in (*run.islands, *gone) for n in range(one.first, one.last + 1)}
    assert known == came_in.keys()


def test_a_backlog_that_is_worked_off_stays_in_memory_while_live_readings_get_lost() -> None:
    run = SeenRun((island(0, 99, 0),))
    for batch in range(1, 200):
        # Of the live ones each tenth is missing.
        live = range(100_000 + 20 * batch, 100_000 + 20 * batch + 20)
        backlog = range(100 * batch, 100 * batch + 100)
        run, again, _ = add(run, islands_in({*backlog, *(number for number in live if number % 10)}, batch))
        assert again == []
        run, _ = settle(run, ISLANDS_MAX)
        assert len(run.islands) <= ISLANDS_MAX
    assert run.islands[0] == Island(0, 19_999, edge(0), edge(19_999), 0, 199)


def test_late_readings_are_looked_for_near_the_time_when_they_were_missing() -> None:
    run = SeenRun()
    searched: list[int] = []
    for batch in range(3_000):
        numbers = {number for number in range(10 * batch, 10 * batch + 10) if number % 10}
        # Each third batch brings one that was missing 40 batches ago.
        late = {10 * (batch - 40)} if batch % 3 == 0 and batch >= 40 else set[int]()
        run, again, batches = add(run, islands_in(numbers | late, batch))
        assert {number for first, last in again for number in range(first, last + 1)} <= late
        searched += [last - first for first, last in batches]
        run, _ = settle(run, ISLANDS_MAX)
    assert max(searched[-300:]) < 1_500
    assert statistics.median(searched) < 200


def test_the_count_of_missing_numbers_has_64_bits_even_across_the_whole_range() -> None:
    far = SeenRun((island(-(2**63), -(2**63)), island(0, 0, 1), island(2**63 - 1, 2**63 - 1, 2)))
    run, _ = settle(far, 0, 1)
    assert [(span.first, span.last, span.missing) for span in run.settled] == [(-(2**63), 2**63 - 1, 2**63 - 1)]


def test_a_run_in_many_pieces_is_settled_in_no_time() -> None:
    """Measured at 0.06 s; the limit leaves room for a machine with other work."""
    run = SeenRun(tuple(island(2 * number, 2 * number) for number in range(20_000)))
    started_s = time.process_time()
    run, gone = settle(run, ISLANDS_MAX)
    assert time.process_time() - started_s < 2
    assert (len(run.islands), len(gone), len(run.settled)) == (8, 19_992, 16)


def test_a_batch_of_many_devices_is_merged_in_no_time() -> None:
    """Measured at about a microsecond and a half each; the limit leaves room for a machine with other work."""
    runs: dict[int, tuple[Island, ...]] = {number: (island(0, 9),) for number in range(20_000)}
    came = [island(10, 19, 1)]
    started_s = time.process_time()
    for number, islands in runs.items():
        runs[number] = merge(islands, came).islands
    assert time.process_time() - started_s < 20_000 * 25e-6


@pytest.mark.spark
@pytest.mark.usefixtures("interpreted")
def test_islands_go_into_a_table_and_come_back(spark: SparkSession) -> None:
    islands = [island(1, 3), island(5, 2**30)]
    table = spark.createDataFrame(islands_as_rows(KEY, islands), ISLANDS_SCHEMA)
    rows = table.orderBy("first").collect()
    assert [run_key(*row[:5]) for row in rows] == [KEY, KEY]
    assert [(*row[5:7], edge_of(row.first_edge), edge_of(row.last_edge), *row[9:]) for row in rows] == islands
