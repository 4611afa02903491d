"""Remembers how far the tables of a published folder have come, in a file beside them."""

from dataclasses import dataclass, field
from datetime import date
from os import fsync
from pathlib import Path

import msgspec

from gateway.host.safe_files import sync_folder

FILE = "_published.json"
FORM = 1
"""Number of the file's form. A file of another form counts as none: all is written anew."""


@dataclass(slots=True)
class PublishState:
    """What the published tables hold. Days in `pending` are to be written, whatever else is said of them."""

    warehouse: str
    rules: str
    """Digest of all that the rows of every day depend on: the version's number, declarations, columns."""
    versions: dict[str, int]
    """Number of the last commit of each table that was read."""
    ordinal: int
    """The last batch of `log` that was read."""
    boots: dict[str, str]
    """Digest of the time correction that counts for each boot of a gateway."""
    windows: dict[date, str] = field(default_factory=dict)
    """Digest of each day's windows."""
    pending: dict[str, list[date]] = field(default_factory=dict)
    """Days to be written, by the name of the table."""
    form: int = field(default=FORM)


def read_state(folder: Path) -> PublishState | None:
    """Return what is remembered; None if there is nothing, or nothing that this program understands."""
    try:
        state = msgspec.json.decode((folder / FILE).read_bytes(), type=PublishState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return state if state.form == FORM else None


def write_state(folder: Path, state: PublishState) -> None:
    """Replace what is remembered. After a crash it is there as before or as now."""
    new = folder / f"{FILE}.new"
    with new.open("wb") as file:
        file.write(msgspec.json.encode(state))
        file.flush()
        fsync(file.fileno())
    new.replace(folder / FILE)
    sync_folder(folder)
