"""Keeps the programs that the demo has started: which of them must be running, and how to stop them."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from demo import child_process

INSTALL = "Run `make demo`, which installs what is missing, and see the log."
COMMANDS = Path(sys.executable).parent
"""Folder of `sluice` and its like: that of the Python that runs this."""


class DemoError(Exception):
    """The demo cannot go on."""

    def __init__(self, words: str, advice: str, log: Path | None = None) -> None:
        super().__init__(words)
        self.advice = advice
        self.log = log
        """Log that says more, if any."""


@dataclass(slots=True)
class Child:
    """One program that was started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    advice: str
    """Words on what a person can do if it ends by itself."""
    expected: bool = True
    """Whether it must be running now."""


class Children:
    """All programs; leaving the `async with` stops each that still runs."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._all: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure nobody waits for farewells.
        patience_s = 5.0 if error is None else 2.0
        await asyncio.shield(asyncio.gather(*(self.stop(child, patience_s) for child in reversed(self._all))))

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        advice: str,
        *,
        output: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a program from the event loop's thread (see `child_process.spawn`); its log is `name`.log."""
        log = self._logs / f"{name}.log"
        return self.adopt(Child(name, child_process.spawn(command, log, output=output, env=env), log, advice))

    def adopt(self, child: Child) -> Child:
        """Take over a program that was started elsewhere."""
        self._all.append(child)
        return child

    def check(self) -> None:
        """Raises DemoError if a program that must be running has ended."""
        for child in self._all:
            if child.expected and child.process.poll() is not None:
                raise ended(child)

    async def stop(self, child: Child, patience_s: float = 20.0) -> int:
        """Send SIGTERM, after `patience_s` SIGKILL to it and to all that it started. Returns its exit code."""
        child.expected = False
        if child.process.poll() is None:
            child.process.terminate()
        code = await self.finish(child, patience_s)
        child_process.kill_session(child.process)
        return child.process.returncode if code is None else code

    async def end(self, child: Child, patience_s: float) -> None:
        """Send SIGTERM, then `finish_well`. Programs that it started and left behind are killed."""
        child.expected = False
        if child.process.poll() is None:
            child.process.terminate()
        await self.finish_well(child, patience_s)
        child_process.kill_session(child.process)

    async def finish_well(self, child: Child, patience_s: float) -> None:
        """Wait for a program to end well.

        Raises:
            DemoError: it took longer, or ended with another exit code than 0.
        """
        code = await self.finish(child, patience_s)
        if code is None:
            raise DemoError(f"{child.name} did not end within {patience_s:.0f} s", child.advice, child.log)
        if code != 0:
            raise ended(child)

    async def finish(self, child: Child, patience_s: float) -> int | None:
        """Wait for a program to end by itself. Returns its exit code, or None if it takes longer."""
        child.expected = False
        deadline = asyncio.get_running_loop().time() + patience_s
        while child.process.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                return None
            await asyncio.sleep(0.05)
        return child.process.returncode


def ended(child: Child) -> DemoError:
    """Make the error of a program that ended and should not have."""
    code = child.process.returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return DemoError(f"{child.name} {how}", child.advice, child.log)
