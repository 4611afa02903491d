"""Starts the real daemon, and reads back what it put into Kafka."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from demo.kafka_broker import free_ports
from gateway.daemon import control
from tests.support.waiting import patience

SLUICE = Path(sys.executable).with_name("sluice")


@asynccontextmanager
async def answering(buffer: Path, answers: Mapping[str, control.Handler]) -> AsyncIterator[None]:
    """What the commands meet of a daemon that runs with this buffer, which somebody has opened."""
    path = control.socket_path(buffer)
    serving = asyncio.create_task(control.serve(path, answers))
    try:
        while not path.exists():
            await asyncio.sleep(0.01)
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def uplink_told(buffer: Path) -> dict[str, Any]:
    """What the daemon tells `sluice status` of its uplink: without a process for each time it is asked."""
    found: dict[str, Any] = control.call(control.socket_path(buffer), "state")["uplink"]
    return found


def free_port() -> int:
    return free_ports(1)[0]


HOLD_NEW_CLOCK_S = 2
"""Long enough for readings to be left behind when something happens, and short for those who wait for them."""


def write_config(directory: Path, bootstrap: str, mqtt_port: int, prefix: str, extra: str = "") -> Path:
    """A gateway whose topics all begin with `prefix`, so that tests can share one broker."""
    path = directory / "gateway.toml"
    path.write_text(
        f"""\
[gateway]
id = "gw1"
clock = "system"
hold_new_clock_s = {HOLD_NEW_CLOCK_S}

[buffer]
path = "{directory}/buffer.db"

[mqtt_listener]
port = {mqtt_port}
anonymous = true

[kafka]
bootstrap = ["{bootstrap}"]
create_topics = true
one_replica_is_enough = true
events_topic = "{prefix}-events"
quarantine_topic = "{prefix}-quarantine"
heartbeat_interval_s = 0.5

[[routes]]
topic = "device/{{device}}/{{stream}}"
kafka = "{prefix}-{{stream}}"
identity = "json"
{extra}
"""
    )
    return path


@contextmanager
def daemon(config: Path, port: int, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """`sluice run`, listening; stopped by SIGTERM at the end unless it was killed before."""
    log = config.with_suffix(".log").open("ab")
    process = subprocess.Popen([SLUICE, "run", "--config", config], stderr=log, env=environment)
    try:
        wait_for_port(port, process)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(patience(20))
        log.close()


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + patience(20)
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"the daemon does not listen on {port} (exit code {process.returncode})")


def publish(port: int, topic: str, payload: str, *, qos: int = 1) -> None:
    """Publish with mosquitto's own client: returns after PUBACK."""
    command = ["mosquitto_pub", "-p", str(port), "-t", topic, "-m", payload, "-q", str(qos)]
    subprocess.run(command, check=True, timeout=patience(20))


async def consume(bootstrap: str, *topics: str) -> list[ConsumerRecord]:
    """Everything that stands in the topics now; a topic that does not exist holds nothing."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        existing = set(await admin.list_topics()) & set(topics)
        described = await admin.describe_topics(sorted(existing)) if existing else []
    finally:
        await admin.close()
    partitions = [
        TopicPartition(topic["topic"], partition["partition"])
        for topic in described
        for partition in topic["partitions"]
    ]
    if not partitions:
        return []
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest")
    await consumer.start()
    try:
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        records: list[ConsumerRecord] = []
        for partition, end in ends.items():
            while await consumer.position(partition) < end:
                for found in (await consumer.getmany(partition, timeout_ms=1000)).values():
                    records += found
        return records
    finally:
        await consumer.stop()


async def consume_until(bootstrap: str, count: int, *topics: str) -> list[ConsumerRecord]:
    """What stands in the topics once there are at least `count` records."""
    async with asyncio.timeout(patience(60)):
        while len(records := await consume(bootstrap, *topics)) < count:
            await asyncio.sleep(0.2)
    return records


def header(record: ConsumerRecord, name: str) -> str:
    text: str = dict(record.headers)[name].decode()
    return text
