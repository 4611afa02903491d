import asyncio
import glob
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError
from rich.console import Console

from demo import cloud_side
from demo import run as demo_run
from demo.children import Child, Children, DemoError
from demo.cloud_side import CloudSide, JsonLines
from demo.demo_settings import DemoSettings
from demo.kafka_broker import OwnBroker
from demo.kafka_ends import KafkaEnds
from demo.progress import Progress
from demo.run import Folder, Run
from demo.uplink import Uplink
from sluice_sim import avr
from tests.support.waiting import patience


def test_lines_are_read_as_they_come_and_only_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path)
    assert lines.new() == []
    with path.open("a") as file:
        file.write('{"batch": 1}\nnot JSON\n{"batch"')
        file.flush()
        assert lines.new() == [{"batch": 1}]
        assert lines.new() == []
        file.write(": 2}\n")
        file.flush()
        assert lines.new() == [{"batch": 2}]


async def test_a_child_that_must_run_and_ended_is_told_with_its_log(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = children.start("worker", [sys.executable, "-c", "print('out of paper'); exit(3)"], "Add paper.")
        child.process.wait(10)
        with pytest.raises(DemoError, match="worker ended with exit code 3") as error:
            children.check()
        assert error.value.advice == "Add paper."
        assert error.value.log == tmp_path / "worker.log"
        assert child.log.read_text() == "out of paper\n"


async def test_a_child_that_was_stopped_is_not_missed(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = children.start("worker", ["sleep", "60"], "")
        children.check()
        assert await children.stop(child) == -15
        children.check()


async def test_a_child_that_does_not_end_in_time_is_left_to_the_caller(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = children.start("worker", ["sleep", "60"], "")
        assert await children.finish(child, patience_s=0.1) is None
        assert child.process.poll() is None


async def test_leaving_stops_all_children_whatever_happened(tmp_path: Path) -> None:
    started: list[Child] = []

    async def fail() -> None:
        async with Children(tmp_path) as children:
            started.extend(children.start(name, ["sleep", "60"], "") for name in ("one", "two"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert [child.process.returncode for child in started] == [-15, -15]


async def test_a_child_that_ends_well_when_it_is_asked_to_is_well(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = await started(children, on_term="exit 0")
        await children.end(child, patience_s=10)
        assert child.process.returncode == 0


async def test_a_child_that_does_not_stop_fails_the_demo(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = await started(children, on_term="")
        with pytest.raises(DemoError, match="worker did not end within 0 s"):
            await children.end(child, patience_s=0.2)
        child.process.kill()


@pytest.mark.parametrize("crashing", ["gateway", "ingest"])
async def test_a_gateway_or_an_ingest_that_crashes_while_stopping_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashing: str
) -> None:
    async with watched(tmp_path, DeafKafka(failures=0), monkeypatch) as run:
        run.gateway, ingest = [
            await started(run.children, name, on_term="exit 3" if name == crashing else "exit 0")
            for name in ("gateway", "ingest")
        ]
        with pytest.raises(DemoError, match=f"{crashing} ended with exit code 3") as error:
            await demo_run._stop_gateway_and_ingest(run, ingest)
        assert error.value.log == tmp_path / f"{crashing}.log"


async def started(children: Children, name: str = "worker", *, on_term: str) -> Child:
    """A program that runs until SIGTERM, and then the shell command `on_term`. If that is empty, it ignores SIGTERM."""
    script = f"trap '{on_term}' TERM; echo ready; while :; do sleep 0.05; done"
    child = children.start(name, ["sh", "-c", script], "Look.")
    async with asyncio.timeout(patience(10)):
        while "ready" not in child.log.read_text():
            await asyncio.sleep(0.01)
    return child


def test_the_gateway_finds_the_boards_ports_and_not_the_links_that_are_being_made(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.boards.mkdir()
    ports = [folder.boards / f"tty-board-{number}" for number in (1, 9, 10, 64)]
    for port in ports:
        port.touch()
        port.with_name(f"{port.name}.new").touch()
    assert sorted(glob.glob(folder.serial_ports)) == sorted(map(str, ports))  # noqa: PTH207 - as the gateway does


def test_firmware_that_cannot_be_built_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "firmware-sim"
    sources.mkdir()
    (sources / "Makefile").write_text("sensor-mqtt:\n\tfalse\n")
    monkeypatch.setattr(avr, "PROJECT", tmp_path)
    with pytest.raises(DemoError, match="The firmware could not be built") as error:
        demo_run.build_firmware("mqtt")
    assert "DEMO_SERIAL_SENSORS=0" in error.value.advice


class DeafKafka(KafkaEnds):
    """A broker that fails `failures` times before it answers."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    async def read(self) -> dict[TopicPartition, int]:
        if self.failures > 0:
            self.failures -= 1
            raise KafkaConnectionError("no broker answers")
        return {TopicPartition("device-thermo", 0): 7}


async def test_a_wait_for_spark_tells_what_moves_although_no_batch_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path, DeafKafka(failures=0), monkeypatch) as run:
        run.progress.figures.in_kafka = 12_226
        words = "PySpark has told of 0 of 12,226 records, after each batch; it has written "
        assert run.cloud.in_words() == f"{words}nothing yet"
        for name, age_s in (("log/part-0.parquet", 5), ("windows/part-0.parquet", 3), ("log/.part-0.parquet.crc", 1)):
            path = run.folder.warehouse / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.utime(path, (0, time.time() - age_s))
        assert re.fullmatch(f"{words}2 files, the last one [3-9] s ago in windows/", run.cloud.in_words())


def broker_that_ended(log: Path) -> OwnBroker:
    with subprocess.Popen(["true"]) as process:
        return OwnBroker(9092, process, None, log)


@asynccontextmanager
async def watched(folder: Path, kafka: KafkaEnds, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """A run that only has `_watch`, without a pause between its looks."""
    monkeypatch.setattr(demo_run, "WATCH_INTERVAL_S", 0.0)
    broker = broker_that_ended(folder / "kafka.log")
    progress = Progress(Console(file=io.StringIO()))
    async with Uplink() as uplink, Children(folder) as children:
        settings = DemoSettings(60, 20, 1, 0, 0, kill=False)
        cloud = CloudSide(broker, kafka, folder / "warehouse", folder, progress.figures, "try fewer")
        yield Run(settings, Folder(folder), progress, children, uplink, cloud, mqtt_port=1883)


async def test_a_broker_that_does_not_answer_for_a_moment_does_not_end_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path, DeafKafka(failures=3), monkeypatch) as run:
        watch = asyncio.create_task(demo_run._watch(run))
        async with asyncio.timeout(patience(10)):
            while run.cloud.looks < 2 and not watch.done():
                await asyncio.sleep(0.01)
        assert not watch.done()
        watch.cancel()
        assert run.cloud.ends == {("device-thermo", 0): 7}
        # The buffer was looked at all the while, but only looks that Kafka answered count.
        assert len(run.chronicle.samples) >= run.cloud.looks + 3
        assert run.cloud.silent_since_s is None


async def test_a_broker_that_stays_silent_fails_the_demo_and_its_log_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_side, "KAFKA_SILENT_S_MAX", 0.05)
    async with watched(tmp_path, DeafKafka(failures=10**9), monkeypatch) as run:
        with pytest.raises(DemoError, match="no broker answers") as error:
            await asyncio.wait_for(demo_run._watch(run), patience(10))
        assert error.value.log == tmp_path / "kafka.log"
        assert run.cloud.looks == 0
