"""The folder of the tables: its name made absolute, and one writer at a time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
