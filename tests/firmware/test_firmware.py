"""The sensor's firmware in simavr: the serial build over a real pty, the MQTT build through a modem to the listener."""

import asyncio
import contextlib
import json
import random
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args

import pytest
import serial

from gateway.serial_lines.frames import (
    Ack,
    Data,
    Frame,
    FrameDecoder,
    Hello,
    HelloRequest,
    Probe,
    Reply,
    encode_frame,
)
from sluice_sim.avr import (
    BUILD,
    FIRMWARE,
    FIRMWARES,
    PROJECT,
    Board,
    Network,
    Wiring,
    build_firmware,
    inhibit_sampling,
    provision,
    start_board,
    stop_boards,
)
from sluice_sim.avr_faults import Build
from tests.support.firmware_host import bitmap
from tests.support.mqtt_peers import RecordingIntake, listening
from tests.support.waiting import patience, until

pytestmark = pytest.mark.avr

SOURCES = PROJECT / "firmware-sim" / "firmware"
SERIAL_MODULES = ("board", "command", "core", "crc32", "frame", "identity", "link_serial", "text")
FLASH_BYTES_MAX = 8192
RAM_BYTES_MAX = 1400
WINDOW = 8
RING = 64
PATIENCE_S = 10.0
POWER_ON = 1
WATCHDOG = 8

F = TypeVar("F", Hello, Data, Reply)


