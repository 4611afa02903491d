"""Kills the daemon again and again under load, and compares what it acknowledged with what it kept.

The sensors are written by hand, apart from the gateway's own MQTT code and from every client library; they keep a
ledger.
"""

import asyncio
import json
import random
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aiokafka.errors import UnknownTopicOrPartitionError

from demo.kafka_broker import OwnBroker
from tests.support.gateways import (
    SLUICE,
    consume,
    free_port,
    header,
    uplink_told,
    wait_for_port,
    write_config,
)
from tests.support.kafka_admin import allow, alter_topic, forbid
from tests.support.netns import Network
from tests.support.waiting import patience

Kind = Literal["qos1-sequence", "qos2", "qos1"]
KINDS: tuple[Kind, ...] = ("qos1-sequence", "qos2", "qos1")
COMMAND: Sequence[str | Path] = (SLUICE, "run")
"""The daemon, to be given `--config`."""
UNREACHABLE = "127.0.0.1:1"
SENSORS_PER_KIND = 2
WINDOW = 20
"""Readings that a sensor has sent and not finished."""
HANG_UP_S = 0.4
"""Sensors hang up by themselves, on average after this: acknowledgements on their way are then lost."""
PAUSE_S = 0.005
FINISH_S = 30.0
"""Seconds that the sensors may take at the end, with the daemon left alone, until nothing is in flight."""
READY_S = 0.6
"""About what the daemon takes to start."""
STALL_S = 0.8
"""A slow Kafka stands still for up to so long, so that some readings wait for it in vain."""
PINGREQ = b"\xc0\x00"


@dataclass(frozen=True, slots=True)
class KillOutcome:
    """Result of a loop of kills, by kind of client."""

    cycles: int
    acknowledged: dict[Kind, int]
    missing: dict[Kind, int]
    """Acknowledged, and nowhere to be found."""
    duplicates: dict[Kind, int]
    """Stored under more than one identity. At least once is all that QoS 1 without a sequence can be."""
    refused_connections: int
    direct: int
    """Kills at which Kafka had readings before the disk."""


@dataclass(slots=True)
class _Exchange:
    number: int
    packet: bytes
    released: bool = False
    """QoS 2: PUBREC has come, what remains is PUBREL and PUBCOMP."""


