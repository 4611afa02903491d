"""The words of `sluice status` on serial lines: devices heard, and lines that cannot acknowledge."""

from typing import Any

from gateway.commands.status.words import _serial

NOW_US = 600_000_000
CANNOT_ACKNOWLEDGE = (
    "readings of text, formats and Modbus cannot be acknowledged: readings that come while nothing can be stored are "
    "lost, and counted"
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
    return list(_serial({"ports": {}, "unopened": {}, "missing": []} | serial, NOW_US))


def test_a_sensor_with_our_frames_and_one_that_has_not_said_its_name() -> None:
    ports = {
        "/dev/ttyUSB0": {"device": "attic", "used_s": 1.9, "trouble": None},
        "/dev/ttyUSB1": {"device": None, "used_s": None, "trouble": None},
        "/dev/ttyUSB2": {"device": "s3", "used_s": 86.0, "trouble": "SILENT for 1 min 26 s"},
        "/dev/ttyUSB3": {"device": None, "used_s": 2.0, "trouble": "REFUSED: it calls itself '\x1b', which"},
        # A daemon of another version says less.
        "/dev/ttyUSB4": {"device": "cellar"},
    }
    assert lines({"ports": ports}) == [
        "/dev/ttyUSB0: sensor attic, last heard 2 s ago",
        "/dev/ttyUSB1: no sensor has said its name yet",
        "/dev/ttyUSB2: sensor s3, last heard 1 min 26 s ago",
        "/dev/ttyUSB3: no sensor has said its name yet",
        "/dev/ttyUSB4: sensor cellar",
    ]


def test_a_line_that_the_daemon_has_escaped_is_not_escaped_again() -> None:
    last = {"reason": "not-text", "line": r"\xbf$\xd5\x03"}
    (told, _) = lines({"ports": {"/dev/ttyUSB0": TEXT | {"used_s": None, "refused": 2, "refused_last": last}}})
    assert told.endswith(r'2 LINES REFUSED, the last for not-text: "\xbf$\xd5\x03"')


def test_sensors_that_write_text_and_once_that_they_cannot_acknowledge() -> None:
    last = {"reason": "no-pairs", "line": "co2: 412 \x1b"}
    ports = {
        "/dev/ttyUSB0": TEXT,
        "/dev/ttyUSB1": TEXT | {"used_s": None},
        "/dev/ttyUSB2": TEXT | {"used_s": None, "refused": 52, "refused_last": last},
        "/dev/ttyUSB3": TEXT | {"refused": 1, "refused_last": last},
        "/dev/ttyUSB4": TEXT | {"used_s": None, "trouble": "NOTHING HAS COME"},
        "/dev/ttyUSB5": TEXT | {"noisy": 1_200},
    }
    assert lines({"ports": ports, "missing": ["/dev/ttyACM0"]}) == [
        "/dev/ttyUSB0: sensor scale, last read 14 s ago",
        "/dev/ttyUSB1: sensor scale, no reading has come yet",
        '/dev/ttyUSB2: sensor scale, 52 LINES REFUSED, the last for no-pairs: "co2: 412 \\x1b"',
        ('/dev/ttyUSB3: sensor scale, last read 14 s ago; 1 line refused, the last for no-pairs: "co2: 412 \\x1b"'),
        "/dev/ttyUSB4: sensor scale, no reading has come yet",
        "/dev/ttyUSB5: sensor scale, last read 14 s ago; 1,200 lines with noise",
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
    assert first == "/dev/ttyUSB0: M-Bus, 7 units"
    five = "; ".join(f"r{number}: input 1: failure" for number in range(5))
    assert rest == [
        "meter answers",
        "cellar DOES NOT ANSWER for 1 min 30 s: no answer",
        "shed CANNOT BE READ for 1 min 30 s: unit 9 answered instead",
        "attic has not answered yet",
        "\\x1b[31mred answers: illegal data address",
        "absent answers, but gives NOTHING: 1 of 1 register refused: volts: input 1: failure",
        f"climate answers, 7 of 9 registers refused: {five}; and 2 more; last: input 9: no answer",
        CANNOT_ACKNOWLEDGE,
    ]
