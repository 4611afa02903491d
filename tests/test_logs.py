"""What the daemon says of itself: whatever a client called itself, no terminal obeys it."""

import pytest
import structlog

from gateway import logs
from gateway.settings import LogSettings


def test_no_value_of_a_line_is_obeyed_by_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        logs.set_up(LogSettings())
        log = structlog.get_logger()
        try:
            int("bad\x1b[2J\u202e")
        except ValueError:
            log.exception("it\x1b]0;title\x07", client_id="\x1b[2Jm\n001", reasons={"\x1b[2J": 1}, why="\u202eabc")
    finally:
        structlog.configure(**before)
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert "\x07" not in said
    assert r"\x1b[2Jm\x0a001" in said
    assert "\nValueError: invalid literal" in said, "a stack trace keeps its lines"
