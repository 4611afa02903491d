"""Packets are the same however the stream is cut, and none grows beyond its bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.mqtt import packet_reader
from gateway.mqtt.packet_reader import (
    Message,
    Packet,
    PacketReader,
    connack,
    message,
    packet_id,
    suback,
)
from gateway.mqtt.protocol import MalformedPacketError, remaining_length

BYTES_MAX = 300


def packed(first: int, body: bytes) -> bytes:
    length, digits = len(body), b""
    while True:
        length, digit = divmod(length, 128)
        digits += bytes([digit | 0x80 if length else digit])
        if not length:
            return bytes([first]) + digits + body


@given(
    packets=st.lists(
        st.tuples(st.sampled_from([0x30, 0x32, 0x40, 0xD0]), st.sampled_from([0, 1, 127, 128, 300, 301, 20_000])),
        max_size=8,
    ),
    cuts=st.lists(st.integers(1, 400)),
)
def test_packets_come_out_as_they_went_in(packets: list[tuple[int, int]], cuts: list[int]) -> None:
    bodies = [(first, bytes(number % 251 for number in range(length))) for first, length in packets]
    stream = b"".join(packed(first, body) for first, body in bodies)
    reader = PacketReader(BYTES_MAX)
    found: list[Packet] = []
    for cut in cuts:
        found += reader.receive(stream[:cut])
        assert len(reader._rest) <= BYTES_MAX + 5
        stream = stream[cut:]
    found += reader.receive(stream)
    assert found == [Packet(first, body[:BYTES_MAX], max(0, len(body) - BYTES_MAX)) for first, body in bodies]


def test_a_large_packet_is_looked_at_once_and_not_at_each_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in hundreds of reads. Joining them at each read would cost the square of its length."""
    looked = 0

    def counted(data: bytes, position: int) -> tuple[int, int] | None:
        nonlocal looked
        looked += 1
        return remaining_length(data, position)

    monkeypatch.setattr(packet_reader, "remaining_length", counted)
    stream = packed(0x30, b"x" * 100_000) + packed(0x30, b"y" * 200)
    reader = PacketReader(1_000_000)
    found: list[Packet] = []
    for position in range(0, len(stream), 100):
        found += reader.receive(stream[position : position + 100])
    assert [len(packet.body) for packet in found] == [100_000, 200]
    assert looked <= 5


def test_a_length_of_five_bytes_is_none() -> None:
    with pytest.raises(MalformedPacketError):
        PacketReader(BYTES_MAX).receive(b"\x30\xff\xff\xff\xff")


def test_what_a_publish_carries() -> None:
    assert message(Packet(0x30, b"\x00\x01t21", 0)) == Message(b"t", 0, b"21")
    assert message(Packet(0x32, b"\x00\x01t\x00\x0721", 0)) == Message(b"t", 7, b"21")
    assert packet_id(Packet(0x62, b"\x00\x07", 0)) == 7


@pytest.mark.parametrize(
    "packet",
    [
        (0x30, b""),
        (0x30, b"\x00\x09t"),
        (0x30, b"\x00\x00x"),
        (0x32, b"\x00\x01t"),
        (0x32, b"\x00\x01t\x00\x00"),
        (0x36, b"\x00\x01t\x00\x07"),
    ],
)
def test_what_is_no_publish_is_refused(packet: tuple[int, bytes]) -> None:
    with pytest.raises(MalformedPacketError):
        message(Packet(*packet, 0))


def test_what_connack_and_suback_carry() -> None:
    assert connack(Packet(0x20, b"\x01\x00", 0)) == (0, True)
    assert connack(Packet(0x20, b"\x00\x05", 0)) == (5, False)
    assert suback(Packet(0x90, b"\x00\x07\x01\x80", 0)) == (7, b"\x01\x80")


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x00\x00\x00"])
def test_what_is_no_connack_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedPacketError):
        connack(Packet(0x20, body, 0))


def test_a_suback_without_its_identifier_is_refused() -> None:
    with pytest.raises(MalformedPacketError):
        suback(Packet(0x90, b"\x00", 0))


def test_what_has_no_packet_identifier_is_refused() -> None:
    with pytest.raises(MalformedPacketError):
        packet_id(Packet(0x62, b"", 0))
