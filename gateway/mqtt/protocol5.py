"""The server's side of MQTT 5 on one connection: parses the client's packets, and makes the server's; no I/O.

Section and statement numbers are those of the OASIS standard of 7 March 2019. A rule that MQTT 3.1.1 has too may be
told with that version's number. Strings, topics, sizes and the cutting into packets are those of
`gateway.mqtt.protocol`.
"""

from collections.abc import Callable, Sequence
from typing import Final

from gateway.mqtt import properties
from gateway.mqtt.properties import NOTHING, Properties, UserProperties, Value
from gateway.mqtt.protocol import (
    CLIENT_ID_BYTES_MAX,
    PUBREC,
    Connect,
    Dialect,
    Disconnect,
    Event,
    Fields,
    ProtocolError,
    PubAck,
    Publish,
    PubRel,
    Subscribe,
    Unsubscribe,
    Violation,
    Will,
    acknowledgements,
    check_connect_flags,
    decode_text,
    encode_remaining_length,
    first_byte_error,
    known_topic_name,
    packet_id_zero,
    parse_ping_request,
    remaining_length,
    topic_filters,
    topic_name,
)
from gateway.mqtt.reason_codes import CONNACK_CODES, DISCONNECT_CODES, PUBACK_CODES, PUBREL_CODES, ReasonCode

TOPIC_ALIASES_MAX: Final = 16
"""Topic aliases of one connection (section 3.2.2.3.8)."""
ALIAS_TOPIC_BYTES_MAX: Final = 256
"""Bytes of a topic that has an alias. So the aliases of a connection take 4 KB at most."""
REASON_CHARACTERS_MAX: Final = 200
"""Characters of a Reason String that this server sends."""
NEVER_EXPIRES: Final = 2**32 - 1
"""Session Expiry Interval of a session that does not expire (section 3.1.2.11.2)."""
REASON_SHIFT: Final = 32
"""Bits by which a reason code is shifted to be added to an answer for `Version5.acknowledgements`."""

_KIND: Final = 0xF000_0000
"""Bits of an answer that tell its packet."""
_FAILED: Final = 0x80 << REASON_SHIFT
"""Least answer with a reason code that ends its exchange."""
_CONNECT: Final = 0x10
_PUBLISH: Final = frozenset({0x30, 0x32, 0x34, 0x3A, 0x3C})
"""First bytes of valid PUBLISH packets, without RETAIN."""
_RETAINED: Final = frozenset(first | 1 for first in _PUBLISH)
_AUTH: Final = 0xF0
_FIRST_BYTES: Final = frozenset({_CONNECT, 0x40, 0x62, 0x82, 0xA2, 0xC0, 0xE0})
"""Type and flags of the other packets that a client may send here; the flags are fixed [MQTT-2.1.3-1]."""

_CODES: Final = {
    "second-connect": ReasonCode.PROTOCOL_ERROR,
    "unexpected-packet": ReasonCode.PROTOCOL_ERROR,
    "auth": ReasonCode.PROTOCOL_ERROR,
    "authentication-method": ReasonCode.BAD_AUTHENTICATION_METHOD,
    "client-id-too-long": ReasonCode.CLIENT_IDENTIFIER_NOT_VALID,
    "packet-too-large": ReasonCode.PACKET_TOO_LARGE,
    "property-twice": ReasonCode.PROTOCOL_ERROR,
    "bad-property-value": ReasonCode.PROTOCOL_ERROR,
    "bad-reason-code": ReasonCode.PROTOCOL_ERROR,
    "bad-session-expiry": ReasonCode.PROTOCOL_ERROR,
    "too-many-user-properties": ReasonCode.QUOTA_EXCEEDED,
    "packet-id-zero": ReasonCode.PROTOCOL_ERROR,
    "dup-with-qos-0": ReasonCode.PROTOCOL_ERROR,
    "no-topic": ReasonCode.PROTOCOL_ERROR,
    "no-topic-filter": ReasonCode.PROTOCOL_ERROR,
    "bad-requested-qos": ReasonCode.PROTOCOL_ERROR,
    "wildcard-in-topic-name": ReasonCode.TOPIC_NAME_INVALID,
    "bad-topic-filter": ReasonCode.TOPIC_FILTER_INVALID,
    "topic-alias": ReasonCode.TOPIC_ALIAS_INVALID,
    "topic-alias-too-long": ReasonCode.QUOTA_EXCEEDED,
    "receive-maximum": ReasonCode.RECEIVE_MAXIMUM_EXCEEDED,
    "retain": ReasonCode.RETAIN_NOT_SUPPORTED,
    "shared-subscription": ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
    "subscription-identifier": ReasonCode.SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED,
}
"""Reason codes by the rule that was broken (section 4.13); for any other rule, the packet is malformed."""


