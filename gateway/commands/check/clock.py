"""Checks this box's clock: whether and why it can be trusted, and what happens to readings meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gateway.clock.floor import RELEASED_US
from gateway.clock.gateway_clock import WallClock
from gateway.clock.kernel_clock import boottime_us
from gateway.clock.report import ClockView
from gateway.commands.certificate_dates import known_floor
from gateway.commands.check.finding import Finding, remark, well, wrong
from gateway.daemon import control
from gateway.health.conditions import clock_means, clock_set
from gateway.health.facts import told_facts
from gateway.host.processes import name_of, processes
from gateway.host.terminal_text import counted, span, utc
from gateway.settings import GatewaySettings, Settings
from gateway.uplink.state import UplinkState

TIME_DAEMONS: Final = {
    "systemd-timesyn": "systemd-timesyncd",
    "chronyd": "chronyd",
    "ntpd": "ntpd",
    "ntp-daemon": "ntpd-rs",
    "phc2sys": "phc2sys",
}
"""Time daemons by their process names, which the kernel cuts to 15 characters."""
FAKE_HWCLOCK: Final = Path("/etc/fake-hwclock.data")
"""File in which a box without a hardware clock keeps the last saved time."""


def check_clock(settings: Settings, clock: WallClock) -> Iterator[Finding]:
    """Judge the clock as just read, and how the daemon of this buffer sees it."""
    gateway, path = settings.gateway, settings.buffer.path
    state = control.state_of(path)
    at_us = boottime_us()
    wall_us = clock.at(at_us)
    passed_us, how_known = _passed(path)
    trouble = None
    if wall_us + (clock.error_us or 0) < passed_us:
        trouble = f"it says {utc(wall_us)} UTC, and {how_known}"
    if gateway.clock == "system":
        yield _system(gateway, trouble)
    else:
        yield _kernel(clock, wall_us, trouble, _while_unsynced(settings, state, at_us))
    if gateway.clock == "system" and FAKE_HWCLOCK.exists():
        yield remark(
            "fake-hwclock",
            "gateway.clock",
            f'"system", but this box has fake-hwclock ({FAKE_HWCLOCK}): after a power cut its clock goes on from the '
            "last saved time. Until it is synced, readings get times that look right and are late; write "
            'clock = "kernel" under [gateway], and readings wait until it is synced',
        )
    yield from _as_the_daemon_sees_it(state, at_us)


def _passed(path: Path) -> tuple[int, str]:
    """Return a time that has surely passed, in microseconds since 1970, and how that is known.

    It is this version's date or the clock floor, whichever is later. The floor goes down again if the clock was synced
    to a wrong time.
    """
    floor_us = known_floor(path).us
    if floor_us > RELEASED_US:
        return floor_us, f"{utc(floor_us)} has passed, as the buffer tells"
    return RELEASED_US, f"this version of Sluice was made on {utc(RELEASED_US)[:10]}"


def _system(gateway: GatewaySettings, trouble: str | None) -> Finding:
    if trouble is not None:
        return wrong(
            "clock-wrong",
            "clock",
            f'clock = "system" takes this box\'s clock as it is, and it is wrong: {trouble}. Set the clock, or see to '
            'time sync; if nobody keeps the clock, write clock = "kernel" under [gateway]: readings then wait for it',
        )
    keepers = time_daemons()
    kept = f"{keepers} runs here" if keepers else "no known time daemon runs here: the host must keep the clock"
    return well(
        "clock",
        f'taken as it is, within ± {_ms(gateway.system_clock_error_ms)}: clock = "system" and system_clock_error_ms '
        f"under [gateway] say so, and nothing here proves it; {kept}",
    )


def _kernel(clock: WallClock, wall_us: int, trouble: str | None, meanwhile: str) -> Finding:
    keepers = time_daemons()
    if clock.error_us is None:
        return remark("clock-unsynced", "clock", _unsynced(meanwhile, keepers, wall_us, trouble))
    by = f", kept by {keepers}" if keepers else ""
    if trouble is not None:
        return wrong(
            "clock-wrong",
            "clock",
            f"the kernel says that it is synced{by}, but it is wrong: {trouble}. See to its source",
        )
    return well("clock", f"the kernel says that it is synced, within ± {_ms(clock.error_us / 1e3)}{by}")


def _while_unsynced(settings: Settings, state: dict[str, Any], at_us: int) -> str:
    facts = told_facts(settings, state, at_us, 0.0)
    if "clock" not in facts.unknown and facts.clock.synced:
        return "The running sluice has known the time before, and goes on by that, with growing bounds"
    uplink = UplinkState() if "uplink" in facts.unknown else facts.uplink
    return clock_means(replace(facts, uplink=uplink)).removesuffix(".")


def _unsynced(meanwhile: str, keepers: str, wall_us: int, trouble: str | None) -> str:
    """Say what to do about a clock that is not synced, and then what it means."""
    if keepers:
        what = f"{keepers} runs, and has not succeeded yet: see that it reaches its server (timedatectl)"
    else:
        what = "no known time daemon runs here: sudo apt install systemd-timesyncd"
    late = ", or late by as long as the box was off (fake-hwclock)" if FAKE_HWCLOCK.exists() else ""
    shown = f"It says {utc(wall_us)} UTC, which may be right{late}" if trouble is None else f"It is wrong: {trouble}"
    return (
        f"not synced, the kernel says; {what}; or, in a container or virtual machine whose host keeps the clock, "
        f'write clock = "system" under [gateway]. {meanwhile}. {shown}'
    )


def time_daemons() -> str:
    """Names of the time daemons that run on this box; empty if there is none."""
    running = {name_of(process) for process in processes()}
    return " and ".join(sorted(told for name, told in TIME_DAEMONS.items() if name in running))


def _as_the_daemon_sees_it(state: dict[str, Any], at_us: int) -> Iterator[Finding]:
    subject = "clock of the running sluice"
    try:
        view = msgspec.convert(state.get("clock"), ClockView)
    except msgspec.ValidationError:
        # No daemon answers, or it has another version.
        return
    since = f" for {span((at_us - view.since_us) / 1e6)}" if view.since_us else ""
    if not view.synced:
        yield remark("clock-unsynced", subject, f"not synced since this box was started; sluice has watched it{since}")
        return
    known = f"known{since}" + ("" if view.error_us is None else f", now within ± {_ms(view.error_us / 1e3)}")
    if view.steps and view.stepped_us is not None:
        last = clock_set(view, at_us)
        yield remark(last.code, subject, f"{known}; set {counted(view.steps, 'time')} since the start. {last.line}")
    else:
        yield well(subject, known)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.1f} ms" if milliseconds < 1_000 else f"{milliseconds / 1_000:,.1f} s"
