"""The server's side of MQTT 3.1.1: parses what clients send, and makes the server's packets; no I/O.

A CONNECT of MQTT 5 hands the connection over to `protocol5.Version5`, and nothing here asks for the version again.
Every size is capped. Statement numbers such as [MQTT-3.1.0-1] are those of the OASIS standard of 29 October 2014.
"""

import abc
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final, TypeAlias

from msgspec import Struct

from gateway.mqtt.reason_codes import ReasonCode

CLIENT_ID_BYTES_MAX: Final = 256
"""Bytes of a client identifier; the standard asks for 23 at least [MQTT-3.1.3-5]."""

CONNECT_BYTES_MAX: Final = 8_192
"""Bytes of a CONNECT: 4,096 for names and secrets, and as many for a will. A client that is not known yet may hold no
more memory."""

PINGRESP: Final = b"\xd0\x00"

PUBREC: Final = 0x10000000
"""Added to a packet identifier for `acknowledgements`, it makes a PUBREC instead of a PUBACK (section 3.5)."""
PUBCOMP: Final = 0x30000000
"""Added to a packet identifier for `acknowledgements`, it makes a PUBCOMP (section 3.7)."""

_CONNECT: Final = 0x10
_PUBACK: Final = 0x40
_PUBREL: Final = 0x60
_SUBSCRIBE: Final = 0x80
_UNSUBSCRIBE: Final = 0xA0
_PINGREQ: Final = 0xC0
_DISCONNECT: Final = 0xE0

_PUBLISH_TYPE: Final = 0x30
_PUBLISH: Final = frozenset({0x30, 0x31, 0x32, 0x33, 0x34, 0x35, 0x3A, 0x3B, 0x3C, 0x3D})
"""First bytes of valid PUBLISH packets: QoS 0, or QoS 1 or 2 with or without DUP; RETAIN or not."""

_FIRST_BYTES: Final = frozenset(
    {_CONNECT, _PUBACK, _PUBREL | 2, _SUBSCRIBE | 2, _UNSUBSCRIBE | 2, _PINGREQ, _DISCONNECT}
)
"""Type and flags of the other packets that a client may send here; the flags are fixed [MQTT-2.2.2-2]."""

_CLIENT_TYPES: Final = frozenset(first & 0xF0 for first in _FIRST_BYTES)

_HTTP_BEGINNINGS: Final = tuple(
    f"{method} ".encode()
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "PRI")
)
"""Beginnings of HTTP requests (RFC 9110, section 9; RFC 5789), also of version 2 (RFC 9113, section 3.4)."""

_BRIDGE: Final = 0x80
"""Bit that mosquitto adds to the protocol level when it connects as a bridge."""


class ConnectReturnCode(IntEnum):
    """Return codes of CONNACK (section 3.2.2.3, table 3.1)."""

    ACCEPTED = 0
    UNACCEPTABLE_PROTOCOL_LEVEL = 1
    IDENTIFIER_REJECTED = 2
    SERVER_UNAVAILABLE = 3
    BAD_USER_NAME_OR_PASSWORD = 4
    NOT_AUTHORIZED = 5


class Publish(Struct, frozen=True, gc=False):
    """An application message (section 3.3). `packet_id` is 0 with QoS 0, which has none.

    RETAIN is accepted and ignored: no message is delivered to clients that subscribe later.
    """

    topic: str
    payload: bytes
    qos: int
    packet_id: int
    dup: bool


class Will(Struct, frozen=True, gc=False):
    """The message to publish when a client ends without DISCONNECT (section 3.1.2.5). The defaults are MQTT 3.1.1's."""

    topic: str
    payload: bytes
    qos: int
    delay_s: int = 0
    """Seconds between the end and the will; a client that is back by then has none published (MQTT 5, 3.1.3.2.2)."""
    expiry_s: int | None = None
    """As `protocol5.Publish5.expiry_s`."""
    forwarded: bytes = b""
    """As `protocol5.Publish5.forwarded`."""