class Publish5(Publish, frozen=True, gc=False):
    """A PUBLISH with properties (section 3.3.2.3). One without, or with an alias alone, is a plain `Publish`."""

    user: UserProperties = ()
    forwarded: bytes = b""
    """Properties that go along to subscribers, encoded: `properties.Properties.forwarded`."""
    expiry_s: int | None = None
    """Message Expiry Interval in seconds; None if the message does not expire."""


class Version5(Dialect):
    """MQTT 5 on one connection: its topic aliases, its unanswered messages, and the limits of its client."""

    __slots__ = (
        "_aliases",
        "_client_packet_bytes_max",
        "_is_connected",
        "_keeps_session",
        "_packet_bytes_max",
        "_receive_max",
        "_unanswered",
        "receives",
    )

    def __init__(self, receive_max: int, packet_bytes_max: int) -> None:
        """`receive_max` is this server's Receive Maximum, `packet_bytes_max` its Maximum Packet Size."""
        self._receive_max = min(receive_max, 65_535)
        self._packet_bytes_max = packet_bytes_max
        self._aliases: dict[int, str] = {}
        self._is_connected = self._keeps_session = False
        self._unanswered = 0
        """Messages with QoS 1 and 2 of this connection that are not answered to the end."""
        self._client_packet_bytes_max = NEVER_EXPIRES
        """The client's Maximum Packet Size (section 3.1.2.11.4)."""
        self.receives = 65_535
        """The client's Receive Maximum: messages with QoS 1 that it takes unacknowledged (section 3.1.2.11.3)."""

    # --- from the client ----------------------------------------------------------------------------------

    def check_first_byte(self, first: int) -> None:
        if first in _FIRST_BYTES or first in _PUBLISH:
            return
        if first in _RETAINED:
            raise ProtocolError(
                "retain", "MQTT-3.2.2-14", "a PUBLISH with RETAIN, which CONNACK has excluded: nothing is retained here"
            )
        if first == _AUTH:
            raise ProtocolError("auth", "MQTT-4.12.0-7", "an AUTH packet, although CONNECT named no method")
        raise first_byte_error(first)

    def publishes(self, data: bytes, at: int, packet_bytes_max: int, events: list[Event]) -> int:
        """Append a run of PUBLISH packets, as `protocol.parse_publishes` does (sections 3.3 and 3.3.2.3)."""
        end = len(data)
        while at + 1 < end and data[at] in _PUBLISH:
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
            events.append(self._publish(data[at], data, body, following))
            at = following
        return at

    def _publish(self, first: int, data: bytes, at: int, end: int) -> Publish:
        """Parse the PUBLISH whose body lies between two offsets."""
        qos = first >> 1 & 3
        # Two bytes of the topic's length, the packet identifier, and one byte of the properties' length.
        least = 5 if qos else 3
        length = data[at] << 8 | data[at + 1] if at + least <= end else end
        if at + least + length > end:
            raise ProtocolError("packet-too-short", "3.3", "a PUBLISH that ends inside its topic or packet id")
        raw, at = data[at + 2 : at + 2 + length], at + 2 + length
        packet_id = 0
        if qos:
            packet_id = data[at] << 8 | data[at + 1]
            at += 2
            if not packet_id:
                raise packet_id_zero()
        if data[at]:
            found, at = properties.read(data, at, end, "PUBLISH", properties.OF_PUBLISH)
        else:
            found, at = NOTHING, at + 1
        topic = self._topic(raw, found)
        if qos:
            self._unanswered += 1
            if self._unanswered > self._receive_max:
                raise ProtocolError(
                    "receive-maximum",
                    "MQTT-3.3.4-9",
                    f"more than {self._receive_max} messages without an answer; CONNACK's Receive Maximum forbids it",
                )
        payload, dup = data[at:end], first & 0x08 != 0
        if not found.user and not found.forwarded and properties.MESSAGE_EXPIRY_INTERVAL not in found.values:
            return Publish(topic, payload, qos, packet_id, dup)
        return Publish5(topic, payload, qos, packet_id, dup, found.user, found.forwarded, _expiry_s(found))

    def _topic(self, raw: bytes, found: Properties) -> str:
        """The topic of a PUBLISH: its own, or that of its alias (section 3.3.2.3.4)."""
        values = found.values
        if properties.SUBSCRIPTION_IDENTIFIER in values:
            raise ProtocolError(
                "subscription-identifier", "MQTT-3.3.4-6", "a client's PUBLISH with a Subscription Identifier"
            )
        alias = found.number(properties.TOPIC_ALIAS, -1) if values else -1
        if alias < 0:
            if not raw:
                raise ProtocolError("no-topic", "3.3.2.1", "a PUBLISH with neither a topic nor an alias")
            return known_topic_name(raw) if len(raw) <= 128 else topic_name(raw)
        if not 0 < alias <= TOPIC_ALIASES_MAX:
            words = f"topic alias {alias}; the most, by CONNACK's Topic Alias Maximum, is {TOPIC_ALIASES_MAX}"
            raise ProtocolError("topic-alias", "MQTT-3.3.2-8, MQTT-3.3.2-9", words)
        if not raw:
            if alias not in self._aliases:
                raise ProtocolError("no-topic", "3.3.2.3.4", f"topic alias {alias}, which has no topic yet")
            return self._aliases[alias]
        if len(raw) > ALIAS_TOPIC_BYTES_MAX:
            words = f"an alias for a topic of {len(raw)} bytes; the most is {ALIAS_TOPIC_BYTES_MAX}"
            raise ProtocolError("topic-alias-too-long", "ALIAS_TOPIC_BYTES_MAX", words)
        self._aliases[alias] = topic = known_topic_name(raw) if len(raw) <= 128 else topic_name(raw)
        return topic

    def packet(self, first: int, body: bytes) -> Event:
        if first != _CONNECT:
            event = _PARSERS[first](body)
            if isinstance(event, Disconnect) and event.session_expiry_s and not self._keeps_session:
                words = "a DISCONNECT with a Session Expiry Interval, although CONNECT had none"
                raise ProtocolError("bad-session-expiry", "3.14.2.2.2", words)
            return event
        connect, found = _parse_connect(body)
        self._is_connected = True
        self._keeps_session = connect.is_kept
        self._client_packet_bytes_max = found.number(properties.MAXIMUM_PACKET_SIZE, NEVER_EXPIRES)
        self.receives = found.number(properties.RECEIVE_MAXIMUM, 65_535)
        return connect

    def judged(self, violation: Violation) -> Violation:
        """Answer a CONNECT by CONNACK and any other packet by DISCONNECT, each with the reason code (section 4.13)."""
        code = _CODES.get(violation.reason, ReasonCode.MALFORMED_PACKET)
        answer = self.ended(code, violation.message) if self._is_connected else self.refused(code)
        return Violation(violation.reason, violation.rule, violation.message, answer)

    # --- to the client ------------------------------------------------------------------------------------

    def accepted(self, *, session_present: bool, client_id: str | None, session_expiry_s: int | None) -> bytes:
        """CONNACK with what this server takes and what it does not (section 3.2.2.3)."""
        told: list[tuple[int, Value]] = [
            (properties.RECEIVE_MAXIMUM, self._receive_max),
            (properties.RETAIN_AVAILABLE, 0),
            (properties.MAXIMUM_PACKET_SIZE, self._packet_bytes_max),
            (properties.TOPIC_ALIAS_MAXIMUM, TOPIC_ALIASES_MAX),
            (properties.SUBSCRIPTION_IDENTIFIERS_AVAILABLE, 0),
            (properties.SHARED_SUBSCRIPTION_AVAILABLE, 0),
        ]
        if client_id is not None:
            told.append((properties.ASSIGNED_CLIENT_IDENTIFIER, client_id))
        if session_expiry_s is not None:
            told.append((properties.SESSION_EXPIRY_INTERVAL, session_expiry_s))
        return _packet(0x20, bytes((session_present, ReasonCode.SUCCESS)) + properties.encode(told))

    def refused(self, code: ReasonCode) -> bytes:
        return bytes((0x20, 3, 0, code, 0)) if code in CONNACK_CODES else b""

    def ended(self, code: ReasonCode, words: str = "") -> bytes:
        """DISCONNECT (section 3.14); the words are left out if the packet would be too large [MQTT-3.14.2-3]."""
        told = properties.encode([(properties.REASON_STRING, words[:REASON_CHARACTERS_MAX])]) if words else b""
        packet = _packet(0xE0, bytes((code,)) + told)
        return packet if len(packet) <= self._client_packet_bytes_max else _packet(0xE0, bytes((code,)))

    def acknowledgements(self, answers: Sequence[int]) -> bytes:
        """See `Dialect.acknowledgements`. A reason code, shifted by REASON_SHIFT, may be added to an answer.

        Without one an answer succeeded, and is the same packet as in MQTT 3.1.1 (section 3.4.2.1).
        """
        # The client may send as many again (section 4.9). An exchange goes on after a PUBREC that did not fail. An
        # exchange of an earlier connection counted there, so the number must not fall below 0.
        unfinished = sum([answer & _KIND == PUBREC and answer < _FAILED for answer in answers])
        self._unanswered = max(0, self._unanswered - len(answers) + unfinished)
        if not answers or max(answers) < 1 << REASON_SHIFT:
            return acknowledgements(answers)
        return b"".join([_acknowledgement(answer) for answer in answers])

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
        raw = topic.encode()
        told = properties.encode(
            () if expiry_s is None else [(properties.MESSAGE_EXPIRY_INTERVAL, expiry_s)], forwarded
        )
        identifier = packet_id.to_bytes(2, "big") if qos else b""
        packet = _packet(0x30 | dup << 3 | qos << 1, len(raw).to_bytes(2, "big") + raw + identifier + told + payload)
        return packet if len(packet) <= self._client_packet_bytes_max else b""

    def suback(self, packet_id: int, codes: Sequence[int]) -> bytes:
        return _packet(0x90, packet_id.to_bytes(2, "big") + b"\0" + bytes(codes))

    def unsuback(self, packet_id: int, codes: Sequence[int]) -> bytes:
        return _packet(0xB0, packet_id.to_bytes(2, "big") + b"\0" + bytes(codes))


