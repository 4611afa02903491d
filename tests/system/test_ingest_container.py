"""systemd/ingest.Containerfile: its image reads records as a user without rights, and ends in order."""

import asyncio
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from aiokafka import AIOKafkaProducer

from demo.kafka_broker import Broker
from tests.support.box import entered_or_skip
from tests.support.containers import images
from tests.support.fresh_system import fresh_system
from tests.support.gateways import free_port
from tests.support.kafka_admin import create_topic
from tests.support.spark_records import reading_headers
from tests.support.waiting import patience, wait_until

pytestmark = [pytest.mark.box, pytest.mark.kafka, pytest.mark.timeout(3_000)]

CONTAINERFILE = Path(__file__).parents[2] / "systemd" / "ingest.Containerfile"
RELEASE = 13
WAREHOUSE = "/var/lib/sluice-ingest/warehouse"
TOPIC = "container-thermo"
READ_S = 60.0
END_S = 60.0


async def send(bootstrap: str) -> None:
    await create_topic(bootstrap, TOPIC)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        for number in range(20):
            headers = reading_headers(number)
            await producer.send_and_wait(TOPIC, b'{"t": 21.5}', key=b"42", headers=headers, partition=0)


def figures(port: int) -> str:
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except (URLError, OSError):
        return ""


@pytest.mark.long(seconds=600)
def test_the_image_reads_records_as_a_user_without_rights_and_ends_in_order(kafka: Broker, tmp_path: Path) -> None:
    asyncio.run(send(kafka.bootstrap))
    with entered_or_skip(images(tmp_path / "images")) as made:
        with entered_or_skip(fresh_system(tmp_path, RELEASE)) as system:
            base = made.import_tree(system.root, system.environment())
            image = made.build(CONTAINERFILE, system.clone, {"DEBIAN": base})
        assert f"debian:{RELEASE}" in CONTAINERFILE.read_text()
        user = made.configuration(image)["User"]
        port, log = free_port(), tmp_path / "container.log"
        options = [
            "--bootstrap",
            kafka.bootstrap,
            "--topics",
            TOPIC,
            "--warehouse",
            WAREHOUSE,
            f"--monitor-port={port}",
        ]
        environment = {"SLUICE_SPARK_MASTER": "local[2]", "SPARK_DRIVER_MEMORY": "1g"}
        with made.container(image, options, environment, log) as container:
            wait_until(lambda: "\nsluice_ingest_records_total 20.0\n" in figures(port), READ_S, log.read_text)
            assert container.end(patience(END_S)) == 0, log.read_text()
        (tables,) = (tmp_path / "images").glob(f"images/vfs/dir/*{WAREHOUSE}")
        assert str(tables.stat().st_uid) == user != "0"
