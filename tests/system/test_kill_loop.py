"""`kill -9` under load: nothing that was acknowledged is missing, and what can be told apart is stored once."""

import asyncio
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from demo.kafka_broker import OwnBroker
from tests.support.kafka_admin import allow, create_topic, create_topic_on, set_password
from tests.support.kafka_cluster import Listener, kafka_cluster
from tests.support.kill_loop import (
    KINDS,
    Door,
    Trouble,
    forbidden,
    kill_loop,
    paused,
    set_otherwise,
    slowed,
    stalling,
    with_events,
)
from tests.support.netns import BROKERS_NET, network_or_skip
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
def test_nothing_acknowledged_is_missing_in_kafka_after_kills(own_kafka: OwnBroker, tmp_path: Path) -> None:
    """Kafka has readings first, and is slow at half of the kills.

    A reading that only Kafka had may be sent again, and stands there twice, with the same boot and sequence.
    """
    outcome = kill_loop(size(6, 60), tmp_path, 4.0, own_kafka.bootstrap, 5, partial(stalling, own_kafka))
    assert outcome.missing == dict.fromkeys(KINDS, 0)
    assert outcome.duplicates["qos2"] == 0
    assert outcome.direct >= size(1, 20), outcome


@pytest.mark.kafka
@pytest.mark.long(seconds=90)
@pytest.mark.parametrize("trouble", ["flapping", "too small"])
def test_nothing_acknowledged_is_missing_whatever_is_wrong_with_kafka(
    own_kafka: OwnBroker, tmp_path: Path, trouble: str
) -> None:
    """A broker that stands still all the time; a topic that refuses readings, which then wait in the quarantine."""
    seed = 7 + len(trouble)
    troubles: dict[str, Trouble] = {
        "flapping": partial(stalling, own_kafka, stall_s=0.05),
        "too small": partial(
            set_otherwise, own_kafka.bootstrap, f"kill{seed}-qos1-sequence", max_message_bytes=("100", "1048588")
        ),
    }
    outcome = kill_loop(16, tmp_path, 5.0, own_kafka.bootstrap, seed, troubles[trouble])
    assert outcome.missing == dict.fromkeys(KINDS, 0)
    assert outcome.duplicates["qos2"] == 0
    assert outcome.direct >= 3, outcome


@pytest.mark.kafka
@pytest.mark.long(seconds=60)
def test_nothing_acknowledged_is_missing_although_the_path_to_kafka_is_slow(tmp_path: Path) -> None:
    with network_or_skip(tmp_path) as network:
        listener = Listener("GATEWAY", host=f"{BROKERS_NET}.10", bind="0.0.0.0")  # noqa: S104 - a namespace of its own
        with kafka_cluster(tmp_path / "kafka", 1, [listener], command_prefix=network.brokers.prefix) as cluster:
            (address,) = cluster.addresses("GATEWAY")
            trouble = partial(slowed, network, 256)
            outcome = network.gateway.inside(lambda: kill_loop(10, tmp_path, 5.0, address, 13, trouble))
    assert outcome.missing == dict.fromkeys(KINDS, 0)
    assert outcome.duplicates["qos2"] == 0
    assert outcome.direct >= 3, outcome


@pytest.mark.kafka
@pytest.mark.long(seconds=150)
def test_nothing_acknowledged_is_missing_although_topics_lack_a_leader_or_a_replica(tmp_path: Path) -> None:
    with kafka_cluster(tmp_path / "kafka") as cluster:
        asyncio.run(create_topic_on(cluster.bootstrap, "kill9-qos1-sequence", [3], min_insync_replicas="1"))
        asyncio.run(create_topic_on(cluster.bootstrap, "kill9-qos1", [2, 3], min_insync_replicas="2"))
        lone = cluster.node(3).process
        assert lone is not None
        outcome = kill_loop(10, tmp_path, 16.0, cluster.addresses()[0], 9, partial(paused, lone))
    assert outcome.missing == dict.fromkeys(KINDS, 0)
    assert outcome.duplicates["qos2"] == 0
    assert outcome.direct >= 3, outcome


@pytest.mark.kafka
@pytest.mark.long(seconds=170)
def test_each_reading_has_its_event_although_events_lack_a_leader_for_a_while(tmp_path: Path) -> None:
    """Two kinds have their events on a node that stands still. The third kind has its last readings there."""
    with kafka_cluster(tmp_path / "kafka") as cluster:
        for topic in ("structured-kill13-qos1-sequence", "structured-kill13-qos2"):
            asyncio.run(create_topic_on(cluster.bootstrap, topic, [3], min_insync_replicas="1"))
        latest = {"min_insync_replicas": "1", "cleanup_policy": "compact"}
        asyncio.run(create_topic_on(cluster.bootstrap, "latest-kill13-qos1", [3], **latest))
        lone = cluster.node(3).process
        assert lone is not None
        door = Door(cluster.addresses()[0], 'envelope = "both"\n', 'latest_topic = "latest-{topic}"\n')
        outcome = kill_loop(10, tmp_path, 16.0, cluster.bootstrap, 13, partial(paused, lone), door)
        records, events = asyncio.run(with_events(cluster.bootstrap, "kill13"))
    assert outcome.missing == dict.fromkeys(KINDS, 0)
    assert outcome.duplicates["qos2"] == 0
    assert outcome.direct >= 3, outcome
    assert records == events


@pytest.mark.kafka
@pytest.mark.long(seconds=100)
def test_nothing_acknowledged_is_missing_although_a_topic_is_forbidden_for_a_while(tmp_path: Path) -> None:
    user, topic, mechanism = "ditch", "kill12-qos1-sequence", "SCRAM-SHA-512"
    password = tmp_path / "password"
    password.touch(0o600)
    password.write_text("secret")
    login = Listener("LOGIN", "SASL_PLAINTEXT", mechanisms=(mechanism,))
    with kafka_cluster(tmp_path / "kafka", 1, [login]) as cluster:
        asyncio.run(set_password(cluster.bootstrap, user, mechanism, password.read_text()))
        asyncio.run(create_topic(cluster.bootstrap, topic))
        asyncio.run(allow(cluster.bootstrap, user, topic, "WRITE", "DESCRIBE_CONFIGS"))
        (address,) = cluster.addresses("LOGIN")
        door = Door(
            address, f'[kafka.sasl]\nmechanism = "{mechanism}"\nuser = "{user}"\npassword_file = "{password}"\n'
        )
        trouble = partial(forbidden, cluster.bootstrap, user, topic)
        outcome = kill_loop(12, tmp_path, 5.0, cluster.bootstrap, 12, trouble, door)
    assert outcome.missing == dict.fromkeys(KINDS, 0)
    assert outcome.duplicates["qos2"] == 0
    assert outcome.direct >= 3, outcome
    # The gateway sees it at once, or hears it of what it sends.
    assert re.search(r"readings quarantined .*reason='?(topic|broker)-refused", (tmp_path / "gateway.log").read_text())


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
