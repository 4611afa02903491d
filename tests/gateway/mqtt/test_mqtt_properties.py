"""Properties of MQTT 5: as paho writes and reads them, within bounds, and malformed in every way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes

from gateway.mqtt import properties
from gateway.mqtt.properties import (
    OF_ANSWER,
    OF_CONNECT,
    OF_DISCONNECT,
    OF_PUBLISH,
    OF_SUBSCRIBE,
    OF_UNSUBSCRIBE,
    OF_WILL,
    PROPERTIES,
    SERVER_REFERENCE,
    USER_PROPERTIES_BYTES_MAX,
    USER_PROPERTIES_MAX,
    USER_PROPERTY,
    encode,
    read,
)
from gateway.mqtt.protocol import ProtocolError
from tests.support.mqtt5 import from_paho, in_paho, paho_properties, properties_of, values_of

PACKETS = {
    PacketTypes.CONNECT: OF_CONNECT,
    PacketTypes.WILLMESSAGE: OF_WILL,
    PacketTypes.PUBLISH: OF_PUBLISH,
    PacketTypes.PUBACK: OF_ANSWER,
    PacketTypes.PUBREL: OF_ANSWER,
    PacketTypes.SUBSCRIBE: OF_SUBSCRIBE,
    PacketTypes.UNSUBSCRIBE: OF_UNSUBSCRIBE,
    # A Server Reference is for servers (section 3.14.2.2.5).
    PacketTypes.DISCONNECT: OF_DISCONNECT | {SERVER_REFERENCE},
}
EVERYTHING = frozenset(PROPERTIES) | {USER_PROPERTY}


def reason(data: bytes, allowed: frozenset[int] = EVERYTHING) -> str:
    with pytest.raises(ProtocolError) as caught:
        read(data, 0, len(data), "PUBLISH", allowed)
    return caught.value.violation.reason


def prefixed(body: bytes) -> bytes:
    """Properties with their length, which is below 16,384."""
    low = len(body) & 0x7F
    return (bytes((low,)) if len(body) < 0x80 else bytes((low | 0x80, len(body) >> 7))) + body


@pytest.mark.parametrize("packet_type", PACKETS)
def test_a_packet_may_have_the_properties_that_paho_lets_it_have(packet_type: int) -> None:
    table = paho_properties(packet_type).properties
    assert {identifier for identifier, (_, packets) in table.items() if packet_type in packets} == PACKETS[packet_type]


def test_all_properties_of_the_standard_are_known() -> None:
    names = paho_properties(PacketTypes.CONNECT).names
    assert {identifier: of.name for identifier, of in PROPERTIES.items() if names.get(of.name) != identifier} == {
        0x29: "Subscription Identifiers Available"
    }, "paho leaves an s out"
    assert set(names.values()) == EVERYTHING


@given(st.data())
def test_what_paho_writes_is_read_and_written_alike(data: st.DataObject) -> None:
    packet_type = data.draw(st.sampled_from(sorted(PACKETS)))
    drawn = data.draw(properties_of(PACKETS[packet_type]))
    before, after = data.draw(st.binary(max_size=3)), data.draw(st.binary(max_size=3))
    packed = in_paho(packet_type, drawn).pack()
    whole = before + packed + after
    found, at = read(whole, len(before), len(whole), "PUBLISH", PACKETS[packet_type])
    assert (found.values, found.user) == (drawn.values, drawn.user)
    assert at == len(before) + len(packed)
    user = b"".join(encode_pair(*pair) for pair in drawn.user)
    again = paho_properties(packet_type)
    again.unpack(encode(found.values.items(), user))
    assert from_paho(again) == drawn


def encode_pair(name: str, value: str) -> bytes:
    raw = [text.encode() for text in (name, value)]
    return bytes((USER_PROPERTY,)) + b"".join(len(each).to_bytes(2, "big") + each for each in raw)


@given(properties_of(OF_PUBLISH))
def test_what_goes_along_with_a_message_is_all_but_its_alias_identifier_and_expiry(
    drawn: properties.Properties,
) -> None:
    packed = in_paho(PacketTypes.PUBLISH, drawn).pack()
    found, _ = read(packed, 0, len(packed), "PUBLISH", OF_PUBLISH)
    along, _ = read(prefixed(found.forwarded), 0, len(found.forwarded) + 2, "PUBLISH", OF_PUBLISH)
    kept = {0x01, 0x03, 0x08, 0x09}
    assert along.values == {number: value for number, value in drawn.values.items() if number in kept}
    assert along.user == drawn.user


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        found, at = read(data, 0, len(data), "PUBLISH", EVERYTHING)
    except ProtocolError:
        return
    assert at <= len(data)
    assert len(found.user) <= USER_PROPERTIES_MAX


@pytest.mark.parametrize("identifier", PROPERTIES)
@given(st.data())
def test_a_value_that_ends_behind_the_properties_is_refused(identifier: int, data: st.DataObject) -> None:
    value = data.draw(values_of(identifier).filter(lambda value: value not in {"", b""}))
    body = encode([(identifier, value)])[:-1]
    _, at = properties.variable_integer(body, 0, len(body))
    assert reason(prefixed(body[at:]) + b"\x01" * 300) in {"packet-too-short", "bad-utf8"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "packet-too-short"),
        (b"\x80", "packet-too-short"),
        (b"\x02\x01", "packet-too-short"),
        (b"\xff\xff\xff\xff\x01", "remaining-length-too-long"),
        (b"\x80\x00", "integer-too-long"),
        (b"\x03\x0b\x81\x00", "integer-too-long"),
        (b"\x02\x00\x00", "bad-property"),
        (b"\x02\x2b\x00", "bad-property"),
        (b"\x02\xa6\x00", "bad-property"),
        (b"\x04\x01\x01\x01\x01", "property-twice"),
        (b"\x02\x01\x02", "bad-property-value"),
        (b"\x03\x21\x00\x00", "bad-property-value"),
        (b"\x05\x27\x00\x00\x00\x00", "bad-property-value"),
        (b"\x02\x0b\x00", "bad-property-value"),
        (b"\x05\x03\x00\x02\xed\xa0", "bad-utf8"),
        (b"\x04\x03\x00\x01\x00", "null-character"),
        (b"\x04\x08\x00\x01+", "wildcard-in-topic-name"),
        (b"\x03\x08\x00\x00", "empty-topic"),
        (b"\x06\x26\x00\x01\xff\x00\x00", "bad-utf8"),
        (b"\x04\x26\x00\x01a", "packet-too-short"),
    ],
)
def test_each_rule_that_is_broken_has_its_own_reason(data: bytes, told: str) -> None:
    assert reason(data) == told


def test_a_property_of_another_packet_is_refused_by_its_name() -> None:
    with pytest.raises(ProtocolError, match="a CONNECT with the property Topic Alias"):
        read(b"\x03\x23\x00\x01", 0, 4, "CONNECT", OF_CONNECT)


def test_user_properties_have_a_bound_of_number_and_of_bytes() -> None:
    many = encode_pair("a", "") * USER_PROPERTIES_MAX
    found, _ = read(prefixed(many), 0, len(many) + 2, "PUBLISH", OF_PUBLISH)
    assert len(found.user) == USER_PROPERTIES_MAX
    assert reason(prefixed(many + encode_pair("a", ""))) == "too-many-user-properties"
    large = encode_pair("n", "x" * (USER_PROPERTIES_BYTES_MAX - 1))
    found, _ = read(prefixed(large), 0, len(large) + 2, "PUBLISH", OF_PUBLISH)
    assert len(found.user[0][1]) == USER_PROPERTIES_BYTES_MAX - 1
    assert reason(prefixed(encode_pair("n", "x" * USER_PROPERTIES_BYTES_MAX))) == "too-many-user-properties"
