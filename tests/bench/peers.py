"""The peers that the gateway is compared with, behind the same mosquitto: Telegraf and Benthos with their buffers."""

import asyncio
import shutil
import string
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from demo.child_process import log_tail
from demo.kafka_broker import free_ports
from tests.bench.processes import Measured, NotMeasuredError, answers, spawn, stop
from tests.bench.report import ROOT

HERE = Path(__file__).resolve().parent
PEERS = ROOT / "build" / "peers"
SUBSCRIBE_S_MAX = 30.0
FILTER = "device/+/thermo"


@asynccontextmanager
async def mosquitto(directory: Path) -> AsyncIterator[Measured]:
    """A mosquitto that drops nothing, for the length of a block."""
    program = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        raise NotMeasuredError("mosquitto is not installed: make bench-gateway installs it")
    port, *_ = free_ports(1)
    config = _write(HERE / "mosquitto.conf", directory / "mosquitto.conf", port=port)
    measured = spawn([program, "-c", config], directory, port, "mosquitto.log")
    try:
        await answers(measured)
        yield measured
    finally:
        stop(measured)


@asynccontextmanager
async def telegraf(
    directory: Path, broker: Measured, bootstrap: str, topic: str, strategy: str
) -> AsyncIterator[Measured]:
    """Telegraf with the buffer strategy `disk` or `memory`, subscribed."""
    config = _write(
        HERE / "telegraf.conf",
        directory / "telegraf.conf",
        port=broker.port,
        bootstrap=bootstrap,
        topic=topic,
        directory=directory,
        strategy=strategy,
    )
    async with _peer("telegraf", ["--config", str(config)], directory, broker) as measured:
        yield measured


@asynccontextmanager
async def benthos(directory: Path, broker: Measured, bootstrap: str, topic: str, batch: int) -> AsyncIterator[Measured]:
    """Benthos with its SQLite buffer, subscribed; `batch` messages at a time go into the buffer."""
    config = _write(
        HERE / "benthos" / "benthos.yaml",
        directory / "benthos.yaml",
        port=broker.port,
        bootstrap=bootstrap,
        topic=topic,
        directory=directory,
        batch=batch,
    )
    async with _peer("benthos", ["-c", str(config)], directory, broker) as measured:
        yield measured


@asynccontextmanager
async def _peer(name: str, arguments: list[str], directory: Path, broker: Measured) -> AsyncIterator[Measured]:
    program = PEERS / name
    if not program.exists():
        raise NotMeasuredError(
            f"{name} is not built: it needs Go (on the PATH, or in /usr/local/go) and the Go module proxy; "
            "then run make peers, which says what went wrong"
        )
    measured = spawn([program, *arguments], directory, broker.port, f"{name}.log")
    try:
        await subscribed(measured, broker)
        yield measured
    finally:
        stop(measured)


async def subscribed(peer: Measured, broker: Measured) -> None:
    """Wait until the peer's subscription stands. Messages that are published before are not kept for it.

    Raises NotMeasuredError.
    """
    began = time.monotonic()
    # A line of mosquitto's log (log_type subscribe): time, client, QoS, filter.
    while f" {FILTER}\n" not in broker.log.read_text():
        if peer.process.poll() is not None or time.monotonic() - began > SUBSCRIBE_S_MAX:
            raise NotMeasuredError(f"it does not subscribe:\n{log_tail(peer.log)}")
        await asyncio.sleep(0.1)


def _write(template: Path, path: Path, **values: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(string.Template(template.read_text()).substitute(values))
    return path
