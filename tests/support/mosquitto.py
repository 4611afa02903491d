"""Starts a real mosquitto: settings, persistence, TLS, stopped cleanly or killed; and a link to it that can be cut."""

import asyncio
import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.gateways import free_port
from tests.support.stream_server import speaking
from tests.support.waiting import patience

MOSQUITTO = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin") or "mosquitto"


@dataclass
class Mosquitto:
    """A broker that can be stopped and started again; what it persists stays in its folder."""

    directory: Path
    settings: tuple[str, ...] = ("allow_anonymous true",)
    """Lines of `mosquitto.conf` beside its listener and its persistence."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.directory / "mosquitto.log").read_text()

    def start(self) -> None:
        self.directory.mkdir(exist_ok=True)
        config = self.directory / "mosquitto.conf"
        lines = [
            f"listener {self.port} 127.0.0.1",
            "persistence true",
            f"persistence_location {self.directory}/",
            # Started by root it would become a user that may not read the test's folder.
            f"user {getpass.getuser()}",
            *(f"log_type {kind}" for kind in ("error", "warning", "notice", "information", "subscribe")),
            *self.settings,
        ]
        config.write_text("\n".join(lines) + "\n")
        with (self.directory / "mosquitto.log").open("ab") as log:
            self.process = subprocess.Popen([MOSQUITTO, "-c", config], stdout=log, stderr=log)
        deadline = time.monotonic() + patience(10)
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            time.sleep(0.02)
        raise RuntimeError(f"mosquitto does not listen: {self.log}")

    def stop(self) -> None:
        """End it as a site does: it writes its state."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut does: what is only in memory is gone."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(10)
            self.process = None


@contextmanager
def mosquitto(directory: Path, *settings: str) -> Iterator[Mosquitto]:
    """A running broker; ended at the end of the block. `settings` replace the permission for anybody."""
    broker = Mosquitto(directory, settings or ("allow_anonymous true",))
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def publish(port: int, topic: str, payloads: list[str], *options: str, qos: int = 1) -> None:
    """Publish one message a line, and return when all are acknowledged."""
    command = ["mosquitto_pub", "-p", str(port), "-t", topic, "-q", str(qos), "-l", *options]
    subprocess.run(
        command, check=True, timeout=patience(60), input="".join(f"{payload}\n" for payload in payloads).encode()
    )


@dataclass
class Link:
    """A TCP proxy: what goes through can be cut off, or swallowed without a word."""

    port: int
    connections: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = field(default_factory=list)
    swallowed: set[asyncio.StreamWriter] = field(default_factory=set)
    """Writers whose bytes go nowhere."""
    carried_bytes: int = 0
    """From the broker to the gateway."""

    def cut(self) -> None:
        """End all connections as an unplugged router does that comes back: with a reset at the next packet."""
        for pair in self.connections:
            for writer in pair:
                with contextlib.suppress(OSError):
                    # Without lingering: what is still in the socket is thrown away.
                    link = writer.get_extra_info("socket")
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                writer.transport.abort()
        self.connections.clear()

    def swallow(self) -> None:
        """From now on nothing comes through the connections that there are; connections to come are whole."""
        self.swallowed = {writer for pair in self.connections for writer in pair}


@asynccontextmanager
async def link_to(port: int) -> AsyncIterator[Link]:
    """A link to a port on this machine."""
    link = Link(0)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, down: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if writer in link.swallowed:
                    continue
                writer.write(data)
                await writer.drain()
                if down:
                    link.carried_bytes += len(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        link.connections.append((writer, back))
        await asyncio.gather(carry(reader, back, down=False), carry(there, writer, down=True))

    async with speaking(accept) as link.port:
        try:
            yield link
        finally:
            link.cut()


def self_signed(directory: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate for a host's name that is its own authority, and its key; good for today."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", f"subjectAltName=DNS:{name}"]
    subprocess.run(command, check=True, capture_output=True, timeout=patience(20))
    return certificate, key