class Connect(Struct, frozen=True):
    """A client's request to connect (section 3.1). `client_id` may be empty: then the server makes one."""

    client_id: str
    clean_session: bool
    """Whether the session begins anew: Clean Session, or Clean Start of MQTT 5."""
    keep_alive_s: int
    will: Will | None
    user_name: str | None
    password: bytes | None
    session_expiry_s: int | None = None
    """Seconds that the session outlives its connection, by MQTT 5 (3.1.2.11.2). None: as `clean_session` says."""

    @property
    def is_of_5(self) -> bool:
        """Whether the client speaks MQTT 5, which has reason codes."""
        return self.session_expiry_s is not None

    @property
    def is_kept(self) -> bool:
        """Whether the session outlives its connection."""
        return not self.clean_session if self.session_expiry_s is None else self.session_expiry_s > 0

    def __repr__(self) -> str:
        """Leave secrets out: asyncio logs the arguments of a callback that fails."""
        return "Connect(...)"


class PubAck(Struct, frozen=True, gc=False):
    """The client acknowledges a PUBLISH of this server (section 3.4)."""

    packet_id: int
    code: int = 0
    """Reason code of MQTT 5; from 0x80 on, the client does not want the message."""


class PubRel(Struct, frozen=True, gc=False):
    """The client will not send a PUBLISH again, so its identifier may be forgotten (section 3.6)."""

    packet_id: int


class Subscribe(Struct, frozen=True):
    """A request to subscribe (section 3.8); `filters` is never empty."""

    packet_id: int
    filters: tuple[tuple[str, int], ...]
    """Topic filters, each with the requested QoS."""


class Unsubscribe(Struct, frozen=True):
    """A request to unsubscribe (section 3.10); `filters` is never empty."""

    packet_id: int
    filters: tuple[str, ...]


class PingRequest(Struct, frozen=True):
    """PINGREQ (section 3.12)."""


class Disconnect(Struct, frozen=True):
    """A clean end (section 3.14): the will is discarded, and nothing after it counts."""

    is_with_will: bool = False
    """Whether the will is published all the same: reason code 0x04 of MQTT 5."""
    session_expiry_s: int | None = None
    """New Session Expiry Interval (MQTT 5, 3.14.2.2.2)."""


class Violation(Struct, frozen=True):
    """The client broke a rule, so the connection must be closed [MQTT-4.8.0-1]."""

    reason: str
    """A short stable name to count by."""
    rule: str
    """The rule: a statement or section of the standard, a setting, or a constant."""
    message: str
    answer: bytes = b""
    """Bytes to send before closing; mostly none."""


Event: TypeAlias = Connect | Publish | PubAck | PubRel | Subscribe | Unsubscribe | PingRequest | Disconnect | Violation


class MalformedPacketError(Exception):
    """The bytes are no MQTT packet, so nothing after them can be read."""


class ProtocolError(MalformedPacketError):
    """A rule was broken; carries the `Violation`."""

    def __init__(self, reason: str, rule: str, message: str, answer: bytes = b"") -> None:
        super().__init__(f"{message} [{rule}]")
        self.violation = Violation(reason, rule, message, answer)


