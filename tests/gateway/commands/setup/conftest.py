"""Fixtures of the tests of `sluice setup`."""

from pathlib import Path

import pytest


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The settings' file, which is not there yet."""
    return tmp_path / "gateway.toml"
