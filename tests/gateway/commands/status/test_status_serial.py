"""The words of `sluice status` on serial lines: what is heard there, and what cannot acknowledge."""

from typing import Any

from gateway.commands.status.words import _input_lines

NOW_US = 600_000_000
CANNOT_ACKNOWLEDGE = (
    "serial      text and Modbus cannot acknowledge: readings that come while nothing can be stored are lost, "
    "and counted"
)
TEXT = {
    "device": "scale",
    "acknowledges": False,
    "format": "csv",
    "used_s": 14.2,
    "trouble": None,
    "refused": 0,
    "refused_last": None,
}


def lines(serial: dict[str, Any]) -> list[str]:
    return list(_input_lines({"serial": {"ports": {}, "unopened": {}, "missing": []} | serial}, NOW_US))


def test_a_sensor_with_our_frames_and_one_that_has_not_said_its_name() -> None:
    silent = "SILENT for 1 min 26 s, nothing comes: check power, wiring, ground and baud"
    ports = {
        "/dev/ttyUSB0": {"device": "attic", "used_s": 1.9, "trouble": None},
        "/dev/ttyUSB1": {"device": None, "used_s": None, "trouble": None},
        "/dev/ttyUSB2": {"device": "s3", "used_s": 86.0, "trouble": silent},
        "/dev/ttyUSB3": {"device": None, "used_s": 2.0, "trouble": "REFUSED: it calls itself '\x1b', which"},
        # A daemon of another version says less.
        "/dev/ttyUSB4": {"device": "cellar"},
    }
    assert lines({"ports": ports}) == [
        "serial      /dev/ttyUSB0: sensor attic, last heard 2 s ago",
        "serial      /dev/ttyUSB1: no sensor has said its name yet",
        f"serial      /dev/ttyUSB2: sensor s3, {silent}",
        "serial      /dev/ttyUSB3: REFUSED: it calls itself '\\x1b', which",
        "serial      /dev/ttyUSB4: sensor cellar",
    ]


def test_a_port_that_others_read_too() -> None:
    rivals = "minicom (process 7) has it open: stop it, or take the port out of serial.ports"
    _, told = lines({"ports": {"/dev/ttyUSB0": {"device": "attic", "used_s": 1.9, "rivals": rivals}}})
    assert told == f"            READ BY OTHERS TOO, so each gets only a part of the input: {rivals}"


def test_a_port_whose_sensor_has_a_name_that_is_on_another_port_too() -> None:
    shared = "z1 is on /dev/ttyUSB1 too: their readings mix; give each its own name"
    port = {"device": "z1", "used_s": 1.9, "shared": shared}
    assert lines({"ports": {"/dev/ttyUSB0": port, "/dev/ttyUSB1": {"device": "z2", "shared": None}}}) == [
        "serial      /dev/ttyUSB0: sensor z1, last heard 2 s ago",
        f"            ONE NAME ON SEVERAL PORTS: {shared}",
        "serial      /dev/ttyUSB1: sensor z2",
    ]


def test_a_port_that_is_gone_is_told_once_with_who_was_heard_on_it() -> None:
    gone = {
        "/dev/ttyUSB2": {"gone_s": 40.2, "devices": ["s3"]},
        "/dev/ttyUSB3": {"gone_s": 3_600.0, "devices": [f"unit{number}" for number in range(7)]},
    }
    (other,) = lines({"missing": ["/dev/ttyS4"]})
    assert lines({"gone": gone, "missing": ["/dev/ttyS4", "/dev/ttyUSB2"]}) == [
        "serial      /dev/ttyUSB2: GONE for 40 s (unplugged, or no power); last heard there: sensor s3",
        (
            "serial      /dev/ttyUSB3: GONE for 1 h (unplugged, or no power); last heard there: sensors unit0, unit1, "
            "unit2, unit3, unit4 and 2 more"
        ),
        other,
    ]


def test_a_line_that_the_daemon_has_escaped_is_not_escaped_again() -> None:
    last = {"reason": "not-text", "line": r"\xbf$\xd5\x03"}
    (told, _) = lines({"ports": {"/dev/ttyUSB0": TEXT | {"used_s": None, "refused": 2, "refused_last": last}}})
    assert told.endswith(r'2 LINES REFUSED, the last for not-text: "\xbf$\xd5\x03"')


