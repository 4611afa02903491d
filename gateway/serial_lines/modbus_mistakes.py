"""Finds mistakes in `[[serial.modbus]]`: settings that are right one by one but wrong together, or likely wrong."""

import math
import re
from collections.abc import Iterator
from typing import Final

from gateway.serial_lines.modbus_registers import bounds, requests, width
from gateway.serial_lines.text_mistakes import SILENCE_S_MAX
from gateway.settings import ModbusRegister, ModbusUnit, SerialModbusSettings
from gateway.toml_files.mistakes import Place, show, spell

EXAMPLES: Final[dict[tuple[str, ...], str]] = {
    ("units",): "; write [[serial.modbus.units]] below it, with unit, device and registers",
    ("units", "unit"): "; write unit = 1, or the address that is set on the device",
    ("units", "device"): '; write device = "the name that its readings come under"',
    ("units", "registers"): '; write registers = [{name = "volts", address = 0}], or '
    "[[serial.modbus.units.registers]] below it",
    ("units", "registers", "name"): '; write name = "volts", or what else it holds',
    ("units", "registers", "address"): "; write its address as it stands in the request, from 0: "
    "40001 or 30001 in a manual is 0",
}
"""Advice for a missing setting, by its path in the section."""
_ORDERS: Final = {
    "ABCD": "as the standard has it",
    "CDAB": "registers swapped",
    "BADC": "the two bytes of each register swapped",
    "DCBA": "all bytes reversed",
}
_ORDER_NAMES: Final[dict[str, tuple[str, ...]]] = {
    name: tuple(orders.split())
    for orders, names in (
        ("ABCD", "abcd ab abcdefgh 1234 0123 big be high msw msb network none highlow"),
        ("CDAB", "cdab ghefcdab 3412 2301 midlittle middlelittle word words wordswap swapword swapwords low lsw"),
        ("CDAB", "lowhigh littlebyteswap littleword"),
        ("BADC", "badc ba badcfehg 2143 1032 midbig middlebig byte bytes byteswap swapbyte swapbytes bigbyteswap"),
        ("DCBA", "dcba hgfedcba 4321 3210 wordbyte byteword wordbyteswap bytewordswap"),
        ("DCBA CDAB", "little le lsb"),
        ("CDAB BADC", "mid middle mixed"),
        ("CDAB BADC DCBA", "swap true reverse reversed inverse inverted"),
    )
    for name in names.split()
}
"""Orders of bytes that other programs and manuals may mean by a name, which is in plain letters.

By "little", some mean all bytes (Modbus Poll), some the registers only (pymodbus' word order).
"""
_NOT_IN_ORDER_NAMES: Final = re.compile(r"[^a-z0-9]|endian|order|first|(?<=swap)ped")


def _order_words(value: object) -> str:
    """Advice for an order of bytes by another program's name; empty if the name is unknown."""
    name = _NOT_IN_ORDER_NAMES.sub("", str(value).casefold())
    told = [f"{show(order)} ({_ORDERS[order]})" for order in _ORDER_NAMES.get(name, ())]
    if len(told) > 1:
        return f"{', or '.join(told)}: this name is given to each of them, so try which makes sense"
    return "".join(told)


INSTEAD: Final = {"word_order": _order_words}
"""By setting, advice for a value that other programs have there; empty if it is unknown."""
ELSEWHERE: Final = {
    name: f"it belongs under [[{section}]]"
    for section, struct in (
        ("serial.modbus", SerialModbusSettings),
        ("serial.modbus.units", ModbusUnit),
        ("serial.modbus.units.registers", ModbusRegister),
    )
    for name in struct.__struct_fields__
    # Most likely a slip of `unit`, not the section.
    if name != "units"
} | {
    name: "write word_order under [[serial.modbus.units.registers]]: "
    + ", ".join(f"{show(order)} ({words})" for order, words in _ORDERS.items())
    for name in ("byte_order", "byteorder", "endian", "endianness", "swap", "word_swap", "byte_swap")
}
"""Advice for a setting that stands under another of these sections, or has another program's name."""
ANSWER_S: Final = 0.01
"""Seconds that a Modbus unit may take to begin its answer. Many take less, some ten times as long."""
_MANUALS_FIRST = {"holding": 40_001, "input": 30_001, "discrete": 10_001}
"""Number of each table's first register in manuals. In a request it is 0."""
_MANUALS_COUNT = 9_999
_REQUEST_CHARACTERS = 8
_ANSWER_CHARACTERS = 5
"""Characters beside the data: unit, function, byte count, CRC. A silence of 3.5 characters separates two frames (MODBUS
over Serial Line V1.02, section 2.5.1.1)."""
_SILENCE_CHARACTERS = 3.5
_ADDRESS_MAX = 65_535
_SHORT_NUMBER = 10
_LONGEST_NUMBER = 2**64 - 1
_BIT_TABLES = frozenset({"coil", "discrete"})
_OF_NUMBERS: Final = {"scale": (1,), "offset": (0,), "null_if": ((),), "word_order": ("ABCD", "high-first")}
"""Settings that are not for bits, with the values that change nothing."""


