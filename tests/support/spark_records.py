"""Kafka records for the tests of the Spark jobs, and the DataFrames that Spark's Kafka source makes of them."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, SparkSession

from spark.decode.record_frames import SOURCE_SCHEMA
from spark.source.topic_changes import TopicNow
from spark.source.topic_watch import TopicWatch
from tests.support.spark_oracle import Headers, KafkaRecord

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BOOTS = ("5d0a1f7e", "0b5c9d3a", "77e1f204")
BUFFER = "00112233445566aa"
LANE = "0123456789ab"


def rfc3339(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")


def reading_headers(  # noqa: PLR0913 - one argument for each thing that varies
    sequence: int = 1,
    *,
    time: datetime = NOON,
    error_us: int = 1_000,
    quality: str = "estimated",
    gateway_boot: str = BOOTS[0],
    boot_us: int = 123_456_789,
    boot_error_us: int | None = None,
    event_type: str = "sluice.reading",
    content_type: str = "application/json",
    buffer: str = BUFFER,
    lane: str = LANE,
    namespace: str = "plant",
    device_boot: str | None = None,
    counter: str | None = None,
    doubt: str | None = None,
) -> Headers:
    """The headers as the gateway writes them."""
    texts = [
        ("ce_specversion", "1.0"),
        ("ce_id", f"{buffer}-{lane}-{sequence}"),
        ("ce_source", f"/{namespace}/gw-1"),
        ("ce_type", event_type),
        ("ce_subject", "device/42/thermo"),
        ("ce_time", rfc3339(time)),
        ("ce_timeerror", str(error_us)),
        ("ce_timequality", quality),
        ("ce_receivedtime", rfc3339(time)),
        ("ce_gatewayboot", gateway_boot),
        ("ce_boottime", str(boot_us)),
        ("ce_lane", lane),
        ("ce_lanesequence", str(sequence)),
        ("content-type", content_type),
    ]
    if device_boot is not None:
        texts += [("ce_deviceboot", device_boot), ("ce_devicesequence", str(sequence))]
    if counter is not None:
        texts.append(("ce_devicecounter", counter))
    if doubt is not None:
        texts.append(("ce_doubt", doubt))
    if boot_error_us is not None:
        texts.append(("ce_boottimeerror", str(boot_error_us)))
    return [(name, text.encode()) for name, text in texts]


def reading(
    value: bytes | None = b'{"temperature": 21.5}',
    headers: Headers | None = None,
    *,
    offset: int = 0,
    key: bytes | None = b"42",
) -> KafkaRecord:
    """One record, right unless told otherwise."""
    headers = reading_headers() if headers is None else headers
    return KafkaRecord("device-thermo", 0, offset, NOON + timedelta(hours=1), key, value, headers)


def through(  # noqa: PLR0913 - one argument for each thing that varies
    gateway: str,
    sequence: int,
    number: int,
    *,
    offset: int,
    payload: str = '{"t": 1}',
    error_us: int = 1_000,
    time: datetime = NOON,
    partition: int = 0,
    arrived: timedelta = timedelta(seconds=5),
) -> KafkaRecord:
    """A numbered reading of device 42 by one of two gateways, which are told by their buffers."""
    headers = reading_headers(
        sequence, time=time, error_us=error_us, buffer=gateway * 16, lane=gateway * 12, device_boot="7-1a2b3c4d"
    )
    headers = changed(headers, "ce_devicesequence", str(number))
    record = reading(payload.encode(), headers, offset=offset)
    return replace(record, partition=partition, timestamp=NOON + arrived)


def correction(
    sequence: int,
    members: Mapping[str, object],
    *,
    told: datetime = NOON + timedelta(hours=1),
    offset: int = 0,
    namespace: str = "plant",
) -> KafkaRecord:
    """A time correction, right but for the members that are given: the boot was at noon, to a millisecond."""
    body: dict[str, object] = {
        "device": None,
        "boot": BOOTS[0],
        "version": 1,
        "quality": "synced",
        "boottime_us": 0,
        "offset_us": (NOON - EPOCH) // timedelta(microseconds=1),
        "rate_ppm": 0,
        "error_us": 1_000,
        "error_growth_ppm": 0,
        "supersedes": False,
    }
    headers = reading_headers(
        sequence, time=told, quality="synced", event_type="sluice.gateway.time-correction", namespace=namespace
    )
    value = json.dumps(body | dict(members)).encode()
    return replace(reading(value, headers, offset=offset, key=b"gw-1"), topic="gateway-events")


def changed(headers: Headers, name: str, text: str) -> Headers:
    """The headers with one value replaced."""
    return [(each, text.encode() if each == name else value) for each, value in headers]


def kafka_frame(spark: SparkSession, records: Iterable[KafkaRecord]) -> DataFrame:
    """The records as Spark's Kafka source gives them."""
    rows = [(r.key, r.value, r.topic, r.partition, r.offset, r.timestamp, 1, r.headers) for r in records]
    return spark.createDataFrame(rows, SOURCE_SCHEMA)


