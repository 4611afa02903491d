"""The `sluice` command with a gateway that runs, one that does not, and one that is in trouble."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from gateway import pipeline
from gateway.buffer import schema
from gateway.buffer.salvage import aside as buffer_aside
from gateway.buffer.status import read_status
from gateway.cli import main
from gateway.commands.buffer_commands import read_backlog_rows
from gateway.commands.options import WrappingGroup, load_settings
from gateway.settings import NO_SOURCE
from tests.support.buffers import entry, opened, store
from tests.support.deadline import deadline
from tests.support.gateways import answering
from tests.support.waiting import patience

CONFIG = """\
[gateway]
id = "gw1"
[buffer]
path = "{path}"
[kafka]
bootstrap = ["127.0.0.1:1"]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    config = tmp_path / "gateway.toml"
    config.write_text(CONFIG.format(path=tmp_path / "buffer.db"))
    return config


async def fill(path: Path) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"a", sequence=0), entry(b"b", sequence=1), entry(b"c", "43")])


async def test_status_of_a_stopped_gateway(tmp_path: Path, config: Path) -> None:
    await fill(tmp_path / "buffer.db")
    shown = CliRunner().invoke(main, ["status", "--config", str(config)])
    assert shown.exit_code == 0
    assert "gw1, not running" in shown.output
    assert "3 rows safe on disk" in shown.output
    as_json = json.loads(CliRunner().invoke(main, ["status", "--config", str(config), "--json"]).output)
    assert (as_json["rows"], as_json["running"]) == (3, False)
    assert [device["device"] for device in as_json["devices"]] == ["42"]


@asynccontextmanager
async def daemon(path: Path, state: object) -> AsyncIterator[None]:
    """A daemon, for `sluice status`, that answers with this state."""

    async def answer(_arguments: dict[str, Any]) -> object:
        return state

    async with opened(path), answering(path, {"state": answer}):
        yield


async def status(config: Path, *options: str) -> str:
    """Output of `sluice status`, without line breaks. It runs in a thread, as this thread is the daemon."""
    wide = CliRunner(env={"COLUMNS": "1000"})
    shown = await asyncio.to_thread(wide.invoke, main, ["status", "--config", str(config), *options])
    assert shown.exit_code == 0, shown.output
    return shown.output


async def test_status_tells_losses_and_files_set_aside(tmp_path: Path, config: Path) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    unfinished = buffer_aside.begin(path)
    buffer_aside.finish(unfinished)
    aside = buffer_aside.final_name(unfinished)
    await fill(path)
    connection = schema.connect(path)
    connection.execute("INSERT INTO loss VALUES ('42', 'buffer-full', 'b', '', 1200, 0, 0, NULL, NULL)")
    connection.execute("INSERT INTO loss VALUES ('43', 'ring', 'b', '', 0, 0, 0, NULL, NULL)")
    connection.close()
    shown = await status(config)
    assert "lost        1,200 not reported to Kafka yet: 1,200 buffer-full, unknown ring\n" in shown
    assert f"could not be used, and was set aside ({aside})" in shown
    told = json.loads(await status(config, "--json"))
    assert (told["losses"], told["set_aside"], told["daemon"]) == (
        {"buffer-full": 1200, "ring": 0},
        [aside],
        None,
    )