class Dialect(abc.ABC):
    """A version of MQTT on one connection: parses packets after CONNECT, and makes the server's."""

    __slots__ = ()

    receives: int
    """Messages with QoS 1 that the client takes unacknowledged."""

    @abc.abstractmethod
    def publishes(self, data: bytes, at: int, packet_bytes_max: int, events: list[Event]) -> int:
        """Append the run of complete PUBLISH packets at `at`; return the offset after it. Raises ProtocolError."""

    @abc.abstractmethod
    def check_first_byte(self, first: int) -> None:
        """Raise ProtocolError unless a client may send a packet of this type with these flags."""

    @abc.abstractmethod
    def packet(self, first: int, body: bytes) -> Event:
        """Parse a complete packet that is not a PUBLISH. Raises ProtocolError."""

    @abc.abstractmethod
    def judged(self, violation: Violation) -> Violation:
        """The violation with the bytes to send before closing."""

    @abc.abstractmethod
    def accepted(self, *, session_present: bool, client_id: str | None, session_expiry_s: int | None) -> bytes:
        """CONNACK that lets the client in (section 3.2).

        `client_id` is the identifier that the server made, if it did. `session_expiry_s` is how many seconds the
        session is kept, if that is not as the client asked.
        """

    @abc.abstractmethod
    def refused(self, code: ReasonCode) -> bytes:
        """CONNACK that refuses the client; empty if CONNACK cannot say this.

        A refusal never has the session present [MQTT-3.2.2-4].
        """

    @abc.abstractmethod
    def ended(self, code: ReasonCode, words: str = "") -> bytes:
        """DISCONNECT of the server, with words for the client's log; empty where there is no such packet."""

    @abc.abstractmethod
    def acknowledgements(self, answers: Sequence[int]) -> bytes:
        """PUBACKs, PUBRECs and PUBCOMPs, in the order of the packets that they answer [MQTT-4.6.0-2, -3].

        An answer is a packet identifier: as it is for PUBACK, with `PUBREC` or `PUBCOMP` added for these.
        """

    @abc.abstractmethod
    def publish(  # noqa: PLR0913 - the packet's fields
        self,
        topic: str,
        payload: bytes,
        qos: int,
        packet_id: int,
        *,
        dup: bool,
        forwarded: bytes = b"",
        expiry_s: int | None = None,
    ) -> bytes:
        """A PUBLISH of the server (section 3.3); `packet_id` is used with QoS 1. RETAIN is 0 [MQTT-3.3.1-9].

        The properties go to clients that know of properties. Empty if the client takes no packet of this size.
        """

    @abc.abstractmethod
    def suback(self, packet_id: int, codes: Sequence[int]) -> bytes:
        """SUBACK (section 3.9): for each filter, in their order, the QoS granted or a `ReasonCode`."""

    @abc.abstractmethod
    def unsuback(self, packet_id: int, codes: Sequence[int]) -> bytes:
        """UNSUBACK (section 3.11), with a `ReasonCode` for each filter."""


_CONNECT_OF_5: Final = b"\0\4MQTT\5"
"""Beginning of the body of a CONNECT of MQTT 5: protocol name and version (sections 3.1.2.1 and 3.1.2.2)."""


