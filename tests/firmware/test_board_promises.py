"""The gateway's promises, with real firmware with 2 KB of RAM on bad lines: the firmware's ledger against Kafka.

In every scene: nothing acknowledged is missing, no value is another than the one that was measured, nothing stands
under two ids, and what a ring dropped is a loss record, counted unless the gateway was killed. SLUICE_TEST_SEED chooses
the random schedules.
"""

import asyncio
import json
import random
import signal
import struct
import zlib
from contextlib import nullcontext, suppress
from datetime import datetime
from itertools import cycle
from pathlib import Path

import pytest

from demo.kafka_broker import Broker, OwnBroker
from sluice_sim.avr import AvrOptions, Board
from sluice_sim.avr_board import RefusedError
from sluice_sim.avr_faults import Build, FaultRate, schedule
from tests.support.board_scene import known, scene
from tests.support.gateways import header
from tests.support.kill_loop import stalling
from tests.support.sizes import SEED, size
from tests.support.waiting import patience

pytestmark = [pytest.mark.avr, pytest.mark.kafka]

RESETS = size(8, 50)
KILLS = size(2, 8)
WRAP_MS = 2**32
BOOT_SLOT_B = 16
RESET_KINDS = ("reset", "power-cycle", "brown-out", "brown-out-in-write 20 2")


def boots(board: Board) -> list[str]:
    return [json.loads(line)["boot"] for line in board.ledger.read_text().splitlines()]


def newest_boot(board: Board) -> int:
    """The boot counter as it stands in the two slots of the EEPROM."""
    image = board.eeprom.read_bytes()
    slots = [struct.unpack_from("<III", image, at) for at in (0, BOOT_SLOT_B)]
    return max((boot for boot, run, crc in slots if zlib.crc32(struct.pack("<II", boot, run)) == crc), default=0)


async def do(board: Board, command: str) -> None:
    await asyncio.to_thread(board.do, command)


@pytest.mark.campaign(seconds=20)
@pytest.mark.parametrize(("rate", "least"), [(1e-3, size(40, 200)), (1e-2, size(40, 150))])
async def test_byte_errors_on_the_line_lose_nothing_untold_and_make_nothing_wrong(
    tmp_path: Path, kafka: Broker, rate: float, least: int
) -> None:
    async with scene(tmp_path, kafka, f"noise-{rate}") as bench:
        boards = await bench.switch_on(size(2, 4), "s")
        # Heard first: where noise hits three HELLOs in a row, a ring of 3.2 s is full before anybody listens.
        await bench.until_acknowledged(1)
        for board in boards:
            await do(board, f"noise {rate}")
        await bench.until_acknowledged(least)
        account = await bench.finish()
        assert account.faults == (), str(account)


@pytest.mark.campaign(seconds=25)
async def test_unplugged_in_the_middle_of_frames_and_plugged_in_as_another_port(tmp_path: Path, kafka: Broker) -> None:
    async with scene(tmp_path, kafka, "unplug") as bench:
        boards = await bench.switch_on(2, "s")
        await bench.until_acknowledged(10)
        for number in range(size(4, 10)):
            board = boards[number % 2]
            await do(board, "unplug in-frame")
            await asyncio.sleep(0.2)
            await do(board, "plug" if number % 3 else "plug same")
            await asyncio.sleep(0.6)
        # Longer than a ring lasts. Samples that it drops meanwhile become a loss record.
        await do(boards[0], "unplug")
        await asyncio.sleep(5)
        await do(boards[0], "plug")
        await bench.until_acknowledged(size(60, 200))
        account = await bench.finish()
        assert account.faults == (), str(account)
        assert known(boards[0]).dropped


@pytest.mark.campaign(seconds=30)
async def test_resets_one_after_the_other(tmp_path: Path, kafka: Broker) -> None:
    async with scene(tmp_path, kafka, "resets") as bench:
        boards = [*await bench.switch_on(1, "s"), *await bench.switch_on(1, "w", options=bench.on_mqtt())]
        await bench.until_acknowledged(5)
        draw = random.Random(50)  # noqa: S311 - repeatable
        for kind in (kind for kind, _ in zip(cycle(RESET_KINDS), range(RESETS), strict=False)):
            before = [newest_boot(board) for board in boards]
            await asyncio.gather(*(do(board, kind) for board in boards))
            await asyncio.sleep(draw.uniform(0.05, 0.8))
            # The next one is for a chip that runs again.
            async with asyncio.timeout(patience(30)):
                while any(newest_boot(board) == boot for board, boot in zip(boards, before, strict=True)):
                    await asyncio.sleep(0.005)
        account = await bench.finish()
        assert account.faults == (), str(account)
        for board in boards:
            assert len(set(boots(board))) > RESETS, "every reset is a boot of its own"


@pytest.mark.campaign(seconds=40)
async def test_the_gateway_is_killed_while_frames_are_in_flight(tmp_path: Path, own_kafka: OwnBroker) -> None:
    async with scene(tmp_path, own_kafka, "kills") as bench:
        await bench.switch_on(size(1, 3), "s", options=AvrOptions(noise=1e-3))
        await bench.switch_on(size(1, 2), "w", options=bench.on_mqtt())
        await bench.until_acknowledged(5)
        draw = random.Random(9)  # noqa: S311 - repeatable
        for number in range(KILLS):
            await bench.until_direct()
            # In every second turn Kafka is slow, so that the disk gets some of the frames.
            async with stalling(own_kafka, draw) if number % 2 else nullcontext():
                await asyncio.sleep(draw.uniform(0.0, 1.5))
                bench.end_gateway()
            await bench.start_gateway()
        await bench.until_acknowledged(60)
        account = await bench.finish()
        assert account.faults_of_killed == (), str(account)
        assert account.uncounted, "Kafka had frames before the disk"


