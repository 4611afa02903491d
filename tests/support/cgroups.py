"""A control group of its own for a program that manages those below it, such as a box's systemd (cgroups(7)).

Two boxes that were started in one group would share all groups below it: each would clear away the other's.
"""

import errno
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import patience

NAMED = "name=systemd"
"""The hierarchy that systemd keeps its units in where cgroup 1 is mounted, beside or without cgroup 2."""
GONE_S_MAX = 10.0
_JOINING = 'for group in {groups}; do echo $$ > "$group/cgroup.procs"; done; exec "$@"'


class Cgroup:
    """One group, in each hierarchy that systemd uses here."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def joined(self, *command: str) -> list[str]:
        """The command that runs another one in this group."""
        groups = " ".join(shlex.quote(str(folder)) for folder in self._folders)
        return ["sh", "-ec", _JOINING.format(groups=groups), "sh", *command]

    def remove(self) -> None:
        """With all groups below it, once their last process is gone. Raises OSError where one stays."""
        deadline = time.monotonic() + patience(GONE_S_MAX)
        for folder in self._folders:
            for below, _, _ in os.walk(folder, topdown=False):
                while True:
                    try:
                        Path(below).rmdir()
                        break
                    except OSError as error:
                        # What was killed ends a moment later.
                        if error.errno != errno.EBUSY or time.monotonic() > deadline:
                            raise
                    time.sleep(0.02)


@contextmanager
def new_cgroup(name: str) -> Iterator[Cgroup]:
    """A group below this process's own, for the length of a `with`; what runs in it has ended before. Needs root."""
    made = Cgroup([parent / name for parent in _own_folders()])
    for folder in made._folders:
        folder.mkdir()
    try:
        yield made
    finally:
        made.remove()


def _own_folders() -> list[Path]:
    """Folders of this process in the hierarchies that systemd uses: /proc/self/cgroup, below their mount points."""
    mounts = _mount_points()
    own = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in mounts:
            own.append(mounts[controllers] / path.lstrip("/"))
    return own


def _mount_points() -> dict[str, Path]:
    """Mount points by controllers, as in /proc/self/cgroup: none for cgroup 2."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, about = line.partition(" - ")
        kind, _, options = about.split(" ", 2)
        if kind == "cgroup2":
            found[""] = Path(fields.split()[4])
        elif kind == "cgroup" and NAMED in options.split(","):
            found[NAMED] = Path(fields.split()[4])
    return found