class ServerProtocol:
    """Parses the packets of one connection from bytes in any split.

    Holds at most `packet_bytes_max` bytes plus one `receive`; before CONNECT, CONNECT_BYTES_MAX bytes. Copies an
    unfinished packet once, when it is complete, so a large packet in small pieces costs no more than in one.
    """

    __slots__ = ("_connected", "_ended", "_needed", "_newer", "_packet_bytes_max", "_pending", "dialect")

    def __init__(self, packet_bytes_max: int, newer: Callable[[], Dialect] | None = None) -> None:
        """`newer` makes the dialect of a connection with MQTT 5; without it, that version is refused."""
        self.dialect: Dialect = VERSION_4
        """The version that CONNECT has chosen."""
        self._newer = newer
        self._packet_bytes_max = packet_bytes_max
        self._pending = bytearray()
        self._needed = 0
        self._connected = False
        self._ended = False

    @property
    def pending_bytes(self) -> int:
        """Bytes held of a packet that is not complete yet; fewer than `packet_bytes_max`."""
        return len(self._pending)

    def receive(self, data: bytes) -> list[Event]:
        """Take bytes; return the packets that they complete, in order.

        Never raises: a broken rule is a `Violation`, always the last event. After it, and after `Disconnect`, all bytes
        are ignored. Packets after a CONNECT are parsed although the server may still refuse that CONNECT. If it does,
        it must not act on them [MQTT-3.1.4-5].
        """
        if self._ended:
            return []
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed:
                return []
            data = bytes(self._pending)
            self._pending.clear()
        events: list[Event] = []
        try:
            at = self._parse(data, events)
        except ProtocolError as error:
            self._ended = True
            events.append(self.dialect.judged(error.violation))
        else:
            if not self._ended:
                self._pending += data[at:]
        return events

    def _parse(self, data: bytes, events: list[Event]) -> int:
        """Append the complete packets of `data`; return the offset of the first byte after them.

        A packet's first byte is judged first, then its length, even before the packet is complete. So the split of the
        bytes never changes the outcome.
        """
        at, end = 0, len(data)
        while at < end and not self._ended:
            if self._connected:
                at = self.dialect.publishes(data, at, self._packet_bytes_max, events)
                if at == end:
                    break
            first = data[at]
            if not self._connected and _may_be_http(data[at:]):
                self._needed = end - at + 1
                break
            self._check_first_byte(first)
            header = remaining_length(data, at + 1)
            if header is None:
                self._needed = end - at + 1
                break
            length, body = header
            self._check_size(body + length - at)
            if body + length > end:
                self._needed = body + length - at
                break
            at = body + length
            events.append(self._packet(first, data[body:at]))
        return at

    def _check_size(self, size: int) -> None:
        if not self._connected and size > CONNECT_BYTES_MAX:
            raise ProtocolError(
                "connect-too-large",
                "CONNECT_BYTES_MAX",
                f"a CONNECT of {size} bytes; the most taken is {CONNECT_BYTES_MAX}: shorten its will",
            )
        if size > self._packet_bytes_max:
            raise ProtocolError(
                "packet-too-large",
                "packet_bytes_max",
                f"a packet of {size} bytes; the most is mqtt_listener.packet_bytes_max = {self._packet_bytes_max}",
            )

    def _check_first_byte(self, first: int) -> None:
        kind = first & 0xF0
        if not self._connected:
            if first == 0x16:
                raise ProtocolError(
                    "tls-on-plain-port",
                    "MQTT-2.2.2-2",
                    "the client begins with TLS, which this port does not speak: let it connect to "
                    "mqtt_listener.tls.port, or without TLS",
                )
            if kind != _CONNECT:
                raise ProtocolError(
                    "first-packet-not-connect",
                    "MQTT-3.1.0-1",
                    f"the first packet has type {kind >> 4}; it must be CONNECT (1)",
                )
        elif kind == _CONNECT:
            raise ProtocolError("second-connect", "MQTT-3.1.0-2", "a second CONNECT on one connection")
        self.dialect.check_first_byte(first)

    def _packet(self, first: int, body: bytes) -> Event:
        """Parse one complete packet that is not a PUBLISH."""
        if first == _CONNECT and self._newer is not None and body.startswith(_CONNECT_OF_5):
            self.dialect = self._newer()
        event = self.dialect.packet(first, body)
        if first == _CONNECT:
            self._connected = True
        elif first == _DISCONNECT:
            self._ended = True
        return event


def parse_publishes(data: bytes, at: int, packet_bytes_max: int, events: list[Event]) -> int:
    """Append the run of complete PUBLISH packets that begins at `at`; return the offset after it.

    This is the hot path: one loop over a whole read. It stops at anything but a complete PUBLISH with a valid header,
    and leaves the rest to its caller. Raises `ProtocolError` for a complete PUBLISH that breaks a rule (sections 3.3.2
    and 4.7.3); the packets before it have been appended.
    """
    end = len(data)
    append = events.append
    while at + 1 < end:
        first = data[at]
        if first not in _PUBLISH:
            break
        length = data[at + 1]
        body = at + 2
        if length > 0x7F:
            try:
                header = remaining_length(data, at + 1)
            except ProtocolError:
                break
            if header is None:
                break
            length, body = header
        following = body + length
        if following > end or following - at > packet_bytes_max:
            break
        payload_at = body + 2 + (data[body] << 8 | data[body + 1]) if length > 1 else following + 1
        qos = first >> 1 & 3
        if payload_at + (2 if qos else 0) > following:
            raise ProtocolError("packet-too-short", "3.3", "a PUBLISH that ends inside its topic or packet id")
        raw = data[body + 2 : payload_at]
        topic = known_topic_name(raw) if len(raw) <= 128 else topic_name(raw)
        packet_id = 0
        if qos:
            packet_id = data[payload_at] << 8 | data[payload_at + 1]
            payload_at += 2
            if not packet_id:
                raise packet_id_zero()
        append(Publish(topic, data[payload_at:following], qos, packet_id, first & 0x08 != 0))
        at = following
    return at


