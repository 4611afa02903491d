"""The foundations of the tables' bench: its feed, its ledger and its arithmetic. The figures depend on them."""

import json
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given
from hypothesis import strategies as st

from demo.kafka_broker import Broker
from gateway.record_contract import HEADER_NAMES
from tests.bench.parts_spark_freshness import waited_in
from tests.bench.spark_feed import RESENT_RUN, Feed, FeedError, Place, fill, send, topics
from tests.bench.spark_job import Reported
from tests.bench.spark_kafka import slices
from tests.bench.spark_ledger import WINDOW_US, Ledger, Verdict
from tests.bench.spark_rounds import interleaved, percentile, ratio
from tests.bench.spark_scenario import DAY_S, Lane, Outage, Scenario, schedule
from tests.bench.spark_theodolite import groups_of, plain_group_sums, trend

SMALL = Scenario("device-small", 40, 300, gateways=4, late_gateways=1, late_arrives_s=60, resent_share=1.0)
AWAY = replace(SMALL, late_gateways=0, outage=Outage(1, 50, 150))

Record = tuple[Place, int, dict[str, str], bytes]
"""Place, offset, headers, value."""


def records(feed: Feed) -> Iterator[Record]:
    """Records that a consumer gets of a feed, in the order of its batches."""
    for sending in feed.sendings():
        for number, record in enumerate(DefaultRecordBatch(bytes(sending.batch._build()))):
            headers = {name: value.decode() for name, value in record.headers}
            yield sending.place, sending.first_offset + number, headers, record.value


def microseconds(rfc3339: str) -> int:
    return round(datetime.fromisoformat(rfc3339).timestamp() * 1e6)


# -- the ledger ---------------------------------------------------------------------------------


def test_readings_that_are_lost_doubled_or_wrong_are_told_apart() -> None:
    ledger = Ledger(("t", "u"))
    for event_us in (0, 1, WINDOW_US):
        ledger.add("a", event_us, (150, 2))
    right = [("a", "t", 0, 2, 300), ("a", "u", 0, 2, 4), ("a", "t", WINDOW_US, 1, 150), ("a", "u", WINDOW_US, 1, 2)]
    assert sorted(ledger.rows()) == sorted(right)
    assert ledger.judge(right) == Verdict(expected=3, lost=0, doubled=0, wrong=0)
    assert ledger.judge(right[2:]) == Verdict(3, lost=2, doubled=0, wrong=2)
    assert ledger.judge([*right[1:], ("a", "t", 0, 3, 450)]) == Verdict(3, lost=0, doubled=1, wrong=1)
    assert ledger.judge([*right[1:], ("a", "t", 0, 2, 301)]) == Verdict(3, lost=0, doubled=0, wrong=1)
    assert ledger.judge([*right, ("b", "t", 0, 1, 150)]) == Verdict(3, lost=0, doubled=1, wrong=1)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5 * WINDOW_US), st.integers(-9, 9)), min_size=1))
def test_readings_that_a_table_lacks_are_the_lost_ones(readings: list[tuple[str, int, int]]) -> None:
    whole, part = Ledger(("t",)), Ledger(("t",))
    for number, (device, event_us, value) in enumerate(readings):
        whole.add(device, event_us, (value,))
        if number % 2:
            part.add(device, event_us, (value,))
    missing = len(readings) - len(readings) // 2
    verdict = whole.judge(part.rows())
    assert (verdict.expected, verdict.lost, verdict.doubled) == (len(readings), missing, 0)
    assert part.judge(whole.rows()).doubled == missing


# -- the scenario -------------------------------------------------------------------------------


def test_a_backlog_of_days_arrives_evenly_after_the_outage() -> None:
    (lane,) = SMALL.lanes(3)
    assert lane == Lane(-3 * DAY_S, -3 * DAY_S + 300, 60, 300)
    assert lane.arrival_s(-3 * DAY_S + 150) == 180
    assert [lane.pending_from_s(at_s) for at_s in (0, 180, 300)] == [-3 * DAY_S, -3 * DAY_S + 150, None]
    assert SMALL.lanes(2) == (Lane(0, 300, 0, 300),)
    assert SMALL.lanes(2)[0].pending_from_s(10) is None


