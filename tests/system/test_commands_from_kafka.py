"""Commands from a real Kafka through the daemon to real MQTT clients, and the one event in which each ends."""

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from demo.kafka_broker import Broker
from gateway.daemon import control
from gateway.record_contract import COMMAND_ENDED, GATEWAY_TYPES
from tests.support.commands import Sent, command_record, send_commands, until_made
from tests.support.gateways import consume, daemon, free_port, header, write_config
from tests.support.kafka_admin import create_topic
from tests.support.mqtt_programs import DIGEST, Job, running
from tests.support.sizes import SEED
from tests.support.waiting import patience, until

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed"),
]
KILLS = 4
COMMANDS = 12
KILLED_WITHIN_S = 0.3
"""From the first command that a client got of those that were sent last."""


def gateway_in(folder: Path, kafka: Broker, port: int, prefix: str, gateway: str = "gw1") -> Path:
    """Settings of a gateway with commands; its device is `m001`."""
    extra = f"""
[commands]
devices = ["m00*"]
per_device_max = 100
topic = "{prefix}-commands.{{gateway}}"
[mqtt_listener.users]
m001 = "{DIGEST}"
"""
    config = write_config(folder, kafka.bootstrap, port, prefix, extra)
    text = config.read_text().replace("anonymous = true\n", "").replace('id = "gw1"', f'id = "{gateway}"')
    config.write_text(text)
    return config


async def ends_of(kafka: Broker, prefix: str) -> list[dict[str, Any]]:
    """The ends of commands in the topic of events."""
    records = await consume(kafka.bootstrap, f"{prefix}-events")
    return [
        json.loads(record.value)
        for record in {header(record, "ce_id"): record for record in records}.values()
        if header(record, "ce_type") == f"{GATEWAY_TYPES}{COMMAND_ENDED}"
    ]


