"""The bench's load generator gives a true account of its packets, their acknowledgements, and its resends."""

import asyncio
import json
import sqlite3
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bench.load import DeviceLedger, LoadError, build, load, read_ledger, run_load
from tests.bench.report import Report, Result, save
from tests.support.gateways import daemon, free_port, write_config
from tests.support.stream_server import speaking
from tests.support.waiting import patience

UNREACHABLE = "127.0.0.1:1"
CONNACK = b"\x20\x02\x00\x00"
CONNACK_SESSION_PRESENT = b"\x20\x02\x01\x00"


@pytest.fixture(scope="module", autouse=True)
def _generator() -> None:
    build()


@dataclass(frozen=True)
class Packet:
    """A packet of a sensor: its first byte, and the content of a PUBLISH."""

    first: int
    packet_id: int = 0
    topic: str = ""
    payload: bytes = b""


async def read_packet(reader: asyncio.StreamReader) -> Packet:
    first, length = await reader.readexactly(2)
    if length & 0x80:
        length = length & 0x7F | (await reader.readexactly(1))[0] << 7
    body = await reader.readexactly(length)
    if first & 0xF0 == 0x30:
        (topic_length,) = struct.unpack_from(">H", body)
        (packet_id,) = struct.unpack_from(">H", body, 2 + topic_length)
        return Packet(first, packet_id, body[2 : 2 + topic_length].decode(), body[4 + topic_length :])
    return Packet(first, int.from_bytes(body[:2], "big") if first == 0x62 else 0)


def acknowledgement(first: int, packet_id: int) -> bytes:
    return bytes((first, 2)) + packet_id.to_bytes(2, "big")


async def test_a_reading_carries_the_sensor_s_identity_in_40_bytes() -> None:
    seen: list[Packet] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_packet(reader)
        writer.write(CONNACK)
        while True:
            seen.append(await read_packet(reader))
            writer.write(acknowledgement(0x40, seen[-1].packet_id))

    async with speaking(serve) as port:
        done = await run_load(port, connections=1, window=10, messages=1_000)
    assert (done.sent, done.acknowledged) == (1_000, 1_000)
    assert {len(packet.payload) for packet in seen} == {40}
    assert [json.loads(packet.payload)["seq"] for packet in seen] == list(range(1_000))
    assert {(packet.topic, json.loads(packet.payload)["boot"]) for packet in seen} == {("device/d000/thermo", "b0000")}


