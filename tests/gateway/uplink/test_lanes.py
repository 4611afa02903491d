"""When lanes begin: as the uplink comes and goes, never oftener than set, never more than set."""

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.buffer.buffer import Buffer
from gateway.config.config_file import route_table
from gateway.daemon.housekeeping import LaneTurns
from gateway.intake.front_door import FrontDoor
from gateway.settings import GatewaySettings, KafkaSettings, Settings
from gateway.uplink.lane_policy import LanePolicy
from gateway.uplink.state import UplinkState
from tests.support.buffers import opened, rows

KAFKA = KafkaSettings(("kafka.example:9092",), lane_s_min=10.0, live_age_s_max=30.0, lanes_max=4)
GATEWAY = GatewaySettings("gw1")


def reason(  # noqa: PLR0913 - all that a policy is asked
    policy: LanePolicy,
    now_s: float,
    *,
    up: bool,
    live_age_s: float = 0.0,
    behind: int = 0,
    has_hole: bool = False,
) -> str | None:
    """Ask, and begin the lane if there is to be one."""
    found = policy.reason(now_s, is_up=up, live_age_s=live_age_s, backlog_lanes=behind, has_hole=has_hole)
    if found is not None:
        policy.begun(now_s, is_up=up)
    return found


@pytest.fixture
def policy() -> LanePolicy:
    return LanePolicy(KAFKA, 0.0)


def test_an_outage_has_a_lane_of_its_own(policy: LanePolicy) -> None:
    assert reason(policy, 1.0, up=True) is None, "what came in since the start is live"
    assert reason(policy, 100.0, up=True) is None
    assert reason(policy, 101.0, up=False) == "uplink-down"
    assert reason(policy, 200.0, up=False) is None
    assert reason(policy, 300.0, up=True) == "uplink-up"
    assert reason(policy, 400.0, up=True) is None


def test_a_start_without_uplink_is_an_outage_whose_lane_is_there_already(policy: LanePolicy) -> None:
    assert [reason(policy, float(now_s), up=False) for now_s in range(0, 60, 5)] == [None] * 12
    assert reason(policy, 60.0, up=True) == "uplink-up"


def test_a_flapping_uplink_begins_no_lane_each_time(policy: LanePolicy) -> None:
    assert reason(policy, 0.0, up=True) is None
    begun = [now_s for now_s in range(1, 601) if reason(policy, float(now_s), up=now_s % 2 == 0)]
    assert 2 <= len(begun) <= 60
    assert all(later - earlier >= 10 for earlier, later in pairwise(begun))


def test_an_outage_shorter_than_a_lane_begins_none(policy: LanePolicy) -> None:
    assert reason(policy, 0.0, up=True) is None
    assert reason(policy, 100.0, up=False) == "uplink-down"
    assert reason(policy, 103.0, up=True) is None
    assert reason(policy, 106.0, up=False) is None
    assert reason(policy, 120.0, up=False) is None, "it went down again within that lane"


def test_a_lane_that_skipped_numbers_ends(policy: LanePolicy) -> None:
    assert reason(policy, 5.0, up=True, has_hole=True) is None, "it has just begun"
    assert reason(policy, 20.0, up=True, has_hole=True) == "commit-failed"


def test_a_link_slower_than_the_intake_makes_backlog_of_what_waits_too_long(policy: LanePolicy) -> None:
    assert reason(policy, 0.0, up=True) is None
    assert reason(policy, 100.0, up=True, live_age_s=30.0) is None
    assert reason(policy, 101.0, up=True, live_age_s=30.5) == "uplink-slow"
    assert reason(policy, 105.0, up=True, live_age_s=40.0) is None, "it has just begun"
    assert reason(policy, 140.0, up=False, live_age_s=40.0) == "uplink-down"


def session(policy: LanePolicy, now_s: float, *, behind: int = 0) -> str | None:
    """A session begins, and with it the lane if there is to be one."""
    found = policy.reason_at_session(now_s, backlog_lanes=behind)
    if found is not None:
        policy.begun_at_session(now_s)
    return found


