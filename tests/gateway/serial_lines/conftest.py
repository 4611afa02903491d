"""The event loop of tests whose sensors are at the far end of a pseudo-terminal."""

import asyncio
import selectors
from collections.abc import Callable, Mapping


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Have each look at a pseudo-terminal find what was written to its other end.

    A thread of the kernel hands the bytes on, late on a busy machine. poll(2) waits for it, and epoll does not.
    """
    return {"poll": lambda: asyncio.SelectorEventLoop(selectors.PollSelector())}
