"""A format is fed bytes in any split, and held to its contract and its bounds."""

from collections.abc import Callable

import pytest

from gateway.formats.cutter import REASONS_MAX, TOO_LONG, Cut, Cutter, FormatError
from gateway.formats.piece import Piece


class Made:
    """A format that is one function."""

    def __init__(self, cut: Callable[[bytes], Piece | None], bytes_max: int = 8) -> None:
        self.cut = cut
        self.bytes_max = bytes_max


def fields(received: bytes) -> Piece | None:
    """Readings between commas; an `x` in one is damage, and spaces are passed over."""
    if received.startswith(b" "):
        return Piece(1)
    end = received.find(b",")
    if end < 0:
        return None
    field = received[:end]
    return Piece(end + 1, damage="x-in-it") if b"x" in field else Piece(end + 1, (field,))


def test_pieces_are_cut_off_and_those_that_are_passed_over_are_not_told() -> None:
    cutter = Cutter(Made(fields))
    assert cutter.feed(b"ab") == []
    assert cutter.feed(b"c,  d") == [Cut((b"abc",))]
    assert cutter.feed(b",xy,") == [Cut((b"d",)), Cut(damage="x-in-it", piece=b"xy,")]


def test_bytes_without_a_whole_piece_are_damage_once_there_are_too_many() -> None:
    cutter = Cutter(Made(fields))
    assert cutter.feed(b"1234567") == []
    assert cutter.feed(b"89,") == [Cut(damage=TOO_LONG, piece=b"12345678"), Cut((b"9",))]
    # However much comes at once, the format is shown no more.
    shown = []
    Cutter(Made(lambda received: shown.append(len(received)))).feed(bytes(100))
    assert set(shown) == {4, 8}


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Piece(0), "cut off 0 of 2 bytes"),
        (Piece(3), "cut off 3 of 2 bytes"),
        (Piece(1.0), "cut off 1.0 of 2 bytes"),  # type: ignore[arg-type]
        (Piece(1, b"a"), "no tuple of bytes"),  # type: ignore[arg-type]
        (Piece(1, ("a",)), "no tuple of bytes"),  # type: ignore[arg-type]
        (Piece(1, damage="Bad value 7"), "gave 'Bad value 7' as reason"),
        (Piece(1, damage="a" * 41), "as reason"),
    ],
)
def test_a_format_that_breaks_its_contract_is_told_how(piece: Piece, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        Cutter(Made(lambda _: piece)).feed(b"ab")


@pytest.mark.parametrize("bytes_max", [0, 70_000, None, "8", True])
def test_a_format_without_a_bound_is_refused(bytes_max: object) -> None:
    with pytest.raises(FormatError, match="has bytes_max ="):
        Cutter(Made(fields, bytes_max))  # type: ignore[arg-type]


def test_a_format_gives_a_bounded_number_of_reasons() -> None:
    cutter = Cutter(Made(lambda received: Piece(1, damage=f"value-{received[0]}")))
    assert len(cutter.feed(bytes(range(REASONS_MAX)) * 2)) == 2 * REASONS_MAX
    with pytest.raises(FormatError, match="more than 16 different reasons"):
        cutter.feed(b"\xff")
