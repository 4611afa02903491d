"""The status page's password file: lines that stand for a password, and lines that do not."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.page.password import PagePasswordError, _parsed, make_password_line, read_password_line, verify_password

LINE = make_password_line("correct horse")


def test_a_password_is_known_again_and_another_is_not() -> None:
    assert LINE.startswith("scrypt$16384$8$1$")
    assert verify_password("correct horse", LINE)
    assert verify_password("correct horse", LINE + "\n")
    assert not verify_password("correct horse ", LINE)
    assert not verify_password("", LINE)
    assert make_password_line("correct horse") != LINE, "each has a salt of its own"


def test_a_keyboard_that_composes_letters_otherwise_is_no_other_password() -> None:
    assert verify_password("cafe\u0301", make_password_line("caf\u00e9"))


def test_what_is_longer_than_any_password_is_not_hashed() -> None:
    assert not verify_password("x" * 1_000_000, LINE)


@settings(max_examples=200)
@given(st.text(max_size=200) | st.from_regex(r"\Ascrypt\$[0-9]{1,9}\$[0-9]{1,4}\$[0-9]{1,4}\$[0-9a-f]*\$[0-9a-f]*\Z"))
def test_any_line_but_the_right_one_lets_nobody_in(line: str) -> None:
    """A line may ask for any cost. None takes more memory than the bound."""
    parsed = _parsed(line)
    if parsed is not None:
        n, r, p, _, _ = parsed
        assert 128 * n * r * p <= 2**30
    else:
        assert not verify_password("correct horse", line)


def test_a_file_without_a_password_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "status-page"
    with pytest.raises(PagePasswordError, match="run sluice setup"):
        read_password_line(path)
    path.write_text("swordfish\n")
    path.chmod(0o400)
    with pytest.raises(PagePasswordError, match=r"holds no line of scrypt.*run sluice setup") as raised:
        read_password_line(path)
    assert "swordfish" not in str(raised.value)
    path.chmod(0o644)
    with pytest.raises(PagePasswordError, match="chmod 0400"):
        read_password_line(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PagePasswordError, match="is no file"):
        read_password_line(tmp_path / "pipe")


def test_a_file_of_roots_alone_is_handed_over_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(PagePasswordError, match="systemctl restart sluice"):
        read_password_line(tmp_path / "status-page")


def test_what_systemd_hands_over_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status-page"
    path.write_text(LINE + "\n")
    path.chmod(0o400)
    assert read_password_line(path) == LINE
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_password_line(path) == LINE, "without a credential the file counts"
    handed_over = make_password_line("another")
    (tmp_path / "sluice_status-page").write_text(handed_over + "\n")
    assert read_password_line(path) == handed_over


def test_a_folder_of_systemds_that_cannot_be_looked_into_hands_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is forbidden to root, but a name may be too long."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/" + "x" * 300)
    path = tmp_path / "status-page"
    path.write_text(LINE + "\n")
    path.chmod(0o400)
    assert read_password_line(path) == LINE
