"""Keeps a warehouse open between questions: each table, and the evidence on its windows, until it changes."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from deltalake import DeltaTable

from spark.desk.delta_source import Source, table_now
from spark.desk.evidence import Evidence
from spark.desk.tables import Tables

_Key = tuple[str, str | None]
"""Folder of a version, and a device; None for all devices."""
EVIDENCE_KEPT = 32
"""Devices whose evidence is kept. All devices together count as one."""


class _Open(NamedTuple):
    """A table, and by which files of its log to see that there is no newer version."""

    table: DeltaTable
    commit: Path
    stamp: tuple[int, int] | None
    next: Path

    @classmethod
    def of(cls, path: str, table: DeltaTable) -> "_Open":
        commit, after = (Path(path) / "_delta_log" / f"{table.version() + more:020}.json" for more in (0, 1))
        return cls(table, commit, _stamp(commit), after)

    def is_newest(self) -> bool:
        # Without the file, nobody can tell: the table is opened anew.
        return self.stamp is not None and not self.next.exists() and _stamp(self.commit) == self.stamp


class KeptWarehouse:
    """A warehouse for many questions at a time, each on a thread and a connection of its own.

    One connection behind a lock would be simpler. But then the file of a month's readings would hold up every curve.
    """

    def __init__(self, opened: Tables) -> None:
        """Keep a warehouse that was opened. Raises ToldError if it has no tables yet."""
        opened.version()
        self._first = opened
        self._lock = Lock()
        self._open: dict[str, _Open] = {}
        self._evidence: OrderedDict[_Key, tuple[Evidence, Mapping[str, DeltaTable | None]]] = OrderedDict()

    @contextmanager
    def question(self) -> Iterator["KeptTables"]:
        """Ask one question: it sees each table at one version, the newest when it first names it."""
        with self._lock:
            source = KeptSource(self, self._first.source)
        try:
            yield KeptTables(self._first.warehouse, source, keeper=self)
        finally:
            source.db.close()

    def newest(self, path: str) -> DeltaTable | None:
        """Return a table as it is now, the same object as before if nothing was committed; None if it is not there."""
        with self._lock:
            known = self._open.get(path)
        if known is not None and known.is_newest():
            return known.table
        table = table_now(path)
        if table is None:
            return None
        with self._lock:
            self._open[path] = _Open.of(path, table)
        return table

    def kept(self, key: _Key, source: "KeptSource") -> Evidence | None:
        """Return the evidence of a device, or of all, if no table that it was read from has changed since."""
        with self._lock:
            found = self._evidence.get(key)
            if found is None:
                return None
            self._evidence.move_to_end(key)
        evidence, read = found
        # In the order in which evidence is read: if it must be read anew, it is read from what is opened here.
        return evidence if all(source.opened(path) is table for path, table in read.items()) else None

    def keep(self, key: _Key, evidence: Evidence, read: Mapping[str, DeltaTable | None]) -> None:
        """Keep the evidence of a device, or of all, with the tables that it was read from, in their order."""
        with self._lock:
            self._evidence[key] = evidence, read
            self._evidence.move_to_end(key)
            while len(self._evidence) > EVIDENCE_KEPT:
                self._evidence.popitem(last=False)


class KeptSource(Source):
    """The tables of one question."""

    def __init__(self, keeper: KeptWarehouse, beside: Source) -> None:
        super().__init__(beside)
        self._keeper = keeper
        self.named: dict[str, None] = {}
        """Tables that were named since this was emptied, in their order."""

    def opened(self, path: str) -> DeltaTable | None:
        self.named[path] = None
        if path not in self.seen:
            self.seen[path] = self._keeper.newest(path)
        return self.seen[path]


@dataclass(slots=True)
class KeptTables(Tables):
    """A warehouse as one question sees it. Ask for evidence first, so that windows hold every record that it names."""

    source: KeptSource
    keeper: KeptWarehouse = field(kw_only=True, repr=False)

    def evidence(self, device: str | None = None) -> Evidence:
        key = self.version()[0], device
        found = self.keeper.kept(key, self.source)
        if found is None:
            self.source.named.clear()
            found = Tables.evidence(self, device)
            self.keeper.keep(key, found, {path: self.source.seen[path] for path in self.source.named})
        return found


def _stamp(commit: Path) -> tuple[int, int] | None:
    """Tells a commit from another one with its number, of a warehouse that was made anew."""
    try:
        found = commit.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
