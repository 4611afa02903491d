"""Devices that count as silent, by the pauses that they made before, whatever their readings and boots."""

from types import SimpleNamespace
from typing import cast

import pytest

from gateway.buffer.rows import Series
from gateway.devices.listing import FORGOTTEN_S, UNHEARD_S, Habit, is_silent
from gateway.intake.devices_heard import DevicesHeard, Heard
from tests.support.buffers import entry_of

THERMO, DOOR = (
    Series(f"device-{name}", "7", "7", f"device/7/{name}", "sluice.reading", "", f"device/7/{name}")
    for name in ("thermo", "door")
)


def habit(readings: int, seconds: float, longest_s: float) -> Habit:
    of = SimpleNamespace(
        readings=readings, since_us=0, received_us=round(seconds * 1e6), longest_pause_us=longest_s * 1e6
    )
    return cast("Habit", of)


@pytest.mark.parametrize(
    ("of", "limit_s"),
    [
        (habit(61, 60, 1), 60.0),
        (habit(11, 200, 20), 100.0),
        (habit(3, 1_200, 600), 3_000.0),
        (habit(600, 1_200, 600), 1_800.0),
    ],
    ids=["every-second", "every-twenty-seconds", "every-ten-minutes", "bursts-and-pauses"],
)
def test_the_longest_of_a_minute_three_pauses_and_five_intervals_counts(of: Habit, limit_s: float) -> None:
    assert not is_silent(limit_s, of, None)
    assert is_silent(limit_s + 0.1, of, None)


def test_one_reading_makes_no_habit_and_a_week_is_no_news() -> None:
    assert not is_silent(5_000.0, habit(1, 0, 0), 9_000.0)
    assert is_silent(FORGOTTEN_S, habit(61, 60, 1), None)
    assert not is_silent(FORGOTTEN_S + 1, habit(61, 60, 1), None)
    assert not is_silent(None, habit(61, 60, 1), None)


def test_a_device_not_heard_since_the_start_is_silent_ten_minutes_after_it() -> None:
    assert not is_silent(5_000.0, None, UNHEARD_S)
    assert is_silent(5_000.0, None, UNHEARD_S + 1)
    assert not is_silent(UNHEARD_S, None, 9_000.0)
    assert not is_silent(5_000.0, None, None), "an earlier daemon does not say how long it runs"


def test_the_longest_pause_outlives_a_boot_and_is_of_all_streams() -> None:
    heard = DevicesHeard()

    def note(boot: str, second: int, series: Series = THERMO) -> Heard:
        heard.record([entry_of(series, b"", round(second * 1e6), device_boot=boot)])
        of = heard.get("7")
        assert of is not None
        return of

    assert note("1-a", 100).longest_pause_us == 0
    assert note("1-a", 130).longest_pause_us == 30e6
    assert note("1-a", 140, DOOR).longest_pause_us == 30e6
    assert note("2-b", 200).longest_pause_us == 60e6, "with the pause before the new boot"
    assert note("2-b", 210).longest_pause_us == 60e6
