"""A file system of its own for a gateway's buffer, whose kernel counts every byte that is written to it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SIZE_MB = 2_000


@dataclass(frozen=True, slots=True)
class LoopDisk:
    """A mounted ext4, in an image file."""

    path: Path
    device: str
    """Name of its block device, such as `loop0`."""

    @property
    def written_bytes(self) -> int:
        """Bytes that ext4 has written in its life, with its journal and its own structures."""
        # What others wrote to it and nobody synced is written now, so that it counts.
        subprocess.run(["sync", "-f", self.path], check=True)
        return int(Path(f"/sys/fs/ext4/{self.device}/lifetime_write_kbytes").read_text()) * 1024


@contextmanager
def loop_disk(directory: Path) -> Iterator[LoopDisk | None]:
    """Make and mount an ext4 in `directory`; None without root, without mkfs.ext4, or where nothing can be mounted."""
    path, image = directory / "disk", directory / "disk.img"
    path.mkdir(parents=True, exist_ok=True)
    if os.geteuid() or shutil.which("mkfs.ext4") is None:
        yield None
        return
    with image.open("wb") as file:
        file.truncate(SIZE_MB * 1_000_000)
    # Otherwise the kernel goes on to write the inode tables while the gateway is measured.
    lazy = "lazy_itable_init=0,lazy_journal_init=0"
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", lazy, image], check=True)
    if subprocess.run(["mount", "-o", "loop,noatime", image, path], check=False).returncode:
        image.unlink()
        yield None
        return
    try:
        yield LoopDisk(path, _device(path))
    finally:
        subprocess.run(["umount", path], check=True)
        image.unlink()


def _device(path: Path) -> str:
    mounts = [line.split()[:2] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return Path(next(device for device, place in mounts if place == str(path.resolve()))).name
