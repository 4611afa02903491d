"""The firmware's portable part compiled for this machine: vectors both ways, the core's laws, and the fuzzer."""

import ctypes
import random
import subprocess
import zlib
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.serial_lines.frames import (
    Ack,
    CommandFrame,
    CommandReply,
    Data,
    FrameDecoder,
    Hello,
    HelloRequest,
    Probe,
    Reply,
    cobs_encode,
    encode_frame,
)
from sluice_sim.avr import provision
from tests.support import firmware_vectors
from tests.support.firmware_host import (
    ACKNOWLEDGED,
    DROPPED,
    FIRMWARE_SIM,
    SENT,
    TAKEN,
    VECTORS,
    HostBoard,
    bitmap,
    build,
    load,
)
from tests.support.sizes import size

pytestmark = pytest.mark.avr

RING = 64
SPAN = 32
"""Sequences that an ACK's bitmap reaches."""
FRAMES, MQTT = VECTORS / "frames.txt", VECTORS / "mqtt.txt"


@pytest.fixture(scope="module")
def host() -> ctypes.CDLL:
    return load("serial")


# --- Vectors


def test_the_files_of_vectors_are_what_python_makes() -> None:
    assert FRAMES.read_text() == firmware_vectors.frames()
    assert MQTT.read_text() == firmware_vectors.mqtt()


def test_the_c_code_makes_and_takes_what_the_vectors_say() -> None:
    command = [str(build() / "check-vectors"), str(FRAMES), str(MQTT)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    count = sum(not line.startswith("#") for path in (FRAMES, MQTT) for line in path.read_text().splitlines())
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, f"{count} vectors, 0 wrong\n", "")


