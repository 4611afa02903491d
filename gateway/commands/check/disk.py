"""Checks the disk under the buffer: its file system, its health, and room for more files."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.commands.check.finding import Finding, remark, well, wrong
from gateway.host.disk_health import MOUNTS, SYSTEM, health_words, read_disk, troubles
from gateway.host.terminal_text import counted

INODES_MIN: Final = 1_000
"""Free inodes below which there is a finding. A buffer takes a few files, and other programs need some too."""
_INODES: Final = "delete files that nobody needs (df -i tells which file system, du --inodes where they are)"


def check_disk(buffer: Path, system: Path = SYSTEM, mounts: Path = MOUNTS) -> Iterator[Finding]:
    """Judge the disk of a buffer. Give nothing if its folder cannot be read, which the check of the buffer reports."""
    folder = buffer.parent
    try:
        disk = read_disk(folder, system, mounts)
        space = os.statvfs(folder)
    except OSError:
        return
    found = [
        wrong("disk-trouble", "disk", words) if fails else remark("disk-trouble", "disk", words)
        for fails, words in troubles(disk, folder)
    ]
    if space.f_files and space.f_favail < INODES_MIN:
        words = (
            f"the disk of {buffer} has inodes for {counted(space.f_favail, 'file')} more, however much space is free; "
            f"{_INODES}"
        )
        found.append(remark("inodes-few", "disk", words) if space.f_favail else wrong("inodes-few", "disk", words))
    yield from found
    if not found and disk.name:
        yield well("disk", f"{health_words(disk)}; {disk.kind} without errors")
