"""Commands for devices: who may send and receive them, where they wait, and what happens if there are too many."""

import contextlib
import hashlib
from typing import Any

import pytest

from tests.support.mqtt_peers import (
    ACCEPTED,
    CODEWORD,
    PRESENT,
    USERS,
    RecordingIntake,
    connect,
    connected,
    field,
    keeping,
    listening,
    puback,
    publish,
    publish2,
    pubrec,
)
from tests.support.waiting import until

COMMANDED: dict[str, Any] = {
    "anonymous": False,
    "users": USERS,
    "operators": {"ops": hashlib.sha256(b"open sesame").hexdigest()},
}
OPERATOR = connect("console", login=("ops", "open sesame"))


def device(name: str = "m001", *, clean: bool = True) -> bytes:
    return connect("c", login=(name, CODEWORD)) if clean else keeping("c", login=(name, CODEWORD))


def subscribe(*filters: str, qos: int = 1) -> bytes:
    body = b"\x00\x05" + b"".join(field(topic_filter) + bytes((qos,)) for topic_filter in filters)
    return bytes((0x82, len(body))) + body


def granted(*codes: int) -> bytes:
    return bytes((0x90, 2 + len(codes), 0, 5, *codes))


def command(payload: str, packet_id: int, name: str = "m001", *, dup: bool = False) -> bytes:
    """A command as an operator publishes it, and as the device gets it."""
    data = bytearray(publish(payload, packet_id, f"command/{name}/set"))
    data[0] |= 0x08 if dup else 0
    return bytes(data)


async def test_a_device_subscribes_to_its_own_command_topics_only() -> None:
    async with (
        listening(RecordingIntake(), **COMMANDED) as listener,
        connected(listener, device() + subscribe("command/m001/#", "command/m001/set/+", "command/m001")) as peer,
    ):
        assert await peer.read(4 + 7) == ACCEPTED + granted(1, 1, 1)
        others = ("#", "+/m001/#", "command/#", "command/+/set", "command/m002/set", "device/m001/#", "$SYS/#")
        peer.writer.write(subscribe(*others))
        assert await peer.read(4 + len(others)) == granted(*[0x80] * len(others))
        peer.writer.write(subscribe("command/m001/a", qos=0) + subscribe("command/m001/b", qos=2))
        assert await peer.read(10) == granted(0) + granted(1)
        peer.writer.write(b"\xa2\x10\x00\x06" + field("command/m001"))
        assert await peer.read(4) == b"\xb0\x02\x00\x06"
        assert listener.counts["subscribe-refused"] == 1


async def test_an_anonymous_client_whose_identifier_is_a_pattern_may_subscribe_to_nothing() -> None:
    async with (
        listening(RecordingIntake()) as listener,
        connected(listener, connect("+") + subscribe("command/+/#")) as peer,
    ):
        assert await peer.read(9) == ACCEPTED + granted(0x80)


async def test_a_subscription_of_a_kept_session_is_granted_after_its_commit_and_survives_a_restart() -> None:
    intake = RecordingIntake()
    async with listening(intake, **COMMANDED) as listener, connected(listener, device(clean=False), ACCEPTED) as peer:
        intake.outcome = None
        peer.writer.write(subscribe("command/m001/#"))
        await until(lambda: intake.batches)
        assert await peer.silent()
        intake.decide(True)
        assert await peer.read(5) == granted(1)
    intake.outcome = True
    async with (
        listening(intake, **COMMANDED) as listener,
        connected(listener, device(clean=False)) as peer,
        connected(listener, OPERATOR + command("on", 9), ACCEPTED + puback(9)),
    ):
        sent = command("on", 1)
        assert await peer.read(4 + len(sent)) == PRESENT + sent


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("published", "asked", "given"), [(0, 1, 0), (1, 0, 0), (1, 1, 1), (2, 1, 1), (2, 2, 1)])
async def test_a_command_comes_with_the_lower_of_both_qos(
    published: int,
    asked: int,
    given: int,
    clean: bool,  # noqa: FBT001
) -> None:
    intake = RecordingIntake()
    async with (
        listening(intake, **COMMANDED) as listener,
        connected(listener, device(clean=clean) + subscribe("command/+/set", "command/m001/#", qos=asked)) as peer,
        connected(listener, OPERATOR) as operator,
    ):
        assert await peer.read(4 + 6) == ACCEPTED + granted(0x80, min(asked, 1))
        assert await operator.read(4) == ACCEPTED
        data = bytearray(publish("on", 9 if published else 0, "command/m001/set"))
        data[0] = 0x30 | published << 1 | 0x01  # RETAIN is taken and means nothing
        operator.writer.write(bytes(data))
        if published:
            assert await operator.read(4) == (pubrec(9) if published == 2 else puback(9))
        sent = publish("on", 1 if given else 0, "command/m001/set")
        assert await peer.read(len(sent)) == sent
        assert await peer.silent()
    assert not intake.stored