def connack(code: ConnectReturnCode, *, session_present: bool = False) -> bytes:
    """CONNACK (section 3.2); a refusal never has the session present [MQTT-3.2.2-4]."""
    return bytes((0x20, 0x02, session_present, code))


def acknowledgements(answers: Sequence[int]) -> bytes:
    """PUBACKs, PUBRECs and PUBCOMPs in one piece, in the order of the packets that they answer [MQTT-4.6.0-2, -3].

    An answer is a packet identifier: as it is for PUBACK, with `PUBREC` or `PUBCOMP` added for these.
    """
    return struct.pack(f"!{len(answers)}I", *[0x40020000 + answer for answer in answers])


def publish(topic: str, payload: bytes, qos: int, packet_id: int, *, dup: bool) -> bytes:
    """A PUBLISH of the server (section 3.3); `packet_id` is used with QoS 1. RETAIN is 0 [MQTT-3.3.1-9]."""
    raw = topic.encode()
    rest = len(raw).to_bytes(2, "big") + raw + (packet_id.to_bytes(2, "big") if qos else b"") + payload
    return bytes((0x30 | dup << 3 | qos << 1,)) + encode_remaining_length(len(rest)) + rest


def suback(packet_id: int, granted: Sequence[int]) -> bytes:
    """SUBACK (section 3.9): for each filter, in their order, the QoS granted or 0x80 [MQTT-3.8.4-5, MQTT-3.9.3-1]."""
    rest = packet_id.to_bytes(2, "big") + bytes(granted)
    return b"\x90" + encode_remaining_length(len(rest)) + rest


def unsuback(packet_id: int) -> bytes:
    """UNSUBACK (section 3.11) [MQTT-3.10.4-4]."""
    return b"\xb0\x02" + packet_id.to_bytes(2, "big")


def _may_be_http(data: bytes) -> bool:
    """Return whether the bytes may become an HTTP request. Raises `ProtocolError` if they are one."""
    if data.startswith(_HTTP_BEGINNINGS):
        raise ProtocolError(
            "http-on-mqtt-port",
            "MQTT-3.1.0-1",
            "somebody speaks HTTP to the MQTT port: a browser, or a client that is set to WebSocket (ws://). This port "
            "takes only MQTT itself: set the client to mqtt://",
        )
    return any(beginning.startswith(data) for beginning in _HTTP_BEGINNINGS)


def encode_remaining_length(length: int) -> bytes:
    """Section 2.2.3: seven bits a byte, least significant first."""
    encoded = bytearray()
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)


def remaining_length(data: bytes, at: int) -> tuple[int, int] | None:
    """Return the remaining length at `at` and the offset after it; None if bytes are missing (section 2.2.3)."""
    length = 0
    for index, byte in enumerate(data[at : at + 4]):
        length |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return length, at + index + 1
    if len(data) - at >= 4:
        raise ProtocolError("remaining-length-too-long", "2.2.3", "a remaining length of more than four bytes")
    return None


def first_byte_error(first: int) -> ProtocolError:
    """The rule that a packet with this first byte breaks (section 2.2)."""
    kind = first & 0xF0
    if kind == _PUBLISH_TYPE:
        return _publish_flags_error(first)
    if kind in {0x00, 0xF0}:
        return ProtocolError("reserved-packet-type", "2.2.1", f"packet type {kind >> 4} is reserved")
    if kind in _CLIENT_TYPES:
        return ProtocolError("reserved-flags", "MQTT-2.2.2-2", f"flags {first & 0x0F:04b} of packet type {kind >> 4}")
    return ProtocolError(
        "unexpected-packet",
        "2.2.1",
        f"packet type {kind >> 4}: only servers send it, or it answers QoS 2, which this server never sends",
    )


