"""The first commands on systems right after their installation: `make demo`, and the fast tests."""

import json
import re
from pathlib import Path

import pytest

from tests.support.box import entered_or_skip
from tests.support.fresh_system import FreshSystem, fresh_system

SECONDS_MAX = 3_000
"""For each of the two. On two idle cores the demo takes four minutes, half of them for what it installs."""

pytestmark = [pytest.mark.box, pytest.mark.long(seconds=1200), pytest.mark.timeout(2 * SECONDS_MAX + 600)]


@pytest.mark.parametrize(
    ("release", "python", "java"), [(12, "Python 3.11", "17"), (13, "Python 3.13", "21")], ids=["debian12", "debian13"]
)
def test_the_demo_and_the_fast_tests_run_with_the_systems_own_python_and_java(
    release: int, python: str, java: str, tmp_path: Path
) -> None:
    with entered_or_skip(fresh_system(tmp_path, release)) as system:
        said = system.run("make", "demo", seconds_max=SECONDS_MAX)
        assert said.startswith("refreshing the list of packages (apt-get update)\ninstalling packages: python3 "), said
        assert "that failed" not in said
        assert "missing 0, duplicates 0" in said
        summary = json.loads((system.clone / "build" / "demo" / "summary.json").read_text())
        assert summary["acknowledged"] > 10_000
        assert (summary["missing"], summary["duplicates"]) == (0, 0)
        assert system.run(".venv/bin/python", "--version").startswith(python)
        assert f' version "{java}.' in system.run("java", "-version")

        tested = system.run("make", "test-fast", seconds_max=SECONDS_MAX)
        passed = re.search(r"(\d+) passed", tested)
        assert passed is not None, tested[-2_000:]
        assert int(passed[1]) > 2_000, tested[-2_000:]


@pytest.mark.long(seconds=120)
def test_a_system_whose_python_is_too_old_is_told_so_before_anything_is_installed(tmp_path: Path) -> None:
    with entered_or_skip(fresh_system(tmp_path, 11)) as system:
        before = installed(system)
        code, said = system.call("make", "demo", seconds_max=300)
        assert code == 2, "as make ends where a recipe failed"
        assert "\nSluice needs Python 3.11 or later, and this system has Python 3.9." in said
        assert installed(system) == before


def installed(system: FreshSystem) -> list[str]:
    return sorted(system.run("dpkg-query", "--show").splitlines())
