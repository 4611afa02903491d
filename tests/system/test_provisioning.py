"""`sluice provision`: what lies on a boot partition or a stick is taken in once, and its secrets do not stay there."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli import main
from gateway.commands.setup import provision, provision_command
from gateway.commands.setup.answers import SECRETS_NAME
from gateway.commands.setup.provision import DONE_NAME, REPORT_NAME, TAKEN_NAME
from gateway.config import config_file
from gateway.host import usb_sticks
from gateway.host.usb_sticks import MediumError
from gateway.listener import credentials
from gateway.page.password import read_password_line, verify_password
from tests.support.waiting import patience

ANSWERS = """\
# from the office
[gateway]
id = "barn-1"
[kafka]
bootstrap = ["127.0.0.1:1"]
tls = true
user = "barn-1"
[sensors]
devices = ["42", "43"]
[service]
start = false
"""
SECRETS = """\
kafka_password = "kafka-9d2c1b77"
page_password = "page-51ab03fe"
[devices]
"42" = "device-0123456789"
[devices_sha256]
"43" = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
"""
SECRET_WORDS = ("kafka-9d2c1b77", "page-51ab03fe", "device-0123456789")
ROOT = Path(__file__).parents[2]


def medium(folder: Path, answers: str = ANSWERS, secrets: str = SECRETS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "sluice.toml").write_text(answers)
    if secrets:
        (folder / SECRETS_NAME).write_text(secrets)
    return folder


def provisioned(config: Path, *folders: Path) -> Result:
    words = ["provision", "--config", str(config), *map(str, folders)]
    return CliRunner(env={"COLUMNS": "1000"}).invoke(main, words)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def told_on(folder: Path) -> str:
    return (folder / REPORT_NAME).read_text()


def assert_set_up(config: Path) -> None:
    settings = config_file.load(config)
    assert settings.gateway.id == "barn-1"
    assert settings.kafka.sasl is not None
    assert settings.kafka.sasl.password_file.read_text() == "kafka-9d2c1b77\n"
    assert settings.status_page is not None
    assert verify_password("page-51ab03fe", read_password_line(settings.status_page.password_file))
    devices = credentials.load(config.with_name("devices.json")).devices
    assert [each.sha256 for each in devices["42"]] == [credentials.digest("device-0123456789")]
    assert set(devices) == {"42", "43"}


def test_a_gateway_is_set_up_without_typing(tmp_path: Path) -> None:
    boot, config = medium(tmp_path / "boot"), tmp_path / "etc" / "gateway.toml"
    # Who has it open sees what became of its bytes.
    with (boot / SECRETS_NAME).open("rb") as secrets:
        done = provisioned(config, boot)
        assert done.exit_code == 0, done.output
        found = secrets.read()
    assert found
    assert not found.strip(b"\0")
    assert_set_up(config)
    assert names(boot) == {DONE_NAME, REPORT_NAME}
    assert (boot / DONE_NAME).read_text() == ANSWERS
    told = told_on(boot)
    assert "it is default/barn-1" in told
    assert "sluice-secrets.toml was overwritten and removed" in told
    for words in SECRET_WORDS:
        assert words not in told + done.output
    before = config.read_bytes(), told
    assert "there is nothing to do" in provisioned(config, boot).output
    assert (config.read_bytes(), told_on(boot)) == before


def test_secrets_among_the_answers_are_wiped_too(tmp_path: Path) -> None:
    inline = SECRETS.replace("[devices", "[secrets.devices")
    boot = medium(tmp_path / "boot", f"{ANSWERS}[secrets]\n{inline}", "")
    config = tmp_path / "etc" / "gateway.toml"
    with (boot / "sluice.toml").open("rb") as answers:
        assert provisioned(config, boot).exit_code == 0
        found = answers.read()
    assert found
    assert not found.strip(b"\0")
    assert_set_up(config)
    assert names(boot) == {DONE_NAME, REPORT_NAME}
    for words in SECRET_WORDS:
        assert words not in (boot / DONE_NAME).read_text()
    assert 'id = "barn-1"' in (boot / DONE_NAME).read_text()


def test_a_mistake_changes_nothing_and_is_told_with_its_line(tmp_path: Path) -> None:
    boot = medium(tmp_path / "boot", ANSWERS.replace("tls = true\n", "tsl = true\n"))
    done = provisioned(tmp_path / "etc" / "gateway.toml", boot)
    assert done.exit_code == 1
    assert names(boot) == {"sluice.toml", SECRETS_NAME, REPORT_NAME}
    assert not (tmp_path / "etc").exists()
    told = told_on(boot)
    assert "sluice.toml, line 6: kafka.tsl: there is no such answer; write 'tls' instead" in told
    assert "sluice-secrets.toml was left here, and whoever has this medium can read it" in told
    assert "kafka.tsl" in done.output, "for the journal"
    (boot / "sluice.toml").write_text(ANSWERS)
    assert provisioned(tmp_path / "etc" / "gateway.toml", boot).exit_code == 0
    assert_set_up(tmp_path / "etc" / "gateway.toml")


def test_mistakes_of_the_secrets_are_told_without_them(tmp_path: Path) -> None:
    boot = medium(tmp_path / "boot", secrets=SECRETS.replace("kafka_password", "kafka-password"))
    assert provisioned(tmp_path / "etc" / "gateway.toml", boot).exit_code == 1
    told = told_on(boot)
    assert "sluice-secrets.toml, line 1: kafka-password: there is no such answer; write 'kafka_password'" in told
    for words in SECRET_WORDS:
        assert words not in told


def test_what_could_only_be_shown_has_to_be_given(tmp_path: Path) -> None:
    boot = medium(tmp_path / "boot", secrets='kafka_password = "kafka-9d2c1b77"')
    assert provisioned(tmp_path / "etc" / "gateway.toml", boot).exit_code == 1
    told = told_on(boot)
    assert "status_page: has no password, and nobody is there to be shown a new one" in told
    assert "line 9: sensors.devices: 42 has no secret" in told
    assert "43 has no secret" in told


def test_a_name_whose_ending_is_hidden_is_told(tmp_path: Path) -> None:
    boot = tmp_path / "boot"
    boot.mkdir()
    (boot / "sluice.toml.txt").write_text(ANSWERS)
    assert provisioned(tmp_path / "etc" / "gateway.toml", boot).exit_code == 1
    assert "sluice.toml.txt must be called sluice.toml" in told_on(boot)


def test_settings_that_cannot_be_written_are_told_on_the_medium_and_only_where_something_is_there(
    tmp_path: Path,
) -> None:
    boot, config = tmp_path / "boot", tmp_path / "gateway.toml"
    boot.mkdir()
    config.symlink_to(tmp_path / "elsewhere.toml")
    done = provisioned(config, boot)
    assert (done.exit_code, done.output) == (0, "no sluice.toml was found: there is nothing to do\n")
    assert provisioned(config, medium(boot)).exit_code == 1
    assert f"Nothing was set: {config} is no plain file" in told_on(boot)
    assert names(boot) == {"sluice.toml", SECRETS_NAME, REPORT_NAME}


def test_settings_in_place_that_have_mistakes_give_way_and_are_kept(tmp_path: Path) -> None:
    boot, config = medium(tmp_path / "boot"), tmp_path / "etc" / "gateway.toml"
    config.parent.mkdir()
    config.write_text("[gateway]\nid = 3\n")
    assert provisioned(config, boot).exit_code == 0
    assert_set_up(config)
    (kept,) = config.parent.glob("gateway.toml.*")
    assert kept.read_text() == "[gateway]\nid = 3\n"


def test_a_medium_that_cannot_be_written_is_not_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = medium(tmp_path / "boot")
    monkeypatch.setattr(provision, "_may_be_written", lambda _folder: False)
    done = provisioned(tmp_path / "etc" / "gateway.toml", boot)
    assert done.exit_code == 1
    assert "cannot be written: nothing was taken in from it" in done.output
    assert not (tmp_path / "etc").exists()


def test_the_report_is_not_written_again_where_it_says_the_same(tmp_path: Path) -> None:
    boot = medium(tmp_path / "boot", "nonsense")
    for _ in range(2):
        provisioned(tmp_path / "etc" / "gateway.toml", boot)
        written = (boot / REPORT_NAME).stat().st_mtime_ns, (boot / REPORT_NAME).stat().st_ino
    provisioned(tmp_path / "etc" / "gateway.toml", boot)
    assert ((boot / REPORT_NAME).stat().st_mtime_ns, (boot / REPORT_NAME).stat().st_ino) == written


def test_files_of_windows_are_read(tmp_path: Path) -> None:
    boot, config = medium(tmp_path / "boot"), tmp_path / "etc" / "gateway.toml"
    for name in ("sluice.toml", SECRETS_NAME):
        text = (boot / name).read_text()
        (boot / name).write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert provisioned(config, boot).exit_code == 0
    assert_set_up(config)


lines = st.lists(st.sampled_from([*ANSWERS.splitlines(), *SECRETS.splitlines(), "[secrets]", "[", '"""', "x = 1"]))


