"""A disk of 4 MB that others fill to the brim and empty again: no acknowledgement is a lie, nothing goes silently."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from demo.kafka_broker import Broker
from demo.uplink import Uplink
from gateway.buffer.schema import MIGRATIONS
from tests.support.gateways import consume, header, write_config
from tests.support.kill_loop import KINDS, PINGREQ, UNREACHABLE, LedgerSensor
from tests.support.small_disk import SmallDisk, daemon_on, mount_refusal, small_disk
from tests.support.waiting import patience

REFUSAL = mount_refusal()
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=REFUSAL or "")
TEXT = "x" * 600
PING_S = 0.2
HELD_S = 1.5
"""Seconds without an acknowledgement after which the sensors count as held."""


@dataclass(slots=True)
class Talk:
    """A sensor that stays connected: it publishes while `flowing`, and asks every `PING_S` whether it is heard."""

    sensor: LedgerSensor
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    pings: int = 0
    longest_silence_s: float = 0.0
    """Between a PINGREQ and its PINGRESP."""

    async def run(self, port: int) -> None:
        """Talk until cancelled. Raises EOFError where the gateway hangs up."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(self.sensor.connect(keep_alive_s=2))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(reader, writer))
                tasks.create_task(self._publish(writer))
                tasks.create_task(self._ping(writer))
        finally:
            writer.transport.abort()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(self.sensor.receive(data))
        raise EOFError(f"{self.sensor.device} was hung up on")

    async def _publish(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await self.flowing.wait()
            if self.sensor.connected and self.sensor.in_flight < self.sensor.window:
                writer.write(self.sensor.publish(TEXT))
                await writer.drain()
            await asyncio.sleep(0.002)

    async def _ping(self, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PING_S)
            if not self.sensor.connected:
                continue
            answered = self.sensor.pings
            asked_s = loop.time()
            writer.write(PINGREQ)
            while self.sensor.pings == answered:
                await asyncio.sleep(0.01)
                self.longest_silence_s = max(self.longest_silence_s, loop.time() - asked_s)
            self.pings += 1


@asynccontextmanager
async def talking(talks: list[Talk], port: int) -> AsyncIterator[None]:
    """Let the sensors talk around a block, flowing at its beginning; a hang-up ends it with an error."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(talk.run(port)) for talk in talks]
        for talk in talks:
            talk.sensor.connected = False
            talk.flowing.set()
        # A gateway that takes nothing lets nobody in: what goes wrong then goes wrong later.
        while not all(talk.sensor.connected for talk in talks):
            await asyncio.sleep(0.01)
        yield
        for task in running:
            task.cancel()


def sensors(window: int = 40) -> list[LedgerSensor]:
    return [LedgerSensor(kind, kind, window=window) for kind in KINDS]


def write_small_config(disk: SmallDisk, directory: Path, port: int, bootstrap: str, when_full: str) -> Path:
    config = write_config(directory, bootstrap, port, "full")
    buffer = f'[buffer]\npath = "{disk.inside}/buffer.db"\nbytes_max = 2000000\nfair_from = 1.0\nfree_bytes_min = 0\n'
    text = config.read_text().replace(
        f'[buffer]\npath = "{directory}/buffer.db"\n', f'{buffer}when_full = "{when_full}"\n'
    )
    assert when_full in text
    config.write_text(text)
    return config


def acknowledged(of: list[LedgerSensor]) -> int:
    return sum(len(sensor.acknowledged) for sensor in of)


async def held(disk: SmallDisk, of: list[LedgerSensor]) -> None:
    """Let others take all of the disk, and wait until the gateway has stopped to acknowledge.

    A checkpoint may give back what its file was grown by beforehand; and it stops while there is a little room yet.
    """
    async with asyncio.timeout(patience(30)):
        before = -1
        while before != acknowledged(of) or disk.free_bytes():
            before = acknowledged(of)
            disk.fill()
            await asyncio.sleep(HELD_S)


async def answered(talks: list[Talk], pings: int) -> None:
    """Wait until each sensor has had so many answers more."""
    wanted = [talk.pings + pings for talk in talks]
    async with asyncio.timeout(patience(20)):
        while any(talk.pings < enough for talk, enough in zip(talks, wanted, strict=True)):
            await asyncio.sleep(0.05)


async def finished(talks: list[Talk]) -> None:
    """Let nothing new come, and wait until nothing is in flight."""
    for talk in talks:
        talk.flowing.clear()
    async with asyncio.timeout(patience(20)):
        while any(talk.sensor.in_flight for talk in talks):
            await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Found:
    """Content of a buffer: each device's readings in the buffer's order, and the counted losses."""

    numbers: dict[str, list[int]]
    lost: Counter[str]


LOOK = """
import json, sqlite3, sys
connection = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
connection.execute("BEGIN")
rows = connection.execute(
    "SELECT device, type, payload FROM reading JOIN series ON series.number = reading.series ORDER BY lane, sequence"
)
print(json.dumps({
    "intact": connection.execute("PRAGMA integrity_check").fetchone(),
    "rows": [(device, type_, payload.decode()) for device, type_, payload in rows],
    "lost": connection.execute("SELECT device, sum(count) FROM loss GROUP BY device").fetchall(),
}))
"""


def found(disk: SmallDisk) -> Found:
    """Look at the buffer without writing to it."""
    command = [*disk.enter, sys.executable, "-c", LOOK, str(disk.inside / "buffer.db")]
    looked = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=patience(20)).stdout)
    assert looked["intact"] == ["ok"]
    numbers: dict[str, list[int]] = {kind: [] for kind in KINDS}
    lost: Counter[str] = Counter()
    for device, type_, payload in looked["rows"]:
        if type_ == "sluice.reading":
            numbers[device].append(json.loads(payload)["n"])
        elif type_ == "sluice.gateway.loss":
            body = json.loads(payload)
            lost[body["device"] or ""] += body["count"]
    for device, count in looked["lost"]:
        lost[device] += count
    return Found(numbers, lost)


READER = """
import sqlite3, sys
connection = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
connection.execute("BEGIN")
print(connection.execute("SELECT count(*) FROM reading").fetchone(), flush=True)
sys.stdin.read()
"""


@contextmanager
def reading(disk: SmallDisk) -> Iterator[None]:
    """Have another program read the buffer around a block, as an export does: it sees the file as it is now."""
    command = [*disk.enter, sys.executable, "-c", READER, str(disk.inside / "buffer.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline().startswith(b"(")
        yield
        reader.communicate()


def log_of(config: Path) -> str:
    return config.with_suffix(".log").read_text()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


@pytest.mark.alone
async def test_a_full_disk_holds_the_readings_answers_pings_and_goes_on_by_itself(
    disk: SmallDisk, tmp_path: Path, port: int
) -> None:
    config = write_small_config(disk, tmp_path, port, UNREACHABLE, "refuse")
    talks = [Talk(sensor) for sensor in sensors()]
    devices = [talk.sensor for talk in talks]
    with daemon_on(disk, config, port):
        async with talking(talks, port):
            await asyncio.sleep(0.5)
            await held(disk, devices)
            while_full = [len(sensor.acknowledged) for sensor in devices]
            told = {sensor.device: set(sensor.acknowledged) for sensor in devices}
            # Beside the sensors, which want their answers meanwhile.
            on_disk = await asyncio.to_thread(found, disk)
            for device, numbers in told.items():
                assert numbers <= set(on_disk.numbers[device]), "an acknowledgement was a lie"
            await answered(talks, 5)
            assert all(sensor.unanswered > 0 for sensor in devices), "nothing waits: the disk was not full"
            disk.empty()
            async with asyncio.timeout(patience(5)):
                while [len(sensor.acknowledged) for sensor in devices] == while_full:
                    await asyncio.sleep(0.05)
            await finished(talks)
        assert max(talk.longest_silence_s for talk in talks) < 2
        assert "buffer full" in log_of(config)
    at_the_end = found(disk)
    for sensor in devices:
        # Held PUBLISHes were acknowledged on the same connection: all that was sent is there, once and in order.
        assert at_the_end.numbers[sensor.device] == list(range(sensor.next_number))
        assert sensor.acknowledged == list(range(sensor.next_number))
    assert not at_the_end.lost


async def test_a_kill_and_a_start_on_a_full_disk_cost_nothing(disk: SmallDisk, tmp_path: Path, port: int) -> None:
    config = write_small_config(disk, tmp_path, port, UNREACHABLE, "refuse")
    talks = [Talk(sensor) for sensor in sensors()]
    devices = [talk.sensor for talk in talks]
    with daemon_on(disk, config, port) as process:
        async with talking(talks, port):
            await held(disk, devices)
        process.send_signal(signal.SIGKILL)
        process.wait()
    disk.fill()  # of what hung up it may have stored events, and given room back
    with daemon_on(disk, config, port):
        on_disk = found(disk)
        for sensor in devices:
            assert set(sensor.acknowledged) <= set(on_disk.numbers[sensor.device])
        disk.empty()
        async with asyncio.timeout(patience(20)):
            while True:
                # A full buffer answers CONNACK 3: a sensor tries again.
                try:
                    async with talking(talks, port):
                        await finished(talks)
                except* EOFError:
                    await asyncio.sleep(0.2)
                else:
                    break
    at_the_end = found(disk)
    for sensor in devices:
        numbers = at_the_end.numbers[sensor.device]
        assert set(numbers) == set(range(sensor.next_number))
        if sensor.kind != "qos1":
            assert numbers == list(range(sensor.next_number))


async def test_drop_oldest_accounts_for_each_reading_that_is_gone(disk: SmallDisk, tmp_path: Path, port: int) -> None:
    config = write_small_config(disk, tmp_path, port, UNREACHABLE, "drop-oldest")
    talks = [Talk(sensor) for sensor in sensors()]
    devices = [talk.sensor for talk in talks]
    with daemon_on(disk, config, port) as process:
        async with talking(talks, port):
            await asyncio.sleep(0.5)
            disk.fill()
            full_at = acknowledged(devices)
            # More than the 2 MB that the buffer may take, with not a byte free beside it.
            async with asyncio.timeout(patience(40)):
                while acknowledged(devices) < full_at + 5_000:
                    await asyncio.sleep(0.1)
                    disk.fill()  # others take whatever the file gives back
            await finished(talks)
        account(devices, found(disk))
        process.send_signal(signal.SIGKILL)
        process.wait()
    account(devices, found(disk))
    with daemon_on(disk, config, port):
        await asyncio.sleep(1)
    account(devices, found(disk))
    assert "the oldest" in log_of(config)


UPGRADE = """
import asyncio, sys
from pathlib import Path
from unittest import mock
from gateway.buffer import schema
from gateway.buffer.room import Room
from gateway.settings import BufferSettings
from tests.gateway.buffer.test_stored_rows import former_file
from tests.support.buffers import confirm, opened, rows
from tests.support.waiting import until

path, version = Path(sys.argv[1]), int(sys.argv[2])
payloads = former_file(path, version, rows_each=1_000)
with mock.patch.object(schema, "MIGRATIONS", schema.MIGRATIONS[:version]):
    # As each version leaves its file for a start on a full disk.
    room = Room(BufferSettings(path=path, bytes_max=2_000_000), schema.connect(path))
    room.prepare()
    room.close()
print("made", flush=True)
sys.stdin.readline()

async def upgrade():
    async with opened(path, bytes_max=2_000_000, free_bytes_min=0) as buffer:
        found = await rows(buffer)
        assert [row.datum.payload for row in found] == payloads
        await confirm(buffer, found[:1_500])
        await until(lambda: buffer.state.rows == 500)
    async with opened(path, bytes_max=2_000_000, free_bytes_min=0) as buffer:
        assert [row.datum.payload for row in await rows(buffer)] == payloads[1_500:]

asyncio.run(upgrade())
print("drained", flush=True)
"""


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
def test_a_file_of_a_former_version_is_taken_on_and_drains_on_a_full_disk(disk: SmallDisk, version: int) -> None:
    command = [*disk.enter, sys.executable, "-c", UPGRADE, str(disk.inside / "buffer.db"), str(version)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as upgrade:
        assert upgrade.stdin is not None
        assert upgrade.stdout is not None
        assert upgrade.stdout.readline() == b"made\n"
        disk.fill()
        assert disk.free_bytes() == 0
        upgrade.stdin.write(b"\n")
        upgrade.stdin.flush()
        assert upgrade.stdout.readline() == b"drained\n"


def account(devices: list[LedgerSensor], there: Found) -> None:
    """Check that each acknowledged reading is there or counted as lost, exactly, and that the newest are kept."""
    assert sum(there.lost[sensor.device] for sensor in devices) > 0
    for sensor in devices:
        numbers = there.numbers[sensor.device]
        assert len(numbers) + there.lost[sensor.device] == len(sensor.acknowledged), sensor.device
        assert numbers == list(range(numbers[0], sensor.next_number))


@pytest.mark.kafka
async def test_with_kafka_reachable_again_a_full_disk_drains_by_itself(
    kafka: Broker, disk: SmallDisk, tmp_path: Path, port: int
) -> None:
    prefix = f"full{random.randrange(10**6)}"  # noqa: S311
    talks = [Talk(sensor) for sensor in sensors()]
    devices = [talk.sensor for talk in talks]
    async with Uplink() as uplink:
        config = write_small_config(disk, tmp_path, port, f"127.0.0.1:{uplink.port}", "refuse")
        config.write_text(config.read_text().replace('"full-', f'"{prefix}-'))
        with daemon_on(disk, config, port):
            async with talking(talks, port):
                await asyncio.sleep(0.5)
                await held(disk, devices)
                # A reading that waits is acknowledged when Kafka has taken others: the disk stays full.
                before = acknowledged(devices)
                with reading(disk):
                    # SQLite then cannot write its WAL from the start again, and there is no room behind its end.
                    uplink.open(int(kafka.bootstrap.rpartition(":")[2]))
                    async with asyncio.timeout(patience(20)):
                        while "buffer cannot be read or written" not in log_of(config):
                            await asyncio.sleep(0.05)
                            disk.fill()
                async with asyncio.timeout(patience(30)):
                    while acknowledged(devices) < before + 500:
                        await asyncio.sleep(0.05)
                        disk.fill()  # others take whatever the file gives back
                await finished(talks)
            async with asyncio.timeout(patience(20)):
                while any(found(disk).numbers.values()):
                    await asyncio.sleep(0.2)
    for sensor in devices:
        records = await consume(kafka.bootstrap, f"{prefix}-{sensor.kind}")
        identities = {header(record, "ce_id"): json.loads(record.value)["n"] for record in records}
        assert sorted(identities.values()) == list(range(sensor.next_number))
