"""`sluice reset`: everything of a site goes from the box, after it was listed, and only after a confirmation."""

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from gateway.buffer import lock
from gateway.buffer.rows import Series
from gateway.buffer.salvage import aside as buffer_aside
from gateway.cli import main
from gateway.commands.setup import reset_command
from gateway.host import fleet_report, service
from gateway.host.safe_files import wipe
from tests.support.buffers import entry, entry_of, input_of, opened, store
from tests.support.setup_dialogue import CTRL_C, PROMPT, at_a_terminal

ANSWERS = """\
[gateway]
id = "barn-1"
[kafka]
bootstrap = ["127.0.0.1:1"]
tls = true
user = "barn-1"
[sensors]
devices = ["42"]
[secrets]
kafka_password = "kafka-9d2c1b77"
page_password = "page-51ab03fe"
"""


@pytest.fixture(autouse=True)
def no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the services of this machine out of these tests."""
    monkeypatch.setattr(service, "is_active", lambda _config: False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A gateway that was set up twice, and somebody's notes beside its settings."""
    answers, config = tmp_path / "answers.toml", tmp_path / "etc" / "gateway.toml"
    for namespace in ("north", "south"):
        answers.write_text(ANSWERS.replace("[kafka]", f'namespace = "{namespace}"\n[kafka]'))
        invoke("setup", config, "--answers", str(answers), "--no-check")
    (config.parent / "notes.txt").write_text("keep")
    (config.parent / "secrets" / "mine").write_text("keep")
    (config.parent / ".gateway.toml.setup-unfinished").write_text("kafka-9d2c1b77")
    return config


def invoke(command: str, config: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "1000"}).invoke(main, [command, "--config", str(config), *arguments])


def reset(config: Path, *arguments: str) -> Result:
    return invoke("reset", config, *arguments)


def left(config: Path) -> set[str]:
    return {str(path.relative_to(config.parent)) for path in config.parent.rglob("*") if not path.is_dir()}


async def fill(path: Path) -> None:
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"a", sequence=0), entry(b"b", sequence=1)])


async def test_everything_of_the_site_goes_and_what_is_not_its_stays(config: Path) -> None:
    buffer = config.with_name("buffer.db")
    await fill(buffer)
    unfinished = buffer_aside.begin(buffer)
    buffer_aside.finish(unfinished)
    await fill(buffer)
    done = reset(config, "--yes-wipe", "barn-1")
    assert done.exit_code == 0, done.output
    # Two that waited, and perhaps already those of the file that was set aside.
    assert re.search(r"^[24] readings WAIT AND WERE NOT SENT", done.output, re.MULTILINE)
    assert left(config) == {"notes.txt", "secrets/mine"}
    assert f"left: {config.parent / 'notes.txt'}" in done.output
    assert "On flash memory (cards, SSDs) old copies of either can survive" in done.output
    assert f"this box is not set up now: sluice setup --config {config}" in done.output
    assert "there is nothing to wipe" in reset(config, "--yes-wipe", "barn-1").output


@pytest.mark.parametrize(
    ("readings", "events", "told"),
    [
        (0, 0, "nothing waits in PATH\n"),
        (0, 1, "no reading waits, but 1 event of the gateway's own in PATH; a copy: sluice buffer export --config "),
        (1, 0, "1 reading WAITS AND WAS NOT SENT in PATH; a copy: sluice buffer export --config CONFIG > FILE\n"),
        (2, 3, "2 readings WAIT AND WERE NOT SENT, and 3 events of the gateway's own in PATH; a copy: sluice"),
    ],
)
async def test_readings_are_told_apart_from_what_the_gateway_says_of_itself(
    readings: int, events: int, told: str, config: Path
) -> None:
    buffer = config.with_name("buffer.db")
    own = Series("gateway-events", "barn-1", "", "check", "sluice.gateway.check", "application/json")
    rows = [*[entry(sequence=number) for number in range(readings)], *[entry_of(own, b"{}")] * events]
    async with opened(buffer) as filled:
        assert not rows or await store(filled, rows)
    told = told.replace("PATH", str(buffer)).replace("CONFIG", str(config))
    assert told in reset(config, "--yes-wipe", "another").output


