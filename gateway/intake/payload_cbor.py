"""Reads a payload that is CBOR (RFC 8949), in a bounded number of steps, whoever made it; nothing in it is acted on.

This is not cbor2, which hashes any key of a payload and counts nothing. Keys of equal hash cost it the square of their
number. A check before it would be as long as this reader.
"""

import math
from struct import unpack
from typing import Any, Final

CBOR_BYTES_MAX: Final = 65_536
"""Bytes that are read."""
ITEMS_MAX: Final = 4_096
"""Items that are read. Each map, array, name, value, tag and chunk is one."""
DEPTH_MAX: Final = 32
LABEL_MAX: Final = 255
"""The largest integer that counts as a name; SenML's labels are -6 to 8."""
EXPONENT_MAX: Final = 32
"""Largest exponent of a decimal fraction. A time of measurement needs no larger one."""

_BYTES, _TEXT, _ARRAY, _MAP, _SIMPLE = 2, 3, 4, 5, 7
"""Major types (section 3.1). Below are the integers, between is the tag."""
_DECIMAL_FRACTION: Final = 4
_INDEFINITE: Final = -1
_BREAK: Final = b"\xff"
_FLOATS: Final = {25: ">e", 26: ">f", 27: ">d"}
_SIMPLE_VALUES: Final = {20: False, 21: True, 22: None}


def decode(payload: bytes) -> object:
    """The first data item. Raises ValueError if there is none.

    It is made of numbers, texts, bytes, lists and dicts. A tagged value is the bare value, except that a decimal
    fraction is a number, or NaN if it is damaged. `undefined` and other simple values are NaN too. A map has only the
    members whose names are texts or small integers.

    A map that goes on beyond CBOR_BYTES_MAX or ITEMS_MAX has the members that end before. Any other item that goes on
    is no data item.
    """
    reader = _Reader(payload[:CBOR_BYTES_MAX])
    try:
        return reader.item(DEPTH_MAX)
    except IndexError as error:
        if reader.outermost is None or (reader.items_left and len(payload) <= CBOR_BYTES_MAX):
            raise ValueError("no CBOR, or too much of it") from error
        return reader.outermost


class _Reader:
    __slots__ = ("at", "items_left", "outermost", "payload")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.at = 0
        self.items_left = ITEMS_MAX
        self.outermost: dict[str | int, object] | None = None
        """The outermost map, as far as it is read."""

    def item(self, depth: int) -> object:  # noqa: PLR0911 - one for each kind
        """The item that begins here. Raises ValueError if there is none.

        Raises IndexError if the bytes, or ITEMS_MAX, end before the item does.
        """
        if not self.items_left:
            raise IndexError
        self.items_left -= 1
        first = self.payload[self.at]
        self.at += 1
        kind, count = first >> 5, first & 31
        if kind == _SIMPLE:
            return self._simple(count)
        if count >= 24:
            count = self._argument(kind, count)
        if kind < _BYTES:
            return -1 - count if kind else count
        if kind <= _TEXT:
            if count == _INDEFINITE:
                return self._chunks(kind)
            found = self._take(count)
            return found.decode() if kind == _TEXT else found
        if depth == 0:
            raise ValueError(f"more than {DEPTH_MAX} levels of CBOR")
        if kind == _MAP:
            return self._map(count, depth - 1)
        if kind == _ARRAY:
            return self._array(count, depth - 1)
        value = self.item(depth - 1)
        return _decimal_fraction(value) if count == _DECIMAL_FRACTION else value

    def _argument(self, kind: int, information: int) -> int:
        """A number, a length or a tag that has bytes of its own (section 3). Raises as `item` does."""
        if information < 28:
            return int.from_bytes(self._take(1 << information - 24))
        if information == 31 and _BYTES <= kind <= _MAP:
            return _INDEFINITE
        raise ValueError("no CBOR: an argument that there is not")

    def _take(self, count: int) -> bytes:
        taken = self.payload[self.at : self.at + count]
        if len(taken) < count:
            raise IndexError
        self.at += count
        return taken

    def _ends(self) -> bool:
        """Whether an item of indefinite length ends here."""
        if self.payload[self.at : self.at + 1] != _BREAK:
            return False
        self.at += 1
        return True

    def _simple(self, information: int) -> object:
        if information in _FLOATS:
            number: float = unpack(_FLOATS[information], self._take(1 << information - 24))[0]
            return number
        if information == 24:
            self._take(1)
        elif information > 24:
            raise ValueError("no CBOR: a break that ends nothing, or a value that there is not")
        return _SIMPLE_VALUES.get(information, math.nan)

    def _chunks(self, kind: int) -> Any:
        """A string of indefinite length: strings of its kind and of known lengths."""
        chunks: list[Any] = []
        while not self._ends():
            first = self.payload[self.at]
            if first >> 5 != kind or first & 31 == 31:
                raise ValueError("no CBOR: a string of what is no string")
            chunks.append(self.item(0))
        return ("" if kind == _TEXT else b"").join(chunks)

    def _array(self, count: int, depth: int) -> list[object]:
        items: list[object] = []
        while len(items) != count and not (count == _INDEFINITE and self._ends()):
            items.append(self.item(depth))
        return items

    def _map(self, count: int, depth: int) -> dict[str | int, object]:
        members: dict[str | int, object] = {}
        if depth == DEPTH_MAX - 1:
            self.outermost = members
        while count and not (count == _INDEFINITE and self._ends()):
            name = self.item(depth)
            value = self.item(depth)
            if type(name) is str or (type(name) is int and abs(name) <= LABEL_MAX):
                members[name] = value
            count -= count != _INDEFINITE
        return members


def _decimal_fraction(value: object) -> float:
    """[exponent, mantissa], section 3.4.4, which SenML may have for a number."""
    match value:
        case [int(exponent), int(mantissa)] if abs(exponent) <= EXPONENT_MAX:
            return float(mantissa * 10**exponent)
    return math.nan
