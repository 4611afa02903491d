"""Users of the shared broker come and go."""

import socket
from pathlib import Path

import pytest

from demo.kafka_broker import HOST, Broker
from tests.support.shared_broker import shared_broker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.kafka


def is_up(broker: Broker) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, broker.port)) == 0


@pytest.mark.long(seconds=5)
def test_all_users_have_one_broker_which_ends_after_the_last(tmp_path: Path) -> None:
    with shared_broker(tmp_path / "kafka") as first:
        with shared_broker(tmp_path / "kafka") as other:
            assert other == first
        assert is_up(first)
    wait_until(lambda: not is_up(first), words="the end of the broker")
    with shared_broker(tmp_path / "kafka") as next_one:
        assert is_up(next_one)
