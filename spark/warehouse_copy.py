"""A warehouse that was copied while `ingest` wrote it: its tables are brought to agree again.

A copy takes its time, and each table in it is of another moment. `log` is the truth. What another table holds of
batches that `log` lacks is forgotten: Kafka has these records, and they are read again. Batches of `log` that another
table lacks are derived again. Commits whose files the copy lacks, or has in part, are forgotten in every table.

To forget commits is to remove their notes from `_delta_log`, always the last ones: the table is then as it was. On an
object store nothing of this is done.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any
from urllib.parse import unquote

from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.delta_staging import jvm_of
from spark.log_table import ORDINAL, log_path
from spark.reading_starts import read_starts, starts_path
from spark.seen_table import SETTLED, runs_path, settled_path
from spark.warehouse_folder import CopyError, is_local
from spark.warehouse_version import folder_of, versions_path

COPY_MS_MAX = 86_400_000
"""A copy is made within a day. What a table lacks that was committed earlier was lost otherwise, and nothing is
forgotten for it."""
AFTER = "sluice-after-"
"""The applications under which a commit of `log` says how far other tables had come before it."""
STARTS = f"{AFTER}starts"
CHECKSUM_CHUNK, CHECKSUM_HEAD, CHECKSUM_BYTES = 512, 8, 4
"""How Hadoop's file of checksums is made: so many bytes for each chunk of a file, behind a head."""
NOTES = "_delta_log"
"""The folder in a table where Delta notes its commits."""
OTHER_COPY = "take another copy: one that is made while `ingest` is stopped always opens"


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a Delta table, as `_delta_log` has it."""

    version: int
    at_ms: int
    numbers: Mapping[str, int]
    """By application."""
    noted: int
    """What its writer noted beside it: a batch, or a version of the tables; -1 where it noted nothing."""
    files: Sequence[tuple[str, int]]
    """What it added: paths and sizes."""
    removed: Sequence[str]
    """Paths of what it took out of the table: a vacuum may have deleted these files since."""

    def batch(self, applications: str = ORDINAL) -> int:
        """The last batch that it holds anything of, by applications that begin so; -1 where nothing tells."""
        told = [number for name, number in self.numbers.items() if name.startswith(applications)]
        return max([self.noted, *told])


@dataclass(frozen=True, slots=True)
class Derived:
    """A table that derives from `log`."""

    path: str
    applications: str = ORDINAL
    """How those begin under which it says up to which batch it goes."""
    required: str = ""
    """Under which `log` says the same of it; empty where each batch commits to it."""


def forget_broken(spark: SparkSession, warehouse: str) -> None:
    """Have each table of a copy be as it was before the first commit that is not whole in it. Raises CopyError."""
    for notes in sorted(Path(warehouse).glob(f"**/{NOTES}")):
        forget_broken_commits(notes.parent)
    versions = Path(versions_path(warehouse))
    # Readers may see a version already whose folder was not there yet when the copy began.
    absent = [
        commit.version
        for commit in _commits(versions)
        if commit.noted > 0 and not _versions(Path(log_path(folder_of(warehouse, commit.noted))) / NOTES)
    ]
    if absent and min(absent) > 0:
        _forget_after(versions, min(absent) - 1)
    elif absent:
        rmtree(versions)
    _forget_caches(spark)


def make_agree(spark: SparkSession, tables: str, derived: Sequence[Derived]) -> int:
    """Bring the tables of one version to agree; return the first batch that is to be derived again. Raises CopyError.

    Besides `log` and what derives from it, the folder `tables` has states, which are counted from `log` again.
    """
    if not is_local(tables):
        raise CopyError(f"the tables in {tables} are not of one moment: {OTHER_COPY}")
    log = Path(log_path(tables))
    starts = read_starts(spark, tables)
    started = max((start.number for start in starts), default=-1)
    # What a start told of records that Kafka had lost is known from Kafka alone: these batches are read again.
    commits = _commits(log)
    unstarted = [commit.version for commit in commits if commit.numbers.get(STARTS, -1) > started]
    if unstarted:
        _forget_after(log, min(unstarted) - 1)
        commits = _commits(log)
    last = max((commit.numbers.get(ORDINAL, -1) for commit in commits), default=-1)
    # As where a job died: what the last but one did after its commits may be lacking too.
    first = max(0, min([last - 1, *(_derived_to(table, commits, last) for table in derived)]))
    for table in derived:
        _forget_batches(Path(table.path), first, table.applications)
    others = {log, Path(starts_path(tables)), *(Path(table.path) for table in derived)}
    _forget_states([state for state in _tables_in(tables) if state not in others], Path(tables), first - 1)
    _forget_caches(spark)
    if any(start.ordinal > last + 1 for start in starts):
        DeltaTable.forPath(spark, starts_path(tables)).delete(F.col("ordinal") > last + 1)
    return first


def _derived_to(table: Derived, log: Sequence[Commit], last: int) -> int:
    """The last batch up to which a table is whole, by what `log` says of it."""
    held = max((commit.batch(table.applications) for commit in _commits(Path(table.path))), default=-1)
    if not table.required:
        return min(held, last)
    # A commit of `log` tells of the time before it.
    lacking = [commit.numbers[ORDINAL] - 2 for commit in log if commit.numbers.get(table.required, -1) > held]
    return min([last, *lacking])


def _forget_states(states: Sequence[Path], tables: Path, last: int) -> None:
    for state in states:
        try:
            _forget_batches(state, last)
        except CopyError:
            # All of it is counted from `log` again.
            rmtree(state)
    runs, settled = Path(runs_path(str(tables))), Path(settled_path(str(tables)))
    held = max((commit.noted for commit in _commits(settled)), default=-1)
    # Islands that left the one table must be in the other.
    ahead = [commit.version for commit in _commits(runs) if commit.numbers.get(SETTLED, -1) > held]
    if ahead:
        try:
            _forget_after(runs, min(ahead) - 1)
        except CopyError:
            rmtree(runs)


def forget_broken_commits(table: Path) -> None:
    """Have a table be as it was at the last commit of which all files are there.

    Nothing is forgotten where there is no such commit within COPY_MS_MAX: the copying is not what broke the table.
    """
    commits = _commits(table)
    broken: set[str] = set()
    whole: list[Commit] = []
    for commit in commits:
        broken.difference_update(commit.removed)
        broken.update(name for name, size in commit.files if not _is_whole(table, name, size))
        if not broken:
            whole.append(commit)
    if broken and whole and whole[-1].at_ms >= commits[-1].at_ms - COPY_MS_MAX:
        _forget_after(table, whole[-1].version)


def _is_whole(table: Path, name: str, size: int) -> bool:
    file = table / unquote(name)
    if not file.is_file() or file.stat().st_size != size:
        return False
    checksums = file.with_name(f".{file.name}.crc")
    chunks = -(-size // CHECKSUM_CHUNK)
    if checksums.exists() and checksums.stat().st_size != CHECKSUM_HEAD + CHECKSUM_BYTES * chunks:
        # Copied while it was written: without it the file is read as it is.
        checksums.unlink()
    return True


def _forget_batches(table: Path, last: int, applications: str = ORDINAL) -> None:
    """Have a table be as it was before it held anything of batches after the last. Raises CopyError."""
    beyond = [commit.version for commit in _commits(table) if commit.batch(applications) > last]
    if beyond:
        _forget_after(table, min(beyond) - 1)


def _forget_after(table: Path, version: int) -> None:
    """Remove the notes of all commits after a version. Raises CopyError where none would be left."""
    notes = table / NOTES
    if not any(number <= version for number in _versions(notes)):
        raise CopyError(f"{table} in this copy is of another time than the tables beside it: {OTHER_COPY}")
    for file in notes.iterdir():
        number = file.name.lstrip(".").partition(".")[0]
        if number.isdigit() and int(number) > version:
            file.unlink()
    # Without it Delta looks for the last one that there is.
    for name in ("_last_checkpoint", "._last_checkpoint.crc"):
        (notes / name).unlink(missing_ok=True)


def _commits(table: Path) -> list[Commit]:
    """All commits of a table that are noted one by one, in their order."""
    notes = table / NOTES
    return [_commit(version, notes / f"{version:020}.json") for version in _versions(notes)]


def _versions(notes: Path) -> list[int]:
    """The versions whose notes are there, in their order."""
    return sorted(int(file.stem) for file in notes.glob("*.json") if file.stem.isdigit()) if notes.is_dir() else []


def _commit(version: int, note: Path) -> Commit:
    numbers: dict[str, int] = {}
    files: list[tuple[str, int]] = []
    removed: list[str] = []
    info: dict[str, Any] = {}
    for line in note.read_text("utf-8").splitlines():
        action: dict[str, Any] = json.loads(line)
        if "txn" in action:
            numbers[action["txn"]["appId"]] = action["txn"]["version"]
        elif "add" in action:
            files.append((action["add"]["path"], action["add"]["size"]))
        elif "remove" in action:
            removed.append(action["remove"]["path"])
        elif "commitInfo" in action:
            info = action["commitInfo"]
    noted = info.get("userMetadata", "")
    held = int(noted) if noted.isdigit() else -1
    return Commit(version, info.get("timestamp", 0), numbers, held, files, removed)


def _tables_in(folder: str) -> Iterator[Path]:
    for notes in sorted(Path(folder).glob(f"*/{NOTES}")):
        yield notes.parent


def _forget_caches(spark: SparkSession) -> None:
    jvm_of(spark).org.apache.spark.sql.delta.DeltaLog.clearCache()
