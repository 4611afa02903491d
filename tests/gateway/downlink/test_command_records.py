"""Commands as they are read from Kafka's records. Whatever a record has in it, reading it raises nothing."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.command import DeviceCommand
from gateway.downlink.command_records import UnfitRecord, read_command
from gateway.record_contract import (
    COMMAND_BYTES_MAX,
    COMMAND_EXPIRES_HEADER,
    COMMAND_ID_HEADER,
    COMMAND_TOPIC_HEADER,
)
from tests.support.commands import Sent, command_record

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
NOON_US = int(NOON.timestamp()) * 1_000_000


def test_a_command_is_read() -> None:
    record = command_record("7f-1", "heater", b'{"on":true}', "set/{id}", NOON, namespace="north")
    assert read_command(record, "north") == DeviceCommand("7f-1", "heater", "set/7f-1", b'{"on":true}', NOON_US)


def test_a_command_needs_no_topic_and_no_payload() -> None:
    record = command_record(payload=None, expires=NOON)
    assert read_command(record, "default") == DeviceCommand("c1", "42", "", b"", NOON_US)


def test_a_time_may_have_any_offset() -> None:
    record = command_record(expires=NOON.astimezone(timezone(timedelta(hours=5, minutes=30))))
    found = read_command(record, "default")
    assert isinstance(found, DeviceCommand)
    assert found.expires_us == NOON_US


@pytest.mark.parametrize(
    ("record", "unfit"),
    [
        (command_record(namespace="south"), UnfitRecord("other-namespace", "c1", "42")),
        (command_record(device="4/2"), UnfitRecord("no-device", "c1", None)),
        (command_record(device=""), UnfitRecord("no-device", "c1", None)),
        (command_record("a/b"), UnfitRecord("no-id", None, "42")),
        (command_record("x" * 65), UnfitRecord("no-id", None, "42")),
        (command_record(without="id"), UnfitRecord("no-id", None, "42")),
        (command_record(without="expires"), UnfitRecord("no-expiry", "c1", "42")),
        (command_record(expires=NOON.replace(tzinfo=None)), UnfitRecord("no-expiry", "c1", "42")),
        (command_record(topic="set/#"), UnfitRecord("bad-topic", "c1", "42")),
        (command_record(topic="x" * 129), UnfitRecord("bad-topic", "c1", "42")),
        (command_record(payload=bytes(COMMAND_BYTES_MAX + 1)), UnfitRecord("too-large", "c1", "42")),
    ],
)
def test_an_unfit_record_says_why(record: Sent, unfit: UnfitRecord) -> None:
    assert read_command(record, "default") == unfit


TEXTS = st.one_of(st.binary(max_size=20), st.text(max_size=20).map(str.encode), st.datetimes().map(str).map(str.encode))
NAMES = st.sampled_from([COMMAND_ID_HEADER, COMMAND_EXPIRES_HEADER, COMMAND_TOPIC_HEADER, "other"])


@given(
    st.none() | TEXTS | TEXTS.map(lambda device: b"default/" + device),
    st.none() | st.binary(max_size=20),
    st.lists(st.tuples(NAMES, TEXTS), max_size=6),
)
def test_any_record_is_a_command_or_says_why_not(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]]
) -> None:
    found = read_command(Sent(key, value, headers), "default")
    assert isinstance(found, DeviceCommand) or found.reason
