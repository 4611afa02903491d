"""Reads one CBOR data item (RFC 8949) with exact numbers, bounded in size and depth.

It does not use cbor2, for four reasons. cbor2 turns floats of all widths into Python's: 21.53 in 32 bits becomes
21.530000686645508. It turns decimal fractions into binary ones. Of two members of one name it keeps one. And it would
have to be installed on each executor.
"""

from decimal import Decimal

from spark.decode.codec_numbers import (
    BYTES_MAX,
    DEPTH_MAX,
    NUMBER_BITS_MAX,
    Uncomputed,
    UndecodableError,
    float_decimal,
    of_bits,
)

EXPONENT_MAX = 999
"""Decimal exponent of a decimal fraction, up or down. A larger one is not computed."""
TWICE = "undecodable: a name comes twice in a CBOR map"
NO_CBOR = "undecodable: the payload is not one CBOR data item"

_BIGNUM, _NEGATIVE_BIGNUM, _DECIMAL_FRACTION = 2, 3, 4
_BREAK = object()
_FLOATS = {25: (2, ">e"), 26: (4, ">f"), 27: (8, ">d")}


def decode(payload: bytes) -> object:
    """Return the data item. Raises UndecodableError if the payload is not exactly one data item.

    Numbers are int or Decimal. NaN and infinities are None. Other items are str, bytes, bool, list or dict. Of a tagged
    item only the value counts, except that bignums and decimal fractions become numbers.
    """
    if len(payload) > BYTES_MAX:
        raise UndecodableError(f"undecodable: more than {BYTES_MAX} bytes")
    reader = _Reader(payload)
    try:
        item = reader.item(DEPTH_MAX)
    except (IndexError, UnicodeDecodeError, TypeError) as error:
        raise UndecodableError(NO_CBOR) from error
    if item is _BREAK or reader.place != len(payload):
        raise UndecodableError(NO_CBOR)
    return item


class _Reader:
    __slots__ = ("payload", "place")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.place = 0

    def item(self, depth: int) -> object:  # noqa: PLR0911 - one for each kind
        if depth == 0:
            raise UndecodableError(f"undecodable: more than {DEPTH_MAX} levels of CBOR")
        first = self.payload[self.place]
        self.place += 1
        kind, information = first >> 5, first & 31
        if kind == 7:
            return self.simple(information)
        count = self.argument(kind, information)
        match kind:
            case 0 if count is not None:
                return count
            case 1 if count is not None:
                return -1 - count
            case 2:
                return self.text(kind, count)
            case 3:
                return self.text(kind, count).decode()
            case 4:
                return self.array(count, depth - 1)
            case 5:
                return self.map(count, depth - 1)
            case 6 if count is not None:
                return _tagged(count, self.item(depth - 1))
        raise UndecodableError(NO_CBOR)

    def argument(self, kind: int, information: int) -> int | None:
        """The argument after the first byte (section 3); None for an item of indefinite length."""
        if information < 24:
            return information
        if information < 28:
            return int.from_bytes(self.take(1 << (information - 24)))
        if information == 31 and kind in {2, 3, 4, 5}:
            return None
        raise UndecodableError(NO_CBOR)

    def take(self, count: int) -> bytes:
        taken = self.payload[self.place : self.place + count]
        if len(taken) != count:
            raise UndecodableError(NO_CBOR)
        self.place += count
        return taken

    def simple(self, information: int) -> object:
        if information in _FLOATS:
            size, layout = _FLOATS[information]
            return float_decimal(self.take(size), layout)
        if information == 24:
            # Section 3.3: values below 32 are not well-formed.
            if self.take(1)[0] < 32:
                raise UndecodableError(NO_CBOR)
            return None
        if information > 27:
            if information == 31:
                return _BREAK
            raise UndecodableError(NO_CBOR)
        return {20: False, 21: True}.get(information)

    def text(self, kind: int, count: int | None) -> bytes:
        if count is not None:
            return self.take(count)
        parts: list[bytes] = []
        while (first := self.payload[self.place]) != 0xFF:
            self.place += 1
            if first >> 5 != kind or first & 31 == 31:
                raise UndecodableError(NO_CBOR)
            part = self.take(self.argument(kind, first & 31) or 0)
            if kind == 3:
                # Each chunk is a text by itself.
                part.decode()
            parts.append(part)
        self.place += 1
        return b"".join(parts)

    def array(self, count: int | None, depth: int) -> list[object]:
        items: list[object] = []
        while count is None or len(items) < count:
            item = self.item(depth)
            if item is _BREAK:
                if count is None:
                    break
                raise UndecodableError(NO_CBOR)
            items.append(item)
        return items

    def map(self, count: int | None, depth: int) -> dict[object, object]:
        members: dict[object, object] = {}
        taken = 0
        while count is None or taken < count:
            name = self.item(depth)
            if name is _BREAK and count is None:
                break
            value = self.item(depth)
            if name is _BREAK or value is _BREAK:
                raise UndecodableError(NO_CBOR)
            taken += 1
            # Keys of other types name nothing, and some equal these: in Python true is 1.
            if type(name) in {str, int, bytes}:
                if name in members:
                    raise UndecodableError(TWICE)
                members[name] = value
        return members


def _decimal_fraction(exponent: int, mantissa: int) -> Decimal:
    if mantissa.bit_length() > NUMBER_BITS_MAX:
        return Uncomputed(of_bits(mantissa.bit_length()))
    if mantissa and exponent > EXPONENT_MAX:
        bits = exponent.bit_length()
        long = f"a number whose exponent has {bits} bits"
        return Uncomputed(long if bits > NUMBER_BITS_MAX else f"{mantissa}E+{exponent}")
    sign, digits, _ = Decimal(mantissa).as_tuple()
    # Smaller numbers round to zero anyway.
    return Decimal((sign, digits, min(max(exponent, -EXPONENT_MAX), EXPONENT_MAX)))


def _tagged(tag: int, value: object) -> object:
    if value is _BREAK:
        raise UndecodableError(NO_CBOR)
    if tag in {_BIGNUM, _NEGATIVE_BIGNUM}:
        if not isinstance(value, bytes):
            raise UndecodableError(NO_CBOR)
        number = int.from_bytes(value)
        return -1 - number if tag == _NEGATIVE_BIGNUM else number
    if tag == _DECIMAL_FRACTION:
        match value:
            case [int(exponent), int(mantissa)] if not isinstance(exponent, bool) and not isinstance(mantissa, bool):
                return _decimal_fraction(exponent, mantissa)
        raise UndecodableError(NO_CBOR)
    return value
