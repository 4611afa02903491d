"""Runs the load generator (`load.c`) and reads its report."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tests.bench.report import BUILD, ROOT

LOAD = BUILD / "load"


class LoadError(RuntimeError):
    """The generator did not do its work. The message is its own."""


class Done(msgspec.Struct, frozen=True):
    """The generator's account of a run; times as `load.c` has them."""

    sent: int
    resent: int
    acknowledged: int
    lost_connections: int
    reconnects: int
    seconds: float
    """From the first PUBLISH to the last acknowledgement."""
    first_publish: float
    """CLOCK_REALTIME in seconds."""
    cpu_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    by_second: list[int]
    """Readings acknowledged in each second of the run."""


class DeviceLedger(msgspec.Struct, frozen=True):
    """The acknowledgements that one connection of the generator got."""

    device: str
    boot: str
    sent: int
    """Sequences 0 to `sent` - 1 were sent at least once."""
    acknowledged: list[tuple[int, int]]
    """Closed ranges of sequences."""


class LoadRun:
    """A generator at work."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def event(self, kind: str) -> dict[str, float]:
        """Wait for its next line, which is an event of this kind. Raises LoadError where it ended before."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            said = (await self.process.stderr.read()).decode().strip()
            code = await self.process.wait()
            raise LoadError(said or f"the load generator ended with code {code}")
        event = msgspec.json.decode(line)
        if event.pop("event") != kind:
            raise LoadError(f"the load generator said {line.decode().strip()!r} where {kind!r} was expected")
        return dict(event)

    async def done(self) -> Done:
        """Wait for its end. Raises LoadError."""
        account = msgspec.convert(await self.event("done"), Done)
        await self.process.wait()
        return account


def build() -> Path:
    """Compile the generator where it is missing or older than its source."""
    subprocess.run(["make", "--silent", "-C", ROOT, str(LOAD.relative_to(ROOT))], check=True)
    return LOAD


@asynccontextmanager
async def load(port: int, **options: float | str | Path | bool) -> AsyncIterator[LoadRun]:
    """Start a generator with its options (`window=200`, `persistent=True`); it is stopped at the end of the block."""
    words = [str(LOAD), "--port", str(port)]
    for name, value in options.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield LoadRun(process)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()


async def run_load(port: int, **options: float | str | Path | bool) -> Done:
    """A generator's run from start to end. Raises LoadError."""
    async with load(port, **options) as running:
        await running.event("connected")
        return await running.done()


def read_ledger(path: Path) -> list[DeviceLedger]:
    """Read the file that `--ledger` wrote, which has one line for each connection."""
    return [msgspec.json.decode(line, type=DeviceLedger) for line in path.read_bytes().splitlines()]