def test_settings_that_may_not_be_read_are_told_with_what_to_do(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def refused(*_arguments: object, **_options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "access", lambda *_arguments, **_options: False)
    monkeypatch.setattr(Path, "open", refused)
    shown = CliRunner(env={"COLUMNS": "1000"}).invoke(main, ["status", "--config", str(config)])
    assert shown.exit_code == 2
    words = "this user may not read it; run this with sudo, or as the user that sluice runs as"
    assert f"{config}: {words}" in shown.output


async def test_commands_are_told_as_they_are_typed_where_the_settings_are_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    wide = CliRunner(env={"COLUMNS": "1000"})
    listener = tmp_path / "listener.toml"
    listener.write_text(config.read_text() + "[mqtt_listener]\n")
    state = {"uplink": {"up": False, "error": "no way"}}
    await fill(tmp_path / "buffer.db")
    async with daemon(tmp_path / "buffer.db", state):
        own = await asyncio.to_thread(wide.invoke, main, ["status", "--config", str(config)])
        monkeypatch.setattr("gateway.commands.options.DEFAULT_CONFIG", config)
        services = await asyncio.to_thread(wide.invoke, main, ["status", "--config", str(config)])
    assert "[kafka]: sluice check goes through the way" in own.output
    assert "[kafka]: sudo sluice check goes through the way" in services.output
    monkeypatch.setattr("gateway.commands.options.DEFAULT_CONFIG", listener)
    refused = wide.invoke(main, ["devices", "rotate", "42", "--config", str(listener)])
    words = "was made by sudo sluice devices add; sudo sluice devices list shows"
    assert words in refused.stderr
    for columns in range(40, 90):
        narrow = CliRunner(env={"COLUMNS": str(columns)})
        refused = narrow.invoke(main, ["devices", "rotate", "42", "--config", str(listener)])
        assert words in " ".join(refused.stderr.split())
    refused = wide.invoke(main, ["devices", "list", "--config", str(listener)])
    assert "make a secret for each device: sudo sluice devices add NAME" in refused.stdout


async def test_status_fits_the_terminal(tmp_path: Path, config: Path) -> None:
    full = {"buffer": {"full": True, "failing": None}, "uplink": {"up": False, "error": "too long a story " * 20}}
    async with daemon(tmp_path / "buffer.db", full):
        narrow = CliRunner(env={"COLUMNS": "60"})
        shown = await asyncio.to_thread(narrow.invoke, main, ["status", "--config", str(config)])
    assert max(map(len, shown.output.splitlines())) <= 60
    assert "Kafka has not been reached: too long a story" in " ".join(shown.output.split())
    assert " ".join(shown.output.split()).count("too long a story") == 20


async def test_status_asks_the_running_daemon_how_it_is(tmp_path: Path, config: Path) -> None:
    full = {"buffer": {"full": True, "failing": None}, "uplink": {"up": False, "error": "no route to \x1b[2Jhost"}}
    async with daemon(tmp_path / "buffer.db", full):
        shown = await status(config)
        told = json.loads(await status(config, "--json"))
    assert "gw1, running" in shown
    assert "FAIL: The buffer is full (" in shown
    assert r"FAIL: Kafka has not been reached: no route to \x1b[2Jhost. Nothing waits yet; there is no room" in shown
    assert [each["code"] for each in told["conditions"]] == ["buffer-full", "kafka-unreached", "no-source"]
    assert told["daemon"] == full
    failing = {"buffer": {"full": False, "failing": "disk I/O error"}, "uplink": {"up": True, "error": None}}
    async with daemon(tmp_path / "buffer.db", failing):
        shown = await status(config)
    assert "FAIL: The disk fails: disk I/O error. No reading is acknowledged until it works again" in shown
    assert "uplink      up\n" in shown


async def test_status_of_a_daemon_that_cannot_be_asked_falls_back_to_the_file(tmp_path: Path, config: Path) -> None:
    async with opened(tmp_path / "buffer.db"):
        shown = await status(config)
    assert "gw1, running\n            its state is not known: no gateway listens at" in shown
    assert "empty: nothing waits for Kafka" in shown


async def test_status_does_not_vouch_for_a_date_that_nothing_vouches_for(tmp_path: Path, config: Path) -> None:
    await fill(tmp_path / "buffer.db")
    connection = schema.connect(tmp_path / "buffer.db")
    connection.execute("UPDATE boot SET error_us = NULL, offset_us = 946684800000000, clock = NULL")
    connection.close()
    connection = schema.connect(tmp_path / "buffer.db")
    connection.execute("UPDATE reading SET received_us = 26549000000")
    connection.close()
    when = "boot + 7:22:29 (this box's clock was not synced)"
    assert f"rows safe on disk, the oldest of {when}\n" in await status(config)
    listed = CliRunner(env={"COLUMNS": "1000"}).invoke(main, ["buffer", "ls", "--config", str(config)]).output
    assert f"rows, the oldest of {when}\n" in listed
    assert "  boot + 7:22:29  " in listed


async def test_status_knows_the_devices_whose_windows_are_not_written_yet(tmp_path: Path, config: Path) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    async with opened(path) as buffer:
        # The first commit writes windows, those after it do so ten seconds later.
        assert await store(buffer, [entry(b"first", "42", sequence=3)])
        assert await store(buffer, [entry(b"new", "44", sequence=0, received_us=9_000_000)])
        assert await store(buffer, [entry(b"again", sequence=2, received_us=9_000_000)])
        assert await store(buffer, [entry(b"none", "45", received_us=9_000_000)])
        connection = schema.connect(path)
        written = connection.execute("SELECT device, window FROM device_run").fetchall()
        connection.close()
        shown = await status(config)
    assert [device for device, _ in written] == ["42"], "written lazily, or this test shows nothing"
    assert "devices     2 that send a sequence of their own\n" in shown
    for device in ("42", "44"):
        assert f"            {device}, last stored 2023-11-14 22:13:29 UTC" in shown


async def test_devices_behind_the_windows_are_looked_for_in_a_bounded_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    async with opened(path) as buffer:
        assert await store(buffer, [entry(sequence=9)])
        assert await store(buffer, [entry(device=name, sequence=0) for name in ("oldest", "newer", "newest")])
        monkeypatch.setattr("gateway.buffer.status.UNSAVED_ROWS_MAX", 2)
        assert [device.device for device in read_status(path).devices] == ["42", "newer", "newest"]


async def test_a_device_whose_lane_is_gone_is_told_with_a_doubt(tmp_path: Path, config: Path) -> None:
    await fill(tmp_path / "buffer.db")
    connection = schema.connect(tmp_path / "buffer.db")
    connection.execute("DELETE FROM reading")
    connection.execute("DELETE FROM lane")
    connection.execute("UPDATE device_run SET seen_us = 946684800000000")
    connection.close()
    shown = await status(config)
    assert "42, last stored 2000-01-01 00:00:00 UTC, by a clock that may be wrong\n" in shown


@pytest.mark.parametrize(
    ("waits", "synced", "words"),
    [
        (True, False, "Readings wait on this box for it, for 10 min at most (gateway.hold_unsynced_s)."),
        (False, False, "Readings go with times that may be wrong, and are corrected once it is."),
        (False, True, None),
        (False, None, None),
    ],
)
async def test_status_says_what_becomes_of_readings_until_the_clock_is_synced(
    tmp_path: Path, config: Path, *, waits: bool, synced: bool | None, words: str | None
) -> None:
    state: dict[str, Any] = {"buffer": {}, "uplink": {"up": True, "error": None, "waits_for_clock": waits}}
    # One of another version says nothing of its clock.
    state |= {} if synced is None else {"clock": {"synced": synced, "error_us": None, "since_us": 0}}
    async with daemon(tmp_path / "buffer.db", state):
        shown = await status(config)
    assert "uplink      up\n" in shown
    assert shown.count("Readings ") == (words is not None)
    assert words is None or words in shown


async def test_status_counts_readings_without_the_identity_that_their_route_promises(
    tmp_path: Path, config: Path
) -> None:
    async with daemon(tmp_path / "buffer.db", {"buffer": {}, "counts": {"readings": 5000, "identity-missing": 1200}}):
        assert "note: 1,200 readings since the start came without the boot and seq" in await status(config)
    async with daemon(tmp_path / "buffer.db", {"buffer": {}, "counts": {"readings": 5000}}):
        assert "identity" not in await status(config)


async def test_status_of_a_stopped_gateway_with_a_full_buffer_says_so(tmp_path: Path, config: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [entry(bytes(500_000)), entry(bytes(500_000))])
    config.write_text(config.read_text().replace("[kafka]", "bytes_max = 1_000_000\n[kafka]"))
    assert "FAIL: The buffer is full" in await status(config)


async def test_a_gateway_that_nothing_can_reach_says_so_at_its_start_and_in_status(config: Path) -> None:
    with capture_logs() as lines:
        gateway = asyncio.create_task(pipeline.run(load_settings(config)))
        async with asyncio.timeout(patience(20)):
            while not any(line["event"] == NO_SOURCE for line in lines):
                await asyncio.sleep(0.01)
                assert not gateway.done()
        gateway.cancel()
        await asyncio.gather(gateway, return_exceptions=True)
    (line,) = [line for line in lines if line["event"] == NO_SOURCE]
    assert line["log_level"] == "warning"
    shown = CliRunner().invoke(main, ["status", "--config", str(config)], env={"COLUMNS": "1000"})
    assert f"sources     FAIL: {NO_SOURCE[0].upper()}{NO_SOURCE[1:]}.\n" in shown.output


def test_status_before_the_first_start_says_so(config: Path) -> None:
    shown = CliRunner().invoke(main, ["status", "--config", str(config)])
    assert shown.exit_code == 1
    assert "sluice run makes it" in shown.output


@pytest.mark.parametrize("command", ["status", "buffer ls"])
def test_a_named_pipe_is_no_buffer(command: str, tmp_path: Path, config: Path) -> None:
    os.mkfifo(tmp_path / "buffer.db")
    # A process of its own: SQLite opens a pipe again and again, whatever signal comes.
    arguments = [sys.executable, "-m", "gateway.cli", *command.split(), "--config", str(config)]
    shown = subprocess.run(arguments, capture_output=True, text=True, timeout=patience(30), check=False)
    assert shown.returncode == 1
    assert "buffer.db is no file" in " ".join(shown.stderr.split())


def test_a_named_pipe_is_no_lock(tmp_path: Path, config: Path) -> None:
    asyncio.run(fill(tmp_path / "buffer.db"))
    (tmp_path / "buffer.db.lock").unlink()
    os.mkfifo(tmp_path / "buffer.db.lock")
    with deadline():
        shown = CliRunner().invoke(main, ["status", "--config", str(config)])
    assert "gw1, not running" in shown.output


@pytest.mark.parametrize("command", ["run", "check", "status"])
def test_wrong_usage_is_exit_code_2(command: str, tmp_path: Path) -> None:
    missing = CliRunner().invoke(main, [command, "--config", str(tmp_path / "none.toml")])
    assert missing.exit_code == 2
    assert "there is no such file" in missing.output
    assert CliRunner().invoke(main, [command, "--nonsense"]).exit_code == 2


async def test_status_tells_how_the_sources_do(tmp_path: Path, config: Path) -> None:
    await fill(tmp_path / "buffer.db")
    told = {
        "buffer": {"full": False, "failing": None},
        "mqtt_brokers": {"broker.example:1883": {"connected": False, "refused": ["a/#"], "readings": 3}},
        "mqtt_listener": {"connected": 5, "bad-credentials": 2},
    }
    async with daemon(tmp_path / "buffer.db", told):
        shown = await status(config)
    assert "broker      broker.example:1883: not connected\n" in shown
    assert "FAIL: The site's MQTT broker broker.example:1883 is not connected." in shown
    assert "FAIL: The site's MQTT broker broker.example:1883 refuses a/#.\n" in shown
    assert "listener    refused or ended since the start: 2 bad-credentials\n" in shown


async def test_status_tells_of_serial_ports(tmp_path: Path, config: Path) -> None:
    told = {
        "buffer": {"full": False, "failing": None},
        "serial": {
            "ports": {"/dev/ttyUSB0": {"device": "attic"}, "/dev/ttyUSB1": {"device": None}},
            "unopened": {"/dev/ttyS0": "Permission denied: put the user into \x1b[2Jthe group"},
            "missing": ["/dev/ttyACM*"],
        },
    }
    async with daemon(tmp_path / "buffer.db", told):
        shown = await status(config)
    assert "serial      /dev/ttyUSB0: sensor attic\n" in shown
    assert "            /dev/ttyUSB1: no sensor has said its name yet\n" in shown
    assert r"FAIL: /dev/ttyS0 cannot be opened: Permission denied: put the user into \x1b[2Jthe group." in shown
    assert "warn: /dev/ttyACM* is not there. Plug it in, or mend the settings under [serial]" in shown


async def test_status_of_an_outage_says_how_long_the_room_lasts(tmp_path: Path, config: Path) -> None:
    error = "the name kafka.example does not resolve: DNS knows no such name"
    uplink = {"up": False, "error": error, "since": time.time()}
    # An hour with 36 MB of payload: of a buffer of 1 GB, as of its disk, a bit more than a day is left at most.
    usage = [3_600.0, 360_000, 36_000_000, 0]
    await fill(tmp_path / "buffer.db")
    async with daemon(tmp_path / "buffer.db", {"buffer": {}, "usage": usage, "uplink": uplink}):
        shown = await status(config)
    assert re.search(
        rf"uplink      down since \d\d:\d\d.*\n +warn: Kafka has not been reached.*: {re.escape(error)}. 3 readings "
        r"and events are safe on this box; its room lasts \d+ h( \d+ min)? more",
        shown,
    )
    assert "at the rate of the last 1 h that sluice ran; when it is full, sensors are asked to keep" in shown


async def test_status_counts_what_waits_in_the_lanes_behind(tmp_path: Path, config: Path) -> None:
    await fill(tmp_path / "buffer.db")
    # The next start opens a lane. Rows from before are backlog.
    async with daemon(tmp_path / "buffer.db", {"buffer": {}, "uplink": {"up": True}}):
        shown = await status(config)
    assert "3 readings and events from earlier are still to go, sent beside new ones (kafka.drain)\n" in shown
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [entry(b"new")])
        settings = load_settings(config)
        assert (read_backlog_rows(settings), buffer.state.rows) == (3, 4)


