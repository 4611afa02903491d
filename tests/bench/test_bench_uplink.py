"""The foundations of the uplink's bench: its readings and its counts. The figures depend on them."""

import json
from itertools import chain
from typing import Any, NamedTuple

import pytest
from aiokafka import ConsumerRecord
from aiokafka.record.default_records import DefaultRecordBatch

from demo.kafka_broker import Broker
from tests.bench.parts_uplink_consumers import Fleet, check, simulate
from tests.bench.parts_uplink_recovery import CALM_S_MAX, Suffered, recovered_s
from tests.bench.parts_uplink_scale import Site
from tests.bench.parts_uplink_site import COUNTED, DEVICES, FILL_READINGS, INTERVAL_US, STREAM, readings
from tests.bench.parts_uplink_storm import histogram, per_second
from tests.bench.plain_consumer import Read
from tests.bench.processes import NotMeasuredError


@pytest.mark.parametrize("stream", [STREAM, COUNTED])
def test_a_backlog_is_of_40_byte_readings_of_100_devices_once_a_second(stream: str) -> None:
    commits = list(readings(2 * FILL_READINGS + 1, stream, begin_us=7))
    assert [len(commit) for commit in commits] == [FILL_READINGS, FILL_READINGS, 1]
    made = list(chain.from_iterable(commits))
    assert {len(reading.datum.payload) for reading in made} == {40}
    assert all(json.loads(reading.datum.payload) for reading in made)
    assert {reading.topic for reading in made} == {f"device/d{device:03d}/{stream}" for device in range(DEVICES)}
    times = [reading.datum.received_us for reading in made]
    assert times == sorted(times)
    assert len(set(times)) == len(times), "no two readings share a time: that would compress as no sensors do"
    one = [reading.datum.received_us for reading in made if reading.topic == made[0].topic]
    assert one[-1] - one[0] == pytest.approx((len(one) - 1) * INTERVAL_US, abs=INTERVAL_US / DEVICES)


def test_values_are_noise_and_the_same_in_every_run() -> None:
    payloads = [reading.datum.payload for commit in readings(1_000, STREAM, 0) for reading in commit]
    assert len(set(payloads)) == len(payloads)
    assert payloads == [reading.datum.payload for commit in readings(1_000, STREAM, 0) for reading in commit]


def record(partition: int, received: str, appended_s: float) -> ConsumerRecord:
    headers = (("ce_receivedtime", received.encode()),)
    return ConsumerRecord("t", partition, 0, int(appended_s * 1000), 1, b"k", b"v", 0, 1, 1, headers)


def test_a_cluster_is_back_when_its_last_partition_takes_new_readings() -> None:
    records = [
        # Taken in before the path was back, and sent after it: does not count.
        record(0, "1970-01-01T00:00:09.999999Z", 10.5),
        record(0, "1970-01-01T00:00:10.250000Z", 11.0),
        record(1, "1970-01-01T00:00:10.250000Z", 13.5),
        record(1, "1970-01-01T00:00:12.000000Z", 12.5),
    ]
    assert recovered_s(records, 10.0) == pytest.approx(2.5)
    assert recovered_s(records, 11.0) == float("inf"), "partition 0 has nothing new"
    assert recovered_s([], 10.0) == float("inf")


class Record(NamedTuple):
    """A record of a simulated gateway."""

    partition: int
    value: dict[str, Any]
    headers: dict[str, bytes]


def test_a_simulated_gateway_sends_each_sensors_readings_to_one_partition_as_the_sensor_made_them() -> None:
    site, found = Site(7, "device-thermo", 3, 20), dict[str, list[Record]]()
    for round_ in range(4):
        for partition, batch in site.batches(round_).items():
            for each in DefaultRecordBatch(batch._build()):
                told = Record(partition, json.loads(each.value), dict(each.headers))
                found.setdefault(each.key.decode(), []).append(told)
    assert found.keys() == {f"site-007/m{number:03d}" for number in range(1, 21)}
    for records in found.values():
        assert len({each.partition for each in records}) == 1
        assert [each.value["seq"] for each in records] == [0, 1, 2, 3]
        assert [each.headers["ce_devicesequence"] for each in records] == [b"0", b"1", b"2", b"3"]
    sequences = [int(each.headers["ce_lanesequence"]) for records in found.values() for each in records]
    assert sorted(sequences) == list(range(80))


@pytest.mark.kafka
async def test_consumers_share_what_simulated_gateways_send_and_catch_up_after_a_kill(kafka: Broker) -> None:
    results = await simulate(kafka.bootstrap, Fleet(3, 40, 6, 0.002, partitions=(2,)))
    assert [each.name for each in results] == [
        *(f"consumers_read_per_s_2_partitions_{count}_consumers" for count in (1, 2)),
        "consumers_catch_up_per_s",
    ]


@pytest.mark.parametrize(
    "found",
    [
        [Read(9, 2, 0, 0.0, 1.0)],
        [Read(5, 2, 0, 0.0, 1.0), Read(5, 1, 0, 0.0, 1.0)],
        [Read(10, 2, 1, 0.0, 1.0)],
    ],
    ids=["one is missing", "two consumers have one device", "out of order"],
)
def test_a_simulation_fails_if_consumers_read_anything_else(found: list[Read]) -> None:
    check([Read(5, 1, 0, 0.0, 1.0), Read(5, 1, 0, 0.0, 1.0)], 10, 2)
    with pytest.raises(NotMeasuredError):
        check(found, 10, 2)


def test_attempts_by_second_as_bars() -> None:
    by_second = per_second([9.9, 10.0, 10.9, 12.5, 13.0], begin=10.0, end=13.0)
    assert by_second == [2, 0, 1]
    assert histogram(by_second, back=2) == ["  -2 s    2 ##", "  -1 s    0", "  +0 s    1 #"]
    assert len(histogram([1_000], 0)[0]) < 80


def test_a_fault_that_has_no_end_is_no_fault_that_was_not_measured() -> None:
    result = Suffered("dns-dead", (0.5, float("inf"), 1.0)).result()
    assert (result.name, result.value) == ("recovery_s_dns_dead", 1.0)
    assert Suffered("dns-dead", (float("inf"),)).result().value == CALM_S_MAX
