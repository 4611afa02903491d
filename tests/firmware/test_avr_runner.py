"""The simulated board: each fault on the real firmware in simavr, and the runner's files about it."""

import csv
import ctypes
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import serial

from gateway.clock.kernel_clock import boottime_us
from gateway.serial_lines.frames import Ack, Data, Frame, FrameDecoder, Hello, HelloRequest, Probe, Reply, encode_frame
from sluice_sim.avr import AvrOptions, build_firmware, main_avr, start_boards
from sluice_sim.avr_board import (
    PROJECT,
    RUNNER,
    Board,
    RefusedError,
    SimulationError,
    Wiring,
    start_board,
    stop_boards,
)
from sluice_sim.avr_faults import FaultRate, schedule
from sluice_sim.provision import Network, provision
from tests.support.board_scene import known
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.waiting import patience, wait_until

pytestmark = pytest.mark.avr

SOURCES = PROJECT / "firmware-sim" / "runner"
PATIENCE_S = 20.0
FAULTS_S = 12.0
POWER_ON, EXTERNAL, BROWN_OUT = 1, 2, 4
BOOT_SLOT_B = 16


@dataclass
class Listener:
    """A gateway's end of the line that acknowledges all it gets."""

    port: serial.Serial
    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    hellos: list[Hello] = field(default_factory=list)
    stored: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """Payloads by boot and sequence."""
    samples: dict[int, bytes] = field(default_factory=dict)
    """Samples of the present boot."""
    ticks: dict[int, int] = field(default_factory=dict)

    @property
    def hello(self) -> Hello | None:
        return self.hellos[-1] if self.hellos else None

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + patience(PATIENCE_S)
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; hello {self.hello}, samples {list(self.samples)}"
            self.read()

    def read(self) -> None:
        for frame in self.decoder.feed(self.port.read(256)):
            self._answer(frame)

    def _answer(self, frame: Frame) -> None:
        if isinstance(frame, Hello):
            if self.hello is None or (frame.boot, frame.incarnation) != (self.hello.boot, self.hello.incarnation):
                self.samples, self.ticks = self.stored.setdefault(_boot(frame), {}), {}
            self.hellos.append(frame)
            self.port.write(encode_frame(Ack(frame.run, self._following(frame.oldest), 0)))
        elif isinstance(frame, Data) and self.hello is not None and frame.run == self.hello.run:
            self.samples[frame.sequence] = frame.payload
            self.ticks[frame.sequence] = frame.tick_ms
            self.port.write(encode_frame(Ack(frame.run, self._following(frame.oldest), 0)))
        elif isinstance(frame, Data):
            self.port.write(encode_frame(HelloRequest()))

    def _following(self, oldest: int) -> int:
        while oldest in self.samples:
            oldest += 1
        return oldest

    def until_reply(self, nonce: int) -> tuple[int, Reply]:
        """Wait for the answer to a PROBE. Returns its time in CLOCK_BOOTTIME, and its content."""
        deadline = time.monotonic() + patience(PATIENCE_S)
        while time.monotonic() < deadline:
            got = self.port.read(self.port.in_waiting or 1)
            received_us = boottime_us()
            for frame in self.decoder.feed(got):
                if isinstance(frame, Reply) and frame.nonce == nonce:
                    return received_us, frame
                self._answer(frame)
        raise AssertionError(f"no answer to PROBE {nonce}")

    def until_hello(self) -> Hello:
        """Wait for another one than there has been."""
        before = len(self.hellos)
        self.until(lambda: len(self.hellos) > before)
        return self.hellos[-1]

    def until_samples(self, count: int) -> None:
        """Wait for `count` more than there are."""
        wanted = len(self.samples) + count
        self.until(lambda: len(self.samples) >= wanted)


def _boot(hello: Hello) -> str:
    return f"{hello.boot}-{hello.incarnation:08x}"


class Bench:
    def __init__(self, directory: Path, firmware: Path) -> None:
        self.directory = directory
        self.firmware = firmware
        self.boards: list[Board] = []
        self.ports: list[serial.Serial] = []

    def on(self, wiring: Wiring | None = None, interval_ms: int = 50, clock_start_ms: int | None = None) -> Board:
        provision(self.directory / "s1.eeprom", "s1", interval_ms, clock_start_ms=clock_start_ms)
        board = start_board(self.directory, "s1", 7, self.firmware, wiring or Wiring())
        self.boards.append(board)
        return board

    def listen(self, board: Board, baud: int = 38400) -> Listener:
        port = serial.Serial(str(board.port()), baud, timeout=0.01)
        self.ports.append(port)
        return Listener(port)

    def off(self) -> None:
        for port in self.ports:
            port.close()
        stop_boards(self.boards)
        self.boards.clear()