def test_the_lane_of_an_outage_ends_as_a_session_begins_and_not_when_something_was_sent_in_it() -> None:
    policy = LanePolicy(KAFKA, 0.0)
    assert reason(policy, 1.0, up=True) is None
    assert reason(policy, 101.0, up=False) == "uplink-down"
    assert session(policy, 300.0) == "uplink-up"
    assert reason(policy, 300.5, up=False) is None, "nothing was heard of it yet"
    assert reason(policy, 301.0, up=True) is None, "the lane has begun already"
    assert session(policy, 350.0) is None, "a producer that is rebuilt is no outage"
    assert reason(policy, 400.0, up=False) == "uplink-down"


def test_after_a_start_without_uplink_the_first_session_begins_a_lane(policy: LanePolicy) -> None:
    assert session(policy, 5.0) is None, "what came in since the start is live"
    assert [reason(policy, float(now_s), up=False) for now_s in range(6, 60, 5)] == [None] * 11
    assert session(policy, 60.0) == "uplink-up"


def test_sessions_of_which_nothing_comes_begin_lanes_ever_more_rarely(policy: LanePolicy) -> None:
    """Brokers may answer everything but what is sent to them, for days: too few replicas are there."""
    begun = []
    for now_s in range(86_400):
        assert reason(policy, float(now_s), up=False) is None
        if now_s % 15 == 14 and session(policy, float(now_s)):
            begun.append(now_s)
    assert 2 <= len(begun) <= 14
    assert reason(policy, 86_400.0, up=True) == "uplink-up"
    assert reason(policy, 86_500.0, up=False) == "uplink-down"
    assert session(policy, 86_515.0) == "uplink-up", "it was up in between"


def test_an_outage_shorter_than_a_lane_ends_none_as_a_session_begins(policy: LanePolicy) -> None:
    assert reason(policy, 0.0, up=True) is None
    assert reason(policy, 100.0, up=False) == "uplink-down"
    assert session(policy, 103.0) is None
    assert session(policy, 120.0, behind=KAFKA.lanes_max - 1) is None, "no more lanes may be open"


def lane_turns(buffer: Buffer) -> LaneTurns:
    """Of a gateway whose lanes may begin at any time."""
    kafka = replace(KAFKA, lane_s_min=0.0)
    door = FrontDoor(buffer, route_table(Settings(GATEWAY, kafka)), GATEWAY, kafka, lambda: 1)
    return LaneTurns(door, buffer, LanePolicy(kafka, time.monotonic()))


@pytest.mark.parametrize("behind", [False, True])
async def test_a_session_and_a_look_at_the_same_time_begin_one_lane(tmp_path: Path, *, behind: bool) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        lanes = lane_turns(buffer)
        first = buffer.lane
        await lanes.compare(UplinkState(up=False))
        assert buffer.lane == first
        both = [lanes.session_begins(), lanes.compare(UplinkState(up=True))]
        await asyncio.gather(*(reversed(both) if behind else both))
        told = [json.loads(row.datum.payload) for row in await rows(buffer)]
        assert [(body["lane"], body["reason"]) for body in told] == [
            (first.name, "uplink-up"),
            (buffer.lane.name, "uplink-up"),
        ]
        await lanes.session_begins()
        assert buffer.lane.name == told[1]["lane"]


async def test_a_lane_that_the_disk_refuses_is_begun_at_the_next_look(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        lanes = lane_turns(buffer)
        first = buffer.lane
        await lanes.compare(UplinkState(up=False))
        await buffer.run(lambda file: file.connection.execute("PRAGMA query_only = 1").fetchone())
        await lanes.session_begins()
        assert buffer.lane == first
        await buffer.run(lambda file: file.connection.execute("PRAGMA query_only = 0").fetchone())
        await lanes.compare(UplinkState(up=True))
        assert buffer.lane != first


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.none() | st.booleans(), st.floats(0, 100), st.integers(0, 6)),
        min_size=1,
        max_size=60,
    )
)
def test_lanes_begin_within_their_bounds(steps: list[tuple[float, bool | None, float, int]]) -> None:
    """Where a step says neither up nor down, a session begins."""
    policy, now_s, began_s = LanePolicy(KAFKA, 0.0), 0.0, 0.0
    for passed_s, up, live_age_s, behind in steps:
        now_s += passed_s
        if up is None:
            begins = session(policy, now_s, behind=behind)
        else:
            begins = reason(policy, now_s, up=up, live_age_s=live_age_s, behind=behind)
        if begins:
            assert now_s - began_s >= KAFKA.lane_s_min
            assert behind + 1 < KAFKA.lanes_max
            began_s = now_s
