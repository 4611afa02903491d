"""Records what the unmodified daemon writes, syncs, sends and hears, by strace; plays back what a card held then."""

import asyncio
import json
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from demo.kafka_broker import OwnBroker
from gateway.buffer.file import BufferFile
from gateway.clock.gateway_clock import BootClock
from gateway.settings import BufferSettings
from tests.support.gateways import SLUICE, consume, daemon, free_port, wait_for_port, write_config
from tests.support.kafka_wire import ProducerTalk, Reading
from tests.support.kill_loop import KINDS, UNREACHABLE, LedgerSensor, drained, stalling
from tests.support.power_cut_vfs import CardContents, Survival
from tests.support.waiting import patience

CALLS = "pwrite64,write,fsync,fdatasync,ftruncate,fallocate,unlink,sendto,sendmsg,recvfrom"
TOPICS = "recorded"
"""Prefix of the topics in Kafka."""
PAUSE_S = 0.02
MEMORY = Path("/dev/shm")  # noqa: S108 - where a sync costs nothing
SURVIVALS: tuple[Survival, ...] = get_args(Survival)
CLOCK = BootClock.constant(1_700_000_000_000_000, 1_000)

_LINE = re.compile(r"(?P<pid>\d+) +(?P<name>\w+)\((?P<rest>.*)")
_RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. (?P<name>\w+) resumed>.*\) += (?P<result>-?\d+)")
_RESULT = re.compile(r"\) += (?P<result>-?\d+)[^\"]*$")
_DESCRIPTOR = re.compile(r"\d+<(?P<target>TCP:\[[^\]]*\]|[^>]*)>")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_CONNECTION = re.compile(r"TCP:\[127\.0\.0\.1:(?P<own>\d+)->127\.0\.0\.1:(?P<peer>\d+)\]")
_NUMBERS = re.compile(r", (\d+)(?=[,) ])")

Act = Literal["write", "truncate", "grow", "sync", "delete", "send", "ask", "hear"]
"""The last two are of Kafka."""
AT_END: tuple[Act, ...] = ("sync", "hear")


@dataclass(slots=True)
class Step:
    """One system call: what goes out counts from its beginning; a sync, and what Kafka says, from its end."""

    act: Act
    path: str = ""
    port: int = 0
    """Port of the client that a send goes to, or the daemon's own port of a connection with Kafka."""
    offset: int = 0
    """In the file; of a truncation, the size."""
    data: bytes = b""
    result: int = -1


@dataclass(slots=True)
class Record:
    """System calls of a daemon, and the clients that it served."""

    directory: Path
    steps: list[Step] = field(default_factory=list)
    sensors: list[LedgerSensor] = field(default_factory=list)
    ports: dict[int, LedgerSensor] = field(default_factory=dict)
    """The sensors by the port that they connect from."""


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    moments: int
    syncs: int
    acknowledged: int
    """In the whole record."""
    missing: int
    """Acknowledged before a moment, and neither on the card after it nor acknowledged by Kafka, over all moments."""
    duplicates: int
    corrupt: int
    kafka_alone: int
    """Acknowledged before a moment, and not on the card after it, over all moments."""
    unsent: int
    """Acknowledged before a moment, and not in Kafka after a start, over the moments that one followed."""


def strace_refusal() -> str | None:
    """Why strace cannot be used here; None where it can."""
    try:
        ended = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "strace is not installed"
    return None if ended.returncode == 0 else f"strace is not permitted here: {ended.stderr.strip()[:100]}"


