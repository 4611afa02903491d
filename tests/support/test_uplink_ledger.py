"""The ledger of the uplink's tests finds each kind of fault, and none where there is none."""

import json

import pytest
from aiokafka import ConsumerRecord
from hypothesis import given
from hypothesis import strategies as st

from tests.support.uplink_ledger import Delivery, Place, Reading, acknowledged_in, audit, in_kafka


def reading(sequence: int, device: str = "m001", boot: str = "1-a") -> Reading:
    return Reading(device, boot, sequence)


def delivery(of: Reading, lane_sequence: int, offset: int, lane: str = "l1", partition: int = 0) -> Delivery:
    return Delivery(of, f"b/{lane}/{lane_sequence}", lane, lane_sequence, Place("thermo", partition, offset))


STORED = [reading(sequence) for sequence in range(4)]
FLAWLESS = [delivery(of, number, number) for number, of in enumerate(STORED)]


def test_flawless_is_flawless() -> None:
    found = audit(set(STORED), FLAWLESS)
    assert (found.acknowledged, found.delivered, found.repeated, found.faults) == (4, 4, 0, ())


def test_an_acknowledged_reading_that_is_not_in_kafka_is_missing() -> None:
    assert [text[:49] for text in audit(set(STORED), FLAWLESS[:2]).missing] == [
        "Reading(device='m001', boot='1-a', sequence=2) wa",
        "Reading(device='m001', boot='1-a', sequence=3) wa",
    ]
    # Another boot's reading with the same number is another reading.
    assert len(audit({*STORED, reading(0, boot="2-b")}, FLAWLESS).missing) == 1


def test_what_was_stored_without_its_acknowledgement_is_no_fault() -> None:
    assert audit(set(STORED[:2]), FLAWLESS).faults == ()


def test_a_resend_with_its_id_is_no_fault_wherever_it_stands() -> None:
    again = [*FLAWLESS, delivery(STORED[1], 1, 4), delivery(STORED[2], 2, 5)]
    found = audit(set(STORED), again)
    assert (found.repeated, found.faults) == (2, ())


def test_a_reading_under_two_ids_is_a_fault() -> None:
    again = [*FLAWLESS, delivery(STORED[3], 4, 4)]
    found = audit(set(STORED), again)
    assert len(found.under_two_ids) == 1
    other_lane = audit(set(STORED), [*FLAWLESS, delivery(STORED[0], 0, 4, lane="l2")])
    assert len(other_lane.under_two_ids) == 1


def test_two_readings_under_one_id_are_a_fault() -> None:
    found = audit(set(STORED), [*FLAWLESS, delivery(reading(9), 3, 4)])
    assert len(found.under_one_id) == 1


def test_order_is_judged_within_a_lane_by_the_lane_and_by_the_device() -> None:
    exchanged = [delivery(STORED[0], 0, 0), delivery(STORED[2], 2, 1), delivery(STORED[1], 1, 2)]
    assert len(audit({STORED[0]}, exchanged).out_of_order) == 1
    # In the lane's order, but not in the sensor's: the gateway took them in wrongly.
    taken_in_wrongly = [delivery(STORED[0], 0, 0), delivery(STORED[2], 1, 1), delivery(STORED[1], 2, 2)]
    assert len(audit({STORED[0]}, taken_in_wrongly).out_of_order) == 1
    # The live lane overtakes the backlog: that is what lanes are for.
    overtaken = [delivery(STORED[2], 0, 0, lane="l2"), delivery(STORED[0], 0, 1), delivery(STORED[1], 1, 2)]
    assert audit({STORED[0]}, overtaken).faults == ()
    # A sensor that was started anew counts from 0.
    restarted = [delivery(STORED[3], 3, 0), delivery(reading(0, boot="2-b"), 4, 1)]
    assert audit({STORED[3]}, restarted).faults == ()


def test_a_ledger_of_nothing_proves_nothing() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        audit(set(), FLAWLESS)


@given(st.permutations(range(8)))
def test_any_other_order_is_found(order: list[int]) -> None:
    deliveries = [delivery(reading(number), number, offset) for offset, number in enumerate(order)]
    found = audit({reading(0)}, deliveries)
    assert bool(found.out_of_order) == (order != sorted(order))


def test_the_fleets_ledger_and_a_consumers_records_are_read() -> None:
    line = {"device": "m001", "boot": "1-a", "taken": 9, "sent": 9, "acknowledged": [[0, 1], [3, 3]], "dropped": []}
    acknowledged = acknowledged_in(json.dumps(line) + "\n")
    assert acknowledged == {reading(0), reading(1), reading(3)}
    names = {
        "ce_id": "b/l1/7",
        "ce_lane": "l1",
        "ce_lanesequence": "7",
        "ce_deviceboot": "1-a",
        "ce_devicesequence": "3",
    }
    headers = [(name, value.encode()) for name, value in names.items()]
    record = ConsumerRecord("thermo", 2, 5, 0, 1, b"m001", b"{}", None, 4, 2, headers)
    assert in_kafka([record]) == [delivery(reading(3), 7, 5, partition=2)]
