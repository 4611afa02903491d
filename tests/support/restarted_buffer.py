"""A buffer that Hypothesis restarts, and cuts off from its power."""

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis.stateful import RuleBasedStateMachine, rule
from msgspec.structs import replace

from gateway.buffer.buffer import Buffer
from gateway.buffer.file import BufferFile
from gateway.settings import BufferSettings
from tests.support.buffers import BOOT, CLOCK


class RestartedBuffer(RuleBasedStateMachine):
    """A machine with a buffer in a folder of its own."""

    def start(self, **settings: object) -> None:
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="sluice-buffer-"))
        self.settings = BufferSettings(path=self.directory / "0.db", **{"commit_delay_ms": 0, **settings})  # type: ignore[arg-type]
        self.copies = 0
        self.is_cut = False
        """Whether the power is gone: no acknowledgement counts any more."""
        self._open()

    def _open(self) -> None:
        async def opened() -> Buffer:
            buffer = Buffer(self.settings, BOOT, lambda: CLOCK)
            buffer.open()
            return buffer

        self.buffer = self.loop.run_until_complete(opened())

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run_until_complete(self.buffer.close())
            self.loop.close()
            shutil.rmtree(self.directory)

    @rule()
    def restart(self) -> None:
        self.loop.run_until_complete(self.buffer.close())
        self._open()

    @rule()
    def power_cut(self) -> None:
        """Go on from a copy of what is on disk at this moment, with the WAL as it stands."""
        self.copies += 1
        after = self.directory / f"{self.copies}.db"

        def copy(_: BufferFile) -> None:
            self.is_cut = True
            for suffix in ("", "-wal"):
                shutil.copy(f"{self.settings.path}{suffix}", f"{after}{suffix}")

        # Between two commits, so that both files are of one moment.
        self.loop.run_until_complete(self.buffer.run(copy))
        former, self.settings = self.buffer, replace(self.settings, path=after)
        # First, as what becomes of the former one matters no more.
        self._open()
        self.is_cut = False
        self.loop.run_until_complete(former.close())
