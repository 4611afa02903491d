"""A site's own topics, as `docs/kafka.md` has them: its Kafka user can write in no other site's."""

import asyncio
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import TopicAuthorizationFailedError

from gateway.commands.check.kafka import COMMANDS_UNREAD, check_kafka
from gateway.settings import CommandSettings, GatewaySettings, KafkaSaslSettings, KafkaSettings, Settings
from tests.support import kafka_admin
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.uplink_site import Site, records_until
from tests.support.waiting import patience

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed"),
]

PAGE = Path(__file__).parents[2] / "docs" / "kafka.md"
MECHANISM: Final = "SCRAM-SHA-512"
PASSWORD = "right-9d2c1b77"  # noqa: S105 - lives for the length of a test


def documented_acls(user: str) -> Iterator[tuple[str, bool, list[kafka_admin.Operation]]]:
    """Rights that the page's commands give to a site's user: topic, whether that is a prefix, operations."""
    section = PAGE.read_text().partition("### A site's own topics\n")[2].partition("\n## ")[0].replace("\\\n", " ")
    for command in re.findall(r"kafka-acls\.sh .+", section):
        words = shlex.split(command)
        options = [(name, value) for name, value in pairwise(words) if name.startswith("--")]
        assert ("--allow-principal", "User:site7") in options
        operations = [
            re.sub("(?<=[a-z])(?=[A-Z])", "_", value).upper() for name, value in options if name == "--operation"
        ]
        prefixed = ("--resource-pattern-type", "prefixed") in options
        for name, topic in options:
            if name == "--topic":
                yield topic.replace("site7", user), prefixed, cast("list[kafka_admin.Operation]", operations)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node on which two sites have a prefix each."""
    listener = Listener("LOGIN", "SASL_PLAINTEXT", mechanisms=(MECHANISM,))

    async def prepare(bootstrap: str) -> None:
        for user in ("site7", "site8"):
            await kafka_admin.set_password(bootstrap, user, MECHANISM, PASSWORD)
            for topic, prefixed, operations in documented_acls(user):
                await kafka_admin.allow(bootstrap, user, topic, *operations, prefixed=prefixed)
        # As Kafka is installed: what no ACL allows is refused. Here topics without any are open.
        await kafka_admin.allow(bootstrap, "operator", "gateway-events", "WRITE")

    with kafka_cluster(tmp_path_factory.mktemp("sites") / "nodes", 1, [listener]) as made:
        asyncio.run(prepare(made.bootstrap))
        yield made


def site_of(cluster: Cluster, folder: Path, user: str) -> Site:
    """A gateway that logs in as a site's user, and writes under its prefix."""
    password = folder / "kafka.password"
    password.write_text(PASSWORD + "\n")
    password.chmod(0o400)
    sasl = f'[kafka.sasl]\nmechanism = "{MECHANISM}"\nuser = "{user}"\npassword_file = "{password}"\n'
    return Site(folder, f"{user}.main", cluster.addresses("LOGIN"), look=cluster.bootstrap, kafka=sasl)


async def test_a_sites_gateway_makes_its_topics_and_its_user_writes_in_no_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    site = site_of(cluster, tmp_path, "site7")
    with site.daemon():
        await asyncio.to_thread(site.publish, "device/42/thermo", json.dumps({"celsius": 21.5}))
        (record,) = await records_until(site.plain, "site7.main-thermo", 1, patience(30))
        assert record.key == b"42"
        assert await records_until(site.plain, "site7.main-events", 1, patience(30)), "heartbeats"

    for topic in ("site8.device-thermo", "site8.gateway-events", "gateway-events"):
        await kafka_admin.create_topic(cluster.bootstrap, topic)
    login = {"sasl_mechanism": MECHANISM, "sasl_plain_username": "site7", "sasl_plain_password": PASSWORD}
    async with AIOKafkaProducer(
        bootstrap_servers=cluster.addresses("LOGIN"), security_protocol="SASL_PLAINTEXT", acks="all", **login
    ) as producer:
        await producer.send_and_wait("site7.main-thermo", b"its own", partition=0)
        # Readings, heartbeats and corrections of another site; and those of gateways that share topics.
        for topic in ("site8.device-thermo", "site8.gateway-events", "gateway-events"):
            with pytest.raises(TopicAuthorizationFailedError):
                await producer.send_and_wait(topic, b"forged", partition=0)


async def test_check_says_whether_commands_can_be_read(cluster: Cluster, tmp_path: Path) -> None:
    """`docs/commands-to-devices.md` names the rights. To see the topic is not enough."""
    topic = "gateway-commands.gw1"
    password = tmp_path / "kafka.password"
    password.write_text(PASSWORD + "\n")
    password.chmod(0o400)
    sasl = KafkaSaslSettings(MECHANISM, "site7", password)
    kafka = KafkaSettings(tuple(cluster.addresses("LOGIN")), create_topics=False, sasl=sasl)
    settings = Settings(GatewaySettings("gw1"), kafka, commands=CommandSettings(("*",)))

    async def found() -> tuple[str, str]:
        (finding,) = [each for each in await check_kafka(settings, create=False) if each.subject == f"topic {topic}"]
        return finding.code, finding.words

    code, words = await found()
    assert (code, f"there is no topic {topic}" in words) == (COMMANDS_UNREAD, True)
    await kafka_admin.create_topic(cluster.bootstrap, topic)
    for operation in ("WRITE", "DESCRIBE"):
        # Whoever may write a topic may see it.
        await kafka_admin.allow(cluster.bootstrap, "site7", topic, operation)
        code, words = await found()
        assert (code, f"may not read {topic}; kafka-acls.sh" in words) == (COMMANDS_UNREAD, True), operation
    await kafka_admin.allow(cluster.bootstrap, "site7", topic, "READ")
    code, words = await found()
    assert (code, "commands are read from it" in words) == ("ok", True)
