"""The sensor's firmware: its core and frames compiled for this machine, and all of it in simavr over a real pty."""

import ctypes
import json
import random
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import serial
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.serial_frames import (
    Ack,
    Data,
    Frame,
    FrameDecoder,
    Hello,
    HelloRequest,
    Probe,
    Reply,
    cobs_encode,
    encode_frame,
)
from sluice_sim.avr import (
    BUILD,
    FIRMWARE,
    PROJECT,
    Board,
    build_firmware,
    inhibit_sampling,
    provision,
    start_board,
    stop_boards,
)

pytestmark = pytest.mark.avr

SOURCES = PROJECT / "firmware-sim" / "firmware"
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
    """The other end of the line: what the gateway would be."""

    port: serial.Serial
    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    frames: list[Frame] = field(default_factory=list)
    boot: int = 0
    received: set[int] = field(default_factory=set)
    """Every sequence that ever came."""

    def send(self, frame: Frame) -> None:
        self.port.write(encode_frame(frame))

    def ack(self, following: int, bitmap: int = 0) -> None:
        self.send(Ack(self.boot, following, bitmap))

    def of(self, kind: type[F]) -> list[F]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def sequences(self) -> list[int]:
        return [data.sequence for data in self.of(Data)]

    def until(self, condition: Callable[[], object]) -> None:
        """Read until the condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; received {self.frames}"
            self._read()

    def until_samples(self, count: int) -> None:
        self.until(lambda: len(self.of(Data)) >= count)

    def listen(self, seconds: float) -> None:
        """Read for a while, to see what does not come."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._read()

    def _read(self) -> None:
        frames = self.decoder.feed(self.port.read(256))
        self.frames += frames
        self.received |= {frame.sequence for frame in frames if isinstance(frame, Data)}

    def introduce(self) -> Hello:
        """Ask for HELLO and answer it. What was received before is forgotten."""
        self.frames.clear()
        self.send(HelloRequest())
        self.until(lambda: self.of(Hello))
        hello = self.of(Hello)[0]
        self.frames.clear()
        self.boot = hello.boot
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


def bitmap(following: int, stored: set[int]) -> int:
    return sum(1 << (n - following - 1) for n in stored if following < n <= following + 32)


@pytest.fixture(scope="module", autouse=True)
def firmware() -> Path:
    return build_firmware()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.off()


# --- Size


def test_flash_and_static_ram_stay_in_budget(firmware: Path) -> None:
    listed = subprocess.run(["avr-size", "-A", str(firmware)], capture_output=True, text=True, check=True).stdout
    sizes = {
        parts[0]: int(parts[1])
        for line in listed.splitlines()
        if len(parts := line.split()) == 3 and parts[1].isdigit()
    }
    flash = sizes[".text"] + sizes[".data"]
    ram = sizes[".data"] + sizes[".bss"] + sizes[".noinit"]
    assert flash <= FLASH_BYTES_MAX
    assert ram <= RAM_BYTES_MAX
    assert (BUILD / "sensor.size").read_text() == (
        f"flash {flash} of {FLASH_BYTES_MAX} bytes, static RAM {ram} of {RAM_BYTES_MAX} bytes\n"
    )


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
    sources = [str(path) for path in sorted(SOURCES.glob("*.c")) if path.name != "main.c"]
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
    line.boot = line.of(Hello)[0].boot
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
    for count in range(1, 21):
        line.until_samples(count)
        line.ack(line.of(Data)[-1].sequence + 1)
    data = line.of(Data)
    assert [each.sequence for each in data] == list(range(len(data)))
    assert {each.boot for each in data} == {line.boot}
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
    line.send(Ack(line.boot + 1, 2, 0))
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
    wrong_crc = bytearray(encode_frame(Ack(line.boot, 3, 0)))
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


# --- The core and the frames, compiled for this machine

