"""`make image`: builds the card to flash, an update of it, and what belongs to them, into build/image.

A Debian 13 for arm64 with the gateway's package on it. What Debian's packages give is kept, by a hash of its inputs, so
a change of our own code takes no emulation but the package's own test. Needs root, for the owners of files.
"""

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from image import card, initramfs, native_tools
from image.native_tools import Tools
from systemd import build_deb, deb_signing
from systemd.deb_python import ROOT, TARGETS

HERE = ROOT / "image"
OUTPUT = ROOT / "build" / "image"
SUITE = "trixie"
MIRRORS = (
    f"deb http://deb.debian.org/debian {SUITE} main non-free-firmware",
    f"deb http://deb.debian.org/debian {SUITE}-updates main non-free-firmware",
    f"deb http://deb.debian.org/debian-security {SUITE}-security main non-free-firmware",
)
BOOT_PACKAGES = ("linux-image-arm64", "raspi-firmware", "u-boot-rpi", "busybox-static")
"""Packages that are unpacked and not installed: their scripts want a boot partition, or make an initramfs."""
TARGET = next(target for target in TARGETS if str(target) == "arm64_deb13")
COMPATIBLE = "sluice-arm64"
BOOT_MB, ROOT_MB, DATA_MB = 128, 640, 64
ROOT_UUID = "5711ce00-0000-4000-8000-000000000001"
DATA_UUID = "5711ce00-0000-4000-8000-000000000002"
UNITS_ON = ("systemd-networkd", "systemd-resolved", "systemd-timesyncd", "sluice", "sluice-provision", "avahi-daemon")
UNITS_ON_OURS = ("sluice-grow", "sluice-trial", "sluice-dialog")
UNITS_OFF = ("ssh.service", "ssh.socket", "wpa_supplicant.service", "systemd-networkd-wait-online.service")
UNITS_OFF += ("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer")
NO_BOARDS_MODULES = (
    *(
        "drivers/gpu",
        "drivers/media",
        "drivers/infiniband",
        "drivers/staging",
        "drivers/iio",
        "drivers/isdn",
        "drivers/ata",
    ),
    *(
        "drivers/nvme",
        "drivers/accel",
        "drivers/crypto",
        "drivers/mtd",
        "drivers/target",
        "drivers/firewire",
        "drivers/edac",
    ),
    *("drivers/scsi/mpt3sas", "drivers/scsi/lpfc", "drivers/scsi/qla2xxx", "drivers/net/ethernet/mellanox", "sound"),
    *("drivers/net/ethernet/intel", "drivers/net/ethernet/chelsio", "drivers/net/ethernet/qlogic", "drivers/comedi"),
    *("drivers/net/wireless/ath", "drivers/net/wireless/intel", "drivers/net/wireless/marvell", "drivers/infiniband"),
    *("fs/btrfs", "fs/ocfs2", "fs/gfs2", "fs/xfs", "fs/f2fs", "fs/bcachefs", "fs/ceph", "fs/smb", "fs/nfs", "fs/nfsd"),
)
"""Folders of kernel modules that none of our boards has a use for."""


@dataclass(frozen=True, slots=True)
class Keys:
    """A key and its certificate, which sign bundles."""

    key: Path
    certificate: Path


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> None:
    subprocess.run(list(map(str, command)), cwd=cwd, env={**os.environ, **environment}, check=True)


# -- what Debian gives ------------------------------------------------------------------------------


def base_tree(output: Path) -> Path:
    """Return the tar file of Debian's packages, installed for arm64. Made once for its inputs: minutes of emulation."""
    inputs = [(HERE / name).read_bytes() for name in ("packages.txt", "install_packages.sh")]
    digest = hashlib.sha256(b"\0".join([*inputs, repr((MIRRORS, BOOT_PACKAGES)).encode()])).hexdigest()[:16]
    made = output / f"debian-{digest}.tar"
    if made.exists():
        return made
    _need_binfmt()
    packages = [line for line in (HERE / "packages.txt").read_text().split("\n") if line and not line.startswith("#")]
    hook = f'{HERE}/install_packages.sh "$1" {" ".join(packages)} -- {" ".join(BOOT_PACKAGES)}'
    command = ["mmdebstrap", "--quiet", "--mode=root", "--arch=arm64", "--variant=essential", "--format=tar"]
    command += ['--aptopt=APT::Install-Recommends "false"', "--skip=cleanup/apt", f"--essential-hook={hook}"]
    for unread in ("man", "locale", "doc", "info"):
        command.append(f"--dpkgopt=path-exclude=/usr/share/{unread}/*")
    command.append("--dpkgopt=path-include=/usr/share/doc/*/copyright")
    part = made.with_suffix(".part.tar")
    run(*command, SUITE, part, *MIRRORS)
    part.rename(made)
    return made


