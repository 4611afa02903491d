"""A sensor that keeps to the rules, beside an attack on its gateway: what it meets."""

import asyncio
import contextlib
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path

from gateway.mqtt.protocol import publish
from tests.support.attacks import GOOD, Target
from tests.support.mqtt_peers import ACCEPTED, connect
from tests.support.waiting import patience

INTERVAL_S = 0.05
"""Between two readings of the good sensor."""
RECONNECT_S = 0.5
"""Between two log-ins of the good sensor, on another connection: what an attack closes is seen there.

As long between two questions for the gateway's health."""
BEGIN_S = 20.0
ANSWER_S_MAX = 5.0
"""A reading that has no PUBACK by then counts as refused."""


@dataclass(slots=True)
class Good:
    """A sensor that keeps to the rules, and what it met."""

    target: Target
    secret: str
    tls: ssl.SSLContext | None = None
    """With it, it speaks TLS."""
    connections: int = 1
    """Connections on which it sends. Each waits for its PUBACK before the next reading."""
    answered_ms: list[float] = field(default_factory=list)
    """From each PUBLISH to its PUBACK."""
    refused: int = 0
    """Readings without an answer in time, and connections that were not let in."""
    unheard: int = 0
    """Questions for the gateway's health without an answer in time."""

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles(self.answered_ms, n=100)[98] if len(self.answered_ms) > 1 else ANSWER_S_MAX * 1000

    async def begin(self) -> None:
        """Wait until the status page is there, which comes after the listener."""
        async with asyncio.timeout(patience(BEGIN_S)):
            while not await self._is_healthy():
                await asyncio.sleep(0.1)

    async def measure(self, seconds: float) -> None:
        """Send readings, and now and then log in, and ask for the gateway's health, for so long."""
        until = time.monotonic() + seconds
        sending = [self._send(until, f"{GOOD}-{number}") for number in range(self.connections)]
        await asyncio.gather(*sending, self._come_back(until), self._ask_health(until))

    async def _send(self, until: float, client_id: str) -> None:
        number = 0
        while time.monotonic() < until:
            try:
                async with self._logged_in(client_id) as (reader, writer):
                    while time.monotonic() < until:
                        number += 1
                        self.answered_ms.append(await self._reading(reader, writer, 1 + number % 65_535))
                        await asyncio.sleep(INTERVAL_S)
            except (OSError, EOFError, TimeoutError):
                self.refused += 1

    async def _come_back(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                # Another client of the same sensor's: one of its id would take over the session of the first.
                async with self._logged_in(f"{GOOD}-again") as (reader, writer):
                    await self._reading(reader, writer, 1)
            except (OSError, EOFError, TimeoutError):
                self.refused += 1
            await asyncio.sleep(RECONNECT_S)

    async def _ask_health(self, until: float) -> None:
        """Ask for health as a monitor on the gateway does."""
        while time.monotonic() < until:
            self.unheard += not await self._is_healthy()
            await asyncio.sleep(RECONNECT_S)

    async def _is_healthy(self) -> bool:
        """Whether the question is answered in time, whatever the answer."""
        try:
            async with asyncio.timeout(patience(ANSWER_S_MAX)):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.target.page_port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = await reader.read()
                writer.close()
        except (OSError, TimeoutError):
            return False
        return b'{"status":' in answer

    @asynccontextmanager
    async def _logged_in(self, client_id: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        async with asyncio.timeout(patience(ANSWER_S_MAX)):
            port = self.target.port if self.tls is None else self.target.tls_port
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=self.tls)
        try:
            writer.write(connect(client_id, login=(GOOD, self.secret)))
            async with asyncio.timeout(patience(ANSWER_S_MAX)):
                if await reader.readexactly(4) != ACCEPTED:
                    raise ConnectionError("not let in")
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _reading(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, packet_id: int) -> float:
        began = time.perf_counter()
        writer.write(publish(f"device/{GOOD}/thermo", b'{"t": 21.5}', 1, packet_id, dup=False))
        async with asyncio.timeout(patience(ANSWER_S_MAX)):
            await reader.readexactly(4)
        return (time.perf_counter() - began) * 1000


@contextmanager
def attacked(name: str, target: Target, directory: Path) -> Iterator[None]:
    """One of ATTACKS in a process of its own, for the length of a block."""
    log = directory / f"{name}.log"
    with log.open("wb") as told:
        command = [sys.executable, "-m", "tests.support.attacks", name, *map(str, astuple(target))]
        process = subprocess.Popen(command, stderr=told)
        try:
            yield
        finally:
            ended = process.poll()
            process.kill()
            process.wait()
    assert ended is None, f"the attack {name} ended: {log.read_text()}"
