"""The image's own units: systemd understands them, and what they start is there."""

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.host import last_update
from image import card, root_tree
from systemd import build_deb

IMAGE = Path(card.__file__).parent
UNITS = IMAGE / "root" / build_deb.UNITS
OURS = sorted(path for path in UNITS.iterdir() if path.is_file())
FOLDER = "usr/lib/sluice-image"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's files and the package's units, with the programs that the package brings."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(IMAGE / "root", root, dirs_exist_ok=True)
    shutil.copy(IMAGE / "network_report.py", root / FOLDER / "network-report")
    for name, place in build_deb._PLACES.items():
        if place.startswith(build_deb.UNITS):
            shutil.copy(build_deb.HERE / name, root / place)
    for program in (*build_deb._PROGRAMS, "usr/bin/ssh-keygen", "usr/bin/rm"):
        (root / program).parent.mkdir(parents=True, exist_ok=True)
        (root / program).write_text("#!/bin/sh\n")
        (root / program).chmod(0o755)
    return root


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_systemd_understands_them(box: Path, path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no `systemd-analyze`: install Debian's package systemd")
    command = [
        "systemd-analyze",
        "verify",
        "--man=no",
        "--recursive-errors=no",
        f"--root={box}",
        f"/{build_deb.UNITS}/{path.name}",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_they_start_is_there_and_may_be_run(box: Path) -> None:
    for path in OURS:
        for line in re.findall(r"(?m)^ExecStart=(.+)$", path.read_text()):
            assert os.access(box / line.split()[0].lstrip("/"), os.X_OK), f"{path.name}: {line}"


OF_PACKAGE = "sluice-fleet.timer"
"""A unit of the package that needs switching on."""


def test_each_of_them_is_switched_on_or_started_by_a_timer_or_a_device() -> None:
    wanted = {path.name for path in OURS if "[Install]" in path.read_text()}
    assert {name if "." in name else f"{name}.service" for name in root_tree.UNITS_ON_OURS} == wanted | {OF_PACKAGE}
    rules = "".join(path.read_text() for path in (IMAGE / "root/usr/lib/udev/rules.d").iterdir())
    by_device = {f"{name}@.service" for name in re.findall(r'ENV\{SYSTEMD_WANTS\}\+="([\w-]+)@%k\.service"', rules)}
    for path in OURS:
        assert path.name in wanted | by_device or path.with_suffix(".timer").name in wanted, path.name


def test_neither_a_network_nor_a_right_file_is_waited_for(box: Path) -> None:
    """So a box without a network takes readings, and one whose answers have a mistake can be reached."""
    waits = re.compile(r"(?m)^(?:After|Wants|Requires|Requisite|BindsTo|PartOf|Upholds)=(.*)$")
    for path in (box / build_deb.UNITS).glob("sluice*"):
        if path.is_file():
            words = set(" ".join(waits.findall(path.read_text())).split())
            assert not words & {"network-online.target", "time-sync.target"}, path.name
    needs = re.compile(r"(?m)^(?:Wants|Requires|Requisite|BindsTo|PartOf|Upholds)=.*sluice-provision")
    for path in (box / "usr/lib/systemd").rglob("*.*"):
        assert not path.is_file() or not needs.search(path.read_text()), path


def test_what_is_told_of_a_stick_goes_with_the_stick() -> None:
    unit = UNITS / "sluice-stick@.service"
    assert f"ExecStop=/usr/bin/rm -f {last_update.REFUSED}\n" in unit.read_text()
    assert "BindsTo=dev-%i.device\n" in unit.read_text()


def test_the_judge_of_an_update_runs_at_each_start_of_a_box_that_was_updated() -> None:
    unit = configparser.ConfigParser(strict=False, delimiters="=")
    unit.optionxform = str  # type: ignore[assignment,method-assign] # names keep their case
    unit.read(UNITS / "sluice-trial.service")
    assert unit["Service"]["ExecStart"].lstrip("/") in build_deb._PROGRAMS
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_shell_scripts_are_shells() -> None:
    for path in (IMAGE / "init", IMAGE / "install_packages.sh", *(IMAGE / "root" / FOLDER).iterdir()):
        if path.read_bytes().startswith(b"#!"):
            subprocess.run(["sh", "-n", path], check=True)
            assert os.access(path, os.X_OK), path
