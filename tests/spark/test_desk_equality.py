"""The desk's answers are Spark's: of tables in which everything goes wrong, after each thing that is done to them."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.decode.streams_file import parse_streams
from spark.desk import tables, windows_sql
from spark.engine.warehouse_folder import only_writer
from spark.ingest.reading_starts import append_start, first_start, start_after
from spark.log import sequence_runs
from spark.log.log_table import BatchId
from spark.log.warehouse_version import note_registry
from spark.registry.registry import Calibration, Device, Gateway, Registry
from spark.registry.registry_table import load_registry
from spark.source.topic_changes import GoingOn, Loss, TopicNow
from spark.upkeep.device_deletion import delete_device
from spark.upkeep.quarantine_retry import retry
from spark.upkeep.replay_job import replay
from spark.upkeep.table_upkeep import maintain
from spark.windows.windows_table import fold_date
from tests.support.desk_equality import expect_limits_to_choose, expect_same_answers
from tests.support.sizes import SEED, WHOLE, size
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import (
    BOOTS,
    EPOCH,
    NOON,
    drawn_batches,
    drawn_records,
    kafka_frame,
    reading,
    reading_headers,
    rfc3339,
)

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900), pytest.mark.usefixtures("interpreted")]

UGLY = size(250, 1_500)
COUNTED = size(240, 900)
"""Readings of sensors that count, some of which are missing, refused or told to be lost."""
SIZES_S = size((600,), (60, 600, 86_400))
VIEWS = size(("readings", "window_changes", "gaps", "losses", "gateways", "quarantine"), tables.VIEWS)
LANE_OF = {"gw-1": "a1" * 6, "gw-2": "b2" * 6, "gw-3": "c3" * 6}
BUFFERS = {"gw-1": ("1" * 16, "5" * 16), "gw-2": ("2" * 16,), "gw-3": ("3" * 16,)}
"""Buffer files of each gateway: the first had another before."""
OTHER_RULES = {
    "FINDING": {
        "span.to_us >= asked_to": "span.to_us >= asked_from",
        "until_us > asked_from": "until_us > asked_to",
        "from_us < asked_to": "from_us < asked_from",
        "span.run = loss.run AND": "",
        "coalesce(proof.last_us < asked_to, TRUE)": "FALSE",
        "'watermark'": "'sequence'",
    },
    "STATUS": {"complete_with_loss": "complete"},
    "WHY": {"len(found.spans) - 1": "len(found.spans)", "'; '": "', '", "found.spans[1].why,": "found.spans[2].why,"},
}
"""Rules of `windows_sql`, and other ones."""
PARTITION = {"gw-1": 11, "gw-2": 12, "gw-3": 13}
DECLARED = 'unknown = "accept"\n[streams."device-count"]\ncodec = "json"\nmetrics.t = { max = %d }\n'
DECLARED += '[streams."device-pack"]\ncodec = "senml-json"\n'


@pytest.fixture
def few_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are drawn."""
    monkeypatch.setattr(sequence_runs, "ISLANDS_MAX", 2)


def sent(  # noqa: PLR0913, PLR0917 - what varies
    gateway: str, number: int, at_s: float, kind: str, topic: str, value: bytes, **changes: object
) -> KafkaRecord:
    """A record of a gateway, so many seconds after noon."""
    time = NOON + timedelta(seconds=at_s)
    headers = reading_headers(
        number,
        time=time,
        boot_us=round(at_s * 1e6),
        event_type=f"sluice.{kind}",
        buffer=BUFFERS[gateway][int(at_s > 900) % len(BUFFERS[gateway])],
        lane=LANE_OF[gateway] if kind == "reading" else LANE_OF[gateway][::-1],
        **changes,  # type: ignore[arg-type]
    )
    headers = [(name, f"/plant/{gateway}".encode() if name == "ce_source" else text) for name, text in headers]
    record = reading(value, headers, offset=number, key=gateway.encode())
    return replace(record, topic=topic, partition=PARTITION[gateway], timestamp=time + timedelta(seconds=1))


