"""When lanes begin: as the uplink comes and goes, never oftener than set, never more than set."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.lanes import LanePolicy
from gateway.settings import KafkaSettings

KAFKA = KafkaSettings(("kafka.example:9092",), lane_s_min=10.0, live_age_s_max=30.0, lanes_max=4)


def reason(policy: LanePolicy, now_s: float, *, up: bool, live_age_s: float = 0.0, behind: int = 0) -> str | None:
    """Ask, and begin the lane if there is to be one."""
    found = policy.reason(now_s, is_up=up, live_age_s=live_age_s, lanes_behind=behind)
    if found is not None:
        policy.begun(now_s, is_up=up)
    return found


def test_an_outage_has_a_lane_of_its_own() -> None:
    policy = LanePolicy(KAFKA, 0.0)
    assert reason(policy, 1.0, up=True) is None, "what came in since the start is live"
    assert reason(policy, 100.0, up=True) is None
    assert reason(policy, 101.0, up=False) == "uplink-down"
    assert reason(policy, 200.0, up=False) is None
    assert reason(policy, 300.0, up=True) == "uplink-up"
    assert reason(policy, 400.0, up=True) is None


def test_a_start_without_uplink_is_an_outage_whose_lane_is_there_already() -> None:
    policy = LanePolicy(KAFKA, 0.0)
    assert [reason(policy, float(now_s), up=False) for now_s in range(0, 60, 5)] == [None] * 12
    assert reason(policy, 60.0, up=True) == "uplink-up"


def test_a_flapping_uplink_begins_no_lane_each_time() -> None:
    policy = LanePolicy(KAFKA, 0.0)
    assert reason(policy, 0.0, up=True) is None
    begun = [now_s for now_s in range(1, 601) if reason(policy, float(now_s), up=now_s % 2 == 0)]
    assert 2 <= len(begun) <= 60
    assert all(later - earlier >= 10 for earlier, later in pairwise(begun))


def test_an_outage_shorter_than_a_lane_begins_none() -> None:
    policy = LanePolicy(KAFKA, 0.0)
    assert reason(policy, 0.0, up=True) is None
    assert reason(policy, 100.0, up=False) == "uplink-down"
    assert reason(policy, 103.0, up=True) is None
    assert reason(policy, 106.0, up=False) is None
    assert reason(policy, 120.0, up=False) is None, "it went down again within that lane"


def test_a_link_slower_than_the_intake_makes_backlog_of_what_waits_too_long() -> None:
    policy = LanePolicy(KAFKA, 0.0)
    assert reason(policy, 0.0, up=True) is None
    assert reason(policy, 100.0, up=True, live_age_s=30.0) is None
    assert reason(policy, 101.0, up=True, live_age_s=30.5) == "uplink-slow"
    assert reason(policy, 105.0, up=True, live_age_s=40.0) is None, "it has just begun"
    assert reason(policy, 140.0, up=False, live_age_s=40.0) == "uplink-down"


@given(
    st.lists(st.tuples(st.floats(0, 30), st.booleans(), st.floats(0, 100), st.integers(0, 6)), min_size=1, max_size=60)
)
def test_lanes_begin_within_their_bounds(steps: list[tuple[float, bool, float, int]]) -> None:
    policy, now_s, began_s = LanePolicy(KAFKA, 0.0), 0.0, 0.0
    for passed_s, up, live_age_s, behind in steps:
        now_s += passed_s
        if reason(policy, now_s, up=up, live_age_s=live_age_s, behind=behind):
            assert now_s - began_s >= KAFKA.lane_s_min
            assert behind + 1 < KAFKA.lanes_max
            began_s = now_s
