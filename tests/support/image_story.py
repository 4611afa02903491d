"""A card with our image, its sensor's ledger, and what is done to both: starts, updates, looking inside."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from image import build_image, card
from systemd.deb_python import ROOT
from tests.support.certificates import Authority, make_authority
from tests.support.gateways import write_config
from tests.support.image_guest import Guest, guest, put

BUILT = ROOT / "build/image/test"
"""Where `make test-image` puts the image."""
VERSION = "1.0.0"
"""The version that it gives the image."""
CARD_MB = 2_000
DIALOG = ROOT / "tests/image/imager/2.0.6-key-alone"
USER, NAME = "pi", "silo"
SECRET = "device-0123456789"  # noqa: S105 - of this test alone
ANSWERS = """\
[gateway]
id = "silo"
[kafka]
bootstrap = ["kafka.invalid:9092"]
tls = false
[sensors]
devices = ["42"]
[status_page]
enabled = false
"""
SECRETS = f'[devices]\n"42" = "{SECRET}"\n'
DEAF = """\
[Service]
Type=simple
ExecStart=
ExecStart=/usr/bin/sleep infinity
WatchdogSec=0
"""
SEND_S = 5.0
"""Seconds between two readings of a sensor that sends by itself."""
STICK_MB = 400
AUTHORITY = "authority.pem"
"""File on the boot partition: the authority of the site's web server."""


@dataclass
class Story:
    """A card, and all that sensors had an acknowledgement for."""

    folder: Path
    image: Path
    key: Path
    authority: Authority
    acknowledged: list[int] = field(default_factory=list)
    starts: int = 0

    def publish(self, box: Guest) -> bool:
        number = len(self.acknowledged)
        if box.publish("42", SECRET, number):
            self.acknowledged.append(number)
            return True
        return False

    @contextmanager
    def start(self, drive: str | Path, stick: Path | None = None, options: Sequence[str] = ()) -> Iterator[Guest]:
        self.starts += 1
        with guest(drive, self.folder / f"console.{self.starts}", stick=stick, options=options) as box:
            yield box

    def call(self, box: Guest, *command: str) -> str:
        ended = box.ssh(self.key, USER, "sudo", *command)
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def try_call(self, box: Guest, *command: str) -> str:
        """What a command says; nothing if nobody can log in yet."""
        return box.ssh(self.key, USER, "sudo", *command).stdout

    def switch_off(self, box: Guest) -> None:
        box.ssh(self.key, USER, "sudo", "systemctl", "poweroff")
        box.wait_until_off()

    def partition(self, number: int) -> Path:
        """Copy a partition of the card into a file."""
        path = self.folder / f"partition.{number}"
        table = subprocess.run(["sfdisk", "--json", self.image], capture_output=True, check=True).stdout
        found = json.loads(table)["partitiontable"]["partitions"][number - 1]
        place = [f"skip={found['start'] // 2048}", f"count={found['size'] // 2048}"]
        subprocess.run(
            ["dd", f"if={self.image}", f"of={path}", "bs=1M", "conv=sparse", "status=none", *place], check=True
        )
        return path

    def waiting(self) -> list[int]:
        """Numbers of the readings in the buffer of the card, which has no power."""
        data, folder = self.partition(4), self.folder / "buffer"
        subprocess.run(["e2fsck", "-fp", data], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        subprocess.run(
            ["debugfs", "-R", f"rdump /state/var/lib/sluice {folder}", data], capture_output=True, check=True
        )
        config = write_config(folder / "sluice", "localhost:1", 1883, "device")
        command = [sys.executable, "-m", "gateway.cli", "buffer", "export", "--config", str(config)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        rows = [json.loads(line) for line in ended.stdout.splitlines()]
        return [json.loads(row["payload"])["seq"] for row in rows if row.get("device") == "42"]

    def send_until(self, box: Guest, pattern: str, cpu_s: float) -> None:
        """Send readings now and then until words are on the console."""
        due_s = 0.0

        def send() -> None:
            nonlocal due_s
            if time.monotonic() > due_s:
                self.publish(box)
                due_s = time.monotonic() + SEND_S

        box.wait_for(pattern, cpu_s, meanwhile=send)

    def bundle(self, version: str, change: Callable[[Path], None] | None = None, **options: str) -> Path:
        """An update: the card's root A as another version, changed by `change`; `options` as of `make_bundle`."""
        root, path = self.partition(2), self.folder / f"{version}.raucb"
        replace(
            root, "/usr/lib/os-release", lambda told: re.sub('IMAGE_VERSION=".*"', f'IMAGE_VERSION="{version}"', told)
        )
        if change is not None:
            change(root)
        build_image.make_bundle(root, version, build_image.own_keys(ROOT / "build/signing"), path, **options)
        return path

    def stick(self, *bundles: Path) -> Path:
        """A stick with these updates, as it is sold: with FAT, and without a partition."""
        folder, stick = self.folder / "stick", self.folder / "stick.fat"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for bundle in bundles:
            os.link(bundle, folder / bundle.name)
        stick.unlink(missing_ok=True)
        card.make_fat(stick, STICK_MB, folder)
        return stick


def make_deaf(root: Path) -> None:
    """Have its daemon start, and take no reading."""
    make_file(root, "/usr/lib/systemd/system/sluice.service.d", "deaf.conf", DEAF)


def debugfs(image: Path, *commands: str) -> None:
    text = "".join(f"{command}\n" for command in commands)
    subprocess.run(["debugfs", "-w", "-f", "-", image], input=text, text=True, capture_output=True, check=True)


def replace(image: Path, path: str, change: Callable[[str], str]) -> None:
    """Change a file in a file system that nobody has mounted."""
    told = subprocess.run(["debugfs", "-R", f"cat {path}", image], capture_output=True, text=True, check=True).stdout
    file = image.with_suffix(".file")
    file.write_text(change(told))
    debugfs(image, f"rm {path}", f"write {file} {path}", f"set_inode_field {path} mode 0100644")


def make_file(image: Path, folder: str, name: str, text: str) -> None:
    file = image.with_suffix(".file")
    file.write_text(text)
    debugfs(image, f"mkdir {folder}", f"write {file} {folder}/{name}", f"set_inode_field {folder}/{name} mode 0100644")


def flash(folder: Path, image: Path) -> Story:
    """Write a card, with the files of the dialog and of an installer."""
    card_file, key = folder / "card.img", folder / "key"
    subprocess.run(["cp", "--sparse=always", image, card_file], check=True)
    os.truncate(card_file, CARD_MB << 20)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text().strip()
    for name in ("meta-data", "user-data", "network-config", "cmdline.txt"):
        text = re.sub(r"ssh-ed25519 .*", public, (DIALOG / name).read_text())
        put(card_file, name, text.encode())
    put(card_file, "sluice.toml", ANSWERS.encode())
    put(card_file, "sluice-secrets.toml", SECRETS.encode())
    authority = make_authority(folder / "authority")
    put(card_file, AUTHORITY, authority.certificate.read_bytes())
    return Story(folder, card_file, key, authority)
