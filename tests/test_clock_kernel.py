"""The kernel's clocks: what vouches for the wall clock, and steps that are noticed as they happen."""

import asyncio
import errno
import os
import time
from typing import Any

import pytest

from gateway import clock_kernel
from gateway.clock_gateway import BootClock, Look
from gateway.clock_kernel import (
    KERNEL_ERROR_US_MIN,
    STA_NANO,
    STA_UNSYNC,
    TIME_ERROR,
    ClockWatch,
    StepWatch,
    boot_id,
    boottime_us,
    kernel_error_us,
    look,
    read_wall_clock,
)
from gateway.settings import GatewaySettings

SYSTEM = GatewaySettings("gw1", clock="system", system_clock_error_ms=1_000)


def test_the_boot_has_a_name_and_a_clock_that_does_not_step_back() -> None:
    assert len(boot_id()) == 36
    assert 0 < boottime_us() <= boottime_us()


def test_system_mode_trusts_the_wall_clock_with_the_installers_bound() -> None:
    clock = read_wall_clock(SYSTEM)
    assert clock.synced
    assert 1_000_000 <= (clock.error_us or 0) < 1_500_000
    assert abs(clock.at(boottime_us()) / 1e6 - time.time()) < 5


def test_kernel_mode_says_what_adjtimex_says() -> None:
    found = look("kernel", 0)
    assert found.error_us is None or found.error_us >= KERNEL_ERROR_US_MIN
    assert abs((found.at_us + found.offset_us) / 1e6 - time.time()) < 5


@pytest.mark.parametrize(
    ("state", "status", "maxerror_us", "offset", "error_us"),
    [
        (TIME_ERROR, 0, 5, 0, None),
        (0, STA_UNSYNC, 5, 0, None),
        # systemd-timesyncd, just now: nobody is that exact.
        (0, STA_NANO, 0, 0, KERNEL_ERROR_US_MIN),
        # The same, still slewing a third of a second.
        (0, STA_NANO, 500, -300_000_001, 300_501),
        (0, 0, 500, -300_000, 300_500),
        # chrony: root distance.
        (0, 0, 45_000, 0, 45_000),
    ],
)
def test_what_adjtimex_says_becomes_a_bound(
    state: int, status: int, maxerror_us: int, offset: int, error_us: int | None
) -> None:
    assert kernel_error_us(state, status, maxerror_us, offset) == error_us


def test_a_watch_keeps_what_it_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [Look(0, 5_000, None), Look(1_000_000, 1_000, 500), Look(2_000_000, 10**9, None)]
    monkeypatch.setattr(clock_kernel, "look", lambda *_: looks.pop(0))
    watch = ClockWatch(GatewaySettings("gw1"))
    assert not watch.now().known
    before, now = watch.look()
    assert (before.known, now.synced) == (False, True)
    # Somebody sets it by hand: the kernel vouches for it no more.
    _, held = watch.look()
    assert held.offset_us(2_000_000) == 1_000
    assert watch.now() is held


def test_a_watch_goes_on_from_what_an_earlier_start_knew_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_kernel, "look", lambda *_: Look(9_000_000, 5_000, None))
    kept = BootClock("unknown", 50.0).looked(Look(1_000_000, 1_000, 500))
    watch = ClockWatch(GatewaySettings("gw1", clock_error_ppm_max=200.0))
    watch.resume(BootClock("unknown", 50.0))
    assert not watch.now().known
    watch.resume(kept)
    # With the crystal as it is set now.
    assert watch.now().error_us(9_000_000) == 500 + 8 * 200
    watch.resume(BootClock.constant(7, 7))
    assert watch.now().offset_us(9_000_000) == 1_000


async def watched(steps: list[float], seconds: float) -> None:
    """Run the loop until a step was told, for no longer than that."""
    async with asyncio.timeout(seconds):
        while not steps:
            await asyncio.sleep(0.01)


async def test_a_clock_that_is_set_is_looked_at_in_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer is real and goes off; that the kernel cancelled it, as it does for a step, is what the read says."""
    monkeypatch.setattr(clock_kernel, "FAR_S", int(time.time()) + 1)
    read = os.read

    def cancelled(fd: int, size: int) -> bytes:
        read(fd, size)
        monkeypatch.setattr(clock_kernel, "FAR_S", 9_000_000_000)
        raise OSError(errno.ECANCELED, "Operation canceled")

    steps: list[float] = []
    watch = StepWatch(lambda: steps.append(time.monotonic()))
    fake: Any = type("Os", (), {**vars(os), "read": staticmethod(cancelled)})
    monkeypatch.setattr(clock_kernel, "os", fake)
    assert watch.start()
    try:
        await watched(steps, 10)
        # Armed again: nothing is there to be read, and nobody calls.
        with pytest.raises(BlockingIOError):
            read(watch._fd, 8)
        assert len(steps) == 1
    finally:
        watch.stop()


async def test_where_the_kernel_has_no_such_timer_the_look_of_each_second_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing:
        def timerfd_create(self, *_: object) -> int:
            return -1

    monkeypatch.setattr(clock_kernel, "_libc", Refusing())
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