def _publish_flags_error(first: int) -> ProtocolError:
    qos = first >> 1 & 3
    if qos == 3:
        return ProtocolError("qos-3", "MQTT-3.3.1-4", "a PUBLISH with both QoS bits set")
    return ProtocolError("dup-with-qos-0", "MQTT-3.3.1-2", "a PUBLISH with DUP and QoS 0")


def packet_id_zero() -> ProtocolError:
    return ProtocolError("packet-id-zero", "MQTT-2.3.1-1", "packet identifier 0")


def decode_text(raw: bytes) -> str:
    """Decode a string (section 1.5.3). Python's decoder refuses surrogates and keeps U+FEFF, as the standard asks."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("bad-utf8", "MQTT-1.5.3-1", f"a string that is not UTF-8: {error}") from None
    if "\0" in text:
        raise ProtocolError("null-character", "MQTT-1.5.3-2", "a string with U+0000")
    return text


def topic_name(raw: bytes) -> str:
    topic = decode_text(raw)
    if not topic:
        raise ProtocolError("empty-topic", "MQTT-4.7.3-1", "an empty topic name")
    if "+" in topic or "#" in topic:
        raise ProtocolError("wildcard-in-topic-name", "MQTT-3.3.2-2", f"a wildcard in the topic name {topic[:80]!r}")
    return topic


# Devices write to few topics, over and over. A look-up is cheaper than decoding and checking, and readings of one topic
# share one string. The cache takes 2 MB at most, as the caller bounds the length of topics.
known_topic_name = lru_cache(maxsize=8192)(topic_name)


class Fields:
    """Reads a packet's fields one after another. Raises ProtocolError if a field does not fit."""

    __slots__ = ("_at", "_body", "packet")

    def __init__(self, packet: str, body: bytes) -> None:
        self.packet = packet
        self._body = body
        self._at = 0

    def next_bytes(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._body):
            raise ProtocolError("packet-too-short", "2.2.3", f"a {self.packet} that ends inside a field")
        return self._body[start : self._at]

    def byte(self) -> int:
        return self.next_bytes(1)[0]

    def number(self) -> int:
        return int.from_bytes(self.next_bytes(2), "big")

    def binary(self) -> bytes:
        return self.next_bytes(self.number())

    def text(self) -> str:
        return decode_text(self.binary())

    def packet_id(self) -> int:
        packet_id = self.number()
        if not packet_id:
            raise packet_id_zero()
        return packet_id

    def topic_filter(self) -> str:
        topic_filter = self.text()
        if not topic_filter:
            raise ProtocolError("empty-topic", "MQTT-4.7.3-1", "an empty topic filter")
        levels = topic_filter.split("/")
        if any("#" in level for level in levels[:-1]) or ("#" in levels[-1] and levels[-1] != "#"):
            raise ProtocolError("bad-topic-filter", "MQTT-4.7.1-2", "'#' that is not a last level of its own")
        if any("+" in level and level != "+" for level in levels):
            raise ProtocolError("bad-topic-filter", "MQTT-4.7.1-3", "'+' that is not a level of its own")
        return topic_filter

    @property
    def left(self) -> int:
        return len(self._body) - self._at


def _parse_connect(body: bytes) -> Connect:
    """Parse the variable header and payload of a CONNECT (sections 3.1.2 and 3.1.3)."""
    fields = Fields("CONNECT", body)
    _check_protocol(fields)
    flags = fields.byte()
    keep_alive_s = fields.number()
    check_connect_flags(flags)
    clean_session = flags & 0x02 != 0
    client_id_raw = fields.binary()
    if len(client_id_raw) > CLIENT_ID_BYTES_MAX:
        raise ProtocolError(
            "client-id-too-long",
            "MQTT-3.1.3-9",
            f"a client identifier of {len(client_id_raw)} bytes; the most taken is {CLIENT_ID_BYTES_MAX}",
            connack(ConnectReturnCode.IDENTIFIER_REJECTED),
        )
    client_id = decode_text(client_id_raw)
    if not client_id and not clean_session:
        raise ProtocolError(
            "empty-client-id",
            "MQTT-3.1.3-8",
            "an empty client identifier without clean session",
            connack(ConnectReturnCode.IDENTIFIER_REJECTED),
        )
    will = None
    if flags & 0x04:
        topic = topic_name(fields.binary())
        will = Will(topic, fields.binary(), flags >> 3 & 3)
    user_name = fields.text() if flags & 0x80 else None
    password = fields.binary() if flags & 0x40 else None
    if fields.left:
        raise ProtocolError(
            "packet-too-long", "MQTT-3.1.3-1", f"a CONNECT with bytes after its last field: {fields.left}"
        )
    return Connect(client_id, clean_session, keep_alive_s, will, user_name, password)