def _need_binfmt() -> None:
    """See that this kernel runs arm64 programs by qemu. Ends the program with a message if it does not."""
    if os.uname().machine == "aarch64":
        return
    folder, known = Path("/proc/sys/fs/binfmt_misc"), Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
    if not (folder / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", folder], capture_output=True, check=False)
    # In a container nobody has done this at the start.
    if not (folder / "qemu-aarch64").exists() and (folder / "register").exists() and known.exists():
        (folder / "register").write_bytes(known.read_bytes())
    if not (folder / "qemu-aarch64").exists():
        sys.exit(
            "this machine does not run arm64 programs: make image needs qemu-user-static, and a kernel with binfmt_misc"
            " that this user may mount. Build on a machine of your own, or on arm64"
        )


# -- the root ---------------------------------------------------------------------------------------


def make_root(base: Path, tools: Tools, release: build_deb.Release, keys: Keys, root: Path) -> str:
    """Make the tree of a root; return its kernel's version."""
    run("tar", "--extract", "--file", base, "--directory", root, "--numeric-owner", "--xattrs")
    boot_packages = root / "boot-packages"
    linux = _unpack_boot_packages(boot_packages)
    kernel = next((linux / "usr/lib/modules").iterdir()).name
    shutil.copytree(linux / "usr/lib/modules", root / "usr/lib/modules", symlinks=True, dirs_exist_ok=True)
    (root / "boot").mkdir(exist_ok=True)
    shutil.copy(linux / "boot" / f"vmlinuz-{kernel}", root / "boot/vmlinuz")
    _trim(root, kernel)
    run("depmod", "-b", root, "-F", linux / "boot" / f"System.map-{kernel}", kernel)
    _install_gateway(root, tools, release)
    for folder in ("usr/lib/python3", f"usr/lib/python{TARGET.python}"):
        tools.compile_python(root, root / folder)
    run("systemd-hwdb", f"--root={root}", "update", "--usr")
    _make_certificates(root)
    _configure(root, release.version, keys)
    initramfs.make(root, boot_packages / "busybox-static", kernel, root / "boot/initrd.img", release.epoch_s)
    shutil.rmtree(boot_packages)
    return kernel


def _unpack_boot_packages(folder: Path) -> Path:
    """Unpack the packages in a folder, each into one of its name; return the kernel's."""
    for package in sorted(folder.glob("*.deb")):
        run("dpkg-deb", "--extract", package, folder / package.name.partition("_")[0])
    return next(found for found in folder.glob("linux-image-*") if (found / "boot").is_dir())


def _trim(root: Path, kernel: str) -> None:
    for name in NO_BOARDS_MODULES:
        shutil.rmtree(root / "usr/lib/modules" / kernel / "kernel" / name, ignore_errors=True)
    for name in ("var/cache/apt", "var/lib/apt/lists", "usr/share/info"):
        shutil.rmtree(root / name, ignore_errors=True)


def _install_gateway(root: Path, tools: Tools, release: build_deb.Release) -> None:
    """Install the gateway's package: unpacked and compiled natively, and tested by its own script."""
    package = build_deb.build(TARGET, release, OUTPUT / "deb")
    run("dpkg", f"--root={root}", "--force-architecture", "--force-depends", "--no-triggers", "--unpack", package)
    tools.compile_python(root, root / build_deb.LIBRARY)
    script = root / "var/lib/dpkg/info" / f"{build_deb.PACKAGE}.postinst"
    whole = script.read_text()
    script.write_text("".join(line for line in whole.splitlines(keepends=True) if "compileall" not in line))
    run("chroot", root, "dpkg", "--configure", build_deb.PACKAGE, DEBIAN_FRONTEND="noninteractive", LC_ALL="C.UTF-8")
    script.write_text(whole)


def _make_certificates(root: Path) -> None:
    """What update-ca-certificates does, without emulation."""
    folder, names = root / "etc/ssl/certs", []
    for certificate in sorted((root / "usr/share/ca-certificates").rglob("*.crt")):
        place = folder / f"{certificate.stem}.pem"
        place.unlink(missing_ok=True)
        place.symlink_to(f"/{certificate.relative_to(root)}")
        names.append(certificate)
    (folder / "ca-certificates.crt").write_text("".join(name.read_text() for name in names))
    run("openssl", "rehash", folder)


def _configure(root: Path, version: str, keys: Keys) -> None:
    shutil.copytree(HERE / "root", root, symlinks=True, dirs_exist_ok=True)
    shutil.copy(keys.certificate, root / "usr/share/sluice/image-keys.pem")
    release = root / "usr/lib/os-release"
    release.write_text(f'{release.read_text()}IMAGE_ID=sluice\nIMAGE_VERSION="{version}"\n')
    for folder in ("data", "boot/firmware", *(root / "usr/lib/sluice-image/state-folders").read_text().split()):
        (root / folder).mkdir(parents=True, exist_ok=True)
    # Each box makes its own.
    (root / "etc/machine-id").write_text("")
    (root / "var/lib/dbus/machine-id").unlink(missing_ok=True)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/hostname").write_text("sluice\n")
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/resolv.conf").symlink_to("/run/systemd/resolve/stub-resolv.conf")
    run("systemctl", f"--root={root}", "--quiet", "enable", *UNITS_ON, *UNITS_ON_OURS)
    run("systemctl", f"--root={root}", "--quiet", "disable", *UNITS_OFF)


# -- the card ---------------------------------------------------------------------------------------


def make_boot_folder(folder: Path, base_root: Path, linux: Path) -> None:
    """The boot partition: Raspberry Pi's firmware, U-Boot, the slot script, and the examples."""
    firmware = base_root / "raspi-firmware/usr/lib/raspi-firmware"
    for name in ("bootcode.bin", "start.elf", "fixup.dat", "start4.elf", "fixup4.dat"):
        shutil.copy(firmware / name, folder / name)
    shutil.copytree(firmware / "overlays", folder / "overlays")
    for tree in (linux / "usr/lib").glob("linux-image-*/broadcom/bcm27*.dtb"):
        shutil.copy(tree, folder / tree.name)
    shutil.copy(base_root / "u-boot-rpi/usr/lib/u-boot/rpi_arm64/u-boot.bin", folder / "u-boot.bin")
    card.make_script(folder / "boot.scr", HERE / "boot.cmd")
    for file in (HERE / "boot").iterdir():
        shutil.copy(file, folder / file.name)


def settle(tree: Path, epoch_s: int) -> None:
    """Give every file of a tree one time."""
    for path in [tree, *tree.rglob("*")]:
        os.utime(path, (epoch_s, epoch_s), follow_symlinks=False)


def pack_tree(tree: Path, tar: Path, epoch_s: int) -> None:
    """Pack a tree for mke2fs: in the order of its names, with one time."""
    command = ["tar", "--create", "--file", tar, "--directory", tree, "--sort=name", "--numeric-owner", "--xattrs"]
    run(*command, f"--mtime=@{epoch_s}", "--format=posix", "--pax-option=delete=atime,delete=ctime", ".")


def manifest(raw: Path, packed: Path, release: build_deb.Release) -> str:
    """Write what Raspberry Pi Imager needs to offer its dialog for an image of ours."""
    made = datetime.fromtimestamp(release.epoch_s, UTC)
    entry = {
        "name": f"Sluice {release.version}",
        "description": "Edge gateway: MQTT and serial in, Kafka out",
        "url": packed.name,
        "release_date": f"{made:%Y-%m-%d}",
        "extract_size": raw.stat().st_size,
        "extract_sha256": sha256(raw),
        "image_download_size": packed.stat().st_size,
        "image_download_sha256": sha256(packed),
        "devices": ["pi3-64bit", "pi4-64bit"],
        "architecture": "armv8",
        "init_format": "cloudinit",
    }
    return json.dumps({"os_list": [entry]}, indent=1) + "\n"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compress(source: Path, target: Path) -> None:
    with source.open("rb") as file, lzma.open(target, "wb", preset=1) as packed:
        shutil.copyfileobj(file, packed, 1 << 20)


def make_bundle(root_image: Path, version: str, keys: Keys, target: Path) -> None:
    """Make the update: a root in RAUC's signed form."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        os.link(root_image, Path(scratch, "root.img"))
        Path(scratch, "manifest.raucm").write_text(
            f"[update]\ncompatible={COMPATIBLE}\nversion={version}\n\n[bundle]\nformat=verity\n\n[image.root]\n"
            "filename=root.img\n"
        )
        target.unlink(missing_ok=True)
        run("rauc", f"--cert={keys.certificate}", f"--key={keys.key}", "bundle", scratch, target)


def own_keys(folder: Path) -> Keys:
    """Keys that sign bundles; made if there are none. RAUC takes X.509, so the .deb's Ed25519 key does not do."""
    keys = Keys(folder / "image.key", folder / "image.pem")
    if not keys.key.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
        ]
        command += ["-days", "36500", "-subj", "/CN=Sluice images", "-keyout", str(keys.key)]
        subprocess.run([*command, "-out", str(keys.certificate)], umask=0o077, check=True, capture_output=True)
    return keys


