"""Splits long work on the event loop into steps. A sensor's acknowledgement waits for one step at most."""

import asyncio
import time
from typing import Final

STEP_S: Final = 0.001
"""Seconds that long work may take before others have their turn."""


class LongWork:
    """One piece of long work. It calls `step` wherever others may run."""

    __slots__ = ("_ends_s",)

    def __init__(self) -> None:
        self._ends_s = time.monotonic() + STEP_S

    async def step(self) -> None:
        """Let other tasks run, if this step has had its time."""
        if time.monotonic() >= self._ends_s:
            await asyncio.sleep(0)
            self._ends_s = time.monotonic() + STEP_S
