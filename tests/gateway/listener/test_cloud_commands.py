"""The cloud's commands over MQTT: to which sessions they go, what ends them, and what they leave on the disk."""

from collections import Counter

import pytest

from gateway.command import By, DeviceCommand
from gateway.listener.listener import MqttListener
from gateway.mqtt import properties
from tests.gateway.listener.test_mqtt5 import sensor, subscribed
from tests.gateway.listener.test_mqtt_commands import COMMANDED, OPERATOR, command, device, granted, subscribe
from tests.support.mqtt5 import connected5, next_packet, packet, told
from tests.support.mqtt_peers import ACCEPTED, DISCONNECT, PRESENT, RecordingIntake, connected, listening, puback
from tests.support.waiting import until

UNTIL_US = 60_123_456
"""A minute after the time that `listening` has."""


class Reports:
    """Remembers what a way reports."""

    def __init__(self, listener: MqttListener) -> None:
        self.done: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self.devices: list[str] = []
        listener.shared.cloud.reports = self

    def delivered(self, command_id: str, by: By) -> None:
        assert by == "mqtt"
        self.done[command_id] += 1

    def refused(self, command_id: str, reason: str) -> None:
        self.reasons[command_id] = reason

    def ready(self, device: str) -> None:
        self.devices.append(device)


def of_cloud(command_id: str = "c1", payload: bytes = b"on", name: str = "m001", topic: str = "set") -> DeviceCommand:
    return DeviceCommand(command_id, name, topic, payload, 0)


async def test_a_command_goes_to_a_device_that_is_connected_and_is_acknowledged(intake: RecordingIntake) -> None:
    async with (
        listening(intake, **COMMANDED) as listener,
        connected(listener, device() + subscribe("command/m001/#"), ACCEPTED + granted(1)) as peer,
    ):
        reports, cloud = Reports(listener), listener.shared.cloud
        cloud.offer(of_cloud(), UNTIL_US)
        cloud.offer(of_cloud(), UNTIL_US)
        assert await peer.read(len(command("on", 1))) == command("on", 1)
        assert await peer.silent(), "the second offer is of what is on its way"
        assert not reports.done
        peer.writer.write(puback(1))
        await until(lambda: reports.done == {"c1": 1})
        assert listener.shared.kept.room.commands_bytes == 0


async def test_a_command_goes_to_no_other_device(intake: RecordingIntake) -> None:
    """Whatever a device asks for, and whatever the command's topic says."""
    async with (
        listening(intake, **COMMANDED) as listener,
        connected(listener, device("m002")) as peer,
    ):
        assert await peer.read(4) == ACCEPTED
        filters = ("command/m001/#", "command/#", "#", "command/m002/#")
        peer.writer.write(subscribe(*filters))
        assert await peer.read(4 + len(filters)) == granted(0x80, 0x80, 0x80, 1)
        for topic in ("set", "../m002/set", "/m002", ""):
            listener.shared.cloud.offer(of_cloud(f"to-{topic}", topic=topic), UNTIL_US)
        assert await peer.silent()


async def test_a_session_on_disk_keeps_no_command_of_the_cloud_there(intake: RecordingIntake) -> None:
    """The gateway's ledger has it. An operator's command beside it is kept as before."""
    async with listening(intake, **COMMANDED) as listener:
        reports, cloud = Reports(listener), listener.shared.cloud
        async with connected(listener, device(clean=False) + subscribe("command/m001/#"), ACCEPTED + granted(1)):
            pass
        await until(lambda: not listener.shared.connections)
        cloud.offer(of_cloud(), UNTIL_US)
        async with connected(listener, OPERATOR + command("off", 9), ACCEPTED + puback(9)):
            pass
        assert len([key for key in intake.kept if "/command/" in key]) == 1
        both = command("on", 1) + command("off", 2)
        async with connected(listener, device(clean=False), PRESENT + both) as peer:
            peer.writer.write(DISCONNECT)
            assert await peer.read_to_end() == b""
        both = command("on", 1, dup=True) + command("off", 2, dup=True)
        async with connected(listener, device(clean=False), PRESENT + both) as peer:
            peer.writer.write(puback(1, 2))
            await until(lambda: reports.done == {"c1": 1})
            await until(lambda: not [key for key in intake.kept if "/command/" in key])
    async with listening(intake, **COMMANDED) as listener, connected(listener, device(clean=False), PRESENT) as peer:
        assert await peer.silent()


