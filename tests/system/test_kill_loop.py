"""`kill -9` under load: nothing that was acknowledged is missing, and what can be told apart is stored once."""

import sys
from pathlib import Path

import pytest

from demo.kafka_broker import Broker
from tests.support.kill_loop import KINDS, kill_loop
from tests.support.sizes import size

HASTY = """
import asyncio
from gateway import cli
from gateway.intake import front_door as intake
take = intake.FrontDoor.take
def hasty(self, readings, done, marks=()):
    done(True)
    asyncio.get_running_loop().call_later(0.05, take, self, readings, lambda stored: None, marks)
intake.FrontDoor.take = hasty
cli.main()
"""
FORGETFUL = """
import asyncio
from gateway import cli
from gateway.intake import front_door as intake
from gateway.buffer.sensor_runs import DeviceRuns
from gateway.buffer.duplicate_window import Verdict
DeviceRuns.admit = lambda self, series, boot, sequence, payload, lane, received_us: Verdict.NEW
take = intake.FrontDoor.take
def forgetful(self, readings, done, marks=()):
    # So late that a kill mostly finds readings that are stored and not acknowledged.
    loop = asyncio.get_running_loop()
    take(self, readings, lambda stored: loop.call_later(0.1, done, stored))
intake.FrontDoor.take = forgetful
cli.main()
"""


@pytest.mark.campaign(seconds=80)
def test_nothing_acknowledged_is_missing_after_kills(tmp_path: Path) -> None:
    outcome = kill_loop(size(4, 24), tmp_path, 1.2, None, 4)
    assert outcome.missing == dict.fromkeys(KINDS, 0)
    assert outcome.duplicates["qos1-sequence"] == 0
    assert outcome.duplicates["qos2"] == 0
    assert all(count > size(100, 1_000) for count in outcome.acknowledged.values()), outcome


@pytest.mark.kafka
@pytest.mark.campaign(seconds=280)
def test_nothing_acknowledged_is_missing_in_kafka_after_kills(kafka: Broker, tmp_path: Path) -> None:
    """Kafka has readings first, and is slow at half of the kills.

    A reading that only Kafka had may be sent again, and stands there twice, with the same boot and sequence.
    """
    outcome = kill_loop(size(6, 60), tmp_path, 4.0, kafka, 5)
    assert outcome.missing == dict.fromkeys(KINDS, 0)
    assert outcome.duplicates["qos2"] == 0
    assert outcome.direct >= size(1, 20), outcome


def test_the_loop_finds_a_gateway_that_acknowledges_before_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.kill_loop.COMMAND", (sys.executable, "-c", HASTY, "run"))
    outcome = kill_loop(3, tmp_path, 1.0, None, 6)
    assert sum(outcome.missing.values()) > 0


def test_the_loop_finds_a_gateway_that_forgets_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.kill_loop.COMMAND", (sys.executable, "-c", FORGETFUL, "run"))
    # By this seed no kill comes before the sensors are let in.
    outcome = kill_loop(8, tmp_path, 0.8, None, 153)
    assert outcome.duplicates["qos1-sequence"] > 0
    assert outcome.duplicates["qos2"] > 0
    assert outcome.missing == dict.fromkeys(KINDS, 0)
