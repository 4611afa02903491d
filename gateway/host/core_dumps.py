"""Keeps what the daemon has in memory, secrets among it, out of core dumps."""

import resource
from contextlib import suppress
from pathlib import Path

_FILTER = Path("/proc/self/coredump_filter")


def forbid() -> None:
    """See to it that no dump of this process holds its memory, whoever would take the dump. Raises nothing.

    A limit of 0 is enough for the kernel's own files; a program that `core_pattern` names (systemd-coredump, apport) is
    given the dump all the same, and is only told of the limit. So no mapping is to be dumped at all either (core(5),
    coredump_filter): what is left is the registers.

    PR_SET_DUMPABLE would do the same in one call, but /proc/PID is root's then: `sluice check`, run as the daemon's
    user, could not see any more that a port, serial or not, is this gateway's own (`processes`), and the daemon itself
    could not read how much it has written (`buffer.wear`).
    """
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where /proc is not mounted, or the kernel makes no dumps.
    with suppress(OSError):
        _FILTER.write_text("0", encoding="ascii")
