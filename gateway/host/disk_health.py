"""Reads a disk's file system, errors and flash wear, as far as the kernel tells them without more rights."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from gateway.host.terminal_text import counted

SYSTEM: Final = Path("/sys")
MOUNTS: Final = Path("/proc/self/mountinfo")
LIFE_EXCEEDED: Final = 11
LIFE_SOON: Final = 9
"""DEVICE_LIFE_TIME_EST_TYP_A and _B: tenths of the disk's life used, begun ones counted (JESD84-B51, 7.4.22)."""
EOL_WARNING, EOL_URGENT = 2, 3
"""PRE_EOL_INFO: 80 and 90 % of the reserve blocks are used (JESD84-B51, section 7.4.21)."""
_NETWORK: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "fuse.glusterfs", "afs"})
_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_WITHOUT_JOURNAL: Final = frozenset({"vfat", "msdos", "exfat", "ext2"})
_LIFE: Final = re.compile(r"\b0x([0-9a-fA-F]{1,2})\b")
_SD_CARD: Final = "an SD card"
_DISK: Final = "a disk"
_SLAVES_MAX: Final = 8


class Disk(Struct, frozen=True):
    """The disk under a folder. A field is None if the kernel does not tell it."""

    kind: str
    """Kind of the file system, such as `ext4`; empty if unknown."""
    name: str = ""
    """Name of the disk, such as `mmcblk0`; empty if the file system is on none."""
    what: str = ""
    """The disk in words, such as `an SD card (SC32G)`."""
    life_used_tenths: int | None = None
    """Tenths of life used, of the worse of an eMMC's two kinds of memory; 11 is more than its maker promises."""
    reserve: int | None = None
    """PRE_EOL_INFO."""
    state: str | None = None
    """The kernel's state of a disk that can be taken off line: `running`, `live`, or the trouble."""
    is_protected: bool = False
    """Whether the disk itself takes no writes."""
    errors: int = 0
    """Errors that the file system has met since its last check."""
    error_s: int | None = None
    """Time of the last error, in seconds since 1970."""

    @property
    def says_something(self) -> bool:
        """Whether the kernel tells more of the disk than that it is there."""
        return bool(self.name) and (self.what != _DISK or self.life_used_tenths is not None)