async def test_status_of_a_buffer_with_nothing_in_it(tmp_path: Path, config: Path) -> None:
    async with opened(tmp_path / "buffer.db"):
        pass
    shown = await status(config)
    assert "buffer      empty: nothing waits for Kafka\n" in shown
    assert "quarantine  empty\ndevices     none yet that send a sequence of their own\n" in shown


@pytest.mark.parametrize("command", ["status", "buffer ls", "buffer verify"])
def test_an_error_fits_the_terminal_and_stays_whole_in_a_pipe(command: str, config: Path, tmp_path: Path) -> None:
    arguments = [*command.split(), "--config", str(config)]
    narrow = CliRunner(env={"COLUMNS": "60"}).invoke(main, arguments)
    assert narrow.exit_code == 1
    lines = narrow.stderr.splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 60 or " " not in line.strip() for line in lines)
    piped = CliRunner(env={"COLUMNS": None}).invoke(main, arguments)
    assert piped.stderr.splitlines() == [
        f"Error: there is no buffer at {tmp_path}/buffer.db yet: sluice run makes it when it first starts"
    ]


def test_help_without_a_command_is_help(config: Path) -> None:
    assert CliRunner().invoke(main, []).output == CliRunner().invoke(main, ["--help"]).output
    unknown = CliRunner(env={"COLUMNS": "40"}).invoke(main, ["chekc", "--config", str(config)])
    assert unknown.exit_code == 2
    assert "Try 'sluice --help' for help." in unknown.stderr.replace("main", "sluice")
    assert "Did you mean 'check'?" in " ".join(unknown.stderr.split())


