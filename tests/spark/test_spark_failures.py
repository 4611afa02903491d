"""Failures of disks and of Java: `sluice-cloud ingest` ends with one line, loses nothing, and goes on afterwards."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from demo.kafka_broker import Broker
from spark.cli import FAILED
from spark.engine.session import SHORT_LIVED
from spark.log.log_table import open_log
from tests.support.kafka_admin import create_topic
from tests.support.small_disk import mount_refusal, small_disk
from tests.support.spark_records import reading_headers
from tests.support.waiting import patience, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

REFUSAL = mount_refusal()
RECORDS = 60
PACKS = 3_000


async def send(broker: Broker, topic: str) -> None:
    """Some megabytes that no compression makes smaller."""
    rng = random.Random(5)  # noqa: S311 - the same bytes every time
    await create_topic(broker.bootstrap, topic)
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap, acks="all") as producer:
        for number in range(RECORDS):
            value = b'{"t": %d, "raw": "%s"}' % (number, rng.randbytes(40_000).hex().encode())
            await producer.send_and_wait(topic, value, key=b"42", headers=reading_headers(number), partition=0)


def ingest(broker: Broker, warehouse: Path, topic: str, scratch: Path, enter: Sequence[str] = ()) -> tuple[int, str]:
    """Run `sluice-cloud ingest --once`. Returns its exit code, and its standard error."""
    command = [sys.executable, "-m", "spark.cli", "ingest", "--bootstrap", broker.bootstrap, "--once"]
    command += ["--warehouse", str(warehouse), "--topics", topic]
    environment = os.environ | {"SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED, "TMPDIR": str(scratch)}
    done = subprocess.run(
        [*enter, *command], capture_output=True, text=True, env=environment, timeout=patience(300), check=False
    )
    return done.returncode, done.stderr


@contextmanager
def started_ingest(broker: Broker, warehouse: Path, topics: str, scratch: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `sluice-cloud ingest` as a service, in a session of its own: it is there, and reads."""
    command = [sys.executable, "-m", "spark.cli", "ingest", "--bootstrap", broker.bootstrap, "--json"]
    command += ["--warehouse", str(warehouse), "--topics", topics]
    environment = os.environ | {"SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED, "TMPDIR": str(scratch)}
    # Under nohup the tests ignore SIGHUP, and so would their children.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        try:
            assert process.stdout is not None
            assert '"ready"' in process.stdout.readline()
            yield process
        finally:
            # Else the `with` would wait for it for ever, if a test fails.
            process.kill()


def said(told: str) -> list[str]:
    """The lines that are ours: the first of all is Java's own, of every start."""
    return [line for line in told.splitlines() if "incubator modules" not in line]


@pytest.mark.long(seconds=70)
@pytest.mark.skipif(REFUSAL is not None, reason=REFUSAL or "")
def test_a_full_disk_is_told_in_one_line_and_loses_nothing(kafka: Broker, spark: SparkSession, tmp_path: Path) -> None:
    topic = "device-full-disk"
    asyncio.run(send(kafka, topic))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with small_disk(tmp_path / "disk", "64M") as disk:
        warehouse = disk.inside / "warehouse"
        disk.fill(leave_bytes=600_000)

        code, told = ingest(kafka, warehouse, topic, scratch, disk.enter)

        assert len(said(told)) == 1, told
        (line,) = said(told)
        trace = re.fullmatch(
            rf"Error: the disk of {warehouse} is full: make room there. What was committed stays, and the next run "
            r"goes on from there \(the trace is in (\S+)\)",
            line,
        )
        assert (code, trace is not None) == (FAILED, True), told
        assert trace is not None
        kept = Path(trace[1])
        assert list(scratch.iterdir()) == [kept]
        assert kept.stat().st_mode & 0o777 == 0o600
        text = kept.read_text()
        # Python's trace, and Java's log.
        assert "Traceback (most recent call last)" in text
        assert " ERROR Executor: Exception in task" in text
        disk.empty()
        assert ingest(kafka, warehouse, topic, scratch, disk.enter)[0] == 0
        places = [row.offset for row in open_log(spark, str(disk.outside / "warehouse")).collect()]
    assert sorted(places) == list(range(RECORDS))


@pytest.mark.long(seconds=30)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_java_is_no_member_of_the_commands_group_and_ends_with_it(
    kafka: Broker, tmp_path: Path, number: signal.Signals
) -> None:
    """SIGTERM to all of a service's processes is `docker stop` and systemd's default."""
    with started_ingest(kafka, tmp_path / "warehouse", "device-none-of-these", tmp_path) as process:
        (java,) = children_of(process.pid)
        assert os.getsid(java) == java
        # Of systemd Java gets it too.
        os.kill(java, signal.SIGTERM)
        os.killpg(process.pid, number)
        _, told = process.communicate(timeout=patience(120))
    wait_until(lambda: not Path(f"/proc/{java}").exists(), 10)
    assert process.returncode == (-number if number == signal.SIGKILL else 0)
    assert said(told) == []
    if number != signal.SIGKILL:
        assert [path.name for path in tmp_path.iterdir() if path.name != "warehouse"] == []


@pytest.mark.long(seconds=60)
def test_a_batch_is_whole_after_its_python_workers_were_told_to_end(
    kafka: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    """systemd and `docker stop` signal Spark's Python workers too: the batch is done again by the next run."""
    topic = "device-packs"
    pack = json.dumps([{"n": f"m{number}", "v": number} for number in range(200)]).encode()

    async def send_packs() -> None:
        await create_topic(kafka.bootstrap, topic)
        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, acks="all") as producer:
            for number in range(PACKS):
                headers = reading_headers(number, content_type="application/senml+json")
                await producer.send(topic, pack, key=b"42", headers=headers, partition=0)

    asyncio.run(send_packs())
    warehouse = tmp_path / "warehouse"
    with started_ingest(kafka, warehouse, topic, tmp_path) as process:
        (java,) = children_of(process.pid)
        wait_until(lambda: len(descendants_of(java)) > 1, 300)
        # As systemd does it: the command first, then all others.
        for pid in (process.pid, java, *descendants_of(java)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        _, told = process.communicate(timeout=patience(120))
    assert process.returncode in {0, FAILED}, told
    assert len(said(told)) == (process.returncode == FAILED), told

    assert ingest(kafka, warehouse, topic, tmp_path)[0] == 0
    rows = open_log(spark, str(warehouse)).select("offset", F.size("metrics").alias("metrics")).collect()
    assert sorted((row.offset, row.metrics) for row in rows) == [(offset, 200) for offset in range(PACKS)]


@pytest.mark.long(seconds=20)
def test_a_session_that_fails_after_java_has_started_leaves_no_java(kafka: Broker, tmp_path: Path) -> None:
    """In a process that goes on: else Java ends with it."""
    program = (
        "import os, sys\n"
        "from click.testing import CliRunner\n"
        "from spark.cli import main\n"
        "print(CliRunner().invoke(main, sys.argv[1:]).output)\n"
        "print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read().split())\n"
    )
    command = [sys.executable, "-c", program, "ingest", "--bootstrap", kafka.bootstrap]
    environment = os.environ | {"SLUICE_SPARK_MASTER": "local[nonsense]", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*command, "--warehouse", str(tmp_path / "warehouse")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=patience(120),
        check=True,
    )
    words, *_, children = done.stdout.strip().splitlines()
    trace = re.fullmatch(r"Error: Spark failed: .*local\[nonsense\].* \(the trace is in (\S+)\)", words)
    assert (trace is not None, children) == (True, "[]"), done.stdout
    assert trace is not None
    assert list(tmp_path.iterdir()) == [Path(trace[1])]


@pytest.mark.long(seconds=20)
def test_a_java_that_is_killed_is_told_in_one_line(kafka: Broker, tmp_path: Path) -> None:
    with started_ingest(kafka, tmp_path / "warehouse", "device-none-of-these", tmp_path) as process:
        (java,) = children_of(process.pid)
        os.kill(java, signal.SIGKILL)
        _, told = process.communicate(timeout=patience(120))
    assert process.returncode == FAILED
    assert len(said(told)) == 1, told
    assert said(told)[0].startswith("Error: Java was killed by signal 9 during the work."), told


def descendants_of(pid: int) -> list[int]:
    """Children of any thread, and theirs."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, file.read_text().split()):
                found += [child, *descendants_of(child)]
    return found


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
