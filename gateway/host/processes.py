"""Reads what proc(5) tells this user about the processes of this box."""

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gateway.host.service_user import as_root

_STATE_FIELD, _TTY_FIELD = 0, 4
"""Fields of /proc/PID/stat, counted behind the name: what it does, and device number of the controlling terminal."""
_ENDED = ("Z", "X")
"""States of a process that has ended, and whose parent may not have asked about it yet."""


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


def opened_by(process: int) -> dict[str, str]:
    """Return what a process has open, and where below /proc it is.

    It is empty if this user may not see it, or if the process has ended.
    """
    found = {}
    with as_root():
        try:
            names = os.listdir(f"/proc/{process}/fd")  # noqa: PTH208 - names are enough, and there may be thousands
        except OSError:
            return {}
        for name in names:
            # This descriptor was closed in between; those after it may still be open.
            with suppress(OSError):
                descriptor = f"/proc/{process}/fd/{name}"
                found[os.readlink(descriptor)] = descriptor  # noqa: PTH115 - the same
    return found


def has_open(process: int, path: Path) -> bool:
    """Whether a process has a file or a device open, as far as this user is told."""
    return is_among(opened_by(process), str(path.resolve()))


def is_among(opened: Mapping[str, str], real_path: str) -> bool:
    """Whether a file or a device is among those that a process has open (`opened_by`).

    In a container, the same name may be of another file. A serial port's number is the same everywhere, but each
    container counts its own terminals from 0.
    """
    if real_path not in opened:
        return False
    try:
        ours = os.stat(real_path)  # noqa: PTH116 - as above
        with as_root():
            theirs = os.stat(opened[real_path])  # noqa: PTH116 - as above
    except OSError:
        return False
    if stat.S_ISCHR(ours.st_mode) and not real_path.startswith("/dev/pts/"):
        return ours.st_rdev == theirs.st_rdev
    return os.path.samestat(ours, theirs)


def name_of(process: int) -> str:
    """Name of a process's program, cut off after 15 characters by the kernel."""
    try:
        return Path(f"/proc/{process}/comm").read_text(errors="replace").strip()
    except OSError:
        return "a program"


def terminal_of(process: int) -> int:
    """Device number of the terminal that controls a process, as os.stat's `st_rdev`; 0 for none.

    Any user may read it of every process, unlike the files that a process has open. A process that has ended has none.
    A container counts its own terminals from 0, so what is said of a process in one is left out.
    """
    try:
        told = Path(f"/proc/{process}/stat").read_text(errors="replace")
        # The name before them stands in parentheses, and may itself contain some.
        fields = told.rpartition(")")[2].split()
        number = int(fields[_TTY_FIELD])
        # Most processes have none, and need no second look.
        if not number or fields[_STATE_FIELD] in _ENDED or _is_in_container(process):
            return 0
    except OSError:
        return 0
    return os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00)


def _is_in_container(process: int) -> bool:
    """Whether a process has another number within a container. Raises OSError if it has ended."""
    status = Path(f"/proc/{process}/status").read_text(errors="replace")
    return any(line.startswith("NSpid:") and len(line.split()) > 2 for line in status.splitlines())


def running(program: str) -> int | None:
    """Find a process of this program; None if there is none."""
    return next((process for process in processes() if name_of(process) == program), None)
