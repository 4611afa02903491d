"""What a metered link is given: never more than its rate and its day, and never locked for longer than a day."""

import json
import math
from datetime import UTC, datetime
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.uplink.quota import BURST_S, DAY_S, REQUEST_S, UplinkBudget

MIDNIGHT = datetime(2026, 11, 21, tzinfo=UTC).timestamp()
HOUR_S = 3_600.0
QUOTA = 1_000_000
REQUEST_BYTES_MAX = 50_000


def by_day(state: bytes | None = None) -> UplinkBudget:
    return UplinkBudget(0, QUOTA, state)


def used_up(*, at_s: float, wall_s: float | None) -> UplinkBudget:
    budget = by_day()
    budget.spend(QUOTA, at_s, wall_s)
    assert budget.is_used_up(at_s, wall_s)
    return budget


# -- by the second ------------------------------------------------------------------------------


def test_a_link_without_bounds_is_never_waited_for() -> None:
    budget = UplinkBudget(0, 0, None)
    budget.spend(10**12, 0.0, MIDNIGHT)
    assert budget.wait_s(0.0, MIDNIGHT) == 0.0
    assert budget.allowance(0.0, MIDNIGHT) is None
    assert budget.used_up_until(0.0, MIDNIGHT) is None
    assert not budget.is_used_up(0.0, None)


def test_what_a_request_overdrew_is_waited_out() -> None:
    budget = UplinkBudget(10_000, 0, None)
    assert budget.allowance(0.0, None) == 0
    # Idle for long, it may have a burst of 2 s.
    assert budget.allowance(100.0, None) == 10_000 * BURST_S
    budget.spend(50_000, 100.0, None)
    # 30,000 too many, and then half a second's worth for the next one.
    assert budget.wait_s(100.0, None) == pytest.approx(3.0 + REQUEST_S)
    assert budget.allowance(103.4, None) == 0
    assert budget.allowance(103.5, None) == pytest.approx(5_000, abs=1)


def test_one_byte_per_second_lets_something_pass() -> None:
    assert UplinkBudget(1, 0, None).allowance(0.0, None) == 0
    budget = UplinkBudget(1, 0, None)
    assert budget.wait_s(0.0, None) == REQUEST_S
    assert budget.allowance(REQUEST_S, None) == 1


def test_a_restart_pays_no_debt_and_brings_no_burst() -> None:
    budget = UplinkBudget(10_000, 0, None)
    budget.spend(100_000, 0.0, None)
    again = UplinkBudget(10_000, 0, budget.state())
    assert again.wait_s(1e6, None) == pytest.approx(10.0 + REQUEST_S)
    idle = UplinkBudget(10_000, 0, None)
    idle.wait_s(0.0, None)
    idle.wait_s(100.0, None)
    assert UplinkBudget(10_000, 0, idle.state()).wait_s(100.0, None) == REQUEST_S


steps = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 1.5), st.booleans()),
    max_size=80,
)


@given(st.integers(1_000, 100_000), steps)
def test_over_any_interval_it_is_a_burst_and_the_rate_and_one_request_at_most(
    per_s_max: int, steps: list[tuple[float, float, bool]]
) -> None:
    budget = UplinkBudget(per_s_max, 0, None)
    now_s, ledger = 0.0, [(0.0, 0)]
    for idle_s, overdraft, restarts in steps:
        now_s += idle_s
        now_s += budget.wait_s(now_s, None)
        allowance = budget.allowance(now_s, None)
        assert allowance is not None
        spent = int(allowance * overdraft)
        budget.spend(spent, now_s, None)
        ledger.append((now_s, spent))
        if restarts:
            budget = UplinkBudget(per_s_max, 0, budget.state())
    sums = list(accumulate(spent for _, spent in ledger))
    request_max = max(spent for _, spent in ledger)
    for first, (begin_s, spent) in enumerate(ledger):
        for last in range(first, len(ledger)):
            total = sums[last] - sums[first] + spent
            assert total <= per_s_max * (BURST_S + ledger[last][0] - begin_s) + request_max + 1


@given(st.integers(1, 10**9), st.integers(0, 10**9), st.floats(0.0, 1e8))
def test_after_the_wait_something_may_be_sent(per_s_max: int, spent: int, now_s: float) -> None:
    budget = UplinkBudget(per_s_max, 0, None)
    budget.spend(spent, now_s, None)
    wait_s = budget.wait_s(now_s, None)
    assert budget.wait_s(now_s + wait_s, None) <= 1e-5
    assert budget.allowance(now_s + wait_s + 1e-5, None) != 0


# -- by the day ---------------------------------------------------------------------------------


