"""`sluice-cloud command`: what it sends to a real Kafka, and what it tells of the end."""

import asyncio
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner, Result

from demo.kafka_broker import Broker
from gateway.command import DeviceCommand
from gateway.downlink.command_records import read_command
from spark.cli import FAILED, main
from spark.commands.cli_options import FINDING
from tests.support.gateways import consume, consume_until
from tests.support.kafka_admin import create_topic
from tests.support.plain_warehouse import PlainWarehouse, row

pytestmark = pytest.mark.kafka


class Site:
    """A gateway's two topics, and a gateway that ends each command as it is told."""

    def __init__(self, kafka: Broker) -> None:
        self.bootstrap = kafka.bootstrap
        unique = uuid.uuid4().hex[:8]
        self.gateway = f"gw-{unique}"
        self.commands = f"gateway-commands.{self.gateway}"
        self.events = f"events-{unique}"
        for topic in (self.commands, self.events):
            asyncio.run(create_topic(kafka.bootstrap, topic))

    def run(self, *words: str) -> Result:
        given = ["command", "42", *words, "--bootstrap", self.bootstrap, "--events-topic", self.events]
        return CliRunner().invoke(main, given, catch_exceptions=False)

    @contextmanager
    def ending(self, **end: Any) -> Iterator[None]:
        """The next command ends so; before it, other events come."""

        async def end_it() -> None:
            (record, *_) = await consume_until(self.bootstrap, 1, self.commands)
            found = read_command(record, "default")
            assert isinstance(found, DeviceCommand)
            kind = [("ce_type", b"sluice.gateway.command-ended")]
            async with AIOKafkaProducer(bootstrap_servers=self.bootstrap) as producer:
                await producer.send_and_wait(self.events, b"{", headers=[("ce_type", b"sluice.gateway.loss")])
                await producer.send_and_wait(self.events, b"{", headers=kind)
                for body in ({"id": "another", "outcome": "delivered"}, {"id": found.id, "device": "42", **end}):
                    await producer.send_and_wait(self.events, json.dumps(body).encode(), headers=kind)

        gateway = threading.Thread(target=lambda: asyncio.run(end_it()))
        gateway.start()
        try:
            yield
        finally:
            gateway.join()


@pytest.fixture
def site(kafka: Broker) -> Site:
    return Site(kafka)


def test_what_is_sent_is_read_by_the_gateway(site: Site) -> None:
    before = datetime.now(UTC).timestamp()
    told = site.run("on", "--gateway", site.gateway, "--topic", "set/{id}", "--id", "c-1", "--expires", "30min")
    assert (told.exit_code, told.stdout) == (0, f"command c-1 is sent to gateway {site.gateway}\n")
    (record,) = asyncio.run(consume(site.bootstrap, site.commands))
    found = read_command(record, "default")
    assert isinstance(found, DeviceCommand)
    assert (found.id, found.device, found.topic, found.payload) == ("c-1", "42", "set/c-1", b"on")
    assert 0 <= found.expires_us / 1e6 - before - 1_800 < 60


@pytest.mark.parametrize(
    ("end", "words", "code"),
    [
        ({"outcome": "delivered", "reason": None}, "the device has acknowledged it", 0),
        ({"outcome": "refused", "reason": "not-listed"}, "it was refused (not-listed)", FINDING),
        ({"outcome": "expired", "reason": None}, "it expired before the device acknowledged it", FINDING),
        ({"outcome": "unknown-device", "reason": None}, "the gateway does not know the device", FINDING),
    ],
)
def test_the_end_is_waited_for(end: dict[str, Any], words: str, code: int, site: Site) -> None:
    with site.ending(**end):
        told = site.run("on", "--gateway", site.gateway, "--wait", "--id", "c1")
    assert (told.exit_code, told.stdout) == (code, f"command c1: {words}\n")


def test_the_end_for_a_program(site: Site) -> None:
    with site.ending(outcome="delivered", reason=None, by="serial"):
        told = site.run("on", "--gateway", site.gateway, "--wait", "--json")
    said = json.loads(told.stdout)
    assert (said["gateway"], said["topic"]) == (site.gateway, site.commands)
    assert (said["end"]["outcome"], said["end"]["by"]) == ("delivered", "serial")


def test_a_gateway_that_says_nothing_is_waited_for_until_the_command_is_over(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark.source.command_sender.END_S_MAX", 1.0)
    told = site.run("on", "--gateway", site.gateway, "--wait", "--expires", "1s")
    assert told.exit_code == FINDING
    assert "has not said what became of it" in told.stdout


def test_the_tables_know_the_gateway(site: Site, tmp_path: Any) -> None:
    warehouse = PlainWarehouse(tmp_path / "warehouse")
    of_42 = {"namespace": "default", "gateway": site.gateway}
    refused = row(2, 0.2, **{**of_42, "gateway": "intruder", "reject_reason": "no gateway of this topic"})
    warehouse.take(row(0, 0, **{**of_42, "gateway": "old"}), row(1, 0.1, **of_42), refused)
    told = site.run("on", "--warehouse", str(warehouse.path))
    assert told.exit_code == 0, told.output
    assert len(asyncio.run(consume(site.bootstrap, site.commands))) == 1
    told = site.run("on", "--warehouse", str(warehouse.path), "--namespace", "elsewhere")
    assert told.exit_code == FAILED
    assert "the tables have no record of elsewhere/42" in told.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["on"], "give --gateway, or --warehouse"),
        (["on", "--gateway", "a/b"], "a name has"),
        (["on", "--gateway", "gw", "--id", "a/b"], "--id has"),
        (["on", "--gateway", "gw", "--topic", "a/#"], "--topic has"),
    ],
)
def test_wrong_usage_is_told(words: list[str], said: str, site: Site) -> None:
    told = site.run(*words)
    assert told.exit_code == 2
    assert said in told.stderr


def test_a_topic_that_is_not_there_is_not_made(site: Site) -> None:
    told = site.run("on", "--gateway", "nobody")
    assert told.exit_code == FAILED
    assert "Kafka has no topic gateway-commands.nobody" in told.stderr
    assert asyncio.run(consume(site.bootstrap, "gateway-commands.nobody")) == []
