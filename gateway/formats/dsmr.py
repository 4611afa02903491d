"""Telegrams of electricity meters' P1 port: DSMR 4 and 5, and eMUCS in Belgium and Luxembourg.

A telegram is a block of lines from `/` to `!` with a CRC ("P1 Companion Standard" 5.0.2, section 6.2). Each line has an
OBIS code and values in brackets. Meters of DSMR 2 and 3 send no CRC: their telegrams prove nothing, and are damage.
"""

import json
import re
from collections.abc import Iterator
from typing import Final

from gateway.formats.piece import Piece

CHECKSUM: Final = "telegram-checksum"
WITHOUT_CHECKSUM: Final = "telegram-without-checksum"
CUT_OFF: Final = "telegram-cut-off"
"""Damage: the next telegram began before this one ended."""
NO_VALUES: Final = "telegram-without-values"
"""Damage: the CRC fits, and no line, or two with one name, can be read."""

_END: Final = re.compile(rb"!([^/\r\n]{0,16})\r?\n")
_CRC: Final = re.compile(rb"[0-9A-Fa-f]{4}")
_LINE: Final = re.compile(r"(?m)^([0-9]{1,3}-[0-9]{1,3}:[0-9]{1,3}(?:\.[0-9]{1,3}){1,2})((?:\([^()\r\n]*\))+)\r?$")
_QUANTITY: Final = re.compile(r"(-?)0*([0-9]{1,20}(?:\.[0-9]{1,20})?)\*([A-Za-z][A-Za-z0-9]{0,9})")
_COUNT: Final = re.compile(r"0*([0-9]{1,15})")
_TIME: Final = re.compile(r"[0-9]{12}[SW]")
"""Local time, and whether it is that of summer or of winter (section 6.4)."""
_MBUS: Final = re.compile(r"0-([1-9]):(24\.2\.[0-9]|24\.1\.0|96\.1\.[01])")
_MBUS_NAMES: Final = {"24.1.0": "type", "96.1.0": "id", "96.1.1": "id"}
_NAMES: Final = {
    "1-3:0.2.8": "version",
    "0-0:96.1.4": "version",
    "0-0:1.0.0": "time",
    "0-0:96.1.1": "id",
    "0-0:96.14.0": "tariff",
    "0-0:96.13.0": "message",
    "0-0:96.7.21": "failures",
    "0-0:96.7.9": "long_failures",
    "1-0:1.8.0": "import",
    "1-0:2.8.0": "export",
    "1-0:1.7.0": "import",
    "1-0:2.7.0": "export",
    **{f"1-0:1.8.{tariff}": f"import_{tariff}" for tariff in range(1, 5)},
    **{f"1-0:2.8.{tariff}": f"export_{tariff}" for tariff in range(1, 5)},
    **{
        f"1-0:{code + 20 * phase}.{rest}": f"l{phase + 1}{name}"
        for phase in range(3)
        for code, rest, name in (
            (32, "7.0", ""),
            (31, "7.0", ""),
            (21, "7.0", "_import"),
            (22, "7.0", "_export"),
            (32, "32.0", "_sags"),
            (32, "36.0", "_swells"),
        )
    },
}
"""Names of members by OBIS code (section 6.12). A unit is added. Other codes are names themselves."""
_COUNTS: Final = re.compile(r"(long_)?failures|l[1-3]_(sags|swells)|mbus_[1-9]_type")
"""Names of values without a unit that are numbers. All others are texts, whatever digits they have."""


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0xA001 if byte & 1 else 0)
    return byte


_CRCS: Final = tuple(_crc_of(byte) for byte in range(256))


def crc16(data: bytes) -> int:
    """CRC-16/ARC: polynomial x16 + x15 + x2 + 1, least significant bit first, beginning with 0."""
    crc = 0
    for byte in data:
        crc = crc >> 8 ^ _CRCS[(crc ^ byte) & 0xFF]
    return crc


class Dsmr:
    """The telegrams of one port."""

    bytes_max = 8_192
    """Five times the longest telegram that meters are known to send."""

    def cut(self, received: bytes) -> Piece | None:
        """See `Format`."""
        start = received.find(b"/")
        if start:
            return Piece(start if start > 0 else len(received), noise=True)
        end = _END.search(received)
        following = received.find(b"/", 1, len(received) if end is None else end.start())
        if following > 0:
            return Piece(following, damage=CUT_OFF)
        if end is None:
            return None
        return _read(received[: end.start() + 1], end[1], end.end())


def _read(telegram: bytes, crc: bytes, length: int) -> Piece:
    """The piece of a telegram, from `/` to `!`, with the digits behind it."""
    if _CRC.fullmatch(crc) is None:
        return Piece(length, damage=CHECKSUM if crc else WITHOUT_CHECKSUM)
    if crc16(telegram) != int(crc, 16):
        return Piece(length, damage=CHECKSUM)
    members = list(_members(telegram[1:-1].decode("latin-1")))
    values = dict(members)
    if len(values) < len(members) or len(values) == 1:
        return Piece(length, damage=NO_VALUES)
    payload = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in values.items()) + "}"
    return Piece(length, (payload.encode(),))


def _members(telegram: str) -> Iterator[tuple[str, str]]:
    """Names, and values that are JSON already, with the digits that the meter sent."""
    yield "meter", _text(telegram.partition("\n")[0].strip())
    for code, groups in _LINE.findall(telegram):
        name = _name(code)
        *before, value = groups[1:-1].split(")(")
        if len(before) > 1 or (before and _TIME.fullmatch(before[0]) is None):
            # A list, such as the log of failures.
            yield name, _text(groups)
            continue
        if (quantity := _QUANTITY.fullmatch(value)) is not None:
            sign, digits, unit = quantity.groups()
            yield f"{name}_{unit}", sign + digits
        elif _COUNTS.fullmatch(name) is not None and (count := _COUNT.fullmatch(value)) is not None:
            yield name, count[1]
        else:
            yield name, _text(value)
        if before:
            yield f"{name}_time", _text(before[0])


def _name(code: str) -> str:
    device = _MBUS.fullmatch(code)
    if device is None:
        return _NAMES.get(code, code)
    channel, rest = device.groups()
    return "_".join(("mbus", channel, *([_MBUS_NAMES[rest]] if rest in _MBUS_NAMES else [])))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else "null"