@pytest.fixture(scope="module")
def firmware() -> Path:
    return build_firmware("serial")


@pytest.fixture
def bench(tmp_path: Path, firmware: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, firmware)
    yield made
    made.off()


def check(board: Board, stored: dict[str, dict[int, bytes]]) -> None:
    """Compare the firmware's acknowledged samples, and each value, with those of the listener."""
    with board.samples.open(newline="") as file:
        taken = {(row["boot"], int(row["sequence"])): int(row["centi_celsius"]) for row in csv.DictReader(file)}
    for boot in (json.loads(entry) for entry in board.ledger.read_text().splitlines()):
        name = boot["boot"]
        acknowledged = {number for first, last in boot["acknowledged"] for number in range(first, last + 1)}
        assert acknowledged <= set(stored.get(name, {})), f"boot {name}: acknowledged, and not there"
        for sequence, payload in stored.get(name, {}).items():
            assert payload == b'{"celsius":%.2f}' % (taken[name, sequence] / 100)


@pytest.mark.parametrize("ppm", [-8_000.0, 0.0, 8_000.0])
def test_samples_bear_their_true_time_however_wrong_the_boards_clock_is(bench: Bench, ppm: float) -> None:
    began_us = time.time_ns() // 1000
    board = bench.on(Wiring(ppm=ppm), interval_ms=50)
    heard = bench.listen(board)
    heard.until_samples(20)
    bench.off()
    ended_us = time.time_ns() // 1000

    with board.samples.open(newline="") as file:
        times_us = [int(row["time_us"]) for row in csv.DictReader(file)]
    assert began_us < times_us[0]
    assert times_us[-1] < ended_us
    # The chip counts whole milliseconds of its own: each sample but the very first is taken as one of them begins, or
    # within it where the chip is still at a frame.
    steps_us = [after - before for before, after in pairwise(times_us[1:])]
    expected_us = 50_000 / (1 + ppm / 1e6)
    assert steps_us == pytest.approx([expected_us] * len(steps_us), abs=1_000)
    assert median(steps_us) == pytest.approx(expected_us, abs=100)


def faults(board: Board) -> list[str]:
    return [str(fault["fault"]) for fault in board.faults()]


# --- Resets and power


def test_each_kind_of_reset_has_its_cause_and_counts_a_boot(bench: Bench) -> None:
    board = bench.on()
    line = bench.listen(board)
    causes = {"reset": EXTERNAL, "power-cycle 20": POWER_ON, "brown-out": BROWN_OUT}
    assert line.until_hello().reset_cause == POWER_ON
    for boot, (command, cause) in enumerate(causes.items(), start=2):
        board.do(command)
        hello = line.until_hello()
        assert (hello.boot, hello.reset_cause) == (boot, cause)
    line.until_samples(3)
    assert faults(board) == list(causes)


def test_a_board_that_is_off_says_nothing(bench: Bench) -> None:
    board = bench.on()
    line = bench.listen(board)
    line.until_hello()
    board.do("power-cycle 3600000")
    time.sleep(0.1)
    line.port.reset_input_buffer()
    time.sleep(0.3)
    assert line.port.in_waiting == 0
    board.do("power-cycle 1")
    assert line.until_hello().boot == 2


@pytest.mark.parametrize("written_well", range(4))
def test_a_brown_out_in_the_middle_of_an_eeprom_write_spoils_one_slot_only(bench: Bench, written_well: int) -> None:
    board = bench.on()
    line = bench.listen(board)
    first = line.until_hello()
    board.do("power-cycle 10")
    assert line.until_hello().boot == 2, "both slots hold a boot"
    before = board.eeprom.read_bytes()
    board.do(f"brown-out-in-write 10 {written_well}")
    after = line.until_hello()
    assert (after.boot, after.incarnation, after.reset_cause) == (3, first.incarnation, BROWN_OUT)
    assert faults(board)[-1] == "brown-out in the middle of an EEPROM write"
    line.until_samples(1)
    image = board.eeprom.read_bytes()
    assert image[BOOT_SLOT_B:] == before[BOOT_SLOT_B:], "boot 2 stood in slot B, and there it stays"


