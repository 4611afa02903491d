"""Long work on the event loop, in steps: a sensor's acknowledgement waits for one of them at most."""

import asyncio
import time
from typing import Final

STEP_S: Final = 0.001
"""How long such work may go on at a time."""


class LongWork:
    """One piece of such work, which calls `step` wherever others may run."""

    __slots__ = ("_ends_s",)

    def __init__(self) -> None:
        self._ends_s = time.monotonic() + STEP_S

    async def step(self) -> None:
        """Let the event loop run whatever waits, if this step has had its time."""
        if time.monotonic() >= self._ends_s:
            await asyncio.sleep(0)
            self._ends_s = time.monotonic() + STEP_S
