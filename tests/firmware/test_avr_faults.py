"""Faults of simulated boards: the schedule from a seed, and commands with their mistakes in words."""

import fcntl
import importlib.metadata
import itertools
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.config import config_file
from sluice_sim.avr import LOCK
from sluice_sim.avr_board import PROJECT
from sluice_sim.avr_faults import COMMANDS, Build, Fault, FaultRate, parse_fault_rate, schedule
from sluice_sim.cli import main

BUILDS: tuple[Build, ...] = ("serial", "mqtt")
ENDS = {"unplug": "plug", "noise": "noise", "baud": "baud", "wifi": "wifi", "ppm": "ppm", "auto-reset": "auto-reset"}


def first(count: int, build: Build = "serial", seed: str = "7", devices: tuple[str, ...] = ("s1", "s2")) -> list[Fault]:
    return list(itertools.islice(schedule(FaultRate(seed), devices, build, noise=0.001, ppm=50), count))


def name(fault: Fault) -> str:
    return fault.command.split()[0]


# --- Schedule


@pytest.mark.parametrize("build", BUILDS)
def test_one_seed_gives_one_schedule_and_another_seed_another_one(build: Build) -> None:
    assert first(500, build) == first(500, build)
    assert first(500, build) != first(500, build, seed="8")
    assert first(500, build) == sorted(first(500, build))


def test_a_boards_faults_do_not_depend_on_the_other_boards() -> None:
    together = [fault for fault in first(500) if fault.device == "s1"]
    assert together == first(len(together), devices=("s1",))


@pytest.mark.parametrize("build", BUILDS)
def test_every_kind_comes_with_words_that_the_build_knows(build: Build) -> None:
    seen = {name(fault) for fault in first(2000, build)}
    assert all(build in COMMANDS[kind].builds for kind in seen)
    not_scheduled = {"inhibit"} if build == "serial" else {"inhibit", "noise", "overrun", "baud"}
    assert seen == {kind for kind, command in COMMANDS.items() if build in command.builds} - not_scheduled


@pytest.mark.parametrize("build", BUILDS)
def test_what_begins_ends_before_the_boards_next_fault(build: Build) -> None:
    faults = iter(first(2001, build, devices=("s1",))[:-1])
    for fault in faults:
        assert not fault.is_end
        if name(fault) in ENDS:
            end = next(faults, None)
            assert end is None or (name(end), end.is_end) == (ENDS[name(fault)], True)
            assert end is None or name(end) != "noise" or end.command == "noise 0.001"
            assert end is None or name(end) != "ppm" or end.command == "ppm 50"


def test_the_rate_is_that_of_beginnings_in_quiet_time() -> None:
    rate = FaultRate("7", 60.0)
    faults = list(itertools.islice(schedule(rate, ("s1",), "mqtt"), 4000))
    quiet_s = sum(
        later.at_s - earlier.at_s
        for earlier, later in itertools.pairwise(faults)
        if earlier.command != "wifi off" and not (name(earlier) == "ppm" and earlier.command != "ppm 0")
    )
    beginnings = sum(fault.command not in {"wifi on", "ppm 0"} for fault in faults)
    assert 0.9 < beginnings / quiet_s < 1.1


@pytest.mark.parametrize(("text", "rate"), [("abc", FaultRate("abc")), ("1:0.5", FaultRate("1", 0.5))])
def test_a_seed_and_its_rate(text: str, rate: FaultRate) -> None:
    assert parse_fault_rate(text) == rate
    assert parse_fault_rate(str(rate)) == rate, "as the summary at the end has it"


@pytest.mark.parametrize("text", ["", ":3", "1:", "1:0", "1:-1", "1:x", "1:nan", "1:601"])
def test_what_is_no_schedule_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match="SEED:PER_MINUTE"):
        parse_fault_rate(text)


# --- Commands


def test_the_runner_has_the_same_commands_with_the_same_arguments() -> None:
    source = (PROJECT / "firmware-sim" / "runner" / "control.c").read_text()
    known = re.findall(r'^\t\{"([a-z-]+)", "(.*)", (EVERY_BOARD|WITH_PORT|WITH_MODEM)', source, re.MULTILINE)
    where = {("serial", "mqtt"): "EVERY_BOARD", ("serial",): "WITH_PORT", ("mqtt",): "WITH_MODEM"}
    assert known == [(kind, command.arguments, where[command.builds]) for kind, command in COMMANDS.items()]


def fault(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["fault", *words])
    return result.exit_code, result.output


def test_a_fault_that_is_none_names_those_there_are(tmp_path: Path) -> None:
    code, said = fault(str(tmp_path / "s1"), "explode")
    assert code == 1
    assert "no fault 'explode'" in said
    assert all(kind in said for kind in COMMANDS)


