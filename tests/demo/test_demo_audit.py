import json
from collections import Counter
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from hypothesis import given
from hypothesis import strategies as st

from demo.audit import (
    Audit,
    Identity,
    KafkaReading,
    Ledger,
    SensorAudit,
    TableReading,
    audit,
    audit_lines,
    read_kafka,
    read_ledgers,
    read_table,
    run_findings,
    shown_sensors,
    verdict,
)
from demo.chronicle import Chronicle, Sample
from demo.demo_settings import DemoSettings
from demo.kafka_broker import Broker

NOON_US = 1_750_000_000_000_000


def ledger(device: str, *acknowledged: tuple[int, int], sent: int = 10, boot: str = "1-aa") -> Ledger:
    return Ledger(device, boot, sent, acknowledged)


def record(device: str, sequence: int, *, boot: str = "1-aa", after_us: int = 0) -> KafkaReading:
    identity = f"buffer-lane-{device}-{sequence}"
    return KafkaReading(identity, device, boot, sequence, NOON_US, NOON_US + after_us)


def row(device: str, sequence: int, metric: str = "celsius", boot: str = "1-aa") -> TableReading:
    return TableReading(device, boot, sequence, metric, NOON_US, 21.5, 1_000, "estimated")


def only(result: Audit) -> SensorAudit:
    (sensor,) = result.sensors
    return sensor


def test_all_that_was_acknowledged_stands_once() -> None:
    sequences = range(10)
    result = audit([ledger("t-1", (0, 9))], [record("t-1", n) for n in sequences], [row("t-1", n) for n in sequences])
    assert only(result) == SensorAudit("t-1", 10, 10, 10, 10, 0, 0)
    assert result.findings == ()


def test_an_acknowledged_reading_that_is_nowhere_is_missing() -> None:
    result = audit([ledger("t-1", (0, 1))], [record("t-1", 0)], [row("t-1", 0)])
    assert only(result).missing == 1
    assert result.findings == ("1 acknowledged reading is not in `readings`",)
    assert result.examples == ("t-1, boot 1-aa, sequence 1: acknowledged, is not even in Kafka",)


def test_a_reading_that_kafka_has_and_the_table_has_not_is_missing() -> None:
    result = audit([ledger("t-1", (0, 0))], [record("t-1", 0)], [])
    assert only(result).missing == 1
    assert result.examples == ("t-1, boot 1-aa, sequence 0: acknowledged, is in Kafka but not in `readings`",)


def test_the_same_sequence_of_another_boot_does_not_stand_in() -> None:
    result = audit(
        [ledger("t-1", (0, 0), boot="1-aa"), ledger("t-1", (0, 0), boot="2-bb")],
        [record("t-1", 0, boot="1-aa")],
        [row("t-1", 0, boot="1-aa")],
    )
    assert (only(result).acknowledged, only(result).missing) == (2, 1)


def test_a_reading_that_stands_twice_is_doubled_once_however_often_it_stands() -> None:
    result = audit([ledger("t-1", (0, 0))], [record("t-1", 0)], [row("t-1", 0)] * 3)
    assert (only(result).in_readings, only(result).doubled) == (1, 1)
    assert result.findings == ("1 reading stands more than once in `readings`",)


def test_two_metrics_of_one_reading_are_not_a_double() -> None:
    result = audit([ledger("t-1", (0, 0))], [record("t-1", 0)], [row("t-1", 0, "celsius"), row("t-1", 0, "percent")])
    assert only(result).doubled == 0


def test_copies_in_kafka_are_what_the_table_is_there_to_absorb() -> None:
    result = audit([ledger("t-1", (0, 0))], [record("t-1", 0), record("t-1", 0)], [row("t-1", 0)])
    assert (result.copies, only(result).in_kafka, result.findings) == (1, 1, ())


def test_a_reading_whose_acknowledgement_got_lost_is_no_finding() -> None:
    result = audit([ledger("t-1", (0, 0))], [record("t-1", n) for n in (0, 1)], [row("t-1", n) for n in (0, 1)])
    assert (only(result).acknowledged, only(result).in_readings, result.findings) == (1, 2, ())


