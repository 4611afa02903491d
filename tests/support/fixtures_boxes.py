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
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    directory = tmp_path_factory.mktemp("packages")
    (old,) = build(directory, "amd64_deb12", version=OLD)
    (new,) = build(directory, "amd64_deb12", version=NEW)
    return Packages(old, new)
