"""Reads a payload that is CBOR (RFC 8949), whoever made it: bounded in depth and size, and nothing in it is acted on.

Loaded only where a route names CBOR: see `payload_identity` and `payload_time`.
"""

import math
from typing import Any

import cbor2

CBOR_BYTES_MAX = 65_536
"""Larger payloads are not looked into: each byte of one may become an object."""
DEPTH_MAX = 32
EXPONENT_MAX = 32
"""Of a decimal fraction: none that says when something was measured needs more."""

_DECIMAL_FRACTION = 4
# What cbor2 makes something of by itself: dates, regular expressions, addresses, references, ...
_KNOWN_TAGS = (0, 1, 2, 3, 5, 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004, 43000, 55799)


def decode(payload: bytes) -> object:
    """The first data item. Raises ValueError where there is none.

    Numbers, texts, bytes, lists (tuples where they are keys) and dicts; of what is tagged the bare value, except that a
    decimal fraction is a number, or NaN where it is damaged.
    """
    if len(payload) > CBOR_BYTES_MAX:
        raise ValueError(f"{len(payload)} bytes; at most {CBOR_BYTES_MAX} are looked into")
    try:
        return cbor2.loads(payload, semantic_decoders=_DECODERS, tag_hook=_bare_tag, max_depth=DEPTH_MAX)
    except (cbor2.CBORError, TypeError, OverflowError) as error:
        raise ValueError(f"no CBOR: {error}") from error


def _bare(value: object, _: bool) -> object:  # noqa: FBT001 - cbor2's way to call
    return value


def _bare_tag(tag: cbor2.CBORTag, _: bool) -> object:  # noqa: FBT001 - cbor2's way to call
    return tag.value


def _decimal_fraction(value: Any, _: bool) -> float:  # noqa: FBT001 - cbor2's way to call
    """[exponent, mantissa], section 3.4.4: what SenML may have for a number."""
    match value:
        case (int(exponent), int(mantissa)) if abs(exponent) <= EXPONENT_MAX:
            return float(mantissa * 10**exponent)
    return math.nan


_DECODERS = {**dict.fromkeys(_KNOWN_TAGS, _bare), _DECIMAL_FRACTION: _decimal_fraction}
