"""Whether this box runs Sluice's image: its version, its slot, and how full its partitions are."""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.host import boot_slots
from gateway.host.boot_slots import Slot

IMAGE_ID: Final = "sluice"
"""IMAGE_ID in the os-release of our image."""
COMPATIBLE: Final = "sluice-arm64"
"""What a bundle for our image says that it is for."""
PARTITIONS: Final = {"boot partition": boot_slots.BOOT_FOLDER, "data partition": Path("/data")}
"""Partitions that can fill up, and where they are mounted. A root is read only."""


class OurImage(Struct, frozen=True):
    """The image that this box runs."""

    version: str
    slot: Slot
    full: dict[str, float]
    """Share of each partition that is in use, by its name."""

    @property
    def words(self) -> str:
        """The image in a line."""
        full = "".join(f"; the {name} is {share:.0%} full" for name, share in self.full.items())
        return f"version {self.version} runs from slot {self.slot}{full}"


def read() -> OurImage | None:
    """Describe this box's image; None if it runs none of ours."""
    told = os_release()
    slot = boot_slots.running_slot()
    if told.get("IMAGE_ID") != IMAGE_ID or slot is None:
        return None
    return OurImage(told.get("IMAGE_VERSION", ""), slot, dict(_in_use()))


def os_release() -> Mapping[str, str]:
    """What this system says of itself; empty if nothing (os-release(5))."""
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _in_use() -> Iterator[tuple[str, float]]:
    for name, folder in PARTITIONS.items():
        with suppress(OSError):
            found = os.statvfs(folder)
            if found.f_blocks and os.path.ismount(folder):
                yield name, 1 - found.f_bavail / found.f_blocks
