"""The comparison that the boards' tests rest on finds each kind of fault, and nothing where all is well."""

import json

import pytest
from aiokafka import ConsumerRecord

from tests.support.board_audit import (
    Account,
    Arrived,
    Sample,
    Told,
    heard_in,
    in_kafka,
    known_of,
    lost_in,
    perhaps_lost_in,
    settle,
)

BOOT = "7-1a2b3c4d"
LEDGER = json.dumps({"device": "s1", "boot": BOOT, "acknowledged": [[0, 1], [4, 4]], "dropped": [[2, 3]]})
SAMPLES = "boot,sequence,centi_celsius,boottime_us\n" + "".join(
    f"{BOOT},{sequence},{2150 - sequence},{1000 * sequence}\n" for sequence in range(5)
)
RUN = ("s1", BOOT)
DROPPED = Told(2, 2, 3)


def arrived(sequence: int, ce_id: str = "", celsius: int | None = None) -> Arrived:
    value = 2150 - sequence if celsius is None else celsius
    return Arrived(Sample("s1", BOOT, sequence), ce_id or f"id-{sequence}", value)


def account(*records: Arrived, lost: Told | None = DROPPED) -> Account:
    return settle(known_of(LEDGER, SAMPLES), records, {RUN: lost} if lost else {}, {})


def record(key: bytes, value: bytes, **headers: str) -> ConsumerRecord:
    packed = tuple((name, text.encode()) for name, text in headers.items())
    return ConsumerRecord("t", 0, 0, 0, 0, key, value, None, len(key), len(value), packed)


def test_nothing_is_wrong_where_all_is_well() -> None:
    # The second record of an id is a resend, which every consumer recognises.
    well = account(arrived(0), arrived(1)._replace(estimated=(1500, 500)), arrived(1), arrived(4))
    assert well.faults == ()
    assert (well.acknowledged, well.arrived) == (3, 3)


def test_what_was_dropped_and_has_arrived_all_the_same_is_no_loss() -> None:
    assert account(arrived(0), arrived(1), arrived(2), arrived(4), lost=Told(1, 3, 3)).faults == ()


@pytest.mark.parametrize(
    ("kind", "records", "lost"),
    [
        ("missing", [arrived(0), arrived(4)], DROPPED),
        ("wrong", [arrived(0), arrived(1), arrived(4, celsius=1)], DROPPED),
        ("mistimed", [arrived(0), arrived(1)._replace(estimated=(1501, 500)), arrived(4)], DROPPED),
        ("twice", [arrived(0), arrived(1), arrived(1, "other"), arrived(4)], DROPPED),
        ("made_up", [arrived(0), arrived(1), arrived(4), arrived(5)], DROPPED),
        ("unexplained", [arrived(0), arrived(1), arrived(4)], Told(1, 2, 2)),
        ("unexplained", [arrived(0), arrived(1), arrived(4)], Told(3, 2, 4)),
        ("unexplained", [arrived(0), arrived(1), arrived(4)], Told(2, 900, 901)),
        ("unexplained", [arrived(0), arrived(1), arrived(4)], None),
    ],
)
def test_each_fault_is_found_and_no_other_with_it(kind: str, records: list[Arrived], lost: Told | None) -> None:
    found = account(*records, lost=lost)
    assert found.faults == getattr(found, kind)
    assert len(found.faults) == 1
    assert f"{kind}: 1" in str(found)


def test_drops_of_a_run_that_a_reset_ended_may_go_unreported_but_no_others() -> None:
    later = json.dumps({"device": "s1", "boot": "8-1a2b3c4d", "acknowledged": [], "dropped": []})
    known = known_of(f"{LEDGER}\n{later}", SAMPLES)
    records = [arrived(0), arrived(1), arrived(4)]
    assert settle(known, records, {}, {}).faults == ()
    assert settle(known, records, {RUN: DROPPED}, {}).faults == ()
    assert len(settle(known, records, {RUN: Told(3, 2, 4)}, {}).unexplained) == 1