class LockedError(click.ClickException):
    """An error of a kind of its own."""

    exit_code = 7

    def format_message(self) -> str:
        return f"locked: {self.message}"


@click.group(cls=WrappingGroup)
def outer() -> None:
    """Commands within commands."""


@outer.group(cls=WrappingGroup)
def inner() -> None:
    """Commands of commands."""


@inner.command()
@click.option("--number", type=int)
def fail(number: int | None) -> None:
    """Fail as a command of its own kind."""
    raise LockedError(f"the first line is rather long {number}\nthe second")


@pytest.mark.parametrize("group", [outer, inner])
def test_an_error_keeps_its_exit_code_and_its_lines(group: click.Group) -> None:
    arguments = ["inner", "fail"] if group is outer else ["fail"]
    piped = CliRunner(env={"COLUMNS": None}).invoke(group, arguments)
    assert (piped.exit_code, piped.stderr) == (7, "Error: locked: the first line is rather long None\nthe second\n")
    narrow = CliRunner(env={"COLUMNS": "30"}).invoke(group, arguments)
    assert narrow.stderr == "Error: locked: the first line\n       is rather long None\nthe second\n"
    with pytest.raises(LockedError):
        group.main(arguments, standalone_mode=False)
    wrong = CliRunner(env={"COLUMNS": None}).invoke(group, [*arguments, "--number", "x"])
    assert wrong.exit_code == 2
    assert wrong.stderr.endswith("Error: Invalid value for '--number': 'x' is not a valid integer.\n")
    with pytest.raises(click.BadParameter):
        group.main([*arguments, "--number", "x"], standalone_mode=False)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("restart", "sudo systemctl restart sluice"),
        ("logs", "journalctl -u sluice"),
        ("version", "sluice --version"),
    ],
)
def test_words_of_other_programs_lead_to_the_right_command_and_never_to_reset(word: str, told: str) -> None:
    ended = CliRunner().invoke(main, [word])
    assert ended.exit_code == 2
    assert told in ended.output
    assert "Did you mean" not in ended.output
    assert "reset" not in CliRunner().invoke(main, ["resett"]).output.replace("resett", "")