@dataclass
class GatewayEnd:
    """The other end of the line, in the gateway's place."""

    port: serial.Serial
    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    frames: list[Frame] = field(default_factory=list)
    run: int = 0
    received: set[int] = field(default_factory=set)
    """Every sequence that ever came."""
    acked: tuple[int, int] = (0, 0)
    """The last ACK. The gateway answers each HELLO of a known run with it."""

    def send(self, frame: Frame) -> None:
        self.port.write(encode_frame(frame))

    def ack(self, following: int, bitmap: int = 0) -> None:
        self.acked = following, bitmap
        self.send(Ack(self.run, following, bitmap))

    def of(self, kind: type[F]) -> list[F]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def sequences(self) -> list[int]:
        return [data.sequence for data in self.of(Data)]

    def until(self, condition: Callable[[], object]) -> None:
        """Read until the condition holds."""
        deadline = time.monotonic() + patience(PATIENCE_S)
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; received {self.frames}"
            self._read()

    def until_samples(self, count: int) -> None:
        self.until(lambda: len(self.of(Data)) >= count)

    def listen(self, seconds: float) -> None:
        """Read for a while, to see that nothing comes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._read()

    def _read(self) -> None:
        frames = self.decoder.feed(self.port.read(256))
        self.frames += frames
        self.received |= {frame.sequence for frame in frames if isinstance(frame, Data)}
        # The one that was asked for may follow the one of the start.
        if any(isinstance(frame, Hello) and frame.run == self.run for frame in frames):
            self.ack(*self.acked)

    def introduce(self) -> Hello:
        """Ask for HELLO and answer it. Frames from before are forgotten."""
        self.frames.clear()
        self.send(HelloRequest())
        self.until(lambda: self.of(Hello))
        hello = self.of(Hello)[0]
        self.frames.clear()
        # Where the port was opened in the middle of a frame, its end came alone.
        self.decoder.defects.clear()
        self.run = hello.run
        self.ack(hello.oldest)
        return hello

    def tick_ms(self, nonce: int) -> int:
        self.send(Probe(nonce))
        self.until(lambda: any(reply.nonce == nonce for reply in self.of(Reply)))
        return next(reply.tick_ms for reply in self.of(Reply) if reply.nonce == nonce)


class Bench:
    """A board on a bench: switched on and off, with a line to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.board: Board | None = None
        self.port: serial.Serial | None = None

    def on(self, interval_ms: int = 50, firmware: Path = FIRMWARE) -> GatewayEnd:
        provision(self.directory / "s1.eeprom", "s1", interval_ms)
        return self.on_as_it_is(firmware)

    def on_as_it_is(self, firmware: Path = FIRMWARE) -> GatewayEnd:
        self.board = start_board(self.directory, "s1", seed=7, firmware=firmware)
        self.port = serial.Serial(str(self.board.link), 38400, timeout=0.01)
        return GatewayEnd(self.port)

    def off(self) -> None:
        if self.port is not None:
            self.port.close()
            self.port = None
        if self.board is not None:
            stop_boards([self.board])
            self.board = None

    def stop_sampling(self) -> None:
        assert self.board is not None
        inhibit_sampling([self.board])

    def ledger(self) -> list[dict[str, Any]]:
        """Switch off and read the account, one entry for each boot."""
        self.off()
        return [json.loads(line) for line in (self.directory / "s1.ledger").read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def firmwares() -> dict[Build, Path]:
    for build in get_args(Build):
        build_firmware(build)
    return FIRMWARES


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.off()


# --- Size


@pytest.mark.parametrize("build", get_args(Build))
def test_flash_and_static_ram_stay_in_budget(firmwares: dict[Build, Path], build: Build) -> None:
    elf = firmwares[build]
    listed = subprocess.run(["avr-size", "-A", str(elf)], capture_output=True, text=True, check=True).stdout
    sizes = {
        parts[0]: int(parts[1])
        for line in listed.splitlines()
        if len(parts := line.split()) == 3 and parts[1].isdigit()
    }
    flash = sizes[".text"] + sizes[".data"]
    ram = sizes[".data"] + sizes[".bss"] + sizes.get(".noinit", 0)
    assert flash <= FLASH_BYTES_MAX
    assert ram <= RAM_BYTES_MAX
    assert (BUILD / f"sensor-{build}.size").read_text() == (
        f"sensor-{build}: flash {flash} of {FLASH_BYTES_MAX} bytes, static RAM {ram} of {RAM_BYTES_MAX} bytes\n"
    )


@pytest.mark.parametrize(("limit", "what"), [("FLASH_BYTES_MAX=5000", "flash"), ("RAM_BYTES_MAX=800", "static RAM")])
def test_a_build_over_budget_fails_and_says_by_how_much(tmp_path: Path, limit: str, what: str) -> None:
    make = ["make", "-C", str(PROJECT / "firmware-sim"), f"BUILD={tmp_path}", limit, "sensor-serial"]
    made = subprocess.run(make, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert f"of {limit.partition('=')[2]} bytes" in made.stdout
    assert what in made.stdout
    assert not (tmp_path / "sensor-serial.size").exists()


def test_the_sizes_in_the_readme_are_those_of_the_build(firmwares: dict[Build, Path]) -> None:
    readme = (PROJECT / "docs" / "firmware.md").read_text()
    for build in firmwares:
        assert (BUILD / f"sensor-{build}.size").read_text() in readme


def test_a_chip_with_more_ram_and_a_larger_ring_is_built_by_the_readmes_words(tmp_path: Path) -> None:
    readme = (PROJECT / "docs" / "firmware.md").read_text()
    (words,) = re.findall(r"make -C firmware-sim (.* MCU=atmega1284p \\\n +.*)", readme)
    arguments = [f"BUILD={tmp_path}" if word.startswith("BUILD=") else word for word in words.split() if word != "\\"]
    assert "DEFINES=-DRING_SAMPLES=256" in arguments
    make = ["make", "-C", str(PROJECT / "firmware-sim"), *arguments]
    made = subprocess.run(make, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert {path.name for path in tmp_path.glob("*.hex")} == {"sensor-serial.hex", "sensor-mqtt.hex"}


# --- Identity


def test_boot_counts_up_and_incarnation_stays_until_the_eeprom_is_erased(bench: Bench) -> None:
    first = bench.on().introduce()
    assert (first.device, first.boot, first.reset_cause, first.streams) == ("s1", 1, POWER_ON, ("thermo",))
    bench.off()
    second = bench.on_as_it_is().introduce()
    assert (second.boot, second.incarnation) == (2, first.incarnation)
    assert bench.board is not None
    bench.board.process.kill()
    bench.off()
    third = bench.on_as_it_is().introduce()
    assert (third.boot, third.incarnation) == (3, first.incarnation)
    bench.off()

    (bench.directory / "s1.eeprom").unlink()
    erased = bench.on_as_it_is().introduce()
    assert (erased.device, erased.boot) == ("unprovisioned", 1)
    assert erased.incarnation != first.incarnation


def test_a_boot_slot_spoilt_by_a_brown_out_leaves_the_other_one(bench: Bench) -> None:
    eeprom = bench.directory / "s1.eeprom"
    first = bench.on().introduce()
    bench.off()
    assert bench.on_as_it_is().introduce().boot == 2
    bench.off()
    # Boots 1 and 2 stand in slots A and B. Losing power while 3 is written spoils A.
    image = bytearray(eeprom.read_bytes())
    image[0:5] = b"\x03\0\0\xff\xff"
    eeprom.write_bytes(image)
    after = bench.on_as_it_is().introduce()
    assert (after.boot, after.incarnation) == (3, first.incarnation)


def test_a_main_loop_that_hangs_is_reset_by_the_watchdog_and_counts_as_a_new_boot(bench: Bench) -> None:
    loop = "for (;;) {"
    product = (SOURCES / "main.c").read_text()
    assert loop in product
    main = bench.directory / "hanging_main.c"
    main.write_text(product.replace(loop, f"if (!(board_reset_cause() & {WATCHDOG})) for (;;);\n{loop}"))
    elf = bench.directory / "hanging.elf"
    sources = [str(SOURCES / f"{name}.c") for name in SERIAL_MODULES]
    flags = ["-mmcu=atmega328p", "-DF_CPU=16000000UL", "-std=gnu11", "-Os", "-fshort-enums", "-I", str(SOURCES)]
    subprocess.run(["avr-gcc", *flags, "-o", str(elf), str(main), *sources], check=True)
    line = bench.on(firmware=elf)
    hello = line.introduce()
    assert (hello.boot, hello.reset_cause) == (2, WATCHDOG)
    line.until_samples(1)
    assert [entry["taken"] > 0 for entry in bench.ledger()] == [False, True]


def test_hello_is_repeated_until_acknowledged_and_given_when_asked_for(bench: Bench) -> None:
    line = bench.on()
    line.until(lambda: len(line.of(Hello)) >= 3)
    assert not line.of(Data), "nothing but HELLO before the gateway has answered"
    line.run = line.of(Hello)[0].run
    line.ack(0)
    line.until_samples(1)
    greetings = len(line.of(Hello))
    line.listen(1.2)
    assert len(line.of(Hello)) == greetings
    line.introduce()


# --- Data and acknowledgements


def test_samples_come_in_order_with_tick_and_json(bench: Bench) -> None:
    line = bench.on(interval_ms=50)
    line.introduce()
    # By windows, because the time of an answer is measured. A moment's pause here must not look like a loss.
    for count in range(WINDOW, 3 * WINDOW + 1, WINDOW):
        line.until_samples(count)
        line.ack(line.of(Data)[-1].sequence + 1)
    data = line.of(Data)
    assert [each.sequence for each in data] == list(range(len(data)))
    assert {each.run for each in data} == {line.run}
    assert all(abs(b.tick_ms - a.tick_ms - 50) <= 1 for a, b in pairwise(data))
    for each in data:
        assert 10 < json.loads(each.payload)["celsius"] < 30
    assert not line.decoder.defects


def test_cumulative_acknowledgement_moves_oldest_on(bench: Bench) -> None:
    line = bench.on()
    line.introduce()
    line.until_samples(3)
    assert {each.oldest for each in line.of(Data)} == {0}
    line.ack(2)
    line.until(lambda: line.of(Data)[-1].oldest == 2)
    line.ack(3)
    line.until(lambda: line.of(Data)[-1].oldest == 3)


def test_a_silent_gateway_gets_a_window_then_the_oldest_again_then_the_rest(bench: Bench) -> None:
    line = bench.on()
    line.introduce()
    line.until_samples(WINDOW + 2)
    assert line.sequences()[: WINDOW + 2] == [*range(WINDOW), 0, 0], "after a time-out the oldest alone tests the line"
    line.frames.clear()
    line.ack(1)
    line.until_samples(WINDOW)
    assert line.sequences()[:WINDOW] == [*range(1, WINDOW), WINDOW]


def test_bitmap_makes_it_send_only_what_is_missing(bench: Bench) -> None:
    line = bench.on()
    line.introduce()
    line.until_samples(WINDOW)
    bench.stop_sampling()
    line.listen(0.1)
    line.frames.clear()
    # 0, 1, 3 and 6 have arrived; 7 may still be on its way.
    line.ack(2, bitmap=0b1001)
    line.until(lambda: 5 in line.sequences())
    line.ack(2, bitmap=0b1001)
    line.listen(0.3)
    assert [sequence for sequence in line.sequences() if sequence < WINDOW] == [2, 4, 5]


def test_answers_for_another_run_are_ignored(bench: Bench) -> None:
    line = bench.on()
    line.introduce()
    line.until_samples(2)
    line.send(Ack(line.run + 1, 2, 0))
    line.ack(1000)
    line.tick_ms(1)
    line.frames.clear()
    line.until_samples(1)
    assert line.of(Data)[-1].oldest == 0
    assert bench.ledger()[0]["acknowledged"] == []


def test_a_gateway_that_forgot_us_gets_everything_unacknowledged_again(bench: Bench) -> None:
    line = bench.on()
    line.introduce()
    line.until_samples(3)
    line.ack(1)
    hello = line.introduce()
    assert hello.oldest == 1
    line.until_samples(3)
    assert line.sequences()[:3] == [1, 2, 3]


def test_full_ring_drops_the_oldest_and_says_so(bench: Bench) -> None:
    line = bench.on(interval_ms=10)
    line.introduce()
    line.until_samples(WINDOW)
    line.listen(0.9)
    bench.stop_sampling()
    line.listen(0.1)
    hello = line.introduce()
    assert hello.oldest > 0
    assert hello.next - hello.oldest == RING
    while hello.next - 1 not in line.sequences():
        line.until_samples(1)
        line.ack(line.sequences()[-1] + 1)
        line.listen(0.02)
    line.ack(hello.next)
    # The answer to a PROBE shows that the ACK before it was taken in.
    line.tick_ms(1)
    assert sorted(set(line.sequences())) == list(range(hello.oldest, hello.next))
    (account,) = bench.ledger()
    assert 0 < account.pop("stack") < account.pop("stack_room")
    assert account == {
        "device": "s1",
        "boot": f"1-{hello.incarnation:08x}",
        "taken": hello.next,
        "sent": len(line.received),
        "acknowledged": [[hello.oldest, hello.next - 1]],
        "dropped": [[0, hello.oldest - 1]],
    }


def test_ledger_has_exactly_what_was_acknowledged_for_each_boot(bench: Bench) -> None:
    chosen = random.Random(3)  # noqa: S311 - repeatable
    expected = []
    for _ in range(2):
        line = bench.on()
        hello = line.introduce()
        acknowledged: set[int] = set()
        lost: set[int] = set()
        while len(acknowledged) < 40:
            line.frames.clear()
            line.until_samples(1)
            for sequence in line.sequences():
                # One first transmission in three is lost on the way to the gateway.
                if sequence in lost or chosen.random() < 0.67:
                    acknowledged.add(sequence)
                else:
                    lost.add(sequence)
            oldest = line.of(Data)[-1].oldest
            following = next(n for n in range(oldest, 1000) if n not in acknowledged)
            line.ack(following, bitmap(following, acknowledged))
        # The answer to a PROBE shows that the last ACK before it was taken in.
        line.tick_ms(1)
        expected.append((f"{hello.boot}-{hello.incarnation:08x}", acknowledged))
        account = bench.ledger()[-1]
        assert account["sent"] <= account["taken"]
    assert [
        (entry["boot"], {n for first, last in entry["acknowledged"] for n in range(first, last + 1)})
        for entry in bench.ledger()
    ] == expected


# --- The line itself


def test_probe_is_answered_with_the_sensors_clock(bench: Bench) -> None:
    line = bench.on()
    line.introduce()
    ticks = []
    for nonce in (1, 0xFFFFFFFF, 0):
        ticks.append(line.tick_ms(nonce))
        line.listen(0.05)
    assert ticks[0] < ticks[1] < ticks[2]


def test_garbage_and_frames_that_are_too_long_do_no_harm(bench: Bench) -> None:
    noise = random.Random(11)  # noqa: S311 - repeatable
    line = bench.on()
    line.introduce()
    # That may have been the HELLO of the start; the one that was asked for comes before any sample.
    line.until_samples(1)
    line.frames = [*line.of(Data)]
    wrong_crc = bytearray(encode_frame(Ack(line.run, 3, 0)))
    wrong_crc[5] ^= 0x10
    nonces = range(10)
    for nonce in nonces:
        line.port.write(noise.randbytes(40) + b"\0")
        line.port.write(bytes(noise.randrange(1, 256) for _ in range(60)) + b"\0\0\0")
        line.port.write(wrong_crc)
        line.port.write(b"\x02\x05\x00" + encode_frame(HelloRequest())[:-2] + b"\0")
        line.tick_ms(nonce)
    assert [reply.nonce for reply in line.of(Reply)] == list(nonces)
    assert not line.of(Hello)
    assert {each.oldest for each in line.of(Data)} == {0}
    assert not line.decoder.defects


def test_what_nobody_listens_to_is_lost_and_the_board_goes_on(bench: Bench) -> None:
    provision(bench.directory / "s1.eeprom", "s1", 50)
    bench.board = start_board(bench.directory, "s1")
    time.sleep(0.5)
    for _ in range(2):
        with serial.Serial(str(bench.board.link), 38400, timeout=0.01) as port:
            line = GatewayEnd(port)
            hello = line.introduce()
            line.until_samples(1)
            assert line.of(Data)[0].sequence == hello.oldest == 0
            assert not line.decoder.defects
        # Closed: the window goes out into the void.
        time.sleep(0.3)


def test_the_tick_wraps_while_frames_are_under_way(bench: Bench) -> None:
    provision(bench.directory / "s1.eeprom", "s1", 50, clock_start_ms=2**32 - 1000)
    line = bench.on_as_it_is()
    line.introduce()
    while len(line.of(Data)) < 60:
        line.until_samples(len(line.of(Data)) + WINDOW)
        line.ack(line.of(Data)[-1].sequence + 1)
    ticks = [each.tick_ms for each in line.of(Data)]
    assert ticks[0] > 2**31 > ticks[-1]
    assert all(abs((b - a) % 2**32 - 50) <= 1 for a, b in pairwise(ticks))
    assert line.sequences() == list(range(len(ticks)))


# --- Over MQTT, through the runner's modem and real TCP


@contextlib.asynccontextmanager
async def mqtt_board(folder: Path, port: int, interval_ms: int = 100) -> AsyncIterator[Board]:
    provision(folder / "m001.eeprom", "m001", interval_ms, network=Network(port=port))
    board = start_board(folder, "m001", 5, FIRMWARES["mqtt"], Wiring(modem=True))
    try:
        yield board
    finally:
        await asyncio.to_thread(stop_boards, [board])


def stored(intake: RecordingIntake) -> list[dict[str, Any]]:
    return [json.loads(reading.datum.payload) for reading in intake.stored]


def account(board: Board) -> list[dict[str, Any]]:
    """The ledger: its boots."""
    return [json.loads(line) for line in board.ledger.read_text().splitlines()]


async def drained(board: Board) -> None:
    """Stop sampling, and wait until the ledger's file says that nothing is held."""
    inhibit_sampling([board])
    # The file is written twice a second.
    await asyncio.sleep(1)

    def nothing_is_held() -> bool:
        boot = account(board)[-1]
        decided = sequences(boot["acknowledged"]) + sequences(boot["dropped"])
        return len(decided) == int(boot["taken"])

    await until(nothing_is_held, 60)


def sequences(ranges: list[list[int]]) -> list[int]:
    return [n for first, last in ranges for n in range(first, last + 1)]


async def test_over_mqtt_samples_arrive_with_identity_value_and_tick(tmp_path: Path) -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, mqtt_board(tmp_path, listener.port) as board:
        await until(lambda: len(intake.stored) >= 50, 60)
        await drained(board)
    (boot,) = account(board)
    readings = stored(intake)
    assert boot["acknowledged"] == [[0, boot["taken"] - 1]]
    assert [reading["seq"] for reading in readings] == list(range(boot["taken"]))
    assert {reading["boot"] for reading in readings} == {boot["boot"]}
    assert all(abs(b["tick"] - a["tick"] - 100) <= 1 for a, b in pairwise(readings))
    taken = [int(line.split(",")[2]) for line in board.samples.read_text().splitlines() if line[0].isdigit()]
    assert [round(100 * reading["celsius"]) for reading in readings] == taken


async def test_over_mqtt_a_gateway_that_was_away_gets_what_the_ring_held_and_word_of_the_rest(tmp_path: Path) -> None:
    intake = RecordingIntake()
    async with contextlib.AsyncExitStack() as stack:
        async with listening(intake) as listener:
            board = await stack.enter_async_context(mqtt_board(tmp_path, listener.port, interval_ms=50))
            await until(lambda: len(intake.stored) >= 20, 60)
        await asyncio.sleep(5)
        async with listening(intake, listener.port):
            await until(lambda: any("lost" in reading for reading in stored(intake)), 60)
            await drained(board)
    (boot,) = account(board)
    arrived = {reading["seq"] for reading in stored(intake)}
    lost = sequences([reading["lost"] for reading in stored(intake) if "lost" in reading])
    assert sorted(lost) == sequences(boot["dropped"])
    assert lost
    assert sorted(arrived) == sequences(boot["acknowledged"])
    assert sorted([*arrived, *lost]) == list(range(boot["taken"]))


@pytest.mark.parametrize("command", ["reset", "power-cycle 300", "modem-reset"])
async def test_over_mqtt_after_a_reset_of_the_chip_or_of_the_modem_it_comes_back(tmp_path: Path, command: str) -> None:
    """The chip's reset leaves the modem in transparent mode, in the middle of whatever was being sent."""
    intake = RecordingIntake()
    async with listening(intake) as listener, mqtt_board(tmp_path, listener.port) as board:
        await until(lambda: len(intake.stored) >= 20, 60)
        await asyncio.to_thread(board.do, command)
        before = len(intake.stored)
        await until(lambda: len(intake.stored) >= before + 20, 60)
        await drained(board)
    boots = account(board)
    assert len(boots) == (1 if command == "modem-reset" else 2)
    for boot in boots:
        arrived = {reading["seq"] for reading in stored(intake) if reading["boot"] == boot["boot"]}
        assert arrived >= set(sequences(boot["acknowledged"]))
    assert sequences(boots[-1]["acknowledged"]) == [
        n for n in range(boots[-1]["taken"]) if n not in sequences(boots[-1]["dropped"])
    ]