@pytest.mark.long(seconds=50)
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
async def test_drops_of_rings_are_reported_when_the_gateway_is_back(
    tmp_path: Path, kafka: Broker, by: signal.Signals
) -> None:
    async with scene(tmp_path, kafka, f"away-{by}") as bench:
        await bench.switch_on(2, "s")
        await bench.switch_on(1, "w", options=bench.on_mqtt())
        await bench.until_direct()
        await bench.until_acknowledged(20)
        bench.end_gateway(by)
        await asyncio.sleep(6)
        await bench.start_gateway()
        await bench.until_acknowledged(60)
        account = await bench.finish()
        assert (account.faults_of_killed if by == signal.SIGKILL else account.faults) == (), str(account)
        for board in bench.boards:
            assert len(known(board).dropped) > 10


@pytest.mark.campaign(seconds=40)
async def test_drops_of_rings_are_reported_although_the_gateway_is_killed_on_a_noisy_line(
    tmp_path: Path, kafka: Broker
) -> None:
    async with scene(tmp_path, kafka, "away-noise") as bench:
        await bench.switch_on(size(2, 4), "s", options=AvrOptions(noise=1e-2))
        await bench.until_acknowledged(20)
        for _ in range(size(1, 3)):
            bench.end_gateway()
            await asyncio.sleep(5)
            await bench.start_gateway()
            await asyncio.sleep(3)
        account = await bench.finish()
        assert account.faults_of_killed == (), str(account)


async def test_the_tick_wraps_in_the_midst(tmp_path: Path, kafka: Broker) -> None:
    async with scene(tmp_path, kafka, "wrap") as bench:
        boards = await bench.switch_on(2, "s", options=AvrOptions(clock_start_ms=WRAP_MS - 4_000))
        await bench.until_acknowledged(160)
        account = await bench.finish()
        assert account.faults == (), str(account)
        for board in boards:
            of_board = [record for record in await bench.records() if record.key == board.device.encode()]
            of_board.sort(key=lambda record: int(header(record, "ce_devicesequence")))
            times = [datetime.fromisoformat(header(record, "ce_time")) for record in of_board]
            received = [datetime.fromisoformat(header(record, "ce_receivedtime")) for record in of_board]
            assert times == sorted(times)
            lateness_s = [(came - at).total_seconds() for at, came in zip(times, received, strict=True)]
            assert all(0 <= late < 3 for late in lateness_s), "no jump of 49.7 days"
            assert {header(record, "ce_timequality") for record in of_board[-50:]} == {"estimated"}


async def test_an_erased_eeprom_in_the_midst(tmp_path: Path, kafka: Broker) -> None:
    async with scene(tmp_path, kafka, "erased") as bench:
        boards = [*await bench.switch_on(1, "s"), *await bench.switch_on(1, "w", options=bench.on_mqtt())]
        await bench.until_acknowledged(40)
        for _ in range(2):
            # It resets the chip. The counter begins again, and only the random part keeps its boots apart.
            for board in boards:
                await do(board, "erase-eeprom counter")
            await asyncio.sleep(3)
        account = await bench.finish()
        assert account.faults == (), str(account)
        for board in boards:
            assert len(boots(board)) == 3
            assert {boot.partition("-")[0] for boot in boots(board)} == {"1"}
            assert len(set(boots(board))) == 3


@pytest.mark.campaign(seconds=30)
async def test_the_way_of_mqtt_breaks_again_and_again(tmp_path: Path, kafka: Broker) -> None:
    async with scene(tmp_path, kafka, "wifi") as bench:
        boards = await bench.switch_on(size(2, 3), "w", options=bench.on_mqtt())
        await bench.until_acknowledged(10)
        for number in range(size(2, 6)):
            board = boards[number % len(boards)]
            await do(board, "wifi off")
            await asyncio.sleep(0.5 + number % 2 * 5)
            await do(board, "wifi on")
            await do(boards[(number + 1) % len(boards)], "modem-reset")
        await bench.until_acknowledged(60)
        account = await bench.finish()
        assert account.faults == (), str(account)


@pytest.mark.campaign(seconds=35)
@pytest.mark.parametrize("build", ["serial", "mqtt"])
async def test_a_random_schedule_of_everything_at_once(tmp_path: Path, kafka: Broker, build: Build) -> None:
    async with scene(tmp_path, kafka, f"random-{build}") as bench:
        options = bench.on_mqtt() if build == "mqtt" else AvrOptions()
        boards = await bench.switch_on(size(2, 4), "b", options=options)
        await bench.until_acknowledged(5)
        await run_schedule(boards, build)
        account = await bench.finish()
        assert account.faults == (), f"seed {SEED}: {account}"


async def run_schedule(
    boards: list[Board], build: Build, *, seed: str = str(SEED), per_minute: float = 20, seconds: float = size(10, 25)
) -> None:
    """Strike the boards with a schedule's faults, and end the faults that it has begun."""
    by_name = {board.device: board for board in boards}
    loop = asyncio.get_running_loop()
    began = loop.time()
    faults = schedule(FaultRate(seed, per_minute), list(by_name), build)
    for fault in faults:
        if fault.at_s > seconds:
            break
        await asyncio.sleep(max(0.0, began + fault.at_s - loop.time()))
        with suppress(RefusedError):
            await do(by_name[fault.device], fault.command)
    # "unplug in-frame" waits for a frame.
    await asyncio.sleep(2)
    for board in boards:
        ends = ("wifi on",) if build == "mqtt" else ("plug same", "noise 0", "baud auto")
        for command in (*ends, "ppm 0"):
            # It is plugged in already, as a rule.
            with suppress(RefusedError):
                await do(board, command)
