"""Raspberry Pi Imager's dialog, taken in by Debian's own cloud-init with the image's settings.

`imager/` has five choices of the dialog. The files were typed after the generators' sources in Imager's repository
(`src/customization_generator.cpp`, before 2.0 `src/OptionsPopup.qml`): no Imager wrote them. The numbers name the
versions roughly.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from image import card, root_tree
from tests.support.box import BoxUnavailableError, extract, foreign_tree

pytestmark = [pytest.mark.box, pytest.mark.timeout(900)]

CHOICES = sorted((Path(__file__).parent / "imager").iterdir())
FILES = ("meta-data", "user-data", "network-config")
IMAGE_ROOT = Path(card.__file__).parent / "root"
PACKAGES = (
    "base-files,base-passwd,coreutils,dash,findutils,grep,hostname,sed,util-linux,"
    "cloud-init,iproute2,libpam-runtime,netplan.io,openssh-server,passwd,procps,rfkill,sudo,systemd,tzdata,udev"
)
"""The first ones are in every Debian."""
STAGES = """\
set -eu
mount -t overlay -o lowerdir={tree},upperdir={upper},workdir={work} box {root}
mount -t proc proc {root}/proc
mount -t sysfs sys {root}/sys
mount -t tmpfs run {root}/run
mount -t tmpfs dev {root}/dev
for device in null zero random urandom; do
    touch {root}/dev/$device
    mount --bind /dev/$device {root}/dev/$device
done
mount --bind {command_line} {root}/proc/cmdline
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
code=0
chroot {root} /usr/lib/cloud-init/ds-identify || code=$?
echo "ds-identify: $code"
for stage in "init --local" init "modules --mode=config" "modules --mode=final"; do
    code=0
    chroot {root} cloud-init $stage || code=$?
    echo "cloud-init $stage: $code"
