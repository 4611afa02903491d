"""Bytes after a request: answers among other bytes, and words for bytes that are no answer."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymodbus.framer import FramerRTU

from gateway.serial_lines.modbus_answers import Answer, find_answer, other_words
from gateway.serial_lines.modbus_registers import requests
from gateway.settings import ModbusRegister


def sealed(frame: bytes) -> bytes:
    return frame + FramerRTU.compute_CRC(frame).to_bytes(2, "big")


ASKED = sealed(struct.pack(">BBHH", 17, 3, 0x0200, 2))
(REQUEST,) = requests([ModbusRegister("a", 0x0200), ModbusRegister("b", 0x0201)])


@given(st.binary(min_size=4, max_size=4), st.sampled_from([b"", ASKED]), st.binary(max_size=20), st.binary(max_size=20))
def test_an_answer_is_found_among_other_bytes(data: bytes, echo: bytes, before: bytes, after: bytes) -> None:
    frame = sealed(bytes((17, 3, 4)) + data)
    assert find_answer(echo + before + frame + after, ASKED, REQUEST) == Answer(data)


NOISE = st.lists(
    st.sampled_from(
        [b"\x00", b"\xff", b"\x11", b"\x11\x03", b"\x11\x03\x04", b"\x11\x83", ASKED[:5], ASKED[1:], ASKED]
    ),
    max_size=8,
).map(b"".join)


@given(st.binary(min_size=4, max_size=4), st.sampled_from([b"", ASKED]), NOISE, NOISE, st.data())
def test_an_answer_is_found_however_the_bytes_come(
    data: bytes, echo: bytes, before: bytes, after: bytes, cuts: st.DataObject
) -> None:
    stream = echo + before + sealed(bytes((17, 3, 4)) + data) + after
    answers: list[Answer] = []
    came = 0
    while came < len(stream):
        searched, came = came, cuts.draw(st.integers(came + 1, len(stream)))
        answer = find_answer(stream[:came], ASKED, REQUEST, searched)
        assert answer == find_answer(stream[:came], ASKED, REQUEST)
        answers += [answer] if answer else []
        if answers:
            break
    assert answers == [Answer(data)]


@given(st.binary(min_size=4, max_size=4), st.integers(0, 9 * 8 - 1))
def test_no_answer_with_one_wrong_bit_is_taken(data: bytes, bit: int) -> None:
    frame = bytearray(sealed(bytes((17, 3, 4)) + data))
    frame[bit // 8] ^= 1 << bit % 8
    assert find_answer(bytes(frame), ASKED, REQUEST) is None


@given(st.binary(min_size=4, max_size=4), st.integers(0, 8))
def test_no_part_of_an_answer_is_taken(data: bytes, length: int) -> None:
    assert find_answer(sealed(bytes((17, 3, 4)) + data)[:length], ASKED, REQUEST) is None


@pytest.mark.parametrize(
    "frame",
    [
        ASKED,
        sealed(bytes((18, 3, 4, 0, 1, 0, 2))),
        sealed(bytes((17, 4, 4, 0, 1, 0, 2))),
        sealed(bytes((17, 3, 2, 0, 1))),
        sealed(bytes((17, 0x84, 2))),
        sealed(bytes((0, 3, 4, 0, 1, 0, 2))),
    ],
    ids=["echo", "other-unit", "other-function", "other-length", "refusal-of-another-function", "broadcast"],
)
def test_what_is_no_answer_to_this_request(frame: bytes) -> None:
    assert find_answer(frame, ASKED, REQUEST) is None


@pytest.mark.parametrize(
    ("number", "table", "address"), [(4, "holding", 688), (17, "input", 673), (84, "coil", 499), (169, "discrete", 354)]
)
def test_an_echo_that_reads_as_an_answer_is_none(number: int, table: str, address: int) -> None:
    value = {"name": "x", "address": address, "table": table, "type": "u16" if table in ("holding", "input") else "bit"}
    (request,) = requests([msgspec.convert(value, ModbusRegister)])
    asked = sealed(struct.pack(">BBHH", number, request.function, address, 1))
    # Its first bytes are an answer in every other respect.
    length = 5 + request.data_bytes
    assert sealed(asked[: length - 2]) == asked[:length]
    for noise in (b"", b"\x00", b"\xff\x00"):
        for heard in range(len(asked) + 1):
            assert find_answer(noise + asked[:heard], asked, request) is None
        assert find_answer(noise + asked[:-1] + b"\x00", asked, request) is None
        data = b"\x00" * request.data_bytes
        answer = sealed(bytes((number, request.function, len(data))) + data)
        assert find_answer(noise + asked + answer, asked, request) == Answer(data)


def test_a_refusal_is_an_answer() -> None:
    assert find_answer(sealed(bytes((17, 0x83, 2))), ASKED, REQUEST) == Answer(b"", 2)


@pytest.mark.parametrize("code", [0, 1, 2, 11, 255])
def test_a_refusal_of_any_reason_is_one(code: int) -> None:
    assert find_answer(sealed(bytes((17, 0x83, code))), ASKED, REQUEST) == Answer(b"", code)


WHOLE = {
    sealed(bytes((18, 3, 4, 0, 1, 0, 2))): "unit 18 answered instead",
    sealed(bytes((18, 1, 1, 5))): "unit 18 answered instead",
    sealed(bytes((0, 3, 4, 0, 1, 0, 2))): "unit 0 answered instead",
    sealed(bytes((18, 0x83, 2))): "unit 18 answered instead",
    sealed(bytes((17, 4, 4, 0, 1, 0, 2))): "it answered function 4 (input), and 3 (holding) was asked",
    sealed(bytes((17, 1, 1, 5))): "it answered function 1 (coil), and 3 (holding) was asked",
    sealed(bytes((17, 0x84, 2))): "it refused function 4 (input), and 3 (holding) was asked",
    sealed(bytes((17, 0x86, 2))): "it refused function 6, and 3 (holding) was asked",
    sealed(bytes((17, 3, 2, 0, 1))): "its answer has 7 bytes instead of 9",
    sealed(bytes((17, 3, 0))): "its answer has 5 bytes instead of 9",
    sealed(bytes((17, 3, 250)) + bytes(250)): "its answer has 255 bytes instead of 9",
    sealed(bytes((17, 3, 2, 0, 1, 0, 2))): "its answer says that it has 2 bytes of data, and has 4",
    sealed(bytes((17, 0x83, 2, 0))): "its answer has 6 bytes instead of 5",
    sealed(bytes((18, 3, 0, 0, 0, 2))): "a request to unit 18 came, and not from here",
    sealed(bytes((17, 3, 2, 1, 0, 2))): "a request to unit 17 came, and not from here",
    sealed(bytes((18, 4, 3, 0, 0, 2))): "a request to unit 18 came, and not from here",
    sealed(bytes((18, 6, 0, 9, 0, 2))): "a frame to unit 18 with function 6 came",
    sealed(bytes((18, 16, 0, 9, 0, 1, 2, 0, 7))): "a frame to unit 18 with function 16 came",
    sealed(bytes((17, 43, 14, 1, 0, 7))): "a frame to unit 17 with function 43 came",
}
"""Frames with a right CRC that are no answer to the request, and the beginnings of their words."""


@pytest.mark.parametrize("frame", WHOLE)
@pytest.mark.parametrize("echo", [b"", ASKED, ASKED + ASKED], ids=["", "echo", "two-echoes"])
@pytest.mark.parametrize(("before", "after"), [(b"", b""), (b"\x00", b"\x00"), (b"\xff\x00\xff", b"\xff")])
def test_a_whole_frame_is_told_by_what_it_is(frame: bytes, echo: bytes, before: bytes, after: bytes) -> None:
    heard = echo + before + frame + after
    assert find_answer(heard, ASKED, REQUEST) is None
    assert other_words(heard, ASKED, REQUEST).startswith(WHOLE[frame])


@pytest.mark.parametrize("data", [b"\x00\x01", b"\x00\x01\x02"])
def test_an_answer_that_is_shorter_than_it_says(data: bytes) -> None:
    words = other_words(b"\x00" + sealed(bytes((17, 3, 4)) + data) + b"\xff", ASKED, REQUEST)
    assert words.startswith(f"its answer has {5 + len(data)} bytes instead of 9")


@pytest.mark.parametrize("frame", WHOLE)
def test_with_a_wrong_check_nothing_is_known_of_a_frame(frame: bytes) -> None:
    assert other_words(frame[:-1] + bytes((frame[-1] ^ 1,)), ASKED, REQUEST) == "its answer was damaged"


# Not in the last byte: where that was 0, the bytes before it have a right CRC by themselves.
@given(st.binary(min_size=4, max_size=4), st.integers(0, 8 * 8 - 1))
def test_an_answer_with_one_wrong_bit_was_damaged(data: bytes, bit: int) -> None:
    frame = bytearray(sealed(bytes((17, 3, 4)) + data))
    frame[bit // 8] ^= 1 << bit % 8
    assert other_words(bytes(frame), ASKED, REQUEST) == "its answer was damaged"


@given(st.binary(min_size=4, max_size=4), st.integers(3, 8), st.sampled_from([b"", ASKED]))
def test_an_answer_that_ends_early_was_cut_short(data: bytes, length: int, echo: bytes) -> None:
    heard = echo + sealed(bytes((17, 3, 4)) + data)[:length]
    assert other_words(heard, ASKED, REQUEST) == "its answer was cut short"


@pytest.mark.parametrize("noise", [b"\x00", b"\xff", b"\x00\xff\x00", ASKED[:3], ASKED[:7]])
def test_a_few_bytes_and_a_part_of_the_echo_are_no_answer(noise: bytes) -> None:
    assert other_words(noise, ASKED, REQUEST) == "no answer, only noise"


@pytest.mark.parametrize("echo", [b"", ASKED, ASKED + ASKED])
def test_nothing_but_the_echo_is_no_answer(echo: bytes) -> None:
    assert other_words(echo, ASKED, REQUEST) == "no answer"


def test_of_several_frames_the_unit_that_was_asked_counts() -> None:
    others = sealed(bytes((18, 3, 4, 0, 1, 0, 2)))
    own = sealed(bytes((17, 3, 2, 0, 1)))
    assert other_words(others + own + others, ASKED, REQUEST).startswith("its answer has 7 bytes instead of 9")


@pytest.mark.parametrize(("data_bytes", "words"), [(1, "its answer has 6 bytes instead of 7"), (2, "")])
@pytest.mark.parametrize("table", ["coil", "discrete"])
def test_bits_are_told_as_registers_are(table: str, data_bytes: int, words: str) -> None:
    members = {"table": table, "type": "bit"}
    (request,) = requests(
        [msgspec.convert({"name": str(at), "address": at, **members}, ModbusRegister) for at in range(9)]
    )
    asked = sealed(struct.pack(">BBHH", 17, request.function, 0, 9))
    heard = sealed(bytes((17, request.function, data_bytes)) + bytes(data_bytes))
    assert (find_answer(heard, asked, request) is None) == bool(words)
    assert not words or other_words(heard, asked, request).startswith(words)
    whole = sealed(bytes((17, 3 - request.function, 2, 0, 0)))
    assert other_words(whole, asked, request).startswith("it answered function")


@given(st.binary(max_size=2_000))
def test_any_bytes_heard_are_an_answer_or_have_words(heard: bytes) -> None:
    assert find_answer(heard, ASKED, REQUEST) is not None or len(other_words(heard, ASKED, REQUEST)) < 120
