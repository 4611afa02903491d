"""Headers and payloads as Spark reads them, against Python's own parser and decimals."""

import json
import random
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from spark import correction_records, payload_decode
from spark.kafka_records import typed_records
from spark.payload_decode import decoded
from tests import spark_oracle
from tests.oracle_payloads import UnreadableError
from tests.spark_oracle import KafkaRecord
from tests.spark_records import changed, correction, kafka_frame, reading, reading_headers

pytestmark = pytest.mark.spark


def object_of(*members: str) -> str:
    return "{" + ", ".join(members) + "}"


def tiny(count: int) -> list[str]:
    """Members whose values a variant cannot hold exactly."""
    return [f'"m{number}": {number}.5e-4' for number in range(count)]


JSON_TEXTS = [
    '{"t": 21.5, "h": 40}',
    '{"boot": 3, "seq": 17, "tick": 99, "t": 1}',
    '{"timestamp": 1795348810000, "t": 1}',
    '{"t": 1.10, "ok": true, "unit": "12", "none": null, "more": {"x": 1.0}, "list": [1.5, 2]}',
    ' {"t" : -0.0000005 }\n',
    '{"t": 0.0000005, "u": 0.0000004999999999999999999999999}',
    '{"t": 1e-7, "u": 5E-7, "v": -5e-7, "w": 1.5e+3}',
    '{"t": 1.0000004999999999999999999999e0}',
    '{"t": 1.2345675000000000000000000000000000000000001}',
    '{"t": 999999999999.999999}',
    '{"t": 999999999999.9999994}',
    '{"t": 999999999999.9999995}',
    '{"t": -999999999999.9999995, "u": 1}',
    '{"t": 1e11}',
    '{"t": 1e12}',
    '{"t": 1e400}',
    '{"t": 1e-400, "u": 2}',
    '{"t": 1e-9999999999}',
    '{"t": 0e999, "u": 0.0e-5, "v": -0, "w": -0.0}',
    '{"t": 9223372036854775808}',
    '{"t": 123456789012345678901234567890123456789012}',
    '{"t": 100.00, "u": 1200, "v": 1.0}',
    '{"t": 0.' + "0" * 40 + "1}",
    '{"t": ' + "1" * 900 + "}",
    '{"t": ' + "1" * 1500 + "}",
    '{"": 5, "a b": 6, "ä": 7, "q\\"1e5\\\\": 1e-1, "1.5": 2e0}',
    '{"text": "1e5 \\" 2 {", "t": 3e0, "\\u0041": 4e0}',
    '{"text": "' + "x\\n" * 20_000 + '", "t": 1e1}',
    '{"t": 1, "t": 2}',
    '{"a": {"x": 1, "x": 2}, "t": 1}',
    '{"t": NaN}',
    '{"t": Infinity}',
    "{'t': 1}",
    "{t: 1}",
    '{"t": 01}',
    '{"t": +1}',
    '{"t": .5}',
    '{"t": 1.}',
    '{"t": 1,}',
    '{"t": 1} x',
    '{"t": 1}{"t": 2}',
    '{"t": 1}\x00',
    '{"t": 1},0',
    '{"t": 1},0]',
    '{"t": 1},0,1]',
    '{"t": 1},0]}',
    '{"t": 1},"b":0}',
    '{"t": [1]},0] ',
    '{"t": "]", "u": 1}',
    '[{"t": 1}]',
    "12",
    '"text"',
    "null",
    "true",
    "",
    " ",
    "{}",
    '{"t": "21.5"}',
    '{"seq": 4}',
    '{"t": "\t", "u": 1}',
    '\ufeff{"t": 1}',
    '\u00a0{"t": 1}',
    '{/* no */ "t": 1}',
    '{"\\ud800": 1}',
    '{"t": "\\ud83d\\ude00", "u": 1}',
    '{"a":' * 600 + '{"b": 1}' + "}" * 600,
    '{"a":' * 2000 + '{"b": 1}' + "}" * 2000,
    object_of(*tiny(256), '"seq": 1', '"unit": "C"'),
    object_of(*tiny(257)),
    # Each would take minutes if members were looked up by name: they are either too many, or among too many.
    object_of(*tiny(20_000)),
    object_of(*(f'"x{number}": "1"' for number in range(60_000)), *tiny(256), '"ü": 1e-6', '"seq": 2'),
    object_of(*(f'"x{number}": "1"' for number in range(60_000)), *tiny(254), '"\U0001f321": 1e-6', '"\uffee": 2e-6'),
]
PLAIN_TEXTS = [
    *("21.5", "-3", "+4", " 7\n", ".5", "5.", "1e3", "1E-7", "5e-7", "-5e-7", "0e999", "1e12", "999999999999.9999995"),
    *("", "-", ".", "1 2", "NaN", "Infinity", "0x10", "1f", "1d", "1_0", "1,5", "\u0661", "1e", "e5", "--1", "on"),
    *("1e-10000000", "1e99999999999", "1e0007", "1" * 64, "0" * 63 + "7", "0" * 64 + "7", "0." + "0" * 30 + "1e31"),
]


