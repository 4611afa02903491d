"""A disk that remembers what was synced, under the unmodified SQL of the buffer: any moment can be a power cut.

SQLite's files are real ones, so that whatever else looks at them (fstat, fallocate, a second connection) works as ever;
beside them stands what would be on the card: what was synced, and a random part of what was not.
"""

import os
import random
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import apsw

TEAR_BYTES = 512
"""A write is torn at multiples of this: the sector that even old cards write whole."""
JOURNALS = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_WAL

Survival = Literal["nothing", "everything", "writes", "sectors", "prefix"]
"""Fate of writes that were not synced: see `Inode.survivors`."""
Synchronous = Literal["FULL", "NORMAL", "OFF"]


class PowerCut(BaseException):
    """The power is gone: nothing that the program does from here on matters, and no `except Exception` may catch it."""


@dataclass(slots=True)
class Inode:
    """One file: what is on the card for certain, and what was written since. A size is a truncation."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change)
        self.pending.clear()

    def fail_sync(self, chance: random.Random) -> None:
        """The file after a failed sync: any part may have been written. The rest never will be, whoever syncs again."""
        for change in self.pending:
            if chance.random() < 0.5:
                _apply(self.durable, change)
        self.pending.clear()

    def survivors(self, chance: random.Random, survival: Survival) -> bytes:
        """The content after a cut.

        `writes` keeps whole writes or loses them, in any combination, so that a later one may be there without an
        earlier; `sectors` tears each; `prefix` keeps the first ones, and half of the one that was on its way.
        """
        content = bytearray(self.durable)
        ends = chance.randrange(len(self.pending)) if self.pending else 0
        for number, change in enumerate(self.pending):
            if survival == "everything" or (survival == "prefix" and number < ends):
                _apply(content, change)
            elif survival == "writes" or isinstance(change, int):
                if survival != "nothing" and chance.random() < 0.5:
                    _apply(content, change)
            elif survival == "sectors" or (survival == "prefix" and number == ends):
                for torn in _sectors(*change):
                    if chance.random() < 0.5:
                        _apply(content, torn)
        return bytes(content)


class CardContents:
    """A directory's files as they are on the card: names are synced apart from what they stand for."""

    def __init__(self) -> None:
        self._names: dict[str, Inode] = {}
        self._durable_names: dict[str, Inode] = {}

    def load(self, directory: Path) -> None:
        """Take over what is in a directory, as synced."""
        for path in sorted(directory.iterdir()):
            self._names[path.name] = self._durable_names[path.name] = Inode(bytearray(path.read_bytes()))

    def opened(self, path: str) -> Inode:
        return self._names.setdefault(Path(path).name, Inode())

    def synced(self, path: str, size: int = 0) -> None:
        """The file and its directory entry are on the card; with `size` where it grew without being written to."""
        inode = self.opened(path)
        inode.sync()
        inode.durable.extend(bytes(max(0, size - len(inode.durable))))
        self._durable_names[Path(path).name] = inode

    def directory_synced(self) -> None:
        self._durable_names = dict(self._names)

    def deleted(self, path: str) -> None:
        self._names.pop(Path(path).name, None)

    def image(
        self, directory: Path, chance: random.Random, survival: Survival, sizes: Mapping[str, int] | None = None
    ) -> None:
        """Write what the card holds, if the power goes now, into a new directory.

        `sizes` are of files that grew without being written to.
        """
        directory.mkdir(parents=True)
        for name in sorted({*self._names, *self._durable_names}):
            inode, durable = self._names.get(name), self._durable_names.get(name)
            # A file made or deleted whose directory was not synced may be there, or be the former one, or not at all.
            found = inode if survival == "everything" or (survival != "nothing" and chance.random() < 0.5) else durable
            if found is None:
                continue
            content = found.survivors(chance, survival)
            grown = 0 if sizes is None or found is not inode else sizes.get(name, 0)
            if len(content) < grown and (survival == "everything" or chance.random() < 0.5):
                content += bytes(grown - len(content))
            (directory / name).write_bytes(content)