async def test_a_command_is_offered_anew_after_its_session_is_gone(intake: RecordingIntake) -> None:
    async with listening(intake, **COMMANDED) as listener:
        reports, cloud = Reports(listener), listener.shared.cloud
        async with connected(listener, device() + subscribe("command/m001/#"), ACCEPTED + granted(1)) as peer:
            await until(lambda: reports.devices == ["m001"])
            cloud.offer(of_cloud(), UNTIL_US)
            assert await peer.read(len(command("on", 1))) == command("on", 1)
        await until(lambda: not listener.shared.connections)
        assert cloud.knows("m001"), "it may log in"
        cloud.offer(of_cloud(), UNTIL_US)
        async with connected(listener, device() + subscribe("command/m001/#"), ACCEPTED + granted(1)) as peer:
            await until(lambda: reports.devices == ["m001", "m001"])
            cloud.offer(of_cloud(), UNTIL_US)
            assert await peer.read(len(command("on", 1))) == command("on", 1)


async def test_a_withdrawn_command_is_sent_no_more_and_its_late_puback_ends_no_other(intake: RecordingIntake) -> None:
    async with (
        listening(intake, **COMMANDED) as listener,
        connected(listener, device() + subscribe("command/m001/#"), ACCEPTED + granted(1)) as peer,
    ):
        reports, cloud = Reports(listener), listener.shared.cloud
        cloud.offer(of_cloud(), UNTIL_US)
        assert await peer.read(len(command("on", 1))) == command("on", 1)
        assert cloud.withdraw("c1"), "it was sent"
        cloud.offer(of_cloud("c2", b"off"), UNTIL_US)
        assert await peer.read(len(command("off", 2))) == command("off", 2)
        peer.writer.write(puback(1))
        await until(lambda: listener.counts["puback-of-nothing"] == 1)
        assert not reports.done
        peer.writer.write(puback(2))
        await until(lambda: reports.done == {"c2": 1})
        assert cloud.withdraw("c2")
        assert not cloud.withdraw("c2"), "it is forgotten"
        assert not cloud.withdraw("never seen")


async def test_a_command_that_was_sent_in_a_session_that_is_gone_may_have_arrived(intake: RecordingIntake) -> None:
    """Neither a session that is not kept nor a further offer hides it."""
    async with listening(intake, **COMMANDED) as listener:
        cloud = listener.shared.cloud
        async with connected(listener, device() + subscribe("command/m001/#"), ACCEPTED + granted(1)) as peer:
            cloud.offer(of_cloud(), UNTIL_US)
            assert await peer.read(len(command("on", 1))) == command("on", 1)
        await until(lambda: not listener.shared.connections)
        cloud.offer(of_cloud(), UNTIL_US)
        cloud.offer(of_cloud("c2"), UNTIL_US)
        assert cloud.withdraw("c1")
        assert not cloud.withdraw("c2"), "nobody was there"


async def test_a_command_that_waits_in_a_session_can_be_withdrawn_before_it_was_sent(intake: RecordingIntake) -> None:
    async with listening(intake, **COMMANDED) as listener:
        cloud = listener.shared.cloud
        async with connected(listener, device(clean=False) + subscribe("command/m001/#"), ACCEPTED + granted(1)):
            pass
        await until(lambda: not listener.shared.connections)
        cloud.offer(of_cloud(), UNTIL_US)
        assert not cloud.withdraw("c1")
        async with connected(listener, device(clean=False), PRESENT) as peer:
            assert await peer.silent()
        assert listener.shared.kept.room.commands_bytes == 0


async def test_a_device_that_subscribed_with_qos_0_alone_is_refused(intake: RecordingIntake) -> None:
    async with (
        listening(intake, **COMMANDED) as listener,
        connected(listener, device() + subscribe("command/m001/#", qos=0), ACCEPTED + granted(0)) as peer,
    ):
        reports = Reports(listener)
        listener.shared.cloud.offer(of_cloud(), UNTIL_US)
        assert reports.reasons == {"c1": "subscribed-with-qos-0"}
        assert await peer.silent()


async def test_without_a_place_in_the_templates_a_command_is_refused(intake: RecordingIntake) -> None:
    async with listening(intake, **COMMANDED, command_topics=("to/+/{device}",)) as listener:
        reports = Reports(listener)
        listener.shared.cloud.offer(of_cloud(), UNTIL_US)
        assert reports.reasons == {"c1": "no-command-topic"}


