"""Starts, stops and asks about the service in systemd, for commands."""

import os
import subprocess
from pathlib import Path
from typing import Final

from gateway.settings import DEFAULT_CONFIG

UNIT: Final = "sluice.service"
SERVICE_START: Final = "start it: sudo systemctl start sluice (journalctl -u sluice says why it stopped)"
PATIENCE_S: Final = 90.0
"""Seconds that systemctl may take: stopping waits for the daemon's last commit."""
_BOOTED: Final = Path("/run/systemd/system")
"""Exists if systemd runs this box (sd_booted(3))."""


class ServiceError(Exception):
    """systemd did not start or stop the service; the message says why and what to do."""


def is_there(config: Path) -> bool:
    """Whether systemd runs this box and knows the service, and these are the service's settings."""
    return config == DEFAULT_CONFIG and _BOOTED.is_dir() and _systemctl("cat", UNIT)[0] == 0


def how_to_start(config: Path) -> str:
    """Tell how a person starts the gateway of these settings."""
    return SERVICE_START if is_there(config) else f"start it: sluice run --config {config}"


def may_be_changed() -> bool:
    """Whether this user may start and stop the service without being asked for a password."""
    return os.geteuid() == 0


def is_active(config: Path) -> bool:
    """Whether the service of these settings runs, or is about to."""
    return (
        config == DEFAULT_CONFIG
        and _BOOTED.is_dir()
        and _systemctl("is-active", UNIT)[1].strip() in {"active", "activating", "reloading"}
    )


def start(*, wait: bool = True) -> None:
    """Start the service now and at every boot, or restart it if it runs. Raises ServiceError."""
    _do("enable", UNIT)
    # A program that systemd runs before the service must not wait for the service.
    _do(*(() if wait else ("--no-block",)), "restart", UNIT)


def restart() -> None:
    """Restart the service if it runs, and wait until it is ready. Raises ServiceError."""
    _do("try-restart", UNIT)


def stop() -> None:
    """Stop the service until somebody starts it, or until the next boot. Raises ServiceError."""
    _do("stop", UNIT)


def fed_s() -> tuple[bool, float]:
    """Whether the service runs, and the seconds from its start to the last time that it fed its watchdog."""
    state, entered_s, watchdog_s = _told()
    return state == "active", max(0, watchdog_s - entered_s)


def started_s() -> float:
    """When the service was ready last, in seconds of the monotonic clock; 0 if it never was."""
    return _told()[1]


def _told() -> tuple[str, float, float]:
    """The service's state, and when it was ready and fed its watchdog last, by the monotonic clock."""
    names = ("ActiveState", "ActiveEnterTimestampMonotonic", "WatchdogTimestampMonotonic")
    _, told = _systemctl("show", f"--property={','.join(names)}", UNIT)
    values = dict(line.partition("=")[::2] for line in told.splitlines())
    entered_us, fed_us = (int(found) if (found := values.get(name, "")).isdecimal() else 0 for name in names[1:])
    return values.get("ActiveState", ""), entered_us / 1e6, fed_us / 1e6


def reboot() -> None:
    """Restart this box. Raises ServiceError."""
    _do("reboot")


def _do(*arguments: str) -> None:
    code, told = _systemctl(*arguments)
    if code != 0:
        words = " ".join(told.split())[:500] or f"exit code {code}"
        raise ServiceError(f"systemctl {' '.join(arguments)} failed: {words}; journalctl -u sluice tells more")


def _systemctl(*arguments: str) -> tuple[int, str]:
    try:
        done = subprocess.run(  # noqa: S603 - words of our own
            ["systemctl", "--no-pager", *arguments],  # noqa: S607 - wherever the system has it
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr
