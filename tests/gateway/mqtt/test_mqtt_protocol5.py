"""MQTT 5 without a socket: what paho writes is read, paho reads what is written, and each broken rule has its code."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt import _packet as paho
from paho.mqtt.client import MQTTv5
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode as PahoReason
from paho.mqtt.subscribeoptions import SubscribeOptions

from gateway.mqtt import properties
from gateway.mqtt.properties import NOTHING, Properties, encode
from gateway.mqtt.protocol import (
    PUBCOMP,
    PUBREC,
    Connect,
    Disconnect,
    Event,
    PingRequest,
    PubAck,
    Publish,
    PubRel,
    ServerProtocol,
    Subscribe,
    Unsubscribe,
    Violation,
    Will,
)
from gateway.mqtt.protocol5 import (
    ALIAS_TOPIC_BYTES_MAX,
    REASON_SHIFT,
    TOPIC_ALIASES_MAX,
    Publish5,
    Version5,
)
from gateway.mqtt.reason_codes import ReasonCode
from tests.support.mqtt5 import TEXTS, TOPICS, PahoPackets, cut, from_paho, in_paho, paho_properties, properties_of

CAP = 1_000
RECEIVE_MAX = 8


def server() -> ServerProtocol:
    return ServerProtocol(CAP, lambda: Version5(RECEIVE_MAX, CAP))


def received(data: bytes) -> list[Event]:
    return server().receive(data)


def packet(first: int, body: bytes) -> bytes:
    length = bytes((len(body),)) if len(body) < 0x80 else bytes((len(body) & 0x7F | 0x80, len(body) >> 7))
    return bytes((first,)) + length + body


def field(raw: bytes) -> bytes:
    return len(raw).to_bytes(2, "big") + raw


def connect(flags: int = 0x02, told: bytes = b"\x00", payload: bytes = field(b"m001")) -> bytes:
    return packet(0x10, field(b"MQTT") + bytes((5, flags)) + b"\x00\x3c" + told + payload)


def publish(first: int, topic: bytes, payload: bytes = b"x", packet_id: int = 1, told: bytes = b"\x00") -> bytes:
    identifier = packet_id.to_bytes(2, "big") if first & 0x06 else b""
    return packet(first, field(topic) + identifier + told + payload)


def aliased(alias: int, topic: bytes = b"", first: int = 0x30) -> bytes:
    return publish(first, topic, told=b"\x03\x23" + alias.to_bytes(2, "big"))


CONNECTED = connect()

# --- what paho writes -------------------------------------------------------------------------------------


@given(
    told=properties_of(properties.OF_CONNECT - {properties.AUTHENTICATION_METHOD, properties.AUTHENTICATION_DATA}),
    of_will=properties_of(properties.OF_WILL),
    clean=st.sampled_from(["clean start", "session"]),
    login=st.one_of(st.none(), st.tuples(TEXTS, st.one_of(st.none(), TEXTS))),
    topic=st.one_of(st.none(), TOPICS),
)
def test_a_connect_of_paho(
    told: Properties, of_will: Properties, clean: str, login: tuple[str, str | None] | None, topic: str | None
) -> None:
    client, is_clean = PahoPackets(), clean == "clean start"
    client._clean_start = is_clean
    client._connect_properties = in_paho(PacketTypes.CONNECT, told)
    if login is not None:
        client.username_pw_set(*login)
    if topic is not None:
        client.will_set(topic, b"gone", 1, properties=in_paho(PacketTypes.WILLMESSAGE, of_will))
    client._send_connect(60)
    user, password = (None, None) if login is None else login
    will = None
    if topic is not None:
        delay_s = of_will.number(properties.WILL_DELAY_INTERVAL, 0)
        will = Will(topic, b"gone", 1, delay_s, expiry_of(of_will), forwarded_by(of_will))
    expected = Connect(
        "m001",
        is_clean,
        60,
        will,
        user,
        None if password is None else password.encode(),
        told.number(properties.SESSION_EXPIRY_INTERVAL, 0),
    )
    if len(client.packets[0]) <= CAP:
        assert received(client.packets[0]) == [expected]


def expiry_of(told: Properties) -> int | None:
    value = told.values.get(properties.MESSAGE_EXPIRY_INTERVAL)
    assert value is None or isinstance(value, int)
    return value


def forwarded_by(told: Properties) -> bytes:
    """The properties that go along with a message, in the order in which paho writes them."""
    along = told.values.keys() - {
        properties.MESSAGE_EXPIRY_INTERVAL,
        properties.WILL_DELAY_INTERVAL,
        properties.TOPIC_ALIAS,
    }
    kept = Properties({number: told.values[number] for number in along}, told.user)
    packed: bytes = in_paho(PacketTypes.PUBLISH, kept).pack()
    return packed[1 if len(packed) <= 0x80 else 2 :]


@given(
    told=properties_of(properties.OF_PUBLISH - {properties.TOPIC_ALIAS, properties.SUBSCRIPTION_IDENTIFIER}),
    topic=TOPICS,
    payload=st.binary(max_size=200),
    qos=st.integers(0, 2),
    tries=st.integers(1, 2),
)
def test_a_publish_of_paho(told: Properties, topic: str, payload: bytes, qos: int, tries: int) -> None:
    client, packet_id = PahoPackets(), 7 if qos else 0
    is_again = tries > 1 and qos > 0
    written = in_paho(PacketTypes.PUBLISH, told)
    client._send_publish(packet_id, topic.encode(), payload, qos, False, is_again, None, written)
    (data,) = client.packets
    plain = Publish(topic, payload, qos, packet_id, is_again)
    if told == NOTHING:
        expected = plain
    else:
        expected = Publish5(topic, payload, qos, packet_id, is_again, told.user, forwarded_by(told), expiry_of(told))
    if len(data) <= CAP:
        assert received(CONNECTED + data)[1:] == [expected]


def session_of_paho() -> tuple[bytes, list[Event]]:
    """Each kind of packet, and what is to be read from them."""
    client = PahoPackets()
    user = paho_properties(PacketTypes.SUBSCRIBE)
    user.UserProperty = ("why", "because")
    ended = paho_properties(PacketTypes.DISCONNECT)
    ended.SessionExpiryInterval = 5
    filters = [
        (b"command/m001/#", SubscribeOptions(1, noLocal=True, retainAsPublished=True, retainHandling=2)),
        (b"a/+", SubscribeOptions(2)),
    ]
    client._connect_properties = paho_properties(PacketTypes.CONNECT)
    client._connect_properties.SessionExpiryInterval = 60
    client._send_connect(60)
    client._send_publish(1, b"device/m001/thermo", b"21.5", 1)
    client._send_publish(2, b"device/m001/thermo", b"21.6", 2)
    client._send_pubrel(2)
    client._send_puback(3)
    client._send_subscribe(0, filters, user)
    client._send_unsubscribe(0, [b"a/+", b"b"])
    client._send_pingreq()
    client._send_disconnect(PahoReason(PacketTypes.DISCONNECT, identifier=4), ended)
    events: list[Event] = [
        Connect("m001", True, 60, None, None, None, 60),
        Publish("device/m001/thermo", b"21.5", 1, 1, False),
        Publish("device/m001/thermo", b"21.6", 2, 2, False),
        PubRel(2),
        PubAck(3),
        Subscribe(1, (("command/m001/#", 1), ("a/+", 2))),
        Unsubscribe(2, ("a/+", "b")),
        PingRequest(),
        Disconnect(True, 5),
    ]
    return b"".join(client.packets) + b"whatever comes after DISCONNECT", events


SESSION, SESSION_EVENTS = session_of_paho()


def test_a_whole_session_in_one_piece() -> None:
    assert received(SESSION) == SESSION_EVENTS


@given(st.lists(st.integers(0, len(SESSION)), max_size=12).map(sorted))
def test_a_whole_session_in_any_split(cuts: list[int]) -> None:
    protocol = server()
    events = [
        event for start, end in pairwise([0, *cuts, len(SESSION)]) for event in protocol.receive(SESSION[start:end])
    ]
    assert events == SESSION_EVENTS


@pytest.mark.parametrize(
    ("data", "event"),
    [
        (packet(0xE0, b""), Disconnect()),
        (packet(0xE0, b"\x00"), Disconnect()),
        (packet(0xE0, b"\x98\x00"), Disconnect(is_with_will=True)),
        (packet(0x40, b"\x00\x03\x97"), PubAck(3, ReasonCode.QUOTA_EXCEEDED)),
        (packet(0x40, b"\x00\x03\x10\x04\x1f\x00\x01a"), PubAck(3, ReasonCode.NO_MATCHING_SUBSCRIBERS)),
        (packet(0x62, b"\x00\x03\x92\x00"), PubRel(3)),
    ],
)
def test_reason_codes_and_properties_at_the_end_may_be_missing(data: bytes, event: Event) -> None:
    assert received(CONNECTED + data)[1:] == [event]


# --- topic aliases and Receive Maximum --------------------------------------------------------------------


def test_an_alias_stands_for_the_topic_that_it_came_with_last() -> None:
    stream = [aliased(1, b"a"), aliased(2, b"b"), aliased(1), aliased(2), aliased(1, b"c"), aliased(1), aliased(2)]
    events = received(CONNECTED + b"".join(stream))[1:]
    assert [event.topic for event in events if isinstance(event, Publish)] == ["a", "b", "a", "b", "c", "c", "b"]
    assert {type(event) for event in events} == {Publish}, "an alias alone makes no message with properties"


def test_aliases_end_with_the_connection() -> None:
    assert isinstance(received(CONNECTED + aliased(1, b"a"))[-1], Publish)
    assert told_by(received(CONNECTED + aliased(1))) == ("no-topic", ReasonCode.PROTOCOL_ERROR)


@given(st.lists(st.sampled_from(["publish 1", "publish 2", "puback", "pubrec", "pubcomp", "refused"]), max_size=60))
def test_the_client_may_have_as_many_messages_unanswered_as_receive_maximum_says(steps: list[str]) -> None:
    """A model counts by the rules of section 4.9."""
    protocol = server()
    protocol.receive(CONNECTED)
    dialect, unanswered = protocol.dialect, 0
    answers = {"puback": 1, "pubrec": PUBREC | 1, "pubcomp": PUBCOMP | 1}
    answers["refused"] = PUBREC | 1 | ReasonCode.QUOTA_EXCEEDED << REASON_SHIFT
    for step in steps:
        if step in answers:
            dialect.acknowledgements([answers[step]])
            unanswered = max(0, unanswered - (step != "pubrec"))
            continue
        unanswered += 1
        (event,) = protocol.receive(publish(0x32 if step == "publish 1" else 0x34, b"t"))
        if unanswered > RECEIVE_MAX:
            assert told_by([event]) == ("receive-maximum", ReasonCode.RECEIVE_MAXIMUM_EXCEEDED)
            return
        assert isinstance(event, Publish)


# --- broken rules -----------------------------------------------------------------------------------------


def told_by(events: list[Event]) -> tuple[str, int]:
    """Reason of the violation at the end, and reason code of the DISCONNECT or CONNACK that answers it."""
    violation = events[-1]
    assert isinstance(violation, Violation)
    ((first, body),) = cut(violation.answer)
    if first == 0x20:
        connack = paho.decode_connack(first, body, MQTTv5)
        assert connack.flags == 0
        return violation.reason, connack.reason.value
    assert first == 0xE0
    disconnect = paho.decode_disconnect(first, body, MQTTv5)
    assert from_paho(disconnect.properties).values == {properties.REASON_STRING: violation.message[:200]}
    assert disconnect.reason is not None
    return violation.reason, disconnect.reason.value


MALFORMED = {
    ("packet-too-short", 0x81): [
        connect(told=b"\x05\x11\x00\x00\x00", payload=b""),
        connect(0x04, payload=field(b"m001") + b"\x00" + field(b"topic")),
        CONNECTED + packet(0x30, b""),
        CONNECTED + packet(0x30, b"\x00\x01t"),
        CONNECTED + packet(0x32, b"\x00\x01t\x00\x01"),
        CONNECTED + packet(0x32, b"\x00\x05t\x00\x01\x00"),
        CONNECTED + packet(0x30, b"\x00\x01t\x05\x00"),
        CONNECTED + packet(0x62, b"\x00"),
        CONNECTED + packet(0x82, b"\x00\x05"),
        CONNECTED + packet(0x82, b"\x00\x05\x00" + field(b"a")),
        CONNECTED + packet(0xA2, b"\x00\x05"),
    ],
    ("packet-too-long", 0x81): [
        connect(payload=field(b"m001") + b"\x00"),
        CONNECTED + packet(0x62, b"\x00\x01\x00\x00\x00"),
        CONNECTED + packet(0xC0, b"\x00"),
        CONNECTED + packet(0xE0, b"\x00\x00\x00"),
    ],
    ("bad-property", 0x81): [
        connect(told=b"\x03\x23\x00\x01"),
        CONNECTED + publish(0x30, b"t", told=b"\x05\x11\x00\x00\x00\x01"),
        CONNECTED + packet(0xE0, b"\x00\x04\x1c\x00\x01a"),
    ],
    ("property-twice", 0x82): [connect(told=b"\x06\x21\x00\x01\x21\x00\x01")],
    ("bad-property-value", 0x82): [
        connect(told=b"\x03\x21\x00\x00"),
        connect(told=b"\x05\x27\x00\x00\x00\x00"),
        connect(told=b"\x04\x16\x00\x01a"),
    ],
    ("authentication-method", 0x8C): [connect(told=b"\x04\x15\x00\x01a")],
    ("auth", 0x82): [CONNECTED + b"\xf0"],
    ("retain", 0x9A): [
        connect(0x26, payload=field(b"m001") + b"\x00" + field(b"t") + field(b"gone")),
        CONNECTED + b"\x31",
        CONNECTED + b"\x33",
        CONNECTED + b"\x3d",
    ],
    ("bad-will-flags", 0x81): [connect(0x0A), connect(0x22), connect(0x1E)],
    ("reserved-connect-flag", 0x81): [connect(0x03)],
    ("client-id-too-long", 0x85): [connect(payload=field(b"m" * 257))],
    ("bad-utf8", 0x81): [connect(payload=field(b"\xff")), CONNECTED + publish(0x30, b"\xff")],
    ("wildcard-in-topic-name", 0x90): [
        CONNECTED + publish(0x30, b"a/+"),
        connect(0x06, payload=field(b"m001") + b"\x00" + field(b"a/#") + field(b"gone")),
    ],
    ("no-topic", 0x82): [CONNECTED + publish(0x30, b""), CONNECTED + aliased(1)],
    ("topic-alias", 0x94): [CONNECTED + aliased(0, b"t"), CONNECTED + aliased(TOPIC_ALIASES_MAX + 1, b"t")],
    ("topic-alias-too-long", 0x97): [CONNECTED + aliased(1, b"t" * (ALIAS_TOPIC_BYTES_MAX + 1))],
    ("too-many-user-properties", 0x97): [
        CONNECTED + publish(0x30, b"t", told=b"\xa5\x01" + b"\x26\x00\x00\x00\x00" * 33)
    ],
    ("subscription-identifier", 0xA1): [
        CONNECTED + packet(0x82, b"\x00\x05\x02\x0b\x01" + field(b"a") + b"\x00"),
        CONNECTED + publish(0x30, b"t", told=b"\x02\x0b\x01"),
    ],
    ("shared-subscription", 0x9E): [CONNECTED + packet(0x82, b"\x00\x05\x00" + field(b"$share/a/b") + b"\x00")],
    ("bad-subscription-options", 0x81): [CONNECTED + packet(0x82, b"\x00\x05\x00" + field(b"a") + b"\x40")],
    ("bad-requested-qos", 0x82): [
        CONNECTED + packet(0x82, b"\x00\x05\x00" + field(b"a") + bytes((options,))) for options in (0x03, 0x30)
    ],
    ("bad-topic-filter", 0x8F): [CONNECTED + packet(0x82, b"\x00\x05\x00" + field(b"a#") + b"\x00")],
    ("no-topic-filter", 0x82): [CONNECTED + packet(0x82, b"\x00\x05\x00"), CONNECTED + packet(0xA2, b"\x00\x05\x00")],
    ("bad-reason-code", 0x82): [
        CONNECTED + packet(0x40, b"\x00\x01\x01"),
        CONNECTED + packet(0x62, b"\x00\x01\x10"),
        CONNECTED + packet(0xE0, b"\x8b"),
    ],
    ("bad-session-expiry", 0x82): [CONNECTED + packet(0xE0, b"\x00\x05\x11\x00\x00\x00\x05")],
    ("packet-id-zero", 0x82): [
        CONNECTED + publish(0x32, b"t", packet_id=0),
        CONNECTED + packet(0x40, b"\x00\x00"),
        CONNECTED + packet(0x82, b"\x00\x00\x00" + field(b"a") + b"\x00"),
    ],
    ("dup-with-qos-0", 0x82): [CONNECTED + b"\x38"],
    ("qos-3", 0x81): [CONNECTED + b"\x36"],
    ("second-connect", 0x82): [CONNECTED + CONNECTED],
    ("reserved-packet-type", 0x81): [CONNECTED + b"\x00", CONNECTED + b"\xf1"],
    ("reserved-flags", 0x81): [CONNECTED + b"\x60", CONNECTED + b"\x80"],
    ("unexpected-packet", 0x82): [CONNECTED + bytes((kind,)) for kind in (0x20, 0x50, 0x70, 0x90, 0xB0, 0xD0)],
    ("remaining-length-too-long", 0x81): [CONNECTED + b"\x30\x80\x80\x80\x80\x01"],
    ("packet-too-large", 0x95): [CONNECTED + publish(0x30, b"t", b"x" * CAP), CONNECTED + b"\x30\xe9\x07"],
}


@pytest.mark.parametrize(("told", "data"), [(told, data) for told, many in MALFORMED.items() for data in many])
def test_each_rule_that_is_broken_has_its_reason_code(told: tuple[str, int], data: bytes) -> None:
    whole = received(data)
    assert told_by(whole) == told
    assert all(isinstance(event, Connect) for event in whole[:-1])
    protocol = server()
    assert [event for byte in data for event in protocol.receive(bytes((byte,)))] == whole


def test_a_reason_string_is_left_out_if_the_client_takes_no_packet_of_this_size() -> None:
    _, violation = received(connect(told=b"\x05\x27\x00\x00\x00\x0a") + b"\x30\x80\x80\x80\x80\x01")
    assert isinstance(violation, Violation)
    assert violation.answer == b"\xe0\x01\x81"


def test_without_a_newer_dialect_version_5_is_refused_as_any_other_version() -> None:
    (violation,) = ServerProtocol(CAP).receive(CONNECTED)
    assert isinstance(violation, Violation)
    assert (violation.reason, violation.answer) == ("unsupported-protocol-level", b"\x20\x02\x00\x01")


# --- what paho reads --------------------------------------------------------------------------------------


def test_connack_tells_what_this_server_takes() -> None:
    dialect = Version5(100, 2_000)
    ((first, body),) = cut(dialect.accepted(session_present=True, client_id="made", session_expiry_s=60))
    connack = paho.decode_connack(first, body, MQTTv5)
    assert (connack.flags, connack.reason.value) == (1, 0)
    assert from_paho(connack.properties).values == {
        properties.SESSION_EXPIRY_INTERVAL: 60,
        properties.ASSIGNED_CLIENT_IDENTIFIER: "made",
        properties.RECEIVE_MAXIMUM: 100,
        properties.TOPIC_ALIAS_MAXIMUM: TOPIC_ALIASES_MAX,
        properties.RETAIN_AVAILABLE: 0,
        properties.MAXIMUM_PACKET_SIZE: 2_000,
        properties.SUBSCRIPTION_IDENTIFIERS_AVAILABLE: 0,
        properties.SHARED_SUBSCRIPTION_AVAILABLE: 0,
    }
    ((first, body),) = cut(dialect.refused(ReasonCode.SERVER_BUSY))
    assert paho.decode_connack(first, body, MQTTv5).reason == "Server busy"


def test_acknowledgements_with_and_without_a_reason_code() -> None:
    dialect = Version5(100, CAP)
    codes = [0, ReasonCode.NO_MATCHING_SUBSCRIBERS, ReasonCode.QUOTA_EXCEEDED]
    kinds = {0x40: (0, paho.decode_puback), 0x50: (PUBREC, paho.decode_pubrec)}
    answers = [kind | 7 | code << REASON_SHIFT for kind, _ in kinds.values() for code in codes]
    found: list[tuple[int, int, int]] = []
    for first, body in cut(dialect.acknowledgements([*answers, PUBCOMP | 8])):
        decode: Any = kinds[first][1] if first in kinds else paho.decode_pubcomp
        answer = decode(first, body, MQTTv5)
        found.append((first, answer.mid, answer.reason.value))
    assert found == [(first, 7, code) for first in kinds for code in codes] + [(0x70, 8, 0)]
    assert dialect.acknowledgements([1, PUBREC | 2, PUBCOMP | 3]) == (
        b"\x40\x02\x00\x01" + b"\x50\x02\x00\x02" + b"\x70\x02\x00\x03"
    ), "without reason codes, they are those of MQTT 3.1.1"


def test_suback_and_unsuback() -> None:
    dialect = Version5(100, CAP)
    ((first, body),) = cut(dialect.suback(5, [0, 1, ReasonCode.NOT_AUTHORIZED]))
    suback = paho.decode_suback(first, body, MQTTv5)
    assert (suback.mid, [code.value for code in suback.reason_codes]) == (5, [0, 1, 0x87])
    ((first, body),) = cut(dialect.unsuback(6, [0, ReasonCode.NO_SUBSCRIPTION_EXISTED]))
    unsuback = paho.decode_unsuback(first, body, MQTTv5)
    assert (unsuback.mid, [code.value for code in unsuback.reason_codes]) == (6, [0, 0x11])


@given(
    told=properties_of(properties.OF_PUBLISH - {properties.TOPIC_ALIAS, properties.SUBSCRIPTION_IDENTIFIER}),
    topic=TOPICS,
    payload=st.binary(max_size=200),
    qos=st.integers(0, 1),
    tries=st.integers(1, 2),
)
def test_paho_reads_a_message_with_all_that_goes_along(
    told: Properties, topic: str, payload: bytes, qos: int, tries: int
) -> None:
    dup = tries > 1
    sent = Version5(100, CAP).publish(
        topic, payload, qos, 9, dup=dup, forwarded=forwarded_by(told), expiry_s=expiry_of(told)
    )
    ((first, body),) = cut(sent)
    message = paho.decode_publish(first, body, MQTTv5)
    assert (message.topic.decode(), bytes(message.payload), message.qos, message.dup) == (topic, payload, qos, dup)
    assert message.properties is not None
    assert from_paho(message.properties) == told


def test_a_message_is_not_made_if_the_client_takes_no_packet_of_this_size() -> None:
    protocol = server()
    protocol.receive(connect(told=encode([(properties.MAXIMUM_PACKET_SIZE, 20)])))
    publish_of = protocol.dialect.publish
    assert len(publish_of("t", b"x" * 12, 1, 9, dup=False)) == 20
    assert publish_of("t", b"x" * 13, 1, 9, dup=False) == b""
