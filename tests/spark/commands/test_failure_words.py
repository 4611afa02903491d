"""A failure is told in words, whatever becomes of its trace; and traces do not fill the disk."""

import errno
import os
import re
import resource
import tempfile
from pathlib import Path

import pytest

from spark.commands.failure_words import TRACES_MAX, Known, told_failure

FULL = OSError(errno.ENOSPC, "No space left on device", "/wh")
WORDS = "the disk of /wh is full: make room there"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def told() -> str:
    failure = told_failure(FULL, Known())
    assert failure is not None
    return failure.message


def test_the_last_few_traces_stay(scratch: Path) -> None:
    others = [scratch / "sluice-cloud-notes.txt", scratch / "other-1.log", scratch / "sluice-cloud-ingest.log"]
    for path in others:
        path.write_text("theirs")
    kept = []
    for second in range(TRACES_MAX + 3):
        trace = re.fullmatch(rf"{WORDS} \(the trace is in (\S+)\)", told())
        assert trace is not None
        kept.append(Path(trace[1]))
        os.utime(kept[-1], (second, second))
    assert {path for path in scratch.iterdir() if path not in others} == set(kept[-TRACES_MAX:])
    assert all(path.read_text() == "theirs" for path in others)


def test_the_words_are_told_where_no_trace_can_be_written(scratch: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert told() == WORDS
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(scratch.iterdir()) == [], "a part of a trace tells nobody anything"
    tempfile.tempdir = str(scratch / "none")
    assert told() == WORDS
