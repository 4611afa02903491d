"""Shared by the parts of the uplink's bench: a gateway, its backlog, live sensors, and its own report."""

import asyncio
import json
import random
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from demo.kafka_broker import free_ports
from gateway.buffer.buffer import Buffer
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.config import config_file
from gateway.intake.front_door import FrontDoor
from gateway.reading import Datum, Reading
from tests.bench.context import Bench, say
from tests.bench.processes import SLUICE, NotMeasuredError

DEVICES = 100
INTERVAL_US = 1_000_000
"""Each device measures once a second."""
STREAM = "thermo"
COUNTED = "counted"
"""The stream whose payloads carry the sensor's boot and sequence."""
FILL_READINGS = 5_000
"""In one commit."""
STATUS_S_MAX = 30.0
UNREACHABLE = "127.0.0.1:1"

CONFIG = """\
[gateway]
id = "{name}"
clock = "system"

[buffer]
path = "{directory}/buffer.db"
bytes_max = 8_000_000_000

[mqtt_listener]
port = {port}
anonymous = true

[kafka]
bootstrap = ["{bootstrap}"]
create_topics = true
replicas = 1
# The bench has one broker. It stands for a cluster whose replicas keep what they acknowledge.
one_replica_is_enough = true
events_topic = "{prefix}-events"
quarantine_topic = "{prefix}-quarantine"
{kafka}
[[routes]]
topic = "device/{{device}}/{{stream}}"
kafka = "{prefix}-{{stream}}"
identity = "{identity}"
"""


def write_config(  # noqa: PLR0913 - what a part may ask of a gateway, by name
    directory: Path, bootstrap: str, prefix: str, kafka: str = "", *, name: str = "bench", identity: str = "none"
) -> Path:
    """A gateway whose Kafka topics begin with `prefix`; `kafka` are further lines of `[kafka]`."""
    directory.mkdir(parents=True, exist_ok=True)
    port, *_ = free_ports(1)
    config = directory / "gateway.toml"
    config.write_text(
        CONFIG.format(
            directory=directory,
            bootstrap=bootstrap,
            prefix=prefix,
            kafka=kafka,
            name=name,
            port=port,
            identity=identity,
        )
    )
    return config


