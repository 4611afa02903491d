"""How a command of `sluice-cloud` ends: 1 is a finding, so no failure and no person who stops it gives 1."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark.cli import FAILED, main
from spark.desk import tables
from tests.support.waiting import patience

SLUICE_CLOUD = str(Path(sys.executable).parent / "sluice-cloud")


@pytest.fixture
def warehouse(tmp_path: Path) -> Path:
    """The least that commands take for one. Queries here ask for none of its tables."""
    (tmp_path / "versions").mkdir()
    return tmp_path


def started(warehouse: Path, query: str, *options: str) -> "subprocess.Popen[bytes]":
    command = [SLUICE_CLOUD, "sql", "--warehouse", str(warehouse), query, *options]
    # Its temporary files are seen there.
    environment = {**os.environ, "TMPDIR": str(warehouse)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def test_ctrl_c_ends_a_query_with_the_code_that_shells_know(warehouse: Path) -> None:
    with started(warehouse, "SELECT range FROM range(1000000000)", "--csv") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"range\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=patience(60))
    assert (process.returncode, told.split()) == (130, [b"stopped"])


def test_a_signal_ends_a_query_and_leaves_no_file(warehouse: Path) -> None:
    with started(warehouse, "SELECT range FROM range(1000000000)", "--csv") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"range\n"
        assert len([*warehouse.glob("sluice-desk-*")]) == 1
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=patience(60))
    assert (process.returncode, told) == (-signal.SIGTERM, b"")
    assert [*warehouse.iterdir()] == [warehouse / "versions"]


def test_whoever_reads_a_part_of_the_rows_ends_it_without_a_word(warehouse: Path) -> None:
    with started(warehouse, "SELECT range FROM range(1000000)", "--csv") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"range\n"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(patience(60)) == 128 + signal.SIGPIPE


def test_an_error_of_the_program_itself_is_one_line_with_a_trace(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(warehouse))

    def fail(_path: str) -> None:
        raise KeyError("lane")

    monkeypatch.setattr(tables, "open", fail)
    shown = CliRunner().invoke(main, ["readings", "--warehouse", str(warehouse)])
    assert shown.exit_code == FAILED
    found = re.fullmatch(r"Error: the program itself failed: KeyError: 'lane'.*the trace is in (\S+)\)\n", shown.output)
    assert found is not None, shown.output
    assert "in fail" in Path(found[1]).read_text()