@dataclass(slots=True)
class LedgerSensor:
    """An MQTT 3.1.1 client without I/O that writes down what it was told. Its session persists.

    Readings are numbered from 0; a payload carries its number as `n`.
    """

    kind: Kind
    device: str
    boot: str = "1-0a0b0c0d"
    window: int = WINDOW
    next_number: int = 0
    acknowledged: list[int] = field(default_factory=list)
    """PUBACK or PUBREC came: from there on it is the gateway's; in the order in which they came."""
    connected: bool = False
    refusals: int = 0
    """CONNACKs that let it not in."""
    pings: int = 0
    """PINGRESPs that came."""
    _in_flight: dict[int, _Exchange] = field(default_factory=dict)
    _packet_id: int = 0
    _received: bytearray = field(default_factory=bytearray)

    @property
    def topic(self) -> str:
        return f"device/{self.device}/{self.kind}"

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def unanswered(self) -> int:
        """Readings whose PUBACK or PUBREC has not come."""
        return sum(not exchange.released for exchange in self._in_flight.values())

    def connect(self, keep_alive_s: int = 60) -> bytes:
        """A new connection's first packet; clean session 0."""
        self.connected = False
        self._received.clear()
        client_id = self.device.encode()
        variable = b"\x00\x04MQTT\x04\x00" + keep_alive_s.to_bytes(2, "big")
        return _packet(0x10, variable + len(client_id).to_bytes(2, "big") + client_id)

    def publish(self, text: str = "") -> bytes:
        """The next reading."""
        number = self.next_number
        self.next_number += 1
        reading: dict[str, object] = {"n": number}
        if self.kind == "qos1-sequence":
            reading |= {"boot": self.boot, "seq": number}
        if text:
            reading["text"] = text
        while True:
            self._packet_id = self._packet_id % 65_535 + 1
            if self._packet_id not in self._in_flight:
                break
        topic = self.topic.encode()
        variable = len(topic).to_bytes(2, "big") + topic + self._packet_id.to_bytes(2, "big")
        packet = _packet(0x34 if self.kind == "qos2" else 0x32, variable + json.dumps(reading).encode())
        self._in_flight[self._packet_id] = _Exchange(number, packet)
        return packet

    def fill_window(self) -> bytes:
        """New readings, as many as may be in flight."""
        return b"".join(self.publish() for _ in range(self.window - len(self._in_flight)))

    def receive(self, data: bytes) -> bytes:
        """Take what came; give what is to be sent for it."""
        self._received += data
        return b"".join(self._answer(*packet) for packet in self._packets())

    def _answer(self, type_: int, body: bytes) -> bytes:
        match type_ >> 4:
            case 2:
                return self._connack(body[1])
            case 13:
                self.pings += 1
                return b""
        packet_id = int.from_bytes(body[:2], "big")
        exchange = self._in_flight.get(packet_id)
        match type_ >> 4:
            case 4 if exchange is not None:
                self.acknowledged.append(exchange.number)
                del self._in_flight[packet_id]
            case 5:
                if exchange is not None and not exchange.released:
                    self.acknowledged.append(exchange.number)
                    exchange.released = True
                return _pubrel(packet_id)
            case 7 if exchange is not None:
                del self._in_flight[packet_id]
        return b""

    def _connack(self, code: int) -> bytes:
        if code:
            self.refusals += 1
            return b""
        self.connected = True
        # Everything unfinished again, in the order in which it was first sent [MQTT-4.4.0-1, MQTT-4.6.0-1].
        return b"".join(
            _pubrel(packet_id) if exchange.released else bytes([exchange.packet[0] | 0x08]) + exchange.packet[1:]
            for packet_id, exchange in self._in_flight.items()
        )

    def _packets(self) -> Iterator[tuple[int, bytes]]:
        # What a server sends to a client that never subscribes is shorter than 128 bytes.
        while len(self._received) >= 2 and len(self._received) >= 2 + self._received[1]:
            end = 2 + self._received[1]
            packet = self._received[0], bytes(self._received[2:end])
            del self._received[:end]
            yield packet


async def serve(sensor: LedgerSensor, port: int, chance: random.Random, finishing: asyncio.Event) -> None:
    """Let a sensor publish as fast as it is acknowledged, through whatever happens; end when nothing is in flight."""
    while not (finishing.is_set() and not sensor.in_flight):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.03)
            continue
        try:
            async with asyncio.timeout(chance.expovariate(1 / HANG_UP_S)):
                await _converse(sensor, reader, writer, finishing)
        except (OSError, TimeoutError, EOFError):
            pass
        finally:
            writer.transport.abort()
        await asyncio.sleep(0.01)


async def _converse(
    sensor: LedgerSensor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, finishing: asyncio.Event
) -> None:
    writer.write(sensor.connect())
    while not (finishing.is_set() and not sensor.in_flight):
        data = await reader.read(65_536)
        if not data:
            raise EOFError
        writer.write(sensor.receive(data))
        if sensor.connected and not finishing.is_set():
            writer.write(sensor.fill_window())
        await writer.drain()
        await asyncio.sleep(PAUSE_S)


Trouble = Callable[[random.Random], AbstractAsyncContextManager[None]]
"""Something that happens to Kafka for a while."""


@dataclass(frozen=True, slots=True)
class Door:
    """Another way into Kafka, for the daemon alone."""

    bootstrap: str
    settings: str
    """Lines of the route, and sections of `gateway.toml`, that it needs."""
    kafka: str = ""
    """Lines of `[kafka]` that it needs."""


def kill_loop(  # noqa: PLR0913, PLR0917 - what a loop differs by
    cycles: int,
    directory: Path,
    seconds_per_cycle: float,
    bootstrap: str | None,
    seed: int,
    trouble: Trouble | None = None,
    door: Door | None = None,
) -> KillOutcome:
    """Start the daemon so often, and end it by `kill -9` after up to `seconds_per_cycle` under load.

    With a broker, what counts is what stands there in the end, and it has trouble in every second cycle. Without, what
    counts is what stands in the buffer. Raises TimeoutError where the sensors cannot finish at the end.
    """
    return asyncio.run(_kill_loop(cycles, directory, seconds_per_cycle, bootstrap, seed, trouble, door))


