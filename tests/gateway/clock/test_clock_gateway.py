"""The gateway's clock in one boot: true time always lies within its bound, whatever the wall clock went through."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.clock.gateway_clock import (
    POINTS_MAX,
    BootClock,
    BootTimes,
    Look,
    Point,
    WallClock,
    bounded_between,
    rounded_up,
)

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
START_US = int(datetime(2026, 3, 14, tzinfo=UTC).timestamp()) * SECOND_US
PPM = 100.0


@dataclass
class Box:
    """A computer whose true time is known: its crystal is off, the kernel slews, people and NTP set its wall clock."""

    true_us: float = START_US
    boottime_us: float = 50 * SECOND_US
    raw_us: float = 50 * SECOND_US
    offset_us: float = 0.0
    clock: BootClock = field(default_factory=lambda: BootClock("unknown", PPM))
    seen: list[tuple[int, float]] = field(default_factory=list)
    """Moments of this boot: CLOCK_BOOTTIME, and the true time then."""

    @property
    def true_offset_us(self) -> float:
        return self.true_us - self.boottime_us

    def run(self, seconds: float, crystal_ppm: float, slew_ppm: float, error_us: int | None, looks: int) -> None:
        """Let time pass with looks at equal distances, at which the kernel vouches for that error, or for nothing."""
        for _ in range(looks):
            true_us = seconds * SECOND_US / looks
            raw_us = true_us * (1 + crystal_ppm / 1e6)
            self.true_us += true_us
            self.raw_us += raw_us
            self.boottime_us += raw_us * (1 + slew_ppm / 1e6)
            self.look(error_us)

    def look(self, error_us: int | None) -> None:
        self.seen.append((int(self.boottime_us), self.true_us))
        adjusted_us = int(self.boottime_us) - int(self.raw_us)
        self.clock = self.clock.looked(Look(int(self.boottime_us), round(self.offset_us), error_us, adjusted_us))

    def assert_true(self, slack_us: int = 4) -> None:
        """`slack_us` is for rounding to whole microseconds."""
        times = BootTimes(self.clock)
        for boottime_us, true_us in self.seen:
            error_us = self.clock.error_us(boottime_us)
            assert error_us is not None
            assert abs(self.clock.at(boottime_us) - true_us) <= error_us + slack_us
            around = times.around(boottime_us)
            assert around.error_us is not None
            assert around.from_us <= boottime_us < around.until_us
            assert abs(around.at(boottime_us) - true_us) <= around.error_us + slack_us
            assert around.error_us <= error_us * 1.5 + 250


def ppm(most: float) -> st.SearchStrategy[float]:
    return st.floats(-most, most)


stretches = st.lists(
    st.tuples(
        st.sampled_from(("synced", "lost", "set by hand", "slewed")),
        st.floats(1.0, 200_000.0),
        ppm(50.0),
        ppm(80_000.0),
        st.integers(1_000, 500_000),
        st.floats(-1.0, 1.0),
        st.floats(-1e15, 1e15),
        st.integers(1, 30),
    ),
    min_size=1,
    max_size=12,
)


def lived(box: Box, stretch: tuple[str, float, float, float, int, float, float, int]) -> None:
    """One stretch of a box's life."""
    kind, seconds, crystal_ppm, slew_ppm, error_us, off, set_by_us, looks = stretch
    if kind == "synced":
        # NTP steps it to where it is off by no more than it says, which the crystal may use up until the next update.
        box.offset_us = box.true_offset_us + off * error_us
        box.look(error_us)
        box.run(seconds, crystal_ppm, 0.0, None, looks)
    elif kind == "lost":
        box.run(seconds, crystal_ppm, 0.0, None, looks)
    elif kind == "set by hand":
        box.offset_us += set_by_us
        box.run(seconds, crystal_ppm, 0.0, None, looks)
    else:
        # Slewed for a few seconds, looked at each second.
        whole = 1 + int(seconds) % 10
        box.run(whole, crystal_ppm, slew_ppm, None, whole)


@given(stretches)
@settings(max_examples=300, deadline=None)
def test_true_time_lies_within_the_bound_whatever_happens_to_the_wall_clock(
    life: list[tuple[str, float, float, float, int, float, float, int]],
) -> None:
    box = Box()
    lived(box, ("synced", *life[0][1:]))
    for stretch in life[1:]:
        lived(box, stretch)
    assert box.clock.revision == 0
    box.assert_true()


