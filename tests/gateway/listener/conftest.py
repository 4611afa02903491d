"""Fixtures of the listener's tests."""

import pytest

from tests.support.mqtt_peers import RecordingIntake


@pytest.fixture
def intake() -> RecordingIntake:
    """An intake that stores at once."""
    return RecordingIntake()
