"""The real job as a service: its figures in a real Prometheus, its messages to systemd, and its alert when it dies."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from aiokafka import AIOKafkaProducer

from demo.kafka_broker import Broker
from gateway.record_contract import HEARTBEAT_TYPE
from spark.engine.session import SHORT_LIVED
from tests.support.gateways import free_port
from tests.support.kafka_admin import create_topic
from tests.support.prometheus import MISSING, at_once, prometheus
from tests.support.spark_records import NOTHING_WAITS, reading_headers
from tests.support.waiting import patience, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]

ALERTS = (Path(__file__).parents[3] / "docs" / "monitoring" / "alerts.yml").read_text()
TOPIC = "device-monitored"
READINGS = 20
START_S = 60.0
"""Seconds within which an idle machine has started the job several times."""


async def send(broker: Broker, topic: str) -> None:
    await create_topic(broker.bootstrap, topic)
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap, acks="all") as producer:
        for number in range(READINGS):
            await producer.send_and_wait(topic, b'{"t": 21.5}', key=b"42", headers=reading_headers(number), partition=0)


async def send_heartbeat(broker: Broker, topic: str) -> None:
    headers = reading_headers(READINGS, event_type=HEARTBEAT_TYPE)
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap, acks="all") as producer:
        await producer.send_and_wait(topic, NOTHING_WAITS, key=b"gw-1", headers=headers, partition=0)


@contextmanager
def ingest(broker: Broker, folder: Path, port: int, notify: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The job for the length of a `with`, as systemd would start it."""
    command = [sys.executable, "-m", "spark.cli", "ingest", "--bootstrap", broker.bootstrap, "--topics", TOPIC]
    command += ["--warehouse", str(folder / "warehouse"), "--interval-s", "0.5", "--monitor-port", str(port)]
    environment = os.environ | {"SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED, "NOTIFY_SOCKET": str(notify)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.long(seconds=60)
def test_prometheus_sees_a_batch_and_a_killed_job_raises_its_alert(kafka: Broker, tmp_path: Path) -> None:
    asyncio.run(send(kafka, TOPIC))
    port = free_port()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        prometheus(tmp_path / "prometheus", {"sluice-ingest": port}, at_once(ALERTS)) as server,
    ):
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(patience(START_S))
        with ingest(kafka, tmp_path, port, tmp_path / "notify") as process:

            def value(figure: str) -> float | None:
                found = server.query(f'{figure}{{job="sluice-ingest"}}')
                return float(found[0]["value"][1]) if found else None

            # It answers before it is ready.
            wait_until(lambda: value("up") == 1, START_S)
            assert health(port)["status"] == "starting"
            assert told(systemd) == ["READY=1", "WATCHDOG=1", "STATUS=reads Kafka"]
            *fed, status = told(systemd)
            assert fed == ["READY=1", "WATCHDOG=1"]
            assert status.startswith(f"STATUS=batch 0: {READINGS} records in ")
            wait_until(lambda: value("sluice_ingest_records_total") == READINGS)
            assert server.query("sluice_ingest_lag_records")[0]["metric"]["topic"] == TOPIC
            assert (value("sluice_ingest_lag_records"), value("sluice_ingest_rejects_total")) == (0, 0)
            found = health(port)
            assert (found["status"], found["batch"], found["lag_records"]) == ("ok", 0, 0)
            # While no records come, it feeds the watchdog by its looks at Kafka.
            assert told(systemd) == ["READY=1", "WATCHDOG=1"]
            begun_s = time.time()
            asyncio.run(send_heartbeat(kafka, TOPIC))
            wait_until(lambda: value("sluice_ingest_gateway_depth_rows") == 0)
            assert (value("sluice_ingest_gateway_heard_timestamp_seconds") or 0) > begun_s - 1
            # On a busy machine a scrape may time out.
            wait_until(lambda: not server.alerts(), words=lambda: str(server.alerts()))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            wait_until(lambda: server.alerts() == {"SluiceIngestDown": "firing"}, words=lambda: str(server.alerts()))


@pytest.mark.long(seconds=30)
def test_systemd_is_told_that_the_job_ends_after_its_batch(kafka: Broker, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(patience(START_S))
        with ingest(kafka, tmp_path, 0, tmp_path / "notify") as process:
            assert told(systemd)[0] == "READY=1"
            process.terminate()
            said = told(systemd)
            while said[0] == "READY=1":
                said = told(systemd)
            assert said == ["STOPPING=1", "STATUS=ends after the running batch"]
            assert process.wait(patience(START_S)) == 0


def told(channel: socket.socket) -> list[str]:
    """The next message to systemd."""
    return channel.recv(65_536).decode().split("\n")


def health(port: int) -> dict[str, object]:
    with urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as answer:
        found: dict[str, object] = json.load(answer)
    return found
