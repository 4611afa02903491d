"""Reads what this box is at the moment: its image, its memory and its addresses."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.host import our_image
from gateway.host.our_image import OurImage
from gateway.host.own_addresses import ipv4_addresses, ipv6_addresses

_MEMORY: Final = Path("/proc/meminfo")
_OWN_MEMORY: Final = Path("/proc/self/statm")


class Box(Struct, frozen=True):
    """This box. A number is None if the kernel does not tell it."""

    image: OurImage | None = None
    """Our image; None on a box with another system."""
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    """Memory that programs can have without swapping."""
    own_bytes: int | None = None
    """Memory of this process."""
    addresses: tuple[str, ...] = ()


def read_box(memory: Path = _MEMORY) -> Box:
    """Read what this box is. What cannot be read stays unknown."""
    told = {}
    with suppress(OSError, ValueError):
        for line in memory.read_text(encoding="ascii").splitlines():
            name, _, size = line.partition(":")
            if name in {"MemTotal", "MemAvailable"}:
                told[name] = int(size.split()[0]) * 1_024
    own = None
    with suppress(OSError, ValueError):
        own = int(_OWN_MEMORY.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    addresses: list[str] = []
    # Without an interface there may be no sockets either.
    with suppress(OSError):
        addresses = sorted({*ipv4_addresses(), *ipv6_addresses()})
    return Box(our_image.read(), told.get("MemTotal"), told.get("MemAvailable"), own, tuple(addresses))