def read_disk(folder: Path, system: Path = SYSTEM, mounts: Path = MOUNTS) -> Disk:
    """Read the state of the disk under a folder. Raises OSError if the folder cannot be read."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    kind = _file_system_of(device, mounts)
    try:
        block = (system / "dev/block" / device).resolve(strict=True)
    except OSError:
        return Disk(kind)
    errors = _number(system / "fs" / kind / block.name / "errors_count") or 0 if kind else 0
    error_s = _number(system / "fs" / kind / block.name / "last_error_time") if errors else None
    disk = _whole(block)
    of = disk / "device"
    lives = [int(told, 16) for told in _LIFE.findall(_text(of / "life_time"))]
    return Disk(
        kind,
        disk.name,
        _what(disk, of),
        max(lives, default=None),
        _number(of / "pre_eol_info"),
        _text(of / "state") or None,
        _text(disk / "ro") == "1",
        errors,
        error_s or None,
    )


class Trouble(NamedTuple):
    """Something that is wrong with a disk."""

    fails: bool
    """True for a fault to mend, false for a warning."""
    words: str


def troubles(disk: Disk, folder: Path) -> Iterator[Trouble]:
    """Yield each trouble of the disk that a folder is on."""
    yield from _file_system(disk, folder)
    yield from _health(disk)


def health_words(disk: Disk) -> str:
    """Describe a disk in a few words: `mmcblk0 is an eMMC (DG4032), 10 to 20 % of its life used`."""
    tenths = disk.life_used_tenths
    if tenths:
        share = (
            "all of its life and more"
            if tenths >= LIFE_EXCEEDED
            else f"{tenths * 10 - 10} to {tenths * 10} % of its life"
        )
        life = f", {share} used"
    else:
        life = ", which does not tell its wear" if disk.what.startswith(_SD_CARD) else ""
    return f"{disk.name} is {disk.what}{life}"


def _file_system(disk: Disk, folder: Path) -> Iterator[Trouble]:
    if disk.kind in _NETWORK:
        yield Trouble(
            True,
            f"{folder} is on a file system of another machine's ({disk.kind}), on which SQLite's WAL does not work; "
            "write a path on a disk of this box's own (buffer.path)",
        )
    elif disk.kind in _MEMORY:
        yield Trouble(
            False,
            f"{folder} is in memory ({disk.kind}): what sensors were told is safe is gone when this box restarts; "
            "write a path on a disk (buffer.path), unless this is a trial",
        )
    elif disk.kind in _WITHOUT_JOURNAL:
        yield Trouble(
            False,
            f"{folder} is on a file system without a journal ({disk.kind}), which a power cut may damage; write a path "
            "on ext4 (buffer.path)",
        )
    if disk.errors:
        when = "" if disk.error_s is None else f", the last on {datetime.fromtimestamp(disk.error_s, UTC):%Y-%m-%d}"
        yield Trouble(
            True,
            f"{disk.kind} on {disk.name} has met {counted(disk.errors, 'error')} since its last check{when}: the disk "
            "or card may be dying (dmesg tells). Save its files, have it checked at the next start (fsck -f), and "
            "replace it if they come again",
        )


def _health(disk: Disk) -> Iterator[Trouble]:
    replace = "have it replaced, and save its readings before (sluice buffer export)"
    if disk.is_protected:
        yield Trouble(
            True, f"{disk.name} is {disk.what} that takes no writes: its switch, or its end of life; {replace}"
        )
    if disk.state not in {None, "running", "live"}:
        yield Trouble(True, f"{disk.name} is {disk.what}, and the kernel says that it is {disk.state}; {replace}")
    tenths, reserve = disk.life_used_tenths or 0, disk.reserve or 0
    if tenths >= LIFE_EXCEEDED or reserve >= EOL_URGENT:
        why = "its flash has outlived what its maker promises" if tenths >= LIFE_EXCEEDED else _RESERVE.format("90")
        yield Trouble(True, f"{disk.name} is {disk.what}, and {why}: it may fail any day; {replace}")
    elif tenths >= LIFE_SOON or reserve >= EOL_WARNING:
        why = f"{tenths * 10 - 10} % of its life is used" if tenths >= LIFE_SOON else _RESERVE.format("80")
        yield Trouble(
            False, f"{disk.name} is {disk.what}, and {why}; have another one ready (sluice buffer ls: its wear)"
        )


_RESERVE: Final = "{} % of the blocks that it keeps in reserve are used"


def _file_system_of(device: str, mounts: Path) -> str:
    """Find a device's kind of file system in its last line of mountinfo (proc_pid_mountinfo(5)); empty for none."""
    found = ""
    with suppress(OSError, UnicodeDecodeError):
        for line in mounts.read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            columns = before.split()
            if columns[2:3] == [device]:
                found = after.partition(" ")[0]
    return found


def _whole(block: Path) -> Path:
    """Find the disk below a partition, or below a device that is mapped onto one."""
    for _ in range(_SLAVES_MAX):
        slaves = sorted(path.resolve() for path in (block / "slaves").glob("*"))
        if not slaves:
            break
        block = slaves[0]
    return block.parent if (block / "partition").exists() else block


def _what(disk: Path, of: Path) -> str:
    kind = _text(of / "type")
    name = _text(of / "name") or _text(of / "model")
    model = f" ({name})" if name.isprintable() and name else ""
    if kind == "SD":
        return f"{_SD_CARD}{model}"
    if kind == "MMC":
        return f"an eMMC{model}"
    if disk.name.startswith("nvme"):
        return f"an NVMe disk{model}"
    return f"{_DISK}{model}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path), 0)
    except ValueError:
        return None
