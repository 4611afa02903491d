"""Decides whether a payload can be the `data` of a JSON event, so that no usual reader of JSON stops at it.

Kafka Connect stops a task at the first value that it cannot read. So a payload that is JSON, but beyond the bounds of
usual readers, goes into `data_base64`.
"""

import re
from typing import Final

import msgspec

LEVELS_MAX: Final = 200
"""Levels of a payload. Jackson, which Kafka Connect reads with, takes 1,000, and some readers fewer."""
NUMBER_BYTES_MAX: Final = 1_000
"""Bytes of a number, as Jackson takes them. Python takes 4,300."""
NAME_BYTES_MAX: Final = 50_000
"""Bytes of a member's name, as Jackson takes them."""

_validate = msgspec.json.Decoder(msgspec.Raw).decode
# Jackson keeps an exponent in 32 bits. In a short payload nothing else can be beyond a bound.
_LONG_EXPONENT = re.compile(rb"[eE][-+]?[0-9]{6}")
_SHORT_BYTES: Final = 2 * LEVELS_MAX
_ITEM = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")\s*(:?)|([\[{])|[\]}]|([-0-9][-+.0-9eE]*)', re.DOTALL)


def fits_readers(payload: bytes) -> bool:
    """Whether a payload is strict JSON (RFC 8259) within the bounds of usual readers."""
    try:
        _validate(payload)
        # msgspec skips texts without checking their characters.
        payload.decode()
    except (ValueError, RecursionError):
        return False
    return (len(payload) <= _SHORT_BYTES and _LONG_EXPONENT.search(payload) is None) or _is_within_bounds(payload)


def _is_within_bounds(payload: bytes) -> bool:
    level = 0
    for item in _ITEM.finditer(payload):
        text, colon, opening, number = item.groups()
        if text is not None:
            if colon and len(text) > NAME_BYTES_MAX:
                return False
        elif number is not None:
            if len(number) > NUMBER_BYTES_MAX or _LONG_EXPONENT.search(number) is not None:
                return False
        else:
            level += 1 if opening is not None else -1
            if level > LEVELS_MAX:
                return False
    return True
