"""The folder of the tables: its name made absolute, one writer at a time, and folders in it on any file system."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSIONS = "versions"
"""The folder of the table that says which versions of the others there are."""
LITTLE_BYTES_MAX = 30_000_000
"""Of a warehouse of which any query is soon answered."""
PLACE = "_place"
"""The file that says where its own warehouse was written last: in a copy it says another place."""
PUT_BACK_S = 60.0
"""A file that is so much older than its place on the disk was put there from elsewhere."""
INGEST_LOCK, REPLAY_LOCK = "_ingest.lock", "_replay.lock"
# A local file as a URI, as Hadoop takes it: `file:/data`, `file:///data`.
_LOCAL = re.compile(r"file:(?://)?(/.*)")


class CopyError(Exception):
    """A copy of a warehouse cannot be gone on with; the message says what to do."""


class MomentsError(Exception):
    """The tables of a copy are of several moments; the message says which. A replay makes them of one."""


class WarehouseInUseError(Exception):
    """Another `ingest` writes this warehouse, or another replay; the message says what to do."""


def absolute(warehouse: str) -> str:
    """A local path made absolute, for Spark would take a relative one for a table's name; another URI as it is."""
    local = _LOCAL.fullmatch(warehouse)
    if local is not None:
        return local[1]
    return str(Path(warehouse).absolute()) if is_local(warehouse) else warehouse


def no_tables(warehouse: str) -> str:
    """What is said of a folder that is no warehouse."""
    missing = is_local(warehouse) and not Path(warehouse).is_dir()
    return (
        f"{warehouse} holds no tables of Sluice{': there is no such folder' if missing else ''}. Is the name right? "
        f"(`sluice-cloud ingest --warehouse {warehouse}` would make them.)"
    )


def is_local(warehouse: str) -> bool:
    """Whether a warehouse lies in a folder of this machine."""
    return "://" not in warehouse


def may_be_warehouse(warehouse: str) -> bool:
    """Whether there may be tables in a folder, as far as can be told at once: it is none, or on another machine."""
    return not is_local(warehouse) or (Path(warehouse) / VERSIONS).is_dir()


def was_copied(warehouse: str) -> bool:
    """Tell whether a local warehouse may be a copy, or put back from one.

    Nobody noted this place in it, or the file of its newest commit was put there since, and is older than that.
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
    """Note in a local warehouse where it lies: its tables agree with one another."""
    if was_copied(warehouse):
        note = Path(warehouse) / PLACE
        note.touch()
        note.write_text(_place(note), "utf-8")


def _place(file: Path) -> str:
    """Which file it is on which file system: a copy is another."""
    about = file.stat()
    return f"{about.st_dev}:{about.st_ino}"


def holds_little(warehouse: str) -> bool:
    """Whether a warehouse is known to be small."""
    if not is_local(warehouse):
        return False
    size = 0
    try:
        for folder, folders, names in os.walk(warehouse, onerror=_raised):
            for name in names:
                # What upkeep removes meanwhile counts for nothing.
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

    On an object store nothing can be locked here: whoever runs the job sees to it.
    """
    in_use = f"another ingest writes {warehouse}: let it, or stop it first; two would spoil each other's batches"
    with locked(warehouse, INGEST_LOCK, in_use):
        yield


@contextmanager
def only_replay(warehouse: str) -> Iterator[None]:
    """The same of a second replay: it would remove what the first one makes."""
    with locked(warehouse, REPLAY_LOCK, f"another replay of {warehouse} is at work: let it, or stop it first"):
        yield


@contextmanager
def locked(warehouse: str, name: str, in_use: str | None = None) -> Iterator[None]:
    """Hold a lock of a local warehouse. Who holds it is waited for, or WarehouseInUseError says that it is `in_use`."""
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
    """Tell whether there is a folder, on whatever file system it would be."""
    system, folder = _hadoop(spark, path)
    return bool(system.exists(folder))


def folders_in(spark: "SparkSession", path: str) -> list[str]:
    """The paths of all folders in a folder; of none where there is no such folder."""
    return [f"{path}/{status.getPath().getName()}" for status in _listed(spark, path) if status.isDirectory()]


def files_in(spark: "SparkSession", path: str) -> list[str]:
    """The names of all files in a folder; of none where there is no such folder."""
    return [status.getPath().getName() for status in _listed(spark, path) if status.isFile()]


def text_of(spark: "SparkSession", path: str) -> str:
    """The text of a file, on whatever file system it lies. Raises Py4JJavaError where it cannot be read."""
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
    """The file system that a path lies on, and the path as that takes it."""
    jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no other way to it
    session: Any = spark._jsparkSession  # noqa: SLF001
    folder = jvm.org.apache.hadoop.fs.Path(path)
    return folder.getFileSystem(session.sessionState().newHadoopConf()), folder
