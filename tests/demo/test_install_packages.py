"""`make` looks for missing packages before it installs Debian's. `test_distributions.py` has it install some."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "demo" / "install_packages.sh"
INSTALLED = "base-files"
"""On every Debian."""
NOWHERE = "sluice-no-such-package"
A_JDK = f"openjdk-0-jdk|{INSTALLED}"
"""Asks for a JDK, as `make demo` does, and is there already."""

pytestmark = pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="this is no Debian, nor made from one")


def install(*packages: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Have it install packages, with a Python and a Java that it takes unless `environment` says otherwise."""
    given = {name: value for name, value in os.environ.items() if name not in {"PYTHON", "JAVA_HOME"}}
    given |= {"PYTHON": sys.executable, **environment}
    return subprocess.run(["sh", SCRIPT, *packages], capture_output=True, text=True, check=False, env=given)


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def java_home(tmp_path: Path, version_line: str) -> str:
    """A folder whose `java` says which version it is, as the real ones do: to standard error."""
    said = f"Picked up JAVA_TOOL_OPTIONS: -Dnone=1\n{version_line}\nOpenJDK Runtime Environment (build 1)"
    write_program(tmp_path / "bin" / "java", f"cat >&2 <<'END'\n{said}\nEND")
    return str(tmp_path)


@pytest.mark.parametrize("wanted", [INSTALLED, f"{INSTALLED}|{NOWHERE}", f"{NOWHERE}|{INSTALLED}"])
def test_one_of_two_packages_is_enough(wanted: str) -> None:
    done = install(wanted)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_old_python_is_told_before_anything_is_installed(tmp_path: Path) -> None:
    # Its two answers are those of Python 3.9: to the question after its version, and to the comparison.
    old = write_program(tmp_path / "python3", '[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1')
    done = install(NOWHERE, PYTHON=str(old))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Sluice needs Python 3.11 or later, and `{old}` is Python 3.9.2: "
        "use a newer system, or name a newer Python by make PYTHON=PATH\n"
    )


def test_a_named_python_that_is_not_there_is_told() -> None:
    done = install(NOWHERE, PYTHON="/no/such/python3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("There is no `/no/such/python3`: install it, or leave PYTHON out")


@pytest.mark.parametrize(
    ("version_line", "told"),
    [
        ('openjdk version "11.0.2" 2019-01-15', "Java 11.0.2"),
        ('java version "1.8.0_392"', "Java 1.8.0_392"),
        ('openjdk version "25.0.3" 2026-07-15', "Java 25.0.3"),
        ('openjdk version "170.0.1" 2099-07-15', "Java 170.0.1"),
        ("Error: could not find libjava.so", "Java of an unknown version"),
    ],
)
@pytest.mark.parametrize("named_by", ["JAVA_HOME", "PATH"])
def test_another_java_is_told_before_anything_is_installed(
    version_line: str, told: str, named_by: str, tmp_path: Path
) -> None:
    home = java_home(tmp_path, version_line)
    environment = {"PATH": f"{home}/bin:{os.environ['PATH']}"} if named_by == "PATH" else {"JAVA_HOME": home}
    done = install(NOWHERE, A_JDK, **environment)
    program = "java" if named_by == "PATH" else f"{home}/bin/java"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Sluice needs Java 17 or 21, and `{program}` is {told}: set JAVA_HOME to a JDK 17 or 21\n"


@pytest.mark.parametrize(
    "version_line",
    ['openjdk version "17.0.15" 2025-04-15', 'openjdk version "21" 2023-09-19', 'openjdk version "21.0.8" 2025-07-15'],
)
def test_java_17_and_21_are_taken(version_line: str, tmp_path: Path) -> None:
    done = install(A_JDK, JAVA_HOME=java_home(tmp_path, version_line))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_java_home_without_java_is_told() -> None:
    done = install(NOWHERE, A_JDK, JAVA_HOME="/no/such/java")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("There is no `/no/such/java/bin/java`: set JAVA_HOME to a JDK 17 or 21, or unset it")


def test_no_java_matters_to_what_needs_none(tmp_path: Path) -> None:
    for home in (java_home(tmp_path, 'openjdk version "11.0.2" 2019-01-15'), "/no/such/java"):
        done = install(INSTALLED, JAVA_HOME=home)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
