"""The cloud's commands on serial lines: one at a time for each sensor, again and again until it answers."""

import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.command import By, DeviceCommand
from gateway.serial_lines.frame_link import COMMAND_AGAIN_US, COMMAND_AGAIN_US_MAX, CommandAnswered, SerialLink
from gateway.serial_lines.frames import COMMAND_DONE, COMMAND_PAYLOAD_BYTES_MAX, CommandFrame, CommandReply, Frame
from gateway.serial_lines.serial_ingress import SerialIngress
from gateway.settings import SerialTextSettings
from tests.gateway.serial_lines.test_ingress_serial import Bench, RecordingIntake
from tests.gateway.serial_lines.test_serial_link import HELLO, RUN, START_US, answers, known_link, send
from tests.support.waiting import until

NUMBER = zlib.crc32(b"c1")
NEXT_BOOT = replace(HELLO, boot=8)


@pytest.fixture
def link() -> SerialLink:
    found = known_link()
    found.command("c1", b"led=1", START_US)
    return found


def commands(link: SerialLink, now_us: int) -> list[Frame]:
    return [frame for frame in answers(link, now_us) if isinstance(frame, CommandFrame)]


def test_a_command_goes_out_at_once_and_ends_with_its_answer(link: SerialLink) -> None:
    assert link.due_us == START_US
    assert commands(link, START_US) == [CommandFrame(RUN, NUMBER, b"led=1")]
    assert commands(link, START_US) == []
    assert send(link, CommandReply(RUN, NUMBER, COMMAND_DONE)) == [CommandAnswered("c1", True)]
    assert link.command_id is None
    assert commands(link, START_US + 10 * COMMAND_AGAIN_US) == []
    assert send(link, CommandReply(RUN, NUMBER, COMMAND_DONE)) == []
    assert link.faults["unexpected-command-reply"] == 1


def test_a_command_that_the_sensor_does_not_take_says_so(link: SerialLink) -> None:
    assert send(link, CommandReply(RUN, NUMBER, 1)) == [CommandAnswered("c1", False)]


@pytest.mark.parametrize("reply", [CommandReply(RUN ^ 1, NUMBER, 0), CommandReply(RUN, NUMBER ^ 1, 0)])
def test_an_answer_to_another_command_or_of_another_run_does_not_count(link: SerialLink, reply: CommandReply) -> None:
    assert send(link, reply) == []
    assert link.command_id == "c1"


def test_a_command_without_an_answer_comes_again_ever_more_rarely(link: SerialLink) -> None:
    """Old firmware never answers, and its line is for readings."""
    gaps: list[int] = []
    now_us = last_us = START_US
    assert commands(link, now_us)
    while len(gaps) < 9:
        now_us = max(link.due_us, now_us + 1)
        if commands(link, now_us):
            gaps.append(now_us - last_us)
            last_us = now_us
    assert gaps[:3] == [COMMAND_AGAIN_US, 2 * COMMAND_AGAIN_US, 4 * COMMAND_AGAIN_US]
    assert max(gaps) == gaps[-1] == COMMAND_AGAIN_US_MAX


def test_after_a_restart_of_its_sensor_a_command_goes_out_again_for_the_new_run(link: SerialLink) -> None:
    assert commands(link, START_US)
    send(link, NEXT_BOOT)
    assert commands(link, START_US) == [CommandFrame(NEXT_BOOT.run, NUMBER, b"led=1")]


def test_a_command_never_goes_to_another_sensor(link: SerialLink) -> None:
    send(link, replace(HELLO, device="cellar"))
    assert commands(link, START_US) == []
    assert link.command_id is None


def test_a_command_that_is_withdrawn_is_sent_no_more(link: SerialLink) -> None:
    link.withdraw()
    assert commands(link, START_US) == []


class Reports:
    """Remembers what a way reports."""

    def __init__(self, ingress: SerialIngress) -> None:
        self.done: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        ingress.commands.reports = self

    def delivered(self, command_id: str, by: By) -> None:
        assert by == "serial"
        self.done[command_id] += 1

    def refused(self, command_id: str, reason: str) -> None:
        self.reasons[command_id] = reason

    def ready(self, device: str) -> None:
        raise AssertionError(device)


def of_cloud(command_id: str, payload: bytes = b"led=1", device: str = "attic") -> DeviceCommand:
    return DeviceCommand(command_id, device, "", payload, 0)


async def test_commands_reach_a_sensor_one_after_the_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path, RecordingIntake())
    async with bench.serving() as ingress:
        reports, way = Reports(ingress), ingress.commands
        assert not way.knows("attic")
        sensor = bench.plug()
        await sensor.hello()
        await until(lambda: way.knows("attic"))
        for _ in range(2):
            way.offer(of_cloud("c1"), 0)
            way.offer(of_cloud("c2", b"led=0"), 0)
        command = await sensor.expect(CommandFrame)
        assert command == CommandFrame(sensor.run, NUMBER, b"led=1")
        assert not way.withdraw("c2"), "it waits behind the other one"
        await sensor.send(CommandReply(sensor.run, command.number, COMMAND_DONE))
        await until(lambda: reports.done == {"c1": 1})
        assert way.withdraw("c1")
        way.offer(of_cloud("c2", b"led=0"), 0)
        command = await sensor.expect(CommandFrame)
        await sensor.send(CommandReply(sensor.run, command.number, 1))
        await until(lambda: reports.reasons == {"c2": "refused-by-device"})
        sensor.unplug()
        await until(lambda: not way.knows("attic"))


async def test_a_command_that_no_frame_carries_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, RecordingIntake())
    text = SerialTextSettings(port=f"{tmp_path}/ttyACM0", device="scale", format="json")
    async with bench.serving(text=(text,)) as ingress:
        reports, way = Reports(ingress), ingress.commands
        sensor, scale = bench.plug(), bench.plug("ttyACM0")
        await sensor.hello()
        await until(lambda: way.knows("attic") and way.knows("scale"))
        way.offer(of_cloud("large", bytes(COMMAND_PAYLOAD_BYTES_MAX + 1)), 0)
        way.offer(of_cloud("text", device="scale"), 0)
        assert reports.reasons == {"large": "larger-than-a-frame", "text": "takes-no-commands"}
        sensor.unplug()
        scale.unplug()
