"""Checks what SQLite takes on trust about the WAL at a start: that it is on the disk, and that it is all there was.

SQLite silently ignores everything behind the first unsound frame (its file format, section 4). After a power cut that
is right for the last commit, which was not acknowledged. Commits before it were.
"""

import os
from contextlib import suppress
from pathlib import Path

from gateway.buffer.sqlite_pages import FRAME_HEADER_BYTES, PAGE_BYTES_DEFAULT, WAL_HEADER_BYTES, PageError, wal

_FRAME_BYTES = FRAME_HEADER_BYTES + PAGE_BYTES_DEFAULT
_SALTS = slice(8, 16)
_COMMIT = slice(4, 8)
_NO_COMMIT = bytes(4)


def write_again(path: Path) -> None:
    """Write the WAL of the buffer at `path` once more, so that the next sync brings it to the disk or fails.

    After a failed sync, the kernel's memory has data that the disk does not have. Whoever opens the file then finds
    that commit, and a checkpoint, whose syncs succeed, moves some of its pages into the file. If a power cut then takes
    the commit away, half of it stays. For the buffer's one writer, before any checkpoint. Raises OSError.
    """
    with suppress(FileNotFoundError), path.with_name(path.name + "-wal").open("r+b") as file:
        descriptor = file.fileno()
        header = os.pread(descriptor, WAL_HEADER_BYTES, 0)
        os.pwrite(descriptor, header, 0)
        place = WAL_HEADER_BYTES
        while frame := os.pread(descriptor, _FRAME_BYTES, place):
            if frame[_SALTS] != header[16:24]:
                return
            os.pwrite(descriptor, frame, place)
            place += _FRAME_BYTES


def lacks_commits(path: Path, database: int, recovered: int) -> bool:
    """Whether the WAL of the buffer at `path` has acknowledged commits behind the frames that SQLite `recovered`.

    `database` is an open descriptor of the file itself: closing a new one would drop the locks that SQLite holds. Each
    commit is synced before the next is written, so a power cut leaves fewer than two commits behind the damage.
    """
    with suppress(FileNotFoundError), path.with_name(path.name + "-wal").open("rb") as file:
        descriptor = file.fileno()
        header = os.pread(descriptor, WAL_HEADER_BYTES, 0)
        salts = header[16:24]
        if recovered == 0 and not _is_sound(header):
            # The salts may be damaged. All frames that were written together have the same salts.
            salts = os.pread(descriptor, FRAME_HEADER_BYTES, WAL_HEADER_BYTES)[_SALTS]
            if _is_in_file(database, descriptor, salts):
                return False
        commits = 0
        place = WAL_HEADER_BYTES + recovered * _FRAME_BYTES
        while commits < 2 and len(frame := os.pread(descriptor, FRAME_HEADER_BYTES, place)) == FRAME_HEADER_BYTES:
            commits += frame[_SALTS] == salts and frame[_COMMIT] != _NO_COMMIT
            place += _FRAME_BYTES
        return commits >= 2
    return False


def _is_sound(header: bytes) -> bool:
    try:
        wal(lambda start, size: header[start : start + size])
    except PageError:
        return False
    return True


def _is_in_file(database: int, descriptor: int, salts: bytes) -> bool:
    """Whether the file has everything in the frames: then the WAL was done with, and was being begun anew."""
    places: dict[int, int] = {}
    place = WAL_HEADER_BYTES
    while len(frame := os.pread(descriptor, FRAME_HEADER_BYTES, place)) == FRAME_HEADER_BYTES:
        if frame[_SALTS] == salts:
            places[int.from_bytes(frame[:4])] = place + FRAME_HEADER_BYTES
        place += _FRAME_BYTES
    return all(
        os.pread(database, PAGE_BYTES_DEFAULT, (number - 1) * PAGE_BYTES_DEFAULT)
        == os.pread(descriptor, PAGE_BYTES_DEFAULT, start)
        for number, start in places.items()
        if number
    )