async def test_a_command_waits_on_disk_for_a_device_that_is_away_and_is_sent_until_it_is_acknowledged() -> None:
    intake = RecordingIntake()
    async with listening(intake, **COMMANDED) as listener:
        async with connected(listener, device(clean=False) + subscribe("command/m001/#")) as peer:
            assert await peer.read(9) == ACCEPTED + granted(1)
        await until(lambda: not listener.shared.connections)
        async with connected(listener, OPERATOR, ACCEPTED) as operator:
            intake.outcome = None
            operator.writer.write(command("one", 5) + command("two", 6))
            await until(lambda: intake.batches)
            assert await operator.silent()
            intake.decide(True)
            intake.outcome = True
            assert await operator.read(8) == puback(5, 6)
        both = command("one", 1) + command("two", 2)
        async with connected(listener, device(clean=False), PRESENT + both) as peer:
            peer.writer.write(puback(1))
            await until(lambda: not [key for key in intake.kept if key.endswith("/1")])
        second = command("two", 2, dup=True)
        async with connected(listener, device(clean=False)) as peer:
            assert await peer.read(4 + len(second)) == PRESENT + second
    async with listening(intake, **COMMANDED) as listener:
        async with connected(listener, device(clean=False), PRESENT + second) as peer:
            peer.writer.write(puback(2) + puback(2))
            await until(lambda: not [key for key in intake.kept if "/command/" in key])
            await until(lambda: listener.counts["puback-of-nothing"] == 1)
        assert listener.shared.kept.room.commands_bytes == 0


async def test_a_command_that_nobody_subscribed_to_is_acknowledged_and_counted() -> None:
    async with (
        listening(RecordingIntake(), **COMMANDED) as listener,
        connected(listener, OPERATOR + command("on", 9), ACCEPTED + puback(9)),
    ):
        assert listener.counts["command-without-subscriber"] == 1


@pytest.mark.parametrize(("cap", "taken"), [({"commands_max": 2}, 2), ({"commands_bytes_max": 1_000}, 9)])
async def test_a_command_beyond_the_bound_is_not_acknowledged(cap: dict[str, Any], taken: int) -> None:
    """A command is 107 bytes here. Acknowledged commands wait for the device, and no further ones do."""
    intake = RecordingIntake()
    async with listening(intake, **COMMANDED, **cap) as listener:
        async with connected(listener, device(clean=False) + subscribe("command/m001/#")) as peer:
            assert await peer.read(9) == ACCEPTED + granted(1)
        async with connected(listener, OPERATOR, ACCEPTED) as operator:
            for number in range(1, taken + 1):
                operator.writer.write(command("x" * 91, number))
                assert await operator.read(4) == puback(number)
            operator.writer.write(command("x" * 91, 99))
            assert await operator.read_to_end() == b""
        assert listener.counts["too-many-commands"] == 1
        assert len([key for key in intake.kept if "/command/" in key]) == taken


def operator_keeping() -> bytes:
    return keeping("console", login=("ops", "open sesame"))


