from collections.abc import Sequence
from dataclasses import replace

import pytest

from demo.audit import TableReading
from demo.time_audit import UNBOUNDED_US, audit_times
from demo.time_notes import time_notes

NOON_US = 1_750_000_000_000_000


def run(device: str, bounds_us: Sequence[int], quality: str = "estimated") -> list[TableReading]:
    """A reading a second, with these bounds."""
    return [
        TableReading(device, "1-aa", second, "celsius", NOON_US + second * 1_000_000, 21.5, bound_us, quality)
        for second, bound_us in enumerate(bounds_us)
    ]


def notes(rows: Sequence[TableReading], *, off_us: int = 0) -> list[str]:
    """Notes on readings whose times are all `off_us` after the true ones."""
    times = audit_times(rows, {row.identity: row.event_us - off_us for row in rows})
    return time_notes(rows, times, ["board-1"])


def test_of_a_plot_that_speaks_for_itself_nothing_is_said() -> None:
    assert notes([*run("m1", [1_000] * 8), *run("board-1", [500] * 8)], off_us=300) == []


@pytest.mark.parametrize(
    ("off_us", "words"),
    [
        (-800, "where arrivals are quick, as here, it lies near the end, and the estimate is too early (8 of these)"),
        (
            800,
            "where arrivals are slow, as here, it lies near the beginning, and the estimate is too late (8 of these)",
        ),
    ],
)
def test_times_at_the_edge_of_their_bound_are_explained_by_the_way_they_lean(off_us: int, words: str) -> None:
    (note,) = notes([*run("m1", [1_000] * 8), *run("m2", [2_000] * 4)], off_us=off_us)
    assert "8 of 12 estimated times of MQTT sensors are off by more than 75 % of it" in note
    assert words in note


def test_the_note_on_arrivals_needs_many_and_no_serial_boards() -> None:
    assert notes(run("board-1", [1_000] * 8), off_us=-800) == []
    assert notes([*run("m1", [1_000] * 4), *run("m2", [2_000] * 5)], off_us=-800) == []


def test_readings_without_a_bound_are_counted_and_no_series_is_explained_that_is_not_drawn() -> None:
    (note,) = notes([*run("m1", [UNBOUNDED_US] * 3, "bounded"), *run("m2", [1_000] * 3)])
    assert note.startswith("3 readings have no bound (`bounded` in the table below): ")
    (note,) = notes(run("m1", [UNBOUNDED_US], "bounded"))
    assert note.startswith("1 reading has no bound ")


def test_bounded_readings_with_a_bound_are_explained() -> None:
    (note,) = notes(run("m1", [60_000_000] * 3, "bounded"))
    assert note.startswith("Violet, `bounded`: 3 readings with only a span of time")


def test_bounds_that_fall_all_at_once_are_counted_by_what_makes_them_fall() -> None:
    learnt = [80_000, 90_000, 30_000, 31_000]
    (note,) = notes([*run("m1", learnt), *run("m2", learnt), *run("board-1", [20_000, 21_000, 9_000, 10_000])])
    assert "(2 of MQTT sensors, by some arrivals taken together; 1 of boards on serial lines, by a round trip)" in note
    (note,) = notes(run("m1", learnt))
    assert "(1 of MQTT sensors, by some arrivals taken together)" in note


def test_one_arrival_that_was_delayed_is_no_step_and_neither_is_another_boot() -> None:
    assert notes(run("m1", [30_000, 31_000, 60_000, 31_000, 32_000])) == []
    reset = [replace(row, boot="2-bb", error_us=10_000) for row in run("m1", [0, 0, 0])]
    assert notes([*run("m1", [80_000] * 3), *reset]) == []
