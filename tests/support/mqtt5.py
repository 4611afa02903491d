"""MQTT 5 packets as paho writes and reads them, without a socket, and strategies for properties."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from hypothesis import strategies as st
from paho.mqtt._packet import ConnackPacket, decode_connack, decode_disconnect
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as Properties5

from gateway.listener.listener import MqttListener
from gateway.mqtt.packet_reader import PacketReader
from gateway.mqtt.properties import (
    PROPERTIES,
    RESPONSE_TOPIC,
    SUBSCRIPTION_IDENTIFIER,
    TOPIC_ALIAS,
    USER_PROPERTY,
    Properties,
    UserProperties,
    Value,
    encode,
)
from tests.support.mqtt_peers import Peer, connected

_EXCLUDED: Final = ("\0", "\ufeff")
"""Characters that paho does not read: the first is forbidden, and the second is allowed [MQTT-1.5.4-3]."""
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters=_EXCLUDED), max_size=20)
TOPICS = st.text(st.characters(codec="utf-8", exclude_characters=(*_EXCLUDED, "+", "#")), min_size=1)
"""Names of topics."""
USER_PROPERTIES: st.SearchStrategy[UserProperties] = st.lists(st.tuples(TEXTS, TEXTS), max_size=5).map(tuple)


def paho_properties(packet_type: int) -> Any:
    """An empty object for a packet's properties."""
    return Properties5(packet_type)  # type: ignore[no-untyped-call]


def paho_name(identifier: int) -> str:
    """The name that paho gives to a property's attribute."""
    table: dict[str, int] = paho_properties(PacketTypes.CONNECT).names
    return next(name.replace(" ", "") for name, number in table.items() if number == identifier)


def values_of(identifier: int) -> st.SearchStrategy[Value]:
    """Valid values of a property, by the type that paho writes it with."""
    kind = paho_properties(PacketTypes.CONNECT).properties[identifier][0]
    of = PROPERTIES[identifier]
    match kind:
        case 0 | 1 | 2:
            # The listener refuses an alias of 0 by a reason of its own, so that `PROPERTIES` allows it.
            least = 1 if identifier == TOPIC_ALIAS else of.least
            return st.integers(least, min(of.most, 2 ** (8 << kind) - 1, 2**28 - 1))
        case 3:
            return st.integers(1, 2**28 - 1)
        case 4:
            return st.binary(max_size=20)
    return TOPICS if identifier == RESPONSE_TOPIC else TEXTS


@st.composite
def properties_of(draw: st.DrawFn, allowed: frozenset[int]) -> Properties:
    """Properties of a packet that may have these, without their bytes."""
    single = sorted(allowed - {USER_PROPERTY})
    chosen = draw(st.lists(st.sampled_from(single), unique=True)) if single else []
    user = draw(USER_PROPERTIES) if USER_PROPERTY in allowed else ()
    return Properties({identifier: draw(values_of(identifier)) for identifier in chosen}, user)


def in_paho(packet_type: int, properties: Properties) -> Any:
    """The properties as an object of paho."""
    found = paho_properties(packet_type)
    for identifier, value in properties.values.items():
        setattr(found, paho_name(identifier), value)
    for pair in properties.user:
        found.UserProperty = pair
    return found


def from_paho(found: Any) -> Properties:
    """The inverse of `in_paho`."""
    told: dict[int, Any] = {
        identifier: getattr(found, paho_name(identifier))
        for identifier in found.names.values()
        if hasattr(found, paho_name(identifier))
    }
    if SUBSCRIPTION_IDENTIFIER in told:
        (told[SUBSCRIPTION_IDENTIFIER],) = told[SUBSCRIPTION_IDENTIFIER]
    return Properties(told, tuple(told.pop(USER_PROPERTY, ())))


class PahoPackets(Client):
    """A client of paho that keeps the packets that it would send."""

    def __init__(self, client_id: str = "m001") -> None:
        super().__init__(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv5)
        self.packets: list[bytes] = []
        # It only looks whether there is one.
        self._sock = object()  # type: ignore[assignment]

    def _sock_close(self) -> None:
        self._sock = None

    def _packet_queue(self, command: int, packet: bytes | bytearray, *rest: Any, **more: Any) -> MQTTErrorCode:
        del command, rest, more
        self.packets.append(bytes(packet))
        return MQTTErrorCode.MQTT_ERR_SUCCESS


