"""The daemon's log: no terminal obeys it, whatever a client calls itself."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from gateway.host import logs
from gateway.settings import LogSettings
from tests.support.terminals import WORST, assert_harmless, is_obeyed
from tests.support.waiting import patience, until


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


async def test_a_few_of_many_log_lines_of_a_kind_are_written_and_the_others_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "LINES_S", 0.2)
    log = structlog.get_logger()
    few = logs.FewLines()
    with capture_logs() as said:
        for number in range(1_000):
            few.tell(log.info, "a topic was created", topic=number)
            few.tell(log.info, "readings", count=3)
        few.tell(log.warning, "rare", topic="x")
        few.count("not worth a line", 7)
        assert [line["topic"] for line in said if "topic" in line] == [*range(logs.LINES_MAX), "x"]
        await until(lambda: len(said) > 2 * logs.LINES_MAX + 1)
        few.tell(log.info, "a topic was created", topic="in the next minute")
        few.finish()
    assert said[-2]["counts"] == {
        "a topic was created": 1_000 - logs.LINES_MAX,
        "readings": 3 * (1_000 - logs.LINES_MAX),
        "not worth a line": 7,
    }
    assert said[-1]["topic"] == "in the next minute"


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_form_of_a_line_holds_what_is_obeyed_and_json_says_the_same(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = [*root.handlers], root.level
    root.handlers.clear()
    try:
        logs.set_up(LogSettings(format="json" if form == "json" else "text"))
        structlog.get_logger().error("it failed", topic=WORST, reasons={WORST: [WORST]}, raw=WORST.encode())
        logging.getLogger("a.library").error("it failed: %s", WORST)
    finally:
        structlog.configure(**before)
        root.handlers[:] = handlers
        root.setLevel(level)
    ours, theirs = capsys.readouterr().err.splitlines()[:2]
    assert_harmless(f"{ours}\n")
    assert not any(is_obeyed(character) for character in theirs)
    if form == "json":
        told = json.loads(ours)
        assert (told["topic"], told["reasons"]) == (WORST, {WORST: [WORST]})


SAY = """
import structlog
from gateway.host import logs
from gateway.settings import LogSettings
logs.set_up(LogSettings())
log = structlog.get_logger()
log.info("all is well", port=1883)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it failed")
log.warning("look at this")
"""


@pytest.mark.parametrize("whose", ["its own", "another's", "none"])
def test_the_journal_gets_priorities_and_no_times_and_everybody_else_times(whose: str, tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w+") as stderr:
        stat = os.fstat(stderr.fileno())
        environment = {name: value for name, value in os.environ.items() if name != "JOURNAL_STREAM"}
        if whose != "none":
            environment["JOURNAL_STREAM"] = f"{stat.st_dev}:{stat.st_ino + (whose != 'its own')}"
        subprocess.run([sys.executable, "-c", SAY], stderr=stderr, env=environment, check=True, timeout=patience(30))
        stderr.seek(0)
        lines = stderr.read().splitlines()
    if whose == "its own":
        assert lines[0].startswith("<6>[info] all is well")
        assert "port=1883" in lines[0]
        assert lines[1].startswith("<3>[error] it failed")
        assert lines[-1].startswith("<4>[warning] look at this")
        assert len(lines) > 4
        assert all(line.startswith("<3>") for line in lines[1:-1]), "a stack trace is as grave as its line"
    else:
        assert lines[0].startswith("20")
        assert not any(line.startswith("<") for line in lines)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("[gateway]\nid = \n", "gateway.toml:2: is not TOML"),
        ('[gateway]\nid = "a"\n[buffer]\npath = "/nowhere/b.db"\n[kafka]\nbootstrap = ["k:1"]\n', "Error: buffer.path"),
    ],
)
def test_why_the_daemon_does_not_start_is_an_error_in_the_journal(settings: str, words: str, tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(settings)
    sluice = Path(sys.executable).with_name("sluice")
    with (tmp_path / "stderr").open("w+") as stderr:
        stat = os.fstat(stderr.fileno())
        environment = {**os.environ, "JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}
        ended = subprocess.run(
            [sluice, "run", "--config", config], stderr=stderr, env=environment, check=False, timeout=patience(30)
        )
        assert ended.returncode != 0
        stderr.seek(0)
        lines = stderr.read().splitlines()
    assert [line for line in lines if line.startswith("<3>") and words in line], lines
    assert not [line for line in lines if not line.startswith("<")]