@contextmanager
def traced_daemon(config: Path, port: int, *options: str) -> Iterator[int]:
    """`sluice run` under strace, listening; gives the daemon's own process id. Stopped by SIGTERM at the end."""
    with config.with_suffix(".log").open("ab") as log:
        command = ["strace", "-f", *options, str(SLUICE), "run", "--config", str(config)]
        strace = subprocess.Popen(command, stderr=log)
        daemon = 0
        try:
            wait_for_port(port, strace)
            # strace keeps signals to itself.
            daemon = int(Path(f"/proc/{strace.pid}/task/{strace.pid}/children").read_text().split()[0])
            yield daemon
        finally:
            if strace.poll() is None:
                if daemon:
                    subprocess.run(["kill", "-TERM", str(daemon)], check=False)
                else:
                    strace.send_signal(signal.SIGKILL)
            strace.wait(30)


def record(directory: Path, seconds: float, broker: OwnBroker | None = None) -> Record:
    """Let a daemon serve a sensor of each kind for so long, and write down what it does to its disk and its sockets.

    A broker answers at once, or late.
    """
    port = free_port()
    config = write_config(directory, UNREACHABLE if broker is None else broker.bootstrap, port, TOPICS)
    # A small buffer, whose WAL is begun anew every few commits. On a slow machine, Kafka has longer to come first.
    small = "[buffer]\nbytes_max = 1000000\nfair_from = 1\ncommit_delay_ms = 0\n"
    small += f"disk_after_ms = {1000 * patience(0.5):.0f}"
    readable = '[kafka]\ncompression = "none"'
    config.write_text(config.read_text().replace("[buffer]", small).replace("[kafka]", readable))
    trace = directory / "trace"
    recorded = Record(directory, sensors=[LedgerSensor(kind, kind, window=5) for kind in KINDS])
    options = ("--seccomp-bpf", "-yy", "-xx", "-s", "2000000", "-o", str(trace), "-e", f"trace={CALLS}")
    with traced_daemon(config, port, *options):
        asyncio.run(_serve(recorded, port, seconds, broker))
    brokers_port = None if broker is None else broker.port
    recorded.steps = list(_steps(trace, _Endpoints(str(directory / "buffer.db"), port, brokers_port)))
    return recorded


async def _serve(recorded: Record, port: int, seconds: float, broker: OwnBroker | None) -> None:
    async with asyncio.timeout(seconds + 20), asyncio.TaskGroup() as tasks:
        serving = [tasks.create_task(_converse(recorded, sensor, port, seconds)) for sensor in recorded.sensors]
        if broker is not None:
            await asyncio.sleep(seconds / 2)
            async with stalling(broker, random.Random(1)):  # noqa: S311
                await asyncio.wait(serving)


