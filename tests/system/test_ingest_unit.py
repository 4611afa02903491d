"""systemd/sluice-ingest.service in a box: the job reads within its bounds, is watched, and ends in order."""

import asyncio
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from tests.support.box import Box, box_or_skip
from tests.support.kafka_admin import create_topic
from tests.support.spark_records import reading_headers
from tests.support.uplink_scene import Scene, scene_or_skip
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.box, pytest.mark.kafka, pytest.mark.timeout(1_200)]

ROOT = Path(__file__).parents[2]
UNIT = "sluice-ingest.service"
RELEASES = {(3, 11): 12, (3, 13): 13}
"""The Debian that has this Python: packages of another one would not load."""
TREE = "/opt/tree"
LAUNCHER = f"""#!/bin/sh
export PYTHONPATH={TREE}:{TREE}/site-packages
exec /usr/bin/python3 -m spark.cli "$@"
"""
OPTIONS = """\
INGEST_OPTIONS=--bootstrap {bootstrap} --topics device-.* --warehouse /srv/warehouse --monitor-port 9464
JAVA_HOME={java}
SLUICE_SPARK_MASTER=local[2]
SPARK_DRIVER_MEMORY=1g
"""
EXPOSURE_MAX = 2.0
START_S = 60.0
"""Seconds within which an idle machine has started the job several times."""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    (tmp_path / "scene").mkdir()
    with scene_or_skip(tmp_path / "scene") as made:
        yield made


@pytest.fixture
def box(tmp_path: Path, scene: Scene) -> Iterator[Box]:
    """A box with the unit, and the project where `make cloud` would install it. The service does not run yet."""
    release = RELEASES.get(sys.version_info[:2])
    if release is None:
        pytest.skip("no Debian that boxes are made of has this Python")
    java = Path(shutil.which("java") or "").resolve().parents[1]
    packages = Path(pytest.__file__).parents[1]
    with box_or_skip(tmp_path, release) as made:
        made.shown = {ROOT / part: f"{TREE}/{part}" for part in ("spark", "gateway")}
        made.shown |= {packages: f"{TREE}/site-packages", ROOT / "build" / "jars" / "spark": "/opt/sluice/jars"}
        # Java's settings are links into /etc.
        made.shown |= {found: str(found) for found in (java, *Path("/etc").glob("java-*-openjdk"))}
        made.boot(scene.network.gateway)
        made.write("/opt/sluice/bin/sluice-cloud", LAUNCHER, 0o755)
        made.run("useradd", "--system", "--user-group", "--home-dir", "/var/lib/sluice-ingest", "sluice-ingest")
        made.write(f"/etc/systemd/system/{UNIT}", (ROOT / "systemd" / UNIT).read_text())
        made.write("/etc/sluice-ingest/options", OPTIONS.format(bootstrap=scene.bootstrap, java=java))
        made.run("install", "-d", "-o", "sluice-ingest", "-g", "sluice-ingest", "/srv/warehouse")
        made.run("systemctl", "daemon-reload")
        yield made


async def send(bootstrap: str) -> None:
    await create_topic(bootstrap, "device-thermo")
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        for number in range(20):
            headers = reading_headers(number)
            await producer.send_and_wait("device-thermo", b'{"t": 21.5}', key=b"42", headers=headers, partition=0)


def status(box: Box) -> str:
    return box.property(UNIT, "StatusText")


def java_of(box: Box) -> str:
    return box.call("pidof", "java").stdout.strip()


@pytest.mark.long(seconds=150)
def test_the_job_reads_within_its_bounds_is_watched_and_ends_in_order(scene: Scene, box: Box) -> None:
    scene.network.brokers.inside(lambda: asyncio.run(send(scene.cluster.bootstrap)))
    found = box.call("systemd-analyze", "verify", "--man=no", f"/etc/systemd/system/{UNIT}")
    assert (found.stdout, found.stderr, found.returncode) == ("", "", 0)
    told = box.run("systemd-analyze", "security", "--no-pager", UNIT)
    assert float(told.rpartition("level for sluice-ingest.service: ")[2].split()[0]) <= EXPOSURE_MAX
    # It comes back when its job is ready.
    box.run("systemctl", "start", UNIT)
    wait_until(lambda: status(box).startswith("batch 0: 20 records in"), START_S, lambda: box.journal(UNIT))
    assert "warning" not in box.journal(UNIT)

    # Python's workers and Java know nothing of SIGTERM.
    box.run("systemctl", "stop", UNIT)
    assert (box.property(UNIT, "Result"), box.property(UNIT, "ExecMainStatus")) == ("success", "0")
    assert java_of(box) == ""

    # Java hangs: nothing ends any more.
    box.write(f"/etc/systemd/system/{UNIT}.d/watchdog.conf", "[Service]\nWatchdogSec=40\nRestartSec=1\n")
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", UNIT)
    hung = java_of(box)
    box.run("sh", "-c", f"kill -STOP {hung}")
    wait_until(lambda: box.property(UNIT, "NRestarts") == "1", START_S + 40, lambda: box.journal(UNIT))
    assert "Watchdog timeout" in box.journal(UNIT)
    # Where each thread was.
    assert "ingest_job.py" in box.journal(UNIT)
    wait_until(lambda: box.property(UNIT, "ActiveState") == "active", START_S, lambda: box.journal(UNIT))
    assert hung not in java_of(box).split()
