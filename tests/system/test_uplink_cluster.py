"""The daemon and a cluster of three: leaders that move, nodes that go, topics that refuse. Nothing is lost."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiokafka import TopicPartition

from gateway.uplink.direct import SAFE_S
from gateway.uplink.state import ONE_REPLICA
from tests.support import kafka_admin
from tests.support.gateways import header
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.uplink_ledger import Delivery, in_kafka
from tests.support.uplink_site import BACK_S_MAX, Site, compare, fleet, grown, looking, records_of, records_until
from tests.support.waiting import patience

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed"),
]

USER, PASSWORD = "gateway-1", "not-to-be-seen-7f3a"
PARTITIONS = {0, 1, 2}
TOLD_S_MAX = 15.0
"""Most seconds that a cluster may be gone before `sluice status` says so."""
ASIDE_S_MAX = 10.0
REDRIVEN_S_MAX = 45.0
"""Most seconds from a topic's correction until its quarantined readings are in Kafka: topics are looked at every 15
s."""
LOGIN = Listener("LOGIN", "SASL_PLAINTEXT", mechanisms=("SCRAM-SHA-512",))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with kafka_cluster(tmp_path_factory.mktemp("cluster"), listeners=[LOGIN]) as cluster:
        yield cluster


@pytest.fixture
def cluster(nodes: Cluster) -> Cluster:
    """All three up, whatever the test before did."""
    nodes.start()
    return nodes


async def make_topics(site: Site, replicas: int = 3) -> None:
    """Make the topics that the site needs in any case, with three partitions each."""
    for topic in (site.topic(), site.topic("events"), site.topic("quarantine")):
        await kafka_admin.create_topic(site.plain, topic, len(PARTITIONS), replicas)


@asynccontextmanager
async def flowing(site: Site) -> AsyncIterator[None]:
    """Daemon and sensors, with readings in all partitions; at the end all that was acknowledged is in Kafka, in order.

    What is asserted: promises P1, P2, P3 and P8.
    """
    with site.daemon():
        async with fleet(site, interval_ms=200):
            await grown(site.plain, site.topic(), PARTITIONS)
            yield
        await site.drained()
    found = await compare(site)
    assert not found.faults, str(found)
    assert found.acknowledged > 100


# -- nodes ------------------------------------------------------------------------------------------


@pytest.mark.alone
async def test_leaders_that_move_are_followed_within_the_promised_time(cluster: Cluster, tmp_path: Path) -> None:
    site = Site(tmp_path, "moved", cluster.addresses())
    await make_topics(site)
    async with flowing(site):
        for partition, leader in (await kafka_admin.leaders_of(site.plain, site.topic())).items():
            await kafka_admin.move_leader(site.plain, site.topic(), partition, leader % 3 + 1)
        assert await grown(site.plain, site.topic(), PARTITIONS) <= BACK_S_MAX


@pytest.mark.long(seconds=48)
async def test_a_cluster_that_is_rolled_node_by_node(cluster: Cluster, tmp_path: Path) -> None:
    site = Site(tmp_path, "rolled", cluster.addresses())
    await make_topics(site)
    async with flowing(site):
        for node in cluster.nodes:
            node.stop()
            # Two of three are enough: readings need not wait until it is back.
            await grown(site.plain, site.topic(), PARTITIONS)
            node.start()
            await grown(site.plain, site.topic(), PARTITIONS)


async def test_a_node_that_is_gone_for_good(cluster: Cluster, tmp_path: Path) -> None:
    site = Site(tmp_path, "gone", cluster.addresses())
    await make_topics(site)
    async with flowing(site):
        cluster.node(1).kill()
        async with asyncio.timeout(patience(30)):
            while 1 in (await kafka_admin.leaders_of(site.plain, site.topic())).values():
                await asyncio.sleep(0.1)
        await grown(site.plain, site.topic(), PARTITIONS)


@pytest.mark.long(seconds=40)
async def test_all_nodes_go_and_come_back(cluster: Cluster, tmp_path: Path) -> None:
    site = Site(tmp_path, "outage", cluster.addresses())
    await make_topics(site)
    async with flowing(site):
        cluster.kill()
        deadline = time.monotonic() + patience(TOLD_S_MAX)
        while (told := await site.uplink())["up"]:
            assert time.monotonic() < deadline, f"nobody is there, and after {TOLD_S_MAX:.0f} s status says {told}"
            await asyncio.sleep(0.5)
        assert "nothing listens at 127.0.0.1" in (await site.status())["daemon"]["uplink"]["error"]
        cluster.start()
        await grown(site.plain, site.topic(), PARTITIONS)


@pytest.mark.long(seconds=35)
async def test_a_cluster_that_is_replaced_by_an_empty_one_of_the_same_name(cluster: Cluster, tmp_path: Path) -> None:
    """Its topics are made anew, and what the former cluster had not acknowledged goes to the new one."""
    site = Site(tmp_path, "replaced", cluster.addresses())
    with site.daemon() as process:
        async with fleet(site):
            former = await seen_by_a_daemon_that_stands_still(site, process.pid)
            cluster.kill()
            os.kill(process.pid, signal.SIGCONT)
            cluster.format()
            cluster.start()
            # Nobody but the daemon makes the topic here.
            first = await records_until(site.plain, site.topic(), 1, BACK_S_MAX)
            await grown(site.plain, site.topic(), {record.partition for record in first})
            assert await records_until(site.plain, site.topic("events"), 1)
        await site.drained()
    assert former
    found = await compare(site, also=former)
    assert not found.faults, str(found)


async def seen_by_a_daemon_that_stands_still(site: Site, pid: int) -> list[Delivery]:
    """Stop the daemon between two instructions, and give what it can have had acknowledged until then."""
    await records_until(site.plain, site.topic(), 100, 30)
    os.kill(pid, signal.SIGSTOP)
    # What stands in its sockets is still taken.
    before, deliveries = -1, list[Delivery]()
    while len(deliveries) != before:
        before = len(deliveries)
        await asyncio.sleep(1)
        deliveries = in_kafka(await records_of(site.plain, site.topic()))
    # Before all that the new cluster will have.
    return [replace(each, place=each.place._replace(offset=each.place.offset - 1_000_000)) for each in deliveries]


async def test_a_partition_without_a_leader_keeps_nobody_waiting_but_its_own(cluster: Cluster, tmp_path: Path) -> None:
    site = Site(tmp_path, "lone", cluster.addresses())
    for topic in (site.topic("events"), site.topic("quarantine")):
        await kafka_admin.create_topic(site.plain, topic, 3, 3)
    await kafka_admin.create_topic_on(site.plain, site.topic(), [1], [2], [3], min_insync_replicas="1")
    async with flowing(site):
        cluster.node(2).stop()
        for _ in range(3):
            await grown(site.plain, site.topic(), {0, 2})
            await asyncio.sleep(1)
        cluster.node(2).start()
        await grown(site.plain, site.topic(), PARTITIONS)
    assert await site.quarantine() == []


# -- topics that refuse -------------------------------------------------------------------------------


@pytest.mark.long(seconds=50)
async def test_topics_that_refuse_do_not_stop_the_others_and_are_sent_to_once_mended(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Promise P6: unknown with auto-creation off, not to be written to by this user or not even seen by it, and one
    that would delete early.

    Their readings go aside with the reason; once the topic is mended they follow by themselves.
    """
    login = cluster.addresses("LOGIN")
    password = tmp_path / "kafka.password"
    password.write_text(PASSWORD + "\n")
    password.chmod(0o400)
    sasl = f'[kafka.sasl]\nmechanism = "SCRAM-SHA-512"\nuser = "{USER}"\npassword_file = "{password}"\n'
    site = Site(tmp_path, "poison", login, cluster.bootstrap, sasl, create_topics=False)
    await kafka_admin.set_password(cluster.bootstrap, USER, "SCRAM-SHA-512", PASSWORD)
    await make_topics(site)
    for stream in ("denied", "hidden"):
        await kafka_admin.create_topic(site.plain, site.topic(stream), 1, 3)
    await kafka_admin.allow(site.plain, USER, site.topic("denied"), "DESCRIBE", "DESCRIBE_CONFIGS")
    await kafka_admin.allow(site.plain, "somebody-else", site.topic("hidden"), "WRITE")
    await kafka_admin.create_topic(site.plain, site.topic("dated"), 1, 3, message_timestamp_type="CreateTime")
    reasons = {
        "unknown": "topic-unknown",
        "denied": "broker-refused: TopicAuthorizationFailedError",
        "hidden": "topic-refused",
        "dated": "topic-not-logappendtime",
    }
    async with flowing(site):
        for stream in reasons:
            for value in range(3):
                site.publish(f"device/42/{stream}", json.dumps({"celsius": value, "boot": "b", "seq": value}))
        aside = await site.set_aside(3 * len(reasons), ASIDE_S_MAX)
        assert {(each["subject"], each["reason"]) for each in aside} == {
            (f"device/42/{stream}", reason) for stream, reason in reasons.items()
        }
        reports = await records_until(site.plain, site.topic("quarantine"), 3 * len(reasons))
        assert {json.loads(report.value)["reason"] for report in reports} == set(reasons.values())
        await grown(site.plain, site.topic(), PARTITIONS)
        await kafka_admin.create_topic(site.plain, site.topic("unknown"), 1, 3)
        await kafka_admin.allow(site.plain, USER, site.topic("denied"), "WRITE")
        await kafka_admin.allow(site.plain, USER, site.topic("hidden"), "DESCRIBE_CONFIGS", "WRITE")
        await kafka_admin.alter_topic(site.plain, site.topic("dated"), message_timestamp_type="LogAppendTime")
        deadline = time.monotonic() + patience(REDRIVEN_S_MAX)
        for stream in reasons:
            mended = await records_until(site.plain, site.topic(stream), 3, deadline - time.monotonic())
            assert [header(record, "ce_devicesequence") for record in mended] == ["0", "1", "2"], stream
        assert await site.quarantine() == []
    assert PASSWORD not in site.log


