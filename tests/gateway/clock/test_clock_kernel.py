"""The kernel's clocks: the bound of the wall clock, and the state that a watch keeps."""

import time

import pytest

from gateway.clock import kernel_clock
from gateway.clock.gateway_clock import BootClock, Look
from gateway.clock.kernel_clock import (
    KERNEL_ERROR_US_MIN,
    STA_NANO,
    STA_UNSYNC,
    TIME_ERROR,
    ClockWatch,
    boot_id,
    boottime_us,
    kernel_error_us,
    read_clocks,
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
    found = read_clocks("kernel", 0)
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
    monkeypatch.setattr(kernel_clock, "read_clocks", lambda *_: looks.pop(0))
    watch = ClockWatch(GatewaySettings("gw1"))
    assert not watch.now().known
    before, now = watch.read_again()
    assert (before.known, now.synced) == (False, True)
    # Somebody sets it by hand: the kernel vouches for it no more.
    _, held = watch.read_again()
    assert held.offset_us(2_000_000) == 1_000
    assert watch.now() is held


def test_a_watch_goes_on_from_what_an_earlier_start_knew_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_clock, "read_clocks", lambda *_: Look(9_000_000, 5_000, None))
    kept = BootClock("unknown", 50.0).looked(Look(1_000_000, 1_000, 500))
    watch = ClockWatch(GatewaySettings("gw1", clock_error_ppm_max=200.0))
    watch.resume(BootClock("unknown", 50.0))
    assert not watch.now().known
    watch.resume(kept)
    # With the crystal as it is set now.
    assert watch.now().error_us(9_000_000) == 500 + 8 * 200
    watch.resume(BootClock.constant(7, 7))
    assert watch.now().offset_us(9_000_000) == 1_000
