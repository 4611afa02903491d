"""An hour of a site in which much goes wrong, as records, for tests that ask what happened there and why.

Sensor 42 counts its readings, one every ten seconds. Number 30 is missing, 60 to 62 were lost, and 200 comes late.
From 12:20 to 12:30 the gateway had no way to Kafka. Sensor 43 does not count, loses five readings, and falls silent at
12:20. What sensor 44 sends has names that a hostile sensor may choose.
"""

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.log.log_table import BatchId
from spark.registry.registry import Device, Registry
from spark.registry.registry_table import load_registry
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import BOOTS, NOON, kafka_frame, reading, reading_headers, rfc3339

STEP_S = 10
HOUR = range(0, 3_600, STEP_S)
MISSING, LOST, LATE = 30, range(60, 63), 200
OUTAGE_S = range(1_200, 1_800)
SILENT_FROM_S = 1_200
HOSTILE = "<script>alert(1)</script>\n\u202e&"
"""A metric's name."""
SITE = "north & <b>south</b>"
REASON = "<img src=x onerror=alert(2)>"
BOOT = "7-1a2b"
TOPIC_IDS = {"device-thermo": "id-1", "gateway-events": "id-3"}


def seconds(after: float) -> datetime:
    return NOON + timedelta(seconds=after)


def value_of(second: int) -> float:
    """Celsius that a sensor measured."""
    return 20 + (second % 600) / 100


def in_kafka(second: int) -> datetime:
    """When Kafka took in what was measured: soon, or after the outage."""
    return seconds(1_805 if second in OUTAGE_S else second + 1)


def _reading(
    device: str, second: int, offset: int, *, metric: str = "celsius", number: int | None = None
) -> KafkaRecord:
    lane = {"42": "a", "43": "b", "44": "c"}[device] * 12
    headers = reading_headers(
        second // STEP_S,
        time=seconds(second),
        boot_us=second * 1_000_000,
        lane=lane,
        device_boot=None if number is None else BOOT,
        error_us=1_000 + second,
    )
    payload = json.dumps({metric: value_of(second)}).encode()
    record = reading(payload, headers, offset=offset, key=device.encode())
    return replace(record, timestamp=in_kafka(second))


def _event(kind: str, second: int, body: dict[str, object], offset: int) -> KafkaRecord:
    headers = reading_headers(
        offset,
        time=seconds(second),
        boot_us=second * 1_000_000,
        quality="synced",
        event_type=f"sluice.gateway.{kind}",
        lane="e" * 12,
    )
    record = reading(json.dumps(body).encode(), headers, offset=offset, key=b"gw-1")
    return replace(record, topic="gateway-events", timestamp=seconds(second + 1))


def _loss(second: int, offset: int, **members: object) -> KafkaRecord:
    body = {"boot": BOOTS[0], **dict.fromkeys(("device_boot", "first_sequence", "last_sequence"))}
    return _event("loss", second, body | members, offset)


def batches() -> list[list[KafkaRecord]]:
    """The records of the hour, and those that came an hour later."""
    first: list[KafkaRecord] = []
    for second in HOUR:
        number = second // STEP_S
        if number != MISSING and number not in LOST and number != LATE:
            first.append(_reading("42", second, len(first), number=number))
        if second < SILENT_FROM_S:
            first.append(_reading("43", second, len(first)))
        if second < 60:
            first.append(_reading("44", second, len(first), metric=HOSTILE))
    late = replace(_reading("42", LATE * STEP_S, len(first), number=LATE), timestamp=seconds(7_200))
    told = [
        _loss(
            700,
            0,
            device="42",
            reason="sensor-ring-overflow",
            count=len(LOST),
            first_boottime_us=LOST[0] * STEP_S * 1_000_000,
            last_boottime_us=LOST[-1] * STEP_S * 1_000_000,
            device_boot=BOOT,
            first_sequence=LOST[0],
            last_sequence=LOST[-1],
        ),
        _loss(
            800,
            1,
            device="43",
            reason=REASON,
            count=5,
            first_boottime_us=300_000_000,
            last_boottime_us=350_000_000,
        ),
    ]
    acknowledged = {"device-thermo": {"0": late.offset + 1}}
    heartbeat = {
        "offsets": acknowledged,
        "pending": [],
        "quarantined": [],
        "low_watermark": rfc3339(seconds(3_300)),
        "depth_rows": 7,
        "oldest_age_s": 12.5,
    }
    return [[*first, *told], [late, _event("heartbeat", 3_300, heartbeat, 2)]]


def readings() -> list[tuple[str, int, datetime]]:
    """Device and second of all readings that are in the tables in the end, and when Kafka took them in."""
    return [
        (record.key.decode(), round(_time(record)), record.timestamp)
        for batch in batches()
        for record in batch
        if record.topic == "device-thermo" and record.key is not None
    ]


def _time(record: KafkaRecord) -> float:
    told = dict(record.headers or [])["ce_time"]
    assert told is not None
    return (datetime.fromisoformat(told.decode()) - NOON).total_seconds()


def make(spark: SparkSession, path: Path) -> str:
    """Fill an empty warehouse with the story."""
    job = BatchJob(spark, str(path))
    for number, records in enumerate(batches()):
        job.take(kafka_frame(spark, records), BatchId("query", number), TOPIC_IDS)
    job.save()
    load_registry(spark, str(path), Registry(tuple(Device("plant", name, SITE) for name in ("42", "43", "44"))))
    return str(path)
