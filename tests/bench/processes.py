"""Starts the measured programs, and reads their memory, CPU and disk writes from /proc."""

import asyncio
import hashlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from demo import child_process
from demo.kafka_broker import free_ports
from gateway.listener import credentials

SLUICE = Path(sys.executable).with_name("sluice")
START_S_MAX = 30.0
STOP_S_MAX = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


class NotMeasuredError(RuntimeError):
    """A part cannot be measured here. The message says why and what to do. Other parts go on."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A process that was started to be measured."""

    process: Popen[bytes]
    port: int
    directory: Path
    log: Path

    @property
    def cpu_s(self) -> float:
        """User and system time so far, of the process itself."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def rss_mb(self) -> float:
        """Resident memory now, in MB of 10^6 bytes."""
        return self._status("VmRSS") * 1024 / 1e6

    @property
    def rss_mb_peak(self) -> float:
        """The most that was resident since the start."""
        return self._status("VmHWM") * 1024 / 1e6

    @property
    def disk_bytes(self) -> int:
        """Bytes that it made the kernel write to disk so far: its dirty pages, but not the file system's journal."""
        lines = Path(f"/proc/{self.process.pid}/io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("write_bytes")))

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(name)))

    def kill(self) -> None:
        """`kill -9`."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def spawn(command: Sequence[str | Path], directory: Path, port: int, log_name: str) -> Measured:
    """Start a program that dies with this one. Its output goes to `directory`/`log_name`."""
    log = directory / log_name
    return Measured(child_process.spawn(command, log), port, directory, log)


async def answers(measured: Measured, patience_s: float = START_S_MAX) -> float:
    """Wait until its port takes a connection; give the seconds that it took. Raises NotMeasuredError."""
    began = time.monotonic()
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", measured.port), timeout=1):
            return time.monotonic() - began
        if measured.process.poll() is not None or time.monotonic() - began > patience_s:
            raise NotMeasuredError(f"it does not listen:\n{child_process.log_tail(measured.log)}")
        await asyncio.sleep(0.002)


def stop(measured: Measured) -> None:
    """SIGTERM, and SIGKILL where it does not end."""
    child_process.stop(measured.process, STOP_S_MAX)


# -- the gateway --------------------------------------------------------------------------------


def write_gateway(  # noqa: PLR0913 - what a bench may ask of a gateway, by name
    directory: Path,
    bootstrap: str,
    stream_topic: str,
    *,
    devices: int = 100,
    place: Path | None = None,
    buffer: str = "",
    bytes_max: int = 4_000_000_000,
    connections_max: int = 5_000,
    new_connections_per_s_max: int = 10_000,
    extra: str = "",
) -> Path:
    """Write a gateway's configuration, and the devices' secrets as `load --secrets` reads them; give the former.

    All that an installer should turn on is on: devices with secrets of their own, identity in JSON, zstd. All sensors
    come from one address here, for which the usual bound of new connections is too low. `place` is the buffer's folder
    if it is another than `directory`. `buffer` are further lines of `[buffer]`. `extra` is added to the end.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"d{number:03d}" for number in range(devices)]
    secrets = [hashlib.sha256(f"secret of {name}".encode()).hexdigest()[:32] for name in names]
    secrets_path(directory).write_text("\n".join(secrets) + "\n")
    hashes = {name: credentials.digest(secret) for name, secret in zip(names, secrets, strict=True)}
    credentials.put((place or directory) / credentials.FILE_NAME, hashes, None)
    port, *_ = free_ports(1)
    config = directory / "gateway.toml"
    config.write_text(
        f"""\
[gateway]
id = "bench"
clock = "system"

[buffer]
path = "{place or directory}/buffer.db"
bytes_max = {bytes_max}
{buffer}

[mqtt_listener]
port = {port}
connections_max = {connections_max}
new_connections_per_s_max = {new_connections_per_s_max}

[kafka]
bootstrap = ["{bootstrap}"]
compression = "zstd"
create_topics = true
replicas = 1
# The bench has one broker. It stands for a cluster whose replicas keep what they acknowledge.
one_replica_is_enough = true
events_topic = "{stream_topic}-events"
quarantine_topic = "{stream_topic}-quarantine"

[[routes]]
topic = "device/{{device}}/thermo"
kafka = "{stream_topic}"
identity = "json"
{extra}
"""
    )
    return config


def secrets_path(directory: Path) -> Path:
    return directory / "secrets"


def listener_port(config: Path) -> int:
    """The port in a configuration that `write_gateway` wrote."""
    return int(next(line.split()[2] for line in config.read_text().splitlines() if line.startswith("port = ")))


def spawn_gateway(config: Path) -> Measured:
    """Start `sluice run` and return at once."""
    return spawn([SLUICE, "run", "--config", config], config.parent, listener_port(config), "gateway.log")


@asynccontextmanager
async def gateway(config: Path) -> AsyncIterator[Measured]:
    """`sluice run` for the length of a block, listening; under py-spy where BENCH_PROFILE names a file."""
    measured = spawn_gateway(config)
    try:
        await answers(measured)
        async with _profiled(measured):
            yield measured
    finally:
        stop(measured)


@asynccontextmanager
async def _profiled(measured: Measured) -> AsyncIterator[None]:
    output = os.environ.get("BENCH_PROFILE")
    if not output:
        yield
        return
    py_spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if py_spy is None:
        raise NotMeasuredError("BENCH_PROFILE is set, and there is no py-spy: install it with pip, or unset it")
    kind = "raw" if output.endswith(".txt") else "flamegraph"
    command = [py_spy, "record", "--pid", str(measured.process.pid), "--output", output, "--format", kind]
    command += ["--rate", "200", "--threads", "--nonblocking"]
    profiler = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
    try:
        yield
    finally:
        if profiler.returncode is None:
            profiler.send_signal(signal.SIGINT)
        await profiler.wait()