def _check_protocol(fields: Fields) -> None:
    """Check protocol name and level, which say how to read the rest (sections 3.1.2.1 and 3.1.2.2)."""
    name, level = fields.binary(), fields.byte()
    if name == b"MQTT" and level == 4:
        return
    if name not in {b"MQTT", b"MQIsdp"}:
        raise ProtocolError("bad-protocol-name", "MQTT-3.1.2-1", f"protocol name {name[:16]!r}")
    told = f"protocol {name.decode()} level {level}"
    # Every other level gets a CONNACK of 3.1.1.
    answer = connack(ConnectReturnCode.UNACCEPTABLE_PROTOCOL_LEVEL)
    if level & _BRIDGE:
        raise ProtocolError(
            "mosquitto-bridge-level",
            "MQTT-3.1.2-2",
            f"{told}: a mosquitto bridge first asks for mosquitto's own protocol. It tries again with level "
            f"{level - _BRIDGE}; try_private false in the bridge's settings saves the first try",
            answer,
        )
    raise ProtocolError(
        "unsupported-protocol-level",
        "MQTT-3.1.2-2",
        f"{told}{_VERSIONS.get(level, '')}: this server speaks MQTT 3.1.1 and 5, levels 4 and 5; set the client to one "
        "of them",
        answer,
    )


_VERSIONS: Final = {3: " (MQTT 3.1)"}
"""Versions of the standard by protocol level, for messages."""


def check_connect_flags(flags: int) -> None:
    """Check the connect flags (sections 3.1.2.3 to 3.1.2.9)."""
    if flags & 0x01:
        raise ProtocolError("reserved-connect-flag", "MQTT-3.1.2-3", "the reserved connect flag is set")
    if not flags & 0x04 and flags & 0x38:
        raise ProtocolError(
            "bad-will-flags", "MQTT-3.1.2-13, MQTT-3.1.2-15", "a will QoS or will retain without a will"
        )
    if flags & 0x18 == 0x18:
        raise ProtocolError("bad-will-flags", "MQTT-3.1.2-14", "a will QoS of 3")
    if flags & 0x40 and not flags & 0x80:
        raise ProtocolError("password-without-user-name", "MQTT-3.1.2-22", "a password without a user name")


def _only_packet_id(packet: str, body: bytes) -> int:
    """Parse a packet identifier and nothing else (sections 3.4 and 3.6)."""
    fields = Fields(packet, body)
    packet_id = fields.packet_id()
    if fields.left:
        raise ProtocolError("packet-too-long", "3.4, 3.6", f"a {packet} with something after its packet identifier")
    return packet_id


def _parse_subscribe(body: bytes) -> Subscribe:
    """Parse a SUBSCRIBE (section 3.8)."""
    fields = Fields("SUBSCRIBE", body)
    packet_id = fields.packet_id()
    filters = []
    while fields.left:
        topic_filter, qos = fields.topic_filter(), fields.byte()
        if qos > 2:
            raise ProtocolError("bad-requested-qos", "MQTT-3.8.3-4", f"requested QoS byte 0x{qos:02x}")
        filters.append((topic_filter, qos))
    if not filters:
        raise ProtocolError("no-topic-filter", "MQTT-3.8.3-3", "a SUBSCRIBE without a topic filter")
    return Subscribe(packet_id, tuple(filters))


