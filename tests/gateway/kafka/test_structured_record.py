"""Structured events say what binary records say: each header's text as an attribute of CloudEvents, and the payload."""

import json
import re
from base64 import b64decode
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.buffer.rows import Row, Series, StructuredEvents
from gateway.clock.gateway_clock import BootClock, BootTimes
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.event_data import LEVELS_MAX, NAME_BYTES_MAX, NUMBER_BYTES_MAX, fits_readers
from gateway.kafka.structured_record import StructuredEncoder
from gateway.reading import Doubt
from gateway.record_contract import EVENT_CONTENT_TYPE, HEADER_NAMES, USER_ATTRIBUTE, USER_PREFIX, attribute_of
from gateway.user_properties import text_of
from tests.gateway.kafka.test_kafka_record import BOUNDED, CLOCK, GATEWAY, LANE, LEARNT, UNKNOWN, WALL, decoded, headers
from tests.support.buffers import changed, row_of

SERIES = Series("readings", "42", "42", "site/a/42", "sluice.reading", "application/json", "site/a/42")
TEXT = st.text(st.characters(codec="utf-8"), max_size=9)
USERS = st.lists(st.tuples(TEXT, TEXT), max_size=3)
EVENTS = StructuredEvents(instead=True, variables=(("site", 'Büro "1"'), ("device_name", "42")))
TIMES = BootTimes(CLOCK)


def event(row: Row, times: BootTimes = TIMES, series: Series = SERIES) -> dict[str, Any]:
    """The value of a row's structured event, as a consumer reads it."""
    batch = EncodedBatch("none")
    batch.add(StructuredEncoder(GATEWAY, LANE, series, EVENTS).encode(row, times, 0))
    (record,) = decoded(batch)
    assert (record.key, record.headers) == (b"42", [("content-type", EVENT_CONTENT_TYPE.encode())])
    found: dict[str, Any] = json.loads(record.value)
    return found


def test_an_event_with_everything() -> None:
    users = text_of([("unit", "°C"), ("unit", "K")])
    payload = b'{"celsius": 21.50}\n'
    row = Row.of_columns((1, 17, 1, 1_000_000, 900_000, 1_500, 1, "7-1a2b3c4d", 99, payload, 1, None, users))
    assert event(row) == {
        "specversion": "1.0",
        "id": "00ff00ff00ff00ff-0123456789ab-17",
        "source": "/north/gw1",
        "type": "sluice.reading",
        "subject": "site/a/42",
        "device": "42",
        "stream": "readings",
        "routesite": 'Büro "1"',
        "routedevicename": "42",
        "time": "2026-03-04T05:06:06.900089Z",
        "timeerror": "1791",
        "timequality": "estimated",
        "receivedtime": "2026-03-04T05:06:07.000089Z",
        "gatewayboot": "boot-1",
        "boottime": "900000",
        "lane": "0123456789ab",
        "lanesequence": "17",
        "datacontenttype": "application/json",
        "deviceboot": "7-1a2b3c4d",
        "devicesequence": "99",
        "devicecounter": "site/a/42",
        "doubt": "redelivered",
        "mqttproperties": '[["unit","\\u00b0C"],["unit","K"]]',
        "data": {"celsius": 21.5},
    }


