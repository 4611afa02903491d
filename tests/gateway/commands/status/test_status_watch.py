"""`sluice status --watch`: it goes on while the gateway stops and starts, and Ctrl-C ends it."""

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pexpect
import pytest
from msgspec import structs

from gateway.commands.status.device_table import DeviceRow
from gateway.commands.status.status_command import glance as glance_at
from gateway.commands.status.status_command import screen
from gateway.commands.status.watch import watch, with_rates
from gateway.commands.status.words import Glance
from gateway.settings import BufferSettings
from tests.gateway.commands.status.test_status_text import SETTINGS, glance
from tests.support.buffers import opened
from tests.support.gateways import SLUICE, answering, daemon, free_port, write_config
from tests.support.waiting import patience

pytestmark = pytest.mark.slow


def looks(*counts: tuple[float, int, int]) -> list[Glance]:
    """Return glances, one at each time, with the counts of then."""
    found = []
    before: deque[tuple[float, int, int, int]] = deque()
    for at_s, readings, sent in counts:
        seen = glance({"up": True, "sent": sent, "wire_bytes": 100 * sent})
        assert seen.answer is not None
        seen.answer["counts"] = {"readings": readings}
        now = type(seen.now)("boot", round(at_s * 1e6), seen.now.wall_us)
        found.append(with_rates(dataclasses.replace(seen, now=now), before))
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


@pytest.mark.parametrize(("devices", "last"), [(99, "sluice devices"), (0, "... sluice status says more")])
def test_a_screen_leaves_room_for_the_cursor_and_is_cut_at_its_end(
    devices: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(_: float) -> None:
        raise KeyboardInterrupt

    height = 30 if devices else 8
    monkeypatch.setattr("gateway.host.terminal_text.terminal_height", lambda *_: height)
    monkeypatch.setattr("gateway.commands.status.watch.terminal_height", lambda *_: height, raising=False)
    monkeypatch.setattr("time.sleep", ends)
    row = DeviceRow("attic", None, 1.0, 1, None, None, 0, None, None, is_silent=False, finding=False)
    seen = glance({"up": True}, devices=[row] * devices)
    watch(lambda: seen, lambda each: screen(each, beside=2), 2.0)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == height - 1
    assert shown[0].endswith("every 2 s; Ctrl-C ends")
    assert shown[-1].endswith(last)


async def test_of_a_gateway_that_hangs_the_trouble_is_told_soon(tmp_path: Path) -> None:
    async def hangs(_arguments: dict[str, Any]) -> object:
        await asyncio.Event().wait()
        return None

    path = tmp_path / "buffer.db"
    settings = structs.replace(SETTINGS, buffer=BufferSettings(path))
    async with opened(path), answering(path, {"state": hangs}):
        seen = await asyncio.to_thread(glance_at, settings, tmp_path / "gateway.toml", 0.1)
    assert "does not answer (timed out)" in seen.unheard


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, "127.0.0.1:1", free_port(), "watched")


def test_it_goes_on_while_the_gateway_stops_and_starts_and_ctrl_c_ends_it(config: Path) -> None:
    port = int(config.read_text().partition("port = ")[2].partition("\n")[0])
    child = pexpect.spawn(
        str(SLUICE),
        ["status", "--watch", "0.2", "--config", str(config)],
        encoding="utf-8",
        env={**os.environ, "TERM": "xterm"},
        timeout=patience(20),
    )
    try:
        child.expect_exact("every 0.2 s; Ctrl-C ends")
        child.expect_exact("there is no buffer at")
        with daemon(config, port):
            child.expect_exact("gw1, running")
            child.expect_exact("Kafka has not been reached")
        child.expect_exact("gw1, not running")
        child.sendintr()
        child.expect(pexpect.EOF)
        child.wait()
    finally:
        child.close(force=True)
    assert child.exitstatus == 0


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_where_there_is_no_terminal_it_says_what_to_do(config: Path, more: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "gateway.cli", "status", "--watch", "--config", str(config), *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patience(20), check=False)
    assert ended.returncode == 2
    assert "sluice status --json" in " ".join(ended.stderr.split())
    assert "\x1b" not in ended.stdout + ended.stderr