def test_a_vector_that_the_c_code_does_not_meet_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "mqtt.txt"
    wrong.write_text(MQTT.read_text().replace("received d000 pingresp", "received d000 puback"))
    command = [str(build() / "check-vectors"), str(FRAMES), str(wrong)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert f"{wrong} line " in checked.stderr


def test_what_the_serial_link_sends_is_what_the_gateway_reads(host: ctypes.CDLL, tmp_path: Path) -> None:
    provision(tmp_path / "s1.eeprom", "boiler-7.a_b", 1000)
    board = HostBoard(host)
    board.write_eeprom((tmp_path / "s1.eeprom").read_bytes())
    board.start(seed=99, now_ms=2**32 - 100)
    decoder = FrameDecoder()
    frames = decoder.feed(board.turn(2**32 - 99) + board.turn(2**32 - 90))
    ((boot, incarnation),) = board.boots
    assert frames == [Hello(boot, incarnation, 1, 0, 0, "boiler-7.a_b", "sluice-avr 0.1.0", ("thermo",))]
    # HELLO is still leaving for a while.
    board.turn(2**32 - 40, encode_frame(Ack(boot ^ incarnation, 0, 0)))
    board.take(-5)
    sent = board.turn(2**32 + 10, encode_frame(Probe(0xFFFFFFFF)))
    sent += board.turn(2**32 + 50) + board.turn(2**32 + 100, encode_frame(HelloRequest())) + board.turn(2**32 + 200)
    frames = decoder.feed(sent)
    assert Data(boot ^ incarnation, 0, 0, 2**32 - 40, 0, b'{"celsius":-0.05}') in frames
    assert Reply(0xFFFFFFFF, 2**32 - 40, 0) in frames
    assert sum(isinstance(each, Hello) for each in frames) == 1
    assert not decoder.defects


def test_hello_is_given_when_asked_for_although_an_ack_comes_before_it_is_sent(host: ctypes.CDLL) -> None:
    board = HostBoard(host)
    board.start(now_ms=0)
    decoder = FrameDecoder()
    ((boot, incarnation),) = board.boots
    board.turn(50)
    board.turn(100, encode_frame(Ack(boot ^ incarnation, 0, 0)))
    board.take(2000)
    decoder.feed(board.turn(200))
    asked = encode_frame(HelloRequest()) + encode_frame(Ack(boot ^ incarnation, 1, 0))
    (frame,) = decoder.feed(board.turn(300, asked) + board.turn(350))
    assert isinstance(frame, Hello)


def test_a_command_switches_the_led_once_and_is_answered_each_time(host: ctypes.CDLL) -> None:
    host.host_led.restype = ctypes.c_bool
    board = HostBoard(host)
    board.start(now_ms=0)
    ((boot, incarnation),) = board.boots
    run, now_ms = boot ^ incarnation, 1_000

    def answers(*frames: CommandFrame) -> list[CommandReply]:
        nonlocal now_ms
        sent = board.turn(now_ms, b"".join(encode_frame(frame) for frame in frames))
        sent += board.turn(now_ms + 100) + board.turn(now_ms + 200)
        now_ms += 1_000
        return [frame for frame in FrameDecoder().feed(sent) if isinstance(frame, CommandReply)]

    assert answers(CommandFrame(run, 5, b"led=1")) == [CommandReply(run, 5, 0)]
    assert host.host_led()
    assert answers(CommandFrame(run, 5, b"led=1")) == [CommandReply(run, 5, 0)]
    assert host.host_led_switched() == 1, "its answer was lost, and the same number came again"
    assert answers(CommandFrame(run, 6, b"led=0")) == [CommandReply(run, 6, 0)]
    assert not host.host_led()
    for number, unknown in enumerate((b"led=2", b"led=", b"", b"LED=1", b"led=11", bytes(23)), 7):
        assert answers(CommandFrame(run, number, unknown)) == [CommandReply(run, number, 1)]
    assert answers(CommandFrame(run ^ 1, 20, b"led=1")) == [], "it is for another run"
    assert not host.host_led()
    board.start(seed=2)
    ((_, _), (boot, incarnation)) = board.boots
    assert answers(CommandFrame(boot ^ incarnation, 6, b"led=1")) == [CommandReply(boot ^ incarnation, 6, 0)]
    assert host.host_led(), "a number counts within a run"


# --- Under damaged input


@pytest.mark.campaign(seconds=10)
@pytest.mark.parametrize("seed", [1, 20_000])
def test_the_fuzzer_finds_nothing_in_a_few_seconds(seed: int) -> None:
    command = [
        "make",
        "--silent",
        "-C",
        str(FIRMWARE_SIM),
        f"BUILD={build().parent}",
        f"SEED={seed}",
        f"SECONDS={size(1, 3)}",
        "fuzz",
    ]
    fuzzed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert fuzzed.returncode == 0, fuzzed.stderr
    assert fuzzed.stdout.count(f"cases from seed {seed}, ") == 2
    assert " 0 dropped" not in fuzzed.stdout, "rings must have run full"


# --- The core and the frames


def wire(content: bytes) -> bytes:
    return cobs_encode(content + zlib.crc32(content).to_bytes(4, "little")) + b"\0"


@pytest.mark.parametrize(("sample_ms", "commit_ms"), [(100, 150), (250, 300), (1000, 300)])
def test_after_a_silence_that_filled_the_ring_a_slow_gateway_is_enough(
    host: ctypes.CDLL, sample_ms: int, commit_ms: int
) -> None:
    """Each answer comes after the ring has dropped its samples. It still counts as a sign of life."""
    board = HostBoard(host)
    host.core_start()
    answers: list[tuple[int, int]] = []
    due = ctypes.c_uint32()
    silent_until_ms, end_ms = 90_000, 150_000
    acknowledged_before = 0
    for now_ms in range(0, end_ms, 5):
        if now_ms == silent_until_ms:
            acknowledged_before = len(board.events)
        if now_ms % sample_ms == 0:
            host.core_take(now_ms, 2000)
        while host.core_due(now_ms, ctypes.byref(due)):
            host.core_sent(due.value, now_ms)
            if now_ms >= silent_until_ms:
                answers.append((now_ms + commit_ms, due.value + 1))
        while answers and answers[0][0] <= now_ms:
            host.core_acknowledge(answers.pop(0)[1], 0, now_ms)
    acknowledged = [event for event in board.events[acknowledged_before:] if event[0] == ACKNOWLEDGED]
    assert len(acknowledged) > 0.8 * (end_ms - silent_until_ms) / sample_ms


@given(st.integers(-32768, 32767))
def test_payload_is_json_with_two_decimals(host: ctypes.CDLL, centi_celsius: int) -> None:
    _board = HostBoard(host)
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


@pytest.mark.campaign(seconds=12)
@settings(max_examples=size(20, 60))
@given(st.randoms(use_true_random=True), st.integers(1, 150), st.sampled_from((0.0, 0.3, 0.9)))
def test_over_a_lossy_line_every_sample_ends_acknowledged_or_dropped(
    host: ctypes.CDLL, chance: random.Random, samples: int, loss: float
) -> None:
    """The law of the ledger, with a gateway that keeps each sample that it received, and answers each frame.

    True chance: Hypothesis' own runs out on a bad line, and then it leaves the example out. Half a day is usual there.
    """
    board = HostBoard(host)
    host.core_start()
    stored: set[int] = set()
    due = ctypes.c_uint32()
    now_ms = 0
    taken = 0
    while taken < samples or host.core_oldest() < host.core_next():
        now_ms += chance.choice((1, 20, 500))
        assert now_ms < 200_000_000, "no progress"
        if taken < samples:
            host.core_take(now_ms, 0)
            taken += 1
        while host.core_due(now_ms, ctypes.byref(due)):
            sequence = due.value
            oldest = host.core_oldest()
            assert oldest <= sequence < min(host.core_next(), oldest + SPAN)
            host.core_sent(sequence, now_ms)
            if chance.random() < loss:
                continue
            stored.add(sequence)
            if chance.random() < loss:
                continue
            following = next(n for n in range(oldest, samples + 1) if n not in stored)
            assert host.core_acknowledge(following, bitmap(following, stored), now_ms)

    taken_ones, sent, acknowledged, dropped = (board.of(kind) for kind in (TAKEN, SENT, ACKNOWLEDGED, DROPPED))
    assert taken_ones == list(range(samples))
    assert sorted(acknowledged + dropped) == list(range(samples))
    assert set(acknowledged) <= stored
    assert len(sent) == len(set(sent))
    assert set(acknowledged) <= set(sent)
    assert loss or not dropped
    assert dropped or loss < 0.9 or samples < 2 * RING


def due_now(host: ctypes.CDLL, now_ms: int) -> list[int]:
    """Everything that is due to be sent, and is sent."""
    due = ctypes.c_uint32()
    sequences = []
    while host.core_due(now_ms, ctypes.byref(due)):
        host.core_sent(due.value, now_ms)
        sequences.append(due.value)
    return sequences


def test_what_is_lost_again_is_sent_again_as_soon_as_a_later_one_arrives(host: ctypes.CDLL) -> None:
    HostBoard(host)
    host.core_start()
    for sequence in range(RING):
        host.core_take(sequence, 0)
    sent = due_now(host, 0)
    assert sent == list(range(8))
    stored: set[int] = set()
    arriving = deque(sequence for sequence in sent if sequence)
    transmissions = 1
    # No time passes. The line keeps the order and loses nothing but 0, however often that is sent.
    while arriving:
        stored.add(arriving.popleft())
        assert host.core_acknowledge(0, bitmap(0, stored), 0)
        sent = due_now(host, 0)
        transmissions += sent.count(0)
        arriving.extend(sequence for sequence in sent if sequence)
    assert stored == set(range(1, SPAN)), "it does not stop at the first that is missing"
    assert SPAN // 8 < transmissions <= SPAN // 4, (
        "about once for each window that arrives behind it, and not for each ACK"
    )
    assert host.core_acknowledge(SPAN, 0, 0)
    assert due_now(host, 0) == list(range(SPAN, SPAN + 8))


