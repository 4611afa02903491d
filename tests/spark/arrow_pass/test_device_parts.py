"""What the pass tells of devices is what loops over their readings say, in any pieces and after any folds.

It needs no Java.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark.arrow_pass import device_rows
from spark.arrow_pass.device_rows import SCHEMA, fold
from spark.log import device_parts
from spark.log.edges import Edge
from spark.log.lane_sequences import ranges
from spark.log.sequence_runs import RUN_COLUMNS, run_hash
from tests.support.device_readings import Reading, made, reading
from tests.support.sizes import size
from tests.support.spark_records import EPOCH

Run = tuple[str, str, str, str, str | None]
LEAST, GREATEST = -(2**63), 2**63 - 1


def edge(of: Reading) -> Edge:
    others = (of[name] for name in Edge._fields if name != "event_us")
    return Edge(microseconds_of(of), *others)


def microseconds_of(of: Reading) -> int:
    time: datetime = of["event_time"]
    return (time - EPOCH) // timedelta(microseconds=1)


def sureness(of: Edge) -> tuple[Any, ...]:
    return of.time_error_us, of.event_us, *of[2:6], -1 if of[6] is None else of[6]


def run_of(of: Reading) -> Run:
    is_counted = of["device_boot"] is not None and of["device_sequence"] is not None
    counter, boot = (of["device_counter"] or "", of["device_boot"]) if is_counted else ("", None)
    return of["namespace"], of["device"], of["stream"], counter, boot


def by_run(batches: Iterable[Sequence[Reading]]) -> dict[Run, list[tuple[int, Reading]]]:
    """The readings of each run, with their batches."""
    runs: dict[Run, list[tuple[int, Reading]]] = defaultdict(list)
    for batch, readings in enumerate(batches):
        for each in readings:
            runs[run_of(each)].append((batch, each))
    return runs


def expect_parts(rows: pa.Table, batches: Sequence[Sequence[Reading]]) -> None:
    """Check that folded rows say what loops over the readings of all batches say."""
    found: dict[Run, list[dict[str, Any]]] = defaultdict(list)
    for row in rows.to_pylist():
        run = tuple(row[name] for name in RUN_COLUMNS)
        found[run].append(row)
    runs = by_run(batches)
    assert found.keys() == runs.keys()
    for run, of_run in runs.items():
        dated = [microseconds_of(each) for _, each in of_run if each["is_dated"]]
        for row in found[run]:
            assert row["run"] == (None if run[-1] is None else run_hash(run))  # type: ignore[arg-type]
            assert row["gateways"] == sorted({each["gateway"] for _, each in of_run})
            assert row["last_us"] == max(dated, default=None)
        if run[-1] is None:
            (row,) = found[run]
            assert (row["first"], row["last"], row["islands"]) == (None, None, [])
            assert [row["batch_first"], row["batch_last"]] == [of_run[0][0], of_run[-1][0]]
        else:
            expect_islands(found[run], of_run)


def expect_islands(rows: list[dict[str, Any]], of_run: list[tuple[int, Reading]]) -> None:
    numbers = sorted({each["device_sequence"] for _, each in of_run})
    islands = [island for row in rows for island in row["islands"]]
    assert [(island["first"], island["last"]) for island in islands] == ranges(numbers)
    for row in rows:
        assert 0 < len(row["islands"]) <= device_rows.ISLANDS_MAX
        assert (row["first"], row["last"]) == (row["islands"][0]["first"], row["islands"][-1]["last"])
        within = [batch for batch, each in of_run if row["first"] <= each["device_sequence"] <= row["last"]]
        # They may be more: islands of one row have its batches in common, also if a later fold parts them.
        assert of_run[0][0] <= row["batch_first"] <= min(within)
        assert max(within) <= row["batch_last"] <= of_run[-1][0]


def expect_edges(rows: pa.Table, readings: Sequence[Reading]) -> None:
    """Check the times of islands' ends: of each number the surest."""
    for row in rows.to_pylist():
        run = tuple(row[name] for name in RUN_COLUMNS)
        for island in row["islands"]:
            for end in ("first", "last"):
                at_end = [
                    edge(each) for each in readings if run_of(each) == run and each["device_sequence"] == island[end]
                ]
                assert Edge(**island[f"{end}_edge"]) == min(at_end, key=sureness)


