"""RAUC's service as on a box with our image that runs slot A, with slots in files."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.commands.update import image_update, programs
from gateway.host import boot_slots, last_update, our_image, service
from gateway.host.boot_slots import SlotState
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
CONTENT = os.urandom(100_000)
CONFIGURATION = """\
[system]
compatible=sluice-arm64
bootloader=custom
statusfile={folder}/status.raucs
mountprefix={folder}/mount
[handlers]
bootloader-custom-backend={folder}/back-end
[keyring]
path={folder}/ours.crt
[slot.root.0]
device={folder}/slot-a
type=raw
bootname=a
[slot.root.1]
device={folder}/slot-b
type=raw
bootname=b
"""
BACK_END = """\
#!{python}
import sys
from pathlib import Path
sys.path.insert(0, "{root}")
from gateway.commands.update import rauc_slots
from gateway.host import boot_slots
boot_slots.running_slot = lambda: "a"
rauc_slots.main(sys.argv[1:], Path("{folder}/boot"))
"""


@dataclass(frozen=True, slots=True)
class RaucSite:
    """A box with our image, as far as RAUC sees it: it runs slot a."""

    folder: Path
    bus: str

    def bundle(self, version: str, compatible: str = "sluice-arm64", signer: str = "ours") -> Path:
        content, file = self.folder / "content", self.folder / f"{version}-{compatible}-{signer}.raucb"
        shutil.rmtree(content, ignore_errors=True)
        content.mkdir()
        (content / "root.img").write_bytes(CONTENT)
        (content / "manifest.raucm").write_text(
            f"[update]\ncompatible={compatible}\nversion={version}\n[bundle]\nformat=plain\n[image.root]\n"
            "filename=root.img\n"
        )
        file.unlink(missing_ok=True)
        keys = [f"--cert={self.folder}/{signer}.crt", f"--key={self.folder}/{signer}.key"]
        subprocess.run(["rauc", "bundle", *keys, content, file], check=True, capture_output=True)
        return file

    @property
    def state(self) -> SlotState:
        return boot_slots.read(self.folder / "boot")


def make_key(folder: Path, name: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "36500", "-subj", f"/CN={name}", "-keyout", f"{folder}/{name}.key"]
    subprocess.run([*command, "-out", f"{folder}/{name}.crt"], check=True, capture_output=True)


@contextmanager
def rauc_site(folder: Path) -> Iterator[RaucSite]:
    """RAUC's service on a bus of its own. It mounts bundles, so it needs root and loop devices."""
    if shutil.which("rauc") is None or shutil.which("mksquashfs") is None:
        pytest.skip("there is no `rauc` or no `mksquashfs`: install Debian's packages rauc and squashfs-tools")
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("RAUC mounts bundles: run as root, where there are loop devices")
    for name in ("ours", "another"):
        make_key(folder, name)
    (folder / "boot").mkdir()
    (folder / "system.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "back-end").write_text(BACK_END.format(python=sys.executable, root=ROOT, folder=folder))
    (folder / "back-end").chmod(0o755)
    for name in ("slot-a", "slot-b"):
        (folder / name).write_bytes(bytes(200_000))
    command = ["rauc", f"--conf={folder}/system.conf", "--override-boot-slot=a", "service"]
    with running("dbus-daemon", "--session", "--nofork", "--nopidfile", "--print-address") as bus:
        assert bus.stdout is not None
        address = bus.stdout.readline().strip()
        environment = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": address}
        with running(*command, env=environment):
            ask = ["rauc", f"--conf={folder}/system.conf", "status"]
            wait_until(lambda: subprocess.run(ask, env=environment, capture_output=True, check=False).returncode == 0)
            yield RaucSite(folder, address)


@contextmanager
def running(*command: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A program for the length of a `with`."""
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def begin_anew(rauc: RaucSite, patched: pytest.MonkeyPatch) -> None:
    """Have commands of this process find the box as before its first update."""
    for name in ("slot-a", "slot-b"):
        (rauc.folder / name).write_bytes(bytes(200_000))
    for file in (rauc.folder / "boot").iterdir():
        file.unlink()
    for name in ("last.json", "refused.json", "rebooted"):
        (rauc.folder / name).unlink(missing_ok=True)
    patched.setitem(programs._ENVIRONMENT, "DBUS_SYSTEM_BUS_ADDRESS", rauc.bus)
    call = programs.call

    def with_configuration(*command: str, patience_s: float | None = 60.0) -> subprocess.CompletedProcess[str]:
        words = [command[0], f"--conf={rauc.folder}/system.conf"] if command[0] == "rauc" else [command[0]]
        return call(*words, *command[1:], patience_s=patience_s)

    patched.setattr(image_update, "call", with_configuration)
    patched.setattr(our_image, "read", lambda: our_image.OurImage("1.0.0", "a", {}))
    patched.setattr(boot_slots, "BOOT_FOLDER", rauc.folder / "boot")
    patched.setattr(last_update, "FILE", rauc.folder / "last.json")
    patched.setattr(last_update, "REFUSED", rauc.folder / "refused.json")
    patched.setattr(service, "reboot", (rauc.folder / "rebooted").touch)
