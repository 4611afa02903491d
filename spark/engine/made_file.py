"""A file of a Delta table that an executor made. It needs neither Arrow nor Spark."""

from typing import NamedTuple


class MadeFile(NamedTuple):
    """A file that no commit names yet."""

    action: str
    """Delta's action that adds the file, as JSON."""
    name: str
    """Path of the file below the table's folder."""
    content: bytes | None
    """Content of a file that is not written yet; None if it is written."""
