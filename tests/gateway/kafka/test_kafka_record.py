"""The contract with the cloud: CloudEvents headers in a fixed order, times with their bound and quality."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.buffer.rows import Lane, Row, Series
from gateway.clock.gateway_clock import BootClock, BootTimes, Look
from gateway.clock.rfc3339 import rfc3339
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.record import ESTIMATED_ROUNDING_US, RecordEncoder
from gateway.reading import Doubt
from gateway.record_contract import (
    HEADER_NAMES,
    HEADERS,
    TIME_ERROR_UNKNOWN_US,
    USER_PREFIX,
    VARIABLE_PREFIX,
    counter_of,
    implied_counter,
)
from gateway.settings import GatewaySettings
from gateway.user_properties import text_of
from tests.support.buffers import changed, row_of

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
WALL = int(datetime(2026, 3, 4, 5, 6, 7, 89, tzinfo=UTC).timestamp() * 1_000_000)
CLOCK = BootClock.constant(WALL - 1_000_000, 250)
GATEWAY = GatewaySettings(id="gw1", namespace="north")
LANE = Lane(1, "0123456789ab", "boot-1", "00ff00ff00ff00ff")
SERIES = Series("device-thermo", "42", "42", "device/42/thermo", "sluice.reading", "application/json")
EVENT = Series("gateway-events", "gw1", "", "boot", "sluice.gateway.boot", "application/json")


def headers(row: Row, clock: BootClock | BootTimes = CLOCK, series: Series = SERIES) -> list[tuple[str, bytes]]:
    """The headers of a row's record, as a consumer decodes them."""
    times = BootTimes(clock) if isinstance(clock, BootClock) else clock
    batch = EncodedBatch("none")
    batch.add(RecordEncoder(GATEWAY, LANE, series).encode(row, times, 0))
    (record,) = decoded(batch)
    assert (record.key, record.value) == (series.key.encode(), row.datum.payload)
    return [(name, value) for name, value in record.headers if value is not None]


def decoded(batch: EncodedBatch) -> list[Any]:
    """A batch as aiokafka's consumer reads it."""
    found = DefaultRecordBatch(bytes(batch._build()))
    assert found.validate_crc()
    return list(found)


def test_a_reading_with_everything() -> None:
    row = Row.of_columns((1, 17, 1, 1_000_000, 900_000, 1_500, 123_456, "7-1a2b3c4d", 99, b"{}", 1, None, None))
    assert headers(row) == [
        ("ce_specversion", b"1.0"),
        ("ce_id", b"00ff00ff00ff00ff-0123456789ab-17"),
        ("ce_source", b"/north/gw1"),
        ("ce_type", b"sluice.reading"),
        ("ce_subject", b"device/42/thermo"),
        ("ce_time", b"2026-03-04T05:06:06.900089Z"),
        ("ce_timeerror", b"%d" % (1_750 | ESTIMATED_ROUNDING_US)),
        ("ce_timequality", b"estimated"),
        ("ce_receivedtime", b"2026-03-04T05:06:07.000089Z"),
        ("ce_gatewayboot", b"boot-1"),
        ("ce_boottime", b"900000"),
        ("ce_lane", b"0123456789ab"),
        ("ce_lanesequence", b"17"),
        ("content-type", b"application/json"),
        ("ce_deviceboot", b"7-1a2b3c4d"),
        ("ce_devicesequence", b"99"),
        ("ce_doubt", b"redelivered"),
    ]


@pytest.mark.parametrize(
    ("topic", "subject", "kafka_topic", "named"),
    [
        ("device/42/thermo", "device/42/thermo", "device-thermo", None),
        ("device/42/soil-moist", "device/42/soil-moist", "device-soil-moist", None),
        ("site/42/thermo", "site/42/thermo", "device-thermo", "site/42/thermo"),
        ("device/42/thermo", "device/42/thermo", "readings", "device/42/thermo"),
        ("device/42/a/b", "device/42/a/b", "device-a-b", "device/42/a/b"),
        # A serial sensor counts once for all its streams, whatever port it is at.
        ("device/42/thermo", "/dev/ttyUSB0", "readings", None),
    ],
)
def test_a_record_names_its_counter_where_the_kafka_topic_does_not_imply_it(
    topic: str, subject: str, kafka_topic: str, named: str | None
) -> None:
    series = Series(kafka_topic, "42", "42", subject, "sluice.reading", "application/json", topic)
    row = Row.of_columns((1, 17, 1, 1_000_000, 900_000, 1_500, 123_456, "7-1a2b3c4d", 99, b"{}", 1, None, None))
    found = dict(headers(row, series=series))
    assert found.get("ce_devicecounter") == (None if named is None else named.encode())
    assert tuple(found) == tuple(name for name in HEADER_NAMES if name in found)
    unnumbered = changed(row, device_boot=None, device_sequence=None)
    assert "ce_devicecounter" not in dict(headers(unnumbered, series=series))


