"""A password is taken from a file that nobody else may read, and shows in no message."""

from pathlib import Path

import pytest

from gateway.host.safe_files import PASSWORD_BYTES_MAX, PasswordFileError, read_password


def written(folder: Path, content: bytes, mode: int = 0o400) -> Path:
    path = folder / "password"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("content", ["correct horse", "correct horse\n", "correct horse\r\n", "correct horse\nnotes\n"])
def test_the_first_line_is_the_password(tmp_path: Path, content: str) -> None:
    assert read_password(written(tmp_path, content.encode())) == "correct horse"


def test_a_byte_order_mark_is_no_part_of_the_password(tmp_path: Path) -> None:
    assert read_password(written(tmp_path, b"\xef\xbb\xbfcorrect horse\r\n")) == "correct horse"


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"correct horse", 0o440, "can be read by others; run: chmod 0400"),
        (b"correct horse", 0o402, "can be read by others"),
        (b"\n", 0o400, "password_file is empty"),
        (b"\xef\xbb\xbf\n", 0o400, "password_file is empty"),
        (b"correct horse \xff", 0o400, "is not UTF-8 text"),
        (b"horse" * PASSWORD_BYTES_MAX, 0o400, "more than 65535 bytes"),
    ],
)
def test_a_file_that_will_not_do(tmp_path: Path, content: bytes, mode: int, words: str) -> None:
    with pytest.raises(PasswordFileError, match=r"^password_file") as raised:
        read_password(written(tmp_path, content, mode))
    assert words in str(raised.value)
    assert "horse" not in str(raised.value)
    # Nor in what a traceback would show of it.
    assert raised.value.__cause__ is None


def test_a_directory_and_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PasswordFileError, match="is no file"):
        read_password(tmp_path)
    with pytest.raises(PasswordFileError, match="No such file or directory; write the password there, chmod 0400"):
        read_password(tmp_path / "nowhere")