def test_an_erased_eeprom_starts_a_new_count_and_another_incarnation(bench: Bench) -> None:
    board = bench.on()
    line = bench.listen(board)
    first = line.until_hello()
    board.do("reset")
    assert line.until_hello().boot == 2
    board.do("erase-eeprom counter")
    provisioned = line.until_hello()
    assert (provisioned.device, provisioned.boot) == ("s1", 1)
    line.until_samples(3)
    board.do("erase-eeprom")
    erased = line.until_hello()
    assert (erased.device, erased.boot) == ("unprovisioned", 1)
    assert len({first.incarnation, provisioned.incarnation, erased.incarnation}) == 3


def test_resets_one_after_the_other_lose_nothing_that_was_acknowledged(bench: Bench) -> None:
    board = bench.on()
    line = bench.listen(board)
    draw = random.Random(12)  # noqa: S311 - repeatable is the point
    for boot in range(1, 13):
        line.until(lambda boot=boot: line.hellos and line.hellos[-1].boot == boot and len(line.samples) > 8)  # type: ignore[misc]
        board.do(draw.choice(("reset", "power-cycle 5", "brown-out")))
    line.until_hello()
    bench.off()
    boots = [json.loads(entry) for entry in board.ledger.read_text().splitlines()]
    assert [int(boot["boot"].split("-")[0]) for boot in boots] == list(range(1, 14))
    assert all(boot["acknowledged"] for boot in boots[:-1])
    check(board, line.stored)


# --- The adapter


def test_unplugged_and_plugged_in_it_is_another_port_and_nothing_is_lost(bench: Bench) -> None:
    board = bench.on()
    line = bench.listen(board)
    line.until_samples(2)
    terminal = board.link.readlink()
    board.do("unplug")
    assert board.port() is None
    with pytest.raises((serial.SerialException, OSError)):
        line.until(lambda: False)
    board.do("plug")
    port = board.port()
    assert port == board.link.with_name("tty-s1@2")
    assert port.readlink() != terminal
    assert board._link_since(0) == ["opened", "closed"]
    again = bench.listen(board)
    again.samples = line.samples
    again.hellos = line.hellos
    again.until_samples(10)
    assert again.hello is not None
    assert again.hello.boot == 1, "the board has a supply of its own"
    bench.off()
    (boot,) = [json.loads(entry) for entry in board.ledger.read_text().splitlines()]
    assert boot["dropped"] == []
    assert not list(bench.directory.glob("tty-*")), "the links go with the board"


def test_plugged_in_as_the_same_port(bench: Bench) -> None:
    board = bench.on()
    board.do("unplug")
    board.do("plug same")
    assert board.port() == board.link
    bench.listen(board).until_samples(1)


def test_what_is_so_already_is_refused_with_the_reason(bench: Bench) -> None:
    board = bench.on()
    with pytest.raises(RefusedError, match="board s1 refused 'plug' and did nothing: it is plugged in already"):
        board.do("plug")
    board.do("unplug")
    for again in ("unplug", "unplug in-frame"):
        with pytest.raises(RefusedError, match="it is unplugged already"):
            board.do(again)
    board.do("plug same")
    assert faults(board) == ["unplug", "plug same"]


def test_plugged_in_before_a_frame_came_it_stays_in(bench: Bench) -> None:
    board = bench.on(interval_ms=3_600_000)
    line = bench.listen(board)
    line.until_samples(1)
    # It has its answer when it says nothing any more, neither HELLO nor the sample again.
    line.port.timeout = 2.5
    line.until(lambda: line.port.read() == b"")
    board.do("unplug in-frame")
    board.do("plug")
    line.port.timeout = PATIENCE_S
    line.port.write(encode_frame(Probe(7)))
    (reply,) = FrameDecoder().feed(line.port.read_until(b"\0"))
    assert isinstance(reply, Reply)
    assert board.port() == board.link


def test_unplugged_in_the_middle_of_a_frame(bench: Bench) -> None:
    board = bench.on()
    line = bench.listen(board)
    line.until_samples(1)
    board.do("unplug in-frame")
    with pytest.raises((serial.SerialException, OSError)):
        line.until(lambda: False)
    assert faults(board)[-1] == "unplugged in the middle of a frame"
    board.do("plug")
    bench.listen(board).until_samples(5)


