"""`sluice check` on serial lines: ports, other programs that want them, and lines that are too slow."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.commands.check import serial_lines
from gateway.commands.check.finding import Finding, Remark
from gateway.intake.routes import compile_routes
from gateway.record_contract import NAME_RULE
from gateway.serial_lines import rivals
from gateway.serial_lines.modbus_mistakes import ANSWER_S
from gateway.serial_lines.rivals import Adapter, Holder
from gateway.settings import (
    ModbusRegister,
    ModbusUnit,
    RouteSettings,
    SerialFormatSettings,
    SerialModbusSettings,
    SerialSettings,
    SerialTextSettings,
)

CH340 = (0x1A86, 0x7523, None)
FTDI = (0x0403, 0x6001, "A5069RR4")


@pytest.fixture(autouse=True)
def quiet_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program, and no adapters except those that a test plugs in."""
    monkeypatch.setattr(serial_lines, "running", lambda _program: None)
    monkeypatch.setattr(serial_lines, "brltty_words", lambda: None)
    monkeypatch.setattr(serial_lines, "holders", lambda _ports: {})
    plug(monkeypatch)


def plug(monkeypatch: pytest.MonkeyPatch, *adapters: Adapter) -> None:
    monkeypatch.setattr(serial_lines, "adapters", lambda: list(adapters))
    monkeypatch.setattr(rivals, "adapters", lambda: list(adapters))


@pytest.fixture
def ports() -> Iterator[list[str]]:
    """Terminals that stand for serial ports."""
    ends = [os.openpty() for _ in range(2)]
    yield [os.ttyname(near) for _, near in ends]
    for pair in ends:
        for end in pair:
            os.close(end)


def text(port: str, device: str = "scale") -> SerialTextSettings:
    return SerialTextSettings(port=port, device=device, format="json")


def look(tmp_path: Path, settings: SerialSettings) -> list[tuple[str, str, str]]:
    """Judgement, subject and words of each finding."""
    return [
        (judgement(finding), finding.subject, finding.words)
        for finding in serial_lines.check_serial(settings, tmp_path / "buffer.db")
    ]


def judgement(finding: Finding) -> str:
    return "FAIL" if not finding.ok else "warn" if isinstance(finding, Remark) else "ok"


# -- ports ----------------------------------------------------------------------------------------


def test_nothing_to_read_is_a_warning(tmp_path: Path) -> None:
    ((how, subject, words),) = look(tmp_path, SerialSettings())
    assert (how, subject) == ("warn", "serial.ports")
    assert words.startswith("is empty, so no sensor is read")


def test_a_port_of_text_cannot_acknowledge_and_is_not_looked_at_twice(tmp_path: Path, ports: list[str]) -> None:
    found = look(tmp_path, SerialSettings(ports=tuple(ports), text=(text(ports[0]),)))
    assert [(how, subject, words.partition(" may ")[0]) for how, subject, words in found] == [
        ("ok", "serial.text[0].port", ports[0]),
        ("ok", "serial", found[1][2]),
        ("warn", "serial.text[0].port", found[2][2]),
        ("ok", "serial.ports", ports[1]),
    ]
    assert found[1][2].startswith("readings of text, formats and Modbus cannot be acknowledged: readings that come")
    assert found[2][2] == (
        f"{ports[0]} is in serial.ports too, where it is ignored: take it out there, or, if its sensor speaks "
        "our frames, remove this section"
    )


def test_a_format_of_ones_own_that_cannot_be_loaded_fails(tmp_path: Path, ports: list[str]) -> None:
    line = SerialFormatSettings(port=ports[0], device="yard", format="sds011", baud=115_200, folder=tmp_path)
    found = look(tmp_path, SerialSettings(format=(line,)))
    assert [(how, subject) for how, subject, _ in found] == [
        ("ok", "serial.format[0].port"),
        ("ok", "serial"),
        ("warn", "serial.format[0].folder"),
        ("warn", "serial.format[0].baud"),
    ]
    found = look(tmp_path, SerialSettings(format=(replace(line, format="rain"),)))
    assert found[-1][:2] == ("FAIL", "serial.format[0].format")
    assert found[-1][2].startswith(f'"rain" is not there: write {tmp_path}/rain.py, install a package with')