def _packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + encode_remaining_length(len(body)) + body


def _acknowledgement(answer: int) -> bytes:
    code, answer = divmod(answer, 1 << REASON_SHIFT)
    if not code:
        return acknowledgements((answer,))
    # The length is that of the identifier and the code, which has no properties behind it.
    return (0x40030000 + answer).to_bytes(4, "big") + bytes((code,))


def _expiry_s(found: Properties) -> int | None:
    if properties.MESSAGE_EXPIRY_INTERVAL not in found.values:
        return None
    return found.number(properties.MESSAGE_EXPIRY_INTERVAL, 0)


class _Fields5(Fields):
    """Reads a packet's fields one after another, properties too."""

    __slots__ = ()

    def properties(self, allowed: frozenset[int], what: str = "") -> Properties:
        found, self._at = properties.read(self._body, self._at, len(self._body), what or self.packet, allowed)
        return found


def _parse_connect(body: bytes) -> tuple[Connect, Properties]:
    """Parse a CONNECT (section 3.1), whose name and version are known."""
    fields = _Fields5("CONNECT", body)
    fields.next_bytes(7)
    flags = fields.byte()
    keep_alive_s = fields.number()
    check_connect_flags(flags & 0x3F)  # a password needs no user name here (section 3.1.2.9)
    if flags & 0x20:
        raise ProtocolError("retain", "MQTT-3.2.2-13", "a will with RETAIN: nothing is retained here")
    found = fields.properties(properties.OF_CONNECT)
    if properties.AUTHENTICATION_METHOD in found.values:
        words = "an Authentication Method: this server knows user name and password, or a certificate"
        raise ProtocolError("authentication-method", "4.12", words)
    if properties.AUTHENTICATION_DATA in found.values:
        raise ProtocolError("bad-property-value", "3.1.2.11.10", "Authentication Data without an Authentication Method")
    client_id_raw = fields.binary()
    if len(client_id_raw) > CLIENT_ID_BYTES_MAX:
        words = f"a client identifier of {len(client_id_raw)} bytes; the most taken is {CLIENT_ID_BYTES_MAX}"
        raise ProtocolError("client-id-too-long", "MQTT-3.1.3-8", words)
    client_id = decode_text(client_id_raw)
    will = None
    if flags & 0x04:
        of_will = fields.properties(properties.OF_WILL, "will")
        topic = topic_name(fields.binary())
        delay_s = of_will.number(properties.WILL_DELAY_INTERVAL, 0)
        will = Will(topic, fields.binary(), flags >> 3 & 3, delay_s, _expiry_s(of_will), of_will.forwarded)
    user_name = fields.text() if flags & 0x80 else None
    password = fields.binary() if flags & 0x40 else None
    _check_end(fields)
    expiry_s = found.number(properties.SESSION_EXPIRY_INTERVAL, 0)
    return Connect(client_id, flags & 0x02 != 0, keep_alive_s, will, user_name, password, expiry_s), found


