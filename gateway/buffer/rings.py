"""What the file says of serial sensors' rings: which losses are counted, and which numbers it surely knows.

A crash takes the numbers that only Kafka had, and so does a disk that fails for long. A mark for all sensors is then
renewed (`AGAIN_MARK`), and no mark of a sensor (`KNOWN_MARK`) that names the former one counts any more.
"""

import secrets
import sqlite3
from collections.abc import Iterable

from gateway.buffer.rows import Loss
from gateway.reading import SENSOR_DROPPED, Mark

TOLD_MARK = "ring/"
"""Prefix of marks that say how far ring losses are counted; the device follows. Stored in one commit with the
counter."""
KNOWN_MARK = "ring-known/"
"""Prefix of marks that say from which number on the file and its process know all of a run; the device follows."""
AGAIN_MARK = "ring-again"
"""Mark with a random name, a new one each time that numbers were forgotten. It is absent if none ever were."""
MARKED_MAX = 20_000
"""Marks of one kind that are kept; beyond it, those of devices without a duplicate window go."""


def begin_again() -> Mark:
    """The mark that makes all that the file says of rings uncertain, up to now."""
    return Mark(AGAIN_MARK, secrets.token_hex(6).encode())


def note_told(connection: sqlite3.Connection, losses: Iterable[Loss]) -> None:
    """Mark how far ring losses are counted, in the transaction that counts them."""
    _mark(
        connection,
        TOLD_MARK,
        [
            (loss.device, f"{loss.last_sequence + 1} {loss.device_boot}")
            for loss in losses
            if loss.reason == SENSOR_DROPPED and loss.device and loss.last_sequence is not None
        ],
    )


def told_below(connection: sqlite3.Connection, device: str, boot: str) -> int | None:
    """The sequence of a device's run below which all ring losses are counted, or are others'; None if unknown."""
    value = _value(connection, TOLD_MARK + device)
    if value is None:
        return None
    below, of_boot = value.split(" ", 1)
    return int(below) if of_boot == boot else None


def note_known(connection: sqlite3.Connection, device: str, boot: str, first: int, following: int) -> None:
    """Mark a run that was not `known_from`. The sensor will send numbers from `following` on for the first time.

    Numbers below `first` are counted, or belong to others.
    """
    again = _value(connection, AGAIN_MARK)
    # If nothing was ever forgotten, the file knows all.
    known_from = 0 if again is None else following
    _mark(connection, KNOWN_MARK, [(device, f"{known_from} {again or ''} {boot}")])
    _mark(connection, TOLD_MARK, [(device, f"{first} {boot}")])


def known_from(connection: sqlite3.Connection, device: str, boot: str) -> int | None:
    """The sequence of a device's run from which on the file and its process know all numbers; None if unknown."""
    value = _value(connection, KNOWN_MARK + device)
    if value is None:
        return None
    first, again, of_boot = value.split(" ", 2)
    return int(first) if (again, of_boot) == (_value(connection, AGAIN_MARK) or "", boot) else None


def _value(connection: sqlite3.Connection, key: str) -> str | None:
    found = connection.execute("SELECT value FROM mark WHERE key = ?", (key,)).fetchone()
    return found[0].decode() if found else None


def _mark(connection: sqlite3.Connection, prefix: str, values: Iterable[tuple[str, str]]) -> None:
    """Set marks of devices, and delete some if there are too many."""
    marks = [(prefix + device, value.encode()) for device, value in values]
    if not marks:
        return
    connection.executemany("INSERT OR REPLACE INTO mark VALUES (?, ?)", marks)
    beginning = (prefix, prefix + chr(0x10FFFF))
    (kept,) = connection.execute("SELECT count(*) FROM mark WHERE key BETWEEN ? AND ?", beginning).fetchone()
    if kept > MARKED_MAX:
        connection.execute(
            "DELETE FROM mark WHERE key BETWEEN ? AND ? AND substr(key, ?) NOT IN (SELECT device FROM device_run)",
            (*beginning, len(prefix) + 1),
        )
