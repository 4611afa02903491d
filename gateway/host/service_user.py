"""As root, a command can look at this box as the user that the gateway runs as: what that one may not, root may."""

import os
import pwd
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.settings import DEFAULT_CONFIG

SERVICE_USER: Final = "sluice"
"""Whom the package makes for its service."""


class User(Struct, frozen=True):
    """Whose processes the gateway's are."""

    uid: int
    gid: int
    name: str

    @property
    def groups(self) -> list[int]:
        """All that it is in, such as dialout."""
        try:
            return os.getgrouplist(pwd.getpwuid(self.uid).pw_name, self.gid)
        except KeyError:
            return [self.gid]


def service_user(config: Path, buffer: Path) -> User | None:
    """Whom the gateway runs as: whose folder the buffer is in, else whom the package made; None where that is root."""
    with suppress(OSError):
        found = buffer.parent.stat()
        if found.st_uid != 0:
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


@contextmanager
def as_service(config: Path, buffer: Path) -> Iterator[User | None]:
    """As root: be the user that the gateway runs as, meanwhile, and give it; None where this stays who it is."""
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
    """Whether this was done, and this program can still be read: its modules are loaded when they are used."""
    try:
        os.setgroups(user.groups)
        os.setresgid(user.gid, user.gid, 0)
        # What is kept of root's is the way back.
        os.setresuid(user.uid, user.uid, 0)
    except OSError:
        # Root of a container may have neither the right nor such a user.
        return False
    return _may_read_program()


def _become_root(groups: list[int]) -> None:
    os.setresuid(0, 0, 0)
    # Whoever may not do this has not done the other.
    with suppress(OSError):
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


def _may_read_program() -> bool:
    """A developer's Python may be root's alone."""
    return all(os.access(file, os.R_OK) for file in (__file__, os.__file__, sys.executable))


@contextmanager
def as_root() -> Iterator[None]:
    """Within `as_service`: be root for what nobody else is told. Nothing is changed elsewhere."""
    real, effective, saved = os.getresuid()
    if effective == 0 or saved != 0:
        yield
        return
    os.setresuid(0, 0, 0)
    try:
        yield
    finally:
        os.setresuid(real, effective, saved)
