"""The MQTT packets, without a socket: in one piece, a byte at a time, in any split, and malformed in every way."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.mqtt.protocol import (
    PUBCOMP,
    PUBREC,
    Connect,
    ConnectReturnCode,
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
    acknowledgements,
    connack,
    suback,
    unsuback,
)
from gateway.mqtt.protocol import publish as server_publish

CAP = 1000


def packet(first: int, body: bytes) -> bytes:
    length, encoded = len(body), bytearray()
    while True:
        byte, length = length % 128, length // 128
        encoded.append(byte | (0x80 if length else 0))
        if not length:
            return bytes([first]) + bytes(encoded) + body


def field(raw: bytes) -> bytes:
    return len(raw).to_bytes(2, "big") + raw


def connect(flags: int = 0x02, payload: bytes = field(b"m001"), *, name: bytes = b"MQTT", level: int = 4) -> bytes:
    return packet(0x10, field(name) + bytes([level, flags]) + b"\x00\x3c" + payload)


def publish(first: int, topic: bytes, payload: bytes, packet_id: int | None = None) -> bytes:
    identifier = b"" if packet_id is None else packet_id.to_bytes(2, "big")
    return packet(first, field(topic) + identifier + payload)


def received(data: bytes, cap: int = CAP) -> list[Event]:
    return ServerProtocol(cap).receive(data)


def received_by_the_byte(data: bytes, cap: int = CAP) -> list[Event]:
    protocol = ServerProtocol(cap)
    return [event for byte in data for event in protocol.receive(bytes([byte]))]


SESSION = b"".join(
    (
        connect(
            0xEE,  # user, password, will retain, will QoS 1, will, clean session
            field(b"m001") + field(b"status/m001") + field(b"gone") + field(b"m001") + field(b"\xff\x00secret"),
        ),
        publish(0x30, b"device/m001/thermo", b'{"celsius":21.5}'),
        publish(0x3B, "ger\u00e4t/\ufeffm001/thermo".encode(), b"", 7),
        publish(0x32, b"device/m001/thermo", b"x" * 300, 65535),
        publish(0x34, b"device/m001/thermo", b"twice", 8),
        publish(0x3D, b"device/m001/thermo", b"twice", 8),
        packet(0x62, b"\x00\x08"),
        packet(0x40, b"\x01\x00"),
        packet(0x82, b"\x00\x05" + field(b"command/+/#") + b"\x01" + field(b"#") + b"\x02"),
        packet(0xA2, b"\x00\x06" + field(b"command/+/#")),
        packet(0xC0, b""),
        packet(0xE0, b""),
        b"whatever comes after DISCONNECT",
    )
)

SESSION_EVENTS: list[Event] = [
    Connect("m001", True, 60, Will("status/m001", b"gone", 1), "m001", b"\xff\x00secret"),
    Publish("device/m001/thermo", b'{"celsius":21.5}', 0, 0, False),
    Publish("ger\u00e4t/\ufeffm001/thermo", b"", 1, 7, True),
    Publish("device/m001/thermo", b"x" * 300, 1, 65535, False),
    Publish("device/m001/thermo", b"twice", 2, 8, False),
    Publish("device/m001/thermo", b"twice", 2, 8, True),
    PubRel(8),
    PubAck(256),
    Subscribe(5, (("command/+/#", 1), ("#", 2))),
    Unsubscribe(6, ("command/+/#",)),
    PingRequest(),
    Disconnect(),
]


def test_a_whole_session_in_one_piece() -> None:
    assert received(SESSION) == SESSION_EVENTS


def test_a_whole_session_a_byte_at_a_time() -> None:
    assert received_by_the_byte(SESSION) == SESSION_EVENTS


@given(st.data())
def test_a_session_in_any_split(data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(SESSION)), max_size=12).map(sorted))
    protocol = ServerProtocol(CAP)
    events = []
    for start, end in zip([0, *cuts], [*cuts, len(SESSION)], strict=True):
        events += protocol.receive(SESSION[start:end])
    assert events == SESSION_EVENTS


def test_a_connect_with_the_least() -> None:
    assert received(connect(0x02, field(b""))) == [Connect("", True, 60, None, None, None)]


CONNECTED = connect()
MALFORMED = {
    "first-packet-not-connect": [packet(0xC0, b""), publish(0x30, b"t", b""), b"GETTING", b"P\x02\x00\x01"],
    "http-on-mqtt-port": [
        b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n",
        b"GET /mqtt HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n",
        *(method + b" / HTTP/1.1\r\n" for method in (b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH")),
        b"CONNECT example.org:443 HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    "tls-on-plain-port": [b"\x16\x03\x01"],
    "second-connect": [CONNECTED + CONNECTED],
    "reserved-packet-type": [CONNECTED + b"\x00", CONNECTED + b"\xf0"],
    "unexpected-packet": [CONNECTED + bytes([kind]) for kind in (0x20, 0x50, 0x70, 0x90, 0xB0, 0xD0)],
    "reserved-flags": [
        b"\x11",
        CONNECTED + b"\x41",
        CONNECTED + b"\x60",
        CONNECTED + b"\x80",
        CONNECTED + b"\xa0",
        CONNECTED + b"\xc1",
        CONNECTED + b"\xe8",
    ],
    "remaining-length-too-long": [b"\x10\xff\xff\xff\xff", CONNECTED + b"\x30\x80\x80\x80\x80\x01"],
    "connect-too-large": [b"\x10\xff\xff\xff\x7f", b"\x10\x80\x40"],
    "packet-too-large": [
        b"\x10\xfd\x3f",
        CONNECTED + publish(0x30, b"t", b"x" * CAP),
        CONNECTED + b"\x30" + b"\xe9\x07",  # 3 + 1001 bytes to come
    ],
    "packet-too-short": [
        packet(0x10, b""),
        packet(0x10, b"\x00\x09MQTT"),
        connect(0x82),
        connect(0x06, field(b"m001") + field(b"topic")),
        CONNECTED + packet(0x30, b""),
        CONNECTED + packet(0x30, b"\x00"),
        CONNECTED + packet(0x30, b"\x00\x05abcd"),
        CONNECTED + packet(0x32, b"\x00\x01t\x00"),
        CONNECTED + packet(0x3C, b"\x00\x01t\x00"),
        CONNECTED + packet(0x62, b"\x00"),
        CONNECTED + packet(0x40, b""),
        CONNECTED + packet(0x82, b"\x00\x05" + field(b"a")),
        CONNECTED + packet(0xA2, b"\x00"),
    ],
    "packet-too-long": [
        connect(payload=field(b"m001") + b"\x00"),
        CONNECTED + packet(0x62, b"\x00\x01\x00"),
        CONNECTED + packet(0x40, b"\x00\x01\x00"),
        CONNECTED + packet(0xC0, b"\x00"),
        CONNECTED + packet(0xE0, b"\x00"),
    ],
    "bad-utf8": [
        connect(payload=field(b"\xff")),
        connect(0x82, field(b"m001") + field(b"\xc0\x80")),
        CONNECTED + publish(0x30, b"t/\xed\xa0\x80", b""),  # a surrogate
        CONNECTED + packet(0x82, b"\x00\x05" + field(b"\xfe") + b"\x00"),
    ],
    "null-character": [connect(payload=field(b"m\x00")), CONNECTED + publish(0x30, b"a\x00b", b"")],
    "empty-topic": [
        CONNECTED + publish(0x32, b"", b"x", 1),
        CONNECTED + packet(0x82, b"\x00\x05" + field(b"") + b"\x00"),
        connect(0x06, field(b"m001") + field(b"") + field(b"")),
    ],
    "wildcard-in-topic-name": [
        CONNECTED + publish(0x30, b"device/+/thermo", b""),
        CONNECTED + publish(0x30, b"device/#", b""),
        connect(0x06, field(b"m001") + field(b"status/#") + field(b"")),
    ],
    "packet-id-zero": [
        CONNECTED + publish(0x32, b"t", b"x", 0),
        CONNECTED + publish(0x34, b"t", b"x", 0),
        CONNECTED + packet(0x62, b"\x00\x00"),
        CONNECTED + packet(0x40, b"\x00\x00"),
        CONNECTED + packet(0x82, b"\x00\x00" + field(b"a") + b"\x00"),
        CONNECTED + packet(0xA2, b"\x00\x00" + field(b"a")),
    ],
    "qos-3": [CONNECTED + b"\x36", CONNECTED + b"\x3e"],
    "dup-with-qos-0": [CONNECTED + publish(0x38, b"t", b"x")],
    "bad-protocol-name": [connect(name=b"AMQP"), connect(name=b"")],
    "reserved-connect-flag": [connect(0x03)],
    "bad-will-flags": [connect(0x0A), connect(0x22), connect(0x1E)],
    "password-without-user-name": [connect(0x42, field(b"m001") + field(b"p"))],
    "bad-topic-filter": [
        CONNECTED + packet(0x82, b"\x00\x05" + field(raw) + b"\x00") for raw in (b"a/#/b", b"a#", b"a+", b"+a/b")
    ],
    "bad-requested-qos": [CONNECTED + packet(0x82, b"\x00\x05" + field(b"a") + bytes([qos])) for qos in (3, 0x80)],
    "no-topic-filter": [CONNECTED + packet(0x82, b"\x00\x05"), CONNECTED + packet(0xA2, b"\x00\x05")],
    "unsupported-protocol-level": [connect(level=3), connect(level=5), connect(name=b"MQIsdp", level=3)],
    "mosquitto-bridge-level": [connect(level=132), connect(level=133), connect(name=b"MQIsdp", level=131)],
    "empty-client-id": [connect(0x00, field(b""))],
    "client-id-too-long": [connect(payload=field(b"m" * 257))],
}


@pytest.mark.parametrize(("reason", "data"), [(reason, data) for reason, many in MALFORMED.items() for data in many])
def test_each_rule_that_is_broken_has_its_own_reason(reason: str, data: bytes) -> None:
    *before, last = received(data)
    assert isinstance(last, Violation)
    assert last.reason == reason
    assert last.rule
    assert last.message
    if reason == "packet-too-large":
        assert f"mqtt_listener.packet_bytes_max = {CAP}" in last.message, "the setting to change is named"
    assert all(isinstance(event, Connect) for event in before)
    assert received_by_the_byte(data) == [*before, last]


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (connect(level=3), b"\x20\x02\x00\x01"),
        (connect(name=b"MQIsdp", level=3), b"\x20\x02\x00\x01"),
        (connect(level=6), b"\x20\x02\x00\x01"),
        (connect(level=5, payload=b"\x00" + field(b"m001")), b"\x20\x02\x00\x01"),
        (connect(level=0), b"\x20\x02\x00\x01"),
        (connect(level=132), b"\x20\x02\x00\x01"),
        (connect(name=b"MQIsdp", level=131), b"\x20\x02\x00\x01"),
        (connect(0x00, field(b"")), b"\x20\x02\x00\x02"),
        (connect(payload=field(b"m" * 257)), b"\x20\x02\x00\x02"),
        (connect(0x03), b""),
    ],
)
def test_what_a_refused_connect_is_told(data: bytes, answer: bytes) -> None:
    (violation,) = received(data)
    assert isinstance(violation, Violation)
    assert violation.answer == answer


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (connect(level=6), ["level 6", "MQTT 3.1.1 and 5", "set the client to one of them"]),
        (connect(name=b"MQIsdp", level=3), ["(MQTT 3.1)", "levels 4 and 5"]),
        (connect(level=132), ["mosquitto bridge", "level 4;", "try_private false"]),
        (connect(level=132 + 1), ["mosquitto bridge", "level 5;", "try_private false"]),
        (connect(name=b"MQIsdp", level=131), ["mosquitto bridge", "level 3;"]),
        (b"GET / HTTP/1.1\r\n", ["somebody speaks HTTP to the MQTT port", "WebSocket", "mqtt://"]),
        (b"\x16\x03\x01", ["TLS", "mqtt_listener.tls.port"]),
    ],
)
def test_whoever_speaks_something_else_is_called_what_it_is(data: bytes, words: list[str]) -> None:
    (violation,) = received(data)
    assert isinstance(violation, Violation)
    assert [each for each in words if each not in violation.message] == []


def test_packets_before_a_violation_are_kept_and_those_after_it_are_not() -> None:
    good = publish(0x32, b"t", b"21.5", 1)
    protocol = ServerProtocol(CAP)
    events = protocol.receive(CONNECTED + good + publish(0x32, b"t/#", b"", 2) + good)
    assert [type(event) for event in events] == [Connect, Publish, Violation]
    assert protocol.receive(good) == []


def test_a_packet_as_large_as_the_cap_is_taken_in_small_pieces() -> None:
    data = publish(0x30, b"t", b"x" * (CAP - 6))
    assert len(data) == CAP
    assert received_by_the_byte(CONNECTED + data)[1:] == [Publish("t", b"x" * (CAP - 6), 0, 0, False)]


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


near_mqtt = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([SESSION, CONNECTED, *(data for many in MALFORMED.values() for data in many)]),
    st.builds(
        packet,
        st.integers(0, 255),
        st.builds(lambda name, rest: field(name) + rest, st.binary(max_size=8), st.binary(max_size=30)),
    ),
)


@given(st.booleans(), st.lists(near_mqtt, max_size=6).map(b"".join), st.lists(st.integers(0, 400), max_size=20))
def test_any_bytes_in_any_split_give_what_the_whole_gives(connected: bool, data: bytes, cuts: list[int]) -> None:  # noqa: FBT001
    data = CONNECTED + data if connected else data
    whole = received(data)
    protocol = ServerProtocol(CAP)
    assert [event for piece in pieces(data, cuts) for event in protocol.receive(piece)] == whole
    assert not any(isinstance(event, Violation) for event in whole[:-1])


topics = st.text(st.characters(exclude_characters="\0+#", exclude_categories=["Cs"]), min_size=1, max_size=200)


@given(
    st.lists(
        st.tuples(
            topics, st.binary(max_size=200), st.integers(0, 2), st.integers(1, 65535), st.booleans(), st.booleans()
        )
    )
)
def test_what_a_client_publishes_is_what_comes_out(
    publishes: list[tuple[str, bytes, int, int, bool, bool]],
) -> None:
    data, expected = CONNECTED, []
    for topic, payload, qos, packet_id, dup, retain in publishes:
        dup_sent = dup and qos > 0
        first = 0x30 | qos << 1 | (0x08 if dup_sent else 0) | (0x01 if retain else 0)
        data += publish(first, topic.encode(), payload, packet_id if qos else None)
        expected.append(Publish(topic, payload, qos, packet_id if qos else 0, dup_sent))
    assert received(data, 2000)[1:] == expected


def test_what_the_server_sends() -> None:
    assert connack(ConnectReturnCode.SERVER_UNAVAILABLE) == b"\x20\x02\x00\x03"
    assert connack(ConnectReturnCode.ACCEPTED, session_present=True) == b"\x20\x02\x01\x00"
    assert acknowledgements([1, PUBREC | 2, 65535, PUBCOMP | 3]) == (
        b"\x40\x02\x00\x01\x50\x02\x00\x02\x40\x02\xff\xff\x70\x02\x00\x03"
    )
    assert acknowledgements([]) == b""
    assert suback(5, [0, 1, 0x80]) == b"\x90\x05\x00\x05\x00\x01\x80"
    assert suback(5, [0x80] * 200) == b"\x90\xca\x01\x00\x05" + b"\x80" * 200
    assert unsuback(6) == b"\xb0\x02\x00\x06"


@given(topics, st.binary(max_size=300), st.integers(0, 1), st.integers(1, 65535), st.booleans())
def test_what_the_server_publishes_is_a_publish(
    topic: str,
    payload: bytes,
    qos: int,
    packet_id: int,
    dup: bool,  # noqa: FBT001
) -> None:
    dup, packet_id = dup and qos > 0, packet_id if qos else 0
    sent = server_publish(topic, payload, qos, packet_id, dup=dup)
    assert received(CONNECTED + sent, 2000)[1:] == [Publish(topic, payload, qos, packet_id, dup)]
