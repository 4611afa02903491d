"""The folder of the tables: its name made absolute, one writer at a time, and folders in it on any file system."""

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INGEST_LOCK, REPLAY_LOCK = "_ingest.lock", "_replay.lock"
# A local file as a URI, as Hadoop takes it: `file:/data`, `file:///data`.
_LOCAL = re.compile(r"file:(?://)?(/.*)")


class WarehouseInUseError(Exception):
    """Another `ingest` writes this warehouse, or another replay; the message says what to do."""


def absolute(warehouse: str) -> str:
    """A local path made absolute, for Spark would take a relative one for a table's name; another URI as it is."""
    local = _LOCAL.fullmatch(warehouse)
    if local is not None:
        return local[1]
    return warehouse if "://" in warehouse else str(Path(warehouse).absolute())


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
    if "://" in warehouse:
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
