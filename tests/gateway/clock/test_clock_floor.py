"""The latest time that is known to have passed: never later than the truth, and never taken for the time."""

import ast
import re
import subprocess
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.clock.floor import FLOOR_MARK, RELEASED_US, SAVE_US, ClockFloor
from gateway.reading import Mark
from tests.support.buffers import marks_of, opened
from tests.support.waiting import patience

ROOT = Path(__file__).parents[3]
DAY_US = 86_400_000_000
READERS = {"commands/certificate_dates.py", "daemon/housekeeping.py", "pipeline.py", "tls/dates.py"}
"""Modules that may know of the floor: TLS, reports on TLS, and the modules that wire and feed it."""


def test_without_more_it_is_the_release() -> None:
    floor = ClockFloor()
    assert floor.us == RELEASED_US
    floor.recall({})
    floor.recall({FLOOR_MARK: b"1"})
    assert floor.us == RELEASED_US


@pytest.mark.parametrize(
    "damaged",
    [b"not a number", b"", b"-1", b"1_0", b"+5", b" 5", "\u0665\u00b2".encode(), b"\xff\x00", b"9" * 17, b"9" * 5_000],
)
def test_a_damaged_mark_stops_nobody_and_is_written_anew(damaged: bytes) -> None:
    """int() takes no more than 4300 digits, and a date is to be made of whatever it takes."""
    floor = ClockFloor()
    floor.recall({FLOOR_MARK: damaged})
    assert floor.us == RELEASED_US
    now_us = RELEASED_US + DAY_US
    assert floor.learn(now_us, 1_000) == Mark(FLOOR_MARK, b"%d" % (now_us - 1_000))


def test_the_release_is_the_newest_that_the_changelog_dates_and_none_to_come() -> None:
    dated = re.findall(r"^## .*?(\d{4}-\d{2}-\d{2})", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if dated:
        newest = datetime.fromisoformat(max(dated)).replace(tzinfo=UTC)
        assert newest.timestamp() * 1e6 == RELEASED_US
        return
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patience(20)).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("neither the changelog nor a history dates this tree")
    assert int(told) * 1_000_000 >= RELEASED_US


def test_a_synced_clock_raises_it_to_what_has_passed_by_its_bound() -> None:
    floor = ClockFloor()
    now_us = RELEASED_US + 30 * DAY_US
    assert floor.learn(now_us, 2_000) == Mark(FLOOR_MARK, b"%d" % (now_us - 2_000))
    assert floor.us == now_us - 2_000
    later = ClockFloor()
    later.recall({FLOOR_MARK: b"%d" % floor.us})
    assert later.us == floor.us


@given(st.lists(st.tuples(st.integers(0, DAY_US), st.integers(0, 10**9), st.floats(-1, 1)), max_size=30))
def test_it_never_overtakes_the_truth_never_falls_and_is_seldom_written(looks: list[tuple[int, int, float]]) -> None:
    """This holds for any error of a clock within its bound."""
    floor, truth_us, before_us, kept = ClockFloor(), RELEASED_US + DAY_US, RELEASED_US, []
    for passed_us, error_us, share in looks:
        truth_us += passed_us
        mark = floor.learn(truth_us + int(share * error_us), error_us)
        assert before_us <= floor.us <= truth_us
        before_us = floor.us
        kept += [] if mark is None else [int(mark.value or b"")]
    assert all(later - earlier >= SAVE_US for earlier, later in pairwise(kept))
    assert not looks or kept


def test_a_floor_that_a_wrong_clock_left_is_taken_back_by_the_next_right_one() -> None:
    """A time server that says 2040 must not cost a gateway its TLS until then."""
    floor = ClockFloor()
    floor.learn(RELEASED_US + 5_000 * DAY_US, 1_000)
    mark = floor.learn(RELEASED_US + 10 * DAY_US, 1_000)
    assert mark is not None
    assert floor.us == int(mark.value or b"") == RELEASED_US + 10 * DAY_US - 1_000
    # And one that says 1990, however it is trusted, takes back no more than to the release; nor writes each second.
    assert floor.learn(RELEASED_US - 9_000 * DAY_US, 1_000) is not None
    assert floor.us == RELEASED_US
    assert floor.learn(RELEASED_US - 9_000 * DAY_US + 1_000_000, 1_000) is None


async def test_it_outlives_the_process_in_the_buffer(tmp_path: Path) -> None:
    mark = ClockFloor().learn(RELEASED_US + DAY_US, 1_000)
    assert mark is not None
    async with opened(tmp_path / "buffer.db") as buffer:
        buffer.keep([mark])
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await marks_of(buffer, "clock/") == {FLOOR_MARK: mark.value}


def test_nothing_but_tls_knows_of_it() -> None:
    """Promise P5: no time is made of the floor. `test_clock_daemon` tests the times of an unsynced box."""
    importing = {
        str(path.relative_to(ROOT / "gateway"))
        for path in (ROOT / "gateway").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "gateway.clock.floor"
        # That nothing was measured before this code was there is no time, but a bound.
        if not {name.name for name in node.names} <= {"RELEASED_US", "FIRST_RELEASED_US"}
    }
    assert importing == READERS
