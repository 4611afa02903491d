"""What the service's user may have put in the buffer's place: the commands of root show and change no other file."""

import asyncio
import os
import pwd
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from gateway.cli import main
from gateway.config import config_file
from gateway.host import service_user
from gateway.settings import Settings
from tests.support.buffers import entry, input_of, opened, store

NOBODY = pwd.getpwnam("nobody")
PAYLOAD = "root's own"
COMMANDS = [
    "buffer ls",
    "buffer peek",
    "buffer export",
    "buffer export --quarantine",
    "buffer verify",
    "buffer quarantine ls",
    "buffer quarantine retry --all",
    "buffer quarantine drop --all --yes",
    "status",
    "devices",
    "devices list",
]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody else")


@dataclass(frozen=True, slots=True)
class Site:
    """A gateway in a folder of nobody's, beside a buffer of root's that it must not see."""

    config: Path
    data: Path
    victim: Path

    async def run(self, command: str) -> Result:
        before = {path.name: path.read_bytes() for path in self.victim.parent.iterdir()}
        done = await run(self.config, command)
        assert {path.name: path.read_bytes() for path in self.victim.parent.iterdir()} == before
        assert os.geteuid() == 0
        return done


async def run(config: Path, command: str) -> Result:
    """What it says; in a thread, for some commands have an event loop of their own."""
    return await asyncio.to_thread(CliRunner().invoke, main, [*command.split(), "--config", str(config)])


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run all once: Python itself may stand where nobody else may read."""
    folder = tmp_path_factory.mktemp("imported")
    asyncio.run(fill(folder / "buffer.db"))
    config = written(folder / "gateway.toml", folder)
    for command in COMMANDS:
        CliRunner().invoke(main, [*command.split(), "--config", str(config)])


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    # Everybody may look into these parents, unlike those of pytest's own folders.
    folder = Path("/var/tmp") / f"sluice-commands-{os.getpid()}"  # noqa: S108
    data, victim = folder / "data", folder / "root" / "buffer.db"
    for each, mode in ((folder, 0o755), (data, 0o755), (victim.parent, 0o700)):
        each.mkdir(mode=mode)
    give(data)
    await fill(victim)
    monkeypatch.setattr(service_user, "_may_read_program", lambda: True)
    yield Site(written(folder / "gateway.toml", data), data, victim)
    shutil.rmtree(folder)


def written(config: Path, data: Path) -> Path:
    kafka = '[kafka]\nbootstrap = ["127.0.0.1:1"]\n'
    config.write_text(f'[gateway]\nid = "gw1"\n[buffer]\npath = "{data}/buffer.db"\n{kafka}[mqtt_listener]\n')
    return config


async def fill(path: Path) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(PAYLOAD.encode())])
        aside = input_of("no-route", PAYLOAD.encode(), "42", "shed")
        assert await store(buffer, [replace(entry(b"report"), quarantined=aside)])


def give(path: Path) -> None:
    os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid, follow_symlinks=False)


@pytest.mark.parametrize("command", COMMANDS)
async def test_no_command_follows_a_link_that_the_service_can_have_made(command: str, site: Site) -> None:
    (site.data / "buffer.db").symlink_to(site.victim)
    give(site.data / "buffer.db")
    done = await site.run(command)
    assert done.exit_code == 2
    assert PAYLOAD not in done.output
    assert "leads through a symbolic link that another user of this box can have made" in done.output


@pytest.mark.parametrize("command", COMMANDS)
async def test_no_command_follows_a_link_that_comes_once_the_settings_are_read(
    command: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = config_file.load

    def then_link(path: Path) -> Settings:
        settings = load(path)
        (site.data / "buffer.db").symlink_to(site.victim)
        give(site.data / "buffer.db")
        return settings

    monkeypatch.setattr(config_file, "load", then_link)
    done = await site.run(command)
    assert PAYLOAD not in done.output
    assert command == "devices list" or done.exit_code != 0


async def test_they_show_a_buffer_of_the_services_and_leave_no_file_of_roots_there(site: Site) -> None:
    await fill(site.data / "buffer.db")
    for path in site.data.iterdir():
        give(path)
    for command in COMMANDS:
        done = await site.run(command)
        assert done.exit_code == (command == "buffer quarantine retry --all"), (command, done.output)
        if command in {"buffer peek", "buffer export", "buffer export --quarantine", "buffer quarantine ls"}:
            assert PAYLOAD in done.output
    assert {path.stat().st_uid for path in site.data.iterdir()} == {NOBODY.pw_uid}


async def test_they_show_the_buffer_of_a_gateway_that_root_runs_in_anothers_folder(site: Site) -> None:
    await fill(site.data / "buffer.db")
    assert PAYLOAD in (await site.run("buffer peek")).output
