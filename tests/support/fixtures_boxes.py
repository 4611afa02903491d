"""The packages that boxes install, built once in each process that tests."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.box import build

OLD, NEW = "1.0.0", "1.1.0"


@dataclass(frozen=True, slots=True)
class Packages:
    """Two versions for Debian 12, with their signatures beside them."""

    old: Path
    new: Path


@pytest.fixture(scope="session")
def old_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Alone, for whoever installs no other."""
    return _build(tmp_path_factory, OLD)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory, old_package: Path) -> Packages:
    return Packages(old_package, _build(tmp_path_factory, NEW))


def _build(factory: pytest.TempPathFactory, version: str) -> Path:
    # `test_package` judges how small a package is: these are made quickly.
    (made,) = build(factory.mktemp("packages"), "amd64_deb12", version=version, xz_level=0)
    return made