def test_a_backlog_of_minutes_comes_in_beside_live_readings() -> None:
    assert AWAY.lanes(0) == (Lane(0, 50, 0, 50), Lane(50, 150, 150, 175), Lane(150, 300, 150, 300))
    away = [due for due in schedule(AWAY) if due.gateway == 0]
    assert not [due for due in away if 50 <= due.at_s < 150], "neither readings nor heartbeats"
    assert {due.lane for due in away if 150 < due.at_s < 175} == {None, 1, 2}


@pytest.mark.parametrize("scenario", [SMALL, AWAY])
def test_each_device_measures_at_each_tick_and_all_of_it_arrives_in_order(scenario: Scenario) -> None:
    dues = list(schedule(scenario))
    assert all(one.at_s <= other.at_s for one, other in pairwise(dues))
    readings = sorted((due.gateway, due.number) for due in dues if due.lane is not None)
    assert readings == [(gateway, tick) for gateway in range(4) for tick in range(30)]
    devices = [device for gateway in range(4) for device in scenario.devices_of(gateway)]
    assert devices == list(range(40))


# -- the feed -----------------------------------------------------------------------------------


def test_a_feed_is_the_same_each_time_and_another_by_another_seed() -> None:
    one, same, other = (
        [bytes(sending.batch._build())[8:27] + b"".join(sending.batch.records) for sending in Feed(each).sendings()]
        for each in (SMALL, SMALL, replace(SMALL, seed=2))
    )
    assert [each[19:] for each in one] == [each[19:] for each in same]
    assert one != other


@pytest.mark.parametrize("scenario", [SMALL, AWAY])
def test_the_ledger_has_each_reading_once_and_offsets_have_its_time(scenario: Scenario) -> None:
    feed = Feed(scenario)
    counted, seen = Ledger(scenario.metrics), set()
    number = 0
    for place, offset, headers, value in records(feed):
        assert feed.event_us[place][offset] == microseconds(headers["ce_time"])
        if headers["ce_type"] == "sluice.reading" and headers["ce_id"] not in seen:
            seen.add(headers["ce_id"])
            values = [int(100 * each) for each in json.loads(value, parse_float=Decimal).values()]
            counted.add(headers["ce_subject"].split("/")[1], microseconds(headers["ce_time"]), values)
        number += 1
    assert feed.ledger is not None
    assert feed.ledger.judge(counted.rows()) == Verdict(scenario.readings, lost=0, doubled=0, wrong=0)
    heartbeats = sum(due.lane is None for due in schedule(scenario))
    assert feed.resent >= RESENT_RUN / 2
    assert number == feed.records == scenario.readings + feed.resent + heartbeats


@pytest.mark.parametrize("scenario", [SMALL, AWAY])
def test_what_a_heartbeat_says_is_in_kafka_is_there(scenario: Scenario) -> None:
    """Before its low watermark nothing of its gateway comes any more, beyond the offsets that it names."""
    feed = Feed(scenario)
    told: list[tuple[str, dict[str, Any]]] = []
    readings: dict[tuple[str, Place], list[tuple[int, int]]] = defaultdict(list)
    seen = set()
    for place, offset, headers, value in records(feed):
        if headers["ce_type"] == "sluice.reading":
            if headers["ce_id"] not in seen:
                readings[headers["ce_source"], place].append((offset, microseconds(headers["ce_time"])))
            seen.add(headers["ce_id"])
        else:
            told.append((headers["ce_source"], json.loads(value)))
    assert any(body["pending"] for _, body in told)
    for source, body in told:
        low_us = microseconds(body["low_watermark"])
        for (gateway, (topic, partition)), of_gateway in readings.items():
            if gateway == source:
                end = body["offsets"].get(topic, {}).get(str(partition), 0)
                assert all(event_us >= low_us for offset, event_us in of_gateway if offset >= end)


