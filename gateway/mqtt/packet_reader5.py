"""Parses what a broker sends by MQTT 5: messages with their properties, CONNACK, SUBACK and DISCONNECT; no I/O."""

from typing import Final

from gateway.mqtt import properties
from gateway.mqtt.packet_reader import Message, Packet, packet_id
from gateway.mqtt.properties import NOTHING, Properties
from gateway.mqtt.protocol import MalformedPacketError, ProtocolError

_OF_CONNACK: Final = frozenset(
    {
        properties.SESSION_EXPIRY_INTERVAL,
        properties.RECEIVE_MAXIMUM,
        properties.MAXIMUM_QOS,
        properties.RETAIN_AVAILABLE,
        properties.MAXIMUM_PACKET_SIZE,
        properties.ASSIGNED_CLIENT_IDENTIFIER,
        properties.TOPIC_ALIAS_MAXIMUM,
        properties.REASON_STRING,
        properties.USER_PROPERTY,
        properties.WILDCARD_SUBSCRIPTION_AVAILABLE,
        properties.SUBSCRIPTION_IDENTIFIERS_AVAILABLE,
        properties.SHARED_SUBSCRIPTION_AVAILABLE,
        properties.SERVER_KEEP_ALIVE,
        properties.RESPONSE_INFORMATION,
        properties.SERVER_REFERENCE,
    }
)
_OF_DISCONNECT: Final = frozenset({properties.REASON_STRING, properties.USER_PROPERTY, properties.SERVER_REFERENCE})


def message5(packet: Packet) -> Message:
    """Parse a PUBLISH (MQTT 5, section 3.3). Raises MalformedPacketError.

    User properties beyond our bounds are left out: the broker would deliver the message again and again. So are those
    of a packet whose end was dropped, as the packet is not taken.
    """
    body, qos_bits = packet.body, packet.first & 0b110
    if qos_bits == 0b110:
        raise MalformedPacketError("a PUBLISH with QoS 3, which does not exist")
    end = 2 + int.from_bytes(body[:2], "big")
    at = end + 2 if qos_bits else end
    identifier = int.from_bytes(body[end:at], "big")
    if not 2 < end <= at < len(body) or (qos_bits and not identifier):
        raise MalformedPacketError("a PUBLISH without a topic, a packet identifier or properties")
    if packet.missing:
        return Message(body[2:end], identifier, b"")
    try:
        found, at = properties.read(body, at, len(body), "PUBLISH", properties.OF_PUBLISH)
    except ProtocolError as error:
        if error.violation.reason != "too-many-user-properties":
            raise
        length, at = properties.variable_integer(body, at, len(body))
        found, at = NOTHING, at + length
    # A broker counts the expiry down, so a message that comes again may differ in it (section 3.3.2.3.3).
    return Message(body[2:end], identifier, body[at:], found.user, body[: end + 2] + found.forwarded + body[at:])


def connack5(packet: Packet) -> tuple[int, bool]:
    """Parse CONNACK: its reason code, and whether the broker has the session (section 3.2).

    Raises MalformedPacketError.
    """
    if len(packet.body) == 2 and packet.body[1]:
        # A broker that knows no MQTT 5 refuses in the form of 3.1.1.
        return packet.body[1], False
    if len(packet.body) < 3:
        raise MalformedPacketError("a CONNACK without its reason code and properties")
    properties.read(packet.body, 2, len(packet.body), "CONNACK", _OF_CONNACK)
    return packet.body[1], bool(packet.body[0] & 1)


def keep_alive_of(packet: Packet) -> int | None:
    """Server Keep Alive of a CONNACK in seconds, which holds instead of ours [MQTT-3.2.2-21]; None without it."""
    found, _ = properties.read(packet.body, 2, len(packet.body), "CONNACK", _OF_CONNACK)
    if properties.SERVER_KEEP_ALIVE not in found.values:
        return None
    return found.number(properties.SERVER_KEEP_ALIVE, 0)


def suback5(packet: Packet) -> tuple[int, bytes]:
    """Parse SUBACK: packet identifier, and a reason code for each filter (section 3.9). Raises MalformedPacketError."""
    _, at = properties.read(packet.body, 2, len(packet.body), "SUBACK", properties.OF_ANSWER)
    return packet_id(packet), packet.body[at:]


def disconnect5(packet: Packet) -> tuple[int, str]:
    """Parse DISCONNECT: its reason code, and its Reason String or nothing (section 3.14).

    Raises MalformedPacketError.
    """
    body = packet.body
    found: Properties = NOTHING
    if len(body) > 1:
        found, _ = properties.read(body, 1, len(body), "DISCONNECT", _OF_DISCONNECT)
    return (body[0] if body else 0), str(found.values.get(properties.REASON_STRING, ""))
