"""Reads packed payloads, such as C structs, by the layout that their stream declares."""

from decimal import Context, Decimal

from spark.decode.codec_declarations import Endian, LayoutField, Stream
from spark.decode.codec_numbers import Result, UndecodableError, float_decimal, of_object

HEADER_BYTES = 17
"""Bytes of the identity header (`docs/payloads.md`): version, boot counter, incarnation, sequence, tick."""
HEADER_VERSION = 1
SIZES = {"u8": 1, "i8": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8, "f32": 4, "f64": 8}

_FLOATS = {"f32": "f", "f64": "d"}
_ORDERS = {"little": "<", "big": ">"}
_SCALED = Context(prec=400)


def layout_bytes(stream: Stream) -> int:
    """Bytes of each of the stream's payloads."""
    fields = sum(field.skip if field.type is None else SIZES[field.type] for field in stream.layout)
    return fields + (HEADER_BYTES if stream.header else 0)


def of_payload(payload: bytes, stream: Stream) -> Result:
    """Metrics of a packed payload. Raises UndecodableError."""
    wanted = layout_bytes(stream)
    if len(payload) != wanted:
        raise UndecodableError(f"undecodable: the payload has not the layout's {wanted} bytes")
    place = 0
    if stream.header:
        if payload[0] != HEADER_VERSION:
            raise UndecodableError("undecodable: the payload's header is not of version 1")
        place = HEADER_BYTES
    found: dict[object, object] = {}
    for field in stream.layout:
        size = field.skip if field.type is None else SIZES[field.type]
        if field.name is not None:
            found[field.name] = _number(payload[place : place + size], field, stream.endian)
        place += size
    # A field of the layout that is called `seq` or `tick` is a metric: somebody declared it.
    return of_object(found, stream.metrics, identity=())


def _number(packed: bytes, field: LayoutField, endian: Endian) -> object:
    """A field's number, scaled; None for a NaN or an infinity."""
    if field.type in _FLOATS:
        number = float_decimal(packed, _ORDERS[endian] + _FLOATS[field.type])
    else:
        number = Decimal(int.from_bytes(packed, endian, signed=str(field.type).startswith("i")))
    if number is None or field.scale is None:
        return number
    return _SCALED.multiply(number, field.scale)