def test_late_is_counted_by_the_first_copy() -> None:
    records = [
        record("t-1", 0, after_us=30_000_000),
        record("t-1", 0, after_us=1_000),  # the same reading, earlier: it was not late
        record("t-1", 1, after_us=30_000_000),
        record("t-1", 2, after_us=10_000_000),  # just in time
    ]
    assert audit([ledger("t-1", (0, 2))], records, []).late_readings == 1


def test_a_run_without_one_acknowledgement_shows_nothing() -> None:
    assert audit([ledger("t-1")], [], []).findings == ("no reading was acknowledged, so this run shows nothing",)


def test_readings_of_a_boot_that_nobody_started_are_told() -> None:
    result = audit([ledger("t-1", (0, 0))], [record("t-1", 0), record("x", 0)], [row("t-1", 0)])
    assert result.findings == ("1 reading belongs to no boot of a sensor that was started",)


def served(count: int) -> list[Ledger]:
    return [ledger(f"t-{n}", (0, 0)) for n in range(1, count + 1)]


def whole(ledgers: list[Ledger]) -> Audit:
    """The audit of a run in which all that was acknowledged arrived."""
    known = [(each.device, n) for each in ledgers for first, last in each.acknowledged for n in range(first, last + 1)]
    return audit(ledgers, [record(*each) for each in known], [row(*each) for each in known])


def outage(peak: int) -> Chronicle:
    """An outage of 12 s in which `peak` rows waited; before it there were many, as while topics are made."""
    cut_us, restored_us = NOON_US + 6_000_000, NOON_US + 18_000_000
    samples = [Sample(at_us, rows, None, None) for at_us, rows in ((NOON_US, 900), (cut_us, 0), (restored_us, peak))]
    return Chronicle(cut_us=cut_us, restored_us=restored_us, samples=samples)


def test_a_sensor_that_was_never_served_is_named_beside_a_healthy_fleet() -> None:
    result = whole([*served(3), Ledger("board-1", "0", 0, ())])
    assert result.findings == ("1 sensor had no reading acknowledged: board-1",)
    assert run_findings(result, DemoSettings(24, 12, 3, 1, 0, kill=False), outage(40), []) == result.findings


def test_of_many_that_were_never_served_five_are_named() -> None:
    result = whole([*served(1), *(ledger(f"m{n}") for n in range(12, 4, -1))])
    assert result.findings == ("8 sensors had no reading acknowledged: m5, m6, m7, m8, m9 and 3 more",)


def test_a_sensor_that_was_served_in_one_of_its_boots_was_served() -> None:
    assert whole([ledger("t-1", (0, 0)), ledger("t-1", boot="2-bb")]).findings == ()


def test_sensors_without_a_ledger_are_told() -> None:
    found = run_findings(whole(served(3)), DemoSettings(24, 12, 3, 2, 0, kill=False), outage(40), [])
    assert found == ("2 of 5 sensors left no ledger",)


def test_readings_that_come_through_a_cut_path_are_told_however_long_others_wait() -> None:
    settings = DemoSettings(24, 12, 3, 0, 0, kill=False)
    # From 6 to 18 s the path is cut. Records that passed it just before may be appended in the first two of these
    # seconds.
    passed = [record("t-1", n, after_us=after_us) for n, after_us in enumerate((5_000_000, 7_999_999, 18_000_000))]
    assert run_findings(whole(served(3)), settings, outage(40), passed) == ()
    leaked = [*passed, record("t-2", 0, after_us=8_000_000), record("t-3", 0, after_us=17_999_999)]
    found = run_findings(whole(served(3)), settings, outage(40), leaked)
    assert found == ("2 readings reached Kafka while the path to it was cut",)


def test_an_outage_in_which_less_than_a_reading_a_sensor_waited_is_told() -> None:
    settings = DemoSettings(24, 12, 3, 0, 0, kill=False)
    assert run_findings(whole(served(3)), settings, outage(3), []) == ()
    found = run_findings(whole(served(3)), settings, outage(2), [])
    assert found == ("the outage cut too little: at most 2 readings of 3 sensors waited",)


def test_an_outage_of_a_moment_need_not_fill_the_buffer() -> None:
    assert run_findings(whole(served(3)), DemoSettings(24, 1, 3, 0, 0, kill=False), outage(0), []) == ()


