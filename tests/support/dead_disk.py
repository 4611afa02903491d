"""A disk that dies under a buffer of this process, as a card does that is pulled out: not even reading works."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def dead_disk(path: Path, *parts: str) -> Iterator[None]:
    """Let each read, write and sync of a buffer's open files fail meanwhile.

    `parts` are the endings of those that fail, by default "" and "-wal".
    """
    files = {path.with_name(path.name + part) for part in parts or ("", "-wal")}
    descriptors = []
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if link.readlink() in files:
                descriptors.append(int(link.name))
    assert descriptors, "nobody has it open"
    kept = {descriptor: os.dup(descriptor) for descriptor in descriptors}
    # With such a descriptor nothing can be read or written.
    useless = os.open(path, os.O_PATH)
    for descriptor in kept:
        os.dup2(useless, descriptor)
    os.close(useless)
    try:
        yield
    finally:
        for descriptor, former in kept.items():
            os.dup2(former, descriptor)
            os.close(former)
