"""No dump of the daemon holds its memory."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.host import core_dumps
from tests.support.gateways import daemon, write_config

PATTERN = Path("/proc/sys/kernel/core_pattern")
DIES = """\
import os, resource, sys
from gateway.host import core_dumps
codeword = bytes(byte ^ 1 for byte in b"iddqd idkfa")
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
# As a program that core_pattern names would have it: it gets the dump whatever the limit is.
core_dumps.resource.setrlimit = lambda *_: None
if sys.argv[1] == "forbidden":
    core_dumps.forbid()
os.abort()
"""
CODEWORD = bytes(byte ^ 1 for byte in b"iddqd idkfa")


@pytest.mark.skipif(
    "/" in PATTERN.read_text() or PATTERN.read_text().startswith("|"), reason="dumps do not go to the working directory"
)
@pytest.mark.parametrize("how", ["allowed", "forbidden"])
def test_a_dump_holds_no_memory_even_where_the_limit_does_not_count(how: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run([sys.executable, "-c", DIES, how], cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == -signal.SIGABRT
    dumps = list(tmp_path.glob("core*"))
    if how == "allowed" and not dumps:
        pytest.skip("this kernel makes no dumps here")
    assert any(CODEWORD in dump.read_bytes() for dump in dumps) == (how == "allowed")


def test_the_daemon_forbids_its_dumps_and_others_still_see_what_it_has_open(tmp_path: Path, port: int) -> None:
    with daemon(write_config(tmp_path, "127.0.0.1:1", port, "d"), port) as process:
        told = Path(f"/proc/{process.pid}/coredump_filter").read_text()
        assert int(told, 16) == 0
        limits = resource.prlimit(process.pid, resource.RLIMIT_CORE)
        assert limits == (0, 0)
        assert Path(f"/proc/{process.pid}").stat().st_uid == os.getuid()


def test_where_nothing_can_be_set_the_daemon_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(core_dumps, "_FILTER", tmp_path / "no such folder" / "coredump_filter")
    core_dumps.forbid()