@given(stretches)
@settings(max_examples=200, deadline=None)
def test_a_clock_that_was_kept_says_the_same(
    life: list[tuple[str, float, float, float, int, float, float, int]],
) -> None:
    box = Box()
    for stretch in life:
        lived(box, stretch)
        box.clock = BootClock.from_bytes(box.clock.to_bytes())
    if box.clock.known:
        box.assert_true()


@given(
    st.lists(
        st.tuples(st.floats(60.0, 4_000.0), ppm(50.0), st.integers(5_000, 50_000), st.floats(-1.0, 1.0)), max_size=80
    )
)
@settings(max_examples=50, deadline=None)
def test_points_that_are_given_up_leave_a_bound_that_holds(updates: list[tuple[float, float, int, float]]) -> None:
    box = Box()
    for seconds, crystal_ppm, error_us, off in [*updates, (1.0, 0.0, 5_000, 0.0)]:
        box.run(seconds, crystal_ppm, 0.0, None, 3)
        box.offset_us = box.true_offset_us + off * error_us
        box.look(error_us)
    assert len(box.clock.points) <= POINTS_MAX
    box.assert_true()
    # Old rows keep the knowledge of their time: no more is lost than to the nearest updates.
    worst_us = max(error_us for _, _, error_us, _ in [*updates, (0.0, 0.0, 5_000, 0.0)])
    first_us = box.clock.points[0].at_us
    for boottime_us, _ in box.seen:
        if boottime_us >= first_us:
            assert (box.clock.error_us(boottime_us) or 0) <= 2 * worst_us / 0.7 + 4_100 * PPM * 2


def test_two_updates_far_apart_tell_how_fast_the_crystal_runs() -> None:
    box = Box(offset_us=START_US - 50 * SECOND_US)
    box.look(1_000)
    for _ in range(10):
        box.run(3_600, 40.0, 0.0, None, 1)
    box.offset_us = box.true_offset_us
    box.look(1_000)
    half_way = box.seen[5]
    # Each alone would allow for five hours at 100 ppm.
    assert (box.clock.error_us(half_way[0]) or 0) < 1_200_000
    box.assert_true()


def test_a_clock_looked_at_each_second_keeps_few_points_and_no_smaller_bound_than_it_was_told() -> None:
    box = Box(offset_us=START_US - 50 * SECOND_US)
    box.look(10_000)
    box.run(3_600, 0.0, 0.0, 10_000, 3_600)
    assert len(box.clock.points) <= 3
    assert all(9_999 <= (box.clock.error_us(at_us) or 0) <= 10_000 / 0.7 + 1 for at_us, _ in box.seen)


@given(st.integers(1, 3600), st.integers(1_000, 200_000), st.floats(-1.0, 1.0), st.floats(2.0, 1e6))
def test_a_clock_set_by_hand_is_held_over_and_one_that_is_synced_again_goes_on(
    seconds: int, error_us: int, off: float, by_s: float
) -> None:
    box = Box(offset_us=START_US - 50 * SECOND_US)
    box.look(error_us)
    box.offset_us += by_s * SECOND_US
    box.run(seconds, 10.0, 0.0, None, 5)
    assert box.clock.synced
    box.offset_us = box.true_offset_us + off * error_us
    box.look(error_us)
    assert box.clock.revision == 0
    box.assert_true()


@given(st.floats(2.0, 1e9), st.booleans(), st.integers(1_000, 200_000), st.floats(1.0, 1e6))
def test_a_clock_that_was_wrong_while_it_was_vouched_for_is_corrected_for_the_whole_boot(
    by_s: float,
    back: bool,  # noqa: FBT001 - Hypothesis calls it
    error_us: int,
    seconds: float,
) -> None:
    box = Box()
    box.offset_us = box.true_offset_us + (-by_s if back else by_s) * SECOND_US
    box.look(error_us)
    box.run(seconds, 20.0, 0.0, error_us, 10)
    before = box.clock
    box.offset_us = box.true_offset_us
    box.look(error_us)
    if box.clock.revision == 0:
        # A crystal as bad as allowed may have made all that good.
        assert by_s * SECOND_US <= 2 * error_us + seconds * PPM + 10
    else:
        assert box.clock.revision == before.revision + 1
        assert len(box.clock.points) == 1
        box.assert_true()


NEW_YEAR_US = int(datetime(2027, 1, 1, tzinfo=UTC).timestamp()) * SECOND_US


