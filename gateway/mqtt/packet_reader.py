"""Cuts an MQTT broker's bytes into packets, many at a time; no I/O."""

from typing import Final, NamedTuple

from gateway.mqtt.protocol import MalformedPacketError, remaining_length

CONNACK: Final = 0x20
PUBLISH: Final = 0x30
PUBACK: Final = 0x40
PUBREC: Final = 0x50
PUBREL: Final = 0x60
PUBCOMP: Final = 0x70
SUBACK: Final = 0x90
UNSUBACK: Final = 0xB0
PINGRESP: Final = 0xD0
DISCONNECT: Final = 0xE0


class Packet(NamedTuple):
    """An MQTT control packet (section 2 of MQTT 3.1.1)."""

    first: int
    """Type and flags."""
    body: bytes
    missing: int
    """Bytes dropped at the body's end, because the packet is longer than the reader takes."""


class Message(NamedTuple):
    """The content of a PUBLISH (section 3.3)."""

    topic: bytes
    packet_id: int
    """0 with QoS 0, which has none."""
    payload: bytes
    user: tuple[tuple[str, str], ...] = ()
    """User properties of MQTT 5."""
    same: bytes = b""
    """Bytes that are equal each time that it is delivered; empty if that is the whole body."""


class PacketReader:
    """Cuts a stream into packets; holds at most `packet_bytes_max` bytes and one read."""

    def __init__(self, packet_bytes_max: int) -> None:
        self._packet_bytes_max = packet_bytes_max
        self._rest = bytearray()
        """The beginning of a packet whose end is still to come."""
        self._wanted = 0
        """Bytes that `_rest` must have before it is looked at again."""
        self._long: Packet | None = None
        """A packet that is too long, while its end is still to come."""
        self._skip = 0
        """Bytes of that packet still to be skipped."""

    def receive(self, data: bytes) -> list[Packet]:
        """Take one read; return the packets that are whole now. Raises MalformedPacketError."""
        packets: list[Packet] = []
        if self._long is not None:
            data = self._after_long(data, packets)
        elif self._rest:
            # Joined when the packet is whole, not at each read: a large packet comes in hundreds of reads.
            self._rest += data
            if len(self._rest) < self._wanted:
                return packets
            data = bytes(self._rest)
            self._rest.clear()
        longest = self._packet_bytes_max
        position, end = 0, len(data)
        self._wanted = 2
        while end - position >= 2:
            length, at = data[position + 1], position + 2
            if length & 0x80:
                found = remaining_length(data, at - 1)
                if found is None:
                    self._wanted = end - position + 1
                    break
                length, at = found
            if end - at < length and end - at < longest:
                self._wanted = at - position + min(length, longest)
                break
            if length <= longest:
                packets.append(Packet(data[position], data[at : at + length], 0))
            else:
                packet = Packet(data[position], data[at : at + longest], length - longest)
                if end - at < length:
                    self._long, self._skip = packet, length - (end - at)
                    position = end
                    break
                packets.append(packet)
            position = at + length
        self._rest += data[position:]
        return packets

    def _after_long(self, data: bytes, packets: list[Packet]) -> bytes:
        """Skip bytes of the packet that is too long; return the bytes after it, if they came."""
        if len(data) < self._skip or self._long is None:
            self._skip -= len(data)
            return b""
        packets.append(self._long)
        self._long = None
        return data[self._skip :]


def message(packet: Packet) -> Message:
    """Parse a PUBLISH. Raises MalformedPacketError."""
    body = packet.body
    end = 2 + int.from_bytes(body[:2], "big")
    qos_bits = packet.first & 0b110
    if qos_bits == 0b110:
        raise MalformedPacketError("a PUBLISH with QoS 3, which does not exist")
    if qos_bits:
        message = Message(body[2:end], int.from_bytes(body[end : end + 2], "big"), body[end + 2 :])
        if message.packet_id:
            return message
    elif 2 < end <= len(body):
        return Message(body[2:end], 0, body[end:])
    raise MalformedPacketError("a PUBLISH without a topic or a packet identifier")


def connack(packet: Packet) -> tuple[int, bool]:
    """Parse CONNACK: its return code, and whether the broker has the session (3.2). Raises MalformedPacketError."""
    if len(packet.body) != 2:
        raise MalformedPacketError("a CONNACK without its return code")
    return packet.body[1], bool(packet.body[0] & 1)


def suback(packet: Packet) -> tuple[int, bytes]:
    """Parse SUBACK: packet identifier, and a return code for each filter (3.9). Raises MalformedPacketError."""
    return packet_id(packet), packet.body[2:]


def packet_id(packet: Packet) -> int:
    """The packet identifier that a packet begins with (section 2.3.1). Raises MalformedPacketError."""
    if len(packet.body) < 2:
        raise MalformedPacketError("a packet without its packet identifier")
    return int.from_bytes(packet.body[:2], "big")