def counted_records(rng: random.Random, count: int) -> Iterator[KafkaRecord]:
    """Sensors that count, by way of gateways with heartbeats: holes, losses, rejects, packs, a former buffer."""
    numbers = dict.fromkeys(LANE_OF, 0)
    events = dict.fromkeys(LANE_OF, 0)
    counters: dict[str, int] = {}

    def next_of(of: dict[str, int], gateway: str) -> int:
        of[gateway] += 1
        return of[gateway] - 1

    for step in range(count):
        at_s = step * 1800 / count
        gateway = rng.choice([*LANE_OF])
        device = rng.choice(["board-1", "board-2", "wifi-7", "still-9"])
        key = f"{device}".encode()
        counts = device.startswith("board")
        number = counters[device] = counters.get(device, -1) + 1
        boot = f"{number * 3 // count}-1a2b3c4d" if counts else None
        if counts and rng.random() < 0.12:
            if rng.random() < 0.6:
                body = {
                    "device": rng.choice([device, device, None]),
                    "reason": rng.choice(["sensor-ring-overflow", "buffer-full", "expired"]),
                    "count": 1,
                    "boot": rng.choice(BOOTS),
                    "first_boottime_us": round((at_s - rng.random() * 60) * 1e6),
                    "last_boottime_us": round(at_s * 1e6),
                    "device_boot": boot,
                    "first_sequence": number,
                    "last_sequence": number,
                }
                if body["device"] is None:
                    body |= dict.fromkeys(("device_boot", "first_sequence", "last_sequence"))
                value = json.dumps(body).encode()
                yield sent(gateway, next_of(events, gateway), at_s, "gateway.loss", "gateway-events", value)
            continue
        changes: dict[str, object] = {"device_boot": boot, "gateway_boot": rng.choice(BOOTS)}
        if rng.random() < 0.1:
            changes |= {"error_us": 2**63 - 1, "boot_error_us": rng.choice([0, 500]), "quality": "bounded"}
        topic, value = "device-count", json.dumps({"t": rng.choice([number, 5_000, -3.25, 1e-7])}).encode()
        if rng.random() < 0.15:
            pack = [{"n": "t", "v": rng.randrange(100), "t": -rng.randrange(200)} for _ in range(3)]
            topic, value = "device-pack", json.dumps(pack).encode()
        record = sent(gateway, next_of(numbers, gateway), at_s, "reading", topic, value, **changes)
        record = replace(record, key=key)
        if boot is not None:
            headers = [
                (name, str(number).encode() if name == "ce_devicesequence" else text)
                for name, text in record.headers or []
            ]
            record = replace(record, headers=headers)
        yield record
        if rng.random() < 0.08:
            told: dict[str, object] = {
                "offsets": {topic: {str(PARTITION[gateway]): numbers[gateway] + rng.choice([0, 0, 5])}},
                "pending": [{"lane": "x", "rows": 3, "from": rfc3339(NOON), "to": None}] * (rng.random() < 0.3),
                "quarantined": [{"count": 2, "from": None, "to": rfc3339(NOON)}] * (rng.random() < 0.2),
                "low_watermark": rng.choice([rfc3339(NOON + timedelta(seconds=at_s)), None]),
                "depth_rows": rng.randrange(9),
                "oldest_age_s": rng.choice([None, 1.25]),
            }
            value = json.dumps(told).encode()
            beat = sent(gateway, next_of(events, gateway), at_s, "gateway.heartbeat", "gateway-events", value)
            yield beat


def registered() -> Registry:
    """Devices that move, a calibration, and a gateway that was taken away."""
    later = NOON + timedelta(minutes=10)
    return Registry(
        devices=(
            Device("plant", "board-1", "north", (("line", "B"),), None, later),
            Device("plant", "board-1", "south", (), later, None),
            Device("plant", "wifi-7", "north"),
        ),
        calibrations=(Calibration("plant", "board-1", "t", valid_from=later),),
        gateways=(
            Gateway("plant", "gw-2", "north", NOON + timedelta(minutes=20), ("device-*",)),
            Gateway("plant", "gw-3"),
        ),
    )


