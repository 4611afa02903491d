"""The whole daemon against a power cut at any system call: what it told a sensor is on the card, or in Kafka."""

import os
from pathlib import Path

import pytest

from demo.kafka_broker import OwnBroker
from tests.support.sizes import size
from tests.support.syscall_replay import Record, record, replay, strace_refusal

MOMENTS = int(os.environ.get("SLUICE_REPLAY_MOMENTS", "150"))
REFUSAL = strace_refusal()
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=REFUSAL or "")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return record(tmp_path_factory.mktemp("recorded"), 2.0)


def test_every_acknowledged_reading_is_on_the_card_at_every_moment(recorded: Record) -> None:
    outcome = replay(recorded, MOMENTS, 4)
    assert (outcome.missing, outcome.duplicates, outcome.corrupt) == (0, 0, 0), outcome
    assert outcome.acknowledged == sum(len(sensor.acknowledged) for sensor in recorded.sensors) > 300
    assert outcome.syncs > 30
    assert outcome.kafka_alone == 0


def test_the_replay_finds_a_daemon_that_does_not_sync(recorded: Record) -> None:
    outcome = replay(recorded, 20, 5, heed_syncs=False)
    assert outcome.missing > 0


@pytest.mark.kafka
@pytest.mark.campaign(seconds=200)
def test_every_acknowledged_reading_is_on_the_card_or_in_kafka_at_every_moment(
    own_kafka: OwnBroker, tmp_path: Path
) -> None:
    """After a start, all of it is in Kafka."""
    recorded = record(tmp_path, size(6.0, 20.0), own_kafka)
    outcome = replay(recorded, size(60, 2_000), 6, broker=own_kafka, starts=size(1, 12))
    assert (outcome.missing, outcome.duplicates, outcome.corrupt, outcome.unsent) == (0, 0, 0, 0), outcome
    assert outcome.acknowledged == sum(len(sensor.acknowledged) for sensor in recorded.sensors) > 300
    assert outcome.kafka_alone > 300
