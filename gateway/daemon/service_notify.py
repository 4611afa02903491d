"""Tells systemd that the service is ready, that it lives, and what it does (sd_notify(3)).

The watchdog is fed only when the event loop and the buffer's thread have both had their turn. A gateway that is idle,
full or without its uplink is healthy. If its thread hangs, then it is not, however well its event loop runs.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import structlog

from gateway.host.systemd_notify import notify

if TYPE_CHECKING:
    from gateway.buffer.state import BufferState
    from gateway.uplink.state import UplinkState

INTERVAL_S_MAX: Final = 10.0
"""Greatest age, in seconds, of the status that `systemctl status` shows."""
FEEDS_PER_TIMEOUT: Final = 3
"""Feeds of the watchdog within its time-out: one that comes late is no reason to be killed."""
READY_RETRY_S: Final = 1.0
"""Seconds between two tries to tell systemd that the service is ready, until systemd has taken it."""

_log = structlog.get_logger()


def interval_s() -> float:
    """Seconds between two messages to systemd: part of its watchdog's time-out, if this process has a watchdog."""
    timeout_us = os.environ.get("WATCHDOG_USEC", "")
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()) or not timeout_us.isdecimal():
        return INTERVAL_S_MAX
    return min(INTERVAL_S_MAX, int(timeout_us) / 1e6 / FEEDS_PER_TIMEOUT)


async def watch(thread_answers: Callable[[], Awaitable[None]], words: Callable[[], str]) -> None:
    """Tell systemd that the service is ready, and from then on that it lives, until cancelled.

    `thread_answers` comes back when the buffer's thread has had its turn. `words` is for `systemctl status`.
    """
    if "NOTIFY_SOCKET" not in os.environ:
        return
    pause_s = interval_s()
    while not notify("READY=1", f"STATUS={words()}"):  # noqa: ASYNC110 - systemd sets no event
        await asyncio.sleep(READY_RETRY_S)
    while True:
        answer = asyncio.ensure_future(thread_answers())
        try:
            _, late = await asyncio.wait([answer], timeout=INTERVAL_S_MAX)
            if late:
                _log.error(
                    "the buffer's thread does not answer: the disk that buffer.path is on may hang; if it goes on like "
                    "this, systemd's watchdog starts the gateway anew; acknowledged readings are on disk",
                    waited_s=INTERVAL_S_MAX,
                )
            await answer
        finally:
            answer.cancel()
        notify("WATCHDOG=1", f"STATUS={words()}")
        await asyncio.sleep(pause_s)


def service_words(uplink: "UplinkState", buffer: "BufferState") -> str:
    """Describe the service in a line for `systemctl status`; `sluice status` has more."""
    reached = "Kafka is reached" if uplink.up else f"Kafka is not reached: {uplink.error or 'not tried yet'}"
    trouble = f"; BUFFER FAILS: {buffer.failing}" if buffer.failing else "; BUFFER IS FULL" if buffer.full else ""
    waits = "1 row waits" if buffer.rows == 1 else f"{buffer.rows:,} rows wait"
    return f"{reached}; {waits}{trouble}".replace("\n", " ")
