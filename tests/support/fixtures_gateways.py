"""What a gateway under test is set up with."""

import pytest

from tests.support.gateways import free_port


@pytest.fixture
def port() -> int:
    """A TCP port of this box that nobody listens on."""
    return free_port()