@pytest.mark.long(seconds=140)
async def test_a_topic_whose_copies_become_fewer_gets_readings_from_the_disk(cluster: Cluster, tmp_path: Path) -> None:
    """Somebody changes `min.insync.replicas` in the middle of a session, as is usual while a broker is away."""
    site = Site(tmp_path, "copies", cluster.addresses(), one_replica_is_enough=False)
    await make_topics(site)
    topic = site.topic()

    async def told_to_be_one_replica(*, it_is: bool) -> None:
        async with asyncio.timeout(SAFE_S + patience(10)):
            while ((await site.uplink())["disk_first"].get(topic) == ONE_REPLICA) != it_is:
                await asyncio.sleep(0.5)

    async with flowing(site):
        await kafka_admin.alter_topic(site.plain, topic, min_insync_replicas="1")
        await told_to_be_one_replica(it_is=True)
        await kafka_admin.alter_topic(site.plain, topic, min_insync_replicas="2")
        await told_to_be_one_replica(it_is=False)


async def test_batches_fit_a_topic_that_takes_small_ones(cluster: Cluster, tmp_path: Path) -> None:
    """A backlog makes batches of megabytes; this topic takes 3 kB at a time, and all of it goes there nevertheless."""
    site = Site(tmp_path, "small", ["127.0.0.1:1"], cluster.bootstrap, 'compression = "none"')
    await make_topics(site)
    await kafka_admin.alter_topic(site.plain, site.topic(), max_message_bytes="3000")
    with site.daemon():
        async with fleet(site, interval_ms=20):
            await asyncio.sleep(4)
    site.bootstrap = cluster.addresses()
    with site.daemon():
        await site.drained()
    found = await compare(site)
    assert not found.faults, str(found)
    assert await site.quarantine() == []