def drawn_number(rng: random.Random) -> str:
    """Numbers as sensors and languages print them, and near what a decimal(18,6) can hold."""
    digits = str(rng.getrandbits(rng.choice([4, 20, 40, 64, 100])))
    match rng.randrange(6):
        case 0:
            text = digits
        case 1:
            text = f"{digits}.{rng.getrandbits(rng.choice([4, 20, 40, 90]))}"
        case 2:
            text = f"{digits[0]}.{digits[1:] or 0}e{rng.randrange(-20, 15)}"
        case 3:
            text = repr(rng.random() * 10.0 ** rng.randrange(-10, 16))
        case 4:
            text = f"{rng.randrange(10**6)}.{rng.randrange(10**6):06d}{rng.choice(['5', '49999', '50000000001', ''])}"
        case _:
            text = f"{digits}E+{rng.randrange(5)}"
    return rng.choice(["", "-"]) + text


def drawn_text(rng: random.Random) -> str:
    names = rng.sample(["t", "u", "seq", "v w", 'q"uote', "\\", "1e5", "ü"], rng.randrange(1, 4))
    members = [f"{json.dumps(name)}: {drawn_number(rng)}" for name in names]
    if rng.random() < 0.3:
        members.insert(0, rng.choice(['"n": {"x": 1e-3}', '"s": "1e-5\\\\"', '"s": "a\\"2e7"', '"l": [1e1, "]"]']))
    text = "{" + rng.choice([",", ", ", " ,\n"]).join(members) + "}"
    if rng.random() < 0.2:
        # One damaged byte.
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice('0"{}],e.x') + text[place + rng.randrange(2) :]
    return text


def test_payloads_are_read_as_pythons_decimals_read_them(spark: SparkSession) -> None:
    rng = random.Random(3)  # noqa: S311 - the same draw every time
    plain = [text.encode() for text in PLAIN_TEXTS] + [drawn_number(rng).encode() for _ in range(500)]
    objects = [text.encode() for text in JSON_TEXTS] + [drawn_text(rng).encode() for _ in range(1500)]
    objects += [b"\xff", b'{"t\xc3": 1}', b'{"t\xed\xa0\x80": 1}', '{"t": 1}'.encode("utf-16")]
    plain_headers = reading_headers(content_type="text/plain; charset=us-ascii")
    records = [reading(value, plain_headers, offset=offset) for offset, value in enumerate(plain)]
    records += [reading(value, offset=offset) for offset, value in enumerate(objects, start=len(records))]

    rows = decoded(typed_records(kafka_frame(spark, records))).select("offset", "metrics", "reject_reason").collect()

    found = {row.offset: row for row in rows}
    assert len(found) == len(records)
    for record in records:
        row = found[record.offset]
        metrics = None if row.metrics is None else {metric.name: metric.value for metric in row.metrics}
        assert metrics == expected_metrics(record), (record.value, row.reject_reason)
        assert (row.metrics is None) == (row.reject_reason is not None), record.value


def expected_metrics(record: KafkaRecord) -> dict[str, object] | None:
    try:
        return dict(spark_oracle.read_payload(spark_oracle.read_headers(record)))
    except UnreadableError:
        return None


