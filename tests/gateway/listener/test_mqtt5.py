"""MQTT 5 at the listener, by clients that send bare bytes: answers, sessions, wills, commands and refusals."""

from typing import Any

import pytest

from gateway.listener import device_events
from gateway.listener.listener import MqttListener
from gateway.mqtt import properties
from gateway.mqtt.protocol5 import TOPIC_ALIASES_MAX
from gateway.mqtt.reason_codes import ReasonCode
from tests.support.mqtt5 import (
    connack_of,
    connect5,
    connected5,
    disconnect5,
    ends_with,
    from_paho,
    next_packet,
    packet,
    publish5,
    subscribe5,
    told,
)
from tests.support.mqtt_peers import (
    ACCEPTED,
    CODEWORD,
    PINGREQ,
    PINGRESP,
    USERS,
    Peer,
    RecordingIntake,
    connect,
    connected,
    keeping,
    listening,
    puback,
    pubcomp,
    publish,
    pubrec,
    pubrel,
)
from tests.support.waiting import until

OPERATED: dict[str, Any] = {"anonymous": False, "users": USERS, "operators": {"ops": USERS["m001"]}}
M001, OPS = ("m001", CODEWORD), ("ops", CODEWORD)
KEPT = {properties.SESSION_EXPIRY_INTERVAL: 3_600}


def kept(client_id: str = "m001", expiry_s: int = 3_600) -> bytes:
    return connect5(client_id, {properties.SESSION_EXPIRY_INTERVAL: expiry_s}, clean=False)


def payloads(intake: RecordingIntake) -> list[bytes]:
    return [reading.datum.payload for reading in intake.stored]


# --- CONNECT and readings ---------------------------------------------------------------------------------


async def test_both_versions_are_spoken_on_one_port(intake: RecordingIntake) -> None:
    async with (
        listening(intake) as listener,
        connected5(listener, connect5("m001")) as five,
        connected(listener, connect("m002"), ACCEPTED) as four,
    ):
        five.writer.write(publish5("a", 1) + publish5("b", 2, qos=2) + publish5("c") + PINGREQ)
        four.writer.write(publish("d", 1))
        assert await five.read(2 + 4 + 4) == PINGRESP + puback(1) + pubrec(2)
        assert await four.read(4) == puback(1)
        five.writer.write(packet(0x62, b"\x00\x02\x00"))
        assert await five.read(4) == pubcomp(2)
    assert sorted(payloads(intake)) == [b"a", b"b", b"c", b"d"]


async def test_connack_tells_what_the_settings_allow(intake: RecordingIntake) -> None:
    settings: dict[str, Any] = {"inflight_messages_max": 80, "packet_bytes_max": 2_000, "session_expiry_s": 60.0}
    async with listening(intake, **settings) as listener, connected(listener, connect5("", KEPT)) as peer:
        connack = await connack_of(peer)
        values = from_paho(connack.properties).values
        assert str(values.pop(properties.ASSIGNED_CLIENT_IDENTIFIER)).startswith("made-")
        assert values == {
            properties.SESSION_EXPIRY_INTERVAL: 60,
            properties.RECEIVE_MAXIMUM: 10,
            properties.TOPIC_ALIAS_MAXIMUM: TOPIC_ALIASES_MAX,
            properties.RETAIN_AVAILABLE: 0,
            properties.MAXIMUM_PACKET_SIZE: 2_000,
            properties.SUBSCRIPTION_IDENTIFIERS_AVAILABLE: 0,
            properties.SHARED_SUBSCRIPTION_AVAILABLE: 0,
        }


