"""`sluice status --watch`: what is drawn fits the screen, and the terminal is as it was, however it ends."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.status.device_table import DeviceRow
from gateway.commands.status.watch import DEVICES_MIN, _with_rates, drawing
from gateway.commands.status.words import Glance
from tests.gateway.commands.status.test_status_text import DOWN, glance
from tests.support.gateways import SLUICE, daemon, free_port, write_config
from tests.support.waiting import patience

pytestmark = pytest.mark.slow

ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"


def row(number: int) -> DeviceRow:
    name = f"m{number:03}"
    return DeviceRow(name, f"device/{name}/thermo", 1.0, 60, 1.0, 0, 0, None, None, False, False)


def with_devices(count: int, **changes: object) -> Glance:
    return dataclasses.replace(glance(changes or {"up": True}), devices=[row(number) for number in range(count)])


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 40), st.booleans())
def test_whatever_the_size_of_the_terminal_it_fits(columns: int, rows: int, devices: int, is_down: bool) -> None:  # noqa: FBT001
    seen = with_devices(devices, **(DOWN if is_down else {}))
    lines = drawing(seen, "", 0.0, 2.0, columns, rows)
    assert len(lines) <= rows
    assert all(len(line) <= columns and line.isprintable() for line in lines)


@pytest.mark.parametrize("rows", [24, 40])
def test_devices_take_what_is_left_of_the_screen(rows: int) -> None:
    lines = drawing(with_devices(60), "", 0.0, 2.0, 80, rows)
    assert len(lines) == rows
    assert lines[0].startswith("gateway     gw1, running  ")
    assert lines[0].endswith("every 2 s; q ends")
    assert lines[-1].startswith("and ")
    assert lines[-1].endswith(" more: sluice devices")


def test_long_words_leave_some_lines_to_the_devices() -> None:
    lines = drawing(with_devices(60, **DOWN), "", 0.0, 2.0, 40, 14)
    table = next(number for number, line in enumerate(lines) if line.startswith("DEVICE"))
    assert lines[table - 1] == "... sluice status says more"
    assert len(lines) - table == DEVICES_MIN


def test_what_cannot_be_looked_at_is_told_in_its_place() -> None:
    told = drawing(None, "there is no buffer at /x yet: sluice run makes it when it first starts", 0.0, 2.0, 40, 24)
    assert " ".join(told[2:]) == "there is no buffer at /x yet: sluice run makes it when it first starts"
    assert drawing(None, "", 0.0, 2.0, 80, 24)[2] == "looking ..."
    assert "no answer for 7 s" in drawing(with_devices(1), "", 7.0, 2.0, 80, 24)[0]


def looks(*counts: tuple[float, int, int]) -> list[Glance]:
    """One at each time, with what had come in and gone out by then."""
    found = []
    before: deque[tuple[float, int, int, int]] = deque()
    for at_s, readings, sent in counts:
        seen = glance({"up": True, "sent": sent, "wire_bytes": 100 * sent})
        assert seen.answer is not None
        seen.answer["counts"] = {"readings": readings}
        now = type(seen.now)("boot", round(at_s * 1e6), seen.now.wall_us)
        found.append(_with_rates(dataclasses.replace(seen, now=now), before))
    return found


def test_rates_are_of_the_last_ten_seconds() -> None:
    found = looks(*((at_s, 10 * at_s + (1_000 if at_s > 20 else 0), 5 * at_s) for at_s in range(40)))
    assert {seen.rates for seen in found[:5]} == {None}, "too little was seen"
    second, last = found[5], found[-1]
    assert second.rates is not None
    assert (second.rates.readings, second.rates.sent, second.rates.wire_bytes) == (10.0, 5.0, 500.0)
    assert last.rates is not None
    assert last.rates.readings == 10.0, "what came in a burst before is over"


def test_a_gateway_that_was_started_anew_has_no_rate_at_first() -> None:
    *_, before, after, then = looks((0, 100, 100), (6, 110, 100), (7, 3, 0), (12, 28, 10))
    assert before.rates is not None
    assert after.rates is None
    assert then.rates is not None
    assert (then.rates.readings, then.rates.sent) == (5.0, 2.0)


# -- in a terminal --------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, "127.0.0.1:1", free_port(), "watched")


@contextlib.contextmanager
def watching(config: Path, rows: int = 24, columns: int = 80) -> Iterator["pexpect.spawn[str]"]:
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    command = ["status", "--watch", "0.2", "--config", str(config)]
    child = pexpect.spawn(
        str(SLUICE), command, encoding="utf-8", dimensions=(rows, columns), env=environment, timeout=patience(20)
    )
    try:
        yield child
    finally:
        child.close(force=True)


def test_it_goes_on_while_the_gateway_stops_and_starts_and_q_ends_it(config: Path) -> None:
    with watching(config) as child:
        child.expect_exact(ENTERED)
        child.expect_exact("there is no buffer at")
        with daemon(config, _port(config)):
            child.expect_exact("gw1, running")
            child.expect_exact("UNREACHABLE")
        child.expect_exact("gw1, not running")
        with daemon(config, _port(config)):
            child.expect_exact("gw1, running")
            child.send("x")
            child.send("q")
            child.expect_exact(LEFT)
            child.expect(pexpect.EOF)
    assert child.exitstatus == 0


def _port(config: Path) -> int:
    return int(config.read_text().partition("port = ")[2].partition("\n")[0])


def test_it_is_drawn_anew_when_the_terminal_changes_its_size(config: Path) -> None:
    with watching(config) as child, daemon(config, _port(config)):
        child.expect_exact("gw1, running")
        child.setwinsize(10, 44)
        # The head has no room beside the name any more.
        child.expect(r"gateway     gw1, running  \d\d:\d\d:\d\d, ev[^\n]*…")
        child.send("q")
        child.expect(pexpect.EOF)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, "\x03", "\x04"])
def test_the_terminal_is_as_it_was_however_it_ends(config: Path, ending: signal.Signals | str) -> None:
    with watching(config) as child:
        former = termios.tcgetattr(child.child_fd)
        child.expect_exact("looking")
        during = termios.tcgetattr(child.child_fd)
        assert not during[3] & termios.ICANON
        if isinstance(ending, str):
            child.send(ending)
        else:
            child.kill(ending)
        child.expect_exact(LEFT)
        with contextlib.suppress(termios.error):
            # As long as its other end is open.
            patience = 100
            while termios.tcgetattr(child.child_fd)[3] != former[3]:
                patience -= 1
                assert patience
                time.sleep(0.05)
        child.expect(pexpect.EOF)
        child.wait()
    assert child.signalstatus == (ending if ending in {signal.SIGTERM, signal.SIGHUP} else None)


def test_a_mistake_of_ours_ends_it_and_is_told_where_it_can_be_read() -> None:
    """Such as an answer of a daemon of another version, that nothing here understands."""
    code = "from gateway.commands.status.watch import watch; watch(lambda: 1 // 0, 0.2)"
    child = pexpect.spawn(sys.executable, ["-c", code], encoding="utf-8", env={**os.environ, "TERM": "xterm"})
    try:
        child.expect_exact(ENTERED)
        child.expect_exact(LEFT, timeout=10)
        child.expect_exact("ZeroDivisionError")
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    assert child.exitstatus == 1


def test_ctrl_z_gives_the_terminal_back_and_it_goes_on(config: Path) -> None:
    # Only what a shell has begun can be stopped so.
    child = pexpect.spawn(
        "bash", ["--norc", "-i"], encoding="utf-8", env={**os.environ, "TERM": "xterm"}, timeout=patience(20)
    )
    try:
        child.sendline(f"{SLUICE} status --watch 0.2 --config {config}")
        child.expect_exact("looking")
        child.send("\x1a")
        child.expect_exact(LEFT)
        child.expect_exact("Stopped")
        child.sendline("fg")
        child.expect_exact(ENTERED)
        child.expect_exact("there is no buffer")
        child.send("q")
        child.expect_exact(LEFT)
        child.sendline("echo ended $?")
        child.expect_exact("ended 0")
    finally:
        child.close(force=True)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_where_there_is_no_terminal_it_says_what_to_do(config: Path, more: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "gateway.cli", "status", "--watch", "--config", str(config), *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patience(20), check=False)
    assert ended.returncode == 2
    assert "sluice status --json" in " ".join(ended.stderr.split())
    assert "\x1b" not in ended.stdout + ended.stderr