def test_the_verdict_says_what_its_numbers_do_not() -> None:
    good, lost = SensorAudit("all sensors", 9, 9, 9, 9, 0, 0), SensorAudit("all sensors", 9, 9, 9, 8, 1, 0)
    assert verdict(good, ()) == "missing 0, duplicates 0"
    assert verdict(good, ("one thing", "another")) == "missing 0, duplicates 0, but: one thing; another"
    assert verdict(lost, ("1 acknowledged reading is not in `readings`",)) == "missing 1, duplicates 0"


identities = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["1-aa", "2-bb"]), st.integers(0, 8)), max_size=40
)


@given(identities, identities)
def test_missing_and_doubled_are_what_sets_and_counts_say(acknowledged: list[Identity], table: list[Identity]) -> None:
    ledgers = [Ledger(device, boot, 1, ((sequence, sequence),)) for device, boot, sequence in acknowledged]
    result = audit(ledgers, [], [row(device, sequence, boot=boot) for device, boot, sequence in table])
    assert result.total.missing == len(set(acknowledged) - set(table))
    assert result.total.doubled == sum(1 for times in Counter(table).values() if times > 1)


def test_the_table_for_people_shows_boards_and_the_worst_of_the_fleet() -> None:
    ledgers = [ledger(f"fleet-{n}", (0, 0)) for n in range(12)] + [ledger("avr-0", (0, 0))]
    rows = [row(f"fleet-{n}", 0) for n in range(11)] + [row("avr-0", 0)]
    result = audit(ledgers, [], rows)
    shown = shown_sensors(result, ["avr-0"], fleet_count=2)
    assert [sensor.device for sensor in shown] == ["avr-0", "fleet-11", "fleet-0"]
    lines = audit_lines(shown, result.total)
    assert lines[-1].split() == ["all", "sensors", "130", "13", "0", "12", "1", "0"]
    assert len({len(line) for line in lines}) == 1


def test_files_are_read_as_they_are_written(tmp_path: Path) -> None:
    ledgers = tmp_path / "ledger.jsonl"
    ledgers.write_text(
        '{"device": "t-1", "boot": "1-aa", "taken": 9, "sent": 8, '
        '"acknowledged": [[0, 3], [5, 5]], "dropped": [[4, 4]]}\n'
    )
    table = tmp_path / "readings.jsonl"
    table.write_text(json.dumps(["t-1", "1-aa", 5, "celsius", NOON_US, 21.5, 1_000, "estimated"]) + "\n")
    assert read_ledgers(ledgers) == [Ledger("t-1", "1-aa", 8, ((0, 3), (5, 5)), ((4, 4),), taken=9)]
    assert read_table(table) == [row("t-1", 5)]


def test_what_waits_was_neither_acknowledged_nor_dropped() -> None:
    assert Ledger("t-1", "1-aa", 3, ((0, 1),), ((2, 2),), taken=3).waiting == 0
    assert Ledger("t-1", "1-aa", 3, ((0, 1),), taken=3).waiting == 1


def test_only_the_last_boot_of_a_sensor_still_holds_readings() -> None:
    first, last = Ledger("t-1", "1-aa", 5, ((0, 1),), taken=5), Ledger("t-1", "2-bb", 3, ((0, 1),), taken=3)
    assert audit([first, last], [], []).waiting == 1


@pytest.mark.kafka
async def test_kafka_is_read_to_its_end_and_other_topics_are_left_out(kafka: Broker) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.create_topics(
            [
                NewTopic(name, 2, 1, topic_configs={"retention.ms": "-1"})
                for name in ("audited-thermo", "audited-empty", "other")
            ]
        )
        headers = [
            ("ce_id", b"buffer-lane-t-1-7"),
            ("ce_time", b"2025-06-15T15:06:40.000001Z"),
            ("ce_deviceboot", b"1-aa"),
            ("ce_devicesequence", b"7"),
        ]
        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
            for partition in (0, 1):
                await producer.send_and_wait("audited-thermo", b"{}", b"t-1", partition, NOON_US // 1_000 + 5, headers)
            await producer.send_and_wait("other", b"not a reading")
        records = await read_kafka(kafka.bootstrap, "audited-")
        assert records == [KafkaReading("buffer-lane-t-1-7", "t-1", "1-aa", 7, NOON_US + 1, NOON_US + 5_000)] * 2
    finally:
        await admin.close()