REJECTS: list[tuple[KafkaRecord, str]] = [
    (reading(b'{"t": 1'), payload_decode.NOT_JSON),
    (reading(b'{"t": 1e30}'), payload_decode.OUT_OF_RANGE),
    (reading(b'{"state": "on"}'), payload_decode.NO_METRIC),
    (reading(object_of(*tiny(257)).encode()), "the payload has more than 256 metrics"),
    (reading(b"\xff"), payload_decode.NOT_UTF8),
    (reading(None), payload_decode.NO_VALUE),
    (reading(b"on", reading_headers(content_type="text/plain")), payload_decode.NOT_NUMBER),
    (reading(b"x", reading_headers(content_type="image/png")), payload_decode.UNKNOWN_CONTENT),
    (reading(headers=reading_headers(event_type="com.example")), payload_decode.UNKNOWN_TYPE),
    (reading(key=None), "the key is missing or not UTF-8"),
    (reading(key=b"\xc3"), "the key is missing or not UTF-8"),
]
GOOD = reading_headers(device_boot="7-1a2b3c4d")
HEADER_FAULTS: list[tuple[spark_oracle.Headers | None, str]] = [
    ([], "the headers are not"),
    (None, "the headers are not"),
    (GOOD[:13], "the headers are not"),
    (GOOD[:15], "the headers are not"),
    (GOOD[1::-1] + GOOD[2:], "the headers are not"),
    ([*GOOD, ("extra", b"1")], "the headers are not"),
    ([*GOOD[:4], ("ce_subject", None), *GOOD[5:]], "the headers are not"),
    ([*GOOD[:4], ("ce_subject", b"\xff"), *GOOD[5:]], "the headers are not"),
    (changed(GOOD, "ce_specversion", "0.3"), "ce_specversion"),
    (changed(GOOD, "ce_source", "gw-1"), "ce_source"),
    (changed(GOOD, "ce_id", "1"), "ce_id"),
    (changed(GOOD, "ce_lane", "ffffffffffff"), "ce_id"),
    (changed(GOOD, "ce_lanesequence", "2"), "ce_id"),
    (changed(GOOD, "ce_time", "2026-03-14T12:00:00Z"), "ce_time"),
    (changed(GOOD, "ce_time", "2026-13-14T12:00:00.000000Z"), "ce_time"),
    (changed(GOOD, "ce_time", "2026-03-14T12:00:00.000000+00:00"), "ce_time"),
    (changed(GOOD, "ce_receivedtime", ""), "ce_receivedtime"),
    (changed(GOOD, "ce_timeerror", "-1"), "ce_timeerror"),
    (changed(GOOD, "ce_timeerror", "9223372036854775808"), "ce_timeerror"),
    (changed(GOOD, "ce_boottime", "1.5"), "ce_boottime"),
    (changed(GOOD, "ce_devicesequence", "x"), "ce_devicesequence"),
    ([*GOOD, ("ce_boottimeerror", b"-1")], "ce_boottimeerror"),
    ([*GOOD, ("ce_boottimeerror", b"9223372036854775808")], "ce_boottimeerror"),
    ([*GOOD, ("ce_boottimeerror", b"nan")], "ce_boottimeerror"),
    ([*GOOD, ("ce_boottimeerror", b"1"), ("ce_doubt", b"conflict")], "the headers are not"),
    ([*GOOD, ("ce_doubt", b"true")], "ce_doubt"),
    ([*GOOD, ("ce_doubt", None)], "the headers are not"),
    ([*GOOD[:14], ("ce_doubt", b"conflict"), *GOOD[14:]], "the headers are not"),
    ([*GOOD, ("ce_doubt", b"conflict"), ("ce_doubt", b"conflict")], "the headers are not"),
]


def test_a_record_that_cannot_be_read_says_why_and_keeps_its_bytes(spark: SparkSession) -> None:
    cases = REJECTS + [(replace(reading(), headers=headers), reason) for headers, reason in HEADER_FAULTS]
    records = [replace(record, offset=offset) for offset, (record, _) in enumerate(cases)]

    rows = decoded(typed_records(kafka_frame(spark, records))).orderBy("offset").collect()

    for row, record, (_, reason) in zip(rows, records, cases, strict=True):
        assert row.reject_reason is not None, reason
        assert row.reject_reason.startswith(reason)
        assert row.value == record.value
        assert row.metrics is None
        assert expected_metrics(record) is None, reason