done
cp {root}/run/cloud-init/cloud-init.log {log}
cp -r {root}/run/systemd/network {networks} || true
grep -rl . {root}/run/netplan >{folder}/netplan-files || true
chroot {root} /usr/lib/sluice-image/take-dialog
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """A box after its first start with the files of the dialog."""

    choice: Path
    folder: Path
    said: str

    @property
    def changed(self) -> Path:
        """Files that were written since the card was."""
        return self.folder / "upper"

    def read(self, path: str) -> str:
        return (self.changed / path).read_text()

    def asked(self, name: str) -> str:
        """Words of the dialog's answers: the only value of this key."""
        found = re.findall(rf'(?m)^(?:- )? *{name}: *"?([^"\n]*)"?$', (self.choice / "user-data").read_text())
        return found[0] if found else ""

    @property
    def user(self) -> str:
        return self.asked("name")

    @property
    def has_key(self) -> bool:
        return "ssh-ed25519" in (self.choice / "user-data").read_text()

    @property
    def wifi_secret(self) -> str:
        found = re.findall(r'password: "(\w+)"', (self.choice / "network-config").read_text())
        return found[0] if found else ""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian's packages with the image's settings over them."""
    try:
        made = foreign_tree(13, "amd64", PACKAGES)
    except BoxUnavailableError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("tree") / "root"
    extract(made, folder)
    # As the packages' scripts would.
    for name in ("passwd", "group"):
        shutil.copy(folder / f"usr/share/base-passwd/{name}.master", folder / "etc" / name)
    for name in ("shadow", "gshadow"):
        (folder / "etc" / name).write_text("root:*:20000:0:99999:7:::\n" if name == "shadow" else "")
    root_tree.make_certificates(folder)
    shutil.copytree(IMAGE_ROOT, folder, symlinks=True, dirs_exist_ok=True)
    (folder / "etc/hostname").write_text("sluice\n")
    for name in ("boot/firmware", "dev", "proc", "run", "sys", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module", params=CHOICES, ids=lambda path: path.name)
def taken(request: pytest.FixtureRequest, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taken]:
    choice: Path = request.param
    folder = tmp_path_factory.mktemp(choice.name)
    names = {name: folder / name for name in ("upper", "work", "root")}
    for path in names.values():
        path.mkdir()
    boot = names["upper"] / "boot/firmware"
    boot.mkdir(parents=True)
    for name in FILES:
        shutil.copy(choice / name, boot / name)
    others = {"log": folder / "log", "networks": folder / "networks", "folder": folder}
    script = STAGES.format(tree=tree, command_line=choice / "cmdline.txt", **names, **others)
    # Apart from this machine's mounts, network and processes.
    apart = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
    ended = subprocess.run([*apart, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    yield Taken(choice, folder, ended.stdout)
    shutil.rmtree(folder)


def test_cloud_init_is_on_and_finds_nothing_to_complain_of(taken: Taken) -> None:
    log = (taken.folder / "log").read_text()
    assert "ds-identify: 0" in taken.said
    assert [line for line in log.splitlines() if re.match(r"\S+\[(WARNING|ERROR|CRITICAL)\]", line)] == []
    assert re.findall(r"cloud-init .*: [^02]$", taken.said, re.MULTILINE) == []


def test_the_box_has_its_name_and_its_time_zone(taken: Taken) -> None:
    name = taken.asked("hostname")
    assert taken.read("etc/hostname") == f"{name}\n"
    assert re.search(rf"(?m)^127\.0\.1\.1 .*\b{name}\b", taken.read("etc/hosts"))
    zone = taken.asked("timezone")
    if zone:
        assert (taken.changed / "etc/localtime").readlink().as_posix().endswith(f"zoneinfo/{zone}")


def test_the_user_of_the_dialog_is_there_and_no_other(taken: Taken, tree: Path) -> None:
    before = {line.split(":")[0] for line in (tree / "etc/passwd").read_text().splitlines()}
    path = taken.changed / "etc/passwd"
    there = {line.split(":")[0] for line in path.read_text().splitlines()} - before if path.exists() else set()
    assert there == ({taken.user} if taken.user else set())
    if not there:
        return
    groups = {line.split(":")[0]: line.split(":")[3].split(",") for line in taken.read("etc/group").splitlines()}
    assert all(taken.user in groups[group] for group in ("sudo", "adm", "dialout"))
    (secret,) = (line.split(":")[1] for line in taken.read("etc/shadow").splitlines() if line.startswith(taken.user))
    assert secret == taken.asked("passwd") if taken.asked("passwd") else secret.startswith("!")
    keys = taken.changed / "home" / taken.user / ".ssh/authorized_keys"
    assert keys.exists() == taken.has_key
    sudo = taken.changed / "etc/sudoers.d/90-cloud-init-users"
    assert sudo.exists() == ("NOPASSWD" in (taken.choice / "user-data").read_text())


def test_ssh_is_on_if_a_user_has_a_key_and_takes_no_password_all_the_same(taken: Taken, tree: Path) -> None:
    wanted = taken.changed / "etc/systemd/system/multi-user.target.wants/ssh.service"
    assert wanted.is_symlink() == taken.has_key
    first = min((tree / "etc/ssh/sshd_config.d").iterdir())
    assert "PasswordAuthentication no" in first.read_text()
    added = taken.changed / "etc/ssh/sshd_config.d"
    assert not added.exists() or all(path.name > first.name for path in added.iterdir())


def test_the_network_is_what_the_dialog_says(taken: Taken) -> None:
    (plan,) = (taken.changed / "etc/netplan").iterdir()
    assert plan.stat().st_mode & 0o77 == 0
    assert bool(taken.wifi_secret) == ("wifis:" in plan.read_text())
    assert taken.wifi_secret in plan.read_text()


def test_no_module_ran_that_fetches_or_runs_commands(taken: Taken) -> None:
    log = (taken.folder / "log").read_text()
    ran = set(re.findall(r"config-([\w-]+)(?: ran| already ran|[ :])", log))
    assert ran <= {"set_hostname", "update_etc_hosts", "users_groups", "timezone"}, ran
    assert "localectl" not in log.replace("runcmd", "")


def test_secrets_are_where_they_belong_and_nowhere_else(taken: Taken) -> None:
    secrets = {taken.wifi_secret: "etc/netplan", taken.asked("passwd"): "etc/shadow"}
    for secret, place in secrets.items():
        if secret:
            found = [
                path for path in taken.changed.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()
            ]
            names = {str(path.relative_to(taken.changed)) for path in found}
            assert names, secret
            assert all(name.startswith(place) for name in names), names
    assert sorted(path.name for path in (taken.changed / "boot/firmware").iterdir()) == []