def _check_end(fields: _Fields5) -> None:
    if fields.left:
        raise ProtocolError(
            "packet-too-long", "1.2", f"a {fields.packet} with bytes after its last field: {fields.left}"
        )


def _answer(packet: str, body: bytes, codes: frozenset[int]) -> tuple[int, int]:
    """Parse a PUBACK or PUBREL; return packet identifier and reason code (sections 3.4.2 and 3.6.2)."""
    fields = _Fields5(packet, body)
    packet_id = fields.packet_id()
    code = fields.byte() if fields.left else ReasonCode.SUCCESS
    _check_code(packet, code, codes)
    if fields.left:
        fields.properties(properties.OF_ANSWER)
    _check_end(fields)
    return packet_id, code


def _check_code(packet: str, code: int, codes: frozenset[int]) -> None:
    if code not in codes:
        raise ProtocolError("bad-reason-code", "2.4", f"a {packet} with reason code 0x{code:02x}")


def _parse_puback(body: bytes) -> PubAck:
    return PubAck(*_answer("PUBACK", body, PUBACK_CODES))


def _parse_pubrel(body: bytes) -> PubRel:
    packet_id, _ = _answer("PUBREL", body, PUBREL_CODES)
    return PubRel(packet_id)


def _parse_subscribe(body: bytes) -> Subscribe:
    """Parse a SUBSCRIBE (section 3.8). No Local and the retain options change nothing here, and are checked."""
    fields = _Fields5("SUBSCRIBE", body)
    packet_id = fields.packet_id()
    found = fields.properties(properties.OF_SUBSCRIBE)
    if properties.SUBSCRIPTION_IDENTIFIER in found.values:
        raise ProtocolError("subscription-identifier", "3.2.2.3.12", "a SUBSCRIBE with a Subscription Identifier")
    filters = []
    while fields.left:
        topic_filter, options = fields.topic_filter(), fields.byte()
        if topic_filter.startswith("$share/"):
            raise ProtocolError("shared-subscription", "3.2.2.3.13", "a shared subscription")
        if options & 0xC0:
            raise ProtocolError("bad-subscription-options", "MQTT-3.8.3-5", f"options byte 0x{options:02x}")
        if options & 0x03 == 0x03 or options & 0x30 == 0x30:
            raise ProtocolError("bad-requested-qos", "3.8.3.1", f"options byte 0x{options:02x}")
        filters.append((topic_filter, options & 0x03))
    if not filters:
        raise ProtocolError("no-topic-filter", "MQTT-3.8.3-2", "a SUBSCRIBE without a topic filter")
    return Subscribe(packet_id, tuple(filters))


