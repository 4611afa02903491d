"""Reads a password from a file that its owner alone may read; syncs the names in a folder."""

import os
import stat
from pathlib import Path
from typing import Final

PASSWORD_BYTES_MAX: Final = 65_535
"""What MQTT's CONNECT can carry (section 1.5.3), and far more than any password that a person chose."""


class PasswordFileError(Exception):
    """The file gives no password; the message begins with `password_file`, and says why and what to do."""


def read_password(path: Path) -> str:
    """The first line of a file that its owner alone can read, without its line end. Raises PasswordFileError."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            # Opening a named pipe would wait for its other end, for ever.
            raise PasswordFileError(f"password_file: {path} is no file; write where the file with the password is")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PasswordFileError(f"password_file can be read by others; run: chmod 0400 {path}")
        # Editors on Windows put a byte order mark first, which nobody has typed as part of the password.
        with path.open(encoding="utf-8-sig") as file:
            password = file.readline(PASSWORD_BYTES_MAX + 2).rstrip("\r\n")
    except UnicodeDecodeError:
        # Not "from": that error holds what was read.
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


def sync_folder(folder: Path) -> None:
    """Come back when the names in a folder are on the disk. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