def test_opening_the_port_resets_a_board_that_is_wired_like_an_arduino(bench: Bench) -> None:
    board = bench.on(Wiring(auto_reset=True))
    deadline = time.monotonic() + patience(PATIENCE_S)
    while not board.ledger.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for boot in (2, 3):
        line = bench.listen(board)
        hello = line.until_hello()
        assert (hello.boot, hello.reset_cause) == (boot, EXTERNAL)
        line.port.close()
        wait_until(lambda: board._link_since(0)[-1] == "closed", words="the board did not see that its port was closed")
    board.do("auto-reset off")
    assert bench.listen(board).until_hello().boot == 3
    assert faults(board) == [*(2 * ["reset by the opening of the port"]), "auto-reset off"], "a switch, and what it did"


# --- The line


def test_noise_damages_frames_and_all_samples_come_when_it_ends(bench: Bench) -> None:
    board = bench.on(Wiring(noise=1.0))
    line = bench.listen(board)
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        line.read()
    assert not line.hellos, "a bit of every byte is wrong"
    board.do("noise 0")
    line.until_samples(5)
    board.do("noise 0.01")
    line.until_samples(50)
    bench.off()
    check(board, line.stored)


def test_an_overrun_takes_that_many_bytes(bench: Bench) -> None:
    board = bench.on()
    board.do("inhibit on")
    line = bench.listen(board)
    line.until_hello()
    line.port.timeout = PATIENCE_S
    line.port.write(encode_frame(HelloRequest()))
    frames = iter(lambda: line.port.read_until(b"\0"), b"")
    # A sample that was taken before the jumper was set may come first.
    whole = next(got for got in frames if any(isinstance(frame, Hello) for frame in FrameDecoder().feed(got)))
    board.do("overrun 10")
    # It says hello once a second; one may have been on its way.
    following = itertools.islice(frames, 5)
    assert next(got for got in following if got != whole) == whole[10:], "the same HELLO without its beginning"


def test_signals_spoil_nothing_that_the_board_writes(bench: Bench) -> None:
    board = bench.on()
    line = bench.listen(board)
    line.until_hello()
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        # Answers to interrupt, and signals enough that some come in the middle of a write.
        line.port.write(encode_frame(HelloRequest()))
        for _ in range(10_000):
            os.kill(board.process.pid, signal.SIGUSR1)
        line.read()
    # Carried out behind the last signal, which would otherwise be obeyed after the next command.
    board.do("inhibit on")
    board.do("inhibit off")
    line.until_samples(3)
    assert board.process.poll() is None


@pytest.mark.parametrize("baud", [9600, 19200, 115200])
def test_at_another_speed_bytes_come_and_nothing_is_understood(bench: Bench, baud: int) -> None:
    board = bench.on()
    line = bench.listen(board, baud)
    deadline = time.monotonic() + 1.5
    got = b""
    while not got or time.monotonic() < deadline:
        got += line.port.read(256)
    assert not [frame for frame in FrameDecoder().feed(got) if isinstance(frame, (Hello, Data))]
    line.port.baudrate = 38400
    line.until_samples(2)


def test_bytes_take_their_time_on_the_line_both_ways_however_late_the_board_is(bench: Bench) -> None:
    """A gateway takes that time off a round trip: were one byte early, the bounds of its times would be no bounds."""
    board = bench.on(interval_ms=20)
    line = bench.listen(board)
    line.until_samples(1)
    draw = random.Random(3)  # noqa: S311 - repeatable is the point
    trips = []
    for nonce in range(80):
        probe = encode_frame(Probe(nonce))
        if nonce % 4 == 0:
            # It lags behind then, and must not hear in its past the bytes that are sent to it now.
            board.process.send_signal(signal.SIGSTOP)
            time.sleep(draw.uniform(0.01, 0.1))
        sent_us = boottime_us()
        line.port.write(probe)
        if nonce % 4 == 0:
            time.sleep(draw.uniform(0.0, 0.03))
            board.process.send_signal(signal.SIGCONT)
        received_us, reply = line.until_reply(nonce)
        trips.append((sent_us, len(probe), reply, received_us))
        time.sleep(draw.uniform(0.0, 0.005))
    line.until_samples(5)
    bench.off()
    taken_us = board.taken_us()
    assert line.hello is not None
    # The chip's clock is exact here, and a sample is taken as soon as its millisecond begins.
    began_us = min(taken_us[_boot(line.hello), sequence] - 1000 * tick for sequence, tick in line.ticks.items())
    byte_us, slack_us = 10 * 416 / 16, 50
    for sent_us, sent_bytes, reply, received_us in trips:
        read_us = began_us + 1000 * reply.tick_ms + reply.tick_us
        assert sent_us + sent_bytes * byte_us <= read_us + slack_us
        assert read_us + len(encode_frame(reply)) * byte_us <= received_us + slack_us


