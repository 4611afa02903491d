"""A disk that dies while Kafka answers, Kafka that dies while the disk is dead, and both come back in either order."""

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

from demo.kafka_broker import Broker, kafka_broker
from demo.uplink import Uplink
from tests.support.gateways import consume, daemon, header, uplink_told, write_config
from tests.support.kafka_admin import alter_topic, create_topic_on
from tests.support.kafka_cluster import kafka_cluster
from tests.support.kill_loop import KINDS, LedgerSensor, drained, serve
from tests.support.sizes import SEED
from tests.support.small_disk import daemon_on, mount_refusal, small_disk
from tests.support.waiting import patience
from tests.system.test_disk_faults import SYNCS, WRITES, failing, identities, logged, needs_strace
from tests.system.test_full_disk import found, log_of, reading, write_small_config

ALL = f"{WRITES},{SYNCS}"
READS = "pread64"
CALM_S = 2.0
"""Time for acknowledgements without a copy, if there are any."""
Reading = tuple[str, int]
"""Device and number."""
REFUSAL = mount_refusal()


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(patience(40)):
        while not condition():
            await asyncio.sleep(0.05)


async def goes_direct(folder: Path, topics: int) -> None:
    """Wait until readings of so many topics go to Kafka first.

    The gateway's own topic of events is one of them, though it may be slow: it seldom gets another chance.
    """

    def is_direct() -> bool:
        with suppress(OSError):
            told = uplink_told(folder / "buffer.db")
            slow_events = sum(topic.endswith("-events") for topic in told["disk_first"])
            return bool(told["direct_topics"] + slow_events >= topics)
        return False

    await reached(is_direct)


async def grows(sensor: LedgerSensor, by: int = 100) -> None:
    before = len(sensor.acknowledged)
    await reached(lambda: len(sensor.acknowledged) > before + by)


async def in_kafka(bootstrap: str, prefix: str = "both") -> set[Reading]:
    records = await consume(bootstrap, *(f"{prefix}-{kind}" for kind in KINDS))
    return {(record.key.decode(), int(json.loads(record.value)["n"])) for record in records}


def acknowledged(sensors: Iterable[LedgerSensor]) -> set[Reading]:
    return {(sensor.device, number) for sensor in sensors for number in sensor.acknowledged}


async def told_in_events(bootstrap: str, prefix: str, kinds: list[str]) -> None:
    """Wait until the events tell of the buffer's trouble, in this order."""
    async with asyncio.timeout(patience(40)):
        while True:
            told = [header(record, "ce_subject") for record in await consume(bootstrap, f"{prefix}-events")]
            if [kind for kind in told if kind in {"buffer-trouble", "buffer-well"}] == kinds:
                return
            await asyncio.sleep(0.2)


@needs_strace
@pytest.mark.kafka
@pytest.mark.parametrize(
    ("first_back", "calls", "error"),
    [("kafka", f"{ALL},{READS}", "EIO"), ("disk", ALL, "EIO"), ("disk", ALL, "EROFS"), ("kafka", WRITES, "ENOSPC")],
)
async def test_whichever_comes_back_first_has_what_is_acknowledged(
    tmp_path: Path, port: int, first_back: Literal["kafka", "disk"], calls: str, error: str
) -> None:
    """A disk that dies may be read yet, or not. It may be read-only, or have no byte left."""
    sensors = [LedgerSensor(kind, kind) for kind in KINDS]
    by_kind = {sensor.kind: sensor for sensor in sensors}
    chance = random.Random(SEED)  # noqa: S311 - repeatable is the point
    finishing = asyncio.Event()

    async with Uplink() as uplink:
        with kafka_broker(tmp_path / "kafka", gateway_port=uplink.port) as broker:
            assert broker.gateway_listener_port is not None
            uplink.open(broker.gateway_listener_port)
            config = write_config(tmp_path, f"127.0.0.1:{uplink.port}", port, "both")
            with daemon(config, port) as process:
                async with asyncio.TaskGroup() as tasks:
                    for sensor in sensors:
                        tasks.create_task(serve(sensor, port, chance, finishing))
                    await goes_direct(tmp_path, len(KINDS))
                    with failing(process, calls, error):
                        await logged(config, "buffer cannot be read or written")
                        await grows(by_kind["qos1-sequence"], 50)  # Kafka is enough
                        await uplink.cut()
                        await asyncio.sleep(CALM_S)
                        while_both_are_away = acknowledged(sensors)
                        on_disk = set(identities(tmp_path / "buffer.db").values())
                        assert while_both_are_away <= await in_kafka(broker.bootstrap) | on_disk
                        if first_back == "kafka":
                            await uplink.restore()
                            await grows(by_kind["qos1-sequence"], 50)
                    if first_back == "disk":
                        await grows(by_kind["qos1-sequence"], 50)
                        await uplink.restore()
                    await grows(by_kind["qos1-sequence"], 50)
                    finishing.set()
                    await reached(lambda: not any(sensor.in_flight for sensor in sensors))
                await reached(lambda: uplink_told(tmp_path / "buffer.db")["up"])
                await told_in_events(broker.bootstrap, "both", ["buffer-trouble", "buffer-well"])
            with daemon(config, port):
                # What the end has left to the disk goes out too.
                async with asyncio.timeout(patience(40)):
                    while not acknowledged(sensors) <= await in_kafka(broker.bootstrap):
                        await asyncio.sleep(0.2)


