"""The one real Kafka broker of a test run, started when the first test asks for it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.kafka_broker import Broker, OwnBroker, kafka_broker
from tests.support.shared_broker import shared_broker


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A started broker that makes no topics by itself: give yours names of their own, and do not hold it up."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Each process that tests beside others has a folder of its own in that of the run.
        folder = folder.parent
    with shared_broker(folder / "kafka") as broker:
        yield broker


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[OwnBroker]:
    """A broker for a test that holds it up, which others would notice."""
    with kafka_broker(tmp_path / "own-kafka") as broker:
        yield broker