NOTHING_WAITS = b'{"offsets": {}, "pending": [], "quarantined": [], "low_watermark": null}'
"""A heartbeat's value."""
STATE = b'{"version": "1.2", "lane_number": 1, "conditions": {"bad": [], "warn": [], "note": []}}'
"""A state's value."""
STATES = 3
"""States among drawn records. The first one cannot be read."""


def drawn_records(rng: random.Random, count: int) -> list[KafkaRecord]:
    """Records that a site may send in a bad week: disorder, days of lateness, copies, damage, wrong and unset clocks.

    Offsets are dense in each topic-partition. A copy keeps its key and so its partition, as on a real topic, and may
    carry another event time: the gateway may have learnt it better since.
    """
    lanes = [(f"{rng.getrandbits(64):016x}", f"{rng.getrandbits(48):012x}") for _ in range(3)]
    sent: list[KafkaRecord] = []
    offsets: dict[tuple[str, int], int] = {}

    def send(record: KafkaRecord) -> None:
        place = (record.topic, record.partition)
        offset = offsets.get(place, 0)
        offsets[place] = offset + 1
        sent.append(replace(record, offset=offset))

    for sequence in range(count):
        buffer, lane = rng.choice(lanes)
        time = NOON + timedelta(microseconds=rng.randrange(300_000_000))
        if rng.random() < 0.2:
            time -= timedelta(days=rng.choice([1, 2, 40]))
        if rng.random() < 0.05:
            time = rng.choice([datetime(2000, 1, 1, 0, 0, sequence % 60, tzinfo=UTC), NOON + timedelta(days=3)])
        device = rng.randrange(4)
        namespace = rng.choice(["plant", "attic"])
        device_boot = rng.choice([None, "7-1a2b3c4d"])
        unsynced = rng.random() < 0.3
        content_type = rng.choice(["application/json", "application/json; charset=utf-8", "text/plain"])
        headers = reading_headers(
            sequence,
            # Whole seconds are often shared: ties for first and last.
            time=time.replace(microsecond=0) if rng.random() < 0.3 else time,
            error_us=rng.choice([2**63 - 1, 3_600_000_000]) if unsynced else rng.randrange(5_000),
            quality=rng.choice(["bounded", "received", "device"] if unsynced else ["estimated", "received", "device"]),
            gateway_boot=rng.choice(BOOTS),
            boot_us=rng.choice([rng.randrange(-60_000_000, 600_000_000), rng.randrange(-(2**63), 2**63)]),
            boot_error_us=rng.choice([0, rng.randrange(100_000), 2**63 - 1]) if unsynced else None,
            content_type=content_type,
            buffer=buffer,
            lane=lane,
            namespace=namespace,
            device_boot=device_boot,
            counter=None if device_boot is None else rng.choice([None, "site/paris/thermo", "site/rome/thermo"]),
            doubt=rng.choice(["redelivered", "conflict"]) if rng.random() < 0.1 else None,
        )
        record = KafkaRecord(
            topic=rng.choice(["device-thermo", "device-power"]),
            partition=device % 2,
            offset=0,
            timestamp=NOON + timedelta(hours=1),
            key=rng.choice([f"{device}", f"plant/{device}"]).encode(),
            value=drawn_value(rng) if content_type == "text/plain" else drawn_object(rng),
            headers=headers,
        )
        send(damaged(rng, record) if rng.random() < 0.1 else record)
        if rng.random() < 0.05:
            send(record)
        if rng.random() < 0.2:
            earlier = rng.choice(sent)
            send(better_timed(earlier) if rng.random() < 0.3 else earlier)
        if rng.random() < 0.06:
            told = drawn_correction(rng, 20_000 + sequence)
            send(damaged(rng, told) if rng.random() < 0.1 else told)
        if rng.random() < 0.05:
            send(
                replace(
                    record,
                    topic="gateway-events",
                    key=b"gw-1",
                    value=rng.choice([b'{"depth": 7}', NOTHING_WAITS]),
                    headers=reading_headers(10_000 + sequence, event_type="sluice.gateway.heartbeat"),
                )
            )
    for number in range(STATES):
        told = replace(sent[0], topic="gateway-events", key=b"gw-1", value=STATE if number else b'{"version": "1.2"}')
        send(replace(told, headers=reading_headers(1_000_000 + number, event_type="sluice.gateway.state")))
    return sent