@pytest.mark.kafka
async def test_kafka_has_what_was_fed_with_all_headers_in_order(kafka: Broker) -> None:
    scenario = replace(SMALL, topic="device-bench-spark")
    async with topics(kafka.bootstrap, scenario.partitions_of):
        feed = await fill(kafka.bootstrap, scenario)
        consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, enable_auto_commit=False)
        async with consumer:
            consumer.assign([TopicPartition(*place) for place in feed.ends])
            await consumer.seek_to_beginning()
            fed: list[Any] = []
            while len(fed) < feed.records:
                fed += [each for found in (await consumer.getmany(timeout_ms=5_000)).values() for each in found]
        assert {(each.topic, each.partition, each.offset) for each in fed} == {
            (*place, offset) for place, end in feed.ends.items() for offset in range(end)
        }
        assert {each.timestamp_type for each in fed} == {1}, "LogAppendTime"
        names = {tuple(name for name, _ in each.headers) for each in fed}
        assert names == {HEADER_NAMES[:14], HEADER_NAMES[:16]}
        with pytest.raises(FeedError, match="something else writes to this topic"):
            await send(kafka.bootstrap, Feed(scenario).sendings())


# -- what is made of it -------------------------------------------------------------------------


@given(st.dictionaries(st.tuples(st.just("t"), st.integers(0, 3)), st.integers(0, 1_000)), st.integers(1, 9))
def test_slices_are_the_whole_without_overlap(ends: dict[Place, int], count: int) -> None:
    parts = slices(ends, count)
    assert len(parts) == count
    for place, end in ends.items():
        taken = [offset for begin, until in parts for offset in range(begin[place], until[place])]
        assert taken == list(range(end))


def test_a_reading_has_waited_until_the_first_report_that_has_it() -> None:
    place = ("t", 0)
    times = array("q", [1_000_000, 2_000_000, 3_000_000, 4_000_000])
    reports = [Reported(5.0, {}), Reported(6.0, {place: 2}), Reported(9.0, {place: 3})]
    assert list(waited_in(times, place, reports, (1.0, 4.0))) == [5.0, 4.0, 6.0]
    assert list(waited_in(times, place, reports, (2.0, 9.0))) == [4.0, 6.0, inf]
    assert list(waited_in(times, place, [], (2.0, 3.0))) == [inf]


@given(st.lists(st.integers(), min_size=1), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values: list[int], share: float) -> None:
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_ways_take_turns_and_the_first_rounds_do_not_count() -> None:
    done: list[tuple[str, int]] = []
    ways = {name: lambda number, name=name: done.append((name, number)) for name in "ab"}
    seconds = interleaved(ways, range(5, 8), warm=1)
    assert done == [("a", 5), ("b", 5), ("b", 6), ("a", 6), ("a", 7), ("b", 7)]
    assert {name: len(each) for name, each in seconds.items()} == {"a": 2, "b": 2}


def test_a_slow_round_is_slow_for_both() -> None:
    assert ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0


@given(st.integers(-99, 99), st.integers(-99, 99), st.sets(st.integers(0, 999), min_size=2))
def test_a_trend_is_the_slope_of_a_line(slope: int, height: int, places: set[int]) -> None:
    assert trend((x, height + slope * x) for x in places) == slope


def test_a_sensor_is_in_one_group_of_each_level() -> None:
    assert groups_of(0, 2) == ["group_lvl_0_0", "group_lvl_1_0"]
    assert groups_of(15, 2) == ["group_lvl_0_0", "group_lvl_1_3"]
    rows = [(f"d{sensor:06d}", "valueInW", 0, 1, sensor) for sensor in range(16)]
    sums = plain_group_sums(rows, 2)
    assert len(sums) == 5
    assert {("group_lvl_0_0", 0, 16, sum(range(16))), ("group_lvl_1_3", 0, 4, 12 + 13 + 14 + 15)} <= sums
