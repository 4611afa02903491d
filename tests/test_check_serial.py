"""What `sluice check` says of serial lines: ports, who else wants them, and lines that are too slow."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway import check_serial, serial_rivals
from gateway.check import Finding, Remark
from gateway.check_serial import ANSWER_S
from gateway.serial_rivals import Adapter, Holder
from gateway.settings import ModbusRegister, ModbusUnit, SerialModbusSettings, SerialSettings, SerialTextSettings

CH340 = (0x1A86, 0x7523, None)
FTDI = (0x0403, 0x6001, "A5069RR4")


@pytest.fixture(autouse=True)
def quiet_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program, and no adapter but those that a test plugs in."""
    monkeypatch.setattr(check_serial, "running", lambda _program: None)
    monkeypatch.setattr(check_serial, "brltty_words", lambda: None)
    monkeypatch.setattr(check_serial, "holders", lambda _ports: {})
    plug(monkeypatch)


def plug(monkeypatch: pytest.MonkeyPatch, *adapters: Adapter) -> None:
    monkeypatch.setattr(check_serial, "adapters", lambda: list(adapters))
    monkeypatch.setattr(serial_rivals, "adapters", lambda: list(adapters))


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
        for finding in check_serial.check_serial(settings, tmp_path / "buffer.db")
    ]


def judgement(finding: Finding) -> str:
    return "FAIL" if not finding.ok else "warn" if isinstance(finding, Remark) else "ok"


# -- ports ----------------------------------------------------------------------------------------


def test_nothing_to_read_is_a_warning(tmp_path: Path) -> None:
    ((how, subject, words),) = look(tmp_path, SerialSettings())
    assert (how, subject) == ("warn", "serial.ports")
    assert words.startswith("is empty, so that no sensor is read")


def test_a_port_of_text_cannot_acknowledge_and_is_not_looked_at_twice(tmp_path: Path, ports: list[str]) -> None:
    found = look(tmp_path, SerialSettings(ports=tuple(ports), text=(text(ports[0]),)))
    assert [(how, subject, words.partition(" may ")[0]) for how, subject, words in found] == [
        ("ok", "serial.text[0].port", ports[0]),
        ("ok", "serial.ports", ports[1]),
    ]
    assert "its readings cannot be acknowledged" in found[0][2]
    assert "acknowledged" not in found[1][2]


def test_one_port_under_two_names_and_a_name_of_two_ports(tmp_path: Path, ports: list[str]) -> None:
    for number, port in enumerate(ports):
        (tmp_path / f"link{number}").symlink_to(port)
    sections = (text(ports[0]), text(f"{tmp_path}/link0", "wind"), text(f"{tmp_path}/link*", "rain"))
    failed = [finding[1:] for finding in look(tmp_path, SerialSettings(text=sections)) if finding[0] == "FAIL"]
    same = f"{tmp_path}/link0 is the port of serial.text[0].port too, and a port has one reader; write another"
    assert ("serial.text[1].port", same) in failed
    assert any(subject == "serial.text[2].port" and "means 2 ports now" in words for subject, words in failed)


def test_all_without_an_adapter_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.serial_ports.USB_PORTS", (f"{tmp_path}/ttyUSB*",))
    assert look(tmp_path, SerialSettings(ports=("all",))) == [
        ("warn", "serial.ports", "no USB adapter is plugged in now; it may come later")
    ]


def test_a_console_of_the_kernel_is_no_port_for_a_sensor(
    tmp_path: Path, ports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_serial, "is_console", lambda path: path == ports[0])
    how, _, words = look(tmp_path, SerialSettings(ports=(ports[0],)))[0]
    assert how == "FAIL"
    assert "is this box's console, on which the kernel writes: a login console answers" in words


def test_a_port_that_another_program_has_and_one_that_the_gateway_has(
    tmp_path: Path, ports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {ports[0]: [Holder(1, "minicom")], ports[1]: [Holder(os.getpid(), "sluice")]}
    monkeypatch.setattr(check_serial, "holders", lambda _ports: held)
    lock = tmp_path / "buffer.db.lock"
    with lock.open("w"):
        (first, _, words), (second, _, _) = look(tmp_path, SerialSettings(ports=tuple(ports)))
    assert (first, second) == ("FAIL", "ok")
    assert words == f"{ports[0]}: minicom (process 1) has it open: stop it, or take the port out of [serial]"


# -- adapters -------------------------------------------------------------------------------------


def test_modem_manager_is_told_once_for_each_make_until_a_rule_keeps_it_away(
    tmp_path: Path, ports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plug(monkeypatch, Adapter(ports[0], *CH340, "1-1"), Adapter(ports[1], *CH340, "1-2"))
    monkeypatch.setattr(check_serial, "_means_usb", lambda _pattern: True)
    settings = SerialSettings(ports=tuple(ports))
    assert [how for how, _, _ in look(tmp_path, settings)] == ["ok", "ok"]
    monkeypatch.setattr(check_serial, "running", {"ModemManager": 812}.get)
    (words,) = [words for how, _, words in look(tmp_path, settings) if how == "warn"]
    assert words.startswith(f"ModemManager runs, and may take {ports[1]}: ")
    assert 'ATTRS{idVendor}=="1a86"' in words
    monkeypatch.setattr(check_serial, "is_spared_by_modem_manager", lambda _port: True)
    assert [how for how, _, _ in look(tmp_path, settings)] == ["ok", "ok"]


@pytest.mark.parametrize("pattern", ["all", "/dev/ttyUSB7", "/dev/ttyACM*", "/dev/serial/by-id/x"])
def test_programs_that_take_usb_adapters_are_told_before_one_is_plugged_in(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_serial, "running", {"ModemManager": 812}.get)
    monkeypatch.setattr(check_serial, "brltty_words", lambda: "brltty is on this box")

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
    assert any("look alike, and /dev/serial/by-id shows one" in words for _, _, words in look(tmp_path, settings))
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
    monkeypatch.setattr(check_serial, "_LINKS", (str(by_id), str(by_path)))
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
    # What is named by where it is plugged in stays.
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