def cut(packets: bytes) -> list[tuple[int, bytes]]:
    """Cut a server's packets: first byte and body of each."""
    reader = PacketReader(2**20)
    return [(packet.first, packet.body) for packet in reader.receive(packets)]


# --- packets of a client that sends bare bytes ------------------------------------------------------------


def field(raw: bytes) -> bytes:
    """A string or binary data, with its length."""
    return len(raw).to_bytes(2, "big") + raw


def packet(first: int, body: bytes) -> bytes:
    """A packet with a body of less than 16,384 bytes."""
    length = bytes((len(body),)) if len(body) < 0x80 else bytes((len(body) & 0x7F | 0x80, len(body) >> 7))
    return bytes((first,)) + length + body


def told(values: Mapping[int, Value] | None = None, user: UserProperties = ()) -> bytes:
    """Properties, with their length."""
    pairs = b"".join(bytes((USER_PROPERTY,)) + field(name.encode()) + field(value.encode()) for name, value in user)
    return encode((values or {}).items(), pairs)


def connect5(  # noqa: PLR0913 - the packet's fields
    client_id: str = "m001",
    values: Mapping[int, Value] | None = None,
    *,
    clean: bool = True,
    keep_alive_s: int = 60,
    login: tuple[str, str] | None = None,
    will: str = "",
    will_topic: str = "status",
    will_values: Mapping[int, Value] | None = None,
) -> bytes:
    flags, payload = 0x02 if clean else 0x00, field(client_id.encode())
    if will:
        flags, payload = flags | 0x0C, payload + told(will_values) + field(will_topic.encode()) + field(will.encode())
    if login is not None:
        flags, payload = flags | 0xC0, payload + field(login[0].encode()) + field(login[1].encode())
    return packet(0x10, field(b"MQTT") + bytes((5, flags)) + keep_alive_s.to_bytes(2, "big") + told(values) + payload)


def publish5(  # noqa: PLR0913 - the packet's fields
    payload: str,
    packet_id: int = 0,
    topic: str = "device/m001/thermo",
    values: Mapping[int, Value] | None = None,
    *,
    user: UserProperties = (),
    qos: int | None = None,
    dup: bool = False,
) -> bytes:
    qos = (1 if packet_id else 0) if qos is None else qos
    identifier = packet_id.to_bytes(2, "big") if qos else b""
    body = field(topic.encode()) + identifier + told(values, user) + payload.encode()
    return packet(0x30 | dup << 3 | qos << 1, body)


def subscribe5(packet_id: int, *filters: str, qos: int = 1) -> bytes:
    return packet(
        0x82, packet_id.to_bytes(2, "big") + b"\0" + b"".join(field(each.encode()) + bytes((qos,)) for each in filters)
    )


def disconnect5(code: int = 0, values: Mapping[int, Value] | None = None) -> bytes:
    return packet(0xE0, bytes((code,)) + told(values))


async def next_packet(peer: Peer) -> tuple[int, bytes]:
    """The next packet of the server: first byte and body."""
    first, byte = await peer.read(2)
    length, shift = byte & 0x7F, 7
    while byte & 0x80:
        (byte,) = await peer.read(1)
        length |= (byte & 0x7F) << shift
        shift += 7
    return first, await peer.read(length)


async def connack_of(peer: Peer) -> ConnackPacket:
    """The server's CONNACK, as paho reads it."""
    first, body = await next_packet(peer)
    assert first == 0x20, hex(first)
    return decode_connack(first, body, MQTTProtocolVersion.MQTTv5)


async def ends_with(peer: Peer) -> int:
    """Reason code of the server's DISCONNECT, behind which it closes."""
    first, body = await next_packet(peer)
    assert first == 0xE0, hex(first)
    assert await peer.read_to_end() == b""
    reason = decode_disconnect(first, body, MQTTProtocolVersion.MQTTv5).reason
    assert reason is not None
    code: int = reason.value
    return code


@contextlib.asynccontextmanager
async def connected5(
    listener: MqttListener, first: bytes | None = None, *, present: bool = False
) -> AsyncIterator[Peer]:
    """Connect a socket with MQTT 5, and be accepted."""
    async with connected(listener, connect5() if first is None else first) as peer:
        connack = await connack_of(peer)
        assert (connack.reason.value, bool(connack.flags)) == (0, present)
        yield peer