def test_the_variables_of_a_route_have_headers_behind_those_of_every_record() -> None:
    series = replace(SERIES, variables=(("site", "Büro 1"), ("device", "aa:bb")))
    row = Row.of_columns((1, 17, 1, 1_000_000, 900_000, 1_500, 123_456, "7-1a2b3c4d", 99, b"{}", 1, None, None))
    plain, found = headers(row), headers(row, series=series)
    own = [("route_site", "Büro 1".encode()), ("route_device", b"aa:bb")]
    assert found == [*plain[: len(HEADERS)], *own, *plain[len(HEADERS) :]]
    unnumbered = changed(row, device_boot=None, device_sequence=None, doubt=0)
    assert headers(unnumbered, series=series) == [*headers(unnumbered), *own]
    assert not any(name.startswith(VARIABLE_PREFIX) for name in HEADER_NAMES)


def test_two_topics_of_a_device_have_one_counter_nowhere() -> None:
    """This holds for every route: a Kafka topic implies only one topic."""
    topics = ["device/42/a", "device/42/a-b", "device/42/a/b", "device-a/42/b", "42", "device/42", "a/42/b"]
    for kafka_topic in ("device-a", "device-a-b", "device-", "42", "device", "all"):
        names = [(kafka_topic, counter_of(topic, topic, "42", kafka_topic)) for topic in topics]
        assert len(set(names)) == len(topics)
        assert sum(name == (kafka_topic, implied_counter("42", kafka_topic)) for name in names) <= 1


def test_a_sensor_without_a_tick_gets_the_time_of_receipt_and_says_so() -> None:
    row = row_of()
    found = dict(headers(row))
    assert found["ce_time"] == found["ce_receivedtime"]
    assert (found["ce_timequality"], found["ce_timeerror"]) == (b"received", b"250")
    assert "ce_deviceboot" not in found


UNKNOWN = BootClock.constant(0, None)
BOUNDED = BootClock.constant(WALL, 1_000, "bounded")
ESTIMATED = Row.of_columns((1, 0, 1, 1_000_000, 900_000, 5, 1, "7-1a2b3c4d", 3, b"21.5", Doubt.CONFLICT, None, None))
RECEIVED = row_of()
TICKING = row_of(tick_ms=123)
TEXT = st.characters(codec="utf-8")
NO_BOUND = str(TIME_ERROR_UNKNOWN_US)


@pytest.mark.parametrize(
    ("row", "series", "clock", "quality", "error_us", "boottime_error_us"),
    [
        (ESTIMATED, SERIES, CLOCK, "estimated", "255", None),
        (ESTIMATED, SERIES, UNKNOWN, "bounded", NO_BOUND, "5"),
        (ESTIMATED, SERIES, BOUNDED, "bounded", "1005", "5"),
        (RECEIVED, SERIES, CLOCK, "received", "250", None),
        (RECEIVED, SERIES, UNKNOWN, "received", NO_BOUND, "0"),
        (RECEIVED, SERIES, BOUNDED, "bounded", "1000", "0"),
        (TICKING, SERIES, CLOCK, "bounded", NO_BOUND, None),
        (TICKING, SERIES, UNKNOWN, "bounded", NO_BOUND, NO_BOUND),
        (TICKING, SERIES, BOUNDED, "bounded", NO_BOUND, NO_BOUND),
        (RECEIVED, EVENT, CLOCK, "synced", "250", None),
        (RECEIVED, EVENT, UNKNOWN, "bounded", NO_BOUND, "0"),
        (RECEIVED, EVENT, BOUNDED, "bounded", "1000", "0"),
    ],
)
def test_a_records_time_headers_hold_all_that_a_correction_needs(  # noqa: PLR0913, PLR0917 - a table
    row: Row, series: Series, clock: BootClock, quality: str, error_us: str, boottime_error_us: str | None
) -> None:
    found = dict(headers(row, clock, series))
    assert (found["ce_timequality"].decode(), found["ce_timeerror"].decode()) == (quality, error_us)
    told = found.get("ce_boottimeerror")
    assert (None if told is None else told.decode()) == boottime_error_us
    if boottime_error_us is not None:
        assert list(found)[-1] == "ce_boottimeerror"


def test_a_record_without_a_synced_clock_may_have_all_headers() -> None:
    series = replace(SERIES, topic="all", stream=SERIES.subject)
    assert tuple(name for name, _ in headers(ESTIMATED, UNKNOWN, series)) == HEADER_NAMES


