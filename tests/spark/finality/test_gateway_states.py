"""Which heartbeats count, and how far gateways have come by them."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.record_contract import HEARTBEAT_TYPE, TIME_ERROR_UNKNOWN_US
from spark.decode.record_types import SET_ASIDE_TYPE, STATE_TYPE
from spark.finality.box_figures import BoxFigures, box_figures
from spark.finality.gateway_rows import GatewayRow, Span
from spark.finality.gateway_states import BOXES_MAX, WAITING_MAX, GatewayEvent, GatewayState, GatewayStates, fault_of
from spark.log.edge_times import clocks
from spark.log.edges import Edge
from tests.support import hostile

TOPIC = "device-thermo"
NOON_US = 1_773_489_600_000_000


def body(offset: int = 0, **changes: object) -> bytes:
    said: dict[str, Any] = {
        "offsets": {TOPIC: {"0": offset}} if offset else {},
        "pending": [],
        "quarantined": [],
        "low_watermark": "2026-03-14T12:00:00.000000Z",
        "depth_rows": 7,
        "oldest_age_s": 0.25,
        "buffer_bytes": 4096,
        "counts": {"readings": 12},
    }
    return json.dumps(said | changes).encode()


def event(place: int, value: bytes | None, buffer: str = "0011", error_us: int = 500) -> GatewayEvent:
    clock = Edge(NOON_US + place * 10_000_000, error_us, "synced", "gw-1", "boot-1", place * 10_000_000, None)
    order = (clock.event_us, "gateway-events", 0, place)
    return GatewayEvent(HEARTBEAT_TYPE, "plant", "gw-1", buffer, order, clock, value)


def taken(*events: GatewayEvent, held: int = 0) -> GatewayStates:
    states = GatewayStates()
    states.take(events, {TOPIC: {0: held}})
    return states


def counted(states: GatewayStates) -> int | None:
    """The place of the heartbeat that counts."""
    (row,) = states.rows()
    return None if row.heartbeat is None else (row.heartbeat.event_us - NOON_US) // 10_000_000


def test_a_heartbeat_says_what_still_waits() -> None:
    span = {"from": "2026-03-14T11:00:00.000000Z", "to": "2026-03-14T11:30:00.000001Z"}
    pending = [{"lane": "abc", "rows": 120, **span}, {"lane": "def", "rows": 1, "from": None, "to": None}]
    states = taken(event(1, body(pending=pending, quarantined=[{"count": 3, **span}])))
    hour_us = 3_600_000_000
    from_us, to_us = NOON_US - hour_us, NOON_US - hour_us // 2 + 1
    assert states.rows() == [
        GatewayRow(
            *("plant", "gw-1", "0011", event(1, None).edge, True, NOON_US),
            (Span("abc", 120, from_us, to_us), Span("def", 1, None, None)),
            (Span(None, 3, from_us, to_us),),
            depth_rows=7,
            oldest_age_ms=250,
        )
    ]


def test_a_heartbeat_counts_once_all_that_it_calls_acknowledged_was_read() -> None:
    states = taken(event(1, body(10)), event(2, body(20)), event(3, body(30)), held=10)
    assert (counted(states), states.rows()[0].waiting) == (1, 2)
    states.take([], {TOPIC: {0: 29}})
    assert (counted(states), states.rows()[0].waiting) == (2, 1)
    states.take([], {TOPIC: {0: 30}})
    assert (counted(states), states.rows()[0].waiting) == (3, 0)


def test_a_topic_that_was_never_read_is_missing_and_a_quarantine_is_not() -> None:
    assert counted(taken(event(1, body(offsets={"device-new": {"0": 1}})))) is None
    assert counted(taken(event(1, body(offsets={"device-thermo": {"1": 1}})))) is None
    assert counted(taken(event(1, body(offsets={"ex-temp": {"0": 1}})))) is None
    assert counted(taken(event(1, body(offsets={"gateway-quarantine": {"0": 1}})))) == 1
    assert counted(taken(event(1, body(offsets={"aside": {"0": 1}}, quarantine_topic="aside")))) == 1
    assert counted(taken(event(1, body(offsets={"aside": {"0": 1}})))) is None


def test_topics_that_the_job_leaves_out_are_told_as_long_as_it_does() -> None:
    offsets = {topic: {"0": 1} for topic in (TOPIC, "ex-temp", "aside", "gone", "gateway-quarantine")}
    states = taken(event(1, body(1)), event(2, body(offsets=offsets, quarantine_topic="aside")), held=1)
    assert states.topics() == {TOPIC, "ex-temp", "gone"}
    held = {TOPIC: {0: 1}}

    def unread(reads: Callable[[str], bool] | None, *, gone: bool = True) -> tuple[str, ...]:
        states.take([], held, reads, {"gone"} if gone else ())
        (row,) = states.rows()
        return row.unread

    assert unread(lambda topic: topic == TOPIC, gone=False) == ("ex-temp", "gone")
    assert unread(lambda topic: topic == TOPIC) == ("ex-temp",)
    # Whoever does not read Kafka says nothing of it.
    assert unread(None) == ("ex-temp",)
    assert (counted(states), states.rows()[0].waiting) == (1, 1)
    assert unread(lambda _: True) == ()
    states.take([], held | {"ex-temp": {0: 1}}, lambda _: True, {"gone"})
    assert (counted(states), states.rows()[0].waiting) == (2, 0)
    assert stored_and_read(states.gateways["plant", "gw-1"]) == states.gateways["plant", "gw-1"]


def test_states_of_a_program_that_knew_no_other_quarantine_are_read() -> None:
    state = taken(event(1, body(5)), event(2, body(9)), held=5).gateways["plant", "gw-1"]
    old = json.loads(msgspec.json.encode(state))
    for buffer in old["buffers"].values():
        del buffer["unread"]
        for told in (buffer["counted"], *buffer["waiting"]):
            del told["quarantine_topic"]
    del old["boxes"]
    assert msgspec.json.decode(json.dumps(old), type=GatewayState) == state


def test_what_cannot_be_read_has_a_fault_and_changes_nothing() -> None:
    good = json.loads(body())
    broken = {
        None: "it has no value",
        b"\xff": "it is not what a gateway tells",
        b"[]": "it is not what a gateway tells",
        body(offsets={TOPIC: {"zero": 1}}): "it is not what a gateway tells",
        body(pending=[{"lane": "abc"}]): "it is not what a gateway tells",
        body(low_watermark="2026-03-14T12:00:00"): "it is not what a gateway tells",
        body(low_watermark="0001-01-01T00:00:00+23:59"): "a time in it lies outside the years 2 to 9999",
        json.dumps({name: good[name] for name in good if name != "pending"}).encode(): "it is not what a gateway tells",
        b'{"unknown": ' + b"[" * 1_100 + b"]" * 1_100 + b"," + body()[1:]: "more than 32 levels of JSON",
        body(note='[{"' * 50): "",
    }
    for value, fault in broken.items():
        told = event(2, value)
        states = taken(event(1, body()), told)
        assert (fault_of(told) or "").startswith(fault), value
        assert counted(states) == (1 if fault else 2)
    set_aside = event(2, b"[]")._replace(type=SET_ASIDE_TYPE)
    assert fault_of(set_aside) is not None
    assert counted(taken(event(1, body()), set_aside)) == 1


def test_a_heartbeat_promises_nothing_that_lies_ahead_of_kafkas_own_time() -> None:
    def promised(low_watermark: str) -> str | None:
        return fault_of(event(0, body(low_watermark=low_watermark)))

    # Kafka took it in at noon. Its clock and the gateway's may differ a little.
    assert promised("2026-03-14T12:01:00.000000Z") is None
    assert promised("2026-03-14T12:01:00.000001Z") == "its low_watermark lies more than 60 s after Kafka took it in"
    assert fault_of(event(0, body())._replace(edge=event(6, None).edge)) is None
    ahead = event(0, body())._replace(edge=event(7, None).edge)
    assert "its ce_time, less its ce_timeerror" in str(fault_of(ahead))
    # The bound says that it may be right; a clock that is not known says nothing, and one of long ago nothing wrong.
    wide = ahead.edge._replace(time_error_us=3_600_000_000)
    unsynced = ahead.edge._replace(time_error_us=2**63 - 1, event_us=NOON_US + 10**15)
    in_2000 = unsynced._replace(event_us=946_684_800_000_000)
    assert [fault_of(ahead._replace(edge=edge)) for edge in (wide, unsynced, in_2000)] == [None] * 3


@pytest.mark.parametrize("kind", [HEARTBEAT_TYPE, SET_ASIDE_TYPE, STATE_TYPE])
def test_hostile_events_of_a_gateway_leave_states_that_tables_can_hold(kind: str) -> None:
    states = GatewayStates()
    states.take([event(0, body(), buffer) for buffer in ("00" * 8, "11" * 8)], {})
    others = hostile.STATE if kind == STATE_TYPE else hostile.SET_ASIDE
    bodies = hostile.heartbeats() if kind == HEARTBEAT_TYPE else hostile.documents(others)
    for place, (name, value) in enumerate(bodies):
        for error_us in (500, 2**62, 2**63 - 2, 2**63 - 1):
            for buffer in ("00" * 8, "11" * 8):
                states.take([event(place, value, buffer, error_us)._replace(type=kind)], {TOPIC: {0: 2**62}})
        for row in states.rows():
            for number in numbers_in((row, shown(states, row.buffer))):
                assert -(2**63) <= number < 2**63, name
    assert {key: stored_and_read(state) for key, state in states.gateways.items()} == states.gateways


def shown(states: GatewayStates, buffer: str) -> BoxFigures:
    """The columns of a box, by the clock as it is known."""
    return box_figures("plant", states.box("plant", "gw-1", buffer), clocks([], states.boots()))


def state_event(place: int, lane: int, *, booted: int = 0, buffer: str = "0011", **changes: object) -> GatewayEvent:
    """A state that comes to Kafka at `place`, and was made `booted` microseconds after the boot."""
    told = event(place, json.dumps({**hostile.STATE, "lane_number": lane, **changes}).encode(), buffer)
    return told._replace(type=STATE_TYPE, edge=told.edge._replace(boot_time_us=booted))


def test_a_state_becomes_columns_and_changes_nothing_else() -> None:
    states = taken(event(1, body()))
    before = states.rows()
    assert shown(states, "0011") == BoxFigures()
    states.take([state_event(2, 1, booted=7_000_000)], {})
    assert states.rows() == before
    at_us = event(2, None).edge.event_us
    assert shown(states, "0011") == BoxFigures(
        state_us=at_us,
        version="0.1.0",
        image="1.1",
        slot="a",
        update_to="1.1",
        update_result="good",
        fleet_serial=7,
        fleet_wish="1" * 16,
        fleet_result="went-back",
        fleet_reason="no reading came in",
        settings="0" * 16,
        heartbeat_s=10.0,
        booted_us=at_us - 7_000_000,
        uplink_since_us=at_us - 5_000_000,
        clock_synced=True,
        clock_source="kernel",
        clock_error_us=500,
        disk_free_bytes=1,
        disk_bytes=2,
        disk_written_bytes_per_day=3,
        spared=4,
        memory_free_bytes=1,
        memory_bytes=2,
        addresses=["192.0.2.7"],
        ports=["/dev/ttyUSB0 open"],
        devices_known=2,
        devices_heard=1,
        devices_silent=1,
        silent=["42"],
        level="warn",
        conditions=["device-silent"],
    )
    # A gateway of another release tells less.
    states.take([state_event(3, 2, booted=8_000_000, image=None, update=None, uplink_s=None)], {})
    assert shown(states, "0011").uplink_since_us is None
    least = json.dumps({name: hostile.STATE[name] for name in ("version", "conditions")} | {"lane_number": 3}).encode()
    states.take([state_event(4, 3, booted=9_000_000)._replace(value=least)], {})
    assert shown(states, "0011").version == "0.1.0"
    assert shown(states, "0011").clock_synced is None
    assert all(stored_and_read(state) == state for state in states.gateways.values())


@given(
    st.lists(st.tuples(st.sampled_from(["later", "start", "restore"]), st.booleans()), max_size=12),
    st.randoms(use_true_random=False),
    st.integers(0, 12),
)
def test_the_newest_state_counts_in_whatever_order_states_come(
    steps: list[tuple[str, bool]], rng: Random, cut: int
) -> None:
    # Where lanes begin again at a lower number, only times tell, so all clocks are known.
    is_restored = any(step == "restore" for step, _ in steps)
    events, boot, lane, is_known = [], 0, 10, True
    for place, (step, has_clock) in enumerate(steps):
        if step != "later":
            boot, lane, is_known = boot + 1, 1 if step == "restore" else lane + 1, has_clock or is_restored
        told = state_event(place, lane, booted=place, version=str(place))
        edge = told.edge._replace(gateway_boot=f"boot-{boot}")
        unknown = edge._replace(event_us=NOON_US - place, time_error_us=TIME_ERROR_UNKNOWN_US)
        events.append(told._replace(edge=edge if is_known else unknown))
    come = [
        each._replace(order=event(50 + place, None).order) for place, each in enumerate(rng.sample(events, len(events)))
    ]
    states = taken(event(20, body()))
    for some in (come[:cut], come[cut:], come):
        states.take(some, {})
    assert shown(states, "0011").version == (str(len(steps) - 1) if steps else None)


def test_a_state_from_after_kafka_took_it_in_is_a_reject() -> None:
    told = state_event(1, 1)
    assert fault_of(told) is None
    ahead = told._replace(edge=told.edge._replace(event_us=told.order[0] + 61_000_000))
    assert "its ce_time, less its ce_timeerror" in str(fault_of(ahead))


def test_states_of_swapped_cards_are_bounded() -> None:
    events = [state_event(place, 1, buffer=f"{place:016x}") for place in range(3 * BOXES_MAX)]
    (gateway,) = taken(*events).gateways.values()
    assert [*gateway.boxes] == [f"{place:016x}" for place in range(2 * BOXES_MAX, 3 * BOXES_MAX)]


def numbers_in(found: object) -> Iterator[int]:
    if isinstance(found, tuple):
        for each in found:
            yield from numbers_in(each)
    elif isinstance(found, int):
        yield found


def test_a_gateway_without_a_clock_promises_nothing() -> None:
    (row,) = taken(event(1, body(low_watermark=None))).rows()
    assert (row.promises, row.low_watermark_us) == (False, None)


def test_a_former_buffer_is_kept_until_its_successor_tells_of_it() -> None:
    first, unsynced = event(1, body()), event(2, body(), "22" * 8, error_us=2**63 - 1)
    states = taken(first, unsynced)
    assert [(row.buffer, row.until_us) for row in states.rows()] == [("0011", None), ("22" * 8, None)]
    assert [row.buffer for row in states.rows() if row.is_present] == ["22" * 8]
    third = event(3, body(), "22" * 8)
    states.take([third], {})
    until_us = third.edge.event_us + third.edge.time_error_us
    assert [(row.buffer, row.until_us) for row in states.rows()] == [("0011", until_us), ("22" * 8, None)]
    # The card is put back.
    states.take([event(4, body())], {})
    assert [row.buffer for row in states.rows() if row.until_us is None] == ["0011"]
    # The other one was damaged, and its readable rows are taken over.
    set_aside = event(5, json.dumps({"device": None, "file": "x", "buffer": "22" * 8, "rows": None}).encode())
    states.take([set_aside._replace(type=SET_ASIDE_TYPE)], {})
    assert [row.buffer for row in states.rows()] == ["0011"]


def test_heartbeats_that_wait_are_bounded_and_old_ones_still_count_first() -> None:
    """The job is days behind: the oldest heartbeats are the first whose readings it has read."""
    states = taken(*(event(place, body(place)) for place in range(1, 5_000)))
    assert states.rows()[0].waiting <= WAITING_MAX
    found = set()
    for held in range(0, 5_000, 100):
        states.take([], {TOPIC: {0: held}})
        found.add(counted(states))
    assert len(found) > 10
    states.take([], {TOPIC: {0: 4_999}})
    assert counted(states) == 4_999


def stored_and_read(state: GatewayState) -> GatewayState:
    return msgspec.json.decode(msgspec.json.encode(state), type=GatewayState)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_any_split_into_batches_ends_the_same(beats: list[tuple[int, bool]], cuts: list[int]) -> None:
    events = [event(place, body(offset), "0011" if old else "22" * 8) for place, (offset, old) in enumerate(beats)]
    states = GatewayStates()
    places = [0, *sorted(min(cut, len(events)) for cut in cuts), len(events)]
    for first, last in pairwise(places):
        # The content of `log` only grows. A stored state goes on where it was.
        states.take(events[first:last], {TOPIC: {0: first}})
        states = GatewayStates({key: stored_and_read(state) for key, state in states.gateways.items()})
    # The same once more: nothing changes.
    states.take(events, {TOPIC: {0: 15}})
    at_once = GatewayStates()
    at_once.take(events, {TOPIC: {0: 15}})
    before = max(places[:-1])
    if before <= 15:
        assert states.rows() == at_once.rows()
        assert states.boots() == at_once.boots()
    for row in at_once.rows():
        offsets = [
            offset for place, (offset, old) in enumerate(beats) if (row.buffer == "0011") == old and offset <= 15
        ]
        assert (row.heartbeat is not None) == bool(offsets)
