"""The words of `sluice status` on serial lines: what is heard there, and what cannot acknowledge."""

from typing import Any

from gateway.status_text import _input_lines


def lines(serial: dict[str, Any]) -> list[str]:
    return list(_input_lines({"serial": {"ports": {}, "unopened": {}, "missing": []} | serial}))


def test_a_sensor_with_our_frames_and_one_that_has_not_said_its_name() -> None:
    assert lines({"ports": {"/dev/ttyUSB0": {"device": "attic"}, "/dev/ttyUSB1": {"device": None}}}) == [
        "serial      /dev/ttyUSB0: sensor attic",
        "serial      /dev/ttyUSB1: no sensor has said its name yet",
    ]


def test_a_sensor_that_writes_text_cannot_acknowledge() -> None:
    state = {"device": "scale", "acknowledges": False, "format": "csv", "heard": True}
    (told,) = lines({"ports": {"/dev/ttyUSB0": state}})
    assert told == (
        "serial      /dev/ttyUSB0: sensor scale, cannot acknowledge: what comes while nothing can be stored is lost, "
        "and counted"
    )
    (told,) = lines({"ports": {"/dev/ttyUSB0": state | {"heard": False}}})
    assert told.endswith("; NOTHING READ from it yet: check its wiring, baud and format")


def test_units_of_modbus_are_told_one_by_one() -> None:
    units = {
        "meter": {"unit": 1, "answers": True, "fault": None},
        "cellar": {"unit": 2, "answers": False, "fault": "no answer"},
        "attic": {"unit": 3, "answers": False, "fault": None},
        "\x1b[31mred": {"unit": 4, "answers": True, "fault": "illegal data address"},
    }
    first, *rest = lines({"ports": {"/dev/ttyUSB0": {"units": units, "acknowledges": False}}})
    assert first.startswith("serial      /dev/ttyUSB0: Modbus, 4 units; cannot acknowledge")
    assert rest[:3] == [
        "            meter answers",
        "            cellar DOES NOT ANSWER: no answer",
        "            attic has not answered yet",
    ]
    assert "\x1b" not in rest[3]
    assert rest[3].endswith("red answers: illegal data address")


def test_what_is_not_served_is_told_with_its_reason() -> None:
    told = lines({"unopened": {"/dev/ttyUSB0": "Permission denied: x"}, "missing": ["/dev/ttyACM*"]})
    assert told == [
        "serial      /dev/ttyUSB0: CANNOT BE OPENED: Permission denied: x",
        (
            "serial      /dev/ttyACM*: NOT THERE: plug it in, or mend serial.ports (or the section that names it; "
            "sluice check lists what is there)"
        ),
    ]
