"""The serial bench's foundations: the feeder's sensors, and the counts of frames, samples and time."""

import asyncio
import json
import os
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest
from aiokafka import ConsumerRecord

from gateway.serial_lines.frames import Ack, Data, Frame, FrameDecoder, Hello, HelloRequest, Probe, Reply, encode_frame
from sluice_sim.avr import Board, Network, build_firmware
from sluice_sim.avr_faults import Build
from tests.bench.parts_serial_boards import FLASH_SECTIONS, RAM_SECTIONS, lag_s, section_bytes
from tests.bench.parts_serial_goodput import first_accepted
from tests.bench.parts_serial_ports import known_of
from tests.bench.parts_serial_site import FRAME_BYTES_BESIDE_PAYLOAD
from tests.bench.serial_boards import Run, Told, boards, built, cpu_s, finish, known_by, read_ledger
from tests.bench.serial_feeder import BYTES_PER_S, Fed, Sensor, boot_name, centi_celsius, feed, run_of
from tests.support.board_audit import Sample
from tests.support.gateways import daemon, free_port, write_config

DEADLINE_S = 20.0
UNREACHABLE = "127.0.0.1:1"
F = TypeVar("F", bound=Frame)


class GatewayEnd:
    """The other end of a feeder's line, in the gateway's place."""

    def __init__(self, port: Path) -> None:
        self._fd = os.open(port, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        self._decoder = FrameDecoder()
        self._heard: list[Frame] = []
        self.reads: list[tuple[float, bytes]] = []
        """Time and bytes of each read."""

    def close(self) -> None:
        os.close(self._fd)

    def send(self, frame: Frame) -> None:
        os.write(self._fd, encode_frame(frame))

    async def frame(self, kind: type[F]) -> F:
        """The next frame of a kind; those of other kinds before it are passed over."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                while self._heard:
                    frame = self._heard.pop(0)
                    if isinstance(frame, kind):
                        return frame
                with suppress(BlockingIOError):
                    data = os.read(self._fd, 4_096)
                    self.reads.append((asyncio.get_running_loop().time(), data))
                    self._heard += self._decoder.feed(data)
                await asyncio.sleep(0.0005)


@asynccontextmanager
async def one_sensor(
    directory: Path, seconds: float, rate: float = 10.0, piece_bytes: int = 0
) -> AsyncIterator[tuple[GatewayEnd, asyncio.Task[Fed]]]:
    """A feeder of one port, and the gateway's end of that."""
    task = asyncio.create_task(feed(directory, 1, seconds, rate, piece_bytes))
    port = directory / "tty-d000"
    async with asyncio.timeout(DEADLINE_S):
        while not port.is_symlink():
            await asyncio.sleep(0.001)
    line = GatewayEnd(port)
    try:
        yield line, task
    finally:
        line.close()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


# -- the feeder


async def test_a_sensor_says_who_it_is_until_it_is_answered_and_tells_its_clock(tmp_path: Path) -> None:
    async with one_sensor(tmp_path, seconds=5) as (line, _):
        first, second = await line.frame(Hello), await line.frame(Hello)
        assert first == second, "no samples before it was answered"
        assert (first.device, f"{first.boot}-{first.incarnation:08x}") == ("d000", boot_name(0))
        line.send(Ack(run_of(0), 0, 0))
        line.send(Probe(7))
        reply, data = await line.frame(Reply), await line.frame(Data)
        assert reply.nonce == 7
        assert abs(data.tick_ms - reply.tick_ms) < 1_000, "one clock for samples and for probes"
        line.send(HelloRequest())
        assert (await line.frame(Hello)).oldest == 0


async def test_what_no_ack_has_named_comes_again(tmp_path: Path) -> None:
    async with one_sensor(tmp_path, seconds=1, rate=5) as (line, running):
        line.send(Ack(run_of(0), 0, 0))
        taken = [await line.frame(Data) for _ in range(5)]
        assert [data.sequence for data in taken] == [0, 1, 2, 3, 4]
        # 0, 2 and 4 are on disk.
        line.send(Ack(run_of(0), 1, 0b101))
        again = [await line.frame(Data) for _ in range(2)]
        assert again == [taken[1], taken[3]]
        line.send(Ack(run_of(0), 5, 0))
        fed = await asyncio.wait_for(running, DEADLINE_S)
    assert (fed.taken, fed.unacknowledged, fed.resent) == ([5], 0, 2)
    assert fed.ack_max_ms > 1_000, "a sample waits for its ACK from the first time that it was sent"


async def test_pieces_come_as_a_fifo_gives_them_no_faster_than_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    written: list[tuple[float, bytes]] = []
    monkeypatch.setattr(Sensor, "_write", lambda _sensor, data: written.append((loop.time(), data)))
    began = loop.time()
    running = asyncio.create_task(feed(tmp_path, 1, 5, piece_bytes=8))
    async with asyncio.timeout(DEADLINE_S):
        while not written or not written[-1][1].endswith(b"\0"):
            await asyncio.sleep(0.001)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    *pieces, last = [data for _, data in written]
    assert {len(piece) for piece in pieces} == {8}
    (hello,) = FrameDecoder().feed(b"".join((*pieces, last)))
    assert isinstance(hello, Hello)
    passed = 0
    for at, piece in written:
        passed += len(piece)
        # A busy machine makes it later, never sooner.
        assert at - began >= passed / BYTES_PER_S


async def test_the_real_gateway_stores_what_the_feeder_says_it_measured(tmp_path: Path) -> None:
    listener, ports = free_port(), tmp_path / "ports"
    section = f'[serial]\nports = ["{ports}/tty-*"]\nscan_interval_s = 0.1\n'
    with daemon(write_config(tmp_path, UNREACHABLE, listener, "feeder", section), listener):
        fed = await asyncio.wait_for(feed(ports, 3, seconds=1, rate=20, piece_bytes=8), DEADLINE_S)
    assert (fed.taken, fed.unacknowledged, fed.damaged) == ([20, 20, 20], 0, 0)
    with sqlite3.connect(tmp_path / "buffer.db") as connection:
        stored = connection.execute("SELECT device_boot, device_sequence, payload FROM reading WHERE tick_ms NOT NULL")
        readings = {(boot, sequence, bytes(payload)) for boot, sequence, payload in stored}
    connection.close()
    known = known_of(fed)
    assert readings == {
        (sample.boot, sample.sequence, b'{"celsius":%.2f}' % (value / 100))
        for sample, value in known.centi_celsius.items()
    }
    assert known.acknowledged == set(known.centi_celsius)


def test_all_that_was_taken_has_to_arrive() -> None:
    fed = Fed([2, 1], 1, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    first, second, other = (
        Sample("d000", boot_name(0), 0),
        Sample("d000", boot_name(0), 1),
        Sample("d001", boot_name(1), 0),
    )
    assert known_of(fed).centi_celsius == {
        first: centi_celsius(0, 0),
        second: centi_celsius(0, 1),
        other: centi_celsius(1, 0),
    }
    assert known_of(fed).acknowledged == {first, second, other}


# -- what is counted


@pytest.mark.parametrize("payload", [b"", b'{"celsius":21.53}', b"\0" * 64])
def test_a_data_frame_s_bytes_on_the_line(payload: bytes) -> None:
    frame = encode_frame(Data(2**32 - 1, 0, 7, 123_456, 0, payload))
    assert len(frame) == FRAME_BYTES_BESIDE_PAYLOAD + len(payload)


def record(ce_id: str, received: str, value: bytes) -> ConsumerRecord:
    headers: Sequence[tuple[str, bytes]] = (("ce_id", ce_id.encode()), ("ce_receivedtime", received.encode()))
    return ConsumerRecord("t", 0, 0, 0, 1, b"k", value, 0, 1, 1, headers)


def test_readings_count_by_their_receipt_and_once() -> None:
    records = [
        record("a", "1970-01-01T00:00:09.999999Z", b"early"),
        record("b", "1970-01-01T00:00:10.000000Z", b"four"),
        record("c", "1970-01-01T00:00:12.500000Z", b"threes"),
        record("c", "1970-01-01T00:00:12.500000Z", b"threes"),
        record("d", "1970-01-01T00:00:13.000000Z", b"late"),
    ]
    assert first_accepted(records, 10.0, 13.0) == [4, 6]


def run(taken: int, acknowledged: list[tuple[int, int]], dropped: list[tuple[int, int]]) -> Run:
    return Run(taken, acknowledged, dropped, stack=100, stack_room=1_000)


def test_what_a_board_holds_is_neither_acknowledged_nor_dropped() -> None:
    assert run(10, [(2, 4), (6, 6)], [(0, 1)]).held == 4
    assert Told(0.0, [run(10, [(2, 4)], []), run(3, [(0, 0)], [])]).acknowledged == 4


def test_a_chip_s_lag_is_what_its_samples_fall_short_of_the_time() -> None:
    first, last = Told(100.0, [run(50, [], [])]), Told(110.0, [run(145, [], [])])
    assert lag_s(first, last) == pytest.approx(0.5)


@pytest.mark.avr
@pytest.mark.parametrize("build", ["serial", "mqtt"])
async def test_a_boards_account_equals_the_readings_of_the_real_gateway(tmp_path: Path, build: Build) -> None:
    listener, ports = free_port(), tmp_path / "ports"
    ports.mkdir()
    section = f'[serial]\nports = ["{ports}/tty-*"]\nscan_interval_s = 0.1\n'
    network_of = (lambda _: Network(port=listener)) if build == "mqtt" else None
    await built(build)
    with daemon(write_config(tmp_path, UNREACHABLE, listener, "board", section), listener):
        with boards(ports, ("d000",), 50, network_of=network_of) as started:
            await acknowledged(started[0], 20)
            assert cpu_s(started) > 0
            await finish(started)
            assert read_ledger(started[0]).last.held == 0
        known = known_by(started[0])
    # On a busy machine the board's ring may overflow. It says so then, and its account holds all the same.
    assert known.acknowledged | known.dropped == set(known.centi_celsius)
    assert not known.acknowledged & known.dropped
    with sqlite3.connect(tmp_path / "buffer.db") as connection:
        stored = connection.execute(
            "SELECT device_sequence, payload FROM reading WHERE device_boot NOT NULL"
        ).fetchall()
    connection.close()
    value_of = {sample.sequence: value for sample, value in known.centi_celsius.items()}
    assert all(round(json.loads(payload)["celsius"] * 100) == value_of[sequence] for sequence, payload in stored)
    assert {sample.sequence for sample in known.acknowledged} <= {sequence for sequence, _ in stored}


async def acknowledged(board: Board, count: int) -> None:
    """Wait until a board has `count` of its samples acknowledged."""
    async with asyncio.timeout(DEADLINE_S):
        while not board.ledger.exists() or read_ledger(board).acknowledged < count:
            await asyncio.sleep(0.1)


@pytest.mark.avr
def test_flash_and_ram_are_what_the_build_prints() -> None:
    elf = build_firmware("serial")
    sections = section_bytes(elf)
    flash, ram = (sum(sections.get(name, 0) for name in names) for names in (FLASH_SECTIONS, RAM_SECTIONS))
    assert f"flash {flash} of 8192 bytes, static RAM {ram} of 1400 bytes" in elf.with_suffix(".size").read_text()
