"""The hostile set through the real job, in one batch among good readings; and the guard, where a reader raises."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark import batch_job
from spark.arrow_pass import tasks
from spark.arrow_pass.tasks import judging
from spark.batch_job import TRIAL, BatchJob
from spark.decode.record_frames import Rule, typed_records
from spark.decode.record_rules import Record
from spark.decode.streams_file import parse_streams
from spark.finality import gateway_states
from spark.finality.loss_records import losses_in
from spark.finality.loss_table import append_losses
from spark.ingest import job_state
from spark.ingest.record_faults import ASIDE_MAX, Culprit, as_bytes, find_culprits
from spark.log.log_table import BatchId, open_log, with_topic_ids
from spark.log.quarantine_view import open_quarantine
from spark.log.readings_view import open_readings
from spark.log.record_verdicts import Verdicts
from spark.upkeep.replay_job import replay
from spark.views.evidence import open_gaps
from spark.views.gateways_view import open_gateways
from spark.views.windows_view import open_windows
from tests.support import hostile
from tests.support.sizes import WHOLE, size
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, kafka_frame, reading, reading_headers

if TYPE_CHECKING:
    from spark.engine.delta_staging import AppendTable
    from spark.log.edges import Edge

# A hundred queries of the guard take their time where the machine is busy.
pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted"), pytest.mark.timeout(900)]

# -- what is rightly taken ----------------------------------------------------------------------

SOME_TEXT = "(an empty text|NUL|the year (0|1, east|9999|9999, west)|a time without zone)"
NO_NUMBER = f"(null|true|NaN|Infinity|a list|an object|half a surrogate|{SOME_TEXT})"
SOME_HEADER = r"(empty|NUL|5,000 digits|-?2\^\d+( - 1)?|1e300|NaN|deep|slashes|the year (0|1|9999))"
RIGHTLY_TAKEN = (
    # Numbers; and payloads with a good number beside a bad one.
    "value: (JSON|number|SenML), (t: |v: |bt: |bv: |vb: )?less than nothing",
    f"value: JSON, unknown: (less than nothing|a long text|null|NaN|Infinity|true|a list|an object|{SOME_TEXT})",
    r"value: JSON, unknown: (-?2\^\d+( - 1)?|1e-?\d+)",
    f"value: SenML, (v|bv|vb): {NO_NUMBER}",
    r"value: SenML, (v|bv|vb): (a fraction of 5,000 digits|-?2\^\d+( - 1)?|1e.*)",
    f"value: SenML, (n: (?!an empty text)|bn: ){SOME_TEXT}",
    "value: SenML, bn: half a surrogate",
    "value: CBOR, t: NUL",
    r"value: SenML in CBOR, (6|-3): NUL",
    # Members that nobody reads: unknown or unneeded ones, as far as they are JSON.
    "(heartbeat|heartbeat, pending|buffer-set-aside|state), unknown: (?!deep|half|NaN|Infinity).*",
    "(loss|time-correction), unknown: (?!deep|half|NaN|Infinity|500,000|a fraction|bad UTF-8).*",
    "time-correction, device: (?!deep|half|NaN|Infinity|500,000|a fraction|bad UTF-8).*",
    "buffer-set-aside, (device|file|rows): (?!deep|half|NaN|Infinity).*",
    r"(heartbeat|heartbeat, pending|buffer-set-aside|state), \w+ twice",
    # Right values: names of nobody, ends of the range, and unknown values.
    "heartbeat, (low_watermark: null|oldest_age_s: (a fraction of 5,000 digits|1e-999999999|null))",
    "heartbeat, pending, (nothing|(from|to): (null|the year 9999))",
    f"heartbeat, (pending, lane: |topic, ){SOME_TEXT}",
    r"heartbeat, topic, (-?2\^\d+( - 1)?|1e-?\d+|less than nothing|NaN|Infinity|null|true|a list)",
    r"heartbeat, offset, 2\^63 - 1",
    f"(time-correction, boot|loss, (device|reason|boot|device_boot)): {SOME_TEXT}",
    r"time-correction, (version: 2\^63 - 1|boottime_us: less than nothing|supersedes: true)",
    r"time-correction, (rate_ppm|error_growth_ppm): 1e-999999999|time-correction, rate_ppm: less than nothing",
    r"time-correction, error_us: 2\^63 - 1",
    "loss, (device|device_boot): null",
    r"loss, (count|last_boottime_us|last_sequence): 2\^63 - 1",
    r"loss, (first_boottime_us|first_sequence): (-2\^63|less than nothing)",
    f"state, (version|image|slot|settings): {SOME_TEXT}",
    "state, (image|slot|update|fleet|heartbeat_s|settings|uplink_s): null",
    "state, (update|fleet|clock|disk|memory|devices): an object",
    "state, heartbeat_s: (a fraction of 5,000 digits|1e-999999999)",
    # Texts that the contract leaves to the gateway, and names of nobody.
    f"(heartbeat, )?(header ce_(subject|timequality|gatewayboot|deviceboot)|key): {SOME_HEADER}",
    f"heartbeat, header content-type: {SOME_HEADER}",
    "(heartbeat, )?header ce_receivedtime: the year 9999",
    r"(heartbeat, )?header (ce_timeerror: 2\^63 - 1|ce_boottime: (-2\^63|2\^63 - 1))",
    r"header (ce_boottimeerror: 2\^63 - 1|ce_devicesequence: (-2\^63|2\^63 - 1))",
    "lane number 9007199254740992",
    # A correction of its boot, one of those above, puts it right.
    "header ce_time: the year 9999",
    # Nothing bounds such a time. The event's times of other things are bounded.
    "(heartbeat, |loss, )?ends: 9223372036854775807, .*",
    "(heartbeat, |loss, )?ends: .*, 2026-.*",
    "(heartbeat|loss), ends: .*",
    "pack 8 years back from .*",
)


PART = 10
"""Records of the hostile set for each one that `make test` takes."""


def good(sequence: int) -> KafkaRecord:
    """A good reading of a device that counts."""
    headers = reading_headers(
        sequence, time=NOON + timedelta(seconds=sequence), lane="ffffffffffff", device_boot="5-good"
    )
    return replace(reading(b'{"t": 21.5}', headers, offset=100_000 + sequence, key=b"good"), topic="device-good")


@pytest.mark.campaign(seconds=150)
def test_each_hostile_record_is_set_aside_and_nothing_else_is(spark: SparkSession, new_warehouse: str) -> None:
    cases = list(hostile.records())[:: size(PART, 1)]
    mixed = [record for _, record in cases]
    for sequence in range(40):
        mixed.insert(sequence * len(cases) // 40, good(sequence))
    told: list[str] = []

    job = BatchJob(spark, new_warehouse, warn=told.append)
    counts = job.take(kafka_frame(spark, mixed).repartition(4), BatchId("query", 0), {})
    # The job goes on; a start finds all as it was left, and finishes the batch once more.
    job.take(kafka_frame(spark, [good(40)]), BatchId("query", 1), {})
    BatchJob(spark, new_warehouse, warn=told.append).save()

    # No reader raised: each gave its reason itself.
    assert (counts.rows, told) == (len(mixed), [])
    readings = open_readings(spark, new_warehouse).select("device", "device_sequence", "event_time").collect()
    assert sorted(row.device_sequence for row in readings if row.device == "good") == list(range(41))
    rejects = open_quarantine(spark, new_warehouse).select("topic", "offset", "reason").collect()
    reasons = {(row.topic, row.offset): row.reason for row in rejects}
    assert not any(topic == "device-good" for topic, _ in reasons)
    expected = {name for name, _ in cases if any(re.fullmatch(each, name) for each in RIGHTLY_TAKEN)}
    taken = {name for name, record in cases if (record.topic, record.offset) not in reasons}
    assert sorted(taken - expected) == []
    assert sorted(expected - taken) == []
    # All that was taken can be shown.
    assert "good" in {row.device for row in open_windows(spark, new_warehouse).collect()}
    open_gaps(spark, new_warehouse).collect()
    assert open_gateways(spark, new_warehouse).collect()


# -- the guard ----------------------------------------------------------------------------------

DECLARED = """
unknown = "accept"
[streams.device-packed]
codec = "binary"
layout = [{ name = "guarded", type = "u8" }]
"""
STREAMS = parse_streams(DECLARED, Path("streams.toml"))
BAD_BYTE, BAD_BOOT, BAD_DEVICE = 13, "bad-boot", "bad-device"


class Died(BaseException):
    """The process was killed here."""


def packed(sequence: int, value: int) -> KafkaRecord:
    headers = reading_headers(sequence, content_type="application/octet-stream")
    return replace(reading(bytes([value]), headers, offset=sequence), topic="device-packed")


def told_by_gateway(sequence: int, kind: str, value: bytes, boot: str = "boot-1") -> KafkaRecord:
    headers = reading_headers(sequence, quality="synced", event_type=f"sluice.gateway.{kind}", gateway_boot=boot)
    return replace(reading(value, headers, offset=sequence, key=b"gw-1"), topic="gateway-events")


def loss_of(sequence: int, device: str) -> KafkaRecord:
    return told_by_gateway(sequence, "loss", json.dumps({**hostile.LOSS, "device": device}).encode())


def raising_rules(verdicts: Verdicts) -> Callable[[], tuple[Rule, ...]]:
    """Rules that raise for one value, on the executor."""
    made = judging(verdicts)

    def raising(record: Record) -> None:
        if record.topic == "device-packed" and record.header_fault is None and record.value == b"\r":
            raise RecursionError("nobody thought of 13")

    return lambda: (raising, *made())


def raising_boot(boots: "dict[str, Edge]", edge: "Edge") -> None:
    """The driver's step for a heartbeat, which raises for one of them."""
    if edge.gateway_boot == BAD_BOOT:
        raise OverflowError("int too big to convert")
    note_boot(boots, edge)


