"""Time that a busy machine does not take away, for tests that judge in seconds what one process does."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Final

import pytest

HELD_UP_S_MAX: Final = 0.002
"""Most seconds that `steady_time` lets pass at once."""


@pytest.fixture
async def steady_time(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Have the monotonic clock, and with it the event loop's, stand still while the machine holds this process up.

    Both ends of a test share this process: by a clock that goes on, one would be late for the other through no fault.
    """
    clock, lock = time.monotonic, threading.Lock()
    seen_s = passed_s = clock()

    def steady() -> float:
        nonlocal seen_s, passed_s
        with lock:
            now_s = clock()
            passed_s += min(now_s - seen_s, HELD_UP_S_MAX)
            seen_s = now_s
            return passed_s

    async def look_often() -> None:
        while True:
            await asyncio.sleep(HELD_UP_S_MAX / 2)

    # The event loop asks it at each look, and so do the parts that have no loop.
    monkeypatch.setattr(time, "monotonic", steady)
    looking = asyncio.create_task(look_often())
    yield
    looking.cancel()