@given(
    pairs=st.lists(st.tuples(st.text(TEXT, max_size=9), st.text(TEXT, max_size=99)), max_size=32),
    is_numbered=st.booleans(),
)
def test_user_properties_have_headers_behind_all_others(pairs: list[tuple[str, str]], *, is_numbered: bool) -> None:
    row = ESTIMATED if is_numbered else changed(ESTIMATED, device_boot=None, device_sequence=None)
    found = headers(changed(row, properties=text_of(pairs)), UNKNOWN)
    names = [(f"mqtt_{name}", value.encode()) for name, value in pairs if name and name.isprintable()]
    assert found == [*headers(row, UNKNOWN), *names]
    assert USER_PREFIX == "mqtt_"


HOUR_US = 3_600_000_000
LEARNT = (
    BootClock("unknown", 100.0)
    .looked(Look(HOUR_US, WALL, 10_000))
    .looked(Look(5 * HOUR_US, WALL + 600_000, 10_000))
    .looked(Look(9 * HOUR_US, WALL + 700_000, 10_000))
)


@given(st.lists(st.tuples(st.integers(-HOUR_US, 12 * HOUR_US), st.none() | st.integers(-HOUR_US, 0)), max_size=60))
def test_each_time_of_a_row_is_told_by_the_clock_as_it_was_then(times: list[tuple[int, int | None]]) -> None:
    encoder, of_boot = RecordEncoder(GATEWAY, LANE, SERIES), BootTimes(LEARNT)
    for received_us, before_us in times:
        event_us = None if before_us is None else received_us + before_us
        batch = EncodedBatch("none")
        batch.add(encoder.encode(row_of(received_us=received_us, event_us=event_us, payload=b""), of_boot, 0))
        found = {name: value.decode() for name, value in decoded(batch)[0].headers}
        at_us = received_us if event_us is None else event_us
        # The bound is rounded up, so that records that follow each other have the same.
        error_us = LEARNT.error_us(at_us)
        assert error_us is not None
        assert error_us < int(found["ce_timeerror"]) <= error_us * 1.5 + 250
        for header, boottime_us in (("ce_receivedtime", received_us), ("ce_time", at_us)):
            told_us = (datetime.fromisoformat(found[header]) - EPOCH) // timedelta(microseconds=1)
            assert abs(told_us - LEARNT.at(boottime_us)) <= (LEARNT.error_us(boottime_us) or 0) / 2 + 250


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 999_999, 3_600_000_000]),
            # The last one is in the second before 1970.
            st.none() | st.sampled_from([0, 999_999, 1_000_000, -5_000_000, 2**62, -(2**62), -CLOCK.offset_us(0) - 1]),
            st.sampled_from([0, 1_000, 1_001, 2**61]),
            st.none() | st.just(123),
            st.none() | st.just(1_700_000_000_000_000),
            st.sampled_from([CLOCK, BootClock.constant(CLOCK.offset_us(0), 250, "bounded"), BootClock("unknown", 0.0)]),
        ),
        min_size=2,
        max_size=8,
    )
)
def test_what_was_kept_of_rows_before_changes_no_record(times: list[tuple[Any, ...]]) -> None:
    encoder = RecordEncoder(GATEWAY, LANE, SERIES)
    known: dict[int, BootTimes] = {}
    for received_us, event_us, error_us, tick_ms, device_time_us, clock in times:
        row = Row.of_columns(
            (1, 17, 1, received_us, event_us, error_us, tick_ms, None, None, b"", 0, device_time_us, None)
        )
        of_boot = known.setdefault(id(clock), BootTimes(clock))
        encoded = encoder.encode(row, of_boot, 0)
        assert encoded == RecordEncoder(GATEWAY, LANE, SERIES).encode(row, BootTimes(clock), 0)
        found = dict(headers(row, clock))
        if found["ce_timequality"] == b"estimated":
            assert found["ce_time"] == rfc3339(event_us + clock.offset_us(event_us)) or abs(event_us) == 2**62
            exact_us = min(error_us + 250, TIME_ERROR_UNKNOWN_US)
            assert exact_us <= int(found["ce_timeerror"]) <= exact_us + ESTIMATED_ROUNDING_US


def test_a_tick_that_could_not_be_placed_claims_no_bound() -> None:
    row = row_of(tick_ms=123, device_boot="1-00000001", device_sequence=0)
    found = dict(headers(row))
    assert (found["ce_timequality"], int(found["ce_timeerror"])) == (b"bounded", TIME_ERROR_UNKNOWN_US)


def test_the_gateways_own_words_have_the_gateways_own_time() -> None:
    row = row_of(payload=b"{}")
    assert dict(headers(row, series=EVENT))["ce_timequality"] == b"synced"