def _parse_unsubscribe(body: bytes) -> Unsubscribe:
    """Parse an UNSUBSCRIBE (section 3.10)."""
    fields = Fields("UNSUBSCRIBE", body)
    return Unsubscribe(fields.packet_id(), tuple(topic_filters(fields)))


def topic_filters(fields: Fields) -> Iterator[str]:
    """Read the topic filters of an UNSUBSCRIBE, which end it. Raises ProtocolError."""
    if not fields.left:
        raise ProtocolError("no-topic-filter", "MQTT-3.10.3-2", "an UNSUBSCRIBE without a topic filter")
    while fields.left:
        yield fields.topic_filter()


def parse_ping_request(body: bytes) -> PingRequest:
    _check_empty("PINGREQ", body)
    return PingRequest()


def _parse_disconnect(body: bytes) -> Disconnect:
    _check_empty("DISCONNECT", body)
    return Disconnect()


def _check_empty(packet: str, body: bytes) -> None:
    if body:
        raise ProtocolError("packet-too-long", "3.12, 3.14", f"a {packet} with something after its header")


_PARSERS: Final[dict[int, Callable[[bytes], Event]]] = {
    _CONNECT: _parse_connect,
    _PUBACK: lambda body: PubAck(_only_packet_id("PUBACK", body)),
    _PUBREL | 2: lambda body: PubRel(_only_packet_id("PUBREL", body)),
    _SUBSCRIBE | 2: _parse_subscribe,
    _UNSUBSCRIBE | 2: _parse_unsubscribe,
    _PINGREQ: parse_ping_request,
    _DISCONNECT: _parse_disconnect,
}
"""Parsers of packet bodies, by first byte."""


class Version4(Dialect):
    """MQTT 3.1.1, which is protocol level 4. It has no state."""

    __slots__ = ()

    receives = 65_535

    # The function itself, as this is the hot path.
    publishes = staticmethod(parse_publishes)

    def check_first_byte(self, first: int) -> None:
        if first not in _FIRST_BYTES and first not in _PUBLISH:
            raise first_byte_error(first)

    def packet(self, first: int, body: bytes) -> Event:
        return _PARSERS[first](body)

    def judged(self, violation: Violation) -> Violation:
        return violation

    def accepted(self, *, session_present: bool, client_id: str | None, session_expiry_s: int | None) -> bytes:
        del client_id, session_expiry_s
        return connack(ConnectReturnCode.ACCEPTED, session_present=session_present)

    def refused(self, code: ReasonCode) -> bytes:
        return connack(_RETURN_CODES[code]) if code in _RETURN_CODES else b""

    def ended(self, code: ReasonCode, words: str = "") -> bytes:
        del code, words
        return b""

    acknowledgements = staticmethod(acknowledgements)

    def publish(  # noqa: PLR0913 - the packet's fields
        self,
        topic: str,
        payload: bytes,
        qos: int,
        packet_id: int,
        *,
        dup: bool,
        forwarded: bytes = b"",
        expiry_s: int | None = None,
    ) -> bytes:
        del forwarded, expiry_s
        return publish(topic, payload, qos, packet_id, dup=dup)

    def suback(self, packet_id: int, codes: Sequence[int]) -> bytes:
        return suback(packet_id, [min(code, _REFUSED_FILTER) for code in codes])

    def unsuback(self, packet_id: int, codes: Sequence[int]) -> bytes:
        del codes
        return unsuback(packet_id)


_RETURN_CODES: Final = {
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: ConnectReturnCode.IDENTIFIER_REJECTED,
    ReasonCode.SERVER_BUSY: ConnectReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.QUOTA_EXCEEDED: ConnectReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: ConnectReturnCode.BAD_USER_NAME_OR_PASSWORD,
    ReasonCode.NOT_AUTHORIZED: ConnectReturnCode.NOT_AUTHORIZED,
}
"""Return codes of CONNACK by the reason codes with which a client is refused."""
_REFUSED_FILTER: Final = 0x80
"""Return code of SUBACK for a refused filter (section 3.9.3)."""
VERSION_4: Final = Version4()
