"""Reads the body of a gateway's event: one JSON object, strictly, with whole numbers told from others."""

import json
from collections.abc import Mapping
from decimal import Decimal

from spark.decode.codec_numbers import AROUND, JSON_DEPTH_MAX, JSON_NUMBER_CHARS_MAX, is_deep, once, refused

TEXT_BYTES_MAX = 66_000
"""Bytes of a text. The longest is a key: a namespace and an MQTT topic of 65,535 bytes."""

Body = Mapping[str, object]


def body_of(value: bytes | None) -> Body | None:
    """The members of a body; None if it is not one JSON object.

    Whole numbers are int, others Decimal. A name that comes twice, and half a surrogate, make it no object.
    """
    if value is None or is_deep(value, JSON_DEPTH_MAX):
        return None
    try:
        body = json.loads(
            value.decode().strip(AROUND),
            parse_int=_whole,
            parse_float=_decimal,
            parse_constant=refused,
            object_pairs_hook=once,
        )
        if b"\\u" in value:
            json.dumps(body, ensure_ascii=False, default=str).encode()
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def whole_of(body: Body, name: str) -> int | None:
    """A member that is a whole number of 64 bits; None if it is not."""
    number = body.get(name)
    return number if type(number) is int and -(2**63) <= number < 2**63 else None


def text_of(body: Body, name: str) -> str | None:
    """A member that is a text; None if it is not."""
    text = body.get(name)
    return text if isinstance(text, str) else None


def _whole(text: str) -> int:
    return int(_short(text))


def _decimal(text: str) -> Decimal:
    # With an exponent it is a binary fraction, as to most readers of JSON. A huge one is an infinity.
    return Decimal(repr(float(_short(text)))) if "e" in text.lower() else Decimal(_short(text))


def _short(text: str) -> str:
    if len(text) > JSON_NUMBER_CHARS_MAX:
        raise ValueError(text)
    return text
