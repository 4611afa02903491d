"""A warehouse of two hours with all that the analyst's page has to show: holes, losses, late readings, two sites."""

import json
import math
import random
from dataclasses import replace
from datetime import datetime, timedelta

from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.engine.interpreted_queries import interpreted_if
from spark.log.log_table import BatchId
from spark.registry.registry import Device, Registry
from spark.registry.registry_table import load_registry
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import BOOTS, NOON, NOTHING_WAITS, kafka_frame, reading, reading_headers

EACH_S = 20
READINGS = 360
"""Of each device: two hours."""
BOILER, HALL = "boiler-3", "hall-1"
BOOT = "7-1a2b"
MISSING = range(200, 212)
"""Numbers of the boiler's readings that never came, and nobody said why."""
OVERFLOWN = range(90, 96)
"""Numbers of the boiler's readings that its ring overwrote."""
LATE = range(150, 156)
"""Numbers of the boiler's readings that came with the second batch."""


def made(spark: SparkSession, path: str) -> None:
    """Fill an empty warehouse with two batches, one of which brings late readings."""
    rng = random.Random("desk scene")  # noqa: S311
    boiler = [_boiler(number, rng) for number in range(READINGS) if number not in {*MISSING, *OVERFLOWN}]
    hall = [_hall(number, rng) for number in range(READINGS - 60) if not 120 <= number < 150]
    late = [record for record in boiler if record.offset in LATE]
    first = [record for record in boiler if record.offset not in LATE]
    with interpreted_if(spark, small=True):
        job = BatchJob(spark, path)
        job.take(kafka_frame(spark, [*first, *hall, *_told()]), BatchId("query", 0), {})
        job.take(
            kafka_frame(spark, [replace(each, timestamp=NOON + timedelta(hours=3)) for each in late]),
            BatchId("query", 1),
            {},
        )
        job.save()
        places = (Device("plant", BOILER, "north", (), None, None), Device("plant", HALL, "south", (), None, None))
        load_registry(spark, path, Registry(places))


def _boiler(number: int, rng: random.Random) -> KafkaRecord:
    celsius = 61 + 6 * math.sin(number / 40) + rng.gauss(0, 0.4)
    value = json.dumps({"celsius": round(celsius, 2), "bar": round(1.8 + celsius / 100, 3)}).encode()
    headers = reading_headers(number, time=_at(number), device_boot=BOOT)
    return replace(reading(value, headers, offset=number, key=BOILER.encode()), timestamp=_at(number))


def _hall(number: int, rng: random.Random) -> KafkaRecord:
    value = json.dumps({"celsius": round(19 + math.cos(number / 90) + rng.gauss(0, 0.1), 2)}).encode()
    headers = reading_headers(10_000 + number, time=_at(number))
    return replace(reading(value, headers, offset=10_000 + number, key=HALL.encode()), timestamp=_at(number))


def _told() -> list[KafkaRecord]:
    """What the gateway tells: two losses, one of them without numbers, and that nothing waits."""
    overflow = _loss(BOILER, "sensor-ring-overflow", len(OVERFLOWN), OVERFLOWN[0], OVERFLOWN[-1])
    full = _loss(HALL, "buffer-full", 30, None, None)
    end = NOON + timedelta(hours=2, minutes=5)
    events = [
        ("sluice.gateway.loss", overflow),
        ("sluice.gateway.loss", full),
        ("sluice.gateway.heartbeat", NOTHING_WAITS),
    ]
    return [
        replace(
            reading(
                body,
                reading_headers(20_000 + place, time=end, boot_us=7_500_000_000, event_type=kind),
                offset=place,
                key=b"gw-1",
            ),
            topic="gateway-events",
            timestamp=end,
        )
        for place, (kind, body) in enumerate(events)
    ]


def _loss(device: str, reason: str, count: int, first: int | None, last: int | None) -> bytes:
    from_number, to_number = (first, last) if first is not None and last is not None else (120, 149)
    return json.dumps(
        {
            "device": device,
            "reason": reason,
            "count": count,
            "boot": BOOTS[0],
            "first_boottime_us": from_number * EACH_S * 1_000_000,
            "last_boottime_us": to_number * EACH_S * 1_000_000,
            "device_boot": BOOT if first is not None else None,
            "first_sequence": first,
            "last_sequence": last,
        }
    ).encode()


def _at(number: int) -> datetime:
    return NOON + timedelta(seconds=number * EACH_S)
