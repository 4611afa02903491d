"""What a broker sends by MQTT 5: as paho's counterpart writes it, cut short, and malformed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.mqtt import properties
from gateway.mqtt.packet_reader import Message, Packet
from gateway.mqtt.packet_reader5 import connack5, disconnect5, keep_alive_of, message5, suback5
from gateway.mqtt.protocol import MalformedPacketError
from gateway.mqtt.protocol5 import Version5
from gateway.mqtt.reason_codes import ReasonCode
from tests.support.mqtt5 import TOPICS, USER_PROPERTIES, cut, publish5, told


def packet(data: bytes, missing: int = 0) -> Packet:
    ((first, body),) = cut(data)
    return Packet(first, body, missing)


@given(TOPICS, USER_PROPERTIES, st.integers(0, 2), st.none() | st.integers(0, 2**32 - 1))
def test_a_message_with_its_user_properties(
    topic: str, user: properties.UserProperties, qos: int, expiry_s: int | None
) -> None:
    values: dict[int, properties.Value] = {properties.CONTENT_TYPE: "text/plain"}
    if expiry_s is not None:
        values[properties.MESSAGE_EXPIRY_INTERVAL] = expiry_s
    found = message5(packet(publish5("21.5", 7, topic, values, user=user, qos=qos)))
    assert found[:4] == (topic.encode(), 7 if qos else 0, b"21.5", user)


def test_a_message_that_comes_again_with_less_time_left_is_the_same() -> None:
    one, other = (
        message5(packet(publish5("a", 7, values={properties.MESSAGE_EXPIRY_INTERVAL: left_s}))) for left_s in (60, 5)
    )
    assert one.same == other.same
    for different in (publish5("b", 7), publish5("a", 8), publish5("a", 7, user=(("seq", "1"),))):
        assert message5(packet(different)).same != one.same


def test_of_a_packet_that_was_cut_only_its_identity_counts() -> None:
    whole = packet(publish5("a" * 50, 7, user=(("n", "x" * 100),)))
    assert message5(Packet(whole.first, whole.body[:40], 999)) == Message(b"device/m001/thermo", 7, b"")


@pytest.mark.parametrize(
    ("first", "body"),
    [
        (0x36, b"\x00\x01t\x00\x01\x00"),
        (0x30, b""),
        (0x30, b"\x00\x00\x00"),
        (0x30, b"\x00\x01t"),
        (0x32, b"\x00\x01t\x00\x00\x00"),
        (0x32, b"\x00\x01t\x00\x01"),
        (0x30, b"\x00\x01t\x05\x00"),
        (0x30, b"\x00\x01t\x02\x01\x07"),
    ],
)
def test_a_malformed_message_is_refused(first: int, body: bytes) -> None:
    with pytest.raises(MalformedPacketError):
        message5(Packet(first, body, 0))


def test_answers() -> None:
    server = Version5(10, 1_000)
    accepted = server.accepted(session_present=True, client_id=None, session_expiry_s=None)
    assert connack5(packet(accepted)) == (0, True)
    assert keep_alive_of(packet(accepted)) is None
    with_keep_alive = b"\x00\x00" + told({properties.SERVER_KEEP_ALIVE: 9})
    assert keep_alive_of(Packet(0x20, with_keep_alive, 0)) == 9
    assert connack5(packet(server.refused(ReasonCode.SERVER_BUSY))) == (0x89, False)
    assert connack5(Packet(0x20, b"\x00\x01", 0)) == (1, False), "of a broker that knows no MQTT 5"
    assert suback5(packet(server.suback(7, [1, 0x87]))) == (7, b"\x01\x87")
    assert disconnect5(packet(server.ended(ReasonCode.SESSION_TAKEN_OVER, "again"))) == (0x8E, "again")
    assert disconnect5(Packet(0xE0, b"", 0)) == (0, "")


@pytest.mark.parametrize("body", [b"", b"\x00\x00", b"\x00\x00\x05", b"\x00\x00\x03\x23\x00\x01"])
def test_a_malformed_connack_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedPacketError):
        connack5(Packet(0x20, body, 0))


def test_a_malformed_suback_and_disconnect_are_refused() -> None:
    with pytest.raises(MalformedPacketError):
        suback5(Packet(0x90, b"\x00\x07", 0))
    with pytest.raises(MalformedPacketError):
        disconnect5(Packet(0xE0, b"\x8e\x05", 0))
