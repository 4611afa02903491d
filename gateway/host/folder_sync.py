"""Has what became of a folder's names on the disk: renamed, made and removed files count before the next step does."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Come back when the names in a folder are on the disk. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
