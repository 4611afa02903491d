"""systemd's journal: whether standard error goes there, and the priorities that lines have there (sd-daemon(3))."""

import os
import sys
from typing import Final

PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""syslog(3)'s, by the names that log lines have."""


def is_journal() -> bool:
    """Whether standard error goes to the journal (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        stderr = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}"


def prioritized(text: str, level: str) -> str:
    """The text with its priority before each line: a stack trace is as grave as what it belongs to."""
    priority = PRIORITIES.get(level, PRIORITIES["info"])
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))
