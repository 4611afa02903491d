"""Tables in which everything goes wrong, for comparisons of what the desk and Spark answer of them."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.decode.codec_declarations import Streams
from spark.decode.streams_file import parse_streams
from spark.ingest.reading_starts import append_start, first_start, start_after
from spark.log.log_table import BatchId
from spark.log.warehouse_version import note_registry
from spark.registry.registry import Calibration, Device, Gateway, Registry
from spark.registry.registry_table import load_registry
from spark.source.topic_changes import GoingOn, Loss, TopicNow
from spark.upkeep.device_deletion import delete_device
from spark.upkeep.quarantine_retry import retry
from spark.windows.windows_table import fold_date
from tests.support import hostile
from tests.support.device_folds import fold_all_devices
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import (
    BOOTS,
    NOON,
    drawn_batches,
    drawn_records,
    kafka_frame,
    reading,
    reading_headers,
    rfc3339,
)

LANE_OF = {"gw-1": "a1" * 6, "gw-2": "b2" * 6, "gw-3": "c3" * 6}
BUFFERS = {"gw-1": ("1" * 16, "5" * 16), "gw-2": ("2" * 16,), "gw-3": ("3" * 16,)}
"""Buffer files of each gateway: the first had another before."""
PARTITION = {"gw-1": 11, "gw-2": 12, "gw-3": 13}
DECLARED = 'unknown = "accept"\n[streams."device-count"]\ncodec = "json"\nmetrics.t = { max = %d }\n'
DECLARED += '[streams."device-pack"]\ncodec = "senml-json"\n'


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
            state = {**hostile.STATE, "lane_number": step % 7, "version": f"1.{step}"}
            value = json.dumps(state).encode()
            yield sent(gateway, next_of(events, gateway), at_s, "gateway.state", "gateway-events", value)


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


def streams(most: int = 1_000, more: str = "") -> Streams:
    """Declarations that reject values of `device-count` above `most`."""
    return parse_streams(DECLARED % most + more, Path("streams.toml"))


def taken(  # noqa: PLR0913, PLR0917 - what varies
    spark: SparkSession, warehouse: str, rng: random.Random, drawn: int, counted: int, batches_max: int | None = None
) -> BatchJob:
    """Take records of a bad week, and `counted_records`. Some files have times as earlier releases wrote them."""
    job = BatchJob(spark, warehouse, streams())
    start = first_start(1)
    append_start(spark, job.tables, start)
    job.state.begin(start)
    batches = [*drawn_batches(rng, drawn_records(rng, drawn)), [*counted_records(rng, counted)]]
    if batches_max is not None:
        last = batches_max - 1
        batches = [*batches[:last], [record for batch in batches[last:] for record in batch]]
    for number, batch in enumerate(batches):
        # Earlier releases wrote times of 96 bits.
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS" if number else "INT96")
        job.take(kafka_frame(spark, batch), BatchId("query", number), {})
        if number % 2:
            job.save()
            fold_all_devices(spark, job.tables)
    job.save()
    return job


def register_and_lose(job: BatchJob) -> None:
    """Load a registry, and note that Kafka lost records of a topic before they were read."""
    spark = job.spark
    note_registry(spark, job.warehouse, load_registry(spark, job.warehouse, registered()))
    now = {"device-count": TopicNow("id-2", {1: 5}, {1: 9})}
    lost = GoingOn({"device-count": {1: 5}}, (Loss("device-count", "id-1", 1, 2, 5),))
    append_start(spark, job.tables, start_after(first_start(1), job.next_ordinal, 1, lost, now))


def change(job: BatchJob) -> None:
    """Read rejects again with other declarations, delete a device, and fold windows."""
    retry(BatchJob(job.spark, job.warehouse, streams(9_000)))
    delete_device(job.spark, job.warehouse, "plant", "board-2")
    fold_date(job.spark, job.tables, NOON.date())
