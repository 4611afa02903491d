"""Explains to a person those errors that the tables' place caused: a path, a disk or an object store."""

import errno
import os
import re
from pathlib import Path
from tempfile import gettempdir

from spark.source.kafka_failures import innermost, told_by

NO_JARS = re.compile(
    r"No FileSystem for scheme \"?(?P<scheme>\w+)|ClassNotFoundException: Class (?P<name>\S*FileSystem)"
)
NO_HOST = re.compile(r"java\.net\.UnknownHostException: (?P<host>[^\s:]+)")
DISK_WORDS = {
    errno.ENOSPC: "the disk of {place} is full: make room there",
    errno.EDQUOT: "the quota on the disk of {place} is used up: raise it, or make room there",
    errno.EROFS: "the disk of {place} can only be read: a disk that fails is often mounted so, and `dmesg` says why",
    errno.EIO: "the disk of {place} fails (input/output error): `dmesg` says more",
}
"""Explanations of the system's disk errors."""
DISK_ERRORS = re.compile("|".join(f"(?P<e{number}>{os.strerror(number)})" for number in DISK_WORDS))
HADOOP = "org.apache.hadoop.fs"
"""Package in the stack trace of an error of the warehouse's disk. Spark writes its temporary files without it."""
OF_PYTHON = re.compile(r"\[errno \d+\] $", re.IGNORECASE)
"""Words before an error of Python's. Its tasks write files of the warehouse alone."""
KAFKA = "org.apache.kafka"
"""Package in the stack trace of an error of Kafka's client."""
TRACE_CHARS = 2_000
"""Characters of the trace after an error that are searched for these packages."""
NO_FOLDER = re.compile(r"Mkdirs failed to create (?:file:)?(?P<path>/[^\s(]*)")
FULL_BYTES = 65_536
"""Free bytes below which a disk counts as full. A new folder needs fewer."""
GONE = re.compile(
    r"(?:FILE_NOT_EXIST|DELTA_FILE_NOT_FOUND|FileNotFoundException).{0,200}?(?P<path>[^\s'\"]+\.parquet)", re.DOTALL
)
"""A file that a table or a batch names, and that is not there."""
REFUSED = re.compile(r"AccessDeniedException|AccessControlException|NoAuthWithAWSException|Permission denied")


def explain_storage(error: BaseException, warehouse: str | None = None) -> str | None:
    """Say what an error that the warehouse's place caused means, and what to do; None if the cause is another.

    `warehouse` is the folder of the tables, if it is known.
    """
    if isinstance(error, OSError):
        return _of_python(error, warehouse)
    if not type(error).__module__.startswith(("py4j.", "pyspark.")):
        return None
    text = told_by(error)
    return _of_disk(text, warehouse) or _of_place(text, error)


def _of_python(error: OSError, warehouse: str | None) -> str | None:
    if error.errno in DISK_WORDS:
        return DISK_WORDS[error.errno].format(place=error.filename or warehouse or "the warehouse")
    return None if error.filename is None else f"{error.filename}: {error.strerror or error}"


def _of_place(text: str, error: BaseException) -> str | None:
    """Explain an error of the JVM if a place cannot be reached or may not be used."""
    if found := NO_JARS.search(text):
        missing = found["scheme"] or found["name"]
        return (
            f"Spark has no jars for a warehouse of this kind (it misses {missing}): docs/cluster.md says which these "
            "are for an object store, and where to put them"
        )
    if (found := NO_HOST.search(text)) and KAFKA not in text[found.end() : found.end() + TRACE_CHARS]:
        return f"the warehouse's host {found['host']} cannot be found: is its name right, and does DNS answer?"
    if found := GONE.search(text):
        return (
            f"the file {found['path']} is gone: does something else clean up this folder, such as another tool's "
            "vacuum? Only `sluice-cloud` may remove files there. If no table names it yet, the next run makes it anew"
        )
    if REFUSED.search(text):
        return f"this user may not read or write there: {innermost(error)}"
    return None


def _of_disk(text: str, warehouse: str | None) -> str | None:
    """Explain an error of the JVM if the system refused to write."""
    if every := list(DISK_ERRORS.finditer(text)):
        # The last one is the innermost cause.
        found = every[-1]
        before, behind = text[: found.start()], text[found.end() : found.end() + TRACE_CHARS]
        is_of_tables = HADOOP in behind or OF_PYTHON.search(before)
        place = (warehouse or "the warehouse") if is_of_tables else os.environ.get("SPARK_LOCAL_DIRS") or gettempdir()
        return DISK_WORDS[int(str(found.lastgroup)[1:])].format(place=place)
    if folder := NO_FOLDER.search(text):
        # Java does not say why.
        if _is_full(Path(folder["path"])):
            return DISK_WORDS[errno.ENOSPC].format(place=warehouse or folder["path"])
        return f"the folder {folder['path']} cannot be made: may this user write there?"
    return None


def _is_full(path: Path) -> bool:
    """True if a file system has no room, or no inode, for another folder."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize < FULL_BYTES or (found.f_files > 0 and found.f_favail == 0)