async def test_a_client_comes_back_by_the_identifier_that_was_made_for_it(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        async with connected(listener, connect5("", KEPT)) as peer:
            connack = await connack_of(peer)
            made = str(from_paho(connack.properties).values[properties.ASSIGNED_CLIENT_IDENTIFIER])
        await until(lambda: not listener.shared.connections)
        async with connected5(listener, kept(made), present=True):
            pass


async def test_an_alias_stands_for_a_topic(intake: RecordingIntake) -> None:
    alias = {properties.TOPIC_ALIAS: 1}
    async with listening(intake) as listener, connected5(listener) as peer:
        peer.writer.write(publish5("a", 1, values=alias) + publish5("b", 2, "", alias))
        assert await peer.read(8) == puback(1, 2)
    assert {reading.topic for reading in intake.stored} == {"device/m001/thermo"}


async def test_more_messages_than_receive_maximum_end_the_connection_behind_the_answers(
    intake: RecordingIntake,
) -> None:
    intake.outcome = None
    async with listening(intake, inflight_messages_max=16) as listener, connected5(listener) as peer:
        peer.writer.write(publish5("a", 1) + publish5("b", 2))
        await until(lambda: intake.batches)
        intake.decide_all()
        assert await peer.read(8) == puback(1, 2)
        peer.writer.write(publish5("c", 3) + publish5("d", 4) + publish5("e", 5))
        await until(lambda: listener.counts["receive-maximum"])
        intake.decide_all()
        assert await peer.read(8) == puback(3, 4)
        assert await ends_with(peer) == ReasonCode.RECEIVE_MAXIMUM_EXCEEDED
    assert payloads(intake) == [b"a", b"b", b"c", b"d"]


async def test_a_reading_carries_its_user_properties(intake: RecordingIntake) -> None:
    user = (("boot", "a1"), ("seq", "1"))
    async with listening(intake) as listener, connected5(listener, kept()) as peer:
        peer.writer.write(publish5("a", 1, user=user) + publish5("b", 2, user=user, qos=2) + publish5("c", user=user))
        assert await peer.read(8) == puback(1) + pubrec(2)
    assert [reading.user for reading in intake.stored] == [user] * 3


async def test_messages_that_differ_in_their_properties_alone_are_two(intake: RecordingIntake) -> None:
    async with listening(intake) as listener, connected5(listener, kept()) as peer:
        first, second = (publish5("a", 1, user=(("seq", number),), qos=2) for number in "12")
        peer.writer.write(first + first + second)
        assert await peer.read(12) == pubrec(1, 1, 1)
    assert [reading.user[0][1] for reading in intake.stored] == ["1", "2"]


# --- refusals by reason code ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (connect5(), ReasonCode.NOT_AUTHORIZED),
        (connect5(login=("m001", "wrong")), ReasonCode.BAD_USER_NAME_OR_PASSWORD),
        (connect5("x" * 257, login=M001), ReasonCode.CLIENT_IDENTIFIER_NOT_VALID),
        (connect5(values={properties.AUTHENTICATION_METHOD: "SCRAM"}), ReasonCode.BAD_AUTHENTICATION_METHOD),
    ],
)
async def test_a_refused_connect_has_its_reason_code(first: bytes, code: int, intake: RecordingIntake) -> None:
    async with (
        listening(intake, anonymous=False, users=USERS) as listener,
        connected(listener, first + publish5("a", 1)) as peer,
    ):
        connack = await connack_of(peer)
        assert connack.reason.value == code
        assert await peer.read_to_end() == b""
    assert not intake.stored


async def test_while_the_buffer_takes_nothing_connack_says_busy(intake: RecordingIntake) -> None:
    intake.cannot_store = True
    async with listening(intake) as listener, connected(listener, connect5()) as peer:
        connack = await connack_of(peer)
        assert connack.reason.value == ReasonCode.SERVER_BUSY


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x33\x05\x00\x01t\x00\x01", ReasonCode.RETAIN_NOT_SUPPORTED),
        (b"\xf0\x00", ReasonCode.PROTOCOL_ERROR),
        (subscribe5(1, "$share/g/command/m001/#"), ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED),
        (
            packet(0x82, b"\x00\x01" + told({properties.SUBSCRIPTION_IDENTIFIER: 1}) + b"\x00\x01a\x00"),
            ReasonCode.SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED,
        ),
        (publish5("a", 2, "", {properties.TOPIC_ALIAS: 99}), ReasonCode.TOPIC_ALIAS_INVALID),
        (b"\x30\x80\x80\x80\x80\x01", ReasonCode.MALFORMED_PACKET),
    ],
)
async def test_what_is_not_wanted_ends_the_connection_by_its_reason_code(
    sent: bytes, code: int, intake: RecordingIntake
) -> None:
    async with (
        listening(intake) as listener,
        connected5(listener) as peer,
        connected5(listener, connect5("o")) as other,
    ):
        peer.writer.write(publish5("a", 1) + sent)
        assert await peer.read(4) == puback(1), "what came before it is answered"
        assert await ends_with(peer) == code
        other.writer.write(publish5("b", 1))
        assert await other.read(4) == puback(1), "nobody else pays for it"


