"""The `sluice` command, and that README and `--help` tell of every command there is."""

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gateway.cli import main
from spark.cli import main as cloud
from tests.buffers import entry, opened, store

README = Path(__file__).parent.parent / "README.md"
CONFIG = """\
[gateway]
id = "gw1"
[buffer]
path = "{path}"
[kafka]
bootstrap = ["127.0.0.1:1"]
"""


def write(directory: Path) -> Path:
    config = directory / "gateway.toml"
    config.write_text(CONFIG.format(path=directory / "buffer.db"))
    return config


async def fill(path: Path) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"a", sequence=0), entry(b"b", sequence=1), entry(b"c", "43")])


async def test_status_of_a_stopped_gateway(tmp_path: Path) -> None:
    config = write(tmp_path)
    await fill(tmp_path / "buffer.db")
    shown = CliRunner().invoke(main, ["status", "--config", str(config)])
    assert shown.exit_code == 0
    assert "gw1, not running" in shown.output
    assert "3 rows safe on disk" in shown.output
    as_json = json.loads(CliRunner().invoke(main, ["status", "--config", str(config), "--json"]).output)
    assert (as_json["rows"], as_json["running"]) == (3, False)
    assert [device["device"] for device in as_json["devices"]] == ["42"]


def test_status_before_the_first_start_says_so(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["status", "--config", str(write(tmp_path))])
    assert shown.exit_code == 1
    assert "sluice run makes it" in shown.output


@pytest.mark.parametrize("command", ["run", "check", "status"])
def test_wrong_usage_is_exit_code_2(command: str, tmp_path: Path) -> None:
    missing = CliRunner().invoke(main, [command, "--config", str(tmp_path / "none.toml")])
    assert missing.exit_code == 2
    assert "cannot be read: No such file" in missing.output
    assert CliRunner().invoke(main, [command, "--nonsense"]).exit_code == 2


@pytest.mark.parametrize(("name", "group"), [("sluice", main), ("sluice-cloud", cloud)])
def test_every_command_is_in_the_readme_with_a_help_text(name: str, group: click.Group) -> None:
    told = set(re.findall(rf"`?{name} ([a-z]+)", README.read_text()))
    assert set(group.commands) <= told
    assert told <= set(group.commands), "the README tells of a command that is not there"
    for command in group.commands.values():
        assert command.help
        assert all(parameter.help for parameter in command.params if isinstance(parameter, click.Option))
