"""Repairs a warehouse that was copied while `ingest` wrote it, or put back from such a copy.

A copy takes time, so each table in it is of another moment. `log` is the truth. Records that it lacks are read from
Kafka again. If another table is not of the moment of `log`, a replay makes all tables anew.

Before that, a local copy forgets commits whose files are missing or not whole. It removes their notes from
`_delta_log`, always the last ones, so that a table is as it was before them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any
from urllib.parse import unquote

from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.engine.delta_staging import commit_numbers, jvm_of
from spark.engine.warehouse_folder import CopyError, MomentsError
from spark.finality.gateway_table import gateways_path
from spark.finality.loss_table import losses_path
from spark.ingest.reading_starts import read_starts, starts_path
from spark.ingest.seen_table import seen_path
from spark.ingest.topics_read import topics_path
from spark.log.amendments import amendments_path
from spark.log.device_parts import device_parts_path
from spark.log.log_table import ORDINAL, log_path
from spark.log.time_corrections import corrections_path
from spark.log.warehouse_version import Published, current_version, folder_of, tables_of, versions_path
from spark.windows.window_changes import COPY, CORRECTION, changes_path, of_version
from spark.windows.windows_table import windows_path

COPY_MS_MAX = 86_400_000
"""Milliseconds that a copy may take: a day. If older commits are broken, the copying was not the cause, and none is
forgotten."""
STARTS = "sluice-after-starts"
"""Application whose commit number in `log` is the start of reading that a batch was read from."""
ANEW = "sluice-anew"
"""Application whose commit number in `windows` is the last batch with windows computed anew."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A table and the application whose commit number says how far the table is."""

    path_in: Callable[[str], str]
    application: str = ORDINAL


NOW_AND_THEN = {
    "sluice-after-amendments": Kept(amendments_path),
    "sluice-after-corrections": Kept(corrections_path),
    "sluice-after-losses": Kept(losses_path),
    "sluice-after-anew": Kept(windows_path, ANEW),
}
"""Tables that few batches write to. Under these applications, `log` notes how far each table was before a batch, and
the saved state notes how far it was after the state's last batch."""
RETOLD = {"sluice-after-copies-told": COPY, "sluice-after-corrections-told": CORRECTION}
"""Applications of such notes about `window_changes`, with the cause of the changes."""
STATES = (seen_path, topics_path, gateways_path, device_parts_path)
"""Tables of which none has a batch before all other tables have it."""
CHECKSUM_CHUNK, CHECKSUM_HEAD, CHECKSUM_BYTES = 512, 8, 4
"""Bytes of a chunk of a file, and in Hadoop's checksum file bytes of the head and of each chunk's checksum."""
NOTES = "_delta_log"
"""Folder in a table where Delta notes its commits."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a Delta table, from `_delta_log`."""

    version: int
    at_ms: int
    numbers: Mapping[str, int]
    """Commit numbers by application."""
    files: Sequence[tuple[str, int]]
    """Paths and sizes of added files."""
    removed: Sequence[str]
    """Paths of removed files. A vacuum may have deleted them since."""
    noted: str
    """Note of the commit's writer."""


# -- commits that are not whole ------------------------------------------------------------------


def forget_broken(spark: SparkSession, warehouse: str) -> None:
    """Put each table of a copy back to before its first broken commit. Raises CopyError."""
    for notes in sorted(Path(warehouse).glob(f"**/{NOTES}")):
        forget_broken_commits(notes.parent)
    forget_absent_versions(warehouse)
    _forget_caches(spark)
    version = current_version(spark, warehouse)
    if version is not None:
        _forget_unstarted(spark, tables_of(warehouse, version))


def forget_broken_commits(table: Path) -> None:
    """Put a table back to the last commit that is whole, with all commits before it.

    If there is no such commit within COPY_MS_MAX, nothing is forgotten: the copying did not break the table.
    """
    commits = _commits(table)
    broken: set[str] = set()
    whole: list[Commit] = []
    for place, commit in enumerate(commits):
        if commit.version != commits[0].version + place:
            # A note is missing. It was written while the notes were copied, and a later one was copied.
            broken.add(NOTES)
        broken.difference_update(commit.removed)
        broken.update(name for name, size in commit.files if not _is_whole(table, name, size))
        if not broken:
            whole.append(commit)
    if broken and whole and whole[-1].at_ms >= commits[-1].at_ms - COPY_MS_MAX:
        _forget_after(table, whole[-1].version)


def forget_absent_versions(warehouse: str) -> None:
    """Let readers see the last version whose tables go as far as when it was published. Raises CopyError.

    Older versions may be gone, because upkeep removes them.
    """
    versions = Path(versions_path(warehouse))
    commits = _commits(versions)
    there = [commit.version for commit in commits if not commit.noted or _is_there(warehouse, commit.noted)]
    if there and there[-1] < commits[-1].version:
        _forget_after(versions, there[-1])
    elif commits and not there:
        if any(Path(warehouse).glob(f"v*/log/{NOTES}/*.json")):
            raise CopyError(_of_another_time(versions))
        rmtree(versions)


def _is_there(warehouse: str, noted: str) -> bool:
    """True if a version's tables go as far as when it was published."""
    published = Published.from_json(noted)
    tables = Path(folder_of(warehouse, published.number))
    return bool(_versions(Path(log_path(str(tables))) / NOTES)) and all(
        max(_versions(tables / name / NOTES), default=-1) >= last for name, last in published.tables.items()
    )


