"""What is wrong with `[serial]` although each setting of it is right: what settings mean together, in words."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from gateway.serial_lines.modbus_registers import width
from gateway.serial_lines.text_formats import SENTENCE_MEMBER
from gateway.settings import (
    ModbusRegister,
    ModbusUnit,
    SerialModbusSettings,
    SerialSettings,
    SerialTextSettings,
)
from gateway.toml_files.mistakes import Place, show

SERIAL_EXAMPLES: Final = {
    ("serial", "text", "port"): '; write port = "/dev/ttyUSB0", or a name of /dev/serial/by-path that stays with the '
    "socket",
    ("serial", "text", "device"): '; write device = "the name that its readings come under"',
    ("serial", "text", "format"): '; write format = "key=value", "key:value", "csv", "json" or "nmea", as its lines '
    "look",
    ("serial", "modbus", "port"): '; write port = "/dev/ttyUSB0", or a name of /dev/serial/by-path that stays with '
    "the socket",
    ("serial", "modbus", "units"): "; write [[serial.modbus.units]] below it, with unit, device and registers",
    ("serial", "modbus", "units", "unit"): "; write unit = 1, or the address that is set on the device",
    ("serial", "modbus", "units", "device"): '; write device = "the name that its readings come under"',
    ("serial", "modbus", "units", "registers"): '; write registers = [{name = "volts", address = 0}], or '
    "[[serial.modbus.units.registers]] below it",
    ("serial", "modbus", "units", "registers", "name"): '; write name = "volts", or what else it holds',
    ("serial", "modbus", "units", "registers", "address"): "; write its address as it stands in the request, from 0: "
    "40001 or 30001 in a manual is 0",
}
"""By the section and the setting that is missing: what to write."""
_MODBUS_SECTIONS: Final = {
    "serial.modbus": SerialModbusSettings,
    "serial.modbus.units": ModbusUnit,
    "serial.modbus.units.registers": ModbusRegister,
}
_SENTENCE = re.compile(r"[A-Z][A-Z0-9]{2,9}")
_ADDRESS_MAX = 65_535
_BIT_TABLES = frozenset({"coil", "discrete"})
_CSV_EXAMPLE = 'columns = ["celsius", "", "humidity"], where an empty one leaves that value out'
_DEFAULTS: Final = SerialSettings()
_ONE_READER = "and a port has one reader"


def serial_mistakes(serial: SerialSettings) -> Iterator[tuple[Place, str]]:
    """Every mistake, with its place in the file."""
    for variable in ("{device}", "{stream}"):
        if serial.topic.count(variable) != 1:
            yield ("serial", "topic"), f"must hold {variable} once, as in 'device/{{device}}/{{stream}}'"
    for pattern in serial.ports:
        if pattern != "all" and not pattern.startswith("/"):
            wanted = 'write the whole path, such as "/dev/ttyUSB0" or "/dev/ttyUSB*", or "all" for every USB adapter'
            yield ("serial", "ports"), f"{show(pattern)} is no path; {wanted}"
    if not serial.ports:
        yield from _idle_mistakes(serial)
    yield from _port_mistakes(serial)
    yield from _device_mistakes(serial)
    for index, text in enumerate(serial.text):
        yield from _text_mistakes(text, ("serial", "text", index))
    for index, line in enumerate(serial.modbus):
        yield from _line_mistakes(line, ("serial", "modbus", index))


def _idle_mistakes(serial: SerialSettings) -> Iterator[tuple[Place, str]]:
    """Settings that would do nothing without a port of `ports`, where they are not what they are by default."""
    for name in ("baud", "probe_interval_s", "oscillator"):
        if getattr(serial, name) != getattr(_DEFAULTS, name):
            # Each of these lines has a baud of its own, and most have one that is not the default.
            below = ", or write it below [[serial.text]] or [[serial.modbus]]" if name == "baud" else ""
            told = "is for sensors with our frames, and serial.ports names no port of theirs"
            yield ("serial", name), f"{told}; remove it, or write ports{below}"


def modbus_section(key: str) -> str:
    """Under which section a setting of Modbus belongs that stands under another of them; empty where it is of none."""
    # Most likely a slip of `unit`, not the section.
    if key == "units":
        return ""
    found = next((name for name, section in _MODBUS_SECTIONS.items() if key in section.__struct_fields__), None)
    return "" if found is None else f"it belongs under [[{found}]]"


def _port_mistakes(serial: SerialSettings) -> Iterator[tuple[Place, str]]:
    """A line of its own for each sensor that does not speak our frames, or for each RS-485 line."""
    first: dict[str, Place] = {}
    named: list[tuple[Place, str]] = [
        *((("serial", "text", index), section.port) for index, section in enumerate(serial.text)),
        *((("serial", "modbus", index), section.port) for index, section in enumerate(serial.modbus)),
    ]
    for section, port in named:
        place = (*section, "port")
        if not port.startswith("/"):
            what = "names every adapter, and this is one line" if port == "all" else "is no path"
            yield place, f'{show(port)} {what}; write the path of one port, such as "/dev/ttyUSB0"'
            continue
        other = first.setdefault(port, section)
        if other != section:
            units = "; write all units of the line into one section" if other[1] == section[1] == "modbus" else ""
            yield place, f"{show(port)} is {_spell(other)}.port too, {_ONE_READER}{units or '; write another'}"


def _device_mistakes(serial: SerialSettings) -> Iterator[tuple[Place, str]]:
    first: dict[str, Place] = {}
    named: list[tuple[Place, str]] = [
        *((("serial", "text", index), section.device) for index, section in enumerate(serial.text)),
        *(
            (("serial", "modbus", index, "units", number), unit.device)
            for index, section in enumerate(serial.modbus)
            for number, unit in enumerate(section.units)
        ),
    ]
    for place, device in named:
        other = first.setdefault(device, place)
        if other != place:
            mixed = "and the readings of both would be one sensor's; write another name"
            yield (*place, "device"), f"{show(device)} is {_spell(other)}.device too, {mixed}"


# -- lines of text --------------------------------------------------------------------------------


def _text_mistakes(text: SerialTextSettings, section: Place) -> Iterator[tuple[Place, str]]:
    if text.format == "csv":
        yield from _column_mistakes(text.columns, (*section, "columns"))
    else:
        if text.columns:
            yield (
                (*section, "columns"),
                f'is for format = "csv", and this is {show(text.format)}; remove one of the two',
            )
        if text.delimiter != ",":
            told = f'is for format = "csv", and this is {show(text.format)}; remove it'
            yield (*section, "delimiter"), told
    if text.format == "nmea":
        for kind, names in text.sentences.items():
            yield from _sentence_mistakes(kind, names, (*section, "sentences", kind))
    elif text.sentences:
        told = f'is for format = "nmea", and this is {show(text.format)}; remove one of the two'
        yield (*section, "sentences"), told


def _column_mistakes(columns: Sequence[str], place: Place) -> Iterator[tuple[Place, str]]:
    if not columns:
        yield place[:-1], f'has format = "csv" and no columns, so that its values have no names; write {_CSV_EXAMPLE}'
    elif not any(columns):
        yield place, f"names none of the values, so that nothing would be read; write {_CSV_EXAMPLE}"
    for name in _repeated(columns):
        yield place, f"{show(name)} stands here twice, and a reading has one value of a name; write another"


def _sentence_mistakes(kind: str, names: Sequence[str], place: Place) -> Iterator[tuple[Place, str]]:
    if SENTENCE_MEMBER in names:
        yield place, f"{show(SENTENCE_MEMBER)} is the member that says which sentence it was; write another name"
    if _SENTENCE.fullmatch(kind) is None:
        wanted = "write the type as it stands behind the $: MTW, or WIMTW of one talker alone"
        yield place, f"{show(kind)} is no type of a sentence; {wanted}"
    if names and not any(names):
        yield place, "names none of its fields, so that nothing would be read; name one, or write [] to number them all"
    for name in _repeated(names):
        yield place, f"{show(name)} stands here twice, and a reading has one value of a name; write another"


# -- Modbus ---------------------------------------------------------------------------------------


def _line_mistakes(line: SerialModbusSettings, section: Place) -> Iterator[tuple[Place, str]]:
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
            yield (*place, "unit"), f"{unit.unit} is {_spell((*section, 'units', other))}.unit too, {both}"
        yield from _unit_mistakes(unit, place)


def _unit_mistakes(unit: ModbusUnit, section: Place) -> Iterator[tuple[Place, str]]:
    if not unit.registers:
        wanted = 'write registers = [{name = "volts", address = 0}]'
        yield (*section, "registers"), f"is empty, so that nothing would be read; {wanted}"
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
    elif register.type == "bit" and (register.scale != 1 or register.offset != 0):
        setting = "scale" if register.scale != 1 else "offset"
        yield (*place, setting), "is for numbers, and this is a bit, which is 0 or 1; remove it"
    if not math.isfinite(register.offset):
        yield (*place, "offset"), f"{register.offset} is no number that can be added; write one, or leave it out"


def _bit_words(register: ModbusRegister) -> str:
    if register.type == "bit":
        return f'is "bit", and table {show(register.table)} holds numbers; write table = "coil" or "discrete"'
    return f'is {show(register.type)}, and table {show(register.table)} holds bits; write type = "bit"'


def _repeated(names: Sequence[str]) -> list[str]:
    """Names that stand there more than once; an empty one may."""
    return [name for name, count in Counter(names).items() if name and count > 1]


def _spell(place: Place) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
