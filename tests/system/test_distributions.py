"""The first commands on systems right after their installation: `make demo`, the fast tests, and `make deb`."""

import json
import re
import shutil
from pathlib import Path

import pytest

from systemd import build_deb, deb_signing
from systemd.deb_python import TARGETS
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


@pytest.mark.long(seconds=180)
def test_packages_are_built_without_java_and_compilers_to_the_same_bytes(tmp_path: Path) -> None:
    key = tmp_path / "release.key"
    deb_signing.make_key(key)
    release = build_deb.prepare("1.0.0", key)
    with entered_or_skip(fresh_system(tmp_path, 12)) as system:
        shutil.copy(key, system.clone / "release.key")
        said = system.run("make", "deb", "VERSION=1.0.0", "SIGNING_KEY=release.key", seconds_max=SECONDS_MAX)
        # The tree has git and openssl.
        assert re.search(r"(?m)^installing packages: python3 python3-venv$", said), said
        assert not [name for name in ("java", "mvn", "gcc") if system.call("which", name, seconds_max=60)[0] == 0]
        built = {path.name: path.read_bytes() for path in (system.clone / "build" / "deb").glob("*.deb")}
        assert len(built) == len(TARGETS)
        here = build_deb.build(TARGETS[0], release, tmp_path / "here")
        assert built[here.name] == here.read_bytes()


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
