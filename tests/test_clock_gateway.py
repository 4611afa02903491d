"""The gateway's wall clock: what vouches for it, and what is known when nothing does any more."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.clock_gateway import HOLDOVER_PPM, ClockWatch, WallClock, boot_id, boottime_us, hold_over, read_wall_clock

HOUR_US = 3_600_000_000


def test_the_boot_has_a_name_and_a_clock_that_goes_forward() -> None:
    assert len(boot_id()) == 36
    assert 0 < boottime_us() <= boottime_us()


def test_the_system_clock_is_trusted_with_the_bound_that_the_installer_vouches_for() -> None:
    clock = read_wall_clock("system", 7_000)
    assert clock.error_us == 7_000
    now_us = clock.at(boottime_us())
    assert 1_700_000_000_000_000 < now_us < 4_000_000_000_000_000


def test_the_kernels_word_is_taken_not_the_looks_of_the_date() -> None:
    clock = read_wall_clock("kernel", 7_000)
    assert clock.error_us is None or 0 <= clock.error_us < 16_000_000
    before, now = ClockWatch("kernel", 0).look()
    assert before.synced == now.synced


def test_a_clock_that_was_synced_stays_known_through_an_outage_with_a_growing_bound() -> None:
    synced = WallClock(1_000, 100)
    unsynced = WallClock(900, None)
    known, synced_us = hold_over(synced, unsynced, 0, HOUR_US)
    assert known == WallClock(1_000, 100 + HOUR_US * HOLDOVER_PPM // 1_000_000)
    later, _ = hold_over(known, unsynced, synced_us, 2 * HOUR_US)
    assert later == WallClock(1_000, 100 + 2 * HOUR_US * HOLDOVER_PPM // 1_000_000)
    assert hold_over(later, WallClock(1_100, 50), 0, 3 * HOUR_US) == (WallClock(1_100, 50), 3 * HOUR_US)


def test_a_clock_that_never_was_synced_is_not_made_up() -> None:
    unsynced = WallClock(0, None)
    assert hold_over(unsynced, unsynced, 0, HOUR_US)[0].error_us is None


@given(st.lists(st.integers(0, 10_000_000), max_size=50))
def test_looking_often_does_not_shrink_the_bound(steps_us: list[int]) -> None:
    known, synced_us, now_us = WallClock(0, 100), 0, 0
    for step_us in steps_us:
        now_us += step_us
        known, synced_us = hold_over(known, WallClock(0, None), synced_us, now_us)
    exact_us = 100 + now_us * HOLDOVER_PPM / 1_000_000
    assert known.error_us is not None
    assert exact_us - len(steps_us) - 1 <= known.error_us <= exact_us


def test_what_is_written_down_covers_what_comes_until_it_is_written_anew() -> None:
    kept = WallClock(0, 1_000).with_room()
    assert kept.covers(WallClock(100, 2_900))
    assert not kept.covers(WallClock(100, 3_100))
    assert not kept.covers(WallClock(1_000, 1_000))
    assert not kept.covers(WallClock(0, None))
    assert WallClock(0, None).with_room().covers(WallClock(0, None))
