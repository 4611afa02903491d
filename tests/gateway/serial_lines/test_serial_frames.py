"""Frames of the serial line on the wire, and that nothing else is ever taken for a frame."""

import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.serial_lines.frames import (
    COMMAND_PAYLOAD_BYTES_MAX,
    DELIMITER,
    PAYLOAD_BYTES_MAX,
    SENSOR_CONTENT_BYTES_MAX,
    Ack,
    CommandFrame,
    CommandReply,
    Data,
    Defect,
    Frame,
    FrameDecoder,
    Hello,
    HelloRequest,
    Probe,
    Reply,
    cobs_decode,
    cobs_encode,
    decode_frame,
    encode_frame,
)

U8 = st.integers(0, 0xFF)
U32 = st.integers(0, 0xFFFF_FFFF)
NAMES = st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789-é", min_size=1, max_size=8)
OF_SENSORS: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Hello, U32, U32, U8, U32, U32, NAMES, NAMES, st.lists(NAMES, max_size=3).map(tuple[str, ...])),
    st.builds(Data, U32, U32, U32, U32, U8, st.binary(max_size=PAYLOAD_BYTES_MAX)),
    st.builds(Reply, U32, U32, st.integers(0, 999)),
    st.builds(CommandReply, U32, U32, U8),
)
FRAMES: st.SearchStrategy[Frame] = st.one_of(
    OF_SENSORS,
    st.builds(Ack, U32, U32, U32),
    st.builds(Probe, U32),
    st.builds(HelloRequest),
    st.builds(CommandFrame, U32, U32, st.binary(max_size=COMMAND_PAYLOAD_BYTES_MAX)),
)
DATA = Data(run=7, sequence=1, oldest=0, tick_ms=1234, stream=0, payload=b'{"t":21.5}')


def wire(content: bytes) -> bytes:
    return cobs_encode(content + zlib.crc32(content).to_bytes(4, "little")) + DELIMITER


def test_a_probe_on_the_wire() -> None:
    # Type 4 and the nonce, least significant byte first; then the CRC-32; then the zero that ends the frame.
    content = bytes.fromhex("04 78563412")
    assert Probe(0x12345678).to_bytes() == content
    crc = zlib.crc32(content).to_bytes(4, "little")
    assert encode_frame(Probe(0x12345678)) == b"\x0a" + content + crc + b"\0"


def test_the_content_of_each_type_is_as_the_contract_says() -> None:
    hello = Hello(7, 0x1A2B3C4D, 2, 3, 9, "attic", "1.0", ("thermo", "door"))
    assert hello.to_bytes() == bytes.fromhex(
        "01 01 07000000 4d3c2b1a 02 03000000 09000000 05 6174746963 03 312e30 0b 746865726d6f2c646f6f72"
    )
    assert DATA.to_bytes() == bytes.fromhex("02 07000000 01000000 00000000 d2040000 00") + b'{"t":21.5}'
    assert Ack(7, 5, 0b10).to_bytes() == bytes.fromhex("03 07000000 05000000 02000000")
    assert Reply(1, 2, 999).to_bytes() == bytes.fromhex("05 01000000 02000000 e703")
    assert HelloRequest().to_bytes() == b"\x06"
    assert CommandFrame(7, 9, b"on").to_bytes() == bytes.fromhex("07 07000000 09000000 6f6e")
    assert CommandReply(7, 9, 1).to_bytes() == bytes.fromhex("08 07000000 09000000 01")


@pytest.mark.parametrize(
    ("plain", "encoded"),
    [
        (b"", "01"),
        (b"\0", "01 01"),
        (b"\x11\x22\0\x33", "03 11 22 02 33"),
        (b"\x11\0\0\0", "02 11 01 01 01"),
        (bytes(range(1, 255)), "ff" + bytes(range(1, 255)).hex()),
        (bytes(range(256)), "01 ff" + bytes(range(1, 255)).hex() + "02 ff"),
    ],
)
def test_cobs_by_known_examples(plain: bytes, encoded: str) -> None:
    assert cobs_encode(plain) == bytes.fromhex(encoded)
    assert cobs_decode(bytes.fromhex(encoded)) == plain


@pytest.mark.parametrize("encoded", ["00", "03 11 00", "05 11 22"])
def test_cobs_with_a_zero_inside_or_a_run_cut_short_is_refused(encoded: str) -> None:
    with pytest.raises(ValueError, match="COBS"):
        cobs_decode(bytes.fromhex(encoded))