@needs_strace
@pytest.mark.kafka
@pytest.mark.long(seconds=40)
async def test_a_topic_without_a_leader_costs_no_other_while_the_disk_is_dead(tmp_path: Path, port: int) -> None:
    sensors = stuck, served = LedgerSensor("qos1", "stuck"), LedgerSensor("qos1-sequence", "served")
    finishing = asyncio.Event()

    with kafka_cluster(tmp_path / "kafka") as cluster:
        bootstrap = cluster.addresses()[0]
        await create_topic_on(bootstrap, "partly-qos1", [3], min_insync_replicas="1")
        config = write_config(tmp_path, bootstrap, port, "partly")
        with daemon(config, port) as process:
            async with asyncio.TaskGroup() as tasks:
                for sensor in sensors:
                    tasks.create_task(serve(sensor, port, random.Random(SEED), finishing))  # noqa: S311
                await goes_direct(tmp_path, len(sensors) + 1)
                with failing(process, ALL, "EIO"):
                    cluster.node(3).stop()
                    # Only what does not get to Kafka needs the disk.
                    await logged(config, "buffer cannot be read or written")
                    await grows(served)
                    before = len(stuck.acknowledged)
                    await grows(served)
                    assert len(stuck.acknowledged) == before, "nobody has these readings"
                    cluster.node(3).start()
                    await grows(stuck)
                finishing.set()
                await reached(lambda: not any(sensor.in_flight for sensor in sensors))
        there = await in_kafka(bootstrap, "partly") | set(identities(tmp_path / "buffer.db").values())
    assert not acknowledged(sensors) - there


@needs_strace
@pytest.mark.kafka
@pytest.mark.long(seconds=40)
async def test_what_kafka_refuses_costs_no_other_while_the_disk_is_dead(
    tmp_path: Path, port: int, kafka: Broker
) -> None:
    sensors = refused, served = LedgerSensor("qos1", "refused"), LedgerSensor("qos1-sequence", "served")
    finishing = asyncio.Event()
    config = write_config(tmp_path, kafka.bootstrap, port, "refusing")

    with daemon(config, port) as process:
        async with asyncio.TaskGroup() as tasks:
            for sensor in sensors:
                tasks.create_task(serve(sensor, port, random.Random(SEED), finishing))  # noqa: S311
            await goes_direct(tmp_path, len(sensors) + 1)
            with failing(process, ALL, "EIO"):
                await alter_topic(kafka.bootstrap, "refusing-qos1", max_message_bytes="100")
                await logged(config, "buffer cannot be read or written")
                await asyncio.sleep(CALM_S)
                before = len(refused.acknowledged)
                for _ in range(5):
                    await grows(served)
                assert len(refused.acknowledged) == before, "nobody has these readings"
                assert "forwarding waits for the buffer" not in log_of(config)
            await alter_topic(kafka.bootstrap, "refusing-qos1", max_message_bytes="1048588")
            await grows(refused)
            finishing.set()
            await reached(lambda: not any(sensor.in_flight for sensor in sensors))
        await drained(config)
    there = await in_kafka(kafka.bootstrap, "refusing")
    assert not acknowledged(sensors) - there


@pytest.mark.skipif(REFUSAL is not None, reason=REFUSAL or "")
@pytest.mark.kafka
@pytest.mark.long(seconds=20)
async def test_a_disk_without_a_free_byte_holds_up_only_what_needs_it(tmp_path: Path, port: int, kafka: Broker) -> None:
    sensors = [LedgerSensor(kind, kind, window=100) for kind in KINDS]
    by_kind = {sensor.kind: sensor for sensor in sensors}
    finishing = asyncio.Event()

    with small_disk(tmp_path / "disk") as disk:
        config = write_small_config(disk, tmp_path, port, kafka.bootstrap, "refuse")
        config.write_text(config.read_text().replace('"full-', '"brim-'))
        with daemon_on(disk, config, port):
            async with asyncio.TaskGroup() as tasks:
                for sensor in sensors:
                    tasks.create_task(serve(sensor, port, random.Random(SEED), finishing))  # noqa: S311
                await goes_direct(disk.outside, len(sensors) + 1)
                # While another program reads, SQLite's WAL only grows. Else the file's own room would do.
                with reading(disk):
                    while "buffer cannot be read or written" not in log_of(config):
                        disk.fill()
                        await grows(by_kind["qos1"])
                    await grows(by_kind["qos1-sequence"])
                    # The disk first: what leaves it meanwhile is in Kafka.
                    told, on_disk = acknowledged(sensors), await asyncio.to_thread(found, disk)
                    there = {(device, number) for device, numbers in on_disk.numbers.items() for number in numbers}
                    assert told <= there | await in_kafka(kafka.bootstrap, "brim")
                    await told_in_events(kafka.bootstrap, "brim", ["buffer-trouble"])
                    stuck = len(by_kind["qos2"].acknowledged)
                    await grows(by_kind["qos1"])
                    assert len(by_kind["qos2"].acknowledged) == stuck, "nobody has these readings"
                    disk.empty()
                    await grows(by_kind["qos2"])
                await told_in_events(kafka.bootstrap, "brim", ["buffer-trouble", "buffer-well"])
                finishing.set()
                await reached(lambda: not any(sensor.in_flight for sensor in sensors))
            async with asyncio.timeout(patience(40)):
                while not acknowledged(sensors) <= await in_kafka(kafka.bootstrap, "brim"):
                    await asyncio.sleep(0.2)