async def test_how_to_keep_what_stands_in_the_quarantine_is_told_by_a_command_that_keeps_it(config: Path) -> None:
    async with opened(config.with_name("buffer.db")) as filled:
        set_aside = input_of("no-route", b"not a reading", "", "kitchen")
        assert await store(filled, [replace(entry(b"report", "gw1"), quarantined=set_aside)])
    shown = reset(config, "--yes-wipe", "another").output
    told = re.search(r"^1 input in the quarantine; a copy: sluice (.*) > FILE$", shown, re.MULTILINE)
    assert told is not None, shown
    kept = CliRunner().invoke(main, shlex.split(told[1]))
    assert "not a reading" in kept.stdout


async def test_what_is_secret_is_overwritten(config: Path) -> None:
    secret = config.parent / "secrets" / "kafka.password"
    with secret.open("rb") as seen:
        assert reset(config, "--yes-wipe", "barn-1").exit_code == 0
        found = seen.read()
    assert found
    assert not found.strip(b"\0")


def test_another_gateways_id_wipes_nothing(config: Path) -> None:
    before = left(config)
    told = reset(config, "--yes-wipe", "barn-2")
    assert told.exit_code == 2
    assert "that is not this gateway's id, which is barn-1: nothing was wiped" in told.output
    assert left(config) == before


def test_without_a_terminal_the_id_has_to_be_given(config: Path) -> None:
    before = left(config)
    told = reset(config)
    assert told.exit_code == 2
    assert "--yes-wipe ID does it without asking" in told.output
    assert left(config) == before


def test_a_buffer_in_use_is_not_wiped(config: Path) -> None:
    before = left(config) | {"buffer.db.lock"}
    with lock.acquire(config.with_name("buffer.db")):
        told = reset(config, "--yes-wipe", "barn-1")
    assert told.exit_code == 2
    assert "is in use by another sluice: stop that one" in told.output
    assert left(config) == before