def test_headers_become_typed_columns(spark: SparkSession) -> None:
    headers = reading_headers(17, error_us=2**63 - 1, namespace="attic", device_boot="7-1a2b3c4d")
    event = reading_headers(18, event_type="sluice.gateway.heartbeat")
    records = [reading(headers=headers, key=b"attic/42"), reading(b'{"depth": 7}', event, key=b"gw-1", offset=1)]

    taken, heartbeat = decoded(typed_records(kafka_frame(spark, records))).orderBy("offset").collect()

    assert (taken.namespace, taken.gateway, taken.device, taken.stream) == ("attic", "gw-1", "42", "device-thermo")
    assert (taken.key, taken.lane, taken.lane_sequence) == ("attic/42", "0123456789ab", 17)
    assert (taken.buffer, taken.ce_id) == ("00112233445566aa", "00112233445566aa-0123456789ab-17")
    assert (taken.time_error_us, taken.boot_time_us) == (2**63 - 1, 123456789)
    assert (taken.device_boot, taken.device_sequence) == ("7-1a2b3c4d", 17)
    # What a gateway says of itself is kept, and is neither a measurement nor a reject.
    assert (heartbeat.device_boot, heartbeat.device_sequence) == (None, None)
    assert (heartbeat.metrics, heartbeat.reject_reason) == (None, None)


def test_headers_that_are_there_or_not_are_found_in_each_combination(spark: SparkSession) -> None:
    shapes = [
        (boot, doubt, error_us)
        for boot in (None, "7-1a2b3c4d")
        for doubt in (None, "redelivered", "conflict")
        for error_us in (None, 0, 2**63 - 1)
    ]
    records = [
        reading(headers=reading_headers(17, device_boot=boot, doubt=doubt, boot_error_us=error_us), offset=offset)
        for offset, (boot, doubt, error_us) in enumerate(shapes)
    ]

    rows = typed_records(kafka_frame(spark, [*records, reading(headers=[], offset=99)])).orderBy("offset").collect()

    found = [(r.device_boot, r.device_sequence, r.doubt, r.boot_time_error_us, r.header_fault) for r in rows]
    assert found[:-1] == [
        (boot, None if boot is None else 17, doubt, error_us, None) for boot, doubt, error_us in shapes
    ]
    assert (rows[-1].doubt, rows[-1].boot_time_error_us) == (None, None)


WRONG_CORRECTIONS: list[tuple[KafkaRecord, str]] = [
    (replace(correction(1, {}), value=None), correction_records.NO_BODY),
    (replace(correction(1, {}), value=b"\xff"), correction_records.NO_BODY),
    (replace(correction(1, {}), value=b"[1]"), correction_records.NO_BODY),
    (replace(correction(1, {}), value=(correction(1, {}).value or b"") + b"{}"), correction_records.NO_BODY),
    (replace(correction(1, {}), value=b"{}"), "boot of the correction is not text"),
    (correction(1, {"boot": 7}), "boot of the correction"),
    (correction(1, {"version": 0}), "version of the correction is not a whole number from 1"),
    (correction(1, {"version": 1.5}), "version of the correction"),
    (correction(1, {"version": True}), "version of the correction"),
    (correction(1, {"version": 2**63}), "version of the correction"),
    (correction(1, {"quality": "estimated"}), "quality of the correction is not synced or bounded"),
    (correction(1, {"boottime_us": "0"}), "boottime_us of the correction is not a whole number"),
    (correction(1, {"offset_us": None}), "offset_us of the correction"),
    (correction(1, {"offset_us": -(2**63) - 1}), "offset_us of the correction"),
    (correction(1, {"rate_ppm": 100_000.1}), "rate_ppm of the correction is not a number from -100000 to 100000"),
    (correction(1, {"rate_ppm": 1e300}), "rate_ppm of the correction"),
    (replace(correction(1, {}), value=b'{"rate_ppm": NaN}'), correction_records.NO_BODY),
    (correction(1, {"error_us": -1}), "error_us of the correction is not a whole number from 0"),
    (correction(1, {"error_growth_ppm": -0.1}), "error_growth_ppm of the correction"),
    (correction(1, {"supersedes": 1}), "supersedes of the correction is not true or false"),
]


def test_a_correction_that_makes_no_sense_is_a_reject_with_its_reason(spark: SparkSession) -> None:
    right = [correction(1, {}), correction(1, {"rate_ppm": -12.3456785, "more": [], "device": None, "version": 2**62})]
    cases = WRONG_CORRECTIONS + [(record, "") for record in right]
    records = [replace(record, offset=offset) for offset, (record, _) in enumerate(cases)]

    rows = decoded(typed_records(kafka_frame(spark, records))).orderBy("offset").collect()

    for row, record, (_, reason) in zip(rows, records, cases, strict=True):
        assert (row.reject_reason or "").startswith(reason), record.value
        assert bool(row.reject_reason) == bool(reason), (record.value, row.reject_reason)
        assert row.metrics is None