async def test_an_ending_gateway_and_a_take_over_say_so(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        async with connected5(listener) as older, connected5(listener) as newer:
            assert await ends_with(older) == ReasonCode.SESSION_TAKEN_OVER
            newer.writer.write(publish5("a", 1))
            assert await newer.read(4) == puback(1)
        async with connected5(listener) as peer:
            await listener._close_connections()
            assert await ends_with(peer) == ReasonCode.SERVER_SHUTTING_DOWN


async def test_a_silent_client_is_told_of_its_keep_alive(intake: RecordingIntake) -> None:
    async with listening(intake) as listener, connected5(listener, connect5(keep_alive_s=1)) as peer:
        assert await ends_with(peer) == ReasonCode.KEEP_ALIVE_TIMEOUT
        assert listener.counts["keep-alive-timeout"] == 1


async def test_readings_that_are_not_stored_end_the_connection_as_busy(intake: RecordingIntake) -> None:
    intake.outcome = False
    async with listening(intake) as listener, connected5(listener) as peer:
        peer.writer.write(publish5("a", 1))
        assert await ends_with(peer) == ReasonCode.SERVER_BUSY
    assert not intake.losses, "the client sends them again"


@pytest.mark.parametrize(("qos", "first"), [(1, 0x40), (2, 0x50)])
async def test_a_device_above_its_share_is_refused_and_stays_connected(
    qos: int, first: int, intake: RecordingIntake
) -> None:
    intake.refuses_by_share = True
    async with listening(intake) as listener, connected5(listener, kept()) as peer:
        intake.outcome = None
        peer.writer.write(publish5("a", 1, qos=qos))
        await until(lambda: intake.batches)
        peer.writer.write(publish5("b", 2))
        await until(lambda: len(intake.batches) == 2)
        intake.decide(True, place=1)
        assert await peer.silent(), "answers keep the order of the messages"
        intake.decide(False)
        assert await next_packet(peer) == (first, b"\x00\x01" + bytes((ReasonCode.QUOTA_EXCEEDED,)))
        assert await peer.read(4) == puback(2)
        peer.writer.write(publish5("again", 1, qos=qos))
        await until(lambda: intake.batches)
        intake.decide(True)
        assert await peer.read(4) == (puback(1) if qos == 1 else pubrec(1))
    assert payloads(intake) == [b"b", b"again"]
    assert intake.losses == [("m001", "above-share", 1)]


async def test_a_refused_exchange_that_goes_on_all_the_same_does_not_look_stored(intake: RecordingIntake) -> None:
    intake.refuses_by_share = True
    async with listening(intake) as listener, connected5(listener, kept()) as peer:
        intake.outcome = False
        peer.writer.write(publish5("a", 1, qos=2))
        assert await next_packet(peer) == (0x50, b"\x00\x01\x97")
        intake.outcome = True
        peer.writer.write(pubrel(1))
        assert await next_packet(peer) == (0x70, b"\x00\x01\x92")
        peer.writer.write(publish5("b", 1, qos=2) + pubrel(1))
        assert await peer.read(8) == pubrec(1) + pubcomp(1)
    assert payloads(intake) == [b"b"]


async def test_a_refused_batch_with_more_than_readings_ends_the_connection(intake: RecordingIntake) -> None:
    intake.refuses_by_share = True
    async with listening(intake) as listener, connected5(listener, kept()) as peer:
        intake.outcome = None
        peer.writer.write(publish5("a", 1, qos=2) + pubrel(1))
        await until(lambda: intake.batches)
        intake.decide(False)
        assert await ends_with(peer) == ReasonCode.SERVER_BUSY


async def test_a_3_1_1_device_above_its_share_is_disconnected_as_ever(intake: RecordingIntake) -> None:
    intake.outcome, intake.refuses_by_share = None, True
    async with listening(intake) as listener, connected(listener) as peer:
        peer.writer.write(publish("a", 1))
        await until(lambda: intake.batches)
        intake.decide(False)
        assert await peer.read_to_end() == b""
    assert not intake.losses


# --- sessions ---------------------------------------------------------------------------------------------


async def connects(listener: MqttListener, first: bytes) -> bool:
    """Connect and leave; return whether the session was present."""
    async with connected(listener, first) as peer:
        connack = await connack_of(peer)
        assert connack.reason.value == 0
        present = bool(connack.flags)
        peer.writer.write(disconnect5())
        assert await peer.read_to_end() == b""
    await until(lambda: not listener.shared.connections)
    return present


async def test_a_session_is_kept_as_long_as_its_client_asks(intake: RecordingIntake) -> None:
    now_us = [1_000_000_000]
    async with listening(intake, clock=lambda: now_us[0]) as listener:
        assert not await connects(listener, kept(expiry_s=60))
        now_us[0] += 59_000_000
        assert await connects(listener, kept(expiry_s=60))
        now_us[0] += 60_000_000
        assert not await connects(listener, kept(expiry_s=60)), "it is over even before it is taken out"
        now_us[0] += 60_000_000
        await until(lambda: not listener.shared.kept.kept)
    assert not intake.kept


async def test_clean_start_begins_a_session_that_is_kept(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        assert not await connects(listener, connect5(values=KEPT, clean=True))
        assert await connects(listener, kept())
        assert not await connects(listener, connect5(values=KEPT, clean=True))
        assert await connects(listener, kept())


async def test_without_an_expiry_a_session_ends_with_its_connection(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        await connects(listener, kept())
        assert await connects(listener, connect5(clean=False)), "it is resumed"
        assert not await connects(listener, kept())
        await until(lambda: len(intake.kept) == 1)


async def test_disconnect_changes_for_how_long_a_session_is_kept(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        async with connected5(listener, kept()) as peer:
            peer.writer.write(disconnect5(values={properties.SESSION_EXPIRY_INTERVAL: 0}))
            assert await peer.read_to_end() == b""
        await until(lambda: not listener.shared.connections)
        await until(lambda: not listener.shared.kept.kept)
    assert not intake.kept


async def test_a_restart_remembers_for_how_long_a_session_is_kept(intake: RecordingIntake) -> None:
    now_us = [1_000_000_000]
    async with listening(intake, clock=lambda: now_us[0]) as listener:
        await connects(listener, kept(expiry_s=60))
    async with listening(intake, clock=lambda: now_us[0]) as listener:
        assert listener.shared.kept.kept
        now_us[0] += 60_000_000
        await until(lambda: not listener.shared.kept.kept)


async def test_a_session_of_one_version_is_resumed_by_the_other(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        await connects(listener, kept())
        async with connected(listener, keeping(), b"\x20\x02\x01\x00"):
            pass
        await until(lambda: not listener.shared.connections)
        assert await connects(listener, kept())


# --- wills ------------------------------------------------------------------------------------------------


def ends(intake: RecordingIntake) -> list[tuple[str, object]]:
    """Kinds of the reported ends, each with its will's payload."""
    return [(kind, details.get("will_payload")) for kind, _, details in intake.events if kind != "device-appeared"]


@pytest.fixture
def reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ends of a device follow each other without a minute between them."""
    monkeypatch.setattr(device_events, "REPORT_INTERVAL_S", 0.0)


def with_will(delay_s: int, *, expiry_s: int = 3_600, clean: bool = False) -> bytes:
    values = {properties.SESSION_EXPIRY_INTERVAL: expiry_s}
    return connect5("m001", values, clean=clean, will="gone", will_values={properties.WILL_DELAY_INTERVAL: delay_s})


async def vanishes(listener: MqttListener, first: bytes) -> None:
    async with connected(listener, first) as peer:
        await connack_of(peer)
        peer.vanish()
        await until(lambda: not listener.shared.connections)


@pytest.mark.usefixtures("reported_at_once")
async def test_a_will_waits_for_its_delay_but_the_end_is_reported_at_once(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        await vanishes(listener, with_will(1))
        assert ends(intake) == [("device-died", None)]
        await until(lambda: len(ends(intake)) == 2)
    assert ends(intake)[1] == ("device-will", "gone")


@pytest.mark.usefixtures("reported_at_once")
async def test_a_client_that_is_back_before_the_delay_has_no_will_published(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        await vanishes(listener, with_will(3_600))
        async with connected5(listener, kept(), present=True):
            assert not listener.shared.wills._waiting
    assert [will for _, will in ends(intake) if will] == []


@pytest.mark.usefixtures("reported_at_once")
@pytest.mark.parametrize("how", ["clean start", "expiry", "shutdown", "no session"])
async def test_a_will_does_not_outlast_its_session(how: str, intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        await vanishes(listener, with_will(3_600, expiry_s={"expiry": 1, "no session": 0}.get(how, 3_600)))
        if how == "clean start":
            assert not await connects(listener, connect5())
        if how in {"clean start", "expiry"}:
            await until(lambda: any(will for _, will in ends(intake)))
    assert [will for _, will in ends(intake) if will] == ["gone"]


@pytest.mark.usefixtures("reported_at_once")
async def test_wills_that_are_too_large_together_are_published_at_once(
    intake: RecordingIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.listener.delayed_wills.DELAYED_BYTES_MAX", 100)
    async with listening(intake) as listener:
        await vanishes(listener, with_will(3_600))
        assert ends(intake) == [("device-died", None), ("device-will", "gone")]


@pytest.mark.parametrize(("code", "expected"), [(0x00, []), (0x04, [("device-will", "gone")])])
async def test_disconnect_may_ask_for_the_will(
    code: int, expected: list[tuple[str, str]], intake: RecordingIntake
) -> None:
    async with listening(intake) as listener, connected5(listener, with_will(0)) as peer:
        peer.writer.write(disconnect5(code))
        assert await peer.read_to_end() == b""
        await until(lambda: not listener.shared.connections)
        assert ends(intake) == expected


# --- commands ---------------------------------------------------------------------------------------------


def command(
    payload: str, packet_id: int = 1, *, expiry_s: int | None = None, topic: str = "command/m001/set", qos: int = 1
) -> bytes:
    values: dict[int, properties.Value] = {properties.CONTENT_TYPE: "text/plain"}
    if expiry_s is not None:
        values[properties.MESSAGE_EXPIRY_INTERVAL] = expiry_s
    return publish5(payload, packet_id, topic, values, user=(("why", "because"),), qos=qos)


def delivered(payload: str, packet_id: int = 1, *, expiry_s: int | None = None, dup: bool = False) -> tuple[int, bytes]:
    """First byte and body of the same command as a device gets it."""
    values: dict[int, properties.Value] = {} if expiry_s is None else {properties.MESSAGE_EXPIRY_INTERVAL: expiry_s}
    along = told({properties.CONTENT_TYPE: "text/plain"}, (("why", "because"),))[1:]
    body = told(values)[1:] + along
    topic = b"\x00\x10command/m001/set"
    return 0x3A if dup else 0x32, topic + packet_id.to_bytes(2, "big") + bytes((len(body),)) + body + payload.encode()


def sensor(values: dict[int, properties.Value] | None = None) -> bytes:
    return connect5("m001", {**KEPT, **(values or {})}, clean=False, login=M001)


async def subscribed(peer: Peer) -> None:
    peer.writer.write(subscribe5(9, "command/m001/#"))
    assert await next_packet(peer) == (0x90, b"\x00\x09\x00\x01")


async def test_a_command_goes_on_with_its_properties(intake: RecordingIntake) -> None:
    async with (
        listening(intake, **OPERATED) as listener,
        connected5(listener, sensor()) as device,
        connected5(listener, connect5("ops", login=OPS)) as operator,
    ):
        await subscribed(device)
        operator.writer.write(command("on", expiry_s=60))
        assert await operator.read(4) == puback(1)
        assert await next_packet(device) == delivered("on", expiry_s=60)
        device.writer.write(packet(0x40, b"\x00\x01\x97"))
        await until(lambda: listener.counts["command-refused"])
        await until(lambda: not [key for key in intake.kept if "/command/" in key])


async def test_a_3_1_1_device_gets_the_command_without_properties(intake: RecordingIntake) -> None:
    async with (
        listening(intake, **OPERATED) as listener,
        connected(listener, connect(login=M001), ACCEPTED) as device,
        connected5(listener, connect5("ops", login=OPS)) as operator,
    ):
        device.writer.write(b"\x82\x13\x00\x09\x00\x0ecommand/m001/#\x01")
        assert await device.read(5) == b"\x90\x03\x00\x09\x01"
        operator.writer.write(command("on", expiry_s=60))
        assert await next_packet(device) == (0x32, b"\x00\x10command/m001/set\x00\x01on")


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize(
    ("topic", "code"),
    [
        ("device/m001/thermo", ReasonCode.NOT_AUTHORIZED),
        ("command/m001/set", ReasonCode.QUOTA_EXCEEDED),
        ("command/m002/set", ReasonCode.NO_MATCHING_SUBSCRIBERS),
    ],
)
async def test_an_operator_is_answered_by_reason_code_and_stays_connected(
    topic: str, code: int, qos: int, intake: RecordingIntake
) -> None:
    async with listening(intake, commands_max=1, **OPERATED) as listener:
        async with connected5(listener, sensor()) as device:
            await subscribed(device)
        await until(lambda: not listener.shared.connections)
        async with connected5(listener, connect5("ops", KEPT, login=OPS)) as operator:
            operator.writer.write(command("fills it", 1))
            assert await operator.read(4) == puback(1)
            operator.writer.write(command("x", 2, topic=topic, qos=qos))
            first = 0x40 if qos == 1 else 0x50
            assert await next_packet(operator) == (first, b"\x00\x02" + bytes((code,)))
            operator.writer.write(PINGREQ)
            assert await operator.read(2) == PINGRESP
            if qos == 2 and code >= ReasonCode.UNSPECIFIED_ERROR:
                assert not listener.shared.kept.room.unfinished


async def test_a_command_that_expires_is_not_delivered(intake: RecordingIntake) -> None:
    now_us = [1_000_000_000]
    async with listening(intake, clock=lambda: now_us[0], **OPERATED) as listener:
        async with connected5(listener, sensor()) as device:
            await subscribed(device)
        await until(lambda: not listener.shared.connections)
        async with connected5(listener, connect5("ops", login=OPS)) as operator:
            operator.writer.write(command("late", 1, expiry_s=5) + command("in time", 2, expiry_s=60))
            assert await operator.read(8) == puback(1, 2)
        now_us[0] += 10_000_000
        await until(lambda: listener.counts["command-not-delivered"] == 1)
        await until(lambda: len([key for key in intake.kept if "/command/" in key]) == 1)
        async with connected5(listener, sensor(), present=True) as device:
            assert await next_packet(device) == delivered("in time", 2, expiry_s=50)


async def test_after_a_reboot_of_the_box_commands_that_expire_are_given_up(
    intake: RecordingIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening(intake, **OPERATED) as listener:
        async with connected5(listener, sensor()) as device:
            await subscribed(device)
        await until(lambda: not listener.shared.connections)
        async with connected5(listener, connect5("ops", login=OPS)) as operator:
            operator.writer.write(command("expires", 1, expiry_s=60_000) + command("stays", 2))
            assert await operator.read(8) == puback(1, 2)
    async with listening(intake, **OPERATED) as listener:
        assert listener.shared.kept.room.expiring == 1, "a restart of the gateway alone changes nothing"
    monkeypatch.setattr("gateway.listener.shared.boot_id", lambda: "another boot")
    async with listening(intake, **OPERATED) as listener, connected5(listener, sensor(), present=True) as device:
        assert await next_packet(device) == delivered("stays", 2, dup=True)
        assert listener.counts["command-not-delivered"] == 1
        await until(lambda: len([key for key in intake.kept if "/command/" in key]) == 1)


async def test_a_device_gets_no_more_commands_at_once_than_it_takes(intake: RecordingIntake) -> None:
    async with (
        listening(intake, **OPERATED) as listener,
        connected5(listener, sensor({properties.RECEIVE_MAXIMUM: 2})) as device,
        connected5(listener, connect5("ops", login=OPS)) as operator,
    ):
        await subscribed(device)
        operator.writer.write(b"".join(command(str(number), number) for number in range(1, 5)))
        assert await operator.read(16) == puback(1, 2, 3, 4)
        assert [await next_packet(device) for _ in range(2)] == [delivered("1", 1), delivered("2", 2)]
        assert await device.silent()
        device.writer.write(puback(1))
        assert await next_packet(device) == delivered("3", 3)
        device.writer.write(puback(2, 3))
        assert await next_packet(device) == delivered("4", 4)


async def test_a_command_that_the_device_is_too_small_for_is_not_sent(intake: RecordingIntake) -> None:
    async with (
        listening(intake, **OPERATED) as listener,
        connected5(listener, sensor({properties.MAXIMUM_PACKET_SIZE: 80})) as device,
        connected5(listener, connect5("ops", login=OPS)) as operator,
    ):
        await subscribed(device)
        operator.writer.write(command("x" * 80, 1) + command("y", 2))
        assert await operator.read(8) == puback(1, 2)
        assert await next_packet(device) == delivered("y", 2)
        await until(lambda: listener.counts["command-not-delivered"] == 1)
        await until(lambda: len([key for key in intake.kept if "/command/" in key]) == 1)


async def test_subscriptions_are_refused_and_ended_by_reason_code(intake: RecordingIntake) -> None:
    async with listening(intake, **OPERATED) as listener, connected5(listener, sensor()) as device:
        many = [f"command/m001/{number}" for number in range(33)]
        device.writer.write(subscribe5(1, "device/#", *many))
        assert await next_packet(device) == (
            0x90,
            b"\x00\x01\x00\x87" + b"\x01" * 32 + bytes((ReasonCode.QUOTA_EXCEEDED,)),
        )
        device.writer.write(packet(0xA2, b"\x00\x02\x00\x00\x01a\x00\x0ecommand/m001/0"))
        assert await next_packet(device) == (0xB0, b"\x00\x02\x00\x11\x00")


async def test_an_operators_will_carries_its_properties(intake: RecordingIntake) -> None:
    async with listening(intake, **OPERATED) as listener, connected5(listener, sensor()) as device:
        await subscribed(device)
        values = {properties.CONTENT_TYPE: "text/plain"}
        first = connect5("ops", login=OPS, will="off", will_topic="command/m001/set", will_values=values)
        async with connected(listener, first) as operator:
            await connack_of(operator)
            operator.vanish()
            assert await next_packet(device) == (
                0x32,
                b"\x00\x10command/m001/set\x00\x01" + told(values) + b"off",
            )


async def test_a_qos_0_command_goes_on_too(intake: RecordingIntake) -> None:
    async with (
        listening(intake, **OPERATED) as listener,
        connected5(listener, sensor()) as device,
        connected5(listener, connect5("ops", login=OPS)) as operator,
    ):
        await subscribed(device)
        operator.writer.write(publish5("on", topic="command/m001/set"))
        assert await next_packet(device) == (0x30, b"\x00\x10command/m001/set\x00on")
