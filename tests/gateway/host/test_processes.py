"""Facts of proc(5) about the processes of this box."""

import os
from pathlib import Path

import pytest

from gateway.host.processes import has_open


def test_a_descriptor_that_is_closed_meanwhile_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "early").open("w") as early, (tmp_path / "late").open("w") as late:
        closed, listed, look_up = early.name, [early.fileno(), late.fileno()], os.readlink

        def readlink(path: str) -> str:
            found = look_up(path)
            if found == closed:
                raise FileNotFoundError(path)
            return found

        monkeypatch.setattr(os, "listdir", lambda _folder: [str(fd) for fd in listed])
        monkeypatch.setattr(os, "readlink", readlink)
        assert has_open(os.getpid(), Path(late.name))