def _parse_unsubscribe(body: bytes) -> Unsubscribe:
    """Parse an UNSUBSCRIBE (section 3.10)."""
    fields = _Fields5("UNSUBSCRIBE", body)
    packet_id = fields.packet_id()
    fields.properties(properties.OF_UNSUBSCRIBE)
    return Unsubscribe(packet_id, tuple(topic_filters(fields)))


def _parse_disconnect(body: bytes) -> Disconnect:
    """Parse a DISCONNECT (section 3.14), whose reason code and properties may be missing."""
    fields = _Fields5("DISCONNECT", body)
    code = fields.byte() if fields.left else ReasonCode.SUCCESS
    _check_code("DISCONNECT", code, DISCONNECT_CODES)
    found = fields.properties(properties.OF_DISCONNECT) if fields.left else NOTHING
    _check_end(fields)
    expiry_s = None
    if properties.SESSION_EXPIRY_INTERVAL in found.values:
        expiry_s = found.number(properties.SESSION_EXPIRY_INTERVAL, 0)
    # By any other code than 0x00 the client does not end as planned, so its will is published (section 3.14.4).
    return Disconnect(code != ReasonCode.SUCCESS, expiry_s)


_PARSERS: Final[dict[int, Callable[[bytes], Event]]] = {
    0x40: _parse_puback,
    0x62: _parse_pubrel,
    0x82: _parse_subscribe,
    0xA2: _parse_unsubscribe,
    0xC0: parse_ping_request,
    0xE0: _parse_disconnect,
}
"""Parsers of packet bodies, by first byte."""
