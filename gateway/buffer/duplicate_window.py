"""Remembers a device's recent sequences that are on disk, to tell retransmissions from new readings."""

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Container
from enum import Enum
from itertools import accumulate, pairwise
from typing import Self

from gateway.reading import WINDOW_SEQUENCES

_FORMER_BYTES = WINDOW_SEQUENCES * (8 + 4)
"""Length of a window that a former version stored. No window of this version has it."""
_FIRST_BYTES = 8
_IN_ORDER = "1"
"""Type of steps that are all 1, and take no bytes."""
_STEP_BYTES = {_IN_ORDER: 0, "B": 1, "H": 2, "I": 4, "Q": 8}
_SEQUENCE_MAX = 2**63 - 1


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
        """The form in the file, without some sequences. It is short, as the card gets it again and again.

        Nothing for an empty window. Otherwise the first sequence, the steps from each to the next, the digests. The
        first byte is the steps' type, the smallest that fits: `array`'s name of it, or `_IN_ORDER`.
        """
        held = [
            (sequence, digest)
            for sequence, digest in zip(self._sequences, self._digests, strict=True)
            if sequence >= 0 and sequence not in but
        ]
        if not held:
            return b""
        steps = [after - before for (before, _), (after, _) in pairwise(held)]
        most = max(steps, default=1)
        kind = next(kind for kind, size in _STEP_BYTES.items() if most < max(2, 1 << 8 * size))
        first = held[0][0].to_bytes(_FIRST_BYTES, "little")
        between = b"" if kind == _IN_ORDER else array(kind, steps).tobytes()
        return kind.encode() + first + between + array("I", [digest for _, digest in held]).tobytes()

    @classmethod
    def from_bytes(cls, stored: bytes) -> Self:
        """Restore a window from `to_bytes`. Raises ValueError if it is none."""
        held = _former(stored) if len(stored) == _FORMER_BYTES else _held(stored)
        window = cls()
        empty = WINDOW_SEQUENCES - len(held)
        window._sequences = array("q", [-1] * empty + [sequence for sequence, _ in held])
        window._digests = array("I", [0] * empty + [digest for _, digest in held])
        return window


def _held(stored: bytes) -> list[tuple[int, int]]:
    """The sequences and digests of a stored window. Raises ValueError."""
    if not stored:
        return []
    kind, steps_from = chr(stored[0]), 1 + _FIRST_BYTES
    size = _STEP_BYTES.get(kind, 0)
    count, rest = divmod(len(stored) - steps_from + size, size + 4)
    if kind not in _STEP_BYTES or rest or not 1 <= count <= WINDOW_SEQUENCES:
        raise ValueError(f"a duplicate window of {len(stored)} bytes is not one of this version's")
    digests_from = steps_from + (count - 1) * size
    first = int.from_bytes(stored[1:steps_from], "little")
    steps = [1] * (count - 1) if kind == _IN_ORDER else array(kind, stored[steps_from:digests_from])
    sequences = list(accumulate(steps, initial=first))
    if sequences[-1] > _SEQUENCE_MAX:
        raise ValueError("a duplicate window has a sequence that is none")
    return list(zip(sequences, array("I", stored[digests_from:]), strict=True))


def _former(stored: bytes) -> list[tuple[int, int]]:
    """The same of a window that a former version stored: all places, also empty ones."""
    split = WINDOW_SEQUENCES * 8
    # The first versions had a sequence in the place s mod `WINDOW_SEQUENCES`, in no order.
    return sorted(zip(array("q", stored[:split]), array("I", stored[split:]), strict=True))