@given(st.binary(max_size=600) | st.lists(st.sampled_from([0, 1, 255]), max_size=600).map(bytes))
def test_cobs_round_trip_has_no_zero_inside(plain: bytes) -> None:
    encoded = cobs_encode(plain)
    assert 0 not in encoded
    assert cobs_decode(encoded) == plain


@given(FRAMES)
def test_every_frame_comes_back(frame: Frame) -> None:
    encoded = encode_frame(frame)
    assert encoded.index(DELIMITER) == len(encoded) - 1
    assert decode_frame(encoded[:-1]) == frame


@given(st.lists(FRAMES, max_size=5), st.data())
def test_the_stream_may_be_split_anywhere(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(frame) for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = FrameDecoder()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[start:end])
    assert received == frames
    assert not decoder.defects


def test_a_byte_at_a_time() -> None:
    decoder = FrameDecoder()
    stream = encode_frame(DATA) + DELIMITER + encode_frame(Probe(0))
    assert [frame for byte in stream for frame in decoder.feed(bytes((byte,)))] == [DATA, Probe(0)]


@given(FRAMES)
def test_no_single_bit_error_passes(frame: Frame) -> None:
    encoded = encode_frame(frame)
    following = encode_frame(Probe(1))
    for position in range(len(encoded) * 8):
        damaged = bytearray(encoded)
        damaged[position // 8] ^= 1 << position % 8
        decoder = FrameDecoder()
        # The zero in between ends the frame whose own zero may be the damaged byte: then the frame itself is whole.
        # Such frames are looked for among those of sensors.
        is_of_sensor = isinstance(frame, Hello | Data | Reply | CommandReply)
        is_whole = is_of_sensor and position // 8 == len(encoded) - 1
        assert decoder.feed(bytes(damaged) + DELIMITER + following) == [frame] * is_whole + [Probe(1)]
        assert decoder.defects.total() >= 1


@given(st.lists(st.binary(max_size=400), max_size=20))
def test_garbage_never_raises_and_is_left_behind_at_the_next_zero(pieces: list[bytes]) -> None:
    decoder = FrameDecoder()
    for piece in pieces:
        decoder.feed(piece)
    decoder.feed(DELIMITER)
    assert decoder.feed(encode_frame(DATA)) == [DATA]


def test_joining_in_the_middle_of_a_frame_costs_that_frame_only() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(encode_frame(DATA)[9:] + encode_frame(Probe(5))) == [Probe(5)]
    assert decoder.defects.total() == 1


def test_a_line_without_a_zero_is_held_to_two_frames_of_memory() -> None:
    decoder = FrameDecoder()
    for _ in range(1000):
        decoder.feed(b"\x55" * 100)
        assert len(decoder._partial) <= 2 * (SENSOR_CONTENT_BYTES_MAX + 5)
    assert decoder.defects == {Defect.TOO_LONG: 1}
    assert decoder.feed(DELIMITER + encode_frame(DATA)) == [DATA]


@pytest.mark.parametrize(
    "noise", [b"\xff", b"Boot 2.1\r\n", b"\x03\x02", b"\x55" * 100, encode_frame(DATA)[:-5], b"U" * 700]
)
@pytest.mark.parametrize("frame", [DATA, Hello(7, 9, 2, 3, 9, "d" * 63, "f" * 43, ())])
def test_noise_before_and_behind_a_whole_frame_does_not_cost_it_and_is_counted_once(noise: bytes, frame: Frame) -> None:
    encoded = encode_frame(frame)[:-1]
    for stream in (noise + encoded, encoded + noise, noise + encoded + noise):
        decoder = FrameDecoder()
        assert decoder.feed(stream + DELIMITER) == [frame]
        assert decoder.defects.total() == 1
        assert decoder.feed(encode_frame(Probe(1))) == [Probe(1)]


@given(st.lists(OF_SENSORS, min_size=2, max_size=3), st.sampled_from([b"", b"\x01", b"\x80"]))
def test_frames_whose_zero_between_them_was_lost_or_changed_all_come(frames: list[Frame], between: bytes) -> None:
    decoder = FrameDecoder()
    assert decoder.feed(between.join(encode_frame(frame)[:-1] for frame in frames) + DELIMITER) == frames
    assert decoder.defects.total() == 1


@given(
    st.lists(
        st.binary(max_size=300) | FRAMES.map(encode_frame) | FRAMES.map(lambda frame: encode_frame(frame)[:-1]),
        max_size=8,
    ).map(b"".join),
    st.lists(st.integers(0, 2000), max_size=8),
)
def test_noise_and_frames_split_anywhere_give_the_same(stream: bytes, cuts: list[int]) -> None:
    whole, split = FrameDecoder(), FrameDecoder()
    positions = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    received = [frame for start, end in pairwise(positions) for frame in split.feed(stream[start:end])]
    assert received == whole.feed(stream)
    assert split.defects == whole.defects


def test_a_piece_made_to_be_slow_is_searched_in_a_bounded_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each second byte may be the beginning of a frame, and all that follows belong to it.
    slow = b"\x02\x01" * 66
    steps = 0
    crc32 = zlib.crc32

    def counted(data: bytes, crc: int = 0) -> int:
        nonlocal steps
        steps += 1
        return crc32(data, crc)

    monkeypatch.setattr("gateway.serial_lines.frames.zlib.crc32", counted)
    assert FrameDecoder().feed(slow + DELIMITER) == []
    assert 100 < steps < 300


def test_the_longest_frame_fits_and_the_next_longer_one_does_not() -> None:
    longest = Hello(1, 2, 3, 4, 5, "d" * 63, "f" * 43, ())
    assert len(longest.to_bytes()) == SENSOR_CONTENT_BYTES_MAX
    decoder = FrameDecoder()
    assert decoder.feed(encode_frame(longest)) == [longest]
    longer = Hello(1, 2, 3, 4, 5, "d" * 63, "f" * 44, ())
    assert decoder.feed(wire(longer.to_bytes())) == []
    assert decoder.defects == {Defect.TOO_LONG: 1}
    with pytest.raises(ValueError, match="at most 128"):
        encode_frame(longer)


@pytest.mark.parametrize(
    ("encoded", "defect"),
    [
        (b"\x09\x01\x02" + DELIMITER, Defect.BAD_COBS),
        (cobs_encode(DATA.to_bytes() + b"crc!") + DELIMITER, Defect.BAD_CRC),
        (b"\x01" + DELIMITER, Defect.BAD_CRC),
        (cobs_encode(bytes(4)) + DELIMITER, Defect.BAD_FIELDS),
        (wire(b"\x7f"), Defect.UNKNOWN_TYPE),
        (wire(b"\x01\x02 another version"), Defect.UNKNOWN_VERSION),
        (wire(b"\x01\x01"), Defect.BAD_FIELDS),
        (wire(Hello(1, 2, 3, 4, 5, "d", "f", ()).to_bytes() + b"x"), Defect.BAD_FIELDS),
        (wire(Hello(1, 2, 3, 4, 5, "d", "f", ()).to_bytes()[:-1]), Defect.BAD_FIELDS),
        (wire(Hello(1, 2, 3, 4, 5, "d", "f", ()).to_bytes().replace(b"\x01d", b"\x01\xff")), Defect.BAD_UTF8),
        (wire(DATA.to_bytes()[:17]), Defect.BAD_FIELDS),
        (wire(Data(1, 2, 3, 4, 5, b"").to_bytes() + bytes(65)), Defect.BAD_FIELDS),
        (wire(Ack(1, 2, 3).to_bytes()[:-1]), Defect.BAD_FIELDS),
        (wire(Probe(1).to_bytes() + b"x"), Defect.BAD_FIELDS),
        (wire(bytes.fromhex("05 01000000 02000000 e803")), Defect.BAD_FIELDS),
        (wire(b"\x06x"), Defect.BAD_FIELDS),
    ],
)
def test_each_defect_is_counted_by_its_kind(encoded: bytes, defect: Defect) -> None:
    decoder = FrameDecoder()
    assert decoder.feed(encoded) == []
    assert decoder.defects == {defect: 1}


@pytest.mark.parametrize(
    "frame",
    [
        Ack(2**32, 0, 0),
        Probe(-1),
        Reply(0, 0, 1000),
        Data(0, 0, 0, 0, 0, bytes(PAYLOAD_BYTES_MAX + 1)),
        Hello(0, 0, 256, 0, 0, "d", "f", ()),
        Hello(0, 0, 0, 0, 0, "d" * 256, "f", ()),
    ],
)
def test_a_field_that_does_not_fit_is_refused_when_encoding(frame: Frame) -> None:
    with pytest.raises(ValueError, match=r"fit|millisecond"):
        encode_frame(frame)
