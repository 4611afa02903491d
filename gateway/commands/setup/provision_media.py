"""USB sticks as `sluice provision` looks at them: their partitions, mounted for a moment, and nothing on them run."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

BOOT_FOLDERS: Final = (Path("/boot/firmware"), Path("/boot"))
"""Where a card's boot partition is, which any computer can write: Raspberry Pi OS and Debian since 12, and before."""
FILE_SYSTEMS: Final = ("vfat", "exfat", "ext4")
_BLOCK: Final = Path("/sys/class/block")
_OPTIONS: Final = "nosuid,nodev,noexec"
_PATIENCE_S: Final = 30.0
"""How long a program may take over a stick that does not answer."""

Run = Callable[[Sequence[str]], str]
"""Runs a program of the system and gives what it printed. Raises OSError or subprocess.SubprocessError."""


class MediumError(Exception):
    """A stick cannot be looked into; the message says why."""


def run(command: Sequence[str]) -> str:
    """As `Run` has it."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True, errors="replace")  # noqa: S603 - names of the kernel's
    return done.stdout.strip()


def sticks(block: Path = _BLOCK) -> list[str]:
    """The partitions of removable USB media, or such a medium itself where it has none: names as in /dev."""
    found = []
    for entry in sorted(block.iterdir()) if block.is_dir() else []:
        real = entry.resolve()
        disk = real.parent if (real / "partition").exists() else real
        is_usb = any(part.startswith("usb") and part[3:].isdecimal() for part in real.parts)
        is_whole = disk == real
        has_parts = is_whole and any((inner / "partition").exists() for inner in real.iterdir() if inner.is_dir())
        if is_usb and not has_parts and _word(disk / "removable") == "1" and _word(real / "size") not in {"", "0"}:
            found.append(entry.name)
    return found


@contextmanager
def mounted(name: str, run: Run = run) -> Iterator[Path]:
    """A partition as a folder; read-only until `writable` is called. Raises MediumError."""
    device = f"/dev/{name}"
    try:
        kind = run(["blkid", "-p", "-o", "value", "-s", "TYPE", device])
    except (OSError, subprocess.SubprocessError):
        kind = ""
    if kind not in FILE_SYSTEMS:
        raise MediumError(f"{device} has no file system that is looked into ({', '.join(FILE_SYSTEMS)})")
    folder = Path(tempfile.mkdtemp(prefix="sluice-provision-", dir="/run" if os.access("/run", os.W_OK) else None))
    try:
        # FAT knows no owners: without the mask everybody could read the secrets meanwhile.
        mask = "" if kind == "ext4" else ",umask=077"
        _do(run, ["mount", "-t", kind, "-o", f"ro,{_OPTIONS}{mask}", device, str(folder)])
        try:
            yield folder
        finally:
            _do(run, ["umount", str(folder)])
    finally:
        with suppress(OSError):
            folder.rmdir()


def make_writable(folder: Path, run: Run = run) -> None:
    """Let a stick that is mounted be written. Raises MediumError where it is locked, or failing."""
    _do(run, ["mount", "-o", f"remount,rw,{_OPTIONS}", str(folder)])


def _do(run: Run, command: Sequence[str]) -> None:
    try:
        run(command)
    except subprocess.CalledProcessError as error:
        raise MediumError(f"{' '.join(command)}: {' '.join(str(error.stderr).split())[:300]}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise MediumError(f"{' '.join(command)}: {error}") from error


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
