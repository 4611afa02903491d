"""The folder of the tables: its name made absolute, one writer at a time, and folders in it on any file system."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCK = "_ingest.lock"


class WarehouseInUseError(Exception):
    """Another `ingest` writes this warehouse; the message says what to do."""


def absolute(warehouse: str) -> str:
    """A local path made absolute, for Spark would take a relative one for a table's name; a URI as it is."""
    return warehouse if "://" in warehouse else str(Path(warehouse).absolute())


@contextmanager
def only_writer(warehouse: str) -> Iterator[None]:
    """Keep a second `ingest` off a local warehouse. Raises WarehouseInUseError.

    On an object store nothing can be locked here: whoever runs the job sees to it.
    """
    if "://" in warehouse:
        yield
        return
    folder = Path(warehouse)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WarehouseInUseError(
                f"another ingest writes {warehouse}: let it, or stop it first; two would spoil each other's batches"
            ) from error
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
