"""The size of a request follows the link: what it takes within a share of the time-out, and no less than it could.

When its bytes were carried says how wide the link is; when it was answered does not.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.uplink.link_rate import (
    ANSWERED_SHARE_MAX,
    BYTES_MIN,
    FIRST_BYTES,
    LATENCY_REQUESTS,
    SHARE,
    SMALL_SHARE,
    LinkRate,
    Passage,
)

TIMEOUT_S = 30.0
TARGET_S = TIMEOUT_S * SHARE
BYTES_MAX = 1_000_000
JITTER_MAX = 1.25
HEARTBEAT_BYTES = 500


def carry(link: LinkRate, size: int, seconds: float) -> bool:
    """What a request meets that takes `seconds` on the link: whether it was acknowledged in time."""
    if seconds > TIMEOUT_S:
        link.timed_out(size)
        return False
    link.acknowledged(size, seconds)
    return True


def full_requests(link: LinkRate, count: int, bytes_per_s: float, latency_s: float = 0.0) -> list[tuple[int, bool]]:
    """As a backlog sends them: size, and whether each was acknowledged."""
    sent = []
    for _ in range(count):
        size = link.request_bytes_max
        sent.append((size, carry(link, size, latency_s + size / bytes_per_s)))
    return sent


@pytest.fixture
def link() -> LinkRate:
    return LinkRate(TIMEOUT_S, BYTES_MAX)


def test_a_link_of_16_kb_per_s_is_given_requests_that_it_carries_in_a_quarter_of_their_time_out() -> None:
    link = LinkRate(TIMEOUT_S, 1_200_000)
    assert link.request_bytes_max == FIRST_BYTES
    assert all(in_time for _, in_time in full_requests(link, 20, 16_000))
    assert link.request_bytes_max == pytest.approx(16_000 * TARGET_S, rel=0.01)


def test_a_fast_link_has_the_largest_request_after_four_doublings() -> None:
    sizes = [size for size, _ in full_requests(LinkRate(TIMEOUT_S, BYTES_MAX), 5, 10_000_000, 0.02)]
    assert sizes == [64_000, 128_000, 256_000, 512_000, BYTES_MAX]


def test_a_link_of_1_kb_per_s_costs_two_time_outs_and_works_then() -> None:
    sent = full_requests(LinkRate(TIMEOUT_S, BYTES_MAX), 10, 1_000, 0.5)
    assert [in_time for _, in_time in sent] == [False, False, *[True] * 8]


def test_a_link_that_becomes_slower_and_faster_again_is_followed_within_a_few_requests(link: LinkRate) -> None:
    full_requests(link, 10, 1_000_000, 0.05)
    # 1 MB takes 62 s at 16 kB/s, and 500 kB 31 s; 250 kB show the rate.
    assert [in_time for _, in_time in full_requests(link, 5, 16_000, 0.05)] == [False, False, True, True, True]
    assert link.request_bytes_max / 16_000 == pytest.approx(TARGET_S, rel=0.02)
    full_requests(link, 6, 1_000_000, 0.05)
    assert link.request_bytes_max == BYTES_MAX


def test_heartbeats_on_a_long_way_lower_nothing_and_do_not_grow_what_they_never_filled(link: LinkRate) -> None:
    for _ in range(100):
        link.acknowledged(HEARTBEAT_BYTES, 5.0)
    assert link.request_bytes_max == FIRST_BYTES


def test_the_first_packets_that_a_traffic_shaper_lets_through_at_once_are_no_rate(link: LinkRate) -> None:
    for _ in range(100):
        link.acknowledged(2_000, 0.0001)
    assert link.request_bytes_max == FIRST_BYTES
    assert link.bytes_in(3_600) == FIRST_BYTES


@pytest.mark.parametrize("heartbeats", [False, True])
def test_a_way_longer_than_the_share_does_not_shrink_requests_for_ever(heartbeats: bool) -> None:  # noqa: FBT001
    # 9 s for the smallest request, where 7.5 s are aimed at: sending less would not make it sooner.
    link = LinkRate(TIMEOUT_S, BYTES_MAX)
    for _ in range(30):
        assert full_requests(link, 1, 16_000, 9.0)[0][1]
        if heartbeats:
            link.acknowledged(HEARTBEAT_BYTES, 9.03)
    assert link.request_bytes_max > FIRST_BYTES


def test_a_shorter_way_is_believed_at_once_and_a_longer_one_after_as_many_heartbeats_as_are_remembered() -> None:
    def limit_after(latencies_s: list[float]) -> int:
        link = LinkRate(TIMEOUT_S, BYTES_MAX)
        for latency_s in latencies_s:
            link.acknowledged(HEARTBEAT_BYTES, latency_s)
        link.acknowledged(FIRST_BYTES, 12.0)
        return link.request_bytes_max

    near, far = limit_after([0.1]), limit_after([6.0])
    assert near < far
    assert limit_after([6.0] * LATENCY_REQUESTS + [0.1]) == near
    assert limit_after([0.1] + [6.0] * (LATENCY_REQUESTS - 1)) == near
    assert limit_after([0.1] + [6.0] * LATENCY_REQUESTS) == far


def test_requests_that_were_under_way_together_and_failed_together_halve_once(link: LinkRate) -> None:
    for _ in range(3):
        link.timed_out(FIRST_BYTES)
    assert link.request_bytes_max == FIRST_BYTES // 2


def test_a_small_request_that_timed_out_is_not_followed_by_a_larger_one(link: LinkRate) -> None:
    full_requests(link, 10, 1_000_000)
    link.timed_out(20_000)
    assert link.request_bytes_max == 10_000


def test_a_middling_request_that_took_too_long_lowers_the_limit_and_one_that_did_not_leaves_it(link: LinkRate) -> None:
    link.acknowledged(FIRST_BYTES // 4, TARGET_S)
    assert link.request_bytes_max == FIRST_BYTES
    link.acknowledged(FIRST_BYTES // 4, 2 * TARGET_S)
    assert link.request_bytes_max == FIRST_BYTES // 8


def test_a_request_of_more_than_half_the_limit_shows_the_rate(link: LinkRate) -> None:
    link.acknowledged(38_400, 7.0)
    assert link.request_bytes_max == int(38_400 / 7.0 * TARGET_S)


def test_a_far_way_that_became_a_near_one_is_no_excuse_for_long_requests(link: LinkRate) -> None:
    for _ in range(LATENCY_REQUESTS):
        link.acknowledged(HEARTBEAT_BYTES, 6.0)
    full_requests(link, 30, 100_000)
    assert link.request_bytes_max / 100_000 <= TARGET_S * 1.1


def test_no_latency_makes_up_for_more_than_a_quarter_of_the_time_out(link: LinkRate) -> None:
    link.acknowledged(HEARTBEAT_BYTES, 20.0)
    link.acknowledged(FIRST_BYTES, 25.0)
    assert link.request_bytes_max == int(FIRST_BYTES / (25.0 - TIMEOUT_S / 4) * TARGET_S)


def test_what_goes_in_a_second_is_the_measured_rate(link: LinkRate) -> None:
    full_requests(link, 20, 40_000)
    assert link.bytes_in(1.0) == pytest.approx(40_000, rel=0.01)
    assert link.bytes_per_s == link.bytes_in(1.0)
    assert link.bytes_in(0.0) == BYTES_MIN
    assert link.bytes_in(1e9) == link.request_bytes_max


def test_the_rate_is_told_where_it_lies_beyond_what_a_request_may_carry() -> None:
    fast, slow = LinkRate(TIMEOUT_S, BYTES_MAX), LinkRate(TIMEOUT_S, BYTES_MAX)
    full_requests(fast, 40, 20_000_000)
    full_requests(slow, 40, 1_000)
    assert fast.bytes_per_s == pytest.approx(20_000_000, rel=0.01)
    assert slow.bytes_per_s == pytest.approx(1_000, rel=0.01)
    assert (fast.bytes_in(1.0), slow.bytes_in(1.0)) == (BYTES_MAX, BYTES_MIN)


def test_one_lucky_request_is_believed_halfway_and_one_unlucky_one_at_once(link: LinkRate) -> None:
    full_requests(link, 20, 40_000)
    full_requests(link, 1, 80_000)
    assert link.bytes_in(1.0) == pytest.approx(60_000, rel=0.01)
    full_requests(link, 1, 40_000)
    assert link.bytes_in(1.0) == pytest.approx(40_000, rel=0.01)


def test_live_readings_alone_show_that_a_link_is_fast_at_least(link: LinkRate) -> None:
    assert link.bytes_in(0.1) == BYTES_MIN
    for _ in range(10):
        link.acknowledged(2_000, 0.01)
    assert link.bytes_in(0.1) == pytest.approx(20_000, rel=0.01)


def test_a_request_as_quick_as_a_heartbeat_does_not_make_the_rate_endless(link: LinkRate) -> None:
    link.acknowledged(HEARTBEAT_BYTES, 5.0)
    link.acknowledged(FIRST_BYTES, 5.0)
    assert link.request_bytes_max == 2 * FIRST_BYTES
    assert link.bytes_in(1.0) <= 8 * FIRST_BYTES / 5.0


def test_after_a_time_out_the_former_rate_is_not_believed(link: LinkRate) -> None:
    full_requests(link, 20, 1_000_000)
    link.timed_out(BYTES_MAX)
    assert link.request_bytes_max == BYTES_MAX // 2
    assert link.bytes_in(1.0) == int(BYTES_MAX / 2 / TARGET_S)


@pytest.mark.parametrize("answered_s", [13.5, 18.0, 24.0, 26.5])
def test_a_broker_that_answers_late_is_sent_as_much_as_another_in_the_end(answered_s: float, link: LinkRate) -> None:
    for _ in range(200):
        link.acknowledged(link.request_bytes_max, 0.5, answered_s)
    assert link.request_bytes_max == BYTES_MAX


def test_many_answers_one_after_the_other_halve_what_is_sent_at_a_time_and_not_the_rate(link: LinkRate) -> None:
    full_requests(link, 10, 1_000_000)
    link.acknowledged(BYTES_MAX, 1.0, 1.9 * TIMEOUT_S)
    assert link.request_bytes_max == BYTES_MAX
    link.acknowledged(BYTES_MAX, 1.0, 2.1 * TIMEOUT_S)
    assert link.request_bytes_max == BYTES_MAX // 2
    assert link.bytes_per_s == pytest.approx(1_000_000, rel=0.01)


def test_bytes_are_under_way_until_the_last_was_carried_and_not_until_it_was_answered() -> None:
    passage = Passage(100.0, 5_000)
    is_carried = []
    for now_s, link_bytes in ((100.5, 5_400), (101.0, 6_000), (110.0, 6_000)):
        passage.measure(now_s, 1_000, link_bytes)
        is_carried.append(passage.is_carried)
    assert is_carried == [False, True, True]
    assert (passage.sending_s, passage.answered_s) == (1.0, 10.0)
    assert (passage.handed_s, passage.moved_s) == (100.0, 101.0)


def test_what_is_answered_before_the_first_look_was_under_way_all_the_time() -> None:
    passage = Passage(100.0, 0)
    passage.measure(100.25, 1_000, 1_060)
    assert (passage.sending_s, passage.answered_s) == (0.25, 0.25)


def test_a_batch_that_goes_when_the_one_before_it_was_answered_begins_anew() -> None:
    passage = Passage(100.0, 0)
    passage.measure(101.0, 1_000, 1_000)
    passage.measure(110.0, 1_000, 1_000)
    passage.measure(111.0, 2_000, 1_500)
    assert not passage.is_carried
    assert passage.handed_s == 110.0
    passage.measure(112.0, 2_000, 2_000)
    assert (passage.sending_s, passage.answered_s) == (3.0, 12.0)


def test_a_round_behind_another_request_is_not_under_way() -> None:
    passage = Passage(100.0, 0)
    passage.measure(120.0, 0, 60)
    assert passage.is_carried
    passage.measure(121.0, 1_000, 1_060)
    assert (passage.sending_s, passage.answered_s) == (1.0, 1.0)


def test_nothing_moves_where_nothing_is_carried() -> None:
    passage = Passage(100.0, 5_000)
    for second in range(1, 11):
        passage.measure(100.0 + second, 1_000, 5_000)
    assert not passage.is_carried
    assert (passage.handed_s, passage.moved_s) == (100.0, 100.0)


@pytest.mark.parametrize(("timeout_s", "bytes_max"), [(0.0, BYTES_MAX), (-1.0, BYTES_MAX), (30.0, BYTES_MIN - 1)])
def test_what_cannot_be_kept_to_is_refused(timeout_s: float, bytes_max: int) -> None:
    with pytest.raises(ValueError, match="time-out above 0"):
        LinkRate(timeout_s, bytes_max)


jitters = st.lists(st.floats(1.0, JITTER_MAX), min_size=60, max_size=60)
# From where the smallest request takes an eighth of the time-out.
rates = st.floats(BYTES_MIN / (TIMEOUT_S / 8), 1e8)
latencies = st.floats(0.0, TARGET_S / 4)
WARM_UP = 20


@given(rates, latencies, jitters)
def test_after_the_first_few_no_full_request_takes_longer_than_its_share_and_jitter(
    bytes_per_s: float, latency_s: float, jitter: list[float]
) -> None:
    link = LinkRate(TIMEOUT_S, BYTES_MAX)
    for number, factor in enumerate(jitter):
        size = link.request_bytes_max
        seconds = (latency_s + size / bytes_per_s) * factor
        assert carry(link, size, seconds) or number < 6
        if number >= WARM_UP:
            assert seconds <= TARGET_S * JITTER_MAX * 1.05


@given(rates, latencies, jitters)
def test_heartbeats_in_between_take_no_request_beyond_half_of_its_time_out(
    bytes_per_s: float, latency_s: float, jitter: list[float]
) -> None:
    link = LinkRate(TIMEOUT_S, BYTES_MAX)
    for number, factor in enumerate(jitter):
        size = link.request_bytes_max if number % 3 else HEARTBEAT_BYTES
        seconds = (latency_s + size / bytes_per_s) * factor
        carry(link, size, seconds)
        if number >= WARM_UP:
            assert seconds <= TIMEOUT_S / 2 * JITTER_MAX


@given(rates, latencies, jitters)
def test_at_least_half_of_what_the_link_would_take_in_the_share_is_used(
    bytes_per_s: float, latency_s: float, jitter: list[float]
) -> None:
    link = LinkRate(TIMEOUT_S, BYTES_MAX)
    for number, factor in enumerate(jitter):
        size = link.request_bytes_max
        if number >= WARM_UP:
            assert size >= min(BYTES_MAX, bytes_per_s * TARGET_S) / 2
        carry(link, size, (latency_s + size / bytes_per_s) * factor)


@given(rates, st.floats(2.0, 1_000.0), latencies)
def test_a_fall_of_the_rate_costs_no_more_time_outs_than_it_has_halvings(
    bytes_per_s: float, fall: float, latency_s: float
) -> None:
    link = LinkRate(TIMEOUT_S, BYTES_MAX)
    full_requests(link, WARM_UP, bytes_per_s * fall, latency_s)
    sent = full_requests(link, 2 * WARM_UP, bytes_per_s, latency_s)
    failed = sum(not in_time for _, in_time in sent)
    assert failed <= 10
    assert all(in_time for _, in_time in sent[failed:])
    assert latency_s + sent[-1][0] / bytes_per_s <= TARGET_S * 1.05


@given(st.floats(FIRST_BYTES / (TIMEOUT_S / 2), 1e8))
def test_a_narrow_way_that_a_proxy_hides_times_out_no_request_that_grew(bytes_per_s: float) -> None:
    """Whatever takes bytes at once and passes them on slowly: they seem to be carried, and the answer is late."""
    link = LinkRate(TIMEOUT_S, BYTES_MAX)
    for _ in range(40):
        size = link.request_bytes_max
        assert size / bytes_per_s <= TIMEOUT_S * ANSWERED_SHARE_MAX * 1.01
        link.acknowledged(size, 0.01, size / bytes_per_s)
    assert link.request_bytes_max >= min(BYTES_MAX, bytes_per_s * TIMEOUT_S / 2)


@given(st.lists(st.tuples(st.floats(0.0, SMALL_SHARE), st.floats(0.0, TIMEOUT_S)), max_size=50), rates)
def test_no_small_request_ever_lowers_the_limit(small: list[tuple[float, float]], bytes_per_s: float) -> None:
    link = LinkRate(TIMEOUT_S, BYTES_MAX)
    full_requests(link, 5, bytes_per_s)
    for share, seconds in small:
        limit = link.request_bytes_max
        link.acknowledged(int(limit * share), seconds)
        assert link.request_bytes_max >= limit


outcomes = st.lists(
    st.tuples(st.sampled_from(["acknowledged", "timed out"]), st.floats(0.0, 1.2), st.floats(0.0, 40.0)), max_size=60
)


@given(outcomes, st.integers(BYTES_MIN, 100_000_000), st.floats(0.1, 600.0))
def test_whatever_happens_the_limit_keeps_its_bounds_grows_at_most_double_and_is_halved_by_a_time_out(
    happened: list[tuple[str, float, float]], bytes_max: int, timeout_s: float
) -> None:
    link = LinkRate(timeout_s, bytes_max)
    for outcome, share, seconds in happened:
        limit = link.request_bytes_max
        size = int(limit * share)
        if outcome == "acknowledged":
            link.acknowledged(size, seconds)
            # Of a limit that is no whole number the last byte is not seen.
            assert link.request_bytes_max <= 2 * limit + 1
        else:
            link.timed_out(size)
            assert link.request_bytes_max <= max(BYTES_MIN, min(limit, size / 2))
        assert BYTES_MIN <= link.request_bytes_max <= bytes_max
        assert BYTES_MIN <= link.bytes_in(0.1) <= link.bytes_in(10.0) <= link.request_bytes_max