def test_a_board_that_is_not_there_is_explained(tmp_path: Path) -> None:
    code, said = fault(str(tmp_path / "s1"), "reset")
    assert code == 1
    assert f"sluice-sim avr --dir {tmp_path}" in said


def test_a_port_taken_for_its_board_is_explained(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s2.control")
    for port in ("tty-s2", "tty-s2@3"):
        code, said = fault(str(tmp_path / port), "reset")
        assert code == 1
        assert f"{tmp_path / port} is a port; its board is {tmp_path / 's2'}" in said


def test_a_folder_a_file_or_another_name_taken_for_a_board_names_the_boards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for board in ("s10", "s2", "s1"):
        os.mkfifo(tmp_path / f"{board}.control")
    (tmp_path / "none").mkdir()
    monkeypatch.chdir(tmp_path)
    names = "Name one of the boards there, as"
    assert fault(str(tmp_path), "reset") == (
        1,
        f"Error: {tmp_path} is a folder. {names} {tmp_path / 's1'}: s1 s2 s10\n",
    )
    assert fault(".", "reset") == (1, f"Error: . is a folder. {names} s1: s1 s2 s10\n")
    assert fault("s9", "reset") == (
        1,
        f"Error: no board runs as s9: there is no s9.control. {names} s1: s1 s2 s10\n",
    )
    assert fault("s2.control", "reset") == (1, "Error: s2.control is a file; its board is s2\n")
    assert fault("s2.ledger", "reset") == (1, "Error: s2.ledger is a file; its board is s2\n")
    assert fault("none", "reset") == (
        1,
        "Error: none is a folder. Start boards there with `sluice-sim avr --dir none`\n",
    )


@pytest.mark.parametrize("words", [("noise", "½"), ("noise", '"'), ("noise", "\\"), ("noise", "1" * 300)])
def test_what_no_board_could_understand_is_not_sent(tmp_path: Path, words: tuple[str, ...]) -> None:
    code, said = fault(str(tmp_path / "s1"), *words)
    assert code == 1
    assert "is no fault: it is noise SHARE (0 to 1)" in said


def test_a_board_that_was_killed_is_explained(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s1.control")
    code, said = fault(str(tmp_path / "s1"), "reset")
    assert code == 1
    assert "was killed" in said


def test_help_says_what_each_fault_does() -> None:
    code, said = fault("--help")
    assert code == 0
    assert all(kind in said for kind in COMMANDS)
    assert "noise SHARE (0 to 1)" in said


def test_the_version_is_that_of_the_whole_project() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"sluice-sim {importlib.metadata.version('sluice')}\n")


def test_the_gateway_of_the_page_about_boards_is_one(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "firmware.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "gateway.toml"
    path.write_text(example)
    settings = config_file.load(path)
    assert settings.serial is not None
    (ports,) = settings.serial.ports
    assert ports.startswith("/")
    assert ports.endswith("boards/tty-*")
    assert settings.mqtt_listener is not None
    assert settings.mqtt_listener.anonymous


def test_the_list_of_commands_says_each_in_a_whole_sentence() -> None:
    said = CliRunner().invoke(main, ["--help"]).output
    listed = said.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == ["avr", "fault", "fleet"]
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--broker", "127.0.0.1:1883"), "--broker is for boards of the mqtt build"),
        (("--user-secret", "x"), "--user-secret is for boards of the mqtt build"),
        (("--build", "mqtt", "--auto-reset"), "--auto-reset is for boards of the serial build"),
        (("--broker", "nowhere"), "HOST:PORT"),
        (("--broker", "host:0"), "HOST:PORT"),
        (("--faults", "1:fast"), "SEED:PER_MINUTE"),
        (("--clock-start", "4294967296"), "4294967295"),
        (("--noise", "2"), "--noise"),
    ],
)
def test_wrong_options_are_refused_in_words(tmp_path: Path, option: tuple[str, str], words: str) -> None:
    result = CliRunner().invoke(main, ["avr", "--dir", str(tmp_path), *option])
    assert result.exit_code == 2
    assert words in result.output


def test_outside_a_clone_there_is_nothing_to_build_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_sim.avr.PROJECT", tmp_path)
    result = CliRunner().invoke(main, ["avr", "--dir", str(tmp_path / "boards")])
    assert result.exit_code == 1
    assert (
        f"the firmware's sources are not at {tmp_path / 'firmware-sim'}: run sluice-sim from a clone" in result.output
    )


def test_a_folder_takes_one_command_at_a_time(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        result = CliRunner().invoke(main, ["avr", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert f"{tmp_path}: another sluice-sim avr (process 4711) runs boards here; stop it" in result.output
    assert "--dir" in result.output
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
