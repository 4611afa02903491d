"""A stolen sensor beside a good one, and before the real daemon: it fills what it may of the buffer, and no more."""

import asyncio
import hashlib
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.buffer.status import read_status
from gateway.daemon.control import state_of
from tests.support.gateways import SLUICE, daemon, free_port, write_config
from tests.support.mosquitto import MOSQUITTO, Mosquitto
from tests.support.mqtt_peers import ACCEPTED, connect, field
from tests.support.waiting import patience

UNREACHABLE = "127.0.0.1:1"
BUFFER_BYTES = 20_000_000
BIG = bytes(63_000)
ANSWER_S = 5.0
"""A good sensor's reading is acknowledged within this, however busy the machine is: it is a matter of milliseconds."""


def write_attacked(directory: Path, port: int, extra: str = "") -> Path:
    config = write_config(directory, UNREACHABLE, port, "attacked", extra)
    users = "".join(f'{name} = "{hashlib.sha256(name.encode()).hexdigest()}"\n' for name in ("bad", "good"))
    text = config.read_text().replace("[buffer]\n", f"[buffer]\nbytes_max = {BUFFER_BYTES}\ncommit_delay_ms = 0\n")
    config.write_text(text.replace("anonymous = true\n", f"[mqtt_listener.users]\n{users}"))
    return config


def publish(topic: str, payload: bytes, packet_id: int) -> bytes:
    body = field(topic) + packet_id.to_bytes(2, "big") + payload
    length, left = bytearray(), len(body)
    while left > 127:
        length.append(left % 128 | 0x80)
        left //= 128
    length.append(left)
    return bytes((0x32, *length)) + body


@asynccontextmanager
async def let_in(
    port: int, name: str, login: tuple[str, str] | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(connect(name, login=login))
        assert await reader.readexactly(4) == ACCEPTED
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def flood(port: int, told: list[int]) -> None:
    """Send 63 kB readings as fast as they are taken, on a new connection whenever one is closed, until cancelled."""
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            async with let_in(port, "bad", ("bad", "bad")) as (reader, writer):
                for number in range(60_000):
                    writer.write(publish("device/bad/thermo", BIG, number + 1))
                    await writer.drain()
                    if reader.at_eof():
                        break
        told.append(1)
        await asyncio.sleep(0.05)


async def acknowledged(port: int, count: int) -> float:
    """Send readings as a good sensor does, each after the PUBACK before; the longest wait in seconds."""
    longest_s = 0.0
    async with let_in(port, "good", ("good", "good")) as (reader, writer):
        for number in range(1, count + 1):
            begun_s = time.monotonic()
            writer.write(publish("device/good/thermo", b'{"celsius": %d}' % number, number))
            async with asyncio.timeout(patience(ANSWER_S)):
                assert await reader.readexactly(4) == b"\x40\x02" + number.to_bytes(2, "big")
            longest_s = max(longest_s, time.monotonic() - begun_s)
    return longest_s


def above_share(buffer: Path) -> dict[str, int]:
    """Devices that are reported to hold too much, and how much they hold."""
    return {each["device"]: each["bytes"] for each in state_of(buffer)["buffer"]["above_share"]}


def status(config: Path) -> str:
    command = (str(SLUICE), "status", "--config", str(config))
    shown = subprocess.run(command, check=False, capture_output=True, timeout=patience(30))
    return shown.stdout.decode()


def broker_state(buffer: Path) -> dict[str, Any]:
    """The daemon's report on its one broker."""
    (state,) = state_of(buffer)["mqtt_brokers"].values()
    return dict(state)


async def until_above_share(buffer: Path) -> dict[str, int]:
    async with asyncio.timeout(patience(60)):
        while not (above := above_share(buffer)):
            await asyncio.sleep(0.1)
    return above


async def test_a_stolen_sensor_that_fills_the_buffer_costs_a_good_one_nothing(tmp_path: Path, port: int) -> None:
    config = write_attacked(tmp_path, port)
    buffer = tmp_path / "buffer.db"
    connections: list[int] = []
    with daemon(config, port):
        async with asyncio.TaskGroup() as tasks:
            attack = tasks.create_task(flood(port, connections))
            above = await until_above_share(buffer)
            await acknowledged(port, 300)
            attack.cancel()
        assert above.keys() == {"bad"}
        assert 0.4 * BUFFER_BYTES < above["bad"] < 0.55 * BUFFER_BYTES
        state = state_of(buffer)
        assert not state["buffer"]["full"]
        assert state["counts"]["share-refused"] > 0
        assert state["counts"].get("dropped", 0) == 0
        assert "More than their share of the buffer is held by bad (" in status(config)
    log = config.with_suffix(".log").read_text()
    assert 1 <= log.count("devices hold more than their share of the buffer") <= 3
    assert connections
    assert read_status(buffer).losses == {}


@pytest.mark.skipif(not Path(MOSQUITTO).exists(), reason="mosquitto is not installed")
async def test_a_brokers_bad_device_does_not_stop_its_good_ones(tmp_path: Path) -> None:
    port, broker = free_port(), Mosquitto(tmp_path / "mosquitto")
    broker.start()
    try:
        extra = f'[[mqtt_brokers]]\nhost = "127.0.0.1"\nport = {broker.port}\ntopics = ["device/#"]\n'
        config = write_attacked(tmp_path, port, extra)
        buffer = tmp_path / "buffer.db"
        with daemon(config, port):
            async with asyncio.timeout(patience(20)):
                while not broker_state(buffer)["connected"]:
                    await asyncio.sleep(0.1)
            rounds = BUFFER_BYTES // len(BIG)
            async with let_in(broker.port, "feeder") as (reader, writer):
                for number in range(1, rounds + 1):
                    writer.write(publish("device/bad/thermo", BIG, number))
                    writer.write(publish("device/good/thermo", b'{"celsius": %d}' % number, rounds + number))
                    await reader.readexactly(8)
            async with asyncio.timeout(patience(60)):
                while broker_state(buffer)["readings"] < 2 * rounds:
                    await asyncio.sleep(0.1)
            await asyncio.sleep(1.5)  # loss counters come to the disk within a second
            assert above_share(buffer).keys() == {"bad"}
            counts = state_of(buffer)["counts"]
        found = read_status(buffer)
        assert found.losses_by_device == {"bad": counts["above-share"]}
        assert found.losses_by_device["bad"] > rounds // 4
        assert rounds <= found.rows - (rounds - counts["above-share"]) <= rounds + 10, "all of the good one's"
    finally:
        broker.stop()
