"""A failure is told in words, whatever becomes of its trace; and traces do not fill the disk."""

import errno
import logging
import os
import re
import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from py4j import protocol as proto  # type: ignore[import-untyped]
from py4j.java_gateway import GatewayClient  # type: ignore[import-untyped]
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

from spark.commands import command_session
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


class _Broken:
    """A connection to a Java that was killed while it worked: the kernel resets it."""

    def send_command(self, _command: str) -> str:
        raise Py4JNetworkError("it was reset", ConnectionResetError(), when=proto.ERROR_ON_RECEIVE)

    def close(self, _reset: object) -> None:
        """Be closed."""


def test_py4j_logs_nothing_of_a_connection_that_was_reset(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger(), "filters", [])
    client = GatewayClient()
    monkeypatch.setattr(client, "_get_connection", _Broken)
    client.send_command("c")
    assert len(caplog.records) == 1, "py4j logs it, by the root logger"
    command_session._hush(SimpleNamespace(sparkContext=object()))  # type: ignore[arg-type]
    client.send_command("c")
    assert len(caplog.records) == 1