async def test_a_refused_command_with_qos_2_is_not_taken_for_known_when_it_comes_again(intake: RecordingIntake) -> None:
    topic = "command/m001/set"
    async with listening(intake, **COMMANDED, commands_max=1) as listener:
        async with connected(listener, device(clean=False) + subscribe("command/m001/#")) as peer:
            assert await peer.read(9) == ACCEPTED + granted(1)
        async with connected(listener, operator_keeping(), ACCEPTED) as operator:
            operator.writer.write(publish2("a", 1, topic=topic))
            assert await operator.read(4) == pubrec(1)
            operator.writer.write(publish2("b", 2, topic=topic))
            assert await operator.read_to_end() == b""
        async with connected(listener, device(clean=False)) as peer:
            assert await peer.read(4 + len(command("a", 1))) == PRESENT + command("a", 1)
            peer.writer.write(puback(1))
            await until(lambda: not [key for key in intake.kept if "/command/" in key])
        async with connected(listener, operator_keeping(), PRESENT) as operator:
            operator.writer.write(publish2("b", 2, dup=True, topic=topic))
            assert await operator.read(4) == pubrec(2)
            # Known now: neither refused for want of room, nor queued twice.
            operator.writer.write(publish2("b", 2, dup=True, topic=topic))
            assert await operator.read(4) == pubrec(2)
        assert len([key for key in intake.kept if "/command/" in key]) == 1


@pytest.mark.parametrize("dup", [False, True])
@pytest.mark.parametrize("killed", [False, True])
async def test_an_operators_command_that_comes_again_in_an_open_exchange_is_one_command(
    intake: RecordingIntake, *, dup: bool, killed: bool
) -> None:
    topic = "command/m001/set"
    async with contextlib.AsyncExitStack() as stack:
        listener = await stack.enter_async_context(listening(intake, **COMMANDED))
        async with connected(listener, device(clean=False) + subscribe("command/m001/#")) as peer:
            assert await peer.read(9) == ACCEPTED + granted(1)
        async with connected(listener, operator_keeping() + publish2("on", 7, topic=topic)) as operator:
            assert await operator.read(8) == ACCEPTED + pubrec(7)
        if killed:
            await stack.aclose()
            listener = await stack.enter_async_context(listening(intake, **COMMANDED))
        async with connected(listener, operator_keeping() + publish2("on", 7, dup=dup, topic=topic)) as operator:
            assert await operator.read(8) == PRESENT + pubrec(7)
        assert len([key for key in intake.kept if "/command/" in key]) == 1


async def test_a_command_is_queued_for_all_sessions_of_its_device_or_for_none(intake: RecordingIntake) -> None:
    logins = [keeping(name, login=("m001", CODEWORD)) for name in ("one", "two")]
    async with listening(intake, **COMMANDED, commands_bytes_max=1_000) as listener:
        for first in logins:
            async with connected(listener, first + subscribe("command/m001/#")) as peer:
                assert await peer.read(9) == ACCEPTED + granted(1)
        async with connected(listener, OPERATOR, ACCEPTED) as operator:
            for number in range(1, 5):
                operator.writer.write(command("x" * 91, number))
                assert await operator.read(4) == puback(number)
            operator.writer.write(command("x" * 91, 5))
            assert await operator.read_to_end() == b""
        assert len([key for key in intake.kept if "/command/" in key]) == 8


async def test_a_command_during_a_clean_connect_is_not_given_to_the_session_that_dies(intake: RecordingIntake) -> None:
    async with listening(intake, **COMMANDED) as listener:
        async with connected(listener, device(clean=False) + subscribe("command/m001/#")) as peer:
            assert await peer.read(9) == ACCEPTED + granted(1)
        async with connected(listener, OPERATOR, ACCEPTED) as operator:
            intake.outcome = None
            async with connected(listener, device()) as peer:
                await until(lambda: intake.batches)
                operator.writer.write(command("on", 3))
                assert await operator.read(4) == puback(3)
                assert listener.counts["command-without-subscriber"] == 1, "and so it is said to have reached nobody"
                intake.decide(True)
                assert await peer.read(4) == ACCEPTED
                assert not intake.kept
            intake.outcome = True


