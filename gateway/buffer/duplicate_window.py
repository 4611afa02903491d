"""Remembers a device's recent sequences that are on disk, to tell retransmissions from new readings."""

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Container
from enum import Enum
from typing import Self

from gateway.reading import WINDOW_SEQUENCES


class Verdict(Enum):
    NEW = "new"
    DUPLICATE = "duplicate"
    """Known sequence, same payload: acknowledged again, not stored."""
    CONFLICT = "conflict"
    """Known sequence, another payload: stored and flagged, as a false match would lose data."""
    BELOW = "below-window"
    """Too old to tell: stored, and judged in the cloud, which knows every sequence."""


class DuplicateWindow:
    """The highest `WINDOW_SEQUENCES` sequences of one run (one boot) of one device, with their payloads' CRC-32.

    It counts sequences that came, not the numbers between them. A full sensor uses up numbers for readings that it
    drops, and the readings that it holds from before must still be recognised. Empty places hold -1.
    """

    __slots__ = ("_digests", "_sequences")

    def __init__(self) -> None:
        # Ascending, so that a sequence that comes in order is added at the end.
        self._sequences = array("q", [-1]) * WINDOW_SEQUENCES
        self._digests = array("I", [0]) * WINDOW_SEQUENCES

    def admit(self, sequence: int, payload: bytes) -> Verdict:
        """Judge a reading, and remember it if it is new or a conflict. `sequence` is 0 to 2^63 - 1."""
        sequences, digests = self._sequences, self._digests
        digest = zlib.crc32(payload)
        place = bisect_right(sequences, sequence) - 1
        if place < 0:
            return Verdict.BELOW
        if sequences[place] == sequence:
            if digests[place] == digest:
                return Verdict.DUPLICATE
            digests[place] = digest
            return Verdict.CONFLICT
        del sequences[0], digests[0]
        sequences.insert(place, sequence)
        digests.insert(place, digest)
        return Verdict.NEW

    def sequences(self) -> frozenset[int]:
        """The remembered sequences."""
        return frozenset(sequence for sequence in self._sequences if sequence >= 0)

    def copy(self) -> Self:
        """A window with the same content."""
        window = type(self)()
        window._sequences, window._digests = self._sequences[:], self._digests[:]  # noqa: SLF001 - of the same class
        return window

    def to_bytes(self, but: Container[int] = ()) -> bytes:
        """The form in the file, without some sequences."""
        if not but:
            return self._sequences.tobytes() + self._digests.tobytes()
        held = sorted(
            (-1, 0) if sequence in but else (sequence, digest)
            for sequence, digest in zip(self._sequences, self._digests, strict=True)
        )
        return array("q", [each[0] for each in held]).tobytes() + array("I", [each[1] for each in held]).tobytes()

    @classmethod
    def from_bytes(cls, stored: bytes) -> Self:
        """Restore a window from `to_bytes`. Raises ValueError for another length."""
        window = cls()
        split = WINDOW_SEQUENCES * window._sequences.itemsize
        if len(stored) != split + WINDOW_SEQUENCES * window._digests.itemsize:
            raise ValueError(f"a duplicate window of {len(stored)} bytes is not one of this version's")
        # Earlier versions stored a sequence in slot s mod `WINDOW_SEQUENCES`, in no order.
        held = sorted(zip(array("q", stored[:split]), array("I", stored[split:]), strict=True))
        window._sequences = array("q", [sequence for sequence, _ in held])
        window._digests = array("I", [digest for _, digest in held])
        return window
