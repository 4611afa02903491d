"""Writes the files of a setup. The settings come last, by one renaming, so new files count together or not at all."""

import errno
import fcntl
import os
import pwd
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gateway.host.safe_files import LeftAloneError, sync_folder, wipe
from gateway.host.service_user import SERVICE_USER
from gateway.settings import DEFAULT_CONFIG

SECRETS_FOLDER: Final = "secrets"
"""Folder beside the settings for secrets that the running service reads again when they change."""
CREDENTIALS_FOLDER: Final = "credentials"
"""Folder beside the settings for secrets that systemd hands to the service when it starts."""
_BEGUN: Final = ".setup-unfinished"
"""Ending of the name of a file that is being prepared. A file that was cut off keeps it, and counts for nothing."""
_HELD_BACK: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SetupWriteError(Exception):
    """A file cannot be written, and nothing new counts. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner and group of a file."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be written."""

    path: Path
    content: bytes = field(repr=False)
    mode: int
    owner: Owner | None = None
    """None for the user who runs setup."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder to be made. A folder that exists keeps its owner and mode."""

    path: Path
    mode: int
    owner: Owner | None = None
    may_be_link: bool = True
    """False for secrets: root may set up a folder whose owner could make a link to anywhere."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Owners of files by their content. All are None if the user is not root: then files belong to the user."""

    settings: Owner | None
    secrets_folder: Owner | None
    secrets: Owner | None
    """Owner of secrets that the running service reads again."""
    credentials: Owner | None
    """Owner of secrets that systemd hands to the service."""
    data: Owner | None


def owners_for(config: Path) -> Owners:
    """Choose the owners of the files for settings at a path.

    In the service's own folder, root sets files up for the service's user. In any other folder, all files belong to the
    folder's owner.
    """
    if os.geteuid() != 0:
        return Owners(None, None, None, None, None)
    folder = config.parent
    if folder == DEFAULT_CONFIG.parent:
        with suppress(KeyError):
            user = pwd.getpwnam(SERVICE_USER)
            shared, own = Owner(0, user.pw_gid), Owner(user.pw_uid, user.pw_gid)
            return Owners(shared, shared, own, Owner(0, 0), own)
    with suppress(OSError):
        found = folder.stat()
        whose = Owner(found.st_uid, found.st_gid)
        return Owners(whose, whose, whose, whose, whose)
    return Owners(None, None, None, None, None)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep a second setup out of a folder while files are written. Raises SetupWriteError."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SetupWriteError(f"{folder} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise SetupWriteError(f"another setup is writing into {folder} just now: wait for it, and try again") from error
    finally:
        os.close(held)


def writable_trouble(config: Path) -> str | None:
    """Reason why settings cannot be written at a path, found before any question; None if they can be."""
    folder = config.parent
    if folder == DEFAULT_CONFIG.parent and os.geteuid() != 0:
        return (
            f"only root may write {folder}: run `sudo sluice setup`, or name a file of your own, such as "
            "--config gateway.toml"
        )
    # A folder that this user may not see is not found here, and its parent is reported instead.
    existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not os.path.isdir(existing):  # noqa: PTH112 - a Path's own raises where a link leads to what may not be seen
        return f"{existing} is no folder; name another path with --config"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"this user may not write in {existing}: run this as root, or name another path with --config"
    if os.path.lexists(config) and (config.is_symlink() or not config.is_file()):
        return f"{config} is no plain file, and setup would replace it by one; name the file itself with --config"
    return None


def make_folders(folders: Sequence[Folder]) -> None:
    """Make the folders that are missing. Raises SetupWriteError."""
    for folder in folders:
        try:
            _make(folder)
        except OSError as error:
            raise SetupWriteError(f"{folder.path} cannot be made: {error.strerror or error}") from error


def refuse_changed(config: Path, before: str) -> None:
    """Raise SetupWriteError if the settings have changed since they were read."""
    now = None
    with suppress(OSError, UnicodeDecodeError):
        now = config.read_text(encoding="utf-8-sig") if config.exists() else ""
    if now != before:
        raise SetupWriteError(f"{config} was changed meanwhile, so nothing was written: run this again")


def write_files(files: Sequence[NewFile], config: Path, before: str) -> None:
    """Write the files in their order. The last one is `config`, which makes the others count.

    All files are prepared under other names, and synced, before the first one takes its place. `before` is the text of
    `config` when it was read. Raises SetupWriteError.
    """
    with _alone_in(config.parent):
        refuse_changed(config, before)
        for folder in (config.parent, config.parent / SECRETS_FOLDER, config.parent / CREDENTIALS_FOLDER):
            _wipe_unfinished(folder)
        _write(files)


def _write(files: Sequence[NewFile]) -> None:
    try:
        try:
            for file in files:
                _prepare(file)
            with not_interrupted():
                for file in files:
                    _rename(_begun(file.path), file.path)
                    sync_folder(file.path.parent)
        finally:
            for file in files:
                with suppress(FileNotFoundError):
                    _begun(file.path).unlink()
    except OSError as error:
        where = error.filename or files[-1].path
        raise SetupWriteError(
            f"{where} cannot be written: {error.strerror or error}; the settings are as they were"
        ) from error


def _wipe_unfinished(folder: Path) -> None:
    """Wipe files that a cut-off setup has left: they may hold secrets under names that this setup does not use."""
    with suppress(OSError):
        for path in [path for path in folder.iterdir() if is_unfinished(path.name)]:
            # A file that somebody else may have put there stays, and the others are wiped all the same.
            with suppress(LeftAloneError):
                wipe(path)


def is_unfinished(name: str) -> bool:
    """Tell by its name whether a file is being prepared, or was when setup was cut off."""
    return name.startswith(".") and name.endswith(_BEGUN)


def _make(folder: Folder) -> None:
    if folder.path.is_symlink() and not folder.may_be_link:
        raise OSError(errno.ENOTDIR, "it is a link; make it a folder of its own", str(folder.path))
    if folder.path.is_dir():
        return
    folder.path.mkdir(mode=0o700, parents=True)
    if folder.owner is not None:
        os.chown(folder.path, folder.owner.uid, folder.owner.gid)
    folder.path.chmod(folder.mode)
    sync_folder(folder.path.parent)


def _prepare(file: NewFile) -> None:
    begun = _begun(file.path)
    with suppress(FileNotFoundError):
        begun.unlink()
    # Mode 0600: nobody else may read it before it has its owner and its mode.
    made = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(made, "wb") as out:
        out.write(file.content)
        out.flush()
        if file.owner is not None:
            os.fchown(made, file.owner.uid, file.owner.gid)
        os.fchmod(made, file.mode)
        os.fsync(made)


def _begun(path: Path) -> Path:
    return path.with_name(f".{path.name}{_BEGUN}")


def _rename(begun: Path, path: Path) -> None:
    """Rename a file. Tests cut a setup off here."""
    begun.replace(path)


@contextmanager
def not_interrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until a few renamings are done. A power cut or SIGKILL does not wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
