"""Makes partitions and a card from folders: MBR, FAT for booting, ext4. Needs neither root nor a loop device."""

import os
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DISK_SIGNATURE = 0x5711CE00
"""Identifier of the card in its MBR. The partitions' PARTUUIDs begin with it."""
FAT32, LINUX = 0x0C, 0x83
"""Types of partitions in an MBR."""
FIRST_SECTOR = 2048
SECTOR = 512
MB = 1 << 20
_ANY_CYLINDER = b"\xfe\xff\xff"


@dataclass(frozen=True, slots=True)
class Partition:
    """One of at most four partitions, in the order of the card."""

    kind: int
    megabytes: int
    content: Path | None
    """File with the file system; None leaves the partition empty."""


def make_fat(path: Path, megabytes: int, folder: Path) -> None:
    """Make a FAT32 file system with the files of a folder. At least 33 MB, or it is none."""
    serial = f"{DISK_SIGNATURE:08x}"
    _run("mkfs.vfat", "-F", "32", "-n", "SLUICE", "-i", serial, "--invariant", "-C", str(path), str(megabytes * 1024))
    _run("mcopy", "-s", "-m", "-i", str(path), *(str(found) for found in sorted(folder.iterdir())), "::")


def make_ext4(path: Path, megabytes: int, folder: Path, *options: str) -> None:
    """Make an ext4 file system with the files of a folder, and with these options of mke2fs."""
    _run("mke2fs", "-q", "-t", "ext4", *options, "-d", str(folder), str(path), f"{megabytes}M")


def make_card(path: Path, partitions: Sequence[Partition]) -> None:
    """Put partitions one behind the other on a card."""
    table = bytearray(SECTOR)
    struct.pack_into("<I", table, 440, DISK_SIGNATURE)
    table[510:] = b"\x55\xaa"
    first = FIRST_SECTOR
    with path.open("wb") as card:
        for number, partition in enumerate(partitions):
            sectors = partition.megabytes * MB // SECTOR
            entry = (0, _ANY_CYLINDER, partition.kind, _ANY_CYLINDER, first, sectors)
            struct.pack_into("<B3sB3sII", table, 446 + 16 * number, *entry)
            if partition.content is not None:
                place = (f"of={path}", f"seek={first * SECTOR // MB}")
                _run("dd", "bs=1M", "conv=notrunc,sparse", "status=none", f"if={partition.content}", *place)
            first += sectors
        card.write(table)
        card.truncate(first * SECTOR)


def make_script(path: Path, source: Path) -> None:
    """Wrap a script of U-Boot's in the header that U-Boot looks for."""
    _run("mkimage", "-A", "arm64", "-T", "script", "-C", "none", "-d", str(source), str(path))


def _run(*command: str) -> None:
    # The times in a FAT are local, and mkimage writes one too.
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    environment = {**os.environ, "TZ": "UTC", "SOURCE_DATE_EPOCH": "0", "PATH": path}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
