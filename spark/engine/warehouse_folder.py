"""Handles a warehouse's folder: its absolute path, its locks, and its files on any file system."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark.engine.told_error import ToldError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSIONS = "versions"
"""Folder of the table that lists the versions of the others."""
LITTLE_BYTES_MAX = 30_000_000
"""Bytes of a small warehouse, which answers any query soon."""
PLACE = "_place"
"""File with its own device and inode, as `note_place` wrote them. In a copy of the warehouse they differ."""
PUT_BACK_S = 60.0
"""Seconds from a file's modification to its inode's change, above which the file was put back from a copy."""
INGEST_LOCK, REPLAY_LOCK = "_ingest.lock", "_replay.lock"
# A local file as a URI, as Hadoop takes it: `file:/data`, `file:///data`.
_LOCAL = re.compile(r"file:(?://)?(/.*)")


class CopyError(ToldError):
    """A copy of a warehouse cannot be written to. The message says what to do."""


class MomentsError(Exception):
    """The tables of a copy were copied at different moments. The message says which, and a replay mends them."""


class WarehouseInUseError(ToldError):
    """Another `ingest` or replay writes this warehouse. The message says what to do."""


def absolute(warehouse: str) -> str:
    """Return a local path made absolute, and another URI unchanged. Spark takes a relative path for a table's name."""
    local = _LOCAL.fullmatch(warehouse)
    if local is not None:
        return local[1]
    return str(Path(warehouse).absolute()) if is_local(warehouse) else warehouse


def no_tables(warehouse: str) -> str:
    """The message for a folder that is no warehouse."""
    missing = is_local(warehouse) and not Path(warehouse).is_dir()
    return (
        f"{warehouse} holds no tables of Sluice{': there is no such folder' if missing else ''}. Is the name right? "
        f"(`sluice-cloud ingest --warehouse {warehouse}` would make them.)"
    )


def is_local(warehouse: str) -> bool:
    """True if a warehouse is a local folder."""
    return "://" not in warehouse


def may_be_warehouse(warehouse: str) -> bool:
    """False if a folder surely holds no tables. A folder that is not local may always hold some."""
    return not is_local(warehouse) or (Path(warehouse) / VERSIONS).is_dir()


def was_copied(warehouse: str) -> bool:
    """Tell whether a local warehouse may be a copy, or put back from a copy.

    It may be a copy if nobody noted its present place in it. It may be put back if the file of its newest commit was
    put there after that note, and is older.
    """
    if not is_local(warehouse):
        return False
    note = Path(warehouse) / PLACE
    if not note.exists() or note.read_text("utf-8") != _place(note):
        return True
    notes = [file.stat() for file in Path(warehouse).glob("v*/log/_delta_log/*.json")]
    newest = max(notes, key=lambda about: about.st_ctime, default=note.stat())
    return newest.st_ctime - newest.st_mtime > PUT_BACK_S and newest.st_ctime > note.stat().st_mtime


def note_place(warehouse: str) -> None:
    """Note where a local warehouse lies. Call it only if the tables agree with one another."""
    if was_copied(warehouse):
        note = Path(warehouse) / PLACE
        note.touch()
        note.write_text(_place(note), "utf-8")


def _place(file: Path) -> str:
    """The device and inode of a file, which a copy does not share."""
    about = file.stat()
    return f"{about.st_dev}:{about.st_ino}"


def holds_little(warehouse: str) -> bool:
    """True if a warehouse is known to be small."""
    if not is_local(warehouse):
        return False
    size = 0
    try:
        for folder, folders, names in os.walk(warehouse, onerror=_raised):
            for name in names:
                # Upkeep may remove the file meanwhile.
                with suppress(FileNotFoundError):
                    size += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118 - there may be 100,000
            if size > LITTLE_BYTES_MAX or any(os.path.islink(os.path.join(folder, name)) for name in folders):  # noqa: PTH114, PTH118
                return False
    except OSError:
        return False
    return True


def _raised(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def only_writer(warehouse: str) -> Iterator[None]:
    """Keep a second `ingest` off a local warehouse. Raises WarehouseInUseError.

    On an object store there is no lock: whoever runs the job must see to it that only one runs.
    """
    in_use = f"another ingest writes {warehouse}: let it, or stop it first; two would spoil each other's batches"
    with locked(warehouse, INGEST_LOCK, in_use):
        yield


@contextmanager
def only_replay(warehouse: str) -> Iterator[None]:
    """Keep a second replay off a local warehouse, whose tables it would remove. Raises WarehouseInUseError."""
    with locked(warehouse, REPLAY_LOCK, f"another replay of {warehouse} is at work: let it, or stop it first"):
        yield


@contextmanager
def locked(warehouse: str, name: str, in_use: str | None = None) -> Iterator[None]:
    """Hold a lock of a local warehouse. If another process holds it, wait for it.

    With `in_use`, do not wait, but raise WarehouseInUseError with this message.
    """
    if not is_local(warehouse):
        yield
        return
    folder = Path(warehouse)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if in_use is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WarehouseInUseError(in_use) from error
        yield


def folder_exists(spark: "SparkSession", path: str) -> bool:
    """Tell whether a folder exists, on any file system that Hadoop knows."""
    system, folder = _hadoop(spark, path)
    return bool(system.exists(folder))


def folders_in(spark: "SparkSession", path: str) -> list[str]:
    """The paths of all folders in a folder; none if the folder does not exist."""
    return [f"{path}/{status.getPath().getName()}" for status in _listed(spark, path) if status.isDirectory()]


def files_in(spark: "SparkSession", path: str) -> list[str]:
    """The names of all files in a folder; none if the folder does not exist."""
    return [status.getPath().getName() for status in _listed(spark, path) if status.isFile()]


def text_of(spark: "SparkSession", path: str) -> str:
    """The text of a file, on any file system that Hadoop knows. Raises Py4JJavaError if it cannot be read."""
    jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no other way to it
    system, file = _hadoop(spark, path)
    stream = system.open(file)
    try:
        return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
    finally:
        stream.close()


def remove_folder(spark: "SparkSession", path: str) -> None:
    """Remove a folder with all that is in it."""
    system, folder = _hadoop(spark, path)
    system.delete(folder, True)


def _listed(spark: "SparkSession", path: str) -> list[Any]:
    system, folder = _hadoop(spark, path)
    return list(system.listStatus(folder)) if system.exists(folder) else []


def _hadoop(spark: "SparkSession", path: str) -> tuple[Any, Any]:
    """The Hadoop file system of a path, and the Hadoop path."""
    jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no other way to it
    session: Any = spark._jsparkSession  # noqa: SLF001
    folder = jvm.org.apache.hadoop.fs.Path(path)
    return folder.getFileSystem(session.sessionState().newHadoopConf()), folder
