"""How soon the buffer is full, and how long a card lasts: arithmetic that an installer buys hardware by."""

import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.buffer import wear
from gateway.buffer.wear import (
    DAY_S,
    ROW_OVERHEAD_BYTES,
    Usage,
    UsageHour,
    add_usage,
    hours_until_full,
    last_day,
    room_bytes,
    write_budget,
)
from tests.gateway.buffer.test_buffer_wal import written_frames
from tests.support.buffers import opened

HOUR = UsageHour(3600.0, 3600, 3600 * 35, 3600 * 500)
"""One reading a second of 35 payload bytes, 500 bytes of disk each."""


def test_a_card_of_16_tb_under_one_reading_a_second() -> None:
    budget = write_budget(last_day([HOUR] * 24), card_endurance_tbw=16, write_amplification=4)
    assert budget.readings_per_day == 86_400
    assert budget.disk_bytes_per_day == 43_200_000
    assert budget.disk_bytes_per_reading == 500
    # 16e12 bytes of flash, of which 4 x 43.2 MB go a day.
    assert budget.card_days == pytest.approx(92_592, abs=1)


def test_the_buffer_is_full_after_its_room_is_filled_at_that_rate() -> None:
    day = last_day([HOUR] * 24)
    assert hours_until_full(36_000 * (35 + ROW_OVERHEAD_BYTES), day) == pytest.approx(10)
    assert hours_until_full(0, day) == 0


def test_of_uptime_only_the_last_24_hours_count_and_the_oldest_hour_in_part() -> None:
    started = UsageHour(1800.0, 10, 100, 1000)
    quiet = UsageHour(3600.0, 0, 0, 0)
    day = last_day([started, *[quiet] * 23, HOUR, HOUR])
    assert day.seconds == DAY_S
    assert day.readings == 10 + 1800
    assert day.disk_bytes == 1000 + 1800 * 500


def test_what_was_hardly_seen_is_not_told() -> None:
    for seen in ([], [UsageHour(599.0, 600, 600, 600)], [UsageHour(0.0, 5, 5, 5)]):
        budget = write_budget(last_day(seen))
        assert (budget.readings_per_day, budget.disk_bytes_per_day, budget.card_days) == (None, None, None)
        assert hours_until_full(1e9, last_day(seen)) is None


def test_a_gateway_that_takes_nothing_in_never_fills_and_a_card_that_is_not_written_has_no_end() -> None:
    day = last_day([UsageHour(3600.0, 0, 0, 0)])
    assert hours_until_full(1e9, day) is None
    budget = write_budget(day)
    assert (budget.readings_per_day, budget.card_days, budget.disk_bytes_per_reading) == (0, None, None)


def test_the_room_is_bounded_by_the_setting_and_by_the_disk() -> None:
    def room(**changed: int) -> int:
        given = {
            "bytes_used": 300,
            "bytes_max": 1000,
            "unused_bytes": 50,
            "disk_free": 10_000,
            "disk_free_min": 400,
            **changed,
        }
        return room_bytes(**given)

    assert room() == 700
    assert room(disk_free=500) == 150
    # A disk that others have filled leaves the file's own free pages.
    assert room(disk_free=100) == 50
    assert room(bytes_used=1200) == 0


hours = st.lists(
    st.builds(
        UsageHour,
        st.floats(0, 3600),
        st.integers(0, 10**9),
        st.integers(0, 10**12),
        st.integers(0, 10**12),
    ),
    max_size=60,
)


@given(hours)
def test_a_day_holds_no_more_than_it_was_given(given_hours: list[UsageHour]) -> None:
    day = last_day(given_hours)
    assert day.seconds <= DAY_S + 1e-6
    assert 0 <= day.disk_bytes <= sum(hour.disk_bytes for hour in given_hours)
    seen = sum(hour.seconds for hour in given_hours)
    assert math.isclose(day.seconds, min(seen, DAY_S), rel_tol=1e-9, abs_tol=1e-6)


@given(st.floats(601, 40 * 3600), st.integers(1, 50))
def test_a_steady_rate_is_the_same_however_long_it_was_watched_and_however_it_was_cut(
    seen_s: float, parts: int
) -> None:
    part = UsageHour(seen_s / parts, 1, 1, 1_000_000)
    budget = write_budget(last_day([part] * parts))
    assert budget.disk_bytes_per_day == pytest.approx(1_000_000 / part.seconds * DAY_S, rel=1e-3)


async def test_usage_of_one_hour_is_added_up_by_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wear, "boottime_us", lambda: 3_600_000_000)
    path = tmp_path / "buffer.db"
    async with opened(path) as buffer:
        await buffer.transact(lambda file: add_usage(file.connection, "boot", Usage(60.0, 2, 30, 4096)))
        before = written_frames(path)
        await buffer.transact(lambda file: add_usage(file.connection, "boot", Usage(60.0, 3, 40, 8192)))
        assert written_frames(path) - before == 1
        with closing(sqlite3.connect(path)) as other:
            found = other.execute("SELECT seconds, readings, stored_bytes, disk_bytes FROM usage").fetchall()
        assert found == [(120.0, 5, 70, 12_288)]
