"""Who looks, and what proc(5) tells of the processes of this box, as far as this user is told."""

import grp
import os
import pwd
from contextlib import suppress
from pathlib import Path

from gateway.host.service_user import as_root

_TTY_FIELD = 4
"""Of /proc/PID/stat, counted behind the name: the controlling terminal's device number."""


def this_user() -> str:
    """Who looks, for messages: what root may, the daemon's user may not."""
    try:
        return f"this user ({pwd.getpwuid(os.geteuid()).pw_name})"
    except KeyError:
        return f"this user ({os.geteuid()})"


def this_group() -> str:
    """The first group of who looks, for commands."""
    try:
        return grp.getgrgid(os.getegid()).gr_name
    except KeyError:
        return str(os.getegid())


def processes() -> list[int]:
    """The processes that there are now."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - names are enough


def opened_by(process: int) -> list[str]:
    """What a process has open; nothing where this user is not told, or it has ended."""
    found = []
    with as_root():
        try:
            names = os.listdir(f"/proc/{process}/fd")  # noqa: PTH208 - names are enough, and there may be thousands
        except OSError:
            return []
        for name in names:
            # Closed in between: what stands behind it may be open still.
            with suppress(OSError):
                found.append(os.readlink(f"/proc/{process}/fd/{name}"))  # noqa: PTH115 - the same
    return found


def has_open(process: int, path: Path) -> bool:
    """Whether a process has a file open, as far as this user is told."""
    return str(path.resolve()) in opened_by(process)


def name_of(process: int) -> str:
    """A program's name, cut off after 15 characters by the kernel."""
    try:
        return Path(f"/proc/{process}/comm").read_text(errors="replace").strip()
    except OSError:
        return "a program"


def terminal_of(process: int) -> int:
    """The device number of the terminal that a process is controlled from, as os.stat's `st_rdev`; 0 for none.

    Everybody may read it of every process, unlike what a process has open.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return 0
    # The name before stands in parentheses and may hold some.
    number = int(stat.rpartition(")")[2].split()[_TTY_FIELD])
    return os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00)


def running(program: str) -> int | None:
    """A process of this program."""
    return next((process for process in processes() if name_of(process) == program), None)