async def test_with_ticks_a_reading_says_when_it_was_taken_in_58_bytes_also_when_it_comes_again() -> None:
    connections: list[list[Packet]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_packet(reader)
        writer.write(CONNACK if not connections else CONNACK_SESSION_PRESENT)
        seen: list[Packet] = []
        connections.append(seen)
        while len(connections) > 1 or len(seen) < 6:
            seen.append(await read_packet(reader))
            if len(connections) > 1:
                writer.write(acknowledgement(0x40, seen[-1].packet_id))

    before_ms = time.monotonic_ns() // 1_000_000
    async with speaking(serve) as port:
        options: dict[str, bool | int | str] = {"persistent": True, "reconnect": True, "tick": "tick"}
        done = await run_load(port, connections=1, window=6, messages=20, **options)
    after_ms = time.monotonic_ns() // 1_000_000
    first, second = connections
    assert done.acknowledged == 20
    assert {len(packet.payload) for packet in first + second} == {58}
    assert [packet.payload for packet in second[:6]] == [packet.payload for packet in first]
    ticks = [json.loads(packet.payload)["tick"] for packet in second]
    assert ticks == sorted(ticks)
    assert before_ms <= ticks[0] <= ticks[-1] <= after_ms


async def test_the_ledger_holds_what_was_acknowledged_and_no_more(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_packet(reader)
        writer.write(CONNACK)
        packets = [await read_packet(reader) for _ in range(8)]
        for answered in (0, 1, 2, 4, 6):
            writer.write(acknowledgement(0x40, packets[answered].packet_id))
        await read_packet(reader)

    ledger = tmp_path / "ledger"
    async with speaking(serve) as port:
        with pytest.raises(LoadError, match="3 readings were not acknowledged in time"):
            await check_exit(port, connections=1, window=8, messages=8, grace=0.3, ledger=ledger)
    assert read_ledger(ledger) == [DeviceLedger("d000", "b0000", 8, [(0, 2), (4, 4), (6, 6)])]


async def check_exit(port: int, **options: float | str | Path | bool) -> None:
    """Run the generator, and raise its output if its exit code is not 0."""
    async with load(port, **options) as running:
        await running.event("connected")
        await running.done()
        assert running.process.stderr is not None
        if running.process.returncode:
            raise LoadError((await running.process.stderr.read()).decode())


async def test_after_a_cut_what_was_not_acknowledged_comes_again_with_dup_set(tmp_path: Path) -> None:
    """[MQTT-4.4.0-1]: the same packet ids and payloads in the same order, before anything new."""
    connections: list[list[Packet]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_packet(reader)
        seen: list[Packet] = []
        connections.append(seen)
        writer.write(CONNACK if len(connections) == 1 else CONNACK_SESSION_PRESENT)
        if len(connections) == 1:
            for number in range(6):
                seen.append(await read_packet(reader))
                if number in (0, 2):
                    writer.write(acknowledgement(0x40, seen[-1].packet_id))
            await writer.drain()
            await asyncio.sleep(0.1)
            return
        while True:
            seen.append(await read_packet(reader))
            writer.write(acknowledgement(0x40, seen[-1].packet_id))

    ledger = tmp_path / "ledger"
    async with speaking(serve) as port:
        options: dict[str, bool | int | Path] = {"persistent": True, "reconnect": True, "ledger": ledger}
        done = await run_load(port, connections=1, window=6, messages=20, **options)
    first, second = connections
    unanswered = [packet for packet in first if packet not in (first[0], first[2])]
    again = [packet for packet in second if packet.first & 0x08]
    assert again[: len(unanswered)] == [
        Packet(packet.first | 0x08, packet.packet_id, packet.topic, packet.payload) for packet in unanswered
    ]
    assert [packet.first & 0x08 for packet in second] == [0x08] * len(again) + [0] * (len(second) - len(again))
    assert (done.acknowledged, done.lost_connections, done.reconnects) == (20, 1, 1)
    assert read_ledger(ledger)[0].acknowledged == [(0, 19)]


async def test_at_a_rate_waiting_for_the_window_is_latency_and_nothing_due_is_left_out() -> None:
    """A gateway that takes 10 ms for each reading, where one is due every 5 ms: the last waits for half a second."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_packet(reader)
        writer.write(CONNACK)
        while True:
            packet = await read_packet(reader)
            await asyncio.sleep(0.01)
            writer.write(acknowledgement(0x40, packet.packet_id))

    async with speaking(serve) as port:
        done = await run_load(port, connections=1, window=1, rate=200, seconds=0.5)
    assert (done.sent, done.acknowledged) == (100, 100)
    assert done.max_ms > 450


async def test_qos_0_flat_out() -> None:
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        await read_packet(reader)
        writer.write(CONNACK)
        while (await reader.readexactly(2))[0] == 0x30:
            await reader.readexactly(2 + len("device/d000/thermo") + 40)
            seen += 1

    async with speaking(serve) as port:
        done = await run_load(port, connections=1, window=10, messages=500, qos=0)
        async with asyncio.timeout(patience(5)):
            while seen < 500:
                await asyncio.sleep(0.01)
    assert (done.sent, seen) == (500, 500)


async def test_qos_2_goes_on_with_pubrel_where_pubrec_had_come() -> None:
    connections: list[list[Packet]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_packet(reader)
        seen: list[Packet] = []
        connections.append(seen)
        writer.write(CONNACK if len(connections) == 1 else CONNACK_SESSION_PRESENT)
        while True:
            packet = await read_packet(reader)
            seen.append(packet)
            if packet.first == 0x62:
                if len(connections) == 1:
                    return
                writer.write(acknowledgement(0x70, packet.packet_id))
            else:
                writer.write(acknowledgement(0x50, packet.packet_id))
            await writer.drain()

    async with speaking(serve) as port:
        done = await run_load(port, connections=1, window=1, messages=3, qos=2, persistent=True, reconnect=True)
    assert [packet.first for packet in connections[0]] == [0x34, 0x62]
    assert [packet.first for packet in connections[1]] == [0x62, 0x34, 0x62, 0x34, 0x62]
    assert done.acknowledged == 3


@pytest.mark.slow
async def test_the_real_gateway_has_what_the_generator_was_told_also_when_it_is_killed(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, UNREACHABLE, port, "bench")
    ledger = tmp_path / "ledger"
    with daemon(config, port):
        done = await run_load(port, connections=20, window=20, seconds=1)
        assert done.acknowledged == done.sent == sum(done.by_second) > 0
        assert 0 < done.p50_ms <= done.p99_ms <= done.p999_ms
        at_rate = await run_load(port, connections=20, rate=400, seconds=0.5, boot="c")
        assert (at_rate.sent, at_rate.acknowledged) == (200, 200)
    with daemon(config, port) as first:
        async with load(
            port, connections=20, window=20, seconds=2.5, boot="e", reconnect=True, ledger=ledger
        ) as running:
            await running.event("connected")
            await asyncio.sleep(0.5)
            first.kill()
            first.wait()
            with daemon(config, port):
                killed = await running.done()
    assert (killed.acknowledged, killed.lost_connections) == (killed.sent, killed.reconnects)
    assert killed.reconnects >= 20
    told = {
        (device.boot, sequence)
        for device in read_ledger(ledger)
        for low, high in device.acknowledged
        for sequence in range(low, high + 1)
    }
    with sqlite3.connect(tmp_path / "buffer.db") as connection:
        stored = connection.execute(
            "SELECT device_boot, device_sequence FROM reading WHERE device_boot LIKE 'e%'"
        ).fetchall()
    connection.close()
    assert len(told) == killed.acknowledged
    assert sorted(stored) == sorted(told), "none missing, none stored twice"


def test_results_of_a_run_join_those_of_the_same_commit(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    load_average = {"before": [0.0, 0.0, 0.0]}
    one, two, three = Result("one", 1, "s"), Result("two", 2, "s", "<= 1"), Result("two", 3, "s")
    save(path, Report("aaa", {}, load_average, [one, two]))
    assert save(path, Report("aaa", {}, load_average, [three])).results == [one, three]
    assert save(path, Report("bbb", {}, load_average, [two])).results == [two]
    assert (two.met, one.met) == (False, None)