def repeated_after_ms(host: ctypes.CDLL, now_ms: int, count: int) -> list[int]:
    """Nobody answers any more: the pauses between one transmission and the next."""
    pauses: list[int] = []
    last_ms = now_ms
    while len(pauses) < count:
        now_ms += 1
        if due_now(host, now_ms):
            pauses.append(now_ms - last_ms)
            last_ms = now_ms
    return pauses


def test_nobody_answers_and_the_oldest_tries_the_line_ever_more_rarely(host: ctypes.CDLL) -> None:
    HostBoard(host)
    host.core_start()
    host.core_take(0, 0)
    assert due_now(host, 0) == [0]
    assert repeated_after_ms(host, 0, 14) == [1000] * 10 + [2000, 4000, 8000, 8000]


def answered_after(host: ctypes.CDLL, now_ms: int, answer_ms: int, first: int, count: int) -> int:
    """Take `count` samples, and answer each before the next is taken. Returns the time of the last answer."""
    for sequence in range(first, first + count):
        host.core_take(now_ms, 0)
        assert due_now(host, now_ms) == [sequence]
        now_ms += answer_ms
        assert host.core_acknowledge(sequence + 1, 0, now_ms)
    return now_ms


@pytest.mark.parametrize("answer_ms", [20, 300])
def test_an_answer_is_awaited_for_as_long_as_answers_take(host: ctypes.CDLL, answer_ms: int) -> None:
    HostBoard(host)
    host.core_start()
    now_ms = answered_after(host, 0, answer_ms, 0, 5)
    host.core_take(now_ms, 0)
    due_now(host, now_ms)
    assert repeated_after_ms(host, now_ms, 1) == [2 * answer_ms + 150]


def test_an_answer_to_what_was_sent_twice_measures_nothing(host: ctypes.CDLL) -> None:
    """It may be one to either transmission."""
    HostBoard(host)
    host.core_start()
    now_ms = answered_after(host, 0, 20, 0, 1)
    host.core_take(now_ms, 0)
    due_now(host, now_ms)
    assert repeated_after_ms(host, now_ms, 1) == [190]
    assert host.core_acknowledge(2, 0, now_ms + 191)
    host.core_take(now_ms + 200, 0)
    due_now(host, now_ms + 200)
    assert repeated_after_ms(host, now_ms + 200, 1) == [190]


def test_a_sample_that_the_ring_drops_while_its_answer_is_timed_does_not_end_the_timing(host: ctypes.CDLL) -> None:
    HostBoard(host)
    host.core_start()
    for _ in range(RING):
        host.core_take(0, 0)
    due_now(host, 0)
    host.core_take(0, 0)
    assert host.core_acknowledge(RING // 8, 0, 0)
    for following in range(RING // 8 + 1, RING + 2):
        due_now(host, 20 * following)
        assert host.core_acknowledge(following, 0, 20 * following + 20)
    end_ms = 20 * (RING + 2)
    host.core_take(end_ms, 0)
    assert due_now(host, end_ms) == [RING + 1]
    (pause_ms,) = repeated_after_ms(host, end_ms, 1)
    assert pause_ms < 1000, "what was measured since"
