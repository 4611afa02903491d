"""Structured events become what their binary records become, but for the topic that they are in."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.buffer.rows import Row, Series, StructuredEvents
from gateway.clock.gateway_clock import BootClock, BootTimes
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.record import RecordEncoder
from gateway.kafka.structured_record import StructuredEncoder
from gateway.user_properties import text_of
from spark.decode.codec_declarations import Streams
from spark.decode.record_plain import read_record
from spark.decode.topic_speakers import FAULT, Speakers, TopicOwners
from tests.gateway.kafka.test_kafka_record import CLOCK, GATEWAY, LANE, LEARNT, UNKNOWN, decoded
from tests.gateway.kafka.test_structured_record import USERS
from tests.support.read_records import read, rows_read, rows_typed
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import reading

VARIABLES = (("site", 'Büro "1"'),)
SERIES = Series("readings", "42", "42", "site/a", "sluice.reading", "application/json", "site/a", VARIABLES)
EVENTS = StructuredEvents(instead=True, variables=VARIABLES)
TEMPERATURE = b'{"temperature": 21.5}'


def both(row: Row, clock: BootClock = CLOCK, series: Series = SERIES) -> tuple[KafkaRecord, KafkaRecord]:
    """A row's binary record, and its event in another topic."""
    encoders: dict[str, RecordEncoder | StructuredEncoder] = {
        series.topic: RecordEncoder(GATEWAY, LANE, series),
        "structured-readings": StructuredEncoder(GATEWAY, LANE, series, EVENTS),
    }
    # As a gateway does: it asks its clock once for both.
    records, times = [], BootTimes(clock)
    for topic, encoder in encoders.items():
        batch = EncodedBatch("none")
        batch.add(encoder.encode(row, times, 0))
        (record,) = decoded(batch)
        records.append(replace(reading(record.value, record.headers, key=record.key), topic=topic))
    binary, event = records
    return binary, event


def row_of(payload: bytes = TEMPERATURE, number: int = 17) -> Row:
    return Row.of_columns((1, number, 1, 1_000_000, 900_000, 1_500, None, "7-1a2b3c4d", number, payload, 0, None, None))


@given(
    row=st.builds(
        lambda *columns: Row.of_columns((1, 17, 1, *columns)),
        st.integers(0, 10**15),
        st.none() | st.integers(0, 10**15),
        st.sampled_from([0, 1_000]),
        st.none() | st.just(123),
        st.none() | st.just("7-1a2b3c4d"),
        st.none() | st.integers(0, 2**63 - 1),
        st.binary(max_size=9) | st.sampled_from([TEMPERATURE, b"null", b"21.5"]),
        st.integers(0, 2),
        st.none(),
        st.none() | USERS.map(text_of) | st.just("damaged"),
    ),
    clock=st.sampled_from([CLOCK, UNKNOWN, LEARNT]),
    series=st.sampled_from([SERIES, structs.replace(SERIES, content_type="text/plain", topic="device-a")]),
)
def test_an_event_is_read_as_its_binary_record(row: Row, clock: BootClock, series: Series) -> None:
    binary, event = (found.asDict() for found in rows_typed(both(row, clock, series)))
    assert (binary.pop("topic"), event.pop("topic")) == (series.topic, "structured-readings")
    # Blanks around JSON are no part of an event.
    assert event.pop("value") in {value := binary.pop("value"), value.strip(b" \t\r\n")}
    assert event == binary
    assert event["stream"] == series.topic
    assert event["header_fault"] is None


@pytest.mark.parametrize(
    "given", [1, None, "", "[", "{}", "[1]", '[["a"]]', '[["a", 1]]', '[["a", "\\ud800"]]', "[" * 100_000]
)
def test_user_properties_in_another_form_are_left_out(given: object) -> None:
    _, event = both(row_of())
    changed = json.dumps({**json.loads(event.value or b""), "mqttproperties": given}).encode()
    strange, plain = rows_typed([replace(event, value=changed), event])
    assert strange == plain


def test_headers_of_others_are_kept_beside_the_variables() -> None:
    _, event = both(row_of())
    (row,) = rows_typed([replace(event, headers=[("traceparent", b"00"), *(event.headers or []), ("raw", b"\xff")])])
    assert [tuple(each) for each in row.headers] == [
        *(("route_site", 'Büro "1"'.encode()), ("traceparent", b"00"), ("raw", b"\xff")),
    ]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"time": "yesterday"}, "ce_time is not RFC 3339"),
        ({"lanesequence": 17}, "ce_lanesequence has no value in UTF-8"),
        ({"lanesequence": None}, "ce_lanesequence has no value in UTF-8"),
        ({"id": "1"}, "ce_id is not buffer"),
        ({"data": None, "data_base64": "#"}, "ce_specversion is missing"),
        ({"stream": 1}, "ce_specversion is missing"),
    ],
)
def test_an_event_with_a_fault_stays_as_it_came(changes: dict[str, Any], fault: str) -> None:
    _, event = both(row_of())
    broken = replace(event, value=json.dumps({**json.loads(event.value or b""), **changes}).encode())
    (row,) = rows_read([broken])
    assert row.reject_reason.startswith(f"header: {fault}")
    assert (row.value, [tuple(each) for each in row.headers]) == (broken.value, broken.headers)
    assert row.stream == "structured-readings"


@pytest.mark.parametrize("value", [None, b"", b"21.5", b"[]", b'{"specversion"', b"[" * 100_000])
def test_what_calls_itself_an_event_and_is_none_is_a_reject(value: bytes | None) -> None:
    _, event = both(row_of())
    (row,) = rows_read([replace(event, value=value)])
    assert row.reject_reason.startswith("header: ce_specversion is missing")


def test_an_event_may_name_its_character_set() -> None:
    _, event = both(row_of())
    (record,) = read([replace(event, headers=[("content-type", b"Application/CloudEvents+JSON; charset=UTF-8")])])
    assert record.value == TEMPERATURE


def test_a_gateway_speaks_in_the_topic_of_its_series_too() -> None:
    _, event = both(row_of())
    (record,) = read([event])
    owners = TopicOwners((("/north/gw1", ("structured-*",)), ("/north/gw2", ("readings",))))
    Speakers(owners).judge(record)
    assert (record.header_fault, record.ce_id) == (FAULT, None)
    (record,) = read([event])
    Speakers(TopicOwners((("/north/gw1", ("structured-*", "readings")),))).judge(record)
    assert record.header_fault is None


def test_peek_reads_events_too() -> None:
    binary, event = both(row_of())
    found = [
        read_record(each.topic, 0, each.key, each.value, each.headers or [], Streams()) for each in (binary, event)
    ]
    assert found[0] == found[1]
    assert found[0].device == "42"