def test_an_adapter_at_a_wrong_speed_by_command(bench: Bench) -> None:
    board = bench.on()
    line = bench.listen(board)
    line.until_samples(1)
    board.do("baud 9600")
    time.sleep(0.1)
    line.port.reset_input_buffer()
    line.samples.clear()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        line.read()
    assert not line.samples
    board.do("baud auto")
    line.until_samples(10)


def test_the_clock_can_start_just_before_its_wrap(bench: Bench) -> None:
    board = bench.on(clock_start_ms=2**32 - 1000)
    line = bench.listen(board)
    line.until(lambda: any(tick < 1000 for tick in line.ticks.values()))
    line.until_samples(10)
    ticks = [line.ticks[sequence] for sequence in sorted(line.ticks)]
    assert ticks[0] > 2**32 - 1000
    steps = [(later - earlier) % 2**32 for earlier, later in itertools.pairwise(ticks)]
    assert all(step < 1000 for step in steps), "time goes on through the wrap"


# --- What it writes


def test_samples_and_stack_are_written_down(bench: Bench) -> None:
    board = bench.on()
    line = bench.listen(board)
    line.until_samples(10)
    board.do("inhibit on")
    bench.off()
    assert len(line.samples) >= 10
    check(board, line.stored)
    rows = board.samples.read_text().splitlines()[1:]
    (boot,) = [json.loads(entry) for entry in board.ledger.read_text().splitlines()]
    assert boot["taken"] == len(rows)
    assert 32 < boot["stack"] < boot["stack_room"] < 2048