async def status_of(config: Path) -> dict[str, Any]:
    """The uplink in `sluice status --json`. Raises NotMeasuredError where the daemon does not answer."""
    process = await asyncio.create_subprocess_exec(
        SLUICE, "status", "--config", config, "--json", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(STATUS_S_MAX):
        told, errors = await process.communicate()
    daemon = json.loads(told)["daemon"] if told else None
    if not daemon:
        raise NotMeasuredError(f"sluice status has no answer of the daemon: {errors.decode().strip()}")
    uplink: dict[str, Any] = daemon["uplink"]
    return uplink


# -- what sensors send ----------------------------------------------------------------------------


class Payloads:
    """40 bytes of JSON: three values that drift by the device, their last digits noise, as real sensors' are."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - what sensors measure, no secret
        self._middle = [(15 + 12 * self._random.random(), 40 + 30 * self._random.random()) for _ in range(DEVICES)]

    def of(self, device: int) -> bytes:
        """A reading without a sequence."""
        celsius, humidity = self._middle[device]
        draw = self._random.random
        # +-0.5 degrees, +-0.5 %, +-0.5 mbar: 100, 100 and 10 values that are equally likely.
        text = f'{{"c":{celsius + draw():.2f},"rh":{humidity + draw():.2f},"mb":{1012 + draw():.1f},"v":3}}'
        return text.encode()

    def counted(self, device: int, sequence: int) -> bytes:
        """A reading with one value, and the sensor's boot and sequence."""
        celsius = self._middle[device][0] + self._random.random()
        return f'{{"boot":"b{device:04x}","seq":{sequence:<7d},"c":{celsius:.2f}}}'.encode()


def readings(rows: int, stream: str, begin_us: int, seed: int = 1) -> Iterator[list[Reading]]:
    """Yield `rows` readings, a commit's worth at a time: 100 devices once a second, not quite in step."""
    draw = random.Random(seed).random  # noqa: S311
    payloads = Payloads(seed)
    topics = [f"device/d{device:03d}/{stream}" for device in range(DEVICES)]
    step_us = INTERVAL_US // DEVICES
    made: list[Reading] = []
    for number in range(rows):
        sequence, device = divmod(number, DEVICES)
        payload = payloads.counted(device, sequence) if stream == COUNTED else payloads.of(device)
        topic = topics[device]
        made.append(
            Reading(topic, topic, Datum(received_us=begin_us + int((number + draw()) * step_us), payload=payload))
        )
        if len(made) == FILL_READINGS or number == rows - 1:
            yield made
            made = []


async def fill(config: Path, rows: int, stream: str = STREAM) -> float:
    """Put a backlog into a gateway's buffer, as an outage in an earlier boot left it; give the seconds that took.

    By the daemon's own intake and buffer, in this process: what MQTT would cost says nothing of the uplink, and a
    generator that publishes flat out gives thousands of readings the same time, which no sensors do.
    """
    settings = config_file.load(config)
    span_us = rows * INTERVAL_US // DEVICES
    clock = BootClock.constant(int(time.time() * 1e6) - span_us, 1_000)
    buffer = Buffer(settings.buffer, str(uuid.uuid4()), lambda: clock)
    door = FrontDoor(buffer, config_file.route_table(settings), settings.gateway, settings.kafka, boottime_us)
    began = time.monotonic()
    buffer.open()
    try:
        before: asyncio.Future[bool] | None = None
        for made in readings(rows, stream, 0):
            stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            door.take(made, stored.set_result)
            if before is not None and not await before:
                raise NotMeasuredError("the buffer does not take the backlog")
            before = stored
        if before is not None:
            await before
    finally:
        await buffer.close()
    return time.monotonic() - began


async def backlog(bench: Bench, rows: int, stream: str) -> Path:
    """The configuration of a stopped gateway with `rows` readings in its buffer, made once for a run."""
    directory = bench.directory / "filled" / f"{stream}-{rows}"
    if directory.exists():
        return directory / "gateway.toml"
    identity = "json" if stream == COUNTED else "none"
    config = write_config(directory, UNREACHABLE, "filled", identity=identity)
    seconds = await fill(config, rows, stream)
    size = sum(path.stat().st_size for path in directory.glob("buffer.db*") if path.is_file())
    say(f"{rows:,} readings put on disk in {seconds:.0f} s, {size / rows:.0f} bytes each")
    return config


def copy_backlog(source: Path, target: Path) -> None:
    """Give a gateway (by its configuration) the buffer of another that does not run."""
    for path in source.parent.glob("buffer.db*"):
        if path.is_file():
            shutil.copyfile(path, target.parent / path.name)


# -- live sensors ---------------------------------------------------------------------------------


class LiveSensors:
    """100 devices behind one MQTT connection, each with its share of `rate`, at even distances."""

    def __init__(self, writer: asyncio.StreamWriter, stream: str, rate: float) -> None:
        self._writer = writer
        self._rate = rate
        self._payloads = Payloads(seed=2)
        self._topics = [f"device/d{device:03d}/{stream}".encode() for device in range(DEVICES)]
        self.sent = 0
        self.acknowledged = 0

    async def publish(self) -> None:
        """For ever, without waiting for acknowledgements."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._writer.write(self._packet(self.sent % DEVICES))
            self.sent += 1
            due += 1 / self._rate
            await asyncio.sleep(due - loop.time())

    async def count(self, reader: asyncio.StreamReader) -> None:
        """Read PUBACKs, for ever."""
        while True:
            await reader.readexactly(4)
            self.acknowledged += 1

    def _packet(self, device: int) -> bytes:
        """PUBLISH (section 3.3), QoS 1."""
        topic, number = self._topics[device], self.sent % 65_535 + 1
        body = len(topic).to_bytes(2, "big") + topic + number.to_bytes(2, "big") + self._payloads.of(device)
        return bytes((0x32, len(body))) + body


@asynccontextmanager
async def live_sensors(port: int, stream: str, rate: float) -> AsyncIterator[LiveSensors]:
    """Sensors that publish for the length of a block; at its end all that was sent is acknowledged."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    # CONNECT (section 3.1): clean session, no keep-alive, a client id.
    writer.write(b"\x10\x10\x00\x04MQTT\x04\x02\x00\x00\x00\x04live")
    if await reader.readexactly(4) != b"\x20\x02\x00\x00":
        raise NotMeasuredError("the gateway does not take a sensor's connection")
    sensors = LiveSensors(writer, stream, rate)
    publishing = asyncio.create_task(sensors.publish(), name="publish")
    counting = asyncio.create_task(sensors.count(reader), name="count")
    try:
        yield sensors
        publishing.cancel()
        async with asyncio.timeout(STATUS_S_MAX):
            while sensors.acknowledged < sensors.sent:
                await asyncio.sleep(0.05)
    finally:
        publishing.cancel()
        counting.cancel()
        await asyncio.gather(publishing, counting, return_exceptions=True)
        writer.transport.abort()
        # The transport closes its socket in the loop's next round.
        await asyncio.sleep(0)