def test_a_time_that_the_sensor_sent_is_the_events_and_the_receipt_is_told_beside_it() -> None:
    row = row_of(event_error_us=2_000_000, device_time_us=WALL - 5_000_000)
    found = dict(headers(row))
    assert (found["ce_time"], found["ce_timequality"]) == (b"2026-03-04T05:06:02.000089Z", b"device")
    assert (found["ce_timeerror"], found["ce_boottime"]) == (b"2000000", b"1000000")
    assert found["ce_receivedtime"] == b"2026-03-04T05:06:07.000089Z"


def test_a_time_that_cannot_be_right_is_as_if_none_was_sent() -> None:
    for sent_us in (0, WALL - 31 * 86_400_000_000, WALL + 70_000_000, 2**63 - 1, -(2**63)):
        row = row_of(event_error_us=1_000, device_time_us=sent_us)
        found = dict(headers(row))
        assert found["ce_time"] == found["ce_receivedtime"]
        assert (found["ce_timequality"], found["ce_timeerror"]) == (b"received", b"1250")


def test_a_sensors_own_time_needs_no_clock_of_the_gateways() -> None:
    sent_us = WALL + 365 * 86_400_000_000
    row = row_of(event_error_us=1_000, device_time_us=sent_us)
    found = dict(headers(row, BootClock.constant(0, None)))
    assert (found["ce_time"], found["ce_timequality"]) == (rfc3339(sent_us), b"device")
    assert found["ce_timeerror"] == b"1000"


def test_rows_that_differ_in_their_sensors_time_alone_have_times_of_their_own() -> None:
    encoder, batch = RecordEncoder(GATEWAY, LANE, SERIES), EncodedBatch("none")
    sent, times = [None, WALL, WALL + 1, None], BootTimes(CLOCK)
    for sequence, sent_us in enumerate(sent):
        row = row_of(sequence, device_time_us=sent_us)
        batch.add(encoder.encode(row, times, sequence))
    found = [dict(record.headers) for record in decoded(batch)]
    assert [each["ce_timequality"] for each in found] == [b"received", b"device", b"device", b"received"]
    assert [each["ce_time"] for each in found] == [rfc3339(WALL if sent_us is None else sent_us) for sent_us in sent]


@given(st.integers(-(2**63), 2**63 - 1))
def test_any_time_is_written_as_rfc_3339(wall_us: int) -> None:
    text = rfc3339(wall_us).decode()
    assert len(text) == len("2026-03-04T05:06:07.000089Z")
    parsed = datetime.fromisoformat(text)
    if -62_000_000_000_000_000 < wall_us < 250_000_000_000_000_000:
        assert (parsed - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) == wall_us


@pytest.mark.slow
@given(
    st.sampled_from(["none", "gzip", "snappy", "lz4", "zstd"]),
    st.lists(
        st.tuples(
            st.binary(max_size=300),
            st.none() | st.integers(-(2**62), 2**62),
            st.none() | st.text(min_size=1, max_size=64),
            st.integers(0, 2**62),
            st.sampled_from([0, *Doubt]),
        ),
        min_size=1,
        max_size=100,
    ),
)
def test_what_is_encoded_here_is_what_a_consumer_reads(
    compression: str, readings: list[tuple[bytes, int | None, str | None, int, int]]
) -> None:
    encoder, times = RecordEncoder(GATEWAY, LANE, SERIES), BootTimes(CLOCK)
    batch = EncodedBatch(compression)
    rows = [
        Row.of_columns((1, sequence, 1, 1_000_000, event_us, 7, None, boot, sequence, payload, doubt, None, None))
        for payload, event_us, boot, sequence, doubt in readings
    ]
    for row in rows:
        batch.add(encoder.encode(row, times, batch.record_count()))
    batch._set_producer_state(7, 1, 42)
    uncompressed = batch.size()
    assert len(batch._build()) <= uncompressed
    assert batch._build() is batch._build()  # a resend is the same, byte for byte
    records = decoded(batch)
    assert [(record.offset, record.key, record.value) for record in records] == [
        (offset, b"42", row.datum.payload) for offset, row in enumerate(rows)
    ]
    for record, row in zip(records, rows, strict=True):
        found = dict(record.headers)
        assert found["ce_lanesequence"] == b"%d" % row.sequence
        assert found.get("ce_deviceboot") == (None if row.datum.device_boot is None else row.datum.device_boot.encode())
        assert found.get("ce_doubt") == {0: None, 1: b"redelivered", 2: b"conflict"}[row.datum.doubt]
        assert [name for name in HEADER_NAMES if name in found] == [name for name, _ in record.headers]


def test_a_large_payload_is_encoded_too() -> None:
    row = row_of(payload=bytes(900_000))
    assert dict(headers(row))["ce_lanesequence"] == b"0"
