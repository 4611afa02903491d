"""The session's one real Kafka broker, started when the first test asks for it."""

from collections.abc import Iterator

import pytest

from demo.kafka_broker import Broker, kafka_broker


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A started broker that makes no topics by itself: give yours names of their own."""
    with kafka_broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker
