"""Sets a damaged buffer file aside under a dated name. If it is cut off at any moment, the next start goes on.

The name itself says how far the work has come, as renaming needs no room on the disk.
"""

import errno
import os
import sqlite3
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile

from gateway.buffer import schema
from gateway.host.safe_files import sync_folder

_UNFINISHED = ".unfinished"
_SALVAGED = ".salvaged"
_TRIAL_BYTES = 4_096
_PARTS = ("-wal", "-shm")
_FILLED_BY_USE = ("reading", "former_reading", "quarantine", "mark", "loss", "device_run")
"""Tables that are empty in a file that was only made."""
_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""Errors from reading a damaged file. SQLite's messages may themselves hold damaged text."""


def try_disk(path: Path) -> None:
    """Make sure that the disk takes a new file beside this one, if it has room. Raises OSError."""
    try:
        with TemporaryFile(dir=path.parent) as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise


def begin(path: Path) -> Path:
    """Rename a file and its WAL, so that nothing is lost.

    The new name says "unfinished" until a new file on disk knows that it must salvage this one.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    aside = path.with_name(f"{path.name}.corrupt-{stamp}{_UNFINISHED}")
    path.rename(aside)
    _move_parts(path, aside)
    sync_folder(path.parent)
    return aside


def interrupted(path: Path) -> list[Path]:
    """Files whose setting aside was cut off, by the daemon's end or the disk; oldest first, with their parts."""
    asides = sorted(path.parent.glob(f"{path.name}.corrupt-*{_UNFINISHED}"))
    if asides and not path.exists():
        # Only the newest can have been cut off between its own renaming and that of its parts.
        _move_parts(path, asides[-1])
    return asides


def waiting(path: Path) -> list[Path]:
    """Files that were set aside and whose salvage has not ended, by their names; oldest first."""
    return [aside for aside in _set_aside(path) if aside.suffix not in {_UNFINISHED, _SALVAGED}]


def is_known(path: Path, mark: str) -> bool:
    """Whether the new file has this mark, and so knows that it must salvage something.

    False if the new file cannot be read.
    """
    with suppress(*_UNREADABLE), closing(schema.connect_read_only(path)) as file:
        return file.execute("SELECT 1 FROM mark WHERE key = ?", (mark,)).fetchone() is not None
    return False


def is_unused(path: Path) -> bool:
    """Whether a file can be read, and nothing was ever stored in it."""
    with suppress(*_UNREADABLE), closing(schema.connect_read_only(path)) as file:
        made = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return not any(
            file.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in _FILLED_BY_USE if table in made
        )
    return False


def discard(path: Path) -> None:
    """Delete a file and its parts."""
    # The file goes last: its parts alone would be taken for those of the file that is being set aside.
    for part in (*_PARTS, ""):
        path.with_name(path.name + part).unlink(missing_ok=True)


def final_name(aside: Path) -> str:
    """The file's name while it is salvaged."""
    return aside.name.removesuffix(_UNFINISHED)


def finish(aside: Path) -> None:
    """Give a file its final name, once it is on disk that it must be salvaged."""
    _rename(aside, aside.with_name(final_name(aside)))


def salvaged(aside: Path) -> None:
    """Rename a file whose salvage has ended. Nothing happens if it is gone."""
    with suppress(FileNotFoundError):
        _rename(aside, aside.with_name(aside.name + _SALVAGED))


def prune(path: Path, files_max: int) -> list[str]:
    """Delete files whose salvage has ended, oldest first, until `files_max` files are left; return their names."""
    asides = _set_aside(path)
    ended = [aside for aside in asides if aside.suffix == _SALVAGED]
    deleted = ended[: max(0, len(asides) - files_max)]
    for aside in deleted:
        discard(aside)
    return [aside.name for aside in deleted]


def _set_aside(path: Path) -> list[Path]:
    found = path.parent.glob(f"{path.name}.corrupt-*")
    return sorted(aside for aside in found if not aside.name.endswith(_PARTS))


def _rename(old: Path, new: Path) -> None:
    _move_parts(old, new)
    old.rename(new)
    sync_folder(new.parent)


def _move_parts(old: Path, new: Path) -> None:
    for part in _PARTS:
        old_part, new_part = old.with_name(old.name + part), new.with_name(new.name + part)
        if new_part.exists():
            # The part was moved before. A part under the old name now belongs to a discarded file.
            old_part.unlink(missing_ok=True)
        else:
            with suppress(FileNotFoundError):
                old_part.rename(new_part)