def raising_losses(table: "AppendTable", rows: DataFrame, ordinal: int) -> None:
    """A derivation after `log` was committed, which raises for one record."""
    if losses_in(rows).where(F.col("device") == BAD_DEVICE).count():
        raise ZeroDivisionError("division by zero")
    append_losses(table, rows, ordinal)


note_boot = gateway_states._note_boot


def reasons_in(spark: SparkSession, warehouse: str) -> dict[int, str]:
    rows = open_quarantine(spark, warehouse).select("offset", "reason").collect()
    return {row.offset: row.reason for row in rows}


@pytest.mark.long(seconds=100)
def test_a_record_that_makes_its_batch_fail_is_set_aside_and_no_other(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = json.dumps(hostile.HEARTBEAT).encode()
    records = [packed(1, 1), packed(2, BAD_BYTE)]
    reasons = {2: f"set-aside: taking it raised RecursionError: nobody thought of {BAD_BYTE}"}
    if WHOLE:
        records += [told_by_gateway(3, "heartbeat", heartbeat, BAD_BOOT), loss_of(4, "42")]
        reasons[3] = "set-aside: taking it raised OverflowError: int too big to convert"
    monkeypatch.setattr(tasks, "judging", raising_rules)
    monkeypatch.setattr(gateway_states, "_note_boot", raising_boot)
    told: list[str] = []

    job = BatchJob(spark, new_warehouse, STREAMS, warn=told.append)
    counts = job.take(kafka_frame(spark, records), BatchId("query", 0), {})

    assert (counts.rows, counts.rejected) == (len(records), len(reasons))
    # In one commit, with the others.
    assert open_log(spark, new_warehouse).groupBy("ordinal").count().collect() == [(0, len(records))]
    assert reasons_in(spark, new_warehouse) == reasons
    assert [row.value for row in open_readings(spark, new_warehouse).collect()] == [1]
    assert len(told) == len(reasons)
    assert "the record at offset 2 of partition 0 of device-packed made its batch fail" in "".join(told)
    assert not (Path(new_warehouse) / TRIAL).exists()


@pytest.mark.long(seconds=120)
def test_a_record_that_nothing_can_be_derived_from_is_set_aside_after_its_commit(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "append_losses", raising_losses)
    records = [packed(1, 1), loss_of(2, BAD_DEVICE)]
    told: list[str] = []
    job = BatchJob(spark, new_warehouse, STREAMS, warn=told.append)
    with monkeypatch.context() as dying:
        # Killed in the middle: as an earlier program was that knew no way out, at each of its starts.
        dying.setattr(batch_job, "amend_set_aside", _dying)
        with pytest.raises(Died):
            job.take(kafka_frame(spark, records), BatchId("query", 0), {})
    (Path(new_warehouse) / TRIAL / "left").mkdir(parents=True)

    job = BatchJob(spark, new_warehouse, STREAMS, warn=told.append)
    assert job.take(kafka_frame(spark, records), BatchId("query", 0), {}).rows == 2
    job.take(kafka_frame(spark, [packed(3, 3)]), BatchId("query", 1), {})
    # Nothing was saved: all is counted again, and nothing more is told.
    BatchJob(spark, new_warehouse, STREAMS, warn=told.append)

    assert len(told) == 1
    assert reasons_in(spark, new_warehouse) == {2: "set-aside: taking it raised ZeroDivisionError: division by zero"}
    assert sorted(row.value for row in open_readings(spark, new_warehouse).collect()) == [1, 3]
    assert not (Path(new_warehouse) / TRIAL).exists()


def _dying(*_: object) -> DataFrame:
    raise Died


@pytest.mark.long(seconds=40)
def test_what_was_set_aside_by_its_bytes_alone_stays_so_in_a_replay(spark: SparkSession, new_warehouse: str) -> None:
    typed = with_topic_ids(typed_records(kafka_frame(spark, [packed(1, 1), packed(2, 2)])), {})
    aside = as_bytes(typed, [Culprit("device-packed", 0, 2, "set-aside: taking it raised ValueError: bad")])
    BatchJob(spark, new_warehouse, STREAMS).take_records(aside, BatchId("query", 0))

    replay(spark, new_warehouse, None, None, lambda _: nullcontext(), lambda _: None)
    assert reasons_in(spark, new_warehouse) == {2: "set-aside: taking it raised ValueError: bad"}
    assert [row.value for row in open_readings(spark, new_warehouse).collect()] == [1]


def test_long_heartbeats_do_not_fill_the_memory_of_the_job(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = json.dumps(hostile.HEARTBEAT).encode()
    monkeypatch.setattr(job_state, "EVENTS_BYTES_MAX", len(beat))
    records = [told_by_gateway(number, "heartbeat", beat) for number in range(4)]
    # As long as Kafka takes, and small in it: spaces compress well.
    records += [told_by_gateway(number, "heartbeat", beat + b" " * 1_000_000) for number in range(4, 6)]
    counts = BatchJob(spark, new_warehouse).take(kafka_frame(spark, records), BatchId("query", 0), {})
    assert counts.rejected == 2
    assert reasons_in(spark, new_warehouse) == dict.fromkeys(
        (4, 5), "event: it has no value, or it is far longer than what else gateways tell in its batch"
    )


PLACES = 30


@pytest.fixture(scope="module")
def places(spark: SparkSession) -> DataFrame:
    """Records of two partitions, with a hole in their offsets."""
    rows = [("a", place % 2, place + (1_000 if place > 20 else 0)) for place in range(PLACES)]
    return spark.createDataFrame(rows, "topic string, partition int, offset bigint").cache()


def culprits(places: DataFrame, fails: Callable[[list[int]], Exception | None]) -> list[int]:
    def attempt(which: Column) -> Exception | None:
        return fails(sorted(row.offset for row in places.where(which).collect()))

    return sorted(each.offset for each in find_culprits(places, attempt))


@pytest.mark.campaign(seconds=15)
@given(st.sets(st.integers(0, 20), max_size=3))
@settings(max_examples=size(3, 12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_records_fail_are_found_and_no_others(places: DataFrame, bad: set[int]) -> None:
    assert culprits(places, lambda part: ValueError("bad") if bad & set(part) else None) == sorted(bad)


def test_what_is_no_records_fault_sets_nothing_aside(places: DataFrame) -> None:
    calls = iter(range(1_000))
    # A disk that is full, whatever is taken; a Spark that failed once; an error that names itself.
    assert culprits(places, lambda _: OSError("No space left on device")) == []
    assert culprits(places, lambda part: ValueError("bad") if next(calls) == 3 and part else None) == []
    assert culprits(places, lambda part: ValueError("No space left on device") if 7 in part else None) == []
    # Two that fail only together, and every one.
    assert culprits(places, lambda part: ValueError("bad") if {1, 1_024} <= set(part) else None) == []
    assert PLACES > ASIDE_MAX
    assert culprits(places, lambda part: ValueError("bad") if part else None) == []
