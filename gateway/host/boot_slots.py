"""Which of two roots, A or B, a box of our image starts: the state that U-Boot's script `image/boot.cmd` shares.

The state stands in two small files of the boot partition. The valid one with the higher number counts, and the other
one is written next, so a power cut in a write leaves the state before.
"""

import os
import zlib
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from gateway.host.safe_files import sync_folder

Slot = Literal["a", "b"]
FILES = ("slots.0", "slots.1")
FILE_BYTES = 512
"""One sector: a card writes it whole or not at all."""
TRIES = 3
"""Starts that a slot on trial has. A hang or a power cut takes one."""
BOOT_FOLDER = Path("/boot/firmware")
"""Where a box of our image has its boot partition."""
_COMMAND_LINE = Path("/proc/cmdline")


class SlotState(Struct, frozen=True):
    """One state, as both files hold it."""

    number: int = 0
    """Number of the write; 0 if there is no valid file."""
    good: Slot = "a"
    """Slot that was found good last. It starts unless another one is on trial."""
    trial: Slot | None = None
    """Slot that was installed last, until it is found good or given up."""
    tries: int = 0
    """Starts that the slot on trial has left."""

    @property
    def next_start(self) -> Slot:
        """Slot that U-Boot tries first."""
        return self.trial if self.trial is not None and self.tries > 0 else self.good


def put_on_trial(state: SlotState, slot: Slot) -> SlotState:
    """Have a slot started next, up to TRIES times."""
    return msgspec.structs.replace(state, trial=slot, tries=TRIES)


def settle(state: SlotState, good: Slot) -> SlotState:
    """End the trial: this slot starts from now on."""
    return msgspec.structs.replace(state, good=good, trial=None, tries=0)


def other(slot: Slot) -> Slot:
    return "b" if slot == "a" else "a"


def running_slot(command_line: Path = _COMMAND_LINE) -> Slot | None:
    """Slot that this box was started from; None if it has none."""
    words = command_line.read_text().split()
    return next((slot for slot in get_args(Slot) if f"rauc.slot={slot}" in words), None)


def encode(state: SlotState) -> bytes:
    """Write a state as U-Boot's `env export -c -s 200` does: a CRC-32, then `name=value` in hexadecimal."""
    values = {"good": state.good, "number": f"{state.number:x}", "trial": state.trial or "none", "tries": state.tries}
    text = "".join(f"{name}={value}\0" for name, value in values.items()).encode()
    body = text.ljust(FILE_BYTES - 4, b"\0")
    return zlib.crc32(body).to_bytes(4, "little") + body


def decode(content: bytes) -> SlotState | None:
    """Read a state; None if the file was torn or is none."""
    body = content[4:]
    if len(content) != FILE_BYTES or zlib.crc32(body) != int.from_bytes(content[:4], "little"):
        return None
    values = dict(line.split("=", 1) for line in body.decode("ascii", "replace").split("\0") if "=" in line)
    try:
        told = {"good": values["good"], "trial": None if values["trial"] == "none" else values["trial"]}
        numbers = {name: int(values[name], 16) for name in ("number", "tries")}
        return msgspec.convert({**told, **numbers}, SlotState)
    except (KeyError, ValueError, msgspec.ValidationError):
        return None


def read(folder: Path) -> SlotState:
    """Read the state that counts. A file that cannot be read counts as torn, as it does for U-Boot."""
    return max(_read_both(folder), key=lambda state: state.number)


def write(folder: Path, state: SlotState) -> SlotState:
    """Store a state, whatever its number, and return it with its number once it is on the card.

    Raises OSError if the card does not take it. Then the state before counts, or this one.
    """
    both = _read_both(folder)
    newest = max(both, key=lambda found: found.number)
    numbered = msgspec.structs.replace(state, number=newest.number + 1)
    path = folder / FILES[1 if both[0] is newest else 0]
    made = not path.exists()
    # In place: neither the file's size nor its clusters change, so no other sector matters.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, encode(numbered), 0)
        os.ftruncate(descriptor, FILE_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if made:
        sync_folder(folder)
    return numbered


def _read_both(folder: Path) -> list[SlotState]:
    return [_read_one(folder / name) for name in FILES]


def _read_one(path: Path) -> SlotState:
    try:
        with path.open("rb") as file:
            found = decode(file.read(FILE_BYTES + 1))
    except OSError:
        found = None
    return found or SlotState()