def test_a_glob_or_all_may_match_the_port_of_a_section(tmp_path: Path, ports: list[str]) -> None:
    for number, port in enumerate(ports):
        (tmp_path / f"link{number}").symlink_to(port)
    settings = SerialSettings(ports=(f"{tmp_path}/link*",), text=(text(ports[0]),))
    assert [how for how, _, _ in look(tmp_path, settings)] == ["ok", "ok", "ok"]


def test_a_port_that_is_written_twice_is_looked_at_once(tmp_path: Path, ports: list[str]) -> None:
    link = f"{tmp_path}/link"
    Path(link).symlink_to(ports[0])

    def told(*patterns: str) -> list[tuple[str, str, str]]:
        return look(tmp_path, SerialSettings(ports=patterns))

    (_, _, well), second = told(link, ports[0])
    assert well.startswith(f"{link} may be opened")
    same = f"{ports[0]} is {link} by another name, and a port is opened once: remove one of the two"
    assert second == ("warn", "serial.ports", same)
    assert told(link, link)[1][2] == (f"{link} is there twice, and a port is opened once: remove one of the two")
    # Patterns may overlap.
    assert [how for how, _, _ in told(f"{tmp_path}/link*", ports[0], f"{tmp_path}/l*")] == ["ok"]


def test_that_sensors_cannot_be_acknowledged_is_told_once(tmp_path: Path, ports: list[str]) -> None:
    sections = (text(ports[0]), text(ports[1], "wind"))
    told = [words for _, _, words in look(tmp_path, SerialSettings(text=sections))]
    assert sum("acknowledged" in words for words in told) == 1


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("text", "write the port that the sensor is on"),
        ("ports", "leave it out, or write what matches serial ports only"),
    ],
)
def test_what_is_no_port_is_told_as_its_section_has_it(section: str, words: str, tmp_path: Path) -> None:
    name = str(tmp_path / "file")
    Path(name).touch()
    settings = SerialSettings(text=(text(name),)) if section == "text" else SerialSettings(ports=(name,))
    how, _, told = look(tmp_path, settings)[0]
    assert (how, told) == ("FAIL", f"{name}: it is no serial port: {words}")


def test_a_device_that_is_no_terminal_is_no_port_whoever_has_it_open(
    tmp_path: Path, ports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serial_lines, "holders", lambda _ports: {"/dev/null": [Holder(1, "init"), Holder(2, "cron")]})
    settings = SerialSettings(ports=("/dev/null", ports[0]))
    words = "/dev/null: it is no serial port: leave it out, or write what matches serial ports only"
    null, port = look(tmp_path, settings)
    assert null == ("FAIL", "serial.ports", words)
    assert port[0] == "ok"
    ((_, _, told),) = look(tmp_path, SerialSettings(ports=("/dev/tty",)))
    assert "no serial port" not in told