async def test_a_full_session_leaves_the_command_to_the_ledger(intake: RecordingIntake) -> None:
    async with (
        listening(intake, **COMMANDED, commands_max=1) as listener,
        connected(listener, device() + subscribe("command/m001/#"), ACCEPTED + granted(1)) as peer,
    ):
        reports, cloud = Reports(listener), listener.shared.cloud
        cloud.offer(of_cloud("c1"), UNTIL_US)
        cloud.offer(of_cloud("c2"), UNTIL_US)
        assert await peer.read(len(command("on", 1))) == command("on", 1)
        assert await peer.silent()
        peer.writer.write(puback(1))
        await until(lambda: reports.done == {"c1": 1})
        cloud.offer(of_cloud("c2"), UNTIL_US)
        assert await peer.read(len(command("on", 1))) == command("on", 1)
        assert not reports.reasons


async def test_a_device_is_known_by_its_log_in_or_its_subscription(intake: RecordingIntake) -> None:
    async with listening(intake, **COMMANDED) as listener:
        cloud = listener.shared.cloud
        assert cloud.knows("m001")
        assert not cloud.knows("ops"), "an operator is no device"
        assert not cloud.knows("m003")
    async with (
        listening(intake) as listener,
        connected(listener) as peer,
    ):
        assert not listener.shared.cloud.knows("m001"), "anybody may call itself so"
        peer.writer.write(subscribe("command/m001/#"))
        assert await peer.read(5) == granted(1)
        assert listener.shared.cloud.knows("m001")


def delivered(payload: str, packet_id: int) -> tuple[int, bytes]:
    """First byte and body of a command that an MQTT 5 device gets."""
    head = b"\x00\x10command/m001/set" + packet_id.to_bytes(2, "big")
    return 0x32, head + told({properties.MESSAGE_EXPIRY_INTERVAL: 60}) + payload.encode()


@pytest.mark.parametrize("code", [b"", b"\x10", b"\x80", b"\x97\x00"])
async def test_an_mqtt_5_device_is_told_the_expiry_and_refuses_by_reason_code(
    code: bytes, intake: RecordingIntake
) -> None:
    async with listening(intake, **COMMANDED) as listener, connected5(listener, sensor()) as peer:
        reports = Reports(listener)
        await subscribed(peer)
        listener.shared.cloud.offer(of_cloud(), UNTIL_US)
        assert await next_packet(peer) == delivered("on", 1)
        peer.writer.write(packet(0x40, b"\x00\x01" + code))
        await until(lambda: reports.done or reports.reasons)
        is_refused = code >= b"\x80"
        assert reports.done == ({} if is_refused else {"c1": 1})
        assert reports.reasons == ({"c1": "refused-by-device"} if is_refused else {})
        assert listener.counts["command-refused"] == is_refused
        assert listener.shared.kept.room.commands_bytes == 0


async def test_a_withdrawn_command_counts_for_receive_maximum_until_its_puback(intake: RecordingIntake) -> None:
    first = sensor({properties.RECEIVE_MAXIMUM: 1})
    async with listening(intake, **COMMANDED) as listener, connected5(listener, first) as peer:
        reports, cloud = Reports(listener), listener.shared.cloud
        await subscribed(peer)
        cloud.offer(of_cloud("c1"), UNTIL_US)
        cloud.offer(of_cloud("c2", b"off"), UNTIL_US)
        assert await next_packet(peer) == delivered("on", 1)
        assert cloud.withdraw("c1")
        cloud.offer(of_cloud("c3", b"dim"), UNTIL_US)
        assert await peer.silent()
        assert not cloud.withdraw("c2")
        peer.writer.write(puback(1))
        assert await next_packet(peer) == delivered("dim", 3)
        peer.writer.write(puback(3))
        await until(lambda: reports.done == {"c3": 1})


async def test_a_command_that_an_mqtt_5_device_is_too_small_for_is_refused(intake: RecordingIntake) -> None:
    first = sensor({properties.MAXIMUM_PACKET_SIZE: 80})
    async with listening(intake, **COMMANDED) as listener, connected5(listener, first) as peer:
        reports, cloud = Reports(listener), listener.shared.cloud
        await subscribed(peer)
        cloud.offer(of_cloud("large", b"x" * 80), UNTIL_US)
        assert reports.reasons == {"large": "larger-than-a-packet"}
        cloud.offer(of_cloud("c2"), UNTIL_US)
        assert await next_packet(peer) == delivered("on", 1)
        assert listener.shared.kept.room.expiring == 0