async def until_ended(kafka: Broker, prefix: str, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(patience(60)):
        while len(found := await ends_of(kafka, prefix)) < count:
            await asyncio.sleep(0.3)
    return found


def told(config: Path) -> dict[str, Any]:
    """The state of the commands, as the daemon tells it."""
    found: dict[str, Any] = control.call(control.socket_path(config.with_name("buffer.db")), "state")["commands"]
    return found


async def seen(condition: Callable[[], object]) -> None:
    await until(condition, 60)


async def test_commands_reach_a_device_and_each_ends_in_one_event(kafka: Broker, tmp_path: Path, port: int) -> None:
    config = gateway_in(tmp_path, kafka, port, "down")
    await create_topic(kafka.bootstrap, "down-commands.gw1")
    job = Job(port, "m001", "device/m001/thermo", 1, "command/m001/#")
    over = datetime.now(UTC) - timedelta(seconds=10)
    records = [
        command_record("now", "m001", b"1", "set"),
        command_record("late", "m001", b"2", expires=over),
        command_record("other", "x001", b"3"),
        command_record("nobody", "m009", b"4", expires=datetime.now(UTC) + timedelta(seconds=3)),
        Sent(b"no key of ours", b"5", []),
    ]
    with daemon(config, port), running("paho-python", job) as client:
        await seen(lambda: client.subscribed)
        await send_commands(kafka.bootstrap, {"down-commands.gw1": records})
        await seen(lambda: client.commands == {1})
        ends = await until_ended(kafka, "down", 5)
        state = told(config)
    assert client.wrong == []
    outcomes = {end["id"]: (end["outcome"], end["reason"]) for end in ends}
    assert outcomes == {
        "now": ("delivered", None),
        "late": ("expired", None),
        "other": ("refused", "not-listed"),
        "nobody": ("expired", None),
        None: ("refused", "no-device"),
    }
    assert (state["waiting"], state["error"], state["counts"]["read"]) == (0, None, 5)


async def test_a_sleeping_device_gets_its_command_when_it_wakes(kafka: Broker, tmp_path: Path, port: int) -> None:
    """The topic is made by the gateway. The command waits on disk, through a restart of the gateway."""
    config = gateway_in(tmp_path, kafka, port, "asleep")
    job = Job(port, "m001", "device/m001/thermo", 1, "command/m001/#")
    with daemon(config, port):
        with running("paho-python", job) as client:
            await seen(lambda: client.subscribed)
        await seen(lambda: told(config)["error"] is None)
        await until_made(kafka.bootstrap, "asleep-commands.gw1")
        await send_commands(kafka.bootstrap, {"asleep-commands.gw1": [command_record("c1", "m001", b"7")]})
        await seen(lambda: told(config)["waiting"] == 1)
    with daemon(config, port), running("paho-python", job) as client:
        await seen(lambda: client.commands == {7})
        (end,) = await until_ended(kafka, "asleep", 1)
        assert (end["id"], end["outcome"], end["by"]) == ("c1", "delivered", "mqtt")


@pytest.mark.slow
async def test_killed_in_the_middle_each_command_arrives_and_ends_once(
    kafka: Broker, tmp_path: Path, port: int
) -> None:
    """`kill -9` at any moment: a command may come twice, never not at all, and its end stands once in the events."""
    config = gateway_in(tmp_path, kafka, port, "shot")
    await create_topic(kafka.bootstrap, "shot-commands.gw1")
    job = Job(port, "m001", "device/m001/thermo", 1, "command/m001/#")
    chance = random.Random(SEED)  # noqa: S311 - repeatable is the point
    with running("paho-python", job) as client:
        for turn in range(KILLS):
            with daemon(config, port) as process:
                numbers = range(turn * COMMANDS, (turn + 1) * COMMANDS)
                records = [command_record(f"c{number}", "m001", b"%d" % number) for number in numbers]
                before = set(client.commands)
                await send_commands(kafka.bootstrap, {"shot-commands.gw1": records})
                await seen(lambda before=before: client.commands > before)  # type: ignore[misc]
                await asyncio.sleep(chance.uniform(0, KILLED_WITHIN_S))
                process.kill()
        with daemon(config, port):
            await seen(lambda: client.commands == set(range(KILLS * COMMANDS)))
            ends = await until_ended(kafka, "shot", KILLS * COMMANDS)
            await seen(lambda: told(config)["waiting"] == 0)
            ends = await ends_of(kafka, "shot")
    assert client.wrong == []
    assert Counter(end["id"] for end in ends) == Counter(f"c{number}" for number in range(KILLS * COMMANDS))
    assert {end["outcome"] for end in ends} == {"delivered"}


async def test_a_gateway_reads_nothing_that_is_for_another(kafka: Broker, tmp_path: Path) -> None:
    """Decision 103: what a gateway reads does not grow with the commands for others."""
    folders = [tmp_path / name for name in ("gw1", "gw2")]
    ports = [free_port(), free_port()]
    for folder in folders:
        folder.mkdir()
    configs = [gateway_in(folder, kafka, port, "two", folder.name) for folder, port in zip(folders, ports, strict=True)]
    for folder in folders:
        await create_topic(kafka.bootstrap, f"two-commands.{folder.name}")
    count, payload = 200, bytes(4_000)
    records = [command_record(f"c{number}", "x001", payload) for number in range(count)]
    with daemon(configs[0], ports[0]), daemon(configs[1], ports[1]):
        for config in configs:
            await seen(lambda config=config: told(config)["counts"] == {} and up(config))  # type: ignore[misc]
        before = [received_bytes(config) for config in configs]
        await send_commands(kafka.bootstrap, {"two-commands.gw1": records})
        await seen(lambda: told(configs[0])["counts"].get("read") == count)
        ends = await until_ended(kafka, "two", count)
        own, other = (received_bytes(config) - old for config, old in zip(configs, before, strict=True))
        assert told(configs[1])["counts"] == {}
    assert {end["reason"] for end in ends} == {"not-listed"}
    assert own > count * len(payload)
    assert other < own / 10, "its own heartbeats, and one poll at most"


def up(config: Path) -> bool:
    state: dict[str, Any] = control.call(control.socket_path(config.with_name("buffer.db")), "state")["uplink"]
    return bool(state["up"])


def received_bytes(config: Path) -> int:
    state: dict[str, Any] = control.call(control.socket_path(config.with_name("buffer.db")), "state")["uplink"]
    return int(state["wire_bytes"])
