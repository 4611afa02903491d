"""Other people's clients, as they are, publish through kills of the gateway; and paho a long backlog at once.

Some send all that they hold at CONNACK, and without DUP. Paho now and then sends a PUBLISH again after its PUBREL.
"""

import contextlib
import math
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.reading import Doubt
from tests.support.gateways import daemon, free_port, write_config
from tests.support.mqtt_programs import DIGEST, PROGRAMS, Job, Running, available, build, running
from tests.support.sizes import SEED
from tests.support.waiting import wait_until

READINGS = 10_000
"""Nearly three hours of a reading each second."""
READING_BYTES = 300
COMMANDS = 10
"""Fewer than may wait for one device."""
PAUSE_S_MAX = 0.3
"""From when all clients are under way until the gateway is killed."""
FINISH_S = 120.0
"""Seconds that the clients may take for the rest, with the gateway left alone."""


class Stored(NamedTuple):
    """Number of times that each reading of one device is stored."""

    all: Counter[str]
    unmarked: Counter[str]
    """Without those that are marked as possible copies."""


def stored_in(folder: Path, device: str) -> Stored:
    with contextlib.closing(sqlite3.connect(folder / "buffer.db")) as connection:
        rows = connection.execute(
            "SELECT CAST(payload AS TEXT), doubt FROM reading JOIN series ON series.number = reading.series"
            " WHERE series.type = 'sluice.reading' AND device = ?",
            (device,),
        ).fetchall()
    return Stored(
        Counter(payload for payload, _ in rows),
        Counter(payload for payload, doubt in rows if doubt != Doubt.REDELIVERED),
    )


def sent_by(program: Running) -> Counter[str]:
    return Counter(program.job.reading(number) for number in range(program.given))


def gateway_in(folder: Path, port: int, devices: Iterable[str]) -> Path:
    """Settings of a gateway without Kafka; each device has an operator of its own."""
    users = "".join(f'{device} = "{DIGEST}"\n' for device in devices)
    operators = "".join(f'{device}-operator = "{DIGEST}"\n' for device in devices)
    logins = f"[mqtt_listener.users]\n{users}[mqtt_listener.operators]\n{operators}"
    config = write_config(folder, f"127.0.0.1:{free_port()}", port, "clients", logins)
    text = config.read_text().replace("anonymous = true\n", "")
    # A client with 20 messages under way would need minutes for its share, as it waits for two commits each time.
    config.write_text(text.replace("[buffer]", "[buffer]\ncommit_delay_ms = 0"))
    return config


def test_a_backlog_of_ten_thousand_comes_through_on_one_connection(tmp_path: Path, port: int) -> None:
    config = gateway_in(tmp_path, port, ["m001"])
    job = Job(port, "m001", "device/m001/thermo", 2, window=READINGS, reading_bytes=READING_BYTES)
    with running("paho-python", job) as program:
        program.publish(READINGS)
        with daemon(config, port):
            wait_until(lambda: len(program.acknowledged) == READINGS, FINISH_S, lambda: str(program.wrong))
    assert (program.connections, program.wrong) == (1, [])
    assert stored_in(tmp_path, "m001").all == sent_by(program)


@pytest.mark.parametrize(
    ("kills", "level", "clients"),
    [
        pytest.param(3, 4, ["paho-python"], id="paho"),
        pytest.param(20, 4, list(PROGRAMS), id="all", marks=pytest.mark.long(seconds=120)),
        pytest.param(3, 5, ["paho-python"], id="paho-5"),
        pytest.param(20, 5, list(PROGRAMS), id="all-5", marks=pytest.mark.long(seconds=120)),
    ],
)
def test_kills_lose_nothing_and_double_nothing_without_a_mark(
    kills: int, level: int, clients: list[str], tmp_path: Path
) -> None:
    """Each client publishes with QoS 1 and with QoS 2, and gets commands that an operator publishes with the same."""
    clients = [client for client in clients if level in PROGRAMS[client].levels]
    tried = [client for client in clients if available(client)]
    for client in tried:
        build(client)
    kinds = {f"{client}-{qos}": (client, qos) for client in tried for qos in (1, 2)}
    least = READINGS * kills // 20
    chance = random.Random(SEED)  # noqa: S311 - repeatable is the point
    port = free_port()
    config = gateway_in(tmp_path, port, kinds)
    with contextlib.ExitStack() as stack:
        devices, operators = dict[str, Running](), dict[str, Running]()

        def all_of_them(condition: Callable[[str], bool]) -> None:
            """Wait until it holds for each kind of client."""
            wait_until(
                lambda: all(map(condition, kinds)),
                FINISH_S,
                lambda: str({name: devices[name].wrong for name in kinds if not condition(name)}),
            )

        with daemon(config, port) as process:
            for name, (client, qos) in kinds.items():
                readings = Job(port, name, f"device/{name}/thermo", qos, f"command/{name}/#", level=level)
                devices[name] = stack.enter_context(running(client, readings))
                commands = Job(port, f"{name}-operator", f"command/{name}/set", qos, window=1, level=level)
                operators[name] = stack.enter_context(running(client, commands))
            # Mosquitto's programs do not try again if the first connection fails.
            all_of_them(lambda name: devices[name].subscribed and devices[name].connections > 0)
            all_of_them(lambda name: operators[name].connections > 0)
            for name in kinds:
                operators[name].publish(COMMANDS)
                devices[name].publish(math.inf)
            if level == 5:
                # A gateway that ends in order sends DISCONNECT, after which libmosquitto does not connect again.
                process.kill()
        for _ in range(kills):
            with daemon(config, port) as process:
                before = {name: len(device.acknowledged) for name, device in devices.items()}
                all_of_them(lambda name: len(devices[name].acknowledged) > before[name])  # noqa: B023 - called here
                time.sleep(chance.uniform(0, PAUSE_S_MAX))
                process.kill()
        with daemon(config, port):
            for device in devices.values():
                device.publish(least)
            all_of_them(lambda name: devices[name].finished and devices[name].given >= least)
            all_of_them(lambda name: operators[name].finished)
            all_of_them(lambda name: devices[name].commands == operators[name].acknowledged)
    wrong = {name: devices[name].wrong + operators[name].wrong for name in kinds}
    stored = {name: stored_in(tmp_path, name) for name in kinds}
    sent = {name: sent_by(device) for name, device in devices.items()}
    assert not any(wrong.values()), wrong
    assert {name: (sent[name] - stored[name].all).total() for name in kinds} == dict.fromkeys(kinds, 0), "missing"
    doubled = {name: (stored[name].unmarked - sent[name]).total() for name in kinds if name.endswith("-2")}
    assert not any(doubled.values()), f"doubled, and not marked: {doubled}"
    if len(tried) < len(clients):
        needed = [PROGRAMS[client].needs for client in clients if client not in tried]
        pytest.skip(f"tried were {tried}: the others need {needed} on the PATH")
