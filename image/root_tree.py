"""Makes the tree of a root: Debian's packages, the kernel, the gateway's package, and our own settings."""

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from image import base_tree, initramfs, quiet
from image.native_tools import Tools
from systemd import build_deb
from systemd.deb_python import TARGETS

HERE = Path(__file__).parent
TARGET = next(target for target in TARGETS if str(target) == "arm64_deb13")
TRUSTED = "usr/share/sluice/image-keys.pem"
"""Certificates of those whose bundles a box takes."""
UNITS_ON = ("systemd-networkd", "systemd-resolved", "systemd-timesyncd", "sluice", "sluice-provision", "avahi-daemon")
UNITS_ON_OURS = ("sluice-fleet.timer", "sluice-grow", "sluice-trial", "sluice-dialog", "sluice-network-report.timer")
UNITS_OFF = (
    "ssh.service",
    "ssh.socket",
    "wpa_supplicant.service",
    "systemd-networkd-wait-online.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
)
UNITS_MASKED = (
    "ldconfig.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "systemd-update-done.service",
)
"""Units that would rebuild at each start what the root has, or has no use for."""
UNUSED = (
    "usr/lib/systemd/system-generators/systemd-ssh-generator",
    "usr/lib/udev/hwdb.bin",
    "usr/lib/udev/hwdb.d",
    "usr/share/info",
    "var/cache/apt",
    "var/lib/apt/lists",
)
"""What no box needs. The hardware database has names of devices for people, and 20 MB."""
MACHINE_ID = "var/lib/dbus/machine-id"


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a root is made of."""

    base: Path
    """Tar file of Debian's packages."""
    tools: Tools
    release: build_deb.Release
    certificate: Path
    """Certificate of the key that signs bundles."""


def unpack_boot_packages(base: Path, folder: Path) -> list[Path]:
    """Unpack the packages that are not installed, each into a folder of its name. Returns the .deb files."""
    command: list[str | Path] = ["tar", "--extract", "--file", base, "--directory", folder, "--strip-components=2"]
    subprocess.run([*command, f"./{base_tree.BOOT_FOLDER}"], check=True)
    packages = sorted(folder.glob("*.deb"))
    for package in packages:
        subprocess.run(["dpkg-deb", "--extract", package, folder / package.name.partition("_")[0]], check=True)
    return packages


def linux_of(boot_packages: Path) -> Path:
    """Return the folder of the kernel's package."""
    return next(found for found in boot_packages.glob("linux-image-*") if found.is_dir())


def make(root: Path, inputs: Inputs, boot_packages: Path, output: Path) -> None:
    """Make the tree of a root in an empty folder; `output` keeps the gateway's package."""
    command: list[str | Path] = ["tar", "--extract", "--file", inputs.base, "--directory", root, "--numeric-owner"]
    subprocess.run([*command, "--xattrs", "--xattrs-include=*", f"--exclude=./{base_tree.BOOT_FOLDER}"], check=True)
    linux = linux_of(boot_packages)
    kernel = next((linux / "usr/lib/modules").iterdir()).name
    _add_kernel(root, linux, kernel)
    for name in UNUSED:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).unlink(missing_ok=True)
    # What Wi-Fi needs beside Debian's firmware-brcm80211.
    shutil.copytree(boot_packages / "raspi-firmware/usr/lib/firmware", root / "usr/lib/firmware", dirs_exist_ok=True)
    for package in boot_packages.iterdir():
        for copyright_file in package.glob("usr/share/doc/*/copyright"):
            place = root / copyright_file.relative_to(package)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(copyright_file, place)
    _install_gateway(root, inputs, output)
    make_certificates(root)
    _configure(root, inputs)
    initramfs.make(root, boot_packages / "busybox-static", kernel, root / "boot/initrd.img", inputs.release.epoch_s)


