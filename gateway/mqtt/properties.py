"""Properties of MQTT 5 packets (section 2.2.2): reads them within bounds, and writes them; no I/O."""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct

from gateway.mqtt.protocol import (
    ProtocolError,
    decode_text,
    encode_remaining_length,
    remaining_length,
    topic_name,
)

USER_PROPERTIES_MAX: Final = 32
"""User properties of one packet."""
USER_PROPERTIES_BYTES_MAX: Final = 4_096
"""Bytes of the names and values of one packet's user properties."""

PAYLOAD_FORMAT_INDICATOR: Final = 0x01
MESSAGE_EXPIRY_INTERVAL: Final = 0x02
CONTENT_TYPE: Final = 0x03
RESPONSE_TOPIC: Final = 0x08
CORRELATION_DATA: Final = 0x09
SUBSCRIPTION_IDENTIFIER: Final = 0x0B
SESSION_EXPIRY_INTERVAL: Final = 0x11
ASSIGNED_CLIENT_IDENTIFIER: Final = 0x12
SERVER_KEEP_ALIVE: Final = 0x13
AUTHENTICATION_METHOD: Final = 0x15
AUTHENTICATION_DATA: Final = 0x16
REQUEST_PROBLEM_INFORMATION: Final = 0x17
WILL_DELAY_INTERVAL: Final = 0x18
REQUEST_RESPONSE_INFORMATION: Final = 0x19
RESPONSE_INFORMATION: Final = 0x1A
SERVER_REFERENCE: Final = 0x1C
REASON_STRING: Final = 0x1F
RECEIVE_MAXIMUM: Final = 0x21
TOPIC_ALIAS_MAXIMUM: Final = 0x22
TOPIC_ALIAS: Final = 0x23
MAXIMUM_QOS: Final = 0x24
RETAIN_AVAILABLE: Final = 0x25
USER_PROPERTY: Final = 0x26
MAXIMUM_PACKET_SIZE: Final = 0x27
WILDCARD_SUBSCRIPTION_AVAILABLE: Final = 0x28
SUBSCRIPTION_IDENTIFIERS_AVAILABLE: Final = 0x29
SHARED_SUBSCRIPTION_AVAILABLE: Final = 0x2A

Value: TypeAlias = int | str | bytes
UserProperties: TypeAlias = tuple[tuple[str, str], ...]


class Properties(Struct, frozen=True, gc=False):
    """The properties of one packet."""

    values: dict[int, Value]
    """By identifier, all but user properties. Integers, texts and binary data are int, str and bytes."""
    user: UserProperties = ()
    """Names and values in their order; a name may stand twice (section 2.2.2.2)."""
    forwarded: bytes = b""
    """Properties that go along with a message to its subscribers, as they came: payload format indicator, content type,
    response topic, correlation data and user properties (MQTT-3.3.2-4, -15, -16, -17, -20)."""

    def number(self, identifier: int, default: int) -> int:
        """The value of an integer property; `default` if it is not there."""
        value = self.values.get(identifier, default)
        assert isinstance(value, int)  # noqa: S101 - by `PROPERTIES`
        return value


NOTHING: Final = Properties({})

Reader: TypeAlias = Callable[[bytes, int, int], tuple[Value, int]]
"""Reads the value at an offset, which must end before another; returns it with the offset after it."""


class Property(NamedTuple):
    """A property of table 2-4."""

    name: str
    read: Reader
    write: Callable[[Value], bytes]
    least: int = 0
    most: int = 2**32
    """Bounds of an integer; a value beyond them is a protocol error."""


def _piece(data: bytes, at: int, end: int, count: int) -> bytes:
    if at + count > end:
        raise ProtocolError("packet-too-short", "2.2.2.2", "a property that ends behind its packet's properties")
    return data[at : at + count]


def _integer(size: int) -> tuple[Reader, Callable[[Value], bytes]]:
    def read(data: bytes, at: int, end: int) -> tuple[Value, int]:
        return int.from_bytes(_piece(data, at, end, size), "big"), at + size

    def write(value: Value) -> bytes:
        assert isinstance(value, int)  # noqa: S101 - by the caller's types
        return value.to_bytes(size, "big")

    return read, write