@pytest.mark.parametrize("clean", [True, False])
async def test_subscriptions_are_bounded_and_their_mark_is_written_once_for_each_change(
    intake: RecordingIntake, *, clean: bool
) -> None:
    async with listening(intake, **COMMANDED) as listener, connected(listener, device(clean=clean), ACCEPTED) as peer:
        longest = "command/m001/" + "x" * (256 - 13)
        body = b"\x00\x05" + field(longest) + b"\x00" + field(longest + "x") + b"\x00"
        peer.writer.write(bytes((0x82, len(body) & 0x7F | 0x80, len(body) >> 7)) + body)
        assert await peer.read(6) == granted(0, 0x80)
        commits = intake.commits
        peer.writer.write(b"".join(subscribe(f"command/m001/{number}") for number in range(40)))
        assert await peer.read(5 * 40) == granted(1) * 31 + granted(0x80) * 9
        peer.writer.write(subscribe("command/m001/1") * 40)
        assert await peer.read(5 * 40) == granted(1) * 40
        assert intake.commits == commits + (not clean), "what changes nothing needs no commit"


@pytest.mark.parametrize(
    "data",
    [
        publish("21.5", 1),
        publish("21.5"),
        publish2("21.5", 1),
        publish("on", 1, "command"),
        publish("on", 1, "command/"),
    ],
)
async def test_an_operator_may_publish_commands_and_nothing_else(data: bytes, intake: RecordingIntake) -> None:
    async with listening(intake, **COMMANDED) as listener, connected(listener, OPERATOR, ACCEPTED) as operator:
        operator.writer.write(data)
        assert await operator.read_to_end() == b""
        assert listener.counts["not-a-command-topic"] == 1
    assert not intake.stored


async def test_an_operator_is_no_device_and_subscribes_to_nothing(intake: RecordingIntake) -> None:
    async with (
        listening(intake, **COMMANDED) as listener,
        connected(listener, OPERATOR + subscribe("command/ops/#", "#")) as operator,
    ):
        assert await operator.read(10) == ACCEPTED + granted(0x80, 0x80)
    assert intake.events == []


async def test_an_operators_will_is_a_command_or_refused(intake: RecordingIntake) -> None:

    def first(topic: str) -> bytes:
        body = field("MQTT") + b"\x04\xce\x00\x3c" + field("console") + field(topic) + field("off")
        body += field("ops") + field("open sesame")
        return bytes((0x10, len(body))) + body

    async with (
        listening(intake, **COMMANDED) as listener,
        connected(listener, device() + subscribe("command/m001/#"), ACCEPTED + granted(1)) as peer,
    ):
        async with connected(listener, first("status")) as operator:
            assert await operator.read_to_end() == b"\x20\x02\x00\x05"
        async with connected(listener, first("command/m001/set")) as operator:
            assert await operator.read(4) == ACCEPTED
        sent = command("off", 1)
        assert await peer.read(len(sent)) == sent


async def test_an_operator_needs_its_secret_where_devices_need_none() -> None:
    settings = {"anonymous": True, "operators": COMMANDED["operators"]}
    async with listening(RecordingIntake(), **settings) as listener:
        async with connected(listener, connect("console", login=("ops", "wrong"))) as peer:
            assert await peer.read_to_end() == b"\x20\x02\x00\x04"
        async with (
            connected(listener, connect("m001") + subscribe("command/m001/#")) as peer,
            connected(listener, OPERATOR + command("on", 3), ACCEPTED + puback(3)),
        ):
            sent = command("on", 1)
            assert await peer.read(9 + len(sent)) == ACCEPTED + granted(1) + sent


async def test_a_devices_publish_to_a_command_topic_is_judged_by_the_routes() -> None:
    intake = RecordingIntake()
    async with (
        listening(intake, **COMMANDED) as listener,
        connected(listener, device("m002") + command("on", 1), ACCEPTED + puback(1)),
    ):
        assert not listener.counts["command-without-subscriber"]
    assert [(reading.topic, reading.writer) for reading in intake.stored] == [("command/m001/set", "m002")]