def main(arguments: Sequence[str] | None = None) -> None:
    """Build everything."""
    parser = argparse.ArgumentParser(prog="python -m image.build_image", description=__doc__)
    parser.add_argument("--version", help="instead of the one that follows from pyproject.toml and the commit")
    parser.add_argument("--signing-key", type=Path, help="an Ed25519 key in PEM, for the package and the image")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--raw", action="store_true", help="leave out the compressed image: for tests")
    given = parser.parse_args(arguments)
    if os.geteuid() != 0:
        sys.exit("make image gives files their owners: run it as root")
    output: Path = given.output
    output.mkdir(parents=True, exist_ok=True)
    release = build_deb.prepare(given.version, given.signing_key)
    keys = own_keys((given.signing_key or ROOT / deb_signing.OWN_KEY).parent)
    base, tools = base_tree(OUTPUT), native_tools.get(OUTPUT, SUITE)
    image = output / f"sluice-{release.version}-arm64.img"
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        build(Path(scratch), image, Inputs(base, tools, release, keys))
    print(f"{image}  {image.stat().st_size / 1e6:.0f} MB")
    if not given.raw:
        publish(image, release)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an image is made of."""

    base: Path
    tools: Tools
    release: build_deb.Release
    keys: Keys


def build(scratch: Path, image: Path, inputs: Inputs) -> None:
    """Build a card and its update beside it, with the help of an empty folder."""
    epoch_s, tools = inputs.release.epoch_s, inputs.tools
    root, boot, empty = (scratch / name for name in ("root", "boot", "empty"))
    for folder in (root, boot, empty):
        folder.mkdir()
    run("tar", "--extract", "--file", inputs.base, "--directory", scratch, "./boot-packages")
    linux = _unpack_boot_packages(scratch / "boot-packages")
    make_boot_folder(boot, scratch / "boot-packages", linux)
    settle(boot, epoch_s)
    make_root(inputs.base, tools, inputs.release, inputs.keys, root)
    write_packages(root, image.with_suffix(".packages"))
    for tree in (root, empty):
        pack_tree(tree, tree.with_suffix(".tar"), epoch_s)
    root_image, data_image, boot_image = (scratch / name for name in ("root.ext4", "data.ext4", "boot.fat"))
    plain = ("-O", "^has_journal", "-m", "0")
    tools.make_ext4(root_image, ROOT_MB, root.with_suffix(".tar"), ROOT_UUID, epoch_s, *plain)
    tools.make_ext4(data_image, DATA_MB, empty.with_suffix(".tar"), DATA_UUID, epoch_s, "-m", "1")
    card.make_fat(boot_image, BOOT_MB, boot)
    partitions = [card.Partition(card.FAT32, BOOT_MB, boot_image)]
    partitions += [card.Partition(card.LINUX, ROOT_MB, root_image)] * 2
    card.make_card(image, [*partitions, card.Partition(card.LINUX, DATA_MB, data_image)])
    make_bundle(root_image, inputs.release.version, inputs.keys, image.with_suffix(".raucb"))


def publish(image: Path, release: build_deb.Release) -> None:
    """Compress an image, and write its digest, its signature and Raspberry Pi Imager's manifest."""
    packed = image.with_suffix(".img.xz")
    compress(image, packed)
    (image.parent / "sluice.rpi-imager-manifest").write_text(manifest(image, packed, release))
    image.unlink()
    packed.with_name(f"{packed.name}.sha256").write_text(f"{sha256(packed)}  {packed.name}\n")
    deb_signing.sign(packed, release.private_key)
    print(f"{packed}  {packed.stat().st_size / 1e6:.0f} MB")


def write_packages(root: Path, path: Path) -> None:
    """Write which packages of Debian's are inside, at which versions."""
    shown = subprocess.run(
        ["dpkg-query", f"--admindir={root}/var/lib/dpkg", "--show", "--showformat=${Package} ${Version}\n"],
        capture_output=True,
        check=True,
    )
    path.write_bytes(shown.stdout)


if __name__ == "__main__":
    main()
