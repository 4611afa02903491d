"""Fixtures of the buffer's tests."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The buffer's file, which is not there yet."""
    return tmp_path / "buffer.db"
