"""Recognises binary protocols on ports that should bring text, by frames of one length that repeat some bytes."""

from typing import NamedTuple

FRAME_BYTES_MIN = 4
FRAME_BYTES_MAX = 64
FRAMES_MIN = 4
"""Frames in a row that are no chance if each has the same two bytes in one place."""
_CONTROL_SHARE_MIN = 0.1
"""Share of control characters that no text reaches, in UTF-8 or in Latin-1. Binary numbers are full of zeros."""
_TEXT_CONTROLS = frozenset(b"\t\n\v\f\r\x1b")


class BinaryFrames(NamedTuple):
    """Frames of one length."""

    length: int
    """In bytes."""
    pair: bytes
    """Two bytes that stand side by side in each frame, always at one place."""


def binary_frames(received: bytes) -> BinaryFrames | None:
    """The frames that make up all of `received`; None if other bytes are in it. The ends may be cut off anywhere."""
    controls = sum(byte < 0x20 and byte not in _TEXT_CONTROLS for byte in received)
    if not received or controls < len(received) * _CONTROL_SHARE_MIN:
        return None
    for start in range(min(FRAME_BYTES_MAX, len(received) // FRAMES_MIN)):
        pair = received[start : start + 2]
        length = received.find(pair, start + 1) - start
        if not FRAME_BYTES_MIN <= length <= FRAME_BYTES_MAX:
            continue
        firsts, seconds = received[start::length], received[start + 1 :: length]
        if len(seconds) >= FRAMES_MIN and set(firsts) == {pair[0]} and set(seconds) == {pair[1]}:
            return BinaryFrames(length, pair)
    return None