@asynccontextmanager
async def stalling(broker: OwnBroker, chance: random.Random, stall_s: float = STALL_S) -> AsyncIterator[None]:
    """Let a broker stand still again and again: it has what it was sent, or not, and does not answer."""

    async def stall() -> None:
        while True:
            broker.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(chance.uniform(0, stall_s))
            broker.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(chance.uniform(0, stall_s))

    stalls = asyncio.create_task(stall())
    try:
        yield
    finally:
        stalls.cancel()
        await asyncio.gather(stalls, return_exceptions=True)
        broker.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def paused(process: subprocess.Popen[bytes], _: random.Random) -> AsyncIterator[None]:
    """Let a node stand still. After a while the others miss it, and partitions that it alone holds have no leader."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def slowed(network: Network, kbit_per_s: int, _: random.Random) -> AsyncIterator[None]:
    """Let the path to Kafka take so much only. Its queue alone then takes longer than `disk_after_ms`."""
    network.slow(kbit_per_s)
    try:
        yield
    finally:
        network.heal()


@asynccontextmanager
async def set_otherwise(
    bootstrap: str, topic: str, chance: random.Random, **values: tuple[str, str]
) -> AsyncIterator[None]:
    """Give a topic's settings wrong values after a moment, and then the right ones."""

    async def alter(which: int) -> None:
        with suppress(UnknownTopicOrPartitionError):
            await alter_topic(bootstrap, topic, **{name: both[which] for name, both in values.items()})

    await asyncio.sleep(chance.uniform(0, 1))
    await alter(0)
    try:
        yield
    finally:
        await alter(1)


@asynccontextmanager
async def forbidden(bootstrap: str, user: str, topic: str, chance: random.Random) -> AsyncIterator[None]:
    """Take a user's right to write to a topic away after a moment, and give it back."""
    await asyncio.sleep(chance.uniform(0, 1))
    await forbid(bootstrap, user, topic, "WRITE")
    try:
        yield
    finally:
        await allow(bootstrap, user, topic, "WRITE")


async def _kill_loop(  # noqa: PLR0913, PLR0917
    cycles: int,
    directory: Path,
    seconds_per_cycle: float,
    bootstrap: str | None,
    seed: int,
    trouble: Trouble | None,
    door: Door | None,
) -> KillOutcome:
    direct = 0
    chance = random.Random(seed)  # noqa: S311 - repeatable is the point
    port = free_port()
    way = door or Door(bootstrap or UNREACHABLE, "")
    config = write_config(directory, way.bootstrap, port, f"kill{seed}", way.settings)
    config.write_text(config.read_text().replace("[kafka]", f"[kafka]\n{way.kafka}"))
    if bootstrap is None:
        # Each exchange of QoS 2 has two commits.
        config.write_text(config.read_text().replace("[buffer]", "[buffer]\ncommit_delay_ms = 0"))
    sensors = [LedgerSensor(kind, f"{kind}-{number}") for kind in KINDS for number in range(SENSORS_PER_KIND)]
    finishing = asyncio.Event()
    with config.with_suffix(".log").open("ab") as log:
        daemon: subprocess.Popen[bytes] | None = None

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen([*COMMAND, "--config", config], stderr=log)

        try:
            async with asyncio.TaskGroup() as tasks:
                for sensor in sensors:
                    tasks.create_task(serve(sensor, port, random.Random(chance.random()), finishing))  # noqa: S311
                for cycle in range(cycles):
                    daemon = start()
                    if chance.random() < 0.15:
                        # Now and then before it listens, or just when it does.
                        await asyncio.sleep(chance.uniform(0, 2 * READY_S))
                    else:
                        await asyncio.to_thread(wait_for_port, port, daemon)
                        until_kill_s = chance.uniform(0, seconds_per_cycle)
                        async with trouble(chance) if trouble is not None and cycle % 2 else nullcontext():
                            await asyncio.sleep(until_kill_s)
                        direct += await asyncio.to_thread(_is_direct, config)
                    daemon.send_signal(signal.SIGKILL)
                    await asyncio.to_thread(daemon.wait)
                daemon = start()
                finishing.set()
                await _finished(sensors)
            if bootstrap is not None:
                await drained(config)
        finally:
            if daemon is not None and daemon.poll() is None:
                daemon.send_signal(signal.SIGTERM)
                await asyncio.to_thread(daemon.wait, 30)
    if bootstrap is None:
        identities = _in_buffer(config.with_name("buffer.db"))
    else:
        identities = await _in_kafka(bootstrap, f"kill{seed}")
    return _compare(cycles, sensors, identities, direct)


