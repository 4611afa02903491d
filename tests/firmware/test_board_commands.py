"""Commands from a real Kafka to real firmware in simavr, over both links: the chip's own port has the LED on."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from demo.kafka_broker import Broker
from gateway.record_contract import COMMAND_ENDED
from tests.support.board_scene import Scene, scene
from tests.support.commands import command_record, send_commands, until_made
from tests.support.gateways import header
from tests.support.waiting import patience, until

pytestmark = [pytest.mark.avr, pytest.mark.kafka]


async def ends(bench: Scene, count: int) -> dict[str, dict[str, Any]]:
    """The ends of commands by their ids, once there are so many."""
    async with asyncio.timeout(patience(60)):
        while True:
            events = [each for each in await bench.events() if header(each, "ce_type").endswith(COMMAND_ENDED)]
            bodies = [json.loads(each.value) for each in {header(each, "ce_id"): each for each in events}.values()]
            if len(bodies) >= count:
                assert len(bodies) == count
                return {body["id"]: body for body in bodies}
            await asyncio.sleep(0.3)


async def test_a_command_from_the_cloud_switches_the_led_of_a_board(tmp_path: Path, kafka: Broker) -> None:
    async with scene(tmp_path, kafka, "commands") as bench:
        topic = f"{bench.name}-commands.gw1"
        await until_made(kafka.bootstrap, topic)
        serial = await bench.switch_on(1, "s", interval_ms=500)
        modem = await bench.switch_on(1, "w", interval_ms=500, options=bench.on_mqtt())
        await bench.until_acknowledged(2)
        boards = [*serial, *modem]
        assert not any(board.led_is_on for board in boards)
        on = [command_record(f"on-{board.device}", board.device, b"led=1") for board in boards]
        odd = [command_record(f"odd-{board.device}", board.device, b"fan=1") for board in boards]
        await send_commands(kafka.bootstrap, {topic: [*on, *odd]})
        await until(lambda: all(board.led_is_on for board in boards), 60)
        found = await ends(bench, 4)
        assert {name: (end["outcome"], end["reason"]) for name, end in found.items()} == {
            "on-s1": ("delivered", None),
            "on-w1": ("delivered", None),
            # A frame has room for an answer. A PUBACK can only say that it came.
            "odd-s1": ("refused", "refused-by-device"),
            "odd-w1": ("delivered", None),
        }
        assert {found["on-s1"]["by"], found["on-w1"]["by"]} == {"serial", "mqtt"}
        await send_commands(kafka.bootstrap, {topic: [command_record("off", "s1", b"led=0")]})
        await until(lambda: not serial[0].led_is_on, 60)
        account = await bench.finish()
    assert not account.faults_of_killed