async def _converse(recorded: Record, sensor: LedgerSensor, port: int, seconds: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    recorded.ports[writer.get_extra_info("sockname")[1]] = sensor
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    writer.write(sensor.connect())
    while loop.time() < end or sensor.in_flight:
        data = await reader.read(65_536)
        if not data:
            raise EOFError(f"{sensor.device} was hung up on")
        writer.write(sensor.receive(data))
        if loop.time() < end:
            writer.write(sensor.fill_window())
        await asyncio.sleep(PAUSE_S)
    writer.transport.abort()


@dataclass(frozen=True, slots=True)
class _Endpoints:
    """The files and sockets that matter."""

    buffer_path: str
    listening_port: int
    brokers_port: int | None


def _steps(trace: Path, of: _Endpoints) -> Iterator[Step]:
    """Lines of strace about the buffer's files, the listener's connections or those with Kafka, in order."""
    steps: list[Step] = []
    begun: dict[str, Step] = {}
    with trace.open() as lines:
        for line in lines:
            resumed = _RESUMED.match(line)
            if resumed is not None:
                step = begun.pop(resumed["pid"], None)
                if step is not None:
                    step.result = int(resumed["result"])
                    if step.act in AT_END:
                        step.data = _decoded(line)
                        steps.append(step)
                continue
            started = _LINE.match(line)
            step = None if started is None else _step(started["name"], started["rest"], of)
            if step is None or started is None:
                continue
            result = _RESULT.search(line)
            if result is None:
                begun[started["pid"]] = step
                if step.act in AT_END:
                    continue
            else:
                step.result = int(result["result"])
            steps.append(step)
    return (step for step in steps if step.result >= 0)


def _step(name: str, rest: str, of: _Endpoints) -> Step | None:
    found = _DESCRIPTOR.match(rest)
    if name == "unlink":
        return _file_step(name, _decoded(rest).decode(), rest, of.buffer_path)
    if found is None:
        return None
    target = found["target"]
    connection = _CONNECTION.match(target)
    if connection is not None:
        own, peer, sends = int(connection["own"]), int(connection["peer"]), name != "recvfrom"
        if own == of.listening_port and sends:
            return Step("send", port=peer, data=_decoded(rest))
        if peer == of.brokers_port:
            return Step("ask" if sends else "hear", port=own, data=_decoded(rest))
    elif target.startswith("\\x"):
        path = bytes.fromhex(target.replace("\\x", "")).decode()
        return _file_step(name, path, rest[found.end() :], of.buffer_path)
    return None


def _file_step(name: str, path: str, rest: str, buffer_path: str) -> Step | None:
    is_sync = name in {"fsync", "fdatasync"}
    # The -shm file is memory that is shared, not a file that is kept: SQLite makes it anew.
    if path not in {buffer_path, f"{buffer_path}-wal", f"{buffer_path}-journal"}:
        return Step("sync", path) if is_sync and path == str(Path(buffer_path).parent) else None
    numbers = [int(number) for number in _NUMBERS.findall(_STRING.sub("", rest))]
    match name:
        case "fsync" | "fdatasync":
            step = Step("sync", path)
        case "unlink":
            step = Step("delete", path)
        case "ftruncate":
            step = Step("truncate", path, offset=numbers[0])
        case "fallocate":
            step = Step("grow", path, offset=numbers[-2] + numbers[-1])
        case "pwrite64":
            step = Step("write", path, offset=numbers[-1], data=_decoded(rest))
        case _:
            raise ValueError(
                f"the daemon changes its buffer by a call that is not understood here: {name}({rest[:200]}"
            )
    return step


def _decoded(rest: str) -> bytes:
    return b"".join(bytes.fromhex(text.replace("\\x", "")) for text in _STRING.findall(rest))


def replay(  # noqa: PLR0913
    recorded: Record,
    moments: int,
    seed: int,
    *,
    heed_syncs: bool = True,
    broker: OwnBroker | None = None,
    starts: int = 0,
) -> ReplayOutcome:
    """Cut the power at so many moments: before and after syncs, and anywhere in between; count what is missing.

    Without `heed_syncs` nothing counts as synced: the replay must then find that something is missing. After `starts`
    of the cuts, the daemon starts with the card, and the broker that the record was made with.
    """
    chance = random.Random(seed)  # noqa: S311 - repeatable is the point
    syncs = [number for number, step in enumerate(recorded.steps) if step.act == "sync"]
    # The sends that a sync allows follow it: just behind them is where a lie would show.
    sends = [number + 1 for number, step in enumerate(recorded.steps) if step.act == "send"]
    around = [*syncs, *(number + 1 for number in syncs), *sends]
    chosen = set(chance.sample(around, min(len(around), moments * 2 // 3)))
    chosen |= {chance.randrange(len(recorded.steps)) for _ in range(moments - len(chosen))} | {len(recorded.steps)}
    followed = set(chance.sample(sorted(chosen), starts))
    moment = _Moment()
    missing = duplicates = corrupt = kafka_alone = unsent = 0
    for number in range(len(recorded.steps) + 1):
        if number in chosen:
            with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as image:
                moment.card.image(Path(image, "card"), chance, chance.choice(SURVIVALS))
                if number in followed and broker is not None:
                    shutil.copytree(Path(image, "card"), Path(image, "started"))
                    sent = asyncio.run(_sent_after_start(Path(image, "started"), broker))
                    unsent += len(moment.acknowledged - moment.in_kafka - sent)
                try:
                    found = _found(Path(image, "card"))
                except Exception:  # noqa: BLE001 - however it says that it cannot use the card
                    corrupt += 1
                else:
                    kafka_alone += len(moment.acknowledged - set(found))
                    missing += len(moment.acknowledged - set(found) - moment.in_kafka)
                    duplicates += sum(count > 1 for count in found.values())
        if number < len(recorded.steps):
            _play(recorded, moment, recorded.steps[number], heed_syncs=heed_syncs)
    return ReplayOutcome(
        len(chosen), len(syncs), len(moment.acknowledged), missing, duplicates, corrupt, kafka_alone, unsent
    )


@dataclass(slots=True)
class _Moment:
    """What was so at a moment of a record."""

    card: CardContents = field(default_factory=CardContents)
    acknowledged: set[Reading] = field(default_factory=set)
    """What sensors were told."""
    in_kafka: set[Reading] = field(default_factory=set)
    """What the daemon was told by Kafka."""
    talks: defaultdict[int, ProducerTalk] = field(default_factory=lambda: defaultdict(ProducerTalk))


async def _sent_after_start(card: Path, broker: OwnBroker) -> set[Reading]:
    """Start the daemon with a card, and return the readings that it then sends to Kafka."""
    topics = [f"{TOPICS}-{kind}" for kind in KINDS]
    before = Counter((record.topic, record.partition) for record in await consume(broker.bootstrap, *topics))
    port = free_port()
    config = write_config(card, broker.bootstrap, port, TOPICS)
    with daemon(config, port):
        await drained(config)
    return {
        (record.key.decode(), int(json.loads(record.value)["n"]))
        for record in await consume(broker.bootstrap, *topics)
        if record.offset >= before[record.topic, record.partition]
    }


def _play(recorded: Record, moment: _Moment, step: Step, *, heed_syncs: bool) -> None:
    card = moment.card
    match step.act:
        case "write":
            card.opened(step.path).pending.append((step.offset, step.data[: step.result]))
        case "grow":
            card.opened(step.path).pending.append((step.offset, b""))
        case "truncate":
            card.opened(step.path).pending.append(step.offset)
        case "delete":
            card.deleted(step.path)
        case "sync" if heed_syncs:
            if Path(step.path) == recorded.directory:
                card.directory_synced()
            else:
                card.synced(step.path)
        case "send" if step.port in recorded.ports:
            sensor = recorded.ports[step.port]
            moment.acknowledged |= {(sensor.device, number) for number in _acknowledged(step.data[: step.result])}
        case "ask":
            moment.talks[step.port].ask(step.data[: step.result])
        case "hear":
            moment.in_kafka |= moment.talks[step.port].answer(step.data[: step.result])


def _acknowledged(packets: bytes) -> Iterator[int]:
    """The readings that PUBACKs and PUBRECs are about: their packet ids are counted from 1 in the readings' order."""
    at = 0
    while at < len(packets):
        end = at + 2 + packets[at + 1]
        if packets[at] >> 4 in (4, 5):
            yield int.from_bytes(packets[at + 2 : at + 4], "big") - 1
        at = end


def _found(image: Path) -> Counter[Reading]:
    """Readings that the real code finds on the card. Raises sqlite3.Error if it cannot use it."""
    settings = BufferSettings(path=image / "buffer.db", free_bytes_min=0)
    with closing(BufferFile(settings, "after", lambda: CLOCK, Counter())) as file:
        (intact,) = file.connection.execute("PRAGMA integrity_check").fetchone()
        if intact != "ok":
            raise sqlite3.DatabaseError(intact)
        payloads: Sequence[tuple[str, bytes]] = file.connection.execute(
            "SELECT device, payload FROM reading JOIN series ON series.number = reading.series"
            " WHERE series.type = 'sluice.reading'"
        ).fetchall()
    return Counter((device, int(json.loads(payload)["n"])) for device, payload in payloads)