def drawn_correction(rng: random.Random, sequence: int) -> KafkaRecord:
    """One of those that a gateway may send of a boot, or something that is none."""
    whole = rng.choice([0, 20, -50])
    start = rng.choice([NOON - timedelta(minutes=rng.randrange(20)), NOON - timedelta(days=40), NOON.replace(2000)])
    members: dict[str, object] = {
        "boot": rng.choice(BOOTS),
        "offset_us": (start - EPOCH) // timedelta(microseconds=1),
        "version": rng.randrange(1, 5),
        "quality": rng.choice(["synced", "synced", "bounded"]),
        "boottime_us": rng.choice([0, rng.randrange(600_000_000), rng.randrange(-(2**63), 2**63)]),
        "rate_ppm": rng.choice([whole, rng.uniform(-200, 200), rng.uniform(-1, 1) * 1e-6, -100_000]),
        "error_us": rng.choice([0, rng.randrange(5_000_000), 2**63 - 1]),
        "error_growth_ppm": rng.choice([0, 100, rng.uniform(0, 500), 100_000]),
        "supersedes": rng.random() < 0.3,
    }
    if rng.random() < 0.2:
        name = rng.choice(list(members))
        members[name] = rng.choice([None, "1", -1.5, 1e300, [], True, 2**63, float("nan")])
    return correction(
        sequence,
        namespace=rng.choice(["plant", "attic"]),
        told=rng.choice([NOON, NOON + timedelta(minutes=3), NOON + timedelta(hours=1)]),
        members=members,
    )


def drawn_value(rng: random.Random) -> bytes:
    return f"{rng.randrange(-(10**9), 10**9)}e-{rng.randrange(9)}".encode()


def drawn_object(rng: random.Random) -> bytes:
    members: dict[str, object] = {"boot": 7, "seq": rng.randrange(100), "t": rng.randrange(-400, 400) / 10}
    if rng.random() < 0.5:
        members["humidity"] = rng.random() * 100
    return json.dumps(members).encode()


def damaged(rng: random.Random, record: KafkaRecord) -> KafkaRecord:
    headers = record.headers or []
    return rng.choice(
        [
            replace(record, value=b'{"t": 21.'),
            replace(record, value=b"\xff\xfe"),
            replace(record, value=None),
            replace(record, key=None),
            replace(record, headers=None),
            replace(record, headers=headers[1:]),
            replace(record, headers=headers[::-1]),
            replace(record, headers=changed(headers, "ce_time", "yesterday")),
            replace(record, headers=changed(headers, "content-type", "image/png")),
            replace(record, headers=changed(headers, "ce_type", "com.example.other")),
        ]
    )


def better_timed(record: KafkaRecord) -> KafkaRecord:
    return replace(record, headers=changed(record.headers or [], "ce_time", rfc3339(NOON)))


def drawn_batches(rng: random.Random, records: Sequence[KafkaRecord]) -> list[list[KafkaRecord]]:
    """A split into batches: offsets of a partition in order, partitions at different paces."""
    partitions: dict[tuple[str, int], list[KafkaRecord]] = {}
    for record in records:
        partitions.setdefault((record.topic, record.partition), []).append(record)
    waiting = list(partitions.values())
    batches: list[list[KafkaRecord]] = []
    while any(waiting):
        batch: list[KafkaRecord] = []
        for partition in waiting:
            taken = rng.randrange(len(records) // 5) if len(batches) < 2 else len(partition)
            batch += partition[:taken]
            del partition[:taken]
        rng.shuffle(batch)
        batches.append(batch)
    return batches


def topics_now(spark: SparkSession, bootstrap: str, options: Mapping[str, str], pattern: str) -> dict[str, TopicNow]:
    """Ask once for the topics whose whole names match a Java pattern. Raises TopicWatchError."""
    with TopicWatch(spark, bootstrap, options, pattern) as watch:
        return watch.ask()
