"""The contract with the cloud: CloudEvents headers in a fixed order, times with their bound and quality."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from gateway.buffer_rows import Lane, Row, Series
from gateway.clock_gateway import WallClock
from gateway.kafka_record import (
    HEADER_NAMES,
    TIME_ERROR_UNKNOWN_US,
    Headers,
    record_bytes,
    record_frame,
    record_headers,
    rfc3339,
)
from gateway.settings import GatewaySettings

WALL = int(datetime(2026, 3, 4, 5, 6, 7, 89, tzinfo=UTC).timestamp() * 1_000_000)
CLOCK = WallClock(offset_us=WALL - 1_000_000, error_us=250)
LANE = Lane(1, "0123456789ab", "boot-1")
SERIES = Series("device-thermo", "42", "42", "device/42/thermo", "sluice.reading", "application/json")
EVENT = Series("gateway-events", "gw1", "", "boot", "sluice.gateway.boot", "application/json")


def headers(row: Row, clock: WallClock = CLOCK, series: Series = SERIES) -> Headers:
    return record_headers(
        record_frame(GatewaySettings(id="gw1", namespace="north"), "00ff00ff00ff00ff", LANE, series), row, clock
    )


def test_a_reading_with_everything() -> None:
    row = Row(1, 17, 1, 1_000_000, 900_000, 1_500, 123_456, "7-1a2b3c4d", 99, b"{}")
    assert headers(row) == [
        ("ce_specversion", b"1.0"),
        ("ce_id", b"00ff00ff00ff00ff-0123456789ab-17"),
        ("ce_source", b"/north/gw1"),
        ("ce_type", b"sluice.reading"),
        ("ce_subject", b"device/42/thermo"),
        ("ce_time", b"2026-03-04T05:06:06.900089Z"),
        ("ce_timeerror", b"1750"),
        ("ce_timequality", b"estimated"),
        ("ce_receivedtime", b"2026-03-04T05:06:07.000089Z"),
        ("ce_gatewayboot", b"boot-1"),
        ("ce_boottime", b"900000"),
        ("ce_lane", b"0123456789ab"),
        ("ce_lanesequence", b"17"),
        ("content-type", b"application/json"),
        ("ce_deviceboot", b"7-1a2b3c4d"),
        ("ce_devicesequence", b"99"),
    ]
    assert tuple(name for name, _ in headers(row)) == HEADER_NAMES


def test_a_sensor_without_a_tick_gets_the_time_of_receipt_and_says_so() -> None:
    row = Row(1, 0, 1, 1_000_000, None, 0, None, None, None, b"21.5")
    found = dict(headers(row))
    assert found["ce_time"] == found["ce_receivedtime"]
    assert (found["ce_timequality"], found["ce_timeerror"]) == (b"received", b"250")
    assert "ce_deviceboot" not in found


def test_without_a_synced_clock_no_bound_is_claimed() -> None:
    row = Row(1, 0, 1, 1_000_000, 900_000, 5, 1, None, None, b"21.5")
    found = dict(headers(row, WallClock(0, None)))
    assert found["ce_timequality"] == b"bounded"
    assert int(found["ce_timeerror"]) == TIME_ERROR_UNKNOWN_US


def test_a_tick_that_could_not_be_placed_claims_no_bound() -> None:
    row = Row(1, 0, 1, 1_000_000, None, 0, 123, "1-00000001", 0, b"21.5")
    found = dict(headers(row))
    assert (found["ce_timequality"], int(found["ce_timeerror"])) == (b"bounded", TIME_ERROR_UNKNOWN_US)


def test_the_gateways_own_words_have_the_gateways_own_time() -> None:
    row = Row(1, 0, 1, 1_000_000, None, 0, None, None, None, b"{}")
    assert dict(headers(row, series=EVENT))["ce_timequality"] == b"synced"


@given(st.integers(-(2**63), 2**63 - 1))
def test_any_time_is_written_as_rfc_3339(wall_us: int) -> None:
    text = rfc3339(wall_us).decode()
    assert len(text) == len("2026-03-04T05:06:07.000089Z")
    parsed = datetime.fromisoformat(text)
    if -62_000_000_000_000_000 < wall_us < 250_000_000_000_000_000:
        assert (parsed - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) == wall_us


@given(st.binary(max_size=300), st.integers(0, 2**40))
def test_the_size_of_a_record_is_not_underrated(payload: bytes, sequence: int) -> None:
    from aiokafka.record.default_records import DefaultRecordBatchBuilder

    row = Row(1, sequence, 1, 1_000_000, 900_000, 1_500, None, "7-1a2b3c4d", sequence, payload)
    frame = record_frame(GatewaySettings(id="gw1"), "00ff00ff00ff00ff", LANE, SERIES)
    written = record_headers(frame, row, CLOCK)
    estimate = DefaultRecordBatchBuilder.size_of(frame.key, payload, [(name, value) for name, value in written])
    assert record_bytes(frame, row, written) >= estimate
