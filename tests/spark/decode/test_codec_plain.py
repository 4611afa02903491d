"""Payloads and whole records as plain Python reads them, against the tests' own reader."""

import dataclasses
from decimal import Decimal
from pathlib import Path

import pytest

from spark.decode.codec_declarations import NO_STREAMS, Streams
from spark.decode.codec_plain import UNDECLARED_STREAM, PayloadReader
from spark.decode.record_plain import ReadRecord, read_record
from spark.decode.record_rules import UNKNOWN_TYPE, Headers
from spark.decode.streams_file import parse_streams
from tests.spark.decode.test_payload_decode import JSON_TEXTS, PLAIN_TEXTS
from tests.spark.decode.test_spark_headers import GOOD, HEADER_FAULTS
from tests.support import oracle_payloads
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, changed, reading, reading_headers

DECLARED = parse_streams(
    """
    [streams.device-thermo]
    codec = "json"
    metrics.t = { unit = "°C", decimals = 2, min = -40, max = 125 }
    metrics.u = {}
    [streams."device-*"]
    codec = "number"
    """,
    Path("streams.toml"),
)


@dataclasses.dataclass
class Event:
    record: KafkaRecord
    content_type: str
    type: str = "sluice.reading"


def read(topic: str, key: bytes, value: bytes, headers: Headers) -> ReadRecord:
    return read_record(topic, 0, key, value, headers, DECLARED)


@pytest.mark.parametrize("streams", [NO_STREAMS, DECLARED], ids=["undeclared", "declared"])
@pytest.mark.parametrize(
    ("topic", "content_type", "texts"),
    [
        ("device-thermo", "application/json", JSON_TEXTS),
        ("device-thermo", "application/octet-stream", JSON_TEXTS),
        ("device-level", "text/plain; charset=utf-8", PLAIN_TEXTS),
    ],
)
def test_json_and_bare_numbers_are_read_as_the_documents_say(
    streams: Streams, topic: str, content_type: str, texts: list[str]
) -> None:
    for text in [*texts, "\udcff"]:
        value = text.encode("utf-8", "surrogateescape")
        found = PayloadReader(streams).read(topic, content_type, value)
        record = dataclasses.replace(reading(value), topic=topic)
        wanted = oracle_payloads.outcome(Event(record, content_type), streams)
        assert (found.reject_reason is None) == (wanted.kind is None), (text[:200], found, wanted)
        if wanted.metrics is not None:
            assert [(name, value) for name, value, _ in found.metrics or ()] == [*wanted.metrics.items()], text[:200]


def test_the_declaration_of_the_topic_counts() -> None:
    declared = PayloadReader(DECLARED)
    assert declared.read("device-x", "application/json", b"7").metrics == [("value", Decimal(7), None)]
    assert declared.read("meter", "text/plain", b"7").reject_reason == UNDECLARED_STREAM
    assert declared.read("device-x", "text/plain", None).reject_reason == "undecodable: the record has no value"
    assert "no decoder" in str(PayloadReader(NO_STREAMS).read("x", "image/png", b"7").reject_reason)


def test_a_record_is_read_with_its_time_its_device_and_its_units() -> None:
    headers = reading_headers(7)
    found = read("device-thermo", b"plant/42", b'{"t": 21.504, "x": 1}', headers)
    assert (found.device, found.gateway, found.is_reading) == ("42", "gw-1", True)
    assert found.event_us == round(NOON.timestamp() * 1e6)
    assert (found.time_error_us, found.time_quality) == (1_000, "estimated")
    assert found.metrics == [("t", Decimal("21.50"), None)]
    assert (found.units, found.undeclared, found.reject_reason) == ({"t": "°C"}, ["x"], None)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([], "header: there is none of the gateway's headers"),
        (changed(reading_headers(), "ce_type", "com.example"), UNKNOWN_TYPE),
        (changed(reading_headers(), "ce_type", "sluice.gateway.heartbeat"), None),
        ([(name, b"\xff") for name, _ in reading_headers()], "header: ce_specversion has no value in UTF-8"),
    ],
)
def test_a_record_that_is_no_reading_says_why(headers: list[tuple[str, bytes]], reason: str | None) -> None:
    found = read("device-thermo", b"42", b"{", headers)
    assert (found.reject_reason, found.metrics, found.device) == (reason, [], "42")


def test_headers_are_judged_as_in_batches() -> None:
    for headers, reason in HEADER_FAULTS:
        found = read("device-thermo", b"42", b'{"t": 1}', headers or [])
        assert str(found.reject_reason).startswith(f"header: {reason}"), (headers, found)
        assert not found.metrics
    whole = [("traceparent", b"00"), *GOOD, ("ce_doubt", b"redelivered"), ("ce_boottimeerror", b"5"), ("", None)]
    assert read("device-thermo", b"42", b'{"t": 1}', whole).reject_reason is None
    found = read("device-thermo", b"\xff", b'{"t": 1}', GOOD)
    assert (found.device, found.reject_reason) == (None, "header: the key is missing or not UTF-8")


@pytest.mark.parametrize("text", ["", "yesterday", "2026-03-14", "2026-03-14T12:00:00", "9999-99-99T00:00:00Z"])
def test_a_time_that_is_none_is_left_out(text: str) -> None:
    headers = changed(changed(reading_headers(), "ce_time", text), "ce_timeerror", "-1")
    found = read("device-thermo", b"42", b'{"t": 1}', headers)
    assert (found.event_us, found.time_error_us) == (None, None)
    assert found.reject_reason == "header: ce_time is not RFC 3339 in UTC with microseconds"