def expect_each_rule_to_count(warehouse: str) -> None:
    """Fail unless what was drawn shows each other wording of a rule: else both engines might differ in it unnoticed."""
    desk = tables.open(warehouse)
    told = Counter(map(repr, desk.windows().fetchall()))
    for place, changes in OTHER_RULES.items():
        rule = str(getattr(windows_sql, place))
        for words, other in changes.items():
            assert words in rule
            with pytest.MonkeyPatch.context() as changed:
                changed.setattr(windows_sql, place, rule.replace(words, other))
                assert Counter(map(repr, desk.windows().fetchall())) != told, words


@pytest.mark.campaign(seconds=120)
@pytest.mark.usefixtures("few_islands")
def test_the_desk_answers_what_spark_does_whatever_was_done_to_the_tables(
    spark: SparkSession, new_warehouse: str
) -> None:
    rng = random.Random(SEED)  # noqa: S311
    job = BatchJob(spark, new_warehouse, parse_streams(DECLARED % 1_000, Path("streams.toml")))
    start = first_start(1)
    append_start(spark, job.tables, start)
    job.state.begin(start)
    batches = [*drawn_batches(rng, drawn_records(rng, UGLY)), [*counted_records(rng, COUNTED)]]
    if not WHOLE:
        # Spark takes longer for a batch than for its records.
        batches = [batches[0], [record for batch in batches[1:] for record in batch]]
    for number, batch in enumerate(batches):
        # Earlier releases wrote times of 96 bits.
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS" if number else "INT96")
        job.take(kafka_frame(spark, batch), BatchId("query", number), {})
        if number % 2:
            job.save()
    job.save()
    if WHOLE:
        expect_same_answers(spark, new_warehouse)

    note_registry(spark, new_warehouse, load_registry(spark, new_warehouse, registered()))
    now = {"device-count": TopicNow("id-2", {1: 5}, {1: 9})}
    lost = GoingOn({"device-count": {1: 5}}, (Loss("device-count", "id-1", 1, 2, 5),))
    append_start(spark, job.tables, start_after(start, job.next_ordinal, 1, lost, now))
    if WHOLE:
        retry(BatchJob(spark, new_warehouse, parse_streams(DECLARED % 9_000, Path("streams.toml"))))
        delete_device(spark, new_warehouse, "plant", "board-2")
        fold_date(spark, job.tables, NOON.date())
    assert expect_same_answers(spark, new_warehouse, SIZES_S, VIEWS) > UGLY
    expect_each_rule_to_count(new_warehouse)
    noon_us = (NOON - EPOCH) // timedelta(microseconds=1)
    spans_us = [(noon_us, noon_us + 90_000_000), (noon_us - 86_400_000_000, noon_us), (noon_us, None), (None, None)]
    devices: list[str | None] = [None, *tables.open(new_warehouse).devices()] if WHOLE else ["board-1"]
    assert expect_limits_to_choose(new_warehouse, devices, spans_us[: size(1, 4)]) > 0


@pytest.mark.long(seconds=240)
@pytest.mark.usefixtures("few_islands")
def test_the_desk_answers_what_spark_does_after_an_expiry_and_a_replay(spark: SparkSession, new_warehouse: str) -> None:
    rng = random.Random(SEED)  # noqa: S311
    streams = parse_streams(f"{DECLARED % 1_000}[retention]\nlog_days = 30\nwindows_days = 50\n", Path("streams.toml"))
    job = BatchJob(spark, new_warehouse, streams)
    for number, batch in enumerate([*drawn_batches(rng, drawn_records(rng, 600)), [*counted_records(rng, 300)]]):
        job.take(kafka_frame(spark, batch), BatchId("query", number), {})
    job.save()
    maintain(job, NOON.date() + timedelta(days=25))
    expect_same_answers(spark, new_warehouse)
    replay(spark, new_warehouse, None, None, only_writer, lambda _: None)
    expect_same_answers(spark, new_warehouse)
