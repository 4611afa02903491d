"""Reads passwords and wipes secrets in folders that others may write too, and follows no link that others made."""

import errno
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

PASSWORD_BYTES_MAX: Final = 65_535
"""Bytes that MQTT's CONNECT can carry (section 1.5.3): far more than any password that a person chose."""
WIPED_BYTES_MAX: Final = 1_000_000
"""Larger files are only removed. They hold no secrets, and overwriting them takes long and hardly reaches flash."""
_CHUNK_BYTES: Final = 65_536
_LINKS_MAX: Final = 40
"""Links followed on one path: as many as Linux follows (path_resolution(7))."""
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

Judge = Callable[[os.stat_result, os.stat_result], str | None]
"""Gets a folder on a path, and the path's next entry in it. Returns why these are not to be trusted, or None."""


class PasswordFileError(Exception):
    """The file gives no password. The message begins with `password_file`, and says why and what to do."""


def read_password(path: Path) -> str:
    """Read the first line of a file that its owner alone can read, without its line end. Raises PasswordFileError."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            # Opening a named pipe would wait for ever for its other end.
            raise PasswordFileError(f"password_file: {path} is no file; write where the file with the password is")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PasswordFileError(f"password_file can be read by others; run: chmod 0400 {path}")
        # Editors on Windows put a byte order mark first, which is no part of the password.
        with path.open(encoding="utf-8-sig") as file:
            password = file.readline(PASSWORD_BYTES_MAX + 2).rstrip("\r\n")
    except UnicodeDecodeError:
        # Not "from": that error holds the bytes that were read.
        raise PasswordFileError(f"password_file cannot be read: {path} is not UTF-8 text; save it as UTF-8") from None
    except PermissionError as error:
        raise PasswordFileError(
            f"password_file cannot be read: {path} is not this user's; give it to the user that sluice runs as (chown)"
        ) from error
    except OSError as error:
        raise PasswordFileError(
            f"password_file cannot be read: {path}: {error.strerror}; write the password there, chmod 0400"
        ) from error
    if not password:
        raise PasswordFileError(f"password_file is empty; write the password into {path}")
    if len(password.encode()) > PASSWORD_BYTES_MAX:
        raise PasswordFileError(
            f"password_file: its first line has more than {PASSWORD_BYTES_MAX} bytes, which is no password; "
            f"write the password, and nothing else, into {path}"
        )
    return password


def make_private(path: Path) -> None:
    """Make an empty file that its owner alone may read and write, whatever the umask. Raises OSError.

    An existing file stays as it is.
    """
    try:
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    try:
        os.fchmod(made, 0o600)
    finally:
        os.close(made)


def write_whole(path: Path, content: bytes | Path, mode: int) -> None:
    """Replace a file in a folder that nobody else can write. A power cut leaves the old file or the new one.

    `content` is bytes, or a file whose content is copied. Raises OSError; then the old file is there.
    """
    # If a power cut leaves it behind, the next call writes over it.
    begun = path.with_name(f"{path.name}.new")
    try:
        opened = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(opened, "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file)
            file.flush()
            os.fchmod(opened, mode)
            os.fsync(opened)
        begun.replace(path)
    except OSError:
        begun.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path, start: int | None = None) -> None:
    """Wait until the names in a folder are on the disk. Raises OSError.

    `start` is a descriptor of the folder that a relative path begins at.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=start)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# -- files that somebody else may have put there -----------------------------------------------------


class LeftAloneError(OSError):
    """A file was not touched because it may be somebody else's; `strerror` says why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))


@contextmanager
def reached(path: Path, judge: Judge) -> Iterator[int]:
    """Yield a descriptor (O_PATH) of what a path leads to. Judges each step and each link on the way.

    Raises LeftAloneError if one is not to be trusted, and OSError.
    """
    ahead, links = deque(path.absolute().parts[1:]), 0
    with ExitStack() as opened:
        here = _opened("/", opened)
        while ahead:
            step = _opened(ahead.popleft(), opened, here)
            found = os.fstat(step)
            why = judge(os.fstat(here), found)
            if why is not None:
                raise LeftAloneError(path, why)
            if not stat.S_ISLNK(found.st_mode):
                here = step
                continue
            links += 1
            if links > _LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = os.readlink("", dir_fd=step)
            ahead.extendleft(reversed([part for part in target.split("/") if part]))
            if target.startswith("/"):
                here = _opened("/", opened)
        yield here


@contextmanager
def true_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of a file's folder. Follows no link on the way that somebody else can have made.

    Raises LeftAloneError, OSError.
    """
    with reached(path.parent, _why_no_link) as found:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found)
        try:
            yield folder
        finally:
            os.close(folder)


