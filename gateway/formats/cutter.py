"""Feeds a format with bytes, split anywhere, and holds it to its contract and its bounds."""

import re
from typing import Final, NamedTuple

from gateway.formats.piece import Format, Piece

TOO_LONG: Final = "piece-too-long"
"""Damage: `bytes_max` bytes without a whole piece."""
FAILED: Final = "format-failed"
"""Damage, and reason of a loss: a format of one's own failed at these bytes, or did not run while they came."""
BYTES_MAX: Final = 65_537
"""Largest `bytes_max` of a format: the longest line of text with its end."""
REASONS_MAX: Final = 16
"""Different reasons of damage that one format may give. Each is a counter of its own."""
REASON: Final = re.compile(r"[a-z][a-z0-9-]{0,39}")


class FormatError(Exception):
    """A format broke its contract; the message completes "the format ..."."""


class Cut(NamedTuple):
    """A piece that was cut off, unless it was passed over."""

    readings: tuple[bytes, ...] = ()
    damage: str = ""
    noise: bool = False
    piece: bytes = b""
    """With damage, the piece as it came."""


class Cutter:
    """A format with the bytes that it has not cut off yet: fewer than its `bytes_max`, between two calls."""

    __slots__ = ("_bytes_max", "_format", "_reasons", "_received")

    def __init__(self, format_: Format) -> None:
        """Raises FormatError."""
        bytes_max = getattr(format_, "bytes_max", None)
        if type(bytes_max) is not int or not 1 <= bytes_max <= BYTES_MAX:
            raise FormatError(f"has bytes_max = {bytes_max!r}; write a whole number from 1 to {BYTES_MAX}")
        self._format = format_
        self._bytes_max = bytes_max
        self._received = b""
        self._reasons: set[str] = set()

    @property
    def left(self) -> int:
        """Number of bytes that are not cut off yet."""
        return len(self._received)

    def feed(self, data: bytes) -> list[Cut]:
        """Take in the next bytes, and return the pieces that end in them.

        A piece depends on no byte beyond the window of `bytes_max` bytes, so the reading of a flood has a bounded cost.
        Raises FormatError, and any error of the format itself.
        """
        received, at = self._received + data, 0
        cuts: list[Cut] = []
        while at < len(received):
            window = received[at : at + self._bytes_max]
            piece = self._format.cut(window)
            if piece is None:
                if len(window) < self._bytes_max:
                    break
                cuts.append(Cut(damage=TOO_LONG, piece=window))
                at += len(window)
                continue
            if not isinstance(piece, Piece):
                raise FormatError(f"returned {piece!r:.60}; return a Piece, or None")
            length, readings, damage, noise = piece
            self._judge(length, len(window), readings, damage)
            if readings or damage or noise:
                cuts.append(Cut(readings, damage, bool(noise), window[:length] if damage else b""))
            at += length
        self._received = received[at:]
        return cuts

    def _judge(self, length: int, shown: int, readings: tuple[bytes, ...], damage: str) -> None:
        if type(length) is not int or not 1 <= length <= shown:
            raise FormatError(f"cut off {length!r} of {shown} bytes; cut off at least 1, and at most all")
        if type(readings) is not tuple or not all(type(reading) is bytes for reading in readings):
            raise FormatError("gave readings that are no tuple of bytes; write (payload,), with payload in bytes")
        if damage and damage not in self._reasons:
            if type(damage) is not str or REASON.fullmatch(damage) is None:
                raise FormatError(f"gave {damage!r:.60} as reason; write small letters, digits and hyphens, 40 at most")
            if len(self._reasons) >= REASONS_MAX:
                raise FormatError(f"gave more than {REASONS_MAX} different reasons; write few, and no values into them")
            self._reasons.add(damage)
