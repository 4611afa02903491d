"""Reads what proc(5) tells this user about the processes of this box."""

import grp
import os
import pwd
from contextlib import suppress
from pathlib import Path

from gateway.host.service_user import as_root

_TTY_FIELD = 4
"""Field of /proc/PID/stat, counted behind the name: device number of the controlling terminal."""


def this_user() -> str:
    """Name the user of this process, for messages: root may do more than the daemon's user."""
    try:
        return f"this user ({pwd.getpwuid(os.geteuid()).pw_name})"
    except KeyError:
        return f"this user ({os.geteuid()})"


def this_group() -> str:
    """Name the first group of this process's user, for commands."""
    try:
        return grp.getgrgid(os.getegid()).gr_name
    except KeyError:
        return str(os.getegid())


def processes() -> list[int]:
    """Return the numbers of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - names are enough


def opened_by(process: int) -> list[str]:
    """Return what a process has open; empty if this user may not see it, or if the process has ended."""
    found = []
    with as_root():
        try:
            names = os.listdir(f"/proc/{process}/fd")  # noqa: PTH208 - names are enough, and there may be thousands
        except OSError:
            return []
        for name in names:
            # This descriptor was closed in between; those after it may still be open.
            with suppress(OSError):
                found.append(os.readlink(f"/proc/{process}/fd/{name}"))  # noqa: PTH115 - the same
    return found


def has_open(process: int, path: Path) -> bool:
    """Whether a process has a file open, as far as this user is told."""
    return str(path.resolve()) in opened_by(process)


def name_of(process: int) -> str:
    """Name of a process's program, cut off after 15 characters by the kernel."""
    try:
        return Path(f"/proc/{process}/comm").read_text(errors="replace").strip()
    except OSError:
        return "a program"


def terminal_of(process: int) -> int:
    """Device number of the terminal that controls a process, as os.stat's `st_rdev`; 0 for none.

    Any user may read it of every process, unlike the files that a process has open.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return 0
    # The name before it stands in parentheses, and may itself contain some.
    number = int(stat.rpartition(")")[2].split()[_TTY_FIELD])
    return os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00)


def running(program: str) -> int | None:
    """Find a process of this program; None if there is none."""
    return next((process for process in processes() if name_of(process) == program), None)