def test_the_quota_begins_anew_at_midnight_utc() -> None:
    noon = MIDNIGHT + 12 * HOUR_S
    budget = by_day()
    assert budget.allowance(0.0, noon) == QUOTA
    budget.spend(QUOTA - 10, 0.0, noon)
    assert budget.allowance(0.0, noon) == 10
    assert budget.used_up_until(0.0, noon) is None
    budget.spend(10, 0.0, noon)
    assert budget.allowance(0.0, noon) == 0
    assert budget.used_up_until(0.0, noon) == MIDNIGHT + DAY_S
    assert budget.wait_s(0.0, noon) == 12 * HOUR_S
    assert budget.wait_s(12 * HOUR_S - 1, MIDNIGHT + DAY_S - 1) == 1.0
    assert budget.allowance(12 * HOUR_S, MIDNIGHT + DAY_S) == QUOTA


def test_in_the_last_moment_before_midnight_it_is_still_used_up() -> None:
    moment = math.nextafter(MIDNIGHT + DAY_S, 0.0)
    budget = used_up(at_s=0.0, wall_s=moment)
    assert budget.wait_s(0.0, moment) > 0
    assert budget.allowance(0.0, moment) == 0


def test_without_a_date_24_hours_of_uptime_are_a_day_and_nobody_can_say_when_it_ends() -> None:
    budget = used_up(at_s=500.0, wall_s=None)
    assert budget.is_used_up(500.0 + DAY_S - 1, None)
    assert budget.wait_s(500.0 + DAY_S - 1, None) == 1.0
    assert budget.used_up_until(500.0, None) is None
    assert budget.allowance(500.0 + DAY_S, None) == QUOTA


def test_a_date_learnt_on_the_same_day_brings_no_second_quota() -> None:
    budget = used_up(at_s=0.0, wall_s=None)
    assert budget.used_up_until(HOUR_S, MIDNIGHT + 2 * HOUR_S) == MIDNIGHT + DAY_S


def test_a_date_learnt_after_midnight_counts_what_was_spent_since_and_frees_what_was_spent_before() -> None:
    # From 22:00; learnt at 03:00.
    before = used_up(at_s=0.0, wall_s=None)
    assert before.allowance(5 * HOUR_S, MIDNIGHT + 3 * HOUR_S) == QUOTA
    since = by_day()
    since.spend(QUOTA - 1, 0.0, None)
    since.spend(1, 4 * HOUR_S, None)
    assert since.used_up_until(5 * HOUR_S, MIDNIGHT + 3 * HOUR_S) == MIDNIGHT + DAY_S


def test_looking_at_a_link_that_carried_nothing_spends_nothing() -> None:
    budget = used_up(at_s=0.0, wall_s=None)
    # At 01:00, of a date that is learnt at 03:00.
    budget.spend(0, 3 * HOUR_S, None)
    assert budget.allowance(5 * HOUR_S, MIDNIGHT + 3 * HOUR_S) == QUOTA


def test_a_date_that_steps_back_over_midnight_gives_its_day_no_second_quota() -> None:
    budget = used_up(at_s=0.0, wall_s=MIDNIGHT + 1)
    assert budget.is_used_up(1.0, MIDNIGHT - 1)
    assert budget.is_used_up(2.0, MIDNIGHT)
    assert budget.used_up_until(3.0, MIDNIGHT + 1) == pytest.approx(MIDNIGHT + DAY_S, abs=3)


def test_a_date_that_steps_back_by_years_locks_the_quota_for_a_day_at_most() -> None:
    budget = used_up(at_s=0.0, wall_s=MIDNIGHT)
    long_ago = MIDNIGHT - 1_000 * DAY_S
    assert budget.wait_s(HOUR_S, long_ago + HOUR_S) == 23 * HOUR_S
    assert budget.allowance(DAY_S, long_ago + DAY_S) == QUOTA


def test_a_date_that_is_lost_by_a_restart_and_learnt_again_brings_no_second_quota() -> None:
    budget = used_up(at_s=9e6, wall_s=MIDNIGHT + HOUR_S)
    # Booted again: CLOCK_BOOTTIME begins at 0, and the date is unknown.
    again = by_day(budget.state())
    assert again.is_used_up(30.0, None)
    assert again.used_up_until(60.0, MIDNIGHT + 2 * HOUR_S) == MIDNIGHT + DAY_S
    tomorrow = by_day(budget.state())
    assert tomorrow.is_used_up(30.0, None)
    assert tomorrow.allowance(60.0, MIDNIGHT + DAY_S + HOUR_S) == QUOTA


def test_the_uptimes_of_a_box_without_a_date_add_up_to_its_day() -> None:
    state = used_up(at_s=0.0, wall_s=None).state()
    for _ in range(23):
        budget = by_day(state)
        assert budget.is_used_up(40.0, None)
        assert budget.is_used_up(40.0 + HOUR_S, None)
        state = budget.state()
    budget = by_day(state)
    budget.wait_s(40.0, None)
    assert budget.allowance(40.0 + HOUR_S, None) == QUOTA


def test_the_state_is_small_and_a_person_can_read_it() -> None:
    state = used_up(at_s=0.0, wall_s=MIDNIGHT).state()
    assert len(state) < 200
    assert json.loads(state)["used"] == QUOTA


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x00" * 60,
        b"\xff{}",
        b"[]",
        b"{}",
        b'{"used":-1,"day":null,"age_s":0,"idle_s":0}',
        b'{"used":1,"day":"x","age_s":0,"idle_s":0}',
        b'{"used":1,"day":null,"age_s":1e999,"idle_s":0}',
        b'{"used":1,"day":null,"age_s":NaN,"idle_s":0}',
        b'{"used":1e400,"day":null,"age_s":0,"idle_s":0}',
        b'{"used":"\xed\xa0\x80","day":null,"age_s":0,"idle_s":0}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_state_begins_anew(damaged: bytes) -> None:
    assert by_day(damaged).allowance(0.0, MIDNIGHT) == QUOTA


@given(st.data())
def test_no_state_whatever_it_holds_locks_the_uplink_for_longer_than_a_day(data: st.DataObject) -> None:
    budget = UplinkBudget(1_000, QUOTA, None)
    budget.spend(QUOTA, 0.0, data.draw(st.sampled_from([None, MIDNIGHT])))
    state = bytearray(budget.state())
    for place in data.draw(st.lists(st.integers(0, len(state) - 1), max_size=4)):
        state[place] = data.draw(st.sampled_from(b'0123456789-.,:"{}enul\x00\xff'))
    damaged = UplinkBudget(1_000, QUOTA, bytes(state[: data.draw(st.integers(0, len(state)))]))
    assert damaged.wait_s(0.0, data.draw(st.sampled_from([None, MIDNIGHT, MIDNIGHT - 1]))) <= DAY_S + REQUEST_S


moves = st.lists(
    st.tuples(st.floats(0.0, 9 * HOUR_S), st.integers(0, REQUEST_BYTES_MAX), st.sampled_from(["", "restart", "boot"])),
    max_size=150,
)


@given(moves, st.floats(0.0, DAY_S), st.floats(0.0, DAY_S * 0.99))
def test_no_day_has_more_than_the_quota_and_one_request_across_restarts_and_a_date_learnt_within_a_day(
    moves: list[tuple[float, int, str]], began_s: float, learnt_after_s: float
) -> None:
    budget = by_day()
    wall_s, booted_s, passed_s = MIDNIGHT + began_s, MIDNIGHT, 0.0
    spent: dict[int, int] = {}
    for idle_s, size, restarts in moves:
        wall_s += idle_s
        passed_s += idle_s
        if restarts and passed_s > learnt_after_s:
            budget = by_day(budget.state())
            if restarts == "boot":
                booted_s = wall_s - 30.0
        # A sender that always has enough for several requests.
        for _ in range(8):
            times = (wall_s - booted_s, wall_s if passed_s > learnt_after_s else None)
            if budget.wait_s(*times):
                break
            budget.spend(size, *times)
            day = int(wall_s // DAY_S)
            spent[day] = spent.get(day, 0) + size
    assert max(spent.values(), default=0) <= QUOTA + REQUEST_BYTES_MAX


@given(st.lists(st.tuples(st.floats(0.0, 2 * HOUR_S), st.floats(-600.0, 600.0)), min_size=10, max_size=100))
def test_a_date_that_sways_gives_no_more_quotas_than_there_were_days(sway: list[tuple[float, float]]) -> None:
    budget = by_day()
    true_s = MIDNIGHT - HOUR_S
    quotas, first_day = 0, (true_s - 600.0) // DAY_S
    for idle_s, error_s in sway:
        true_s += idle_s
        if budget.wait_s(true_s, true_s + error_s) == 0.0:
            budget.spend(QUOTA, true_s, true_s + error_s)
            quotas += 1
    assert quotas <= (true_s + 600.0) // DAY_S - first_day + 1


dates = st.one_of(st.none(), st.floats(0.0, 4e9), st.floats(MIDNIGHT - 3 * DAY_S, MIDNIGHT + 3 * DAY_S))


@given(st.lists(st.tuples(st.floats(0.0, DAY_S), dates, st.integers(0, QUOTA)), max_size=20), st.lists(dates))
def test_whatever_the_date_does_nothing_is_locked_for_longer_than_a_day_after_the_latest_bytes(
    before: list[tuple[float, float | None, int]], after: list[float | None]
) -> None:
    budget = by_day()
    now_s = 0.0
    for idle_s, wall_s, spent in before:
        now_s += idle_s
        budget.spend(spent, now_s, wall_s)
    budget.spend(QUOTA, now_s, None)
    for number, wall_s in enumerate(after):
        budget.wait_s(now_s + DAY_S * (number + 1) / (len(after) + 1), wall_s)
    # Times that are added up are rounded.
    now_s += DAY_S + 0.001
    assert budget.wait_s(now_s, None) == 0.0
    budget.spend(QUOTA, now_s, None)
    assert budget.wait_s(now_s, None) <= DAY_S
