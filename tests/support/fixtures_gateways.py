"""Fixtures that set up a gateway under test."""

import pytest

from tests.support.gateways import free_port


@pytest.fixture
def port() -> int:
    """A TCP port of this box that nobody listens on."""
    return free_port()