class CuttableDisk:
    """One directory's files, and when the power goes."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.directory = directory
        self.chance = chance
        self.operations = 0
        """Writes, syncs, truncations and deletions since the disk was made."""
        self.cut_at: int | None = None
        """The operation that the power does not let happen any more."""
        self.is_cut = False
        self.sync_fails: Callable[[], bool] = lambda: False
        """Asked at each sync."""
        self.failed_syncs = 0
        self.card = CardContents()
        """Stays as it was at the cut."""
        self._sizes: dict[str, int] = {}
        """Size of each file at the cut: fallocate is not seen here."""
        self.card.load(directory)

    def operation(self) -> bool:
        """Count one, and tell whether the card is still written to. Raises PowerCut where it is not done any more."""
        if self.is_cut:
            return False
        if self.operations == self.cut_at:
            self.is_cut = True
            self._sizes = {path.name: path.stat().st_size for path in self.directory.iterdir()}
            raise PowerCut
        self.operations += 1
        return True

    def image(self, directory: Path, survival: Survival) -> None:
        """Write what the card holds after the cut into a new directory."""
        self.card.image(directory, self.chance, survival, self._sizes)


class _File(apsw.VFSFile):
    """A file of the default VFS, shared memory and locks included; what changes it is written down."""

    def __init__(self, disk: CuttableDisk | None, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk
        self._path = name.filename() if isinstance(name, apsw.URIFilename) else name or ""
        self._inode = Inode() if disk is None else disk.card.opened(self._path)
        # As SQLite's unix VFS does it: a journal that may be new syncs its directory with its first sync.
        self._syncs_directory = bool(flags[0] & JOURNALS and flags[0] & apsw.SQLITE_OPEN_CREATE)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802 - SQLite's name
        if self._disk is not None and self._disk.operation():
            self._inode.pending.append((offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        if self._disk is not None and self._disk.operation():
            self._inode.pending.append(newsize)
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802
        del flags  # the real card need not be troubled: what is synced is what `Inode` says
        if self._disk is not None and self._disk.operation():
            if self._disk.sync_fails():
                self._disk.failed_syncs += 1
                self._inode.fail_sync(self._disk.chance)
                raise apsw.IOError("the card does not answer")
            self._disk.card.synced(self._path)
            if self._syncs_directory:
                self._disk.card.directory_synced()
                self._syncs_directory = False


class CuttableVfs(apsw.VFS):
    """SQLite's file system for the directories that are given to it."""

    NAME = "power-cut"

    def __init__(self) -> None:
        super().__init__(self.NAME, "")
        self._disks: dict[str, CuttableDisk] = {}

    def mount(self, disk: CuttableDisk) -> None:
        self._disks[str(disk.directory)] = disk

    def unmount(self, disk: CuttableDisk) -> None:
        del self._disks[str(disk.directory)]

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        # SQLite's own temporary files have no name, and need not survive.
        return _File(None if path is None else self.disk_of(path), name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: FBT001, N802
        disk = self.disk_of(filename)
        if disk is not None and disk.operation():
            disk.card.deleted(filename)
            if syncdir:
                disk.card.directory_synced()
        super().xDelete(filename, syncdir)

    def disk_of(self, path: str) -> CuttableDisk | None:
        return self._disks.get(str(Path(path).parent))


class _Rows:
    """Rows that `execute` found, as sqlite3.Cursor gives them."""

    def __init__(self, found: list[tuple[Any, ...]], rowcount: int) -> None:
        self._found = iter(found)
        self.rowcount = rowcount

    def fetchone(self) -> tuple[Any, ...] | None:
        return next(self._found, None)

    def fetchmany(self, size: int) -> list[tuple[Any, ...]]:
        return list(islice(self._found, size))

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self._found)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self._found

    def close(self) -> None:
        self._found = iter(())


