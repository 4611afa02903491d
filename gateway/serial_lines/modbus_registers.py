"""A Modbus unit's registers: plans the requests that read them, and decodes the numbers that they hold.

Sections are those of the MODBUS Application Protocol Specification V1.1b3.
"""

import decimal
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import msgspec

from gateway.settings import ModbusRegister

REGISTERS_MAX = 125
"""Registers that one request may ask for (sections 6.3 and 6.4)."""
BITS_MAX = 2_000
"""Coils or discrete inputs that one request may ask for (sections 6.1 and 6.2)."""
FUNCTIONS = {"coil": 1, "discrete": 2, "holding": 3, "input": 4}
"""The function code that reads each table (sections 6.1 to 6.4)."""

_SIGNIFICANT_DIGITS = 50
"""Digits of a calculation. The longest whole number has 20, a scale and an offset have 17 each."""
_PLAIN_DIGITS_MAX = 30
_REGISTER_BITS = 16
_FORMATS = {"u16": ">H", "s16": ">h", "u32": ">I", "s32": ">i", "u64": ">Q", "s64": ">q", "f32": ">f", "f64": ">d"}
_REGISTERS_REVERSED = frozenset({"CDAB", "DCBA", "low-first"})
_BYTES_SWAPPED = frozenset({"BADC", "DCBA"})
"""Values of `word_order` that swap the two bytes of each register."""
_EXACT = decimal.Context(prec=_SIGNIFICANT_DIGITS)


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a unit: registers (or bits) that lie side by side, and the values that they hold."""

    table: str
    address: int
    count: int
    """Number of registers; of bits for `coil` and `discrete`."""
    values: tuple[ModbusRegister, ...]

    @property
    def function(self) -> int:
        return FUNCTIONS[self.table]

    @property
    def data_bytes(self) -> int:
        """Bytes of data in the answer, as its byte count says (sections 6.1 to 6.4)."""
        return -(-self.count // 8) if _of_bits(self.table) else 2 * self.count

    def __str__(self) -> str:
        last = self.address + self.count - 1
        # A fence has no values, as its register is not configured.
        why = "" if self.values else " (asked beside what is configured, to tell late answers apart)"
        return f"{self.table} {self.address}" + (f" to {last}" if last > self.address else "") + why


def requests(registers: Iterable[ModbusRegister]) -> tuple[Request, ...]:
    """The fewest requests that read these registers and no others. A gap may hold addresses that the unit refuses."""
    found: list[Request] = []
    for table in FUNCTIONS:
        group: list[ModbusRegister] = []
        end = 0
        for value in sorted((each for each in registers if each.table == table), key=lambda each: each.address):
            reaches = max(end, value.address + width(value))
            if group and (value.address > end or reaches - group[0].address > _count_max(table)):
                found.append(_request(group))
                group, reaches = [], value.address + width(value)
            group.append(value)
            end = reaches
        if group:
            found.append(_request(group))
    return tuple(found)


def halves(request: Request) -> tuple[Request, ...]:
    """Two requests that replace one that a unit refuses; none if that one is for a single value."""
    middle = len(request.values) // 2
    if not middle:
        return ()
    return _request(request.values[:middle]), _request(request.values[middle:])


def fence(asked: Request) -> Request:
    """A request of another function. As units answer in order, no answer to `asked` comes after the fence's answer.

    Its answer or refusal names the fence's function; a refusal names nothing else.
    """
    return Request("holding" if asked.table == "input" else "input", asked.address, 1, ())


def width(register: ModbusRegister) -> int:
    """Registers (or bits) that a value takes."""
    return 1 if register.type == "bit" else struct.calcsize(_FORMATS[register.type]) // 2


def bounds(register: ModbusRegister) -> tuple[int, int] | None:
    """The least and the greatest number that `null_if` may name; None if the type holds no whole numbers.

    A signed number may also be named by its bits: 0x8000 is -32768 of `s16`.
    """
    if register.type[0] not in "us":
        return None
    bits = _REGISTER_BITS * width(register)
    return (-1 << bits - 1 if register.type[0] == "s" else 0), (1 << bits) - 1


def decode(request: Request, data: bytes) -> dict[str, str]:
    """The values of an answer's data as JSON, by name.

    `data` are the `request.data_bytes` bytes after the byte count. A value is the register's number times its scale
    plus its offset, in decimal: exact for whole numbers, and to 50 digits for the others. A float is read as the
    shortest number that it stands for (0.1, not 0.10000000149011612). NaN, the infinities and the numbers of `null_if`
    mean that the unit has no value: they become `null`.
    """
    return {
        value.name: _bit(request, value, data) if value.type == "bit" else _number(request, value, data)
        for value in request.values
    }


def payload(registers: Sequence[ModbusRegister], values: Mapping[str, str]) -> bytes:
    """A JSON object of the values that are given, in the order of the settings."""
    members = (
        msgspec.json.encode(each.name) + b":" + values[each.name].encode() for each in registers if each.name in values
    )
    return b"{" + b",".join(members) + b"}"


def _request(values: Sequence[ModbusRegister]) -> Request:
    first = values[0]
    end = max(value.address + width(value) for value in values)
    return Request(first.table, first.address, end - first.address, tuple(values))


def _count_max(table: str) -> int:
    return BITS_MAX if _of_bits(table) else REGISTERS_MAX


def _of_bits(table: str) -> bool:
    return table in ("coil", "discrete")


def _bit(request: Request, value: ModbusRegister, data: bytes) -> str:
    # The first bit is the lowest of the first byte (section 6.1).
    byte, bit = divmod(value.address - request.address, 8)
    return "true" if data[byte] >> bit & 1 else "false"


def _number(request: Request, value: ModbusRegister, data: bytes) -> str:
    start = 2 * (value.address - request.address)
    raw = data[start : start + 2 * width(value)]
    # The high byte of a register comes first (section 4.2). Not all units keep to that.
    pairs = [raw[at : at + 2] for at in range(0, len(raw), 2)]
    if value.word_order in _REGISTERS_REVERSED:
        pairs.reverse()
    if value.word_order in _BYTES_SWAPPED:
        pairs = [pair[::-1] for pair in pairs]
    raw = b"".join(pairs)
    (number,) = struct.unpack(_FORMATS[value.type], raw)
    if isinstance(number, float):
        if not math.isfinite(number):
            return "null"
        number = _shortest(raw) if value.type == "f32" else repr(number)
    elif number in value.null_if or int.from_bytes(raw) in value.null_if:
        return "null"
    result = _EXACT.multiply(Decimal(number), _as_written(value.scale))
    if value.offset:
        result = _EXACT.add(result, _as_written(value.offset))
    return _text(result)


def _shortest(raw: bytes) -> str:
    (number,) = struct.unpack(">f", raw)
    # Nine digits tell any two floats of 32 bits apart.
    for digits in range(1, 9):
        text = f"{number:.{digits}g}"
        if _packs_to(raw, float(text)):
            return text
    return f"{number:.9g}"


def _packs_to(raw: bytes, number: float) -> bool:
    try:
        return struct.pack(">f", number) == raw
    except OverflowError:
        # The largest float, rounded up.
        return False


def _as_written(number: float) -> Decimal:
    """The number as the settings have it: 0.1, not the nearest binary fraction; 1, not 1.0."""
    return Decimal(repr(number)).normalize(_EXACT)


def _text(number: Decimal) -> str:
    if -_PLAIN_DIGITS_MAX <= number.adjusted() <= _PLAIN_DIGITS_MAX:
        return f"{number:f}"
    return str(number)