@given(st.sampled_from((1, -1)), st.integers(1_000, 100_000), st.floats(1.0, 3_000.0), st.floats(0.1, 5_000.0))
def test_a_leap_second_leaves_earlier_rows_their_time(by: int, error_us: int, before_s: float, after_s: float) -> None:
    """`by` is the wall clock's gain on true elapsed time: -1 if a second is inserted."""
    box = Box(true_us=NEW_YEAR_US - before_s * SECOND_US - (SECOND_US if by > 0 else 0))
    box.offset_us = box.true_offset_us
    box.look(error_us)
    box.run(before_s - 0.001, 0.0, 0.0, error_us, 20)
    earlier = list(box.seen)
    box.run(0.001, 0.0, 0.0, None, 1)
    leap_at_us = int(box.boottime_us)
    # The wall clock keeps UTC, which steps. So its true offset changes here.
    box.true_us += by * SECOND_US
    box.offset_us += by * SECOND_US
    box.seen.clear()
    box.run(after_s, 0.0, 0.0, error_us, 20)
    assert box.clock.revision == 0
    assert len(box.clock.leaps) == 1
    assert abs(box.clock.leaps[0][0] - leap_at_us) <= error_us + 10
    box.seen = [*earlier[:-1], *[each for each in box.seen if each[0] > leap_at_us + error_us]]
    box.assert_true()


def test_a_step_of_a_second_at_another_time_is_no_leap_second() -> None:
    box = Box(offset_us=START_US + 12 * HOUR_US - 50 * SECOND_US, true_us=START_US + 12 * HOUR_US)
    box.look(1_000)
    box.run(10, 0.0, 0.0, 1_000, 10)
    box.offset_us -= SECOND_US
    box.run(10, 0.0, 0.0, 1_000, 10)
    assert box.clock.leaps == ()
    assert box.clock.revision == 1


def test_a_leap_second_between_two_starts_is_one() -> None:
    kept = BootClock("unknown", PPM).looked(Look(HOUR_US, NEW_YEAR_US - 2 * HOUR_US, 1_000))
    later = kept.looked(Look(3 * HOUR_US, NEW_YEAR_US - 2 * HOUR_US - SECOND_US, 1_000))
    assert later.leaps == ((2 * HOUR_US, -SECOND_US),)
    assert later.offset_us(2 * HOUR_US - 1) - later.offset_us(2 * HOUR_US) == SECOND_US


@given(st.sets(st.integers(0, 19)), st.sampled_from((80_000.0, -80_000.0, 500.0)))
def test_slewing_between_badly_read_looks_is_seen_by_the_next_look(missed: set[int], ppm: float) -> None:
    box = Box(offset_us=START_US - 50 * SECOND_US)
    box.look(1_000)
    for second in range(20):
        box.run(1, 0.0, ppm, None, 0 if second in missed else 1)
        if second in missed:
            box.true_us += SECOND_US
            box.raw_us += SECOND_US
            box.boottime_us += SECOND_US * (1 + ppm / 1e6)
            box.clock = box.clock.looked(Look(int(box.boottime_us), round(box.offset_us), None))
    box.run(1, 0.0, 0.0, None, 1)
    box.assert_true()


def test_slewing_just_before_a_look_that_teaches_counts_for_earlier_times() -> None:
    box = Box(offset_us=START_US - 50 * SECOND_US)
    box.look(50_000)
    box.run(5, 0.0, 0.0, None, 5)
    box.run(0.8, 0.0, 80_000.0, None, 1)
    # Set right in that moment, which a timer of the kernel's tells.
    box.offset_us = box.true_offset_us
    box.look(1_000)
    box.assert_true()


def test_what_nothing_vouches_for_has_no_bound() -> None:
    clock = BootClock("unknown", PPM).looked(Look(5, 1_000, None))
    assert not clock.known
    assert (clock.at(7), clock.error_us(7), clock.line()) == (1_007, None, None)
    assert clock.around(7) == WallClock(1_000, None)
    # Jitter is not worth keeping; a clock that was set is.
    assert clock.looked(Look(2_000_000, 1_400, None)).says_as(clock)
    assert not clock.looked(Look(2_000_000, 2_000, None)).says_as(clock)


def test_looks_that_teach_nothing_change_nothing() -> None:
    clock = BootClock("unknown", PPM).looked(Look(0, 1_000, 500, 0))
    later = clock.looked(Look(1_000_000, 1_000, 500, 10)).looked(Look(2_000_000, 1_000, 500, 20))
    assert later.says_as(clock)