async def test_a_record_that_the_broker_refuses_goes_aside_alone(cluster: Cluster, tmp_path: Path) -> None:
    """The limit is lowered under a daemon that looked at it already: only the broker can tell it of the new one."""
    site = Site(tmp_path, "refused", cluster.addresses(), kafka='compression = "none"')
    await make_topics(site)
    large = json.dumps({"text": "x" * 5000, "boot": "b", "seq": 0})
    async with flowing(site):
        await kafka_admin.alter_topic(site.plain, site.topic(), max_message_bytes="3000")
        # Each node takes that in by itself, and the one that refuses is not the one that tells why.
        await asyncio.sleep(1)
        # A device of the fleet's own kind, in a partition that others share.
        site.publish("device/large/thermo", large)
        aside = await site.set_aside(1, ASIDE_S_MAX)
        await grown(site.plain, site.topic(), PARTITIONS)
        assert [each["subject"] for each in aside] == ["device/large/thermo"]
        assert aside[0]["reason"] == "topic-max-message-bytes"
        await kafka_admin.alter_topic(site.plain, site.topic(), max_message_bytes="1000000")
        await arrived(site, large.encode())
        assert await site.quarantine() == []


async def arrived(site: Site, value: bytes) -> None:
    """Return once a record with this value is in Kafka."""
    partitions = [TopicPartition(site.topic(), number) for number in PARTITIONS]
    deadline = time.monotonic() + patience(REDRIVEN_S_MAX)
    async with looking(site.plain) as consumer:
        consumer.assign(partitions)
        while True:
            came = await consumer.getmany(*partitions, timeout_ms=500)
            if any(record.value == value for records in came.values() for record in records):
                return
            assert time.monotonic() < deadline, f"not taken in again; the quarantine holds {await site.quarantine()}"
