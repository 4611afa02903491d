"""Keeps the daemon's memory, with its secrets, out of core dumps."""

import resource
from contextlib import suppress
from pathlib import Path

_FILTER = Path("/proc/self/coredump_filter")


def forbid() -> None:
    """Keep this process's memory out of every core dump, whoever takes it. Raises nothing.

    A limit of 0 stops the kernel's own files. A program that `core_pattern` names (systemd-coredump, apport) gets the
    dump all the same, and is only told the limit. So no mapping may be dumped either (core(5), coredump_filter): only
    the registers are left.

    PR_SET_DUMPABLE would do this in one call, but then /proc/PID belongs to root. `sluice check`, run as the daemon's
    user, could not see that a port, serial or not, is this gateway's own (`processes`). The daemon could not read how
    much it has written (`buffer.wear`).
    """
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The file is missing if /proc is not mounted, or if the kernel makes no dumps.
    with suppress(OSError):
        _FILTER.write_text("0", encoding="ascii")