def test_a_constant_clock_is_told_as_it_is() -> None:
    clock = BootClock.constant(1_000, 250)
    assert clock.synced
    assert clock.around(-5) == WallClock(1_000, 250)
    assert clock.around(10**15) == WallClock(1_000, 250)
    assert not BootClock.constant(1_000, None).known


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"{}",
        b'{"quality":"synced","ppm":1}',
        b'{"quality":"unknown","ppm":1,"points":[[0,0,0]]}',
        b'{"quality":"synced","ppm":1,"points":[[5,0,0],[1,0,0]]}',
        b'{"quality":"synced","ppm":-1,"points":[[5,0,0]]}',
        b'{"quality":"synced","ppm":1e300,"points":[[5,0,0]]}',
        b'{"quality":"synced","ppm":1,"points":[[5,0,%d]]}' % 10**30,
        b'{"quality":"unknown","ppm":1,"guess_us":%d}' % 2**63,
        b"\xff\x00",
    ],
)
def test_what_is_no_clock_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        BootClock.from_bytes(data)


@given(st.integers(0, 2**62))
def test_bounds_are_rounded_up_a_little_and_to_few_values(error_us: int) -> None:
    rounded = rounded_up(error_us)
    assert error_us < rounded <= error_us + max(error_us // 4, 250)
    assert rounded_up(error_us + 1) >= rounded
    assert (rounded & -rounded).bit_length() >= rounded.bit_length() - 4


def test_a_line_for_what_was_told_before_holds_at_least_as_wide_as_the_clock() -> None:
    box = Box()
    box.run(600, 30.0, 0.0, None, 10)
    box.offset_us = box.true_offset_us + 3_000
    box.look(5_000)
    line = box.clock.line()
    assert line is not None
    for boottime_us, true_us in box.seen:
        told_us = boottime_us + line.offset_us
        error_us = line.error_us + abs(boottime_us - line.boottime_us) * line.error_growth_ppm / 1e6
        assert abs(told_us - true_us) <= error_us


def test_a_line_that_takes_the_place_of_what_was_wrong_holds_for_what_came_after_too() -> None:
    box = Box(offset_us=START_US + HOUR_US)
    box.look(1_000)
    box.run(1, 0.0, 0.0, None, 1)
    box.offset_us = box.true_offset_us
    box.look(1_000)
    assert box.clock.revision == 1
    box.run(60, 0.0, 80_000.0, None, 60)
    line = box.clock.line()
    assert line is not None
    for boottime_us, true_us in box.seen:
        error_us = line.error_us + abs(boottime_us - line.boottime_us) * line.error_growth_ppm / 1e6
        assert abs(boottime_us + line.offset_us - true_us) <= error_us


# -- boots that were never synced -----------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), ppm(50.0)), min_size=1, max_size=8),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_boots_that_were_never_synced_lie_between_those_that_were_and_keep_their_order(
    boots: list[tuple[int, int, float]],
    off_s: int,
    has_before: bool,  # noqa: FBT001 - Hypothesis calls it
) -> None:
    """Each boot lasts some seconds, and begins some seconds after the one before it. Its crystal is off."""
    true_us = START_US
    before = None
    if has_before:
        before = BootClock.constant(true_us - 7 * HOUR_US + 900, 1_000), 7 * HOUR_US
    zeros, seen = [], []
    true_us += off_s * SECOND_US
    for lasts_s, pause_s, crystal_ppm in boots:
        zeros.append((true_us, crystal_ppm))
        seen.append(int(lasts_s * SECOND_US * (1 + crystal_ppm / 1e6)))
        true_us += (lasts_s + pause_s) * SECOND_US
    after = BootClock("unknown", PPM).looked(Look(10 * SECOND_US, true_us + 500, 1_000))
    clocks = bounded_between(before, seen, after, START_US)
    last_us = 0
    for clock, (zero_us, crystal_ppm), seen_us in zip(clocks, zeros, seen, strict=True):
        assert clock.quality == "bounded"
        for boottime_us in (0, seen_us // 2, seen_us):
            actually_us = zero_us + boottime_us / (1 + crystal_ppm / 1e6)
            assert abs(clock.at(boottime_us) - actually_us) <= (clock.error_us(boottime_us) or 0) + 2
            assert clock.at(boottime_us) >= last_us
            last_us = clock.at(boottime_us)


def test_a_boot_whose_neighbours_contradict_each_other_gets_a_bound_that_holds_both() -> None:
    before = BootClock.constant(START_US, 0), 0
    after = BootClock.constant(START_US - HOUR_US, 0)
    (clock,) = bounded_between(before, [0], after, 0)
    assert clock.at(0) == START_US - HOUR_US // 2
    assert clock.error_us(0) == HOUR_US // 2


def test_points_are_named_for_what_they_say() -> None:
    assert Point(1, 2, 3)._asdict() == {"at_us": 1, "low_us": 2, "high_us": 3, "slewed_us": 0, "between": None}