class _Connection:
    """An apsw connection that looks like the sqlite3 connection that the buffer asks for."""

    def __init__(self, database: str | os.PathLike[str], synchronous: Synchronous, *, uri: bool) -> None:
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | (apsw.SQLITE_OPEN_URI if uri else 0)
        self._synchronous = synchronous
        self._checkpoint_pages = 1_000
        with _translated():
            self._connection = apsw.Connection(os.fspath(database), flags=flags, vfs=CuttableVfs.NAME)
        self._connection.set_wal_hook(self._after_commit)

    def _after_commit(self, connection: apsw.Connection, database: str, pages: int) -> int:
        """Checkpoint as SQLite's own hook does: COMMIT has succeeded, whatever becomes of this.

        apsw would report an error of the VFS as one of COMMIT.
        """
        if pages >= self._checkpoint_pages:
            with suppress(apsw.Error):
                connection.wal_checkpoint(database)
        return apsw.SQLITE_OK

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    @property
    def total_changes(self) -> int:
        return self._connection.total_changes()

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> _Rows:
        if re.fullmatch(r"PRAGMA synchronous\s*=\s*FULL", statement):
            statement = f"PRAGMA synchronous = {self._synchronous}"
        checkpoint_at = re.fullmatch(r"PRAGMA wal_autocheckpoint\s*=\s*(\d+)", statement)
        if checkpoint_at is not None:
            self._checkpoint_pages = int(checkpoint_at[1])
            return _Rows([(self._checkpoint_pages,)], 0)
        with _translated():
            # apsw runs a statement as far as its rows are asked for.
            found = list(self._connection.execute(statement, tuple(parameters)))
            return _Rows(found, self._connection.changes())

    def executemany(self, statement: str, many: Iterable[Sequence[Any]]) -> _Rows:
        before = self._connection.total_changes()
        with _translated():
            found = list(self._connection.executemany(statement, [tuple(parameters) for parameters in many]))
        return _Rows(found, self._connection.total_changes() - before)

    def close(self) -> None:
        with suppress(apsw.Error):  # a read-only one that is the last asks for a lock that it cannot have
            self._connection.close()
        self._connection.close(True)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except apsw.Error as error:
        kind = sqlite3.IntegrityError if isinstance(error, apsw.ConstraintError) else sqlite3.OperationalError
        translated = kind(str(error))
        translated.sqlite_errorcode = getattr(error, "extendedresult", getattr(error, "result", apsw.SQLITE_ERROR))
        raise translated from error


@contextmanager
def sqlite_over_cuttable_disks(synchronous: Synchronous = "FULL") -> Iterator[CuttableVfs]:
    """Let `sqlite3.connect` give connections over this VFS; `synchronous` takes the place of the buffer's own FULL."""
    vfs = CuttableVfs()

    def connect(database: str | os.PathLike[str], *_: object, uri: bool = False, **__: object) -> _Connection:
        return _Connection(database, synchronous, uri=uri)

    def fsync(descriptor: int) -> None:
        """A sync of the buffer's own, beside SQLite: what fallocate has grown is on the card too."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        disk = vfs.disk_of(str(path))
        if disk is not None and disk.operation():
            disk.card.synced(str(path), os.fstat(descriptor).st_size)

    write = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        """A write of the buffer's own, beside SQLite."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        disk = vfs.disk_of(str(path))
        if disk is not None and disk.operation():
            disk.card.opened(str(path)).pending.append((offset, data))
        return write(descriptor, data, offset)

    try:
        with (
            mock.patch.object(sqlite3, "connect", connect),
            mock.patch.object(os, "fsync", fsync),
            mock.patch.object(os, "pwrite", pwrite),
        ):
            yield vfs
    finally:
        vfs.unregister()


def _apply(content: bytearray, change: tuple[int, bytes] | int) -> None:
    if isinstance(change, int):
        del content[change:]
        content.extend(bytes(change - len(content)))
        return
    offset, data = change
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _sectors(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start < len(data):
        end = min(len(data), start + TEAR_BYTES - (offset + start) % TEAR_BYTES)
        yield offset + start, data[start:end]
        start = end