def variable_integer(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a variable byte integer, which must have the least bytes [MQTT-1.5.5-1]; return it and the offset after it.

    Raises ProtocolError.
    """
    found = remaining_length(data[at : min(at + 4, end)], 0)
    if found is None:
        raise ProtocolError("packet-too-short", "1.5.5", "a variable byte integer that ends behind its packet")
    number, size = found
    if size > 1 and not data[at + size - 1]:
        raise ProtocolError("integer-too-long", "MQTT-1.5.5-1", "a variable byte integer with more bytes than it needs")
    return number, at + size


def _read_variable(data: bytes, at: int, end: int) -> tuple[Value, int]:
    return variable_integer(data, at, end)


def _write_variable(value: Value) -> bytes:
    assert isinstance(value, int)  # noqa: S101 - by the caller's types
    return encode_remaining_length(value)


def _read_binary(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    size = int.from_bytes(_piece(data, at, end, 2), "big")
    return _piece(data, at + 2, end, size), at + 2 + size


def _read_text(data: bytes, at: int, end: int) -> tuple[str, int]:
    raw, at = _read_binary(data, at, end)
    return decode_text(raw), at


def _read_topic(data: bytes, at: int, end: int) -> tuple[Value, int]:
    raw, at = _read_binary(data, at, end)
    return topic_name(raw), at


def _write_bytes(value: Value) -> bytes:
    assert not isinstance(value, int)  # noqa: S101 - by the caller's types
    raw = value.encode() if isinstance(value, str) else value
    return len(raw).to_bytes(2, "big") + raw


_BYTE, _TWO_BYTES, _FOUR_BYTES = _integer(1), _integer(2), _integer(4)
_VARIABLE = (_read_variable, _write_variable)
_BINARY = (_read_binary, _write_bytes)
_TEXT = (_read_text, _write_bytes)
_TOPIC = (_read_topic, _write_bytes)

PROPERTIES: Final = {
    PAYLOAD_FORMAT_INDICATOR: Property("Payload Format Indicator", *_BYTE, most=1),
    MESSAGE_EXPIRY_INTERVAL: Property("Message Expiry Interval", *_FOUR_BYTES),
    CONTENT_TYPE: Property("Content Type", *_TEXT),
    RESPONSE_TOPIC: Property("Response Topic", *_TOPIC),
    CORRELATION_DATA: Property("Correlation Data", *_BINARY),
    SUBSCRIPTION_IDENTIFIER: Property("Subscription Identifier", *_VARIABLE, least=1),
    SESSION_EXPIRY_INTERVAL: Property("Session Expiry Interval", *_FOUR_BYTES),
    ASSIGNED_CLIENT_IDENTIFIER: Property("Assigned Client Identifier", *_TEXT),
    SERVER_KEEP_ALIVE: Property("Server Keep Alive", *_TWO_BYTES),
    AUTHENTICATION_METHOD: Property("Authentication Method", *_TEXT),
    AUTHENTICATION_DATA: Property("Authentication Data", *_BINARY),
    REQUEST_PROBLEM_INFORMATION: Property("Request Problem Information", *_BYTE, most=1),
    WILL_DELAY_INTERVAL: Property("Will Delay Interval", *_FOUR_BYTES),
    REQUEST_RESPONSE_INFORMATION: Property("Request Response Information", *_BYTE, most=1),
    RESPONSE_INFORMATION: Property("Response Information", *_TEXT),
    SERVER_REFERENCE: Property("Server Reference", *_TEXT),
    REASON_STRING: Property("Reason String", *_TEXT),
    RECEIVE_MAXIMUM: Property("Receive Maximum", *_TWO_BYTES, least=1),
    TOPIC_ALIAS_MAXIMUM: Property("Topic Alias Maximum", *_TWO_BYTES),
    TOPIC_ALIAS: Property("Topic Alias", *_TWO_BYTES),
    MAXIMUM_QOS: Property("Maximum QoS", *_BYTE, most=1),
    RETAIN_AVAILABLE: Property("Retain Available", *_BYTE, most=1),
    MAXIMUM_PACKET_SIZE: Property("Maximum Packet Size", *_FOUR_BYTES, least=1),
    WILDCARD_SUBSCRIPTION_AVAILABLE: Property("Wildcard Subscription Available", *_BYTE, most=1),
    SUBSCRIPTION_IDENTIFIERS_AVAILABLE: Property("Subscription Identifiers Available", *_BYTE, most=1),
    SHARED_SUBSCRIPTION_AVAILABLE: Property("Shared Subscription Available", *_BYTE, most=1),
}
"""All properties but user properties, which are pairs and may repeat."""

# What a packet may carry. Whatever a client sends beyond it is a malformed packet (section 2.2.2.2).
_OF_MESSAGE: Final = frozenset(
    {PAYLOAD_FORMAT_INDICATOR, MESSAGE_EXPIRY_INTERVAL, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION_DATA, USER_PROPERTY}
)
OF_WILL: Final = _OF_MESSAGE | {WILL_DELAY_INTERVAL}
OF_PUBLISH: Final = _OF_MESSAGE | {TOPIC_ALIAS, SUBSCRIPTION_IDENTIFIER}
OF_CONNECT: Final = frozenset(
    {
        SESSION_EXPIRY_INTERVAL,
        RECEIVE_MAXIMUM,
        MAXIMUM_PACKET_SIZE,
        TOPIC_ALIAS_MAXIMUM,
        REQUEST_RESPONSE_INFORMATION,
        REQUEST_PROBLEM_INFORMATION,
        USER_PROPERTY,
        AUTHENTICATION_METHOD,
        AUTHENTICATION_DATA,
    }
)
OF_ANSWER: Final = frozenset({REASON_STRING, USER_PROPERTY})
"""Properties of PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK and UNSUBACK."""
OF_SUBSCRIBE: Final = frozenset({SUBSCRIPTION_IDENTIFIER, USER_PROPERTY})
OF_UNSUBSCRIBE: Final = frozenset({USER_PROPERTY})
OF_DISCONNECT: Final = frozenset({SESSION_EXPIRY_INTERVAL, REASON_STRING, USER_PROPERTY})
"""Properties of a client's DISCONNECT; a Server Reference is for servers."""

_FORWARDED: Final = _OF_MESSAGE - {MESSAGE_EXPIRY_INTERVAL}


def read(data: bytes, at: int, end: int, packet: str, allowed: frozenset[int]) -> tuple[Properties, int]:
    """Read the properties at `at`, which must end before `end`; return them and the offset after them.

    Raises ProtocolError.
    """
    length, at = variable_integer(data, at, end)
    if not length:
        return NOTHING, at
    until = at + length
    if until > end:
        raise ProtocolError("packet-too-short", "2.2.2.1", f"a {packet} that ends inside its properties")
    values: dict[int, Value] = {}
    user: list[tuple[str, str]] = []
    user_bytes = 0
    forwarded: list[bytes] = []
    while at < until:
        start, identifier = at, data[at]
        if identifier not in allowed:
            known = PROPERTIES.get(identifier)
            told = f"property 0x{identifier:02x}" if known is None else f"the property {known.name}"
            raise ProtocolError("bad-property", "2.2.2.2", f"a {packet} with {told}, which it cannot have")
        if identifier == USER_PROPERTY:
            name, at = _read_text(data, at + 1, until)
            value, at = _read_text(data, at, until)
            user.append((name, value))
            user_bytes += at - start - 5
            if len(user) > USER_PROPERTIES_MAX or user_bytes > USER_PROPERTIES_BYTES_MAX:
                raise _too_many_user_properties(packet)
        else:
            if identifier in values:
                raise _twice(packet, identifier)
            values[identifier], at = _value(data, at, until, packet)
        if identifier in _FORWARDED:
            forwarded.append(data[start:at])
    return Properties(values, tuple(user), b"".join(forwarded)), until


def _value(data: bytes, at: int, until: int, packet: str) -> tuple[Value, int]:
    of = PROPERTIES[data[at]]
    value, at = of.read(data, at + 1, until)
    if isinstance(value, int) and not of.least <= value <= of.most:
        raise ProtocolError("bad-property-value", "2.2.2.2", f"a {packet} whose {of.name} is {value}")
    return value, at


def _twice(packet: str, identifier: int) -> ProtocolError:
    return ProtocolError("property-twice", "2.2.2.2", f"a {packet} with two {PROPERTIES[identifier].name}s")


def _too_many_user_properties(packet: str) -> ProtocolError:
    return ProtocolError(
        "too-many-user-properties",
        "USER_PROPERTIES_MAX",
        f"a {packet} with more than {USER_PROPERTIES_MAX} user properties, or with more than "
        f"{USER_PROPERTIES_BYTES_MAX} bytes in them",
    )


def encode(values: Iterable[tuple[int, Value]], raw: bytes = b"") -> bytes:
    """Properties as a packet has them, with their length; `raw` are more of them, encoded already."""
    body = b"".join(bytes((identifier,)) + PROPERTIES[identifier].write(value) for identifier, value in values) + raw
    return encode_remaining_length(len(body)) + body