def test_sensors_that_write_text_and_once_that_they_cannot_acknowledge() -> None:
    last = {"reason": "no-pairs", "line": "co2: 412 \x1b"}
    mute = "NOTHING HAS COME for 3 min: check power, wiring and baud"
    ports = {
        "/dev/ttyUSB0": TEXT,
        "/dev/ttyUSB1": TEXT | {"used_s": None},
        "/dev/ttyUSB2": TEXT | {"used_s": None, "refused": 52, "refused_last": last},
        "/dev/ttyUSB3": TEXT | {"refused": 1, "refused_last": last},
        "/dev/ttyUSB4": TEXT | {"used_s": None, "trouble": mute},
        "/dev/ttyUSB5": TEXT | {"noisy": 1_200},
    }
    assert lines({"ports": ports, "missing": ["/dev/ttyACM0"]}) == [
        "serial      /dev/ttyUSB0: sensor scale, last read 14 s ago",
        "serial      /dev/ttyUSB1: sensor scale, no reading has come yet",
        'serial      /dev/ttyUSB2: sensor scale, 52 LINES REFUSED, the last for no-pairs: "co2: 412 \\x1b"',
        (
            "serial      /dev/ttyUSB3: sensor scale, last read 14 s ago; 1 line refused, the last for no-pairs: "
            '"co2: 412 \\x1b"'
        ),
        f"serial      /dev/ttyUSB4: sensor scale, {mute}",
        "serial      /dev/ttyUSB5: sensor scale, last read 14 s ago; 1,200 lines with noise",
        lines({"missing": ["/dev/ttyACM0"]})[0],
        CANNOT_ACKNOWLEDGE,
    ]


def test_units_of_modbus_are_told_one_by_one() -> None:
    units = {
        "meter": {"unit": 1, "answers": True, "since_us": None, "fault": None, "asked": 2, "refused": {}},
        "cellar": {"unit": 2, "answers": False, "since_us": NOW_US - 90_000_000, "fault": "no answer"},
        "shed": {"unit": 7, "answers": False, "since_us": NOW_US - 90_000_000, "fault": "unit 9 answered instead"},
        "attic": {"unit": 3, "answers": False, "since_us": None, "fault": None},
        "\x1b[31mred": {"unit": 4, "answers": True, "fault": "illegal data address"},
        "absent": {
            "unit": 5,
            "answers": True,
            "fault": "input 1: failure",
            "asked": 1,
            "refused": {"volts": "input 1: failure"},
        },
        "climate": {
            "unit": 6,
            "answers": True,
            "fault": "input 9: no answer",
            "asked": 9,
            "refused": {f"r{number}": "input 1: failure" for number in range(7)},
        },
    }
    first, *rest = lines({"ports": {"/dev/ttyUSB0": {"kind": "M-Bus", "units": units, "acknowledges": False}}})
    assert first == "serial      /dev/ttyUSB0: M-Bus, 7 units"
    five = "; ".join(f"r{number}: input 1: failure" for number in range(5))
    assert rest == [
        "            meter answers",
        "            cellar DOES NOT ANSWER for 1 min 30 s: no answer",
        "            shed CANNOT BE READ for 1 min 30 s: unit 9 answered instead",
        "            attic has not answered yet",
        "            \\x1b[31mred answers: illegal data address",
        "            absent answers, but gives NOTHING: 1 of 1 register refused: volts: input 1: failure",
        f"            climate answers, 7 of 9 registers refused: {five}; and 2 more; last: input 9: no answer",
        CANNOT_ACKNOWLEDGE,
    ]


def test_what_is_not_served_is_told_with_its_reason() -> None:
    awaited = {"all": "no USB adapter is plugged in now; it may come later"}
    told = lines({"unopened": {"/dev/ttyUSB0": "Permission denied: x"}, "missing": ["/dev/ttyS4"], "awaited": awaited})
    assert told == [
        "serial      /dev/ttyUSB0: CANNOT BE OPENED: Permission denied: x",
        (
            "serial      /dev/ttyS4: NOT THERE: plug it in, or correct serial.ports (or the section that names it; "
            "sluice check lists the ports here)"
        ),
        "serial      all: no USB adapter is plugged in now; it may come later",
    ]