def _is_direct(config: Path) -> bool:
    """Whether the daemon gives readings to Kafka first; False if it does not answer yet."""
    with suppress(Exception):
        return bool(uplink_told(config.with_name("buffer.db"))["direct_topics"])
    return False


async def _finished(sensors: Sequence[LedgerSensor]) -> None:
    async with asyncio.timeout(patience(FINISH_S)):
        while any(sensor.in_flight for sensor in sensors):
            await asyncio.sleep(0.05)


async def drained(config: Path) -> None:
    """Wait until no reading waits, nor is in the quarantine because of a topic that takes it by now."""
    async with asyncio.timeout(patience(120)):
        while _in_buffer(config.with_name("buffer.db")) or _quarantined(config.with_name("buffer.db")):
            await asyncio.sleep(0.5)


def _quarantined(path: Path) -> int:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM quarantine").fetchone()
        return int(count)


def _in_buffer(path: Path) -> Counter[tuple[str, int]]:
    """Rows of each reading in the buffer, by device and number."""
    counts: Counter[tuple[str, int]] = Counter()
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        for device, payload in connection.execute(
            "SELECT device, payload FROM reading JOIN series ON series.number = reading.series"
            " WHERE series.type = 'sluice.reading'"
        ):
            counts[device, json.loads(payload)["n"]] += 1
    return counts


async def _in_kafka(bootstrap: str, prefix: str) -> Counter[tuple[str, int]]:
    """Identities of each reading in Kafka. A record that was sent again has the same identity."""
    records = await consume(bootstrap, *(f"{prefix}-{kind}" for kind in KINDS))
    identities = {
        header(record, "ce_id"): (record.key.decode(), int(json.loads(record.value)["n"])) for record in records
    }
    return Counter(identities.values())


async def with_events(bootstrap: str, prefix: str) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Readings that stand in Kafka, by device and number: as binary records, and as structured events beside them."""
    events = await consume(bootstrap, *(f"structured-{prefix}-{kind}" for kind in KINDS))
    told = {(record.key.decode(), int(json.loads(record.value)["data"]["n"])) for record in events}
    return set(await _in_kafka(bootstrap, prefix)), told


def _compare(
    cycles: int, sensors: Sequence[LedgerSensor], identities: Counter[tuple[str, int]], direct: int
) -> KillOutcome:
    acknowledged: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    missing: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    duplicates: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for sensor in sensors:
        acknowledged[sensor.kind] += len(sensor.acknowledged)
        missing[sensor.kind] += sum((sensor.device, number) not in identities for number in sensor.acknowledged)
        duplicates[sensor.kind] += sum(identities[sensor.device, number] > 1 for number in range(sensor.next_number))
    refusals = sum(sensor.refusals for sensor in sensors)
    return KillOutcome(cycles, acknowledged, missing, duplicates, refusals, direct)


def _packet(type_: int, body: bytes) -> bytes:
    length = len(body)
    encoded = bytearray()
    while True:
        length, digit = divmod(length, 128)
        encoded.append(digit | (0x80 if length else 0))
        if not length:
            return bytes([type_]) + bytes(encoded) + body


def _pubrel(packet_id: int) -> bytes:
    return b"\x62\x02" + packet_id.to_bytes(2, "big")
