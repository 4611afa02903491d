"""Remembers which sequence numbers of each lane may stand in `log`, in bounded memory and without Spark.

A lane's numbers are dense. So a lane has seen all numbers below a limit, and a few above it, which are kept as bits. A
copy is found by its number alone, whatever its partition, topic or order. A number may never come, because it was
dropped at the edge or its topic is not read. The bits then do not grow for ever: they move on, and all numbers below
them count as numbers that may have been seen. `log` itself has the answer.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

AHEAD_MAX = 1 << 20
"""Numbers from the first missing one on that are held as bits, in at most 128 kB."""
FAR_MAX = 1 << 12
"""Numbers above the bits that are held. More make the bits move on. So few may be damaged or forged."""
SPANS_MAX = 48
"""Spans of a lane's numbers and their batches. Beyond it, neighbours are joined."""

LOW_BITS_MAX = 1 << 12
"""Bits of `LowNumbers`."""

Lane = tuple[str, str]
"""Buffer and lane."""


class LowNumbers(NamedTuple):
    """Some of the numbers of one lane that were seen, in at most 600 bytes."""

    below: int
    """All numbers below were seen, or may have been."""
    above: int
    """Bits of the numbers from `below` on."""


@dataclass(slots=True)
class SeenLane:
    """The numbers of one lane that were seen."""

    below: int = 0
    """Number below which all numbers were seen, or may have been."""
    above: int = 0
    """Bits of the numbers from `below` on: bit n is set if `below` + n was seen."""
    spans: "array[int]" = field(default_factory=lambda: array("q"))
    """Four numbers for each range of numbers: its first and last, and the ordinals of their first and last batch.

    As objects they would take six times the memory.
    """
    far: set[int] = field(default_factory=set)
    """Numbers from `below` + `AHEAD_MAX` on. As bits, a single damaged or forged number could fill the memory."""

    def add(self, numbers: Sequence[int], batch: int) -> list[tuple[int, int]]:
        """Add a batch's numbers, sorted. Return ranges of those that may have come before, or came twice in it."""
        self._note(numbers[0], numbers[-1], batch)
        near = numbers[: bisect_left(numbers, self.below + AHEAD_MAX)]
        again = self._add_near(near) if near else []
        if len(near) < len(numbers) or self.far:
            far = numbers[len(near) :]
            again += ranges(number for number in far if number in self.far) + ranges(_repeated(far))
            self.far.update(far)
            again += self._take_near()
            while len(self.far) > FAR_MAX:
                # The middle number counts, so that no single number can move the bits away from the others.
                self._move_on(sorted(self.far)[len(self.far) // 2] - AHEAD_MAX // 2)
                again += self._take_near()
        return joined(again)

    def _take_near(self) -> list[tuple[int, int]]:
        """Move far numbers that are near now to the bits, until no more come near by that."""
        again: list[tuple[int, int]] = []
        while nearer := sorted(number for number in self.far if number < self.below + AHEAD_MAX):
            self.far.difference_update(nearer)
            held = nearer[bisect_left(nearer, self.below) :]
            again += self._add_near(held) if held else []
        return again

    def _move_on(self, below: int) -> None:
        self.above >>= below - self.below
        self.below = below
        self._collapse()

    def _add_near(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        first, last = numbers[0], numbers[-1]
        again: list[tuple[int, int]] = []
        if last - first + 1 == len(numbers) == len(set(numbers)):
            bits = ((1 << len(numbers)) - 1) << max(first - self.below, 0)
            if first < self.below:
                again.append((first, min(last, self.below - 1)))
                bits = (1 << max(last + 1 - self.below, 0)) - 1
        else:
            again += ranges(_repeated(numbers))
            again += ranges(number for number in numbers if number < self.below)
            bits = bits_of((number - self.below for number in numbers if number >= self.below), last - self.below + 1)
        again += [(low + self.below, high + self.below) for low, high in ranges(set_bits(bits & self.above))]
        self.above |= bits
        self._collapse()
        return again

    def _collapse(self) -> None:
        # The count of trailing ones: numbers from `below` on without a hole.
        dense = ((self.above + 1) & ~self.above).bit_length() - 1
        self.above >>= dense
        self.below += dense

    def low(self) -> LowNumbers:
        """The numbers up to a little above the first missing one."""
        return LowNumbers(self.below, self.above & ((1 << LOW_BITS_MAX) - 1))

    def batches(self, first: int, last: int) -> list[tuple[int, int]]:
        """The batches in which these numbers may have come, as ranges of ordinals."""
        firsts, lasts = self.spans[::4], self.spans[1::4]
        spans = zip(firsts, lasts, self.spans[2::4], self.spans[3::4], strict=True)
        return [
            (batch_first, batch_last)
            for its_first, its_last, batch_first, batch_last in spans
            if its_first <= last and first <= its_last
        ]

    def _note(self, first: int, last: int, batch: int) -> None:
        spans = self.spans
        if spans and spans[-1] == batch:
            spans[-4], spans[-3] = min(spans[-4], first), max(spans[-3], last)
            return
        spans.extend((first, last, batch, batch))
        if len(spans) > 4 * SPANS_MAX:
            # Join pairs of the older half only: numbers that come again mostly do so soon.
            half = SPANS_MAX // 2 * 4
            joined_ = array("q")
            for place in range(0, half, 8):
                first, last, batch_first, _, other_first, other_last, _, batch_last = spans[place : place + 8]
                joined_.extend((min(first, other_first), max(last, other_last), batch_first, batch_last))
            self.spans = joined_ + spans[half:]


def bits_of(places: Iterable[int], length: int) -> int:
    """An integer with the bits at these places set. `length` is above all places."""
    octets = bytearray(max(length + 7, 0) // 8)
    for place in places:
        octets[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(octets, "little")


def set_bits(bits: int) -> Iterable[int]:
    """Yield the places of the set bits, in order."""
    octets = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    for index, octet in enumerate(octets):
        if octet:
            for bit in range(8):
                if octet >> bit & 1:
                    yield index * 8 + bit


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return sorted numbers as ranges. Both ends are inclusive."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number <= found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order. Ranges that touch or overlap become one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def without(spans: Iterable[tuple[int, int]], numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Take numbers out of ranges, which are in order and do not touch."""
    holes = sorted(numbers)
    found: list[tuple[int, int]] = []
    for first, last in spans:
        begin = first
        for hole in holes[bisect_left(holes, first) : bisect_right(holes, last)]:
            if begin < hole:
                found.append((begin, hole - 1))
            begin = hole + 1
        if begin <= last:
            found.append((begin, last))
    return found


def _repeated(numbers: Sequence[int]) -> list[int]:
    return [number for index, number in enumerate(numbers) if index and number == numbers[index - 1]]
