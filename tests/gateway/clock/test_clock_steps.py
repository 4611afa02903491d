"""Steps of the wall clock are noticed as they happen, by the kernel's own timer. The machine's clock is left alone."""

import asyncio
import errno
import os
import time
from typing import Any

import pytest

from gateway.clock.steps import StepWatch
from tests.support.waiting import patience


async def watched(steps: list[float], seconds: float) -> None:
    """Run the loop until a step was told, for no longer than that."""
    async with asyncio.timeout(seconds):
        while not steps:
            await asyncio.sleep(0.01)


async def test_a_clock_that_is_set_is_looked_at_in_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer is real and goes off. The read says that the kernel cancelled it, as it does for a step."""
    monkeypatch.setattr("gateway.clock.steps.FAR_S", int(time.time()) + 1)
    read = os.read

    def cancelled(fd: int, size: int) -> bytes:
        read(fd, size)
        monkeypatch.setattr("gateway.clock.steps.FAR_S", 9_000_000_000)
        raise OSError(errno.ECANCELED, "Operation canceled")

    steps: list[float] = []
    watch = StepWatch(lambda: steps.append(time.monotonic()))
    fake: Any = type("Os", (), {**vars(os), "read": staticmethod(cancelled)})
    monkeypatch.setattr("gateway.clock.steps.os", fake)
    assert watch.start()
    try:
        await watched(steps, 10)
        # Armed again: nothing is there to be read, and nobody calls.
        with pytest.raises(BlockingIOError):
            read(watch._fd, 8)
        assert len(steps) == 1
    finally:
        watch.stop()


async def test_without_the_kernels_timer_the_look_of_each_second_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing:
        def timerfd_create(self, *_: object) -> int:
            return -1

    monkeypatch.setattr("gateway.clock.steps._libc", Refusing())
    watch = StepWatch(lambda: None)
    assert not watch.start()
    watch.stop()


async def test_a_timer_that_is_stopped_leaves_nothing_open() -> None:
    watch = StepWatch(lambda: None)
    assert watch.start()
    fd = watch._fd
    watch.stop()
    watch.stop()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_a_timer_that_goes_off_by_itself_is_not_armed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If seconds have 32 bits and the clock is beyond them, the timer would go off at once, for ever."""
    monkeypatch.setattr("gateway.clock.steps.FAR_S", 1)
    steps: list[float] = []
    watch = StepWatch(lambda: steps.append(time.monotonic()))
    assert watch.start()
    async with asyncio.timeout(patience(10)):
        while watch._fd >= 0:
            await asyncio.sleep(0.01)
    assert not steps