def _forget_unstarted(spark: SparkSession, tables: str) -> None:
    """Forget batches of `log` that were read from a start that the copy lacks, and starts that `log` lacks.

    Only a start knows which records Kafka had lost. So batches after a lost start are read again from Kafka.
    """
    starts = read_starts(spark, tables)
    started = max((start.number for start in starts), default=-1)
    log = Path(log_path(tables))
    unstarted = [commit.version for commit in _commits(log) if commit.numbers.get(STARTS, -1) > started]
    if unstarted:
        _forget_after(log, min(unstarted) - 1)
        _forget_caches(spark)
    last = commit_numbers(spark, str(log)).get(ORDINAL, -1)
    if any(start.ordinal > last + 1 for start in starts):
        DeltaTable.forPath(spark, starts_path(tables)).delete(F.col("ordinal") > last + 1)


def _is_whole(table: Path, name: str, size: int) -> bool:
    file = table / unquote(name)
    if not file.is_file() or file.stat().st_size != size:
        return False
    checksums = file.with_name(f".{file.name}.crc")
    chunks = -(-size // CHECKSUM_CHUNK)
    if checksums.exists() and checksums.stat().st_size != CHECKSUM_HEAD + CHECKSUM_BYTES * chunks:
        # The checksums were copied while they were written. Without them, the file is read unchecked.
        checksums.unlink()
    return True


def _forget_after(table: Path, version: int) -> None:
    """Remove the notes of all commits after a version. Raises CopyError if none would be left."""
    notes = table / NOTES
    if not any(number <= version for number in _versions(notes)):
        raise CopyError(_of_another_time(table))
    for file in notes.iterdir():
        number = file.name.lstrip(".").partition(".")[0]
        if number.isdigit() and int(number) > version:
            file.unlink()
    # Without these files, Delta looks for the last checkpoint itself.
    for name in ("_last_checkpoint", "._last_checkpoint.crc"):
        (notes / name).unlink(missing_ok=True)


def _of_another_time(table: Path) -> str:
    return (
        f"{table} in this copy is of another time than the tables beside it: take another copy; one that is made "
        "while `ingest` is stopped always opens"
    )


def _commits(table: Path) -> list[Commit]:
    """All commits of a table with a note of their own, in order."""
    notes = table / NOTES
    return [_commit(version, notes / f"{version:020}.json") for version in _versions(notes)]


def _versions(notes: Path) -> list[int]:
    """The versions whose notes are there, in order."""
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
    return Commit(version, info.get("timestamp", 0), numbers, files, removed, info.get("userMetadata", ""))


def _forget_caches(spark: SparkSession) -> None:
    jvm_of(spark).org.apache.spark.sql.delta.DeltaLog.clearCache()


# -- tables of several moments -------------------------------------------------------------------


def expect_one_moment(spark: SparkSession, warehouse: str, version: int) -> None:
    """Check that a version's tables go as far as its `log`. Raises MomentsError."""
    other = next(_of_other_moments(spark, warehouse, version), None)
    if other is not None:
        raise MomentsError(
            f"{other} is of another moment than `log`: {warehouse} was copied while `ingest` wrote it. All tables have "
            "to be made anew from `log`"
        )


def is_all_told(spark: SparkSession, warehouse: str, version: int) -> bool:
    """Tell whether `window_changes` has all changes of a version's windows. If a job died, the last may be missing."""
    windows = commit_numbers(spark, windows_path(folder_of(warehouse, version))).get(ORDINAL, -1)
    is_of_one_moment = next(_of_other_moments(spark, warehouse, version), None) is None
    told = _told(commit_numbers(spark, changes_path(warehouse)), version)
    return is_of_one_moment and max(told, default=-1) == windows


def _of_other_moments(spark: SparkSession, warehouse: str, version: int) -> Iterator[str]:
    """Yield tables that are ahead of `log`, or further behind it than a killed job leaves them."""
    tables = folder_of(warehouse, version)
    log = commit_numbers(spark, log_path(tables))
    last = log.get(ORDINAL, -1)
    states = {path_in(tables): _numbers(spark, path_in(tables)) for path_in in STATES}
    # The last batch of `log` may be unfinished. Of `device_parts`, a start appends what it lacks.
    finished = max(last - 1, *(numbers.get(ORDINAL, -1) for numbers in states.values()))
    yield from (path for path, numbers in states.items() if numbers.get(ORDINAL, -1) > last)
    tables_of_kept = {kept.path_in(tables) for kept in NOW_AND_THEN.values()}
    numbers_in = {path: commit_numbers(spark, path) for path in tables_of_kept}
    if not finished <= numbers_in[windows_path(tables)].get(ORDINAL, -1) <= last:
        yield windows_path(tables)
    changes = commit_numbers(spark, changes_path(warehouse))
    told = _told(changes, version)
    # The changes of a replay are appended at once, after it. If it died before that, there are none yet.
    if told and not finished <= max(told) <= last:
        yield changes_path(warehouse)
    saved = states[seen_path(tables)]
    for name, kept in NOW_AND_THEN.items():
        number = numbers_in[kept.path_in(tables)].get(kept.application, -1)
        if not max(log.get(name, -1), saved.get(name, -1)) <= number <= last:
            yield kept.path_in(tables)
    for name, cause in RETOLD.items():
        if max(log.get(name, -1), saved.get(name, -1)) > changes.get(f"{of_version(version)}{cause}", -1):
            yield changes_path(warehouse)


def _told(changes: Mapping[str, int], version: int) -> list[int]:
    """The last batch of a version in `window_changes`, for each cause."""
    return [number for name, number in changes.items() if name.startswith(of_version(version))]


def _numbers(spark: SparkSession, path: str) -> Mapping[str, int]:
    return commit_numbers(spark, path) if DeltaTable.isDeltaTable(spark, path) else {}
