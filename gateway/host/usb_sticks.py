"""Finds and mounts USB sticks. Nothing on a stick can be run."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

FILE_SYSTEMS: Final = ("vfat", "exfat", "ext4")
_BLOCK: Final = Path("/sys/class/block")
_OPTIONS: Final = "nosuid,nodev,noexec"
_PATIENCE_S: Final = 30.0
"""Seconds that a program may take over a stick that does not answer."""

Run = Callable[[Sequence[str]], str]
"""Function that runs a program and returns its output. Raises OSError or subprocess.SubprocessError."""


class MediumError(Exception):
    """A stick cannot be read or written. The message says why."""


def run(command: Sequence[str]) -> str:
    """Run a program of the system, as `Run` describes."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True, errors="replace")  # noqa: S603 - names of the kernel's
    return done.stdout.strip()


def sticks(block: Path = _BLOCK) -> list[str]:
    """Names in /dev of the partitions of removable USB media, or of a medium itself that has no partition."""
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
    """Mount a partition, read-only until `make_writable` is called, and give its folder. Raises MediumError."""
    device = f"/dev/{name}"
    try:
        kind = run(["blkid", "-p", "-o", "value", "-s", "TYPE", device])
    except (OSError, subprocess.SubprocessError):
        kind = ""
    if kind not in FILE_SYSTEMS:
        raise MediumError(f"no file system {', '.join(FILE_SYSTEMS)} is seen on {device}: use a stick that has one")
    folder = Path(tempfile.mkdtemp(prefix="sluice-stick-", dir="/run" if os.access("/run", os.W_OK) else None))
    try:
        # FAT has no owners of files. Without the mask everybody could read the secrets meanwhile.
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
    """Make a mounted stick writable. Raises MediumError if it is locked or failing."""
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