SINK = """
#include <stdint.h>
void (*sink)(int event, uint32_t sequence);
void ledger_boot(uint32_t boot, uint32_t incarnation) { (void)boot; (void)incarnation; }
void ledger_taken(uint32_t sequence) { sink(2, sequence); }
void ledger_sent(uint32_t sequence) { sink(3, sequence); }
void ledger_acknowledged(uint32_t sequence) { sink(4, sequence); }
void ledger_dropped(uint32_t sequence) { sink(5, sequence); }
"""
TAKEN, SENT, ACKNOWLEDGED, DROPPED = 2, 3, 4, 5
Sink = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint32)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("host")
    (directory / "sink.c").write_text(SINK)
    library = directory / "core.so"
    sources = [str(SOURCES / "core.c"), str(SOURCES / "frame.c"), str(directory / "sink.c")]
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1"]
    subprocess.run(["cc", *flags, "-I", str(SOURCES), "-o", str(library), *sources], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.core_due.restype = loaded.core_acknowledge.restype = ctypes.c_bool
    loaded.core_oldest.restype = loaded.core_next.restype = ctypes.c_uint32
    loaded.core_payload.restype = loaded.frame_encode.restype = ctypes.c_uint8
    loaded.frame_receive.restype = ctypes.c_void_p
    return loaded


def wire(content: bytes) -> bytes:
    return cobs_encode(content + zlib.crc32(content).to_bytes(4, "little")) + b"\0"


def listen_to_ledger(host: ctypes.CDLL) -> tuple[list[tuple[int, int]], Any]:
    events: list[tuple[int, int]] = []
    sink = Sink(lambda event, sequence: events.append((event, sequence)))
    ctypes.c_void_p.in_dll(host, "sink").value = ctypes.cast(sink, ctypes.c_void_p).value
    return events, sink


@pytest.mark.parametrize(("sample_ms", "commit_ms"), [(100, 150), (250, 300), (1000, 300)])
def test_after_a_silence_that_filled_the_ring_a_slow_gateway_is_enough(
    host: ctypes.CDLL, sample_ms: int, commit_ms: int
) -> None:
    """Each answer comes after the ring has dropped what it speaks of: it counts as a sign of life all the same."""
    told, _sink = listen_to_ledger(host)
    host.core_start()
    answers: list[tuple[int, int]] = []
    due = ctypes.c_uint32()
    silent_until_ms, end_ms = 90_000, 150_000
    acknowledged_before = 0
    for now_ms in range(0, end_ms, 5):
        if now_ms == silent_until_ms:
            acknowledged_before = len(told)
        if now_ms % sample_ms == 0:
            host.core_take(now_ms, 2000)
        while host.core_due(now_ms, ctypes.byref(due)):
            host.core_sent(due.value, now_ms)
            if now_ms >= silent_until_ms:
                answers.append((now_ms + commit_ms, due.value + 1))
        while answers and answers[0][0] <= now_ms:
            host.core_acknowledge(answers.pop(0)[1], 0, now_ms)
    acknowledged = [event for event in told[acknowledged_before:] if event[0] == ACKNOWLEDGED]
    assert len(acknowledged) > 0.8 * (end_ms - silent_until_ms) / sample_ms


@given(st.integers(-32768, 32767))
def test_payload_is_json_with_two_decimals(host: ctypes.CDLL, centi_celsius: int) -> None:
    _, _sink = listen_to_ledger(host)
    host.core_start()
    host.core_take(0, ctypes.c_int16(centi_celsius))
    payload = ctypes.create_string_buffer(24)
    length = host.core_payload(0, payload)
    assert payload.raw[:length] == b'{"celsius":%.2f}' % (centi_celsius / 100)


@given(st.binary(min_size=1, max_size=128))
def test_frames_made_in_c_are_those_of_the_gateway(host: ctypes.CDLL, content: bytes) -> None:
    frame = ctypes.create_string_buffer(b"\xaa" + content, 134)
    length = host.frame_encode(frame, len(content))
    assert frame.raw[:length] == wire(content)


@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=48))))
def test_c_receives_good_frames_of_32_bytes_at_most_and_nothing_else(
    host: ctypes.CDLL, pieces: list[tuple[bool, bytes]]
) -> None:
    """A piece is a frame's content, or garbage that a zero ends."""
    receiver = ctypes.create_string_buffer(64)
    length = ctypes.c_uint8()
    received = []
    for is_frame, piece in pieces:
        for byte in wire(piece) if is_frame else piece + b"\0":
            content = host.frame_receive(receiver, byte, ctypes.byref(length))
            if content:
                received.append(ctypes.string_at(content, length.value))
    assert received == [piece for is_frame, piece in pieces if is_frame and len(piece) <= 32]


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 150), st.sampled_from((0.0, 0.3, 0.9)))
def test_over_a_lossy_line_every_sample_ends_acknowledged_or_dropped(
    host: ctypes.CDLL, chance: random.Random, samples: int, loss: float
) -> None:
    """The law of the ledger, against a gateway that keeps what it received and answers each frame."""
    events, _sink = listen_to_ledger(host)
    host.core_start()
    stored: set[int] = set()
    due = ctypes.c_uint32()
    now_ms = 0
    taken = 0
    while taken < samples or host.core_oldest() < host.core_next():
        now_ms += chance.choice((1, 20, 500))
        assert now_ms < 10_000_000, "no progress"
        if taken < samples:
            host.core_take(now_ms, 0)
            taken += 1
        while host.core_due(now_ms, ctypes.byref(due)):
            sequence = due.value
            oldest = host.core_oldest()
            assert oldest <= sequence < min(host.core_next(), oldest + WINDOW)
            host.core_sent(sequence, now_ms)
            if chance.random() < loss:
                continue
            stored.add(sequence)
            if chance.random() < loss:
                continue
            following = next(n for n in range(oldest, samples + 1) if n not in stored)
            assert host.core_acknowledge(following, bitmap(following, stored), now_ms)

    by_event = {kind: [n for event, n in events if event == kind] for kind in (TAKEN, SENT, ACKNOWLEDGED, DROPPED)}
    assert by_event[TAKEN] == list(range(samples))
    assert sorted(by_event[ACKNOWLEDGED] + by_event[DROPPED]) == list(range(samples))
    assert set(by_event[ACKNOWLEDGED]) <= stored
    assert len(by_event[SENT]) == len(set(by_event[SENT]))
    assert set(by_event[ACKNOWLEDGED]) <= set(by_event[SENT])
    assert loss or not by_event[DROPPED]
