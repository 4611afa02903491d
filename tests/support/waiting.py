"""Waiting in tests: for a condition, and longer if others keep the processors busy.

A promise in seconds is asserted as it stands, by a test with the mark `alone`. Where all that a test judges happens in
its own process, the fixture `steady_time` has its clock stand still while others have the processor.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 20.0
"""Seconds within which an idle machine does many times over what a test waits for."""
Result = TypeVar("Result")
Words = str | Callable[[], str]


def patience(seconds: float) -> float:
    """Seconds to wait now for work that an idle machine does within `seconds`."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


async def until(condition: Callable[[], Result | None], seconds: float = WAIT_S, words: Words = "") -> Result:
    """Wait until a condition gives something true, and return that. Raises AssertionError, with what `words` say."""
    begun_s = time.monotonic()
    while not (found := condition()):
        _expect_soon(begun_s, seconds, words)
        await asyncio.sleep(0.005)
    return found


def wait_until(condition: Callable[[], Result | None], seconds: float = WAIT_S, words: Words = "") -> Result:
    """`until` without an event loop."""
    begun_s = time.monotonic()
    while not (found := condition()):
        _expect_soon(begun_s, seconds, words)
        time.sleep(0.01)
    return found


def _expect_soon(begun_s: float, seconds: float, words: Words) -> None:
    waited_s = time.monotonic() - begun_s
    assert waited_s < patience(seconds), f"waited in vain for {waited_s:.0f} s: {words() if callable(words) else words}"
