"""A gateway with sensors before it and a cluster behind it: what tests of the uplink start, wait for and compare."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from gateway.buffer.status import read_status
from tests.support import gateways, kafka_admin
from tests.support.uplink_ledger import Audit, Delivery, acknowledged_in, audit, in_kafka
from tests.support.waiting import patience

BACK_S_MAX = 15.0
"""The promise: so long after the way is free the first new record is in Kafka, whatever was in between. A test with the
mark `alone` holds us to that; what waits here has patience with a busy machine."""
DRAINED_S_MAX = 30.0
SENSORS = 12
"""Enough that each of three partitions gets some (by Kafka's hash of their names)."""
STREAM = "thermo"
"""Stream of the fleet's sensors."""

CONFIG = """\
[gateway]
id = "gw1"
clock = "system"

[buffer]
path = "{buffer}"

[mqtt_listener]
port = {port}
anonymous = true

[kafka]
bootstrap = {bootstrap}
create_topics = {create_topics}
one_replica_is_enough = {one_replica_is_enough}
events_topic = "{prefix}-events"
quarantine_topic = "{prefix}-quarantine"
heartbeat_interval_s = 1.0
lane_s_min = 2.0
{kafka}
[[routes]]
topic = "device/{{device}}/{{stream}}"
kafka = "{prefix}-{{stream}}"
identity = "json"
"""


@dataclass(slots=True)
class Site:
    """One gateway, its settings and its sensors."""

    directory: Path
    prefix: str
    """Prefix of the names of its Kafka topics."""
    bootstrap: list[str]
    """Bootstrap addresses in the daemon's settings."""
    look: str = ""
    """A plain listener for the test's own look at Kafka. If it is empty, `bootstrap` serves."""
    kafka: str = ""
    """More lines of [kafka], and tables below it."""
    create_topics: bool = True
    one_replica_is_enough: bool = True
    port: int = field(default_factory=gateways.free_port)

    @property
    def config(self) -> Path:
        return self.directory / "gateway.toml"

    @property
    def buffer(self) -> Path:
        return self.directory / "buffer.db"

    @property
    def ledger(self) -> Path:
        return self.directory / "fleet.ledger"

    @property
    def log(self) -> str:
        """The daemon's log."""
        return self.config.with_suffix(".log").read_text()

    @property
    def plain(self) -> str:
        return self.look or ",".join(self.bootstrap)

    def topic(self, stream: str = STREAM) -> str:
        return f"{self.prefix}-{stream}"

    def write_config(self) -> Path:
        text = CONFIG.format(
            buffer=self.buffer,
            port=self.port,
            bootstrap=json.dumps(self.bootstrap),
            create_topics=str(self.create_topics).lower(),
            one_replica_is_enough=str(self.one_replica_is_enough).lower(),
            prefix=self.prefix,
            kafka=self.kafka,
        )
        self.config.write_text(text)
        return self.config

    @contextmanager
    def daemon(self) -> Iterator[subprocess.Popen[bytes]]:
        """`sluice run`, listening."""
        with gateways.daemon(self.write_config(), self.port) as process:
            yield process

    def publish(self, topic: str, payload: str) -> None:
        """One reading; returns after its PUBACK."""
        gateways.publish(self.port, topic, payload)

    async def status(self) -> dict[str, Any]:
        """`sluice status --json`."""
        found: dict[str, Any] = json.loads((await self.command("status", "--json")).stdout)
        return found

    async def uplink(self) -> dict[str, Any]:
        return await asyncio.to_thread(gateways.uplink_told, self.buffer)

    async def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of `sluice`'s commands on this site's settings, whatever its exit code."""
        command = [str(gateways.SLUICE), *arguments, "--config", str(self.config)]
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=patience(60), check=False
        )

    async def set_aside(self, count: int, patience_s: float) -> list[dict[str, Any]]:
        """The quarantine, once it holds so many. Raises TimeoutError."""
        async with asyncio.timeout(patience(patience_s)):
            while read_status(self.buffer).quarantined < count:
                await asyncio.sleep(0.1)
        return await self.quarantine()

    async def quarantine(self) -> list[dict[str, Any]]:
        """`sluice buffer quarantine ls --json`."""
        found: list[dict[str, Any]] = json.loads((await self.command("buffer", "quarantine", "ls", "--json")).stdout)
        return found

    async def drained(self, patience_s: float = DRAINED_S_MAX) -> None:
        """Return once nothing waits for Kafka. Raises TimeoutError, with how many rows do."""
        deadline = time.monotonic() + patience(patience_s)
        while rows := read_status(self.buffer).rows:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{rows} rows still wait after {patience_s:.0f} s; the daemon said:\n{self.log}")
            await asyncio.sleep(0.1)


@asynccontextmanager
async def fleet(site: Site, *, sensors: int = SENSORS, interval_ms: int = 100) -> AsyncIterator[None]:
    """Sensors that publish; at the end of the block they stop, once all they have is acknowledged."""
    command = [sys.executable, "-m", "sluice_sim", "fleet", "--port", str(site.port), "--sensors", str(sensors)]
    command += ["--interval-ms", str(interval_ms), "--seconds", "0", "--ledger", str(site.ledger), "--json"]
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.DEVNULL)
    try:
        yield
        process.send_signal(signal.SIGTERM)
        if await asyncio.to_thread(process.wait, patience(30)) != 0:
            raise RuntimeError(f"the fleet ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


async def compare(site: Site, *, also: list[Delivery] | None = None) -> Audit:
    """Set what the sensors were told against what is in Kafka now, and in a former cluster (`also`)."""
    deliveries = in_kafka(await records_of(site.plain, site.topic()))
    return audit(acknowledged_in(site.ledger.read_text()), [*deliveries, *(also or [])])


async def grown(bootstrap: str, topic: str, partitions: set[int], patience_s: float = BACK_S_MAX) -> float:
    """Wait until each of the partitions has records that it has not at this moment; give the seconds it took.

    Raises TimeoutError, with the partitions that have none, after `patience_s`.
    """
    begin = time.monotonic()
    late = partitions
    try:
        async with asyncio.timeout(patience(patience_s)), looking(bootstrap) as consumer:
            before = await _ends(consumer, topic, partitions)
            while late:
                now = await _ends(consumer, topic, late)
                late = {number for number in late if now[number] <= before[number]}
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise TimeoutError(f"no new record for {patience_s:.0f} s in {topic}, partitions {sorted(late)}") from None
    return time.monotonic() - begin


async def _ends(consumer: AIOKafkaConsumer, topic: str, partitions: set[int]) -> dict[int, int]:
    found = await consumer.end_offsets([TopicPartition(topic, number) for number in partitions])
    return {partition.partition: end for partition, end in found.items()}


async def records_of(bootstrap: str, topic: str) -> list[ConsumerRecord]:
    """All that stands in a topic now, by partition in order; nothing where there is no such topic."""
    leaders = await kafka_admin.leaders_of(bootstrap, topic)
    partitions = [TopicPartition(topic, number) for number in leaders]
    records: list[ConsumerRecord] = []
    if not partitions:
        return records
    async with asyncio.timeout(patience(60)), looking(bootstrap) as consumer:
        consumer.assign(partitions)
        for partition, end in (await consumer.end_offsets(partitions)).items():
            while await consumer.position(partition) < end:
                for found in (await consumer.getmany(partition, timeout_ms=1000)).values():
                    records += found
    return records


async def records_until(bootstrap: str, topic: str, count: int, patience_s: float = BACK_S_MAX) -> list[ConsumerRecord]:
    """Records of a topic, once there are `count`. Raises TimeoutError, with the number of records that there are."""
    records: list[ConsumerRecord] = []
    try:
        async with asyncio.timeout(patience(patience_s)):
            while len(records) < count:
                await asyncio.sleep(0.3)
                records = await records_of(bootstrap, topic)
    except TimeoutError:
        raise TimeoutError(f"{len(records)} records, not {count}, in {topic} after {patience_s:.0f} s") from None
    return records


@asynccontextmanager
async def looking(bootstrap: str) -> AsyncIterator[AIOKafkaConsumer]:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap.split(","), enable_auto_commit=False, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()