def _add_kernel(root: Path, linux: Path, kernel: str) -> None:
    modules = root / "usr/lib/modules" / kernel
    shutil.copytree(linux / "usr/lib/modules" / kernel, modules, symlinks=True)
    unused = (HERE / "unused_modules.txt").read_text().splitlines()
    for name in unused:
        if name and not name.startswith("#"):
            shutil.rmtree(modules / "kernel" / name, ignore_errors=True)
    (root / "boot").mkdir(exist_ok=True)
    shutil.copy(linux / "boot" / f"vmlinuz-{kernel}", root / "boot/vmlinuz")
    subprocess.run(["depmod", "-b", root, "-F", linux / "boot" / f"System.map-{kernel}", kernel], check=True)


def _install_gateway(root: Path, inputs: Inputs, output: Path) -> None:
    """Install the gateway's package: unpacked and compiled natively, and tested by its own script under emulation.

    What that script does by Perl takes long there, and is for a box whose packages are upgraded: `_configure` switches
    units on.
    """
    # It is unpacked at once, and goes nowhere.
    package = build_deb.build(TARGET, replace(inputs.release, xz_level=0), output)
    unpack: list[str | Path] = [
        "dpkg",
        f"--root={root}",
        "--force-architecture",
        "--force-depends",
        "--no-triggers",
        "--unpack",
    ]
    quiet.run([*unpack, package])
    inputs.tools.compile_python(root, root / build_deb.LIBRARY)
    script = root / "var/lib/dpkg/info" / f"{build_deb.PACKAGE}.postinst"
    whole = script.read_text()
    script.write_text(for_emulation(whole))
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
    quiet.run(["chroot", root, "dpkg", "--configure", build_deb.PACKAGE], environment)
    script.write_text(whole)


def for_emulation(script: str) -> str:
    """The part of the package's script that has to run where it was not run natively."""
    lines = (line for line in script.splitlines(keepends=True) if "compileall" not in line)
    return "".join(lines).replace("deb-systemd-helper", ":")


def make_certificates(root: Path) -> None:
    """Trust the authorities that Debian does, as update-ca-certificates would."""
    folder = root / "etc/ssl/certs"
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    for certificate in certificates:
        place = folder / f"{certificate.stem}.pem"
        place.unlink(missing_ok=True)
        # Not from the root on, so that it leads there already here.
        place.symlink_to(os.path.relpath(certificate, folder))
    subprocess.run(["openssl", "rehash", folder], check=True)
    (folder / "ca-certificates.crt").write_text("".join(certificate.read_text() for certificate in certificates))


def _configure(root: Path, inputs: Inputs) -> None:
    shutil.copytree(HERE / "root", root, symlinks=True, dirs_exist_ok=True)
    shutil.copy(HERE / "network_report.py", root / "usr/lib/sluice-image/network-report")
    shutil.copy(inputs.certificate, root / TRUSTED)
    told = root / "usr/lib/os-release"
    told.write_text(f'{told.read_text()}IMAGE_ID=sluice\nIMAGE_VERSION="{inputs.release.version}"\n')
    for folder in ("data", "boot/firmware", *(root / "usr/lib/sluice-image/state-folders").read_text().split()):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for log in (root / "var/log").rglob("*.log"):
        log.unlink()
    # Each box makes its own.
    (root / "etc/machine-id").write_text("")
    (root / MACHINE_ID).unlink(missing_ok=True)
    (root / MACHINE_ID).symlink_to("/etc/machine-id")
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/hostname").write_text("sluice\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 sluice\n::1 localhost ip6-localhost\n")
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/resolv.conf").symlink_to("/run/systemd/resolve/stub-resolv.conf")
    _systemctl(root, "enable", *UNITS_ON, *UNITS_ON_OURS)
    _systemctl(root, "disable", *UNITS_OFF)
    _systemctl(root, "mask", *UNITS_MASKED)


def _systemctl(root: Path, *command: str) -> None:
    subprocess.run(["systemctl", f"--root={root}", "--quiet", *command], check=True)
