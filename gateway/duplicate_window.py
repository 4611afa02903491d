"""Which of a device's recent sequences are on disk: tells a retransmission from a new reading."""

import zlib
from array import array
from enum import Enum
from typing import Self

WINDOW_SEQUENCES = 64
"""How many recent sequences are remembered per run of a device; a sensor with 2 KB of RAM holds fewer."""


class Verdict(Enum):
    NEW = "new"
    DUPLICATE = "duplicate"
    """Same sequence, same payload: acknowledge again, store nothing."""
    CONFLICT = "conflict"
    """Same sequence, another payload: a false match would lose data, so it is stored, and flagged."""
    BELOW = "below-window"
    """Too old to tell: stored, and left to the cloud, which knows every sequence there ever was."""


class DuplicateWindow:
    """The last `WINDOW_SEQUENCES` sequences of one run (one boot) of one device, with their payloads' CRC-32.

    Sequence s lives in slot s mod WINDOW_SEQUENCES until a higher one takes the slot.
    """

    __slots__ = ("_digests", "_sequences")

    def __init__(self) -> None:
        self._sequences = array("q", [-1]) * WINDOW_SEQUENCES
        self._digests = array("I", [0]) * WINDOW_SEQUENCES

    def admit(self, sequence: int, payload: bytes) -> Verdict:
        """Judge a reading, and remember it if it is new or a conflict. `sequence` is 0 to 2^63 - 1."""
        slot = sequence % WINDOW_SEQUENCES
        held = self._sequences[slot]
        if held > sequence:
            return Verdict.BELOW
        digest = zlib.crc32(payload)
        if held == sequence:
            if self._digests[slot] == digest:
                return Verdict.DUPLICATE
            self._digests[slot] = digest
            return Verdict.CONFLICT
        self._sequences[slot] = sequence
        self._digests[slot] = digest
        return Verdict.NEW

    def sequences(self) -> frozenset[int]:
        """Those that are remembered."""
        return frozenset(sequence for sequence in self._sequences if sequence >= 0)

    def to_bytes(self) -> bytes:
        return self._sequences.tobytes() + self._digests.tobytes()

    @classmethod
    def from_bytes(cls, stored: bytes) -> Self:
        """Restore what `to_bytes` gave. Raises ValueError on another length."""
        window = cls()
        split = WINDOW_SEQUENCES * window._sequences.itemsize
        if len(stored) != split + WINDOW_SEQUENCES * window._digests.itemsize:
            raise ValueError(f"a duplicate window of {len(stored)} bytes is not one of this version's")
        window._sequences = array("q", stored[:split])
        window._digests = array("I", stored[split:])
        return window