def mistakes(line: SerialModbusSettings, section: Place) -> Iterator[tuple[Place, str]]:
    """Every mistake in one section, with its place in the file."""
    if not line.units:
        yield (*section, "units"), "is empty, so that nobody would be asked; write [[serial.modbus.units]] below it"
    first: dict[int, int] = {}
    for number, unit in enumerate(line.units):
        place = (*section, "units", number)
        other = first.setdefault(unit.unit, number)
        if other != number:
            both = (
                "and both would answer at once; set another address on one of the devices, or write all registers of "
                "one device into one section"
            )
            yield (*place, "unit"), f"{unit.unit} is {spell((*section, 'units', other))}.unit too, {both}"
        yield from _unit_mistakes(unit, place)


def _unit_mistakes(unit: ModbusUnit, section: Place) -> Iterator[tuple[Place, str]]:
    if not unit.registers:
        wanted = 'write registers = [{name = "volts", address = 0}]'
        yield (*section, "registers"), f"is empty, so that nothing would be read; {wanted}"
    if unit.silence_s_max != SILENCE_S_MAX and all(register.on_change is None for register in unit.registers):
        told = "is of registers with on_change, and there is none"
        yield (*section, "silence_s_max"), f"{told}; remove it, or write on_change = 0.2 at a register"
    names: set[str] = set()
    for number, register in enumerate(unit.registers):
        place = (*section, "registers", number)
        if register.name in names:
            yield (*place, "name"), f"{show(register.name)} is another register of this unit too; write another name"
        names.add(register.name)
        yield from _register_mistakes(register, place)


def _register_mistakes(register: ModbusRegister, place: Place) -> Iterator[tuple[Place, str]]:
    if not register.name:
        yield (*place, "name"), 'is empty; write what the register holds, such as "volts"'
    last = register.address + width(register) - 1
    if last > _ADDRESS_MAX:
        told = f"{show(register.type)} from {register.address} would end at {last}, and the last register is"
        yield (*place, "address"), f"{told} {_ADDRESS_MAX}; write a smaller address"
    if (register.type == "bit") != (register.table in _BIT_TABLES):
        yield (*place, "type"), _bit_words(register)
    elif register.type == "bit":
        for setting, idle in _OF_NUMBERS.items():
            if getattr(register, setting) not in idle:
                yield (*place, setting), "is for numbers, and this is a bit, which is 0 or 1; remove it"
    else:
        yield from _null_mistakes(register, (*place, "null_if"))
    if not math.isfinite(register.offset):
        yield (*place, "offset"), f"{register.offset} is no number that can be added; write one, or leave it out"


def _null_mistakes(register: ModbusRegister, place: Place) -> Iterator[tuple[Place, str]]:
    """Values of `null_if` that the register's type cannot have."""
    held = bounds(register)
    if held is None and register.null_if:
        told = f"is for whole numbers, and this is {show(register.type)}, whose NaN and infinities are null anyway"
        yield place, f"{told}; remove it, or correct type"
        return
    least, most = held or (0, 0)
    range_words = f"{least} to {most}" if not least else f"{least} to {most // 2}, or by its bits 0 to {most}"
    for value in register.null_if:
        if least <= value <= most:
            continue
        instead = "write one of these, or correct type"
        if value < 0 and not least and value >= -(most + 1) // 2:
            instead = f'write {most + 1 + value}, which are its bits, or type = "s{register.type[1:]}"'
        written = f"{show(value)} (0x{value:X})" if _SHORT_NUMBER <= value <= _LONGEST_NUMBER else show(value)
        yield place, f"{written} is no number of {show(register.type)}, which has {range_words}; {instead}"


def _bit_words(register: ModbusRegister) -> str:
    if register.type == "bit":
        return f'is "bit", and table {show(register.table)} holds numbers; write table = "coil" or "discrete"'
    return f'is {show(register.type)}, and table {show(register.table)} holds bits; write type = "bit"'


def remarks(line: SerialModbusSettings, section: Place) -> Iterator[tuple[Place, str]]:
    """Everything in one section that is possible but likely not meant, with its place in the file."""
    yield from _poll_load(line, section)
    for number, unit in enumerate(line.units):
        for index, register in enumerate(unit.registers):
            yield from _manuals_number(register, (*section, "units", number, "registers", index))


def _poll_load(line: SerialModbusSettings, section: Place) -> Iterator[tuple[Place, str]]:
    """Remark on a line that has no time for all requests to its units."""
    share = sum(
        sum(_request_s(line, request.data_bytes) for request in requests(unit.registers)) / unit.interval_s
        for unit in line.units
    )
    if share > 1:
        words = (
            f"asking its units as often as interval_s says takes some {share:.1f} s of each second, so that they are "
            "asked less often: raise interval_s or baud, name registers that lie side by side, or give some units a "
            "line of their own"
        )
        yield section, words


def _request_s(line: SerialModbusSettings, data_bytes: int) -> float:
    bits = 9 + (line.parity != "none") + line.stop_bits
    characters = _REQUEST_CHARACTERS + _ANSWER_CHARACTERS + data_bytes + 2 * _SILENCE_CHARACTERS
    return characters * bits / line.baud + ANSWER_S


def _manuals_number(register: ModbusRegister, place: Place) -> Iterator[tuple[Place, str]]:
    first = _MANUALS_FIRST.get(register.table)
    if first is not None and first <= register.address < first + _MANUALS_COUNT:
        words = (
            f"{register.address} looks like a manual's number; in the request that is {register.address - first} "
            f"(manuals count the {register.table} table from {first}): write that, unless the manual says that "
            "addresses are as in the request"
        )
        yield (*place, "address"), words