def test_a_run_that_has_not_ended_must_report_all_its_drops() -> None:
    earlier = json.dumps({"device": "s1", "boot": "6-1a2b3c4d", "acknowledged": [[0, 1]], "dropped": []})
    first = "".join(f"6-1a2b3c4d,{sequence},2150,0\n" for sequence in range(2))
    known = known_of(f"{earlier}\n{LEDGER}", SAMPLES + first)
    before = [Arrived(Sample("s1", "6-1a2b3c4d", sequence), f"6-{sequence}", 2150) for sequence in range(2)]
    records = [*before, arrived(0), arrived(1), arrived(4)]
    assert settle(known, records, {RUN: DROPPED}, {}).faults == ()
    assert len(settle(known, records, {}, {}).unexplained) == 1


def test_drops_before_a_gateway_heard_of_the_run_are_in_no_loss_record() -> None:
    known = known_of(LEDGER, SAMPLES)
    records = [arrived(0), arrived(1), arrived(4)]
    assert settle(known, records, {RUN: Told(1, 3, 3)}, {RUN: 3}).faults == ()
    assert len(settle(known, records, {RUN: DROPPED}, {RUN: 3}).unexplained) == 1


def test_drops_that_nobody_could_count_are_told_and_no_others_are_hidden_by_them() -> None:
    known = known_of(LEDGER, SAMPLES)
    records = [arrived(0), arrived(1), arrived(4)]
    both = {Sample("s1", BOOT, 2), Sample("s1", BOOT, 3)}
    for lost, perhaps in (({}, both), ({RUN: Told(1, 3, 3)}, {Sample("s1", BOOT, 2), Sample("s1", BOOT, 1)})):
        found = settle(known, records, lost, {}, perhaps)
        assert found.faults_of_killed == ()
        assert found.faults == found.uncounted
        assert len(found.uncounted) == 2
    assert len(settle(known, records, {}, {}, {Sample("s1", BOOT, 2)}).unexplained) == 1
    assert len(settle(known, records, {RUN: DROPPED}, {}, both).unexplained) == 1


def test_the_first_hello_says_from_where_on_a_run_is_known() -> None:
    def appeared(oldest: int) -> ConsumerRecord:
        body = {"device": "s1", "port": "tty-s1", "boot": BOOT, "oldest": oldest, "next": oldest + 9}
        return record(b"gw1", json.dumps(body).encode(), ce_id=f"{oldest}")

    other = record(b"gw1", b'{"device":null,"version":"1"}', ce_id="boot")
    assert heard_in([other, appeared(56), appeared(93)]) == {RUN: 56}


def test_without_any_acknowledgement_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        settle(
            known_of(json.dumps({"device": "s1", "boot": BOOT, "acknowledged": [], "dropped": []}), SAMPLES),
            [arrived(0)],
            {},
            {},
        )


def test_records_are_read_exactly() -> None:
    headers = {"ce_id": "a", "ce_deviceboot": BOOT, "ce_devicesequence": "3"}
    headers |= {"ce_boottime": "3000", "ce_timeerror": "70"}
    estimated, received = in_kafka(
        record(b"s1", b'{"celsius":21.47}', **headers, ce_timequality=quality) for quality in ("estimated", "received")
    )
    assert estimated == Arrived(Sample("s1", BOOT, 3), "a", 2147, (3000, 70))
    assert received == Arrived(Sample("s1", BOOT, 3), "a", 2147, None)


def test_losses_are_added_up_and_repeated_records_count_once() -> None:
    def loss(ce_id: str, first: int, last: int, reason: str = "sensor-ring-overflow") -> ConsumerRecord:
        body: dict[str, object] = {"device": "s1", "device_boot": BOOT, "reason": reason, "count": last - first + 1}
        body |= {"first_sequence": first, "last_sequence": last}
        return record(b"gw1", json.dumps(body).encode(), ce_id=ce_id)

    events = [loss("a", 4, 5), loss("b", 9, 11), loss("a", 4, 5), loss("c", 0, 99, "refused-qos0")]
    assert lost_in(events) == {RUN: Told(5, 4, 11)}
    uncounted = record(b"gw1", events[1].value.replace(b'"count": 3', b'"count": 0'), ce_id="d")
    assert lost_in([*events, uncounted]) == {RUN: Told(5, 4, 11)}
    assert perhaps_lost_in([*events, uncounted]) == {Sample("s1", BOOT, sequence) for sequence in (9, 10, 11)}
