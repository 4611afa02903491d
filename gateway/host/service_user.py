"""Lets a command that root runs look at this box as the user of the gateway, who may do less than root."""

import os
import pwd
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.host.safe_files import LeftAloneError, true_folder
from gateway.settings import DEFAULT_CONFIG

SERVICE_USER: Final = "sluice"
"""The user that the package makes for its service."""


class User(Struct, frozen=True):
    """The user that the gateway runs as."""

    uid: int
    gid: int
    name: str

    @property
    def groups(self) -> list[int]:
        """All groups of the user, such as dialout."""
        try:
            return os.getgrouplist(pwd.getpwuid(self.uid).pw_name, self.gid)
        except KeyError:
            return [self.gid]


def service_user(config: Path, buffer: Path) -> User | None:
    """Find the gateway's user: the owner of the buffer's folder, else the package's user; None if that is root.

    Raises LeftAloneError if a link leads to the folder that somebody else can have made.
    """
    found = _seen(buffer, ".")
    if found is not None and found.st_uid != 0:
        try:
            known = pwd.getpwuid(found.st_uid)
        except KeyError:
            return User(found.st_uid, found.st_gid, str(found.st_uid))
        return User(known.pw_uid, known.pw_gid, known.pw_name)
    if config == DEFAULT_CONFIG:
        with suppress(KeyError):
            known = pwd.getpwnam(SERVICE_USER)
            return User(known.pw_uid, known.pw_gid, known.pw_name)
    return None


def is_of_root(buffer: Path) -> bool:
    """Whether the buffer's file is root's own, so that root runs the gateway. Nobody else can make it seem so.

    Raises LeftAloneError as `service_user` does.
    """
    found = _seen(buffer, buffer.name)
    return found is not None and found.st_uid == 0 and stat.S_ISREG(found.st_mode) and found.st_nlink == 1


def _seen(buffer: Path, name: str) -> os.stat_result | None:
    """A file in the buffer's folder, or the folder itself (`.`); None if it is not there. Raises LeftAloneError."""
    try:
        with true_folder(buffer) as folder:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except LeftAloneError:
        raise
    except OSError:
        return None


@contextmanager
def as_service(config: Path, buffer: Path) -> Iterator[User | None]:
    """If this is root, be the user that the gateway runs as, and yield that user; yield None if nothing changes.

    Raises LeftAloneError as `service_user` does.
    """
    user = service_user(config, buffer) if os.geteuid() == 0 else None
    if user is None:
        yield None
        return
    groups = os.getgroups()
    try:
        if not _become(user):
            _become_root(groups)
            user = None
        yield user
    finally:
        _become_root(groups)


def _become(user: User) -> bool:
    """Become a user. Return whether it worked and the user can read this program, which loads modules on use."""
    try:
        os.setgroups(user.groups)
        os.setresgid(user.gid, user.gid, 0)
        # The saved ID stays root's: it is the way back.
        os.setresuid(user.uid, user.uid, 0)
    except OSError:
        # Root of a container may lack the right, or the user.
        return False
    return _may_read_program()


def _become_root(groups: list[int]) -> None:
    os.setresuid(0, 0, 0)
    # If this is not permitted, then `_become` was not permitted either.
    with suppress(OSError):
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


def _may_read_program() -> bool:
    """Whether this user can read the Python and its modules: a developer's may be root's alone."""
    return all(os.access(file, os.R_OK) for file in (__file__, os.__file__, sys.executable))


@contextmanager
def as_root() -> Iterator[None]:
    """Within `as_service`: be root for what only root is told. Elsewhere nothing changes."""
    real, effective, saved = os.getresuid()
    if effective == 0 or saved != 0:
        yield
        return
    os.setresuid(0, 0, 0)
    try:
        yield
    finally:
        os.setresuid(real, effective, saved)
