"""Every kind of serial line has its record, and the records cover every section of `[serial]`."""

from typing import get_args, get_type_hints

from msgspec import Struct
from msgspec.structs import replace

from gateway.serial_lines.kinds import KINDS, sections
from gateway.settings import SerialModbusSettings, SerialSettings, SerialTextSettings


def test_every_list_of_sections_has_a_record() -> None:
    hints = get_type_hints(SerialSettings).items()
    lists = [
        name for name, hint in hints if any(isinstance(of, type) and issubclass(of, Struct) for of in get_args(hint))
    ]
    assert [kind.name for kind in KINDS] == lists


def test_sections_know_their_kind_and_their_place() -> None:
    text = SerialTextSettings(port="/dev/ttyUSB0", device="scale", format="json")
    first, second = (SerialModbusSettings(port=f"/dev/ttyUSB{number}", units=()) for number in (1, 2))
    found = sections(SerialSettings(text=(text,), modbus=(first, second)))
    assert [(section.kind.header, section.place, section.settings) for section in found] == [
        ("[[serial.text]]", ("serial", "text", 0), text),
        ("[[serial.modbus]]", ("serial", "modbus", 0), first),
        ("[[serial.modbus]]", ("serial", "modbus", 1), second),
    ]


def test_a_section_of_any_kind_names_a_port() -> None:
    assert not SerialSettings().names_ports
    for kind in KINDS:
        assert replace(SerialSettings(), **{kind.name: (object(),)}).names_ports, kind.name
