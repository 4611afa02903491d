"""Sets a damaged buffer file aside under a dated name. A cut at any moment leaves it to be found, and gone on with.

Renaming needs no room on the disk: so the name itself says how far it has come.
"""

import sqlite3
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

_UNFINISHED = ".unfinished"
_PARTS = ("-wal", "-shm")


def begin(path: Path) -> Path:
    """Rename a file and its WAL, so that nothing in it is lost; unfinished until what it holds is to be salvaged."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    aside = path.with_name(f"{path.name}.corrupt-{stamp}{_UNFINISHED}")
    path.rename(aside)
    _move_parts(path, aside)
    return aside


def interrupted(path: Path) -> Path | None:
    """A file that was being set aside when the daemon ended, or the disk refused; with its parts beside it."""
    aside = min(path.parent.glob(f"{path.name}.corrupt-*{_UNFINISHED}"), default=None)
    if aside is not None and not path.exists():
        _move_parts(path, aside)
    return aside


def is_known(path: Path, mark: str) -> bool:
    """Whether the file that has taken the place knows by this mark that it has something to salvage."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True)) as file:
        return file.execute("SELECT 1 FROM mark WHERE key = ?", (mark,)).fetchone() is not None
    return False


def discard(path: Path) -> None:
    """Delete a file that was begun in the place of another, and into which nothing has been taken yet."""
    for part in ("", *_PARTS):
        path.with_name(path.name + part).unlink(missing_ok=True)


def final_name(aside: Path) -> str:
    """What the file is called in the end."""
    return aside.name.removesuffix(_UNFINISHED)


def finish(aside: Path) -> None:
    """Give it its last name: that it is to be salvaged is on disk."""
    final = aside.with_name(final_name(aside))
    _move_parts(aside, final)
    aside.rename(final)


def _move_parts(old: Path, new: Path) -> None:
    for part in _PARTS:
        with suppress(FileNotFoundError):
            old.with_name(old.name + part).rename(new.with_name(new.name + part))
