"""Sets a damaged buffer file aside under a dated name. A cut at any moment leaves it to be found, and gone on with.

Renaming needs no room on the disk: so the name itself says how far it has come.
"""

import sqlite3
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

from gateway.host.safe_files import sync_folder

_UNFINISHED = ".unfinished"
_SALVAGED = ".salvaged"
_PARTS = ("-wal", "-shm")
_FILLED_BY_USE = ("reading", "quarantine", "mark", "loss", "device_run")
"""The tables that a file which has only been made has nothing in."""
_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""What reading a damaged file may raise: the words of an error of SQLite's may themselves hold damaged text."""


def begin(path: Path) -> Path:
    """Rename a file and its WAL, so that nothing in it is lost; unfinished until what it holds is to be salvaged."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    aside = path.with_name(f"{path.name}.corrupt-{stamp}{_UNFINISHED}")
    path.rename(aside)
    _move_parts(path, aside)
    sync_folder(path.parent)
    return aside


def interrupted(path: Path) -> list[Path]:
    """Files that were being set aside when the daemon ended, or the disk refused; oldest first, with their parts."""
    asides = sorted(path.parent.glob(f"{path.name}.corrupt-*{_UNFINISHED}"))
    if asides and not path.exists():
        # It is the newest one that was cut off between its own renaming and its parts'.
        _move_parts(path, asides[-1])
    return asides


def waiting(path: Path) -> list[Path]:
    """Files that were set aside and whose salvage has not ended, as their names say; oldest first."""
    return [aside for aside in _set_aside(path) if aside.suffix not in {_UNFINISHED, _SALVAGED}]


def is_known(path: Path, mark: str) -> bool:
    """Whether the file that has taken the place knows by this mark that it has something to salvage.

    False where that cannot be read.
    """
    with suppress(*_UNREADABLE), closing(_opened(path)) as file:
        return file.execute("SELECT 1 FROM mark WHERE key = ?", (mark,)).fetchone() is not None
    return False


def is_unused(path: Path) -> bool:
    """Whether a file can be read, and nothing has ever been taken into it."""
    with suppress(*_UNREADABLE), closing(_opened(path)) as file:
        made = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return not any(
            file.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in _FILLED_BY_USE if table in made
        )
    return False


def discard(path: Path) -> None:
    """Delete a file that was begun in the place of another, and into which nothing has been taken yet."""
    # Itself last: parts without their file would be taken for those of the one that is being set aside.
    for part in (*_PARTS, ""):
        path.with_name(path.name + part).unlink(missing_ok=True)


def final_name(aside: Path) -> str:
    """What the file is called while it is salvaged."""
    return aside.name.removesuffix(_UNFINISHED)


def finish(aside: Path) -> None:
    """Give it the name that it is salvaged by: that it is to be salvaged is on disk."""
    _rename(aside, aside.with_name(final_name(aside)))


def salvaged(aside: Path) -> None:
    """Have the name say that nothing more is to be had of it. Nothing happens where it is gone."""
    with suppress(FileNotFoundError):
        _rename(aside, aside.with_name(aside.name + _SALVAGED))


def prune(path: Path, files_max: int) -> list[str]:
    """Delete files whose salvage has ended, oldest first, until no more than so many are left of all; their names."""
    asides = _set_aside(path)
    ended = [aside for aside in asides if aside.suffix == _SALVAGED]
    deleted = ended[: max(0, len(asides) - files_max)]
    for aside in deleted:
        discard(aside)
    return [aside.name for aside in deleted]


def _set_aside(path: Path) -> list[Path]:
    found = path.parent.glob(f"{path.name}.corrupt-*")
    return sorted(aside for aside in found if not aside.name.endswith(_PARTS))


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)


def _rename(old: Path, new: Path) -> None:
    _move_parts(old, new)
    old.rename(new)
    sync_folder(new.parent)


def _move_parts(old: Path, new: Path) -> None:
    for part in _PARTS:
        old_part, new_part = old.with_name(old.name + part), new.with_name(new.name + part)
        if new_part.exists():
            # It was moved before: what stands under the old name now is of a file that was discarded.
            old_part.unlink(missing_ok=True)
        else:
            with suppress(FileNotFoundError):
                old_part.rename(new_part)