def test_a_name_whose_adapter_is_not_there(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    how, _, told = look(tmp_path, SerialSettings(text=(text(str(link)),)))[0]
    assert how == "FAIL"
    assert told == (
        f"{link} is a name whose adapter is not there (unplugged?): plug it in, or remove its [[serial.text]]"
    )


def test_one_port_under_two_names_and_a_name_of_two_ports(tmp_path: Path, ports: list[str]) -> None:
    for number, port in enumerate(ports):
        (tmp_path / f"link{number}").symlink_to(port)
    sections = (text(ports[0]), text(f"{tmp_path}/link0", "wind"), text(f"{tmp_path}/link*", "rain"))
    failed = [finding[1:] for finding in look(tmp_path, SerialSettings(text=sections)) if finding[0] == "FAIL"]
    same = f"{tmp_path}/link0 is also the port of serial.text[0].port, and only one can read it; write another port"
    assert ("serial.text[1].port", same) in failed
    called = f"fits 2 ports now ({tmp_path}/link0, {tmp_path}/link1): write one"
    assert any(subject == "serial.text[2].port" and called in words for subject, words in failed)


def test_all_without_an_adapter_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.serial_lines.ports.USB_PORTS", (f"{tmp_path}/ttyUSB*",))
    assert look(tmp_path, SerialSettings(ports=("all",))) == [
        ("warn", "serial.ports", "no USB adapter is plugged in now; it may come later")
    ]


def test_a_console_of_the_kernel_is_no_port_for_a_sensor(
    tmp_path: Path, ports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serial_lines, "is_console", lambda path: path == ports[0])
    how, _, words = look(tmp_path, SerialSettings(ports=(ports[0],)))[0]
    assert how == "FAIL"
    assert "is this box's console, on which the kernel writes: a login console answers" in words


def test_a_port_that_another_program_has_and_one_that_the_gateway_has(
    tmp_path: Path, ports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {ports[0]: [Holder(1, "minicom")], ports[1]: [Holder(os.getpid(), "sluice")]}
    monkeypatch.setattr(serial_lines, "holders", lambda _ports: held)
    lock = tmp_path / "buffer.db.lock"
    with lock.open("w"):
        (first, _, words), (second, _, _) = look(tmp_path, SerialSettings(ports=tuple(ports)))
    assert (first, second) == ("FAIL", "ok")
    assert words == f"{ports[0]}: minicom (process 1) has it open: stop it, or take the port out of serial.ports"


# -- adapters -------------------------------------------------------------------------------------


def test_modem_manager_is_told_once_for_each_make_until_a_rule_keeps_it_away(
    tmp_path: Path, ports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plug(monkeypatch, Adapter(ports[0], *CH340, "1-1"), Adapter(ports[1], *CH340, "1-2"))
    monkeypatch.setattr(serial_lines, "_means_usb", lambda _pattern: True)
    settings = SerialSettings(ports=tuple(ports))
    assert [how for how, _, _ in look(tmp_path, settings)] == ["ok", "ok"]
    monkeypatch.setattr(serial_lines, "running", {"ModemManager": 812}.get)
    (words,) = [words for how, _, words in look(tmp_path, settings) if how == "warn"]
    assert words.startswith(f"ModemManager runs, and may take {ports[1]}: ")
    assert 'ATTRS{idVendor}=="1a86"' in words
    monkeypatch.setattr(serial_lines, "is_spared_by_modem_manager", lambda _port: True)
    assert [how for how, _, _ in look(tmp_path, settings)] == ["ok", "ok"]


@pytest.mark.parametrize("pattern", ["all", "/dev/ttyUSB7", "/dev/ttyACM*", "/dev/serial/by-id/x"])
def test_programs_that_take_usb_adapters_are_told_before_one_is_plugged_in(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serial_lines, "running", {"ModemManager": 812}.get)
    monkeypatch.setattr(serial_lines, "brltty_words", lambda: "brltty is on this box")

    def told(*patterns: str) -> list[str]:
        found = look(tmp_path, SerialSettings(patterns))
        return [words.partition(":")[0] for _, subject, words in found if subject == "serial"]

    assert told(pattern) == ["ModemManager runs", "brltty is on this box"]
    assert told("/dev/ttyS9") == []


def test_adapters_without_a_number_are_not_told_apart_by_id(
    tmp_path: Path, ports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SerialSettings(ports=("/dev/serial/by-id/*",))
    plug(monkeypatch, Adapter(ports[0], *CH340, "1-1"), Adapter(ports[1], *CH340, "1-2"))
    assert any("look alike, and /dev/serial/by-id shows only one" in words for _, _, words in look(tmp_path, settings))
    # One adapter with two ports, and two with numbers of their own.
    plug(monkeypatch, Adapter(ports[0], *CH340, "1-1"), Adapter(ports[1], *CH340, "1-1"))
    assert not any("look alike" in words for _, _, words in look(tmp_path, settings))
    plug(monkeypatch, Adapter(ports[0], *FTDI, "1-1"), Adapter(ports[1], 0x0403, 0x6001, "A2", "1-2"))
    assert not any("look alike" in words for _, _, words in look(tmp_path, settings))


def test_a_number_of_the_kernel_may_be_another_adapters_after_a_restart(
    tmp_path: Path, ports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_id, by_path = tmp_path / "by-id", tmp_path / "by-path"
    for folder in (by_id, by_path):
        folder.mkdir()
        (folder / "x").symlink_to(ports[0])
    monkeypatch.setattr(serial_lines, "_LINKS", (str(by_id), str(by_path)))
    settings = SerialSettings(text=(text(ports[0]),))

    def told() -> list[str]:
        return [words for how, _, words in look(tmp_path, settings) if how == "warn"]

    plug(monkeypatch, Adapter(ports[0], *FTDI, "1-1"))
    assert told() == []
    plug(monkeypatch, Adapter(ports[0], *FTDI, "1-1"), Adapter(ports[1], *CH340, "1-2"))
    assert told()[0].startswith(f"{ports[0]} may be another adapter after a restart")
    assert told()[0].endswith(f"write {by_id}/x")
    plug(monkeypatch, Adapter(ports[0], *CH340, "1-1"), Adapter(ports[1], *CH340, "1-2"))
    assert told()[0].endswith(f"write {by_path}/x")
    # A port that is named by its socket stays.
    settings = SerialSettings(text=(text(f"{by_path}/x"),))
    assert told() == []


# -- Modbus ---------------------------------------------------------------------------------------


def test_a_line_that_is_too_slow_for_its_units(tmp_path: Path, ports: list[str]) -> None:
    registers = tuple(ModbusRegister(name=f"r{number}", address=10 * number) for number in range(10))

    def load(interval_s: float) -> list[str]:
        unit = ModbusUnit(unit=1, device="meter", registers=registers, interval_s=interval_s)
        settings = SerialSettings(modbus=(SerialModbusSettings(port=ports[0], units=(unit,)),))
        return [words for _, subject, words in look(tmp_path, settings) if subject == "serial.modbus[0]"]

    # Ten requests of 8 characters, answers of 7, and two silences of 3.5: 22 characters of 11 bits at 9600 baud.
    round_s = 10 * (22 * 11 / 9600 + ANSWER_S)
    assert load(round_s * 1.05) == []
    (words,) = load(round_s / 2)
    assert words.startswith("asking its units as often as interval_s says takes some 2.0 s of each second")


@pytest.mark.parametrize(
    ("table", "address", "in_the_request"),
    [("holding", 40_001, 0), ("input", 30_010, 9), ("discrete", 10_001, 0), ("holding", 30_001, None)],
)
def test_a_manuals_number_is_no_address(
    table: str, address: int, in_the_request: int | None, tmp_path: Path, ports: list[str]
) -> None:
    register = ModbusRegister(name="volts", address=address, table=table)  # type: ignore[arg-type]
    unit = ModbusUnit(unit=1, device="meter", registers=(register,))
    settings = SerialSettings(modbus=(SerialModbusSettings(port=ports[0], units=(unit,)),))
    told = [(how, words) for how, subject, words in look(tmp_path, settings) if subject.endswith(".address")]
    if in_the_request is None:
        assert told == []
    else:
        ((how, words),) = told
        assert how == "warn"
        assert words.startswith(
            f"{address} looks like a manual's number; in the request that is {in_the_request} (manuals count"
        )


# -- routes ---------------------------------------------------------------------------------------


def test_a_sensor_whose_readings_no_route_takes(tmp_path: Path, ports: list[str]) -> None:
    unit = ModbusUnit(unit=1, device="meter", registers=(ModbusRegister(name="volts", address=0),))
    settings = SerialSettings(text=(text(ports[0]),), modbus=(SerialModbusSettings(port=ports[1], units=(unit,)),))

    def told(*topics: str) -> list[tuple[str, str, str]]:
        routes = compile_routes([RouteSettings(topic, "device-a") for topic in topics], None, frozenset())
        found = serial_lines.check_serial(settings, tmp_path / "buffer.db", routes)
        return [(judgement(each), each.subject, each.words) for each in found if "topic" in each.words]

    assert told("device/{device}/text", "device/{device}/modbus") == []
    assert told("device/{device}/modbus") == [
        (
            "FAIL",
            "serial.text[0]",
            (
                "its readings get the topic device/scale/text, which no route takes: they would all go to the "
                "quarantine; add a route for that topic, or write another stream"
            ),
        )
    ]
    ((_, subject, words),) = told("device/{device}/text")
    assert subject == "serial.modbus[0].units[0]"
    assert "the topic device/meter/modbus, which no route takes" in words


@pytest.mark.parametrize(
    ("template", "topics", "refused"),
    [
        ("device/{device}/{stream}", ("device/{device}/{stream}",), ""),
        # A sensor may have that stream, or that name.
        ("device/{device}/{stream}", ("device/{device}/thermo",), ""),
        ("device/{device}/{stream}", ("{room}/attic/{device}",), ""),
        ("device/{device}/{stream}", ("device/{device}/#",), ""),
        ("farm/{stream}-{device}", ("farm/{device}",), ""),
        ("farm/s-{stream}/{device}", ("farm/s-thermo/{device}",), ""),
        ("device/{device}/{stream}", ("sensor/{device}/{stream}",), "device/NAME/STREAM, which no route takes"),
        ("serial/{device}/{stream}", ("device/{device}/{stream}",), "serial/NAME/STREAM, which no route takes"),
        ("farm/s-{stream}/{device}", ("farm/thermo/{device}",), "farm/s-STREAM/NAME, which no route takes"),
        ("device/{device}/{stream}", ("device/{device}/-x",), "device/NAME/STREAM, which no route takes"),
        (
            "device/{device}/{stream}",
            ("device/{device}/air", "device/{device}/+/#", "+/{device}/air"),
            "",
        ),
        (
            "device/{device}/{stream}",
            ("device/{device}/{stream}", "+/{device}/#"),
            "device/NAME/STREAM, which several routes take, each to another place",
        ),
        (
            "device/{device}/{stream}",
            ("device/{device}/air", "+/{device}/air"),
            "device/NAME/air, which several routes take, each to another place",
        ),
        (
            "hall 1/{device}/{stream}",
            ("{site}/{device}/{stream}",),
            f"hall 1/NAME/STREAM, in which its route finds no name (a name is {NAME_RULE})",
        ),
    ],
)
def test_sensors_with_our_frames_of_which_no_route_takes_any_reading(
    template: str, topics: tuple[str, ...], refused: str, tmp_path: Path
) -> None:
    settings = SerialSettings(ports=(f"{tmp_path}/ttyUSB*",), topic=template)
    routes = [
        RouteSettings(topic, f"device-{number}", key="{site}/{device}" if "{site}" in topic else "{device}")
        for number, topic in enumerate(topics)
    ]

    def told(fallback: str | None) -> list[tuple[str, str]]:
        table = compile_routes(routes, fallback, frozenset(), template)
        found = serial_lines.check_serial(settings, tmp_path / "buffer.db", table)
        return [(judgement(each), each.words) for each in found if each.subject == "serial.topic"]

    words = (
        f"readings of serial.ports get topics such as {refused}: they would all go to the quarantine; add a route for "
        "such topics, or write another serial.topic"
    )
    assert told(None) == ([("FAIL", words)] if refused else [])
    assert "no route" not in refused or told("strays") == []


def test_a_route_that_takes_frames_is_not_missed_where_there_are_none(tmp_path: Path, ports: list[str]) -> None:
    routes = compile_routes([RouteSettings("device/scale/{device}", "x")], None, frozenset())
    found = serial_lines.check_serial(SerialSettings(text=(text(ports[0]),)), tmp_path / "buffer.db", routes)
    assert "serial.topic" not in [each.subject for each in found]
