"""Runs programs whose words matter only if they fail."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
    """Run a program, and show its words if it fails. Raises CalledProcessError."""
    ended = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if ended.returncode:
        sys.stderr.write(ended.stdout)
    ended.check_returncode()