def test_a_wrong_command_is_told_and_changes_nothing(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    board = bench.on()
    line = bench.listen(board)
    line.until_samples(1)
    control = board.ledger.with_suffix(".control")
    with control.open("w") as pipe:
        pipe.write('noise 2\nexplode\nwifi off\nreset now\npower-cycle 0\nbaud fast\nunplug "\n\n')
    line.until_samples(10)
    assert line.hello is not None
    assert line.hello.boot == 1
    assert board.faults() == []
    said = capfd.readouterr().err
    assert "refused noise 2: it is: noise SHARE (0 to 1)" in said
    assert "refused explode: there is no such command" in said
    assert "refused wifi off: it is for boards of the MQTT build" in said
    assert said.count("refused") == said.count(": it is") + 1 == 7


# --- Pure parts, compiled for this machine


@pytest.fixture
def parts(tmp_path: Path) -> ctypes.CDLL:
    # Made anew each time: it has a state.
    library = tmp_path / "parts.so"
    sources = [str(SOURCES / "pace.c"), str(SOURCES / "uart_bits.c")]
    subprocess.run(["gcc", "-shared", "-fPIC", "-std=gnu11", "-o", str(library), *sources], check=True)
    made = ctypes.CDLL(str(library))
    made.pace_start.argtypes = made.pace_due.argtypes = made.pace_ran.argtypes = [ctypes.c_uint64]
    made.pace_due.restype = ctypes.c_uint64
    made.pace_stood_still_us.argtypes = [ctypes.c_uint64]
    made.pace_stood_still_us.restype = ctypes.c_uint64
    made.pace_time_us.argtypes = [ctypes.c_uint64]
    made.pace_time_us.restype = ctypes.c_double
    made.pace_set_ppm.argtypes = [ctypes.c_double]
    size, buffer = ctypes.c_size_t, ctypes.c_char_p
    made.uart_hear.argtypes = [buffer, size, ctypes.c_double, ctypes.c_double, ctypes.c_char_p, size]
    made.uart_hear.restype = size
    return made


@pytest.mark.parametrize("ppm", [0, 50, -10_000, 10_000])
def test_an_oscillator_runs_wrong_by_its_ppm_and_no_cycle_is_forgotten(parts: ctypes.CDLL, ppm: int) -> None:
    now_us, ran = 1_000_000, 0
    parts.pace_start(now_us)
    parts.pace_ran(parts.pace_due(now_us))
    parts.pace_set_ppm(ppm)
    draw = random.Random(ppm)  # noqa: S311 - repeatable is the point
    while now_us < 101_000_000:
        now_us += draw.randint(1000, 5000)
        cycles = parts.pace_due(now_us) + draw.randint(0, 4)
        parts.pace_ran(cycles)
        ran += cycles
    exact = (now_us - 1_000_000) * 16 * (1_000_000 + ppm) // 1_000_000
    assert abs(ran - exact) <= 8


def test_after_a_standstill_the_chip_does_not_hurry(parts: ctypes.CDLL) -> None:
    parts.pace_set_ppm(0)
    parts.pace_start(0)
    assert parts.pace_stood_still_us(9_000_000) == 0, "what it missed it makes up for"
    assert parts.pace_stood_still_us(3_600_000_000) == 3_600_000_000
    assert parts.pace_due(3_600_000_000) == 0
    assert parts.pace_stood_still_us(3_600_001_000) == 0
    assert abs(parts.pace_due(3_600_001_000) - 16_000) <= 8


@pytest.mark.parametrize("seed", range(8))
def test_each_cycle_has_its_time_by_the_oscillator_alone_and_none_runs_before_it(parts: ctypes.CDLL, seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - repeatable is the point
    start_us = now_us = 1_000_000_000_000
    ran, ppm, exact_us = 0, 0.0, 0.0
    parts.pace_start(now_us)
    for _ in range(300):
        now_us += draw.choice((1_000, 4_000, 500_000))
        if draw.random() < 0.1:
            ppm = draw.uniform(-10_000, 10_000)
            parts.pace_set_ppm(ppm)
        # A busy machine gets no further than this.
        for _ in range(draw.choice((1, 300))):
            cycles = parts.pace_due(now_us)
            parts.pace_ran(cycles)
            ran += cycles
            exact_us += cycles / (16 * (1 + ppm / 1e6))
            assert start_us + exact_us <= now_us + 0.1
        assert abs(parts.pace_time_us(ran) - start_us - exact_us) < 0.1


def heard(parts: ctypes.CDLL, sent: bytes, sent_baud: float, own_baud: float) -> bytes:
    room = ctypes.create_string_buffer(10_000)
    count: int = parts.uart_hear(sent, len(sent), sent_baud, own_baud, room, len(room))
    return room.raw[:count]


def test_at_nearly_one_speed_every_byte_is_heard(parts: ctypes.CDLL) -> None:
    every = bytes(range(256))
    for own_baud in (38400, 37000, 39800):
        assert heard(parts, every, 38400, own_baud) == every


def test_at_another_speed_a_uart_hears_what_it_samples(parts: ctypes.CDLL) -> None:
    # 0x00 at half the listener's speed: 18 bits low, so a start bit and eight zeros, then the line is low, then idle.
    assert heard(parts, b"\x00", 19200, 38400) == b"\x00"
    # 0x55 alternates: start 0, 1 0 1 0 1 0 1 0, stop 1. Sampled twice a bit that is 00 11 00 11 ...
    assert heard(parts, b"\x55", 19200, 38400) == bytes([0b01100110, 0b11100110])
    # Four times as fast as the listener: it sees bits 6, 10, 14 ... 34 of the four bytes as one.
    assert heard(parts, b"\x00\xff\xff\xff", 38400, 9600) == bytes([0b10111100])


# --- A schedule


def test_on_a_schedule_of_faults_what_was_acknowledged_is_there_with_its_value(bench: Bench) -> None:
    board = bench.on(interval_ms=20)
    stored: dict[str, dict[int, bytes]] = {}
    plan = list(itertools.islice(schedule(FaultRate("h", 120.0), ("s1",), "serial"), 40))
    line: Listener | None = None
    began = time.monotonic()
    for fault in plan:
        if fault.at_s > FAULTS_S:
            break
        while time.monotonic() < began + fault.at_s:
            line = line or _try_to_listen(bench, board, stored)
            try:
                if line is not None:
                    line.read()
            except (serial.SerialException, OSError):
                line = None
        board.do(fault.command)
    bench.off()
    check(board, stored)
    assert sum(len(samples) for samples in stored.values()) > 50, "in quiet times samples came"


def _try_to_listen(bench: Bench, board: Board, stored: dict[str, dict[int, bytes]]) -> Listener | None:
    try:
        line = bench.listen(board)
    except serial.SerialException:
        # Unplugged, perhaps since one looked.
        time.sleep(0.01)
        return None
    line.stored = stored
    return line


# --- Several boards


def test_a_run_by_schedule_does_what_the_schedule_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rate = FaultRate("tests", 60.0)
    options = AvrOptions(faults=rate, as_json=True, noise=0.001)
    assert main_avr(2, tmp_path, 100, 6.0, 1, options) == 1, "nobody opened a port"
    start, *done, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert start["boards"] == {"s1": str(tmp_path / "tty-s1"), "s2": str(tmp_path / "tty-s2")}
    expected = list(itertools.islice(schedule(rate, ("s1", "s2"), "serial", noise=0.001), len(done)))
    assert [(one["at_s"], one["device"], one["fault"]) for one in done] == [
        (one.at_s, one.device, one.command) for one in expected
    ]
    assert done
    assert [one["device"] for one in end["summary"]] == ["s1", "s2"]
    assert all(0 < one["stack"] < one["stack_room"] and one["taken"] for one in end["summary"])
    for device in ("s1", "s2"):
        written = [json.loads(line)["fault"] for line in (tmp_path / f"{device}.faults").read_text().splitlines()]
        assert set(written) >= {one["fault"] for one in done if one["device"] == device}


def test_boards_whose_port_nobody_opens_are_named_by_whole_paths_and_the_command_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_sim.avr._REACH_SECONDS_MAX", 1.0)
    monkeypatch.chdir(tmp_path)
    rate = FaultRate("tests", 60.0)
    assert main_avr(2, Path("boards"), 100, 6.0, options=AvrOptions(faults=rate)) == 1
    said = capsys.readouterr()
    places = {board: tmp_path / "boards" / f"tty-{board}" for board in ("s1", "s2")}
    lines = said.out.splitlines()
    assert lines[1:3] == [f"{board} on {place}" for board, place in places.items()]
    why = {
        board: f"is {place} among serial.ports in gateway.toml, and does sluice run?" for board, place in places.items()
    }
    assert said.err.splitlines() == [
        *(f"{board}: no gateway has opened its port yet: {why[board]}" for board in places),
        *(f"{board}: no gateway opened its port: {why[board]}" for board in places),
    ]
    done = itertools.islice(schedule(rate, ("s1", "s2"), "serial"), sum(" s  s" in line for line in lines))
    begun = Counter(fault.command.split()[0] for fault in done if not fault.is_end)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(begun.items()))
    assert lines[-1] == f"Faults: {told}. --faults tests:60 repeats them."


def test_one_port_that_was_opened_does_not_speak_for_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = threading.Thread(target=_open_when_it_is_there, args=(tmp_path / "tty-s2",))
    opener.start()
    assert main_avr(2, tmp_path, 100, 3.0) == 1
    opener.join()
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["s1"]


def _open_when_it_is_there(port: Path) -> None:
    deadline = time.monotonic() + patience(PATIENCE_S)
    while not port.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    opened = os.open(port, os.O_RDWR | os.O_NOCTTY)
    time.sleep(1)
    os.close(opened)


def test_the_command_runs_boards_until_it_is_stopped_and_a_second_one_can_hit_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sluice_sim", "avr", "--count", "1", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("sensor-serial: flash")
        assert running.stdout.readline() == f"s1 on {tmp_path}/tty-s1\n"
        opened = os.open(tmp_path / "tty-s1", os.O_RDWR | os.O_NOCTTY)
        hit = [sys.executable, "-m", "sluice_sim", "fault", str(tmp_path / "s1"), "power-cycle", "5"]
        subprocess.run(hit, check=True)
        wrong = subprocess.run([*hit[:-1], "soon"], capture_output=True, text=True, check=False)
        assert wrong.returncode == 1
        assert "refused 'power-cycle soon' and did nothing: it is: power-cycle [MS (1 to 3600000)]" in wrong.stderr
        time.sleep(1)
        os.close(opened)
        running.send_signal(signal.SIGINT)
        table = running.stdout.read().splitlines()
        assert table[-1].split()[:2] == ["s1", "2"], "a board and its boots"
    assert running.returncode == 0


def test_a_board_that_cannot_start_says_why(bench: Bench) -> None:
    (bench.directory / "s1.eeprom").write_bytes(b"short")
    with pytest.raises(SimulationError, match="ended at once"):
        start_board(bench.directory, "s1", 0, bench.firmware)


def test_wrong_arguments_of_the_runner_are_told(tmp_path: Path, firmware: Path) -> None:
    image = str(tmp_path / "s1.eeprom")
    for arguments in (
        (),
        ("--eeprom", image),
        ("--eeprom", image, "--modem", "--link", str(tmp_path / "tty")),
        ("--eeprom", image, "--modem", "--noise", "2"),
        ("--eeprom", image, "--modem", "--ppm", "x"),
    ):
        ended = subprocess.run([RUNNER, *arguments, firmware], capture_output=True, text=True, check=False)
        assert ended.returncode == 2
        assert "usage: avr-runner" in ended.stderr


# --- Through the modem


@contextmanager
def subscribed(broker: Mosquitto, heard: Path) -> Iterator[None]:
    """Write down the boards' publications, a line for each message: topic, space, payload."""
    command = ("mosquitto_sub", "-p", str(broker.port), "-q", "1", "-t", "device/+/thermo", "-v")
    with heard.open("w") as lines, subprocess.Popen(command, stdout=lines) as peer:
        try:
            yield
        finally:
            peer.terminate()


def published(heard: Path) -> set[tuple[str, str, int]]:
    """Device, boot and sequence of each message that came whole."""
    lines = [line for line in heard.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {(line.split("/")[1], *_identity(line)) for line in lines}


def until_let_in(board: Board, since_us: int) -> None:
    """Wait until a broker has let the board in since then."""
    wait_until(
        lambda: board.why_not_let_in(since_us) is None,
        words=lambda: f"{board.device}: {board.why_not_let_in(since_us)}",
    )


def test_boards_with_a_modem_publish_through_radio_and_power_that_fail(tmp_path: Path) -> None:
    heard = tmp_path / "heard"

    def until_more(count: int) -> None:
        wanted = len(published(heard)) + count
        wait_until(
            lambda: len(published(heard)) >= wanted, words=lambda: f"{len(published(heard))} of {wanted} messages came"
        )

    with mosquitto(tmp_path / "broker") as broker, subscribed(broker, heard), ExitStack() as ended:
        options = AvrOptions("mqtt", Network(port=broker.port))
        boards = start_boards(tmp_path / "boards", 2, interval_ms=200, options=options)
        ended.callback(stop_boards, boards)
        assert boards[0].port() is None
        for board in boards:
            until_let_in(board, 0)
        until_more(10)
        cut_us = time.time_ns() // 1000
        boards[0].do("wifi off")
        time.sleep(2)
        boards[0].do("wifi on")
        boards[1].do("modem-reset")
        for board in boards:
            until_let_in(board, cut_us)
        until_more(40)
        cut_us = time.time_ns() // 1000
        boards[1].do("power-cycle 100")
        with pytest.raises(SimulationError, match="it is for boards of the serial build"):
            boards[1].do("unplug")
        until_let_in(boards[1], cut_us)
        until_more(20)
        stop_boards(boards)
        acknowledged = {sample for board in boards for sample in known(board).acknowledged}
        # If it is told to end, mosquitto_sub skips messages that it has not read yet.
        wait_until(lambda: acknowledged <= published(heard), words="what the firmware saw acknowledged had arrived")
    assert {device for device, *_ in published(heard)} == {"w1", "w2"}, "not as boards of the other build"
    assert all(board.why_not_let_in(0) is None for board in boards)
    for board in boards:
        stands = board._link_since(0)
        assert stands[:2] == ["let in", f"127.0.0.1:{broker.port}: the connection ended"]
        assert stands[-1] == "let in", "its return stands there as well"


def test_boards_that_no_gateway_lets_in_say_why_and_the_command_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = Mosquitto(tmp_path / "broker", ("allow_anonymous false",))
    broker.start()
    try:
        options = AvrOptions("mqtt", Network(port=broker.port), as_json=True)
        refused: list[str] = []
        # As long as it takes: the modem has to start, join and dial.
        for seconds in (5.0, 15.0, 60.0):
            assert main_avr(1, tmp_path / "boards", 100, seconds, options=options, prefix="attic-") == 1
            refused = capsys.readouterr().err.splitlines()
            if "not dialled" not in refused[-1]:
                break
        place = f"127.0.0.1:{broker.port}"
        assert refused[-1] == f"attic-1: no listener let it in: {place}: it wants a user name and password"
    finally:
        broker.stop()


def _identity(line: str) -> tuple[str, int]:
    payload = json.loads(line.split(" ", 1)[1])
    return payload["boot"], payload["seq"]
