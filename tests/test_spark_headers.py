"""Headers made into columns: the usual record's cheap way gives what the oracle reads, of any record."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.kafka_records import SHAPES, typed_records
from tests import spark_oracle
from tests.oracle_payloads import UnreadableError
from tests.spark_oracle import Headers, KafkaRecord
from tests.spark_records import EPOCH, NOON, changed, damaged, kafka_frame, reading, reading_headers

pytestmark = pytest.mark.spark

METHOD_BYTES_MAX = 8000
"""HotSpot never compiles a longer method (-XX:HugeMethodLimit): it would be interpreted, row by row."""

SPOILT = [
    *("", " ", "0", "-0", "-1", "+1", "007", "-007", " 1", "1 ", "1\n", "1.0", "1e3", "\u0661", "nan"),
    *("9" * 18, "9" * 19, "9" * 20, "0" * 18 + "7", "0" * 20, "9223372036854775807", "9223372036854775808"),
    *("-9223372036854775808", "-9223372036854775809", "1.0\n", "redelivered", "Conflict", "\u00e4", "a\x00b", "/"),
    *(
        "/plant/gw-1",
        "/plant/gw-1/",
        "//gw-1",
        "/plant/",
        "plant/gw-1",
        "/a/b/c",
        "/a",
        "/a/a",
        "/\n/\n",
        "/pl\u00e4nt/x y",
    ),
    *("2026-03-14T12:00:00.000000Z", "2026-03-14T12:00:00.000000Z\n", "2026-03-14 12:00:00.000000Z"),
    *("2026-03-14T12:00:00.00000Z", "2026-03-14T12:00:00.0000000Z", "2026-03-14T12:00:00.00000 Z"),
    *("2026-02-29T12:00:00.000000Z", "2024-02-29T23:59:59.999999Z", "2026-03-14T24:00:00.000000Z"),
    *("2026-03-14T12:60:00.000000Z", "2026-03-14T12:00:60.000000Z", "0000-03-14T12:00:00.000000Z"),
    *("0001-01-01T00:00:00.000000Z", "9999-12-31T23:59:59.999999Z", "1969-12-31T23:59:59.000001Z"),
    *("+026-03-14T12:00:00.000000Z", "2026-03-14T12:00:00.000000z", "2026-03-14T12:00:00,000000Z"),
    *("00112233445566aa-0123456789ab-1", "00112233445566AA-0123456789ab-1", "00112233445566aa-0123456789ab-1\n"),
    *("00112233445566aa-0123456789ab-01", "0112233445566aa-0123456789ab-1", "00112233445566aa-0123456789ab--1"),
    *("00112233445566aa-0123456789ab-1-1", "0123456789ab", "0123456789ab-1", "0123456789a", "0123456789AB"),
]


def drawn(rng: random.Random) -> Headers | None:
    """Headers in one of the contract's shapes, mostly with something wrong."""
    headers = reading_headers(
        rng.choice([0, 1, 17, 2**63 - 1]),
        time=datetime(1, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randrange(315 * 10**15)),
        error_us=rng.choice([0, 1000, 2**63 - 1]),
        boot_us=rng.randrange(-(2**63), 2**63),
        device_boot=rng.choice([None, "7-1a2b3c4d"]),
        doubt=rng.choice([None, None, "redelivered", "conflict"]),
        boot_error_us=rng.choice([None, None, 0, 2**63 - 1]),
    )
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        place = rng.randrange(len(headers))
        match rng.randrange(8):
            case 0:
                headers[place] = (headers[place][0], rng.choice([None, b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xa4"]))
            case 1:
                headers[place : place + 1] = []
            case 2:
                headers.insert(place, rng.choice(headers))
            case 3:
                other = rng.randrange(len(headers))
                headers[place], headers[other] = headers[other], headers[place]
            case 4:
                # Two values that make a character together, and none apart.
                following = (place + 1) % len(headers)
                headers[place] = (headers[place][0], b"\xc3")
                headers[following] = (headers[following][0], b"\xa4")
            case _:
                headers = changed(headers, headers[place][0], rng.choice(SPOILT))
        if not headers:
            return None
    return headers


def oracle(record: KafkaRecord) -> tuple[object, ...] | None:
    """What the columns must hold; None where the record cannot be read."""
    try:
        event = spark_oracle.read_headers(record)
    except UnreadableError:
        return None
    given = {name: (value or b"").decode() for name, value in record.headers or []}
    return (
        *(event.namespace, event.gateway, event.device, *event.identity, event.ce_id, event.type),
        *(given["ce_subject"], us(event.time), event.time_error_us, event.time_quality),
        *(us(spark_oracle.time(given["ce_receivedtime"])), event.gateway_boot, event.boot_time_us, event.content_type),
        *(given.get("ce_deviceboot"), given.get("ce_doubt"), event.boot_time_error_us),
        None if "ce_devicesequence" not in given else int(given["ce_devicesequence"]),
    )


def columns(row: Row) -> tuple[object, ...]:
    return (
        *(row.namespace, row.gateway, row.device, row.buffer, row.lane, row.lane_sequence, row.ce_id, row.ce_type),
        *(row.subject, row.event_us, row.time_error_us, row.time_quality),
        *(row.received_us, row.gateway_boot, row.boot_time_us, row.content_type),
        *(row.device_boot, row.doubt, row.boot_time_error_us, row.device_sequence),
    )


@pytest.mark.parametrize("compiled", [True, False])
def test_headers_are_read_as_the_oracle_reads_them(
    spark: SparkSession, request: pytest.FixtureRequest, *, compiled: bool
) -> None:
    if not compiled:
        # As `ingest` runs small batches.
        for name, value in (("wholeStage", "false"), ("factoryMode", "NO_CODEGEN")):
            spark.conf.set(f"spark.sql.codegen.{name}", value)
            request.addfinalizer(partial(spark.conf.unset, f"spark.sql.codegen.{name}"))
    rng = random.Random(11)  # noqa: S311 - the same draw every time
    right = reading_headers(1, device_boot="7-1a2b3c4d", doubt="conflict", boot_error_us=5)
    # Each text in each place, then several things wrong at once.
    kinds = [changed(right, name, text) for name, _ in right for text in SPOILT]
    kinds += [
        changed(changed(right, "ce_lanesequence", text), "ce_id", f"{'0' * 16}-0123456789ab-{text}") for text in SPOILT
    ]
    records = [reading(headers=headers) for headers in [*kinds, *(drawn(rng) for _ in range(1500))]]
    records += [damaged(rng, record) for record in records[:200]]
    keys = [b"42", b"plant/42", b"plant/", b"plant", b"plant/plant/42", b"", b"\xff", None, "pl\u00e4nt/x".encode()]
    records = [
        replace(record, offset=offset, key=record.key if offset % 3 else rng.choice(keys))
        for offset, record in enumerate(records)
    ]

    # As numbers: Python cannot make a local time of the first day of year 1.
    as_us = {"event_us": F.unix_micros("event_time"), "received_us": F.unix_micros("received_time")}
    typed = typed_records(kafka_frame(spark, records)).withColumns(as_us).drop("event_time", "received_time")
    rows = typed.orderBy("offset").drop("kafka_timestamp").collect()

    read = 0
    for row, record in zip(rows, records, strict=True):
        expected = oracle(record)
        assert (row.header_fault is None) == (expected is not None), (record.headers, row.header_fault)
        if expected is None:
            # What came is kept whole, and has no identity.
            assert row.ce_id is None
            assert headers_of(row) == record.headers
        else:
            read += 1
            assert columns(row) == expected, record.headers
            assert row.headers is None
    assert 200 < read < len(records) - 200


def us(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


def headers_of(row: Row) -> Headers | None:
    if row.headers is None:
        return None
    return [(header.key, None if header.value is None else bytes(header.value)) for header in row.headers]


def test_what_could_be_read_is_kept_beside_the_fault(spark: SparkSession) -> None:
    spoilt = changed(changed(reading_headers(17), "ce_time", "yesterday"), "ce_lane", "ffffffffffff")

    (row,) = typed_records(kafka_frame(spark, [reading(headers=spoilt)])).collect()

    assert row.header_fault == "ce_id is not buffer, lane and lane sequence"
    assert (row.namespace, row.gateway, row.device, row.buffer) == ("plant", "gw-1", "42", "00112233445566aa")
    assert (row.lane, row.lane_sequence, row.event_time) == ("ffffffffffff", 17, None)
    assert row.received_time == NOON.replace(tzinfo=None)


def test_the_compiled_code_is_short_enough_to_be_compiled_further(spark: SparkSession) -> None:
    assert len(SHAPES) == 8
    # An RDD beneath, as the batches of a stream have: rows that are there already would be computed while planning.
    frame = spark.createDataFrame(kafka_frame(spark, [reading()]).rdd, kafka_frame(spark, []).schema)
    stages = typed_records(frame)._jdf.queryExecution().debug().codegenToSeq()
    sizes = [stages.apply(number)._3().maxMethodCodeSize() for number in range(stages.size())]
    assert sizes
    assert max(sizes) < METHOD_BYTES_MAX
