"""Reads JSON as sensors write it: with `nan` for a number, a missing value, or something around the object.

Strict JSON is read first, at no cost. Other payloads are mended once, in a time that grows with their length, and read
again. Only a copy is mended: the payload itself is forwarded byte for byte.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Final, TypeVar

import msgspec

from gateway.host.terminal_text import counted

MENDED_BYTES_MAX: Final = 65_536
"""Bytes of a payload above which it is not mended."""
ITEMS_MAX: Final = 4_096
"""Names, values and words of one payload that are looked at; the rest stays as it is."""
NO_NUMBER: Final = b"1e999"
"""Stands for a word that is no value. It is JSON, and beyond all numbers; `null` would mean that a member was left
out."""
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
UNREADABLE: Final = (ValueError, RecursionError)
"""Errors of decoders for bytes that are no JSON; msgspec's own errors are ValueErrors."""

_SHOWN_BYTES_MAX = 16
_DELIMITERS = b' ,:[]{}"'
_WITHOUT_CONTROLS = bytes.maketrans(bytes(range(32)), b" " * 32)
_NUMBER = rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
# Delimiters, as many as there are, and one of these behind them:
# - a text, with its colon if that has a value;
# - a value;
# - a colon that no value follows: the empty group 1 stands behind it;
# - a word that is no value: group 2.
# No byte is tried more than a few times: a repetition ends at a byte that cannot be part of it, and all of it is
# optional, so that nothing is tried again. Possessive repetitions are not used: the `re` of Debian 12's Python
# (3.11.2-6+deb12u8) forgets to go back where one fails.
_ITEM = re.compile(
    rb'[ ,\[\]{}]*(?:"[^"\\]*(?:\\.[^"\\]*)*"?(?::(?! *[,\]}]))?|(?:true|false|null|%b)(?![^ ,:\[\]{}"])'
    rb'|:(?= *[,\]}])()|:|([^ ,:\[\]{}"]+))?' % _NUMBER,
    re.DOTALL,
)
_PLACE = re.compile(r"\(byte ([0-9]+)\)")
_validate = msgspec.json.Decoder(msgspec.Raw).decode

T = TypeVar("T")


def is_json(payload: bytes) -> bool:
    """Whether this is strict JSON (RFC 8259), as stock consumers read it. Called for every reading."""
    try:
        _validate(payload)
        # msgspec skips texts without checking their characters.
        if not payload.isascii():
            payload.decode()
    except UNREADABLE:
        return False
    return True


def read_mending(decode: Callable[[bytes], T], payload: bytes) -> T:
    """The result of `decode` for JSON, mended if needed. Raises UNREADABLE."""
    try:
        return decode(payload)
    except msgspec.ValidationError:
        raise
    except UNREADABLE:
        if len(payload) > MENDED_BYTES_MAX:
            raise
    return decode(_mended(payload))


# Identity, time and cause are read from one payload, one after the other.
@lru_cache(maxsize=1)
def _mended(payload: bytes) -> bytes:
    """A copy in which words that are no value are `NO_NUMBER`. Control characters in it become blanks."""
    text = payload.translate(_WITHOUT_CONTROLS).strip().removeprefix(BYTE_ORDER_MARK)
    pieces: list[bytes] = []
    sound_from = 0
    for start, end in _no_values(text):
        pieces += text[sound_from:start], NO_NUMBER
        sound_from = end
    return b"".join((*pieces, text[sound_from:]))


def _no_values(text: bytes) -> Iterator[tuple[int, int]]:
    """Places without a value where one should be: start and end of a word that is none, or of an empty place."""
    for item in islice(_ITEM.finditer(text), ITEMS_MAX):
        if item.lastindex is not None:
            yield item.span(item.lastindex)


def fault(payload: bytes) -> str:
    """The reason why this is no strict JSON, and at which byte, counted from 1: "`nan` at byte 32"."""
    if payload.startswith(BYTE_ORDER_MARK):
        return "a byte order mark at byte 1"
    try:
        _validate(payload)
        payload.decode()
    except msgspec.DecodeError as error:
        return _fault_at(payload, str(error))
    except UnicodeDecodeError as error:
        return f"no UTF-8 at byte {error.start + 1}"
    except RecursionError:
        return "too many levels"
    return "it is JSON"


def _fault_at(payload: bytes, words: str) -> str:
    place = _PLACE.search(words)
    if place is not None:
        # msgspec counts from 0, and names trailing bytes by the place behind the first of them.
        at = min(int(place[1]) - words.count("trailing characters"), len(payload) - 1)
    else:
        # msgspec also names no place for a word that the payload ends with.
        at, _ = next(_no_values(payload[:MENDED_BYTES_MAX]), (-1, -1))
        if at < 0:
            return f"it ends too early, after {counted(len(payload), 'byte')}"
    start = at
    while at - start < _SHOWN_BYTES_MAX and start and _is_of_word(payload[start]) and _is_of_word(payload[start - 1]):
        start -= 1
    end = at + 1
    while end - start < _SHOWN_BYTES_MAX and end < len(payload) and all(map(_is_of_word, payload[end - 1 : end + 1])):
        end += 1
    shown = payload[start:end]
    if shown < b" ":
        return f"{'a control character' if shown[0] else 'a NUL'} at byte {start + 1}"
    return f"`{shown.decode(errors='replace')}` at byte {start + 1}"


def _is_of_word(byte: int) -> bool:
    return byte > 32 and byte not in _DELIMITERS
