"""Files are wiped, and trusted, only where nobody else can have put them in the place of others."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.host.safe_files import (
    WIPED_BYTES_MAX,
    LeftAloneError,
    reached,
    why_left_alone,
    why_others_could_change,
    wipe,
)

OTHER_UID = 64_123
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


@pytest.mark.parametrize("size", [0, 1, 100_000, WIPED_BYTES_MAX, WIPED_BYTES_MAX + 1])
def test_a_small_file_is_overwritten_and_every_file_is_gone(size: int, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * size)
    path.chmod(0o400)
    with path.open("rb") as seen:
        wipe(path)
        assert seen.read() == (b"x" if size > WIPED_BYTES_MAX else b"\0") * size
    assert not path.exists()
    wipe(path)
    wipe(tmp_path / "no such folder" / "secret")


@as_root
def test_a_file_that_cannot_be_overwritten_does_not_count_as_wiped(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    code = f"from pathlib import Path; from gateway.host.safe_files import wipe; wipe(Path({str(secret)!r}))"
    without_proc = ["unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "sh", sys.executable, "-c", code]
    ended = subprocess.run(without_proc, capture_output=True, text=True, check=False, timeout=60)
    assert "it cannot be overwritten, for /proc is not mounted" in ended.stderr
    assert secret.read_text() == "hunter2"


def test_what_is_no_file_stays_but_for_a_socket_and_a_pipe(tmp_path: Path) -> None:
    target, folder, pipe = tmp_path / "target", tmp_path / "folder", tmp_path / "pipe"
    target.write_text("keep")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "second").hardlink_to(target)
    folder.mkdir()
    for path, why in (
        (tmp_path / "link", "a symbolic link"),
        (tmp_path / "second", "a second name"),
        (folder, "it is a folder"),
    ):
        with pytest.raises(LeftAloneError, match=why):
            wipe(path)
        assert why in str(why_left_alone(path))
    assert target.read_text() == "keep"
    os.mkfifo(pipe)
    wipe(pipe)
    assert not pipe.exists()


@as_root
@pytest.mark.parametrize(
    ("folder_uid", "mode", "file_uid", "is_ours"),
    [
        (0, 0o755, 0, True),
        (0, 0o755, OTHER_UID, True),
        (0, 0o775, OTHER_UID, False),
        (0, 0o1777, OTHER_UID, False),
        (0, 0o1777, 0, True),
        (OTHER_UID, 0o700, OTHER_UID, True),
        (OTHER_UID, 0o700, 0, True),
        (OTHER_UID, 0o700, OTHER_UID + 1, False),
    ],
)
def test_the_owners_of_file_and_folder_decide_whether_it_is_wiped(
    folder_uid: int, mode: int, file_uid: int, *, is_ours: bool, tmp_path: Path
) -> None:
    folder, path = tmp_path / "folder", tmp_path / "folder" / "file"
    folder.mkdir()
    path.write_text("x")
    os.chown(path, file_uid, file_uid)
    os.chown(folder, folder_uid, folder_uid)
    folder.chmod(mode)
    assert (why_left_alone(path) is None) == is_ours


def test_a_path_is_followed_as_the_kernel_does(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    (tmp_path / "to_a").symlink_to("a")
    (inner / "up").symlink_to("../../to_a/b")
    (tmp_path / "absolute").symlink_to(inner / "up")
    for path in ("a/b/file", "a/b/../b/file", "to_a/b/file", "a/b/up/file", "absolute/file", "absolute/up/up/file"):
        with reached(tmp_path / path, lambda *_: None) as found:
            assert os.fstat(found).st_ino == (tmp_path / path).stat().st_ino
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"), reached(tmp_path / "loop" / "x", lambda *_: None):
        pass


@as_root
@given(st.data())
def test_a_file_is_trusted_only_where_no_folder_above_it_is_anothers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    top = path = tmp_path_factory.mktemp("trusted")
    trusted = True
    for depth in range(3):
        path = path / f"f{depth}"
        path.mkdir()
        mode = data.draw(st.sampled_from([0o755, 0o700, 0o775, 0o757, 0o1777]), f"mode {depth}")
        uid = data.draw(st.sampled_from([0, OTHER_UID]), f"owner {depth}")
        os.chown(path, uid, uid)
        path.chmod(mode)
        trusted &= uid == 0 and (not mode & 0o022 or bool(mode & stat.S_ISVTX))
    key = path / "key.pem"
    key.write_text("x")
    key.chmod(mode := data.draw(st.sampled_from([0o644, 0o400, 0o664, 0o646]), "mode of the key"))
    trusted &= not mode & 0o022
    (top / "link.pem").symlink_to(key)
    assert (why_others_could_change(key) is None) == trusted
    assert (why_others_could_change(top / "link.pem") is None) == trusted
