"""`sluice status` as a command: one screen, the same for programs."""

import asyncio
import json
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.clock.kernel_clock import boottime_us
from gateway.daemon import control
from gateway.devices import listing
from tests.gateway.devices.test_device_listing import gateway, take, told, write
from tests.support.buffers import reading_of
from tests.support.waiting import until


async def status(folder: Path, *options: str, columns: int = 80) -> str:
    """In a thread, for this one answers as the daemon."""
    runner = CliRunner(env={"COLUMNS": str(columns)})
    command = ["status", "--config", str(write(folder)), *options]
    shown = await asyncio.to_thread(runner.invoke, main, command)
    assert shown.exit_code == 0, shown.output
    return shown.stdout


async def test_devices_in_trouble_come_first_and_all_of_them_are_in_the_json(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        now_us = boottime_us()
        for name, sequences in (("barn", (0, 1, 2)), ("shed", (0, 1, 5))):
            topic = f"device/{name}/thermo"
            await take(door, *(told(now_us, topic, boot="7-1", seq=number) for number in sequences))
        shown = await status(tmp_path)
        found = json.loads(await status(tmp_path, "--json"))
    lines = shown.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith("DEVICE"))
    assert lines[table - 1].startswith("devices     2 devices; 1 to be looked at (first in the table)")
    assert [line.split()[0] for line in lines[table + 1 :]] == ["shed", "barn"]
    assert "MISSING" in lines[table]
    assert [(row["device"], row["readings"], row["missing"]) for row in found["heard"]] == [
        ("shed", 3, 3),
        ("barn", 3, 0),
    ]
    assert found["daemon"]["counts"]["readings"] == 6
    assert "readings    since the start 6 came in" in shown


async def test_devices_that_the_daemon_does_not_tell_are_not_said_to_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(tmp_path):
        monkeypatch.setattr(listing, "_ask_daemon", unanswered)
        found = json.loads(await status(tmp_path, "--json"))
    assert (found["heard"], found["unheard"]) == (None, "no answer")


def unanswered(_: object, *__: object) -> NoReturn:
    raise control.ControlError("no answer")


async def test_what_was_lost_is_told_after_it_was_reported(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        door.lost("barn", "refused-qos0", 5)
        # A loss is counted in the next commit, and reported by the housekeeping.
        await take(door, reading_of("device/barn/thermo", b"{}", boottime_us()))
        await until(lambda: True)
        before = json.loads(await status(tmp_path, "--json"))
        await door.events.report_losses()
        after = json.loads(await status(tmp_path, "--json"))
        shown = await status(tmp_path, columns=200)
    assert before["losses_by_device"] == {"barn": 5}
    assert after["losses_by_device"] == {}
    for found in (before, after):
        (lost,) = (each for each in found["conditions"] if each["code"] == "readings-lost")
        assert lost["words"].startswith("5 readings are lost for good")
        assert [(row["device"], row["lost"]) for row in found["heard"]] == [("barn", 5)]
    assert "lost        5 readings since the start, reported on gateway-events\n" in shown