@pytest.mark.parametrize("arguments", [(), ("--stop",)])
def test_a_service_that_runs_is_stopped_only_where_it_may_be(
    arguments: tuple[str, ...], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []
    monkeypatch.setattr(service, "is_active", lambda _config: True)
    monkeypatch.setattr(service, "stop", lambda: stopped.append("sluice"))
    done = reset(config, "--yes-wipe", "barn-1", *arguments)
    assert done.output.splitlines()[1] == "The gateway runs: it would be stopped for that."
    assert stopped == (["sluice"] if arguments else [])
    assert done.exit_code == (0 if arguments else 2)
    assert arguments or "the gateway runs: nothing was wiped" in done.output
    assert config.exists() == (not arguments)


@pytest.mark.parametrize("text", ["[gateway]\nid = 'barn-1'\n[kafka]\nbootstrap = 3\n", "[gateway", None])
async def test_settings_that_are_wrong_or_gone_hold_nothing_up(text: str | None, config: Path) -> None:
    await fill(config.with_name("buffer.db"))
    if text is None:
        config.unlink()
    else:
        config.write_text(text)
    name = "barn-1" if text is not None and "id" in text else reset_command.UNNAMED
    assert reset(config, "--yes-wipe", name).exit_code == 0
    assert left(config) == {"notes.txt", "secrets/mine"}


def test_cut_off_it_is_called_again(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = wipe, []

    def failing(path: Path) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(5, "Input/output error", str(path))
        real(path)

    monkeypatch.setattr(reset_command, "wipe", failing)
    told = reset(config, "--yes-wipe", "barn-1")
    assert told.exit_code == 1
    assert "Input/output error: not all is wiped; run this again" in told.output
    # The settings go last: without them nobody would know where the rest is.
    assert config.exists()
    assert reset(config, "--yes-wipe", "barn-1").exit_code == 0
    assert left(config) == {"notes.txt", "secrets/mine"}


def test_at_a_terminal_the_id_is_typed(config: Path) -> None:
    before = left(config)
    with at_a_terminal("reset", "--config", config) as terminal:
        shown = terminal.until(PROMPT)
        assert shown.endswith("To wipe it, type barn-1 > ")
        terminal.press(CTRL_C)
        assert terminal.end() == 2
    assert "nothing was wiped" in terminal.text
    assert left(config) == before
    with at_a_terminal("reset", "--config", config) as terminal:
        terminal.answer("barn-1")
        assert terminal.end() == 0
    assert left(config) == {"notes.txt", "secrets/mine"}


def test_the_boot_partition_would_not_set_it_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot, config = tmp_path / "boot", tmp_path / "etc" / "gateway.toml"
    for name in ("sluice.toml", "sluice-secrets.toml", "sluice.toml.done", "sluice-report.txt", "cmdline.txt"):
        boot.mkdir(exist_ok=True)
        (boot / name).write_text("x")
    monkeypatch.setattr(reset_command, "BOOT_FOLDERS", (boot,))
    monkeypatch.setattr(reset_command, "DEFAULT_CONFIG", config)
    assert reset(config, "--yes-wipe", reset_command.UNNAMED).exit_code == 0
    assert [path.name for path in boot.iterdir()] == ["cmdline.txt"]


def test_what_a_fleet_has_left_is_wiped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, config = tmp_path / "fleet", tmp_path / "etc" / "gateway.toml"
    (fleet / "work").mkdir(parents=True)
    for name in ("report.json", "work/old.toml"):
        (fleet / name).write_text("x")
    monkeypatch.setattr(fleet_report, "FOLDER", fleet)
    monkeypatch.setattr(reset_command, "DEFAULT_CONFIG", config)
    assert reset(config, "--yes-wipe", reset_command.UNNAMED).exit_code == 0
    assert [path for path in fleet.rglob("*") if path.is_file()] == []


# -- what the service's user may have put there ---------------------------------------------------------

SERVICE_UID, THIRD_UID = 64_123, 64_124
NAMES = ["buffer.db", "buffer.db-wal", "buffer.db.corrupt-1", "buffer.db.lock", "devices.json", "devices.json.new"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


@dataclass(frozen=True, slots=True)
class Site:
    """A gateway of root's, whose buffer is in a folder of the service's user, beside a file that is none of theirs."""

    config: Path
    data: Path
    victim: Path

    def reset(self) -> Result:
        done = reset(self.config, "--yes-wipe", "barn-1")
        assert self.victim.read_text() == "root's own"
        return done


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return made_site(tmp_path, "data/buffer.db")


def made_site(folder: Path, buffer: str) -> Site:
    data, config, victim = folder / "data", folder / "etc" / "gateway.toml", folder / "root" / "buffer.db"
    for each in (data, config.parent, victim.parent):
        each.mkdir()
    os.chown(data, SERVICE_UID, SERVICE_UID)
    bootstrap = '[kafka]\nbootstrap = ["127.0.0.1:1"]\n'
    config.write_text(f'[gateway]\nid = "barn-1"\n[buffer]\npath = "{folder / buffer}"\n{bootstrap}')
    victim.write_text("root's own")
    return Site(config, data, victim)


def give(path: Path, uid: int = SERVICE_UID) -> Path:
    os.chown(path, uid, uid, follow_symlinks=False)
    return path


def written(path: Path, uid: int = SERVICE_UID) -> Path:
    path.write_text("the service's")
    return give(path, uid)


@as_root
@pytest.mark.parametrize("name", NAMES)
def test_a_link_in_the_place_of_the_services_files_leads_root_nowhere(name: str, site: Site) -> None:
    link = site.data / name
    link.symlink_to(site.victim)
    give(link)
    others = [written(site.data / other) for other in NAMES if other != name]
    done = site.reset()
    assert done.exit_code == 1, done.output
    assert f"NOT WIPED: {link}: it is a symbolic link" in done.output
    assert link.is_symlink()
    assert not any(other.exists() for other in others)
    assert not site.config.exists()


@as_root
@pytest.mark.parametrize("name", NAMES)
def test_a_second_name_of_a_file_of_roots_is_not_written_to(name: str, site: Site) -> None:
    os.link(site.victim, site.data / name)
    done = site.reset()
    assert done.exit_code == 1, done.output
    assert f"NOT WIPED: {site.data / name}: it has a second name (a hard link)" in done.output


@as_root
def test_a_link_to_where_nothing_is_makes_nothing_there(site: Site) -> None:
    for name in NAMES:
        (site.data / name).symlink_to(site.victim.with_name("nologin"))
        give(site.data / name)
    assert site.reset().exit_code == 1
    assert [path.name for path in site.victim.parent.iterdir()] == ["buffer.db"]


@as_root
def test_a_link_in_the_place_of_a_folder_leads_root_nowhere(tmp_path: Path) -> None:
    site = made_site(tmp_path, "data/inner/buffer.db")
    (site.data / "inner").symlink_to(site.victim.parent)
    give(site.data / "inner")
    os.chown(site.victim, SERVICE_UID, SERVICE_UID)
    (site.victim.parent / "devices.json").write_text("root's own")
    done = site.reset()
    assert done.exit_code == 1, done.output
    told = f"NOT WIPED: {site.data / 'inner' / 'buffer.db'}: a folder above it is a symbolic link"
    assert told in done.output
    assert sorted(path.name for path in site.victim.parent.iterdir()) == ["buffer.db", "devices.json"]


@as_root
def test_a_link_that_root_made_in_a_folder_of_roots_is_followed(tmp_path: Path) -> None:
    site = made_site(tmp_path, "disk/buffer.db")
    (tmp_path / "disk").symlink_to("data")
    files = [written(site.data / name) for name in NAMES]
    assert site.reset().exit_code == 0
    assert not any(path.exists() for path in files)


@as_root
def test_a_file_of_a_third_user_stays(site: Site) -> None:
    theirs, ours = written(site.data / "buffer.db", THIRD_UID), written(site.data / "devices.json")
    done = site.reset()
    assert done.exit_code == 1
    assert f"NOT WIPED: {theirs}: it is another user's than its folder" in done.output
    assert theirs.read_text() == "the service's"
    assert not ours.exists()


@as_root
def test_a_link_that_comes_after_the_question_leads_root_nowhere(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = written(site.data / "buffer.db")

    def swap(*_arguments: object) -> None:
        buffer.unlink()
        buffer.symlink_to(site.victim)
        give(buffer)

    monkeypatch.setattr(reset_command, "_confirm", swap)
    done = site.reset()
    assert done.exit_code == 1
    assert f"to be wiped: {buffer}" in done.output
    assert f"NOT WIPED: {buffer}: it is a symbolic link" in done.output


def test_a_link_among_ones_own_files_is_not_followed_either(tmp_path: Path) -> None:
    bootstrap = '[kafka]\nbootstrap = ["127.0.0.1:1"]\n'
    config, mine = tmp_path / "gateway.toml", tmp_path / "mine"
    config.write_text(f'[gateway]\nid = "barn-1"\n[buffer]\npath = "{tmp_path}/buffer.db"\n{bootstrap}')
    mine.write_text("keep")
    (tmp_path / "buffer.db").symlink_to(mine)
    (tmp_path / "secrets").symlink_to("/")
    done = reset(config, "--yes-wipe", "barn-1")
    assert done.exit_code == 1
    assert f"NOT WIPED: {tmp_path / 'buffer.db'}: it is a symbolic link" in done.output
    assert f"left: {tmp_path / 'secrets'}" in done.output
    assert mine.read_text() == "keep"
