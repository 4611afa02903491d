"""Wheel and sdist, as `make dist` makes them: each side is installed from them into an environment that has nothing."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from systemd import build_pins
from systemd.deb_python import ROOT
from tests.support.plain_warehouse import PlainWarehouse, row
from tests.support.waiting import patience

pytestmark = pytest.mark.timeout(1_800)

OF_THE_WHEEL = {"gateway": "gateway", "spark": "spark", "firmware-sim/sluice_sim": "sluice_sim"}
"""Folders of the wheel, by those of this project."""
OF_NO_JAVA = {"pyspark", "delta-spark", "py4j"}
OF_THE_CLOUD = OF_NO_JAVA | {"pyarrow", "numpy", "duckdb", "deltalake", "starlette", "uvicorn"}


@dataclass(frozen=True, slots=True)
class Packages:
    wheel: Path
    sdist: Path


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that had nothing but pip."""

    folder: Path

    def install(self, package: Path, extras: str = "") -> set[str]:
        """Install a package with all that it needs, at this project's pins. Returns the names of all that is there."""
        subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
        # Without their hashes: pip would ask for one of the package itself.
        pins = re.findall(r"(?m)^\w[^\\\n]+", (ROOT / "constraints.txt").read_text())
        (self.folder / "pins.txt").write_text("\n".join(pins))
        quietly = ("--quiet", "--disable-pip-version-check", "--root-user-action", "ignore")
        self.run("pip", "install", *quietly, "--constraint", str(self.folder / "pins.txt"), f"{package}{extras}")
        self.run("pip", "check", "--disable-pip-version-check")
        listed = json.loads(self.run("pip", "list", "--format", "json", "--disable-pip-version-check"))
        return {build_pins.canonical(each["name"]) for each in listed}

    def call(self, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one of its programs, from a folder that is not the project's."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=patience(600),
        )

    def run(self, program: str, *arguments: str, **variables: str) -> str:
        """Run a program that must succeed, and return its output."""
        ended = self.call(program, *arguments, **variables)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


@pytest.fixture(scope="module")
def packages() -> Packages:
    # It lists what twine finds wrong, and then fails.
    made = subprocess.run(["make", "dist"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,), (sdist,) = ((ROOT / "build" / "dist").glob(each) for each in ("*.whl", "*.tar.gz"))
    return Packages(wheel, sdist)


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = PlainWarehouse(tmp_path_factory.mktemp("tables") / "warehouse")
    made.take(row(0, 0.0), row(1, 0.1))
    return str(made.path)


def files(*folders: str) -> set[str]:
    """The project's files, as git knows them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


@pytest.mark.long(seconds=30)
def test_they_hold_every_file_of_the_project_and_no_other(packages: Packages) -> None:
    wanted = {
        f"{place}/{name.removeprefix(f'{folder}/')}" for folder, place in OF_THE_WHEEL.items() for name in files(folder)
    }
    with zipfile.ZipFile(packages.wheel) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted
    with tarfile.open(packages.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names == files() | {"PKG-INFO"}


@pytest.mark.long(seconds=80)
def test_a_gateway_alone_comes_from_the_wheel_without_the_clouds_packages(
    packages: Packages, warehouse: str, tmp_path: Path
) -> None:
    gateway = Environment(tmp_path / "gateway")
    names = gateway.install(packages.wheel)
    assert {"sluice", *map(build_pins.canonical, build_pins.needs())} <= names
    assert not names & OF_THE_CLOUD
    assert gateway.run("sluice", "--version") == "sluice 0.1.0\n"
    # Files that are not Python come along: the page, and what the simulator needs.
    program = (
        "from importlib.resources import files; print(len(files('gateway.page').joinpath('index.html').read_text()))"
    )
    assert int(gateway.run("python", "-c", program)) > 1_000
    assert "fleet" in gateway.run("sluice-sim", "--help")
    told = gateway.call("sluice-cloud", "readings", "--warehouse", warehouse)
    assert told.returncode == 3
    assert "is missing: run `pip install" in told.stderr


@pytest.mark.long(seconds=80)
def test_an_analyst_asks_without_java_after_an_install_from_the_sdist(
    packages: Packages, warehouse: str, tmp_path: Path
) -> None:
    desk = Environment(tmp_path / "desk")
    names = desk.install(packages.sdist, "[desk]")
    assert {"duckdb", "deltalake", "starlette"} <= names
    assert not names & {*OF_NO_JAVA, "pyarrow", "numpy"}
    asked = desk.run("sluice-cloud", "readings", "--warehouse", warehouse, "--json", JAVA_HOME="/no/such/java")
    assert {float(json.loads(line)["value"]) for line in asked.splitlines()} == {0.0, 1.0}


@pytest.mark.spark
@pytest.mark.long(seconds=95)
def test_the_job_starts_spark_after_an_install_from_the_wheel(packages: Packages, tmp_path: Path) -> None:
    cloud = Environment(tmp_path / "cloud")
    assert {*OF_NO_JAVA, "pyarrow", "numpy"} <= cloud.install(packages.wheel, "[spark]")
    program = "from spark.engine.session import open_session; print(open_session('installed').range(7).count())"
    assert cloud.run("python", "-c", program, SLUICE_SPARK_JARS=str(ROOT / "build" / "jars" / "spark")) == "7\n"
    without = cloud.call("python", "-c", program, SLUICE_SPARK_JARS=str(tmp_path))
    assert "lacks the jars" in without.stderr
    # By it the jars are fetched.
    pom = "from importlib.resources import files; print(files('spark').joinpath('pom.xml').read_text())"
    assert "delta-spark" in cloud.run("python", "-c", pom)