@given(
    answers=st.one_of(st.binary(max_size=60), lines.map("\n".join).map(str.encode)), secrets=st.none() | st.just(b"")
)
def test_any_files_on_the_boot_partition_end_in_a_report_without_secrets(
    answers: bytes, secrets: bytes | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    boot = folder / "boot"
    boot.mkdir()
    (boot / "sluice.toml").write_bytes(answers)
    if secrets is not None:
        (boot / SECRETS_NAME).write_bytes(secrets)
    outcome = provision.provision(boot, folder / "etc" / "gateway.toml")
    assert (outcome.taken is None) == bool(outcome.trouble)
    assert not any(words in told_on(boot) + outcome.trouble for words in SECRET_WORDS)


# -- cut off ------------------------------------------------------------------------------------------

KILLED = """\
import os, signal, sys
from gateway.commands.setup import provision
from gateway.commands.setup import write
from gateway.cli import main

step = int(sys.argv[1])

def until_killed(real):
    def step_by_step(*arguments):
        global step
        if step == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        step -= 1
        return real(*arguments)
    return step_by_step

steps = ((write, "_rename"), (write, "sync_folder"), (provision, "_rename"), (provision, "sync_folder"))
for module, name in steps:
    setattr(module, name, until_killed(getattr(module, name)))
provision.wipe = until_killed(provision.wipe)
provision.carry_out = until_killed(provision.carry_out)
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    "inline",
    [
        pytest.param(False, id="beside"),
        pytest.param(True, marks=pytest.mark.long(seconds=10), id="among-the-answers"),
    ],
)
def test_cut_off_at_any_step_it_is_gone_on_with(inline: bool, tmp_path: Path) -> None:  # noqa: FBT001 - a test's case
    answers = f"{ANSWERS}[secrets]\n{SECRETS.replace('[devices', '[secrets.devices')}" if inline else ANSWERS
    step, killed = 0, True
    while killed:
        folder = tmp_path / str(step)
        folder.mkdir()
        boot = medium(folder / "boot", answers, "" if inline else SECRETS)
        config = folder / "etc" / "gateway.toml"
        words = [str(step), "provision", "--config", str(config), str(boot)]
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, *words], capture_output=True, timeout=patience(60), check=False
        )
        killed = ended.returncode == -signal.SIGKILL
        # The next start.
        assert provisioned(config, boot).exit_code == 0
        assert_set_up(config)
        assert names(boot) - {f"{REPORT_NAME}.new"} == {DONE_NAME, REPORT_NAME}, step
        assert not any(words in (boot / name).read_text() for name in names(boot) for words in SECRET_WORDS)
        step += 1
    assert step > 10


def test_new_answers_beside_ones_that_were_taken_count(tmp_path: Path) -> None:
    boot = medium(tmp_path / "boot")
    (boot / TAKEN_NAME).write_text("[kafka]")
    assert provisioned(tmp_path / "etc" / "gateway.toml", boot).exit_code == 0
    assert_set_up(tmp_path / "etc" / "gateway.toml")
    assert names(boot) == {DONE_NAME, REPORT_NAME}


@pytest.mark.parametrize("text", ["[kafka", "\0", "secrets = 3", '[secrets]\nkafka_password = "kafka-9d2c1b77"'])
def test_whatever_was_taken_is_ended(text: str, tmp_path: Path) -> None:
    boot = tmp_path / "boot"
    boot.mkdir()
    (boot / TAKEN_NAME).write_text(text)
    (boot / SECRETS_NAME).write_text(SECRETS)
    assert provisioned(tmp_path / "etc" / "gateway.toml", boot).exit_code == 0
    assert names(boot) <= {DONE_NAME}
    assert not any(words in path.read_text() for path in boot.iterdir() for words in SECRET_WORDS)


@pytest.mark.parametrize("name", [f"{REPORT_NAME}.new", REPORT_NAME, f"{DONE_NAME}.new", DONE_NAME, TAKEN_NAME])
def test_links_on_a_medium_lead_root_nowhere(name: str, tmp_path: Path) -> None:
    inline = SECRETS.replace("[devices", "[secrets.devices")
    boot = medium(tmp_path / "boot", f"{ANSWERS}[secrets]\n{inline}", "")
    target = tmp_path / "passwd"
    target.write_text("root")
    (boot / name).symlink_to(target)
    assert provisioned(tmp_path / "etc" / "gateway.toml", boot).exit_code == 0
    assert target.read_text() == "root"
    assert_set_up(tmp_path / "etc" / "gateway.toml")


@pytest.mark.parametrize("name", ["sluice.toml", SECRETS_NAME])
def test_links_are_not_read(name: str, tmp_path: Path) -> None:
    boot = medium(tmp_path / "boot")
    (boot / name).rename(tmp_path / "elsewhere")
    (boot / name).symlink_to(tmp_path / "elsewhere")
    provisioned(tmp_path / "etc" / "gateway.toml", boot)
    assert not (tmp_path / "etc").exists()
    assert (tmp_path / "elsewhere").read_text() in {ANSWERS, SECRETS}


@pytest.mark.parametrize("name", ["sluice.toml", SECRETS_NAME])
def test_a_file_with_a_second_name_elsewhere_is_not_taken_in_nor_wiped(name: str, tmp_path: Path) -> None:
    boot = medium(tmp_path / "boot")
    os.link(boot / name, tmp_path / "elsewhere")
    done = provisioned(tmp_path / "etc" / "gateway.toml", boot)
    assert done.exit_code == 1
    assert f"{boot / name}: it has a second name (a hard link)" in done.output
    assert not (tmp_path / "etc").exists()
    assert (tmp_path / "elsewhere").read_text() in {ANSWERS, SECRETS}


# -- sticks -------------------------------------------------------------------------------------------


def block_device(sys_class: Path, place: str, name: str, *, removable: bool = True, parts: Sequence[str] = ()) -> None:
    """A disk as sysfs shows it."""
    disk = sys_class.parent / "devices" / place / name
    disk.mkdir(parents=True)
    (disk / "removable").write_text(f"{int(removable)}\n")
    (disk / "size").write_text("1000\n")
    (sys_class / name).symlink_to(disk)
    for part in parts:
        (disk / part).mkdir()
        (disk / part / "partition").write_text("1\n")
        (disk / part / "size").write_text("900\n")
        (sys_class / part).symlink_to(disk / part)


def test_only_removable_usb_media_are_looked_at(tmp_path: Path) -> None:
    block = tmp_path / "class"
    block.mkdir()
    block_device(block, "pci0000:00/usb1/1-1/host6/block", "sda", parts=["sda1", "sda2"])
    block_device(block, "pci0000:00/usb1/1-2/host7/block", "sdb")
    block_device(block, "pci0000:00/usb1/1-3/host8/block", "sdc", removable=False, parts=["sdc1"])
    block_device(block, "pci0000:00/ata1/host0/block", "sdd", parts=["sdd1"])
    block_device(block, "platform/mmc_host/block", "mmcblk0", parts=["mmcblk0p1"])
    assert usb_sticks.sticks(block) == ["sda1", "sda2", "sdb"]
    assert usb_sticks.sticks(tmp_path / "none") == []


class System:
    """Runs no program: notes what would be run."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.ran: list[str] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.ran.append(" ".join(command))
        return self.kind if command[0] == "blkid" else ""


def test_a_stick_is_mounted_so_that_nothing_on_it_runs() -> None:
    system = System("vfat")
    with usb_sticks.mounted("sda1", system) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        usb_sticks.make_writable(folder, system)
    _, mount, remount, umount = system.ran
    assert mount == f"mount -t vfat -o ro,nosuid,nodev,noexec,umask=077 /dev/sda1 {folder}"
    assert remount == f"mount -o remount,rw,nosuid,nodev,noexec {folder}"
    assert umount == f"umount {folder}"
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_real_file_system_is_written_only_once_it_may_be(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(4_000_000))
    try:
        usb_sticks.run(["mkfs.ext4", "-q", "-F", str(image)])
        device = usb_sticks.run(["losetup", "--find", "--show", str(image)])
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"this machine has no loop devices for us: {error}")
    try:
        with usb_sticks.mounted(device.removeprefix("/dev/")) as folder:
            with pytest.raises(OSError, match="Read-only file system"):
                (folder / "sluice.toml").write_text("x")
            usb_sticks.make_writable(folder)
            medium(folder)
            os.mknod(folder / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            with pytest.raises(PermissionError):
                (folder / "null").read_bytes()
            outcome = provision.provision(folder, tmp_path / "etc" / "gateway.toml")
            assert outcome.taken is not None, outcome.trouble
            assert not (folder / SECRETS_NAME).exists()
        assert not folder.exists()
    finally:
        usb_sticks.run(["losetup", "--detach", device])
    assert_set_up(tmp_path / "etc" / "gateway.toml")
    assert b"kafka-9d2c1b77" not in image.read_bytes(), "what was overwritten is gone, on a disk that writes in place"


def test_other_file_systems_are_left_alone() -> None:
    system = System("ntfs")
    with (
        pytest.raises(MediumError, match="no file system vfat, exfat, ext4 is seen on"),
        usb_sticks.mounted("x", system),
    ):
        pass
    assert len(system.ran) == 1


def test_a_gateway_that_is_set_up_looks_at_no_stick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "etc" / "gateway.toml"
    stick = medium(tmp_path / "stick")

    class Mounted:
        def __init__(self, _name: str) -> None: ...

        def __enter__(self) -> Path:
            return stick

        def __exit__(self, *_error: object) -> None: ...

    monkeypatch.setattr(provision_command, "BOOT_FOLDERS", (tmp_path / "boot",))
    monkeypatch.setattr(provision_command, "sticks", lambda: ["sda1"])
    monkeypatch.setattr(provision_command, "mounted", Mounted)
    monkeypatch.setattr(provision_command, "make_writable", lambda _folder: None)
    assert provisioned(config).exit_code == 0
    assert_set_up(config)
    medium(stick, ANSWERS.replace("barn-1", "theirs"), SECRETS)
    assert "there is nothing to do" in provisioned(config).output
    assert_set_up(config)
    # The boot partition counts again: who has the card has the box.
    medium(tmp_path / "boot", ANSWERS.replace('id = "barn-1"', 'id = "barn-9"'))
    assert provisioned(config).exit_code == 0
    assert config_file.load(config).gateway.id == "barn-9"


def test_the_unit_is_well_formed() -> None:
    unit = ROOT / "systemd" / "sluice-provision.service"
    text = unit.read_text()
    assert "Before=sluice.service" in text
    assert "ExecStart=/usr/bin/sluice provision\n" in text
    rules = (ROOT / "systemd" / "60-sluice-usb.rules").read_text()
    assert 'ENV{SYSTEMD_WANTS}+="sluice-provision.service"' in rules
    assert 'TEST!="/etc/sluice/gateway.toml"' in rules
