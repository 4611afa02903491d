"""The record of the last update: written whole or not at all, and readable by the service's user."""

import errno
import os
import stat
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.host import last_update
from gateway.host.last_update import Before, LastUpdate, Result, read, write

UPDATES = st.builds(
    LastUpdate,
    id=st.text(max_size=20),
    old=st.text(max_size=20),
    new=st.text(max_size=20),
    slot=st.sampled_from(["a", "b"]),
    before=st.builds(Before),
    result=st.sampled_from(get_args(Result)),
    reason=st.text(max_size=100),
)
UPDATE = LastUpdate("1", "1.0.0", "1.1.0", "b", Before(), "went-back", "Kafka is not reached")


@given(updates=st.lists(UPDATES, min_size=1, max_size=3))
def test_the_update_that_was_written_last_is_read(
    tmp_path_factory: pytest.TempPathFactory, updates: list[LastUpdate]
) -> None:
    file = tmp_path_factory.mktemp("update") / "folder" / "last.json"
    assert read(file) is None
    for update in updates:
        write(update, file)
        assert read(file) == update
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file.parent, file)] == [0o755, 0o644]
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id": "1"}', b"\xff" * 20_000])
def test_what_is_no_record_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last.json").write_bytes(content)
    assert read(tmp_path / "last.json") is None


def test_a_full_disk_leaves_the_record_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "last.json"
    write(UPDATE, file)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write(LastUpdate("2", "1.1.0", "1.2.0", "a", Before()), file)
    assert read(file) == UPDATE
    assert list(tmp_path.iterdir()) == [file]


def test_each_result_is_told_in_a_sentence() -> None:
    told = {result: last_update.LastUpdate("1", "1.0", "1.1", "b", Before(), result, "why").words for result in
            get_args(Result)}  # fmt: skip
    assert told["good"].startswith("version 1.1 was found good")
    assert told["went-back"] == "version 1.1 was given up, and 1.0 runs again: why"
    assert "goes back to 1.0" in told["on-trial"]
    assert told["refused"].endswith("version 1.0 goes on: why")


def test_a_refused_stick_stands_beside_the_last_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_update, "FILE", tmp_path / "last.json")
    monkeypatch.setattr(last_update, "REFUSED", tmp_path / "refused.json")
    assert last_update.read_refused() is None
    write(UPDATE)
    refused = LastUpdate("3", "1.0.0", "", "b", Before(), "refused", "a.raucb: it is torn")
    write(refused, last_update.REFUSED)
    assert (last_update.read_refused(), read()) == (refused, UPDATE)