@st.composite
def readings(draw: st.DrawFn) -> Reading:
    return reading(
        draw(st.none() | st.integers(0, 12) | st.sampled_from([LEAST, LEAST + 1, GREATEST - 1, GREATEST])),
        draw(st.integers(0, 2)),
        device=draw(st.sampled_from(["42", "43", "ü"])),
        device_counter=draw(st.sampled_from([None, "", "a/b"])),
        device_boot=draw(st.sampled_from(["7-1a2b3c4d", "7-1a2b3c4d", "8-1a2b3c4d", None])),
        event_time=datetime(2026, 3, 14, 12, draw(st.integers(0, 3)), 0, 1, tzinfo=UTC),
        time_quality=draw(st.sampled_from(["estimated", "bounded"])),
        gateway=draw(st.sampled_from(["gw-1", "gw-2"])),
        boot_time_error_us=draw(st.sampled_from([None, 0, 5])),
        is_dated=draw(st.booleans()),
    )


@pytest.mark.campaign(seconds=10)
@settings(max_examples=size(100, 2_000), deadline=None)
@given(st.lists(readings(), max_size=30))
def test_the_rows_of_a_piece_are_what_loops_say(drawn: list[Reading]) -> None:
    found = made(drawn, 0)
    expect_parts(found.rows, [drawn])
    expect_edges(found.rows, drawn)
    times: dict[Any, int] = defaultdict(int)
    for each in drawn:
        if run_of(each)[-1] is not None:
            times[*run_of(each), each["device_sequence"]] += 1
    repeated = {(*run, number) for *run, first, last in found.repeated for number in range(first, last + 1)}
    assert repeated == {number for number, count in times.items() if count > 1}


@pytest.mark.campaign(seconds=10)
@settings(max_examples=size(100, 2_000), deadline=None)
@given(st.lists(st.lists(readings(), max_size=12), max_size=6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_folds_give_what_loops_over_all_batches_say(
    batches: list[list[Reading]], islands_max: int, rng: random.Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_rows, "ISLANDS_MAX", islands_max)
        tables = [made(batch, ordinal).rows for ordinal, batch in enumerate(batches)]
        while len(tables) > 1:
            # Some of them, in any order, as upkeep comes to them.
            rng.shuffle(tables)
            count = rng.randint(2, len(tables))
            tables = [fold(pa.concat_tables(tables[:count])).rows, *tables[count:]]
        if tables:
            whole = fold(tables[0]).rows
            expect_parts(whole, batches)
            expect_edges(whole, [each for batch in batches for each in batch])
            assert fold(whole).rows.equals(whole), "to fold again changes nothing"
            keys = [[row[name] or "" for name in RUN_COLUMNS] for row in whole.to_pylist()]
            named = [key for key in keys if key[-1]]
            assert all(before <= after for before, after in pairwise(named))


def test_an_end_that_comes_again_better_timed_gets_the_better_time() -> None:
    first = made([reading(number) for number in (1, 2, 3, 10)], 0)
    better = [reading(number, 1, gateway="gw-2") for number in (3, 4)]
    whole = fold(pa.concat_tables([first.rows, made(better, 1).rows, made([reading(4, 0)], 2).rows])).rows
    (row,) = whole.to_pylist()
    ends = [(island["first"], island["last"], island["last_edge"]["time_error_us"]) for island in row["islands"]]
    assert ends == [(1, 4, 0), (10, 10, 5)]
    assert row["gateways"] == ["gw-1", "gw-2"]


def test_a_sensor_that_often_loses_a_reading_has_several_rows() -> None:
    numbers = range(0, 6 * device_rows.ISLANDS_MAX, 2)
    whole = made([reading(number) for number in numbers]).rows
    assert [len(row["islands"]) for row in whole.to_pylist()] == [device_rows.ISLANDS_MAX] * 3
    closed = fold(pa.concat_tables([whole, made([reading(number + 1) for number in numbers]).rows])).rows
    assert [(row["first"], row["last"]) for row in closed.to_pylist()] == [(0, numbers[-1] + 1)]


def test_the_columns_are_those_of_the_table() -> None:
    def told(kind: pa.DataType) -> str:
        if pa.types.is_list(kind):
            return f"array<{told(kind.value_type)}>"
        if pa.types.is_struct(kind):
            return f"struct<{', '.join(f'{each.name}: {told(each.type)}' for each in kind)}>"
        return {"int64": "bigint", "string": "string"}[str(kind)]

    declared = ", ".join(f"{each.name} {told(each.type)}" for each in SCHEMA)
    assert declared == " ".join(device_parts.SCHEMA.split()).replace("( ", "(")
