"""Keeps a second daemon, or a command that writes, off a buffer file that is in use."""

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from gateway.host.safe_files import make_private
from gateway.reading import BufferFileError

LOCK_TRIES = 5
LOCK_RETRY_S = 0.1
"""Seconds between two tries: `sluice status` holds the lock for an instant, another daemon for good."""


def acquire(path: Path) -> IO[bytes]:
    """Lock the buffer at `path` until the returned file is closed. Raises BufferFileError."""
    try:
        name = path.with_name(path.name + ".lock")
        make_private(name)
        # Root may lock in another user's folder, where a link could lead anywhere.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.fdopen(os.open(name, flags, 0o600), "ab")
    except OSError as error:
        raise BufferFileError(
            f"buffer.path: nothing can be written in {path.parent} ({error.strerror}): make the directory, "
            "and let the user that sluice runs as write to it"
        ) from error
    for attempt in range(LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if attempt == LOCK_TRIES - 1:
                lock.close()
                raise BufferFileError(
                    f"buffer.path: {path} is in use by another sluice: stop that one, or give this one a buffer of "
                    "its own"
                ) from error
            time.sleep(LOCK_RETRY_S)
        else:
            break
    return lock
