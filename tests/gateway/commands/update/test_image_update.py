"""`sluice update FILE.raucb`, with RAUC itself, slots in files, and the slots' state that its back end writes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.commands.update import download, image_update, programs, update_command
from gateway.host import boot_slots, last_update, our_image, service
from gateway.host.boot_slots import SlotState
from gateway.host.last_update import Before
from tests.support.certificates import make_authority
from tests.support.https_site import https_site
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[4]
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


@pytest.fixture(scope="module")
def rauc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaucSite]:
    """RAUC's service on a bus of its own. It mounts bundles, so it needs root and loop devices."""
    if shutil.which("rauc") is None or shutil.which("mksquashfs") is None:
        pytest.skip("there is no `rauc` or no `mksquashfs`: install Debian's packages rauc and squashfs-tools")
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("RAUC mounts bundles: run as root, where there are loop devices")
    folder = tmp_path_factory.mktemp("rauc")
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


@pytest.fixture
def site(rauc: RaucSite, monkeypatch: pytest.MonkeyPatch) -> RaucSite:
    """As before the first update."""
    for name in ("slot-a", "slot-b"):
        (rauc.folder / name).write_bytes(bytes(200_000))
    for file in (rauc.folder / "boot").iterdir():
        file.unlink()
    (rauc.folder / "last.json").unlink(missing_ok=True)
    monkeypatch.setitem(programs._ENVIRONMENT, "DBUS_SYSTEM_BUS_ADDRESS", rauc.bus)
    call = programs.call

    def with_configuration(*command: str, patience_s: float | None = 60.0) -> subprocess.CompletedProcess[str]:
        words = [command[0], f"--conf={rauc.folder}/system.conf"] if command[0] == "rauc" else [command[0]]
        return call(*words, *command[1:], patience_s=patience_s)

    monkeypatch.setattr(image_update, "call", with_configuration)
    monkeypatch.setattr(our_image, "read", lambda: our_image.OurImage("1.0.0", "a", {}))
    monkeypatch.setattr(boot_slots, "BOOT_FOLDER", rauc.folder / "boot")
    monkeypatch.setattr(last_update, "FILE", rauc.folder / "last.json")
    monkeypatch.setattr(service, "reboot", (rauc.folder / "rebooted").touch)
    return rauc


def update(file: Path | str, *options: str) -> Result:
    return CliRunner().invoke(main, ["update", str(file), *options])


def test_a_bundle_is_written_into_the_other_slot_which_is_then_on_trial(site: RaucSite) -> None:
    shown = update(site.bundle("1.1.0"))
    assert shown.exit_code == 0, shown.output
    assert "installed: version 1.1.0, before it 1.0.0" in shown.output
    assert (site.folder / "slot-b").read_bytes()[: len(CONTENT)] == CONTENT
    assert (site.folder / "slot-a").read_bytes() == bytes(200_000)
    assert (site.state.good, site.state.trial, site.state.tries) == ("a", "b", 3)
    found = last_update.read()
    assert found is not None
    assert (found.old, found.new, found.slot, found.result, found.before) == (
        "1.0.0",
        "1.1.0",
        "b",
        "on-trial",
        Before(),
    )
    assert (site.folder / "rebooted").exists()
    (site.folder / "rebooted").unlink()


def test_a_bundle_of_a_web_server_is_installed_and_not_kept(
    site: RaucSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_authority(tmp_path / "tls")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    monkeypatch.setattr(update_command, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(download, "PAUSES_S", (0.0,))
    with https_site(authority.sign("server")) as server:
        server.files["/latest.raucb"] = site.bundle("1.1.0").read_bytes()
        server.cuts = [40_000]
        boot_slots.write(site.folder / "boot", boot_slots.put_on_trial(SlotState(good="b"), "a"))
        assert "version 1.0.0 is on trial itself" in refused(site, server.address("/latest.raucb"))
        assert server.asked == [], "nothing is fetched in vain"
        boot_slots.write(site.folder / "boot", SlotState())
        shown = update(server.address("/latest.raucb"))
    assert shown.exit_code == 0, shown.output
    assert "installed: version 1.1.0, before it 1.0.0" in shown.output
    assert [asked for _, asked in server.asked] == ["", "bytes=39999-"]
    assert (site.folder / "slot-b").read_bytes()[: len(CONTENT)] == CONTENT
    assert list((tmp_path / "cache").iterdir()) == []
    (site.folder / "rebooted").unlink()


def refused(site: RaucSite, file: Path | str, *options: str) -> str:
    """The words that an update is refused with. Nothing may have changed, and nothing restarts."""
    before, record = site.state, last_update.read()
    shown = update(file, *options)
    assert shown.exit_code == 1, shown.output
    assert (site.state.good, site.state.trial) == (before.good, before.trial)
    assert last_update.read() == record
    assert (site.folder / "slot-b").read_bytes() == bytes(200_000)
    assert not (site.folder / "rebooted").exists()
    return " ".join(shown.output.split())


def test_a_bundle_that_is_not_ours_is_refused(site: RaucSite) -> None:
    assert "RAUC does not trust it" in refused(site, site.bundle("1.1.0", signer="another"))
    changed = site.bundle("1.1.0")
    content = bytearray(changed.read_bytes())
    content[5_000] ^= 1
    changed.write_bytes(content)
    assert "RAUC does not trust it" in refused(site, changed)
    changed.write_bytes(content[:50_000])
    assert "RAUC does not trust it" in refused(site, changed)


def test_a_bundle_for_another_board_is_refused_and_the_record_before_stays(site: RaucSite) -> None:
    told = refused(site, site.bundle("1.1.0", compatible="toaster"))
    assert "RAUC did not install it; this version goes on" in told
    assert "toaster" in told
    former = last_update.LastUpdate("0", "0.9", "1.0.0", "a", Before(), "good")
    last_update.write(former)
    refused(site, site.bundle("1.1.0", compatible="toaster"))
    assert last_update.read() == former


def test_an_older_bundle_and_the_same_one_are_not_installed(site: RaucSite) -> None:
    assert "add --allow-downgrade" in refused(site, site.bundle("0.9.0"))
    assert "nothing was done" in update(site.bundle("1.0.0")).output
    assert update(site.bundle("0.9.0"), "--allow-downgrade").exit_code == 0
    (site.folder / "rebooted").unlink()


def test_a_version_on_trial_does_not_overwrite_its_way_back(site: RaucSite) -> None:
    boot_slots.write(site.folder / "boot", boot_slots.put_on_trial(SlotState(good="b"), "a"))
    assert "version 1.0.0 is on trial itself" in refused(site, site.bundle("1.1.0"))


def test_a_box_without_our_image_says_what_to_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    file = tmp_path / "sluice.raucb"
    file.touch()
    shown = update(file)
    assert shown.exit_code == 1
    assert "this one was not: take the .deb file" in " ".join(shown.output.split())
    assert update(file, "--signature", str(file)).exit_code == 2


def test_a_box_with_our_image_takes_no_package(site: RaucSite, tmp_path: Path) -> None:
    file = tmp_path / "sluice-gateway_1.1.0_arm64_deb13.deb"
    file.touch()
    assert "take the .raucb file of that version" in refused(site, file)
