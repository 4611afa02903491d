"""How far gateways say they have come: which heartbeat counts."""

import json
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from spark.gateway_rows import GatewayRow, Span
from spark.gateway_states import (
    HEARTBEAT_TYPE,
    SET_ASIDE_TYPE,
    WAITING_MAX,
    GatewayEvent,
    GatewayState,
    GatewayStates,
)
from spark.sequence_runs import Edge

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
    order = (place, "gateway-events", 0, place)
    return GatewayEvent(HEARTBEAT_TYPE, "plant", "gw-1", buffer, order, clock, value)


def reads(topic: str) -> bool:
    return topic.startswith("device-")


def taken(*events: GatewayEvent, held: int = 0) -> GatewayStates:
    states = GatewayStates()
    states.take(events, {TOPIC: {0: held}}, reads)
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
    states.take([], {TOPIC: {0: 29}}, reads)
    assert (counted(states), states.rows()[0].waiting) == (2, 1)
    states.take([], {TOPIC: {0: 30}}, reads)
    assert (counted(states), states.rows()[0].waiting) == (3, 0)


def test_a_topic_that_was_never_read_is_missing_and_one_that_nobody_reads_is_not() -> None:
    assert counted(taken(event(1, body(offsets={"device-new": {"0": 1}})))) is None
    assert counted(taken(event(1, body(offsets={"device-thermo": {"1": 1}})))) is None
    assert counted(taken(event(1, body(offsets={"gateway-quarantine": {"0": 1}})))) == 1


def test_what_cannot_be_read_is_counted_and_changes_nothing() -> None:
    good = json.loads(body())
    broken = [
        None,
        b"",
        b"{",
        b"\xff",
        b"[]",
        body(offsets=[]),
        body(offsets={TOPIC: {"zero": 1}}),
        body(pending=[{"lane": "abc"}]),
        body(low_watermark="yesterday"),
        body(low_watermark="2026-03-14T12:00:00"),
        json.dumps({name: good[name] for name in good if name != "pending"}).encode(),
        b'{"offsets": ' + b"[" * 100_000,
    ]
    events = [event(place, value) for place, value in enumerate(broken, 2)]
    set_aside = events[0]._replace(type=SET_ASIDE_TYPE, value=b"[]")
    states = taken(event(1, body()), *events, set_aside)
    assert (states.malformed, counted(states)) == (len(broken) + 1, 1)


def test_a_gateway_without_a_clock_promises_nothing() -> None:
    (row,) = taken(event(1, body(low_watermark=None))).rows()
    assert (row.promises, row.low_watermark_us) == (False, None)


def test_a_former_buffer_is_kept_until_its_successor_tells_of_it() -> None:
    first, unsynced = event(1, body()), event(2, body(), "2233", error_us=2**63 - 1)
    states = taken(first, unsynced)
    assert [(row.buffer, row.until_us) for row in states.rows()] == [("0011", None), ("2233", None)]
    third = event(3, body(), "2233")
    states.take([third], {}, reads)
    until_us = third.edge.event_us + third.edge.time_error_us
    assert [(row.buffer, row.until_us) for row in states.rows()] == [("0011", until_us), ("2233", None)]
    # The card is put back.
    states.take([event(4, body())], {}, reads)
    assert [row.buffer for row in states.rows() if row.until_us is None] == ["0011"]
    # The other one was damaged, and what could be read of it is taken over.
    set_aside = event(5, b'{"device": null, "file": "x", "buffer": "2233", "rows": null}')
    states.take([set_aside._replace(type=SET_ASIDE_TYPE)], {}, reads)
    assert [row.buffer for row in states.rows()] == ["0011"]


def test_heartbeats_that_wait_are_bounded_and_old_ones_still_count_first() -> None:
    """The job is days behind: the oldest heartbeats are the first whose readings it has read."""
    states = taken(*(event(place, body(place)) for place in range(1, 5_000)))
    assert states.rows()[0].waiting <= WAITING_MAX
    found = set()
    for held in range(0, 5_000, 100):
        states.take([], {TOPIC: {0: held}}, reads)
        found.add(counted(states))
    assert len(found) > 10
    states.take([], {TOPIC: {0: 4_999}}, reads)
    assert counted(states) == 4_999


def stored_and_read(state: GatewayState) -> GatewayState:
    return msgspec.json.decode(msgspec.json.encode(state), type=GatewayState)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_any_split_into_batches_ends_the_same(beats: list[tuple[int, bool]], cuts: list[int]) -> None:
    events = [event(place, body(offset), "0011" if old else "2233") for place, (offset, old) in enumerate(beats)]
    states = GatewayStates()
    places = [0, *sorted(min(cut, len(events)) for cut in cuts), len(events)]
    for first, last in pairwise(places):
        # What `log` holds only grows; a state that was stored goes on where it was.
        states.take(events[first:last], {TOPIC: {0: first}}, reads)
        states = GatewayStates({key: stored_and_read(state) for key, state in states.gateways.items()})
    # The same once more: nothing changes.
    states.take(events, {TOPIC: {0: 15}}, reads)
    at_once = GatewayStates()
    at_once.take(events, {TOPIC: {0: 15}}, reads)
    before = max(places[:-1])
    if before <= 15:
        assert states.rows() == at_once.rows()
        assert states.boots() == at_once.boots()
    for row in at_once.rows():
        offsets = [
            offset for place, (offset, old) in enumerate(beats) if (row.buffer == "0011") == old and offset <= 15
        ]
        assert (row.heartbeat is not None) == bool(offsets)