@given(
    row=st.builds(
        lambda *columns: Row.of_columns((1, 17, 1, *columns)),
        st.integers(-(10**15), 10**15),
        st.none() | st.integers(-(10**15), 10**15),
        st.sampled_from([0, 1, 127, 1_000, 2**61]),
        st.none() | st.just(123),
        st.none() | st.just("7-1a2b3c4d"),
        st.none() | st.integers(0, 2**63 - 1),
        st.sampled_from([b"21.5", b"on"]),
        st.sampled_from([0, *map(int, Doubt)]),
        st.none() | st.integers(WALL - 10**9, WALL + 10**9),
        st.none() | USERS.map(text_of) | st.just("damaged"),
    ),
    clock=st.sampled_from([CLOCK, BOUNDED, UNKNOWN, LEARNT]),
    topic=st.sampled_from(["readings", "device-a"]),
)
def test_its_attributes_are_the_headers_of_the_binary_record(row: Row, clock: BootClock, topic: str) -> None:
    series = replace(SERIES, topic=topic)
    # The bound of a time depends a little on which times were asked before it: a gateway asks once for both forms.
    times = BootTimes(clock)
    all_headers = headers(row, times, series)
    told = {name: text.decode() for name, text in all_headers}
    found = event(row, times, series)
    names = [USER_PREFIX + name for name, _ in json.loads(found.get(USER_ATTRIBUTE, "[]"))]
    assert {name: found[attribute_of(name)] for name in HEADER_NAMES if attribute_of(name) in found} == {
        name: text for name, text in told.items() if name not in names
    }
    assert json.loads(found.get(USER_ATTRIBUTE, "[]")) == [
        [name.removeprefix(USER_PREFIX), text.decode()] for name, text in all_headers if name.startswith(USER_PREFIX)
    ]


def test_attributes_have_names_that_cloudevents_allows() -> None:
    assert all(re.fullmatch("[a-z0-9]+", attribute_of(name)) for name in (*HEADER_NAMES, "route_device_name"))
    assert re.fullmatch("[a-z0-9]+", USER_ATTRIBUTE)


@given(
    st.binary(max_size=40) | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_the_payload_comes_back_byte_for_byte_but_for_blanks_around_json(payload: bytes) -> None:
    batch = EncodedBatch("none")
    batch.add(StructuredEncoder(GATEWAY, LANE, SERIES, EVENTS).encode(row_of(payload=payload), BootTimes(CLOCK), 0))
    value = decoded(batch)[0].value
    found = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
    if "data" in found:
        assert bytes(found["data"]) == payload.strip(b" \t\r\n")
    else:
        assert b64decode(msgspec.json.decode(found["data_base64"])) == payload


def test_a_payload_that_its_content_type_calls_no_json_is_never_data() -> None:
    found = event(row_of(payload=b"21.5"), series=replace(SERIES, content_type="text/plain"))
    assert (found["datacontenttype"], found["data_base64"]) == ("text/plain", "MjEuNQ==")
    assert "data" not in found


@pytest.mark.parametrize(
    ("most", "more"),
    [
        (b"[" * LEVELS_MAX + b"]" * LEVELS_MAX, b"[" * (LEVELS_MAX + 1) + b"]" * (LEVELS_MAX + 1)),
        (b"[" * 150 + b"]" * 150 + b" " * 200, b"[" * 100_000),
        (b"9" * NUMBER_BYTES_MAX, b"9" * (NUMBER_BYTES_MAX + 1)),
        (b'{"%b": 1}' % (b"x" * (NAME_BYTES_MAX - 2)), b'{"%b" : 1}' % (b"x" * (NAME_BYTES_MAX + 1))),
        (b'["%b"]' % (b"x" * (NAME_BYTES_MAX + 1)), b'["%b]' % (b"x" * (NAME_BYTES_MAX + 1))),
        (b"1e-99999", b"1e-999999"),
        (b'"mac fe-123456789"', b'"\xff"'),
        (b'{"e123456": "\\"[1e1234567"}', b'{"\\\\": 1e1234567}'),
        (b'"%b"' % (b"[" * 1_000), b"\xef\xbb\xbf1"),
        (b"[%b1]" % (b"[1,[2]]," * 1_000), b""),
    ],
)
def test_only_json_that_usual_readers_read_is_data(most: bytes, more: bytes) -> None:
    assert fits_readers(most)
    assert not fits_readers(more)


def test_a_row_that_lost_its_sensors_number_has_no_counter() -> None:
    found = event(changed(row_of(), device_boot="7-1a2b3c4d", device_sequence=None))
    assert not {"deviceboot", "devicesequence", "devicecounter"} & set(found)