def true_path(path: Path) -> Path:
    """The path of a file without links. Root follows no link on the way that somebody else can have made.

    Nothing needs to be there. Raises LeftAloneError.
    """
    if os.geteuid() == 0:
        try:
            with reached(path, _why_no_link):
                pass
        except LeftAloneError:
            raise
        except OSError:
            # The path ends before its file, so it leads to nothing.
            pass
    return Path(os.path.realpath(path))


def why_others_could_change(path: Path, owner: int = 0) -> str | None:
    """Tell why others than `owner` and root could write or replace a file; None if they cannot.

    The folders above it count, and those above each link. Raises OSError.
    """

    def judge(folder: os.stat_result, entry: os.stat_result) -> str | None:
        if not _keeps_names(folder, owner):
            return "others can write in a folder above it"
        return None if entry.st_uid in {0, owner} else "it, or a folder above it, is another user's"

    try:
        with _named(path), reached(path, judge) as file:
            found = os.fstat(file)
    except LeftAloneError as error:
        return error.strerror
    if found.st_uid != owner:
        return "it is another user's"
    return "others can write it" if found.st_mode & _OTHERS_WRITE else None


def why_left_alone(path: Path) -> str | None:
    """Tell why `wipe` would not touch a file; None if it would, or if there is none. Raises OSError."""
    try:
        with suppress(FileNotFoundError), _named(path), _of_ours(path):
            pass
    except LeftAloneError as error:
        return error.strerror
    return None


def wipe(path: Path) -> None:
    """Remove a file; overwrite a small one first. Does nothing if the file is gone.

    Whoever can write in its folder, or in one above it, could put a link there. Root would then destroy somebody else's
    file for them. So no link that others can make is followed. A file stays if it has a second name, or if it may be
    another user's.

    Raises LeftAloneError if the file is not touched, and OSError.
    """
    with suppress(FileNotFoundError), _named(path), _of_ours(path) as (folder, file):
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_size <= WIPED_BYTES_MAX:
            _overwrite(file, found.st_size)
        os.unlink(path.name, dir_fd=folder)
        sync_folder(Path(), folder)


@contextmanager
def _of_ours(path: Path) -> Iterator[tuple[int, int]]:
    """Yield descriptors of a file's folder and of the file. Raises LeftAloneError, OSError."""
    with reached(path.parent, _why_no_link) as folder, ExitStack() as opened:
        file = _opened(path.name, opened, folder)
        why = _why_not_ours(os.fstat(folder), os.fstat(file))
        if why is not None:
            raise LeftAloneError(path, why)
        yield folder, file


def _why_no_link(folder: os.stat_result, entry: os.stat_result) -> str | None:
    if not stat.S_ISLNK(entry.st_mode):
        return None
    is_ours = _keeps_names(folder, os.geteuid()) and entry.st_uid in {0, os.geteuid()}
    return None if is_ours else "a folder above it is a symbolic link that somebody else can have made"


def _why_not_ours(folder: os.stat_result, file: os.stat_result) -> str | None:
    if stat.S_ISLNK(file.st_mode):
        return "it is a symbolic link, and what that leads to may be somebody else's"
    if stat.S_ISDIR(file.st_mode):
        return "it is a folder"
    if file.st_nlink != 1:
        return "it has a second name (a hard link), and may be somebody else's"
    # If others cannot put files into the folder, then this user or root gave the file to its owner.
    if _is_guarded(folder, os.geteuid()) or file.st_uid in {0, os.geteuid(), folder.st_uid}:
        return None
    return "it is another user's than its folder"


def _is_guarded(folder: os.stat_result, owner: int) -> bool:
    """Whether nobody but `owner` and root can put anything into a folder."""
    return folder.st_uid in {0, owner} and not folder.st_mode & _OTHERS_WRITE


def _keeps_names(folder: os.stat_result, owner: int) -> bool:
    """Whether nobody else can replace what `owner` and root have in a folder.

    In a sticky folder, such as /tmp, others can add names but change none of these.
    """
    is_sticky = folder.st_uid in {0, owner} and bool(folder.st_mode & stat.S_ISVTX)
    return is_sticky or _is_guarded(folder, owner)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make errors name the file, and not a step on the way to it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _opened(name: str, until: ExitStack, folder: int | None = None) -> int:
    """Open a name itself, even a link, so that nothing can be read or changed."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    until.callback(os.close, handle)
    return handle


def _overwrite(file: int, size: int) -> None:
    """Overwrite the bytes of a descriptor's file, whatever its name is now."""
    path = f"/proc/self/fd/{file}"
    try:
        # Its owner may have removed every right to write (0400).
        if not os.access(path, os.W_OK):
            os.chmod(path, 0o600)  # noqa: PTH101 - no name of a file
        out = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        # A FileNotFoundError would say that the file is gone.
        raise OSError(errno.ENOSYS, "it cannot be overwritten, for /proc is not mounted: mount it") from error
    try:
        while size > 0:
            size -= os.write(out, bytes(min(size, _CHUNK_BYTES)))
        os.fsync(out)
    finally:
        os.close(out)
